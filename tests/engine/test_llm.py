"""`LLM` over a tiny network: against recomputation without a cache, and against itself.

The oracle runs the whole known sequence through one forward pass, in the reference attention, for
every token. Engines of equal settings share their programs (see `tests/conftest.py`): a test that
needs no settings of its own takes those of another.
"""

import re
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.beam_search import BeamSearchParams
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from models.batch import ragged_batch
from models.kv_cache import init_cache
from models.model import cache_specs, forward, unembed
from tests.tiny import VOCAB, tiny_config, tiny_params

CONFIG = tiny_config(num_layers=1)
PARAMS = tiny_params(CONFIG)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in (1, 3, 4, 5, 8, 9, 30)]
MAX_LEN = 64


@jax.jit
def _logits_of_last(tokens_T, length):
    batch = ragged_batch(
        tokens_T,
        jnp.zeros(1, jnp.int32),
        length[None],
        length[None],
        length[None],
        jnp.ones((1, 1), jnp.int32),
        max_q_len=MAX_LEN,
    )
    cache = init_cache(cache_specs(CONFIG), 2, MAX_LEN, jnp.float32)
    hidden_TD, _ = forward(CONFIG, PARAMS, cache, batch, attention_impl="reference")
    return unembed(CONFIG, PARAMS, hidden_TD[length - 1][None])[0]


@lru_cache
def recomputed(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    known = list(prompt)
    for _ in range(count):
        padded = np.zeros(MAX_LEN, np.int32)
        padded[: len(known)] = known
        known.append(int(np.argmax(_logits_of_last(jnp.asarray(padded), len(known)))))
    return tuple(known[len(prompt) :])


def expected(prompts, count: int) -> list[list[int]]:
    return [list(recomputed(tuple(prompt), count)) for prompt in prompts]


@lru_cache
def shared_llm(**settings) -> LLM:
    """Tests that only ask share an engine: compiling it is what takes the time."""
    return LLM.from_params(CONFIG, PARAMS, **DEFAULTS | settings)


DEFAULTS = {
    "max_num_seqs": 3,
    "max_model_len": MAX_LEN,
    "page_size": 4,
    "max_num_batched_tokens": 16,
}


PREEMPTING = {"num_pages": 13, "max_num_seqs": 4}
UNCACHED = {"enable_prefix_caching": False}
ROUND_BY_ROUND = {"steps_per_dispatch": 1, "num_pages": 20}
ONE_ROW = {"max_num_seqs": 1, "max_model_len": 32}
TOKEN_BY_TOKEN = {"max_num_batched_tokens": 1, "scheduling_policy": "static"}
THREE_PROGRAMS = {"max_num_batched_tokens": 256, "num_pages": 40, "max_num_seqs": 6}


def fresh_llm(config=CONFIG, **settings) -> LLM:
    return LLM.from_params(config, PARAMS, **DEFAULTS | settings)


def greedy(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def ask(llm: LLM, prompts, params) -> list[list[int]]:
    return tokens_of(llm.generate(prompts, params, use_tqdm=False))


@pytest.mark.parametrize("page_size", [1, 4, MAX_LEN])
def test_b43_greedy_equals_recomputation_at_every_page_edge(page_size):
    llm = shared_llm(page_size=page_size)
    outputs = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
    assert tokens_of(outputs) == expected(PROMPTS, 12)
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
    assert [o.prompt_token_ids for o in outputs] == PROMPTS


def test_b12_batched_equals_alone_greedy_and_seeded():
    llm = shared_llm()
    for params in (greedy(10), SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=10)):
        together = ask(llm, PROMPTS, params)
        assert together == [ask(llm, [prompt], params)[0] for prompt in PROMPTS]


def test_b12_a_seeded_request_does_not_feel_an_unseeded_one():
    llm = shared_llm()
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=16)
    alone = ask(llm, [PROMPTS[3]], seeded)[0]
    unseeded = SamplingParams(temperature=0.8, max_tokens=16)
    assert ask(llm, [PROMPTS[5], PROMPTS[3]], [unseeded, seeded])[1] == alone


