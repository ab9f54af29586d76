"""Ragged paged attention of a whole model: append the new tokens, then attend, layer after layer.

Every layer has a page pool of its own and its queries depend on the layer before, as in a model.
The bound is the larger of reading each used key and value once at the machine's measured read
bandwidth and the visible part of the two matmuls at its measured float32 rate. Workloads are timed
in turn, so that noise meets all of them alike.

    python scripts/bench_attention.py --heads 9 --kv-heads 3 --head-dim 64 --layers 30
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from engine.bandwidth import measure_read_bandwidth
from engine.cli import run
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.paged_attention.layout import pages_shape, write_pages

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Workload:
    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def keys_read(self) -> int:
        return sum(self.kv_lens)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        pairs = zip(self.q_lens, self.kv_lens, strict=True)
        return sum(q * kv - q * (q - 1) // 2 for q, kv in pairs)


WORKLOADS = (
    Workload("decode 1 x 72", (1,), (72,)),
    Workload("decode 8 x 72", (1,) * 8, (72,) * 8),
    Workload("decode 32 x 72", (1,) * 32, (72,) * 32),
    Workload("decode 32 x 256", (1,) * 32, (256,) * 32),
    Workload("decode 32 x 16..512", (1,) * 32, tuple(range(16, 513, 16))),
    Workload("verify 8 x 5 at 256", (5,) * 8, (256,) * 8),
    Workload("prefill 700", (700,), (700,)),
    Workload("prefill 64 at 4096", (64,), (4096,)),
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--window", type=int)
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, help="also write the JSON object to this file")
    return parser.parse_args()


def make_step(args: argparse.Namespace, workload: Workload, dtype: str):
    """A function of no argument that runs all layers once and waits for them."""
    rng = np.random.default_rng(0)
    slots, rows = len(workload.q_lens), sum(workload.q_lens)
    columns = -(-max(workload.kv_lens) // args.page_size)
    table_SM = 1 + rng.permutation(slots * columns).reshape(slots, columns)
    shape = pages_shape(slots * columns + 1, args.page_size, args.kv_heads, args.head_dim)
    q_start_S = np.cumsum((0, *workload.q_lens[:-1]))
    slot_T = np.repeat(np.arange(slots), workload.q_lens)
    first_S = np.subtract(workload.kv_lens, workload.q_lens)
    x_T = np.arange(rows) - q_start_S[slot_T] + first_S[slot_T]
    table_SM, q_start_S, q_len_S, kv_len_S, page_T, offset_T = (
        jnp.asarray(a, jnp.int32)
        for a in (
            table_SM,
            q_start_S,
            workload.q_lens,
            workload.kv_lens,
            table_SM[slot_T, x_T // args.page_size],
            x_T % args.page_size,
        )
    )
    attend = partial(
        ragged_paged_attention,
        scale=args.head_dim**-0.5,
        max_q_len=max(workload.q_lens),
        window=args.window,
        impl=args.impl,
    )

    @partial(jax.jit, donate_argnums=0)
    def layers(pools, q_TNH, k_TKH):
        written = []
        for pool in pools:
            pool = write_pages(pool, k_TKH, k_TKH, page_T, offset_T)
            o_TNH = attend(q_TNH, pool, table_SM, q_start_S, q_len_S, kv_len_S)
            q_TNH = q_TNH + o_TNH
            written.append(pool)
        return written, q_TNH

    def normal(shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    held = [[normal(shape) for _ in range(args.layers)]]
    q_TNH = normal((rows, args.heads, args.head_dim))
    k_TKH = normal((rows, args.kv_heads, args.head_dim))

    def once() -> None:
        held[0], o_TNH = layers(held[0], q_TNH, k_TKH)
        o_TNH.block_until_ready()

    return once


def measure_matmul_rate() -> float:
    """float32 FLOP/s of a 1024 x 1024 x 1024 product, the fastest of 7."""
    a = jnp.ones((1024, 1024))
    product = jax.jit(lambda a: a @ a)
    times_s = []
    for _ in range(8):
        start = time.perf_counter()
        product(a).block_until_ready()
        times_s.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(times_s)


def main() -> None:
    args = parse_args()
    workloads = [w for w in WORKLOADS if args.only in w.name]
    if not workloads:
        raise ValueError(f"--only {args.only!r} matches none of {[w.name for w in WORKLOADS]}")
    bandwidth = measure_read_bandwidth(jnp.dtype("float32"), rows=1)
    matmul_rate = measure_matmul_rate()
    steps = {(w, dtype): make_step(args, w, dtype) for w in workloads for dtype in args.dtypes}
    times: dict[tuple, list[float]] = {key: [] for key in steps}
    for repeat in tqdm(range(args.repeats + 1), desc="rounds", file=sys.stderr):
        for key, once in steps.items():  # the first round compiles
            once()
            start = time.perf_counter()
            once()
            if repeat:
                times[key].append(time.perf_counter() - start)

    print(f"read {bandwidth / 1e9:.1f} GB/s, float32 matmul {matmul_rate / 1e9:.0f} GFLOP/s")
    print("workload             dtype      bound ms  median ms   share    min ms   GB/s  GFLOP/s")
    rows = []
    for (workload, dtype), samples in times.items():
        width = args.layers * args.head_dim
        read_bytes = workload.keys_read * 2 * width * args.kv_heads * jnp.dtype(dtype).itemsize
        flops = workload.pairs * 4 * width * args.heads
        bound_s = max(read_bytes / bandwidth, flops / matmul_rate)
        median_s = statistics.median(samples)
        rows.append(
            {
                "workload": workload.name,
                "dtype": dtype,
                "bound_ms": round(bound_s * 1e3, 3),
                "median_ms": round(median_s * 1e3, 3),
                "min_ms": round(min(samples) * 1e3, 3),
                "gb_per_s": round(read_bytes / median_s / 1e9, 2),
                "gflop_per_s": round(flops / median_s / 1e9, 2),
            }
        )
        print(
            f"{workload.name:20} {dtype:9} {bound_s * 1e3:9.2f} {median_s * 1e3:10.2f} "
            f"{bound_s / median_s:7.0%} {min(samples) * 1e3:9.2f} "
            f"{read_bytes / median_s / 1e9:6.1f} {flops / median_s / 1e9:8.1f}"
        )
    result = {
        "benchmark": "attention",
        "label": "measured",
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "heads": [args.heads, args.kv_heads, args.head_dim],
        "layers": args.layers,
        "page_size": args.page_size,
        "window": args.window,
        "impl": args.impl,
        "repeats": args.repeats,
        "read_bandwidth_gb_per_s": round(bandwidth / 1e9, 2),
        "matmul_gflop_per_s": round(matmul_rate / 1e9, 1),
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
