"""A record gives the same tokens again, and the same rounds to a scheduler without a model."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from engine.beam_search import BeamSearchParams
from engine.commit import Emission
from engine.engine import Engine
from engine.recording import FileRecorder, Record, events_of, read_record
from engine.replay import compare, replay
from engine.sampling_params import SamplingParams
from engine.state import ERROR, NO_TOKEN, NO_UID
from engine.trace import trace
from tests.compiling import QUICK
from tests.engine.rule_model import outputs
from tests.engine.test_checkpoint import (
    RULE_VOCAB,
    add_rule_requests,
    letters_llm,
    programs,
    rule_engine,
    serve,
)
from tests.engine.test_llm import PROMPTS

TRACES = Path(__file__).parents[2] / "docs" / "traces"


def recorded_rule_engine(path: Path, **settings) -> Engine:
    plain = rule_engine(**settings)
    recorder = FileRecorder(path, {"model": "rule"})
    cache = plain.snapshot().cache
    engine = Engine(
        *(plain.config, plain.model, None, cache, plain.limits),
        rounds=3,
        compiler_options=QUICK,
        recorder=recorder,
    )
    engine._programs.compiled = programs(**settings)
    return engine


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, dict]:
    path = tmp_path_factory.mktemp("record") / "run.jsonl"
    engine = recorded_rule_engine(path)
    choices = add_rule_requests(engine)
    serve(engine, 5, drop="7")
    serve(engine)
    for _ in range(2):
        engine.step()  # what aborted requests left on its way
    counters = engine.counters()
    assert counters["preemptions"] > 0
    assert counters["page_copies"] > 0
    engine.recorder.close()
    return path, {"choices": choices, "counters": counters}


def test_a_replay_gives_every_token_again(recorded):
    path, run = recorded
    record = read_record(path)
    assert record.config == rule_engine().config
    engine = rule_engine()
    result = replay(engine, record)
    assert result.difference is None
    assert result.same_schedule
    assert result.num_requests == 7  # the eighth was aborted before it was sent
    assert result.num_tokens >= sum(len(c.token_ids) for c in run["choices"])
    assert engine.counters() == run["counters"]


def test_a_replay_writes_the_same_record(recorded, tmp_path):
    path, _ = recorded
    engine = recorded_rule_engine(tmp_path / "again.jsonl")
    replay(engine, read_record(path))
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


def test_the_first_difference_is_named(recorded):
    path, _ = recorded
    record = read_record(path)
    changed = [list(events) for events in record.emitted]
    places = [(i, j) for i, events in enumerate(changed) for j, e in enumerate(events) if e[2] >= 0]
    (i, j), later = places[7], places[20]
    for at_i, at_j in ((i, j), later):
        q, uid, token, reason = changed[at_i][at_j]
        changed[at_i][at_j] = (q, uid, token + 1, reason)
    q, uid, token, _ = record.emitted[i][j]
    earlier = [e for events in record.emitted[:i] for e in events] + record.emitted[i][:j]
    position = sum(e[1] == uid for e in earlier)
    choice = next(c for d in record.dispatches for c in d.arrivals if c.uid == uid)
    difference = compare(record, changed).difference
    assert (difference.request_id, difference.choice) == (choice.request_id, choice.index)
    assert (difference.position, difference.expected, difference.got) == (
        position,
        token,
        token + 1,
    )
    assert f"position {position}: expected {token}, got {token + 1}" in str(difference)
    shorter = [*record.emitted[:-1], record.emitted[-1][:-1]]
    last = [e for events in record.emitted for e in events if e[3]][-1]
    if record.emitted[-1] and record.emitted[-1][-1] == last:
        assert "got nothing" in str(compare(record, shorter).difference)


def test_an_end_without_a_token_is_an_event():
    """Rows of one round: a token, an end by error, a prompt's chunk, and nobody."""
    columns = {"token_R": [5, NO_TOKEN, NO_TOKEN, 7], "uid_R": [1, 2, 3, NO_UID]}
    columns |= {"reason_R": [0, ERROR, 0, 0]}
    emitted = Emission(**{name: np.array([column]) for name, column in columns.items()})
    assert events_of(emitted) == [(0, 1, 5, 0), (0, 2, NO_TOKEN, ERROR)]


def test_another_schedule_with_the_same_tokens_is_no_difference(recorded):
    path, _ = recorded
    record = read_record(path)
    slower = [[(q + 1, *rest) for q, *rest in events] for events in record.emitted]
    result = compare(record, slower)
    assert result.difference is None
    assert not result.same_schedule


