#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Every rule against torch.optim and against float64, over 1,000 random steps.

The kernels are compiled into a shared object of their own and called through ctypes: no store, no mount, so that the
tests measure arithmetic and nothing else. (tests/unit/optim/step/test_pipeline.c shows that the store applies the same
arithmetic bit for bit.)
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
F32, BF16, F16 = 1, 2, 3
KERNELS = 10
FORMS = 4
STEPS = 1000
ELEMENTS = 20000
FLAGS = ['-std=gnu11', '-O2', '-fPIC', '-D_GNU_SOURCE', '-ffp-contract=off', '-Iinclude', '-I.']


SOURCES = ['optim/rules/isa.c', 'optim/rules/kernel_scalar.c', 'optim/rules/kernel_avx2.c', 'optim/rules/kernel_avx512.c',
           'optim/rules/rule.c', 'optim/rules/config.c', 'tiering/base/base.c', 'tiering/base/log.c']
ISA = {'kernel_avx2': ['-mavx2', '-mfma', '-mf16c', '-mbmi', '-mbmi2'],
       'kernel_avx512': ['-mavx512f', '-mavx512bw', '-mavx512dq', '-mavx512vl', '-mfma']}


class Update(ctypes.Structure):
    """struct ht_update"""
    _fields_ = [(n, ctypes.c_void_p) for n in ('p', 'master', 'state_0', 'state_1', 'g')] + [
        ('p_dtype', ctypes.c_uint8), ('g_dtype', ctypes.c_uint8)]


class Kernels(ctypes.Structure):
    """struct ht_kernels"""
    _fields_ = [('name', ctypes.c_char_p)] + [(n, ctypes.c_void_p) for n in ('add', 'sum_squares', 'join', 'part', 'stir', 'matmul', 'changed', 'halve')] + [
        ('fn', ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.POINTER(Update), ctypes.c_size_t) * KERNELS)]


class Coded(ctypes.Structure):
    """struct ht_coded"""
    _fields_ = [('codes', ctypes.c_void_p), ('scales', ctypes.c_void_p), ('n', ctypes.c_size_t), ('kind', ctypes.c_uint8),
                ('nearest', ctypes.c_bool), ('salt', ctypes.c_uint32), ('t', ctypes.c_uint64), ('element', ctypes.c_uint64)]


class Codecs(ctypes.Structure):
    """struct ht_codecs"""
    _fields_ = [('name', ctypes.c_char_p)] + [
        (n, ctypes.CFUNCTYPE(None, ctypes.POINTER(Coded), ctypes.c_void_p) * FORMS) for n in ('decode', 'encode')]


@pytest.fixture(scope='session')
def library():
    out = BUILD / 'numerics'
    out.mkdir(parents=True, exist_ok=True)
    objects = []
    for name in SOURCES:
        isa = ISA.get(pathlib.Path(name).stem, []) if platform.machine() == 'x86_64' else []
        objects.append(str(out / (pathlib.Path(name).stem + f'-{os.getpid()}.o')))
        subprocess.run([os.environ.get('CC', 'cc'), *FLAGS, *isa, '-c', name, '-o', objects[-1]], cwd=ROOT, check=True)
    shared = out / f'kernels-{os.getpid()}.so'
    subprocess.run([os.environ.get('CC', 'cc'), '-shared', '-o', str(shared), *objects, '-lm'], cwd=ROOT, check=True)
    lib = ctypes.CDLL(str(shared))
    for path in [*objects, shared]:
        os.unlink(path)
    lib.ht_kernels_choose.restype = ctypes.POINTER(Kernels)
    lib.ht_codecs_choose.restype = ctypes.POINTER(Codecs)
    return lib


