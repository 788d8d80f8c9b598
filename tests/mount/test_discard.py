# SPDX-License-Identifier: Apache-2.0
"""Free space that devices forget: a store in a sparse file takes less space again."""
import contextlib
import json
import os
import subprocess

import numpy as np
import pytest

from calls import sync
from conftest import BIN, SECONDS_MAX, run, wait_for
from slow import a_loop

MIB = 1 << 20
SIZE = 48 * MIB


def stored(store):
    """Bytes that the image takes on its file system."""
    return os.stat(store.image).st_blocks * 512


def fill(point, name, seed):
    data = np.random.default_rng(seed).bytes(SIZE)
    (point / name).write_bytes(data)
    sync(point / name)
    return data


def remove(point, name):
    (point / name).unlink()
    sync(point)


def engine(point):
    engines = json.loads(run('hitrainctl', 'background', 'status', point, '--json').stdout)['engines']
    return {e['engine']: e for e in engines}['discard']


def test_a_deleted_file_leaves_the_image(make_store):
    store = make_store()
    point = store.mount('discard=on')
    kept = fill(point, 'kept', 1)
    fill(point, 'gone', 2)
    full = stored(store)
    assert full > 2 * SIZE
    remove(point, 'gone')
    wait_for(lambda: engine(point)['discarded_bytes'] >= SIZE * 9 // 10, 'discard')  # counted after a batch
    wait_for(lambda: stored(store) < full - SIZE * 9 // 10, 'holes')
    assert engine(point)['refused_devices'] == 0
    fill(point, 'next', 3)
    store.remount(check=True)
    assert (point / 'kept').read_bytes() == kept


@pytest.mark.parametrize('sparse', [False, True])
@pytest.mark.parametrize('kind', ['file', 'loop'])
def test_reserved_space_is_not_discarded_unasked(tmp_path, kind, sparse):
    """Its file system could give it to others. A sparse file was promised nothing."""
    image, point = tmp_path / 'image', tmp_path / 'mnt'
    point.mkdir()
    with open(image, 'wb') as f:
        os.truncate(f.fileno(), 64 * MIB) if sparse else os.posix_fallocate(f.fileno(), 0, 64 * MIB)
    with a_loop(image) if kind == 'loop' else contextlib.nullcontext(image) as device:
        run('mkfs.hitrain', '--no-discard', device)
        for options, state in ('dram=32M', 'idle' if sparse else 'off'), ('dram=32M,discard=on', 'idle'), ('dram=32M,background=off', 'off'):
            run('hitrain', device, point, '-o', options)
            assert engine(point)['state'] == state
            run('umount.hitrain', point)


def test_trim_discards_what_earlier_mounts_left(make_store):
    store = make_store()
    point = store.mount()
    kept = fill(point, 'kept', 1)
    fill(point, 'gone', 2)
    remove(point, 'gone')
    store.unmount()
    full = stored(store)
    assert full > 2 * SIZE
    store.mount()
    free = os.statvfs(point).f_bfree
    done = json.loads(run('hitrainctl', 'trim', point, '--json').stdout)
    assert done['mount'] == str(point) and done['discarded_bytes'] >= SIZE * 9 // 10
    assert stored(store) < full - SIZE * 9 // 10
    assert os.statvfs(point).f_bfree == free
    assert 'discarded' in run('hitrainctl', 'trim', point).stdout
    assert engine(point)['state'] == 'off'
    store.remount(check=True)
    assert (point / 'kept').read_bytes() == kept


def test_a_read_only_mount_is_not_trimmed(make_store):
    store = make_store()
    point = store.mount('ro')
    done = run('hitrainctl', 'trim', point, check=False)
    assert done.returncode == 1 and 'Read-only' in done.stderr


def test_a_trim_does_not_delay_the_end_of_the_daemon(make_store):
    """Free space in runs of 64 KiB: a trim that takes thousands of batches ends with the one that runs."""
    store = make_store('4G')
    point = store.mount()
    for i in range(200):
        (point / f'{i}').write_bytes(b'x' * (64 << 10))
    sync(point)
    for i in range(0, 200, 2):
        (point / f'{i}').unlink()
    sync(point)
    trims = subprocess.Popen(['sh', '-c', f'while {BIN}/hitrainctl trim {point}; do :; done'], stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: engine(point)['discarded_bytes'] > 0, 'a trim')
        store.daemon.terminate()
        assert store.daemon.wait(SECONDS_MAX) == 0, store.messages()
    finally:
        trims.wait(SECONDS_MAX)
    store.daemon = None
    store.assert_clean()
