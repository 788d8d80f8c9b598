# SPDX-License-Identifier: Apache-2.0
"""The optimizers behave as those of torch.optim: arguments, hooks, checkpoints, schedulers, scalers. Tables beside torch.optim."""
import copy
import inspect
import io
import os
import re
import threading
import time
import warnings
import weakref

import pytest

from trainer import LR, SECONDS_MAX, close, equal, give_gradients, on_threads, random_parameters, shared_root as root, shared_store, take_steps  # first: it makes the client importable
import torch
import hitrain
from hitrain import _files, _gather

SHAPES = {'w': (30, 100), 'bias': (100,), 'norm': (7,), 'scale': ()}
RULES = ['AdamW', 'Adam', 'SGD', 'Adagrad']
FREE = ['foreach', 'fused', 'capturable']
REFUSED = {'differentiable': True, 'amsgrad': True, 'decoupled_weight_decay': True, 'initial_accumulator_value': 0.1}


def parameters(seed=0):
    return random_parameters(SHAPES, seed)


def kinds(rule):
    return getattr(hitrain, rule), getattr(torch.optim, rule)


def open_step(root):
    return int(os.getxattr(root, 'user.hitrain.step_open'))


# ---------------------------------------------------------------- arguments

@pytest.mark.parametrize('rule', RULES)
def test_each_flag_of_torch_is_accepted_or_refused_by_name(root, rule):
    own, theirs = kinds(rule)
    known = [f for f in [*FREE, *REFUSED] if f in inspect.signature(theirs).parameters]
    assert 'foreach' in known
    for number, flag in enumerate(known):
        for value in (None, False, REFUSED.get(flag, True)):
            params = {'bias': torch.nn.Parameter(torch.ones(3))}
            where = root.parent / f'{number}{value}'
            if flag in REFUSED and value:
                with pytest.raises(ValueError, match=f'{flag}={value} is not implemented in the store'):
                    own(params.items(), where, **{flag: value})
                assert not where.exists()
                continue
            with own(params.items(), where, lr=1.0, **{flag: value}) as optimizer:
                params['bias'].grad = torch.ones(3)
                optimizer.step()
                assert optimizer.committed_step == 1 and not torch.equal(params['bias'], torch.ones(3))
    with pytest.raises(TypeError, match=f'{rule} has no option rho'):
        own(parameters().items(), root, rho=0.9)
    assert not root.exists()


BAD = [('AdamW', {'lr': -1.0}), ('AdamW', {'lr': float('nan')}), ('AdamW', {'betas': (1.0, 0.9)}), ('AdamW', {'betas': (0.9, -0.1)}),
       ('Adam', {'eps': -1e-8}), ('Adam', {'weight_decay': -0.1}), ('SGD', {'momentum': -0.9}), ('SGD', {'nesterov': True}),
       ('SGD', {'nesterov': True, 'momentum': 0.9, 'dampening': 0.1}), ('Adagrad', {'lr_decay': -1.0}), ('Adagrad', {'eps': -1.0})]


@pytest.mark.parametrize('rule, options', BAD, ids=str)
def test_what_torch_refuses_is_refused(root, rule, options):
    own, theirs = kinds(rule)
    with pytest.raises(ValueError):
        theirs(parameters().values(), **{'lr': LR, **options})
    with pytest.raises(ValueError, match=list(options)[0]):
        own(parameters().items(), root, **{'lr': LR, **options})
    assert not root.exists()
    with own(parameters().items(), root, lr=LR) as optimizer:  # also for one group
        with pytest.raises(ValueError, match=list(options)[0]):
            optimizer.add_param_group({'params': [('late', torch.nn.Parameter(torch.zeros(2)))], **options})
        assert len(optimizer.param_groups) == 1 and not (root / 'late').exists()


