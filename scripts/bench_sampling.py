"""What sampling costs, next to the decode step it follows and to reading the logits once.

Each repetition times every case in turn, so that noise meets all of them alike; medians are
reported. The step is the forward pass and the unembedding of a real architecture with random
weights, one token for each row at `--context` tokens of history.

    python scripts/bench_sampling.py --case smollm2-135m:32 --case gemma-3-270m:8
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from engine.bandwidth import measure_read_bandwidth
from engine.cli import run
from engine.platform import min_matmul_rows, resolve_dtype
from engine.sampling import sample
from engine.sampling_params import SamplingParams
from engine.sampling_rows import RowFacts, SamplingLimits, empty_rows, fill_row
from engine.state import empty_requests
from engine.step import RowView
from models.batch import ragged_batch
from models.kv_cache import init_cache
from models.model import cache_specs, declare, forward, unembed
from models.params import init
from models.presets import preset

PAGE_SIZE = 16
HISTORY_ROOM = 1024
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
EDITS = {"logit_bias": {5: 1.0}, "min_tokens": 1000, "max_tokens": None}

# Name: settings, and in how many of 8 rows the likeliest 64 tokens hold too little mass for top-p.
REQUESTS: dict[str, tuple[dict, int]] = {
    "greedy": ({"temperature": 0.0}, 0),
    "temperature": ({}, 0),
    "min_p": ({"min_p": 0.05}, 0),
    "top_k 40": ({"top_k": 40}, 0),
    "top_p 0.9": ({"top_p": 0.9}, 0),
    "top_p 0.9, 1/8 flat": ({"top_p": 0.9}, 1),
    "top_p 0.9, all flat": ({"top_p": 0.9}, 8),
    "top_k 40, top_p 0.9": ({"top_k": 40, "top_p": 0.9}, 8),
    "top_k 500, top_p 0.9": ({"top_k": 500, "top_p": 0.9}, 0),
    "the same, all flat": ({"top_k": 500, "top_p": 0.9}, 8),
    "greedy, penalties": ({"temperature": 0.0, **PENALTIES}, 0),
    "greedy, edits": ({"temperature": 0.0, **EDITS}, 0),
    "greedy, 5 logprobs": ({"temperature": 0.0, "logprobs": 5}, 0),
    "all of it": ({"top_k": 40, "top_p": 0.9, "logprobs": 5, **PENALTIES, **EDITS}, 1),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", help="preset:rows, may be repeated")
    parser.add_argument("--dtype", default="auto", help="of the step: auto, float32 or bfloat16")
    parser.add_argument("--context", type=int, default=256, help="tokens of history in the step")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="also write the JSON object to this file")
    return parser.parse_args()


def make_logits(vocab: int, num_rows: int, flat_of_8: int) -> np.ndarray:
    """Zipf's law with exponent 2 (64 tokens hold 0.99 of the mass) or 1 (0.4), ids shuffled."""
    rng = np.random.default_rng(0)
    rank_RV = np.stack([rng.permutation(vocab) + 1 for _ in range(num_rows)])
    exponent_R1 = np.where(np.arange(num_rows) % 8 < flat_of_8, 1.0, 2.0)[:, None]
    return (-exponent_R1 * np.log(rank_RV)).astype(np.float32)


def make_sampler(vocab: int, num_rows: int):
    """{request: function of no argument that samples once}, all through one compiled program."""
    limits = SamplingLimits(vocab_size=vocab)
    program = jax.jit(partial(sample, limits))
    tokens_SX = jnp.asarray(
        np.random.default_rng(1).integers(0, vocab, (num_rows, HISTORY_ROOM)), jnp.int32
    )
    functions = {}
    for name, (fields, flat_of_8) in REQUESTS.items():
        rows = empty_rows(num_rows, limits)
        for r in range(num_rows):
            fill_row(rows, r, SamplingParams(**fields), RowFacts(seed=r), limits)
        requests = empty_requests(num_rows, 8, rows)
        requests.stop_ids[:, 0], requests.prompt_len[:] = 2, 8
        view = RowView(
            requests_R=jax.tree.map(jnp.asarray, requests),
            slot_R=jnp.arange(num_rows),
            num_tokens_R=jnp.full(num_rows, 512),
            tokens_SX=tokens_SX,
        )
        logits_RV = jnp.asarray(make_logits(vocab, num_rows, flat_of_8))
        functions[name] = partial(program, view, logits_RV, jnp.ones(num_rows, bool))
    return functions


