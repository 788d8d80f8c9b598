# SPDX-License-Identifier: Apache-2.0
""".hitrain/trace: what was accessed when, and how long it waited."""
import errno
import json
import mmap
import os
import select
import subprocess

from calls import sync
from conftest import BIN, MIB, SECONDS_MAX
from passthrough import HALF, PARAM, mapped, passthrough_store, root
from test_gradients import make_root
from test_roots import command, refused

COUNT = 512 << 10  # elements: 2 MiB in two chunks


def read_trace(mnt, after=0):
    with open(mnt / '.hitrain/trace', 'rb', buffering=0) as f:
        text, off = b'', after
        while more := os.pread(f.fileno(), 1 << 20, off):
            text += more
            off += len(more)
    return [json.loads(line) for line in text.decode().splitlines()]


def control(*args, **options):
    return subprocess.run([BIN / 'hitrainctl', *args], capture_output=True, text=True, timeout=SECONDS_MAX, **options)


def put_gradient(root, name):
    """In requests of a chunk each: a buffer between pages would make more."""
    fd = os.open(root / '.hitrain/grad' / name, os.O_WRONLY)
    with mmap.mmap(-1, MIB) as zeros:
        assert all(os.pwrite(fd, zeros, off) == MIB for off in range(0, COUNT * 4, MIB))
    os.close(fd)


def test_a_step_leaves_its_accesses_in_order(mnt):
    model = make_root(mnt, 'model', 'sgd lr=1', w=COUNT, v=COUNT)
    seen = read_trace(mnt)[-1]['seq']
    for name in 'wv':
        put_gradient(model, name)
    assert command(model, 'step', 'wait') == ['ok', 'ok']
    assert len((model / 'w').read_bytes()) == 2 * MIB
    assert command(model, 'commit', 'evict w', 'prefetch w', 'abort') == ['ok'] * 4
    entries = read_trace(mnt, seen)
    assert [e['seq'] for e in entries] == list(range(seen + 1, seen + 1 + len(entries)))
    kinds = {}
    for e in entries:
        kinds.setdefault((e['op'], e['path']), []).append((e.get('offset', 0), e.get('bytes', 0)))
        assert e['id'] == os.stat(mnt / e['path']).st_ino and e['time_ns'] > 0
    halves = [(0, MIB), (MIB, MIB)]
    for name in 'wv':
        assert kinds['gradient', f'model/{name}'] == halves
        assert sorted(kinds['update', f'model/{name}']) == halves
    assert sum(bytes for _, bytes in kinds['read', 'model/w']) >= 2 * MIB
    assert kinds['evict', 'model/w'] == kinds['prefetch', 'model/w'] == [(0, 2 * MIB)]
    order = [e['op'] for e in entries if e['path'] == 'model']
    assert order == ['step', 'commit', 'abort']
    position = {(e['op'], e['path']): e['seq'] for e in entries}
    assert position['gradient', 'model/w'] < position['update', 'model/w'] < position['read', 'model/w']


def test_a_wait_for_a_device_is_in_the_trace(mnt):
    path = mnt / 'f'
    path.write_bytes(os.urandom(4 * MIB))
    sync(path)
    assert command(mnt, 'evict f') == ['ok']
    seen = read_trace(mnt)[-1]['seq']
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    os.pread(fd, MIB, 0)
    os.pread(fd, MIB, 0)
    os.close(fd)
    cold, hot = [e for e in read_trace(mnt, seen) if e['op'] == 'read' and e['offset'] == 0]
    assert cold['waited_ns'] > 0 and cold['waited_ns'] > hot.get('waited_ns', 0)


def test_the_newest_entries_take_the_places_of_the_oldest(mnt):
    path = mnt / 'f'
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.ftruncate(fd, MIB)
    for _ in range(70000):
        os.pread(fd, 512, 0)
    os.close(fd)
    entries = read_trace(mnt)
    assert len(entries) <= 65536 < 70000 <= entries[-1]['seq']
    assert {e['path'] for e in entries} == {'f'}
    done = control('trace', 'save', mnt, '--since=60000')
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])['seq'] == entries[-1]['seq']
    done = control('trace', 'save', mnt, '--since=3')
    assert done.returncode == 0 and 'have made room for newer ones' in done.stderr


def test_names_do_not_reach_the_terminal(mnt):
    path = os.fsencode(mnt) + b'/\x1b[31m\n\xff'
    with open(path, 'wb') as f:
        f.write(b'x')
    gone = mnt / 'gone'
    gone.write_bytes(b'y')
    gone.unlink()
    entries = read_trace(mnt)
    assert any(os.fsencode(e.get('path', '')) == path[len(os.fsencode(mnt)) + 1:] for e in entries)
    assert any('path' not in e for e in entries)
    done = control('trace', 'show', mnt)
    assert done.returncode == 0 and '\x1b' not in done.stdout
    assert len(done.stdout.splitlines()) == len(entries) + 1


def test_it_is_for_the_owner_and_nothing_can_be_written(mnt):
    path = mnt / '.hitrain/trace'
    fd = os.open(path, os.O_WRONLY)
    refused(errno.EBADF, os.write, fd, b'x')
    os.close(fd)
    (mnt / 'dir').mkdir()
    refused(errno.ENOENT, os.stat, mnt / 'dir/.hitrain/trace')
    done = control('trace', 'show', mnt / 'nothing')
    assert done.returncode == 1 and 'No such file' in done.stderr and not done.stdout
    for args in ['trace', mnt], ['trace', 'keep', mnt], ['trace', 'show', mnt, '--json']:
        done = control(*args)
        assert done.returncode == 2 and done.stderr and not done.stdout


def test_mapped_gradients_are_seen_when_they_are_applied(passthrough_store, root):
    mnt = passthrough_store.point
    window = mapped(root / '.hitrain/grad/w')
    seen = read_trace(mnt)[-1]['seq']
    for _ in range(2):
        window[:] = HALF * (PARAM // 4)
        assert command(root, 'apply w', 'step') == ['ok', 'ok']
    window.close()
    with open(root / '.hitrain/grad/w', 'rb'):
        pass
    entries = [e for e in read_trace(mnt, seen) if e['op'] in ('gradient', 'update', 'step')]
    assert [e['op'] for e in entries if e['op'] != 'update'] == ['gradient', 'step'] * 2
    assert entries[0]['op'] == 'gradient' and entries[0]['path'] == 'model/w' and entries[0]['offset'] == 0
    assert 0 <= entries[0]['bytes'] - PARAM < 4096


def test_following_shows_new_accesses(store):
    follower = subprocess.Popen([BIN / 'hitrainctl', 'trace', 'save', store.point, '--follow'], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)
    try:
        for name in 'ab':
            (store.point / name).write_bytes(b'x')
            assert select.select([follower.stdout], [], [], SECONDS_MAX)[0]
            e = json.loads(follower.stdout.readline())
            assert (e['op'], e['path']) == ('write', name)
    finally:
        follower.kill()
        follower.wait()
