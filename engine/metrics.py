"""What the engine has done and how it stands: counts from the device, times from the host.

Times are seconds on the host, of the last `KEPT` finished requests and dispatches. TTFT: arrival
to first token; TPOT: time per output token after the first; end to end: arrival to last token;
queue: arrival to the start of the dispatch that first computed a token of it. Tokens are seen
when their dispatch is read, so all of these are exact to a dispatch. A dispatch lasts from when
it was sent, or from when the one before it was read if that is later, until it is read:
dispatches never overlap, and their sum is the time in which there was work.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from engine.outputs import RequestTimes
from engine.state import RUNNING, BatchState

KEPT = 10_000  # finished requests, and dispatches, whose times are remembered


@dataclass(frozen=True)
class Summary:
    count: int
    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Metrics:
    """Pages count without the trash page. `kv_waste` is the unused share of held positions.

    `prompt_tokens` and `output_tokens` are those of finished requests. `output_tok_per_s` counts
    all output tokens, over the time in which there was work.
    """

    running: int
    waiting: int
    pages_total: int
    pages_used: int
    pages_cached: int
    kv_utilization: float
    kv_waste: float
    prompt_tokens: int
    output_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    page_copies: int
    rounds: int
    finish_reasons: dict[str, int]
    queue_s: Summary | None
    ttft_s: Summary | None
    tpot_s: Summary | None
    end_to_end_s: Summary | None
    dispatch_s: Summary | None
    round_s: Summary | None
    output_tok_per_s: float
    compiled_programs: int
    compile_s: float

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the admitted requests' tokens that the prefix cache held."""
        return self.prefix_hit_tokens / max(self.prefix_query_tokens, 1)


@dataclass
class Finished:
    """Collects what is known once a choice ends."""

    reasons: Counter = field(default_factory=Counter)
    times: deque = field(default_factory=lambda: deque(maxlen=KEPT))
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, times: RequestTimes, prompt_tokens: int, output_tokens: int, reason: str) -> None:
        self.reasons[reason] += 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self.times.append((times, output_tokens))


@dataclass
class Steps:
    """Collects dispatches as they come back."""

    dispatch_s: deque = field(default_factory=lambda: deque(maxlen=KEPT))
    round_s: deque = field(default_factory=lambda: deque(maxlen=KEPT))
    output_tokens: int = 0
    busy_s: float = 0.0
    returned_s: float = float("-inf")

    def add(self, sent_s: float, returned_s: float, rounds: int, output_tokens: int) -> float:
        """When the dispatch started. One without a round of a live request is not counted."""
        start_s = max(sent_s, self.returned_s)
        self.returned_s = returned_s
        if rounds:
            self.dispatch_s.append(returned_s - start_s)
            self.round_s.append((returned_s - start_s) / rounds)
            self.output_tokens += output_tokens
            self.busy_s += returned_s - start_s
        return start_s


def summary(values: Iterable[float]) -> Summary | None:
    values = list(values)
    if not values:
        return None
    p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    return Summary(len(values), float(np.mean(values)), p50, p95, p99)


def collect(
    state: BatchState,
    counters: dict[str, int],
    finished: Finished,
    steps: Steps,
    *,
    queued: int,
    compiled_programs: int,
    compile_s: float,
) -> Metrics:
    pool, slots = state.pool, state.slots
    refcount_P, published_P = np.asarray(pool.refcount_P), np.asarray(pool.published_P)
    status_S = np.asarray(slots.status_S)
    page_size = pool.content_PC.shape[1]
    used = int((refcount_P > 0).sum())
    held = int(np.asarray(slots.num_pages_S).sum()) * page_size
    computed = int(np.asarray(slots.num_computed_S).sum())
    done = [(t, n) for t, n in finished.times if t.first_token_s is not None]
    return Metrics(
        running=int((status_S == RUNNING).sum()),
        waiting=queued + int(((status_S != RUNNING) & (status_S != 0)).sum()),
        pages_total=refcount_P.size - 1,
        pages_used=used,
        pages_cached=int(((refcount_P == 0) & published_P).sum()),
        kv_utilization=used / (refcount_P.size - 1),
        kv_waste=1 - computed / held if held else 0.0,
        prompt_tokens=finished.prompt_tokens,
        output_tokens=finished.output_tokens,
        prefix_query_tokens=counters["prefix_query_tokens"],
        prefix_hit_tokens=counters["prefix_hit_tokens"],
        preemptions=counters["preemptions"],
        page_copies=counters["page_copies"],
        rounds=counters["rounds"],
        finish_reasons=dict(finished.reasons),
        queue_s=summary(t.started_s - t.arrival_s for t, _ in done),
        ttft_s=summary(t.first_token_s - t.arrival_s for t, _ in done),
        tpot_s=summary((t.last_token_s - t.first_token_s) / (n - 1) for t, n in done if n > 1),
        end_to_end_s=summary(t.last_token_s - t.arrival_s for t, _ in done),
        dispatch_s=summary(steps.dispatch_s),
        round_s=summary(steps.round_s),
        output_tok_per_s=steps.output_tokens / steps.busy_s if steps.busy_s else 0.0,
        compiled_programs=compiled_programs,
        compile_s=compile_s,
    )
