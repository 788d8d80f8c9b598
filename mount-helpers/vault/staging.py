# SPDX-License-Identifier: Apache-2.0
"""A model that is made out of sight and gets its name at the end.

It is the only entry of a private directory .hitrain-receive-XXXXXXXX, beside its future name, on a store. That directory
has the attribute user.hitrain-receive, whose value is its name, durable before the model begins. It has a lock (flock) as
long as its program runs. So the next program of that user that stages something there knows it, and removes it with the
model in it, whatever a killed program or a crash left: at any moment until the model moved to its name. Without the
attribute it has nothing in it yet, and goes only then. Others may write in the directory above: so everything goes by
descriptors, and no symlink is followed.
"""
import ctypes
import errno
import fcntl
import os
import re
import stat
import sys

from entry import NAME_BYTES_MAX, STAGING
from kept import Handle, explain, is_on_store, open_folder
from objects import Failure
from say import note

PREFIX = '.hitrain-receive-'
MODEL = 'model'
TRIES = 16
DEPTH_MAX = 1024
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def rename(old, old_parent, new, new_parent, how):
    if _libc.renameat2(old_parent.fd, os.fsencode(old), new_parent.fd, os.fsencode(new), how) < 0:
        e = ctypes.get_errno()
        raise OSError(e, os.strerror(e))


def rename_new(old, old_parent, new, new_parent):
    """Fails where the new name is taken."""
    rename(old, old_parent, new, new_parent, RENAME_NOREPLACE)


# ---- removal ----

def open_to_empty(name, parent):
    """A directory that is to become empty, whatever its mode."""
    try:
        found = open_folder(name, parent)
    except PermissionError:
        at = Handle(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent.fd))
        os.chmod(f'/proc/self/fd/{at.fd}', 0o700)   # the directory itself, whatever has its name now
        found = Handle(os.open('.', os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at.fd))
    os.chmod(found.fd, 0o700)
    return found


def remove_all(name, parent, depth):
    """Whatever stands there, without following a symlink."""
    try:
        os.unlink(name, dir_fd=parent.fd)
        return
    except OSError as e:
        if e.errno not in (errno.EISDIR, errno.EPERM):
            raise
    if depth >= DEPTH_MAX:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    empty(open_to_empty(name, parent), depth + 1)
    os.rmdir(name, dir_fd=parent.fd)


def empty(folder, depth=0):
    for name in os.listdir(folder.fd):
        remove_all(name, folder, depth)


def forget_steps(folder):
    """A model whose commits kept steps can be removed without these alone. Only a model root has .hitrain/snap."""
    try:
        os.stat('.hitrain/snap', dir_fd=folder.fd)
        ctl = Handle(os.open('.hitrain/ctl', os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd))
        os.write(ctl.fd, b'forget *\n')
    except OSError:
        pass                    # the removal names the rest


