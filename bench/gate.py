#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""How long a cold read waits beside scrub and writeback, and how much of the device these use.

Run it with `make bench-gate`, as root. A loop device is limited to one speed each way. A program reads 4 KiB at random
places of cold tensors, after pauses that vary around a mean. So each read brings one chunk of 1 MiB. It does so alone,
and beside a scrub and a program that writes as fast as it can; runs of both kinds take turns.

"left" is what the reads leave: the bytes that scrub moves without them in the same time, less theirs. Figures are
medians over runs.

The device is a loop device on a file of steady_device.c, which serves the requests of a direction one after the other.
With --device=limited it is one on an ordinary file, and a cgroup limits it. That limit lets requests pass in portions,
and so delays reads itself. On both fio reads 1 MiB after the same pauses from the bare device, alone and beside a second
fio that keeps one request of 1 MiB in flight. No gate is there.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time

from common import BUILD, PROGRAMS, SteadyDevice, begin, machine, run
from path_sides import MIB, Devices, Hitrain

TENSOR, TENSORS = 64 * MIB, 12
WRITTEN = 256 * MIB
DRAM, SCRUB_RATE = '64M', '4G'
LIMIT = 300 * MIB


class SteadyDevices(Devices):
    """One device that has its speed by itself. Members of its group are not limited."""

    def __init__(self, folder, sizes, limit):  # pylint: disable=super-init-not-called
        (name, size), = sizes.items()
        self.device = SteadyDevice(folder, size, limit)
        self.group, self.paths, self.slow = self.device.group, {name: self.device.path}, self.device.slow


class Store(Hitrain):
    options = f',scrub_rate={SCRUB_RATE}'

    def words(self):
        text = run(PROGRAMS / 'hitrainctl', 'device', '--json', self.point)
        return json.loads(text)['devices'][0]


