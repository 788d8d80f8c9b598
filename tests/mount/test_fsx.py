# SPDX-License-Identifier: Apache-2.0
"""Two files under random operations hold at every moment what a copy in memory says."""
import os

import pytest

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
