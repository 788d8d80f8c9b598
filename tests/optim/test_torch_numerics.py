#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The kernels against torch.optim.AdamW and against float64, over 1,000 random steps.

The kernels are compiled into a shared object of their own and called through ctypes: no store, no mount, so that what is
measured here is arithmetic and nothing else. (That the store applies the same arithmetic bit for bit is what
tests/unit/optim/test_pipeline.c shows.)
"""
import ctypes
import os
import pathlib
import platform
import subprocess

import pytest

np = pytest.importorskip('numpy')
torch = pytest.importorskip('torch')

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get('HITRAIN_BUILD', ROOT / 'build'))
F32, BF16 = 1, 2
STEPS = 1000
ELEMENTS = 20000
FLAGS = ['-std=gnu11', '-O2', '-fPIC', '-D_GNU_SOURCE', '-ffp-contract=off', '-Iinclude', '-I.']


class Scalars(ctypes.Structure):
    _fields_ = [(n, ctypes.c_float) for n in (
        'decay', 'beta1', 'one_minus_beta1', 'beta2', 'one_minus_beta2', 'minus_step_size', 'sqrt_bc2', 'eps')
    ] + [('maximize', ctypes.c_bool)]


class Arrays(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ('p', 'master', 'm', 'v', 'g')] + [
        ('p_dtype', ctypes.c_uint8), ('g_dtype', ctypes.c_uint8)]


@pytest.fixture(scope='session')
def library():
    out = BUILD / 'numerics'
    out.mkdir(parents=True, exist_ok=True)
    objects = []
    for name in ('optim/kernel.c', 'optim/kernel_scalar.c', 'optim/kernel_avx2.c', 'tiering/base/log.c'):
        isa = ['-mavx2', '-mfma', '-mf16c'] if name.endswith('_avx2.c') and platform.machine() == 'x86_64' else []
        objects.append(str(out / (pathlib.Path(name).stem + f'-{os.getpid()}.o')))
        subprocess.run([os.environ.get('CC', 'cc'), *FLAGS, *isa, '-c', name, '-o', objects[-1]], cwd=ROOT, check=True)
    shared = out / f'kernels-{os.getpid()}.so'
    subprocess.run([os.environ.get('CC', 'cc'), '-shared', '-o', str(shared), *objects, '-lm'], cwd=ROOT, check=True)
    lib = ctypes.CDLL(str(shared))
    for path in [*objects, shared]:
        os.unlink(path)
    lib.ht_adamw_scalars.argtypes = [ctypes.POINTER(Scalars)] + [ctypes.c_double] * 5 + [ctypes.c_bool, ctypes.c_uint64]
    lib.ht_adamw_scalars.restype = None
    lib.ht_adamw_choose.restype = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.POINTER(Scalars), ctypes.POINTER(Arrays),
                                                   ctypes.c_size_t)
    return lib


class Ours:
    """The kernel with its state, stepping as torch.optim.AdamW does."""

    def __init__(self, lib, p, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, maximize=False, dtype=F32):
        self.lib = lib
        self.kernel = lib.ht_adamw_choose(None)
        self.p = p.copy()
        self.master = np.zeros(p.shape, np.float32) if dtype == BF16 else None
        self.m = np.zeros(p.shape, np.float32)
        self.v = np.zeros(p.shape, np.float32)
        self.betas, self.eps, self.weight_decay, self.maximize, self.dtype = betas, eps, weight_decay, maximize, dtype
        self.t = 0

    def step(self, g, lr, g_dtype=F32):
        self.t += 1
        s = Scalars()
        self.lib.ht_adamw_scalars(s, lr, *self.betas, self.eps, self.weight_decay, self.maximize, self.t)
        master = self.master.ctypes.data if self.master is not None else None
        a = Arrays(self.p.ctypes.data, master, self.m.ctypes.data, self.v.ctypes.data, g.ctypes.data, self.dtype, g_dtype)
        self.kernel(s, a, self.p.size)


class Exact:
    """AdamW in float64."""

    def __init__(self, p, betas, eps, weight_decay, maximize):
        self.p, self.m, self.v = p.astype(np.float64), np.zeros(p.shape), np.zeros(p.shape)
        self.betas, self.eps, self.weight_decay, self.maximize = betas, eps, weight_decay, maximize
        self.t = 0

    def step(self, g, lr):
        g = g.astype(np.float64) * (-1 if self.maximize else 1)
        b1, b2 = self.betas
        self.t += 1
        self.p *= 1 - lr * self.weight_decay
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        denominator = np.sqrt(self.v / (1 - b2 ** self.t)) + self.eps
        self.p -= lr / (1 - b1 ** self.t) * self.m / denominator


CASES = {
    'defaults': dict(),
    'language model': dict(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, schedule=True),
    'no decay': dict(weight_decay=0.0, lr=1e-2),
    'large weights': dict(scale=1.0),
    'maximize': dict(maximize=True),
    'tiny gradients': dict(g_scale=1e-12),
    'no momentum': dict(betas=(0.0, 0.99)),
}


def gradients(seed, scale):
    """Noise around a slowly turning direction, of very different sizes per element, as gradients are."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(0, 2, ELEMENTS)) * scale
    phase = rng.uniform(0, 6.28, ELEMENTS)
    for t in range(STEPS):
        yield (size * (np.sin(phase + t / 100) * 0.3 + rng.normal(0, 1, ELEMENTS))).astype(np.float32)


