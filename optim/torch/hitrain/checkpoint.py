# SPDX-License-Identifier: Apache-2.0
"""Models of a store as safetensors files, and back, a few megabytes at a time.

Both directions copy in blocks, several at a time (_blocks.py), in the same memory for each model. They need neither the
package safetensors nor the model's code. _safetensors.py has the format.
"""
import collections
import contextlib
import errno
import functools
import json
import logging
import mmap
import os
import re
import struct
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple, Union

import torch

from hitrain import _blocks, _making
from hitrain._packs import places_of
from hitrain._root import Root
from hitrain._safetensors import BYTES, FLOATS, INDEX, PAGE, RESERVED, Block, Tensor, cut, files_of, fill, out_dtype, out_size, read_header
from hitrain._words import FILE_DTYPES, HIDDEN, XATTR, attribute, check_name, close_quietly, read_shape, shape_word

__all__ = ['export_safetensors', 'import_safetensors']

Path = Union[str, 'os.PathLike[str]']

SHARD_BYTES = 5_000_000_000     # as in transformers
# What an export may write into a folder.
EXPORTED = re.compile(r'model(-\d{5}-of-\d{5})?\.safetensors|' + re.escape(INDEX))
# The store's word for a dtype, and that of safetensors.
DTYPES = {'f32': 'F32', 'bf16': 'BF16', 'f16': 'F16', 'f64': 'F64', 'i8': 'I8', 'u8': 'U8', 'i16': 'I16', 'u16': 'U16',
          'i32': 'I32', 'u32': 'U32', 'i64': 'I64', 'u64': 'U64', 'bool': 'BOOL'}


def export_safetensors(root: Path, path: Path, *, dtype: Optional[torch.dtype] = None,
                       rename: Callable[[str], str] = lambda name: name, shard_bytes: int = SHARD_BYTES) -> List[str]:
    """Writes the parameters of the model `root` as safetensors, and returns the names of the files.

    path         a name that ends in .safetensors: one file. Otherwise a folder, with the files that from_pretrained of
                 transformers expects: model.safetensors, or model-00001-of-0000N.safetensors and their index
    dtype        convert floats to it on the way; default: as in the store
    rename       the name in the file for a name in the store
    shard_bytes  a folder's files become at most so large, unless one tensor is larger

    No trainer may run on the model in the meantime: if it begins or ends a step, RuntimeError, and no file is written. A
    tensor that is changed outside steps is not noticed. The files have no optimizer state:
    `hitrainctl archive` writes a model with it.

    Files appear under their names when all are complete and durable. In a folder the files of an earlier export are
    removed after that. If giving names fails or is interrupted, a folder may have files of both exports; from the first
    new shard until all are there it has no index. Then import_safetensors() takes an earlier model.safetensors, or
    refuses the folder. Export again.
    """
    root, path = os.path.abspath(os.fspath(root)), os.path.abspath(os.fspath(path))
    if dtype is not None and dtype not in FLOATS.values():
        raise TypeError(f'floats cannot become {dtype}')
    steps = _steps(root)
    if steps[1]:
        raise RuntimeError(f'a step of {root} is open: export between steps')
    tensors = [t._replace(name=rename(t.name)) for t in _held(root)]
    if not tensors:
        raise ValueError(f'{root} holds no tensors')
    for t in tensors:
        if t.name == RESERVED or any('\ud800' <= c <= '\udfff' for c in t.name):  # the latter are bytes that are no text
            raise ValueError(f'no tensor of a safetensors file can be called {t.name!r}: pass rename= with another name for it')
    twice = [name for name, n in collections.Counter(t.name for t in tensors).items() if n > 1]
    if twice:
        raise ValueError(f'two tensors get the same name {twice[0]}: from rename, or from a copy of a file with members')
    shards = [tensors] if path.endswith('.safetensors') else _in_shards(tensors, dtype, shard_bytes)
    names = _shard_names(path, len(shards))
    os.makedirs(os.path.dirname(names[0]), exist_ok=True)
    # A mount with passthrough has the fastest way for cached reads.
    with _blocks.opened(os.O_RDONLY | (0 if Root(root).passes_through else os.O_DIRECT)) as sources, appearing() as appear:
        for name, shard in zip(names, shards):
            with appear(name) as fd:
                _write_file(fd, shard, dtype, sources)
        if len(shards) > 1:
            names.append(os.path.join(path, INDEX))
            with appear(names[-1]) as fd:
                _write(fd, json.dumps(_index(shards, names, dtype), indent=2).encode() + b'\n')
        if _steps(root) != steps:
            raise RuntimeError(f'{root} began or made a step while it was exported, so nothing was written: export between steps')
    if not path.endswith('.safetensors'):
        _remove_others(path, {os.path.basename(name) for name in names})
    return names


