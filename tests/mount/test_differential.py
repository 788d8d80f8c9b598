# SPDX-License-Identifier: Apache-2.0
"""The same random system calls on the mount and on a file system of the kernel return and leave the same."""
import os
import shutil
import stat

import pytest

from conftest import run
from programs import LONG, client, kernel_folder

CALLS = 200_000 if LONG else 4_000


def compare(mnt, *options):
    with kernel_folder() as kernel:
        for side in (mnt / 'side', kernel / 'side'):
            side.mkdir()
        client('differ', *options, mnt / 'side', kernel / 'side')


@pytest.mark.parametrize('seed', range(8 if LONG else 3))
def test_same_calls_same_results(mnt, seed):
    # Fixed seeds, so that a failure comes from the change under test; long runs search for new failures.
    compare(mnt, f'--ops={CALLS}', *([] if LONG else [f'--seed={seed}']))


def test_same_calls_change_the_same_times(mnt):
    compare(mnt, f'--ops={CALLS // 10}', '--times=2', *([] if LONG else ['--seed=1']))


def tree(folder):
    """Everything below it, by its path from there. Of large files the first bytes alone."""
    seen = {}
    for base, dirs, files in os.walk(folder):
        for path in (os.path.join(base, name) for name in dirs + files):
            st = os.lstat(path)
            data = st.st_size if stat.S_ISREG(st.st_mode) else 0
            if stat.S_ISLNK(st.st_mode):
                data = os.readlink(path)
            elif stat.S_ISREG(st.st_mode):
                with open(path, 'rb') as f:
                    data = st.st_size, f.read(4 << 20)
            links = 0 if stat.S_ISDIR(st.st_mode) else st.st_nlink
            attributes = {name: os.getxattr(path, name, follow_symlinks=False)
                          for name in os.listxattr(path, follow_symlinks=False)}
            seen[os.path.relpath(path, folder)] = st.st_mode, st.st_uid, st.st_gid, links, attributes, data
    return seen


def test_a_kept_step_is_the_tree_of_its_moment(store):
    root = store.point / 'model'
    root.mkdir()
    with kernel_folder() as kernel:
        side = kernel / 'side'
        side.mkdir()
        os.setxattr(root, 'user.hitrain.optimizer', b'sgd lr=0.1')
        # The sync of a model's folder is a commit, which not everybody may do.
        client('differ', f'--ops={CALLS // 2}', '--seed=3', '--without=sync', root, side)
        run('hitrainctl', 'snapshot', root)
        for entry in list(os.scandir(root)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry)
            else:
                os.unlink(entry)
            with open(entry.path, 'wb') as f:
                f.write(b'later')
        kept, then = root / '.hitrain/snap/0', tree(side)
        assert len(then) > 5 and tree(kept) == then and tree(root) != then
        store.remount()
        assert tree(kept) == then


def test_same_calls_with_one_thread(make_store):
    compare(make_store().mount(flags=('-s',)), f'--ops={CALLS // 4}', '--seed=7')
