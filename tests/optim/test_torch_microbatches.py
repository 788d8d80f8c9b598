# SPDX-License-Identifier: Apache-2.0
"""hitrain.microbatches(): block by block, with the bits of the usual order, and parameters that are loaded as for one micro-batch."""
import contextlib
import gc
import re
import threading
import warnings

import pytest

from trainer import LR, TOP, shared_root, shared_store, store  # first: it makes the client importable
from test_torch_offload import KEEP, LONG, WIDTH, WORDS, Adapted, Image, Text, Twice, assert_equal, loss_of, made, no_mapping_is_left, values
import torch
import torch.utils.checkpoint
from torch import nn
import hitrain
from demo_store import mounted
from hitrain._activations import Activations
from hitrain._residency import Residency

PASSES = 4
STEPS = 2


def in_usual_order(root, kind=Text, steps=STEPS, passes=PASSES, dtype=torch.float32, of_pass=loss_of, around=contextlib.nullcontext, model_options={}, **options):
    """Losses and values of the model in memory, which accumulates gradients there."""
    model = made(kind, **model_options).to(dtype)
    losses = []
    with hitrain.AdamW(model.named_parameters(), root.with_name('plain'), lr=LR, **options) as optimizer:
        for step in range(steps):
            with around():
                for i in range(passes):
                    losses.append(of_pass(model, step * passes + i))
                    losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).detach(), values(model)


def in_vertical_order(root, kind=Text, steps=STEPS, passes=PASSES, dtype=torch.float32, of_pass=loss_of, around=contextlib.nullcontext, keep=KEEP,
                      model_options={}, **options):
    model = made(kind, **model_options).to(dtype)
    losses = []
    with hitrain.offload(model, root, keep=keep, lr=LR, **options) as optimizer:
        for step in range(steps):
            with around():
                for loss in hitrain.microbatches(model, range(step * passes, (step + 1) * passes), of_pass):
                    assert not loss.requires_grad
                    losses.append(loss)
            assert optimizer._residency.figures()['held_bytes_max'] <= keep
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if optimizer._activations:
            optimizer._activations.settle()  # its thread may have tensors to let go
        return torch.stack(losses), values(model), optimizer.figures()


def assert_same(shared_root, **options):
    own = {name: options.pop(name) for name in ('keep', 'activations') if name in options}
    losses, wanted = in_usual_order(shared_root, **options)
    found, got, figures = in_vertical_order(shared_root, **options, **own)
    assert torch.equal(found, losses)
    assert_equal(wanted, got)
    return figures


def loss_in_bf16(model, step):
    x = torch.randint(WORDS, (2, 12), generator=torch.Generator().manual_seed(1000 + step))
    return nn.functional.cross_entropy(model(x)[0].float().flatten(0, 1), x.roll(1, 1).flatten())


