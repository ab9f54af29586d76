"""Throughput of the engine: decoding, a real trace served in several ways, a shared system prompt.

Three parts. `decode`: batches through `LLM.generate` beside HF transformers timed in turn, and
beside vLLM on another machine, scaled by what transformers does on both. `serving`: requests of
a real trace, all there at once, under static and continuous batching with a contiguous and with a
paged cache. `prefix`: one system prompt under many requests, with and without the prefix cache.

Rows of the parts and modes that are not run again stay in `--output`, so that a long run can be
made in pieces. Tables are rendered from all rows:

    .venv/bin/python scripts/bench_throughput.py --peer-python .venv-parity/bin/python
"""

import argparse
import csv
import json
import sys
import time
from pathlib import Path

import bench_decode
import numpy as np
from bench_decode import DTYPES
from bench_throughput_report import draw, tables
from machine_facts import machine_facts
from tqdm import tqdm

from engine.cli import run
from engine.llm import LLM
from engine.metrics import summary
from engine.platform import enable_compilation_cache, resolve_dtype
from engine.sampling_params import SamplingParams
from models.checkpoint.load import load_model
from models.checkpoint.registry import resolve

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ANCHORS = BENCHMARKS / "anchors" / "decode_cpu.json"
TRACE = BENCHMARKS / "traces" / "azure_llm_2023_conv.csv"
MAX_LEN = 1024
PAGE_SIZE = 16
DECODE_BATCHES, DECODE_PROMPT_TOKENS, DECODE_NEW_TOKENS = (1, 8, 32), 8, 64
SYSTEM_TOKENS, OWN_TOKENS, PREFIX_REQUESTS, PREFIX_NEW_TOKENS = 512, 12, 32, 8
SAMPLE_EVERY = 8  # dispatches between two looks at the cache


def mode(policy: str, rows: int, reserved_rows: int, page_size: int = PAGE_SIZE) -> dict:
    """Engine arguments; the cache holds `reserved_rows` requests of full length."""
    return {
        "scheduling_policy": policy,
        "max_num_seqs": rows,
        "page_size": page_size,
        "num_pages": reserved_rows * MAX_LEN // page_size + 1,
    }


MODES = {
    "static 8": mode("static", 8, 8, MAX_LEN),
    "static 32": mode("static", 32, 32, MAX_LEN),
    "continuous, contiguous": mode("continuous", 32, 32, MAX_LEN),
    "continuous, paged": mode("continuous", 48, 32),
    "continuous, paged, memory of static 8": mode("continuous", 32, 8),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("decode", "serving", "prefix")
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF model that both can read")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--requests", type=int, default=200, help="of the trace")
    parser.add_argument("--repeats", type=int, default=5, help="of the decode part")
    parser.add_argument("--quick", action="store_true", help="24 requests, 2 repeats")
    parser.add_argument("--peer-python", help="Python with torch and transformers; none: no peer")
    parser.add_argument("--output", type=Path, help="JSON file that keeps the rows")
    parser.add_argument("--plot", type=Path, help="picture of the serving part (extra: plots)")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.repeats = 24, 2
    return args


def main() -> None:
    args = parse_args()
    enable_compilation_cache()
    path = resolve(args.model)
    kept = json.loads(args.output.read_text())["rows"] if _exists(args.output) else []
    measure = {"decode": decode_rows, "serving": serving_rows, "prefix": prefix_rows}
    facts = machine_facts()
    new = [facts | row for part in args.parts for row in measure[part](args, path)]
    names = {(row["part"], row["name"]) for row in new}
    rows = [row for row in kept if (row["part"], row["name"]) not in names] + new
    result = {"benchmark": "throughput", "label": "measured", "model": args.model, "rows": rows}
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(tables(rows))
    if args.plot:
        draw(rows, args.plot)
    print(json.dumps(result))


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()


# ---- decode --------------------------------------------------------------------------------------


