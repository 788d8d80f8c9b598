# SPDX-License-Identifier: Apache-2.0
"""What _activations.py keeps of saved tensors, in which order, and in which file."""
import bisect
import collections
import errno
import fcntl
import itertools
import os
import tempfile
from typing import Any, Callable, Deque, Iterator, List, Tuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hitrain._words import XATTR

HELD, QUEUED, WRITING, STORED, LOADING, LOADED, DEAD = range(7)
ALIGNMENT = 256  # libraries choose algorithms by the alignment of addresses, and each has bits of its own
_CHUNK = 1 << 20


class Entry:
    """begin     of its bytes in the storage
    skip         what its address is beyond an aligned one
    order        backward needs entries in this order
    memory       its bytes, as a flat tensor; None: they are in the file only"""

    def __init__(self, tensor: torch.Tensor, begin: int, size: int, order: Tuple[int, int, int]) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.memory: Any = flat.set_(tensor.untyped_storage(), begin, (size,), (1,))
        self.original: Any = tensor
        self.computed: Any = None  # of a device: the event behind the work that computes it, from when it is queued until it is written
        self.loaded: Any = None  # of a device: what ends the copy to it, once it was read back
        self.buffer: Tuple[Any, Any] = None, None  # which the memory is, once it was read back; and a reference that ends with the last tensor that has it
        self.storage = StorageWeakRef(tensor.untyped_storage())  # so no other storage becomes the same _cdata
        self.version, self.changed = tensor._version, False
        self.begin, self.bytes, self.order = begin, size, order
        self.skip = self.memory.data_ptr() % ALIGNMENT
        self.state, self.at = HELD, -1
        self.segment: Any = None
        self.key: Any = None
        self.users = 0
        self.ended: List[None] = []  # as long as the number of users that are gone: append() needs no lock


class Segment:
    """Entries at consecutive places of the file, in the order in which they were saved."""

    def __init__(self, at: int, entries: List[Entry]) -> None:
        self.at, self.bytes, self.living, self.entries = at, 0, len(entries), entries
        for e in entries:
            e.segment, e.at = self, at + self.bytes
            self.bytes += e.bytes

    @property
    def end(self) -> int:
        return self.at + -(-self.bytes // _CHUNK) * _CHUNK


class InOrder:
    """Entries in the order in which backward needs them."""

    def __init__(self) -> None:
        self._orders: List[Tuple[int, int, int]] = []
        self._entries: List[Entry] = []

    def add(self, entry: Entry) -> None:
        i = bisect.bisect_left(self._orders, entry.order)
        self._orders.insert(i, entry.order)
        self._entries.insert(i, entry)

    def discard(self, entry: Entry) -> None:
        i = bisect.bisect_left(self._orders, entry.order)
        if i < len(self._entries) and self._entries[i] is entry:
            del self._orders[i], self._entries[i]

    def after(self, order: Tuple[int, int, int]) -> Iterator[Entry]:
        return itertools.islice(self._entries, bisect.bisect_right(self._orders, order), None)

    def __len__(self) -> int:
        return len(self._entries)


class Spare:
    """Buffers that serve again, the oldest of which go first."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._buffers: Deque[Any] = collections.deque()

    def take(self, size: int) -> Any:
        """One of this size, or None."""
        for i, buffer in enumerate(self._buffers):
            if len(buffer) == size:
                del self._buffers[i]
                self._bytes -= size
                return buffer
        return None

    def give(self, buffer: Any) -> None:
        self._buffers.append(buffer)
        self._bytes += len(buffer)
        while self._bytes > self._most:
            self._bytes -= len(self._buffers.popleft())


class Saved:
    """What the graph keeps in the place of a tensor."""

    def __init__(self, owner: Any, entry: Entry, t: torch.Tensor) -> None:
        self.owner, self.entry = owner, entry
        self.dtype, self.size, self.stride, self.offset = t.dtype, t.size(), t.stride(), t.storage_offset()

    def __del__(self) -> None:
        self.entry.ended.append(None)
        self.owner._unused.append(self.entry)
        if not self.owner._told:
            self.owner._told = True
            self.owner._work.put(('unused', None))


def take_run(first: Entry, others: Iterator[Entry], most: int) -> List[Entry]:
    """The first with what follows and can be read with it, which are LOADING then."""
    run, size = [first], first.bytes
    for e in others:
        size += e.bytes
        if size > most or e.segment is not run[-1].segment or e.at + e.bytes != run[-1].at:
            break
        run.append(e)
    for e in run:
        e.state = LOADING
    return run


def is_plain(t: torch.Tensor) -> bool:
    return type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided and not t.is_sparse


def modified(shape: Any) -> RuntimeError:
    return RuntimeError(f'one of the variables needed for gradient computation has been modified by an inplace operation: a saved tensor '
                        f'of shape {tuple(shape)}')


# -- the file --

def open_scratch(folder: str) -> int:
    place = tempfile.mkdtemp(prefix='.activations-', dir=folder)
    path = os.path.join(place, 'saved')
    try:
        os.setxattr(place, XATTR + 'dtype', b'u8')
        os.setxattr(place, XATTR + 'class', b'scratch')
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
    finally:
        os.rmdir(place)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)  # no copies in the page cache
    return fd


def all_of(call: Callable[[int, List[memoryview], int], int], fd: int, views: List[memoryview], at: int) -> None:
    """preadv or pwritev, as often as it takes."""
    while views:
        n = call(fd, views, at)
        if n == 0:
            raise OSError(errno.EIO, 'the file of saved tensors ends early')
        at += n
        while views and n >= len(views[0]):
            n -= len(views.pop(0))
        if n:
            views[0] = views[0][n:]
