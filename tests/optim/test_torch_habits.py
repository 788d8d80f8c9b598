# SPDX-License-Identifier: Apache-2.0
"""Habits of trainers: they change parameters, fail in the middle of a step, save at odd moments, wrap the model."""
import contextlib
import copy
import os
import pickle
import resource
import sys
import warnings

import pytest

from trainer import LR, PROCESSES, SECONDS_MAX, close, copies, equal, give_gradients, number, random_parameters, root, store, take_steps, wait_unclaimed  # first: it makes the client importable
import torch
from hitrain import SGD, Adagrad, Adam, AdamW, Shard, _bytes, _gather, _root

SHAPES = {'w': (300, 100), 'bias': (100,), 'norm': (7,), 'scale': ()}


def parameters(seed=0):
    return random_parameters(SHAPES, seed)


def loss_of(params, step):
    x = torch.randn(8, 300, generator=torch.Generator().manual_seed(step))
    return ((x @ params['w'] + params['bias']).sin().mean() * params['scale'] + (params['norm'] ** 2).sum())


def held(root, name):
    shape = SHAPES[name]
    return torch.frombuffer(bytearray((root / name).read_bytes()), dtype=torch.float32).view(shape)


# ------------------------------------------------------- changes outside step()

def load(params, other):
    with torch.no_grad():
        for n, p in params.items():
            p.copy_(other[n])


def change_data(params, other):
    for n, p in params.items():
        p.data.copy_(other[n])


def assign_data(params, other):
    for _ in range(3):  # memory of the first may be used again
        for n, p in params.items():
            p.data = other[n].detach().clone()


def change_one_element(params, other):
    params['w'].data[17, 3] = 5.0


def swap_rows(params, other):
    params['w'].data[[0, 7]] = params['w'].data[[7, 0]]


CHANGES = [load, change_data, assign_data, change_one_element, swap_rows]


