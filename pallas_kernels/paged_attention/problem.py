"""What one call of ragged paged attention asks for, as far as it is static, and its validation."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Problem:
    """Static facts on which an implementation decides whether it can take the call."""

    num_rows: int
    num_slots: int
    pages_per_slot: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_q_len: int
    window: int | None
    softcap: float | None
    sinks: bool
    q_dtype: Any
    kv_dtype: Any


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
    max_q_len: int,
    window: int | None,
    softcap: float | None,
    sinks_N: jax.Array | None,
) -> Problem:
    """The call's static facts; ValueError with the name, the value and what it must be."""
    _require("q_TNH", q_TNH, (None, None, None), jnp.floating)
    num_rows, num_heads, head_dim = q_TNH.shape
    _require("kv_pages", kv_pages, (None, 2, None, None, head_dim), jnp.floating)
    _, _, num_kv_heads, page_size, _ = kv_pages.shape
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
    return Problem(
        num_rows=num_rows,
        num_slots=num_slots,
        pages_per_slot=pages_per_slot,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_q_len=max_q_len,
        window=window,
        softcap=softcap,
        sinks=sinks_N is not None,
        q_dtype=q_TNH.dtype,
        kv_dtype=kv_pages.dtype,
    )
