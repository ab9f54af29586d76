"""An engine's whole state on disk: save it in the middle of a batch, go on in another process.

    directory/state.json   format, identity of the engine, checksums of the files below
    directory/host.json    requests with their tokens so far, queue, aborts, dispatches on their way
    directory/arrays/      batch state, cache, and what those dispatches bring, by dotted path

Saving disturbs nothing: dispatches stay on their way and are saved as such. Invariant: an engine of
the same identity that loads the directory makes the same dispatches and gives the same tokens, to
the bit, as the one that saved it. The directory is complete or it is not there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.checks import check_kind
from engine.choice_json import decode_choice, dumps, encode_choice
from engine.dispatch import Choice, Sent, Snapshot
from engine.engine import Engine
from engine.identity import differences
from models.checkpoint.arrays import (
    check_files,
    checksums,
    new_directory,
    read_arrays,
    write_arrays,
)
from models.params import flatten, unflatten

MARKER, HOST, ARRAYS = "state.json", "host.json", "arrays"
FORMAT = 1

Requests = Mapping[str, Sequence[Choice]]


def save(
    engine: Engine,
    directory: str | Path,
    *,
    also: Requests | None = None,
    note: Any = None,
    overwrite: bool = False,
) -> None:
    """Write the state beside its place, then give it its name.

    `also` are requests that have ended but whose outputs somebody has yet to see; `note` is any
    JSON value. Both come back from `load`.
    """
    check_kind("path", directory, str | Path, "a path")
    snapshot, now_s = engine.snapshot(), engine.clock()
    requests = dict(also or {}) | snapshot.requests
    host = {
        "requests": {id_: [encode_choice(c, now_s) for c in cs] for id_, cs in requests.items()},
        "unfinished": list(snapshot.requests),
        "queue": snapshot.queue,
        "out": snapshot.out,
        "aborts": snapshot.aborts,
        "next_uid": snapshot.next_uid,
        "in_flight": [[sent.sent_s - now_s, sent.budget] for sent in snapshot.in_flight],
        "note": note,
    }
    with new_directory(Path(directory).absolute(), MARKER, overwrite=overwrite) as work:
        (work / HOST).write_text(dumps(host), encoding="utf-8")
        write_arrays(work / ARRAYS, flatten(_arrays(snapshot)))
        marker = {"format": FORMAT, "identity": engine.identity(), "checksums": checksums(work)}
        (work / MARKER).write_text(json.dumps(marker, indent=1))


def load(
    engine: Engine, directory: str | Path, *, accept: Callable[[Requests], None] = lambda _: None
) -> tuple[dict[str, list[Choice]], Any]:
    """Put an idle engine into the saved state: (requests by id, note).

    ValueError, with the engine still idle, if the directory is damaged or another engine's, or if
    `accept` raises one: the caller's look at the requests. The engine's own cache is given up
    before the saved one is read: there may be no room for both.
    """
    check_kind("path", directory, str | Path, "a path")
    directory = Path(directory).absolute()
    if engine.has_unfinished:
        raise ValueError("the engine has unfinished requests; load into one that is idle")
    if engine.recorder is not None:
        raise ValueError("a record begins with an empty engine; load without recording")
    _check_marker(engine, directory)
    host, requests = _read_host(engine, directory)
    accept(requests)
    arrays = _restore_arrays(engine, directory, [budget for _, budget in host["in_flight"]])
    now_s = engine.clock()
    emissions = jax.tree.map(np.asarray, arrays["in_flight"])
    in_flight = [
        Sent(age_s + now_s, budget, emitted)
        for (age_s, budget), emitted in zip(host["in_flight"], emissions, strict=True)
    ]
    engine.restore(
        Snapshot(
            cache=arrays["cache"],
            state=arrays["state"],
            in_flight=in_flight,
            requests={id_: requests[id_] for id_ in host["unfinished"]},
            queue=host["queue"],
            out=host["out"],
            aborts=host["aborts"],
            next_uid=host["next_uid"],
        )
    )
    return requests, host["note"]


def _arrays(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "state": snapshot.state,
        "cache": snapshot.cache,
        "in_flight": [sent.emitted for sent in snapshot.in_flight],
    }


def _check_marker(engine: Engine, directory: Path) -> None:
    path = directory / MARKER
    if not path.is_file():
        raise ValueError(f"{directory} holds no saved engine: it has no {MARKER}")
    try:
        marker = json.loads(path.read_bytes())
        if marker["format"] != FORMAT:
            raise ValueError(f"format {marker['format']!r}, this version reads {FORMAT}")
        found = differences(marker["identity"], engine.identity())
        expected = dict(marker["checksums"])
        if not {HOST} < set(expected):
            raise ValueError("it names no files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; save it again") from error
    if found:
        raise ValueError(
            f"{directory} was saved by another engine: {'; '.join(found[:5])}; make one with the "
            "same model and settings"
        )
    check_files(directory, expected)


def _read_host(engine: Engine, directory: Path) -> tuple[dict, dict[str, list[Choice]]]:
    now_s = engine.clock()
    extra_like = engine.model.no_sample(1).extra
    score_like = engine.model.no_scores(1)
    extra_like, score_like = jax.tree.map(lambda x: np.asarray(x)[0], (extra_like, score_like))
    try:
        host = json.loads((directory / HOST).read_bytes())
        requests = {
            id_: [decode_choice(c, now_s, extra_like, score_like) for c in choices]
            for id_, choices in host["requests"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{directory / HOST} cannot be read: {error!r}; save it again") from error
    return host, requests


def _restore_arrays(engine: Engine, directory: Path, budgets: Sequence[int]) -> dict[str, Any]:
    snapshot = engine.snapshot()
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or here)

    emissions = [engine.emission_like(budget) for budget in budgets]
    target = jax.tree.map(like, _arrays(snapshot) | {"in_flight": emissions})
    for leaf in jax.tree.leaves((snapshot.cache, snapshot.state)):
        leaf.delete()
    try:
        return unflatten(target, read_arrays(directory / ARRAYS, flatten(target)))
    except BaseException:
        zeros = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype, device=t.sharding), target)
        state, uid = engine.empty_state(), snapshot.next_uid
        engine.restore(Snapshot(zeros["cache"], state, [], {}, [], [], [], uid))
        raise
