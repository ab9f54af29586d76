"""Ragged paged attention: one contract for prefill, chunked prefill, decode and verification.

Slot s brings q_len_S[s] new queries, rows q_start_S[s] .. of q_TNH, whose keys and values are
already in the page pool (see `layout`). The query i of slot s stands at position
p = kv_len_S[s] - q_len_S[s] + i and sees the keys j with max(0, p - window + 1) <= j <= p.

Invariant: unused pages, positions past kv_len, padding rows and page table entries past the last
used one may hold anything, NaN included, and change no bit of the result.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention import gpu_mosaic, gpu_triton, reference, tpu, xla
from pallas_kernels.paged_attention.spec import KernelSpec, check


@dataclass(frozen=True)
class Implementation:
    """`supports` gives None or the reason why it cannot take a call on a chip (None: the host's
    CPU); `attend` computes it."""

    supports: Callable[[KernelSpec, Chip | None], str | None]
    attend: Callable[..., jax.Array]


# In the order in which "auto" tries them.
IMPLEMENTATIONS = {
    "tpu": Implementation(tpu.supports, tpu.attend),
    "gpu_mosaic": Implementation(gpu_mosaic.supports, gpu_mosaic.attend),
    "gpu_triton": Implementation(gpu_triton.supports, gpu_triton.attend),
    "xla": Implementation(xla.supports, xla.attend),
    "reference": Implementation(reference.supports, reference.attend),
}


def refusals(spec: KernelSpec, chip: Chip | None, impl: str = "auto") -> dict[str, str | None]:
    """Of each implementation that `impl` allows: None, or why it cannot take the call."""
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}: must be one of {['auto', *IMPLEMENTATIONS]}")
    names = list(IMPLEMENTATIONS) if impl == "auto" else [impl]
    return {name: IMPLEMENTATIONS[name].supports(spec, chip) for name in names}


def choose(spec: KernelSpec, chip: Chip | None = None, impl: str = "auto") -> str:
    """The name of the implementation that takes the call; ValueError with the reasons if none."""
    reasons = refusals(spec, chip, impl)
    for name, reason in reasons.items():
        if reason is None:
            return name
    raise ValueError("; ".join(f"impl {name!r}: {reason}" for name, reason in reasons.items()))


@functools.partial(
    jax.jit, static_argnames=("scale", "max_q_len", "window", "softcap", "impl", "chip")
)
def ragged_paged_attention(
    q_TNH: jax.Array,
    kv_pages: jax.Array,
    page_table_SM: jax.Array,
    q_start_S: jax.Array,
    q_len_S: jax.Array,
    kv_len_S: jax.Array,
    *,
    scale: float,
    max_q_len: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    kv_scale_2K: jax.Array | None = None,
    impl: str = "auto",
    chip: Chip | None = None,
) -> jax.Array:
    """Causal attention of all slots' new tokens over their paged keys and values.

    q_TNH           queries of all slots; the query head n reads KV head n // (N / K)
    kv_pages        one layer's page pool
    page_table_SM   page of positions j*C .. j*C+C-1 in column j, unused columns 0, int32
    q_start_S, q_len_S, kv_len_S   rows of each slot and its keys, the new ones included, int32
    max_q_len       static upper bound of q_len_S: 1 for decode
    window          how many keys a query sees at most, itself included
    softcap         scores become softcap * tanh(scores / softcap)
    sinks_N         one more logit per head in the softmax, whose value is dropped
    kv_scale_2K     what the keys (0) and values (1) of each KV head are multiplied by, float32
    chip            what the call is compiled for; None: the host's CPU

    Returns o_TNH in q's dtype, 0 in rows that no slot owns.
    """
    spec = check(
        q_TNH,
        kv_pages,
        page_table_SM,
        q_start_S,
        q_len_S,
        kv_len_S,
        scale=scale,
        max_q_len=max_q_len,
        window=window,
        softcap=softcap,
        sinks_N=sinks_N,
        kv_scale_2K=kv_scale_2K,
    )
    attend = IMPLEMENTATIONS[choose(spec, chip, impl)].attend
    return attend(
        q_TNH,
        kv_pages,
        page_table_SM,
        q_start_S,
        q_len_S,
        kv_len_S,
        scale=scale,
        max_q_len=max_q_len,
        window=window,
        softcap=softcap,
        sinks_N=sinks_N,
        kv_scale_2K=kv_scale_2K,
        chip=chip,
    )
