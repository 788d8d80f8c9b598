# SPDX-License-Identifier: Apache-2.0
"""One run of bench-fit: trains a GPT in one of the ways below, and prints a line of JSON. bench/fit.py starts it.

base         loads PyTorch and trains one block: what any trainer takes
memory       parameters, gradients, state and activations in memory, torch.optim.AdamW
checkpoint   the same with torch.utils.checkpoint for each block
plain        the same with the store's optimizer: the reference for the bits
activations  as memory, and saved tensors go to the folder: a store, or any file system
readback     saves tensors through the same hooks, and times how fast backward has them again
offload      hitrain.offload() with activations
vertical     the same with several micro-batches, block by block
xfs          the same order of loading, with parameters and state in mapped files of another file system
deepspeed    ZeRO-3 with offload_param and offload_optimizer on the folder
deepspeed-base  as base, for DeepSpeed
"""
import argparse
import fcntl
import hashlib
import json
import mmap
import os
import pathlib
import resource
import sys
import time

TOP = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TOP / 'optim/torch')]
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')  # the store's threads want the processors, too
import torch

import demo_fit
import demo_gpt
import hitrain
from hitrain._activations import Activations
from hitrain._residency import Residency, Unit

MIB = 1 << 20
RATE = 1e-3
WARM = 3  # steps before the timed ones: the store learns how much room passes, and makes a plan


def make(args, empty=False):
    demo_gpt.WIDTH, demo_gpt.HEADS, demo_gpt.LAYERS, demo_gpt.BATCH = args.width, args.width // 64, args.layers, args.batch
    torch.set_default_dtype(torch.bfloat16 if args.dtype == 'bf16' else torch.float32)
    torch.manual_seed(1)
    try:
        if not empty:
            return demo_fit.Model()
        with hitrain.init_empty():
            return demo_fit.Model()
    finally:
        torch.set_default_dtype(torch.float32)


def run_steps(args, step_of):
    """step_of(batches) runs one step and returns the loss. Counters are read where the timed steps begin and end."""
    text = demo_gpt.Text(1)
    losses, seconds, io, busy = [], [], [], []
    for n in range(WARM + args.steps):
        if n == WARM:
            io.append(device_counters(args))
            busy.append(processor_seconds(args))
        begin = time.monotonic()
        losses.append(step_of([text.batch(n * args.micro + i) for i in range(args.micro)]))
        seconds.append(time.monotonic() - begin)
    io.append(device_counters(args))
    busy.append(processor_seconds(args))
    read, written = (last - first for first, last in zip(*io))
    trainer, daemon = (last - first for first, last in zip(*busy))
    return {'losses': losses, 'seconds': seconds[WARM:], 'read': read / args.steps, 'written': written / args.steps,
            'trainer_busy': trainer / args.steps, 'daemon_busy': daemon / args.steps}


def device_counters(args):
    if not args.device:
        return 0, 0
    with open(f'/sys/block/{os.path.basename(args.device)}/stat') as f:
        words = f.read().split()
    return int(words[2]) * 512, int(words[6]) * 512


def processor_seconds(args):
    """Of the trainer, and of the store's daemon."""
    used, daemon = resource.getrusage(resource.RUSAGE_SELF), 0.0
    if args.daemon:
        words = pathlib.Path(f'/proc/{args.daemon}/stat').read_text().rsplit(')', 1)[1].split()
        daemon = (int(words[11]) + int(words[12])) / os.sysconf('SC_CLK_TCK')
    return used.ru_utime + used.ru_stime, daemon


def plain_step(model, optimizer):
    def step(batches):
        total = 0.0
        for batch in batches:
            loss = model(*batch) / len(batches)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total
    return step


def digest_of(model):
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------ the ways

def run_base(args):
    args.layers = 1
    model = make(args)
    model(*demo_gpt.Text(1).batch(0)).backward()
    return {}


def run_memory(args, model=None):
    model = model or make(args)
    out = run_steps(args, plain_step(model, torch.optim.AdamW(model.parameters(), lr=RATE)))
    return {**out, 'digest': digest_of(model)}


def run_checkpoint(args):
    from torch.utils.checkpoint import checkpoint
    model = make(args)
    for block in model.blocks:
        block.forward = lambda x, mask, forward=block.forward: checkpoint(forward, x, mask, use_reentrant=False)
    return run_memory(args, model)


