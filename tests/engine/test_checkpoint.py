"""A saved engine goes on, in a fresh one or in another process, as if it had not been interrupted.

Tokens, log-probabilities, texts and every array of the device state are compared with a run that
was never saved, bit for bit.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np
import pytest

from engine import checkpoint
from engine.choice_json import decode_choice, dumps, encode_choice
from engine.dispatch import Choice
from engine.engine import Engine
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.sampling_rows import RowFacts, SamplingLimits
from tests.compiling import QUICK
from tests.engine.rule_model import RuleModel, check_invariants
from tests.engine.test_advance import BASE, STEMS
from tests.engine.test_llm import CONFIG, DEFAULTS, PARAMS, PROMPTS, fresh_llm
from tests.tiny import VOCAB, tiny_params

RULE_VOCAB = 97
RULE_CONFIG = replace(BASE, num_pages=15)


@lru_cache
def programs(**settings) -> dict:
    """Compiled programs are pure functions: engines of equal settings share them."""
    return {}


def rule_engine(**settings) -> Engine:
    config = replace(RULE_CONFIG, **settings)
    model = RuleModel(RULE_VOCAB, config.page_size)
    limits = SamplingLimits(vocab_size=RULE_VOCAB)
    cache = model.init_cache(config.num_pages)
    engine = Engine(config, model, None, cache, limits, rounds=3, compiler_options=QUICK)
    engine._programs.compiled = programs(**settings)
    return engine


def add_rule_requests(engine: Engine) -> list[Choice]:
    """Twelve choices for six slots and fourteen pages: queue, forks, preemptions, shared stems."""
    choices = []
    for i in range(8):
        n = 1 + 2 * (i % 4 == 1)
        params = SamplingParams(n=n, seed=i, max_tokens=30 - 2 * i, stop_token_ids=[3])
        prompt = STEMS[i % 2][: 5 + i]
        choices += engine.add_request(str(i), prompt, params, priority=i % 3, salt=i % 2)
    return choices


def serve(engine: Engine, steps: int | None = None, drop: str | None = None) -> None:
    """Step until nothing is left, or so often; abort `drop` on the way if it is still out."""
    while engine.has_unfinished and steps != 0:
        engine.step()
        steps = None if steps is None else steps - 1
    if drop is not None:
        engine.abort(drop)


def assert_same(a, b) -> None:
    """Trees of arrays, to the bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        assert x.tobytes() == y.tobytes()


def everything(engine: Engine):
    snapshot = engine.snapshot()
    return snapshot.cache, snapshot.state


@lru_cache
def uninterrupted() -> tuple[dict, tuple]:
    engine = rule_engine()
    choices = add_rule_requests(engine)
    serve(engine, 5, drop="7")
    serve(engine)
    assert engine.counters()["preemptions"] > 0
    assert engine.counters()["page_copies"] > 0
    assert engine.counters()["prefix_hit_tokens"] > 0
    return {c.uid: (c.token_ids, c.finish_reason) for c in choices}, everything(engine)


@pytest.mark.parametrize("after", [0, 1, 5, 9])
def test_a_resumed_engine_equals_one_never_interrupted(tmp_path, after):
    engine = rule_engine()
    choices = add_rule_requests(engine)
    serve(engine, min(after, 5), drop="7" if after >= 5 else None)
    serve(engine, after - 5 if after > 5 else 0)
    checkpoint.save(engine, tmp_path / "state", note={"any": ["thing", None]})

    other = rule_engine()
    requests, note = checkpoint.load(other, tmp_path / "state")
    assert note == {"any": ["thing", None]}
    live = {c.uid for cs in requests.values() for c in cs if c.uid in other.snapshot().out}
    check_invariants(other.config, other.snapshot().state, live | set(other.snapshot().aborts))
    for one in (engine, other):
        if after < 5:
            serve(one, 5 - after, drop="7")
        serve(one)
    resumed = {c.uid: c for cs in requests.values() for c in cs}
    known = {c.uid: resumed.get(c.uid, c) for c in choices}
    tokens, state = uninterrupted()
    assert {uid: (c.token_ids, c.finish_reason) for uid, c in known.items()} == tokens
    assert_same(everything(other), state)
    assert_same(everything(engine), state)  # saving disturbed nothing


# ---- a network, with everything a request can ask ------------------------------------------------


class Letters:
    """A tokenizer of one letter per token: text is what the stop strings of these tests look at."""

    eos_token_ids = ()

    def encode(self, text, add_special_tokens=True):
        return [(ord(letter) - 33) % VOCAB for letter in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(33 + i) for i in ids)

    def detokenizer(self, skip_special_tokens):
        return LetterStream()


class LetterStream:
    def push(self, ids):
        return Letters().decode(ids)

    def finish(self):
        return ""


