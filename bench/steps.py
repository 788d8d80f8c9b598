#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What kept steps cost: keeping each step, going back to one, cloning, sending and receiving one, and their memory.

Run it with `make bench-steps`, as root. A model of f32 parameters in 64 files lies on a loop device of limited speed.
AdamW takes durable steps with and without retain=2, in turns. The device counts what each step writes, and the difference
is the price of keeping. Then the model goes back to a kept step, of which it shares no byte, and a clone is made; both beside
the time of a mount. Memory, and the time of a mount, are measured with many kept steps. A step is sent through a pipe and received from a file,
beside the speed of the device and of a pipe alone. Then a step that differs in one MiB of each file is sent and received as its
changes. Medians; all figures in steps.jsonl. Missed targets are named.
"""
import argparse
import json
import os
import statistics
import subprocess
import time

from common import BUILD, PROGRAMS, Table, begin, check_elements, run
from step import FILES, MIB, SETUP_SECONDS_MAX, Device, Store

RETAIN = 2
STATES = 2            # of AdamW
STATE_BYTES = 4 * (1 + STATES)   # of a parameter, with itself
DRAM = 64 * MIB
MEMORY_STEPS = 100
MOUNT_STEPS = 400     # and twice as many

TIME_MAX = 0.02       # of a step's time, for keeping it
BYTES_MAX = 0.001     # of the model's bytes
MOUNTS_MAX = 1.0      # times the time of a mount, for a rollback or a clone
CONTENT_MAX = 0.01    # of the model's bytes, for a rollback or a clone: records alone
CHUNK_MAX, FILE_MAX = 64, 400    # bytes of memory
LINEAR_MAX = 1.25     # times the time that a mount needs for each of fewer kept steps
PIPE_MIN = 0.9        # of the lower of device and pipe
CHANGES_MAX = 1.05    # of the bytes that differ, for the stream and for reads


class Bench(Table):
    def __init__(self, args, folder):
        super().__init__()
        self.args, self.folder = args, folder
        self.model_bytes = args.elements * STATE_BYTES
        space = self.model_bytes * (RETAIN + 7) + 4 * args.elements
        self.device = Device(folder, space + space // 16 + (1 << 30), args.limit)
        self.store = Store(self.device, folder, args.elements, FILES)
        self.root = self.store.point / 'model'
        self.number = 1

    def start(self, words='', slow=True):
        self.store.start(DRAM, f'adamw lr=1e-3 {words}')
        self.device.slow(slow)

    def step(self):
        self.number += 1
        self.store.step(self.number)

    def command(self, line):
        """Seconds, and bytes that the device read and wrote meanwhile."""
        before, began = self.device.counters(), time.monotonic()
        with open(self.root / '.hitrain/ctl', 'r+b', buffering=0) as ctl:
            ctl.write(f'{line}\n'.encode())
        after = self.device.counters()
        return time.monotonic() - began, after[0] - before[0], after[1] - before[1]

    def memory(self):
        text = os.getxattr(self.store.point, 'user.hitrain.stats').decode()
        figures = dict(line.split('=', 1) for line in text.splitlines() if '=' in line)
        return int(figures['meta_bytes']) + int(figures['names_bytes'])

    # -- keeping --

    def steps(self, words):
        """Seconds and written bytes of one step, after some that make all kept ones differ wholly."""
        self.start(words)
        for _ in range(RETAIN + 1):
            self.step()
        before, began = self.device.counters(), time.monotonic()
        for _ in range(self.args.steps):
            self.step()
        seconds = time.monotonic() - began
        written = self.device.counters()[1] - before[1]
        self.command('forget *')
        self.store.stop()
        return seconds / self.args.steps, written / self.args.steps

    def keeping(self):
        with_kept, without = [], []
        for number in range(self.args.runs):
            without.append(self.steps(''))
            with_kept.append(self.steps(f'retain={RETAIN}'))
            self.said(f'run {number + 1}: {without[-1][0]:.3f} s per step, with kept steps {with_kept[-1][0]:.3f} s')
        over = statistics.median(a[0] / b[0] for a, b in zip(with_kept, without)) - 1
        more = statistics.median(a[1] - b[1] for a, b in zip(with_kept, without))
        self.figure('a step', statistics.median(s for s, _ in without), 's')
        self.figure('keeping it: more of its time', over, '', TIME_MAX)
        self.figure('keeping it: more bytes, of the model', more / self.model_bytes, '', BYTES_MAX)
        self.figure('a copy of all state would take, of a step',
                    self.model_bytes / self.args.limit / statistics.median(s for s, _ in without), '')

    # -- rollback and clone --

    def mount_seconds(self):
        self.store.stop()
        began = time.monotonic()
        self.start()
        return time.monotonic() - began

    def going_back(self):
        self.start(slow=False)
        self.command('snapshot first')
        self.step()
        back, clones, mounts = [], [], []
        for number in range(self.args.runs):
            self.command('snapshot second')
            mounts.append(self.mount_seconds())
            back.append(self.command('rollback first'))
            back.append(self.command('rollback second'))
            clones.append(self.command(f'clone first clone{number}'))
            run('rm', '-r', self.store.point / f'clone{number}', seconds_max=SETUP_SECONDS_MAX)
            self.command('forget second')
        mount = statistics.median(mounts)
        self.figure('a mount', mount, 's')
        for what, rows in ('rollback', back), ('clone', clones):
            seconds, read, written = (statistics.median(column) for column in zip(*rows))
            self.figure(f'{what}: time of a mount', seconds / mount, '', MOUNTS_MAX)
            self.figure(f'{what}: content read and written, of the model', (read + written) / self.model_bytes, '', CONTENT_MAX)
        self.store.stop()

    def keep_many(self):
        """Memory of a kept step, and what stays when all are forgotten."""
        before = self.memory()
        for number in range(MEMORY_STEPS):
            self.command(f'snapshot many{number}')
        each = (self.memory() - before) / MEMORY_STEPS
        for number in range(MEMORY_STEPS):
            self.command(f'forget many{number}')
        self.command('commit')
        return each, self.memory() - before

    def keeping_many(self):
        self.start(slow=False)
        self.keep_many()  # tables grow once
        each, stays = self.keep_many()
        chunks = (1 + STATES) * -(-self.args.elements * 4 // MIB)
        files = (1 + STATES) * FILES
        self.figure(f'memory of a kept step, {chunks} chunks, {files} files', each, 'bytes', CHUNK_MAX * chunks + FILE_MAX * files)
        self.figure('memory that stays after all are forgotten', stays, 'bytes', 0)
        self.store.stop()

    def mounting_many(self):
        """The time of a mount grows with the number of kept steps, and no faster."""
        times = []
        self.start(slow=False)
        for begin in range(0, 3 * MOUNT_STEPS, MOUNT_STEPS):
            for number in range(begin - MOUNT_STEPS if begin else 0, begin):
                self.command(f'snapshot mount{number}')
            times.append(statistics.median(self.mount_seconds() for _ in range(self.args.runs)))
            self.device.slow(False)
        for number in range(2 * MOUNT_STEPS):
            self.command(f'forget mount{number}')
        self.store.stop()
        none, some, twice = times
        self.figure(f'a mount with {MOUNT_STEPS} kept steps', some, 's')
        self.figure('a mount: each of the next ones, of one of these', (twice - some) / max(some - none, 1e-3), '', LINEAR_MAX)

    # -- streams --

    def pipe_rate(self):
        began = time.monotonic()
        subprocess.run(f'head -c {self.model_bytes} /dev/zero | cat >/dev/null', shell=True, check=True)
        return self.model_bytes / (time.monotonic() - began)

    def streams(self):
        pipe = self.pipe_rate()
        lower = min(pipe, self.args.limit)
        stream = self.folder / 'stream'
        self.figure('a pipe', pipe / MIB, 'MiB/s')
        self.start()
        began = time.monotonic()
        subprocess.run(f'set -o pipefail; "{PROGRAMS}/hitrainctl" archive "{self.root}" first - 2>/dev/null | cat >/dev/null', shell=True,
                       check=True, executable='/bin/bash')
        self.figure('send: of the lower of device and pipe', self.model_bytes / (time.monotonic() - began) / lower, '', PIPE_MIN, most=False)
        self.device.slow(False)
        with open(stream, 'wb') as out:
            subprocess.run([PROGRAMS / 'hitrainctl', 'archive', self.root, 'first', '-'], stdout=out, stderr=subprocess.DEVNULL, check=True)
        self.device.slow(True)
        began = time.monotonic()
        with open(stream, 'rb') as source:
            subprocess.run([PROGRAMS / 'hitrainctl', 'restore', '-', self.store.point / 'received'], stdin=source,
                           stdout=subprocess.DEVNULL, check=True)
        self.figure('receive: of the lower of device and pipe', self.model_bytes / (time.monotonic() - began) / lower, '', PIPE_MIN, most=False)
        self.changes(stream)
        self.store.stop()

    def changes(self, stream):
        """Two models with the same step: one changes, and the other one is the base of the receiver."""
        self.device.slow(False)
        received = self.store.point / 'received'
        for root in self.root, received:
            run(PROGRAMS / 'hitrainctl', 'snapshot', root, 'base')
        run(PROGRAMS / 'hitrainctl', 'rollback', self.root, 'first', seconds_max=SETUP_SECONDS_MAX)
        for n in range(FILES):
            with open(self.root / f'p{n:02}', 'r+b') as f:
                f.write(os.urandom(MIB))
        run(PROGRAMS / 'hitrainctl', 'snapshot', self.root, 'changed')
        digest = json.loads(run(PROGRAMS / 'hitrainctl', 'verify', received, 'base', '--json', seconds_max=SETUP_SECONDS_MAX))['digest']
        self.store.stop()
        self.start(slow=False)
        before = self.device.counters()
        with open(stream, 'wb') as out:
            subprocess.run([PROGRAMS / 'hitrainctl', 'archive', self.root, 'changed', '-', '--from=first', f'--digest={digest}'], stdout=out,
                           stderr=subprocess.DEVNULL, check=True)
        self.figure('send of changes: read, of what differs', (self.device.counters()[0] - before[0]) / (FILES * MIB), '', CHANGES_MAX)
        self.figure('send of changes: stream, of what differs', stream.stat().st_size / (FILES * MIB), '', CHANGES_MAX)
        with open(stream, 'rb') as source:
            subprocess.run([PROGRAMS / 'hitrainctl', 'restore', '-', self.store.point / 'newer', f'--base={received}'], stdin=source,
                           stdout=subprocess.DEVNULL, check=True)


def parse_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--runs', type=int, default=3)
    p.add_argument('--steps', type=int, default=3, help='of each measurement')
    p.add_argument('--elements', type=int, default=96 * MIB, help=f'parameters, in {FILES} files')
    p.add_argument('--limit', type=int, default=300 * MIB, help='bytes per second each way')
    return p.parse_args()


def main():
    args = parse_args()
    check_elements(args, FILES)
    out = BUILD / 'bench/steps.jsonl'
    b = Bench(args, begin('steps'))
    print(f'bench-steps: {args.elements / 1e6:.0f} million f32 parameters in {FILES} files, AdamW, {args.runs} runs, every step durable, '
          f'dram={DRAM // MIB} MiB, device limited to {args.limit / MIB:.0f} MiB/s each way', flush=True)
    b.store.format()
    b.keeping()
    b.going_back()
    b.keeping_many()
    b.mounting_many()
    b.streams()
    out.write_text(''.join(json.dumps(r) + '\n' for r in b.rows))
    print(f'  {b.missed} targets missed; all figures: {out}')


if __name__ == '__main__':
    main()
