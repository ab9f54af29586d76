"""Block sizes of the Triton kernels, by formula from the call's static facts and the chip's.

Lengths are no input: how a slot is split depends on its own length and on static facts only, so
that a slot's neighbours change no bit of its output.
"""

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.gpu_triton_kernel import matmul_dtype
from pallas_kernels.paged_attention.spec import KernelSpec

FEWEST_ROWS = 16  # of a tensor core's operand
MOST_ROWS = 64  # of a decode tile; more take further programs, which read the keys again
FEW_QUERIES = 16  # up to here all slots are taken as decode rows
MOST_PARTS = 128
PARTS_OF_ONE = 32  # at least, so that a slot much longer than all others occupies many SMs
UNITS_PER_SM = 32  # of split slots, if all are as long as can be
PARTS_BYTES = 256 << 20  # memory for the parts of split slots
TAKEN_BYTES = 1024  # shared memory of an SM that a program takes beside its own
# Float32 is multiplied number by number, not on tensor cores: ptxas spills with larger blocks and
# tiles, and with some numbers of warps.
FLOAT32_ROWS = 32
FLOAT32_TILE = 2048  # rows times lanes, but FEWEST_ROWS at least


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
    stages: int = 2  # blocks in flight


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


def _block(spec: KernelSpec, sizes: Sizes, most_keys: int, budget_bytes: int) -> Sizes:
    """As many keys in flight as fit into the budget and as ptxas has registers for: it spills with
    three blocks of 8-bit keys, which a thread widens before use, or of float32, with two of wide
    float32 heads and with any that are widened to float32."""
    in_flight = (3, 2)
    if _widens_to_float32(spec):
        in_flight = (0,)
    elif _multiplies_float32(spec) and lanes_of(spec) > 128:
        in_flight = (1,)
    elif _multiplies_float32(spec) or jnp.dtype(spec.kv_dtype).itemsize == 1:
        in_flight = (2,)
    for keys in (64, 32, 16):
        for stages in in_flight:
            each = replace(sizes, keys=keys, stages=stages)
            if keys <= most_keys and shared_bytes(spec, each) <= budget_bytes:
                return each
    return each


def _multiplies_float32(spec: KernelSpec) -> bool:
    return matmul_dtype(jnp.dtype(spec.q_dtype), jnp.dtype(spec.kv_dtype)) == jnp.float32


