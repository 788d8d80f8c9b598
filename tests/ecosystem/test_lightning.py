# SPDX-License-Identifier: Apache-2.0
"""Lightning trains with the store as with torch.optim."""
import re

import pytest

from page import PLAIN, numbers, page, shared_store  # first: it makes the client importable
import torch


def test_lightning(page, tmp_path):
    lightning = page('lightning')
    said = lightning.run('own')
    own, theirs = numbers('loss', said), numbers('loss', lightning.run('plain', PLAIN))
    assert len(own) == 32 and own[-1] < own[0] and own == pytest.approx(theirs, rel=1e-4)
    assert re.search('^step 16$', said, re.M)
    saved, other = (torch.load(tmp_path / run / 'run/last.ckpt', weights_only=True)['optimizer_states'][0]['state'] for run in ('own', 'plain'))
    assert len(saved) == len(other) == 4
    for i in saved:
        assert torch.allclose(saved[i]['exp_avg'], other[i]['exp_avg'], atol=1e-6) and saved[i]['step'] == other[i]['step'] == 16
