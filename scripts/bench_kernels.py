"""Attention kernels on an attached accelerator: bandwidth and share of the bound, case by case.

The cases are the named ones of `pallas_kernels/paged_attention/cases.py` at serving sizes: decode
and verification of `--slots` sequences of `--context` keys, and a chunk of `--chunk` prompt tokens
whose last one sees as many; on GPUs those of `kernel_cases.GPU_SERVING` come first. Every
implementation that takes a case on the chip is timed, beside public kernels (`jax`, `cudnn`); plain
`xla` on a few of them.

The bound is the larger of moving every visible key and value, the queries and the outputs once at
the published bandwidth, and the visible part of both matmuls at the published rate; `share of copy`
compares with a plain copy measured in the same run. A case is one JSON line as soon as it is
measured, and the last line holds them all. No case begins that would end after `--seconds`, going
by the longest one so far; a line `not_run` names those.

    python scripts/bench_kernels.py --target gpu
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
from kernel_cases import ServingCase, bound_s, bytes_of, flops_of, serving_cases, spec_of
from kernel_runs import Run, cudnn_run, jax_gpu_run, jax_tpu_run, our_kernel, paged_run
from machine_facts import machine_facts
from tqdm import tqdm

from engine.bandwidth import measure_copy_bandwidth
from engine.cli import run
from engine.platform import attached_chip
from pallas_kernels.chips import Chip, chip
from pallas_kernels.paged_attention import (
    gpu_triton,
    ragged_paged_attention,
    refusals,
    tpu,
)
from pallas_kernels.paged_attention.layout import default_page_size

ROTATED = 10  # times the chip's fast memory
TURNS = (2, 16)  # page tables, at least and at most
TIMING_S = 0.03  # so long that what the host adds is nothing beside it
MOST_CALLS = 4096
NOT_TIMED = "reference"
SLOW = "xla"  # whose timing is one step, where kernels make more calls, and of these cases only
SLOW_CASES = ("gqa_64_8_b64_4k", "llama_3_1_8b_decode", "llama_3_1_8b_chunk")


@dataclass(frozen=True)
class Kind:
    """What is measured on one kind of accelerator.

    fast_memory_bytes   of a chip, for keys that stay between calls
    yardsticks          public kernels by name: a run, or None for cases that they do not take
    interpreted         an implementation without the chip, by name, and the chip it runs as
    """

    fast_memory_bytes: Callable[[Chip], int]
    yardsticks: dict[str, Callable[[ServingCase, int, int], Run | None]]
    interpreted: tuple[str, Callable[..., jax.Array], str]


KINDS = {
    "tpu": Kind(
        fast_memory_bytes=lambda each: each.vmem_bytes,
        yardsticks={"jax": jax_tpu_run},
        interpreted=("tpu", partial(tpu.attend, interpret=True), "v6e"),
    ),
    "gpu": Kind(
        fast_memory_bytes=lambda each: each.l2_bytes,
        yardsticks={"jax": jax_gpu_run, "cudnn": cudnn_run},
        interpreted=("gpu_triton", partial(gpu_triton.attend, interpret=True), "h100"),
    ),
}


def turns_of(case: ServingCase, kind: Kind, each: Chip) -> int:
    """Page tables over so many keys that none is in fast memory when its turn comes again."""
    enough = ROTATED * kind.fast_memory_bytes(each) // bytes_of(case) + 1
    return max(TURNS[0], min(TURNS[1], enough))


def runs_of(
    case: ServingCase,
    kind: Kind,
    each: Chip,
    turns: int,
    calls: int,
    reasons: dict[str, str | None] | None,
) -> Iterator[tuple[str, Callable[[], Run | None]]]:
    """Name and maker of every run of a case: ours, then the public kernels'.

    reasons   why an implementation does not take the case, or None; None: interpret one
    """
    if reasons is None:
        name, attend, _ = kind.interpreted
        yield name, lambda: paged_run(case, turns, calls, *our_kernel(case, each, attend))
        return
    for name, reason in reasons.items():
        left_out = name == NOT_TIMED or (name == SLOW and case.name not in SLOW_CASES)
        if reason is None and not left_out:
            attend = partial(ragged_paged_attention, impl=name)
            count = turns if name == SLOW else calls
            yield name, partial(paged_run, case, turns, count, *our_kernel(case, each, attend))
    for name, make in kind.yardsticks.items():
        yield name, partial(make, case, turns, calls)


def measure(measured: Run, repeats: int) -> list[float]:
    """Seconds per call of each repeat."""
    measured.loop().block_until_ready()
    times_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        measured.loop().block_until_ready()
        times_s.append((time.perf_counter() - start) / measured.calls)
    return times_s


def bench(case: ServingCase, kind: Kind, each: Chip, copy_bytes_per_s: float, args) -> dict:
    """The row of one case; a kernel that cannot be compiled or run is told among `failed`."""
    turns = 2 if args.interpret else turns_of(case, kind, each)
    reasons = None if args.interpret else refusals(spec_of(case, each, turns), each)
    bound = bound_s(case, each)
    wanted = args.calls or min(MOST_CALLS, math.ceil(TIMING_S / bound))
    calls = turns if args.interpret else max(turns, wanted)
    kernels, failed = {}, {}
    for name, make in runs_of(case, kind, each, turns, calls, reasons):
        try:
            made = make()
            times_s = measure(made, args.repeats) if made else None
        except Exception as error:  # whatever a compiler or a device raises is the answer
            failed[name] = f"{type(error).__name__}: {error}"[:500]
            continue
        if times_s is None:
            continue
        median_s, moved = statistics.median(times_s), bytes_of(case)
        kernels[name] = {
            "median_us": median_s * 1e6,
            "min_us": min(times_s) * 1e6,
            "gb_per_s": moved / median_s / 1e9,
            "share_of_bound": bound / median_s,
            "share_of_peak": moved / median_s / each.device_hbm_bytes_per_s,
            "share_of_copy": moved / median_s / copy_bytes_per_s,
        }
    return {
        "case": case.name,
        "slots": len(case.q_lens),
        "q_len": max(case.q_lens),
        "context": max(case.kv_lens),
        "page_size": case.page_size,
        "kv_dtype": case.kv_dtype,
        "page_tables": turns,
        "bytes": bytes_of(case),
        "flops": flops_of(case),
        "bound_us": bound * 1e6,
        "kernels": kernels,
        "failed": failed,
        "refused": {name: reason for name, reason in (reasons or {}).items() if reason},
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, choices=KINDS, help="kind of accelerator")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--slots", type=int, default=64, help="sequences of a named decode case")
    parser.add_argument("--context", type=int, default=4096, help="keys of a named case's sequence")
    parser.add_argument("--chunk", type=int, default=512, help="new tokens of a prefill case")
    parser.add_argument(
        "--page-size", type=int, help="of named cases; default: 64 on a TPU, else 16"
    )
    parser.add_argument("--calls", type=int, help="per timing; default: 30 ms of them at the bound")
    parser.add_argument("--repeats", type=int, default=9, help="timings per case")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="time for all cases; default: no limit"
    )
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="interpret one kernel on this machine: for tests, times mean nothing",
    )
    return parser.parse_args()


def resolve(args: argparse.Namespace) -> tuple[Kind, Chip]:
    """What runs where; ValueError without such an accelerator."""
    kind = KINDS[args.target]
    if args.interpret:
        return kind, chip(kind.interpreted[2])
    each = attached_chip()
    if each is None or each.kind != args.target:
        device = jax.devices()[0]
        raise ValueError(
            f"--target {args.target} needs a {args.target.upper()} of the chip table; attached is "
            f"{device.device_kind!r}"
        )
    return kind, each


def cases_for(args: argparse.Namespace, each: Chip) -> list[ServingCase]:
    for name in ("slots", "context", "chunk", "page_size", "calls", "repeats"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.context < max(args.chunk, 16):
        raise ValueError(
            f"--context {args.context} must hold the new tokens: at least {max(args.chunk, 16)}"
        )
    size = args.page_size or default_page_size(each)
    cases = serving_cases(each.kind, args.slots, args.context, args.chunk, size)
    found = [case for case in cases if args.only in case.name]
    if not found:
        raise ValueError(f"--only {args.only!r} matches none of {[c.name for c in cases]}")
    return found


def print_table(rows: list[dict]) -> None:
    print(f"{'case':30} {'kernel':11} bound us  median us  bound   peak   copy     GB/s")
    for row in rows:
        for name, figures in row["kernels"].items():
            shares = " ".join(
                f"{figures[f'share_of_{of}']:6.1%}" for of in ("bound", "peak", "copy")
            )
            print(
                f"{row['case']:30} {name:11} {row['bound_us']:8.1f} {figures['median_us']:10.1f} "
                f"{shares} {figures['gb_per_s']:8.1f}"
            )
        for name, reason in row["failed"].items():
            print(f"{row['case']:30} {name:11} failed: {reason[:100]}")


def main() -> None:
    start = time.perf_counter()
    args = parse_args()
    kind, each = resolve(args)
    cases = cases_for(args, each)
    copy_bytes_per_s = measure_copy_bandwidth(1 << 24 if args.interpret else 1 << 31)
    facts = {
        "benchmark": "kernels",
        "label": "interpreted" if args.interpret else "measured",
        "target": args.target,
        "chip": each.name,
        **machine_facts(),
        "peak_gb_per_s": each.device_hbm_bytes_per_s / 1e9,
        "copy_gb_per_s": copy_bytes_per_s / 1e9,
        "repeats": args.repeats,
    }
    print(json.dumps(facts), flush=True)
    rows, not_run, longest_s = [], [], 0.0
    for case in tqdm(cases, desc="cases", file=sys.stderr):
        begin = time.perf_counter()
        if begin - start + longest_s > args.seconds:
            not_run.append(case.name)
            continue
        rows.append(bench(case, kind, each, copy_bytes_per_s, args))
        print(json.dumps(rows[-1]), flush=True)
        longest_s = max(longest_s, time.perf_counter() - begin)
    if not_run:
        print(json.dumps({"not_run": not_run}))
    print_table(rows)
    print(json.dumps(facts | {"rows": rows, "not_run": not_run}))


if __name__ == "__main__":
    run(main)
