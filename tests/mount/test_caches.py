# SPDX-License-Identifier: Apache-2.0
"""The kernel's cache of names and listings: it asks once, and uses no entry that is over."""
import collections
import errno
import os
import subprocess

import pytest

from calls import sync, tick

OPTIMIZER = b'adamw lr=0.01'


def asked(store):
    """Requests so far, by kind; the mount has the flag -d."""
    kinds = (line.split('opcode: ')[1].split()[0] for line in store.messages().splitlines() if 'opcode: ' in line)
    return collections.Counter(kinds)


def missing(path):
    with pytest.raises(OSError) as e:
        os.stat(path)
    return e.value.errno == errno.ENOENT


def forget_names(point):
    """The kernel drops the mount's entries that are not in use; entries of open directories stay."""
    subprocess.run(['mount', '-i', '-o', 'remount', str(point)], check=True)


def drops():
    """How often programs have dropped the kernel's caches."""
    with open('/proc/vmstat') as f:
        return [line for line in f if line.startswith('drop_')]


def measured(store, work):
    """Requests that work() makes. Again if another program dropped the kernel's caches meanwhile: then it asks anew."""
    for _ in range(20):
        before, dropped = asked(store), drops()
        work()
        more = asked(store) - before
        if drops() == dropped:
            break
    return more


def make_model(mnt):
    model = mnt / 'model'
    (model / 'below').mkdir(parents=True)
    os.setxattr(model, 'user.hitrain.optimizer', OPTIMIZER)
    for name in ('a', 'b', 'below/c'):
        (model / name).write_text(name)
    return model


def commit(model):
    sync(model)


def test_kernel_does_not_ask_twice(make_store):
    store = make_store()
    mnt = store.mount(flags=('-d',))
    (mnt / 'd').mkdir()
    for i in range(100):
        (mnt / 'd' / f'file{i}').touch()
    assert missing(mnt / 'd' / 'none')
    tick()  # a listing within the tick of the last change counts as older than it, and the next as an access
    listing = os.listdir(mnt / 'd')
    assert asked(store)['LOOKUP'] > 100
    kinds = 'LOOKUP', 'READDIR', 'READDIRPLUS', 'FLUSH'

    def look():
        for _ in range(10):
            assert missing(mnt / 'd' / 'none')
            assert os.listdir(mnt / 'd') == listing
            (mnt / 'd' / 'file7').read_bytes()

    more = measured(store, look)
    assert more['OPEN'] == 10
    for kind in kinds:
        assert more[kind] == 0, more


def test_walk_over_forgotten_names_is_no_lookup_of_each(make_store):
    store = make_store()
    mnt = store.mount(flags=('-d',))
    (mnt / 'd').mkdir()
    for i in range(1000):
        (mnt / 'd' / f'file{i}').touch()
    keeps_folder = os.open(mnt / 'd', os.O_RDONLY)
    os.listdir(mnt / 'd')

    def walk():
        forget_names(mnt)
        with os.scandir(mnt / 'd') as entries:
            assert sum(e.stat().st_size == 0 for e in entries) == 1000

    more = measured(store, walk)
    assert more['READDIRPLUS'] > 0 and more['LOOKUP'] + more['GETATTR'] < 100, more
    os.close(keeps_folder)


def test_listing_follows_every_change(mnt):
    d = mnt / 'd'
    d.mkdir()

    def names():
        assert sorted(os.listdir(d)) == sorted(os.listdir(d))
        return set(os.listdir(d))

    assert names() == set()
    (d / 'a').touch()
    assert names() == {'a'}
    os.link(d / 'a', d / 'b')
    os.symlink('a', d / 'c')
    (d / 'e').mkdir()
    assert names() == {'a', 'b', 'c', 'e'}
    os.rename(d / 'a', d / 'b2')
    os.rename(d / 'c', mnt / 'c')
    assert names() == {'b', 'b2', 'e'}
    (d / 'b').unlink()
    (d / 'e').rmdir()
    assert names() == {'b2'}
    (mnt / 'other').touch()
    os.rename(mnt / 'other', d / 'b2')
    assert names() == {'b2'}


def test_missing_name_appears(mnt):
    (mnt / 'source').touch()
    for n, make in enumerate((lambda p: p.touch(), lambda p: p.mkdir(), lambda p: os.mkfifo(p),
                              lambda p: os.symlink('source', p), lambda p: os.link(mnt / 'source', p),
                              lambda p: os.rename(mnt / 'source', p))):
        path = mnt / f'name{n}'
        assert missing(path) and missing(path)
        make(path)
        os.lstat(path)


def test_hidden_folder_appears_and_goes_with_the_optimizer(mnt):
    model = mnt / 'model'
    model.mkdir()
    assert missing(model / '.hitrain') and missing(model / '.hitrain')
    os.setxattr(model, 'user.hitrain.optimizer', OPTIMIZER)
    os.stat(model / '.hitrain' / 'ctl')
    os.removexattr(model, 'user.hitrain.optimizer')
    assert missing(model / '.hitrain')


@pytest.mark.parametrize('names', ['known', 'forgotten'])
def test_abort_ends_what_the_kernel_kept(mnt, names):
    model = make_model(mnt)
    commit(model)
    folders = [os.open(p, os.O_RDONLY) for p in (model, model / 'below')]
    was = [os.listdir(fd) for fd in folders]
    (model / 'a').unlink()
    os.rename(model / 'b', model / 'below' / 'b')
    (model / 'below' / 'c').unlink()
    (model / 'new').touch()
    assert missing(model / 'a') and missing(model / 'b') and missing(model / 'below' / 'c')
    now = [os.listdir(fd) for fd in folders]
    assert now != was and now == [os.listdir(fd) for fd in folders]
    if names == 'forgotten':
        forget_names(mnt)
    with open(model / '.hitrain' / 'ctl', 'r+b', buffering=0) as ctl:
        ctl.write(b'abort\n')
        assert ctl.read(100) == b'ok\n'
    assert [sorted(os.listdir(fd)) for fd in folders] == [sorted(w) for w in was]
    assert [sorted(os.listdir(p)) for p in (model, model / 'below')] == [sorted(w) for w in was]
    assert missing(model / 'new') and missing(model / 'below' / 'b')
    for name in ('a', 'b', 'below/c'):
        assert (model / name).read_text() == name
    for fd in folders:
        os.close(fd)


def test_blocks_of_a_sparse_file_are_exact_once_it_is_written(mnt):
    path = mnt / 'sparse'
    with open(path, 'wb') as f:
        for at in range(0, 10 << 20, 1 << 20):
            f.seek(at)
            f.write(b'x')
        f.truncate(11 << 20)
        os.stat(path)
        os.fsync(f.fileno())
    assert os.stat(path).st_blocks == 10 * 4096 // 512
