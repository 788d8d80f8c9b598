# SPDX-License-Identifier: Apache-2.0
"""A plot with two logarithmic axes as SVG, with nothing but the standard library."""
import html
import math

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 50


class Line:
    def __init__(self, label, color, points):
        self.label, self.color, self.points = label, color, points


class Axis:
    """Whole powers of ten from one end to the other."""

    def __init__(self, values, begin, end):
        self.low, self.high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        self.high = max(self.high, self.low + 1)
        self.begin, self.end = begin, end

    def place(self, value):
        return self.begin + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self):
        return [10.0 ** e for e in range(self.low, self.high + 1)]


def text(x, y, words, anchor='middle', color='#222'):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{html.escape(words)}</text>'


def stroke(points, color, width):
    path = ' '.join(f'{x:.1f},{y:.1f}' for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def log_log(title, x_label, y_label, lines):
    lines = [line for line in lines if line.points]
    x = Axis([p[0] for line in lines for p in line.points], LEFT, WIDTH - RIGHT)
    y = Axis([p[1] for line in lines for p in line.points], HEIGHT - BOTTOM, TOP)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
             'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', text(LEFT, 22, title, 'start'),
             text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label), text(LEFT - 8, TOP - 8, y_label, 'end')]
    for v in x.ticks():
        parts += [stroke([(x.place(v), y.begin), (x.place(v), y.end)], '#ddd', 1), text(x.place(v), y.begin + 18, f'{v:g}')]
    for v in y.ticks():
        parts += [stroke([(x.begin, y.place(v)), (x.end, y.place(v))], '#ddd', 1), text(x.begin - 8, y.place(v) + 4, f'{v:g}', 'end')]
    for line in lines:
        points = [(x.place(a), y.place(b)) for a, b in line.points]
        parts.append(stroke(points, line.color, 2))
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{line.color}"/>' for a, b in points]
    for i, line in enumerate(reversed(lines)):
        parts.append(text(WIDTH - RIGHT + 14, TOP + 16 + 20 * i, line.label, 'start', line.color))
    return '\n'.join(parts + ['</svg>']) + '\n'
