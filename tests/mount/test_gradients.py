# SPDX-License-Identifier: Apache-2.0
"""Wrong gradients of clients: given up in the middle, with holes, too many at once; and their effect on others."""
import errno
import os
import subprocess
import time

import numpy as np
import pytest

from calls import sync
from conftest import SECONDS_MAX, wait_for
from models import new_model
from test_roots import command, refused, word

COUNT = 4096
ONES = np.ones(COUNT, 'f4').tobytes()


def make_root(mnt, name, optimizer, **files):
    """A model root with parameters of ones, committed; files: elements by name."""
    root = new_model(mnt / name, optimizer)
    for file, count in files.items():
        (root / file).write_bytes(np.ones(count, 'f4').tobytes())
    sync(root)
    return root


@pytest.fixture
def root(mnt):
    """Two parameters of 4,096 ones; a gradient of ones makes them zeros."""
    return make_root(mnt, 'model', 'sgd lr=1', w=COUNT, v=COUNT)


def open_gradient(root, name, flags=os.O_WRONLY):
    return os.open(root / '.hitrain' / 'grad' / name, flags)


def values(path):
    return set(np.frombuffer(path.read_bytes(), 'f4').tolist())


# ------------------------------------------------------------------------ drop

def test_a_gradient_given_up_in_the_middle_is_not_handed_over(root):
    fd = open_gradient(root, 'w')
    os.pwrite(fd, ONES[:6000], 0)
    os.pwrite(fd, ONES[:101], 8000)         # inside an element
    assert command(root, 'drop w') == ['ok']
    os.close(fd)
    (root / '.hitrain' / 'grad' / 'v').write_bytes(ONES)
    assert command(root, 'commit') == ['ok']
    assert values(root / 'w') == {1.0} and values(root / 'v') == {0.0}
    assert word(root, 'step') == '1'


def test_after_a_drop_the_same_descriptor_begins_anew(root):
    fd = open_gradient(root, 'w')
    os.pwrite(fd, ONES[:6000], 4000)
    assert command(root, 'drop w', 'drop w', 'drop v') == ['ok', 'ok', 'ok']
    os.pwrite(fd, ONES, 0)
    os.close(fd)
    assert command(root, 'commit') == ['ok']
    assert values(root / 'w') == {0.0}


def test_half_a_gradient_that_was_closed_can_be_taken_back(root):
    fd = open_gradient(root, 'w')
    os.pwrite(fd, ONES[:6000], 0)
    os.close(fd)
    assert command(root, 'commit')[0].startswith('error: EBUSY')
    assert command(root, 'drop w', 'commit') == ['ok', 'ok']
    assert values(root / 'w') == {1.0}


def test_what_was_applied_cannot_be_dropped(root):
    (root / '.hitrain' / 'grad' / 'w').write_bytes(ONES)
    assert command(root, 'wait w') == ['ok']
    answer = command(root, 'drop w')[0]
    assert answer.startswith('error: EBUSY') and 'model/w' in answer and 'abort' in answer
    assert command(root, 'commit') == ['ok']
    assert values(root / 'w') == {0.0}


def test_a_drop_names_what_it_cannot_find(root):
    for line, code in (('drop nothing', 'ENOENT'), ('drop', 'EINVAL'), ('drop ../w', 'EINVAL')):
        assert command(root, line)[0].startswith('error: ' + code)


# ----------------------------------------------------------------------- holes

def sparse_file(path, *data):
    """COUNT elements; ones where data (first, last) says so, holes elsewhere."""
    with open(path, 'wb') as f:
        f.truncate(4 * COUNT)
        for first, last in data:
            f.seek(4 * first)
            f.write(ONES[4 * first:4 * last])
    return path


COPIERS = {
    'cp': lambda source, target: ['cp', '--sparse=always', source, target],
    'cp by default': lambda source, target: ['cp', source, target],
    'dd': lambda source, target: ['dd', f'if={source}', f'of={target}', 'bs=4096', 'conv=sparse', 'status=none'],
    'rsync': lambda source, target: ['rsync', '-I', '-S', '--inplace', source, target],
}