SETTINGS = {"num_pages": 17, "max_num_seqs": 4, "steps_per_dispatch": 2}
ASKED = [
    SamplingParams(temperature=0.9, seed=1, max_tokens=24, stop=["M", "X", "a"]),
    SamplingParams(temperature=1.2, n=3, seed=2, top_k=20, max_tokens=12, logprobs=2),
    SamplingParams(temperature=0, max_tokens=20, logprobs=0, frequency_penalty=0.7),
    SamplingParams(temperature=1, max_tokens=16, logit_bias={3: -np.inf, 5: 2.0}, min_tokens=4),
    SamplingParams(temperature=0.8, seed=2**63, top_p=0.8, max_tokens=9, bad_words=["Qz"]),
    SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1),
    SamplingParams(temperature=0.7, min_p=0.05, seed=5, max_tokens=18, repetition_penalty=1.2),
]
WHERE = [PROMPTS[6], PROMPTS[5], PROMPTS[6][:17], PROMPTS[3], PROMPTS[4], PROMPTS[5], PROMPTS[6]]


def letters_llm(**settings) -> LLM:
    llm = LLM.from_params(CONFIG, PARAMS, Letters(), **DEFAULTS | SETTINGS | settings)
    llm.engine._programs.compiled = programs(network="letters")
    return llm


def take(stream, count: int | None, seen: dict) -> None:
    """Read `count` outputs, or all; keep what each request has said so far."""
    while count is None or count > 0:
        output = next(stream, None)
        if output is None:
            return
        seen[output[0].request_id] = output[0]
        count = None if count is None else count - 1


def comparable(seen: dict) -> dict:
    return {
        request_id: [output.prompt, output.seed, output.prompt_logprobs, output.outputs]
        for request_id, output in seen.items()
    }


def run_to(count: int | None, path: Path | None = None):
    """(LLM, what was seen) of a run that is saved to `path` after `count` outputs, then goes on."""
    llm, seen = letters_llm(), {}
    # A seed that is not given is drawn: make it the same in all runs.
    asked = [replace(params, seed=params.seed or 77) for params in ASKED]
    stream = llm.stream(WHERE, asked)
    take(stream, count, seen)
    if path is not None:
        llm.save_state(path)
    take(stream, None, seen)
    return llm, seen


@lru_cache
def whole_run():
    llm, seen = run_to(None)
    assert llm.engine.counters()["preemptions"] > 0
    reasons = [choice.stop_reason for output in seen.values() for choice in output.outputs]
    assert set(reasons) > {None}
    assert seen["5"].prompt_logprobs is not None
    return comparable(seen), everything(llm.engine)


@pytest.mark.parametrize("count", [0, 9])
def test_resumed_outputs_equal_those_never_interrupted(tmp_path, count):
    outputs, state = whole_run()
    llm, seen = run_to(count, tmp_path / "state")
    assert comparable(seen) == outputs
    assert_same(everything(llm.engine), state)

    other, resumed = letters_llm(), {}
    take(other.resume(tmp_path / "state"), None, resumed)
    assert len(resumed) >= 2
    assert comparable(resumed) == {key: outputs[key] for key in resumed}
    assert_same(everything(other.engine), state)
    assert not other.engine.has_unfinished
    # What no longer came had been delivered before the save.
    assert set(outputs) - set(resumed) <= set(seen)
    assert ask_more(other) == ask_more(llm)


def ask_more(llm: LLM) -> list:
    output = llm.generate([PROMPTS[2]], SamplingParams(seed=3, max_tokens=5), use_tqdm=False)[0]
    return [output.request_id, output.outputs[0].token_ids]


# Bits depend on the compiler's options, so the other process has those of this one.
CHILD = """
import sys
import pytest
from tests.quick_engines import use_quick_engines
from tests.engine.test_checkpoint import comparable, letters_llm, take
use_quick_engines(pytest.MonkeyPatch())
llm, seen = letters_llm(), {}
take(llm.resume(sys.argv[1]), None, seen)
print(comparable(seen))
"""


def test_another_process_goes_on(tmp_path):
    outputs, _ = whole_run()
    run_to(5, tmp_path / "state")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "state")],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    places = {key: child.stdout.find(f"'{key}': [None") for key in outputs}
    resumed = sorted((key for key in outputs if places[key] >= 0), key=places.get)
    assert len(resumed) >= 2
    assert child.stdout.strip() == repr({key: outputs[key] for key in resumed})


