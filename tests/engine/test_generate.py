"""The generation loop against recomputation without a cache, and against itself.

The oracle runs the whole known sequence through one forward pass for every token.
"""

import re
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.generate import Emitted, GenerateConfig, Generator, Sampling
from models.batch import ragged_batch
from models.kv_cache import init_cache, kv_bytes_per_token
from models.model import cache_specs, forward, unembed
from tests.tiny import VOCAB, tiny_config, tiny_params

CONFIG = tiny_config()
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


def generator(config=CONFIG, *, num_pages=None, memory_bytes=None, **settings):
    fields = {"max_num_seqs": 1, "max_model_len": MAX_LEN, "page_size": 4, "prefill_widths": (16,)}
    settings = GenerateConfig(**fields | settings)
    return Generator(config, PARAMS, settings, num_pages=num_pages, memory_bytes=memory_bytes)


def run(gen: Generator, prompts, **sampling) -> tuple[list[list[int]], list[str]]:
    outputs, reasons = [[] for _ in prompts], [None] * len(prompts)
    for news in gen.generate(prompts, Sampling(**sampling)):
        for item in news:
            assert isinstance(item, Emitted)
            assert reasons[item.index] is None, "tokens after the end"
            outputs[item.index] += item.token_ids
            reasons[item.index] = item.finish_reason
    return outputs, reasons


@pytest.mark.parametrize("page_size", [1, 4, MAX_LEN])
def test_b43_greedy_equals_recomputation_at_every_page_edge(page_size):
    gen = generator(max_num_seqs=len(PROMPTS), page_size=page_size, prefill_widths=(7, 16))
    outputs, reasons = run(gen, PROMPTS, max_tokens=12)
    assert outputs == [list(recomputed(tuple(p), 12)) for p in PROMPTS]
    assert reasons == ["length"] * len(PROMPTS)


def test_batched_equals_alone_greedy_and_seeded():
    gen = generator(max_num_seqs=len(PROMPTS))
    alone = generator()
    for temperature in (0.0, 0.9):
        together, _ = run(gen, PROMPTS, max_tokens=10, temperature=temperature, seed=5)
        for i, prompt in enumerate(PROMPTS):
            single, _ = run(alone, [prompt], max_tokens=10, temperature=temperature, seed=5 + i)
            assert single[0] == together[i]


@pytest.mark.parametrize("steps", [1, 5, 64])
@pytest.mark.parametrize("widths", [(3,), (16, 32)])
def test_dispatch_size_and_chunking_change_nothing(steps, widths):
    gen = generator(max_num_seqs=2, steps_per_dispatch=steps, prefill_widths=widths)
    outputs, _ = run(gen, [PROMPTS[6], PROMPTS[1]], max_tokens=9)
    assert outputs == [list(recomputed(tuple(p), 9)) for p in (PROMPTS[6], PROMPTS[1])]


def test_padding_rows_change_nothing():
    outputs, _ = run(generator(min_rows=4), [PROMPTS[4]], max_tokens=9)
    assert outputs[0] == list(recomputed(tuple(PROMPTS[4]), 9))


def test_end_of_sequence_stops_its_row_only():
    expected = [list(recomputed(tuple(p), 12)) for p in PROMPTS[:3]]
    eos = expected[1][4]
    config = CONFIG.__class__(**{**vars(CONFIG), "eos_token_ids": (eos,)})
    gen = generator(config, max_num_seqs=3)
    outputs, reasons = run(gen, PROMPTS[:3], max_tokens=12)
    for output, reason, whole in zip(outputs, reasons, expected, strict=True):
        cut = whole.index(eos) + 1 if eos in whole else len(whole)
        assert output == whole[:cut]
        assert reason == ("stop" if eos in whole else "length")
    assert len(outputs[1]) <= 5
    ignored, reasons = run(gen, PROMPTS[:3], max_tokens=12, ignore_eos=True)
    assert ignored == expected
    assert reasons == ["length"] * 3


@pytest.mark.parametrize(("length", "got"), [(14, 2), (15, 1)])
def test_b41_prompt_near_the_length_limit(length, got):
    gen = generator(max_model_len=16)
    outputs, reasons = run(gen, [(PROMPTS[6] * 2)[:length]], max_tokens=10)
    assert len(outputs[0]) == got
    assert reasons == ["length"]
    assert outputs[0] == list(recomputed(tuple((PROMPTS[6] * 2)[:length]), got))