def import_safetensors(path: Path, root: Path, *, dtype: Optional[torch.dtype] = None,
                       rename: Callable[[str], str] = lambda name: name, rule: str = 'adamw') -> List[str]:
    """Makes a model of a safetensors file, or of a folder of such files, and returns the names of its parameters.

    root    a directory of the store, new or empty. Then make the optimizer of this model with resume=True: the
            tensors take their values from the store. Their optimizer state begins at zero
    dtype   convert the tensors to it on the way; default: as in the files
    rename  the name in the store for a name in a file
    rule    the optimizer's rule and settings, as in the attribute `optimizer`; the optimizer that resumes sets its own

    All headers are read and checked first. One commit publishes the model; after an error the root is as it was.
    """
    path, root = os.path.abspath(os.fspath(path)), os.path.abspath(os.fspath(root))
    tensors = [t._replace(name=rename(t.name)) for name in files_of(path) for t in read_header(name)]
    for t in tensors:
        check_name(t.name)
        if t.dtype not in FLOATS or (dtype is None and FLOATS[t.dtype] not in FILE_DTYPES):
            raise TypeError(f'{t.path}: {t.name} is {t.dtype}; parameters are F32, BF16 or F16. Pass dtype= to convert floats')
    if not tensors:
        raise ValueError(f'{path} has no tensors')
    names = [t.name for t in tensors]
    if len(set(names)) < len(names):
        raise ValueError(f'{path} has two tensors of the same name')
    if dtype is not None and dtype not in FILE_DTYPES:
        raise TypeError(f'files can be {" or ".join(FILE_DTYPES.values())}, not {dtype}')
    with _new_model(root, rule) as model:
        with _blocks.opened(os.O_RDONLY) as sources, _Making(root, dtype, sources) as making:
            _blocks.run(making.jobs(tensors))
        model.command('commit')
    logging.getLogger('hitrain').warning('%s: imported parameters have no optimizer state, so moments begin at zero', root)
    return names


# ------------------------------------------------------------------- export

def _steps(root: str) -> Tuple[int, ...]:
    """Numbers that change with each step, also one that is taken back: finished steps, the open one, and two that only
    grow while the store is mounted."""
    model = Root(root)
    return tuple(model.number(word) for word in ('step', 'step_open', 'grad_bytes', 'updated_elements'))


