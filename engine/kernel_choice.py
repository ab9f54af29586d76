"""Whose kernels an engine uses: the chip's own where they take all of its calls, else plain XLA.

The page layout follows the kernels, so this is settled once, before the cache is made. In: a
network, the engine's sizes, the chip. Out: the chip or None, and why None. Invariant: what is
returned takes every attention call of every program of the engine.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from engine.config import EngineConfig
from models.config import AttentionSpec, ModelConfig
from models.kv_cache import PagedKVSpec, pool_shape
from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention import choose, refusals
from pallas_kernels.paged_attention.spec import KernelSpec, check

PLAIN = ("xla", "reference")  # on any device, over pages laid out for none


def kernel_chip(
    network: ModelConfig,
    config: EngineConfig,
    dtype: jnp.dtype,
    chip: Chip | None,
    impl: str = "auto",
    parts: int = 1,
    unknown: str | None = None,
) -> tuple[Chip | None, str | None]:
    """`chip`, or None and, where `auto` might have used the chip's kernels, the reason.

    `parts` is the number of devices that the heads are split over; `unknown` what jax calls an
    accelerator for which there is no `chip`. ValueError: an implementation that was asked for by
    name cannot take a call.
    """
    if impl in PLAIN:
        return None, None
    if chip is None and unknown is not None:
        reason = f"the chip table (pallas_kernels/chips.py) has no row for {unknown!r}"
        if impl != "auto":
            raise ValueError(f"impl {impl!r}: {reason}")
        return None, reason
    if chip is None and impl == "auto":
        return None, None
    for spec in calls(network, config, config.program_budgets, dtype, chip, parts):
        if choose(spec, chip, impl) in PLAIN:
            reasons = refusals(spec, chip)
            return None, "; ".join(f"{n}: {r}" for n, r in reasons.items() if n not in PLAIN)
    return chip, None


def calls(
    network: ModelConfig,
    config: EngineConfig,
    budgets: Sequence[int],
    dtype: jnp.dtype,
    chip: Chip | None,
    parts: int = 1,
) -> list[KernelSpec]:
    """The different attention calls of one device in the programs of these token budgets: of the
    narrow pass and of each wide one."""
    passes = [(config.max_num_seqs, 1), *((budget, budget) for budget in budgets)]
    found = [
        _call(layer.mixer, config, dtype, chip, parts, num_tokens, max_q_len)
        for layer in network.layers
        for num_tokens, max_q_len in passes
    ]
    return list(dict.fromkeys(found))


def _call(
    mixer: AttentionSpec,
    config: EngineConfig,
    dtype: jnp.dtype,
    chip: Chip | None,
    parts: int,
    num_tokens: int,
    max_q_len: int,
) -> KernelSpec:
    rows, heads = config.max_num_seqs, mixer.num_heads // parts
    cached = PagedKVSpec(mixer.num_kv_heads // parts, mixer.head_dim)
    slot_array = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return check(
        jax.ShapeDtypeStruct((num_tokens, heads, mixer.head_dim), dtype),
        jax.ShapeDtypeStruct(pool_shape(cached, config.num_pages, config.page_size, chip), dtype),
        jax.ShapeDtypeStruct((rows, config.pages_per_seq), jnp.int32),
        *(slot_array,) * 3,
        scale=mixer.scale,
        max_q_len=max_q_len,
        window=mixer.window,
        softcap=mixer.softcap,
        sinks_N=jax.ShapeDtypeStruct((heads,), jnp.float32) if mixer.sinks else None,
    )
