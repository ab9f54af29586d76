"""Rows of bench_throughput.py as Markdown tables and as a picture."""

from pathlib import Path


def tables(rows: list[dict]) -> str:
    render = {"decode": _decode, "serving": _serving, "prefix": _prefix}
    found = []
    for part, table in render.items():
        mine = [row for row in rows if row["part"] == part]
        if mine:
            found.append(f"{table(mine)}\n\n{_machine(mine)}")
    return "\n\n".join(found)


def _table(header: list[str], lines: list[list]) -> str:
    cells = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in cells)


def _machine(rows: list[dict]) -> str:
    seen = {
        "Measured on {cores} cores ({cpu}), Python {python}, jax {jax}, {date}, commit "
        "{commit}.".format(**row)
        for row in rows
    }
    return " ".join(sorted(seen))


def _decode(rows: list[dict]) -> str:
    header = ["tokens/s", "float32", "bfloat16", "transformers float32", "bfloat16"]
    header += ["vLLM float32, scaled", "bfloat16", "best / best vLLM", "goal"]
    lines = []
    for row in rows:
        ours = row["tok_per_s"]
        line = [row["name"], ours["float32"], ours["bfloat16"]]
        for other in ("hf_tok_per_s", "vllm_scaled_tok_per_s"):
            line += [row[other][dtype] for dtype in ours] if other in row else ["-", "-"]
        lines.append([*line, row.get("best_over_vllm", "-"), row["goal_over_vllm"]])
    return _table(header, lines)


def _serving(rows: list[dict]) -> str:
    header = ["", "rows", "cache tokens", "requests/s", "output tok/s", "x static 8"]
    header += [
        "TTFT s P50 / P95",
        "TPOT ms P50 / P95",
        "running",
        "cache held",
        "waste inside pages",
    ]
    header += ["cache in use", "preempted"]
    first = next((row for row in rows if row["name"] == "static 8"), None)
    lines = []
    for row in rows:
        ratio = row["output_tok_per_s"] / first["output_tok_per_s"] if first else None
        held, waste = row["kv_held"], row["kv_waste"]
        lines.append(
            [
                row["name"],
                row["max_num_seqs"],
                f"{(row['num_pages'] - 1) * row['page_size']:,}",
                f"{row['requests_per_s']:.2f}",
                row["output_tok_per_s"],
                "-" if ratio is None else f"{ratio:.2f}",
                f"{row['ttft_s']['p50']:.1f} / {row['ttft_s']['p95']:.1f}",
                f"{row['tpot_s']['p50'] * 1e3:.0f} / {row['tpot_s']['p95'] * 1e3:.0f}",
                f"{row['running']:.1f}",
                *map(_percent, (held, waste, held * (1 - waste))),
                row["preemptions"],
            ]
        )
    return _table(header, lines)


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _prefix(rows: list[dict]) -> str:
    header = ["prefix cache", "prompt tokens", "computed", "share", "TTFT s mean", "share", "P95"]
    plain = next((row for row in rows if row["name"] == "without"), rows[0])
    lines = [
        [
            row["name"],
            row["prompt_tokens"],
            row["computed_tokens"],
            _percent(row["computed_tokens"] / plain["computed_tokens"]),
            row["ttft_s"]["mean"],
            _percent(row["ttft_s"]["mean"] / plain["ttft_s"]["mean"]),
            row["ttft_s"]["p95"],
        ]
        for row in rows
    ]
    return _table(header, lines)


def draw(rows: list[dict], path: Path) -> None:
    """Output tokens per second and the share of the cache that holds tokens, per way of serving."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('a picture needs matplotlib: pip install -e ".[plots]"') from error
    rows = [row for row in rows if row["part"] == "serving"]
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row["name"] for row in rows]
    left.barh(names, [row["output_tok_per_s"] for row in rows], color="#3b6ea5")
    left.set_xlabel("output tokens / s")
    left.invert_yaxis()
    held = [row["kv_held"] for row in rows]
    used = [row["kv_held"] * (1 - row["kv_waste"]) for row in rows]
    right.barh(names, [100 * x for x in held], color="#d9d9d9", label="held")
    right.barh(names, [100 * x for x in used], color="#3b6ea5", label="holds tokens")
    right.set_xlabel("% of the cache")
    right.set_xlim(0, 100)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
