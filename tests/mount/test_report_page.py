# SPDX-License-Identifier: Apache-2.0
"""The page of hitrainctl report without a mount: what it escapes, how it reads losses and accesses, and that it stays small."""
import math
import pathlib
import re
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / 'mount-helpers/tools'))
import accesses  # noqa: E402
import charts  # noqa: E402
import losses  # noqa: E402
import page  # noqa: E402
import plan  # noqa: E402
import report  # noqa: E402
import store  # noqa: E402

SUBST = '\ufffd'
BAD = '<i onx=\'">&'
BAD_HTML = '&lt;i onx=&#x27;&quot;&gt;&amp;'


def lines(*objects):
    return map(store.Line, objects)


def access(op, number=2, path='m', **figures):
    return {'time_ns': 1, 'op': op, 'id': number, 'path': path, **figures}


def report_of(trace=(), events=(), **figures):
    """A report with nothing but these."""
    r = report.Report('1.0', '/mnt', [('source', '/dev/x')])
    r.trace, r.plan, r.events = accesses.Trace(lines(*trace)), plan.Plan(store.Line(active=False)), list(lines(*events))
    r.events_seen = len(r.events)
    for key, value in figures.items():
        setattr(r, key, value)
    return r


def losses_of(text):
    found = losses.Losses('f')
    for line in text.split('\n'):
        found.take(line)
    return found


# ---- escaping ----

@pytest.mark.parametrize('text, html', [
    ('plain /a-b_c.1 \xe4\u2026', 'plain /a-b_c.1 \xe4\u2026'),
    ('<script>&"\'', '&lt;script&gt;&amp;&quot;&#x27;'),
    ('(\n)\t(\x7f)\x1b[', f'({SUBST}){SUBST}({SUBST}){SUBST}['),
    ('\udcff\x9b', 3 * SUBST),  # no UTF-8, and a control character of two bytes
    ('\u202e', 3 * SUBST),      # writes to the left
    ('\u2066', 3 * SUBST),
])
def test_texts_are_escaped(text, html):
    assert charts.text(text) == html


def test_long_names_keep_their_end():
    assert charts.name('aaaa\xe4/end', 4) == '<bdi class="name">\u2026/end</bdi>'
    assert charts.name('/end', 4) == '<bdi class="name">/end</bdi>'


def test_strings_of_a_hostile_daemon():
    line = store.parse('{"half": "\\ud800", "byte": "\\udcff", "number": -5, "huge": 1e300, "text": 7, "nan": NaN}')
    assert line.text('half') == SUBST and line.text('byte') == '\udcff' and line.text('text') == ''
    assert line.number('number') == line.number('huge') == line.number('nan') == line.number('none') == 0
    assert store.Line(n=1 << 99).number('n') == (1 << 64) - 1
    for text in '', '[]', '7', '{', '{"a": "\n"}', '[' * 60000:
        with pytest.raises(ValueError):
            store.parse(text)


def test_sizes():
    for count, text in ((0, '0 B'), (1023, '1023 B'), (1024, '1 KiB'), (1536, '1.5 KiB'), ((1 << 20) - 1, '1 MiB'),
                        (1 << 62, '4 EiB'), (0.7, '0 B')):
        assert store.size_text(count) == text


# ---- losses ----

@pytest.mark.parametrize('text, points, skipped, step, loss', [
    ('step,loss\n1,2.5\n2,2.25\n', 2, 0, 2, 2.25),
    ('"loss", time, "step"\r\n1.5,x,7\r\n', 1, 0, 7, 1.5),
    ('1,3\n2,nan\n3,1\n', 2, 1, 3, 1),
    ('4.5\n4.25', 2, 0, 2, 4.25),
    ('{"step": 5, "loss": 0.5}\n{"loss": 0.25, "other": "x"}\n{"loss": "<b>"}\n{"loss"\n', 2, 2, 2, 0.25),
    ('{"loss": true}\n{"loss": null}\n{"loss": 1e999}\n{"loss": "0.5", "more": {"x": []}}\n', 1, 3, 4, 0.5),
    ('a,b\nc,d\n', 0, 2, 0, 0),
    ('', 0, 0, 0, 0),
])
def test_losses_of_csv_and_json(text, points, skipped, step, loss):
    found = losses_of(text)
    assert (found.points, found.skipped, len(found.loss), len(found.step)) == (points, skipped, points, points)
    assert not points or (found.step[-1], found.loss[-1]) == (step, loss)


