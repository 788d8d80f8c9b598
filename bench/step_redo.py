# SPDX-License-Identifier: Apache-2.0
"""Steps that are durable by their gradients (redo=on), beside steps of which each 16th is durable, or each one.

step.py runs it with --redo (`make bench-step REDO=1`). AdamW on f32 and on bf16 parameters; everything resident, and half of
parameters and state. The trainer takes as long for its gradients as the device needs to write them, as a backward pass does. Then the
daemon is killed before a full step, and the steps that the next mount computes again are timed. With everything resident the first of
these also reads parameters and state, so the others count: an ordinary step has these in memory. The mount is timed beside one
without logged steps. At last a second store follows logged steps (step_follow.py).
"""
import json
import os
import re
import statistics
import time

from common import check_elements, wait_for
import step_follow
from reachable import logged_over_plain, replayed_at_most
from step import FILES, KEPT_SHARE, MIB, Device, Store

EVERY = 16
CONTENT_BYTES = 12           # of a parameter: itself, two moments, and the lower half of its master if it is bf16
BACKWARD = 1.1               # times the device's time for the gradients
TIME_MAX = {'all': 1.10, 'half': 1.05}  # of the time with durable_every=16 alone
LATENCY_MS_MAX = 20
REPLAY_MIN = 0.9             # of the rate of ordinary steps, or of the device that gives their gradients
REPLAY_SECONDS_MAX = 600

WORDS = {
    'every 16th durable': f'durable_every={EVERY}',
    'every step durable by its gradients': f'durable_every={EVERY} redo=on',
    'every step durable in full': 'durable_every=1',
}
PLAIN, LOGGED, FULL = WORDS


