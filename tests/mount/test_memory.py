# SPDX-License-Identifier: Apache-2.0
"""The daemon's memory is its budget: it runs in a memory cgroup of dram + staging + 128 MiB while a client moves more."""
import ctypes
import hashlib
import os
import pathlib
import re
import resource
import subprocess

import pytest

from conftest import BIN, MIB, wait_for
from models import new_model
from slow import remove_group

DRAM, STAGING, SLACK = 64 * MIB, 24 * MIB, 128 * MIB
LIMIT = DRAM + STAGING + SLACK


class Group:
    """A memory cgroup, of version 1 or 2, whichever this machine has; below another one or at the top."""

    def __init__(self, name, limit, above=None):
        one, two = pathlib.Path('/sys/fs/cgroup/memory'), pathlib.Path('/sys/fs/cgroup')
        self.v1 = one.is_dir()
        if not self.v1 and 'memory' not in _read(two / 'cgroup.subtree_control', ''):
            pytest.skip('no memory cgroup controller here')
        self.path = (above.path if above else one if self.v1 else two) / name
        try:
            if above and not self.v1:
                (above.path / 'cgroup.subtree_control').write_text('+memory')
            self.path.mkdir()
            if limit:
                (self.path / ('memory.limit_in_bytes' if self.v1 else 'memory.max')).write_text(str(limit))
        except OSError as e:
            pytest.skip(f'no memory cgroup can be made here: {e}')

    def join(self):
        (self.path / 'cgroup.procs').write_text(str(os.getpid()))

    def used(self):
        return int(_read(self.path / ('memory.usage_in_bytes' if self.v1 else 'memory.current'), '0'))

    def peak(self):
        return int(_read(self.path / ('memory.max_usage_in_bytes' if self.v1 else 'memory.peak'), '0'))

    def page_cache(self):
        """Bytes of files, of the group itself only where the version reports it."""
        fields = dict(line.split() for line in _read(self.path / 'memory.stat', '').splitlines())
        return int(fields['cache' if self.v1 else 'file'])

    def kills(self):
        text = _read(self.path / ('memory.oom_control' if self.v1 else 'memory.events'), '')
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith('oom_kill '))

    def remove(self):
        remove_group(self.path)


def _read(path, default):
    try:
        return path.read_text()
    except OSError:
        return default


@pytest.fixture
def group():
    made = Group(f'hitrain-test-{os.getpid()}', LIMIT)
    yield made
    made.remove()


def _mount_in(group, store):
    _mount_after(group.join, store)


def _mount_after(prepare, store, more=''):
    """prepare: called first in the daemon's process; more: options."""
    with open(store.log, 'a') as log:
        store.daemon = subprocess.Popen(
            [str(BIN / 'hitrain'), '-f', str(store.image), str(store.point), '-o', f'dram={DRAM},staging={STAGING}{more}'],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=prepare)
    wait_for(lambda: store.daemon.poll() is not None or store.mounts_told(), 'mount')
    assert store.daemon.poll() is None, store.messages()


def _figures(store):
    lines = os.getxattr(store.point, 'user.hitrain.stats').decode().splitlines()
    return {word: int(value) for word, value in (line.split('=') for line in lines)}


def _move(point, total, piece=4 * MIB):
    """Write files of three times the budget, read them back; their digests before and after."""
    before, after = [], []
    for i in range(total // (16 * MIB)):
        with open(point / f'f{i}', 'wb', buffering=0) as f:
            digest = hashlib.sha256()
            for k in range(16 * MIB // piece):
                data = bytes([i + 1, k]) * (piece // 2)
                digest.update(data)
                f.write(data)
            before.append(digest.digest())
    for i in range(total // (16 * MIB)):
        with open(point / f'f{i}', 'rb', buffering=0) as f:
            digest = hashlib.sha256()
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while data := f.read(piece):
                digest.update(data)
            after.append(digest.digest())
    return before, after


def test_a_client_moves_three_times_the_budget_through_a_daemon_of_bounded_memory(group, make_store):
    store = make_store('1G')
    _mount_in(group, store)
    before, after = _move(store.point, 3 * (DRAM + STAGING))
    assert before == after
    assert store.daemon.poll() is None, store.messages()
    assert group.kills() == 0
    assert DRAM < group.peak() <= LIMIT
    store.unmount()


def test_optimizer_state_streams_through_the_same_memory(group, make_store):
    """A model whose state is three times the DRAM tier, updated and committed."""
    store = make_store('2G')
    _mount_in(group, store)
    elements, count = 4 * MIB, 6
    zeros = {f'p{i}': bytes(4 * elements) for i in range(count)}
    root = new_model(store.point / 'model', 'adamw lr=0.5 weight_decay=0', **zeros)
    fd = os.open(root, os.O_RDONLY)
    for step in range(2):
        for i in range(count):
            (root / '.hitrain/grad' / f'p{i}').write_bytes(b'\0\0\x80\x3f' * elements)  # ones
        os.fsync(fd)
    os.close(fd)
    want = (root / 'p0').read_bytes()[:4]
    for i in range(count):
        assert (root / f'p{i}').read_bytes() == want * elements
    assert os.getxattr(root, 'user.hitrain.durable_step') == b'2'
    assert store.daemon.poll() is None, store.messages()
    assert group.kills() == 0
    assert group.peak() <= LIMIT
    store.unmount()


# ------------------------------------------------------------------------- locked memory

PR_CAPBSET_DROP, PR_SET_THP_DISABLE, CAP_IPC_LOCK = 24, 41, 14
MEMLOCK = 8 * MIB


def _may_lock_little():
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MEMLOCK, MEMLOCK))
    assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) == 0


def _gets_no_huge_pages():
    assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0


def _status(store, word):
    """A line of /proc/PID/status in bytes."""
    text = pathlib.Path(f'/proc/{store.daemon.pid}/status').read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(word + ':'))


