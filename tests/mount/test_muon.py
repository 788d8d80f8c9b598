# SPDX-License-Identifier: Apache-2.0
"""Muon on a mount: the two phases of a step through update/ and ortho/, what is refused, and what a crash leaves."""
import errno
import os
import struct
import subprocess

import numpy as np
import pytest

from calls import fails, sync
from conftest import BIN, run
from models import new_model, word
from test_memory_returns import figures as store_figures
from test_steering import step_open, tell
from test_vault_follow import entries, programs, steps  # noqa: F401 (a fixture)

from logged import NUMBERS, ORTHO, PIECES, SPARSE, Piece, Reader
from objects import Damage, Record

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
        """np.fromfile takes an error for the end of the file."""
        return np.frombuffer((self.h / 'update' / name).read_bytes(), np.uint16).reshape(self.shapes.get(name, -1))

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


def test_both_phases_stay_in_memory(make_store):
    """Updates that are handed out and given back pass through the DRAM tier: a model of several tiers writes none of it."""
    store, side, late = make_store('1G'), 512, 2
    store.mount('dram=64M')
    shapes = {f'w{n:02}': (side, side) for n in range(64)}
    model = Model(store.point / 'm', shapes).make()
    g, names = random(1, side, side), list(shapes)

    def end(name):
        model.ortho(name, model.update(name))
        assert model.apply(name) == 'ok'

    def step():
        for n, name in enumerate(names):
            model.gradient(name, g)
            if n >= late:
                end(names[n - late])
        for name in names[-late:]:
            end(name)
        assert tell(model.root, 'step') == 'ok'
    step()
    before = store_figures(store)['scratch_written_bytes']
    for _ in range(3):
        step()
    written = store_figures(store)['scratch_written_bytes'] - before
    assert written < 0.1 * 3 * len(names) * g.nbytes, f'{written} bytes of both phases went to the device'


def test_clipping_waits_for_prepare(model):
    word(model.root, 'optimizer', WORDS + ' max_grad_norm=1')
    g = {name: random(i, *shape) for i, (name, shape) in enumerate(model.shapes.items())}
    for name in g:
        model.gradient(name, g[name])
    with fails(errno.EBUSY):
        model.update('w')
    assert 'prepare comes first' in word(model.root, 'error')
    assert 'prepare, read update/' in tell(model.root, 'commit')
    assert tell(model.root, 'prepare if=1').startswith('error: ESTALE')
    assert tell(model.root, f'prepare if={step_open(model.root)}') == 'ok'
    assert tell(model.root, 'prepare') == 'ok'
    norm = np.sqrt(sum(np.sum(x.astype('f8') ** 2) for x in g.values()))
    assert abs(float(word(model.root, 'grad_norm')) - norm) < 1e-9 * norm
    with fails(errno.EBUSY):
        model.gradient('bias', random(1, N))
    assert 'belong to this step' in word(model.root, 'error')
    assert tell(model.root, 'drop w').startswith('error: EBUSY')
    for name in g:
        np.testing.assert_allclose(widen(model.update(name)), model.stir(name, g[name] * np.float32(1 / (norm + 1e-6))), 1 / 128, 1e-6)
        o = bf16(random(7, *model.shapes[name]))
        model.ortho(name, o)
        assert model.apply(name) == 'ok'
        model.change(name, o, ratio_of(model.shapes[name]))
    assert tell(model.root, 'step async') == 'ok'
    assert tell(model.root, 'commit') == 'ok'
    model.check()
    word(model.root, 'optimizer', WORDS)
    whole_step(model, 5)  # the next step takes gradients again
    assert tell(model.root, 'commit') == 'ok'
    model.check()


