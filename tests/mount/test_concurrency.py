# SPDX-License-Identifier: Apache-2.0
"""Many processes at once: names are never half changed, bytes never lost, and a killed process leaves nothing stuck.

Everything runs twice: with many worker threads in the daemon, and with one.
"""
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import random
import shutil
import signal
import threading
import time
import traceback
import zlib

import pytest

from calls import run_threads, sync
from conftest import MIB, SECONDS_MAX, wait_for
from models import new_model
from trees import blob

LONG = bool(os.environ.get('HITRAIN_LONG'))
SECONDS = 10 if LONG else 0.3
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
STUCK_SECONDS = SECONDS_MAX


@pytest.fixture(params=[(), ('-s',)], ids=['workers', 'one-worker'])
def mnt(make_store, request):
    return make_store().mount(flags=request.param)


class Crew:
    """Forked processes. An exception in one fails the test; one that does not end in time is stuck."""

    def __init__(self):
        self.pids = []

    def start(self, work, *args):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                random.seed(os.getpid())
                work(*args)
                status = 0
            except BaseException:  # noqa: B902 - shown, and reported by the status
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(status)
        self.pids.append(pid)
        return pid

    def repeat(self, work, *args, seconds=None):
        def loop():
            end = time.monotonic() + (SECONDS if seconds is None else seconds)
            work(*args)     # once at least, also if this machine is busy
            while time.monotonic() < end:
                work(*args)
        return self.start(loop)

    def finish(self):
        """Exit statuses, in the order of the starts."""
        statuses, end = [], time.monotonic() + STUCK_SECONDS + 2 * SECONDS
        for pid in self.pids:
            while True:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    break
                if time.monotonic() > end:
                    where = open(f'/proc/{pid}/wchan').read()
                    for p in self.pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(p, signal.SIGKILL)
                    pytest.fail(f'process {pid} is stuck in {where}')
                time.sleep(0.001)
            statuses.append(status)
        self.pids = []
        return statuses

    def kill(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        return self.finish()


@pytest.fixture
def crew():
    made = Crew()
    yield made
    made.kill()


def assert_all_well(crew):
    assert set(crew.finish()) == {0}


def renameat2(a, b, flags):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(a))


def inodes_used(mnt):
    v = os.statvfs(mnt)
    return v.f_files - v.f_ffree


# ------------------------------------------------------------------------- names

def sealed(number, size):
    """Bytes that show whether they are whole."""
    body = b'%08d' % number + blob(size, number)
    return body + b'%08x' % zlib.crc32(body)


def assert_sealed(data):
    assert len(data) >= 16 and data[-8:] == b'%08x' % zlib.crc32(data[:-8]), (len(data), data[:20])


def test_a_replaced_name_leads_to_one_version_or_another(mnt, crew):
    (mnt / 'name').write_bytes(sealed(0, 100))
    versions = [sealed(n, random.randrange(200_000)) for n in range(20)]

    def replace():
        new = mnt / f'new-{os.getpid()}'
        new.write_bytes(random.choice(versions))
        os.rename(new, mnt / 'name')

    def look():
        with open(mnt / 'name', 'rb') as f:
            assert_sealed(f.read())
        os.stat(mnt / 'name')
        assert 'name' in os.listdir(mnt)
    for work in (replace, replace, look, look, look):
        crew.repeat(work)
    assert_all_well(crew)
    assert os.listdir(mnt) == ['name'] and os.stat(mnt / 'name').st_nlink == 1


def test_exchanged_names_are_both_there_at_any_moment(mnt, crew):
    for i, name in enumerate('ab'):
        (mnt / name).mkdir()
        (mnt / name / 'inside').write_bytes(sealed(i, 5000))
    numbers = {os.stat(mnt / name).st_ino for name in 'ab'}

    def exchange():
        renameat2(mnt / 'a', mnt / 'b', RENAME_EXCHANGE)

    def look():
        for name in 'ab':
            assert os.stat(mnt / name).st_ino in numbers
            assert_sealed((mnt / name / 'inside').read_bytes())
    for work in (exchange, exchange, look, look):
        crew.repeat(work)
    assert_all_well(crew)
    assert {os.stat(mnt / name).st_ino for name in 'ab'} == numbers


def take_by_create(path, mine):
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def take_by_noreplace(path, mine):
    mine.touch()
    try:
        renameat2(mine, path, RENAME_NOREPLACE)
    except FileExistsError:
        os.unlink(mine)
        raise


