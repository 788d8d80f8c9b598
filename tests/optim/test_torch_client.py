# SPDX-License-Identifier: Apache-2.0
"""The PyTorch client against a mounted store: same numbers as torch.optim.AdamW, few bytes, clear errors, no lost step."""
import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from trainer import LR, SECONDS_MAX, TOP, assert_equal, give_gradients, random_parameters, root, store, take_steps, wait_for  # first: it makes the client importable
import torch
import hitrain
from hitrain import AdamW
from hitrain._root import Root

SHAPES = {'wide.weight': (300, 1000), 'wide.bias': (1000,), 'norm': (7,), 'scale': ()}


def parameters(seed=0, dtype=torch.float32):
    return random_parameters(SHAPES, seed, dtype)


def assert_close(left, right, most=1e-3 * LR):
    for name in left:
        assert (left[name] - right[name]).abs().max() <= most, name


def step_of(root):
    return int(os.getxattr(root, 'user.hitrain.step'))


# ------------------------------------------------------------------- numbers

def test_equals_torch_with_groups_and_a_scheduler(root):
    own, theirs = parameters(), parameters()

    def made(kind, params, pairs, *where):
        value = (lambda n: (n, params[n])) if pairs else (lambda n: params[n])
        groups = [{'params': [value('wide.weight')], 'weight_decay': 0.1},
                  {'params': [value(n) for n in ('wide.bias', 'norm', 'scale')], 'weight_decay': 0.0, 'lr': 2 * LR}]
        optimizer = kind(groups, *where, lr=LR, betas=(0.9, 0.95))
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    theirs_opt, theirs_plan = made(torch.optim.AdamW, theirs, False)
    own_opt, own_plan = made(AdamW, own, True, root)
    with own_opt:
        for step in range(20):
            for params, optimizer, plan in ((theirs, theirs_opt, theirs_plan), (own, own_opt, own_plan)):
                give_gradients(params, step)
                optimizer.step()
                plan.step()
        assert_close(own, theirs)
        assert own_opt.committed_step == 20
        moment = theirs_opt.state[theirs['wide.weight']]['exp_avg']
        assert torch.allclose(own_opt.read_state(own['wide.weight'], 'exp_avg'), moment, atol=1e-6)
        assert own_opt.read_state(own['scale'], 'step').item() == 20


@pytest.mark.parametrize('name, options', [
    ('Adam', {'weight_decay': 0.1}), ('SGD', {'weight_decay': 0.1}), ('Adagrad', {'lr_decay': 0.1}),
    ('SGD', {'momentum': 0.9, 'nesterov': True, 'weight_decay': 0.1}), ('SGD', {'momentum': 0.9, 'dampening': 0.1})])
def test_other_rules_equal_torchs(root, name, options):
    own, theirs = parameters(), parameters()
    other = getattr(torch.optim, name)(theirs.values(), lr=LR, **options)
    kind = getattr(hitrain, name)
    take_steps(other, theirs, 0, 10)
    with kind(own.items(), root, lr=LR, **options) as optimizer:
        take_steps(optimizer, own, 0, 5)
    resumed = {n: torch.nn.Parameter(torch.zeros_like(p)) for n, p in own.items()}
    with kind(resumed.items(), root, lr=LR, resume=True, **options) as optimizer:
        take_steps(optimizer, resumed, 5, 10)
    assert_close(resumed, theirs)
    with pytest.raises(OSError, match='another rule'):
        hitrain.Lion(resumed.items(), root, resume=True)


@pytest.mark.parametrize('name, options', [
    ('AdamW', {'weight_decay': 0.1}), ('SGD', {'momentum': 0.9, 'nesterov': True}), ('Adagrad', {})])
