"""Attention calls by themselves, for chips that are not here, and what their kernels need there.

`attention_calls` is the program of some calls; `kernels_of_calls` compiles it for a GPU and tells
the kernels of each call apart, by the order in which the program starts them.
"""

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.chips import chip_of_device
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.paged_attention.spec import KernelSpec
from sharding.aot import Program, compile_for
from sharding.axes import HeadSplit
from sharding.kernel_reports import GpuKernel

KERNELS = ("attention", "combine")


def attention_calls(mesh: Mesh, *, specs: Sequence[KernelSpec], impl: str = "auto") -> Program:
    """These calls of one device. Those of as many slots read the same lengths, as the layers of a
    step do, so that what depends on lengths alone is computed once."""
    chip = chip_of_device(mesh.devices.flat[0].device_kind)

    def attend(lengths, arrays):
        out = []
        for i, (spec, (q_TNH, kv_pages, table_SM, sinks_N, scale_2K)) in enumerate(
            zip(specs, arrays, strict=True)
        ):
            with jax.named_scope(f"call_{i}"):
                out_TNH = ragged_paged_attention(
                    q_TNH,
                    kv_pages,
                    table_SM,
                    *lengths[spec.num_slots],
                    scale=spec.scale,
                    max_q_len=spec.max_q_len,
                    window=spec.window,
                    softcap=spec.softcap,
                    sinks_N=sinks_N,
                    kv_scale_2K=scale_2K,
                    impl=impl,
                    chip=chip,
                )
            out.append(out_TNH)
        return (out,)

    def array(shape, dtype) -> jax.ShapeDtypeStruct:
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    lengths = {n: [array((n,), jnp.int32)] * 3 for n in {spec.num_slots for spec in specs}}
    arrays = [
        (
            array((spec.num_rows, spec.num_heads, spec.head_dim), spec.q_dtype),
            array(spec.pool_shape, spec.kv_dtype),
            array((spec.num_slots, spec.pages_per_slot), jnp.int32),
            array((spec.num_heads,), jnp.float32) if spec.sinks else None,
            array((2, spec.num_kv_heads), jnp.float32) if spec.kv_scales else None,
        )
        for spec in specs
    ]
    on_each = HeadSplit(mesh, None).per_device(attend, (None, None), (None,))
    return Program(on_each, (lengths, arrays))


def kernels_of_calls(
    specs: Sequence[KernelSpec], target: str, impl: str
) -> list[tuple[GpuKernel, ...]]:
    """Of each call on one GPU: attention, with Triton of few and then of many new tokens, and the
    sum over parts. Mosaic's kernels can be told apart only where there is one call.

    ValueError: the compiler's words where it refused.
    """
    arguments = {"specs": tuple(specs), "impl": impl}
    entry = "sharding.attention_programs:attention_calls"
    compiled = compile_for(entry, arguments, target, kernels=True)
    if compiled.error:
        raise ValueError(f"the compiler for {target} refused attention: {compiled.error}")
    ours = [k for k in compiled.kernels if k.name.split("_")[0] in KERNELS]
    if len(specs) == 1:
        return [tuple(ours)]
    started = [op for op in compiled.main.all_ops() if op.opcode == "custom-call"]
    found = [[] for _ in specs]
    for op, kernel in zip(started, ours, strict=True):
        call = re.search(r"/call_(\d+)/", op.source)
        found[int(call[1])].append(kernel)
    return [tuple(kernels) for kernels in found]
