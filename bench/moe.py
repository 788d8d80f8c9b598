#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Bytes and time of a step of 64 experts of which 4 have gradients, beside a model of 4 experts that all have them.

Run it with `make bench-moe`, as root. A row of routed steps draws its 4 experts anew each time, so their state comes from the device; a row
of fixed ones takes the same. Bytes are those that the store counts for its device and its log, in durable steps of AdamW. The least is
parameter and two moments of the used experts. Figures in build/bench/moe.jsonl. A missed target is named.
"""
import argparse
import json
import pathlib
import random
import sys
import time

from common import BUILD, PROGRAMS, TOP, begin, machine

sys.path.insert(0, str(TOP / 'optim/torch'))
import torch  # noqa: E402
import hitrain  # noqa: E402
from demo_store import Store  # noqa: E402

TARGET = 1.1    # device bytes of a step over those of the used experts alone
USED = 4
COUNTERS = 'device_written_bytes', 'device_read_bytes', 'log_written_bytes'


def counted(store):
    stats = store.counters()
    return [stats[n] for n in COUNTERS]


def measured(args, name, experts, chosen):
    """On a new store: means of steps after two that warm up: bytes written, read and logged, seconds, and processor seconds of the trainer."""
    size = args.experts * args.width ** 2
    params = {f'experts.{i}': torch.nn.Parameter(torch.randn(args.width, args.width)) for i in range(experts)}
    tensors, sums = list(params.values()), [0.0] * 5
    store = Store(PROGRAMS, pathlib.Path(begin(f'moe-{name}')), f'{(size * 32 >> 20) + 512}M', f'{max(128, size * 12 >> 22)}M')
    try:
        store.format()
        store.mount()
        with hitrain.AdamW(params.items(), store.mountpoint / name, lr=1e-3, trust_versions=True) as optimizer:
            for i in range(experts // USED):  # each has its moments then
                one(optimizer, tensors, range(i * USED, (i + 1) * USED))
            for step in range(args.steps + 2):
                before = [*counted(store), time.monotonic(), time.process_time()]
                one(optimizer, tensors, chosen(step))
                after = [*counted(store), time.monotonic(), time.process_time()]
                if step >= 2:
                    sums = [s + b - a for s, a, b in zip(sums, before, after)]
        store.unmount()
    finally:
        store.close()
    return dict(zip((*COUNTERS, 'seconds', 'cpu_seconds'), (s / args.steps for s in sums)), side=name)


def one(optimizer, tensors, used):
    for i, p in enumerate(tensors):
        p.grad = torch.ones_like(p) if i in used else None
    optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--experts', type=int, default=64)
    parser.add_argument('--width', type=int, default=1024)
    parser.add_argument('--steps', type=int, default=10)
    args = parser.parse_args()
    draw = random.Random(1)
    rows = [measured(args, 'alone', USED, lambda step: range(USED)),
            measured(args, 'fixed', args.experts, lambda step: range(USED)),
            measured(args, 'routed', args.experts, lambda step: draw.sample(range(args.experts), USED))]
    least = 12 * USED * args.width ** 2
    print(f'{machine()}, PyTorch {torch.__version__}, {args.experts} experts of {args.width ** 2} parameters, {USED} in each step')
    for r in rows:
        print(f'  {r["side"]:8} written {r["device_written_bytes"] / least:.3f} of the least, read {r["device_read_bytes"] / least:.3f}, '
              f'log {r["log_written_bytes"] / least:.4f}; {r["seconds"]:.3f} s, {r["cpu_seconds"]:.3f} s of the trainer\'s processors')
    with open(BUILD / 'bench/moe.jsonl', 'w', encoding='ascii') as out:
        out.writelines(json.dumps(row) + '\n' for row in rows)
    alone, fixed, routed = (sum(r[n] for n in COUNTERS) for r in rows)
    reads = min(least, rows[2]['device_read_bytes'])  # a drawn expert's state is not in memory
    print(f'  all bytes: fixed {fixed / alone:.3f} of alone, routed {(routed - reads) / alone:.3f} and the reads of their content')
    if max(fixed, routed - reads) > TARGET * alone:
        sys.exit(f'missed: a step may move {TARGET} of the bytes of its experts alone')


if __name__ == '__main__':
    main()
