#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Rates of operations on names: hitrain beside ext4 seen through libfuse's example passthrough_hp.

Run it with `make bench-meta`, as root. Both stores are loop devices of the same size on the same disk; every run of
one side is followed by one of the other, and medians are compared. A table goes to the screen, every run and the
medians go to meta.jsonl in the folder bench of the build folder.
"""
import argparse
import atexit
import json
import os
import statistics
import subprocess
import sys
import time

from common import (BUILD, PROGRAMS, SECONDS_MAX, TOP, begin, give_up, is_mounted, make_loop_device, run,
                    wait_for)

CLIENT = BUILD / 'bench/meta_client'
PASSTHROUGH = TOP / 'build/deps/bench/passthrough_hp'

STORE_BYTES = 1 << 30
DRAM = '256M'  # names do not need it; populating more memory would only disturb the runs
LAYOUTS = [(1, 'own'), (4, 'own'), (4, 'shared')]  # clients, whose folder
TITLE = {(1, 'own'): '1 client', (4, 'own'): '4 clients, a folder each', (4, 'shared'): '4 clients, one folder'}

FAIRNESS = """\
Neither side fsyncs: changes are volatile, and each commits them by itself every 5 seconds. Names and attributes are
cached by the kernel as long as each daemon says by default (hitrain 1 hour, passthrough_hp 24 hours). "Cold" follows
on emptying the kernel's cache of the mount; ext4 below keeps its own. Rates are operations per second of all clients.
"""


class Side:
    """A store on a loop device, mounted. undo removes it again, last first."""

    def __init__(self, name, folder):
        self.name = name
        self.folder = folder / name
        self.point = self.folder / 'mnt'
        self.point.mkdir(parents=True)
        self.log = self.folder / 'log'
        self.undo = []
        self.daemon = None
        atexit.register(self.close)

    def make_device(self):
        device = make_loop_device(self.folder / 'image', STORE_BYTES)
        self.undo.append(lambda: run('losetup', '--detach', device))
        return device

    def start(self, *args):
        with open(self.log, 'w') as log:
            self.daemon = subprocess.Popen([str(a) for a in args], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                           start_new_session=True)
        self.undo.append(self.stop)
        wait_for(lambda: self.daemon.poll() is not None or is_mounted(self.point), f'mounting {self.name}')
        if self.daemon.poll() is not None:
            give_up(f'{args[0]}: exit {self.daemon.returncode}\n{self.log.read_text()}')
        os.stat(self.point)  # answered: it is ready

    def stop(self):
        if is_mounted(self.point):
            subprocess.run(['umount', str(self.point)], timeout=SECONDS_MAX, check=False)
        try:
            self.daemon.wait(SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.daemon.kill()
            self.daemon.wait()
            subprocess.run(['umount', '-l', str(self.point)], stderr=subprocess.DEVNULL, check=False)

    def close(self):
        """Every step is tried, whatever became of the one before."""
        while self.undo:
            try:
                self.undo.pop()()
            except (SystemExit, OSError, subprocess.SubprocessError) as e:
                print(f'bench-meta: cleaning up: {e}', file=sys.stderr)

    def measure(self, layout, files):
        clients, whose = layout
        return [json.loads(line) for line in
                run(CLIENT, self.point, clients, files, whose, self.point, self.daemon.pid).splitlines()]


def start_hitrain(folder, options):
    side = Side('hitrain', folder)
    device = side.make_device()
    run(PROGRAMS / 'mkfs.hitrain', '--no-discard', device)
    side.start(PROGRAMS / 'hitrain', '-f', device, side.point, '-o', ','.join([f'dram={DRAM}', *options]))
    return side


def start_baseline(folder, flags):
    side = Side('ext4', folder)
    device = side.make_device()
    below = side.folder / 'below'
    below.mkdir()
    run('mkfs.ext4', '-q', '-E', 'nodiscard', device)
    run('mount', device, below)
    side.undo.append(lambda: run('umount', below))
    side.start(PASSTHROUGH, '--foreground', *flags, below, side.point)
    return side


# ------------------------------------------------------------------ results

def rate(record):
    return record['operations'] / record['seconds']


def cpu_us(record):
    """Processor time of clients and daemon for one operation."""
    return (record['client_cpu_s'] + record['daemon_cpu_s']) * 1e6 / record['operations']


def summary(runs, layout, phase):
    """Medians of both sides, and of the ratios of neighbouring runs."""
    ours, theirs = ([r for r in runs if (r['clients'], r['layout'], r['phase']) == (*layout, phase) and r['side'] == s]
                    for s in ('hitrain', 'ext4'))
    return {'clients': layout[0], 'layout': layout[1], 'phase': phase,
            'hitrain_per_s': round(statistics.median(map(rate, ours)), 1),
            'ext4_per_s': round(statistics.median(map(rate, theirs)), 1),
            'ratio': round(statistics.median(rate(a) / rate(b) for a, b in zip(ours, theirs)), 3),
            'hitrain_cpu_us': round(statistics.median(map(cpu_us, ours)), 2),
            'ext4_cpu_us': round(statistics.median(map(cpu_us, theirs)), 2)}


def tell(rows, count):
    print(f'\nMedians of {count} interleaved runs. A ratio is the median of the ratios of neighbouring runs: above 1, '
          'hitrain is faster.\nThe processor time is that of clients and daemon for one operation; what kernel threads '
          'do for ext4 is not in it.\n')
    print(f'  {"":26}{"hitrain/s":>11}{"ext4/s":>11}{"ratio":>8}{"hitrain us":>13}{"ext4 us":>10}')
    for layout in LAYOUTS:
        print(f'  {TITLE[layout]}')
        for r in rows:
            if (r['clients'], r['layout']) == layout:
                print(f'    {r["phase"]:24}{r["hitrain_per_s"]:11,.0f}{r["ext4_per_s"]:11,.0f}{r["ratio"]:8.2f}'
                      f'{r["hitrain_cpu_us"]:13.1f}{r["ext4_cpu_us"]:10.1f}')
    below = [r for r in rows if r['ratio'] < 1]
    print(f'\n  {len(rows) - len(below)} of {len(rows)} lines at least equal')


def parse_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--runs', type=int, default=5, help='of each side and layout')
    p.add_argument('--files', type=int, default=4000, help='per run, divided among its clients')
    p.add_argument('--options', default=[], action='append', help='for hitrain -o')
    p.add_argument('--baseline-flags', default='', help='for passthrough_hp, separated by spaces')
    return p.parse_args()


def main():
    args = parse_args()
    out = BUILD / 'bench/meta.jsonl'
    folder = begin('meta')
    sides = [start_hitrain(folder, args.options), start_baseline(folder, args.baseline_flags.split())]
    runs, done, began = [], 0, time.monotonic()
    total = args.runs * len(LAYOUTS) * 2
    print(f'bench-meta: {total} runs\n{FAIRNESS}', flush=True)
    for side in sides:  # work of a first run is not measured
        side.measure(LAYOUTS[0], args.files)
    for n in range(args.runs):
        for layout in LAYOUTS:
            # The second becomes the first of the next run: drift falls on both.
            for side in sides if n % 2 == 0 else sides[::-1]:
                for record in side.measure(layout, args.files):
                    runs.append({'run': n, 'side': side.name, 'clients': layout[0], 'layout': layout[1], **record})
                done += 1
                print(f'\r  {done}/{total} runs, {time.monotonic() - began:.0f} s ', end='', file=sys.stderr, flush=True)
    phases = list(dict.fromkeys(r['phase'] for r in runs))
    rows = [summary(runs, layout, phase) for layout in LAYOUTS for phase in phases]
    out.write_text(''.join(json.dumps(r) + '\n' for r in runs + rows))
    tell(rows, args.runs)
    print(f'  all figures: {out}')


if __name__ == '__main__':
    main()
