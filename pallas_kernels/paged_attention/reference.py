"""Ragged paged attention as it is defined: one query row at a time over a dense view, float32.

The oracle for the other implementations, written to be checked by eye. It shares nothing with them
but the page layout. It copies the whole cache and takes one row after the other, so it is slow.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.layout import read_dense
from pallas_kernels.paged_attention.spec import KernelSpec


def supports(spec: KernelSpec, chip: Chip | None) -> str | None:
    del spec, chip
    return None


def attend(
    q_TNH: jax.Array,
    kv_pages: jax.Array,
    page_table_SM: jax.Array,
    q_start_S: jax.Array,
    q_len_S: jax.Array,
    kv_len_S: jax.Array,
    *,
    scale: float,
    max_q_len: int,
    window: int | None,
    softcap: float | None,
    sinks_N: jax.Array | None,
    kv_scale_2K: jax.Array | None = None,
    chip: Chip | None = None,
) -> jax.Array:
    """Attention of every row to the keys of its slot, 0 for rows that no slot owns."""
    del max_q_len, chip  # for implementations that need them
    num_rows, num_heads, head_dim = q_TNH.shape
    k_SXKH, v_SXKH = read_dense(kv_pages, page_table_SM, head_dim)
    num_kv_heads = k_SXKH.shape[2]
    x_X = jnp.arange(k_SXKH.shape[1])
    k_scale_K1, v_scale_K1 = (
        jnp.ones((2, num_kv_heads, 1)) if kv_scale_2K is None else kv_scale_2K[..., None]
    )

    def attend_row(t):
        owns_S = (q_start_S <= t) & (t < q_start_S + q_len_S)
        s = jnp.argmax(owns_S)
        position = kv_len_S[s] - q_len_S[s] + t - q_start_S[s]
        visible_X = x_X <= position
        if window is not None:
            visible_X &= x_X > position - window

        q_KGH = q_TNH[t].reshape(num_kv_heads, -1, head_dim).astype(jnp.float32)
        k_XKH = k_SXKH[s].astype(jnp.float32) * k_scale_K1
        v_XKH = jnp.where(visible_X[:, None, None], v_SXKH[s].astype(jnp.float32) * v_scale_K1, 0.0)
        score_KGX = scale * jnp.einsum("KGH,XKH->KGX", q_KGH, k_XKH, precision="highest")
        if softcap is not None:
            score_KGX = softcap * jnp.tanh(score_KGX / softcap)
        score_KGX = jnp.where(visible_X, score_KGX, -jnp.inf)
        if sinks_N is not None:
            sink_KG1 = sinks_N.reshape(num_kv_heads, -1, 1).astype(jnp.float32)
            score_KGX = jnp.concatenate([score_KGX, sink_KG1], axis=-1)
        weight_KGX = jax.nn.softmax(score_KGX, axis=-1)[:, :, : x_X.size]
        o_KGH = jnp.einsum("KGX,XKH->KGH", weight_KGX, v_XKH, precision="highest")
        seen = jnp.any(owns_S) & jnp.any(visible_X)
        return jnp.where(seen, o_KGH.reshape(num_heads, head_dim), 0.0)

    return jax.lax.map(attend_row, jnp.arange(num_rows)).astype(q_TNH.dtype)
