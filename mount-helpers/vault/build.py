# SPDX-License-Identifier: Apache-2.0
"""Makes everything of a step in a new, empty directory that no other program uses. It follows no symlink and makes nothing
elsewhere: the directories from the root to the present entry are open, and every call is relative to the last one, by a
single name. Modes and times come last, because a directory may be one that its owner cannot write to. Files get owners if
this is root. No file becomes setuid or setgid. After a failure a part of the tree is there. One thread, and its writers.
"""
import concurrent.futures
import contextlib
import errno
import os
import stat

from entry import ACCESS_LISTS, DIRECTORY, FILE, HIDDEN, LINK, PREFIX, SYMLINK, Entry, is_carried, os_text
from kept import Handle, open_below, open_folder, state_path
from manifest import Block, End, Same, State
from objects import Failure
from places import BLOCK_BYTES
from reading import write_at

WRITERS = 4
WRITES_MAX = 8                  # blocks in flight
TIER = PREFIX + b'tier'


class Level:
    """A directory that is being filled."""

    def __init__(self, handle, entry):
        self.handle, self.entry = handle, entry


class Builder:
    """take() each part of a step, in its order; then finish(). base: the kept step whose blocks are shared, or None.
    added(bytes) learns of content that is there, or that holes save.
    """

    def __init__(self, folder, base=None, added=lambda count: None):
        self.base, self.added = base, added
        self.owners = os.geteuid() == 0
        self.levels = [Level(folder, None)]
        self.root = None        # the entry of the root
        self.entry = None       # the present one
        self.file = self.to = None              # open: the present file; where blocks go
        self.state = b''
        self.size = self.next = 0
        self.pool = concurrent.futures.ThreadPoolExecutor(WRITERS)
        self.writes = []

    def close(self):
        self.pool.shutdown(cancel_futures=True)
        self.levels, self.file, self.to = [], None, None

    @contextlib.contextmanager
    def doing(self, what, path=None):
        path = self.entry.path if path is None else path
        try:
            yield
        except OSError as e:
            raise Failure(f'{os_text(path) if path else "the model"}: cannot {what}: {e.strerror}') from None

    def take(self, item):
        kind = type(item)
        if kind is Entry:
            self.take_entry(item)
        elif kind is State:
            self.take_state(item)
        elif kind is Block:
            self.take_block(item)
        elif kind is Same:
            self.take_same(item)
        elif kind is End:
            self.end_file()
        else:
            raise TypeError(f'{item} is no part of a tree')

    def finish(self):
        while len(self.levels) > 1:
            self.end_directory()

    # ---- content ----

    def wait(self, most=0):
        while len(self.writes) > most:
            with self.doing('write'):
                self.writes.pop(0).result()

    def passed(self, end):
        self.added(end - self.next)
        self.next = end

    @staticmethod
    def write_held(handle, data, at):
        """The handle stays open for as long as this waits for a thread."""
        write_at(handle.fd, data, at)

    def take_block(self, block):
        self.wait(WRITES_MAX - 1)
        at = block.index * BLOCK_BYTES
        self.writes.append(self.pool.submit(self.write_held, self.to, block.data, at))
        self.passed(at + len(block.data))

    def take_same(self, same):
        """Whole chunks of files share their stored bytes. State shares nothing: it may be a view of several objects."""
        path = same.path or self.entry.path
        at, end = same.index * BLOCK_BYTES, min((same.index + same.count) * BLOCK_BYTES, self.size)
        with self.doing('open the file of the base that has its blocks'):
            source = open_below(self.base.folder, state_path(path, self.state) if self.state else path)
            if os.fstat(source.fd).st_size < end:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        with self.doing('share blocks of the base'):
            if self.state:
                self.copy(source, at, end)
            else:
                self.share(source, at, end)
        self.passed(end)

    def share(self, source, at, end):
        while at < end:
            count = os.copy_file_range(source.fd, self.to.fd, end - at, at, at)
            if not count:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            at += count

    def copy(self, source, at, end):
        while at < end:
            data = os.pread(source.fd, min(BLOCK_BYTES, end - at), at)
            if not data:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            write_at(self.to.fd, data, at)
            at += len(data)

    def end_content(self):
        """State of zeros came without blocks: writing an element makes it."""
        self.wait()
        if self.to is not None and self.to is not self.file and not self.next:
            with self.doing('make its state'):
                write_at(self.to.fd, bytes(min(self.size, 4)), 0)
        self.passed(self.size)
        self.to, self.size, self.next = None, 0, 0

    def take_state(self, s):
        self.end_content()
        name = self.entry.path.rpartition(b'/')[2]
        with self.doing('open its state'):
            self.to = Handle(os.open(HIDDEN + b'/state/' + name + b'/' + s.name, os.O_WRONLY | os.O_NOFOLLOW |
                                     os.O_CLOEXEC, dir_fd=self.levels[-1].handle.fd))
        self.state, self.size = s.name, s.size

    def end_file(self):
        self.end_content()
        if self.file is not None:
            self.set_meta(self.file, self.entry, 0o777)
            with self.doing('write'):
                os.close(os.dup(self.file.fd))      # a flush, which tells of errors
            self.file = None

    # ---- modes and times ----

    def set_meta(self, handle, e, keep):
        """What an entry has at last. Ids first: changing them clears bits of the mode."""
        if self.owners:
            with self.doing('set the owner', e.path):
                os.chown(handle.fd, e.uid, e.gid)
        with self.doing('set the mode', e.path):
            os.chmod(handle.fd, e.mode & keep)
        with self.doing('set the time', e.path):
            found = os.fstat(handle.fd)
            os.utime(handle.fd, ns=(found.st_atime_ns, e.mtime_ns))

    def end_directory(self):
        level = self.levels.pop()
        self.set_meta(level.handle, level.entry, 0o777 | stat.S_ISVTX | stat.S_ISGID)

    def end_directories(self, path):
        """Leaves the directories that path is not in."""
        depth = path.count(b'/') + 1
        while len(self.levels) > depth:
            self.end_directory()

    # ---- attributes ----

    def remove_others(self, fd, attributes):
        """A new file inherits words of its directory: those that it does not have in the step go."""
        wanted = {name for name, _ in attributes}
        with self.doing('read attributes'):
            try:
                there = [n for n in map(os.fsencode, os.listxattr(fd)) if is_carried(n) and n not in wanted]
            except OSError as e:
                if e.errno != errno.ENOTSUP:
                    raise
                return
        with self.doing('remove an attribute'):
            for name in there:
                try:
                    os.removexattr(fd, name)
                except OSError as e:
                    if e.errno != errno.ENODATA:
                        raise

    def set_attribute(self, fd, name, value):
        with self.doing(f'set {os_text(name)}'):
            try:
                os.setxattr(fd, name, value)
            except OSError as e:
                if e.errno != errno.EINVAL or name != TIER:     # a word that earlier versions took, and that did nothing
                    raise

    def set_attributes(self, fd, attributes):
        self.remove_others(fd, attributes)
        for name, value in attributes:
            self.set_attribute(fd, name, value)

    def finish_root(self):
        """Access lists, owner, mode and time of the root: until then the directory is the caller's own."""
        self.entry = self.root
        fd = self.levels[0].handle
        for name, value in self.root.attributes:
            if name in ACCESS_LISTS:
                self.set_attribute(fd.fd, name, value)
        self.set_meta(fd, self.root, 0o777 | stat.S_ISVTX | stat.S_ISGID)

    # ---- entries ----

    def take_entry(self, e):
        if self.entry is not None:
            self.end_file()
        self.entry, self.state = e, b''
        if not e.path:
            self.root = e
            self.set_attributes(self.levels[0].handle.fd, [a for a in e.attributes if a[0] not in ACCESS_LISTS])
            return
        self.end_directories(e.path)
        parent, name = self.levels[-1].handle.fd, e.path.rpartition(b'/')[2]
        {DIRECTORY: self.directory, FILE: self.begin_file, SYMLINK: self.symlink, LINK: self.link}[e.kind](e, parent, name)

    def directory(self, e, parent, name):
        with self.doing('make the directory'):
            os.mkdir(name, 0o700, dir_fd=parent)
            self.levels.append(Level(open_folder(name, self.levels[-1].handle), e))
        self.set_attributes(self.levels[-1].handle.fd, e.attributes)

    def begin_file(self, e, parent, name):
        with self.doing('make the file'):
            self.file = self.to = Handle(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT |
                                                 os.O_CLOEXEC, 0o600, dir_fd=parent))
        self.set_attributes(self.file.fd, e.attributes)
        with self.doing('set the size'):
            os.ftruncate(self.file.fd, e.size)
        self.size = e.size

    def symlink(self, e, parent, name):
        with self.doing('make the symlink'):
            os.symlink(e.target, name, dir_fd=parent)
        if self.owners:
            with self.doing('set the owner'):
                os.chown(name, e.uid, e.gid, dir_fd=parent, follow_symlinks=False)
        with self.doing('set the time'):
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            os.utime(name, ns=(found.st_atime_ns, e.mtime_ns), dir_fd=parent, follow_symlinks=False)

    def link(self, e, parent, name):
        with self.doing('find the file that it links to'):
            folder, *names = self.levels[0].handle, *e.target.split(b'/')
            for part in names[:-1]:
                folder = open_folder(part, folder)
            is_file = stat.S_ISREG(os.stat(names[-1], dir_fd=folder.fd, follow_symlinks=False).st_mode)
        if not is_file:
            raise Failure(f'{os_text(e.path)}: cannot link to what is no file')
        with self.doing('make the link'):
            os.link(names[-1], name, src_dir_fd=folder.fd, dst_dir_fd=parent, follow_symlinks=False)
