"""What the engine keeps on the host: choices while they are out, dispatches on their way.

A request of `n` outputs is `n` choices. A `Dispatch` is all that one call of the device is told. A
`Snapshot` is all that changes while an engine serves: with it, an engine of the same identity goes on
as if it were the first.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.outputs import RequestTimes
from engine.sampling_params import SamplingParams
from engine.sampling_rows import RowFacts
from engine.schedule import Emission
from engine.state import BatchState


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
    def times(self) -> RequestTimes:
        return RequestTimes(self.arrival_s, self.started_s, self.first_token_s, self.last_token_s)


@dataclass(frozen=True)
class Update:
    """News of one choice: how many of its tokens are new, and why it ended if it did."""

    choice: Choice
    num_new: int


@dataclass(frozen=True)
class Dispatch:
    """All that one call of the device gets to know: arrivals, uids to abort, and how to run."""

    arrivals: list[Choice]
    aborts: list[int]
    rounds: int
    budget: int


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