def run_plain(args):
    model = make(args)
    with hitrain.AdamW(model.named_parameters(), args.folder / 'model', lr=RATE) as optimizer:
        out = run_steps(args, plain_step(model, optimizer))
    return {**out, 'digest': digest_of(model)}


def hooks_on(args, stay):
    """Other file systems take direct I/O of aligned memory alone."""
    saved = Activations(str(args.folder), args.activations, stay)
    if args.buffered:
        fcntl.fcntl(saved._fd, fcntl.F_SETFL, 0)
    return saved


def run_activations(args):
    model = make(args)
    stay = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = hooks_on(args, stay)
    forward = model.forward

    def hooked(*batch):
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            return forward(*batch)
    model.forward = hooked
    out = run_memory(args, model)
    saved.settle()
    figures = saved.figures()
    saved.close()
    return {**out, 'activations': figures}


def run_readback(args, count=24, size=16 * MIB):
    saved = hooks_on(args, set())
    saved.keep = 0
    held = [saved.pack(torch.full((size // 4,), float(i))) for i in range(count)]
    saved.settle()
    io, begin = [device_counters(args)], time.monotonic()
    for i in reversed(range(count)):
        t = saved.unpack(held.pop())
        assert t[0] == t[-1] == i
        del t
    seconds = time.monotonic() - begin
    io.append(device_counters(args))
    saved.settle()
    saved.close()
    return {'seconds': [seconds], 'read': io[1][0] - io[0][0], 'saved': count * size}


def run_offload(args):
    model = make(args, empty=True)
    optimizer = hitrain.offload(model, args.folder / 'model', lr=RATE, keep=args.keep, activations=args.activations)

    def vertical(batches):
        losses = hitrain.microbatches(model, batches, lambda m, batch: m(*batch) / len(batches))
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses)
    out = run_steps(args, vertical if args.kind == 'vertical' else plain_step(model, optimizer))
    figures = optimizer.figures()
    out['digest'] = digest_of(model)
    optimizer.close()
    return {**out, 'figures': figures, 'activations': figures['activations']}


class MappedParameter:
    """A parameter, and its moments, in mapped files; as MappedFile of the client has them in the store."""

    def __init__(self, folder, name, p):
        self.p, self.bytes, self.maps, tensors = p, -(-p.numel() * p.element_size() // 4096) * 4096, [], []
        for kind, values in (('p', p.detach()), ('m', torch.zeros_like(p)), ('v', torch.zeros_like(p))):
            path = folder / f'{name}.{kind}'
            path.write_bytes(memoryview(values.contiguous().view(torch.uint8).view(-1).numpy()))
            fd = os.open(path, os.O_RDWR)
            os.fsync(fd)
            m = mmap.mmap(fd, 0)
            self.maps.append((fd, m))
            tensors.append(torch.frombuffer(m, dtype=p.dtype).view(p.shape))
            self._drop(fd, m)
        p.data = tensors[0]
        self.optimizer = torch.optim.AdamW([p], lr=RATE)
        self.optimizer.state[p] = {'step': torch.tensor(0.0), 'exp_avg': tensors[1], 'exp_avg_sq': tensors[2]}

    @staticmethod
    def _drop(fd, m):
        m.flush()
        m.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def load(self):
        fd, m = self.maps[0]
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        m.madvise(22)  # MADV_POPULATE_READ

    def release(self):
        self._drop(*self.maps[0])

    def update(self):
        """The gradient is final: the update runs at once, and only loaded values stay."""
        for fd, _ in self.maps[1:]:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        self.optimizer.step()
        self.p.grad = None
        self.maps[0][1].flush()
        for fd, m in self.maps[1:]:
            self._drop(fd, m)


def run_xfs(args):
    model, units, files = make(args, empty=True), [], {}
    for module in model.modules():  # as init_empty's filler does: one module at a time
        own = [(n, p) for n, p in module.named_parameters(recurse=False)]
        if not own:
            continue
        device = module.__dict__.pop('_apply', None)
        for n, p in own:
            module._parameters[n] = torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype))
        module.reset_parameters()
        for n in dict(own):
            p = module._parameters[n]
            files[p] = MappedParameter(args.folder, f'{len(files)}', p)
        del device
    model.register_buffer('mask', torch.full((demo_gpt.CONTEXT,) * 2, float('-inf'), dtype=next(model.parameters()).dtype).triu(1))
    blocks = set(model.blocks)
    inside = {m for b in blocks for m in b.modules() if m is not b}
    for name, module in model.named_modules():
        held = [] if module in inside else [files[p] for p in module.parameters(recurse=module in blocks)]
        if held:
            units.append(Unit(name, module, held))
    residency = Residency(args.keep, units, MappedParameter.load, lambda f: False)
    for unit in units:
        def after(module, inputs, output, unit=unit):
            residency.leave(unit)
            if output.requires_grad:
                output.register_hook(lambda g: residency.need(unit))
        unit.module.register_forward_pre_hook(lambda m, i, unit=unit: residency.enter(unit, False))
        unit.module.register_forward_hook(after)
    for p, f in files.items():
        p.register_post_accumulate_grad_hook(lambda p, f=f: f.update())
    stay = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = hooks_on(args, stay)

    def step(batches):
        total = 0.0
        for batch in batches:
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                loss = model(*batch)
            loss.backward()
            total += loss.item() / len(batches)
        residency.step_ended(lambda f: False)
        return total
    out = run_steps(args, step)
    figures = residency.figures()
    residency.close()
    out['digest'] = digest_of(model)
    saved.settle()
    return {**out, 'figures': figures, 'activations': saved.figures()}


def deepspeed_config(args):
    """Its own settings for parameters and state on NVMe; sizes follow keep."""
    elements = args.keep // 8
    where = {'device': 'nvme', 'nvme_path': str(args.folder), 'pin_memory': False}
    return {
        'train_micro_batch_size_per_gpu': args.batch, 'gradient_accumulation_steps': args.micro,
        'optimizer': {'type': 'AdamW', 'params': {'lr': RATE, 'torch_adam': True}}, 'zero_force_ds_cpu_optimizer': False,
        'bf16': {'enabled': args.dtype == 'bf16'},
        'zero_optimization': {
            'stage': 3, 'offload_param': {**where, 'buffer_count': 16, 'buffer_size': 4 * args.width**2 + 4096, 'max_in_cpu': 0},
            'offload_optimizer': {**where, 'buffer_count': 4}, 'sub_group_size': elements, 'reduce_bucket_size': elements,
            'stage3_max_live_parameters': elements, 'stage3_max_reuse_distance': 0, 'stage3_prefetch_bucket_size': elements, 'stage3_param_persistence_threshold': 10000},
        'aio': {'block_size': MIB, 'queue_depth': 8, 'single_submit': False, 'overlap_events': True}}


def run_deepspeed(args, config=None):
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='29551', RANK='0', WORLD_SIZE='1', LOCAL_RANK='0')
    import deepspeed
    config = config or deepspeed_config(args)
    deepspeed.init_distributed('gloo')
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make(args)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batches):
        total = 0.0
        for batch in batches:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(batches)
        return total
    return {**run_steps(args, step), 'config': config}


def run_deepspeed_base(args):
    args.layers, args.steps, args.micro = 1, 1, 1
    config = deepspeed_config(args)
    for name in ('offload_param', 'offload_optimizer'):
        del config['zero_optimization'][name]
    return run_deepspeed(args, config)


WAYS = {'base': run_base, 'memory': run_memory, 'checkpoint': run_checkpoint, 'plain': run_plain, 'activations': run_activations, 'readback': run_readback, 'offload': run_offload,
        'vertical': run_offload, 'xfs': run_xfs, 'deepspeed': run_deepspeed, 'deepspeed-base': run_deepspeed_base}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('kind', choices=WAYS)
    parser.add_argument('--folder', type=pathlib.Path)
    parser.add_argument('--device', default='')
    parser.add_argument('--daemon', type=int, default=0, help='the process of the store')
    parser.add_argument('--dtype', default='f32')
    parser.add_argument('--buffered', action='store_true', help='the folder is not on a store')
    for name in ('width', 'layers', 'batch', 'micro', 'steps', 'keep', 'activations'):
        parser.add_argument(f'--{name}', type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(min(2, len(os.sched_getaffinity(0))))
    out = WAYS[args.kind](args)
    out['peak'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(out), flush=True)


if __name__ == '__main__':
    main()