@pytest.mark.parametrize('given', ['one group', 'two groups', 'scheduled'])
@pytest.mark.parametrize('rule', RULES)
def test_a_learning_rate_may_be_a_tensor(root, rule, given):
    own_kind, their_kind = kinds(rule)
    own, theirs = parameters(), parameters()
    rate = float(torch.tensor(LR))  # as the tensor has it

    def groups(params, lr):
        listed = list(params)
        return [{'params': listed[:2]}, {'params': listed[2:], 'lr': lr / 4}] if given == 'two groups' else listed
    other = their_kind(groups(theirs.values(), rate), lr=rate)
    with own_kind(groups(own.items(), torch.tensor(LR)), root, lr=torch.tensor(LR)) as optimizer:
        for step in range(6):
            for params, o in ((own, optimizer), (theirs, other)):
                give_gradients(params, step)
                o.step()
            if given == 'scheduled':  # as schedulers of PyTorch 2 do
                optimizer.param_groups[0]['lr'].mul_(0.5)
                other.param_groups[0]['lr'] *= 0.5
        assert close(own, theirs)
        saved = optimizer.state_dict()
        kept = float(saved['param_groups'][0]['lr'])
        optimizer.load_state_dict(saved)
        optimizer.param_groups[0]['lr'].mul_(0.5)  # and not that of the state_dict
        assert float(saved['param_groups'][0]['lr']) == kept
    with pytest.raises(ValueError, match='lr must be one number, not a tensor of 2'):
        own_kind(parameters().items(), root.parent / 'other', lr=torch.tensor([LR, LR]))
    if 'betas' in other.defaults:
        with pytest.raises(ValueError, match='betas must be one number, not a tensor of 2'):
            own_kind(parameters().items(), root.parent / 'other', betas=(0.9, torch.tensor([0.9, 0.9])))


# -------------------------------------------------------------- a step's parts

PRESENT = [('w', 'bias', 'norm', 'scale'), ('w',), (), ('bias', 'scale'), ('w', 'bias', 'norm', 'scale'), ('norm',)]


@pytest.mark.parametrize('set_to_none', [True, False])
@pytest.mark.parametrize('rule', RULES)
def test_parameters_without_a_gradient_stay(root, rule, set_to_none):
    """A gradient that zero_grad has set to zero is one, as in torch: moments decay, and weights do."""
    own_kind, their_kind = kinds(rule)
    own, theirs = parameters(), parameters()
    other = their_kind(theirs.values(), lr=LR, weight_decay=0.1)
    with own_kind(own.items(), root, lr=LR, weight_decay=0.1) as optimizer:
        for step, names in enumerate(PRESENT):
            for params, o in ((own, optimizer), (theirs, other)):
                o.zero_grad(set_to_none=set_to_none)
                random = torch.Generator().manual_seed(step)
                for n in names:
                    loss = (params[n] * torch.randn(params[n].shape, generator=random)).sum()
                    loss.backward()
                o.step()
            assert close(own, theirs), step
        made = sum(1 for names in PRESENT if names) if set_to_none else len(PRESENT)
        assert optimizer.committed_step == made


def test_a_closure_is_called_and_its_loss_returned(root):
    own, theirs = parameters(), parameters()
    other = torch.optim.SGD(theirs.values(), lr=LR)
    with hitrain.SGD(own.items(), root, lr=LR) as optimizer:
        for params, o in ((own, optimizer), (theirs, other)):
            def closure():
                assert torch.is_grad_enabled()
                loss = (params['norm'] ** 2).sum()
                loss.backward()
                return loss
            loss = o.step(closure)
            assert loss.item() == (parameters()['norm'] ** 2).sum().item()
    assert close(own, theirs)


@pytest.mark.parametrize('overlap', [False, True])
def test_a_sparse_gradient_is_refused_before_anything_is_sent(root, monkeypatch, overlap):
    dense, rows = torch.nn.Linear(4, 4), torch.nn.Embedding(7, 4, sparse=True)
    named = [*dense.named_parameters(), ('rows', rows.weight)]
    before = {n: p.detach().clone() for n, p in named}
    sent = []
    real = _files.ParameterFile.write_gradient
    monkeypatch.setattr(_files.ParameterFile, 'write_gradient', lambda f, *args: (sent.append(f.name), real(f, *args)))
    together = _gather.Gather.write
    monkeypatch.setattr(_gather.Gather, 'write', lambda g, run: (sent.extend(run.names), together(g, run)))
    with hitrain.SGD(named, root, lr=LR, overlap=overlap) as optimizer:
        with optimizer.hold_gradients():
            dense(rows(torch.tensor([1, 2]))).sum().backward()
        for call in (optimizer.step, optimizer.send_gradients):
            with pytest.raises(TypeError, match='the gradient of rows is sparse; only dense ones can be sent'):
                call()
            assert sent == [] and open_step(root) == 0
        rows.weight.grad = rows.weight.grad.to_dense()
        optimizer.step()
        assert set(sent) == {n for n, _ in named} and optimizer.committed_step == 1
    assert not any(torch.equal(before[n], p) for n, p in named)


