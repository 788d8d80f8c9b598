# SPDX-License-Identifier: Apache-2.0
"""Habits of programs with files: logs, editors, mail and package managers, lock files, Python's own modules."""
import collections
import ctypes
import dbm
import errno
import fcntl
import glob
import mailbox
import mmap
import multiprocessing
import os
import pathlib
import pickle
import shelve
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile

import pytest

from calls import fails, sync
from conftest import MIB, SECONDS_MAX, wait_for
from trees import blob

MARK = '''
import os, sys
sys.path.insert(0, %r)
''' % str(pathlib.Path(__file__).parent)


def start(code, *args, **kw):
    return subprocess.Popen([sys.executable, '-c', MARK + code, *map(str, args)], stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw)


def finish(process):
    out, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, err
    return out


# -------------------------------------------------------------------------- logs

APPEND = '''
path, who, count, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
for i in range(count):
    line = f'{who} {i} '.ljust(size - 1 - i % 7, who) + '\\n'
    assert os.write(fd, line.encode()) == len(line)
'''


@pytest.mark.parametrize('size', [40, 3000, 10_000])
def test_lines_appended_by_many_processes_stay_whole(mnt, size):
    path, count = mnt / 'log', 300
    for process in [start(APPEND, path, who, count, size) for who in 'abcdef']:
        finish(process)
    seen = collections.Counter()
    for line in path.read_text().splitlines():
        who, i, _ = line.split(' ')
        assert line == f'{who} {i} '.ljust(size - 1 - int(i) % 7, who)
        assert int(i) == seen[who], 'in order for each writer'
        seen[who] += 1
    assert seen == {who: count for who in 'abcdef'}


ROTATED = '''
import signal, sys, time
path, told = sys.argv[1], []
signal.signal(signal.SIGHUP, lambda *_: told.append('reopen'))
signal.signal(signal.SIGTERM, lambda *_: told.append('end'))
f, n = open(path, 'a', buffering=1), 0
print('ready', flush=True)
while 'end' not in told:
    if 'reopen' in told:
        told.remove('reopen')
        f.close()
        f = open(path, 'a', buffering=1)
    f.write(f'{n}\\n')
    n += 1
    if n % 100 == 0:
        time.sleep(0.001)
f.close()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP, signal.SIGTERM])
print(n)
'''


