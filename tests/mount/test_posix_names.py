# SPDX-License-Identifier: Apache-2.0
"""Names: valid ones, links, renaming, files without a name, file handles, as POSIX and Linux have them."""
import errno
import os
import stat
import subprocess

import pytest

from calls import AT_EMPTY_PATH, AT_FDCWD, Handle, call, close_dead, drop_caches, fails, link_fd, sync, tick
from conftest import MIB, SECONDS_MAX, wait_for


# ------------------------------------------------------------------------ limits

def test_lengths_of_names_and_paths(mnt):
    name = 'n' * 255
    for make in (lambda p: os.close(os.open(p, os.O_CREAT | os.O_EXCL)), os.mkdir, lambda p: os.symlink('t', p),
                 os.mkfifo, lambda p: os.link(mnt / 'f', p), lambda p: os.rename(mnt / 'g', p)):
        (mnt / 'f').touch()
        (mnt / 'g').touch()
        with fails(errno.ENAMETOOLONG):
            make(mnt / (name + 'n'))
        make(mnt / name)
        assert name in os.listdir(mnt)
        (os.rmdir if os.path.isdir(mnt / name) else os.unlink)(mnt / name)
    for look in (os.stat, os.unlink, os.rmdir, os.listxattr):
        with fails(errno.ENAMETOOLONG):
            look(mnt / (name + 'n'))
    os.chdir(mnt)
    try:
        path = '/'.join(['d' * 254] * 15)  # and a slash each: 3825 bytes
        os.makedirs(path)
        longest = path + '/' + 'f' * (4095 - len(path) - 1 - 256) + '/' + 'g' * 255
        os.mkdir(os.path.dirname(longest))
        assert len(longest) == 4095
        with open(longest, 'w') as f:
            f.write('deep')
        with open(longest) as f:
            assert f.read() == 'deep'
        with fails(errno.ENAMETOOLONG):
            os.stat(longest + '/')
    finally:
        os.chdir('/')


def test_names_are_any_bytes(mnt):
    names = [bytes([i]) for i in range(1, 256) if i not in (0x2f, 0x2e)] + [b'...', b'\xff\xfe', b'a' * 255]
    for name in names:
        os.mkdir(os.fsencode(mnt) + b'/' + name)
    assert sorted(os.listdir(os.fsencode(mnt))) == sorted(names)
    for name in names:
        os.rmdir(os.fsencode(mnt) + b'/' + name)


def test_symbolic_links(mnt):
    os.symlink('t' * 4095, mnt / 'long')
    assert os.readlink(mnt / 'long') == 't' * 4095 and os.lstat(mnt / 'long').st_size == 4095
    with fails(errno.ENAMETOOLONG):
        os.symlink('t' * 4096, mnt / 'longer')
    with fails(errno.ENOENT):
        os.symlink('', mnt / 'nothing')
    os.symlink('b', mnt / 'a')
    os.symlink('a', mnt / 'b')
    for look in (os.stat, os.listdir, lambda p: open(p, 'w'), os.chdir, lambda p: os.stat(p / 'x')):
        with fails(errno.ELOOP):
            look(mnt / 'a')
    (mnt / 'f').touch()
    last = 'f'
    for i in range(41):
        os.symlink(last, mnt / f's{i}')
        last = f's{i}'
    os.stat(mnt / 's39')
    with fails(errno.ELOOP):
        os.stat(mnt / 's40')
    with fails(errno.ELOOP):
        os.open(mnt / 's0', os.O_RDONLY | os.O_NOFOLLOW)
    with fails(errno.EINVAL):
        os.readlink(mnt / 'f')
    os.symlink('nowhere', mnt / 'dangling')
    with fails(errno.EEXIST):
        os.open(mnt / 'dangling', os.O_CREAT | os.O_EXCL)
    os.close(os.open(mnt / 'dangling', os.O_CREAT | os.O_WRONLY))
    assert os.path.isfile(mnt / 'nowhere')


# ---------------------------------------------------------------------- renaming

def test_open_files_outlive_their_names(store):
    mnt = store.point
    free = os.statvfs(mnt).f_bavail
    (mnt / 'a').write_bytes(b'a' * MIB)
    (mnt / 'b').write_bytes(b'b' * MIB)
    fds = [os.open(mnt / name, os.O_RDWR) for name in 'ab']
    os.rename(mnt / 'a', mnt / 'b')
    os.unlink(mnt / 'b')
    for fd, byte in zip(fds, b'ab'):
        st = os.fstat(fd)
        assert st.st_nlink == 0 and st.st_size == MIB
        os.ftruncate(fd, 2 * MIB)
        os.pwrite(fd, b'end', 2 * MIB - 3)
        os.fchmod(fd, 0o600)
        os.fsync(fd)
        assert os.pread(fd, 2 * MIB, 0) == bytes([byte]) * MIB + bytes(MIB - 3) + b'end'
        with fails(errno.ENOENT):
            link_fd(fd, mnt / 'again')
    dir_fd = os.open(mnt, os.O_RDONLY)
    os.fsync(dir_fd)
    os.close(dir_fd)
    store.kill()
    close_dead(*fds)
    store.mount()
    assert os.listdir(mnt) == []
    assert free - os.statvfs(mnt).f_bavail < 16
    store.unmount()


