# SPDX-License-Identifier: Apache-2.0
"""All kinds of work at once on one mount, and a daemon that is killed during the work, again and again.

`make races` runs this with a daemon that ThreadSanitizer watches, and that ends at the first lock taken out of order.
"""
import contextlib
import errno
import os
import random
import subprocess
import sys

import numpy as np

from calls import sync
from conftest import BIN, MIB, SECONDS_MAX
from test_stress import MixedLoad, command, make_root

SECONDS = 20 if os.environ.get('HITRAIN_LONG') else 3
KILLS = 5 if os.environ.get('HITRAIN_LONG') else 2
N = 300_000


def work_on_files(top, rnd):
    """One folder of names that appear and vanish; its own, so that this worker alone explains missing files."""
    top.mkdir(exist_ok=True)
    a, b = top / f'a{rnd.randrange(4)}', top / f'b{rnd.randrange(4)}'
    if a.exists() and os.stat(a).st_nlink > 1:  # a kill came between link and unlink
        a.unlink()
    a.write_bytes(rnd.randbytes(rnd.randrange(200_000)))
    with open(a, 'r+b') as f:
        f.truncate(rnd.randrange(300_000))
        os.copy_file_range(f.fileno(), f.fileno(), 4096, 0, 1 << 18)
        if rnd.random() < 0.3:
            os.fsync(f.fileno())
    os.setxattr(a, 'user.note', rnd.randbytes(40))
    os.rename(a, b)
    os.link(b, a)
    assert os.stat(a).st_nlink == 2
    a.unlink()
    for name in os.listdir(top):
        os.lstat(top / name)
    if rnd.random() < 0.3:
        b.unlink()


# A process of its own: touching a page of a dead mount is SIGBUS.
MAPPER = '''
import mmap, sys
for _ in range(20):
    with open(sys.argv[1], 'r+b') as f, mmap.mmap(f.fileno(), 0) as m:
        m[::4096] = bytes([1]) * (len(m) // 4096)
        m.flush()
'''


def work_on_mapping(path):
    path.write_bytes(bytes(MIB))
    subprocess.run([sys.executable, '-c', MAPPER, path], check=True, stderr=subprocess.DEVNULL, timeout=SECONDS_MAX)


def train(root):
    for i in range(2):
        (root / f'.hitrain/grad/p{i}').write_bytes(np.full(N, i + 1, 'f4').tobytes())
    command(root, 'wait p0')
    command(root, random.choice(['commit', 'step']))
    np.fromfile(root / 'p0', 'f4')
    (root / '.hitrain/state/p0/exp_avg').read_bytes()


def look(point, root):
    for path in ('stats', 'events'):
        (point / '.hitrain' / path).read_bytes()
    (root / '.hitrain/stats').read_bytes()
    os.getxattr(root, 'user.hitrain.stats')
    os.statvfs(point)
    subprocess.run([str(BIN / 'hitrainctl'), 'stats', str(point)], stdout=subprocess.DEVNULL, check=True, timeout=SECONDS_MAX)


def until_dead(store):
    """An error because the daemon was killed is no failure; the machine is lost, as far as the clients can see."""
    @contextlib.contextmanager
    def guard():
        try:
            yield
        except (OSError, subprocess.SubprocessError) as e:
            dead = store.killed and (not isinstance(e, OSError) or e.errno in
                                     (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENOENT, errno.ENODEV))
            if not dead:
                raise
    return guard


def busy(store, root, seconds, kill):
    guard = until_dead(store)
    load = MixedLoad()

    def add(work, *args):
        def guarded():
            with guard():
                work(*args)
            if store.killed:
                load.stop.set()
        load.add(guarded)

    store.killed = False
    for i in range(3):
        add(work_on_files, store.point / f'd{i}', random.Random(i))
    add(work_on_mapping, store.point / 'mapped')
    add(train, root)
    add(look, store.point, root)
    add(sync, store.point)
    load.stop.wait(seconds)
    if kill:
        store.killed = True
        store.kill()
    load.finish(0)


def test_a_mixed_load_of_all_kinds_and_a_daemon_that_dies(make_store):
    store = make_store()
    root = make_root(store.mount(), 2)
    command(root, 'commit')
    busy(store, root, SECONDS, False)
    for _ in range(KILLS):
        step = int(os.getxattr(root, 'user.hitrain.durable_step'))
        busy(store, root, random.uniform(0.3, 1), True)
        store.mount()
        assert int(os.getxattr(root, 'user.hitrain.durable_step')) >= step
    command(root, 'abort')
    assert len(np.fromfile(root / 'p0', 'f4')) == N
