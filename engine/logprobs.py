"""Log-probabilities of tokens: log-softmax of the model's own logits, before any setting acts.

They do not depend on temperature, filters, penalties or biases, and are always finite: what has
probability 0 is left out.
"""

import jax
import jax.numpy as jnp
from flax import struct

from engine.row_search import top_rows

NO_TOKEN = -1  # id of an entry that is left out


@struct.dataclass
class Logprobs:
    """Entry 0 of each row is the token itself, then the best ones, best first.

    ids_RL       int32 token ids, NO_TOKEN where the vocabulary has no more possible tokens
    logprobs_RL  float32
    rank_R       int32 rank of the token itself, 1 for the best; equals are ranked by id
    """

    ids_RL: jax.Array
    logprobs_RL: jax.Array
    rank_R: jax.Array


def empty_logprobs(num_rows: int, count: int) -> Logprobs:
    return Logprobs(
        ids_RL=jnp.full((num_rows, count + 1), NO_TOKEN, jnp.int32),
        logprobs_RL=jnp.zeros((num_rows, count + 1), jnp.float32),
        rank_R=jnp.zeros(num_rows, jnp.int32),
    )


def logprobs_of(logits_RV: jax.Array, token_R: jax.Array, count: int) -> Logprobs:
    """Log-probability and rank of each row's token, and the `count` best of the row."""
    vocab = logits_RV.shape[-1]
    value_R1 = jnp.take_along_axis(logits_RV, token_R[:, None], axis=1, mode="clip")
    ids_V = jnp.arange(vocab, dtype=jnp.int32)
    ahead_RV = (logits_RV > value_R1) | ((logits_RV == value_R1) & (ids_V < token_R[:, None]))

    best_RJ, id_RJ = top_rows(logits_RV, min(count, vocab))
    missing = ((0, 0), (0, count - best_RJ.shape[1]))
    best_RJ = jnp.pad(best_RJ, missing, constant_values=-jnp.inf)
    id_RJ = jnp.pad(id_RJ, missing, constant_values=NO_TOKEN)

    top_R1 = jnp.max(logits_RV, axis=-1, keepdims=True)
    log_sum_R1 = jnp.log(jnp.sum(jnp.exp(logits_RV - top_R1), axis=-1, keepdims=True))
    values_RL = jnp.concatenate([value_R1, best_RJ], axis=1)
    logprobs_RL = (values_RL - top_R1) - log_sum_R1
    possible_RL = jnp.isfinite(logprobs_RL)
    return Logprobs(
        ids_RL=jnp.where(possible_RL, jnp.concatenate([token_R[:, None], id_RJ], axis=1), NO_TOKEN),
        logprobs_RL=jnp.where(possible_RL, logprobs_RL, 0.0),
        rank_R=1 + jnp.sum(ahead_RV, axis=-1, dtype=jnp.int32),
    )
