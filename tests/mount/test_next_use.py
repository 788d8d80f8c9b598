# SPDX-License-Identifier: Apache-2.0
"""next_use: a program says when it uses a file next; until then the content stays, and it is read before."""
import errno
import mmap
import os
import random

import pytest

from calls import as_user, sync
from conftest import MIB, wait_for
from test_passes import figure
from test_pin import DRAM, make, read
from test_roots import refused, word

FILE = DRAM // 4


def scan(point):
    """Two passes in random order: the store finds no plan, in which a use in 1000 s is the last one of all."""
    fd = os.open(point / 'scanned', os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, MIB) as buffer:
        for _ in range(2):
            for n in random.sample(range(4 * DRAM), 4 * DRAM):
                assert os.preadv(fd, [buffer], n * MIB) == MIB
    os.close(fd)


@pytest.fixture
def point(make_store):
    """Two files, and one that passes through memory and leaves no room for them."""
    point = make_store('512M').mount(f'dram={DRAM}M', 'staging=24M')
    for name in 'a', 'b':
        make(point / name, FILE)
    make(point / 'scanned', 4 * DRAM)
    sync(point)
    scan(point)
    return point


def test_content_stays_until_its_use(point):
    read(point / 'b')
    # The scan left much of the tier to its working set, so a pass may push out its own first chunks.
    wait_for(lambda: read(point / 'a') == 0, 'content in memory')
    word(point / 'a', 'next_use', '1000')
    scan(point)
    assert int(word(point / 'a', 'resident_bytes')) == FILE * MIB and read(point / 'a') == 0
    assert read(point / 'b') > 0
    scan(point)                                         # the use has come: from now on it is as any other
    assert read(point / 'a') > 0
    word(point / 'a', 'next_use', '1000')
    os.removexattr(point / 'a', 'user.hitrain.next_use')
    scan(point)
    assert read(point / 'a') > 0


def test_content_is_read_before_its_use(point):
    assert int(word(point / 'a', 'resident_bytes')) == 0
    before = int(word(point / 'a', 'device_read_bytes'))
    word(point / 'b', 'next_use', 'never')

    def loaded():
        try:
            word(point / 'a', 'next_use')
        except OSError:                                 # the machine was busy, and the time is past
            word(point / 'a', 'next_use', '2')
        return int(word(point / 'a', 'resident_bytes')) == FILE * MIB
    wait_for(loaded, 'content that is needed soon')
    read(point / 'a')
    assert int(word(point / 'a', 'device_read_bytes')) - before == FILE * MIB     # each chunk once
    assert int(word(point / 'b', 'resident_bytes')) == 0


@pytest.fixture
def small(mnt):
    for name in 'a', 'b':
        make(mnt / name, 1)
    return mnt


def test_what_is_said_holds_for_its_time(small):
    word(small / 'a', 'next_use', '100')
    assert 0 < float(word(small / 'a', 'next_use')) <= 100
    assert 'user.hitrain.next_use' not in os.listxattr(small / 'a')
    word(small / 'a', 'next_use', 'never')
    assert word(small / 'a', 'next_use') == 'never'
    refused(errno.ENODATA, word, small / 'b', 'next_use')
    word(small / 'b', 'next_use', '0.001')

    def past():
        try:
            return word(small / 'b', 'next_use') and False
        except OSError as e:
            return e.errno == errno.ENODATA
    wait_for(past, 'the time to pass')
    os.removexattr(small / 'a', 'user.hitrain.next_use')
    for path in 'a', 'b', '.':
        refused(errno.ENODATA, os.removexattr, small / path, 'user.hitrain.next_use')
    refused(errno.ENODATA, word, small, 'next_use')


@pytest.mark.parametrize('text', ['', '0', '-1', '1e3', '.5', '5.', '1000000.5', '18446744073709551616', 'soon', '1 s', '1\0'])
def test_other_texts_are_refused(small, text):
    refused(errno.EINVAL, word, small / 'a', 'next_use', text)
    assert word(small / 'a', 'error').startswith('next_use: seconds from now, as in 2.5, more than 0 and at most 1000000')


def test_files_of_their_owner_have_it(small):
    (small / 'd').mkdir()
    refused(errno.EINVAL, word, small / 'd', 'next_use', '1')
    assert 'only files' in word(small / 'd', 'error')
    os.chmod(small / 'a', 0o666)
    word(small / 'a', 'next_use', '100')

    def others():
        refused(errno.EPERM, word, small / 'a', 'next_use', '1')
        refused(errno.EPERM, os.removexattr, small / 'a', 'user.hitrain.next_use')
    as_user(others)
    assert word(small / 'a', 'next_use')
    assert figure(small, 'plans_made') == 0