def test_a_run_moves_from_torch_to_the_store_and_back(root, name, options):
    plain, moving = parameters(), parameters()
    whole = getattr(torch.optim, name)(plain.values(), lr=LR, **options)
    first = getattr(torch.optim, name)(moving.values(), lr=LR, **options)
    take_steps(whole, plain, 0, 9)
    take_steps(first, moving, 0, 3)
    with getattr(hitrain, name)(moving.items(), root, lr=1.0, **options) as optimizer:
        optimizer.import_state(first.state_dict())
        assert optimizer.param_groups[0]['lr'] == LR
        take_steps(optimizer, moving, 3, 6)
        exported = optimizer.export_state()
    last = getattr(torch.optim, name)(moving.values(), lr=1.0, **options)
    last.load_state_dict(exported)
    take_steps(last, moving, 6, 9)
    assert_close(moving, plain)


def test_state_of_other_shapes_is_refused(root):
    params = parameters()
    with AdamW(params.items(), root, lr=LR) as optimizer:
        with pytest.raises(ValueError, match='shape'):
            optimizer.write_state(params['norm'], 'exp_avg', torch.zeros(8))
        with pytest.raises(ValueError, match='other parameters'):
            optimizer.import_state({'state': {}, 'param_groups': [{'params': [0]}]})
        assert optimizer.export_state()['state'] == {}


def loss_of(params, x):
    return ((x @ params['wide.weight'] + params['wide.bias']).sin().mean() * params['scale']
            + (params['norm'] ** 2).sum())


def test_backward_sends_gradients_as_they_come(root):
    x = torch.randn(16, 300, generator=torch.Generator().manual_seed(5))
    plain, own = parameters(), parameters()
    other = torch.optim.AdamW(plain.values(), lr=LR)
    with AdamW(own.items(), root, lr=LR, overlap=True) as optimizer:
        for step in range(4):
            for params, o in ((plain, other), (own, optimizer)):
                o.param_groups[0]['lr'] = LR / (1 + step)
                o.zero_grad()
                loss_of(params, x).backward()
                if o is optimizer:  # all are there before step(), and their updates may run
                    assert int(os.getxattr(root, 'user.hitrain.step_open')) != 0
                    assert all(f.sent for f in optimizer._parameter_files())
                o.step()
        assert_close(own, plain)
        assert optimizer.committed_step == 4
        # several backwards make one step
        for params, o in ((plain, other), (own, optimizer)):
            o.zero_grad()
            with optimizer.hold_gradients():
                loss_of(params, x).backward()
            assert int(os.getxattr(root, 'user.hitrain.step_open')) == 0
            loss_of(params, 2 * x).backward()
            o.step()
        assert_close(own, plain)
        # a gradient too many is an error with its name, and abort() forgets the sent ones
        committed = {n: p.detach().clone() for n, p in own.items()}
        loss_of(own, x).backward()
        with pytest.raises(RuntimeError, match='a second gradient of'):
            loss_of(own, x).backward()
        optimizer.abort()
        assert_equal(own, committed)
        assert optimizer.committed_step == 5
    optimizer.zero_grad()
    loss_of(own, x).backward()  # closed: hooks are gone


def test_clipping_and_scaling_equal_torchs(root):
    own, theirs = parameters(), parameters()
    other = torch.optim.AdamW(theirs.values(), lr=LR)
    with AdamW(own.items(), root, lr=LR, max_grad_norm=1.5, grad_scale=1024.0) as optimizer:
        for step in range(10):
            give_gradients(theirs, step)
            norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 1.5)
            other.step()
            give_gradients(own, step)
            for p in own.values():
                p.grad *= 1024
            optimizer.step()
            assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert_close(own, theirs)


def test_a_step_that_overflowed_is_skipped(root):
    own, theirs = parameters(), parameters()
    other = torch.optim.AdamW(theirs.values(), lr=LR)
    with AdamW(own.items(), root, lr=LR, skip_nonfinite=True) as optimizer:
        for step in range(6):
            for params in (own, theirs):
                give_gradients(params, step)
            if step % 3 == 1:
                own['norm'].grad[3] = float('inf')
            else:
                other.step()
            optimizer.step()
            assert optimizer.step_was_skipped == (step % 3 == 1)
        assert_close(own, theirs)
        assert optimizer.committed_step == 6 and optimizer.read_state(own['norm'], 'step').item() == 4


