#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps in the store beside optimizers outside it, on a device of known speed.

Run it with `make bench-step`, as root. A loop device is limited to the same speed for reads and for writes, and fio
measures it for the mix of reads and writes of each case. Then AdamW on f32 parameters runs in hitrain (gradients
written to .hitrain/grad, a boundary per step), and in two clients on XFS on the same device: A reads p, m and v,
updates them with the same kernel and writes them back; B also has its gradient on the device, as DeepSpeed's pattern
does. Steps that clip (max_grad_norm) run beside the same steps without. All bytes are counted by the device. Medians of
interleaved runs; a table, and all figures in step.jsonl beside bench-meta's.
"""
import argparse
import atexit
import json
import os
import pathlib
import statistics
import subprocess
import time

from common import (BUILD, PROGRAMS, SECONDS_MAX, SpeedLimit, begin, check_elements, device_counters, give_up, is_mounted,
                    make_loop_device, run, wait_for)
from reachable import clipped_over_plain

CLIENT = BUILD / 'bench/step_client'
MIB = 1 << 20
RANGE = MIB  # of each array
ARRAYS = 3  # p, m, v
KEPT_SHARE = 0.75  # of the DRAM tier: the store keeps so much of parameters and state
FILES = 64
SETUP_SECONDS_MAX = 300


class Case:
    """resident: the part of p, m and v that memory holds; words: of the optimizer; gradients: memory for so many bytes each more"""

    def __init__(self, name, resident, durable_every, steps, words='', gradients=0):
        self.name, self.resident, self.durable_every, self.steps = name, resident, durable_every, steps
        self.optimizer = f'adamw lr=1e-3 durable_every={durable_every} {words}'
        self.gradients = gradients

    def dram(self, elements):
        return max(int((self.resident * 4 * ARRAYS + self.gradients) * elements / KEPT_SHARE), 64 * MIB)

    def warm_steps(self):
        """So many make the resident content resident and durable."""
        return self.durable_every if self.resident else 1

    def bytes_each_way(self, moved):
        """Per parameter and step, by arithmetic: (in, out) of a system that moves `moved` bytes when nothing is resident."""
        staged = moved * (1 - self.resident)
        return staged, staged + moved * self.resident / self.durable_every


CASES = [
    Case('nothing resident, every step durable', 0, 1, 3),
    Case('nothing resident, every 16th durable', 0, 16, 3),
    Case('half resident, every step durable', 0.5, 1, 4),
    Case('half resident, every 16th durable', 0.5, 16, 16),
]
# Pairs: a step, and the same step with clipping in the same memory.
CLIP = 'max_grad_norm=1'
PAIRS = [(Case(name, resident, 1, 3, gradients=gradients), Case(f'{name}, clipped', resident, 1, 3, CLIP, gradients))
         for name, resident, gradients in (('nothing resident', 0, 0), ('half resident', 0.5, 0),
                                           ('all resident, and gradients', 1, 4))]


class Device:
    def __init__(self, folder, size, limit, name='hitrain-bench'):
        folder.mkdir(exist_ok=True)
        self.path = make_loop_device(folder / 'image', size)
        atexit.register(run, 'losetup', '--detach', self.path)
        self.limit = limit
        self.group = SpeedLimit(self.path, name=name)
        atexit.register(self.group.remove)

    def slow(self, on):
        self.group.set(self.limit if on else 0)

    def counters(self):
        return device_counters(self.path)

    def run(self, *args, seconds_max=SECONDS_MAX):
        """In the group, so at the limit while it is on."""
        return run(*args, seconds_max=seconds_max, preexec_fn=self.group.enter)


# ------------------------------------------------------------------ the ceiling

def fio(device, read_bytes, write_bytes):
    """Seconds for so many bytes each way at once, sequential, in requests of 1 MiB, 16 of each in flight."""
    common = ['--ioengine=libaio', '--direct=1', '--bs=1M', '--iodepth=16', f'--filename={device.path}']
    jobs = []
    for name, way, count, offset in (('r', 'read', read_bytes, 0), ('w', 'write', write_bytes, 1 << 30)):
        if count >= MIB:
            jobs += [f'--name={name}', *common, f'--rw={way}', f'--io_size={count // MIB}M', f'--offset={offset}', '--size=1G']
    device.slow(True)
    out = json.loads(device.run('fio', '--output-format=json', *jobs, seconds_max=SETUP_SECONDS_MAX))
    return max(j[w]['runtime'] for j in out['jobs'] for w in ('read', 'write')) / 1000


# ------------------------------------------------------------------ hitrain

class Store:
    """devices: paths; device: limits the speed of the daemon, on all of them; programs: of the build that is measured."""

    def __init__(self, device, folder, elements, files, devices=None):
        self.device, self.elements, self.files = device, elements, files
        self.programs = PROGRAMS
        self.devices = self.format_words = devices or [device.path]
        self.point = folder / 'mnt'
        self.point.mkdir(exist_ok=True)
        self.log = folder / 'log'
        self.daemon = None
        self.element_bytes = 4
        atexit.register(self.stop)

    def format(self, dtype='f32', element_bytes=4):
        self.element_bytes = element_bytes
        self.device.slow(False)
        run(self.programs / 'mkfs.hitrain', '--force', '--no-discard', *self.format_words)
        self.start(1 << 30)
        root = self.point / 'model'
        root.mkdir()
        zeros = bytes(self.elements // self.files * element_bytes)
        for n in range(self.files):
            path = root / f'p{n:02}'
            path.touch()
            os.setxattr(path, 'user.hitrain.dtype', dtype.encode())
            path.write_bytes(zeros)
        self.prepare_root(root)
        self.step(1)
        self.stop()

    def prepare_root(self, root):
        os.setxattr(root, 'user.hitrain.optimizer', b'adamw lr=1e-3')

    def start(self, dram, optimizer='adamw lr=1e-3', options=()):
        with open(self.log, 'w') as log:
            words = ','.join([f'dram={dram}', *options])
            self.daemon = subprocess.Popen([self.programs / 'hitrain', '-f', *self.devices, self.point, '-o', words],
                                           stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                                           preexec_fn=self.device.group.enter)
        wait_for(lambda: self.daemon.poll() is not None or is_mounted(self.point), 'mounting')
        if self.daemon.poll() is not None:
            give_up(f'hitrain: exit {self.daemon.returncode}\n{self.log.read_text()}')
        root = self.point / 'model'
        if root.exists():
            os.setxattr(root, 'user.hitrain.optimizer', optimizer.encode())

    def stop(self):
        if not self.daemon:
            return
        self.device.slow(False)
        if is_mounted(self.point):
            run('umount', self.point, seconds_max=SETUP_SECONDS_MAX)
        self.daemon.wait(SETUP_SECONDS_MAX)
        self.daemon = None

    def step(self, number, seconds=0):
        """Gradients that are not all the same, spread over so many seconds, and the boundary. Returns its seconds."""
        began = time.monotonic()
        hidden = self.point / 'model/.hitrain'
        for n in range(self.files):
            gradient = self.gradient(number, n)
            fd = os.open(hidden / f'grad/p{n:02}', os.O_WRONLY)
            size = self.elements // self.files * self.element_bytes
            for at in range(0, size, MIB):
                os.pwrite(fd, gradient[:size - at], at)
            os.close(fd)
            self.gradient_written(n)
            time.sleep(max(0, began + seconds * (n + 1) / self.files - time.monotonic()))
        self.gradients_written()
        began = time.monotonic()
        self.command('step')
        return time.monotonic() - began

    def gradient(self, number, n):
        """A MiB for the n-th file."""
        piece = (number * 0.001).hex().encode().ljust(16, b'\0')[:8].replace(b'\0', b' ')
        return memoryview(piece * (MIB // 8))

    def gradient_written(self, n):
        """Of the n-th file."""

    def gradients_written(self):
        """Of all files."""

    def command(self, text):
        with open(self.point / 'model/.hitrain/ctl', 'r+b', buffering=0) as ctl:
            ctl.write(f'{text}\n'.encode())
            answer = ctl.read(4096)
        if not answer.startswith(b'ok'):
            give_up(f'{text}: {answer.decode()}')

    def measure(self, case):
        self.start(case.dram(self.elements), case.optimizer)
        for n in range(case.warm_steps()):
            self.step(n)
        self.device.slow(True)
        before, began = self.device.counters(), time.monotonic()
        for n in range(case.steps):
            self.step(n + 2)
        seconds = time.monotonic() - began
        after = self.device.counters()
        self.stop()
        return {'seconds': seconds, 'steps': case.steps, 'read_bytes': after[0] - before[0],
                'written_bytes': after[1] - before[1]}


# ------------------------------------------------------------------ outside

class Outside:
    def __init__(self, device, folder, elements):
        self.device, self.elements = device, elements
        self.point = folder / 'xfs'
        self.point.mkdir(exist_ok=True)
        atexit.register(self.unmount)

    def format(self, arrays):
        self.device.slow(False)
        run('mkfs.xfs', '-q', '-f', '-K', self.device.path, seconds_max=SETUP_SECONDS_MAX)
        run('mount', self.device.path, self.point)
        run(CLIENT, 'make', self.point, RANGE, self.elements, arrays, seconds_max=SETUP_SECONDS_MAX)

    def unmount(self):
        if is_mounted(self.point):
            run('umount', self.point)

    def measure(self, arrays, steps, kept, durable_every):
        self.device.slow(True)
        before = self.device.counters()
        result = json.loads(self.device.run(CLIENT, 'step', self.point, RANGE, self.elements, arrays, steps, kept,
                                            durable_every, seconds_max=SETUP_SECONDS_MAX))
        after = self.device.counters()
        return {**result, 'read_bytes': after[0] - before[0], 'written_bytes': after[1] - before[1]}


# ------------------------------------------------------------------ results

def per_step(r):
    return r['seconds'] / r['steps']


class Results:
    def __init__(self, elements):
        self.elements, self.rows = elements, []

    def add(self, run_number, who, result, ceiling_s=None):
        """ceiling_s: fio's time for the bytes of one step, by arithmetic."""
        self.rows.append({'run': run_number, 'who': who, **result, 'fio_s': ceiling_s})

    def of(self, who):
        return [r for r in self.rows if r['who'] == who]

    def summary(self, who):
        rows = self.of(who)
        count = self.elements
        moved = [(r['read_bytes'] + r['written_bytes']) / r['seconds'] for r in rows]
        return {'who': who, 'step_s': statistics.median(per_step(r) for r in rows),
                'in': statistics.median(r['read_bytes'] / r['steps'] / count for r in rows),
                'out': statistics.median(r['written_bytes'] / r['steps'] / count for r in rows),
                'bytes_per_s': statistics.median(moved),
                'of_fio': statistics.median(r['fio_s'] / per_step(r) for r in rows) if rows[0]['fio_s'] else None}

    def ratio(self, ours, theirs):
        """How many times faster a step is: the median over the runs."""
        return statistics.median(per_step(b) / per_step(a) for a, b in zip(self.of(ours), self.of(theirs)))


