"""`advance`: admission, scheduling, pages, model, sampling and retirement in one compiled loop.

The loop runs `rounds` rounds (a traced number) and ends early only when every slot is empty. Each
round has a narrow pass (one token of every decoding row) and, when a row prefills, a wide pass over
`token_budget` prompt tokens; then every row whose history is computed samples, once. What a pass
computes is the business of a `StepModel`: a network, or a rule, or a cost model.

A prompt token is scored from the state of the token before it, in the wide pass that computes it.
The narrow pass has none to score: its token is the last one known.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from engine.admission import admit
from engine.commit import Emission, commit
from engine.config import EngineConfig
from engine.inbox import receive
from engine.rows import pick, when
from engine.schedule import Plan, allocate, schedule
from engine.state import EMPTY, NO_TOKEN, NO_UID, BatchState, Inbox, Requests
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


@struct.dataclass
class PromptScores:
    """Prompt tokens that a round scored: entry t is token `position_T[t]` of request `uid_T[t]`.

    `uid_T` is NO_UID where there is none; `scores_T` is the model's pytree of per-token arrays.
    """

    uid_T: jax.Array
    position_T: jax.Array
    scores_T: Any


@struct.dataclass
class Extra:
    """What leaves a round beside its tokens: the sampler's `extra` and scored prompt tokens."""

    sampled: Any
    prompt: PromptScores


class StepModel(Protocol):
    """Static and hashable; all arrays are in `params` and `cache`."""

    def copy_pages(self, cache: Any, from_R: jax.Array, to_R: jax.Array) -> Any:
        """Copy whole pages; page 0 onto page 0 where a row copies nothing."""

    def no_states(self, num_tokens: int) -> Any:
        """What `run` gives for tokens that did not run: a pytree of per-token arrays."""

    def run(self, params: Any, cache: Any, batch: RaggedBatch) -> tuple[Any, Any, jax.Array]:
        """(cache, state of each token of the batch, ok_R).

        The state is what sampling after that token needs. `ok_R` False (a value that is not finite)
        ends the row with an error.
        """

    def no_scores(self, num_tokens: int) -> Any:
        """What `score` gives for tokens that nobody asked for: a pytree of per-token arrays."""

    def score(self, params: Any, states_T: Any, token_T: jax.Array, asked_T: jax.Array) -> Any:
        """How well `token_T` follows each state, where `asked_T`."""

    def no_sample(self, num_rows: int) -> Sampled:
        """What `sample` gives for rows that sample nothing."""

    def sample(self, params: Any, last_R: Any, rows: RowView, samples_R: jax.Array) -> Sampled:
        """A choice for each row with `samples_R`, from the state of its last token."""


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
        extra=Extra(model.no_sample(num_rows).extra, _no_prompt_scores(config, model)),
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

    rows = row_view(state, plan)

    def run_pass(width: int, runs_R: jax.Array, carry):
        (cache, before_R, ok_R), batch = carry, make_batch(state, plan, runs_R, width)
        cache, states_T, new_ok_R = model.run(params, cache, batch)
        at_R = jnp.maximum(batch.q_start_S + batch.q_len_S - 1, 0)
        last_R = jax.tree.map(lambda x_T: x_T.at[at_R].get(mode="clip"), states_T)

        def merge(new_R, old_R):
            return jnp.where(runs_R.reshape(-1, *(1,) * (new_R.ndim - 1)), new_R, old_R)

        carry = cache, jax.tree.map(merge, last_R, before_R), merge(new_ok_R, ok_R)
        return carry, batch, states_T

    def run_prompts(carry):
        passes, prompt = carry
        passes, batch, states_T = run_pass(config.token_budget, prefills_R, passes)
        return passes, _score_prompt(model, params, rows, batch, states_T, prompt)

    runs_R = plan.q_len_R > 0
    decodes_R, prefills_R = runs_R & plan.decode_R, runs_R & ~plan.decode_R
    passes = (cache, model.no_states(config.max_num_seqs), jnp.ones(config.max_num_seqs, bool))
    passes = when(jnp.any(decodes_R), lambda c: run_pass(1, decodes_R, c)[0], passes)
    carry = passes, _no_prompt_scores(config, model)
    (cache, last_R, ok_R), prompt = when(jnp.any(prefills_R), run_prompts, carry)

    samples_R = runs_R & (plan.start_R + plan.q_len_R == rows.num_tokens_R)
    sampled = when(
        jnp.any(samples_R),
        lambda _: model.sample(params, last_R, rows, samples_R),
        model.no_sample(config.max_num_seqs),
    )
    state, news = commit(config, state, plan, sampled.token_R, sampled.ok_R & ok_R)
    return cache, state, news.replace(extra=Extra(sampled.extra, prompt))


def _no_prompt_scores(config: EngineConfig, model: StepModel) -> PromptScores:
    # A budget of 1 makes the wide pass a narrow one.
    num_tokens = config.max_num_seqs if config.token_budget == 1 else config.token_budget
    return PromptScores(
        uid_T=jnp.full(num_tokens, NO_UID, jnp.int32),
        position_T=jnp.zeros(num_tokens, jnp.int32),
        scores_T=model.no_scores(num_tokens),
    )


def _score_prompt(
    model: StepModel,
    params: Any,
    rows: RowView,
    batch: RaggedBatch,
    states_T: Any,
    none: PromptScores,
) -> PromptScores:
    """Score the prompt token after each token of the pass, for rows that ask.

    Once a request has its first token, its prompt was scored: what is computed again after a
    preemption is not.
    """
    requests_R = rows.requests_R
    asks_R = (requests_R.score_prompt > 0) & (rows.num_tokens_R == requests_R.prompt_len)
    position_T = batch.positions_T + 1
    asked_T = pick(asks_R, batch.slot_T) & (position_T < pick(requests_R.prompt_len, batch.slot_T))

    def score(_) -> PromptScores:
        num_slots = rows.tokens_SX.shape[0]
        slot_T = rows.slot_R.at[batch.slot_T].get(mode="fill", fill_value=num_slots)
        token_T = rows.tokens_SX.at[slot_T, position_T].get(mode="fill", fill_value=0)
        return PromptScores(
            uid_T=jnp.where(asked_T, pick(requests_R.uid, batch.slot_T), NO_UID),
            position_T=position_T,
            scores_T=model.score(params, states_T, token_T, asked_T),
        )

    return when(jnp.any(asked_T), score, none)


def row_view(state: BatchState, plan: Plan) -> RowView:
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
    narrow = width == 1
    if narrow:
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
