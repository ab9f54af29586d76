"""What callers do to a running engine: fail, leave, come back inside a loop, end parts of it."""

import json
import os

import pytest

from engine import checkpoint
from engine.beam_search import BeamSearchParams
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.engine.test_checkpoint import (
    SETTINGS,
    Letters,
    add_rule_requests,
    letters_llm,
    programs,
    rule_engine,
    serve,
    uninterrupted,
)
from tests.engine.test_llm import (
    CONFIG,
    DEFAULTS,
    MAX_LEN,
    PARAMS,
    PROMPTS,
    ask,
    expected,
    greedy,
    shared_llm,
    tokens_of,
)


class Failing(Letters):
    """A caller's tokenizer that raises when `where` is called for the n-th time."""

    def __init__(self, where: str, n: int):
        self.where, self.left = where, n

    def count(self, where: str) -> None:
        self.left -= where == self.where
        if self.left < 0:
            raise RuntimeError(f"no {where}")

    def encode(self, *args, **kwargs):
        self.count("encode")
        return super().encode(*args, **kwargs)

    def decode(self, *args, **kwargs):
        self.count("decode")
        return super().decode(*args, **kwargs)

    def detokenizer(self, skip_special_tokens):
        self.count("detokenizer")
        return FailingStream(self)


class FailingStream:
    def __init__(self, tokenizer: Failing):
        self._tokenizer = tokenizer

    def push(self, ids):
        self._tokenizer.count("push")
        return Letters().decode(ids)

    def finish(self):
        self._tokenizer.count("finish")
        return ""


@pytest.mark.parametrize(
    ("where", "n"),
    [
        ("encode", 1),
        ("detokenizer", 0),
        ("detokenizer", 2),
        ("push", 5),
        ("finish", 1),
        ("decode", 3),
    ],
)
def test_a_tokenizer_that_fails_takes_its_requests_along_and_no_other(where, n):
    llm = LLM.from_params(CONFIG, PARAMS, Failing("", 0), **DEFAULTS)
    llm.engine._programs = shared_llm().engine._programs
    stream = llm.stream([PROMPTS[1]], greedy(20))
    next(stream)
    llm.tokenizer = Failing(where, n)
    with pytest.raises(RuntimeError, match=f"no {where}"):
        llm.generate(["ab", "cde", "f"], greedy(6, logprobs=1), use_tqdm=False)
    assert set(llm.engine._requests) <= {"0"}
    assert [o.outputs[0].token_ids for o, _ in stream][-1] == expected([PROMPTS[1]], 20)[0]
    assert not llm.engine.has_unfinished


def test_generate_inside_a_streaming_loop():
    llm, got = shared_llm(), {}
    for output, _ in llm.stream(PROMPTS[:5], greedy(9)):
        if output.request_id not in got:
            assert ask(llm, [PROMPTS[3]], greedy(3)) == expected([PROMPTS[3]], 3)
        got[output.request_id] = output.outputs[0].token_ids
    assert [got[id_] for id_ in sorted(got, key=int)] == expected(PROMPTS[:5], 9)


def test_a_loop_left_half_way_leaves_nothing_behind():
    llm = shared_llm()
    for output, _ in llm.stream(PROMPTS, SamplingParams(n=3, seed=1, max_tokens=20)):
        if len(output.outputs[0].token_ids) > 3:
            break
    assert not llm.engine.has_unfinished
    assert ask(llm, PROMPTS[:4], greedy(5)) == expected(PROMPTS[:4], 5)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_choices_outlive_the_one_whose_pages_they_share(steps):
    llm = shared_llm()
    params = SamplingParams(n=5, seed=1, max_tokens=9)
    (whole,) = llm.generate([PROMPTS[6]], params, use_tqdm=False)
    first, *rest = llm.engine.add_request("left", PROMPTS[6], params)
    for _ in range(steps):
        llm.engine.step()
    llm.engine.end(first, "abort")
    serve(llm.engine)
    assert [c.token_ids for c in rest] == [c.token_ids for c in whole.outputs[1:]]
    assert first.finish_reason == "abort"


def test_an_id_may_be_used_again_once_its_request_has_ended():
    engine = shared_llm().engine
    for _ in range(2):
        engine.add_request("again", PROMPTS[6], SamplingParams(n=4, max_tokens=20))
        engine.step()
        assert all(c.finish_reason == "abort" for c in engine.abort("again"))
        with pytest.raises(ValueError, match="no unfinished request has the id 'again'"):
            engine.abort("again")
    (choice,) = engine.add_request("again", PROMPTS[6], greedy(4))
    serve(engine)
    assert choice.token_ids == expected([PROMPTS[6]], 4)[0]


