# SPDX-License-Identifier: Apache-2.0
"""Owners, permission bits and times, as POSIX and Linux have them, for root and for ordinary users."""
import errno
import fcntl
import mmap
import os
import stat
import struct
import subprocess
import time

import pytest

from calls import (EXCHANGE, KEEP_SIZE, NOBODY, PUNCH, UTIME_NOW, UTIME_OMIT, ZERO, as_user, fails, fallocate, rename,
                   tick, utimens)
from conftest import SECONDS_MAX

OTHER = 1234


def mode(path):
    return stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode)


def owner(path):
    st = os.stat(path, follow_symlinks=False)
    return st.st_uid, st.st_gid


@pytest.fixture
def open_mnt(mnt):
    os.chmod(mnt, 0o777)
    return mnt


# ----------------------------------------------------------------------- owners

def test_new_files_belong_to_the_caller(open_mnt):
    def make():
        os.umask(0)
        os.close(os.open(open_mnt / 'f', os.O_CREAT, 0o666))
        os.mkdir(open_mnt / 'd', 0o777)
        os.symlink('x', open_mnt / 's')
        os.mkfifo(open_mnt / 'p')
        os.mknod(open_mnt / 'k', 0o600 | stat.S_IFSOCK)
        fd = os.open(open_mnt, os.O_TMPFILE | os.O_RDWR)
        st = os.fstat(fd)
        return st.st_uid, st.st_gid
    assert as_user(make, NOBODY, OTHER) == (NOBODY, OTHER)
    for name in 'fdspk':
        assert owner(open_mnt / name) == (NOBODY, OTHER)
    assert mode(open_mnt / 'f') == 0o666 and mode(open_mnt / 'd') == 0o777 and mode(open_mnt / 's') == 0o777
    with fails(errno.EPERM):
        as_user(lambda: os.mknod(open_mnt / 'c', 0o600 | stat.S_IFCHR, os.makedev(1, 3)))


def test_owners_may_change_what_is_theirs(open_mnt):
    f = open_mnt / 'f'
    f.touch()
    os.chown(f, NOBODY, NOBODY)
    as_user(lambda: os.chmod(f, 0o640))
    as_user(lambda: os.chown(f, -1, OTHER), groups=[OTHER])
    assert (mode(f), owner(f)) == (0o640, (NOBODY, OTHER))
    for attempt in (lambda: os.chown(f, OTHER, -1), lambda: os.chown(f, -1, 77)):
        with fails(errno.EPERM):
            as_user(attempt, groups=[OTHER])
    for attempt in (lambda: os.chmod(f, 0o777), lambda: os.chown(f, OTHER, -1), lambda: os.utime(f, (1, 1))):
        with fails(errno.EPERM):
            as_user(attempt, OTHER, OTHER)
    os.chmod(f, 0o664)
    as_user(lambda: os.utime(f), NOBODY + 1, OTHER)  # a user who may write may set the times to now
    with fails(errno.EACCES):
        as_user(lambda: os.utime(f), NOBODY + 1, 99)
    os.symlink('f', open_mnt / 's')
    os.chown(open_mnt / 's', OTHER, OTHER, follow_symlinks=False)
    assert owner(open_mnt / 's') == (OTHER, OTHER) and owner(f) == (NOBODY, OTHER)


def test_sticky_directories(open_mnt):
    d = open_mnt / 'tmp'
    d.mkdir()
    os.chmod(d, 0o1777)
    for name, uid in (('mine', NOBODY), ('theirs', OTHER)):
        (d / name).touch()
        os.chown(d / name, uid, uid)
    (open_mnt / 'mine').mkdir()
    os.chown(open_mnt / 'mine', NOBODY, NOBODY)
    for attempt in (lambda: os.unlink(d / 'theirs'), lambda: os.rename(d / 'theirs', d / 'x'),
                    lambda: os.rename(d / 'mine', d / 'theirs'), lambda: rename(d / 'mine', d / 'theirs', EXCHANGE),
                    lambda: os.rename(d / 'theirs', open_mnt / 'mine' / 'x')):
        with fails(errno.EPERM):
            as_user(attempt)
    as_user(lambda: os.rename(d / 'mine', d / 'renamed'))
    as_user(lambda: os.unlink(d / 'renamed'))
    os.chown(d, NOBODY, NOBODY)
    as_user(lambda: os.unlink(d / 'theirs'))  # the directory's owner may


