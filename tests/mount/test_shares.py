# SPDX-License-Identifier: Apache-2.0
"""Devices of different speed: each gets as much as it is fast."""
import os
import struct

from calls import sync
from conftest import MIB, run
from slow import slow_group
from test_devices import devices, make_pair  # noqa: F401  (a fixture)

FAST, SLOW = 48 * MIB, 16 * MIB  # together below what any disk under the tests gives
FILE = 24 * MIB


def written(mnt):
    return [d['written_bytes'] for d in devices(mnt)]


def put(path):
    with open(path, 'wb') as f:
        f.write(os.urandom(FILE))
        os.fsync(f.fileno())


def mount_slowly(store, group, limit):
    limit(FAST, store.loops[0])
    limit(SLOW, store.loops[1])
    mnt = store.mount_on(store.loops)
    with open(f'{group}/cgroup.procs', 'w') as f:
        f.write(str(store.daemon.pid))
    (mnt / 't').mkdir()
    os.setxattr(mnt / 't', 'user.hitrain.dtype', b'u8')
    return mnt


def shares(mnt):
    return [d.get('share_per_mille', 0) for d in devices(mnt)]


def stable_shares(mnt):
    """Shares, and what the metrics and the table of devices show of the first at the same time."""
    for _ in range(100):
        share = shares(mnt)
        metrics = (mnt / '.hitrain/stats').read_text()
        line = run('hitrainctl', 'device', mnt).stdout.splitlines()[5].split()
        if shares(mnt) == share:  # nothing changed in between
            return share, metrics, line
    raise AssertionError('shares change all the time')


def test_new_content_goes_to_devices_as_fast_as_they_are(make_pair):  # noqa: F811
    store = make_pair(size=512 * MIB)
    with slow_group(store.loops[0], ('read', 'write')) as (group, limit):
        mnt = mount_slowly(store, group, limit)
        assert not any('share_per_mille' in d for d in devices(mnt)), 'known although nothing was written yet'
        assert run('hitrainctl', 'device', mnt).stdout.splitlines()[5].split()[:3] == ['0', 'fast', '-']
        # The ratio is 3. Devices without shares would get the same. A busy machine may be slower than the limits for
        # some time, and then the devices are alike.
        for _ in range(24):
            before = written(mnt)
            put(mnt / 't/x')
            moved = [b - a for a, b in zip(before, written(mnt))]
            share = shares(mnt)
            print(share, moved)
            if 1.6 * moved[1] < moved[0] < 8 * moved[1] and 1.6 * share[1] < share[0] < 8 * share[1]:
                break
        else:
            raise AssertionError('never in proportion')
        share, metrics, line = stable_shares(mnt)
        assert 999 <= sum(share) <= 1001
        assert f'hitrain_device_share_per_mille{{device="0"}} {share[0]}\n' in metrics
        assert line[:2] == ['0', 'fast'] and line[3] == '%' and abs(float(line[2]) * 10 - share[0]) <= 1


def test_updates_move_state_to_the_faster_device(make_pair):  # noqa: F811
    """Parameters lie on both devices equally. Steps read and write them, and move some."""
    store = make_pair(size=512 * MIB)
    elements = 8 * MIB
    mnt = store.mount_on(store.loops)
    (mnt / 'm').mkdir()
    os.setxattr(mnt / 'm', 'user.hitrain.dtype', b'f32')
    os.setxattr(mnt / 'm', 'user.hitrain.optimizer', b'sgd lr=1')
    for _ in range(20):  # beside other tests one device may seem slower for a moment
        (mnt / 'm/w').write_bytes(bytes(4 * elements))
        sync(mnt / 'm')
        used = [d['data_bytes'] - d['free_bytes'] for d in devices(mnt)]
        if abs(used[0] - used[1]) < 12 * MIB:
            break
    assert abs(used[0] - used[1]) < 12 * MIB, used
    store.unmount()
    with slow_group(store.loops[0], ('read', 'write')) as (group, limit):
        mount_slowly(store, group, limit)
        fd = os.open(mnt / 'm', os.O_RDONLY)
        for steps in range(1, 61):
            (mnt / 'm/.hitrain/grad/w').write_bytes(struct.pack('<f', 1) * elements)
            os.fsync(fd)
            used = [d['data_bytes'] - d['free_bytes'] for d in devices(mnt)]
            moved = int(os.getxattr(mnt, 'user.hitrain.moved_bytes'))
            print(steps, used, shares(mnt), moved)
            if used[0] > 1.6 * used[1] and moved >= 2 * MIB:
                break
        os.close(fd)
        assert used[0] > 1.6 * used[1] and moved >= 2 * MIB, (used, moved)
        assert set((mnt / 'm/w').read_bytes()[:4 * elements]) == set(struct.pack('<f', -steps))
        store.unmount()


def test_all_paths_of_a_model_take_content_as_fast_as_they_are(make_pair):  # noqa: F811
    """Without the word paths a device of the class capacity has no share; with it one by its bandwidth."""
    store = make_pair(size=512 * MIB)
    run('mkfs.hitrain', '--force', store.loops[0], f'--capacity={store.loops[1]}')
    elements = 8 * MIB
    with slow_group(store.loops[0], ('read', 'write')) as (group, limit):
        mnt = mount_slowly(store, group, limit)
        (mnt / 'm').mkdir()
        os.setxattr(mnt / 'm', 'user.hitrain.dtype', b'f32')
        os.setxattr(mnt / 'm', 'user.hitrain.optimizer', b'sgd lr=1')
        (mnt / 'm/w').write_bytes(bytes(4 * elements))
        sync(mnt / 'm')
        assert devices(mnt)[1]['free_bytes'] == devices(mnt)[1]['data_bytes'] and shares(mnt)[1] == 0
        os.setxattr(mnt / 'm', 'user.hitrain.paths', b'all')
        for steps in range(1, 61):
            (mnt / 'm/.hitrain/grad/w').write_bytes(struct.pack('<f', 1) * elements)
            sync(mnt / 'm')
            used = [d['data_bytes'] - d['free_bytes'] for d in devices(mnt)]
            print(steps, used, shares(mnt))
            if used[0] > 1.6 * used[1] > 0 and 100 < shares(mnt)[1] < 400:
                break
        else:
            raise AssertionError('never in proportion')
        assert set((mnt / 'm/w').read_bytes()) == set(struct.pack('<f', -steps))
        store.unmount()
