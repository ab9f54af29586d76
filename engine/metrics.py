"""What the engine has done and how it stands: counts from the device, times from the host.

Times are those of finished requests, seconds. TTFT: arrival to first token; TPOT: time per output
token after the first; end to end: arrival to last token.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from engine.outputs import RequestTimes
from engine.state import RUNNING, BatchState

KEPT = 10_000  # finished requests whose times are remembered


@dataclass(frozen=True)
class Summary:
    count: int
    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Metrics:
    """Pages count without the trash page. `kv_waste` is the unused share of held positions."""

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
    ttft_s: Summary | None
    tpot_s: Summary | None
    end_to_end_s: Summary | None
    compiled_programs: int
    compile_s: float


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
    computed = int(np.asarray(slots.num_computed_S)[status_S == RUNNING].sum())
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
        ttft_s=summary(t.first_token_s - t.arrival_s for t, _ in done),
        tpot_s=summary((t.last_token_s - t.first_token_s) / (n - 1) for t, n in done if n > 1),
        end_to_end_s=summary(t.last_token_s - t.arrival_s for t, _ in done),
        compiled_programs=compiled_programs,
        compile_s=compile_s,
    )
