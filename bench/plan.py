#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Made traces of training on a mount, beside memory for all, and what a plan of many tensors costs.

Run it with `make bench-plan`, as root. bench/replay plays small shapes with timed waits on a loop device, which moves all tensors
once each way in the time of a step's computing. "Of ideal" is the time of a step with memory for everything over the time of the
step; "reachable" is the most that any policy can have (reachable.py). For a target above that the bench prints so.
bench/replay/README.md explains traces. With BEFORE=TREE it measures training loops with plans, with hints, and with neither
(plan_sides.py). All figures go into plan.jsonl beside those of the other benches.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time

import plan_sides
from common import BUILD, begin, give_up, machine, run
from path_sides import MIB, Devices, Hitrain
from reachable import least_seconds

REPLAY = BUILD / 'bench/replay'
PLANNER = BUILD / 'bench/bench_planner'
MOUNTED = [('gpt', '1.3B', '2%'), ('llama', '1B', '2%'), ('gpt-swap', '1.3B', '1.5%')]
TARGETS = {50: 0.9, 25: 0.8}
NOISE, NOISE_POINTS = 25, 1
STEPS, WARM = 8, 4
SCAN, MANY = 128, 100000
DEVICE = 3 << 30


def bytes_of(trace):
    """Of all tensors with their states."""
    total = 0
    with open(trace) as f:
        for words in map(str.split, f):
            if words and words[0] in ('tensor', 'parameter'):
                total += sum(map(int, words[2:]))
    return total


def generate(path, *words):
    with open(path, 'w') as out:
        subprocess.run([REPLAY, 'generate', *words], stdout=out, check=True)
    return path


def make_trace(folder, kind, shape, rate, scale='100%'):
    """A step computes as long as the device takes for all tensors, each way. Returns the trace and its bytes."""
    path = folder / f'{kind}-{shape}.txt'
    words = kind, f'shape={shape}', f'scale={scale}', f'steps={STEPS}'
    size = bytes_of(generate(path, *words))
    generate(path, *words, f'compute={size / rate:.6f}')
    return path, size


def reachable(trace, memory, rate, ideal_s, copy_rate=0):
    """The part of the ideal that any policy can reach at most."""
    with open(trace) as f:
        return min(1, ideal_s / least_seconds(f, memory, rate, copy_rate))


def has_updates(trace):
    with open(trace) as f:
        return any(line.startswith('parameter ') for line in f)


def copy_rate_of(trace, ideal):
    """Of a played ideal: bytes per second that the caller waits for. 0: unknown, for updates are in its waits, too."""
    return 0 if has_updates(trace) else (ideal['read_bytes'] + ideal['written_bytes']) / ideal['stall_s']


def verdict(ok):
    return 'met' if ok else 'missed'


def cause(name, share, target, reach):
    """Of a target that no policy reaches."""
    return [] if reach >= target else [
        f'  {name} with DRAM for {share} %: bytes allow at most {reach:.4f}, whatever stays in memory: what a part of the step reads '
        f'takes\n  the device longer than this part']


def plan_of_many(rows):
    store = json.loads(run(PLANNER, MANY, seconds_max=60))
    took = store['step_s'] + store['plan_s']
    print(f'\n  the store with {MANY} tensors, {store["uses"]} accesses a step: {store["note_ns"]:.0f} ns for each access; '
          f'{took:.2f} s of one core\n  for a plan, target 1 s: {verdict(took < 1)}; history {store["runs_bytes"] / MIB:.0f} MiB, '
          f'plan {store["plan_bytes"] / MIB:.0f} MiB, at most {store["peak_bytes"] / MIB:.0f} MiB while it is made')
    rows.append({'what': 'store', **store})


# -------------------------------------------------------------------- mounted

