# SPDX-License-Identifier: Apache-2.0
"""HT_IOCTL_BACKGROUND: an archiver reads a kept step behind a trainer, whose content stays in memory."""
import errno
import fcntl
import json
import os
import subprocess
import threading

import pytest

from calls import fails, sync
from conftest import BIN, MIB, run, wait_for
from test_digests import make_model
from test_roots import command, word
from slow import loop_device, slow_group
import engines  # noqa: F401 (finds the modules of vaults)

from kept import Kept
from reading import AHEAD, Buffers, Read, in_order
import tree

BACKGROUND = ord('h') << 8 | 7


def moved(point, io_class):
    """Bytes that requests of this class have moved on the device."""
    return sum(json.loads(line)[f'{io_class}_moved_bytes'] for line in (point / '.hitrain/devices').read_text().splitlines())


def in_flight(point, io_class):
    return sum(json.loads(line)[f'{io_class}_bytes'] for line in (point / '.hitrain/devices').read_text().splitlines())


def behind(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    fcntl.ioctl(fd, BACKGROUND)
    return fd


@pytest.fixture
def model(make_store):
    """Its kept step is on the device alone, and a file that a program uses is in memory."""
    point = make_store('512M').mount('dram=16M', 'digest=off')
    root = make_model(point / 'model', elements=2 * MIB)
    command(root, 'snapshot')
    (point / 'hot').write_bytes(os.urandom(4 * MIB))
    sync(point / 'hot')
    run('hitrainctl', 'evict', root / 'w', root / 'deep/v')
    assert int(word(point / 'hot', 'resident_bytes')) == 4 * MIB
    return root


@pytest.mark.parametrize('way', ['vault', 'pipe', 'digest'])
def test_an_archive_evicts_nothing_and_is_not_urgent(model, way, tmp_path):
    point = model.parent
    run('hitrainctl', 'vault', 'init', tmp_path / 'v')
    before = {c: moved(point, c) for c in ('background', 'urgent')}
    evictions = int(word(point, 'evictions'))
    words = {'vault': ('archive', model, '1', f'{tmp_path / "v"}/job'), 'pipe': ('archive', model, '1', '-'), 'digest': ('verify', model, '1')}[way]
    subprocess.run([BIN / 'hitrainctl', *words], stdout=subprocess.DEVNULL, check=True)
    assert int(word(point / 'hot', 'resident_bytes')) == 4 * MIB and int(word(point, 'evictions')) == evictions
    assert moved(point, 'background') - before['background'] > 40 * MIB
    assert moved(point, 'urgent') - before['urgent'] < 4 * MIB


def test_each_block_is_read_once(model, tmp_path):
    run('hitrainctl', 'vault', 'init', tmp_path / 'v')
    before = int(word(model.parent, 'device_read_bytes'))
    said = json.loads(run('hitrainctl', 'archive', model, '1', f'{tmp_path / "v"}/job', '--json').stdout)
    assert int(word(model.parent, 'device_read_bytes')) - before < said['bytes'] * 1.05 + MIB


def test_the_bytes_are_those_of_other_reads(model):
    kept = model / '.hitrain/snap/1'
    for path in kept / 'w', kept / 'rng', kept / '.hitrain/state/w/exp_avg':
        expected = path.read_bytes()
        fd = behind(path)
        for at, count in ((0, MIB), (4096, 8192), (5, 70_001), (len(expected) - 3, 100), (len(expected), 10)):
            assert os.pread(fd, count, at) == expected[at:at + count], (path, at)
        os.close(fd)


def test_reads_that_take_too_long_wait_no_more(model, monkeypatch):
    """Also in the middle of a file: a device without pauses must not make segments old before their manifest."""
    point, asked = model.parent, []
    monkeypatch.setattr(tree.time, 'monotonic', lambda: asked.append(1) or float(len(asked)))
    before = {c: moved(point, c) for c in ('background', 'urgent', 'planned')}
    items = tree.Tree(Kept(model, '1').folder, behind_s=12).items()
    blocks = [item.index for item in in_order(items, Buffers(AHEAD + 2)) if type(item) is Read and item.give() is None]
    assert len(blocks) > 40
    behind, urgent, ahead = (moved(point, c) - before[c] for c in before)
    assert 9 * MIB < behind < 14 * MIB and urgent + ahead > 25 * MIB


def test_it_is_for_files_of_a_kept_step(model):
    for path in model / 'w', model / '.hitrain/state/w/exp_avg', model / '.hitrain/stats', model / '.hitrain/snap/1', model:
        fd = os.open(path, os.O_RDONLY)
        with fails(errno.EINVAL):
            fcntl.ioctl(fd, BACKGROUND)
        os.close(fd)


def test_reads_through_the_page_cache_are_not_in_the_background(model):
    """Readahead would hold the kernel's requests while it waits."""
    kept, before = model / '.hitrain/snap/1', moved(model.parent, 'background')
    with open(kept / 'w', 'rb', buffering=0) as f:
        fcntl.ioctl(f, BACKGROUND)
        assert len(f.read(4 * MIB)) == 4 * MIB
        assert moved(model.parent, 'background') == before
    with open(kept / 'deep/v', 'rb', buffering=0) as f:
        fcntl.ioctl(f, BACKGROUND)
        fcntl.fcntl(f, fcntl.F_SETFL, os.O_DIRECT)
        assert len(os.pread(f.fileno(), MIB, 0)) == MIB
        assert moved(model.parent, 'background') >= before + MIB


@pytest.mark.parametrize('name', ['w', '.hitrain/state/w/exp_avg'])
def test_the_kernels_requests_are_not_all_behind(make_store, tmp_path, name):
    """A device that hardly reads, and many readers: those that are too many are urgent, and hold their requests no longer than others."""
    store = make_store('512M')
    image = store.image
    with loop_device(image) as store.image, slow_group(store.image, ('read',)) as (group, limit):
        point = store.mount('dram=16M', 'digest=off')
        root = make_model(point / 'model', elements=2 * MIB)
        command(root, 'snapshot')
        run('hitrainctl', 'evict', root / 'w', root / 'deep/v')
        with open(f'{group}/cgroup.procs', 'w') as f:
            f.write(str(store.daemon.pid))
        limit(64 << 10)
        fd = behind(root / '.hitrain/snap/1' / name)
        threads = [threading.Thread(target=os.pread, args=(fd, MIB, i % 8 * MIB)) for i in range(160)]
        for t in threads[:100]:
            t.start()
        wait_for(lambda: in_flight(point, 'background'), 'reads are behind')
        assert in_flight(point, 'urgent') < MIB
        for t in threads[100:]:
            t.start()
        try:
            wait_for(lambda: in_flight(point, 'urgent') >= 3 * MIB, 'reads are urgent')    # more than a commit has
        finally:
            limit(0)
        for t in threads:
            t.join()
        os.close(fd)
        store.unmount()
    store.image = image


def test_many_readers_behind_hold_no_other_request(make_store):
    """They are jobs: a mount of one worker serves others meanwhile."""
    point = make_store('512M').mount('dram=16M', 'digest=off', flags=('-s',))
    root = make_model(point / 'model', elements=2 * MIB)
    command(root, 'snapshot')
    run('hitrainctl', 'evict', root / 'w', root / 'deep/v')
    kept, ended = root / '.hitrain/snap/1', []

    def read():
        fd = behind(kept / 'w')
        ended.append(sum(len(os.pread(fd, MIB, at * MIB)) for at in range(8)))
        os.close(fd)
    threads = [threading.Thread(target=read) for _ in range(12)]
    for t in threads:
        t.start()
    for i in range(50):
        (point / 'other').write_bytes(b'%d' % i)
        assert (point / 'other').read_bytes() == b'%d' % i
    for t in threads:
        t.join()
    assert ended == [8 * MIB] * 12
