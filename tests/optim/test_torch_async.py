# SPDX-License-Identifier: Apache-2.0
"""async_step=True: the numbers of synchronous steps, what waits for the end of a step, and steps that fail after step()
has returned."""
import os

import pytest

from trainer import LR, assert_equal, copies, random_parameters, root, store, take_steps  # first: it makes the client importable
import torch
from hitrain import SGD, AdamW, Shard

SHAPES = {'wide.weight': (300, 1000), 'wide.bias': (1000,), 'norm': (7,), 'scale': ()}
STEPS = 8


def parameters():
    return random_parameters(SHAPES, 0, torch.float32)


@pytest.mark.parametrize('options', [{}, {'durable_every': 3}, {'max_grad_norm': 0.5}, {'skip_nonfinite': True}])
def test_the_numbers_are_those_of_synchronous_steps(root, options):
    own, theirs = parameters(), parameters()
    with AdamW(theirs.items(), root / 'sync', lr=LR, **options) as optimizer:
        take_steps(optimizer, theirs, 0, STEPS)
    with AdamW(own.items(), root / 'async', lr=LR, async_step=True, **options) as optimizer:
        take_steps(optimizer, own, 0, STEPS)
        if 'max_grad_norm' in options:
            assert optimizer.grad_norm > 0.5
        assert optimizer.state_dict()['hitrain']['step'] == STEPS == optimizer.committed_step
    assert_equal(own, theirs)


def test_with_overlap_and_reading_ahead(root):
    def train(where, **options):
        torch.manual_seed(1)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
        x = torch.randn(4, 256)
        with AdamW(model.named_parameters(), where, lr=LR, overlap=True, **options) as optimizer:
            optimizer.read_ahead(model)
            for step in range(STEPS):
                optimizer.zero_grad()
                optimizer.param_groups[0]['lr'] = LR / (1 + step)
                model(x * (1 + step)).pow(2).sum().backward()
                optimizer.step()
            optimizer.wait()
            assert optimizer.state_dict()['hitrain']['step'] == STEPS
        return copies(dict(model.named_parameters()))
    assert_equal(train(root / 'sync'), train(root / 'async', async_step=True))


def test_an_end_keeps_the_last_step(root):
    own = parameters()
    with AdamW(own.items(), root, lr=LR, async_step=True, durable_every=100) as optimizer:
        take_steps(optimizer, own, 0, 3)
    again = parameters()
    with AdamW(again.items(), root, lr=LR, async_step=True, resume=True) as optimizer:
        assert optimizer.committed_step == 3
        assert_equal(again, own)


def test_an_abort_comes_after_the_step(root):
    own = parameters()
    with AdamW(own.items(), root, lr=LR, async_step=True, durable_every=2) as optimizer:
        take_steps(optimizer, own, 0, 2)
        two = copies(own)
        take_steps(optimizer, own, 2, 3)
        optimizer.abort()
        assert_equal(own, two)
        take_steps(optimizer, own, 2, 4)
        optimizer.commit()
        assert optimizer.committed_step == 4


def cut_before_the_end(optimizer, path):
    """With clipping the updates follow the end of the step: this one fails, because its file was cut."""
    end = optimizer._end_step

    def cut():
        os.truncate(path, 4)
        end()
    optimizer._end_step = cut
    return end


def test_a_step_that_fails_later_is_taken_back(root):
    own = parameters()
    with AdamW(own.items(), root, lr=LR, async_step=True, max_grad_norm=1.0) as optimizer:
        take_steps(optimizer, own, 0, 2)
        two = copies(own)
        end = cut_before_the_end(optimizer, root / 'wide.bias')
        with pytest.warns(RuntimeWarning, match='went back from step 3 to its durable step 2'):
            with pytest.raises(OSError):
                take_steps(optimizer, own, 2, 3)
        optimizer._end_step = end
        assert_equal(own, two)
        take_steps(optimizer, own, 2, 4)
        optimizer.commit()
        assert optimizer.committed_step == 4


def test_a_failure_that_reading_ahead_finds_is_taken_back_by_the_next_step(root):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    own, x = dict(model.named_parameters()), torch.ones(8)
    with SGD(own.items(), root, lr=LR, async_step=True, max_grad_norm=1.0) as optimizer:
        optimizer.read_ahead(model)
        model(x).sum().backward()
        optimizer.step()
        optimizer.wait()
        optimizer.commit()
        one = copies(own)
        end = cut_before_the_end(optimizer, root / '1.bias')
        optimizer.step()
        optimizer._end_step = end
        with pytest.raises(OSError):
            model(x)
        with pytest.warns(RuntimeWarning, match='went back from step 2 to its durable step 1'):
            with pytest.raises(OSError):
                optimizer.step()
        assert_equal(own, one)
        model(x).sum().backward()
        optimizer.step()
        optimizer.wait()
        optimizer.commit()
        assert optimizer.committed_step == 2


def test_a_shard_is_refused(root):
    with pytest.raises(ValueError, match='async_step'):
        SGD(parameters().items(), root, lr=LR, async_step=True, shard=Shard(0, 1))