def test_a_skipped_step_asks_for_nothing(model):
    word(model.root, 'optimizer', WORDS + ' skip_nonfinite=1')
    g = random(0, M, N)
    g[3, 3] = np.nan
    model.gradient('w', g)
    assert tell(model.root, 'prepare') == 'ok'
    assert word(model.root, 'skipped_steps') == '1'
    with fails(errno.ENODATA):
        model.update('w')
    assert tell(model.root, 'commit') == 'ok'
    assert word(model.root, 'step') == '1'
    np.testing.assert_array_equal(np.fromfile(model.root / 'w', 'f4').reshape(M, N), model.p['w'])
    word(model.root, 'optimizer', WORDS)
    whole_step(model, 3)
    assert tell(model.root, 'commit') == 'ok'
    model.check()


def test_what_comes_at_a_wrong_time_is_refused(model):
    o = bf16(random(1, M, N))
    with fails(errno.EBUSY):
        model.update('w')
    with fails(errno.EBUSY):
        model.ortho('w', o)
    assert model.apply('w', 7).startswith('error: EBUSY')  # it never had a gradient
    model.gradient('w', random(2, M, N))
    with fails(errno.EBUSY):
        model.ortho('w', o)
    assert 'was not read' in word(model.root, 'error')
    assert 'w: its orthogonalised update is missing' in tell(model.root, 'commit')
    assert 'is missing' in tell(model.root, 'step async')
    number = step_open(model.root)
    assert model.apply('w').startswith('error: EBUSY')
    model.update('w')
    assert model.apply('w').startswith('error: EINVAL')  # nothing is written
    (model.h / 'ortho' / 'w').write_bytes(o.tobytes()[:-2])
    assert 'not written wholly' in model.apply('w')
    with fails(errno.EINVAL):
        (model.h / 'ortho' / 'w').write_bytes(o.tobytes() + b'12')
    with open(model.h / 'ortho' / 'w', 'wb', buffering=0) as f, fails(errno.EINVAL):
        f.write(b'123')
    bad = o.copy()
    bad[5, 5] = 0x7f80
    model.ortho('w', bad)
    assert 'not finite' in model.apply('w')
    assert model.apply('w', number + 1).startswith('error: ESTALE')
    model.ortho('w', o)
    assert model.apply('w', number) == 'ok'
    assert model.apply('w', number).startswith('error: EBUSY')
    with fails(errno.EBUSY):
        model.ortho('w', o)
    with fails(errno.EBUSY):
        model.update('w')
    assert tell(model.root, 'commit') == 'ok'
    assert model.apply('w', number).startswith('error: ESTALE')
    model.gradient('bias', random(2, N))
    with fails(errno.EINVAL):
        model.update('bias')
    assert 'not muon' in word(model.root, 'error')


@pytest.mark.parametrize('shape, words, why', [
    (None, WORDS, 'set user.hitrain.shape'),
    (f'{M * N}', WORDS, '2 or 3 dimensions'),
    (f'2,2,{M * N // 8},2', WORDS, '2 or 3 dimensions'),
    (f'{M},{N}', WORDS + ' muon_split=40', '40 rows together'),
    (f'{M},{N}', WORDS + ' muon_split=24*2,1', '49 rows together'),
])
def test_what_is_no_matrix_is_refused(model, shape, words, why):
    word(model.root / 'w', 'optimizer', words)
    os.removexattr(model.root / 'w', 'user.hitrain.shape')
    if shape:
        word(model.root / 'w', 'shape', shape)
    with fails(errno.EINVAL):
        model.gradient('w', random(0, M, N))
    assert why in word(model.root, 'error'), word(model.root, 'error')


def test_ranges_of_elements_are_no_blocks(model):
    word(model.root / 'w', 'optimizer', '0:20 lr=0')
    with fails(errno.EINVAL):
        model.gradient('w', random(0, M, N))
    assert 'muon_split' in word(model.root, 'error')


