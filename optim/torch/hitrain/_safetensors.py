# SPDX-License-Identifier: Apache-2.0
"""The format of safetensors files, and blocks of bytes that one thread copies out of them, or out of files of a model.

https://huggingface.co/docs/safetensors describes it: eight bytes with the size of a header, the header (JSON: name, dtype, shape and place of
each tensor), then the tensors.
"""
import contextlib
import errno
import json
import mmap
import os
import struct
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from hitrain import _blocks
from hitrain._bytes import memory_of
from hitrain._words import bytes_of

PIECE_BYTES = 1 << 20           # of a source, converted at a time
PAGE = mmap.PAGESIZE
HEADER_BYTES_MAX = 100_000_000  # as the package safetensors has it
DIMENSIONS_MAX = 64
RESERVED = '__metadata__'       # a header's own entry
INDEX = 'model.safetensors.index.json'
BYTES = {'F64': 8, 'I64': 8, 'U64': 8, 'F32': 4, 'I32': 4, 'U32': 4, 'F16': 2, 'BF16': 2, 'I16': 2, 'U16': 2, 'I8': 1,
         'U8': 1, 'BOOL': 1}
FLOATS = {'F32': torch.float32, 'BF16': torch.bfloat16, 'F16': torch.float16, 'F64': torch.float64}


class Tensor(NamedTuple):
    """A tensor in a file. at: offset of its first byte there."""
    name: str
    path: str
    dtype: str  # in the words of safetensors
    shape: List[int]
    at: int
    size: int


def out_dtype(t: Tensor, dtype: Optional[torch.dtype]) -> str:
    if dtype is None or t.dtype not in FLOATS:
        return t.dtype
    return next(word for word, d in FLOATS.items() if d == dtype)


def out_size(t: Tensor, dtype: Optional[torch.dtype]) -> int:
    return t.size // BYTES[t.dtype] * BYTES[out_dtype(t, dtype)]


# -- files --

def files_of(path: str) -> List[str]:
    if not os.path.isdir(path):
        return [path]
    index, whole = os.path.join(path, INDEX), os.path.join(path, 'model.safetensors')
    if not os.path.exists(index):
        return [whole]
    if os.path.exists(whole):
        raise ValueError(f'{path} has two models, {INDEX} and model.safetensors: remove the one that is not wanted')
    with open(index, encoding='utf-8') as f:
        try:
            shards = set(json.load(f)['weight_map'].values())
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as e:
            raise ValueError(f'{index} is no index of shards: {type(e).__name__}') from e
    if not all(isinstance(s, str) and os.path.basename(s) == s for s in shards):
        raise ValueError(f'{index} names files of other folders')
    return [os.path.join(path, s) for s in sorted(shards)]


def read_header(path: str) -> List[Tensor]:
    """The tensors of a file, in the order of their places. ValueError names the defect of a file that is none."""
    with open(path, 'rb') as f:
        return tensors_of(f, path)[0]


def tensors_of(f: Any, path: str) -> Tuple[List[Tensor], Dict[str, str]]:
    """The same of an open file, with its metadata."""
    size = os.fstat(f.fileno()).st_size
    length = struct.unpack('<Q', f.read(8))[0] if size >= 8 else 0
    if not 0 < length <= min(HEADER_BYTES_MAX, size - 8):
        raise ValueError(f'{path} is no whole safetensors file: its header would have {length} of {size} bytes')
    try:
        header = json.loads(f.read(length))
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{path} is no safetensors file: its header is not JSON ({e})') from e
    if not isinstance(header, dict):
        raise ValueError(f'{path} is no safetensors file: its header is no object')
    said = header.pop(RESERVED, None)
    found = [_described(path, name, said, 8 + length, size) for name, said in header.items()]
    found.sort(key=lambda t: (t.at, t.size))
    end = 8 + length
    for t in found:
        if t.at != end:
            raise ValueError(f'{path}: {t.name} does not begin where the tensor before it ends')
        end += t.size
    if end != size:
        raise ValueError(f'{path} has {size} bytes, and its tensors end at {end}')
    return found, said if isinstance(said, dict) else {}


