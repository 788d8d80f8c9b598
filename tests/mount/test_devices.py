# SPDX-License-Identifier: Apache-2.0
"""Stores of two devices: both named, one missing, returned, failing, silent."""
import contextlib
import errno
import fcntl
import json
import os
import pathlib
import signal
import struct
import subprocess
import threading

import pytest

from calls import refused, sync
from conftest import MIB, SECONDS_MAX, SMALL, Store, end_stores, needs, run, wait_for
from test_errors import events, wait_event

SIZE = 96 * MIB
EXT4_IOC_SHUTDOWN = 0x8004587d


def pattern(size, seed):
    return b''.join(b'%08x%08x' % (seed, i) for i in range(size // 16))


def devices(mnt):
    return json.loads(run('hitrainctl', 'device', '--json', mnt).stdout)['devices']


class PairStore(Store):
    """A store on two loop devices, with their files on file systems of their own if the test wants that."""

    def __init__(self, folder, hosts=False, size=SIZE):
        self.folder, self.point, self.log = folder, folder / 'mnt', folder / 'log'
        self.daemon, self.size = None, size
        self.loops, self.hosts, self.disks = [], [], []
        self.point.mkdir()
        for name in 'a', 'b':
            self.make_device(name, hosts)
        self.image = self.loops[0]
        run('mkfs.hitrain', *self.loops)

    def losetup(self, backing, *options):
        done = subprocess.run(['losetup', '--find', '--show', *options, backing], stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            self.end()
            pytest.skip('no loop devices')
        return pathlib.Path(done.stdout.strip())

    def make_device(self, name, hosted):
        backing = self.folder / name
        if hosted:  # an ext4 that can be frozen
            host = self.folder / f'host-{name}'
            host.mkdir()
            with open(self.folder / f'disk-{name}', 'wb') as f:
                f.truncate(self.size + 32 * MIB)
            subprocess.run(['mkfs.ext4', '-q', '-F', '-O', '^has_journal', f.name], check=True)
            subprocess.run(['mount', '-o', 'loop', f.name, host], check=True)
            self.hosts.append(host)
            self.disks.append(f.name)
            backing = host / 'backing'
        with open(backing, 'wb') as f:
            os.posix_fallocate(f.fileno(), 0, self.size)
        self.loops.append(self.losetup(backing, '--direct-io=on'))

    def kill_device(self, i):
        """Every request to it fails: its host is shut down, as ext4 is after an error."""
        fd = os.open(self.hosts[i], os.O_RDONLY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack('I', 2))
        finally:
            os.close(fd)

    def replace_device(self, i):
        """The device comes back with the content it had when it died. No process holds it."""
        host = self.hosts[i]
        subprocess.run(['losetup', '-d', self.loops[i]], check=True, timeout=SECONDS_MAX)
        wait_for(lambda: subprocess.run(['umount', host], stderr=subprocess.DEVNULL).returncode == 0, 'umount')
        subprocess.run(['mount', '-o', 'loop', self.disks[i], host], check=True)
        self.loops[i] = self.losetup(host / 'backing', '--direct-io=on')

    def mount_on(self, loops, *options):
        mounts = self.mounts_told()
        self.image = loops[0]
        self.start(*SMALL, *(f'device={p}' for p in loops[1:]), *options)
        wait_for(lambda: self.daemon.poll() is not None or self.mounts_told() > mounts, 'mount')
        assert self.daemon.poll() is None, self.messages()
        return self.point

    def refused(self, loops, *options):
        done = run('hitrain', '-f', *loops, self.point, *(['-o', ','.join(options)] if options else []), check=False)
        assert done.returncode == 1
        return done.stderr

    def fsck(self):
        return run('hitrain-fsck', '-n', *self.loops, check=False)

    def end(self):
        for loop in self.loops:
            subprocess.run(['losetup', '-d', loop], check=True, timeout=SECONDS_MAX)
        for host in self.hosts:
            wait_for(lambda: subprocess.run(['umount', host], stderr=subprocess.DEVNULL).returncode == 0, 'umount')


@pytest.fixture
def make_pair(request, tmp_path_factory):
    made = []

    def make(**kw):
        made.append(PairStore(tmp_path_factory.mktemp('pair'), **kw))
        return made[-1]

    yield make
    end_stores(request, made)


def write_tensors(mnt, count=3, seed=0):
    with contextlib.suppress(FileExistsError):
        (mnt / 't').mkdir()
    os.setxattr(mnt / 't', 'user.hitrain.dtype', b'u8')  # chunks of 1 MiB
    content = {f't/{i}': pattern(4 * MIB, seed + i) for i in range(count)}
    for name, data in content.items():
        (mnt / name).write_bytes(data)
    sync(mnt)
    return content


def lost_chunks(mnt, name, data):
    """The unreadable chunks; readable ones are right."""
    lost = []
    with open(mnt / name, 'rb', buffering=0) as f:
        for at in range(0, len(data), MIB):
            try:
                assert os.pread(f.fileno(), MIB, at) == data[at:at + MIB]
            except OSError as e:
                assert e.errno == errno.EIO
                lost.append(at)
    return lost


def test_two_devices_share_the_content_in_any_order(make_pair):
    store = make_pair()
    mnt = store.mount_on(store.loops)
    content = write_tensors(mnt)
    found = devices(mnt)
    assert [d['path'] for d in found] == [str(p) for p in store.loops]
    assert [(d['health'], d['log']) for d in found] == [('ok', 'written')] * 2
    used = [d['data_bytes'] - d['free_bytes'] for d in found]
    assert min(used) >= MIB and sum(used) >= 12 * MIB  # the slower device gets less
    assert os.statvfs(mnt).f_blocks * 4096 > 1.8 * (SIZE - 8 * MIB)
    metrics = (mnt / '.hitrain/stats').read_text()
    assert f'hitrain_device_info{{device="1",class="fast",path="{store.loops[1]}"}} 1\n' in metrics
    assert 'hitrain_device_health{device="0",hitrain_device_health="ok"} 1\n' in metrics
    assert [json.loads(line) for line in (mnt / '.hitrain/devices').read_text().splitlines()] == devices(mnt)
    text = run('hitrainctl', 'device', mnt / 't').stdout.splitlines()
    assert len(text) == 11 and all(str(p) in line and ' ok ' in line for p, line in zip(store.loops, text[1:]))
    store.unmount()
    assert store.fsck().returncode == 0
    mount = ['mount', '-t', 'hitrain', store.loops[1], store.point, '-o', f'device={store.loops[0]},dram=32M,staging=24M']
    if subprocess.run(['which', 'mount.hitrain'], stdout=subprocess.DEVNULL).returncode == 0:
        subprocess.run(mount, check=True, timeout=SECONDS_MAX)
        for name, data in content.items():
            assert (store.point / name).read_bytes() == data
        subprocess.run(['umount', store.point], check=True, timeout=SECONDS_MAX)
    mnt = store.mount_on(store.loops[::-1])
    for name, data in content.items():
        assert (mnt / name).read_bytes() == data


@pytest.mark.parametrize('gone', [0, 1])
def test_without_a_member_the_rest_works_and_it_comes_back(make_pair, gone):
    store = make_pair()
    there = [store.loops[1 - gone]]
    mnt = store.mount_on(store.loops)
    content = write_tensors(mnt)
    store.unmount()
    text = store.refused(there)
    assert f'device {gone} of 2 of the store is missing' in text and 'degraded' in text, text
    mnt = store.mount_on(there, 'degraded')
    wait_event(mnt, 'degraded')
    assert len(events(mnt, code='degraded')) == 1
    found = devices(mnt)
    assert (found[gone]['health'], found[gone]['log'], found[gone]['path']) == ('missing', 'lost', '')
    assert found[1 - gone]['health'] == 'ok'
    lost = {name: lost_chunks(mnt, name, data) for name, data in content.items()}
    assert 0 < sum(map(len, lost.values())) < 12  # the slower device has less
    # written anew in place, and as files of their own
    name = max(lost, key=lambda n: len(lost[n]))
    with open(mnt / name, 'r+b') as f:
        content[name] = pattern(4 * MIB, 99)
        f.write(content[name])
        f.flush()
        os.fsync(f.fileno())
    assert lost_chunks(mnt, name, content[name]) == []
    (mnt / 'new').write_bytes(pattern(MIB, 7))
    (mnt / 't/1').rename(mnt / 't/renamed')
    content['t/renamed'] = content.pop('t/1')
    if name == 't/1':
        name = 't/renamed'
    sync(mnt)
    store.kill()
    mnt = store.mount_on(store.loops)
    wait_event(mnt, 'log-repaired')
    for path, data in content.items():
        assert (mnt / path).read_bytes() == data, path
    assert (mnt / 'new').read_bytes() == pattern(MIB, 7)
    assert [(d['health'], d['log']) for d in devices(mnt)] == [('ok', 'written')] * 2
    store.unmount()


def test_members_that_changed_apart_are_refused(make_pair):
    store = make_pair()
    write_tensors(store.mount_on(store.loops))
    store.unmount()
    for loop in store.loops:
        (store.mount_on([loop], 'degraded') / 'own').write_text(str(loop))
        store.unmount()
    text = store.refused(store.loops, 'degraded')
    assert all(str(p) in text for p in store.loops) and 'diverged' in text, text
    assert (store.mount_on([store.loops[1]], 'degraded') / 'own').read_text() == str(store.loops[1])
    store.ends_clean = False


def test_a_device_that_fails_in_mid_run_costs_nothing_written_after_it(make_pair):
    store = make_pair()
    mnt = store.mount_on(store.loops)
    write_tensors(mnt, 1)
    # its file ends early now: requests beyond the end fail
    backing = store.folder / 'b'
    os.truncate(backing, 12 * MIB)
    subprocess.run(['losetup', '-c', store.loops[1]], check=True)
    content = write_tensors(mnt, 6, seed=10)
    for name, data in content.items():
        assert os.getxattr(mnt / name, 'user.hitrain.error') == b''
        assert lost_chunks(mnt, name, data) == []
    bad = devices(mnt)[1]
    assert bad['health'] in ('errors', 'failing') and bad['write_errors'] > 0
    wait_event(mnt, 'write-error')
    assert all(e['device'] == str(store.loops[1]) for e in events(mnt, code='write-error'))
    store.kill()
    os.truncate(backing, SIZE)
    subprocess.run(['losetup', '-c', store.loops[1]], check=True)
    mnt = store.mount_on(store.loops)
    for name, data in content.items():
        assert (mnt / name).read_bytes() == data


def test_a_device_that_dies_in_mid_run_takes_only_what_was_on_it(make_pair):
    needs('mkfs.ext4')
    store = make_pair(hosts=True)
    mnt = store.mount_on(store.loops, 'commit=0')
    write_tensors(mnt, 2)
    flushed = {'t/x': pattern(16 * MIB, 30), 't/y': pattern(4 * MIB, 31)}  # of many chunks each device has some
    for name, data in flushed.items():
        (mnt / name).write_bytes(data)
    run('hitrainctl', 'evict', mnt / 't/x')  # on its devices, but neither flushed nor in the log, nor in memory
    store.kill_device(1)
    sync(mnt / 't/y')
    refused(errno.EIO, sync, mnt / 't/x')
    assert os.getxattr(mnt / 't/x', 'user.hitrain.error')
    after = write_tensors(mnt, 3, seed=60)
    for name, data in {**after, 't/y': flushed['t/y']}.items():
        assert (mnt / name).read_bytes() == data
        assert os.getxattr(mnt / name, 'user.hitrain.error') == b''
    wait_event(mnt, 'member-left')
    dead = devices(mnt)[1]
    assert dead['health'] == 'failing' and dead['log'] == 'lost'
    assert not events(mnt, code='read-only')
    store.kill()
    mnt = store.mount_on(store.loops[:1], 'degraded')
    for name, data in {**after, 't/y': flushed['t/y']}.items():
        assert (mnt / name).read_bytes() == data
    store.unmount()
    store.replace_device(1)
    mnt = store.mount_on(store.loops)
    for name, data in {**after, 't/y': flushed['t/y']}.items():
        assert (mnt / name).read_bytes() == data
    assert [(d['health'], d['log']) for d in devices(mnt)] == [('ok', 'written')] * 2


def test_a_device_that_does_not_answer_hangs_nobody_who_does_not_need_it(make_pair):
    needs('fsfreeze', 'mkfs.ext4')
    store = make_pair(hosts=True)
    mnt = store.mount_on(store.loops, 'device_timeout=1', 'commit=0')
    content = write_tensors(mnt, 2)
    result = []

    def told(code):
        """On a busy machine the other device may be late, too, and each was perhaps late before."""
        return [e for e in events(mnt, code=code) if e['device'] == str(store.loops[1]) and e['seq'] > before]

    def sync_new():
        with open(mnt / 't/new', 'wb') as f:
            f.write(pattern(4 * MIB, 50))
            f.flush()
            os.fsync(f.fileno())
            result.append(True)

    wait_for(lambda: devices(mnt)[1]['health'] == 'ok', 'it answers')
    before = max((e['seq'] for e in events(mnt)), default=0)
    subprocess.run(['fsfreeze', '-f', store.hosts[1]], check=True)
    thread = threading.Thread(target=sync_new)
    try:
        thread.start()
        wait_for(lambda: devices(mnt)[1]['health'] == 'not-answering', 'it is noticed')
        wait_for(lambda: told('device-not-answering'), 'it is told')
        assert len(told('device-not-answering')) == 1 and not result
        assert devices(mnt)[0]['health'] in ('ok', 'not-answering')
        (mnt / 'other').write_bytes(b'not waited for')  # names and memory are as ever
        assert (mnt / 'other').read_bytes() == b'not waited for' and len(os.listdir(mnt / 't')) == 3
        assert not result, 'nothing is durable while the log of a device does not answer'
    finally:
        subprocess.run(['fsfreeze', '-u', store.hosts[1]], check=True)
    thread.join(SECONDS_MAX)
    assert result
    wait_for(lambda: told('device-answers'), 'it answers again')
    store.kill()
    mnt = store.mount_on(store.loops)
    for name, data in {**content, 't/new': pattern(4 * MIB, 50)}.items():
        assert (mnt / name).read_bytes() == data


@pytest.mark.parametrize('begin, end', [('umount', 'answer'), ('SIGTERM', 'signal')])
def test_an_end_that_waits_for_a_device_says_so_and_can_be_cut_short(make_pair, begin, end):
    needs('fsfreeze', 'mkfs.ext4')
    store = make_pair(hosts=True)
    mnt = store.mount_on(store.loops, 'device_timeout=1', 'commit=0')
    content = write_tensors(mnt, 2)
    (mnt / 't/late').write_bytes(pattern(4 * MIB, 70))  # in memory
    daemon = store.daemon
    subprocess.run(['fsfreeze', '-f', store.hosts[1]], check=True)
    try:
        if begin == 'umount':
            subprocess.run(['umount', mnt], check=True, timeout=SECONDS_MAX)
        else:
            daemon.send_signal(signal.SIGTERM)
        told = f'{store.loops[1]} has not answered a request for '
        wait_for(lambda: told in store.messages(), 'it is told')
        assert f'another SIGTERM to process {daemon.pid} ends it' in store.messages()
        assert daemon.poll() is None
        if end == 'signal':
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(SECONDS_MAX) == 1
            assert 'the next mount has everything that was synced' in store.messages() and not store.is_mounted()
            store.daemon = None
    finally:
        subprocess.run(['fsfreeze', '-u', store.hosts[1]], check=True)
    if end == 'answer':
        assert daemon.wait(SECONDS_MAX) == 0, store.messages()
        store.daemon = None
        content['t/late'] = pattern(4 * MIB, 70)
    mnt = store.mount_on(store.loops)
    for name, data in content.items():
        assert (mnt / name).read_bytes() == data
    store.unmount()
