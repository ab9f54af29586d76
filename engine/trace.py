"""What each round of a record did, found by running the scheduler again, without a model.

The scheduler's functions take tokens, not a network: here the tokens are the record's. So a trace
needs neither weights nor an accelerator, and it is the recorded run or an error: every token must
leave in the dispatch and round in which the record has it.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from engine.admission import admit
from engine.commit import Emission, commit
from engine.config import EngineConfig
from engine.dispatch import make_inbox
from engine.inbox import receive
from engine.recording import Event, Record, events_of
from engine.rows import pick
from engine.sampling_rows import empty_rows
from engine.schedule import Plan, allocate, schedule
from engine.state import EMPTY, NO_TOKEN, REASONS, RUNNING, BatchState, init_state


@dataclass(frozen=True)
class SlotRound:
    """One slot in one round.

    kind      prefill, decode, unbudgeted (earlier rows took all of the token budget), stalled (its
              pages were short), preempted, or waiting
    tokens    computed in this round
    reused    tokens whose pages the prefix index or a parent gave at admission
    finished  reason, if the request ended
    """

    uid: int
    slot: int
    kind: str
    tokens: int
    reused: int
    finished: str | None


@dataclass(frozen=True)
class Round:
    """Pages as they stand after the round: `owners` of each page are uids, `cached_P` pages are
    free and published. `unused_share` is the part of held positions without a key."""

    dispatch: int
    slots: tuple[SlotRound, ...]
    owners: tuple[tuple[int, ...], ...]
    cached_P: np.ndarray
    copied: int
    unused_share: float


def trace(record: Record) -> list[Round]:
    """ValueError if the scheduler of today does not make the rounds of the record."""
    config, tape_UX = record.config, _tape(record)
    rows = jax.tree.map(jnp.asarray, empty_rows(config.num_slots, record.limits))
    state, rounds = init_state(config, rows), []
    step = jax.jit(_round, static_argnums=0)
    take = jax.jit(receive)
    for i, dispatch in enumerate(record.dispatches):
        state = take(state, make_inbox(config, record.limits, dispatch))
        events: list[Event] = []
        wide = replace(config, token_budget=dispatch.budget)
        for q in range(min(dispatch.rounds, config.max_rounds)):
            if not np.any(np.asarray(state.slots.status_S) != EMPTY):
                break
            before = jax.tree.map(np.asarray, state)
            state, *seen = step(wide, tape_UX, state)
            admitted, wanted_R, plan, news = jax.tree.map(np.asarray, seen)
            events += [(q, *rest) for _, *rest in events_of(jax.tree.map(lambda x: x[None], news))]
            after = jax.tree.map(np.asarray, state)
            rounds.append(_describe(i, (before, admitted, after), wanted_R, plan, news))
        if events != record.emitted[i]:
            raise ValueError(
                f"dispatch {i} of the record has other rounds than this scheduler makes (or a "
                "request failed within its prompt); record the requests again"
            )
    return rounds


def _tape(record: Record) -> jax.Array:
    """Output tokens of every request by uid. NO_TOKEN follows the last: a row that comes to sample
    there ended with an error."""
    outputs: dict[int, list[int]] = {}
    for events in record.emitted:
        for _, uid, token, _ in events:
            outputs.setdefault(uid, []).append(token)
    longest = max(map(len, outputs.values()), default=0)
    tape_UX = np.full((max(outputs, default=0) + 1, longest + 1), NO_TOKEN, np.int32)
    for uid, tokens in outputs.items():
        tape_UX[uid, : len(tokens)] = tokens
    return jnp.asarray(tape_UX)


def _round(config: EngineConfig, tape_UX: jax.Array, state: BatchState):
    """`engine.step.one_round` with the tape in place of passes and sampler."""
    admitted = admit(config, state)
    wanted = schedule(config, admitted)
    planned, plan = allocate(config, admitted, wanted)
    requests, slot_R = planned.slots.requests, plan.slot_R
    position_R = pick(planned.slots.num_tokens_S, slot_R) - pick(requests.prompt_len, slot_R)
    token_R = tape_UX.at[pick(requests.uid, slot_R), position_R].get(
        mode="fill", fill_value=NO_TOKEN
    )
    samples_R = plan.start_R + plan.q_len_R == pick(planned.slots.num_tokens_S, slot_R)
    state, news = commit(config, planned, plan, token_R, (token_R != NO_TOKEN) | ~samples_R)
    return state, admitted, wanted.q_len_R, plan, news


def _describe(
    dispatch: int, states: tuple, wanted_R: np.ndarray, plan: Plan, news: Emission
) -> Round:
    before, admitted, after = states
    row_of = {int(slot): r for r, slot in enumerate(plan.slot_R)}
    ends = {int(u): REASONS[x] for u, x in zip(news.uid_R, news.reason_R, strict=True) if u >= 0}
    slots = []
    for slot in np.flatnonzero(before.slots.status_S != EMPTY):
        uid, row = int(before.slots.requests.uid[slot]), row_of.get(int(slot))
        started = before.slots.status_S[slot] != admitted.slots.status_S[slot]
        tokens = 0 if row is None else int(plan.q_len_R[row])
        if admitted.slots.status_S[slot] != RUNNING:
            kind = "waiting"
        elif after.slots.preemptions_S[slot] > before.slots.preemptions_S[slot]:
            kind = "preempted"
        elif tokens == 0:
            kind = "stalled" if wanted_R[row] else "unbudgeted"
        else:
            kind = "decode" if plan.decode_R[row] else "prefill"
        reused = int(admitted.slots.num_computed_S[slot]) if started else 0
        slots.append(SlotRound(uid, int(slot), kind, tokens, reused, ends.get(uid)))
    return Round(dispatch, tuple(slots), *_pages(plan, after))


def _pages(plan: Plan, after: BatchState) -> tuple:
    slots, pool = after.slots, after.pool
    owners: list[list[int]] = [[] for _ in pool.refcount_P]
    for slot in np.flatnonzero(slots.status_S == RUNNING):
        for page in slots.page_table_SM[slot, : slots.num_pages_S[slot]]:
            owners[page].append(int(slots.requests.uid[slot]))
    held = int(slots.num_pages_S.sum()) * pool.content_PC.shape[1]
    computed = int(slots.num_computed_S[slots.status_S == RUNNING].sum())
    return (
        tuple(map(tuple, owners)),
        (pool.refcount_P == 0) & pool.published_P,
        int((plan.copy_to_R > 0).sum()),
        1 - computed / held if held else 0.0,
    )