@pytest.mark.parametrize("length", [16, 17])
def test_b41_prompt_at_the_length_limit_is_refused(length):
    gen = generator(max_model_len=16)
    with pytest.raises(ValueError, match=rf"has {length} tokens.*limit of 16"):
        gen.generate([[1] * length], Sampling())


def test_next_turn_reuses_the_cache_and_equals_a_fresh_run():
    gen = generator()
    first, _ = run(gen, [PROMPTS[5]], max_tokens=6)
    assert gen.reused_tokens == 0
    second_prompt = PROMPTS[5] + first[0] + PROMPTS[1]
    second, _ = run(gen, [second_prompt], max_tokens=6)
    assert gen.reused_tokens == len(PROMPTS[5]) + 5  # the last token was never fed
    assert second[0] == list(recomputed(tuple(second_prompt), 6))
    again, _ = run(gen, [second_prompt], max_tokens=6)
    assert gen.reused_tokens == len(second_prompt) - 1
    assert again == second
    other, _ = run(gen, [PROMPTS[6]], max_tokens=6)
    assert gen.reused_tokens == 0
    assert other[0] == list(recomputed(tuple(PROMPTS[6]), 6))


def test_a_run_left_half_way_harms_no_later_one():
    gen = generator(steps_per_dispatch=2)
    next(iter(gen.generate([PROMPTS[6]], Sampling(max_tokens=20))))
    outputs, _ = run(gen, [PROMPTS[6]], max_tokens=6)
    assert gen.reused_tokens == 0
    assert outputs[0] == list(recomputed(tuple(PROMPTS[6]), 6))


def test_growing_requests_share_a_small_pool_in_turn():
    gen = generator(max_num_seqs=2, num_pages=14, prefill_widths=(16,))
    for prompts in (PROMPTS[:2], [PROMPTS[6], PROMPTS[4]], [PROMPTS[6]], PROMPTS[2:4]):
        outputs, _ = run(gen, prompts, max_tokens=4)
        assert outputs == [list(recomputed(tuple(p), 4)) for p in prompts]
    with pytest.raises(ValueError, match=r"need 18 pages of 4 tokens, the cache has 13"):
        gen.generate([PROMPTS[6], PROMPTS[6]], Sampling(max_tokens=4))


def test_seeded_sampling_repeats_and_seeds_differ():
    gen = generator()
    runs = [run(gen, [PROMPTS[4]], max_tokens=20, temperature=1.5, seed=s)[0][0] for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_b107_no_program_beyond_the_listed_widths_and_none_twice():
    gen = generator(max_num_seqs=3, prefill_widths=(4, 16))
    traces = []
    for length in (1, 2, 5, 17, 33):
        run(gen, [PROMPTS[6][: length % 30 + 1]] * 3, max_tokens=3)
        traces.append(dict(gen._programs))
    assert set(traces[-1]) <= {"decode", "prefill 4", "prefill 16"}
    assert all(traces[-1][name] is program for t in traces for name, program in t.items())


def test_no_program_copies_the_cache():
    gen = generator(max_num_seqs=2, num_pages=37)
    run(gen, PROMPTS[:2], max_tokens=3)
    cache_bytes = sum(x.nbytes for x in gen._cache.layers)
    shape = ",".join(map(str, gen._cache.layers[0].shape))
    for name, program in gen._programs.items():
        text = program.as_text()
        assert shape in text, name
        copies = re.findall(rf"= f32\[{shape}\]\S* copy\(", text)
        assert not copies, (name, copies)
        assert program.memory_analysis().alias_size_in_bytes >= cache_bytes


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"prompts": [[1], [2]]}, "2 prompts for 1 slots"),
        ({"prompts": []}, "0 prompts"),
        ({"prompts": [[VOCAB]]}, f"token id {VOCAB}, outside 0 .. {VOCAB - 1}"),
        ({"prompts": [[-1]]}, "token id -1"),
        ({"prompts": [[2**63]]}, "outside"),
    ],
)
def test_b21_bad_prompts_are_refused_before_any_work(bad, message):
    gen = generator()
    with pytest.raises(ValueError, match=message):
        gen.generate(bad["prompts"], Sampling())
    assert not gen._programs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"seed": 2**32}, "seed"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_sampling_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        generator(page_size=0)
    with pytest.raises(ValueError, match="exceeds the model's limit of 512"):
        generator(max_model_len=513)
    page_bytes = 4 * kv_bytes_per_token(cache_specs(CONFIG), jnp.float32)
    with pytest.raises(ValueError, match=rf"1000 pages of {page_bytes:,} bytes do not fit"):
        generator(num_pages=1000, memory_bytes=999 * page_bytes)
