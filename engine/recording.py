"""The record of an engine: every dispatch with all that went in and the tokens that came out.

A file of JSON lines. The first is a header: identity of the engine, versions, and what the caller
says about the model. Each further line is one dispatch: arrivals (prompt, settings, drawn seed),
uids to abort (a choice whose text holds a stop string ends so), forks, rounds, token budget,
and `emitted`, one [round, uid, token, reason] per token or end. Nothing depends on time: the same
dispatches sent again give the same tokens. A line is written when its dispatch has come back.
"""

import json
import platform
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from engine.bounds import MAX_INT32, check_choice
from engine.checks import check_integer, check_kind
from engine.choice_json import decode_request, dumps, encode_request
from engine.commit import Emission
from engine.config import EngineConfig
from engine.dispatch import Dispatch, Fork
from engine.sampling_rows import SamplingLimits
from engine.state import NO_TOKEN, NO_UID, REASONS

FORMAT = 1

Event = tuple[int, int, int, int]  # round of the dispatch, uid, token or NO_TOKEN, reason


def check_record_path(path: str | Path) -> None:
    """Refuses what no record can be written to, and leaves it as it was."""
    check_kind("record", path, str | Path, "a path")
    try:
        existed = Path(path).exists()
        Path(path).open("a").close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"record {path} cannot be written: {reason}; name another file") from error
    if not existed:
        Path(path).unlink()


class FileRecorder:
    """A `Recorder` that writes a record; `about` says what the engine cannot: the model's name.

    An existing file is replaced. Every line is flushed, so a record ends where its process did.
    """

    def __init__(self, path: str | Path, about: Mapping[str, Any] | None = None):
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - as long as the engine
        self._about = dict(about or {})
        self._sent: deque[Dispatch] = deque()

    def begins(self, identity: dict[str, Any]) -> None:
        versions = {"python": platform.python_version(), "jax": jax.__version__}
        device = jax.local_devices()[0].device_kind
        header = {"format": FORMAT, "about": self._about, "identity": identity}
        self._write(header | {"versions": versions, "device": device})

    def sent(self, dispatch: Dispatch) -> None:
        self._sent.append(dispatch)

    def returned(self, emitted: Emission) -> None:
        dispatch = self._sent.popleft()
        self._write(
            {
                "arrivals": [encode_request(choice) for choice in dispatch.arrivals],
                "aborts": dispatch.aborts,
                "forks": [list(fork) for fork in dispatch.forks],
                "rounds": dispatch.rounds,
                "budget": dispatch.budget,
                "emitted": events_of(emitted),
            }
        )

    def _write(self, value: Any) -> None:
        self._file.write(dumps(value) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def events_of(emitted: Emission) -> list[Event]:
    """Tokens and ends of a dispatch in the order of rounds and rows."""
    token_QR, uid_QR, reason_QR = map(
        np.asarray, (emitted.token_R, emitted.uid_R, emitted.reason_R)
    )
    happened = (uid_QR != NO_UID) & ((token_QR >= 0) | (reason_QR > 0))
    return [
        (int(q), int(uid_QR[q, r]), int(token_QR[q, r]), int(reason_QR[q, r]))
        for q, r in np.argwhere(happened)
    ]


@dataclass(frozen=True)
class Record:
    about: dict[str, Any]
    identity: dict[str, Any]
    versions: dict[str, str]
    device: str
    config: EngineConfig
    limits: SamplingLimits
    dispatches: list[Dispatch]
    emitted: list[list[Event]]


def read_record(path: str | Path) -> Record:
    """ValueError names the line that is damaged."""
    lines = Path(path).read_bytes().splitlines()
    if not lines:
        raise ValueError(f"{path} is empty, not a record")
    number = 1
    try:
        header = json.loads(lines[0])
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}, this version reads {FORMAT}")
        parts = ("engine", "limits", "model", "weights")
        identity = {part: header["identity"][part] for part in parts}
        record = Record(
            dict(header["about"]),
            identity,
            dict(header["versions"]),
            str(header["device"]),
            EngineConfig(**identity["engine"]),
            SamplingLimits(**identity["limits"]),
            [],
            [],
        )
        uids: set[int] = set()
        while number < len(lines):
            number += 1
            value = json.loads(lines[number - 1])
            arrivals = [decode_request(request, 0.0) for request in value["arrivals"]]
            forks = [Fork(*fork) for fork in value["forks"]]
            aborts = list(value["aborts"])
            dispatch = Dispatch(arrivals, aborts, value["rounds"], value["budget"], forks)
            _check(dispatch, record.config, record.limits, uids)
            record.dispatches.append(dispatch)
            events = [_event(event, record.config, uids) for event in value["emitted"]]
            record.emitted.append(events)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}, is no line of a record: {error!r}") from error
    if not record.dispatches:
        raise ValueError(f"{path} ends before its first dispatch: there is nothing to replay")
    return record


def _check(
    dispatch: Dispatch, config: EngineConfig, limits: SamplingLimits, uids: set[int]
) -> None:
    """What an engine relies on. `uids` are those that have arrived; this dispatch's are added."""
    arrivals, aborts, forks = dispatch.arrivals, dispatch.aborts, dispatch.forks
    tokens = sum(len(choice.prompt_ids) for choice in arrivals)
    room = len(arrivals) <= config.inbox_size and tokens <= config.inbox_tokens
    room &= len(aborts) <= config.inbox_size and len(forks) <= config.max_num_seqs
    if not room:
        raise ValueError("more arrivals, aborts or forks than the engine's inbox holds")
    check_integer("rounds", dispatch.rounds, 1, config.max_rounds, "as the engine was set up")
    check_integer("budget", dispatch.budget, 1, config.token_budget, "as the engine was set up")
    for uid in (*aborts, *(fork.to_uid for fork in forks), *(fork.from_uid for fork in forks)):
        check_integer("a uid to abort or fork", uid, 0, MAX_INT32, "as it was sent")
        if uid not in uids:
            raise ValueError(f"uid {uid} is to abort or fork, but has not arrived before")
    for fork in forks:
        check_integer("length of a fork", fork.length, 1, config.max_model_len, "as it was sent")
        check_integer("token of a fork", fork.token, NO_TOKEN, limits.vocab_size - 1, "as sent")
    for choice in arrivals:
        check_choice(config, limits, choice)
        if choice.uid in uids or (choice.parent_uid != NO_UID and choice.parent_uid not in uids):
            raise ValueError(
                f"uid {choice.uid} has come before, or parent_uid {choice.parent_uid} has not"
            )
        uids.add(choice.uid)


def _event(values: Iterable[int], config: EngineConfig, uids: set[int]) -> Event:
    q, uid, token, reason = values
    if uid not in uids:
        raise ValueError(f"a token of request {uid}, which never arrived")
    check_integer("round of a token", q, 0, config.max_rounds - 1, "as it was written")
    check_integer("token", token, NO_TOKEN, MAX_INT32, "as it was written")
    check_integer("reason of a token", reason, 0, len(REASONS) - 1, "as it was written")
    return q, uid, token, reason
