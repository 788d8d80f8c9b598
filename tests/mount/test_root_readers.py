# SPDX-License-Identifier: Apache-2.0
"""Many at one parameter: processes that write parts of its gradient, and readers of every kind while it is updated,
renamed, cut or removed.

Plain descent by gradients of -1 with a learning rate of 1 counts: after step k each element is k. So the test can check
any read: no element is older than the last step that was complete when the read began, or newer than the one begun when
it ended.
"""
import errno
import mmap
import multiprocessing
import os
import threading

import numpy as np
import pytest

from conftest import MIB, SECONDS_MAX, wait_for
from models import new_model
from test_roots import command, put_gradient, refused, sync, word

ELEMENTS = MIB + 1000
BYTES = 4 * ELEMENTS
ROUNDS = 4


@pytest.fixture(params=[(), ('-s',)], ids=['threads', 'one-thread'])
def root(make_store, request):
    r = new_model(make_store().mount(flags=request.param) / 'model', 'sgd lr=1')
    return r


class Counter:
    """A parameter that counts its steps, and the values that a read may return just now."""

    def __init__(self, root, name):
        self.root, self.path = root, root / name
        self.path.write_bytes(bytes(BYTES))
        sync(root)
        self.complete = self.begun = 0

    def begin(self):
        self.begun = self.complete + 1
        put_gradient(self.root, self.path.name, np.full(ELEMENTS, -1, 'f4'))

    def end(self):
        sync(self.root)
        self.complete = self.begun


