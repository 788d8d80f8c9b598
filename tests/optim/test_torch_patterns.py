# SPDX-License-Identifier: Apache-2.0
"""How a program can use a weight after its gradient has left: hitrain.offload() has the bits of the model in memory, or raises and names the way out."""
import contextlib
import copy
import ctypes
import gc
import io
import pickle

import pytest

from trainer import LR, mounted, shared_root  # first: it makes the client importable
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import from_dlpack, to_dlpack
import hitrain
from hitrain import _activations
from hitrain._mapped import MappedFile

WIDTH, KEEP, STEPS = 16, 1 << 20, 2
OPTIONS = {'plain': {}, 'max_grad_norm': {'max_grad_norm': 0.05}, 'async_step': {'async_step': True}, 'accumulate': {'accumulate': 2},
           'activations': {'activations': 0}}
NEW_GRAPHS = pytest.mark.skipif(not hasattr(torch, 'compiler'), reason='activations= needs PyTorch 2.1')


class Model(nn.Module):
    """use: what happens between its first block and the others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.use = lambda model, x: x
        self.run = lambda block, x: block(x)

    def forward(self, x):
        x = x + self.run(self.blocks[0], x)
        x = self.use(self, x)
        for block in self.blocks[1:]:
            x = x + self.run(block, x)
        return self.head(x).square().mean()


# -- patterns: of the forward, given as what the model does, and of the backward, given as a function of the model and its input --

class KeepsView(torch.autograd.Function):
    """The weight is no input, and no saved tensor."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight()
        return x @ ctx.weight.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight.t(), None


def frozen_pass(model, x):
    for p in model.blocks[2].parameters():
        p.requires_grad_(False)
    x = x + model.blocks[2](x)
    for p in model.blocks[2].parameters():
        p.requires_grad_(True)
    return x


def without_gradients(model, x):
    with torch.no_grad():
        y = model.head(model.blocks[2](x))
    return x + y


def with_hook(make):
    def use(model, x):
        x = x + 0.0
        x.register_hook(make(model))
        return x
    return use


def kept_view(model):
    view = model.head.weight.detach()
    return lambda grad: grad * view.norm()


def module_hook(model, x):
    handle = model.blocks[2][0].register_full_backward_hook(lambda module, before, after: (before[0] * module.weight.norm(),))
    x = x + model.blocks[2](x)
    handle.remove()
    return x


def backward(model, x):
    model(x).backward()


def in_parts(model, x):
    loss = model(x)
    loss.backward(inputs=list(model.head.parameters()), retain_graph=True)
    loss.backward(inputs=list(model.blocks.parameters()))


def gradient_of_input(model, x):
    loss = model(x)
    loss.backward(retain_graph=True)
    return torch.autograd.grad(loss, x)[0]


def penalty(model, x):
    loss = model(x)
    grad, = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()


def penalty_after(model, x):
    loss = model(x)
    loss.backward(retain_graph=True)
    grad, = torch.autograd.grad(loss, x, create_graph=True)
    grad.square().sum().backward()


def two_losses(model, x):
    loss = model(x)
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def given_gradients(model, x):
    for p, grad in zip(model.parameters(), torch.autograd.grad(model(x), list(model.parameters()))):
        p.grad = grad if p.grad is None else p.grad + grad


def kept_loss(model, x):
    model.__dict__.setdefault('losses', []).append(model(x))
    model.losses[-1].backward()


def graph_outside(model, x):
    """Of the same weight, and of no forward of the model."""
    view = model.head.weight.detach()
    other = linear(linear(x, model.blocks[0][0].weight), model.blocks[0][0].weight.t()) @ view
    model(x).backward()
    return torch.autograd.grad(other.sum(), x)[0]


def norm_after(model, x):
    backward(model, x)
    with torch.no_grad():
        return model.head.weight.norm()


def decay_after(model, x):
    backward(model, x)
    with torch.no_grad():
        model.head.weight.mul_(0.5)


def checkpoints(reentrant, inner=lambda model, block, x: block(x)):
    def make(model):
        model.run = lambda block, x: checkpoint(lambda x: inner(model, block, x), x, use_reentrant=reentrant)
    return make


