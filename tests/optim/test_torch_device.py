# SPDX-License-Identifier: Apache-2.0
"""hitrain.offload(device=) without a GPU: memory of the CPU stands for that of the device. With the fixture `late` there are streams and events,
too (tests/support/late_device.py); test_torch_late.py has the orders and errors that it makes.

tests/gpu has the tests with a device (make check-gpu)."""
import copy
import errno
import gc
import json
import mmap
import os
import pathlib
import re
import shutil
import subprocess
import sys
import xml.dom.minidom

import pytest

from trainer import LR, SECONDS_MAX, TOP, shared_root, shared_store, used_of, wait_for  # first: it makes the client importable
import torch
if not hasattr(torch, 'compiler'):
    pytest.skip('PyTorch 2.1 or newer', allow_module_level=True)
from torch._subclasses.fake_tensor import FakeTensorMode
import hitrain
from hitrain import _activations, _device, _offload, _residency
from hitrain._device import Copies, Leaving
from hitrain._device_file import DeviceFile
from late_device import ILLEGAL, late
import test_torch_activations as activations
from test_torch_offload import KEEP, WIDTH, WORDS, Adapted, Image, Text, Twice, assert_equal, loss_of, made, train, values

BIN = pathlib.Path(os.environ.get('HITRAIN_BIN', TOP / 'build/bin'))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, request):
    """A device without streams."""
    if 'device' not in request.fixturenames:
        monkeypatch.setattr(_offload, 'gpu_of', torch.device)
    yield
    gc.collect()
    if 'shared_root' in request.fixturenames:
        shutil.rmtree(request.node.funcargs['shared_root'].parent, ignore_errors=True)


def offload(model, root, rule='adamw', **options):
    return hitrain.offload(model, root, rule, lr=LR, device='cpu', **{'keep': KEEP, **options})


def there(optimizer):
    """Bytes of parameters on the device."""
    return sum(f._there.untyped_storage().nbytes() for f in optimizer._mapped() if f._there is not None)


def expected(root, steps, kind=Text, passes=1, model_options={}, **options):
    model = made(kind, **model_options)
    with hitrain.AdamW(model.named_parameters(), root, lr=LR, **options) as optimizer:
        return train(model, optimizer, 0, steps, passes), values(model)


@pytest.mark.parametrize('kind, model_options, options', [
    (Text, {}, {}), (Twice, {}, {}), (Adapted, {}, {}), (Image, {}, {}), (Text, {'recompute': 'reentrant'}, {}), (Text, {'recompute': 'yes'}, {}),
    (Text, {'tied': False}, {'max_grad_norm': 0.1}), (Text, {}, {'async_step': True}), (Text, {}, {'passes': 2, 'accumulate': 2})])
def test_the_bits_are_those_of_the_model_in_memory(shared_root, kind, model_options, options, late):
    options = dict(options)
    passes = options.pop('passes', 1)
    losses, wanted = expected(shared_root.with_name('plain'), 3, kind, passes, model_options, **options)
    model, most = made(kind, **model_options), []
    with offload(model, shared_root, **options) as optimizer:
        for module in model.modules():
            module.register_forward_hook(lambda *unused: most.append(there(optimizer)))
        assert train(model, optimizer, 0, 3, passes) == losses
        optimizer.commit()
        assert_equal(wanted, values(model))
        assert 0 < max(most) <= KEEP and there(optimizer) == 0


@pytest.mark.parametrize('options', [{}, {'max_grad_norm': 0.1}], ids=str)
def test_muon_orthogonalises_on_the_device(shared_root, monkeypatch, options, late):
    model, other, asked = made(tied=False), made(tied=False), []
    with hitrain.Muon(hitrain.muon_groups(model), shared_root.with_name('plain'), lr=LR, **options) as optimizer:
        losses = train(model, optimizer, 0, 3)
    computes_on = hitrain._early.Early._computes_on
    monkeypatch.setattr(hitrain._early.Early, '_computes_on', lambda o, f: asked.append(computes_on(o, f)) or asked[-1])
    with offload(other, shared_root, 'muon', **options) as optimizer:
        assert train(other, optimizer, 0, 3) == losses
        optimizer.commit()
        assert_equal(values(model), values(other))
        assert len(asked) == 3 * 3 * 4 and set(asked) == {optimizer._copies.device}


