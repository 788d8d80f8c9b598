# SPDX-License-Identifier: Apache-2.0
"""Free space that devices forget: a store in a sparse file takes less space again."""
import json
import os

import numpy as np

from calls import sync
from conftest import run, wait_for

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
    store.unmount()
    store.assert_clean()
    store.mount()
    assert (point / 'kept').read_bytes() == kept


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
    store.unmount()
    store.assert_clean()
    store.mount()
    assert (point / 'kept').read_bytes() == kept


def test_a_read_only_mount_is_not_trimmed(make_store):
    store = make_store()
    point = store.mount('ro')
    done = run('hitrainctl', 'trim', point, check=False)
    assert done.returncode == 1 and 'Read-only' in done.stderr