def open_direct(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    area = mmap.mmap(-1, 2 * MIB)

    def read(at):
        n = os.preadv(fd, [area], at)
        return np.frombuffer(area, 'f4', n // 4).copy()
    return read, lambda: os.close(fd)


def open_cached(path):
    fd = os.open(path, os.O_RDONLY)
    return lambda at: np.frombuffer(os.pread(fd, 2 * MIB, at), 'f4'), lambda: os.close(fd)


def open_mapped(path):
    with open(path, 'rb') as f:
        m = mmap.mmap(f.fileno(), BYTES, prot=mmap.PROT_READ)
    return lambda at: np.frombuffer(m[at:at + 2 * MIB], 'f4'), m.close


KINDS = {'cached': open_cached, 'direct': open_direct, 'mapped': open_mapped}


class Reader(threading.Thread):
    """Reads a parameter over and over, from a descriptor (or mapping) of before."""

    def __init__(self, counter, kind, zeros):
        super().__init__()
        self.counter, self.kind, self.zeros, self.stop = counter, kind, zeros, threading.Event()
        self.read, self.close = KINDS[kind](counter.path)
        self.wrong, self.reads = None, 0
        self.start()

    def run(self):
        try:
            while not self.stop.is_set() or not self.reads:
                self.once()
        except Exception as e:  # noqa: B902 - shown by the test
            self.wrong = repr(e)
        finally:
            self.close()

    def once(self):
        for at in range(0, BYTES, 2 * MIB):
            least = self.counter.complete
            got = self.read(at)
            most = self.counter.begun
            if self.zeros:
                got = got[got != 0]
            if len(got) and not (least <= got.min() and got.max() <= most):
                raise ValueError(f'{self.kind} at {at}: {got.min()} to {got.max()}, not {least} to {most}')
        self.reads += 1

    def finish(self):
        self.stop.set()
        self.join(SECONDS_MAX)
        assert not self.is_alive() and self.wrong is None, self.wrong


def with_readers(counter, act, kinds=tuple(KINDS), zeros=False):
    readers = [Reader(counter, k, zeros) for k in kinds]
    try:
        act()
    finally:
        for r in readers:
            r.finish()


def assert_counts(counter, path=None):
    got = np.fromfile(path or counter.path, 'f4')
    assert len(got) == ELEMENTS and (got == counter.complete).all(), (got.min(), got.max(), counter.complete)


def test_readers_of_every_kind_see_steps_in_order(root):
    counter = Counter(root, 'p')

    def steps():
        for _ in range(2 * ROUNDS):
            counter.begin()
            counter.end()
    with_readers(counter, steps)
    assert_counts(counter)


def test_readers_of_a_deferred_step_are_never_kept_waiting(root):
    """Between its gradients the last boundary's version is read, at once."""
    word(root, 'optimizer', 'sgd lr=1 accumulate=2 accumulate_mode=mean max_grad_norm=1e30')
    counter = Counter(root, 'p')

    def steps():
        for _ in range(ROUNDS):
            counter.begin()
            assert_counts(counter)
            counter.begin()
            assert_counts(counter)
            counter.end()
    with_readers(counter, steps)
    assert_counts(counter)


def test_renamed_while_it_is_updated(root):
    counter = Counter(root, 'p')

    def rounds():
        for i in range(ROUNDS):
            other = root / ('q' if i % 2 == 0 else 'p')
            counter.begin()
            os.rename(counter.path, other)
            counter.end()
            refused(errno.ENOENT, os.stat, counter.path)
            counter.path = other
            assert_counts(counter)
    with_readers(counter, rounds)
    assert word(root, 'step') == str(ROUNDS)


def test_cut_while_it_is_updated(root):
    """The update was before it, and the rest has the new values; or it was not, and the step can only be aborted, which brings all back."""
    counter = Counter(root, 'p')
    ended = {'whole': 0, 'aborted': 0}

    def one():
        counter.begin()
        os.truncate(counter.path, 2 * MIB)
        try:
            counter.end()
        except OSError as e:
            assert e.errno == errno.EIO and 'truncated' in word(root, 'error')
            assert command(root, 'abort') == ['ok']
            ended['aborted'] += 1
        else:
            left = np.fromfile(counter.path, 'f4')
            assert len(left) == MIB // 2 and (left == counter.complete).all()
            with open(counter.path, 'r+b') as f:
                f.write(np.full(ELEMENTS, counter.complete, 'f4').tobytes())
            sync(root)
            ended['whole'] += 1
        assert_counts(counter)

    def rounds():
        for _ in range(ROUNDS):
            one()
    with_readers(counter, rounds, ('cached', 'direct'), zeros=True)
    assert sum(ended.values()) == ROUNDS
    counter.begin()
    counter.end()
    assert_counts(counter)


def test_removed_while_it_is_updated(root):
    """A program that holds it open reads the old content or the update. The step continues without it; a new file of
    that name is another one."""
    def one():
        counter = Counter(root, 'p')
        word(root / 'p', 'dtype', 'f32')

        def remove():
            counter.begin()
            os.unlink(counter.path)
            sync(root)
            refused(errno.ENOENT, os.stat, counter.path)
        with_readers(counter, remove)
    for _ in range(ROUNDS):
        one()
    wait_for(lambda: word(root, 'parameters') == '0', 'the last one to be forgotten')


def test_replaced_while_it_is_updated(root):
    """As a checkpoint is put in place: written beside it, and renamed over it."""
    counter = Counter(root, 'p')
    for i in range(ROUNDS):
        counter.begin()
        (root / 'new').write_bytes(np.full(ELEMENTS, 100 + i, 'f4').tobytes())
        os.rename(root / 'new', counter.path)
        sync(root)
        counter.complete = counter.begun = 100 + i
        assert_counts(counter)
        counter.begin()
        counter.end()
        assert_counts(counter)


# ------------------------------------------------------- parts of one gradient

def write_part(root, begin, end, gradient, seed):
    """One process: its bytes in odd pieces and any order."""
    random = np.random.default_rng(seed)
    cuts = sorted({begin, end, *random.integers(begin, end, 30).tolist()})
    pieces = list(zip(cuts, cuts[1:]))
    random.shuffle(pieces)
    fd = os.open(root / '.hitrain/grad/p', os.O_WRONLY)
    for a, b in pieces:
        assert os.pwrite(fd, gradient[a:b], a) == b - a
    os.close(fd)


@pytest.mark.parametrize('accumulate', [1, 2])
def test_processes_write_parts_of_one_gradient(root, accumulate):
    word(root, 'optimizer', f'sgd lr=1 accumulate={accumulate}')
    counter = Counter(root, 'p')
    context = multiprocessing.get_context('fork')
    random = np.random.default_rng(1)
    want = np.zeros(ELEMENTS, 'f4')
    for step in range(3):
        total = None
        for k in range(accumulate):
            g = random.standard_normal(ELEMENTS).astype('f4')
            total = g if total is None else total + g
            cuts = [0, *sorted(4 * c for c in random.integers(1, ELEMENTS, 3).tolist()), BYTES]
            writers = [context.Process(target=write_part, args=(root, a, b, g.tobytes(), i))
                       for i, (a, b) in enumerate(zip(cuts, cuts[1:])) if a < b]
            for w in writers:
                w.start()
            for w in writers:
                w.join(SECONDS_MAX)
                assert w.exitcode == 0
        sync(root)
        want = want - total
        assert np.array_equal(np.fromfile(counter.path, 'f4'), want)
    assert word(root, 'step') == '3'
