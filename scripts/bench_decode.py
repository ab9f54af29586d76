"""Decode speed against the machine's matmul-read bound and against HF transformers.

Every repetition measures the bandwidth and times each engine in turn on the same work (greedy,
fixed number of new tokens, random prompts), so that noise meets all alike; medians are reported.
The peer runs in its own process, because its Python may be another one:

    .venv/bin/python scripts/bench_decode.py --peer-python .venv-parity/bin/python
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from machine_facts import machine_facts
from tqdm import tqdm

from engine.bandwidth import measure_read_bandwidth
from engine.cli import run
from engine.llm import LLM
from engine.platform import enable_compilation_cache, min_matmul_rows, resolve_dtype
from engine.sampling_params import SamplingParams
from models.checkpoint.load import load_model
from models.checkpoint.registry import resolve
from models.model import declare
from models.params import size_bytes

DTYPES = ("float32", "bfloat16")


class Peer:
    """HF transformers in a child process; one JSON line per request and answer."""

    def __init__(self, python: str, model: Path):
        script = Path(__file__).parent / "bench_decode_peer.py"
        self.process = subprocess.Popen(
            [python, str(script), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = self._read()["name"]

    def time_s(self, prompts: np.ndarray, new_tokens: int, dtype: str) -> float:
        request = {"prompts": prompts.tolist(), "new_tokens": new_tokens, "dtype": dtype}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()["seconds"]

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(f"the peer process ended with code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF model that both can read")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-python", help="Python with torch and transformers; none: no peer")
    parser.add_argument("--output", type=Path, help="also write the JSON object to this file")
    return parser.parse_args()


def time_ours_s(llm: LLM, prompts: np.ndarray, new_tokens: int) -> tuple[float, float]:
    """Seconds of the call, and of a decode step: from the first token to the last."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts.tolist(), params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)
    times = outputs[0].times
    return seconds, (times.last_token_s - times.first_token_s) / (new_tokens - 1)


def make_engines(path: Path, batches: list[int], length: int):
    """Per dtype: (weight bytes, {batch: engine}); parameters shared by the engines."""
    made = {}
    for name in DTYPES:
        config, params = load_model(path, resolve_dtype(name))
        engines = {
            batch: LLM.from_params(config, params, max_num_seqs=batch, max_model_len=length)
            for batch in batches
        }
        made[name] = (size_bytes(declare(config), name), engines)
    return config, made


def main() -> None:
    args = parse_args()
    enable_compilation_cache()
    result = {"benchmark": "decode", "label": "measured", "model": args.model, **machine_facts()}
    work = (args.batches, args.prompt_tokens, args.new_tokens, args.repeats)
    result |= measure(resolve(args.model), *work, args.peer_python)
    print(table(result["rows"]))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def measure(
    path: Path,
    batches: list[int],
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    peer_python: str | None,
) -> dict:
    """What was done, the machine's bandwidth, and a row per engine, dtype and batch."""
    length = max(128, 1 << (prompt_tokens + new_tokens - 1).bit_length())
    config, made = make_engines(path, batches, length)
    peer = Peer(peer_python, path) if peer_python else None
    rng = np.random.default_rng(0)
    times: dict[tuple, list[float]] = {}
    bandwidths: dict[str, list[float]] = {name: [] for name in DTYPES}
    for round_index in tqdm(range(repeats + 1), desc="decode", file=sys.stderr):
        for name, measured in bandwidths.items():
            dtype = resolve_dtype(name)
            measured.append(measure_read_bandwidth(dtype, min_matmul_rows(dtype)))
        for batch in batches:
            prompts = rng.integers(10, config.vocab_size, (batch, prompt_tokens))
            for dtype in DTYPES:
                seconds, step_s = time_ours_s(made[dtype][1][batch], prompts, new_tokens)
                record = [(("pallasite", dtype, batch), seconds), (("step", dtype, batch), step_s)]
                if peer:
                    seconds = peer.time_s(prompts, new_tokens, dtype)
                    record.append((("hf", dtype, batch), seconds))
                if round_index:  # the first round compiles and warms
                    for key, value in record:
                        times.setdefault(key, []).append(value)
    bandwidth = {name: statistics.median(measured[1:]) for name, measured in bandwidths.items()}
    if peer:
        peer.close()
    weights = {dtype: weight_bytes for dtype, (weight_bytes, _) in made.items()}
    return {
        "peer": peer.name if peer else None,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "read_bandwidth_gb_per_s": {k: round(v / 1e9, 2) for k, v in bandwidth.items()},
        "rows": rows_of(times, weights, bandwidth, new_tokens),
    }


def rows_of(
    times: dict[tuple, list[float]], weights: dict, bandwidth: dict, new_tokens: int
) -> list[dict]:
    """Medians. The bound is batch * bandwidth / weight bytes; the decode share is the part of the
    bandwidth at which decode steps alone read the weights."""
    rows = []
    for (engine, dtype, batch), samples in sorted(times.items(), key=lambda x: (x[0][2], x[0])):
        if engine == "step":
            continue
        seconds = statistics.median(samples)
        tokens, peer = batch * new_tokens, times.get(("hf", dtype, batch))
        row = {"engine": engine, "dtype": dtype, "batch": batch}
        row["tok_per_s"] = round(tokens / seconds, 1)
        spread = max(samples), min(samples)
        row["slowest_to_fastest_tok_per_s"] = [round(tokens / s, 1) for s in spread]
        row["read_bound_tok_per_s"] = round(batch * bandwidth[dtype] / weights[dtype], 1)
        row["over_hf_same_dtype"] = round(statistics.median(peer) / seconds, 2) if peer else None
        if engine == "pallasite":
            step_s = statistics.median(times["step", dtype, batch])
            row["step_ms"] = round(step_s * 1e3, 2)
            row["decode_share_of_read_bandwidth"] = round(
                weights[dtype] / step_s / bandwidth[dtype], 3
            )
        rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    lines = ["engine     dtype     batch    tok/s    bound  decode   x HF"]
    for row in rows:
        share, ratio = row.get("decode_share_of_read_bandwidth"), row["over_hf_same_dtype"]
        lines.append(
            f"{row['engine']:10} {row['dtype']:9} {row['batch']:5} {row['tok_per_s']:8.1f} "
            f"{row['read_bound_tok_per_s']:8.1f} {share or float('nan'):7.0%} "
            f"{ratio or float('nan'):6.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