class Marking(Letters):
    """Has a special token, which it adds or skips as it is told, and says so."""

    def __init__(self, eos: int):
        self.eos_token_ids = (eos,)

    def encode(self, text, add_special_tokens=True):
        return [*self.eos_token_ids * add_special_tokens, *super().encode(text)]

    def decode(self, ids, skip_special_tokens=True):
        return f"{skip_special_tokens} " + super().decode(ids)


def test_the_tokenizer_says_what_ends_and_what_is_special():
    (tokens,) = expected([PROMPTS[6]], 12)
    llm = LLM.from_params(CONFIG, PARAMS, Marking(tokens[5]), **DEFAULTS)
    llm.engine._programs = shared_llm().engine._programs
    (output,) = llm.generate([PROMPTS[6]], greedy(12), use_tqdm=False)
    assert output.outputs[0].token_ids == tokens[: tokens.index(tokens[5]) + 1]
    assert output.outputs[0].finish_reason == "stop"
    params = greedy(3, bad_words=[Letters().decode(tokens[1:3])])
    (output,) = llm.generate([PROMPTS[6]], params, use_tqdm=False)
    assert output.outputs[0].token_ids[:2] == tokens[:2]
    assert output.outputs[0].token_ids[2] != tokens[2]
    (found,) = llm.beam_search([PROMPTS[6]], BeamSearchParams(1, 3, ignore_eos=True))
    assert found.sequences[0].text == "False " + Letters().decode(PROMPTS[6] + tokens[:3])


def test_searches_stay_in_the_order_of_the_prompts_whichever_ends_first():
    prompts = [PROMPTS[5], (PROMPTS[6] * 3)[: MAX_LEN - 2]]  # the second reaches the limit at once
    found = shared_llm().beam_search(prompts, BeamSearchParams(1, 9))
    lengths = [len(output.sequences[0].tokens) for output in found]
    assert lengths == [len(PROMPTS[5]) + 9, MAX_LEN]


@pytest.mark.parametrize("kind", ["prompt", "prompt_token_ids"])
def test_b53_salts_of_texts_and_of_ids_isolate(kind):
    llm = LLM.from_params(CONFIG, PARAMS, Letters(), **DEFAULTS)
    llm.engine._programs = shared_llm().engine._programs
    prompt = {"prompt": "nine.text", "prompt_token_ids": PROMPTS[5]}[kind]
    hits = []
    for salt in (1, 2, 1):
        llm.generate({kind: prompt, "cache_salt": salt}, greedy(1), use_tqdm=False)
        hits.append(llm.engine.counters()["prefix_hit_tokens"])
    assert hits == [0, 0, 8]


def test_two_engines_share_parameters():
    llms = shared_llm(), LLM.from_params(CONFIG, PARAMS, **DEFAULTS)
    llms[1].engine._programs = llms[0].engine._programs
    streams = [
        llm.stream(prompts, greedy(9))
        for llm, prompts in zip(llms, (PROMPTS[:4], PROMPTS[3:]), strict=True)
    ]
    got = [{}, {}]
    for pair in zip(*streams, strict=False):
        for seen, (output, _) in zip(got, pair, strict=True):
            seen[output.request_id] = output.outputs[0].token_ids
    for stream, seen in zip(streams, got, strict=True):
        seen |= {output.request_id: output.outputs[0].token_ids for output, _ in stream}
    by_id = [[seen[id_] for id_ in sorted(seen, key=int)] for seen in got]
    assert by_id == [expected(PROMPTS[:4], 9), expected(PROMPTS[3:], 9)]


class FullDisk:
    """A recorder whose third line cannot be written."""

    def __init__(self):
        self.lines = 0

    def begins(self, identity):
        pass

    def sent(self, dispatch):
        pass

    def returned(self, emitted):
        self.lines += 1
        if self.lines == 3:
            raise OSError("no space left")


def test_a_record_that_cannot_be_written_costs_no_tokens():
    engine = rule_engine()
    engine.recorder = FullDisk()
    choices = add_rule_requests(engine)
    with pytest.raises(OSError, match="no space left"):
        serve(engine)
    serve(engine)
    tokens = {c.uid: c.token_ids for c in choices if c.request_id != "7"}
    assert tokens == {uid: t for uid, (t, _) in uninterrupted()[0].items() if uid in tokens}


