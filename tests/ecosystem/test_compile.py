# SPDX-License-Identifier: Apache-2.0
"""torch.compile of an offloaded model: by blocks without a break of the graph, and whole; the bits of one that is not compiled."""
import pytest
import torch
from torch._dynamo.utils import counters

from page import shared_store  # first: it makes the client importable
import hitrain

WIDTH, KEEP, STEPS = 128, 1 << 20, 4


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.blocks = torch.nn.Linear(WIDTH, WIDTH), torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture
def root(shared_store, request):
    return shared_store.mountpoint / request.node.name


def train(root, compiled=None, **options):
    """Losses, and the weights at the end. compiled: what the program compiles of the model itself."""
    torch._dynamo.reset()
    counters.clear()
    model, losses = Model(), []
    with hitrain.offload(model, root, lr=1e-2, keep=KEEP, **options) as optimizer:
        runs = compiled(model) if compiled else model
        for step in range(STEPS):
            loss = runs(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def equal(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def by_blocks(model):
    for block in model.blocks:
        block.compile(backend='aot_eager')
    return model


OPTIONS = {'plain': {}, 'saved tensors in the store': {'activations': 1 << 16}, 'clipped': {'max_grad_norm': 0.1}, 'asynchronous': {'async_step': True}}


@pytest.mark.parametrize('kind', OPTIONS)
def test_blocks_are_whole_graphs_and_change_no_bit(root, kind):
    plain = train(f'{root}-plain', **OPTIONS[kind])
    own = train(root, compile={'backend': 'aot_eager'}, **OPTIONS[kind])
    assert equal(own, plain)
    assert not counters['graph_break'] and counters['stats']['unique_graphs'] > 0


@pytest.mark.parametrize('compiled', [by_blocks, lambda model: torch.compile(model, backend='aot_eager')], ids=['block.compile', 'torch.compile'])
def test_what_a_program_compiles_breaks_at_hooks_and_changes_no_bit(root, compiled):
    plain = train(f'{root}-plain')
    assert equal(train(root, compiled), plain)
    assert all('disable' in reason for reason in counters['graph_break']), counters['graph_break']


def test_a_whole_graph_of_the_model_is_refused_by_the_compiler_and_says_why(root):
    with pytest.raises(torch._dynamo.exc.Unsupported, match='torch.compiler.disable'):
        train(root, lambda model: torch.compile(model, backend='aot_eager', fullgraph=True))


def test_the_compiler_of_users(root):
    plain, own = train(f'{root}-plain'), train(root, compile=True)
    assert own[0] == pytest.approx(plain[0], rel=1e-5)


def test_close_leaves_a_model_that_is_not_compiled(root):
    model = Model()
    optimizer = hitrain.offload(model, root, lr=1e-2, keep=KEEP, compile={'backend': 'aot_eager'})
    assert all('forward' in vars(block) for block in model.blocks) and 'forward' not in vars(model.first)
    optimizer.close()
    assert not any('forward' in vars(module) for module in model.modules())
