# SPDX-License-Identifier: Apache-2.0
"""Mappings: of any descriptor, beside read and write, across truncation, close and the end of the daemon."""
import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys

import pytest

PAGE = mmap.PAGESIZE
SHARED, PRIVATE = mmap.MAP_SHARED, mmap.MAP_PRIVATE
READ, WRITE = mmap.PROT_READ, mmap.PROT_WRITE
OPENERS = {'plain': 0, 'direct': os.O_DIRECT}
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

# Maps so many bytes of a file, perhaps gives the file another size, and loads one byte. Python's own mmap does not map
# more than there is.
TOUCH = '''
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
fd = os.open(sys.argv[1], os.O_RDWR)
at = libc.mmap(None, int(sys.argv[2]), 3, 1, fd, 0)
assert at != ctypes.c_void_p(-1).value
if len(sys.argv) > 4:
    os.ftruncate(fd, int(sys.argv[4]))
ctypes.string_at(at + int(sys.argv[3]), 1)
'''


@contextlib.contextmanager
def opened(path, flags=os.O_RDWR):
    fd = os.open(path, flags | os.O_CREAT, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture(params=OPENERS)
def opener(request):
    return OPENERS[request.param]


@pytest.fixture
def path(mnt):
    return mnt / 'file'


def pattern(size):
    return bytes(i * 7 % 251 for i in range(size))


# ------------------------------------------------------------ kinds of mappings


@pytest.mark.parametrize('size', [1, 4096, 5000, 300_001])
def test_mapping_shows_the_file(path, opener, size):
    path.write_bytes(pattern(size))
    with opened(path, os.O_RDONLY | opener) as fd:
        for flags in (SHARED, PRIVATE):
            with mmap.mmap(fd, size, flags, READ) as m:
                assert m[:] == pattern(size)


def test_private_stores_stay_private(path, opener):
    path.write_bytes(pattern(10000))
    with opened(path, os.O_RDONLY | opener) as fd, mmap.mmap(fd, 10000, PRIVATE, READ | WRITE) as m:
        m[5000:5100] = b'x' * 100
        assert path.read_bytes() == pattern(10000)
        assert m[5000:5100] == b'x' * 100


@pytest.mark.parametrize('size', [1, 4095, 4097, 70_003, 1_300_001])
def test_shared_stores_of_odd_length_reach_the_file(store, opener, size):
    """Also on descriptors opened with O_DIRECT, on which the last page arrives with an odd length."""
    path = store.point / 'file'
    path.write_bytes(bytes(size))
    with opened(path, os.O_RDWR | opener) as fd, mmap.mmap(fd, size) as m:
        m[:] = pattern(size)
        m.flush()
        assert os.fstat(fd).st_size == size
    assert path.read_bytes() == pattern(size)
    store.remount()
    assert path.read_bytes() == pattern(size)


def test_shared_stores_need_a_writable_descriptor(path, opener):
    path.write_bytes(b'x' * PAGE)
    with opened(path, os.O_RDONLY | opener) as fd:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, PAGE, SHARED, READ | WRITE)
    with opened(path, os.O_WRONLY | opener) as fd:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, PAGE, SHARED, WRITE)


# ------------------------------------------------------------------- coherence


def test_two_mappings_are_the_same_pages(path, opener):
    path.write_bytes(bytes(3 * PAGE))
    with opened(path, os.O_RDWR | opener) as a, opened(path) as b:
        with mmap.mmap(a, 3 * PAGE) as x, mmap.mmap(b, 3 * PAGE) as y:
            x[PAGE + 5] = 1
            y[PAGE + 6] = 2
            assert x[PAGE + 5:PAGE + 7] == y[PAGE + 5:PAGE + 7] == b'\1\2'


@pytest.mark.parametrize('mapped', OPENERS)
@pytest.mark.parametrize('other', OPENERS)
def test_read_and_write_agree_with_a_mapping(path, mapped, other):
    """At once, in both directions, whether the page is in memory or not, and without msync."""
    path.write_bytes(bytes(8 * PAGE))
    with opened(path, os.O_RDWR | OPENERS[mapped]) as a, opened(path, os.O_RDWR | OPENERS[other]) as b:
        with mmap.mmap(a, 8 * PAGE) as m:
            for n in range(1, 40):
                at = n * 777 % (8 * PAGE - 3)
                m[at:at + 3] = bytes([n]) * 3
                assert os.pread(b, 3, at) == bytes([n]) * 3
                os.pwrite(b, bytes([n + 100]) * 2, at)
                assert m[at:at + 3] == bytes([n + 100, n + 100, n])


def test_another_process_sees_stores_at_once(path):
    path.write_bytes(bytes(PAGE))
    with opened(path) as fd, mmap.mmap(fd, PAGE) as m:
        m[10] = 42
        assert subprocess.run(['od', '-An', '-tu1', '-j10', '-N1', path], stdout=subprocess.PIPE).stdout.split() == [b'42']


def test_whoever_asks_for_data_finds_what_was_stored(path):
    """cp passes over holes; a region that a mapping has stored to is none."""
    with opened(path) as fd:
        os.ftruncate(fd, 4 << 20)
        with mmap.mmap(fd, 4 << 20) as m:
            m[3 << 20] = 7
            assert os.lseek(fd, 0, os.SEEK_DATA) <= 3 << 20
            subprocess.run(['cp', '--sparse=always', path, path.with_name('copy')], check=True)
    assert path.with_name('copy').read_bytes()[3 << 20] == 7


