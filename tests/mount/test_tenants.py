# SPDX-License-Identifier: Apache-2.0
"""Models of several users on one store: a client that waits delays no request of another model. The device does not
answer during the test, so a commit runs until the test lets it end.
"""
import contextlib
import errno
import fcntl
import itertools
import os
import threading

import numpy as np
import pytest

from calls import sync
from conftest import needs, wait_for
from passthrough import IOCTL_COMMAND, stat
from test_devices import make_pair  # noqa: F401 (a fixture)
from test_gradients import make_root, open_gradient, values
from test_roots import command, refused, word

COUNT = 128 * 1024              # elements of a parameter: 512 KiB
ONES = np.ones(COUNT, 'f4').tobytes()
# 12 may be queued in a tier of this size (three eighths of 16 MiB): twice that, and as many more as there may be workers
PARAMS, QUEUED = 32, 10
SECONDS = 60                    # that a request may take that waits for no other
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878


@pytest.fixture
def store(make_pair):
    needs('mkfs.ext4')
    made = make_pair(hosts=True)
    made.mount_on(made.loops, 'device_timeout=1', 'commit=0', 'dram=64M')
    return made


@contextlib.contextmanager
def silent(store, hosts=None):
    """Its devices take nothing more, or those on these hosts."""
    hosts = [os.open(host, os.O_RDONLY | os.O_DIRECTORY) for host in hosts or store.hosts]
    frozen = []
    try:
        for fd in hosts:
            fcntl.ioctl(fd, FIFREEZE, 0)
            frozen.append(fd)
        yield
    finally:
        for fd in frozen:   # no program is started: it would close descriptors that wait for this
            fcntl.ioctl(fd, FITHAW, 0)
        for fd in hosts:
            os.close(fd)


