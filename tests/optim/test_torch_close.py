# SPDX-License-Identifier: Apache-2.0
"""After close() of an optimizer, and when the interpreter ends, the process has nothing of the mount. Weights have values, or their use raises."""
import ctypes
import gc
import mmap
import os
import re
import subprocess
import sys
import threading

import pytest

from trainer import LR, SECONDS_MAX, TOP, root, shared_root, shared_store, store, used_of, wait_unclaimed  # first: it makes the client importable
import torch
import demo_store
import hitrain
from demo_fit import Group
from hitrain import _mapped, _offloaded
from test_torch_offload import KEEP, Text, assert_equal, loss_of, made, no_mapping_is_left, train, values

MIB = 1 << 20


def room_for(monkeypatch, size):
    """Half of what is available may be taken."""
    monkeypatch.setattr(_offloaded, 'available_bytes', lambda: 2 * size)


# -- programs --

PROGRAM = """
import atexit, os, subprocess, sys, threading
sys.path[:0] = [{tests!r}, {client!r}]
from trainer import LR
import hitrain
from test_torch_offload import KEEP, loss_of, made, train
root, umount, never = sys.argv[1], sys.argv[2:], threading.Event()

def unmount():
    subprocess.run(umount, check=True)

def begin(**options):
    model = made()
    optimizer = hitrain.offload(model, root, keep=KEEP, lr=LR, **options)
    threading.Thread(target=lambda: (never.wait(), model, optimizer), daemon=True).start()  # a closure that does not end
    train(model, optimizer, 0, 2)
    return model, optimizer
"""
CLOSES = PROGRAM + """
model, optimizer = begin()
try:
    loss = loss_of(model, 2)
    {body}
finally:
    optimizer.close()
    unmount()
"""
ENDS = PROGRAM + """
atexit.register(unmount)
begin()
"""
ENDS_WITHIN_A_STEP = PROGRAM + """
model, optimizer = begin(durable_every=10, max_grad_norm=1.0)
loss_of(model, 2).backward()  # which sends gradients
"""


def run(program, store, root, body=''):
    text = program.format(tests=str(TOP / 'tests/optim'), client=str(TOP / 'optim/torch'), body=body)
    umount = [*(['umount'] if os.geteuid() == 0 else ['fusermount3', '-u']), str(store.mountpoint)]
    done = subprocess.run([sys.executable, '-c', text, str(root), *umount], capture_output=True, text=True, timeout=300)
    errors = re.findall(r'^[\w.]*(?:Error|Warning).*', done.stderr, re.MULTILINE)
    assert (done.returncode, errors) == ((1, ['ArithmeticError: of the test']) if 'raise' in body else (0, [])), done.stderr


@pytest.mark.parametrize('program, body', [(CLOSES, 'pass'), (CLOSES, 'raise ArithmeticError("of the test")'), (ENDS, '')],
                         ids=['a closure', 'a traceback', 'no close'])
def test_a_program_unmounts_what_it_has_trained(store, root, program, body):
    run(program, store, root, body)
    assert store.daemon.wait(demo_store.END_SECONDS_MAX) == 0
    store.daemon = None
    assert not demo_store.is_mounted(store.mountpoint)
    store.mount()
    with hitrain.init_empty():
        model = Text()
        model.head.weight = model.embedding.weight
    with hitrain.offload(model, root, keep=KEEP, lr=LR, resume=True) as optimizer:
        assert optimizer.committed_step == 2


def test_a_program_that_ends_within_a_step_keeps_the_steps_before(store, root):
    """The end of the interpreter takes the step back, as close() does. An unmount would drop the others with it."""
    run(ENDS_WITHIN_A_STEP, store, root)
    assert [os.getxattr(root, f'user.hitrain.{word}') for word in ('step', 'step_open')] == [b'2', b'0']
    store.unmount()
    assert 'step-dropped' not in store.log_path.read_text()


# -- weights --