def test_a_sent_weight_has_no_values_on_the_device_or_off_it(shared_root):
    """It is sealed on the device, and comes to the memory of the CPU so. A gradient that is taken back ends that."""
    model = made()
    with offload(model, shared_root) as optimizer:
        weight, before, seen = model.blocks[1].up.weight, values(model), []
        model.blocks[0].up.weight.register_hook(lambda grad: seen.append(torch.tensor(weight)))
        for _ in range(2):
            loss_of(model, 0).backward()
            assert weight.device.type == 'cpu' and weight.is_contiguous() and 'gradient was sent' in repr(weight)
            assert torch.isnan(torch.tensor(weight)).all() and torch.isnan(seen[-1]).all()
            optimizer.zero_grad()
            assert_equal(values(model), before)
        train(model, optimizer, 0, 1)
        assert not torch.isnan(weight).any()


@pytest.mark.parametrize('streams, keep, model_options', [(False, 3 << 20, {}), (True, 0, {'recompute': True})])
def test_saved_tensors_leave_the_device(shared_root, streams, keep, model_options, request):
    if streams:
        request.getfixturevalue('late')
    wanted, _ = activations.train(shared_root.with_name('plain'), 2, model_options)
    found, figures = activations.train(shared_root.with_name('own'), 2, model_options, activations=keep, device='cpu')
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert figures['saved_bytes'] > 4 << 20
    assert figures['written_bytes'] + figures['forwarded_bytes'] + figures['dropped_bytes'] > 0


def test_parameters_on_the_device_are_not_saved_again(shared_root):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))
    with offload(model, shared_root, keep=64 << 20, activations=0) as optimizer:
        model(torch.ones(1, 512, requires_grad=True)).sum().backward()
        assert optimizer.figures()['activations']['saved_bytes'] == 0


@pytest.mark.parametrize('streams', [False, True])
def test_a_saved_tensor_is_written_read_and_forwarded(shared_store, monkeypatch, streams, request):
    late = request.getfixturevalue('late') if streams else None
    copies = late.copies if late else Copies
    slow = activations.Slow(monkeypatch)
    saved = _activations.Activations(str(shared_store.mountpoint), 0, set(), copies(torch.device('cpu'), 0))
    values = [late.new(activations.matrix(i)) if late else activations.matrix(i) for i in range(3)]
    packed = [saved.pack(values[0])]
    assert slow.begun.wait(SECONDS_MAX)
    packed += [saved.pack(v) for v in values[1:]]
    assert saved.unpack(packed[1]).data_ptr() == values[1].data_ptr() and packed[1].entry.computed is None
    values[2].add_(1)  # before it is copied from the device
    slow.go.set()
    saved.settle()
    saved.settle()  # a segment asks for the next one
    if late:
        assert len(late.faults) == 1
        late.faults.clear()
    assert packed[0].entry.state == _activations.LOADED  # written, and read ahead
    again = saved.unpack(packed[0])
    assert torch.equal(again, activations.matrix(0)) and again.data_ptr() != values[0].data_ptr()
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        saved.unpack(packed[2])
    del again, packed
    activations.assert_nothing_is_left(saved)
    saved.close()


def test_a_part_of_a_storage_comes_back_as_aligned_as_it_was(shared_store):
    """Storages of a GPU begin at multiples of 512."""
    saved = _activations.Activations(str(shared_store.mountpoint), 0, set(), Copies(torch.device('cpu'), 0))
    whole = torch.frombuffer(mmap.mmap(-1, activations.MIB), dtype=torch.float32)
    part = whole.copy_(activations.matrix().view(-1))[7:7 + (100 << 10)]
    packed, wanted = saved.pack(part), part.clone()
    del part, whole
    saved.settle()
    found = saved.unpack(packed)
    assert packed.entry.state == _activations.LOADED and torch.equal(found, wanted)
    assert found.data_ptr() - found.untyped_storage().data_ptr() == 7 * 4
    saved.close()


