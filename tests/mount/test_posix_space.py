# SPDX-License-Identifier: Apache-2.0
"""Space: figures of the file system, a full store, sparse files, ranges and sizes."""
import ctypes
import errno
import json
import mmap
import os
import random
import struct
import subprocess

import pytest

from calls import COLLAPSE, INSERT, KEEP_SIZE, PUNCH, ZERO, as_user, fails, fallocate, sync
from conftest import MIB, SECONDS_MAX, wait_for

FILE_MAX = 1 << 44


def available(mnt):
    v = os.statvfs(mnt)
    assert v.f_bsize == v.f_frsize == 4096 and v.f_bavail <= v.f_bfree <= v.f_blocks
    return v.f_bavail * 4096


def held(path):
    return os.stat(path).st_blocks * 512


def pattern(at):
    return b''.join(bytes([i >> 16 & 255]) * 65536 for i in range(at, at + MIB, 65536))


def fill(path):
    """Writes until nothing fits any more; returns the size."""
    size = 0
    with open(path, 'wb', buffering=0) as f, fails(errno.ENOSPC):
        while True:
            size += f.write(pattern(size))
            assert size % 65536 == 0
    assert os.stat(path).st_size == size
    return size


# ---------------------------------------------------------------------- figures

def test_figures_follow_what_is_written_and_deleted(mnt):
    start, files = available(mnt), os.statvfs(mnt).f_files - os.statvfs(mnt).f_ffree
    for synced in (False, True):
        (mnt / 'f').write_bytes(os.urandom(10 * MIB))
        if synced:
            sync(mnt / 'f')
        assert start - 11 * MIB < available(mnt) <= start - 10 * MIB
        assert held(mnt / 'f') == 10 * MIB
        assert os.statvfs(mnt).f_files - os.statvfs(mnt).f_ffree == files + 1
        os.truncate(mnt / 'f', 4 * MIB)
        sync(mnt / 'f')  # until it is published a crash would bring back the rest
        assert available(mnt) > start - 5 * MIB and held(mnt / 'f') == 4 * MIB
        os.unlink(mnt / 'f')
        wait_for(lambda: available(mnt) > start - MIB, 'its space is free')  # the last close comes by itself
    (mnt / 'f').write_bytes(b'x')
    assert held(mnt / 'f') == 4096
    with open(mnt / 'f', 'rb'):
        os.unlink(mnt / 'f')
        for i in range(100):
            (mnt / str(i)).mkdir()
    wait_for(lambda: os.statvfs(mnt).f_files - os.statvfs(mnt).f_ffree == files + 100, 'the file is gone')


def test_sparse_files(mnt):
    f = mnt / 'f'
    with open(f, 'wb') as out:
        out.truncate(FILE_MAX)
        assert held(f) == 0
        for at in (0, 10 * MIB, 1 << 40, FILE_MAX - 5):
            out.seek(at)
            out.write(b'piece')
    fd = os.open(f, os.O_RDWR)
    found, at = [], 0
    while True:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as e:
            assert e.errno == errno.ENXIO
            break
        found.append(at)
        at = os.lseek(fd, at, os.SEEK_HOLE)
    assert found == [0, 10 * MIB, 1 << 40, FILE_MAX - 65536]
    assert held(f) <= 4 * 65536
    assert os.pread(fd, 10, (1 << 40) - 5) == bytes(5) + b'piece'
    assert os.lseek(fd, 0, os.SEEK_HOLE) == 65536 and os.lseek(fd, FILE_MAX - 1, os.SEEK_HOLE) == FILE_MAX
    for whence in (os.SEEK_DATA, os.SEEK_HOLE):
        with fails(errno.ENXIO):
            os.lseek(fd, FILE_MAX, whence)
    with fails(errno.EFBIG):
        os.ftruncate(fd, FILE_MAX + 1)
    with fails(errno.EFBIG):
        os.pwrite(fd, b'x', FILE_MAX)
    assert os.pwrite(fd, b'xyz', FILE_MAX - 2) == 2  # the part that fits
    with fails(errno.EINVAL):
        os.ftruncate(fd, -1)
    os.close(fd)
    sync(f)
    assert os.stat(f).st_size == FILE_MAX


