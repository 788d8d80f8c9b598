# SPDX-License-Identifier: Apache-2.0
"""The daemon's memory is its budget: it runs in a memory cgroup of dram + staging + 128 MiB while a client moves more."""
import hashlib
import os
import pathlib
import subprocess

import pytest

from conftest import BIN, MIB, wait_for

DRAM, STAGING, SLACK = 64 * MIB, 24 * MIB, 128 * MIB
LIMIT = DRAM + STAGING + SLACK


class Group:
    """A memory cgroup, of version 1 or 2, whichever this machine has."""

    def __init__(self, name, limit):
        one, two = pathlib.Path('/sys/fs/cgroup/memory'), pathlib.Path('/sys/fs/cgroup')
        self.v1 = one.is_dir()
        if not self.v1 and 'memory' not in _read(two / 'cgroup.subtree_control', ''):
            pytest.skip('no memory cgroup controller here')
        self.path = (one if self.v1 else two) / name
        try:
            self.path.mkdir()
            (self.path / ('memory.limit_in_bytes' if self.v1 else 'memory.max')).write_text(str(limit))
        except OSError as e:
            pytest.skip(f'no memory cgroup can be made here: {e}')

    def join(self):
        (self.path / 'cgroup.procs').write_text(str(os.getpid()))

    def peak(self):
        return int(_read(self.path / ('memory.max_usage_in_bytes' if self.v1 else 'memory.peak'), '0'))

    def kills(self):
        text = _read(self.path / ('memory.oom_control' if self.v1 else 'memory.events'), '')
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith('oom_kill '))

    def remove(self):
        wait_for(lambda: not _read(self.path / 'cgroup.procs', '').split(), 'the cgroup is empty')
        self.path.rmdir()


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
    with open(store.log, 'a') as log:
        store.daemon = subprocess.Popen(
            [str(BIN / 'hitrain'), '-f', str(store.image), str(store.point), '-o', f'dram={DRAM},staging={STAGING}'],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=group.join)
    wait_for(lambda: store.daemon.poll() is not None or store.mounts_told(), 'mount')
    assert store.daemon.poll() is None, store.messages()


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


def test_a_client_moves_three_times_the_budget_through_a_daemon_of_bounded_memory(make_store, group):
    store = make_store('1G')
    _mount_in(group, store)
    before, after = _move(store.point, 3 * (DRAM + STAGING))
    assert before == after
    assert store.daemon.poll() is None, store.messages()
    assert group.kills() == 0
    assert DRAM < group.peak() <= LIMIT
    store.unmount()


def test_optimizer_state_streams_through_the_same_memory(make_store, group):
    """A model whose state is three times the DRAM tier, updated and committed."""
    store = make_store('2G')
    _mount_in(group, store)
    root = store.point / 'model'
    root.mkdir()
    os.setxattr(root, 'user.hitrain.dtype', b'f32')
    elements, count = 4 * MIB, 6
    for i in range(count):
        (root / f'p{i}').write_bytes(bytes(4 * elements))
    os.setxattr(root, 'user.hitrain.optimizer', b'adamw lr=0.5 weight_decay=0')
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
