# SPDX-License-Identifier: Apache-2.0
"""A store belongs to one program at a time: others are refused with its name, or wait until it ends."""
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from conftest import BIN, MIB, SECONDS_MAX, SMALL, needs, run, wait_for
from slow import loop_device, slow_group
from test_life import daemons_of

WAIT_S = 25  # less than the 30 s for which a program waits for one that ends


@pytest.fixture(params=['file', 'block device'])
def held(request, make_store):
    """A store that is not mounted yet; store.image is the file, or a loop device on it."""
    store = make_store('64M')
    if request.param == 'file':
        yield store
        return
    image = store.image
    with loop_device(image) as store.image:
        yield store
        store.close(False)
        store.fsck()  # waits for a daemon that still ends: the file does not show who holds the device
    store.image = image


def programs(store, other):
    return {
        'second daemon': ['hitrain', '-o', ','.join(SMALL), store.image, other],
        'second daemon in the foreground': ['hitrain', '-f', '-o', ','.join(SMALL), store.image, other],
        'reading daemon': ['hitrain', '-o', ','.join((*SMALL, 'ro')), store.image, other],
        'mkfs': ['mkfs.hitrain', '--force', store.image],
        'mkfs with a size': ['mkfs.hitrain', '--force', '--size=32M', store.image],
        'fsck': ['hitrain-fsck', store.image],
        'fsck at once': ['hitrain-fsck', '--no-wait', store.image],
    }


def unmount(point):
    subprocess.run(['umount', point], check=True, timeout=SECONDS_MAX)


@contextlib.contextmanager
def kept_open(store):
    """A daemon in the background that is unmounted already, and lives as long as this: its mount was detached lazily."""
    run('hitrain', '-o', ','.join(SMALL), store.image, store.point)
    with open(store.point / 'f', 'wb', buffering=0) as f:
        subprocess.run(['umount', '-l', store.point], check=True, timeout=SECONDS_MAX)
        yield f


def test_a_mounted_store_is_refused_to_everyone_else_by_name(held, tmp_path):
    held.mount()
    (held.point / 'f').write_bytes(b'untouched')
    for what, args in programs(held, tmp_path).items():
        if what == 'mkfs with a size' and str(held.image).startswith('/dev/'):
            continue
        begin = time.monotonic()
        done = run(*args, check=False)
        assert done.returncode not in (0, 4), what
        for word in (str(held.image), f'mounted on {held.point}', f'process {held.daemon.pid} ', 'umount'):
            assert word in done.stderr, (what, done.stderr)
        assert time.monotonic() - begin < WAIT_S, f'{what} waited for what will not end'
    assert not os.path.ismount(tmp_path)
    assert (held.point / 'f').read_bytes() == b'untouched'
    held.unmount(check=True)