def test_a_storage_that_follows_that_of_a_parameter_is_none(shared_root):
    model = made()
    with offload(model, shared_root, activations=0) as optimizer:
        loss_of(model, 0)
    copies = optimizer._copies
    del model, optimizer
    gc.collect()
    fresh = [torch.empty(activations.N, activations.N) for _ in range(200)]
    saved = _activations.Activations(str(shared_root.parent), 0, set(), copies)
    assert all(saved._span(t) for t in fresh)
    saved.close()


def test_a_cuda_graph_that_captures_is_refused(shared_root, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    model = made()
    with offload(model, shared_root) as optimizer:
        copies = optimizer._copies
        copies._has_streams = True
        for capture in (lambda: loss_of(model, 0), lambda: copies.fetch(torch.ones(1))):
            with pytest.raises(RuntimeError, match='a CUDA graph cannot capture'):
                capture()
        copies._has_streams = False


def test_an_error_of_the_device_is_raised_by_the_next_forward_and_by_backward(shared_store, late):
    saved = _activations.Activations(str(shared_store.mountpoint), 0, set(), late.copies(torch.device('cpu'), 0))
    packed, values = saved.pack(activations.matrix()), activations.matrix(1)
    saved.settle()
    late.is_broken = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match=ILLEGAL):
            saved.unpack(packed)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=ILLEGAL):
            saved.pack(values)
    late.is_broken = False
    more = saved.pack(values)
    late.is_broken = True  # before it has left
    saved.settle()
    with pytest.raises(RuntimeError, match=ILLEGAL):
        saved.pack(values)
    found = saved.unpack(more)
    late.is_broken = False
    assert torch.equal(found, activations.matrix(1))  # it is on the device still
    del found, packed, more
    activations.assert_nothing_is_left(saved)
    saved.close()


def test_a_load_waits_until_the_device_has_passed_what_left():
    said = []

    class Event:
        def __init__(self, name):
            self.name = name

        def synchronize(self):
            said.append(self.name)
    leaving = Leaving(100)
    leaving.enters(60)
    leaving.enters(40)
    leaving.leaves(60, [Event('a'), Event('b')])
    leaving.leaves(40, [Event('c')])
    assert said == []
    leaving.enters(50)  # beside the 40 of c
    assert said == ['a', 'b']
    leaving.enters(10)
    assert said == ['a', 'b']
    leaving.enters(1)
    assert said == ['a', 'b', 'c']
    leaving.enters(1000)  # what must be there comes, although there is no room
    leaving.leaves(1000, [])
    leaving.enters(39)
    assert said == ['a', 'b', 'c']


def test_what_a_stream_uses_is_waited_for(shared_root, monkeypatch, late):
    """What left counts until the streams that used it were waited for."""
    most, load = [0], Copies.load

    def noted(copies, values, there):
        most.append(copies.leaving._there_bytes + copies.leaving._left_bytes)
        return load(copies, values, there)
    monkeypatch.setattr(Copies, 'load', noted)
    losses, wanted = expected(shared_root.with_name('plain'), 2)
    model = made()
    with offload(model, shared_root) as optimizer:
        assert train(model, optimizer, 0, 2) == losses
        leaving = optimizer._copies.leaving
        assert 0 < leaving._left_bytes <= KEEP and leaving._there_bytes == 0
        assert all(events and all(e.stream is late.compute for e in events) for _, events in leaving._left)
        assert 0 < max(most) <= KEEP
        assert_equal(wanted, values(model))


def test_blocks_that_were_read_ahead_go_to_the_device_before_they_are_needed(shared_root, monkeypatch, late):
    """At rest they have no memory there. The thread that reads ahead loads them once more, while the first block computes."""
    monkeypatch.setattr(_residency, 'places_ahead', lambda computes, loads: [len(computes) - i for i in range(len(computes) + 1)])
    losses, wanted = expected(shared_root.with_name('plain'), 2, model_options={'tied': False})
    model = made(tied=False)
    with offload(model, shared_root, keep=64 << 20) as optimizer:
        found, residency = train(model, optimizer, 0, 1), optimizer._residency
        wait_for(lambda: not residency._reading, 'the end of reading ahead')
        ahead = [f for u in residency.units if u.state == _residency.PRESENT and not u.stays for f in u.files]
        assert len(ahead) > 10 and not any(f._is_loaded for f in ahead)
        hook = model.blocks[0].register_forward_pre_hook(
            lambda *unused: wait_for(lambda: all(f._is_loaded for f in ahead), 'blocks on the device before their use'))
        found += train(model, optimizer, 1, 2)
        hook.remove()
        assert found == losses
        assert_equal(wanted, values(model))


