"""Ctrl-C is delivered after the statements that belong together, not inside them."""

import signal

import pytest

from engine import beam_search
from engine.beam_search import BeamSearchParams
from engine.interrupts import interrupts_held_back
from engine.sampling_params import SamplingParams
from tests.engine.test_beam_search import PROMPTS, engine_of, reference


@pytest.fixture(autouse=True)
def interruptible():
    """A process started in the background of a shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


def interrupting(function):
    """Ctrl-C just after the second call."""
    calls = []

    def call(*args, **fields):
        result = function(*args, **fields)
        calls.append(result)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return result

    return call


def serve(engine):
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize("part", ["_steps", "_finished"])
def test_an_interrupt_while_tokens_are_read_loses_none(part):
    engine = engine_of()
    params = SamplingParams(temperature=0, max_tokens=9, detokenize=False)
    choices = [engine.add_request(str(i), PROMPTS[i], params)[0] for i in range(3)]
    counted = getattr(engine, part)
    counted.add = interrupting(counted.add)
    with pytest.raises(KeyboardInterrupt):
        serve(engine)
    serve(engine)
    for choice, prompt in zip(choices, PROMPTS, strict=False):
        assert tuple(choice.token_ids) == reference(prompt, 11, 1, 9)[0][0][0]
    assert engine.all_pages_are_free


@pytest.mark.parametrize("where", ["begins", "ends"])
def test_an_interrupt_while_a_search_begins_or_ends_leaves_nothing(where):
    engine = engine_of()
    if where == "begins":
        engine.add_request = interrupting(engine.add_request)
    else:
        engine._finished.add = interrupting(engine._finished.add)
    requests = [(prompt, 0) for prompt in PROMPTS[:2]]
    ids = iter("ab")
    with pytest.raises(KeyboardInterrupt):
        list(beam_search.run(engine, requests, BeamSearchParams(3, 3), lambda: next(ids)))
    engine.step()
    assert not engine.has_unfinished
    assert engine.all_pages_are_free
