# SPDX-License-Identifier: Apache-2.0
"""
Models of several users on one store: what the clients of one wait for delays no request for another. The device does not
answer meanwhile, so a commit runs until the test lets it end.
"""
import contextlib
import fcntl
import os
import shutil
import threading

import numpy as np
import pytest

from calls import sync
from conftest import wait_for
from handed import IOCTL_COMMAND, stat
from test_devices import make_pair  # noqa: F401 (a fixture)
from test_gradients import make_root, open_gradient, values
from test_roots import command, word

COUNT = 128 * 1024              # elements of a parameter: 512 KiB
ONES = np.ones(COUNT, 'f4').tobytes()
PARAMS = 32                     # twice what may be queued in a tier of this size, and as many more as there may be workers
SECONDS = 40                    # that a request may take which waits for nobody
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878


@pytest.fixture
def store(make_pair):
    if not shutil.which('mkfs.ext4'):
        pytest.skip('mkfs.ext4 is needed')
    made = make_pair(hosts=True)
    made.mount_on(made.loops, 'device_timeout=1', 'commit=0', 'dram=64M')
    return made


@contextlib.contextmanager
def silent(store):
    """Its devices take nothing more."""
    hosts = [os.open(host, os.O_RDONLY | os.O_DIRECTORY) for host in store.hosts]
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
        wait_for(lambda: b'not-answering' in at_once(os.getxattr, mnt, 'user.hitrain.devices'),
                 'the commit waits for a device')
        for i in reversed(range(PARAMS)):   # of the next step, until the queue is full
            clients.start(write_gradient, busy, f'p{i}')
        wait_for(lambda: int(at_once(word, busy, 'grad_bytes')) >= 2 * PARAMS * len(ONES), 'gradients are taken')
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
        wait_for(lambda: b'not-answering' in at_once(os.getxattr, mnt, 'user.hitrain.devices'),
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
    if not shutil.which('mkfs.ext4'):
        pytest.skip('mkfs.ext4 is needed')
    store = make_pair(hosts=True)
    mnt = store.mount_on(store.loops, 'device_timeout=1', 'commit=0', 'dram=128M', 'handout=32M')
    if 'nothing is handed out' in store.messages():
        pytest.skip('the kernel or the privileges are not there')
    busy = make_root(mnt, 'busy', 'sgd lr=1', **{f'p{i}': size for i in range(count)})
    other = trained(mnt, 'other', 'sgd lr=1 durable_every=100', 1)
    files = [os.open(busy / f'p{i}', os.O_RDONLY) for i in range(count)]
    assert stat(mnt, 'handed_files') == count
    write_gradient(busy, 'p0', size * 4)
    commit = Background()
    with silent(store):
        commit.start(sync, busy)
        wait_for(lambda: b'not-answering' in at_once(os.getxattr, mnt, 'user.hitrain.devices'),
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
