"""The engine's whole state as one pytree of fixed-shape device arrays.

Letters beyond `models.dims`: R rows (requests that run at once), X = M * C tokens a slot has room
for, A entries of an inbox, Y tokens of an inbox, E stop ids, Q rounds of one dispatch, N totals.

A slot holds a request from arrival to finish: waiting, running, or waiting again once preempted.
Pages belong to the pool; a slot's row of the page table says which it holds. Invariants:

- a slot's page table entries beyond `num_pages_S` are 0, the trash page, which nobody shares;
- `refcount_P[p]` is the number of page table entries that name page p, if it is not 0;
- the free queue holds exactly the pages with reference count 0, but never page 0;
- a slot holds ceil(num_computed / C) pages after every round, or none when it waits;
- a running slot whose every known token is computed is held: it runs nothing until a fork;
- a published page's `content_PC` are the tokens whose keys it holds, and following `parent_P` to
  the root spells the whole history before it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from engine.config import EngineConfig

EMPTY, WAITING, RUNNING = 0, 1, 2  # status_S

# Finish reasons as they leave the device; 0 means the request goes on.
REASONS = (None, "stop", "length", "error")
STOP, LENGTH, ERROR = 1, 2, 3

# Totals since the start; `decode_rounds` had a narrow pass.
COUNTERS = (
    "rounds",
    "decode_rounds",
    "prefill_tokens",
    "decode_tokens",
    "preemptions",
    "page_copies",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "stalled_rows",
)

NO_UID = -1
UID_SPAN = 2**31  # requests in slots at the same time arrived less than half of it apart
NO_TOKEN = -1
ROOT_PAGE = 0  # parent of a sequence's first page; the trash page is never published
DEAD_CHAIN = -1  # chain_len_S of a slot that publishes nothing more


@struct.dataclass
class Requests:
    """What a request brings, one entry per slot (or per inbox entry); int32 unless said.

    uid          which arrival it was, modulo UID_SPAN; unique among requests in slots
    prompt_len   tokens of the prompt
    max_len      tokens of prompt and output together at most
    priority     lower runs first; ties by arrival
    parent_uid   request whose prompt pages this one shares once computed, or -1
    salt         prefix pages are shared only between equal salts
    score_prompt 1: the model scores the tokens of its prompt (log-probabilities)
    stop_ids     [., E] token ids that end the request (NO_TOKEN fills)
    sampling     pytree of per-request arrays, the sampler's own
    """

    uid: jax.Array
    prompt_len: jax.Array
    max_len: jax.Array
    priority: jax.Array
    parent_uid: jax.Array
    salt: jax.Array
    score_prompt: jax.Array
    stop_ids: jax.Array
    sampling: object


@struct.dataclass
class Slots:
    """Admitted requests. Of `num_tokens_S` known tokens, `num_computed_S` have their keys cached.

    chain_*: the longest chain of published pages that equals this slot's history, and its hash.
    """

    requests: Requests
    status_S: jax.Array
    tokens_SX: jax.Array
    num_tokens_S: jax.Array
    num_computed_S: jax.Array
    page_table_SM: jax.Array
    num_pages_S: jax.Array
    chain_len_S: jax.Array
    chain_page_S: jax.Array
    chain_epoch_S: jax.Array
    chain_hash_S: jax.Array
    preemptions_S: jax.Array


@struct.dataclass
class PagePool:
    """Pages and the prefix index, which is nothing but the content of pages.

    The free queue is a ring of page ids, least recently freed first: `num_free` entries from
    `head`. `epoch_P` counts how often a page was taken, so a stale parent link cannot be followed.
    """

    refcount_P: jax.Array
    queue_P: jax.Array
    head: jax.Array
    num_free: jax.Array
    epoch_P: jax.Array
    published_P: jax.Array
    hash_P: jax.Array
    parent_P: jax.Array
    parent_epoch_P: jax.Array
    salt_P: jax.Array
    content_PC: jax.Array


@struct.dataclass
class BatchState:
    """`counts_2N` are the totals named in `COUNTERS`, uint32 high and low words: 32 bits are full
    within days."""

    slots: Slots
    pool: PagePool
    counts_2N: jax.Array


@struct.dataclass
class Forks:
    """What a search decided. Request `to_uid_F[f]` takes over the history and the pages of
    `from_uid_F[f]`, to go on from its first `length_F[f]` tokens with `token_F[f]`, or to wait
    there if that is NO_TOKEN. Unused entries have uid NO_UID.

    Of a source no more than `length_F` tokens are computed. All entries see the state before any of
    them; no request stands twice in `to_uid_F`.
    """

    to_uid_F: jax.Array
    from_uid_F: jax.Array
    length_F: jax.Array
    token_F: jax.Array


@struct.dataclass
class Inbox:
    """Everything that happened outside since the last dispatch, in one bundle of fixed size.

    `tokens_Y` holds the prompts one after the other, entry a from `start_A[a]`; unused entries have
    uid NO_UID. `abort_A` are uids.
    """

    requests: Requests
    tokens_Y: jax.Array
    start_A: jax.Array
    abort_A: jax.Array
    forks: Forks


def init_state(config: EngineConfig, sampling_S: object) -> BatchState:
    """An empty engine. `sampling_S` is the sampler's pytree with a leading axis of num_slots."""
    S, M, P, C = config.num_slots, config.pages_per_seq, config.num_pages, config.page_size

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    return BatchState(
        slots=Slots(
            requests=jax.tree.map(jnp.array, empty_requests(S, config.max_stop_ids, sampling_S)),
            status_S=zeros(S),
            tokens_SX=zeros(S, M * C),
            num_tokens_S=zeros(S),
            num_computed_S=zeros(S),
            page_table_SM=zeros(S, M),
            num_pages_S=zeros(S),
            chain_len_S=zeros(S),
            chain_page_S=zeros(S),
            chain_epoch_S=zeros(S),
            chain_hash_S=jnp.zeros(S, jnp.uint32),
            preemptions_S=zeros(S),
        ),
        pool=PagePool(
            refcount_P=zeros(P),
            # Pages 1 .. P-1 are free at first; the last entry is outside of the ring's content.
            queue_P=(jnp.arange(P, dtype=jnp.int32) + 1) % P,
            head=jnp.int32(0),
            num_free=jnp.int32(P - 1),
            epoch_P=zeros(P),
            published_P=jnp.zeros(P, bool),
            hash_P=jnp.zeros(P, jnp.uint32),
            parent_P=zeros(P),
            parent_epoch_P=zeros(P),
            salt_P=zeros(P),
            content_PC=zeros(P, C),
        ),
        counts_2N=jnp.zeros((2, len(COUNTERS)), jnp.uint32),
    )


