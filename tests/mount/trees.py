# SPDX-License-Identifier: Apache-2.0
"""Trees with everything a tool has to carry over, and the differences of two trees."""
import hashlib
import os
import random
import socket
import stat
import struct

MIB = 1 << 20
NOBODY = 65534
# user::rw- user:65534:r-- group::r-- mask::rw- other::---, as the kernel passes it
ACL_FILE = struct.pack('<I', 2) + b''.join(struct.pack('<HHI', *e) for e in (
    (1, 6, 0xffffffff), (2, 4, NOBODY), (4, 4, 0xffffffff), (16, 6, 0xffffffff), (32, 0, 0xffffffff)))
ACL_FOLDER = struct.pack('<I', 2) + b''.join(struct.pack('<HHI', *e) for e in (
    (1, 7, 0xffffffff), (2, 5, NOBODY), (4, 5, 0xffffffff), (16, 7, 0xffffffff), (32, 0, 0xffffffff)))
SPARSE = {'holes': 9 * MIB + 17, 'all-hole': 6 * MIB}


def blob(size, seed=1):
    return random.Random(seed).randbytes(size)


def make_tree(root, sockets=True):
    """All kinds of inodes, owners, modes, times, attributes, access lists, links and holes, as root."""
    (root / 'deep' / 'er').mkdir(parents=True)
    (root / 'empty-folder').mkdir()
    for i, size in enumerate((0, 1, 4095, 4096, 65_537, MIB, 3 * MIB + 77)):
        (root / 'deep' / f'size-{size}').write_bytes(blob(size, i))
    for i in range(200):
        (root / 'deep' / 'er' / f'{i}').write_bytes(blob(i * 13, i))
    for name in ('with space', 'new\nline', 'ünïcode', '-dash', 'n' * 255, b'\xff\xfe not utf-8'):
        with open(os.path.join(os.fsencode(root), os.fsencode(name)), 'wb') as f:
            f.write(b'name')
    with open(root / 'holes', 'wb') as f:
        for at in (MIB, 5 * MIB):
            f.seek(at)
            f.write(blob(8192, at))
        f.truncate(SPARSE['holes'])
    with open(root / 'all-hole', 'wb') as f:
        f.truncate(SPARSE['all-hole'])
    for name in ('link-1', 'deep/link-2', 'deep/er/link-3'):
        os.link(root / 'deep' / 'size-65537', root / name)
    os.symlink('deep/size-1', root / 'symbolic')
    os.symlink('/no/where', root / 'dangling')
    os.symlink('x' * 4000, root / 'long')
    os.link(root / 'symbolic', root / 'symbolic-too', follow_symlinks=False)
    os.mkfifo(root / 'fifo', 0o620)
    try:
        os.mknod(root / 'device', 0o640 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pass  # not in every container
    if sockets:
        with socket.socket(socket.AF_UNIX) as s:
            at = os.getcwd()
            os.chdir(root)  # such addresses are short
            s.bind('socket')
            os.chdir(at)
    os.chown(root / 'deep' / 'size-1', 1234, 2345)
    os.lchown(root / 'symbolic', 1234, 2345)
    os.chown(root / 'empty-folder', NOBODY, NOBODY)
    for name, mode in (('deep/size-1', 0o6751), ('deep/size-0', 0o000), ('deep/er', 0o3771), ('empty-folder', 0o1777)):
        os.chmod(root / name, mode)
    os.setxattr(root / 'link-1', 'user.small', b'value')
    os.setxattr(root / 'link-1', 'user.empty', b'')
    os.setxattr(root / 'link-1', 'trusted.binary', bytes(range(256)) * 4)
    os.setxattr(root / 'empty-folder', 'user.on-folder', b'\0zero\0')
    os.setxattr(root / 'deep' / 'size-4095', 'system.posix_acl_access', ACL_FILE)
    os.setxattr(root / 'deep' / 'er', 'system.posix_acl_access', ACL_FOLDER)
    os.setxattr(root / 'deep' / 'er', 'system.posix_acl_default', ACL_FOLDER)
    # Times last, and bottom up: the calls above changed them.
    for i, (folder, folders, files) in enumerate(sorted(os.walk(root), reverse=True)):
        for j, name in enumerate([*sorted(files), *sorted(d for d in folders if os.path.islink(os.path.join(folder, d))), '']):
            at = 1_000_000_000 * (1_000_000_000 + 1000 * i + j) + 123_456_789
            os.utime(os.path.join(folder, name), ns=(at + 7, at), follow_symlinks=False)
    os.utime(root / 'deep' / 'size-1', ns=(-2_000_000_001, -1_500_000_000))  # before 1970

def make_carried_tree(root):
    """The part of make_tree() that a step carries to another store."""
    make_tree(root, sockets=False)
    for name in ('fifo', 'device', 'deep/er/link-3', 'symbolic-too'):
        if os.path.lexists(root / name):
            os.unlink(root / name)
    os.removexattr(root / 'link-1', 'trusted.binary')
    os.chmod(root / 'deep' / 'size-1', 0o751)


def content(path):
    h = hashlib.sha256()
    with open(path, 'rb') as f:
        while part := f.read(MIB):
            h.update(part)
    return h.hexdigest()


def describe(root, sparse=True, times=True):
    """{relative path: everything that a faithful copy has in common with it}, as bytes paths may be needed."""
    root = os.fsencode(root)
    found, names_of = {}, {}
    for folder, folders, files in os.walk(root):
        for name in [b'', *files, *(d for d in folders if os.path.islink(os.path.join(folder, d)))]:
            path = os.path.join(folder, name) if name else folder
            key, st = os.path.relpath(path, root), os.lstat(path)
            row = {'mode': oct(st.st_mode), 'owner': (st.st_uid, st.st_gid)}
            if times:
                row['mtime'] = st.st_mtime_ns
            if stat.S_ISLNK(st.st_mode):
                row['target'] = os.readlink(path)
            if stat.S_ISREG(st.st_mode):
                row['size'], row['content'] = st.st_size, content(path)
                if sparse and st.st_size >= MIB:
                    row['holes'] = st.st_blocks * 512 < st.st_size // 2
            if stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode):
                row['device'] = st.st_rdev
            row['attributes'] = {n: os.getxattr(path, n, follow_symlinks=False)
                                 for n in sorted(os.listxattr(path, follow_symlinks=False))
                                 if not n.startswith('security.')}
            if not stat.S_ISDIR(st.st_mode):
                names_of.setdefault((st.st_dev, st.st_ino), []).append(key)
                row['links'] = st.st_nlink
            else:
                row['folders'] = st.st_nlink - 2 if st.st_nlink != 1 else len(folders)  # btrfs counts none
            found[key] = row
    for names in names_of.values():
        for key in names:
            found[key]['same file'] = sorted(names)
    return found


def assert_same(a, b):
    assert sorted(a) == sorted(b)
    wrong = {key: {k: (a[key].get(k), b[key].get(k)) for k in a[key].keys() | b[key].keys() if a[key].get(k) != b[key].get(k)}
             for key in a if a[key] != b[key]}
    assert not wrong, wrong
