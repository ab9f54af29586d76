"""Ctrl-C is delivered after the statements that belong together, not inside them."""

import signal

import pytest

from engine.interrupts import interrupts_held_back


def test_an_interrupt_inside_arrives_at_the_end():
    steps = []

    def work():
        with interrupts_held_back():
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_interrupt_no_effect():
    with interrupts_held_back():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
