# SPDX-License-Identifier: Apache-2.0
"""`.hitrain/gather`: many parameters and gradients of a model as one file."""
import contextlib
import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from calls import fails, settle, sync
from conftest import MIB
from test_roots import command, put_gradient, word
from test_shards import SIZES, files, make_model, values

LINES_BYTES = 8192
GATHER = 1 << 30 | LINES_BYTES << 16 | ord('h') << 8 | 4
NAMES = ['b', 'w', 'deep/v']


def name_members(fd, lines):
    fcntl.ioctl(fd, GATHER, bytearray(lines.encode().ljust(LINES_BYTES, b'\0')))


@contextlib.contextmanager
def gather(root, names=NAMES, flags=os.O_RDWR):
    fd = os.open(root / '.hitrain/gather', flags)
    try:
        name_members(fd, ''.join(f'{(root / n).stat().st_size} {n}\n' for n in names))
        yield fd
    finally:
        os.close(fd)
        if os.geteuid() == 0:
            settle(root)    # the daemon drops what is left when it hears of the close


def put_all(fd, data, piece=777_777):
    """In pieces that cross members and elements, from several threads."""
    with ThreadPoolExecutor(3) as pool:
        places = range(0, len(data), piece)
        assert list(pool.map(lambda at: os.pwrite(fd, data[at:at + piece], at), places)) == \
            [len(data[at:at + piece]) for at in places]


def apply(root, names=NAMES):
    assert command(root, *(f'apply {n}' for n in names)) == ['ok'] * len(names)


