# SPDX-License-Identifier: Apache-2.0
"""Plain files on a mount, as programs that know nothing of hitrain use them."""
import errno
import hashlib
import mmap
import os
import random
import shutil
import struct
import subprocess
import sys
import threading

import pytest

from calls import fails, run_threads, sync, tick
from conftest import MIB, ROOT, SECONDS_MAX

NOBODY = 65534


def sh(*args, **kw):
    kw.setdefault('timeout', SECONDS_MAX)
    return subprocess.run(list(map(str, args)), check=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          **kw)


def as_nobody(code, *args):
    """Runs Python code as another user; returns its output."""
    def drop():
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return subprocess.run([sys.executable, '-c', code, *map(str, args)], preexec_fn=drop, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=SECONDS_MAX).stdout.strip()


def blob(size, seed=1):
    return random.Random(seed).randbytes(size)


def digest(path):
    h = hashlib.sha256()
    with open(path, 'rb') as f:
        while part := f.read(MIB):
            h.update(part)
    return h.hexdigest()


# ------------------------------------------------------------------------- trees

def test_cp_a_copies_a_tree_with_all_it_has(store, tmp_path):
    tree = tmp_path / 'tree'
    (tree / 'deep' / 'er').mkdir(parents=True)
    (tree / 'deep' / 'file').write_bytes(blob(300_000))
    (tree / 'deep' / 'er' / 'empty').touch()
    os.link(tree / 'deep' / 'file', tree / 'linked')
    os.symlink('deep/file', tree / 'symbolic')
    os.symlink('/no/where', tree / 'dangling')
    os.mkfifo(tree / 'fifo')
    os.chmod(tree / 'deep' / 'file', 0o640)
    os.utime(tree / 'deep' / 'file', ns=(1_234_567_890_123_456_789, 1_234_567_891_987_654_321))
    copy = store.point / 'copy'
    sh('cp', '-a', tree, copy)
    assert not sh('diff', '-r', '--no-dereference', '--exclude=fifo', tree, copy).stdout
    for name in ('deep/file', 'deep', 'symbolic', 'fifo'):
        a, b = os.lstat(tree / name), os.lstat(copy / name)
        assert (a.st_mode, a.st_uid, a.st_gid, a.st_mtime_ns) == (b.st_mode, b.st_uid, b.st_gid, b.st_mtime_ns), name
    assert os.stat(copy / 'linked').st_ino == os.stat(copy / 'deep' / 'file').st_ino
    assert os.stat(copy / 'linked').st_nlink == 2
    assert os.readlink(copy / 'dangling') == '/no/where'
    store.remount()
    assert not sh('diff', '-r', '--no-dereference', '--exclude=fifo', tree, copy).stdout


def test_many_names_are_listed_once(mnt):
    folder = mnt / 'many'
    folder.mkdir()
    names = {f'name-{i:05d}-{"x" * (i % 90)}' for i in range(3000)}
    for name in names:
        (folder / name).touch()
    listed = os.listdir(folder)
    assert len(listed) == len(names) and set(listed) == names
    seen = []
    with os.scandir(folder) as entries:
        for i, entry in enumerate(entries):
            seen.append(entry.name)
            if i % 2:
                os.unlink(folder / entry.name)
    assert len(seen) == len(set(seen)) and set(seen) == names
    assert len(os.listdir(folder)) == len(names) // 2
    with fails(errno.ENOTEMPTY):
        os.rmdir(folder)
    shutil.rmtree(folder)
    assert os.listdir(mnt) == []


def test_names_that_cannot_be(mnt):
    (mnt / 'sub').mkdir()
    for make in (lambda p: p.mkdir(), lambda p: p.touch(), lambda p: os.symlink('x', p)):
        with fails(errno.ENAMETOOLONG):
            make(mnt / ('n' * 256))
        with pytest.raises(OSError) as e:
            make(mnt / '.hitrain' / 'x')
        assert e.value.errno in (errno.EPERM, errno.ENOENT)
        with fails(errno.EPERM):
            make(mnt / 'sub' / '.hitrain')
    (mnt / ('n' * 255)).touch()
    assert sorted(os.listdir(mnt)) == ['n' * 255, 'sub']


