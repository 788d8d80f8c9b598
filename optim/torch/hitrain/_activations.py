# SPDX-License-Identifier: Apache-2.0
"""Tensors that autograd saves for backward, in a scratch file.

A saved tensor is an entry: the bytes of its storage, which all saved tensors of that storage share. Entries that were saved last stay in
memory, because backward needs them first. The oldest are written when the entries in memory exceed a number of bytes.

    HELD --too much is held--> QUEUED --the thread takes it--> WRITING --written--> STORED --needed or read ahead--> LOADED
      ^                          |                               |
      '--------- needed ---------'                               '-- needed: its memory is still there

Tensors of a GPU go through pinned slots that are made once (_device.py): the thread copies an entry from the device after the work that computes
it, and writes what has come. Content that is read back goes to the device on a stream of its own. So backward waits for it there.

Entries that are queued when the thread comes to them are written with one call. They are a segment, of whole chunks, and are read back
together, too: a call costs more than the bytes of a small entry. A segment is punched when its last entry has ended, and an entry ends with
the last saved tensor that has it. Segments are a stack: backward frees the newest first. The file has no name, and its class is
scratch: the store writes it only when its memory is short.

One lock guards all entries. __del__ may run wherever Python frees memory, also under the lock, so it only puts the entry into a queue.
"""
import collections
import ctypes
import mmap
import os
import queue
import threading
import time
import warnings
import weakref
from typing import Any, Deque, Dict, Iterable, Iterator, List, Optional, Tuple, Union

import torch

from hitrain._bytes import memory_of
from hitrain._depth import bytes_ahead
from hitrain._device import Copies, Storages
from hitrain._saved import (ALIGNMENT, DEAD, HELD, LOADED, LOADING, QUEUED, STORED, WRITING, Entry, InOrder, Saved, Segment, Spare, all_of, is_plain, modified,
                            open_scratch, take_run)
from hitrain._words import close_quietly

