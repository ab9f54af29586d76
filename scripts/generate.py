"""Generate text: `python scripts/generate.py "prompt" [more prompts] --model smollm2-135m`."""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass

from engine.bandwidth import measure_read_bandwidth
from engine.cli import LoadedModel, add_model_arguments, open_model, read_prompts, run
from engine.generate import GenerateConfig, Generator, Sampling
from engine.platform import free_memory_bytes, min_matmul_rows
from models.kv_cache import kv_bytes_per_token
from models.model import cache_specs, declare
from models.params import size_bytes


@dataclass(frozen=True)
class Stats:
    """One run's figures, measured. Rates exclude loading and compiling."""

    prompt_tokens: int
    output_tokens: int
    prompt_tok_per_s: float
    output_tok_per_s: float
    ttft_s: float
    compile_s: float
    load_s: float
    achieved_gb_per_s: float
    read_bandwidth_gb_per_s: float

    def line(self) -> str:
        share = self.achieved_gb_per_s / self.read_bandwidth_gb_per_s
        return (
            f"prompt {self.prompt_tokens} tok at {self.prompt_tok_per_s:.1f} tok/s | "
            f"output {self.output_tokens} tok at {self.output_tok_per_s:.1f} tok/s | "
            f"TTFT {self.ttft_s * 1e3:.0f} ms (+ {self.compile_s:.1f} s compile, "
            f"{self.load_s:.1f} s load) | "
            f"{self.achieved_gb_per_s:.1f} GB/s = {share:.0%} of the measured "
            f"{self.read_bandwidth_gb_per_s:.1f} GB/s"
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
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--num-pages", type=int, help="pages in the cache (default: as needed)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    sampling = Sampling(args.max_tokens, args.temperature, args.seed, args.ignore_eos)
    if args.page_size < 1:
        raise ValueError(f"--page-size must be at least 1, got {args.page_size}")
    texts = read_prompts(args.prompts, args.file, args.lines)
    model = open_model(args)
    prompts = [encode(model, text, args.chat) for text in texts]
    generator = Generator(
        model.config,
        model.params,
        GenerateConfig(
            max_num_seqs=len(prompts),
            max_model_len=length_bucket(prompts, sampling.max_tokens, model.config.max_position),
            page_size=args.page_size,
            min_rows=min_matmul_rows(model.dtype),
        ),
        num_pages=args.num_pages,
        memory_bytes=free_memory_bytes(),
    )
    outputs, reasons, times = stream(generator, model, prompts, sampling, show=not args.json)
    stats = measure(generator, model, prompts, outputs, times)
    if args.json:
        print(
            json.dumps(
                {
                    "model": args.model,
                    "dtype": model.dtype.name,
                    "results": [
                        {
                            "prompt": text,
                            "text": model.tokenizer.decode(output),
                            "token_ids": output,
                            "finish_reason": reason,
                        }
                        for text, output, reason in zip(texts, outputs, reasons, strict=True)
                    ],
                    "stats": asdict(stats),
                },
                ensure_ascii=False,
            )
        )
    else:
        print(stats.line(), file=sys.stderr)


def encode(model: LoadedModel, text: str, chat: bool) -> list[int]:
    if chat:
        return model.tokenizer.encode_chat([{"role": "user", "content": text}])
    return model.tokenizer.encode(text)


def length_bucket(prompts: list[list[int]], max_tokens: int, limit: int) -> int:
    """A power of two from 512 up, so that prompts of like length share compiled programs."""
    need = max(map(len, prompts)) + max_tokens
    return min(max(512, 1 << (need - 1).bit_length()), limit)


def stream(generator, model, prompts, sampling, show: bool):
    """Print prompts' texts in order, the current one as its tokens come; return ids and times."""
    outputs = [[] for _ in prompts]
    reasons = [None] * len(prompts)
    detokenizers = [model.tokenizer.detokenizer() for _ in prompts]
    pending = [""] * len(prompts)
    current, first_s, start = 0, None, time.perf_counter()
    compiled_before = generator.compile_s
    if show:
        heading(0, len(prompts))
    for news in generator.generate(prompts, sampling):
        first_s = first_s or time.perf_counter() - start
        for item in news:
            outputs[item.index] += item.token_ids
            pending[item.index] += detokenizers[item.index].push(item.token_ids)
            if item.finish_reason:
                reasons[item.index] = item.finish_reason
                pending[item.index] += detokenizers[item.index].finish()
        while show and current < len(prompts):
            print(pending[current], end="", flush=True)
            pending[current] = ""
            if not reasons[current]:
                break
            print()
            current += 1
            if current < len(prompts):
                heading(current, len(prompts))
    total_s = time.perf_counter() - start
    compile_s = generator.compile_s - compiled_before
    return outputs, reasons, (first_s - compile_s, total_s - compile_s)


def heading(index: int, count: int) -> None:
    if count > 1:
        print(f"--- prompt {index + 1} of {count}", flush=True)


def measure(generator, model: LoadedModel, prompts, outputs, times) -> Stats:
    first_s, total_s = times
    decode_s = max(total_s - first_s, 1e-9)
    steps = max(map(len, outputs)) - 1
    prompt_tokens, output_tokens = sum(map(len, prompts)), sum(map(len, outputs))
    weights = size_bytes(declare(model.config), model.dtype)
    if not model.config.tied_embeddings:
        weights -= model.params.embed_VD.nbytes  # gathered, a row per token, not read whole
    per_token = kv_bytes_per_token(cache_specs(model.config), model.dtype)
    kv = per_token * sum(
        len(out) * (len(p) + len(out) / 2) for p, out in zip(prompts, outputs, strict=True)
    )
    rows = max(len(prompts), min_matmul_rows(model.dtype))
    return Stats(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_tok_per_s=prompt_tokens / max(first_s, 1e-9),
        output_tok_per_s=(output_tokens - len(prompts)) / decode_s,
        ttft_s=first_s,
        compile_s=generator.compile_s,
        load_s=model.load_s,
        achieved_gb_per_s=(steps * weights + kv) / decode_s / 1e9,
        read_bandwidth_gb_per_s=measure_read_bandwidth(model.dtype, rows) / 1e9,
    )


if __name__ == "__main__":
    run(main)
