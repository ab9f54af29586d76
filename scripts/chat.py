"""Talk to a model: `python scripts/chat.py --model smollm2-135m`. /reset forgets, /quit leaves.

Each turn feeds only what is new: the cache keeps the conversation so far.
"""

import argparse
import sys
import time

from engine.cli import LoadedModel, add_model_arguments, open_model, run
from engine.generate import GenerateConfig, Generator, Sampling
from engine.platform import free_memory_bytes, min_matmul_rows


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, help="default: the model's, 8192 at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page-size", type=int, default=16)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    sampling = Sampling(args.max_tokens, args.temperature, args.seed)
    model = open_model(args)
    generator = Generator(
        model.config,
        model.params,
        GenerateConfig(
            max_model_len=args.max_model_len or min(model.config.max_position, 8192),
            page_size=args.page_size,
            min_rows=min_matmul_rows(model.dtype),
        ),
        memory_bytes=free_memory_bytes(),
    )
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    print(f"{args.model}, {model.dtype.name}; /reset forgets, /quit leaves", file=sys.stderr)
    while True:
        try:
            text = input("> ")
        except EOFError:
            return
        except UnicodeDecodeError as error:
            print(f"error: that line is not UTF-8 ({error.reason})", file=sys.stderr)
            continue
        if text.strip() == "/quit":
            return
        if text.strip() == "/reset":
            messages = list(opening)
            continue
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = reply(generator, model, messages, sampling)
        except ValueError as error:
            messages.pop()
            print(f"error: {error} (/reset starts afresh)", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": answer})


def reply(generator: Generator, model: LoadedModel, messages: list, sampling: Sampling) -> str:
    """Stream one answer; an interrupt keeps what was said so far."""
    prompt = model.tokenizer.encode_chat(messages)
    detokenizer = model.tokenizer.detokenizer()
    start, parts, count = time.perf_counter(), [], 0
    try:
        for news in generator.generate([prompt], sampling):
            count += len(news[0].token_ids)
            parts.append(detokenizer.push(news[0].token_ids))
            print(parts[-1], end="", flush=True)
        parts.append(detokenizer.finish())
        print(parts[-1])
    except KeyboardInterrupt:
        print(" [interrupted]")
    took_s = time.perf_counter() - start
    print(
        f"[{len(prompt)} prompt tokens, {generator.reused_tokens} from the cache; "
        f"{count} tokens, {count / took_s:.1f} tok/s]",
        file=sys.stderr,
    )
    return "".join(parts)


if __name__ == "__main__":
    run(main)