def test_hooks_of_a_step(root):
    own, theirs = parameters(), parameters()
    other = torch.optim.AdamW(theirs.values(), lr=LR)
    with hitrain.AdamW(own.items(), root, lr=LR) as optimizer:
        if not hasattr(optimizer, 'register_step_pre_hook'):
            pytest.skip('PyTorch before 2.0 has no hooks of steps')
        calls = {optimizer: [], other: []}
        for params, o in ((own, optimizer), (theirs, other)):
            def halve(o, args, kwargs, params=params):
                calls[o].append('pre')
                for p in params.values():
                    p.grad *= 0.5
            first, second = o.register_step_pre_hook(halve), o.register_step_post_hook(lambda o, args, kwargs: calls[o].append('post'))
            take_steps(o, params, 0, 3)
            first.remove()
            second.remove()
            give_gradients(params, 3)
            o.step()
        assert calls[optimizer] == calls[other] == ['pre', 'post'] * 3
        assert close(own, theirs)


def test_a_step_cannot_be_captured(root, monkeypatch):
    own = parameters()
    with hitrain.AdamW(own.items(), root, lr=LR, capturable=True) as optimizer:
        give_gradients(own, 0)
        with monkeypatch.context() as m:
            m.setattr(torch.cuda, 'is_initialized', lambda: True)
            m.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
            with pytest.raises(RuntimeError, match='a CUDA graph cannot hold a step of the store'):
                optimizer.step()
        assert open_step(root) == 0
        optimizer.step()


# ------------------------------------------------- schedulers, scalers, saving

SCHEDULERS = {
    'StepLR': lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    'ExponentialLR': lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
    'LambdaLR': lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    'CosineAnnealingLR': lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    'OneCycleLR': lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=LR, total_steps=20),  # changes betas, too
    'SequentialLR': lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.8)], [3]),
    'ReduceLROnPlateau': lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize('name', SCHEDULERS)
@pytest.mark.parametrize('rule', ['AdamW', 'SGD'])
def test_schedulers_change_the_same_numbers(root, rule, name):
    own_kind, their_kind = kinds(rule)
    own, theirs = parameters(), parameters()
    options = {'momentum': 0.9} if rule == 'SGD' else {}
    other = their_kind(theirs.values(), lr=LR, **options)
    with warnings.catch_warnings(), own_kind(own.items(), root, lr=LR, **options) as optimizer:
        warnings.simplefilter('error')  # as that a scheduler steps before the optimizer
        warnings.filterwarnings('ignore', message='The epoch parameter')  # of PyTorch's own SequentialLR
        for params, o in ((own, optimizer), (theirs, other)):
            schedule = SCHEDULERS[name](o)
            for step in range(8):
                give_gradients(params, step)
                o.step()
                schedule.step(*([1.0] if name == 'ReduceLROnPlateau' else []))
        for key in ('lr', 'betas', 'momentum'):
            assert optimizer.param_groups[0].get(key) == other.param_groups[0].get(key), key
        assert close(own, theirs)


