# SPDX-License-Identifier: Apache-2.0
"""Model roots: their words, and how tests make one."""
import os


def word(path, name, value=None):
    """An attribute of hitrain; with a value, sets it."""
    if value is None:
        return os.getxattr(path, 'user.hitrain.' + name).decode()
    os.setxattr(path, 'user.hitrain.' + name, value.encode())


def new_model(path, optimizer, dtype='f32', **content):
    """Makes a model root and its parameters (bytes by name), and commits nothing."""
    path.mkdir()
    word(path, 'dtype', dtype)
    for name, data in content.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    word(path, 'optimizer', optimizer)
    return path
