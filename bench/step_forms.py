# SPDX-License-Identifier: Apache-2.0
"""Durable steps with state in 32, 16 and 8 bits, and of Muon, on the same device by turns.

step.py runs it with --forms (`make bench-step FORMS=1`). Each side has a new store of the same f32 parameters, and every step is durable, so
each writes all of its content. Nothing is resident, or half. After each measurement fio moves as many bytes each way as the device has
counted. Medians of the runs; a missed target is named, and ends the program with 1.

A step of Muon is that of a client that orthogonalises nothing: it gives back what update/ has, a few matrices later.
"""
import json
import os
import statistics
import sys
import time

from common import check_elements
from step import FILES, KEPT_SHARE, MIB, Device, Store, fio, per_step

STEPS = 3
LATER = 3  # matrices that wait between the phases
FIO_MIN = 0.95
PLAIN = 'AdamW, 32 bits'
# Words; bytes of a parameter and its state; the most time, of that of AdamW with 32 bits.
SIDES = {
    PLAIN: ('adamw lr=1e-3', 12, None),
    'AdamW, 16 bits': ('adamw lr=1e-3 state_bits=16', 8, 0.72),
    'AdamW, 8 bits': ('adamw lr=1e-3 state_bits=8', 6 + 2 * 4 / 256, 0.55),
    'Muon, 32 bits': ('muon lr=1e-3', 8, 0.70),
    'Muon, 8 bits': ('muon lr=1e-3 state_bits=8', 5 + 4 / 2048, 0.45),
}
PARTS = {'nothing': 0, 'half': 0.5}


class FormsStore(Store):
    words = ''

    def prepare_root(self, root):
        rows = 512
        for n in range(self.files):
            os.setxattr(root / f'p{n:02}', 'user.hitrain.shape', f'{rows},{self.elements // self.files // rows}'.encode())
        os.setxattr(root, 'user.hitrain.optimizer', self.words.encode())

    def gradient_written(self, n):
        if self.words.startswith('muon') and n >= LATER:
            self.orthogonalise(n - LATER)

    def gradients_written(self):
        for n in range(self.files - LATER, self.files) if self.words.startswith('muon') else ():
            self.orthogonalise(n)

    def orthogonalise(self, n):
        hidden = self.point / 'model/.hitrain'
        update = memoryview((hidden / f'update/p{n:02}').read_bytes())
        fd = os.open(hidden / f'ortho/p{n:02}', os.O_WRONLY)
        for at in range(0, len(update), MIB):
            os.pwrite(fd, update[at:at + MIB], at)
        os.close(fd)
        number = os.getxattr(self.point / 'model', 'user.hitrain.step_open').decode()
        self.command(f'apply ortho/p{n:02} if={number}')

    def measure_steps(self, side, resident):
        words, content, _ = SIDES[side]
        self.words = words
        self.format()
        self.start(max(int(resident * content * self.elements / KEPT_SHARE), 64 * MIB), words)
        self.step(1)
        self.device.slow(True)
        before, began = self.device.counters(), time.monotonic()
        for n in range(STEPS):
            self.step(n + 2)
        seconds = time.monotonic() - began
        moved = [(b - a) / STEPS for a, b in zip(before, self.device.counters())]
        self.stop()
        return {'seconds': seconds, 'steps': STEPS, 'read_bytes': moved[0], 'written_bytes': moved[1], 'fio_s': fio(self.device, *map(int, moved))}


def tell(rows, elements):
    """Returns the summary, and how many targets are missed."""
    print(f'\n  {"":32}{"bytes in":>10}{"out":>8}{"content":>9}{"s/step":>9}{"of fio":>8}{"of 32 bits":>12}')
    out, missed = [], 0
    for part in PARTS:
        plain = [per_step(r) for r in rows if (r['side'], r['resident']) == (PLAIN, part)]
        for side, (_, content, most) in SIDES.items():
            mine = [r for r in rows if (r['side'], r['resident']) == (side, part)]
            median = {
                'in': statistics.median(r['read_bytes'] / elements for r in mine),
                'out': statistics.median(r['written_bytes'] / elements for r in mine),
                'step_s': statistics.median(map(per_step, mine)),
                'of_fio': statistics.median(r['fio_s'] / per_step(r) for r in mine),
                'of_plain': statistics.median(per_step(r) / p for r, p in zip(mine, plain)),
            }
            faults = [f'at least {FIO_MIN} of fio'] * (median['of_fio'] < FIO_MIN)
            faults += [f'at most {most} of 32 bits'] * (most is not None and median['of_plain'] > most)
            missed += len(faults)
            out.append({'side': side, 'resident': part, **median, 'missed': faults})
            print(f'  {side + ", " + part + " resident":32}{median["in"]:10.2f}{median["out"]:8.2f}{content:9.3f}{median["step_s"]:9.3f}'
                  f'{median["of_fio"]:8.2f}{median["of_plain"]:12.3f}{"   MISSED: " if faults else ""}{", ".join(faults)}')
    print('\n  Bytes are per parameter and step, counted by the device. "of fio": the time that fio needs for as many, over that of a step.')
    return out, missed


def main(args, folder, out):
    check_elements(args, FILES)
    device = Device(folder, max(args.elements * 32, 2 << 30) + (1 << 30), args.limit)
    store, rows, began = FormsStore(device, folder, args.elements, FILES), [], time.monotonic()
    print(f'bench-step: {args.elements / 1e6:.0f} million f32 parameters, every step durable, {args.runs} runs, device limited to '
          f'{args.limit / MIB:.0f} MiB/s each way', flush=True)
    for run in range(args.runs):
        for part, resident in PARTS.items():
            for side in SIDES:
                rows.append({'run': run, 'side': side, 'resident': part, **store.measure_steps(side, resident)})
                print(f'  {time.monotonic() - began:5.0f} s  run {run + 1}: {side}, {part} resident: {per_step(rows[-1]):.2f} s', flush=True)
    summary, missed = tell(rows, args.elements)
    out.write_text(''.join(json.dumps(r) + '\n' for r in rows + summary))
    print(f'  all figures: {out}')
    sys.exit(f'{missed} targets missed' if missed else 0)
