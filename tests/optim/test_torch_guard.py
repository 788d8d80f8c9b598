# SPDX-License-Identifier: Apache-2.0
"""Going back to a kept step in the middle of a run, by a call, and by a guard that sees the loss jump."""
import json
import math
import os

import pytest
import torch

from trainer import LR, shared_root, shared_store  # first: it makes the client importable
import hitrain
from hitrain._guard import FINE, SPIKE, WENT_BACK, _Trend
from hitrain.integrations import SpikeGuard

KINDS = {
    'in memory': {},
    'async': {'async_step': True},
    'not each step durable': {'durable_every': 3},
    'logged steps': {'redo': True, 'durable_every': 3},
    'offloaded': {'keep': 1 << 20},
}


def model_of(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def train(model, optimizer, numbers, bad=()):
    losses = []
    for number in numbers:
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(number))
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)) * (1e4 if number in bad else 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def made(model, root, keep=0, **options):
    if keep:
        return hitrain.offload(model, root, lr=LR, keep=keep, **options)
    return hitrain.AdamW(model.named_parameters(), root, lr=LR, **options)


@pytest.mark.parametrize('kind', KINDS)
def test_a_run_that_went_back_has_the_bits_of_one_that_did_not_go_on(shared_root, kind):
    model, durable = model_of(), KINDS[kind].get('durable_every', 1)
    with made(model, shared_root, retain=20, **KINDS[kind]) as optimizer:
        first = train(model, optimizer, range(9))
        assert durable > 1 or optimizer.kept_steps()[:8] == list(range(1, 9))  # the last one may still be closing
        to = 3
        assert to in optimizer.kept_steps()
        optimizer.rollback(to)
        assert optimizer.committed_step == to
        assert train(model, optimizer, range(to, 9)) == first[to:]
        train(model, optimizer, range(9, 12))
        optimizer.rollback(str(to))
        assert train(model, optimizer, range(to, 5)) == first[to:5]


def test_going_back_takes_an_open_step_with_it_and_keeps_hyper_parameters(shared_root):
    model = model_of()
    with hitrain.AdamW(model.named_parameters(), shared_root, lr=LR, retain=4, overlap=True) as optimizer:
        train(model, optimizer, range(3))
        optimizer.param_groups[0]['lr'] = LR / 2
        model(torch.randn(4, 32)).sum().backward()
        optimizer.rollback(2)
        assert optimizer.param_groups[0]['lr'] == LR / 2
        train(model, optimizer, [2])
        assert f'lr={LR / 2:g}' in os.getxattr(shared_root, 'user.hitrain.optimizer').decode()


def test_a_step_that_is_not_kept_is_refused_and_nothing_changes(shared_root):
    model = model_of()
    with hitrain.AdamW(model.named_parameters(), shared_root, lr=LR, retain=2) as optimizer:
        train(model, optimizer, range(5))
        before = [p.detach().clone() for p in model.parameters()]
        for step in (1, 77, '../snap/5', 'none'):
            with pytest.raises(ValueError, match=r'keeps no step .* it has \[4, 5\]'):
                optimizer.rollback(step)
        assert optimizer.committed_step == 5 and all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_run_with_a_planted_spike_ends_with_the_bits_of_one_without_these_batches(shared_root, tmp_path):
    ends, bad = {}, (60, 61)
    for name in ('plain', 'guarded'):
        model, said = model_of(), []
        with hitrain.AdamW(model.named_parameters(), shared_root / name, lr=LR, retain=3) as optimizer:
            guard = SpikeGuard(optimizer, window=20, path=tmp_path / 'log')
            for number in range(90):
                if name == 'guarded' or number not in bad:
                    loss, = train(model, optimizer, [number], bad)
                    said.append(guard.see(loss))
            assert [i for i, s in enumerate(said) if s != FINE] == ([60, 61] if name == 'guarded' else [])
            ends[name] = loss, [p.detach().clone() for p in model.parameters()], optimizer.committed_step
    assert ends['guarded'][0] == ends['plain'][0] and ends['guarded'][2] == ends['plain'][2] == 88
    assert all(map(torch.equal, ends['guarded'][1], ends['plain'][1]))
    events = [json.loads(line) for line in open(tmp_path / 'log')]
    assert [(e['to'], e['spikes'][0]['step']) for e in events] == [(60, 61), (60, 61)] and guard.events == events


@pytest.mark.parametrize('loss', [math.nan, math.inf, 1e9])
def test_patience_and_distance(shared_root, loss):
    model = model_of()
    with hitrain.SGD(model.named_parameters(), shared_root, lr=1e-4, retain=8) as optimizer:
        guard = SpikeGuard(optimizer, window=8, patience=2, back=3, lr_factor=0.5, lr_steps=2, at_most=2)

        def see(value, **more):
            train(model, optimizer, [optimizer.committed_step])
            return guard.see(value, **more)
        assert [see(1 + step % 2 / 100) for step in range(8)] == [FINE] * 8
        assert see(loss) == SPIKE and see(1.0) == FINE, 'one alone is no reason'
        assert see(loss) == SPIKE and see(loss) == WENT_BACK
        assert optimizer.committed_step == 8 and optimizer.param_groups[0]['lr'] == 5e-5  # 11 was the first
        assert [see(1.0), see(1.0)] == [FINE, FINE] and optimizer.param_groups[0]['lr'] == 1e-4
        assert see(1.0, grad_norm=1.0) == FINE
        assert see(loss) == SPIKE and see(loss) == WENT_BACK
        assert see(loss) == SPIKE
        with pytest.raises(RuntimeError, match='went back 2 times within 8 steps'):
            see(loss)


def test_a_guard_without_kept_steps_is_refused(shared_root):
    model = model_of()
    with hitrain.SGD(model.named_parameters(), shared_root, lr=1e-4) as optimizer:
        with pytest.raises(ValueError, match='needs kept steps'):
            SpikeGuard(optimizer)
        train(model, optimizer, range(2))
        optimizer.snapshot()
        for wrong in ({'window': 3}, {'patience': 0}, {'back': 0}, {'at_most': 0}, {'lr_steps': -1}, {'sigma': 0}, {'lr_factor': 2}):
            with pytest.raises(ValueError):
                SpikeGuard(optimizer, **wrong)
        guard = SpikeGuard(optimizer, back=5)
        with pytest.raises(RuntimeError, match='no kept step is 5 before it'):
            guard.see(math.nan)


def test_a_trend_is_the_mean_first_and_forgets_later():
    trend = _Trend(9)
    for value in (1.0, 3.0):
        trend.add(value)
    assert (trend.mean, trend.variance) == (2.0, 1.0)
    for _ in range(200):
        trend.add(5.0)
    assert trend.mean == pytest.approx(5.0) and trend.variance == pytest.approx(0.0, abs=1e-9)
    assert trend.is_above(8.0, 6, 1.5) and not trend.is_above(7.0, 6, 1.5)
