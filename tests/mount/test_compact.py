# SPDX-License-Identifier: Apache-2.0
"""Compaction on a mount: nearly empty groups of blocks become free, and files stay what they are."""
import json
import os

import numpy as np

from calls import sync
from conftest import run, wait_for

CHUNK = 64 << 10
FILES = 640


def figures(point):
    done = run('hitrainctl', 'background', 'status', point, '--engine=compact', '--json')
    return json.loads(done.stdout)['engines'][0]


def test_groups_are_emptied_after_the_mount(make_store):
    store = make_store()
    point = store.mount('background=off')
    assert figures(point)['state'] == 'off'
    contents = {i: np.random.default_rng(i).bytes(CHUNK) for i in range(FILES)}
    for i, data in contents.items():
        (point / f'f{i}').write_bytes(data)
    os.mkdir(point / 'clones')
    run('hitrainctl', 'commit', point)
    for i in range(0, FILES, 32):
        fd, out = os.open(point / f'f{i}', os.O_RDONLY), os.open(point / 'clones' / str(i), os.O_WRONLY | os.O_CREAT)
        assert os.copy_file_range(fd, out, CHUNK) == CHUNK
        os.close(fd)
        os.close(out)
    for i in range(FILES):
        if i % 16:
            (point / f'f{i}').unlink()
    sync(point)
    point = store.remount('background_rate=8G')
    wait_for(lambda: figures(point)['emptied'] >= 20, 'empty groups')
    for i in range(0, FILES, 16):
        assert (point / f'f{i}').read_bytes() == contents[i]
    point = store.remount(check=True)
    for i in range(0, FILES, 32):
        assert (point / 'clones' / str(i)).read_bytes() == contents[i]
        (point / f'f{i}').unlink()
        assert (point / 'clones' / str(i)).read_bytes() == contents[i]
    store.unmount(check=True)


def test_groups_are_emptied_when_files_go(make_store):
    store = make_store()
    point = store.mount('background_rate=8G')
    contents = {i: np.random.default_rng(i).bytes(CHUNK) for i in range(FILES)}
    for i, data in contents.items():
        (point / f'f{i}').write_bytes(data)
    run('hitrainctl', 'commit', point)
    for i in range(FILES):
        if i % 16:
            (point / f'f{i}').unlink()
    sync(point)
    wait_for(lambda: figures(point)['emptied'] >= 20, 'empty groups')
    for i in range(0, FILES, 16):
        assert (point / f'f{i}').read_bytes() == contents[i]
    store.unmount(check=True)
