"""The engine on the host: requests go in, tokens come out, everything between is `advance`.

Each `step` sends all arrivals and aborts since the last one as a single inbox and, with `overlap`,
dispatches before it reads the previous dispatch's tokens, so the device never waits for the host.
The host keeps no schedule: it only knows which requests are out and that there are slots for them.
Programs differ in their token budget alone: a shorter one when few prompt tokens wait, the full one
else. Each can go on from any state, so no request mix ever needs another.
"""

import secrets
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.bounds import check_request
from engine.commit import Emission
from engine.config import EngineConfig
from engine.dispatch import Choice, Dispatch, Fork, Recorder, Sent, Snapshot, Update, make_inbox
from engine.identity import identity
from engine.interrupts import interrupts_held_back
from engine.metrics import Finished, Metrics, Steps, collect
from engine.prompts import token_ids
from engine.sampling_params import SamplingParams, check_integer
from engine.sampling_rows import RowFacts, SamplingLimits, empty_rows, fill_row, stop_ids_of
from engine.state import NO_UID, REASONS, UID_SPAN, BatchState, init_state, totals
from engine.step import PromptScores, StepModel, advance


class Engine:
    """Add requests, call `step` until `has_unfinished` is false. Not thread-safe.

    With a `seed`, requests without one of their own draw the same tokens in every run that sends
    the same requests in the same order.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: StepModel,
        params,
        cache,
        limits: SamplingLimits,
        *,
        eos_token_ids: Sequence[int] = (),
        rounds: int = 4,
        overlap: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        compiler_options: Mapping[str, str] | None = None,
        recorder: Recorder | None = None,
        seed: int | None = None,
    ):
        check_integer("rounds", rounds, 1, config.max_rounds, "max_rounds is the engine's most")
        self.config, self.limits, self.rounds, self.overlap = config, limits, rounds, overlap
        self.eos_token_ids = tuple(eos_token_ids)
        self.model, self._params, self._cache = model, params, cache
        self._state = self.empty_state()
        self._programs: dict[int, jax.stages.Compiled] = {}
        self._compiler_options = dict(compiler_options or {})
        self.compile_s = 0.0
        self.clock, self.seed = clock, seed
        self._finished, self._steps = Finished(), Steps()
        self._next_uid = 0
        self._queue: deque[Choice] = deque()
        self._out: dict[int, Choice] = {}
        self._requests: dict[str, list[Choice]] = {}
        self._aborts: list[int] = []
        self._forks: list[Fork] = []
        self._in_flight: deque[Sent] = deque()
        self.recorder = recorder
        if recorder is not None:
            recorder.begins(self.identity())

    # ---- requests ------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: int = 0,
        bad_word_ids: Sequence[Sequence[int]] = (),
    ) -> list[Choice]:
        """Queue a request of `params.n` choices. ValueError if it can never run.

        `bad_word_ids` spell `params.bad_words`; only requests of equal `salt` share pages.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r}")
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use; give each request its own")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {params!r}")
        prompt_ids = token_ids(prompt_ids)
        max_len = self.check(prompt_ids, params, priority=priority, salt=salt)
        stop_ids = stop_ids_of(
            params, self.eos_token_ids, self.limits.vocab_size, self.config.max_stop_ids
        )
        seed = params.seed if params.seed is not None else self._drawn_seed()
        choices, parent = [], NO_UID
        for index in range(params.n):
            choices.append(
                Choice(
                    request_id=request_id,
                    index=index,
                    uid=self._next_uid % UID_SPAN,
                    prompt_ids=prompt_ids,
                    params=params,
                    facts=RowFacts(seed=seed, choice=index, bad_word_ids=bad_word_ids),
                    stop_ids=stop_ids,
                    priority=priority,
                    salt=salt,
                    max_len=max_len,
                    parent_uid=parent,
                    arrival_s=self.clock(),
                )
            )
            self._next_uid += 1
            parent = choices[0].uid
        if params.prompt_logprobs is not None:  # asked once, whatever n
            choices[0].prompt_scores = [None] * len(prompt_ids)
        # Filled here so that a setting that cannot be carried out is refused before it is queued.
        fill_row(empty_rows(1, self.limits), 0, params, choices[0].facts, self.limits)
        self._requests[request_id] = choices
        for choice in choices:
            insort(self._queue, choice, key=lambda c: c.priority)  # after equal ones
        return choices

    def _drawn_seed(self) -> int:
        """For a request that brings none: of the engine's seed and of how many came before."""
        if self.seed is None:
            return secrets.randbits(32)
        return int(np.random.SeedSequence([self.seed, self._next_uid]).generate_state(1)[0])

    def abort(self, request_id: str) -> list[Choice]:
        """End a request now, in whatever state it is; ValueError if it is not unfinished."""
        if request_id not in self._requests:
            raise ValueError(f"no unfinished request has the id {request_id!r}")
        choices = self._requests[request_id]
        for choice in choices:
            if choice.finish_reason is None:
                self.end(choice, "abort")
        return choices

    def end(self, choice: Choice, reason: str) -> None:
        """End one unfinished choice from outside: an abort, or a stop string in its text."""
        with interrupts_held_back():
            if self._out.pop(choice.uid, None) is None:
                self._queue.remove(choice)
            else:
                self._aborts.append(choice.uid)
            self._close(choice, reason)

    def fork(self, forks: Sequence[Fork]) -> None:
        """Let choices go on from one another's histories at the next dispatch.

        Only between steps in lockstep: no dispatch may be on its way.
        """
        self._forks += forks

    def has_slot(self, choice: Choice) -> bool:
        """Whether the choice was sent and has not ended."""
        return choice.uid in self._out

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def counters(self) -> dict[str, int]:
        """Totals kept on the device (waits for what is in flight)."""
        return totals(self._state)

    def metrics(self) -> Metrics:
        """Waits for what is in flight."""
        return collect(
            self._state,
            self.counters(),
            self._finished,
            self._steps,
            queued=len(self._queue),
            compiled_programs=len(self._programs),
            compile_s=self.compile_s,
        )

    def check(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, priority: int = 0, salt: int = 0
    ) -> int:
        """Tokens a request may reach; ValueError if it can never run."""
        return check_request(
            self.config, self.limits, prompt_ids, params, priority=priority, salt=salt
        )

    # ---- dispatch ------------------------------------------------------------------------------

    def step(self, *, lockstep: bool = False) -> list[Update]:
        """Dispatch once and return the news of the oldest dispatch that is due.

        In lockstep a dispatch is one round, and nothing is left on its way.
        """
        if self._queue or self._out or self._aborts:
            self._dispatch(1 if lockstep else self.rounds)
        if lockstep:
            news = []
            while self._in_flight:
                news += self._collect_oldest()
            return news
        due = len(self._in_flight) > (1 if self.overlap and self._out else 0)
        return self._collect_oldest() if due else []

    def compile(self) -> None:
        """Compile every program now; without it each is compiled when it is first needed."""
        for budget in self.config.program_budgets:
            self._program(budget)

    def _step(self, budget: int) -> Callable:
        return partial(advance, replace(self.config, token_budget=budget), self.model)

    def _arguments(self, budget: int) -> tuple:
        nothing = Dispatch([], [], rounds=1, budget=budget)
        inbox = make_inbox(self.config, self.limits, nothing)
        return self._params, self._cache, self._state, inbox, jnp.int32(1)

    def _program(self, budget: int) -> jax.stages.Compiled:
        if budget not in self._programs:
            start = self.clock()
            step = jax.jit(
                self._step(budget),
                donate_argnums=(1, 2),
                compiler_options=self._compiler_options,
            )
            lowered = step.lower(*self._arguments(budget))
            self._programs[budget] = lowered.compile()
            self.compile_s += self.clock() - start
        return self._programs[budget]

    def _dispatch(self, rounds: int) -> None:
        unanswered = (c for c in (*self._out.values(), *self._queue) if not c.token_ids)
        waiting = sum(len(c.prompt_ids) for c in unanswered)
        rounds = 1 if waiting else rounds  # a first token is shown as soon as it is there
        budgets = self.config.program_budgets
        budget = next((b for b in budgets if b >= waiting), budgets[-1])
        if not waiting:  # any program decodes; none is compiled for that
            budget = min(self._programs, default=budget)
        self._program(budget)  # compiling may be interrupted, what follows may not
        with interrupts_held_back():
            aborts = self._aborts[: self.config.inbox_size]
            dispatch = Dispatch(self._arrivals(), aborts, rounds, budget, self._forks)
            self._aborts, self._forks = self._aborts[self.config.inbox_size :], []
            sent_s = self.clock()
            emitted = self.send(dispatch)
            self._in_flight.append(Sent(sent_s, budget, emitted))
        if not self._prompts_asked():
            emitted = emitted.replace(extra=emitted.extra.replace(prompt=None))
        for array in jax.tree.leaves(emitted):
            array.copy_to_host_async()

    def send(self, dispatch: Dispatch) -> Emission:
        """Run one dispatch, decided elsewhere; what it brings is not read here.

        `step` decides and reads; a replay calls this alone.
        """
        inbox = make_inbox(self.config, self.limits, dispatch)
        program = self._program(dispatch.budget)
        # The donated state is gone once the program is called: between the call and the assignment
        # an interrupt would leave the engine without one.
        with interrupts_held_back():
            self._cache, self._state, emitted = program(
                self._params, self._cache, self._state, inbox, jnp.int32(dispatch.rounds)
            )
        if self.recorder is not None:
            self.recorder.sent(dispatch)
        return emitted

    def _arrivals(self) -> list[Choice]:
        """The head of the queue, as much as slots and one inbox hold."""
        config, chosen, tokens = self.config, [], 0
        # Aborted requests hold no slots: if more are out than one inbox takes, those in it free as
        # many slots as can arrive.
        while self._queue and len(chosen) < config.inbox_size:
            choice = self._queue[0]
            tokens += len(choice.prompt_ids)
            full = len(self._out) == config.num_slots
            if full or tokens > config.inbox_tokens:
                break
            self._queue.popleft()
            self._out[choice.uid] = choice
            chosen.append(choice)
        return chosen

    def _collect_oldest(self) -> list[Update]:
        jax.block_until_ready(self._in_flight[0].emitted)  # waiting may be interrupted
        with interrupts_held_back():
            return self._collect(self._in_flight.popleft())

    def _collect(self, sent: Sent) -> list[Update]:
        emitted = sent.emitted
        token_QR, uid_QR, reason_QR = map(
            np.asarray, (emitted.token_R, emitted.uid_R, emitted.reason_R)
        )
        sampled = jax.tree.map(np.asarray, emitted.extra.sampled)
        if self._prompts_asked():
            self._collect_prompts(emitted.extra.prompt)
        now_s = self.clock()
        live_QR = np.isin(uid_QR, list(self._out))  # others were aborted during the dispatch
        rounds, tokens = live_QR.any(axis=1).sum(), (live_QR & (token_QR >= 0)).sum()
        start_s = self._steps.add(sent.sent_s, now_s, int(rounds), int(tokens))
        news: dict[int, Update] = {}
        for q, r in np.argwhere(live_QR):
            choice = self._out[int(uid_QR[q, r])]
            if choice.started_s is None:
                choice.started_s = start_s
            if token_QR[q, r] >= 0:
                choice.token_ids.append(int(token_QR[q, r]))
                choice.extras.append(jax.tree.map(lambda x: x[q, r], sampled))  # noqa: B023
                if choice.first_token_s is None:
                    choice.first_token_s = now_s
                choice.last_token_s = now_s
                before = news.get(choice.uid, Update(choice, 0))
                news[choice.uid] = Update(choice, before.num_new + 1)
            if reason_QR[q, r]:
                news.setdefault(choice.uid, Update(choice, 0))
                del self._out[choice.uid]
                self._close(choice, REASONS[reason_QR[q, r]])
        if self.recorder is not None:  # last: a full disk costs the record, not the tokens
            self.recorder.returned(emitted)
        return list(news.values())

    def _prompts_asked(self) -> bool:
        """Whether scores of prompts may be on their way; nobody reads them otherwise."""
        return any(c.prompt_scores and not c.token_ids for c in self._out.values())

    def _collect_prompts(self, prompt: PromptScores) -> None:
        prompt = jax.tree.map(np.asarray, prompt)
        for q, t in np.argwhere(prompt.uid_T != NO_UID):
            choice = self._out.get(int(prompt.uid_T[q, t]))
            if choice is not None:
                score = jax.tree.map(lambda x: x[q, t], prompt.scores_T)  # noqa: B023
                choice.prompt_scores[prompt.position_T[q, t]] = score

    def _close(self, choice: Choice, reason: str) -> None:
        choice.finish_reason = reason
        self._finished.add(
            choice.times, len(choice.prompt_ids), len(choice.token_ids), choice.finish_reason
        )
        if all(c.finish_reason for c in self._requests[choice.request_id]):
            del self._requests[choice.request_id]

    # ---- the whole of it -----------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What must be equal for a snapshot or a record to mean the same."""
        return identity(self.config, self.limits, self.model, self._params)

    def empty_state(self) -> BatchState:
        rows = empty_rows(self.config.num_slots, self.limits)
        return init_state(self.config, jax.tree.map(jnp.asarray, rows))

    def emission_like(self, budget: int) -> Emission:
        """Shapes of what a dispatch of this budget brings."""
        return jax.eval_shape(self._step(budget), *self._arguments(budget))[2]

    def snapshot(self) -> Snapshot:
        return Snapshot(
            cache=self._cache,
            state=self._state,
            in_flight=list(self._in_flight),
            requests=dict(self._requests),
            queue=[choice.uid for choice in self._queue],
            out=list(self._out),
            aborts=list(self._aborts),
            next_uid=self._next_uid,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot of an engine of the same identity."""
        choices = {c.uid: c for request in snapshot.requests.values() for c in request}
        self._cache, self._state = snapshot.cache, snapshot.state
        self._in_flight = deque(snapshot.in_flight)
        self._requests = dict(snapshot.requests)
        self._queue = deque(choices[uid] for uid in snapshot.queue)
        self._out = {uid: choices[uid] for uid in snapshot.out}
        self._aborts, self._next_uid = list(snapshot.aborts), snapshot.next_uid
        self._forks = []  # of a search that was left
