"""Softmax attention as a mixer: parameters, cache declaration and apply.

Order: projection (+ bias), norm over q and k, rotation, append to the cache, attention, output
projection. Keys are cached rotated, so a page can be shared by every request that holds the same
tokens at the same positions.
"""

from functools import partial

import jax
from flax import struct

from models.config import AttentionSpec, NormSpec
from models.contract import contract
from models.kv_cache import PagedKVSpec, StepIndex, append
from models.mlp import with_bias
from models.norms import NormParams, apply_norm, declare_norm
from models.params import Param
from models.rope import apply_rope
from pallas_kernels.paged_attention import ragged_paged_attention

# Which axis counts heads, of the arguments of `_append_and_attend` after the spec.
HEAD_AXES = (1, 1, 1, 0, 2, None)


@struct.dataclass
class AttentionParams:
    wq_NHD: jax.Array | Param
    wk_KHD: jax.Array | Param
    wv_KHD: jax.Array | Param
    wo_DA: jax.Array | Param
    bq_NH: jax.Array | Param | None = None
    bk_KH: jax.Array | Param | None = None
    bv_KH: jax.Array | Param | None = None
    bo_D: jax.Array | Param | None = None
    q_norm: NormParams | None = None
    k_norm: NormParams | None = None
    sinks_N: jax.Array | Param | None = None


def declare_attention(spec: AttentionSpec, norm: NormSpec, width: int) -> AttentionParams:
    D, N, K, H = width, spec.num_heads, spec.num_kv_heads, spec.head_dim
    q_norm, k_norm = None, None
    if spec.qk_norm == "head":
        q_norm, k_norm = declare_norm(norm, "H", (H,)), declare_norm(norm, "H", (H,))
    elif spec.qk_norm == "full":
        q_norm, k_norm = declare_norm(norm, "NH", (N, H)), declare_norm(norm, "KH", (K, H))
    return AttentionParams(
        wq_NHD=Param("NHD", (N, H, D)),
        wk_KHD=Param("KHD", (K, H, D)),
        wv_KHD=Param("KHD", (K, H, D)),
        wo_DA=Param("DA", (D, N * H)),
        bq_NH=Param("NH", (N, H), "zeros") if spec.qkv_bias else None,
        bk_KH=Param("KH", (K, H), "zeros") if spec.qkv_bias else None,
        bv_KH=Param("KH", (K, H), "zeros") if spec.qkv_bias else None,
        bo_D=Param("D", (D,), "zeros") if spec.out_bias else None,
        q_norm=q_norm,
        k_norm=k_norm,
        sinks_N=Param("N", (N,), "zeros", "float32") if spec.sinks else None,
    )


def attention_cache(spec: AttentionSpec) -> PagedKVSpec:
    return PagedKVSpec(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)


def apply_attention(
    spec: AttentionSpec,
    norm: NormSpec,
    params: AttentionParams,
    kv_pages: jax.Array,
    x_TD: jax.Array,
    step: StepIndex,
) -> tuple[jax.Array, jax.Array]:
    """(output_TD, kv_pages with the new tokens' keys and values)."""
    q_TNH = with_bias(contract("TD,NHD->TNH", x_TD, params.wq_NHD), params.bq_NH)
    k_TKH = with_bias(contract("TD,KHD->TKH", x_TD, params.wk_KHD), params.bk_KH)
    v_TKH = with_bias(contract("TD,KHD->TKH", x_TD, params.wv_KHD), params.bv_KH)
    if params.q_norm is not None:
        q_TNH = apply_norm(norm, params.q_norm, q_TNH)
        k_TKH = apply_norm(norm, params.k_norm, k_TKH)
    if spec.rope is not None:
        cos_TR, sin_TR = step.rotation(spec.rope)
        q_TNH = apply_rope(q_TNH, cos_TR, sin_TR)
        k_TKH = apply_rope(k_TKH, cos_TR, sin_TR)
    run = partial(_append_and_attend, spec)
    if step.head_split is not None:
        run = step.head_split.per_device(run, HEAD_AXES, (1, 2))
    o_TNH, kv_pages = run(q_TNH, k_TKH, v_TKH, params.sinks_N, kv_pages, step)
    o_TA = o_TNH.reshape(o_TNH.shape[0], -1)
    out_TD = with_bias(contract("TA,DA->TD", o_TA, params.wo_DA), params.bo_D)
    return out_TD, kv_pages


def _append_and_attend(
    spec: AttentionSpec,
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    sinks_N: jax.Array | None,
    kv_pages: jax.Array,
    step: StepIndex,
) -> tuple[jax.Array, jax.Array]:
    """(o_TNH, kv_pages) of the heads that are given, which may be one device's share."""
    kv_pages = append(kv_pages, k_TKH, v_TKH, step)
    batch = step.batch
    o_TNH = ragged_paged_attention(
        q_TNH,
        kv_pages,
        batch.page_table_SM,
        batch.q_start_S,
        batch.q_len_S,
        batch.kv_len_S,
        scale=spec.scale,
        max_q_len=batch.max_q_len,
        window=spec.window,
        softcap=spec.softcap,
        sinks_N=sinks_N,
        impl=step.attention_impl,
        chip=step.chip,
    )
    return o_TNH, kv_pages
