# SPDX-License-Identifier: Apache-2.0
"""Memory for what has gone comes back: after models that were made and ended, however many, the counters are as before.

HITRAIN_LONG=1 makes a hundred thousand of them, and looks at the memory of the process, too.
"""
import os

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
    """It never becomes a model: a file of it has a name elsewhere."""
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
