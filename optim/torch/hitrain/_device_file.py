# SPDX-License-Identifier: Apache-2.0
"""A parameter that computes on a GPU: its file is mapped as without one, and a copy is on the device while a block needs it.

    at rest   the tensor is the mapping in the memory of the CPU: state_dict(), clamping and the like use it as ever
    in use    in the forward and the backward of the model: the tensor is on the device, and has memory there while it is loaded

    load      file --mapping--> slot --stream `to`--> device --event--> the stream that computes
    release   the storage on the device shrinks to nothing; views that autograd saved have their values again after the next load.
              The next load waits until the device has passed all uses of what left, where `keep` has no room for both
    gradient  device, in the dtype of its file --stream `back`, after the stream that computed it--> slot --event--> the store

Slots are pinned (_slots.py). On a mount with passthrough= there are none: the mappings of the parameter and of its gradient are registered with the device
(_registered.py), which reads the one and writes the other. Then the CPU copies no byte.
"""
import contextlib
import os
import threading
from typing import Any, Callable, Optional, Set, Union

import torch

from hitrain._bytes import memory_of, write_on
from hitrain._device import Copies, Fetched, Outgoing
from hitrain._mapped import MappedFile
from hitrain._windows import Window
from hitrain._words import HIDDEN


class DeviceFile(MappedFile):
    """Two threads load and release: that of the trainer, and the one that reads ahead."""

    _there: Any = None  # on the device, the same tensor for ever: views of its storage are in graphs
    _in_use = _is_loaded = _is_stored = False
    _loaded: Any = None
    _version = 0  # of the tensor when its values were last those of the file
    _fetched: Union[None, Fetched, Outgoing] = None  # the gradient

    def __init__(self, copies: Copies, *args: Any) -> None:
        super().__init__(*args)
        self.copies = copies
        self._lock = threading.Lock()
        self._streams: Set[Any] = set()  # that use the values
        self._window = Window(os.path.join(self.root, HIDDEN, 'grad', self.name), os.O_RDWR, self.grad_dtype, self.tensor.shape, least=1)

    def use(self) -> None:
        """The tensor is on the device from now on."""
        if self._in_use:
            return
        self.attach()
        if self._there is None:
            self._there = self.copies.place(self._content)
            self._memory.add(self._there)
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
            self._end_reading()
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
        if not self._is_direct:
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
                self._release_pages()

    def release(self) -> None:
        with self._lock:
            self._write_back()
            self._free()
        self._release_pages()

    def _release_pages(self) -> None:
        if not self._is_direct:
            super().release()

    # -- memory that the device reads and writes --

    def register(self) -> None:
        if self._is_passed:
            self.copies.register(self._address, self.content_bytes)

    @property
    def _is_direct(self) -> bool:
        return self._address in self.copies.registered

    def detach(self, keeps_values: bool) -> None:
        self.copies.registered.remove(self._address)
        super().detach(keeps_values)

    def close(self) -> None:
        super().close()
        self.copies.registered.remove(self._address)

    def _close_kept(self) -> None:
        super()._close_kept()
        if self._window.content is not None:
            self.copies.registered.remove(self._window.content.data_ptr())
        self._window.end()

    def _window_of_gradient(self) -> Optional[torch.Tensor]:
        """Memory of the store that the gradient is copied to."""
        window = self._window.memory() if self._is_direct and self.name == self.name.strip() else None
        return window if window is not None and self.copies.register(window.data_ptr(), window.numel() * window.element_size()) else None

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
            self._end_reading()
            self._free()
        super()._take_mapping()
        self._version = self.tensor._version

    def _end_reading(self) -> None:
        """The device reads the mapping no more: code may change it."""
        if self._is_direct and self._loaded is not None:
            with contextlib.suppress(RuntimeError):  # of a device that is broken, and copies no more
                self._loaded.synchronize()

    def _wait(self) -> None:
        stream = self.copies.wait(self._loaded, self._there)
        if stream is not None:
            self._streams.add(stream)

    def _free(self) -> None:
        if self._is_loaded:
            self._is_loaded, self._loaded = False, None
            self._there.untyped_storage().resize_(0)
            self.copies.leaving.leaves(self.content_bytes, self.copies.passed_by(self._streams))

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

    def fetch_gradient(self, whole: bool) -> None:
        """The gradient leaves the device: in the background and as it is, if it is needed here, else when it is sent, in the dtype of its file."""
        grad = super().gradient().detach()
        self._fetched = self.copies.fetch(grad) if whole else self.copies.leaves(grad.to(self.grad_dtype).reshape(-1))
        self.tensor.grad = None

    def outgoing(self) -> torch.Tensor:
        return self._fetched.there if isinstance(self._fetched, Outgoing) else super().outgoing()

    def write_gradient(self, drop: Callable[[], None], part: slice = slice(None)) -> None:
        window = self._window_of_gradient() if isinstance(self._fetched, Outgoing) and part == slice(None) else None
        self._is_stored = window is not None
        if window is None:
            super().write_gradient(drop, part)
        else:
            self._fetched.write(window)  # type: ignore[union-attr]
            self.written = window.numel() * window.element_size()

    @property
    def is_stored(self) -> bool:
        return self.written > 0 and self._is_stored

    def _put_gradient(self, fd: int, grad: torch.Tensor, at: int) -> None:
        if not isinstance(self._fetched, Outgoing):
            super()._put_gradient(fd, grad, at)
            return
        for piece in self._fetched.pieces(grad):
            write_on(fd, memory_of(piece), at)
            at += piece.numel() * piece.element_size()

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

