# SPDX-License-Identifier: Apache-2.0
"""Extended attributes and access lists, as Linux has them."""
import errno
import os
import stat
import struct
import subprocess

import pytest

from calls import NOBODY, as_user, fails
from conftest import SECONDS_MAX

OTHER = 1234
VALUE_MAX = 65536


def sh(*args):
    return subprocess.run(list(map(str, args)), check=True, stdout=subprocess.PIPE, text=True,
                          timeout=SECONDS_MAX).stdout


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


# ------------------------------------------------------------------- attributes

def test_size_limits(mnt):
    f = mnt / 'f'
    f.touch()
    os.setxattr(f, 'user.' + 'n' * 250, b'x')
    with fails(errno.ERANGE):
        os.setxattr(f, 'user.' + 'n' * 251, b'x')
    os.setxattr(f, 'user.large', b'v' * VALUE_MAX)
    with fails(errno.E2BIG):
        os.setxattr(f, 'user.larger', b'v' * (VALUE_MAX + 1))
    assert os.getxattr(f, 'user.large') == b'v' * VALUE_MAX
    for i in range(100):
        try:
            os.setxattr(f, f'user.large{i}', b'v' * VALUE_MAX)
        except OSError as e:
            assert e.errno == errno.ENOSPC
            break
    assert 10 < i < 20  # a MiB for each inode
    for name in os.listxattr(f):
        os.removexattr(f, name)
    (mnt / 'g').touch()
    for i in range(1000):
        try:
            os.setxattr(mnt / 'g', f'user.{i:0250}', b'')
        except OSError as e:
            assert e.errno == errno.ENOSPC
            break
    assert len(os.listxattr(mnt / 'g')) == i > 240  # a list has at most 64 KiB


def test_namespaces(mnt):
    os.chmod(mnt, 0o777)
    f = mnt / 'f'
    f.touch()
    os.symlink('f', mnt / 's')
    os.mkfifo(mnt / 'p')
    for path in (mnt / 's', mnt / 'p'):
        with fails(errno.EPERM):
            os.setxattr(path, 'user.a', b'x', follow_symlinks=False)
        os.setxattr(path, 'trusted.a', b'x', follow_symlinks=False)
        os.setxattr(path, 'security.a', b'x', follow_symlinks=False)
        assert sorted(os.listxattr(path, follow_symlinks=False)) == ['security.a', 'trusted.a']
    for name in ('plain', 'users.a', 'system.a', '.a'):
        for attempt in (lambda: os.setxattr(f, name, b'x'), lambda: os.getxattr(f, name), lambda: os.removexattr(f, name)):
            with fails(errno.EOPNOTSUPP):
                attempt()
    os.setxattr(f, 'trusted.t', b'secret')
    os.setxattr(f, 'user.u', b'open')
    os.chmod(f, 0o644)
    assert sorted(os.listxattr(f)) == ['trusted.t', 'user.u']
    assert as_user(lambda: os.listxattr(f)) == ['user.u']
    with fails(errno.ENODATA):
        as_user(lambda: os.getxattr(f, 'trusted.t'))
    for attempt, error in ((lambda: os.setxattr(f, 'trusted.t', b''), errno.EPERM),
                           (lambda: os.setxattr(f, 'security.x', b''), errno.EPERM),
                           (lambda: os.setxattr(f, 'user.x', b''), errno.EACCES),
                           (lambda: os.removexattr(f, 'user.u'), errno.EACCES)):
        with fails(error):
            as_user(attempt)
    os.chmod(f, 0o600)
    with fails(errno.EACCES):
        as_user(lambda: os.getxattr(f, 'user.u'))
    (mnt / 'sticky').mkdir()
    os.chmod(mnt / 'sticky', 0o1777)
    with fails(errno.EPERM):
        as_user(lambda: os.setxattr(mnt / 'sticky', 'user.x', b''))  # of a sticky directory only the owner


def test_attributes_survive(store):
    f = store.point / 'f'
    f.touch()
    values = {f'user.{i}': os.urandom(i * 700) for i in range(1, 40)}
    for name, value in values.items():
        os.setxattr(f, name, value)
    os.setxattr(f, 'user.1', b'shorter')
    values['user.1'] = b'shorter'
    os.removexattr(f, 'user.2')
    del values['user.2']
    store.remount()
    assert {name: os.getxattr(f, name) for name in os.listxattr(f)} == values


# ----------------------------------------------------------------- access lists

def getfacl(path):
    return [line for line in sh('getfacl', '-cpn', path).split('\n') if line]