def head_within(model, block, x):
    return block(linear(x, model.head.weight.detach()))


def own_within(model, block, x):
    return block(linear(linear(x, block[0].weight.detach()), block[2].weight.detach()))


def uses(use):
    def make(model):
        model.use = use
    return make


def tied(model):
    model.blocks[1][0].weight = model.blocks[0][0].weight


def twice(model):
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)


def nothing(model):
    pass


BITS, LATE, SECOND = 'the same bits', 'is used after its gradient was sent', 'a second gradient of|has had the 2 gradients|runs again after the gradient of'
PATTERNS = {
    'ordinary': (nothing, backward, BITS),
    'detached, of the head': (uses(lambda m, x: linear(x, m.head.weight.detach(), m.head.bias.detach())), backward, BITS),
    'detached, of a block': (uses(lambda m, x: linear(linear(x, m.blocks[2][0].weight.detach()), m.blocks[2][2].weight.detach())), backward, BITS),
    'a pass without its gradients': (uses(frozen_pass), backward, BITS),
    'a pass without any gradients': (uses(without_gradients), backward, BITS),
    'functional, of the head': (uses(lambda m, x: linear(x, m.head.weight)), backward, BITS),
    'tied': (tied, backward, BITS),
    'one block three times': (twice, backward, BITS),
    'backward in parts': (nothing, in_parts, BITS),
    'autograd.grad after a backward': (nothing, gradient_of_input, BITS),
    'autograd.grad of parameters': (nothing, given_gradients, BITS),
    'another graph': (nothing, graph_outside, BITS),
    'gradient penalty': (nothing, penalty, BITS),
    'gradient penalty after a backward': (nothing, penalty_after, SECOND),
    'two losses': (nothing, two_losses, SECOND),
    'the loss is kept': (nothing, kept_loss, BITS),
    'hook with a view': (uses(with_hook(kept_view)), backward, BITS),
    'hook with the weight': (uses(with_hook(lambda m: lambda grad: grad * m.head.weight.norm())), backward, LATE),
    'hook of a module': (uses(module_hook), backward, BITS),
    'function with a view': (uses(lambda m, x: KeepsView.apply(x, lambda: m.head.weight.detach())), backward, BITS),
    'function with the weight': (uses(lambda m, x: KeepsView.apply(x, lambda: m.head.weight)), backward, LATE),
    'checkpoint': (checkpoints(False), backward, BITS),
    'checkpoint, reentrant': (checkpoints(True), backward, BITS),
    'checkpoint, detached': (checkpoints(False, own_within), backward, BITS),
    'checkpoint, reentrant, detached': (checkpoints(True, own_within), backward, BITS),
    'checkpoint, detached, of the head': (checkpoints(False, head_within), backward, LATE),
    'checkpoint, reentrant, detached, of the head': (checkpoints(True, head_within), backward, LATE),
    'read after backward': (nothing, norm_after, LATE),
    'changed after backward': (nothing, decay_after, LATE),
}


def batch(number):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).requires_grad_()


def train(model, optimizer, run, sends=False, hold=contextlib.nullcontext):
    said = []
    for step in range(STEPS):
        for i in range(optimizer.accumulate):
            with hold():
                said.append(run(model, batch(10 * step + i)))
            if sends and i + 1 < optimizer.accumulate:
                optimizer.send_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return [t.detach().clone() for t in [*said, *model.parameters()] if t is not None]


@pytest.fixture(scope='module')
def shared_store(request):
    with mounted('torch-patterns', request.param) as s:
        yield s
        gc.collect()  # mappings keep a store mounted


@pytest.fixture(scope='module')
def in_memory():
    """The results of the model in memory, which are the same on both mounts."""
    return {}


@pytest.fixture(autouse=True)
def updates_at_once(monkeypatch):
    """A gradient that starts an update returns when the update has ended: so each late use would see it."""
    sent = MappedFile.gradient_sent

    def then_read(f, early):
        sent(f, early)
        if early:
            with open(f.path, 'rb') as file:
                file.read()
    monkeypatch.setattr(MappedFile, 'gradient_sent', then_read)
    monkeypatch.setattr(_activations, 'SMALL_BYTES', 64)