def test_rename_replaces_and_keeps_open_files(mnt):
    (mnt / 'a').write_bytes(b'new')
    (mnt / 'b').write_bytes(b'old')
    with open(mnt / 'b', 'rb') as old:
        os.rename(mnt / 'a', mnt / 'b')
        assert old.read() == b'old'
    assert (mnt / 'b').read_bytes() == b'new' and os.listdir(mnt) == ['b']
    (mnt / 'd').mkdir()
    os.rename(mnt / 'b', mnt / 'd' / 'c')
    os.rename(mnt / 'd', mnt / 'e')
    assert (mnt / 'e' / 'c').read_bytes() == b'new'
    with fails(errno.EINVAL):
        os.rename(mnt / 'e', mnt / 'e' / 'inside')


def test_unlinked_file_lives_while_open(mnt):
    data = blob(2 * MIB)
    with open(mnt / 'gone', 'w+b') as f:
        f.write(data)
        f.flush()
        os.unlink(mnt / 'gone')
        assert os.listdir(mnt) == []
        assert os.fstat(f.fileno()).st_nlink == 0
        f.write(b'more')
        f.seek(0)
        assert f.read() == data + b'more'


# ------------------------------------------------------------------------- bytes

def test_dd_with_and_without_page_cache(mnt, tmp_path):
    source = tmp_path / 'source'
    source.write_bytes(blob(5 * MIB + 12345))
    sh('dd', f'if={source}', f'of={mnt}/buffered', 'bs=64k')
    sh('dd', f'if={source}', f'of={mnt}/synced', 'bs=1M', 'conv=fsync')
    sh('dd', f'if={source}', f'of={mnt}/direct', 'bs=1M', 'count=5', 'oflag=direct')
    assert digest(source) == digest(mnt / 'buffered') == digest(mnt / 'synced')
    assert (mnt / 'direct').read_bytes() == source.read_bytes()[:5 * MIB]
    sh('dd', f'if={mnt}/direct', f'of={tmp_path}/back', 'bs=1M', 'iflag=direct')
    assert (tmp_path / 'back').read_bytes() == (mnt / 'direct').read_bytes()


