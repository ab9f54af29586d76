"""What the host has for the device: choices that wait, uids to abort, what a search decided.

In: choices as requests bring them, ends from outside, forks. Out: one `Dispatch` at a time, which
fits an inbox. Invariant: an unfinished choice is in `queue` until it is sent and in `out` from then
on, and no more are out than there are slots.
"""

import itertools
from bisect import insort
from collections import deque
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.dispatch import Choice, Dispatch, Fork


class Outbox:
    """`queue` is in the order of (priority, arrival), `out` goes by uid, `aborts` are uids."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self.queue: deque[Choice] = deque()
        self.out: dict[int, Choice] = {}
        self.aborts: list[int] = []
        self.forks: list[Fork] = []

    def __bool__(self) -> bool:
        """Whether the device has anything to do or to hear."""
        return bool(self.queue or self.out or self.aborts)

    def add(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            insort(self.queue, choice, key=lambda c: c.priority)  # after equal ones

    def withdraw(self, choice: Choice) -> None:
        """An unfinished choice ends from outside: it is not sent, or the device is told."""
        if self.out.pop(choice.uid, None) is None:
            self.queue.remove(choice)
        else:
            self.aborts.append(choice.uid)

    @property
    def unanswered_tokens(self) -> int:
        """Prompt tokens of the choices that have no first token yet, counted until they fill a
        round: the queue may be long."""
        tokens = 0
        for choice in itertools.chain(self.out.values(), self.queue):
            tokens += 0 if choice.token_ids else len(choice.prompt_ids)
            if tokens >= self._config.token_budget:
                break
        return tokens

    @property
    def awaits_prompt_scores(self) -> bool:
        """Whether scores of prompts may be on their way; nobody reads them otherwise."""
        return any(c.prompt_scores and not c.token_ids for c in self.out.values())

    def take(self, rounds: int, budget: int) -> Dispatch:
        """As much as one inbox holds; what is left goes out later."""
        size = self._config.inbox_size
        aborts, self.aborts = self.aborts[:size], self.aborts[size:]
        forks, self.forks = self.forks, []
        return Dispatch(self._arrivals(), aborts, rounds, budget, forks)

    def _arrivals(self) -> list[Choice]:
        """The head of the queue, as much as slots and one inbox hold."""
        config, chosen, tokens = self._config, [], 0
        # An abort for which this inbox has no room still holds its slot on the device, though it is
        # not `out`. Then the inbox is full of aborts, which free as many slots as can arrive.
        while self.queue and len(chosen) < config.inbox_size:
            choice = self.queue[0]
            tokens += len(choice.prompt_ids)
            full = len(self.out) == config.num_slots
            if full or tokens > config.inbox_tokens:
                break
            self.queue.popleft()
            self.out[choice.uid] = choice
            chosen.append(choice)
        return chosen
