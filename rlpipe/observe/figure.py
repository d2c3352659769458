"""`report.png`: the run in one picture, for a README or a message. Accuracy on the left, reward on
the right."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlpipe.observe.charts import moving_average
from rlpipe.observe.history import REWARD, RunHistory

INK = "#1c1b1a"
SOFT = "#6f6b66"
RULE = "#e6e2dc"
COLOURS = ("#0b6e5f", "#c0712b", "#4a5fa8", "#8a4b7d", "#6b8f3a", "#b2452f")


def write_figure(history: RunHistory, path: str | Path) -> Path:
    """Draw the picture (PNG, 1600 x 640 pixels) and return its path. Draws off screen, and leaves
    pyplot's state alone."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 4), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _accuracy(left, history)
    _reward(right, history)
    figure.suptitle(
        _title(history), x=0.06, y=0.965, ha="left", fontsize=13, fontweight="bold", color=INK
    )
    figure.subplots_adjust(left=0.06, right=0.985, top=0.78, bottom=0.13, wspace=0.16)
    figure.savefig(path)
    return path


def _title(history: RunHistory) -> str:
    if not history.evaluations:
        return history.run
    curve = history.accuracy(history.datasets[0])
    return f"{history.run}: {curve[0].accuracy:.0%} → {curve[-1].accuracy:.0%} held-out accuracy"


def _accuracy(axes: Axes, history: RunHistory) -> None:
    _style(axes, "accuracy on held-out prompts")
    for index, dataset in enumerate(history.datasets):
        curve = history.accuracy(dataset)
        x = [evaluation.iteration for evaluation in curve]
        y = [100 * evaluation.accuracy for evaluation in curve]
        axes.plot(
            x,
            y,
            color=COLOURS[index % len(COLOURS)],
            linewidth=2.2,
            marker="o",
            markersize=4.5,
            label=dataset,
        )
    if len(history.datasets) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")


def _reward(axes: Axes, history: RunHistory) -> None:
    _style(axes, "mean reward of sampled responses")
    rewards = history.series(REWARD)
    if rewards:
        axes.plot(*zip(*rewards, strict=True), color=COLOURS[0], linewidth=1, alpha=0.3)
        axes.plot(*zip(*moving_average(rewards), strict=True), color=COLOURS[0], linewidth=2.2)


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=SOFT, pad=10)
    axes.set_xlabel("iteration", fontsize=9, color=SOFT)
    axes.tick_params(colors=SOFT, labelsize=9, length=0)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
