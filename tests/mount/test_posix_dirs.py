# SPDX-License-Identifier: Apache-2.0
"""Reading directories: large ones, while they change, from any place in them."""
import ctypes
import errno
import os
import random
import struct
import threading
import time

from calls import call, fails, libc, tick
from conftest import SECONDS_MAX, run

LONG = bool(os.environ.get('HITRAIN_LONG'))
MANY = 1_000_000 if LONG else 20_000
SYS_GETDENTS64 = 217 if os.uname().machine == 'x86_64' else 61

libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
libc.telldir.restype = ctypes.c_long
for name, arguments in (('readdir', [ctypes.c_void_p]), ('telldir', [ctypes.c_void_p]), ('closedir', [ctypes.c_void_p]),
                        ('rewinddir', [ctypes.c_void_p]), ('seekdir', [ctypes.c_void_p, ctypes.c_long])):
    getattr(libc, name).argtypes = arguments


def getdents(fd, size):
    """Names and offsets from one call; none at the end."""
    buffer = ctypes.create_string_buffer(size)
    length = call('syscall', ctypes.c_long(SYS_GETDENTS64), fd, buffer, ctypes.c_ulong(size))
    entries, at = [], 0
    while at < length:
        _, offset, record = struct.unpack_from('<QqH', buffer.raw, at)
        entries.append((buffer.raw[at + 19:at + record].split(b'\0')[0].decode(), offset))
        at += record
    return entries


def walk(fd, size=4096):
    """All names from here on, without . and .., the way libc reads them."""
    names = []
    while True:
        part = getdents(fd, size)
        if not part:
            return names
        names += [name for name, _ in part if name not in ('.', '..')]


def make_files(folder, count, name='file {:06}'):
    names = [name.format(i) for i in range(count)]
    fd = os.open(folder, os.O_RDONLY)
    for name in names:
        os.mknod(name, 0o100600, dir_fd=fd)
    os.close(fd)
    return names


class Directory:
    """A DIR of the C library."""

    def __init__(self, path):
        self.dir = libc.opendir(os.fsencode(path))

    def read(self):
        entry = libc.readdir(self.dir)
        return None if entry is None else ctypes.string_at(entry + 19).decode()

    def tell(self):
        return libc.telldir(self.dir)

    def seek(self, place):
        libc.seekdir(self.dir, place)

    def rewind(self):
        libc.rewinddir(self.dir)

    def close(self):
        libc.closedir(self.dir)


