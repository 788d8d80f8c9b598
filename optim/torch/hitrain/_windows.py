# SPDX-License-Identifier: Apache-2.0
"""A parameter of the trainer's memory on a mount that passes files through: its file and its gradient are mapped here.

    .grad   --copy--> window of the gradient --`apply`--> the step           the tensor keeps memory of its own
    tensor  <--copy-- mapping of the file, which updates work on             no byte of either crosses the mount

Updates change the file while a step runs, so the tensor takes its values after the step.

No descriptor here may store through a mapping of the file: otherwise each step would count as a change from outside. So another program
can make the file smaller, and a process that touches the mapping beyond the new end gets SIGBUS.

The kernel has pages of its own for a file that is open in the ordinary way: these are no window. A closed file stays open a moment longer, so
the first uses ask again. Until then, and where the mount's share is used up, bytes go with calls.
"""
import contextlib
import errno
import io
import mmap
import os
from typing import Any, Callable, Iterator, Optional

import torch

from hitrain._bytes import take_and_sum
from hitrain._files import ParameterFile
from hitrain._mapped import ASK, discard, is_passed, map_file
from hitrain._parts import is_dtensor
from hitrain._words import HIDDEN, bytes_of, close_quietly, opened

LEAST_BYTES = 4096  # of a file that is mapped; calls read and write smaller ones
_ASKS = 3


def can_have_windows(name: str, tensor: torch.Tensor) -> bool:
    """A command names the gradient, so its name must be one word of a line."""
    return not is_dtensor(tensor) and tensor.device.type == 'cpu' and tensor.layout == torch.strided and \
        name == name.strip()


class WindowFile(ParameterFile):
    """Its methods are those of ParameterFile."""

    def __init__(self, root: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        super().__init__(root, name, tensor, dtype, grad_dtype)
        self._values = Window(self.path, os.O_RDONLY, dtype, tensor.shape)
        self._window = Window(os.path.join(root, HIDDEN, 'grad', name), os.O_RDWR, grad_dtype, tensor.shape)
        self._mode = os.O_WRONLY

    # -- gradients --

    @torch.no_grad()
    def write_gradient(self, drop: Callable[[], None], part: slice = slice(None)) -> None:
        window = self._window.memory()
        if window is None:
            super().write_gradient(drop, part)
            return
        window.copy_(self.gradient())
        self.written = window.numel() * window.element_size()

    @property
    def is_stored(self) -> bool:
        return self.written > 0 and self._window.content is not None

    # -- values --

    @torch.no_grad()
    def read(self) -> None:
        values = self._values.memory()
        if values is None:
            with self._reading():
                super().read()
            return
        self._half_read = True
        self._known = take_and_sum(self.local, values)
        self._half_read = False

    def may_gather(self) -> bool:
        return self._values.is_refused and self._window.is_refused and super().may_gather()

    def open_existing(self, fill: bool = False) -> None:
        with self._reading():
            super().open_existing(fill)

    def restore(self, may_create: bool, fill: bool = False) -> bool:
        """An abort may have made the file anew, and the mapping would go on to show the old one."""
        self._values.end()
        self._window.end()
        return super().restore(may_create, fill)

    # -- descriptors --

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        reads = self._mode == os.O_RDONLY
        if reads and self._file is not None:
            yield self._file.fileno()
            return
        file = opened(self.path, self._mode)
        with super()._keeping(file) if reads and self._values.is_refused else self._keeping(file) as fd:
            yield fd

    @contextlib.contextmanager
    def _keeping(self, file: io.FileIO) -> Iterator[int]:
        """One that stays open would keep an ordinary file ordinary."""
        try:
            yield file.fileno()
        finally:
            close_quietly(file)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        self._mode = os.O_RDONLY
        try:
            yield
        finally:
            self._mode = os.O_WRONLY

    def _close_kept(self) -> None:
        super()._close_kept()
        self._values.end()
        self._window.end()


class Window:
    """content: the memory, once it is mapped. least: bytes of a file that is mapped."""

    def __init__(self, path: str, mode: int, dtype: torch.dtype, shape: Any, least: int = LEAST_BYTES) -> None:
        self._least = least
        self._path, self._mode, self._dtype, self._shape = path, mode, dtype, shape
        self._bytes = shape.numel() * bytes_of(dtype)
        self.content: Optional[torch.Tensor] = None
        self._asks = 0
        self.end()

    @property
    def is_refused(self) -> bool:
        return not self._asks and self.content is None

    def memory(self) -> Optional[torch.Tensor]:
        if self.content is None and self._asks:
            self._asks -= 1
            self.content = self._mapped()
        return self.content

    def end(self) -> None:
        if self.content is not None:
            discard(self.content.data_ptr(), self._bytes)
        self.content = None
        self._asks = _ASKS if self._bytes >= self._least else 0

    def _mapped(self) -> Optional[torch.Tensor]:
        file = opened(self._path, self._mode | ASK)
        try:
            fd = file.fileno()
            if not is_passed(fd):
                return None
            size = os.fstat(fd).st_size
            if size != self._bytes:
                raise OSError(errno.EIO, f'the file has {size} bytes, and the tensor {self._bytes}')
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if self._mode == os.O_RDWR else 0)
            return torch.frombuffer(map_file(fd, size, protection), dtype=self._dtype).view(self._shape)
        finally:
            close_quietly(file)
