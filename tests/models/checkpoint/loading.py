"""Load a model in a process of its own and print what it cost, as JSON.

    python -m tests.models.checkpoint.loading PATH DTYPE

`peak_bytes` and `left_bytes` are resident memory beyond that of the interpreter with its libraries.
"""

import json
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint  # noqa: F401  (loading imports it when it is needed)
import psutil

from models.checkpoint.load import load_model
from models.model import declare
from models.params import size_bytes


def _peak_bytes() -> int:
    """Largest resident memory so far. Not getrusage's, which begins with the parent process's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    path, dtype = sys.argv[1:]
    jnp.zeros(8).block_until_ready()
    base_bytes = psutil.Process().memory_info().rss
    start = time.perf_counter()
    config, params = load_model(path, dtype)
    load_s = time.perf_counter() - start
    peak_bytes = _peak_bytes()
    print(
        json.dumps(
            {
                "load_s": load_s,
                "peak_bytes": peak_bytes - base_bytes,
                "left_bytes": psutil.Process().memory_info().rss - base_bytes,
                "float32_bytes": size_bytes(declare(config), "float32"),
            }
        )
    )
    del params


main()
