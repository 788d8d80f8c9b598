#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Space that content takes, the time until it does, and cold reads afterwards, beside btrfs and XFS.

Run it with `make bench-space`, as root. Every system gets the same files on an equal loop device:

    checkpoints  ten checkpoints of one model, each with another contiguous 1 % changed
    copy         random bytes, and the same again
    weights      bf16 weights of a model that was trained here, repeated up to the size
    moments      its f32 first and second moments, in the same way
    random       random bytes

hitrain has deduplication and compression on; btrfs has compress=zstd; XFS has reflinks, and duperemove runs after the
files were written. Space is what the file system counts, after its engines have settled. The time begins with the first
write and ends there. Then the device is limited, and files are read cold; hitrain also reads such weights, moments and
random bytes without compression, in turns. On the limited device it compares a copy with its origin, too: the rate at
which it reads both, beside the limit. SIZE= in the environment is the size of the copy in MiB (512); all else
follows from it. STEPS= is how long the model is trained (1,000 steps). A row of a system that is not installed here says
so. Figures in space.jsonl.
"""
import argparse
import atexit
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

import numpy as np

from common import BUILD, PROGRAMS, TOP, SpeedLimit, begin, is_mounted, make_loop_device, run, wait_for

MIB = 1 << 20
CHECKPOINTS, CHANGED, TURN = 10, 0.01, 4096 + 12
SETTLE_SECONDS_MAX = 240
DUPEREMOVE_SECONDS_MAX = 90
TARGETS = {'checkpoints': 'at most 1.15 of one', 'copy': 'at most 1.001 of one', 'weights': '1.4 : 1', 'moments': 'none',
           'random': 'none'}
KINDS = list(TARGETS)
DECODE_TARGET, READ_TARGET, SAME_TARGET, HASH_TARGET, DEVICE_TARGET = 1.5, 1.25, 0.97, 2.0, 0.9
RAW = {'raw': 'weights', 'raw-moments': 'moments', 'raw-random': 'random'}


# ------------------------------------------------------------------ content

def train(steps, said):
    """bf16 weights, and f32 moments, of the demo's model after so many steps of AdamW."""
    sys.path.insert(0, str(TOP / 'optim/torch'))
    import demo_gpt
    import torch
    model, text = demo_gpt.GPT(1), demo_gpt.Text(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group['lr'] = demo_gpt.learning_rate(step, steps, 1e-3)
        loss = model(*text.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not (step + 1) % 100:
            said(f'trained for {step + 1} of {steps} steps, loss {loss.item():.2f}')
    bf16 = [p.detach().to(torch.bfloat16).view(torch.int16).flatten().numpy().tobytes() for p in model.parameters()]
    moments = [optimizer.state[p][name].flatten().numpy().tobytes()
               for name in ('exp_avg', 'exp_avg_sq') for p in model.parameters()]
    return b''.join(bf16), b''.join(moments), loss.item()


def repeated(data, size):
    """Whole copies. They begin at different places of their chunks, so deduplication finds none of them."""
    return data * max(1, size // len(data))


def turned(data):
    """The same elements from another one on: no chunk of it is a duplicate."""
    return data[TURN:] + data[:TURN]


class Content:
    def __init__(self, size, steps, said):
        self.rng = np.random.default_rng(1)
        weights, moments, self.loss = train(steps, said)
        self.model = self.rng.bytes(size // 4)
        self.files = {
            'copy': self.rng.bytes(size),
            'weights': repeated(weights, size // 4),
            'moments': repeated(moments, size // 4),
            'random': self.rng.bytes(size // 4),
        }
        for raw, kind in RAW.items():
            self.files[raw] = turned(self.files[kind])
        self.changes = [self.rng.bytes(int(len(self.model) * CHANGED)) for _ in range(CHECKPOINTS - 1)]

    def checkpoints(self):
        """Each is the one before with another 1 % changed."""
        now = bytearray(self.model)
        yield now
        for n, change in enumerate(self.changes):
            at = (n * 0.1 + 0.037) * len(now)
            now[int(at):int(at) + len(change)] = change
            yield now

    def write(self, kind, folder):
        """Returns the bytes written."""
        if kind == 'checkpoints':
            parts = self.checkpoints()
        else:
            parts = [self.files[kind]] * (2 if kind == 'copy' else 1)
        written = 0
        for n, data in enumerate(parts):
            (folder / f'{kind}{n}').write_bytes(data)
            written += len(data)
        return written

    def largest(self):
        return CHECKPOINTS * len(self.model) + sum(map(len, self.files.values())) + 2 * len(self.files['copy'])


# ------------------------------------------------------------------ systems

class Kernel:
    """A file system of the kernel, and what runs after its files were written."""

    programs, options, kinds, reads = (), '', KINDS, ('weights', 'copy')

    def __init__(self, device, point, group):
        self.device, self.point, self.group, self.notes = device, point, group, []
        atexit.register(self.unmount)

    def missing(self):
        absent = [p for p in self.programs if not shutil.which(p, path=f'{os.environ["PATH"]}:/usr/sbin:/sbin')]
        if absent:
            return f'{", ".join(absent)}: not installed'
        with open('/proc/filesystems') as f:
            return '' if self.name in f.read().split() else f'this kernel has no {self.name}'

    def mount(self):
        run('mount', '-t', self.name, *(['-o', self.options] if self.options else []), self.device, self.point)

    def unmount(self):
        if is_mounted(self.point):
            run('umount', self.point, seconds_max=SETTLE_SECONDS_MAX)

    def used(self):
        run('sync', '-f', self.point)
        st = os.statvfs(self.point)
        return (st.f_blocks - st.f_bfree) * st.f_frsize

    def settle(self, folder):
        run('sync', '-f', self.point, seconds_max=SETTLE_SECONDS_MAX)

    def folder(self, kind):
        made = self.point / kind
        made.mkdir()
        return made

    def forget(self, *paths):
        """From here on the files are cold."""
        self.unmount()
        self.mount()

    def read(self, first, path):
        return float(self.group_run(sys.executable, '-c', READER, first, path))

    def group_run(self, *args):
        return run(*args, seconds_max=SETTLE_SECONDS_MAX, preexec_fn=self.group.enter)


READER = '''
import sys, time
into = bytearray(1 << 20)
def read(path):
    began, n = time.monotonic(), 0
    with open(path, 'rb', buffering=0) as f:
        while got := f.readinto(into):
            n += got
    return n / (time.monotonic() - began)
read(sys.argv[1])
print(read(sys.argv[2]))
'''


class Btrfs(Kernel):
    name, programs, options = 'btrfs', ('mkfs.btrfs',), 'compress=zstd'

    def format(self):
        run('mkfs.btrfs', '-q', '-f', '-K', self.device)


class Xfs(Kernel):
    name, programs = 'xfs', ('mkfs.xfs', 'duperemove')

    def format(self):
        run('mkfs.xfs', '-q', '-f', '-K', '-m', 'reflink=1', self.device)

    def settle(self, folder):
        run('sync', '-f', self.point, seconds_max=SETTLE_SECONDS_MAX)
        try:
            subprocess.run(['duperemove', '-q', '-r', '-d', '-b', '64k', '--dedupe-options=partial', folder], check=False,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=DUPEREMOVE_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.notes.append(f'duperemove of {folder.name} was ended after {DUPEREMOVE_SECONDS_MAX} s')
        super().settle(folder)


class Hitrain(Kernel):
    """Some contents come a second time and stay uncompressed."""

    name, kinds = 'hitrain', [*KINDS, *RAW]
    reads = ('weights', 'raw', 'copy', 'moments', 'raw-moments', 'random', 'raw-random')
    options = 'dram=256M,compress=off,compress_after=1,commit=1,background_rate=8G'
    daemon = None

    def missing(self):
        return ''

    def format(self):
        run(PROGRAMS / 'mkfs.hitrain', '--force', '--no-discard', self.device)

    def mount(self):
        self.daemon = subprocess.Popen([PROGRAMS / 'hitrain', '-f', self.device, self.point, '-o', self.options],
                                       preexec_fn=self.group.enter, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda: is_mounted(self.point), 'mount')

    def unmount(self):
        super().unmount()
        if self.daemon:
            self.daemon.wait()
            self.daemon = None

    def folder(self, kind):
        made = super().folder(kind)
        dtype = {'weights': b'bf16', 'moments': b'f32'}.get(RAW.get(kind, kind))
        if dtype:
            os.setxattr(made, 'user.hitrain.dtype', dtype)
        os.setxattr(made, 'user.hitrain.compress', b'off' if kind in RAW else b'auto')
        return made

    def engines(self):
        out = json.loads(run(PROGRAMS / 'hitrainctl', 'background', 'status', self.point, '--json'))['engines']
        return {e['engine']: e for e in out}

    def work(self):
        e = self.engines()
        return [e[name][figure] for name, figure in (('dedup', 'compared_bytes'), ('dedup', 'passes'), ('recompress', 'chunks'),
                                                     ('recompress', 'kept_raw'))]

    def settle(self, folder):
        """Until neither engine has done anything for 4 s: compression looks each second, and begins at the second look."""
        run(PROGRAMS / 'hitrainctl', 'commit', self.point)
        end, last, since = time.monotonic() + SETTLE_SECONDS_MAX, None, time.monotonic()
        while time.monotonic() - since < 4 and time.monotonic() < end:
            now = self.work()
            if now != last:
                last, since = now, time.monotonic()
            time.sleep(0.2)
        run(PROGRAMS / 'hitrainctl', 'commit', self.point)
        return time.monotonic() - since

    def compare(self, data, limit):
        """Two files with this content: the engine's reads of both while it compares, in bytes a second. The first quarter
        does not count: an idle device may have saved some of its limit."""
        run(PROGRAMS / 'hitrainctl', 'background', 'pause', self.point)
        folder = super().folder('compare')
        os.setxattr(folder, 'user.hitrain.compress', b'off')
        for name in 'origin', 'copy':
            (folder / name).write_bytes(data)
        run(PROGRAMS / 'hitrainctl', 'commit', self.point)
        self.group.set(limit)
        run(PROGRAMS / 'hitrainctl', 'background', 'resume', self.point)
        seen, end = [], time.monotonic() + SETTLE_SECONDS_MAX
        first = last = self.engines()['dedup']['compared_bytes']
        while last - first < 2 * len(data) * 0.95 and time.monotonic() < end:
            now = self.engines()['dedup']['compared_bytes']
            if now > last and now - first > 2 * len(data) / 4:
                seen.append((time.monotonic(), now))
            last = now
            time.sleep(0.05)
        self.group.set(0)
        (from_at, from_bytes), (to_at, to_bytes) = seen[0], seen[-1]
        return (to_bytes - from_bytes) / (to_at - from_at)

    def used(self):
        run(PROGRAMS / 'hitrainctl', 'commit', self.point)
        st = os.statvfs(self.point)
        return (st.f_blocks - st.f_bfree) * st.f_frsize

    def forget(self, *paths):
        for path in paths:
            run(PROGRAMS / 'hitrainctl', 'evict', path)


SYSTEMS = Hitrain, Btrfs, Xfs


# ------------------------------------------------------------------ a run

def one_of(kind, content):
    """The bytes of one: of a checkpoint, of a copy, or of all."""
    return len(content.model) if kind == 'checkpoints' else len(content.files[kind])


def fill(system, content, said):
    """Rows of a system: space and seconds of each kind of content."""
    rows = []
    system.format()
    system.mount()
    for kind in system.kinds:
        folder, before, began = system.folder(kind), system.used(), time.monotonic()
        written = content.write(kind, folder)
        waited = system.settle(folder) or 0
        seconds = time.monotonic() - began - waited
        space = system.used() - before
        rows.append({'system': system.name, 'kind': kind, 'written': written, 'space': space, 'seconds': seconds,
                     'of_one': space / one_of(kind, content)})
        said(f'{system.name}: {kind}: {written / MIB:.0f} MiB take {space / MIB:.1f} MiB after {seconds:.1f} s')
    return rows


def read_all(system, group, limit, runs, said):
    """Cold reads of some kinds in turns, on the limited device. Another file comes first: the limit of an idle device
    lets a few MiB pass."""
    rows, first = [], system.point / 'checkpoints/checkpoints0'
    for number in range(runs):
        for kind in system.reads:
            path = system.point / kind / f'{kind}0'
            group.set(0)
            system.forget(first, path)
            group.set(limit)
            rows.append({'system': system.name, 'kind': kind, 'run': number, 'read_bytes_per_s': system.read(first, path)})
    group.set(0)
    for kind in system.reads:
        said(f'{system.name}: reads {kind} with {rate(rows, system.name, kind) / MIB:.0f} MiB/s')
    return rows


def rate(rows, system, kind):
    found = [r['read_bytes_per_s'] for r in rows if (r['system'], r['kind']) == (system, kind)]
    return statistics.median(found) if found else None


def speeds_in_memory(folder, content):
    """GB/s of one core by build/bench/bench_codec: decoding, hashing, comparing."""
    path = folder / 'weights'
    path.write_bytes(content.files['weights'][:64 * MIB])
    text = run(BUILD / 'bench/bench_codec', path)
    path.unlink()
    found = {name: re.search(rf'{name} +([\d.]+)', text) for name in ('decode', 'hashing', 'comparing')}
    return {name: float(match[1]) if match else 0.0 for name, match in found.items()}


def over_raw(reads, raw):
    """How fast its content was read that may be compressed, beside the same that stays raw."""
    return rate(reads, 'hitrain', RAW[raw]) / rate(reads, 'hitrain', raw)


def tell(spaces, reads, memory, compared, absent):
    print(f'\n  {"":14}' + ''.join(f'{name:>24}' for name in ('hitrain', 'btrfs', 'xfs')) + '   target of hitrain')
    for kind in KINDS:
        line = f'  {kind:14}'
        for name in 'hitrain', 'btrfs', 'xfs':
            found = [r for r in spaces if (r['system'], r['kind']) == (name, kind)]
            line += f'{found[0]["of_one"]:14.3f}, {found[0]["seconds"]:6.1f} s' if found else f'{"-":>24}'
        print(f'{line}   {TARGETS[kind]}')
    for kind in 'weights', 'copy':
        line = f'  {"reads " + kind:14}'
        for name in 'hitrain', 'btrfs', 'xfs':
            found = rate(reads, name, kind)
            line += f'{found / MIB:18.0f} MiB/s' if found else f'{"-":>24}'
        print(line)
    gains = {RAW[raw]: over_raw(reads, raw) for raw in RAW}
    weights = next(1 / r['of_one'] for r in spaces if (r['system'], r['kind']) == ('hitrain', 'weights'))
    print('\n  Space over that of one, raw; seconds until it is so.')
    for name, why in absent.items():
        print(f'  {name}: {why}')
    print(f'\n  trained weights                       {weights:6.2f} : 1   target 1.4\n'
          f'  decoding, one core                    {memory["decode"]:6.2f} GB/s  target {DECODE_TARGET}\n'
          f'  hashing, one core                     {memory["hashing"]:6.2f} GB/s  target {HASH_TARGET}\n'
          f'  comparing, one core                   {memory["comparing"]:6.2f} GB/s  target {HASH_TARGET}\n'
          f'  comparing over the device             {compared:6.2f}       target {DEVICE_TARGET}\n'
          f'  cold reads of compressed over raw     {gains["weights"]:6.2f}       target {READ_TARGET}\n'
          f'  the same of moments                   {gains["moments"]:6.2f}       target {SAME_TARGET}\n'
          f'  the same of random bytes              {gains["random"]:6.2f}       target {SAME_TARGET}')
    return {'weights': weights, 'memory_gb_per_s': memory, 'compare_over_device': compared, 'reads_over_raw': gains,
            'absent': absent}


def parse_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--runs', type=int, default=3, help='of the reads')
    p.add_argument('--size', type=int, default=int(os.environ.get('SIZE', 512)), help='MiB of the copy')
    p.add_argument('--steps', type=int, default=1000, help='of the training')
    p.add_argument('--limit', type=int, default=300 * MIB, help='bytes per second while reading')
    return p.parse_args()


def main():
    args = parse_args()
    out = BUILD / 'bench/space.jsonl'
    folder, began = begin('space'), time.monotonic()

    def said(text):
        print(f'  {time.monotonic() - began:5.0f} s  {text}', flush=True)

    content = Content(args.size * MIB, args.steps, said)
    said('the contents are made')
    memory, compared = speeds_in_memory(folder, content), 0.0
    spaces, reads, absent = [], [], {}
    for make in SYSTEMS:
        image, point = folder / f'image-{make.name}', folder / make.name
        point.mkdir()
        device = make_loop_device(image, content.largest() // MIB * MIB * 5 // 4 + 512 * MIB)
        atexit.register(run, 'losetup', '--detach', device)
        group = SpeedLimit(device, name=f'hitrain-bench-{make.name}')
        atexit.register(group.remove)
        system = make(device, point, group)
        why = system.missing()
        if why:
            absent[system.name] = why
            continue
        spaces += fill(system, content, said)
        reads += read_all(system, group, args.limit, args.runs, said)
        if isinstance(system, Hitrain):
            compared = system.compare(content.rng.bytes(args.size // 2 * MIB), args.limit) / args.limit
            said(f'hitrain: compares a copy at {compared:.2f} of the device')
        if system.notes:
            absent[system.name] = '; '.join(system.notes)
        system.unmount()
        os.truncate(image, 0)
    figures = tell(spaces, reads, memory, compared, absent)
    out.write_text(''.join(json.dumps(r) + '\n' for r in [*spaces, *reads, figures]))
    print(f'  all figures: {out}')


if __name__ == '__main__':
    main()
