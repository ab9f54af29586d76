"""A minimal host for `advance` over the rule model: feeds requests, collects tokens, checks."""

from dataclasses import dataclass, field
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from engine.config import EngineConfig
from engine.state import REASONS, Inbox, empty_requests, init_state, no_forks, totals
from engine.step import advance
from tests.compiling import QUICK
from tests.engine.rule_model import POISON, RuleModel, check_invariants

VOCAB = 97


@dataclass
class Request:
    uid: int
    prompt: list[int]
    max_len: int
    arrival: int = 0  # dispatch from which it may be sent
    priority: int = 0
    parent_uid: int = -1
    salt: int = 0
    stop_ids: tuple[int, ...] = ()
    abort_at: int | None = None  # dispatch at which it is aborted
    score_prompt: int = 0


@lru_cache
def compiled_step(config: EngineConfig):
    model = RuleModel(VOCAB, config.page_size)
    step = partial(advance, config, model)
    return jax.jit(step, donate_argnums=(1, 2), compiler_options=QUICK)


def make_inbox(config: EngineConfig, requests, aborts, forks=()) -> Inbox:
    A = config.inbox_size
    fields = empty_requests(A, config.max_stop_ids, None)
    tokens_Y = np.zeros(config.inbox_tokens, np.int32)
    start_A, used = np.zeros(A, np.int32), 0
    for a, request in enumerate(requests):
        for name in ("uid", "max_len", "priority", "parent_uid", "salt", "score_prompt"):
            getattr(fields, name)[a] = getattr(request, name)
        fields.prompt_len[a] = len(request.prompt)
        fields.stop_ids[a, : len(request.stop_ids)] = request.stop_ids
        start_A[a] = used
        tokens_Y[used : used + len(request.prompt)] = request.prompt
        used += len(request.prompt)
    abort_A = np.full(A, -1, np.int32)
    abort_A[: len(aborts)] = aborts
    forks_F = no_forks(config.max_num_seqs)
    for f, entry in enumerate(forks):
        for array, value in zip(jax.tree.leaves(forks_F), entry, strict=True):
            array[f] = value
    return Inbox(fields, tokens_Y, start_A, abort_A, forks_F)


@dataclass
class Driver:
    config: EngineConfig
    rounds: int = 2
    may_hold: bool = False
    outputs: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    token_rounds: dict[int, list[int]] = field(default_factory=dict)  # round of each token
    scores: dict[int, dict[int, int]] = field(default_factory=dict)  # of prompts, by position
    scored: int = 0  # how often a prompt token was scored
    num_rounds: int = 0

    def __post_init__(self):
        self.state = init_state(self.config, None)
        self.cache = RuleModel(VOCAB, self.config.page_size).init_cache(self.config.num_pages)
        self.live: set[int] = set()

    def dispatch(self, requests: list[Request] = (), aborts: list[int] = (), forks=()) -> None:
        """`forks` are (to uid, from uid, length, token)."""
        inbox = make_inbox(self.config, requests, aborts, forks)
        self.live |= {r.uid for r in requests}
        for request in requests:
            self.outputs[request.uid], self.token_rounds[request.uid] = [], []
            self.scores[request.uid] = {}
        for uid in aborts:
            if uid in self.live:
                self.live.remove(uid)
                self.reasons[uid] = "abort"
        self.cache, self.state, emitted = compiled_step(self.config)(
            None, self.cache, self.state, inbox, jnp.int32(self.rounds)
        )
        self._collect_scores(*(np.asarray(x) for x in jax.tree.leaves(emitted.extra.prompt)))
        tokens = emitted.token_R, emitted.uid_R, emitted.reason_R
        self._collect(*(np.asarray(x) for x in tokens))
        check_invariants(self.config, self.state, self.live, may_hold=self.may_hold)
        self._check_cache()

    def _collect(self, token_QR, uid_QR, reason_QR) -> None:
        for q, r in np.argwhere(uid_QR >= 0):
            uid, token = int(uid_QR[q, r]), int(token_QR[q, r])
            assert uid not in self.reasons, "tokens after the end"
            if token >= 0:
                self.outputs[uid].append(token)
                self.token_rounds[uid].append(self.num_rounds + int(q))
            if reason_QR[q, r]:
                self.reasons[uid] = REASONS[reason_QR[q, r]]
                self.live.remove(uid)
        self.num_rounds = totals(self.state)["rounds"]

    def _collect_scores(self, uid_QT, position_QT, score_QT) -> None:
        for q, t in np.argwhere(uid_QT >= 0):
            uid, position = int(uid_QT[q, t]), int(position_QT[q, t])
            assert uid in self.live
            assert not self.outputs[uid], "scored after its first token"
            self.scores[uid][position] = int(score_QT[q, t])
            self.scored += 1

    def _check_cache(self) -> None:
        """Published pages hold in the cache what the index says they hold."""
        published = np.flatnonzero(np.asarray(self.state.pool.published_P))
        content = np.asarray(self.state.pool.content_PC)[published]
        np.testing.assert_array_equal(np.asarray(self.cache)[published], content)
        assert POISON not in content

    def run(self, requests: list[Request], max_dispatches: int = 2_000) -> None:
        """Send each request from its arrival on as slots allow, until all have ended."""
        waiting = sorted(requests, key=lambda r: r.uid)
        aborts = {r.uid: r.abort_at for r in requests if r.abort_at is not None}
        for time in range(max_dispatches):
            batch, used = [], 0
            while waiting and waiting[0].arrival <= time:
                size = len(waiting[0].prompt)
                fits = len(self.live) + len(batch) < self.config.num_slots
                if not fits or len(batch) == self.config.inbox_size:
                    break
                if used + size > self.config.inbox_tokens:
                    break
                used += size
                batch.append(waiting.pop(0))
            due = [uid for uid, at in aborts.items() if at <= time and uid in self.live]
            self.dispatch(batch, due[: self.config.inbox_size])
            if not waiting and not self.live:
                return
        raise AssertionError(f"not finished after {max_dispatches} dispatches: {self.live}")
