# SPDX-License-Identifier: Apache-2.0
"""Blocks of a kept step, read by some threads and given out in order, with their sums. Reading verifies the checksums of
the store. Blocks of zeros are left out.
"""
import collections
import concurrent.futures
import errno
import mmap
import os
import queue

from places import BLOCK_BYTES
from sums import Address, is_zero, sum128
from tree import Want, failed, failure

THREADS = 4
AHEAD = 12                      # blocks
SLAB_BLOCKS = 8
# The kernel makes one request of so many bytes wherever they lie in memory. Of a block of 1 MiB it makes two, unless that begins
# on a page, and state in 8 bits is rounded anew where a request ends within one of its blocks.
REQUEST_BYTES = 512 << 10
PAGE_BYTES = 4096

# give(): the caller has done with data.
Read = collections.namedtuple('Read', 'index data raw_sum give')


def large(count):
    """Memory in large pages, if the kernel has some: it clears them quicker, and finds them quicker for direct reads."""
    memory = mmap.mmap(-1, count)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass
    return memoryview(memory)


class Buffers:
    """Memory for at most so many blocks, made when it is needed, some at once. Each begins on a page. take() waits for one. One thread
    takes, any gives.
    """

    def __init__(self, most):
        self.free = queue.LifoQueue()
        self.left = most

    def take(self):
        if self.free.empty() and self.left:
            count = min(self.left, SLAB_BLOCKS)
            self.left -= count
            slab = large(count * BLOCK_BYTES)
            for at in range(0, len(slab), BLOCK_BYTES):
                self.give(slab[at:at + BLOCK_BYTES])
        return self.free.get()

    def give(self, buffer):
        self.free.put(buffer)


def read_at(handle, view, at, path):
    """All bytes of the view: a shorter file has changed."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(handle.fd, [view[done:]], at + done)
        except OSError as e:
            raise failed(path, e) from None
        if not count:
            raise failure(path, ' became shorter')
        done += count


def write_at(fd, data, at):
    """All of it. OSError."""
    view = memoryview(data)
    with Address(view) as (address, _):
        most = REQUEST_BYTES if address % PAGE_BYTES else 2 * REQUEST_BYTES
    while len(view):
        count = os.pwrite(fd, view[:most], at)
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view, at = view[count:], at + count


def read_block(want, view):
    """The sum of the block, or None: it is zero."""
    read_at(want.handle, view, want.at, want.path)
    return None if is_zero(view) else sum128(view)


def in_order(items, buffers):
    """The items, with a Read in place of each Want, and none for a block of zeros. buffers: for AHEAD and for those that
    the caller holds.
    """
    waiting = collections.deque()
    pool = concurrent.futures.ThreadPoolExecutor(THREADS)
    try:
        for item in items:
            if isinstance(item, Want):
                buffer = buffers.take()
                view = buffer[:item.length]
                waiting.append((item, buffer, view, pool.submit(read_block, item, view)))
            else:
                waiting.append((item, None, None, None))
            while len(waiting) > AHEAD:
                yield from finish(*waiting.popleft(), buffers)
        while waiting:
            yield from finish(*waiting.popleft(), buffers)
    finally:
        pool.shutdown(cancel_futures=True)


def finish(item, buffer, view, future, buffers):
    if future is None:
        yield item
        return
    raw_sum = future.result()
    if raw_sum is None:
        buffers.give(buffer)
    else:
        yield Read(item.index, view, raw_sum, lambda: buffers.give(buffer))
