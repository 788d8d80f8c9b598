#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What a store loses with its age and fullness, beside a fresh one on an equal device.

Run it with `make bench-aging`, as root. Two loop devices are limited to one speed each way, and each has a store with a
model that takes AdamW steps and fits no memory. One store has nothing else. The other is filled to 90 %, and then files
of mixed sizes are deleted and written again for some simulated hours, with a step after each 40 files. In an hour as
much is written as the store is large: 3 hours, or 24 with HITRAIN_LONG=1 or `--hours`. Half of the files are tensors
of up to 16 MiB, the others have 4 KiB to 1 MiB. Compaction is on. Then

- the largest free run between content is printed;
- a tensor is written to both stores and read cold, in turns, and both models take steps, in turns;
- the old store is filled to 97 %, so that its free space lies in pieces between small files, and 64 KiB are written
  and synced again and again, in turns in both.

Write amplification is what the device got, log and superblocks included, over what the program and the steps wrote.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import time

from common import BUILD, PROGRAMS, SpeedLimit, begin, give_up, is_mounted, machine, make_loop_device, run, wait_for

KIB, MIB = 1 << 10, 1 << 20
SIZE, TENSOR = 2048 * MIB, 128 * MIB
LIMIT = 300 * MIB
FULL, FULLER = 0.90, 0.97
HOURS, HOURS_LONG = 3, 24
FILES, PARAMETER = 4, 8 * MIB  # of the model, in f32
STATES = 3                     # a step writes each parameter and its two moments
WRITES_MOST, SAME_LEAST, SYNCS_LEAST = 1.3, 0.9, 0.5
NOISE = os.urandom(16 * MIB)