SMALL_BYTES = 256 << 10  # smaller tensors stay in memory
SEGMENT_BYTES = 4 << 20  # of entries that are written or read with one call, unless one alone has more
_WINDOW_BYTES = 32 << 20  # of entries that are being written or read ahead
_CLOSE_SECONDS_MAX = 60
_PUNCH = 1 | 2  # keep the size, punch a hole

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Activations:
    """keep   bytes of saved tensors in memory; 'auto': as many as could not be written in the time of the forward, by the rate that
    was measured, as SSDTrain (arXiv:2408.10013) chooses them. The first pass measures

    stay      tensors whose storages stay as they are, as parameters and buffers
    copies    to and from a device, whose tensors are meant, and not those of the CPU
    Counts: see figures()."""

    def __init__(self, folder: str, keep: Union[int, str], stay: Iterable[torch.Tensor], copies: Optional[Copies] = None) -> None:
        self.auto, self.keep = keep == 'auto', 0 if keep == 'auto' else int(keep)
        self._pid, self._copies = os.getpid(), copies
        self._stay = copies.storages if copies else Storages()
        for t in stay:
            if is_plain(t):
                self._stay.add(t)
        self._device = copies.device if copies else torch.device('cpu')
        self._fd, self._is_closed = open_scratch(folder), False
        self._changed = threading.Condition()
        self._entries: Dict[Any, Entry] = {}  # by storage, version and place
        self._held: Deque[Entry] = collections.deque()  # HELD, oldest first
        self._waiting_bytes = 0  # of these
        self._stored = InOrder()  # STORED or LOADING
        self._queue: Deque[Entry] = collections.deque()  # QUEUED, or needed since
        self._unused: Deque[Entry] = collections.deque()  # of which a user is gone
        self._told = self._asked = False  # the thread will look at unused entries; it will read ahead
        self._after: Tuple[int, int, int] = (0, 0, 0)  # the order of what backward needed last
        self._stack: List[Segment] = []
        self._spare = Spare(2 * SEGMENT_BYTES)  # for entries that are read
        self.turn: Tuple[int, int] = (0, 0)  # a part of the model, and the micro-batch that goes through it
        self._count = 0  # of entries
        self._error: Optional[Exception] = None
        self.held_bytes = self.held_bytes_max = self.saved_bytes = 0
        self.written_bytes = self.read_bytes = self.forwarded_bytes = self.dropped_bytes = 0
        self.waited_seconds = 0.0
        self._writing_seconds, self._begin, self._end = 0.0, 0.0, 0.0  # of this pass
        self._pass_bytes = self._pass_written = self._pass_read = self._pass_used = 0
        self._reading_seconds = self._first_use = self._last_use = 0.0
        self._loaded_bytes = self._largest_bytes = 0  # of entries in memory that were read back; of an entry
        self._ahead_bytes: Optional[int] = None  # that are read ahead; None: as many as there is room for
        self._backward = False
        self._work: 'queue.SimpleQueue[Tuple[str, Any]]' = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name='hitrain-activations', daemon=True)
        self._thread.start()

    # -- hooks of autograd --

    def pack(self, t: torch.Tensor) -> Any:
        span = self._span(t)
        if span is None or os.getpid() != self._pid:
            return (t if t.grad_fn is None else t.detach()), t._version  # a node that had its own output would last for ever
        with self._changed:
            if self._error:
                raise self._error
            if self._backward:
                self._new_pass()
            self._end = time.monotonic()
            self._begin = self._begin or self._end
            storage = t.untyped_storage()
            key = (storage._cdata, storage.data_ptr(), t._version, *span)  # a storage that shrinks and lives on may give its memory to another
            entry = self._entries.get(key)
            if entry is None:
                self._count += 1
                part, batch = self.turn  # backward needs the last part first, and in it the first micro-batch
                entry = Entry(t.detach(), *span, order=(-part, batch, -self._count))
                entry.key, self._entries[key] = key, entry
                self._held.append(entry)
                self._waiting_bytes += entry.bytes
                self.held_bytes += entry.bytes
                self.saved_bytes += entry.bytes
                self._pass_bytes += entry.bytes
            entry.users += 1
            saved = Saved(self, entry, t)
            self._shrink()
            self.held_bytes_max = max(self.held_bytes_max, self.held_bytes)
            return saved

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, Saved):
            tensor, version = packed
            if tensor._version != version:
                raise modified(tensor.shape)
            return tensor
        if os.getpid() != self._pid:
            raise RuntimeError('a forked child cannot run backward through what its parent saved in the store')
        entry = packed.entry
        with self._changed:
            self._note_use(entry)
            while entry.state == LOADING:
                self._changed.wait()
            if entry.state in (QUEUED, WRITING):
                self.forwarded_bytes += entry.bytes
                if entry.state == QUEUED:
                    entry.state, entry.computed = HELD, None
            elif entry.state == STORED:
                self._load(entry)
            if entry.changed or (entry.original is not None and entry.original._version != entry.version):
                raise modified(packed.size)
            self._read_ahead(entry)
            memory = entry.memory
            if self._copies and entry.loaded is not None:
                self._copies.wait(entry.loaded, memory)
        shift = (packed.offset * packed.dtype.itemsize - entry.begin) // packed.dtype.itemsize
        begin = memory.storage_offset() // packed.dtype.itemsize
        return torch.empty(0, dtype=packed.dtype, device=memory.device).set_(memory.untyped_storage(), begin + shift, packed.size, packed.stride)

    def figures(self) -> Dict[str, Any]:
        """Bytes since the beginning: saved, written, read back, forwarded (needed while they were queued or written), dropped (ended
        before they were written). held_bytes are in memory now. waited_seconds: forward waited for writes, or backward for reads."""
        with self._changed:
            return {name: getattr(self, name) for name in ('keep', 'saved_bytes', 'written_bytes', 'read_bytes', 'forwarded_bytes',
                                                           'dropped_bytes', 'held_bytes', 'held_bytes_max', 'waited_seconds')}

    @property
    def file_blocks(self) -> int:
        return os.fstat(self._fd).st_blocks

    def settle(self) -> None:
        """Returns when the thread has done what it was asked to do."""
        done = threading.Event()
        self._work.put(('settle', done))
        done.wait()

    def close(self) -> None:
        """In a forked child, too, which has no thread."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() != self._pid:
            close_quietly(self._fd)
            self._fd = -1
            return
        self._work.put(('close', None))
        self._thread.join(_CLOSE_SECONDS_MAX)
        if self._thread.is_alive():  # in a call of a device or a store that does not return
            warnings.warn(f'the thread that saves tensors for backward has not ended within {_CLOSE_SECONDS_MAX} seconds: the store cannot be '
                          'unmounted before it ends', RuntimeWarning, stacklevel=2)

    # -- within, with the lock --

    def _span(self, t: torch.Tensor) -> Optional[Tuple[int, int]]:
        """Where the bytes of a tensor are in its storage; None: it stays. Views of most of a storage share all of it."""
        if t.device != self._device or not is_plain(t):
            return None
        size = t.numel() * t.element_size()
        if size < SMALL_BYTES or t.is_conj() or t.is_neg():
            return None
        whole = t.untyped_storage().nbytes()
        if whole < SMALL_BYTES or t in self._stay:
            return None
        if 2 * size >= whole:
            return 0, whole
        return (int(t.storage_offset()) * t.element_size(), size) if t.is_contiguous() else None

    def _new_pass(self) -> None:
        """A forward begins after a backward."""
        if self.auto and self._pass_written and self._writing_seconds:
            rate = self._pass_written / self._writing_seconds
            self.keep = max(0, self._pass_bytes - int(rate * (self._end - self._begin)))
        if self._reading_seconds and self._last_use > self._first_use:
            self._ahead_bytes = bytes_ahead(self._pass_read / self._reading_seconds, self._pass_used / (self._last_use - self._first_use),
                                            max(SEGMENT_BYTES, self._largest_bytes))
        self._backward, self._begin = False, 0.0
        self._writing_seconds, self._pass_bytes, self._pass_written = 0.0, 0, 0
        self._reading_seconds, self._pass_read, self._pass_used = 0.0, 0, 0

    def _note_use(self, entry: Entry) -> None:
        self._last_use = time.monotonic()
        if not self._backward:
            self._backward, self._first_use = True, self._last_use
        self._pass_used += entry.bytes
        self._largest_bytes = max(self._largest_bytes, entry.bytes)

    def _shrink(self) -> None:
        """Queues the oldest entries, enough for one call, and waits while more than keep and one entry is held."""
        if self._waiting_bytes > self.keep + min(SEGMENT_BYTES, self.keep // 4):
            try:
                while self._held and self._waiting_bytes > self.keep:
                    self._enqueue(self._held[0])
                    self._waiting_bytes -= self._held.popleft().bytes
            finally:  # an error of the device leaves entries that are queued already
                self._work.put(('write', None))
        begin = time.monotonic()
        while self.held_bytes - self.keep > max(_WINDOW_BYTES, self.keep // 4) and not self._error and self._is_writing():
            self._changed.wait(0.1)
        self.waited_seconds += time.monotonic() - begin

    def _enqueue(self, entry: Entry) -> None:
        if entry.state == HELD:
            entry.computed = self._copies.computed() if self._copies else None
            entry.state = QUEUED
            self._queue.append(entry)

    def _is_writing(self) -> bool:
        return any(e.state in (QUEUED, WRITING) for e in self._entries.values())

    def _load(self, entry: Entry) -> None:
        """Leaves the lock while it reads."""
        run = take_run(entry, self._stored_after(entry.order), SEGMENT_BYTES)
        begin = time.monotonic()
        self._changed.release()
        try:
            self._read(run)
        finally:
            self._changed.acquire()
            self.waited_seconds += time.monotonic() - begin

    def _stored_after(self, order: Tuple[int, int, int]) -> Iterator[Entry]:
        """In the order in which backward needs them."""
        return (e for e in self._stored.after(order) if e.state == STORED and len(e.ended) < e.users)

    @property
    def _room(self) -> int:
        """For entries that are read ahead."""
        room = max(self.keep, _WINDOW_BYTES) - self.held_bytes
        return room if self._ahead_bytes is None else min(room, self._ahead_bytes - self._loaded_bytes)

    def _read_ahead(self, entry: Entry) -> None:
        """Asks for the entries that backward needs next."""
        self._after = entry.order
        if not self._asked and self._stack and self._room >= SEGMENT_BYTES:
            self._asked = True
            self._work.put(('ahead', None))

    # -- the thread --

    def _run(self) -> None:
        while True:
            what, done = self._work.get()
            if what == 'close':
                close_quietly(self._fd)
                self._fd = -1
                return
            if what == 'settle':
                done.set()
            elif what == 'unused':
                self._end_unused()
            elif what == 'write':
                self._write()
            elif what == 'ahead':
                self._read_on()

    def _read_on(self) -> None:
        """Reads one run. The next one has its turn after other work that waits."""
        with self._changed:
            room, stored = self._room, self._stored_after(self._after)
            first = next(stored, None) if room >= SEGMENT_BYTES else None
            self._asked = first is not None and first.bytes <= room
            run = take_run(first, stored, min(SEGMENT_BYTES, room)) if first and self._asked else []
        if run:
            try:
                self._read(run)
                self._work.put(('ahead', None))
            except Exception:  # its use reads it again, and raises
                self._asked = False

    def _write(self) -> None:
        with self._changed:
            batch = self._take_queued()
            if not batch:
                return
            segment = Segment(self._stack[-1].end if self._stack else 0, batch)
            self._stack.append(segment)
            if self._queue:
                self._work.put(('write', None))
            parts = [(e.memory, e.computed) for e in batch]
        begin = time.monotonic()
        error: Optional[Exception] = None
        try:
            if self._copies:
                self._copies.save(parts, lambda host, at: all_of(os.pwritev, self._fd, [memory_of(host)], segment.at + at))
            else:
                all_of(os.pwritev, self._fd, [memory_of(memory) for memory, _ in parts], segment.at)
        except OSError as e:
            error = OSError(e.errno, f'{os.strerror(e.errno or 0)} (saving a tensor for backward in the store)')
        except Exception as e:  # of the device, or any other: the trainer waits for this thread
            error = e
        with self._changed:
            self._writing_seconds += time.monotonic() - begin
            self._error = error or self._error
            for entry in batch:
                self._written(entry, error is None)
            del parts
            self._changed.notify_all()

    def _take_queued(self) -> List[Entry]:
        """Those that go into one segment, WRITING then. Those without a user stay, and end soon."""
        batch: List[Entry] = []
        size = 0
        while self._queue and (not batch or size + self._queue[0].bytes <= SEGMENT_BYTES):
            entry = self._queue.popleft()
            if entry.state != QUEUED:
                continue
            entry.state = HELD if len(entry.ended) == entry.users else WRITING
            if entry.state == WRITING:
                batch.append(entry)
                size += entry.bytes
        return batch

    def _written(self, entry: Entry, done: bool) -> None:
        entry.computed, entry.state = None, STORED if done else HELD
        if done:
            self.written_bytes += entry.bytes
            self._pass_written += entry.bytes
            self._stored.add(entry)
            entry.changed = entry.original._version != entry.version
            entry.memory = entry.original = None
            self.held_bytes -= entry.bytes

    def _read(self, run: List[Entry]) -> None:
        """Of entries that are LOADING, without the lock. Each lies before the one that precedes it here."""
        found: List[Tuple[Any, torch.Tensor, Any]] = []  # buffer, memory, loaded
        begin = time.monotonic()
        try:
            found = self._read_to_device(run) if self._copies else self._read_here(run)
        except BaseException as e:
            self._end_read(run, [])
            if isinstance(e, OSError):
                raise OSError(e.errno, f'{os.strerror(e.errno or 0)} (reading a tensor for backward from the store)') from e
            raise
        self._end_read(run, found, time.monotonic() - begin)

    def _read_here(self, run: List[Entry]) -> List[Tuple[Any, torch.Tensor, Any]]:
        found = [self._memory(e) for e in run]
        views = [memory_of(memory) for _, memory, _ in reversed(found)]
        if len(views) == 1:  # by segments, the last one first: a reader that goes downwards has the store read ahead
            for low in reversed(range(0, len(views[0]), SEGMENT_BYTES)):
                all_of(os.preadv, self._fd, [views[0][low:low + SEGMENT_BYTES]], run[0].at + low)
        else:
            all_of(os.preadv, self._fd, views, run[-1].at)
        return found

    def _read_to_device(self, run: List[Entry]) -> List[Tuple[Any, torch.Tensor, Any]]:
        there, loaded = self._copies.restore([(e.skip, e.bytes) for e in reversed(run)],  # type: ignore[union-attr]
                                             lambda host, at: all_of(os.preadv, self._fd, [memory_of(host)], run[-1].at + at))
        return [((None, None), memory, loaded) for memory in reversed(there)]

    def _end_read(self, run: List[Entry], found: List[Tuple[Any, torch.Tensor, Any]], seconds: float = 0.0) -> None:
        with self._changed:
            self._reading_seconds += seconds
            self._pass_read += sum(e.bytes for e in run) if found else 0
            for e in run:
                if e.state == LOADING:  # and did not end meanwhile
                    e.state = STORED
            for e, (buffer, memory, loaded) in zip(run, found):
                if e.state == STORED:
                    e.buffer, e.memory, e.loaded, e.state = buffer, memory, loaded, LOADED
                    self._stored.discard(e)
                    self.read_bytes += e.bytes
                    self.held_bytes += e.bytes
                    self._loaded_bytes += e.bytes
            self.held_bytes_max = max(self.held_bytes_max, self.held_bytes)
            self._changed.notify_all()

    def _memory(self, entry: Entry) -> Tuple[Any, torch.Tensor, Any]:
        """Room for an entry that is read. New memory would cost a page fault for each page, so that of ended entries serves again, each
        time as another storage."""
        size = entry.bytes + ALIGNMENT  # for any skip
        with self._changed:
            buffer = self._spare.take(size) or mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        content = (ctypes.c_ubyte * entry.bytes).from_buffer(buffer, entry.skip)
        return (buffer, weakref.ref(content)), torch.frombuffer(content, dtype=torch.uint8), None

    def _end_unused(self) -> None:
        self._told = False
        dead: List[Segment] = []
        with self._changed:
            while self._unused:
                entry = self._unused.popleft()
                if entry.state != DEAD and len(entry.ended) == entry.users:
                    self._drop(entry, dead)
            while self._stack and not self._stack[-1].living:
                self._stack.pop()
            self._changed.notify_all()
        for segment in dead:  # only this thread gives their places to others
            _libc.fallocate(self._fd, _PUNCH, segment.at, segment.end - segment.at)

    def _drop(self, entry: Entry, dead: List[Segment]) -> None:
        if entry.memory is not None:
            self.held_bytes -= entry.bytes
            if not entry.segment:
                self.dropped_bytes += entry.bytes
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        if entry.state == LOADED:
            self._loaded_bytes -= entry.bytes
        entry.state, entry.memory, entry.original, entry.computed = DEAD, None, None, None
        buffer, in_use = entry.buffer
        if buffer and in_use() is None:
            self._spare.give(buffer)
        entry.buffer = None, None
        if entry in self._held:
            self._held.remove(entry)
            self._waiting_bytes -= entry.bytes
        if entry.segment:
            self._stored.discard(entry)
            entry.segment.living -= 1
            if not entry.segment.living:
                entry.segment.entries = []
                dead.append(entry.segment)
