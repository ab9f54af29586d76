"""Generate text: `python scripts/generate.py "prompt" [more prompts] --model smollm2-135m`.

Exit status 1: a prompt failed, and standard error says why; 2: bad input.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace

from engine.bandwidth import measure_read_bandwidth
from engine.bounds import check_request
from engine.cli import (
    FoundModel,
    LoadedModel,
    add_model_arguments,
    find_model,
    read_prompts,
    run,
)
from engine.engine_args import EngineArgs
from engine.llm import LLM
from engine.outputs import RequestOutput
from engine.platform import min_matmul_rows
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from models.kv_cache import kv_bytes_per_token
from models.model import cache_specs, declare
from models.params import size_bytes

MAX_BATCH = 32  # more prompts wait their turn
MIN_TIMED_STEPS = 8  # fewer decode steps say nothing about speed


@dataclass(frozen=True)
class Stats:
    """One run's figures, measured. Rates exclude loading and compiling."""

    prompt_tokens: int
    output_tokens: int
    prompt_tok_per_s: float
    output_tok_per_s: float | None
    ttft_s: float
    compile_s: float
    load_s: float
    achieved_gb_per_s: float | None
    read_bandwidth_gb_per_s: float

    def line(self) -> str:
        if self.achieved_gb_per_s is None:
            rate, achieved = "too few to time", "measured"
        else:
            share = self.achieved_gb_per_s / self.read_bandwidth_gb_per_s
            rate = f"at {self.output_tok_per_s:.1f} tok/s"
            achieved = f"{self.achieved_gb_per_s:.1f} GB/s = {share:.0%} of the measured"
        return (
            f"prompt {self.prompt_tokens} tok at {self.prompt_tok_per_s:.1f} tok/s | "
            f"output {self.output_tokens} tok {rate} | "
            f"TTFT {self.ttft_s * 1e3:.0f} ms (+ {self.compile_s:.1f} s compile, "
            f"{self.load_s:.1f} s load) | "
            f"{achieved} {self.read_bandwidth_gb_per_s:.1f} GB/s"
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", help="one prompt each; several run as one batch")
    parser.add_argument(
        "--file", action="append", default=[], help="read a prompt from a file, - is stdin"
    )
    parser.add_argument("--lines", action="store_true", help="files hold one prompt per line")
    add_model_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--chat", action="store_true", help="wrap each prompt in the chat template")
    parser.add_argument("--page-size", type=int, help="default: 64 on a TPU, else 16")
    parser.add_argument("--num-pages", type=int, help="pages in the cache (default: as needed)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--record", help="write a record of the run here, for scripts/replay.py")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    texts = read_prompts(args.prompts, args.file, args.lines)
    sizes = EngineArgs(
        max_num_seqs=min(len(texts), MAX_BATCH),
        page_size=args.page_size,
        num_pages=args.num_pages,
        steps_per_dispatch=8,  # text comes in small pieces
        record=args.record,
    )
    found = find_model(args)
    prompts = [encode(found.tokenizer, text, args.chat) for text in texts]
    bucket = length_bucket(prompts, args.max_tokens, found.config.max_position)
    sizes = replace(sizes, max_model_len=bucket)
    check_prompts(found, sizes, prompts, params)
    model = found.load()
    llm = LLM.from_params(
        model.config, model.params, model.tokenizer, name=args.model, **vars(sizes)
    )
    room = llm.engine.config.max_model_len - max(map(len, prompts))
    if 0 < room < args.max_tokens:
        print(f"note: the model's limit leaves {room} tokens of output", file=sys.stderr)
    print("preparing programs (compiled once, then kept)", file=sys.stderr)
    outputs, times = stream(llm, prompts, params, show=not args.json)
    stats = measure(llm, model, outputs, times)
    if args.json:
        print(json.dumps(report(args, model, texts, outputs, stats), ensure_ascii=False))
    else:
        print(stats.line(), file=sys.stderr)
    errors = [output.outputs[0].error for output in outputs]
    for i, error in enumerate(errors, start=1):
        if error:
            print(f"error: prompt {i}: {error}", file=sys.stderr)
    if any(errors):
        sys.exit(1)


def encode(tokenizer: Tokenizer, text: str, chat: bool) -> list[int]:
    if chat:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text)