class Scrub:
    """Scrubs again and again, until it is stopped."""

    def __init__(self, store):
        self.store, self.stopped = store, False
        self.thread = threading.Thread(target=self.repeat)
        self.thread.start()

    def repeat(self):
        while not self.stopped:
            subprocess.run([PROGRAMS / 'hitrainctl', 'scrub', 'start', self.store.point], check=False,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(0.05)

    def stop(self):
        self.stopped = True
        self.thread.join()
        subprocess.run([PROGRAMS / 'hitrainctl', 'scrub', 'stop', self.store.point], check=False,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


READER = """
import mmap, os, random, sys, time
folder, seconds, pause, size, count, seed = sys.argv[1], *map(float, sys.argv[2:])
chance = random.Random(seed)
fds = [os.open(f'{folder}/{i}', os.O_RDONLY | os.O_DIRECT) for i in range(int(count))]
buf = mmap.mmap(-1, 4096)
end = time.monotonic() + seconds
while time.monotonic() < end:
    time.sleep(chance.uniform(0.5, 1.5) * pause)
    fd, at = chance.choice(fds), chance.randrange(int(size) // 4096) * 4096
    began = time.monotonic()
    assert os.preadv(fd, [buf], at) == 4096
    print(time.monotonic() - began)
"""

WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
block = os.urandom(1 << 20)
while True:
    for at in range(0, int(sys.argv[2]), len(block)):
        os.pwrite(fd, block, at)
"""


def fio(*words):
    return ['fio', '--thread', '--direct=1', '--ioengine=io_uring', '--bs=1M', '--iodepth=1', '--time_based', '--output-format=json', *words]


def fio_p99(devices, seconds, pause, beside):
    """Seconds of a read."""
    name = f'--filename={devices.paths["hitrain"]}'
    other = None
    if beside:
        other = subprocess.Popen(fio('--name=beside', name, '--rw=read', f'--runtime={round(seconds) + 60}'), stdout=subprocess.DEVNULL,
                                 preexec_fn=devices.group.enter)
        time.sleep(2)
    try:
        told = devices.run(*fio('--name=read', name, '--rw=randread', f'--thinktime={round(pause * 1e6)}', f'--runtime={round(seconds)}'))
    finally:
        if other:
            other.kill()
            other.wait()
    return json.loads(told)['jobs'][0]['read']['clat_ns']['percentile']['99.000000'] / 1e9


class Bench:
    def __init__(self, args, folder):
        self.args = args
        kind = SteadyDevices if args.device == 'steady' else Devices
        self.devices = kind(folder, {'hitrain': 4096 * MIB}, args.limit)
        self.store = Store(self.devices, folder / 'hitrain')
        self.store.format()
        self.store.mount('1G')
        os.mkdir(self.store.point / 't')
        os.setxattr(self.store.point / 't', 'user.hitrain.dtype', b'u8')
        for i in range(TENSORS):
            with open(self.store.point / f't/{i}', 'wb') as f:
                f.write(os.urandom(TENSOR))
        self.store.commit()
        self.store.remount(DRAM)

    def without_gate(self):
        """fio's read beside another, over the read alone. The store is not mounted."""
        self.devices.slow(True)
        alone, beside = (fio_p99(self.devices, self.args.seconds, self.args.pause, way) for way in (False, True))
        self.devices.slow(False)
        return alone, beside

    def start(self, *args):
        return subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    def measure(self, run_number, reads, others):
        """One run: seconds of each read, and bytes that the device read and wrote."""
        a, writer, scrub = self.args, None, None
        self.devices.slow(True)
        if others and a.beside != 'write':
            scrub = Scrub(self.store)
        if others and a.beside != 'scrub':
            writer = self.start(sys.executable, '-c', WRITER, str(self.store.point / 't/written'), str(WRITTEN))
        time.sleep(2)
        before = self.devices.counters('hitrain')
        began = time.monotonic()
        times = []
        if reads:
            reader = self.start(sys.executable, '-c', READER, str(self.store.point / 't'), str(a.seconds), str(a.pause),
                                str(TENSOR), str(TENSORS), str(run_number))
            times = [float(line) for line in reader.communicate()[0].split()]
        else:
            time.sleep(a.seconds)
        seconds = time.monotonic() - began
        after = self.devices.counters('hitrain')
        if writer:
            writer.kill()
            writer.wait()
        if scrub:
            scrub.stop()
        self.store.commit()
        self.devices.slow(False)
        return {'times': sorted(times), 'read': (after[0] - before[0]) / seconds, 'seconds': seconds,
                'written': (after[1] - before[1]) / seconds}


def percentile(times, share):
    return times[min(len(times) - 1, int(len(times) * share))]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--runs', type=int, default=3)
    p.add_argument('--seconds', type=float, default=15)
    p.add_argument('--pause', type=float, default=0.05, help='mean seconds between reads')
    p.add_argument('--limit', type=int, default=LIMIT)
    p.add_argument('--device', choices=('steady', 'limited'), default='steady')
    p.add_argument('--beside', choices=('scrub', 'write', 'both'), default='both')
    args = p.parse_args()
    pathlib.Path(BUILD / 'bench').mkdir(exist_ok=True)
    bench = Bench(args, begin('gate'))
    print(f'{machine()}; a {args.device} device of {args.limit // MIB} MiB/s each way')
    rows = []
    for i in range(args.runs):
        alone, both, others = (bench.measure(i, *kinds) for kinds in ((True, False), (True, True), (False, True)))
        urgent = len(both['times']) * MIB / both['seconds']
        rows.append({
            'alone p50': percentile(alone['times'], 0.5) * 1e3, 'alone p99': percentile(alone['times'], 0.99) * 1e3,
            'beside p50': percentile(both['times'], 0.5) * 1e3, 'beside p99': percentile(both['times'], 0.99) * 1e3,
            'p99 ratio': percentile(both['times'], 0.99) / percentile(alone['times'], 0.99),
            'scrub MiB/s': (both['read'] - urgent) / MIB, 'scrub of left': (both['read'] - urgent) / max(others['read'] - urgent, 1),
            'written MiB/s': both['written'] / MIB, 'written of left': both['written'] / max(others['written'], 1)})
        print(f'run {i}: ' + ', '.join(f'{k} {v:.2f}' for k, v in rows[-1].items()), flush=True)
    print('median: ' + ', '.join(f'{k} {statistics.median(r[k] for r in rows):.2f}' for k in rows[0]))
    print(f'the gate: {json.dumps({k: v for k, v in bench.store.words().items() if "wait" in k})}')
    bench.store.unmount()
    alone, beside = bench.without_gate()
    print(f'fio, no gate: alone p99 {alone * 1e3:.2f}, beside another p99 {beside * 1e3:.2f}, ratio {beside / alone:.2f}')


if __name__ == '__main__':
    main()
