# SPDX-License-Identifier: Apache-2.0
"""Many bytes between files, a block at a time: each of several threads takes a block, fills its buffer and writes it out.

So reads and writes of different blocks overlap, and memory is one buffer for each thread, however much there is to copy. Buffers begin
at a page. Files may be open with O_DIRECT: then no byte passes through the kernel's cache, which would be one more copy.
"""
import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from typing import Any, Callable, Iterator, Optional

THREADS = 4
BLOCK_BYTES = 4 << 20
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

Job = Callable[[memoryview], None]  # it gets the buffer of its thread


def run(jobs: Iterator[Job]) -> None:
    """Does all jobs. They may come from a generator, which one thread at a time runs. After an error no further job begins, and all
    have ended when this raises it."""
    lock, rest = threading.Lock(), jobs

    def take() -> Optional[Job]:
        with lock:
            return next(rest, None)

    def work(job: Optional[Job]) -> None:
        memory = mmap.mmap(-1, BLOCK_BYTES)  # goes with the last view of it
        buffer = memoryview(memory)
        while job is not None:
            job(buffer)
            job = take()
    first, second = take(), take()
    if second is None:
        work(first)
        return
    with concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix='hitrain-copy') as pool:
        try:
            begun = [pool.submit(work, first), pool.submit(work, second)]
            begun += [pool.submit(lambda: work(take())) for _ in range(THREADS - 2)]
            for working in concurrent.futures.as_completed(begun):
                working.result()
        finally:
            rest = iter(())


class Target:
    """A file that is written in blocks, by several threads. Each block but the last one begins and ends at a page.

    It becomes `size` bytes long in finish(). Before that it may be a page longer, because O_DIRECT writes whole pages."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._size = fd, size
        self._direct = True
        # Space now: it is missing before anything is written, and writes that do not extend a file may run at the same time.
        number = errno.EINTR
        while number == errno.EINTR:
            number = ctypes.get_errno() if _libc.fallocate(fd, 0, 0, size) else 0
        if number not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))
        os.ftruncate(fd, size)
        self._set_direct(True)

    def write(self, buffer: memoryview, size: int, at: int) -> None:
        """The first bytes of a block's buffer."""
        whole = -(-size // _PAGE) * _PAGE
        if self._direct and at % _PAGE == 0 and whole <= len(buffer):
            buffer[size:whole] = bytes(whole - size)
            try:
                write_at(self._fd, buffer[:whole], at)
                return
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self._set_direct(False)  # a device with larger blocks than pages, or a file system that cannot
        write_at(self._fd, buffer[:size], at)
        os.posix_fadvise(self._fd, at, size, os.POSIX_FADV_DONTNEED)  # its device begins now, and not at the end

    def finish(self) -> None:
        """All blocks are written. Returns when they are durable."""
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)

    def _set_direct(self, wanted: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        except OSError as e:
            if e.errno != errno.EINVAL or not wanted:
                raise
            wanted = False  # as of tmpfs before Linux 6.6
        self._direct = wanted


def write_at(fd: int, memory: memoryview, at: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], at + done)


class Opened:
    """Descriptors of files that several threads use, by path. A file is closed when another one was opened `most` times since."""

    def __init__(self, flags: int, most: int = 2 * THREADS) -> None:
        self._flags, self._most = flags | os.O_CLOEXEC, most
        self._lock = threading.Lock()
        self._held: Any = {}  # path: [descriptor, how many use it]

    @contextlib.contextmanager
    def file(self, path: str) -> Iterator[int]:
        with self._lock:
            entry = self._held.pop(path, None)
            if entry is None:
                entry = [os.open(path, self._flags), 0]
            self._held[path] = entry  # the newest one is last
            entry[1] += 1
            self._close_idle(self._most)
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1

    def _close_idle(self, most: int) -> None:
        for path in list(self._held)[:max(0, len(self._held) - most)]:
            if not self._held[path][1]:
                os.close(self._held.pop(path)[0])

    def close(self) -> None:
        with self._lock:
            self._close_idle(0)


@contextlib.contextmanager
def opened(flags: int) -> Iterator[Opened]:
    files = Opened(flags)
    try:
        yield files
    finally:
        files.close()