def test_gradients_leave_the_device_in_backward(shared_root):
    model = made(tied=False)
    with offload(model, shared_root) as optimizer:
        loss_of(model, 0).backward()
        assert all(p.grad is None for p in model.parameters()) and not optimizer._bucket
        assert all(f.sent == 1 for f in optimizer._parameter_files())


def test_values_that_the_user_changes_count(shared_root):
    """At rest, in a forward without gradients, and while the parameters are on the device."""
    def halve(module, inputs, output):
        with torch.no_grad():
            module.bias.mul_(0.5)

    def change(model, step, offloaded):
        weight = model.blocks[0].up.weight
        if step == 1:
            weight.data.mul_(0.5)
        elif step == 2:
            with torch.no_grad():
                loss_of(model, 99)
                weight.clamp_(-0.05, 0.05)
        elif step == 3:
            loss_of(model, 98)  # the graph ends here, and leaves copies on the device
            if offloaded:
                assert there(offloaded)
            with torch.no_grad():
                model.head.bias.add_(1.0)
        elif step == 4:
            model.load_state_dict(made().state_dict())
        elif step == 5:
            loss_of(model, 97)
            model.norm.weight.data = model.norm.weight.data * 2
        elif step == 6:  # on the device
            handle = model.norm.register_forward_hook(halve)
            with torch.no_grad():
                loss_of(model, 96)
            handle.remove()
    results = []
    for name, offloaded in (('plain', False), ('own', True)):
        model, where = made(), shared_root / name
        with offload(model, where, keep=1 << 30) if offloaded else hitrain.AdamW(model.named_parameters(), where, lr=LR) as optimizer:
            for step in range(8):
                change(model, step, optimizer if offloaded else None)
                train(model, optimizer, step, step + 1)
            results.append(values(model))
    assert_equal(*results)


def test_all_values_are_there_within_a_step_too(shared_root):
    """state_dict() between forward and backward, copies and single tensors after an evaluation."""
    wanted = values(made())
    _, after = expected(shared_root.with_name('plain'), 1)
    model = made()
    with offload(model, shared_root) as optimizer:
        loss = loss_of(model, 0)
        assert there(optimizer)
        assert_equal(wanted, values(model))
        assert there(optimizer)
        assert_equal(wanted, {name: t for name, t in model.state_dict().items() if name in wanted})
        assert there(optimizer) == 0
        loss.backward()
        optimizer.step()
        assert_equal(after, values(model))
        with torch.no_grad():
            loss_of(model, 1)
        assert_equal(after, values(copy.deepcopy(model)))
        loss_of(model, 1)
        assert torch.equal(hitrain.materialize(model, ['head.bias'])['head.bias'], after['head.bias'])


def test_an_abort_takes_the_values_back(shared_root):
    model = made()
    with offload(model, shared_root, durable_every=100) as optimizer:
        train(model, optimizer, 0, 1)
        optimizer.commit()
        wanted = values(model)
        losses = train(model, optimizer, 1, 3)
        with torch.no_grad():
            model.head.bias.add_(1.0)
        loss_of(model, 9).backward()
        optimizer.abort()
        assert_equal(wanted, values(model))
        assert train(model, optimizer, 1, 3) == losses
        loss_of(model, 77).backward()
        with pytest.warns(RuntimeWarning, match='went back from step 3 to its durable step 1'):
            optimizer.zero_grad()
        assert_equal(wanted, values(model))
        train(model, optimizer, 1, 2)


class Branch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, uses_b):
        x = self.a(x)
        return self.c(self.b(x) if uses_b else x).square().mean()


def fail(*unused):
    raise ValueError('backward ends here')