class Bench:
    def __init__(self, args, folder, store=None):
        self.args = args
        self.store = store or Store(
            Device(folder, args.elements * step_follow.DEVICE_BYTES + (2 << 30), args.limit), folder, args.elements, FILES)
        self.device = self.store.device
        self.rows, self.began, self.number = [], time.monotonic(), 1

    def said(self, text):
        print(f'  {time.monotonic() - self.began:5.0f} s  {text}', flush=True)

    def start(self, words, resident):
        """Memory for this part of parameters and state; for all gradients, too, where everything is resident."""
        kept = CONTENT_BYTES * resident + (self.store.element_bytes if resident == 1 else 0)
        self.store.start(max(int(kept * self.args.elements / KEPT_SHARE), 64 * MIB), f'adamw lr=1e-3 {words}')

    def steps(self, count, seconds=0.0):
        """Seconds of each boundary."""
        out = []
        for _ in range(count):
            self.number += 1
            out.append(self.store.step(self.number, seconds))
        return out

    def to_full_step(self):
        self.steps(EVERY - int(os.getxattr(self.store.point / 'model', 'user.hitrain.step')) % EVERY)

    def measure(self, what, resident):
        self.start(WORDS[what], resident)
        self.to_full_step()
        backward = BACKWARD * self.args.elements * self.store.element_bytes / self.args.limit
        self.device.slow(True)
        before, began = self.device.counters(), time.monotonic()
        boundaries = self.steps(EVERY, backward)
        seconds = time.monotonic() - began
        written = self.device.counters()[1] - before[1]
        self.store.stop()
        return {'step_s': seconds / EVERY, 'written': written / EVERY / self.args.elements,
                'boundary_s': statistics.median(boundaries[:-1]), 'backward_s': backward}

    def replay(self, resident):
        """
        ordinary_s: of a step without a backward pass; on the slow device, if a part of the content moves through it. warm_s: of one that
        a mount computes again, after the first two. replay_s: of all of these, by the daemon's clock. plain_s: a mount after the same
        crash, without logged steps; mount_s: with them.
        """
        self.start(WORDS[LOGGED], resident)
        self.steps(1)
        (self.store.point / 'model/.hitrain/ctl').write_text('commit full\n')
        self.store.daemon.kill()
        self.store.stop()
        plain = self.timed_mount(resident)
        self.device.slow(resident < 1)
        self.steps(1)
        began = time.monotonic()
        self.steps(EVERY - 2)
        ordinary = (time.monotonic() - began) / (EVERY - 2)
        self.store.daemon.kill()
        self.store.stop()
        began = time.monotonic()
        mount = self.timed_mount(resident)
        reached = {}  # seconds since the daemon was started, by how many steps are left
        wait_for(lambda: self.note_left(reached, began) == 0, 'computing logged steps again', 0.002, REPLAY_SECONDS_MAX)
        self.store.stop()
        warm = max((left for left in reached if left < EVERY - 2), default=0)
        seconds = float(re.search(r'computed again from their gradients.*\(([\d.]+) s\)', self.store.log.read_text())[1])
        return {'ordinary_s': ordinary, 'warm_s': (reached[0] - reached[warm]) / max(warm, 1), 'replay_s': seconds, 'mount_s': mount,
                'plain_s': plain}

    def timed_mount(self, resident):
        """On the slow device. Seconds until it returns."""
        self.device.slow(True)
        began = time.monotonic()
        self.start(WORDS[LOGGED], resident)
        return time.monotonic() - began

    def note_left(self, reached, began):
        left = self.left()
        reached.setdefault(left, time.monotonic() - began)
        return left

    def left(self):
        text = os.getxattr(self.store.point / 'model', 'user.hitrain.stats').decode()
        return int(dict(line.split('=', 1) for line in text.splitlines() if '=' in line)['replay_steps_left'])

    def figure(self, who, what, value, unit, target=None, most=True):
        row = {'who': who, 'what': what, 'value': value, 'unit': unit}
        text = f'  {who:20}{what:56}{value:9.3f} {unit:3}'
        if target is not None:
            row.update(target=target, met=value <= target if most else value >= target)
            text += f'  target: at {"most" if most else "least"} {target:g}{"" if row["met"] else "   MISSED"}'
        self.rows.append(row)
        print(text, flush=True)

    def compare(self, who, part, found):
        """found: rows of measure, one per run, by what they measure."""
        for what in WORDS:
            self.figure(who, f'{what}: a step', statistics.median(r['step_s'] for r in found[what]), 's')
        bytes_max = self.store.element_bytes + CONTENT_BYTES / EVERY
        self.figure(who, 'written for each parameter and step, by gradients',
                    statistics.median(r['written'] for r in found[LOGGED]), 'B', bytes_max * 1.02 if part == 'all' else None)
        ratio = statistics.median(a['step_s'] / b['step_s'] for a, b in zip(found[LOGGED], found[PLAIN]))
        self.figure(who, 'a step by its gradients over one of every 16th', ratio, '', TIME_MAX[part])
        if part == 'half':
            gradient = self.store.element_bytes
            bound = logged_over_plain(CONTENT_BYTES, gradient, 0.5, EVERY, BACKWARD * gradient)
            self.figure(who, 'the least that the bytes of both allow', bound, '')
            self.figure(who, 'written for each parameter and step, every 16th durable',
                        statistics.median(r['written'] for r in found[PLAIN]), 'B')
        late = statistics.median((a['boundary_s'] - b['boundary_s']) * 1000 for a, b in zip(found[LOGGED], found[PLAIN]))
        if part == 'all':
            self.figure(who, 'boundary by gradients, later than without', late, 'ms', LATENCY_MS_MAX)

    def run_all(self):
        for dtype, element_bytes in ('f32', 4), ('bf16', 2):
            self.store.format(dtype, element_bytes)
            for part, resident in ('all', 1), ('half', 0.5):
                found = {what: [] for what in WORDS}
                for number in range(self.args.runs):
                    for what, rows in found.items():
                        rows.append(self.measure(what, resident))
                        self.said(f'{dtype}, {part} resident, run {number + 1}: {what}: {rows[-1]["step_s"]:.2f} s')
                self.compare(f'{dtype}, {part} resident', part, found)
            self.tell_replay(dtype, element_bytes)

    def tell_replay(self, dtype, element_bytes):
        found = {part: [] for part in ('all', 'half')}
        for number in range(self.args.runs):
            for part, rows in found.items():
                rows.append(self.replay(1 if part == 'all' else 0.5))
                self.said(f'{dtype}, {part} resident, run {number + 1}: computed again in {rows[-1]["replay_s"]:.2f} s')
        elements = self.args.elements
        for part, rows in found.items():
            who = f'{dtype}, {part} resident'
            for r in rows:
                r['least_s'] = max(r['ordinary_s'], elements * element_bytes / self.args.limit)
            all_of_it = statistics.median(r['least_s'] * (EVERY - 1) / r['replay_s'] for r in rows)
            if part == 'half':
                self.figure(who, 'steps again at a mount: their rate, of ordinary ones', all_of_it, '', REPLAY_MIN, most=False)
                continue
            self.figure(who, 'a step again at a mount: its rate, of the least time', statistics.median(
                r['least_s'] / r['warm_s'] for r in rows), '', REPLAY_MIN, most=False)
            self.figure(who, 'the same, with the first reading of state', all_of_it, '')
            self.figure(who, 'the most that these bytes allow', statistics.median(replayed_at_most(
                CONTENT_BYTES * elements, element_bytes * elements, EVERY - 1, r['least_s'], self.args.limit) for r in rows), '')
            self.figure(who, 'a mount with logged steps, until it returns', statistics.median(r['mount_s'] for r in rows), 's')
            self.figure(who, 'the same over one without logged steps', statistics.median(r['mount_s'] / r['plain_s'] for r in rows), '')


def main(args, folder, out):
    check_elements(args, FILES)
    bench = Bench(args, folder)
    print(f'bench-step, logged steps: {args.elements / 1e6:.0f} million parameters, AdamW, {args.runs} runs, device limited to '
          f'{args.limit / MIB:.0f} MiB/s each way', flush=True)
    if not args.follow:
        bench.run_all()
        bench.store.stop()
    step_follow.run_all(bench, folder)
    out.write_text(''.join(json.dumps(r) + '\n' for r in bench.rows))
    print(f'  all figures: {out}')