def test_unaligned_direct_io(mnt):
    """Buffers that are not page-aligned arrive in two pieces, with odd tails."""
    data = blob(3 * MIB)
    area = mmap.mmap(-1, 4 * MIB)
    area[1024:1024 + len(data)] = data
    fd = os.open(mnt / 'f', os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        view = memoryview(area)[1024:1024 + len(data)]
        assert os.pwrite(fd, view, 0) == len(data)
        view.release()
        area[:] = b'\0' * len(area)
        view = memoryview(area)[512:512 + len(data)]
        assert os.preadv(fd, [view], 0) == len(data)
        assert bytes(view) == data
        view.release()
    finally:
        os.close(fd)


def test_shared_mapping_reads_and_writes(mnt):
    data = blob(3 * MIB, 2)
    (mnt / 'm').write_bytes(data)
    with open(mnt / 'm', 'r+b') as f:
        with mmap.mmap(f.fileno(), 0) as m:
            assert m[:] == data
            m[MIB:MIB + 5] = b'hello'
            m.flush()
            assert os.pread(f.fileno(), 5, MIB) == b'hello'
            m[0:5] = b'later'
    with open(mnt / 'm', 'rb') as f:
        assert f.read(5) == b'later'
        with mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as p:
            p[0:5] = b'ownly'
            assert os.pread(f.fileno(), 5, 0) == b'later'


def test_mapping_survives_unmount(store):
    with open(store.point / 'm', 'w+b') as f:
        f.truncate(MIB)
        with mmap.mmap(f.fileno(), 0) as m:
            m[-4:] = b'last'
    store.remount()
    assert (store.point / 'm').read_bytes()[-4:] == b'last'


def test_truncate_and_holes(mnt):
    data = blob(200_000)
    (mnt / 't').write_bytes(data)
    os.truncate(mnt / 't', 100_001)
    os.truncate(mnt / 't', 300_000)
    assert (mnt / 't').read_bytes() == data[:100_001] + bytes(199_999)
    with open(mnt / 't', 'w') as f:
        assert os.fstat(f.fileno()).st_size == 0
    with open(mnt / 'sparse', 'wb') as f:
        f.seek(50 * MIB)
        f.write(b'end')
    assert os.stat(mnt / 'sparse').st_size == 50 * MIB + 3
    assert os.stat(mnt / 'sparse').st_blocks * 512 < 4 * MIB
    with open(mnt / 'sparse', 'rb') as f:
        assert os.lseek(f.fileno(), 0, os.SEEK_DATA) > 40 * MIB
        assert os.lseek(f.fileno(), 0, os.SEEK_HOLE) == 0
        assert f.read(10) == bytes(10)


def test_append_and_fallocate(mnt):
    for part in (b'one', b'two'):
        with open(mnt / 'log', 'ab') as f:
            f.write(part)
    assert (mnt / 'log').read_bytes() == b'onetwo'
    (mnt / 'p').write_bytes(b'x' * (3 * MIB))
    sh('fallocate', '-p', '-o', MIB, '-l', MIB, mnt / 'p')
    assert (mnt / 'p').read_bytes() == b'x' * MIB + bytes(MIB) + b'x' * MIB
    sh('fallocate', '-z', '-o', 0, '-l', 5, mnt / 'p')
    assert (mnt / 'p').read_bytes()[:8] == bytes(5) + b'xxx'
    with open(mnt / 'q', 'wb') as f:
        os.posix_fallocate(f.fileno(), 0, 100_000)
    assert (mnt / 'q').read_bytes() == bytes(100_000)


def test_larger_than_memory(store):
    """Four times the DRAM tier, written and read back by several programs at once."""
    data = {i: blob(32 * MIB, i) for i in range(4)}
    errors = []

    def work(i):
        try:
            (store.point / str(i)).write_bytes(data[i])
            assert (store.point / str(i)).read_bytes() == data[i]
        except Exception as e:  # noqa: B902 - shown by the test
            errors.append(e)
    threads = [threading.Thread(target=work, args=(i,)) for i in data]
    run_threads(threads)
    assert not errors
    store.remount('dram=8M')
    for i in data:
        assert digest(store.point / str(i)) == hashlib.sha256(data[i]).hexdigest()


# -------------------------------------------------------------------- attributes

def test_statfs_says_4096(mnt):
    before = os.statvfs(mnt)
    assert before.f_bsize == before.f_frsize == 4096 and before.f_namemax == 255
    assert 128 * MIB < before.f_blocks * 4096 <= 256 * MIB
    (mnt / 'f').write_bytes(blob(20 * MIB))
    os.sync()
    sync(mnt / 'f')
    after = os.statvfs(mnt)
    assert before.f_bavail - after.f_bavail >= 20 * MIB // 4096
    assert os.stat(mnt / 'f').st_blocks * 512 >= 20 * MIB


def test_extended_attributes(mnt):
    f = mnt / 'f'
    f.touch()
    os.setxattr(f, 'user.one', b'1')
    os.setxattr(f, 'user.two', b'\0\1\2')
    assert sorted(os.listxattr(f)) == ['user.one', 'user.two']
    assert os.getxattr(f, 'user.two') == b'\0\1\2'
    for flag, name, error in ((os.XATTR_CREATE, 'user.one', errno.EEXIST), (os.XATTR_REPLACE, 'user.x', errno.ENODATA)):
        with fails(error):
            os.setxattr(f, name, b'', flag)
    os.removexattr(f, 'user.one')
    assert os.listxattr(f) == ['user.two']
    os.setxattr(mnt, 'trusted.t', b'x')
    assert os.getxattr(mnt, 'trusted.t') == b'x'


def test_permissions_hold_for_another_user(mnt):
    os.chmod(mnt, 0o755)
    (mnt / 'secret').write_bytes(b's')
    os.chmod(mnt / 'secret', 0o600)
    (mnt / 'open').write_bytes(b'o')
    (mnt / 'theirs').mkdir()
    os.chown(mnt / 'theirs', NOBODY, NOBODY)
    code = '''
import os, sys
os.chdir(sys.argv[1])
def attempt(f):
    try:
        f()
        return 'ok'
    except OSError as e:
        return str(e.errno)
print(attempt(lambda: open('secret').read()), attempt(lambda: open('open').read()),
      attempt(lambda: open('open', 'w')), attempt(lambda: open('new', 'w')), attempt(lambda: os.unlink('open')),
      attempt(lambda: open('theirs/new', 'w')), attempt(lambda: os.setxattr('open', 'user.x', b'')),
      attempt(lambda: os.chmod('open', 0o777)), attempt(lambda: open('.hitrain/ctl', 'w')),
      attempt(lambda: open('.hitrain/stats').read()))
'''
    e = str(errno.EACCES)
    assert as_nobody(code, mnt).split() == [e, 'ok', e, e, e, 'ok', e, str(errno.EPERM), e, 'ok']
    assert os.stat(mnt / 'theirs' / 'new').st_uid == NOBODY


def test_setuid_ends_with_a_write(mnt):
    os.chmod(mnt, 0o777)
    f = mnt / 'f'
    f.write_bytes(b'x')
    os.chown(f, NOBODY, NOBODY)
    for how in ("open(sys.argv[1], 'ab').write(b'y')", "os.truncate(sys.argv[1], 1)", "open(sys.argv[1], 'wb')"):
        os.chmod(f, 0o6777)
        assert os.stat(f).st_mode & 0o6000 == 0o6000
        assert as_nobody(f'import os, sys\n{how}', f) == ''
        assert os.stat(f).st_mode & 0o7777 == 0o777, how
    os.chmod(f, 0o6755)
    os.chown(f, 0, 0)
    assert os.stat(f).st_mode & 0o7777 == 0o755


def test_umask_and_default_access_list(mnt):
    before = os.umask(0o027)
    try:
        (mnt / 'f').touch()
        (mnt / 'd').mkdir()
        assert os.stat(mnt / 'f').st_mode & 0o777 == 0o640 and os.stat(mnt / 'd').st_mode & 0o777 == 0o750
        # user::rwx user:65534:rwx group::r-x mask::rwx other::---, as the kernel writes it
        entries = [(1, 7, 0xffffffff), (2, 7, NOBODY), (4, 5, 0xffffffff), (16, 7, 0xffffffff), (32, 0, 0xffffffff)]
        acl = struct.pack('<I', 2) + b''.join(struct.pack('<HHI', *e) for e in entries)
        os.setxattr(mnt / 'd', 'system.posix_acl_default', acl)
        os.setxattr(mnt / 'd', 'system.posix_acl_access', acl)
        (mnt / 'd' / 'f').write_bytes(b'x')
        (mnt / 'd' / 'e').mkdir()
    finally:
        os.umask(before)
    os.chmod(mnt, 0o755)
    assert os.stat(mnt / 'd' / 'f').st_mode & 0o777 == 0o660  # the mask in place of the group
    assert os.getxattr(mnt / 'd' / 'e', 'system.posix_acl_default') == acl
    assert as_nobody("import sys; print(open(sys.argv[1] + '/d/f', 'r+').read())", mnt) == 'x'


def test_times(mnt):
    f = mnt / 'f'
    f.write_bytes(b'1')
    before = os.stat(f)
    tick()
    with open(f, 'ab') as out:
        out.write(b'2')
    after = os.stat(f)
    assert after.st_mtime_ns > before.st_mtime_ns and after.st_ctime_ns > before.st_ctime_ns
    folder = os.stat(mnt)
    tick()
    (mnt / 'g').touch()
    assert os.stat(mnt).st_mtime_ns > folder.st_mtime_ns
    os.utime(f, ns=(1, 2))
    assert (os.stat(f).st_atime_ns, os.stat(f).st_mtime_ns) == (1, 2)


# ------------------------------------------------------------- programs, crashes

def test_compile_on_the_mount(mnt):
    sh('cp', '-r', ROOT / 'tiering' / 'base', ROOT / 'include', mnt)
    os.mkdir(mnt / 'tiering')
    os.rename(mnt / 'base', mnt / 'tiering' / 'base')
    for name in ('base.c', 'buf.c'):
        sh('gcc', '-std=gnu11', '-D_GNU_SOURCE', '-Wno-error', '-Iinclude', '-I.', '-c', f'tiering/base/{name}', '-o',
           f'{name}.o', cwd=mnt)
    sh('ar', 'rcs', 'lib.a', 'base.c.o', 'buf.c.o', cwd=mnt)
    assert 'ht_buf_put' in sh('nm', 'lib.a', cwd=mnt).stdout


def test_fsync_survives_kill(store):
    mnt, data = store.point, blob(3 * MIB + 17)
    with open(mnt / 'kept', 'wb') as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.mkdir(mnt / 'd')
    with open(mnt / 'd' / 'replaced.new', 'wb') as f:
        f.write(b'whole')
        f.flush()
        os.fsync(f.fileno())
    os.rename(mnt / 'd' / 'replaced.new', mnt / 'd' / 'replaced')
    sync(mnt / 'd')
    (mnt / 'maybe').write_bytes(data)
    store.kill()
    with fails(errno.ENOTCONN):
        os.listdir(mnt)
    store.mount()  # over the dead mount
    assert (mnt / 'kept').read_bytes() == data
    assert (mnt / 'd' / 'replaced').read_bytes() == b'whole'
    if (mnt / 'maybe').exists():  # never synced: any part may be there, but no foreign bytes
        held = (mnt / 'maybe').read_bytes()
        assert all(a in (b, 0) for a, b in zip(held, data))


def test_full_store_can_be_emptied(make_store):
    store = make_store('64M')
    mnt = store.mount('dram=16M')
    written = 0
    with pytest.raises(OSError) as e:
        for i in range(100):
            with open(mnt / f'f{i}', 'wb') as f:
                f.write(blob(MIB, i))
                f.flush()
                os.fsync(f.fileno())
            written += 1
    assert e.value.errno == errno.ENOSPC
    assert written > 20
    for i in range(written):
        assert (mnt / f'f{i}').read_bytes() == blob(MIB, i)
    os.truncate(mnt / 'f0', 10)
    assert (mnt / 'f0').read_bytes() == blob(MIB, 0)[:10]
    for name in os.listdir(mnt):
        os.unlink(mnt / name)
    sync(mnt)
    for i in range(written // 2):
        (mnt / f'g{i}').write_bytes(blob(MIB, i))
    for i in range(written // 2):
        assert (mnt / f'g{i}').read_bytes() == blob(MIB, i)


def test_one_worker_thread(make_store):
    store = make_store()
    mnt = store.mount('dram=16M', flags=('-s',))
    data = {i: blob(8 * MIB, i) for i in range(4)}
    threads = [threading.Thread(target=lambda i=i: (mnt / str(i)).write_bytes(data[i])) for i in data]
    run_threads(threads)
    for i in data:
        assert (mnt / str(i)).read_bytes() == data[i]


def test_read_only_mount(store):
    (store.point / 'f').write_bytes(b'x')
    mnt = store.remount('ro')
    assert (mnt / 'f').read_bytes() == b'x'
    with fails(errno.EROFS):
        (mnt / 'g').touch()


def test_copy_file_range(mnt):
    data = blob(2 * MIB)
    (mnt / 'a').write_bytes(data)
    with open(mnt / 'a', 'rb') as a, open(mnt / 'b', 'wb') as b:
        left = len(data)
        while left:
            n = os.copy_file_range(a.fileno(), b.fileno(), left)
            assert n > 0
            left -= n
    assert (mnt / 'b').read_bytes() == data
