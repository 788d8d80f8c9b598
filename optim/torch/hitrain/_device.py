# SPDX-License-Identifier: Apache-2.0
"""Copies between the memory of the CPU and that of a GPU, on streams of their own.

    load      values --slot--> device, on the stream `to`      wait() lets the stream that computes wait for it
    gradient  device --slot--> the caller, on the stream `back`, after the stream that computed it
    saved     the same both ways, for tensors that autograd saves: save() and restore()

Slots are pinned (_slots.py). Registered memory (_registered.py) needs none. PyTorch's allocators reuse memory of the device, each block after the streams
that used it.
"""
import collections
import contextlib
import threading
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hitrain._registered import Registrations, pieces
from hitrain._slots import Slot, Slots

_LOAD_BYTES, _GRADIENT_BYTES = 16 << 20, 8 << 20  # of a slot at most
_SLOT_BYTES_MIN = 64 << 10
_SAVED_BYTES, _SAVED_SLOTS = 4 << 20, 4  # as much as a call writes or reads at a time


def gpu_of(device: Any) -> torch.device:
    """ValueError: offload() cannot use it."""
    found = torch.device(device)
    if found.type != 'cuda':
        raise ValueError(f'device must be a CUDA device, not {found}: without device= the model computes on the CPU')
    if not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ValueError(f'PyTorch {torch.__version__} sees no device {found}: it sees {count}, whose numbers begin with 0')
    if not hasattr(torch, 'compiler'):
        raise ValueError(f'device= needs PyTorch 2.1 or newer, and this is {torch.__version__}')
    return torch.device('cuda', torch.cuda.current_device() if found.index is None else found.index)


class Leaving:
    """Parameters on the device: those that are there, and those that left while work of streams may still use their memory. Both have at
    most so many bytes, or there are only the former."""

    def __init__(self, most: int) -> None:
        self._most, self._there_bytes, self._left_bytes = most, 0, 0
        self._left: Deque[Tuple[int, Sequence[Any]]] = collections.deque()  # oldest first, with the events that end their use
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def enters(self, size: int) -> None:
        """Waits until so many bytes have room. One thread waits at a time: streams that it waits for go on without the others."""
        with self._turn:
            while True:
                with self._lock:
                    if not self._left or self._there_bytes + self._left_bytes + size <= self._most:
                        self._there_bytes += size
                        return
                    left, events = self._left[0]
                for event in events:
                    event.synchronize()
                with self._lock:
                    self._left.popleft()
                    self._left_bytes -= left

    def leaves(self, size: int, events: Sequence[Any]) -> None:
        with self._lock:
            self._there_bytes -= size
            if events:
                self._left.append((size, events))
                self._left_bytes += size


class Storages:
    """Storages of tensors. An address of what PyTorch has of a storage is not used again while there is a weak reference to it, so no other
    storage is ever taken for one of these."""

    def __init__(self) -> None:
        self._known: Dict[int, StorageWeakRef] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known