def test_an_abort_takes_both_phases_back(model):
    whole_step(model, 1)
    assert tell(model.root, 'commit') == 'ok'
    before = {n: (p.copy(), model.m[n].copy()) for n, p in model.p.items()}
    for applied in (False, True):
        other = Model(model.root)
        other.gradient('w', random(5, M, N))
        other.update('w')
        other.ortho('w', bf16(random(6, M, N)))
        if applied:
            assert other.apply('w') == 'ok'
        assert tell(model.root, 'drop w').startswith('error: EBUSY')
        assert tell(model.root, 'abort') == 'ok'
        model.check()
        with fails(errno.EBUSY):
            other.ortho('w', bf16(random(6, M, N)))
    assert all(np.array_equal(before[n][0], model.p[n]) for n in before)
    whole_step(model, 9)
    assert tell(model.root, 'commit') == 'ok'
    model.check()


@pytest.mark.parametrize('when', ['stirred', 'written', 'applied'])
def test_a_kill_between_the_phases_forgets_the_step(store, model, when):
    whole_step(model, 1)
    assert tell(model.root, 'commit') == 'ok'
    model.gradient('w', random(5, M, N))
    model.update('w')
    if when != 'stirred':
        model.ortho('w', bf16(random(6, M, N)))
    if when == 'applied':
        assert model.apply('w') == 'ok'
    store.crash()
    model.check()
    whole_step(model, 9)
    assert tell(model.root, 'commit') == 'ok'
    model.check()
    store.unmount()
    store.assert_clean()


def test_blocks_have_their_own_rate(mnt):
    model = Model(mnt / 'm', {'w': (60, N), 'x': (3, M, N)}).make()
    word(model.root / 'w', 'optimizer', 'muon_split=40,10*2')
    g = {name: random(1, *shape) for name, shape in model.shapes.items()}
    o = {name: bf16(random(2, *shape)) for name, shape in model.shapes.items()}
    for name in g:
        model.gradient(name, g[name])
        model.update(name)
        model.stir(name, g[name])
        model.ortho(name, o[name])
        assert model.apply(name) == 'ok'
    assert tell(model.root, 'commit') == 'ok'
    ratio = np.ones((60, 1), 'f4')
    ratio[:40] = 2 ** 0.5
    model.change('w', o['w'], ratio)
    model.change('x', o['x'], ratio_of((M, N)))
    model.check()


def content(model):
    """All bytes of parameters and their state."""
    return {str(f.relative_to(model.h)): f.read_bytes() for name in model.shapes for f in (model.h / 'state' / name).iterdir()} | {
        name: (model.root / name).read_bytes() for name in model.shapes}


EXTRAS = ['', ' max_grad_norm=1', ' ns=store', ' accumulate=2', ' maximize=1 grad_scale=4', ' state_bits=8', ' state_bits=16']


def make_logged(root, dtype, extra):
    """(model, step(seed)) of a model whose steps are logged."""
    model = Model(root, {'w': (M, N), 'x': (700, 900), 'y': (2, 30, 40)})
    if dtype == 'bf16':
        model.p = {name: bf16(p) for name, p in model.p.items()}
    words = WORDS + extra + ' redo=on durable_every=100'
    new_model(model.root, words, dtype, **{name: p.tobytes() for name, p in model.p.items()})
    for name, shape in model.shapes.items():
        word(model.root / name, 'shape', ','.join(map(str, shape)))
    sync(model.root)

    def step(seed):
        for _ in range(2 if 'accumulate' in extra else 1):
            for i, (name, shape) in enumerate(model.shapes.items()):
                g = random(seed + i, *shape)
                model.gradient(name, bf16(g) if dtype == 'bf16' else g)
        if 'ns=store' not in extra:
            assert tell(model.root, 'prepare') == 'ok'
            for name, shape in model.shapes.items():
                u = model.update(name)
                model.ortho(name, bf16(random(seed, *shape) + widen(u.reshape(shape))))
                assert model.apply(name) == 'ok'
        assert tell(model.root, 'step') == 'ok'
    return model, step


