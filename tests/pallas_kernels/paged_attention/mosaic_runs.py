"""Calls of the interpreted Mosaic GPU kernel, and where they can be made."""

import functools
import os

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import gpu_mosaic
from pallas_kernels.paged_attention.gpu_mosaic_sizes import ROWS, Sizes
from pallas_kernels.paged_attention.spec import check
from tests.compiling import QUICK
from tests.pallas_kernels.paged_attention.gpu_runs import static_of

INTERPRETER = getattr(plgpu, "InterpretGPUParams", None)
MOST_THREADS = 1 + 4  # of XLA's pool that a call with 4 warpgroups holds while they wait
if INTERPRETER is None:
    MISSING = "jax before 0.11 has no public interpreter of Mosaic GPU kernels"
elif int(os.environ.get("NPROC", 1)) < MOST_THREADS:
    MISSING = f"interpreted warpgroups wait for each other: set NPROC to {MOST_THREADS} or more"
else:
    MISSING = None
needs_interpreter = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


def decode_sizes(case, **change):
    """One consumer per ring, two rings, all slots split."""
    queries = min(ROWS * case.num_kv_heads // case.num_heads, max(1, *case.q_lens))
    sizes = {
        "queries": queries,
        "tiles": 1,
        "streams": 2,
        "stages": 3,
        "programs": 1,
        "split_queries": max(1, *case.q_lens),
        "parts": 2,
        "part_keys": 64,
    }
    return Sizes(**(sizes | change))


def chunk_sizes(case, **change):
    """Two consumers share a ring; slots of one new token are split."""
    queries = 2 * (ROWS * case.num_kv_heads // case.num_heads)
    return decode_sizes(
        case, **{"queries": queries, "tiles": 2, "streams": 1, "split_queries": 1} | change
    )


def wide_sizes(case, **change):
    """Two consumers share a ring and a tile, each with half of the columns."""
    return decode_sizes(case, **{"streams": 1, "shares": 2} | change)


def jitted(races=False):
    interpret = INTERPRETER(detect_races=races) if INTERPRETER else True
    return jax.jit(
        functools.partial(gpu_mosaic.attend, interpret=interpret),
        static_argnames=("scale", "max_q_len", "window", "softcap", "sizes", "chip"),
        compiler_options=QUICK,
    )


attend = jitted()


def run(case, inputs, sizes=None, chip=None, attend=attend, **change):
    """Output in float64 and the call's spec."""
    *arrays, sinks_N = inputs
    static = static_of(case) | change
    with jax.numpy_dtype_promotion("strict"):
        out_TNH = attend(*arrays, **static, sinks_N=sinks_N, sizes=sizes, chip=chip)
    return np.asarray(out_TNH, np.float64), check(*arrays, **static, sinks_N=sinks_N)
