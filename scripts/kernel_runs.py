"""Programs that call an attention kernel again and again: ours and public ones, on the same cases.

A program takes turns among page tables over different pages, and the output of a call is the next
one's queries, so that calls follow each other on the device and none finds its keys in fast memory
if the tables' pages are several times as large. Several calls make a step, as layers do, and share
what depends on lengths alone. What a public kernel cannot take is None.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as jax_tpu_attention
from kernel_cases import ServingCase, pool_pages, slot_pages

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.layout import lanes_of, pages_shape

with warnings.catch_warnings():  # deprecated with Pallas' Triton backend, and still what there is
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu.paged_attention import (
        paged_attention as jax_gpu_attention,
    )

YARDSTICK_KEYS = 512  # of a compute block of the TPU kernel
YARDSTICK_SPLITS = 16  # of a sequence in the GPU kernel, its default
CALLS_OF_A_STEP = 8  # at least
DENSE_TURNS = 4
DISTINCT_PAGES = 1024
SCALE = 0.02  # of 8-bit keys and values


@dataclass(frozen=True)
class Run:
    """`loop` makes `calls` calls of the kernel and returns the last one's output."""

    loop: Callable[[], jax.Array]
    calls: int


def random_pages(shape: tuple[int, ...], dtype: str, axis: int = 0, seed: int = 1) -> jax.Array:
    """Pages along `axis`; some are drawn and the others repeat them, each at its own address."""
    pages = shape[axis]
    some = (*shape[:axis], min(pages, DISTINCT_PAGES), *shape[axis + 1 :])
    drawn = jax.random.normal(jax.random.key(seed), some, jnp.float32)
    if dtype == "int8":
        drawn = jnp.clip(jnp.round(drawn / SCALE), -127, 127)
    return jnp.take(drawn.astype(dtype), jnp.arange(pages) % some[axis], axis=axis, mode="clip")


def page_tables(case: ServingCase, turns: int) -> tuple[np.ndarray, int]:
    """table_USM, in which every page stands once, and the number of pages with the trash page."""
    used_S = slot_pages(case)
    table_USM = np.zeros((turns, len(used_S), max(used_S)), np.int32)
    used_USM = np.broadcast_to(np.arange(max(used_S)) < np.array(used_S)[:, None], table_USM.shape)
    num_pages = pool_pages(case, turns)
    table_USM[used_USM] = np.random.default_rng(0).permutation(num_pages - 1) + 1
    return table_USM, num_pages


def queries(case: ServingCase) -> jax.Array:
    shape = (sum(case.q_lens), case.num_heads, case.head_dim)
    return jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(case.dtype)