def take_by_link(path, mine):
    mine.touch()
    try:
        os.link(mine, path)
    finally:
        os.unlink(mine)


TAKE = {'create': take_by_create, 'mkdir': lambda path, mine: os.mkdir(path), 'link': take_by_link,
        'symlink': lambda path, mine: os.symlink('x', path), 'fifo': lambda path, mine: os.mkfifo(path),
        'noreplace': take_by_noreplace}


def test_exactly_one_of_many_takes_a_name(mnt, crew, tmp_path):
    names, contenders = 60, 4

    def contend(how, who):
        won = 0
        for i in range(names):
            with contextlib.suppress(FileExistsError):
                TAKE[how](mnt / how / f'{i}', mnt / how / f'mine-{who}')
                won += 1
        (tmp_path / f'{how}-{who}').write_text(f'{won}')
    for how in TAKE:
        (mnt / how).mkdir()
        for who in range(contenders):
            crew.start(contend, how, who)
    assert_all_well(crew)
    for how in TAKE:
        assert sum(int((tmp_path / f'{how}-{who}').read_text()) for who in range(contenders)) == names, how
        assert sorted(os.listdir(mnt / how), key=int) == [str(i) for i in range(names)]


def test_folders_made_moved_and_removed_keep_link_counts(mnt, crew):
    homes = [mnt / f'home-{i}' for i in range(3)]
    for home in homes:
        home.mkdir()
    expected = (FileNotFoundError, FileExistsError, OSError)

    def churn():
        a, b = (random.choice(homes) / f'd{random.randrange(6)}' for _ in range(2))
        try:
            random.choice((lambda: os.mkdir(a), lambda: os.rmdir(a), lambda: os.rename(a, b), lambda: os.mkdir(a / 'sub'),
                           lambda: os.rmdir(a / 'sub'), lambda: renameat2(a, b, RENAME_EXCHANGE)))()
        except expected as e:
            assert e.errno in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL), e

    def look():
        for home in homes:
            assert 2 <= os.stat(home).st_nlink <= 8
            for name in os.listdir(home):
                with contextlib.suppress(FileNotFoundError):
                    assert os.stat(home / name).st_nlink in (0, 2, 3)  # 0: removed since its name was looked up
    for work in (churn, churn, churn, look):
        crew.repeat(work)
    assert_all_well(crew)
    for folder, folders, files in os.walk(mnt):
        assert os.stat(folder).st_nlink == 2 + len(folders) and not files
    for home in homes:
        shutil.rmtree(home)
    assert os.stat(mnt).st_nlink == 2


def test_links_of_one_file_are_counted(mnt, crew):
    (mnt / 'file').write_bytes(b'content')

    def churn(who):
        name = mnt / f'{who}-{random.randrange(20)}'
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(mnt / 'file', name) if random.random() < 0.6 else os.unlink(name)
        assert (mnt / 'file').read_bytes() == b'content'
    for who in (0, 1, 0, 1):
        crew.repeat(churn, who)
    assert_all_well(crew)
    assert os.stat(mnt / 'file').st_nlink == len(os.listdir(mnt))


def test_a_list_has_each_name_that_stays_once(mnt, crew):
    stay = {f'stay-{i:04d}' for i in range(700)}
    for name in stay:
        (mnt / name).touch()

    def churn():
        name = mnt / f'other-{os.getpid()}-{random.randrange(300)}'
        with contextlib.suppress(FileNotFoundError):
            random.choice((name.touch, name.unlink))()

    def listing():
        names = [n for n in os.listdir(mnt) if n.startswith('stay')]  # others may be listed as old and as new
        assert len(names) == len(stay) and set(names) == stay
    for work in (churn, churn, listing, listing):
        crew.repeat(work)
    assert_all_well(crew)


# ------------------------------------------------------------------------- bytes