def test_lion_moves_by_its_learning_rate(root):
    params = parameters()
    before = {n: p.detach().clone() for n, p in params.items()}
    with hitrain.Lion(params.items(), root, lr=LR, param_dtype=torch.float16) as optimizer:
        start = {n: p.detach().clone() for n, p in params.items()}
        take_steps(optimizer, params, 0, 1)
        for n, p in params.items():
            assert torch.equal(start[n], before[n].half().float())
            moved = optimizer.read_state(p, 'master') - start[n]
            assert torch.allclose(moved, -LR * torch.sign(p.grad), atol=1e-6)
            assert torch.equal(p, optimizer.read_state(p, 'master').half().float())
            assert torch.allclose(optimizer.read_state(p, 'exp_avg'), 0.01 * p.grad.half().float(), atol=1e-6)


def test_step_sends_and_receives_by_public_methods(root):
    """So that a class of a user's own may watch them."""
    seen = []

    class Watching(AdamW):
        def send_gradient(self, parameter):
            super().send_gradient(parameter)
            seen.append(('sent', parameter.numel()))

        def receive_parameter(self, parameter):
            super().receive_parameter(parameter)
            seen.append(('received', parameter.numel()))
    params = parameters()
    with Watching(params.items(), root, lr=LR) as optimizer:
        take_steps(optimizer, params, 0, 1)
    sent, received = seen[:len(params)], seen[len(params):]
    assert sent == [('sent', p.numel()) for p in params.values()]
    assert sorted(received) == sorted(('received', p.numel()) for p in params.values())


def test_tensors_whose_memory_is_no_file(root):
    """Transposed, and of another dtype than the files: bytes go through a buffer."""
    own = {'t': torch.nn.Parameter(torch.arange(600.0).view(20, 30).t())}
    theirs = {'t': torch.nn.Parameter(own['t'].detach().clone(memory_format=torch.contiguous_format))}
    other = torch.optim.AdamW(theirs.values(), lr=LR)
    with AdamW(own.items(), root, lr=LR) as optimizer:
        assert not own['t'].is_contiguous()
        for opt, params in ((optimizer, own), (other, theirs)):
            take_steps(opt, params, 0, 3)
        assert_close(own, theirs, 1e-4)
        assert torch.equal(torch.frombuffer(bytearray((root / 't').read_bytes()), dtype=torch.float32).view(30, 20),
                           own['t'])


def test_autograd_notices_that_parameters_changed(root):
    p = torch.nn.Parameter(torch.ones(4))
    with AdamW([('p', p)], root, lr=LR) as optimizer:
        loss = (p * p).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match='modified by an inplace operation'):
            loss.backward()


# --------------------------------------------------------------------- bytes

def crossed(store):
    return sum(v for k, v in store.counters().items()
               if k.startswith('mount_') and k.endswith(('_read_bytes', '_written_bytes')))


@pytest.mark.parametrize('dtype, per_parameter', [(torch.float32, 8), (torch.bfloat16, 4)])
def test_bytes_that_cross_the_mount(store, root, dtype, per_parameter):
    params = parameters()
    count = sum(p.numel() for p in params.values())
    with AdamW(params.items(), root, lr=LR, param_dtype=dtype) as optimizer:
        before = crossed(store)
        take_steps(optimizer, params, 0, 10)
        beside = crossed(store) - before - 10 * count * per_parameter
        assert 0 <= beside < 10 * 128  # the command that ends a step, and its answer


def test_bf16_files_hold_what_the_model_computes_with(root):
    params = parameters()
    wanted = {n: p.detach().bfloat16() for n, p in params.items()}
    with AdamW(params.items(), root, lr=LR, param_dtype=torch.bfloat16) as optimizer:
        assert_equal({n: p.bfloat16() for n, p in params.items()}, wanted)
        take_steps(optimizer, params, 0, 5)
        for name, p in params.items():
            held = torch.frombuffer(bytearray((root / name).read_bytes()), dtype=torch.bfloat16).view(p.shape)
            assert torch.equal(held.float(), p), name
            master = optimizer.read_state(p, 'master')
            assert torch.equal(master.bfloat16(), held), name
        assert not torch.equal(master.bfloat16().float(), master)


