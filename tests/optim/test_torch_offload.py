# SPDX-License-Identifier: Apache-2.0
"""hitrain.offload(): the same bits as the model without it, within the bytes it may keep, and errors by name."""
import contextlib
import copy
import gc
import os
import pickle
import shutil
import threading
import warnings
import weakref

import pytest

from trainer import LR, SECONDS_MAX, root, shared_root, shared_store, store, wait_for, wait_unclaimed  # first: it makes the client importable
import torch
import torch.utils.checkpoint
from torch import nn
import hitrain
from demo_store import mounted
from hitrain._mapped import MappedFile
from hitrain._residency import TRANSIT, Residency
from hitrain._root import Root
from hitrain.checkpoint import export_safetensors

KEEP = 700 << 10
STEPS = 3
LONG = bool(os.environ.get('HITRAIN_LONG'))
WIDTH = 64
WORDS = 300


class Block(nn.Module):
    """Two outputs, and one of them is changed in place by the next block."""

    def __init__(self, recompute=None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.recompute = recompute

    def inner(self, x):
        x = self.norm(x)
        return self.attention(x, x, x, need_weights=False)[0] + self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x, total):
        if self.recompute:
            y = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.recompute == 'reentrant')
        else:
            y = self.inner(x)
        return x + y, total.add_(y.mean())


class Text(nn.Module):
    def __init__(self, tied=True, **options):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.register_buffer('scale', torch.full((), 0.5))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        y, total = self.embedding(x) * self.scale, torch.zeros(())
        for block in self.blocks:
            y, total = block(y, total)
        return self.head(self.norm(y)), total


class Twice(Text):
    """All blocks are one."""

    def __init__(self):
        super().__init__(tied=False)
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)


