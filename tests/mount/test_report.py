# SPDX-License-Identifier: Apache-2.0
"""hitrainctl report: its page as text, in a browser without a network, and where it cannot be written."""
import html.parser
import json
import os
import pathlib
import re
import resource
import shutil
import struct
import subprocess
import zlib

import numpy
import pytest

from conftest import BIN, MIB, SECONDS_MAX, run
from models import new_model

LONG = bool(os.environ.get('HITRAIN_LONG'))

BROWSER = shutil.which('chromium-headless-shell') or shutil.which('chromium')
NAMES = '<script>alert(1)<&"\'.bin', '<img src=x onerror=alert(1)>', 'a\nb\x1b[31m', 'left\u202eright'
TAGS = set('html head meta title style link body h1 h2 h3 p div b span bdi table tr th td svg path text'.split())
EMPTY = {'meta', 'link', 'path', 'tr', 'th'}


class Page(html.parser.HTMLParser):
    """All tags and texts; refuses what could act, load, or end a tag early."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.names = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS, tag
        assert not [a for a, v in attrs if a.startswith('on') or a in ('src', 'srcset', 'action', 'style') or 'http:' in (v or '')]
        assert all(v == 'data:,' for a, v in attrs if a == 'href')
        self.tags.append(tag)
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] == 'bdi':
            self.names.append(data)


def shown(name):
    return re.sub('[\x00-\x1f\u202e]+', lambda m: '\ufffd' * len(m.group().encode()), name)


def processor(pid):
    """Seconds that its threads have run."""
    fields = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


def of_children():
    """Seconds that programs have run that this one started, and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def trained(store, tmp_path):
    """A mount with some steps, names that are no names, and losses."""
    model = new_model(store.point / 'model', 'adamw lr=0.5')
    for name in 'w', *NAMES:
        (model / name).write_bytes(bytes(MIB))
    for _ in range(4):
        for name in 'w', *NAMES:
            (model / '.hitrain/grad' / name).write_bytes(bytes(MIB))
        run('hitrainctl', 'step', model)
    with pytest.raises(OSError):
        os.setxattr(model / NAMES[0], 'user.hitrain.nonsense', b'')
    losses = tmp_path / 'losses.jsonl'
    losses.write_text(''.join(json.dumps({'step': i, 'loss': 3 + 1 / i}) + '\n' for i in range(1, 50)))
    run('hitrainctl', 'report', store.point, '-o', tmp_path / 'page.html', f'--loss={losses}')
    return store, tmp_path / 'page.html'