def _areas(store):
    """Bytes of tier and pool by the kernel's count: resident, locked, in huge pages. None where areas have no names."""
    sums, inside = {'Rss': 0, 'Locked': 0, 'AnonHugePages': 0}, False
    for line in pathlib.Path(f'/proc/{store.daemon.pid}/smaps').read_text().splitlines():
        word = line.split()[0]
        if '-' in word:
            inside = '[anon:hitrain-' in line
        elif inside and word[:-1] in sums:
            sums[word[:-1]] += int(line.split()[1]) * 1024
    return sums if sums['Rss'] else None


def test_stats_are_what_the_kernel_counts(make_store):
    store, share = make_store('256M'), 16 * MIB
    pinned = DRAM - share + STAGING
    _mount_after(lambda: None, store, f',passthrough={share}')
    figures = _figures(store)
    assert figures['dram_bytes'] == DRAM and figures['staging_bytes'] == STAGING
    assert figures['locked_bytes'] == _status(store, 'VmLck') == pinned
    if areas := _areas(store):
        assert areas['Rss'] == areas['Locked'] == pinned
        # Of staging, which is small, the daemon has looked at one page.
        assert areas['AnonHugePages'] in (figures['huge_bytes'], figures['huge_bytes'] + STAGING - 2 * MIB)
    assert 'not locked' not in store.messages()
    with open(store.point / 'f', 'wb+') as f:       # with memory of its own, where the kernel takes it
        os.setxattr(f.fileno(), 'user.hitrain.dtype', b'f32')
        os.setxattr(f.fileno(), 'user.hitrain.pin', b'dram')
        f.write(bytes(5 * MIB))
    with open(store.point / 'f', 'rb+') as f:
        figures = _figures(store)
        assert figures['locked_bytes'] == _status(store, 'VmLck') >= pinned + figures['passthrough_used_bytes']
    assert _status(store, 'RssAnon') < pinned + 32 * MIB
    store.unmount()


def test_programs_that_the_daemon_starts_get_no_copy_of_it(make_store):
    """libfuse starts mount(8) and umount(8). A fork copies registered pages at once, as large as they are."""
    store = make_store('64M')
    store.mount()
    areas = re.findall(r'^VmFlags: (.*)$', pathlib.Path(f'/proc/{store.daemon.pid}/smaps').read_text(), re.M)
    locked = [flags.split() for flags in areas if ' lo ' in flags]
    assert len(locked) >= 2 and all('dc' in flags for flags in locked), locked


def test_a_daemon_that_may_not_lock_says_so_and_goes_on(make_store):
    store = make_store('256M')
    _mount_after(_may_lock_little, store)
    said = store.messages()
    assert 'not locked' in said and '88 MiB are to be locked, the limit is 8 MiB' in said and 'LimitMEMLOCK=' in said, said
    assert _figures(store)['locked_bytes'] == _status(store, 'VmLck') == 0
    before, after = _move(store.point, DRAM)
    assert before == after
    store.unmount()


def test_a_system_without_huge_pages_costs_speed_only(make_store):
    store = make_store('256M')
    _mount_after(_gets_no_huge_pages, store)
    assert 'no huge pages' in store.messages()
    figures = _figures(store)
    assert figures['huge_bytes'] == 0 and figures['locked_bytes'] == DRAM + STAGING
    before, after = _move(store.point, DRAM)
    assert before == after
    store.unmount()


# ---------------------------------------------------------------- pressure from outside

ROOM, HELD, READ = 64 * MIB, 32 * MIB, 256 * MIB      # beside the daemon's limit; held memory; read again and again
ROUNDS = 5
CLIENT = r'''
import mmap, os, sys
point, MIB = sys.argv[1], 1 << 20
block = mmap.mmap(-1, MIB)
block.write(os.urandom(MIB))
grad = os.open(point + "/model", os.O_RDONLY)
kinds = [("buffered", 0), ("direct", os.O_DIRECT)]
n = 0
while True:
    for kind, flag in kinds:
        name = f"{point}/{kind}{n % 12}"        # in all, more than the tier holds
        fd = os.open(name, os.O_RDWR | os.O_CREAT | flag)
        for i in range(4):
            os.pwrite(fd, block, i * MIB)
        for i in range(4):
            assert os.preadv(fd, [into := mmap.mmap(-1, MIB)], i * MIB) == MIB and into[:] == block[:], name
        os.close(fd)
    with open(point + "/model/.hitrain/grad/w", "wb") as f:
        f.write(b"\0\0\x80\x3f" * (MIB // 4))
    os.fsync(grad)
    n += 1
    print(n, flush=True)
'''

