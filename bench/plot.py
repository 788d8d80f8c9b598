# SPDX-License-Identifier: Apache-2.0
"""Curves and bars as SVG and as text, with nothing but the standard library."""
import html
import math
from typing import List, NamedTuple, Optional, Sequence, Tuple

GRAY, GRID, MARK = '#666', '#e4e4e4', '#b00020'
Point = Tuple[float, float]
Box = Tuple[float, float, float, float]  # left, top, right, bottom, in pixels


class Curve(NamedTuple):
    label: str
    color: str
    points: List[Point]
    width: float = 2
    dash: str = ''           # of SVG; '' for a solid line
    letter: str = '*'        # in the text plot


class Bar(NamedTuple):
    label: str
    value: float
    color: str
    remark: str


class Column(NamedTuple):
    """Values above a label, and those beside which they are seen: a band from the least to the greatest."""
    label: str
    color: str
    values: List[float]
    band: List[float]


class Mark(NamedTuple):
    """A place on the x axis, and a few lines of words."""
    x: float
    words: str


def smooth(points: Sequence[Point], span: int) -> List[Point]:
    """Running mean over the last `span` points."""
    out = []
    for i in range(len(points)):
        window = [y for _, y in points[max(0, i + 1 - span):i + 1]]
        out.append((points[i][0], sum(window) / len(window)))
    return out


