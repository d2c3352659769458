"""Charts for HTML pages as inline SVG: lines over iterations, shares, and histograms.

The stylesheet of the page colours the SVG, so a chart follows the dark mode of the reader.
matplotlib cannot do this: its SVG has fixed colours. `pictures` draws PNG files with matplotlib.

A series is a list of (x, y); values that are not finite are excluded. Entry points: `line_chart`,
`shares`, `histogram`, `number`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np

Series = Sequence[tuple[float, float]]
Point = tuple[float, float]

BINS = 30
"""Bins of a histogram."""

# Margins of a line chart in pixels.
_LEFT = 46
_RIGHT = 14
_TOP = 12
_BOTTOM = 26


def line_chart(
    series: Mapping[str, Series],
    *,
    width: int = 640,
    height: int = 250,
    percent: bool = False,
    logarithmic: bool = False,
    floor: float | None = None,
    dots: bool = False,
    smooth: bool = False,
) -> str:
    """Return an SVG of named series over iterations; "" without a finite value.

    `percent` labels y as a percentage of 1. `floor` is a value that the y axis includes. `dots`
    marks and labels every point. `smooth` draws the points faint and their moving average bold.
    """
    drawable = {name: _drawable(points, logarithmic) for name, points in series.items()}
    drawn = {name: points for name, points in drawable.items() if points}
    if not drawn:
        return ""
    all_points = [point for points in drawn.values() for point in points]
    ticks = _log_ticks(all_points) if logarithmic else _ticks(all_points, floor, percent)
    to_pixels = _scale(all_points, ticks, width, height, logarithmic)
    parts = [_axes(ticks, to_pixels, all_points, width, height, percent)]
    for index, (name, points) in enumerate(drawn.items()):
        line = [to_pixels(*point) for point in points]
        # With 8 points or fewer the average would hide the curve.
        if smooth and len(points) > 8:
            parts.append(f'<path class="line faint s{index}" d="{_path(line)}"/>')
            line = [to_pixels(*point) for point in moving_average(points)]
        parts.append(f'<path class="line s{index}" d="{_path(line)}"/>')
        if dots:
            parts += [_dot(name, point, to_pixels, index, percent) for point in points]
    label = escape(", ".join(drawn))
    return _svg(width, height, "".join(parts), f'role="img" aria-label="{label}"')


def shares(parts: Mapping[str, float], *, width: int = 720, height: int = 26) -> str:
    """Return an SVG bar divided in proportion to the amounts; "" if their sum is 0."""
    total = sum(parts.values())
    if total <= 0:
        return ""
    bars = []
    x = 0.0
    for index, (name, amount) in enumerate(parts.items()):
        length = amount / total * width
        bars.append(
            # 2 pixels of space between bars; a tiny share stays visible.
            f'<rect class="f{index % 8}" x="{x:.1f}" y="0" width="{max(length - 2, 0.5):.1f}" '
            f'height="{height}"><title>{escape(name)}: {amount / total:.0%}</title></rect>'
        )
        x += length
    attributes = 'preserveAspectRatio="none" class="shares" role="img"'
    return _svg(width, height, "".join(bars), attributes)


def histogram(columns: Mapping[str, np.ndarray], *, width: int = 460, height: int = 190) -> str:
    """Return an SVG with one histogram per column over a common axis; "" without a finite value.

    Columns are float arrays of any length; NaN means no value.
    """
    heights, edges = histogram_shares(list(columns.values()))
    if not len(edges):
        return ""
    largest = max(float(share.max()) for share in heights) or 1.0
    bin_width = (width - 20) / BINS
    bar_width = bin_width / len(columns)
    axis_y = height - 24
    parts = []
    for column, (name, share) in enumerate(zip(columns, heights, strict=True)):
        for index, value in enumerate(share.tolist()):
            x = 10 + index * bin_width + column * bar_width
            bar_height = value / largest * axis_y
            interval = f"{number(edges[index])} … {number(edges[index + 1])}"
            parts.append(
                f'<rect class="f{column}" x="{x:.1f}" y="{axis_y - bar_height:.1f}" '
                f'width="{bar_width:.1f}" height="{bar_height:.1f}">'
                f"<title>{escape(name)}: {value:.1%} in {interval}</title></rect>"
            )
    for edge, anchor in ((0, "start"), (BINS // 2, "middle"), (BINS, "end")):
        x = 10 + edge * bin_width
        parts.append(_tick_label(x, height - 6, anchor, number(edges[edge])))
    label = escape(", ".join(columns))
    return _svg(width, height, "".join(parts), f'role="img" aria-label="{label}"')


def histogram_shares(columns: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return (share of the finite values in each bin, per column; common bin edges).

    Both are empty without a finite value. Shapes: columns [N] each; [BINS] each and [BINS + 1].
    """
    finite = [column[np.isfinite(column)] for column in columns]
    values = np.concatenate(finite)
    if not len(values):
        return [], np.zeros(0)
    edges = np.histogram_bin_edges(values, bins=BINS)
    return [np.histogram(part, bins=edges)[0] / max(len(part), 1) for part in finite], edges