def count(state: BatchState, **amounts: jax.Array) -> BatchState:
    """Add to totals, by name; each amount is less than 2**31."""
    high_N, low_N = state.counts_2N
    added_N = jnp.stack([jnp.asarray(amounts.get(name, 0), jnp.uint32) for name in COUNTERS])
    sum_N = low_N + added_N
    return state.replace(counts_2N=jnp.stack([high_N + (sum_N < low_N), sum_N]))


def totals(state: BatchState) -> dict[str, int]:
    """What was counted, by name (waits for what counts it)."""
    high_N, low_N = np.asarray(state.counts_2N).tolist()
    return {name: (h << 32) + n for name, h, n in zip(COUNTERS, high_N, low_N, strict=True)}


# What follows is built on the host: a device array would wait for the dispatch that runs.


def empty_requests(count: int, max_stop_ids: int, sampling: object) -> Requests:
    """`count` entries that hold no request."""

    def full(value: int, *shape: int) -> np.ndarray:
        return np.full((count, *shape), value, np.int32)

    return Requests(
        uid=full(NO_UID),
        prompt_len=full(0),
        max_len=full(0),
        priority=full(0),
        parent_uid=full(NO_UID),
        salt=full(0),
        score_prompt=full(0),
        stop_ids=full(NO_TOKEN, max_stop_ids),
        sampling=sampling,
    )


def no_forks(count: int) -> Forks:
    def full(value: int) -> np.ndarray:
        return np.full(count, value, np.int32)

    return Forks(full(NO_UID), full(NO_UID), full(0), full(NO_TOKEN))