def test_bf16_model_with_f32_gradients(root):
    params = parameters(dtype=torch.bfloat16)
    with AdamW(params.items(), root, lr=LR, grad_dtype=torch.float32) as optimizer:
        take_steps(optimizer, params, 0, 2)
        assert os.getxattr(root / 'norm', 'user.hitrain.grad_dtype') == b'f32'
        assert params['norm'].dtype == torch.bfloat16
        assert (root / 'norm').stat().st_size == 14


# -------------------------------------------------------------------- resume

def test_resume_continues_bit_identically(store, root):
    whole, parts = parameters(), parameters()
    with AdamW(whole.items(), store.mountpoint / 'whole', lr=LR) as optimizer:
        take_steps(optimizer, whole, 0, 8)
    with AdamW(parts.items(), root, lr=LR) as optimizer:
        take_steps(optimizer, parts, 0, 4)
    store.unmount()
    store.mount()
    parts = parameters(seed=1)
    with AdamW(parts.items(), root, lr=LR, resume=True) as optimizer:
        assert optimizer.committed_step == 4
        take_steps(optimizer, parts, 4, 8)
    assert_equal(whole, parts)


def test_killed_daemon_in_the_middle_of_a_step(store, root):
    whole, parts = parameters(), parameters()
    with AdamW(whole.items(), store.mountpoint / 'whole', lr=LR) as optimizer:
        take_steps(optimizer, whole, 0, 6)
    with AdamW(parts.items(), root, lr=LR) as optimizer:
        take_steps(optimizer, parts, 0, 3)
        give_gradients(parts, 3)
        optimizer.send_gradient(parts['wide.weight'])
        store.kill()
        with pytest.raises(OSError, match='mount again and continue with resume=True') as e:
            optimizer.step()
        assert e.value.errno == errno.ENOTCONN
        with pytest.raises(OSError, match='Input/output error .gradient of wide.weight.*daemon is gone'):
            with Root(str(root)).explained('gradient of wide.weight'):
                raise OSError(errno.EIO, 'of a request that the daemon was taking')
    store.mount()
    assert step_of(root) == 3
    parts = parameters(seed=1)
    with AdamW(parts.items(), root, lr=LR, resume=True) as optimizer:
        take_steps(optimizer, parts, 3, 6)
    assert_equal(whole, parts)


def test_trainer_that_died_in_the_middle_of_a_step(root):
    params = parameters()
    with AdamW(params.items(), root, lr=LR) as optimizer:
        take_steps(optimizer, params, 0, 2)
        wanted = {n: p.detach().clone() for n, p in params.items()}
        give_gradients(params, 2)
        optimizer.send_gradient(params['norm'])
    again = parameters(seed=1)
    with AdamW(again.items(), root, lr=LR, resume=True) as optimizer:
        assert optimizer.committed_step == 2
        assert_equal(again, wanted)
        take_steps(optimizer, again, 2, 3)
        assert optimizer.committed_step == 3


def test_durable_every_loses_whole_steps_only(store, root):
    params = parameters()
    kept = {}
    with AdamW(params.items(), root, lr=LR, durable_every=3) as optimizer:
        for step in range(5):
            take_steps(optimizer, params, step, step + 1)
            assert optimizer.committed_step == step + 1 - (step + 1) % 3
            assert step_of(root) == step + 1
            if step == 2:
                kept = {n: p.detach().clone() for n, p in params.items()}
        store.kill()
    store.mount()
    again = parameters(seed=1)
    with AdamW(again.items(), root, lr=LR, durable_every=3, resume=True) as optimizer:
        assert optimizer.committed_step == 3
        assert_equal(again, kept)
        take_steps(optimizer, again, 3, 4)
        optimizer.commit()
        assert optimizer.committed_step == 4