def _held(root: str) -> Iterator[Tensor]:
    """All files with a dtype below the root, by name."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f != HIDDEN)
        for file in sorted(files):
            path = os.path.join(folder, file)
            word = attribute(path, 'dtype')
            if not word:
                continue
            size, shape = os.stat(path).st_size, attribute(path, 'shape')
            kind = DTYPES[word]
            places = places_of(path)
            if places and size != BYTES[kind] * (places[-1].offset + places[-1].elements):
                raise ValueError(f'{path} has {size} bytes, and its members end elsewhere')
            for p in places:
                name = os.path.relpath(os.path.join(folder, p.name), root)
                yield Tensor(name, path, kind, list(p.shape), p.offset * BYTES[kind], p.elements * BYTES[kind])
            if places:
                continue
            yield Tensor(os.path.relpath(path, root), path, kind, list(read_shape(shape)) if shape else [size // BYTES[kind]], 0, size)


def _in_shards(tensors: List[Tensor], dtype: Optional[torch.dtype], most: int) -> List[List[Tensor]]:
    shards: List[List[Tensor]] = [[]]
    size = 0
    for t in tensors:
        if shards[-1] and size + out_size(t, dtype) > most:
            shards.append([])
            size = 0
        shards[-1].append(t)
        size += out_size(t, dtype)
    return shards


def _shard_names(path: str, count: int) -> List[str]:
    if path.endswith('.safetensors'):
        return [path]
    if count == 1:
        return [os.path.join(path, 'model.safetensors')]
    return [os.path.join(path, f'model-{i + 1:05d}-of-{count:05d}.safetensors') for i in range(count)]


def _index(shards: List[List[Tensor]], names: List[str], dtype: Optional[torch.dtype]) -> Dict[str, Any]:
    total = sum(out_size(t, dtype) for shard in shards for t in shard)
    where = {t.name: os.path.basename(name) for name, shard in zip(names, shards) for t in shard}
    return {'metadata': {'total_size': total}, 'weight_map': dict(sorted(where.items()))}


def _write_file(fd: int, tensors: List[Tensor], dtype: Optional[torch.dtype], sources: _blocks.Opened) -> None:
    header: Dict[str, Any] = {RESERVED: {'format': 'pt'}}
    at = 0
    for t in tensors:
        end = at + out_size(t, dtype)
        header[t.name] = {'dtype': out_dtype(t, dtype), 'shape': t.shape, 'data_offsets': [at, end]}
        at = end
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-(8 + len(text)) % PAGE)  # the format wants a multiple of eight, and O_DIRECT one of pages
    begin = 8 + len(text)
    target = _blocks.Target(fd, begin + at)
    _write_header(target, struct.pack('<Q', len(text)) + text)

    def written(block: Block) -> _blocks.Job:
        def job(buffer: memoryview) -> None:
            fill(buffer, block, sources)
            target.write(buffer, block.size, block.at)
        return job
    _blocks.run(written(block) for block in cut(tensors, dtype, begin))
    target.finish()


def _write_header(target: _blocks.Target, data: bytes) -> None:
    buffer = memoryview(mmap.mmap(-1, _blocks.BLOCK_BYTES))
    for at in range(0, len(data), len(buffer)):
        size = min(len(buffer), len(data) - at)
        buffer[:size] = data[at:at + size]
        target.write(buffer, size, at)


@contextlib.contextmanager
def appearing() -> Iterator[Callable[[str], Any]]:
    """A function that opens a file for writing. All get their names at the end; after an error none does."""
    made: List[Tuple[str, str]] = []

    @contextlib.contextmanager
    def appear(name: str) -> Iterator[int]:
        hidden = os.path.join(os.path.dirname(name), f'.{os.path.basename(name)}.{os.getpid()}')
        fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        made.append((hidden, name))
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
    try:
        yield appear
        _give_names(made)
    except BaseException:
        for hidden, _ in made:
            with contextlib.suppress(OSError):
                os.unlink(hidden)
        raise


def _give_names(made: List[Tuple[str, str]]) -> None:
    """An index stands for whole shards only: a former one goes before the first shard gets its name, and the new one comes last."""
    folder = os.path.dirname(made[-1][1])
    if len(made) > 1:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made[-1][1])
        _sync(folder)
    for hidden, name in made[:-1]:
        os.rename(hidden, name)
    _sync(folder)
    os.rename(*made[-1])
    _sync(folder)


def _remove_others(folder: str, kept: Set[str]) -> None:
    """The files of an earlier export, the index first: without it nobody looks for shards."""
    others = [name for name in os.listdir(folder) if EXPORTED.fullmatch(name) and name not in kept]
    for name in sorted(others, key=lambda name: (name != INDEX, name)):
        os.unlink(os.path.join(folder, name))
        if name == INDEX:
            _sync(folder)
    _sync(folder)


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ------------------------------------------------------------------- import


@contextlib.contextmanager
def _new_model(root: str, rule: str) -> Iterator[Root]:
    """A model root without parameters, which one process steers. After an error it is an empty directory again, with the
    attribute that it had, or it is gone if it was not there before."""
    model, made, former = Root(root), not os.path.isdir(root), None
    with model.explained('model root'):
        _making.take_back(model)
        held = not made and os.listdir(root)
    if held:
        model.close()
        raise FileExistsError(errno.EEXIST, 'the directory is not empty: import into a new one', root)
    try:
        with model.explained('model root'):
            _making.begin(root, _making.IMPORT)
            before = attribute(root, 'optimizer')
            os.setxattr(root, XATTR + 'optimizer', rule.encode())
            former = before
        model.claim()
        try:
            with model.explained('model root'):
                _making.goes_on(model, _making.IMPORT)
            yield model
        except BaseException:
            with contextlib.suppress(OSError):
                model.command('abort')
            raise
        finally:
            model.close()
    except BaseException:
        with contextlib.suppress(OSError):
            if former:
                os.setxattr(root, XATTR + 'optimizer', former.encode())
            elif former is not None:
                os.removexattr(root, XATTR + 'optimizer')
            os.removexattr(root, XATTR + _making.WORD)
            if made:
                os.rmdir(root)
        raise


class _Making:
    """Parameters of a new model, which threads fill. A file is closed after its last block."""

    def __init__(self, root: str, dtype: Optional[torch.dtype], sources: _blocks.Opened) -> None:
        self._root, self._dtype, self._sources = root, dtype, sources
        self._lock = threading.Lock()
        self._left: Dict[int, int] = {}  # of each open file: blocks that are not written

    def __enter__(self) -> '_Making':
        return self

    def __exit__(self, *exc: Any) -> None:
        """After an error some are open."""
        for fd in self._left:
            close_quietly(fd)

    def jobs(self, tensors: List[Tensor]) -> Iterator[_blocks.Job]:
        for t in tensors:
            blocks = list(cut([t], self._dtype, 0))
            if not blocks:  # it has no elements
                os.close(_make_parameter(self._root, t, self._dtype or FLOATS[t.dtype]))
            elif len(blocks) == 1:  # the thread makes the file, too, while others make theirs
                yield functools.partial(self._write_whole, t, blocks[0])
            else:
                fd = self._make(t, len(blocks))
                for block in blocks:
                    yield functools.partial(self._write, fd, block)

    def _make(self, t: Tensor, blocks: int) -> int:
        fd = _make_parameter(self._root, t, self._dtype or FLOATS[t.dtype])
        with self._lock:
            self._left[fd] = blocks
        return fd

    def _write_whole(self, t: Tensor, block: 'Block', buffer: memoryview) -> None:
        self._write(self._make(t, 1), block, buffer)

    def _write(self, fd: int, block: 'Block', buffer: memoryview) -> None:
        fill(buffer, block, self._sources, ahead=True)
        _blocks.write_at(fd, buffer[:block.size], block.at)
        with self._lock:
            self._left[fd] -= 1
            last = not self._left[fd]
            if last:
                del self._left[fd]
        if last:
            os.close(fd)


def _make_parameter(root: str, t: Tensor, dtype: torch.dtype) -> int:
    """An open file of its size. Writes into it bypass the kernel's cache, and none extends it: so they may run at the same time."""
    fd = os.open(os.path.join(root, t.name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o666)
    try:
        os.setxattr(fd, XATTR + 'dtype', FILE_DTYPES[dtype].encode())
        os.setxattr(fd, XATTR + 'shape', shape_word(t.shape).encode())
        os.ftruncate(fd, out_size(t, dtype))
    except BaseException:
        close_quietly(fd)
        raise
    return fd


def _write(fd: int, data: bytes) -> None:
    done, memory = 0, memoryview(data)
    while done < len(memory):
        done += os.write(fd, memory[done:])
