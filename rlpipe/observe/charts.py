"""Charts for HTML pages as inline SVG: lines over iterations, shares, and histograms.

The stylesheet of the page colours the SVG, so a chart follows the dark mode of the reader.
matplotlib cannot do this: its SVG has fixed colours. `pictures` draws PNG files with matplotlib.

A series is a list of (x, y); values that are not finite are excluded. A chart whose values are all
0 is a sentence instead. A chart has a bounded size for any number of points.
Entry points: `line_chart`, `stacked_chart`, `shares`, `histogram`, `number`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

Series = Sequence[tuple[float, float]]
Point = tuple[float, float]

BINS = 30
"""Bins of a histogram."""
MARKED_POINTS = 60
"""A curve of at most this many points can have a dot at each."""
FEW_POINTS = 8
"""With at most this many points a moving average would hide the curve."""
DRAWN_POINTS = 240
"""Points of a line. A longer series is drawn as a band from smallest to largest value."""
READINGS = 60
"""Parts of the x axis whose tooltip has the mean value."""
COLOURS = range(8)
"""Numbers of the colours in the stylesheet."""
ALL_ZERO = '<p class="constant">Every value is 0.</p>'

# Margins of a line chart in pixels.
_LEFT = 46
_WIDE_LEFT = 64
_RIGHT = 14
_TOP = 12
_BOTTOM = 26
_CHANGE_WIDTH = 76
"""Pixels of the label of a change."""
_MARK_WIDTH = 52
"""Pixels between the labels of the x axis, at least."""


@dataclass(frozen=True)
class _Frame:
    """The plane of a line chart: its size, its ranges and the labels of its y axis."""

    width: int
    height: int
    left: float
    """Pixels left of the plane, for the labels."""
    xs: tuple[float, float]
    ticks: Sequence[float]
    labels: Sequence[str]
    logarithmic: bool

    def pixels(self, x: float, y: float) -> Point:
        """Return the pixel of a point."""
        first, last = self.xs
        across = (x - first) / (last - first) if last > first else 0.5
        transform = math.log10 if self.logarithmic else float
        low = transform(self.ticks[0])
        up = (transform(y) - low) / (transform(self.ticks[-1]) - low)
        return (
            self.left + across * (self.width - self.left - _RIGHT),
            self.height - _BOTTOM - up * (self.height - _TOP - _BOTTOM),
        )


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
    changes: Mapping[int, str] | None = None,
) -> str:
    """Return an SVG of named series over iterations; "" without a finite value.

    `percent` labels y as a percentage of 1. `floor` is a value that the y axis includes. `dots`
    marks and labels every point, up to `MARKED_POINTS`. `smooth` draws the points faint and their
    moving average bold. Few points always have dots. `changes`: first iteration of another reward
    → what changed. A dashed line marks each one, and the curves are interrupted there.
    """
    if all_zero(series):
        return ALL_ZERO
    drawable = {name: _drawable(points, logarithmic) for name, points in series.items()}
    drawn = {name: points for name, points in drawable.items() if points}
    if not drawn:
        return ""
    all_points = [point for points in drawn.values() for point in points]
    ticks = _log_ticks(all_points) if logarithmic else _ticks(all_points, floor, percent)
    frame = _frame(all_points, ticks, width, height, percent=percent, logarithmic=logarithmic)
    parts = [_axes(frame)]
    for index, (name, points) in enumerate(drawn.items()):
        for part in _between(points, changes or {}):
            parts.append(_curve(part, frame, index % len(COLOURS), smooth=smooth))
        if len(points) <= (MARKED_POINTS if dots else FEW_POINTS):
            parts += [_dot(name, point, frame, index % len(COLOURS), percent) for point in points]
    if len(drawn) == 1 and len(all_points) > FEW_POINTS and not dots:
        parts.append(_readings(all_points, frame, percent))
    parts.append(_changes(changes or {}, frame))
    label = escape(", ".join(drawn))
    wide = ' class="wide"' if width > 800 else ""
    return _svg(width, height, "".join(parts), f'role="img" aria-label="{label}"{wide}')


def all_zero(series: Mapping[str, Series]) -> bool:
    """True if the series have finite values and all of them are 0."""
    values = [y for points in series.values() for _, y in points if math.isfinite(y)]
    return bool(values) and not any(values)


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


def stacked_chart(
    parts: Mapping[str, Series],
    *,
    width: int = 800,
    height: int = 250,
    last: int | None = None,
    changes: Mapping[int, str] | None = None,
) -> str:
    """Return an SVG of shares that add up to 1, one column an iteration; "" without a value.

    The parts have the same iterations. Consecutive iterations share a column, as their mean, if
    there are more than `DRAWN_POINTS`. The first part is at the bottom. `last`: end of the x axis,
    if it is after the last value. `changes`: as in `line_chart`.
    """
    names = list(parts)
    table = np.array([[y for _, y in series] for series in parts.values()])
    xs = [x for x, _ in next(iter(parts.values()), ())]
    if not xs or not np.isfinite(table).all():
        return ""
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    frame = _Frame(
        width,
        height,
        _WIDE_LEFT,
        (xs[0] - 0.5, max(xs[-1], last or 0) + 0.5),
        ticks,
        tick_labels(ticks, True),
        False,
    )
    columns = _parts([(x, float(index)) for index, x in enumerate(xs)], DRAWN_POINTS)
    paths = [""] * len(names)
    readings = []
    for column in columns:
        left, right = column[0][0] - 0.5, column[-1][0] + 0.5
        shares = table[:, int(column[0][1]) : int(column[-1][1]) + 1].mean(axis=1).tolist()
        low = 0.0
        for number_, share in enumerate(shares):
            (x0, y0), (x1, y1) = frame.pixels(left, low), frame.pixels(right, low + share)
            paths[number_] += f"M{x0:.1f},{y0:.1f}H{x1:.1f}V{y1:.1f}H{x0:.1f}Z" if share else ""
            low += share
        readings.append(_stacked_reading(frame, column, dict(zip(names, shares, strict=True))))
    areas = (
        f'<path class="q{index}" shape-rendering="crispEdges" d="{path}"/>'
        for index, path in enumerate(paths)
        if path
    )
    label = escape(", ".join(names))
    content = "".join([*areas, _axes(frame), *readings, _changes(changes or {}, frame)])
    return _svg(width, height, content, f'role="img" aria-label="{label}" class="wide"')


def _stacked_reading(frame: _Frame, column: Sequence[Point], shares: Mapping[str, float]) -> str:
    """Return an invisible column with its shares as a tooltip."""
    first, last = column[0][0], column[-1][0]
    left, _ = frame.pixels(first - 0.5, 0.0)
    right, _ = frame.pixels(last + 0.5, 0.0)
    which = (
        f"iteration {first:,.0f}" if first == last else f"iterations {first:,.0f} to {last:,.0f}"
    )
    values = ", ".join(f"{escape(name)} {share:.0%}" for name, share in shares.items())
    return (
        f'<rect class="reading" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" '
        f'height="{frame.height - _TOP - _BOTTOM}"><title>{which}: {values}</title></rect>'
    )


def histogram(columns: Mapping[str, np.ndarray], *, width: int = 460, height: int = 190) -> str:
    """Return an SVG with one histogram per column over a common axis; "" without a finite value.

    Columns are float arrays of any length; NaN means no value.
    """
    heights, edges = histogram_shares(list(columns.values()))
    if not len(edges):
        return ""
    if not any(np.nan_to_num(column, posinf=0, neginf=0).any() for column in columns.values()):
        return ALL_ZERO
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
    marks = ((0, "start"), (BINS // 2, "middle"), (BINS, "end"))
    texts = tick_labels([float(edges[edge]) for edge, _ in marks])
    for (edge, anchor), text in zip(marks, texts, strict=True):
        parts.append(_tick_label(10 + edge * bin_width, height - 6, anchor, text))
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


def moving_average(points: Series, fraction: float = 0.05) -> list[Point]:
    """Return the mean over a centred window of `fraction` of the points, at least 5.

    The window is shorter at both ends. The result has at most `DRAWN_POINTS` points, with both
    ends.
    """
    half = max(5, round(len(points) * fraction)) // 2
    count = min(len(points), DRAWN_POINTS)
    averaged = []
    for position in range(count):
        index = position * (len(points) - 1) // max(count - 1, 1)
        window = [y for _, y in points[max(0, index - half) : index + half + 1]]
        averaged.append((points[index][0], sum(window) / len(window)))
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
    if not percent or high > 1:
        return ticks
    # Shares have no tick above 100 %. An axis needs two ticks, also for a constant 100 %.
    shares_only = [tick for tick in ticks if tick <= 1]
    return shares_only if len(shares_only) > 1 else [shares_only[0] - step, shares_only[0]]


def _log_ticks(points: Series) -> list[float]:
    low = math.floor(math.log10(min(y for _, y in points)))
    high = math.ceil(math.log10(max(y for _, y in points)))
    high = max(high, low + 1)
    # At most about eight ticks, also for values that differ by hundreds of orders of magnitude.
    step = math.ceil((high - low) / 8)
    return [10.0**power for power in range(low, high + step, step)]


def _frame(
    points: Series,
    ticks: Sequence[float],
    width: int,
    height: int,
    *,
    percent: bool,
    logarithmic: bool,
) -> _Frame:
    xs = [x for x, _ in points]
    labels = [number(tick) for tick in ticks] if logarithmic else tick_labels(ticks, percent)
    # A digit of the labels is about 7 pixels wide.
    left = max(_LEFT, 7 * max(map(len, labels)) + 12)
    return _Frame(width, height, left, (min(xs), max(xs)), ticks, labels, logarithmic)


def tick_labels(ticks: Sequence[float], percent: bool = False) -> list[str]:
    """Return texts with as many digits as needed to tell the ticks of a linear axis apart."""
    values = [tick * 100 for tick in ticks] if percent else list(ticks)
    largest = max(map(abs, values))
    precision = abs(values[1] - values[0]) / 1000 if len(values) > 1 else largest / 1000
    kind = "f" if 1e-3 <= largest < 1e6 else "e"
    unit = "%" if percent else ""

    def texts(digits: int) -> list[str]:
        return [f"{value:,.{digits}{kind}}" for value in values]

    def exact(digits: int) -> bool:
        return all(
            abs(float(text.replace(",", "")) - value) <= precision
            for text, value in zip(texts(digits), values, strict=True)
        )

    chosen = texts(next((digits for digits in range(12) if exact(digits)), 12))
    return [_short(text) + unit for text in chosen]


def _short(text: str) -> str:
    """Return 1e-5 for 1e-05, and 0 for 0e+00 and -0."""
    mantissa, e, exponent = text.partition("e")
    if not float(mantissa.replace(",", "")):
        return "0"
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def _axes(frame: _Frame) -> str:
    parts = []
    for tick, label in zip(frame.ticks, frame.labels, strict=True):
        _, y = frame.pixels(frame.xs[0], tick)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.width - _RIGHT}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_tick_label(frame.left - 8, y + 4, "end", label))
    most = int((frame.width - frame.left - _RIGHT) // _MARK_WIDTH)
    for x in _iteration_marks(*frame.xs, most=most):
        pixel_x, _ = frame.pixels(x, frame.ticks[0])
        parts.append(_tick_label(pixel_x, frame.height - 7, "middle", f"{x:,.0f}"))
    return "".join(parts)


def _iteration_marks(left: float, right: float, *, most: int = 8) -> list[float]:
    """Return round iterations for the x axis, about `most`, from the first to at most the last."""
    if right <= left:
        return [left]
    power = 10 ** math.floor(math.log10(right - left))
    steps = (power * factor for factor in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5, 10))
    # Iterations are whole numbers: a label of 22.5 would read 22.
    whole = (step for step in steps if step == int(step) > 0)
    step = next(step for step in whole if (right - left) / step <= min(most, 8))
    return [index * step for index in range(math.ceil(left / step), math.floor(right / step) + 1)]


def _curve(points: Sequence[Point], frame: _Frame, colour: int, *, smooth: bool) -> str:
    """Return the line of a series. A moving average is drawn over faint points or their band."""
    long = len(points) > DRAWN_POINTS
    averaged = long or (smooth and len(points) > FEW_POINTS)
    parts = []
    if long:
        parts.append(f'<path class="band f{colour}" d="{_path(_band(points, frame))}Z"/>')
    elif averaged:
        line = [frame.pixels(*point) for point in points]
        parts.append(f'<path class="line faint s{colour}" d="{_path(line)}"/>')
    line = [frame.pixels(*point) for point in (moving_average(points) if averaged else points)]
    return "".join([*parts, f'<path class="line s{colour}" d="{_path(line)}"/>'])


def _between(points: Sequence[Point], changes: Mapping[int, str]) -> list[list[Point]]:
    """Divide the points at these iterations, without empty parts."""
    bounds = [-math.inf, *sorted(changes), math.inf]
    parts = [[point for point in points if low <= point[0] < up] for low, up in pairwise(bounds)]
    return [part for part in parts if part]


def _changes(changes: Mapping[int, str], frame: _Frame) -> str:
    """Return a labelled dashed line before each of these iterations."""
    parts = []
    first, last = frame.xs
    for iteration, text in changes.items():
        if not first <= iteration <= last:
            continue
        x, _ = frame.pixels(max(iteration - 0.5, first), frame.ticks[0])
        title = f"<title>iteration {iteration:,}: {escape(text)}</title>"
        parts.append(
            f'<line class="change" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" '
            f'y2="{frame.height - _BOTTOM}">{title}</line>'
        )
        right = x < frame.width - _RIGHT - _CHANGE_WIDTH
        anchor = "start" if right else "end"
        parts.append(_tick_label(x + (4 if right else -4), _TOP + 11, anchor, "new reward"))
    return "".join(parts)


def _band(points: Sequence[Point], frame: _Frame) -> list[Point]:
    """Return the outline of the smallest and largest values of consecutive points."""
    parts = _parts(points, DRAWN_POINTS)
    centres = [(part[0][0] + part[-1][0]) / 2 for part in parts]
    highest = [max(y for _, y in part) for part in parts]
    lowest = [min(y for _, y in part) for part in parts]
    above = [frame.pixels(x, y) for x, y in zip(centres, highest, strict=True)]
    below = [frame.pixels(x, y) for x, y in zip(centres, lowest, strict=True)]
    return above + below[::-1]


def _parts(points: Sequence[Point], count: int) -> list[Sequence[Point]]:
    """Divide the points into at most `count` consecutive parts of about the same length."""
    count = min(count, len(points))
    bounds = [index * len(points) // count for index in range(count + 1)]
    return [points[start:stop] for start, stop in pairwise(bounds)]


def _readings(points: Sequence[Point], frame: _Frame, percent: bool) -> str:
    """Return invisible columns with tooltips: iterations and their mean value."""
    rects = []
    parts = _parts(points, READINGS)
    width = (frame.width - frame.left - _RIGHT) / len(parts)
    for index, part in enumerate(parts):
        mean = sum(y for _, y in part) / len(part)
        first, last = (f"{x:,.0f}" for x in (part[0][0], part[-1][0]))
        which = f"iteration {first}" if first == last else f"mean of iterations {first} to {last}"
        rects.append(
            f'<rect class="reading" x="{frame.left + index * width:.1f}" y="{_TOP}" '
            f'width="{width:.1f}" height="{frame.height - _TOP - _BOTTOM}">'
            f"<title>{which}: {number(mean, percent)}</title></rect>"
        )
    return "".join(rects)


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _dot(name: str, point: Point, frame: _Frame, colour: int, percent: bool) -> str:
    x, y = frame.pixels(*point)
    value = f"{point[1]:.1%}" if percent else number(point[1])
    title = f"<title>{escape(name)}, iteration {point[0]:,.0f}: {value}</title>"
    return f'<circle class="dot s{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>'


def _tick_label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _svg(width: int, height: int, content: str, attributes: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" {attributes}>{content}</svg>'