def test_a_scaler_scales_unscales_and_skips(root):
    if not hasattr(torch.amp, 'GradScaler'):
        pytest.skip('PyTorch before 2.3 has no scaler for the CPU')
    own, theirs = parameters(), parameters()
    other = torch.optim.AdamW(theirs.values(), lr=LR)
    with hitrain.AdamW(own.items(), root, lr=LR) as optimizer:
        for params, o in ((own, optimizer), (theirs, other)):
            scaler = torch.amp.GradScaler('cpu', init_scale=1024.0, growth_interval=2)
            for step in range(8):
                o.zero_grad()
                loss = sum((p ** 2).sum() for p in params.values()) * (float('inf') if step == 4 else 1.0)
                scaler.scale(loss).backward()
                scaler.unscale_(o)
                torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
                scaler.step(o)
                scaler.update()
            assert scaler.get_scale() == 1024.0 * 2 ** 2 / 2 * 2
        assert optimizer.committed_step == 7
        assert close(own, theirs)


def through_a_file(saved):
    """torch.save, and torch.load as trainers call it."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    safe = {'weights_only': True} if int(torch.__version__.split('.')[0]) >= 2 else {}
    return torch.load(file, **safe)


@pytest.mark.parametrize('rule', RULES)
def test_a_state_dict_is_saved_and_loaded(root, rule):
    own_kind, their_kind = kinds(rule)
    own = parameters()
    listed = list(own.items())
    groups = [{'params': listed[:1]}, {'params': listed[1:], 'lr': LR / 2, 'weight_decay': 0.1}]
    with own_kind(groups, root, lr=LR) as optimizer:
        give_gradients(own, 0)
        optimizer.step()
        saved = through_a_file(optimizer.state_dict())
    theirs = their_kind([{**g, 'params': [p for _, p in g['params']]} for g in groups], lr=LR).state_dict()
    assert [g['params'] for g in saved['param_groups']] == [g['params'] for g in theirs['param_groups']]
    assert [g['names'] for g in saved['param_groups']] == [['w'], ['bias', 'norm', 'scale']]
    for ours, other in zip(saved['param_groups'], theirs['param_groups']):
        assert all(ours[k] == other[k] for k in ours if k in other)
    again = parameters(seed=1)
    listed = list(again.items())
    with own_kind([{'params': listed[:1]}, {'params': listed[1:]}], root, resume=True) as optimizer:
        optimizer.load_state_dict(saved)
        assert [g['lr'] for g in optimizer.param_groups] == [LR, LR / 2]
        assert equal(again, own) and optimizer.param_groups[1]['weight_decay'] == 0.1


def test_adamw_of_pytorch_2_is_adam_with_a_flag(root):
    """Its state_dict says so. The store's AdamW takes it, and its Adam does not."""
    groups = [{'params': [0], 'lr': 0.5, 'betas': (0.9, 0.999), 'eps': 1e-8, 'weight_decay': 0.1, 'decoupled_weight_decay': True}]
    with hitrain.AdamW([('p', torch.nn.Parameter(torch.zeros(2)))], root, lr=LR) as optimizer:
        optimizer.import_state({'state': {}, 'param_groups': groups})
        assert optimizer.param_groups[0]['lr'] == 0.5
    with hitrain.Adam([('p', torch.nn.Parameter(torch.zeros(2)))], root.parent / 'adam', lr=LR) as optimizer:
        with pytest.raises(ValueError, match='decoupled_weight_decay=True is not implemented'):
            optimizer.import_state({'state': {}, 'param_groups': groups})


def test_a_rule_without_state_takes_an_empty_one(root):
    """PyTorch 2 writes that for SGD without momentum. With momentum an empty state is none."""
    groups = [{'params': [0], 'lr': 0.5, 'momentum': 0.0}]
    with hitrain.SGD([('p', torch.nn.Parameter(torch.zeros(2)))], root, lr=LR) as optimizer:
        optimizer.load_state_dict({'state': {}, 'param_groups': groups})
        assert optimizer.param_groups[0]['lr'] == 0.5
        groups[0]['momentum'] = 0.9
        with pytest.raises(ValueError, match='has no state to import'):
            optimizer.load_state_dict({'state': {}, 'param_groups': groups})
        with pytest.raises(ValueError, match='has no state to import'):
            optimizer.load_state_dict({})