class Mount:
    def __init__(self, folder, limit):
        self.devices = Devices(folder, {'hitrain': DEVICE}, limit)
        self.side = Hitrain(self.devices, folder / 'mnt')
        self.limit = limit

    def make(self, trace):
        self.side.unmount()
        self.side.format()
        self.side.mount('1G')
        run(REPLAY, 'make', trace, self.side.point, seconds_max=600)

    def play(self, trace, dram, noise=0):
        """With so many bytes of DRAM, cold at first."""
        self.side.remount(max(dram // MIB, 16) * MIB)
        self.devices.slow(True)
        out = run(REPLAY, 'play', trace, self.side.point, f'noise={noise}%', f'warm={WARM}', seconds_max=600)
        self.devices.slow(False)
        return json.loads(out)

    def medians(self, trace, dram, runs, noise=0):
        played = [self.play(trace, dram, noise) for _ in range(runs)]
        return {key: statistics.median(r[key] for r in played) for key in played[0]}


def mounted(folder, args, rows, said):
    mount = Mount(folder, args.limit)
    lines, causes = [], []
    for kind, shape, scale in MOUNTED:
        trace, size = make_trace(folder, kind, shape, args.limit, scale)
        mount.make(trace)
        ideal = mount.medians(trace, 3 * size, args.runs)
        said(f'{kind} {shape}: {size / MIB:.0f} MiB, {ideal["step_s"]:.2f} s a step with memory for all')
        for share, target in TARGETS.items():
            dram = size * share // 100
            got, noisy = mount.medians(trace, dram, args.runs), mount.medians(trace, dram, args.runs, NOISE)
            of, of_noisy = (ideal['step_s'] / r['step_s'] for r in (got, noisy))
            lost = 100 * (of - of_noisy)
            reach = reachable(trace, dram, args.limit, ideal['step_s'], copy_rate_of(trace, ideal))
            causes += cause(f'{kind} {shape}', share, target, reach)
            said(f'{kind} {shape}, {share} %: {got["step_s"]:.2f} s a step')
            lines.append(f'  {kind + " " + shape:18}{share:5}%{got["step_s"]:9.3f}{of:10.3f}{target:8.2f}{verdict(of >= target):>8}{reach:11.3f}'
                         f'{got["device_read_bytes"] / size:8.2f}{got["device_written_bytes"] / size:8.2f}{lost:9.1f}')
            rows.append({'what': 'mounted', 'trace': f'{kind} {shape}', 'dram': share, 'target': target, 'of_ideal': of,
                         'reachable': reach, 'points_lost': lost, 'played': got, 'ideal': ideal})
    read = scan_mounted(folder, mount, args.runs)
    rows.append({'what': 'scan', 'read': read})
    print(f'\n  mounted, a device of {args.limit / MIB:.0f} MiB/s each way; in and out: parts of all bytes\n'
          f'  {"":18}{"DRAM":>6}{"s/step":>9}{"of ideal":>10}{"target":>8}{"":>8}{"reachable":>11}{"in":>8}{"out":>8}{"noise":>9}')
    print('\n'.join(lines + causes))
    print(f'  cyclic scan of {SCAN} MiB with DRAM for half: reads {read:.3f} of all, target 0.500', flush=True)


def scan_mounted(folder, mount, runs):
    trace = generate(folder / 'small-scan.txt', 'scan', f'tensors={SCAN // 8}', f'bytes={8 * MIB}', f'steps={2 * STEPS}',
                     'compute=0.5')
    mount.make(trace)
    return mount.medians(trace, SCAN // 2 * MIB, runs)['device_read_bytes'] / (SCAN * MIB)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--runs', type=int, default=3)
    p.add_argument('--limit', type=int, default=300 * MIB, help='of the mounted device, bytes per second each way')
    p.add_argument('--before', help='a tree whose store makes no plans, in which make has run')
    args = p.parse_args()
    if args.runs < 1 or args.limit < 1:
        give_up('--runs and --limit are at least 1')
    folder, began, rows = begin('plan'), time.monotonic(), [{'machine': machine(), 'runs': args.runs, 'limit': args.limit}]

    def said(text):
        print(f'  {time.monotonic() - began:5.0f} s  {text}', flush=True)

    print(f'bench-plan: {args.runs} runs\n  on {machine()}', flush=True)
    if args.before:
        plan_sides.main(sys.modules[__name__], folder, args, rows, said)
    else:
        plan_of_many(rows)
        mounted(folder, args, rows, said)
    out = BUILD / 'bench/plan.jsonl'
    out.write_text(''.join(json.dumps(r) + '\n' for r in rows))
    print(f'  all figures: {out}')


if __name__ == '__main__':
    main()
