# SPDX-License-Identifier: Apache-2.0
"""Processes that share a model, under PyTorch's own wrappers."""
import pathlib
import re

import pytest

from page import PLAIN, Page, numbers, page, shared_store  # first: it makes the client importable

STEPS = 20


@pytest.mark.parametrize('processes', [2, 4])
def test_ddp(page, processes):
    ddp = page('ddp')
    said = ddp.run('own', processes=processes)
    own, theirs = numbers('loss', said), numbers('loss', ddp.run('plain', PLAIN, processes=processes))
    assert len(own) == STEPS and own[-1] < own[0] and own == pytest.approx(theirs, rel=1e-4)
    assert re.search(f'^step {STEPS}$', said, re.M)


@pytest.mark.parametrize('processes', [1, 2])
def test_distributed_checkpoints(page, processes):
    checkpoints = page('checkpoints')
    said = checkpoints.run('own', processes=processes)
    own, theirs = numbers('loss', said), numbers('loss', checkpoints.run('plain', PLAIN, processes=processes))
    assert len(own) == 3 and own[1] == own[2] < own[0] and own == pytest.approx(theirs, rel=1e-4)


def test_fsdp(page):
    """With the numbers of torch.optim; back to a checkpoint with two and with four processes."""
    fsdp = page('fsdp')
    said = fsdp.run('own', processes=2)
    own, theirs = numbers('loss', said), numbers('loss', fsdp.run('plain', PLAIN, processes=2))
    assert len(own) == 10 and own[-1] < own[0] and own == pytest.approx(theirs, rel=1e-4)
    assert numbers('loss', fsdp.run('own', processes=2)) == own[5:]
    # Four parts make another norm to clip by, in its last bit.
    assert numbers('loss', fsdp.run('own', processes=4)) == pytest.approx(own[5:], rel=1e-5)


PARTS = (pathlib.Path(__file__).parent / 'fsdp_parts.py').read_text()


def test_parts_of_dtensors(shared_store, tmp_path):
    """Two and four processes, and pairs of replicas: files, state, groups that come later, and what is refused."""
    script = Page.of_script(PARTS, shared_store.mountpoint, tmp_path)
    said = [script.run(f'parts{n}', processes=n) for n in (2, 4)]
    assert [len(re.findall('all is well', s)) for s in said] == [2, 4]