@pytest.mark.parametrize(
    "settings",
    [
        ROUND_BY_ROUND,
        {"overlap": False},
        TOKEN_BY_TOKEN,
        UNCACHED,
        PREEMPTING,
    ],
    ids=str,
)
def test_schedules_change_nothing(settings):
    llm = fresh_llm(**settings)
    assert ask(llm, PROMPTS, greedy(12)) == expected(PROMPTS, 12)
    sampled = SamplingParams(temperature=1.1, top_k=20, seed=3, max_tokens=12)
    assert ask(llm, PROMPTS, sampled) == ask(shared_llm(), PROMPTS, sampled)
    if settings == PREEMPTING:
        assert llm.engine.counters()["preemptions"] > 0


def test_b50_reading_late_changes_nothing_in_a_nearly_full_pool():
    prompts = [PROMPTS[i % 7] for i in range(12)]
    lengths = [greedy(3 + i % 6) for i in range(12)]
    llms = (fresh_llm(overlap=overlap, **ROUND_BY_ROUND) for overlap in (True, False))
    late, at_once = (ask(llm, prompts, lengths) for llm in llms)
    assert late == at_once
    assert late == [expected([p], n.max_tokens)[0] for p, n in zip(prompts, lengths, strict=True)]


def test_b14_choices_differ_repeat_and_do_not_depend_on_n():
    llm = shared_llm()

    def choices(n):
        params = SamplingParams(n=n, temperature=1.5, seed=7, max_tokens=8)
        return [c.token_ids for c in llm.generate(PROMPTS[4], params, use_tqdm=False)[0].outputs]

    four = choices(4)
    assert len({tuple(c) for c in four}) == 4
    assert choices(2) == four[:2]
    assert choices(1) == four[:1]


def test_updates_count_the_new_tokens():
    engine = shared_llm().engine
    (choice,) = engine.add_request("counted", PROMPTS[2], greedy(7))
    counts = []
    while engine.has_unfinished:
        counts += [u.num_new for u in engine.step() if u.choice is choice]
    assert choice.token_ids == expected([PROMPTS[2]], 7)[0]
    assert sum(counts) == 7
    assert max(counts) > 1


def test_end_of_sequence_stops_its_row_only():
    whole = expected(PROMPTS[:3], 12)
    eos = whole[1][4]
    config = CONFIG.__class__(**{**vars(CONFIG), "eos_token_ids": (eos,)})
    llm = fresh_llm(config)
    outputs = llm.generate(PROMPTS[:3], greedy(12), use_tqdm=False)
    for output, full in zip(outputs, whole, strict=True):
        cut = full.index(eos) + 1 if eos in full else len(full)
        assert output.outputs[0].token_ids == full[:cut]
        assert output.outputs[0].finish_reason == ("stop" if eos in full else "length")
        assert output.outputs[0].stop_reason is None
    assert ask(llm, PROMPTS[:3], greedy(12, ignore_eos=True)) == whole
    later = llm.generate([PROMPTS[1]], greedy(12, min_tokens=5), use_tqdm=False)[0].outputs[0]
    assert eos not in later.token_ids[:5]
    own = whole[0][2]
    stopped = llm.generate(PROMPTS[:1], greedy(12, stop_token_ids=[own]), use_tqdm=False)
    assert stopped[0].outputs[0].stop_reason == own


