"""Ragged paged attention on an NVIDIA Hopper GPU with Pallas' Mosaic GPU backend.

`gpu_plan` lists the units of work once for all layers of a step. Per layer there is one persistent
kernel for slots with few and with many new tokens alike, and `combine`, which sums up the split
slots and clears rows that nobody owns: the Triton one, which is short and runs on Hopper too.

Invariant: how a slot is cut depends on its own lengths and on static facts only.

Letters beside those of the contract: G heads of a group, W units, R rows of a part.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.gpu_mosaic_consumer import Plan, scratch_types
from pallas_kernels.paged_attention.gpu_mosaic_kernel import attention
from pallas_kernels.paged_attention.gpu_mosaic_sizes import ROWS, Sizes, default_sizes
from pallas_kernels.paged_attention.gpu_plan import plan_rows, plan_units
from pallas_kernels.paged_attention.gpu_triton import sum_parts
from pallas_kernels.paged_attention.spec import KernelSpec, check

CAPABILITY = (9, 0)  # Blackwell's tensor cores are programmed otherwise
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float16")
JAX_FROM = (0, 11)  # earlier ones lay out registers otherwise and have no public interpreter


def supports(spec: KernelSpec, chip: Chip | None) -> str | None:
    """None, or why the kernel cannot take the call on this chip."""
    if chip is None or chip.kind != "gpu":
        return f"needs an NVIDIA GPU, the call is for {chip.name if chip else 'the host CPU'}"
    if chip.compute_capability != CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (chip.compute_capability, CAPABILITY))
        return f"needs compute capability {need} (Hopper), {chip.name} has {have}"
    if spec.head_dim not in HEAD_DIMS:
        return f"head width {spec.head_dim}: must be one of {HEAD_DIMS}"
    if (spec.page_parts, spec.page_lanes) != (2, spec.head_dim):
        return (
            f"reads pages whose rows hold one head of {spec.head_dim}, not {spec.page_lanes} lanes"
        )
    if spec.page_size not in PAGE_SIZES:
        return f"page size {spec.page_size}: must be one of {PAGE_SIZES}"
    if spec.kv_dtype not in DTYPES or spec.kv_scales:
        scales = " with scales" if spec.kv_scales else ""
        return f"pages are {spec.kv_dtype}{scales}: must be one of {DTYPES}, without scales"
    if spec.q_dtype != spec.kv_dtype:
        return f"queries are {spec.q_dtype} and pages {spec.kv_dtype}: must be the same"
    if (group := spec.num_heads // spec.num_kv_heads) > ROWS:
        return f"{group} query heads per KV head: must be at most {ROWS}"
    if jax.__version_info__ < JAX_FROM:
        return f"needs jax {'.'.join(map(str, JAX_FROM))} or newer, this is {jax.__version__}"
    return None


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
    sizes: Sizes | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of every row to the keys of its slot, 0 for rows that no slot owns.

    sizes       by default those for `chip`
    interpret   Pallas' parameters for interpreting a Mosaic GPU kernel, or False
    """
    spec = check(
        q_TNH, kv_pages, page_table_SM, q_start_S, q_len_S, kv_len_S,
        scale=scale, max_q_len=max_q_len, window=window, softcap=softcap,
        sinks_N=sinks_N, kv_scale_2K=kv_scale_2K,
    )  # fmt: skip
    sizes = sizes or default_sizes(spec, chip)
    mine_S, split_S = q_len_S > 0, q_len_S <= sizes.split_queries
    units_W8, count_1, *cuts = plan_units(
        q_start_S, q_len_S, kv_len_S, mine_S, split_S, sizes, window, _most_units(spec, sizes)
    )
    rows_T4 = plan_rows(q_start_S, q_len_S, mine_S, *cuts, sizes.queries, spec.num_rows)
    per_head = [] if sinks_N is None else [sinks_N]
    arrays = [q_TNH, kv_pages, page_table_SM, *per_head]
    o_TNH, *parts = _attend_units(units_W8, count_1, arrays, spec, sizes, interpret)
    return sum_parts(rows_T4, parts, sinks_N, o_TNH, spec, bool(interpret))


def _most_units(spec: KernelSpec, sizes: Sizes) -> int:
    """However long the slots are: those with few tokens in parts, the others tile by tile."""
    most = min(spec.max_q_len, spec.num_rows)
    tiles = -(-min(most, sizes.split_queries) // sizes.queries)
    chunks = spec.num_rows // sizes.queries if most > sizes.split_queries else 0
    return spec.num_slots * sizes.parts * tiles + chunks


def _attend_units(
    units_W8: jax.Array,
    count_1: jax.Array,
    arrays: list[jax.Array],
    spec: KernelSpec,
    sizes: Sizes,
    interpret: Any,
) -> list[jax.Array]:
    """o_TNH and, where slots may be split, part_WKRH and log_WKM."""
    T, K, H = spec.num_rows, spec.num_kv_heads, spec.head_dim
    num_units, group = units_W8.shape[0], spec.num_heads // K
    sizes = replace(sizes, programs=min(sizes.programs, -(-num_units * K // sizes.streams)))
    plan = Plan(sizes, group, spec.scale, spec.window, spec.softcap, spec.sinks)
    outputs = [jax.ShapeDtypeStruct((T, K, group, H), spec.q_dtype)]
    if sizes.parts > 1:
        rows = min(sizes.tile_queries, sizes.split_queries) * group
        outputs.append(jax.ShapeDtypeStruct((num_units, K, rows, H), jnp.float32))
        outputs.append(jax.ShapeDtypeStruct((num_units, K, ROWS), jnp.float32))
    q_TNH, kv_pages, *rest = arrays
    attend = plgpu.kernel(
        functools.partial(attention, plan=plan),
        out_type=outputs,
        scratch_types=scratch_types(plan, H, spec.page_size, kv_pages.dtype),
        grid=(sizes.programs,),
        grid_names=("sm",),
        num_threads=sizes.warpgroups,
        thread_name="warpgroup",
        # Lane semantics: the layouts that the kernel names, none inferred.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="attention",
        interpret=interpret,
    )
    q_TKGH = q_TNH.reshape(T, K, group, H)
    kv_XCH = kv_pages.reshape(-1, spec.page_size, H)
    o_TKGH, *parts = attend(units_W8, count_1, q_TKGH, kv_XCH, *rest)
    return [o_TKGH.reshape(q_TNH.shape), *parts]
