# SPDX-License-Identifier: Apache-2.0
"""Errors are loud: an error that no program looked at is in the word error, in the events and in the counters.

The failures are real ones: bytes changed on the image, a device that ends too early, a device that cannot take writes
(a loop device whose file lies on a full file system), a store that is full.
"""
import contextlib
import ctypes
import errno
import json
import mmap
import os
import pathlib
import re
import socket
import stat
import struct
import subprocess
import threading
import time

import pytest

from calls import refused, sync
from conftest import BIN, MIB, ROOT, SECONDS_MAX, Store, end_stores, run, wait_for
from models import new_model, word

NOBODY = 65534
BLOCK = 4096


# --------------------------------------------------------------------- helpers

def events(mnt, *options, code=None):
    lines = run('hitrainctl', 'events', '--json', *options, mnt).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    return [e for e in found if code is None or e['code'] == code]


def wait_event(mnt, code, **fields):
    """The first event of the code with these fields; the daemon names events a moment after they happened."""
    def find():
        return [e for e in events(mnt, code=code) if all(e.get(k) == v for k, v in fields.items())]
    wait_for(find, f'event {code} {fields}')
    return find()[0]


def counted(mnt, code):
    """The counter, which is the same everywhere."""
    name = 'events_' + code.replace('-', '_')
    count = int(word(mnt, name))
    assert f'{name}={count}\n' in word(mnt, 'stats')
    assert re.search(rf'^hitrain_events_total{{code="{code}",level="\w+"}} {count}$',
                     (mnt / '.hitrain/stats').read_text(), re.M)
    assert json.loads(run('hitrainctl', 'stats', '--json', mnt).stdout)['stats'][name] == count
    return count