class Adapted(Text):
    """A frozen base, and a small trained matrix beside one of its layers in each block (LoRA)."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.a, block.b = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.zeros(2, WIDTH))
            block.register_forward_hook(lambda m, inputs, y: (y[0] + inputs[0] @ m.a @ m.b, y[1]))


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1),
                                     nn.Flatten(), nn.Linear(8 * 14 * 14, 10)])
        self.layers[0].to(memory_format=torch.channels_last)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x, x.new_zeros(())


def batch(model, step):
    random = torch.Generator().manual_seed(1000 + step)
    if isinstance(model, Image):
        return torch.randn(2, 3, 16, 16, generator=random), torch.randint(10, (2,), generator=random)
    x = torch.randint(WORDS, (2, 12), generator=random)
    return x, x.roll(1, 1)


def loss_of(model, step):
    x, y = batch(model, step)
    out, total = model(x)
    return nn.functional.cross_entropy(out.flatten(0, -2), y.flatten()) + total


def train(model, optimizer, first, last, passes=1):
    losses = []
    for step in range(first, last):
        for i in range(passes):
            loss = loss_of(model, step * passes + i)
            loss.backward()
            losses.append(loss.item())
            if i + 1 < passes and optimizer.accumulate > 1 and not optimizer._overlap:
                optimizer.send_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def made(kind=Text, **options):
    torch.manual_seed(0)
    return kind(**options)


def values(model):
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def plain_and_offloaded(root, kind=Text, steps=STEPS, passes=1, rule='adamw', keep=KEEP, model_options={}, **options):
    """Losses of both, and values of both."""
    plain, own = made(kind, **model_options), made(kind, **model_options)
    with getattr(hitrain, {'adamw': 'AdamW', 'sgd': 'SGD'}[rule])(plain.named_parameters(), root.with_name('plain'), lr=LR, **options) as optimizer:
        losses = train(plain, optimizer, 0, steps, passes)
    with hitrain.offload(own, root, rule, keep=keep, lr=LR, **options) as optimizer:
        assert train(own, optimizer, 0, steps, passes) == losses
        assert optimizer.state_dict()['hitrain']['step'] == steps
        figures = optimizer.figures()
        assert figures['held_bytes_max'] <= keep
        assert_equal(values(plain), values(own))
    return figures


@pytest.mark.parametrize('kind, options', [
    (Text, {}), (Twice, {}), (Adapted, {}), (Image, {}), (Text, {'recompute': 'reentrant'}), (Text, {'recompute': 'yes'}), (Text, {'tied': False})])
def test_the_bits_are_those_of_the_model_in_memory(shared_root, kind, options):
    plain_and_offloaded(shared_root, kind, steps=200 if LONG else STEPS, model_options=options)


@pytest.mark.parametrize('options', [{'max_grad_norm': 0.1}, {'skip_nonfinite': True}, {'async_step': True}, {'durable_every': 4},
                                     {'async_step': True, 'max_grad_norm': 0.1}, {'rule': 'sgd'}])
def test_with_options_of_the_optimizer(shared_root, options):
    plain_and_offloaded(shared_root, **options)


def test_many_steps(shared_root):
    steps = 200 if LONG else 20
    figures = plain_and_offloaded(shared_root, steps=steps, durable_every=50)
    assert figures['loaded_bytes'] > steps * KEEP / 2


def test_a_scheduler_sets_the_rate(shared_root):
    def run(model, optimizer):
        with optimizer:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for step in range(STEPS):
                train(model, optimizer, step, step + 1)
                scheduler.step()
            return values(model)
    plain, own = made(), made()
    wanted = run(plain, hitrain.AdamW(plain.named_parameters(), shared_root.with_name('plain'), lr=LR))
    assert_equal(run(own, hitrain.offload(own, shared_root, keep=KEEP, lr=LR)), wanted)


@pytest.mark.parametrize('kind', [Text, Twice])
def test_accumulation_in_the_store(shared_root, kind):
    plain_and_offloaded(shared_root, kind, steps=200 if LONG else STEPS, passes=3, accumulate=3, accumulate_mode='mean')


def test_accumulation_in_memory(shared_root):
    plain, own = made(), made()
    with hitrain.AdamW(plain.named_parameters(), shared_root.with_name('plain'), lr=LR) as optimizer:
        train(plain, optimizer, 0, 2, passes=2)
    with hitrain.offload(own, shared_root, keep=KEEP, lr=LR) as optimizer:
        for step in range(2):
            with optimizer.hold_gradients():
                loss_of(own, 2 * step).backward()
            loss_of(own, 2 * step + 1).backward()
            assert all(p.grad is None for p in own.parameters())
            optimizer.step()
        assert_equal(values(plain), values(own))


def test_autocast_and_bfloat16(shared_root):
    results = []
    for name, offloaded in (('plain', False), ('own', True)):
        model = made(tied=False).bfloat16()
        where = shared_root / name
        optimizer = hitrain.offload(model, where, keep=KEEP, lr=LR) if offloaded else hitrain.AdamW(model.named_parameters(), where, lr=LR)
        with optimizer:
            for step in range(STEPS):
                with torch.autocast('cpu', dtype=torch.bfloat16):
                    x, y = batch(model, step)
                    out, total = model(x)
                    loss = nn.functional.cross_entropy(out.float().flatten(0, 1), y.flatten()) + total
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(values(model))
    assert_equal(*results)


@pytest.mark.parametrize('recompute', [None, 'reentrant', 'new'])
def test_gradients_leave_as_they_arise(shared_root, recompute):
    model = made(tied=False, recompute=recompute)
    most, held = [0], [0]

    def arrived(grad):
        held[0] = sum(p.grad is not None for p in model.parameters())
        most[0] = max(most[0], held[0])
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR):
        for p in model.parameters():
            p.register_hook(arrived)
        loss_of(model, 0).backward()
        assert all(p.grad is None for p in model.parameters())
    assert most[0] <= 2


# -- first values --

def test_built_empty_it_has_the_values_of_the_modules(shared_root):
    torch.manual_seed(0)
    with hitrain.init_empty():
        own = Plain()
    assert all(p.device.type == 'meta' for p in own.parameters())
    torch.manual_seed(0)
    optimizer = hitrain.offload(own, shared_root, keep=KEEP, lr=LR)
    assert_equal(values(made(Plain)), values(own))
    optimizer.close()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, WORDS)
        self.register_buffer('scale', torch.full((), 0.5))


@pytest.mark.parametrize('source', ['mapping', 'safetensors', 'folder', 'torch'])
def test_built_empty_it_takes_weights(shared_root, tmp_path, source):
    wanted = made()
    given = wanted.state_dict()
    if source == 'torch':
        torch.save(given, tmp_path / 'model.pt')
        given = tmp_path / 'model.pt'
    elif source != 'mapping':
        with hitrain.AdamW(wanted.named_parameters(), shared_root.with_name('export'), lr=LR):
            pass
        given = tmp_path / ('model.safetensors' if source == 'safetensors' else 'folder')
        export_safetensors(shared_root.with_name('export'), given)
    with hitrain.init_empty():
        own = Text()
        own.head.weight = own.embedding.weight
    with hitrain.offload(own, shared_root, keep=KEEP, lr=LR, weights=given):
        assert own.head.weight is own.embedding.weight
        assert_equal(values(wanted), values(own))


def test_weights_are_not_kept(shared_root):
    given = made(Plain).state_dict()
    alive = [weakref.ref(t) for t in given.values()]
    with hitrain.init_empty():
        own = Plain()
    with hitrain.offload(own, shared_root, keep=KEEP, lr=LR, weights=given):
        del given
        gc.collect()
        assert not any(t() is not None for t in alive)


class Code:
    def __reduce__(self):
        return os.mkdir, (os.environ['CODE_RAN'],)


def test_a_checkpoint_runs_no_code(shared_root, tmp_path, monkeypatch):
    monkeypatch.setenv('CODE_RAN', str(tmp_path / 'ran'))
    torch.save({'a': Code()}, tmp_path / 'model.pt')
    with pytest.raises(pickle.UnpicklingError):
        hitrain.offload(made(), shared_root, keep=KEEP, lr=LR, weights=tmp_path / 'model.pt')
    assert not (tmp_path / 'ran').exists()


def test_it_continues_and_single_tensors_come_back(shared_root):
    wanted, own = made(), made()
    with hitrain.AdamW(wanted.named_parameters(), shared_root.with_name('plain'), lr=LR) as optimizer:
        train(wanted, optimizer, 0, 4)
    with hitrain.offload(own, shared_root, keep=KEEP, lr=LR) as optimizer:
        train(own, optimizer, 0, 2)
    with hitrain.init_empty():
        again = Text()
        again.head.weight = again.embedding.weight
    with hitrain.offload(again, shared_root, keep=KEEP, lr=LR, resume=True) as optimizer:
        train(again, optimizer, 2, 4)
        taken = hitrain.materialize(again, ['head.weight', 'norm.bias'])
        before = taken['norm.bias'].clone()
        train(again, optimizer, 4, 5)
        assert torch.equal(taken['norm.bias'], before)
        with pytest.raises(KeyError):
            hitrain.materialize(again, ['none'])
    assert torch.equal(taken['head.weight'], wanted.head.weight)


def test_without_values_it_is_refused(shared_root):
    with hitrain.init_empty():
        model = Text()
        model.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match='scales.0 is on the device meta, and ParameterList has no reset_parameters'):
        hitrain.offload(model, shared_root, keep=KEEP, lr=LR)
    with pytest.raises(ValueError, match='weights has no values for embedding.weight'):
        hitrain.offload(model, shared_root, keep=KEEP, lr=LR, weights={})
    assert model.embedding.weight.device.type == 'meta' and not shared_root.exists()


# -- what users do to models --

def test_values_that_the_user_changes_count(shared_root):
    def change(model, optimizer, step):
        if step == 1:
            with torch.no_grad():
                model.blocks[0].up.weight.clamp_(-0.05, 0.05)
        elif step == 2:
            model.blocks[2].down.weight.data.mul_(0.5)
        elif step == 3:
            model.load_state_dict(made(tied=True).state_dict())
        elif step == 4:
            weight = model.blocks[0].up.weight
            weight.data = weight.data.clamp(-0.02, 0.02)
        elif step == 5:
            held.append(model.blocks[1].up.weight.data)
            model.blocks[1].up.weight.data = held[-1] * 0.5
        elif step == 6:
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.9, model.parameters())
    results, held = [], []
    for name, offloaded in (('plain', False), ('own', True)):
        model, where = made(), shared_root / name
        with hitrain.offload(model, where, keep=KEEP, lr=LR) if offloaded else hitrain.AdamW(model.named_parameters(), where, lr=LR) as optimizer:
            for step in range(8):
                change(model, optimizer, step)
                train(model, optimizer, step, step + 1)
            results.append(values(model))
    assert_equal(*results)


def test_memory_that_a_tensor_leaves_stays_its_files(shared_root):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        weight = model.blocks[0].up.weight
        f = optimizer._files[weight]
        weight.data = weight.data.clone()
        gc.collect()
        with open('/proc/self/maps', encoding='ascii') as maps:
            assert any(int(line.split('-')[0], 16) <= f._address < int(line.split('-')[1].split()[0], 16) and 'up.weight' in line for line in maps)
        before = values(model)
        loss_of(model, 0)
        assert weight.data_ptr() == f._address
        assert_equal(before, values(model))
        weight.data = torch.zeros(3)
        with pytest.raises(RuntimeError, match='blocks.0.up.weight of the offloaded model was .* of shape'):
            loss_of(model, 0)


def test_values_that_come_after_the_gradient_are_refused(shared_root):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        before = values(model)
        loss_of(model, 0).backward()
        model.norm.weight.data = torch.zeros(WIDTH)
        with pytest.raises(RuntimeError, match="norm.weight was changed after the step's first gradient was sent"):
            optimizer.step()
        optimizer.abort()
        assert_equal(before, values(model))
        train(model, optimizer, 0, 1)


def test_a_pickle_of_the_model_is_refused_by_name(shared_root, tmp_path):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR):
        for save in (pickle.dumps, lambda m: torch.save(m, tmp_path / 'model.pt')):
            with pytest.raises(TypeError, match=rf'cannot be pickled, as its parameters are in {shared_root}: save model.state_dict\(\), or .*export_safet'):
                save(model)
        assert_equal(values(copy.deepcopy(model)), values(model))
        torch.save(model.state_dict(), tmp_path / 'values.pt')
    assert_equal(torch.load(tmp_path / 'values.pt'), dict(model.state_dict()))


def test_the_last_reference_ends_it(shared_root):
    for i in range(10):
        model = made()
        optimizer = hitrain.offload(model, shared_root, keep=KEEP, lr=LR, resume=i > 0)
        train(model, optimizer, i, i + 1)
        del optimizer
        wait_unclaimed(shared_root)


def test_an_interrupt_leaves_no_block_in_transit(shared_root, monkeypatch):
    real, left = MappedFile.release, [1]

    def release(f):
        if left and threading.current_thread() is threading.main_thread():
            left.pop()
            raise KeyboardInterrupt
        real(f)
    plain, model = made(), made()
    with hitrain.AdamW(plain.named_parameters(), shared_root.with_name('plain'), lr=LR) as optimizer:
        train(plain, optimizer, 0, 2)
    with hitrain.offload(model, shared_root, keep=300 << 10, lr=LR) as optimizer:
        train(model, optimizer, 0, 1)
        wait_for(lambda: not optimizer._residency._reading, 'the loading thread rests')
        with monkeypatch.context() as m:  # on demand only, so that this thread makes the room
            m.setattr(Residency, '_read_ahead', lambda residency: None)
            m.setattr(MappedFile, 'release', release)
            with pytest.raises(KeyboardInterrupt):
                train(model, optimizer, 1, 2)
        assert all(u.state != TRANSIT for u in optimizer._residency.units)
        optimizer.abort()
        train(model, optimizer, 1, 2)
        assert_equal(values(plain), values(model))


def test_a_later_group_is_refused(shared_root):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        with pytest.raises(RuntimeError, match='no group can be added later'):
            optimizer.add_param_group({'params': [('extra', nn.Parameter(torch.ones(64)))]})
        train(model, optimizer, 0, 1)


def test_async_steps_are_refused_with_passthrough(shared_root, monkeypatch):
    monkeypatch.setattr(Root, 'passes_through', True)
    with pytest.raises(ValueError, match='no async_step on a mount with passthrough'):
        hitrain.offload(made(), shared_root, keep=KEEP, lr=LR, async_step=True)
    assert not shared_root.exists()


def test_an_abort_takes_the_values_back(shared_root):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR, durable_every=100) as optimizer:
        train(model, optimizer, 0, 2)
        optimizer.commit()
        wanted = values(model)
        train(model, optimizer, 2, 4)
        with torch.no_grad():
            model.norm.weight.add_(1.0)
        loss_of(model, 9).backward()
        optimizer.abort()
        assert_equal(wanted, values(model))
        again = train(model, optimizer, 2, 4)
        optimizer.abort()
        assert train(model, optimizer, 2, 4) == again


def test_zero_grad_takes_sent_gradients_back(shared_root):
    plain, own = made(), made()
    with hitrain.AdamW(plain.named_parameters(), shared_root.with_name('plain'), lr=LR) as optimizer:
        train(plain, optimizer, 0, 2)
    with hitrain.offload(own, shared_root, keep=KEEP, lr=LR) as optimizer:
        train(own, optimizer, 0, 1)
        loss_of(own, 77).backward()
        optimizer.zero_grad()
        train(own, optimizer, 1, 2)
        assert_equal(values(plain), values(own))


CHANGES = {'the weight': lambda w: w.fill_(0.5), '.data': lambda w: w.data.fill_(0.5), 'other memory': lambda w: setattr(w, 'data', torch.full_like(w, 0.5))}


@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('options, finished', [({}, 0), ({}, 1), ({'redo': True, 'durable_every': 8}, 2)])
def test_values_from_outside_outlive_a_step_that_is_taken_back(shared_root, change, options, finished):
    """As those of load_state_dict() before the first batch, which was too large for memory."""
    model, plain = made(), made()
    with hitrain.AdamW(plain.named_parameters(), shared_root.with_name('plain'), lr=LR) as memory, \
            hitrain.offload(model, shared_root, keep=KEEP, lr=LR, **options) as optimizer:
        train(plain, memory, 0, finished)
        train(model, optimizer, 0, finished)
        with torch.no_grad():
            for m in (model, plain):
                CHANGES[change](m.head.weight)
        wanted = values(model)
        for _ in range(2):
            loss_of(model, 7).backward()
            optimizer.zero_grad()
            assert_equal(values(model), wanted)
        train(plain, memory, finished, finished + 2)
        train(model, optimizer, finished, finished + 2)
        assert_equal(values(model), values(plain))


def test_conversions_are_refused_and_copies_are_ordinary(shared_root):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        for change in (model.half, lambda: model.to('meta'), model.blocks[1].double):
            with pytest.raises(RuntimeError, match='lie in a store'):
                change()
        assert model.float() is model and model.to('cpu') is model
        with pytest.raises(ValueError, match='offloaded already'):
            hitrain.offload(model, shared_root.with_name('second'), keep=KEEP, lr=LR)
        state = {name: t.clone() for name, t in model.state_dict().items()}
        train(model, optimizer, 0, 1)
        assert any(not torch.equal(state[name], t) for name, t in model.state_dict().items())


def test_a_replaced_parameter_is_named(shared_root):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR):
        model.blocks[2].up.weight = nn.Parameter(torch.zeros(4 * WIDTH, WIDTH))
        with pytest.raises(RuntimeError, match='blocks.2.up.weight of the offloaded model was replaced'):
            loss_of(model, 0)


def test_a_forward_before_the_step_is_refused(shared_root):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match='runs again after the gradient of .* was sent'):
            loss_of(model, 1)
        optimizer.step()
        loss_of(model, 1)


def test_a_graph_for_another_backward_is_refused(shared_root):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            with pytest.raises(RuntimeError, match='create_graph'):
                loss_of(model, 0).backward(create_graph=True)
        for p in model.parameters():
            p.grad = None


def test_values_of_an_old_graph_are_void(shared_root):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        late = loss_of(model, 5)
        loss_of(model, 0).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match='modified by an inplace operation'):
            late.backward()


def test_without_gradients_and_in_a_child(shared_root):
    plain, own = made(), made()
    with hitrain.offload(own, shared_root, keep=KEEP, lr=LR) as optimizer:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(loss_of(own, 3), loss_of(plain, 3))
        train(own, optimizer, 0, 1)
        wanted = bytes(own.blocks[0].up.weight.detach().view(torch.uint8).numpy())
        with own_lock_held(optimizer):
            child = os.fork()
            if child == 0:
                optimizer._before_forward(optimizer._residency.units[0])
                optimizer._residency.leave(optimizer._residency.units[0])
                os._exit(bytes(own.blocks[0].up.weight.detach().view(torch.uint8).numpy()) != wanted)
        assert os.waitpid(child, 0)[1] == 0


@contextlib.contextmanager
def own_lock_held(optimizer):
    """By another thread, which a forked child lacks."""
    held, end = threading.Event(), threading.Event()

    def hold():
        with optimizer._residency._changed:
            held.set()
            end.wait(SECONDS_MAX)
    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(SECONDS_MAX)
    yield
    end.set()
    thread.join()


# -- what is refused --

def test_the_bytes_that_are_needed_are_named(shared_root):
    model = made()
    with pytest.raises(ValueError, match=r'keep=1000 is too little for blocks.0, which needs \d+ bytes'):
        hitrain.offload(model, shared_root, keep=1000, lr=LR)


@pytest.mark.parametrize('options, message', [
    ({'optimizer': 'adafactor'}, 'there is no optimizer adafactor'),
    ({'param_dtype': torch.bfloat16}, 'takes no param_dtype'),
    ({'shard': hitrain.Shard(0, 2)}, 'init_process_group'),
    ({'parts': {'norm.weight': (0, (WIDTH,))}}, 'takes no parts'),
    ({'blocks': [nn.Linear(1, 1)]}, 'no part of the model'),
    ({'params': [nn.Parameter(torch.ones(3))]}, 'is no parameter of the model')])
def test_arguments_that_are_refused(shared_root, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        hitrain.offload(made(), shared_root, keep=KEEP, lr=LR, **options)
    assert not shared_root.exists()


def test_a_model_stays_as_it_was_where_it_cannot_be_offloaded(shared_root, tmp_path):
    model, wanted = made(), values(made())
    with pytest.raises(OSError, match='this is no hitrain mount'):
        hitrain.offload(model, tmp_path / 'model', keep=KEEP, lr=LR)
    assert_equal(values(model), wanted)
    shared_root.mkdir(parents=True)
    (shared_root / 'norm.weight').write_bytes(b'')
    with pytest.raises(FileExistsError):
        hitrain.offload(model, shared_root, keep=KEEP, lr=LR)
    assert_equal(values(model), wanted)


def test_a_full_store_is_named_and_the_model_keeps_its_values(store):
    model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(5)])
    wanted = values(model)
    with pytest.raises(OSError, match='No space left'):
        hitrain.offload(model, store.mountpoint / 'model', keep=1 << 30, lr=LR)
    assert_equal(values(model), wanted)


def test_the_first_values_are_in_memory_one_by_one(shared_root, monkeypatch):
    """Also if PyTorch takes large tensors from the heap, as it does when it has freed one."""
    def held():
        with open('/proc/self/status') as f:
            return next(int(line.split()[1]) << 10 for line in f if line.startswith('RssAnon'))
    seen, create = [], MappedFile.create
    monkeypatch.setattr(MappedFile, 'create', lambda f: (create(f), seen.append(held())))
    with hitrain.init_empty():
        model = nn.Sequential(*[nn.Linear(1024, 512) for _ in range(16)])
    for size in range(16, 32):
        torch.zeros(size << 18).add_(1)
    before = held()
    with hitrain.offload(model, shared_root, keep=1 << 30, lr=LR):
        assert len(seen) == 32 and max(seen) - before < 16 << 20  # of 32 MiB


def test_a_failure_loads_no_model_that_was_built_empty(store, monkeypatch):
    loaded = []
    monkeypatch.setattr(MappedFile, 'load', loaded.append)
    with hitrain.init_empty():
        model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(5)])
    with pytest.raises(OSError, match='No space left'):
        hitrain.offload(model, store.mountpoint / 'model', keep=1 << 30, lr=LR)
    assert not loaded and all(p.device.type == 'meta' for p in model.parameters())


def test_a_store_that_dies_in_backward_is_named(store):
    def train_on(model, optimizer):
        train(model, optimizer, 0, 4)
    wanted = made()
    with hitrain.AdamW(wanted.named_parameters(), store.mountpoint / 'plain', lr=LR) as optimizer:
        train_on(wanted, optimizer)
    model = made()
    optimizer = hitrain.offload(model, store.mountpoint / 'own', keep=KEEP, lr=LR)
    train(model, optimizer, 0, 2)
    model.blocks[1].register_forward_hook(lambda m, inputs, y: y[0].register_hook(lambda g: store.kill() and None) and None)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with pytest.raises(OSError, match='daemon is gone'):
            loss_of(model, 2).backward()
        optimizer.close()
    del model, optimizer
    gc.collect()
    store.mount()
    with hitrain.init_empty():
        again = Text()
        again.head.weight = again.embedding.weight
    with hitrain.offload(again, store.mountpoint / 'own', keep=KEEP, lr=LR, resume=True) as optimizer:
        assert optimizer.committed_step == 2
        train(again, optimizer, 2, 4)
        assert_equal(values(again), values(wanted))


@pytest.fixture(autouse=True)
def no_mapping_is_left(request):
    """Mappings of files would keep the store mounted, and models of all tests would fill it."""
    yield
    gc.collect()
    if 'shared_root' in request.fixturenames:
        shutil.rmtree(request.node.funcargs['shared_root'].parent, ignore_errors=True)


# -- models that are built in parts --

def test_ties_made_by_identity_stay(shared_root):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            weight = nn.Parameter(torch.zeros(8, 8))
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.a.weight, self.b.weight = weight, weight
    with hitrain.init_empty():
        model, others = Pair(), [nn.Linear(8, 8) for _ in range(100)]
    assert model.a.weight is model.b.weight and model.a.weight.device.type == 'meta'
    assert len({id(p) for layer in others for p in layer.parameters()}) == 200
    weights = {'a.bias': torch.ones(8), 'b.bias': torch.ones(8), 'b.weight': torch.full((8, 8), 3.0)}  # by the second name of the tie
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR, weights=weights):
        assert torch.equal(model.a.weight, weights['b.weight'])


def test_a_buffer_without_values_is_refused(shared_root):
    model = nn.BatchNorm1d(4).to('meta')
    with pytest.raises(ValueError, match='buffer running_mean is on the device meta.*init_empty'):
        hitrain.offload(model, shared_root, keep=KEEP, lr=LR)


@pytest.mark.parametrize('resume', [False, True])
def test_a_missing_mount_is_named(tmp_path, resume):
    for make in (lambda: hitrain.offload(nn.Linear(2, 2), tmp_path / 'model', keep=KEEP, lr=LR, resume=resume),
                 lambda: hitrain.AdamW(nn.Linear(2, 2).parameters(), tmp_path / 'model', lr=LR, resume=resume, names=['a', 'b'])):
        with pytest.raises(FileNotFoundError, match='this is no hitrain mount.*mount -t hitrain'):
            make()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize('options', [{}, {'pack': 4096}])
def test_gradients_of_other_sizes_are_refused(shared_root, options):
    """Also where both sizes have the right sum."""
    a, b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    with hitrain.AdamW([('a', a), ('b', b)], shared_root, lr=LR, **options) as optimizer:
        before = torch.cat([a.detach(), b.detach()])
        a.data, b.data = torch.zeros(3), torch.zeros(5)
        a.grad, b.grad = torch.ones(3), torch.ones(5)
        with pytest.raises(ValueError, match='the gradient of a has 3 elements of shape .3,., and its file has 4'):
            optimizer.step()
        a.data, b.data, a.grad, b.grad = before[:4], before[4:], None, None


def opens(store):
    lines = dict(line.split('=', 1) for line in os.getxattr(store.mountpoint, 'user.hitrain.stats').decode().splitlines())
    return int(lines['passthrough_opens']), int(lines['passthrough_used_bytes']), int(lines['passthrough_bytes'])


def test_parameters_are_memory_of_a_store_without_an_option(shared_store, shared_root):
    """The bits are those of a model in memory, which asks for nothing."""
    plain, own = made(tied=False), made(tied=False)
    before = opens(shared_store)
    with hitrain.AdamW(plain.named_parameters(), shared_root.with_name('plain'), lr=LR) as optimizer:
        losses = train(plain, optimizer, 0, STEPS)
    assert opens(shared_store)[0] == before[0] and before[2] == 0
    with hitrain.offload(own, shared_root, keep=KEEP, lr=LR) as optimizer:
        if not any(f._is_passed for f in optimizer._mapped()):
            pytest.skip('the kernel or the privileges are not there')
        assert all(f._is_passed for f in optimizer._mapped())
        assert opens(shared_store)[1] >= sum(p.numel() * 4 for p in own.parameters())
        assert train(own, optimizer, 0, STEPS) == losses
        assert_equal(values(plain), values(own))
        with torch.no_grad():
            own.head.bias.fill_(7.0)
        train(own, optimizer, STEPS, STEPS + 1)
        wanted = values(own)
    again = made(tied=False)
    with hitrain.offload(again, shared_root, keep=KEEP, lr=LR, resume=True) as optimizer:
        assert all(f._is_passed for f in optimizer._mapped())
        assert_equal(wanted, values(again))
    lent = shared_root.with_name('lent')
    lent.mkdir()
    os.setxattr(lent, 'user.hitrain.passthrough', b'on')
    with pytest.raises(ValueError, match='async_step needs ordinary files, and .* is in the memory of the store'):
        with hitrain.offload(made(tied=False), lent / 'model', keep=KEEP, lr=LR, async_step=True) as optimizer:
            train(own, optimizer, 0, 1)


def test_where_the_kernel_has_pages_of_its_own():
    with mounted('torch-offload-off', '64M,passthrough=off') as store:
        for kind in Text, Image:
            (store.mountpoint / kind.__name__).mkdir()
            plain_and_offloaded(store.mountpoint / kind.__name__ / 'model', kind, steps=8, durable_every=4)
        assert opens(store)[0] == 0


@pytest.mark.parametrize('options', [{'async_step': True}, {'redo': True, 'durable_every': 4}])
def test_these_ask_for_no_memory_of_the_store(shared_store, shared_root, options):
    before = opens(shared_store)[0]
    with hitrain.offload(made(), shared_root, keep=KEEP, lr=LR, **options) as optimizer:
        assert not any(f._is_passed for f in optimizer._mapped())
    assert opens(shared_store)[0] == before
