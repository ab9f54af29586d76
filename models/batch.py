"""The ragged batch: what one forward pass computes.

Prefill, chunked prefill, decode and verification are one case: slot s brings `q_len_S[s]` new
tokens, which stand at rows `q_start_S[s] ..` of the flat token list and at positions
`kv_len_S[s] - q_len_S[s] ..` of their sequence. Invariant: a row belongs to at most one slot; a row
that belongs to none is padding, is written to the trash page and read by nobody.
"""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class RaggedBatch:
    """Shapes and meaning (all int32):

    tokens_T        token ids; padding rows may hold anything
    positions_T     position of each row in its sequence, 0 for padding
    slot_T          slot of each row, S for padding
    q_start_S       first row of each slot, ascending
    q_len_S         new tokens of each slot, 0 for an idle one
    kv_len_S        tokens in the cache after this step, the new ones included
    prompt_len_S    prompt length of each request (rotary kinds that depend on the length use it)
    page_table_SM   page of positions j*C .. j*C+C-1 in column j; unused columns hold 0
    max_q_len       static upper bound of q_len_S; 1 for decode
    """

    tokens_T: jax.Array
    positions_T: jax.Array
    slot_T: jax.Array
    q_start_S: jax.Array
    q_len_S: jax.Array
    kv_len_S: jax.Array
    prompt_len_S: jax.Array
    page_table_SM: jax.Array
    max_q_len: int = struct.field(pytree_node=False)


def ragged_batch(
    tokens_T: jax.Array,
    q_start_S: jax.Array,
    q_len_S: jax.Array,
    kv_len_S: jax.Array,
    prompt_len_S: jax.Array,
    page_table_SM: jax.Array,
    max_q_len: int,
) -> RaggedBatch:
    """Fill in the slot and the position of every row. `q_start_S` must ascend."""
    num_rows, num_slots = tokens_T.shape[0], q_start_S.shape[0]
    row_T = jnp.arange(num_rows, dtype=jnp.int32)
    slot_T = jnp.searchsorted(q_start_S, row_T, side="right", method="compare_all") - 1
    slot_T = jnp.clip(slot_T, 0, num_slots - 1).astype(jnp.int32)
    in_slot_T = row_T - q_start_S.at[slot_T].get(mode="clip")
    real_T = (in_slot_T >= 0) & (in_slot_T < q_len_S.at[slot_T].get(mode="clip"))
    first_S = kv_len_S - q_len_S
    positions_T = jnp.where(real_T, first_S.at[slot_T].get(mode="clip") + in_slot_T, 0)
    return RaggedBatch(
        tokens_T=tokens_T,
        positions_T=positions_T,
        slot_T=jnp.where(real_T, slot_T, num_slots),
        q_start_S=q_start_S,
        q_len_S=q_len_S,
        kv_len_S=kv_len_S,
        prompt_len_S=prompt_len_S,
        page_table_SM=page_table_SM,
        max_q_len=max_q_len,
    )
