# SPDX-License-Identifier: Apache-2.0
"""How bytes go to the store and back: descriptors stay open, small parameters go together, several threads transfer."""
import fcntl
import mmap
import os
import shutil
import threading

import pytest

from trainer import SECONDS_MAX, equal, number, shared_root, shared_store  # first: it makes the client importable
import torch
from hitrain import SGD, AdamW, _bytes, _files, _gather, _ring, _root, _send, _words

COUNT = 600


def many(count=COUNT):
    return {f'p{i}': torch.nn.Parameter(torch.full((5,), float(i))) for i in range(count)}


def give(params, value=1.0):
    for p in params.values():
        p.grad = torch.full_like(p, value)


@pytest.fixture(params=[True, False], ids=['together', 'each alone'])
def together(request, monkeypatch, shared_root):
    """Or as with an older daemon."""
    if not request.param:
        monkeypatch.setattr(_gather.Gather, '_name', lambda self, lines, files: None)
    yield request.param
    shutil.rmtree(shared_root)  # the store has room for a few of these models


class Meeting:
    """A call waits until another thread has made one, too: on a busy machine the first would do the work of all."""

    def __init__(self):
        self.lock, self.names, self.both = threading.Lock(), set(), threading.Event()

    def come(self):
        with self.lock:
            self.names.add(threading.current_thread().name)
            if len(self.names) > 1:
                self.both.set()
        assert self.both.wait(SECONDS_MAX), self.names


def test_a_step_opens_nothing_and_hands_small_gradients_over_together(shared_root, monkeypatch, together):
    params, calls = {**many(), 'large': torch.nn.Parameter(torch.zeros(1 << 20))}, {}
    with SGD(params.items(), shared_root, lr=1.0) as optimizer:
        give(params)
        optimizer.step()

        def count(name):
            real = getattr(os, name)

            def counted(*args, **kw):
                calls[name] = calls.get(name, 0) + 1
                return real(*args, **kw)
            monkeypatch.setattr(os, name, counted)
        for name in ('open', 'write', 'pwrite', 'preadv', 'dup'):
            count(name)
        give(params)
        optimizer.step()
    assert 'open' not in calls
    assert calls['pwrite'] == (1 if together else COUNT) + 1
    assert calls['preadv'] == (1 if together else COUNT) + 4  # a MiB at a time
    assert calls['write'] <= COUNT // _send.SMALL_MOST + 4  # the first alone, and the commit
    assert calls['dup'] == 1
    assert all(torch.equal(p, torch.full_like(p, float(n[1:]) - 2 if n != 'large' else -2.0)) for n, p in params.items())


def test_a_refused_gradient_among_many_is_named(shared_root, together):
    """And the step is taken back, with the gradients that were written and not handed over."""
    params = many()
    with AdamW(params.items(), shared_root, lr=1.0) as optimizer:
        give(params)
        optimizer.step()
        before = {n: p.detach().clone() for n, p in params.items()}
        os.rename(shared_root / 'p77', shared_root / 'elsewhere')
        give(params)
        with pytest.raises(FileNotFoundError, match='gradient of p77'):
            optimizer.step()
        assert equal(before, params) and number(shared_root, 'step_open') == 0
        assert (shared_root / 'p77').exists()  # the renaming was no part of a commit
        # Nothing of the failed step is left in the next one, which has other parameters.
        for n, p in params.items():
            p.grad = torch.ones_like(p) if n in ('p3', 'p500') else None
        optimizer.step()
        assert {n for n, p in params.items() if not torch.equal(p, before[n])} == {'p3', 'p500'}
    assert number(shared_root, 'step_open') == 0 and number(shared_root, 'durable_step') == 2


