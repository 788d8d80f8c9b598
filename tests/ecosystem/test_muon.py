# SPDX-License-Identifier: Apache-2.0
"""hitrain.Muon beside torch.optim.Muon, which older versions of PyTorch lack, and its state in both directions."""
import copy
import math

import pytest

import page  # noqa: F401  first: it makes the client importable
from trainer import shared_root as root, shared_store
import torch
from torch import nn
import hitrain
from hitrain._newton_schulz import Iteration, orthogonalized

STEPS = 200
SHAPES = {'wide': (24, 40), 'tall': (40, 24), 'square': (32, 32), 'row': (1, 24)}
OPTIONS = [{}, {'nesterov': False}, {'momentum': 0.4}, {'momentum': 0.0}, {'weight_decay': 0.0}, {'adjust_lr_fn': 'original'},
           {'adjust_lr_fn': 'match_rms_adamw'}, {'adjust_lr_fn': 'spectral_unclamped'}, {'ns_steps': 3}, {'ns_coefficients': (2.0, -1.5, 0.5)}, {'eps': 10.0}]


def parameters(shapes, dtype=torch.float32):
    random = torch.Generator().manual_seed(1)
    return {n: nn.Parameter(torch.randn(s, generator=random).to(dtype)) for n, s in shapes.items()}


def gradient(shape, step, name):
    random = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return torch.randn(shape, generator=random) + 0.3


def relative(own, theirs):
    return max(((own[n] - p).norm() / p.norm()).item() for n, p in theirs.items())


@pytest.mark.parametrize('form', [(24, 40), (40, 24), (33, 33), (1, 9), (7, 1)], ids=str)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_newton_schulz_has_the_bits_of_torch(form, dtype):
    from torch.optim._muon import _zeropower_via_newtonschulz
    update = torch.randn(form, generator=torch.Generator().manual_seed(2)).to(dtype)
    for iteration in (Iteration(), Iteration(steps=2, coefficients=(2.0, -1.5, 0.5), eps=10.0)):
        wanted = _zeropower_via_newtonschulz(update, iteration.coefficients, iteration.steps, iteration.eps)
        assert torch.equal(orthogonalized(update, (form[0],), iteration), wanted)


@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_steps_are_those_of_torch(root, options):
    own, theirs = parameters(SHAPES), parameters(SHAPES)
    other = torch.optim.Muon(theirs.values(), lr=0.02, **options)
    with hitrain.Muon(own.items(), root, lr=0.02, durable_every=STEPS, **options) as optimizer:
        for step in range(STEPS):
            for params, o in ((own, optimizer), (theirs, other)):
                for n, p in params.items():
                    p.grad = gradient(SHAPES[n], step, n)
                o.step()
        state = {n: optimizer.read_state(p, 'momentum_buffer') for n, p in own.items()}
    assert relative(own, theirs) < 1e-5
    assert relative(state, {n: other.state[p]['momentum_buffer'] for n, p in theirs.items()}) < 1e-5


