# SPDX-License-Identifier: Apache-2.0
"""What a program stores in a new model goes to the device while it goes on, and not with the commit."""
import os
import time

from conftest import MIB, wait_for
from models import new_model
from passthrough import stat
from test_roots import command

SIZE = 4 * MIB


def write(path, at, data):
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    try:
        assert os.pwrite(fd, data, at) == len(data)
    finally:
        os.close(fd)


def test_the_first_content_of_a_tensor_is_written_before_the_commit(mnt):
    root = new_model(mnt / 'model', 'sgd lr=1')
    before, data = stat(mnt, 'writebacks'), os.urandom(SIZE)
    (root / 'w').write_bytes(data)
    wait_for(lambda: stat(mnt, 'writebacks') == before + SIZE // MIB, 'the content is not on the device')
    write(root / 'w', MIB, bytes(MIB))  # and again: this waits for the commit
    time.sleep(0.1)
    assert stat(mnt, 'writebacks') == before + SIZE // MIB
    assert command(root, 'commit') == ['ok']
    assert stat(mnt, 'writebacks') == before + SIZE // MIB + 1
    assert (root / 'w').read_bytes() == data[:MIB] + bytes(MIB) + data[2 * MIB:]


def test_an_abort_takes_it_back(mnt):
    root = new_model(mnt / 'model', 'sgd lr=1')
    (root / 'old').write_bytes(bytes(MIB))
    assert command(root, 'commit') == ['ok']
    before = stat(mnt, 'writebacks')
    (root / 'w').write_bytes(os.urandom(SIZE))
    wait_for(lambda: stat(mnt, 'writebacks') == before + SIZE // MIB, 'the content is not on the device')
    assert command(root, 'abort') == ['ok']
    assert sorted(os.listdir(root)) == ['old']
