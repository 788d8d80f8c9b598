# SPDX-License-Identifier: Apache-2.0
"""Many processes: locks, appending, clients killed in the middle of anything, one worker thread, read-only mounts."""
import contextlib
import errno
import fcntl
import mmap
import os
import random
import signal
import stat
import struct
import subprocess
import threading
import time

import pytest

from calls import EXCHANGE, KEEP_SIZE, NOBODY, PUNCH, as_user, fails, fallocate, rename, run_threads, sync
from conftest import MIB, SECONDS_MAX, wait_for
from models import new_model

F_OFD_SETLK, F_OFD_SETLKW, F_OFD_GETLK = 37, 38, 36
ONES = b'\0\0\x80?'


@contextlib.contextmanager
def child(fn):
    """A process that calls fn(); killed in the end if it has not ended by itself."""
    pid = os.fork()
    if pid == 0:
        try:
            fn()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def ended(pid):
    """Whether the child has; it stays to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def flock_struct(kind, start=0, length=0):
    return struct.pack('hhqqi4x', kind, os.SEEK_SET, start, length, 0)


# ------------------------------------------------------------------------- locks

def take_flock(fd, kind):
    fcntl.flock(fd, kind | fcntl.LOCK_NB)


def take_posix(fd, kind):
    fcntl.lockf(fd, kind | fcntl.LOCK_NB, 10, 100)


def take_ofd(fd, kind):
    kind = fcntl.F_RDLCK if kind == fcntl.LOCK_SH else fcntl.F_WRLCK
    fcntl.fcntl(fd, F_OFD_SETLK, flock_struct(kind, 10, 100))


@pytest.mark.parametrize('take', [take_flock, take_posix, take_ofd])
def test_locks_between_processes(mnt, take):
    (mnt / 'f').write_bytes(b'x' * 1000)
    ready, go = os.pipe(), os.pipe()

    def hold():
        fd = os.open(mnt / 'f', os.O_RDWR)
        take(fd, fcntl.LOCK_EX)
        os.write(ready[1], b'x')
        os.read(go[0], 1)
        take(fd, fcntl.LOCK_SH)
        os.write(ready[1], b'x')
        os.read(go[0], 1)
    fd = os.open(mnt / 'f', os.O_RDWR)
    with child(hold) as pid:
        os.read(ready[0], 1)
        for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
            with fails(errno.EAGAIN):
                take(fd, kind)
        os.write(go[1], b'x')
        os.read(ready[0], 1)
        take(fd, fcntl.LOCK_SH)
        with fails(errno.EAGAIN):
            take(fd, fcntl.LOCK_EX)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: ended(pid), 'the holder has ended')
        take(fd, fcntl.LOCK_EX)
    os.close(fd)


def test_ranges_and_deadlocks_of_posix_locks(mnt):
    (mnt / 'f').write_bytes(b'x' * 1000)
    fd = os.open(mnt / 'f', os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX, 100, 0)

    def other():
        theirs = os.open(mnt / 'f', os.O_RDWR)
        fcntl.lockf(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB, 100, 100)
        kind, _, start, length, pid = struct.unpack('hhqqi4x', fcntl.fcntl(theirs, fcntl.F_GETLK, flock_struct(fcntl.F_WRLCK)))
        return kind == fcntl.F_WRLCK and (start, length) == (0, 100) and pid == os.getppid()
    assert as_user(other, 0, 0)

    def cross():
        theirs = os.open(mnt / 'f', os.O_RDWR)
        fcntl.lockf(theirs, fcntl.LOCK_EX, 100, 500)
        fcntl.lockf(theirs, fcntl.LOCK_EX, 100, 0)  # waits for ours
    with child(cross) as pid:
        wait_for(lambda: is_locked(fd, 500), 'the other holds its lock')
        wait_for(lambda: waits_for_lock(pid), 'the other waits for ours')
        with fails(errno.EDEADLK):
            fcntl.lockf(fd, fcntl.LOCK_EX, 100, 500)
    os.close(fd)


def is_locked(fd, at):
    return struct.unpack_from('h', fcntl.fcntl(fd, fcntl.F_GETLK, flock_struct(fcntl.F_WRLCK, at, 1)))[0] != fcntl.F_UNLCK


def waits_for_lock(pid):
    with open('/proc/locks') as f:
        return any(line.split()[1] == '->' and int(line.split()[5]) == pid for line in f)


# --------------------------------------------------------------------- together

def shuffle(mnt, seed, seconds):
    """Every operation on few names. A lost race may fail with these errors, and no other error may occur."""
    rnd, end = random.Random(seed), time.monotonic() + seconds
    allowed = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.EPERM,
               errno.ELOOP, errno.ESTALE, errno.ENODATA}

    def path():
        return mnt / '/'.join(rnd.choice('abc') for _ in range(rnd.choice((1, 1, 2, 3))))
    acts = (lambda: os.mkdir(path()), lambda: os.rmdir(path()), lambda: path().write_bytes(b'x' * rnd.randrange(9000)),
            lambda: path().read_bytes(), lambda: os.unlink(path()), lambda: os.rename(path(), path()),
            lambda: rename(path(), path(), EXCHANGE), lambda: os.link(path(), path()), lambda: os.listdir(path()),
            lambda: os.symlink('a', path()), lambda: os.truncate(path(), rnd.randrange(9000)), lambda: os.stat(path()),
            lambda: os.setxattr(path(), 'user.x', b'y'), lambda: os.utime(path()))
    while time.monotonic() < end:
        try:
            rnd.choice(acts)()
        except OSError as e:
            assert e.errno in allowed, e


@pytest.mark.parametrize('flags', [(), ('-s',)])
def test_everything_at_once_on_the_same_names(make_store, flags):
    store = make_store()
    mnt = store.mount(flags=flags)
    failed = []

    def work(seed):
        try:
            shuffle(mnt, seed, 3)
        except BaseException as e:  # noqa: B902 - shown by the test
            failed.append(e)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    run_threads(threads)
    assert not failed
    for folder, dirs, files in os.walk(mnt):
        assert os.stat(folder).st_nlink == 2 + len([d for d in dirs if not os.path.islink(f'{folder}/{d}')])
        for name in files + dirs:
            st = os.lstat(f'{folder}/{name}')
            assert stat.S_ISDIR(st.st_mode) or st.st_nlink >= 1


# ------------------------------------------------------------------------ killed

def write_much(mnt):
    fd = os.open(mnt / 'large', os.O_RDWR | os.O_CREAT)
    data = os.urandom(MIB)
    while True:
        for i in range(20):
            os.pwrite(fd, data, i * MIB)


def write_direct(mnt):
    fd = os.open(mnt / 'direct', os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    area = mmap.mmap(-1, MIB)
    while True:
        for i in range(20):
            os.pwritev(fd, [area], i * MIB)


def sync_much(mnt):
    fd = os.open(mnt / 'synced', os.O_RDWR | os.O_CREAT)
    while True:
        os.pwrite(fd, os.urandom(4096), 0)
        os.fsync(fd)


def map_much(mnt):
    fd = os.open(mnt / 'mapped', os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8 * MIB)
    with mmap.mmap(fd, 8 * MIB) as m:
        while True:
            m[:] = os.urandom(8) * MIB
            m.flush()


def read_much(mnt):
    while True:
        (mnt / 'source').read_bytes()


def copy_much(mnt):
    a, b = os.open(mnt / 'source', os.O_RDONLY), os.open(mnt / 'copy', os.O_RDWR | os.O_CREAT)
    while True:
        os.copy_file_range(a, b, 20 * MIB, 0, random.choice((0, 5)))
        fallocate(b, PUNCH | KEEP_SIZE, 0, 20 * MIB)


def name_much(mnt):
    shuffle(mnt, os.getpid(), SECONDS_MAX)


def train(mnt):
    p = mnt / 'model' / '.hitrain' / 'grad' / 'p'
    root = os.open(mnt / 'model', os.O_RDONLY)
    while True:
        with contextlib.suppress(OSError):
            p.write_bytes(ONES * (MIB // 4))
            (mnt / 'model' / 'p').read_bytes()
            os.fsync(root)


WRITTEN = ('large', 'direct', 'synced', 'mapped', 'copy')
CLIENTS = (write_much, write_direct, sync_much, map_much, read_much, copy_much, name_much, train)


@pytest.mark.parametrize('flags', [(), ('-s',)])
def test_killed_clients_leave_nothing_stuck(make_store, flags):
    store = make_store('512M')
    mnt = store.mount(flags=flags)
    (mnt / 'source').write_bytes(os.urandom(20 * MIB))
    new_model(mnt / 'model', 'adamw', p=ONES * (MIB // 4))
    rnd = random.Random(1)
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            pids = [stack.enter_context(child(lambda client=client: client(mnt))) for client in CLIENTS]
            wait_for(lambda: all((mnt / name).exists() for name in WRITTEN), 'all have begun')
            time.sleep(0.2 + rnd.random() / 2)
            assert not [client for client, pid in zip(CLIENTS, pids) if ended(pid)]
            for pid in rnd.sample(pids, len(pids)):
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: all(ended(p) for p in pids), 'all are gone')
    # Everything goes on working, and the mount can go.
    (mnt / 'after').write_bytes(b'fine')
    for name in WRITTEN:
        fd = os.open(mnt / name, os.O_RDWR)
        os.fsync(fd)
        os.close(fd)
    (mnt / 'model' / '.hitrain' / 'ctl').write_text('abort\n')
    root = os.open(mnt / 'model', os.O_RDONLY)
    os.fsync(root)
    os.close(root)
    wait_for(lambda: subprocess.run(['umount', str(mnt)], stderr=subprocess.DEVNULL).returncode == 0, 'unmounting')
    assert store.daemon.wait(SECONDS_MAX) == 0
    store.daemon = None


# --------------------------------------------------------------------- read-only

def test_nothing_changes_on_a_read_only_mount(store):
    mnt = store.point
    (mnt / 'd').mkdir()
    (mnt / 'f').write_bytes(b'text')
    new_model(mnt / 'model', 'adamw', p=ONES)
    sync(mnt / 'model')
    os.utime(mnt / 'f', ns=(1, 1))
    mnt = store.remount('ro')
    before = os.stat(mnt / 'f')
    for attempt in (lambda: (mnt / 'new').touch(), lambda: open(mnt / 'f', 'r+b'), lambda: os.mkdir(mnt / 'new'),
                    lambda: os.symlink('x', mnt / 'new'), lambda: os.link(mnt / 'f', mnt / 'new'),
                    lambda: os.unlink(mnt / 'f'), lambda: os.rmdir(mnt / 'd'), lambda: os.rename(mnt / 'f', mnt / 'new'),
                    lambda: os.chmod(mnt / 'f', 0o600), lambda: os.chown(mnt / 'f', 1, 1), lambda: os.utime(mnt / 'f'),
                    lambda: os.truncate(mnt / 'f', 0), lambda: os.setxattr(mnt / 'f', 'user.x', b''),
                    lambda: os.removexattr(mnt / 'f', 'user.x'), lambda: os.mkfifo(mnt / 'new'),
                    lambda: os.open(mnt, os.O_TMPFILE | os.O_RDWR), lambda: rename(mnt / 'f', mnt / 'd', EXCHANGE),
                    lambda: open(mnt / 'model' / '.hitrain' / 'grad' / 'p', 'wb'),
                    lambda: open(mnt / 'model' / '.hitrain' / 'ctl', 'r+b'),
                    lambda: os.setxattr(mnt / 'model', 'user.hitrain.step', b'3')):
        with fails(errno.EROFS):
            attempt()
    assert not os.access(mnt / 'f', os.W_OK)
    for path in (mnt / 'f', mnt, mnt / 'model'):
        fd = os.open(path, os.O_RDONLY)
        with contextlib.suppress(OSError):
            os.fsync(fd)
        os.close(fd)
    assert (mnt / 'f').read_bytes() == b'text' and (mnt / 'model' / 'p').read_bytes() == ONES
    assert sorted(os.listdir(mnt)) == ['d', 'f', 'model'] and os.stat(mnt / 'f') == before
    with open(mnt / 'f', 'rb') as f, mmap.mmap(f.fileno(), 4, prot=mmap.PROT_READ) as m:
        assert m[:] == b'text'


def test_several_users_share_a_mount(mnt):
    os.chmod(mnt, 0o1777)

    def own(uid):
        def work():
            folder = mnt / f'user{uid}'
            folder.mkdir(mode=0o700)
            (folder / 'f').write_text(str(uid))
            return (folder / 'f').read_text()
        return work
    for uid in (NOBODY, 1000, 1001):
        assert as_user(own(uid), uid, uid) == str(uid)
        for other in (NOBODY, 1000, 1001):
            if other != uid:
                with fails(errno.EACCES):
                    as_user(lambda: (mnt / f'user{uid}' / 'f').read_text(), other, other)
