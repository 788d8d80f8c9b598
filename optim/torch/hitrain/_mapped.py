# SPDX-License-Identifier: Apache-2.0
"""A parameter whose memory is its file: the tensor is a shared mapping, and the store's file is its only content.

    not loaded --load(): the kernel reads all pages--> loaded --release(): the kernel drops them--> not loaded
    either one --detach(): the mapping ends--> memory of the process, with the values, or none

The tensor has its values in both states. Code that uses a parameter that is not loaded reads it page by page, which is
slow and right. What a program stores through the tensor goes to the file; flush() sends it to the store at once.

Where the mount passes files through, the mapping is the memory of the store itself. Then nothing is read, and nothing has to be flushed, and the file
is not opened again: a mapping needs no descriptor, and a model may have more files than a process may have descriptors. The file
must have its dtype and size before it is opened for the first time: an open of any other file would keep it ordinary.

One mapping keeps the store mounted. So close() of the optimizer detaches all. What else refers to the memory, as a view does, needs the values at
the same address: the process's own memory takes the place of the mapping there.

A page that cannot be read is SIGBUS for the thread that touches it. load() reads all pages first, so that a store that is
gone is an OSError there.
"""
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
import weakref
from typing import Any, Callable, Dict, Optional

import torch

from hitrain._bytes import memory_at, read_on, write_all
from hitrain._files import ParameterFile
from hitrain._gate import Memory, Nothing, give_memory, is_sealed, seal, unseal, withdraw
from hitrain._words import close_copy

_PIECE = 16 << 20  # another thread that changes the address space waits for one piece at most
_PROT_NONE = 0
_MADV_DONTNEED, _MADV_POPULATE_READ = 4, 22  # the latter since Linux 5.14
_MREMAP_TO = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED
_FAILED = ctypes.c_void_p(-1).value
_PASSED = 2 << 30 | 4 << 16 | ord('h') << 8 | 3  # HT_IOCTL_PASSED of hitrain/words.h
ASK = os.O_ASYNC  # HT_OPEN_PASSED: an opener that wants the store's memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def can_be_mapped(tensor: torch.Tensor) -> bool:
    """A file has its elements in the order of the indices; a tensor with other strides stays in memory."""
    return tensor.device.type == 'cpu' and tensor.is_contiguous() and tensor.layout == torch.strided


def map_file(fd: int, size: int, protection: int) -> Any:
    """The shared mapping of a file's first bytes, as a ctypes array. It ends with the last tensor that has its memory."""
    address = _map_memory(size, protection, mmap.MAP_SHARED, fd)
    content = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(content, _libc.munmap, address, size).atexit = False  # tensors keep it
    return content


