# SPDX-License-Identifier: Apache-2.0
"""Logged steps as files, and the same updates in another store: .hitrain/redo and the command decide."""
import errno
import os
import struct

import numpy as np
import pytest

from calls import fails, sync
from conftest import wait_for
from test_roots import command, put_gradient, word
from test_step_streams import content, gradient, make_model, receive, send

REDO = 'adamw lr=0.01 weight_decay=0.1 redo=on durable_every=4 redo_keep=12'
PARAM = struct.Struct('<QQQIBBBB9fI')
PIECES = {1: struct.Struct('<QIIII'), 2: struct.Struct('<QIIIIII')}
ENTRY = {2: np.dtype([('zeros', '<u2'), ('value', '<u2')]), 4: np.dtype([('zeros', '<u2'), ('value', '<u4')])}


def figures(root):
    return {k: int(v) for k, v in (line.split('=') for line in word(root, 'redo').split())}


def elements_of(entries, size, length):
    """All elements, of entries without zeros."""
    entries = np.frombuffer(entries, ENTRY[size])
    out = np.zeros(length // size, ENTRY[size]['value'])
    out[np.cumsum(entries['zeros'].astype(int) + 1) - 1] = entries['value']
    return out.tobytes()


def thin(g):
    """A hundredth of its elements; the others are zero."""
    out = np.zeros_like(g)
    out[::100] = g[::100]
    return out


def put_topk(root, name, g):
    """A gradient of f32, or of bf16 in 16 bits, that names only its elements that are not zero."""
    at = np.flatnonzero(g)
    head = struct.pack('<8sIB3xQQ', b'HTtopk\r\n', 1, 1 if g.dtype.itemsize == 4 else 2, len(g), len(at))
    with open(root / '.hitrain' / 'grad-topk' / name, 'wb') as f:
        f.write(head + at.astype('<u4').tobytes() + g[at].tobytes())


def logged(root, number):
    """Path of a parameter: its record, and {offset in the gradient: bytes}."""
    raw = (root / '.hitrain' / 'redo' / str(number)).read_bytes()
    magic, version, zero, step, lineage, summary, grads = struct.unpack_from('<8sIIQQQQ', raw)
    assert (magic, version, zero, step) == (b'HTredo\r\n', 1, 0, number) and len(raw) == 64 + summary + grads
    assert lineage == figures(root)['lineage']
    version, params, pieces = struct.unpack_from('<I12xQQ', raw, 64)
    record_of = PIECES[version]
    assert summary == 32 + params * PARAM.size + pieces * record_of.size
    paths = {os.stat(os.path.join(at, f)).st_ino: os.path.relpath(os.path.join(at, f), root)
             for at, _, files in os.walk(root) for f in files}
    out, names = {}, []
    for i in range(params):
        record = raw[96 + i * PARAM.size:][:PARAM.size]
        names.append(paths[PARAM.unpack(record)[0]])
        out[names[-1]] = record, {}
    for i in range(pieces):
        at, place, index, begin, end, *coded = record_of.unpack_from(raw, 96 + params * PARAM.size + i * record_of.size)
        stored, coding = coded or (end - begin, 0)
        _, _, _, chunk, dtype, grad_dtype, *_ = PARAM.unpack(out[names[place]][0])
        size = {1: 4, 2: 2, 3: 2}
        first = chunk // size[dtype] * size[grad_dtype] * index
        data = raw[64 + summary + at:][:stored]
        out[names[place]][1][first + begin] = elements_of(data, size[grad_dtype], end - begin) if coding else data
    return out


def apply(root, step):
    for name, (record, pieces) in step.items():
        command(root, f'decide {record.hex()} {name}')
        with open(root / '.hitrain' / 'grad' / name, 'r+b', buffering=0) as f:
            for off, data in pieces.items():
                assert os.pwrite(f.fileno(), data, off) == len(data)
    command(root, 'commit')


def train(root, seed, dtype='f32', elements=300_000, how=sync):
    for i, name in enumerate(('w', 'deep/v')):
        put_gradient(root, name, gradient(elements, seed + i, dtype))
    how(root)


def copy(a, b, name='base'):
    command(a, f'snapshot {name}')
    done = receive(send(a, name), b)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_the_same_numbers_and_gradients_make_the_same_bits(stores, dtype):
    """Words that change in each step, clipping, full steps, and another number of threads."""
    _, (a, b) = stores
    root = make_model(a / 'model', dtype)
    word(root, 'optimizer', REDO + ' max_grad_norm=0.5')
    for seed in (10, 20):
        train(root, seed, dtype)
    copy(root, b / 'model')
    word(b / 'model', 'optimizer', 'adamw lr=1')
    for n in range(3, 12):
        word(root, 'optimizer', REDO.replace('0.01', str(n / 1000)) + f' max_grad_norm=0.5 grad_scale={n}')
        train(root, 10 * n, dtype)
        apply(b / 'model', logged(root, n))
        assert word(b / 'model', 'step') == word(b / 'model', 'durable_step') == str(n)
        assert content(root, 'w', 'deep/v') == content(b / 'model', 'w', 'deep/v'), n


@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_sparse_gradients_are_logged_without_zeros(stores, dtype):
    """A hundredth of the elements: in the log, after a crash, and in another store."""
    (store, _), (a, b) = stores
    root = make_model(a / 'model', dtype)
    word(root, 'optimizer', REDO)
    for seed in (10, 20):
        train(root, seed, dtype)
    copy(root, b / 'model')
    word(b / 'model', 'optimizer', 'adamw lr=1')
    for n in range(3, 8):
        sparse = [thin(gradient(300_000, 10 * n + i, dtype)) for i in (0, 1)]
        for name, g in zip(('w', 'deep/v'), sparse):
            put_topk(root, name, g)
        sync(root)
        taken = os.stat(root / '.hitrain' / 'redo' / str(n)).st_size
        assert taken < 0.025 * 2 * 300_000 * sparse[0].dtype.itemsize
        step = logged(root, n)
        assert b''.join(step['w'][1][at] for at in sorted(step['w'][1])) == sparse[0].tobytes()
        apply(b / 'model', step)
        assert content(root, 'w', 'deep/v') == content(b / 'model', 'w', 'deep/v'), n
    store.crash()
    wait_for(lambda: word(root, 'step') == '7' and figures(root)['last'] == 7, 'the steps are computed again')
    assert content(root, 'w', 'deep/v') == content(b / 'model', 'w', 'deep/v')


def test_a_window_of_steps_stays_readable(stores):
    _, (a, _) = stores
    root = make_model(a / 'model')
    word(root, 'optimizer', REDO.replace('redo_keep=12', 'redo_keep=3'))
    for n in range(1, 10):
        train(root, n)
        names = sorted(map(int, os.listdir(root / '.hitrain' / 'redo')))
        seen = figures(root)
        assert not names or (names[0], names[-1]) == (seen['first'], seen['last'])
        assert names == list(range(names[0], names[-1] + 1)) if names else n < 3
        assert not names or names[-1] == n
    assert len(names) >= 3
    with open(root / '.hitrain' / 'redo' / str(names[0]), 'rb') as f:
        for n in range(10, 20):
            train(root, n)
        assert not os.path.exists(root / '.hitrain' / 'redo' / str(names[0]))
        assert struct.unpack_from('<16xQ', f.read())[0] == names[0], 'an open file stays readable'


def test_a_step_of_another_history_is_seen(stores):
    """After a rollback the same number is another step, and the lineage says so; a kept step knows its own."""
    _, (a, _) = stores
    root = make_model(a / 'model')
    word(root, 'optimizer', REDO)
    for n in range(1, 4):
        train(root, n)
    command(root, 'snapshot good')
    snap = root / '.hitrain' / 'snap' / 'good'
    for n in range(4, 6):
        train(root, n)
    before = figures(root)
    assert figures(snap)['lineage'] == before['lineage'] and before['last'] == 5
    (root / 'rng').write_bytes(b'other')
    assert figures(root)['changed'] == 1
    command(root, 'commit')
    assert figures(root)['changed'] == 0 and figures(root)['lineage'] == before['lineage'] and figures(root)['last'] == 5
    command(root, 'rollback good')
    after = figures(root)
    assert after['last'] == 0 and after['lineage'] != before['lineage'] and os.listdir(root / '.hitrain' / 'redo') == []
    train(root, 9)
    train(root, 9)
    assert figures(root)['last'] == 5 and figures(snap)['lineage'] == before['lineage'] != figures(root)['lineage']
    with fails(errno.ENODATA):
        os.getxattr(a, 'user.hitrain.redo')
