"""A model that computes the next token by rule from the whole history, read through the page table.

Its cache holds tokens instead of keys and values, so a wrong page, a stale page, a missed copy or a
wrong length gives another token. `next_token` is the rule in plain Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from engine.step import Sampled

POISON = -123_456  # what pages hold that nobody wrote


def next_token(history: Sequence[int], vocab: int) -> int:
    mixed = 0
    for i, token in enumerate(history):
        mixed = (mixed + (token + 1) * (2 * i + 3) * (2 * i + 3)) % 2**32
    return (mixed ^ (mixed >> 11)) % vocab


def outputs(prompt: Sequence[int], vocab: int, max_len: int, stop_ids=()) -> tuple[list[int], str]:
    """What a request with this prompt must produce, and why it ends."""
    known = list(prompt)
    while True:
        known.append(next_token(known, vocab))
        if known[-1] in stop_ids:
            return known[len(prompt) :], "stop"
        if len(known) >= max_len:
            return known[len(prompt) :], "length"


def prompt_scores(prompt: Sequence[int], vocab: int) -> list[int]:
    """The score of each prompt token but the first: the token the rule expects there, and it."""
    return [next_token(prompt[:i], vocab) * vocab + prompt[i] for i in range(1, len(prompt))]


@dataclass(frozen=True)
class RuleModel:
    vocab: int
    page_size: int
    bad_token: int = -2  # a row whose history holds it reports unsound logits

    def init_cache(self, num_pages: int) -> jax.Array:
        return jnp.full((num_pages, self.page_size), POISON, jnp.int32)

    def copy_pages(self, cache_PC, from_R, to_R):
        return cache_PC.at[to_R].set(cache_PC.at[from_R].get(mode="clip"), mode="drop")

    def no_states(self, num_tokens):
        return jnp.zeros(num_tokens, jnp.int32)

    def no_sample(self, num_rows):
        return Sampled(self.no_states(num_rows), jnp.ones(num_rows, bool), None)

    def no_scores(self, num_tokens):
        return jnp.zeros(num_tokens, jnp.int32)

    def score(self, params, expected_T, token_T, asked_T):
        """`prompt_score` of each token asked for."""
        del params
        return jnp.where(asked_T, expected_T * self.vocab + token_T, -1)

    def sample(self, params, token_R, rows, samples_R):
        del params, rows
        # A token sampled by mistake is one that no rule gives.
        token_R = jnp.where(samples_R, token_R, self.vocab)
        return Sampled(token_R, jnp.ones(token_R.shape, bool), None)

    def run(self, params, cache_PC, batch):
        del params
        C = self.page_size
        page_T = batch.page_table_SM.at[batch.slot_T, batch.positions_T // C].get(
            mode="fill", fill_value=0
        )
        cache_PC = cache_PC.at[page_T, batch.positions_T % C].set(batch.tokens_T, mode="drop")
        R = batch.q_len_S.shape[0]
        history_RX = cache_PC.at[batch.page_table_SM].get(mode="clip").reshape(R, -1)
        position_X = jnp.arange(history_RX.shape[1])
        weight_X = ((2 * position_X + 3) ** 2).astype(jnp.uint32)
        weighted_RX = (history_RX + 1).astype(jnp.uint32) * weight_X
        weighted_TX = weighted_RX.at[batch.slot_T].get(mode="fill", fill_value=0)
        before_TX = position_X <= batch.positions_T[:, None]
        mixed_T = jnp.sum(jnp.where(before_TX, weighted_TX, 0), axis=1, dtype=jnp.uint32)
        token_T = ((mixed_T ^ (mixed_T >> 11)) % self.vocab).astype(jnp.int32)
        real_RX = position_X < batch.kv_len_S[:, None]
        bad_R = jnp.any(real_RX & (history_RX == self.bad_token), axis=1)
        return cache_PC, token_T, ~bad_R


def check_invariants(config, state, live_uids: set[int], may_hold: bool = False) -> None:
    """Everything `engine.state` promises, on the host, in numpy."""
    slots, pool = jax.tree.map(np.asarray, (state.slots, state.pool))
    P, C = config.num_pages, config.page_size
    held = [
        slots.page_table_SM[s, : slots.num_pages_S[s]].tolist() for s in range(config.num_slots)
    ]
    counts = np.bincount([p for pages in held for p in pages], minlength=P)
    np.testing.assert_array_equal(pool.refcount_P, counts)
    assert counts[0] == 0, "the trash page is held"
    beyond_SM = np.arange(config.pages_per_seq) >= slots.num_pages_S[:, None]
    assert not slots.page_table_SM[beyond_SM].any()
    assert 0 <= pool.head < P
    queue = pool.queue_P[(pool.head + np.arange(pool.num_free)) % P].tolist()
    assert len(set(queue)) == len(queue)
    assert set(queue) == {p for p in range(1, P) if counts[p] == 0}
    for s in range(config.num_slots):
        status, tokens = slots.status_S[s], slots.num_tokens_S[s]
        if status == 0:
            assert slots.num_pages_S[s] == 0
            continue
        assert int(slots.requests.uid[s]) in live_uids
        assert tokens <= slots.requests.max_len[s]
        assert slots.num_computed_S[s] < tokens + may_hold
        if status == 1:
            assert slots.num_pages_S[s] == 0
        else:
            fork = slots.chain_len_S[s] == -1
            pages = -(-slots.num_computed_S[s] // C)
            assert slots.num_pages_S[s] == pages or (fork and slots.num_pages_S[s] <= pages + 1)
    _check_prefix_index(slots, pool, held, C)


def _check_prefix_index(slots, pool, held, C) -> None:
    history = {}

    def spelled(page):
        if page == 0:
            return ()
        if page not in history:
            parent = int(pool.parent_P[page])
            live = parent == 0 or (
                pool.published_P[parent] and pool.parent_epoch_P[page] == pool.epoch_P[parent]
            )
            before = spelled(parent) if live else None
            history[page] = None if before is None else (*before, *pool.content_PC[page].tolist())
        return history[page]

    chains = [
        (spelled(p), int(pool.salt_P[p])) for p in np.flatnonzero(pool.published_P) if spelled(p)
    ]
    assert len(set(chains)) == len(chains), "one history is published twice"
    for s, pages in enumerate(held):
        for j, page in enumerate(pages):
            if pool.published_P[page]:
                tokens = slots.tokens_SX[s, j * C : (j + 1) * C]
                np.testing.assert_array_equal(pool.content_PC[page], tokens)
