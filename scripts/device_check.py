"""Check and time this engine on the attached accelerator, and write one report.

Parts, each a process with a time limit of its own, in this order:
  kernels     the attention kernels compiled for the chip, against the float64 oracle
  attention   bandwidth of the kernels at serving sizes, beside public kernels and a plain copy
  decode      an 8B model with random weights through the engine, at batch 1, 8 and 64

The first two are told their limit, begin nothing that would end after it and name what they left
out, the least telling ones, as `not_run`. A part prints a JSON line as soon as it has a result, so
that one which fails or runs out of time loses only what is left of it. `device_CHIP_DATE.json`
holds everything, `.md` the tables. Exit code: 0 if all parts ended well, 1 if not, 2 where no
accelerator of the chip table is attached.
`scripts/device_check.sh` finds a Python to run this with.

This process never touches the device: an accelerator's memory belongs to one process at a time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from device_report import markdown

from pallas_kernels.chips import Chip, chip_of_device

ROOT = Path(__file__).parent.parent
FACTS_LIMIT_S = 40
SPARE_S = 20  # of a part's limit, for what its own clock does not see: starting and ending
TAIL = 2000  # characters of a failed part's log that the report keeps


@dataclass(frozen=True)
class Part:
    """`arguments` after the program; of them `{kind}` is gpu or tpu, `{seconds}` what the part may
    spend. `rehearsal` replaces them, for a run at toy size on a CPU."""

    name: str
    limit_s: float
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    rehearsal: tuple[str, ...]


PARTS = (
    Part(
        "kernels",
        150,
        ("-m", "tests.pallas_kernels.on_device"),
        ("--seconds", "{seconds:g}"),
        ("--interpret", "--only", "phi_3_mini_decode bfloat16"),
    ),
    Part(
        "attention",
        200,
        ("scripts/bench_kernels.py", "--target"),
        ("{kind}", "--seconds", "{seconds:g}"),
        (
            *("gpu", "--interpret", "--only", "qwen_2_5_0_5b_decode", "--slots", "2"),
            *("--context", "32", "--chunk", "16", "--page-size", "16", "--repeats", "1"),
        ),
    ),
    Part(
        "decode",
        150,
        ("scripts/bench_device_decode.py", "--model"),
        ("llama-3.1-8b",),
        (
            *("smollm2-135m", "--layers", "1", "--batches", "2"),
            *("--prompt-tokens", "8", "--new-tokens", "2", "10", "--repeats", "1"),
        ),
    ),
)  # together with the facts 9 minutes


def call(arguments: Sequence[str], limit_s: float) -> tuple[int | None, str, str]:
    """Exit code (None: out of time), standard output and standard error of a Python child."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            code = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        for file in (out, err):
            file.seek(0)
        return code, out.read(), err.read()


def json_lines(text: str) -> list[dict]:
    """The objects among the lines; a line that was cut off when time ran out is none."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "it printed nothing")


def run_part(part: Part, kind: str, limit_s: float, rehearse: bool) -> dict:
    """What the report holds of a part; `rows` are its JSON lines but the summary at the end."""
    facts = {"kind": kind, "seconds": max(0, limit_s - SPARE_S)}
    chosen = part.rehearsal if rehearse else (a.format(**facts) for a in part.arguments)
    arguments = (*part.program, *chosen)
    start = time.perf_counter()
    code, out, err = call(arguments, limit_s)
    rows = [line for line in json_lines(out) if "rows" not in line]
    not_run = [name for row in rows for name in row.get("not_run", ())]
    reason = f"{len(not_run)} not run for lack of time" if not_run else None
    if code is None:
        reason = f"stopped after {limit_s:g} s; what it had found by then is here"
    elif code:
        failed = sum(row.get("ok") is False for row in rows)
        reason = f"{failed} checks failed" if failed else f"exit code {code}: {last_line(err)}"
    return {
        "name": part.name,
        "command": " ".join(("python", *arguments)),
        "ok": code == 0,
        "reason": reason,
        "seconds": round(time.perf_counter() - start, 1),
        "limit_s": limit_s,
        "rows": rows,
        "log": "" if code == 0 else err[-TAIL:],
    }


def machine() -> dict:
    code, out, err = call(("scripts/machine_facts.py",), FACTS_LIMIT_S)
    if code is None:
        raise TimeoutError(f"jax did not find its devices within {FACTS_LIMIT_S} s")
    if code:
        raise OSError(f"jax finds no device: exit code {code}: {last_line(err)}")
    return json_lines(out)[-1]


def limits_of(overrides: Sequence[str]) -> dict[str, float]:
    limits = {part.name: part.limit_s for part in PARTS}
    for override in overrides:
        name, _, seconds = override.partition("=")
        if name not in limits or not seconds.replace(".", "", 1).isdigit():
            raise ValueError(
                f"--limit {override!r}: must be PART=SECONDS with PART one of {', '.join(limits)}"
            )
        limits[name] = float(seconds)
    return limits


def attached(facts: dict) -> Chip:
    chip = chip_of_device(facts["device"])
    if chip is None:
        raise ValueError(
            f"no accelerator of the chip table (pallas_kernels/chips.py) is attached: jax sees "
            f"{facts['device']!r}"
        )
    return chip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="PART=SECONDS", help="time limit of a part"
    )
    parser.add_argument("--rehearse", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    limits, facts = limits_of(args.limit), machine()
    chip = None if args.rehearse else attached(facts)
    name = chip.name if chip else "rehearsal"
    args.output.mkdir(parents=True, exist_ok=True)
    stem = args.output / f"device_{name}_{facts['date']}"
    report = {
        "benchmark": "device_check",
        "label": "rehearsed" if args.rehearse else "measured",
        "chip": name,
        **facts,
        "peak_gb_per_s": chip.device_hbm_bytes_per_s / 1e9 if chip else None,
        "parts": [],
    }
    for part in PARTS:
        print(f"==> {part.name}, up to {limits[part.name]:g} s", file=sys.stderr)
        kind = chip.kind if chip else "gpu"
        report["parts"].append(run_part(part, kind, limits[part.name], args.rehearse))
        # Written after each part: an interrupted check keeps what it has.
        stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(report))
    print(stem.with_suffix(".md").read_text())
    print(f"report: {stem}.json and .md", file=sys.stderr)
    return 0 if all(part["ok"] for part in report["parts"]) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
