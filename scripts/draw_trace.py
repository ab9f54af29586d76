"""Draw what a record's rounds did: `python scripts/draw_trace.py RECORD --output schedule.svg`.

`schedule` shows each slot over the rounds, and below it the pages; `pages` shows each page of the
pool and who holds it. The rounds come from the scheduler itself, run again over the record's tokens
(`engine.trace`); no model is needed. Needs the extra `plots`.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby

try:
    import matplotlib
except ImportError:
    print('drawing needs matplotlib: pip install -e ".[plots]"', file=sys.stderr)
    sys.exit(2)
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from engine.cli import run
from engine.recording import Record, read_record
from engine.trace import Round, SlotRound, trace

INK, PAPER, GRID = "#1f2933", "#ffffff", "#e4e7eb"
KINDS = {  # colour, text colour, words
    "waiting": ("#eceff2", "#52606d", "waits"),
    "prefill": ("#f4a63b", INK, "prefill (tokens of the chunk)"),
    "decode": ("#3f7cac", "#ffffff", "decode"),
    "unbudgeted": ("#c9b6d8", INK, "no budget left this round"),
    "stalled": ("#9d7fb8", INK, "no page this round"),
    "preempted": ("#d1495b", "#ffffff", "preempted"),
}
SHARED, CACHED = "#1f2933", "#dfe3e8"
STYLE = {
    "font.size": 8,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "pallasite",  # the same record gives the same file
    "svg.fonttype": "path",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record")
    parser.add_argument("--output", required=True, help="an .svg, .pdf or .png file")
    parser.add_argument("--picture", choices=("schedule", "pages"), default="schedule")
    args = parser.parse_args()
    record = read_record(args.record)
    rounds = trace(record)
    if not rounds:
        raise ValueError(f"{args.record} holds no round")
    draw = draw_schedule if args.picture == "schedule" else draw_pages
    with matplotlib.rc_context(STYLE):
        figure = draw(record, rounds)
        metadata = {"Date": None} if args.output.endswith(".svg") else None
        figure.savefig(
            args.output, facecolor=PAPER, bbox_inches="tight", metadata=metadata, dpi=110
        )


def runs(keys: list) -> Iterator[tuple[object, int, int]]:
    """(key, first, count) of each run of equal keys; a key of None is left out."""
    for key, group in groupby(enumerate(keys), key=lambda item: item[1]):
        indices = [i for i, _ in group]
        if key is not None:
            yield key, indices[0], len(indices)


def width(rounds: list[Round]) -> float:
    """Inches; a round of a short run has room for the number of a chunk."""
    return min(max(0.12 * len(rounds), 9), 14)


# ---- slots over rounds ---------------------------------------------------------------------------


def draw_schedule(record: Record, rounds: list[Round]) -> Figure:
    used = sorted({s.slot for r in rounds for s in r.slots})
    figure = Figure(figsize=(width(rounds), 0.34 * len(used) + 2.9), layout="constrained")
    lanes, pages = figure.subplots(2, 1, sharex=True, height_ratios=[0.34 * len(used), 1.5])
    for lane, slot in enumerate(used):
        draw_lane(lanes, lane, [next((s for s in r.slots if s.slot == slot), None) for r in rounds])
    lanes.set_ylim(len(used) - 0.35, -0.65)
    lanes.set_yticks(range(len(used)), [f"slot {slot}" for slot in used])
    lanes.tick_params(left=False, bottom=False)
    lanes.spines[["left", "bottom"]].set_visible(False)
    kinds = {s.kind for r in rounds for s in r.slots}
    legend = [Patch(color=c, label=words) for k, (c, _, words) in KINDS.items() if k in kinds]
    legend.append(Line2D([], [], color=INK, linewidth=3, label="finished"))
    lanes.legend(handles=legend, loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False)
    draw_page_counts(pages, rounds)
    return figure


def draw_lane(axes: Axes, lane: int, slots: list[SlotRound | None]) -> None:
    """Bars of equal kind, one per prefill chunk; the request's number where it enters."""
    keys = [s and (s.uid, s.kind, i if s.kind == "prefill" else -1) for i, s in enumerate(slots)]
    seen: set[int] = set()
    for (uid, kind, _), first, count in runs(keys):
        colour, text, _ = KINDS[kind]
        axes.add_patch(
            Rectangle((first, lane - 0.4), count, 0.8, color=colour, ec=PAPER, linewidth=0.4)
        )
        if kind == "prefill":
            write(axes, first + 0.5, lane, str(slots[first].tokens), text, size=5)
        elif count >= 3 and (uid not in seen or kind == "decode"):
            write(axes, first + count / 2, lane, f"#{uid}", text, weight="bold", size=7)
            seen.add(uid)
        if slots[first + count - 1].finished:
            axes.plot([first + count] * 2, [lane - 0.4, lane + 0.4], color=INK, linewidth=2.2)


