#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Steps and tensor I/O beside all engines in the background, and with all engines paused.

Run it with `make bench-background`, as root. A store lies on a loop device of limited speed. The foreground makes AdamW
steps of which nothing is resident, and writes, syncs and reads a tensor, cold. `running`: every engine has a backlog
that was made before: copies for deduplication, bf16 weights for compression, nearly empty groups of blocks for
compaction, a scrub, and what steps free for discards. `nothing to do`: a store with the model alone. Each is measured in
turns with the same mount paused by `hitrainctl background pause`, so a ratio is that of neighbours. Medians; a table,
and all figures in background.jsonl.

The cgroup that limits the device saves up what a device that is never idle does not use. So engines would give credit to
the foreground. Hence a program reads and writes a block behind the end of the store all the time, on both sides.
"""
import argparse
import atexit
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np

from common import BUILD, PROGRAMS, begin, check_elements, give_up, run, wait_for
from step import Device, Store

MIB = 1 << 20
FILES = 16
TENSOR = 96 * MIB
DRAM = 128 * MIB
SMALL, IN_GROUP = 64 << 10, 16  # files of which a group of blocks holds so many
ON = ('commit=1', 'compress_after=1')  # else as by default
RUNNING_MOST, IDLE_OFF = 1.05, 0.01


class Backlog:
    """What engines find to do, in files beside the model."""

    def __init__(self, copies, weights, groups):
        self.copies, self.weights, self.groups = copies, weights, groups

    def make(self, point):
        for folder in 'copies', 'weights', 'small':
            (point / folder).mkdir()
        os.setxattr(point / 'weights', b'user.hitrain.compress', b'auto')
        rng = np.random.default_rng(1)
        for n in range(self.copies // (16 * MIB)):
            data = rng.bytes(16 * MIB)
            for name in 'ab':
                (point / 'copies' / f'{name}{n}').write_bytes(data)
        for n in range(self.weights // (16 * MIB)):
            values = rng.standard_normal(8 * MIB, dtype=np.float32)
            (point / 'weights' / str(n)).write_bytes((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        for n in range(self.groups * IN_GROUP):
            (point / 'small' / str(n)).write_bytes(rng.bytes(SMALL))
        run(PROGRAMS / 'hitrainctl', 'commit', point)
        for n in range(self.groups * IN_GROUP):
            if n % IN_GROUP:
                (point / 'small' / str(n)).unlink()

    def bytes(self):
        return 2 * self.copies + self.weights + self.groups * MIB


def background(point, verb):
    return json.loads(run(PROGRAMS / 'hitrainctl', 'background', verb, point, '--json'))['engines']


def worked(engines):
    """Bytes; a discard moves none, and has its own figure."""
    return {e['engine']: e.get('discarded_bytes', e['bytes']) for e in engines}


def start_scrub(point):
    """It may still run."""
    subprocess.run([PROGRAMS / 'hitrainctl', 'scrub', 'start', point], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                   check=False)


TRICKLE = '''
import mmap, os, sys, time
fd, into = os.open(sys.argv[1], os.O_RDWR | os.O_DIRECT), mmap.mmap(-1, 4096)
while True:
    os.preadv(fd, [into], int(sys.argv[2]))
    os.pwritev(fd, [into], int(sys.argv[2]))
    time.sleep(0.004)
'''


class Trickle:
    """The device is a little longer than its store, and never idle."""

    BYTES = MIB

    def __init__(self, device, image):
        self.device, self.image, self.size, self.program = device, image, os.path.getsize(image), None
        atexit.register(self.stop)

    def resize(self, size):
        os.truncate(self.image, size)
        run('losetup', '--set-capacity', self.device.path)

    def start(self):
        self.resize(self.size + self.BYTES)
        self.program = subprocess.Popen([sys.executable, '-c', TRICKLE, self.device.path, str(self.size)],
                                        preexec_fn=self.device.group.enter)

    def stop(self):
        if self.program:
            self.program.kill()
            self.program.wait()
            self.program = None
            self.resize(self.size)


class Foreground:
    def __init__(self, store):
        self.store, self.steps = store, 1
        self.tensor = store.point / 'tensor'
        self.data = np.random.default_rng(2).bytes(MIB)
        self.into = bytearray(MIB)

    def write(self):
        with open(self.tensor, 'wb', buffering=0) as f:
            for _ in range(TENSOR // MIB):
                f.write(self.data)
            os.fsync(f.fileno())

    def read(self):
        with open(self.tensor, 'rb', buffering=0) as f:
            for _ in range(TENSOR // MIB):
                if f.readinto(self.into) != MIB:
                    give_up('the tensor was not read whole')

    def measure(self):
        """Seconds of a step, and of writing and reading the tensor."""
        self.steps += 1
        at = [time.monotonic()]
        self.store.step(self.steps)
        at.append(time.monotonic())
        self.write()
        at.append(time.monotonic())
        run(PROGRAMS / 'hitrainctl', 'evict', self.tensor)
        at.append(time.monotonic())
        self.read()
        at.append(time.monotonic())
        return at[1] - at[0], at[2] - at[1] + at[4] - at[3]


class Sides:
    """A mount whose engines run or are paused, in turns."""

    def __init__(self, name, store, scrubs, times, rows, said):
        self.name, self.store, self.scrubs, self.times, self.rows, self.said = name, store, scrubs, times, rows, said
        self.foreground = Foreground(store)
        self.moved = {}

    def side(self, number, paused):
        point = self.store.point
        before = worked(background(point, 'pause' if paused else 'resume'))
        if self.scrubs and not paused:
            start_scrub(point)
        took = [self.foreground.measure() for _ in range(self.times)]
        for name, n in worked(background(point, 'pause')).items():
            self.moved[name] = self.moved.get(name, 0) + n - before[name]
        for step_s, io_s in took:
            self.rows.append({'case': self.name, 'run': number, 'paused': paused, 'step_s': step_s, 'io_s': io_s,
                              'both_s': step_s + io_s})
        step_s, io_s = (statistics.median(t[k] for t in took) for k in (0, 1))
        self.said(f'run {number + 1}, {self.name}, {"paused" if paused else "engines on"}: step {step_s:.2f} s, tensor {io_s:.2f} s')

    def one_run(self, number):
        for paused in (True, False) if number % 2 == 0 else (False, True):
            self.side(number, paused)


def ratio(rows, case, figure):
    """The median over the runs."""
    runs = {r['run'] for r in rows}

    def of(number, paused):
        return statistics.median(r[figure] for r in rows
                                 if (r['case'], r['run'], r['paused']) == (case, number, paused))

    return statistics.median(of(n, False) / of(n, True) for n in runs)


def measure_case(name, args, device, folder, backlog, rows, said):
    """Returns the bytes that each engine moved."""
    store, trickle = Store(device, folder, args.elements, FILES), Trickle(device, folder / 'image')
    store.format()
    store.start(DRAM)
    if backlog:
        backlog.make(store.point)
    store.stop()
    store.start(DRAM, options=ON)
    if not backlog:
        wait_for(lambda: all(e['state'] in ('idle', 'off') for e in background(store.point, 'status')), 'engines')
    background(store.point, 'pause')
    sides = Sides(name, store, bool(backlog), args.times, rows, said)
    trickle.start()
    sides.foreground.measure()
    device.slow(True)
    sides.foreground.measure()
    for number in range(args.runs):
        sides.one_run(number)
    store.stop()
    trickle.stop()
    return sides.moved


def tell(rows, moved):
    out = []
    print(f'\n  {"":16}{"step":>8}{"tensor":>8}{"both":>8}   target')
    for case, target in (('running', f'at most {RUNNING_MOST:.2f}'), ('nothing to do', f'1.00 +- {IDLE_OFF:.2f}')):
        found = {f: ratio(rows, case, f) for f in ('step_s', 'io_s', 'both_s')}
        print(f'  {case:16}{found["step_s"]:8.3f}{found["io_s"]:8.3f}{found["both_s"]:8.3f}   {target}')
        out.append({'case': case, 'target': target, **found})
    print('\n  Time with engines over the time with all of them paused. What engines did beside the steps of `running`: '
          + ', '.join(f'{name} {n / MIB:.0f} MiB' for name, n in moved.items()))
    return out + [{'moved': moved}]


def parse_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--runs', type=int, default=7)
    p.add_argument('--times', type=int, default=3, help='measurements in a row')
    p.add_argument('--elements', type=int, default=16 * MIB, help=f'parameters, in {FILES} files')
    p.add_argument('--backlog', type=int, default=256 * MIB, help='bytes of copies; twice as much of weights')
    p.add_argument('--groups', type=int, default=256, help='nearly empty groups of blocks')
    p.add_argument('--limit', type=int, default=300 * MIB, help='bytes per second each way')
    return p.parse_args()


def main():
    args = parse_args()
    check_elements(args, FILES)
    out = BUILD / 'bench/background.jsonl'
    folder = begin('background')
    backlog = Backlog(args.backlog, 2 * args.backlog, args.groups)
    device = Device(folder, backlog.bytes() + args.elements * 32 + 512 * MIB, args.limit)
    rows, began = [], time.monotonic()

    def said(text):
        print(f'  {time.monotonic() - began:5.0f} s  {text}', flush=True)

    print(f'bench-background: {args.elements / 1e6:.0f} million f32 parameters, a tensor of {TENSOR // MIB} MiB, {args.runs} runs, '
          f'{args.limit / MIB:.0f} MiB/s each way', flush=True)
    moved = measure_case('running', args, device, folder, backlog, rows, said)
    measure_case('nothing to do', args, device, folder, None, rows, said)
    out.write_text(''.join(json.dumps(r) + '\n' for r in rows + tell(rows, moved)))
    print(f'  all figures: {out}')


if __name__ == '__main__':
    main()
