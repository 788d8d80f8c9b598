# SPDX-License-Identifier: Apache-2.0
"""What programs leave behind: pages that are pinned or mapped when nobody has the file open any more, and windows of gradients."""
import fcntl
import mmap
import os
import struct
import subprocess
import sys
import time

import pytest

from calls import settle
from conftest import MIB, SECONDS_MAX, wait_for
from passthrough import ONE, PARAM, command, floats, gradient, make_model, stat
from test_passthrough_memory import press
from test_passthrough_pinned import Pinner

ASKS = os.O_RDWR | os.O_ASYNC
STORES = """if 1:
    import mmap, os, sys
    fd = os.open(sys.argv[1], os.O_RDWR | os.O_ASYNC)
    m = mmap.mmap(fd, 0)
    os.close(fd)
    data = [os.urandom(len(m)) for _ in range(2)]
    print('ok', flush=True)
    while True:
        m[:] = data[0]
        m[:] = data[1]
"""
PUNCHES = """if 1:
    import ctypes, os, sys
    libc, fd = ctypes.CDLL(None), os.open(sys.argv[1], os.O_WRONLY)
    print('ok', flush=True)
    while True:
        libc.fallocate(fd, 3, ctypes.c_int64(4096), ctypes.c_int64(int(sys.argv[2])))
"""


@pytest.fixture
def store(make_store):
    store = make_store('1G')
    store.mount('dram=64M')
    if 'passthrough is off' in store.messages():
        pytest.skip('the kernel or the privileges are not there')
    return store


@pytest.fixture
def running():
    """Starts a program of Python that says ok."""
    started = []
    def start(text, *words):
        p = subprocess.Popen([sys.executable, '-c', text, *map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        started.append(p)
        assert p.stdout.readline() == b'ok\n'
        return p
    yield start
    for p in started:
        p.kill()
        p.wait()
        p.stdout.close()


def tensor(path, size):
    path.touch()
    os.setxattr(path, 'user.hitrain.dtype', b'f32')
    with open(path, 'r+b') as f:
        f.write(os.urandom(size))
        os.fsync(f.fileno())
    settle(path)


def is_passed(fd):
    return struct.unpack('I', fcntl.ioctl(fd, 2 << 30 | 4 << 16 | ord('h') << 8 | 3, bytes(4)))[0] == 1


def assert_sound(store, path):
    done = store.fsck()
    assert done.returncode == 0, done.stdout
    store.mount('dram=64M')
    assert path.read_bytes()


def test_stores_that_outlive_the_mount_tear_no_chunk(store, running):
    path = store.point / 't'
    tensor(path, 32 * MIB)
    running(STORES, path)
    wait_for(lambda: stat(store.point, 'passthrough_files') == 1, 'it is passed')
    store.daemon.terminate()
    assert store.daemon.wait(SECONDS_MAX) == 0, store.messages()
    store.daemon = None
    store.detach()
    assert_sound(store, path)


@pytest.mark.parametrize('of_model', [False, True])
def test_transfers_into_pinned_pages_without_a_mapping_tear_no_chunk(store, of_model):
    if of_model:
        root = make_model(store.point, w=16 * MIB)
        path = root / 'w'
        os.setxattr(path, 'user.hitrain.passthrough', b'on')
    else:
        path = store.point / 't'
        tensor(path, 16 * MIB)
        os.setxattr(path, 'user.hitrain.passthrough', b'on')
    pinner = Pinner(store, path, size=24 * MIB)
    try:
        assert pinner.registered == 'ok'
        pinner.other.write_bytes(os.urandom(24 * MIB))
        pinner.ask('unmap')
        pinner.ask('loop')
        for _ in range(8):
            os.close(os.open(path, ASKS))       # it may be dirty
            time.sleep(1.5)                     # it is ordinary, and memory keeps it
            if of_model:
                command(root, 'commit')
            else:
                subprocess.run(['sync', path], check=True)
    finally:
        pinner.process.kill()
        pinner.process.wait()
    store.unmount()
    assert_sound(store, path)


def test_a_punch_beside_a_rollback(store, running):
    """The rollback makes the file smaller while the punch waits for a chunk."""
    small, large = 24 * MIB + 4096, 24 * MIB + 800 * 1024
    root = make_model(store.point, w=small)
    command(root, 'snapshot small')
    with open(root / 'w', 'r+b') as f:
        f.truncate(large)
        f.write(ONE * (large // 4))
    settle(root)
    command(root, 'snapshot large')
    reader = os.open(root / 'w', os.O_RDONLY | os.O_ASYNC)
    assert is_passed(reader)
    running(PUNCHES, root / 'w', 24 * MIB + 700 * 1024)
    for _ in range(40):
        for name in 'small', 'large':
            command(root, f'rollback {name}')
    os.close(reader)
    assert store.daemon.poll() is None


def test_memory_comes_back_after_the_last_mapping(store):
    """Also if somebody has looked at the name while the mapping was all that was left."""
    path = store.point / 't'
    tensor(path, 40 * MIB)
    fd = os.open(path, ASKS)
    left = mmap.mmap(fd, 0)
    os.close(fd)
    time.sleep(1.5)                 # the moment after the last close
    os.stat(path)
    assert stat(store.point, 'passthrough_files') == 1
    left.close()
    wait_for(lambda: press(store.point, 96 * MIB) or not stat(store.point, 'passthrough_used_bytes'), 'its memory is used otherwise')


def test_another_file_takes_the_room_of_one_whose_mapping_has_ended(store):
    first, second = store.point / 't', store.point / 'u'
    tensor(first, 40 * MIB)
    tensor(second, 20 * MIB)
    fd = os.open(first, ASKS)
    left = mmap.mmap(fd, 0)
    os.close(fd)
    time.sleep(2.5)                 # it was looked at, and is mapped
    os.stat(first)
    left.close()
    fd = os.open(second, ASKS)
    assert is_passed(fd)
    os.close(fd)


@pytest.mark.parametrize('by', ['a window', 'calls'])
def test_what_a_program_left_is_no_gradient_of_the_next_one(store, by):
    root = make_model(store.point, w=PARAM)
    at = root / '.hitrain/grad/w'
    fd = os.open(at, ASKS)
    ghost = mmap.mmap(fd, PARAM)
    os.close(fd)
    ghost[:] = ONE * (PARAM // 4)
    time.sleep(0.5)
    os.stat(at)                     # the kernel keeps the name
    ghost.close()
    if by == 'a window':
        fd = os.open(at, ASKS)
        window = mmap.mmap(fd, PARAM)
        os.close(fd)
        assert set(floats(window[:])) == {0.0}
        window.close()
        return
    gradient(root, 'w', 2.0)
    command(root, 'apply w')
    command(root, 'commit')
    assert set(floats((root / 'w').read_bytes())) == {0.0}


def test_a_file_grows_beside_a_trained_model_that_fills_the_tier(store):
    root = make_model(store.point, a=20 * MIB, b=20 * MIB)
    os.setxattr(root, 'user.hitrain.optimizer', b'adamw lr=0.1')
    path = store.point / 't'

    def train():
        for _ in range(2):
            for name in 'a', 'b':
                gradient(root, name, 1.0)
            command(root, 'commit')
    train()
    tensor(path, 3 * MIB)
    fd = os.open(path, ASKS)
    assert is_passed(fd)
    train()
    with open(path, 'ab') as f:
        f.write(bytes(2 * MIB))
    os.close(fd)