@pytest.mark.parametrize('dtype, grad_dtype', [('f32', None), ('bf16', 'f32')])
def test_a_step_through_one_file_has_the_bits_of_a_step_through_many(mnt, dtype, grad_dtype):
    a, b = make_model(mnt / 'a', dtype), make_model(mnt / 'b', dtype)
    for root in a, b:
        for n in NAMES if grad_dtype else []:
            word(root / n, 'grad_dtype', grad_dtype)
    with gather(b) as fd:
        for s in range(2):
            grads = {n: values(n, 9 + s, dtype if not grad_dtype else 'f32')[:(a / n).stat().st_size // (4 if dtype == 'f32' else 2)]
                     for n in NAMES}
            for n in NAMES:
                put_gradient(a, n, grads[n])
            sync(a)
            put_all(fd, b''.join(grads[n].tobytes() for n in NAMES))
            assert word(b, 'step_open') == '0'  # until `apply`
            apply(b)
            assert os.pread(fd, 16 * MIB, 0) == b''.join((a / n).read_bytes() for n in NAMES)  # waits for the updates
            sync(b)
            assert files(a) == files(b)
        whole = b''.join((b / n).read_bytes() for n in NAMES)
        assert os.pread(fd, 10, len(whole)) == b'' and os.pread(fd, 10, 2) == whole[2:12]


def test_members_are_named_all_or_none(mnt):
    root = make_model(mnt / 'model')
    make_model(mnt / 'other')
    (root / 'sub').mkdir()
    with gather(root, ['b']) as fd:
        for lines, error in ((f'{SIZES["w"]} w\n4 none\n', errno.ENOENT), ('12 notes.txt\n', errno.EINVAL), ('5 w\n', errno.ESTALE),
                             ('x w\n', errno.EINVAL), ('w\n', errno.EINVAL), ('4 ../other/b\n', errno.EINVAL), ('4 /b\n', errno.EINVAL),
                             ('0 sub\n', errno.EISDIR), ('x' * LINES_BYTES, errno.E2BIG)):
            with fails(error):
                name_members(fd, lines)
            if error != errno.E2BIG:
                assert word(root, 'error').startswith(f'gather: \'{lines.splitlines()[-1]}\': ')
            assert len(os.pread(fd, 16 * MIB, 0)) == 4
        name_members(fd, f'{SIZES["w"]} w\n')
        assert word(root, 'error') == '' or 'gather' not in word(root, 'error')
        assert len(os.pread(fd, 16 * MIB, 0)) == 4 + SIZES['w']
    for path in '.hitrain/ctl', 'w':
        fd = os.open(root / path, os.O_RDWR)
        with fails(errno.ENOTTY):
            name_members(fd, '4 b\n')
        os.close(fd)
    fd = os.open(root / '.hitrain', os.O_RDONLY)
    with fails(errno.ENOTTY):
        name_members(fd, '4 b\n')
    os.close(fd)
    assert not (mnt / '.hitrain/gather').exists() and not (root / 'deep/.hitrain/gather').exists()


def test_what_no_member_has_is_refused(mnt):
    root = make_model(mnt / 'model')
    total = sum(SIZES.values())
    with gather(root) as fd:
        with fails(errno.EINVAL):
            os.pwrite(fd, bytes(8), total - 4)
        with fails(errno.EINVAL):
            os.pwrite(fd, bytes(8), 1 << 62)
        apply(root)
        assert word(root, 'step_open') == '0'  # nothing was written
        os.truncate(root / 'w', MIB)
        assert os.pread(fd, 4, 0) == (root / 'b').read_bytes()
        with fails(errno.ESTALE):
            os.pread(fd, 4, 4 + 2 * MIB)
    with gather(root, flags=os.O_RDONLY) as fd, fails(errno.EBADF):
        os.pwrite(fd, bytes(4), 0)
    with gather(root, flags=os.O_WRONLY) as fd, fails(errno.EBADF):
        os.pread(fd, 4, 0)


def test_a_close_drops_what_was_not_applied_and_nothing_of_others(mnt):
    root = make_model(mnt / 'model', words='sgd lr=1')
    before = np.fromfile(root / 'b', 'f4')
    with gather(root, ['b']) as fd:
        os.pwrite(fd, np.float32(3).tobytes(), 0)
    apply(root, ['b'])
    assert word(root, 'step_open') == '0' and np.all(np.fromfile(root / 'b', 'f4') == before)
    with gather(root, ['b']) as fd:
        os.pwrite(fd, np.float32(1).tobytes(), 0)
        apply(root, ['b'])
        sync(root)
        other = os.open(root / '.hitrain/grad/b', os.O_WRONLY)
        os.pwrite(other, np.float32(2).tobytes(), 0)
    os.close(other)  # after the close of the first, whose bytes were applied
    sync(root)
    assert np.all(np.fromfile(root / 'b', 'f4') == before - 1 - 2)


def test_an_aborted_step_leaves_nothing_in_the_next(mnt):
    root = make_model(mnt / 'model', words='sgd lr=1')
    before = {n: (root / n).read_bytes() for n in NAMES}
    with gather(root) as fd:
        put_all(fd, bytes(4) + np.ones(SIZES['w'] // 4, 'f4').tobytes())
        apply(root, ['w'])
        assert command(root, 'abort') == ['ok']
        apply(root)
        assert word(root, 'step_open') == '0'
        assert os.pread(fd, 16 * MIB, 0) == b''.join(before[n] for n in NAMES)
        os.pwrite(fd, np.float32(1).tobytes(), 0)
        apply(root, ['b'])
        with fails(errno.EBUSY):
            os.pwrite(fd, bytes(4), 0)  # it belongs to the step
        sync(root)
    assert np.fromfile(root / 'b', 'f4') == np.frombuffer(before['b'], 'f4') - 1
    assert (root / 'w').read_bytes() == before['w']


def test_members_of_a_file_are_limited(mnt):
    root = make_model(mnt / 'model')
    lines = '4 b\n' * 2047
    with gather(root, [], os.O_RDONLY) as fd:
        for _ in range(131072 // 2047):
            name_members(fd, lines)
        with fails(errno.E2BIG):
            name_members(fd, lines)
        name_members(fd, '4 b\n' * (131072 % 2047))
        with fails(errno.E2BIG):
            name_members(fd, '4 b\n')
        assert len(os.pread(fd, MIB, 0)) == 4 * 131072
    with gather(root, ['b']) as fd:
        assert len(os.pread(fd, MIB, 0)) == 4
