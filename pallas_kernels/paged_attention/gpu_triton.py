"""Ragged paged attention on an NVIDIA GPU with Pallas' Triton backend (Ampere and later).

`gpu_plan` lists the units of work once for all layers of a step. Per layer there is one kernel call
for slots with few new tokens (decode and verification), one for the others where there can be any
(chunks of a prompt), and `combine`, which sums up the split slots and clears rows that nobody owns.

Invariant: how a slot is cut depends on its own lengths and on static facts only.

Letters beside those of the contract: W units, Q tokens of a tile, R rows of a tile.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.gpu_plan import plan_rows, plan_units
from pallas_kernels.paged_attention.gpu_triton_kernel import Plan, attention, combine
from pallas_kernels.paged_attention.gpu_triton_sizes import (
    Sizes,
    default_sizes,
    lanes_of,
    shared_bytes,
)
from pallas_kernels.paged_attention.spec import KernelSpec, check

HEAD_DIMS = (16, 256)
PAGE_SIZES = (8, 256)
Q_DTYPES = ("bfloat16", "float16", "float32")
KV_DTYPES = (*Q_DTYPES, "int8", "float8_e4m3fn", "float8_e5m2")
COMBINE = Sizes(queries=1, rows=1, keys=1, warps=4, stages=0)
FLOAT8_FROM = (8, 9)  # compute capability that converts float8


def supports(spec: KernelSpec, chip: Chip | None) -> str | None:
    """None, or why the kernel cannot take the call on this chip."""
    if chip is None or chip.kind != "gpu":
        return f"needs an NVIDIA GPU, the call is for {chip.name if chip else 'the host CPU'}"
    low, high = HEAD_DIMS
    if spec.head_dim % low or not low <= spec.head_dim <= high:
        return f"head width {spec.head_dim}: must be a multiple of {low} up to {high}"
    if (spec.page_parts, spec.page_lanes) != (2, spec.head_dim):
        return (
            f"reads pages whose rows hold one head of {spec.head_dim}, not {spec.page_lanes} lanes"
        )
    low, high = PAGE_SIZES
    if not low <= spec.page_size <= high:
        return f"page size {spec.page_size}: must be between {low} and {high}"
    if spec.q_dtype not in Q_DTYPES:
        return f"queries are {spec.q_dtype}: must be one of {Q_DTYPES}"
    if spec.kv_dtype not in KV_DTYPES:
        return f"pages are {spec.kv_dtype}: must be one of {KV_DTYPES}"
    if spec.kv_dtype.startswith("float8") and chip.compute_capability < FLOAT8_FROM:
        have, need = (".".join(map(str, c)) for c in (chip.compute_capability, FLOAT8_FROM))
        return f"pages are {spec.kv_dtype}: needs compute capability {need}, {chip.name} has {have}"
    # Pallas' Triton backend counts values in 32 bits, signed, up to 2^32 bytes.
    values = spec.num_pages * spec.page_bytes // jnp.dtype(spec.kv_dtype).itemsize
    if values > 1 << 31 and spec.num_pages * spec.page_bytes <= 1 << 32:
        return f"{spec.num_pages:,} pages of a layer hold {values:,} values: must be up to 2^31"
    needed = max(shared_bytes(spec, each) for each in default_sizes(spec, chip))
    if needed > chip.shared_memory_bytes:
        return f"needs {needed:,} bytes of shared memory: {chip.shared_memory_bytes:,} are there"
    return None


def _call(kernel, grid, operands, outputs, o_TNH, sizes: Sizes, interpret: bool):
    """All arrays stay in global memory; the first output takes the place of `o_TNH` if given."""
    aliases = {} if o_TNH is None else {len(operands): 0}
    operands = [*operands, *(() if o_TNH is None else (o_TNH,))]
    # Triton's pipeline holds page ids as long before the keys as these before they are used.
    num_stages = 2 * sizes.stages + 1
    return pl.pallas_call(
        kernel,
        out_shape=outputs,
        grid=grid,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=num_stages),
        interpret=interpret,
    )(*operands)


def _attend_units(arrays, units_W8, count_1, o_TNH, spec: KernelSpec, sizes: Sizes, **how):
    """o_TNH with the rows of these units, and where slots may be split what `combine` sums up."""
    num_units, split = units_W8.shape[0], sizes.parts > 1
    N, Q = spec.num_heads, sizes.queries
    group = N // spec.num_kv_heads
    plan = Plan(
        queries=Q,
        rows=sizes.rows,
        keys=sizes.keys,
        group=group,
        lanes=lanes_of(spec),
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        sinks=spec.sinks,
        scaled=spec.kv_scales,
        split=split,
    )
    outputs = [jax.ShapeDtypeStruct((spec.num_rows, N, spec.head_dim), spec.q_dtype)]
    if split:
        rows_WKR = (num_units, spec.num_kv_heads, Q * group)
        outputs.append(jax.ShapeDtypeStruct((*rows_WKR, spec.head_dim), jnp.float32))
        outputs.append(jax.ShapeDtypeStruct(rows_WKR, jnp.float32))
    grid = (
        min(sizes.programs or num_units, num_units),
        spec.num_kv_heads * -(-Q * group // sizes.rows),
    )
    kernel = functools.partial(attention, plan=plan)
    return _call(kernel, grid, [units_W8, count_1, *arrays], outputs, o_TNH, sizes, **how)


def sum_parts(
    rows_T4: jax.Array,
    parts: Sequence[jax.Array],
    sinks_N: jax.Array | None,
    o_TNH: jax.Array,
    spec: KernelSpec,
    interpret: bool,
) -> jax.Array:
    """o_TNH with rows that nobody owns cleared and, where slots may be split, theirs summed up from
    `parts`: part_WKRH and log_WKR, which may have more rows."""
    kernel = functools.partial(
        combine, lanes=lanes_of(spec), group=spec.num_heads // spec.num_kv_heads
    )
    operands = [rows_T4, *parts, *([sinks_N] if parts and spec.sinks else [])]
    output = jax.ShapeDtypeStruct(o_TNH.shape, o_TNH.dtype)
    grid = (spec.num_rows, spec.num_heads)
    (o_TNH,) = _call(kernel, grid, operands, [output], o_TNH, COMBINE, interpret)
    return o_TNH


def attend(
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
    chip: Chip | None = None,
    sizes: tuple[Sizes, ...] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of every row to the keys of its slot, 0 for rows that no slot owns.

    `sizes` (by default those for `chip`): the first takes the slots whose rows fit into one of its
    tiles and may split them, the second, if any, those that are left.
    """
    spec = check(
        q_TNH, kv_pages, page_table_SM, q_start_S, q_len_S, kv_len_S,
        scale=scale, max_q_len=max_q_len, window=window, softcap=softcap,
        sinks_N=sinks_N, kv_scale_2K=kv_scale_2K,
    )  # fmt: skip
    T = spec.num_rows
    few, *chunks = sizes or default_sizes(spec, chip)
    per_head = [a for a in (sinks_N, kv_scale_2K) if a is not None]
    arrays = [q_TNH, kv_pages, page_table_SM, *per_head]
    lengths = (q_start_S, q_len_S, kv_len_S)

    mine_S = (q_len_S > 0) & (q_len_S <= few.queries)
    num_units = spec.num_slots * few.parts
    units_W8, count_1, *cuts = plan_units(*lengths, mine_S, mine_S, few, window, num_units)
    rows_T4 = plan_rows(q_start_S, q_len_S, mine_S, *cuts, few.queries, T)
    o_TNH, *parts = _attend_units(arrays, units_W8, count_1, None, spec, few, interpret=interpret)
    for chunk in chunks:
        mine_S, Q = q_len_S > few.queries, chunk.queries
        num_units = min(spec.num_slots * -(-min(max_q_len, T) // Q), spec.num_slots + T // Q)
        units_W8, count_1, *_ = plan_units(*lengths, mine_S, mine_S, chunk, window, num_units)
        (o_TNH,) = _attend_units(arrays, units_W8, count_1, o_TNH, spec, chunk, interpret=interpret)
    return sum_parts(rows_T4, parts, sinks_N, o_TNH, spec, interpret)