def detach(address: int, size: int, fill: Optional[Callable[[memoryview], None]] = None) -> None:
    """The memory of map_file() becomes the process's own, with the values that fill() writes. Without fill() it has none: code that still reads
    there ends with SIGSEGV, and computes with no zeros. What refers to it goes on to do so. OSError: it is the file's still."""
    own = _map_memory(size, mmap.PROT_READ | mmap.PROT_WRITE if fill else _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        if fill:
            fill(memory_at(own, size))
    except BaseException:
        _libc.munmap(own, size)
        raise
    if _libc.mremap(own, size, size, _MREMAP_TO, address) == _FAILED:
        error = _last_error()
        _libc.munmap(own, size)
        raise error


def discard(address: int, size: int) -> None:
    """The mapping ends without its last reference, as that of a traceback. When the interpreter ends, that would end nothing any more."""
    with contextlib.suppress(OSError):
        detach(address, size)


def _map_memory(size: int, protection: int, flags: int, fd: int) -> int:
    address: int = _libc.mmap(None, size, protection, flags, fd, 0)
    if address == _FAILED:
        raise _last_error()
    return address


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def is_passed(fd: int) -> bool:
    """Does the kernel have the store's memory of this file?"""
    try:
        return bool(struct.unpack('I', fcntl.ioctl(fd, _PASSED, bytes(4)))[0])
    except OSError as e:
        if e.errno != errno.ENOTTY:  # of an older daemon
            raise
        return False


class MappedFile(ParameterFile):
    """fill: gives the tensor its first values, for one that has none yet. asks: for the store's memory, if the mount lends it."""

    keeps_memory = True
    may_be_passed = True

    def __init__(self, root: str, name: str, tensor: torch.Tensor, grad_dtype: torch.dtype,
                 fill: Optional[Callable[[torch.Tensor], None]], asks: bool) -> None:
        super().__init__(root, name, tensor, tensor.dtype, grad_dtype)
        self._flags |= ASK if asks else 0
        self.content_bytes = tensor.numel() * tensor.element_size()
        self.bytes = -(-self.content_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # of memory, when it is loaded
        self._address: Any = None  # of the mapping
        self._ended = False  # it has ended, for good
        self._content: Any = None  # keeps the mapping, whatever memory a program gives the tensor
        self._is_passed = False  # the mapping is the store's memory
        self._fill = fill
        self._version_sent: Optional[int] = None
        self._memory = Memory()
        self._nothings: Dict[torch.device, Nothing] = {}  # which the tensor has while it is sealed

    # -- pages --

    def load(self) -> None:
        """Returns when all pages are in memory. OSError: they cannot be read."""
        if self._is_passed:
            self._populate()
            return
        with self._opened() as fd:
            os.posix_fadvise(fd, 0, self.content_bytes, os.POSIX_FADV_WILLNEED)
            self._populate()

    def release(self) -> None:
        """The pages leave memory. Those that were changed since flush() stay until the kernel has written them."""
        _libc.madvise(self._address, self.bytes, _MADV_DONTNEED)
        if self._is_passed:
            return
        try:
            with self._opened() as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            pass  # of a dead mount, whose pages the kernel may still drop

    def flush(self) -> None:
        """When this returns the store has all values that were stored through the tensor."""
        self.attach()
        self.flush_pages()

    def flush_pages(self) -> None:
        if self._is_passed:
            return
        with self._opened() as fd:
            self._flush(fd)

    def attach(self) -> None:
        """If a program gave the tensor other memory, as `p.data = values` does: its values go to the file, and the tensor is the
        mapping again."""
        if not self._is_detached():
            return
        if self._version_sent is not None:
            raise RuntimeError(f'{self.name} got other values after its gradient was sent: change it after step()')
        if self.tensor.shape != self._content.shape or self.tensor.dtype != self.dtype:
            raise RuntimeError(f'{self.name} of the offloaded model was {self.dtype} of shape {tuple(self._content.shape)}, and has got values that '
                               f'are {self.tensor.dtype} of shape {tuple(self.tensor.shape)}')
        if self.tensor.data_ptr() in Nothing.known:
            raise RuntimeError(f'{self.name} was given the memory of a weight after the gradient of that one was sent: change it after step()')
        with torch.no_grad():
            self._content.copy_(self.tensor.detach())
        self.tensor.data = self._content

    def _is_detached(self) -> bool:
        if self._address is None:
            return False
        if self.is_sealed:
            return not self._nothing.is_of(self.tensor)
        return self.tensor.data_ptr() != self._address or not self.tensor.is_contiguous()

    @property
    def _place(self) -> torch.Tensor:
        """The memory of the tensor, unless it is sealed."""
        return self._content

    @property
    def _nothing(self) -> Nothing:
        device = self._place.device
        if device not in self._nothings:
            self._nothings[device] = Nothing(self._place)
        return self._nothings[device]

    def _put(self) -> None:
        """The tensor has its memory, or none while it is sealed."""
        if self.is_sealed:
            self._nothing.give(self.tensor)
        else:
            self.tensor.data = self._place

    @property
    def is_mapped(self) -> bool:
        return self._address is not None

    def detach(self, keeps_values: bool) -> None:
        """The mapping ends. Without its values, which nothing else may refer to, the use of the tensor raises. OSError: they cannot be read, or have
        no room; the mapping stays."""
        if self._address is None:
            return
        keeps_values = keeps_values and (self.is_shared() or not self._is_detached())
        if keeps_values or self._is_detached():
            self.unseal()
        else:
            withdraw(self.tensor, self.root, self.name)
            keeps_values = self._memory.is_used(self.tensor, has_it=False)  # by another thread, which has begun to
        if keeps_values:
            with self._opened() as fd:
                detach(self._address, self.content_bytes, lambda memory: read_on(fd, memory, 0))
        else:
            discard(self._address, self.content_bytes)
        self._address, self._content, self._ended = None, None, True
        self._memory = Memory()

    # -- who uses the memory --

    def is_used(self) -> bool:
        """May anything but the parameter itself still need its values?"""
        return self._is_detached() or self._memory.is_used(self.tensor)

    def is_shared(self) -> bool:
        """May anything but the parameter itself refer to the mapping?"""
        return self._memory.is_used(self.tensor, has_it=not (self.is_sealed or self._is_detached()))

    @property
    def is_sealed(self) -> bool:
        return is_sealed(self.tensor)

    def seal(self) -> None:
        """The values may change from now on, until the next step begins."""
        if not self.is_sealed:
            seal(self.tensor, self.name)
            self._put()

    def unseal(self) -> None:
        """Memory that the program has given the tensor meanwhile stays."""
        if self._address is None or not self.is_sealed:
            return
        if not self._is_detached():
            give_memory(self.tensor, self._place)
        unseal(self.tensor)

    # -- as its optimizer uses it --

    def create(self) -> None:
        if self._fill:
            self._fill(self.tensor)
        os.mknod(self.path, stat.S_IFREG | 0o666)
        self.made = True
        self._set_attributes(self.path)
        os.truncate(self.path, self.content_bytes)
        with self._opened() as fd:
            self._write(fd)

    def read(self) -> None:
        """The mapping has the file's values already."""
        if self._address is None:
            super().read()
        else:
            self._take_mapping()

    def may_gather(self) -> bool:
        return False

    def restore(self, may_create: bool, fill: bool = False) -> bool:
        self.forget()
        self._close_kept()
        super().read()
        return False

    def changed(self, all_bytes: bool = False) -> bool:
        """Changes are in the file already. But after a gradient was sent the update may have replaced them."""
        return self._version_sent is not None and (self._version_sent != self.tensor._version or self._is_detached())

    def equals_file(self) -> bool:
        return True

    def begin_step(self) -> None:
        super().begin_step()
        self._version_sent = None
        self.unseal()

    def gradient_sent(self, early: bool) -> None:
        super().gradient_sent(early)
        self._version_sent = self.tensor._version

    def _write(self, fd: int) -> None:
        if self._address is None:
            write_all(fd, self.tensor)
            self._map(fd)
        else:
            self._flush(fd)

    def _read(self, fd: int) -> None:
        if self._address is None:
            self._map(fd)
        self._take_mapping()

    def _take_mapping(self) -> None:
        self.unseal()
        if self._is_detached():
            self.tensor.data = self._content
        self.tensor.detach().view(-1)[:0].zero_()  # values that autograd saved are void: the version counter shows it

    def _flush(self, fd: int) -> None:
        if self._is_passed:
            return
        try:
            if not close_copy(fd):  # sync_file_range() waits for pages alone, which older kernels copy for FUSE before they send them
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except OSError as e:
            raise OSError(e.errno, f'{os.strerror(e.errno or 0)}: changes of {self.name} could not be written') from e

    def _map(self, fd: int) -> None:
        if self._ended:
            raise RuntimeError(f'the optimizer of {self.name} was closed')
        size = os.fstat(fd).st_size
        if size != self.content_bytes:
            raise OSError(errno.EIO, f'the file of {self.name} has {size} bytes, and the tensor {self.content_bytes}')
        try:
            content = map_file(fd, self.content_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as e:
            raise OSError(e.errno, f'{e.strerror}: the file of {self.name} cannot be mapped') from e
        self._content = torch.frombuffer(content, dtype=self.dtype).view(self.tensor.shape)
        self.tensor.data = self._content
        self._memory = Memory()
        self._memory.add(self._content)
        self._address, self._is_passed = ctypes.addressof(content), is_passed(fd)
        if self._is_passed and not self.may_be_passed:
            raise ValueError(f'async_step needs ordinary files, and {self.name} is in the memory of the store: another program asked for it, or '
                             'it has user.hitrain.passthrough=on')
        if not self._is_passed:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # those that create() has written

    def _populate(self) -> None:
        for at in range(0, self.bytes, _PIECE):
            if _libc.madvise(self._address + at, min(_PIECE, self.bytes - at), _MADV_POPULATE_READ):
                self._raise(at, ctypes.get_errno())

    def _raise(self, at: int, number: int) -> None:
        """The kernel says only that a page cannot be read. A read says why."""
        if number == errno.EFAULT:
            with self._opened() as fd:
                for place in range(at, min(at + _PIECE, self.content_bytes), mmap.PAGESIZE):
                    os.pread(fd, 1, place)
            number = errno.EIO
        raise OSError(number, os.strerror(number))
