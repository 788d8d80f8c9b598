# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on a store of two devices, beside one device that is as fast as both together.

step.py runs it with --devices (`make bench-step DEVICES=2`). Nothing is resident and every step is durable, so a step
reads and writes 12 bytes per parameter. Speeds are those that a cgroup allows: two devices of 3:1, two equal ones, and
one of 3:1 that becomes ten times slower while steps run.
"""
import atexit
import json
import statistics
import time

from common import PROGRAMS, SpeedLimit, check_elements, make_loop_device, run
from step import FILES, MIB, Store

BYTES = 12  # per parameter and step, each way
DRAM = 64 * MIB
WARM_STEPS, STEPS, SLOW_STEPS = 3, 3, 5


class Devices:
    """Loop devices, each with its limit; what step.Store needs of a device."""

    def __init__(self, folder, count, size):
        self.paths = [make_loop_device(folder / f'image{count}{i}', size) for i in range(count)]
        for path in self.paths:
            atexit.register(run, 'losetup', '--detach', path)
        self.group = SpeedLimit(*self.paths, name=f'hitrain-bench-{count}')
        atexit.register(self.group.remove)
        self.speeds = [0] * count

    def slow(self, on):
        for i, speed in enumerate(self.speeds):
            self.group.set(int(speed) if on else 0, i)


def shares(store):
    found = json.loads(run(PROGRAMS / 'hitrainctl', 'device', '--json', store.point))['devices']
    return [d.get('share_per_mille') for d in found]


def timed_steps(store, first, count):
    """(seconds, shares after it) of each step."""
    out = []
    for n in range(count):
        began = time.monotonic()
        store.step(first + n)
        out.append((time.monotonic() - began, shares(store)))
    return out


class Run:
    """A store with these speeds, from the first step on; slowed: then the first device is ten times slower."""

    def __init__(self, store, devices, speeds, said, options):
        self.store, self.devices, self.said = store, devices, said
        devices.speeds = list(speeds)
        store.format()
        store.start(DRAM, options=options)
        devices.slow(True)
        store_steps = timed_steps(store, 2, WARM_STEPS)
        self.tell('first steps', store_steps)

    def tell(self, what, steps):
        sum_bytes = sum(self.devices.speeds)
        part = [self.store.elements * BYTES / s / sum_bytes for s, _ in steps]
        self.said(f'{what}: of the sum {" ".join(f"{p:.2f}" for p in part)}; shares {steps[-1][1]}')
        return part

    def steps(self, what, count=STEPS):
        return self.tell(what, timed_steps(self.store, 10, count))

    def slow_down(self):
        self.devices.speeds[0] /= 10
        self.devices.slow(True)


def one_run(number, stores, limit, said, options):
    """Rows: each the part of the sum of all speeds that steps reached, one by one."""
    (one, one_device), (two, two_devices) = stores
    rows = []

    def add(who, parts):
        rows.append({'run': number, 'who': who, 'of_sum': parts})

    for who, speeds in (('3:1', (limit * 0.75, limit * 0.25)), ('equal', (limit / 2, limit / 2))):
        r = Run(two, two_devices, speeds, said, options)
        add(who, r.steps(who))
        if who == '3:1':
            r.slow_down()
            add('slowed', r.steps('the faster one ten times slower', SLOW_STEPS))
        two.stop()
    for who, speed in (('one device', limit), ('one of two equal', limit / 2)):
        r = Run(one, one_device, (speed,), said, options)
        add(who, r.steps(who))
        one.stop()
    return rows


def main(args, folder, out):
    began = time.monotonic()

    def said(text):
        print(f'  {time.monotonic() - began:5.0f} s  {text}', flush=True)

    check_elements(args, FILES)
    size = max(args.elements * 32, 2 << 30) + (1 << 30)
    print(f'bench-step, two devices: {args.elements / 1e6:.0f} million f32 parameters, AdamW, {args.runs} runs, '
          f'{args.limit / MIB:.0f} MiB/s each way together', flush=True)
    stores = []
    for count in 1, 2:
        devices = Devices(folder, count, size)
        place = folder / str(count)
        place.mkdir()
        stores.append((Store(devices, place, args.elements, FILES, devices.paths), devices))
    rows = [r for n in range(args.runs) for r in one_run(n, stores, args.limit, said, args.options)]

    def of(who, first=0):
        return statistics.median(statistics.median(r['of_sum'][first:]) for r in rows if r['who'] == who)

    table = [('two devices 3:1, of the sum of both', of('3:1')), ('the same, of one device as fast', of('3:1') / of('one device')),
             ('two equal devices, of one of them', 2 * of('equal') / of('one of two equal')),
             ('the faster one ten times slower, from the third step on, of the new sum', of('slowed', 2))]
    print()
    for what, value in table:
        print(f'  {what:75}{value:6.2f}')
    out.write_text(''.join(json.dumps(r) + '\n' for r in rows) + json.dumps(dict(table)) + '\n')
    print(f'  all figures: {out}')
