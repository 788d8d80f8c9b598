# SPDX-License-Identifier: Apache-2.0
"""Slow devices beside fast ones: what lies on them, when, and what their silence costs."""
import contextlib
import errno
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time

import numpy as np
import pytest

from calls import refused, sync
from conftest import MIB, SECONDS_MAX, Store, end_stores, needs, run, wait_for
from models import new_model, word
from slow import a_loop
from test_devices import devices, make_pair  # noqa: F401 (a fixture)
from test_errors import events
from test_roots import command, put_gradient
from test_tenants import silent

ELEMENTS = 1 << 20


class ClassStore(Store):
    """A store of files: fast ones, then those of the class capacity. Sizes are in MiB."""

    def __init__(self, fast, capacity):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix='hitrain-test-'))
        self.point, self.log, self.daemon = self.folder / 'mnt', self.folder / 'log', None
        self.point.mkdir()
        self.members = [self.make(f'fast{i}', size) for i, size in enumerate(fast)]
        slow = [self.make(f'slow{i}', size) for i, size in enumerate(capacity)]
        self.image = self.members[0]
        self.told = run('mkfs.hitrain', *self.members, *(f'--capacity={path}' for path in slow)).stdout
        self.members += slow

    def make(self, name, mib):
        with open(self.folder / name, 'wb') as f:
            f.truncate(mib * MIB)
        return self.folder / name

    def mount(self, *options, **kw):
        return super().mount(*(f'device={path}' for path in self.members[1:]), *options, **kw)

    def fsck(self):
        return run('hitrain-fsck', '-n', *self.members, check=False)


@pytest.fixture
def make(request):
    """make(fast, capacity): ClassStores that are clean when the test ends."""
    made = []

    def make_one(fast, capacity=()):
        made.append(ClassStore(fast, capacity))
        return made[-1]

    yield make_one
    end_stores(request, made)


def used(mnt):
    """MiB of content on each device."""
    return [(d['data_bytes'] - d['free_bytes']) / MIB for d in devices(mnt)]


def spills(mnt):
    return events(mnt, code='spilled')


def content(seed, mib):
    return np.random.default_rng(seed).bytes(mib * MIB)


def train(mnt, params, steps, words='adamw lr=0.01', paths=None):
    """A model of so many parameters of ELEMENTS, after so many steps."""
    random = np.random.default_rng(7)
    root = new_model(mnt / 'm', words)
    if paths:
        word(root, 'paths', paths)
    for i in range(params):
        (root / f'p{i}').write_bytes(random.standard_normal(ELEMENTS, 'f4').tobytes())
    sync(root)
    for _ in range(steps):
        for i in range(params):
            put_gradient(root, f'p{i}', random.standard_normal(ELEMENTS, 'f4'))
        sync(root)
    return root


def state(root):
    found = {}
    for name in sorted(p.name for p in root.iterdir() if p.name.startswith('p')):
        found[name] = (root / name).read_bytes()
        for kept in sorted((root / '.hitrain' / 'state' / name).iterdir()):
            found[name, kept.name] = kept.read_bytes()
    return found


def test_a_model_that_fits_fast_devices_leaves_no_byte_elsewhere(make):
    one, two, params = make([256]), make([256], [256]), 7
    promised, = re.findall(r'up to ([0-9.]+) million parameters in f32.*on the fast devices', two.told)
    assert params * ELEMENTS < float(promised) * 1e6 < (params + 1) * ELEMENTS
    alone, beside = train(one.mount(), params, 4), train(two.mount(), params, 4)
    assert state(alone) == state(beside)
    fast, slow = devices(two.point)
    assert (fast['class'], slow['class']) == ('fast', 'capacity') and used(two.point)[1] == 0
    assert slow['written_bytes'] <= 64 * 4096, 'superblocks alone'
    assert not spills(two.point)
    table = run('hitrainctl', 'device', two.point).stdout.splitlines()
    assert [line.split()[:2] for line in table[5:7]] == [['0', 'fast'], ['1', 'capacity']], table