# ------------------------------------------------------------- without a name

def test_tmpfile(mnt):
    fd = os.open(mnt, os.O_TMPFILE | os.O_RDWR, 0o640)
    st = os.fstat(fd)
    assert st.st_nlink == 0 and stat.S_IMODE(st.st_mode) == 0o640 and os.listdir(mnt) == []
    assert os.write(fd, b'content') == 7
    link_fd(fd, mnt / 'named')
    assert os.fstat(fd).st_nlink == 1 and (mnt / 'named').read_bytes() == b'content'
    os.link(mnt / 'named', mnt / 'second')
    os.unlink(mnt / 'named')
    os.close(fd)
    assert (mnt / 'second').read_bytes() == b'content'
    fd = os.open(mnt, os.O_TMPFILE | os.O_WRONLY)
    call('linkat', fd, b'', AT_FDCWD, os.fsencode(mnt / 'empty path'), AT_EMPTY_PATH)
    os.close(fd)
    fd = os.open(mnt, os.O_TMPFILE | os.O_WRONLY | os.O_EXCL)  # never to be named
    with fails(errno.ENOENT):
        link_fd(fd, mnt / 'no')
    os.close(fd)
    fd = os.open(mnt, os.O_TMPFILE | os.O_WRONLY)
    (mnt / 'd').mkdir()
    with fails(errno.EEXIST):
        link_fd(fd, mnt / 'second')
    link_fd(fd, mnt / 'd' / 'elsewhere')
    os.unlink(mnt / 'd' / 'elsewhere')
    with fails(errno.ENOENT):
        link_fd(fd, mnt / 'again')
    os.close(fd)


@pytest.mark.parametrize('below_root', [False, True])
def test_tmpfile_that_is_never_named_leaves_nothing(store, below_root):
    mnt = store.point / 'd'
    mnt.mkdir()
    if below_root:
        os.setxattr(mnt, 'user.hitrain.optimizer', b'adamw')
    free = os.statvfs(mnt).f_bavail
    for end in ('close', 'kill'):
        fd = os.open(mnt, os.O_TMPFILE | os.O_RDWR)
        os.write(fd, b'x' * MIB)
        os.fsync(fd)
        assert os.statvfs(mnt).f_bavail <= free - MIB // 4096
        if end == 'kill':
            store.kill()
            close_dead(fd)
            store.mount()
        else:
            os.close(fd)
        assert os.listdir(mnt) == []
        wait_for(lambda: sync(mnt) or free - os.statvfs(mnt).f_bavail < 16, 'its space is free')


@pytest.mark.parametrize('below_root', [False, True])
def test_tmpfile_synced_then_named_then_crash(store, below_root):
    mnt = store.point / 'd'
    mnt.mkdir()
    if below_root:
        os.setxattr(mnt, 'user.hitrain.optimizer', b'adamw')
    fd = os.open(mnt, os.O_TMPFILE | os.O_RDWR)
    os.write(fd, b'x' * MIB)
    os.fsync(fd)
    link_fd(fd, mnt / 'named')
    dir_fd = os.open(mnt, os.O_RDONLY)
    os.fsync(dir_fd)
    store.kill()
    close_dead(fd, dir_fd)
    store.mount()
    assert (mnt / 'named').read_bytes() == b'x' * MIB
    assert os.stat(mnt / 'named').st_nlink == 1


def test_tmpfile_stays_within_its_model(mnt):
    (mnt / 'model').mkdir()
    os.setxattr(mnt / 'model', 'user.hitrain.optimizer', b'adamw')
    for inside, outside in ((mnt / 'model', mnt), (mnt, mnt / 'model')):
        fd = os.open(inside, os.O_TMPFILE | os.O_WRONLY)
        with fails(errno.EXDEV):
            link_fd(fd, outside / 'g')
        link_fd(fd, inside / 'f')
        os.close(fd)
    fd = os.open(mnt / 'model', os.O_TMPFILE | os.O_RDWR)
    os.write(fd, b'text')
    link_fd(fd, mnt / 'model' / 'aborted')
    (mnt / 'model' / '.hitrain' / 'ctl').write_text('abort\n')
    assert not os.path.exists(mnt / 'model' / 'aborted')
    with fails(errno.ESTALE):
        os.fsync(fd)
    os.close(fd)


