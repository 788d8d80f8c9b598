# SPDX-License-Identifier: Apache-2.0
"""Shards of parameters: writes that the kernel sends in the background while a mapping changes pages, and large ones."""
import contextlib
import errno
import os
import subprocess
import sys

import pytest

from calls import fails, fuse_control, sync
from conftest import MIB, SECONDS_MAX
from models import new_model
from test_roots import word

SIZE = 16 * MIB

HEAD = """
import ctypes, mmap, os, platform, struct, sys
root, size, libc = sys.argv[1], int(sys.argv[2]), ctypes.CDLL(None)
pages = range(0, size, 8192)
w = os.open(root + '/w', os.O_RDWR)
whole = mmap.mmap(w, size)

def open_shard(flags=0):
    return os.open(root + '/.hitrain/shard/0of1/param/w', os.O_RDWR | flags)

def change_whole():
    for at in pages:
        whole[at + 1] = 2
"""

MAPPED = HEAD + """
fd = open_shard()
shard = mmap.mmap(fd, size)
for at in pages:
    shard[at] = 1
change_whole()
shard.flush()
whole.flush()
for at in pages:
    shard[at] = 3
shard.flush()
assert {os.pread(w, 1, at) for at in pages} == {bytes([3])}
"""

ASYNCHRONOUS = HEAD + """
io_setup, io_getevents, io_submit = (206, 208, 209) if platform.machine() == 'x86_64' else (0, 4, 2)
fd = open_shard(os.O_DIRECT)
page = mmap.mmap(-1, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
blocks = [ctypes.create_string_buffer(struct.pack('<QIIHhIQQqQII', 0, 0, 0, 1, 0, fd, address, 4096, at, 0, 0, 0))
          for at in pages]
pointers = (ctypes.c_void_p * len(blocks))(*[ctypes.addressof(b) for b in blocks])
context = ctypes.c_ulong(0)
assert libc.syscall(io_setup, len(blocks), ctypes.byref(context)) == 0

def write_all(value):
    page[0] = value
    sent = 0
    while sent < len(blocks):
        left = ctypes.c_long(len(blocks) - sent)
        n = libc.syscall(io_submit, context, left, ctypes.byref(pointers, 8 * sent))
        assert n > 0, n
        sent += n
    events = (ctypes.c_int64 * (4 * sent))()
    count = ctypes.c_long(sent)
    assert libc.syscall(io_getevents, context, count, count, events, None) == sent
    assert {events[4 * i + 2] for i in range(sent)} == {4096}

change_whole()
write_all(1)
whole.flush()
write_all(3)
os.fsync(fd)
assert {os.pread(w, 1, at) for at in pages} == {bytes([3])}
"""


@contextlib.contextmanager
def abort_unless_ended(point):
    """Yields a list, and aborts the connection if it stays empty: else its clients and its daemon would never end."""
    minor, ended = os.minor(os.stat(point).st_dev), []
    with fuse_control() as control:
        try:
            yield ended
        finally:
            if not ended:
                with open(f'{control}/{minor}/abort', 'w') as f:
                    f.write('1')


@pytest.mark.parametrize('program', [MAPPED, ASYNCHRONOUS], ids=['mapped', 'asynchronous'])
def test_background_writes_of_a_shard_do_not_hang(store, program):
    """Every second page is changed: the kernel makes a request of each."""
    root = new_model(store.point / 'model', 'sgd lr=1', w=bytes(SIZE))
    sync(root)
    with abort_unless_ended(store.point) as ended:
        child = subprocess.Popen([sys.executable, '-c', program, str(root), str(SIZE)])
        try:
            ended.append(child.wait(SECONDS_MAX))
        finally:
            child.kill()
    assert ended == [0]


def memory_of(process):
    with open(f'/proc/{process.pid}/status') as f:
        return next(int(line.split()[1]) for line in f if line.startswith('VmRSS:')) * 1024


def test_open_shards_share_their_lists_of_blocks(store):
    root = new_model(store.point / 'model', 'sgd lr=1', w=bytes(MIB))
    sync(root)
    os.truncate(root / 'w', 1 << 40)
    word(root, 'shards', '3 4 2')
    sizes = [(root / f'.hitrain/shard/{r}of2/param/w').stat().st_size for r in range(2)]
    assert sizes == [1 << 39, 1 << 39]
    before = memory_of(store.daemon)
    opened = [os.open(root / f'.hitrain/shard/{i % 2}of2/{kind}/w', os.O_RDONLY)
              for i in range(50) for kind in ('param', 'grad')]
    # Alone, each has a list of 2 MiB. The daemon may be filling its 56 MiB of memory for content at the same time.
    assert memory_of(store.daemon) - before < 120 * MIB
    for fd in opened:
        os.close(fd)
    word(root, 'shards', '3 4 2 3 2')
    path = root / '.hitrain/shard/0of2/param/w'
    with fails(errno.EFBIG):
        os.open(path, os.O_RDONLY)
    assert path.stat().st_size == 0
    word(root, 'shards', '2')
    with open(path, 'rb', 0) as f:
        assert os.pread(f.fileno(), 1, (1 << 39) - 1) == bytes(1)
    os.truncate(root / 'w', MIB)