class Ours:
    """The kernel of a rule with its state, stepping as an optimizer of torch does."""

    def __init__(self, lib, p, rule, dtype=F32):
        self.lib, self.rule, self.dtype = lib, rule, dtype
        self.kernels = lib.ht_kernels_choose().contents
        self.p = p.copy()
        self.master = np.zeros(p.shape, np.float32) if dtype != F32 else None
        self.state = [np.zeros(p.shape, np.float32) for _ in range(2)]
        self.t = 0

    def step(self, g, lr, g_dtype=F32):
        self.t += 1
        text = f'{self.rule} lr={lr!r}'.encode()
        config, scalars, err = (ctypes.create_string_buffer(1024) for _ in range(3))
        assert self.lib.ht_optim_config_parse(text, ctypes.c_size_t(len(text)), config, err) == 0, err.value
        self.lib.ht_rule_scalars(config, ctypes.c_uint64(self.t), scalars)
        kernel = ctypes.cast(scalars, ctypes.POINTER(ctypes.c_int))[0]
        master = self.master.ctypes.data if self.master is not None else None
        u = Update(self.p.ctypes.data, master, *(s.ctypes.data for s in self.state), g.ctypes.data, self.dtype, g_dtype)
        self.kernels.fn[kernel](ctypes.addressof(scalars), u, self.p.size)


# The same in float64: each makes a function step(p, g, t, lr, state) that returns the new p.

