# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of passthrough files (passthrough=), whose pages clients map directly."""
import array
import fcntl
import mmap
import os
import struct

import pytest

from calls import settle
from conftest import MIB
from models import new_model

SHARED, READ, WRITE = mmap.MAP_SHARED, mmap.PROT_READ, mmap.PROT_WRITE
ONE, HALF = array.array('f', [1.0]).tobytes(), array.array('f', [0.5]).tobytes()
PARAM = 3 * MIB + 4000          # bytes, of whole elements


def stat(mnt, word):
    lines = dict(line.split('=', 1) for line in os.getxattr(mnt, 'user.hitrain.stats').decode().splitlines())
    return int(lines[word])


def command(root, text):
    fd = os.open(root / '.hitrain/ctl', os.O_RDWR)
    try:
        os.write(fd, text.encode() + b'\n')
        return os.read(fd, 4096).decode().strip()
    finally:
        os.close(fd)


def make_model(mnt, **params):
    root = new_model(mnt / 'model', 'sgd lr=0.5')
    for name, size in params.items():
        (root / name).write_bytes(ONE * (size // 4))
    command(root, 'commit')
    settle(mnt)             # a file that a program has open in the ordinary way stays ordinary
    return root


def gradient(root, name, value):
    size = os.stat(root / name).st_size
    (root / '.hitrain/grad' / name).write_bytes(array.array('f', [value]).tobytes() * (size // 4))


def mapped(path, flags=os.O_RDWR):
    """A mapping whose descriptor is closed."""
    fd = os.open(path, flags)
    try:
        return mmap.mmap(fd, 0, SHARED, READ | WRITE if flags == os.O_RDWR else READ)
    finally:
        os.close(fd)


def floats(data):
    return array.array('f', data)


@pytest.fixture
def passthrough_store(make_store):
    """A store that passes up to 16 MiB through."""
    store = make_store()
    store.mount('dram=48M', 'passthrough=16M')
    if 'passthrough is off' in store.messages():
        pytest.skip('the kernel or the privileges are not there')
    return store


@pytest.fixture
def root(passthrough_store):
    return make_model(passthrough_store.point, w=PARAM)


# -------------------------------------------------------------------- gradients

IOCTL_COMMAND = 1 << 30 | 256 << 16 | ord('h') << 8 | 1         # HT_IOCTL_COMMAND


def steer(ctl, text):
    """A command without a write."""
    fcntl.ioctl(ctl, IOCTL_COMMAND, text.encode().ljust(256, b'\0'))


def is_passed(path, flags=os.O_RDWR):
    """HT_IOCTL_PASSED of a new descriptor."""
    fd = os.open(path, flags)
    try:
        return struct.unpack('I', fcntl.ioctl(fd, 2 << 30 | 4 << 16 | ord('h') << 8 | 3, bytes(4)))[0]
    finally:
        os.close(fd)


def grad_window(root, name):
    return mapped(root / '.hitrain/grad' / name)
