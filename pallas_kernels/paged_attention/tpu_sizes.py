"""Block sizes of the TPU kernel: tuned ones from `tpu_sizes.json`, else by formula.

A key of the table is a chip's name, then "H128 K8 C16 bfloat16": width and number of KV heads, page
size and dtype of the cache; then "few" or "chunk", see `default_sizes`; the value is how many keys
a block has. Both come from the bundles of compiled kernels (docs/tpu-kernels.md).
"""

import json
import math
import re
from dataclasses import dataclass, replace
from importlib import resources

from pallas_kernels.chips import Chip
from pallas_kernels.chips import chip as chip_named
from pallas_kernels.paged_attention.spec import KernelSpec
from pallas_kernels.paged_attention.tpu_block import LANES

SUBLANES = 8
BLOCK_BYTES = 2 << 20  # a few such blocks in flight cover the memory's latency
MOST_KEYS = 1024  # of a block: what is computed for nothing at the end of a slot
MOST_KEYS_OF_CHUNK = 512  # the scores of a tile are M x keys in float32
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


def unrolled(spec: KernelSpec, sizes: Sizes) -> bool:
    """Whether all heads of a block are one stretch of code, which hides latencies of few rows."""
    return rows_of(spec, sizes.queries) <= 4 * SUBLANES


def vmem_bytes(spec: KernelSpec, sizes: Sizes) -> int:
    """Vector memory of one call: page blocks, queries and outputs twice, softmax state, scores."""
    rows = rows_of(spec, sizes.queries)
    blocks = sizes.buffers * sizes.pages * spec.page_bytes
    state = spec.page_rows * rows * 4 * (6 * LANES + 5 * spec.page_lanes)
    keys = sizes.pages * spec.page_size
    heads = spec.page_rows if sizes.queries <= FEW_QUERIES else 1
    return blocks + state + 4 * 4 * heads * rows * keys


def vmem_limit(chip: Chip) -> int:
    """What a call may take of it; the compiler's own temporaries have the rest."""
    return chip.vmem_bytes * 3 // 4


def _pages_of_block(spec: KernelSpec, most_keys: int, tuned_keys: int | None) -> int:
    unit = math.lcm(spec.page_size, LANES) // spec.page_size  # whole registers of scores
    most = min(BLOCK_BYTES // spec.page_bytes, most_keys // spec.page_size)
    if tuned_keys is not None:
        most = tuned_keys // spec.page_size
    return max(1, min(most, spec.pages_per_slot) // unit) * unit


Table = dict[str, dict[str, dict[str, int]]]


def parse_table(text: str) -> Table:
    """ValueError names the entry that says nothing or what no kernel can do."""
    table = json.loads(text)
    for name, entries in table.items():
        chip_named(name)
        for key, keys in entries.items():
            known = re.fullmatch(r"H\d+ K\d+ C\d+ \w+", key) and keys.keys() <= {"few", "chunk"}
            if not known or any(n < LANES or n % LANES for n in keys.values()):
                raise ValueError(
                    f'tuned sizes of {name}, "{key}": {keys}; must be like "H128 K8 C16 bfloat16": '
                    f'{{"few": n, "chunk": n}} with multiples of {LANES}'
                )
    return table


def read_table() -> Table:
    path = resources.files(__package__).joinpath("tpu_sizes.json")
    return parse_table(path.read_text("utf-8"))


def _tuned(spec: KernelSpec, chip: Chip | None) -> dict[str, int]:
    if chip is None:
        return {}
    table = read_table()
    key = f"H{spec.head_dim} K{spec.num_kv_heads} C{spec.page_size} {spec.kv_dtype}"
    return table.get(chip.name, {}).get(key, {})


def default_sizes(spec: KernelSpec, chip: Chip | None) -> tuple[Sizes, ...]:
    """One call where all slots bring few tokens, else one for single tokens and one for chunks."""
    most = min(spec.max_q_len, spec.num_rows)
    chunks, tuned = most > FEW_QUERIES, _tuned(spec, chip)
    few = Sizes(
        1 if chunks else 1 << (most - 1).bit_length(),
        _pages_of_block(spec, MOST_KEYS, tuned.get("few")),
    )
    while chip is not None and few.buffers > 2 and vmem_bytes(spec, few) > vmem_limit(chip):
        few = replace(few, buffers=few.buffers // 2)
    if not chunks:
        return (few,)
    # A tile's rows share what a block costs beside them, up to 512 rows. But each slot may need a
    # tile of its own, and few rows among many slots are short prompts: then tiles are smaller.
    group = spec.num_heads // spec.page_rows
    few_rows = min(1 << (most - 1).bit_length(), 8 * spec.num_rows // spec.num_slots)
    queries = max(8, min(128, 512 // group, few_rows))
    chunk = Sizes(
        1 << (queries.bit_length() - 1),
        _pages_of_block(spec, MOST_KEYS_OF_CHUNK, tuned.get("chunk")),
        buffers=2,
    )
    while chip is not None and chunk.queries > 8 and vmem_bytes(spec, chunk) > vmem_limit(chip):
        chunk = replace(chunk, queries=chunk.queries // 2)
    return few, chunk
