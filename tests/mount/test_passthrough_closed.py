# SPDX-License-Identifier: Apache-2.0
"""Passthrough files that programs have closed a moment ago: opening one again is cheap, and they give way at once."""
import contextlib
import ctypes
import os
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest

from calls import libc, settle
from conftest import MIB, needs, wait_for
from passthrough import (HALF, ONE, PARAM, READ, SHARED, WRITE, command, gradient, is_passed, make_model, mapped, passthrough_store,
                         root, stat)

OPENED, CLOSED = '0x1', '0x2'  # ioctls of FUSE that give the kernel memory, and take it back


class Calls:
    """Which memory the daemon gives the kernel, and takes back."""

    def __init__(self, store):
        self.path = store.folder / 'calls'
        self.tracer = subprocess.Popen(['strace', '-f', '-o', self.path, '-e', 'trace=ioctl', '-p', str(store.daemon.pid)],
                                       stderr=subprocess.PIPE)
        assert b' attached' in self.tracer.stderr.readline()  # to all threads

    def count(self, which):
        return len(re.findall(rf'ioctl\(\d+, _IOC\(_IOC_WRITE, 0xe5, {which}, ', self.path.read_text()))

    def end(self):
        self.tracer.terminate()
        self.tracer.wait()
        self.tracer.stderr.close()


libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class Pages:
    """A mapping, and no descriptor: mmap.mmap has one of its own."""

    def __init__(self, path, size, flags=os.O_RDWR):
        fd = os.open(path, flags)
        self.at, self.size = libc.mmap(None, size, READ | WRITE if flags == os.O_RDWR else READ, SHARED, fd, 0), size
        os.close(fd)
        assert self.at != ctypes.c_void_p(-1).value

    def close(self):
        assert libc.munmap(ctypes.c_void_p(self.at), ctypes.c_size_t(self.size)) == 0


@pytest.fixture
def calls(passthrough_store):
    needs('strace')
    made = Calls(passthrough_store)
    yield made
    made.end()


def use(path, flags=os.O_RDWR):
    os.close(os.open(path, flags))


def is_open_passed(path, flags=os.O_RDWR):
    passed = bool(is_passed(path, flags))
    settle(path)
    return passed


def test_opening_again_is_cheap_for_a_moment(passthrough_store, calls):
    """The kernel keeps the memory, and gives it back when nobody has opened the files for a second."""
    model = make_model(passthrough_store.point, **{f'p{i}': MIB for i in range(4)})
    laps, closed, late = 10, {}, 0
    for _ in range(laps):
        for i in range(4):
            fd = os.open(model / f'p{i}', os.O_RDWR)
            late += i in closed and time.monotonic() - closed[i] >= 1
            closed[i] = time.monotonic()
            os.close(fd)
        time.sleep(0.02)
    assert calls.count(OPENED) <= 4 + late
    wait_for(lambda: calls.count(CLOSED) == calls.count(OPENED), 'the memory is back')
    assert stat(passthrough_store.point, 'passthrough_fallbacks') == 0


@pytest.mark.parametrize('flags', [os.O_RDONLY, os.O_RDWR])
def test_closed_files_make_room_at_once(passthrough_store, flags):
    """One block after the other through a share that has two."""
    model = make_model(passthrough_store.point, **{f'p{i}': 8 * MIB for i in range(5)})
    for lap in range(3):
        for i in range(5):
            assert is_open_passed(model / f'p{i}', flags), (lap, i)
    assert stat(passthrough_store.point, 'passthrough_fallbacks') == 0
    with mapped(model / 'p0') as m, mapped(model / 'p1'):  # only those that are mapped stay
        m[:4] = HALF
        assert not is_open_passed(model / 'p2', flags)
    settle(model)
    assert is_open_passed(model / 'p2', flags)
    assert (model / 'p0').read_bytes()[:8] == HALF + ONE


def test_a_name_in_the_kernel_keeps_no_memory(passthrough_store):
    """Descriptors of O_PATH keep the inode, but nobody's memory."""
    model = make_model(passthrough_store.point, **{f'p{i}': 8 * MIB for i in range(3)})
    held = [os.open(model / f'p{i}', os.O_PATH) for i in range(2)]
    for i in range(2):
        use(model / f'p{i}')
    time.sleep(1.2)
    wait_for(lambda: is_open_passed(model / 'p2'), 'room in the share')
    for fd in held:
        os.close(fd)


@pytest.mark.parametrize('flags', [os.O_RDONLY, os.O_RDWR])
def test_memory_that_is_mapped_stays(passthrough_store, flags):
    model = make_model(passthrough_store.point, **{f'p{i}': 8 * MIB for i in range(3)})
    pages = [Pages(model / f'p{i}', 8 * MIB, flags) for i in range(2)]
    assert not is_open_passed(model / 'p2')
    command(model, 'evict p0')
    assert stat(passthrough_store.point, 'passthrough_used_bytes') >= 16 * MIB
    if flags == os.O_RDWR:
        with pytest.raises(OSError):
            os.truncate(model / 'p0', 4000)
        ctypes.memmove(pages[0].at, HALF, 4)
    assert is_open_passed(model / 'p0', os.O_RDONLY | os.O_DIRECT)
    gradient(model, 'p0', 1.0)
    command(model, 'step')
    command(model, 'wait')
    assert ctypes.string_at(pages[0].at + MIB, 4) == HALF
    for p in pages:
        p.close()
    wait_for(lambda: is_open_passed(model / 'p2'), 'room in the share')