def _described(path: str, name: str, said: Any, begin: int, size: int) -> Tensor:
    try:
        dtype, shape, (first, end) = said['dtype'], said['shape'], said['data_offsets']
        elements = 1
        if type(first) is not int or type(end) is not int or not 0 <= first <= end:
            raise ValueError('the place is not that of bytes')
        if begin + end > size:
            raise ValueError(f'it ends after the file, which ends at {size}: the file is cut off')
        if not isinstance(shape, list) or len(shape) > DIMENSIONS_MAX:
            raise ValueError(f'the shape is not a list of at most {DIMENSIONS_MAX} numbers')
        for n in shape:
            if type(n) is not int or not 0 <= n <= size:  # so the product is no huge number
                raise ValueError('the shape is not that of bytes in this file')
            elements *= n
        if dtype in BYTES and end - first != elements * BYTES[dtype]:
            raise ValueError(f'{elements} elements of {dtype} do not take {end - first} bytes')
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f'{path}: the tensor {name} is not described well: {e}') from e
    return Tensor(name, path, dtype, shape, begin + first, end - first)


# -- blocks --

class Piece(NamedTuple):
    """Bytes of a tensor as the target has it."""
    tensor: Tensor
    dtype: Optional[torch.dtype]  # of floats in the target; None: as they are
    begin: int
    end: int


class Block(NamedTuple):
    """Bytes of a target from `at` on, which one thread copies."""
    at: int
    size: int
    pieces: List[Piece]


def cut(tensors: List[Tensor], dtype: Optional[torch.dtype], at: int) -> Iterator[Block]:
    """Tensors that lie one after the other in a target, from the page `at` on. All blocks begin at a page. Where that allows it, a large tensor
    begins a block: then reads of its file are as aligned as the writes."""
    pieces: List[Piece] = []
    size = 0
    for t in tensors:
        done, end = 0, out_size(t, dtype)
        if size >= PIECE_BYTES and size % PAGE == 0:
            yield Block(at, size, pieces)
            at, size, pieces = at + size, 0, []
        while done < end:
            n = min(end - done, _blocks.BLOCK_BYTES - size)
            pieces.append(Piece(t, dtype, done, done + n))
            done, size = done + n, size + n
            if size == _blocks.BLOCK_BYTES:
                yield Block(at, size, pieces)
                at, size, pieces = at + size, 0, []
    if pieces:
        yield Block(at, size, pieces)


def fill(buffer: memoryview, block: Block, sources: _blocks.Opened, ahead: bool = False) -> None:
    """ahead: the kernel reads the whole block at once. By itself it asks a device for a little at a time."""
    at = 0
    for p in block.pieces:
        with sources.file(p.tensor.path) as fd:
            if ahead:
                _ask_for(fd, p)
            _take(fd, p, buffer[at:at + p.end - p.begin])
        at += p.end - p.begin


def _ask_for(fd: int, p: Piece) -> None:
    narrow = BYTES[p.tensor.dtype]
    wide = bytes_of(p.dtype) if p.dtype else narrow
    first, end = p.begin // wide * narrow, -(-p.end // wide) * narrow
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, p.tensor.at + first, end - first, os.POSIX_FADV_WILLNEED)


def _take(fd: int, p: Piece, out: memoryview) -> None:
    t = p.tensor
    own = FLOATS.get(t.dtype)
    if p.dtype is None or own is None or p.dtype == own:
        read_bytes(fd, out, t.at + p.begin, t)
        return
    wide, narrow = bytes_of(p.dtype), bytes_of(own)
    step = PIECE_BYTES // max(wide, narrow)
    for first in range(p.begin // wide, -(-p.end // wide), step):  # elements, of which the outer ones may be cut
        values = torch.empty(min(step, t.size // narrow - first), dtype=own)
        read_bytes(fd, memory_of(values), t.at + first * narrow, t)
        converted = values.to(p.dtype)
        skipped = max(0, p.begin - first * wide)
        there = memory_of(converted)[skipped:p.end - first * wide]
        begin = first * wide + skipped - p.begin
        out[begin:begin + len(there)] = there


def read_bytes(fd: int, memory: memoryview, at: int, t: Tensor) -> None:
    done = 0
    while done < len(memory):
        n = os.preadv(fd, [memory[done:]], at + done)
        if n == 0:
            raise OSError(errno.EIO, f'the file ends within the tensor {t.name}', t.path)
        done += n
