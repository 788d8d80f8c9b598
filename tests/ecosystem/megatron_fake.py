# SPDX-License-Identifier: Apache-2.0
"""A distributed optimizer with the fields and the flow of megatron/core/optimizer/distrib_optimizer.py: buffers in two buckets, ranges of
ranks, gradients that are reduced, clipped and applied to main parameters, and parameters that are gathered. On the CPU, with gloo."""
import types

import torch
import torch.distributed as dist


class Range:
    def __init__(self, start, end):
        self.start, self.end, self.size = start, end, end - start


class Bucket:
    def __init__(self, params, world):
        self.params, self.at, end = params, {}, 0
        for p in params:
            self.at[p], end = Range(end, end + p.numel()), end + p.numel()
        size = -(-end // (64 * world)) * 64 * world
        self.param_data = torch.zeros(size, dtype=params[0].dtype)
        self.grad_data = torch.zeros(size)
        for p, r in self.at.items():
            self.param_data[r.start:r.end].copy_(p.data.view(-1))
            p.data = self.param_data[r.start:r.end].view(p.shape)
            p.main_grad = self.grad_data[r.start:r.end].view(p.shape)
        self.shard = size // world


class Buffer:
    def __init__(self, params, world):
        half = len(params) // 2 or 1
        self.params = params
        self.buckets = [Bucket(ps, world) for ps in (params[:half], params[half:]) if ps]


class Chunk(torch.nn.Module):
    """A model, as DistributedDataParallel has it: backward adds to main_grad."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)

    def start_param_sync(self):
        for buffer in self.buffers_of_optimizer:
            for b in buffer.buckets:
                shards = list(b.param_data.clone().split(b.shard))
                dist.all_gather(shards, shards[dist.get_rank()].clone())
                b.param_data.copy_(torch.cat(shards))


class DistributedOptimizer:
    def __init__(self, model, *, lr=1e-2, clip=0.5, **config):
        self.data_parallel_group, self.rank, self.world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        self.config = types.SimpleNamespace(optimizer='adam', decoupled_weight_decay=True, clip_grad=clip, timers=object(), **config)
        self.ddp_config = types.SimpleNamespace(use_megatron_fsdp=False, overlap_param_gather=False)
        chunk = Chunk(model)
        self.model_chunks, self.distributed_optimizer_instance_id = [chunk], 0
        named = list(model.named_parameters())
        kinds = [[p for _, p in named if p.dtype == d] for d in (torch.bfloat16, torch.float32)]
        self.buffers = chunk.buffers_of_optimizer = [Buffer(ps, self.world) for ps in kinds if ps]
        self.model_param_gbuf_map, self._ranges = {}, {}
        for i, buffer in enumerate(self.buffers):
            for k, b in enumerate(buffer.buckets):
                for p, r in b.at.items():
                    start, end = max(r.start, self.rank * b.shard), min(r.end, (self.rank + 1) * b.shard)
                    if start < end:
                        self.model_param_gbuf_map[p] = i, b.param_data.dtype, k
                        self._ranges[p] = {'gbuf_world_in_bucket': Range(start, end), 'param': Range(start - r.start, end - r.start)}
        groups = [{'params': [], 'lr': lr, 'betas': (0.9, 0.99), 'eps': 1e-8, 'weight_decay': d} for d in (0.1, 0.0)]
        self.model_float16_groups, self.shard_fp32_from_float16_groups, self.model_fp32_groups, self.shard_fp32_groups = ([[], []] for _ in range(4))
        for _, p in named:
            if p not in self._ranges:
                continue
            g, r, k = int(p.dim() < 2), self._ranges[p]['param'], self.model_param_gbuf_map[p]
            shard = p.data.view(-1)[r.start:r.end]
            half = p.dtype == torch.bfloat16
            main = shard.clone().float() if half else shard
            (self.model_float16_groups if half else self.model_fp32_groups)[g].append(p)
            (self.shard_fp32_from_float16_groups if half else self.shard_fp32_groups)[g].append(main)
            groups[g]['params'].append(main)
        if any(g['params'] for g in groups):
            self.optimizer = torch.optim.AdamW(groups)

    def _get_model_param_range_map(self, p):
        return self._ranges[p]

    def _owned(self):
        for models, mains in ((self.model_float16_groups, self.shard_fp32_from_float16_groups), (self.model_fp32_groups, self.shard_fp32_groups)):
            for ps, ms in zip(models, mains):
                yield from zip(ps, ms)

    def zero_grad(self):
        for buffer in self.buffers:
            for b in buffer.buckets:
                b.grad_data.zero_()

    def backward(self, loss):
        loss.backward()
        for buffer in self.buffers:
            for p in buffer.params:
                p.main_grad.add_(p.grad)
                p.grad = None

    def step(self):
        for buffer in self.buffers:
            for b in buffer.buckets:
                dist.all_reduce(b.grad_data)
                b.grad_data.div_(self.world)
        squares = torch.zeros((), dtype=torch.float64)  # so that the norm of other ranks has the same bits
        for p, main in self._owned():
            r = self._ranges[p]['param']
            main.grad = p.main_grad.view(-1)[r.start:r.end].float()
            squares += main.grad.double().square().sum()
        dist.all_reduce(squares)
        clip = min(1.0, self.config.clip_grad / (float(squares.sqrt()) + 1e-6))
        for _, main in self._owned():
            main.grad.mul_(clip)
        return self.step_with_ready_grads()

    def step_with_ready_grads(self):
        self.optimizer.step()
        for p, main in self._owned():
            r = self._ranges[p]['param']
            p.data.view(-1)[r.start:r.end].copy_(main)
        for chunk in self.model_chunks:
            chunk.start_param_sync()
        return True

    def reload_model_params(self, state_dict=None):
        raise AssertionError('of Megatron')

    def _build_model_param_to_state_dict_param_map(self, state_dict):
        return {p: state_dict[n] for n, p in self.model_chunks[0].module.named_parameters()}
