"""What the engine keeps on the host: choices while they are out, dispatches on their way.

A request of `n` outputs is `n` choices. A `Dispatch` is all that one call of the device is told. A
`Snapshot` is all that changes while an engine serves: another engine of the same identity goes on
from it as if it were the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine.commit import Emission
from engine.config import EngineConfig
from engine.outputs import RequestTimes
from engine.sampling_params import SamplingParams
from engine.sampling_rows import RowFacts, SamplingLimits, empty_rows, fill_row
from engine.state import NO_UID, BatchState, Inbox, empty_requests, no_forks


@dataclass
class Choice:
    """One of a request's `n` outputs while it is out; token ids as they come."""

    request_id: str
    index: int
    uid: int
    prompt_ids: list[int]
    params: SamplingParams
    facts: RowFacts
    stop_ids: list[int]
    priority: int
    salt: int
    max_len: int
    parent_uid: int
    arrival_s: float
    token_ids: list[int] = field(default_factory=list)
    extras: list = field(default_factory=list)
    prompt_scores: list | None = None  # by position, if it asks; None for what is not there
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_reason: str | None = None

    @property
    def error(self) -> str | None:
        """Why it ended with an error, if it did. The device sends one code for all causes."""
        if self.finish_reason != "error":
            return None
        cause, forbidding = "the network gave NaN or infinity", self.params.forbidding
        if forbidding:
            return f"{', '.join(forbidding)} left no token to choose, or {cause}"
        return f"{cause}; check its weights, or use dtype float32"

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(self.arrival_s, self.started_s, self.first_token_s, self.last_token_s)


def new_choices(
    params: SamplingParams,
    uids: Sequence[int],
    seed: int,
    bad_word_ids: Sequence[Sequence[int]],
    **shared: Any,
) -> list[Choice]:
    """The choices of one request, one per uid; those after the first share its prompt's pages.

    `shared` are the fields of `Choice` that all have in common.
    """
    choices = [
        Choice(
            index=index,
            uid=uid,
            params=params,
            facts=RowFacts(seed, index, bad_word_ids),
            parent_uid=uids[0] if index else NO_UID,
            **shared,
        )
        for index, uid in enumerate(uids)
    ]
    if params.prompt_logprobs is not None:  # asked once, whatever n
        choices[0].prompt_scores = [None] * len(choices[0].prompt_ids)
    return choices


@dataclass(frozen=True)
class Update:
    """News of a choice: how many of its tokens are new; its `finish_reason` says if it ended."""

    choice: Choice
    num_new: int


class Fork(NamedTuple):
    """One entry of `engine.state.Forks`."""

    to_uid: int
    from_uid: int
    length: int
    token: int


@dataclass(frozen=True)
class Dispatch:
    """All that one call of the device gets to know: arrivals, uids to abort, how to run, and what a
    search decided."""

    arrivals: list[Choice]
    aborts: list[int]
    rounds: int
    budget: int
    forks: list[Fork] = field(default_factory=list)


@dataclass(frozen=True)
class Sent:
    """A dispatch on its way: when it went out, its budget, and what it will bring."""

    sent_s: float
    budget: int
    emitted: Emission


class Recorder(Protocol):
    """Told of every dispatch and, in the same order, of what each brought."""

    def begins(self, identity: dict[str, Any]) -> None: ...

    def sent(self, dispatch: Dispatch) -> None: ...

    def returned(self, emitted: Emission) -> None: ...


@dataclass(frozen=True)
class Snapshot:
    """Everything that changes while an engine serves. Arrays and choices are the engine's own.

    `requests` are the unfinished ones; `queue` are uids not yet sent, `out` those on the device.
    """

    cache: Any
    state: BatchState
    in_flight: list[Sent]
    requests: dict[str, list[Choice]]
    queue: list[int]
    out: list[int]
    aborts: list[int]
    next_uid: int


def make_inbox(config: EngineConfig, limits: SamplingLimits, dispatch: Dispatch) -> Inbox:
    """A dispatch as arrays of fixed size; it must fit."""
    A = config.inbox_size
    rows = empty_rows(A, limits)
    requests = empty_requests(A, config.max_stop_ids, rows)
    tokens_Y, start_A, used = np.zeros(config.inbox_tokens, np.int32), np.zeros(A, np.int32), 0
    for a, choice in enumerate(dispatch.arrivals):
        for name in ("uid", "max_len", "priority", "parent_uid", "salt"):
            getattr(requests, name)[a] = getattr(choice, name)
        asks = choice.params.prompt_logprobs is not None and choice.index == 0
        requests.score_prompt[a] = asks
        requests.stop_ids[a, : len(choice.stop_ids)] = choice.stop_ids
        length = len(choice.prompt_ids)
        requests.prompt_len[a], start_A[a] = length, used
        tokens_Y[used : used + length] = choice.prompt_ids
        used += length
        fill_row(requests.sampling, a, choice.params, choice.facts, limits)
    abort_A = np.full(A, NO_UID, np.int32)
    abort_A[: len(dispatch.aborts)] = dispatch.aborts
    forks_F = no_forks(config.max_num_seqs)
    for f, fork in enumerate(dispatch.forks):
        entry = forks_F.to_uid_F, forks_F.from_uid_F, forks_F.length_F, forks_F.token_F
        for array, value in zip(entry, fork, strict=True):
            array[f] = value
    return Inbox(requests, tokens_Y, start_A, abort_A, forks_F)
