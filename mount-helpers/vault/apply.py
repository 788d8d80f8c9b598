# SPDX-License-Identifier: Apache-2.0
"""A copy of a model gets logged steps: each is computed again from its gradients, and is one commit with the place of the copy,
an attribute of its root. An abort takes back a step that did not end, so a crash leaves the copy at a whole step.

    user.hitrain-follow = step=N lineage=N digest=HEX|sum=HEX files=N [job=NAME]     files: the step of its other files
"""
import collections
import errno
import fcntl
import os
import re
import stat
import struct

from changes import number, word
from control import open_ctl, tell
from entry import FOLLOW, HIDDEN, PREFIX
from kept import open_below as open_file_below, open_folder, state_path
from logged_vault import Fetch, FromVault
from logged import ELEMENT_BYTES, ORTHO, ORTHO_BYTES, SPARSE, File, FileBlock, Numbers, Piece, Settings, decode
from objects import Damage, Failure
from places import BLOCK_BYTES
from reading import write_at

# sum: 16 bytes, the digest of all content or the sum of a logged step; None: not known.
Place = collections.namedtuple('Place', 'step lineage is_sum sum files')
NOWHERE = Place(0, 0, False, None, 0)


class Other(Failure):
    """The copy is at another step than what would follow."""


# A parameter took a step, and nothing of it is computed here: its count of updates then. Before the step opens.
Counted = collections.namedtuple('Counted', 'path updates')