@pytest.mark.parametrize('how', ['zero_grad', 'abort'])
def test_gradients_of_a_backward_that_raised_are_gone(shared_root, how):
    model = made(Branch)
    wanted, x = values(model), torch.ones(2, WIDTH)
    with offload(model, shared_root, 'sgd') as optimizer:
        handle = model.a.weight.register_hook(fail)
        with pytest.raises(ValueError, match='ends here'):
            model(x, True).backward()
        handle.remove()
        getattr(optimizer, how)()
        assert not any(f.has_gradient() for f in optimizer._parameter_files())
        model(x, False).backward()
        optimizer.step()
        assert torch.equal(wanted['b.weight'], model.b.weight) and not torch.equal(wanted['c.weight'], model.c.weight)


def test_after_a_backward_that_raised_parameters_have_their_values_again(shared_root):
    model = made()
    wanted = values(model)
    with offload(model, shared_root) as optimizer:
        model.blocks[1].up.weight.register_hook(fail)
        with pytest.raises(ValueError, match='ends here'):
            loss_of(model, 0).backward()
        optimizer.zero_grad()
        assert not optimizer._on_device and there(optimizer) == 0
        assert_equal(wanted, values(model))


@pytest.mark.parametrize('how', ['a flush of weights', 'a copy of the gradient'])
def test_weights_of_a_step_that_could_not_begin_have_their_values_again(shared_root, monkeypatch, how):
    """They are sealed before their gradients leave the device."""
    model = made(Branch)
    wanted, x = values(model), torch.ones(2, WIDTH)

    def fails(*unused, **more):
        raise OSError(errno.ENOSPC, 'of the test')
    with offload(model, shared_root, 'sgd') as optimizer:
        with monkeypatch.context() as context:
            if how == 'a flush of weights':
                context.setattr(optimizer, '_flush', fails)
            else:
                context.setattr(DeviceFile, 'fetch_gradient', fails)
            with pytest.raises(OSError, match='of the test'):
                model(x, True).backward()
        optimizer.zero_grad()
        assert_equal(wanted, values(model))
        model(x, True).backward()
        optimizer.step()
        assert not torch.equal(wanted['b.weight'], model.b.weight)


class Outside(torch.nn.Module):
    """Parameters outside blocks, which other modules than their own use, before and after the blocks."""

    def __init__(self):
        super().__init__()
        self.factor, self.more = torch.nn.Parameter(torch.rand(WIDTH, WIDTH)), torch.nn.ParameterList([torch.nn.Parameter(torch.rand(WIDTH))])
        self.embedding, self.attention = torch.nn.Embedding(WORDS, WIDTH), torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        y = self.embedding(x) @ self.factor
        y = self.attention(y, y, y)[0]
        for block in self.blocks:
            y = y + block(y)
        return torch.nn.functional.linear(y * self.more[0], self.embedding.weight), y.new_zeros(())


