# SPDX-License-Identifier: Apache-2.0
"""Words of the store for files and tensors, and descriptors that are opened and closed."""
import errno
import functools
import io
import os
import resource
import weakref
from typing import Any, Sequence, Tuple, Union

import torch

XATTR = 'user.hitrain.'
HIDDEN = '.hitrain'

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


def check_name(name: str) -> None:
    if not name or '/' in name or '\0' in name or '\n' in name or name in ('.', '..', HIDDEN) or len(os.fsencode(name)) > 255:
        raise ValueError(f'{name!r} cannot be the name of a file')


@functools.lru_cache(maxsize=None)
def bytes_of(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()


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