def test_code_that_looks_for_state_finds_some(root):
    """PyTorch's distributed checkpoints make a step when `optimizer.state` is false, and would change the model."""
    with hitrain.AdamW(parameters().items(), root, lr=LR) as optimizer:
        assert optimizer.state and len(optimizer.state) == 0 and list(optimizer.state.items()) == []


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('rule', RULES)
def test_a_full_state_dict_goes_back_to_any_step(root, rule, dtype):
    own = parameters()

    def run(optimizer, first, last):
        take_steps(optimizer, own, first, last)
        return {n: p.detach().clone() for n, p in own.items()}
    with getattr(hitrain, rule)(own.items(), root, lr=LR, param_dtype=dtype, full_state_dict=True) as optimizer:
        values = run(optimizer, 0, 3)
        saved = through_a_file(optimizer.state_dict())
        once = run(optimizer, 3, 6)
        optimizer.param_groups[0]['lr'] = 1.0
        run(optimizer, 6, 8)
    again = {n: torch.nn.Parameter(torch.zeros_like(p)) for n, p in own.items()}
    own = again
    with getattr(hitrain, rule)(own.items(), root, lr=1.0, param_dtype=dtype, full_state_dict=True, resume=True) as optimizer:
        with torch.no_grad():
            for n, p in own.items():
                p.copy_(values[n])
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]['lr'] == LR and optimizer.committed_step == 8
        assert equal(run(optimizer, 3, 6), once)


def with_another_shape(saved, name):
    other = copy.deepcopy(saved)
    other['state'][2][name] = torch.zeros(8)
    return other


OTHERS = {
    'shape': (lambda saved: with_another_shape(saved, 'exp_avg_sq'), 'exp_avg_sq of norm has the shape'),
    'shape of a master': (lambda saved: with_another_shape(saved, 'master'), 'master of norm has the shape'),
    'names': (lambda saved: {**saved, 'param_groups': [{**g, 'names': ['w', 'bias', 'scale', 'norm']} for g in saved['param_groups']]}, 'other parameters'),
    'groups': (lambda saved: {**saved, 'param_groups': saved['param_groups'] * 2}, 'other parameters'),
    'rule': (lambda saved: {**saved, 'state': {**saved['state'], 3: {'step': saved['state'][3]['step'], 'sum': torch.tensor(0.0)}}}, 'of another rule'),
}


@pytest.mark.parametrize('kind', OTHERS)
def test_state_of_another_model_changes_nothing(root, kind):
    own, change = parameters(), OTHERS[kind]
    with hitrain.AdamW(own.items(), root, lr=LR, param_dtype=torch.bfloat16, full_state_dict=True) as optimizer:
        def everything():
            state = [optimizer.read_state(p, name) for p in own.values() for name in ('step', 'exp_avg', 'exp_avg_sq', 'master')]
            return [t.clone() for t in state], copy.deepcopy(optimizer.state_dict()['param_groups'])
        give_gradients(own, 0)
        optimizer.step()
        saved = optimizer.state_dict()
        saved['param_groups'][0]['lr'] = 1.0
        give_gradients(own, 1)
        optimizer.step()
        state, groups = everything()
        with pytest.raises(ValueError, match=change[1]):
            optimizer.load_state_dict(change[0](saved))
        now, groups_now = everything()
        assert all(torch.equal(a, b) for a, b in zip(state, now)) and groups == groups_now and groups[0]['lr'] == LR
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # the masters are not those of the present values
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]['lr'] == 1.0


@pytest.mark.parametrize('rule', RULES)
def test_state_of_torch_is_taken(root, rule):
    own_kind, their_kind = kinds(rule)
    own, theirs = parameters(), parameters()
    options = {'momentum': 0.9} if rule == 'SGD' else {}  # without it PyTorch 2 has no state
    other = their_kind(theirs.values(), lr=LR, weight_decay=0.1, **options)
    give_gradients(theirs, 0)
    other.step()
    saved = other.state_dict()
    if rule in ('AdamW', 'Adam'):  # PyTorch 2.7 has it, and others do not
        saved['param_groups'][0]['decoupled_weight_decay'] = rule == 'AdamW'
    with own_kind(own.items(), root, lr=1.0) as optimizer:
        for n, p in own.items():
            p.data.copy_(theirs[n].detach())
        optimizer.load_state_dict(saved)
        for step in (1, 2):
            for params, o in ((own, optimizer), (theirs, other)):
                give_gradients(params, step)
                o.step()
        assert close(own, theirs)
        if rule == 'Adam':
            saved['param_groups'][0]['decoupled_weight_decay'] = True
            with pytest.raises(ValueError, match='decoupled_weight_decay=True is not implemented'):
                optimizer.load_state_dict(saved)


