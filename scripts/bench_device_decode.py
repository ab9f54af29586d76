"""Decode of a model with random weights on the attached device: time and bandwidth of a step.

The engine runs as it serves (paged cache, sampling, scheduling in the loop) on prompts of random
token ids, greedy. Each batch is timed with few and with many new tokens after the same prompts; the
difference is steps of decode alone. A step must read every weight but the embedding's unused rows,
and the keys and values of every row; that over its time is the bandwidth reached.

    python scripts/bench_device_decode.py --model llama-3.1-8b --batches 1 8 64
"""

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from machine_facts import machine_facts
from tqdm import tqdm

from engine.bandwidth import measure_copy_bandwidth
from engine.cli import run
from engine.kernel_choice import calls
from engine.llm import LLM
from engine.platform import attached_chip, resolve_dtype
from engine.sampling_params import SamplingParams
from models.config import ModelConfig
from models.model import ModelParams, declare
from models.params import init, size_bytes
from models.presets import preset
from pallas_kernels.paged_attention import choose

# Below 128 an engine has one program; the prompts' time is not in the figures.
PROMPT_TOKENS_PER_ROUND = 112


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="a preset of models/presets.py")
    parser.add_argument("--layers", type=int, help="keep only that many; default: all")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, nargs=2, default=[32, 288], help="few and many")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def step_bytes(network: ModelConfig, dtype: jnp.dtype, batch: int, context: int) -> int:
    """What one step reads: weights, and what `batch` rows of `context` tokens keep."""
    weights = size_bytes(declare(network), dtype)
    if not network.tied_embeddings:
        weights -= network.vocab_size * network.width * dtype.itemsize
    kept = sum(
        2 * layer.mixer.num_kv_heads * layer.mixer.head_dim
        * min(context, layer.mixer.window or context)
        for layer in network.layers
    )  # fmt: skip
    return weights + batch * kept * dtype.itemsize


def time_s(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    short = [o for o in outputs if len(o.outputs[0].token_ids) != new_tokens]
    if short:
        raise ValueError(f"{len(short)} rows ended early, one by {short[0].outputs[0]}")
    return seconds


def make_engines(network: ModelConfig, params: ModelParams, args) -> dict[int, LLM]:
    """One per batch, over the same weights, compiled at the same time."""
    made = {
        batch: LLM.from_params(
            network,
            params,
            max_num_seqs=batch,
            max_model_len=args.prompt_tokens + max(args.new_tokens),
            max_num_batched_tokens=PROMPT_TOKENS_PER_ROUND,
            enable_prefix_caching=False,
        )
        for batch in args.batches
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda llm: llm.engine.compile(), made.values()))
    return made


def bench(network: ModelConfig, llm: LLM, batch: int, copy_bytes_per_s: float, args) -> dict:
    few, many = args.new_tokens
    model, chip = llm.engine.model, attached_chip()
    dtype = model.dtype
    config = llm.engine.config
    asked = calls(network, config, config.program_budgets, dtype, model.chip)
    kernels = {choose(call, model.chip) for call in asked}
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, network.vocab_size, (batch, args.prompt_tokens)).tolist()
    time_s(llm, prompts, few)  # warms
    times_s = {n: [time_s(llm, prompts, n) for _ in range(args.repeats)] for n in (few, many)}
    step_s = (statistics.median(times_s[many]) - statistics.median(times_s[few])) / (many - few)
    moved = step_bytes(network, dtype, batch, args.prompt_tokens + (few + many) // 2)
    peak = chip.device_hbm_bytes_per_s if chip else None
    return {
        "batch": batch,
        "attention": sorted(kernels),
        "compile_s": llm.engine.compile_s,
        "step_ms": step_s * 1e3,
        "tok_per_s": batch / step_s,
        "bytes": moved,
        "gb_per_s": moved / step_s / 1e9,
        "share_of_peak": moved / step_s / peak if peak else None,
        "share_of_copy": moved / step_s / copy_bytes_per_s,
        "slowest_to_fastest_s": {n: [max(found), min(found)] for n, found in times_s.items()},
    }


def main() -> None:
    args = parse_args()
    few, many = args.new_tokens
    if not 1 <= few < many:
        raise ValueError(f"--new-tokens must be two rising numbers from 1 up, got {few} {many}")
    for name, value in (
        ("batches", min(args.batches)),
        ("prompt-tokens", args.prompt_tokens),
        ("repeats", args.repeats),
    ):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    network, dtype = preset(args.model), resolve_dtype(args.dtype)
    network = replace(network, layers=network.layers[: args.layers])
    on_chip = attached_chip() is not None
    copy_bytes_per_s = measure_copy_bandwidth(1 << 31 if on_chip else 1 << 26)
    params = jax.block_until_ready(init(declare(network), jax.random.key(0), dtype))
    facts = {
        "benchmark": "device_decode",
        "label": "measured",
        "model": args.model,
        "layers": len(network.layers),
        "dtype": args.dtype,
        **machine_facts(),
        "copy_gb_per_s": copy_bytes_per_s / 1e9,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
    }
    print(json.dumps(facts), flush=True)
    rows = []
    engines = make_engines(network, params, args)
    for batch, llm in tqdm(engines.items(), desc="batches", file=sys.stderr):
        rows.append(bench(network, llm, batch, copy_bytes_per_s, args))
        print(json.dumps(rows[-1]), flush=True)
    print("batch   step ms     tok/s     GB/s   copy  attention")
    for row in rows:
        print(
            f"{row['batch']:5} {row['step_ms']:9.2f} {row['tok_per_s']:9.1f} "
            f"{row['gb_per_s']:8.1f} {row['share_of_copy']:6.1%}  {', '.join(row['attention'])}"
        )
    print(json.dumps(facts | {"rows": rows}))


if __name__ == "__main__":
    run(main)