def _float32_rows(spec: KernelSpec) -> int:
    most = FEWEST_ROWS if _widens_to_float32(spec) else FLOAT32_ROWS
    return max(FEWEST_ROWS, min(most, FLOAT32_TILE // lanes_of(spec)))


def _float32_keys(spec: KernelSpec) -> int:
    return 32 if lanes_of(spec) <= (32 if _widens_to_float32(spec) else 64) else 16


def _reads_shared_memory(chip: Chip) -> bool:
    """Whether tensor cores take both operands from there, which leaves registers; Blackwell's of
    capability 12 do not."""
    return chip.compute_capability[0] in (9, 10)


def _most_rows(spec: KernelSpec, chip: Chip) -> int:
    """Of a decode tile: as many as leave shared memory for two of the smallest blocks."""
    rows = _float32_rows(spec) if _multiplies_float32(spec) else MOST_ROWS
    while rows > FEWEST_ROWS and shared_bytes(spec, Sizes(1, rows, 16)) > chip.shared_memory_bytes:
        rows //= 2
    return rows


def _widens_to_float32(spec: KernelSpec) -> bool:
    return _multiplies_float32(spec) and spec.kv_dtype != "float32"


def _spills_at_128_rows(spec: KernelSpec, chip: Chip) -> bool:
    """Whether ptxas spills where 8-bit keys meet 128 rows: not on Hopper, else on Blackwell always
    and before from 128 lanes on."""
    major, _ = chip.compute_capability
    return major != 9 and (major > 9 or lanes_of(spec) >= 128)


def _keys_for_128_rows(spec: KernelSpec, chip: Chip) -> int:
    """Of a chunk's block: as many as ptxas has registers for."""
    major, _ = chip.compute_capability
    if _reads_shared_memory(chip) and (major == 9 or lanes_of(spec) > 64):
        return 64
    return 16 if spec.kv_dtype.startswith("float8") else 32


def _chunk(spec: KernelSpec, chip: Chip) -> Sizes:
    """The largest tile that takes at most a thread's registers and a program's shared memory."""
    group = spec.num_heads // spec.num_kv_heads
    narrow = jnp.dtype(spec.kv_dtype).itemsize == 1
    if _multiplies_float32(spec):
        rows, keys, warps = _float32_rows(spec), _float32_keys(spec), 4
        # As found by compiling; an SM of Ada holds fewer threads than an A100's or H100's.
        ada = chip.compute_capability == (8, 9)
        if ada and lanes_of(spec) > 128 and not _widens_to_float32(spec):
            warps = 8
    elif narrow and lanes_of(spec) > 128 and chip.compute_capability >= (10, 0):
        rows, keys, warps = 32, 16, 4
    elif lanes_of(spec) > 128 or (narrow and _spills_at_128_rows(spec, chip)):
        rows, keys, warps = 64, 32, 8
    else:
        rows, keys, warps = 128, _keys_for_128_rows(spec, chip), 8
    while True:
        sizes = Sizes(max(1, rows // group), rows, keys, warps=warps)
        sizes = _block(spec, sizes, keys, chip.shared_memory_bytes)
        if rows == FEWEST_ROWS or shared_bytes(spec, sizes) <= chip.shared_memory_bytes:
            return sizes
        rows, warps = rows // 2, max(4, warps // 2)


def parts_of(spec: KernelSpec, queries: int, chip: Chip) -> tuple[int, int]:
    """Most parts of a slot and fewest keys of one: enough units for all SMs, several times where
    there are many slots, since their lengths differ."""
    pairs = spec.num_slots * spec.num_kv_heads
    part_keys = 1024 if pairs >= 2 * chip.cores else 256
    longest = spec.pages_per_slot * spec.page_size
    most = max(PARTS_OF_ONE, UNITS_PER_SM * chip.cores // pairs)
    if spec.window is not None:
        longest = min(longest, spec.window + queries)
    # At least 2, since ptxas spills a few bytes in some calls that can split nothing.
    most = min(MOST_PARTS, most, max(2, -(-longest // part_keys)))
    part_bytes = 4 * spec.num_slots * queries * spec.num_heads * spec.head_dim
    return max(1, min(most, PARTS_BYTES // part_bytes)), part_keys


def default_sizes(spec: KernelSpec, chip: Chip) -> tuple[Sizes, ...]:
    """One call where all slots bring few tokens, else one for the fewest and one for chunks."""
    most = min(spec.max_q_len, spec.num_rows)
    group = spec.num_heads // spec.num_kv_heads
    chunks = most > FEW_QUERIES
    queries = max(1, FEWEST_ROWS // group) if chunks else most
    rows = min(_most_rows(spec, chip), max(FEWEST_ROWS, power_of_two(queries * group)))
    parts, part_keys = parts_of(spec, queries, chip)
    row_tiles = math.ceil(queries * group / rows)
    programs = -(-2 * chip.cores // (spec.num_kv_heads * row_tiles))
    few = Sizes(queries, rows, 64, parts=parts, part_keys=part_keys, programs=programs)
    lanes, narrow = lanes_of(spec), jnp.dtype(spec.kv_dtype).itemsize == 1
    if _multiplies_float32(spec):
        most_keys = _float32_keys(spec)
        if lanes == 128 and not chunks and not _widens_to_float32(spec):
            few = replace(few, warps=8)  # as found by compiling: with 4 some calls spill
    elif lanes > 128:
        most_keys, few = 32, replace(few, warps=8 if rows == MOST_ROWS or narrow else 4)
    else:
        tight = (rows > FEWEST_ROWS or lanes < 32) and not _reads_shared_memory(chip)
        tight |= queries == rows  # each row has a position of its own
        most_keys = 32 if narrow and tight else 64
    few = _block(spec, few, most_keys, chip.shared_memory_sm_bytes // 2 - TAKEN_BYTES)
    return (few, _chunk(spec, chip)) if chunks else (few,)
