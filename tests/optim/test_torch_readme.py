# SPDX-License-Identifier: Apache-2.0
"""The examples in README.md and docs/pytorch.md run as they stand: alone, and in processes that share one model."""
import os
import pathlib
import re

import pytest

from trainer import TOP, on_processes, store  # first: it makes the client importable
import torch
import torch.distributed as dist
import hitrain

BIN = pathlib.Path(os.environ.get('HITRAIN_BIN') or TOP / 'build/bin')


def code(name, heading):
    """The first Python below a heading."""
    return re.search(rf'^#+ {heading}\n.*?^```python\n(.*?)^```', (TOP / name).read_text(), re.M | re.S).group(1)


ALONE, SHARED = code('README.md', 'Train with PyTorch'), code('docs/pytorch.md', 'Several processes')
JOB = code('docs/pytorch.md', 'Several stores of one job')
INFERENCE = code('docs/pytorch.md', 'Weights for inference')
LR = 3e-4  # as there
STEPS = 3


@pytest.fixture
def folder(store):
    return store.mountpoint


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(301, 500), torch.nn.Tanh(), torch.nn.Linear(500, 3))


def inputs(step, rank):
    return torch.randn(8, 301, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, step, rank):
    return model(inputs(step, rank)).square().mean()


def example(text, root):
    """The code that runs once, and the code of each step."""
    assert '/mnt/hitrain/model' in text and text.count('\n...\n') == 1
    return text.replace('/mnt/hitrain/model', str(root)).split('\n...\n')


def run_example(text, root, rank):
    once, each = example(text, root)
    names = {'model': make_model()}
    exec(once, names)
    for step in range(STEPS):
        names['model'].zero_grad()
        names['loss'] = loss_of(names['model'], step, rank)
        exec(each, names)
    names['optimizer'].close()
    return {n: p.detach().clone() for n, p in names['model'].named_parameters()}


def with_torch(world):
    """The same with torch.optim in one process, gradients being means over all ranks."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(loss_of(model, step, rank) / world for rank in range(world)).backward()
        optimizer.step()
    return dict(model.named_parameters())


def assert_close(got, wanted):
    for name, p in wanted.items():
        assert (got[name] - p).abs().max() <= 1e-2 * LR, name


def test_one_process(tmp_path, monkeypatch):
    """Of the README: with a store of its own, and then as a run that goes on."""
    monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path))
    monkeypatch.setenv('HITRAIN_BIN', str(BIN))
    assert "'/data/model.img'" in ALONE
    names = {'model': make_model(), 'batches': range(STEPS), 'loss_of': lambda loss: loss}
    forward = names['model'].forward
    names['model'].forward = lambda step: forward(inputs(step, 0)).square().mean()
    exec(ALONE.replace('/data/model.img', str(tmp_path / 's.img')), names)
    assert_close(values(names['model']), with_torch(1))
    with hitrain.Store(tmp_path / 's.img') as store:
        assert os.getxattr(store / 'model', 'user.hitrain.durable_step') == b'%d' % STEPS


def share(rank, world, meeting, root, results):
    run_rank(rank, world, meeting, results, lambda: {n: p.numpy() for n, p in run_example(SHARED, root, rank).items()})


def run_rank(rank, world, meeting, results, work):
    try:
        torch.set_num_threads(1)
        dist.init_process_group('gloo', init_method=f'file://{meeting}', rank=rank, world_size=world)
        results.put((rank, work()))
        dist.barrier()
    except BaseException as e:
        results.put((rank, e))
        raise


def run_ranks(world, kind, tmp_path, root):
    """What kind(rank, world, meeting, root, results) gives on each rank."""
    return on_processes(world, kind, world, tmp_path / 'meeting', root)


def test_processes_that_share_a_model(folder, tmp_path):
    world = 2
    found = run_ranks(world, share, tmp_path, folder / 'model')
    wanted = with_torch(world)
    for part in found.values():
        assert_close({n: torch.from_numpy(v) for n, v in part.items()}, wanted)
    assert os.getxattr(folder / 'model', 'user.hitrain.durable_step') == b'%d' % STEPS


def of_job(rank, world, meeting, root, results):
    """Ranks that stopped at different steps, each in a root of its own."""
    def work():
        own = f'{root}-{rank}'
        with hitrain.AdamW((model := make_model()).named_parameters(), own, retain=4) as optimizer:
            for step in range(STEPS + rank):
                loss_of(model, step, 0).backward()
                optimizer.step()
        names = {'model': make_model(), 'hitrain': hitrain, 'dist': dist, 'torch': torch}
        exec(JOB.replace('/mnt/hitrain/model', own), names)
        with names['optimizer'] as optimizer:
            return optimizer.committed_step
    run_rank(rank, world, meeting, results, work)


def test_stores_of_one_job(folder, tmp_path):
    assert '/mnt/hitrain/model' in JOB
    assert run_ranks(2, of_job, tmp_path, folder / 'model') == {0: STEPS, 1: STEPS}


# The loss is the output.
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def values(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_safetensors_files_and_an_offloaded_model(folder, tmp_path, monkeypatch):
    """The files that one example writes are the weights of the other one, and another model."""
    files, offloaded = code('docs/pytorch.md', 'Models as safetensors files'), code('docs/offload.md', 'Training what does not fit')
    batches = [torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]
    model = Model()
    with hitrain.AdamW(model.named_parameters(), folder / 'model', lr=LR):
        pass
    monkeypatch.chdir(tmp_path)
    exec(files.replace('/mnt/hitrain', str(folder)), {})
    copy = Model()
    with hitrain.AdamW(copy.named_parameters(), folder / 'copy', lr=LR, resume=True):
        assert all(torch.equal(p, values(model)[n]) for n, p in values(copy).items())
    with hitrain.AdamW(copy.named_parameters(), folder / 'in-memory', lr=LR) as optimizer:
        for batch in batches:
            copy(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "'model.safetensors'" in offloaded
    names = {'Model': Model, 'batches': batches}
    exec(offloaded.replace('/mnt/hitrain/model', str(folder / 'offloaded')).replace('model.safetensors', 'my-model/model.safetensors'), names)
    with names['optimizer'] as optimizer:
        assert optimizer.committed_step == STEPS
        assert all(torch.equal(p, values(copy)[n]) for n, p in values(names['model']).items())


class Ended(Exception):
    """Of the trainer."""


def test_inference_that_follows_a_trainer(folder):
    model = make_model()
    engine = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    wholes = []
    with hitrain.AdamW(model.named_parameters(), folder / 'model', lr=LR, deltas=8, delta_max=1) as optimizer:

        def end_step():
            if optimizer.committed_step == STEPS:
                raise Ended
            loss_of(model, optimizer.committed_step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()

        def load_all():
            wholes.append(optimizer.committed_step)
            for name, p in engine.items():
                p.copy_(torch.frombuffer(bytearray((folder / 'model' / name).read_bytes()), dtype=p.dtype).reshape(p.shape))

        end_step()
        with pytest.raises(Ended):
            exec(INFERENCE.replace('/mnt/hitrain/model', str(folder / 'model')),
                 {'hitrain': hitrain, 'load_all': load_all, 'engine_parameters': engine, 'wait': end_step})
        assert wholes == [1] and optimizer.committed_step == STEPS
        assert all(torch.equal(engine[name], p) for name, p in model.named_parameters())
