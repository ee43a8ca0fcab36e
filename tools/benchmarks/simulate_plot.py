"""Draws the result of a simulation: the hit ratio of each routing over the trace's time, with the kill marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from tools.benchmarks import simulate_report as report

#: For each routing: colour, dashes, width, and the order in which lines cover each other.
_STYLES: dict[str, dict[str, Any]] = {
    report.CACHES: {"color": "#8a8a8a", "linestyle": (0, (1, 1.2)), "linewidth": 3.0, "zorder": 2},
    report.KILLED: {"color": "#0b6e4f", "linestyle": "-", "linewidth": 2.0, "zorder": 4},
    report.MODEL: {"color": "#c8553d", "linestyle": "-", "linewidth": 1.5, "zorder": 3},
    "stickiness": {"color": "#3b6fb6", "linestyle": "-", "linewidth": 1.2, "zorder": 2},
    "chance": {"color": "#b5a642", "linestyle": "-", "linewidth": 1.2, "zorder": 2},
}


def draw(path: Path, found: dict[str, Any]) -> None:
    """Draw the results of ``simulate_report.content`` to a file; the suffix of its name decides the format."""
    begins = found["window_begins"]
    middles = [(a + b) / 120 for a, b in zip(begins, [*begins[1:], found["end"]], strict=True)]
    runs = {run["routing"]: run["windows"] for run in found["runs"]}
    # With a fixed salt the same input gives the same bytes.
    with mpl.rc_context({"svg.hashsalt": "waymark", "font.size": 9}):
        figure = Figure(figsize=(7.5, 4.2), dpi=110, layout="constrained")
        axes = figure.subplots()
        down, back = (seconds / 60 for seconds in found["killed"])
        axes.axvspan(down, back, color="#000000", alpha=0.08, linewidth=0)
        for name, style in _STYLES.items():
            shares = [float("nan") if ratio is None else 100 * ratio for ratio in runs[name]]
            axes.plot(middles, shares, label=name, **style)
        axes.set_xlim(begins[0] / 60, found["end"] / 60)
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])  # room for a label above the lines
        axes.annotate(
            "killed", ((down + back) / 2, 0.985), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=8
        )
        axes.set_xlabel("minutes of the trace")
        axes.set_ylabel("blocks found in cache, %")
        axes.set_title(f"{found['about']['requests']:,} requests over {found['about']['engines']} engines", fontsize=10)
        axes.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