@pytest.mark.parametrize('cut', [lambda p: os.truncate(p, 4000), lambda p: os.close(os.open(p, os.O_WRONLY | os.O_TRUNC)),
                                 lambda p: subprocess.run(['cp', '/dev/null', p], check=True)], ids=['truncate', 'O_TRUNC', 'cp'])
def test_a_closed_file_is_cut_at_once(root, cut):
    with mapped(root / 'w') as m:
        m[:4] = HALF
    name = os.open(root / 'w', os.O_PATH)  # the kernel does not forget it
    settle(root)
    cut(root / 'w')
    os.close(name)
    assert (root / 'w').read_bytes() == (HALF + ONE * 999)[:os.stat(root / 'w').st_size]


def test_a_reader_after_a_writer_does_not_keep_the_size(root):
    use(root / 'w')
    settle(root)
    with mapped(root / 'w', os.O_RDONLY) as m:
        os.truncate(root / 'w', 4000)
        assert m[:4000] == ONE * 1000


def test_steps_are_logged_again_beside_readers(root):
    """A program that can change the parameter unseen prevents it. Now there are only readers, again and again."""
    os.setxattr(root, 'user.hitrain.optimizer', b'sgd lr=0.5 redo=on durable_every=100')
    command(root, 'commit')
    with mapped(root / 'w') as m:
        m[:4] = HALF
    for _ in range(4):
        settle(root)
        use(root / 'w', os.O_RDONLY)
        gradient(root, 'w', 1.0)
        assert command(root, 'step') == 'ok'
    assert stat(root, 'logged_steps') > 0


def test_a_closed_file_is_evicted_at_once(passthrough_store, root):
    with mapped(root / 'w'):
        assert stat(passthrough_store.point, 'passthrough_used_bytes') > 0
    settle(root)
    command(root, 'evict w')
    assert stat(passthrough_store.point, 'passthrough_used_bytes') == 0
    with mapped(root / 'w') as m:
        command(root, 'evict w')
        assert stat(passthrough_store.point, 'passthrough_used_bytes') > 0
        m[MIB:MIB + 4] = HALF
    assert (root / 'w').read_bytes()[MIB:MIB + 8] == HALF + ONE


def test_a_deleted_file_is_gone(passthrough_store, root):
    use(root / 'w')
    settle(root)
    (root / 'w').unlink()
    command(root, 'commit')
    wait_for(lambda: stat(passthrough_store.point, 'passthrough_used_bytes') == 0, 'its memory is gone')


@contextlib.contextmanager
def asking(store, root, first=lambda: None):
    """A thread of the daemon has just asked who has the memory of w, and a tracer holds it there. first() comes before."""
    slow = subprocess.Popen(['strace', '-f', '-o', '/dev/null', '-e', 'trace=fcntl', '-e', 'inject=fcntl:delay_exit=600000',
                             '-p', str(store.daemon.pid)], stderr=subprocess.PIPE)
    assert b' attached' in slow.stderr.readline()
    first()
    evict = threading.Thread(target=command, args=(root, 'evict w'))
    evict.start()
    time.sleep(0.3)
    yield
    evict.join()
    slow.terminate()
    slow.wait()
    slow.stderr.close()


def test_root_looks_at_the_memory_that_is_asked_for(passthrough_store, root):
    """This ends the daemon's lease, and the kernel sends a signal."""
    needs('strace')
    def looks():
        seen = 0
        with asking(passthrough_store, root, lambda: use(root / 'w')):
            for fd in Path(f'/proc/{passthrough_store.daemon.pid}/fd').iterdir():
                with contextlib.suppress(OSError):       # it is another one's, and closed meanwhile
                    if 'hitrain-tensor' in os.readlink(fd):
                        seen += len(fd.read_bytes())
        return seen > 0
    wait_for(looks, 'a look at the memory')
    assert (root / 'w').read_bytes()[:4] == ONE


def test_a_file_that_the_kernel_forgets_while_another_thread_has_it(passthrough_store, root):
    """The thread has asked who has the memory. It was this mapping, which is gone before the thread goes on."""
    needs('strace')
    m = Pages(root / 'w', PARAM)
    with asking(passthrough_store, root):
        (root / 'w').unlink()
        m.close()
    command(root, 'commit')
    wait_for(lambda: stat(passthrough_store.point, 'passthrough_used_bytes') == 0, 'its memory is gone')


def test_a_closed_file_is_opened_as_the_next_program_wants(root):
    """And not as the last one did."""
    assert is_open_passed(root / 'w')
    assert not is_open_passed(root / 'w', os.O_RDONLY | os.O_DIRECT)
    assert is_open_passed(root / 'w', os.O_RDONLY)


def test_a_write_gets_the_space_that_closed_files_have_reserved(make_store):
    store = make_store('64M')
    point = store.mount('dram=48M', 'passthrough=24M')
    if 'passthrough is off' in store.messages():
        pytest.skip('the kernel or the privileges are not there')
    path = point / 'tokens'
    path.touch()
    os.setxattr(path, 'user.hitrain.dtype', b'i32')
    os.setxattr(path, 'user.hitrain.pin', b'dram')
    path.write_bytes(bytes(range(256)) * (16 * MIB // 256))
    os.sync()
    settle(point)
    assert not is_open_passed(path, os.O_RDONLY | os.O_DIRECT)
    free = os.statvfs(point).f_bavail * os.statvfs(point).f_frsize
    assert is_open_passed(path)
    data = os.urandom(MIB)
    with open(point / 'other', 'wb') as f:
        for _ in range(free // MIB - 4):
            f.write(data)
        os.fsync(f.fileno())
