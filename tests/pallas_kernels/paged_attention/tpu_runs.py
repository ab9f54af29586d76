"""Calls of the interpreted TPU kernel on inputs whose pages hold one head a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import tpu
from pallas_kernels.paged_attention.layout import pages_shape
from pallas_kernels.paged_attention.spec import check
from tests.compiling import QUICK

LANES = 128


def packed(kv_pages, lanes=LANES):
    """Pages of one head a row as `pages_shape` lays them out for a TPU."""
    pages, _, heads, size, head_dim = kv_pages.shape
    shape = pages_shape(pages, size, heads, head_dim, lanes)
    if shape[1] == 1:
        return jnp.concatenate([kv_pages[:, :1], kv_pages[:, 1:]], axis=-1).reshape(shape)
    if shape[4] > head_dim * (heads // shape[2]):
        return jnp.pad(kv_pages, ((0, 0),) * 4 + ((0, shape[4] - head_dim),))
    share = heads // shape[2]
    kv_P2RfCH = kv_pages.reshape(pages, 2, shape[2], share, size, head_dim)
    return kv_P2RfCH.transpose(0, 1, 2, 4, 3, 5).reshape(shape)


def run(case, inputs, sizes=None, interpret=True, kv_scale_2K=None, lanes=LANES, chip=None):
    *arrays, sinks_N = inputs
    arrays[1] = packed(arrays[1], lanes)
    static = {
        "scale": case.scale,
        "max_q_len": max(1, *case.q_lens),
        "window": case.window,
        "softcap": case.softcap,
    }
    attend = functools.partial(tpu.attend, **static, sizes=sizes, interpret=interpret, chip=chip)
    with jax.numpy_dtype_promotion("strict"):
        compiled = jax.jit(attend, compiler_options=QUICK)
        out_TNH = compiled(*arrays, sinks_N=sinks_N, kv_scale_2K=kv_scale_2K)
    spec = check(*arrays, **static, sinks_N=sinks_N, kv_scale_2K=kv_scale_2K)
    return np.asarray(out_TNH, np.float64), spec
