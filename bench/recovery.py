#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""How long a store takes to come back after a crash, by the number of its chunks; and the cost of its log.

Run it with `make bench-recovery`, as root. Stores are sparse images with real logs (recovery_maker.c): stored content
is zeros, so they may be as large as one likes. The daemon is started, and killed when it has mounted, so each mount is
one after a crash. fio reads the written part of both copies of the log from the same file. The shortest of several runs
counts: other work of the machine only makes runs longer. The results are a table, a plot (recovery.svg), and all
figures in recovery.jsonl beside bench-meta's. Missed targets are named.
"""
import argparse
import atexit
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import plot
from common import BUILD, PROGRAMS, give_up, remove_folder, run

MAKER = BUILD / 'bench/recovery_maker'
MIB = 1 << 20
BLOCK = 4096
SECONDS_MAX = 1800
FILES = 16
RECORD_BYTES = 60       # of a chunk in the log
CLAIM_SHARE = 0.29      # of the log, at most: live records
OPTIONS = 'dram=32M,staging=24M'
MAP_BITMAPS = 33        # HT_FREE_BITMAPS
MAP_BYTES = MIB // BLOCK // 8 + 2 + MAP_BITMAPS / 8    # for each MiB of a device: 38 MiB for a TiB
RUNS = 5
CHURN_LAPS = 10         # of a log of 1 MiB

PER_MILLION_MAX = 1.0   # seconds
READING_MAX = 4.0       # times fio's time
BYTES_MAX = 64          # of memory for a chunk
POWER_MAX = 1.15        # of the number of chunks, with which processor time grows from 1e5 on


class Store:
    """chunks: of bytes each, after an object's first one; the others are compared with a store without any."""

    def __init__(self, folder, chunks, bytes_each):
        self.chunks, self.bytes_each = chunks, bytes_each
        self.image, self.point = folder / 'image', folder / 'mnt'
        self.log_bytes = int(chunks * RECORD_BYTES / CLAIM_SHARE * 1.1) // MIB * MIB + (8 if chunks else 1) * MIB
        self.image.unlink(missing_ok=True)
        self.image.touch()
        os.truncate(self.image, max(chunks * bytes_each + 2 * self.log_bytes + 512 * MIB, 5 * self.log_bytes))    # the log is at most a fourth
        run(PROGRAMS / 'mkfs.hitrain', f'--log-size={self.log_bytes}', self.image)
        if chunks:
            self.fill()

    def fill(self):
        daemon, _ = self.mount()
        folder = self.point / 'model'
        folder.mkdir()
        os.setxattr(folder, 'user.hitrain.dtype', b'f32')
        for i in range(FILES):
            with open(folder / f'{i}', 'wb') as f:
                f.write(b'x' * BLOCK)
                f.truncate((self.chunks // FILES + 1) * MIB)
        self.unmount(daemon)
        listed = json.loads(run(PROGRAMS / 'hitrain-fsck', '-n', '--json', '--extents', self.image))
        objects = sorted({e['object'] for e in listed['extents']})
        run(MAKER, self.image, self.bytes_each, self.chunks // FILES, *objects, seconds_max=SECONDS_MAX)
        os.sync()

    def mount(self):
        """(daemon, seconds from its start until it says that it has mounted)"""
        begin = time.monotonic()
        daemon = subprocess.Popen([str(PROGRAMS / 'hitrain'), '-f', str(self.image), str(self.point), '-o', OPTIONS],
                                  stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for line in daemon.stderr:
            if ' is mounted on ' in line:
                return daemon, time.monotonic() - begin
            print(line, end='', file=sys.stderr)
        give_up(f'{self.image} of {self.chunks} chunks: exit {daemon.wait()}')

    def unmount(self, daemon):
        run('umount', self.point)
        daemon.wait(SECONDS_MAX)
        daemon.stderr.close()

    def crash(self, daemon):
        """Seconds of processor time that it took."""
        daemon.kill()
        _, status, used = os.wait4(daemon.pid, 0)
        daemon.returncode = os.waitstatus_to_exitcode(status)
        daemon.stderr.close()
        run('umount', '-l', self.point)
        return used.ru_utime + used.ru_stime

    def mounted_once(self):
        daemon, seconds = self.mount()
        with open(f'/proc/{daemon.pid}/status') as status:
            resident = next(int(line.split()[1]) for line in status if line.startswith('VmRSS')) * 1024
        return seconds, resident, self.crash(daemon)

    def checked(self, *options):
        begin = time.monotonic()
        told = json.loads(run(PROGRAMS / 'hitrain-fsck', '-n', '--json', *options, self.image, seconds_max=SECONDS_MAX))
        return time.monotonic() - begin, told


def log_read(store, told):
    """Seconds that fio needs for the written part of both copies."""
    seconds = 0
    for copy in told['log']:
        size = copy['end_position'] - copy['start_position']
        if not size:
            continue
        answer = json.loads(run('fio', '--name=log', f'--filename={store.image}', '--rw=read', f'--bs={min(size, MIB)}', '--direct=1',
                                '--ioengine=io_uring', '--iodepth=8', f'--offset={copy["offset"]}', f'--size={size}',
                                '--readonly', '--output-format=json'))
        seconds += answer['jobs'][0]['read']['runtime'] / 1000
    return seconds


def measure(folder, chunks, bytes_each, with_data):
    """The mount and fio take turns."""
    store = Store(folder, chunks, bytes_each)
    fsck_s, told = store.checked('--no-data')
    if chunks and told['summary']['chunks'] != chunks // FILES * FILES + FILES:
        give_up(f'{told["summary"]["chunks"]} chunks, not {chunks}')
    mounts, reads = [], []
    for _ in range(RUNS):
        mounts.append(store.mounted_once())
        reads.append(log_read(store, told))
    log = told['log'][0]
    return {
        'chunks': chunks, 'chunk_bytes': bytes_each, 'log_bytes': store.log_bytes,
        'log_used_bytes': log['end_position'] - log['start_position'],
        'mount_s': min(m[0] for m in mounts), 'mount_runs_s': [m[0] for m in mounts],
        'mount_cpu_s': min(m[2] for m in mounts),
        'resident_bytes': min(m[1] for m in mounts), 'fio_s': min(reads), 'fio_runs_s': reads,
        'fsck_no_data_s': fsck_s, 'fsck_s': store.checked()[0] if with_data else None,
    }


def figures(result, base):
    """The figures of the targets: costs beyond those of a store without chunks."""
    n, seconds = result['chunks'], result['mount_s'] - base['mount_s']
    result['s_per_million'] = seconds / n * 1e6
    result['cpu_s'] = result['mount_cpu_s'] - base['mount_cpu_s']
    result['times_fio'] = seconds / result['fio_s'] if result['fio_s'] else None
    # A device's free space is known by the block and by the MiB; no chunk owns that map, and it is listed apart.
    result['map_bytes'] = n * result['chunk_bytes'] // MIB * MAP_BYTES
    result['bytes_per_chunk'] = (result['resident_bytes'] - base['resident_bytes'] - result['map_bytes']) / n
    return result


# ---------------------------------------------------------------------- churn

def stat(point, name):
    return int(os.getxattr(point, f'user.hitrain.{name}'))


def churn(folder):
    """One block written and made durable again and again, until the log has been written many times over."""
    store = Store(folder, 0, BLOCK)
    daemon, _ = store.mount()
    used, writes = 0, 0
    with open(store.point / 'f', 'wb', buffering=0) as f:
        while stat(store.point, 'log_written_bytes') < CHURN_LAPS * store.log_bytes:
            for _ in range(50):
                os.pwrite(f.fileno(), os.urandom(BLOCK), 0)
                os.fsync(f.fileno())
                writes += 1
            used = max(used, stat(store.point, 'log_used_bytes'))
    result = {'churn_writes': writes, 'log_bytes': store.log_bytes, 'log_written_bytes': stat(store.point, 'log_written_bytes'),
              'log_used_bytes_max': used, 'checkpoints': stat(store.point, 'log_checkpoints')}
    store.unmount(daemon)
    return result


# --------------------------------------------------------------------- results

HEAD = f'{"chunks":>9} {"each":>6} {"log":>8} {"fio":>8} {"mount":>8} {"of it":>6} {"times":>6} {"s per":>8} {"bytes per":>10} {"fsck":>9} {"fsck":>8}\n' \
       f'{"":9} {"":6} {"MiB":>8} {"s":>8} {"s":>8} {"CPU":>6} {"fio":>6} {"million":>8} {"chunk":>10} {"--no-data":>9} {"s":>8}'


def row(r):
    times = f'{r["times_fio"]:6.1f}' if r['times_fio'] else '     -'
    full = f'{r["fsck_s"]:8.2f}' if r['fsck_s'] is not None else '       -'
    return f'{r["chunks"]:9} {r["chunk_bytes"] // 1024:4} K {r["log_used_bytes"] / MIB:8.1f} {r["fio_s"]:8.3f} {r["mount_s"]:8.3f} {r["mount_cpu_s"]:6.2f} {times} ' \
           f'{r["s_per_million"]:8.2f} {r["bytes_per_chunk"]:10.1f} {r["fsck_no_data_s"]:9.2f} {full}'


def power(results):
    """n: processor time is as the n-th power of the number of chunks, from 1e5 to the most; None: not known."""
    cpu = {r['chunks']: r['cpu_s'] for r in results if r['chunk_bytes'] == BLOCK}
    most = max(cpu)
    return math.log(cpu[most] / cpu[100_000]) / math.log(most / 100_000) if most > 100_000 and 100_000 in cpu else None


def missed(results, churned):
    for r in results:
        name = f'{r["chunks"]} chunks of {r["chunk_bytes"]} bytes'
        if r['chunks'] < 100_000:   # nothing but the start of a process
            continue
        if r['s_per_million'] > PER_MILLION_MAX and r['chunks'] >= 1_000_000:   # a smaller one takes no longer than a process does
            yield f'{name}: {r["s_per_million"]:.2f} s per million, {PER_MILLION_MAX} wanted'
        if r['times_fio'] > READING_MAX and r['chunks'] >= 1_000_000:
            yield f'{name}: {r["times_fio"]:.1f} times what fio needs, {READING_MAX} wanted'
        if r['bytes_per_chunk'] > BYTES_MAX:
            yield f'{name}: {r["bytes_per_chunk"]:.1f} bytes of memory for each, {BYTES_MAX} wanted'
    grown = power(results)
    if grown and grown > POWER_MAX:
        yield f'processor time grows as the {grown:.2f}th power of the number of chunks'
    if churned['log_used_bytes_max'] > churned['log_bytes'] or not churned['checkpoints']:
        yield 'the log grows with churn'


def draw(results, path):
    small = [r for r in results if r['chunk_bytes'] == BLOCK]
    lines = [plot.Curve(label, color, [(r['chunks'], r[key]) for r in small if r[key]]) for label, key, color in (
        ('mount after a crash', 'mount_s', '#c0392b'), ('hitrain-fsck', 'fsck_s', '#2c6fbb'),
        ('hitrain-fsck --no-data', 'fsck_no_data_s', '#7fb3d5'), ('fio reads the log', 'fio_s', '#777777'))]
    path.write_text(plot.log_log('Coming back after a crash', 'chunks', 'seconds', lines))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--chunks', type=float, nargs='+', default=[1e4, 1e5, 1e6] + ([1e7] if os.environ.get('HITRAIN_LONG') else []))
    args = p.parse_args()
    if os.geteuid() != 0:
        give_up('only root mounts: run it as root')
    out = BUILD / 'bench'
    out.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix='hitrain-bench-'))
    atexit.register(remove_folder, folder)
    (folder / 'mnt').mkdir()
    base = measure(folder, 0, BLOCK, False)
    print(f'A store without chunks mounts in {base["mount_s"]:.3f} s and takes {base["resident_bytes"] / MIB:.0f} MiB (-o {OPTIONS})\n\n{HEAD}')
    cases = [(int(n), BLOCK, n <= 1e6) for n in args.chunks] + [(int(max(args.chunks)), MIB, False)]
    results = []
    for case in cases:
        results.append(figures(measure(folder, *case), base))
        print(row(results[-1]), flush=True)
    if power(results):
        print(f'\nProcessor time grows as the number of chunks to the power of {power(results):.2f}')
    churned = churn(folder)
    print(f'\nLog under churn: {churned["churn_writes"]} durable writes, {churned["log_written_bytes"] / MIB:.0f} MiB written into '
          f'{churned["log_bytes"] / MIB:.0f} MiB, {churned["checkpoints"]} checkpoints, never more than '
          f'{churned["log_used_bytes_max"] / MIB:.1f} MiB in use')
    with open(out / 'recovery.jsonl', 'w') as f:
        for record in (base, *results, churned):
            print(json.dumps(record), file=f)
    draw(results, out / 'recovery.svg')
    why = list(missed(results, churned))
    if why and os.getloadavg()[0] > 1.5:
        print(f'Others work on this machine (load {os.getloadavg()[0]:.1f}): times are longer than they are here alone')
    for line in why:
        print(f'MISSED  {line}')
    print(f'Figures in {out}/recovery.jsonl, a plot in {out}/recovery.svg')
    return 1 if why else 0


if __name__ == '__main__':
    sys.exit(main())
