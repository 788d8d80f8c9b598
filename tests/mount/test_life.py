# SPDX-License-Identifier: Apache-2.0
"""The daemon's life: its start, its refusals, its end."""
import contextlib
import errno
import mmap
import os
import signal
import struct
import subprocess

import pytest

from calls import call
from conftest import BIN, MIB, SECONDS_MAX, SMALL, run, wait_for
from models import new_model


def hitrain(*args, **kw):
    return run('hitrain', *args, check=False, **kw)


def daemons_of(image):
    out = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open(f'/proc/{pid}/cmdline', 'rb') as f:
                words = f.read().split(b'\0')
        except OSError:
            continue
        if words and os.path.basename(words[0]) == b'hitrain' and str(image).encode() in words:
            out.append(int(pid))
    return out


def mount_line(point):
    with open('/proc/self/mountinfo') as f:
        return [line for line in f if line.split()[4] == str(point)][-1]


# ---------------------------------------------------------------------- starting

def test_daemon_returns_when_ready(make_store):
    store = make_store()
    done = hitrain(store.image, store.point, '-o', 'dram=16M,staging=24M')
    assert done.returncode == 0, done.stderr
    assert os.listdir(store.point) == []
    line = mount_line(store.point)
    assert ' - fuse.hitrain ' in line and str(store.image) in line
    number = line.split()[2]
    with open(f'/sys/class/bdi/{number}/read_ahead_kb') as f:
        assert int(f.read()) >= 1024
    (pid,) = daemons_of(store.image)
    assert os.readlink(f'/proc/{pid}/cwd') == '/' and os.readlink(f'/proc/{pid}/fd/2') == '/dev/null'
    if subprocess.run(['sh', '-c', 'echo -1 > /proc/self/oom_score_adj'], stderr=subprocess.DEVNULL).returncode == 0:
        with open(f'/proc/{pid}/oom_score_adj') as f:
            assert int(f.read()) < 0
    (store.point / 'f').write_bytes(b'x')
    subprocess.run(['umount', store.point], check=True, timeout=SECONDS_MAX)
    wait_for(lambda: not daemons_of(store.image), 'end of the daemon')


@pytest.mark.parametrize('options,named', [
    ('bogus', 'bogus'), ('dram=lots', 'dram'), ('dram=1k', '8'), ('staging=1M', 'staging'), ('commit=x', 'commit'),
    ('optim_threads=0', 'optim_threads'), ('numa=somewhere', 'numa'), ('dram', 'value'), ('tune=1', 'tune')])
def test_wrong_option_touches_nothing(make_store, options, named):
    store = make_store('64M')
    before = store.image.read_bytes()
    done = hitrain(store.image, store.point, '-o', options)
    assert done.returncode == 1 and named in done.stderr, done.stderr
    assert store.image.read_bytes() == before and not store.is_mounted()


def test_wrong_option_lists_what_is_allowed(make_store):
    done = hitrain('a', 'b', '-o', 'bogus')
    assert 'dram=SIZE' in done.stderr and 'noatime' in done.stderr
    for args in ((), ('a',), ('--nonsense', 'a', 'b')):
        assert hitrain(*args).returncode == 1
    assert hitrain('--help').stdout.startswith('Usage: hitrain') and '0.' in hitrain('--version').stdout


def test_places_that_are_none(make_store, tmp_path):
    store = make_store('64M')
    file = tmp_path / 'file'
    file.write_bytes(b'x' * 100_000)
    for args, named in (((store.image, tmp_path / 'missing'), 'missing'), ((store.image, file), 'not a directory'),
                        ((tmp_path / 'nothing', store.point), 'nothing'), ((tmp_path, store.point), str(tmp_path))):
        for flags in ((), ('-f',)):
            done = hitrain(*args, *flags)
            assert done.returncode == 1 and named in done.stderr, done.stderr


def test_something_that_is_no_store(tmp_path):
    point, image = tmp_path / 'mnt', tmp_path / 'image'
    point.mkdir()
    for content, named in ((os.urandom(32 * MIB), 'hitrain'), (bytes(32 * MIB), 'hitrain'), (b'short', 'image')):
        image.write_bytes(content)
        done = hitrain(image, point)
        assert done.returncode == 1 and named in done.stderr, done.stderr
        assert image.read_bytes() == content


def test_truncated_store_is_refused(make_store):
    store = make_store('64M')
    content = store.image.read_bytes()
    os.truncate(store.image, 40 * MIB)
    done = hitrain(store.image, store.point)
    assert done.returncode == 1 and str(store.image) in done.stderr, done.stderr
    assert store.image.read_bytes() == content[:40 * MIB]
    store.image.write_bytes(content)


# ------------------------------------------------------------------------ ending

@pytest.mark.parametrize('sig', [signal.SIGTERM, signal.SIGINT])
def test_signal_unmounts_with_everything_durable(store, sig):
    (store.point / 'f').write_bytes(b'x' * MIB)
    os.mkdir(store.point / 'd')
    with open(store.point / 'm', 'w+b') as f:
        f.truncate(MIB)
        m = mmap.mmap(f.fileno(), 0)
        m[7] = 42
        m.close()
    store.daemon.send_signal(sig)
    assert store.daemon.wait(SECONDS_MAX) == 0
    assert not store.is_mounted()
    store.assert_clean()
    store.mount()
    assert (store.point / 'f').read_bytes() == b'x' * MIB and (store.point / 'd').is_dir()
    assert (store.point / 'm').read_bytes()[7] == 42