# ---- refusals ------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    engine = rule_engine()
    add_rule_requests(engine)
    serve(engine, 3)
    checkpoint.save(engine, tmp_path / "state")
    return tmp_path / "state"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_pages": 16}, "engine.num_pages is 15 there and 16 here"),
        ({"policy": "static"}, "engine.policy is continuous there and static here"),
    ],
)
def test_another_engine_is_refused(saved, settings, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.load(rule_engine(**settings), saved)


def test_other_weights_are_refused(tmp_path):
    llm = fresh_llm()
    llm.save_state(tmp_path / "state")
    other = LLM.from_params(CONFIG, tiny_params(CONFIG, seed=1), **DEFAULTS)
    with pytest.raises(ValueError, match="the weights differ"):
        other.resume(tmp_path / "state")
    config = CONFIG.__class__(**{**vars(CONFIG), "final_softcap": 30.0})
    with pytest.raises(ValueError, match="the network, its dtype"):
        LLM.from_params(config, PARAMS, **DEFAULTS).resume(tmp_path / "state")


def test_every_damaged_file_is_refused_and_the_engine_stays_usable(saved, tmp_path):
    engine = rule_engine()
    files = [p.relative_to(saved) for p in saved.rglob("*") if p.is_file()]
    assert {Path("state.json"), Path("host.json")} < set(files)
    for name in files:
        for damage in ("delete", "cut", "flip"):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(saved, copy)
            data = bytearray((copy / name).read_bytes())
            if damage == "delete":
                (copy / name).unlink()
            elif damage == "cut":
                (copy / name).write_bytes(data[: len(data) // 2])
            else:
                data[len(data) // 2] ^= 4
                (copy / name).write_bytes(data)
            culprit = "." if name.name == "state.json" else name.name
            with pytest.raises(ValueError, match=culprit):
                checkpoint.load(engine, copy)
    requests, _ = checkpoint.load(engine, saved)
    serve(engine)
    assert all(c.finish_reason for cs in requests.values() for c in cs)


def test_arrays_that_cannot_be_read_leave_an_empty_engine(saved):
    shutil.rmtree(saved / "arrays")
    marker = json.loads((saved / "state.json").read_text())
    host = marker["checksums"]["host.json"]
    marker["checksums"] = {"host.json": host, "state.json": "0-00000000"}
    (saved / "state.json").write_text(json.dumps(marker))
    engine = rule_engine()
    with pytest.raises(ValueError, match=r"state.json was changed"):
        checkpoint.load(engine, saved)
    with pytest.raises(ValueError, match="cannot be restored"):
        checkpoint._restore_arrays(engine, saved, [])
    choices = add_rule_requests(engine)
    serve(engine, 5, drop="7")
    serve(engine)
    assert {c.uid: (c.token_ids, c.finish_reason) for c in choices} == uninterrupted()[0]


def test_a_missing_directory_and_a_busy_engine_are_refused(saved, tmp_path):
    with pytest.raises(ValueError, match="holds no saved engine"):
        checkpoint.load(rule_engine(), tmp_path / "nowhere")
    busy = rule_engine()
    add_rule_requests(busy)
    with pytest.raises(ValueError, match="has unfinished requests"):
        checkpoint.load(busy, saved)


def test_a_failed_save_never_replaces_a_good_one(saved, monkeypatch):
    engine = rule_engine()
    with pytest.raises(ValueError, match="exists already"):
        checkpoint.save(engine, saved)

    def fails(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_arrays", fails)
        with pytest.raises(OSError, match="disk full"):
            checkpoint.save(engine, saved, overwrite=True)
    # The new one is complete, the old one is set aside, and taking its name fails.
    rename = Path.rename

    def refuses(self, target):
        if self.name.endswith(f".{os.getpid()}") and not self.name.endswith(".old"):
            raise OSError("no")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuses)
        with pytest.raises(OSError, match="no"):
            checkpoint.save(engine, saved, overwrite=True)
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]
    assert checkpoint.load(rule_engine(), saved)[0]
    checkpoint.save(engine, saved, overwrite=True)
    assert checkpoint.load(rule_engine(), saved)[0] == {}


def test_a_choice_survives_json_whole():
    params = SamplingParams(
        **{"n": 2, "temperature": np.float32(0.1), "top_p": 0.1 + 0.2, "seed": 2**64 - 1},
        **{"logit_bias": {7: -np.inf, 1: -0.1}, "allowed_token_ids": [1, 2], "stop": ["a", "é\n"]},
        **{"bad_words": ["x"], "max_tokens": None, "logprobs": 1, "stop_token_ids": [4]},
    )
    extra = {"p": np.arange(3, dtype=np.float32) / 7, "i": np.int32(-1)}
    choice = Choice(
        *("id", 1, 5, [1, 2], params, RowFacts(2**64 - 1, 1, ((1, 2), (3,))), [4]),
        *(-3, 1, 40, 4, 10.0),
        token_ids=[8],
        extras=[extra],
        prompt_scores=[None, extra],
        started_s=11.5,
        first_token_s=12.0,
    )
    back = decode_choice(json.loads(dumps(encode_choice(choice, 9.0))), 109.0, extra, extra)
    for name in vars(choice):
        there, here = getattr(back, name), getattr(choice, name)
        if name in ("extras", "prompt_scores"):
            assert_same(there, here)
        elif name.endswith("_s") and here is not None:
            assert there == here + 100
        else:
            assert there == here, name
    assert VOCAB == RULE_VOCAB
