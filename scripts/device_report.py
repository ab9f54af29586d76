"""The tables of a device check, in Markdown, from its report.

In: the report of `device_check.py`, whose parts may have failed or hold only some of their rows.
Out: the text of a page; a table without rows is left out.
"""

from collections.abc import Iterable


def table(head: Iterable[str], rows: list[Iterable[str]]) -> str:
    if not rows:
        return ""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def checks(rows: list[dict]) -> str:
    """Per implementation what was checked, and each check that failed."""
    lines = []
    rows = [row for row in rows if "check" in row]
    for impl in dict.fromkeys(row["impl"] for row in rows):
        mine = [row for row in rows if row["impl"] == impl]
        refused = sum("refused" in row for row in mine)
        bad = [row for row in mine if not row["ok"]]
        worst = max((row["excess"] for row in mine if row["ok"] and "excess" in row), default=0)
        counts = (len(mine) - refused - len(bad), len(bad), refused)
        lines.append([impl, *map(str, counts), f"{worst:.2f}"])
    failures = [
        [row["check"], row["impl"], str(row.get("failed", f"{row.get('excess')} tolerances"))]
        for row in rows
        if not row["ok"]
    ]
    counted = table(("kernel", "right", "wrong", "not taken", "worst error, tolerances"), lines)
    return counted + ("\n" if failures else "") + table(("failed", "kernel", "how"), failures)


def attention(rows: list[dict]) -> str:
    """A line per case and kernel; `over jax` is the time of jax's own kernel over this one's."""
    lines = []
    for row in (row for row in rows if "kernels" in row):
        theirs = row["kernels"].get("jax", {}).get("median_us")
        for name, figures in row["kernels"].items():
            lines.append(
                [
                    row["case"],
                    name,
                    f"{figures['median_us']:.1f}",
                    f"{figures['gb_per_s']:.0f}",
                    percent(figures["share_of_bound"]),
                    percent(figures["share_of_peak"]),
                    percent(figures["share_of_copy"]),
                    f"{theirs / figures['median_us']:.2f}" if theirs else "",
                ]
            )
        lines += [[row["case"], name, "failed"] + [""] * 5 for name in row["failed"]]
    head = ("case", "kernel", "median us", "GB/s", "of bound", "of peak", "of copy", "over jax")
    return table(head, lines)


def decode(rows: list[dict]) -> str:
    lines = [
        [
            str(row["batch"]),
            ", ".join(row["attention"]),
            f"{row['step_ms']:.2f}",
            f"{row['tok_per_s']:.0f}",
            f"{row['gb_per_s']:.0f}",
            percent(row["share_of_peak"]),
            percent(row["share_of_copy"]),
            f"{row['compile_s']:.0f}",
        ]
        for row in rows
        if "batch" in row
    ]
    head = ("batch", "attention", "step ms", "tok/s", "GB/s", "of peak", "of copy", "compile s")
    return table(head, lines)


TABLES = {"kernels": checks, "attention": attention, "decode": decode}


def markdown(report: dict) -> str:
    parts = [
        [p["name"], "yes" if p["ok"] else "no", f"{p['seconds']:.0f}", p["reason"] or ""]
        for p in report["parts"]
    ]
    rows, peak = [row for part in report["parts"] for row in part["rows"]], report["peak_gb_per_s"]
    copies = [row["copy_gb_per_s"] for row in rows if "copy_gb_per_s" in row]
    facts = [
        f"jax {report['jax']}, Python {report['python']}",
        f"commit {report['commit']}" if report["commit"] else "",
        f"memory {peak:.0f} GB/s as published" if peak else "",
        f"copy {max(copies):.0f} GB/s in the same run" if copies else "",
    ]
    pieces = [
        f"# {report['device']}, {report['date']}, {report['label']}\n",
        "; ".join(filter(None, facts)) + ".\n",
        table(("part", "ended well", "seconds", "what is missing"), parts),
    ]
    for part in report["parts"]:
        if body := TABLES[part["name"]](part["rows"]):
            pieces += [f"## {part['name']}\n", f"`{part['command']}`\n", body]
            not_run = [name for row in part["rows"] for name in row.get("not_run", ())]
            pieces += [f"Not run for lack of time: {', '.join(not_run)}.\n"] if not_run else []
    return "\n".join(pieces)
