# SPDX-License-Identifier: Apache-2.0
"""Training steps beside all engines in the background: every bit is that of the same steps without engines."""
import hashlib
import json
import os
import threading
import time

import numpy as np

from calls import sync
from conftest import SECONDS_MAX, run
from test_roots import put_gradient, random, word

MIB = 1 << 20
STEPS = 1000 if os.environ.get('HITRAIN_LONG') else 50
PARAMETERS = {'often': 1, 'cold': 2, 'left': 3, 'right': 3}  # with the seeds of their content
ELEMENTS = 40_000  # of each
FILLERS = 96  # a group of blocks has room for 16, and keeps one
ENGINES = 'discard=on', 'compress=auto', 'compress_after=1', 'compress_inline=off', 'commit=1', 'background_rate=8G'
WORK = {'scrub': 'bytes', 'discard': 'discarded_bytes', 'dedup': 'shared_bytes', 'recompress': 'chunks', 'compact': 'moved_bytes'}


def worked(point):
    done = run('hitrainctl', 'background', 'status', point, '--json')
    found = {e['engine']: e for e in json.loads(done.stdout)['engines']}
    return {name: found[name][figure] for name, figure in WORK.items()}


def prepare(store):
    """A model among files that leave groups of blocks nearly empty. `left` and `right` have the same content."""
    point = store.mount('background=off')
    root = point / 'model'
    root.mkdir()
    word(root, 'dtype', 'f32')
    for name, seed in PARAMETERS.items():
        (root / name).write_bytes(np.repeat(random(ELEMENTS // 100, seed), 100).tobytes())
        sync(root / name)
        for i in range(FILLERS):
            (point / f'{name}-{i}').write_bytes(os.urandom(64 << 10))
        sync(point)
    word(root, 'optimizer', 'adamw lr=0.01')
    for path in point.glob('*-*'):
        if int(path.name.split('-')[1]) % 16:
            path.unlink()
    store.unmount()


def digest(root):
    h = hashlib.sha256()
    for name in PARAMETERS:
        h.update((root / name).read_bytes())
        for state in 'exp_avg', 'exp_avg_sq':
            h.update((root / '.hitrain' / 'state' / name / state).read_bytes())
    return h.hexdigest()


class Trainer:
    """Its steps are told by the names of the parameters that get a gradient, so that they can be repeated."""

    def __init__(self, root):
        self.root, self.steps, self.digests = root, [], []

    def step(self, *names):
        self.steps.append(names)
        for name in names:
            put_gradient(self.root, name, random(ELEMENTS, len(self.steps)))
        sync(self.root)
        if len(self.steps) % (STEPS // 10) == 0:
            self.digests.append(digest(self.root))

    def end(self):
        self.digests.append(digest(self.root))
        return self.digests


class Churn:
    """Beside the steps: copies, content that compresses, deletions, and one scrub after the other."""

    def __init__(self, point):
        self.point, self.over, self.error = point, threading.Event(), None
        self.thread = threading.Thread(target=self.main)
        self.thread.start()

    def round(self, number):
        rng = np.random.default_rng(number)
        data = np.repeat(rng.integers(0, 9, MIB // 64), 16).astype('f4').tobytes()
        for name in 'a', 'b':
            (self.point / f'{name}{number % 4}').write_bytes(data)
        run('hitrainctl', 'commit', self.point)
        (self.point / f'a{number % 4}').unlink()
        run('hitrainctl', 'scrub', 'start', self.point, check=False)  # refused while one runs

    def main(self):
        number = 0
        try:
            while not self.over.wait(0.05):
                self.round(number)
                number += 1
        except Exception as e:  # for the test's thread
            self.error = e

    def end(self):
        self.over.set()
        self.thread.join()
        assert self.error is None, self.error


def is_compressed(path):
    return int(word(path, 'stored_bytes')) < path.stat().st_size * 0.75


def train_beside_engines(point):
    """A parameter gets its next gradient when it is compressed. Another one, whose content is there twice, gets none before
    dedup has shared something: so a pass finds it, however slow the machine is. Ends when each engine has worked beside
    the steps."""
    trainer, woken, end = Trainer(point / 'model'), 0, time.monotonic() + 3 * SECONDS_MAX + STEPS
    while len(trainer.steps) < STEPS or not woken or not all(worked(point).values()):
        assert time.monotonic() < end, (woken, worked(point))
        names = ['often']
        if is_compressed(trainer.root / 'cold'):
            names += ['cold', 'left'] if worked(point)['dedup'] else ['cold']
            woken += 'left' in names
        trainer.step(*names)
    return trainer.steps, trainer.end()


def test_steps_beside_all_engines_have_the_same_bits(make_store):
    store = make_store('48M')
    prepare(store)
    point = store.mount(*ENGINES)
    churn = Churn(point)
    try:
        steps, got = train_beside_engines(point)
    finally:
        churn.end()
    store.unmount(check=True)
    quiet = make_store('48M')
    prepare(quiet)
    trainer = Trainer(quiet.mount() / 'model')
    for names in steps:
        trainer.step(*names)
    assert got == trainer.end()
