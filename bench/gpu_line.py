# SPDX-License-Identifier: Apache-2.0
"""The trace of a step (Optimizer.trace) as a drawing: a row for each of load, compute, gradient, update and publication, on one time line."""
import html

COLORS = {'load': '#1f77b4', 'compute': '#555', 'gradient': '#ff7f0e', 'update': '#2ca02c', 'publication': '#b00020'}
LEFT, WIDTH, ROW, GAP = 190, 900, 22, 8


def rows_of(document):
    """Spans of each row, in ms: those of the device or the store where it has some, else those of the threads."""
    lanes = {e['tid']: e['args']['name'] for e in document['traceEvents'] if e['ph'] == 'M'}
    rows = {}
    for category in COLORS:
        spans = [(lanes[e['tid']], e['ts'] / 1e3, (e['ts'] + e.get('dur', 0)) / 1e3, e['name']) for e in document['traceEvents']
                 if e['ph'] != 'M' and e['cat'] == category]
        of_device = [s for s in spans if s[0].startswith(('device: ', 'store: '))]  # of an update the trace has the beginning alone
        rows[category] = (of_device[0][0].split(':')[0] if of_device else 'threads', of_device or spans)
    return rows


def busy(spans):
    """ms in which any runs."""
    total, until = 0.0, 0.0
    for _, begin, end, _ in sorted(spans, key=lambda s: s[1]):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def svg(document, title):
    rows = rows_of(document)
    end = max((span[2] for _, spans in rows.values() for span in spans), default=1.0) or 1.0
    height = 40 + len(rows) * (ROW + GAP) + 30
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" font-family="sans-serif" font-size="12">',
             f'<rect width="100%" height="100%" fill="#fff"/><text x="10" y="20" font-size="14">{html.escape(title)}</text>']
    for i, (category, (where, spans)) in enumerate(rows.items()):
        y = 40 + i * (ROW + GAP)
        said = f'{busy(spans):.1f} ms' if any(stop > begin for _, begin, stop, _ in spans) else f'{len(spans)} begin'
        parts.append(f'<text x="10" y="{y + 15}">{category} ({where}), {said}</text>')
        for lane, begin, stop, name in spans:
            parts.append(f'<rect x="{LEFT + WIDTH * begin / end:.2f}" y="{y}" width="{max(1.0, WIDTH * (stop - begin) / end):.2f}" height="{ROW}" '
                         f'fill="{COLORS[category]}" fill-opacity=".8"><title>{html.escape(f"{lane}: {name}, {begin:.2f} to {stop:.2f} ms")}</title></rect>')
    y = 40 + len(rows) * (ROW + GAP) + 12
    parts += [f'<text x="{LEFT + WIDTH * k / 4:.0f}" y="{y}" text-anchor="middle" fill="#666">{end * k / 4:.1f}</text>' for k in range(5)]
    return '\n'.join([*parts, f'<text x="10" y="{y}" fill="#666">milliseconds</text></svg>\n'])
