# SPDX-License-Identifier: Apache-2.0
"""hitrain.offload() in several processes on one mount: the bits of one process, one copy of the parameters, and errors on all ranks."""
import contextlib
import gc
import os
import re
import signal
import warnings

import pytest

from trainer import LR, PROCESSES, SECONDS_MAX, TOP, used_of  # first: it makes the client importable
import torch
import torch.distributed as dist
import hitrain
from demo_store import mounted
from hitrain import _early, _offload
from hitrain.distributed import RankFailed, Shard
from test_torch_offload import KEEP, Text, Twice, assert_equal, loss_of, made, values
from test_torch_readme import Model

WORLD, STEPS = 2, 3


def batch_of(step, part, rank):
    return (step * 2 + part) * WORLD + rank


def reference(kind, root, path):
    """One process that runs the batches of all ranks, one after the other; then two steps of two passes each."""
    model = made(kind)
    with hitrain.AdamW(model.named_parameters(), root, lr=LR) as optimizer:
        for step in range(STEPS):
            for rank in range(WORLD):
                (loss_of(model, batch_of(step, 0, rank)) / WORLD).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(values(model), f'{path}-{STEPS}')
    with hitrain.AdamW(model.named_parameters(), root, lr=LR, resume=True, accumulate=2) as optimizer:
        for step in range(STEPS, STEPS + 2):
            for part in range(2):
                for rank in range(WORLD):
                    (loss_of(model, batch_of(step, part, rank)) / WORLD).backward()
                optimizer.send_gradients()
            optimizer.step()
    torch.save(values(model), f'{path}-{STEPS + 2}')


# The example of docs/offload.md.
EXAMPLE, = re.findall(r'^## Several processes\n.*?^```python\n(.*?)^```', (TOP / 'docs/offload.md').read_text(), re.M | re.S)
BATCHES = [torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) for i in range(2 * WORLD)]