@pytest.mark.parametrize('overlap', [False, True])
def test_parameters_changed_outside_step_count(root, overlap):
    """As in torch, a gradient is applied to the value that is there when it comes."""
    own, theirs = parameters(), parameters()
    other = torch.optim.AdamW(theirs.values(), lr=LR)
    with AdamW(own.items(), root, lr=LR, overlap=overlap) as optimizer:
        for step in range(10):
            values = parameters(seed=50 + step)
            for params, o in ((own, optimizer), (theirs, other)):
                if step % 2:
                    CHANGES[step // 2](params, values)
                o.zero_grad()
                loss_of(params, step).backward()
                o.step()
                with torch.no_grad():  # as in clipping of weights, after each step
                    params['bias'].clamp_(-0.5, 0.5)
                params['norm'].data.clamp_(-0.9, 0.9)
            assert close(own, theirs), step
        assert optimizer.committed_step == 10
        # A checkpoint holds them, too, and a swap that was undone writes nothing.
        optimizer.state_dict()
        assert equal({n: held(root, n) for n in own}, own)
        before = (root / 'w').stat().st_mtime_ns
        mean, kept = parameters(seed=9), copies(own)
        change_data(own, mean)
        change_data(own, kept)
        optimizer.commit()
        assert (root / 'w').stat().st_mtime_ns == before


def test_a_change_is_not_lost_with_a_step_that_failed(root):
    own = parameters()
    with SGD(own.items(), root, lr=1.0) as optimizer:
        loaded = parameters(seed=3)
        load(own, loaded)
        give_gradients(own, 0)
        own['norm'].grad = own['norm'].grad.to_sparse()
        with pytest.raises(TypeError, match='gradient of norm is sparse'):
            optimizer.step()
        assert equal(own, loaded)
        give_gradients(own, 1)
        optimizer.step()
        assert equal(own, {n: p - own[n].grad for n, p in loaded.items()})


def test_a_change_is_not_lost_with_a_commit_that_failed(root, monkeypatch):
    own = parameters()
    with SGD(own.items(), root, lr=1.0) as optimizer:
        loaded = parameters(seed=3)
        load(own, loaded)
        give_gradients(own, 0)
        real = optimizer._root.command

        def refuse(*lines):
            if lines[0].startswith('commit'):
                raise OSError(28, 'of the test')
            real(*lines)
        with monkeypatch.context() as m:
            m.setattr(optimizer._root, 'command', refuse)
            with pytest.raises(OSError, match='of the test'):
                optimizer.step()
        assert equal(own, loaded)
        optimizer.step()
        assert equal(own, {n: p - own[n].grad for n, p in loaded.items()})


def sum_by_python(tensor):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(_bytes, '_xxh3', None)
        return _bytes.checksum(tensor)


SUMS = {'here': _bytes.checksum, 'without a library': sum_by_python, 'on other devices': lambda t: _bytes._sum_of_words(t.contiguous())}


@pytest.mark.parametrize('checksum', SUMS.values(), ids=SUMS)
def test_checksums_see_every_byte(checksum):
    assert _bytes._xxh3
    for size in (1, 3, 250, 251, 502, 100000, 251 * 8 * 7 + 5):
        t = torch.randint(0, 255, (size,), dtype=torch.uint8)
        before = checksum(t)
        for at in {0, size // 2, size - 1}:
            t[at] += 1
            assert checksum(t) != before
            t[at] -= 1
        assert checksum(t) == before
    wide = torch.randn(64, 64)
    assert checksum(wide.t()) == checksum(wide.t().contiguous())
    assert checksum(wide.view(-1)[1:]) == checksum(wide.view(-1)[1:].clone())


def negate_column(t):
    t[:, 1].neg_()


def flip_two_signs(t):
    t[5, 1].neg_()
    t[99, 65].neg_()


def swap_far_rows(t):
    t[[0, 251]] = t[[251, 0]]


def swap_distant_elements(t):
    flat = t.view(-1)
    flat[[1, 503]] = flat[[503, 1]]


def flip_all_bits(t):
    t.view(torch.int16).bitwise_not_()


def change_last_signs(t):
    t[-1, -3:].neg_()


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize('shape', [(600, 128), (601, 127), (1000, 129)])  # a part of a row of the checksum, and more; with and without a tail
@pytest.mark.parametrize('change', [negate_column, flip_two_signs, swap_far_rows, swap_distant_elements, flip_all_bits, change_last_signs])
@pytest.mark.parametrize('checksum', SUMS.values(), ids=SUMS)
def test_checksums_see_changes_of_one_pattern(dtype, shape, change, checksum):
    """Signs are top bits, which an odd factor moves nowhere; elements that change places must have different factors."""
    t = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    before = checksum(t)
    assert checksum(t.clone()) == before
    change(t)
    assert checksum(t) != before


# --------------------------------------------------------- hyper-parameters

def test_abort_forgets_what_it_knew(root):
    """The store goes back to older hyper-parameters; those of param_groups are sent again."""
    groups = [{'params': [('a', torch.nn.Parameter(torch.zeros(4)))]}, {'params': [('b', torch.nn.Parameter(torch.zeros(4)))], 'lr': 2.0}]
    a, b = groups[0]['params'][0][1], groups[1]['params'][0][1]
    with SGD(groups, root, lr=1.0) as optimizer:
        optimizer.param_groups[0]['lr'], optimizer.param_groups[1]['lr'] = 100.0, 200.0
        optimizer.grad_scale = 2.0
        for p in (a, b):
            p.grad = torch.ones(4)
        optimizer.send_gradient(a)
        optimizer.abort()
        assert a.tolist() == b.tolist() == [0.0] * 4
        optimizer.step()
        assert a.tolist() == [-50.0] * 4 and b.tolist() == [-100.0] * 4


def clip(optimizer, params):
    torch.nn.utils.clip_grad_norm_(params.values(), 0.5)


def set_lr_and_clip(optimizer, params):
    optimizer.param_groups[0]['lr'] /= 2
    clip(optimizer, params)


def halve_data(optimizer, params):
    params['w'].grad.data.mul_(0.5)


@pytest.mark.parametrize('durable_every, change, what', [
    (1, set_lr_and_clip, 'hyper-parameters were'), (4, set_lr_and_clip, 'hyper-parameters were'),
    (4, clip, 'the gradient of w was'), (1, halve_data, 'the gradient of w was')])
def test_what_is_set_before_step_counts_with_overlap(root, durable_every, change, what):
    """Also changes of gradients between backward() and step(), as clip_grad_norm_ makes them."""
    own, theirs = parameters(), parameters()
    other = torch.optim.AdamW(theirs.values(), lr=LR)
    with AdamW(own.items(), root, lr=LR, overlap=True, durable_every=durable_every) as optimizer:
        with pytest.warns(RuntimeWarning, match=f'{what} changed .*after .* first gradient was sent') as warned:
            for step in range(6):
                for params, o in ((own, optimizer), (theirs, other)):
                    o.zero_grad()
                    loss_of(params, step).backward()
                    change(o, params)
                    o.step()
        assert close(own, theirs) and number(root, 'step') == 6 and len(warned) == 1


class CpuScaler(torch.cuda.amp.GradScaler):
    """That of a PyTorch whose scaler is for CUDA only, with the parts that it leaves to the device written for the CPU."""

    def __init__(self, init_scale):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(torch.cuda.amp.grad_scaler, 'amp_definitely_not_available', lambda: False)
            super().__init__(init_scale)

    def scale(self, loss):
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        return loss * self._scale

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        for p in [p for group in optimizer.param_groups for p in group['params']]:
            p.grad.data.mul_(inv_scale.item())
            found_inf += float(not p.grad.isfinite().all())
        return {found_inf.device: found_inf}

    def update(self):
        self._per_optimizer_states.clear()


def scaler_on_cpu(init_scale):
    if hasattr(torch.amp, 'GradScaler'):
        return torch.amp.GradScaler('cpu', init_scale=init_scale)
    return CpuScaler(init_scale)


def test_gradients_that_a_scaler_divides_count_with_overlap(root):
    """It writes to .grad without a trace in the version counter."""
    own, theirs = parameters(), parameters()
    other = torch.optim.SGD(theirs.values(), lr=LR)
    scaler = scaler_on_cpu(1024.0)
    with SGD(own.items(), root, lr=LR, overlap=True) as optimizer:
        with pytest.warns(RuntimeWarning, match='the gradient of w was changed'):
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss_of(own, step)).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                other.zero_grad()
                loss_of(theirs, step).backward()
                other.step()
        assert close(own, theirs) and number(root, 'step') == 3


def test_what_cannot_be_sent_again_is_an_error(root):
    own = parameters()
    with AdamW(own.items(), root, lr=LR, overlap=True, durable_every=10) as optimizer:
        for step in range(2):
            optimizer.zero_grad()
            loss_of(own, step).backward()
            optimizer.step()
        loss_of(own, 2).backward()
        own['w'].data.zero_()
        with pytest.warns(RuntimeWarning, match='went back from step 2 to its durable step 0'):
            with pytest.raises(RuntimeError, match='the parameter w was changed after .* do that before backward'):
                optimizer.step()
        assert equal(own, parameters()) and number(root, 'step_open') == 0


# ------------------------------------------------------------- broken steps

def fail_at(monkeypatch, calls, error):
    """The calls-th pwrite from now on raises it, of a gradient each."""
    monkeypatch.setattr(_gather, 'RUN_MEMBERS', 1)
    left, real = [calls], os.pwrite

    def pwrite(*args):
        left[0] -= 1
        if left[0] == 0:
            raise error
        return real(*args)
    monkeypatch.setattr(os, 'pwrite', pwrite)


@pytest.mark.parametrize('overlap', [False, True])
def test_a_step_that_failed_is_taken_back_as_a_whole(root, monkeypatch, overlap):
    """Interrupted before each write of a step: the next batch makes a step of its own, as if that one had never been."""
    own, theirs = parameters(), parameters()
    other = torch.optim.AdamW(theirs.values(), lr=LR)

    def whole_step(step):
        optimizer.zero_grad()
        loss_of(own, step).backward()
        optimizer.step()
    with AdamW(own.items(), root, lr=LR, overlap=overlap) as optimizer:
        for n in range(1, len(SHAPES) + 1):
            before = copies(own)
            with monkeypatch.context() as m:
                fail_at(m, n, KeyboardInterrupt())
                with pytest.raises(KeyboardInterrupt):
                    whole_step(100 + n)
            assert equal(own, before) and number(root, 'step_open') == 0 and number(root, 'step') == n - 1
            whole_step(n)
            other.zero_grad()
            loss_of(theirs, n).backward()
            other.step()
            assert close(own, theirs)
        assert optimizer.committed_step == len(SHAPES)


def test_a_part_of_a_gradient_is_taken_back(root, monkeypatch):
    """Between two writes of one gradient."""
    own = parameters()
    start, real = copies(own), os.pwrite
    with SGD(own.items(), root, lr=1.0) as optimizer:
        real_command = optimizer._root.command

        def no_drop(*lines):
            if lines[0].startswith('drop'):
                raise OSError(16, 'of the test')
            real_command(*lines)
        for error, command in ((KeyboardInterrupt(), real_command), (OSError(5, 'of the test'), real_command),
                               (KeyboardInterrupt(), no_drop)):
            calls = []

            def half(fd, data, at):
                calls.append(at)
                if len(calls) == 3:
                    raise error
                return real(fd, data[:max(4, len(data) // 2 // 4 * 4)], at)
            give_gradients(own, 0)
            with monkeypatch.context() as m:
                m.setattr(os, 'pwrite', half)
                m.setattr(optimizer._root, 'command', command)
                with pytest.raises(type(error)):
                    optimizer.step()
            assert equal(own, start)
        give_gradients(own, 1)
        optimizer.step()
        assert equal(own, {n: p - own[n].grad for n, p in start.items()})


def test_a_step_that_was_taken_away_is_not_finished(root):
    """A program that may steer the root aborts between two gradients: the earlier ones would be missing."""
    own = parameters()
    start = copies(own)
    with SGD(own.items(), root, lr=1.0) as optimizer:
        give_gradients(own, 0)
        optimizer.send_gradient(own['w'])
        optimizer._root.command('abort')  # by the descriptor that holds the claim: no other can
        optimizer.send_gradient(own['bias'])
        with pytest.raises(OSError) as e:
            optimizer.step()
        assert e.value.errno == 116 and 'if=' in str(e.value)  # ESTALE
        assert equal(own, start) and number(root, 'step') == 0
        optimizer.step()
        assert equal(own, {n: p - own[n].grad for n, p in start.items()})


@pytest.mark.parametrize('new_lr', [1.0, 3.0])
def test_finished_steps_outlive_a_step_that_is_taken_back(root, monkeypatch, new_lr):
    """If no gradient is applied yet, as with clipping, only the gradients of the step are dropped."""
    own = parameters()
    with SGD(own.items(), root, lr=1.0, max_grad_norm=1e9, durable_every=10) as optimizer:
        take_steps(optimizer, own, 0, 2)
        before = copies(own)
        give_gradients(own, 2)
        with monkeypatch.context() as m:
            fail_at(m, 3, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        assert equal(own, before) and number(root, 'durable_step') == 0
        give_gradients(own, 3)
        optimizer.param_groups[0]['lr'] = new_lr  # counts, though the step is open with the one before
        optimizer.step()
        assert close(own, {n: p - new_lr * own[n].grad for n, p in before.items()})
        assert number(root, 'step') == 3
        optimizer.commit()
        assert optimizer.committed_step == 3


def empty_third_step(own, optimizer, monkeypatch):
    """Two steps, and one that was interrupted, whose gradients alone were dropped: no step is open then. Returns the
    result of the two."""
    take_steps(optimizer, own, 0, 2)
    before = copies(own)
    give_gradients(own, 2)
    with monkeypatch.context() as m:
        fail_at(m, 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert equal(own, before) and number(optimizer.root, 'step_open') == 0 and number(optimizer.root, 'durable_step') == 0
    return before


def test_an_emptied_step_does_not_count(root, monkeypatch):
    """Neither for durable_every, nor in the number of the steps which did something."""
    own = parameters()
    with SGD(own.items(), root, lr=1.0, max_grad_norm=1e9, durable_every=3) as optimizer:
        before = empty_third_step(own, optimizer, monkeypatch)
        optimizer.param_groups[0]['lr'] = 3.0
        optimizer.step()
        assert number(root, 'step') == 3 and optimizer.committed_step == 3
        after = copies(own)
        assert close(after, {n: p - 3.0 * own[n].grad for n, p in before.items()})
        optimizer.step()
        optimizer.abort()
        assert equal(own, after) and number(root, 'step') == 3


def kill_after(monkeypatch, store, calls):
    """The daemon is killed after so many commands and changes of attributes from now on; 0: before the first. How many there were."""
    count, command, setxattr = [0], _root.Root.command, os.setxattr

    def counted(real):
        def call(*args):
            if count[0] == calls and store.daemon:
                store.kill()
            real(*args)
            count[0] += 1
            if count[0] == calls:
                store.kill()
        return call
    monkeypatch.setattr(_root.Root, 'command', counted(command))
    monkeypatch.setattr(os, 'setxattr', counted(setxattr))
    return count


def test_a_daemon_killed_after_an_emptied_step(store, monkeypatch):
    """Wherever it dies: the step that resume names is the one whose changes are there, counted once."""
    for calls in range(20):
        root, p = store.mountpoint / f'model{calls}', [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
        with SGD(p, root, lr=1.0, max_grad_norm=1e9, durable_every=3) as optimizer:
            for _ in range(2):
                p[0].grad = p[1].grad = torch.ones(4)
                optimizer.step()
            with monkeypatch.context() as m:
                fail_at(m, 2, KeyboardInterrupt())
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
            optimizer.max_grad_norm = 2e9
            with monkeypatch.context() as m:
                count = kill_after(m, store, calls)
                with contextlib.suppress(OSError), warnings.catch_warnings(record=True):
                    optimizer.step()
                    optimizer.step()
                    optimizer.commit()
                done = count[0] < calls
        if store.daemon is None:
            store.mount()
        again = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        with SGD(again, root, lr=1.0, max_grad_norm=1e9, durable_every=3, resume=True) as optimizer:
            step = optimizer.committed_step
            assert step == number(root, 'step') and all(q.tolist() == [-float(step)] * 4 for q in again), calls
        if done:
            assert calls > 3 and step == 4
            return
    raise AssertionError('there were more calls than that')


HALF = {'accumulate': {'accumulate': 2}, 'clipping': {'overlap': True, 'max_grad_norm': 1e9},
        'skipping': {'overlap': True, 'skip_nonfinite': True}}


def two_steps_and_a_half(own, root, options):
    """Finished steps that are not durable, and one of which gradients are sent."""
    optimizer = SGD(own.items(), root, lr=1.0, durable_every=10, **options)
    for step in range(2):
        loss_of(own, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    before = copies(own)
    loss_of(own, 2).backward()
    if not options.get('overlap'):
        optimizer.send_gradients()
    assert number(root, 'step_open') and number(root, 'step') == 2 and number(root, 'durable_step') == 0
    return optimizer, before


@pytest.mark.parametrize('options', HALF.values(), ids=HALF)
def test_closing_within_a_step_keeps_the_finished_ones(store, root, options):
    optimizer, before = two_steps_and_a_half(parameters(), root, options)
    optimizer.close()
    assert number(root, 'step_open') == 0
    store.unmount()
    assert 'step-dropped' not in store.log_path.read_text()
    store.mount()
    again = parameters(seed=5)
    with SGD(again.items(), root, lr=1.0, resume=True) as optimizer:
        assert optimizer.committed_step == 2 and equal(again, before)


def test_closing_within_a_step_that_is_applied_goes_back(root):
    """The store undoes updates only back to the last durable step. Nothing of the half step remains, and a warning
    names the loss."""
    own = parameters()
    optimizer, _ = two_steps_and_a_half(own, root, {'overlap': True})
    optimizer._root.command('wait')
    with pytest.warns(RuntimeWarning, match='closed within a step: .*went back from step 2 to its durable step 0'):
        optimizer.close()
    assert number(root, 'step_open') == 0 and number(root, 'step') == 0
    assert equal({n: held(root, n) for n in own}, parameters())


def ends_without_close(root, options, other=None):
    optimizer, before = two_steps_and_a_half(parameters(), root, options)
    if other:
        give_other_gradient(root, other)
    optimizer._root.command('wait')
    torch.save(before, root.parent / 'before')
    os._exit(0)


def give_other_gradient(root, name):
    """Another program adds a parameter to the model."""
    file = root / name
    file.parent.mkdir()
    file.touch()
    os.setxattr(file, 'user.hitrain.dtype', b'f32')
    file.write_bytes(bytes(16))
    (root / '.hitrain/grad' / name).write_bytes(bytes(16))


@pytest.mark.parametrize('what, options, kept', [('resume', HALF['clipping'], 2), ('resume', {'overlap': True}, 0),
                                                 ('unmount', HALF['clipping'], 0)])
def test_a_trainer_that_ends_without_close(store, root, what, options, kept):
    """Its step stays open. Resume takes it back, and an unmount drops it with all that is not durable."""
    child = PROCESSES.Process(target=ends_without_close, args=(root, options))
    child.start()
    child.join(SECONDS_MAX)
    assert child.exitcode == 0 and number(root, 'step_open')
    if what == 'unmount':
        store.unmount()
        assert 'step-dropped' in store.log_path.read_text()
        store.mount()
    wait_unclaimed(root)
    again = parameters(seed=5)
    with SGD(again.items(), root, lr=1.0, resume=True) as optimizer:
        assert optimizer.committed_step == kept == number(root, 'step') and number(root, 'step_open') == 0
        assert equal(again, torch.load(root.parent / 'before') if kept else parameters())


def test_resume_takes_back_a_gradient_in_a_subdirectory(root):
    child = PROCESSES.Process(target=ends_without_close, args=(root, HALF['clipping'], 'sub/other'))
    child.start()
    child.join(SECONDS_MAX)
    assert child.exitcode == 0 and number(root, 'step_open')
    wait_unclaimed(root)
    again = parameters(seed=5)
    with SGD(again.items(), root, lr=1.0, resume=True) as optimizer:
        assert optimizer.committed_step == 2 and number(root, 'step_open') == 0
        assert equal(again, torch.load(root.parent / 'before'))


def test_closing_keeps_the_steps_before_an_emptied_one(root, monkeypatch):
    own = parameters()
    with SGD(own.items(), root, lr=1.0, max_grad_norm=1e9, durable_every=10) as optimizer:
        before = empty_third_step(own, optimizer, monkeypatch)
    assert number(root, 'step_open') == 0 and number(root, 'step') == 2
    again = parameters(seed=5)
    with SGD(again.items(), root, lr=1.0, max_grad_norm=1e9, durable_every=10, resume=True):
        assert equal(again, before)


@pytest.mark.parametrize('finished', [0, 2])
def test_a_step_that_ended_and_is_not_durable_is_taken_back(root, monkeypatch, finished):
    """As when the device is full or fails while the end is written: the batch is used again, and counts once."""
    own = parameters()
    start = copies(own)
    with SGD(own.items(), root, lr=1.0, durable_every=10) as optimizer:
        take_steps(optimizer, own, 0, finished)
        real = optimizer._root.command

        def ends_and_fails(*lines):
            real(*lines)
            if lines[0].startswith('step'):
                raise OSError(28, 'of the test')
        give_gradients(own, 5)
        with monkeypatch.context() as m:
            m.setattr(optimizer._root, 'command', ends_and_fails)
            lost = pytest.warns(RuntimeWarning, match='went back from step 2 to its durable step 0') if finished else contextlib.nullcontext()
            with lost, pytest.raises(OSError, match='of the test'):
                optimizer.step()
        assert equal(own, start) and number(root, 'step') == 0 and number(root, 'step_open') == 0
        optimizer.step()
        assert equal(own, {n: p - own[n].grad for n, p in start.items()}) and number(root, 'step') == 1


def test_a_step_that_cannot_be_taken_back_stops_the_trainer(root, monkeypatch):
    own = parameters()
    start = copies(own)
    with SGD(own.items(), root, lr=1.0) as optimizer:
        give_gradients(own, 0)
        with monkeypatch.context() as m:
            def refuse(*lines):
                raise OSError(5, 'of the test')
            m.setattr(optimizer._root, 'command', refuse)
            with pytest.raises(OSError, match='of the test'):
                optimizer.step()
            with pytest.raises(RuntimeError, match='could not be taken back .* call abort'):
                optimizer.step()
        optimizer.abort()
        assert equal(own, start)
        give_gradients(own, 1)
        optimizer.step()
        assert equal(own, {n: p - own[n].grad for n, p in start.items()})


# ----------------------------------------------------------- saving, loading

def test_state_dict_in_the_middle_of_a_step(root):
    own, theirs = parameters(), parameters()
    other = torch.optim.AdamW(theirs.values(), lr=LR)
    with AdamW(own.items(), root, lr=LR, overlap=True, durable_every=100) as optimizer:
        for step in range(3):
            for params, o in ((own, optimizer), (theirs, other)):
                o.zero_grad()
                loss_of(params, step).backward()
                if o is optimizer and step == 1:
                    assert optimizer.state_dict()['hitrain']['step'] == 1
                    with pytest.raises(RuntimeError, match='a part of a step is sent'):
                        optimizer.commit()
                o.step()
            assert optimizer.committed_step == (0, 2, 2)[step]  # the end of that step was made durable
        assert close(own, theirs)


def test_going_back_to_an_earlier_step(root):
    """state_dict() cannot, and names the way: the model's values and export_state()."""
    own, theirs = parameters(), parameters()
    other = torch.optim.AdamW(theirs.values(), lr=LR)
    with AdamW(own.items(), root, lr=LR) as optimizer:
        def steps(params, o, first, last):
            take_steps(o, params, first, last)
        steps(own, optimizer, 0, 2)
        steps(theirs, other, 0, 2)
        small, values, state = optimizer.state_dict(), copies(own), optimizer.export_state()
        steps(own, optimizer, 5, 8)
        with pytest.raises(ValueError, match='keeps its last step only.*export_state'):
            optimizer.load_state_dict(small)
        load(own, values)
        optimizer.load_state_dict(state)
        steps(own, optimizer, 2, 4)
        steps(theirs, other, 2, 4)
        assert close(own, theirs)
        # Back to a moment without state: the present state is forgotten.
        optimizer.load_state_dict({'state': {0: state['state'][0]}, 'param_groups': state['param_groups']})
        assert optimizer.read_state(own['w'], 'step').item() == 2
        assert list(optimizer.export_state()['state']) == [0]


def test_copies_are_refused_and_pickles_hold_no_optimizer(root):
    own = parameters()
    with AdamW(own.items(), root, lr=LR) as optimizer:
        for how in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match='cannot be copied: its state is in the store'):
                how(optimizer)
        left_out = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(optimizer))))
        with pytest.raises(TypeError, match=f'does not hold the AdamW of {root}'):
            left_out.step()
        give_gradients(own, 0)
        optimizer.step()


# ---------------------------------------------------------------- arguments

def test_flags_of_torch(root):
    own = parameters()
    free = {'fused': True, 'foreach': False, 'capturable': True, 'differentiable': False, 'maximize': False}
    for number, (kind, options) in enumerate([(AdamW, {'amsgrad': False}), (Adam, {'amsgrad': False}), (SGD, {}),
                                              (Adagrad, {'initial_accumulator_value': 0})]):
        with kind([{'params': list(own.items()), 'foreach': None}], root / f'../{number}', lr=LR, **free, **options) as optimizer:
            give_gradients(own, number)
            optimizer.step()
            with pytest.raises(ValueError, match='differentiable=True is not implemented in the store'):
                optimizer.add_param_group({'params': [torch.nn.Parameter(torch.zeros(1))], 'differentiable': True})
    for kind, option, error in ((AdamW, {'amsgrad': True}, ValueError), (SGD, {'differentiable': True}, ValueError),
                                (Adagrad, {'initial_accumulator_value': 0.1}, ValueError), (Adam, {'rho': 1}, TypeError)):
        with pytest.raises(error, match=next(iter(option))):
            kind(own.items(), root, lr=LR, **option)
    assert not root.exists()


def test_names_under_wrappers(root):
    """A model has the same files whatever it is wrapped in."""
    def wrapped(prefix, middle=''):
        return [(f'{prefix}a.{middle}w', torch.nn.Parameter(torch.zeros(2))), (f'{prefix}module.w', torch.nn.Parameter(torch.zeros(3)))]
    with AdamW(wrapped('module._orig_mod.'), root, lr=LR):
        assert sorted(os.listdir(root)) == ['a.w', 'module.w']
    for prefix, middle in (('', ''), ('module.', ''), ('_orig_mod.module.', ''), ('_fsdp_wrapped_module.', '_fsdp_wrapped_module.')):
        with AdamW(wrapped(prefix, middle), root, lr=LR, resume=True) as optimizer:
            assert [g['names'] for g in optimizer.param_groups] == [['a.w', 'module.w']]
    with pytest.raises(FileNotFoundError, match='parameter net.a.w.*has a.w: pass names='):
        AdamW(wrapped('net.'), root, lr=LR, resume=True)
    other = root.parent / 'named'
    pair = wrapped('module.')
    with AdamW([p for _, p in pair], other, lr=LR, names=[n for n, _ in pair]):
        assert sorted(os.listdir(other)) == ['module.a.w', 'module.module.w']
    with AdamW(pair, other, lr=LR, resume=True):  # files keep the names that they have
        assert sorted(os.listdir(other)) == ['module.a.w', 'module.module.w']


def test_tensors_without_memory_are_refused(root):
    class Elsewhere(torch.nn.Parameter):
        def to_local(self):
            return self

    class Wrapper(torch.Tensor):
        to_local = None  # as a DTensor has it
    for p, match in ((Elsewhere(torch.zeros(3)), 'parameter p is a Elsewhere'),
                     (torch.nn.Parameter(torch.zeros(3, device='meta')), 'parameter p is on the device meta')):
        with pytest.raises(TypeError, match=match):
            AdamW([('p', p)], root, lr=LR)
    p = torch.nn.Parameter(torch.zeros(3))
    with AdamW([('p', p)], root, lr=LR) as optimizer:
        p.grad = torch.ones(3).as_subclass(Wrapper)
        with pytest.raises(TypeError, match='the gradient of p is a Wrapper, whose elements are not in one memory'):
            optimizer.step()


def test_frozen_parameters_and_those_that_thaw(root):
    own, theirs = parameters(), parameters()
    own['w'].requires_grad_(False)
    theirs['w'].requires_grad_(False)
    other = torch.optim.SGD(theirs.values(), lr=LR)
    with SGD(own.items(), root, lr=LR, overlap=True) as optimizer:
        for step in range(4):
            for params, o in ((own, optimizer), (theirs, other)):
                params['w'].requires_grad_(step >= 1)
                o.zero_grad()
                loss_of(params, step).backward()
                if o is optimizer and step >= 2:  # its hook is there from the end of the step in which it thawed
                    assert optimizer._files[own['w']].sent
                o.step()
            assert close(own, theirs)


# -------------------------------------------------------------------- scale

@contextlib.contextmanager
def descriptors_at_most(count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def many(count):
    return [(f'p{i}', torch.nn.Parameter(torch.full((4,), float(i)))) for i in range(count)]


def test_more_parameters_than_descriptors(root):
    params = many(1100)
    with descriptors_at_most(256):
        for resume in False, True:
            with SGD(params, root, lr=1.0, resume=resume) as optimizer:
                for _, p in params:
                    p.grad = torch.ones(4)
                optimizer.step()
                optimizer.abort()
        assert all(p[0].item() == i - 2 for i, (_, p) in enumerate(params))
        # One that fails at its end leaves no file.
        with pytest.raises(TypeError, match='f32 or bf16 or f16'):
            SGD(many(500) + [('last', torch.nn.Parameter(torch.zeros(1).double()))], root.parent / 'failed', lr=1.0)
    assert not os.listdir(root.parent / 'failed')


def test_work_grows_with_the_parameters_and_not_with_their_square(root):
    """Counted in calls and lines of the client, which no load of the machine changes."""
    def cost(count, where):
        params, lines = many(count), [0]

        def count_line(frame, event, arg):
            if 'torch/hitrain/' not in frame.f_code.co_filename:
                return None
            lines[0] += event == 'line'
            return count_line
        sys.settrace(count_line)
        try:
            with SGD(params, where, lr=1.0, overlap=True) as optimizer:
                for _, p in params:
                    p.grad = torch.ones(4)
                    optimizer._gradient_ready(optimizer._files[p])
                optimizer.step()
        finally:
            sys.settrace(None)
        return lines[0]
    few, more = cost(100, root), cost(400, root.parent / 'more')
    assert more < 4.5 * few


def test_a_group_that_failed_leaves_no_files(root):
    own = parameters()
    with SGD([('w', own['w'])], root, lr=1.0) as optimizer:
        with pytest.raises(TypeError, match='f32 or bf16 or f16'):
            optimizer.add_param_group({'params': [('norm', own['norm']), ('last', torch.nn.Parameter(torch.zeros(1).double()))]})
        assert os.listdir(root) == ['w']
        optimizer.add_param_group({'params': [('norm', own['norm'])]})
        give_gradients(own, 0)
        optimizer.step()
        (root / 'other').touch()
        with pytest.raises(ValueError, match='other: dtype is'):  # a file of another stays
            optimizer.add_param_group({'params': [('other', own['bias'])]})
        assert sorted(os.listdir(root)) == ['norm', 'other', 'w']
        (root / 'other').unlink()


def test_a_forked_child_holds_no_files(root):
    own = parameters()
    with SGD(own.items(), root, lr=1.0) as optimizer:
        pid = os.fork()
        if not pid:
            os._exit(sum(os.path.realpath(f'/proc/self/fd/{n}').startswith(str(root)) for n in os.listdir('/proc/self/fd')))
        assert os.waitpid(pid, 0)[1] == 0
        give_gradients(own, 0)
        optimizer.step()


# --------------------------------------------------------------- read ahead

def test_the_reading_thread_may_drop_the_optimizer(root):
    """Its task then is the last that refers to it: close() must not wait for the thread that calls it."""
    model = torch.nn.Linear(5, 5)
    optimizer = SGD(model.named_parameters(), root, lr=0.1)
    optimizer.read_ahead(model)
    ahead = optimizer._ahead
    assert ahead._thread.submit(optimizer.close).exception(SECONDS_MAX) is None
    assert not optimizer._root.is_open


def test_a_parameter_used_before_it_was_read_is_an_error_of_backward(root):
    """A module's forward waits for its own parameters; other uses have to call wait()."""
    model = torch.nn.ModuleDict({'a': torch.nn.Linear(5, 5), 'b': torch.nn.Linear(5, 5)})

    def step(functional, waits=False):
        optimizer.zero_grad()
        if waits:
            optimizer.wait()
        x = model['a'](torch.ones(2, 5))
        x = torch.nn.functional.linear(x, model['b'].weight, model['b'].bias) if functional else model['b'](x)
        x.sum().backward()
        optimizer.step()
    with SGD(model.named_parameters(), root, lr=0.1) as optimizer:
        optimizer.read_ahead(model)
        step(False)
        step(False)
        # If the values come between forward and backward, autograd refuses them by itself.
        with pytest.raises(RuntimeError, match=r'b\.(weight|bias) was used before it was read|modified by an inplace operation'):
            step(True)
        step(True, waits=True)
        step(False)
        assert optimizer.committed_step == 4


def test_a_failed_reading_is_made_up_for_with_a_shard(root):
    """There step() goes back with all ranks, and reads the missing parameters again."""
    model = torch.nn.Linear(5, 5)
    with SGD(model.named_parameters(), root, lr=0.1, shard=Shard(0, 1)) as optimizer:
        real, calls = optimizer.receive_parameter, []

        def fails_once(p):
            calls.append(p)
            if len(calls) == 1:
                raise OSError(5, 'of the test')
            real(p)
        optimizer.receive_parameter = fails_once
        optimizer.read_ahead(model)
        model(torch.ones(5)).sum().backward()
        optimizer.step()
        with pytest.raises(OSError, match='of the test'):
            optimizer.step()
        for n, p in model.named_parameters():
            assert torch.equal(p.detach().view(-1), torch.frombuffer(bytearray((root / n).read_bytes()), dtype=torch.float32)), n


def test_a_failed_reading_is_raised_until_abort(root):
    model = torch.nn.Linear(5, 5)
    with SGD(model.named_parameters(), root, lr=0.1) as optimizer:
        def fails(p):
            raise OSError(5, 'of the test')
        optimizer.receive_parameter = fails
        optimizer.read_ahead(model)
        model(torch.ones(5)).sum().backward()
        optimizer.step()
        del optimizer.receive_parameter
        for _ in range(2):
            with pytest.raises(OSError, match='of the test'):
                model(torch.ones(5))
        optimizer.abort()
        assert torch.equal(model.weight, torch.frombuffer(bytearray((root / 'weight').read_bytes()), dtype=torch.float32).view(5, 5))
        model(torch.ones(5))


def test_a_tensor_that_was_half_read_is_not_sent(root, monkeypatch):
    own = parameters()
    with SGD(own.items(), root, lr=1.0) as optimizer:
        def fails(fd, buffers, at):
            buffers[0][:4] = bytes(4)
            raise OSError(5, 'of the test')
        with monkeypatch.context() as m:
            m.setattr(os, 'preadv', fails)
            with pytest.raises(OSError, match='parameter norm'):
                optimizer.receive_parameter(own['norm'])
        give_gradients(own, 0)
        with pytest.raises(RuntimeError, match='reading norm failed'):
            optimizer.step()
        optimizer.abort()
        assert equal(own, parameters())


def test_files_that_were_never_committed_outlive_an_abort(root):
    own = parameters()
    with SGD([('w', own['w'])], root, lr=1.0) as optimizer:
        optimizer.add_param_group({'params': [('norm', own['norm'])]})
        give_gradients(own, 0)
        start = own['norm'].detach().clone()
        optimizer.abort()
        optimizer.step()
        assert torch.equal(own['norm'], start - own['norm'].grad)