def test_stop_strings_are_not_resumed_without_a_tokenizer(tmp_path):
    llm = letters_llm()
    text = Letters().decode(expected([PROMPTS[6]], 20)[0])
    stream = llm.stream([PROMPTS[6], PROMPTS[5]], greedy(20, stop=[text[9:11]]))
    next(stream)
    llm.save_state(tmp_path / "state")
    bare = LLM.from_params(CONFIG, PARAMS, **DEFAULTS | SETTINGS)
    bare.engine._programs.compiled = programs(network="letters")
    with pytest.raises(ValueError, match="request 0 has stop strings, which need a tokenizer"):
        bare.resume(tmp_path / "state")
    assert not bare.engine.has_unfinished
    assert ask(bare, PROMPTS[:3], greedy(4)) == expected(PROMPTS[:3], 4)
    bare.tokenizer = Letters()
    outputs = {output.request_id: output for output, _ in bare.resume(tmp_path / "state")}
    assert outputs["0"].outputs[0].text == text[:9]


def test_what_a_killed_save_left_is_in_nobodys_way(tmp_path):
    """In a container a process often gets the same id again."""
    engine = rule_engine()
    checkpoint.save(engine, tmp_path / "state")
    for name in (f".state.{os.getpid()}", f".state.{os.getpid()}.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "host.json").write_text("half")
    add_rule_requests(engine)
    checkpoint.save(engine, tmp_path / "state", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    requests, _ = checkpoint.load(rule_engine(), tmp_path / "state")
    assert len(requests) == 8


def test_a_dispatch_on_its_way_keeps_its_age_in_another_process(tmp_path):
    engine, other = rule_engine(), rule_engine()
    engine.clock, other.clock = lambda: 97.0, lambda: 500.0
    add_rule_requests(engine)
    engine.step()
    engine.clock = lambda: 100.0
    checkpoint.save(engine, tmp_path / "state")
    checkpoint.load(other, tmp_path / "state")
    assert [sent.sent_s for sent in other.snapshot().in_flight] == [497.0]
    assert {c.arrival_s for cs in other.snapshot().requests.values() for c in cs} == {497.0}


def test_a_snapshot_comes_back_whole(tmp_path):
    engine, other = rule_engine(), rule_engine()
    add_rule_requests(engine)
    engine.step()
    engine.step()
    engine.abort("0")
    checkpoint.save(engine, tmp_path / "state")
    checkpoint.load(other, tmp_path / "state")
    saved, back = engine.snapshot(), other.snapshot()
    for name in ("queue", "out", "aborts", "next_uid"):
        assert getattr(back, name) == getattr(saved, name) != []
    assert list(back.requests) == list(saved.requests)


def test_outputs_that_nobody_has_read_yet_are_saved(tmp_path):
    """The stream's request ends while another one is served; its reader comes after the resume."""
    llm, other = (LLM.from_params(CONFIG, PARAMS, **DEFAULTS) for _ in range(2))
    llm.engine._programs = other.engine._programs = shared_llm().engine._programs
    stream = llm.stream([PROMPTS[3]], greedy(2))
    assert ask(llm, [PROMPTS[2]], greedy(9)) == expected([PROMPTS[2]], 9)
    assert not llm.engine.has_unfinished
    llm.save_state(tmp_path / "state")

    def last(outputs) -> list[int]:
        return [output.outputs[0].token_ids for output, _ in outputs][-1]

    assert last(stream) == expected([PROMPTS[3]], 2)[0]
    for _ in range(2):  # once all is read, the engine is as good as new
        assert last(other.resume(tmp_path / "state")) == expected([PROMPTS[3]], 2)[0]
    assert not other.engine.has_unfinished


def test_states_of_another_format_and_records_of_a_resumed_engine_are_refused(tmp_path):
    engine, path = rule_engine(), tmp_path / "state"
    checkpoint.save(engine, path)
    engine.recorder = FullDisk()
    with pytest.raises(ValueError, match="load without recording"):
        checkpoint.load(engine, path)
    marker = json.loads((path / "state.json").read_text()) | {"format": 9}
    (path / "state.json").write_text(json.dumps(marker))
    with pytest.raises(ValueError, match="format 9, this version reads 1"):
        checkpoint.load(rule_engine(), path)


def test_numbers_given_out_are_not_given_again_after_a_failed_load(tmp_path):
    checkpoint.save(rule_engine(), tmp_path / "state")
    engine = rule_engine()
    (choice,) = engine.add_request("a", [1], greedy(1))
    engine.abort("a")
    with pytest.raises(ValueError, match="cannot be restored"):
        checkpoint._restore_arrays(engine, tmp_path / "nowhere", [])
    (later,) = engine.add_request("a", [1], greedy(1))
    assert later.uid > choice.uid


def test_outputs_stay_in_the_order_of_the_prompts_whoever_ends_first():
    lengths = [greedy(n) for n in (9, 1, 5, 2)]
    outputs = shared_llm().generate(PROMPTS[:4], lengths, use_tqdm=False)
    assert tokens_of(outputs) == [
        expected([p], n.max_tokens)[0] for p, n in zip(PROMPTS[:4], lengths, strict=True)
    ]