def run_with_schedule(optimizer, params, first, last):
    """The attribute of the root changes in each step, and a file beside the parameters."""
    for step in range(first, last):
        optimizer.param_groups[0]['lr'] = LR * (1 + step % 3)
        take_steps(optimizer, params, step, step + 1)
        assert optimizer.committed_step == step + 1


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_logged_steps_lose_nothing(store, root, dtype):
    options = {'lr': LR, 'max_grad_norm': 0.7, 'durable_every': 50, 'redo': True}
    whole, parts = parameters(dtype=dtype), parameters(dtype=dtype)
    with AdamW(whole.items(), store.mountpoint / 'whole', lr=LR, max_grad_norm=0.7) as optimizer:
        run_with_schedule(optimizer, whole, 0, 9)
    for first, last in (0, 4), (4, 5), (5, 9):
        with AdamW(parts.items(), root, resume=first > 0, **options) as optimizer:
            assert optimizer.committed_step == first
            run_with_schedule(optimizer, parts, first, last)
            os.setxattr(root, 'user.note', str(last).encode())
            optimizer.commit()
            store.kill()
        store.mount()
        assert step_of(root) == last
        wait_for(lambda: 'replay-progress' in store.log_path.read_text(), 'the message of the replay')
        assert os.getxattr(root, 'user.note') == str(last).encode()
        parts = parameters(seed=1, dtype=dtype)
    with AdamW(parts.items(), root, resume=True, **options) as optimizer:
        assert_equal(whole, parts)


def test_a_copy_follows_the_steps(store, root):
    """With clipping and a rate that changes; it may train on in the place of the model."""
    other, options = store.mountpoint / 'other', {'max_grad_norm': 0.7, 'durable_every': 3, 'redo': True, 'redo_keep': 20}
    params = parameters()
    with AdamW(params.items(), root, lr=LR, **options) as optimizer:
        run_with_schedule(optimizer, params, 0, 2)
        optimizer.snapshot('base')
        store.send(root, 'base', other)
        run_with_schedule(optimizer, params, 2, 7)
        store.follow(root, other, 'base')
        run_with_schedule(optimizer, params, 7, 9)
        store.follow(root, other)
    copies = parameters(seed=1)
    with AdamW(copies.items(), other, lr=LR, resume=True, **options) as optimizer:
        assert optimizer.committed_step == 9
        assert_equal(params, copies)
    for refused in {'redo_keep': 129}, {'redo_keep': 3, 'redo': False}:
        with pytest.raises(ValueError, match='redo_keep'):
            AdamW(params.items(), root, lr=LR, resume=True, **{**options, **refused})


def test_redo_needs_steps_to_log(root):
    with pytest.raises(ValueError, match='redo needs'):
        AdamW(parameters().items(), root, lr=LR, redo=True, durable_every=1)


def test_abort_goes_back_to_the_durable_step(root):
    params = parameters()
    with AdamW(params.items(), root, lr=LR, durable_every=2) as optimizer:
        take_steps(optimizer, params, 0, 2)
        wanted = {n: p.detach().clone() for n, p in params.items()}
        take_steps(optimizer, params, 2, 3)
        optimizer.abort()
        assert_equal(params, wanted)
        assert step_of(root) == 2
        take_steps(optimizer, params, 2, 4)
        assert optimizer.committed_step == 4


def test_parameters_that_come_later(store, root):
    params = parameters()
    with AdamW([('norm', params['norm'])], root, lr=LR) as optimizer:
        take_steps(optimizer, {'norm': params['norm']}, 0, 1)
        optimizer.add_param_group({'params': [('scale', params['scale'])], 'lr': 2 * LR})
        take_steps(optimizer, {n: params[n] for n in ('norm', 'scale')}, 1, 3)
        assert optimizer.read_state(params['scale'], 'step').item() == 2
    store.kill()
    store.mount()
    assert (root / 'scale').stat().st_size == 4


# ---------------------------------------------------------------- state_dict

def test_state_dict_names_the_step(root):
    params = parameters()
    with AdamW(params.items(), root, lr=LR, durable_every=100) as optimizer:
        take_steps(optimizer, params, 0, 2)
        saved = optimizer.state_dict()
        assert saved['hitrain']['step'] == optimizer.committed_step == 2
        optimizer.param_groups[0]['lr'] = 5.0
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]['lr'] == LR
        take_steps(optimizer, params, 2, 3)
        with pytest.raises(ValueError, match='of step 2.*holds step 3'):
            optimizer.load_state_dict(saved)
        with pytest.raises(ValueError, match='not from an optimizer'):
            optimizer.load_state_dict({'state': {}, 'param_groups': []})