@pytest.mark.parametrize('extra', EXTRAS)
@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_logged_steps_have_both_phases(store, mnt, dtype, extra):
    """After a crash, and after an abort, the store computes them again to the same bits; without any matrix product."""
    model, step = make_logged(mnt / 'm', dtype, extra)
    for i in range(5):
        step(10 * i)
    want = content(model)
    assert int(word(model.root, 'logged_steps')) >= 4
    store.crash()
    assert word(model.root, 'step') == '5'
    assert content(model) == want
    model.gradient('w', bf16(random(3, M, N)) if dtype == 'bf16' else random(3, M, N))
    if 'ns=store' not in extra and 'accumulate' not in extra:
        assert tell(model.root, 'prepare') == 'ok'
        model.update('w')
    assert tell(model.root, 'abort') == 'ok'
    assert content(model) == want
    step(100)
    assert int(word(model.root, 'logged_steps')) >= 5
    want = content(model)
    store.crash()
    assert content(model) == want
    store.unmount()
    store.assert_clean()


@pytest.mark.parametrize('dtype, extra', [*(('f32', e) for e in EXTRAS), ('f32', ' muon_split=8,12,28'), ('bf16', ''), ('bf16', ' state_bits=8')])
def test_a_standby_follows_bit_identically(stores, tmp_path, programs, dtype, extra):
    """Through a vault, where the standby is killed once in between, and through a pipe."""
    (_, other), (a, b) = stores
    of_w = extra if 'split' in extra else ''
    model, step = make_logged(a / 'm', dtype, ('' if of_w else extra) + ' redo_keep=20')
    if of_w:
        word(model.root / 'w', 'optimizer', of_w.strip())
    step(1)
    assert tell(model.root, 'commit') == 'ok' and tell(model.root, 'snapshot base') == 'ok'
    run('hitrainctl', 'vault', 'init', tmp_path / 'v')
    to = programs('archiver', 'archive', model.root, tmp_path / 'v/job', '--follow', '--log')
    at = programs('standby', 'restore', tmp_path / 'v/job', b / 'm', '--follow')
    copy = Model(b / 'm', model.shapes)
    at.wait_for(lambda: copy.root.exists() and word(copy.root, 'durable_step') == '1', 'the copy is there')
    for i in range(2, 7):
        step(10 * i)
        assert tell(model.root, 'commit') == 'ok'
        if i == 4:
            at.kill()
            at.start()
        to.wait_for(lambda: steps(f'{tmp_path}/v', 'job') == i, f'step {i} is in the vault')     # a logged one: the copy is made once
    at.wait_for(lambda: word(copy.root, 'durable_step') == '6', 'the copy has all')
    assert content(copy) == content(model)
    assert [kind for _, _, kind in entries(f'{tmp_path}/v', 'job')] == [1, 2] and 'anew' not in at.said()
    to.end()
    at.end()
    refused = run('hitrainctl', 'restore', tmp_path / 'v/job', b / 'part', '--shard=0of2', check=False)
    assert refused.returncode == 1 and 'need whole matrices: name job@1, the full step before it' in refused.stderr
    sent = subprocess.run([BIN / 'hitrainctl', 'archive', model.root, 'base', '-'], stdout=subprocess.PIPE, check=True).stdout
    subprocess.run([BIN / 'hitrainctl', 'restore', '-', b / 'piped'], input=sent, check=True)
    sent = subprocess.run([BIN / 'hitrainctl', 'archive', model.root, '-', '--follow', '--once', '--from=base'], stdout=subprocess.PIPE,
                          check=True).stdout
    subprocess.run([BIN / 'hitrainctl', 'restore', '-', b / 'piped', '--follow'], input=sent, check=True)
    assert content(Model(b / 'piped', model.shapes)) == content(model)
    other.crash()
    assert content(copy) == content(model)