def test_a_set_four_times_the_fast_class_trains_to_the_same_bytes(make):
    one, two = make([400]), make([24], [400])
    alone, beside = train(one.mount(), 8, 3), train(two.mount(), 8, 3)     # parameters and state: 96 MiB
    assert state(alone) == state(beside)
    assert used(two.point)[1] > 48
    assert len(spills(two.point)) == 1, spills(two.point)
    mnt = two.crash()
    assert state(alone) == state(mnt / 'm')


def test_content_spills_once_comes_back_when_it_is_rewritten_and_fills_all(make):
    store = make([48], [64])
    mnt = store.mount()
    (mnt / 't').mkdir()
    word(mnt / 't', 'dtype', 'u8')
    files = {}

    def put(name, seed, mib=8):
        (mnt / 't' / name).write_bytes(content(seed, mib))
        sync(mnt / 't' / name)
        files[name] = seed, mib

    while not spills(mnt):
        assert used(mnt)[1] == 0
        put(f'f{len(files)}', len(files))
    assert used(mnt)[0] > 32 and used(mnt)[1] > 0
    told, = spills(mnt)
    assert told['device'] == str(store.members[1]) and str(store.members[1]) in told['text']
    last = f'f{len(files) - 1}'
    for name in 'f0', 'f1':
        (mnt / 't' / name).unlink()
        del files[name]
    sync(mnt)
    put(last, 100)
    assert used(mnt)[1] == 0, 'it is on the fast device again'
    with pytest.raises(OSError) as full:
        while True:
            put(f'g{len(files)}', 200 + len(files), 4)
    assert full.value.errno == errno.ENOSPC and sum(used(mnt)) > 90
    assert len(spills(mnt)) == 1
    mnt = store.remount()
    for name, (seed, mib) in files.items():
        assert (mnt / 't' / name).read_bytes() == content(seed, mib), name


def test_paths_all_takes_devices_of_each_class(make):
    store, params = make([256], [256]), 6
    mnt = store.mount()
    refused(errno.EINVAL, word, mnt, 'paths', 'all')
    assert 'this is no model root' in word(mnt, 'error')
    root = train(mnt, params, 2, paths='all')
    refused(errno.EINVAL, word, root, 'paths', 'slow')
    before = used(mnt)
    assert min(before) > 4 and not spills(mnt), before
    (mnt / 'file').write_bytes(content(1, 8))
    sync(mnt)
    assert used(mnt)[1] == before[1], 'others are on fast devices'
    found = state(root)
    mnt = store.remount()
    root = mnt / 'm'
    assert word(root, 'paths') == 'all' and state(root) == found
    for i in range(params):
        put_gradient(root, f'p{i}', np.ones(ELEMENTS, 'f4'))
    sync(root)
    assert used(mnt)[1] > 4, 'the mount knows it'
    word(root, 'paths', 'fast')
    for i in range(params):
        put_gradient(root, f'p{i}', np.ones(ELEMENTS, 'f4'))
    sync(root)
    assert used(mnt)[1] == 0, 'a step rewrites all, and so it is on the fast device'