def check_prompts(
    found: FoundModel, sizes: EngineArgs, prompts: list[list[int]], params: SamplingParams
) -> None:
    """Refuse before weights are read what the engine would refuse."""
    config, limits = (
        sizes.engine_config(found.config, found.dtype),
        sizes.sampling_limits(found.config),
    )
    for i, prompt in enumerate(prompts, start=1):
        try:
            check_request(config, limits, prompt, params)
        except ValueError as error:
            raise ValueError(f"prompt {i}: {error}") from error


def length_bucket(prompts: list[list[int]], max_tokens: int, limit: int) -> int:
    """A power of two from 512 up, so that prompts of like length share compiled programs."""
    need = max(map(len, prompts)) + max_tokens
    return min(max(512, 1 << (need - 1).bit_length()), limit)


def stream(llm: LLM, prompts, params: SamplingParams, show: bool):
    """Print prompts' texts in order, the current one as its tokens come.

    Returns the outputs and (seconds to the first token, seconds after it), compiling not counted.
    """
    outputs: list[RequestOutput | None] = [None] * len(prompts)
    pending = [""] * len(prompts)
    current, first_s, first_compile_s, start = 0, 0.0, 0.0, time.perf_counter()
    if show:
        heading(0, len(prompts))
    for output, deltas in llm.stream(prompts, params):
        if not first_s:
            first_s, first_compile_s = time.perf_counter() - start, llm.engine.compile_s
        index = int(output.request_id)
        outputs[index] = output
        pending[index] += deltas[0]
        while show and current < len(prompts):
            print(pending[current], end="", flush=True)
            pending[current] = ""
            if outputs[current] is None or not outputs[current].finished:
                break
            print()
            current += 1
            if current < len(prompts):
                heading(current, len(prompts))
    rest_s = time.perf_counter() - start - first_s - (llm.engine.compile_s - first_compile_s)
    return outputs, (first_s - first_compile_s, rest_s)


def heading(index: int, count: int) -> None:
    if count > 1:
        print(f"--- prompt {index + 1} of {count}", flush=True)


def measure(llm: LLM, model: LoadedModel, outputs: list[RequestOutput], times) -> Stats:
    """Achieved bytes count the weights once per decode step, and each step's keys and values."""
    first_s, decode_s = times
    lengths = [(len(o.prompt_token_ids), len(o.outputs[0].token_ids)) for o in outputs]
    weights = size_bytes(declare(model.config), model.dtype)
    if not model.config.tied_embeddings:
        weights -= model.params.embed_VD.nbytes  # gathered, a row per token, not read whole
    per_token = kv_bytes_per_token(cache_specs(model.config), model.dtype)
    kv = per_token * sum(out * (prompt + out / 2) for prompt, out in lengths)
    steps = llm.engine.counters()["decode_rounds"]
    timed = steps >= MIN_TIMED_STEPS
    rows = max(min(len(outputs), MAX_BATCH), min_matmul_rows(model.dtype))
    prompt_tokens, output_tokens = (sum(column) for column in zip(*lengths, strict=True))
    return Stats(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_tok_per_s=prompt_tokens / first_s,
        output_tok_per_s=(output_tokens - 1) / decode_s if timed else None,
        ttft_s=first_s,
        compile_s=llm.engine.compile_s,
        load_s=model.load_s,
        achieved_gb_per_s=(steps * weights + kv) / decode_s / 1e9 if timed else None,
        read_bandwidth_gb_per_s=measure_read_bandwidth(model.dtype, rows) / 1e9,
    )


def report(args, model: LoadedModel, texts, outputs: list[RequestOutput], stats: Stats) -> dict:
    return {
        "model": args.model,
        "dtype": model.dtype.name,
        "results": [
            {
                "prompt": text,
                "text": output.outputs[0].text,
                "token_ids": output.outputs[0].token_ids,
                "finish_reason": output.outputs[0].finish_reason,
                "error": output.outputs[0].error,
            }
            for text, output in zip(texts, outputs, strict=True)
        ],
        "stats": asdict(stats),
    }


if __name__ == "__main__":
    run(main)
