# SPDX-License-Identifier: Apache-2.0
"""hitrain.microbatches() of a model with device=: segment by segment, with the bits of the usual order in memory."""
import pytest

from trainer import LR, shared_root, shared_store, store  # first: it makes the client importable
import torch
if not hasattr(torch, 'compiler'):
    pytest.skip('PyTorch 2.1 or newer', allow_module_level=True)
import torch.utils.checkpoint
from torch import nn
import hitrain
from hitrain import _offload
from hitrain._residency import Residency
from late_device import ILLEGAL, late
from test_torch_microbatches import PASSES, Choosy, Dropped, Routed, in_autocast, in_usual_order, in_vertical_order, loss_in_autocast, loss_in_bf16, \
    loss_of_parity, threads_of_batches
from test_torch_offload import KEEP, WIDTH, WORDS, Adapted, Text, Twice, assert_equal, loss_of, made, values


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, request):
    """A device without streams."""
    if 'late' not in request.fixturenames:
        monkeypatch.setattr(_offload, 'gpu_of', torch.device)


def assert_same(shared_root, **options):
    own = {name: options.pop(name) for name in ('keep', 'activations') if name in options}
    losses, wanted = in_usual_order(shared_root, **options)
    found, got, figures = in_vertical_order(shared_root, device='cpu', **options, **own)
    assert torch.equal(found, losses)
    assert_equal(wanted, got)
    return figures


class Checkpointed(Text):
    """Each block is computed anew in backward, with its hooks."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        y, total = self.embedding(x) * self.scale, torch.zeros(())
        for block in self.blocks:
            y, total = torch.utils.checkpoint.checkpoint(lambda y, total, block=block: block(y, total.clone()), y, total, use_reentrant=self.reentrant)
        return self.head(self.norm(y)), total


class Crossed(nn.Module):
    """The first half's result goes into each block of the second one, by name."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.second = nn.ModuleList(Meets() for _ in range(3))

    def forward(self, x):
        seen, y = self.embedding(x), self.embedding(x.flip(1))
        for block in self.first:
            seen = block(seen).tanh()
        for block in self.second:
            y = block(y, {'seen': [seen]}, factor=seen.new_ones(()))
        return self.head(y), y.new_zeros(())


class Meets(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, y, others, factor):
        return y + self.up(y * others['seen'][0]) * factor


class FromBefore(Text):
    """The head takes a product of the first segment, past all blocks."""

    def forward(self, x):
        y, total, double = self.embedding(x), torch.zeros(()), self.head.weight * 2
        for block in self.blocks:
            y, total = block(y, total)
        return self.norm(y) @ double.T, total


@pytest.mark.parametrize('kind, options', [
    (Text, {}), (Text, {'model_options': {'tied': False}}), (Twice, {}), (Adapted, {}), (Routed, {}), (Text, {'model_options': {'recompute': 'yes'}}),
    (Text, {'model_options': {'recompute': 'reentrant'}}), (Checkpointed, {}), (Checkpointed, {'model_options': {'reentrant': True}}),
    (Text, {'max_grad_norm': 0.1}), (Text, {'durable_every': 4}), (Text, {'of_pass': loss_in_autocast}),
    (Text, {'of_pass': loss_in_bf16, 'around': in_autocast}), (Text, {'of_pass': loss_in_bf16, 'dtype': torch.bfloat16}), (Text, {'activations': 0})], ids=str)
def test_the_bits_are_those_of_the_usual_order(shared_root, kind, options, late):
    assert_same(shared_root, kind=kind, **options)


@pytest.mark.parametrize('kind', [Crossed, FromBefore])
def test_tensors_that_pass_several_segments(shared_root, late, kind):
    assert_same(shared_root, kind=kind, keep=8 << 20)


def test_random_numbers_of_each_micro_batch(shared_root, late):
    """On a device its generator follows the same rule, as torch.manual_seed() does."""
    model, plain = made(Dropped), made(Dropped)
    torch.manual_seed(7)
    with hitrain.offload(plain, shared_root.with_name('plain'), keep=KEEP, lr=LR) as optimizer:
        losses = hitrain.microbatches(plain, range(PASSES), loss_of)
        optimizer.step()
    after = torch.get_rng_state()
    torch.manual_seed(7)
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR, device='cpu') as optimizer:
        assert hitrain.microbatches(model, range(PASSES), loss_of) == losses
        assert torch.equal(torch.get_rng_state(), after)
        optimizer.step()
    assert_equal(values(plain), values(model))


def loads_of(root, passes, monkeypatch):
    model, order = made(tied=False), []
    with monkeypatch.context() as context, hitrain.offload(model, root, keep=620 << 10, lr=LR, device='cpu') as optimizer:
        context.setattr(Residency, '_read_ahead', lambda residency: None)
        load = optimizer._residency._load
        optimizer._residency._load = lambda f: (order.append(f.name), load(f))
        for step in range(2):
            del order[:]
            hitrain.microbatches(model, range(step * passes, (step + 1) * passes), loss_of)
            optimizer.step()
    return order