def test_neighbours_in_one_file_do_not_disturb_each_other(mnt, crew):
    """Each has bytes of its own, some within the same pages and chunks; it reads exactly its last write."""
    path, size, record, writers = mnt / 'file', 3 * MIB, 1000, 5
    path.write_bytes(bytes(size))

    def own_records(who):
        fd, held = os.open(path, os.O_RDWR), {}
        for at in range(who * record, 2 * MIB - record, writers * record):
            held[at] = bytes(record)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            at = random.choice(list(held))
            assert os.pread(fd, record, at) == held[at], at
            held[at] = os.urandom(record)
            assert os.pwrite(fd, held[at], at) == record
        os.fsync(fd)
        for at, data in held.items():
            assert os.pread(fd, record, at) == data, at

    def own_direct_blocks():
        fd, held = os.open(path, os.O_RDWR | os.O_DIRECT), mmap.mmap(-1, 64 * 1024)
        end, at = time.monotonic() + SECONDS, 2 * MIB + 64 * 1024
        while time.monotonic() < end:
            data = os.urandom(64 * 1024)
            held[:] = data
            assert os.pwrite(fd, held, at) == len(data)
            held[:] = bytes(len(data))
            assert os.preadv(fd, [held], at) == len(data) and held[:] == data

    def own_mapped_pages():
        fd = os.open(path, os.O_RDWR)
        with mmap.mmap(fd, 256 * 1024, offset=2 * MIB + 512 * 1024) as held:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                data, at = os.urandom(3000), random.randrange(256 * 1024 - 3000)
                held[at:at + 3000] = data
                if random.random() < 0.1:
                    held.flush()
                assert held[at:at + 3000] == data == os.pread(fd, 3000, 2 * MIB + 512 * 1024 + at)

    for who in range(writers):
        crew.start(own_records, who)
    crew.start(own_direct_blocks)
    crew.start(own_mapped_pages)
    crew.repeat(lambda: path.read_bytes())
    assert_all_well(crew)
    assert os.stat(path).st_size == size


def test_threads_of_one_process_share_descriptors(mnt):
    fd, cells, errors = os.open(mnt / 'file', os.O_RDWR | os.O_CREAT), 4, []
    stop = time.monotonic() + SECONDS

    def work(who):
        try:
            while time.monotonic() < stop:
                data, at = os.urandom(100_000), (who + cells * random.randrange(8)) * 100_000
                assert os.pwrite(fd, data, at) == len(data) and os.pread(fd, len(data), at) == data
                if random.random() < 0.2:
                    os.fsync(fd)
        except BaseException as e:  # noqa: B902 - shown by the test
            errors.append(e)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(cells)]
    run_threads(threads)
    os.close(fd)
    assert not errors, errors


def test_truncation_under_readers_and_writers(mnt, crew):
    """A read returns zeros or bytes that a process wrote here, and never the content of another file."""
    path = mnt / 'file'
    (mnt / 'other').write_bytes(b'o' * 2 * MIB)
    path.touch()

    def write():
        with open(path, 'r+b', buffering=0) as f:
            f.seek(random.randrange(MIB))
            f.write(b'w' * random.randrange(300_000))

    def cut():
        os.truncate(path, random.randrange(MIB))
        (mnt / 'other').write_bytes(b'o' * random.randrange(MIB))

    def read():
        assert set(path.read_bytes()) <= {0, ord('w')}
    for work in (write, write, cut, read, read):
        crew.repeat(work)
    assert_all_well(crew)
    size = os.stat(path).st_size
    assert len(path.read_bytes()) == size
    os.truncate(path, 0)
    os.truncate(path, size)
    assert not any(path.read_bytes())


def test_many_files_made_and_removed_by_many(mnt, crew):
    before = inodes_used(mnt)
    (mnt / 'shared').mkdir()

    def life(who):
        path, data = mnt / 'shared' / f'{who}-{random.randrange(50)}', sealed(random.randrange(100), random.randrange(70_000))
        path.write_bytes(data)
        with open(path, 'rb') as f:
            os.unlink(path)
            assert f.read() == data
        path.write_bytes(data)
        os.rename(path, mnt / 'shared' / f'kept-{who}-{random.randrange(10)}')
    for who in range(4):
        crew.repeat(life, who)
    assert_all_well(crew)
    for path in (mnt / 'shared').iterdir():
        assert_sealed(path.read_bytes())
    shutil.rmtree(mnt / 'shared')
    wait_for(lambda: inodes_used(mnt) == before, 'inodes given back')


def test_fsync_storm_during_reads(mnt, crew):
    data = blob(MIB)
    for i in range(3):
        (mnt / f'read-{i}').write_bytes(data)
    (mnt / 'd').mkdir()

    def storm(who):
        fd = os.open(mnt / 'd' / f'{who}', os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, os.urandom(20_000), random.randrange(MIB))
        random.choice((os.fsync, os.fdatasync))(fd)
        os.close(fd)
        sync(random.choice((mnt, mnt / 'd')))

    def read(who):
        path = mnt / f'read-{who}'
        with open(path, 'rb', buffering=0) as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert f.read(2 * MIB) == data
    for who in range(3):
        crew.repeat(storm, who)
        crew.repeat(storm, 'same')
        crew.repeat(read, who)
    assert_all_well(crew)


