# SPDX-License-Identifier: Apache-2.0
"""Gradients as clients get them wrong: given up in the middle, with holes, too many at once; what others notice of it."""
import os
import subprocess

import numpy as np
import pytest

from calls import sync
from conftest import SECONDS_MAX
from test_roots import command, refused, word

COUNT = 4096
ONES = np.ones(COUNT, 'f4').tobytes()


def make_root(mnt, name, optimizer, **files):
    """A model root with parameters of ones, committed; files: elements by name."""
    root = mnt / name
    root.mkdir()
    word(root, 'dtype', 'f32')
    word(root, 'optimizer', optimizer)
    for file, count in files.items():
        (root / file).write_bytes(np.ones(count, 'f4').tobytes())
    sync(root)
    return root


@pytest.fixture
def root(mnt):
    """Two parameters of 4,096 ones; a gradient of ones makes them zeros."""
    return make_root(mnt, 'model', 'sgd lr=1', w=COUNT, v=COUNT)


def open_gradient(root, name, flags=os.O_WRONLY):
    return os.open(root / '.hitrain' / 'grad' / name, flags)


def values(path):
    return set(np.frombuffer(path.read_bytes(), 'f4').tolist())


# ------------------------------------------------------------------------ drop

def test_a_gradient_given_up_in_the_middle_is_not_handed_over(root):
    fd = open_gradient(root, 'w')
    os.pwrite(fd, ONES[:6000], 0)
    os.pwrite(fd, ONES[:101], 8000)         # inside an element
    assert command(root, 'drop w') == ['ok']
    os.close(fd)
    (root / '.hitrain' / 'grad' / 'v').write_bytes(ONES)
    assert command(root, 'commit') == ['ok']
    assert values(root / 'w') == {1.0} and values(root / 'v') == {0.0}
    assert word(root, 'step') == '1'


def test_after_a_drop_the_same_descriptor_begins_anew(root):
    fd = open_gradient(root, 'w')
    os.pwrite(fd, ONES[:6000], 4000)
    assert command(root, 'drop w', 'drop w', 'drop v') == ['ok', 'ok', 'ok']
    os.pwrite(fd, ONES, 0)
    os.close(fd)
    assert command(root, 'commit') == ['ok']
    assert values(root / 'w') == {0.0}


def test_half_a_gradient_that_was_closed_can_be_taken_back(root):
    fd = open_gradient(root, 'w')
    os.pwrite(fd, ONES[:6000], 0)
    os.close(fd)
    assert command(root, 'commit')[0].startswith('error: EBUSY')
    assert command(root, 'drop w', 'commit') == ['ok', 'ok']
    assert values(root / 'w') == {1.0}


def test_what_was_applied_cannot_be_dropped(root):
    (root / '.hitrain' / 'grad' / 'w').write_bytes(ONES)
    assert command(root, 'wait w') == ['ok']
    answer = command(root, 'drop w')[0]
    assert answer.startswith('error: EBUSY') and 'model/w' in answer and 'abort' in answer
    assert command(root, 'commit') == ['ok']
    assert values(root / 'w') == {0.0}


def test_a_drop_names_what_it_cannot_find(root):
    for line, code in (('drop nothing', 'ENOENT'), ('drop', 'EINVAL'), ('drop ../w', 'EINVAL')):
        assert command(root, line)[0].startswith('error: ' + code)