def trained(mnt, name, optimizer, params):
    """A model that has made one step: zeros. The first half of its parameters have the second one in memory, too: -1."""
    root = make_root(mnt, name, optimizer, **{f'p{i}': COUNT for i in range(params)})
    for i in range(params):
        write_gradient(root, f'p{i}')
    sync(root)
    for i in range((params + 1) // 2):
        write_gradient(root, f'p{i}')
    assert command(root, 'wait') == ['ok']
    return root


class Background:
    """Calls in threads of their own, with their results."""

    def __init__(self):
        self.threads, self.results = [], []

    def start(self, call, *args):
        def run():
            try:
                self.results.append(call(*args))
            except BaseException as e:
                self.results.append(e)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def end(self):
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        assert self.results == [None] * len(self.threads)


def at_once(call, *args):
    """It is answered although the devices are silent."""
    background = Background()
    background.start(call, *args)
    background.threads[0].join(SECONDS)
    assert background.results, f'{call.__name__} hangs'
    if isinstance(background.results[0], BaseException):
        raise background.results[0]
    return background.results[0]


def write_gradient(root, name, size=len(ONES)):
    fd = open_gradient(root, name)
    try:
        assert os.pwrite(fd, ONES[:size], 0) == size
    finally:
        os.close(fd)


def overwrite(path):
    fd = os.open(path, os.O_WRONLY)
    try:
        assert os.pwrite(fd, np.float32(7).tobytes(), 0) == 4
    finally:
        os.close(fd)


def ioctl(root, line):
    fd = os.open(root / '.hitrain' / 'ctl', os.O_RDWR)
    try:
        fcntl.ioctl(fd, IOCTL_COMMAND, line.encode().ljust(256, b'\0'))
    finally:
        os.close(fd)


def test_writers_that_wait_for_a_commit_hold_up_nobody_else(store):
    mnt = store.point
    busy = trained(mnt, 'busy', 'sgd lr=1', PARAMS)
    other = trained(mnt, 'other', 'sgd lr=1 durable_every=100', 1)
    (mnt / 'file').write_bytes(b'in memory')
    commit, clients = Background(), Background()
    with silent(store):
        commit.start(sync, busy)
        wait_for(lambda: b'not-answering' in at_once((mnt / '.hitrain/devices').read_bytes),
                 'the commit waits for a device')
        for i in reversed(range(PARAMS)):   # of the next step, until the queue is full
            clients.start(write_gradient, busy, f'p{i}')
        taken = (PARAMS + PARAMS // 2 + QUEUED) * len(ONES)     # with those of the two steps before
        wait_for(lambda: int(at_once(word, busy, 'grad_bytes')) >= taken, 'gradients are taken')
        for i in range(PARAMS // 2, PARAMS):    # whose update is queued, and which no device has been given
            clients.start(overwrite, busy / f'p{i}')
        assert at_once((mnt / 'file').read_bytes) == b'in memory'
        assert at_once(os.getxattr, mnt / 'file', 'user.hitrain.stored_bytes')
        assert at_once(os.stat, busy / '.hitrain' / 'ctl')
        assert at_once(command, other, 'step') == ['ok']
        at_once(write_gradient, other, 'p0')
        assert at_once(command, other, 'step') == ['ok']
        assert not commit.results
    commit.end()
    clients.end()
    sync(busy)
    for i in range(PARAMS // 2):
        assert values(busy / f'p{i}') == {-2.0}
    for i in range(PARAMS // 2, PARAMS):    # the write came before the update, or after it
        assert values(busy / f'p{i}') in ({7.0, -1.0}, {6.0, -1.0})
    assert values(other / 'p0') == {-2.0}


def test_commands_that_wait_for_their_turn_hold_up_nobody_else(store):
    mnt = store.point
    busy = trained(mnt, 'busy', 'sgd lr=1', 2)
    other = trained(mnt, 'other', 'sgd lr=1 durable_every=100', 1)
    clients = Background()
    with silent(store):
        for i in range(60):
            clients.start(ioctl, busy, 'commit')
        wait_for(lambda: b'not-answering' in at_once((mnt / '.hitrain/devices').read_bytes),
                 'a commit waits for a device')
        at_once(ioctl, other, 'step')
        at_once(write_gradient, other, 'p0')
        at_once(ioctl, other, 'step')
        at_once(ioctl, busy, 'wait p0')     # needs no turn
        at_once(write_gradient, busy, 'p0')
        assert not clients.results
    clients.end()
    assert values(busy / 'p1') == {0.0} and values(other / 'p0') == {-2.0}
    sync(busy)
    assert values(busy / 'p0') == {-2.0}


def test_files_given_back_while_a_commit_holds_their_directory_hold_up_nobody_else(make_pair):
    """Their names leave the kernel's cache, for which it waits until fsync of the directory has ended."""
    count, size = 200, 4096     # more files than the daemon may have threads
    needs('mkfs.ext4')
    store = make_pair(hosts=True)
    mnt = store.mount_on(store.loops, 'device_timeout=1', 'commit=0', 'dram=128M', 'passthrough=32M')
    if 'passthrough is off' in store.messages():
        pytest.skip('the kernel or the privileges are not there')
    busy = make_root(mnt, 'busy', 'sgd lr=1', **{f'p{i}': size for i in range(count)})
    other = trained(mnt, 'other', 'sgd lr=1 durable_every=100', 1)
    files = [os.open(busy / f'p{i}', os.O_RDONLY) for i in range(count)]
    assert stat(mnt, 'passthrough_files') == count
    write_gradient(busy, 'p0', size * 4)
    commit = Background()
    with silent(store):
        commit.start(sync, busy)
        wait_for(lambda: b'not-answering' in at_once((mnt / '.hitrain/devices').read_bytes),
                 'the commit waits for a device')
        for fd in files:
            os.close(fd)
        at_once(ioctl, other, 'step')
        at_once(write_gradient, other, 'p0')
        at_once(ioctl, other, 'step')
        at_once(ioctl, other, 'wait')
        assert not commit.results
    commit.end()
    assert values(busy / 'p0') == {0.0} and values(other / 'p0') == {-2.0}


def copy_over(source, path):
    with open(source, 'rb') as a, open(path, 'r+b') as b:
        assert os.copy_file_range(a.fileno(), b.fileno(), 4, 0, 0) == 4


def sync_new(path):
    """A new file. Its log does not answer."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def test_clients_of_a_silent_device_hold_up_nobody_else(make_pair):
    """Each needs a chunk whose write is in flight there, or waits for its log. There are more clients than threads that
    take requests."""
    needs('mkfs.ext4')
    store, usual = make_pair(hosts=True), 4
    mnt = store.mount_on(store.loops, 'device_timeout=4', 'commit=0', 'dram=64M', f'max_threads={usual}')
    files, synced = [mnt / f'f{i}' for i in range(40)], [mnt / f's{i}' for i in range(12)]
    for path in files:
        path.write_bytes(ONES)
    (mnt / 'other').write_bytes(b'in memory')
    commit, clients = Background(), Background()
    with silent(store):
        commit.start(ioctl, mnt, 'commit')
        wait_for(lambda: b'not-answering' in at_once((mnt / '.hitrain/devices').read_bytes),
                 'the commit waits for a device')
        for i, path in enumerate(files):
            clients.start(*((overwrite, path), (os.truncate, path, 4), (copy_over, mnt / 'other', path))[i % 3])
        for path in synced:
            clients.start(sync_new, path)
        wait_for(lambda: int(at_once(word, mnt, 'mount_workers')) >= usual + len(synced), 'threads are held')
        assert at_once((mnt / 'other').read_bytes) == b'in memory'
        at_once(os.mkdir, mnt / 'folder')
        assert at_once(os.listdir, mnt / 'folder') == []
        assert not commit.results
    commit.end()
    clients.end()
    for i, path in enumerate(files):
        assert path.read_bytes()[:4] == (np.float32(7).tobytes(), ONES[:4], b'in m')[i % 3]
    looks = itertools.count()
    wait_for(lambda: os.path.exists(mnt / f'no{next(looks)}') or int(word(mnt, 'mount_workers')) == usual,
             'the threads that were added end')


def test_pins_leave_half_of_the_memory_to_others(make_store):
    mnt = make_store().mount('commit=0')
    sizes = {'other': 28 << 20, 'large': 20 << 20, 'pinned': 12 << 20}     # of 32 MiB
    word(mnt, 'dtype', 'f32')
    for name, size in sizes.items():
        (mnt / name).write_bytes(ONES * (size // len(ONES)))
        sync(mnt / name)
    refused(errno.ENOSPC, word, mnt / 'large', 'pin', 'dram')
    word(mnt / 'pinned', 'pin', 'dram')
    assert (mnt / 'pinned').read_bytes() == ONES * (sizes['pinned'] // len(ONES))
    for _ in range(3):
        assert (mnt / 'other').read_bytes() == ONES * (sizes['other'] // len(ONES))
    pinned, other = (int(word(mnt / name, 'resident_bytes')) for name in ('pinned', 'other'))
    assert pinned == sizes['pinned'] and other >= sizes['other'] // 3, (pinned, other)