def exact_adam(decoupled, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    def step(p, g, t, lr, state):
        p, g = (p * (1 - lr * weight_decay), g) if decoupled else (p, g + weight_decay * p)
        m = state['m'] = beta1 * state.get('m', 0) + (1 - beta1) * g
        v = state['v'] = beta2 * state.get('v', 0) + (1 - beta2) * g * g
        return p - lr / (1 - beta1 ** t) * m / (np.sqrt(v / (1 - beta2 ** t)) + eps)
    return step


def exact_sgd(momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
    def step(p, g, t, lr, state):
        g = g + weight_decay * p
        if momentum:
            b = state['b'] = g if t == 1 else momentum * state['b'] + (1 - dampening) * g
            g = g + momentum * b if nesterov else b
        return p - lr * g
    return step


def exact_lion(beta1=0.9, beta2=0.99, weight_decay=0.0):
    def step(p, g, t, lr, state):
        m = state.get('m', 0)
        state['m'] = beta2 * m + (1 - beta2) * g
        return p * (1 - lr * weight_decay) - lr * np.sign(beta1 * m + (1 - beta1) * g)
    return step


def exact_adagrad(lr_decay=0.0, eps=1e-10, weight_decay=0.0):
    def step(p, g, t, lr, state):
        g = g + weight_decay * p
        s = state['s'] = state.get('s', 0) + g * g
        return p - lr / (1 + (t - 1) * lr_decay) * g / (np.sqrt(s) + eps)
    return step


class Lion(torch.optim.Optimizer):
    """PyTorch has none: the paper's algorithm 2 in its operations."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {'lr': lr, 'betas': betas, 'weight_decay': weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (beta1, beta2) = group['lr'], group['betas']
            for p in group['params']:
                m = self.state[p].setdefault('exp_avg', torch.zeros_like(p))
                p.mul_(1 - lr * group['weight_decay'])
                p.add_(m.mul(beta1).add_(p.grad, alpha=1 - beta1).sign_(), alpha=-lr)
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Case:
    """One rule with one configuration: as text, as optimizer of torch, in float64."""

    def __init__(self, rule, theirs, exact, lr=1e-3, schedule=False, scale=0.02, g_scale=1e-3, sign=1):
        self.rule, self.theirs, self.exact = rule, theirs, exact
        self.lr, self.schedule, self.scale, self.g_scale, self.sign = lr, schedule, scale, g_scale, sign


def adamw(text='', beta1=0.9, beta2=0.999, weight_decay=1e-2, maximize=False, **kw):
    words = f'adamw beta1={beta1} beta2={beta2} weight_decay={weight_decay} maximize={int(maximize)}'
    return Case(words, lambda p, lr: torch.optim.AdamW(p, lr, (beta1, beta2), weight_decay=weight_decay,
                                                       maximize=maximize),
                exact_adam(True, beta1, beta2, weight_decay=weight_decay), sign=-1 if maximize else 1, **kw)


CASES = {
    'adamw': adamw(),
    'adamw, language model': adamw(lr=3e-4, beta2=0.95, weight_decay=0.1, schedule=True),
    'adamw, no decay': adamw(weight_decay=0.0, lr=1e-2),
    'adamw, large weights': adamw(scale=1.0),
    'adamw, maximize': adamw(maximize=True),
    'adamw, tiny gradients': adamw(g_scale=1e-12),
    'adamw, no momentum': adamw(beta1=0.0, beta2=0.99),
    'adamw, half momentum': adamw(beta1=0.5, beta2=0.9),
    'adam, no averages': Case('adam beta1=0 beta2=0', lambda p, lr: torch.optim.Adam(p, lr, (0.0, 0.0)), exact_adam(False, 0.0, 0.0)),
    'adam': Case('adam', lambda p, lr: torch.optim.Adam(p, lr), exact_adam(False)),
    'adam, L2': Case('adam weight_decay=0.1', lambda p, lr: torch.optim.Adam(p, lr, weight_decay=0.1),
                     exact_adam(False, weight_decay=0.1)),
    'sgd': Case('sgd weight_decay=0.01', lambda p, lr: torch.optim.SGD(p, lr, weight_decay=0.01),
                exact_sgd(weight_decay=0.01), lr=0.1),
    'sgd, momentum': Case('sgd momentum=0.9 dampening=0.1 weight_decay=0.01',
                          lambda p, lr: torch.optim.SGD(p, lr, 0.9, 0.1, 0.01),
                          exact_sgd(0.9, 0.1, 0.01), lr=0.01, schedule=True),
    'sgd, nesterov': Case('sgd momentum=0.9 nesterov=1', lambda p, lr: torch.optim.SGD(p, lr, 0.9, nesterov=True),
                          exact_sgd(0.9, nesterov=True), lr=0.01),
    'lion': Case('lion weight_decay=0.1', lambda p, lr: Lion(p, lr, weight_decay=0.1), exact_lion(weight_decay=0.1),
                 lr=1e-4),
    'adagrad': Case('adagrad lr_decay=0.01 weight_decay=0.01',
                    lambda p, lr: torch.optim.Adagrad(p, lr, lr_decay=0.01, weight_decay=0.01),
                    exact_adagrad(0.01, weight_decay=0.01), lr=1e-2),
}


def gradients(seed, scale):
    """Noise around a slowly turning direction, of very different sizes per element, as gradients are."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(0, 2, ELEMENTS)) * scale
    phase = rng.uniform(0, 6.28, ELEMENTS)
    for t in range(STEPS):
        yield (size * (np.sin(phase + t / 100) * 0.3 + rng.normal(0, 1, ELEMENTS))).astype(np.float32)


def with_each_kernel(monkeypatch, lib, *args):
    """{its name: ours}. All see the same gradients, which take longer to make than to apply."""
    made = {}
    for kernel in ('scalar', 'avx2', 'avx512'):
        monkeypatch.setenv('HITRAIN_KERNEL', kernel)
        made[kernel] = Ours(lib, *args)
    return made


def worst(error):
    error = np.abs(error)
    return error.max(), np.quantile(error, 0.999)


@pytest.mark.parametrize('name', CASES)
def test_a_rule_is_torchs(library, monkeypatch, name):
    case = CASES[name]
    start = np.random.default_rng(1).normal(0, case.scale, ELEMENTS).astype(np.float32)

    each = with_each_kernel(monkeypatch, library, start, case.rule)
    exact, state = start.astype(np.float64), {}
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = case.theirs([theirs], case.lr)
    for t, g in enumerate(gradients(2, case.g_scale), 1):
        now = case.lr * min(1.0, t / 100) if case.schedule else case.lr
        optimizer.param_groups[0]['lr'] = now
        theirs.grad = torch.from_numpy(g)
        optimizer.step()
        for ours in each.values():
            ours.step(g, now)
        exact = case.exact(exact, case.sign * g.astype(np.float64), t, now, state)

    torchs = theirs.detach().numpy()
    torch_error = worst(torchs - exact)
    for kernel, ours in each.items():
        apart = np.abs(ours.p.astype(np.float64) - torchs).max()
        our_error = worst(ours.p - exact)
        print(f'{name}, {kernel}: apart {apart:.3g} ({apart / case.lr:.3g} lr), error against float64 at the maximum '
              f'{our_error[0]:.3g} (torch {torch_error[0]:.3g}), at 99.9 % {our_error[1]:.3g} (torch {torch_error[1]:.3g})')
        assert apart <= 1e-3 * case.lr
        assert our_error[0] <= 1.1 * torch_error[0]
        assert our_error[1] <= 1.1 * torch_error[1]


@pytest.mark.parametrize('rule', ['adam', 'adamw'])
@pytest.mark.parametrize('beta1', [0.0, 0.1, 0.499, 0.5, 0.501, 0.9])
def test_the_average_has_both_forms_of_torch_lerp(library, monkeypatch, rule, beta1):
    rng = np.random.default_rng(3)
    m, g = ((rng.normal(0, 1, ELEMENTS) * np.exp(rng.normal(0, 6, ELEMENTS))).astype(np.float32) for _ in range(2))
    weight = np.float32(1.0 - beta1)

    def fused(weight, start):  # the product is exact in float64, and the sum nearly so
        return (np.float64(weight) * (g - m).astype(np.float64) + start.astype(np.float64)).astype(np.float32)
    near_m, near_g = fused(weight, m), fused(weight - np.float32(1), g)
    right, wrong = (near_m, near_g) if weight < 0.5 else (near_g, near_m)
    assert (right != wrong).mean() > 0.1
    for ours in with_each_kernel(monkeypatch, library, np.zeros(ELEMENTS, np.float32), f'{rule} beta1={beta1}').values():
        ours.state[0][:] = m
        ours.step(g, 1e-3)
        assert (ours.state[0] != right).mean() < 1e-4
    theirs = torch.lerp(torch.from_numpy(m), torch.from_numpy(g), float(weight)).numpy()
    scale = np.maximum(np.abs(m), np.abs(g)) * 2.0 ** -23
    assert (np.abs(right.astype(np.float64) - theirs) <= 2 * scale).all()
    if beta1 == 0:
        assert (right == g).all() and (theirs == g).all()


TORCH_DTYPE = {BF16: torch.bfloat16, F16: torch.float16}


def to_bits(x, dtype):
    """Bits of a float32 array, rounded by torch."""
    return torch.from_numpy(x).to(TORCH_DTYPE[dtype]).view(torch.int16).numpy().copy()


def from_bits(bits, dtype):
    return torch.from_numpy(bits).view(TORCH_DTYPE[dtype]).to(torch.float32).numpy()


@pytest.mark.parametrize('dtype', TORCH_DTYPE)
def test_parameters_of_two_bytes_are_the_rounded_master(library, monkeypatch, dtype):
    """Such a parameter equals torch's rounding of an f32 parameter that saw the same (rounded) gradients."""
    start = from_bits(to_bits(np.random.default_rng(1).normal(0, 0.02, ELEMENTS).astype(np.float32), dtype), dtype)
    each = with_each_kernel(monkeypatch, library, to_bits(start, dtype), 'adamw', dtype)
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.AdamW([theirs], lr=1e-3)
    for g in gradients(3, 1e-3):
        bits = to_bits(g, dtype)
        theirs.grad = torch.from_numpy(from_bits(bits, dtype).copy())
        optimizer.step()
        for ours in each.values():
            ours.step(bits, 1e-3, g_dtype=dtype)
    for ours in each.values():
        assert np.abs(ours.master.astype(np.float64) - theirs.detach().numpy()).max() <= 1e-6
        assert np.array_equal(ours.p, to_bits(ours.master, dtype))


@pytest.mark.parametrize('dtype', TORCH_DTYPE)
@pytest.mark.parametrize('kernel', ['scalar', 'avx2', 'avx512'])
def test_rounding_is_torchs(library, monkeypatch, kernel, dtype):
    bits = np.random.default_rng(4).integers(0, 2 ** 32, 1000000, dtype=np.uint32)
    x = bits.view(np.float32)
    # f16 is finer than that in a small part of all exponents only
    x = np.concatenate([x[~np.isnan(x)], np.random.default_rng(5).normal(0, 1e-4, 1000000).astype(np.float32)])
    monkeypatch.setenv('HITRAIN_KERNEL', kernel)
    # With a learning rate of 0 the master is stored again and rounded; it rounds to p, and so is believed.
    ours = Ours(library, to_bits(x, dtype), 'sgd', dtype)
    ours.master[:] = x
    ours.step(np.ones(x.size, np.float32), 0.0)
    finite = np.isfinite(x)
    assert np.array_equal(ours.p[finite], to_bits(x, dtype)[finite])
    assert np.array_equal(ours.master[finite], x[finite])
