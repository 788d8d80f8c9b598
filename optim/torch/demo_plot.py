# SPDX-License-Identifier: Apache-2.0
"""Loss curves as text and as SVG, with nothing but the standard library."""
import html
import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple


class Curve(NamedTuple):
    label: str
    letter: str              # in the text plot
    color: str
    width: float
    dash: str                # of SVG; '' for a solid line
    points: List[Tuple[float, float]]


class Bar(NamedTuple):
    label: str
    value: float
    color: str
    remark: str


def smooth(points: Sequence[Tuple[float, float]], span: int) -> List[Tuple[float, float]]:
    """Running mean over the last `span` points."""
    out = []
    for i in range(len(points)):
        window = [y for _, y in points[max(0, i + 1 - span):i + 1]]
        out.append((points[i][0], sum(window) / len(window)))
    return out


def bounds(curves: Sequence[Curve]) -> Tuple[float, float, float, float]:
    xs = [x for c in curves for x, _ in c.points]
    ys = [y for c in curves for _, y in c.points]
    return min(xs), max(xs), min(ys), max(ys)


def ticks(low: float, high: float, about: int) -> List[float]:
    """Round numbers from low to high."""
    raw = max(high - low, 1e-12) / about
    scale = 10 ** math.floor(math.log10(raw))
    step = next(m * scale for m in (1, 2, 5, 10) if m * scale >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def text_plot(curves: Sequence[Curve], width: int = 72, height: int = 16) -> str:
    """Letters in a grid; '*' where curves meet."""
    x0, x1, y0, y1 = bounds(curves)
    grid = [[' '] * width for _ in range(height)]
    for curve in curves:
        for x, y in curve.points:
            column = round((x - x0) / ((x1 - x0) or 1) * (width - 1))
            row = round((y1 - y) / ((y1 - y0) or 1) * (height - 1))
            there = grid[row][column]
            grid[row][column] = curve.letter if there in (' ', curve.letter) else '*'
    lines = []
    for i, row in enumerate(grid):
        value = y1 - (y1 - y0) * i / (height - 1)
        lines.append(f'{value:6.2f} |' if i % 5 == 0 or i == height - 1 else '       |')
        lines[-1] += ''.join(row).rstrip()
    lines.append('       +' + '-' * width)
    lines.append('        ' + f'{x0:<8g}' + 'step'.center(width - 16) + f'{x1:>8g}')
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

    def path(self, points: Sequence[Tuple[float, float]], color: str, width: float, dash: str) -> None:
        extra = f' stroke-dasharray="{dash}"' if dash else ''
        at = ' '.join(f'{x:.1f},{y:.1f}' for x, y in points)
        self.parts.append(f'<polyline points="{at}" fill="none" stroke="{color}" stroke-width="{width}" '
                          f'stroke-linejoin="round"{extra}/>')

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


GRAY, GRID, MARK = '#666', '#e4e4e4', '#b00020'


def draw_curves(svg: Svg, box: Tuple[float, float, float, float], curves: Sequence[Curve], title: str,
                mark: Optional[Tuple[float, str]]) -> None:
    """Axes, curves, legend and one marked place on the x axis, inside box = left, top, right, bottom."""
    left, top, right, bottom = box
    x0, x1, y0, y1 = bounds(curves)
    y0, y1 = y0 - 0.05 * (y1 - y0), y1 + 0.05 * (y1 - y0)

    def place(x: float, y: float) -> Tuple[float, float]:
        return left + (x - x0) / (x1 - x0) * (right - left), bottom - (y - y0) / (y1 - y0) * (bottom - top)

    svg.text(left, top - 18, title, size=15, weight='bold')
    for value in ticks(y0, y1, 6):
        y = place(x0, value)[1]
        svg.line(left, y, right, y, GRID)
        svg.text(left - 8, y + 4, f'{value:g}', 'end', color=GRAY)
    for value in ticks(x0, x1, 8):
        x = place(value, y0)[0]
        svg.line(x, bottom, x, bottom + 5, GRAY)
        svg.text(x, bottom + 20, f'{value:g}', 'middle', color=GRAY)
    svg.line(left, top, left, bottom, GRAY)
    svg.line(left, bottom, right, bottom, GRAY)
    svg.text((left + right) / 2, bottom + 42, 'step', 'middle', color=GRAY)
    svg.text(left - 46, (top + bottom) / 2, 'training loss (nats per byte)', 'middle', color=GRAY, turn=True)
    if mark:
        x = place(mark[0], y0)[0]
        svg.line(x, top + 22 * len(curves) + 8, x, bottom, MARK, 1.2, '3 3')
        for i, words in enumerate(mark[1].split('\n')):
            svg.text(x + 8, (top + bottom) / 2 + 17 * i, words, color=MARK, halo=True)
    for curve in curves:
        svg.path([place(x, y) for x, y in curve.points], curve.color, curve.width, curve.dash)
    svg.rect(right - 358, top, 358, 22 * len(curves) + 2, '#fff')
    for i, curve in enumerate(curves):
        y = top + 14 + 22 * i
        svg.path([(right - 350, y - 4), (right - 312, y - 4)], curve.color, curve.width, curve.dash)
        svg.text(right - 304, y, curve.label)


def draw_bars(svg: Svg, box: Tuple[float, float, float, float], bars: Sequence[Bar], title: str) -> None:
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


def svg_plot(curves: Sequence[Curve], bars: Sequence[Bar], titles: Dict[str, str],
             mark: Optional[Tuple[float, str]] = None) -> str:
    svg = Svg(1160, 500)
    draw_curves(svg, (70, 60, 740, 430), curves, titles['curves'], mark)
    draw_bars(svg, (810, 60, 1130, 430), bars, titles['bars'])
    return str(svg)
