"""Holding back Ctrl-C over a few statements that must happen together."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """An interrupt that arrives inside is delivered at the end. Only the main thread gets any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, or the system's default: not Python's to hold back
        yield
        return
    caught = []
    signal.signal(signal.SIGINT, lambda *details: caught.append(details))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            before(*caught[0])
