# SPDX-License-Identifier: Apache-2.0
"""hitrain.offload(device='cuda'): a bf16 model larger than keep has the bits of the one that is wholly on the GPU, whatever is slow.

`make check-gpu` runs it where a GPU is. tests/optim/test_torch_device.py has all that needs no GPU."""
import os
import pathlib
import sys

import pytest

os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # sums in one order
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'optim'))
from trainer import LR  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
import hitrain  # noqa: E402
from hitrain._device import Copies  # noqa: E402

WIDTH, BLOCKS, STEPS = 256, 8, 4
KEEP = 3 << 20  # of 8 MiB
CYCLES = 20_000_000  # some 10 ms


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def made():
    torch.manual_seed(0)
    return Model().bfloat16()


def train(model, optimizer):
    losses = []
    for step in range(STEPS):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16().cuda()
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope='module', autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def slow_loads(monkeypatch):
    """Values come to the device long after load() returns."""
    real = Copies.load

    def load(self, values, there):
        with torch.cuda.stream(self._to):
            torch.cuda._sleep(CYCLES)
        return real(self, values, there)
    monkeypatch.setattr(Copies, 'load', load)


def slow_gradients(monkeypatch):
    """They leave the device long after backward asked for it, and are computed late."""
    real = Copies._begin

    def begin(self, own, slot):
        torch.cuda._sleep(CYCLES)
        with torch.cuda.stream(self._back):
            torch.cuda._sleep(CYCLES)
        return real(self, own, slot)
    monkeypatch.setattr(Copies, '_begin', begin)


@pytest.mark.parametrize('slow', [None, slow_loads, slow_gradients])
def test_a_model_larger_than_keep_has_the_bits_of_one_on_the_gpu(store, monkeypatch, slow):
    plain = made().cuda()
    with hitrain.AdamW(plain.named_parameters(), store.mountpoint / 'plain', lr=LR) as optimizer:
        wanted = train(plain, optimizer)
    own = made()
    if slow:
        slow(monkeypatch)
    with hitrain.offload(own, store.mountpoint / 'own', keep=KEEP, lr=LR, device='cuda') as optimizer:
        assert train(own, optimizer) == wanted
        assert optimizer.figures()['held_bytes_max'] <= KEEP < sum(p.numel() * p.element_size() for p in own.parameters())
        for (name, p), q in zip(own.named_parameters(), plain.parameters()):
            assert p.device.type == 'cpu' and torch.equal(p, q.cpu()), name
    del own, optimizer


def test_micro_batches_have_the_bits_of_the_usual_order(store, tmp_path):
    def loss_of(model, i):
        return model(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(i)).bfloat16().cuda())
    plain, own = made().cuda(), made()
    with hitrain.AdamW(plain.named_parameters(), store.mountpoint / 'plain', lr=LR) as optimizer:
        for i in range(3):
            loss_of(plain, i).backward()
        optimizer.step()
    with hitrain.offload(own, store.mountpoint / 'own', keep=KEEP, lr=LR, device='cuda') as optimizer:
        optimizer.trace(tmp_path / 'step.json')
        hitrain.microbatches(own, range(3), loss_of)
        optimizer.step()
        for (name, p), q in zip(own.named_parameters(), plain.parameters()):
            assert torch.equal(p, q.cpu()), name
    assert '"device: compute"' in (tmp_path / 'step.json').read_text()
    del own, optimizer


class Wide(nn.Module):
    """Saved tensors of 2 MiB beside small parameters."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x.expand(4096, WIDTH) if x.shape[0] == 1 else x)
        return x.float().square().mean()


@pytest.mark.parametrize('slow', [None, slow_loads, slow_gradients])
def test_saved_tensors_that_leave_the_gpu_change_no_bit(store, monkeypatch, slow):
    found = []
    for name, keep in (('plain', None), ('all', 0), ('some', 16 << 20)):
        torch.manual_seed(0)
        model = Wide().bfloat16()
        if slow and keep is not None:
            slow(monkeypatch)
        with hitrain.offload(model, store.mountpoint / name, keep=KEEP, lr=LR, device='cuda', activations=keep) as optimizer:
            for step in range(STEPS):
                x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16().cuda()
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append({n: p.detach().clone() for n, p in model.named_parameters()})
            if keep is not None:
                figures = optimizer.figures()['activations']
                assert figures['written_bytes'] + figures['dropped_bytes'] + figures['forwarded_bytes'] > 0
        monkeypatch.undo()
        del model, optimizer
    for other in found[1:]:
        assert all(torch.equal(found[0][n], other[n]) for n in other)


def test_the_device_holds_what_keep_allows(store):
    """Of a model of 64 MiB, with few activations."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(32)]).bfloat16()
    keep = 8 << 20
    with hitrain.offload(model, store.mountpoint / 'own', 'sgd', keep=keep, blocks=model, lr=LR, device='cuda') as optimizer:
        x = torch.ones(1, 1024, dtype=torch.bfloat16, device='cuda')
        model(x).sum().backward()  # the first pass makes workspaces of cuBLAS
        optimizer.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
        # What left waits for the streams that used it, gradients are on their way, and the allocator rounds.
        assert torch.cuda.max_memory_allocated() - before <= 2 * keep + (8 << 20)
    del model, optimizer
