"""Send a record's dispatches again and compare every token.

In: a record and an empty engine of its sizes. Out: the first token that differs, if one does. The
engine decides nothing here: arrivals, aborts, rounds and budgets are the record's.
"""

from collections import defaultdict
from dataclasses import dataclass

from engine.dispatch import Choice
from engine.engine import Engine
from engine.recording import Event, Record, events_of
from engine.state import NO_TOKEN, REASONS


@dataclass(frozen=True)
class Difference:
    """What the record has and the replay does not. Tokens are ids, ends are words."""

    request_id: str
    choice: int
    position: int
    expected: int | str
    got: int | str

    def __str__(self) -> str:
        return (
            f"request {self.request_id}, choice {self.choice}, output position {self.position}: "
            f"expected {self.expected}, got {self.got}"
        )


@dataclass(frozen=True)
class Replay:
    """`num_open` requests go on where the record ends. `same_schedule`: each token also came in the
    round in which the record has it."""

    num_tokens: int
    num_requests: int
    num_open: int
    difference: Difference | None
    same_schedule: bool


def replay(engine: Engine, record: Record) -> Replay:
    emitted = []
    for dispatch in record.dispatches:
        emission = engine.send(dispatch)
        if engine.recorder is not None:
            engine.recorder.returned(emission)
        emitted.append(events_of(emission))
    return compare(record, emitted)


def compare(record: Record, emitted: list[list[Event]]) -> Replay:
    """Aborted choices are compared as far as both have tokens: their end came from outside."""
    choices = {c.uid: c for dispatch in record.dispatches for c in dispatch.arrivals}
    aborted = {uid for dispatch in record.dispatches for uid in dispatch.aborts}
    expected, got = _by_uid(record.emitted), _by_uid(emitted)
    ended = aborted | {uid for events in record.emitted for _, uid, _, reason in events if reason}
    found: list[tuple[int, Difference]] = []
    for uid, choice in choices.items():
        position = _first_difference(expected[uid], got[uid], uid in aborted)
        if position is not None:
            found.append(_describe(choice, position, expected[uid], got[uid]))
    return Replay(
        num_tokens=sum(token != NO_TOKEN for events in record.emitted for _, _, token, _ in events),
        num_requests=len({choice.request_id for choice in choices.values()}),
        num_open=len({c.request_id for uid, c in choices.items() if uid not in ended}),
        difference=min(found, key=lambda item: item[0])[1] if found else None,
        same_schedule=emitted == record.emitted,
    )


def _by_uid(emitted: list[list[Event]]) -> dict[int, list[tuple[int, int, int]]]:
    """(token, reason, dispatch) of each output position."""
    found = defaultdict(list)
    for i, events in enumerate(emitted):
        for _, uid, token, reason in events:
            found[uid].append((token, reason, i))
    return found


def _first_difference(expected, got, aborted: bool) -> int | None:
    for position, (there, here) in enumerate(zip(expected, got, strict=False)):
        if there[:2] != here[:2]:
            return position
    if len(expected) == len(got) or aborted:
        return None
    return min(len(expected), len(got))


def _describe(choice: Choice, position: int, expected, got) -> tuple[int, Difference]:
    there, here = (e[position] if position < len(e) else None for e in (expected, got))
    when = there[2] if there else here[2]
    if there and here and there[0] == here[0]:
        values = [f"token {e[0]} and then {REASONS[e[1]] or 'more'}" for e in (there, here)]
    else:
        values = ["nothing" if e is None else e[0] for e in (there, here)]
    return when, Difference(choice.request_id, choice.index, position, *values)