class Copies:
    """Streams for both directions. A device that is no GPU has no streams, and copies end when they return.

    keep      bytes of parameters that may be on the device
    storages  those of parameters on the device
    copied_bytes  of parameters and gradients that the CPU has copied"""

    def __init__(self, device: torch.device, keep: int) -> None:
        self.device, self.leaving = device, Leaving(keep)
        self.storages = Storages()
        self._has_streams = device.type == 'cuda'
        self._to: Any = torch.cuda.Stream(device) if self._has_streams else None
        self._back: Any = torch.cuda.Stream(device) if self._has_streams else None
        self.copied_bytes = 0
        self._loads, self._gradients = (Slots(self._slot, min(most, max(keep, _SLOT_BYTES_MIN)), 2) for most in (_LOAD_BYTES, _GRADIENT_BYTES))
        self._saved = Slots(self._slot, _SAVED_BYTES, _SAVED_SLOTS)
        self.registered = Registrations(lambda: torch.cuda.cudart(), self._settle)

    def register(self, address: int, size: int) -> bool:
        """May the device read and write this memory from now on?"""
        if not self._has_streams:
            return False
        with self._on(self._to):  # which is of this device
            return self.registered.add(address, size)

    @property
    def memory_bytes(self) -> Optional[int]:
        """Of the device; None: it has none of its own."""
        return int(torch.cuda.mem_get_info(self.device)[1]) if self._has_streams else None

    def _settle(self) -> None:
        for stream in (self._to, self._back):
            stream.record_event().synchronize()

    def _slot(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._has_streams)

    def place(self, like: torch.Tensor) -> torch.Tensor:
        """For a parameter: a tensor on the device that has no memory before load()."""
        there = torch.empty_like(like, device=self.device)
        there.untyped_storage().resize_(0)
        self.storages.add(there)
        return there

    def host(self, like: torch.Tensor, elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=like.dtype, pin_memory=self._has_streams)

    @torch.no_grad()
    def load(self, values: torch.Tensor, there: torch.Tensor) -> Any:
        """Gives the tensor memory on the device, and these values. Returns what wait() takes."""
        source, into, size = values.view(-1), there.view(-1), values.element_size()
        with self._on(self._to):
            there.untyped_storage().resize_(values.numel() * size)
            if values.data_ptr() in self.registered:
                for at, piece in pieces(values.numel() * size):
                    into[at // size:(at + piece) // size].copy_(source[at // size:(at + piece) // size], non_blocking=True)
                return self._to.record_event()
            for own, place in zip(source.split(self._loads.size // size), into.split(self._loads.size // size)):
                slot: Any = self._loads.take()
                try:
                    place.copy_(slot.of(own.dtype, own.numel()).copy_(own), non_blocking=True)
                    slot.event = self._to.record_event() if self._has_streams else None
                finally:
                    self._loads.give(slot)
                self.copied_bytes += own.numel() * size
            return self._to.record_event() if self._has_streams else None

    @torch.no_grad()
    def restore(self, places: Sequence[Tuple[int, int]], read: Callable[[torch.Tensor, int], None]) -> Tuple[List[torch.Tensor], Any]:
        """New bytes on the device, one tensor for each (skip, size): so many bytes behind some without values. Together they are what read(bytes,
        at) puts into memory of the CPU, from the end downwards. Returns what wait() takes, too."""
        with self._on(self._to):
            there = [torch.empty(skip + size, dtype=torch.uint8, device=self.device)[skip:] for skip, size in places]
        total = sum(size for _, size in places)
        for low in reversed(range(0, total, self._saved.size)):
            high = min(total, low + self._saved.size)
            slot: Any = self._saved.take()
            try:
                host = slot.of(torch.uint8, high - low)
                read(host, low)
                with self._on(self._to):
                    for own, at in _between(there, low, high):
                        own.copy_(host[at:at + own.numel()], non_blocking=True)
                    slot.event = self._to.record_event() if self._has_streams else None
            finally:
                self._saved.give(slot)
        return there, self._to.record_event() if self._has_streams else None

    @torch.no_grad()
    def save(self, parts: Sequence[Tuple[torch.Tensor, Any]], write: Callable[[torch.Tensor, int], None]) -> None:
        """Each part is flat bytes on the device, and what computed() returned. write(bytes, at) gets them in memory of the CPU, one part after the
        other, while the next ones are on their way."""
        coming: Deque[Tuple[Slot, torch.Tensor, int]] = collections.deque()
        total = sum(own.numel() for own, _ in parts)
        for _, event in parts:
            self.after(event)
        try:
            for low in range(0, total, self._saved.size):
                slot = self._saved.take(waits=not coming)
                while slot is None:  # another thread has it
                    self._write_first(coming, write)
                    slot = self._saved.take(waits=not coming)
                host = slot.of(torch.uint8, min(total - low, self._saved.size))
                coming.append((slot, host, low))
                with self._on(self._back):
                    for own, at in _between([own for own, _ in parts], low, low + host.numel()):
                        host[at:at + own.numel()].copy_(own, non_blocking=True)
                        if self._has_streams:
                            own.record_stream(self._back)
                    slot.event = self._back.record_event() if self._has_streams else None
                if len(coming) == _SAVED_SLOTS // 2:
                    self._write_first(coming, write)
            while coming:
                self._write_first(coming, write)
        finally:
            for slot, _, _ in coming:
                self._saved.give(slot)

    def _write_first(self, coming: Deque[Tuple[Slot, torch.Tensor, int]], write: Callable[[torch.Tensor, int], None]) -> None:
        slot, host, at = coming[0]
        slot.wait()
        write(host, at)
        coming.popleft()
        self._saved.give(slot)

    def passed_by(self, streams: Iterable[Any]) -> List[Any]:
        """Events behind all that these streams were given. A device that is broken has none, and runs nothing more."""
        try:
            return [stream.record_event() for stream in streams]
        except RuntimeError:
            return []

    def computed(self) -> Any:
        """What the current stream was given so far: copies of its results come after that."""
        self.refuse_capture()
        return torch.cuda.current_stream(self.device).record_event() if self._has_streams else None

    def wait(self, loaded: Any, there: torch.Tensor) -> Any:
        """What the current stream is given from now on finds the values; the memory is not used again before that has run. Returns the
        stream, if the device has any."""
        if not self._has_streams:
            return None
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(loaded)
        there.record_stream(stream)
        return stream

    @torch.no_grad()
    def fetch(self, there: torch.Tensor) -> 'Fetched':
        """Begins to copy values that the current stream computes."""
        self.refuse_capture()
        host = self.host(there, there.numel()).view(there.shape)
        if not self._has_streams:
            return Fetched(host.copy_(there), None)
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        with self._on(self._back):
            host.copy_(there, non_blocking=True)
            there.record_stream(self._back)
            return Fetched(host, self._back.record_event())

    def leaves(self, there: torch.Tensor) -> 'Outgoing':
        """Values that the current stream computes, and that are to leave the device."""
        return Outgoing(self, there, self.computed())

    @torch.no_grad()
    def write(self, there: torch.Tensor, host: torch.Tensor) -> None:
        """Copies values to registered memory. When this returns they are there."""
        size = host.element_size()
        with self._on(self._back):
            for at, piece in pieces(host.numel() * size):
                host.view(-1)[at // size:(at + piece) // size].copy_(there.view(-1)[at // size:(at + piece) // size], non_blocking=True)
            there.record_stream(self._back)
            self._back.record_event().synchronize()

    def after(self, computed: Any) -> None:
        """Copies from the device that begin from now on come after this event."""
        if computed is not None:
            self._back.wait_event(computed)

    def pieces(self, there: torch.Tensor) -> Iterator[torch.Tensor]:
        """Flat values in the memory of the CPU, one after the other. Each is valid until the next one is asked for, which is on its way meanwhile."""
        coming: Deque[Tuple[Slot, torch.Tensor]] = collections.deque()
        try:
            for own in there.split(self._gradients.size // there.element_size()):
                slot: Any = self._gradients.take(waits=not coming)
                if slot is None:  # another thread has it
                    yield from self._came(coming)
                    slot = self._gradients.take()
                try:
                    coming.append((slot, self._begin(own, slot)))
                except BaseException:
                    self._gradients.give(slot)
                    raise
                if len(coming) > 1:
                    yield from self._came(coming)
            while coming:
                yield from self._came(coming)
        finally:
            for slot, _ in coming:
                self._gradients.give(slot)

    @torch.no_grad()
    def _begin(self, own: torch.Tensor, slot: Slot) -> torch.Tensor:
        with self._on(self._back):
            host = slot.of(own.dtype, own.numel()).copy_(own, non_blocking=True)
            if self._has_streams:
                own.record_stream(self._back)
                slot.event = self._back.record_event()
        return host

    def _came(self, coming: Deque[Tuple[Slot, torch.Tensor]]) -> Iterator[torch.Tensor]:
        slot, host = coming[0]
        slot.wait()
        self.copied_bytes += host.numel() * host.element_size()
        yield host
        coming.popleft()
        self._gradients.give(slot)

    def mark(self, where: str) -> Any:
        """An event with a time behind all that a stream was given: 'to', 'back', or 'compute', the current one. None: there are no streams."""
        if not self._has_streams:
            return None
        stream = {'to': self._to, 'back': self._back}.get(where) or torch.cuda.current_stream(self.device)
        return stream.record_event(torch.cuda.Event(enable_timing=True))

    def as_here(self) -> Callable[[], Any]:
        """Makes contexts in which another thread gives work to the stream that is the current one here."""
        stream = torch.cuda.current_stream(self.device) if self._has_streams else None
        return lambda: self._on(stream)

    def refuse_capture(self) -> None:
        """A graph would repeat neither what threads do nor the reads and writes of files."""
        if self._has_streams and torch.cuda.is_current_stream_capturing():
            raise RuntimeError('a CUDA graph cannot capture the forward or the backward of a model of offload(device=): its parameters come from a '
                               'store in each of them')

    def _on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream) if self._has_streams else contextlib.nullcontext()


def _between(parts: Sequence[torch.Tensor], low: int, high: int) -> Iterator[Tuple[torch.Tensor, int]]:
    """Of flat bytes, one after the other: those from low to high, and where they are behind low."""
    begin = 0
    for part in parts:
        end = begin + part.numel()
        if begin < high and low < end:
            yield part[max(low - begin, 0):high - begin], max(begin - low, 0)
        begin = end


class Fetched:
    def __init__(self, host: torch.Tensor, event: Any) -> None:
        self._host, self._event = host, event

    @property
    def values(self) -> torch.Tensor:
        """Waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


class Outgoing:
    """A gradient on the device, which leaves it when it is sent."""

    def __init__(self, copies: Copies, there: torch.Tensor, computed: Any) -> None:
        self._copies, self.there, self._computed = copies, there, computed

    @property
    def values(self) -> torch.Tensor:
        return self.there

    def pieces(self, part: torch.Tensor) -> Iterator[torch.Tensor]:
        self._copies.after(self._computed)
        return self._copies.pieces(part)

    def write(self, host: torch.Tensor) -> None:
        self._copies.after(self._computed)
        self._copies.write(self.there, host)
