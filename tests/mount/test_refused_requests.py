# SPDX-License-Identifier: Apache-2.0
"""A request that cannot be served costs nobody anything: logged steps for readers, kept steps, memory of passthrough
files and content stay as they were, whoever asks, and for whatever is more than all that could be given up."""
import errno
import mmap
import os

import numpy as np
import pytest

import passthrough
from calls import KEEP_SIZE, ZERO, as_user, fails, fallocate, settle
from conftest import MIB
from models import new_model
from passthrough import passthrough_store  # noqa: F401 - a fixture
from test_redo import available, stat
from test_steering import tell, word

ELEMENTS = MIB // 4
STEPS = 12
CHUNK = 64 << 10  # of a small file: a new one needs room for one
HUGE = 10 << 40
REDO = 'adamw lr=0.01 redo=on durable_every=3 redo_keep=30'


def train(root, first, last):
    for step in range(first, last + 1):
        rng = np.random.default_rng(step)
        (root / '.hitrain/grad/w').write_bytes(rng.standard_normal(ELEMENTS, np.float32).tobytes())
        assert tell(root, 'commit') == 'ok'


def make_model(mnt, words=REDO):
    os.chmod(mnt, 0o755)
    (mnt / 'public').mkdir(mode=0o777)
    os.chmod(mnt / 'public', 0o777)
    root = new_model(mnt / 'model', words)
    (root / 'w').write_bytes(np.ones(ELEMENTS, np.float32).tobytes())
    assert tell(root, 'commit') == 'ok'
    train(root, 1, STEPS)
    assert tell(root, 'snapshot base') == 'ok'
    train(root, STEPS + 1, STEPS + 3)
    assert stat(root, 'logged_bytes') > 6 * MIB
    return root


def kept(store, root):
    """All that others keep, with its content."""
    steps = sorted(os.listdir(root / '.hitrain/redo'), key=int)
    snap = root / '.hitrain/snap/base'
    return {'redo': word(root, 'redo'), 'kept': os.listdir(root / '.hitrain/snap'), 'logged': stat(root, 'logged_bytes'),
            'aside': stat(root, 'redo_reserved_bytes'), 'snap': (snap / 'w').read_bytes(),
            'steps': {n: (root / '.hitrain/redo' / n).read_bytes() for n in steps},
            'told': store.messages().count('is not kept for readers any more')}


@pytest.fixture
def fixed(make_store):
    """What takes and gives space by itself rests: no background work, and no access times."""
    store = make_store('192M')
    store.mount('noatime')
    return store, make_model(store.point)


def fill(path, left):
    """Takes the space that is available, but for some, without asking anyone for theirs."""
    with open(path, 'wb', buffering=0) as f:
        while (n := min(available(path) - left, MIB)) >= 4096:
            f.write(os.urandom(n // 4096 * 4096))
            os.fsync(f.fileno())
    return os.stat(path).st_size


def with_file(mnt, size, what):
    fd = os.open(mnt / 'public' / 'mine', os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, size)
        what(fd)
    finally:
        os.close(fd)


def zero_over_content(fd):
    os.pwrite(fd, b'content', 0)
    try:
        fallocate(fd, ZERO, 0, HUGE)
    finally:
        assert os.pread(fd, 7, 0) == b'content'


REQUESTS = {
    'fallocate': lambda fd: fallocate(fd, 0, 0, HUGE),
    'fallocate beyond the end': lambda fd: fallocate(fd, KEEP_SIZE, 1 << 30, HUGE),
    'fallocate, a little more than could be': lambda fd: fallocate(fd, KEEP_SIZE, 0, 192 * MIB),
    'zero range': zero_over_content,
    'zero range beyond the end': lambda fd: fallocate(fd, ZERO | KEEP_SIZE, 0, HUGE),
    'posix_fallocate': lambda fd: os.posix_fallocate(fd, 0, HUGE),
}


@pytest.mark.parametrize('what', REQUESTS)
@pytest.mark.parametrize('who', [0, 65534])
def test_hopeless_requests_for_space_change_nothing(fixed, what, who):
    store, root = fixed
    before = kept(store, root)

    def ask():
        for _ in range(3):
            with fails(errno.ENOSPC):
                with_file(store.point, 0, REQUESTS[what])
    as_user(ask, who, who)
    assert kept(store, root) == before
    as_user(lambda: fallocate(os.open(store.point / 'public' / 'mine', os.O_RDWR), 0, 0, MIB), who, who)
    assert kept(store, root) == before


def direct(fd, size, off=0):
    with mmap.mmap(-1, size) as memory:
        memory[:] = os.urandom(size)
        return os.pwritev(fd, [memory], off)


@pytest.fixture
def little(make_store):
    """A store that is full but for steps for readers, of some 100 KiB."""
    store = make_store('64M')
    root = new_model(store.mount('noatime') / 'model', REDO)
    (root / 'w').write_bytes(bytes(8192))
    assert tell(root, 'commit') == 'ok'
    for step in range(12):
        (root / '.hitrain/grad/w').write_bytes(np.full(2048, step, np.float32).tobytes())
        assert tell(root, 'commit') == 'ok'
    assert tell(root, 'commit full') == 'ok'
    (store.point / 'source').write_bytes(os.urandom(MIB))
    fd = os.open(store.point / 'mine', os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    fill(store.point / 'filler', 0)
    yield store, root, fd
    os.close(fd)


@pytest.mark.parametrize('what', [lambda fd: direct(fd, MIB), lambda fd: fallocate(fd, 0, 0, MIB),
                                  lambda fd: fallocate(fd, ZERO, 0, MIB)], ids=['direct', 'fallocate', 'zero'])
def test_what_all_could_give_together_is_too_little(little, what):
    store, root, fd = little
    steps = sorted(os.listdir(root / '.hitrain/redo'), key=int)
    assert len(steps) > 4
    for _ in range(3):
        with fails(errno.ENOSPC):
            what(fd)
    assert sorted(os.listdir(root / '.hitrain/redo'), key=int) == steps
    assert 'is not kept for readers any more' not in store.messages()


def test_no_more_is_given_up_than_is_needed(fixed):
    store, root = fixed
    fill(store.point / 'filler', 0)
    before = kept(store, root)
    with_file(store.point, 0, lambda fd: fallocate(fd, 0, 0, 4096))
    after = kept(store, root)
    assert before['aside'] - after['aside'] <= CHUNK + 4096 and after['steps'] == before['steps']


# ------------------------------------------------------ memory of passthrough

def test_a_file_larger_than_the_share_ends_no_others_memory(passthrough_store):
    mnt = passthrough_store.point
    root = passthrough.make_model(mnt, a=2 * MIB, b=2 * MIB)
    for name in 'ab':
        os.close(os.open(root / name, os.O_RDONLY))
    used, share = stat(mnt, 'passthrough_used_bytes'), stat(mnt, 'passthrough_bytes')
    assert used >= 4 * MIB
    with open(root / 'huge', 'wb') as f:  # empty, it is ordinary
        f.truncate(share + MIB)
    assert passthrough.command(root, 'commit') == 'ok'
    settle(mnt)
    for _ in range(3):
        os.close(os.open(root / 'huge', os.O_RDONLY))
    assert stat(mnt, 'passthrough_used_bytes') == used