def test_blocks_are_matrices_of_their_own(root):
    """The reference has a parameter for each block."""
    whole = parameters({'fused': (24, 16), 'heads': (32, 16), 'experts': (3, 20, 16), 'gates': (2, 12, 16)})
    split = {'fused': (8, 12, 4), 'heads': 8, 'gates': (4, 8)}
    blocks = {'fused': [(0, 8), (8, 20), (20, 24)], 'heads': [(i, i + 8) for i in range(0, 32, 8)], 'experts': [(0, 20)], 'gates': [(0, 4), (4, 12)]}
    cut = {n: [m[a:b] for m in ([p.detach()] if p.dim() == 2 else p.detach()) for a, b in blocks[n]] for n, p in whole.items()}
    theirs = {n: [nn.Parameter(b.clone()) for b in listed] for n, listed in cut.items()}
    for adjust in ('original', 'match_rms_adamw'):
        other = torch.optim.Muon([b for listed in theirs.values() for b in listed], lr=0.02, adjust_lr_fn=adjust)
        groups = [{'params': [(n, p)], 'split': split.get(n)} for n, p in whole.items()]
        with hitrain.Muon(groups, root.parent / adjust, lr=0.02, adjust_lr_fn=adjust, durable_every=STEPS) as optimizer:
            for step in range(STEPS // 4):
                for n, p in whole.items():
                    p.grad = gradient(p.shape, step, n)
                    grads = [m[a:b] for m in ([p.grad] if p.dim() == 2 else p.grad) for a, b in blocks[n]]
                    for b, g in zip(theirs[n], grads):
                        b.grad = g.clone()
                optimizer.step()
                other.step()
        for n, p in whole.items():
            got = [m[a:b] for m in ([p] if p.dim() == 2 else p) for a, b in blocks[n]]
            assert relative(dict(enumerate(got)), dict(enumerate(theirs[n]))) < 1e-5, n


def test_two_byte_parameters(root):
    """torch rounds parameters and momentum to bf16 in each step, and steps of that size are lost; the store has masters and f32 momentum. So
    the reference is torch.optim.Muon with f32 parameters, and the gradients that both get."""
    own, theirs = parameters(SHAPES, torch.bfloat16), {n: nn.Parameter(p.detach().float()) for n, p in parameters(SHAPES, torch.bfloat16).items()}
    other = torch.optim.Muon(theirs.values(), lr=1e-4)
    with hitrain.Muon(own.items(), root, lr=1e-4, durable_every=STEPS) as optimizer:
        for step in range(STEPS):
            for n, p in own.items():
                p.grad = gradient(SHAPES[n], step, n).bfloat16()
                theirs[n].grad = p.grad.float()
            optimizer.step()
            other.step()
        masters = {n: optimizer.read_state(p, 'master') for n, p in own.items()}
    assert relative(masters, theirs) < 1e-5
    assert all(torch.equal(own[n].detach(), m.bfloat16()) for n, m in masters.items())


@pytest.mark.parametrize('first', ['torch', 'store'])
def test_a_run_changes_between_torch_and_the_store(root, first):
    """With AdamW for a vector. Neither side is of other bits than a run without the change, within the last bits of f32."""
    shapes = {**SHAPES, 'bias': (9,)}
    own, theirs, straight = (parameters(shapes) for _ in range(3))

    def pair(params):
        return [torch.optim.Muon([params[n] for n in SHAPES], lr=0.02), torch.optim.AdamW([params['bias']], lr=1e-3)]

    def run(params, optimizers, steps):
        for step in steps:
            for n, p in params.items():
                p.grad = gradient(shapes[n], step, n)
            for o in optimizers:
                o.step()
    run(straight, pair(straight), range(8))
    groups = [{'params': [(n, own[n]) for n in SHAPES]}, {'params': [('bias', own['bias'])], 'use_muon': False, 'lr': 1e-3}]
    with hitrain.Muon(groups, root, lr=0.02) as optimizer:
        muon, adamw = pair(theirs)
        if first == 'torch':
            run(theirs, (muon, adamw), range(4))
            for n, p in own.items():
                p.data.copy_(theirs[n])
            optimizer.import_state({'muon': muon.state_dict(), 'adamw': adamw.state_dict()})
            assert optimizer.param_groups[0]['adjust_lr_fn'] is None and math.isclose(optimizer.param_groups[0]['eps'], 1e-7)
            run(own, (optimizer,), range(4, 8))
            assert relative(own, straight) < 1e-5
        else:
            run(own, (optimizer,), range(4))
            for n, p in theirs.items():
                p.data.copy_(own[n])
            muon.load_state_dict(copy.deepcopy(optimizer.export_state(rule='muon')))
            adamw.load_state_dict(optimizer.export_state(rule='adamw'))
            run(theirs, (muon, adamw), range(4, 8))
            assert relative(theirs, straight) < 1e-5


def test_what_torch_refuses_is_refused(root):
    matrix = [('w', nn.Parameter(torch.ones(4, 4)))]
    for bad in ({'lr': -1.0}, {'momentum': -0.5}, {'weight_decay': -1.0}, {'adjust_lr_fn': 'rms'}, {'lr': torch.ones(2)}):
        with pytest.raises(ValueError):
            torch.optim.Muon([p for _, p in matrix], **{'lr': 0.02, **bad})
        with pytest.raises(ValueError, match=list(bad)[0]):
            hitrain.Muon(matrix, root, **{'lr': 0.02, **bad})
    for optimizer in (torch.optim.Muon, hitrain.Muon):
        with pytest.raises(ValueError, match='trains matrices|only supports 2D'):
            optimizer([nn.Parameter(torch.ones(4))], **({'root': root} if optimizer is hitrain.Muon else {}))


def test_schedulers_hooks_and_closures(root):
    """Of PyTorch's base class; test_torch_contract.py has them for the other rules."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    calls = []
    with hitrain.Muon(hitrain.muon_groups(model, others={'lr': 1e-3}), root, lr=torch.tensor(0.02)) as optimizer:
        optimizer.register_step_post_hook(lambda *args: calls.append('step'))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** step)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 6)).square().sum()
            loss.backward()
            return loss
        losses = []
        for _ in range(3):
            losses.append(optimizer.step(closure).item())
            schedule.step()
        assert losses[0] > losses[1] > losses[2] and calls == ['step'] * 3
        assert [round(float(g['lr']), 7) for g in optimizer.param_groups] == [0.0025, 0.000125]
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.param_groups[0]['lr'] = 1.0
        optimizer.load_state_dict(saved)
        assert math.isclose(float(optimizer.param_groups[0]['lr']), 0.0025, rel_tol=1e-6)
