# SPDX-License-Identifier: Apache-2.0
"""The free space that statvfs shows is what a writer gets at once, whatever was cut, replaced, deleted or kept before."""
import errno
import os
import random
import subprocess
import time

import numpy as np
import pytest

from calls import KEEP_SIZE, PUNCH, fallocate, sync
from conftest import MIB, wait_for
from models import new_model
from test_posix_space import available
from test_steering import tell

SLACK = MIB  # a chunk that a writer needs whole, and what the names of the test's own file take


def big(path, bytes_, durable=True):
    with open(path, 'wb', buffering=0) as f:
        for at in range(0, bytes_, MIB):
            f.write(os.urandom(min(MIB, bytes_ - at)))
        if durable:
            os.fsync(f.fileno())


def replaced(mnt, path):
    (mnt / 'new').write_bytes(b'new')
    os.rename(mnt / 'new', path)


def punched(path):
    with open(path, 'r+b') as f:
        fallocate(f.fileno(), KEEP_SIZE | PUNCH, 0, 1 << 40)


def rewritten(mnt, path):
    with open(path, 'wb') as f:
        f.write(b'other')


CUTS = {
    'truncate': lambda mnt, path: os.truncate(path, 0),
    'truncate to a part': lambda mnt, path: os.truncate(path, MIB // 2),
    'rename over': replaced,
    'unlink': lambda mnt, path: os.unlink(path),
    'punch': lambda mnt, path: punched(path),
    'open for writing': rewritten,
}


@pytest.mark.parametrize('how', CUTS)
def test_space_is_free_when_the_call_returns(make_store, how):
    store = make_store('512M')
    mnt = store.mount()
    before = available(mnt)
    big(mnt / 'file', 240 * MIB)
    assert available(mnt) < before - 239 * MIB
    CUTS[how](mnt, mnt / 'file')
    if how in ('rename over', 'unlink'):
        wait_for(lambda: available(mnt) > before - 2 * MIB, 'the kernel forgets the file', seconds=0.5)
    shown = available(mnt)
    assert shown > before - 2 * MIB, 'the space comes late'
    with open(mnt / 'writer', 'wb') as f:
        fallocate(f.fileno(), 0, 0, shown - SLACK)


def may_have(f, size):
    try:
        fallocate(f.fileno(), 0, 0, size)
    except OSError as e:
        assert e.errno == errno.ENOSPC, e
        return False
    os.ftruncate(f.fileno(), 0)
    return True


def writer_gets(mnt, shown, forgets):
    """A writer gets so much, and no more. forgets: the kernel says a moment later that it forgets a file."""
    with open(mnt / 'writer', 'wb') as f:
        assert shown <= 2 * SLACK or may_have(f, shown - SLACK)
        more = shown + 2 * SLACK
        for _ in range(20):
            if not may_have(f, more):
                break
            assert forgets, f'a writer gets more than {shown} bytes'
            time.sleep(0.02)
            more = available(mnt) + 2 * SLACK
        else:
            raise AssertionError(f'a writer gets more than {more} bytes')
    os.unlink(mnt / 'writer')


def make_model(mnt):
    root = new_model(mnt / 'model', 'sgd lr=0.1 retain=0')
    (root / 'w').write_bytes(bytes(MIB))
    assert tell(root, 'commit') == 'ok'
    return root


def step(root):
    (root / '.hitrain/grad/w').write_bytes(np.ones(MIB // 4, np.float32).tobytes())
    tell(root, 'commit')


def clone(a, b):
    subprocess.run(['cp', '--reflink=always', a, b], stderr=subprocess.DEVNULL)


@pytest.mark.parametrize('seed', range(3))
def test_beside_random_calls(make_store, seed):
    store = make_store('128M')
    mnt = store.mount('noatime')
    rnd = random.Random(seed)
    root, names = make_model(mnt), [mnt / n for n in 'abcde']

    def calls(path):
        yield False, lambda: big(path, rnd.randrange(1, 12) * MIB, durable=rnd.random() < 0.7)
        yield False, lambda: os.truncate(path, 0)
        yield False, lambda: os.truncate(path, rnd.randrange(8 * MIB))
        yield True, lambda: os.unlink(path)
        yield True, lambda: replaced(mnt, path)
        yield False, lambda: punched(path)
        yield True, lambda: os.rename(rnd.choice(names), path)
        yield False, lambda: clone(rnd.choice(names), path)
        yield False, lambda: with_space(path)
        yield False, lambda: step(root)
        yield False, lambda: tell(root, f'snapshot s{rnd.randrange(3)}')
        yield True, lambda: tell(root, f'forget s{rnd.randrange(3)}')
        yield False, lambda: sync(mnt)

    def with_space(path):
        with open(path, 'ab') as f:
            fallocate(f.fileno(), KEEP_SIZE, 0, rnd.randrange(1, 8) * MIB)

    for _ in range(150):
        forgets, call = rnd.choice(list(calls(rnd.choice(names))))
        try:
            call()
        except OSError as e:
            assert e.errno in (errno.ENOENT, errno.ENOSPC, errno.EEXIST, errno.EBUSY, errno.EINVAL), e
        writer_gets(mnt, available(mnt), forgets)