def test_parameters_are_loaded_as_for_one_micro_batch(shared_root, monkeypatch):
    one = loads_of(shared_root.with_name('one'), 1, monkeypatch)
    assert len(one) > len(list(made(tied=False).parameters())) and loads_of(shared_root.with_name('four'), 4, monkeypatch) == one


def test_gradients_leave_with_the_last_micro_batch(shared_root, late):
    model, most = made(tied=False), [0]

    def arrived(grad):
        most[0] = max(most[0], sum(p.grad is not None for p in model.parameters()))
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR, device='cpu') as optimizer:
        for p in model.parameters():
            p.register_hook(arrived)
        hitrain.microbatches(model, range(PASSES), loss_of)
        assert all(p.grad is None and optimizer._files[p].sent == 1 for p in model.parameters())
    assert most[0] <= len(list(model.blocks[0].parameters())) + 4  # of the last segment: a block, the norm and the head


def test_it_is_one_of_the_passes_that_the_store_adds(shared_root, late):
    plain, model = made(), made()
    with hitrain.offload(plain, shared_root.with_name('plain'), keep=KEEP, lr=LR, accumulate=2) as optimizer:
        for group in ((0, 1), (2, 3)):
            hitrain.microbatches(plain, group, loss_of)
        optimizer.step()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR, accumulate=2, device='cpu') as optimizer:
        for group in ((0, 1), (2, 3)):
            hitrain.microbatches(model, group, loss_of)
        optimizer.step()
    assert_equal(values(plain), values(model))


class Residual(Text):
    """Adds around its blocks."""

    def forward(self, x):
        y, total = self.embedding(x), torch.zeros(())
        for block in self.blocks:
            more, total = block(y, total)
            y = y + more
        return self.head(self.norm(y)), total


class Scaled(Text):
    """A product of a parameter is used in several segments."""

    def forward(self, x):
        y, total, factor = self.embedding(x), torch.zeros(()), self.norm.weight * 2
        for block in self.blocks:
            y, total = block(y * factor, total)
        return self.head(self.norm(y)), total


def test_models_that_are_refused_train_in_the_usual_order(shared_root, late):
    for kind in (Residual, Scaled):
        model, plain = made(kind), made(kind)
        with hitrain.AdamW(plain.named_parameters(), shared_root.with_name(f'plain-{kind.__name__}'), lr=LR) as optimizer:
            loss_of(plain, 0).backward()
            optimizer.step()
        with hitrain.offload(model, shared_root.with_name(kind.__name__), keep=KEEP, lr=LR, device='cpu') as optimizer:
            with pytest.raises(RuntimeError, match='a tensor of the graph goes around blocks.0: with device='):
                hitrain.microbatches(model, range(PASSES), loss_of)
            optimizer.zero_grad()
            loss_of(model, 0).backward()
            optimizer.step()
            assert_equal(values(plain), values(model))


def test_errors_of_a_micro_batch_are_those_of_the_call(shared_root, late):
    plain, model = made(), made()

    def fails(model, i):
        loss = loss_of(model, i)
        if i == 2:
            raise KeyError('mine')
        return loss

    def refuse(grad):
        raise ArithmeticError('in backward')
    with hitrain.AdamW(plain.named_parameters(), shared_root.with_name('plain'), lr=LR) as optimizer:
        for i in range(PASSES):
            loss_of(plain, i).backward()
        optimizer.step()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR, device='cpu') as optimizer:
        before = torch.get_rng_state()
        with pytest.raises(KeyError, match='mine'):
            hitrain.microbatches(model, range(PASSES), fails)
        with pytest.raises(RuntimeError, match='loss of micro-batch 0 does not depend on a parameter'):
            hitrain.microbatches(model, range(PASSES), lambda m, i: loss_of(m, i).detach())
        model.blocks[1].norm.weight.register_hook(refuse)
        with pytest.raises(ArithmeticError, match='in backward'):
            hitrain.microbatches(model, range(PASSES), loss_of)
        model.blocks[1].norm.weight._backward_hooks.clear()
        optimizer.zero_grad()
        late.illegal_at = late.operations + 500
        with pytest.raises(RuntimeError, match=ILLEGAL):
            for i in range(20):
                hitrain.microbatches(model, range(PASSES), loss_of)
                optimizer.zero_grad()
        late.is_broken = False
        optimizer.zero_grad()
        assert not threads_of_batches() and torch.equal(torch.get_rng_state(), before) and optimizer.committed_step == 0
        hitrain.microbatches(model, range(PASSES), loss_of)
        optimizer.step()
        assert_equal(values(plain), values(model))


def test_micro_batches_that_part_are_named(shared_root):
    model = made(Choosy)
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR, device='cpu'):
        with pytest.raises(RuntimeError, match='micro-batch 0 came to the forward of blocks.1, and micro-batch 2 to the forward of blocks.2'):
            hitrain.microbatches(model, [1, 1, 0], loss_of_parity)