def test_a_buffer_that_torch_has_not_made_is_forgotten(root):
    own, theirs = parameters(), parameters()
    other = torch.optim.SGD(theirs.values(), lr=LR, momentum=0.9)
    with hitrain.SGD(own.items(), root, lr=LR, momentum=0.9) as optimizer:
        give_gradients(own, 0)
        optimizer.step()
        for n, p in own.items():
            p.data.copy_(theirs[n].detach())
        before = other.state_dict()
        before['state'] = {i: {'momentum_buffer': None} for i in range(len(own))}
        optimizer.load_state_dict(before)
        for step in (1, 2):
            for params, o in ((own, optimizer), (theirs, other)):
                give_gradients(params, step)
                o.step()
        assert close(own, theirs)


@pytest.mark.parametrize('full', [False, True])
def test_keys_of_groups_are_kept_and_copied(root, full):
    """Schedulers that continue need initial_lr, which one of the run's begin has put there."""
    own, again = parameters(), parameters(1)
    listed = list(own.items())
    groups = [{'params': listed[:2], 'mine': ['a']}, {'params': listed[2:], 'lr': torch.tensor(LR)}]
    with hitrain.AdamW(groups, root, lr=LR, full_state_dict=full) as optimizer:
        torch.optim.lr_scheduler.StepLR(optimizer, 2)
        give_gradients(own, 0)
        optimizer.step()
        saved = optimizer.state_dict()
        assert 'initial_lr' in saved['param_groups'][0]
    saved['param_groups'][1].update(foreach=True, param_names=['x', 'y'])
    if full:
        del saved['param_groups'][0]['names']
    listed = list(again.items())
    with hitrain.AdamW([{'params': listed[:2]}, {'params': listed[2:]}], root, full_state_dict=full, resume=True) as optimizer:
        if not full:
            saved['param_groups'][1].pop('param_names')
        optimizer.load_state_dict(saved)
        first, second = optimizer.param_groups
        assert first['initial_lr'] == first['lr'] == LR and first['mine'] == ['a'] and float(second['lr']) == float(torch.tensor(LR))
        assert 'param_names' not in second and first['names'] == ['w', 'bias']
        torch.optim.lr_scheduler.StepLR(optimizer, 2, last_epoch=1)
        first['mine'].append('b')
        second['lr'].mul_(0.5)
        assert saved['param_groups'][0]['mine'] == ['a'] and float(saved['param_groups'][1]['lr']) == float(torch.tensor(LR))


def test_masters_of_other_values_are_not_taken(root):
    own = parameters()
    with hitrain.AdamW(own.items(), root, lr=LR, param_dtype=torch.bfloat16, full_state_dict=True) as optimizer:
        give_gradients(own, 0)
        optimizer.step()
        saved = optimizer.state_dict()
        give_gradients(own, 1)
        optimizer.step()
        with pytest.warns(RuntimeWarning, match='load the model before the optimizer'):
            optimizer.load_state_dict(saved)
        give_gradients(own, 2)
        optimizer.send_gradient(own['w'])
        with pytest.raises(RuntimeError, match='no state is whole'):
            optimizer.state_dict()
        optimizer.step()
        assert optimizer.committed_step == 3


def test_a_wrapper_that_shares_everything_may_end(root):
    """Lightning's wrapper is an object of a class below the optimizer's, with all its attributes."""
    own = parameters()
    with hitrain.AdamW(own.items(), root, lr=LR) as optimizer:
        wrapper = object.__new__(type('Wrapper', (hitrain.AdamW,), {}))
        wrapper.__dict__ = dict(optimizer.__dict__)
        del wrapper
        give_gradients(own, 0)
        optimizer.step()
        assert optimizer.committed_step == 1


