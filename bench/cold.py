#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What cold models and slow devices cost: reads from a vault, and steps on and beside a slow device.

Run it with `make bench-cold`, as root; ONLY= takes some of the parts. Devices are of memory, with a speed of their own; slow ones and
that of the vault have a latency, too (steady_device.c). So no disk of this machine is in the figures. They take processor time. The part
paths needs that, so its fast device is a file that a cgroup limits. DEVICE=steady or limited takes one kind in all parts. Sides that are compared
take turns, and figures are medians over runs. All of them go to cold.jsonl. Missed targets are named at the end.

vault   a cold model: first reads of parameters and of state beside `get` of whole segments, the second one beside that of a local model;
        the log of `restore --cold`, and its time beside a restore of a larger model; refusals when the program of the vault stands still
beside  a model that fits the fast device, and commits of a small one: alone, beside a slow device, and beside a silent one
paths   `paths=all`, larger than memory, beside the sum of both rates; then the slow device becomes ten times slower
state   a model four times as large as the fast device: bytes of a step beside the least
many    a store of cold chunks without content, by their number: time and memory of a mount and of `hitrain-fsck --no-data`
"""
import argparse
import concurrent.futures
import contextlib
import itertools
import json
import mmap
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import recovery
from common import BUILD, PROGRAMS, SteadyDevice, Table, begin, check_elements, give_up, machine, parts_of, run, wait_for
from step import FILES, MIB, SETUP_SECONDS_MAX, Device, Store
from step_devices import BYTES, DRAM, timed_steps
from vault import CTL, Vault, contents, seconds_of, write_file

sys.path.insert(0, str(BUILD / 'share/hitrain/vault'))    # which has a client, too
import engine  # noqa: E402  pylint: disable=wrong-import-position

READ_MIN, SECOND_MIN, RESTORE_MAX = 0.9, 0.95, 0.05
CHUNK_RECORD_BYTES, RECORD_MAX = 60, 1.1
REFUSAL_MAX_MS, REFUSALS, SILENT_S = 10, 20, 3
BESIDE_MIN, SUM_MIN, SLOWED_MIN, LEAST_MAX = 0.98, 0.95, 0.9, 1.05
LINEAR_MAX, AIM = 1.25, 10**8
FOUND_STEPS, SLOW_STEPS = 2, 5     # in which weights are found; after the slow-down
COMMITS = 30
LARGE = 2                          # files of the cold model
GETS = 4                           # of whole segments at once
CAPACITY_TIMEOUT_S = 2
TIMES_FAST = 4


def fast_device(folder, size, args, usual='steady'):
    if (args.device or usual) == 'steady':
        return SteadyDevice(folder, size, args.limit)
    return Device(folder, size, args.limit, f'hitrain-{folder.parent.name}-{folder.name}')


class Devices:
    """A fast and a slow one; what step.Store needs of a device."""

    def __init__(self, folder, args, name, fast_bytes, slow_bytes, usual='steady'):
        (folder / name).mkdir()
        self.fast = fast_device(folder / name / 'fast', fast_bytes, args, usual)
        self.slow_one = SteadyDevice(folder / name / 'slow', slow_bytes, args.slow_limit, args.latency_us)
        self.group = self.fast.group

    def slow(self, on):
        self.fast.slow(on)
        self.slow_one.slow(on)

    def sum(self):
        return self.fast.limit + self.slow_one.limit

    def counters(self):
        """Bytes each way of each."""
        return (*self.fast.counters(), *self.slow_one.counters())


class Wide(Store):
    """A store of both classes. paths: word of its model."""

    def __init__(self, devices, folder, elements, files, paths='fast'):
        super().__init__(devices, folder, elements, files, [devices.fast.path, devices.slow_one.path])
        self.format_words = [devices.fast.path, f'--capacity={devices.slow_one.path}']
        self.paths = paths

    def prepare_root(self, root):
        super().prepare_root(root)
        os.setxattr(root, 'user.hitrain.paths', self.paths.encode())

    def slow_health(self):
        return json.loads(run(CTL, 'device', '--json', self.point))['devices'][1]['health']


def number(path, name):
    return int(os.getxattr(path, f'user.hitrain.{name}'))


def tell(root, line):
    with open(root / '.hitrain/ctl', 'r+b', buffering=0) as ctl:
        ctl.write(f'{line}\n'.encode())


class Bench(Table):
    def __init__(self, args, folder):
        super().__init__()
        self.args, self.folder = args, folder


# ---- a cold model ----

def read_direct(path, first=0, count=None):
    """Bytes read, past the kernel's cache."""
    done = 0
    with open(path, 'rb', buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_DIRECT)) as f, mmap.mmap(-1, MIB) as into:
        while (count is None or done < count) and (got := os.preadv(f.fileno(), [into], first + done)):
            done += got
    return done


