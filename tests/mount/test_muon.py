# SPDX-License-Identifier: Apache-2.0
"""Muon on a mount: the two phases of a step through update/ and ortho/, what is refused, and what a crash leaves."""
import errno
import os

import numpy as np
import pytest

from calls import fails, sync
from models import new_model, word
from test_steering import step_open, tell

M, N = 48, 20
LR, MU, WD = 0.02, 0.95, 0.1
WORDS = f'muon lr={LR} momentum={MU} weight_decay={WD}'


def bf16(x):
    """f32 values to nearest even, as bf16's 16 bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen(halves):
    return (halves.astype(np.uint32) << 16).view(np.float32)


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


class Model:
    """Two matrices and a vector, beside the same in NumPy."""

    def __init__(self, root, shapes=None):
        self.root, self.h = root, root / '.hitrain'
        self.p, self.m, self.shapes = {}, {}, shapes or {'w': (M, N), 'v': (N, 3 * M)}
        for i, (name, shape) in enumerate(self.shapes.items()):
            self.p[name] = random(i, *shape)
            self.m[name] = np.zeros(shape, np.float32)

    def make(self, words=WORDS):
        content = {name: p.tobytes() for name, p in self.p.items()}
        new_model(self.root, words, bias=random(9, N).tobytes(), **content)
        for name, shape in self.shapes.items():
            word(self.root / name, 'shape', ','.join(map(str, shape)))
        word(self.root / 'bias', 'optimizer', 'adamw lr=1e-3')
        sync(self.root)
        return self

    def gradient(self, name, g):
        (self.h / 'grad' / name).write_bytes(g.tobytes())

    def update(self, name):
        return np.fromfile(self.h / 'update' / name, np.uint16).reshape(self.shapes.get(name, -1))

    def ortho(self, name, o):
        (self.h / 'ortho' / name).write_bytes(o.tobytes())

    def apply(self, name, step=None):
        return tell(self.root, f'apply ortho/{name} if={step or step_open(self.root)}')

    def stir(self, name, g):
        self.m[name] += np.float32(1 - MU) * (g - self.m[name])
        return g + np.float32(MU) * (self.m[name] - g)

    def change(self, name, o, ratio):
        p = self.p[name] * np.float32(1 - LR * WD)
        self.p[name] = p + np.float32(-LR * ratio) * widen(o).reshape(p.shape)

    def check(self):
        for name, p in self.p.items():
            np.testing.assert_allclose(np.fromfile(self.root / name, 'f4').reshape(p.shape), p, 1e-5, 1e-6)
            found = np.fromfile(self.h / 'state' / name / 'momentum_buffer', 'f4').reshape(p.shape)
            np.testing.assert_allclose(found, self.m[name], 1e-5, 1e-6)


def ratio_of(shape):
    return max(1, shape[0] / shape[1]) ** 0.5


def whole_step(model, seed, between=lambda: None):
    """A step with gradients of all, and any matrix in place of the orthogonal one."""
    g = {name: random(seed + i, *shape) for i, (name, shape) in enumerate(model.shapes.items())}
    for name in g:
        model.gradient(name, g[name])
    between()
    for name in g:
        np.testing.assert_allclose(widen(model.update(name)), model.stir(name, g[name]), 1 / 128, 1e-6)
        o = bf16(random(seed + 50, *model.shapes[name]))
        model.ortho(name, o)
        assert model.apply(name) == 'ok'
        model.change(name, o, ratio_of(model.shapes[name]))


@pytest.fixture
def model(mnt):
    return Model(mnt / 'm').make()


def test_a_step_has_two_phases(model):
    for step in range(4):
        whole_step(model, 100 * step)
        assert tell(model.root, 'commit') == 'ok'
        model.check()
    assert word(model.root, 'step') == '4'