def decode_rows(args: argparse.Namespace, path: Path) -> list[dict]:
    """What `bench_decode` measures, a row per batch."""
    anchors = json.loads(ANCHORS.read_text())
    work = (list(DECODE_BATCHES), DECODE_PROMPT_TOKENS, DECODE_NEW_TOKENS, args.repeats)
    result = bench_decode.measure(path, *work, args.peer_python)
    rate = {(r["batch"], r["dtype"], r["engine"]): r["tok_per_s"] for r in result["rows"]}
    shared = {
        key: result[key] for key in ("read_bandwidth_gb_per_s", "prompt_tokens", "new_tokens")
    }
    return [
        _decode_row(batch, rate, anchors, result["peer"])
        | shared
        | {"measured": [row for row in result["rows"] if row["batch"] == batch]}
        for batch in DECODE_BATCHES
    ]


def _decode_row(batch: int, rate: dict, anchors: dict, peer: str | None) -> dict:
    ours = {dtype: rate[batch, dtype, "pallasite"] for dtype in DTYPES}
    row = {"part": "decode", "name": f"batch {batch}", "batch": batch, "tok_per_s": _rounded(ours)}
    row["goal_over_vllm"] = anchors["goals_over_vllm"][str(batch)]
    if peer:
        hf = {dtype: rate[batch, dtype, "hf"] for dtype in DTYPES}
        there = anchors["tok_per_s"]
        vllm = {
            dtype: there["vllm"][dtype][str(batch)]
            * hf[dtype]
            / there["transformers"][dtype][str(batch)]
            for dtype in DTYPES
        }
        row |= {"peer": peer, "hf_tok_per_s": _rounded(hf)}
        row["vllm_scaled_tok_per_s"] = _rounded(vllm)
        row["best_over_vllm"] = round(max(ours.values()) / max(vllm.values()), 2)
        row["best_over_hf"] = round(max(ours.values()) / max(hf.values()), 2)
    return row


def _rounded(values: dict) -> dict:
    return {key: round(value, 1) for key, value in values.items()}


# ---- a real trace --------------------------------------------------------------------------------


