#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What a vault costs a run that trains, and how fast steps go there and come back.

Run it with `make bench-vault`, as root; ONLY= takes some of the parts. A store, and an ext4 whose folder is the vault, lie on loop devices
of limited speed. The bounds of each figure are measured in the same run: dd with fsync on the vault, and reads and writes of the
store without hitrainctl. Medians of interleaved runs; all figures in vault.jsonl. Missed targets are named.

train     steps with nothing or everything resident, alone, beside an archiver that always has work, and beside a vault whose file system is frozen
copy      archive and restore, of the lower of store and vault, with limits and without; bytes put of a first and of a small change
elastic   bytes fetched when 4 ranks lose one, and when 3 ranks become 8, of the least that any division needs
follow    a copy that computes logged steps again, through a vault and through a pipe, of the slowest of what bounds it
sim       a vault of 3 million segments and 64 ranks (vault_sim.py): time and memory for each segment, over those with 300,000
"""
import argparse
import atexit
import concurrent.futures
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import time

from common import BUILD, PROGRAMS, begin, check_elements, give_up, is_mounted, machine, parts_of, run, wait_for
from step import FILES, KEPT_SHARE, MIB, SETUP_SECONDS_MAX, Device
import step_follow
import steps

TRAIN_MIN, SILENT_MIN = 0.98, 0.99
RATE_MIN = 0.9                # of the slower side
FIRST_MAX, CHANGE_MAX, ELASTIC_MAX = 1.01, 1.05, 1.01
ARCHIVED_MIN, STEPS_MAX = 0.01, 60      # steps are taken until one is archived, at most so many
LINEAR_MAX = 1.25
CHANGED = 100                 # each so many-th block of the model
READERS = 4
SIDES = {'archiver': 'an archiver', 'silent': 'a silent vault'}
BLOCKS = 24                   # of a tensor in the elastic part: a multiple of 3, 4 and 8
CTL = PROGRAMS / 'hitrainctl'
SIM = pathlib.Path(__file__).with_name('vault_sim.py')


class Vault:
    """The folder of an ext4 on a device of its own. Programs that use it run in its group."""

    def __init__(self, folder, device):
        self.point, self.device = folder / 'mnt-vault', device
        self.point.mkdir()
        run('mkfs.ext4', '-q', '-E', 'lazy_itable_init=0,lazy_journal_init=0,nodiscard', '-m0', self.device.path)
        atexit.register(self.end)
        run('mount', self.device.path, self.point)
        self.url = self.point / 'v'
        run(CTL, 'vault', 'init', self.url)

    def end(self):
        if is_mounted(self.point):
            self.freeze(False)
            run('umount', '--lazy', self.point)

    def freeze(self, on):
        subprocess.run(['fsfreeze', '-f' if on else '-u', self.point], stderr=subprocess.DEVNULL, check=on)

    def empty_cache(self):
        run('umount', self.point)
        run('mount', self.device.path, self.point)

    def bytes(self):
        return sum(p.stat().st_size for p in self.url.rglob('*') if p.is_file())

    def ctl(self, *words):
        """What a command said as JSON with its processor seconds, and its seconds."""
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        said = json.loads(self.device.run(CTL, *words, '--json', seconds_max=SETUP_SECONDS_MAX).splitlines()[-1])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        said['processor'] = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        return said, time.monotonic() - began

    def start(self, *words, **kw):
        return subprocess.Popen([str(w) for w in (CTL, *words)], stdin=subprocess.DEVNULL, preexec_fn=self.device.group.enter, **kw)

    def rates(self, count):
        """Bytes per second of dd: written with fsync, and read."""
        path = self.point / 'ceiling'
        written = seconds_of(lambda: self.device.run('dd', 'if=/dev/zero', f'of={path}', 'bs=1M', f'count={count // MIB}', 'conv=fsync'))
        self.empty_cache()
        read = seconds_of(lambda: self.device.run('dd', f'if={path}', 'of=/dev/null', 'bs=4M', 'iflag=direct'))
        path.unlink()
        return count / written, count / read


def seconds_of(work):
    began = time.monotonic()
    work()
    return time.monotonic() - began


def end(program, log):
    """It must end well. log: what it said."""
    program.terminate()
    if program.wait(SETUP_SECONDS_MAX):
        give_up(f'{" ".join(program.args)}: exit {program.returncode}\n{log.read_text()}')


def contents(root):
    """Files of a model's parameters and state. root: the model, or one of its kept steps."""
    for path in sorted(root.glob('p*')):
        yield path
        yield from sorted(p for p in (root / '.hitrain/state' / path.name).iterdir() if p.name != 'step')


