"""What one call of ragged paged attention asks for, as far as it is static, and its validation."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.layout import num_kv_heads_of


@dataclass(frozen=True)
class KernelSpec:
    """Static facts on which an implementation decides whether it can take the call.

    num_pages, page_parts, page_rows, page_lanes   axes 0, 1, 2 and 4 of the page pool, see `layout`
    kv_scales               pages hold multiples of a scale per KV head
    q_dtype, kv_dtype       names of dtypes
    """

    num_rows: int
    num_slots: int
    pages_per_slot: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    page_parts: int
    page_rows: int
    page_lanes: int
    max_q_len: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    kv_scales: bool
    q_dtype: str
    kv_dtype: str

    @property
    def pool_shape(self) -> tuple[int, ...]:
        """Of one layer."""
        return (
            self.num_pages,
            self.page_parts,
            self.page_rows,
            self.page_size,
            self.page_lanes,
        )

    @property
    def page_bytes(self) -> int:
        """Of one page of one layer."""
        return math.prod(self.pool_shape[1:]) * jnp.dtype(self.kv_dtype).itemsize


def tolerance(spec: KernelSpec, length: int) -> tuple[float, float]:
    """Largest absolute error, and error relative to the output, of a call over `length` keys.

    Scores and sums round by unit roundoff 2^-24 with random signs: a score is a sum of H products,
    an output one of `length`, carried to the output by values of at most 4 (a normal draw). Where
    both operands have 16 bits or fewer the weights are rounded to bfloat16 before they meet the
    values: 2^-9 of each weight, whose sum is 1. The output is rounded once to its dtype.
    """
    absolute = 4 * 2.0**-24 * (math.sqrt(spec.head_dim) + math.sqrt(length))
    if "float32" not in (spec.q_dtype, spec.kv_dtype):
        absolute += 4 * 2.0**-9
    rounding = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
    return absolute, rounding[spec.q_dtype]


def _require(name: str, array: jax.Array, shape: tuple[int | None, ...], kind: Any) -> None:
    """`None` in `shape` is any size from 1 up."""
    fits = len(array.shape) == len(shape) and all(
        size == want or (want is None and size >= 1)
        for size, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {array.shape}: must be ({wanted})")
    if not jnp.issubdtype(array.dtype, kind):
        raise ValueError(f"{name} is {array.dtype}: must be {getattr(kind, '__name__', kind)}")


def check(
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
) -> KernelSpec:
    """The call's static facts; ValueError with the name, the value and what it must be."""
    _require("q_TNH", q_TNH, (None, None, None), jnp.floating)
    num_rows, num_heads, head_dim = q_TNH.shape
    _require("kv_pages", kv_pages, (None,) * 5, jnp.number)
    num_kv_heads = num_kv_heads_of(kv_pages.shape, head_dim)
    num_pages, page_parts, page_rows, page_size, page_lanes = kv_pages.shape
    if kv_scale_2K is not None:
        _require("kv_scale_2K", kv_scale_2K, (2, num_kv_heads), jnp.floating)
    elif not jnp.issubdtype(kv_pages.dtype, jnp.floating):
        raise ValueError(
            f"kv_pages is {kv_pages.dtype}: must be floating, or come with kv_scale_2K"
        )
    _require("page_table_SM", page_table_SM, (None, None), jnp.int32)
    num_slots, pages_per_slot = page_table_SM.shape
    for name, array in (("q_start_S", q_start_S), ("q_len_S", q_len_S), ("kv_len_S", kv_len_S)):
        _require(name, array, (num_slots,), jnp.int32)
    if sinks_N is not None:
        _require("sinks_N", sinks_N, (num_heads,), jnp.floating)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads over {num_kv_heads} KV heads: must be a whole multiple"
        )
    if max_q_len < 1:
        raise ValueError(f"max_q_len is {max_q_len}: must be at least 1")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: must be at least 1 (None for full attention)")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}: must be positive (None for no cap)")
    return KernelSpec(
        num_rows=num_rows,
        num_slots=num_slots,
        pages_per_slot=pages_per_slot,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=num_pages,
        page_parts=page_parts,
        page_rows=page_rows,
        page_lanes=page_lanes,
        max_q_len=max_q_len,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks_N is not None,
        kv_scales=kv_scale_2K is not None,
        q_dtype=q_TNH.dtype.name,
        kv_dtype=kv_pages.dtype.name,
    )