class Store:
    def __init__(self, folder, name):
        self.point = folder / name
        self.point.mkdir()
        self.image = folder / f'{name}.image'
        self.loop = make_loop_device(self.image, SIZE)
        self.daemon = None
        self.steps = 0
        run(PROGRAMS / 'mkfs.hitrain', '--force', self.loop)

    def mount(self, limit):
        self.daemon = subprocess.Popen([PROGRAMS / 'hitrain', '-f', self.loop, self.point, '-o', 'dram=64M'],
                                       preexec_fn=limit.enter, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda: is_mounted(self.point), 'mount')

    def make_model(self):
        root = self.point / 'model'
        root.mkdir()
        os.setxattr(root, 'user.hitrain.dtype', b'f32')
        for n in range(FILES):
            (root / f'p{n}').write_bytes(bytes(PARAMETER))
        os.setxattr(root, 'user.hitrain.optimizer', b'adamw lr=1e-3')

    def step(self):
        """Gradients and the boundary, until the step is durable. Returns the bytes that it has to write."""
        hidden, self.steps = self.point / 'model/.hitrain', self.steps + 1
        gradient = (self.steps * 0.001).hex().encode().ljust(24)[:8] * (PARAMETER // 8)
        for n in range(FILES):
            with open(hidden / f'grad/p{n}', 'r+b', buffering=0) as f:
                for at in range(0, PARAMETER, MIB):
                    f.write(gradient[at:at + MIB])
        with open(hidden / 'ctl', 'r+b', buffering=0) as ctl:
            ctl.write(b'step\n')
            answer = ctl.read(4096)
        if not answer.startswith(b'ok'):
            give_up(f'step: {answer.decode()}')
        return FILES * PARAMETER * STATES

    def unmount(self):
        if self.daemon:
            run('umount', self.point)
            self.daemon.wait()
            self.daemon = None

    def end(self):
        self.unmount()
        run('losetup', '--detach', self.loop)
        self.image.unlink()

    def largest_free_run(self):
        """Between content, in bytes. The store is not mounted."""
        found = json.loads(run(PROGRAMS / 'hitrain-fsck', '-n', '--json', '--extents', '--no-data', self.loop))['extents']
        at = sorted((e['offset'], e['offset'] + e['bytes']) for e in found)
        free, end = 0, at[0][1]
        for begin_at, end_at in at:
            free, end = max(free, begin_at - end), max(end, end_at)
        return free

    def used(self):
        st = os.statvfs(self.point)
        return 1 - st.f_bavail / st.f_blocks

    def written(self):
        return int(os.getxattr(self.point, 'user.hitrain.device_written_bytes'))

    def put(self, name, size, tensor):
        path = self.point / name
        with open(path, 'wb', buffering=0) as f:
            if tensor:
                os.setxattr(path, 'user.hitrain.dtype', b'f32')
            for at in range(0, size, len(NOISE)):
                f.write(NOISE[:size - at])


def churn(store, hours):
    """Files of mixed sizes come and go beside steps. Returns the bytes that were to be written, and those of the device."""
    rnd, live, n, written, steps, device = random.Random(1), [], 0, 0, 0, 0
    while written < hours * SIZE:
        while live and store.used() > FULL:
            (store.point / live.pop(rnd.randrange(len(live)))).unlink()
            if store.used() > FULL:
                run('sync', store.point)
        tensor = rnd.random() < 0.5
        size = rnd.randrange(MIB, 16 * MIB, 4) if tensor else rnd.choice((4, 16, 64, 100, 520, 760, 1024)) * KIB
        if written == 0:
            device = store.written()
        store.put(f'f{n}', size, tensor)
        live.append(f'f{n}')
        n, written = n + 1, written + size
        if n % 20 == 0:
            run('sync', store.point)
        if n % 40 == 0:
            steps += store.step()
    run('sync', store.point)
    return written + steps, store.written() - device


def read_rate(store):
    begun = time.monotonic()
    with open(store.point / 'tensor', 'rb', buffering=0) as f:
        while f.read(MIB):
            pass
    return TENSOR / (time.monotonic() - begun)


def step_rate(store):
    begun = time.monotonic()
    store.step()
    return 1 / (time.monotonic() - begun)


def sync_rate(store, seconds=1.0):
    """64 KiB at other places of one file, each synced."""
    fd = os.open(store.point / 'probe', os.O_RDWR | os.O_CREAT)
    begun, n = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        os.pwrite(fd, NOISE[:64 * KIB], n % 64 * 64 * KIB)
        os.fsync(fd)
        n += 1
    os.close(fd)
    return n / (time.monotonic() - begun)


def fill_in_pieces(store):
    """Small files between each other; every second one is deleted; what is free then is filled to 97 %."""
    n = 0
    while store.used() < 0.985:
        store.put(f's{n}', 32 * KIB, False)
        n += 1
        if n % 100 == 0:
            run('sync', store.point)
    run('sync', store.point)
    for i in range(0, n, 2):
        (store.point / f's{i}').unlink()
    run('sync', store.point)
    while store.used() < FULLER:
        store.put(f'm{n}', 200 * KIB, False)
        n += 1
    run('sync', store.point)


def in_turns(old, fresh, measure, runs):
    """Medians of both, and of their ratios."""
    pairs = [(measure(old), measure(fresh)) for _ in range(runs)]
    return [statistics.median(x) for x in (*zip(*pairs), [a / b for a, b in pairs])]


def remount(stores, limit):
    for s in stores:
        s.unmount()
        s.mount(limit)


def cold_reads(stores, limit, runs):
    def cold(store):
        remount([store], limit)
        return read_rate(store)
    return in_turns(*stores, cold, runs)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--runs', type=int, default=7)
    p.add_argument('--hours', type=float, default=HOURS_LONG if os.environ.get('HITRAIN_LONG') else HOURS,
                   help='that the churn simulates: the size of the store is written in each')
    args = p.parse_args()
    folder = begin('aging')
    stores = [Store(folder, 'old'), Store(folder, 'fresh')]
    limit = SpeedLimit(*(s.loop for s in stores), name='hitrain-aging')
    try:
        for s in stores:
            s.mount(limit)
            s.make_model()
            s.step()
        print(f'{machine()}\nlimit {LIMIT // MIB} MiB/s each way, stores of {SIZE // MIB} MiB', flush=True)
        written, device = churn(stores[0], args.hours)
        print(f'churn at 90 %, {args.hours:g} h: {written / MIB:.0f} MiB written, write amplification '
              f'{device / written:.2f} (at most {WRITES_MOST})', flush=True)
        stores[0].unmount()
        free = stores[0].largest_free_run()
        stores[0].mount(limit)
        print(f'largest free run between content: {free / MIB:.1f} MiB', flush=True)
        for s in stores:
            s.put('tensor', TENSOR, True)
            run('sync', s.point)
        limit.set(LIMIT)
        old, fresh, ratio = cold_reads(stores, limit, args.runs)
        print(f'cold sequential read: {old / MIB:.0f} MiB/s, fresh {fresh / MIB:.0f} MiB/s, {ratio:.2f} '
              f'(at least {SAME_LEAST})', flush=True)
        old, fresh, steps = in_turns(*stores, step_rate, args.runs)
        print(f'steps: {1 / old:.2f} s, fresh {1 / fresh:.2f} s, rate {steps:.2f} (at least {SAME_LEAST})', flush=True)
        limit.set(0)
        fill_in_pieces(stores[0])
        print(f'the old store is {100 * stores[0].used():.1f} % full', flush=True)
        limit.set(LIMIT)
        old_syncs, fresh_syncs, syncs = in_turns(*stores, sync_rate, args.runs)
        print(f'64 KiB synced: {old_syncs:.0f} a second, fresh {fresh_syncs:.0f}, {syncs:.2f} (at least {SYNCS_LEAST})')
        with open(BUILD / 'bench' / 'aging.jsonl', 'a') as f:
            f.write(json.dumps({'hours': args.hours, 'amplification': device / written, 'largest_free_bytes': free,
                                'read': ratio, 'steps': steps, 'sync': syncs}) + '\n')
    finally:
        limit.set(0)
        for s in stores:
            s.end()
        limit.remove()


if __name__ == '__main__':
    main()
