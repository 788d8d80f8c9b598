# SPDX-License-Identifier: Apache-2.0
"""Scheme file: a vault in a folder, of a local or a network file system. `file:///mnt/lustre/vault`, or a path.

put_new writes a temporary file in the folder of its key, syncs it, makes the key by link(2), removes the temporary name and
syncs the folder. link fails where the name is there, on every file system that it works on; a rename would replace it. No
O_TMPFILE and no locks: many network file systems lack them. Temporary names hold a `~`, which no key does. Symbolic links
below the vault are not followed, because others may write there. Large content goes past the kernel's copies where the file
system can do that, since nobody reads it soon: to copy it there takes more processor time than all else.
"""
import errno
import fcntl
import os
import stat
import urllib.parse

from errors import Again, Failed, Full, Missing, NoVault, Refused, TooLarge
import wire

FULL = {errno.ENOSPC, errno.EDQUOT}
REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
NO_LINK = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
ENTRIES_MAX = 10000
LEFTOVER_AGE_S = 7 * 86400

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
DIRECT_BYTES_MIN = 1 << 20
PAGE_BYTES = 4096


def move(file, call, view, at):
    """call(file, a part of the view, its offset) until all has moved, or a call moves nothing: how many bytes. Whole pages go
    past the kernel's copies, if the file system and the memory allow that.
    """
    is_direct = len(view) >= DIRECT_BYTES_MIN and at % PAGE_BYTES == 0 and set_direct(file, True)
    whole = len(view) // PAGE_BYTES * PAGE_BYTES if is_direct else 0
    done = 0
    while done < len(view):
        if is_direct and (done >= whole or done % PAGE_BYTES):
            is_direct = set_direct(file, False)
        try:
            count = call(file, view[done:whole if is_direct else len(view)], at + done)
        except OSError as e:
            if not is_direct or e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            is_direct = set_direct(file, False)
            continue
        if not count:
            break
        done += count
    return done


def set_direct(file, on):
    """Is it on?"""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        return on
    except OSError:
        if on:
            return False            # it has no such way
        raise