def pattern(size, seed):
    return b''.join(b'%08x%08x' % (seed, i) for i in range(size // 16))


def write_direct(path, size, ignore=True):
    """Writes aligned blocks of 1 MiB as DeepSpeed does, and may ignore errors."""
    buf = mmap.mmap(-1, MIB)
    buf[:] = pattern(MIB, 7)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        for off in range(0, size, MIB):
            with contextlib.suppress(OSError) if ignore else contextlib.nullcontext():
                os.pwrite(fd, buf, off)
    finally:
        os.close(fd)
        buf.close()


def fill(path):
    """Until its file system is full."""
    with open(path, 'wb', buffering=0) as f, contextlib.suppress(OSError):
        for size in MIB, BLOCK:
            with contextlib.suppress(OSError):
                while True:
                    f.write(bytes(size))


class LoopStore(Store):
    """A store on a loop device, whose file lies on a small file system of its own."""

    def __init__(self, folder, size, host_bytes):
        self.folder, self.point, self.log = folder, folder / 'mnt', folder / 'log'
        self.host = folder / 'host'
        self.daemon = self.image = None
        self.point.mkdir()
        self.host.mkdir()
        subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={host_bytes}', 'tmpfs', self.host], check=True)
        self.backing = self.host / 'backing'
        self.backing.touch()
        os.truncate(self.backing, size)
        made = subprocess.run(['losetup', '--find', '--show', self.backing], stdout=subprocess.PIPE, text=True)
        if made.returncode != 0:
            self.end()
            pytest.skip('no loop devices')
        self.image = pathlib.Path(made.stdout.strip())
        done = run('mkfs.hitrain', self.image)
        # both copies of the log are there; only content can find no room
        self.logs = [int(n) * MIB for n in re.findall(r'device 0 at (\d+) MiB', done.stdout)]
        assert len(self.logs) == 2, done.stdout

    def end(self):
        if self.image:
            subprocess.run(['losetup', '-d', self.image], check=True, timeout=SECONDS_MAX)
        subprocess.run(['umount', self.host], check=True, timeout=SECONDS_MAX)


@pytest.fixture
def loop_store(request, tmp_path_factory):
    made = LoopStore(tmp_path_factory.mktemp('loop'), 64 * MIB, 48 * MIB)
    yield made
    end_stores(request, [made])


# -------------------------------------------------------------- failing devices

def test_changed_bytes_are_an_error_of_that_read_alone(make_store):
    store = make_store('64M')
    mnt = store.mount()
    content = {name: pattern(3 * MIB, seed) for name, seed in (('a', 1), ('b', 2))}
    (mnt / 'dir').mkdir()
    for name, data in content.items():
        os.setxattr(mnt / 'dir', 'user.hitrain.dtype', b'u8')  # chunks of 1 MiB
        (mnt / 'dir' / name).write_bytes(data)
    store.unmount()
    at = store.image.read_bytes().index(content['a'][MIB:MIB + BLOCK])
    with open(store.image, 'r+b') as f:
        f.seek(at + 5000)
        f.write(b'\xff\xff')
    mnt = store.mount()
    fd = os.open(mnt / 'dir/a', os.O_RDONLY | os.O_DIRECT)
    buf = mmap.mmap(-1, MIB)
    for chunk, good in ((0, True), (1, False), (2, True), (1, False)):
        if good:
            assert os.preadv(fd, [buf], chunk * MIB) == MIB and buf[:] == content['a'][chunk * MIB:(chunk + 1) * MIB]
        else:
            refused(errno.EIO, os.preadv, fd, [buf], chunk * MIB)
    os.close(fd)
    assert (mnt / 'dir/b').read_bytes() == content['b']
    e = wait_event(mnt, 'checksum')
    assert e['path'] == 'dir/a' and e['device'] == str(store.image) and e['offset'] == at and e['error'] == 'EIO'
    assert e['id'] == (mnt / 'dir/a').stat().st_ino and e['level'] == 'error'
    assert counted(mnt, 'checksum') == 2 and word(mnt, 'checksum_errors') == '2' and word(mnt, 'read_errors') == '0'
    # the replacement is good again
    with open(mnt / 'dir/a', 'r+b') as f:
        f.seek(MIB)
        f.write(content['a'][MIB:2 * MIB])
        os.fsync(f.fileno())
    assert (mnt / 'dir/a').read_bytes() == content['a']


def test_a_device_that_fails_reads_is_named(loop_store):
    data = pattern(8 * MIB, 3)
    (loop_store.mount() / 'a').write_bytes(data)
    mnt = loop_store.remount('ro')
    whole = loop_store.backing.read_bytes()
    at = whole.index(data[:BLOCK])
    os.truncate(loop_store.backing, at)
    subprocess.run(['blockdev', '--flushbufs', loop_store.image], check=True)
    refused(errno.EIO, (mnt / 'a').read_bytes)
    e = wait_event(mnt, 'read-error', path='a')
    assert e['device'] == str(loop_store.image) and e['offset'] >= at and e['error'] == 'EIO'
    assert counted(mnt, 'read-error') >= 1 and int(word(mnt, 'read_errors')) >= 1 and counted(mnt, 'checksum') == 0
    with open(loop_store.backing, 'r+b') as f:
        f.truncate(len(whole))
        for piece in range(at, len(whole), BLOCK):
            if any(whole[piece:piece + BLOCK]):  # the host has no room for zeros
                f.seek(piece)
                f.write(whole[piece:piece + BLOCK])
    assert (mnt / 'a').read_bytes() == data


def zero(path, at, size):
    with open(path, 'r+b') as f:
        f.seek(at)
        f.write(bytes(size))


def test_what_has_a_second_copy_is_read_from_it_and_written_anew(make_store):
    store = make_store('64M')
    done = run('mkfs.hitrain', '--force', store.image)
    size = int(re.search(r'log +2 x (\d+) MiB', done.stdout)[1]) * MIB
    logs = [(int(at) * MIB, size) for at in re.findall(r'device 0 at (\d+) MiB', done.stdout)]
    supers = [0, 16 * BLOCK, 64 * MIB - BLOCK]
    mnt = store.mount()
    (mnt / 'kept').write_bytes(pattern(MIB, 9))
    sync(mnt / 'kept')
    store.unmount()
    for lost in (0, 1, 0):  # the second and third find only the writes of the one before
        zero(store.image, *logs[lost])
        for at in supers[:2] if lost else supers[1:]:
            zero(store.image, at, BLOCK)
        mnt = store.mount()
        assert (mnt / 'kept').read_bytes() == pattern(MIB, 9)
        wait_event(mnt, 'log-repaired')
        store.unmount(check=True)


def preallocate_logs(store):
    with open(store.backing, 'r+b') as f:
        for at in store.logs:
            os.posix_fallocate(f.fileno(), at, MIB)


def test_a_write_that_fails_when_its_writer_has_left(loop_store):
    preallocate_logs(loop_store)
    mnt = loop_store.mount('commit=1')
    (mnt / 'good').write_bytes(b'good')
    sync(mnt / 'good')
    data = pattern(12 * MIB, 4)
    keeper = os.open(mnt / 'a', os.O_RDWR | os.O_CREAT)
    fill(loop_store.host / 'filler')
    try:
        (mnt / 'a').write_bytes(data)  # into memory
    except OSError as e:
        assert e.errno == errno.EIO  # close() sees the error if the background commit is faster
    wait_for(lambda: word(mnt / 'a', 'error'), 'the background commit')
    assert word(mnt / 'a', 'error') == 'write: Input/output error' and word(mnt / 'good', 'error') == ''
    e = wait_event(mnt, 'write-error', path='a')
    assert e['device'] == str(loop_store.image) and e['offset'] > 0 and e['error'] in ('EIO', 'ENOSPC')
    refused(errno.EIO, lambda: os.close(os.open(mnt / 'a', os.O_WRONLY)))  # of any descriptor that may write
    refused(errno.EIO, os.fsync, keeper)
    assert (mnt / 'a').read_bytes() == data and (mnt / 'good').read_bytes() == b'good'
    wait_event(mnt, 'commit-failed')
    # the device takes writes again: nothing was lost, and the word stays until a client clears it
    (loop_store.host / 'filler').unlink()
    with contextlib.suppress(OSError):
        os.fsync(keeper)
    os.fsync(keeper)
    os.close(keeper)
    # the background commit tries no more, so that these counters stand still
    assert counted(mnt, 'write-error') >= 12 and int(word(mnt, 'write_errors')) == counted(mnt, 'write-error')
    assert len(events(mnt, code='write-error')) < counted(mnt, 'write-error'), 'repetition is counted, not listed'
    assert word(mnt / 'a', 'error') == 'write: Input/output error'
    os.setxattr(mnt / 'a', 'user.hitrain.error', b'')
    assert word(mnt / 'a', 'error') == ''
    wait_event(mnt, 'error-cleared', path='a')
    loop_store.kill()
    assert (loop_store.mount() / 'a').read_bytes() == data


def test_a_step_whose_writes_fail_is_refused_and_told(loop_store):
    preallocate_logs(loop_store)
    mnt = loop_store.mount()
    root = new_model(mnt / 'model', 'adamw lr=0.5')
    (root / 'w').write_bytes(pattern(2 * MIB, 5))
    sync(root)
    before = (root / 'w').read_bytes()
    fill(loop_store.host / 'filler')
    with contextlib.suppress(OSError):
        (root / '.hitrain/grad/w').write_bytes(bytes(2 * MIB))
    refused(errno.EIO, sync, root)
    wait_event(mnt, 'commit-failed', path='model')
    assert 'write-error' in {e['code'] for e in events(mnt)} and 'commit failed' in word(root, 'error')
    (loop_store.host / 'filler').unlink()
    (root / '.hitrain/ctl').write_bytes(b'abort\n')
    wait_event(mnt, 'step-aborted', path='model')
    assert (root / 'w').read_bytes() == before


def test_a_log_that_cannot_be_written_makes_the_store_read_only_and_says_so(loop_store):
    mnt = loop_store.mount()
    (mnt / 'kept').write_bytes(b'kept')
    sync(mnt / 'kept')
    with open(loop_store.backing, 'r+b') as f:  # mkfs may have written zeros: give the rest of the log back
        for at in loop_store.logs:
            subprocess.run(['fallocate', '--punch-hole', '--offset', str(at + MIB // 4), '--length', str(MIB // 4),
                            loop_store.backing], check=True)
        os.fsync(f.fileno())
    fill(loop_store.host / 'filler')
    with pytest.raises(OSError):
        for i in range(3000):
            (mnt / f'{i}').touch()
            sync(mnt / f'{i}')
    wait_event(mnt, 'log-copy-lost')
    wait_event(mnt, 'read-only')
    refused(errno.EROFS, (mnt / 'new').touch)
    assert counted(mnt, 'read-only') == 1 and (mnt / 'kept').read_bytes() == b'kept'
    loop_store.kill()
    (loop_store.host / 'filler').unlink()
    assert (loop_store.mount() / 'kept').read_bytes() == b'kept'


# ------------------------------------------------------------------ full stores

@pytest.fixture
def full(make_store):
    """A store without room; its file 'big' has the room."""
    store = make_store('32M')
    mnt = store.mount()
    (mnt / 'old').write_bytes(b'old' * 1000)
    sync(mnt / 'old')
    write_direct(mnt / 'big', 64 * MIB)
    with open(mnt / 'rest', 'wb', buffering=0) as f, contextlib.suppress(OSError):
        while True:     # a direct write that fits in part takes nothing
            f.write(bytes(65536))
    return store


def test_a_direct_write_that_nobody_looks_at(full):
    mnt = full.point
    e = wait_event(mnt, 'no-space', path='big')
    assert e['error'] == 'ENOSPC' and 'write of 1048576 bytes at ' in e['text']
    assert 'No space left on device' in word(mnt / 'big', 'error') and word(mnt / 'old', 'error') == ''
    refused(errno.EINVAL, os.setxattr, mnt / 'big', 'user.hitrain.nonsense', b'')
    assert 'No space left on device' in word(mnt / 'big', 'error'), 'a lesser problem does not hide it'
    assert counted(mnt, 'no-space') >= 64 - 32
    assert len(events(mnt, code='no-space')) < 10
    sync(mnt / 'big')  # accepted bytes are whole
    os.setxattr(mnt / 'big', 'user.hitrain.error', b'')
    assert word(mnt / 'big', 'error') == ''


def test_a_full_store_refuses_new_files_aloud_and_serves_old_ones(full):
    mnt = full.point
    before = counted(mnt, 'no-space')
    refused(errno.ENOSPC, (mnt / 'new').write_bytes, b'x')
    assert counted(mnt, 'no-space') > before
    with open(mnt / 'old', 'r+b') as f:
        assert f.read() == b'old' * 1000
        f.truncate(3)
    assert (mnt / 'old').read_bytes() == b'old'
    (mnt / 'big').unlink()
    sync(mnt)

    def made():
        with contextlib.suppress(OSError):
            return (mnt / 'new').write_bytes(b'x')
    wait_for(made, 'room')


def test_what_goes_wrong_with_many_files_does_not_bury_the_log(make_store):
    """Each is in the log of events; lines for them are few, and say how many were left out."""
    store = make_store()
    mnt = store.mount()
    for i in range(120):
        (mnt / f'{i}').touch()
        refused(errno.EINVAL, os.setxattr, mnt / f'{i}', 'user.hitrain.nonsense', b'')
        time.sleep(0.02)    # so that they are not all of one moment
    wait_for(lambda: sum(e['count'] for e in events(mnt, code='refused')) == 120, 'all events')
    entries = len(events(mnt, code='refused'))
    store.unmount()
    lines = [line for line in store.messages().splitlines() if '[refused] ' in line]
    left_out = [re.search(r'\] (\d+) lines were left out$', line) for line in lines]
    written = [line for line in lines if 'left out' not in line]
    assert 20 <= len(written) < entries and len(written) + sum(int(m[1]) for m in left_out if m) == entries
    assert any('hitrainctl events has all' in line for line in lines)


def test_mapped_pages_that_find_no_space_are_told_to_fsync_and_close(make_store):
    mnt = make_store('32M').mount()
    with open(mnt / 'm', 'w+b') as f:
        f.truncate(48 * MIB)
        other = os.open(mnt / 'm', os.O_RDWR)
        with mmap.mmap(f.fileno(), 48 * MIB) as m:
            for at in range(0, 48 * MIB, BLOCK):
                m[at] = 1
            with contextlib.suppress(OSError):
                m.flush()
        wait_event(mnt, 'no-space', path='m')
        assert 'No space left on device' in word(mnt / 'm', 'error')
        errors = []
        for call in (os.close, os.fsync):
            try:
                call(os.dup(other) if call is os.close else other)
            except OSError as e:
                errors.append(e.errno)
        assert errors and set(errors) == {errno.ENOSPC}, errors
        assert 'No space left on device' in word(mnt / 'm', 'error'), 'until somebody clears it'
        with contextlib.suppress(OSError):
            os.close(other)
        f.truncate(0)
        with contextlib.suppress(OSError):
            f.close()
    os.setxattr(mnt / 'm', 'user.hitrain.error', b'')


# ------------------------------------------------------------------- refusals

def test_a_refused_gradient_is_in_error_and_in_the_events(mnt):
    root = new_model(mnt / 'model', 'adamw lr=0.5')
    (root / 'w').write_bytes(bytes(4096))
    fd = os.open(root / '.hitrain/grad/w', os.O_WRONLY)
    os.write(fd, b'odd')
    refused(errno.EINVAL, os.close, fd)
    e = wait_event(mnt, 'gradient-refused')
    assert e['path'] == 'model/w' and 'element' in e['text'] and counted(mnt, 'gradient-refused') == 1
    sync(root)
    assert 'element' in word(root, 'error'), 'a commit does not clear it'
    os.setxattr(root, 'user.hitrain.error', b'')
    assert word(root, 'error') == ''
    wait_event(mnt, 'error-cleared', path='model')


def test_a_flood_adds_few_entries_and_loses_no_count(mnt):
    (mnt / 'd').mkdir()
    for i in range(300):
        (mnt / 'd' / str(i)).touch()
    for flood in range(1, 21):  # until this machine lets it be one
        before, began = len(events(mnt)), time.monotonic()
        for turn in range(3):
            for i in range(300):
                with contextlib.suppress(OSError):
                    os.setxattr(mnt / 'd' / str(i), 'user.hitrain.nonsense', b'')
        seconds = time.monotonic() - began
        assert counted(mnt, 'refused') == 900 * flood
        wait_for(lambda: sum(e['count'] for e in events(mnt, code='refused')) == 900 * flood, 'all counts')
        new = events(mnt)[before:]
        assert len(new) < 200 * (1 + int(seconds)), seconds
        if seconds < 1:
            assert any(e.get('various') for e in new) and '300' not in {e.get('path') for e in new}
            break


# --------------------------------------------------------------- reading events

def test_events_are_for_root_and_the_owner(mnt):
    path = mnt / '.hitrain/events'
    assert path.stat().st_mode & 0o777 == 0o400
    mnt.chmod(0o755)
    assert json.loads(path.read_text())['code'] == 'mounted'
    for args in (['cat', path], [BIN / 'hitrainctl', 'events', mnt]):
        done = subprocess.run(args, user=NOBODY, group=NOBODY, extra_groups=[], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1 and not done.stdout and done.stderr
    os.chown(mnt, NOBODY, NOBODY)
    done = subprocess.run(['cat', path], user=NOBODY, group=NOBODY, extra_groups=[], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)['code'] == 'mounted'
    with open(path, 'wb', buffering=0) as f:
        refused(errno.EBADF, f.write, b'x')
    (mnt / 'sub').mkdir()
    refused(errno.ENOENT, os.stat, mnt / 'sub/.hitrain/events')


def test_events_for_people_for_programs_and_from_a_number_on(mnt):
    for name in ('a', 'b'):
        (mnt / name).touch()
        refused(errno.EINVAL, os.setxattr, mnt / name, 'user.hitrain.nonsense', b'')
    wait_event(mnt, 'refused', path='b')
    found = events(mnt)
    assert [e['code'] for e in found] == ['mounted', 'refused', 'refused'] and [e['seq'] for e in found] == [1, 2, 3]
    assert abs(found[2]['time_ns'] / 1e9 - time.time()) < 60
    assert [e['seq'] for e in events(mnt, '--since=2')] == [3] and events(mnt / 'a', '--since=3') == []
    assert [e['seq'] for e in events(mnt, '--level=warn')] == [2, 3] and events(mnt, '--level=error') == []
    lines = run('hitrainctl', 'events', mnt).stdout.splitlines()
    assert len(lines) == 3 and '\033' not in lines[1]
    assert re.fullmatch(r' +2  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}  warn   refused +/a: unknown attribute .*', lines[1])
    with open(mnt / '.hitrain/events') as f:  # a stream: later events follow
        assert [json.loads(line) for line in f.read().splitlines()] == found
        os.setxattr(mnt, 'user.hitrain.error', b'')
        os.setxattr(mnt / 'a', 'user.hitrain.error', b'')
        wait_event(mnt, 'error-cleared', path='a')
        assert json.loads(f.read().splitlines()[-1])['code'] == 'error-cleared'


def test_the_manual_names_every_code(mnt):
    manual = (ROOT / 'mount-helpers/man/hitrainctl.8').read_text().replace('\\-', '-')
    codes = re.findall(r'^hitrain_events_total{code="([a-z-]+)"', (mnt / '.hitrain/stats').read_text(), re.M)
    assert len(codes) > 20 and codes == re.findall(r'^\.BR ([a-z-]+) " \((?:error|warn|info)\)"$', manual, re.M)


def test_names_cannot_forge_events_and_come_back_as_they_are(mnt):
    name = b'x"}\n{"seq": 9, "code": "checksum"}\t\\\x1b[31m\xff\xc3\xbc\xed\xa0\x80'
    with open(os.fsencode(mnt) + b'/' + name, 'w') as f:
        refused(errno.EINVAL, os.setxattr, f.fileno(), 'user.hitrain.nonsense', b'')
    e = wait_event(mnt, 'refused')
    assert os.fsencode(e['path']) == name and len(events(mnt)) == 2
    assert [json.loads(line) for line in (mnt / '.hitrain/events').read_text().splitlines()] == events(mnt)
    assert '\x1b' not in run('hitrainctl', 'events', mnt).stdout


@contextlib.contextmanager
def foreign_mount(point, events, source='x'):
    """A file system of another user with our type's name and a file .hitrain/events; a thread serves it."""
    point.mkdir()
    fd = os.open('/dev/fuse', os.O_RDWR)
    options = f'fd={fd},rootmode=40000,user_id={NOBODY},group_id={NOBODY},allow_other'.encode()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(os.fsencode(source), os.fsencode(point), b'fuse.hitrain', 0, options) == 0, os.strerror(ctypes.get_errno())

    def attr(node):
        mode = stat.S_IFREG | 0o444 if node == 3 else stat.S_IFDIR | 0o755
        return struct.pack('<6Q10I', node, len(events), 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def answer(opcode, node, body):
        if opcode == 26:  # INIT
            return struct.pack('<4I2H2I2HI7I', 7, 31, 0, 0, 1, 1, 4096, 1, 0, 0, 0, *[0] * 7)
        if opcode == 1:  # LOOKUP
            child = {b'.hitrain': 2, b'events': 3}.get(body.rstrip(b'\0'))
            return child and struct.pack('<4Q2I', child, 0, 0, 0, 0, 0) + attr(child)
        if opcode == 3:  # GETATTR
            return struct.pack('<Q2I', 0, 0, 0) + attr(node)
        if opcode in (14, 27):  # OPEN, OPENDIR; direct
            return struct.pack('<Q2I', 0, 1, 0)
        if opcode == 15:  # READ; from an event's number on
            return b'' if struct.unpack_from('<Q', body, 8)[0] else events
        return None

    def serve():
        while True:
            try:
                request = os.read(fd, 1 << 17)
            except OSError as e:
                if e.errno == errno.ENODEV:
                    return
                continue
            _, opcode, unique, node = struct.unpack_from('<2I2Q', request)
            if opcode in (2, 42):  # FORGET wants no answer
                continue
            body = answer(opcode, node, request[40:])
            error = 0 if body is not None else -(errno.ENOENT if opcode == 1 else errno.ENOSYS)
            with contextlib.suppress(OSError):
                os.write(fd, struct.pack('<IiQ', 16 + len(body or b''), error, unique) + (body or b''))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield point
    finally:
        subprocess.run(['umount', '-l', point], check=True)
        thread.join(SECONDS_MAX)
        os.close(fd)


def test_a_foreign_mount_does_not_steer_the_terminal(tmp_path):
    """It has our type's name, and its events hold control characters."""
    evil = '\x1b[31mX\x07'
    event = {'seq': 1, 'time_ns': 1, 'level': 'warn', 'count': 2}
    event |= {key: evil for key in ('code', 'path', 'text', 'error', 'various', evil)}
    with foreign_mount(tmp_path / 'mnt', json.dumps(event).encode() + b'\n') as point:
        for options in (), ('--json',):
            done = run('hitrainctl', 'events', *options, point)
            assert 'X' in done.stdout and done.stdout.count('\n') == 1, done.stdout
            assert not re.search('[\0-\x09\x0b-\x1f\x7f]', done.stdout + done.stderr), done.stdout


@pytest.mark.parametrize('line', [b'seq=1\tcode=mounted', b'{"seq": 1, "code": "\x1b[31m"}', b'{"code": "mounted"}', b'[]'])
def test_events_of_another_version_are_refused(tmp_path, line):
    with foreign_mount(tmp_path / 'mnt', line + b'\n') as point:
        done = run('hitrainctl', 'events', point, check=False)
    assert done.returncode == 1 and not done.stdout, done.stdout
    assert 'its daemon is of another version' in done.stderr and '\x1b' not in done.stderr, done.stderr


def test_a_daemon_that_does_not_report_its_options_is_not_remounted(tmp_path):
    """As one of an older version. Which options it has is not guessed."""
    source = tmp_path / 'image'
    source.touch()
    with foreign_mount(tmp_path / 'mnt', b'', source) as point:
        done = run('hitrain', '-o', 'remount,noatime', source, point, check=False)
        assert done.returncode and 'its daemon is of another version' in done.stderr, done.stderr
        assert not any(f' {point} ' in line and 'noatime' in line for line in open('/proc/self/mounts'))


def test_following_shows_new_events_and_is_not_in_the_way(store):
    mnt = store.point
    follower = subprocess.Popen([BIN / 'hitrainctl', 'events', '--follow', '--json', mnt], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)
    assert json.loads(follower.stdout.readline())['code'] == 'mounted'
    refused(errno.EINVAL, os.setxattr, mnt, 'user.hitrain.nonsense', b'')
    assert json.loads(follower.stdout.readline())['code'] == 'refused'
    began = time.monotonic()
    time.sleep(1)
    # Only while it looks, a moment in each quarter of a second, is the mount in use.
    wait_for(lambda: subprocess.run(['umount', mnt], stderr=subprocess.DEVNULL).returncode == 0, 'umount')
    assert store.daemon.wait(SECONDS_MAX) == 0
    store.daemon = None
    _, status, used = os.wait4(follower.pid, 0)
    seconds = time.monotonic() - began
    follower.returncode = os.waitstatus_to_exitcode(status)
    assert follower.returncode == 0 and 'not mounted any more' in follower.stderr.read()
    assert follower.stdout.read() == '' and used.ru_utime + used.ru_stime < 0.5 + 0.1 * seconds


def test_in_the_background_events_go_to_syslog(make_store):
    if os.path.exists('/dev/log'):
        pytest.skip('somebody else listens to syslog here')
    store = make_store('64M')
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.settimeout(SECONDS_MAX)
    heard.bind('/dev/log')
    try:
        run('hitrain', store.image, store.point, '-o', 'dram=32M,staging=24M')
        refused(errno.EINVAL, os.setxattr, store.point, 'user.hitrain.nonsense', b'')
        told, of_ours = [], None
        while not told or 'refused' not in told[-1]:  # other tests have daemons, too, and other programs have lines
            line = heard.recv(4096).decode(errors='replace')
            sender = re.search(r' (\S+:) |$', line)[1]
            of_ours = of_ours or (sender if f'{store.image} is mounted' in line else None)
            told += [line] if of_ours and sender == of_ours else []
    finally:
        heard.close()
        os.unlink('/dev/log')
        subprocess.run(['umount', store.point], timeout=SECONDS_MAX)
    daemon, warning, info = 3 << 3, 4, 6
    assert re.match(rf'<{daemon | info}>.* hitrain\[\d+\]: \[mounted\] ', told[0]), told
    assert re.match(rf'<{daemon | warning}>.* hitrain\[\d+\]: \[refused\] unknown attribute', told[-1]), told


# -------------------------------------------------------------------- hitrainctl

def test_prefetch_and_evict(mnt):
    for name in ('a', 'b with blanks'):
        (mnt / name).write_bytes(pattern(2 * MIB, 6))
    paths = [mnt / 'a', mnt / 'b with blanks']
    run('hitrainctl', 'evict', *paths)
    assert [word(p, 'resident_bytes') for p in paths] == ['0', '0'] and word(paths[0], 'stored_bytes') == str(2 * MIB)
    run('hitrainctl', 'prefetch', *paths)
    assert all(int(word(p, 'resident_bytes')) >= 2 * MIB for p in paths)
    done = run('hitrainctl', 'evict', mnt / 'none', mnt / 'a', mnt, check=False)
    assert done.returncode == 1 and 'none' in done.stderr and word(paths[0], 'resident_bytes') == '0'


@pytest.mark.parametrize('command', ['stats', 'events', 'commit', 'prefetch', 'evict', 'roots', 'step', 'abort', 'wait',
                                     'reset', 'drop', 'trim', 'snapshot', 'steps'])
def test_hitrainctl_says_what_is_wrong_with_a_path(store, tmp_path, command):
    done = run('hitrainctl', command, '--help')
    assert done.stdout.startswith(f'Usage: hitrainctl {command} ') and 'Exit status' in done.stdout
    (tmp_path / 'f').touch()
    for path, words in ((tmp_path / 'f', 'not on a hitrain mount'), (tmp_path / 'none', 'No such file')):
        done = run('hitrainctl', command, path, check=False)
        assert done.returncode == 1 and str(path) in done.stderr and words in done.stderr and not done.stdout
    store.kill()
    done = run('hitrainctl', command, store.point, check=False)
    assert done.returncode == 1 and 'the daemon of this mount is gone' in done.stderr


@pytest.mark.parametrize('args', [['events', '/', '--since=x'], ['events', '/', '--level=loud'], ['stats', '/', '--follow'],
                                  ['prefetch'], ['evict', '/', '--json'], ['events', '/', '/'], ['step', '/', '--if=x'], ['commit', '/', '--async'],
                                  ['commit', '/', '--if=-1'], ['wait', '/', '--if=1'], ['reset'],
                                  ['archive', '/'], ['archive', '/', '1', '-', '2'], ['archive', '/', '1', '-', '--rate=0'],
                                  ['archive', '/', '1', '-', '--rate=x'], ['restore', '-'], ['verify', '/'], ['restore', '-', '/', '/'],
                                  ['snapshot'], ['snapshot', '/', 'a', 'b'], ['steps', '/', 'a'], ['forget', '/'],
                                  ['rollback', '/'], ['rollback', '/', 'a', 'b'], ['clone', '/', 'a'], ['clone', '/', 'a', 'b', 'c']])
def test_hitrainctl_refuses_wrong_usage(args):
    done = run('hitrainctl', *args, check=False)
    assert done.returncode == 2 and done.stderr and not done.stdout
