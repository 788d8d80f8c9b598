# SPDX-License-Identifier: Apache-2.0
"""What a model says of its logged steps, and its files that are no parameters, as an archiver that follows it reads them.

Such files belong to a step if nothing was published, and nothing changed, from before the walk until after the last read. So
they go into a spool first, and are taken when that is known.
"""
import collections
import errno
import os
import re
import stat
import tempfile

from entry import DEPTH_MAX, HIDDEN, PATH_BYTES_MAX, PREFIX, check_path
from kept import Handle
from logged import SETTINGS_BYTES_MAX, File, FileBlock, Settings
from objects import Damage, Failure
from places import BLOCK_BYTES
from sums import is_zero

SPOOL_BYTES_MAX = 16 << 20      # in memory

# Logged steps first to last are readable; 0: none. changed: something was published or changed since the last one.
State = collections.namedtuple('State', 'first last lineage publications changed')
Seen = collections.namedtuple('Seen', 'ino size mtime_ns ctime_ns mode')


class Moved(Failure):
    """A logged step cannot say what happened to a parameter: archive a full step."""


def word(root, name):
    """The value of user.hitrain.NAME of a model root. Failure."""
    try:
        return os.getxattr(root, PREFIX + name)
    except OSError as e:
        if e.errno == errno.ENODATA:
            raise Failure(f'{root} is no model root') from None
        if e.errno == errno.ENOTCONN:
            raise Failure(f'{root}: the daemon of this mount is gone; unmount it and mount it again') from None
        raise Failure(f'{root}: {e.strerror}') from None


def number(text, key):
    found = re.search(rb'(?:^|\s)%s=([0-9]{1,20})(?:\s|$)' % key, text)
    return int(found[1]) if found else 0


def state_of(root):
    text = word(root, b'redo')
    return State(*(number(text, key) for key in (b'first', b'last', b'lineage', b'publications')), bool(number(text, b'changed')))


def is_half_made(root, state):
    """Its maker has not committed it (optim/torch/hitrain/_making.py), and maybe never will."""
    try:
        return os.getxattr(root, PREFIX + b'making').split()[1:] == [b'%d' % state.lineage, b'%d' % state.publications]
    except OSError:
        return False


def need_logging(root):
    """Failure where steps are not logged, or not for readers."""
    settings = word(root, b'optimizer')
    if not re.search(rb'(?:^|\s)redo=on(?:\s|$)', settings) or not number(settings, b'redo_keep'):
        raise Failure(f'{root}: its steps are not logged for readers: set redo=on and redo_keep=N in user.hitrain.optimizer')


def open_quietly(name, folder=None, flags=0):
    """A walk is no access: a time of access that changes would be a change of the model. Only owner and root may ask for it."""
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return Handle(os.open(name, flags | os.O_NOATIME, dir_fd=folder and folder.fd))
    except PermissionError:
        return Handle(os.open(name, flags, dir_fd=folder and folder.fd))


def walk(folder, above=b'', depth=0):
    """Yields (path, Seen) of the regular files below a directory."""
    if depth > DEPTH_MAX:
        raise Failure('too many directories lie in each other')
    for name in map(os.fsencode, sorted(os.listdir(folder.fd))):
        path = above + b'/' + name if above else name
        if not above and name == HIDDEN or len(path) > PATH_BYTES_MAX:
            continue
        try:
            s = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
            if stat.S_ISREG(s.st_mode):
                yield path, Seen(s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_mode)
            elif stat.S_ISDIR(s.st_mode):
                yield from walk(open_quietly(name, folder, os.O_DIRECTORY), path, depth + 1)
        except FileNotFoundError:
            continue


