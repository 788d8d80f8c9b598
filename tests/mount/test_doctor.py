# SPDX-License-Identifier: Apache-2.0
"""hitrainctl doctor on real mounts, files and devices; tests/unit/mount-helpers/look/test_doctor.c has each check."""
import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import struct
import subprocess
import time

import pytest

from conftest import BIN, SECONDS_MAX, run, wait_for

LEVELS = 'ok', 'note', 'warn', 'error'


def doctor(*args):
    done = run('hitrainctl', 'doctor', *args, '--json', check=False)
    found = json.loads(done.stdout)
    worst = max((f['level'] for f in found['findings']), key=LEVELS.index)
    assert found['level'] == worst and done.returncode == {'ok': 0, 'note': 0, 'warn': 3, 'error': 4}[worst]
    assert all('remedy' in f for f in found['findings'] if f['level'] in ('warn', 'error'))
    return {f['check']: f for f in found['findings']}


def is_fine_device(found):
    """The image lies where the tests have their files: in memory or on a network that is a finding of its own."""
    return found.get('device', {}).get('level') == 'ok' or {'memory-file', 'network'} & found.keys()


def test_a_mount_that_is_well(store):
    found = doctor(store.point)
    for check in 'space', 'log', 'events':
        assert found[check]['level'] == 'ok', found[check]
    assert is_fine_device(found)
    (store.point / 'folder').mkdir()
    assert doctor(store.point / 'folder')['space']['level'] == 'ok'
    text = run('hitrainctl', 'doctor', store.point, check=False).stdout
    assert 'available' in text and str(store.image) in text


def test_a_refusal_is_an_event_of_the_last_day(store):
    with pytest.raises(OSError):
        os.setxattr(store.point, 'user.hitrain.nonsense', b'')
    wait_for(lambda: 'refused (1)' in doctor(store.point)['events']['text'], 'the event, which the daemon names a moment later')
    assert doctor(store.point)['events']['level'] == 'warn'


def test_events_need_permission(store):
    as_user = subprocess.run([BIN / 'hitrainctl', 'doctor', store.point, '--json'], user=65534, capture_output=True, text=True)
    found = {f['check']: f for f in json.loads(as_user.stdout)['findings']}
    assert found['events']['level'] == 'note' and 'root' in found['events']['remedy']
    assert found['space']['level'] == 'ok'


def test_a_full_store(make_store):
    store = make_store('16M')
    point = store.mount()
    with pytest.raises(OSError), open(point / 'f', 'wb', buffering=0) as f:
        while True:
            f.write(bytes(1 << 20))
    assert doctor(point)['space']['level'] == 'error'
    (point / 'f').unlink()


def test_a_dead_mount_and_one_that_does_not_answer(store):
    store.daemon.send_signal(signal.SIGSTOP)
    seconds = []
    while not seconds or min(seconds) >= 2 and len(seconds) < 30: # this machine may be busy for a while
        began = time.monotonic()
        found = doctor(store.point)['mount']
        seconds.append(time.monotonic() - began)
        assert found['level'] == 'error' and 'dump' in found['remedy']
    assert min(seconds) < 2
    store.daemon.send_signal(signal.SIGCONT)
    store.kill()
    assert 'gone' in doctor(store.point)['mount']['text']


def test_files_devices_and_what_is_none(store, tmp_path):
    assert is_fine_device(doctor(store.image))
    store.image.chmod(0o606)
    assert doctor(store.image)['permissions']['level'] == 'warn'
    store.image.chmod(0o600)
    assert 'No such file' in doctor(tmp_path / 'none')['device']['text']
    assert doctor('/dev/null')['device']['level'] == 'error'
    assert 'not on a hitrain mount' in doctor(tmp_path)['mount']['text']
    assert 'space' not in doctor() and 'kernel' in doctor()
    assert 'Exit status' in run('hitrainctl', 'doctor', '--help').stdout
    for args in (['a', 'b'], ['--watch=1'], [store.point, '--since=1']):
        done = run('hitrainctl', 'doctor', *args, check=False)
        assert done.returncode == 2 and done.stderr and not done.stdout


def answer(fd, request, body, error=0):
    os.write(fd, struct.pack('<IiQ', 16 + len(body), error, struct.unpack_from('<Q', request, 8)[0]) + body)


def next_request(fd, opcode):
    """None: none of this kind came. The program has given up if this machine was busy."""
    while select.select([fd], [], [], 5)[0]:
        request = os.read(fd, 1 << 20)
        if struct.unpack_from('<I', request, 4)[0] == opcode:
            return request
    return None


GETATTR, GETXATTR = 3, 22
ROOT = struct.pack('<QII6Q', 3600, 0, 0, 1, 0, 0, 0, 0, 0) + struct.pack('<10I', 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)


def answers_first_questions(fd):
    """Those that show it to be alive. False: it was too late."""
    if not (request := next_request(fd, GETATTR)):
        return False
    answer(fd, request, ROOT)
    if not (request := next_request(fd, GETXATTR)):
        return False
    answer(fd, request, b'', -errno.ENODATA)
    return next_request(fd, GETXATTR) is not None or next_request(fd, GETATTR) is not None


@contextlib.contextmanager
def fuse_mount(point):
    """A FUSE file system that answers what the test answers."""
    fd, libc = os.open('/dev/fuse', os.O_RDWR), ctypes.CDLL(None, use_errno=True)
    options = f'fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other'.encode()
    assert libc.mount(b'none', bytes(point), b'fuse.hitrain', 0, options) == 0, os.strerror(ctypes.get_errno())
    try:
        unique = struct.unpack_from('<IIQ', os.read(fd, 1 << 20))[2]
        os.write(fd, struct.pack('<IiQ', 80, 0, unique) + struct.pack('<IIIIHHI', 7, 31, 1 << 16, 0, 12, 10, 1 << 16) + bytes(40))
        yield fd
    finally:
        libc.umount2(bytes(point), 2)
        os.close(fd)


@pytest.mark.parametrize('answers', [False, True])
def test_a_request_that_is_never_answered(tmp_path, answers):
    """
    The kernel keeps the process that asked until the mount ends: it must not keep the caller's pipe. Some mounts
    answer the first question alone.
    """
    with fuse_mount(tmp_path) as fd:
        asks = subprocess.Popen(f'{BIN}/hitrainctl doctor --json {tmp_path} | cat', shell=True, stdout=subprocess.PIPE, text=True)
        if answers:
            answers_first_questions(fd)
        said = asks.communicate(timeout=SECONDS_MAX)[0]
        assert any(f['check'] == 'mount' and 'does not answer' in f['text'] for f in json.loads(said)['findings'])


def test_a_device_on_a_file_system_that_does_not_answer(make_store, tmp_path):
    store = make_store('64M')
    disk = tmp_path / 'disk'
    disk.mkdir()
    store.image = store.image.rename(disk / 'store.img')
    point = store.mount()
    with fuse_mount(disk):
        for _ in range(30): # the mount answers late if this machine is busy
            found = doctor(point)
            if 'device' in found:
                break
        assert 'device' in found, found
        assert found['device']['text'] == f'{store.image} does not answer'
    assert is_fine_device(doctor(point))
