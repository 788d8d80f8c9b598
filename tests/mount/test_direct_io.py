# SPDX-License-Identifier: Apache-2.0
"""O_DIRECT and asynchronous I/O: any alignment, any tail, many at once; and no request costs more than it must."""
import concurrent.futures
import mmap
import os
import pathlib
import random
import subprocess

import pytest

from conftest import MIB, run
from slow import loop_device
from programs import LONG, client

KIB = 1024


class Aligned:
    """Memory whose first byte is so many bytes after the start of a page."""

    def __init__(self, size, shift=0):
        self.map = mmap.mmap(-1, size + shift + mmap.PAGESIZE)
        self.view = memoryview(self.map)[shift:shift + size]

    def __enter__(self):
        return self.view

    def __exit__(self, *_):
        self.view.release()
        self.map.close()


def direct(path, flags=os.O_RDWR):
    return os.open(path, flags | os.O_DIRECT, 0o600)


def put(fd, data, off, shift=0):
    with Aligned(len(data), shift) as m:
        m[:] = data
        assert os.pwritev(fd, [m], off) == len(data)


def take(fd, size, off, shift=0):
    with Aligned(size, shift) as m:
        n = os.preadv(fd, [m], off)
        return bytes(m[:n])


def figure(path, name):
    return int(os.getxattr(path, 'user.hitrain.' + name))


# ------------------------------------------------------------------------ fio


ENGINES = {
    'psync': ('--direct=1',),
    'libaio': ('--direct=1', '--iodepth=16'),
    'io_uring': ('--direct=1', '--iodepth=16'),
    'mmap': (),
}


