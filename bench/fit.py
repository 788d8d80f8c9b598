#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Training what does not fit: hitrain.offload() beside everything in memory, recomputation, XFS and DeepSpeed.

Run it with `make bench-fit`, as root. A GPT trains on a loop device that is limited to the same speed for reads and for writes.
Trainer and daemon are in one memory cgroup, which has an eighth of parameters, gradients, state and activations, beside what
Python and PyTorch take. The bound of a step is the larger of two times: that of the step in memory, and bytes that must move over
the device's rate. Several micro-batches have a bound of their own. PyTorch 2 and DeepSpeed are those of `make check-ecosystem`.
Without that environment the system's PyTorch runs, if it can save tensors by hooks. Medians of runs that take turns; all figures are
in build/bench/fit.jsonl.
"""
import argparse
import atexit
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

from common import BUILD, PROGRAMS, TOP, begin, give_up, is_mounted, machine, run, wait_for
from step import Device, fio

sys.path[:0] = [str(TOP / 'optim/torch'), str(TOP / 'tests/tools')]
import ecosystem

MIB = 1 << 20
SHARE = 8  # everything is so many times the memory
SECONDS_MAX = 900
STATE_BYTES = {'f32': 8, 'bf16': 10}  # moments, and of bf16 the low bits of the masters
ITEM_BYTES = {'f32': 4, 'bf16': 2}
IN_GROUP = ('offload', 'vertical', 'XFS', 'fast', 'deepspeed')
MICRO = {'memory of 4': 4, 'vertical': 4, 'deepspeed': 4}  # micro-batches, whose activations are in the sum
CASES = ('memory', 'checkpoint', 'activations', 'activations on XFS', 'read back', 'offload', 'memory of 4', 'vertical', 'XFS', 'fast', 'deepspeed')
FAST = 1.25  # the fast device has so many times the rate at which it would be as fast as memory
READ_BACK_DRAM = 64 << 20


class Group:
    """A memory cgroup, as that of demo_fit.py."""

    def __init__(self, name, limit=None):
        self.v1 = os.path.isdir('/sys/fs/cgroup/memory')
        self.folder = pathlib.Path('/sys/fs/cgroup', 'memory' if self.v1 else '', f'{name}-{os.getpid()}')
        try:
            self.folder.mkdir()
            if limit:
                (self.folder / ('memory.limit_in_bytes' if self.v1 else 'memory.max')).write_text(str(limit))
        except OSError as e:
            give_up(f'no cgroup here limits memory: {e}')
        atexit.register(self.remove)

    def enter(self):
        (self.folder / 'cgroup.procs').write_text(str(os.getpid()))

    def peak(self):
        path = self.folder / ('memory.max_usage_in_bytes' if self.v1 else 'memory.peak')
        return int(path.read_text()) if path.exists() else 0

    def remove(self):
        def is_gone():
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:  # a member that is still ending
                return False
            return True
        wait_for(is_gone, f'the end of {self.folder}')


def environment(python):
    """glibc's heap keeps pages of large tensors that are gone; mappings of their own go back."""
    return {**os.environ, **ecosystem.variables(pathlib.Path(python).parents[1]), 'MALLOC_MMAP_THRESHOLD_': '131072'}


