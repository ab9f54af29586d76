"""Calls of the interpreted Triton kernels."""

import functools

import jax
import numpy as np

from pallas_kernels.paged_attention import gpu_triton
from pallas_kernels.paged_attention.gpu_triton_sizes import Sizes
from pallas_kernels.paged_attention.spec import check
from tests.compiling import QUICK


def static_of(case):
    return {
        "scale": case.scale,
        "max_q_len": max(1, *case.q_lens),
        "window": case.window,
        "softcap": case.softcap,
    }


def small_sizes(case):
    """Tiles, blocks and parts of few tokens and keys, so that the named cases have several."""
    group = case.num_heads // case.num_kv_heads
    few = Sizes(max(1, 8 // group), 16, 32, parts=4, part_keys=32, programs=2)
    return few, Sizes(max(1, 32 // group), 32, 32, programs=3)


def jitted():
    return jax.jit(
        functools.partial(gpu_triton.attend, interpret=True),
        static_argnames=("scale", "max_q_len", "window", "softcap", "sizes", "chip"),
        compiler_options=QUICK,
    )


attend = jitted()


def run(case, inputs, sizes=None, kv_scale_2K=None, chip=None, attend=attend, **change):
    """Output in float64 and the call's spec."""
    *arrays, sinks_N = inputs
    static, per_head = static_of(case) | change, {"sinks_N": sinks_N, "kv_scale_2K": kv_scale_2K}
    with jax.numpy_dtype_promotion("strict"):
        out_TNH = attend(*arrays, **static, **per_head, sizes=sizes, chip=chip)
    spec = check(*arrays, **static, **per_head)
    return np.asarray(out_TNH, np.float64), spec