# ---------------------------------------------------------------- set-id bits

def test_setgid_directories_pass_their_group_on(open_mnt):
    d = open_mnt / 'd'
    d.mkdir()
    os.chown(d, 0, OTHER)
    os.chmod(d, 0o2777)

    def make():
        os.umask(0)
        os.close(os.open(d / 'f', os.O_CREAT, 0o666))
        os.close(os.open(d / 'g', os.O_CREAT, 0o2777))  # a user outside the group gets no setgid
        os.mkdir(d / 'sub', 0o755)
        os.symlink('x', d / 's')
    as_user(make)
    for name in ('f', 'g', 'sub', 's'):
        assert owner(d / name) == (NOBODY, OTHER)
    assert (mode(d / 'f'), mode(d / 'g'), mode(d / 'sub')) == (0o666, 0o777, 0o2755)
    as_user(lambda: os.mkdir(d / 'sub' / 'below'))
    assert owner(d / 'sub' / 'below') == (NOBODY, OTHER) and mode(d / 'sub' / 'below') & 0o2000


def test_setgid_ends_with_chmod_by_a_stranger_to_the_group(open_mnt):
    f = open_mnt / 'f'
    f.touch()
    os.chown(f, NOBODY, OTHER)
    as_user(lambda: os.chmod(f, 0o2755), groups=[OTHER])
    assert mode(f) == 0o2755
    as_user(lambda: os.chmod(f, 0o2711))
    assert mode(f) == 0o711


def write_through(flags):
    def write(path):
        fd = os.open(path, os.O_WRONLY | flags)
        area = mmap.mmap(-1, 4096)
        os.pwritev(fd, [area], 0)
        os.close(fd)
    return write


def on_fd(action, flags=os.O_RDWR):
    def act(path):
        fd = os.open(path, flags)
        try:
            action(fd)
        finally:
            os.close(fd)
    return act


def copy_into(fd):
    source = os.open(os.readlink(f'/proc/self/fd/{fd}') + '.source', os.O_RDONLY)
    assert os.copy_file_range(source, fd, 4096) == 4096
    os.close(source)


WRITES = {
    'write': write_through(0),
    'write append': write_through(os.O_APPEND),
    'write direct': write_through(os.O_DIRECT),
    'write sync': write_through(os.O_SYNC),
    'truncate': lambda path: os.truncate(path, 100),
    'truncate up': lambda path: os.truncate(path, 100000),
    'ftruncate': on_fd(lambda fd: os.ftruncate(fd, 1)),
    'open': on_fd(lambda fd: None, os.O_WRONLY | os.O_TRUNC),
    'punch': on_fd(lambda fd: fallocate(fd, PUNCH | KEEP_SIZE, 0, 4096)),
    'zero': on_fd(lambda fd: fallocate(fd, ZERO, 0, 4096)),
    'zero keep': on_fd(lambda fd: fallocate(fd, ZERO | KEEP_SIZE, 0, 4096)),
    'allocate': on_fd(lambda fd: fallocate(fd, 0, 0, 9000)),
    'allocate keep': on_fd(lambda fd: fallocate(fd, KEEP_SIZE, 0, 9000)),
    'copy': on_fd(copy_into),
}


@pytest.mark.parametrize('how', WRITES)
def test_set_id_bits_end_with_every_kind_of_write(open_mnt, how):
    f = open_mnt / 'f'
    (open_mnt / 'f.source').write_bytes(b's' * 4096)
    f.write_bytes(b'x' * 8192)
    os.chown(f, NOBODY, NOBODY)
    os.chmod(f, 0o6777)
    subprocess.run(['setcap', 'cap_net_raw+ep', str(f)], check=True, timeout=SECONDS_MAX)
    os.chmod(f, 0o6777)
    assert os.getxattr(f, 'security.capability') and mode(f) == 0o6777
    for uid, before, after in ((OTHER, 0o6777, 0o777), (NOBODY, 0o6777, 0o777), (NOBODY, 0o2766, 0o2766), (OTHER, 0o2766, 0o766), (0, 0o6777, 0o6777)):
        os.chmod(f, before)
        if uid:
            as_user(lambda: WRITES[how](f), uid, uid)
        else:
            subprocess.run(['setcap', 'cap_net_raw+ep', str(f)], check=True, timeout=SECONDS_MAX)
            WRITES[how](f)
        assert mode(f) == after, (uid, oct(before))
        if uid != NOBODY or before == 0o6777:
            with fails(errno.ENODATA):
                os.getxattr(f, 'security.capability')


