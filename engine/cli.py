"""What the scripts share: naming and loading a model, reading prompts, the error exit."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from engine.platform import enable_compilation_cache, resolve_dtype
from engine.tokenizer import Tokenizer, load_tokenizer
from models.checkpoint.load import load_model, read_config
from models.checkpoint.registry import resolve
from models.config import ModelConfig
from models.model import ModelParams


@dataclass(frozen=True)
class FoundModel:
    """A model before its weights are read: what requests and sizes can be checked against."""

    path: Path
    dtype: jnp.dtype
    config: ModelConfig
    tokenizer: Tokenizer
    found_s: float

    def load(self) -> "LoadedModel":
        start = time.perf_counter()
        config, params = load_model(self.path, self.dtype)
        load_s = self.found_s + time.perf_counter() - start
        return LoadedModel(config, params, self.tokenizer, load_s)


@dataclass(frozen=True)
class LoadedModel:
    config: ModelConfig
    params: ModelParams
    tokenizer: Tokenizer
    load_s: float

    @property
    def dtype(self) -> jnp.dtype:
        return self.params.embed_VD.dtype


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help="short name (smollm2-135m, gemma3-270m), directory, .gguf file or Hugging Face id",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="do not keep compiled programs in the user cache directory",
    )


def find_model(args: argparse.Namespace) -> FoundModel:
    start = time.perf_counter()
    dtype = resolve_dtype(args.dtype)
    if not args.no_compilation_cache:
        enable_compilation_cache()
    path = resolve(args.model)
    config, tokenizer = read_config(path), load_tokenizer(path)
    return FoundModel(path, dtype, config, tokenizer, time.perf_counter() - start)


def read_prompts(texts: Sequence[str], files: Sequence[str], lines: bool) -> list[str]:
    """Prompts of the command line, then of each file (`-` is standard input).

    A file is one prompt, or with `lines` one prompt per line that is not blank. With neither texts
    nor files, standard input is read unless it is a terminal.
    """
    files = list(files)
    if not texts and not files:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("no prompt: give one as an argument, with --file or on standard input")
        files = ["-"]
    if lines and not files:
        raise ValueError("--lines is for files and standard input; the prompts are arguments")
    prompts = list(texts)
    for name in files:
        if name == "-" and sys.stdin is None:
            raise ValueError("standard input is closed; give the prompt as an argument or a file")
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        source = "standard input" if name == "-" else name
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{source} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; "
                "convert it first"
            ) from error
        if lines:
            found = [line.rstrip("\r") for line in text.split("\n") if line.strip()]
            if not found:
                raise ValueError(f"{source} holds no prompt: every line is blank")
            prompts += found
        else:
            prompts.append(text.removesuffix("\n"))
    for i, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ValueError(f"prompt {i} is empty; give at least one character")
    return prompts


def run(main: Callable[[], None]) -> None:
    """Call `main`; bad input becomes one line on standard error and exit code 2.

    A reader that closes our output ends us quietly, as it ends other programs.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    try:
        main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at exit
        sys.exit(141)
    except (ValueError, OSError) as error:
        sys.exit(_fail(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2
