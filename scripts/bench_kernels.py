"""Attention kernels on an attached accelerator: bandwidth and share of the bound, case by case.

The cases are the named ones of `pallas_kernels/paged_attention/cases.py` at serving sizes: decode
and verification of `--slots` sequences of `--context` keys, and a chunk of `--chunk` prompt tokens
whose last one sees as many. The bound is the larger of moving every visible key and value, the
queries and the outputs once at the published bandwidth, and the visible part of both matmuls at
the published rate.

Calls follow each other inside one program and take turns among page tables over different pages,
together several times what the chip's fast memory holds, so that no call finds its keys there.

    python scripts/bench_kernels.py --target tpu
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as jax_paged_attention
from machine_facts import machine_facts
from tqdm import tqdm

from engine.cli import run
from engine.platform import attached_chip
from pallas_kernels.chips import Chip, chip
from pallas_kernels.paged_attention import ragged_paged_attention, tpu
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.layout import default_page_size, lanes_of, pages_shape

ROTATED = 4  # times the chip's fast memory
TURNS = (2, 64)  # page tables, at least and at most
YARDSTICK_KEYS = 512  # of a compute block


@dataclass(frozen=True)
class Kernel:
    """What is measured on one kind of accelerator.

    fast_memory_bytes   of a chip, for keys that stay between calls
    yardstick           a public kernel: pools of some pages and the call, or None for cases that it
                        does not take
    interpreted         the implementation without the chip, and the chip it is interpreted for
    """

    impl: str
    fast_memory_bytes: Callable[[Chip], int]
    yardstick: Callable[[Case], tuple[Callable, Callable] | None]
    interpreted: tuple[Callable[..., jax.Array], str]


@dataclass(frozen=True)
class Run:
    """One case on the device: `loop` makes `calls` calls of the kernel and returns the last
    queries, each call's being the last ones plus its output."""

    loop: Callable[[], jax.Array]
    calls: int


def keys_of(case: Case) -> int:
    """Keys that some query of a slot sees, summed over slots."""
    window = case.window or max(case.kv_lens)
    lengths = zip(case.q_lens, case.kv_lens, strict=True)
    return sum(min(kv_len, window + q_len - 1) for q_len, kv_len in lengths)


def bytes_of(case: Case) -> int:
    """Of one call: visible keys and values, queries and outputs."""
    kv = 2 * keys_of(case) * case.num_kv_heads * case.head_dim
    q_and_o = 2 * sum(case.q_lens) * case.num_heads * case.head_dim
    return (kv + q_and_o) * jnp.dtype(case.dtype).itemsize


def flops_of(case: Case) -> int:
    """Of one call: two matmuls over the pairs of a query and a key that it sees."""
    window = case.window or max(case.kv_lens)
    pairs = sum(
        min(position + 1, window)
        for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)
        for position in range(kv_len - q_len, kv_len)
    )
    return 4 * pairs * case.num_heads * case.head_dim


def bound_s(case: Case, each: Chip) -> float:
    rate = each.bf16_flops_per_s / each.devices
    return max(bytes_of(case) / each.device_hbm_bytes_per_s, flops_of(case) / rate)


def at_serving_size(case: Case, slots: int, context: int, chunk: int, page_size: int) -> Case:
    """The same heads, window, cap and sinks for as many slots, or for a chunk of one prompt."""
    most = max(case.q_lens)
    q_lens = (most,) * slots if most <= 16 else (chunk,)
    return replace(
        case,
        q_lens=q_lens,
        kv_lens=(context,) * len(q_lens),
        page_size=page_size,
        dtype="bfloat16",
    )