class Bench:
    def __init__(self, args, folder, python):
        self.args, self.folder, self.python = args, folder, python
        self.limit = self.base = self.fast = self.saved = self.deepspeed_base = None
        size = max(args.parameters * 64, 2 << 30)
        self.device = Device(folder, size, args.limit)
        self.point = folder / 'mnt'
        self.point.mkdir()

    # -- a trainer --

    def train(self, kind, folder=None, group=None, **more):
        a = {'width': self.args.width, 'layers': self.args.layers, 'batch': 1, 'micro': 1, 'steps': self.args.steps, 'keep': self.args.keep,
             'activations': self.args.activations, 'device': self.device.path, **more}
        words = [f'--{k}={v}' for k, v in a.items() if v is not True] + [f'--{k}' for k, v in a.items() if v is True]
        command = [self.python, TOP / 'bench/fit_trainer.py', kind, f'--dtype={self.args.dtype}', *words, *([f'--folder={folder}'] if folder else [])]

        def enter():
            self.device.group.enter()
            if group:
                group.enter()
        with subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              start_new_session=True, preexec_fn=enter, env=environment(self.python)) as process:
            try:
                said, why = process.communicate(timeout=SECONDS_MAX if kind != 'deepspeed' else self.args.deepspeed_seconds)
            except subprocess.TimeoutExpired as e:
                os.killpg(process.pid, signal.SIGKILL)
                return {'failed': f'no end within {e.timeout:.0f} s'}
        if process.returncode == -signal.SIGKILL:
            return {'failed': 'killed: the memory of its cgroup does not suffice'}
        if process.returncode:
            return {'failed': f'status {process.returncode}: {(why.strip().splitlines() or [""])[-1]}'}
        return json.loads(said.splitlines()[-1])

    # -- places --

    def on_store(self, kind, dram, group=None, **more):
        self.device.slow(False)
        run(PROGRAMS / 'mkfs.hitrain', '--force', '--no-discard', self.device.path)

        def enter():
            self.device.group.enter()
            if group:
                group.enter()
        with open(self.folder / 'log', 'w') as log:
            daemon = subprocess.Popen([PROGRAMS / 'hitrain', '-f', self.device.path, self.point, '-o', f'dram={dram},staging={self.args.staging}'],
                                      stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=enter)
        try:
            wait_for(lambda: daemon.poll() is not None or is_mounted(self.point), 'mounting')
            if daemon.poll() is not None:
                give_up((self.folder / 'log').read_text())
            self.device.slow(True)
            out = self.train(kind, self.point, group, daemon=daemon.pid, **more)
        finally:
            self.device.slow(False)
            if is_mounted(self.point):
                run('umount', self.point, seconds_max=SECONDS_MAX)
            daemon.wait(SECONDS_MAX)
        out['fsck'] = subprocess.run([PROGRAMS / 'hitrain-fsck', '-n', self.device.path], stdout=subprocess.DEVNULL, check=False).returncode
        return out

    def on_xfs(self, kind, group=None, **more):
        self.device.slow(False)
        run('mkfs.xfs', '-f', '-K', self.device.path)
        run('mount', self.device.path, self.point)
        try:
            self.device.slow(True)
            return self.train(kind, self.point, group, buffered=True, **more)
        finally:
            self.device.slow(False)
            run('umount', self.point, seconds_max=SECONDS_MAX)

    # -- cases --

    @contextlib.contextmanager
    def speed(self, limit):
        self.device.limit, before = limit, self.device.limit
        try:
            yield
        finally:
            self.device.limit = before

    def rate(self, limit, size=256 * MIB):
        """What the device gives, each way, when it is limited to this."""
        with self.speed(limit):
            seconds = fio(self.device, size, size)
            self.device.slow(False)
        return size / seconds

    def one(self, case):
        """In a cgroup of its own, so that its peak is its own."""
        micro = MICRO.get(case, 1)
        limit = self.limit + (micro - 1) * self.saved // SHARE if case in IN_GROUP else None
        if case == 'deepspeed':
            if self.deepspeed_base is None:
                self.deepspeed_base = self.one('deepspeed-base').get('group_peak', self.base)
            limit += self.deepspeed_base - self.base
        group = Group('hitrain-fit', limit)
        try:
            if case in ('memory', 'memory of 4', 'checkpoint', 'base', 'deepspeed-base'):
                out = self.train(case.split()[0], group=group, micro=micro)
            elif case == 'plain':
                out = self.on_store('plain', 16 * self.args.parameters + (64 << 20))
            elif case == 'activations':
                out = self.on_store('activations', 1 << 30, activations=self.args.alone)
            elif case == 'activations on XFS':
                out = self.on_xfs('activations', group, activations=self.args.alone)
            elif case == 'read back':
                out = self.on_store('readback', READ_BACK_DRAM)
            elif case == 'fast':
                with self.speed(self.fast):
                    out = self.on_store('offload', self.args.dram, group)
            elif case in ('offload', 'vertical'):
                out = self.on_store(case, self.args.dram, group, micro=micro)
            else:
                out = self.on_xfs(case.lower(), group, micro=micro)
            out['group_peak'] = group.peak()
            return out
        finally:
            group.remove()

    def find_limit(self, saved):
        base = self.one('base')
        if 'failed' in base:
            give_up(f'no trainer runs here: {base["failed"]}')
        n = self.args.parameters
        self.saved = saved
        everything = n * (2 * ITEM_BYTES[self.args.dtype] + STATE_BYTES[self.args.dtype]) + saved
        self.base, self.limit = base['group_peak'], base['group_peak'] + everything // SHARE
        return everything