@pytest.mark.parametrize('what', ['fsck', 'mkfs', 'second daemon'])
def test_who_comes_right_after_unmount_waits_for_the_daemon(held, tmp_path, what):
    with kept_open(held) as f:
        waiter = subprocess.Popen([str(BIN / programs(held, tmp_path)[what][0]),
                                   *map(str, programs(held, tmp_path)[what][1:])],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = waiter.stderr.readline()
        assert 'waiting up to 30 s' in line and 'held by process' in line and 'hitrain' in line, line
        f.write(b'still written')
        assert waiter.poll() is None
    _, err = waiter.communicate(timeout=SECONDS_MAX)
    assert waiter.returncode == 0, err
    if what == 'second daemon':
        assert (tmp_path / 'f').read_bytes() == b'still written'
        unmount(tmp_path)
    held.assert_clean()


def start_another(held, point, **kw):
    return subprocess.Popen([str(BIN / 'hitrain'), '-o', ','.join(SMALL), str(held.image), str(point)],
                            stdin=subprocess.DEVNULL, **kw)


def start_while_held(held, point, **kw):
    """A daemon that has to wait for a second, and how long it took."""
    with kept_open(held):
        begin = time.monotonic()
        waiter = start_another(held, point, **kw)
        time.sleep(1)
    assert waiter.wait(SECONDS_MAX) == 0
    unmount(point)
    return time.monotonic() - begin


def test_a_short_wait_is_told_on_a_terminal_only(held, tmp_path):
    for _ in range(20):     # until this machine lets it be short
        with open(tmp_path.parent / 'said', 'w+') as said:
            seconds = start_while_held(held, tmp_path, stderr=said)
            said.seek(0)
            text = said.read()
        if seconds < 2.5:
            assert 'waiting' not in text
            break
    ours, its = os.openpty()
    with kept_open(held):
        waiter = start_another(held, tmp_path, stderr=its)
        os.close(its)
        text = ''
        while 'waiting up to 30 s' not in text:
            text += os.read(ours, 65536).decode()   # an error at the end
    assert waiter.wait(SECONDS_MAX) == 0
    os.close(ours)
    unmount(tmp_path)


def test_fsck_directly_after_unmount_again_and_again(held):
    for i in range(6):
        run('hitrain', '-o', ','.join(SMALL), held.image, held.point)
        (held.point / f'f{i}').write_bytes(os.urandom(2 * MIB))
        unmount(held.point)
        held.assert_clean()
    run('hitrain', '-o', ','.join(SMALL), held.image, held.point)
    assert sorted(os.listdir(held.point)) == [f'f{i}' for i in range(6)]
    unmount(held.point)


def test_no_wait_is_refused_at_once_and_names_the_holder(held, tmp_path):
    with kept_open(held):
        for program in ('hitrain-fsck', 'mkfs.hitrain'):
            begin = time.monotonic()
            done = run(program, '--no-wait', held.image, check=False)
            assert done.returncode in (1, 8) and time.monotonic() - begin < WAIT_S
            assert 'held by process' in done.stderr and str(held.image) in done.stderr, done.stderr


def test_a_foreign_holder_of_a_file_is_named(make_store):
    store = make_store('64M')
    with open(store.image, 'rb') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        done = run('hitrain-fsck', '--no-wait', store.image, check=False)
        assert done.returncode == 8 and f'held by process {os.getpid()} ' in done.stderr
        fcntl.flock(f, fcntl.LOCK_SH)
        assert run('hitrain-fsck', '--no-wait', store.image).returncode == 0, 'readers share a file'


@contextlib.contextmanager
def opener(path):
    """A process that has it open, for nothing, and is older than every holder."""
    with open(path, 'rb') as f:
        process = subprocess.Popen(['sleep', '300'], stdin=f)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_who_merely_has_a_device_open_is_in_nobodys_way(make_store, tmp_path):
    """Neither of a remount nor of messages, which name the holder; alone it is named with doubt."""
    store = make_store('64M')
    image = store.image
    with loop_device(image) as store.image, opener(store.image) as process:
        store.mount()
        done = run('hitrain', '-o', 'remount,ro', store.image, store.point)
        assert done.stderr == '' and os.statvfs(store.point).f_flag & os.ST_RDONLY
        done = run('hitrain-fsck', store.image, check=False)
        assert done.returncode == 8 and f'held by process {store.daemon.pid} (' in done.stderr, done.stderr
        assert f'process {process.pid} ' not in done.stderr
        store.unmount()
        with os.fdopen(os.open(store.image, os.O_RDONLY | os.O_EXCL)):
            with opener(store.image):
                done = run('hitrain-fsck', '--no-wait', store.image, check=False)
        assert done.returncode == 8 and 'held by' not in done.stderr and 'perhaps by process' in done.stderr, done.stderr
        store.assert_clean()
    store.image = image


def test_other_daemons_of_a_file_are_not_asked_at_a_remount(make_store, tmp_path):
    """Readers share a file: each mount has a daemon and options of its own."""
    store = make_store('64M')
    with contextlib.ExitStack() as stack:
        for name, commit in ('a', 5), ('b', 6), ('c', 7):
            (tmp_path / name).mkdir()
            run('hitrain', '-o', ','.join((*SMALL, 'ro', f'commit={commit}')), store.image, tmp_path / name)
            stack.callback(unmount, tmp_path / name)
        for name, commit in ('a', 5), ('b', 6), ('c', 7):
            run('hitrain', '-o', f'remount,ro,noatime,commit={commit}', store.image, tmp_path / name)
            done = run('hitrain', '-o', f'remount,ro,commit={commit + 1}', store.image, tmp_path / name, check=False)
            assert done.returncode and "option 'commit' cannot change" in done.stderr, done.stderr


def test_a_device_that_the_kernel_has_mounted_is_not_waited_for(make_store, tmp_path):
    needs('mkfs.ext4')
    store = make_store('64M')
    image = tmp_path / 'ext4'
    image.touch()
    os.truncate(image, 16 * MIB)
    subprocess.run(['mkfs.ext4', '-q', image], check=True, timeout=SECONDS_MAX)
    with loop_device(image) as device:
        subprocess.run(['mount', device, store.point], check=True, timeout=SECONDS_MAX)
        try:
            begin = time.monotonic()
            for program in 'hitrain-fsck', 'mkfs.hitrain':
                done = run(program, device, check=False)
                assert done.returncode and f'mounted on {store.point}' in done.stderr, done.stderr
            assert time.monotonic() - begin < WAIT_S
        finally:
            unmount(store.point)


# ---------------------------------------------------------- a user's mount that lies

NOBODY = 65534
LIAR = """
import os, sys
fd = os.open('/dev/fuse', os.O_RDWR)
import ctypes
source, kind, user, point = sys.argv[1:]
done = ctypes.CDLL(None, use_errno=True).mount(source.encode(), point.encode(), kind.encode(), 6,
    f'fd={fd},rootmode=40000,user_id={user},group_id={user},allow_other'.encode())
assert done == 0, ctypes.get_errno()
print('mounted', flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def lying_mount(source, point, user=NOBODY, kind='fuse.hitrain'):
    """The mount that fusermount would have made for this user, with fsname=source. No daemon ever answers there."""
    point.mkdir()
    process = subprocess.Popen(['/usr/bin/python3', '-c', LIAR, str(source), kind, str(user), str(point)],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == 'mounted\n'
        yield point
    finally:
        process.stdin.close()  # ends the connection, which frees every process that hangs there
        process.wait(SECONDS_MAX)
        process.stdout.close()
        subprocess.run(['umount', '-l', point], check=True, timeout=SECONDS_MAX)


@pytest.mark.parametrize('kind', ['fuse.hitrain', 'fuse.sshfs', 'fuse'])
def test_a_users_mount_cannot_pose_as_the_mount_of_a_device(held, tmp_path, kind):
    with lying_mount(held.image, tmp_path / 'before', kind=kind):
        run('mkfs.hitrain', '--force', held.image)
        held.mount()
        with lying_mount(held.image, tmp_path / 'after', kind=kind):
            for program in 'mkfs.hitrain', 'hitrain-fsck':
                done = run(program, held.image, check=False)
                assert done.returncode and f'umount {held.point}\n' in done.stderr, done.stderr
                assert str(tmp_path) not in done.stderr, done.stderr
        held.unmount()
        with kept_open(held):
            done = run('hitrain-fsck', '--no-wait', held.image, check=False)
            assert done.returncode == 8 and 'mounted on' not in done.stderr, done.stderr
    held.assert_clean()


def test_a_mount_that_answers_nobody_hangs_nobody(held, tmp_path):
    """Not even as root's: its source is compared, and opened only below /dev."""
    with lying_mount(tmp_path / 'hangs' / 'x', tmp_path / 'hangs') as point:
        with lying_mount(point / 'y', tmp_path / 'of-root', user=0):
            run('mkfs.hitrain', '--force', held.image, timeout=WAIT_S)
            held.mount()
            for program in 'mkfs.hitrain', 'hitrain-fsck':
                done = run(program, held.image, check=False, timeout=WAIT_S)
                assert done.returncode and f'mounted on {held.point} ' in done.stderr, done.stderr
            run('hitrain', '-o', 'remount,ro', held.image, held.point, timeout=WAIT_S)
            held.unmount()
    held.assert_clean()


def test_waiting_ends_when_interrupted(make_store, tmp_path):
    """In the foreground, too, and nothing is left: no process, no mount, no hold."""
    store = make_store('64M')
    with open(store.image, 'rb') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        for flags in ((), ('-f',)):
            for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                waiter = subprocess.Popen([str(BIN / 'hitrain'), *flags, str(store.image), str(tmp_path)],
                                          stderr=subprocess.PIPE, text=True)
                assert 'waiting' in waiter.stderr.readline()
                waiter.send_signal(sig)
                assert waiter.wait(SECONDS_MAX) == 128 + sig, (flags, sig)
                waiter.stderr.read()  # until the last process that has it is gone
                waiter.stderr.close()
    assert not os.path.ismount(tmp_path)
    store.assert_clean()


def test_hold_outlasts_a_dead_mount_only_as_long_as_its_writes(held, tmp_path):
    """A mount without a daemon stays in the table; it holds nothing, so that fsck, mkfs and a mount elsewhere work."""
    held.mount()
    (held.point / 'f').write_bytes(b'x')
    os.sync()
    held.kill()
    assert held.is_mounted()
    assert held.fsck().returncode == 0
    run('hitrain', '-o', ','.join(SMALL), held.image, tmp_path)
    unmount(tmp_path)
    wait_for(lambda: not daemons_of(held.image), 'end of the daemon')
    assert run('mkfs.hitrain', '--force', held.image).returncode == 0
    held.detach()


# ------------------------------------------------------- killed on a slow device

SLOW_BYTES_PER_S = 1 * MIB

WRITE_AND_SYNC = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(fd, os.urandom(10 << 20))
print('written', flush=True)
os.fsync(fd)
"""


def on_their_way(store):
    """Bytes of writes that the device has not answered yet."""
    return sum(map(int, re.findall(r'write of (\d+) bytes', run('hitrainctl', 'dump', store.point).stdout)))


def test_killed_while_its_writes_go_on(make_store, tmp_path):
    """The remount waits for writes of a process that is gone, says so, and has every synced file."""
    store = make_store('256M')
    image = store.image
    with loop_device(image) as store.image, slow_group(store.image) as (group, limit):
        store.mount()
        with open(f'{group}/cgroup.procs', 'w') as f:
            f.write(str(store.daemon.pid))
        for i in range(8):
            with open(store.point / f'kept{i}', 'wb') as f:
                f.write(bytes([i]) * MIB)
                f.flush()
                os.fsync(f.fileno())
        limit(SLOW_BYTES_PER_S)
        writers = [subprocess.Popen([sys.executable, '-c', WRITE_AND_SYNC, store.point / f'lost{i}'],
                                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for i in range(2)]
        for writer in writers:
            assert writer.stdout.readline() == b'written\n'
        wait_for(lambda: on_their_way(store) >= MIB, 'writes for a second')
        begin = time.monotonic()
        store.kill()
        gone = time.monotonic() - begin
        for writer in writers:
            writer.communicate(timeout=SECONDS_MAX)
        done = run('hitrain', '-o', ','.join(SMALL), store.image, store.point)
        waited = time.monotonic() - begin - gone
        assert waited > 0.3, 'the device was not slow enough to test anything'
        told = 'waiting up to 30 s' in done.stderr  # after some seconds
        assert told or waited < 30, done.stderr
        # Other tests look for free loop devices, and have this one open for a moment.
        assert not told or 'killed' in done.stderr or 'perhaps by process' in done.stderr, done.stderr
        assert 'detached the mount of a hitrain that is gone' in done.stderr
        for i in range(8):
            assert (store.point / f'kept{i}').read_bytes() == bytes([i]) * MIB
        unmount(store.point)
        store.assert_clean()
    store.image = image


@contextlib.contextmanager
def slow_file_system(folder, mib):
    """(folder of an ext4 file system on a device that can be made slow, its cgroup, limit)"""
    needs('mkfs.ext4')
    image, point = folder / 'ext4', folder / 'slow'
    point.mkdir()
    with open(image, 'wb') as f:
        f.truncate(mib * MIB)
    with loop_device(image) as device, slow_group(device) as (group, limit):
        subprocess.run(['mkfs.ext4', '-q', device], check=True, timeout=SECONDS_MAX)
        subprocess.run(['mount', device, point], check=True, timeout=SECONDS_MAX)
        try:
            yield point, group, limit
        finally:
            limit(0)
            wait_for(lambda: subprocess.run(['umount', point], stderr=subprocess.DEVNULL).returncode == 0,
                     'the last write to the slow file system')


def test_a_file_stays_held_while_writes_of_the_dead_go_on(make_store, tmp_path):
    """The hold of a file is as strong as that of a device: it ends with the last write, not with the process."""
    with slow_file_system(tmp_path, 200) as (folder, group, limit):
        store = make_store('64M')
        kept, store.image = store.image, folder / 'store'
        shutil.copyfile(kept, store.image)  # all blocks exist: later writes do not change the file itself
        store.mount()
        with open(f'{group}/cgroup.procs', 'w') as f:
            f.write(str(store.daemon.pid))
        (store.point / 'f').write_bytes(b'x')
        limit(SLOW_BYTES_PER_S)
        writer = subprocess.Popen([sys.executable, '-c', WRITE_AND_SYNC, store.point / 'lost'],
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert writer.stdout.readline() == b'written\n'
        wait_for(lambda: on_their_way(store) >= MIB, 'writes for a second')
        store.kill()
        writer.communicate(timeout=SECONDS_MAX)
        begin = time.monotonic()
        done = run('hitrain-fsck', '--no-wait', store.image, check=False)
        assert done.returncode == 8, 'the store is free while writes to it go on'
        assert time.monotonic() - begin < WAIT_S
        limit(0)
        store.detach()
        assert store.fsck().returncode == 0
        store.image = kept


def told_kept(store):
    lines = [line for line in store.messages().splitlines() if '[mount-kept]' in line]
    return lines[-1] if lines else ''


def test_a_mount_that_another_namespace_keeps_is_named(make_store):
    """Made while the store was mounted, it has a mount of its own, which an unmount here does not reach."""
    store = make_store('64M')
    store.mount()
    keeper = subprocess.Popen(['unshare', '--mount', '--propagation', 'private', 'sleep', '1000'])
    try:
        wait_for(lambda: os.readlink(f'/proc/{keeper.pid}/ns/mnt') != os.readlink('/proc/self/ns/mnt') and
                 os.readlink(f'/proc/{keeper.pid}/exe').endswith('sleep'), 'its namespace')
        unmount(store.point)
        wait_for(lambda: told_kept(store), 'a message')
        assert f'process {keeper.pid} (sleep 1000) has the mount in its mount namespace' in told_kept(store)
        assert str(store.point) in told_kept(store) and store.daemon.poll() is None
    finally:
        keeper.kill()
        keeper.wait()
    assert store.daemon.wait(SECONDS_MAX) == 0
    store.daemon = None


def test_a_mount_that_open_files_keep_is_named(make_store):
    store = make_store('64M')
    store.mount()
    with open(store.point / 'f', 'wb', buffering=0) as f:
        subprocess.run(['umount', '-l', store.point], check=True, timeout=SECONDS_MAX)
        wait_for(lambda: told_kept(store), 'a message')
        assert f'process {os.getpid()} (' in told_kept(store) and 'uses files of the mount' in told_kept(store)
        f.write(b'late')
    assert store.daemon.wait(SECONDS_MAX) == 0
    store.daemon = None
    store.mount()
    assert (store.point / 'f').read_bytes() == b'late'
