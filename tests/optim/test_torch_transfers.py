# SPDX-License-Identifier: Apache-2.0
"""How bytes go to the store and back: descriptors stay open, small gradients go together, several threads read."""
import fcntl
import os
import threading

import pytest

from trainer import equal, shared_root, shared_store  # first: it makes the client importable
import torch
from hitrain import SGD, AdamW, _files, _optimizer, _root

COUNT = 600


def many(count=COUNT):
    return {f'p{i}': torch.nn.Parameter(torch.full((5,), float(i))) for i in range(count)}


def give(params, value=1.0):
    for p in params.values():
        p.grad = torch.full_like(p, value)


def number(root, word):
    return int(os.getxattr(root, f'user.hitrain.{word}'))


def test_a_step_opens_nothing_and_hands_small_gradients_over_together(shared_root, monkeypatch):
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
    assert calls['pwrite'] == calls['preadv'] == COUNT + 1
    assert calls['write'] <= COUNT // _optimizer.SMALL_MOST + 4  # the first alone, and the commit
    assert calls['dup'] == 1
    assert all(torch.equal(p, torch.full_like(p, float(n[1:]) - 2 if n != 'large' else -2.0)) for n, p in params.items())


def test_a_refused_gradient_among_many_is_named(shared_root):
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
def test_an_interrupt_among_many_gradients(shared_root, monkeypatch, after, where):
    params = many(300)
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


def test_an_error_while_several_threads_read(shared_root, monkeypatch):
    """step() returns when none of them reads any more; the next one reads what is missing."""
    params, threads = many(200), set()
    monkeypatch.setattr(_optimizer, 'READERS', 4)
    with SGD(params.items(), shared_root, lr=1.0) as optimizer:
        real, failures = _files.ParameterFile.read, ['p50']

        def read(f):
            threads.add(threading.get_ident())
            if f.name in failures:
                failures.clear()  # going back reads it, too
                raise OSError(5, 'of the test')
            real(f)
        give(params)
        with monkeypatch.context() as m:
            m.setattr(_files.ParameterFile, 'read', read)
            with pytest.raises(OSError, match='parameter p50'):
                optimizer.step()
        assert len(threads) > 1
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
    monkeypatch.setattr(_root, 'attribute', lambda where, word: '4096' if word == 'passthrough_bytes' else _files.attribute(where, word))
    with SGD(params.items(), shared_root, lr=1.0, resume=True) as optimizer:
        assert not flags(optimizer) & os.O_DIRECT
