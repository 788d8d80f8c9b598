# SPDX-License-Identifier: Apache-2.0
"""Kept steps on a mount: files of a step that every program reads and no program changes.

Plain descent by gradients of -1 with a learning rate of 1 counts: after step k each element is k.
"""
import errno
import mmap
import os
import shutil
import subprocess

import numpy as np
import pytest

from calls import EXCHANGE, as_user, rename
from conftest import MIB, run
from models import new_model
from test_async_step import command
from test_roots import put_gradient, sync, word
from test_scrub import damage

ELEMENTS = 300000


def make(mnt, words='retain=2'):
    root = new_model(mnt / 'model', f'sgd lr=1 momentum=0.5 {words}')
    (root / 'layers').mkdir()
    for name in ('w', 'layers/v'):
        (root / name).write_bytes(bytes(4 * ELEMENTS))
    (root / 'config.json').write_text('{"step": 0}')
    sync(root)
    return root


def train(root, step):
    for name in ('w', 'layers/v'):
        put_gradient(root, name, np.full(ELEMENTS, -1 if step == 1 else -0.5, 'f4'))
    (root / 'config.json').write_text(f'{{"step": {step}}}')
    sync(root)


def refused(change):
    """The error of a change that must not succeed."""
    with pytest.raises(OSError) as e:
        change()
    return e.value.errno


def kept(root):
    return sorted(os.listdir(root / '.hitrain' / 'snap'))


def content(folder):
    """Everything that a program sees below it, without times of access."""
    names = sorted(p for p in folder.rglob('*'))
    return [(str(p.relative_to(folder)), p.stat().st_mode, p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b'')
            for p in names]


def test_kept_steps_are_files_of_their_step(make_store, tmp_path):
    store = make_store()
    root = make(store.mount())
    was = {}
    for step in range(1, 5):
        train(root, step)
        was[step] = content(root)
    assert kept(root) == ['3', '4'] and '.hitrain' not in os.listdir(root)
    snap = root / '.hitrain' / 'snap'
    command(root, 'snapshot best')
    train(root, 5)
    for name, step in (('4', 4), ('best', 4)):
        assert content(snap / name) == was[step]
    with open(snap / '4' / 'w', 'rb') as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
        assert m[:] == (snap / 'best' / 'w').read_bytes()
    assert np.unique(np.fromfile(snap / '4' / '.hitrain/state/w/momentum_buffer', 'f4')).size == 1
    subprocess.run(['cp', '-a', snap / '4', tmp_path / 'copy'], check=True)
    assert content(tmp_path / 'copy') == was[4]
    assert os.getxattr(snap / '4', 'user.hitrain.step') == b'4'
    assert not (snap / '2').exists() and refused(lambda: os.listdir(snap / '2')) == errno.ENOENT
    store.remount(check=True)
    assert kept(root) == ['4', '5', 'best'] and content(snap / 'best') == was[4]
    command(root, 'forget *')
    assert kept(root) == []


def test_a_killed_daemon_leaves_kept_steps_whole(make_store):
    store = make_store()
    root = make(store.mount(), 'retain=3')
    was = {}
    for step in range(1, 4):
        train(root, step)
        was[str(step)] = content(root)
    put_gradient(root, 'w', np.full(ELEMENTS, -1, 'f4'))
    store.crash()
    assert kept(root) == ['1', '2', '3']
    for name in kept(root):
        assert content(root / '.hitrain' / 'snap' / name) == was[name]