def test_one_directory_in_many_hands(mnt, crew):
    """Attributes, access and times of one inode from all sides; no change may be lost or half done."""
    (mnt / 'f').write_bytes(b'x')
    modes, values = (0o600, 0o644, 0o755), [b'%d' % i * (i * 100 + 1) for i in range(1, 6)]

    def change():
        os.chmod(mnt / 'f', random.choice(modes))
        os.setxattr(mnt / 'f', 'user.value', random.choice(values))
        os.setxattr(mnt / 'f', f'user.{os.getpid()}', b'mine')
        assert os.getxattr(mnt / 'f', f'user.{os.getpid()}') == b'mine'
        at = random.randrange(10 ** 9) * 10 ** 9
        os.utime(mnt / 'f', ns=(at, at))

    def look():
        st = os.stat(mnt / 'f')
        assert st.st_mode & 0o7777 in modes
        with contextlib.suppress(OSError):
            assert os.getxattr(mnt / 'f', 'user.value') in values
        for name in os.listxattr(mnt / 'f'):
            assert os.getxattr(mnt / 'f', name)
    os.chmod(mnt / 'f', 0o600)
    for work in (change, change, change, look, look):
        crew.repeat(work)
    assert_all_well(crew)
    assert len(os.listxattr(mnt / 'f')) == 4


# ---------------------------------------------------------------- killed clients

def endless(work):
    def loop(*args):
        while True:
            work(*args)
    return loop


def by_write(d):
    with open(d / 'f', 'wb', buffering=0) as f:
        f.write(bytes(3 * MIB))


def by_fsync(d):
    with open(d / f'f{random.randrange(3)}', 'ab', buffering=0) as f:
        f.write(bytes(50_000))
        os.fsync(f.fileno())


def by_rename(d):
    (d / f'{os.getpid()}').write_bytes(sealed(1, 1000))
    os.rename(d / f'{os.getpid()}', d / 'f')


def by_mapping(d):
    fd = os.open(d / 'f', os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 2 * MIB)
    with mmap.mmap(fd, 2 * MIB) as m:
        for at in range(0, 2 * MIB, 4096):
            m[at] = 1
        m.flush()
    os.close(fd)


