"""Draw PNG pictures with matplotlib: of a run (`report.png`) and of reprocessed columns.

A picture is for a README or a message, where HTML is not shown. The pages have SVG charts
(`charts`). Drawing uses the Agg canvas and leaves pyplot's state unchanged.
Entry points: `write_figure`, `write_comparison_picture`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlpipe.observe.charts import FEW_POINTS, Series, histogram_shares, moving_average
from rlpipe.observe.run_history import REWARD, SHARES, RunHistory, score_text

INK = "#1c1b1a"
SOFT = "#6f6b66"
RULE = "#e6e2dc"
COLOURS = ("#0b6e5f", "#c0712b", "#4a5fa8", "#8a4b7d", "#6b8f3a", "#b2452f")


def write_figure(history: RunHistory, path: str | Path) -> Path:
    """Draw held-out scores and reward of a run (PNG, 1600 x 640 pixels); return the path."""
    path = Path(path)
    figure = _new_figure(path, width=10, height=4)
    left, right = figure.subplots(1, 2)
    _held_out(left, history)
    _reward(right, history)
    _title(figure, _run_title(history), x=0.06)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.78, bottom=0.13, wspace=0.16)
    figure.savefig(path)
    return path


def write_comparison_picture(
    title: str,
    sides: tuple[str, str],
    rewards: tuple[np.ndarray, np.ndarray],
    advantages: tuple[np.ndarray, np.ndarray],
    mean_rewards: tuple[Series, Series],
    path: Path,
) -> Path:
    """Draw two versions of the same columns (PNG, 1920 x 610 pixels); return the path.

    Shapes: rewards, advantages [N] each, NaN without a value; mean_rewards (iteration, value).
    """
    figure = _new_figure(path, width=12, height=3.8)
    first, second, third = figure.subplots(1, 3)
    _histogram(first, "rewards", sides, rewards)
    _histogram(second, "advantages", sides, advantages)
    _style(third, "mean reward by iteration")
    for index, points in enumerate(mean_rewards):
        if points:
            third.plot(
                *zip(*points, strict=True),
                color=COLOURS[index],
                linewidth=1.8,
                label=sides[index],
                marker="o",
                markersize=2.5,
            )
    third.xaxis.set_major_locator(MaxNLocator(integer=True))
    third.set_xlabel("iteration", fontsize=9, color=SOFT)
    first.legend(frameon=False, fontsize=9, labelcolor=INK)
    _title(figure, title, x=0.045)
    figure.subplots_adjust(left=0.045, right=0.99, top=0.78, bottom=0.13, wspace=0.16)
    figure.savefig(path)
    return path


def _new_figure(path: Path, *, width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches; create the folder of its file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Figure without pyplot: pyplot keeps every figure of the process until it is closed.
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _title(figure: Figure, text: str, x: float) -> None:
    figure.suptitle(text, x=x, y=0.965, ha="left", fontsize=13, fontweight="bold", color=INK)


def _run_title(history: RunHistory) -> str:
    if not history.evaluations:
        return history.run
    name = history.datasets[0]
    measure = history.measure(name)
    curve = history.scores(name)
    before, after = (score_text(score.value, measure) for score in (curve[0], curve[-1]))
    return f"{history.run}: {before} → {after} held-out {measure}"


def _held_out(axes: Axes, history: RunHistory) -> None:
    measures = {history.measure(dataset) for dataset in history.datasets}
    # Sets with different measures share no unit, so their axis is the plain value.
    measure = measures.pop() if len(measures) == 1 else "score"
    _style(axes, f"{measure} on held-out prompts" if history.datasets else "no held-out prompts")
    axes.set_xlabel("iteration", fontsize=9, color=SOFT)
    scale = 100 if measure in SHARES else 1
    for index, dataset in enumerate(history.datasets):
        curve = history.scores(dataset)
        axes.plot(
            [score.iteration for score in curve],
            [scale * score.value for score in curve],
            color=COLOURS[index % len(COLOURS)],
            linewidth=2.2,
            marker="o",
            markersize=4.5,
            label=dataset,
        )
    if len(history.datasets) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    if measure in SHARES:
        # An axis from 0 to less than 1 % would repeat its labels.
        highest = max(
            (score.value for name in history.datasets for score in history.scores(name)),
            default=0.0,
        )
        axes.set_ylim(bottom=0, top=1 if highest < 0.01 else None)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _reward(axes: Axes, history: RunHistory) -> None:
    _style(axes, "mean reward of sampled responses")
    axes.set_xlabel("iteration", fontsize=9, color=SOFT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    rewards = history.series(REWARD)
    if not rewards:
        return
    if len(rewards) <= FEW_POINTS:
        axes.plot(
            *zip(*rewards, strict=True), color=COLOURS[0], linewidth=2.2, marker="o", markersize=4.5
        )
    else:
        axes.plot(*zip(*rewards, strict=True), color=COLOURS[0], linewidth=1, alpha=0.3)
        axes.plot(*zip(*moving_average(rewards), strict=True), color=COLOURS[0], linewidth=2.2)


def _histogram(
    axes: Axes, title: str, sides: tuple[str, str], columns: tuple[np.ndarray, np.ndarray]
) -> None:
    _style(axes, f"{title}, share of samples")
    heights, edges = histogram_shares(columns)
    for index, share in enumerate(heights):
        axes.stairs(
            share,
            edges,
            color=COLOURS[index],
            linewidth=1.8,
            fill=index == 1,
            alpha=0.55 if index else 1,
            label=sides[index],
        )


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=SOFT, pad=10)
    axes.tick_params(colors=SOFT, labelsize=9, length=0)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
