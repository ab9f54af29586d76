"""`advance`: admission, scheduling, pages, model, sampling and retirement in one compiled loop.

The loop runs `rounds` rounds (a traced number) and ends early only when every slot is empty. Each
round has a narrow pass (one token of every decoding row) and, when a row prefills, a wide pass over
`token_budget` prompt tokens; then every row whose history is computed samples, once. What a pass
computes is the business of a `StepModel`: a network, or a rule, or a cost model.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from engine.schedule import (
    Emission,
    Plan,
    admit,
    allocate,
    commit,
    pick,
    retire,
    schedule,
    when,
)
from engine.state import (
    EMPTY,
    NO_TOKEN,
    NO_UID,
    WAITING,
    BatchState,
    EngineConfig,
    Inbox,
    Requests,
)
from models.batch import RaggedBatch, ragged_batch


@struct.dataclass
class RowView:
    """What a sampler may look at: the rows' requests and their whole history.

    `tokens_SX` is every slot's history; row r reads slot `slot_R[r]`, `num_tokens_R[r]` entries.
    """

    requests_R: Requests
    slot_R: jax.Array
    num_tokens_R: jax.Array
    tokens_SX: jax.Array


@struct.dataclass
class Sampled:
    """What a pass chose per row. `ok_R` False ends the row with an error; `extra` is a pytree of
    per-row arrays that travels to the host beside the token (log-probabilities), or None."""

    token_R: jax.Array
    ok_R: jax.Array
    extra: Any


class StepModel(Protocol):
    """Static and hashable; all arrays are in `params` and `cache`."""

    def copy_pages(self, cache: Any, from_R: jax.Array, to_R: jax.Array) -> Any:
        """Copy whole pages; page 0 onto page 0 where a row copies nothing."""

    def no_rows(self, num_rows: int) -> Any:
        """What `run` gives for rows that did not run: a pytree of per-row arrays."""

    def run(self, params: Any, cache: Any, batch: RaggedBatch) -> tuple[Any, Any, jax.Array]:
        """(cache, what sampling needs of each slot's last token, ok_R).

        `ok_R` False (a value that is not finite) ends the row with an error.
        """

    def no_sample(self, num_rows: int) -> Sampled:
        """What `sample` gives for rows that sample nothing."""

    def sample(self, params: Any, last: Any, rows: RowView, samples_R: jax.Array) -> Sampled:
        """A choice for each row with `samples_R`, from what the passes gave."""


def advance(
    config: EngineConfig,
    model: StepModel,
    params: Any,
    cache: Any,
    state: BatchState,
    inbox: Inbox,
    rounds: jax.Array,
) -> tuple[Any, BatchState, Emission]:
    """Run up to `rounds` rounds; the emission has a leading axis of `config.max_rounds`."""
    state = receive(state, inbox)
    num_rows = config.max_num_seqs
    nothing = Emission(
        token_R=jnp.full(num_rows, NO_TOKEN, jnp.int32),
        uid_R=jnp.full(num_rows, NO_UID, jnp.int32),
        reason_R=jnp.zeros(num_rows, jnp.int32),
        extra=model.no_sample(num_rows).extra,
    )
    emitted = jax.tree.map(lambda x: jnp.stack([x] * config.max_rounds), nothing)

    def goes_on(carry):
        i, _, state, _ = carry
        return (i < jnp.minimum(rounds, config.max_rounds)) & jnp.any(state.slots.status_S != EMPTY)

    def body(carry):
        i, cache, state, emitted = carry
        cache, state, news = one_round(config, model, params, cache, state)
        emitted = jax.tree.map(lambda ring, x: ring.at[i].set(x, mode="drop"), emitted, news)
        return i + 1, cache, state, emitted

    _, cache, state, emitted = jax.lax.while_loop(
        goes_on, body, (jnp.int32(0), cache, state, emitted)
    )
    return cache, state, emitted


def one_round(
    config: EngineConfig, model: StepModel, params: Any, cache: Any, state: BatchState
) -> tuple[Any, BatchState, Emission]:
    state = admit(config, state)
    state, plan = allocate(config, state, schedule(config, state))
    copies = jnp.any(plan.copy_to_R > 0)
    cache = when(copies, lambda c: model.copy_pages(c, plan.copy_from_R, plan.copy_to_R), cache)

    rows = _row_view(state, plan)

    def run_pass(width: int, runs_R: jax.Array, carry):
        cache, before, ok_R = carry
        cache, new, new_ok_R = model.run(params, cache, make_batch(state, plan, runs_R, width))

        def merge(new, old):
            return jnp.where(runs_R.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        return cache, jax.tree.map(merge, new, before), merge(new_ok_R, ok_R)

    runs_R = plan.q_len_R > 0
    decodes_R, prefills_R = runs_R & plan.decode_R, runs_R & ~plan.decode_R
    carry = (cache, model.no_rows(config.max_num_seqs), jnp.ones(config.max_num_seqs, bool))
    carry = when(jnp.any(decodes_R), lambda c: run_pass(1, decodes_R, c), carry)
    wide = config.token_budget
    carry = when(jnp.any(prefills_R), lambda c: run_pass(wide, prefills_R, c), carry)
    cache, last, ok_R = carry

    samples_R = runs_R & (plan.start_R + plan.q_len_R == rows.num_tokens_R)
    sampled = when(
        jnp.any(samples_R),
        lambda _: model.sample(params, last, rows, samples_R),
        model.no_sample(config.max_num_seqs),
    )
    state, news = commit(config, state, plan, sampled.token_R, sampled.ok_R & ok_R)
    return cache, state, news.replace(extra=sampled.extra)


def _row_view(state: BatchState, plan: Plan) -> RowView:
    slots = state.slots
    return RowView(
        requests_R=jax.tree.map(lambda x: pick(x, plan.slot_R), slots.requests),
        slot_R=plan.slot_R,
        num_tokens_R=pick(slots.num_tokens_S, plan.slot_R),
        tokens_SX=slots.tokens_SX,
    )


def make_batch(state: BatchState, plan: Plan, runs_R: jax.Array, width: int) -> RaggedBatch:
    """The ragged batch of one pass. Width 1 is the narrow pass: row r of the list is row r."""
    slots = state.slots
    num_rows = plan.slot_R.shape[0]
    q_len_R = jnp.where(runs_R, plan.q_len_R, 0)
    if width == 1:
        q_start_R, num_tokens, max_q_len = jnp.arange(num_rows, dtype=jnp.int32), num_rows, 1
    else:
        q_start_R, num_tokens, max_q_len = jnp.cumsum(q_len_R) - q_len_R, width, width
    batch = ragged_batch(
        tokens_T=jnp.zeros(num_tokens, jnp.int32),
        q_start_S=q_start_R,
        q_len_S=q_len_R,
        kv_len_S=jnp.where(runs_R, plan.start_R + plan.q_len_R, 0),
        prompt_len_S=pick(slots.requests.prompt_len, plan.slot_R),
        page_table_SM=slots.page_table_SM.at[plan.slot_R].get(mode="fill", fill_value=0),
        max_q_len=max_q_len,
    )
    slot_T = plan.slot_R.at[batch.slot_T].get(mode="fill", fill_value=slots.status_S.shape[0])
    tokens_T = slots.tokens_SX.at[slot_T, batch.positions_T].get(mode="fill", fill_value=0)
    return batch.replace(tokens_T=tokens_T)


# ---- the inbox -----------------------------------------------------------------------------------


def receive(state: BatchState, inbox: Inbox) -> BatchState:
    """Abort, then put arrivals into empty slots. The host sends no more than there is room for."""
    aborts = jnp.any(inbox.abort_A != NO_UID)
    state = when(aborts, lambda s: _abort(s, inbox.abort_A), state)
    arrivals = jnp.any(inbox.requests.uid != NO_UID)
    return when(arrivals, lambda s: _arrive(s, inbox), state)


def _abort(state: BatchState, abort_A: jax.Array) -> BatchState:
    slots = state.slots
    hit_S = jnp.any(slots.requests.uid[:, None] == abort_A[None, :], axis=1)
    hit_S &= slots.status_S != EMPTY
    return retire(state, jnp.arange(hit_S.shape[0], dtype=jnp.int32), hit_S)


def _arrive(state: BatchState, inbox: Inbox) -> BatchState:
    slots = state.slots
    num_slots, room = slots.tokens_SX.shape
    new_A = inbox.requests.uid != NO_UID
    empty_S = slots.status_S == EMPTY
    nth_S = jnp.where(empty_S, jnp.cumsum(empty_S) - 1, num_slots)
    ids_S = jnp.arange(num_slots, dtype=jnp.int32)
    slot_of_nth = jnp.full(num_slots, num_slots, jnp.int32).at[nth_S].set(ids_S, mode="drop")
    slot_A = slot_of_nth.at[jnp.cumsum(new_A) - 1].get(mode="fill", fill_value=num_slots)
    slot_A = jnp.where(new_A, slot_A, num_slots)

    position_X = jnp.arange(room)
    source_AX = inbox.start_A[:, None] + position_X
    tokens_AX = inbox.tokens_Y.at[source_AX].get(mode="fill", fill_value=0)
    tokens_AX = jnp.where(position_X < inbox.requests.prompt_len[:, None], tokens_AX, 0)

    def put(x_S, value_A):
        return x_S.at[slot_A].set(value_A, mode="drop")

    slots = slots.replace(
        requests=jax.tree.map(put, slots.requests, inbox.requests),
        status_S=put(slots.status_S, WAITING),
        tokens_SX=put(slots.tokens_SX, tokens_AX),
        num_tokens_S=put(slots.num_tokens_S, inbox.requests.prompt_len),
        num_computed_S=put(slots.num_computed_S, 0),
        preemptions_S=put(slots.preemptions_S, 0),
    )
    return state.replace(slots=slots)