def write(axes: Axes, x: float, y: float, text: str, color: str, **font) -> None:
    axes.text(x, y, text, color=color, ha="center", va="center_baseline", clip_on=True, **font)


def draw_page_counts(axes: Axes, rounds: list[Round]) -> None:
    """Stacked: held, free but cached, free."""
    held = np.array([sum(map(bool, r.owners)) for r in rounds])
    shared = np.array([sum(len(o) > 1 for o in r.owners) for r in rounds])
    cached = np.array([int(r.cached_P.sum()) for r in rounds])
    total = len(rounds[0].owners) - 1
    x = np.arange(len(rounds) + 1)

    def step(values):
        return np.append(values, values[-1])

    layers = (
        (np.zeros_like(held), shared, SHARED, "shared"),
        (shared, held, "#3f7cac", "held by one"),
        (held, held + cached, "#b9cbd9", "free, but cached"),
        (held + cached, np.full_like(held, total), "#f4f6f8", "free"),
    )
    for low, high, colour, words in layers:
        axes.fill_between(x, step(low), step(high), step="post", color=colour, label=words, lw=0)
    axes.set_xlim(0, len(rounds))
    axes.set_ylim(0, total)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylabel("pages")
    axes.set_xlabel("round")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)


# ---- pages over rounds ---------------------------------------------------------------------------


def draw_pages(record: Record, rounds: list[Round]) -> Figure:
    count = len(rounds[0].owners) - 1
    figure = Figure(figsize=(width(rounds), 0.19 * count + 1.3), layout="constrained")
    axes = figure.subplots()
    for page in range(1, count + 1):
        keys = [r.owners[page] or ("cached" if r.cached_P[page] else None) for r in rounds]
        for key, first, length in runs(keys):
            draw_holding(axes, page, key, first, length)
    axes.set_xlim(0, len(rounds))
    axes.set_ylim(count + 0.6, 0.4)
    axes.set_yticks([1, *range(5, count + 1, 5)])
    axes.set_ylabel("page")
    axes.set_xlabel("round")
    axes.legend(
        handles=[
            Patch(color=colour_of(0), label="held by one request (its number)"),
            Patch(color=SHARED, label="shared by several"),
            Patch(color=CACHED, label="free, content still in the prefix index"),
            Patch(facecolor=PAPER, edgecolor=GRID, label="free"),
        ],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=4,
        frameon=False,
    )
    return figure


def draw_holding(axes: Axes, page: int, key, first: int, length: int) -> None:
    if key == "cached":
        colour, text = CACHED, ""
    elif len(key) > 1:
        colour, text = SHARED, " ".join(map(str, sorted(key)))
    else:
        colour, text = colour_of(key[0]), str(key[0])
    box = Rectangle((first, page - 0.44), length, 0.88, color=colour, ec=PAPER, linewidth=0.4)
    axes.add_patch(box)
    if length >= 1.2 * len(text):
        write(axes, first + length / 2, page, text, "#ffffff", size=6)


def colour_of(uid: int) -> tuple[float, ...]:
    """Neighbouring numbers get hues far apart, all dark enough for white text."""
    hue = (0.58 + uid * 0.381966) % 1
    return tuple(matplotlib.colors.hsv_to_rgb((hue, 0.55, 0.72)))


if __name__ == "__main__":
    run(main)