def worst(error):
    error = np.abs(error)
    return error.max(), np.quantile(error, 0.999)


@pytest.mark.parametrize('kernel', ['scalar', 'avx2'])
@pytest.mark.parametrize('name', CASES)
def test_adamw_is_torchs(library, monkeypatch, name, kernel):
    case = dict(CASES[name])
    lr, schedule = case.pop('lr', 1e-3), case.pop('schedule', False)
    scale, g_scale = case.pop('scale', 0.02), case.pop('g_scale', 1e-3)
    case = {'betas': (0.9, 0.999), 'eps': 1e-8, 'weight_decay': 1e-2, 'maximize': False, **case}
    start = np.random.default_rng(1).normal(0, scale, ELEMENTS).astype(np.float32)

    monkeypatch.setenv('HITRAIN_KERNEL', kernel)
    ours, exact = Ours(library, start, **case), Exact(start, **case)
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.AdamW([theirs], lr=lr, **case)
    for t, g in enumerate(gradients(2, g_scale)):
        now = lr * min(1.0, (t + 1) / 100) if schedule else lr
        optimizer.param_groups[0]['lr'] = now
        theirs.grad = torch.from_numpy(g)
        optimizer.step()
        ours.step(g, now)
        exact.step(g, now)

    torchs = theirs.detach().numpy()
    apart = np.abs(ours.p.astype(np.float64) - torchs).max()
    our_error, torch_error = worst(ours.p - exact.p), worst(torchs - exact.p)
    print(f'{name}, {kernel}: apart {apart:.3g} ({apart / lr:.3g} lr), error against float64 at the maximum '
          f'{our_error[0]:.3g} (torch {torch_error[0]:.3g}), at 99.9 % {our_error[1]:.3g} (torch {torch_error[1]:.3g})')
    assert apart <= 1e-3 * lr
    assert our_error[0] <= 1.1 * torch_error[0]
    assert our_error[1] <= 1.1 * torch_error[1]


def to_bits(x):
    """bf16 bits of a float32 array, rounded by torch."""
    return torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().copy()


def from_bits(bits):
    return torch.from_numpy(bits).view(torch.bfloat16).to(torch.float32).numpy()


@pytest.mark.parametrize('kernel', ['scalar', 'avx2'])
def test_bf16_parameters_are_the_rounded_master(library, monkeypatch, kernel):
    """A bf16 parameter is what torch makes of an f32 parameter that saw the same (bf16) gradients."""
    start = from_bits(to_bits(np.random.default_rng(1).normal(0, 0.02, ELEMENTS).astype(np.float32)))
    monkeypatch.setenv('HITRAIN_KERNEL', kernel)
    ours = Ours(library, to_bits(start), dtype=BF16)
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.AdamW([theirs], lr=1e-3)
    for g in gradients(3, 1e-3):
        bits = to_bits(g)
        theirs.grad = torch.from_numpy(from_bits(bits).copy())
        optimizer.step()
        ours.step(bits, 1e-3, g_dtype=BF16)
    assert np.abs(ours.master.astype(np.float64) - theirs.detach().numpy()).max() <= 1e-6
    assert np.array_equal(ours.p, to_bits(ours.master))


def test_bf16_rounding_is_torchs(library):
    bits = np.random.default_rng(4).integers(0, 2 ** 32, 1000000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[~np.isnan(x)].copy()
    ours = Ours(library, np.zeros(x.size, np.int16), dtype=BF16, weight_decay=0.0, betas=(0.0, 0.0))
    # With a learning rate of 0 the master is stored again and rounded; it has to differ from p by less than rounding.
    ours.master[:] = x
    ours.p[:] = to_bits(x)
    ours.step(np.ones(x.size, np.float32), 0.0)
    finite = np.isfinite(x)
    assert np.array_equal(ours.p[finite], to_bits(x)[finite])
    assert np.array_equal(ours.master[finite], x[finite])
