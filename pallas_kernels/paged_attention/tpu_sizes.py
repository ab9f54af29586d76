"""Block sizes of the TPU kernel: tuned ones from `tpu_sizes.json`, else by formula.

A key of the table is a chip's name, then "H128 K8 C16 bfloat16": width and number of KV heads, page
size and dtype of the cache; the value has fields of `Sizes` for decode.
"""

import json
import math
from dataclasses import dataclass
from importlib import resources

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.spec import KernelSpec
from pallas_kernels.paged_attention.tpu_kernel import LANES

SUBLANES = 8
BLOCK_BYTES = 2 << 20  # a few such blocks in flight cover the memory's latency
MOST_KEYS = 512  # of a block: scores of a tile of a prompt are M x keys in float32
FEW_QUERIES = 16  # up to here all slots are taken as decode rows


@dataclass(frozen=True)
class Sizes:
    """Sizes of one kernel call; results do not depend on them beyond rounding."""

    queries: int  # new tokens of a tile, a power of two
    pages: int  # of a block
    buffers: int = 4  # blocks in vector memory, a power of two


def rows_of(spec: KernelSpec, queries: int) -> int:
    """M: rows of a matmul."""
    return -(-spec.num_heads // spec.page_rows * queries // SUBLANES) * SUBLANES


def vmem_bytes(spec: KernelSpec, sizes: Sizes) -> int:
    """Vector memory of one call: page blocks, queries and outputs twice, softmax state, scores."""
    rows = rows_of(spec, sizes.queries)
    lanes = -(-spec.page_lanes // LANES) * LANES
    padding = lanes / spec.page_lanes
    blocks = sizes.buffers * sizes.pages * spec.page_bytes * padding
    state = spec.page_rows * rows * 4 * (2 * LANES + 5 * lanes + 4 * LANES)
    keys = sizes.pages * spec.page_size
    heads = spec.page_rows if sizes.queries <= FEW_QUERIES else 1
    return int(blocks + state + 4 * 4 * heads * rows * keys)


def default_sizes(spec: KernelSpec, chip: Chip | None) -> tuple[Sizes, ...]:
    """One call where all slots bring few tokens, else one for single tokens and one for chunks."""
    most = min(spec.max_q_len, spec.num_rows)
    unit = math.lcm(spec.page_size, LANES) // spec.page_size  # whole registers of scores
    most_pages = min(BLOCK_BYTES // spec.page_bytes, MOST_KEYS // spec.page_size)
    pages = max(1, most_pages // unit) * unit
    few = Sizes(1 << (min(most, FEW_QUERIES) - 1).bit_length(), pages)
    if most > FEW_QUERIES:
        few = Sizes(1, pages)
    tuned = {}
    if chip is not None:
        table = json.loads(resources.files(__package__).joinpath("tpu_sizes.json").read_text())
        key = f"H{spec.head_dim} K{spec.num_kv_heads} C{spec.page_size} {spec.kv_dtype}"
        tuned = table.get(chip.name, {}).get(key, {})
    few = Sizes(few.queries, **({"pages": pages} | tuned))
    if most <= FEW_QUERIES:
        return (few,)
    group = spec.num_heads // spec.page_rows
    queries = max(8, min(128, 256 // group))
    return few, Sizes(1 << (queries.bit_length() - 1), pages, 2)
