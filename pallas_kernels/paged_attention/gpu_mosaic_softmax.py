"""Online softmax of a warpgroup's tile of scores, in registers of the tensor cores' layout.

A tile has 64 rows, (token, head of the group), and the 64 keys of a block. Scores are float32, in
units of log2, so that a weight is one exp2 (Milakov and Gimelshein 2018).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_mosaic_ring import Work
from pallas_kernels.paged_attention.gpu_mosaic_sizes import KEYS, ROWS

LOG2E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)
TILE = plgpu.Layout.WGMMA
COLUMN = TILE.reduce(1)


def columns(x_M: jax.Array, width: int) -> jax.Array:
    return lax.broadcast_in_dim(x_M, (ROWS, width), [0])


def start(sinks_ref, r_M: jax.Array, group: int, work: Work) -> tuple[jax.Array, jax.Array]:
    """Maximum and sum before the first key. A sink is a key that was seen before all others and
    whose value is 0; where a tile is shared, the sum over parts adds it once."""
    sink_M = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), COLUMN)
    if sinks_ref is not None:
        head_M, alone = lax.rem(r_M, group), work.parts == 1
        for g in range(group):
            sink = sinks_ref[work.head * group + g].astype(jnp.float32) * LOG2E
            sink_M = jnp.where((head_M == g) & alone, sink, sink_M)
    # The maximum is finite: from -inf there is no distance to the next one.
    max_M = jnp.maximum(sink_M, LOWEST)
    return max_M, jnp.exp2(sink_M - max_M)


def scaled(score_MB: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Scaled and capped, in units of log2."""
    if softcap is None:
        return score_MB * (scale * LOG2E)
    # tanh by exp2: the hardware's own has 11 bits.
    e_MB = jnp.exp2(score_MB * (2 * LOG2E * scale / softcap))
    return (1 - 2 / (1 + e_MB)) * (softcap * LOG2E)


def visible(score_MB: jax.Array, last_M: jax.Array, window: int | None) -> jax.Array:
    """-inf where the row does not see the key; its last one is `last_M`, counted in the block."""
    x_MB = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=TILE)
    last_MB = columns(last_M, KEYS)
    visible_MB = x_MB <= last_MB
    if window is not None:
        visible_MB &= x_MB > last_MB - window
    return jnp.where(visible_MB, score_MB, -jnp.inf)


def add_scores(score_MB: jax.Array, max_M: jax.Array, sum_M: jax.Array) -> tuple[jax.Array, ...]:
    """Weights relative to the new maximum; new maximum and sum; what older sums shrink by."""
    new_max_M = jnp.maximum(max_M, score_MB.max(axis=1))
    shrink_M = jnp.exp2(max_M - new_max_M)
    weight_MB = jnp.exp2(score_MB - columns(new_max_M, KEYS))
    return weight_MB, new_max_M, sum_M * shrink_M + weight_MB.sum(axis=1), shrink_M


def log_sum(max_M: jax.Array, sum_M: jax.Array) -> jax.Array:
    """log2 of the sum of all weights; -inf where there were none."""
    return jnp.where(sum_M == 0, -jnp.inf, max_M + jnp.log(sum_M) * LOG2E)