@pytest.mark.parametrize('after', [1, 2, 100, 258])
@pytest.mark.parametrize('where', ['pwrite', 'apply'])
def test_an_interrupt_among_many_gradients(shared_root, monkeypatch, after, where, together):
    params = many(300)
    monkeypatch.setattr(_gather, 'RUN_MEMBERS', 1)  # also for runs: one write each
    with SGD(params.items(), shared_root, lr=1.0) as optimizer:
        give(params)
        target, name, left = (os, 'pwrite', [after]) if where == 'pwrite' else (_root.Root, 'apply', [min(after, 2)])
        real = getattr(target, name)

        def interrupted(*args):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return real(*args)
        with monkeypatch.context() as m:
            m.setattr(target, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        assert number(shared_root, 'step_open') == 0
        for n, p in params.items():
            p.grad = None if n == 'p0' else p.grad
        optimizer.step()
        assert all(torch.equal(p, torch.full_like(p, float(n[1:]) - (n != 'p0'))) for n, p in params.items())
    assert number(shared_root, 'step_open') == 0 and number(shared_root, 'durable_step') == 1


def test_an_error_while_several_threads_read(shared_root, monkeypatch, together):
    """step() returns when none of them reads any more; the next one reads what is missing."""
    params, meeting = many(200), Meeting()
    monkeypatch.setattr(_send, 'READERS', 4)
    monkeypatch.setattr(_gather, 'RUN_MEMBERS', 1)
    with SGD(params.items(), shared_root, lr=1.0) as optimizer:
        target, failures = _gather.Gather if together else _files.ParameterFile, ['p50']
        real = target.read

        def read(*args):
            meeting.come()
            if getattr(args[-1], 'name', str(args[-1])) in failures:
                failures.clear()  # going back reads it, too
                raise OSError(5, 'of the test')
            real(*args)
        give(params)
        with monkeypatch.context() as m:
            m.setattr(target, 'read', read)
            with pytest.raises(OSError, match='parameters? p50'):
                optimizer.step()
        assert meeting.both.is_set()
        assert not [t for t in threading.enumerate() if t.name.startswith('hitrain-read')]
        assert all(torch.equal(p, torch.full_like(p, float(n[1:]) - 1)) for n, p in params.items())  # the step is done, and read again
        optimizer.step()
        assert all(torch.equal(p, torch.full_like(p, float(n[1:]) - 2)) for n, p in params.items())


def test_reads_pass_the_kernels_cache_by_where_that_is_faster(shared_root, monkeypatch):
    def flags(optimizer):
        (f,) = optimizer._parameter_files()
        with f._opened() as fd:
            return fcntl.fcntl(fd, fcntl.F_GETFL)
    params = many(1)
    with SGD(params.items(), shared_root, lr=1.0) as optimizer:
        assert flags(optimizer) & os.O_DIRECT
    monkeypatch.setattr(_root, 'attribute', lambda where, word: '4096' if word == 'passthrough_bytes' else _words.attribute(where, word))
    with SGD(params.items(), shared_root, lr=1.0, resume=True) as optimizer:
        assert not flags(optimizer) & os.O_DIRECT


def test_runs_are_of_one_dtype_and_leave_out_what_has_no_gradient(shared_root, monkeypatch):
    """Files and gradients of several dtypes, on both sides of the limits; values of others never get into a parameter."""
    monkeypatch.setattr(_gather, 'RUN_BYTES', 1 << 12)
    monkeypatch.setattr(_gather, 'MEMBER_BYTES_MAX', 1 << 12)
    generator = torch.Generator().manual_seed(3)
    sizes = {f'p{i}': 1 + (i * 37) % 300 for i in range(100)}
    sizes.update(least=1024, large=1025, wide=5000)
    params = {n: torch.nn.Parameter(torch.randn(k, generator=generator).to(torch.bfloat16 if k % 3 == 0 else torch.float32)) for n, k in sizes.items()}
    theirs = {n: torch.nn.Parameter(p.detach().clone()) for n, p in params.items()}
    with SGD(params.items(), shared_root, lr=0.5) as optimizer, \
            SGD(theirs.items(), shared_root.with_name('alone'), lr=0.5) as other:
        monkeypatch.setattr(other._gather, 'runs', lambda files: [])
        for step in range(6):
            for i, n in enumerate(sizes):
                grad = torch.randn(sizes[n], generator=generator).to(params[n].dtype)
                has = (i * 7 + step) % 5 != 0
                params[n].grad, theirs[n].grad = (grad, grad.clone()) if has else (None, None)
            params['p9'].data[0] = theirs['p9'].data[0] = 7.0  # a change outside steps
            optimizer.step()
            other.step()
            assert equal(params, theirs)
        assert len(optimizer._gather.runs(list(optimizer._parameter_files()))) > 3
        optimizer.abort()
        assert equal(params, theirs)
    assert all((shared_root / n).read_bytes() == (shared_root.with_name('alone') / n).read_bytes() for n in sizes)


def test_several_threads_share_a_large_tensor(shared_root, monkeypatch):
    monkeypatch.setattr(_bytes, 'THREADS', 3)
    monkeypatch.setattr(_bytes, 'PIECE_BYTES', 1 << 16)
    meetings, real = {'pwrite': Meeting(), 'preadv': Meeting()}, {}
    for name in meetings:
        real[name] = getattr(os, name)

        def called(*args, name=name):
            meetings[name].come()
            return real[name](*args)
        monkeypatch.setattr(os, name, called)
    p = torch.nn.Parameter(torch.arange((1 << 19) + 7.0))
    start = p.detach().clone()
    with SGD([('w', p)], shared_root, lr=1.0) as optimizer:
        for n in range(2):
            p.grad = torch.arange((1 << 19) + 8.0)[1:] * (n + 1)  # not at a page of memory
            optimizer.step()
        assert torch.equal(p, start - 3 * (start + 1))
    assert all(m.both.is_set() and all(name.startswith('hitrain-transfer') for name in m.names) for m in meetings.values())

    def fails(*args):
        raise OSError(5, 'of the test')
    with SGD([('w', p)], shared_root, lr=1.0, resume=True) as optimizer:
        with monkeypatch.context() as m:
            m.setattr(os, 'pwrite', fails)
            with pytest.raises(OSError, match='of the test|gradient of w'):
                optimizer.step()
        assert torch.equal(p, start - 3 * (start + 1)) and number(shared_root, 'step_open') == 0


@pytest.mark.parametrize('shift', [0, 64, 4095])
def test_values_are_summed_while_they_are_read(tmp_path, monkeypatch, shift):
    """With the checksum that they have later, wherever their memory begins."""
    monkeypatch.setattr(_bytes, 'THREADS', 3)
    path, piece = tmp_path / 'values', _bytes.PIECE_BYTES
    for size in 0, 1, _bytes.BLOCK_BYTES, _bytes.BLOCK_BYTES + 1, piece + 4097, 2 * piece, 3 * piece + 12345:
        raw = os.urandom(size)
        path.write_bytes(b'head' + raw)
        values = torch.frombuffer(mmap.mmap(-1, size + 4096), dtype=torch.uint8)[shift:shift + size]
        fd = os.open(path, os.O_RDONLY)
        try:
            assert _bytes.read_and_sum(fd, values, 4) == _bytes.checksum(values) == _bytes.checksum(values.clone())
            assert bytes(_bytes.memory_of(values)) == raw
            with pytest.raises(OSError, match='the file ends'):
                os.truncate(path, size + 3)
                _bytes.read_and_sum(fd, values[:max(1, size)] if size else torch.zeros(1), 4)
        finally:
            os.close(fd)


def test_other_dtypes_pass_through_a_few_buffers(shared_root, monkeypatch):
    made, allocated, real_made, real_empty = [], [], _ring._made, torch.empty
    monkeypatch.setattr(_bytes, 'THREADS', 3)
    monkeypatch.setattr(_ring, 'BUFFER_BYTES', 1 << 18)
    monkeypatch.setattr(_ring, '_spare', {False: [], True: []})
    monkeypatch.setattr(_ring, '_made', lambda pinned: made.append(real_made(pinned)) or made[-1])
    monkeypatch.setattr(torch, 'empty', lambda *args, **kw: allocated.append(real_empty(*args, **kw)) or allocated[-1])
    count = 5 * (1 << 17) + 3
    params = {'flat': torch.nn.Parameter(torch.arange(count) % 100 + 0.001), 'turned': torch.nn.Parameter(torch.ones(700, 800).t())}
    with SGD(params.items(), shared_root, lr=1.0, param_dtype=torch.bfloat16) as optimizer:
        for _ in range(2):
            give(params)
            optimizer.step()
        assert torch.equal(params['flat'].detach(), torch.arange(count) % 100 - 2.0)
        assert torch.equal(params['turned'].detach(), torch.full((800, 700), -1.0))
    assert 0 < len(made) <= 3
    assert all(t.numel() != count for t in allocated)