def moving_average(points: Series, fraction: float = 0.1) -> list[Point]:
    """Return the mean over a centred window of `fraction` of the points, at least 5.

    The window is shorter at both ends.
    """
    half = max(5, round(len(points) * fraction)) // 2
    averaged = []
    for index, (x, _) in enumerate(points):
        window = [y for _, y in points[max(0, index - half) : index + half + 1]]
        averaged.append((x, sum(window) / len(window)))
    return averaged


def number(value: float, percent: bool = False) -> str:
    """Return a short text of a number for an axis or a table."""
    if percent:
        return f"{value:.0%}"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _drawable(points: Series, positive: bool) -> list[Point]:
    """Return the finite points, on a logarithmic axis only the positive ones."""
    # Magnitudes near the limits of float64 would overflow in the scale.
    rounded = ((x, y if abs(y) > 1e-200 else 0.0) for x, y in points if abs(y) < 1e200)
    return [(x, y) for x, y in rounded if y > 0 or not positive]


def _ticks(points: Series, floor: float | None, percent: bool) -> list[float]:
    """Return about five round values from below the smallest to above the largest."""
    low = min(y for _, y in points)
    high = max(y for _, y in points)
    low = low if floor is None else min(low, floor)
    span = high - low
    if span <= 1e-9 * max(abs(low), abs(high)):
        span = abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= 5)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    # Rounded to 12 digits: 3 * 0.1 would be labelled 0.30000000000000004.
    ticks = [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]
    # Shares have no tick above 100 %.
    return [tick for tick in ticks if tick <= 1] if percent and high <= 1 else ticks


def _log_ticks(points: Series) -> list[float]:
    low = math.floor(math.log10(min(y for _, y in points)))
    high = math.ceil(math.log10(max(y for _, y in points)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def _scale(
    points: Series, ticks: Sequence[float], width: int, height: int, logarithmic: bool
) -> Callable[[float, float], Point]:
    """Return the function from data coordinates to pixels."""
    left = min(x for x, _ in points)
    right = max(x for x, _ in points)
    transform = math.log10 if logarithmic else float
    low = transform(ticks[0])
    high = transform(ticks[-1])

    def to_pixels(x: float, y: float) -> Point:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (transform(y) - low) / (high - low)
        pixel_x = _LEFT + across * (width - _LEFT - _RIGHT)
        pixel_y = height - _BOTTOM - up * (height - _TOP - _BOTTOM)
        return pixel_x, pixel_y

    return to_pixels


def _axes(
    ticks: Sequence[float],
    to_pixels: Callable[[float, float], Point],
    points: Series,
    width: int,
    height: int,
    percent: bool,
) -> str:
    left = min(x for x, _ in points)
    right = max(x for x, _ in points)
    parts = []
    for tick in ticks:
        _, y = to_pixels(left, tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_tick_label(_LEFT - 8, y + 4, "end", number(tick, percent)))
    for x in _iteration_marks(left, right):
        pixel_x, _ = to_pixels(x, ticks[0])
        parts.append(_tick_label(pixel_x, height - 7, "middle", f"{x:,.0f}"))
    return "".join(parts)


def _iteration_marks(left: float, right: float) -> list[float]:
    """Return round iterations for the x axis, from the first to at most the last."""
    if right <= left:
        return [left]
    power = 10 ** math.floor(math.log10(right - left))
    steps = (power * factor for factor in (0.1, 0.2, 0.25, 0.5, 1, 2))
    step = max(1.0, next(step for step in steps if (right - left) / step <= 8))
    return [index * step for index in range(math.ceil(left / step), math.floor(right / step) + 1)]


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _dot(
    name: str,
    point: Point,
    to_pixels: Callable[[float, float], Point],
    index: int,
    percent: bool,
) -> str:
    x, y = to_pixels(*point)
    title = ""
    if percent:
        title = f"<title>{escape(name)}, iteration {point[0]:,.0f}: {point[1]:.1%}</title>"
    return f'<circle class="dot s{index}" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>'


def _tick_label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _svg(width: int, height: int, content: str, attributes: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" {attributes}>{content}</svg>'