def test_set_id_bits_and_a_change_of_owner(open_mnt):
    f = open_mnt / 'f'
    f.touch()
    for uid, gid in ((NOBODY, -1), (-1, OTHER), (0, 0)):
        for before, after in ((0o6777, 0o777), (0o6766, 0o2766)):  # not group-executable: a mark, no privilege
            os.chmod(f, before)
            os.chown(f, uid, gid)
            assert mode(f) == after
    subprocess.run(['setcap', 'cap_net_raw+ep', str(f)], check=True, timeout=SECONDS_MAX)
    os.chown(f, OTHER, OTHER)
    with fails(errno.ENODATA):
        os.getxattr(f, 'security.capability')
    os.chmod(f, 0o6777)
    as_user(lambda: os.chown(f, -1, OTHER), OTHER, OTHER)  # to the present owner
    assert mode(f) == 0o777
    os.chmod(f, 0o6777)
    as_user(lambda: os.chown(f, -1, -1), OTHER, OTHER)
    assert mode(f) == 0o777
    os.mkfifo(open_mnt / 'p')
    os.chmod(open_mnt / 'p', 0o6777)
    os.chown(open_mnt / 'p', OTHER, OTHER)
    assert mode(open_mnt / 'p') == 0o777
    (open_mnt / 'd').mkdir()
    os.chmod(open_mnt / 'd', 0o6777)
    os.chown(open_mnt / 'd', OTHER, OTHER)
    assert mode(open_mnt / 'd') == 0o6777


def test_writing_through_a_mapping_keeps_working_on_a_set_id_file(open_mnt):
    """As on a local file system the bits stay: only write(2) and the like end them."""
    f = open_mnt / 'f'
    f.write_bytes(bytes(8192))
    os.chmod(f, 0o4777)
    with open(f, 'r+b') as file, mmap.mmap(file.fileno(), 0) as m:
        m[:5] = b'hello'
        m.flush()
    assert f.read_bytes()[:5] == b'hello'


# ------------------------------------------------------------------------ times

def times(path):
    st = os.stat(path, follow_symlinks=False)
    return {'a': st.st_atime_ns, 'm': st.st_mtime_ns, 'c': st.st_ctime_ns}


def changed(path, action):
    """Which times of path the action changes."""
    before = times(path)
    tick()
    action()
    after = times(path)
    assert all(after[t] >= before[t] for t in before)
    return ''.join(t for t in before if after[t] != before[t])


def test_which_times_change(mnt):
    f, d = mnt / 'f', mnt / 'd'
    f.write_bytes(b'x' * 5000)
    d.mkdir()
    (mnt / 'target').touch()
    for action, of, expected in (
            (lambda: f.write_bytes(b'y'), f, 'mc'),
            (lambda: os.truncate(f, 1), f, 'mc'),  # to the present size
            (lambda: os.truncate(f, 5000), f, 'mc'),
            (lambda: os.chmod(f, 0o600), f, 'c'),
            (lambda: os.chown(f, 1, 1), f, 'c'),
            (lambda: os.setxattr(f, 'user.a', b'1'), f, 'c'),
            (lambda: os.removexattr(f, 'user.a'), f, 'c'),
            (lambda: os.link(f, mnt / 'g'), f, 'c'),
            (lambda: os.unlink(mnt / 'g'), f, 'c'),
            (lambda: os.rename(f, mnt / 'f2'), mnt, 'mc'),
            (lambda: os.rename(mnt / 'f2', f), mnt, 'mc'),
            (lambda: (os.rename(f, mnt / 'f2'), os.rename(mnt / 'f2', f)), f, 'c'),
            (lambda: os.rename(f, d / 'f'), d, 'mc'),
            (lambda: os.rename(d / 'f', f), d, 'mc'),
            (lambda: os.rename(f, d / 'f'), mnt, 'mc'),
            (lambda: rename(d / 'f', mnt / 'target', EXCHANGE), d, 'mc'),
            (lambda: rename(d / 'f', mnt / 'target', EXCHANGE), mnt, 'mc'),
            (lambda: [rename(d / 'f', mnt / 'target', EXCHANGE) for _ in range(2)], mnt / 'target', 'c'),
            (lambda: os.rename(d / 'f', f), mnt, 'mc'),
            (lambda: os.rename(mnt / 'target', f), mnt, 'mc'),
            (lambda: os.mkdir(d / 'e'), d, 'mc'),
            (lambda: os.rmdir(d / 'e'), d, 'mc'),
            (lambda: os.symlink('x', d / 's'), d, 'mc'),
            (lambda: os.mkfifo(d / 'p'), d, 'mc'),
            (lambda: os.unlink(d / 's'), d, 'mc'),
            (lambda: os.close(os.open(d, os.O_TMPFILE | os.O_RDWR)), d, ''),
            (lambda: os.stat(f), f, ''),
            (lambda: os.close(os.open(f, os.O_WRONLY)), f, ''),
            (lambda: on_fd(lambda fd: fallocate(fd, PUNCH | KEEP_SIZE, 0, 10))(f), f, 'mc'),
            (lambda: on_fd(lambda fd: fallocate(fd, ZERO, 0, 8000))(f), f, 'mc'),
    ):
        assert changed(of, action) == expected, (of, expected)
    assert changed(f, lambda: write_through(os.O_DIRECT)(f)) == 'mc'