# -------------------------------------------------------------- size and life


def died_of(code, *args):
    done = subprocess.run([sys.executable, '-c', code, *map(str, args)], stderr=subprocess.DEVNULL)
    return -done.returncode


def test_pages_beyond_the_end_are_sigbus(path):
    path.write_bytes(b'x' * 100)
    assert died_of(TOUCH, path, 3 * PAGE, 99) == 0
    assert died_of(TOUCH, path, 3 * PAGE, PAGE - 1) == 0
    assert died_of(TOUCH, path, 3 * PAGE, PAGE) == signal.SIGBUS


def test_truncation_takes_pages_of_a_mapping_away(path):
    path.write_bytes(b'x' * 3 * PAGE)
    assert died_of(TOUCH, path, 3 * PAGE, 2 * PAGE, 2 * PAGE + 1) == 0
    path.write_bytes(b'x' * 3 * PAGE)
    assert died_of(TOUCH, path, 3 * PAGE, 2 * PAGE, 2 * PAGE) == signal.SIGBUS


def test_what_was_cut_off_is_zero_when_the_file_grows_again(path, opener):
    path.write_bytes(b'x' * 3 * PAGE)
    with opened(path, os.O_RDWR | opener) as fd, mmap.mmap(fd, 3 * PAGE) as m:
        m[:] = b'y' * 3 * PAGE
        os.ftruncate(fd, PAGE + 10)
        os.ftruncate(fd, 3 * PAGE)
        assert m[:] == b'y' * (PAGE + 10) + bytes(2 * PAGE - 10)
        assert path.read_bytes() == m[:]


def test_mapping_made_after_growth_by_truncation(store, opener):
    path = store.point / 'file'
    with opened(path, os.O_RDWR | opener) as fd:
        os.ftruncate(fd, 2_000_003)
        with mmap.mmap(fd, 2_000_003) as m:
            m[1_999_999:] = b'last'
            m[0] = 1
    store.remount()
    assert path.read_bytes() == b'\1' + bytes(1_999_998) + b'last'


def test_mapping_outlives_its_name(path, opener):
    path.write_bytes(bytes(2 * PAGE))
    with opened(path, os.O_RDWR | opener) as fd:
        m = mmap.mmap(fd, 2 * PAGE)  # with a descriptor of its own
    m[PAGE] = 5
    assert path.read_bytes()[PAGE] == 5
    path.unlink()
    m[PAGE + 1] = 6
    m.flush()
    assert m[PAGE:PAGE + 2] == b'\5\6'
    m.close()
    assert not path.exists()


class Region:
    """A mapping by the calls themselves: the module keeps a descriptor, and has no mprotect."""

    def __init__(self, fd, size):
        self.size = size
        self.at = libc.mmap(None, size, READ | WRITE, SHARED, fd, 0)
        assert self.at != ctypes.c_void_p(-1).value

    def __getitem__(self, part):
        return ctypes.string_at(self.at + part.start, part.stop - part.start)

    def store(self, off, data):
        ctypes.memmove(self.at + off, data, len(data))

    def resize(self, size):
        self.at = libc.mremap(self.at, self.size, size, 1)  # MREMAP_MAYMOVE
        assert self.at != ctypes.c_void_p(-1).value
        self.size = size

    def close(self):
        assert libc.munmap(self.at, self.size) == 0


def test_mapping_without_any_descriptor(path, opener):
    path.write_bytes(bytes(2 * PAGE))
    with opened(path, os.O_RDWR | opener) as fd:
        region = Region(fd, 2 * PAGE)
    region.store(PAGE, b'kept')
    assert path.read_bytes()[PAGE:PAGE + 4] == b'kept'
    region.close()
    assert path.read_bytes()[PAGE:PAGE + 4] == b'kept'


def test_mapping_grows_moves_and_is_protected(path):
    path.write_bytes(bytes(PAGE))
    with opened(path) as fd:
        region = Region(fd, PAGE)
        os.ftruncate(fd, 100 * PAGE)
        region.resize(100 * PAGE)
        region.store(99 * PAGE, b'end')
        assert libc.mprotect(region.at, region.size, READ) == 0
        assert os.pread(fd, 3, 99 * PAGE) == region[99 * PAGE:99 * PAGE + 3] == b'end'
        assert libc.mprotect(region.at, region.size, READ | WRITE) == 0
        region.store(0, b'begin')
        region.close()
        assert os.pread(fd, 5, 0) == b'begin'


# ----------------------------------------------------------------- durability


def test_synced_stores_survive_the_daemon(store, opener):
    path = store.point / 'file'
    with pytest.raises(OSError, match='not connected'):  # close says so
        with opened(path, os.O_RDWR | opener) as fd:
            os.ftruncate(fd, 1_000_001)
            with mmap.mmap(fd, 1_000_001) as m:
                m[:] = pattern(1_000_001)
                m.flush()  # msync(MS_SYNC)
                store.kill()
                assert m[:5000] == pattern(5000)  # a frozen copy
    store.detach()
    store.mount()
    assert path.read_bytes() == pattern(1_000_001)


def test_dirty_pages_survive_an_orderly_end(store):
    path = store.point / 'file'
    path.write_bytes(bytes(500_000))
    with opened(path) as fd, mmap.mmap(fd, 500_000) as m:
        m[:] = pattern(500_000)
    store.remount()
    assert path.read_bytes() == pattern(500_000)