def trace_lengths(count: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the first requests, scaled so that the longest has MAX_LEN."""
    with TRACE.open() as file:
        rows = [
            (int(r["ContextTokens"]), int(r["GeneratedTokens"]))
            for r, _ in zip(csv.DictReader(file), range(count), strict=False)
        ]
    if len(rows) < count:
        raise ValueError(f"the trace has {len(rows)} requests, got --requests {count}; use fewer")
    scale = (MAX_LEN - 2) / max(prompt + output for prompt, output in rows)
    return [(max(1, int(p * scale)), max(1, int(o * scale))) for p, o in rows]


def serving_rows(args: argparse.Namespace, path: Path) -> list[dict]:
    config, params = load_model(path, resolve_dtype("auto"))
    rng = np.random.default_rng(0)
    work = [
        (rng.integers(10, config.vocab_size, prompt).tolist(), _fixed(output))
        for prompt, output in trace_lengths(args.requests)
    ]
    rows = []
    for name in args.modes:
        llm = LLM.from_params(config, params, max_model_len=MAX_LEN, **MODES[name])
        _warm(llm, config.vocab_size)
        rows.append({"part": "serving", "name": name} | MODES[name] | serve(llm, work, name))
    return rows


def _fixed(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def _warm(llm: LLM, vocab_size: int) -> None:
    llm.engine.compile()
    llm.generate([[vocab_size - 1] * n for n in (5, 40)], _fixed(4), use_tqdm=False)


def serve(llm: LLM, work: list, name: str) -> dict:
    """Send everything at once, step until it is done, look at the cache now and then."""
    engine = llm.engine
    before = engine.counters()
    start_s = time.perf_counter()
    choices = [engine.add_request(f"{name} {i}", p, s)[0] for i, (p, s) in enumerate(work)]
    looks, steps = [], 0
    with tqdm(total=len(choices), desc=name, file=sys.stderr) as bar:
        while engine.has_unfinished:
            bar.update(sum(u.choice.finish_reason is not None for u in engine.step()))
            steps += 1
            if steps % SAMPLE_EVERY == 0 and engine.has_unfinished:
                looks.append((time.perf_counter(), engine.metrics()))
    seconds = time.perf_counter() - start_s
    outputs = [len(choice.token_ids) for choice in choices]
    assert outputs == [params.max_tokens for _, params in work]
    after, times = engine.counters(), [choice.times for choice in choices]
    ttft = summary(t.first_token_s - t.arrival_s for t in times)
    tpot = summary(
        (t.last_token_s - t.first_token_s) / (n - 1)
        for t, n in zip(times, outputs, strict=True)
        if n > 1
    )
    return {
        "requests": len(work),
        "prompt_tokens": sum(len(prompt) for prompt, _ in work),
        "output_tokens": sum(outputs),
        "dtype": str(llm.engine._cache.layers[0].dtype),
        "seconds": round(seconds, 2),
        "requests_per_s": round(len(work) / seconds, 3),
        "output_tok_per_s": round(sum(outputs) / seconds, 1),
        "preemptions": after["preemptions"] - before["preemptions"],
        "ttft_s": {"p50": round(ttft.p50, 3), "p95": round(ttft.p95, 3)},
        "tpot_s": {"p50": round(tpot.p50, 4), "p95": round(tpot.p95, 4)},
    } | cache_use(start_s, looks)


def cache_use(start_s: float, looks: list) -> dict:
    """Averages over time: share of the pages that are held, share of their positions that hold no
    token, requests that run."""
    weights = np.diff([start_s, *(at_s for at_s, _ in looks)])
    seen = [metrics for _, metrics in looks]
    mean = {
        "kv_held": [m.kv_utilization for m in seen],
        "kv_waste": [m.kv_waste for m in seen],
        "running": [m.running for m in seen],
    }
    return {k: round(float(np.average(v, weights=weights)), 4) for k, v in mean.items()}


# ---- a shared system prompt ----------------------------------------------------------------------


def prefix_rows(args: argparse.Namespace, path: Path) -> list[dict]:
    """All requests run at once. float32, so that outputs with and without the cache are equal."""
    config, params = load_model(path, resolve_dtype("float32"))
    rng = np.random.default_rng(0)
    system = rng.integers(10, config.vocab_size, SYSTEM_TOKENS).tolist()
    work = [
        (system + rng.integers(10, config.vocab_size, OWN_TOKENS).tolist(), PREFIX_NEW_TOKENS)
        for _ in range(PREFIX_REQUESTS)
    ]
    work = [(prompt, _fixed(count)) for prompt, count in work]
    rows, tokens = [], []
    for name, caching in (("without", False), ("with", True)):
        llm = LLM.from_params(
            config,
            params,
            max_num_seqs=PREFIX_REQUESTS,
            max_model_len=640,
            enable_prefix_caching=caching,
        )
        _warm(llm, config.vocab_size)
        before, start_s = llm.engine.counters(), time.perf_counter()
        outputs = llm.generate([p for p, _ in work], [s for _, s in work], use_tqdm=False)
        seconds = time.perf_counter() - start_s
        after = llm.engine.counters()
        tokens.append([output.outputs[0].token_ids for output in outputs])
        ttft = summary(o.times.first_token_s - o.times.arrival_s for o in outputs)
        rows.append(
            {
                "part": "prefix",
                "name": name,
                "requests": PREFIX_REQUESTS,
                "prompt_tokens": sum(len(p) for p, _ in work),
                "computed_tokens": after["prefill_tokens"] - before["prefill_tokens"],
                "ttft_s": {"mean": round(ttft.mean, 3), "p95": round(ttft.p95, 3)},
                "seconds": round(seconds, 2),
            }
        )
    assert tokens[0] == tokens[1], "the prefix cache changed the outputs"
    return rows


if __name__ == "__main__":
    run(main)
