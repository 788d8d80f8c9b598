# SPDX-License-Identifier: Apache-2.0
"""Text and drawings of a page of HTML. Drawings are inline SVG, whose colours are classes of the page's style sheet.

Names of files and texts of events may hold anything: they go through text() alone.
"""
import html
import math

from store import CONTROLS_AND_DIRECTIONS, replace

COLUMNS = 240
LEFT, RIGHT, TOP, BOTTOM, HEIGHT, WIDTH = 80, 990, 14, 180, 206, 1000
NAME_CHARACTERS = 120


def text(value):
    """Escaped for text and for attributes in quotes."""
    return html.escape(replace(CONTROLS_AND_DIRECTIONS, value, '\ufffd'))


def name(value, most=NAME_CHARACTERS):
    """The end of a long name tells more than its beginning. Its direction of writing changes nothing around it."""
    cut = '\u2026' + value[-most:] if len(value) > most else value
    return f'<bdi class="name">{text(cut)}</bdi>'


def seconds_text(value):
    return f'{value:.3g} s'


def number_text(value):
    return f'{value:.4g}'


def part(value, low, high):
    """Where a value is between two others, from 0 to 1. Halves, because the difference of two numbers may be no number."""
    whole = high / 2 - low / 2
    return (value / 2 - low / 2) / whole if whole > 0 else 0.5


class Axes:
    def __init__(self, label, x, x_unit, y, y_text):
        """x and y: the two ends."""
        self.x_from, self.x_to = x
        self.y_from, self.y_to = y
        self.label, self.x_unit, self.y_text = label, x_unit, y_text

    def x(self, value):
        return LEFT + (RIGHT - LEFT) * part(value, self.x_from, self.x_to)

    def y(self, value):
        return BOTTOM - (BOTTOM - TOP) * part(value, self.y_from, self.y_to)

    def svg(self, *inside):
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(self.label)}">']
        for value in (self.y_from, self.y_from / 2 + self.y_to / 2, self.y_to):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
                         f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{text(self.y_text(value))}</text>')
        parts.append(f'<text x="{LEFT}" y="{BOTTOM + 18}">{self.x_from:.6g}</text>'
                     f'<text x="{RIGHT}" y="{BOTTOM + 18}" class="end">{self.x_to:.6g} {text(self.x_unit)}</text>')
        return '\n'.join([*parts, *inside, '</svg>\n'])


def bars(label, x, x_unit, y_text, series, marks=()):
    """Columns of bars. series: name -> COLUMNS values; they stand on each other. marks: places that get a vertical line."""
    axes = Axes(label, x, x_unit, (0, max(map(sum, zip(*series.values()))) or 1), y_text)
    width = (RIGHT - LEFT) / COLUMNS
    base = [0] * COLUMNS
    paths = []
    for number, values in enumerate(series.values()):
        path = ''
        for i, value in enumerate(values):
            if value > 0:
                low, high = axes.y(base[i]), axes.y(base[i] + value)
                path += f'M{LEFT + width * i:.1f} {low:.1f}V{high:.1f}h{width:.1f}V{low:.1f}z'
                base[i] += value
        paths.append(f'<path class="s{number}" d="{path}"/>')
    paths += [f'<path class="mark" d="M{axes.x(m):.1f} {TOP}V{BOTTOM}"/>' for m in marks]
    return axes.svg(*paths) + (legend(series) if len(series) > 1 else '')


def line(label, x_unit, y_text, x, y):
    """A line through points in any order of x. y that is no number breaks it."""
    known = [v for v in y if math.isfinite(v)] or [0]
    axes = Axes(label, (min(x), max(x)), x_unit, (min(known), max(known)), y_text)
    path, pen = '', 'M'
    for at, value in zip(x, y):
        finite = math.isfinite(value)
        path += f'{pen}{axes.x(at):.1f} {axes.y(value):.1f}' if finite else ''
        pen = 'L' if finite else 'M'
    return axes.svg(f'<path class="line" d="{path}"/>')


def legend(names):
    keys = ' '.join(f'<span class="key s{i}"></span>{text(n)}' for i, n in enumerate(names))
    return f'<p class="legend">{keys}</p>\n'


def strip(kind, label, width, height, parts):
    """One bar of parts beside each other, whose widths are given."""
    at, paths = 0, ''
    for number, part in enumerate(parts):
        paths += f'<path class="s{number}" d="M{at:.1f} 0h{part:.1f}v{height}h-{part:.1f}z"/>'
        at += part
    return (f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
            f'<path class="empty" d="M0 0h{width}v{height}H0z"/>{paths}</svg>')


def table(heads, rows):
    """The cells are HTML."""
    head = f'<tr>{"".join(f"<th>{h}</th>" for h in heads)}</tr>\n' if heads else ''
    body = ''.join(f'<tr>{"".join(f"<td>{c}</td>" for c in row)}</tr>\n' for row in rows)
    return f'<div class="wide"><table>{head}{body}</table></div>\n'