def tell(results, case_list):
    names = [c.name for c in case_list] + ['A', 'A, half resident, every 16th written', 'B']
    rows = {n: results.summary(n) for n in names}
    expected = {c.name: c.bytes_each_way(12) for c in case_list}
    expected.update({'A': (12, 12), 'A, half resident, every 16th written': CASES[3].bytes_each_way(12), 'B': (16, 16)})
    print(f'\n  {"":40}{"bytes in":>10}{"out":>7}{"by arithmetic":>16}{"s/step":>9}{"of fio":>8}')
    for n, r in rows.items():
        want = f'{expected[n][0]:.2f} {expected[n][1]:.2f}'
        print(f'  {n:40}{r["in"]:10.2f}{r["out"]:7.2f}{want:>16}{r["step_s"]:9.3f}{r["of_fio"]:8.2f}')
    print('\n  Bytes are per parameter and step, counted by the device. "of fio": the time fio needs for the bytes of the\n'
          '  arithmetic, with as many each way, over the time of a step.\n')
    print(f'  {"hitrain over":40}{"A":>8}{"bytes allow":>13}{"B":>8}{"bytes allow":>13}')
    out = list(rows.values())
    for c in case_list:
        most = max(c.bytes_each_way(12))
        line = {'who': c.name, 'over': 'clients'}
        text = f'  {c.name:40}'
        for client, bytes_each_way in (('A', 12), ('B', 16)):
            allowed = bytes_each_way / most
            void = rows[client]['of_fio'] < 0.95
            got = results.ratio(c.name, client)
            line.update({client: got, f'{client}_allowed': allowed, f'{client}_void': void})
            text += f'{got:8.2f}{allowed:13.2f}{"!" if void else ""}'
        out.append(line)
        print(text)
    if any(rows[c]['of_fio'] < 0.95 for c in 'AB'):
        print('  ! void: the client itself stayed below 0.95 of fio')
    return out