def reference_of_example(root, path):
    model = Model()
    torch.save(model.state_dict(), f'{path}.pt')
    with hitrain.AdamW(model.named_parameters(), root, lr=3e-4) as optimizer:
        for step in range(len(BATCHES) // WORLD):
            for x in BATCHES[step * WORLD:][:WORLD]:
                (model(x) / WORLD).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(values(model), path)


class Rank:
    def __init__(self, rank, base, tmp):
        self.rank, self.base, self.tmp = rank, base, tmp
        self.shard = Shard(rank, WORLD, timeout=SECONDS_MAX)

    def offload(self, model, name, **options):
        return hitrain.offload(model, self.base / name, keep=options.pop('keep', KEEP), lr=LR, shard=self.shard, **options)

    def train(self, model, optimizer, first, last, passes=1):
        for step in range(first, last):
            for part in range(passes):
                loss_of(model, batch_of(step, part, self.rank)).backward()
                assert all(p.grad is None for p in model.parameters()) or isinstance(model, Twice)
            optimizer.step()
            optimizer.zero_grad()

    def agrees(self, model, path):
        assert_equal(values(model), torch.load(path))


def part_trains(r, kind):
    name = kind.__name__
    model = made(kind)
    if r.rank:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()  # rank 0's values are the first ones
    with r.offload(model, name, activations=64 << 10 if hasattr(torch, 'compiler') else None) as optimizer:
        r.train(model, optimizer, 0, STEPS)
        r.agrees(model, r.tmp / f'{name}-{STEPS}')
        dist.barrier()
    with hitrain.init_empty():
        model = Text()
        model.head.weight = model.embedding.weight
    if kind is Text:
        with r.offload(model, name, resume=True, accumulate=2, keep=1 << 30) as optimizer:
            r.train(model, optimizer, STEPS, STEPS + 2, passes=2)
            r.agrees(model, r.tmp / f'{name}-{STEPS + 2}')
            part_memory(r, model, optimizer)


def part_example(r, text):
    names = {'Model': Model, 'batches': BATCHES}
    for there, instead in (('/mnt/hitrain/model', str(r.base / 'example')), ('model.safetensors', f'{r.tmp}/example.pt'),
                           ("init_process_group('gloo')", f"init_process_group('gloo', init_method='file://{r.tmp}/meeting', rank={r.rank}, "
                            f'world_size={WORLD})')):
        assert text.count(there) == 1
        text = text.replace(there, instead)
    exec(text, names)
    with names['optimizer']:
        r.agrees(names['model'], r.tmp / 'example')
        dist.barrier()


def part_memory(r, model, optimizer):
    """All ranks have loaded the whole model, and the machine has it once."""
    loss_of(model, 0)
    dist.barrier()
    own = {'Rss': 0, 'Pss': 0}
    with open('/proc/self/smaps', encoding='utf-8') as maps:
        inside = False
        for line in maps:
            if re.match(r'[0-9a-f]+-[0-9a-f]+ ', line):
                inside = f'{optimizer.root}/' in line
            elif inside and line.split(':')[0] in own:
                own[line.split(':')[0]] += int(line.split()[1]) << 10
    held = torch.tensor([own['Rss'], own['Pss']])
    dist.barrier()
    dist.all_reduce(held)
    size = optimizer.figures()['held_bytes']
    assert size >= sum(p.numel() * p.element_size() for p in model.parameters())
    assert own['Rss'] == size and held[0] == WORLD * size
    assert size <= held[1] < 1.1 * size
    dist.barrier()


def part_device(r, kind):
    """Memory of the CPU stands for that of a GPU of each rank."""
    gpu_of, _offload.gpu_of = _offload.gpu_of, torch.device
    model = made(kind)
    with r.offload(model, f'device-{kind.__name__}', device='cpu', activations=64 << 10) as optimizer:
        r.train(model, optimizer, 0, STEPS)
        r.agrees(model, r.tmp / f'{kind.__name__}-{STEPS}')
        assert not optimizer._has_copies
        dist.barrier()
    _offload.gpu_of = gpu_of


class Shares(torch.nn.Module):
    """Gradients of a sum share memory, with each other and with one that backward still needs."""

    def __init__(self):
        super().__init__()
        self.query, self.key = (torch.nn.Parameter(torch.linspace(-1, k, 128).view(16, 8)) for k in (1, 2))
        self.token, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        both = self.query.unsqueeze(0) + self.key.unsqueeze(0)
        return self.last(self.token(x) + both).square().mean()


def part_shares(r):
    torch.manual_seed(1)
    model, alone = Shares(), Shares()
    alone.load_state_dict(model.state_dict())
    batches = [torch.full((1, 16, 8), rank + 1.0) for rank in range(WORLD)]
    mean = [sum(g) for g in zip(*(torch.autograd.grad(alone(x) / WORLD, list(alone.parameters())) for x in batches))]
    bytes_before, _early.BUCKET_BYTES = _early.BUCKET_BYTES, 600
    with r.offload(model, 'shares', optimizer='sgd', activations=None) as optimizer:
        for group in optimizer.param_groups:
            group['lr'] = 1.0
        model(batches[r.rank]).backward()
        optimizer.step()
        _early.BUCKET_BYTES = bytes_before
        for (name, p), was, g in zip(model.named_parameters(), alone.parameters(), mean):
            torch.testing.assert_close(p.detach(), was.detach() - g, msg=lambda why, name=name: f'{name}: {why}')
        dist.barrier()


def part_disagrees(r):
    """Models that run differently, and a wrapper that reduces, too, are named on all ranks; then training goes on."""
    model = made()
    with r.offload(model, 'disagrees') as optimizer:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        with pytest.raises(RuntimeError, match='does not work under DistributedDataParallel.*Pass shard='):
            loss_of(wrapped, 7).backward()
        del wrapped
        gc.collect()
        optimizer.abort()
        optimizer.zero_grad()
        r.train(model, optimizer, 0, 1)
        before = values(model)
        with pytest.raises((RuntimeError, RankFailed), match='the gradient of'):
            if r.rank:
                model.norm(model.embedding(torch.arange(4))).sum().backward()
            else:
                loss_of(model, 7).backward()
        optimizer.abort()
        optimizer.zero_grad()
        assert_equal(values(model), before)
        r.train(model, optimizer, 1, STEPS)
        r.agrees(model, r.tmp / f'Text-{STEPS}')
        dist.barrier()


def part_closes(r):
    """Within a step that rank 0 takes back: until then a weight whose gradient was sent has no values. Nothing of the mount is left."""
    model = made()
    with r.offload(model, 'closes') as optimizer:
        r.train(model, optimizer, 0, 1)
        wanted = values(model)
        loss_of(model, batch_of(1, 0, r.rank)).backward()
        dist.barrier()
        if r.rank:
            optimizer.close()
            with pytest.raises(RuntimeError, match='head.bias is used after its optimizer was closed'):
                model.head.bias.sum()
        dist.barrier()
    assert not used_of(optimizer.root)
    if r.rank == 0:
        assert_equal(values(model), wanted)
    dist.barrier()
    assert_equal({**hitrain.materialize(model, [name for name, _ in model.named_parameters()]), 'scale': model.scale}, wanted)


def part_one_fails(r):
    """A gradient that one rank cannot write is the error of all."""
    model = made()
    with r.offload(model, 'fails') as optimizer:
        r.train(model, optimizer, 0, 1)
        if r.rank:
            def broken(f, part):
                del optimizer._send_one
                raise OSError(28, 'of the test')
            optimizer._send_one = broken
        with pytest.raises((OSError, RankFailed), match='of the test|rank 1'):
            loss_of(model, 7).backward()
            optimizer.step()
        optimizer.zero_grad()
        r.train(model, optimizer, 1, STEPS)
        r.agrees(model, r.tmp / f'Text-{STEPS}')
        dist.barrier()


def part_death(r):
    """Rank 1 is killed in backward, between gradients that are there and gradients that are not."""
    model = made()
    with r.offload(model, 'death') as optimizer:
        r.train(model, optimizer, 0, 1)
        before = values(model)
        if r.rank:
            model.blocks[1].register_forward_hook(lambda m, inputs, y: y[0].register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL)) and None)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            with pytest.raises(RankFailed, match='rank 1 is gone: its process has ended') as e:
                loss_of(model, 7).backward()
        assert e.value.rank == 1
        assert_equal(values(model), before)


