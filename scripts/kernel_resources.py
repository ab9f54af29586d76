"""Registers, spills and shared memory of the attention kernels, compiled for absent GPUs.

    python scripts/kernel_resources.py                              # tables of serving sizes
    python scripts/kernel_resources.py --covering --output X.json   # and calls of every kind

The calls are those of `pallas_kernels/paged_attention/gpu_cases.py`; how many programs an SM holds
at once is computed. Needs the compilers of the `aot` extra.
"""

import argparse
import dataclasses
import datetime
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from engine.cli import run
from pallas_kernels.chips import Chip, chip
from pallas_kernels.paged_attention import IMPLEMENTATIONS, gpu_mosaic_sizes
from pallas_kernels.paged_attention.gpu_cases import SERVING, covering
from pallas_kernels.paged_attention.gpu_triton_sizes import TAKEN_BYTES
from pallas_kernels.paged_attention.spec import KernelSpec
from sharding.attention_programs import kernels_of_calls
from sharding.kernel_reports import GpuKernel

TARGETS = ("a100", "l4", "h100", "b200")
SM_REGISTERS = 65_536  # of every GPU of the chip table
# Calls that one child compiles; it cannot tell the kernels of two Mosaic calls apart.
AT_ONCE = {"gpu_triton": 48, "gpu_mosaic": 1}
CALL = (
    *("num_slots", "num_heads", "num_kv_heads", "head_dim", "page_size", "max_q_len"),
    *("window", "softcap", "sinks", "q_dtype", "kv_dtype"),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument("--covering", action="store_true", help="takes minutes per target")
    parser.add_argument("--output", type=Path, help="a JSON file for all rows")
    return parser.parse_args()


def compile_calls(impl: str, target: str, specs: Sequence[KernelSpec]) -> list[dict]:
    """A row for each of the calls that the implementation takes there."""
    each, at_once = chip(target), AT_ONCE[impl]
    taken = [spec for spec in specs if IMPLEMENTATIONS[impl].supports(spec, each) is None]
    rows = []
    for i in tqdm(range(0, len(taken), at_once), f"{impl}, {target}"):
        part = taken[i : i + at_once]
        for spec, kernels in zip(part, kernels_of_calls(part, target, impl), strict=True):
            rows.append(
                {
                    "target": target,
                    "impl": impl,
                    "call": {name: getattr(spec, name) for name in CALL},
                    **(rings(spec, each) if impl == "gpu_mosaic" else {}),
                    "kernels": [facts(kernel, each) for kernel in kernels],
                }
            )
    return rows


def facts(kernel: GpuKernel, each: Chip) -> dict:
    """The report, and how many programs an SM holds by registers and by shared memory. A kernel of
    Mosaic's is one per SM, and XLA does not know its threads."""
    found = dataclasses.asdict(kernel) | {"name": kernel.name.split("_")[0]}
    if kernel.threads is None:
        return found
    by_registers = SM_REGISTERS // (-(-kernel.registers // 8) * 8 * kernel.threads)
    by_memory = each.shared_memory_sm_bytes // (kernel.shared_bytes + TAKEN_BYTES)
    return found | {"programs_per_sm": min(by_registers, by_memory)}


def rings(spec: KernelSpec, each: Chip) -> dict:
    sizes = gpu_mosaic_sizes.default_sizes(spec, each)
    shared_bytes = gpu_mosaic_sizes.shared_bytes(spec, sizes)
    return {"rings": sizes.streams, "buffers": sizes.stages, "computed_shared_bytes": shared_bytes}


def triton_table(rows: list[dict], targets: Sequence[str]) -> str:
    """Registers, shared memory, programs per SM: of attention by call, of the kernel for many new
    tokens where there is one, and of `combine` over all of them."""
    attention, combine = {}, {target: [] for target in targets}
    for row in rows:
        *_, widest, last = row["kernels"]
        combine[row["target"]].append(last)
        cells = attention.setdefault(call_name(row["call"]), {})
        cells[row["target"]] = cell([widest])
    lines = [
        [name, *(cells.get(t, "refused") for t in targets)] for name, cells in attention.items()
    ]
    lines.append(["`combine`", *(cell(combine[target]) for target in targets)])
    return table(["heads of, new tokens", *targets], lines)


def cell(kernels: list[dict]) -> str:
    def between(key: str) -> str:
        low, high = (f"{f(kernel[key] for kernel in kernels):,}" for f in (min, max))
        return low if low == high else f"{low}-{high}"

    return " / ".join(map(between, ("registers", "shared_bytes", "programs_per_sm")))


def mosaic_table(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        attention = next(k for k in row["kernels"] if k["name"] == "attention")
        ring = f"{row['rings']} x {row['buffers']}"
        memory = f"{row['computed_shared_bytes']:,}"
        lines.append([call_name(row["call"]), attention["registers"], memory, ring])
    return table(["heads of, new tokens", "registers", "shared memory", "rings x buffers"], lines)


def call_name(call: dict) -> str:
    pages = "" if call["kv_dtype"] == call["q_dtype"] else f", {call['kv_dtype']} pages"
    return f"{call['head_dim']}, {call['max_q_len']}{pages}"


def table(header: list[str], lines: list[list]) -> str:
    """With an empty column for what a GPU would show."""
    cells = [[*header, "GB/s, measured"], ["---"] * (len(header) + 1), *([*x, ""] for x in lines)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in cells)


def main() -> None:
    args = parse()
    if args.output and not args.output.resolve().parent.is_dir():
        raise ValueError(f"--output {args.output}: there is no such directory, make it first")
    serving = {
        impl: [row for target in args.target for row in compile_calls(impl, target, SERVING)]
        for impl in AT_ONCE
    }
    print(triton_table(serving["gpu_triton"], args.target), end="\n\n")
    print(mosaic_table(serving["gpu_mosaic"]), end="\n\n")
    rows = [row for of_impl in serving.values() for row in of_impl]
    if args.covering:
        for target in args.target:
            rows += compile_calls("gpu_triton", target, covering(chip(target)))
    spilling = [row for row in rows if any(k["spill_bytes"] for k in row["kernels"])]
    print(f"{len(rows)} calls, {len(spilling)} of them with kernels that spill")
    for row in spilling:
        print(json.dumps(row))
    if args.output:
        about = {
            "benchmark": "kernel_resources",
            "label": "compiled for",
            "jax": version("jax"),
            "date": datetime.date.today().isoformat(),
        }
        lines = ",\n".join(json.dumps(row) for row in rows)
        args.output.write_text(json.dumps(about)[:-1] + f', "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    run(main)
