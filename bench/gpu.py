#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A model that trains on a GPU with offload(), beside the same model wholly on the GPU; and the rates of copies.

Run it with `make bench-gpu`, as root. Where PyTorch sees no GPU, the client runs on a stand-in that takes time and computes nothing (gpu_stand_in.py): a
block takes some times as long as the client's own work for it, and its load as long as its forward. What shows is how much of a step is hidden behind
the larger of its parts. No rate of a GPU does.

On a GPU, memory of the CPU is copied in both directions as it is (pageable), from PyTorch's
pinned memory, and registered with cudaHostRegister: ordinary memory, and a file that the store hands out (passthrough=). The model is
bf16, four times as large as keep. Medians of interleaved runs. build/bench has figures in gpu.jsonl, and the time line of a step in gpu.svg and gpu.json.
"""
import argparse
import contextlib
import faulthandler
import gc
import json
import mmap
import os
import pathlib
import statistics
import sys
import tempfile
import time

TOP = pathlib.Path(__file__).resolve().parents[1]
BUILD = pathlib.Path(os.environ.get('HITRAIN_BUILD') or TOP / 'build')
sys.path.insert(0, str(TOP / 'optim/torch'))
import torch  # noqa: E402
from torch import nn  # noqa: E402
import hitrain  # noqa: E402
from demo_store import Store  # noqa: E402
import gpu_line  # noqa: E402
from gpu_stand_in import StandIn  # noqa: E402
from hitrain._mapped import is_passed, map_file  # noqa: E402

MIB = 1 << 20
COPY = 64 * MIB
SECONDS_MAX = 220  # then it shows where all threads are, and ends
TIMES = 4  # of the stand-in: a block computes so many times as long as the client works for it


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.computing(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))

    def computing(self, x):
        return x


class Model(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


# ---- copies ----

def rate(host, device, out):
    """GB/s of a copy."""
    into, source = (host, device) if out else (device, host)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.monotonic()
        into.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.monotonic() - begin)
    return COPY / statistics.median(times) / 1e9


def registered(host):
    """The error of cudaHostRegister; 0: it is registered."""
    error = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), COPY, 0))
    if error:
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device='cuda')  # the runtime keeps the error for the next launch
    return error


def file_of_store(mountpoint, size):
    """The mapping of a file that the store hands out, as far as it does. The file goes with the mapping; the rest is whether it is handed out."""
    path = mountpoint / 'copy'
    with open(path, 'wb') as f:
        os.setxattr(path, 'user.hitrain.dtype', b'f32')
        os.setxattr(path, 'user.hitrain.pin', b'dram')
        f.write(bytes(size))
    fd = os.open(path, os.O_RDWR)
    try:
        mapped = torch.frombuffer(map_file(fd, size, mmap.PROT_READ | mmap.PROT_WRITE), dtype=torch.uint8)
        return mapped, is_passed(fd)
    finally:
        os.close(fd)
        path.unlink()


def copies(store):
    device = torch.ones(COPY, dtype=torch.uint8, device='cuda')
    pinned = torch.ones(COPY, dtype=torch.uint8, pin_memory=True)
    anonymous = torch.frombuffer(mmap.mmap(-1, COPY), dtype=torch.uint8).fill_(1)
    found = {'pageable': (rate(anonymous, device, False), rate(anonymous, device, True)), 'pinned': (rate(pinned, device, False), rate(pinned, device, True))}
    mapped, passed = file_of_store(store.mountpoint, COPY)
    for name, host in (('registered', anonymous), (f'registered file of the store{"" if passed else ", not handed out"}', mapped)):
        error = registered(host)
        if error:
            found[name] = error
            continue
        found[name] = rate(host, device, False), rate(host, device, True)
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    return found


# ---- steps ----

def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_seconds(model, optimizer, x):
    synchronize()
    begin = time.monotonic()
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    synchronize()
    return time.monotonic() - begin


def traced_step(model, optimizer, x, title):
    """Draws a step, and returns the milliseconds of its parts, and of forward and backward, until the last gradient has left."""
    path = BUILD / 'bench/gpu.json'
    optimizer.trace(path)
    step_seconds(model, optimizer, x)
    document = json.loads(path.read_text())
    (BUILD / 'bench/gpu.svg').write_text(gpu_line.svg(document, title))
    rows = gpu_line.rows_of(document)
    parts = {name: gpu_line.busy(spans) for name, (_, spans) in rows.items()}
    inside = [span for name in ('compute', 'gradient') for span in rows[name][1]]
    return parts, max(s[2] for s in inside) - min(s[1] for s in rows['compute'][1])


def overlap_of(parts, milliseconds):
    """Of forward and backward: their time over the larger of what goes on beside each other."""
    return milliseconds / max(parts[name] for name in ('load', 'compute', 'gradient'))


def made(args):
    torch.manual_seed(0)
    return Model(args.width, args.blocks).bfloat16()


def steps(store, args):
    """Median seconds of a step of each, and the most memory of the device."""
    x = torch.randn(args.batch, args.width).bfloat16().cuda()
    plain, own = made(args).cuda(), made(args)
    size = sum(p.numel() * p.element_size() for p in own.parameters())
    seconds = {'all in the GPU, state in the store': [], 'offloaded': []}
    memory = dict.fromkeys(seconds, 0)
    with hitrain.AdamW(plain.named_parameters(), store.mountpoint / 'plain', lr=1e-3, overlap=True) as first, \
            hitrain.offload(own, store.mountpoint / 'own', keep=size // 4, lr=1e-3, device='cuda') as second:
        for run in range(args.runs + 1):
            for (name, out), model, optimizer in zip(seconds.items(), (plain, own), (first, second)):
                torch.cuda.reset_peak_memory_stats()
                taken = step_seconds(model, optimizer, x)
                others = size if model is own else 0  # the plain model stays on the GPU
                memory[name] = max(memory[name], torch.cuda.max_memory_allocated() - others)
                if run:  # the first one warms up
                    out.append(taken)
        equal = all(torch.equal(p.cpu(), q.cpu()) for p, q in zip(plain.parameters(), own.parameters()))
        figures = second.figures()
        line = traced_step(own, second, x, f'a step with offload() on {torch.cuda.get_device_name()}')
    del plain, own, first, second
    gc.collect()
    return size, {n: statistics.median(s) for n, s in seconds.items()}, memory, equal, figures, line


def on_gpu(store, args):
    rates = copies(store)
    size, seconds, memory, equal, figures, (parts, milliseconds) = steps(store, args)
    store.unmount()
    print(f'{torch.cuda.get_device_name()}, PyTorch {torch.__version__}')
    for name, found in rates.items():
        print(f'  copies, {name:45}' + (f'refused, error {found} of CUDA' if isinstance(found, int) else
                                        f'{found[0]:6.1f} GB/s to the GPU, {found[1]:6.1f} GB/s from it'))
    whole = seconds['all in the GPU, state in the store']
    for name, taken in seconds.items():
        print(f'  step, {name:36}{1000 * taken:8.1f} ms ({taken / whole:.2f}), at most {memory[name] // MIB} MiB of the GPU')
    print(f'  parameters {size // MIB} MiB, keep {size // 4 // MIB} MiB, waited {figures["waited_seconds"]:.2f} s; the same bits: {"yes" if equal else "NO"}')
    tell(parts, milliseconds)
    return {'device': torch.cuda.get_device_name(), 'copies': rates, 'seconds': seconds, 'memory': memory, 'equal': equal, 'figures': figures,
            'parameters': size, 'parts': parts, 'overlap': overlap_of(parts, milliseconds)}


def tell(parts, milliseconds):
    print('  one step, ms: ' + ', '.join(f'{name} {taken:.1f}' for name, taken in parts.items() if name != 'update'))
    print(f'  forward and backward {milliseconds:.1f} ms, over the larger of their parts: {overlap_of(parts, milliseconds):.3f} (to be at most 1.05); '
          f'drawn in {BUILD / "bench/gpu.svg"}')


# ---- without a GPU ----

def on_stand_in(store, args):
    device = StandIn()
    device.install()
    Block.computing = lambda block, x: device.computing(x)
    model, x = made(args), torch.randn(args.batch, args.width).bfloat16()
    size, lines = sum(p.numel() * p.element_size() for p in model.parameters()), []
    with hitrain.offload(model, store.mountpoint / 'own', keep=size // 4, lr=1e-3, device='cpu') as optimizer:
        own = []
        for _ in range(3):
            begin = time.monotonic()
            model(x).backward()
            own.append(time.monotonic() - begin)
            optimizer.step()
            optimizer.zero_grad()
        device.compute_seconds = TIMES * min(own) / (3 * args.blocks)
        device.bytes_per_second = size / args.blocks / device.compute_seconds
        for _ in range(args.runs + 1):
            lines.append(traced_step(model, optimizer, x, 'a step with offload() on a stand-in for a GPU'))
    parts, milliseconds = sorted(lines[1:], key=lambda line: overlap_of(*line))[len(lines[1:]) // 2]
    store.unmount()
    print(f'no GPU is here, so this is the client alone, on a stand-in. PyTorch {torch.__version__}')
    print(f'  the client works {1000 * min(own):.1f} ms for forward and backward of {args.blocks} blocks of {size // args.blocks / MIB:.1f} MiB; the stand-in '
          f'takes {1000 * device.compute_seconds:.1f} ms for the forward of one, and for its load')
    tell(parts, milliseconds)
    return {'device': 'stand-in', 'parts': parts, 'overlap': overlap_of(parts, milliseconds), 'all': [overlap_of(*line) for line in lines]}


def main():
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--runs', type=int, default=5)
    parser.add_argument('--width', type=int, default=2048 if has_gpu else 512)
    parser.add_argument('--blocks', type=int, default=16)
    parser.add_argument('--batch', type=int, default=4096 if has_gpu else 16)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(SECONDS_MAX, exit=True)
    (BUILD / 'bench').mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD, prefix='bench-gpu-') as folder:
        bytes_of_store = 64 * args.blocks * 8 * args.width * args.width
        store = Store(pathlib.Path(os.environ.get('HITRAIN_BIN') or BUILD / 'bin'), pathlib.Path(folder), f'{bytes_of_store // MIB + 1024}M',
                      f'{"2G" if has_gpu else "512M"}{f",passthrough={1024 if has_gpu else 256}M" if os.geteuid() == 0 else ""}')
        try:
            store.format()
            store.mount()
            found = on_gpu(store, args) if has_gpu else on_stand_in(store, args)
        except BaseException:
            if store.daemon is not None:
                store.kill()  # the traceback holds mappings, which keep the mount busy
            raise
        finally:
            store.close()
    with open(BUILD / 'bench/gpu.jsonl', 'w', encoding='ascii') as out:
        out.write(json.dumps(found) + '\n')
    if not found.get('equal', True):
        sys.exit('the offloaded model has other bits')


if __name__ == '__main__':
    main()
