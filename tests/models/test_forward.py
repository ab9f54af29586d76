"""One forward pass, many ways to cut the work: all give the same logits.

Float32 sums in another order differ by some 1e-6 of the largest logit; 1e-5 of it is allowed where
shapes differ, no bit where they are the same.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.batch import ragged_batch
from models.config import RopeSpec
from models.kv_cache import dense_view, init_cache, num_pages_for
from models.model import cache_specs, declare, forward
from models.params import flatten, init, unflatten
from tests.models.paged_run import poisoned_cache, run, step
from tests.tiny import VOCAB, tiny_config, tiny_params

LENGTH = 24
WIDTH = 24
DYNAMIC = RopeSpec(10_000.0, 16, "dynamic", max_position=10, factor=2.0)
LONGROPE = RopeSpec(
    theta=10_000.0,
    rotary_dim=8,
    kind="longrope",
    max_position=64,
    original_max_position=10,
    factor=6.4,
    short_factor=(1.0, 1.1, 1.2, 1.3),
    long_factor=(1.0, 3.0, 9.0, 27.0),
)
CONFIGS = {
    "gqa": tiny_config(),
    "mqa_window_softcap_bias": tiny_config(
        num_layers=1,
        num_kv_heads=1,
        window=5,
        softcap=4.0,
        qk_norm="full",
        qkv_bias=True,
        out_bias=True,
    ),
    "mha_sinks_dynamic": tiny_config(
        num_layers=1, num_kv_heads=4, sinks=True, qk_norm="head", rope=DYNAMIC
    ),
    "longrope_partial": tiny_config(num_layers=1, rope=LONGROPE),
}


@cache
def model(name):
    """Norm scales, biases and sinks are random too."""
    config = CONFIGS[name]
    params = tiny_params(config)
    leaves, keys = flatten(params), jax.random.split(jax.random.key(1), 200)
    for i, (path, leaf) in enumerate(leaves.items()):
        if leaf.ndim == 1 or "norm" in path or path.split(".")[-1].startswith("b"):
            leaves[path] = leaf + 0.3 * jax.random.normal(keys[i], leaf.shape, leaf.dtype)
    return config, unflatten(params, leaves)


def tokens_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB - 1, length)


@cache
def whole(name):
    """Logits of `tokens_of(LENGTH)` from one prefill."""
    config, params = model(name)
    (logits_TV,) = run(config, params, [tokens_of(LENGTH)], [[LENGTH]], width=WIDTH)
    return logits_TV


def assert_close(logits_TV, expected_TV):
    np.testing.assert_allclose(
        logits_TV, expected_TV, rtol=0, atol=1e-5 * np.abs(expected_TV).max()
    )


@pytest.mark.parametrize("page_size", [1, 5, LENGTH])
def test_paged_is_contiguous(page_size):
    """One page of the maximum length is the contiguous cache."""
    config, params = model("gqa")
    chunks = [10, 1, 1, 9, 1, 1, 1]
    (logits_TV,) = run(
        config, params, [tokens_of(LENGTH)], [chunks], page_size=page_size, width=WIDTH
    )
    assert_close(logits_TV, whole("gqa"))


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_is_recomputed(name):
    """The last logits of a prefix are the ones that the whole sequence gave at that place. The
    prompt is the whole sequence for both: it decides the length of length-dependent rotations."""
    config, params = model(name)
    for length in (1, 7, 13, LENGTH - 1):
        (logits_TV,) = run(
            config,
            params,
            [tokens_of(LENGTH)[:length]],
            [[length]],
            prompt_lens=[LENGTH],
            max_len=LENGTH,
            width=WIDTH,
        )
        assert_close(logits_TV[-1], whole(name)[length - 1])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, LENGTH - 1)), name=st.sampled_from(sorted(CONFIGS)))
def test_any_chunking_of_the_prompt(cuts, name):
    config, params = model(name)
    edges = [0, *sorted(cuts), LENGTH]
    chunks = [b - a for a, b in pairwise(edges)]
    (logits_TV,) = run(config, params, [tokens_of(LENGTH)], [chunks], width=WIDTH)
    assert_close(logits_TV, whole(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_batch_is_each_alone(name):
    """Prefill, chunked prefill, decode and idling side by side."""
    config, params = model(name)
    sequences = [tokens_of(LENGTH), tokens_of(3, 1), tokens_of(11, 2)]
    chunks = [[9, 1, 6, 1, 1, 6], [0, 2, 1, 0, 0, 0], [1, 0, 4, 4, 1, 1]]
    together = run(config, params, sequences, chunks, width=WIDTH)
    for s, tokens in enumerate(sequences):
        (alone,) = run(config, params, [tokens], [[len(tokens)]], max_len=LENGTH, width=WIDTH)
        assert_close(together[s], alone)


@pytest.mark.parametrize("name", CONFIGS)
def test_neighbours_change_no_bit(name):
    config, params = model(name)
    chunks = [[9, 1, 6, 1, 1, 6], [0, 2, 1, 0, 0, 0], [1, 0, 4, 4, 1, 1]]
    mine, lengths = tokens_of(LENGTH), (3, 11)
    first, second = (
        run(config, params, [mine, *(tokens_of(n, seed + n) for n in lengths)], chunks, width=WIDTH)
        for seed in (1, 50)
    )
    np.testing.assert_array_equal(first[0], second[0])
    assert not np.array_equal(first[1], second[1])


@pytest.mark.parametrize("name", ["mqa_window_softcap_bias", "mha_sinks_dynamic"])
@pytest.mark.parametrize("num_tokens", [6, 1])
def test_nan_in_unused_memory_changes_no_bit(name, num_tokens):
    """Unused pages, the tail of the last page, idle slots, unused page table entries and padding
    rows: zeros or NaN, the logits are the same. Padding rows hold a token whose embedding is NaN,
    so that NaN is also what they write to the trash page."""
    config, params = model(name)
    params = params.replace(embed_VD=params.embed_VD.at[VOCAB - 1].set(jnp.nan))
    rows = max(num_tokens + 3, 2)

    def logits_of(fill, padding_token, spare_entry):
        specs = cache_specs(config)
        cache = init_cache(specs, 6, 4, jnp.float32)
        cache = jax.tree.map(lambda pages: jnp.full_like(pages, fill), cache)
        tokens_T = np.full(rows, padding_token)
        tokens_T[:num_tokens] = tokens_of(num_tokens)
        table_SM = np.full((2, 4), spare_entry)
        table_SM[0, :2] = [3, 2]
        slots = ([0, num_tokens], [num_tokens, 0], [num_tokens, 0], [num_tokens, 0])
        logits_TV, _ = step(
            config,
            params,
            cache,
            jnp.asarray(tokens_T, jnp.int32),
            tuple(jnp.array(x, jnp.int32) for x in slots),
            jnp.asarray(table_SM, jnp.int32),
            max_q_len=num_tokens,
            attention_impl="auto",
        )
        return np.asarray(logits_TV)[:num_tokens]

    clean = logits_of(0.0, 5, 0)
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(logits_of(np.nan, VOCAB - 1, 0), clean)
    np.testing.assert_array_equal(logits_of(np.nan, VOCAB - 1, 5), clean)


def visible_keys(window, chunks):
    """[query, key]: whether the key's token has any influence on the query's logits, one layer."""
    config = tiny_config(num_layers=1, window=window)
    params, tokens = tiny_params(config), tokens_of(10)
    changed = [np.where(np.arange(10) == j, (tokens + 1) % VOCAB, tokens) for j in range(10)]
    base, *others = run(config, params, [tokens, *changed], [chunks] * 11, width=110)
    return np.array([np.abs(other - base).max(1) > 0 for other in others]).T


@pytest.mark.parametrize("window", [1, 4, 10])
@pytest.mark.parametrize(
    "chunks", [[10], [3, 1, 6], [1] * 10], ids=["prefill", "chunked", "decode"]
)
def test_b82_a_window_counts_the_query_itself(window, chunks):
    i, j = np.indices((10, 10))
    expected = (j <= i) & (i - j < window)
    np.testing.assert_array_equal(visible_keys(window, chunks), expected)


def test_b83_embedding_scale_is_rounded_to_the_activations():
    """sqrt(3072) = 55.43 is 55.5 in bfloat16. With blocks that add nothing and a final norm whose
    epsilon dwarfs the mean square, the hidden state is the scaled embedding times 2^-10."""
    config = replace(
        tiny_config(num_layers=1),
        embedding_scale=3072**0.5,
        norm=replace(tiny_config().norm, eps=2.0**20),
    )
    params = jax.tree.map(jnp.zeros_like, init(declare(config), jax.random.key(0), jnp.bfloat16))
    embed_VD = jnp.ones_like(params.embed_VD)
    params = params.replace(
        embed_VD=embed_VD, final_norm=params.final_norm.replace(scale=jnp.ones(64))
    )
    one_S = jnp.ones(1, jnp.int32)
    batch = ragged_batch(one_S, 0 * one_S, one_S, one_S, one_S, one_S[:, None], 1)
    hidden_TD, _ = forward(config, params, poisoned_cache(config, 2, 1, jnp.bfloat16), batch)
    assert hidden_TD.dtype == jnp.bfloat16
    # 2^-10 * 55.5 / sqrt(1 + 55.5^2 / 2^20), rounded to bfloat16
    np.testing.assert_array_equal(
        hidden_TD, jnp.bfloat16(55.5 / 2**10 / np.sqrt(1 + 55.5**2 / 2**20))
    )


def test_bfloat16_follows_float32():
    """8 bits of mantissa: two layers stay within a few percent of the largest logit."""
    config, params = model("gqa")
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, params)
    (logits_TV,) = run(
        config, low, [tokens_of(LENGTH)], [[LENGTH]], width=WIDTH, dtype=jnp.bfloat16
    )
    assert logits_TV.dtype == np.float32
    error = np.abs(logits_TV - whole("gqa")).max() / np.abs(whole("gqa")).max()
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize("num_tokens", [16, 1])
def test_a_donated_cache_is_never_copied(num_tokens):
    config, params = model("gqa")
    cache = poisoned_cache(config, 37, 8)
    one_S = jnp.ones(1, jnp.int32)
    batch = ragged_batch(
        jnp.zeros(num_tokens, jnp.int32),
        0 * one_S,
        num_tokens * one_S,
        num_tokens * one_S,
        num_tokens * one_S,
        jnp.zeros((1, 4), jnp.int32),
        num_tokens,
    )
    compiled = (
        jax.jit(partial(forward, config), donate_argnums=1).lower(params, cache, batch).compile()
    )
    shape = "f32[" + ",".join(map(str, cache.layers[0].shape)) + "]"
    text = compiled.as_text()
    assert shape in text
    copies = [line for line in text.splitlines() if f"= {shape}" in line and ("copy(" in line)]
    assert not copies, copies
    cache_bytes = sum(pages.nbytes for pages in cache.layers)
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes


def test_steps_of_the_same_shape_compile_once():
    config, params = model("gqa")
    run(config, params, [tokens_of(9)], [[4, 3, 1, 1]], width=8)
    before = step._cache_size()
    run(config, params, [tokens_of(9, 5)], [[2, 5, 1, 1]], width=8)
    run(config, params, [tokens_of(9, 6)], [[7, 1, 1]], width=8)
    assert step._cache_size() == before


def test_dense_view_is_the_cache_in_order():
    config, params = model("gqa")
    cache = poisoned_cache(config, 4, 4)
    slots = tuple(jnp.array([x], jnp.int32) for x in (0, 6, 6, 6))
    table_SM = jnp.array([[3, 1]], jnp.int32)
    tokens_T = jnp.asarray(tokens_of(6), jnp.int32)
    _, cache = step(
        config, params, cache, tokens_T, slots, table_SM, max_q_len=6, attention_impl="auto"
    )
    k_SXKH, v_SXKH = dense_view(cache, 1, table_SM)
    assert k_SXKH.shape == v_SXKH.shape == (1, 8, 2, 16)
    assert np.isfinite(k_SXKH[:, :6]).all()
    assert np.isnan(k_SXKH[:, 6:]).all()


def test_cache_sizing():
    specs = cache_specs(CONFIGS["gqa"])
    page_bytes = 2 * 2 * (2 * 16) * 4 * 16  # layers, k and v, heads x width, bytes, positions
    assert num_pages_for(specs, 16, jnp.float32, 10 * page_bytes, 1.0) == 10
    assert num_pages_for(specs, 16, jnp.float32, 10 * page_bytes, 0.55) == 5
    with pytest.raises(ValueError, match=r"needs 2 pages of 4,096 bytes"):
        num_pages_for(specs, 8, jnp.float32, page_bytes // 2, 1.0)
    with pytest.raises(ValueError, match="fraction must be in"):
        num_pages_for(specs, 16, jnp.float32, 10 * page_bytes, 1.5)
    for pages, size, message in ((1, 4, "at least 2"), (4, 0, "page_size is 0")):
        with pytest.raises(ValueError, match=message):
            init_cache(specs, pages, size, jnp.float32)