def test_hooks_of_state_dicts(root):
    own = parameters()
    with hitrain.AdamW(own.items(), root, lr=LR) as optimizer:
        if not hasattr(optimizer, 'register_load_state_dict_post_hook'):
            pytest.skip('PyTorch before 2.2 has no hooks of state_dicts')
        calls = []
        optimizer.register_state_dict_pre_hook(lambda o: calls.append('before saving'))
        optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, 'mine': 1})
        optimizer.register_load_state_dict_pre_hook(lambda o, saved: calls.append(saved.pop('mine')))
        optimizer.register_load_state_dict_post_hook(lambda o: calls.append('after loading'))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        assert calls == ['before saving', 1, 'after loading'] and saved['mine'] == 1


@pytest.mark.parametrize('group', [False, True])
@pytest.mark.parametrize('kind', [set, frozenset, weakref.WeakSet, lambda params: iter(set(params))], ids=['set', 'frozenset', 'WeakSet', 'iterator'])
def test_a_set_of_parameters_has_no_order(root, kind, group):
    """In another run they would have other places, and so other names."""
    params = parameters()
    given = kind(params.values())
    with pytest.raises(TypeError, match=f'must have an order that is the same in each run.*a {type(given).__name__} has none'):
        hitrain.AdamW([{'params': given}] if group else given, root)
    with pytest.raises(TypeError, match='names must have an order'):
        hitrain.AdamW(parameters().values(), root, names=set(SHAPES))
    assert not root.exists()


FLAT = torch.zeros(200)
TOGETHER = {
    'the same': (FLAT[:4], FLAT[:4]), 'a part': (FLAT[:20].view(4, 5), FLAT[19:30]), 'within': (FLAT, FLAT[70:71]),
    'a column': (FLAT.view(20, 10), FLAT.view(20, 10)[:, 3]), 'columns': (FLAT.view(20, 10)[:, :4], FLAT.view(20, 10)[:, 3:5]),
    'two dtypes': (FLAT[:4], FLAT.view(torch.bfloat16)[7:9]), 'transposed': (FLAT[:100].view(10, 10).t(), FLAT[50:60]),
}
APART = {
    'halves': (FLAT[:100], FLAT[100:]), 'columns': (FLAT.view(20, 10)[:, :4], FLAT.view(20, 10)[:, 4:]),
    'odd and even': (FLAT[::2], FLAT[1::2]), 'blocks': (FLAT.view(20, 10)[:10, :5], FLAT.view(20, 10)[5:, 5:]),
}


@pytest.mark.parametrize('pair', TOGETHER.values(), ids=TOGETHER)
def test_two_parameters_in_one_memory_are_refused(root, pair):
    """Each update would change the other one, too, and one would be lost."""
    one, other = (torch.nn.Parameter(t) for t in pair)
    between = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match='(one|other) and (one|other) are two parameters in one memory: make them one parameter'):
        hitrain.SGD([('one', one), ('between', between), ('other', other)], root, lr=1.0)
    with hitrain.SGD([('one', one)], root, lr=1.0) as optimizer:
        with pytest.raises(ValueError, match='are two parameters in one memory'):
            optimizer.add_param_group({'params': [('other', other)]})
        assert len(optimizer.param_groups) == 1 and os.listdir(root) == ['one']


@pytest.mark.parametrize('overlap', [False, True])
def test_two_parameters_that_get_one_memory_later_are_refused(root, overlap):
    """As by `q.data = p.data`. The step changes nothing, and the next one goes on as soon as they are apart."""
    one, between, other = (torch.nn.Parameter(torch.ones(5)) for _ in range(3))
    with hitrain.SGD([('one', one), ('between', between), ('other', other)], root, lr=1.0, overlap=overlap) as optimizer:
        def give_gradients():
            optimizer.zero_grad()
            (one.sum() + between.sum() + 2 * other.sum()).backward()
        give_gradients()
        optimizer.step()
        other.data = one.data
        for _ in range(2):
            give_gradients()
            with pytest.raises(ValueError, match='(one|other) and (one|other) are two parameters in one memory: make them one parameter'):
                optimizer.step()
            assert os.getxattr(root, 'user.hitrain.step') == b'1' and os.getxattr(root, 'user.hitrain.step_open') == b'0'
        other.data = torch.full((5,), 4.0)
        give_gradients()
        optimizer.step()
        assert [p.tolist() for p in (one, between, other)] == [[-1.0] * 5, [-1.0] * 5, [2.0] * 5]


