# SPDX-License-Identifier: Apache-2.0
"""Passes over more than fits in DRAM, and a daemon that has nothing to do."""
import os
import pathlib
import time

import pytest

from calls import sync
from conftest import MIB, wait_for

DRAM = 64 * MIB
TENSOR = 8 * MIB
COUNT = 16  # twice the DRAM tier
IDLE_S = 3
IDLE_TICKS_MAX = 2
IDLE_WAKEUPS_MAX = 20


def figure(point, name):
    lines = os.getxattr(point, 'user.hitrain.stats').decode().splitlines()
    return int(dict(line.split('=', 1) for line in lines)[name])


def swap(folder, number):
    """Each tensor read and written back, as swapping does."""
    for n in range(COUNT):
        path = folder / f't{n:02}'
        with open(path, 'r+b', buffering=0) as f:
            assert f.read(TENSOR) == bytes([number - 1]) * TENSOR, f'{path}, pass {number}'
            f.seek(0)
            f.write(bytes([number]) * TENSOR)


@pytest.mark.parametrize('kind', ['durable', 'scratch'])
def test_passes_over_more_than_fits_find_a_part_of_it_in_memory(make_store, kind):
    point = make_store('512M').mount(f'dram={DRAM}', 'commit=3600')
    folder = point / 'swapped'
    folder.mkdir()
    os.setxattr(folder, 'user.hitrain.class', kind.encode())
    os.setxattr(folder, 'user.hitrain.dtype', b'u8')
    for n in range(COUNT):
        (folder / f't{n:02}').write_bytes(bytes(TENSOR))
    for number in range(1, 4):
        swap(folder, number)
    before = {w: figure(point, w) for w in ('device_read_bytes', 'device_written_bytes')}
    swap(folder, 4)
    moved = {w: (figure(point, w) - before[w]) / (TENSOR * COUNT) for w in before}
    # Three quarters of the tier, which is half of the set, stay: 0.375 of each pass.
    assert moved['device_read_bytes'] < 0.75, moved
    if kind == 'scratch':
        assert moved['device_written_bytes'] < 0.75, moved
    assert figure(point, 'workingset_bytes') > DRAM // 2
    swap(folder, 5)


def ticks(pid):
    with open(f'/proc/{pid}/stat') as f:
        words = f.read().rsplit(')', 1)[1].split()
    return int(words[11]) + int(words[12])


def wakeups(pid):
    """How often its threads have begun to wait."""
    lines = [line.split() for t in pathlib.Path(f'/proc/{pid}/task').iterdir() for line in (t / 'status').read_text().splitlines()]
    return sum(int(words[1]) for words in lines if words[0] == 'voluntary_ctxt_switches:')


def test_an_idle_daemon_uses_no_processor(make_store):
    store = make_store()
    point = store.mount('commit=1')
    for n in range(20):
        (point / f'f{n}').write_bytes(b'x' * MIB)
    sync(point)

    def is_idle():
        """Not while it does what the writes left, or frees what the kernel forgets."""
        before, woken = ticks(store.daemon.pid), wakeups(store.daemon.pid)
        time.sleep(IDLE_S)  # three turns of the commit timer
        return wakeups(store.daemon.pid) - woken <= IDLE_WAKEUPS_MAX and ticks(store.daemon.pid) - before <= IDLE_TICKS_MAX
    wait_for(is_idle, 'an idle daemon')
