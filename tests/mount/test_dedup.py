# SPDX-License-Identifier: Apache-2.0
"""Deduplication on a mount: the space that copies take, their content, damage in what they share, and steps beside it."""
import json
import os

import numpy as np

from calls import sync, write_synced
from conftest import run, wait_for
from test_errors import events
from test_scrub import flip, train

MIB = 1 << 20
LONG = 'HITRAIN_LONG' in os.environ
ON = 'commit=1', 'background_rate=8G'


def figures(point):
    done = run('hitrainctl', 'background', 'status', point, '--engine=dedup', '--json')
    return json.loads(done.stdout)['engines'][0]


def used(point):
    run('hitrainctl', 'commit', point)
    v = os.statvfs(point)
    return (v.f_blocks - v.f_bfree) * v.f_frsize


def shared(point, size):
    wait_for(lambda: figures(point)['shared_bytes'] >= size, f'{size} shared bytes')


def test_a_second_copy_takes_no_space(make_store):
    store = make_store()
    point = store.mount(*ON)
    data = np.random.default_rng(1).bytes(40 * MIB)
    empty = used(point)
    write_synced(point / 'a', data)
    once = used(point)
    run('hitrainctl', 'background', 'pause', point, '--engine=dedup')
    write_synced(point / 'b', data)
    assert used(point) - once >= len(data)
    run('hitrainctl', 'background', 'resume', point, '--engine=dedup')
    shared(point, len(data))
    assert used(point) - once < len(data) / 1000
    run('hitrainctl', 'evict', point / 'a', point / 'b')
    assert (point / 'a').read_bytes() == (point / 'b').read_bytes() == data
    with open(point / 'b', 'r+b') as f:
        f.write(b'mine')
    sync(point / 'b')
    assert (point / 'a').read_bytes() == data
    point = store.remount(*ON, check=True)
    assert (point / 'a').read_bytes() == data and (point / 'b').read_bytes() == b'mine' + data[4:]
    (point / 'a').unlink()
    (point / 'b').unlink()
    wait_for(lambda: used(point) <= empty, 'all space')
    store.unmount(check=True)


def test_ten_checkpoints_with_one_percent_changed(make_store):
    """Each has its own contiguous 1 %: together they take at most 1.15 times one."""
    store = make_store()
    point = store.mount(*ON)
    size = 16 * MIB
    data = bytearray(np.random.default_rng(1).bytes(size))
    empty = used(point)
    run('hitrainctl', 'background', 'pause', point, '--engine=dedup')
    contents = []
    for i in range(10):
        at = i * size // 10
        data[at:at + size // 100] = np.random.default_rng(10 + i).bytes(size // 100)
        contents.append(bytes(data))
        write_synced(point / f'checkpoint{i}', contents[i])
    assert used(point) - empty >= 10 * size
    run('hitrainctl', 'background', 'resume', point, '--engine=dedup')
    wait_for(lambda: used(point) - empty <= 1.15 * (size + 9 * size / 100), 'the pass')
    assert used(point) - empty <= 1.15 * size * 1.09
    print('ten checkpoints take', round((used(point) - empty) / size, 3), 'times one')
    run('hitrainctl', 'evict', *[point / f'checkpoint{i}' for i in range(10)])
    for i, want in enumerate(contents):
        assert (point / f'checkpoint{i}').read_bytes() == want
    store.unmount(check=True)


def test_damage_in_what_files_share_names_each_of_them(make_store):
    store = make_store()
    point = store.mount(*ON, 'scrub_rate=8G')
    data = np.random.default_rng(1).bytes(3 * MIB)
    names = ['a', 'b', 'c']
    for name in names:
        write_synced(point / name, data)
    shared(point, 2 * len(data))
    run('hitrainctl', 'evict', *[point / name for name in names])
    used(point)
    store.unmount()
    image, start = store.image.read_bytes(), data[MIB:MIB + 64]
    found = [at for at in range(0, len(image), 4096) if image[at:at + len(start)] == start]
    assert found
    for at in found:  # also where a copy was before
        flip(store.image, at)
    told = run('hitrain-fsck', '-n', store.image, check=False).stdout
    for name in names:
        assert any('DATA-CSUM' in line and f'/{name}' in line for line in told.splitlines()), told
    point = store.mount('scrub_rate=8G')
    run('hitrainctl', 'scrub', 'start', point)
    wait_for(lambda: len(events(point, code='scrub-damage')) == 3, 'the findings')
    assert sorted(e['path'] for e in events(point, code='scrub-damage')) == names
    for name in names:
        (point / name).unlink()
    used(point)
    store.unmount(check=True)


def test_steps_beside_it_give_the_same_bits(make_store):
    steps = 1000 if LONG else 8
    quiet, busy = make_store('512M'), make_store('512M')
    want = train(quiet.mount(), lambda step: step < steps)
    quiet.unmount()
    point = busy.mount(*ON)
    data = np.random.default_rng(5).bytes(8 * MIB)

    def copy(step):
        write_synced(point / f'copy{step % 3}', data[:4 * MIB + step % 4 * MIB])
        return step < steps

    assert train(point, copy) == want
    shared(point, 4 * MIB)
    for i in range(3):
        assert (point / f'copy{i}').read_bytes() == data[:(point / f'copy{i}').stat().st_size]
    busy.unmount(check=True)
