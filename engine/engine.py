"""The engine on the host: requests go in, tokens come out, everything between is `advance`.

Each `step` sends all arrivals and aborts since the last one as a single inbox and, with `overlap`,
dispatches before it reads the previous dispatch's tokens, so the device never waits for the host.
The host keeps no schedule: it only knows which requests are out and that there are slots for them.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from engine.bounds import check_request
from engine.checks import check_integer, check_kind
from engine.commit import Emission
from engine.config import EngineConfig
from engine.dispatch import (
    Choice,
    Dispatch,
    Fork,
    Recorder,
    Sent,
    Snapshot,
    Update,
    make_inbox,
    new_choices,
)
from engine.identity import identity
from engine.interrupts import interrupts_held_back
from engine.metrics import Finished, Metrics, Steps, collect
from engine.news import ends, read_news, tell, tell_prompt_scores
from engine.outbox import Outbox
from engine.programs import Programs
from engine.prompts import token_ids
from engine.sampling_params import SamplingParams
from engine.sampling_rows import SamplingLimits, drawn_seed, empty_rows, stop_ids_of
from engine.state import UID_SPAN, BatchState, init_state, totals
from engine.step import StepModel


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
        self._programs = Programs(config, limits, model, compiler_options, clock)
        self.clock, self.seed = clock, seed
        self._finished, self._steps = Finished(), Steps()
        self._next_uid = 0
        self._outbox = Outbox(config)
        self._requests: dict[str, list[Choice]] = {}
        self._in_flight: deque[Sent] = deque()
        self.recorder = recorder
        if recorder is not None:
            recorder.begins(self.identity())

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
        check_kind("request_id", request_id, str, "a string")
        check_kind("params", params, SamplingParams, "SamplingParams")
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use; give each request its own")
        prompt_ids = token_ids(prompt_ids)
        max_len = self.check(
            prompt_ids, params, priority=priority, salt=salt, bad_word_ids=bad_word_ids
        )
        stop_ids = stop_ids_of(
            params, self.eos_token_ids, self.limits.vocab_size, self.config.max_stop_ids
        )
        seed = drawn_seed(self.seed, self._next_uid) if params.seed is None else params.seed
        uids = [(self._next_uid + index) % UID_SPAN for index in range(params.n)]
        self._next_uid += params.n
        choices = new_choices(
            *(params, uids, seed, bad_word_ids),
            request_id=request_id,
            prompt_ids=prompt_ids,
            stop_ids=stop_ids,
            priority=priority,
            salt=salt,
            max_len=max_len,
            arrival_s=self.clock(),
        )
        self._requests[request_id] = choices
        self._outbox.add(choices)
        return choices

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
            self._outbox.withdraw(choice)
            self._close(choice, reason)

    def fork(self, forks: Sequence[Fork]) -> None:
        """Let choices go on from one another's histories at the next dispatch.

        Only between steps in lockstep: no dispatch may be on its way.
        """
        self._outbox.forks += forks

    def has_slot(self, choice: Choice) -> bool:
        """Whether the choice was sent and has not ended."""
        return choice.uid in self._outbox.out

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
            queued=len(self._outbox.queue),
            compiled_programs=len(self._programs.compiled),
            compile_s=self.compile_s,
        )

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, **asked: Any) -> int:
        """Tokens a request may reach; ValueError if it can never run. See `check_request`."""
        return check_request(self.config, self.limits, prompt_ids, params, **asked)

    def step(self, *, lockstep: bool = False) -> list[Update]:
        """Dispatch once and return the news of the oldest dispatch that is due.

        In lockstep a dispatch is one round, and nothing is left on its way.
        """
        if self._outbox:
            self._dispatch(1 if lockstep else self.rounds)
        if lockstep:
            news = []
            while self._in_flight:
                news += self._collect_oldest()
            return news
        due = len(self._in_flight) > (1 if self.overlap and self._outbox.out else 0)
        return self._collect_oldest() if due else []

    def compile(self) -> None:
        """Compile every program now; without it each is compiled when it is first needed."""
        for budget in self.config.program_budgets:
            self._program(budget)

    @property
    def compile_s(self) -> float:
        """Time spent compiling so far."""
        return self._programs.compile_s

    def _program(self, budget: int) -> jax.stages.Compiled:
        return self._programs.get(budget, self._params, self._cache, self._state)

    def _dispatch(self, rounds: int) -> None:
        waiting = self._outbox.unanswered_tokens
        rounds = 1 if waiting else rounds  # a first token is shown as soon as it is there
        budget = self._programs.budget_for(waiting)
        self._program(budget)  # compiling may be interrupted, what follows may not
        with interrupts_held_back():
            dispatch = self._outbox.take(rounds, budget)
            sent_s = self.clock()
            emitted = self.send(dispatch)
            self._in_flight.append(Sent(sent_s, budget, emitted))
        if not self._outbox.awaits_prompt_scores:
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

    def _collect_oldest(self) -> list[Update]:
        jax.block_until_ready(self._in_flight[0].emitted)  # waiting may be interrupted
        with interrupts_held_back():
            return self._collect(self._in_flight.popleft())

    def _collect(self, sent: Sent) -> list[Update]:
        emitted, out = sent.emitted, self._outbox.out
        if self._outbox.awaits_prompt_scores:
            tell_prompt_scores(emitted.extra.prompt, out)
        news, now_s = read_news(emitted, out), self.clock()
        start_s = self._steps.add(sent.sent_s, now_s, news.num_rounds, news.num_tokens)
        updates = tell(news, out, start_s, now_s)
        for choice, reason in ends(news, out):
            del out[choice.uid]
            self._close(choice, reason)
        if self.recorder is not None:  # last: a full disk costs the record, not the tokens
            self.recorder.returned(emitted)
        return updates

    def _close(self, choice: Choice, reason: str) -> None:
        """Count a choice that ends; forget its request with the last one."""
        choice.finish_reason = reason
        self._finished.add(choice.times, len(choice.prompt_ids), len(choice.token_ids), reason)
        if all(c.finish_reason for c in self._requests[choice.request_id]):
            del self._requests[choice.request_id]

    def identity(self) -> dict[str, Any]:
        """What must be equal for a snapshot or a record to mean the same."""
        return identity(self.config, self.limits, self.model, self._params)

    def empty_state(self) -> BatchState:
        rows = empty_rows(self.config.num_slots, self.limits)
        return init_state(self.config, jax.tree.map(jnp.asarray, rows))

    def emission_like(self, budget: int) -> Emission:
        """Shapes of what a dispatch of this budget brings."""
        return self._programs.emission_like(budget, self._params, self._cache, self._state)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            cache=self._cache,
            state=self._state,
            in_flight=list(self._in_flight),
            requests=dict(self._requests),
            queue=[choice.uid for choice in self._outbox.queue],
            out=list(self._outbox.out),
            aborts=list(self._outbox.aborts),
            next_uid=self._next_uid,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot of an engine of the same identity."""
        choices = {c.uid: c for request in snapshot.requests.values() for c in request}
        self._cache, self._state = snapshot.cache, snapshot.state
        self._in_flight = deque(snapshot.in_flight)
        self._requests = dict(snapshot.requests)
        self._outbox = Outbox(self.config)  # without the forks of a search that was left
        self._outbox.queue.extend(choices[uid] for uid in snapshot.queue)
        self._outbox.out.update((uid, choices[uid]) for uid in snapshot.out)
        self._outbox.aborts.extend(snapshot.aborts)
        self._next_uid = snapshot.next_uid