def read_file(path):
    into, count = bytearray(MIB), 0
    with open(path, 'rb', buffering=0) as f:
        while got := f.readinto(into):
            count += got
    return count


def write_file(path, count):
    data = os.urandom(16 * MIB)
    with open(path, 'wb', buffering=0) as f:
        while f.tell() < count:
            f.write(data[:count - f.tell()])
        os.fsync(f.fileno())


class Bench(steps.Bench):
    def __init__(self, args, folder):
        super().__init__(args, folder)
        self.folder = folder
        self.vault = Vault(folder, Device(folder / 'vault', self.model_bytes * 64 + (1 << 30), args.vault_limit, 'hitrain-bench-vault'))
        self.jobs = 0

    def start(self, words='', slow=True, dram=steps.DRAM):
        self.store.start(dram, f'adamw lr=1e-3 {words}')
        self.device.slow(slow)
        run(CTL, 'background', 'pause', self.store.point)   # whose work would be in the ratios

    def job(self):
        """The URL of a new job."""
        self.jobs += 1
        return f'{self.vault.url}/job{self.jobs}'

    def slow(self, on):
        self.device.slow(on)
        self.vault.device.slow(on)

    # -- training --

    def steps_beside(self, side):
        """Seconds of a step."""
        program, log = None, self.folder / 'archiver'
        if side != 'alone':
            with open(log, 'w') as out:
                program = self.vault.start('archive', self.root, self.job(), '--follow', stderr=out, stdout=out)
            wait_for(lambda: 'archived step' in log.read_text() or program.poll() is not None, 'a step is archived', seconds_max=SETUP_SECONDS_MAX)
            if side == 'silent':
                self.vault.freeze(True)
        self.step()
        began, count, archived = time.monotonic(), 0, 0
        while count < self.args.steps or side == 'archiver' and not archived and count < STEPS_MAX:
            self.step()
            count += 1
            archived = log.read_text().count('archived step') - 1 if side == 'archiver' else 0
        seconds = (time.monotonic() - began) / count
        if side == 'silent':
            self.vault.freeze(False)
        if program:
            end(program, log)
        return seconds, archived / count

    def train(self):
        for name, dram in ('nothing resident', steps.DRAM), ('all resident', int(self.model_bytes / KEPT_SHARE) + steps.DRAM):
            self.train_with(name, dram)

    def train_with(self, name, dram):
        self.start('retain=2', dram=dram)
        self.step()
        self.vault.device.slow(True)
        found, archived = {side: [] for side in ('alone', 'archiver', 'silent')}, 0
        for number in range(self.args.runs):
            for side in sorted(found, reverse=number % 2):
                seconds, count = self.steps_beside(side)
                found[side].append(seconds)
                archived += count
            self.said(f'{name}, run {number + 1}: a step ' + ', '.join(f'{side} {took[-1]:.3f} s' for side, took in found.items()))
        for side, target in ('archiver', TRAIN_MIN), ('silent', SILENT_MIN):
            ratio = statistics.median(a / b for a, b in zip(found['alone'], found[side]))
            self.figure(f'{name}: steps beside {SIDES[side]}, of those alone', ratio, '', target, most=False)
        self.figure(f'{name}: steps archived meanwhile, of all', archived / self.args.runs, '', ARCHIVED_MIN, most=False)
        self.command('forget *')
        self.store.stop()

    # -- archive and restore --

    def read_kept(self):
        folder = self.root / '.hitrain/snap/first'
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            return sum(pool.map(read_file, contents(folder)))

    def restart(self, slow):
        """Nothing of model and vault is in memory."""
        self.store.stop()
        self.start(slow=slow)
        self.vault.empty_cache()

    def daemon_seconds(self):
        """Of the processor."""
        with open(f'/proc/{self.store.daemon.pid}/stat') as f:
            words = f.read().rpartition(')')[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf('SC_CLK_TCK')

    def measured(self, count, *words):
        """What a command said, its rate, and processor seconds per GiB, with those of the daemon."""
        before = self.daemon_seconds()
        about, seconds = self.vault.ctl(*words)
        processor = about['processor'] + self.daemon_seconds() - before
        return about['bytes'] / seconds, processor / count * 1024 * MIB

    def copy_once(self, slow):
        """(archive, restore) of the slower side, and their processor seconds per GiB."""
        self.vault.device.slow(slow)
        count = self.model_bytes
        self.restart(slow)
        read = count / seconds_of(self.read_kept)
        written, vault_read = self.vault.rates(count)
        self.restart(slow)
        url = self.job()
        archived, to_archive = self.measured(count, 'archive', self.root, 'first', url)
        self.restart(slow)
        ceiling = self.store.point / 'ceiling'
        store_written = count / seconds_of(lambda: write_file(ceiling, count))
        ceiling.unlink()
        restored, to_restore = self.measured(count, 'restore', url, self.store.point / 'restored')
        run('rm', '-r', self.store.point / 'restored', seconds_max=SETUP_SECONDS_MAX)
        self.slow(False)
        run(CTL, 'vault', 'forget', url, os.getxattr(self.root / '.hitrain/snap/first', 'user.hitrain.step').decode())
        shutil.rmtree(self.vault.url / 'seg')      # of forgotten steps alone, since no part uses another one's jobs
        self.said(f'{"limited" if slow else "not limited"}: MiB/s of store {read / MIB:.0f} and {store_written / MIB:.0f}, of vault '
                  f'{vault_read / MIB:.0f} and {written / MIB:.0f}; archive {archived / MIB:.0f}, restore {restored / MIB:.0f}; '
                  f'processor seconds for each GiB {to_archive:.2f} and {to_restore:.2f}')
        return archived / min(read, written), restored / min(vault_read, store_written), to_archive, to_restore

    def copy(self):
        self.start(slow=False)
        self.command('snapshot first')
        for slow, name in (True, 'on limited devices'), (False, 'without limits'):
            rows = [self.copy_once(slow) for _ in range(self.args.runs)]
            *rates, to_archive, to_restore = (statistics.median(values) for values in zip(*rows))
            for what, rate in zip(('archive', 'restore'), rates):
                self.figure(f'{what} {name}, of the slower side', rate, '', RATE_MIN, most=False)
        self.figure('archive: processor seconds per GiB', to_archive, 's')
        self.figure('restore: processor seconds per GiB', to_restore, 's')
        self.put()
        self.store.stop()

    def put(self):
        """Bytes put, of what is new: a first step, and one in which few blocks are new."""
        url, before = self.job(), self.vault.bytes()
        about, _ = self.vault.ctl('archive', self.root, 'first', url)
        first = self.vault.bytes()
        self.figure('bytes put of a first step, of its content', (first - before) / about['bytes'], '', FIRST_MAX)
        blocks = [(path, at) for path in sorted(self.root.glob('p*')) for at in range(0, path.stat().st_size, MIB)]
        changed = blocks[::len(blocks) * CHANGED // (self.model_bytes // MIB)]
        for path, at in changed:
            with open(path, 'r+b', buffering=0) as f:
                f.seek(at)
                f.write(os.urandom(MIB))
        self.step_number_only()
        self.command('snapshot changed')
        self.vault.ctl('archive', self.root, 'changed', url)
        self.figure(f'bytes put where {len(changed)} blocks are new, of these', (self.vault.bytes() - first) / (len(changed) * MIB), '', CHANGE_MAX)
        self.command('forget *')

    def step_number_only(self):
        """Two steps of a job have different numbers."""
        number = int(os.getxattr(self.root, 'user.hitrain.step')) + 1
        os.setxattr(self.root, 'user.hitrain.step', str(number).encode())

    # -- another number of ranks --

    def make_whole(self, root):
        root.mkdir()
        path = root / 'p'
        path.touch()
        os.setxattr(path, 'user.hitrain.dtype', b'f32')
        path.write_bytes(os.urandom(BLOCKS * MIB))
        os.setxattr(root, 'user.hitrain.optimizer', b'adamw lr=1e-3')
        (root / '.hitrain/grad/p').write_bytes(b'\0\0\x80?' * (BLOCKS * MIB // 4))
        self.tell(root, 'step')
        self.tell(root, 'snapshot')

    @staticmethod
    def tell(root, line):
        with open(root / '.hitrain/ctl', 'r+b', buffering=0) as ctl:
            ctl.write(f'{line}\n'.encode())

    def remove(self, roots):
        """A root has space for a whole next step of all that it names, also of other ranks' blocks."""
        for root in roots:
            self.tell(root, 'forget *')
            run('rm', '-r', root)

    def restore_ranks(self, url, name, ranks, olds, *options):
        """New roots of all ranks, and the bytes that they fetched. olds: the former root of each rank, or None."""
        roots, fetched = [], 0
        for r, old in enumerate(olds):
            roots.append(self.store.point / f'{name}{r}')
            about, _ = self.vault.ctl('restore', url, roots[-1], f'--shard={r}of{ranks}', *options, *([f'--base={old}'] if old else []))
            fetched += about['fetched_bytes']
            self.tell(roots[-1], 'snapshot')
        return roots, fetched

    def archive_ranks(self, roots):
        url = self.job()
        programs = [self.vault.start('archive', root, '1', url, f'--rank={r}of{len(roots)}', stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    for r, root in enumerate(roots)]
        for p in programs:
            if p.wait(SETUP_SECONDS_MAX):
                give_up(f'{" ".join(p.args)}: exit {p.returncode}')
        return url

    def elastic(self):
        self.start(slow=False)
        self.vault.device.slow(False)
        whole, count = self.store.point / 'whole', 3 * BLOCKS * MIB
        self.make_whole(whole)
        fours, fetched = self.restore_ranks(self.archive_ranks([whole]), 'four', 4, [None] * 4)
        assert 0 <= fetched - count < MIB, 'each block has one owner, and all have a number of steps'
        threes, fetched = self.restore_ranks(self.archive_ranks(fours), 'three', 3, [fours[0], fours[1], fours[3]], '--lost=2')
        self.remove([whole])
        self.figure('4 ranks lose one: bytes fetched, of the least', fetched / (count / 4), '', ELASTIC_MAX)
        url = self.archive_ranks(threes)
        self.remove(fours)
        _, fetched = self.restore_ranks(url, 'eight', 8, [*threes, *[None] * 5])
        self.figure('3 ranks become 8: bytes fetched, of the least', fetched / (count * 5 / 8), '', ELASTIC_MAX)
        self.store.stop()


# ---- a copy that follows ----

class Follow(step_follow.Pair):
    def __init__(self, args, folder, vault):
        super().__init__(args, folder)
        self.vault, self.jobs = vault, 0

    def through_vault(self):
        """Seconds from step to step of the copy, and bytes put for one."""
        self.slow(True)
        shutil.rmtree(self.copy.point / 'model', ignore_errors=True)
        self.jobs += 1
        url, log = f'{self.vault.url}/follow{self.jobs}', self.vault.point.with_name('archiver')
        with open(log, 'w') as out:
            archiver = self.vault.start('archive', self.model.point / 'model', url, '--follow', '--log', stderr=out, stdout=out)
        wait_for(lambda: 'archived step' in log.read_text() or archiver.poll() is not None, 'the base is archived', seconds_max=SETUP_SECONDS_MAX)
        before, times = self.vault.bytes(), {}
        with self.vault.start('restore', url, self.copy.point / 'model', '--follow', '--json', stdout=subprocess.PIPE, text=True) as standby:
            for line in standby.stdout:
                about = json.loads(line)
                times[about['step']] = time.monotonic()
                if len(times) == step_follow.STEPS + 1:
                    break
            standby.terminate()
        end(archiver, log)
        last = sorted(times.values())[1:]          # the first one is the base
        return (last[-1] - last[0]) / (len(last) - 1), (self.vault.bytes() - before) / step_follow.STEPS


def follow(b):
    pair = Follow(b.args, b.folder, b.vault)
    pair.log_steps('f32', 4)
    rows = []
    for number in range(b.args.runs):
        own = pair.own()
        row = {'a free pipe': (pair.follow(0), max(own, pair.pipe(0)))}
        for name, slow in ('a limited vault', True), ('a vault without limits', False):
            b.vault.device.slow(slow)
            seconds, count = pair.through_vault()
            row[name] = seconds, max(own, count / min(b.vault.rates(256 * MIB)))
        rows.append(row)
        b.said(f'run {number + 1}: a step of the copy alone {own:.2f} s; ' + ', '.join(f'through {k} {s:.2f} s, bound {m:.2f} s' for k, (s, m) in row.items()))
    for name in rows[0]:
        b.figure(f'a copy that follows through {name}, of the slowest', statistics.median(m / s for s, m in (r[name] for r in rows)), '', RATE_MIN, most=False)
    pair.stop()


# ---- a vault of millions ----

def sim(b):
    found = {}
    for count in b.args.segments // 10, b.args.segments:
        folder = b.folder / f'sim{count}'
        for verb in 'make', 'list', 'gc', 'plan':
            said = run(sys.executable, SIM, verb, folder, count, seconds_max=1200)
            if said:
                found[verb, count] = json.loads(said)
        shutil.rmtree(folder)
        b.said(f'{count} segments: ' + ', '.join(f'{v} {found[v, count]["seconds"]:.1f} s, {found[v, count]["rss"] / MIB:.0f} MiB' for v in ('list', 'gc', 'plan')))
    small, large = b.args.segments // 10, b.args.segments
    for verb, name in ('list', 'a list of all'), ('gc', 'a collection'), ('plan', 'a plan of a restore'):
        b.figure(f'{name} of {large:,} segments', found[verb, large]['seconds'], 's')
        b.figure(f'{name}: time for each, of that with a tenth', found[verb, large]['seconds'] / found[verb, small]['seconds'] / 10, '', LINEAR_MAX)
        b.figure(f'{name}: memory', found[verb, large]['rss'] / MIB, 'MiB')
        b.figure(f'{name}: memory, of that with a tenth', found[verb, large]['rss'] / found[verb, small]['rss'] / 10, '', LINEAR_MAX)


PARTS = {'train': Bench.train, 'copy': Bench.copy, 'elastic': Bench.elastic, 'follow': follow, 'sim': sim}


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--runs', type=int, default=3)
    p.add_argument('--steps', type=int, default=6, help='of each measurement of training')
    p.add_argument('--elements', type=int, default=16 * MIB, help=f'parameters, in {FILES} files')
    p.add_argument('--limit', type=int, default=300 * MIB, help='bytes per second each way, of a store')
    p.add_argument('--vault-limit', type=int, default=75 * MIB, help='the same of the vault')
    p.add_argument('--segments', type=int, default=3000000, help='of the vault that is made up')
    p.add_argument('--only', default=','.join(PARTS), help='parts, with commas between')
    return p.parse_args()


def main():
    args = parse_args()
    check_elements(args, FILES)
    parts = parts_of(args.only, PARTS)
    b = Bench(args, begin('vault'))
    print(f'bench-vault: {args.elements / 1e6:.0f} million f32 parameters in {FILES} files, AdamW, {args.runs} runs, store limited to '
          f'{args.limit / MIB:.0f} MiB/s each way, vault to {args.vault_limit / MIB:.0f}\n  {machine()}', flush=True)
    b.store.format()
    for part in parts:
        PARTS[part](b)
    b.end(BUILD / 'bench/vault.jsonl')


if __name__ == '__main__':
    main()
