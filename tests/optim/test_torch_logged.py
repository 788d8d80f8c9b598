# SPDX-License-Identifier: Apache-2.0
"""Every configuration of test_torch_numerics with redo=on, whose daemon is killed in the middle of the run.

The judge has no store: it applies the kernel to whole arrays. So a step that a mount computes again, and each one after it,
must have the bits of a run without a kill, a log or a store.
"""
import itertools
import os

import pytest

from trainer import mounted  # first: it makes the client importable
import numpy as np
from test_torch_numerics import BF16, CASES, ELEMENTS, F16, F32, Ours, gradients, library, to_bits  # noqa: F401

LONG = bool(os.environ.get('HITRAIN_LONG'))
AFTER = 4   # steps after the last kill
NAMES = {F32: 'f32', BF16: 'bf16', F16: 'f16'}
# kernel, steps from one full step to the next, after which steps the daemon is killed
KILLED = [('scalar', 100, [5]), ('avx512', 4, [7])]
if LONG:
    KILLED = [(kernel, every, kills) for kernel in ('scalar', 'avx2', 'avx512')
              for every, kills in ((2, [2, 4]), (4, [3, 7, 8]), (100, [2]), (100, [9]), (100, [3, 6, 7, 12]))]


class Model:
    """A model root with one parameter, and the arrays that it must equal."""

    def __init__(self, library, mountpoint, number, name, dtype, every):
        self.case, self.dtype, self.name = CASES[name], dtype, f'{name}, {NAMES[dtype]}'
        start = np.random.default_rng(number).normal(0, self.case.scale, ELEMENTS).astype(np.float32)
        self.ours = Ours(library, start if dtype == F32 else to_bits(start, dtype), self.case.rule, dtype)
        self.gradients = gradients(100 + number, self.case.g_scale)
        self.root = mountpoint / f'model-{number}'
        self.words = f'redo=on durable_every={every}'
        self.root.mkdir()
        self.set('dtype', NAMES[dtype])
        self.set('optimizer', f'{self.case.rule} lr={self.case.lr!r} {self.words}')
        (self.root / 'w').write_bytes(self.ours.p.tobytes())
        self.command('commit')

    def set(self, word, value):
        os.setxattr(self.root, f'user.hitrain.{word}', value.encode())

    def get(self, word):
        return os.getxattr(self.root, f'user.hitrain.{word}').decode()

    def command(self, line):
        fd = os.open(self.root / '.hitrain/ctl', os.O_RDWR)
        try:
            os.write(fd, line.encode() + b'\n')
        finally:
            os.close(fd)

    def step(self, t):
        g = next(self.gradients)
        if self.dtype != F32:
            g = to_bits(g, self.dtype)
        lr = self.case.lr * min(1.0, t / 100) if self.case.schedule else self.case.lr
        if self.case.schedule:
            self.set('optimizer', f'{self.case.rule} lr={lr!r} {self.words}')
        (self.root / '.hitrain/grad/w').write_bytes(g.tobytes())
        self.command('step')
        self.ours.step(g, lr, self.dtype)

    def begin_step(self):
        """A gradient without a commit: a kill drops it."""
        (self.root / '.hitrain/grad/w').write_bytes(np.ones(self.ours.p.shape, self.ours.p.dtype).tobytes())

    def wrong(self, t):
        """What is not as it would be without a kill."""
        wrong = [f'{word} is {self.get(word)}' for word in ('step', 'durable_step') if self.get(word) != str(t)]
        if (self.root / 'w').read_bytes() != self.ours.p.tobytes():
            wrong.append('parameter')
        files = sorted(path.name for path in (self.root / '.hitrain/state/w').iterdir())
        if ('master' in files) != (self.dtype != F32):
            wrong.append(f'state has {files}')
        for name, want in zip((n for n in files if n not in ('master', 'step')), self.ours.state):
            if (self.root / '.hitrain/state/w' / name).read_bytes() != want.tobytes():
                wrong.append(name)
        if self.dtype != F32 and (self.root / '.hitrain/state/w/master').read_bytes() != self.ours.master.tobytes():
            wrong.append('master')
        return [f'{self.name}: {w} in step {t}' for w in wrong]


@pytest.mark.parametrize('kernel,every,kills', KILLED)
def test_a_kill_changes_no_bit(library, monkeypatch, kernel, every, kills):
    monkeypatch.setenv('HITRAIN_KERNEL', kernel)    # of the daemon and of the judge
    matrix = [(name, F32) for name in CASES] + [(name, dtype) for name in CASES for dtype in (BF16, F16)]
    with mounted('torch-logged') as store:
        models = [Model(library, store.mountpoint, number, *which, every) for number, which in enumerate(matrix)]
        for t in range(1, kills[-1] + AFTER + 1):
            for model in models:
                model.step(t)
            if t not in kills:
                continue
            logged = [int(m.get('stats').split('\nlogged_steps=')[1].split()[0]) for m in models]
            assert logged == [(t - 1) % every] * len(models)
            for model in models[::2]:
                model.begin_step()
            store.kill()
            store.mount()
            assert list(itertools.chain(*(model.wrong(t) for model in models))) == []
        assert list(itertools.chain(*(model.wrong(t) for model in models))) == []