class Layers(torch.nn.Module):
    """No blocks: nothing leaves the device within a step."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0, batch_first=True) for _ in range(2)))

    def forward(self, x):
        y = self.layers(self.embedding(x))
        return y @ self.embedding.weight.T, y.new_zeros(())


@pytest.mark.parametrize('kind, blocks', [(Outside, 2), (Layers, 0)])
def test_parameters_outside_blocks_stay_on_the_device(shared_root, kind, blocks):
    losses, wanted = expected(shared_root.with_name('plain'), 3, kind)
    model = made(kind)
    sizes = {name: -(-p.numel() * 4 // 4096) * 4096 for name, p in model.named_parameters()}
    keep = sum(size for name, size in sizes.items() if not name.startswith('blocks.')) + blocks * (sizes.get('blocks.0.weight', 0) + 4096)
    with pytest.raises(ValueError, match=f'too little for this {kind.__name__} with device=, which needs {keep} bytes .* {blocks} largest'):
        offload(made(kind), shared_root, keep=keep - 1)
    with offload(model, shared_root, keep=keep) as optimizer:
        assert train(model, optimizer, 0, 3) == losses
        assert_equal(wanted, values(model))
        assert optimizer.figures()['held_bytes_max'] <= keep


def test_the_model_is_in_the_memory_of_the_cpu_in_the_end(shared_root):
    """Nothing of the mount is left. A graph has lost its weights."""
    model = made()
    optimizer = offload(model, shared_root)
    loss, alias = loss_of(model, 0), model.head.bias.detach()
    optimizer.close()
    assert not used_of(shared_root)
    assert_equal(values(made()), values(model))
    assert torch.equal(alias, model.head.bias) and alias.data_ptr() == model.head.bias.data_ptr()
    with pytest.raises(RuntimeError, match='backward of .* runs after close'):
        loss.backward()


def test_arguments_that_are_refused(shared_root):
    with pytest.raises(ValueError, match='pass bytes with device='):
        offload(made(), shared_root, activations='auto')


def test_a_device_with_too_little_memory_is_refused_with_a_number(shared_root, late):
    late.memory_bytes = 590 << 10
    for keep, message in ((KEEP, 'this Text needs 610304 bytes at a time'), (KEEP, 'keep=716800 parameters are more. At least 610304 are needed')):
        with pytest.raises(ValueError, match=f'the device has {late.memory_bytes} bytes, and {message}'):
            offload(made(tied=False), shared_root, keep=keep)
        late.memory_bytes = 650 << 10
    assert not shared_root.exists()


@pytest.mark.parametrize('device, message', [('cpu', 'must be a CUDA device'), ('cuda:63', 'sees no device cuda:63')])
def test_a_device_that_is_not_there_is_named(shared_root, device, message):
    with pytest.raises(ValueError, match=message):
        hitrain.offload(made(), shared_root, keep=KEEP, lr=LR, device=device)
    assert not shared_root.exists()


def test_a_model_on_a_device_is_refused_with_the_way_on(shared_root):
    with FakeTensorMode():  # tensors of a GPU that is not there
        model = torch.nn.Linear(4, 4, device='cuda:1')
    with pytest.raises(ValueError, match=r'weight is on cuda:1: .* Call model.cpu\(\) before'):
        offload(model, shared_root)
    assert not shared_root.exists()


def test_one_of_two_devices(shared_root, late, monkeypatch):
    """That which is asked for, or PyTorch's current one. Each call of PyTorch names it."""
    model = made()
    with offload(model, shared_root, activations=0) as optimizer:
        train(model, optimizer, 0, 1)
        assert len(late.named) > 50 and set(late.named) == {optimizer._copies.device}
    monkeypatch.setattr(_device, 'torch', torch)
    for name, value in (('is_available', True), ('device_count', 2), ('current_device', 1), ('Stream', None)):
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: args[0] if args else value)
    assert [str(_device.gpu_of(device)) for device in ('cuda', 'cuda:0', 'cuda:1', torch.device('cuda', 1))] == ['cuda:1', 'cuda:0', 'cuda:1', 'cuda:1']
    with pytest.raises(ValueError, match='sees no device cuda:2: it sees 2'):
        _device.gpu_of('cuda:2')
    copies = Copies(_device.gpu_of('cuda'), 0)
    assert copies._to == copies._back == torch.device('cuda:1')  # what their streams were made for


@pytest.mark.skipif(torch.cuda.is_available(), reason='a GPU is here')
def test_the_bench_draws_a_step_without_a_gpu(tmp_path):
    """All parts of a step are in the drawing. How well they overlap is a figure of the machine."""
    done = subprocess.run([sys.executable, TOP / 'bench/gpu.py', '--runs', '1', '--blocks', '12', '--width', '64'], capture_output=True, text=True,
                          timeout=SECONDS_MAX, env={'HITRAIN_BIN': str(BIN), **os.environ, 'HITRAIN_BUILD': str(tmp_path)})
    assert done.returncode == 0 and 'over the larger of their parts' in done.stdout, done
    found = json.loads((tmp_path / 'bench/gpu.jsonl').read_text())
    assert found['overlap'] > 0 and all(found['parts'][part] > 0 for part in ('load', 'compute', 'gradient', 'publication'))
    drawing = xml.dom.minidom.parse(str(tmp_path / 'bench/gpu.svg'))
    rows = [text.firstChild.data.split()[0] for text in drawing.getElementsByTagName('text')]
    assert [row for row in rows if row in found['parts']] == ['load', 'compute', 'gradient', 'update', 'publication']
    assert len(drawing.getElementsByTagName('rect')) > 12 * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason='a GPU is here')
def test_targets_for_a_gpu_say_that_they_were_skipped():
    done = subprocess.run([sys.executable, TOP / 'tests/tools/gpu.py', 'check-gpu', 'false'], capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0 and re.match('check-gpu: skipped, nothing was run: .* sees no GPU', done.stdout), done
