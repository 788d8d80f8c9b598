#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A model that trains on a GPU with offload(), beside the same model wholly on the GPU; and the rates of copies.

Run it with `make bench-gpu`, as root, where PyTorch sees a GPU. Memory of the CPU is copied in both directions as it is (pageable), from PyTorch's
pinned memory, and registered with cudaHostRegister: ordinary memory, and a file that the store hands out (passthrough=). The model is
bf16, four times as large as keep. Medians of interleaved runs; figures in gpu.jsonl.
"""
import argparse
import contextlib
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
from hitrain._mapped import is_passed, map_file  # noqa: E402

MIB = 1 << 20
COPY = 64 * MIB


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


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

def step_seconds(model, optimizer, x):
    torch.cuda.synchronize()
    begin = time.monotonic()
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return time.monotonic() - begin


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
    del plain, own, first, second
    gc.collect()
    return size, {n: statistics.median(s) for n, s in seconds.items()}, memory, equal, figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--runs', type=int, default=5)
    parser.add_argument('--width', type=int, default=2048)
    parser.add_argument('--blocks', type=int, default=16)
    parser.add_argument('--batch', type=int, default=4096)
    args = parser.parse_args()
    (BUILD / 'bench').mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD, prefix='bench-gpu-') as folder:
        bytes_of_store = 64 * args.blocks * 8 * args.width * args.width
        store = Store(pathlib.Path(os.environ.get('HITRAIN_BIN') or BUILD / 'bin'), pathlib.Path(folder), f'{bytes_of_store // MIB + 1024}M',
                      f'2G{",passthrough=1G" if os.geteuid() == 0 else ""}')
        try:
            store.format()
            store.mount()
            rates = copies(store)
            size, seconds, memory, equal, figures = steps(store, args)
            store.unmount()
        except BaseException:
            if store.daemon is not None:
                store.kill()  # the traceback holds mappings, which keep the mount busy
            raise
        finally:
            store.close()
    print(f'{torch.cuda.get_device_name()}, PyTorch {torch.__version__}')
    for name, found in rates.items():
        print(f'  copies, {name:45}' + (f'refused, error {found} of CUDA' if isinstance(found, int) else
                                        f'{found[0]:6.1f} GB/s to the GPU, {found[1]:6.1f} GB/s from it'))
    whole = seconds['all in the GPU, state in the store']
    for name, taken in seconds.items():
        print(f'  step, {name:36}{1000 * taken:8.1f} ms ({taken / whole:.2f}), at most {memory[name] // MIB} MiB of the GPU')
    print(f'  parameters {size // MIB} MiB, keep {size // 4 // MIB} MiB, waited {figures["waited_seconds"]:.2f} s; the same bits: {"yes" if equal else "NO"}')
    with open(BUILD / 'bench/gpu.jsonl', 'w', encoding='ascii') as out:
        out.write(json.dumps({'device': torch.cuda.get_device_name(), 'copies': rates, 'seconds': seconds, 'memory': memory, 'equal': equal,
                              'figures': figures, 'parameters': size}) + '\n')
    if not equal:
        sys.exit('the offloaded model has other bits')


if __name__ == '__main__':
    main()
