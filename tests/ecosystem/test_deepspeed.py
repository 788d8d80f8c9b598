# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed with its swap files on the mount, and with the store's optimizer."""
import os
import pathlib
import re
import subprocess

import pytest

from page import PLAIN, TOP, Page, numbers, page, shared_store  # first: it makes the client importable

NVME = re.compile(r"'device': 'nvme', 'nvme_path': '/mnt/hitrain/swap', 'buffer_count': 4,")
SHELL = re.search(r'^```sh\n(.*?)^```', (TOP / 'docs/frameworks/deepspeed.md').read_text(), re.M | re.S).group(1)


def test_the_stores_optimizer(page):
    deepspeed = page('deepspeed', 1, 2)
    said = deepspeed.run('own')
    own, theirs = numbers('loss', said), numbers('loss', deepspeed.run('plain', PLAIN))
    assert len(own) == 16 and own[-1] < own[0] and own == pytest.approx(theirs, rel=1e-4)
    assert re.search('^step 8$', said, re.M)


@pytest.mark.skipif(not pathlib.Path(os.environ.get('TORCH_EXTENSIONS_DIR', ''), 'complete').exists(),
                    reason='its code for NVMe is not compiled: the next make check-ecosystem goes on with it')
def test_swap_files(page):
    """Unmodified, with the same losses as with its state in memory. Its files take what the page sets on their directory."""
    swapping = page('deepspeed', 0, 2)
    (swapping.mountpoint / 'nvme').mkdir()
    subprocess.run(['sh', '-e', '-c', SHELL.replace('/mnt/hitrain', str(swapping.mountpoint / 'nvme'))], check=True)
    in_memory = Page.of_script(NVME.sub("'device': 'cpu',", swapping.script), swapping.mountpoint, swapping.folder)
    assert in_memory.script != swapping.script
    ours, theirs = (numbers('loss', p.run(run)) for p, run in ((swapping, 'nvme'), (in_memory, 'cpu')))
    assert len(ours) == 8 and ours == theirs
    files = sorted((swapping.mountpoint / 'nvme/swap/zero_stage_3/optimizer').rglob('*.swp'))
    assert {'exp_avg-0_0.tensor.swp', 'exp_avg_sq-0_0.tensor.swp'} <= {f.name for f in files} and all(f.stat().st_size for f in files)
    for path in (files[0].parent, *files):
        assert os.getxattr(path, 'user.hitrain.class') == b'scratch' and os.getxattr(path, 'user.hitrain.dtype') == b'u8'


def test_defaults_that_the_page_names():
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime import constants
    import inspect
    signature = inspect.signature(DeepSpeedCPUAdam.__init__).parameters
    assert constants.GRADIENT_CLIPPING_DEFAULT == 1.0
    assert signature['weight_decay'].default == 0 and signature['adamw_mode'].default is True
