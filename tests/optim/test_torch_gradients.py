# SPDX-License-Identifier: Apache-2.0
"""Gradients that do not come whole and at once: in several passes, sparse, from several processes; and parameters read ahead."""
import os

import pytest

from trainer import LR, PROCESSES, SECONDS_MAX, close, equal, on_processes, random_parameters, root, store  # first: it makes the client importable
import torch
from hitrain import SGD, AdamW, Shard
from hitrain._topk import ErrorFeedback

SHAPES = {'wide.weight': (300, 1000), 'wide.bias': (1000,), 'norm': (7,), 'scale': ()}


def parameters(seed=0):
    return random_parameters(SHAPES, seed)


def loss_of(params, x):
    return ((x @ params['wide.weight'] + params['wide.bias']).sin().mean() * params['scale']
            + (params['norm'] ** 2).sum())


def batch(step, k):
    return torch.randn(8, 300, generator=torch.Generator().manual_seed(100 * step + k))


# ---------------------------------------------------------------- accumulation

@pytest.mark.parametrize('overlap', [False, True])
def test_passes_are_added_as_autograd_adds_them(root, overlap):
    own, theirs = parameters(), parameters()
    other = torch.optim.AdamW(theirs.values(), lr=LR)
    with AdamW(own.items(), root, lr=LR, accumulate=3, overlap=overlap, max_grad_norm=2.0) as optimizer:
        for step in range(4):
            other.zero_grad()
            for k in range(3):
                loss_of(theirs, batch(step, k)).backward()
                loss_of(own, batch(step, k)).backward()
                if not overlap and k < 2:
                    optimizer.send_gradients()
                assert (overlap or k < 2) == all(p.grad is None for p in own.values())
            torch.nn.utils.clip_grad_norm_(theirs.values(), 2.0)
            other.step()
            optimizer.step()
            optimizer.zero_grad()
        assert close(own, theirs) and optimizer.committed_step == 4


def test_sums_are_the_same_bits(root):
    """Without a rule that rounds: plain descent subtracts the sum itself."""
    own = parameters()
    start = {n: p.detach().clone() for n, p in own.items()}
    with SGD(own.items(), root, lr=1.0, accumulate=4, accumulate_mode='mean') as optimizer:
        sums = {n: None for n in own}
        for k in range(4):
            loss_of(own, batch(0, k)).backward()
            for n, p in own.items():
                sums[n] = p.grad.clone() if sums[n] is None else sums[n] + p.grad
            optimizer.send_gradients()
        optimizer.step()
        assert equal(own, {n: start[n] - sums[n] * 0.25 for n in own})


def test_too_many_passes_take_the_step_back(root):
    own = parameters()
    start = {n: p.detach().clone() for n, p in own.items()}
    with AdamW(own.items(), root, lr=LR, accumulate=2, overlap=True) as optimizer:
        for k in range(2):
            loss_of(own, batch(0, k)).backward()
        with pytest.raises(RuntimeError, match='the 2 gradients of this step'):
            loss_of(own, batch(0, 2)).backward()
        assert os.getxattr(root, 'user.hitrain.step_open') == b'0'
        optimizer.abort()
        assert equal(own, start)
    for options in ({'accumulate': 0}, {'accumulate_mode': 'average'}):
        with pytest.raises(ValueError, match='accumulate'):
            AdamW(own.items(), root, resume=True, **options)


@pytest.mark.parametrize('overlap', [False, True])
def test_the_last_group_may_be_shorter_and_parameters_unused(root, overlap):
    """Groups of 3, 2 and 1 passes of at most 3, in which one parameter has a gradient in the first pass only, and another in none."""
    own, theirs = parameters(), parameters()
    own['norm'].requires_grad_(False)
    theirs['norm'].requires_grad_(False)
    other = torch.optim.AdamW(theirs.values(), lr=LR)
    with AdamW(own.items(), root, lr=LR, accumulate=3, overlap=overlap) as optimizer:
        for step, passes in enumerate((3, 2, 1)):
            other.zero_grad(set_to_none=True)
            for k in range(passes):
                for params in own, theirs:
                    scale = params['scale'] if k == 0 else params['scale'].detach()
                    loss_of({**params, 'scale': scale}, batch(step, k)).backward()
                if k < passes - 1 and not overlap:
                    optimizer.send_gradients()
            optimizer.step()
            other.step()
            optimizer.zero_grad(set_to_none=True)
        assert close(own, theirs) and optimizer.committed_step == 3


