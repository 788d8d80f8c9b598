# SPDX-License-Identifier: Apache-2.0
"""Each process of test_parts_of_dtensors runs this."""
import os
import re
import sys
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import hitrain

dist.init_process_group('gloo')
rank, world = dist.get_rank(), dist.get_world_size()
root = '/mnt/hitrain/model'


def made(mesh, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 1))
    plain = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 1))
    plain.load_state_dict(model.state_dict())
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model, plain


def fails(kind, text, call):
    with pytest.raises(kind, match=re.escape(text)):
        call()


def moved():
    """Bytes of parameters and of gradients that programs have read and written."""
    dist.barrier()
    stats = dict(line.split('=', 1) for line in os.getxattr(os.path.dirname(os.path.dirname(root)), 'user.hitrain.stats').decode().splitlines() if '=' in line)
    dist.barrier()
    return int(stats['mount_param_read_bytes']), int(stats['mount_grad_written_bytes'])


def trained(model, plain, optimizer, other, steps):
    """Every process has the same data, so a mean over two, four or eight of them has the bits of one."""
    for step in steps:
        x = torch.randn(16, 33, generator=torch.Generator().manual_seed(step))
        for m, o in ((model, optimizer), (plain, other)):
            o.zero_grad()
            m(x).square().mean().backward()
            o.step()
        agree(model, plain)


def agree(model, plain):
    for (n, p), q in zip(model.named_parameters(), plain.parameters()):
        assert torch.equal(p.full_tensor(), q), n


def check(mesh, root):
    model, plain = made(mesh)
    other = torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9)
    with hitrain.SGD(model.named_parameters(), root, lr=1e-2, momentum=0.9, shard=hitrain.Shard(rank, world), full_state_dict=True) as optimizer:
        for n, p in plain.named_parameters():
            with open(os.path.join(root, n), 'rb') as f:
                assert f.read() == p.detach().numpy().tobytes(), n
        trained(model, plain, optimizer, other, range(2))
        before = moved()
        trained(model, plain, optimizer, other, range(2, 4))
        reads, writes = (now - b for now, b in zip(moved(), before))
        size = sum(p.numel() for p in plain.parameters()) * 4
        assert writes == 2 * size, (writes, size)  # once for all ranks
        # Pages at the borders of parts are read by two; replicas may find pages in the cache.
        assert 2 * size <= reads <= mesh.ndim * 2 * (size + world * 4 * 8192), (reads, size)
        moment = optimizer.read_state(model[0].weight, 'momentum_buffer')
        assert moment.placements == model[0].weight.placements
        assert torch.equal(moment.full_tensor(), other.state[plain[0].weight]['momentum_buffer'])
        # A change that each rank makes to its part.
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters()):
                p.mul_(0.5)
                q.mul_(0.5)
        trained(model, plain, optimizer, other, range(4, 6))
        return {n: p.full_tensor() for n, p in model.named_parameters()}, plain, other


mesh = dist.device_mesh.init_device_mesh('cpu', (world,))
_, plain, other = check(mesh, root)
# The same root, with other parts: a mesh of replicas, and another optimizer's state.
if world == 4:
    pairs = dist.device_mesh.init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicas', 'parts'))
    check(pairs, root + '-pairs')
    model, _ = made(pairs, seed=5)
else:
    model, _ = made(mesh, seed=5)
with hitrain.SGD(model.named_parameters(), root, lr=1e-2, momentum=0.9, shard=hitrain.Shard(rank, world), resume=True) as optimizer:
    agree(model, plain)
    trained(model, plain, optimizer, other, range(6, 8))
    # State of torch.optim, which has the whole.
    plain.load_state_dict(made(mesh, seed=9)[1].state_dict())
    with torch.no_grad():
        for p, q in zip(model.parameters(), plain.parameters()):
            p.copy_(distribute_tensor(q.detach(), p.device_mesh, p.placements))
    optimizer.load_state_dict(other.state_dict())
    trained(model, plain, optimizer, other, range(8, 10))
    # A group that comes later.
    late = torch.nn.Parameter(distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]))
    optimizer.add_param_group({'params': [('late', late)], 'lr': 2.0})
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert late.full_tensor()[6].item() == 4.0
    dist.barrier()
    assert os.path.getsize(os.path.join(root, 'late')) == 28
    late.grad = distribute_tensor(torch.ones(7), mesh, [Replicate()])
    fails((TypeError, hitrain.RankFailed), 'is placed as', optimizer.step)
across = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)]))
fails((TypeError, hitrain.RankFailed), 'along dimension 0', lambda: hitrain.SGD([('w', across)], root + '-across', shard=hitrain.Shard(rank, world)))
fails(TypeError, 'pass shard=', lambda: hitrain.SGD([('w', torch.nn.Parameter(late.detach().clone()))], f'{root}-alone{rank}'))
sys.stdout.write('all is well\n')  # one write: torchrun's processes share the pipe
dist.barrier()
dist.destroy_process_group()
