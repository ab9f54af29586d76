"""Changes to logits before temperature: biases, allowed ids, bad words, stop tokens, penalties.

Input logits_RV float32, each row's settings and its view of the history; output edited logits, -inf
where a token cannot be chosen. Each kind of edit runs only when some row asks for it, and rows that
do not ask keep their logits bit for bit.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from engine.sampling_rows import NO_ID, SamplingRows
from engine.step import RowView

Edit = Callable[[jax.Array, SamplingRows, RowView], jax.Array]


def edit_logits(
    logits_RV: jax.Array, rows: SamplingRows, view: RowView
) -> tuple[jax.Array, jax.Array]:
    """(edited logits, sound_R). Not sound: NaN or +inf that an edit might hide."""
    edits = [
        (_asks_bias(rows), _add_bias),
        (_asks_allowed(rows), _only_allowed),
        (_asks_bad_words(rows), _no_bad_words),
        (_num_outputs(view) < rows.min_tokens, _no_stop),
        (rows.repetition != 1, _penalise_repetition),
        ((rows.presence != 0) | (rows.frequency != 0), _penalise_output),
    ]

    def run() -> tuple[jax.Array, jax.Array]:
        edited_RV = logits_RV
        for asks_R, edit in edits:
            edited_RV = _where_asked(asks_R, edit, edited_RV, rows, view)
        return edited_RV, jnp.all(logits_RV < jnp.inf, axis=-1)

    asked = jnp.any(jnp.stack([asks_R for asks_R, _ in edits]))
    sound_R = jnp.ones(logits_RV.shape[0], bool)
    return jax.lax.cond(asked, run, lambda: (logits_RV, sound_R))


def _where_asked(
    asks_R: jax.Array, edit: Edit, logits_RV: jax.Array, rows: SamplingRows, view: RowView
) -> jax.Array:
    def run() -> jax.Array:
        return jnp.where(asks_R[:, None], edit(logits_RV, rows, view), logits_RV)

    return jax.lax.cond(jnp.any(asks_R), run, lambda: logits_RV)


def _num_outputs(view: RowView) -> jax.Array:
    return view.num_tokens_R - view.requests_R.prompt_len


def _asks_bias(rows: SamplingRows) -> jax.Array:
    return jnp.any(rows.bias_ids != NO_ID, axis=-1)


def _asks_allowed(rows: SamplingRows) -> jax.Array:
    return jnp.any(rows.allowed_ids != NO_ID, axis=-1)


def _asks_bad_words(rows: SamplingRows) -> jax.Array:
    return jnp.any(rows.bad_words != NO_ID, axis=(-1, -2))


def _add_bias(logits_RV: jax.Array, rows: SamplingRows, view: RowView) -> jax.Array:
    return logits_RV.at[_places(logits_RV, rows.bias_ids)].add(rows.bias, mode="drop")


def _only_allowed(logits_RV: jax.Array, rows: SamplingRows, view: RowView) -> jax.Array:
    at = _places(logits_RV, rows.allowed_ids)
    allowed_RA = logits_RV.at[at].get(mode="fill", fill_value=-jnp.inf)
    return jnp.full_like(logits_RV, -jnp.inf).at[at].set(allowed_RA, mode="drop")


def _no_bad_words(logits_RV: jax.Array, rows: SamplingRows, view: RowView) -> jax.Array:
    """Forbid the last token of each word whose other tokens are the last ones of the history."""
    before = rows.bad_words.shape[-1] - 1
    position_RL = view.num_tokens_R[:, None] - before + jnp.arange(before)
    tail_RL = view.tokens_SX.at[view.slot_R[:, None], jnp.maximum(position_RL, 0)].get(mode="clip")
    tail_RL = jnp.where(position_RL >= 0, tail_RL, NO_ID - 1)  # equals no token and no filler
    prefix_RWL = rows.bad_words[:, :, :-1]
    fits_RW = jnp.all((prefix_RWL == NO_ID) | (prefix_RWL == tail_RL[:, None]), axis=-1)
    last_RW = jnp.where(fits_RW, rows.bad_words[:, :, -1], NO_ID)
    return logits_RV.at[_places(logits_RV, last_RW)].set(-jnp.inf, mode="drop")


def _no_stop(logits_RV: jax.Array, rows: SamplingRows, view: RowView) -> jax.Array:
    return logits_RV.at[_places(logits_RV, view.requests_R.stop_ids)].set(-jnp.inf, mode="drop")


def _penalise_repetition(logits_RV: jax.Array, rows: SamplingRows, view: RowView) -> jax.Array:
    seen_RV = jnp.zeros(logits_RV.shape, bool)
    seen_RV = seen_RV.at[_history(logits_RV, view, 0)].set(True, mode="drop")
    penalty_R1 = rows.repetition[:, None]
    scaled_RV = jnp.where(logits_RV > 0, logits_RV / penalty_R1, logits_RV * penalty_R1)
    return jnp.where(seen_RV, scaled_RV, logits_RV)


def _penalise_output(logits_RV: jax.Array, rows: SamplingRows, view: RowView) -> jax.Array:
    count_RV = jnp.zeros(logits_RV.shape, jnp.float32)
    at = _history(logits_RV, view, view.requests_R.prompt_len[:, None])
    count_RV = count_RV.at[at].add(1.0, mode="drop")
    penalty_RV = rows.frequency[:, None] * count_RV + rows.presence[:, None]
    return jnp.where(count_RV > 0, logits_RV - penalty_RV, logits_RV)


def _history(
    logits_RV: jax.Array, view: RowView, first_R1: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Places in [R, V] of the known tokens from position `first_R1` on."""
    tokens_RX = view.tokens_SX.at[view.slot_R].get(mode="clip")
    position_X = jnp.arange(tokens_RX.shape[-1])
    known_RX = (position_X >= first_R1) & (position_X < view.num_tokens_R[:, None])
    return _places(logits_RV, jnp.where(known_RX, tokens_RX, NO_ID))


def _places(logits_RV: jax.Array, ids_RJ: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices into [R, V]; NO_ID becomes V, which is dropped (-1 itself would wrap)."""
    num_rows, vocab = logits_RV.shape
    return jnp.arange(num_rows)[:, None], jnp.where(ids_RJ >= 0, ids_RJ, vocab)