@pytest.mark.parametrize('of_passes', [False, True])
def test_mean_divides_by_the_whole_group(root, of_passes):
    """As a loss that is divided by accumulate does, in a shorter group, too. Times accumulate / passes it is the mean
    of the passes."""
    own, theirs = parameters(), parameters()
    other = torch.optim.SGD(theirs.values(), lr=LR)
    with SGD(own.items(), root, lr=LR, accumulate=3, accumulate_mode='mean') as optimizer:
        for step, passes in enumerate((3, 2, 1)):
            other.zero_grad(set_to_none=True)
            factor = 3 / passes if of_passes else 1.0
            for k in range(passes):
                (loss_of(own, batch(step, k)) * factor).backward()
                (loss_of(theirs, batch(step, k)) / (passes if of_passes else 3)).backward()
                if k < passes - 1:
                    optimizer.send_gradients()
            optimizer.step()
            other.step()
            optimizer.zero_grad(set_to_none=True)
            assert close(own, theirs), step


# ---------------------------------------------------------------------- sparse

def regression(seed=3):
    """A small model, and data that it can fit."""
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))
    x = torch.randn(256, 20, generator=random)
    return model, x, torch.tanh(x @ torch.randn(20, 1, generator=random))


def descend(model, x, y, steps, optimizer, change=lambda: None):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        change()
        optimizer.step()
    return ((model(x) - y) ** 2).mean().item()


def test_error_feedback_converges_as_dense_gradients_do(root):
    """A twentieth of each gradient follows the dense descent if the rest is remembered, and ends elsewhere if not."""
    model, x, y = regression()
    first = ((model(x) - y) ** 2).mean().item()
    dense = descend(model, x, y, 300, torch.optim.SGD(model.parameters(), lr=0.05))

    model, x, y = regression()
    feedback = ErrorFeedback(0.05)

    def forgetful():
        for p in model.parameters():
            at, values = feedback.choose(p, p.grad, torch.float32)
            feedback.forget()
            p.grad = torch.zeros(p.numel()).scatter_(0, at.long(), values).view(p.shape)
    without = descend(model, x, y, 300, torch.optim.SGD(model.parameters(), lr=0.05), forgetful)

    model, x, y = regression()
    with SGD(model.named_parameters(), root, lr=0.05, topk=0.05) as optimizer:
        sparse = descend(model, x, y, 300, optimizer)
    print(f'loss: {first:.4f} at first, {dense:.5f} dense, {sparse:.5f} sparse, {without:.5f} without feedback')
    assert dense < first / 4 and abs(sparse - dense) < 0.05 * dense < abs(without - dense)


def test_a_whole_topk_equals_the_dense_gradient(root):
    own, theirs = parameters(), parameters()
    other = torch.optim.AdamW(theirs.values(), lr=LR)
    with AdamW(own.items(), root, lr=LR, topk=1.0, grad_scale=64.0, skip_nonfinite=True) as optimizer:
        for step in range(3):
            for params, o in ((own, optimizer), (theirs, other)):
                o.zero_grad()
                loss_of(params, batch(step, 0)).backward()
            for p in own.values():
                p.grad *= 64
            optimizer.step()
            other.step()
            assert close(own, theirs)
        held = {n: p.detach().clone() for n, p in own.items()}
        own['norm'].grad[2] = float('nan')  # the store sees it, the residual does not keep it
        optimizer.step()
        assert optimizer.step_was_skipped and equal(own, held)
        own['norm'].grad[2] = 1.0
        optimizer.step()
        assert not optimizer.step_was_skipped and all(p.isfinite().all() for p in own.values())


def test_what_is_left_out_is_sent_later(root):
    p = torch.nn.Parameter(torch.zeros(10))
    with SGD([('p', p)], root, lr=1.0, topk=0.1, param_dtype=torch.float32) as optimizer:
        for _ in range(100):
            p.grad = torch.arange(1.0, 11.0)
            optimizer.step()
        sent, all_of_it = -p.detach(), 100 * torch.arange(1.0, 11.0)
        assert (all_of_it - sent).max() <= 10 * 10 * 2  # bounded, whatever the number of steps
        assert (sent > 0).all()
    with pytest.raises(ValueError, match='fraction'):
        ErrorFeedback(0.0)


# ----------------------------------------------------------- several processes

LOGGED = {'durable_every': 50, 'redo': True}