def test_truncation_forgets_what_it_cuts(mnt):
    f = mnt / 'f'
    for size, cut in ((10, 3), (5000, 4097), (200_000, 65_536), (3 * MIB, MIB + 1)):
        data = os.urandom(size)
        f.write_bytes(data)
        with open(f, 'r+b') as file, mmap.mmap(file.fileno(), 0) as m:
            os.ftruncate(file.fileno(), cut)
            os.ftruncate(file.fileno(), size)
            assert os.pread(file.fileno(), size, 0) == data[:cut] + bytes(size - cut)
            assert m[:] == data[:cut] + bytes(size - cut)
            os.fsync(file.fileno())


# ----------------------------------------------------------------------- ranges

def test_punching_and_zeroing_against_a_copy(mnt):
    rnd = random.Random(3)
    size = 700_000
    shadow = bytearray(rnd.randbytes(size))
    (mnt / 'f').write_bytes(shadow)
    fd = os.open(mnt / 'f', os.O_RDWR)
    with mmap.mmap(fd, size) as m:
        for _ in range(150):
            at = rnd.randrange(size)
            length = min(rnd.choice((1, 511, 4096, 70_000, 200_000)), size - at)
            act = rnd.random()
            if act < 0.3:
                fallocate(fd, PUNCH | KEEP_SIZE, at, length)
                shadow[at:at + length] = bytes(length)
            elif act < 0.5:
                fallocate(fd, ZERO | rnd.choice((0, KEEP_SIZE)), at, length)
                shadow[at:at + length] = bytes(length)
            elif act < 0.8:
                shadow[at:at + length] = rnd.randbytes(length)
                os.pwrite(fd, shadow[at:at + length], at)
            else:
                shadow[at:at + length] = rnd.randbytes(length)
                m[at:at + length] = bytes(shadow[at:at + length])
            look = rnd.randrange(size - 5000)
            assert os.pread(fd, 5000, look) == m[look:look + 5000] == shadow[look:look + 5000]
        m.flush()
    os.close(fd)
    assert (mnt / 'f').read_bytes() == shadow


def test_sizes_after_ranges(mnt):
    fd = os.open(mnt / 'f', os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b'x' * 10_000, 0)
    for mode, at, length, size in ((ZERO | KEEP_SIZE, 9_000, 90_000, 10_000), (PUNCH | KEEP_SIZE, 9_000, 90_000, 10_000),
                                   (ZERO, 9_000, 500, 10_000), (ZERO, 9_000, 5_000, 14_000),
                                   (ZERO, 200_000, 1, 200_001)):
        fallocate(fd, mode, at, length)
        assert os.fstat(fd).st_size == size, (mode, at, length)
    assert os.pread(fd, 300_000, 0) == b'x' * 9_000 + bytes(191_001)
    fallocate(fd, PUNCH | KEEP_SIZE, 0, 1 << 30)
    assert os.fstat(fd).st_blocks == 0 and os.fstat(fd).st_size == 200_001
    os.close(fd)


def test_ranges_that_cannot_be(mnt):
    fd = os.open(mnt / 'f', os.O_RDWR | os.O_CREAT)
    for mode in (0, KEEP_SIZE, PUNCH | KEEP_SIZE, ZERO, ZERO | KEEP_SIZE):
        for at, length in ((0, 0), (-1, 10), (0, -1)):
            with fails(errno.EINVAL):
                fallocate(fd, mode, at, length)
    for mode in (0, KEEP_SIZE, PUNCH | KEEP_SIZE, ZERO, ZERO | KEEP_SIZE):
        for at, length in ((FILE_MAX, 1), (FILE_MAX - 4096, 4097), (1 << 62, 1 << 62)):
            with fails(errno.EFBIG):
                fallocate(fd, mode, at, length)
    for mode in (0, KEEP_SIZE, ZERO):
        with fails(errno.ENOSPC):
            fallocate(fd, mode, 0, 1 << 40)
        assert os.fstat(fd).st_size == os.fstat(fd).st_blocks == 0
    for mode in (PUNCH, COLLAPSE, INSERT, PUNCH | ZERO | KEEP_SIZE):
        with fails(errno.EOPNOTSUPP):
            fallocate(fd, mode, 0, 4096)
    os.close(fd)
    fd = os.open(mnt / 'f', os.O_RDONLY)
    with fails(errno.EBADF):
        fallocate(fd, ZERO, 0, 4096)
    os.close(fd)
    os.mkfifo(mnt / 'p')
    fd = os.open(mnt / 'p', os.O_RDWR)
    with fails(errno.ESPIPE):
        fallocate(fd, ZERO, 0, 4096)
    os.close(fd)