def test_a_stop_string_is_an_abort_of_its_dispatch(tmp_path):
    llm = letters_llm(record=tmp_path / "run.jsonl")
    free = SamplingParams(temperature=1, seed=4, max_tokens=30)
    text = llm.generate([PROMPTS[3]], free, use_tqdm=False)[0].outputs[0].text
    stopped = replace(free, stop=[text[5:7]])
    output = llm.generate([PROMPTS[3]], stopped, use_tqdm=False)[0].outputs[0]
    assert output.stop_reason == text[5:7]
    llm.generate([PROMPTS[2]], free, use_tqdm=False)
    record = read_record(tmp_path / "run.jsonl")
    assert [d.aborts for d in record.dispatches if d.aborts] == [[1]]
    result = replay(letters_llm().engine, record)
    assert (result.difference, result.same_schedule) == (None, True)


def test_a_beam_search_replays_with_its_forks(tmp_path):
    llm = letters_llm(record=tmp_path / "run.jsonl")
    llm.beam_search([PROMPTS[5]], BeamSearchParams(3, 6))
    llm.generate([PROMPTS[2]], SamplingParams(seed=1, max_tokens=2), use_tqdm=False)
    record = read_record(tmp_path / "run.jsonl")
    assert sum(len(dispatch.forks) for dispatch in record.dispatches) >= 3 * 5
    result = replay(letters_llm().engine, record)
    assert (result.difference, result.same_schedule) == (None, True)


# ---- rounds --------------------------------------------------------------------------------------


@lru_cache
def rounds_of(path: Path) -> tuple[Record, list]:
    record = read_record(path)
    return record, trace(record)


def test_the_trace_is_the_recorded_run(recorded):
    path, run = recorded
    record, rounds = rounds_of(path)
    counters, slots = run["counters"], [s for r in rounds for s in r.slots]
    assert len(rounds) == counters["rounds"]
    assert sum(s.kind == "preempted" for s in slots) == counters["preemptions"]
    assert sum(s.kind == "stalled" for s in slots) == counters["stalled_rows"]
    assert sum(r.copied for r in rounds) == counters["page_copies"]
    for kind in ("prefill", "decode"):
        assert sum(s.tokens for s in slots if s.kind == kind) == counters[f"{kind}_tokens"]
    ends = {s.uid: s.finished for s in slots if s.finished}
    aborted = {uid for dispatch in record.dispatches for uid in dispatch.aborts}
    for choice in run["choices"]:
        if choice.uid not in aborted and choice.finish_reason != "abort":
            assert ends[choice.uid] == choice.finish_reason
            tokens = outputs(choice.prompt_ids, RULE_VOCAB, choice.max_len, choice.stop_ids)[0]
            assert choice.token_ids == tokens
    for r in rounds:
        assert not any(
            owners and cached for owners, cached in zip(r.owners, r.cached_P, strict=True)
        )
        assert len({s.slot for s in r.slots}) == len(r.slots)


