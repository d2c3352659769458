"""Charts as inline SVG: lines over iterations, and shares of a whole. Drawn by hand, coloured by
the page's stylesheet.

Series are lists of (x, y); what is not finite is left out. Not here: which chart a report has
(`report`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Series = Sequence[tuple[float, float]]

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
    """An SVG of these named series over iterations; an empty string if nothing finite is in them.

    `percent` labels y as per cent of 1; `floor` is a value that the y axis reaches down to; `dots`
    marks and labels each point; `smooth` draws the points faint and their moving average over them.
    """
    shown = {name: points for name, raw in series.items() if (points := _finite(raw, logarithmic))}
    if not shown:
        return ""
    everything = [point for points in shown.values() for point in points]
    ticks = _log_ticks(everything) if logarithmic else _ticks(everything, floor, percent)
    place = _placer(everything, ticks, width, height, logarithmic)
    parts = [_axes(ticks, place, everything, width, height, percent)]
    for index, (name, points) in enumerate(shown.items()):
        drawn = [place(*point) for point in points]
        if smooth and len(points) > 8:
            parts.append(f'<path class="line faint s{index}" d="{_path(drawn)}"/>')
            drawn = [place(*point) for point in moving_average(points)]
        parts.append(f'<path class="line s{index}" d="{_path(drawn)}"/>')
        if dots:
            parts += [_dot(name, point, place, index, percent) for point in points]
    label = escape(", ".join(shown))
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def shares(parts: Mapping[str, float], *, width: int = 720, height: int = 26) -> str:
    """One bar divided like these amounts; an empty string if they add up to nothing."""
    whole = sum(parts.values())
    if whole <= 0:
        return ""
    bars = []
    x = 0.0
    for index, (name, amount) in enumerate(parts.items()):
        length = amount / whole * width
        title = f"<title>{escape(name)}: {amount / whole:.0%}</title>"
        bars.append(
            f'<rect class="f{index % 8}" x="{x:.1f}" y="0" width="{max(length - 2, 0.5):.1f}" height="{height}">{title}</rect>'
        )
        x += length
    return f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" class="shares" role="img">{"".join(bars)}</svg>'


def moving_average(points: Series, fraction: float = 0.1) -> list[tuple[float, float]]:
    """Mean over a centred window of `fraction` of the points (at least 5), cut off at both ends."""
    half = max(5, round(len(points) * fraction)) // 2
    averaged = []
    for index, (x, _) in enumerate(points):
        window = [y for _, y in points[max(0, index - half) : index + half + 1]]
        averaged.append((x, sum(window) / len(window)))
    return averaged


def number(value: float, percent: bool = False) -> str:
    """A figure for an axis or a table: short, and never a dozen digits."""
    if percent:
        return f"{value:.0%}"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _finite(points: Series, positive: bool) -> list[tuple[float, float]]:
    """What can be drawn: finite, positive on a logarithmic axis, and no magnitude that arithmetic
    would lose."""
    rounded = ((x, y if abs(y) > 1e-200 else 0.0) for x, y in points if abs(y) < 1e200)
    return [(x, y) for x, y in rounded if y > 0 or not positive]


def _ticks(points: Series, floor: float | None, percent: bool) -> list[float]:
    """About five round values from below the smallest to above the largest."""
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
    ticks = [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]
    return [tick for tick in ticks if tick <= 1] if percent and high <= 1 else ticks


def _log_ticks(points: Series) -> list[float]:
    low = math.floor(math.log10(min(y for _, y in points)))
    high = math.ceil(math.log10(max(y for _, y in points)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def _placer(
    points: Series, ticks: Sequence[float], width: int, height: int, logarithmic: bool
) -> Callable[[float, float], tuple[float, float]]:
    left = min(x for x, _ in points)
    right = max(x for x, _ in points)
    scale = math.log10 if logarithmic else float
    low = scale(ticks[0])
    high = scale(ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (scale(y) - low) / (high - low)
        return _LEFT + across * (width - _LEFT - _RIGHT), height - _BOTTOM - up * (
            height - _TOP - _BOTTOM
        )

    return place


def _axes(
    ticks: Sequence[float], place: Callable, points: Series, width: int, height: int, percent: bool
) -> str:
    parts, (left, right) = [], (min(x for x, _ in points), max(x for x, _ in points))
    for tick in ticks:
        _, y = place(left, tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(tick, percent)}</text>'
        )
    for x in _marks(left, right):
        at, _ = place(x, ticks[0])
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{height - 7}" text-anchor="middle">{x:,.0f}</text>'
        )
    return "".join(parts)


def _marks(left: float, right: float) -> list[float]:
    """Round iterations for the x axis, from the first to at most the last."""
    if right <= left:
        return [left]
    power = 10 ** math.floor(math.log10(right - left))
    step = next(
        power * factor
        for factor in (0.1, 0.2, 0.25, 0.5, 1, 2)
        if (right - left) / (power * factor) <= 8
    )
    step = max(1.0, step)
    return [index * step for index in range(math.ceil(left / step), math.floor(right / step) + 1)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _dot(name: str, point: tuple[float, float], place: Callable, index: int, percent: bool) -> str:
    x, y = place(*point)
    title = (
        f"<title>{escape(name)}, iteration {point[0]:,.0f}: {point[1]:.1%}</title>"
        if percent
        else ""
    )
    return f'<circle class="dot s{index}" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>'
