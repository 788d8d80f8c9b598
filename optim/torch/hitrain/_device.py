# SPDX-License-Identifier: Apache-2.0
"""A parameter that computes on a GPU: its file is mapped as without one, and a copy is on the device while a block needs it.

    at rest   the tensor is the mapping in the memory of the CPU: state_dict(), clamping and the like use it as ever
    in use    in the forward and the backward of the model: the tensor is on the device, and has memory there while it is loaded

    load      file --mapping--> pinned memory --stream `to`--> device --event--> the stream that computes
    release   the storage on the device shrinks to nothing; views that autograd saved have their values again after the next load.
              The next load waits until the device has passed all uses of what left, where `keep` has no room for both
    gradient  device --stream `back`, after the stream that computed it--> pinned memory --event--> the store

PyTorch's allocators reuse pinned memory and memory of the device, each block after the streams that used it.
"""
import collections
import contextlib
import threading
from typing import Any, Callable, Deque, Dict, Optional, Sequence, Set, Tuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hitrain._mapped import MappedFile

_PIECE = 16 << 20  # of pinned memory, for a load


def gpu_of(device: Any) -> torch.device:
    """ValueError: offload() cannot use it."""
    found = torch.device(device)
    if found.type != 'cuda':
        raise ValueError(f'device must be a CUDA device, not {found}: without device= the model computes on the CPU')
    if not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f'PyTorch {torch.__version__} sees no device {found}')
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
    storages  those of parameters on the device"""

    def __init__(self, device: torch.device, keep: int) -> None:
        self.device, self.leaving = device, Leaving(keep)
        self.storages = Storages()
        self._has_streams = device.type == 'cuda'
        self._to: Any = torch.cuda.Stream(device) if self._has_streams else None
        self._back: Any = torch.cuda.Stream(device) if self._has_streams else None

    def host(self, like: torch.Tensor, elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=like.dtype, pin_memory=self._has_streams)

    @torch.no_grad()
    def load(self, values: torch.Tensor, there: torch.Tensor) -> Any:
        """Gives the tensor memory on the device, and these values. Returns what wait() takes."""
        source, step = values.view(-1), max(1, _PIECE // values.element_size())
        with self._on(self._to):
            there.untyped_storage().resize_(values.numel() * values.element_size())
            for at in range(0, source.numel(), step):
                piece = source[at:at + step]
                there.view(-1)[at:at + step].copy_(self.host(values, piece.numel()).copy_(piece), non_blocking=True)
            return self._to.record_event() if self._has_streams else None

    @torch.no_grad()
    def send(self, host: torch.Tensor, skip: int = 0) -> Tuple[torch.Tensor, Any]:
        """A new tensor on the device that gets the values of host(), behind so many elements without values, and what wait() takes."""
        with self._on(self._to):
            there = torch.empty(skip + host.numel(), dtype=host.dtype, device=self.device)[skip:].copy_(host, non_blocking=True)
            return there, self._to.record_event() if self._has_streams else None

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
        self.follow()
        with self._on(self._back):
            host.copy_(there, non_blocking=True)
            there.record_stream(self._back)
            return Fetched(host, self._back.record_event())

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

    def follow(self) -> None:
        """The stream of copies to the host goes on when the current one has come to here."""
        self._back.wait_stream(torch.cuda.current_stream(self.device))

    def refuse_capture(self) -> None:
        """A graph would repeat neither what threads do nor the reads and writes of files."""
        if self._has_streams and torch.cuda.is_current_stream_capturing():
            raise RuntimeError('a CUDA graph cannot capture the forward or the backward of a model of offload(device=): its parameters come from a '
                               'store in each of them')

    def _on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream) if self._has_streams else contextlib.nullcontext()


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


class DeviceFile(MappedFile):
    """Two threads load and release: that of the trainer, and the one that reads ahead."""

    _there: Any = None  # on the device, the same tensor for ever: views of its storage are in graphs
    _in_use = _is_loaded = False
    _loaded: Any = None
    _version = 0  # of the tensor when its values were last those of the file
    _fetched: Optional[Fetched] = None  # the gradient

    def __init__(self, copies: Copies, *args: Any) -> None:
        super().__init__(*args)
        self.copies = copies
        self._lock = threading.Lock()
        self._streams: Set[Any] = set()  # that use the values

    def use(self) -> None:
        """The tensor is on the device from now on."""
        if self._in_use:
            return
        self.attach()
        if self._there is None:
            self._there = torch.empty_like(self._content, device=self.copies.device)
            self._there.untyped_storage().resize_(0)
            self._memory.add(self._there)
            self.copies.storages.add(self._there)
        with self._lock:
            if self._version != self.tensor._version:
                self._free()
            self._in_use, self._version = True, self.tensor._version
            self._put()

    def rest(self, discard: bool, keep_copy: bool) -> None:
        """The tensor is the mapping again. discard: what was stored in it on the device is void. keep_copy: the copy on the device stays, and is
        void if code changes the tensor meanwhile."""
        if not discard:
            self.attach()
        with self._lock:
            if not discard:
                self._write_back()
            if not keep_copy:
                self._free()
            if self._in_use:
                self._in_use = False
                self._put()

    def ready(self) -> None:
        """The stream that computes may use the values."""
        if not self._is_loaded:
            self.load()
        with self._lock:
            self._wait()

    # -- as MappedFile --

    def load(self) -> None:
        """At rest the values stay in the memory of the CPU, where code may still change them."""
        super().load()
        with self._lock:
            if self._in_use and not self._is_loaded:
                self.copies.leaving.enters(self.content_bytes)
                self._streams, self._is_loaded = set(), True
                try:
                    self._loaded = self.copies.load(self._content, self._there)
                except BaseException:
                    self._free()
                    raise
                super().release()

    def release(self) -> None:
        with self._lock:
            self._write_back()
            self._free()
        super().release()

    def flush(self) -> None:
        self.attach()
        with self._lock:
            self._write_back()
        super().flush()

    def attach(self) -> None:
        was_detached = self._is_detached()
        super().attach()
        if not was_detached:
            return
        with self._lock:
            if not self._in_use:
                self._free()
                return
            if self._is_loaded:
                self._wait()
                self._there.copy_(self._content)
            self.tensor.data = self._there
            self._version = self.tensor._version

    @property
    def _place(self) -> torch.Tensor:
        return self._there if self._in_use else self._content

    def _take_mapping(self) -> None:
        with self._lock:
            self._free()
        super()._take_mapping()
        self._version = self.tensor._version

    def _wait(self) -> None:
        stream = self.copies.wait(self._loaded, self._there)
        if stream is not None:
            self._streams.add(stream)

    def _free(self) -> None:
        if self._is_loaded:
            self._is_loaded, self._loaded = False, None
            self._there.untyped_storage().resize_(0)
            self.copies.leaving.leaves(self.content_bytes, [stream.record_event() for stream in self._streams])

    @torch.no_grad()
    def _write_back(self) -> None:
        """Values that code has stored in the tensor on the device, and not step()."""
        if self._in_use and self._is_loaded and self._version != self.tensor._version:
            self._content.copy_(self.copies.fetch(self._there).values)
            self._version = self.tensor._version

    def _is_detached(self) -> bool:
        if not self._in_use or self.is_sealed:
            return super()._is_detached()
        return self.tensor.device != self._there.device or self.tensor.data_ptr() != self._there.data_ptr()

    # -- its gradient --

    def fetch_gradient(self) -> None:
        """The gradient leaves the device, in the background."""
        self._fetched = self.copies.fetch(super().gradient())
        self.tensor.grad = None

    def replace_gradient(self, values: torch.Tensor) -> None:
        """By one in the memory of the CPU."""
        self._fetched = Fetched(values, None)
        self.tensor.grad = None

    def begin_step(self) -> None:
        super().begin_step()
        self.forget_gradient()

    def forget_gradient(self) -> None:
        self._fetched = None

    def gradient(self) -> torch.Tensor:
        return self._fetched.values if self._fetched else super().gradient()

    def has_gradient(self) -> bool:
        return self._fetched is not None or super().has_gradient()

    def gradient_sent(self, early: bool) -> None:
        if self._fetched is None:
            super().gradient_sent(early)
            return
        self.sent += 1
        self._version_sent = self.tensor._version

    def clear_gradient(self) -> None:
        super().clear_gradient()
        self._fetched = None

