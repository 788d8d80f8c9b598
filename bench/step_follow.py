# SPDX-License-Identifier: Apache-2.0
"""A second store that follows the logged steps of the first: `archive ROOT - --follow | restore - DIR --follow`, beside what bounds it.

step_redo.py runs it. Both stores lie on devices of the same limited speed, and have everything resident. The copy gets steps that
the model has logged, so the sender never waits for the model. Two bounds are measured in the same run: the steps of the copy
alone, with gradients from the memory of their writer; and the stream alone, whose reader throws it away. The row "as fast a pipe"
limits the pipe to the rate of the copy's own steps, so that both bounds are alike and nothing may wait for anything.
"""
import json
import os
import shutil
import statistics
import subprocess
import time

from common import PROGRAMS, give_up, run
from step import FILES, KEPT_SHARE, MIB, SETUP_SECONDS_MAX, Device, Store

STEPS = 9                    # the first one only begins the time of the others
CONTENT_BYTES = 12
DEVICE_BYTES = 120           # of a parameter: content, the kept step, the next rewrite, readable steps, and the room for logged ones
WORDS = 'adamw lr=1e-3 durable_every=16 redo=on redo_keep=32'
FOLLOW_MIN = 0.9             # of the rate of the copy's own steps, or of the pipe
CTL = PROGRAMS / 'hitrainctl'
FREE, LIMITED = 'a free pipe', 'as fast a pipe'


class Pair:
    def __init__(self, args, folder):
        self.args, self.stores = args, []
        self.said = open(folder / 'sender.txt', 'w+')
        for name in 'model', 'copy':
            (folder / name).mkdir(exist_ok=True)
            device = Device(folder / name, args.elements * DEVICE_BYTES + (2 << 30), args.limit, f'hitrain-bench-{name}')
            self.stores.append(Store(device, folder / name, args.elements, FILES))
        self.model, self.copy = self.stores

    def start(self, store):
        store.start(int((CONTENT_BYTES + store.element_bytes) * self.args.elements / KEPT_SHARE), WORDS)

    def slow(self, on):
        for store in self.stores:
            store.device.slow(on)

    def log_steps(self, dtype, element_bytes):
        """A model with a kept step `base` and so many logged steps after it; an empty store for the copy."""
        self.model.format(dtype, element_bytes)
        self.copy.element_bytes = element_bytes
        run(PROGRAMS / 'mkfs.hitrain', '--force', '--no-discard', *self.copy.devices)
        self.start(self.model)
        (self.model.point / 'model/.hitrain/ctl').write_text('snapshot base\n')
        for number in range(STEPS):
            self.model.step(number + 2)
        self.start(self.copy)

    def stop(self):
        for store in self.stores:
            store.stop()

    def receive_base(self):
        self.slow(False)
        shutil.rmtree(self.copy.point / 'model', ignore_errors=True)
        with subprocess.Popen([CTL, 'archive', self.model.point / 'model', 'base', '-'], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL) as sender:
            subprocess.run([CTL, 'restore', '-', self.copy.point / 'model'], stdin=sender.stdout, stderr=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL, timeout=SETUP_SECONDS_MAX, check=True)
        os.setxattr(self.copy.point / 'model', 'user.hitrain.optimizer', WORDS.encode())
        with open(self.copy.point / 'model/.hitrain/ctl', 'r+b', buffering=0) as ctl:
            ctl.write(b'commit full\n')
        self.slow(True)

    def sender(self, rate):
        limit = [f'--rate={rate}'] if rate else []
        return subprocess.Popen([CTL, 'archive', self.model.point / 'model', '-', '--follow', '--from=base', '--once', *limit],
                                stdout=subprocess.PIPE, stderr=self.said)

    def pipe(self, rate):
        """Seconds that the stream takes for a step."""
        self.slow(True)
        began = None
        with self.sender(rate) as sender:
            while sender.stdout.read1(MIB):
                began = began or time.monotonic()
        if not began or sender.returncode:
            self.said.seek(0)
            give_up(self.said.read())
        return (time.monotonic() - began) / STEPS

    def follow(self, rate):
        """Seconds from step to step of the copy."""
        self.receive_base()
        with self.sender(rate) as sender, subprocess.Popen(
                [CTL, 'restore', '-', self.copy.point / 'model', '--follow', '--json'], stdin=sender.stdout,
                stdout=subprocess.PIPE, text=True) as receiver:
            sender.stdout.close()
            times = {json.loads(line)['step']: time.monotonic() for line in receiver.stdout}
        assert len(times) == STEPS and receiver.returncode == 0, f'{len(times)} of {STEPS} steps came'
        return (max(times.values()) - min(times.values())) / (STEPS - 1)

    def own(self):
        """Seconds of a step of the copy that gets its gradients from its own machine."""
        self.receive_base()
        self.copy.step(2)
        began = time.monotonic()
        for number in range(STEPS - 1):
            self.copy.step(number + 3)
        return (time.monotonic() - began) / (STEPS - 1)

    def measure(self, said):
        rows, own = [], self.own()
        for what in FREE, LIMITED:
            rate = int(self.args.elements * self.copy.element_bytes / own) if what == LIMITED else 0
            rows.append({'what': what, 'own_s': own, 'pipe_s': self.pipe(rate), 'step_s': self.follow(rate)})
            said(f'followed through {what}: {rows[-1]["step_s"]:.2f} s, own {own:.2f} s, stream {rows[-1]["pipe_s"]:.2f} s')
        return rows


def run_all(bench, folder):
    pair = Pair(bench.args, folder)
    for dtype, element_bytes in ('f32', 4), ('bf16', 2):
        pair.log_steps(dtype, element_bytes)
        rows = [row for _ in range(bench.args.runs) for row in pair.measure(bench.said)]
        for what in FREE, LIMITED:
            found = [r for r in rows if r['what'] == what]
            for key, name in ('own_s', 'a step of the copy alone'), ('pipe_s', 'a step of the stream alone'):
                bench.figure(dtype, f'{name}, {what}', statistics.median(r[key] for r in found), 's')
            bench.figure(dtype, f'a copy that follows through {what}: of the slower one',
                         statistics.median(max(r['own_s'], r['pipe_s']) / r['step_s'] for r in found), '', FOLLOW_MIN, most=False)
        pair.stop()