def tell_pairs(results):
    print(f'\n  {"":40}{"bytes in":>10}{"out":>7}{"s/step":>9}{"time over the same without":>28}{"bound":>8}')
    out = []
    for plain, clipped in PAIRS:
        for c in plain, clipped:
            out.append(results.summary(c.name))
            r = out[-1]
            ratio = f'{1 / results.ratio(c.name, plain.name):28.3f}' if c is clipped else ''
            if c is clipped:
                r['bound'] = clipped_over_plain(c.dram(results.elements) / results.elements, 4 * ARRAYS, 4)
                ratio += f'{r["bound"]:8.3f}'
            print(f'  {c.name:40}{r["in"]:10.2f}{r["out"]:7.2f}{r["step_s"]:9.3f}{ratio}')
    print('\n  "bound": gradients for which this memory has no room are written before the first update, and read with it.\n'
          '  Over the time of 12 bytes each way at the speed of the device.')
    return out


def parse_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--runs', type=int, default=3)
    p.add_argument('--elements', type=int, help=f'parameters, in {FILES} files (96 Mi; with --forms or --deltas 32 Mi)')
    p.add_argument('--limit', type=int, default=300 * MIB, help="bytes per second each way")
    p.add_argument('--only', default='', help='cases whose name contains this; clients A and B always run')
    p.add_argument('--devices', action='store_true', help='only stores of two devices')
    p.add_argument('--options', action='append', default=[], help='an option of the mount, with --devices')
    p.add_argument('--redo', action='store_true', help='only steps that are durable by their gradients (redo=on)')
    p.add_argument('--follow', action='store_true', help='of these only a second store that follows them')
    p.add_argument('--forms', action='store_true', help='only AdamW with state of 32, 16 and 8 bits, and Muon')
    p.add_argument('--deltas', action='store_true', help='only steps with and without deltas')
    p.add_argument('--pairs', action='store_true', help='only steps with and without clipping')
    p.add_argument('--before', type=pathlib.Path, help='only steps of this build beside those of another one, which lies there')
    args = p.parse_args()
    args.elements = args.elements or (32 if args.forms or args.deltas else 96) * MIB
    return args