@pytest.mark.parametrize('copier', COPIERS)
@pytest.mark.parametrize('data', [(), ((0, 1024),), ((0, 1024), (2048, 3072)), ((1024, 4096),)],
                         ids=['zeros', 'begin', 'pieces', 'end'])
def test_holes_of_a_copied_gradient_are_zeros_or_refused(root, tmp_path, copier, data):
    """Zeros where the program sets the size in the end. Else the gradient is partial, and the boundary refuses it; if
    the program wrote nothing at all, the error says so.
    """
    word(root, 'optimizer', 'sgd lr=1 weight_decay=0.5')
    source = sparse_file(tmp_path / 'w', *data)
    subprocess.run(COPIERS[copier](source, root / '.hitrain' / 'grad' / 'w'), check=True, timeout=SECONDS_MAX)
    answer = command(root, 'commit')
    sets_size = copier != 'dd' and (not data or data[-1][1] < COUNT)
    if answer != ['ok']:
        assert answer[0].startswith('error: EBUSY') and 'model/w' in answer[0] and not sets_size
        first_hole = 4 * data[0][1] if data[0][0] == 0 else 0
        for told in answer[0], word(root, 'error'):
            assert f': byte {first_hole} is the first hole; write the rest, or take that back with drop' in told
    elif word(root, 'step') == '0':
        wait_for(lambda: 'without a byte' in word(root / 'w', 'error'), 'it is told')
        assert not data and not sets_size
    else:
        want = np.full(COUNT, 0.5, 'f4')
        for first, last in data:
            want[first:last] -= 1
        assert np.array_equal(np.frombuffer((root / 'w').read_bytes(), 'f4'), want)


def test_tar_extracts_a_sparse_gradient(root, tmp_path):
    sparse_file(tmp_path / 'w', (0, 1024), (2048, 3072))
    subprocess.run(['tar', '-C', tmp_path, '-S', '-cf', tmp_path / 'tar', 'w'], check=True, timeout=SECONDS_MAX)
    subprocess.run(['tar', '-C', root / '.hitrain' / 'grad', '--overwrite', '--no-same-owner', '--no-same-permissions',
                    '-xf', tmp_path / 'tar'], timeout=SECONDS_MAX)     # it may complain of the mode
    assert command(root, 'commit') == ['ok']
    want = np.ones(COUNT, 'f4')
    want[:1024] = want[2048:3072] = 0
    assert np.array_equal(np.frombuffer((root / 'w').read_bytes(), 'f4'), want)


def test_a_size_that_is_set_first_says_nothing(root):
    """Several writers that each set the size and then write their part."""
    fds = [open_gradient(root, 'w') for _ in range(2)]
    for fd in fds:
        os.ftruncate(fd, 4 * COUNT)
    for i, fd in enumerate(fds):
        os.pwrite(fd, ONES[:2 * COUNT], 2 * COUNT * i)
    for fd in fds:
        os.close(fd)
    assert command(root, 'commit') == ['ok']
    assert values(root / 'w') == {0.0}


def test_sizes_that_no_gradient_has(root):
    fd = open_gradient(root, 'w')
    refused(errno.EINVAL, os.ftruncate, fd, 4 * COUNT + 4)
    assert 'has 16384' in word(root, 'error')
    os.ftruncate(fd, 400)
    refused(errno.EINVAL, os.close, fd)
    assert '400 bytes of holes' in word(root, 'error')
    assert word(root, 'step_open') == '0'


def test_zeros_twice_in_a_step(root):
    (root / '.hitrain' / 'grad' / 'w').write_bytes(ONES)
    fd = open_gradient(root, 'w')
    os.ftruncate(fd, 4 * COUNT)
    refused(errno.EBUSY, os.close, fd)
    assert 'belong to this step already' in word(root, 'error')
    assert command(root, 'commit') == ['ok']
    assert values(root / 'w') == {0.0}


