# SPDX-License-Identifier: Apache-2.0
"""One tensor and its file in the store: sends and receives bytes, and notices changes from elsewhere.

A tensor is compared by a checksum over all its bytes with what it was when its file had the same values. PyTorch's version
counter does not see changes through `.data`, which clipping of weights and averages of weights often use. The checksum reads
memory once; it needs no copy.
"""
import contextlib
import io
import math
import os
from typing import Any, Callable, Iterator, Optional, Tuple, Union

import torch

from hitrain import _topk
from hitrain._bytes import checksum, flat_of, hand_over, is_direct, memory_of, read_all, read_and_sum, read_as, write_all, write_as
from hitrain._parts import Part, as_placed, is_dtensor, local_of, value_of_part
from hitrain._words import FILE_DTYPES, HIDDEN, XATTR, Descriptors, attribute, bytes_of, close_copy, close_quietly, is_shape, opened, shape_word


class ParameterFile:
    """One tensor and its file. Methods raise OSError; the caller adds what it was doing.

    part     which elements of the parameter the tensor holds; None: all
    share    which of the tensor's elements this process writes a gradient for, if it holds a part
    writers  the ranks that do so
    written  bytes of its gradient that hand_over() has not given to the step yet
    sent     gradients of this parameter that the store has got in this step
    direct   past the kernel's cache: each read is of new values, so a cache is only one more copy
    """

    keeps_memory = False  # whatever other memory a program gives the tensor
    trusts_versions = False  # of PyTorch: then a tensor of the same version at the same place has the same values

    def __init__(self, root: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, grad_dtype: torch.dtype,
                 part: Optional[Part] = None, direct: bool = False) -> None:
        self.root, self.path, self.name, self.tensor = root, os.path.join(root, name), name, tensor
        self.part, self.share, self.writers = part, slice(None), [0]
        self.dtype, self.grad_dtype = dtype, grad_dtype
        self.sent = self.written = 0
        self.hook: Any = None
        self._file: Optional[io.FileIO] = None  # both: kept open
        self._grad_file: Optional[io.FileIO] = None
        self._flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._known: Optional[int] = None  # checksum of the tensor when it was equal to the file
        self._same_at: Optional[Tuple[int, int]] = None  # version and place of the tensor when its checksum was the known one
        self._half_read = False
        self._pushed_in = -1  # finished steps when the tensor's own value was last written to the file
        self._grad_sent: Any = None
        self._grad_sum: Optional[int] = None  # its checksum, of a gradient that was sent before step()
        self.made = False  # by create()
        self._elements = self.local.numel()

    @property
    def local(self) -> torch.Tensor:
        """The memory of the elements that this process has."""
        return local_of(self.tensor)

    @property
    def whole(self) -> 'ParameterFile':
        """The file that holds it: of a member of a pack, the pack."""
        return self

    @property
    def offset(self) -> int:
        return self.part.offset if self.part else 0

    @property
    def shape(self) -> Tuple[int, ...]:
        return self.part.shape if self.part else tuple(self.tensor.shape)

    @property
    def has_elements(self) -> bool:
        """If not, its file has attributes alone. No step, abort or state concerns it."""
        return math.prod(self.shape) > 0

    def make_empty(self) -> None:
        """The file of a parameter without elements, for exports. ValueError: the store has elements."""
        if os.path.exists(self.path):
            found = attribute(self.path, 'shape')
            if os.stat(self.path).st_size or not is_shape(found, self.shape):
                raise ValueError(f'{self.path}: shape is {found or "not set"} in the store and {shape_word(self.shape)} in the model')
            return
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)
        self.made = True
        try:
            self._set_attributes(fd)
        finally:
            close_quietly(fd)

    # -- the parameter --

    def create(self) -> None:
        file = opened(self.path, self._flags | os.O_CREAT | os.O_EXCL)
        self.made = True
        with self._keeping(file) as fd:
            self._set_attributes(fd)
            self.describe(fd)
            if self.part:
                os.ftruncate(fd, math.prod(self.shape) * bytes_of(self.dtype))
            self._write(fd)

    def describe(self, fd: int) -> None:
        """Further attributes of a new file."""

    def _set_attributes(self, where: Union[int, str]) -> None:
        os.setxattr(where, XATTR + 'dtype', FILE_DTYPES[self.dtype].encode())
        os.setxattr(where, XATTR + 'shape', shape_word(self.shape).encode())
        if self.grad_dtype != self.dtype:
            os.setxattr(where, XATTR + 'grad_dtype', FILE_DTYPES[self.grad_dtype].encode())

    def open_existing(self, fill: bool = False) -> None:
        """fill: another rank has made the file, which takes this part's values."""
        with self._opened() as fd:
            for word, wanted in (('dtype', FILE_DTYPES[self.dtype]), ('shape', shape_word(self.shape))):
                found = attribute(fd, word)
                if found != wanted and not (word == 'shape' and is_shape(found, self.shape)):
                    raise ValueError(f'{self.path}: {word} is {found or "not set"} in the store and {wanted} in the model')
            self._write(fd) if fill else self._read(fd)

    def read(self) -> None:
        """The tensor takes the file's values."""
        with self._opened() as fd:
            self._read(fd)

    def may_gather(self) -> bool:
        """Can it be read and written together with others (_gather.py)?"""
        return self.part is None and self.name == self.name.strip() and self.tensor.numel() > 0

    def take(self, values: torch.Tensor) -> None:
        """The tensor takes these, which are those of the file, flat. Without gradients."""
        self._half_read = True
        local = self.local
        local.copy_(values.view(local.shape))
        self._known, self._half_read = checksum(local), False

    def restore(self, may_create: bool, fill: bool = False) -> bool:
        """After an abort: read the file anew, or make it anew where the abort took it away because it was never committed.
        Returns whether it was made. fill: another rank has made it."""
        self.forget()
        self._close_kept()
        if may_create and not os.path.exists(self.path):
            self.create()
            return True
        if fill:
            with self._opened() as fd:
                self._write(fd)
        else:
            self.read()
        return False

    def forget(self) -> None:
        """The number of sent gradients is not known any more."""
        self.begin_step()

    def begin_step(self) -> None:
        self.sent, self._grad_sent, self._grad_sum = 0, None, None

    # -- changes from outside --

    def changed(self, all_bytes: bool = False) -> bool:
        """Does the tensor differ from the content that its file had when both were last equal? all_bytes: versions are not trusted."""
        if self._half_read:
            raise RuntimeError(f'reading {self.name} failed, so its tensor is neither old nor new: read it again, or call abort()')
        now = (self.tensor._version, self.tensor.data_ptr()) if self.trusts_versions else None
        if now is not None and self._same_at == now and self._known is not None and not all_bytes:
            return False
        different = self._known is None or self.sum_of_values() != self._known
        self._same_at = None if different else now
        return different

    def sum_of_values(self) -> int:
        return checksum(self.local)

    def push(self, step: int) -> None:
        """The file takes the tensor's values. step: how many are finished."""
        with self._opened() as fd:
            self._write(fd)
        self._pushed_in = step

    def push_writes_state(self) -> bool:
        """May push() write state, which the store takes only between steps?"""
        return False

    def push_again_after(self, durable: int) -> None:
        """The store is back at the durable step: a value that was written since then has to be written once more."""
        if self._pushed_in >= durable:
            self._known = None

    def published(self) -> None:
        self._pushed_in = -1

    def equals_file(self) -> bool:
        """Read the file and compare; if both are equal, that is remembered."""
        found = torch.empty(self.tensor.shape, dtype=self.dtype)
        with self._opened() as fd:
            read_all(fd, found)
        equal = bytes(memory_of(found)) == bytes(memory_of(self.tensor.detach().to('cpu', self.dtype).contiguous()))
        if equal:
            self._known = checksum(self.local)
        return equal

    # -- its state --

    def check_state(self, name: str, value: torch.Tensor) -> None:
        if name != 'step':
            self.own_value(name, value)
        elif value.numel() != 1:
            raise ValueError(f'{name} of {self.name} is one number, not a tensor of the shape {tuple(value.shape)}')

    def own_value(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This process's elements of a value of the whole parameter, or of its part. ValueError if it is neither."""
        return value_of_part(f'{name} of {self.name}', value, self.part, self.tensor)

    def read_state(self, name: str) -> torch.Tensor:
        """A copy, as f32; placed as the tensor."""
        step = name == 'step'
        out = torch.empty(() if step else tuple(self.local.shape), dtype=torch.float32)
        with self._state(name, os.O_RDONLY) as fd:
            if os.fstat(fd).st_size == 0:
                raise RuntimeError(f'{self.name} has no {name} yet: the store makes state in the first step of a parameter')
            read_all(fd, out, 0 if step else self.offset * 4)
        return out if step else as_placed(out.to(self.local.device) if is_dtensor(self.tensor) else out, self.tensor)

    def write_state(self, name: str, value: torch.Tensor) -> None:
        own, at = (value, 0) if name == 'step' else (self.own_value(name, value), self.offset * 4)
        with self._state(name, os.O_WRONLY) as fd:
            write_all(fd, own.detach().to('cpu', torch.float32).contiguous(), at)

    @contextlib.contextmanager
    def _state(self, name: str, flags: int) -> Iterator[int]:
        with opened(os.path.join(self.root, HIDDEN, 'state', self.whole.name, name), flags) as file:
            yield file.fileno()

    # -- its gradient --

    def gradient(self) -> torch.Tensor:
        grad: Any = self.tensor.grad
        own: Any = self.tensor
        if type(grad) is torch.Tensor and grad.layout == torch.strided and grad.device.type != 'meta':
            check_elements(self.name, grad, self._elements)
            return grad
        if is_dtensor(grad) and is_dtensor(own):
            if tuple(grad.placements) != tuple(own.placements):
                raise TypeError(f'the gradient of {self.name} is placed as {grad.placements} and not as its parameter, {own.placements}')
            grad = local_of(grad)
        if grad.layout != torch.strided:
            raise TypeError(f'the gradient of {self.name} is sparse; only dense ones can be sent')
        check_plain(f'the gradient of {self.name}', grad)
        check_elements(self.name, grad, self._elements)
        return grad

    def has_gradient(self) -> bool:
        return self.tensor.grad is not None

    def check_gradient(self) -> None:
        """TypeError: it cannot be sent."""
        self.gradient()

    def replace_gradient(self, values: torch.Tensor) -> None:
        self.tensor.grad = values

    def outgoing(self) -> torch.Tensor:
        """The gradient, flat. Its file may have another dtype."""
        return flat_of(self.gradient())

    def write_gradient(self, drop: Callable[[], None], part: slice = slice(None)) -> None:
        """hand_over() or `apply` gives it to the step. drop: takes back the written part when the rest cannot be written."""
        grad, size = self.outgoing()[part], bytes_of(self.grad_dtype)
        self.written = grad.numel() * size
        if not self.written:
            return
        if self._grad_file is None:
            self._grad_file = opened(os.path.join(self.root, HIDDEN, 'grad', self.name), os.O_WRONLY)
            Descriptors.kept.add(self._grad_file)
        try:
            self._put_gradient(self._grad_file.fileno(), grad, (self.offset + (part.start or 0)) * size)
        except BaseException:
            with contextlib.suppress(OSError):
                drop()  # otherwise the caller takes back the whole step
            self._close_gradient()
            raise

    def _put_gradient(self, fd: int, grad: torch.Tensor, at: int) -> None:
        write_as(fd, grad, self.grad_dtype, at)

    def hand_over(self) -> None:
        """The written gradient goes to the step: errors of the gradient are raised here."""
        file = self._grad_file
        if file is None:
            return
        if Descriptors.crowded() or not close_copy(file.fileno()):  # each close hands over
            self._grad_file = None
            file.close()
        self.written = 0

    def finish_gradient(self) -> None:
        """After an error: what is written of a gradient goes to the step, if the store takes it."""
        if self.written:
            self.written = 0
            self._close_gradient()

    def _close_gradient(self) -> None:
        file, self._grad_file = self._grad_file, None
        if file is not None:
            close_quietly(file)

    def write_sparse(self, drop: Callable[[], None], indices: torch.Tensor, values: torch.Tensor) -> None:
        head = _topk.header(values.dtype, self.tensor.numel(), indices.numel())
        hand_over(os.path.join(self.root, HIDDEN, 'grad-topk', self.name),
                   [torch.frombuffer(bytearray(head), dtype=torch.uint8), indices, values], 0, drop)

    @property
    def is_stored(self) -> bool:
        """The written gradient lies in mapped memory: `apply` gives it to the step, and hand_over() would not."""
        return False

    def gradient_sent(self, early: bool) -> None:
        """early: before step(), so .grad may be changed before it ends; PyTorch's version counter would not see all changes."""
        self.sent += 1
        self._grad_sent = _identity(self.tensor.grad)
        self._grad_sum = checksum(local_of(self.tensor.grad)) if early else None

    def is_sent(self) -> bool:
        """Does .grad hold the gradient that was sent last?"""
        return self._grad_sent is not None and _identity(self.tensor.grad) == self._grad_sent and \
            (self._grad_sum is None or checksum(local_of(self.tensor.grad)) == self._grad_sum)

    def gradient_changed(self) -> bool:
        """Has .grad been changed, or cleared by another than clear_gradient(), since it was sent?"""
        return self._grad_sent is not None and not self.is_sent()

    def clear_gradient(self) -> None:
        self.tensor.grad = self._grad_sent = self._grad_sum = None

    def close(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        self._close_kept()

    def unmake(self) -> None:
        """Close it, and take the file away again if create() made it."""
        self.close()
        if self.made:
            os.unlink(self.path)
            self.made = False

    def forsake(self) -> None:
        """In a forked child: a descriptor here would keep the store mounted after its parent has closed its own."""
        self._close_kept()

    # -- within --

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        if self._file is not None:
            yield self._file.fileno()
        else:
            with self._keeping(opened(self.path, self._flags)) as fd:
                yield fd

    @contextlib.contextmanager
    def _keeping(self, file: io.FileIO) -> Iterator[int]:
        if self.part:  # what lies beyond the part is other ranks'
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        if Descriptors.may_keep():
            Descriptors.kept.add(file)
            self._file = file
            yield file.fileno()
            return
        try:
            yield file.fileno()
        finally:
            close_quietly(file)

    def _close_kept(self) -> None:
        self._close_gradient()
        file, self._file = self._file, None
        if file is not None:
            close_quietly(file)

    def _write(self, fd: int) -> None:
        self._known = None
        local, rounds = self.local, self.dtype != self.local.dtype
        flat = flat_of(local)
        write_as(fd, flat, self.dtype, self.offset * bytes_of(self.dtype), back=rounds)  # compute with the store's values
        if rounds and not local.is_contiguous():
            self._store(flat)
        self._known = checksum(local)

    def _read(self, fd: int) -> None:
        self._half_read = True
        local, at = self.local, self.offset * bytes_of(self.dtype)
        if is_direct(local, self.dtype):
            known = read_and_sum(fd, local, at)
            # Values that autograd saved are void: a view of nothing moves the version counter.
            local.detach().view(-1)[:0].zero_()
        elif local.is_contiguous():
            read_as(fd, flat_of(local), self.dtype, at)
            known = checksum(local)
        else:
            values = torch.empty(local.numel(), dtype=self.dtype)
            read_all(fd, values, at)
            self._store(values)
            known = checksum(local)
        self._known, self._half_read = known, False

    @torch.no_grad()
    def _store(self, values: torch.Tensor) -> None:
        self.local.copy_(values.view(self.local.shape))


def check_plain(what: str, tensor: torch.Tensor) -> None:
    """Only a tensor with memory of its own can be a file."""
    if hasattr(tensor, 'to_local') or hasattr(tensor, '__tensor_flatten__'):
        raise TypeError(f'{what} is a {type(tensor).__name__}, whose elements are not in one memory: hitrain takes plain tensors, and '
                        'parameters of fully_shard (DTensor)')
    if tensor.device.type == 'meta':
        raise TypeError(f'{what} is on the device meta and has no values: materialise the model first')


def check_elements(name: str, grad: torch.Tensor, elements: int) -> None:
    if grad.numel() != elements:
        raise ValueError(f'the gradient of {name} has {grad.numel()} elements of shape {tuple(grad.shape)}, and its file has {elements}: the '
                         'parameter was given other memory. Change values in place, or make the model anew')


def _identity(tensor: Optional[torch.Tensor]) -> Any:
    if tensor is None:
        return None
    local = local_of(tensor)
    return local.data_ptr(), local._version