def make_step(name: str, num_rows: int, dtype: jnp.dtype, context: int):
    """A function of no argument: one decode step up to the logits."""
    config = preset(name)
    params = init(declare(config), jax.random.key(0), dtype)
    pages_per_row = -(-(context + 1) // PAGE_SIZE)
    cache = init_cache(cache_specs(config), num_rows * pages_per_row + 1, PAGE_SIZE, dtype)
    ones_S = jnp.ones(num_rows, jnp.int32)
    batch = ragged_batch(
        tokens_T=jnp.zeros(num_rows, jnp.int32),
        q_start_S=jnp.arange(num_rows, dtype=jnp.int32),
        q_len_S=ones_S,
        kv_len_S=ones_S * (context + 1),
        prompt_len_S=ones_S,
        page_table_SM=1 + jnp.arange(num_rows * pages_per_row).reshape(num_rows, -1),
        max_q_len=1,
    )

    @partial(jax.jit, donate_argnums=1)
    def step(params, cache, batch):
        hidden_TD, cache = forward(config, params, cache, batch)
        return unembed(config, params, hidden_TD), cache

    held = [cache]

    def once() -> jax.Array:
        logits_TV, held[0] = step(params, held[0], batch)
        return logits_TV

    return config.vocab_size, once


def measure(functions: dict, repeats: int, label: str) -> dict[str, tuple[float, float]]:
    """(median, fastest) seconds of each function, timed in turn.

    Each runs once untimed first: in an engine the logits have just been written, too.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in tqdm(range(repeats + 1), desc=label, file=sys.stderr):  # the first compiles
        for name, function in functions.items():
            jax.block_until_ready(function())
            start = time.perf_counter()
            jax.block_until_ready(function())
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: (statistics.median(values), min(values)) for name, values in times.items()}


def main() -> None:
    args = parse_args()
    dtype = resolve_dtype(args.dtype)
    bandwidth = measure_read_bandwidth(jnp.dtype("float32"), min_matmul_rows(jnp.dtype("float32")))
    rows = []
    for case in args.case or ["smollm2-135m:32", "gemma-3-270m:8"]:
        name, _, count = case.partition(":")
        if not count.isdigit() or int(count) < 1:
            raise ValueError(f"--case must be preset:rows, got {case!r}")
        num_rows = int(count)
        vocab, step = make_step(name, num_rows, dtype, args.context)
        functions = {"step": step, **make_sampler(vocab, num_rows)}
        times = measure(functions, args.repeats, case)
        bound_s = num_rows * vocab * 4 / bandwidth
        print(
            f"{name}, {num_rows} rows x {vocab:,} logits, "
            f"step {times['step'][0] * 1e3:.1f} ms (fastest {times['step'][1] * 1e3:.1f})"
        )
        print(
            f"{'request':22} {'bound ms':>9} {'ms':>7} {'fastest':>8} {'x bound':>8} {'of step':>8}"
        )
        for request in REQUESTS:
            seconds, fastest_s = times[request]
            share = seconds / times["step"][0]
            print(
                f"{request:22} {bound_s * 1e3:9.2f} {seconds * 1e3:7.2f} "
                f"{fastest_s * 1e3:8.2f} {seconds / bound_s:8.1f} {share:8.1%}"
            )
            rows.append(
                {
                    "model": name,
                    "rows": num_rows,
                    "vocab": vocab,
                    "request": request,
                    "bound_ms": round(bound_s * 1e3, 3),
                    "ms": round(seconds * 1e3, 3),
                    "fastest_ms": round(fastest_s * 1e3, 3),
                    "share_of_step": round(share, 4),
                    "step_ms": round(times["step"][0] * 1e3, 2),
                    "fastest_step_ms": round(times["step"][1] * 1e3, 2),
                }
            )
    result = {
        "benchmark": "sampling",
        "label": "measured",
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "dtype": str(dtype),
        "context": args.context,
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