def fio(folder, *options):
    done = subprocess.run(
        ['fio', '--name=job', f'--directory={folder}', '--fallocate=none', '--verify=crc32c', '--do_verify=1',
         '--verify_fatal=1', '--group_reporting', '--minimal', *options],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize('engine', ENGINES)
def test_fio_reads_what_it_wrote(mnt, engine):
    size = '64m' if LONG else '6m'
    for pattern, block in (('write', '1m'), ('randwrite', '4k'), ('randrw', '4k-64k')):
        folder = mnt / pattern
        folder.mkdir()
        fio(folder, f'--ioengine={engine}', f'--rw={pattern}', f'--{"bsrange" if "-" in block else "bs"}={block}',
            f'--size={size}', '--numjobs=2', *ENGINES[engine])


@pytest.mark.parametrize('engine', ['libaio', 'io_uring'])
def test_fio_with_buffers_between_pages(mnt, engine):
    fio(mnt, f'--ioengine={engine}', '--rw=randwrite', '--bs=1m', '--size=8m', '--direct=1', '--iodepth=8',
        '--iomem_align=1k', '--mem=malloc')
    (mnt / 'odd').mkdir()
    fio(mnt / 'odd', f'--ioengine={engine}', '--rw=write', '--bs=1000k', '--blockalign=1k', '--size=7777k',
        '--direct=1', '--iodepth=8')


# ------------------------------------------------ swapping as DeepSpeed does


def test_swapping_as_deepspeed_does(make_store):
    store = make_store('512M')
    store.mount()
    steps = 20 if LONG else 3
    swap = ('swapper', '--ranks=3', '--tensors=3', '--size=' + str(2 * MIB + 512))
    client(*swap, f'--steps={steps}', store.point)
    client(*swap, '--check', f'--first={steps - 1}', store.point)
    swapped = [p for p in store.point.rglob('*.swp')]
    assert len(swapped) == 27 and all(p.stat().st_mode == 0o100600 for p in swapped)
    store.remount()
    client(*swap, '--check', f'--first={steps - 1}', store.point)
    client(*swap, f'--first={steps}', '--steps=1', store.point)


def test_swapping_tensors_with_a_dtype(mnt):
    os.setxattr(mnt, 'user.hitrain.dtype', b'f32')
    client('swapper', '--ranks=2', '--steps=3', mnt)


def chunk_bytes(path):
    lines = os.getxattr(path, 'user.hitrain.stats').decode().splitlines()
    return int(dict(line.split('=', 1) for line in lines)['chunk_bytes'])


def test_files_that_begin_with_a_large_direct_write_get_large_chunks(make_store):
    store = make_store()
    store.mount()
    large, at_4m, short, buffered, late = (store.point / name for name in ('large', 'at_4m', 'short', 'buffered', 'late'))
    data = random.Random(7).randbytes(9 * MIB)
    for path, sizes, first in (large, (9 * MIB,), 0), (at_4m, (MIB,), 4 * MIB), (short, (256 * KIB, MIB), 0):
        fd = direct(path, os.O_RDWR | os.O_CREAT)
        off = first
        for size in sizes:
            put(fd, data[:size], off)
            off += size
        os.close(fd)
    buffered.write_bytes(data)
    late.write_bytes(b'x')
    fd = direct(late)
    put(fd, data[:MIB], 0)
    put(fd, data[:MIB], MIB)
    os.ftruncate(fd, 0)
    os.close(fd)
    kinds = {large: MIB, at_4m: MIB, short: 64 * KIB, buffered: 64 * KIB, late: 64 * KIB}
    assert {path: chunk_bytes(path) for path in kinds} == kinds
    with open(large, 'r+b') as f:  # pieces of such a file, too
        f.seek(3 * MIB - 5)
        f.write(b'0123456789')
    expected = data[:3 * MIB - 5] + b'0123456789' + data[3 * MIB + 5:]
    store.remount()
    assert {path: chunk_bytes(path) for path in kinds if path != late} == {k: v for k, v in kinds.items() if k != late}
    assert large.read_bytes() == expected and buffered.read_bytes() == data
    assert at_4m.read_bytes() == bytes(4 * MIB) + data[:MIB]
    assert short.read_bytes() == data[:256 * KIB] + data[:MIB]


def test_many_begin_a_file_at_once(mnt):
    """The first of several writers chooses the chunks; none loses a byte."""
    data = random.Random(8).randbytes(MIB)

    def write(path, i):
        fd = direct(path, os.O_RDWR | os.O_CREAT)
        put(fd, data[:MIB if i % 2 else 64 * KIB], i * MIB)
        os.close(fd)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for n in range(20):
            path = mnt / f'many{n}'
            list(pool.map(lambda i, path=path: write(path, i), range(8)))
            content = path.read_bytes()
            assert chunk_bytes(path) in (64 * KIB, MIB) and len(content) == 8 * MIB
            for i in range(8):
                assert content[i * MIB:(i + 1) * MIB] == data if i % 2 else content[i * MIB:].startswith(data[:64 * KIB])


# -------------------------------------------------------- splits and tails


def test_split_write_costs_no_read_of_the_device(make_store):
    """1 MiB from a buffer between pages arrives in two requests; the second must not fetch the bytes that the first replaced."""
    store = make_store()
    store.mount()
    os.setxattr(store.point, 'user.hitrain.dtype', b'u8')
    path = store.point / 'tensor'
    path.write_bytes(os.urandom(16 * MIB))
    os.sync()
    store.unmount()  # nothing is in memory
    store.mount('dram=64M', 'commit=3600')  # nothing is written between the two
    new = os.urandom(16 * MIB)
    before = figure(store.point, 'device_read_bytes')
    fd = direct(path)
    for off in range(0, len(new), MIB):
        put(fd, new[off:off + MIB], off, shift=KIB)
    os.close(fd)
    os.sync()
    assert figure(path, 'device_read_bytes') == 0
    assert figure(store.point, 'device_read_bytes') - before < MIB // 4
    assert path.read_bytes() == new


@pytest.mark.parametrize('shift', [0, 1, 512, KIB, 3 * KIB, 4095])
def test_tails_of_any_length_from_any_memory(mnt, shift):
    rnd = random.Random(shift)
    path = mnt / 'file'
    want = bytearray()
    fd = direct(path, os.O_RDWR | os.O_CREAT)
    for size in (1, 511, 513, 4095, 4097, 65535, 65537, MIB - 1, MIB + 1, MIB + 1537):
        off = rnd.randrange(len(want) + 1)
        data = rnd.randbytes(size)
        put(fd, data, off, shift)
        want[off:off + size] = data
        assert os.fstat(fd).st_size == len(want)
        assert take(fd, len(want) + 5000, 0, shift) == want
    assert path.read_bytes() == want
    assert take(fd, 100, len(want)) == b''
    os.close(fd)


def test_direct_append(mnt):
    fd = direct(mnt / 'log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    want = b''
    for size in (100, 4096, 70000, 1):
        data = os.urandom(size)
        with Aligned(size, 1) as m:
            m[:] = data
            assert os.writev(fd, [m]) == size
        want += data
    os.close(fd)
    assert (mnt / 'log').read_bytes() == want


# --------------------------------------------------------------- many at once


def parallel(work, items, threads=8):
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, items))


