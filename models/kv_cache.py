"""The paged key/value cache of a whole model.

Each layer's mixer declares what it keeps per token; the cache holds one page pool per layer, all
indexed by the same page table. Page 0 is the trash page: padding rows write there and nothing reads
it. A contiguous cache is the special case page size = maximum length, one page per sequence.
The page layout itself belongs to the attention kernel (`pallas_kernels/paged_attention/layout.py`).
Paging: Kwon et al. 2023 (PagedAttention).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from models.batch import RaggedBatch
from models.config import ModelConfig, RopeSpec
from models.rope import rotation
from pallas_kernels.cache_update import update_cache
from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.layout import (
    PAGES_AXES,
    TRASH_PAGE,
    lanes_of,
    page_size_of,
    pages_shape,
    read_dense,
)
from sharding.axes import HeadSplit, Rules, named_sharding


@dataclass(frozen=True)
class PagedKVSpec:
    """Keys and values of every token: 2 * num_kv_heads * head_dim values per token and layer."""

    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: Any) -> int:
        return 2 * self.num_kv_heads * self.head_dim * np.dtype(dtype).itemsize


@struct.dataclass
class KVCache:
    """`layers[i]` is layer i's page pool, laid out by the attention kernel."""

    layers: tuple[jax.Array, ...]


@struct.dataclass
class StepIndex:
    """What every layer of one forward pass shares, computed once.

    page_T, offset_T: where each row's key and value go; rotations: cos and sin of each of `ropes`.
    """

    batch: RaggedBatch
    page_T: jax.Array
    offset_T: jax.Array
    rotations: tuple[tuple[jax.Array, jax.Array], ...]
    ropes: tuple[RopeSpec, ...] = struct.field(pytree_node=False)
    attention_impl: str = struct.field(pytree_node=False)
    chip: Chip | None = struct.field(pytree_node=False)
    head_split: HeadSplit | None = struct.field(pytree_node=False)

    def rotation(self, rope: RopeSpec) -> tuple[jax.Array, jax.Array]:
        return self.rotations[self.ropes.index(rope)]


CacheSpecs = Sequence[PagedKVSpec]  # one per layer, see `models.model.cache_specs`


def kv_bytes_per_token(specs: CacheSpecs, dtype: Any) -> int:
    """Cache bytes of one token over all layers."""
    return sum(spec.bytes_per_token(dtype) for spec in specs)


def page_bytes(specs: CacheSpecs, page_size: int, dtype: Any, chip: Chip | None = None) -> int:
    """Cache bytes of one page over all layers, as it is laid out for `chip`."""
    values = sum(math.prod(pool_shape(spec, 2, page_size, chip)[1:]) for spec in specs)
    return values * np.dtype(dtype).itemsize


def num_pages_for(
    specs: CacheSpecs,
    page_size: int,
    dtype: Any,
    memory_bytes: int,
    fraction: float = 0.9,
    chip: Chip | None = None,
) -> int:
    """Pages (the trash page included) that fit in `fraction` of `memory_bytes`, at least 2."""
    if not 0 < fraction <= 1:
        raise ValueError(f"memory fraction must be in (0, 1], got {fraction}")
    each_bytes = page_bytes(specs, page_size, dtype, chip)
    pages = int(memory_bytes * fraction) // each_bytes
    if pages < 2:
        raise ValueError(
            f"a cache needs 2 pages of {each_bytes:,} bytes (one is the trash page), but "
            f"{fraction:.0%} of {memory_bytes:,} bytes holds {pages}; use a smaller page size, "
            "a smaller dtype or more memory"
        )
    return pages


def pool_shape(
    spec: PagedKVSpec, num_pages: int, page_size: int, chip: Chip | None, parts: int = 1
) -> tuple[int, ...]:
    """One layer's pool for `chip`: those of `parts` devices, which split its heads, in a row."""
    heads = spec.num_kv_heads // parts
    pages, halves, rows, size, lanes = pages_shape(
        num_pages, page_size, heads, spec.head_dim, lanes_of(chip)
    )
    return (pages, halves, parts * rows, size, lanes)


def init_cache(
    specs: CacheSpecs,
    num_pages: int,
    page_size: int,
    dtype: Any,
    chip: Chip | None = None,
    parts: int = 1,
) -> KVCache:
    """A zeroed cache of `num_pages` pages, the trash page included, laid out for `chip`.

    `parts` is the number of devices that the heads are split over.
    """
    shapes = [pool_shape(spec, num_pages, page_size, chip, parts) for spec in specs]
    return KVCache(layers=tuple(jnp.zeros(shape, dtype) for shape in shapes))


def cache_shardings(cache: KVCache, mesh: Mesh, rules: Rules) -> KVCache:
    """Shardings of a cache whose heads are split as the key and value weights are."""
    return jax.tree.map(lambda x: named_sharding(PAGES_AXES, x.shape, mesh, rules), cache)


def step_index(
    config: ModelConfig,
    cache: KVCache,
    batch: RaggedBatch,
    attention_impl: str,
    chip: Chip | None = None,
    head_split: HeadSplit | None = None,
) -> StepIndex:
    page_size = page_size_of(cache.layers[0])
    num_slots = batch.q_len_S.shape[0]
    page_T = batch.page_table_SM.at[batch.slot_T, batch.positions_T // page_size].get(
        mode="fill", fill_value=TRASH_PAGE
    )
    page_T = jnp.where(batch.slot_T < num_slots, page_T, TRASH_PAGE)
    prompt_len_T = batch.prompt_len_S.at[batch.slot_T].get(mode="fill", fill_value=0)
    # In the order of the layers: a set's order would make each process compile another program.
    ropes = tuple(dict.fromkeys(layer.mixer.rope for layer in config.layers if layer.mixer.rope))
    length_T = jnp.maximum(prompt_len_T, batch.positions_T + 1)
    return StepIndex(
        batch=batch,
        page_T=page_T,
        offset_T=batch.positions_T % page_size,
        rotations=tuple(rotation(rope, batch.positions_T, length_T) for rope in ropes),
        ropes=ropes,
        attention_impl=attention_impl,
        chip=chip,
        head_split=head_split,
    )


def append(kv_pages: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, step: StepIndex) -> jax.Array:
    """Write the new tokens' keys and values; padding rows land in the trash page."""
    page_T, offset_T = step.page_T, step.offset_T
    if page_T.shape[0] == 1:
        # XLA makes a slice update of a scatter of one row and repeats it inside the attention's
        # gather, for which it keeps the cache as it was: a copy of each layer. Two rows stay one
        # scatter; the second is padding.
        page_T, offset_T = jnp.pad(page_T, (0, 1)), jnp.pad(offset_T, (0, 1))
        k_TKH, v_TKH = (jnp.pad(x, ((0, 1), (0, 0), (0, 0))) for x in (k_TKH, v_TKH))
    return update_cache(kv_pages, k_TKH, v_TKH, page_T, offset_T, chip=step.chip)


def copy_pages(cache: KVCache, from_R: jax.Array, to_R: jax.Array) -> KVCache:
    """Copy whole pages in every layer (copy-on-write); page 0 onto itself copies nothing."""

    def copy(pages: jax.Array) -> jax.Array:
        return pages.at[to_R].set(pages.at[from_R].get(mode="clip"), mode="drop")

    return cache.replace(layers=tuple(copy(pages) for pages in cache.layers))


def dense_view(cache: KVCache, layer: int, page_table_SM: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [S, X, K, H] of one layer, for reference and tests."""
    return read_dense(cache.layers[layer], page_table_SM)
