# SPDX-License-Identifier: Apache-2.0
"""Kept steps beside engines in the background: their content moves and is shared, and none changes."""
import json
import os

from calls import sync
from conftest import run, wait_for
from test_roots import put_gradient, random, word

ELEMENTS, STEPS, FILES = 15_000, 8, 48
NAMES = 'w', '.hitrain/state/w/exp_avg', '.hitrain/state/w/exp_avg_sq'


def figures(point, engine):
    done = run('hitrainctl', 'background', 'status', point, f'--engine={engine}', '--json')
    return json.loads(done.stdout)['engines'][0]


def step(root, seed):
    put_gradient(root, 'w', random(ELEMENTS, seed))
    sync(root)


def content(root):
    return [(root / name).read_bytes() for name in NAMES]


def check(root, kept):
    for number, was in kept.items():
        assert content(root / '.hitrain' / 'snap' / str(number)) == was


def test_engines_change_nothing_of_kept_steps(make_store):
    """Each kept step lies in a group of blocks that other files have left, and one has a copy outside of the model."""
    store = make_store('48M')
    point = store.mount('commit=1', 'background=off')
    for name in 'model', 'copy':
        (point / name).mkdir()
        word(point / name, 'dtype', 'f32')
    root = point / 'model'
    (root / 'w').write_bytes(random(ELEMENTS, 1).tobytes())
    word(root, 'optimizer', 'adamw lr=0.01')
    kept = {}
    for number in range(1, STEPS + 1):
        step(root, number)
        run('hitrainctl', 'snapshot', root)
        kept[number] = content(root)
        for i in range(FILES):
            (point / f'{number}-{i}').write_bytes(os.urandom(64 << 10))
        sync(point)
    (point / 'copy' / 'w').write_bytes(kept[1][0])
    sync(point / 'copy' / 'w')
    for path in point.glob('*-*'):
        path.unlink()
    sync(point)
    point = store.remount('commit=1', 'background_rate=8G')
    root = point / 'model'
    wait_for(lambda: figures(point, 'compact')['emptied'] and figures(point, 'dedup')['shared_bytes'], 'both engines')
    check(root, kept)
    step(root, 50)
    check(root, kept)
    now = content(root)
    point = store.remount(check=True)
    root = point / 'model'
    assert content(root) == now and (point / 'copy' / 'w').read_bytes() == kept[1][0]
    check(root, kept)
    for number in kept:
        run('hitrainctl', 'verify', root, number)
    run('hitrainctl', 'forget', root, '*')
    assert content(root) == now and (point / 'copy' / 'w').read_bytes() == kept[1][0]
    store.unmount(check=True)