def test_a_record_of_another_schedule_has_no_trace(recorded, tmp_path):
    lines = recorded[0].read_text().splitlines()
    first = json.loads(lines[1])
    first["arrivals"][0]["priority"] += 9
    lines[1] = json.dumps(first)
    (tmp_path / "other.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="other rounds than this scheduler makes"):
        trace(read_record(tmp_path / "other.jsonl"))


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.jsonl")), ids=lambda p: p.name)
def test_records_in_the_docs_are_of_this_scheduler(path):
    _, rounds = rounds_of(path)
    assert any(s.kind == "preempted" for r in rounds for s in r.slots)
    assert any(len(owners) > 1 for r in rounds for owners in r.owners)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "change", "message"),
    [
        (0, lambda v: v.update(format=9), "line 1, .*format 9, this version reads 1"),
        (0, lambda v: v["identity"]["engine"].update(num_pages=1), "line 1, .*num_pages"),
        (0, lambda v: v["identity"]["engine"].pop("num_pages"), "line 1, "),
        (0, lambda v: v["identity"].pop("weights"), "line 1, .*'weights'"),
        (1, lambda v: v.pop("rounds"), "line 2, .*'rounds'"),
        (1, lambda v: v.update(budget=10**6), "line 2, .*budget must be in 1 .. .*got 1000000"),
        (1, lambda v: v.update(rounds=True), "line 2, .*rounds must be an integer, got True"),
        (1, lambda v: v.update(aborts=[0]), "line 2, .*uid 0 is to abort or fork, but has not"),
        (1, lambda v: v.update(forks=[[0.5, 1, 2, 3]]), "line 2, .*uid to abort or fork must"),
        (0, lambda v: v["identity"]["engine"].update(max_stop_ids="8"), "line 1, .*max_stop_ids"),
        (0, lambda v: v["identity"]["limits"].update(max_logprobs=None), "line 1, .*max_logprobs"),
        (1, lambda v: v["arrivals"][0]["params"].update(top_p=7), "line 2, .*top_p"),
        (1, lambda v: v["arrivals"].extend(v["arrivals"] * 9), "line 2, .*inbox"),
        (1, lambda v: v["arrivals"][0].update(prompt_ids=[1] * 81), "line 2, .*inbox"),
        (4, lambda v: v.update(aborts=[0] * 9), "line 5, .*inbox"),
        (4, lambda v: v.update(forks=[[0, 0, 7, -1]] * 9), "line 5, .*inbox"),
        (4, lambda v: v.update(forks=[[0, 0, 99, -1]]), "line 5, .*length of a fork must be"),
        (4, lambda v: v.update(forks=[[0, 0, 7, -2]]), "line 5, .*token of a fork must be"),
        (4, lambda v: v.update(rounds=5), "line 5, .*rounds must be in 1 .. 4, got 5"),
        (3, lambda v: v["emitted"].append([0, 999, 1, 0]), "line 4, .*999, which never arrived"),
        (3, lambda v: v["emitted"].append([0, 0, None, 0]), "line 4, .*token must be an integer"),
        (3, lambda v: v["emitted"].append([0, 0, 1, 4]), "line 4, .*reason of a token must be"),
        (3, lambda v: v["emitted"].append([-1, 0, 1, 0]), "line 4, .*round of a token must be"),
    ],
)
def test_a_damaged_record_is_refused(recorded, tmp_path, line, change, message):
    lines = recorded[0].read_text().splitlines()
    value = json.loads(lines[line])
    change(value)
    lines[line] = json.dumps(value)
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        read_record(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", 0),
        ("prompt_ids", {}),
        ("prompt_ids", [1, None]),
        ("prompt_ids", [1, RULE_VOCAB]),
        ("prompt_ids", []),
        ("stop_ids", None),
        ("stop_ids", [3] * 9),
        ("stop_ids", [1.5]),
        ("uid", 2**31),
        ("uid", 1),  # another one's
        ("parent_uid", 0),  # itself
        ("index", 1),
        ("priority", 10**12),
        ("salt", "x"),
        ("max_len", None),
        ("max_len", 9),
        ("facts.seed", 1.5),
        ("facts.choice", 10**12),
        ("facts.bad_word_ids", [[RULE_VOCAB]]),
        ("facts.bad_word_ids", "x"),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_every_field_of_an_arrival_is_checked(recorded, tmp_path, field, value):
    """A wrong type or range is refused with line and field, not carried into an array."""
    lines = recorded[0].read_text().splitlines()
    dispatch = json.loads(lines[1])
    place, name = dispatch["arrivals"][0], field
    if "." in field:
        part, name = field.split(".")
        place = place[part]
    assert place[name] != value
    place[name] = value
    lines[1] = json.dumps(dispatch)
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    named = {"salt": "cache_salt", "bad_word_ids": "bad.word", "prompt_ids": "prompt"}
    with pytest.raises(ValueError, match=f"line 2, .*{named.get(name, name)}"):
        read_record(tmp_path / "bad.jsonl")


def test_a_cut_record_is_refused_and_a_short_one_replays(recorded, tmp_path):
    data = recorded[0].read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(data[:-20])
    with pytest.raises(ValueError, match="is no line of a record"):
        read_record(tmp_path / "cut.jsonl")
    whole = data.splitlines(keepends=True)
    (tmp_path / "short.jsonl").write_bytes(b"".join(whole[:6]))
    record = read_record(tmp_path / "short.jsonl")
    assert len(record.dispatches) == 5
    result = replay(rule_engine(), record)
    assert result.difference is None
    assert result.num_open == result.num_requests > 0
    (tmp_path / "header.jsonl").write_bytes(whole[0])
    with pytest.raises(ValueError, match="nothing to replay"):
        read_record(tmp_path / "header.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        read_record(tmp_path / "empty.jsonl")


def test_llm_records_when_asked(tmp_path):
    path = tmp_path / "run.jsonl"
    llm = letters_llm(record=path)
    params = SamplingParams(max_tokens=5, logit_bias={4: -np.inf})
    got = llm.generate([PROMPTS[3]], params, use_tqdm=False)[0]
    record = read_record(path)
    arrival = record.dispatches[0].arrivals[0]
    assert (arrival.prompt_ids, arrival.params) == (PROMPTS[3], params)
    assert arrival.facts.seed == got.seed
    assert record.about == {"model": "tiny", "dtype": "float32", "attention_impl": "auto"}
    tokens = [token for events in record.emitted for _, _, token, _ in events]
    assert tokens == got.outputs[0].token_ids
