# SPDX-License-Identifier: Apache-2.0
"""One tensor and its file in the store: sends and receives bytes, and notices changes from elsewhere.

A tensor is compared by a checksum over all its bytes with what it was when its file had the same values. PyTorch's version
counter does not see changes through `.data`, which clipping of weights and averages of weights often use. The checksum reads
memory once; it needs no copy.
"""
import concurrent.futures
import contextlib
import ctypes
import errno
import functools
import hashlib
import io
import math
import mmap
import os
import resource
import weakref
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import torch

from hitrain import _ring, _topk
from hitrain._parts import Part, as_placed, is_dtensor, local_of, value_of_part

XATTR = 'user.hitrain.'
HIDDEN = '.hitrain'

THREADS = min(4, os.cpu_count() or 1)  # that transfer bytes at the same time
PIECE_BYTES = 4 << 20
BLOCK_BYTES = 1 << 20  # fits into a cache of a processor

# The dtypes of files, in the words of the store.
FILE_DTYPES = {torch.float32: 'f32', torch.bfloat16: 'bf16', torch.float16: 'f16'}
SCALAR = 'scalar'  # the word for a shape without dimensions


class Descriptors:
    """How many files of parameters and gradients this process may keep open: half of its limit, or all but 512. Parameters take at most half
    of these, as they come first. The others are opened for each use."""
    kept: 'weakref.WeakSet[io.FileIO]' = weakref.WeakSet()

    @classmethod
    def may_keep(cls) -> bool:
        return len(cls.kept) < cls.most() // 2

    @classmethod
    def crowded(cls) -> bool:
        return len(cls.kept) > cls.most()

    @classmethod
    def most(cls) -> int:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return max(1, limit // 2, limit - 512) if limit != resource.RLIM_INFINITY else 1 << 20


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

    def changed(self) -> bool:
        """Does the tensor differ from the content that its file had when both were last equal?"""
        if self._half_read:
            raise RuntimeError(f'reading {self.name} failed, so its tensor is neither old nor new: read it again, or call abort()')
        return self._known is None or self.sum_of_values() != self._known

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
        return _flat(self.gradient())

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
            write_as(self._grad_file.fileno(), grad, self.grad_dtype, (self.offset + (part.start or 0)) * size)
        except BaseException:
            with contextlib.suppress(OSError):
                drop()  # otherwise the caller takes back the whole step
            self._close_gradient()
            raise

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
        _hand_over(os.path.join(self.root, HIDDEN, 'grad-topk', self.name),
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
        flat = _flat(local)
        write_as(fd, flat, self.dtype, self.offset * bytes_of(self.dtype), back=rounds)  # compute with the store's values
        if rounds and not local.is_contiguous():
            self._store(flat)
        self._known = checksum(local)

    def _read(self, fd: int) -> None:
        self._half_read = True
        local, at = self.local, self.offset * bytes_of(self.dtype)
        if _direct(local, self.dtype):
            known = read_and_sum(fd, local, at)
            # Values that autograd saved are void: a view of nothing moves the version counter.
            local.detach().view(-1)[:0].zero_()
        elif local.is_contiguous():
            read_as(fd, _flat(local), self.dtype, at)
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


# ------------------------------------------------------------------ tensors

def _load_xxh3() -> Optional[Callable[[int, int], int]]:
    """Of the library that the store's daemon uses, too. It runs at the speed of memory."""
    try:
        call = ctypes.CDLL('libxxhash.so.0').XXH3_64bits
    except (OSError, AttributeError):
        return None
    call.restype, call.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_size_t]
    return call


_xxh3 = _load_xxh3()


def checksum(tensor: torch.Tensor) -> int:
    """Of all bytes, where the tensor is. It holds for this process alone."""
    dense = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    if dense.device.type != 'cpu':
        return _sum_of_words(dense)
    size, address = dense.numel() * dense.element_size(), dense.data_ptr()
    if _xxh3 and address and size <= BLOCK_BYTES:
        return _xxh3(address, size)
    return _in_blocks(memory_of(dense), address)


def take_and_sum(tensor: torch.Tensor, values: torch.Tensor) -> int:
    """Copies values into the tensor and returns its checksum. Both are plain memory: then each block is summed while a processor's
    cache has it."""
    if not (_direct(tensor, values.dtype) and _direct(values, tensor.dtype)):
        tensor.copy_(values)
        return checksum(tensor)
    tensor.detach().view(-1)[:0].zero_()  # values that autograd saved are void: a view of nothing moves the version counter
    return _in_blocks(memory_of(tensor), tensor.data_ptr(), values.data_ptr())


def _in_blocks(memory: memoryview, address: int, source: int = 0) -> int:
    """The checksum of the blocks' checksums. source: the address of bytes that memory gets before."""
    def add(block: int) -> int:
        at = block * BLOCK_BYTES
        size = min(BLOCK_BYTES, len(memory) - at)
        if source:
            ctypes.memmove(address + at, source + at, size)
        return _sum_of(memory[at:at + size], address + at)

    def add_some(first: int) -> List[int]:
        return [add(block) for block in range(first, min(first + step, count))]
    count, step = -(-len(memory) // BLOCK_BYTES), max(1, PIECE_BYTES // BLOCK_BYTES)
    if count <= 1:
        return add(0)
    firsts = range(0, count, step)
    if len(firsts) == 1 or THREADS == 1:
        sums = [s for first in firsts for s in add_some(first)]
    else:
        sums = [s for some in _at_once(add_some, firsts) for s in some]
    whole = (ctypes.c_uint64 * count)(*sums)
    return _sum_of(memoryview(whole).cast('B'), ctypes.addressof(whole))


def _sum_of(memory: memoryview, address: int) -> int:
    if _xxh3:
        return _xxh3(address, len(memory))
    return int.from_bytes(hashlib.blake2b(memory, digest_size=8).digest(), 'little')


_ROW = 1 << 15  # words; a row and its mixed copy fit in a core's cache
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_factors = {torch.device('cpu'): torch.randint(-(1 << 62), 1 << 62, (_ROW,), generator=torch.Generator().manual_seed(251)) | 1}


@torch.no_grad()
def _sum_of_words(dense: torch.Tensor) -> int:
    """With PyTorch's operations, for other devices: rows of 64-bit words. Each word is mixed and takes a factor of its place in
    the row; the rows' sums are mixed in turn."""
    size = dense.numel() * dense.element_size()
    flat = dense.view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    if flat.device not in _factors:
        _factors[flat.device] = _factors[torch.device('cpu')].to(flat.device)
    factors = _factors[flat.device]
    tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    tail[:size % 8] = flat[size - size % 8:]
    words = flat[:size - size % 8].view(torch.int64)
    whole = len(words) // _ROW * _ROW
    groups = words[:whole].view(-1, _ROW).split(256)
    sums = [_row_sums(rows, factors) for rows in groups]
    sums += [_row_sums(words[whole:].unsqueeze(0), factors), _row_sums(tail.view(torch.int64).view(1, 1), factors)]
    total = size
    for s in torch.cat(sums).tolist():
        total = ((total ^ total >> 32) * _MIX + s) & _MASK
    return total


def _row_sums(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The upper half of each word goes into the lower one, by exclusive or. Otherwise a factor would not count for the sign of an odd f32: it
    is the top bit, and each odd multiple of 2^63 is 2^63."""
    mixed = rows.clone()
    halves = mixed.view(torch.int32)
    halves[:, ::2] ^= halves[:, 1::2]
    mixed *= factors[:rows.shape[1]]
    return mixed.sum(1)


def check_name(name: str) -> None:
    if not name or '/' in name or '\0' in name or '\n' in name or name in ('.', '..', HIDDEN) or len(os.fsencode(name)) > 255:
        raise ValueError(f'{name!r} cannot be the name of a file')


def check_plain(what: str, tensor: torch.Tensor) -> None:
    """Only a tensor with memory of its own can be a file."""
    if hasattr(tensor, 'to_local') or hasattr(tensor, '__tensor_flatten__'):
        raise TypeError(f'{what} is a {type(tensor).__name__}, whose elements are not in one memory: hitrain takes plain tensors, and '
                        'parameters of fully_shard (DTensor)')
    if tensor.device.type == 'meta':
        raise TypeError(f'{what} is on the device meta and has no values: materialise the model first')


def _identity(tensor: Optional[torch.Tensor]) -> Any:
    if tensor is None:
        return None
    local = local_of(tensor)
    return local.data_ptr(), local._version


@functools.lru_cache(maxsize=None)
def bytes_of(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()


def _direct(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Can this tensor's memory be read and written as the bytes of a file?"""
    return tensor.dtype == dtype and tensor.device.type == 'cpu' and tensor.is_contiguous()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of a file: the tensor's memory, or a copy if its memory has another order."""
    return tensor.detach().reshape(-1)


def check_elements(name: str, grad: torch.Tensor, elements: int) -> None:
    if grad.numel() != elements:
        raise ValueError(f'the gradient of {name} has {grad.numel()} elements of shape {tuple(grad.shape)}, and its file has {elements}: the '
                         'parameter was given other memory. Change values in place, or make the model anew')


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy; valid while the tensor is."""
    size, address = tensor.numel() * tensor.element_size(), tensor.data_ptr()
    if not size:
        return memoryview(b'')
    if not address:
        raise TypeError(f'a {type(tensor).__name__} without memory of its own cannot be read or written')
    return memory_at(address, size)


def memory_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast('B')


# -------------------------------------------------------------------- files

def attribute(where: Any, word: str) -> str:
    """The attribute of a path or descriptor; '' when it is not set."""
    try:
        return os.fsdecode(os.getxattr(where, XATTR + word))  # it may have names of files
    except OSError as e:
        if e.errno != errno.ENODATA:
            raise
        return ''


def shape_word(shape: Sequence[int]) -> str:
    """The attribute for a shape."""
    return ','.join(map(str, shape)) or SCALAR


def read_shape(word: str) -> Tuple[int, ...]:
    return () if word == SCALAR else tuple(int(n) for n in word.split(','))


def is_shape(word: str, shape: Sequence[int]) -> bool:
    """Does an attribute mean this shape? Versions before 'scalar' wrote 1 for it, and such files keep that."""
    return word == shape_word(shape) or (word == '1' and not tuple(shape))


def write_all(fd: int, tensor: torch.Tensor, at: int = 0) -> None:
    _in_pieces(lambda memory, at: _write_on(fd, memory, at), tensor, at)


def write_as(fd: int, flat: torch.Tensor, dtype: torch.dtype, at: int = 0, back: bool = False) -> None:
    """As elements of dtype; f32 to bf16: to nearest even. back: the tensor takes the values that the file has."""
    if _direct(flat, dtype):
        write_all(fd, flat, at)
        return
    copies = _ring.Copies(flat)

    def write(own: torch.Tensor, buffer: torch.Tensor, at: int) -> None:
        copies.copy(buffer, own)
        _write_on(fd, memory_of(buffer), at)
        if back:
            copies.copy(own, buffer)
    _through_buffers(write, flat, dtype, at, copies.pinned)


def read_as(fd: int, flat: torch.Tensor, dtype: torch.dtype, at: int = 0) -> None:
    """The file has elements of dtype. Values that autograd saved are void: each copy moves the version counter."""
    copies = _ring.Copies(flat)

    def read(own: torch.Tensor, buffer: torch.Tensor, at: int) -> None:
        read_on(fd, memory_of(buffer), at)
        copies.copy(own, buffer)
    _through_buffers(read, flat, dtype, at, copies.pinned)


def _through_buffers(transfer: Callable[[torch.Tensor, torch.Tensor, int], None], flat: torch.Tensor, dtype: torch.dtype, at: int,
                     pinned: bool) -> None:
    """Calls it with a piece of the tensor, a buffer for that, and its place in the file. All have ended when this returns."""
    size = bytes_of(dtype)
    step = _ring.BUFFER_BYTES // size

    def do(first: int) -> None:
        own = flat[first:first + step]
        with _ring.buffer(pinned, own.numel(), dtype) as buffer:
            transfer(own, buffer, at + first * size)
    firsts = range(0, flat.numel(), step)
    if len(firsts) <= 1 or THREADS == 1:
        for first in firsts:
            do(first)
        return
    _at_once(do, firsts)


def _write_on(fd: int, memory: memoryview, at: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], at + done)


def read_all(fd: int, tensor: torch.Tensor, at: int = 0) -> None:
    _in_pieces(lambda memory, at: read_on(fd, memory, at), tensor, at)


def read_on(fd: int, memory: memoryview, at: int) -> None:
    done = 0
    while done < len(memory):
        n = os.preadv(fd, [memory[done:]], at + done)
        if n == 0:
            raise OSError(errno.EIO, f'the file ends after {at + done} of {at + len(memory)} bytes')
        done += n


def read_and_sum(fd: int, tensor: torch.Tensor, at: int = 0) -> int:
    """As read_all, and returns the tensor's checksum. A thread sums each block as soon as it is read, while the processor's cache has it. Blocks
    begin where the tensor does, and reads at pages of memory: a block that two threads read in part is summed at the end."""
    memory, address = memory_of(tensor), tensor.data_ptr()
    begin, count = min(len(memory), -address % mmap.PAGESIZE), -(-len(memory) // BLOCK_BYTES)
    sums = (ctypes.c_uint64 * max(1, count))()

    def add(block: int) -> None:
        first, end = block * BLOCK_BYTES, min(len(memory), (block + 1) * BLOCK_BYTES)
        sums[block] = _sum_of(memory[first:end], address + first)

    def read(first: int, end: int) -> None:
        block = -(-first // BLOCK_BYTES)
        while first < end:
            to = min(end, (first or begin) + BLOCK_BYTES)
            read_on(fd, memory[first:to], at + first)
            first = to
            while block < count and min(len(memory), (block + 1) * BLOCK_BYTES) <= first:
                add(block)
                block += 1
    edges = _shares(len(memory), begin)
    if len(edges) <= 2:
        read(0, len(memory))
    else:
        _at_once(read, edges, edges[1:])
        for edge in edges[1:-1]:
            if edge % BLOCK_BYTES:
                add(edge // BLOCK_BYTES)
    if count <= 1:
        return sums[0] if count else checksum(tensor)
    return _sum_of(memoryview(sums).cast('B'), ctypes.addressof(sums))


def _shares(size: int, begin: int) -> List[int]:
    """Where the parts of so many bytes begin that threads take one after the other, and the end. The first begins within a page."""
    if size < 2 * PIECE_BYTES or THREADS == 1:
        return [0, size]
    step = max(PIECE_BYTES, size // (2 * THREADS) // BLOCK_BYTES * BLOCK_BYTES)
    return [0, *range(begin + step, size, step), size]


def _in_pieces(transfer: Callable[[memoryview, int], None], tensor: torch.Tensor, at: int) -> None:
    """A call sends the kernel's requests one after the other, so several threads share a large tensor. Pieces begin at pages of memory,
    as requests do. All have ended when this returns."""
    memory = memory_of(tensor)
    begin = min(len(memory), -tensor.data_ptr() % mmap.PAGESIZE)
    if len(memory) < 2 * PIECE_BYTES or THREADS == 1:
        transfer(memory, at)
        return
    edges = [0, *range(begin + PIECE_BYTES, len(memory), PIECE_BYTES), len(memory)]
    _at_once(lambda a, b: transfer(memory[a:b], at + a), edges, edges[1:])


def _at_once(do: Callable[..., Any], *arguments: Iterable[Any]) -> List[Any]:
    """Calls it with the first of all arguments, the second, and so on, by several threads. All calls have ended when this returns."""
    with concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix='hitrain-transfer') as pool:
        return list(pool.map(do, *arguments))


def _hand_over(path: str, tensors: List[torch.Tensor], at: int, drop: Callable[[], None]) -> None:
    """Writes a gradient: these tensors, one after the other. Closing hands the written bytes over, so an error drops
    them before."""
    file = opened(path, os.O_WRONLY)
    try:
        for t in tensors:
            _write_on(file.fileno(), memory_of(t), at)
            at += t.numel() * t.element_size()
    except BaseException:
        try:
            drop()
        except OSError:
            pass  # then the caller takes back the whole step
        finally:
            close_quietly(file)
        raise
    file.close()  # hands the gradient over: errors of the gradient are raised here


# Ctrl-C may come between any two operations of Python, as between os.open() and the place that takes its number: then nobody would close it.
# The next two functions open and close within one operation.

def opened(path: str, flags: int) -> io.FileIO:
    """It closes itself when nobody has it any more."""
    return next(map(io.FileIO, map(os.open, (path,), (flags | os.O_CLOEXEC,), (0o666,)), ('r',)))


def close_copy(fd: int) -> bool:
    """Closes a copy of the descriptor, of which the file system hears. False: there can be no more descriptors."""
    try:
        next(map(os.close, map(os.dup, (fd,))))
    except OSError as e:
        if e.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return False
    return True


def close_quietly(file: Union[int, io.FileIO]) -> None:
    try:
        os.close(file) if isinstance(file, int) else file.close()
    except OSError:
        pass  # the earlier failure was reported already
