# SPDX-License-Identifier: Apache-2.0
"""Kept steps of a model root, as a mounted store shows them in .hitrain/snap, and which blocks two share."""
import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import struct

from entry import DEPTH_MAX, HIDDEN, PATH_BYTES_MAX, PREFIX
from objects import NUMBER_MAX, Damage, Failure
from places import BLOCK_BYTES

_SAME = struct.Struct('<QQQQ')
_IOCTL_SAME = 3 << 30 | _SAME.size << 16 | ord('h') << 8 | 2    # HT_IOCTL_SAME of include/hitrain/words.h

SIZES_TRIED_MAX = 64            # files of one size that are compared
RENAMED_BYTES_MIN = 4096        # smaller ones are not looked for


class Handle:
    """A descriptor that is closed with the last reference to this."""

    def __init__(self, fd):
        self.fd = fd

    def __del__(self):
        with contextlib.suppress(OSError):  # the daemon of its mount is gone; the descriptor is closed all the same
            os.close(self.fd)


def open_folder(path, parent=None):
    """parent: a Handle, which stays open during the call even if the caller does not hold it."""
    return Handle(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent and parent.fd))


def open_below(folder, path, flags=os.O_RDONLY):
    """The regular file at a path below the folder; no symlink on the way is followed. OSError."""
    names = path.split(b'/')
    for name in names[:-1]:
        folder = open_folder(name, folder)
    found = Handle(os.open(names[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder.fd))
    if not stat.S_ISREG(os.fstat(found.fd).st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return found


def state_path(path, state):
    folder, _, name = path.rpartition(b'/')
    return (folder + b'/' if folder else b'') + HIDDEN + b'/state/' + name + b'/' + state


def is_on_store(fd):
    """Is it a file of a mounted store?"""
    at = os.fstat(fd).st_dev
    number = f'{os.major(at)}:{os.minor(at)}'
    with open('/proc/self/mountinfo', 'rb') as mounts:
        lines = [line.split() for line in mounts]
    return any(line[2] == number.encode() and b'fuse.hitrain' in line[6:] for line in lines)


# ---- the step ----

def explain(path, e):
    if e.errno == errno.ENOTCONN:
        return Failure(f'{path}: the daemon of this mount is gone; unmount it and mount it again')
    return Failure(f'{path}: {e.strerror}')


class Kept:
    """The kept step NAME of the model root."""

    def __init__(self, root, name):
        self.root, self.name = root, name
        if not name or re.search('[/ \t\r\n]', name) or name in ('.', '..'):
            raise Failure(f'{root}: this is no name of a kept step: {name}')
        try:
            self.folder = Handle(os.open(f'{root}/.hitrain/snap/{name}', os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except FileNotFoundError:
            raise Failure(f'{root}: there is no kept step {name}; `hitrainctl steps` lists them') from None
        except OSError as e:
            raise explain(root, e) from None
        text = self.word(b'step')
        if not text or not re.fullmatch(b'[0-9]{1,19}', text) or int(text) > NUMBER_MAX:
            raise Failure(f'{root}: {name} has no number of a step')
        self.step = int(text)

    def is_there(self):
        """False: it expired, or was forgotten, as after a rollback; a later step may have its name."""
        try:
            return os.path.samestat(os.stat(f'{self.root}/.hitrain/snap/{self.name}'), os.fstat(self.folder.fd))
        except OSError:
            return False

    def word(self, word):
        """The value of user.hitrain.WORD, or None."""
        try:
            return os.getxattr(self.folder.fd, PREFIX + word)
        except OSError:
            return None

    def digest(self):
        """The one that the store has computed, 16 bytes, or None."""
        text = self.word(b'digest')
        return bytes.fromhex(text.decode()) if text and re.fullmatch(b'[0-9a-f]{32}', text) else None

    def lineage(self):
        """0: it is not known any more."""
        found = re.search(rb'^lineage=([0-9]{1,20})$', self.word(b'redo') or b'', re.M)
        return int(found[1]) if found and int(found[1]) < 1 << 64 else 0


def names_of(root):
    """Names of the kept steps of a model root, the oldest first."""
    try:
        return os.listdir(f'{root}/.hitrain/snap')
    except (FileNotFoundError, NotADirectoryError):
        raise Failure(f'{root}: this is no model root') from None
    except OSError as e:
        raise explain(root, e) from None


def lines_of(root):
    """What the store says of each kept step."""
    try:
        with open(f'{root}/.hitrain/kept', encoding='utf-8') as f:
            return [json.loads(line) for line in f]
    except OSError as e:
        raise explain(root, e) from None
    except ValueError:
        raise Damage(f'{root}: its list of kept steps makes no sense') from None


# ---- blocks that two steps share ----

class Twin:
    """A file or state of the base that may have blocks of another one. The store answers by the places of bytes, so
    nothing is read. One thread.
    """

    def __init__(self, handle, path):
        found = os.fstat(handle.fd)
        self.handle, self.path = handle, path
        self.ino, self.size = found.st_ino, found.st_size
        self.at = self.end = 0  # of the last answer
        self.is_same = False

    def ask(self, fd, at):
        """Is the byte at this place the same? A store that does not answer has nothing in common."""
        if self.at <= at < self.end:
            return self.is_same
        answer = bytearray(_SAME.pack(self.ino, at, 0, 0))
        try:
            fcntl.ioctl(fd, _IOCTL_SAME, answer)
            _, _, end, is_same = _SAME.unpack(answer)
        except OSError:
            end = 0
        if end <= at:
            end, is_same = NUMBER_MAX, 0
        self.at, self.end, self.is_same = at, end, bool(is_same)
        return self.is_same

    def blocks(self, fd, at, size):
        """How many blocks from the one at this byte on the twin has, too. fd: the file or state of so many bytes."""
        limit = size if self.size >= size else self.size // BLOCK_BYTES * BLOCK_BYTES
        to = at
        while to < limit and self.ask(fd, to):
            to = min(self.end, limit)
        return -(-(size - at) // BLOCK_BYTES) if to == size else (to - at) // BLOCK_BYTES


class Twins:
    """Finds twins in the folder of a kept step, or none if there is none. One thread."""

    def __init__(self, kept=None):
        self.kept = kept
        self.by_size = None

    def find(self, path, handle, size):
        """The base's file at this path; if there is none, one of the same size that begins with the same bytes."""
        if not self.kept:
            return None
        try:
            return Twin(open_below(self.kept.folder, path), path)
        except OSError:
            return self.find_renamed(handle, size) if size >= RENAMED_BYTES_MIN else None

    def find_state(self, twin, name):
        try:
            return twin and Twin(open_below(self.kept.folder, state_path(twin.path, name)), twin.path)
        except OSError:
            return None

    def find_renamed(self, handle, size):
        best, best_end = None, 0
        if self.by_size is None:
            self.by_size = {}
            self.list(self.kept.folder, b'', 0)
        for path in self.by_size.get(size, ()):
            try:
                twin = Twin(open_below(self.kept.folder, path), path)
            except OSError:
                continue
            if twin.ask(handle.fd, 0) and twin.end > best_end:
                best, best_end = twin, twin.end
            if best_end >= size:
                break
        return best

    def list(self, folder, above, depth):
        """A directory that cannot be read has no twins."""
        try:
            names = sorted(map(os.fsencode, os.listdir(folder.fd)))
        except OSError:
            return
        for name in names:
            path = above + b'/' + name if above else name
            if name == HIDDEN or len(path) > PATH_BYTES_MAX:
                continue
            try:
                found = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and found.st_size >= RENAMED_BYTES_MIN:
                    paths = self.by_size.setdefault(found.st_size, [])
                    if len(paths) < SIZES_TRIED_MAX:
                        paths.append(path)
                elif stat.S_ISDIR(found.st_mode) and depth < DEPTH_MAX:
                    self.list(open_folder(name, folder), path, depth + 1)
            except OSError:
                continue
