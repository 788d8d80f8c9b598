# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed with the store's optimizer, and its folders for swap files on the mount."""
import os
import re
import subprocess

import pytest

from page import PLAIN, TOP, numbers, page, shared_store  # first: it makes the client importable

SHELL = re.search(r'^```sh\n(.*?)^```', (TOP / 'docs/frameworks/deepspeed.md').read_text(), re.M | re.S).group(1)


def test_the_stores_optimizer(page):
    deepspeed = page('deepspeed')
    said = deepspeed.run('own')
    own, theirs = numbers('loss', said), numbers('loss', deepspeed.run('plain', PLAIN))
    assert len(own) == 16 and own[-1] < own[0] and own == pytest.approx(theirs, rel=1e-4)
    assert re.search('^step 8$', said, re.M)


def test_folders_for_swap_files(shared_store):
    """They take what the page sets, as DeepSpeed names them."""
    subprocess.run(['sh', '-e', '-c', SHELL.replace('/mnt/hitrain', str(shared_store.mountpoint))], check=True)
    folder = shared_store.mountpoint / 'swap/zero_stage_3/optimizer/rank0'
    folder.mkdir(parents=True)
    (folder / '0.tensor.swp').write_bytes(bytes(1 << 20))
    for path in (folder, folder / '0.tensor.swp'):
        assert os.getxattr(path, 'user.hitrain.class') == b'scratch' and os.getxattr(path, 'user.hitrain.dtype') == b'u8'


def test_defaults_that_the_page_names():
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime import constants
    import inspect
    signature = inspect.signature(DeepSpeedCPUAdam.__init__).parameters
    assert constants.GRADIENT_CLIPPING_DEFAULT == 1.0
    assert signature['weight_decay'].default == 0 and signature['adamw_mode'].default is True
