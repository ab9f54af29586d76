"""What a model's engine needs on chips that are not here: compile its programs and print a table.

    python scripts/aot_report.py --model llama-3.1-8b --target v6e:2x2 --batch 64 --context 8192

Every figure is the compiler's (compiled for the target) or arithmetic on it (computed); nothing is
run. Needs the compilers of the `aot` extra.
"""

import argparse
import dataclasses
import json
import sys
from importlib.metadata import version

from engine.cli import run
from models.presets import preset
from pallas_kernels.paged_attention.layout import default_page_size
from sharding.aot import Compiled, compile_for
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
    parser.add_argument("--kernels", action="store_true", help="per-kernel facts too (slow on TPU)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser.parse_args()


def widths(token_budget: int) -> dict[str, int]:
    """The engine's programs: a narrow one when few prompt tokens wait, and the full one."""
    if token_budget < 128:
        return {"mixed": token_budget}
    return {"decode": token_budget // 8, "mixed": token_budget}


def compile_programs(args: argparse.Namespace) -> dict[str, Compiled]:
    pages_per_row = -(-args.context // args.page_size)
    sizes = {
        "max_num_seqs": args.batch,
        "max_model_len": args.context,
        "num_pages": args.batch * pages_per_row + 1,
        "page_size": args.page_size,
        "token_budget": args.token_budget,
    }
    found = {}
    for name, width in widths(args.token_budget).items():
        print(f"compiling {args.model} for {args.target}, {name} program ...", file=sys.stderr)
        found[name] = compile_for(
            "engine.step_programs:network_step",
            {"model": args.model, "dtype": args.dtype, "width": width, **sizes},
            args.target,
            kernels=args.kernels,
        )
    return found


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

    def kinds(p: Compiled) -> str:
        return "-" if p.error else ", ".join(f"{n} {k}" for k, n in p.collectives.items()) or "none"

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
        ("collectives, once a loop", each(kinds)),
        ("device operations", each(lambda p: str(p.main.count()) if p.main else "-")),
        ("compile time", each(lambda p: f"{p.compile_s:.0f} s")),
    ]


def print_table(args: argparse.Namespace, target: Target, programs: dict[str, Compiled]) -> None:
    devices = next(iter(programs.values())).num_devices
    print(
        f"{args.model}, {args.dtype}, batch {args.batch}, context {args.context}: compiled for "
        f"{args.target} ({devices} devices, tensor parallel) with jax {version('jax')}; "
        "bytes are per device\n"
    )
    columns = [f"{name} ({width})" for name, width in widths(args.token_budget).items()]
    table = [("program (prefill width)", columns), *rows(programs, target)]
    first = max(len(label) for label, _ in table)
    rest = [max(len(cells[i]) for _, cells in table) for i in range(len(columns))]
    for label, cells in table:
        padded = (cell.rjust(width) for cell, width in zip(cells, rest, strict=True))
        print(f"{label:<{first}}  " + "  ".join(padded))
    for name, program in programs.items():
        for note in program.notes:
            print(f"\n{name} program: {note}")
        if program.error:
            print(f"\nthe compiler refused the {name} program:\n{program.error[:1500]}")
        print_kernels(args, name, program, target)


def print_kernels(args: argparse.Namespace, name: str, program: Compiled, target: Target) -> None:
    if not program.kernels:
        return
    print(f"\nkernels of the {name} program")
    for kernel in program.kernels:
        facts = dataclasses.asdict(kernel)
        label = facts.pop("name")
        print(f"  {label:<40} " + ", ".join(f"{k} {v}" for k, v in facts.items()))
    if target.chip and target.chip.kind == "tpu":
        layer_bytes = program.part_bytes["cache"] / len(preset(args.model).layers)
        cycles = target.chip.hbm_cycles(layer_bytes)
        print(f"  one layer's whole cache takes {cycles:,.0f} cycles of the memory (computed)")


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


def as_json(args: argparse.Namespace, target: Target, programs: dict[str, Compiled]) -> str:
    found = {}
    for name, program in programs.items():
        facts = {f.name: getattr(program, f.name) for f in dataclasses.fields(program)}
        facts["device_operations"] = program.main.count() if program.main else None
        del facts["main"]
        facts["watched_copies"] = len(program.watched_copies)
        facts["kernels"] = [dataclasses.asdict(kernel) for kernel in program.kernels]
        found[name] = facts | {"peak_bytes": program.peak_bytes, "fits": fits(program, target)}
    return json.dumps(
        {
            "benchmark": "aot_report",
            "label": "compiled for",
            "jax": version("jax"),
            **{k: v for k, v in vars(args).items() if k != "json"},
            "programs": found,
        }
    )


def main() -> None:
    args = parse()
    target = check(args)
    programs = compile_programs(args)
    if args.json:
        print(as_json(args, target, programs))
    else:
        print_table(args, target, programs)


if __name__ == "__main__":
    run(main)
