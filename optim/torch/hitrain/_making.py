# SPDX-License-Identifier: Apache-2.0
"""The making of a model, which may be killed anywhere: a half-made model is known as one, and is made anew.

    no directory --rename--> a directory with `making` --optimizer--> a root --files--> a root with its files --commit--> the model

The attribute `making` of the directory says that an Optimizer has begun. It is 'begun' until the directory is a root, which is
durable at once. Then it is the root's lineage and its number of publications at that moment, and durable with the first commit. That
commit is one more publication, so with it the attribute says nothing any more: the making ends with the commit, neither before
nor after. A mount gives each root another lineage, so a number of an earlier mount says nothing either.
"""
import contextlib
import os

from hitrain._files import XATTR, attribute
from hitrain._root import Root

WORD, BEGUN = 'making', 'begun'


def begin(path: str) -> None:
    """Makes the directory, so that it is never without the attribute, or marks the empty one that is there."""
    if os.path.isdir(path):
        os.setxattr(path, XATTR + WORD, BEGUN.encode())
        return
    folder, name = os.path.split(path)
    fresh = os.path.join(folder, '.' + os.fsdecode(os.fsencode(name)[:200]) + '.making')
    os.makedirs(fresh, exist_ok=True)
    try:
        os.setxattr(fresh, XATTR + WORD, BEGUN.encode())
        os.rename(fresh, path)
    except OSError:  # as of another file system
        with contextlib.suppress(OSError):
            os.rmdir(fresh)
        raise


def goes_on(root: Root) -> None:
    """The directory is a root now, and this process has claimed it. From here to the first commit it is half-made."""
    os.setxattr(root.path, XATTR + WORD, _now(root.path).encode())


def is_half(path: str) -> bool:
    """Was a making of this directory begun and not ended? It may have ended by now; take_back() makes sure."""
    said = attribute(path, WORD)
    return said == BEGUN or (said != '' and said == _now(path))


def take_back(root: Root) -> bool:
    """Nothing of a half-made model stays but an empty directory. False: this is none."""
    if not os.path.isdir(root.path) or not is_half(root.path):
        return False
    if attribute(root.path, 'optimizer'):
        root.claim()
        if not is_half(root.path):  # its maker ended it before the claim
            return False
        root.command('abort')
    return not os.listdir(root.path)


def _now(path: str) -> str:
    """'' of a directory that is no root."""
    lines = attribute(path, 'redo').splitlines()
    said = dict(line.split('=', 1) for line in lines)
    return f'{said["lineage"]} {said["publications"]}' if said else ''