def by_direct_write(d):
    fd = os.open(d / 'f', os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.pwrite(fd, mmap.mmap(-1, MIB), random.randrange(4) * MIB)
    os.close(fd)


def by_unlinked(d):
    fd = os.open(d / f'{os.getpid()}', os.O_RDWR | os.O_CREAT)
    os.unlink(d / f'{os.getpid()}')
    os.write(fd, bytes(300_000))
    time.sleep(0.001)
    os.close(fd)


def by_lock(d):
    with open(d / 'f', 'a') as f, open(d / 'g', 'a') as g:
        fcntl.flock(f, fcntl.LOCK_EX)
        fcntl.lockf(g, fcntl.LOCK_EX)
        time.sleep(0.0005)


def by_copy(d):
    if not (d / 'source').exists():
        (d / 'source').write_bytes(bytes(2 * MIB))
    with open(d / 'source', 'rb') as a, open(d / f'{os.getpid()}', 'wb') as b:
        os.copy_file_range(a.fileno(), b.fileno(), 2 * MIB)


def by_tree(d):
    with contextlib.suppress(OSError):
        os.makedirs(d / 'a' / 'b' / 'c')
        (d / 'a' / 'b' / 'c' / 'f').write_bytes(b'x')
    with contextlib.suppress(OSError):
        shutil.rmtree(d / 'a')
    os.listdir(d)


def by_read(d):
    if not (d / 'f').exists():
        (d / 'f').write_bytes(bytes(4 * MIB))
    fd = os.open(d / 'f', os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    while os.read(fd, MIB):
        pass
    os.close(fd)


VICTIMS = [by_write, by_fsync, by_rename, by_mapping, by_direct_write, by_unlinked, by_lock, by_copy, by_tree, by_read]


def test_killed_in_the_middle_of_anything(mnt, crew):
    """Several of each kind at a time, killed after some milliseconds: all die at once, and hold nothing afterwards."""
    before = inodes_used(mnt)
    for _ in range(30 if LONG else 2):
        for work in VICTIMS:
            folder = mnt / work.__name__
            folder.mkdir(exist_ok=True)
            for _ in range(3):
                crew.start(endless(work), folder)
            time.sleep(random.uniform(0.01, 0.06))
            assert set(crew.kill()) == {signal.SIGKILL}, work
    with open(mnt / 'by_lock' / 'f', 'a') as f, open(mnt / 'by_lock' / 'g', 'a') as g:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(g, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if (mnt / 'by_rename' / 'f').exists():
        assert_sealed((mnt / 'by_rename' / 'f').read_bytes())
    for work in VICTIMS:
        shutil.rmtree(mnt / work.__name__)
    assert os.listdir(mnt) == []
    wait_for(lambda: inodes_used(mnt) == before, 'inodes given back')


def test_killed_while_gradients_are_written_and_closed(mnt, crew):
    count = 3 * MIB // 4
    root = new_model(mnt / 'root', 'adamw lr=1e-3', **{f'p{i}': bytes(4 * count) for i in range(3)})

    def command(line):
        fd = os.open(root / '.hitrain' / 'ctl', os.O_WRONLY)
        try:
            os.write(fd, line + b'\n')
        finally:
            os.close(fd)

    def gradient(i):
        fd = os.open(root / f'.hitrain/grad/p{i}', os.O_WRONLY)
        for at in range(0, 4 * count, MIB):
            with contextlib.suppress(OSError):
                os.pwrite(fd, b'\0\0\x80\x3f' * (MIB // 4), at)
        with contextlib.suppress(OSError):
            os.close(fd)

    def reader(i):
        assert len((root / f'p{i}').read_bytes()) == 4 * count

    def committer():
        with contextlib.suppress(OSError):
            command(b'commit')
        time.sleep(0.005)
    for _ in range(60 if LONG else 8):
        for i in range(3):
            crew.start(endless(gradient), i)
            crew.start(endless(reader), i)
        crew.start(endless(committer))
        time.sleep(random.uniform(0.02, 0.15))
        assert set(crew.kill()) == {signal.SIGKILL}
        # The next client can go back to the last step, or on.
        command(b'abort')
        assert os.getxattr(root, 'user.hitrain.step') == os.getxattr(root, 'user.hitrain.durable_step')
    step = int(os.getxattr(root, 'user.hitrain.step'))
    for i in range(3):
        with open(root / f'.hitrain/grad/p{i}', 'wb', buffering=0) as f:
            f.write(b'\0\0\x80\x3f' * count)
    command(b'commit')
    assert int(os.getxattr(root, 'user.hitrain.step')) == step + 1
    values = [(root / f'p{i}').read_bytes() for i in range(3)]
    assert all(v == v[:4] * count and v[:4] != bytes(4) for v in values)


@pytest.mark.parametrize('end', [signal.SIGINT, signal.SIGKILL])
def test_interrupted_while_waiting_for_a_lock(mnt, crew, end):
    for name in ('f', 'other'):
        (mnt / name).write_bytes(b'x')
    waiting, told = os.pipe()

    def wait(how):
        with open(mnt / 'f', 'r+') as f:
            os.write(told, b'.')
            how(f, fcntl.LOCK_EX)
    for how in (fcntl.flock, fcntl.lockf):
        with open(mnt / 'f', 'r+') as f:
            how(f, fcntl.LOCK_EX)
            pids = [crew.start(wait, how) for _ in range(20)]  # more than the daemon has workers
            for _ in pids:
                assert os.read(waiting, 1) == b'.'
            time.sleep(0.05)
            assert (mnt / 'other').read_bytes() == b'x'  # other files do not wait for them
            (mnt / 'other').write_bytes(b'x')
            for pid in pids:
                os.kill(pid, end)
            assert set(crew.finish()) == {end}
        with open(mnt / 'f', 'r+') as f:
            how(f, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_unmount_refuses_open_files_and_succeeds_after(make_store, crew):
    store = make_store()
    store.mount()

    def hold():
        with open(store.point / 'f', 'wb', buffering=0) as f:
            f.write(b'held')
            time.sleep(600)
    crew.start(hold)
    wait_for(lambda: (store.point / 'f').exists() and os.stat(store.point / 'f').st_size == 4, 'file')
    with pytest.raises(Exception):
        store.unmount()
    assert (store.point / 'f').read_bytes() == b'held'
    crew.kill()
    store.remount()
    assert (store.point / 'f').read_bytes() == b'held'
