# SPDX-License-Identifier: Apache-2.0
"""A store as the upper layer of overlayfs, as container engines use one."""
import contextlib
import os
import pathlib
import stat
import subprocess
import tempfile

import pytest

from calls import WHITEOUT, rename, sync
from conftest import SECONDS_MAX


def mount_overlay(lower, folder, point):
    for sub in (folder / 'upper', folder / 'work', point):
        sub.mkdir(exist_ok=True)
    return subprocess.run(['mount', '-t', 'overlay', 'overlay', '-o',
                           f'lowerdir={lower},upperdir={folder}/upper,workdir={folder}/work', str(point)],
                          stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX)


def unmount(point):
    subprocess.run(['umount', str(point)], check=True, timeout=SECONDS_MAX)


@contextlib.contextmanager
def other_file_system(tmp_path):
    """A tmpfs: the tests themselves may run in an overlay, which no layer may be in."""
    point = tmp_path / 'tmpfs'
    point.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', str(point)], check=True, timeout=SECONDS_MAX)
    try:
        yield point
    finally:
        unmount(point)


@pytest.fixture
def layers(store):
    """Lower layer, folder of the upper one on the store, and where the overlay is mounted."""
    with tempfile.TemporaryDirectory(prefix='hitrain-overlay-') as folder:
        folder = pathlib.Path(folder)
        with other_file_system(folder) as plain:
            for sub in ('lower', 'layers'):
                (plain / sub).mkdir()
            (plain / 'lower' / 'd').mkdir()
            for name in ('a', 'b', 'c', 'd/f', 'd/g'):
                (plain / 'lower' / name).write_text(name)
            os.setxattr(plain / 'lower' / 'c', 'trusted.kept', b'kept')
            point = plain / 'point'
            if mount_overlay(plain / 'lower', plain / 'layers', point).returncode:
                pytest.skip('overlayfs cannot be mounted here')
            unmount(point)
            mounted = mount_overlay(plain / 'lower', store.point, point)
            assert mounted.returncode == 0, mounted.stderr
            try:
                yield plain / 'lower', store.point / 'upper', point
            finally:
                unmount(point)


def is_whiteout(path):
    st = os.lstat(path)
    return stat.S_ISCHR(st.st_mode) and st.st_rdev == 0


def change(point):
    (point / 'a').unlink()
    os.rename(point / 'b', point / 'moved')
    with open(point / 'c', 'a') as f:
        f.write(' and more')
    os.rename(point / 'd' / 'g', point / 'd' / 'h')
    (point / 'new').mkdir()


def check(point):
    assert sorted(os.listdir(point)) == ['c', 'd', 'moved', 'new']
    assert (point / 'moved').read_text() == 'b' and (point / 'c').read_text() == 'c and more'
    assert os.getxattr(point / 'c', 'trusted.kept') == b'kept'
    assert sorted(os.listdir(point / 'd')) == ['f', 'h'] and (point / 'd' / 'h').read_text() == 'd/g'
    assert sorted(os.listdir(point / 'new')) == []


def test_overlay_removes_renames_and_copies_up(store, layers):
    lower, upper, point = layers
    change(point)
    check(point)
    assert is_whiteout(upper / 'a') and is_whiteout(upper / 'b') and is_whiteout(upper / 'd' / 'g')
    assert sorted(os.listdir(lower)) == ['a', 'b', 'c', 'd'] and (lower / 'c').read_text() == 'c'
    subprocess.run(['rm', '-r', str(point / 'd')], check=True, timeout=SECONDS_MAX)
    assert is_whiteout(upper / 'd')
    (point / 'd').mkdir()  # opaque: the lower directory is hidden
    assert os.listdir(point / 'd') == [] and os.getxattr(upper / 'd', 'trusted.overlay.opaque') == b'y'


def test_overlay_finds_its_layer_again(store, layers):
    lower, upper, point = layers
    change(point)
    unmount(point)
    store.remount()
    assert mount_overlay(lower, store.point, point).returncode == 0
    check(point)


def test_a_renamed_file_leaves_a_whiteout(store):
    mnt = store.point
    (mnt / 'f').write_text('content')
    rename(mnt / 'f', mnt / 'g', WHITEOUT)
    assert is_whiteout(mnt / 'f') and (mnt / 'g').read_text() == 'content'
    sync(mnt)
    store.crash()
    assert is_whiteout(mnt / 'f') and stat.S_IMODE(os.lstat(mnt / 'f').st_mode) == 0
    assert sorted(os.listdir(mnt)) == ['f', 'g'] and (mnt / 'g').read_text() == 'content'