@pytest.mark.parametrize('keep', [0, KEEP_SIZE])
def test_allocated_space_is_there_when_it_is_written(make_store, keep):
    mnt = make_store('64M').mount('dram=16M')
    start = available(mnt)
    fd = os.open(mnt / 'f', os.O_RDWR | os.O_CREAT)
    os.write(fd, b'x' * 100)
    fallocate(fd, keep, 0, 10 * MIB)
    assert os.fstat(fd).st_size == (100 if keep else 10 * MIB)
    assert 10 * MIB <= held(mnt / 'f') <= 10 * MIB + 65536 and available(mnt) <= start - 10 * MIB
    if not keep:
        assert os.pread(fd, 11 * MIB, 0) == b'x' * 100 + bytes(10 * MIB - 100)
    fill(mnt / 'rest')
    with fails(errno.ENOSPC):
        os.pwrite(fd, b'y' * MIB, 20 * MIB)
    data = os.urandom(10 * MIB)
    for at in range(0, 10 * MIB, MIB):
        assert os.pwrite(fd, data[at:at + MIB], at) == MIB
    os.fsync(fd)
    assert os.pread(fd, 11 * MIB, 0) == data
    os.close(fd)


def test_allocated_space_is_given_back(mnt):
    start = available(mnt)
    for give_back in (lambda fd: os.ftruncate(fd, 0), lambda fd: os.ftruncate(fd, os.fstat(fd).st_size),
                      lambda fd: os.unlink(mnt / 'f')):
        fd = os.open(mnt / 'f', os.O_RDWR | os.O_CREAT)
        fallocate(fd, KEEP_SIZE, 0, 20 * MIB)
        assert available(mnt) <= start - 20 * MIB and os.fstat(fd).st_size == 0
        give_back(fd)
        os.close(fd)
        wait_for(lambda: available(mnt) > start - MIB, 'the space is back')
    fd = os.open(mnt / 'f', os.O_RDWR | os.O_CREAT)
    fallocate(fd, 0, 0, 20 * MIB)
    fallocate(fd, PUNCH | KEEP_SIZE, 0, 15 * MIB)
    assert start - 6 * MIB < available(mnt) <= start - 5 * MIB and held(mnt / 'f') == 5 * MIB
    os.close(fd)


# ------------------------------------------------------------------ a full store