def test_log_rotation_loses_no_line(mnt):
    """Rename, a new file, SIGHUP; older ones compressed and dropped."""
    log = mnt / 'log'
    writer = subprocess.Popen([sys.executable, '-c', ROTATED, str(log)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == 'ready\n'
    for _ in range(10):
        last = sorted((int(p.name.split('.')[1]) for p in mnt.glob('log.*')), reverse=True)
        for n in last:
            old = next(mnt.glob(f'log.{n}*'))
            os.rename(old, mnt / old.name.replace(f'.{n}', f'.{n + 1}'))
        os.rename(log, mnt / 'log.1')
        os.close(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o640))
        writer.send_signal(signal.SIGHUP)
        if (mnt / 'log.3').exists():
            subprocess.run(['gzip', mnt / 'log.3'], check=True, timeout=SECONDS_MAX)
        wait_for(lambda: log.stat().st_size, 'the writer uses the new file')
    writer.terminate()
    count = int(writer.communicate(timeout=SECONDS_MAX)[0])
    assert writer.returncode == 0
    lines = []
    for p in sorted(mnt.glob('log*'), key=lambda p: int((p.name.split('.') + ['0'])[1]), reverse=True):
        lines += subprocess.run(['gzip', '-cdf', p], check=True, stdout=subprocess.PIPE).stdout.decode().split()
    assert list(map(int, lines)) == list(range(count)) and count > 0


def test_copy_and_truncate_rotation(mnt):
    """The writer keeps its O_APPEND descriptor: after truncation it goes on at the beginning, without a hole."""
    with open(mnt / 'log', 'ab', buffering=0) as f:
        for round in range(5):
            for i in range(100):
                f.write(b'%d %d\n' % (round, i))
            shutil.copyfile(mnt / 'log', mnt / f'log.{round}')
            os.truncate(mnt / 'log', 0)
    assert (mnt / 'log').read_bytes() == b''
    for round in range(5):
        assert (mnt / f'log.{round}').read_bytes() == b''.join(b'%d %d\n' % (round, i) for i in range(100))


def test_tail_follows_by_name_and_descriptor(mnt, tmp_path):
    log = mnt / 'log'
    log.write_text('first\n')
    with open(tmp_path / 'seen', 'w') as seen:
        tail = subprocess.Popen(['tail', '-n', '+1', '-s', '0.02', '-F', log], stdout=seen, stderr=subprocess.DEVNULL)
    try:
        def wait_for_line(text):
            wait_for(lambda: text in (tmp_path / 'seen').read_text(), text)
        wait_for_line('first')
        with open(log, 'a') as f:
            f.write('second\n')
        wait_for_line('second')
        os.rename(log, mnt / 'log.1')
        log.write_text('third\n')
        wait_for_line('third')
    finally:
        tail.kill()
        tail.wait()


# ----------------------------------------------------------------------- editors

def test_editors_replace_files_so_that_a_crash_leaves_one_of_both(store):
    """A temporary file beside it, fsync, rename, fsync of the folder; and a backup by hard link."""
    path, versions = store.point / 'text', [f'version {i}\n' * (i * 1000 + 1) for i in range(8)]
    path.write_text(versions[0])
    os.chmod(path, 0o640)
    os.setxattr(path, 'user.charset', b'utf-8')
    for text in versions[1:]:
        fd, name = tempfile.mkstemp(dir=store.point, prefix='.text.')
        os.fchmod(fd, os.stat(path).st_mode & 0o7777)
        os.setxattr(fd, 'user.charset', os.getxattr(path, 'user.charset'))
        with open(fd, 'w') as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        if (store.point / 'text~').exists():
            os.unlink(store.point / 'text~')
        os.link(path, store.point / 'text~')
        os.rename(name, path)
        sync(store.point)
    path.with_suffix('.swp').write_text('unsaved')
    store.crash()
    assert path.read_text() == versions[-1] and (store.point / 'text~').read_text() == versions[-2]
    assert os.stat(path).st_mode & 0o7777 == 0o640 and os.getxattr(path, 'user.charset') == b'utf-8'
    assert {n for n in os.listdir(store.point) if n != 'text.swp'} == {'text', 'text~'}


def test_rename_over_without_fsync_leaves_some_whole_version(store):
    """Many programs forget the fsync. After a crash the name must not lead to a file that is cut short."""
    path = store.point / 'settings'
    versions = [blob(200_000, i) for i in range(6)]
    for i, data in enumerate(versions):
        with open(store.point / 'settings.new', 'wb') as f:
            f.write(data)
            if i == 2:
                f.flush()
                os.fsync(f.fileno())
        os.rename(store.point / 'settings.new', path)
        if i == 2:
            sync(store.point)
    with open(store.point / 'unrelated', 'wb') as f:
        os.fsync(f.fileno())
    store.crash()
    assert path.read_bytes() in versions[2:]


def test_temporary_files(mnt):
    with tempfile.TemporaryFile(dir=mnt) as f:  # O_TMPFILE where the kernel passes it
        f.write(blob(MIB + 5))
        f.seek(0)
        assert f.read() == blob(MIB + 5) and os.listdir(mnt) == []
    with tempfile.NamedTemporaryFile(dir=mnt) as f:
        f.write(b'x' * 5000)
        f.flush()
        assert os.stat(f.name).st_size == 5000 and os.stat(f.name).st_mode & 0o777 == 0o600
    with tempfile.SpooledTemporaryFile(max_size=1000, dir=mnt) as f:
        f.write(b'x' * 5000)
        f.seek(0)
        assert len(f.read()) == 5000
    with tempfile.TemporaryDirectory(dir=mnt) as d:
        (pathlib.Path(d) / 'sub').mkdir()
        (pathlib.Path(d) / 'sub' / 'f').write_bytes(b'x')
    assert os.listdir(mnt) == []
    names = [tempfile.mkstemp(dir=mnt) for _ in range(200)]
    for fd, _ in names:
        os.close(fd)
    assert sorted(os.listdir(mnt)) == sorted(os.path.basename(n) for _, n in names)


# ------------------------------------------------------------------------- locks

COUNT = '''
import fcntl, time
path, how, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
for _ in range(count):
    if how == 'link':  # as mail programs do where O_EXCL could not be trusted
        mine = f'{path}.{os.getpid()}'
        os.close(os.open(mine, os.O_CREAT | os.O_WRONLY))
        while True:
            try:
                os.link(mine, path + '.lock')
                break
            except FileExistsError:
                time.sleep(0.0005)
        assert os.stat(mine).st_nlink == 2
        os.unlink(mine)
    elif how in ('excl', 'mkdir'):
        while True:
            try:
                if how == 'mkdir':
                    os.mkdir(path + '.lock')
                else:
                    os.close(os.open(path + '.lock', os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                break
            except FileExistsError:
                time.sleep(0.0005)
    f = open(path, 'r+')
    if how == 'flock':
        fcntl.flock(f, fcntl.LOCK_EX)
    elif how == 'posix':
        fcntl.lockf(f, fcntl.LOCK_EX)
    n = int(f.read())
    f.seek(0)
    f.write(str(n + 1))
    f.flush()
    f.close()
    if how == 'mkdir':
        os.rmdir(path + '.lock')
    elif how in ('excl', 'link'):
        os.unlink(path + '.lock')
'''


@pytest.mark.parametrize('how', ['excl', 'link', 'mkdir', 'flock', 'posix'])
def test_a_counter_under_every_kind_of_lock(mnt, how):
    (mnt / 'counter').write_text('0')
    for process in [start(COUNT, mnt / 'counter', how, 100) for _ in range(4)]:
        finish(process)
    assert (mnt / 'counter').read_text() == '400' and os.listdir(mnt) == ['counter']


def test_locks_end_with_a_killed_owner(mnt):
    (mnt / 'f').write_bytes(b'x')
    for lock in ('flock', 'lockf'):
        owner = start(f"import fcntl, time\nf = open(sys.argv[1], 'r+')\nfcntl.{lock}(f, fcntl.LOCK_EX)\n"
                      "print('held', flush=True)\ntime.sleep(600)\n", mnt / 'f')
        assert owner.stdout.readline() == 'held\n'
        with open(mnt / 'f', 'r+') as f:
            with pytest.raises(BlockingIOError):
                getattr(fcntl, lock)(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            waiting = start(f"import fcntl\nfcntl.{lock}(open(sys.argv[1], 'r+'), fcntl.LOCK_EX)\n", mnt / 'f')
            time.sleep(0.05)
            assert waiting.poll() is None
            owner.kill()
            owner.wait()
            finish(waiting)
            getattr(fcntl, lock)(f, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ------------------------------------------------------------- Python's modules

def test_archives_and_databases_of_python(store):
    mnt = store.point
    data = {f'member-{i}': blob(i * 1001, i) for i in range(30)}
    with zipfile.ZipFile(mnt / 'a.zip', 'w', zipfile.ZIP_DEFLATED) as z:
        for name, content in data.items():
            z.writestr(name, content)
    with zipfile.ZipFile(mnt / 'a.zip', 'a') as z:
        z.writestr('late', b'late')
    for kind in ('dbm.dumb', 'dbm.ndbm', 'dbm.gnu'):
        try:
            module = __import__(kind, fromlist=['open'])
        except ImportError:
            assert kind == 'dbm.gnu'  # a package of its own in Debian
            continue
        with module.open(str(mnt / kind), 'c') as db:
            for i in range(500):
                db[f'key-{i}'] = f'value-{i}' * (i % 20)
            for i in range(0, 500, 3):
                del db[f'key-{i}']
    with shelve.open(str(mnt / 'shelf')) as s:
        s.update(data)
    with open(mnt / 'pickle', 'wb') as f:
        pickle.dump(data, f, protocol=4)
    box = mailbox.Maildir(mnt / 'mail')
    keys = [box.add(f'Subject: {i}\n\nbody {i}\n') for i in range(50)]
    mbox = mailbox.mbox(mnt / 'mbox')
    mbox.lock()
    for i in range(50):
        mbox.add(f'Subject: {i}\n\nbody {i}\n')
    mbox.flush()
    mbox.remove(0)
    mbox.close()
    shutil.make_archive(str(mnt / 'mail-archive'), 'gztar', mnt / 'mail')
    store.remount()
    with zipfile.ZipFile(mnt / 'a.zip') as z:
        assert z.testzip() is None and z.read('late') == b'late'
        assert all(z.read(name) == content for name, content in data.items())
    for kind in ('dbm.dumb', 'dbm.ndbm', 'dbm.gnu'):
        if glob.glob(str(mnt / f'{kind}*')):
            with __import__(kind, fromlist=['open']).open(str(mnt / kind), 'r') as db:
                assert len(db.keys()) == 333
                assert all(db[f'key-{i}'].decode() == f'value-{i}' * (i % 20) for i in range(500) if i % 3)
    assert dbm.whichdb(str(mnt / 'shelf')) is not None
    with shelve.open(str(mnt / 'shelf'), 'r') as s:
        assert dict(s) == data
    assert pickle.loads((mnt / 'pickle').read_bytes()) == data
    box = mailbox.Maildir(mnt / 'mail', create=False)
    assert sorted(box.keys()) == sorted(keys)
    assert len(mailbox.mbox(mnt / 'mbox', create=False)) == 49
    shutil.unpack_archive(mnt / 'mail-archive.tar.gz', mnt / 'unpacked')
    assert sorted(mailbox.Maildir(mnt / 'unpacked', create=False).keys()) == sorted(keys)


def bump(path, index, times):
    """In another process: a cell of a mapping that all share."""
    with open(path, 'r+b') as f, mmap.mmap(f.fileno(), 0) as shared:
        for _ in range(times):
            n, = struct.unpack_from('<Q', shared, 8 * index)
            struct.pack_into('<Q', shared, 8 * index, n + 1)


@pytest.mark.parametrize('method', ['fork', 'spawn'])
def test_shared_mapping_of_worker_processes(mnt, method):
    path, context = mnt / 'shared', multiprocessing.get_context(method)
    path.write_bytes(bytes(4096 * 3))
    workers = [context.Process(target=bump, args=(str(path), 100 * i, 2000)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(SECONDS_MAX)
        assert w.exitcode == 0
    cells = struct.unpack('<1536Q', path.read_bytes())
    assert {i: n for i, n in enumerate(cells) if n} == {100 * i: 2000 for i in range(4)}


def test_unlinked_mapping_is_shared_memory(mnt):
    """As multiprocessing's heap and many runtimes do in a folder of their choice."""
    fd, name = tempfile.mkstemp(dir=mnt)
    os.unlink(name)
    os.ftruncate(fd, 2 * MIB + 4096)
    shared = mmap.mmap(fd, 2 * MIB + 4096)
    os.close(fd)
    pid = os.fork()
    if pid == 0:
        shared[:10] = shared[-10:] = b'from child'
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert shared[:10] == shared[-10:] == b'from child' and not any(shared[10:-10])
    shared.close()


# ----------------------------------------------------------- watching and sockets

class Watch:
    """inotify(7), which Python has no module for."""
    EVENTS = {0x2: 'modify', 0x4: 'attrib', 0x8: 'close-write', 0x40: 'moved-from', 0x80: 'moved-to', 0x100: 'create',
              0x200: 'delete', 0x400: 'delete-self'}

    def __init__(self, path):
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self.fd >= 0 and libc.inotify_add_watch(self.fd, os.fsencode(path), sum(self.EVENTS)) >= 0

    def events(self):
        told = []
        while True:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return told
            while data:
                _, mask, _, length = struct.unpack_from('iIII', data)
                name = data[16:16 + length].rstrip(b'\0').decode()
                told.append((self.EVENTS.get(mask & 0xfff), name))
                data = data[16 + length:]


def test_changes_are_told_by_inotify(mnt):
    folder = mnt / 'folder'
    folder.mkdir()
    watch = Watch(folder)
    (folder / 'f').write_bytes(b'x')
    os.chmod(folder / 'f', 0o600)
    os.rename(folder / 'f', folder / 'g')
    os.link(folder / 'g', folder / 'h')
    os.unlink(folder / 'g')
    (folder / 'd').mkdir()
    (folder / 'd').rmdir()
    assert watch.events() == [
        ('create', 'f'), ('modify', 'f'), ('close-write', 'f'), ('attrib', 'f'), ('moved-from', 'f'), ('moved-to', 'g'),
        ('create', 'h'), ('delete', 'g'), ('create', 'd'), ('delete', 'd')]
    os.unlink(folder / 'h')
    folder.rmdir()
    assert ('delete-self', '') in watch.events()
    os.close(watch.fd)


def test_changes_by_another_process_are_told(mnt):
    watch = Watch(mnt)
    finish(start("open(sys.argv[1], 'wb').write(b'x')", mnt / 'theirs'))
    assert watch.events() == [('create', 'theirs'), ('modify', 'theirs'), ('close-write', 'theirs')]
    os.close(watch.fd)


def test_package_managers_exchange_and_link_trees(store):
    """A new tree beside the old one, symlink switched by rename, old tree removed while a process has it as its
    directory."""
    mnt = store.point
    for version in range(5):
        tree = mnt / f'v{version}'
        tree.mkdir()
        for i in range(20):
            if version:
                os.link(mnt / f'v{version - 1}' / f'{i}', tree / f'{i}')
            else:
                (tree / f'{i}').write_bytes(blob(5000, i))
        os.unlink(tree / f'{version}')
        (tree / f'{version}').write_bytes(b'version %d' % version)
        os.symlink(tree.name, mnt / 'current.new')
        os.rename(mnt / 'current.new', mnt / 'current')
        assert (mnt / 'current' / f'{version}').read_bytes() == b'version %d' % version
    standing = os.open(mnt / 'v0', os.O_RDONLY | os.O_DIRECTORY)
    for version in range(4):
        shutil.rmtree(mnt / f'v{version}')
    assert os.listdir(standing) == []
    with pytest.raises(FileNotFoundError):
        os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=standing)
    os.close(standing)
    store.remount()
    assert os.readlink(mnt / 'current') == 'v4' and sorted(os.listdir(mnt)) == ['current', 'v4']
    for i in range(5, 20):
        assert os.stat(mnt / 'v4' / f'{i}').st_nlink == 1 and (mnt / 'v4' / f'{i}').read_bytes() == blob(5000, i)


def test_programs_run_from_the_mount(mnt):
    shutil.copy(shutil.which('cat'), mnt / 'cat')
    (mnt / 'script').write_text(f'#!{mnt}/cat\nhello\n')
    os.chmod(mnt / 'script', 0o755)
    assert subprocess.run([mnt / 'script'], stdout=subprocess.PIPE, check=True).stdout == b'#!%s/cat\nhello\n' % os.fsencode(mnt)
    running = subprocess.Popen([mnt / 'cat'], stdin=subprocess.PIPE)
    time.sleep(0.05)
    with fails(errno.ETXTBSY):
        open(mnt / 'cat', 'r+b')
    shutil.copy(shutil.which('cat'), mnt / 'cat.new')
    os.rename(mnt / 'cat.new', mnt / 'cat')  # as an upgrade does
    running.stdin.close()
    assert running.wait(SECONDS_MAX) == 0
    (mnt / 'module.py').write_text('answer = 42\n')
    out = subprocess.run([sys.executable, '-c', 'import module; print(module.answer)'], cwd=mnt, stdout=subprocess.PIPE,
                         env={k: v for k, v in os.environ.items() if not k.startswith('PYTHON')}, check=True, text=True)
    assert out.stdout == '42\n' and os.listdir(mnt / '__pycache__')
