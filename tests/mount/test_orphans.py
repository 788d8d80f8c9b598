# SPDX-License-Identifier: Apache-2.0
"""Removed directories, model roots and files that a program still uses: each read returns, also of the files that show
the mount as a whole. Then the store can be unmounted, and SIGTERM ends the daemon."""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import conftest
from calls import NOBODY, as_user, sync
from models import new_model
from test_roots import put_gradient

ELEMENTS = 1024
SECONDS = 60  # of a test
WORDS = re.findall(r'^    \{"(\w+)", ', (conftest.ROOT / 'fs/ctl/attributes.c').read_text(), re.M)

# The removed things are its working directory and descriptors it opened before.
READER = r'''
import errno, json, os, sys
said = json.loads(sys.argv[1])
os.chdir(said['cwd'])
held = {}
for path in said['open']:
    try:
        held[path] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as e:
        if e.errno not in (errno.EACCES, errno.EPERM):
            raise
print('open', flush=True)
sys.stdin.readline()

def attempt(what, *args):
    try:
        return what(*args)
    except OSError as e:
        return e

def look(path, fd):
    print('reads', path, flush=True)
    attempt(os.fstat, fd)
    attempt(os.fstatvfs, fd)
    for name in said['names']:
        attempt(os.getxattr, fd, 'user.hitrain.' + name)
    attempt(os.listxattr, fd)
    if os.path.basename(path) not in ('ctl', 'gather', 'trace', 'plan', 'events'):
        attempt(os.pread, fd, 1 << 16, 0)
        attempt(os.lseek, fd, 0, os.SEEK_DATA)
    again = attempt(os.open, f'/proc/self/fd/{fd}', os.O_RDONLY | os.O_NONBLOCK)
    if isinstance(again, int):
        os.close(again)
    for name in attempt(os.listdir, fd) if os.path.isdir(f'/proc/self/fd/{fd}') else ():
        attempt(os.stat, name)

for path, fd in held.items():
    look(path, fd)
for path in ('.', '..', '.hitrain', '.hitrain/stats', '.hitrain/ctl', '../.hitrain/stats'):
    print('reads', path, flush=True)
    attempt(os.stat, path)
    attempt(os.listdir, path)
    attempt(lambda: os.close(os.open(path, os.O_RDONLY)))
    for name in said['names']:
        attempt(os.getxattr, path, 'user.hitrain.' + name)
for path in said['whole']:
    print('reads', path, flush=True)
    with open(path) as f:
        f.read()
for name in said['names']:
    print('reads', name, flush=True)
    attempt(os.getxattr, said['mount'], 'user.hitrain.' + name)
print('done', flush=True)
sys.stdin.readline()
'''


@pytest.fixture
def model(mnt):
    os.chmod(mnt, 0o777)
    root = new_model(mnt / 'model', 'adamw lr=0.1', **dict.fromkeys(('w', 'deep/v'), bytes(4 * ELEMENTS)))
    (root / 'deep' / 'er').mkdir()
    for name in 'w', 'deep/v':
        put_gradient(root, name, np.ones(ELEMENTS, 'f4'))
    sync(root)
    return root


def everything_below(top):
    """Directories and files of a model, hidden ones included, as deep as they are listed."""
    found = [top]
    for path in found:
        if path.is_dir() and not path.is_symlink():
            found += [path / name for name in os.listdir(path)]
            if path.name != '.hitrain' and '.hitrain' not in path.parts and (path / '.hitrain').exists():
                found.append(path / '.hitrain')
    return found


def figures(mnt):
    return [line.partition('=')[0] for line in (mnt / '.hitrain' / 'stats').read_text().splitlines()]


@pytest.fixture(autouse=True)
def hangs_for_a_while_only(store):
    """No signal ends a process whose read the daemon does not answer. So the daemon is ended."""
    timer = threading.Timer(SECONDS, store.daemon.kill)
    timer.start()
    yield
    timer.cancel()


class Reader:
    """A program that uses removed things."""

    def __init__(self, store, cwd, paths):
        said = {'cwd': str(cwd), 'open': [str(p) for p in paths], 'mount': str(store.point),
                'names': sorted({*WORDS, *figures(store.point)}),
                'whole': [str(store.point / '.hitrain' / 'stats')]}
        self.program = subprocess.Popen([sys.executable, '-c', READER, json.dumps(said)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        assert self.program.stdout.readline() == 'open\n'

    def reads_all(self):
        self.program.stdin.write('\n')
        self.program.stdin.flush()
        lines = []
        for line in self.program.stdout:
            lines.append(line)
            if line == 'done\n':
                break
        assert lines[-1] == 'done\n' and len(lines) > 10, lines[-1:]

    def end(self):
        with contextlib.suppress(BrokenPipeError):
            self.program.communicate('\n', timeout=SECONDS)


def remove_tree(top):
    for folder, _, names in os.walk(top, topdown=False):
        for name in names:
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


@pytest.mark.parametrize('end', ['umount', 'SIGTERM'])
@pytest.mark.parametrize('cwd', ['.', 'deep/er'])
def test_what_was_removed_while_in_use_hangs_no_reader(store, model, cwd, end):
    paths = everything_below(model)
    assert {'ctl', 'stats', 'grad', 'state', 'exp_avg'} <= {p.name for p in paths}
    reader = Reader(store, model / cwd, paths)
    try:
        remove_tree(model)
        reader.reads_all()
    finally:
        reader.end()
    if end == 'SIGTERM':
        store.daemon.send_signal(signal.SIGTERM)
        assert store.daemon.wait(SECONDS) == 0
        store.daemon = None
    else:
        store.unmount()


def test_a_removed_root_is_in_no_list_and_has_no_parent(store, model):
    held = os.open(model, os.O_RDONLY)
    try:
        remove_tree(model)
        for who in (0, NOBODY):
            text = as_user(lambda: (store.point / '.hitrain' / 'stats').read_text(), who, who)
            assert f'root="/model' not in text
        assert os.listdir(held) == []
    finally:
        os.close(held)
