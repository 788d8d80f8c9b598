# SPDX-License-Identifier: Apache-2.0
"""Many small parameters in few requests: `.hitrain/gather` of a model root shows them as one file.

    gradients  --copy-->  buffer  --pwrite-->  gather  --`apply` names them-->  the step
    tensors    <--copy--  buffer  <--preadv--  gather

The store splits writes and joins reads. A parameter becomes a member when it is used for the first time, and
stays one as long as the descriptor is open. Members that follow each other go together, a run of at most RUN_BYTES at a time.
Several threads may write and read runs.

Older daemons have no such file, and may refuse to make a file a member. Then each parameter has calls of its own, whose errors name it.
"""
import collections
import concurrent.futures
import contextlib
import fcntl
import mmap
import os
import threading
from typing import Any, Callable, Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, TypeVar

import torch

from hitrain._bytes import read_all, write_all
from hitrain._files import ParameterFile
from hitrain._words import HIDDEN, bytes_of, close_quietly, opened

MEMBER_BYTES_MAX = 1 << 20  # a larger one has requests of the full size anyway
RUN_BYTES, RUN_MEMBERS = 4 << 20, 1024
_LINES_BYTES = 8192
_GATHER = 1 << 30 | _LINES_BYTES << 16 | ord('h') << 8 | 4  # HT_IOCTL_GATHER of hitrain/words.h


class Run(NamedTuple):
    """Members of the same dtypes that follow each other, and where they begin in the file."""
    files: List[ParameterFile]
    values_at: int
    gradients_at: int

    @property
    def names(self) -> List[str]:
        return [f.name for f in self.files]

    @property
    def elements(self) -> List[int]:
        return [f.tensor.numel() for f in self.files]

    def __str__(self) -> str:
        return self.files[0].name if len(self.files) == 1 else f'{self.files[0].name} to {self.files[-1].name}'


class _Place(NamedTuple):
    """Bytes from the beginning, or bytes of a member, on either side."""
    values: int
    gradients: int

    def after(self, size: '_Place') -> '_Place':
        return _Place(self.values + size.values, self.gradients + size.gradients)


class _Member(NamedTuple):
    """In the order of the file."""
    place: _Place
    size: _Place
    file: ParameterFile


class _Opened:
    """A descriptor, and the members that the store has for it."""

    def __init__(self, path: str) -> None:
        self.file = opened(path, os.O_RDWR)
        self.members: Dict[ParameterFile, _Member] = {}
        self.end = _Place(0, 0)


class Gather:
    """The file of the model at root; it is open while there are members."""

    def __init__(self, root: str) -> None:
        self._path = os.path.join(root, HIDDEN, 'gather')
        self._open: Optional[_Opened] = None
        self._absent = False
        self._refused: Set[ParameterFile] = set()
        self._spare: List[torch.Tensor] = []
        self._lock = threading.Lock()

    def runs(self, files: Sequence[ParameterFile]) -> List[Run]:
        """Those of the files that can be members, in the order of the file."""
        if not self._absent:
            members = self._open.members if self._open else {}
            self._add([f for f in files if f not in members and f not in self._refused and f.may_gather() and max(_size(f)) <= MEMBER_BYTES_MAX])
        out: List[Run] = []
        members = self._open.members if self._open else {}
        end, used, kinds = _Place(-1, -1), 0, None
        for place, size, f in sorted(members[f] for f in files if f in members):
            if place != end or kinds != (f.dtype, f.grad_dtype) or used + max(size) > RUN_BYTES or len(out[-1].files) == RUN_MEMBERS:
                out.append(Run([], *place))
                used, kinds = 0, (f.dtype, f.grad_dtype)
            out[-1].files.append(f)
            used += max(size)
            end = place.after(size)
        return out

    @torch.no_grad()
    def write(self, run: Run) -> None:
        """`apply` gives the gradients to the step."""
        dtype = run.files[0].grad_dtype
        with self._buffer(sum(run.elements), dtype) as buffer:
            parts = [f.gradient().detach() for f in run.files]
            if all(g.dtype == dtype and g.device.type == 'cpu' for g in parts):
                torch.cat([g.reshape(-1) for g in parts], out=buffer)
            else:
                for own, g in zip(buffer.split(run.elements), parts):
                    own.copy_(g.reshape(-1))
            write_all(self._number(), buffer, run.gradients_at)

    @torch.no_grad()
    def read(self, run: Run) -> None:
        """The tensors take the values of the store."""
        with self._buffer(sum(run.elements), run.files[0].dtype) as buffer:
            read_all(self._number(), buffer, run.values_at)
            for f, values in zip(run.files, buffer.split(run.elements)):
                f.take(values)

    def end(self) -> None:
        """Closes it. Written gradients that no `apply` has named are dropped."""
        ended, self._open = self._open, None
        self._absent, self._refused, self._spare = False, set(), []
        if ended:
            close_quietly(ended.file)

    # -- within --

    def _add(self, files: List[ParameterFile]) -> None:
        lines = b''
        named: List[ParameterFile] = []
        for f in files:
            line = b'%d %s\n' % (_size(f).values, os.fsencode(f.name))
            if len(lines) + len(line) >= _LINES_BYTES:
                self._name(lines, named)
                lines, named = b'', []
            lines += line
            named.append(f)
        if named:
            self._name(lines, named)

    def _name(self, lines: bytes, files: List[ParameterFile]) -> None:
        """The descriptor and its members are put back when both agree: Ctrl-C in between ends them, and the next use begins anew."""
        now, self._open = self._open, None
        try:
            if now is None:
                now = _Opened(self._path)
            fcntl.ioctl(now.file.fileno(), _GATHER, bytearray(lines.ljust(_LINES_BYTES, b'\0')))
        except OSError:
            self._absent, self._open = now is None, now
            self._refused.update(files)
            return
        for f in files:
            size = _size(f)
            now.members[f] = _Member(now.end, size, f)
            now.end = now.end.after(size)
        self._open = now

    def _number(self) -> int:
        return self._open.file.fileno() if self._open else -1

    @contextlib.contextmanager
    def _buffer(self, elements: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Of whole pages: the kernel sends others in more requests."""
        with self._lock:
            memory = self._spare.pop() if self._spare else None
        if memory is None:
            memory = torch.frombuffer(mmap.mmap(-1, RUN_BYTES), dtype=torch.uint8)
        try:
            yield memory[:elements * bytes_of(dtype)].view(dtype)
        finally:
            with self._lock:
                self._spare.append(memory)


def _size(f: ParameterFile) -> _Place:
    n = f.tensor.numel()
    return _Place(n * bytes_of(f.dtype), n * bytes_of(f.grad_dtype))


T = TypeVar('T')
Made = TypeVar('Made')


def in_turn(things: Sequence[T], make: Callable[[T], Made], take: Callable[[T, Made], None], drop: Callable[[T], Any] = lambda thing: None) -> None:
    """Makes something of each, as by writing it, and takes that when it is made; threads make the next two at the same time. After an error it drops
    those that are made and not taken. No thread makes any more when this returns."""
    if not things:
        return
    begun: Deque['concurrent.futures.Future[Made]'] = collections.deque()
    taken = 0
    with concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix='hitrain-ahead') as pool:
        try:
            for thing in things:
                begun.extend(pool.submit(make, t) for t in things[taken + len(begun):taken + 3])
                take(thing, begun[0].result())
                begun.popleft()
                taken += 1
        except BaseException:
            concurrent.futures.wait(begun)
            for thing in things[taken:taken + len(begun)]:
                drop(thing)
            raise