def made(prepare):
    model = Model()
    prepare(model)
    return model


def in_memory_with(place, known, name, option):
    prepare, run, _ = PATTERNS[name]
    options = {k: v for k, v in OPTIONS[option].items() if k in ('accumulate', 'max_grad_norm')}  # others change no number
    key = (name, *options)
    if key not in known:
        model = made(prepare)
        with hitrain.AdamW(model.named_parameters(), place.with_name('memory'), lr=LR, **options) as optimizer:
            known[key] = train(model, optimizer, run, sends=True)
    return known[key]


@pytest.mark.parametrize('shared_store', ['64M,passthrough=off', '64M'], ids=['plain', 'passthrough'], indirect=True)
@pytest.mark.parametrize('option', [pytest.param(o, marks=NEW_GRAPHS) if o == 'activations' else o for o in OPTIONS])
@pytest.mark.parametrize('name', PATTERNS)
def test_the_bits_are_those_in_memory_or_it_is_refused(shared_store, shared_root, in_memory, name, option):
    prepare, run, outcome = PATTERNS[name]
    late = outcome == LATE and option == 'max_grad_norm'  # no update runs before the step ends
    equal = outcome == BITS or late and run is not decay_after
    wanted = in_memory_with(shared_root, in_memory, name, option) if equal else None
    model = made(prepare)
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR, **OPTIONS[option]) as optimizer:
        if equal:
            assert all(map(torch.equal, wanted, train(model, optimizer, run)))
            return
        with pytest.raises(RuntimeError, match="changed after the step's first gradient was sent" if late else outcome) as raised:
            train(model, optimizer, run)
        assert 'hold_gradients()' in str(raised.value) or 'call step()' in str(raised.value)
    del raised


@pytest.mark.parametrize('shared_store', ['64M,passthrough=off'], ids=['plain'], indirect=True)
@pytest.mark.parametrize('name', ['detached, of the head', 'backward in parts', 'autograd.grad after a backward', 'read after backward'])
def test_a_gradient_that_leaves_too_early_is_noticed(shared_store, shared_root, in_memory, monkeypatch, name):
    """The fault that these patterns are for: nothing asks what still needs a weight, and later uses see the open step."""
    monkeypatch.setattr(MappedFile, 'is_used', lambda f: False)
    monkeypatch.setattr(MappedFile, 'seal', lambda f: None)
    prepare, run, _ = PATTERNS[name]
    wanted, model = in_memory_with(shared_root, in_memory, name, 'plain'), made(prepare)
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        assert not all(map(torch.equal, wanted, train(model, optimizer, run)))


@pytest.mark.parametrize('shared_store', ['64M,passthrough=off'], ids=['plain'], indirect=True)
@pytest.mark.parametrize('name', [n for n, (_, _, outcome) in PATTERNS.items() if outcome != BITS])
def test_the_way_out_has_the_bits_in_memory(shared_store, shared_root, in_memory, name):
    wanted = in_memory_with(shared_root, in_memory, name, 'plain')
    prepare, run, _ = PATTERNS[name]
    model = made(prepare)
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        assert all(map(torch.equal, wanted, train(model, optimizer, run, hold=optimizer.hold_gradients)))


@pytest.mark.parametrize('shared_store', ['64M,passthrough=off'], ids=['plain'], indirect=True)
def test_a_sent_weight_still_has_what_says_nothing_of_its_values(shared_store, shared_root):
    """As summaries and callbacks read it between backward() and step()."""
    words = ['is_cpu', 'is_nested', 'is_quantized', 'is_sparse_csr', 'names', 'name', 'output_nr', 'retains_grad', '_backward_hooks', 'nbytes', 'itemsize']
    methods = ['__len__', 'get_device', 'is_complex', 'is_shared', 'is_inference', 'storage_offset', 'ndimension', 'numel', 'stride', 'is_contiguous']

    def said(p):
        return [getattr(p, w) for w in words if hasattr(torch.Tensor, w)], [getattr(p, m)() for m in methods]
    model = Model()
    optimizer = hitrain.offload(model, shared_root, keep=KEEP, lr=LR)
    try:
        weight = model.head.weight
        before = said(weight)
        model(torch.ones(2, WIDTH)).backward()
        with pytest.raises(RuntimeError, match=LATE):
            weight.norm()
        assert said(weight) == before
        assert 'gradient was sent' in f'{weight}' and 'gradient was sent' in repr(weight)
        optimizer.step()
    finally:
        optimizer.close()


