# SPDX-License-Identifier: Apache-2.0
"""Training loops on a mount with the plans that the store makes, with hints of the program, and with neither.

plan.py runs it with --before (`make bench-plan BEFORE=TREE`). TREE is a tree whose store makes no plans, in which make has
run: for example this one with RUNS_MIN of tiering/engine/planner.c as 1 << 30. The loops are of programs that read files,
of one that swaps, of the client's optimizer and of an offloaded model. Their computes are sleeps, as long as the device
takes for all tensors and states once. Hints are the best that a program can give: after each access
user.hitrain.next_use of the file, by the order of the step and by the time that the step before took. Sides take turns.
Figures are medians, in per cent of the speed with memory for all. A low --limit makes the copies of the processor small
beside the device.
"""
import json
import pathlib
import statistics

import path_sides
from common import run

SIDES = ('plan', 'hints', 'neither')
SHARES = (50, 25)
WARM = 4
MIB = 1 << 20
FOR_ALL = 3  # times the bytes: memory for all
SECONDS_MAX = 1200
READ_BYTES = 256 * MIB


def layers(count, lines):
    """Few layers with large tensors, and no table: chunks are as full as those of the whole shape."""
    kept, stays, out = {f'layers.{i}.' for i in range(count)}, True, []
    for line in lines:
        words = line.split()
        if words[:1] != ['compute']:  # computes belong to the line before
            stays = len(words) < 2 or words[0] == 'hitrain' or any(words[1].startswith(k) for k in kept)
        out += [line] if stays else []
    return out


def files_only(lines):
    """Forward and backward read frozen weights: nothing is written."""
    return [line.replace('parameter ', 'tensor ').rsplit(' ', 1)[0] if line.startswith('parameter ') else line
            for line in lines if not line.startswith('gradient ')]


def in_memory(lines):
    """Parameters are in the trainer's memory: it sends gradients, and reads what the step made."""
    names, out = [line.split()[1] for line in lines if line.startswith('parameter ')], []
    for line in lines:
        if not line.startswith('read '):
            out.append(line)
        if line in ('step', 'commit'):
            out += [f'read {name}' for name in names]
    return out


def same(lines):
    return lines


# What a step does; the shape, how many of its layers, and their scale (bench/replay/README.md); what else changes.
LOOPS = [('files are read, forward and backward', 'gpt', '1.3B', 8, '30%', files_only), ('files are read in a cycle', 'scan', '', 0, '', None),
         ('files are swapped', 'gpt-swap', '1.3B', 6, '6%', same), ("the client's optimizer", 'gpt', '1.3B', 6, '10%', in_memory),
         ('an offloaded model, GPT', 'gpt', '1.3B', 6, '10%', same), ('an offloaded model, Llama', 'llama', '1B', 5, '10%', same)]


def with_computes(lines, step_s, steps):
    """The same step, computing for so long."""
    sum_us = sum(int(line.split()[1]) for line in lines if line.startswith('compute '))
    part = step_s * steps * 1e6 / sum_us
    return [f'compute {int(int(line.split()[1]) * part)}' if line.startswith('compute ') else line for line in lines]


def make_trace(plan, folder, rate, kind, shape, count, scale, change):
    """Returns the trace and its bytes."""
    path = folder / 'trace.txt'
    if kind == 'scan':
        plan.generate(path, 'scan', f'tensors={READ_BYTES // (8 * MIB)}', f'bytes={8 * MIB}', f'steps={plan.STEPS}', f'compute={READ_BYTES / rate:.3f}')
        return path, READ_BYTES
    whole, _ = plan.make_trace(folder, kind, shape, rate, scale)
    lines = change(layers(count, whole.read_text().splitlines()))
    path.write_text('\n'.join(lines) + '\n')
    size = plan.bytes_of(path)
    path.write_text('\n'.join(with_computes(lines, size / rate, plan.STEPS)) + '\n')
    return path, size


class Sides:
    def __init__(self, plan, folder, args):
        self.plan, self.mount = plan, plan.Mount(folder, args.limit)
        self.with_plans, self.without = path_sides.PROGRAMS, pathlib.Path(args.before) / 'build/bin'

    def play(self, side, trace, dram):
        path_sides.PROGRAMS = self.with_plans if side == 'plan' else self.without
        self.mount.side.remount(max(dram // MIB, 16) * MIB)
        self.mount.devices.slow(True)
        out = run(self.plan.REPLAY, 'play', trace, self.mount.side.point, f'warm={WARM}', f'next_use={int(side == "hints")}', seconds_max=SECONDS_MAX)
        self.mount.devices.slow(False)
        return json.loads(out)

    def measure(self, trace, size, runs, said):
        """The ideal step's seconds, and by share and side those of all runs."""
        ideal, seconds = self.play('plan', trace, FOR_ALL * size)['step_s'], {}
        for share in SHARES:
            for _ in range(runs):
                for side in SIDES:
                    r = self.play(side, trace, size * share // 100)
                    seconds.setdefault((share, side), []).append(r['step_s'])
                    said(f'{share} %, {side}: {100 * ideal / r["step_s"]:.0f} % of the ideal, in {r["device_read_bytes"] / size:.2f}')
        return ideal, seconds


def main(plan, folder, args, rows, said):
    """plan: the module plan.py."""
    sides, lines = Sides(plan, folder, args), []
    for name, *what in LOOPS:
        trace, size = make_trace(plan, folder, args.limit, *what)
        sides.mount.make(trace)
        said(f'{name}: {size / MIB:.0f} MiB')
        ideal, seconds = sides.measure(trace, size, args.runs, said)
        for share in SHARES:
            of = {side: 100 * ideal / statistics.median(seconds[share, side]) for side in SIDES}
            lines.append(f'  {name:40}{share:5}%' + ''.join(f'{of[side]:9.0f}' for side in SIDES))
            rows.append({'what': 'sides', 'loop': name, 'dram': share, 'ideal_s': ideal, **{s: seconds[share, s] for s in SIDES}})
    print(f'\n  per cent of the speed with memory for all\n  {"":40}{"DRAM":>6}' + ''.join(f'{s:>9}' for s in SIDES))
    print('\n'.join(lines), flush=True)