def paged_run(
    case: ServingCase, turns: int, calls: int, make_pools: Callable[[int], tuple], attend: Callable
) -> Run:
    """`attend(q_TNH, pools, page_table_SM, slots)`: `slots` are q_start_S, q_len_S, kv_len_S.

    As many whole steps as hold `calls` calls.
    """
    table_USM, num_pages = page_tables(case, turns)
    rounds = -(-CALLS_OF_A_STEP // turns)
    steps = -(-calls // (turns * rounds))
    starts = np.cumsum((0, *case.q_lens[:-1]))
    slot_arrays = tuple(jnp.asarray(a, jnp.int32) for a in (starts, case.q_lens, case.kv_lens))

    @jax.jit
    def loop(q_TNH, pools, tables, slot_arrays):
        def step(_, q_TNH):
            for table_SM in tables * rounds:
                q_TNH = attend(q_TNH, pools, table_SM, slot_arrays)
            return q_TNH

        return jax.lax.fori_loop(0, steps, step, q_TNH)

    tables = tuple(jnp.asarray(table_SM) for table_SM in table_USM)
    run = partial(loop, queries(case), make_pools(num_pages), tables, slot_arrays)
    return Run(run, steps * turns * rounds)


def our_kernel(case: ServingCase, each: Chip, attend: Callable) -> tuple[Callable, Callable]:
    """Pools and the call, of `ragged_paged_attention` or of an implementation's `attend`."""
    sinks_N = jnp.ones(case.num_heads) if case.sinks else None
    narrow = jnp.dtype(case.kv_dtype).itemsize == 1
    scale_2K = jnp.full((2, case.num_kv_heads), SCALE) if narrow else None

    def make_pools(pages: int) -> tuple[jax.Array]:
        heads = (case.num_kv_heads, case.head_dim)
        shape = pages_shape(pages, case.page_size, *heads, lanes_of(each))
        return (random_pages(shape, case.kv_dtype),)

    def call(q_TNH, pools, table_SM, slot_arrays):
        return attend(
            q_TNH, *pools, table_SM, *slot_arrays,
            scale=case.scale, max_q_len=max(case.q_lens), window=case.window, softcap=case.softcap,
            sinks_N=sinks_N, kv_scale_2K=scale_2K, chip=each,
        )  # fmt: skip

    return make_pools, call


# ---- public kernels ------------------------------------------------------------------------------


def _plain_decode(case: ServingCase) -> bool:
    """One new token a slot that sees all keys, with nothing beside them."""
    return max(case.q_lens) == 1 and not (case.window or case.softcap or case.sinks)


def jax_tpu_run(case: ServingCase, turns: int, calls: int) -> Run | None:
    """The kernel that comes with jax for TPUs, of whole rows of 128 lanes. It scales no scores."""
    if not _plain_decode(case) or case.head_dim % 128 or case.kv_dtype != case.dtype:
        return None
    block = max(1, min(YARDSTICK_KEYS, max(case.kv_lens)) // case.page_size)

    def call(q_TNH, pools, table_SM, slot_arrays):
        kv_len_S = slot_arrays[2]
        return jax_tpu_attention(q_TNH, *pools, kv_len_S, table_SM, pages_per_compute_block=block)

    return paged_run(case, turns, calls, partial(_separate_pools, case), call)


def jax_gpu_run(case: ServingCase, turns: int, calls: int) -> Run | None:
    """The kernel that comes with jax for GPUs: sizes are powers of two. It scales no scores.

    8-bit pages have a scale per position, as that kernel wants them.
    """
    columns = max(slot_pages(case))
    whole = columns % YARDSTICK_SPLITS == 0 and (columns & (columns - 1)) == 0
    if not _plain_decode(case) or not whole or (case.head_dim & (case.head_dim - 1)):
        return None
    itemsize = jnp.dtype(case.kv_dtype).itemsize
    values = pool_pages(case, turns) * case.num_kv_heads * case.page_size * case.head_dim
    # Up to 2^32 bytes Pallas' Triton backend counts values in 32 bits, signed: further ones are
    # read elsewhere, or nowhere, after which the process can use the GPU no more.
    if values > 1 << 31 and values * itemsize <= 1 << 32:
        return None

    def make_pools(pages: int) -> tuple:
        k_pages, v_pages = _separate_pools(case, pages)
        scales = jnp.full(k_pages.shape[:3], SCALE) if itemsize == 1 else None
        return k_pages, v_pages, scales

    def call(q_TNH, pools, table_SM, slot_arrays):
        k_pages, v_pages, scales = pools
        return jax_gpu_attention(
            q_TNH, k_pages, v_pages, table_SM, slot_arrays[2], scales, scales,
            k_splits=YARDSTICK_SPLITS,
        )  # fmt: skip

    return paged_run(case, turns, calls, make_pools, call)


def _separate_pools(case: ServingCase, pages: int) -> tuple[jax.Array, jax.Array]:
    shape = (case.num_kv_heads, pages, case.page_size, case.head_dim)
    return tuple(random_pages(shape, case.kv_dtype, axis=1, seed=seed) for seed in (1, 2))


def cudnn_run(case: ServingCase, turns: int, calls: int) -> Run | None:
    """cuDNN's attention over keys and values that were gathered before: gathering is not timed."""
    if not _plain_decode(case) or case.kv_dtype != case.dtype or case.dtype == "float32":
        return None
    turns = min(turns, DENSE_TURNS)
    rounds = -(-CALLS_OF_A_STEP // turns)
    steps = -(-calls // (turns * rounds))
    shape = (len(case.kv_lens), max(case.kv_lens), case.num_kv_heads, case.head_dim)
    dense = [
        tuple(random_pages(shape, case.dtype, axis=1, seed=2 * u + part) for part in (1, 2))
        for u in range(turns)
    ]
    kv_len_S = jnp.asarray(case.kv_lens, jnp.int32)

    @jax.jit
    def loop(q_SNH, dense, kv_len_S):
        def step(_, q_S1NH):
            for k_SXKH, v_SXKH in dense * rounds:
                q_S1NH = jax.nn.dot_product_attention(
                    q_S1NH, k_SXKH, v_SXKH,
                    scale=case.scale, key_value_seq_lengths=kv_len_S, implementation="cudnn",
                )  # fmt: skip
            return q_S1NH

        return jax.lax.fori_loop(0, steps, step, q_SNH[:, None])

    return Run(partial(loop, queries(case), dense, kv_len_S), steps * turns * rounds)
