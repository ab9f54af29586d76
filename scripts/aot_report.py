"""What a model's engine needs on chips that are not here: compile its programs, print a table.

    python scripts/aot_report.py --model llama-3.1-8b --target v6e:2x2 --batch 64 --context 8192

Under the table stands each attention kernel, compiled by itself: on a TPU the instruction bundles
of a block of keys beside the cycles in which memory and matrix units do their part, on a GPU
registers and spills. Every figure is the compiler's (compiled for the target) or arithmetic on it
(computed); nothing is run. Needs the compilers of the `aot` extra.
"""

import argparse
import dataclasses
import json
import sys
from functools import partial
from importlib.metadata import version

from engine.cli import run
from engine.config import program_budgets
from engine.step_programs import kernel_calls
from models.presets import preset
from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.layout import default_page_size
from pallas_kernels.paged_attention.spec import KernelSpec
from pallas_kernels.paged_attention.tpu_sizes import default_sizes, unrolled
from sharding.aot import Compiled, compile_for
from sharding.kernel_reports import GpuKernel, TpuKernel
from sharding.targets import Target, parse_target

GIB = 2**30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a preset of models/presets.py")
    parser.add_argument("--target", required=True, help="v6e:2x2, h100, h100:1x1x8, cpu, ...")
    parser.add_argument("--batch", type=int, default=64, help="rows that run at once")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each row at most")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--page-size", type=int, help="default: 64 on a TPU, else 16")
    parser.add_argument("--token-budget", type=int, default=512, help="width of the mixed program")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser.parse_args()


def widths(token_budget: int) -> dict[str, int]:
    """The narrowest of the engine's programs, for when few prompt tokens wait, and the full one."""
    narrowest, *others = program_budgets(token_budget)
    return {"decode": narrowest, "mixed": others[-1]} if others else {"mixed": narrowest}