def must_move(args, saved):
    """Bytes that no trainer with so little memory avoids, to be read and to be written."""
    item, state, n = ITEM_BYTES[args.dtype], STATE_BYTES[args.dtype], args.parameters
    moved, held = max(0, saved - args.activations), args.keep + args.dram
    return max(0, n * (2 * item + state) + moved - held), max(0, n * (item + state) + moved - held)


def bound(args, memory_s, saved, rate):
    """The time of a step, and how it is composed."""
    item, state, n = ITEM_BYTES[args.dtype], STATE_BYTES[args.dtype], args.parameters
    moved, held = max(0, saved - args.activations), args.keep + args.dram
    reads, writes = must_move(args, saved)
    seconds = max(memory_s, reads / rate, writes / rate)
    print(f'  read: {n * item / MIB:.0f} MiB of parameters for forward, as many for backward, {n * state / MIB:.0f} of state, {moved / MIB:.0f} of '
          f'activations,\n    less {held / MIB:.0f} that memory may hold: {reads / MIB:.0f} MiB\n'
          f'  written: {n * (item + state) / MIB:.0f} MiB of parameters and state, {moved / MIB:.0f} of activations, less as many: {writes / MIB:.0f} MiB\n'
          f'  bound = max(compute {memory_s:.2f} s, {reads / MIB:.0f} / {rate / MIB:.0f} MiB/s = {reads / rate:.2f} s, {writes / MIB:.0f} / '
          f'{rate / MIB:.0f} MiB/s = {writes / rate:.2f} s) = {seconds:.2f} s')
    return seconds


def column(value, decimals):
    return f'{"" if value != value else format(value, f".{decimals}f"):>10}'


def report(args, runs, reference, bench, rate):
    def median(case, key):
        values = [v for r in runs[case] if key in r for v in (r[key] if isinstance(r[key], list) else [r[key]])]
        return statistics.median(values) if values else NONE
    saved, limit_s = median_saved(runs), {}
    for micro in sorted({MICRO.get(case, 1) for case in runs}):
        name = 'memory' if micro == 1 else f'memory of {micro}'
        limit_s[micro] = NONE, NONE
        if is_known(runs, f'the bound of {micro} micro-batch{"es" * (micro > 1)}', name):
            print(f'bound of {micro} micro-batch{"es" * (micro > 1)}:')
            memory_s = median(name, 'seconds')
            limit_s[micro] = memory_s, bound(args, memory_s, micro * saved, rate)
    print(f'\n{"":20}{"s a step":>10}{"/ memory":>10}{"/ bound":>10}{"peak MiB":>10}{"read":>10}{"written":>10}{"trainer":>10}{"daemon":>10}')
    print(f'{"":60}{"MiB of the device a step":>20}{"processor s a step":>20}')
    for case, rows in runs.items():
        failed = [r['failed'] for r in rows if 'failed' in r]
        if failed:
            print(f'{case:20}{len(failed)} of {len(rows)} runs skipped or failed: {failed[0][:WHY_MAX]}')
        if len(failed) == len(rows) or case == 'read back':
            continue
        s, (memory_s, least_s) = median(case, 'seconds'), limit_s[MICRO.get(case, 1)]
        in_group = case in IN_GROUP
        columns = [(s, 2), (s / memory_s, 2), (s / least_s if in_group and case != 'fast' else NONE, 2), (median(case, 'group_peak' if in_group else 'peak') / MIB, 0),
                   (median(case, 'read') / MIB, 0), (median(case, 'written') / MIB, 0), (median(case, 'trainer_busy'), 2), (median(case, 'daemon_busy'), 2)]
        print(f'{case:20}{"".join(column(*c) for c in columns)}' + ('' if case not in ('offload', 'fast') else f'  {same_bits(rows, reference)}'))
    print_shares(runs, median, bench, rate)


