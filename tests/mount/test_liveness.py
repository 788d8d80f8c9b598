# SPDX-License-Identifier: Apache-2.0
"""What an ordinary user does in loops with a file of very many chunks takes little from the readers of another file.

The same process that attacks looks now and then at a small file instead. So what processors and other programs take is
in both rates, and only their ratio counts. Where it is bad, more windows follow.
"""
import contextlib
import ctypes
import mmap
import os
import pathlib
import re
import signal
import time

import pytest

from calls import NOBODY
from conftest import ROOT, run

LONG = bool(os.environ.get('HITRAIN_LONG'))
CHUNK = 65536
CHUNKS = 5_000_000 if LONG else 1_000_000
WINDOWS_MIN, WINDOWS, SECONDS = 3, 40, 0.25  # of each kind; how long one is
RATE, WAIT_SECONDS_MAX = 0.5, 0.1
KEEP_SIZE = 1

libc = ctypes.CDLL(None, use_errno=True)


def words():
    rows = re.findall(r'^    \{"(\w+)"', (ROOT / 'fs/ctl/attributes.c').read_text(), re.M)
    assert 'pin' in rows and 'digest' in rows
    return [f'user.hitrain.{word}' for word in rows]


def quietly(call, *args):
    with contextlib.suppress(OSError):
        return call(*args)


class Target:
    """A file, with the folder that it is or was in."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.fd = os.open(path, os.O_RDWR)
        self.size = os.fstat(self.fd).st_size
        self.words = words()


def seek(t):
    for whence in (os.SEEK_DATA, os.SEEK_HOLE):
        quietly(os.lseek, t.fd, 0, whence)
        quietly(os.lseek, t.fd, t.size // 2, whence)


def reserve(t):
    libc.fallocate(t.fd, KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(t.size))


def reserve_again(t):
    os.ftruncate(t.fd, t.size)
    reserve(t)


def attributes(t):
    for word in t.words:
        quietly(os.getxattr, t.fd, word)


def pin(t):
    quietly(os.setxattr, t.fd, 'user.hitrain.pin', b'1')
    attributes(t)
    quietly(os.removexattr, t.fd, 'user.hitrain.pin')


def space(t):
    os.fstatvfs(t.fd)
    os.fstat(t.fd)


def hidden(t):
    for folder in (t.path.parent, t.path.parent.parent):
        for name in quietly(os.listdir, folder / '.hitrain') or ():
            quietly((folder / '.hitrain' / name).read_bytes)


ATTACKS = [seek, reserve, reserve_again, attributes, pin, space, hidden]


def forked(work, *args):
    pid = os.fork()
    if pid == 0:
        try:
            work(*args)
        finally:
            os._exit(1)
    return pid


class Shared:
    """Words that processes share: reads so far, the longest one in ns, and which target is attacked (0: none)."""

    def __init__(self):
        self.words = memoryview(mmap.mmap(-1, 4096)).cast('Q')

    def window(self, target, seconds):
        """(reads per second, the longest wait in seconds)"""
        self.words[2] = target
        time.sleep(0.05)
        begin, began, self.words[1] = self.words[0], time.monotonic(), 0
        time.sleep(seconds)
        return (self.words[0] - begin) / (time.monotonic() - began), self.words[1] / 1e9


def read_hot(path, shared):
    fd, page = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)
    while True:
        began = time.monotonic_ns()
        assert os.preadv(fd, [page], 0) == 4096
        shared.words[1] = max(shared.words[1], time.monotonic_ns() - began)
        shared.words[0] += 1


def attack(call, targets, shared):
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    while True:
        call(targets[shared.words[2]])


@pytest.fixture
def places(make_store, request):
    """The hot file, and {what: [small file, large file]}."""
    store = make_store()
    store.image.unlink()
    store.image.touch()
    os.truncate(store.image, CHUNKS * 3 // 2 * CHUNK)  # sparse, and larger than the disk
    run('mkfs.hitrain', store.image)
    mnt = store.mount()
    (mnt / 'hot').write_bytes(b'h' * 4096)
    files = {}
    for what in [request.node.callspec.params['what']]:
        folder = mnt / what
        folder.mkdir()
        if what == 'removed root':
            os.setxattr(folder, 'user.hitrain.optimizer', b'sgd lr=0.1')
        targets = []
        for name, size in (('small', CHUNK), ('large', CHUNKS * CHUNK)):
            path = folder / name
            path.touch()
            os.truncate(path, size)
            os.chown(path, NOBODY, NOBODY)
            targets.append(Target(path))
            assert libc.fallocate(targets[-1].fd, KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(size)) == 0
            if what != 'file':
                path.unlink()
        if what != 'file':
            folder.rmdir()
        files[what] = targets
    yield mnt / 'hot', files
    for targets in files.values():
        for t in targets:
            os.close(t.fd)


def compare(hot, targets, call):
    """None, or what is wrong."""
    shared = Shared()
    pids = [forked(read_hot, hot, shared), forked(attack, call, targets, shared)]
    small, large, waits = [], [], []
    try:
        for _ in range(WINDOWS):
            small.append(shared.window(0, SECONDS)[0])
            rate, wait = shared.window(1, SECONDS)
            large.append(rate)
            waits.append(wait)
            good = sum(large) >= RATE * sum(small) and min(waits) <= WAIT_SECONDS_MAX
            if good and len(waits) >= WINDOWS_MIN:
                break
        assert all(os.waitpid(pid, os.WNOHANG) == (0, 0) for pid in pids), 'a process has ended'
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            quietly(os.waitpid, pid, 0)
    assert sum(small) > 0
    print(call.__name__, f'{sum(large) / sum(small):.2f} of the rate, longest wait {min(waits):.3f} s at best')
    return None if good else f'{call.__name__}: {large} beside {small} reads per second, waits of {waits} s'


@pytest.mark.parametrize('what', ['file', 'orphan', 'removed root'])
def test_readers_of_another_file_keep_their_rate(places, what):
    hot, files = places
    wrong = [compare(hot, files[what], call) for call in ATTACKS]
    assert not any(wrong), wrong