def test_a_silent_capacity_device_costs_only_models_with_content_on_it(make_pair):  # noqa: F811
    """A write that it has taken stalls its model. A step that would read from it fails by name, and abort takes it back."""
    needs('mkfs.ext4')
    store = make_pair(hosts=True, size=128 * MIB)
    fast, slow = store.loops
    run('mkfs.hitrain', '--force', fast, f'--capacity={slow}')
    options = 'capacity_timeout=1', 'commit=0'
    mnt = store.mount_on(store.loops, *options)
    roots = {}
    for name in 'plain', 'wide', 'other':
        roots[name] = root = new_model(mnt / name, 'sgd lr=1 momentum=0.5')
        word(root, 'paths', 'fast' if name == 'plain' else 'all')
        for i in range(4):
            (root / f'p{i}').write_bytes(np.ones(ELEMENTS // 4, 'f4').tobytes())
        for i in range(4):
            put_gradient(root, f'p{i}', np.ones(ELEMENTS // 4, 'f4'))
        sync(root)
    found = {name: state(root) for name, root in roots.items()}
    assert used(mnt)[1] >= 2, used(mnt)
    store.unmount()
    mnt = store.mount_on(store.loops, *options)     # nothing is in memory
    done = []

    def step(name):
        for i in range(4):
            put_gradient(roots[name], f'p{i}', np.ones(ELEMENTS // 4, 'f4'))
        sync(roots[name])
        done.append(name)

    with silent(store, store.hosts[1:]):
        stalled = threading.Thread(target=step, args=('other',), daemon=True)
        stalled.start()
        wait_for(lambda: devices(mnt)[1]['health'] == 'not-answering', 'it is silent')
        step('plain')
        (mnt / 'file').write_bytes(b'x' * MIB)
        sync(mnt / 'file')
        assert done == ['plain']
        with pytest.raises(OSError):
            step('wide')
        assert 'abort returns to the last commit' in word(roots['wide'], 'error')
        assert command(roots['wide'], 'abort') == ['ok']
        assert done == ['plain']
        assert devices(mnt)[1]['health'] == 'not-answering'
    stalled.join(SECONDS_MAX)
    wait_for(lambda: devices(mnt)[1]['health'] == 'ok', 'it answers')
    assert done == ['plain', 'other']
    assert state(roots['wide']) == found['wide'] and state(roots['plain']) != found['plain']
    step('wide')
    assert state(roots['wide']) == state(roots['plain']) == state(roots['other'])
    store.unmount()


@contextlib.contextmanager
def served(folder, mib, *words):
    """A file that nbdkit serves through nbdfuse: its path, and the process of nbdkit."""
    if not shutil.which('nbdkit') or not shutil.which('nbdfuse'):
        pytest.skip('nbdkit and nbdfuse (Debian: libnbd-bin) are needed')
    point, backing = folder / 'nbd', folder / 'backing'
    point.mkdir()
    with open(backing, 'wb') as f:
        f.truncate(mib * MIB)
    filters = ['--filter=error', '--filter=rate', '--filter=delay']
    server = subprocess.Popen(['nbdfuse', point / 'device', '--command', 'nbdkit', '-s', *filters, 'file', f'file={backing}', *words],
                              stdin=subprocess.DEVNULL)
    try:
        wait_for(lambda: server.poll() is not None or (point / 'device').exists(), 'nbdfuse')
        if server.poll() is not None:
            pytest.skip('nbdfuse cannot mount here')
        with open(f'/proc/{server.pid}/task/{server.pid}/children') as f:
            yield point / 'device', int(f.read().split()[0])
    finally:
        subprocess.run(['umount', point], check=True)
        server.wait(SECONDS_MAX)


@pytest.fixture
def network(make):
    """network(fast, mib, *words): a ClassStore with a device of class capacity from served(), and its process."""
    with contextlib.ExitStack() as until:
        def make_one(fast, mib, *words):
            store = make([fast])
            device, pid = until.enter_context(served(store.folder, mib, *words))
            run('mkfs.hitrain', f'--add={device}', '--capacity', *store.members)
            store.members.append(device)
            store.ends_clean = False                        # its device goes
            until.callback(lambda: store.daemon and store.unmount(check=True))
            return store, pid

        yield make_one


def step(root, seed):
    for i, name in enumerate(sorted(p.name for p in root.iterdir() if p.name.startswith('p'))):
        put_gradient(root, name, np.random.default_rng(seed + i).standard_normal(ELEMENTS, 'f4'))
    sync(root)


def test_a_slow_network_device_holds_what_fast_ones_cannot(make, network):
    two, _ = network(24, 200, 'rate=800M', 'rdelay=5ms', 'wdelay=10ms')
    assert state(train(make([200]).mount(), 4, 2)) == state(train(two.mount(), 4, 2))
    assert used(two.point)[1] > 16 and len(spills(two.point)) == 1


def test_a_network_device_that_fails_costs_a_step_that_abort_takes_back(make, network, tmp_path):
    """Reads and writes fail, by name. What has no content there goes on. All is right when it works again."""
    broken = tmp_path / 'broken'
    two, _ = network(96, 128, 'error=EIO', 'error-rate=100%', f'error-file={broken}')
    alone = train(make([200]).mount(), 4, 2)
    beside = train(two.mount(), 4, 2, paths='all')
    assert used(two.point)[1] > 4
    mnt = two.remount()                                     # nothing is in memory
    found = state(beside)
    mnt = two.remount()
    broken.touch()
    with pytest.raises(OSError):
        step(beside, 50)
    assert 'abort returns to the last commit' in word(beside, 'error')
    assert command(beside, 'abort') == ['ok']
    (mnt / 'file').write_bytes(content(1, 4))
    sync(mnt / 'file')
    assert any(str(two.members[1]) in e['text'] for e in events(mnt)), events(mnt)
    broken.unlink()
    assert state(beside) == found == state(alone)
    for root in alone, beside:
        step(root, 50)
    assert state(alone) == state(beside)


def test_paths_all_beside_a_device_that_slows_tenfold_and_then_is_silent(make, network, tmp_path):
    """Steps go on, slower, to the same bits. Silence stalls or fails the step, and nothing of another model."""
    rate = tmp_path / 'rate'
    rate.write_text('1600M')
    two, pid = network(96, 128, f'rate-file={rate}')
    alone = train(make([200]).mount(), 4, 2)
    mnt = two.mount('capacity_timeout=1', 'commit=0')
    beside = train(mnt, 4, 2, paths='all')
    rate.write_text('160M')
    for root in alone, beside:
        step(root, 50)
    assert state(alone) == state(beside) and used(mnt)[1] > 0
    plain = new_model(mnt / 'plain', 'sgd lr=1')
    (plain / 'p0').write_bytes(bytes(4 * ELEMENTS))
    sync(plain)
    ended = []

    def silent_step():
        try:
            step(beside, 60)
            ended.append('done')
        except OSError:
            ended.append('failed')

    mnt = two.remount('capacity_timeout=1', 'commit=0')
    os.kill(pid, signal.SIGSTOP)
    try:
        waits = threading.Thread(target=silent_step)
        waits.start()
        wait_for(lambda: devices(mnt)[1]['health'] == 'not-answering', 'it is silent')
        step(plain, 1)
        assert devices(mnt)[1]['health'] == 'not-answering'
    finally:
        os.kill(pid, signal.SIGCONT)
    waits.join(SECONDS_MAX)
    wait_for(lambda: devices(mnt)[1]['health'] == 'ok', 'it answers')
    if ended == ['failed']:
        assert command(beside, 'abort') == ['ok']
        step(beside, 60)
    step(alone, 60)
    assert state(alone) == state(beside)


def test_a_silent_loop_device_of_others_holds_up_no_store(tmp_path):
    """Programs ask each loop device whether it shows the same file, and the kernel asks the file system of that device's file."""
    with served(tmp_path, 32) as (device, pid):
        with a_loop(device):
            os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(1.5)         # what the kernel knows about the file is out of date
                run('mkfs.hitrain', '--size=32M', tmp_path / 'image', timeout=60)
            finally:
                os.kill(pid, signal.SIGCONT)


def test_a_file_system_without_direct_io_is_named_with_the_way_out(make, tmp_path):
    store = make([32])
    subprocess.run(['mount', '-t', 'ramfs', 'ramfs', tmp_path], check=True)
    try:
        path = tmp_path / 'file'
        shutil.copyfile(store.image, path)
        for program, *args in (['mkfs.hitrain', path], ['mkfs.hitrain', f'--add={path}', store.image],
                               ['hitrain', path, store.point]):
            done = run(program, *args, check=False)
            assert done.returncode == 1
            assert f'{path}: its file system, ramfs, refuses O_DIRECT' in done.stderr and 'use a vault' in done.stderr
    finally:
        subprocess.run(['umount', tmp_path], check=True)


def test_a_device_is_added_to_a_store_that_is_not_mounted(make):
    store = make([48])
    mnt = store.mount()
    (mnt / 'a').write_bytes(content(1, 8))
    sync(mnt)
    first, more, third = store.members[0], store.make('more', 64), store.make('third', 16)
    done = run('mkfs.hitrain', '--no-wait', f'--add={more}', '--capacity', first, check=False)
    assert done.returncode == 1 and 'hitrain' in done.stderr and str(first) in done.stderr, done.stderr
    store.unmount()
    assert more.read_bytes() == bytes(64 * MIB), 'nothing was written'
    run('mkfs.hitrain', f'--add={more}', '--capacity', first)
    store.members.append(more)
    mnt = store.mount()
    assert (mnt / 'a').read_bytes() == content(1, 8)
    assert [d['class'] for d in devices(mnt)] == ['fast', 'capacity']
    for i in range(5):
        (mnt / f'b{i}').write_bytes(content(2 + i, 8))
    sync(mnt)
    assert spills(mnt) and used(mnt)[1] > 0
    store.unmount(check=True)
    run('mkfs.hitrain', f'--add={third}', more, first)
    store.members.append(third)
    mnt = store.mount()
    assert [d['class'] for d in devices(mnt)] == ['fast', 'capacity', 'fast']
    assert [(mnt / f'b{i}').read_bytes() for i in range(5)] == [content(2 + i, 8) for i in range(5)]


def test_what_cannot_be_added_is_refused_and_nothing_is_written(make):
    store, other = make([32], [32]), make([32])
    tiny, held, link, hard = store.make('tiny', 4), store.make('held', 32), store.folder / 'link', store.folder / 'hard'
    link.symlink_to(store.members[1])
    os.link(store.members[1], hard)
    with open(held, 'r+b') as f:
        f.write(b'precious')
    first, second = store.members
    paths = [first, second, other.image, tiny, held]
    before = [path.read_bytes() for path in paths]
    for args, why in (((other.image, first, second), '--force overwrites it'),
                      ((second, first, second), 'the same device'),
                      ((link, first, second), 'the same device'),
                      ((hard, '--force', first, second), 'the same device'),
                      ((second, first), 'is missing'),
                      ((held, first), 'is missing'),
                      ((held, first, second), 'contains data'),
                      ((tiny, first, second), 'is too small'),
                      ((tiny, first, other.image), 'another store'),
                      ((tiny, first, first), 'the same device'),
                      ((tiny, held), 'no whole member'),
                      ((store.folder / 'none', first, second), 'does not exist'),
                      ((store.folder / 'none', '--label=x', first, second), 'label')):
        done = run('mkfs.hitrain', '--no-wait', f'--add={args[0]}', *args[1:], check=False)
        assert done.returncode == 1 and why in done.stderr, (args, done.stderr)
    assert [path.read_bytes() for path in paths] == before
    done = run('mkfs.hitrain', f'--capacity={tiny}', check=False)
    assert done.returncode == 1 and 'no device is fast' in done.stderr


def test_a_store_has_no_more_than_16_devices(make):
    store = make([8] * 14, [8])
    names = [store.make(f'more{i}', 8) for i in range(2)]
    run('mkfs.hitrain', f'--add={names[0]}', *store.members)
    store.members.append(names[0])
    done = run('mkfs.hitrain', f'--add={names[1]}', *store.members, check=False)
    assert done.returncode == 1 and 'at most 16 devices' in done.stderr
    assert not any(names[1].read_bytes())