def png(path):
    """The pixels of a PNG without interlacing, 8 bits per sample."""
    data, at, packed = path.read_bytes(), 8, b''
    while at < len(data):
        size, kind = struct.unpack('>I4s', data[at:at + 8])
        body = data[at + 8:at + 8 + size]
        if kind == b'IHDR':
            width, height, depth, colour, _, _, interlaced = struct.unpack('>IIBBBBB', body)
            assert depth == 8 and colour in (2, 6) and not interlaced
        elif kind == b'IDAT':
            packed += body
        at += 12 + size
    n = 3 if colour == 2 else 4
    packed, stride = zlib.decompress(packed), width * n
    out, before = [], bytearray(stride)
    for at in range(0, height * (stride + 1), stride + 1):
        kind, line = packed[at], bytearray(packed[at + 1:at + 1 + stride])
        for i in range(stride if kind else 0):
            left, up, corner = (line[i - n], before[i], before[i - n]) if i >= n else (0, before[i], 0)
            if kind == 4:
                a, b, c = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
                guess = left if a <= b and a <= c else up if b <= c else corner
            else:
                guess = (None, left, up, (left + up) // 2)[kind]
            line[i] = (line[i] + guess) & 255
        out.append(line)
        before = line
    return numpy.array(out, int).reshape(height, width, n)[:, :, :3]


def browse(page, tmp_path, *args):
    """Standard output and the browser's messages."""
    done = subprocess.run([BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--enable-logging=stderr', '--hide-scrollbars',
                           f'--user-data-dir={tmp_path}/profile', '--window-size=600,700', *args, page.as_uri()],
                          capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    assert 'CONSOLE' not in done.stderr, done.stderr
    return done.stdout


def test_the_page_as_text(trained):
    store, path = trained
    text = path.read_text()
    page = Page(text)
    assert "default-src 'none'" in text and 'script' not in page.tags and len(text) < MIB
    for name in NAMES:
        assert f'model/{shown(name)}' in page.names, page.names
    whole = ' '.join(page.texts)
    for word in ('Steps', 'steps per second', 'Loss', '49 points', 'Memory', 'Traffic', 'By tensor', 'By device', 'Models',
                 'adamw lr=0.5', 'Events', 'refused', 'Configuration', str(store.image)):
        assert word in whole, word
    assert page.tags.count('svg') >= 5
    assert run('hitrainctl', 'report', store.point, '-o', '-').stdout.startswith('<!DOCTYPE html>')


def test_what_a_user_sees(trained):
    store, path = trained
    done = subprocess.run([BIN / 'hitrainctl', 'report', store.point, '-o', '-'], user=65534, capture_output=True, text=True,
                          timeout=SECONDS_MAX)
    page = ' '.join(Page(done.stdout).texts)
    assert done.returncode == 0 and 'Only root' in page and 'refused' not in page and 'By tensor' not in page


@pytest.mark.skipif(not BROWSER, reason='make deps-system installs Chromium')
def test_in_a_browser(trained, tmp_path):
    store, path = trained
    dom = browse(path, tmp_path, '--dump-dom')
    assert '&lt;script&gt;alert(1)&lt;&amp;' in dom and '<script' not in dom and dom.count('<svg') >= 5
    backs = []
    for scheme in 1, 0:  # light and dark
        picture = tmp_path / f'{scheme}.png'
        browse(path, tmp_path, f'--screenshot={picture}', f'--blink-settings=preferredColorScheme={scheme}')
        pixels = png(picture)
        back = pixels[2, 2]
        distance = abs(pixels - back).sum(2)
        backs.append(back.sum())
        assert 0.01 < (distance > 60).mean() < 0.7   # neither blank nor full
        assert (distance > 380).mean() > 0.002       # the text differs enough from its background
        columns = pixels[(pixels.max(2) - pixels.min(2)) > 60]
        assert len(columns) > 1000                   # the drawings have colours
    assert backs[0] > 700 and backs[1] < 120


def test_losses_in_the_folder_of_a_model(trained, tmp_path):
    store, _ = trained
    model, page = store.point / 'model', lambda *args: run('hitrainctl', 'report', store.point, '-o', '-', *args).stdout
    assert 'class="line' not in page() and 'points' not in page()
    (model / 'loss.csv').write_text('step,loss\n' + ''.join(f'{i},{9 - i}\n' for i in range(7)))
    assert '7 points' in page() and 'model/loss.csv' in page()
    (model / 'loss.jsonl').write_text('{"step": 1, "loss": 2}\n' * 5)
    assert '5 points' in page() and '49 points' in page(f'--loss={tmp_path}/losses.jsonl')
    (model / 'loss.jsonl').write_text('no loss\n')
    assert 'points' not in page()
    (model / 'loss.jsonl').unlink()
    (model / 'loss.csv').unlink()
    (model / 'loss.csv').symlink_to(tmp_path / 'losses.jsonl')
    assert 'points' not in page()


def test_a_store_with_very_many_tensors(make_store, tmp_path):
    """The page, the program's memory and both programs' time are bounded. HITRAIN_LONG=1: a million tensors."""
    files, trained = (1000000, 20000) if LONG else (4000, 1000)
    store = make_store('48G' if LONG else '1G')
    mnt = store.mount('dram=256M')
    model = new_model(mnt / 'model', 'adamw lr=0.5')
    before = processor(store.daemon.pid)
    for i in range(files):
        (model / f'layer{i}').write_bytes(bytes(64))
    for i in range(trained):
        (model / f'.hitrain/grad/layer{i}').write_bytes(bytes(64))
    run('hitrainctl', 'commit', model)
    used, before, other = processor(store.daemon.pid) - before, processor(store.daemon.pid), of_children()
    subprocess.run(['prlimit', f'--as={64 * MIB}', BIN / 'hitrainctl', 'report', mnt, '-o', tmp_path / 'page.html'], check=True,
                   timeout=SECONDS_MAX)
    assert of_children() - other < used and processor(store.daemon.pid) - before < used / 4
    assert (tmp_path / 'page.html').stat().st_size < MIB
    assert any(n.startswith('model/layer') for n in Page((tmp_path / 'page.html').read_text()).names)


def test_where_it_cannot_be_written(store, tmp_path):
    for args, words in ((('-o', '/dev/null'), 'no regular file'), (('-o', tmp_path / 'none/page'), 'cannot be written'),
                        ((f'--loss={tmp_path}/none', '-o', '-'), 'No such file'), ((f'--loss={tmp_path}', '-o', '-'), 'no regular file'),
                        ((f'--loss={store.image}', '-o', '-'), 'no line has a loss'), ((), 'expected -o')):
        done = run('hitrainctl', 'report', store.point, *args, check=False)
        assert done.returncode in (1, 2) and words in done.stderr and not done.stdout, (args, done.stderr)
    assert run('hitrainctl', 'report', tmp_path, '-o', '-', check=False).returncode == 1
    old = tmp_path / 'page'
    old.write_text('old')
    store.kill()
    done = run('hitrainctl', 'report', store.point, '-o', old, check=False)
    assert done.returncode == 1 and 'the daemon of this mount is gone' in done.stderr and old.read_text() == 'old'
    assert [p.name for p in tmp_path.iterdir()] == ['page']


def test_without_python(store, tmp_path):
    """And in a folder that has hitrainctl alone."""
    (tmp_path / 'bin').mkdir()
    alone = shutil.copy(BIN / 'hitrainctl', tmp_path / 'bin')
    for program, search, words in ((BIN / 'hitrainctl', tmp_path, 'needs python3'), (alone, os.environ['PATH'], 'share/hitrain/tools')):
        for args in ('report', store.point, '-o', '-'), ('plan', store.point):
            done = subprocess.run([program, *args], env={'PATH': search}, capture_output=True, text=True, timeout=SECONDS_MAX)
            assert done.returncode == 1 and words in done.stderr and args[0] in done.stderr and not done.stdout, done


def test_a_pipe_that_ends(store):
    """A reader may stop early, and a device may be full."""
    full = subprocess.run([BIN / 'hitrainctl', 'report', store.point, '-o', '-'], stdout=open('/dev/full', 'w'), stderr=subprocess.PIPE,
                          text=True, timeout=SECONDS_MAX)
    assert full.returncode == 1 and full.stderr == 'hitrainctl: error: cannot write: No space left on device\n'
    read, write = os.pipe()
    os.close(read)
    cut = subprocess.run([BIN / 'hitrainctl', 'plan', store.point], stdout=write, stderr=subprocess.PIPE, timeout=SECONDS_MAX)
    os.close(write)
    assert cut.returncode == -13 and not cut.stderr
