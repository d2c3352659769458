"""The plot of a flat run: memory by process on the left, seconds of an iteration on the right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlpipe.observe.pictures import COLOURS, INK
from tests.soak.flat.sample import Look

LARGEST = 6


def draw(looks: Sequence[Look], timing: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG of 1440 x 560 pixels."""
    figure = Figure(figsize=(9, 3.5), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    newest = looks[-1].pss
    names = sorted(newest, key=lambda name: newest[name], reverse=True)[:LARGEST]
    for colour, name in zip(COLOURS, names, strict=False):
        known = [look for look in looks if name in look.pss]
        left.plot(
            [look.iteration for look in known],
            [look.pss[name] for look in known],
            color=colour,
            label=name,
        )
    left.set_title("memory (PSS, MiB)", fontsize=9, color=INK, loc="left")
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=7)
    iterations = [entry for entry in timing if "iteration_s" in entry]
    right.plot([entry["iteration_s"] for entry in iterations], color=COLOURS[0], label="iteration")
    right.plot(
        [entry["iteration_s"] - entry["work_s"] for entry in iterations],
        color=COLOURS[1],
        label="orchestration",
    )
    right.set_title("seconds of an iteration", fontsize=9, color=INK, loc="left")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=7)
    for axes in (left, right):
        axes.set_xlabel("iteration", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