def test_failures_change_no_times(mnt):
    (mnt / 'f').touch()
    (mnt / 'd').mkdir()

    def attempts():
        for attempt, error in ((lambda: os.mkdir(mnt / 'f'), errno.EEXIST), (lambda: os.unlink(mnt / 'd'), errno.EISDIR),
                               (lambda: os.rename(mnt / 'd', mnt / 'f'), errno.ENOTDIR),
                               (lambda: os.rmdir(mnt / 'x'), errno.ENOENT), (lambda: os.rename(mnt / 'f', mnt / 'f'), 0)):
            if error:
                with fails(error):
                    attempt()
            else:
                attempt()
    assert changed(mnt, attempts) == ''


def test_setting_times(mnt):
    f = mnt / 'f'
    f.touch()
    for seconds in (0, -1, -2208988800, 1 << 31, (1 << 32) + 5, 7258118400):  # 1970, 1969, 1900, 2038, 2106, 2200
        os.utime(f, ns=(seconds * 10**9 + 123456789, seconds * 10**9 + 999999999))
        for _ in range(2):
            st = os.stat(f)
            assert (st.st_atime_ns - 123456789, st.st_mtime_ns - 999999999) == (seconds * 10**9,) * 2
            os.sync()
    utimens(f, (5, UTIME_OMIT), (7, 11))
    assert os.stat(f).st_atime_ns == 7258118400 * 10**9 + 123456789 and os.stat(f).st_mtime_ns == 7 * 10**9 + 11
    before = times(f)
    tick()
    utimens(f, (0, UTIME_OMIT), (0, UTIME_OMIT))
    assert times(f) == before
    now = time.time_ns()
    utimens(f, (0, UTIME_NOW), (1, 0))
    assert abs(times(f)['a'] - now) < 60 * 10**9 and times(f)['m'] == 10**9 and abs(times(f)['c'] - now) < 60 * 10**9
    with fails(errno.EINVAL):
        utimens(f, (0, 10**9), (0, 0))
    os.symlink('f', mnt / 's')
    os.utime(mnt / 's', ns=(1, 2), follow_symlinks=False)
    assert (times(mnt / 's')['a'], times(mnt / 's')['m'], times(f)['m']) == (1, 2, 10**9)


def test_times_survive_a_remount(store):
    f = store.point / 'f'
    f.touch()
    os.utime(f, ns=(-5, (1 << 33) * 10**9 + 7))
    before = times(f)
    store.remount()
    assert times(f) == before