def test_many_points_become_means():
    points = 10 * losses.POINTS_MAX
    found = losses_of('\n'.join(f'{i},{2 * i}' for i in range(1, points + 1)))
    assert (found.points, found.each, len(found.loss)) == (points, 16, points // 16)
    for i, (step, loss) in enumerate(zip(found.step, found.loss)):
        assert math.isclose(step, 16 * i + 8.5) and math.isclose(loss, 2 * step)


def test_the_largest_numbers_have_means_and_places():
    """Neither their sum nor their difference is a number."""
    points = 2 * losses.POINTS_MAX
    found = losses_of('\n'.join(f'{i},{(-1) ** (i // 2) * 1.7e308}' for i in range(points)))
    assert all(map(math.isfinite, found.loss)) and (min(found.loss), max(found.loss)) == (-1.7e308, 1.7e308)
    drawn = charts.line('loss', 'step', charts.number_text, found.step, found.loss)
    assert not re.search('nan|inf', drawn) and '>0<' in drawn and f'L{charts.RIGHT}' in drawn


def test_lines_that_are_too_long_are_passed_over(tmp_path):
    path = tmp_path / 'loss.csv'
    path.write_text('1,3\n2,' + '4' * 20000 + '\n3,5\n4,6')
    found = losses.read(str(path))
    assert (found.points, found.skipped, found.loss) == (3, 1, [3, 5, 6])


# ---- accesses ----

def test_accesses_are_summed_by_file():
    trace = accesses.Trace(lines(
        access('read', 9, 'a', bytes=10, waited_ns=3), access('update', 7, 'b', bytes=100), access('read', 9, 'a', bytes=20),
        access('open', 8, 'c'), access('step', 2, 'model')))
    assert [f.path for f in trace.largest(4)] == ['b', 'a'] and [f.path for f in trace.largest(1)] == ['b']
    assert trace.largest(4)[1].bytes == [30, 0, 0, 0] and trace.largest(4)[1].waited_ns == 3
    assert len(trace.steps) == 1 and len(trace) == 3
    with pytest.raises(ValueError):
        trace.add(store.Line(time_ns=9))


def test_a_commit_without_a_gradient_ends_no_step():
    """It publishes what asynchronous steps have done: their own ends are there already."""
    trace = accesses.Trace()
    for op, steps in (('gradient', 0), ('step', 1), ('commit', 1), ('gradient', 1), ('commit', 2), ('commit', 2), ('step', 3)):
        trace.add(store.Line(access(op)))
        assert len(trace.steps) == steps


# ---- the plan ----

def test_columns_of_a_plan():
    step = 480 * 1000
    p = plan.Plan(store.Line(active=True, step_ns=step, now_ns=5))
    p.add(store.Line(used_ns=0, next_ns=3000, bytes=7, leaves=False))                               # stays for 3 columns
    p.add(store.Line(used_ns=479000, next_ns=481000, bytes=9, leaves=False))                        # into the next step
    p.add(store.Line(used_ns=10000, next_ns=20000, fetch_ns=16000, bytes=8, leaves=True))           # is read in 4 columns
    p.add(store.Line(used_ns=30000, next_ns=31000, fetch_ns=31000, bytes=5, leaves=True))           # is not read again
    assert p.in_memory[:5] == [16, 7, 7, 0, 0] and p.in_memory[479] == 9
    assert p.in_memory[10:21] == [8, 0, 0, 0, 0, 0, 8, 8, 8, 8, 0] and p.in_memory[30:32] == [5, 0]
    assert p.read[16:20] == [2] * 4 and sum(p.read) == 8
    for bad in ({'used_ns': step}, {'used_ns': 5, 'next_ns': 4}, {'next_ns': step + 1}, {'fetch_ns': 2 * step + 1}):
        with pytest.raises(ValueError):
            p.add(store.Line(bad))
    for bad in {}, {'active': True}, {'active': True, 'step_ns': 5, 'now_ns': 5}:
        with pytest.raises(ValueError):
            plan.Plan(store.Line(bad))


# ---- the page ----

def test_a_page_of_nothing_is_a_page():
    text = page.of(report_of())
    assert 'no access yet' in text and text.endswith('</html>\n')
    r = report_of()
    r.trace = r.plan = r.events = None
    text = page.of(r)
    assert 'no access yet' not in text and text.count('Only root') == 2


def test_no_name_is_markup():
    """Nothing of a name or a text is markup, wherever it stands."""
    r = report_of(trace=[access('read', 3, BAD, bytes=5), *[access('step', 4, BAD, time_ns=i) for i in range(2, 5)]],
                  events=[{'level': '<i>', 'code': '<i>', 'path': '<i>', 'text': '<i>', 'time_ns': 10 ** 30}])
    r.point = r.version = BAD
    r.settings = [(BAD, BAD)]
    r.losses = losses_of('1,2')
    r.losses.path = BAD
    r.models, r.devices = list(lines({'path': BAD, 'step': BAD})), list(lines({'path': BAD, 'health': BAD}))
    r.optimizers = {BAD: BAD}
    text = page.of(r)
    assert '<i' not in text and text.count(BAD_HTML) >= 10 and text.count('&lt;i&gt;') == 4


def test_a_page_is_small():
    """More of everything than a page shows."""
    most = accesses.ACCESSES_MAX
    r = report_of(
        trace=(access('gradient' if i % 100 else 'step', i if i % 100 else i % 1000, f'model/{i:0200}', bytes=i, time_ns=i * 1000 + 1)
               for i in range(most)),
        events=[{'text': 'x' * 5000, 'path': '<' * 5000}] * 200, events_seen=5000)
    r.models, r.devices = list(lines(*({'path': f'/{i}'} for i in range(256)))), list(lines(*[{'path': 'p' * 5000}] * 16))
    text = page.of(r)
    assert len(text) < 1 << 20
    for words in 'The newest 200 of 5000', 'The 50 files', 'the first 64 of 256 models':
        assert words in text, words


def test_counters(monkeypatch):
    monkeypatch.setattr(store.os, 'getxattr', lambda *_: b'hits=5\nhuge=' + b'9' * 25 + b'\nother\n=7\nword=x\nlong=' + b'1' * 5000 + b'\nbad=-1')
    assert store.counters('/mnt') == {'hits': 5, 'huge': (1 << 64) - 1, '': 7}