def median_saved(runs):
    figures = [r['activations'] for r in runs['activations'] if 'activations' in r]
    return int(statistics.median(f['saved_bytes'] for f in figures) / (WARM + STEPS[0])) if figures else 0


WARM, STEPS = 3, [0]
WHY_MAX = 200
NONE = float('nan')  # no figure


def same_bits(rows, reference):
    if 'failed' in reference:
        return f'bits not compared: the reference failed: {reference["failed"][:WHY_MAX]}'
    rows = [r for r in rows if 'failed' not in r]
    ok = all(r.get('digest') == reference.get('digest') and r.get('losses') == reference.get('losses') for r in rows)
    return 'the bits of the model in memory' if ok else 'OTHER BITS than the model in memory'


def busy_beside_memory(case, median):
    """Processor time of trainer and daemon."""
    return (median(case, 'trainer_busy') + median(case, 'daemon_busy')) / median('memory', 'trainer_busy')


def is_known(runs, what, *cases):
    """Has each of these arrangements a figure? Otherwise prints which one has none, and why."""
    why = [f'{case}: {next((r["failed"] for r in runs[case] if "failed" in r), "it printed no figures")[:WHY_MAX]}'
           for case in cases if not any('seconds' in r for r in runs[case])]
    if why:
        print(f'{what} is not known. There is no figure of {"; ".join(why)}')
    return not why


def print_shares(runs, median, bench, rate):
    held = [r['activations'] for r in runs['activations'] if r.get('activations', {}).get('saved_bytes')]
    if held:
        passes = WARM + STEPS[0]
        share = statistics.median(f['held_bytes_max'] / (f['saved_bytes'] / passes) for f in held)
        print(f'\nactivations alone: {median("memory", "seconds") / median("activations", "seconds"):.2f} of the speed in memory, at most {share:.2f} of the '
              f'bytes held, {median("activations", "written") / MIB:.0f} MiB of the device written')
        print(f'  processors work {busy_beside_memory("activations", median):.2f} times as long as in memory')
    if 'read back' in runs and is_known(runs, 'the rate at which saved tensors are read back', 'read back'):
        got = median('read back', 'read') / median('read back', 'seconds')
        print(f'saved tensors are read back at {got / MIB:.0f} MiB/s, {got / rate:.2f} of the device')
    if 'fast' in runs and is_known(runs, 'the speed with everything on a fast device', 'memory', 'fast'):
        print(f'everything on a device of {bench.fast / MIB:.0f} MiB/s (it gives {bench.fast_rate / MIB:.0f}): '
              f'{median("memory", "seconds") / median("fast", "seconds"):.2f} of the speed in memory')
        least = busy_beside_memory('fast', median)
        print(f'  processors work {least:.2f} times as long as in memory: with no wait for the device it would be {1 / least:.2f} of that speed')
    if {'offload', 'vertical'} <= set(runs) and is_known(runs, 'the parameter bytes of vertical order', 'offload', 'vertical'):
        one, four = (statistics.median(r['figures']['loaded_bytes'] for r in runs[c] if 'figures' in r) for c in ('offload', 'vertical'))
        print(f'4 micro-batches in vertical order: {four / one:.3f} times the parameter bytes of one')
    if {'deepspeed', 'vertical'} <= set(runs) and is_known(runs, 'the rate of tokens beside DeepSpeed', 'deepspeed', 'vertical'):
        config = next(r['config'] for r in runs['deepspeed'] if 'config' in r)
        print(f'tokens/s of vertical order beside DeepSpeed in the same memory: {median("deepspeed", "seconds") / median("vertical", "seconds"):.2f} times; '
              f'its settings: {json.dumps(config["zero_optimization"])}')
    if bench.limit:
        print(f'memory: {bench.limit / MIB:.0f} MiB, of which Python and PyTorch take {bench.base / MIB:.0f}')


