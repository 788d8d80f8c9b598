# SPDX-License-Identifier: Apache-2.0
"""A directory of a mounted store in the order of a manifest. The state of parameters is read through .hitrain/state. The
tree must not change meanwhile. One thread.
"""
import collections
import errno
import fcntl
import math
import os
import stat
import time

from entry import (DEPTH_MAX, DIRECTORY, FILE, HIDDEN, LINK, PATH_BYTES_MAX, PREFIX, SYMLINK, Entry, check_entry,
                   is_carried, os_text)
from kept import Handle, Twins, open_folder
from manifest import State
from objects import Damage, Failure
from places import BLOCK_BYTES

_IOCTL_BACKGROUND = ord('h') << 8 | 7   # HT_IOCTL_BACKGROUND of include/hitrain/words.h

OPTIMIZER = PREFIX + b'optimizer'
DTYPE = PREFIX + b'dtype'

# A block that is to be read: of the file or state that is open as handle.
Want = collections.namedtuple('Want', 'index handle at length path')
# Blocks that the base has, too, at the same places of its file (or state) at path.
Run = collections.namedtuple('Run', 'index count path twin_size handle size')


def failure(path, what):
    return Failure(f'{os_text(path) if path else "the model"}{what}')


def failed(path, e):
    return failure(path, f': {e.strerror}')


def attributes_of(fd):
    """Those that a manifest carries, in the order of their names. The setting of the optimizer is not listed."""
    try:
        names = {n for n in map(os.fsencode, os.listxattr(fd)) if is_carried(n)}
    except OSError as e:
        if e.errno != errno.ENOTSUP:
            raise
        return ()
    found = []
    for name in sorted(names | {OPTIMIZER}):
        try:
            found.append((name, os.getxattr(fd, name)))
        except OSError as e:
            if e.errno != errno.ENODATA:
                raise
    return tuple(found)


def names_in(fd):
    return sorted(n for n in map(os.fsencode, os.listdir(fd)) if n != HIDDEN)


def next_content(fd, at, size):
    """Where content begins at or after a place, as the start of its block; the size where there is none."""
    try:
        return min(os.lseek(fd, at, os.SEEK_DATA) // BLOCK_BYTES * BLOCK_BYTES, size)
    except OSError as e:
        return size if e.errno == errno.ENXIO else at   # a file that knows no holes is content


def read_behind(handle):
    """True. Reads of a kept step wait for all others at the devices, and take no memory of the store from them."""
    try:
        fcntl.ioctl(handle.fd, _IOCTL_BACKGROUND)
    except OSError:
        pass                    # no kept step
    return True


def anew(handle):
    """The same file, whose reads wait for no others."""
    return Handle(os.open(f'/proc/self/fd/{handle.fd}', os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))


class Tree:
    """items(): Entry, State, Want and Run. base: a kept step whose blocks are named and not read, or None. behind_s: after so many seconds
    reads wait for no others any more.
    """

    def __init__(self, folder, base=None, behind_s=math.inf):
        self.folder = folder
        self.behind_until = time.monotonic() + behind_s
        self.sizes_only = False
        self.twins = Twins(base)
        self.first_paths = {}   # of files with several names

    def items(self):
        try:
            yield from self.directory(self.folder, b'', 0)
        except RecursionError:
            raise Failure('the model has too many directories in one another') from None

    def bytes(self):
        """Sizes of all files and states, without reading them."""
        measure = Tree(self.folder)
        measure.sizes_only = True
        return sum(item.size for item in measure.items())

    def entry(self, e):
        try:
            check_entry(e)
        except Damage as why:
            raise failure(e.path, f' cannot be archived: {why}') from None
        return e

    def plain(self, kind, fd, path, found):
        return self.entry(Entry(kind, path, found.st_mode & 0o7777, found.st_uid, found.st_gid, found.st_mtime_ns,
                                found.st_size if kind == FILE else 0, attributes=attributes_of(fd)))

    def directory(self, folder, path, depth):
        if depth > DEPTH_MAX:
            raise failure(path, ' lies in too many directories')
        try:
            yield self.plain(DIRECTORY, folder.fd, path, os.fstat(folder.fd))
            names = names_in(folder.fd)
        except OSError as e:
            raise failed(path, e) from None
        for name in names:
            below = path + b'/' + name if path else name
            if len(below) > PATH_BYTES_MAX:
                raise failure(path, ' has a path that is too long below it')
            try:
                yield from self.name(folder, name, below, depth)
            except OSError as e:
                raise failed(below, e) from None

    def name(self, folder, name, path, depth):
        found = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            yield from self.directory(open_folder(name, folder), path, depth + 1)
        elif stat.S_ISREG(found.st_mode):
            yield from self.file(folder, name, path)
        elif stat.S_ISLNK(found.st_mode):
            target = os.readlink(name, dir_fd=folder.fd)
            yield self.entry(Entry(SYMLINK, path, 0, found.st_uid, found.st_gid, found.st_mtime_ns, target=target))
        else:
            raise failure(path, ' is a device, a socket or a FIFO: a manifest has files, directories and links')

    def file(self, folder, name, path):
        handle = Handle(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECT | os.O_CLOEXEC, dir_fd=folder.fd))
        found = os.fstat(handle.fd)
        first = self.first_paths.setdefault(found.st_ino, path) if found.st_nlink > 1 else path
        if first != path:
            yield self.entry(Entry(LINK, path, target=first))
            return
        yield self.plain(FILE, handle.fd, path, found)
        twin = self.twins.find(path, handle, found.st_size)
        yield from self.content(handle, found.st_size, twin, path)
        if self.has_dtype(handle.fd):
            yield from self.states(folder, name, path, twin)

    @staticmethod
    def has_dtype(fd):
        try:
            return len(os.getxattr(fd, DTYPE)) > 0
        except OSError:
            return False

    def states(self, folder, name, path, twin):
        try:
            states = open_folder(HIDDEN + b'/state/' + name, folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        for state in names_in(states.fd):
            handle = Handle(os.open(state, os.O_RDONLY | os.O_CLOEXEC, dir_fd=states.fd))
            size = os.fstat(handle.fd).st_size
            if size:            # else it has no state yet
                yield State(state, size)
                yield from self.content(handle, size, self.twins.find_state(twin, state), path)

    def content(self, handle, size, twin, path):
        if self.sizes_only:
            return
        at, is_behind = 0, False
        while (at := next_content(handle.fd, at, size)) < size:
            index, count = at // BLOCK_BYTES, twin.blocks(handle.fd, at, size) if twin else 0
            if count:
                yield Run(index, count, twin.path, twin.size, handle, size)
            else:
                late = time.monotonic() >= self.behind_until
                if is_behind and late:
                    handle, is_behind = anew(handle), False
                elif not is_behind and not late:
                    is_behind = read_behind(handle)
                yield Want(index, handle, at, min(BLOCK_BYTES, size - at), path)
            at += max(count, 1) * BLOCK_BYTES