class File:
    def __init__(self, url):
        parts = urllib.parse.urlsplit(url)
        if parts.netloc not in ('', 'localhost') or not parts.path.startswith('/'):
            raise Failed('expected file:///PATH with an absolute path')
        self.root = urllib.parse.unquote(parts.path)

    def hello(self, deadline):
        """The largest object in bytes. Fails where the vault cannot be reached."""
        os.close(self._root())
        return wire.OBJECT_BYTES_MAX

    def put_new(self, key, data, deadline):
        """True: the key is new and on stable storage. False: it was there."""
        folder, _, name = key.rpartition('/')
        at = self._folder(folder, make=True, may_make_root=key.startswith('vault/'))
        try:
            return self._put(at, name, data)
        except OSError as e:
            raise self._error(e) from None
        finally:
            os.close(at)

    def _put(self, at, name, data):
        if self._is_there(at, name):
            os.fsync(at)                        # it may be seen before it is stable
            return False
        temporary = f'~{os.urandom(8).hex()}'
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=at)
        try:
            try:
                if move(file, os.pwrite, memoryview(data), 0) < len(data):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                os.fsync(file)
            finally:
                os.close(file)                  # network file systems tell here that they are full
            return self._link(at, temporary, name)
        finally:
            os.unlink(temporary, dir_fd=at)

    @staticmethod
    def _link(at, temporary, name):
        try:
            os.link(temporary, name, src_dir_fd=at, dst_dir_fd=at)
            made = True
        except FileExistsError:
            # A network file system may send a call twice: the first one made this link, and the second one found it.
            ours, found = (os.stat(n, dir_fd=at, follow_symlinks=False) for n in (temporary, name))
            made = (ours.st_dev, ours.st_ino) == (found.st_dev, found.st_ino)
        os.fsync(at)
        return made

    @staticmethod
    def _is_there(at, name):
        try:
            os.stat(name, dir_fd=at, follow_symlinks=False)
            return True
        except FileNotFoundError:
            return False

    def get(self, key, offset, room, deadline):
        """Fills room from offset on; returns the number of bytes, fewer only at the end of the object."""
        folder, _, name = key.rpartition('/')
        at = self._folder(folder)
        try:
            file = os.open(name, FILE, dir_fd=at)
        except OSError as e:
            raise self._error(e, key) from None
        finally:
            os.close(at)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise Failed(f'{key} is no regular file')
            return move(file, lambda of, part, at: os.preadv(of, [part], at), room, offset)
        except OSError as e:
            raise self._error(e, key) from None
        finally:
            os.close(file)

    def list(self, prefix, after, deadline):
        """([(key, bytes, age in seconds)], whether there is more), ascending by key."""
        out = []
        if not prefix and not os.path.lexists(self.root) and os.path.isdir(os.path.dirname(self.root)):
            return out, False                   # the place of a vault that is to be made
        try:
            now = self._now()
            folder = prefix.rpartition('/')[0]
            for entry in self._walk(folder + '/' if folder else '', prefix, after, now):
                out.append(entry)
                if len(out) >= ENTRIES_MAX:
                    return out, True
        except Missing:
            pass
        return out, False

    def _walk(self, folder, prefix, after, now):
        at = self._folder(folder.rstrip('/'))
        try:
            names = []
            with os.scandir(at) as entries:
                for e in entries:
                    if '~' in e.name:
                        self._drop_leftover(at, e.name, now)
                    elif e.is_dir(follow_symlinks=False):
                        names.append(e.name + '/')
                    elif e.is_file(follow_symlinks=False):
                        names.append(e.name)
            for name in sorted(names):
                key = folder + name
                if name.endswith('/'):
                    # Some key below may have the prefix, and be after `after`.
                    if (key.startswith(prefix) or prefix.startswith(key)) and (after < key or after.startswith(key)):
                        yield from self._below(key, prefix, after, now)
                elif key.startswith(prefix) and key > after and wire.is_key(key):
                    try:
                        s = os.stat(name, dir_fd=at, follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield key, s.st_size, now - s.st_mtime if now else 0
        except OSError as e:
            raise self._error(e) from None
        finally:
            os.close(at)

    def _below(self, key, prefix, after, now):
        try:
            yield from self._walk(key, prefix, after, now)
        except Missing:
            pass

    def _drop_leftover(self, at, name, now):
        """A writer that ended in the middle left a temporary file."""
        try:
            if now and now - os.stat(name, dir_fd=at, follow_symlinks=False).st_mtime > LEFTOVER_AGE_S:
                os.unlink(name, dir_fd=at)
        except OSError:
            pass

    def _now(self):
        """The clock that gives files their times, which a server may have: the folder gets it. It needs no space.

        0 where this user cannot write there: all is young then, and no collector removes it.
        """
        at = self._root()
        try:
            os.utime(at)
            return os.fstat(at).st_mtime
        except OSError:
            return 0
        finally:
            os.close(at)

    def remove(self, key, deadline):
        folder, _, name = key.rpartition('/')
        try:
            at = self._folder(folder)
        except Missing:
            return
        try:
            os.unlink(name, dir_fd=at)
            os.fsync(at)
        except FileNotFoundError:
            pass
        except OSError as e:
            raise self._error(e, key) from None
        finally:
            os.close(at)

    def _root(self):
        try:
            return os.open(self.root, FOLDER & ~os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            raise NoVault('there is no such folder; mount its file system, or make the folder') from None
        except OSError as e:
            raise self._error(e) from None

    def _folder(self, path, make=False, may_make_root=False):
        """A descriptor of a folder below the vault, made with all above it."""
        if may_make_root:
            self._make_root()
        at = self._root()
        try:
            for name in path.split('/') if path else ():
                below = self._step(at, name, make)
                os.close(at)
                at = below
        except OSError as e:
            os.close(at)
            raise self._error(e, path) from None
        return at

    @staticmethod
    def _step(at, name, make):
        try:
            return os.open(name, FOLDER, dir_fd=at)
        except FileNotFoundError:
            if not make:
                raise
        try:
            os.mkdir(name, dir_fd=at)
        except FileExistsError:
            pass
        os.fsync(at)
        return os.open(name, FOLDER, dir_fd=at)

    def _make_root(self):
        """A new vault: its folder, but none above it, which a file system that is not mounted would lack."""
        try:
            os.mkdir(self.root)
        except FileExistsError:
            return
        except FileNotFoundError:
            raise NoVault('the folder above it is not there; mount its file system, or make the folder') from None
        except OSError as e:
            raise self._error(e) from None
        above = os.open(os.path.dirname(self.root), FOLDER & ~os.O_NOFOLLOW)
        try:
            os.fsync(above)
        finally:
            os.close(above)

    def _error(self, e, key=''):
        if e.errno in FULL:
            return Full('no space there, or the quota is used up')
        if e.errno in REFUSED:
            return Refused(f'{e.strerror}: give this user access to the folder')
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            return Missing(f'no object {key}')
        if e.errno == errno.EFBIG:
            return TooLarge('the file system takes no file of this size')
        if e.errno in NO_LINK:
            return Failed(f'{e.strerror}: its file system lacks link(2), which makes a name only once')
        if e.errno == errno.ELOOP:
            return Failed('a symbolic link below a vault is not followed')
        return Again(e.strerror)


open_scheme = File