class Axis:
    """A range of values, and round ones among them."""

    def __init__(self, values: Sequence[float], margin: float, about: int) -> None:
        low, high = min(values), max(values)
        self.low, self.high, self.about = low - margin * (high - low), high + margin * (high - low), about

    def part(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        return (value - self.low) / ((self.high - self.low) or 1)

    def ticks(self) -> List[float]:
        raw = max(self.high - self.low, 1e-12) / self.about
        scale = 10 ** math.floor(math.log10(raw))
        step = next(m * scale for m in (1, 2, 5, 10) if m * scale >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


class LogAxis:
    """The same from one whole power of ten to another."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low, self.high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        self.high = max(self.high, self.low + 1)

    def part(self, value: float) -> float:
        return (math.log10(value) - self.low) / (self.high - self.low)

    def ticks(self) -> List[float]:
        return [10.0 ** e for e in range(self.low, self.high + 1)]


def text_plot(curves: Sequence[Curve], width: int = 72, height: int = 16) -> str:
    """Letters in a grid; '*' where curves meet."""
    x, y = (Axis([p[i] for c in curves for p in c.points], 0, 1) for i in (0, 1))
    grid = [[' '] * width for _ in range(height)]
    for curve in curves:
        for point in curve.points:
            column, row = round(x.part(point[0]) * (width - 1)), round((1 - y.part(point[1])) * (height - 1))
            there = grid[row][column]
            grid[row][column] = curve.letter if there in (' ', curve.letter) else '*'
    lines = []
    for i, cells in enumerate(grid):
        value = y.high - (y.high - y.low) * i / (height - 1)
        lines.append(f'{value:6.2f} |' if i % 5 == 0 or i == height - 1 else '       |')
        lines[-1] += ''.join(cells).rstrip()
    lines.append('       +' + '-' * width)
    lines.append('        ' + f'{x.low:<8g}' + 'step'.center(width - 16) + f'{x.high:>8g}')
    lines += [f'        {c.letter}  {c.label}' for c in curves]
    lines.append('        *  where they meet')
    return '\n'.join(lines)


class Svg:
    """Collects elements; coordinates are pixels from the upper left."""

    def __init__(self, width: int, height: int) -> None:
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                      f'height="{height}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13" '
                      f'fill="#222">', f'<rect width="{width}" height="{height}" fill="#fff"/>']

    def line(self, x0: float, y0: float, x1: float, y1: float, color: str, width: float = 1.0, dash: str = '') -> None:
        extra = f' stroke-dasharray="{dash}"' if dash else ''
        self.parts.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{color}" '
                          f'stroke-width="{width}"{extra}/>')

    def path(self, points: Sequence[Point], curve: Curve) -> None:
        extra = f' stroke-dasharray="{curve.dash}"' if curve.dash else ''
        at = ' '.join(f'{x:.1f},{y:.1f}' for x, y in points)
        self.parts.append(f'<polyline points="{at}" fill="none" stroke="{curve.color}" stroke-width="{curve.width}" '
                          f'stroke-linejoin="round"{extra}/>')

    def dot(self, at: Point, color: str) -> None:
        self.parts.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="3" fill="{color}"/>')

    def rect(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>')

    def text(self, x: float, y: float, text: str, anchor: str = 'start', size: int = 13, weight: str = 'normal',
             color: str = '#222', turn: bool = False, halo: bool = False) -> None:
        extra = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ''
        extra += ' stroke="#fff" stroke-width="5" paint-order="stroke"' if halo else ''
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
                          f'font-weight="{weight}" fill="{color}"{extra}>{html.escape(text)}</text>')

    def __str__(self) -> str:
        return '\n'.join(self.parts + ['</svg>', ''])


class Chart:
    """Curves between two axes, inside a box."""

    def __init__(self, svg: Svg, box: Box, curves: Sequence[Curve], log: bool = False) -> None:
        self.svg, self.box, self.log = svg, box, log
        self.curves = [c for c in curves if c.points]
        xs, ys = ([p[i] for c in self.curves for p in c.points] for i in (0, 1))
        self.x, self.y = (LogAxis(xs), LogAxis(ys)) if log else (Axis(xs, 0, 8), Axis(ys, 0.05, 6))

    def place(self, x: float, y: float) -> Point:
        left, top, right, bottom = self.box
        return left + self.x.part(x) * (right - left), bottom - self.y.part(y) * (bottom - top)

    def draw_axes(self, title: str, x_label: str, y_label: str) -> None:
        left, top, right, bottom = self.box
        svg = self.svg
        svg.text(left, top - 18, title, size=15, weight='bold')
        for value in self.y.ticks():
            y = bottom - self.y.part(value) * (bottom - top)
            svg.line(left, y, right, y, GRID)
            svg.text(left - 8, y + 4, f'{value:g}', 'end', color=GRAY)
        for value in self.x.ticks():
            x = left + self.x.part(value) * (right - left)
            if self.log:
                svg.line(x, top, x, bottom, GRID)
            svg.line(x, bottom, x, bottom + 5, GRAY)
            svg.text(x, bottom + 20, f'{value:g}', 'middle', color=GRAY)
        svg.line(left, top, left, bottom, GRAY)
        svg.line(left, bottom, right, bottom, GRAY)
        svg.text((left + right) / 2, bottom + 42, x_label, 'middle', color=GRAY)
        svg.text(left - 46, (top + bottom) / 2, y_label, 'middle', color=GRAY, turn=True)

    def draw_mark(self, mark: Mark) -> None:
        _, top, _, bottom = self.box
        x = self.place(mark.x, self.y.low)[0]
        self.svg.line(x, top + 22 * len(self.curves) + 8, x, bottom, MARK, 1.2, '3 3')
        for i, words in enumerate(mark.words.split('\n')):
            self.svg.text(x + 8, (top + bottom) / 2 + 17 * i, words, color=MARK, halo=True)

    def draw_curves(self) -> None:
        for curve in self.curves:
            points = [self.place(x, y) for x, y in curve.points]
            self.svg.path(points, curve)
            for point in points if self.log else []:
                self.svg.dot(point, curve.color)

    def draw_legend(self, left: float, top: float, width: float) -> None:
        self.svg.rect(left, top, width, 22 * len(self.curves) + 2, '#fff')
        for i, curve in enumerate(self.curves):
            y = top + 14 + 22 * i
            self.svg.path([(left + 8, y - 4), (left + 46, y - 4)], curve)
            self.svg.text(left + 54, y, curve.label)


def draw_bars(svg: Svg, box: Box, bars: Sequence[Bar], title: str) -> None:
    left, top, right, bottom = box
    most = max(b.value for b in bars)
    svg.text(left, top - 18, title, size=15, weight='bold')
    slot = (right - left) / len(bars)
    for i, bar in enumerate(bars):
        height = bar.value / most * (bottom - top - 24)
        x = left + slot * i + slot * 0.2
        svg.rect(x, bottom - height, slot * 0.6, height, bar.color)
        svg.text(x + slot * 0.3, bottom - height - 8, f'{bar.value:.3g}', 'middle', weight='bold')
        svg.text(x + slot * 0.3, bottom + 20, bar.label, 'middle')
        svg.text(x + slot * 0.3, bottom + 38, bar.remark, 'middle', size=11, color=GRAY)
    svg.line(left, bottom, right, bottom, GRAY)


def draw_columns(svg: Svg, box: Box, columns: Sequence[Column], title: str) -> None:
    """A dot for each value, a line for their mean."""
    left, top, right, bottom = box
    axis = Axis([v for c in columns for v in c.values + c.band], 0.08, 6)
    slot = (right - left) / len(columns)

    def height(value: float) -> float:
        return bottom - axis.part(value) * (bottom - top)

    svg.text(left, top - 18, title, size=15, weight='bold')
    for i, column in enumerate(columns):
        if column.band:
            svg.rect(left + slot * i, height(max(column.band)), slot, height(min(column.band)) - height(max(column.band)), '#eceff5')
    for value in axis.ticks():
        svg.line(left, height(value), right, height(value), GRID)
        svg.text(left - 8, height(value) + 4, f'{value:g}', 'end', color=GRAY)
    for i, column in enumerate(columns):
        x = left + slot * (i + 0.5)
        for value in column.values:
            svg.dot((x, height(value)), column.color)
        if column.values:
            mean = height(sum(column.values) / len(column.values))
            svg.line(x - slot * 0.3, mean, x + slot * 0.3, mean, column.color, 2)
        svg.text(x, bottom + 20, column.label, 'middle', size=11)
    svg.line(left, bottom, right, bottom, GRAY)


def losses_and_columns(panels: Sequence[Tuple[str, Sequence[Curve], Sequence[Sequence[Column]]]], titles: Tuple[str, str], y_label: str) -> str:
    """For each model losses by step on the left, and final ones on the right, in parts with an axis each."""
    svg = Svg(1160, 420 * len(panels))
    for i, (name, curves, parts) in enumerate(panels):
        top, left = 420 * i + 50, 620
        chart = Chart(svg, (70, top, 550, top + 310), curves)
        chart.draw_axes(f'{name}: {titles[0]}', 'step', y_label)
        chart.draw_curves()
        chart.draw_legend(380, top, 170)
        slot = (1150 - left - 60 * (len(parts) - 1)) / max(1, sum(map(len, parts)))
        for part in parts:
            draw_columns(svg, (left, top, left + slot * len(part), top + 310), part, '' if part is not parts[0] else titles[1])
            left += slot * len(part) + 60
    return str(svg)


def log_log(title: str, x_label: str, y_label: str, curves: Sequence[Curve]) -> str:
    """Both axes logarithmic, the legend beside the curves."""
    svg = Svg(700, 420)
    chart = Chart(svg, (70, 50, 460, 360), curves, log=True)
    chart.draw_axes(title, x_label, y_label)
    chart.draw_curves()
    chart.draw_legend(470, 50, 230)
    return str(svg)


def losses_and_bars(curves: Sequence[Curve], mark: Optional[Mark], bars: Sequence[Bar], titles: Tuple[str, str]) -> str:
    """Losses by step on the left, bars on the right."""
    svg = Svg(1160, 500)
    chart = Chart(svg, (70, 60, 740, 430), curves)
    chart.draw_axes(titles[0], 'step', 'training loss (nats per byte)')
    if mark:
        chart.draw_mark(mark)
    chart.draw_curves()
    chart.draw_legend(260, 60, 358)
    draw_bars(svg, (810, 60, 1130, 430), bars, titles[1])
    return str(svg)
