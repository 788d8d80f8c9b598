# SPDX-License-Identifier: Apache-2.0
"""Passthrough files, whose pages clients have: read past the daemon, mapped, changed unseen, and given back."""
import array
import ctypes
import errno
import mmap
import os
import random
import shutil
import subprocess
import sys
import threading

import pytest

from calls import NOBODY, fails, run_threads, settle, sync
from conftest import BIN, MIB, SECONDS_MAX, needs, wait_for
from passthrough import (HALF, ONE, PARAM, command, floats, gradient, passthrough_store, make_model, mapped, root,
                    stat)


def test_reads_do_not_reach_the_daemon(passthrough_store, root):
    before = stat(passthrough_store.point, 'mount_param_read_bytes')
    assert (root / 'w').read_bytes() == ONE * (PARAM // 4)
    assert stat(passthrough_store.point, 'mount_param_read_bytes') == before
    assert stat(passthrough_store.point, 'passthrough_files') == 1
    assert stat(passthrough_store.point, 'passthrough_used_bytes') == -(-PARAM // 4096) * 4096


def test_update_is_seen_in_a_mapping_whose_descriptor_is_closed(passthrough_store, root):
    with mapped(root / 'w', os.O_RDONLY) as m:
        for step in range(3):
            gradient(root, 'w', 1.0)
            command(root, 'wait')
            assert set(floats(m[:])) == {1.0 - 0.5 * (step + 1)}
            command(root, 'commit')
        command(root, 'evict w')
        assert set(floats(m[:])) == {-0.5}


def cached_kib():
    """Cached pages of all files except those of memory."""
    with open('/proc/meminfo') as f:
        info = {line.split(':')[0]: int(line.split()[1]) for line in f}
    return info['Cached'] - info['Shmem']


def cached_pages(fd):
    """Cached pages of this file; None: the kernel does not report them (cachestat, Linux 6.5)."""
    all_of_it, counts = array.array('Q', [0, 0]), array.array('Q', bytes(40))
    done = ctypes.CDLL(None).syscall(451, fd, ctypes.c_void_p(all_of_it.buffer_info()[0]),
                                     ctypes.c_void_p(counts.buffer_info()[0]), 0)
    return counts[0] if done == 0 else None


def test_no_second_copy_in_the_page_cache(make_store):
    store, size = make_store('512M'), 64 * MIB
    store.mount('dram=160M', 'passthrough=100M')
    root = make_model(store.point, w=size)

    def grows():
        before = cached_kib()
        with mapped(root / 'w', os.O_RDONLY) as m:
            assert sum(m[::4096]) == m[0] * (size // 4096)
            return cached_kib() - before

    wait_for(lambda: grows() < size // 1024 / 8, 'quiet moment: others use this machine, too')
    (store.point / 'ordinary').write_bytes(bytes(MIB))
    for path, want in (root / 'w', 0), (store.point / 'ordinary', MIB // 4096):
        with open(path, 'rb', buffering=0) as f:
            assert len(f.read(MIB)) == MIB
            assert cached_pages(f.fileno()) in (want, None)


@pytest.mark.parametrize('end', ['unmount', 'kill'])
def test_commit_finds_what_was_stored_through_a_mapping(passthrough_store, root, end):
    with mapped(root / 'w') as m:
        m[2 * MIB:2 * MIB + 4] = HALF
        m[PARAM - 4:] = HALF
        command(root, 'commit')
        m[:4] = HALF            # of no commit: an orderly end keeps it
        if end == 'kill':
            passthrough_store.kill()
    if end == 'unmount':
        passthrough_store.unmount()
    passthrough_store.mount('passthrough=off')
    want = bytearray(ONE * (PARAM // 4))
    want[2 * MIB:2 * MIB + 4] = want[PARAM - 4:] = HALF
    if end == 'unmount':
        want[:4] = HALF
    assert (root / 'w').read_bytes() == want


def test_commit_writes_only_what_was_stored(passthrough_store, root):
    with mapped(root / 'w') as m:
        before = int(os.getxattr(root / 'w', 'user.hitrain.device_written_bytes'))
        m[10:14] = HALF
        command(root, 'commit')
        assert int(os.getxattr(root / 'w', 'user.hitrain.device_written_bytes')) - before == MIB
        command(root, 'commit')
        assert int(os.getxattr(root / 'w', 'user.hitrain.device_written_bytes')) - before == MIB


def test_update_works_on_what_was_stored(passthrough_store, root):
    with mapped(root / 'w') as m:
        m[:4] = array.array('f', [3.0]).tobytes()
        gradient(root, 'w', 1.0)
        command(root, 'wait')
        assert floats(m[:8]).tolist() == [2.5, 0.5]


def test_abort_restores_mappings(passthrough_store, root):
    with mapped(root / 'w') as m:
        m[100:104] = HALF
        gradient(root, 'w', 1.0)
        command(root, 'wait')
        assert floats(m[:4])[0] == 0.5
        command(root, 'abort')
        assert m[:] == ONE * (PARAM // 4)
        m[100:104] = HALF       # nothing but a mapping has changed it
        command(root, 'abort')
        assert m[:] == ONE * (PARAM // 4)


def test_abort_restores_a_mapping_that_was_cut(passthrough_store, root):
    with mapped(root / 'w', os.O_RDONLY) as m:
        os.truncate(root / 'w', PARAM // 2 // 4 * 4)
        command(root, 'abort')
        assert m[:] == ONE * (PARAM // 4) == (root / 'w').read_bytes()


def test_file_that_programs_may_store_into_keeps_its_size(passthrough_store, root):
    """Pages of its mapping may be pinned for transfers. It may grow, and is cut when the last mapping is gone."""
    path = root / 'w'
    cuts = {
        'truncate': lambda: os.truncate(path, 4000),
        'to nothing': lambda: os.truncate(path, 0),
        'O_TRUNC': lambda: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)),
        'O_TRUNC for reading, too': lambda: os.close(os.open(path, os.O_RDWR | os.O_TRUNC)),
        'a command': lambda: subprocess.run(['cp', '/dev/null', path], check=True, stderr=subprocess.DEVNULL),
    }

    def refused(what, cut):
        with pytest.raises((OSError, subprocess.CalledProcessError)) as e:
            cut()
        assert getattr(e.value, 'errno', errno.EBUSY) == errno.EBUSY, what
        assert os.stat(path).st_size == PARAM

    fd = os.open(path, os.O_RDWR)
    m = mmap.mmap(fd, 0, trackfd=False) if sys.version_info >= (3, 13) else mmap.mmap(fd, 0)
    for what, cut in {**cuts, 'ftruncate': lambda: os.ftruncate(fd, 4000)}.items():
        refused(what, cut)
    os.close(fd)
    for what, cut in cuts.items():
        refused(what, cut)
    command(root, 'commit')
    m[:4] = HALF
    os.truncate(path, PARAM)
    os.truncate(path, PARAM + 4096)
    assert os.stat(path).st_size == PARAM + 4096 and m[:8] == path.read_bytes()[:8] == HALF + ONE
    m.close()

    def is_cut():
        try:
            os.truncate(path, 4000)
        except OSError as e:
            assert e.errno == errno.EBUSY
            return False
        return True

    wait_for(is_cut, 'the last mapping gone')
    assert path.read_bytes() == HALF + ONE * 999


@pytest.mark.parametrize('sizes', [(PARAM + 3 * MIB,), (4000, PARAM)], ids=['grown', 'shrunk and grown'])
def test_store_behind_the_former_end(passthrough_store, root, sizes):
    """Every descriptor sees it at once, and a copy has it."""
    reader = os.open(root / 'w', os.O_RDONLY)
    for size in sizes[:-1]:
        os.truncate(root / 'w', size)
    fd = os.open(root / 'w', os.O_RDWR)
    os.close(reader)
    os.ftruncate(fd, sizes[-1])
    at = sizes[-1] - MIB
    with mmap.mmap(fd, 0) as m:
        m[at:at + 4] = HALF
        want = m[:]
        assert os.pread(fd, 4, at) == HALF
        for flags in os.O_RDONLY, os.O_RDWR, os.O_RDONLY | os.O_DIRECT:
            other = os.open(root / 'w', flags)
            with mmap.mmap(-1, MIB) as page:
                assert os.preadv(other, [page], at // 4096 * 4096) and page[at % 4096:at % 4096 + 4] == HALF
            os.close(other)
        copy = os.open(root / 'copy', os.O_RDWR | os.O_CREAT)
        done = 0
        while done < len(want):
            done += os.copy_file_range(fd, copy, len(want) - done, done, done)
        assert os.pread(copy, len(want), 0) == want
    os.close(copy)
    os.close(fd)


def test_rollback_restores_mappings(passthrough_store, root):
    command(root, 'snapshot first')
    with mapped(root / 'w') as m:
        gradient(root, 'w', 1)
        command(root, 'snapshot second')
        m[:8] = HALF * 2  # by a client that maps it, not known to the daemon yet
        assert command(root, 'rollback first') == 'ok'
        assert m[:] == ONE * (PARAM // 4)
        m[:4] = HALF
        assert command(root, 'rollback second') == 'ok'
        assert m[:] == HALF * (PARAM // 4) == (root / 'w').read_bytes()
    passthrough_store.remount('dram=48M', check=True)
    assert (root / 'w').read_bytes() == HALF * (PARAM // 4)


def test_file_that_abort_takes_away(passthrough_store, root):
    """Programs that have its pages keep them unchanged; requests that reach the daemon get an error."""
    (root / 'new').write_bytes(ONE * (MIB // 4))
    settle(root)
    reader, writer = os.open(root / 'new', os.O_RDONLY), os.open(root / 'new', os.O_RDWR)
    with mmap.mmap(writer, 0) as m:
        command(root, 'abort')
        assert not (root / 'new').exists()
        assert m[:] == os.pread(reader, MIB, 0) == ONE * (MIB // 4)
        m[:4] = HALF
        for call in (lambda: os.pread(writer, 4, 0), lambda: os.pwrite(writer, HALF, 0), lambda: os.fsync(writer),
                     lambda: os.ftruncate(writer, 0)):
            with fails(errno.ESTALE):
                call()
    os.close(reader)
    os.close(writer)
    wait_for(lambda: stat(passthrough_store.point, 'passthrough_used_bytes') == 0, 'its memory is gone')


def test_every_opener_sees_every_write_at_once(passthrough_store, root):
    path = root / 'w'
    flags = [os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_DIRECT, os.O_RDONLY | os.O_DIRECT]
    fds = [os.open(path, f) for f in flags]
    buf = mmap.mmap(-1, 4096)
    with mmap.mmap(fds[1], 0) as m:
        for n, fd in enumerate(fds[1:4]):
            data = bytes([n + 1]) * 4096
            buf[:] = data
            assert os.pwritev(fd, [buf], n * 4096) == 4096
            assert m[n * 4096:(n + 1) * 4096] == data
            for reader in (fds[0], fds[1], fds[3], fds[4]):
                buf[:] = bytes(4096)
                assert os.preadv(reader, [buf], n * 4096) == 4096 and buf[:] == data
        m[8:12] = b'abcd'
        assert os.pread(fds[0], 4, 8) == os.pread(fds[1], 4, 8) == b'abcd'
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize('flags, kinds', [(os.O_RDWR, ['map', 'refused', 'punch']), (os.O_WRONLY, ['cut'])],
                         ids=['mapped', 'cut'])
def test_random_changes_beside_a_model(passthrough_store, root, flags, kinds):
    rng, path = random.Random(1), root / 'w'
    want = bytearray(path.read_bytes())
    rd, wr = os.open(path, os.O_RDONLY), os.open(path, flags)
    for n in range(200):
        at, data = rng.randrange(5 * MIB), rng.randbytes(rng.randrange(1, 200_000))
        kind = rng.choice(['write', 'grow', 'commit', *kinds] if n % 20 else ['check'])
        if kind == 'write':
            want.extend(bytes(max(0, at - len(want))))
            want[at:at + len(data)] = data
            os.pwrite(wr, data, at)
        elif kind == 'map' and want:
            with mmap.mmap(wr, len(want)) as m:
                at %= len(want)
                data = data[:len(want) - at]
                m[at:at + len(data)] = want[at:at + len(data)] = data
        elif kind == 'cut':
            del want[at:]
            os.ftruncate(wr, len(want))
        elif kind == 'refused' and at < len(want):
            with pytest.raises(OSError, match='busy'):
                os.ftruncate(wr, at)
        elif kind == 'grow' and at > len(want):
            want.extend(bytes(at - len(want)))
            os.ftruncate(wr, at)
        elif kind == 'punch' and at < len(want):
            zeros = min(len(data), len(want) - at)
            want[at:at + zeros] = bytes(zeros)
            subprocess.run(['fallocate', '-p', '-o', str(at), '-l', str(zeros), path], check=True)
        elif kind == 'commit':
            command(root, 'commit')
        elif kind == 'check':
            assert os.fstat(rd).st_size == len(want)
            assert os.pread(rd, 8 * MIB, 0) == want
            assert flags == os.O_WRONLY or os.pread(wr, 8 * MIB, 0) == want
    command(root, 'commit')
    os.close(rd)
    os.close(wr)
    passthrough_store.crash('passthrough=off')
    assert path.read_bytes() == want


def test_copies_and_holes(passthrough_store, root):
    os.truncate(root / 'w', 6 * MIB)
    with mapped(root / 'w') as m:
        m[5 * MIB] = 7
        shutil.copyfile(root / 'w', root / 'copy')
        subprocess.run(['cp', '--sparse=always', root / 'w', root / 'sparse'], check=True)
        assert (root / 'copy').read_bytes() == (root / 'sparse').read_bytes() == m[:]
        os.unlink(root / 'w')
        assert m[5 * MIB] == 7
        os.rename(root / 'copy', root / 'w')
        m[0] = 9
    assert (root / 'w').read_bytes()[:4] == ONE


# -------------------------------------------------------------------- giving back


def test_memory_comes_back_when_nobody_has_it(passthrough_store):
    root = make_model(passthrough_store.point, a=10 * MIB, b=10 * MIB)
    with mapped(root / 'a') as m:
        m[77:81] = HALF
        assert (root / 'b').read_bytes() == ONE * (10 * MIB // 4)       # does not fit beside it
        assert stat(passthrough_store.point, 'passthrough_fallbacks') == 1
        assert stat(passthrough_store.point, 'passthrough_used_bytes') == 10 * MIB
        with mapped(root / 'b', os.O_RDONLY) as second:
            gradient(root, 'b', 1.0)
            command(root, 'commit')
            assert floats(second[:4])[0] == 0.5

    def b_is_out():
        before = stat(passthrough_store.point, 'passthrough_opens')
        assert (root / 'b').read_bytes() == HALF * (10 * MIB // 4)
        settle(root)
        return stat(passthrough_store.point, 'passthrough_opens') > before

    wait_for(b_is_out, 'b passed through')
    assert (root / 'a').read_bytes()[76:84] == ONE[:1] + HALF + ONE[1:]


def test_pinned_file_outside_models(passthrough_store):
    path = passthrough_store.point / 'tokens'
    path.touch()
    os.setxattr(path, 'user.hitrain.dtype', b'i32')
    os.setxattr(path, 'user.hitrain.pin', b'dram')
    path.write_bytes(bytes(2 * MIB))

    def goes_out():
        settle(passthrough_store.point)
        with mapped(path):
            return stat(passthrough_store.point, 'passthrough_files') == 1

    wait_for(goes_out, 'passed through')
    with mapped(path) as m:
        m[MIB] = 5
        sync(path)
        passthrough_store.kill()
    passthrough_store.mount('passthrough=16M')
    with mapped(path) as m:
        assert m[MIB] == 5
        m[MIB] = 6
    passthrough_store.unmount()           # no program has synced it: the end of the mount does
    passthrough_store.mount('passthrough=off')
    assert path.read_bytes()[MIB] == 6


def test_stores_outside_models_become_durable_by_themselves(make_store):
    """The commit timer finds them while the file is mapped."""
    store = make_store()
    store.mount('dram=48M', 'passthrough=16M', 'commit=1')
    path = store.point / 'tokens'
    path.touch()
    os.setxattr(path, 'user.hitrain.dtype', b'i32')
    os.setxattr(path, 'user.hitrain.pin', b'dram')
    path.write_bytes(bytes(3 * MIB))

    def word(path, name):
        return int(os.getxattr(path, f'user.hitrain.{name}'))

    settle(store.point)
    with mapped(path) as m:
        os.sync()
        before = word(path, 'device_written_bytes')
        m[2 * MIB + 1] = 5
        wait_for(lambda: word(path, 'device_written_bytes') > before, 'written')
        commits = stat(store.point, 'commits')
        m[1] = 6                # the next commit is after the one that has written
        wait_for(lambda: stat(store.point, 'commits') > commits + 1, 'durable')
        store.kill()
    store.mount('passthrough=off')
    data = path.read_bytes()
    assert data[2 * MIB + 1] == 5 and data.count(0) >= len(data) - 2


def test_others_are_ordinary(passthrough_store, root):
    (passthrough_store.point / 'file').write_bytes(bytes(MIB))
    (root / 'empty').touch()
    (root / 'data').mkdir()
    os.setxattr(root / 'data', 'user.hitrain.dtype', b'i32')
    (root / 'data/tokens').write_bytes(bytes(MIB))
    for path in (passthrough_store.point / 'file', root / 'empty', root / 'data/tokens'):
        path.read_bytes()
    fd = os.open(root / 'w', os.O_RDONLY | os.O_DIRECT)
    assert stat(passthrough_store.point, 'passthrough_files') == 0
    assert stat(passthrough_store.point, 'passthrough_fallbacks') == 0
    assert (root / 'w').read_bytes() == ONE * (PARAM // 4)      # one mode while it is open
    assert stat(passthrough_store.point, 'passthrough_files') == 0
    os.close(fd)


def test_off_hands_out_nothing(make_store):
    store = make_store()
    store.mount()
    root = make_model(store.point, w=PARAM)
    with mapped(root / 'w') as m:
        m[:4] = HALF
        m.flush()
        assert (root / 'w').read_bytes()[:8] == HALF + ONE
    assert stat(store.point, 'passthrough_opens') == stat(store.point, 'passthrough_fallbacks') == 0


AS_A_USER = """
set -e
mount --make-rprivate /
mknod -m 666 $D/fuse c 10 229; mount --bind $D/fuse /dev/fuse; rm $D/fuse
as_nobody() { setpriv --reuid 65534 --regid 65534 --clear-groups "$@"; }
as_nobody hitrain $D/image $D/mnt -o dram=48M,staging=24M,passthrough=16M 2>$D/log
trap "umount -l $D/mnt" EXIT
mkdir $D/control; mount -t fusectl none $D/control
waiting=$D/control/$(awk -v at=$D/mnt '$5 == at {split($3, n, ":"); print n[2]}' /proc/self/mountinfo)/waiting
settle() { for i in $(seq 6000); do n=$(cat $waiting); [ "$n" != 0 ] || return 0; sleep 0.01; done; return 1; }
as_nobody sh -ec '
cd $D/mnt; mkdir model; setfattr -n user.hitrain.dtype -v f32 model; setfattr -n user.hitrain.optimizer -v sgd model
head -c 100000 /dev/zero >model/w'
settle; as_nobody sh -c 'cmp -n 100000 $D/mnt/model/w /dev/zero'
settle; as_nobody sh -c 'cmp -n 100000 - /dev/zero <>$D/mnt/model/w'
as_nobody sh -c 'getfattr --absolute-names --only-values -n user.hitrain.stats $D/mnt | grep ^passthrough; umount $D/mnt'
trap - EXIT
"""


def test_without_the_privilege_files_are_ordinary(make_store):
    needs('fusermount3')
    store = make_store()
    for path in (store.folder, store.image, store.point):
        os.chown(path, NOBODY, NOBODY)
    env = dict(os.environ, D=str(store.folder), PATH=f'{BIN}:{os.environ["PATH"]}')
    done = subprocess.run(['unshare', '-m', 'bash', '-c', AS_A_USER], env=env, text=True, timeout=SECONDS_MAX,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode and 'unshare' in done.stderr:
        pytest.skip('mount namespaces are not allowed here')
    assert done.returncode == 0, done.stderr + store.messages()
    figures = dict(line.split('=') for line in done.stdout.split())
    assert figures['passthrough_opens'] == figures['passthrough_files'] == '0'
    assert int(figures['passthrough_fallbacks']) == 2
    assert 'passthrough is off' in store.messages() and 'error' not in store.messages()


def test_share_must_fit(make_store):
    store = make_store()
    store.start('dram=32M', 'staging=24M', 'passthrough=30M')
    assert store.daemon.wait(SECONDS_MAX) != 0
    assert 'passthrough=30 MiB is too much of dram=32 MiB' in store.messages()
    store.daemon = None


# -------------------------------------------------------------------- many at once


def test_opening_and_mapping_by_many(passthrough_store):
    root = make_model(passthrough_store.point, **{f'p{i}': 2 * MIB for i in range(12)})
    errors = []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(60):
                path = root / f'p{rng.randrange(12)}'
                if rng.random() < 0.5:
                    assert path.read_bytes() == ONE * (MIB // 2)
                else:
                    with mapped(path, rng.choice([os.O_RDONLY, os.O_RDWR])) as m:
                        assert m[MIB:MIB + 4] == ONE
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    run_threads(threads)
    assert not errors


WRITER = '''
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
m = mmap.mmap(fd, 0)
os.close(fd)
n = 0
while True:
    n += 1
    for at in range(0, len(m) - 4, 65536):
        m[at:at + 4] = n.to_bytes(4, 'little')
    if n == 1:
        print('mapped', flush=True)  # and none of what was there before is left
'''


def test_daemon_killed_beside_mapped_writers(passthrough_store, root):
    """Acknowledged commits are there, all content was stored by a program, and no checksum fails."""
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, '-c', WRITER, root / 'w'], stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline() == 'mapped\n'
        for _ in range(5):
            command(root, 'commit')
        now = int.from_bytes((root / 'w').read_bytes()[:4], 'little')
        command(root, 'commit')
        passthrough_store.kill()
        writer.kill()
        writer.wait()
        passthrough_store.mount('dram=48M', 'passthrough=16M')
        data = (root / 'w').read_bytes()
        assert int.from_bytes(data[:4], 'little') >= now
        assert stat(passthrough_store.point, 'checksum_errors') == 0