def test_hyper_parameters_are_set_only_when_they_change(root):
    params = parameters()
    with AdamW(params.items(), root, lr=LR) as optimizer:
        text = os.getxattr(root, 'user.hitrain.optimizer').decode()
        assert set(text.split()) == {'adamw', 'lr=0.01', 'beta1=0.9', 'beta2=0.999', 'eps=1e-08', 'weight_decay=0.01',
                                     'maximize=0', 'durable_every=1'}
        take_steps(optimizer, params, 0, 1)
        os.setxattr(root, 'user.hitrain.optimizer', b'adamw lr=0.5')
        take_steps(optimizer, params, 1, 2)
        assert os.getxattr(root, 'user.hitrain.optimizer') == b'adamw lr=0.5'
        optimizer.param_groups[0]['lr'] = 0.25
        take_steps(optimizer, params, 2, 3)
        assert b'lr=0.25 ' in os.getxattr(root, 'user.hitrain.optimizer')


# ----------------------------------------------------------------- bad input

def test_a_root_that_is_not_empty_is_refused(root):
    params = parameters()
    AdamW(params.items(), root, lr=LR).close()
    with pytest.raises(FileExistsError, match='resume=True'):
        AdamW(params.items(), root, lr=LR)


def test_resume_of_another_model_is_refused(store, root):
    AdamW(parameters().items(), root, lr=LR).close()
    other = {**parameters(), 'norm': torch.nn.Parameter(torch.zeros(8))}
    with pytest.raises(ValueError, match='model/norm: shape is 7 in the store and 8 in the model'):
        AdamW(other.items(), root, lr=LR, resume=True)
    with pytest.raises(ValueError, match='dtype is f32 in the store and bf16'):
        AdamW(parameters().items(), root, lr=LR, resume=True, param_dtype=torch.bfloat16)
    more = {**parameters(), 'new': torch.nn.Parameter(torch.zeros(8))}
    with pytest.raises(FileNotFoundError, match='parameter new'):
        AdamW(more.items(), root, lr=LR, resume=True)
    store.unmount()  # no descriptor of a failed construction is left


def test_what_is_no_hitrain_mount(tmp_path):
    with pytest.raises(OSError, match='user.hitrain|no hitrain|model root'):
        AdamW(parameters().items(), tmp_path, lr=LR, resume=True)


def test_a_root_that_cannot_change(store, root):
    """Of a mount with ro, or of a kept step."""
    params = parameters()
    with AdamW(params.items(), root, lr=LR) as optimizer:
        take_steps(optimizer, params, 0, 1)
        optimizer.snapshot('kept')
    with pytest.raises(OSError, match='`hitrainctl clone` makes a model of a kept step'):
        AdamW(parameters().items(), root / '.hitrain/snap/kept', lr=LR, resume=True)
    store.unmount()
    store.dram += ',ro'
    store.mount()
    for path, options in ((root, {'resume': True}), (root.parent / 'new', {})):
        with pytest.raises(OSError, match='mount without ro') as e:
            AdamW(parameters().items(), path, lr=LR, **options)
        assert e.value.errno == errno.EROFS
    assert step_of(root) == 1


@pytest.mark.parametrize('kind, match, params, options', [
    (ValueError, 'cannot be the name', [('a/b', 0)], {}),
    (ValueError, 'cannot be the name', [('.hitrain', 0)], {}),
    (ValueError, 'called same', [('same', 0), ('same', 1)], {}),
    (ValueError, 'given twice', [('one', 0), ('other', 0)], {}),
    (ValueError, 'no parameters', [], {}),
    (ValueError, 'lr must be', [('p', 0)], {'lr': -1.0}),
    (ValueError, 'betas must be', [('p', 0)], {'betas': (0.9, 1.0)}),
    (ValueError, 'durable_every', [('p', 0)], {'durable_every': 0}),
    (TypeError, 'f32 or bf16 or f16', [('p', 0)], {'param_dtype': torch.float64}),
    (ValueError, 'fewer names', [0, 1], {'names': ['p']}),
    (ValueError, 'more names', [0], {'names': ['p', 'q']}),
])
def test_bad_arguments(root, kind, match, params, options):
    tensors = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3))]
    given = [(e[0], tensors[e[1]]) if isinstance(e, tuple) else tensors[e] for e in params]
    with pytest.raises(kind, match=match):
        AdamW(given, root, **{'lr': LR, **options})
    AdamW(tensors, root, lr=LR).close()  # the directory is usable