class Routed(Text):
    """Each part of a batch uses one of the experts, and some parts use none of some."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.experts = nn.ParameterList([nn.Parameter(torch.full((WIDTH,), 0.1 * i)) for i in range(3)])
            block.register_forward_hook(lambda m, inputs, y: (y[0] * m.experts[int(y[0].detach().abs().sum() * 1000) % 3], y[1]))


@pytest.mark.parametrize('kind, options', [
    (Text, {}), (Twice, {}), (Adapted, {}), (Image, {}), (Routed, {}), (Text, {'recompute': 'yes'}), (Text, {'recompute': 'reentrant'})])
def test_the_bits_are_those_of_the_usual_order(shared_root, kind, options):
    assert_same(shared_root, kind=kind, steps=200 if LONG else STEPS, model_options=options)


def test_bfloat16(shared_root):
    assert_same(shared_root, dtype=torch.bfloat16, of_pass=loss_in_bf16)


def in_autocast():
    return torch.autocast('cpu', dtype=torch.bfloat16)


def loss_in_autocast(model, step):
    with in_autocast():
        return loss_in_bf16(model, step)


@pytest.mark.parametrize('options', [{'of_pass': loss_in_autocast}, {'of_pass': loss_in_bf16, 'around': in_autocast}])
def test_autocast(shared_root, options):
    assert_same(shared_root, **options)


@pytest.mark.parametrize('options', [{'max_grad_norm': 0.1}, {'durable_every': 4}])
def test_with_options_of_the_optimizer(shared_root, options):
    assert_same(shared_root, **options)


def test_it_is_one_of_the_passes_that_the_store_adds(shared_root):
    plain, own = made(), made()
    with hitrain.offload(plain, shared_root.with_name('plain'), keep=KEEP, lr=LR, accumulate=2) as optimizer:
        for group in ((0, 1), (2, 3)):
            with optimizer.hold_gradients():
                loss_of(plain, group[0]).backward()
            loss_of(plain, group[1]).backward()
        optimizer.step()
    with hitrain.offload(own, shared_root, keep=KEEP, lr=LR, accumulate=2) as optimizer:
        for group in ((0, 1), (2, 3)):
            hitrain.microbatches(own, group, loss_of)
            assert all(p.grad is None for p in own.parameters())
        optimizer.step()
    assert_equal(values(plain), values(own))


def bytes_of(store, root, passes):
    """Of one step that is like the ones before: parameters that were loaded, and that the store sent to the trainer."""
    model, step = made(tied=False), [0]
    with hitrain.offload(model, root, keep=300 << 10, lr=LR) as optimizer:
        def train():
            hitrain.microbatches(model, range(step[0], step[0] + passes), loss_of)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step[0] += passes
        for _ in range(3):
            train()
        before = optimizer.figures()['loaded_bytes'], store.counters()['mount_param_read_bytes']
        for _ in range(4):
            train()
        return optimizer.figures()['loaded_bytes'] - before[0], store.counters()['mount_param_read_bytes'] - before[1]


def test_parameters_are_loaded_as_for_one_micro_batch(monkeypatch):
    """On demand only, so that the number does not depend on who is faster; and from a mount that passes no file, so that it can be counted."""
    monkeypatch.setattr(Residency, '_read_ahead', lambda residency: None)
    with mounted('torch-microbatches-off', '64M,passthrough=off') as store:
        one = bytes_of(store, store.mountpoint / 'one', 1)
        four = bytes_of(store, store.mountpoint / 'four', 4)
    assert one[0] > 0 and one[1] > 0
    assert four[0] == one[0] and four[1] <= 1.1 * one[1]


def test_gradients_leave_with_the_last_micro_batch(shared_root):
    model, most = made(tied=False), [0]

    def arrived(grad):
        most[0] = max(most[0], sum(p.grad is not None for p in model.parameters()))
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR):
        for p in model.parameters():
            p.register_hook(arrived)
        hitrain.microbatches(model, range(PASSES), loss_of)
        assert all(p.grad is None for p in model.parameters())
    assert most[0] <= len(list(model.blocks[0].parameters())) + 1


# -- random numbers --

class Dropped(Text):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda m, inputs, y: (nn.functional.dropout(y[0], 0.3), y[1]))


def test_random_numbers_of_each_micro_batch(shared_root):
    """As docs/offload.md says."""
    model, plain = made(Dropped), made(Dropped)
    torch.manual_seed(7)
    with hitrain.AdamW(plain.named_parameters(), shared_root.with_name('plain'), lr=LR) as optimizer:
        copy = torch.Generator()
        copy.set_state(torch.get_rng_state())
        seeds = torch.randint(1 << 62, (PASSES - 1,), generator=copy).tolist()
        loss_of(plain, 0).backward()
        after = torch.get_rng_state()
        for i, seed in enumerate(seeds, 1):
            torch.manual_seed(seed)
            loss_of(plain, i).backward()
        optimizer.step()
    torch.manual_seed(7)
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        losses = hitrain.microbatches(model, range(PASSES), loss_of)
        assert torch.equal(torch.get_rng_state(), after)
        optimizer.step()
    assert len(set(map(float, losses))) == PASSES
    assert_equal(values(plain), values(model))


def test_without_random_numbers_the_generator_stays(shared_root):
    model = made()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR):
        before = torch.get_rng_state()
        hitrain.microbatches(model, range(PASSES), loss_of)
        assert torch.equal(torch.get_rng_state(), before)


# -- activations --

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def loss_of_wide(model, step):
    return model(torch.randn(16, 128, WIDTH, generator=torch.Generator().manual_seed(step))).pow(2).mean()


needs_activations = pytest.mark.skipif(not hasattr(torch, 'compiler'), reason='activations= needs PyTorch 2.1')


@needs_activations
@pytest.mark.parametrize('activations', [0, 3 << 20, 'auto'])
def test_activations_in_the_store(shared_root, activations):
    figures = assert_same(shared_root, kind=Wide, of_pass=loss_of_wide, activations=activations)['activations']
    assert figures['saved_bytes'] > 10 << 20 and figures['held_bytes'] == 0
    if activations == 0:
        assert figures['written_bytes'] > 0


@needs_activations
def test_saved_tensors_come_back_in_the_order_of_backward(shared_root):
    """Reading ahead relies on it: the rest of this micro-batch's part, then the next micro-batch's."""
    order, real = [], Activations.unpack

    def unpack(saved, packed):
        if hasattr(packed, 'entry'):
            order.append(packed.entry.order)
        return real(saved, packed)
    Activations.unpack = unpack
    try:
        in_vertical_order(shared_root, kind=Wide, of_pass=loss_of_wide, activations=0)
    finally:
        Activations.unpack = real
    steps = [order[:len(order) // 2], order[len(order) // 2:]]
    for step in steps:
        assert step == sorted(step, key=lambda o: o[:2]) and len({o[1] for o in step}) == PASSES


# -- errors --

class Choosy(Text):
    """Goes round a block for some batches."""

    def forward(self, x):
        y, total = self.embedding(x), torch.zeros(())
        for i, block in enumerate(self.blocks):
            if i != 1 or int(x[0, 0]) % 2:
                y, total = block(y, total)
        return self.head(self.norm(y)), total


def loss_of_parity(model, odd):
    x = torch.full((2, 12), 10 + odd)
    return model(x)[0].pow(2).mean()


def threads_of_batches():
    return [t for t in threading.enumerate() if t.name.startswith('hitrain-batch')]


def test_micro_batches_that_part_are_named(shared_root):
    model = made(Choosy)
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        before = torch.get_rng_state()
        with pytest.raises(RuntimeError, match='micro-batch 0 came to the forward of blocks.1, and micro-batch 2 to the forward of blocks.2'):
            hitrain.microbatches(model, [1, 1, 0], loss_of_parity)
        assert not threads_of_batches() and torch.equal(torch.get_rng_state(), before)
        hitrain.microbatches(model, [1, 3, 5], loss_of_parity)
        optimizer.step()


def test_errors_of_a_micro_batch_are_those_of_the_call(shared_root):
    plain, model = made(), made()

    def fails(model, i):
        loss = loss_of(model, i)
        if i == 2:
            raise KeyError('mine')
        return loss

    def fails_in_backward(model, i):
        loss = loss_of(model, i)
        if i == 1:
            model.blocks[1].norm.weight.register_hook(refuse)
        return loss

    def refuse(grad):
        raise ArithmeticError('in backward')
    with hitrain.AdamW(plain.named_parameters(), shared_root.with_name('plain'), lr=LR) as optimizer:
        for i in range(PASSES):
            loss_of(plain, i).backward()
        optimizer.step()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        with pytest.raises(KeyError, match='mine'):
            hitrain.microbatches(model, range(PASSES), fails)
        with pytest.raises(TypeError, match='must return a tensor'):
            hitrain.microbatches(model, range(PASSES), lambda m, i: 0.5)
        with pytest.raises(RuntimeError, match='runs already'):
            hitrain.microbatches(model, range(PASSES), lambda m, i: hitrain.microbatches(m, [i], loss_of)[0])
        with pytest.raises(ArithmeticError, match='in backward'):
            hitrain.microbatches(model, range(PASSES), fails_in_backward)
        assert not threads_of_batches()
        model.blocks[1].norm.weight._backward_hooks.clear()
        optimizer.zero_grad()
        hitrain.microbatches(model, range(PASSES), loss_of)
        optimizer.step()
        assert_equal(values(plain), values(model))


def test_an_interrupt_ends_all_threads(shared_root):
    model = made()

    def interrupted(model, i):
        loss = loss_of(model, i)
        if i == 1:
            raise KeyboardInterrupt
        return loss
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        with pytest.raises(KeyboardInterrupt):
            hitrain.microbatches(model, range(PASSES), interrupted)
        assert not threads_of_batches()
        hitrain.microbatches(model, range(PASSES), loss_of)
        optimizer.step()


def test_calls_that_are_refused(shared_root):
    model = made()
    with pytest.raises(ValueError, match='takes a model of offload'):
        hitrain.microbatches(model, [0], loss_of)
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR):
        with pytest.raises(ValueError, match='at least one batch'):
            hitrain.microbatches(model, [], loss_of)
        with torch.no_grad(), pytest.raises(RuntimeError, match='gradients are disabled'):
            hitrain.microbatches(model, [0], loss_of)
        assert len(hitrain.microbatches(model, [0], loss_of)) == 1
    with pytest.raises(ValueError, match='takes a model of offload'):
        hitrain.microbatches(model, [0], loss_of)


def test_a_daemon_that_dies_in_backward_is_an_error(store):
    model = made()
    optimizer = hitrain.offload(model, store.mountpoint / 'own', keep=KEEP, lr=LR)
    hitrain.microbatches(model, range(PASSES), loss_of)
    optimizer.step()
    turns = []

    def kill(grad):
        turns.append(optimizer._turns.turn)
        if turns[-1] == 2:
            store.kill()
    handle = model.blocks[1].register_forward_hook(lambda m, inputs, y: y[0].register_hook(kill) and None)
    with warnings.catch_warnings(), pytest.raises(OSError, match='daemon is gone'):
        warnings.simplefilter('ignore')
        hitrain.microbatches(model, range(PASSES), loss_of)
    assert turns and not threads_of_batches()
    handle.remove()
    optimizer.close()
    del model, optimizer
    gc.collect()


def test_the_example_of_the_documents_runs(shared_root):
    text = (TOP / 'docs/offload.md').read_text()
    example, = [e for e in re.findall(r'^```python\n(.*?)^```', text, re.M | re.S) if 'microbatches' in e]
    plain, model = made(), made()
    with hitrain.AdamW(plain.named_parameters(), shared_root.with_name('plain'), lr=LR) as optimizer:
        for i in range(3):
            (loss_of(plain, i) / 3).backward()
        optimizer.step()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR) as optimizer:
        exec(example, {'hitrain': hitrain, 'model': model, 'optimizer': optimizer, 'batches': [0, 1, 2], 'loss_of': loss_of, 'print': lambda *a: None})
        assert optimizer.committed_step == 1
        assert_equal(values(plain), values(model))
