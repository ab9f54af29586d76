"""Per-kernel facts that the compilers print: TPU instruction bundles, GPU registers and spills.

TPU: libtpu dumps, for every operation of the program, `*-NAME-*-final_bundles.txt` (one scheduled
bundle a line, `>` once per loop around it) and a summary of them. A bundle is one instruction word;
its issue takes a cycle if nothing stalls, so bundles bound the time from below and are no
measurement. GPU: ptxas, in its verbose mode, says for every entry function what it uses, and XLA's
list of what a program starts (`*thunk_sequence.txt` of its dump) says with how many threads and how
much shared memory.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TpuKernel:
    """`bundles_by_depth[d]`: scheduled bundles inside of d loops, branches not taken included. The
    grid of a kernel is its outermost loop."""

    name: str
    bundles: int
    bundles_by_depth: tuple[int, ...]


@dataclass(frozen=True)
class GpuKernel:
    """Per thread: registers, spilled bytes (stores and loads), stack. Per block: shared memory,
    what its launch asks for included, and threads. Where XLA does not launch it by itself, threads
    are None and shared memory is the static part."""

    name: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    threads: int | None


def tpu_kernels(dump: Path, names: set[str]) -> list[TpuKernel]:
    """Of the operations with these HLO names, from a libtpu dump directory."""
    found = []
    for path in sorted(dump.glob("*final_bundles.txt")):
        name = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", path.name)
        if name and name[1] in names:
            found.append(_bundles(name[1], path.read_text("utf-8", "replace")))
    return found


def _bundles(name: str, text: str) -> TpuKernel:
    depths = Counter(
        line.count(">") for line in re.findall(r"^\s*0x[0-9a-f]+\s+\w*\s*:([ >]*)\{", text, re.M)
    )
    by_depth = tuple(depths[d] for d in range(max(depths, default=-1) + 1))
    return TpuKernel(name, sum(by_depth), by_depth)


def _needs(kernel: GpuKernel) -> tuple[int, int, int]:
    return kernel.spill_bytes, kernel.stack_bytes, kernel.registers


def gpu_kernels(log: str, launches: str) -> list[GpuKernel]:
    """Of every entry function in a ptxas report: first those in `launches`, XLA's list of what the
    program starts, once for each start and in their order, then those that XLA does not launch."""
    starts = re.findall(
        r"(\S+) grid: \[[\d, ]+\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+) bytes",
        launches,
    )
    started = {name: (int(x) * int(y) * int(z), int(shared)) for name, x, y, z, shared in starts}
    found: dict[str, GpuKernel] = {}
    for block in log.split("Compiling entry function '")[1:]:
        name = block[: block.index("'")]
        used = re.search(r"Used (\d+) registers", block)
        if not used:
            continue
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", block)[:2]
        stack = re.search(r"(\d+) bytes stack frame", block)
        static = re.search(r"(\d+) bytes smem", block.split("Compile time")[0])
        threads, launched_bytes = started.get(name, (None, 0))
        kernel = GpuKernel(
            name=name,
            registers=int(used[1]),
            spill_bytes=sum(map(int, spills)),
            stack_bytes=int(stack[1]) if stack else 0,
            shared_bytes=(int(static[1]) if static else 0) + launched_bytes,
            threads=threads,
        )
        # Mosaic calls all of a function's kernels alike: the one that needs most stands for them.
        found[name] = max(found.get(name, kernel), kernel, key=_needs)
    launched = [found[name] for name, *_ in starts if name in found]
    return launched + [kernel for name, kernel in found.items() if name not in started]