def engine_of(args: argparse.Namespace, width: int) -> dict:
    """Arguments of `engine.step_programs`."""
    pages_per_row = -(-args.context // args.page_size)
    return {
        "model": args.model,
        "dtype": args.dtype,
        "width": width,
        "max_num_seqs": args.batch,
        "max_model_len": args.context,
        "num_pages": args.batch * pages_per_row + 1,
        "page_size": args.page_size,
        "token_budget": args.token_budget,
    }


def compile_programs(args: argparse.Namespace) -> dict[str, Compiled]:
    found = {}
    for name, width in widths(args.token_budget).items():
        print(f"compiling {args.model} for {args.target}, {name} program ...", file=sys.stderr)
        found[name] = compile_for(
            "engine.step_programs:network_step", engine_of(args, width), args.target
        )
    return found


def compile_kernels(args: argparse.Namespace, target: Target) -> dict[str, list[str]]:
    """Per attention call of one device a line for each of its kernels."""
    found = {}
    for spec in kernel_calls(
        **engine_of(args, args.token_budget), attached=target.chip, num_devices=target.num_devices
    ):
        window = "" if spec.window is None else f", window {spec.window}"
        label = (
            f"{spec.num_rows} new tokens, {spec.num_heads} query and {spec.num_kv_heads} KV heads "
            f"of {spec.head_dim}, at most {spec.max_q_len} a row{window}"
        )
        print(f"compiling attention of {label} ...", file=sys.stderr)
        compiled = compile_for(
            "sharding.attention_programs:attention_calls",
            {"specs": (spec,)},
            args.target,
            kernels=True,
        )
        describe = partial(tpu_line, spec, target.chip) if target.chip.kind == "tpu" else gpu_line
        found[label] = [describe(kernel) for kernel in compiled.kernels]
    return found


def tpu_line(spec: KernelSpec, chip: Chip, kernel: TpuKernel) -> str:
    """The kernels of a call differ in the new tokens of a tile, after which they are named. Inside
    of their loop over blocks is one over heads, or, where all heads are one stretch of code, only
    one that clears what stands beside a slot's keys."""
    sizes = next(s for s in default_sizes(spec, chip) if f"_q{s.queries}." in f"{kernel.name}.")
    of_block, *of_head = kernel.bundles_by_depth[1:3]
    loops = 0 if unrolled(spec, sizes) else spec.page_rows
    bundles = of_block + loops * sum(of_head)
    keys = sizes.pages * spec.page_size
    flops = 4 * sizes.queries * spec.num_heads * keys * spec.head_dim
    memory = chip.hbm_cycles(sizes.pages * spec.page_bytes)
    matmul = flops / (chip.bf16_flops_per_s / chip.devices) * chip.clock_hz
    return (
        f"{sizes.queries} new tokens by {keys} keys: {bundles} bundles, {memory:.0f} cycles of the "
        f"memory, {matmul:.0f} of the matrix units: {bundles / max(memory, matmul):.2f} of the more"
    )


def gpu_line(kernel: GpuKernel) -> str:
    facts = dataclasses.asdict(kernel)
    return f"{facts.pop('name')}: " + ", ".join(f"{k} {v}" for k, v in facts.items())


def fits(program: Compiled, target: Target) -> str:
    if program.error:
        return "no"
    if target.chip is None:
        return "-"
    return "yes" if program.peak_bytes <= target.chip.device_hbm_bytes else "no"


def rows(programs: dict[str, Compiled], target: Target) -> list[tuple[str, list[str]]]:
    def each(f) -> list[str]:
        return [f(p) for p in programs.values()]

    def size(value) -> list[str]:
        return each(lambda p: "-" if p.error else f"{value(p) / GIB:.3f} GiB")

    def of_cache(p: Compiled) -> str:
        return "-" if p.error else f"{p.temp_bytes / p.part_bytes['cache']:.1%}"

    def in_place(p: Compiled) -> str:
        return "-" if p.error else "yes" if p.alias_bytes >= p.part_bytes["cache"] else "no"

    memory = f" in {target.chip.device_hbm_bytes / GIB:.2f} GiB" if target.chip else ""
    return [
        (f"fits{memory}?", each(lambda p: fits(p, target))),
        ("parameters", each(lambda p: f"{p.part_bytes['parameters'] / GIB:.3f} GiB")),
        ("KV cache", each(lambda p: f"{p.part_bytes['cache'] / GIB:.3f} GiB")),
        ("all arguments", size(lambda p: p.argument_bytes)),
        ("temporaries", size(lambda p: p.temp_bytes)),
        ("  of the cache", each(of_cache)),
        ("code", size(lambda p: p.code_bytes)),
        ("needed at once", size(lambda p: p.peak_bytes)),
        ("cache updated in place", each(in_place)),
        ("copies of the cache", each(lambda p: "-" if p.error else str(len(p.watched_copies)))),
        ("collectives, once a loop", each(lambda p: str(sum(p.collectives.values())))),
        *(
            (f"  {kind}", each(lambda p, kind=kind: str(p.collectives.get(kind, 0))))
            for kind in sorted({kind for p in programs.values() for kind in p.collectives})
        ),
        ("device operations", each(lambda p: str(p.main.count()) if p.main else "-")),
        ("compile time", each(lambda p: f"{p.compile_s:.0f} s")),
    ]


def as_text(
    args: argparse.Namespace,
    target: Target,
    programs: dict[str, Compiled],
    kernels: dict[str, list[str]],
) -> str:
    devices = next(iter(programs.values())).num_devices
    lines = [
        f"{args.model}, {args.dtype}, batch {args.batch}, context {args.context}: compiled for "
        f"{args.target} ({devices} devices, tensor parallel) with jax {version('jax')}; "
        "bytes are per device\n"
    ]
    columns = [f"{name} ({width})" for name, width in widths(args.token_budget).items()]
    table = [("program (prefill width)", columns), *rows(programs, target)]
    first = max(len(label) for label, _ in table)
    rest = [max(len(cells[i]) for _, cells in table) for i in range(len(columns))]
    for label, cells in table:
        padded = (cell.rjust(width) for cell, width in zip(cells, rest, strict=True))
        lines.append(f"{label:<{first}}  " + "  ".join(padded))
    for name, program in programs.items():
        lines += [f"\n{name} program: {note}" for note in program.notes]
        if program.error:
            lines.append(f"\nthe compiler refused the {name} program:\n{program.error[:1500]}")
    for label, of_call in kernels.items():
        lines += [f"\nattention of {label}", *(f"  {line}" for line in of_call)]
    return "\n".join(lines)


def check(args: argparse.Namespace) -> Target:
    target, limit = parse_target(args.target), preset(args.model).max_position
    if not 1 <= args.context <= limit:
        raise ValueError(
            f"--context must be in 1 .. {limit} (the model's limit), got {args.context}"
        )
    if args.page_size is None:
        args.page_size = default_page_size(target.chip)
    for name in ("batch", "page_size", "token_budget"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least 1, got {getattr(args, name)}")
    return target


def as_json(
    args: argparse.Namespace,
    target: Target,
    programs: dict[str, Compiled],
    kernels: dict[str, list[str]],
) -> str:
    found = {}
    for name, program in programs.items():
        facts = {f.name: getattr(program, f.name) for f in dataclasses.fields(program)}
        facts["device_operations"] = program.main.count() if program.main else None
        del facts["main"]
        facts["watched_copies"] = len(program.watched_copies)
        del facts["kernels"]
        found[name] = facts | {"peak_bytes": program.peak_bytes, "fits": fits(program, target)}
    return json.dumps(
        {
            "benchmark": "aot_report",
            "label": "compiled for",
            "jax": version("jax"),
            **{k: v for k, v in vars(args).items() if k != "json"},
            "programs": found,
            "kernels": kernels,
        }
    )


def main() -> None:
    args = parse()
    target = check(args)
    programs, kernels = compile_programs(args), compile_kernels(args, target)
    show = as_json if args.json else as_text
    print(show(args, target, programs, kernels))


if __name__ == "__main__":
    run(main)