def read_all(paths):
    return sum(map(read_direct, paths))


def whole_segments(url):
    """Bytes per second of `get`."""
    with engine.open(str(url), slots=GETS) as e:
        keys = [key for key, _, _ in e.list('seg/')]
        with concurrent.futures.ThreadPoolExecutor(GETS) as pool:
            began = time.monotonic()
            count = sum(pool.map(lambda key: len(e.get(key, lend=True)), keys))
            return count / (time.monotonic() - began)


class Cold:
    """A model of LARGE tensors and their momentum."""

    def __init__(self, b):
        self.b, self.chunks = b, b.args.cold_mib
        self.count, self.larger = self.chunks * MIB, b.args.restore_mib * MIB
        self.device = fast_device(b.folder / 'cold', self.count * 5 + self.larger * 4 + (1 << 30), b.args)
        self.store = Store(self.device, b.folder / 'cold', self.count // 4, LARGE)
        size = (self.count + self.larger) * 9 // 8 + 256 * MIB
        self.vault = Vault(b.folder, SteadyDevice(b.folder / 'vault', size, b.args.slow_limit, b.args.latency_us))
        self.root, self.cold, self.warm = (self.store.point / name for name in ('model', 'cold', 'warm'))
        self.url = f'{self.vault.url}/job'

    def start(self, *options):
        self.store.start(2 * self.count, options=options)
        self.slow(True)

    def slow(self, on):
        self.device.slow(on)
        self.vault.device.slow(on)

    def archive(self, count, url):
        """A step of a new model of so many bytes goes to the vault."""
        self.slow(False)
        self.root.mkdir()
        files = [self.root / f'p{n}' for n in range(LARGE)]
        for path in files:
            path.touch()
            os.setxattr(path, 'user.hitrain.dtype', b'f32')
            write_file(path, count // LARGE // 2)
        os.setxattr(self.root, 'user.hitrain.optimizer', b'sgd lr=1 momentum=0.9')
        for path in files:
            with open(self.root / f'.hitrain/state/{path.name}/momentum_buffer', 'r+b', buffering=0) as f:
                for _ in range(count // LARGE // 2 // MIB):
                    f.write(os.urandom(MIB))
        tell(self.root, 'commit')
        tell(self.root, 'snapshot first')
        self.vault.ctl('archive', self.root, 'first', url)
        tell(self.root, 'forget *')
        run('rm', '-r', self.root, seconds_max=SETUP_SECONDS_MAX)

    def prepare(self):
        """The first cold model also makes the store know the vault."""
        run(PROGRAMS / 'mkfs.hitrain', '--no-discard', self.device.path)
        self.store.start(2 * self.count)
        self.archive(self.count, self.url)
        self.vault.ctl('restore', self.url, self.cold, '--cold')
        self.store.stop()

    def restored(self, url, path, *words):
        """Seconds, and bytes of the log that it keeps."""
        self.vault.empty_cache()
        before = number(self.store.point, 'log_reserved_bytes')
        _, seconds = self.vault.ctl('restore', url, path, *words)
        return seconds, number(self.store.point, 'log_reserved_bytes') - before

    def once(self):
        """A row of figures."""
        self.start()
        self.vault.empty_cache()
        got = whole_segments(self.vault.url)
        run('rm', '-r', self.cold)
        self.slow(False)
        self.restored(self.url, self.warm)
        _, log = self.restored(self.url, self.cold, '--cold')
        self.store.stop()
        self.vault.empty_cache()
        self.start()
        cold, warm = (list(contents(root)) for root in (self.cold, self.warm))
        first = [self.count / 2 / seconds_of(lambda part=part: read_all(part)) for part in (cold[::2], cold[1::2])]
        read_all(warm)
        again = [self.count / min(seconds_of(lambda paths=paths: read_all(paths)) for _ in range(3)) for paths in (cold, warm)]
        self.b.said(f'get of segments {got / MIB:.1f} MiB/s, cold read of parameters {first[0] / MIB:.1f}, of state {first[1] / MIB:.1f}, '
                    f'second one {again[0] / MIB:.0f}, local {again[1] / MIB:.0f}')
        run('rm', '-r', self.warm, seconds_max=SETUP_SECONDS_MAX)
        self.store.stop()
        return first[0] / got, first[1] / got, again[0] / again[1], log / self.chunks / CHUNK_RECORD_BYTES

    def restores(self):
        """restore --cold of the larger model, of the time of a restore."""
        url = f'{self.vault.url}/larger'
        self.store.start(2 * self.count)
        self.archive(self.larger, url)
        self.slow(True)
        warm_s, _ = self.restored(url, self.warm)
        cold_s = statistics.median(self.restored(url, self.store.point / f'cold{n}', '--cold')[0] for n in range(self.b.args.runs))
        self.b.said(f'{self.larger / MIB:.0f} MiB: restore {warm_s:.2f} s, --cold {cold_s:.2f} s')
        self.store.stop()
        return cold_s / warm_s

    def program(self):
        """The number of the process that reads the vault for the daemon."""
        for status in pathlib.Path('/proc').glob('[0-9]*/status'):
            try:
                text, name = status.read_text(), status.with_name('cmdline').read_bytes()
            except OSError:
                continue
            if f'\nPPid:\t{self.store.daemon.pid}\n' in text and b'hitrain-vault-' in name:
                return int(status.parent.name)
        give_up('no program reads the vault')

    def refusals(self):
        """Milliseconds of each, when the first one has waited for its timeout."""
        self.start(f'vault_timeout={SILENT_S}')
        path, took = self.cold / 'p0', []
        read_direct(path, count=MIB)
        os.kill(self.program(), signal.SIGSTOP)   # the daemon kills it after another timeout
        for n in range(REFUSALS + 1):
            began = time.monotonic()
            try:
                read_direct(path, (n + 16) * MIB, MIB)
                give_up('a read from a silent vault succeeded')
            except OSError:
                took.append((time.monotonic() - began) * 1000)
        self.store.stop()
        return took


def vault(b):
    c = Cold(b)
    c.prepare()
    rows = zip(*(c.once() for _ in range(b.args.runs)))
    for values, (what, target, most) in zip(rows, (('first read, sequential, of get of whole segments', READ_MIN, False),
                                                   ('the same, of state', READ_MIN, False),
                                                   ('second read, of that of a local model', SECOND_MIN, False),
                                                   (f'its log for each chunk, of {CHUNK_RECORD_BYTES} bytes', RECORD_MAX, True))):
        b.figure(what, statistics.median(values), '', target, most)
    b.figure(f'restore --cold of {b.args.restore_mib} MiB, of the time of a restore', c.restores(), '', RESTORE_MAX)
    first, *took = c.refusals()
    b.figure('a silent vault: the first read waits', first / 1000, 's')
    b.figure('reads after it: refused, the median within', statistics.median(took), 'ms', REFUSAL_MAX_MS)
    b.figure('reads after it: refused, the slowest within', max(took), 'ms', REFUSAL_MAX_MS)


# ---- beside a slow device ----

class Small:
    """A model of one tensor. By default its step is a commit and little more."""

    def __init__(self, store, name, size=64 << 10, paths=b'fast'):
        self.root, self.bytes = store.point / name, size
        self.root.mkdir()
        (self.root / 'p').touch()
        os.setxattr(self.root / 'p', 'user.hitrain.dtype', b'f32')
        os.setxattr(self.root, 'user.hitrain.optimizer', b'adamw lr=1e-3')
        os.setxattr(self.root, 'user.hitrain.paths', paths)
        (self.root / 'p').write_bytes(os.urandom(self.bytes))
        tell(self.root, 'commit')

    def step(self):
        """Seconds of the commit."""
        (self.root / '.hitrain/grad/p').write_bytes(bytes(self.bytes))
        tell(self.root, 'wait')
        return seconds_of(lambda: tell(self.root, 'step'))


class Silent:
    """The slow device is silent, which a reader of content on it finds out, in another process."""

    def __init__(self, store, model):
        self.store, self.model = store, model

    def __enter__(self):
        self.store.device.slow_one.silence(True)
        self.reader = subprocess.Popen(['dd', f'if={self.model.root}/p', 'of=/dev/null', 'bs=1M', 'iflag=direct'], stdin=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)
        time.sleep(CAPACITY_TIMEOUT_S / 4)

    def __exit__(self, *_):
        health = self.store.slow_health()
        self.store.device.slow_one.silence(False)
        self.reader.wait(SETUP_SECONDS_MAX)
        wait_for(lambda: self.store.slow_health() == 'ok', 'the device answers')
        if health != 'not-answering':
            give_up(f'the slow device is {health} while it is silent')


def beside(b):
    """Two stores: one without a slow device, one with it."""
    args, size = b.args, 8 * b.args.elements * BYTES // 2 + (1 << 30)
    alone = Store(fast_device(b.folder / 'alone', size, args), b.folder / 'alone', args.elements, FILES)
    both = Wide(Devices(b.folder, args, 'both', size, size), b.folder / 'both', args.elements, FILES)
    small = {}
    for store, options in (alone, ()), (both, (f'capacity_timeout={CAPACITY_TIMEOUT_S}',)):
        store.format()
        store.start(DRAM, options=options)
        run(CTL, 'background', 'pause', store.point)
        small[store] = Small(store, 'small')
        store.step(2)
        store.device.slow(True)
    sides = {'slow': contextlib.nullcontext(), 'silent': Silent(both, Small(both, 'wide', 2 * DRAM, b'all'))}    # it is never all in memory
    took = {(side, what): ([], []) for side in sides for what in ('a step', 'a commit')}
    numbers = itertools.count(3)

    def measure(side):
        """The two stores take turns."""
        for what, times, work in (('a step', args.steps, lambda store: store.step(next(numbers))), ('a commit', COMMITS, lambda store: small[store].step())):
            for n in range(times + 1):
                for i, store in enumerate((alone, both)):
                    seconds = seconds_of(lambda: work(store)) if what == 'a step' else work(store)
                    if n:    # the first one brings content into memory
                        took[side, what][i].append(seconds)
    for n in range(args.runs):
        for side in sorted(sides, reverse=n % 2 == 0):
            with sides[side]:
                measure(side)
    for (side, what), (without, beside_it) in took.items():
        first, second = statistics.median(without), statistics.median(beside_it)
        b.said(f'{what}: {first * 1000:.4g} ms alone, {second * 1000:.4g} ms beside a {side} device')
        b.figure(f'speed of {what} beside a {side} device, of that alone', first / second, '', BESIDE_MIN, most=False)
    for store in alone, both:
        store.stop()


# ---- on both ----

def paths(b):
    elements = 2 * b.args.elements
    count = elements * BYTES
    d = Devices(b.folder, b.args, 'paths', 6 * count + (1 << 30), 3 * count + (1 << 30), 'limited')
    store = Wide(d, b.folder / 'paths', elements, FILES, 'all')
    rows = []
    for n in range(b.args.runs):
        d.slow_one.limit = b.args.slow_limit
        store.format()
        store.start(DRAM)
        run(CTL, 'background', 'pause', store.point)
        d.slow(True)
        found = timed_steps(store, 2, FOUND_STEPS + b.args.steps)
        parts, sums = [count / s / d.sum() for s, _ in found], d.sum()
        d.slow_one.limit /= 10
        d.slow(True)
        slowed = timed_steps(store, 20, SLOW_STEPS)
        after = [count / s / d.sum() for s, _ in slowed]
        b.said(f'run {n + 1}: of the sum of {sums / MIB:.0f} MiB/s ' + ' '.join(f'{p:.2f}' for p in parts) +
               f', shares {found[-1][1]}; of the new one of {d.sum() / MIB:.1f} ' + ' '.join(f'{p:.2f}' for p in after) + f', shares {slowed[-1][1]}')
        rows.append((statistics.median(parts[FOUND_STEPS:]), parts[FOUND_STEPS], statistics.median(after[FOUND_STEPS:])))
        store.stop()
    for values, (what, target) in zip(zip(*rows), (('paths=all: rate of steps, of the sum of both', SUM_MIN),
                                                   ('the first one after two, of the sum', SUM_MIN),
                                                   ('ten times slower, from the third step on, of the new sum', SLOWED_MIN))):
        b.figure(what, statistics.median(values), '', target, most=False)


def state(b):
    count = b.args.elements * BYTES
    d = Devices(b.folder, b.args, 'state', count // TIMES_FAST, 4 * count + (1 << 30))
    store = Wide(d, b.folder / 'state', b.args.elements, FILES)
    store.format()
    store.start(DRAM)
    run(CTL, 'background', 'pause', store.point)
    fast = json.loads(run(CTL, 'device', '--json', store.point))['devices'][0]['data_bytes']
    d.slow(True)
    store.step(2)
    before, steps = d.counters(), 2 * (b.args.steps // 2 + 1)    # what lies on the fast device alternates
    seconds = seconds_of(lambda: [store.step(3 + n) for n in range(steps)]) / steps
    read, written, slow_read, slow_written = ((after - was) / steps for after, was in zip(d.counters(), before))
    b.figure('parameters and state, of the space of the fast device', count / fast, '', TIMES_FAST, most=False)
    b.figure('a step: bytes read, of the least', (read + slow_read) / count, '', LEAST_MAX)
    b.figure('a step: bytes written, of the least', (written + slow_written) / count, '', LEAST_MAX)
    b.figure('of these on the slow device', max(slow_read, slow_written) / count, '')
    b.figure('a step, of the time of its bytes on the slow device', seconds / (max(slow_read, slow_written) / d.slow_one.limit), '')
    store.stop()


# ---- many chunks ----

class ManyStore(recovery.Store):
    """A cold model whose blocks are in no segment: its log is real, and nothing else is there."""

    def __init__(self, folder, chunks):
        (folder / 'mnt').mkdir(parents=True, exist_ok=True)
        super().__init__(folder, chunks, 0)

    def fill(self):
        """One block of each file is in a vault, so that all is as the store makes it."""
        place = self.image.with_name('vault')
        if not place.exists():
            run(CTL, 'vault', 'init', place)
        daemon, _ = self.mount()
        root, cold = self.point / 'model', self.point / 'cold'
        root.mkdir()
        for i in range(recovery.FILES):
            (root / f'{i}').touch()
            os.setxattr(root / f'{i}', 'user.hitrain.dtype', b'f32')
            (root / f'{i}').write_bytes(b'x' * MIB)
        os.setxattr(root, 'user.hitrain.optimizer', b'sgd lr=1')
        tell(root, 'snapshot first')
        url = f'{place}/job{self.chunks}'
        run(CTL, 'archive', root, 'first', url)
        tell(root, 'forget *')
        run('rm', '-r', root)
        run(CTL, 'restore', '--cold', url, cold)
        for i in range(recovery.FILES):
            os.truncate(cold / f'{i}', (self.chunks // recovery.FILES + 1) * MIB)
        objects = sorted(os.stat(cold / f'{i}').st_ino for i in range(recovery.FILES))
        self.unmount(daemon)
        run(recovery.MAKER, '--cold', self.image, MIB, self.chunks // recovery.FILES, *objects, seconds_max=recovery.SECONDS_MAX)

    def checked_once(self):
        """(seconds, most memory, processor seconds)"""
        began, log, memory, ended = time.monotonic(), self.image.with_name('fsck'), 0, 0
        with open(log, 'w') as out:
            fsck = subprocess.Popen([PROGRAMS / 'hitrain-fsck', '-n', '--no-data', self.image], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        while not ended:    # what wait4 says of memory begins with that of this program
            found = [line.split()[1] for line in pathlib.Path(f'/proc/{fsck.pid}/status').read_text().splitlines() if line.startswith('VmHWM')]
            memory = int(found[0]) << 10 if found else memory
            time.sleep(0.01)
            ended, status, used = os.wait4(fsck.pid, os.WNOHANG)
        fsck.returncode = os.waitstatus_to_exitcode(status)
        if fsck.returncode:
            give_up(f'{self.chunks} chunks: fsck: exit {fsck.returncode}\n{log.read_text()}')
        return time.monotonic() - began, memory, used.ru_utime + used.ru_stime


def many(b):
    """Beyond what a store without chunks takes. Processor time counts: other programs disturb it least."""
    rows = {}
    for chunks in (0, *sorted(int(float(n)) for n in b.args.chunks.split(','))):
        s = ManyStore(b.folder / 'many', chunks)
        times = 3 if chunks < 1e7 else 1
        rows[chunks] = {what: tuple(map(min, zip(*(measure() for _ in range(times))))) for what, measure in (('mount', s.mounted_once), ('fsck', s.checked_once))}
        if chunks:
            for what, row in rows[chunks].items():
                seconds, memory, processor = row = tuple(x - y for x, y in zip(row, rows[0][what]))
                rows[chunks][what] = row
                b.said(f'{chunks:,} chunks: {what} {seconds:.2f} s, {processor:.2f} s of the processor, {processor / chunks * 1e9:.0f} ns and '
                       f'{memory / chunks:.1f} bytes of memory a chunk')
    _, first, *others = rows
    for what, (_, memory, processor) in rows[max(rows)].items():
        b.said(f'{what} of {AIM:,} chunks, along this line: {processor * AIM / max(rows):.0f} s of the processor, {memory * AIM / max(rows) / (1 << 30):.1f} GiB'
               ' (the largest log has 88 million)')
    for chunks in others:
        for what in rows[chunks]:
            for name, i in ('processor time', 2), ('memory', 1):
                value = rows[chunks][what][i] / chunks / (rows[first][what][i] / first)
                b.figure(f'{what}: {name} for each of {chunks:,} chunks, of that of {first:,}', value, '', LINEAR_MAX)


PARTS = {'vault': vault, 'beside': beside, 'paths': paths, 'state': state, 'many': many}


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--runs', type=int, default=3)
    p.add_argument('--steps', type=int, default=4, help='of each measurement')
    p.add_argument('--elements', type=int, default=16 * MIB, help=f'parameters, in {FILES} files; twice as many in the part paths')
    p.add_argument('--cold-mib', type=int, default=512, help=f'of the cold model, in {LARGE} files')
    p.add_argument('--restore-mib', type=int, default=1024, help='of the model that is restored')
    p.add_argument('--limit', type=int, default=300 * MIB, help='bytes per second each way, of a fast device')
    p.add_argument('--slow-limit', type=int, default=75 * MIB, help='of a slow one, and of the vault')
    p.add_argument('--latency-us', type=int, default=2000, help='of these')
    p.add_argument('--device', choices=('steady', 'limited'), help='what fast devices are: limited in the part paths, else steady')
    p.add_argument('--chunks', default='1e6,4e6', help='in the part many, with commas between; 8e7 need 10 GB of memory and of disk')
    p.add_argument('--only', default=','.join(PARTS), help='parts, with commas between')
    return p.parse_args()


def main():
    args = parse_args()
    check_elements(args, FILES)
    parts = parts_of(args.only, PARTS)
    b = Bench(args, begin('cold'))
    print(f'bench-cold: {args.elements / 1e6:.0f} million f32 parameters, AdamW, {args.runs} runs; fast devices {args.limit / MIB:.0f} MiB/s each '
          f'way, slow ones and the vault {args.slow_limit / MIB:.0f} and {args.latency_us / 1000:g} ms\n  {machine()}', flush=True)
    for part in parts:
        PARTS[part](b)
    for row in b.rows:
        if not row.get('met', True):
            print(f'  missed: {row["what"]}: {row["value"]:.4g}, target {row["target"]:g}')
    b.end(BUILD / 'bench/cold.jsonl')


if __name__ == '__main__':
    main()
