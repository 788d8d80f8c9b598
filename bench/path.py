#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Reading and writing whole tensors through the mount: hitrain beside the device, XFS, tmpfs and a minimal daemon.

Run it with `make bench-path`, as root. Loop devices are limited to one speed each way, and fio measures it. "Cold"
bytes come from the device or go there, "hot" bytes are in DRAM. Sides that are compared take turns, and ratios are
medians of the ratios of neighbouring runs. Results: tables, all figures in path.jsonl beside bench-meta's, and a plot
of throughput against the size of tensors in path.svg.
"""
import argparse
import json
import os
import time

import path_passthrough
import path_report
from common import BUILD, begin, machine
from path_report import rate
from path_sides import GIB, MIB, Devices, Hitrain, Minimal, Raw, Tmpfs, Xfs, make_tensors, processor_s

KIB = 1 << 10
COLD_DRAM, HOT_DRAM = '64M', '2G'
RANDOM_OPS = 300
IDLE_S = 12  # more than two commit timers
MANY = 100000
PASSTHROUGH = 'passthrough', 'prefetch', 'step'
SWAPPED_LAPS = 3
CLIENTS_MEMORY = 128 * MIB


class Set:
    """files tensors of so many bytes, in a folder of their own."""

    def __init__(self, name, size, total):
        self.name, self.bytes, self.files = name, size, max(1, total // size)
        self.folder = 's' + name.replace(' ', '')

    def words(self):
        return {'bytes': self.bytes, 'files': self.files}

    def laps(self, least, at_least=1):
        """So many that at least so many bytes are moved: a run of a tenth of a second is noise."""
        return max(at_least, least // (self.bytes * self.files))


SETS = [Set('64 KiB', 64 * KIB, 64 * MIB), Set('1 MiB', MIB, 256 * MIB), Set('8 MiB', 8 * MIB, 256 * MIB),
        Set('64 MiB', 64 * MIB, 256 * MIB), Set('1 GiB', GIB, GIB)]
EIGHT, COUNTED = SETS[2:4]
HOT_SETS = [s for s in SETS if s.name != '64 MiB']
ONE = Set('256 MiB', 256 * MIB, 256 * MIB)
SWAPPED = Set('swapped', 8 * MIB, 512 * MIB)
SCRATCH = Set('scratch', 8 * MIB, 512 * MIB)
SWAPPED_DRAM = '342M'


class Bench:
    def __init__(self, args, folder):
        self.args, self.rows, self.began = args, [], time.monotonic()
        sizes = {'raw': 1 * GIB, 'xfs': 3 * GIB, 'hitrain': 8 * GIB}
        self.devices = Devices(folder, sizes, args.limit)
        self.raw = Raw(self.devices, folder / 'raw')
        self.xfs = Xfs(self.devices, folder / 'xfs')
        self.tmpfs = Tmpfs(self.devices, folder / 'tmpfs')
        self.hitrain = Hitrain(self.devices, folder / 'hitrain')
        self.xfs.format()
        self.tmpfs.format(3 * GIB)
        self.cold_minimal = Minimal(self.devices, folder / 'minimal-xfs', self.xfs)
        self.hot_minimal = Minimal(self.devices, folder / 'minimal-tmpfs', self.tmpfs)
        self.hitrain.format()
        self.hitrain.mount(COLD_DRAM)
        os.setxattr(self.hitrain.point, 'user.hitrain.dtype', b'f32')
        make_tensors(self.xfs, [*SETS, SWAPPED])
        make_tensors(self.tmpfs, [*SETS, ONE])
        make_tensors(self.hitrain, [*SETS, ONE, SWAPPED])
        (self.hitrain.point / SCRATCH.folder).mkdir()
        os.setxattr(self.hitrain.point / SCRATCH.folder, 'user.hitrain.class', b'scratch')
        path_passthrough.make(self.hitrain, SETS)
        self.has_passthrough = path_passthrough.possible(self.hitrain)

    def said(self, text):
        print(f'  {time.monotonic() - self.began:5.0f} s  {text}', flush=True)

    def add(self, run, part, cell, side, record):
        self.rows.append({'run': run, 'part': part, 'cell': cell, 'side': side, **record})

    def take_turns(self, run, part, cell, sides, measure):
        for side in sides if run % 2 == 0 else sides[::-1]:
            self.add(run, part, cell, side.name, measure(side))

    # ------------------------------------------------------------------ cold

    def cold_cells(self):
        """(name, way, options, set, sides): the cells that the device bounds."""
        for s in SETS:
            for way in 'read', 'write':
                yield f'{way} O_DIRECT {s.name}', way, {'direct': 1}, s, [self.raw, self.xfs, self.cold_minimal, self.hitrain]
            yield f'read buffered {s.name}', 'read', {'direct': 0}, s, [self.raw, self.cold_minimal, self.hitrain]
            # For XFS the kernel's own threads write, which no limit holds: only the device is beside it.
            yield f'write buffered {s.name}', 'write', {'direct': 0}, s, [self.raw, self.hitrain]
        for s in SETS[1:3]:
            for way in 'read', 'write':
                yield (f'{way} shuffled {s.name}', way, {'direct': 1, 'shuffle': 7}, s,
                       [self.raw, self.cold_minimal, self.hitrain])

    def cold(self, run):
        for name, way, options, s, sides in self.cold_cells():
            def measure(side):
                self.devices.slow(False)
                if side is self.hitrain:
                    side.remount(COLD_DRAM)
                else:
                    side.make_cold()
                self.devices.slow(True)
                return side.measure(way, s.folder, sync=way == 'write', **s.words(), **options)
            self.take_turns(run, 'cold', name, sides, measure)
        self.devices.slow(False)

    # ------------------------------------------------------------------- hot

    def hot_cells(self):
        for s in HOT_SETS:
            yield f'read O_DIRECT {s.name}', 'read', {'direct': 1}, s
            yield f'read buffered {s.name}', 'read', {'direct': 0}, s
            yield f'write O_DIRECT {s.name}', 'write', {'direct': 1}, s
            yield f'write buffered {s.name}', 'write', {'direct': 0}, s

    def hot(self, run):
        self.hitrain.remount(HOT_DRAM, touched=True)
        for name, way, options, s in self.hot_cells():
            def measure(side):
                side.measure(way, s.folder, **s.words(), **options)
                return side.measure(way, s.folder, **s.words(), **options, laps=s.laps(GIB // 2, 3))
            self.take_turns(run, 'hot', name, [self.tmpfs, self.hot_minimal, self.hitrain], measure)
            self.hitrain.commit()
        self.add(run, 'hot', 'memcpy', 'memory', self.tmpfs.measure('copy', ONE.folder, bytes=GIB))

    # ----------------------------------------------------------- other lines

    def swapping(self, run):
        """hitrain also with class=scratch: no run resumes from swapped tensors."""
        def measure(side, swapped):
            words = {**swapped.words(), 'skew': 1024}
            self.devices.slow(False)
            if side is self.hitrain:
                side.remount(SWAPPED_DRAM)
                side.client('make', swapped.folder, **words)
                for _ in range(SWAPPED_LAPS):
                    side.client('step', swapped.folder, **words)
            self.devices.slow(True)
            before = self.devices.counters(side.name)
            result = side.measure('step', swapped.folder, **words, laps=SWAPPED_LAPS)
            after = self.devices.counters(side.name)
            return {**result, 'device_read': after[0] - before[0], 'device_written': after[1] - before[1]}
        for cell, swapped in ('durable', SWAPPED), ('class=scratch', SCRATCH):
            self.take_turns(run, 'swapping', cell, [self.xfs, self.hitrain],
                            lambda side, s=swapped: measure(side, s if side is self.hitrain else SWAPPED))
        self.devices.slow(False)

    def concurrency(self, run):
        for kind, way, dram in (('cold read', 'read', COLD_DRAM), ('cold write', 'write', COLD_DRAM), ('hot read', 'read', HOT_DRAM)):
            for one in 1, 0:
                s = ONE if one else EIGHT
                for clients in 1, 4, 16:
                    # The same memory for one as for all: with less, more would stay in the processor's cache.
                    words = {**s.words(), 'one': one, 'clients': clients, 'memory': CLIENTS_MEMORY}
                    self.devices.slow(False)
                    self.hitrain.remount(dram)
                    if dram == HOT_DRAM:  # threads and buffers for so many, too
                        self.hitrain.measure('read', s.folder, **words)
                        words['laps'] = s.laps(4 * GIB)
                    self.devices.slow(dram == COLD_DRAM)
                    record = self.hitrain.measure(way, s.folder, sync=way == 'write', **words)
                    self.add(run, 'clients', f'{kind}, {"one file" if one else "many files"}', str(clients), record)
        self.devices.slow(False)

    def small_beside_stream(self, run):
        """Without the limit, which lets a tenth of a second's bytes pass at once and then none."""
        self.devices.slow(False)
        half = int(rate(self.raw.measure('read', '', **EIGHT.words())) / 2)
        words = {'bytes': GIB, 'ops': RANDOM_OPS, 'shuffle': run + 1}
        for busy in False, True:
            self.hitrain.remount(COLD_DRAM)
            stream = busy and self.hitrain.begin('read', ONE.folder, **ONE.words(), one=1, rate=half, laps=1000)
            self.add(run, 'small', '4 KiB', 'busy' if busy else 'idle', self.hitrain.measure('random', SETS[-1].folder, **words))
            if stream:
                stream.kill()
                stream.wait()

    def idle(self):
        self.hitrain.remount(HOT_DRAM)
        self.hitrain.measure('write', EIGHT.folder, **EIGHT.words())
        self.hitrain.commit()
        time.sleep(1)
        before = processor_s(self.hitrain.daemon.pid)
        time.sleep(IDLE_S)
        self.add(0, 'idle', f'{IDLE_S} s', 'hitrain', {'cpu_s': processor_s(self.hitrain.daemon.pid) - before})

    def count_calls(self, cell, side, way, folder, **options):
        count, names = side.system_calls(way, folder, **COUNTED.words(), **options)
        self.add(0, 'calls', cell, side.name, {'per_gib': count, 'names': names})

    def calls(self):
        for heat, dram, minimal in ('cold', COLD_DRAM, self.cold_minimal), ('hot', HOT_DRAM, self.hot_minimal):
            self.hitrain.remount(dram)
            for way in 'read', 'write':
                for direct in 1, 0:
                    for side in self.hitrain, minimal:
                        if heat == 'cold':
                            side.make_cold()
                        else:
                            side.measure(way, COUNTED.folder, **COUNTED.words(), direct=direct)
                        self.count_calls(f'{heat} {way} {"O_DIRECT" if direct else "buffered"}', side, way, COUNTED.folder,
                                         direct=direct)
        if self.has_passthrough:
            path_passthrough.calls(self, COUNTED)

    def many(self):
        """The same with as many tensors in the store as there are, and with MANY more."""
        cells = [('cold read 8 MiB', 'read', EIGHT, COLD_DRAM), ('cold write 8 MiB', 'write', EIGHT, COLD_DRAM),
                 ('hot read 64 KiB', 'read', SETS[0], HOT_DRAM)]
        for label in 'few', 'many':
            if label == 'many':
                self.hitrain.remount(HOT_DRAM)
                (self.hitrain.point / 'many').mkdir()
                self.hitrain.client('make', 'many', bytes=4 * KIB, files=MANY, clients=4, direct=0, sync=self.hitrain.point)
            for _ in range(self.args.runs):
                for name, way, s, dram in cells:
                    self.devices.slow(False)
                    self.hitrain.remount(dram)
                    if dram == HOT_DRAM:
                        self.hitrain.measure(way, s.folder, **s.words())
                    self.devices.slow(dram == COLD_DRAM)
                    laps = s.laps(2 * GIB) if dram == HOT_DRAM else 1
                    self.add(0, 'tensors', name, label,
                             self.hitrain.measure(way, s.folder, sync=way == 'write', **s.words(), laps=laps))
        self.devices.slow(False)

    # ------------------------------------------------------------------- all

    def run(self):
        def wanted(part):
            return (not self.args.only or part in self.args.only.split(',')) and \
                (self.has_passthrough or part not in PASSTHROUGH)
        if not self.has_passthrough:
            self.said(f'no passthrough here (Linux 6.9): without {", ".join(PASSTHROUGH)}')
        repeated = {'cold': self.cold, 'hot': self.hot, 'swapping': self.swapping, 'clients': self.concurrency,
                    'small': self.small_beside_stream,
                    'passthrough': lambda n: path_passthrough.reading(self, SETS, n),
                    'prefetch': lambda n: path_passthrough.prefetching(self, SETS, n)}
        for run in range(self.args.runs):
            for part, measure in repeated.items():
                if wanted(part):
                    measure(run)
                    self.said(f'run {run + 1} of {self.args.runs}: {part}')
        once = {'step': lambda: path_passthrough.stepping(self, SETS), 'idle': self.idle, 'calls': self.calls,
                'tensors': self.many}
        for part, measure in once.items():
            if wanted(part):
                measure()
                self.said(part)


def parse_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--runs', type=int, default=3)
    p.add_argument('--limit', type=int, default=300 * MIB, help='bytes per second each way')
    p.add_argument('--only', default='', help='some of cold,hot,swapping,clients,small,passthrough,prefetch,step,idle,calls,tensors')
    return p.parse_args()


def main():
    args = parse_args()
    out = BUILD / 'bench/path.jsonl'
    folder = begin('path')
    print(f'bench-path: {args.runs} runs, devices limited to {args.limit / MIB:.0f} MiB/s each way\n  on {machine()}', flush=True)
    bench = Bench(args, folder)
    bench.said('devices, file systems and tensors are made')
    bench.run()
    rows = path_report.tell(bench.rows, args.limit)
    of = {'machine': machine(), 'runs': args.runs, 'limit': args.limit}
    out.write_text(''.join(json.dumps(r) + '\n' for r in [of, *bench.rows, *rows]))
    path_report.draw(bench.rows, {s.name: s.bytes for s in SETS}, out.with_suffix('.svg'))
    print(f'  all figures: {out}; plot: {out.with_suffix(".svg")}')


if __name__ == '__main__':
    main()
