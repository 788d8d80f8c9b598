# SPDX-License-Identifier: Apache-2.0
"""Kept steps from a trainer: it keeps them, goes back to them, and goes on with the same bits."""
import errno

import pytest

from trainer import LR, copies, equal, random_parameters, root, store  # first: it makes the client importable
import torch
from hitrain import AdamW

SHAPES = {'a.weight': (300, 100), 'a.bias': (100,), 'scale': ()}


def run(optimizer, params, first, last):
    for step in range(first, last):
        random = torch.Generator().manual_seed(1000 + step)
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=random)
        optimizer.step()


def states(optimizer, params):
    return {f'{n}/{what}': optimizer.read_state(p, what) for n, p in params.items() for what in ('exp_avg', 'exp_avg_sq', 'step')}


def test_a_run_goes_on_from_a_kept_step_with_the_same_bits(store, root):
    params, again = random_parameters(SHAPES), random_parameters(SHAPES, seed=1)
    with AdamW(params.items(), root, lr=LR) as optimizer:
        run(optimizer, params, 0, 2)
        kept = copies(params)
        optimizer.snapshot('good')
        run(optimizer, params, 2, 5)
        held = states(optimizer, params)
    store.control('rollback', root, 'good')
    with AdamW(again.items(), root, lr=LR, resume=True) as optimizer:
        assert optimizer.committed_step == 2 and equal(again, kept)
        run(optimizer, again, 2, 5)
        assert equal(again, params) and equal(states(optimizer, again), held)


def test_snapshot_keeps_what_was_changed_outside_steps(store, root):
    params = random_parameters(SHAPES)
    with AdamW(params.items(), root, lr=LR, durable_every=3) as optimizer:
        run(optimizer, params, 0, 1)
        with torch.no_grad():
            params['scale'].fill_(7)
        optimizer.snapshot()
        assert optimizer.committed_step == 1
    assert (root / '.hitrain/snap/1/scale').read_bytes() == torch.tensor(7.0).numpy().tobytes()


def test_snapshot_is_refused_with_the_reason_and_the_commit_stands(root):
    params = random_parameters(SHAPES)
    with AdamW(params.items(), root, lr=LR, durable_every=2) as optimizer:
        optimizer.snapshot('x')
        run(optimizer, params, 0, 1)
        with pytest.raises(OSError, match='snapshot x') as e:
            optimizer.snapshot('x')
        assert e.value.errno == errno.EEXIST and optimizer.committed_step == 1
        for name in ('a/b', 'a b', 'a\nabort', '.', '..', '12', 'x' * 65):
            with pytest.raises(ValueError, match='no name of a kept step'):
                optimizer.snapshot(name)
        random = torch.Generator().manual_seed(5)
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=random)
        optimizer.send_gradient(params['scale'])
        with pytest.raises(RuntimeError, match='a part of a step is sent'):
            optimizer.snapshot()
        optimizer.abort()
