# SPDX-License-Identifier: Apache-2.0
"""A model root as its one steering process sees it: attributes, commands of `.hitrain/ctl`, and the store's messages
about errors."""
import ctypes
import errno
import io
import os
import weakref
from typing import Any, Callable, List, Optional, Sequence

from hitrain._settings import Known
from hitrain._words import HIDDEN, XATTR, attribute, close_quietly, opened

GONE = (errno.ENOTCONN, errno.ECONNABORTED)  # what a mount answers without its daemon
DEAD = "the file system's daemon is gone; mount again and continue with resume=True"
READ_ONLY = ('nothing can change here: mount without ro, or see `hitrainctl events` if the mount became so; `hitrainctl clone` makes a '
             'model of a kept step')
ELSEWHERE = 'this is no hitrain mount'
COPIES = '`hitrainctl clone`, and `hitrainctl archive` and `restore`, copy a model with its state and restore it'
NO_MODEL = ('this directory is no model with a step, as an empty one and a copy by cp, rsync or tar are none. '
            f'{COPIES}; resume=False begins a model in an empty directory')

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
MOVED = 'the directory of this model was deleted or renamed while this process trained it'


class Root:
    """The directory of a model. Attributes can be read by every process; commands are for the one that opened ctl."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._ctl: Optional[io.FileIO] = None
        self._waits: Optional[io.FileIO] = None
        self._passes: Optional[bool] = None
        self.room: 'Optional[weakref.WeakMethod[Callable[[], int]]]' = None  # bytes of a store in which the model has room
        self.known = Known()
        self._left = 0  # answers that are not read yet
        self._claimed = 0  # inode of the directory
        _check_mounted(path)

    def number(self, word: str) -> int:
        with self.explained(word):
            return int(os.getxattr(self.path, XATTR + word))

    @property
    def passes_through(self) -> bool:
        """Does the mount give the kernel memory of files? Then cached opens are the fast ones."""
        if self._passes is None:
            with self.explained('mount'):
                self._passes = attribute(self._mount(), 'passthrough_bytes') not in ('', '0')
        return self._passes

    def _mount(self) -> str:
        top = os.path.realpath(self.path)
        while not os.path.ismount(top):
            top = os.path.dirname(top)
        return top

    def claim(self) -> None:
        """From now on no other client can end a step of this model, take one back, or set the words that steer it."""
        if self.is_open:
            return
        with self.explained('model root'):
            self._ctl, self._claimed = self._opened(), os.stat(self.path).st_ino
        try:
            self.command(f'claim hitrain:{os.getpid()}')
        except OSError as e:
            self.forsake()
            if e.errno == errno.EBUSY:
                raise OSError(e.errno, f'{e.strerror}; one process steers a model: end that one first', self.path) from e
            raise

    def command(self, *lines: str, last: bool = False) -> None:
        """OSError with the store's own words when it refuses a line; later lines are not run. last: no request follows a success; the next
        command reads the answers."""
        for line in lines:
            self.known.before(line)
        try:
            os.write(self._number(), os.fsencode(''.join(f'{line}\n' for line in lines)))
        except OSError as e:
            answers = self._answers()
            said = _reason(answers)
            if said in ('', os.strerror(e.errno or 0)):  # no more than the name of the error
                said = self._says(e.errno or 0) or said
            raise OSError(e.errno, f'{os.strerror(e.errno or 0)} ({_last(lines, answers)}): {said}{self._room(e.errno)}', self.path) from e
        if last:
            self._left += len(lines)
        else:
            self._answers()

    def apply(self, names: Sequence[str], step: int = 0) -> None:
        """Written gradients of these parameters go to the step, in one call. With the number of the open step: their orthogonalised updates."""
        lines = [f'apply ortho/{name} if={step}\n' if step else f'apply {name}\n' for name in names]
        try:
            os.write(self._number(), os.fsencode(''.join(lines)))
        except OSError:
            with self.explained(f'{"orthogonalised update" if step else "gradient"} of {_last(names, self._answers())}'):
                raise
        self._answers()

    def wait_for(self, name: str) -> None:
        """Until the updates of a parameter that are queued are applied. One thread at a time, and not the one of command()."""
        if self._waits is None:
            self._waits = self._opened()
        plain = name == name.strip() and '\n' not in name  # else no command can name it
        try:
            os.write(self._waits.fileno(), os.fsencode(f'wait {name if plain else ""}\n'))
        finally:
            os.read(self._waits.fileno(), 1 << 16)

    @property
    def is_open(self) -> bool:
        return self._ctl is not None

    def _opened(self) -> io.FileIO:
        return opened(os.path.join(self.path, HIDDEN, 'ctl'), os.O_RDWR)

    def _number(self) -> int:
        """EBADF: the model is not claimed."""
        return self._ctl.fileno() if self._ctl else -1

    def close(self) -> None:
        """The claim ends before this returns: closing alone ends it a moment later."""
        if self.is_open:
            try:
                self.command('unclaim')
            except OSError:
                pass  # of a dead mount
            self.forsake()

    def exchange(self, other: str) -> None:
        """The model at the other path gets the name of this one, which gets that. The claim ends."""
        self.close()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(_AT_FDCWD, os.fsencode(other), _AT_FDCWD, os.fsencode(self.path), _RENAME_EXCHANGE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), self.path)
        self.known, self._claimed = Known(), 0

    def forsake(self) -> None:
        """Close, and let the claim be: in a forked child it is its parent's."""
        files, self._ctl, self._waits, self._left = (self._ctl, self._waits), None, None, 0
        for file in files:
            if file is not None:
                close_quietly(file)

    def explained(self, what: str) -> '_Explained':
        return _Explained(self, what)

    def _answers(self) -> List[str]:
        """The answers to the last lines. [] if there are none, as from a dead mount."""
        text, more = b'', b''
        try:
            while not text or len(more) == 1 << 16:
                more = os.read(self._number(), 1 << 16)
                text += more
                if not more:
                    break
        except OSError:
            return []
        left, self._left = self._left, 0
        return text.decode(errors='replace').splitlines()[left:]

    def _says(self, number: int) -> str:
        if number == errno.EROFS:
            return READ_ONLY
        if number not in GONE:
            try:
                if self._is_moved:
                    return ELSEWHERE if self.is_elsewhere else MOVED
                if number == errno.ENODATA and not attribute(self.path, 'optimizer'):
                    return ELSEWHERE if self.is_elsewhere else NO_MODEL
                said = attribute(self.path, 'error')
                if said or number != errno.ENOENT:
                    return said
            except OSError as e:
                number = e.errno or 0  # a request that a killed daemon was taking ended with EIO; later ones tell
        if number in GONE:
            return DEAD
        return ELSEWHERE if number == errno.ENOTSUP or self.is_elsewhere else ''

    def _room(self, error: Optional[int]) -> str:
        room = self.room() if self.room and error == errno.ENOSPC else None
        return f'; alone in a store of {room()} bytes the model has room' if room else ''

    @property
    def _is_moved(self) -> bool:
        try:
            return self._claimed not in (0, os.stat(self.path).st_ino)
        except FileNotFoundError:
            return self._claimed != 0

    @property
    def is_elsewhere(self) -> bool:
        return _elsewhere(self.path) != ''


