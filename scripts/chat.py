"""Talk to a model: `python scripts/chat.py --model smollm2-135m`. /reset forgets, /quit leaves.

Each turn feeds only what is new: the cache keeps the conversation so far.
"""

import argparse
import sys
import time
from dataclasses import replace

from engine.bounds import check_request
from engine.cli import FoundModel, add_model_arguments, find_model, run
from engine.engine_args import EngineArgs
from engine.llm import LLM
from engine.outputs import CompletionOutput
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
    parser.add_argument("--num-pages", type=int, help="pages in the cache (default: as needed)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
    )
    sizes = EngineArgs(
        max_num_seqs=1,
        max_model_len=args.max_model_len,
        num_pages=args.num_pages,
        page_size=args.page_size,
        steps_per_dispatch=8,  # text comes in small pieces
    )
    opening = [{"role": "system", "content": args.system}] if args.system else []
    found = find_model(args)
    if sizes.max_model_len is None:
        sizes = replace(sizes, max_model_len=min(found.config.max_position, 8192))
    check_opening(found, sizes, opening, params)
    model = found.load()
    llm = LLM.from_params(model.config, model.params, model.tokenizer, **vars(sizes))
    print("preparing programs (compiled once, then kept)", file=sys.stderr)
    llm.engine.compile()
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


def check_opening(
    found: FoundModel, sizes: EngineArgs, opening: list, params: SamplingParams
) -> None:
    """Refuse, before weights are read, what leaves no room for the shortest first message."""
    config = sizes.engine_config(found.config, found.dtype)
    prompt = found.tokenizer.encode_chat([*opening, {"role": "user", "content": "?"}])
    try:
        check_request(config, sizes.sampling_limits(found.config), prompt, params)
    except ValueError as error:
        raise ValueError(f"no message fits, not even '?': {error}") from error


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
    """Stream one answer; an interrupt keeps what was said so far. ValueError if it fails."""
    prompt = llm.tokenizer.encode_chat(messages)
    before = llm.engine.counters()["prefix_hit_tokens"]
    start, compiled_s = time.perf_counter(), llm.engine.compile_s
    answer = CompletionOutput(0)
    try:
        for output, deltas in llm.stream([prompt], params):
            answer = output.outputs[0]
            print(deltas[0], end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [interrupted]")
    if answer.error:
        raise ValueError(answer.error)
    count = len(answer.token_ids)
    reused = llm.engine.counters()["prefix_hit_tokens"] - before
    rate = count / (time.perf_counter() - start - (llm.engine.compile_s - compiled_s))
    print(
        f"[{len(prompt)} prompt tokens, {reused} from the cache; {count} tokens, {rate:.1f} tok/s]",
        file=sys.stderr,
    )
    return answer.text


if __name__ == "__main__":
    run(main)