@pytest.mark.parametrize(("length", "got"), [(30, 2), (31, 1)])
def test_b41_prompt_near_the_length_limit(length, got):
    prompt = (PROMPTS[6] * 2)[:length]
    outputs = shared_llm(**ONE_ROW).generate([prompt], greedy(10), use_tqdm=False)
    assert tokens_of(outputs) == expected([prompt], got)
    assert outputs[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("length", [32, 33])
def test_b41_prompt_at_the_length_limit_is_refused_unless_truncated(length):
    llm = shared_llm(**ONE_ROW)
    prompt = (PROMPTS[6] * 2)[:length]
    with pytest.raises(ValueError, match=rf"has {length} tokens.*max_model_len 32"):
        llm.generate([prompt], greedy(10), use_tqdm=False)
    assert len(ask(llm, [prompt], greedy(10, truncate_prompt_tokens=-1))[0]) == 1
    assert ask(llm, [prompt], greedy(3, truncate_prompt_tokens=4)) == expected([prompt[-4:]], 3)


def test_next_turn_reuses_the_cache_and_equals_a_fresh_run():
    llm = fresh_llm(**ONE_ROW)
    first = ask(llm, [PROMPTS[5]], greedy(6))[0]
    turn = PROMPTS[5] + first + PROMPTS[1]
    before = llm.engine.counters()["prefix_hit_tokens"]
    assert ask(llm, [turn], greedy(6)) == expected([turn], 6)
    # 14 of 15 known tokens were computed: three full pages of four.
    assert llm.engine.counters()["prefix_hit_tokens"] - before == 12


def test_b103_neighbours_of_other_content_leave_a_row_bit_identical():
    llm = fresh_llm(**UNCACHED)
    params = greedy(6, logprobs=3)
    seen = []
    for neighbour in (PROMPTS[4], PROMPTS[4][::-1]):
        row = llm.generate([PROMPTS[3], neighbour], params, use_tqdm=False)[0].outputs[0]
        seen.append([[x.logprob for x in step.values()] for step in row.logprobs])
    assert seen[0] == seen[1]


def test_b24_unsound_logits_end_their_request_alone():
    embed_VD = PARAMS.embed_VD.at[50].set(jnp.nan)
    llm = LLM.from_params(CONFIG, PARAMS.replace(embed_VD=embed_VD), **DEFAULTS)
    good = [p for p in PROMPTS[:4] if 50 not in p and 50 not in recomputed(tuple(p), 5)]
    outputs = llm.generate([*good, [3] * 9 + [50] + [4] * 8], greedy(5), use_tqdm=False)
    (failed,) = outputs[-1].outputs
    assert (failed.finish_reason, failed.stop_reason, failed.token_ids) == ("error", None, [])
    assert failed.error.startswith("the network gave NaN or infinity")
    assert {o.outputs[0].error for o in outputs[:-1]} == {None}
    assert tokens_of(outputs[:-1]) == expected(good, 5)
    assert (
        50
        not in np.asarray(llm.engine._state.pool.content_PC)[
            np.asarray(llm.engine._state.pool.published_P)
        ]
    )


def test_leaving_a_stream_aborts_it_and_harms_no_later_request():
    llm = fresh_llm(**ROUND_BY_ROUND)
    stream = llm.stream([PROMPTS[6], PROMPTS[4]], greedy(30))
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished
    assert ask(llm, PROMPTS[:5], greedy(6)) == expected(PROMPTS[:5], 6)
    assert int(llm.engine._state.pool.num_free) == llm.engine.config.num_pages - 1


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_stream_never_begun_leaves_nothing_behind(how):
    llm = shared_llm()
    stream = llm.stream([PROMPTS[1]], greedy(3))
    assert llm.engine.has_unfinished
    if how == "closed":
        stream.close()
    del stream
    assert not llm.engine.has_unfinished


def test_two_streams_side_by_side_each_get_their_own():
    llm = shared_llm()
    streams = [llm.stream([prompt], greedy(9)) for prompt in (PROMPTS[2], PROMPTS[5])]
    latest = {}
    while streams:
        for stream in list(streams):
            item = next(stream, None)
            if item is None:
                streams.remove(stream)
            else:
                latest[tuple(item[0].prompt_token_ids)] = item[0].outputs[0].token_ids
    assert list(latest.values()) == expected([PROMPTS[2], PROMPTS[5]], 9)


def test_many_more_requests_than_slots():
    llm = shared_llm()
    prompts = [PROMPTS[i % 7] for i in range(40)]
    assert ask(llm, prompts, greedy(4)) == expected(prompts, 4)


def test_b107_nothing_compiles_after_warm_up():
    llm = fresh_llm(**THREE_PROGRAMS)
    llm.engine.compile()
    programs = dict(llm.engine._programs.compiled)
    assert set(programs) == {32, 64, 256}
    for count in (1, 3, 7):
        ask(llm, [PROMPTS[6]] * count, SamplingParams(max_tokens=3, seed=1, top_k=5, logprobs=2))
        ask(llm, PROMPTS[:count], greedy(3, frequency_penalty=0.5))
    assert llm.engine._programs.compiled == programs


@pytest.mark.parametrize("settings", [{}, ONE_ROW], ids=str)
def test_no_program_copies_the_cache(settings):
    llm = fresh_llm(**settings)
    llm.engine.compile()
    cache = llm.engine._cache
    cache_bytes = sum(x.nbytes for x in cache.layers)
    shape = ",".join(map(str, cache.layers[0].shape))
    for program in llm.engine._programs.compiled.values():
        text = program.as_text()
        assert f"f32[{shape}]" in text
        assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", text)
        assert program.memory_analysis().alias_size_in_bytes >= cache_bytes


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], r"prompts\[0\]: the prompt is empty"),
        ([[1], [VOCAB]], rf"prompts\[1\]: token id {VOCAB} is outside 0 .. {VOCAB - 1}"),
        ([[-1]], "token id -1"),
        ([[2**63]], "is outside"),
        (["text"], "need a tokenizer"),
        ([[1.5]], "token ids must be a list of integers"),
        ([["1"]], "token ids must be a list of integers"),
        ([b"text"], "token ids must be a list of integers: got b'text'"),
        (b"text", "token ids must be a list of integers: got b'text'"),
        ([[True, False]], "token ids must be a list of integers: got .True"),
        ([{1, 2}], "token ids must be a list of integers: got {1"),
        (5, r"prompts\[0\]: token ids must be a list of integers"),
        (None, r"prompts\[0\]: token ids must be a list of integers"),
        ([{"prompt_token_ids": [1], "lora": 3}], "lora"),
        ([{"prompt_token_ids": [1], "cache_salt": -1}], "cache_salt"),
    ],
)
def test_b21_bad_prompts_are_refused_before_any_work(prompts, message):
    llm = shared_llm()
    before = llm.engine.counters()
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, greedy(2), use_tqdm=False)
    assert not llm.engine.has_unfinished
    assert llm.engine.counters() == before


