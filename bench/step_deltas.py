# SPDX-License-Identifier: Apache-2.0
"""Steps that leave deltas (delta=on) beside steps that leave none, in the same mount by turns.

step.py runs it with --deltas (`make bench-step DELTAS=1`). AdamW on parameters and gradients that are noise, as in training. With bf16 and a
small lr a step changes a part of the elements. With f32 it changes all, and by delta_max readers take the model. Nothing is resident and each
step is durable, so the device decides; or all is in memory, and none is durable. A missed target is named, and ends the program with 1.
"""
import json
import os
import random
import statistics
import struct
import sys
import time

import numpy

from common import check_elements
from step import FILES, MIB, Case, Device, Store

TURN = {'device': 4, 'memory': 11}  # steps, of which the first one does not count: a chain of deltas begins with it
TURNS = 4          # of each side, in a run
SPREAD_LR = 1e-3   # of steps that spread masters between two bf16 values, as a long training does
TIME_MAX, BYTES_MAX = 1.02, 7
CONTENT = {'bf16': 'adamw lr={lr}', 'f32': 'adamw lr=1e-4'}
ROWS = [('bf16', 1e-6), ('bf16', 3e-6), ('f32', None)]
PARTS = {'device': Case('', 0, 1, 0), 'memory': Case('', 1, 1000, 0, gradients=4)}
SIDES = {'off': '', 'on': ' delta=on delta_keep=2'}


def noise(dtype, spread, draw):
    """Two MiB, so that each step and file begins at another place."""
    x = draw.standard_normal(2 * MIB // 4 * (2 if dtype == 'bf16' else 1)).astype('f4') * numpy.float32(spread)
    return memoryview((x.view('u4') >> 16).astype('u2').tobytes() if dtype == 'bf16' else x.tobytes())


class DeltaStore(Store):
    def begin(self, dtype):
        draw = numpy.random.default_rng(1)
        self.values, self.gradients = noise(dtype, 0.02, draw), noise(dtype, 1e-3, draw)
        self.format(dtype, 2 if dtype == 'bf16' else 4)

    def prepare_root(self, root):
        for n in range(self.files):
            with open(root / f'p{n:02}', 'r+b', buffering=0) as f:
                size = self.elements // self.files * self.element_bytes
                for at in range(0, size, MIB):
                    f.write(self.values[:min(MIB, size - at)])
        super().prepare_root(root)

    def gradient(self, number, n):
        at = random.Random(1000 * number + n).randrange(MIB // 4) * 4
        return self.gradients[at:at + MIB]

    def words(self, text):
        os.setxattr(self.point / 'model', 'user.hitrain.optimizer', text.encode())

    def cpu_s(self):
        with open(f'/proc/{self.daemon.pid}/stat') as f:
            user, system = f.read().rsplit(')', 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf('SC_CLK_TCK')

    def changed(self):
        """Elements that the kept deltas name, and bytes that these take."""
        folder, found = self.point / 'model/.hitrain/delta', 0
        for name in os.listdir(folder):
            with open(folder / name, 'rb') as f:
                header = json.loads(f.read(struct.unpack('<Q', f.read(8))[0]))
            found += sum(t['shape'][0] for key, t in header.items() if key.endswith('.values'))
        return found, int(os.getxattr(self.point / 'model', 'user.hitrain.delta_bytes'))


class Bench:
    def __init__(self, args, folder):
        self.args = args
        self.device = Device(folder, max(args.elements * 32, 2 << 30) + (1 << 30), args.limit)
        self.store, self.number, self.began = DeltaStore(self.device, folder, args.elements, FILES), 1, time.monotonic()

    def step(self):
        self.number += 1
        self.store.step(self.number)

    def turn(self, words, steps):
        """Seconds of a step, and those of the daemon's processors."""
        self.store.words(words)
        self.step()
        seconds, cpu = [], self.store.cpu_s()
        for _ in range(steps - 1):
            seconds.append(-time.monotonic())
            self.step()
            seconds[-1] += time.monotonic()
        return statistics.median(seconds), (self.store.cpu_s() - cpu) / (steps - 1)

    def measure(self, dtype, lr, part):
        case = PARTS[part]
        words = f'{CONTENT[dtype].format(lr=lr)} durable_every={case.durable_every}'
        self.store.begin(dtype)
        self.store.start(case.dram(self.args.elements), f'adamw lr={SPREAD_LR} durable_every={case.durable_every}')
        for _ in range(3):
            self.step()
        self.device.slow(part == 'device')
        rows = []
        for turn in range(TURNS):
            found = {}
            for side in list(SIDES)[::1 if turn % 2 else -1]:
                found[side] = self.turn(words + SIDES[side], TURN[part])
                if side == 'on':
                    found['changed'] = self.store.changed()
            rows.append(found)
        self.store.stop()
        return rows


def ratio(rows, what):
    return statistics.median(r['on'][what] / r['off'][what] for r in rows)


def tell(dtype, lr, part, rows, elements):
    changed, stored = rows[-1]['changed']
    row = {'dtype': dtype, 'lr': lr, 'part': part, 'step_s': statistics.median(r['off'][0] for r in rows), 'time': ratio(rows, 0),
           'cpu': ratio(rows, 1), 'changed': changed / 2 / elements, 'bytes': stored / changed if changed else 0}
    row['missed'] = [f'time {TIME_MAX}'] * (row['time'] > TIME_MAX) + [f'bytes {BYTES_MAX}'] * (row['bytes'] > BYTES_MAX)
    print(f'  {dtype + (f" lr={lr}" if lr else ""):14}{part:>8}{row["changed"]:10.4f}{row["step_s"]:9.3f}{row["time"]:10.3f}{row["cpu"]:10.3f}'
          f'{row["bytes"]:8.2f}{"   MISSED: " if row["missed"] else ""}{", ".join(row["missed"])}', flush=True)
    return row


def main(args, folder, out):
    check_elements(args, FILES)
    bench, summary, raw = Bench(args, folder), [], []
    print(f'bench-step: {args.elements / 1e6:.0f} million parameters, AdamW, deltas on and off, {args.runs} runs of {TURNS} turns, device limited '
          f'to {args.limit / MIB:.0f} MiB/s each way\n\n  {"":22}{"changed":>10}{"s/step":>9}{"time, on":>10}{"cpu, on":>10}{"bytes":>8}', flush=True)
    for dtype, lr in ROWS:
        for part in PARTS:
            rows = [r for _ in range(args.runs) for r in bench.measure(dtype, lr, part)]
            raw += [{'dtype': dtype, 'lr': lr, 'part': part, **r} for r in rows]
            summary.append(tell(dtype, lr, part, rows, args.elements))
    print('\n  "changed": of all elements in a step; "on": over the same without deltas; "bytes": that the store has for each of these.')
    out.write_text(''.join(json.dumps(r) + '\n' for r in raw + summary))
    print(f'  all figures: {out}')
    missed = sum(len(r['missed']) for r in summary)
    sys.exit(f'{missed} targets missed' if missed else 0)
