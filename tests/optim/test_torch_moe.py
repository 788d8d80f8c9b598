# SPDX-License-Identifier: Apache-2.0
"""Experts that a step does not use: no bytes on a device, no log, no read, and the numbers of torch.optim with grad=None."""
import os

import pytest

from trainer import root, store  # first: it makes the client importable
import torch
import hitrain

EXPERTS, USED, BYTES, STEPS = 16, 2, 1 << 20, 6
RULES = {'AdamW': (hitrain.AdamW, torch.optim.AdamW, dict(lr=0.01, weight_decay=0.1)),
         'SGD': (hitrain.SGD, torch.optim.SGD, dict(lr=0.01, momentum=0.9, weight_decay=0.1))}


def experts(seed=0):
    random = torch.Generator().manual_seed(seed)
    return {f'experts.{i}': torch.nn.Parameter(torch.randn(512, 512, generator=random)) for i in range(EXPERTS)}


def give(params, step):
    """This step's experts have gradients, and no others."""
    for i, p in enumerate(params.values()):
        p.grad = torch.full_like(p, 0.01 * (step + 1)) if (i + step) % (EXPERTS // USED) == 0 else None


@pytest.mark.parametrize('rule', RULES)
def test_an_expert_without_a_gradient_costs_nothing(store, root, rule):
    """Parameter, moments and the log's records of the used experts are all that a durable step writes; the first use of an expert reads its own."""
    of_store, plain, options = RULES[rule]
    params, other = experts(), experts()
    theirs = plain(other.values(), **options)
    state = {'AdamW': 2, 'SGD': 1}[rule]
    with of_store(params.items(), root, trust_versions=True, **options) as optimizer:
        for step in range(STEPS):
            before = store.counters()
            give(params, step)
            give(other, step)
            optimizer.step()
            theirs.step()
            after = store.counters()
            wrote, log, read = (after[n] - before[n] for n in ('device_written_bytes', 'log_written_bytes', 'device_read_bytes'))
            used = USED * BYTES * (1 + state)
            assert wrote <= used + (64 << 10) and log <= 64 << 10 and read <= used + (64 << 10), (step, wrote, log, read)
        for n, p in params.items():
            assert torch.allclose(p, other[n], rtol=1e-5, atol=1e-7), n
        used = {n for i, n in enumerate(params) if any((i + step) % (EXPERTS // USED) == 0 for step in range(STEPS))}
        assert 0 < len(used) < EXPERTS
        word = 'exp_avg' if state == 2 else 'momentum_buffer'
        assert all((os.stat(root / '.hitrain/state' / n / word).st_size > 0) == (n in used) for n in params)


def test_versions_are_trusted_only_where_that_was_asked_for(root):
    """A change through .data has no version: step() takes it without the option, and commit() with it."""
    for trusts in False, True:
        place = f'{root}-{trusts}'
        p = torch.nn.Parameter(torch.ones(4096))
        with hitrain.SGD([('w', p)], place, lr=1.0, trust_versions=trusts) as optimizer:
            for change in (lambda: None, lambda: p.data.fill_(3.0), lambda: torch.no_grad()(p.fill_)(5.0)):
                change()
                p.grad = None
                optimizer.step()
            p.grad = torch.zeros(4096)
            optimizer.step()
            assert (p == 5).all()
            p.data.fill_(7.0)
            p.grad = torch.zeros(4096)
            if trusts:
                optimizer.commit()
            optimizer.step()
            assert (p == 7).all()
