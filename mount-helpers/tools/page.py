# SPDX-License-Identifier: Apache-2.0
"""The page of hitrainctl report: one file, readable without a network. It has no program and asks for nothing, which its
policy also tells the browser. Each name and text of the store goes through charts.text().
"""
import time

import plan
from accesses import OPS
from charts import COLUMNS, bars, legend, line, name, number_text, seconds_text, strip, table, text
from store import size_text

MODELS_MAX = 64
STEPS_SHOWN, MODELS_DRAWN, WINDOW_STEPS, FILES_SHOWN = 240, 16, 4, 50
SETTING_CHARACTERS = 512

HEAD = '''<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<style>
:root{color-scheme:light dark;--back:#fff;--text:#1a1a1a;--soft:#666;--line:#ccc;--a:#2f6fb0;--b:#c2651b;--c:#3f8f46;\
--d:#8a55b5;--bad:#b3261e;--warn:#8a5a00}
@media(prefers-color-scheme:dark){:root{--back:#16181c;--text:#e6e6e6;--soft:#a0a0a0;--line:#444;--a:#6aa9e9;\
--b:#f0a35e;--c:#7cc983;--d:#c39be6;--bad:#ff8a80;--warn:#ffca6b}}
body{background:var(--back);color:var(--text);font:15px/1.5 sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem}h2{margin-top:2.2rem;border-bottom:1px solid var(--line)}h3{margin-bottom:.2rem}
p{margin:.4rem 0}.soft,.legend{color:var(--soft)}.name{font-family:monospace;overflow-wrap:anywhere}
svg{width:100%;height:auto;display:block}svg.bar{width:200px;height:12px}
text{fill:var(--soft);font:13px sans-serif}.end{text-anchor:end}
.grid{stroke:var(--line);fill:none}.mark{stroke:var(--soft);stroke-dasharray:4;fill:none}.empty{fill:var(--line)}
.bar .empty{fill:none}.line{stroke:var(--a);stroke-width:1.6;fill:none}
.s0{fill:var(--a);background:var(--a)}.s1{fill:var(--b);background:var(--b)}.s2{fill:var(--c);background:var(--c)}\
.s3{fill:var(--d);background:var(--d)}
.key{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 .8em}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.15rem .6rem .15rem 0;\
border-bottom:1px solid var(--line);vertical-align:top}
.tiles{display:flex;flex-wrap:wrap;gap:.6rem}.tile{border:1px solid var(--line);border-radius:.4rem;padding:.5rem .9rem}\
.tile b{display:block;font-size:1.25rem}.error{color:var(--bad)}.warn{color:var(--warn)}
</style>
'''


