"""Block sizes of the Triton kernels, by formula from the call's static facts and the chip's.

Lengths are no input: how a slot is split depends on its own length and on static facts only, so
that a slot's neighbours change no bit of its output.
"""

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.spec import KernelSpec

FEWEST_ROWS = 16  # of a tensor core's operand
MOST_ROWS = 64  # of a decode tile; more take further programs, which read the keys again
FEW_QUERIES = 16  # up to here all slots are taken as decode rows
MOST_PARTS = 128
UNITS_PER_SM = 32  # of split slots, if all are as long as can be
PARTS_BYTES = 64 << 20  # memory for the parts of split slots


@dataclass(frozen=True)
class Sizes:
    """Sizes of one kernel call; results do not depend on them beyond rounding."""

    queries: int  # new tokens of a tile
    rows: int  # of a matmul, a power of two from 16 up
    keys: int  # of a block, a power of two from 16 up
    parts: int = 1  # most units of a slot
    part_keys: int = 256  # fewer are not split off
    programs: int | None = None  # per KV head; None: one per unit
    warps: int = 4
    stages: int = 3  # blocks in flight


def power_of_two(n: int) -> int:
    """The next one from n up."""
    return 1 << (n - 1).bit_length()


def lanes_of(spec: KernelSpec) -> int:
    return max(16, power_of_two(spec.head_dim))


def shared_bytes(spec: KernelSpec, sizes: Sizes) -> int:
    """Shared memory of one program: blocks of keys and values in flight, queries, weights."""
    kv_bytes = jnp.dtype(spec.kv_dtype).itemsize
    blocks = sizes.stages * 2 * sizes.keys * lanes_of(spec) * kv_bytes
    return blocks + 4 * sizes.rows * (lanes_of(spec) + sizes.keys)


def _wide(spec: KernelSpec) -> bool:
    """Whether a block of 64 keys or 128 rows would take too many registers."""
    return lanes_of(spec) > 128 or "float32" in (spec.q_dtype, spec.kv_dtype)


def _block(spec: KernelSpec, sizes: Sizes, budget_bytes: int) -> Sizes:
    """As many keys in flight as fit into the budget."""
    for keys in (32, 16) if _wide(spec) else (64, 32, 16):
        for stages in (4, 3, 2):
            each = replace(sizes, keys=keys, stages=stages)
            if shared_bytes(spec, each) <= budget_bytes:
                return each
    return each


def _parts(spec: KernelSpec, queries: int, chip: Chip) -> tuple[int, int]:
    """Most parts of a slot and fewest keys of one: enough units for all SMs, several times where
    there are many slots, since their lengths differ."""
    pairs = spec.num_slots * spec.num_kv_heads
    most = min(MOST_PARTS, max(4, UNITS_PER_SM * chip.cores // pairs))
    part_bytes = 4 * spec.num_slots * queries * spec.num_heads * spec.head_dim
    most = max(2, min(most, PARTS_BYTES // part_bytes))
    return most, 1024 if pairs >= 2 * chip.cores else 256


def default_sizes(spec: KernelSpec, chip: Chip) -> tuple[Sizes, ...]:
    """One call where all slots bring few tokens, else one for the fewest and one for chunks."""
    most = min(spec.max_q_len, spec.num_rows)
    group = spec.num_heads // spec.num_kv_heads
    chunks = most > FEW_QUERIES
    queries = max(1, FEWEST_ROWS // group) if chunks else most
    rows = min(MOST_ROWS, max(FEWEST_ROWS, power_of_two(queries * group)))
    parts, part_keys = _parts(spec, queries, chip)
    row_tiles = math.ceil(queries * group / rows)
    programs = -(-2 * chip.cores // (spec.num_kv_heads * row_tiles))
    few = Sizes(queries, rows, 64, parts=parts, part_keys=part_keys, programs=programs)
    few = _block(spec, few, chip.shared_memory_sm_bytes // 2 - 1024)
    if not chunks:
        return (few,)
    rows = 64 if _wide(spec) else 128
    while True:
        chunk = Sizes(max(1, rows // group), rows, 64, warps=max(4, rows // 16))
        chunk = _block(spec, chunk, chip.shared_memory_bytes)
        if rows == FEWEST_ROWS or shared_bytes(spec, chunk) <= chip.shared_memory_bytes:
            return few, chunk
        rows //= 2