def test_access_lists_are_enforced(mnt):
    f, d = mnt / 'f', mnt / 'd'
    os.chmod(mnt, 0o755)
    f.write_bytes(b'text')
    d.mkdir()
    os.chmod(f, 0o600)
    sh('setfacl', '-m', f'u:{NOBODY}:rw,g:{OTHER}:r', f)
    assert getfacl(f) == ['user::rw-', f'user:{NOBODY}:rw-', 'group::---', f'group:{OTHER}:r--', 'mask::rw-', 'other::---']
    assert mode(f) == 0o660  # the mask shows as the group
    as_user(lambda: os.close(os.open(f, os.O_RDWR)))
    as_user(lambda: os.close(os.open(f, os.O_RDONLY)), 77, 77, [OTHER])
    for attempt, who in ((os.O_RDWR, (77, 77, [OTHER])), (os.O_RDONLY, (77, 77, []))):
        with fails(errno.EACCES):
            as_user(lambda: os.open(f, attempt), *who)
    os.chmod(f, 0o640)  # changes the mask
    assert 'mask::r--' in getfacl(f) and f'user:{NOBODY}:rw-\t#effective:r--' in getfacl(f)
    with fails(errno.EACCES):
        as_user(lambda: os.open(f, os.O_RDWR))
    as_user(lambda: os.open(f, os.O_RDONLY))
    sh('setfacl', '-m', 'm::rw', f)
    assert mode(f) == 0o660
    sh('setfacl', '-b', f)
    assert getfacl(f) == ['user::rw-', 'group::---', 'other::---'] and mode(f) == 0o600
    with fails(errno.ENODATA):
        os.getxattr(f, 'system.posix_acl_access')
    sh('setfacl', '-m', f'u:{NOBODY}:rwx', d)
    as_user(lambda: (d / 'new').touch())
    with fails(errno.EPERM):
        as_user(lambda: os.setxattr(f, 'system.posix_acl_access', b''))
    with fails(errno.EINVAL):
        os.setxattr(f, 'system.posix_acl_access', struct.pack('<IHHI', 2, 3, 7, 0))
    with fails(errno.EACCES):
        os.setxattr(f, 'system.posix_acl_default', os.getxattr(d, 'system.posix_acl_access'))


def test_default_lists_are_inherited(store):
    d = store.point / 'd'
    os.chmod(store.point, 0o755)
    d.mkdir()
    sh('setfacl', '-d', '-m', f'u::rwx,g::rx,o::-,u:{NOBODY}:rwx,m::rwx', d)
    os.umask(0o077)  # counts only where there is no default list
    try:
        (d / 'f').write_bytes(b'x')
        (d / 'sub').mkdir()
        (d / 'sub' / 'g').touch()
        os.mkfifo(d / 'p')
        os.symlink('f', d / 's')
        os.close(os.open(d / 'o', os.O_CREAT, 0o600))
    finally:
        os.umask(0o022)
    expected = ['user::rw-', f'user:{NOBODY}:rwx\t#effective:rw-', 'group::r-x\t#effective:r--', 'mask::rw-', 'other::---']
    assert getfacl(d / 'f') == getfacl(d / 'sub' / 'g') == getfacl(d / 'p') == expected
    assert mode(d / 'f') == 0o660 and mode(d / 'o') == 0o600
    assert [line for line in getfacl(d / 'sub') if line.startswith('default:')] == \
        ['default:user::rwx', f'default:user:{NOBODY}:rwx', 'default:group::r-x', 'default:mask::rwx', 'default:other::---']
    os.chmod(d, 0o755)
    as_user(lambda: (d / 'f').write_bytes(b'theirs'))
    with fails(errno.EACCES):
        as_user(lambda: (d / 'o').read_bytes())
    lists = {p: getfacl(p) for p in (d, d / 'f', d / 'sub', d / 'o')}
    store.remount()
    assert {p: getfacl(p) for p in lists} == lists
    sh('setfacl', '-k', d)
    (d / 'plain').touch()
    assert getfacl(d / 'plain') == ['user::rw-', 'group::r--', 'other::r--']


@pytest.mark.parametrize('member', [True, False])
def test_setgid_and_an_access_list(mnt, member):
    os.chmod(mnt, 0o755)
    f = mnt / 'f'
    f.touch()
    os.chown(f, NOBODY, OTHER)
    os.chmod(f, 0o2755)
    as_user(lambda: sh('setfacl', '-m', 'u:7:rx', f), groups=[OTHER] if member else [])
    assert bool(mode(f) & stat.S_ISGID) == member
