#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The ways of data through the daemon: the functions, files and folders that each of five operations enters.

    make ways                      # builds build/ways, and then: tests/tools/ways.py build/ways
    tests/tools/ways.py BUILD -v   # with the functions

The build calls a hook at the begin of each function (gcc -finstrument-functions), also where the compiler has inlined
it. The hook is ways.c. Counted are the functions of fs, optim and tiering without tiering/base that most of RUNS runs of
the operation enter, less those that an idle mount enters in a second. What update threads do belongs to update and
commit. Needs root and /dev/fuse; takes some 20 seconds.
"""
import collections
import mmap
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOP = ('fs/', 'optim/', 'tiering/')
RUNS, SETTLE_S = 9, 0.05
PAGE, TEXT_BYTES_MAX, BY_UPDATE, BY_OTHERS = 4096, 1 << 24, 1, 2  # ways.c
AIMS = {'write': 30, 'fsync': None, 'gradient': 55, 'update, commit': 65, 'cold read': 45}


class Notes:
    """The functions that were entered, by address."""

    def __init__(self, path):
        path.write_bytes(b'')
        os.truncate(path, PAGE + TEXT_BYTES_MAX)
        with open(path, 'r+b') as f:
            self.bytes = mmap.mmap(f.fileno(), 0)

    def take(self, operation, prepare=lambda: None):
        """{address: BY_UPDATE | BY_OTHERS} of what runs during the operation, and until it has settled."""
        self.bytes[PAGE:] = bytes(TEXT_BYTES_MAX)
        prepare()
        self.bytes[0] = 1
        operation()
        time.sleep(SETTLE_S)
        self.bytes[0] = 0
        seen = self.bytes[PAGE:]
        return {m.start(): seen[m.start()] for m in re.finditer(rb'[^\0]', seen)}


class Mount:
    def __init__(self, build, folder, notes_path, library):
        self.build, self.folder, self.point = build, folder, folder / 'mnt'
        self.env = {**os.environ, 'LD_PRELOAD': str(library), 'HITRAIN_WAYS': str(notes_path)}
        self.point.mkdir()
        subprocess.run([build / 'bin/mkfs.hitrain', '--size=256M', folder / 'image'], check=True, stdout=subprocess.DEVNULL)

    def __enter__(self):
        command = [self.build / 'bin/hitrain', '-f', self.folder / 'image', self.point, '-o', 'dram=64M,staging=24M']
        self.daemon = subprocess.Popen(command, env=self.env, stderr=subprocess.DEVNULL)
        while not os.path.ismount(self.point):
            if self.daemon.poll() is not None:
                sys.exit(f'the daemon ended with {self.daemon.returncode}')
            time.sleep(0.02)
        return self.point

    def __exit__(self, *_):
        subprocess.run(['umount', self.point], check=True)
        self.daemon.wait(60)


def in_most(runs):
    seen = collections.Counter(at for run in runs for at in set(run))
    return {at for at, count in seen.items() if count > len(runs) / 2}


def file_ways(notes, mnt):
    """4 KiB of a file that was written before, and their fsync."""
    write, sync = [], []
    with open(mnt / 'file', 'wb', buffering=0) as f:
        for i in range(RUNS + 1):
            def put():
                os.pwrite(f.fileno(), bytes([i]) * 4096, 0)
            wrote = notes.take(put)
            synced = notes.take(lambda: os.fsync(f.fileno()), put)
            if i:
                write.append(wrote)
                sync.append(synced)
    return in_most(write), in_most(sync)


def model_ways(notes, mnt):
    """A gradient of 4 KiB of a model's only parameter, and its step."""
    model, gradients, commits = mnt / 'model', [], []
    model.mkdir()
    os.setxattr(model, 'user.hitrain.dtype', b'f32')
    os.setxattr(model, 'user.hitrain.optimizer', b'adamw lr=0.1')
    (model / 'w').write_bytes(bytes(4096))
    root = os.open(model, os.O_RDONLY)
    for i in range(RUNS + 1):
        gradient = notes.take(lambda: (model / '.hitrain/grad/w').write_bytes(bytes(4096)))
        commit = notes.take(lambda: os.fsync(root))
        if i:
            gradients.append(at for at, by in gradient.items() if by & BY_OTHERS)
            commits.append({*commit, *(at for at, by in gradient.items() if by & BY_UPDATE)})
    os.close(root)
    return in_most(gradients), in_most(commits)


def cold_way(notes, mnt):
    reads = []
    for i in range(RUNS + 1):
        with open(mnt / f'cold{i}', 'rb', buffering=0) as f:
            seen = notes.take(lambda: os.pread(f.fileno(), 1 << 20, 0))
        if i:
            reads.append(seen)
    return in_most(reads)


def measure(build, folder):
    library = folder / 'ways.so'
    subprocess.run(['cc', '-D_GNU_SOURCE', '-O2', '-Wall', '-shared', '-fPIC', '-o', library, HERE / 'ways.c'], check=True)
    notes = Notes(folder / 'notes')
    mount = Mount(build, folder, folder / 'notes', library)
    found = {}
    with mount as mnt:
        idle = set(notes.take(lambda: time.sleep(1)))
        found['write'], found['fsync'] = file_ways(notes, mnt)
        found['gradient'], found['update, commit'] = model_ways(notes, mnt)
        for i in range(RUNS + 1):
            (mnt / f'cold{i}').write_bytes(os.urandom(1 << 20))
    with mount as mnt:
        idle |= set(notes.take(lambda: time.sleep(1)))
        found['cold read'] = cold_way(notes, mnt)
    return {name: seen - idle for name, seen in found.items()}


def in_tree(root, path):
    """The path below the root; ccache may have compiled the file in another tree."""
    parts = pathlib.Path(path).parts[1:]
    return next((str(p) for p in (pathlib.Path(*parts[i:]) for i in range(len(parts))) if (root / p).is_file()), path)


def places(build, addresses):
    """{address: (function, file)}"""
    listed = sorted(addresses)
    text = subprocess.run(['addr2line', '-f', '-e', build / 'bin/hitrain'], input='\n'.join(map(hex, listed)), check=True,
                          capture_output=True, text=True).stdout.splitlines()
    files = (in_tree(build.parents[1], place.rsplit(':', 1)[0]) for place in text[1::2])
    return dict(zip(listed, zip(text[::2], files)))


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix='hitrain-ways-') as folder:
        ways = measure(build, pathlib.Path(folder))
    where = places(build, set().union(*ways.values()))
    for name, seen in ways.items():
        files = collections.defaultdict(list)
        for function, file in sorted({where[at] for at in seen}):  # an inline one has several addresses
            if file.startswith(TOP) and not file.startswith('tiering/base/'):
                files[file].append(function)
        folders = collections.Counter(os.path.dirname(file) for file in files)
        aim = f', aim {AIMS[name]}' if AIMS[name] else ''
        headers = sum(file.endswith('.h') for file in files)
        print(f'{name}: {sum(map(len, files.values()))} functions in {len(files) - headers} files{aim}, and {headers} headers, '
              f'of {len(folders)} folders')
        for folder in sorted(folders):
            inside = [f for f in sorted(files) if os.path.dirname(f) == folder]
            print(f'    {folder}: {" ".join(os.path.basename(f) for f in inside)}')
            for file in inside if '-v' in sys.argv else ():
                print(f'        {os.path.basename(file)}: {" ".join(files[file])}')


if __name__ == '__main__':
    sys.exit(main())