def make_run(
    case: Case, turns: int, calls: int, make_pools: Callable[[int], tuple], attend: Callable
) -> Run:
    """`attend(q_TNH, pools, page_table_SM, slots)`: `slots` are q_start_S, q_len_S, kv_len_S."""
    slots, rows = len(case.q_lens), sum(case.q_lens)
    columns = -(-max(case.kv_lens) // case.page_size)
    pages = np.random.default_rng(0).permutation(turns * slots * columns) + 1
    table_USM = jnp.asarray(pages.reshape(turns, slots, columns), jnp.int32)
    starts = np.cumsum((0, *case.q_lens[:-1]))
    slot_arrays = tuple(jnp.asarray(a, jnp.int32) for a in (starts, case.q_lens, case.kv_lens))
    q_TNH = jax.random.normal(jax.random.key(0), (rows, case.num_heads, case.head_dim), case.dtype)
    pools = make_pools(turns * slots * columns + 1)

    @jax.jit
    def loop(q_TNH, pools, table_USM, slot_arrays):
        def one(i, q_TNH):
            table_SM = jax.lax.dynamic_index_in_dim(table_USM, i % turns, keepdims=False)
            # The next call waits for this one.
            return q_TNH + attend(q_TNH, pools, table_SM, slot_arrays)

        return jax.lax.fori_loop(0, calls, one, q_TNH)

    return Run(partial(loop, q_TNH, pools, table_USM, slot_arrays), calls)


def our_kernel(case: Case, each: Chip, attend: Callable) -> tuple[Callable, Callable]:
    """Pools and the call, of `ragged_paged_attention` or of an implementation's `attend`."""
    sinks_N = jnp.ones(case.num_heads) if case.sinks else None

    def make_pools(pages: int) -> tuple[jax.Array]:
        heads = (case.num_kv_heads, case.head_dim)
        shape = pages_shape(pages, case.page_size, *heads, lanes_of(each))
        return (jax.random.normal(jax.random.key(1), shape, case.dtype),)

    def call(q_TNH, pools, table_SM, slot_arrays):
        return attend(
            q_TNH, *pools, table_SM, *slot_arrays,
            scale=case.scale, max_q_len=max(case.q_lens), window=case.window,
            softcap=case.softcap, sinks_N=sinks_N, chip=each,
        )  # fmt: skip

    return make_pools, call


def jax_tpu_kernel(case: Case) -> tuple[Callable, Callable] | None:
    """The kernel that comes with jax: one new token a slot, whole rows of 128 lanes, full
    attention."""
    if max(case.q_lens) > 1 or case.head_dim % 128 or case.window or case.softcap or case.sinks:
        return None
    pages_per_block = max(1, min(YARDSTICK_KEYS, max(case.kv_lens)) // case.page_size)

    def make_pools(pages: int) -> tuple[jax.Array, jax.Array]:
        shape = (case.num_kv_heads, pages, case.page_size, case.head_dim)
        keys = jax.random.split(jax.random.key(1))
        return tuple(jax.random.normal(key, shape, case.dtype) for key in keys)

    def call(q_TNH, pools, table_SM, slot_arrays):
        return jax_paged_attention(
            q_TNH * case.scale,
            *pools,
            slot_arrays[2],
            table_SM,
            pages_per_compute_block=pages_per_block,
        )

    return make_pools, call


KERNELS = {
    "tpu": Kernel(
        impl="tpu",
        fast_memory_bytes=lambda each: each.vmem_bytes,
        yardstick=jax_tpu_kernel,
        interpreted=(partial(tpu.attend, interpret=True), "v6e"),
    ),
}


def measure(measured: Run, repeats: int) -> list[float]:
    """Seconds per call of each repeat."""
    measured.loop().block_until_ready()
    times_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        measured.loop().block_until_ready()
        times_s.append((time.perf_counter() - start) / measured.calls)
    return times_s


def bench(case: Case, kernel: Kernel, each: Chip, attend: Callable, args) -> dict:
    """The row of one case."""
    enough = ROTATED * kernel.fast_memory_bytes(each) // bytes_of(case) + 1
    turns = 2 if args.interpret else max(TURNS[0], min(TURNS[1], enough))
    calls = turns if args.interpret else max(turns, args.calls)
    times_s = measure(make_run(case, turns, calls, *our_kernel(case, each, attend)), args.repeats)
    theirs = None if args.interpret else kernel.yardstick(case)
    their_times_s = measure(make_run(case, turns, calls, *theirs), args.repeats) if theirs else None
    median_s = statistics.median(times_s)
    return {
        "case": case.name,
        "slots": len(case.q_lens),
        "q_len": max(case.q_lens),
        "context": max(case.kv_lens),
        "page_size": case.page_size,
        "page_tables": turns,
        "bytes": bytes_of(case),
        "flops": flops_of(case),
        "bound_us": bound_s(case, each) * 1e6,
        "median_us": median_s * 1e6,
        "min_us": min(times_s) * 1e6,
        "gb_per_s": bytes_of(case) / median_s / 1e9,
        "share_of_bound": bound_s(case, each) / median_s,
        "share_of_bandwidth": bytes_of(case) / median_s / each.device_hbm_bytes_per_s,
        "yardstick_median_us": statistics.median(their_times_s) * 1e6 if their_times_s else None,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, choices=KERNELS, help="kind of accelerator")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--slots", type=int, default=64, help="sequences of a decode case")
    parser.add_argument("--context", type=int, default=4096, help="keys of a sequence")
    parser.add_argument("--chunk", type=int, default=512, help="new tokens of a prefill case")
    parser.add_argument("--page-size", type=int, help="default: 64 on a TPU, else 16")
    parser.add_argument("--calls", type=int, default=32, help="per timing, at least")
    parser.add_argument("--repeats", type=int, default=9, help="timings per case")
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="interpret the kernel on this machine: for tests, times mean nothing",
    )
    return parser.parse_args()


def resolve(args: argparse.Namespace) -> tuple[Kernel, Chip, Callable]:
    """What runs where; ValueError without such an accelerator."""
    kernel = KERNELS[args.target]
    if args.interpret:
        attend, name = kernel.interpreted
        return kernel, chip(name), attend
    each = attached_chip()
    if each is None or each.kind != args.target:
        device = jax.devices()[0]
        raise ValueError(
            f"--target {args.target} needs a {args.target.upper()} of the chip table; attached is "
            f"{device.device_kind!r}"
        )
    return kernel, each, partial(ragged_paged_attention, impl=kernel.impl)


def cases_for(args: argparse.Namespace, each: Chip) -> list[Case]:
    for name in ("slots", "context", "chunk", "calls", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.page_size is not None and args.page_size < 1:
        raise ValueError(f"--page-size must be at least 1, got {args.page_size}")
    if args.context < max(args.chunk, 16):
        raise ValueError(
            f"--context {args.context} must hold the new tokens: at least {max(args.chunk, 16)}"
        )
    found = [case for case in CASES if args.only in case.name]
    if not found:
        raise ValueError(f"--only {args.only!r} matches none of {[c.name for c in CASES]}")
    size = args.page_size or default_page_size(each)
    return [at_serving_size(c, args.slots, args.context, args.chunk, size) for c in found]


def main() -> None:
    args = parse_args()
    kernel, each, attend = resolve(args)
    cases = cases_for(args, each)
    rows = [
        bench(case, kernel, each, attend, args)
        for case in tqdm(cases, desc="cases", file=sys.stderr)
    ]
    print("case                            bound us  median us  share     GB/s  yardstick us")
    for row in rows:
        theirs = row["yardstick_median_us"]
        print(
            f"{row['case']:30} {row['bound_us']:9.1f} {row['median_us']:10.1f} "
            f"{row['share_of_bound']:6.0%} {row['gb_per_s']:8.1f} "
            f"{f'{theirs:.1f}' if theirs else '-':>13}"
        )
    result = {
        "benchmark": "kernels",
        "label": "interpreted" if args.interpret else "measured",
        "target": args.target,
        "chip": each.name,
        **machine_facts(),
        "peak_gb_per_s": each.device_hbm_bytes_per_s / 1e9,
        "repeats": args.repeats,
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
