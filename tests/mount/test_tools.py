# SPDX-License-Identifier: Apache-2.0
"""Tools that copy, pack, list and measure files: their input, output and findings agree with the files."""
import errno
import os
import random
import shutil
import stat
import subprocess

import pytest

from calls import fails
from conftest import MIB, SECONDS_MAX, wait_for
from trees import SPARSE, assert_same, blob, content, describe, make_tree


def sh(*args, **kw):
    kw.setdefault('timeout', SECONDS_MAX)
    done = subprocess.run(list(map(os.fspath, args)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env={**os.environ, 'LC_ALL': 'C', 'TZ': 'UTC'}, **kw)
    assert done.returncode == 0, (args, done.stderr)
    return done.stdout.decode(errors='surrogateescape')


def blocks(path):
    return os.stat(path).st_blocks * 512


# ---------------------------------------------------------------------------- cp

def test_cp_a_in_inside_and_out(store, tmp_path):
    mnt, tree = store.point, tmp_path / 'tree'
    make_tree(tree)
    expected = describe(tree)
    assert expected[b'holes']['holes'] and expected[b'link-1']['links'] == 4  # the model is as intended
    sh('cp', '-a', tree, mnt / 'in')
    assert_same(expected, describe(mnt / 'in'))
    sh('cp', '-a', mnt / 'in', mnt / 'inside')
    assert_same(expected, describe(mnt / 'inside'))
    store.remount()
    assert_same(expected, describe(mnt / 'in'))
    sh('cp', '-a', mnt / 'inside', tmp_path / 'out')
    assert_same(expected, describe(tmp_path / 'out'))


def test_a_tree_made_on_the_mount_is_like_one_made_elsewhere(mnt, tmp_path):
    make_tree(mnt / 'tree')
    make_tree(tmp_path / 'tree')
    assert_same(describe(tmp_path / 'tree'), describe(mnt / 'tree'))


@pytest.mark.parametrize('how', ['--reflink=auto', '--reflink=never', '--sparse=always', '--sparse=never'])
def test_cp_of_bytes(mnt, tmp_path, how):
    (tmp_path / 'full').write_bytes(blob(5 * MIB + 99))
    with open(tmp_path / 'holes', 'wb') as f:
        f.seek(3 * MIB)
        f.write(b'end')
    (tmp_path / 'zeros').write_bytes(bytes(4 * MIB))
    for name in ('full', 'holes', 'zeros'):
        sh('cp', how, tmp_path / name, mnt / f'{name}-in')
        sh('cp', how, mnt / f'{name}-in', mnt / name)
        sh('cp', how, mnt / name, tmp_path / f'{name}-out')
        assert content(tmp_path / f'{name}-out') == content(mnt / name) == content(tmp_path / name)
        sh('cmp', tmp_path / name, mnt / f'{name}-in')
    if how == '--sparse=always':
        assert blocks(mnt / 'zeros-in') < MIB and blocks(mnt / 'holes') < MIB
    if how == '--sparse=never':
        assert blocks(mnt / 'zeros-in') >= 4 * MIB and blocks(mnt / 'holes') >= 3 * MIB


def test_cp_over_a_file_that_is_read(mnt):
    """cp truncates and writes the same inode; mv makes a new one."""
    (mnt / 'old').write_bytes(blob(2 * MIB, 1))
    (mnt / 'new').write_bytes(blob(MIB, 2))
    with open(mnt / 'old', 'rb', buffering=0) as f:
        assert f.read(10) == blob(2 * MIB, 1)[:10]
        sh('cp', mnt / 'new', mnt / 'old')
        f.seek(0)
        assert f.read(4 * MIB) == blob(MIB, 2)
        sh('cp', '--remove-destination', mnt / 'new', mnt / 'old')
        sh('mv', mnt / 'new', mnt / 'old')
        f.seek(0)
        assert os.fstat(f.fileno()).st_nlink == 0 and f.read(4 * MIB) == blob(MIB, 2)


def test_mv_and_install_across_file_systems(mnt, tmp_path):
    make_tree(tmp_path / 'tree')
    expected = describe(tmp_path / 'tree')
    sh('mv', tmp_path / 'tree', mnt / 'tree')
    assert_same(expected, describe(mnt / 'tree'))
    assert os.listdir(tmp_path) == []
    sh('install', '-D', '-m', '4711', '-o', '1234', '-g', '2345', mnt / 'tree' / 'deep' / 'size-4096', mnt / 'a/b/c')
    st = os.stat(mnt / 'a/b/c')
    assert (stat.S_IMODE(st.st_mode), st.st_uid, st.st_gid) == (0o4711, 1234, 2345)
    sh('mv', mnt / 'tree', tmp_path / 'back')
    assert_same(expected, describe(tmp_path / 'back'))
    assert os.listdir(mnt) == ['a']


def test_copytree_of_tensors_takes_words_and_no_figures(store, tmp_path):
    """As resuming frameworks copy checkpoints: attributes included, and every error ends the copy."""
    mnt, source = store.point, store.point / 'source'
    (source / 'rank0').mkdir(parents=True)
    os.setxattr(source, 'user.hitrain.dtype', b'f32')
    for i in range(4):
        (source / 'rank0' / f'{i}').write_bytes(blob(MIB + 4 * i, i))
        os.setxattr(source / 'rank0' / f'{i}', 'user.hitrain.shape', b'%d' % (MIB // 4 + i))
        os.setxattr(source / 'rank0' / f'{i}', 'user.own', b'%d' % i)
    os.setxattr(source, 'user.hitrain.optimizer', b'adamw lr=1e-3')
    os.setxattr(source / 'rank0' / '0', 'user.hitrain.pin', b'dram')

    unlisted = ('stats', 'resident_bytes', 'dirty_bytes', 'stored_bytes', 'logical_bytes', 'device_read_bytes',
                'device_written_bytes', 'hits', 'misses', 'step', 'durable_step', 'error', 'grad_norm', 'optimizer', 'pin')
    for folder, _, names in os.walk(source):
        for path in [folder, *(os.path.join(folder, n) for n in names)]:
            assert not {f'user.hitrain.{word}' for word in unlisted} & set(os.listxattr(path)), path
    for word in ('stats', 'resident_bytes', 'hits', 'device_written_bytes', 'durable_step', 'grad_norm'):
        name = f'user.hitrain.{word}'
        for path in (source, source / 'rank0' / '1'):
            for change in (lambda: os.setxattr(path, name, b'1'), lambda: os.removexattr(path, name)):
                with fails(errno.ENOTSUP):
                    change()
    assert b'logical_bytes=' in os.getxattr(source / 'rank0' / '1', 'user.hitrain.stats')

    for target in (mnt / 'copy', tmp_path / 'out', mnt / 'back'):
        shutil.copytree(tmp_path / 'out' if target == mnt / 'back' else source, target)
        for i in range(4):
            copied = target / 'rank0' / f'{i}'
            assert content(copied) == content(source / 'rank0' / f'{i}')
            assert os.getxattr(copied, 'user.own') == b'%d' % i
            assert os.getxattr(copied, 'user.hitrain.shape') == b'%d' % (MIB // 4 + i)
        assert os.getxattr(target, 'user.hitrain.dtype') == b'f32'
        # A copy is no root: on the mount the word answers as for any folder, elsewhere it is not there.
        with fails(errno.ENODATA):
            os.getxattr(target, 'user.hitrain.optimizer')
        os.rename(target / 'rank0' / '0', target.parent / 'moved')  # EXDEV if it were a root
        os.rename(target.parent / 'moved', target / 'rank0' / '0')


# Values of all attributes that a file and a folder may have; those that a copier sees are the listed ones.
OF_FILE = {'dtype': 'f32', 'grad_dtype': 'bf16', 'class': 'scratch', 'shape': '64,64', 'pin': 'dram', 'tier': 'dram',
           'next_use': '60', 'compress': 'off'}
OF_FOLDER = {'dtype': 'bf16', 'grad_dtype': 'f32', 'class': 'scratch', 'tier': 'capacity', 'compress': 'auto'}
NEVER_LISTED = {'pin', 'next_use'}


def tar(source, target):
    keep = ('--xattrs', '--xattrs-include=*', '--acls')
    archive = target.with_suffix('.tar')
    sh('tar', '-C', source, *keep, '--format=posix', '-cf', archive, '.')
    target.mkdir()
    sh('tar', '-C', target, *keep, '-xpf', archive)


def copy_each(source, target):
    target.mkdir()
    shutil.copystat(source, target)
    for name in os.listdir(source):
        if (source / name).is_dir():
            copy_each(source / name, target / name)
        else:
            shutil.copy2(source / name, target / name)


COPIERS = {
    'copy2': copy_each,
    'copytree': shutil.copytree,
    'cp --preserve=all': lambda a, b: sh('cp', '-r', '--preserve=all', a, b),
    'cp -a': lambda a, b: sh('cp', '-a', a, b),
    'rsync': lambda a, b: sh('rsync', '-aX', f'{a}/', b),
    'rsync in place': lambda a, b: sh('rsync', '-aX', '--inplace', f'{a}/', b),
    'tar': tar,
}


def set_words(path, words):
    for word, value in words.items():
        os.setxattr(path, f'user.hitrain.{word}', value.encode())


def listed(path):
    return {name: os.getxattr(path, name) for name in os.listxattr(path) if name.startswith('user.hitrain.')}


@pytest.mark.parametrize('copier', COPIERS)
def test_listed_attributes_are_those_that_copiers_can_set(mnt, copier):
    """On one mount: each copier succeeds, and the copy has each attribute, as well as the content."""
    source = mnt / 'source'
    source.mkdir()
    for i, (word, value) in enumerate([(None, None), *OF_FILE.items()]):
        path = source / f'{word}'
        os.mknod(path)  # a close may reach the store later, and class= refuses a file that is open
        set_words(path, {word: value} if word == 'class' else {})
        path.write_bytes(blob(16384 + 4 * i, i))
        set_words(path, {word: value} if word and word != 'shape' else {})
    os.mknod(source / 'all')
    set_words(source / 'all', {'class': 'scratch'})
    (source / 'all').write_bytes(blob(16384, 50))
    set_words(source / 'all', {k: v for k, v in OF_FILE.items() if k != 'tier'})
    (source / 'empty').touch()
    set_words(source / 'empty', {'dtype': 'f16'})
    (source / 'folder').mkdir()
    set_words(source / 'folder', OF_FOLDER)
    before = {name: listed(source / name) for name in ('', *os.listdir(source))}
    assert {f'user.hitrain.{w}' for w in OF_FILE if w not in NEVER_LISTED} <= set(before['all']) | set(before['tier'])
    COPIERS[copier](source, mnt / 'copy')
    for name, words in before.items():
        if name not in ('', 'folder'):
            assert content(mnt / 'copy' / name) == content(source / name), name
        assert listed(mnt / 'copy' / name) == words, name


def test_a_class_that_cannot_change_says_why(mnt):
    (mnt / 'scratch').touch()
    set_words(mnt / 'scratch', {'class': 'scratch'})
    (mnt / 'scratch').write_bytes(b'text')
    for change in (lambda: set_words(mnt / 'scratch', {'class': 'durable'}),
                   lambda: os.removexattr(mnt / 'scratch', 'user.hitrain.class')):
        with fails(errno.ENOTSUP):
            change()
        assert 'before its first byte' in os.getxattr(mnt / 'scratch', 'user.hitrain.error').decode()
    with open(mnt / 'open', 'wb'), pytest.raises(OSError) as e:
        set_words(mnt / 'open', {'class': 'scratch'})
    assert e.value.errno == errno.ENOTSUP


@pytest.mark.parametrize('flags', [[], ['--inplace']])
def test_rsync_copies_durable_files_into_a_scratch_folder(mnt, flags):
    """It removes the attributes that a source does not have: the copies keep the class of their folder."""
    source, target = mnt / 'source', mnt / 'target'
    source.mkdir()
    (source / 'full').write_bytes(blob(70000, 1))
    (source / 'empty').touch()
    target.mkdir()
    set_words(target, {'class': 'scratch'})
    sh('rsync', '-aX', *flags, source / 'full', source / 'empty', f'{target}/')
    for name in ('full', 'empty'):
        assert content(target / name) == content(source / name)
        assert listed(target / name) == {'user.hitrain.class': b'scratch'} and listed(source / name) == {}
        os.removexattr(target / name, 'user.hitrain.class')
        assert listed(target / name) == {'user.hitrain.class': b'scratch'}


# ------------------------------------------------------------------------- rsync

def rsync(*args):
    """Its changes: one line for each item. Times are compared with their nanoseconds."""
    out = sh('rsync', '-aHAX', '--numeric-ids', '--modify-window=-1', '--itemize-changes', *args)
    return [line for line in out.splitlines() if line]


def test_rsync_in_again_and_out(store, tmp_path):
    mnt, tree = store.point, tmp_path / 'tree'
    make_tree(tree)
    expected = describe(tree, sparse=False)
    assert len(rsync(f'{tree}/', f'{mnt}/in')) > 200
    assert_same(expected, describe(mnt / 'in', sparse=False))
    assert rsync(f'{tree}/', f'{mnt}/in') == []  # nothing is left to do, by size and time
    assert rsync('-c', f'{tree}/', f'{mnt}/in') == []  # and by content
    store.remount()
    assert rsync('-c', f'{tree}/', f'{mnt}/in') == []
    rsync(f'{mnt}/in/', f'{mnt}/inside')
    rsync(f'{mnt}/inside/', f'{tmp_path}/out')
    assert_same(expected, describe(tmp_path / 'out', sparse=False))
    assert rsync('-c', f'{mnt}/in/', f'{tmp_path}/out') == []


@pytest.mark.parametrize('how', [('--inplace', '--no-whole-file'), ('--sparse',), ('--no-whole-file',), ('--append-verify',),
                                 ('--delay-updates', '--fsync'), ('--preallocate',)])
def test_rsync_follows_changes(mnt, tmp_path, how):
    tree, copy = tmp_path / 'tree', mnt / 'copy'
    make_tree(tree)
    rsync('--sparse', f'{tree}/', copy)
    with open(tree / 'deep' / 'size-3145805', 'r+b' if how != ('--append-verify',) else 'ab') as f:
        f.seek(0, os.SEEK_END if how == ('--append-verify',) else os.SEEK_SET)
        f.write(blob(100_000, 99))
    with open(tree / 'holes', 'ab') as f:
        f.truncate(12 * MIB)
    os.truncate(tree / 'deep' / 'size-1048576', 0 if how != ('--append-verify',) else 2 * MIB)
    (tree / 'deep' / 'more').write_bytes(blob(777_777))
    shutil.rmtree(tree / 'deep' / 'er')
    os.unlink(tree / 'symbolic')
    os.symlink('deep', tree / 'symbolic')
    os.setxattr(tree / 'link-1', 'user.small', b'another')
    os.removexattr(tree / 'link-1', 'user.empty')
    told = rsync(*how, '--delete', f'{tree}/', copy)
    assert '*deleting   deep/er/' in told
    assert_same(describe(tree, sparse=False), describe(copy, sparse=False))
    assert rsync('-c', '--delete', f'{tree}/', copy) == []
    if how == ('--sparse',):
        assert blocks(copy / 'holes') < MIB and blocks(copy / 'all-hole') == 0


# --------------------------------------------------------------------------- tar

def test_tar_in_and_out(store, tmp_path):
    mnt, tree = store.point, tmp_path / 'tree'
    make_tree(tree, sockets=False)  # tar takes none
    expected = describe(tree)
    keep = ('--xattrs', '--xattrs-include=*', '--acls', '--sparse', '--numeric-owner')
    sh('tar', '-C', tree, *keep, '--format=posix', '-cf', tmp_path / 'in.tar', '.')
    (mnt / 'in').mkdir()
    sh('tar', '-C', mnt / 'in', *keep, '-xpf', tmp_path / 'in.tar')
    assert_same(expected, describe(mnt / 'in'))
    # The archive, too, is on the mount, compressed and plain; --compare reads both.
    for name, how in (('plain.tar', ()), ('small.tar.xz', ('--xz',)), ('small.tar.gz', ('--gzip',))):
        sh('tar', '-C', mnt / 'in', *keep, *how, '--format=posix', '-cf', mnt / name, '.')
        sh('tar', '-C', mnt / 'in', *keep, *how, '--compare', '-f', mnt / name)
    store.remount()
    (tmp_path / 'out').mkdir()
    sh('tar', '-C', tmp_path / 'out', *keep, '-xpf', mnt / 'small.tar.xz')
    assert_same(expected, describe(tmp_path / 'out'))
    (mnt / 'again').mkdir()
    sh('tar', '-C', mnt / 'again', *keep, '-xpf', mnt / 'plain.tar')
    assert_same(expected, describe(mnt / 'again'))


def test_tar_incremental_backup(mnt, tmp_path):
    """It goes by ctime, mtime, inode and device numbers."""
    make_tree(mnt / 'tree', sockets=False)
    take = ('tar', '-C', mnt, '-g', tmp_path / 'state', '-cf')
    sh(*take, mnt / 'full.tar', 'tree')
    (mnt / 'tree' / 'deep' / 'new').write_bytes(b'new')
    os.unlink(mnt / 'tree' / 'deep' / 'size-4096')
    sh(*take, mnt / 'more.tar', 'tree')
    files = [n for n in sh('tar', '-tf', mnt / 'more.tar').splitlines() if not n.endswith('/')]
    assert files == ['tree/deep/new']
    (tmp_path / 'back').mkdir()
    for archive in ('full.tar', 'more.tar'):
        sh('tar', '-C', tmp_path / 'back', '-g', '/dev/null', '--numeric-owner', '-xpf', mnt / archive)
    assert sorted(os.listdir(tmp_path / 'back/tree/deep')) == sorted(os.listdir(mnt / 'tree/deep'))


# ----------------------------------------------------------- listing and figures

def test_find_du_df_and_ls_agree(store, tmp_path):
    mnt = store.point
    make_tree(mnt / 'tree')
    make_tree(tmp_path / 'tree')

    def count(root, *what):
        return len(sh('find', root, *what, '-printf', '.'))
    for what in ((), ('-type', 'f'), ('-type', 'd'), ('-type', 'l'), ('-type', 'p'), ('-type', 's'), ('-links', '+3'), ('-empty',),
                 ('-perm', '-6000'), ('-uid', '1234'), ('-size', '+1M'), ('-newermt', '2001-10-01'), ('-samefile', 'tree/link-1')):
        what = tuple(w.replace('tree/', '') for w in what)
        if what[:1] == ('-samefile',):
            counts = [count(at / 'tree', '-samefile', at / 'tree' / what[1]) for at in (mnt, tmp_path)]
            assert counts[0] == counts[1] == 4
        else:
            assert count(mnt / 'tree', *what) == count(tmp_path / 'tree', *what), what
    with_leaf_count = sh('find', mnt / 'tree', '-noleaf', '-type', 'd').splitlines()
    assert sorted(with_leaf_count) == sorted(sh('find', mnt / 'tree', '-type', 'd').splitlines())

    # The same list, kind, mode, link count, owner, size and time for time. A folder's size is its file system's own affair.
    def listed(root):
        out = sh('ls', '-lnRU', '--time-style=full-iso', '--quoting-style=c', root)
        rows = (line.split(None, 5) for line in out.splitlines())
        return sorted(r[:4] + r[5:] if r[0][0] == 'd' else r for r in rows if len(r) == 6)
    assert listed(mnt / 'tree') == listed(tmp_path / 'tree')

    # The sum of du is that of stat, each inode once; df's used space covers it.
    sh('sync', mnt)  # dirty bytes still count as free, but not as available
    seen = {}
    for folder, _, names in os.walk(os.fsencode(mnt / 'tree')):
        for path in [folder, *(os.path.join(folder, n) for n in names)]:
            st = os.lstat(path)
            seen[st.st_ino] = st
    assert int(sh('du', '-sB1', mnt / 'tree').split()[0]) == sum(st.st_blocks * 512 for st in seen.values())
    apparent = sum(st.st_size for st in seen.values() if not stat.S_ISDIR(st.st_mode))
    assert int(sh('du', '-sb', mnt / 'tree').split()[0]) >= apparent
    before = os.statvfs(mnt)
    assert before.f_bsize == before.f_frsize == 4096 and before.f_namemax == 255
    size, used, available = map(int, sh('df', '-B1', '--output=size,used,avail', mnt).splitlines()[1].split())
    assert used >= sum(st.st_blocks * 512 for st in seen.values() if stat.S_ISREG(st.st_mode))
    assert used + available <= size
    itotal, iused, ifree = map(int, sh('df', '--output=itotal,iused,iavail', mnt).splitlines()[1].split())
    assert itotal == iused + ifree and iused >= len(seen)
    sh('cp', '--reflink=never', '--sparse=never', mnt / 'tree' / 'holes', mnt / 'full')
    sh('sync', mnt)
    after = os.statvfs(mnt)
    taken = (before.f_bfree - after.f_bfree) * 4096
    assert SPARSE['holes'] - MIB <= taken <= SPARSE['holes'] + 8 * MIB
    assert iused + 1 == int(sh('df', '--output=iused', mnt).splitlines()[1])
    sh('rm', '-rf', mnt / 'tree', mnt / 'full')
    sh('sync', mnt)
    assert sh('du', '-sb', mnt / '.').split()[0] != ''
    # A little later the kernel gives up what it knew of them.
    wait_for(lambda: int(sh('df', '--output=iused', mnt).splitlines()[1]) == iused - len(seen), 'the files are gone')
    wait_for(lambda: os.statvfs(mnt).f_bfree > before.f_bfree, 'their space is free')


def test_remove_a_deep_and_a_wide_tree(mnt):
    at = mnt
    for i in range(60):
        at = at / f'level-{i}-{"d" * 50}'
        at.mkdir()
        for j in range(10):
            (at / f'{j}').touch()
    folder = os.open(mnt, os.O_RDONLY)
    sh('chmod', '-R', 'go-rwx', mnt)
    sh('chown', '-R', '1:1', mnt)
    assert len(sh('find', mnt, '-uid', '1', '-perm', '700', '-type', 'd', '-printf', '.')) == 61
    sh('rm', '-r', *(mnt / n for n in os.listdir(mnt)))
    os.close(folder)
    assert os.listdir(mnt) == [] and os.stat(mnt).st_nlink == 2


# --------------------------------------------------------------- tools for bytes

def test_dd(mnt, tmp_path):
    source = tmp_path / 'source'
    source.write_bytes(blob(3 * MIB + 777) + bytes(2 * MIB) + blob(MIB // 2, 2))
    for how in (('bs=64k', 'conv=fsync'), ('bs=1M', 'oflag=direct', 'conv=fdatasync'), ('bs=4k', 'oflag=dsync', 'count=50'),
                ('bs=1000', 'conv=notrunc'), ('bs=64k', 'oflag=append', 'conv=notrunc'), ('bs=512', 'count=100', 'oflag=sync')):
        (mnt / 'out').write_bytes(b'')
        sh('dd', 'status=none', f'if={source}', f'of={mnt}/out', *how)
        held = (mnt / 'out').read_bytes()
        assert held == source.read_bytes()[:len(held)] and len(held) >= 51_200, how
    sh('dd', 'status=none', f'if={source}', f'of={mnt}/sparse', 'bs=64k', 'conv=sparse,fsync')
    assert content(mnt / 'sparse') == content(source)
    assert blocks(mnt / 'sparse') < os.stat(source).st_size - MIB
    sh('dd', 'status=none', f'if={mnt}/sparse', f'of={tmp_path}/back', 'bs=1M', 'iflag=direct,fullblock')
    assert content(tmp_path / 'back') == content(source)
    # Blocks of a file changed in place, past the end as well.
    sh('dd', 'status=none', 'if=/dev/zero', f'of={mnt}/sparse', 'bs=4k', 'seek=3', 'count=2', 'conv=notrunc')
    sh('dd', 'status=none', 'if=/dev/zero', f'of={mnt}/sparse', 'bs=1', 'seek=8M', 'count=0')
    held, expected = (mnt / 'sparse').read_bytes(), bytearray(source.read_bytes())
    expected[12288:20480] = bytes(8192)
    assert held == bytes(expected) + bytes(8 * MIB - len(expected))


def test_truncate_and_fallocate(mnt):
    f, data = mnt / 'f', bytearray(blob(3 * MIB))
    f.write_bytes(data)

    def is_right():
        assert f.read_bytes() == bytes(data)
    sh('truncate', '-s', '+1M', f)
    data += bytes(MIB)
    is_right()
    sh('truncate', '-s', '%4096', f)
    sh('truncate', '-s', '-12345', f)
    del data[-12345:]
    is_right()
    sh('fallocate', '-p', '-o', '100000', '-l', '1000000', f)
    data[100_000:1_100_000] = bytes(1_000_000)
    is_right()
    assert blocks(f) < 3 * MIB
    sh('fallocate', '-z', '-o', '1999999', '-l', '3', f)
    data[1_999_999:2_000_002] = bytes(3)
    is_right()
    sh('fallocate', '-x', '-l', '6M', f)
    data += bytes(6 * MIB - len(data))
    is_right()
    sh('fallocate', '--dig-holes', f)
    is_right()
    sh('truncate', '-r', f, mnt / 'g')
    assert os.stat(mnt / 'g').st_size == len(data) and blocks(mnt / 'g') == 0


def test_split_sort_and_join_lines(mnt, tmp_path):
    lines = [b'%09d some text\n' % n for n in random.Random(1).sample(range(10 ** 8), 100_000)]
    (mnt / 'lines').write_bytes(b''.join(lines))
    sh('split', '-b', '300000', '-a', '3', mnt / 'lines', mnt / 'part.')
    parts = sorted(n for n in os.listdir(mnt) if n.startswith('part.'))
    assert b''.join((mnt / n).read_bytes() for n in parts) == b''.join(lines)
    (mnt / 'tmp').mkdir()
    sh('sort', '-T', mnt / 'tmp', '-S', '1M', '--parallel=2', '-o', mnt / 'lines', mnt / 'lines')  # over its own input
    assert (mnt / 'lines').read_bytes() == b''.join(sorted(lines))
    assert os.listdir(mnt / 'tmp') == []
    sh('sort', '-c', mnt / 'lines')
    assert sh('tail', '-n', '1', mnt / 'lines').encode() == max(lines)
    assert sh('wc', '-l', mnt / 'lines').split()[0] == '100000'
    sh('sed', '-i.bak', 's/text/words/', mnt / 'lines')
    assert (mnt / 'lines').read_bytes() == b''.join(sorted(lines)).replace(b'text', b'words')
    assert (mnt / 'lines.bak').read_bytes() == b''.join(sorted(lines))
    for tool in ('gzip', 'xz'):
        sh(tool, '-k', '-1', mnt / 'lines')
    assert sh('xz', '-dc', mnt / 'lines.xz') == sh('gzip', '-dc', mnt / 'lines.gz') == (mnt / 'lines').read_text()
    sh('shred', '-n', '1', '-z', '-u', mnt / 'lines.bak')
    assert not (mnt / 'lines.bak').exists()
