# SPDX-License-Identifier: Apache-2.0
"""Bytes of tensors: their checksums, and their way into files and out of them."""
import concurrent.futures
import ctypes
import errno
import hashlib
import mmap
import os
from typing import Any, Callable, Iterable, List, Optional

import torch

from hitrain import _ring
from hitrain._words import bytes_of, close_quietly, opened

THREADS = min(4, os.cpu_count() or 1)  # that transfer bytes at the same time
PIECE_BYTES = 4 << 20
BLOCK_BYTES = 1 << 20  # fits into a cache of a processor


# -- memory --

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


def is_direct(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Can this tensor's memory be read and written as the bytes of a file?"""
    return tensor.dtype == dtype and tensor.device.type == 'cpu' and tensor.is_contiguous()


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of a file: the tensor's memory, or a copy if its memory has another order."""
    return tensor.detach().reshape(-1)


# -- checksums --

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
    if not (is_direct(tensor, values.dtype) and is_direct(values, tensor.dtype)):
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


# -- transfers --

def write_all(fd: int, tensor: torch.Tensor, at: int = 0) -> None:
    _in_pieces(lambda memory, at: write_on(fd, memory, at), tensor, at)


def write_as(fd: int, flat: torch.Tensor, dtype: torch.dtype, at: int = 0, back: bool = False) -> None:
    """As elements of dtype; f32 to bf16: to nearest even. back: the tensor takes the values that the file has."""
    if is_direct(flat, dtype):
        write_all(fd, flat, at)
        return
    copies = _ring.Copies(flat)

    def write(own: torch.Tensor, buffer: torch.Tensor, at: int) -> None:
        copies.copy(buffer, own)
        write_on(fd, memory_of(buffer), at)
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


def write_on(fd: int, memory: memoryview, at: int) -> None:
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


def hand_over(path: str, tensors: List[torch.Tensor], at: int, drop: Callable[[], None]) -> None:
    """Writes a gradient: these tensors, one after the other. Closing hands the written bytes over, so an error drops
    them before."""
    file = opened(path, os.O_WRONLY)
    try:
        for t in tensors:
            write_on(file.fileno(), memory_of(t), at)
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