@pytest.mark.parametrize('pair', APART.values(), ids=APART)
def test_two_parameters_beside_each_other_are_taken(root, pair):
    FLAT.zero_()
    own = {n: torch.nn.Parameter(t) for n, t in zip('ab', pair)}
    with hitrain.SGD(own.items(), root, lr=1.0) as optimizer:
        for n, p in own.items():
            p.grad = torch.full(p.shape, 2.0 if n == 'a' else 3.0)
        optimizer.step()
    assert torch.equal(own['a'], torch.full_like(own['a'], -2.0)) and torch.equal(own['b'], torch.full_like(own['b'], -3.0))


def test_an_expanded_parameter_is_refused(root):
    with pytest.raises(ValueError, match='elements of p are in one memory, as after expand'):
        hitrain.SGD([('p', torch.nn.Parameter(torch.ones(1).expand(5)))], root, lr=1.0)


CALLS = {'step()': lambda o, p: o.step(), 'send_gradients()': lambda o, p: o.send_gradients(), 'commit()': lambda o, p: o.commit(),
         'abort()': lambda o, p: o.abort(), 'backward() or send_gradient()': lambda o, p: o.send_gradient(p)}


def test_one_thread_at_a_time_uses_an_optimizer(root, monkeypatch):
    """Another one is told so, and the step in the first one ends as it would without it."""
    own, theirs = parameters(), parameters()
    other = torch.optim.SGD(theirs.values(), lr=1.0)
    within, on = threading.Event(), threading.Event()
    with hitrain.SGD(own.items(), root, lr=1.0) as optimizer:
        give_gradients(own, 0)
        command = optimizer._root.command

        def wait(*lines, **options):
            within.set()
            assert on.wait(SECONDS_MAX)
            command(*lines, **options)
        with monkeypatch.context() as m:
            m.setattr(optimizer._root, 'command', wait)
            thread = threading.Thread(target=optimizer.step, name='first')
            thread.start()
            assert within.wait(SECONDS_MAX)
            for what, call in CALLS.items():
                with pytest.raises(RuntimeError, match=re.escape(what) + r' in the thread MainThread while step\(\) runs in first'):
                    call(optimizer, own['w'])
            on.set()
            thread.join()
        give_gradients(theirs, 0)
        other.step()
        assert equal(own, theirs) and optimizer._step == 1
        give_gradients(own, 1)
        give_gradients(theirs, 1)

        def closure():  # as on a GPU, whose backward has a thread of its own
            inner = threading.Thread(target=optimizer.send_gradients)
            inner.start()
            inner.join()
            give_gradients(own, 1)
        optimizer.accumulate = 2
        give_gradients(own, 1)
        optimizer.step(closure)
        other.step()
        other.step()
        assert close(own, theirs)


def test_gradients_of_two_threads_of_backward_wait_for_each_other(root):
    """PyTorch runs backward of each device in a thread of its own."""
    params = {n: torch.nn.Parameter(torch.ones(1000)) for n in 'ab'}
    with hitrain.AdamW(params.items(), root, lr=LR, overlap=True) as optimizer:
        real, begun, ended = optimizer._check_room, threading.Event(), []

        def slow(f):
            if f.name == 'a':
                begun.set()
                time.sleep(0.2)  # the other one comes
            real(f)
        optimizer._check_room = slow

        def backward(rank):
            if rank == 1:
                assert begun.wait(SECONDS_MAX)
            params['ab'[rank]].sum().backward()
            ended.append(rank)
        on_threads(2, backward)
        assert sorted(ended) == [0, 1]
        optimizer.step()
        assert optimizer.committed_step == 1