def time_text(seconds):
    try:
        return time.strftime('%F %T %z', time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ''


def head(r):
    return (f'{HEAD}<title>hitrain: {text(r.point)}</title>\n</head>\n<body>\n<h1>Store at {name(r.point)}</h1>\n'
            f'<p class="soft">{time_text(r.at)}, hitrain {text(r.version)}</p>\n')


def tiles(r):
    f = r.counters
    total, accesses = f['total_bytes'], f['hits'] + f['misses']
    shown = (
        (f'{size_text(total - min(f["available_bytes"], total))} of {size_text(total)}', 'space in use'),
        (f'{size_text(f["resident_bytes"])} of {size_text(f["dram_bytes"])}', 'in the DRAM tier'),
        (f'{f["hits"] * 100 / max(accesses, 1):.1f} %', 'of accesses found in memory'),
        (size_text(sum(d.number('read_bytes') for d in r.devices)), 'read from devices'),
        (size_text(sum(d.number('written_bytes') for d in r.devices)), 'written to devices'),
        (f'{f["error_events"]}, {f["warn_events"]}', 'errors and warnings'))
    return '<div class="tiles">\n' + ''.join(f'<div class="tile"><b>{v}</b>{what}</div>\n' for v, what in shown) + '</div>\n'


# ---- steps and losses ----

def model_steps(model, ends):
    count = len(ends) - 1
    whole = (ends[-1] - ends[0]) / 1e9
    times = [max(b - a, 0) / 1e9 for a, b in zip(ends, ends[1:])]
    columns = [times[i * count // COLUMNS] for i in range(COLUMNS)]
    rate = count / whole if whole > 0 else 0
    return (f'<h3>/{name(model.path)}</h3>\n<p>{count} steps in {whole:.3f} s: {rate:.3f} steps per second. '
            'The drawing has the time of each.</p>\n'
            + bars('time of each step', (1, count), 'steps', seconds_text, {'': columns}))


def steps(r):
    if r.trace is None:
        return "<h2>Steps</h2>\n<p>Only root and the owner of the mount's root may read the trace.</p>\n"
    drawn = [(model, r.trace.ends(model, STEPS_SHOWN + 1)) for model in r.trace.models()]
    parts = [model_steps(model, ends) for model, ends in drawn if len(ends) > 1]
    return '<h2>Steps</h2>\n' + (''.join(parts[:MODELS_DRAWN]) or '<p>The trace has no two ends of steps of one model.</p>\n')


def loss(r):
    found = r.losses
    if not found:
        return ''
    means = f'; each point here is the mean of {found.each}' if found.each > 1 else ''
    skipped = f'; {found.skipped} lines have no finite loss' if found.skipped else ''
    return (f'<h2>Loss</h2>\n<p>{found.points} points of {name(found.path)}, the last {found.loss[-1]:.5g}{means}{skipped}.</p>\n'
            + line('loss', 'steps', number_text, found.step, found.loss))


# ---- memory ----

def tier(f):
    resident, dram = f['resident_bytes'], max(f['dram_bytes'], 1)
    dirty = min(f['dirty_bytes'], resident)
    passed = min(f['passthrough_used_bytes'], resident - dirty)
    parts = {'passthrough': passed, 'dirty': dirty, 'clean': resident - dirty - passed}
    return (f'<p>{size_text(resident)} of {size_text(f["dram_bytes"])} in the DRAM tier hold content; '
            f'{size_text(f["protected_bytes"])} are protected; the staging pool has {size_text(f["staging_bytes"])}, '
            f'of which {size_text(f["staging_used_bytes"])} are used.</p>\n'
            + strip('tier', 'use of the DRAM tier', 1000, 24, [min(p, dram) * 1000 / dram for p in parts.values()])
            + '\n' + legend(f'{what} {size_text(part)}' for what, part in parts.items()))


def planned(p):
    """Two columns of the plan are one of the drawing: the mean of content in memory, the sum of reads."""
    axes = (0, p.step_ns / 1e9), 's of a step', size_text
    pairs = [slice(i * plan.COLUMNS // COLUMNS, (i + 1) * plan.COLUMNS // COLUMNS) for i in range(COLUMNS)]
    in_memory = [sum(p.in_memory[s]) * COLUMNS / plan.COLUMNS for s in pairs]
    return ('<h3>Over one step</h3>\n<p>The plan that the store follows: content in memory.</p>\n'
            + bars('content in memory over one step', *axes, {'': in_memory})
            + f'<p>What devices read in 1/{COLUMNS} of a step, because it has no room.</p>\n'
            + bars('reads of a step', *axes, {'': [sum(p.read[s]) for s in pairs]}))


def memory(r):
    body = tier(r.counters)
    if r.plan and r.plan.active:
        body += planned(r.plan)
    elif r.plan:
        body += '<p>No plan of a step is followed: either all content has room, or steps do not repeat yet.</p>\n'
    return '<h2>Memory</h2>\n' + body


# ---- traffic ----

def window(trace):
    """The last steps of the model that ended one last; the whole trace where there are no two ends."""
    ends = trace.ends(trace.steps[-1][0], WINDOW_STEPS + 1) if trace.steps else []
    return (ends[0], ends[-1], ends) if len(ends) > 1 else (trace.first_ns, trace.last_ns, [])


def over_time(trace):
    begin, end, marks = window(trace)
    if end <= begin:
        return ''
    moved, waited = {op: [0] * COLUMNS for op in OPS}, [0.0] * COLUMNS
    for at, op, size, wait in zip(trace.time_ns, trace.op, trace.bytes, trace.waited_ns):
        if begin <= at <= end:
            column = min((at - begin) * COLUMNS // (end - begin), COLUMNS - 1)
            moved[OPS[op]][column] += size
            waited[column] += wait / 1e9
    axes, lines = ((begin / 1e9, end / 1e9), 's after the mount'), [m / 1e9 for m in marks]
    return (f'<h3>Input and output over the {"last steps" if marks else "trace"}</h3>\n<p>Bytes that programs and the optimizer '
            f'accessed in 1/{COLUMNS} of {(end - begin) / 1e9:.3f} s.{" A dashed line is the end of a step." if marks else ""}</p>\n'
            + bars('bytes of accesses over time', *axes, size_text, moved, lines)
            + '<p>How long these accesses waited, in seconds.</p>\n'
            + bars('time that accesses waited', *axes, seconds_text, {'': waited}, lines))


def tensors(trace):
    files = trace.largest(FILES_SHOWN)
    rows = [[name(f.path) if f.path else f'(inode {f.id}, deleted)', *(size_text(b) if b else '' for b in f.bytes),
             f'{f.waited_ns / 1e9:.3f} s'] for f in files]
    return (f'<h3>By tensor</h3>\n<p>The {len(files)} files with the most bytes, of {len(trace.files)} in the last {len(trace)} '
            'accesses.</p>\n' + table(('file', 'read', 'written', 'gradient', 'updated', 'waited'), rows))


def devices(r):
    moved = [(d.number('read_bytes'), d.number('written_bytes')) for d in r.devices]
    most = max([sum(m) for m in moved] + [1])
    rows = [[name(d.text('path') or '(missing)'), text(d.text('health')), *map(size_text, m),
             strip('bar', 'read and written', 200, 12, [200 * part / most for part in m])] for d, m in zip(r.devices, moved)]
    return '<h3>By device</h3>\n<p>Since the mount.</p>\n' + table(('device', 'health', 'read', 'written', ''), rows)


def traffic(r):
    body = ''
    if r.trace is not None and len(r.trace):
        body = over_time(r.trace) + tensors(r.trace)
    elif r.trace is not None:
        body = '<p>The trace has no access yet.</p>\n'
    return '<h2>Traffic</h2>\n' + body + devices(r)


# ---- tables ----

def models(r):
    found = r.models
    if not found:
        return '<h2>Models</h2>\n<p>The caller finds no model in this store.</p>\n'
    rows = [[name(m.text('path')), f'{m.number("step")}{", one open" if m.get("open") is True else ""}', m.number('durable_step'),
             size_text(m.number('state_bytes')), size_text(m.number('grad_bytes')), text(r.optimizers.get(m.text('path'), ''))]
            for m in found[:MODELS_MAX]]
    more = f'<p>These are the first {MODELS_MAX} of {len(found)} models.</p>\n' if len(found) > MODELS_MAX else ''
    return '<h2>Models</h2>\n' + table(('model', 'step', 'durable', 'state', 'gradients', 'optimizer'), rows) + more


def event_row(e):
    level = e.text('level')[:8]
    colour = f' class="{level}"' if level in ('error', 'warn') else ''
    times = f' ({e.number("count")} times)' if e.number('count') > 1 else ''
    path = name(e.text('path')) + ': ' if e.text('path') else ''
    return (time_text(e.number('time_ns') / 1e9), f'<span{colour}>{text(level)}</span>', text(e.text('code')[:32]),
            f'{path}{text(e.text("text")[:512])}{times}')


def events(r):
    if r.events is None:
        return "<h2>Events</h2>\n<p>Only root and the owner of the mount's root may read events.</p>\n"
    return (f'<h2>Events</h2>\n<p>The newest {len(r.events)} of {r.events_seen} since the mount.</p>\n'
            + table(('time', 'level', 'code', 'what'), map(event_row, r.events)))


def configuration(r):
    rows = ((f'<b>{text(what)}</b>', name(value, SETTING_CHARACTERS)) for what, value in r.settings if value)
    return '<h2>Configuration</h2>\n' + table((), rows)


def of(r):
    parts = head, tiles, steps, loss, memory, traffic, models, events, configuration
    return ''.join(part(r) for part in parts) + '</body>\n</html>\n'