PRESSER = r'''
import os, sys
path, held, MIB = sys.argv[1], int(sys.argv[2]), 1 << 20
memory = bytearray(held)
while True:
    memory[::4096] = b"x" * len(memory[::4096])
    with open(path, "rb", buffering=0) as f:
        while f.read(MIB):
            pass
    print("round", flush=True)
    if not sys.stdin.read(1):
        break
'''


class Program:
    """Says a line for each round; ends with the body."""

    def __init__(self, text, group, *args):
        self.process = subprocess.Popen(['/usr/bin/python3', '-c', text, *map(str, args)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, preexec_fn=group.join)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def line(self):
        said = self.process.stdout.readline()
        assert said, f'it ended: {self.process.wait()}'
        return said.strip()

    def again(self):
        self.process.stdin.write('x')
        self.process.stdin.flush()


@pytest.fixture
def groups():
    """Three groups: all, with little room beside the daemon's limit; the daemon's; the others'."""
    above = Group(f'hitrain-test-all-{os.getpid()}', LIMIT + ROOM)
    made = [above, Group('daemon', LIMIT, above), Group('others', None, above)]
    yield made
    for g in reversed(made):
        g.remove()


def _moved(store):
    return sum(value for word, value in _figures(store).items() if word.startswith('mount_') and word.endswith('_bytes'))


def test_pressure_from_outside_neither_stops_the_daemon_nor_makes_it_grow(groups, make_store, tmp_path):
    """
    Other programs hold memory and read more than fits into the rest, all the time. A client streams through many files,
    with and without O_DIRECT, and takes steps. After each of their rounds, the daemon has gone on.
    """
    above, daemon, others = groups
    store = make_store('1G')
    _mount_in(daemon, store)
    root = new_model(store.point / 'model', 'adamw', w=bytes(MIB))
    pressing = tmp_path / 'read'
    with open(pressing, 'wb') as f:
        for _ in range(READ // MIB):
            f.write(bytes(MIB))
        f.flush()
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)      # the first reader is charged
    with Program(CLIENT, others, store.point) as client:
        while int(client.line()) < 12:
            pass                                        # every file has been written: all is warm
        before = _status(store, 'RssAnon')
        with Program(PRESSER, others, pressing, HELD) as presser:
            presser.line()

            def moves():
                presser.again()
                presser.line()
                return _moved(store) > moved
            for _ in range(ROUNDS):
                moved = _moved(store)
                wait_for(moves, 'something moves while others go round')
            assert above.peak() > LIMIT + ROOM - 8 * MIB, 'there was no pressure'
    grown = _status(store, 'RssAnon') - before
    figures = _figures(store)
    assert grown < 4 * MIB, f'{grown} bytes more'
    assert figures['locked_bytes'] == DRAM + STAGING
    assert [g.kills() for g in groups] == [0, 0, 0]
    assert store.daemon.poll() is None, store.messages()
    assert daemon.peak() <= LIMIT
    assert daemon.page_cache() < 8 * MIB                # pages of the mount's files are their users'
    store.unmount()


def _anonymous(store):
    """Heap, stacks, tier and staging pool of the daemon, as far as they are in memory."""
    lines = pathlib.Path(f'/proc/{store.daemon.pid}/status').read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith('RssAnon:'))


def _reported(store):
    figures = _figures(store)
    return figures['meta_bytes'] + figures['names_bytes']


def _make_files(at, count):
    at.mkdir()
    for i in range(count):
        with open(at / f'file-{i}', 'wb', buffering=0) as f:
            f.write(b'x' * 100)
            for k in range(i % 4):
                os.pwrite(f.fileno(), b'y' * 100, (k + 1) << 20)


def _make_parameters(at, count):
    """Each with a gradient, so that its optimizer state and coverage are there."""
    new_model(at, 'adamw', **{f'p{i}': bytes(256) for i in range(count)})
    for i in range(count):
        (at / '.hitrain/grad' / f'p{i}').write_bytes(bytes(256))
    (at / '.hitrain/ctl').write_text('commit\n')


def test_the_daemon_reports_the_memory_it_has(make_store):
    """Files and parameters add as much to the heap as to the figures, and the figures omit nothing large."""
    store = make_store('1G')
    _mount_after(lambda: None, store)
    _make_files(store.point / 'warm', 200)
    _make_parameters(store.point / 'warm-model', 200)
    for name, make, count in (('files', _make_files, 4000), ('model', _make_parameters, 3000)):
        anonymous, reported = _anonymous(store), _reported(store)
        make(store.point / name, count)
        more, told = _anonymous(store) - anonymous, _reported(store) - reported
        assert more - told < 1000 * count + 3 * MIB, (name, more, told)
        assert told > 300 * count, (name, more, told)
    assert _anonymous(store) < DRAM + STAGING + _reported(store) + 16 * MIB
    store.unmount()