def is_there(name, parent, folder):
    """Has the directory still its name?"""
    try:
        named = os.stat(name, dir_fd=parent.fd, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(named, os.fstat(folder.fd))


def remove_with_model(name, parent, folder):
    """Another program may have moved the directory away. Then it is left, empty, and so is the one at its name."""
    forget_steps(folder)
    try:
        forget_steps(open_to_empty(MODEL, folder))
    except OSError:
        pass                    # there is none yet
    os.chmod(folder.fd, 0o700)
    empty(folder)
    if not is_there(name, parent, folder):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    os.rmdir(name, dir_fd=parent.fd)


def lock(folder):
    """False: a program has it."""
    try:
        fcntl.flock(folder.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def mark_of(folder):
    try:
        return os.getxattr(folder.fd, STAGING)
    except OSError as e:
        return b'' if e.errno == errno.ENODATA else None


def remove_old(name, parent):
    """What a program of the same user left that was killed. Another user may have renamed it, or given another directory
    such a name, but cannot have set its attribute. Without that it may be empty alone: another program may mark it at
    this moment, notices that it is gone, and makes another one.
    """
    try:
        folder = open_folder(name, parent)
    except OSError:
        return
    found = os.fstat(folder.fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700 or mark_of(folder) is None:
        return
    mark = mark_of(folder)
    if mark not in (b'', os.fsencode(name)) or not lock(folder):
        return
    try:
        if mark:
            remove_with_model(name, parent, folder)
        elif is_there(name, parent, folder):
            os.rmdir(name, dir_fd=parent.fd)
        else:
            return
    except OSError as e:
        if mark:
            note(f'{name}, which an interrupted restore left, cannot be removed: {e.strerror}')
        return
    note(f'removed {name}, which an interrupted restore had left')


# ---- staging ----

class Staging:
    """The place at path. folder: the private directory; model: the one that is to become the model. Ends with publish()
    or drop(). Failure.
    """

    def __init__(self, path):
        self.path, self.model, self.published = path, None, False
        above, self.name = os.path.split(path.rstrip('/'))
        self.above = above or '.'
        if not self.name or self.name in ('.', '..') or len(os.fsencode(self.name)) > NAME_BYTES_MAX:
            raise Failure(f'{path}: this is no name of a new directory')
        try:
            self.parent = Handle(os.open(self.above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as e:
            raise Failure(f'{path}: {e.strerror}') from None
        self.check_parent(self.above)
        for name in os.listdir(self.parent.fd):
            if re.fullmatch(f'{re.escape(PREFIX)}[0-9a-f]{{8}}', name):
                remove_old(name, self.parent)
        self.make()

    def has(self, name):
        try:
            os.stat(name, dir_fd=self.parent.fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def check_parent(self, above):
        try:
            if not is_on_store(self.parent.fd):
                raise Failure(f'{above} is not on a hitrain mount')
            os.listdir(self.parent.fd)
        except OSError as e:
            raise explain(above, e) from None
        if self.has('.hitrain/grad'):
            raise Failure(f'{self.path} lies in a model; a step is restored into a directory outside of model roots')
        self.check_name()

    def check_name(self):
        if self.has(self.name):
            raise Failure(f'{self.path} is there already; a step is restored into a new directory')

    def make(self):
        for _ in range(TRIES):
            self.temporary = PREFIX + os.urandom(4).hex()
            try:
                if self.make_one():
                    return
            except OSError as e:
                raise Failure(f'{self.path}: {e.strerror}') from None
        raise Failure(f'{self.path}: another program takes the place of the hidden directory again and again')

    def make_one(self):
        """False: another one has the name, or removed the directory before it was marked."""
        try:
            os.mkdir(self.temporary, 0o700, dir_fd=self.parent.fd)
            self.folder = open_folder(self.temporary, self.parent)
        except (FileExistsError, FileNotFoundError):
            return False
        if not lock(self.folder) or not is_there(self.temporary, self.parent, self.folder):
            return False
        found = os.fstat(self.folder.fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o77 or os.listdir(self.folder.fd):
            raise Failure(f'{self.path}: another directory stands in the place of the hidden one')
        try:
            os.setxattr(self.folder.fd, STAGING, os.fsencode(self.temporary))
            os.fsync(self.folder.fd)
        except OSError:
            os.rmdir(self.temporary, dir_fd=self.parent.fd)
            raise
        return True

    def make_model(self):
        """A new directory that is to become the model, for the caller alone."""
        try:
            os.mkdir(MODEL, 0o700, dir_fd=self.folder.fd)
        except OSError as e:
            raise Failure(f'{self.path}: {e.strerror}') from None
        self.open_model()

    def open_model(self):
        """The model that was made otherwise as the entry MODEL of the folder."""
        try:
            self.model = open_folder(MODEL, self.folder)
        except FileNotFoundError:
            raise Failure(f'{self.path}: somebody moved {self.temporary} away') from None
        except OSError as e:
            raise Failure(f'{self.path}: {e.strerror}') from None

    def publish(self):
        """Gives the model its name, durably. No other user can have changed the private directory. But that
        itself may have gone.
        """
        self.need_place()
        try:
            rename_new(MODEL, self.folder, self.name, self.parent)
            try:
                os.fsync(self.parent.fd)
            except OSError:
                rename_new(self.name, self.parent, MODEL, self.folder)
                raise
        except OSError as e:
            raise Failure(f'{self.path}: the step cannot get its name: {e.strerror}') from None
        self.published = True
        try:
            os.rmdir(self.temporary, dir_fd=self.parent.fd)
        except OSError:
            pass                # it is empty: the next program removes it

    def need_place(self):
        if not is_there(self.temporary, self.parent, self.folder) or not is_there(MODEL, self.folder, self.model):
            raise Failure(f'{self.path}: the step cannot get its name: somebody moved {self.temporary} away')

    def drop(self):
        try:
            remove_with_model(self.temporary, self.parent, self.folder)
        except OSError as e:
            print(f'hitrainctl: error: {self.temporary} is left, and can be removed: {e.strerror}', file=sys.stderr)


class Replacing(Staging):
    """A model that takes the name of the one that is there, of the folder old. At any moment one of the two has the name.
    still(path): raises a Failure where the old one, which is at this path by then, is not what it was: it gets its name back.
    alone: a context in which nobody looks for the models that need pins.
    """

    def __init__(self, path, old, still, alone):
        self.old, self.still, self.alone = old, still, alone
        super().__init__(path)

    def check_name(self):
        if not is_there(self.name, self.parent, self.old):
            raise Failure(f'{self.path}: somebody moved it away')

    def exchange(self):
        rename(MODEL, self.folder, self.name, self.parent, RENAME_EXCHANGE)

    def give_back(self):
        """The old one gets its name. Where that fails it stays, and no program removes it."""
        try:
            self.exchange()
            os.fsync(self.parent.fd)
        except OSError as e:
            self.published = True
            os.removexattr(self.folder.fd, STAGING)
            raise Failure(f'{self.path}: its name cannot be given back: {e.strerror}; the model is {self.above}/{self.temporary}/{MODEL}') from None

    def publish(self):
        self.need_place()
        self.check_name()
        try:
            with self.alone:
                self.exchange()
                try:
                    if not is_there(MODEL, self.folder, self.old):
                        raise Failure(f'{self.path}: somebody moved it away')
                    os.fsync(self.parent.fd)
                    self.still(f'{self.above}/{self.temporary}/{MODEL}')
                except BaseException:
                    self.give_back()
                    raise
        except OSError as e:
            raise Failure(f'{self.path}: the names cannot be exchanged: {e.strerror}') from None
        self.published = True
        self.drop()