def test_no_prompts_no_outputs():
    assert shared_llm().generate([], greedy(2), use_tqdm=False) == []


def test_b44_a_request_that_can_never_fit_the_pool_is_refused():
    llm = fresh_llm(**PREEMPTING)
    with pytest.raises(ValueError, match=r"need 13 pages of 4, the pool has 12"):
        llm.generate([PROMPTS[6]], greedy(20), use_tqdm=False)
    assert ask(llm, [PROMPTS[6]], greedy(19)) == expected([PROMPTS[6]], 19)


def test_token_ids_may_be_numpy():
    llm = shared_llm()
    prompt = np.array(PROMPTS[3])
    assert ask(llm, prompt, greedy(4)) == ask(llm, [prompt], greedy(4)) == expected([PROMPTS[3]], 4)


def test_settings_may_be_numpy_and_small():
    llm, prompt = shared_llm(), PROMPTS[6]
    small = greedy(np.uint8(250), truncate_prompt_tokens=np.uint8(5))
    assert ask(llm, [prompt], small) == expected([prompt[-5:]], MAX_LEN - 5)
    priority = np.array([1, 0])
    both = llm.generate([prompt, prompt], greedy(2), priority=priority, use_tqdm=False)
    assert tokens_of(both) == expected([prompt, prompt], 2)
    (found,) = llm.beam_search([prompt], BeamSearchParams(np.int8(1), np.int8(100)))
    assert len(found.sequences[0].tokens) == MAX_LEN


def test_the_queue_on_the_host_goes_by_priority():
    """One row and two slots: the rest waits on the host, where arrival alone does not decide."""
    llm = fresh_llm(**ONE_ROW)
    outputs = llm.generate([[3, 4]] * 6, greedy(3), priority=[5, 5, 5, 5, 5, 0], use_tqdm=False)
    started = [output.times.first_token_s for output in outputs]
    assert min(started) == started[5]
    assert started[:5] == sorted(started[:5])