CHANGES = {
    'write': lambda d: (d / 'w').write_bytes(b'x'),
    'append': lambda d: open(d / 'w', 'ab'),
    'map': lambda d: os.open(d / 'w', os.O_RDWR),
    'truncate': lambda d: os.truncate(d / 'w', 0),
    'make': lambda d: (d / 'new').touch(),
    'make without a name': lambda d: os.open(d, os.O_TMPFILE | os.O_RDWR),
    'mkdir': lambda d: (d / 'new').mkdir(),
    'rmdir': lambda d: (d / 'layers').rmdir(),
    'fifo': lambda d: os.mkfifo(d / 'new'),
    'symlink': lambda d: os.symlink('w', d / 'new'),
    'link': lambda d: os.link(d / 'w', d / 'layers' / 'new'),
    'exchange': lambda d: rename(d / 'w', d / 'layers' / 'v', EXCHANGE),
    'remove': lambda d: (d / 'w').unlink(),
    'rename': lambda d: (d / 'w').rename(d / 'v'),
    'chmod': lambda d: (d / 'w').chmod(0o600),
    'mode of the directory': lambda d: d.chmod(0o700),
    'owner': lambda d: os.chown(d / 'w', 1, 1),
    'utime': lambda d: os.utime(d / 'w'),
    'setxattr': lambda d: os.setxattr(d / 'w', 'user.a', b'b'),
    'removexattr': lambda d: os.removexattr(d / 'w', 'user.hitrain.dtype'),
    'dtype': lambda d: os.setxattr(d / 'w', 'user.hitrain.dtype', b'i32'),
    'shape': lambda d: os.setxattr(d / 'w', 'user.hitrain.shape', b'%d' % ELEMENTS),
    'optimizer': lambda d: os.setxattr(d, 'user.hitrain.optimizer', b'sgd lr=2'),
    'unmake': lambda d: os.removexattr(d, 'user.hitrain.optimizer'),
    'gradient': lambda d: (d / '.hitrain/grad/w').write_bytes(bytes(4 * ELEMENTS)),
    'state': lambda d: (d / '.hitrain/state/w/momentum_buffer').write_bytes(bytes(4 * ELEMENTS)),
    'same optimizer': lambda d: os.setxattr(d, 'user.hitrain.optimizer', b'sgd lr=1 momentum=0.5 retain=2'),
    'another rule': lambda d: os.setxattr(d, 'user.hitrain.optimizer', b'adamw lr=1'),
    'step': lambda d: os.setxattr(d, 'user.hitrain.step', b'9'),
}


COMMANDS = ['step', 'step async', 'commit', 'commit if=1', 'abort', 'reset *', 'reset w', 'reset layers/v', 'drop w', 'snapshot x',
            'claim trainer']
HARMLESS_COMMANDS = ['wait', 'wait w', 'apply w', 'prefetch w', 'evict w']  # without a gradient there is nothing to apply
COMMANDS_OF_OTHERS = ['unclaim', 'forget x', 'forget *', 'scrub start', 'trim', 'background pause']


def state(folder):
    return {n: (folder / '.hitrain/state' / n / 'momentum_buffer').read_bytes() for n in ('w', 'layers/v')}


def test_every_change_is_erofs(make_store):
    store = make_store()
    root = make(store.mount())
    train(root, 1)
    folder = root / '.hitrain/snap/1'
    was, moments = content(folder), state(folder)
    for what, change in CHANGES.items():
        assert refused(lambda change=change: change(folder)) == errno.EROFS, what
    for line in COMMANDS:
        assert refused(lambda line=line: command(folder, line)) == errno.EROFS, line
    for line in HARMLESS_COMMANDS:
        command(folder, line)
    for line in COMMANDS_OF_OTHERS:
        assert refused(lambda line=line: command(folder, line)) in (errno.EINVAL, errno.ENOENT, errno.EROFS), line
    assert content(folder) == was and state(folder) == moments
    sync(root / '.hitrain/snap/1')
    train(root, 2)
    store.remount(check=True)
    assert content(folder) == was and state(folder) == moments
    for what in ('optimizer', 'another rule', 'same optimizer', 'optimizer'):  # no refused one stays
        assert refused(lambda what=what: CHANGES[what](folder)) == errno.EROFS, what
    train(root, 3)


def test_a_root_ends_after_its_last_kept_step(mnt):
    root = make(mnt, 'retain=2 durable_every=5')
    for name in ('w', 'layers/v'):
        put_gradient(root, name, np.full(ELEMENTS, -1, 'f4'))
    command(root, 'snapshot taken')
    for name in ('w', 'layers/v'):
        put_gradient(root, name, np.full(ELEMENTS, -1, 'f4'))
    assert refused(lambda: os.removexattr(root, 'user.hitrain.optimizer')) == errno.EBUSY
    command(root, 'abort')  # the refused end published nothing
    for name in ('w', 'layers/v'):
        put_gradient(root, name, np.full(ELEMENTS, -0.5, 'f4'))
    command(root, 'step')
    command(root, 'forget *')
    os.removexattr(root, 'user.hitrain.optimizer')
    assert np.unique(np.fromfile(root / 'w', 'f4')) == [2]
    assert refused(lambda: os.listdir(root / '.hitrain' / 'snap')) == errno.ENOENT