def _last(lines: Sequence[str], answers: List[str]) -> str:
    """The line that failed: each one that was run has an answer."""
    return lines[min(max(len(answers), 1), len(lines)) - 1]


def _reason(answers: List[str]) -> str:
    """The last answer without the name of the error."""
    return answers[-1].split(': ', 2)[-1] if answers else ''


class _Explained:
    """Adds to an OSError the action and the store's message about it, once."""

    def __init__(self, root: Root, what: str) -> None:
        self.root, self.what = root, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, OSError) and error.errno is not None:
            text, said = f'{os.strerror(error.errno)} ({self.what})', self.root._says(error.errno) + self.root._room(error.errno)
            raise type(error)(error.errno, f'{text}: {said}' if said else text, self.root.path) from error


def _elsewhere(path: str) -> str:
    """The nearest directory that exists, if it is on another file system, which may store attributes, too: all files of a store have this
    one. A mount that is dead, or that cannot be reached, says so by itself later."""
    there = os.path.realpath(path)
    while True:
        try:
            os.getxattr(there, XATTR + 'class')
            return ''
        except OSError as e:
            if e.errno != errno.ENOENT or there == os.path.dirname(there):
                return there if e.errno in (errno.ENODATA, errno.ENOTSUP) else ''
        there = os.path.dirname(there)


def _check_mounted(path: str) -> None:
    there = _elsewhere(path)
    if there:
        raise FileNotFoundError(errno.ENOENT, f'{ELSEWHERE}: {there}. Mount a store with `mount -t hitrain DEVICE DIRECTORY`, and give a directory in it',
                                path)
