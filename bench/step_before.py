# SPDX-License-Identifier: Apache-2.0
"""Steps of this build beside those of another one, on the same device.

step.py runs it with --before (`make bench-step BEFORE=PATH`, where PATH is another tree in which `make` has run, or its build folder).
Nothing of it depends on logged steps, so its ratios say whether steps without redo=on are as fast as they were. With --redo
(`REDO=1 BEFORE=PATH`) the steps that a mount computes again are measured instead.

Both builds take turns, and begin by turns. Each measurement has a store that its own mkfs has made. A ratio is the time of the other
build over that of this one, from two measurements that follow each other; the median counts.
"""
import json
import statistics
import time

from common import PROGRAMS, check_elements, programs_of
from step import CASES, FILES, MIB, Case, Device, Store, per_step
from step_follow import DEVICE_BYTES
from step_redo import EVERY, Bench

RATE_MIN = 0.99  # of the other build's rate
BF16_BYTES = 2
ALL = Case('all resident, every 16th durable', 1, 16, 48, gradients=4)
NOW, BEFORE = 'this build', 'the other build'


class Turns:
    """Measures a thing with both builds, by turns."""

    def __init__(self, store, before):
        self.store, self.programs = store, {NOW: PROGRAMS, BEFORE: programs_of(before)}

    def measure(self, number, fn):
        """fn: returns seconds of a step of the store; number: of the run."""
        found = {}
        for who in (NOW, BEFORE) if number % 2 else (BEFORE, NOW):
            self.store.programs = self.programs[who]
            found[who] = fn()
        return found


def steps(turns, args, said, rows):
    store = turns.store
    for dtype, element_bytes in ('f32', 4), ('bf16', BF16_BYTES):
        for case in (*CASES, ALL):
            def one(case=case, dtype=dtype, element_bytes=element_bytes):
                store.format(dtype, element_bytes)
                return per_step(store.measure(case))
            found = []
            for number in range(args.runs):
                found.append(turns.measure(number, one))
                said(f'{dtype}, {case.name}, run {number + 1}: {found[-1][BEFORE]:.3f} s before, {found[-1][NOW]:.3f} s now')
            tell(rows, f'{dtype}, {case.name}', found, RATE_MIN)


def replays(turns, args, folder, said, rows):
    """All of the replay, with the first reading of content that memory does not have."""
    bench = Bench(args, folder, turns.store)
    for dtype, element_bytes in ('f32', 4), ('bf16', BF16_BYTES):
        for part, resident in ('all', 1), ('half', 0.5), ('nothing', 0):
            def one(resident=resident, dtype=dtype, element_bytes=element_bytes):
                turns.store.format(dtype, element_bytes)
                return bench.replay(resident)['replay_s'] / (EVERY - 1)
            found = []
            for number in range(args.runs):
                found.append(turns.measure(number, one))
                said(f'{dtype}, {part} resident, run {number + 1}: {found[-1][BEFORE]:.3f} s before, {found[-1][NOW]:.3f} s now')
            tell(rows, f'{dtype}, {part} resident, a step again at a mount', found, None)


def tell(rows, what, found, least):
    ratios = sorted(f[BEFORE] / f[NOW] for f in found)
    ratio = statistics.median(ratios)
    met = least is None or ratio >= least
    rows.append({'what': what, 'before_s': [f[BEFORE] for f in found], 'now_s': [f[NOW] for f in found], 'ratio': ratio,
                 'target': least, 'met': met})
    target = '' if least is None else f'   target: at least {least}{"" if met else "   MISSED"}'
    print(f'  {what:56}{ratio:8.3f}   {ratios[0]:.3f} to {ratios[-1]:.3f}{target}', flush=True)


def main(args, folder, out):
    check_elements(args, FILES)
    device = Device(folder, args.elements * (DEVICE_BYTES if args.redo else 32) + (2 << 30), args.limit)
    store = Store(device, folder, args.elements, FILES)
    turns, rows, began = Turns(store, args.before), [], time.monotonic()
    print(f'bench-step, {turns.programs[BEFORE]} before and {turns.programs[NOW]} now: {args.elements / 1e6:.0f} million parameters, AdamW, '
          f'{args.runs} runs, device limited to {args.limit / MIB:.0f} MiB/s each way', flush=True)

    def said(text):
        print(f'  {time.monotonic() - began:5.0f} s  {text}', flush=True)

    if args.redo:
        replays(turns, args, folder, said, rows)
    else:
        steps(turns, args, said, rows)
    out.write_text(''.join(json.dumps(r) + '\n' for r in rows))
    print(f'  rates of this build over those before; all figures: {out}')