# -- functions that ask no override, and others that give values to code outside of PyTorch --

def at_the_address(w):
    return torch.tensor((ctypes.c_float * w.numel()).from_address(w.data_ptr()))


def data_of_another(w):
    other = torch.zeros(1)
    other.data = w
    return other


def set_to(w):
    with torch.no_grad():
        return torch.empty(0).set_(w)


def saved(w):
    torch.save(w, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()))


TAKES = {
    'torch.tensor': torch.tensor, 'torch.as_tensor': torch.as_tensor, 'torch.asarray': lambda w: torch.asarray(w, requires_grad=True), 'torch.Tensor': torch.Tensor,
    'torch.FloatTensor': torch.FloatTensor, 'new_tensor': lambda w: w.new_tensor(w), 'new_tensor of another': lambda w: torch.zeros(1).new_tensor(w),
    'torch.tensor of rows': lambda w: torch.tensor(list(w)), '_make_subclass': lambda w: torch.Tensor._make_subclass(torch.Tensor, w),
    'nn.Parameter': nn.Parameter, 'data of another': data_of_another, 'set_': set_to, 'to_dlpack': lambda w: from_dlpack(to_dlpack(w)),
    'from_dlpack': from_dlpack, 'numpy': lambda w: torch.from_numpy(w.detach().numpy()), '__array__': lambda w: torch.from_numpy(w.__array__()),
    'memoryview': lambda w: torch.tensor(memoryview(w).tolist()), 'tolist': lambda w: torch.tensor(w.tolist()), 'pickle': lambda w: pickle.loads(pickle.dumps(w)),
    'torch.save': saved, 'copy': copy.copy, 'deepcopy': copy.deepcopy, 'storage': lambda w: torch.Tensor(w.storage()), 'data_ptr': at_the_address,
}


@pytest.mark.parametrize('shared_store', ['64M,passthrough=off', '64M'], ids=['plain', 'passthrough'], indirect=True)
@pytest.mark.parametrize('take', TAKES)
def test_no_function_has_the_values_of_an_open_step(shared_store, shared_root, in_memory, take):
    """Each raises, or finds NaNs alone. What it stores there is lost, or refused if it moves the version counter of the weight."""
    def run(model, x):
        backward(model, x)
        for weight in (model.head.weight, model.head.bias):
            try:
                found = TAKES[take](weight).detach()
            except (RuntimeError, TypeError, ValueError, AttributeError):
                continue
            assert found.shape == weight.shape and torch.isnan(found).all()
            if take == 'data of another':
                found.zero_()
    wanted = in_memory_with(shared_root, in_memory, 'ordinary', 'plain')
    model = made(nothing)
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        assert all(map(torch.equal, wanted, train(model, optimizer, run)))


@pytest.mark.parametrize('shared_store', ['64M,passthrough=off'], ids=['plain'], indirect=True)
def test_a_weight_that_gets_the_memory_of_a_sent_one_is_refused(shared_store, shared_root):
    model = made(lambda model: model.blocks[2].requires_grad_(False))
    frozen = model.blocks[2][0].bias
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        before = frozen.detach().clone()
        backward(model, batch(0))
        frozen.data = model.blocks[0][0].bias
        optimizer.step()
        with pytest.raises(RuntimeError, match=r'blocks.2.0.bias was given the memory of a weight after the gradient of that one was sent'):
            model(batch(1))
        frozen.data = before
        backward(model, batch(1))
        optimizer.step()
        assert torch.equal(frozen, before)