class Copy:
    """The model root at path, locked for this program. folder: its Handle, if it has another name yet. One thread."""

    def __init__(self, path, folder=None):
        self.path = path
        try:
            self.folder = folder or open_folder(os.path.realpath(path))
            fcntl.flock(self.folder.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.ctl = open_ctl(self.folder)
        except BlockingIOError:
            raise Failure(f'{path}: another program receives steps here') from None
        except OSError as e:
            raise Failure(f'{path}: {"this is no model root" if e.errno == errno.ENOENT else e.strerror}') from None
        self.to = self.file = self.param = None
        self.open = self.ortho = False
        self._take_back_what_was_left()

    def close(self):
        if self.to is not None:
            os.close(self.to)
        self.to = None
        fcntl.flock(self.folder.fd, fcntl.LOCK_UN)

    def _number(self, name):
        return int(word(f'/proc/self/fd/{self.folder.fd}', name) or 0)

    def _take_back_what_was_left(self):
        """A program that ended in the middle may have left an open step. A step of somebody else stays."""
        self.step = self._number(b'step')
        self.place, ahead = self._read_place()
        if self.place.sum or ahead:
            self.command(b'abort')
            self.place, _ = self._read_place()
        elif self._number(b'step_open'):
            raise Failure(f'{self.path}: a step is open: commit or abort it first')

    def _read_place(self):
        """(Place, whether it is that of a step that was not committed)."""
        try:
            text = os.getxattr(self.folder.fd, FOLLOW)
        except OSError:
            return NOWHERE._replace(step=self.step), False
        found = re.search(rb' (sum|digest)=([0-9a-f]{32})(?: |$)', text)
        step = number(text, b'step')
        known = found and step == self.step
        return Place(self.step, number(text, b'lineage'), bool(found) and found[1] == b'sum',
                     bytes.fromhex(found[2].decode()) if known else None, number(text, b'files')), step == self.step + 1

    def command(self, line):
        try:
            tell(self.ctl, line)
        except OSError as e:
            raise Failure(f'{self.path}: {e.strerror}') from None

    def set_place(self, place):
        self.place = place
        text = f'step={place.step} lineage={place.lineage} {"sum" if place.is_sum else "digest"}={place.sum.hex()} files={place.files}'
        try:
            os.setxattr(self.folder.fd, FOLLOW, text.encode())
        except OSError as e:
            raise Failure(f'{self.path}: {e.strerror}') from None

    def begin_at(self, lineage, digest):
        """The copy is at a step with this digest, which the caller has verified, and goes on from there."""
        self.set_place(Place(self.step, lineage, False, digest, 0))
        self.command(b'commit')

    # ---- one step ----

    def apply(self, step, items):
        """Computes a step. items: Numbers, Piece, Settings, File, FileBlock and logged.End, with bytes as content. Failure:
        the copy is as before."""
        if step != self.step + 1:
            raise Other(f'{self.path}: step {step} does not follow step {self.step} of this copy')
        try:
            end, params = None, 0
            for item in items:
                self._take(item)
                params += isinstance(item, Numbers)
                end = item
            self._end_content()
            self._end_step(step, end, params)
        except BaseException as e:
            self._take_back(step)
            if isinstance(e, OSError):
                raise Failure(f'{self.path}: step {step}: {e.strerror}') from None
            raise

    def apply_files(self, step, items, check):
        """The step is that of the copy, which came without its files: they alone are taken. check(End) raises to refuse."""
        try:
            any_files, end = False, None
            for item in items:
                if isinstance(item, (Settings, File, FileBlock)):
                    self._take(item)
                    any_files = True
                end = item
            self._end_content()
            check(end)
            if end.files:
                self.set_place(self.place._replace(files=step))
                self.command(b'commit')
            elif any_files:
                self.command(b'abort')
            self.open = False
        except BaseException:
            self._take_back(step)
            raise

    def _take_back(self, step):
        if self.to is not None:
            os.close(self.to)
            self.to, self.ortho = None, False
        if self.open:
            self.open = False
            self.command(b'abort')
            self.place, _ = self._read_place()

    def _end_step(self, step, end, params):
        if params and not self._number(b'step_open'):
            raise Damage(f'step {step} has no gradient')
        self.open = True
        self.set_place(Place(step, end.lineage, True, end.sum, step if end.files else self.place.files))
        if not params:          # it was skipped: its number alone says so
            os.setxattr(self.folder.fd, PREFIX + b'step', str(step).encode())
        self.command(b'commit')
        self.open = False
        self.step = self._number(b'step')
        if self.step != step:
            raise Failure(f'{self.path}: this copy is at step {self.step} now: another program changes it')

    def _take(self, item):
        if isinstance(item, Piece):
            if item.coding & ORTHO and not self.ortho:
                self._begin_ortho()
            data = item.content
            if item.coding & ~ORTHO == SPARSE:
                data = decode(data, item.bytes, ORTHO_BYTES if self.ortho else self.element)
            write_at(self.to, data, item.first)
        elif isinstance(item, FileBlock):
            write_at(self.to, item.content, item.index * BLOCK_BYTES)
        elif isinstance(item, Numbers):
            if not item.section:
                self._end_content()
            self.command(b'decide ' + item.data.hex().encode() + b' ' + item.path)
            if not item.section:
                self.open, self.element, self.param = True, ELEMENT_BYTES[item.data[29]], item.path
                self.to = self._open_hidden(b'grad')
        elif isinstance(item, File):
            self._end_content()
            self.open = True
            self.to, self.file = open_below(self.folder, item.path, make=True), item
            os.ftruncate(self.to, 0)
            os.ftruncate(self.to, item.size)
        elif isinstance(item, Settings):
            self.open = True
            os.setxattr(self.folder.fd, PREFIX + b'optimizer', item.text)
        elif isinstance(item, Counted):
            self.open = True
            count = open_file_below(self.folder, state_path(item.path, b'step'), os.O_WRONLY)
            write_at(count.fd, struct.pack('<f', item.updates), 0)

    def _open_hidden(self, kind):
        return open_below(open_folder(kind, open_folder(HIDDEN, self.folder)), self.param, make=False)

    def _begin_ortho(self):
        """The gradient is whole: it changed the momentum. What its client made of that is the second phase."""
        self._end_content()
        self.to, self.ortho = self._open_hidden(b'ortho'), True

    def _end_content(self):
        """The close of a gradient hands it over. An orthogonalised update is applied. A file gets its mode and time."""
        to, file, ortho = self.to, self.file, self.ortho
        self.to, self.file, self.ortho = None, None, False
        if to is None:
            return
        try:
            if file:
                os.fchmod(to, file.mode)
                os.utime(to, ns=(os.fstat(to).st_atime_ns, file.mtime_ns))
        finally:
            os.close(to)
        if ortho:
            self.command(b'apply ortho/%s if=%d' % (self.param, self._number(b'step_open')))


class Begin:
    """No step yet: the model is a copy from the first moment of its name on."""

    @staticmethod
    def apply(path, folder, end):
        copy = Copy(path, folder)
        copy.begin_at(end.lineage, end.digest)
        copy.close()


class Steps:
    """Logged steps of a rank that follow a full one, of a chain that is proven. fetch: counts what they bring."""

    def __init__(self, engine, vault, job, steps, rank=0):
        self.engine, self.vault, self.job, self.steps, self.rank = engine, vault, job, steps, rank
        self.fetch = Fetch(engine)

    def manifest(self, step, summary):
        return FromVault(self.engine, self.vault.uuid, self.job, step.step, step.epoch, summary, self.fetch)

    def items(self, step):
        return self.manifest(step, step.summaries[self.rank])

    def apply(self, path, folder, end):
        """folder: a Handle of a model at the full step, whose end mark is given."""
        copy = Copy(path, folder)
        try:
            copy.begin_at(end.lineage, end.digest)
            for step in self.steps:
                copy.apply(step.step, self.items(step))
            os.removexattr(folder.fd, FOLLOW)
            copy.command(b'commit')
        finally:
            copy.close()


def open_below(folder, path, make):
    """A descriptor of a regular file below the folder; follows no symlink. make: with directories. A file that may not be
    written becomes writable: the caller sets its mode."""
    names = path.split(b'/')
    for name in names[:-1]:
        if make:
            try:
                os.mkdir(name, dir_fd=folder.fd)
            except FileExistsError:
                pass
        folder = open_folder(name, folder)
    flags = (os.O_RDWR | os.O_CREAT if make else os.O_WRONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        to = os.open(names[-1], flags, 0o600, dir_fd=folder.fd)
    except PermissionError:
        if not make or not stat.S_ISREG(os.stat(names[-1], dir_fd=folder.fd, follow_symlinks=False).st_mode):
            raise
        os.chmod(names[-1], 0o600, dir_fd=folder.fd)
        to = os.open(names[-1], flags, 0o600, dir_fd=folder.fd)
    if not stat.S_ISREG(os.fstat(to).st_mode):
        os.close(to)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return to