def interpreter():
    """PyTorch 2, and DeepSpeed. (path, the missing part)"""
    path = ecosystem.place()
    if (path / 'complete').exists():
        return str(path / 'bin/python'), None
    probe = subprocess.run([sys.executable, '-c', 'import torch; torch.compiler'], stderr=subprocess.DEVNULL, check=False)
    if probe.returncode:
        give_up('PyTorch 2 is needed: `make check-ecosystem` makes its environment')
    return sys.executable, 'DeepSpeed is not there: `make check-ecosystem` makes its environment'


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--dtype', choices=ITEM_BYTES, default='f32')
    parser.add_argument('--width', type=int, default=640, help='a multiple of 64')
    parser.add_argument('--layers', type=int, default=25)
    parser.add_argument('--steps', type=int, default=2)
    parser.add_argument('--runs', type=int, default=1)
    parser.add_argument('--limit', type=int, default=300, help='MiB/s of the device, each way')
    parser.add_argument('--keep', type=int, default=32, help='MiB of parameters in the trainer')
    parser.add_argument('--activations', type=int, default=16, help='MiB of saved tensors in the trainer')
    parser.add_argument('--alone', type=int, default=40, help='MiB of these where nothing else is offloaded')
    parser.add_argument('--dram', type=int, default=32, help='MiB of the DRAM tier')
    parser.add_argument('--staging', default='24M')
    parser.add_argument('--deepspeed-seconds', type=int, default=300)
    parser.add_argument('--only', default=','.join(CASES))
    args = parser.parse_args()
    for name in ('limit', 'keep', 'activations', 'alone', 'dram'):
        setattr(args, name, getattr(args, name) * MIB)
    args.parameters = args.layers * (12 * args.width**2 + 4 * args.width) + args.width * (2 * 256 + 128 + 2)
    return args


def main():
    args = parse_args()
    STEPS[0] = args.steps
    cases = [c for c in CASES if c in args.only.split(',')]
    python, missing = interpreter()
    bench = Bench(args, begin('fit'), python)
    four = ['memory of 4'] * any(MICRO.get(c, 1) > 1 for c in cases)
    runs, began = {c: [] for c in dict.fromkeys(['memory', 'activations', *four, *cases])}, time.monotonic()
    print(f'bench-fit: a GPT of {args.parameters / 1e6:.0f} million {args.dtype} parameters, {args.runs} runs of {args.steps} steps. {machine()}', flush=True)

    def said(case, out):
        text = out.get('failed') or f'{statistics.median(out["seconds"]):.2f} s a step'
        print(f'  {time.monotonic() - began:5.0f} s  {case}: {text}', flush=True)
    with open(BUILD / 'bench/fit.jsonl', 'w') as log:
        reference = bench.one('plain')
        said('the reference', reference)
        rate = bench.rate(args.limit)
        for number in range(args.runs):
            for case in runs:
                if case in IN_GROUP and bench.limit is None:
                    everything = bench.find_limit(median_saved(runs))
                    print(f'  everything: {everything / MIB:.0f} MiB, the cgroup has {bench.limit / MIB:.0f} MiB: {SHARE} times {(bench.limit - bench.base) / MIB:.0f} '
                          f'beside Python and PyTorch', flush=True)
                if case == 'fast' and bench.fast is None:
                    bench.fast = int(FAST * max(must_move(args, median_saved(runs))) / statistics.median(runs['memory'][0]['seconds']))
                    bench.fast_rate = bench.rate(bench.fast, 1 << 30)
                out = {'failed': missing} if case == 'deepspeed' and missing else bench.one(case)
                runs[case].append(out)
                log.write(json.dumps({'run': number, 'case': case, **out}) + '\n')
                said(case, out)
                if case in ('memory', 'activations') and not any('seconds' in r for r in runs[case]):  # rates and limits follow them
                    give_up(f'no other arrangement can be measured without {case}: {out["failed"]}')
    report(args, runs, reference, bench, rate)
    print(f'{time.monotonic() - began:.0f} s; all figures are in {BUILD}/bench/fit.jsonl')


if __name__ == '__main__':
    main()
