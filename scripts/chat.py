"""Talk to a model: `python scripts/chat.py --model smollm2-135m`. /reset forgets, /quit leaves.

Each turn feeds only what is new: the cache keeps the conversation so far.
"""

import argparse
import sys
import time

from engine.cli import add_model_arguments, open_model, run
from engine.llm import LLM
from engine.sampling_params import SamplingParams


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, help="default: the model's, 8192 at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page-size", type=int, help="default: 64 on a TPU, else 16")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
    )
    model = open_model(args)
    llm = LLM.from_params(
        model.config,
        model.params,
        model.tokenizer,
        max_num_seqs=1,
        max_model_len=(
            min(model.config.max_position, 8192)
            if args.max_model_len is None
            else args.max_model_len
        ),
        page_size=args.page_size,
        steps_per_dispatch=8,  # text comes in small pieces
    )
    print("preparing programs (compiled once, then kept)", file=sys.stderr)
    llm.engine.compile()
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    print(f"{args.model}, {model.dtype.name}; /reset forgets, /quit leaves", file=sys.stderr)
    while True:
        try:
            text = read_line()
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
            answer = reply(llm, messages, params)
        except ValueError as error:
            messages.pop()
            print(f"error: {error} (/reset starts afresh)", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": answer})


def read_line() -> str:
    """A line as bytes, so that one that is not UTF-8 costs no other; edited where there is a
    terminal."""
    if sys.stdin is None:
        raise EOFError
    if sys.stdin.isatty():
        return input("> ")
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode("utf-8").rstrip("\r\n")


def reply(llm: LLM, messages: list, params: SamplingParams) -> str:
    """Stream one answer; an interrupt keeps what was said so far."""
    prompt = llm.tokenizer.encode_chat(messages)
    before = llm.engine.counters()["prefix_hit_tokens"]
    start, text, count, compiled_s = time.perf_counter(), "", 0, llm.engine.compile_s
    try:
        for output, deltas in llm.stream([prompt], params):
            text, count = output.outputs[0].text, len(output.outputs[0].token_ids)
            print(deltas[0], end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [interrupted]")
    reused = llm.engine.counters()["prefix_hit_tokens"] - before
    rate = count / (time.perf_counter() - start - (llm.engine.compile_s - compiled_s))
    print(
        f"[{len(prompt)} prompt tokens, {reused} from the cache; {count} tokens, {rate:.1f} tok/s]",
        file=sys.stderr,
    )
    return text


if __name__ == "__main__":
    run(main)