@pytest.mark.parametrize('pieces, good', [
    ([(0, 8, 0), (8, 8, 0), (0, 8, ORTHO)], True), ([(0, 16, SPARSE), (0, 8, ORTHO | SPARSE)], True),
    ([(0, 8, ORTHO)], False), ([(0, 8, 0), (0, 8, ORTHO), (8, 8, 0)], False), ([(0, 8, 0), (0, 8, ORTHO), (4, 4, ORTHO)], False),
    ([(0, 8, 0), (0, 8, ORTHO), (8, 8, 2 * ORTHO)], False), ([(0, 8, 0), (0, 6, ORTHO)], False)])
def test_an_update_follows_its_gradient(pieces, good):
    """first, bytes and coding of pieces with 8 bytes each, as somebody may send them."""
    number = bytes(28) + b'\1\1' + bytes(42) + b'w'
    records = [Record(NUMBERS, 0, number, b''), *(Record(PIECES, first, struct.pack('<II', count, coding) + bytes(8), b'')
                                                 for first, count, coding in pieces)]
    items = iter(Reader(records, 7, in_pipe=True))
    if good:
        assert [(p.first, p.bytes, p.coding) for _, p in zip(records, items) if type(p) is Piece] == pieces
    else:
        with pytest.raises(Damage, match='piece of a gradient is not in order'):
            list(zip(records, items))


def orthogonalised(u, steps=5, a=3.4445, b=-4.775, c=2.0315):
    x = u.astype('f8') / np.linalg.norm(u)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def test_the_store_orthogonalises(mnt):
    model = Model(mnt / 'm', {'w': (M, N), 'v': (N, 3 * M), 'x': (3, 24, 16)}).make(WORDS + ' ns=store max_grad_norm=1e9')
    word(model.root / 'v', 'optimizer', 'muon_split=8,12')
    for step in range(3):
        before = {name: np.fromfile(model.root / name, 'f4').reshape(s) for name, s in model.shapes.items()}
        g = {name: random(10 * step + i, *s) for i, (name, s) in enumerate(model.shapes.items())}
        u = {}
        for name in g:
            model.gradient(name, g[name])
            u[name] = model.stir(name, g[name])
        assert tell(model.root, 'commit') == 'ok'
        blocks = {'w': [np.s_[:]], 'v': [np.s_[:8], np.s_[8:]], 'x': [0, 1, 2]}
        for name in g:
            after = np.fromfile(model.root / name, 'f4').reshape(model.shapes[name])
            for at in blocks[name]:
                want = orthogonalised(u[name][at])
                found = (before[name][at] * np.float32(1 - LR * WD) - after[at]) / (LR * ratio_of(want.shape))
                assert np.linalg.norm(found - want) < 0.05 * np.linalg.norm(want), name
    assert word(model.root, 'step') == '3'


def test_kept_steps_clones_and_shards_have_muon(store, mnt, model):
    """A step is kept, another one follows; the clone and the model after a rollback go on from the kept one to the same bytes."""
    whole_step(model, 1)
    assert tell(model.root, 'snapshot first') == 'ok'
    kept = content(model)
    whole_step(model, 2)
    assert tell(model.root, 'commit') == 'ok'
    want = content(model)
    assert tell(model.root, 'clone first twin') == 'ok'
    assert tell(model.root, 'rollback first') == 'ok'
    assert content(model) == kept
    for root in (model.root, mnt / 'twin'):
        other = Model(root)
        assert content(other) == kept
        shards = [root / '.hitrain' / 'shard' / f'{rank}of2' for rank in range(2)]
        g = {name: random(2 + i, *shape) for i, (name, shape) in enumerate(other.shapes.items())}
        for name in g:  # each rank writes its part; the matrix is read whole
            sizes = [os.stat(s / 'grad' / name).st_size for s in shards]
            assert sum(sizes) == g[name].nbytes
            rest = g[name].tobytes()
            for shard, size in zip(shards, sizes):
                if size:
                    (shard / 'grad' / name).write_bytes(rest[:size])
                rest = rest[size:]
            other.update(name)
            other.ortho(name, bf16(random(52, *other.shapes[name])))
            assert other.apply(name) == 'ok'
        assert tell(root, 'commit') == 'ok'
        assert content(other) == want
