"""Choosing the next token of each row, on device, in float32.

Order: log-probabilities of the untouched logits; edits (`engine.logit_edits`: bias, allowed ids,
bad words, min_tokens, penalties); temperature; min-p, top-k, top-p (`engine.filters`); the draw. A
row with temperature 0 or top_k 1 takes the largest edited logit, the lowest id among equals. What
no row of the batch asks for does not run.

Invariant: a row's token depends only on its own logits, settings and history. Its random key is
fold_in(fold_in(seed, choice), output position): never the slot, the batch or the step.
"""

import jax
import jax.numpy as jnp

from engine.filters import Settings, keep, kept_mask
from engine.logit_edits import edit_logits
from engine.logprobs import Logprobs, empty_logprobs, logprobs_of
from engine.row_search import argmax_rows, draw_rows
from engine.sampling_rows import SamplingLimits, SamplingRows, empty_rows
from engine.state import NO_TOKEN
from engine.step import RowView, Sampled


def sample(
    limits: SamplingLimits, view: RowView, logits_RV: jax.Array, samples_R: jax.Array
) -> Sampled:
    """A token for each row with `samples_R`; `extra` is a `Logprobs`, of meaning to rows that ask.

    Not ok: NaN or +inf among the row's logits, or no token left that can be chosen.
    """
    logits_RV = real_columns(logits_RV.astype(jnp.float32), limits.vocab_size)
    rows = _settings(limits, view, samples_R)
    edited_RV, sound_R = edit_logits(logits_RV, rows, view)
    position_R = view.num_tokens_R - view.requests_R.prompt_len
    token_R = _choose(edited_RV, rows, position_R)
    ok_R = sound_R & (token_R >= 0)
    return Sampled(
        token_R=jnp.where(samples_R & ok_R, token_R, NO_TOKEN),
        ok_R=ok_R | ~samples_R,
        extra=_logprobs(limits, rows, logits_RV, token_R),
    )


def no_sample(limits: SamplingLimits, num_rows: int) -> Sampled:
    """What `sample` gives rows that sample nothing."""
    return Sampled(
        token_R=jnp.full(num_rows, NO_TOKEN, jnp.int32),
        ok_R=jnp.ones(num_rows, bool),
        extra=empty_logprobs(num_rows, limits.max_logprobs),
    )


def _choose(logits_RV: jax.Array, rows: SamplingRows, position_R: jax.Array) -> jax.Array:
    """Token of each row, -1 where the row is unsound or leaves no choice."""
    best_R = argmax_rows(logits_RV)
    random_R = (rows.temperature > 0) & (rows.top_k != 1) & (best_R >= 0)

    def draw() -> jax.Array:
        weight_RV = _weights(logits_RV, best_R, rows.temperature)
        weight_RV = _filtered(weight_RV, rows, random_R)
        u_R2 = _uniforms(rows.seed, rows.choice, position_R)
        return jnp.where(random_R, draw_rows(weight_RV, u_R2), best_R)

    return jax.lax.cond(jnp.any(random_R), draw, lambda: best_R)


def _weights(logits_RV: jax.Array, best_R: jax.Array, temperature_R: jax.Array) -> jax.Array:
    """Probabilities relative to the best token's. Any positive temperature gives finite ones."""
    best_R1 = jnp.take_along_axis(logits_RV, best_R[:, None], axis=1, mode="clip")
    safe_R1 = jnp.maximum(jnp.where(temperature_R > 0, temperature_R, 1.0), 1e-30)[:, None]
    return jnp.exp((logits_RV - best_R1) / safe_R1)


def _filtered(weight_RV: jax.Array, rows: SamplingRows, random_R: jax.Array) -> jax.Array:
    filters = Settings(
        min_p_R=jnp.where(random_R, rows.min_p, 0.0),
        top_k_R=jnp.where(random_R, rows.top_k, 0),
        top_p_R=jnp.where(random_R, rows.top_p, 1.0),
    )
    asks_R = (filters.min_p_R > 0) | (filters.top_k_R > 0) | (filters.top_p_R < 1)
    return jax.lax.cond(
        jnp.any(asks_R),
        lambda: jnp.where(kept_mask(keep(weight_RV, filters), weight_RV), weight_RV, 0.0),
        lambda: weight_RV,
    )


def _uniforms(seed_R2: jax.Array, choice_R: jax.Array, position_R: jax.Array) -> jax.Array:
    """Two uniforms per row, [R, 2]."""

    def row(seed_2: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
        return jax.random.uniform(key, (2,), jnp.float32)

    return jax.vmap(row)(seed_R2, choice_R, position_R)


def real_columns(logits_RV: jax.Array, vocab_size: int) -> jax.Array:
    """Columns beyond the vocabulary (padding of the table) cannot be chosen."""
    width = logits_RV.shape[-1]
    if vocab_size > width:
        raise ValueError(f"vocab_size {vocab_size} exceeds the logits' width {width}")
    if vocab_size == width:
        return logits_RV
    return jnp.where(jnp.arange(width) < vocab_size, logits_RV, -jnp.inf)


def _settings(limits: SamplingLimits, view: RowView, samples_R: jax.Array) -> SamplingRows:
    """The rows' settings, neutral where nothing is sampled: such rows cause no work."""

    def neutral(asked: jax.Array, empty: jax.Array) -> jax.Array:
        shape = (-1,) + (1,) * (asked.ndim - 1)
        return jnp.where(samples_R.reshape(shape), asked, empty)

    return jax.tree.map(neutral, view.requests_R.sampling, empty_rows(samples_R.shape[0], limits))


def _logprobs(
    limits: SamplingLimits, rows: SamplingRows, logits_RV: jax.Array, token_R: jax.Array
) -> Logprobs:
    count = limits.max_logprobs
    return jax.lax.cond(
        jnp.any(rows.num_logprobs >= 0),
        lambda: logprobs_of(logits_RV, jnp.maximum(token_R, 0), count),
        lambda: empty_logprobs(token_R.shape[0], count),
    )