def test_signal_while_in_use(store):
    (store.point / 'f').write_bytes(b'kept')
    f = open(store.point / 'f', 'r+b', buffering=0)
    m = mmap.mmap(f.fileno(), 0)
    m[0:4] = b'KEPT'
    root = new_model(store.point / 'root', 'adamw', p=bytes(4000))
    hidden = root / '.hitrain'
    held = [os.open(hidden / name, os.O_RDONLY) for name in ('stats', 'grad', 'grad/p')]
    held.append(os.open(hidden / 'ctl', os.O_WRONLY))
    store.daemon.terminate()
    assert store.daemon.wait(SECONDS_MAX) == 0
    assert not store.is_mounted()
    with pytest.raises(OSError) as e:
        os.fsync(f.fileno())
    assert e.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
    m.close()
    with pytest.raises(OSError):
        f.close()
    for fd in held:
        with contextlib.suppress(OSError):
            os.close(fd)
    store.assert_clean()
    store.mount()
    assert (store.point / 'f').read_bytes() == b'KEPT'


def test_lazy_and_forced_unmount(store):
    f = open(store.point / 'f', 'wb', buffering=0)
    f.write(b'one')
    store.detach()
    assert not store.is_mounted() and store.daemon.poll() is None
    f.write(b'two')  # open files work on
    f.close()
    assert store.daemon.wait(SECONDS_MAX) == 0
    store.mount()
    assert (store.point / 'f').read_bytes() == b'onetwo'
    f = open(store.point / 'f', 'ab', buffering=0)
    subprocess.run(['umount', '-f', store.point], stderr=subprocess.DEVNULL, timeout=SECONDS_MAX)
    wait_for(lambda: store.daemon.poll() is not None, 'end of the daemon')
    assert store.daemon.returncode == 0
    try:
        f.close()
    except OSError:
        pass
    store.detach()
    store.assert_clean()
    store.mount()
    assert (store.point / 'f').read_bytes() == b'onetwo'


def test_remount_over_a_dead_mount(store):
    (store.point / 'f').write_bytes(b'x')
    fd = os.open(store.point, os.O_RDONLY)
    os.fsync(fd)
    store.kill()
    assert store.is_mounted()
    os.close(fd)
    done = hitrain(store.image, store.point, '-o', 'dram=16M,staging=24M')
    assert done.returncode == 0 and 'detached' in done.stderr, done.stderr
    assert (store.point / 'f').read_bytes() == b'x'
    subprocess.run(['umount', store.point], check=True, timeout=SECONDS_MAX)
    wait_for(lambda: not daemons_of(store.image), 'end of the daemon')
    assert not store.is_mounted()


def read_request(fuse):
    """(opcode, unique)"""
    return struct.unpack_from('IIQ', os.read(fuse, 1 << 17))[1:]


def test_mount_over_one_that_dies_while_the_command_looks_at_it(make_store):
    """The kernel then answers ECONNABORTED, and ENOTCONN only to later questions."""
    store = make_store()
    fuse = os.open('/dev/fuse', os.O_RDWR)
    call('mount', b'test', os.fsencode(store.point), b'fuse', 0, b'fd=%d,rootmode=40000,user_id=0,group_id=0' % fuse)
    _, unique = read_request(fuse)
    agreed = struct.pack('IIIIHHIIHHI', 7, 31, 0, 0, 16, 12, 1 << 16, 1, 16, 0, 0) + bytes(28)
    os.write(fuse, struct.pack('IiQ', 16 + len(agreed), 0, unique) + agreed)
    store.start(*SMALL)
    opcode, _ = read_request(fuse)
    assert opcode == 3  # the command waits for the attributes of the mount point
    os.close(fuse)
    wait_for(lambda: store.mounts_told() or store.daemon.poll() is not None, 'mount')
    assert 'detached' in store.messages() and os.listdir(store.point) == []


def test_killed_again_and_again(store):
    """All bytes that were synced before a kill are there after all kills."""
    for i in range(6):
        for k in range(20):
            (store.point / f'{i}-{k}').write_bytes(os.urandom(10_000))
        with open(store.point / f'kept-{i}', 'wb') as f:
            f.write(bytes([i]) * 300_000)
            f.flush()
            os.fsync(f.fileno())
        store.kill()
        store.assert_clean()
        store.mount('dram=16M')
        for k in range(i + 1):
            assert (store.point / f'kept-{k}').read_bytes() == bytes([k]) * 300_000


def test_missing_fuse_device_is_told(make_store):
    """In a mount namespace of its own, whose /dev is empty."""
    store = make_store('64M')
    done = subprocess.run(['unshare', '-m', 'sh', '-c', 'mount -t tmpfs none /dev && exec "$@"', 'sh',
                           str(BIN / 'hitrain'), str(store.image), str(store.point)], stdin=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX)
    if 'unshare' in done.stderr:
        pytest.skip('mount namespaces are not allowed here')
    assert done.returncode == 1 and '/dev/fuse' in done.stderr and 'modprobe' in done.stderr