def test_an_empty_gradient_is_told(root, tmp_path):
    (tmp_path / 'empty').write_bytes(b'')
    subprocess.run(['cp', tmp_path / 'empty', root / '.hitrain' / 'grad' / 'w'], check=True)
    wait_for(lambda: 'without a byte' in word(root / 'w', 'error'), 'it is told')
    word(root / 'w', 'error', '')
    (root / '.hitrain' / 'grad' / 'w').write_bytes(ONES)
    assert command(root, 'commit') == ['ok'] and word(root / 'w', 'error') == ''


# ------------------------------------------------------- numbers that do not fit

def test_a_shape_that_does_not_fit_is_refused(root):
    refused(errno.EINVAL, word, root / 'w', 'shape', '7,7')
    assert 'shape 7,7 says 49 elements, but the file has 16384 bytes of f32' in word(root / 'w', 'error')
    word(root / 'w', 'shape', '64,64')
    assert word(root / 'w', 'shape') == '64,64'


def test_a_gradient_for_another_shape_is_refused(root):
    """Frameworks set the shape first, and write the file then."""
    with open(root / 'new', 'wb') as f:
        word(root / 'new', 'shape', '2,3')
        f.write(ONES[:20])
    refused(errno.EINVAL, open_gradient, root, 'new')
    assert 'shape 2,3 says 6 elements' in word(root / 'new', 'error') and 'shape 2,3 says 6' in word(root, 'error')
    with open(root / 'new', 'ab') as f:
        f.write(ONES[:4])
    (root / '.hitrain' / 'grad' / 'new').write_bytes(ONES[:24])
    assert command(root, 'commit') == ['ok']


def test_half_an_element_is_no_state(mnt):
    root = make_root(mnt, 'model', 'adamw lr=1e-3', w=COUNT)
    (root / '.hitrain' / 'grad' / 'w').write_bytes(ONES)
    sync(root)
    path = root / '.hitrain' / 'state' / 'w' / 'exp_avg'
    before = path.read_bytes()
    fd = os.open(path, os.O_WRONLY)
    for off, size in ((0, 102), (2, 4), (4, 3)):
        refused(errno.EINVAL, os.pwrite, fd, ONES[:size], off)
        assert 'must be whole elements' in word(root, 'error')
    assert path.read_bytes() == before
    assert os.pwrite(fd, ONES[:8], 4) == 8
    os.close(fd)


@pytest.mark.parametrize('value', ['18446744073709551615', '9223372036854775808'])
def test_a_step_that_cannot_be_counted_on_is_refused(root, value):
    refused(errno.EINVAL, word, root, 'step', value)
    assert 'at most 9223372036854775807' in word(root, 'error')
    word(root, 'step', '1000000000000')
    assert word(root, 'step') == '1000000000000'


def test_a_refused_step_names_what_can_be_done_and_what_abort_takes(root):
    fd = open_gradient(root, 'w')
    os.pwrite(fd, ONES[:4], 0)
    os.close(fd)
    answer = command(root, 'commit')[0]
    for words in ('model/w', 'write the rest', 'drop', 'partial=1', 'abort takes back the whole step', 'newer than'):
        assert words in answer
    assert command(root, 'drop w', 'commit') == ['ok', 'ok']


# --------------------------------------------------------------------- figures

def test_sums_are_asked_for_without_a_look_at_every_parameter(mnt):
    """They are right, and as fast for many parameters as for one."""
    count = 4000
    small = make_root(mnt, 'small', 'adamw lr=1e-3', p0=4)
    (small / '.hitrain/grad/p0').write_bytes(ONES[:16])
    sync(small)
    root = make_root(mnt, 'model', 'adamw lr=1e-3', **{f'p{i}': 4 for i in range(count)})
    for i in range(count):
        (root / '.hitrain' / 'grad' / f'p{i}').write_bytes(ONES[:16])
    sync(root)
    assert word(root, 'parameters') == str(count) and word(root, 'state_bytes') == str(count * 32)
    assert f'parameters={count}\n' in word(root, 'stats')

    def fastest(of, name):
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            word(of, name)
            times.append(time.perf_counter() - begin)
        return min(times)

    # A look at every parameter makes all rounds slow.
    for name in 'step', 'parameters', 'state_bytes':
        assert any(fastest(root, name) < 5 * fastest(small, name) for _ in range(20)), name