def train_part(rank, world, barrier, root, dtype, passes, results):
    """One process of several: all compute the same gradients here, each writes its part."""
    try:
        torch.set_num_threads(1)
        own = parameters(seed=rank)  # those of rank 0 count
        with AdamW(own.items(), root, lr=LR, param_dtype=dtype, **LOGGED,
                   accumulate=passes, shard=Shard(rank, world, lambda: barrier.wait(SECONDS_MAX))) as optimizer:
            steps_of(optimizer, own, passes)
            if rank:
                with pytest.raises(RuntimeError, match=f'rank 0 .* not on rank {rank} of {world}'):
                    optimizer.commit()
            assert optimizer.state_dict()['hitrain']['step'] == 3
            barrier.wait(SECONDS_MAX)
        results.put((rank, {n: p.detach().numpy() for n, p in own.items()}))
    except BaseException as e:
        barrier.abort()
        results.put((rank, e))
        raise


def steps_of(optimizer, own, passes):
    for step in range(3):
        optimizer.zero_grad()
        optimizer.param_groups[0]['lr'] = LR / (1 + step)
        for k in range(passes):
            loss_of(own, batch(step, k)).backward()
            if k < passes - 1:
                optimizer.send_gradients()
        optimizer.step()


@pytest.mark.parametrize('world, dtype, passes', [(2, torch.float32, 2)] +
                         [(3, torch.bfloat16, 1), (3, torch.bfloat16, 3)] * bool(os.environ.get('HITRAIN_LONG')))
def test_processes_write_a_part_each(store, root, world, dtype, passes):
    """After their steps the daemon is killed: the mount computes these again, from parts and from sums."""
    found = on_processes(world, train_part, world, PROCESSES.Barrier(world), root, dtype, passes)
    assert os.getxattr(root, 'user.hitrain.durable_step') == b'3'
    alone = parameters(seed=0)
    with AdamW(alone.items(), root.parent / 'alone', lr=LR, param_dtype=dtype, accumulate=passes) as optimizer:
        steps_of(optimizer, alone, passes)
    for part in found.values():
        assert not isinstance(part, BaseException), part
        assert equal({n: torch.from_numpy(part[n]) for n in part}, found_as_tensors(found[0]))
    assert close(found_as_tensors(found[0]), {n: p.detach() for n, p in alone.items()})
    stats = os.getxattr(root, 'user.hitrain.stats').decode().splitlines()
    assert [line for line in stats if line.startswith('logged_steps=')] == ['logged_steps=2']  # new parameters make the first one full
    store.kill()
    store.mount()
    again = parameters(seed=5)
    with AdamW(again.items(), root, lr=LR, param_dtype=dtype, accumulate=passes, resume=True, **LOGGED) as optimizer:
        assert optimizer.committed_step == 3
        assert equal(found_as_tensors(found[0]), {n: p.detach() for n, p in again.items()})


def found_as_tensors(part):
    return {n: torch.from_numpy(v) for n, v in part.items()}


def test_bad_shards(root):
    own = parameters()
    for options in ({'shard': Shard(2, 2, print)}, {'shard': Shard(0, 1, print), 'overlap': True},
                    {'shard': Shard(0, 1, print), 'topk': 0.5}):
        with pytest.raises(ValueError, match='shard'):
            AdamW(own.items(), root, **options)
    with AdamW(own.items(), root, shard=Shard(0, 1, int)) as optimizer:
        with pytest.raises(RuntimeError, match='shard'):  # each would write everything
            optimizer.send_gradient(own['norm'])


# ------------------------------------------------------------------ read ahead

def test_parameters_are_read_in_forward_order_and_before_use(root):
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    plain = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 64)
    theirs = torch.optim.AdamW(plain.parameters(), lr=LR)
    order = []
    with AdamW(reversed(list(model.named_parameters())), root, lr=LR, overlap=True) as optimizer:
        read = optimizer.receive_parameter
        names = {p: n for n, p in model.named_parameters()}
        optimizer.receive_parameter = lambda p: (order.append(names[p]), read(p))
        optimizer.read_ahead(model)
        for _ in range(5):
            for m, o in ((model, optimizer), (plain, theirs)):
                o.zero_grad()
                m(x).pow(2).sum().backward()
                o.step()
        optimizer.wait()
        assert order[-12:] == [n for n, _ in model.named_parameters()]
        assert close(dict(model.named_parameters()), dict(plain.named_parameters()))
        with pytest.raises(ValueError, match='belong to no module'):
            optimizer.read_ahead(model[0])
    assert not model[0]._forward_pre_hooks
    model(x)