@pytest.mark.parametrize('block', [4096, 64 * KIB, 100_001])
@pytest.mark.parametrize('grows', [False, True], ids=['inside', 'beyond the end'])
def test_parallel_direct_writes_to_one_file(mnt, block, grows):
    count = 60
    data = [os.urandom(block) for _ in range(count)]
    path = mnt / 'file'
    path.write_bytes(b'' if grows else bytes(count * block))
    order = list(range(count))
    random.Random(block).shuffle(order)

    def write(i):
        fd = direct(path, os.O_WRONLY)
        put(fd, data[i], i * block, shift=KIB)
        os.close(fd)
    parallel(write, order)
    assert path.read_bytes() == b''.join(data)
    fd = direct(path)
    assert take(fd, count * block, 0) == b''.join(data)
    os.close(fd)


def test_parallel_writers_of_one_block_leave_one_of_theirs(mnt):
    """A request is whole: no reader sees half of one writer's bytes and half of another's."""
    path = mnt / 'file'
    size = 64 * KIB
    path.write_bytes(bytes(size))
    fd = direct(path)
    for _ in range(10):
        parallel(lambda i: put(fd, bytes([i]) * size, 0), range(1, 9))
        seen = take(fd, size, 0)
        assert len(set(seen)) == 1 and seen[0] in range(1, 9)
    os.close(fd)


def test_direct_and_buffered_descriptors_agree(mnt):
    path = mnt / 'file'
    path.write_bytes(os.urandom(300_000))
    plain, straight = os.open(path, os.O_RDWR), direct(path)
    rnd = random.Random(1)
    want = bytearray(path.read_bytes())
    for _ in range(200):
        off, data = rnd.randrange(290_000), rnd.randbytes(rnd.randrange(1, 9000))
        if rnd.random() < 0.5:
            os.pwrite(plain, data, off)
        else:
            put(straight, data, off, shift=rnd.randrange(4096))
        want[off:off + len(data)] = data
        assert os.pread(plain, 20000, off) == want[off:off + 20000]
        assert take(straight, 20000, off) == want[off:off + 20000]
    os.close(plain)
    os.close(straight)


# ----------------------------------------------------------------- in sequence


@pytest.mark.parametrize('block', [MIB, 64 * KIB])
def test_one_read_after_the_other_finds_what_was_read_ahead(make_store, block):
    store = make_store('256M')
    point = store.mount('dram=64M')
    os.setxattr(point, 'user.hitrain.dtype', b'u8')
    content = random.Random(5).randbytes(16 * MIB)
    (point / 't').write_bytes(content)
    store.remount('dram=64M')
    for turn in range(1, 21):   # there are 15 hits on a quiet machine; on a busy one the program may overtake it
        fd = direct(point / 't', os.O_RDONLY)
        got = b''.join(take(fd, block, off) for off in range(0, len(content), block))
        os.close(fd)
        assert got == content
        assert figure(point / 't', 'device_read_bytes') == turn * len(content)
        if figure(point, 'read_ahead_hits'):
            break
        run('hitrainctl', 'evict', point / 't')
    assert figure(point, 'read_ahead_hits') > 0


def test_reads_at_random_places_read_nothing_ahead(make_store):
    store = make_store('256M')
    point = store.mount('dram=64M')
    os.setxattr(point, 'user.hitrain.dtype', b'u8')
    (point / 't').write_bytes(bytes(64 * MIB))
    store.remount('dram=64M')
    fd = direct(point / 't', os.O_RDONLY)
    for k in range(1, 40):
        take(fd, 4 * KIB, k * 13 % 64 * MIB)
    os.close(fd)
    assert figure(point, 'read_ahead_chunks') == 0


# ------------------------------------------------------------- many small writes


@pytest.fixture
def device(make_store):
    """A store on a loop device, whose counters are those of the kernel."""
    made = make_store()
    file = made.image
    with loop_device(file) as name:
        made.image = pathlib.Path(name)
        yield made
        made.unmount()
    made.image = file


def written(store):
    """Writes of the device, and their bytes."""
    words = pathlib.Path('/sys/block', store.image.name, 'stat').read_text().split()
    return int(words[4]), int(words[6]) * 512


@pytest.mark.parametrize('dtype', [b'u8', None])
def test_a_stream_of_small_writes_reaches_the_device_in_large_ones(device, dtype):
    """Chunks of tensors have a MiB, those of other files 64 KiB: neighbours go together."""
    point = device.mount('dram=32M', 'commit=3600')
    if dtype:
        os.setxattr(point, 'user.hitrain.dtype', dtype)
    content = random.Random(6).randbytes(48 * MIB)
    before = written(device)
    with open(point / 'file', 'wb', buffering=0) as f:
        for at in range(0, len(content), 16 * KIB):
            f.write(content[at:at + 16 * KIB])
        os.fsync(f.fileno())
    writes, size = (a - b for a, b in zip(written(device), before))
    assert size < 1.1 * len(content)
    assert size / writes > 128 * KIB    # alone a chunk has 64; the less, the later a busy machine lets the daemon clean