def test_refusals_say_what_the_store_says(root):
    params = parameters()
    with AdamW(params.items(), root, lr=LR) as optimizer:
        take_steps(optimizer, params, 0, 1)
        give_gradients(params, 1)
        optimizer.send_gradient(params['norm'])
        with pytest.raises(OSError) as e:  # the same elements twice in one step
            optimizer.send_gradient(params['norm'])
        assert 'gradient of norm' in str(e.value) and os.getxattr(root, 'user.hitrain.error').decode() in str(e.value)
        optimizer.abort()
        os.truncate(root / 'norm', 4)
        with pytest.raises(OSError, match='gradient of norm'):
            take_steps(optimizer, params, 1, 2)


def test_one_optimizer_steers_a_model(root):
    params, other = parameters(), parameters()
    with AdamW(params.items(), root, lr=LR) as first:
        take_steps(first, params, 0, 1)
        with pytest.raises(OSError, match=f'claimed by hitrain:{os.getpid()} .pid {os.getpid()}.*end that one first') as e:
            AdamW(other.items(), root, lr=LR, resume=True)
        assert e.value.errno == errno.EBUSY
        fd = os.open(root, os.O_RDONLY)
        with pytest.raises(OSError):
            os.fsync(fd)
        os.close(fd)
        if os.fork() == 0:  # a child has no part in the claim, and does not end it
            del first
            os._exit(0)
        os.wait()
        take_steps(first, params, 1, 2)
    with AdamW(other.items(), root, lr=LR, resume=True) as second:
        take_steps(second, other, 2, 3)


DYING_TRAINER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
from hitrain import AdamW
optimizer = AdamW([('p', torch.nn.Parameter(torch.zeros(4)))], sys.argv[2])
child = os.fork()
if child == 0:  # as a process that loads data
    signal.pause()
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_claim_ends_with_its_process_though_a_child_lives_on(root):
    with subprocess.Popen([sys.executable, '-c', DYING_TRAINER, TOP / 'optim/torch', root], stdout=subprocess.PIPE, text=True) as trainer:
        child = int(trainer.stdout.readline())
        try:
            trainer.wait(SECONDS_MAX)
            end = time.monotonic() + SECONDS_MAX
            while True:
                try:
                    AdamW([('p', torch.nn.Parameter(torch.zeros(4)))], root, resume=True).close()
                    break
                except OSError as e:  # the kernel closes its files a moment later
                    assert e.errno == errno.EBUSY and time.monotonic() < end
                    time.sleep(0.02)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_model_that_moved_on_elsewhere_is_noticed(root):
    params = parameters()
    with AdamW(params.items(), root, lr=LR) as optimizer:
        take_steps(optimizer, params, 0, 1)
        optimizer._root.command('unclaim')
        (root / '.hitrain/grad/norm').write_bytes(bytes(28))
        (root / '.hitrain/ctl').write_text('commit\n')
        with pytest.raises(RuntimeError, match='went from step 1 to 2: somebody else'):
            take_steps(optimizer, params, 1, 2)
        optimizer.abort()
        take_steps(optimizer, params, 1, 2)
        assert optimizer.committed_step == 3


def test_no_descriptor_stays_open(store, root):
    before = len(os.listdir('/proc/self/fd'))
    optimizer = AdamW(parameters().items(), root, lr=LR, durable_every=2)
    take_steps(optimizer, parameters(), 0, 1)
    optimizer.close()
    assert len(os.listdir('/proc/self/fd')) == before
    store.unmount()
    assert store.check().returncode == 0