def test_many_entries(make_store):
    store = make_store('1G')
    if LONG:  # the log must hold them: a sixty-fourth of the store
        os.truncate(store.image, 64 << 30)
        run('mkfs.hitrain', '--force', store.image)
    mnt = store.mount('dram=256M') if LONG else store.mount()
    folder = mnt / 'd'
    folder.mkdir()
    names = make_files(folder, MANY)
    fd = os.open(folder, os.O_RDONLY)
    listed = walk(fd, 1 << 15)
    os.close(fd)
    assert len(listed) == MANY and set(listed) == set(names)
    for i in range(0, MANY, MANY // 1000):
        os.stat(folder / names[i])
    store.unmount()
    mnt = store.mount('dram=256M') if LONG else store.mount()
    assert set(os.listdir(folder)) == set(names)
    for name in names:
        os.unlink(folder / name)
    assert os.listdir(folder) == []
    os.rmdir(folder)


def test_small_buffers(mnt):
    make_files(mnt, 200)
    (mnt / ('n' * 255)).touch()
    fd = os.open(mnt, os.O_RDONLY)
    assert len(walk(fd, 288)) == 201  # one or a few at a time
    os.lseek(fd, 0, os.SEEK_SET)
    with fails(errno.EINVAL):
        getdents(fd, 20)
    assert [name for name, _ in getdents(fd, 100)][:2] == ['.', '..']
    os.close(fd)


def test_an_open_directory_can_be_read_again(mnt):
    names = set(make_files(mnt, 500))
    d = Directory(mnt)
    first = []
    while True:
        name = d.read()
        if name is None:
            break
        first.append(name)
    assert set(first) == names | {'.', '..'} and len(first) == 502
    (mnt / 'later').touch()
    d.rewind()
    again = set()
    while (name := d.read()) is not None:
        again.add(name)
    assert again == set(first) | {'later'}
    d.close()


def test_places_stay_valid(mnt):
    """telldir before each entry; then entries come and go; each place leads to the same rest."""
    names = make_files(mnt, 1000)
    d = Directory(mnt)
    places, order = [], []
    while True:
        place, name = d.tell(), d.read()
        if name is None:
            break
        places.append(place)
        order.append(name)
    gone = set(names[100:900:3])
    for name in gone:
        os.unlink(mnt / name)
    make_files(mnt, 100, 'new {}')
    rnd = random.Random(5)
    for i in rnd.sample(range(len(order)), 60):
        d.seek(places[i])
        rest = [order[k] for k in range(i, len(order)) if order[k] not in gone]
        read = []
        while (name := d.read()) is not None:
            read.append(name)
        assert [name for name in read if not name.startswith('new')] == rest
    d.close()


def test_walks_while_the_directory_changes(mnt):
    """A name that exists all the time is seen exactly once by every walk; none is seen twice."""
    stay = set(make_files(mnt, 2000, 'stay {:05}'))
    stop = threading.Event()
    problems = []

    def change(seed):
        rnd, own = random.Random(seed), []
        try:
            while not stop.is_set():
                act = rnd.random()
                if act < 0.5 or len(own) < 10:
                    own.append(f'{seed} {rnd.random()}')
                    (mnt / own[-1]).touch()
                elif act < 0.75:
                    os.unlink(mnt / own.pop(rnd.randrange(len(own))))
                else:  # over one of its own
                    at = rnd.randrange(len(own))
                    name = own.pop(at)
                    os.rename(mnt / name, mnt / rnd.choice(own))
        except Exception as e:  # noqa: B902 - shown by the test
            problems.append(e)
    threads = [threading.Thread(target=change, args=(seed,)) for seed in range(3)]
    for t in threads:
        t.start()
    end = time.monotonic() + (60 if LONG else 4)
    walks = 0
    while (time.monotonic() < end or walks < 6) and not problems:
        fd = os.open(mnt, os.O_RDONLY)
        seen = walk(fd, random.choice((300, 1000, 4096, 32768)))
        os.close(fd)
        kept = [name for name in seen if name.startswith('stay')]
        assert len(kept) == len(stay) and set(kept) == stay
        walks += 1
    stop.set()
    for t in threads:
        t.join(SECONDS_MAX)
    assert not problems


def test_removing_while_reading(mnt):
    """As rm -r and find -delete do."""
    names = set(make_files(mnt, 3000))
    fd = os.open(mnt, os.O_RDONLY)
    seen = []
    while part := getdents(fd, 1024):
        for name, _ in part:
            if name not in ('.', '..'):
                seen.append(name)
                os.unlink(name, dir_fd=fd)
    os.close(fd)
    assert len(seen) == len(names) and set(seen) == names and os.listdir(mnt) == []


def test_renaming_what_is_listed_comes_to_an_end(mnt):
    """To another name and back: each entry gets a new place, and none after the end of the walk."""
    names = set(make_files(mnt, 3000))
    d = Directory(mnt)
    for _ in range(2):  # rewound, too
        seen = []
        while (name := d.read()) is not None:
            seen.append(name)
            assert len(seen) <= 2 * len(names)
            if name not in ('.', '..') and len(seen) % 3:
                os.rename(mnt / name, mnt / 'TMP')
                os.rename(mnt / 'TMP', mnt / name)
        assert set(seen) == names | {'.', '..'} and len(seen) == len(names) + 2
        d.rewind()
    d.close()


def test_a_walk_that_began_earlier_leaves_nothing_out_of_later_ones(mnt):
    """Two walks one after the other and in turns, around a new name: the kernel keeps no listing that lacks it."""
    names = set(make_files(mnt, 2000))
    tick()
    for turn in range(10):
        assert set(os.listdir(mnt)) == names
        old = os.open(mnt, os.O_RDONLY)
        seen = [name for name, _ in getdents(old, 4096)]
        name = f'new {turn}'
        (mnt / name).touch()
        names.add(name)
        new = os.open(mnt, os.O_RDONLY)
        also = [name for name, _ in getdents(new, 4096)]
        seen += walk(old)
        assert set(seen) - {'.', '..'} in (names, names - {name})
        assert set(also + walk(new)) - {'.', '..'} == names
        if turn % 2:
            os.close(old)
            old = None
        for _ in range(3):
            assert set(os.listdir(mnt)) == names
        for fd in filter(None, (old, new)):
            os.close(fd)


def test_types_and_numbers_are_told(mnt):
    (mnt / 'f').touch()
    (mnt / 'd').mkdir()
    os.symlink('f', mnt / 's')
    os.mkfifo(mnt / 'p')
    tick()
    with os.scandir(mnt) as entries:
        for e in entries:
            assert e.inode() == os.lstat(e.path).st_ino
            assert (e.is_file(follow_symlinks=False), e.is_dir(), e.is_symlink()) == \
                (e.name == 'f', e.name == 'd', e.name == 's')
