# SPDX-License-Identifier: Apache-2.0
"""The attribute error: which call was refused, on which file, when, and how long the attribute says so."""
import errno
import os
import re
import subprocess

import numpy as np
import pytest

from calls import as_user, fails, settle, sync
from test_steering import N, put_gradient, tell, word

STAMP = re.compile(r' \((?:after step (\d+), )?\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\)$')


@pytest.fixture
def root(mnt):
    os.chmod(mnt, 0o755)
    r = mnt / 'm'
    (r / 'sub').mkdir(parents=True)
    word(r, 'dtype', 'f32')
    word(r / 'sub', 'dtype', 'f32')
    for name in ('w', 'sub/v'):
        (r / name).write_bytes(bytes(4 * N))
    word(r, 'optimizer', 'sgd lr=1')
    sync(r)
    return r


def shown(path, step=None):
    """The text without its stamp, which is there."""
    text = word(path, 'error')
    if not text:
        return text
    stamp = STAMP.search(text)
    assert stamp, text
    assert step is None or stamp.group(1) == str(step), text
    return text[:stamp.start()]


def put_short(root, name, n=N // 2):
    put_gradient(root, name, n=n)


# ------------------------------------------------------------------- commands

@pytest.mark.parametrize('line,named', [
    ('comit', "unknown command 'comit': known are apply"), ('reset ../w', "reset: '../w': not a path below"),
    ('apply nosuch', "apply: 'nosuch': No such file"), ('apply', "'apply' takes the path of a file"),
    ('evict sub', "evict: 'sub' is a directory: name its files"), ('wait sub', "wait: 'sub' is no parameter"),
    ('unclaim', 'unclaim: this descriptor has claimed nothing'), ('scrub start', 'scrub: a scrub is of the whole store')])
def test_a_refused_command_is_in_error_of_the_root(root, line, named):
    """Also for a shell, which cannot read the answer."""
    done = subprocess.run(['sh', '-c', f'echo {line} > {root}/.hitrain/ctl'], stderr=subprocess.PIPE)
    assert done.returncode != 0
    assert named in shown(root, 0)
    assert tell(root / 'sub', line).startswith('error: ')  # of the same root
    word(root, 'error', '')
    assert word(root, 'error') == ''


def test_a_refused_command_at_the_mounts_root(mnt):
    assert tell(mnt, 'step').startswith('error: EINVAL')
    assert 'step: this directory is no model root' in shown(mnt)
    assert tell(mnt, 'commit') == 'ok'
    assert 'step' in shown(mnt)  # that is another thing
    with fails(errno.EINVAL):
        word(mnt, 'error', 'text')
    word(mnt, 'error', '')
    assert word(mnt, 'error') == ''


@pytest.mark.parametrize('wrong,right', [('reset nosuch', 'reset w'), ('comit', 'commit'), ('wait nosuch', 'wait w')])
def test_success_of_the_same_ends_it(root, wrong, right):
    assert tell(root, wrong).startswith('error')
    other = 'prefetch w' if wrong != 'comit' else None
    if other:
        assert tell(root, other) == 'ok' and shown(root)
    assert tell(root, right) == 'ok'
    assert word(root, 'error') == ''


def test_reset_of_all(root):
    word(root, 'optimizer', 'adamw')
    for r, name in ((root, 'w'), (root / 'sub', 'v')):
        put_gradient(r, name)
    assert tell(root, 'reset *').startswith('error: EBUSY: m/')
    assert tell(root, 'commit') == 'ok'
    with fails(errno.EBUSY):
        word(root, 'optimizer', 'lion')
    assert 'reset them first (reset *)' in shown(root, 1)
    assert tell(root, 'reset *') == 'ok'
    word(root, 'optimizer', 'lion')
    assert word(root, 'error') == '' and word(root, 'parameters') == '0'


# ------------------------------------------------------------------ gradients

def test_a_refused_gradient_until_one_is_accepted(root):
    with fails(errno.EINVAL):
        put_gradient(root, 'w', n=N + 1)
    settle(root)  # its close is no error of its own
    assert shown(root, 0).startswith('m/w: gradient: ') and 'is not as long as' in shown(root, 0)
    put_gradient(root / 'sub', 'v')
    assert tell(root, 'commit') == 'ok'
    assert shown(root, 0).startswith('m/w: gradient: ')  # of another one, and a step, nothing follows for it
    put_gradient(root, 'w')
    assert word(root, 'error') == ''


def test_a_refused_step_until_one_ends(root):
    put_short(root, 'w')
    assert tell(root, 'commit').startswith('error: EBUSY: m/w: only a part of it')
    assert 'take that back with drop' in shown(root, 0) and 'newer than the last commit' in shown(root)
    put_gradient(root / 'sub', 'v')
    assert shown(root)
    assert tell(root, 'abort') == 'ok'
    assert word(root, 'error') == ''
    put_short(root, 'w')
    assert tell(root, 'step').startswith('error: EBUSY')
    assert tell(root, 'drop w') == 'ok'
    put_gradient(root, 'w')
    assert tell(root, 'step') == 'ok'
    assert word(root, 'error') == ''
    put_short(root, 'w')
    with fails(errno.EBUSY):
        sync(root)
    assert shown(root, 1).startswith('m/w: only a part of it')


def test_a_gradient_of_what_is_no_parameter_names_it(root):
    (root / 'note').write_bytes(b'text')
    os.setxattr(root / 'note', 'user.hitrain.dtype', b'u8')
    with fails(errno.EINVAL):
        put_gradient(root, 'note', n=1)
    assert shown(root).startswith('m/note: has no gradient: it is no parameter')
    assert shown(root / 'note').startswith('has no gradient')
    word(root / 'note', 'dtype', 'f32')
    put_gradient(root, 'note', n=1)
    assert word(root, 'error') == word(root / 'note', 'error') == ''


@pytest.mark.parametrize('path,named', [
    ('gard/w', '.hitrain/gard: there are ctl, stats, grad/P'), ('grad/x', '.hitrain/grad/x: there is no such file below /m'),
    ('grad/sub/x', 'there is no such file below /m/sub'), ('grad-topk/y', '.hitrain/grad-topk/y: ')])
def test_a_wrong_name_in_the_hidden_tree_is_hinted_at(root, path, named):
    with fails(errno.ENOENT):
        os.open(root / '.hitrain' / path, os.O_WRONLY)
    assert named in shown(root, 0)
    put_gradient(root)
    assert word(root, 'error') == ''


def test_who_may_not_steer_writes_no_error_of_the_root(root):
    for path in ('gard', 'grad/x'):
        with fails(errno.ENOENT):
            as_user(lambda: os.stat(root / '.hitrain' / path))
    assert word(root, 'error') == ''


@pytest.mark.parametrize('before', ['commit', 'comit'])
def test_who_may_only_read_a_file_hides_no_error_of_the_root(root, before):
    (root / 'note').write_bytes(b'text')
    word(root / 'note', 'dtype', 'u8')
    put_short(root, 'w')
    assert tell(root, before).startswith('error')
    told = word(root, 'error')
    assert told

    def look():
        for path in ('w', 'sub'):
            with fails(errno.EBUSY):
                sync(root / path)
        with fails(errno.EINVAL):
            os.open(root / '.hitrain/grad/note', os.O_RDONLY)

    (root / 'sub' / 'new').touch()
    as_user(look)
    assert word(root, 'error') == told
    assert 'fsync of a parameter' in shown(root / 'w') and 'has no gradient' in shown(root / 'note')
    with fails(errno.EBUSY):
        sync(root / 'w')
    assert shown(root).startswith('m/w: fsync of a parameter')  # a user who may write may use the word there


# ----------------------------------------------------------------- attributes

@pytest.mark.parametrize('name,value,named,right', [
    ('dtype', 'float33', 'dtype: "float33" is not known; known are f32 bf16', 'float32'),
    ('dtype', 'f\x01' + 50 * 'x', 'dtype: "f?' + 30 * 'x' + '..."', 'TORCH'),
    ('grad_dtype', 'int8', 'grad_dtype: "int8" is not known; gradients are f32, bf16 or f16', 'half'),
    ('optimizer', 'SGD learning=1', '"learning=1" is no word=value of sgd', 'SGD momentum=0'),
    ('optimizr', 'sgd', 'unknown attribute user.hitrain.optimizr; known: dtype shape members grad_dtype', None)])
def test_a_refused_attribute_of_a_file(root, name, value, named, right):
    with fails(errno.EINVAL):
        word(root / 'w', name, value)
    assert named in shown(root / 'w', 0)
    assert shown(root, 0).startswith('m/w: ') and named[:20] in shown(root)
    if right == 'TORCH':
        right = 'torch.float32'
    word(root / 'w', name if right else 'shape', right or str(N))
    assert word(root / 'w', 'error') == word(root, 'error') == ''


def test_other_names_of_dtypes_are_told_as_the_stores_own(root):
    for given, told in (('float32', 'f32'), ('BFLOAT16', 'bf16'), ('torch.half', 'f16'), ('double', 'f64')):
        (root / given).touch()
        word(root / given, 'dtype', given)
        assert word(root / given, 'dtype') == told


def test_step_is_not_set_while_one_is_open(root):
    put_gradient(root)
    with fails(errno.EBUSY):
        word(root, 'step', '7')
    assert 'step: a step is open' in shown(root, 0)
    assert tell(root, 'commit') == 'ok'
    word(root, 'step', '7')
    assert word(root, 'error') == ''


def test_fsync_of_a_parameter_in_mid_step(root):
    put_gradient(root)
    with fails(errno.EBUSY):
        sync(root / 'w')
    assert 'fsync of a parameter' in shown(root / 'w', 0) and shown(root, 0).startswith('m/w: fsync')
    assert tell(root, 'commit') == 'ok'
    (root / 'w').write_bytes(np.ones(N, 'f4').tobytes())
    sync(root / 'w')
    assert word(root / 'w', 'error') == word(root, 'error') == ''


def test_one_users_refusals_do_not_push_out_anothers(root):
    mine, theirs = root / 'w', root.parent / 'theirs'
    with fails(errno.EINVAL):
        word(mine, 'dtype', 'mine')
    theirs.mkdir()
    os.chown(theirs, 4321, 4321)

    def flood():
        for i in range(400):
            path = theirs / str(i)
            path.touch()
            with fails(errno.EINVAL):
                word(path, 'dtype', 'theirs')
        return word(theirs / '399', 'error'), word(theirs / '0', 'error')

    last, first = as_user(flood, 4321, 4321)
    assert 'theirs' in last and not first
    assert 'mine' in shown(mine) and 'mine' in shown(root)
