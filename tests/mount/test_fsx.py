# SPDX-License-Identifier: Apache-2.0
"""Two files under random operations always equal their copies in memory."""
import array
import os

import pytest

from conftest import MIB
from passthrough import passthrough_store
from programs import LONG, client

VARIANTS = (
    ('--size=262144',),
    ('--size=262144', '--direct=4096'),
    ('--size=300001', '--direct=1'),
    ('--size=262144', '--direct=1', '--all-direct'),
    ('--size=70000', '--direct=512', '--no-map'),
    ('--size=3000000', '--verify=1000'),  # tensors have chunks of 1 MiB
    ('--size=2500001', '--verify=1000', '--direct=1'),
)
OPS = (1_000_000 if LONG else 20_000) // len(VARIANTS)


@pytest.mark.parametrize('options', VARIANTS, ids=' '.join)
@pytest.mark.parametrize('dtype', [False, True], ids=['file', 'tensor'])
def test_random_operations(mnt, options, dtype):
    if dtype:
        os.setxattr(mnt, 'user.hitrain.dtype', b'u8')
    client('fsx', f'--ops={OPS // 2}', *options, mnt)


@pytest.mark.parametrize('end', [4 * MIB, 3 * MIB + 4000], ids=['whole', 'part'])
@pytest.mark.parametrize('kind', ['pinned', 'parameter'])
def test_random_operations_on_passthrough_files(passthrough_store, kind, end):
    """Mappings are of the daemon's own memory, sizes rise and never fall, and every descriptor sees all stores."""
    folder = passthrough_store.point / 'given'
    folder.mkdir()
    os.setxattr(folder, 'user.hitrain.dtype', b'f32')
    if kind == 'parameter':
        os.setxattr(folder, 'user.hitrain.optimizer', b'sgd lr=0.5')
    for name in 'AB':
        (folder / name).write_bytes(array.array('f', [1.0]).tobytes() * (end // 4))
        if kind == 'pinned':
            os.setxattr(folder / name, 'user.hitrain.pin', b'dram')
    client('fsx', '--keep', '--no-cut', f'--size={4 * MIB}', f'--ops={OPS}', '--verify=500', folder)
