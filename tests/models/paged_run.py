"""Drive a model through its paged cache for tests: any chunking, several sequences, poisoned pages.

A run compiles two programs at most: one for steps that bring several tokens of a sequence, with
`width` rows, and one for decode steps, with a row per sequence. The reference attention does not
tell the two apart and runs both as the first.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from models.batch import ragged_batch
from models.kv_cache import KVCache, init_cache, step_index
from models.model import cache_specs, forward, unembed
from models.rope import rotation


@partial(
    jax.jit, static_argnames=("config", "max_q_len", "attention_impl"), donate_argnames="cache"
)
def step(config, params, cache, tokens_T, slots, page_table_SM, *, max_q_len, attention_impl):
    """`slots` is (q_start_S, q_len_S, kv_len_S, prompt_len_S); logits [T, V] and the cache."""
    batch = ragged_batch(tokens_T, *slots, page_table_SM, max_q_len)
    hidden_TD, cache = forward(config, params, cache, batch, attention_impl=attention_impl)
    return unembed(config, params, hidden_TD), cache


def poisoned_cache(config, num_pages: int, page_size: int, dtype=jnp.float32) -> KVCache:
    """A cache of NaN: what is read without having been written shows."""
    cache = init_cache(cache_specs(config), num_pages, page_size, dtype)
    return jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), cache)


def run(
    config,
    params,
    sequences: Sequence[np.ndarray],
    chunks: Sequence[Sequence[int]],
    *,
    prompt_lens: Sequence[int] | None = None,
    page_size: int = 4,
    max_len: int | None = None,
    width: int | None = None,
    dtype=jnp.float32,
    attention_impl: str = "auto",
) -> list[np.ndarray]:
    """Logits [n, V] of every token of every sequence.

    `chunks[s]` says how many tokens of sequence s each step brings (0 to sit out); all must be as
    long as the longest. Pages are dealt out in a shuffled order, rows beyond the tokens of a step
    are padding. `prompt_lens` defaults to the whole sequences, `max_len`, which sizes the page
    table, to the longest.
    """
    num_slots, num_steps = len(sequences), max(map(len, chunks))
    taken = np.zeros((num_steps, num_slots), np.int32)
    for s, sizes in enumerate(chunks):
        taken[: len(sizes), s] = sizes
    assert (taken.sum(0) == [len(tokens) for tokens in sequences]).all(), "chunks miss tokens"
    columns = -(-(max_len or max(map(len, sequences))) // page_size)
    pages = 1 + np.random.default_rng(0).permutation(num_slots * columns).astype(np.int32)
    page_table_SM = jnp.asarray(pages.reshape(num_slots, columns))
    cache = poisoned_cache(config, 1 + num_slots * columns, page_size, dtype)
    prompt_len_S = np.asarray(prompt_lens or [len(tokens) for tokens in sequences], np.int32)
    width = width or int(taken.sum(1).max())

    logits: list[list[np.ndarray]] = [[] for _ in sequences]
    for before_S, q_len_S in zip(np.cumsum(taken, 0) - taken, taken, strict=True):
        q_start_S = np.cumsum(q_len_S) - q_len_S
        is_decode = q_len_S.max() == 1 and attention_impl != "reference"
        tokens_T = np.full(num_slots if is_decode else width, 7, np.int32)
        for s, tokens in enumerate(sequences):
            new = tokens[before_S[s] : before_S[s] + q_len_S[s]]
            tokens_T[q_start_S[s] : q_start_S[s] + len(new)] = new
        slots = (q_start_S, q_len_S, before_S + q_len_S, prompt_len_S)
        logits_TV, cache = step(
            config,
            params,
            cache,
            jnp.asarray(tokens_T),
            tuple(jnp.asarray(x, jnp.int32) for x in slots),
            page_table_SM,
            max_q_len=1 if is_decode else width,
            attention_impl=attention_impl,
        )
        for s in range(num_slots):
            logits[s].append(np.asarray(logits_TV[q_start_S[s] : q_start_S[s] + q_len_S[s]]))
    return [np.concatenate(rows) for rows in logits]


def run_rotated_to(config, params, tokens, positions, prompt_len: int) -> np.ndarray:
    """Logits [n, V] of one sequence whose tokens are told to stand at `positions`.

    The keys lie side by side in the cache and attention sees these tokens alone; only the rotation
    is given the positions. So a frequency that is wrong by 1e-5 shows at full strength at position
    20,000, which it would not among 20,000 random keys.
    """
    count, positions_T = len(tokens), jnp.asarray(positions)
    length_T = jnp.maximum(positions_T[prompt_len - 1], positions_T) + 1

    def told_step_index(*args):
        index = step_index(*args)
        ropes = tuple(rotation(rope, positions_T, length_T) for rope in index.ropes)
        return replace(index, rotations=ropes)

    start_S, count_S = jnp.zeros(1, jnp.int32), jnp.full(1, count, jnp.int32)
    page_table_SM = jnp.ones((1, 1), jnp.int32)
    batch = ragged_batch(
        jnp.asarray(tokens, jnp.int32), start_S, count_S, count_S, count_S, page_table_SM, count
    )
    with patch("models.model.step_index", told_step_index):
        hidden_TD, _ = jax.jit(forward, static_argnums=0)(
            config, params, poisoned_cache(config, 2, count), batch
        )
    return np.asarray(unembed(config, params, hidden_TD))
