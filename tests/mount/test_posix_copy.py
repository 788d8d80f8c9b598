# SPDX-License-Identifier: Apache-2.0
"""copy_file_range: nothing is moved, and both files are their own afterwards."""
import errno
import mmap
import os
import random

from calls import NOBODY, as_user, fails, sync, tick
from conftest import MIB
from models import new_model


def copy(source, target, length, at=0, to=0):
    """Copies everything, in as many calls as it takes."""
    done = 0
    while done < length:
        n = os.copy_file_range(source, target, length - done, at + done, to + done)
        if n == 0:
            break
        done += n
    return done


def figure(mnt, name):
    with open(mnt / '.hitrain' / 'stats') as f:
        return sum(float(line.split()[-1]) for line in f if line.startswith(name) and '#' not in line)


def available(mnt):
    return os.statvfs(mnt).f_bavail * 4096


def test_a_copy_takes_no_space(store):
    mnt, data = store.point, os.urandom(40 * MIB)
    (mnt / 'a').write_bytes(data)
    a, b = os.open(mnt / 'a', os.O_RDWR), os.open(mnt / 'b', os.O_RDWR | os.O_CREAT)
    os.fsync(a)
    free = available(mnt)
    assert copy(a, b, len(data)) == len(data)
    os.fsync(b)
    assert free - available(mnt) < MIB
    assert os.fstat(b).st_size == len(data) and os.pread(b, len(data), 0) == data
    os.pwrite(a, b'changed', 5 * MIB)
    os.pwrite(b, b'also', 9 * MIB)
    os.fsync(a)
    os.fsync(b)
    assert os.pread(b, 7, 5 * MIB) == data[5 * MIB:5 * MIB + 7] and os.pread(a, 4, 9 * MIB) == data[9 * MIB:9 * MIB + 4]
    assert free - available(mnt) < 2 * MIB
    os.unlink(mnt / 'a')
    os.close(a)
    os.close(b)
    store.crash()
    assert (mnt / 'b').read_bytes() == data[:9 * MIB] + b'also' + data[9 * MIB + 4:]