# ---------------------------------------------------------------------- handles

def test_file_handles_outlive_the_kernels_memory(store):
    mnt = store.point
    (mnt / 'd' / 'e').mkdir(parents=True)
    (mnt / 'd' / 'e' / 'f').write_bytes(b'content')
    os.symlink('f', mnt / 'd' / 's')
    handles = {p: Handle(mnt / p) for p in ('d', 'd/e', 'd/e/f', '.')}
    inos = {p: os.stat(mnt / p).st_ino for p in handles}
    os.rename(mnt / 'd', mnt / 'moved')
    for remount in (False, True):
        if remount:
            store.remount()
        fd = os.open(mnt, os.O_RDONLY)
        for p in ('d/e/f', '.', 'd/e', 'd'):
            drop_caches()
            found = handles[p].open(fd)
            assert os.fstat(found).st_ino == inos[p]
            if p == 'd/e/f':
                assert os.read(found, 100) == b'content'
            elif p != '.':
                assert os.stat('..', dir_fd=found).st_ino == inos[os.path.dirname(p) or '.']
            if p == 'd/e':
                assert os.readlink(f'/proc/self/fd/{found}') == str(mnt / 'moved' / 'e')
            os.close(found)
        os.close(fd)
    fd = os.open(mnt, os.O_RDONLY)
    os.unlink(mnt / 'moved' / 'e' / 'f')
    for i in range(100):
        (mnt / f'new{i}').touch()
    drop_caches()
    with fails(errno.ESTALE):
        handles['d/e/f'].open(fd)
    os.close(fd)


def test_a_handle_of_what_a_crash_took_opens_nothing_else(store):
    """Numbers that never became durable are not used again."""
    mnt = store.point
    handles = []
    for i in range(50):
        (mnt / f'lost{i}').write_bytes(b'lost')
        handles.append(Handle(mnt / f'lost{i}'))
    store.crash()
    for i in range(200):
        (mnt / f'secret{i}').write_bytes(b'secret')
    fd = os.open(mnt, os.O_RDONLY)
    for handle in handles:
        try:
            found = handle.open(fd)
        except OSError as e:
            assert e.errno == errno.ESTALE
        else:
            assert os.read(found, 10) in (b'lost', b'')
            os.close(found)
    os.close(fd)


def test_file_handle_of_an_open_deleted_file(mnt):
    (mnt / 'f').write_bytes(b'text')
    handle = Handle(mnt / 'f')
    mount_fd = os.open(mnt, os.O_RDONLY)
    with open(mnt / 'f', 'rb'):
        os.unlink(mnt / 'f')
        drop_caches()
        fd = handle.open(mount_fd)
        assert os.read(fd, 10) == b'text'
        os.close(fd)

    def is_stale():
        try:
            os.close(handle.open(mount_fd))
        except OSError as e:
            return e.errno == errno.ESTALE
    wait_for(is_stale, 'the last close has arrived')
    os.close(mount_fd)


def test_file_handles_do_not_lead_into_the_hidden_tree(mnt):
    (mnt / 'model').mkdir()
    os.setxattr(mnt / 'model', 'user.hitrain.optimizer', b'adamw')
    handle = Handle(mnt / 'model' / '.hitrain' / 'ctl')
    mount_fd = os.open(mnt, os.O_RDONLY)
    drop_caches()
    with fails(errno.ESTALE):
        handle.open(mount_fd)
    os.close(mount_fd)


# --------------------------------------------------------------- special files

def test_special_files(mnt):
    os.mkfifo(mnt / 'fifo')
    os.mknod(mnt / 'null', 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.mknod(mnt / 'disk', 0o600 | stat.S_IFBLK, os.makedev(240, 1048575))
    os.mknod(mnt / 'socket', 0o600 | stat.S_IFSOCK)
    os.mknod(mnt / 'plain', 0o600 | stat.S_IFREG)
    drop_caches()
    assert os.stat(mnt / 'null').st_rdev == os.makedev(1, 3)
    assert os.stat(mnt / 'disk').st_rdev == os.makedev(240, 1048575)
    assert (mnt / 'null').read_bytes() == b'' and (mnt / 'null').write_bytes(b'x') == 1
    reader = subprocess.Popen(['cat', str(mnt / 'fifo')], stdout=subprocess.PIPE)
    (mnt / 'fifo').write_bytes(b'through')
    assert reader.communicate(timeout=SECONDS_MAX)[0] == b'through'
    for name in ('fifo', 'null', 'disk', 'socket', 'plain'):
        os.link(mnt / name, mnt / f'{name}2')
        os.rename(mnt / f'{name}2', mnt / f'{name}3')
        os.unlink(mnt / name)
    tick()
    assert sorted(os.listdir(mnt)) == ['disk3', 'fifo3', 'null3', 'plain3', 'socket3']