@pytest.mark.parametrize('tensors', [False, True])
def test_a_full_store(make_store, tensors):
    store = make_store('64M')
    mnt = store.mount('dram=16M')
    if tensors:
        os.setxattr(mnt, 'user.hitrain.dtype', b'f32')
    (mnt / 'other').write_bytes(b'o' * MIB)
    (mnt / 'gone').write_bytes(b'g' * 3 * MIB)
    size = fill(mnt / 'large')
    for make in (lambda: (mnt / 'new').touch(), lambda: os.mknod(mnt / 'new', 0o600),
                 lambda: os.open(mnt, os.O_TMPFILE | os.O_RDWR), lambda: os.open(mnt / 'new', os.O_CREAT | os.O_WRONLY)):
        with fails(errno.ENOSPC):
            make()
    os.chmod(mnt, 0o777)
    with fails(errno.ENOSPC):
        as_user(lambda: (mnt / 'new').touch())
    # Calls that need no room for data still work, as long as the log has some.
    (mnt / 'dir').mkdir()
    os.symlink('x', mnt / 'link')
    os.mkfifo(mnt / 'fifo')
    os.link(mnt / 'large', mnt / 'hard')
    os.rename(mnt / 'hard', mnt / 'dir' / 'hard')
    os.setxattr(mnt / 'large', 'user.a', b'x')
    os.chmod(mnt / 'large', 0o600)
    # The existing file opens, reads, shrinks and can be removed.
    with open(mnt / 'large', 'r+b') as f:
        for at in (0, size // 2 // MIB * MIB, size - MIB):
            f.seek(at)
            assert f.read(MIB) == pattern(at)
        os.close(os.open(mnt / 'other', os.O_RDWR | os.O_CREAT))
        assert (mnt / 'other').read_bytes() == b'o' * MIB
        os.unlink(mnt / 'gone')
        (mnt / 'new').write_bytes(b'n' * 2 * MIB)
        assert (mnt / 'new').read_bytes() == b'n' * 2 * MIB
        f.truncate(MIB)
        assert f.read() == b'' and os.stat(mnt / 'large').st_size == MIB
    assert fill(mnt / 'again') > 20 * MIB
    for name in ('again', 'large', 'other'):
        os.truncate(mnt / name, 0)
    (mnt / 'more').write_bytes(b'm' * 10 * MIB)
    store.remount()
    assert (mnt / 'more').read_bytes() == b'm' * 10 * MIB and (mnt / 'new').read_bytes() == b'n' * 2 * MIB


def write_asynchronously(fd, size, off):
    """One direct write by io_submit(2); returns the result of io_getevents(2)."""
    call, context = ctypes.CDLL(None, use_errno=True).syscall, ctypes.c_ulong()
    assert call(206, 1, ctypes.byref(context)) == 0
    with mmap.mmap(-1, size) as memory:
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        block = ctypes.create_string_buffer(struct.pack('<QIIHhIQQqQII', 0, 0, 0, 1, 0, fd, at, size, off, 0, 0, 0))
        assert call(209, context, 1, (ctypes.c_void_p * 1)(ctypes.addressof(block))) == 1
        event = ctypes.create_string_buffer(32)
        assert call(208, context, ctypes.c_long(1), ctypes.c_long(1), event, None) == 1
    call(207, context)
    return struct.unpack('<QQqq', event.raw)[2]


def run_fio(path, *options):
    done = subprocess.run(['fio', '--output-format=json', '--name=f', f'--filename={path}', '--rw=write', '--bs=1M',
                           '--fallocate=none', *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=SECONDS_MAX)
    return json.loads(done.stdout[done.stdout.index('{'):])['jobs'][0]['error']


@pytest.fixture
def nearly_full(make_store):
    """A mount in which half of a request of 1 MiB fits."""
    mnt = make_store('64M').mount('dram=16M')
    (mnt / 'room').write_bytes(b'r' * (MIB // 2))
    (mnt / 'source').write_bytes(b's' * 2 * MIB)
    fill(mnt / 'large')
    os.truncate(mnt / 'room', 0)
    return mnt


@pytest.mark.parametrize('inside', [False, True], ids=['extends', 'inside'])
def test_asynchronous_direct_write_that_fits_in_part(nearly_full, inside):
    """It fails as a whole, so the file is as long as before."""
    f = nearly_full / 'room'
    fd = os.open(f, os.O_RDWR | os.O_DIRECT)
    before = MIB if inside else 0
    os.ftruncate(fd, before)
    for _ in range(2):
        assert write_asynchronously(fd, MIB, 0) == -errno.ENOSPC
        assert os.fstat(fd).st_size == os.stat(f).st_size == before
    if not inside:    # there, the written bytes keep the room
        assert write_asynchronously(fd, MIB // 4, 0) == MIB // 4
    os.close(fd)


def test_direct_write_that_fits_in_part(nearly_full):
    """A short count or an error; the next one that appends begins where this one ended for its caller."""
    f = nearly_full / 'room'
    fd = os.open(f, os.O_RDWR | os.O_DIRECT | os.O_APPEND)
    with mmap.mmap(-1, MIB) as memory:
        try:
            told = os.writev(fd, [memory])
        except OSError as e:
            assert e.errno == errno.ENOSPC
            told = 0
    assert os.fstat(fd).st_size == told
    os.close(fd)


@pytest.mark.parametrize('options', ['libaio --direct=1 --iodepth=8', 'io_uring --direct=1 --iodepth=8', 'io_uring',
                                     'psync', 'psync --direct=1', 'pvsync2 --direct=1', 'mmap',
                                     'libaio --direct=1 --iodepth=8 --bs=4M', 'psync --direct=1 --bs=4M'])
def test_every_kind_of_write_to_a_full_store(nearly_full, options):
    engine, *rest = options.split()
    assert run_fio(nearly_full / 'room', '--size=8M', '--end_fsync=1', f'--ioengine={engine}', *rest) == errno.ENOSPC


def test_copies_and_ranges_on_a_full_store(nearly_full):
    source = os.open(nearly_full / 'source', os.O_RDONLY)
    fd = os.open(nearly_full / 'room', os.O_RDWR)
    done = 0
    with fails(errno.ENOSPC):
        while done < 2 * MIB - 100:    # nothing can be shared at another place in its chunk
            n = os.copy_file_range(source, fd, 2 * MIB - 100 - done, done, 100 + done)
            assert n > 0
            done += n
    assert os.pread(fd, 2 * MIB, 0)[:100 + done] == bytes(100) + b's' * done
    os.ftruncate(fd, 0)
    for mode in (0, KEEP_SIZE, ZERO, ZERO | KEEP_SIZE):
        with fails(errno.ENOSPC):
            fallocate(fd, mode, 0, MIB)
        assert os.fstat(fd).st_size == 0
    os.close(fd)
    os.close(source)


def test_pages_that_do_not_fit(nearly_full):
    """msync says so, and close."""
    fd = os.open(nearly_full / 'room', os.O_RDWR)
    os.ftruncate(fd, 4 * MIB)
    with mmap.mmap(fd, 4 * MIB) as m:
        m[:] = b'p' * 4 * MIB
        with fails(errno.ENOSPC):
            m.flush()
    with fails(errno.ENOSPC):
        os.close(fd)


def test_punching_makes_room_on_a_full_store(make_store):
    mnt = make_store('64M').mount('dram=16M')
    size = fill(mnt / 'large')
    with open(mnt / 'large', 'r+b', buffering=0) as f:
        fallocate(f.fileno(), PUNCH | KEEP_SIZE, MIB, 10 * MIB)
        assert os.stat(mnt / 'large').st_size == size
        (mnt / 'new').write_bytes(b'n' * 5 * MIB)
        fallocate(f.fileno(), ZERO, 0, MIB + 17)  # whole chunks need no room
        assert f.read(2 * MIB) == bytes(2 * MIB)


def test_holes_are_no_finer_than_the_block_size_told(mnt):
    (mnt / 'tensors').mkdir()
    os.setxattr(mnt / 'tensors', 'user.hitrain.dtype', b'f32')
    for folder in (mnt, mnt / 'tensors'):
        with open(folder / 'sparse', 'w+b') as f:
            block = os.fstat(f.fileno()).st_blksize
            assert block == (65536 if folder == mnt else MIB)
            f.truncate(8 * block)
            for at in (0, 3 * block + 5000, 5 * block - 1):
                os.pwrite(f.fileno(), b'x', at)
            at, seen = 0, []
            while at < 8 * block:
                data = os.lseek(f.fileno(), at, os.SEEK_DATA) if at <= 5 * block - 1 else 8 * block
                assert data % block == 0
                if data == 8 * block:
                    break
                at = os.lseek(f.fileno(), data, os.SEEK_HOLE)
                assert at % block == 0
                seen.append((data // block, at // block))
            assert seen == [(0, 1), (3, 5)]
    assert os.stat(mnt).st_blksize == os.statvfs(mnt).f_bsize == 4096


def test_as_many_files_fit_as_are_said_to(make_store):
    mnt = make_store('64M').mount()
    said, made = os.statvfs(mnt).f_ffree, 0
    assert said < os.statvfs(mnt).f_bavail
    fd = os.open(mnt, os.O_RDONLY)
    with fails(errno.ENOSPC):
        while True:
            os.mknod(f'a name of thirty-two bytes {made:05}', 0o100600, dir_fd=fd)
            made += 1
    os.close(fd)
    assert 0.75 * said <= made <= 1.25 * said and os.statvfs(mnt).f_ffree <= said // 100
