"""Units of work of the GPU attention kernels, from lengths and window alone.

A slot's new tokens are cut into tiles, and a tile's keys into parts where few tokens meet many
keys: a unit is a tile against a range of its key blocks. The list is computed by XLA operations;
the layers of a step that have the same window share one.

Invariant: how a slot is cut depends on its own lengths and on static facts only.

Letters beside those of the contract: W units, Q tokens of a tile, B keys of a block.
"""

from enum import IntEnum
from typing import Protocol

import jax
import jax.numpy as jnp


class Unit(IntEnum):
    """Columns of units_W8; the eighth is padding."""

    SLOT = 0
    ROW = 1  # of the tile's first token in q
    TOKENS = 2
    POSITION = 3  # of the tile's first token
    BEGIN = 4  # blocks of keys
    END = 5
    PARTS = 6  # units that share this tile


class Row(IntEnum):
    """Columns of rows_T4; the fourth is padding."""

    UNIT = 0  # first of the units that share the row
    PARTS = 1  # how many; 0 if no slot owns the row
    TOKEN = 2  # index within the tile


class Cut(Protocol):
    """Sizes by which slots are cut."""

    @property
    def queries(self) -> int:
        """New tokens of a tile."""

    @property
    def keys(self) -> int:
        """Of a block."""

    @property
    def parts(self) -> int:
        """Most parts of a tile."""

    @property
    def part_keys(self) -> int:
        """Fewer keys are not split off."""


def _of_slot(a_S: jax.Array, slot_X: jax.Array) -> jax.Array:
    return a_S.at[slot_X].get(mode="fill", fill_value=0)


def plan_units(
    q_start_S: jax.Array,
    q_len_S: jax.Array,
    kv_len_S: jax.Array,
    mine_S: jax.Array,
    split_S: jax.Array,
    cut: Cut,
    window: int | None,
    num_units: int,
) -> tuple[jax.Array, ...]:
    """units_W8 of the slots in `mine_S`, of which those in `split_S` may have several parts; the
    number of units [1]; first unit and parts of each slot.

    A slot's units follow each other tile by tile, those of a tile by their keys. A part may have no
    keys. Entries from the number on are unspecified.
    """
    Q, B = cut.queries, cut.keys

    def block_range(position, tokens):
        first = 0 if window is None else jnp.maximum(position - window + 1, 0)
        return first // B, jnp.maximum(position + tokens + B - 1, 0) // B

    begin_S, end_S = block_range(kv_len_S - q_len_S, q_len_S)
    wanted_S = ((end_S - begin_S) * B + cut.part_keys - 1) // cut.part_keys
    parts_S = jnp.clip(wanted_S, 1, jnp.where(split_S, cut.parts, 1))
    units_S = jnp.where(mine_S, (q_len_S + Q - 1) // Q, 0) * parts_S
    # Slots with the largest units come first: programs take units in turns, and what is unequal
    # about their shares is then about one of the smallest. Compared in pairs: one kernel, where a
    # sort and a cumulative sum would be several.
    s_S = jnp.arange(units_S.shape[0], dtype=jnp.int32)
    size_S = (end_S - begin_S + parts_S - 1) // parts_S
    before_SS = (size_S > size_S[:, None]) | ((size_S == size_S[:, None]) & (s_S < s_S[:, None]))
    first_unit_S = jnp.sum(jnp.where(before_SS, units_S, 0), axis=1, dtype=jnp.int32)

    u_W1 = jnp.arange(num_units, dtype=jnp.int32)[:, None]
    its_WS = (first_unit_S <= u_W1) & (u_W1 < first_unit_S + units_S)
    slot_W = jnp.sum(jnp.where(its_WS, s_S, 0), axis=1, dtype=jnp.int32)
    parts_W = jnp.maximum(_of_slot(parts_S, slot_W), 1)
    i_W = u_W1[:, 0] - _of_slot(first_unit_S, slot_W)
    token_W = i_W // parts_W * Q
    tokens_W = jnp.clip(_of_slot(q_len_S, slot_W) - token_W, 0, Q)
    position_W = _of_slot(kv_len_S - q_len_S, slot_W) + token_W
    begin_W, end_W = block_range(position_W, tokens_W)
    step_W = (end_W - begin_W + parts_W - 1) // parts_W
    begin_W = begin_W + i_W % parts_W * step_W
    columns = (
        slot_W,
        _of_slot(q_start_S, slot_W) + token_W,
        tokens_W,
        position_W,
        begin_W,
        jnp.minimum(end_W, begin_W + step_W),
        parts_W,
        jnp.zeros_like(slot_W),
    )
    return jnp.stack(columns, axis=1), jnp.sum(units_S, keepdims=True), first_unit_S, parts_S


def plan_rows(
    q_start_S: jax.Array,
    q_len_S: jax.Array,
    mine_S: jax.Array,
    first_unit_S: jax.Array,
    parts_S: jax.Array,
    queries: int,
    num_rows: int,
) -> jax.Array:
    """rows_T4: for each row its first unit, parts and index in the tile; see `Row`."""
    t_T = jnp.arange(num_rows, dtype=jnp.int32)
    owns_ST = (q_start_S[:, None] <= t_T) & (t_T < (q_start_S + q_len_S)[:, None])
    slot_T = jnp.argmax(owns_ST, axis=0)
    parts_T = jnp.where(_of_slot(mine_S, slot_T), _of_slot(parts_S, slot_T), 1)
    token_T = t_T - _of_slot(q_start_S, slot_T)
    unit_T = _of_slot(first_unit_S, slot_T) + token_T // queries * parts_T
    parts_T = jnp.where(jnp.any(owns_ST, axis=0), parts_T, 0)
    return jnp.stack([unit_T, parts_T, token_T % queries, jnp.zeros_like(t_T)], axis=1)
