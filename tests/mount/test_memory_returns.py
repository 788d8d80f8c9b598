# SPDX-License-Identifier: Apache-2.0
"""Memory of deleted things comes back: after models that were made and ended, however many, the counters are as before.

HITRAIN_LONG=1 makes a hundred thousand models, and looks at the memory of the process, too.
"""
import contextlib
import os
import shutil
import time

import pytest

from calls import sync
from programs import LONG

MODELS, ROUNDS = 100_000 if LONG else 1200, 4


def figures(store):
    lines = (line.split('=', 1) for line in os.getxattr(store.point, 'user.hitrain.stats').decode().splitlines())
    return {k: int(v) for k, v in lines if v.isdigit()}


def resident(store):
    with open(f'/proc/{store.daemon.pid}/status') as f:
        return next(int(line.split()[1]) for line in f if line.startswith('VmRSS')) << 10


def removed(root):
    os.unlink(root / 'w')
    os.rmdir(root)


def unmade(root):
    os.removexattr(root, 'user.hitrain.optimizer')
    removed(root)


def refused(root):
    """It never becomes a model: its file has a name elsewhere."""
    os.link(root / 'w', root.parent / 'other')
    with pytest.raises(OSError):
        os.setxattr(root, 'user.hitrain.optimizer', b'adamw lr=0.1')
    os.unlink(root.parent / 'other')
    removed(root)


def kept_open(root):
    fd = os.open(root / 'w', os.O_RDWR)
    removed(root)
    os.pwrite(fd, b'more', 0)
    os.close(fd)


def kept_step(root):
    (root / '.hitrain' / 'ctl').write_text('snapshot a\n')
    removed(root)


@pytest.mark.parametrize('end', [removed, unmade, refused, kept_open, kept_step])
def test_models_that_ended_leave_nothing(store, end):
    def models(count):
        for i in range(count):
            root = store.point / 'model'
            root.mkdir()
            (root / 'w').write_text('content')
            if end is not refused:
                os.setxattr(root, 'user.hitrain.optimizer', b'adamw lr=0.1')
            end(root)
            if i % 100 == 0 or i == count - 1:  # what waits for the log is memory, too
                sync(store.point)

    used = []
    for _ in range(ROUNDS):
        models(MODELS // ROUNDS)
        used.append(figures(store)['meta_bytes'] + figures(store)['names_bytes'])
        memory = resident(store) if len(used) == 1 else memory
    # A pool takes a block now and then; what stays for each model does so in each round.
    assert min(after - before for before, after in zip(used, used[1:])) <= 0, used
    if LONG:
        assert resident(store) < memory + (16 << 20)


def fill(mnt, number):
    for i in range(8):
        folder = mnt / f'd{i}'
        folder.mkdir()
        for k in range(150):
            (folder / f'f{k}').write_bytes(b'x' * (37 * k * (number + 1) % 20000))
    with open(mnt / 'large', 'wb', buffering=0) as f, pytest.raises(OSError):
        while True:
            f.write(os.urandom(1 << 20))
    for i in range(4):
        with contextlib.suppress(OSError):
            (mnt / f'm{i}').mkdir()
            os.setxattr(mnt / f'm{i}', 'user.hitrain.optimizer', b'adamw lr=0.1')


def test_a_store_that_is_filled_and_emptied_reports_its_memory(make_store):
    """Ten times: the counters stop growing, and they have all that is resident."""
    store = make_store('128M')
    store.mount('passthrough=8M', 'dedup=off')  # a pass that is under way has 2 MiB, and gives them back at its end
    counted = []
    for number in range(10):
        fill(store.point, number)
        for name in os.listdir(store.point):
            path = store.point / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        sync(store.point)
        counted.append(figures(store)['meta_bytes'] + figures(store)['names_bytes'])
    assert max(counted[6:]) <= max(counted[:6]) + (1 << 20), counted
    time.sleep(1.1)  # spare bytes are a second old at most
    now = figures(store)
    known = now['locked_bytes'] + now['meta_bytes'] + now['names_bytes'] + now['heap_spare_bytes']
    assert resident(store) < known + (16 << 20), (resident(store), now)
    assert now['heap_spare_bytes'] < 64 << 20