@pytest.mark.parametrize('way', ['rmtree', 'rm'])
@pytest.mark.parametrize('open_step', [False, True])
def test_a_removed_model_takes_its_kept_steps_along(store, way, open_step):
    mnt = store.point
    before = set(os.listdir(mnt))
    free = os.statvfs(mnt).f_bavail
    root = make(mnt, 'retain=2')
    train(root, 1)
    train(root, 2)
    command(root, 'snapshot taken')
    if open_step:
        put_gradient(root, 'w', np.full(ELEMENTS, -1, 'f4'))
    if way == 'rm':
        subprocess.run(['rm', '-rf', root], check=True)
    else:
        shutil.rmtree(root)
    assert set(os.listdir(mnt)) == before
    sync(mnt)
    assert abs(os.statvfs(mnt).f_bavail - free) < 64
    store.crash()
    assert set(os.listdir(mnt)) == before
    make(mnt, 'retain=2')


def test_only_who_steers_a_model_removes_its_kept_steps(mnt):
    os.chmod(mnt, 0o777)
    root = make(mnt, 'retain=2')
    train(root, 1)
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            os.unlink(os.path.join(folder, name))
        if folder != str(root):
            os.rmdir(folder)
    os.chmod(root, 0o755)
    assert refused(lambda: as_user(lambda: os.rmdir(root))) == errno.EBUSY
    assert 'rmdir: the model has 1 kept steps' in word(root, 'error') and 'forget ROOT --all' in word(root, 'error')
    (root / 'w').touch()
    assert refused(lambda: os.rmdir(root)) == errno.ENOTEMPTY and len(kept(root)) == 1
    (mnt / 'other').mkdir()
    os.unlink(root / 'w')
    assert refused(lambda: os.rename(mnt / 'other', root)) == errno.EBUSY and len(kept(root)) == 1
    os.rmdir(root)
    assert not root.exists()


def test_a_root_with_kept_steps_keeps_its_attribute(mnt):
    root = make(mnt, 'retain=2')
    train(root, 1)
    train(root, 2)
    command(root, 'snapshot taken')
    assert refused(lambda: os.removexattr(root, 'user.hitrain.optimizer')) == errno.EBUSY
    assert 'optimizer: the model has 3 kept steps' in word(root, 'error')
    for args in (root,), (root, 'taken', '--all'):
        assert run('hitrainctl', 'forget', *args, check=False).returncode == 2
    assert len(kept(root)) == 3
    run('hitrainctl', 'forget', root, '--all')
    assert kept(root) == [] and run('hitrainctl', 'forget', root, '--all').returncode == 0
    shutil.rmtree(root)
    assert not root.exists()


@pytest.mark.parametrize('line, error', [('snapshot 7', errno.EINVAL), ('snapshot a/b', errno.EINVAL),
                                         ('snapshot taken', errno.EEXIST), ('forget 9', errno.ENOENT),
                                         ('forget', errno.EINVAL), ('forget ../x', errno.EINVAL)])
def test_refused_commands_change_nothing(mnt, line, error):
    root = make(mnt, 'retain=0')
    train(root, 1)
    command(root, 'snapshot taken')
    assert refused(lambda: command(root, line)) == error
    assert kept(root) == ['taken']
    put_gradient(root, 'w', np.full(ELEMENTS, -1, 'f4'))
    assert refused(lambda: command(root, 'forget taken')) == errno.EBUSY
    command(root, 'abort')
    assert refused(lambda: os.removexattr(root, 'user.hitrain.optimizer')) == errno.EBUSY
    command(root, 'forget taken')
    os.removexattr(root, 'user.hitrain.optimizer')
    assert refused(lambda: os.listdir(root / '.hitrain' / 'snap')) == errno.ENOENT


def test_damage_is_told_for_every_step_that_has_the_bytes(make_store):
    """Of two kept steps with the same content, and of the living model, which has other content now."""
    store = make_store()
    root = make(store.mount(), 'retain=4')
    data = os.urandom(MIB)
    (root / 'bytes').write_bytes(data)
    sync(root)
    for name in ('first', 'second'):
        command(root, f'snapshot {name}')
    (root / 'bytes').write_bytes(bytes(MIB))
    sync(root)
    store.unmount()
    damage(store.image, data)
    store.ends_clean = False
    said = store.fsck()
    told = {line.split(': ')[1].split(',')[0] for line in said.stdout.splitlines() if 'DATA' in line}
    assert told == {'/model/.hitrain/snap/first/bytes', '/model/.hitrain/snap/second/bytes'}, said.stdout
