# SPDX-License-Identifier: Apache-2.0
"""System calls that Python has no name for, and calls made as another user."""
import contextlib
import ctypes
import errno
import os
import pickle
import struct
import tempfile
import time

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_SYMLINK_FOLLOW = 0x400
NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4
KEEP_SIZE, PUNCH, COLLAPSE, ZERO, INSERT = 1, 2, 8, 16, 32
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
NOBODY = 65534
CLOCK_REALTIME_COARSE = 5

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *args):
    """libc's function of that name; raises OSError where it returns -1."""
    ctypes.set_errno(0)
    done = getattr(libc, name)(*args)
    if done == -1:
        error = ctypes.get_errno()
        raise OSError(error, f'{name}: {os.strerror(error)}')
    return done


def rename(old, new, flags=0):
    call('renameat2', AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), ctypes.c_uint(flags))


def fallocate(fd, mode, offset, length):
    call('fallocate', fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length))


def link_fd(fd, name):
    """Gives an open file a name."""
    call('linkat', AT_FDCWD, f'/proc/self/fd/{fd}'.encode(), AT_FDCWD, os.fsencode(name), AT_SYMLINK_FOLLOW)


def sync(path):
    """A file, or a directory: of a model root, the step."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path, data):
    path.write_bytes(data)
    sync(path)


def run_threads(threads):
    """Starts them, and waits for their ends."""
    for t in threads:
        t.start()
    for t in threads:
        t.join(600)
        assert not t.is_alive()


def utimens(path, *times):
    """Times as (seconds, nanoseconds), where nanoseconds may be UTIME_NOW or UTIME_OMIT."""
    call('utimensat', AT_FDCWD, os.fsencode(path), struct.pack('qqqq', *times[0], *times[1]), 0)


class Handle:
    """A file handle, as an NFS server keeps it."""

    def __init__(self, path, flags=0):
        room = 128
        self.buffer = ctypes.create_string_buffer(struct.pack('Ii', room, 0), 8 + room)
        mount = ctypes.c_int()
        call('name_to_handle_at', AT_FDCWD, os.fsencode(path), self.buffer, ctypes.byref(mount), flags)

    def open(self, mount_fd, flags=os.O_RDONLY):
        return call('open_by_handle_at', mount_fd, self.buffer, flags)


def drop_caches():
    """Unused inodes and names leave the kernel."""
    with open('/proc/sys/vm/drop_caches', 'w') as f:
        f.write('2')


@contextlib.contextmanager
def fuse_control():
    """A folder with the connections of all FUSE mounts."""
    folder = tempfile.mkdtemp(prefix='hitrain-test-')
    try:
        call('mount', b'none', folder.encode(), b'fusectl', 0, None)
        try:
            yield folder
        finally:
            call('umount2', folder.encode(), 0)
    finally:
        os.rmdir(folder)


def settle(mnt):
    """Waits until the daemon has answered every request, also those of closes, for which no program waits."""
    with fuse_control() as control:
        waiting, end = f'{control}/{os.minor(os.stat(mnt).st_dev)}/waiting', time.monotonic() + 120
        while True:
            with open(waiting) as f:
                if f.read() == '0\n':
                    break
            assert time.monotonic() < end, 'the daemon still has requests'
            time.sleep(0.001)


def close_dead(*fds):
    """Descriptors of a mount whose daemon was killed."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


@contextlib.contextmanager
def fails(error):
    """The body raises OSError with this errno."""
    try:
        yield
    except OSError as e:
        assert e.errno == error, f'{errno.errorcode.get(e.errno)} in place of {errno.errorcode[error]}: {e}'
    else:
        raise AssertionError(f'succeeded, in place of {errno.errorcode[error]}')


def refused(error, f, *args):
    with fails(error):
        f(*args)


def _run(fn, uid, gid, groups, pipe):
    try:
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        answer = (True, fn())
    except BaseException as e:  # noqa: B902 - raised again by the parent
        answer = (False, e)
    with open(pipe, 'wb') as out:
        out.write(pickle.dumps(answer))


def as_user(fn, uid=NOBODY, gid=NOBODY, groups=()):
    """The result or exception of fn() when a process of that user calls it."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _run(fn, uid, gid, list(groups), theirs)
        os._exit(0)
    os.close(theirs)
    with open(ours, 'rb') as answer:
        ok, value = pickle.loads(answer.read())
    os.waitpid(child, 0)
    if not ok:
        raise value
    return value


def tick():
    """Until the clock that stamps files has gone on. On a busy machine it may stand still for longer than its period."""
    now = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) == now:
        time.sleep(0.001)
