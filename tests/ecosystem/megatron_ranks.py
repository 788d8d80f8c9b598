# SPDX-License-Identifier: Apache-2.0
"""Each process of test_megatron runs this; the environment says which part."""
import os
import re
import shutil
import signal
import sys

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, os.environ['FAKE'])
from megatron_fake import DistributedOptimizer  # noqa: E402
import hitrain.megatron  # noqa: E402

PART, FOLDER, root = os.environ['PART'], os.environ['FOLDER'], '/mnt/hitrain/job'
torch.use_deterministic_algorithms(True)
dist.init_process_group('gloo')
rank, world = dist.get_rank(), dist.get_world_size()


class Model(torch.nn.Module):
    """With parameters of both dtypes, and one that fewer ranks than there are have elements of."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(33, 65).bfloat16()
        self.norm = torch.nn.LayerNorm(65)
        self.last = torch.nn.Linear(65, 3).bfloat16()

    def forward(self, x):
        return self.last(self.norm(self.first(x).float()).bfloat16())


def made(seed=1, **options):
    model = Model(seed)
    return model, DistributedOptimizer(model, **options)


def trained(model, optimizer, steps, dies=-1):
    """Every process has the same data, so a mean over two, four or eight of them has the bits of one."""
    for step in steps:
        x = torch.randn(16, 33, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.zero_grad()
        for half in x.split(8):
            optimizer.backward((model(half).float() - half[:, :3].float()).square().mean() / 2)
        for g in optimizer.optimizer.param_groups:
            g['lr'] = 1e-2 / (1 + step)
        if step == dies:
            die_in_a_step()
        optimizer.step()


def die_in_a_step():
    """Rank 0 ends when the gradients of all ranks are sent, before the commit."""
    def end():
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        stores[0].optimizer._end_step = end


def values(model):
    return {n: p.detach().float().clone() for n, p in model.named_parameters()}


def same(left, right, close=0.0):
    for n in left:
        assert (left[n] - right[n]).abs().max() <= close, (n, (left[n] - right[n]).abs().max())


def fails(kind, text, call):
    with pytest.raises(kind, match=re.escape(text)):
        call()


def checkpoint(step):
    return f'{FOLDER}/checkpoints/iter_{step:07}'


def attached(optimizer, **options):
    return hitrain.megatron.attach(optimizer, root, place='tp0-pp0', grad_dtype=torch.float32, **options)


def kept():
    return sorted(os.listdir(f'{root}/tp0-pp0-opt0/.hitrain/snap'))


model, optimizer = made()
if PART == 'train':
    """As the distributed optimizer itself; then checkpoints at steps 4 and 6."""
    plain, other = made()
    stores = attached(optimizer)
    assert all(m.untyped_storage().size() == 0 for ms in optimizer.shard_fp32_from_float16_groups for m in ms)
    trained(model, optimizer, range(4))
    trained(plain, other, range(4))
    same(values(model), values(plain), close=0.02)  # a bit of bf16
    hitrain.megatron.save_to(optimizer, checkpoint(4))
    trained(model, optimizer, range(4, 6))
    optimizer._nvme_state_store.save_to(checkpoint(6))
    at6 = values(model)
    trained(model, optimizer, range(6, 9))
    at9 = values(model)
    torch.save((at6, at9), f'{FOLDER}/values{rank}')
    assert optimizer._nvme_state_store.load_from(checkpoint(6))
    model.first.weight.data[0, 0] += 0  # the model's parameters are the buffer still
    for c in optimizer.model_chunks:
        c.start_param_sync()
    same(values(model), at6)
    trained(model, optimizer, range(6, 9))
    same(values(model), at9)
    assert len(kept()) == 2
    dist.barrier()
    if rank == 0:
        shutil.rmtree(checkpoint(4))
    dist.barrier()
    stores[0].save_to(checkpoint(9))
    stores[0].save_to(checkpoint(9))  # again: the first one is not named any more
    assert len(kept()) == 2, kept()
    fails((FileNotFoundError, hitrain.RankFailed), 'has no optimizer state', lambda: stores[0].load_from(checkpoint(5)))
elif PART == 'die':
    stores = attached(optimizer)
    assert hitrain.megatron.load_from(optimizer, checkpoint(6))
    trained(model, optimizer, range(6, 9), dies=8)
    raise AssertionError('nobody died')
elif PART == 'resume':
    """After a kill, and with another number of ranks: the step of a checkpoint, and then the same bits."""
    at6, at9 = torch.load(f'{FOLDER}/values0')
    stores = attached(optimizer)
    fails(RuntimeError, 'load a checkpoint', optimizer._nvme_state_store.step)
    assert hitrain.megatron.load_from(optimizer, checkpoint(6))
    for c in optimizer.model_chunks:
        c.start_param_sync()
    same(values(model), at6)
    trained(model, optimizer, range(6, 9))
    same(values(model), at9)
    # Values from elsewhere: the moments stay. And a checkpoint without a manifest begins anew, if that is allowed.
    state = {n: p * 0.5 for n, p in values(model).items()}
    optimizer.reload_model_params(state_dict=state)
    for c in optimizer.model_chunks:
        c.start_param_sync()
    same(values(model), {n: p.to(dict(model.named_parameters())[n].dtype).float() for n, p in state.items()})
    stores[0].save_to(checkpoint(20))
    trained(model, optimizer, range(20, 22))
    assert hitrain.megatron.load_from(optimizer, checkpoint(20))
    stores[0]._fresh = True
    assert not hitrain.megatron.load_from(optimizer, f'{FOLDER}/elsewhere')
    assert not os.path.getsize(f'{root}/tp0-pp0-opt0/.hitrain/state/first.weight/exp_avg')
elif PART == 'refused':
    def with_config(of='config', **settings):
        for name, value in settings.items():
            setattr(getattr(optimizer, of), name, value)
        return lambda: attached(optimizer)
    fails(ValueError, '--optimizer sgd', with_config(optimizer='sgd'))
    fails(ValueError, 'optimizer_cpu_offload', with_config(optimizer='adam', optimizer_cpu_offload=True))
    with_config(optimizer_cpu_offload=False)
    fails(ValueError, 'use_megatron_fsdp', with_config('ddp_config', use_megatron_fsdp=True))
    optimizer.ddp_config.use_megatron_fsdp = False
    fails(TypeError, 'no DistributedOptimizer', lambda: hitrain.megatron.attach(torch.optim.SGD(model.parameters(), lr=1), root))
    elsewhere = root if rank else FOLDER
    fails(ValueError, 'on another mount for rank 1', lambda: hitrain.megatron.attach(optimizer, elsewhere, place='tp0-pp0'))
    stores = []
sys.stdout.write('all is well\n')  # one write: torchrun's processes share the pipe
for store in stores:
    store.close()
dist.barrier()
dist.destroy_process_group()