class Files:
    """The files below a root. One thread."""

    def __init__(self, root, base=None):
        """base: the folder (kept.Handle) of the kept step that the reader has; its files are not sent again."""
        self.root, self.settings, self.params = root, None, set()
        self.seen = self._walk()
        for path, seen in self.seen.items():
            if not base or not self._is_in(base, path, seen):
                self.seen[path] = seen._replace(mtime_ns=-1 << 63)      # unlike any
        self.by_ino = {seen.ino: path for path, seen in reversed(self.seen.items())}

    def _walk(self):
        try:
            return dict(walk(open_quietly(self.root, flags=os.O_DIRECTORY)))
        except OSError as e:
            raise Failure(f'{self.root}: {e.strerror}') from None

    @staticmethod
    def _is_in(base, path, seen):
        try:
            s = os.stat(path, dir_fd=base.fd, follow_symlinks=False)
        except OSError:
            return False
        return (s.st_size, s.st_mtime_ns, s.st_mode) == (seen.size, seen.mtime_ns, seen.mode)

    def path_of(self, ino):
        """The path of a parameter."""
        if ino not in self.by_ino:
            self.by_ino.update({seen.ino: path for path, seen in reversed(self._walk().items())})
        path = self.by_ino.get(ino)
        if path is None or b'\n' in path or path != path.strip():
            raise Moved(f'{self.root}: a parameter of the step has no name any more, or one that a logged step cannot carry')
        self.params.add(path)
        return path

    def changed(self, step, all_settings=False):
        """Items of the files and settings that changed, as they are at the end of this durable step; None: the model has moved
        on. all_settings: also if they are as before."""
        before = state_of(self.root)
        if before.last != step or before.changed:
            return None
        now, spool = self._walk(), Spool()
        try:
            settings = self._settings(all_settings)
            for path, seen in now.items():
                self._take(path, seen, spool)
        except FileNotFoundError:
            return None
        after = state_of(self.root)
        if after != before:
            return None
        self.seen = now
        self.by_ino = {seen.ino: path for path, seen in reversed(now.items())}
        if settings is not None:
            self.settings = settings
            spool.items.insert(0, Settings(settings))
        return spool

    def _settings(self, always):
        text = word(self.root, b'optimizer').split(b'\n')[0]
        if len(text) > SETTINGS_BYTES_MAX:
            raise Moved(f'{self.root}: its settings are too long')
        return text if always or text != self.settings else None

    def _take(self, path, seen, spool):
        known = self.by_ino.get(seen.ino)
        if known in self.params and known != path and path not in self.seen:
            raise Moved(f'{self.root}: the parameter {os.fsdecode(known)} is {os.fsdecode(path)} now')
        if path in self.params or self.seen.get(path) == seen or self._has_state(path):
            return
        try:
            check_path(path)
        except Damage as e:
            raise Failure(f'{self.root}/{os.fsdecode(path)}: {e}') from None
        folder, *names = open_quietly(self.root, flags=os.O_DIRECTORY), *path.split(b'/')
        for name in names[:-1]:
            folder = open_quietly(name, folder, os.O_DIRECTORY)
        spool.add(open_quietly(names[-1], folder), path)

    def _has_state(self, path):
        """Does the optimizer keep state for it? Gradients change it then. Absent state has no bytes."""
        folder = os.path.join(os.fsencode(self.root), HIDDEN, b'state', path)
        try:
            return any(os.stat(os.path.join(folder, name)).st_size for name in os.listdir(folder))
        except OSError:
            return False


class Spool:
    """Files that were read. Iterates over Settings, File and FileBlock."""

    def __init__(self):
        self.items, self.spool = [], tempfile.SpooledTemporaryFile(SPOOL_BYTES_MAX)

    def add(self, handle, path):
        s = os.fstat(handle.fd)
        self.items.append(File(stat.S_IMODE(s.st_mode) & 0o777, s.st_mtime_ns, s.st_size, path))
        for index in range(-(-s.st_size // BLOCK_BYTES)):
            data = os.pread(handle.fd, min(BLOCK_BYTES, s.st_size - index * BLOCK_BYTES), index * BLOCK_BYTES)
            if len(data) < min(BLOCK_BYTES, s.st_size - index * BLOCK_BYTES):
                raise FileNotFoundError
            if not is_zero(memoryview(data)):
                self.items.append(FileBlock(index, (self.spool.tell(), len(data))))
                self.spool.write(data)

    def __iter__(self):
        for item in self.items:
            if isinstance(item, FileBlock):
                self.spool.seek(item.content[0])
                item = item._replace(content=self.spool.read(item.content[1]))
            yield item