def work(rank, base, tmp, results):
    part = None
    try:
        torch.set_num_threads(1)
        _early.BUCKET_BYTES = 100 << 10
        r = Rank(rank, base, tmp)
        on_device = [(part_device, [Twice])] if hasattr(torch, 'compiler') else []
        for part, options in ((part_example, [EXAMPLE]), (part_trains, [Text]), (part_trains, [Twice]), *on_device, (part_shares, []), (part_disagrees, []),
                              (part_closes, []), (part_one_fails, []), (part_death, [])):
            part(r, *options)
            gc.collect()
        results.put((rank, None))
    except BaseException as e:
        results.put((rank, f'{part and part.__name__}: {type(e).__name__}: {e}'))
        raise


@pytest.fixture
def one_thread():
    """As in the ranks: sums of other threads are other sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def store():
    """Ranks share pages of the kernel. Those of the store are its own, too, and count in no rank alone."""
    with mounted('torch-offload-ranks', '64M,passthrough=off') as s:
        yield s


def test_ranks_train_one_offloaded_model(store, tmp_path, one_thread):
    reference_of_example(store.mountpoint / 'reference', tmp_path / 'example')
    for kind in (Text, Twice):
        reference(kind, store.mountpoint / f'reference-{kind.__name__}', tmp_path / kind.__name__)
    results = PROCESSES.Queue()
    workers = [PROCESSES.Process(target=work, args=(rank, store.mountpoint, tmp_path, results)) for rank in range(WORLD)]
    for w in workers:
        w.start()
    try:
        said = results.get(timeout=SECONDS_MAX)
        for w in workers:
            w.join(SECONDS_MAX)
        assert said == (0, None) and [w.exitcode for w in workers] == [0, -signal.SIGKILL]
    finally:
        for w in workers:
            w.kill()
            w.join()
    again = made()
    with contextlib.closing(hitrain.offload(again, store.mountpoint / 'death', keep=KEEP, lr=LR, resume=True)) as optimizer:
        assert optimizer.committed_step == 1
    del again
    gc.collect()