def test_weights_views_and_aliases_have_the_values_of_the_end(store, root):
    model = made()
    optimizer = hitrain.offload(model, root, keep=KEEP, lr=LR, activations=MIB if hasattr(torch, 'compiler') else None)
    train(model, optimizer, 0, 2)
    with torch.no_grad():
        model.head.bias[7] = 5.0  # which the next step would count
    alias, view, array = model.norm.weight.detach(), model.blocks[0].up.weight.data[3:, 1], model.head.bias.detach().numpy()
    loss = loss_of(model, 0)  # a graph has the weights, too
    wanted, places = values(model), {name: p.data_ptr() for name, p in model.named_parameters()}
    assert len(used_of(store.mountpoint)) > len(places)
    optimizer.close()
    assert not used_of(store.mountpoint)
    assert (root / 'head.bias').read_bytes() == array.tobytes()
    store.unmount()
    assert_equal(values(model), wanted)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert torch.equal(alias, wanted['norm.weight']) and torch.equal(view, wanted['blocks.0.up.weight'][3:, 1]) and array[7] == 5.0
    assert_equal(hitrain.materialize(model, ['head.bias']), {'head.bias': wanted['head.bias']})
    loss.backward()
    plain = made()
    plain.load_state_dict({**wanted, 'head.weight': wanted['embedding.weight']})
    loss_of(plain, 0).backward()
    assert_equal({name: p.grad for name, p in model.named_parameters()}, {name: p.grad for name, p in plain.named_parameters()})
    with torch.no_grad():
        alias.zero_()
    assert not model.norm.weight.any()


def test_weights_that_do_not_fit_raise_and_come_back(shared_store, shared_root, monkeypatch, tmp_path):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        train(model, optimizer, 0, 2)
        wanted, alias = values(model), model.norm.weight.detach()
        room_for(monkeypatch, 4096)
    assert not used_of(shared_store.mountpoint)
    assert torch.equal(alias, wanted['norm.weight']) and torch.equal(model.norm.weight, alias)
    weight = model.embedding.weight
    assert weight.shape == (300, 64) and 'embedding.weight, whose values are in the store' in repr(weight)
    for use in (lambda: weight + 1, lambda: loss_of(model, 0), lambda: weight[0], lambda: weight.data, lambda: weight.detach(), model.state_dict,
                lambda: weight.data_ptr(), lambda: weight.numpy(), lambda: hitrain.AdamW([('w', weight)], shared_root.with_name('plain'), lr=LR)):
        with pytest.raises(RuntimeError, match='embedding.weight is used after its optimizer was closed.*materialize'):
            use()
    with pytest.raises(ValueError, match='embedding.weight has no values since its optimizer was closed: pass resume=True'):
        hitrain.offload(model, shared_root.with_name('new'), keep=KEEP, lr=LR)
    assert_equal({**hitrain.materialize(model, [name for name, _ in model.named_parameters()]), 'scale': model.scale}, wanted)
    model.head.bias.data = hitrain.materialize(model, ['head.bias'])['head.bias']
    assert torch.equal(model.head.bias, wanted['head.bias']) and type(model.head.bias) is torch.nn.Parameter
    monkeypatch.undo()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR, resume=True) as optimizer:
        assert_equal(values(model), wanted)
        train(model, optimizer, 2, 3)
    train_alone = made()
    with hitrain.AdamW(train_alone.named_parameters(), shared_root.with_name('alone'), lr=LR) as optimizer:
        train(train_alone, optimizer, 0, 3)
    assert_equal(values(model), values(train_alone))


def test_a_thread_that_uses_a_weight_in_close_gets_its_values_or_an_error(shared_store, shared_root, monkeypatch):
    """NaNs and pages without values are for no thread: it is sealed before, and what another thread has is counted after."""
    model = made()
    optimizer = hitrain.offload(model, shared_root, keep=KEEP, lr=LR)
    wanted, weight, views, full = values(model)['embedding.weight'], model.embedding.weight, [], torch.full
    withdraw = _mapped.withdraw

    def another_thread(parameter, root, name):
        if parameter is weight:
            views.append(weight.detach())  # after references were counted
        withdraw(parameter, root, name)

    def with_the_nans(*args, **kwargs):
        with pytest.raises(RuntimeError, match='embedding.weight is used after its optimizer was closed'):
            weight.sum()
        return full(*args, **kwargs)
    monkeypatch.setattr(_mapped, 'withdraw', another_thread)
    room_for(monkeypatch, 4096)
    for f in optimizer._mapped():
        if f.tensor is not weight:
            f.detach(keeps_values=True)
    monkeypatch.setattr(torch, 'full', with_the_nans)
    optimizer.close()
    assert not used_of(shared_store.mountpoint)
    assert torch.equal(views[0], wanted)