def run_pairs(number, store, results, said):
    store.format()
    for c in (c for pair in PAIRS for c in pair):
        results.add(number, c.name, store.measure(c))
        said(f'run {number + 1}: {c.name}: {per_step(results.rows[-1]):.2f} s')


def one_run(number, args, device, store, outside, cases, results, said):
    ceilings = {}

    def ceiling(each_way):
        if each_way not in ceilings:
            ceilings[each_way] = fio(device, *(int(b * args.elements) for b in each_way))
        return ceilings[each_way]

    for c in cases:
        ceiling(c.bytes_each_way(12))
    full = ceiling((12, 12)), ceiling((16, 16)), ceiling(CASES[3].bytes_each_way(12))
    said(f'run {number + 1}: fio gives {12 * args.elements / full[0] / MIB:.0f} MiB/s each way at once')
    store.format()
    for c in cases:
        results.add(number, c.name, store.measure(c), ceiling(c.bytes_each_way(12)))
        said(f'run {number + 1}: {c.name}: {per_step(results.rows[-1]):.2f} s')
    ranges = args.elements * 4 // RANGE
    outside.format(4)
    for who, arrays, steps, kept, every, best in (('A', 3, 3, 0, 1, full[0]), ('B', 4, 3, 0, 1, full[1]),
                                                  ('A, half resident, every 16th written', 3, 16, ranges // 2, 16, full[2])):
        results.add(number, who, outside.measure(arrays, steps, kept, every), best)
        said(f'run {number + 1}: {who}: {per_step(results.rows[-1]):.2f} s')
    outside.unmount()


def main():
    args = parse_args()
    check_elements(args, FILES)
    out = BUILD / 'bench/step.jsonl'
    folder = begin('step')
    cases = [c for c in CASES if args.only in c.name]
    results, began = Results(args.elements), time.monotonic()

    def said(text):
        print(f'  {time.monotonic() - began:5.0f} s  {text}', flush=True)

    if args.devices:
        import step_devices  # it uses this file
        step_devices.main(args, folder, out.with_name('step_devices.jsonl'))
        return
    if args.forms:
        import step_forms  # it uses this file
        step_forms.main(args, folder, out.with_name('step_forms.jsonl'))
        return
    if args.deltas:
        import step_deltas  # it uses this file
        step_deltas.main(args, folder, out.with_name('step_deltas.jsonl'))
        return
    if args.before:
        import step_before  # it uses this file
        step_before.main(args, folder, out.with_name('step_before.jsonl'))
        return
    if args.redo or args.follow:
        import step_redo  # it uses this file
        step_redo.main(args, folder, out.with_name('step_redo.jsonl'))
        return
    device = Device(folder, max(args.elements * 32, 2 << 30) + (1 << 30), args.limit)
    store, outside = Store(device, folder, args.elements, FILES), Outside(device, folder, args.elements)
    print(f'bench-step: {args.elements / 1e6:.0f} million f32 parameters, AdamW, {args.runs} runs, '
          f'device limited to {args.limit / MIB:.0f} MiB/s each way', flush=True)
    pairs = Results(args.elements)
    for number in range(args.runs):
        if not args.pairs:
            one_run(number, args, device, store, outside, cases, results, said)
        run_pairs(number, store, pairs, said)
    rows = ([] if args.pairs else tell(results, cases)) + tell_pairs(pairs)
    out.write_text(''.join(json.dumps(r) + '\n' for r in results.rows + pairs.rows + rows))
    print(f'  all figures: {out}')


if __name__ == '__main__':
    main()
