# SPDX-License-Identifier: Apache-2.0
"""The making of a model, which may be killed anywhere: a half-made model is known as one, and is made anew.

    no directory --rename--> a directory with `making` --optimizer--> a root --files--> a root with its files --commit--> the model

The attribute `making` of the directory names its maker: an Optimizer, or an import of files. It says no more until the directory is a
root, which is durable at once. Then the root's lineage and its number of publications at that moment follow, durable with the first
commit. That commit is one more publication, so with it the attribute says nothing any more: the making ends with the commit, neither before
nor after. A mount gives each root another lineage, so a number of an earlier mount says nothing either.
"""
import contextlib
import errno
import os
from typing import List, Optional

from hitrain._root import COPIES, ELSEWHERE, NO_MODEL, Root
from hitrain._words import XATTR, attribute

WORD = 'making'
OPTIMIZER, IMPORT = 'optimizer', 'import'  # makers
OLDER = 'the mount is by a program that is older than this client, and knows no attribute `making`: unmount, and mount with the new program'


def names_in(path: str) -> Optional[List[str]]:
    """None: there is no such directory. os.path.isdir() would also say so of a mount that is dead."""
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _mark(path: str, text: str) -> None:
    try:
        os.setxattr(path, XATTR + WORD, text.encode())
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        raise RuntimeError(f'{path}: {OLDER}') from e


def begin(path: str, who: str) -> None:
    """Makes the directory, so that it is never without the attribute, or marks the empty one that is there."""
    if os.path.isdir(path):
        _mark(path, who)
        return
    folder, name = os.path.split(path)
    fresh = os.path.join(folder, '.' + os.fsdecode(os.fsencode(name)[:200]) + '.making')
    os.makedirs(fresh, exist_ok=True)
    try:
        _mark(fresh, who)
        os.rename(fresh, path)
    except (OSError, RuntimeError):  # as of another file system
        with contextlib.suppress(OSError):
            os.rmdir(fresh)
        raise


def goes_on(root: Root, who: str) -> None:
    """The directory is a root now, and this process has claimed it. From here to the first commit it is half-made."""
    _mark(root.path, f'{who} {_now(root.path)}')


def of(path: str) -> str:
    """The maker of this directory, while it has not ended. ''. It may have ended by now; take_back() makes sure."""
    who, _, when = attribute(path, WORD).partition(' ')
    return who if not when or when == _now(path) else ''


def take_back(root: Root) -> str:
    """Nothing of a half-made model stays but an empty directory. Returns its maker; '': this is none."""
    if not os.path.isdir(root.path) or not of(root.path):
        return ''
    if attribute(root.path, 'optimizer'):
        root.claim()
        if not of(root.path):  # its maker ended it before the claim
            return ''
        root.command('abort')
    return '' if os.listdir(root.path) else of(root.path)


def check_empty(root: Root, held: Optional[List[str]], text: str) -> None:
    """held: names in the directory; None: there is none. text: its attribute `optimizer`."""
    if held and text:
        raise FileExistsError(errno.EEXIST, f'is not empty; pass resume=True to continue the model that it holds, which is at step '
                              f'{root.number("step")}. Or make a model in another directory', root.path)
    if held:
        raise FileExistsError(errno.EEXIST, 'is not empty, and no model, as a copy by cp, rsync or tar is none: make one in an '
                              f'empty directory. {COPIES}', root.path)


def no_model(root: Root, held: Optional[List[str]]) -> OSError:
    """Why there is nothing to resume."""
    if held is None:
        return FileNotFoundError(errno.ENOENT, 'there is no model to resume: without resume=True one is made', root.path)
    if root.is_elsewhere:
        return OSError(errno.ENODATA, f'there is no model to resume, and {ELSEWHERE}', root.path)
    if not held:
        return FileNotFoundError(errno.ENOENT, 'there is no model to resume, the directory is empty: without resume=True one is made', root.path)
    return OSError(errno.ENODATA, NO_MODEL, root.path)


def _now(path: str) -> str:
    """'' of a directory that is no root."""
    lines = attribute(path, 'redo').splitlines()
    said = dict(line.split('=', 1) for line in lines)
    return f'{said["lineage"]} {said["publications"]}' if said else ''