@pytest.mark.parametrize('what', ['the forward of a', 'a backward'])
def test_a_thread_that_computes_in_close_keeps_the_weights(shared_store, shared_root, monkeypatch, what):
    """An operator may have the address of a weight alone, which shows nowhere."""
    model = made()
    optimizer = hitrain.offload(model, shared_root, keep=KEEP, lr=LR)
    wanted, begun, goes_on, found = loss_of(model, 0).item(), threading.Event(), threading.Event(), []

    def stop(*unused):
        begun.set()
        assert goes_on.wait(SECONDS_MAX)

    def ran(module, inputs, output):
        if output.requires_grad:
            output.register_hook(stop)
        else:
            stop()

    def compute():
        with torch.set_grad_enabled(what == 'a backward'), optimizer.hold_gradients():
            loss = loss_of(model, 0)
            if loss.requires_grad:
                loss.backward()
            found.append(loss.item())
    hook = model.blocks[1].up.register_forward_hook(ran)
    room_for(monkeypatch, 4096)
    thread = threading.Thread(target=compute, name='computes')
    thread.start()
    try:
        assert begun.wait(SECONDS_MAX)
        with pytest.raises(RuntimeError, match=f'the store stays mounted: {what}.* runs in the thread computes.*call close.. again'):
            optimizer.close()
    finally:
        goes_on.set()
        thread.join(SECONDS_MAX)
    assert found == [wanted]
    hook.remove()
    model.zero_grad()
    gc.collect()
    optimizer.close()
    assert not used_of(shared_store.mountpoint)


def test_memory_that_ended_without_values_cannot_be_read(tmp_path):
    """Zeros would be numbers."""
    (tmp_path / 'file').write_bytes(b'x' * mmap.PAGESIZE)
    with open(tmp_path / 'file', 'rb') as f:
        content = _mapped.map_file(f.fileno(), mmap.PAGESIZE, mmap.PROT_READ)
    address = ctypes.addressof(content)
    _mapped.detach(address, mmap.PAGESIZE)
    with open('/proc/self/maps', encoding='ascii') as maps:
        lines = [line.split() for line in maps]
    spans = {tuple(int(n, 16) for n in line[0].split('-')): line[1] for line in lines}
    assert [rights for (first, end), rights in spans.items() if first <= address < end] == ['---p']


def test_views_that_do_not_fit_refuse(shared_store, shared_root, monkeypatch):
    model = made()
    optimizer = hitrain.offload(model, shared_root, keep=KEEP, lr=LR)
    wanted, view = values(model), model.embedding.weight.detach()[1:]
    room_for(monkeypatch, 4096)
    with pytest.raises(RuntimeError, match='refers to the memory of embedding.weight, as views.*call close.. again'):
        optimizer.close()
    assert used_of(shared_store.mountpoint) == [f'{shared_root}/embedding.weight']
    assert torch.equal(view, wanted['embedding.weight'][1:]) and torch.equal(model.embedding.weight, wanted['embedding.weight'])
    with pytest.warns(RuntimeWarning, match='refers to the memory of embedding.weight'):
        with pytest.raises(KeyError):  # which is on its way, so it is not hidden
            with optimizer:
                raise KeyError
    del view
    optimizer.close()
    assert not used_of(shared_store.mountpoint)
    assert_equal(hitrain.materialize(model, ['embedding.weight']), {'embedding.weight': wanted['embedding.weight']})


