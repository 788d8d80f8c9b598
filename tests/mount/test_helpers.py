# SPDX-License-Identifier: Apache-2.0
"""The programs around a mount, as an operator meets them: mkfs.hitrain, mount.hitrain, hitrain-fsck, hitrainctl."""
import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

from calls import sync, write_synced
from conftest import BIN, MIB, ROOT, SECONDS_MAX, run, wait_for
from models import new_model
from slow import a_loop

# ---------------------------------------------------------------------- helpers

def call(program, *args, **kw):
    """One of the project's programs, which may fail."""
    return run(program, *args, check=False, **kw)


def make_image(path, size='64M', *args):
    done = call('mkfs.hitrain', f'--size={size}', *args, path)
    assert done.returncode == 0, done.stderr
    return path


class Daemon:
    """A store mounted by a daemon in the foreground, so that it can be killed."""

    def __init__(self, image, point, *options):
        point.mkdir(exist_ok=True)
        self.point = point
        args = [str(BIN / 'hitrain'), str(image), str(point), '-f', '-o', ','.join(('dram=32M',) + options)]
        self.process = subprocess.Popen(args, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            wait_for(lambda: self.process.poll() is not None or os.path.ismount(point), 'mount')
            assert self.process.poll() is None, self.process.stderr.read()
        except BaseException:
            self.process.kill()
            raise

    def unmount(self):
        subprocess.run(['umount', str(self.point)], check=True, timeout=SECONDS_MAX)
        assert self.process.wait(SECONDS_MAX) == 0

    def kill(self):
        """Ends the daemon as a crash would; the dead mount is removed, too."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(SECONDS_MAX)
        subprocess.run(['umount', '-l', str(self.point)], check=True, timeout=SECONDS_MAX)


@contextlib.contextmanager
def mounted(image, point, *options):
    daemon = Daemon(image, point, *options)
    try:
        yield point
    except BaseException:
        daemon.kill()
        raise
    daemon.unmount()


def random_bytes(seed, count):
    return np.random.default_rng(seed).bytes(count)


def fill(point):
    """A plain file, a tensor, and a model root with one step done: everything fsck has words for."""
    (point / 'dir').mkdir()
    write_synced(point / 'dir' / 'plain.bin', random_bytes(1, 200_000))
    tensor = point / 'tensor.bin'
    tensor.touch()
    os.setxattr(tensor, 'user.hitrain.dtype', b'f32')
    write_synced(tensor, random_bytes(2, 3 * MIB))
    train(point)


def train(point):
    values = np.linspace(-1, 1, 100_000, dtype=np.float32)
    root = new_model(point / 'model', 'adamw lr=1e-3', w=values.tobytes())
    step(root, values)


def step(root, gradient):
    (root / '.hitrain' / 'grad' / 'w').write_bytes(gradient.tobytes())
    sync(root)


def fsck_json(image, status, *args):
    done = call('hitrain-fsck', '--json', *args, image)
    assert done.returncode == status, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result['summary']['exit'] == status
    assert result['summary']['problems'] == len(result['problems'])
    return result


def extents(image):
    return fsck_json(image, 0, '--extents')['extents']


def extent_of(image, path, chunk=0, state=None):
    found = [e for e in extents(image) if e['path'] == path and e['chunk'] == chunk and e.get('state') == state]
    assert found, f'{path}: chunk {chunk}, state {state} is not in {extents(image)}'
    return found[0]


@contextlib.contextmanager
def flipped(image, offset):
    """The image with one bit at a byte offset changed, and changed back afterwards."""
    with open(image, 'r+b') as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 0x10]))
        f.flush()
        yield
        f.seek(offset)
        f.write(bytes([byte]))


@pytest.fixture
def image(tmp_path):
    return make_image(tmp_path / 'store.img', '64M', '--label=test')


@pytest.fixture(scope='module')
def used_template(tmp_path_factory):
    folder = tmp_path_factory.mktemp('used')
    path = make_image(folder / 'store.img', '64M', '--label=test')
    with mounted(path, folder / 'mnt') as point:
        fill(point)
    return path


@pytest.fixture
def used(used_template, tmp_path):
    """A store in use before, unmounted cleanly; each test has its own copy."""
    return shutil.copyfile(used_template, tmp_path / 'store.img')


# ------------------------------------------------------------------ common words

@pytest.mark.parametrize('program', ['mkfs.hitrain', 'mount.hitrain', 'umount.hitrain', 'hitrain-fsck', 'hitrainctl'])
def test_help_and_version(program):
    done = call(program, '--help')
    assert done.returncode == 0 and done.stdout.startswith(f'Usage: {program}')
    done = call(program, '--version')
    version = (ROOT / 'include/hitrain/version.h').read_text().split('HT_VERSION "')[1].split('"')[0]
    assert done.returncode == 0 and done.stdout == f'{program} (hitrain) {version}\n'


@pytest.mark.parametrize('program, args, status', [
    ('mkfs.hitrain', [], 1), ('mkfs.hitrain', ['--bogus', 'x'], 1), ('mkfs.hitrain', ['--size=lots', 'x'], 1),
    ('mkfs.hitrain', ['--size=8M', '--chunk=3M', 'x'], 1), ('mkfs.hitrain', ['--size=8M', '--chunk=100K', 'x'], 1),
    ('mkfs.hitrain', ['--size=8M', '--label=' + 33 * 'x', 'x'], 1), ('mkfs.hitrain', ['--size=8M', '--log-size=1', 'x'], 1),
    ('mount.hitrain', [], 1), ('mount.hitrain', ['only-one'], 1), ('mount.hitrain', ['a', 'b', '-Z'], 1),
    ('mount.hitrain', ['a', 'b', '-o', 'loop,ro'], 1), ('umount.hitrain', [], 1), ('umount.hitrain', ['a', 'b'], 1),
    ('hitrain-fsck', [], 16), ('hitrain-fsck', ['--bogus', 'x'], 16), ('hitrain-fsck', ['-n', '-y', 'x'], 16),
    ('hitrainctl', [], 2), ('hitrainctl', ['bogus', '/'], 2), ('hitrainctl', ['stats'], 2),
    ('hitrainctl', ['stats', '/', '/'], 2), ('hitrainctl', ['commit', '/', '--watch=1'], 2),
    ('hitrainctl', ['stats', '/', '--watch=soon'], 2),
])
def test_wrong_usage_is_told(program, args, status, tmp_path):
    done = call(program, *args, cwd=tmp_path)
    assert done.returncode == status
    assert done.stderr and not done.stdout
    assert not list(tmp_path.iterdir()), 'nothing is made'


# --------------------------------------------------------------------------- mkfs

def test_mkfs_says_what_it_made(tmp_path):
    path = tmp_path / 'store.img'
    done = call('mkfs.hitrain', '--size=64M', '--label=my store', '--log-size=2M', path)
    assert done.returncode == 0, done.stderr
    assert path.stat().st_size == 64 * MIB
    for words in [str(path), 'my store', '64 MiB', '2 x 2 MiB', '1 MiB']:
        assert words in done.stdout
    result = fsck_json(path, 0)
    assert result['label'] == 'my store' and result['uuid'] in done.stdout and result['clean']


@pytest.mark.parametrize('size,log', [(8 << 20, '512 KiB'), (64 << 20, '2 MiB'), (128 << 30, '1 GiB'), (8 << 40, '2 GiB')])
def test_the_log_has_room_for_what_fits_on_the_device(size, log, tmp_path):
    path = tmp_path / 'sparse.img'
    path.touch()
    os.truncate(path, size)
    done = call('mkfs.hitrain', path)
    assert done.returncode == 0, done.stderr
    assert f'2 x {log}:' in done.stdout
    assert path.stat().st_blocks * 512 < MIB


def test_mkfs_makes_a_store_of_two_devices(tmp_path):
    paths = [tmp_path / 'a.img', tmp_path / 'b.img']
    done = call('mkfs.hitrain', '--size=16M', *paths)
    assert done.returncode == 0, done.stderr
    done = call('hitrain-fsck', *paths)
    assert done.returncode == 0, done.stdout + done.stderr
    done = call('hitrain-fsck', paths[0])
    assert done.returncode == 8 and done.stderr


def refused(path, *words, args=()):
    before = path.read_bytes() if path.exists() else None
    done = call('mkfs.hitrain', *args, path)
    assert done.returncode == 1
    assert str(path) in done.stderr
    for word in words:
        assert word in done.stderr
    assert before == (path.read_bytes() if path.exists() else None), 'nothing is changed'


def test_mkfs_refuses_what_holds_a_file_system(tmp_path):
    path = tmp_path / 'ext4.img'
    with open(path, 'wb') as f:
        f.truncate(32 * MIB)
    subprocess.run(['mkfs.ext4', '-q', '-L', 'precious', path], check=True)
    refused(path, 'ext4', 'precious', '--force')
    done = call('mkfs.hitrain', '--force', path)
    assert done.returncode == 0 and 'ext4' in done.stdout
    assert subprocess.run(['blkid', '-p', path], stdout=subprocess.DEVNULL).returncode == 2, 'no signature is left'
    fsck_json(path, 0)


def test_mkfs_refuses_a_store(image):
    refused(image, 'hitrain store', 'test', '--force')
    refused(image, 'exists', args=['--size=16M'])
    assert call('mkfs.hitrain', '--force', '--size=16M', image).returncode == 0
    assert image.stat().st_size == 16 * MIB
    assert fsck_json(image, 0)['label'] == ''


def test_mkfs_refuses_data_that_nothing_recognises(tmp_path):
    path = tmp_path / 'notes'
    path.write_bytes(b'do not lose me\n' + bytes(16 * MIB))
    refused(path, '--force')


def test_mkfs_formats_a_file_of_zeros(tmp_path):
    path = tmp_path / 'zeros'
    path.write_bytes(bytes(16 * MIB))
    assert call('mkfs.hitrain', path).returncode == 0


def test_mkfs_refuses_what_another_program_holds(image):
    with open(image, 'rb') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        refused(image, f'held by process {os.getpid()} ', args=['--no-wait', '--force'])


@pytest.fixture
def loop(tmp_path):
    """A loop device, and the file below it, all of whose blocks are written."""
    backing = tmp_path / 'backing'
    backing.write_bytes(bytes(range(256)) * (32 * MIB // 256))
    sync(backing)
    with a_loop(backing) as device:
        yield device, backing


@pytest.mark.parametrize('args, kept', [([], 0), (['--no-discard'], 1), (['-K'], 1)])
def test_mkfs_gives_a_device_back_what_it_held(loop, args, kept):
    device, backing = loop
    before = backing.stat().st_blocks
    assert call('mkfs.hitrain', *args, device).returncode == 0
    os.sync()
    after = backing.stat().st_blocks
    assert after == before if kept else after < before // 2


def test_mkfs_keeps_the_space_of_a_file(tmp_path):
    path = tmp_path / 'image'
    assert call('mkfs.hitrain', '--size=32M', path).returncode == 0
    before = path.stat().st_blocks
    assert before * 512 >= 32 * MIB
    assert call('mkfs.hitrain', '--force', path).returncode == 0
    assert path.stat().st_blocks >= before


def test_mkfs_refuses_what_is_too_small(tmp_path):
    path = tmp_path / 'small'
    path.write_bytes(bytes(4 * MIB))
    refused(path, 'too small', '4 MiB', '8 MiB')
    path = tmp_path / 'big-log'
    refused(path, 'too small', '32 MiB', args=['--size=16M', '--log-size=8M'])


def test_mkfs_refuses_what_is_no_device(tmp_path):
    refused(tmp_path / 'missing', '--size')
    for path in [tmp_path, pathlib.Path('/dev/null')]:
        done = call('mkfs.hitrain', path)
        assert done.returncode == 1 and 'neither a block device nor a regular file, nor an NVMe namespace' in done.stderr


def test_mkfs_refuses_the_same_device_twice(tmp_path):
    path = tmp_path / 'zeros'
    path.write_bytes(bytes(16 * MIB))
    os.link(path, tmp_path / 'link')
    done = call('mkfs.hitrain', path, tmp_path / 'link')
    assert done.returncode == 1 and 'same device' in done.stderr


# -------------------------------------------------------------------------- mount

FSTAB_OPTIONS = 'rw,noauto,nofail,user,_netdev,noatime,nosuid,nodev,x-systemd.automount,comment=tensors,dram=32M'


def test_mount_helper_passes_on_what_the_daemon_understands(image, tmp_path):
    done = call('mount.hitrain', image, tmp_path, '-f', '-v', '-s', '-n', '-t', 'hitrain', '-o', FSTAB_OPTIONS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f'{BIN}/hitrain {image} {tmp_path} -o rw,noatime,nosuid,nodev,dram=32M\n'
    assert not os.path.ismount(tmp_path)


def test_mount_helper_mounts(image, tmp_path):
    point = tmp_path / 'mnt'
    point.mkdir()
    done = call('mount.hitrain', image, point, '-o', FSTAB_OPTIONS)
    assert done.returncode == 0, done.stderr
    try:
        assert os.path.ismount(point)
        (point / 'x').write_bytes(b'hello')
        assert (point / 'x').read_bytes() == b'hello'
    finally:
        subprocess.run(['umount', str(point)], check=True)
    fsck_json(image, 0)


def test_mount_helper_hands_on_failure(image, tmp_path):
    done = call('mount.hitrain', image, tmp_path, '-o', 'dram=lots')
    assert done.returncode != 0 and 'dram' in done.stderr
    done = call('mount.hitrain', tmp_path / 'missing', tmp_path)
    assert done.returncode != 0 and 'missing' in done.stderr
    assert not os.path.ismount(tmp_path)


def test_mount_works_through_mount_8_and_fstab(image, tmp_path):
    """mount(8) looks for helpers in one folder only: in a mount namespace of its own, that folder is ours."""
    sbin, point, fstab = tmp_path / 'sbin', tmp_path / 'mnt', tmp_path / 'fstab'
    sbin.mkdir()
    point.mkdir()
    for program in 'mount.hitrain', 'hitrain':  # beside each other: mount(8) takes PATH away from its helpers
        shutil.copy(BIN / program, sbin)
    fstab.write_text(f'{image}  {point}  hitrain  {FSTAB_OPTIONS}  0 0\n')
    script = f'''
        set -e
        mount --make-rprivate /
        mount --bind {sbin} "$(readlink -f /sbin)"
        mount -t hitrain -o dram=32M {image} {point}
        echo first >{point}/a
        umount {point}
        mount -T {fstab} {point}
        cat {point}/a
        findmnt -n -o FSTYPE {point}
        umount {point}
    '''
    done = subprocess.run(['unshare', '-m', 'bash', '-c', script], text=True, timeout=SECONDS_MAX,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split()
    assert lines[0] == 'first' and 'hitrain' in lines[1]
    fsck_json(image, 0)


# --------------------------------------------------------------------- fsck: clean

def test_a_new_store_is_clean(image):
    done = call('hitrain-fsck', image)
    assert done.returncode == 0 and 'clean' in done.stdout and not done.stderr


def test_a_used_store_is_clean(used):
    for args in [], ['-n'], ['-p'], ['-y'], ['-a', '-f']:
        done = call('hitrain-fsck', *args, used)
        assert done.returncode == 0 and 'clean' in done.stdout, done.stdout + done.stderr
    summary = fsck_json(used, 0)['summary']
    assert summary['verified_bytes'] == summary['stored_bytes'] > 3 * MIB
    assert summary['objects'] >= 5 and summary['log_frames'] > 0


def test_fsck_changes_nothing(used):
    before = used.read_bytes()
    call('hitrain-fsck', '-y', used)
    assert used.read_bytes() == before


def test_every_stored_chunk_has_an_owner(used):
    owners = {(e['path'], e.get('state')) for e in extents(used)}
    assert {('/dir/plain.bin', None), ('/tensor.bin', None), ('/model/w', None), ('/model/w', 'exp_avg'),
            ('/model/w', 'exp_avg_sq')} <= owners


@pytest.mark.parametrize('delay', [0.0, 0.1, 0.3])
def test_a_crashed_store_is_clean(image, tmp_path, delay):
    daemon = Daemon(image, tmp_path / 'mnt')
    fill(daemon.point)
    writer = subprocess.Popen(['sh', '-c', f'while :; do head -c 300000 /dev/urandom >{daemon.point}/n$((i += 1)); '
                               'sync; done'], stderr=subprocess.DEVNULL)
    time.sleep(delay)
    daemon.kill()
    writer.kill()
    writer.wait()
    result = fsck_json(image, 0)
    assert not result['clean'] and result['summary']['chunks'] > 0
    with mounted(image, tmp_path / 'mnt') as point:
        assert (point / 'dir/plain.bin').read_bytes() == random_bytes(1, 200_000)
        assert os.getxattr(point / 'model', 'user.hitrain.durable_step') == b'1'
    fsck_json(image, 0)


def test_no_data_reads_nothing_that_is_stored(used):
    listed = extents(used)
    with flipped(used, listed[0]['offset']):
        assert [p['code'] for p in fsck_json(used, 4)['problems']] == ['DATA-CSUM']
        unread = fsck_json(used, 0, '--no-data')['summary']
        assert unread['verified_bytes'] == 0 and unread['chunks'] == len({(e['object'], e['chunk']) for e in listed})
        assert 'not read' in call('hitrain-fsck', '--no-data', used).stdout
    assert ' verified' in call('hitrain-fsck', used).stdout


def test_progress_is_shown_when_asked_for(used):
    done = call('hitrain-fsck', '--progress', used)
    assert done.returncode == 0 and 'verified' in done.stderr and '100.0 %' in done.stderr


# -------------------------------------------------------------------- fsck: damage

def damaged(image, offset, code, *words):
    """One flipped byte: exit 4, one line of this code with these words; -p repairs, but only -y where something is given up for it, and
    then there is nothing left."""
    with flipped(image, offset):
        done = call('hitrain-fsck', image)
        assert done.returncode == 4, done.stdout + done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith(code)]
        assert len(lines) == 1, done.stdout
        for word in words:
            assert word in lines[0]
        problem, = fsck_json(image, 4)['problems']
        if code == 'DATA-CSUM':
            assert call('hitrain-fsck', '-p', image).returncode == 4
        again = call('hitrain-fsck', '-y' if code == 'DATA-CSUM' else '-p', image)
        assert again.returncode == 1 and '1 problem, 1 repaired, 0 left' in again.stdout, again.stdout + again.stderr
        fsck_json(image, 0)
    return problem


@pytest.mark.parametrize('path, chunk', [('/dir/plain.bin', 0), ('/dir/plain.bin', 3), ('/tensor.bin', 2), ('/model/w', 0)])
def test_a_flipped_byte_of_a_file_is_named(used, path, chunk):
    e = extent_of(used, path, chunk)
    problem = damaged(used, e['offset'] + e['stored'] // 2, 'DATA-CSUM', path, f'chunk {chunk} ', str(e['offset']), str(used))
    assert problem['path'] == path and problem['chunk'] == chunk and problem['offset'] == e['offset']
    assert problem['first_byte'] == chunk * (MIB if path != '/dir/plain.bin' else 65536)


@pytest.mark.parametrize('state', ['exp_avg', 'exp_avg_sq'])
def test_a_flipped_byte_of_optimizer_state_is_named(used, state):
    e = extent_of(used, '/model/w', 0, state)
    problem = damaged(used, e['offset'] + 5, 'DATA-CSUM', '/model/w', f'state {state} ', 'chunk 0 ')
    assert problem['path'] == '/model/w' and problem['state'] == state


def test_every_bad_chunk_is_named_and_the_rest_is_verified(used):
    first, second = extent_of(used, '/tensor.bin', 0), extent_of(used, '/tensor.bin', 2)
    with flipped(used, first['offset']), flipped(used, second['offset'] + second['stored'] - 1):
        result = fsck_json(used, 4)
    assert sorted(p['chunk'] for p in result['problems']) == [0, 2]
    summary = result['summary']
    assert summary['verified_bytes'] == summary['stored_bytes'] - first['stored'] - second['stored']


@pytest.mark.parametrize('copy, where', [(0, 0), (1, 16 * 4096), (2, 64 * MIB - 4096)])
@pytest.mark.parametrize('byte, code', [(0, 'SB-MAGIC'), (8, 'SB-CSUM'), (104, 'SB-CSUM'), (4000, 'SB-CSUM')])
def test_a_flipped_byte_of_a_superblock_is_named(used, copy, where, byte, code):
    problem = damaged(used, where + byte, code, f'superblock copy {copy} ', str(where), str(used))
    assert problem['copy'] == copy and problem['offset'] == where


def log_places(image, copy):
    """Byte offsets all over the live part of a log copy: every frame's first and last byte, and more."""
    log = fsck_json(image, 0)['log'][copy]
    first, end = log['start_position'], log['end_position']
    assert end - first <= log['bytes'] and end > first
    positions = {p + d for p in range(first, end, 4096) for d in (0, 4, 30, 47, 90, 4095)}
    return log, sorted(positions)


@pytest.mark.parametrize('copy', [0, 1])
def test_a_flipped_byte_of_a_log_copy_is_named(used, copy):
    log, positions = log_places(used, copy)
    for position in positions[::max(1, len(positions) // 40)] + positions[-6:]:
        with flipped(used, log['offset'] + position % log['bytes']):
            result = fsck_json(used, 4)
            problem, = result['problems']
            assert problem['code'] == 'LOG-FRAME', (position, problem)
            assert problem['position'] <= position < problem['position'] + log['bytes'], (position, problem)
            assert problem['copy'] == copy, (position, problem)
            assert problem['frame'] >= 1 and f'frame {problem["frame"]}' in problem['text']
            assert problem['offset'] == log['offset'] + problem['position'] % log['bytes']
    fsck_json(used, 0)


def test_damage_of_both_log_copies_is_told_and_the_rest_is_checked(used):
    (log0, positions), (log1, _) = log_places(used, 0), log_places(used, 1)
    position = positions[len(positions) // 2] // 4096 * 4096 + 30
    with flipped(used, log0['offset'] + position % log0['bytes']):
        with flipped(used, log1['offset'] + position % log1['bytes']):
            codes = [p['code'] for p in fsck_json(used, 4)['problems']]
    assert codes.count('LOG-FRAME') == 2 and 'LOG-ALL' in codes


def test_lost_content_is_an_error_until_it_is_written_anew(used, tmp_path):
    e = extent_of(used, '/dir/plain.bin', 1)
    with open(used, 'r+b') as f:
        f.seek(e['offset'])
        f.write(bytes(e['stored']))
    done = call('hitrain-fsck', '-y', used)
    assert done.returncode == 1 and 'repair: mark the chunk lost' in done.stdout
    done = call('hitrain-fsck', used)
    assert done.returncode == 0 and '1 chunk marked lost' in done.stdout
    with mounted(used, tmp_path / 'mnt') as point:
        path = point / 'dir/plain.bin'
        assert b'lost_chunks=1\n' in os.getxattr(point, 'user.hitrain.stats')
        with open(path, 'r+b', buffering=0) as f:
            assert len(f.read(65536)) == 65536
            with pytest.raises(OSError):
                f.read(65536)
            f.seek(65536)
            f.write(65536 * b'x')
        with open(path, 'rb') as f:
            assert f.read()[65536:131072] == 65536 * b'x'
    assert fsck_json(used, 0)['summary']['lost_chunks'] == 0


def test_what_is_there_of_a_store_can_be_checked(tmp_path):
    paths = [tmp_path / 'a', tmp_path / 'b']
    call('mkfs.hitrain', '--size=16M', *paths)
    done = call('hitrain-fsck', paths[1])
    assert done.returncode == 8 and '--degraded' in done.stderr
    assert call('hitrain-fsck', '--degraded', paths[1]).returncode == 0
    assert call('hitrain-fsck', '--degraded', '-y', paths[1]).returncode == 16
    assert call('hitrain-fsck', *paths).returncode == 0


def test_a_truncated_image_is_told(used):
    os.truncate(used, 40 * MIB)
    done = call('hitrain-fsck', used)
    assert done.returncode == 4
    assert str(used) in done.stdout and str(40 * MIB) in done.stdout and str(64 * MIB) in done.stdout
    assert 'SB-SHORT' in [p['code'] for p in fsck_json(used, 4)['problems']]


def test_a_store_without_any_superblock_left_is_told(used):
    with flipped(used, 200), flipped(used, 16 * 4096 + 200), flipped(used, 64 * MIB - 4096 + 200):
        codes = [p['code'] for p in fsck_json(used, 4)['problems']]
    assert codes == ['SB-NONE']


def test_a_foreign_image_is_told(tmp_path):
    path = tmp_path / 'foreign.img'
    with open(path, 'wb') as f:
        f.truncate(32 * MIB)
    done = call('hitrain-fsck', path)
    assert done.returncode == 8 and str(path) in done.stderr and 'not a hitrain store' in done.stderr
    assert fsck_json(path, 8)['problems'] == []
    subprocess.run(['mkfs.ext4', '-q', '-L', 'other', path], check=True)
    done = call('hitrain-fsck', path)
    assert done.returncode == 8 and 'ext4' in done.stderr and 'other' in done.stderr


@pytest.mark.parametrize('size', [0, 1, 511, 512, 4095, 4096, 65536, 70000])
def test_a_stump_of_an_image_is_told(used, size):
    os.truncate(used, size)
    done = call('hitrain-fsck', used)
    assert done.returncode in (4, 8) and str(used) in done.stdout + done.stderr


def test_what_is_no_device_is_told(tmp_path):
    for path in [tmp_path / 'missing', tmp_path, pathlib.Path('/dev/null')]:
        done = call('hitrain-fsck', path)
        assert done.returncode == 8 and str(path) in done.stderr


# ----------------------------------------------------------------------- hitrainctl

def test_stats_of_the_mount_and_of_a_file(image, tmp_path):
    with mounted(image, tmp_path / 'mnt') as point:
        fill(point)
        for path in point, point / 'tensor.bin', point / 'model':
            done = call('hitrainctl', 'stats', path)
            assert done.returncode == 0 and done.stdout, done.stderr
            raw = os.getxattr(path, 'user.hitrain.stats').decode()
            keys = [line.split('=', 1)[0] for line in raw.splitlines() if '=' in line]
            assert [line.split()[0] for line in done.stdout.splitlines()] == keys
            done = call('hitrainctl', 'stats', path, '--json')
            result = json.loads(done.stdout)
            assert result['path'] == str(path) and list(result['stats']) == keys
        stats = json.loads(call('hitrainctl', 'stats', point / 'tensor.bin', '--json').stdout)['stats']
        assert stats['logical_bytes'] == 3 * MIB


def test_commit_of_a_model_root_and_of_the_mount(image, tmp_path):
    with mounted(image, tmp_path / 'mnt') as point:
        fill(point)
        root = point / 'model'
        (root / '.hitrain/grad/w').write_bytes(np.ones(100_000, np.float32).tobytes())
        done = call('hitrainctl', 'commit', root, '--json')
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result['model_root'] and result['step'] == result['durable_step'] == 2
        done = call('hitrainctl', 'commit', root)
        assert done.returncode == 0 and 'durable_step 2' in done.stdout
        assert call('hitrainctl', 'commit', point).returncode == 0
        for path in point / 'dir', point / 'tensor.bin':
            done = call('hitrainctl', 'commit', path)
            assert done.returncode == 1 and str(path) in done.stderr


def test_commit_names_what_is_only_partly_covered(image, tmp_path):
    with mounted(image, tmp_path / 'mnt') as point:
        fill(point)
        with open(point / 'model/.hitrain/grad/w', 'wb') as f:
            f.write(bytes(400))
        done = call('hitrainctl', 'commit', point / 'model')
        assert done.returncode == 1 and 'w' in done.stderr.split('commit failed')[1]


def test_what_is_committed_at_the_mounts_root_survives_a_crash(image, tmp_path):
    daemon = Daemon(image, tmp_path / 'mnt', 'commit=3600')
    (daemon.point / 'x').write_bytes(random_bytes(3, MIB))
    done = call('hitrainctl', 'commit', daemon.point)
    daemon.kill()
    assert done.returncode == 0, done.stderr
    with mounted(image, tmp_path / 'mnt') as point:
        assert (point / 'x').read_bytes() == random_bytes(3, MIB)


@pytest.mark.parametrize('args', [['--help'], ['size', '--params=10', '--json'], ['features', 'image'], ['trim', 'mnt'], ['stats', 'mnt'],
                                  ['scrub', 'status', 'mnt', '--json'], ['top', 'mnt', '--once', '--json', '--watch=0.1'], ['commit', 'mnt']],
                         ids=' '.join)
def test_output_that_cannot_be_written_is_an_error(args, image, make_store):
    places = {'image': image, 'mnt': make_store().mount() if 'mnt' in args else None}
    with open('/dev/full', 'w') as full:
        done = subprocess.run([BIN / 'hitrainctl', *(places.get(word, word) for word in args)], stdout=full, stderr=subprocess.PIPE,
                              text=True, timeout=SECONDS_MAX)
    assert (done.returncode, done.stderr) == (1, 'hitrainctl: error: cannot write: No space left on device\n')


def test_paths_elsewhere_are_told(tmp_path):
    for command in 'stats', 'commit':
        done = call('hitrainctl', command, tmp_path)
        assert done.returncode == 1 and 'not on a hitrain mount' in done.stderr
        done = call('hitrainctl', command, tmp_path / 'missing')
        assert done.returncode == 1 and 'missing' in done.stderr


def test_a_mount_without_a_daemon_is_told(image, tmp_path):
    daemon = Daemon(image, tmp_path / 'mnt')
    daemon.process.kill()
    daemon.process.wait(SECONDS_MAX)
    done = call('hitrainctl', 'stats', daemon.point)
    subprocess.run(['umount', '-l', str(daemon.point)], check=True)
    assert done.returncode == 1 and 'daemon' in done.stderr
