#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Training steps whose end overlaps the next forward pass, beside steps that do not.

Run it with `make bench-overlap`, as root. A model has 16 layers, each a file of f32 parameters, on a device of limited
speed. The trainer reads a layer and computes (sleeps) for the forward pass, computes twice as long and writes a
gradient for the backward pass, and ends the step with `step` or with `step async`. W is the time of a step without any
computation: what the device needs. The forward time f is chosen so that W is 2, 3 and 4.5 times f. The least possible
time of a step is the larger one of W and 3 f; without overlap a step takes f + max(2 f, W). A second figure is the time
from the last gradient until the first layer can be read. Medians of interleaved runs; figures in overlap.jsonl.
"""
import argparse
import json
import os
import statistics
import time

from common import BUILD, begin, check_elements, give_up
from step import Device, Store

MIB = 1 << 20
LAYERS = 16
RATIOS = (2, 3, 4.5)  # of W to f
WAYS = {'step': b'step\n', 'step async': b'step async\n'}


def sleep_until(moment):
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


class Trainer:
    """Of a mounted model. A computation takes its time from when its input is there."""

    def __init__(self, store):
        self.root = store.point / 'model'
        self.bytes = store.elements // LAYERS * 4
        self.into = bytearray(self.bytes)
        self.gradient = os.urandom(4096) * (self.bytes // 4096)
        self.ctl = os.open(self.root / '.hitrain/ctl', os.O_RDWR)
        self.last_gradient = 0.0

    def close(self):
        os.close(self.ctl)

    def command(self, line):
        os.write(self.ctl, line)
        os.read(self.ctl, 4096)

    def read(self, layer):
        fd = os.open(self.root / f'p{layer:02}', os.O_RDONLY)
        try:
            if os.preadv(fd, [self.into], 0) != self.bytes:
                give_up(f'layer {layer} was not read whole')
        finally:
            os.close(fd)

    def send(self, layer):
        fd = os.open(self.root / f'.hitrain/grad/p{layer:02}', os.O_WRONLY)
        try:
            view = memoryview(self.gradient)
            for at in range(0, self.bytes, MIB):
                os.pwrite(fd, view[at:at + MIB], at)
        finally:
            os.close(fd)

    def step(self, f, end):
        """Returns how long after the last gradient the first layer was read."""
        for layer in range(LAYERS):
            self.read(layer)
            if layer == 0:
                waited = time.monotonic() - self.last_gradient
            sleep_until(time.monotonic() + f / LAYERS)
        for layer in reversed(range(LAYERS)):
            sleep_until(time.monotonic() + 2 * f / LAYERS)
            self.send(layer)
        self.last_gradient = time.monotonic()
        self.command(end)
        return waited

    def measure(self, f, end, steps):
        """Seconds per step, and for the first layer, after a step that warms up."""
        self.step(f, end)
        began = time.monotonic()
        waited = [self.step(f, end) for _ in range(steps)]
        if f == 0 or end == WAYS['step']:
            seconds = time.monotonic() - began
        else:
            self.read(0)  # a step begins when its first layer is there
            seconds = time.monotonic() - began
        return seconds / steps, statistics.median(waited)


def one_run(number, args, device, store, rows, said):
    store.start(args.dram, f'adamw lr=1e-3 durable_every={args.durable_every}')
    trainer = Trainer(store)
    trainer.measure(0, WAYS['step'], 1)
    device.slow(True)
    device_s, _ = trainer.measure(0, WAYS['step'], args.steps)
    said(f'run {number + 1}: W = {device_s:.2f} s')
    for ratio in RATIOS:
        for name, end in WAYS.items():
            seconds, first = trainer.measure(device_s / ratio, end, args.steps)
            rows.append({'run': number, 'ratio': ratio, 'way': name, 'seconds': seconds, 'first_s': first, 'W': device_s})
            said(f'run {number + 1}: W = {ratio} f, {name}: {seconds:.2f} s')
    trainer.close()
    store.stop()


def tell(rows):
    print(f'\n  {"":10}{"":12}{"s/step":>8}{"least":>8}{"over least":>12}{"no overlap":>12}{"first layer":>13}')
    out = []
    for ratio in RATIOS:
        for name in WAYS:
            these = [r for r in rows if r['ratio'] == ratio and r['way'] == name]
            least = [max(3 * r['W'] / ratio, r['W']) for r in these]
            apart = [r['W'] / ratio + max(2 * r['W'] / ratio, r['W']) for r in these]
            out.append({'ratio': ratio, 'way': name, 'step_s': statistics.median(r['seconds'] for r in these),
                        'over_least': statistics.median(r['seconds'] / s for r, s in zip(these, least)),
                        'first_over_W': statistics.median(r['first_s'] / r['W'] for r in these)})
            r = out[-1]
            print(f'  W = {ratio:<6}f{name:>12}{r["step_s"]:8.2f}{statistics.median(least):8.2f}{r["over_least"]:12.2f}'
                  f'{statistics.median(apart):12.2f}{r["first_over_W"]:11.2f} W')
    print('\n  "least": the larger one of W and 3 f. "no overlap": f + max(2 f, W). "first layer": from the last gradient until it\n'
          '  is read. Targets of `step async`: 1.10 of the least, and 0.10 W.')
    return out


def parse_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--runs', type=int, default=3)
    p.add_argument('--steps', type=int, default=4, help='of each measurement')
    p.add_argument('--elements', type=int, default=12 * MIB, help=f'parameters, in {LAYERS} layers; 100663296 is the full size')
    p.add_argument('--dram', type=int, default=128 * MIB, help='bytes')
    p.add_argument('--durable-every', type=int, default=1)
    p.add_argument('--limit', type=int, default=100 * MIB, help='bytes per second each way')
    return p.parse_args()


def main():
    args = parse_args()
    check_elements(args, LAYERS)
    out = BUILD / 'bench/overlap.jsonl'
    folder = begin('overlap')
    device = Device(folder, max(args.elements * 32, 1 << 30) + (1 << 30), args.limit)
    store = Store(device, folder, args.elements, LAYERS)
    rows, began = [], time.monotonic()

    def said(text):
        print(f'  {time.monotonic() - began:5.0f} s  {text}', flush=True)

    print(f'bench-overlap: {args.elements / 1e6:.0f} million f32 parameters in {LAYERS} layers, AdamW, {args.runs} runs, '
          f'dram={args.dram / MIB:.0f} MiB, every {args.durable_every}. step durable, device limited to '
          f'{args.limit / MIB:.0f} MiB/s each way', flush=True)
    store.format()
    for number in range(args.runs):
        one_run(number, args, device, store, rows, said)
    out.write_text(''.join(json.dumps(r) + '\n' for r in rows + tell(rows)))
    print(f'  all figures: {out}')


if __name__ == '__main__':
    main()