def test_a_backward_that_failed_refers_to_nothing(shared_store, shared_root, monkeypatch):
    """PyTorch keeps its graph until the next backward of the thread."""
    model = made()
    optimizer = hitrain.offload(model, shared_root, keep=KEEP, lr=LR)
    wanted = values(model)

    def fail(grad):
        raise ArithmeticError
    hook = model.blocks[1].up.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of(model, 0).backward()
    hook.remove()
    gc.collect()
    room_for(monkeypatch, 4096)
    optimizer.close()
    assert not used_of(shared_store.mountpoint)
    assert_equal(hitrain.materialize(model, [name for name, _ in model.named_parameters()]), {name: wanted[name] for name, _ in model.named_parameters()})


def test_a_close_within_a_step_has_the_values_before(shared_store, shared_root):
    """Weights whose gradient has left have none in that moment."""
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        train(model, optimizer, 0, 1)
        wanted = values(model)
        loss_of(model, 1).backward()
        assert 'whose gradient was sent' in repr(model.head.bias)
    assert not used_of(shared_store.mountpoint)
    assert_equal(values(model), wanted)


def test_the_last_reference_leaves_the_tensors_as_they_are(shared_store, shared_root):
    model = made()
    optimizer = hitrain.offload(model, shared_root, keep=KEEP, lr=LR)
    wanted = values(model)
    del optimizer
    wait_unclaimed(shared_root)
    assert_equal(values(model), wanted)
    assert len(used_of(shared_store.mountpoint)) == len(list(model.parameters()))


def test_a_dead_store_is_let_go(store, root):
    model = made()
    optimizer = hitrain.offload(model, root, keep=KEEP, lr=LR)
    store.kill()
    optimizer.close()
    assert not used_of(store.mountpoint)
    with pytest.raises(RuntimeError, match='is used after its optimizer was closed'):
        model.norm.weight.sum()
    with pytest.raises(OSError, match='parameter norm.weight.*daemon is gone'):
        hitrain.materialize(model, ['norm.weight'])


# -- other processes --

def in_child(what):
    child = os.fork()
    if child == 0:
        try:
            what()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_lets_go_and_leaves_its_parent_alone(shared_store, shared_root):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR, activations=MIB if hasattr(torch, 'compiler') else None) as optimizer:
        train(model, optimizer, 0, 1)
        wanted, alias, before = values(model), model.norm.weight.detach(), used_of(shared_store.mountpoint)

        def closes():
            assert all(path.startswith(f'{shared_root}/') and '/.hitrain/' not in path for path in used_of(shared_store.mountpoint))  # mappings alone
            optimizer.close()
            assert not used_of(shared_store.mountpoint)
            assert_equal(values(model), wanted)
            with torch.no_grad():
                alias.zero_()

        def ends():
            from hitrain._optimizer import _close_all
            _close_all()
            assert 'norm.weight' in ' '.join(used_of(shared_store.mountpoint))
        in_child(closes)
        in_child(ends)
        assert used_of(shared_store.mountpoint) == before
        assert_equal(values(model), wanted)
        train(model, optimizer, 1, 2)
        assert optimizer.committed_step == 2


# -- memory --

AVAILABLE = """
import runpy, sys
available = runpy.run_path(sys.argv[1])['available_bytes']
before = available()
with open(sys.argv[2], 'rb') as f:
    while f.read(1 << 20):
        pass
cached = available()
held = b'x' * (64 << 20)
print(before, cached, available())
"""


def test_what_is_available_is_that_of_the_cgroup(tmp_path):
    """Files in the page cache leave it as it is."""
    try:
        group = Group('available', 256 * MIB)
    except OSError as e:
        pytest.skip(f'no memory cgroup can be made here ({e})')
    (tmp_path / 'file').write_bytes(bytes(128 * MIB))
    with open(tmp_path / 'file', 'rb') as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        done = subprocess.run([sys.executable, '-c', AVAILABLE, str(TOP / 'optim/torch/hitrain/_available.py'), str(tmp_path / 'file')],
                              stdout=subprocess.PIPE, text=True, check=True, preexec_fn=group.enter)
    finally:
        group.close()
    before, cached, held = (int(n) for n in done.stdout.split())
    assert 200 * MIB < before < 256 * MIB and abs(cached - before) < 32 * MIB and 48 * MIB < cached - held < 96 * MIB