def test_ranges_against_a_copy(mnt):
    """Any offsets, pages in both caches, a mapped target."""
    rnd = random.Random(8)
    size = 600_000
    shadow = [bytearray(rnd.randbytes(size)) for _ in range(2)]
    for i in range(2):
        (mnt / str(i)).write_bytes(shadow[i])
    fds = [os.open(mnt / str(i), os.O_RDWR) for i in range(2)]
    maps = [mmap.mmap(fd, size) for fd in fds]
    for _ in range(120):
        source, target = rnd.choice(((0, 1), (1, 0), (0, 0)))
        unit = rnd.choice((1, 512, 4096, 65536))
        length = rnd.randrange(1, 200_000 // unit + 2) * unit
        at, to = rnd.randrange(size // unit) * unit, rnd.randrange(size // unit) * unit
        length = min(length, size - at, size - to)
        if source == target and abs(at - to) < length:
            with fails(errno.EINVAL):
                os.copy_file_range(fds[0], fds[0], length, at, to)
            continue
        edit = rnd.randrange(size - 9)
        shadow[source][edit:edit + 9] = rnd.randbytes(9)
        if rnd.random() < 0.5:
            maps[source][edit:edit + 9] = bytes(shadow[source][edit:edit + 9])  # a dirty page
        else:
            os.pwrite(fds[source], shadow[source][edit:edit + 9], edit)
        assert copy(fds[source], fds[target], length, at, to) == length
        shadow[target][to:to + length] = shadow[source][at:at + length]
        assert maps[target][max(0, to - 10):to + length + 10] == shadow[target][max(0, to - 10):to + length + 10]
    for i in range(2):
        maps[i].close()
        os.fsync(fds[i])
        os.close(fds[i])
        assert (mnt / str(i)).read_bytes() == shadow[i]


def test_sizes(mnt):
    (mnt / 'a').write_bytes(b'0123456789')
    a, b = os.open(mnt / 'a', os.O_RDWR), os.open(mnt / 'b', os.O_RDWR | os.O_CREAT)
    assert os.copy_file_range(a, b, 100, 4, 20) == 6  # to the end of the source
    assert os.pread(b, 100, 0) == bytes(20) + b'456789'
    assert os.copy_file_range(a, b, 100, 10, 0) == 0 and os.copy_file_range(a, b, 100, 1000, 0) == 0
    assert os.fstat(b).st_size == 26
    os.ftruncate(a, 10 * MIB)
    assert copy(a, b, 10 * MIB) == 10 * MIB
    assert os.fstat(b).st_blocks * 512 <= 65536  # holes are copied as holes
    for args, error in (((a, b, 10, 0, 1 << 62), errno.EFBIG), ((a, b, 10, 0, 1 << 44), errno.EFBIG)):
        with fails(error):
            os.copy_file_range(*args)
    for flags, error in ((os.O_RDONLY, errno.EBADF), (os.O_WRONLY | os.O_APPEND, errno.EBADF)):
        fd = os.open(mnt / 'b', flags)
        with fails(error):
            os.copy_file_range(a, fd, 10)
        os.close(fd)
    os.mkdir(mnt / 'd')
    fd = os.open(mnt / 'd', os.O_RDONLY)
    with fails(errno.EISDIR):
        os.copy_file_range(fd, b, 10)
    for fd in (a, b, fd):
        os.close(fd)


def test_times_and_traffic(mnt):
    (mnt / 'a').write_bytes(b'x' * MIB)
    (mnt / 'b').touch()
    a, b = os.open(mnt / 'a', os.O_RDONLY), os.open(mnt / 'b', os.O_WRONLY)
    before, moved = os.fstat(b), figure(mnt, 'hitrain_mount')
    tick()
    assert copy(a, b, MIB) == MIB
    after = os.fstat(b)
    assert after.st_mtime_ns > before.st_mtime_ns and after.st_ctime_ns > before.st_ctime_ns
    assert after.st_size == MIB
    assert figure(mnt, 'hitrain_mount') - moved < 65536  # for reading them
    os.close(a)
    os.close(b)


def test_to_and_from_the_hidden_tree(mnt):
    """The kernel reads and writes there, as for any other pair of files."""
    root = mnt / 'model'
    root.mkdir()
    for name, value in (('dtype', 'f32'), ('optimizer', 'adamw lr=0.5 weight_decay=0')):
        os.setxattr(root, f'user.hitrain.{name}', value.encode())
    (root / 'p').write_bytes(b'\0\0\x80?' * 1024)
    (mnt / 'g').write_bytes(b'\0\0\x80?' * 1024)
    with open(mnt / 'g', 'rb') as g, open(root / '.hitrain' / 'grad' / 'p', 'wb') as grad:
        assert copy(g.fileno(), grad.fileno(), 4096) == 4096
    # A copy of the parameter waits for its update.
    with open(root / 'p', 'rb') as p, open(mnt / 'q', 'wb') as q:
        assert copy(p.fileno(), q.fileno(), 4096) == 4096
    assert (mnt / 'q').read_bytes() == (root / 'p').read_bytes() != b'\0\0\x80?' * 1024
    sync(root)


def test_into_and_out_of_models(store):
    mnt, data = store.point, os.urandom(3 * MIB)
    root = new_model(mnt / 'model', 'adamw')
    (mnt / 'a').write_bytes(data)
    for source, target in ((mnt / 'a', root / 'p'), (root / 'p', mnt / 'c'), (root / 'p', root / 'q')):
        with open(source, 'rb') as s, open(target, 'wb') as t:
            assert copy(s.fileno(), t.fileno(), len(data)) == len(data)
    sync(mnt)
    with open(root / 'p', 'r+b') as p:
        p.write(b'later')
    (root / '.hitrain' / 'ctl').write_text('abort\n')
    assert not os.path.exists(root / 'p') and (mnt / 'c').read_bytes() == data
    with open(mnt / 'c', 'rb') as s, open(root / 'p', 'wb') as t:
        assert copy(s.fileno(), t.fileno(), len(data)) == len(data)
    (root / '.hitrain' / 'ctl').write_text('commit\n')
    store.crash()
    assert (root / 'p').read_bytes() == (mnt / 'c').read_bytes() == (mnt / 'a').read_bytes() == data


def test_permissions_are_those_of_the_descriptors(mnt):
    os.chmod(mnt, 0o755)
    (mnt / 'a').write_bytes(b'secret')
    os.chmod(mnt / 'a', 0o600)
    (mnt / 'b').touch()
    os.chown(mnt / 'b', NOBODY, NOBODY)
    a = os.open(mnt / 'a', os.O_RDONLY)  # passed on

    def take():
        fd = os.open(mnt / 'b', os.O_WRONLY)
        return os.copy_file_range(a, fd, 6, 0, 0)
    assert as_user(take) == 6 and (mnt / 'b').read_bytes() == b'secret'
    os.close(a)
