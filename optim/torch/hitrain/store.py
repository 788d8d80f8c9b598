# SPDX-License-Identifier: Apache-2.0
"""A store without a word to the system: made if it is not there, mounted while a program needs it.

    import hitrain

    with hitrain.Store('/data/model.img', model=model) as store:
        optimizer = hitrain.offload(model, store / 'model', lr=3e-4, resume=store.has('model'))

Each process that opens the same store joins the mount that is there, and the last one unmounts it. Two locks in the folder of mount points tell:
`start` is held while a process mounts or unmounts, and `users`, shared, while one uses the store. The kernel lets go of both when a process is
killed. A daemon without users serves the next process; one that died is replaced, and the store is as after its last commit.
"""
import atexit
import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import stat
import tempfile
import warnings
from typing import Any, Iterator, Optional, Union

from hitrain import _daemon, _optimizer
from hitrain._daemon import StoreError
from hitrain._need import store_bytes
from hitrain._words import attribute, close_quietly

__all__ = ['Store', 'StoreError']

_SMALLEST = 64 << 20


class Store:
    """
    path      A file, made if it is not there, or a device that mkfs.hitrain(8) has formatted.
    size      Bytes of a new file, or text as '64G'. 'auto': what `model` needs (store_bytes), or half of the free space of the folder.
    dram      Memory for tensors, in bytes or as text. 'auto': a quarter of the memory that is available.
    model     For size='auto': a module (also on 'meta') or its parameters.
    options   More options of the mount, as for -o of hitrain(8). Who joins a mount gets its dram and options.

    open() and close(), or `with`. `store / 'model'` is a path below `store.mountpoint`.
    One thread may open and close. A forked child uses the mount of its parent and need not close it.
    Raises StoreError with the words of the program that failed: a folder without room, a file that is no store, a store that another user or
    mount has.
    """

    def __init__(self, path: 'Union[str, os.PathLike[str]]', size: Union[int, str] = 'auto', dram: Union[int, str] = 'auto', *, model: Any = None,
                 options: str = '') -> None:
        self.path = pathlib.Path(os.path.realpath(path))
        self.size, self.model = size, model
        name = re.sub('[^A-Za-z0-9._-]', '_', self.path.stem)[:32]
        folder = _folder() / f'{name}-{hashlib.sha256(os.fsencode(self.path)).hexdigest()[:12]}'
        more = ([] if dram == 'auto' else [f'dram={dram}']) + ([options] if options else [])
        self.mountpoint = folder / 'mnt'
        self._daemon = _daemon.Daemon(self.path, self.mountpoint, folder / 'log', ','.join(more))
        self._folder = folder
        self._users: Optional[int] = None
        self._pid = 0

    def __truediv__(self, name: str) -> pathlib.Path:
        return self.mountpoint / name

    def has(self, name: str) -> bool:
        """Whether there is a model of this name, which resume=True continues."""
        try:
            return attribute(str(self / name), 'optimizer') != ''
        except FileNotFoundError:
            return False

    def __fspath__(self) -> str:
        return str(self.mountpoint)

    def __enter__(self) -> 'Store':
        return self.open()

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def open(self) -> 'Store':
        if self._users is not None:
            raise StoreError(f'{self.path} is open already')
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._starting():
            if not (_daemon.is_mounted(self.mountpoint) and self._daemon.answers()):
                self._begin()
            self._users = os.open(self._folder / 'users', os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._users, fcntl.LOCK_SH)
        self._pid = os.getpid()
        atexit.register(self.close)
        return self

    def close(self) -> None:
        """Closes the optimizers of this process in the store, and unmounts it unless another process uses it. A step with sent gradients is
        taken back. If a program keeps the mount busy, the store stays mounted, and a RuntimeWarning names the program."""
        if self._users is None:
            return
        users, self._users = self._users, None
        atexit.unregister(self.close)
        if self._pid != os.getpid():  # a forked child: the lock is its parent's, too
            return close_quietly(users)
        try:
            _optimizer.close_below(str(self.mountpoint))
            with self._starting(), contextlib.suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._end()
        finally:
            os.close(users)

    def _begin(self) -> None:
        _daemon.detach(self.mountpoint)
        self.mountpoint.mkdir(exist_ok=True)
        self._daemon.log_path.unlink(missing_ok=True)
        if not self.path.exists():
            self._make()
        self._daemon.mount()

    def _end(self) -> None:
        if not self._daemon.answers():
            _daemon.detach(self.mountpoint)  # its daemon is dead
        else:
            try:
                self._daemon.unmount()
            except StoreError as e:
                warnings.warn(f'{self.path} stays mounted at {self.mountpoint}: {e}', RuntimeWarning, stacklevel=3)

    def _make(self) -> None:
        """In a file beside, so that a process that is killed meanwhile leaves no half of a store at this name."""
        size = _bytes(self.size) if self.size != 'auto' else self._auto_size()
        free = shutil.disk_usage(self.path.parent).free
        if size > free:
            raise StoreError(f'a store of {size} bytes does not fit into {self.path.parent}, which has {free} bytes left; '
                             f'give another folder or a smaller size')
        new = f'{self.path}.new'
        self._daemon.run('mkfs.hitrain', '--force', f'--size={size}', new)
        os.rename(new, self.path)
        parent = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(parent)
        os.close(parent)

    def _auto_size(self) -> int:
        if self.model is not None:
            return max(store_bytes(self.model), _SMALLEST)
        half = shutil.disk_usage(self.path.parent).free // 2 >> 20 << 20
        if half < _SMALLEST:
            raise StoreError(f'{self.path.parent} has too little space for a store: {2 * half} bytes are free')
        return half

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        with open(self._folder / 'start', 'ab') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _bytes(size: Union[int, str]) -> int:
    found = re.fullmatch('([0-9]+)([KMGT]?)', str(size).upper())
    if not found or not int(found[1]):
        raise ValueError(f"size={size!r}: expected a number of bytes, text as '64G', or 'auto'")
    return int(found[1]) << 10 * (' KMGT'.index(found[2]) if found[2] else 0)


def _folder() -> pathlib.Path:
    """Where mount points of this user lie. Other users must not write there."""
    runtime = os.environ.get('XDG_RUNTIME_DIR')
    if runtime:
        return pathlib.Path(os.path.realpath(runtime)) / 'hitrain'
    if os.geteuid() == 0:
        return pathlib.Path('/run/hitrain')
    folder = pathlib.Path(os.path.realpath(tempfile.gettempdir())) / f'hitrain-{os.geteuid()}'
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise StoreError(f'{folder} belongs to another user, or others may write there; set XDG_RUNTIME_DIR')
    return folder