def test_relatime(mnt):
    f, d = mnt / 'f', mnt / 'd'
    d.mkdir()
    (d / 'e').touch()
    f.write_bytes(b'x')
    os.symlink('f', mnt / 's')
    reads = ((f, lambda: f.read_bytes()), (d, lambda: os.listdir(d)), (mnt / 's', lambda: os.readlink(mnt / 's')))
    for path, read in reads:
        tick()
        os.utime(path, ns=(1, times(path)['m']), follow_symlinks=False)
        assert changed(path, read) == 'a', path
        assert changed(path, read) == ''
    f.write_bytes(b'y')
    assert changed(f, f.read_bytes) == 'a'  # older than the content
    os.utime(f, ns=(time.time_ns() - 25 * 3600 * 10**9, 1))
    tick()
    assert changed(f, f.read_bytes) == 'a'  # a day old
    f.write_bytes(b'z')
    fd = os.open(f, os.O_RDONLY | os.O_NOATIME)
    assert changed(f, lambda: os.read(fd, 1)) == ''
    os.close(fd)


def remount(mnt, options):
    subprocess.run(['mount', '-i', '-o', f'remount,{options}', str(mnt)], check=True, timeout=SECONDS_MAX)


def test_noatime_and_nodiratime(make_store):
    store = make_store()
    mnt = store.mount('noatime')
    f, d = mnt / 'f', mnt / 'd'
    f.write_bytes(b'x')
    d.mkdir()
    for path, read in ((f, f.read_bytes), (d, lambda: os.listdir(d))):
        assert changed(path, read) == ''
    remount(mnt, 'strictatime')
    for path, read in ((f, f.read_bytes), (d, lambda: os.listdir(d))):
        for _ in range(2):
            assert changed(path, read) == 'a'
    remount(mnt, 'nodiratime')  # and relatime
    for path, read, expected in ((f, f.read_bytes, ('a', '')), (d, lambda: os.listdir(d), ('', ''))):
        os.utime(path, ns=(1, 1))
        tick()
        assert (changed(path, read), changed(path, read)) == expected
    remount(mnt, 'noatime')
    os.utime(f, ns=(1, 1))
    assert changed(f, f.read_bytes) == ''
    mnt = store.remount('nodiratime')
    os.utime(d, ns=(1, 1))
    for path, read, expected in ((f, f.read_bytes, 'a'), (d, lambda: os.listdir(d), '')):
        assert changed(path, read) == expected


def test_reads_change_nothing_while_read_only(make_store):
    mnt = make_store().mount('strictatime')
    f, d, s = mnt / 'f', mnt / 'd', mnt / 's'
    f.write_bytes(b'x')
    d.mkdir()
    os.symlink('f', s)
    reads = ((f, f.read_bytes), (d, lambda: os.listdir(d)), (s, lambda: os.readlink(s)))
    for path, read in reads:
        assert changed(path, read) == 'a'
    remount(mnt, 'ro,strictatime')
    for path, read in reads:
        assert changed(path, read) == ''
    remount(mnt, 'rw,strictatime')
    for path, read in reads:
        assert changed(path, read) == 'a'


def test_flags_of_files_are_none(mnt):
    getflags, setflags, getversion = 0x80086601, 0x40086602, 0x80087601
    getxattr, setxattr = 0x801c581f, 0x401c5820
    model = mnt / 'model'
    (mnt / 'd').mkdir()
    (mnt / 'f').touch()
    model.mkdir()
    os.setxattr(model, 'user.hitrain.optimizer', b'adamw lr=1e-3')
    for path in (mnt / 'f', mnt / 'd', mnt):
        fd = os.open(path, os.O_RDONLY)
        for ask, size in ((getflags, 4), (getversion, 4), (getxattr, 28)):
            answer = bytearray(b'\xff' * size)
            fcntl.ioctl(fd, ask, answer)
            assert answer == bytes(size)
        fcntl.ioctl(fd, setflags, bytes(4))
        fcntl.ioctl(fd, setxattr, bytes(28))
        for ask, value in ((setflags, struct.pack('I', 0x10)), (setxattr, struct.pack('I24x', 8)),
                           (setxattr, struct.pack('12xI12x', 5))):
            with fails(errno.EOPNOTSUPP):
                fcntl.ioctl(fd, ask, value)
        with fails(errno.ENOTTY):
            fcntl.ioctl(fd, 0x80046699, bytearray(4))
        os.close(fd)
    fd = os.open(model / '.hitrain' / 'stats', os.O_RDONLY)
    with fails(errno.ENOTTY):
        fcntl.ioctl(fd, getversion, bytearray(8))
    os.close(fd)
