# SPDX-License-Identifier: Apache-2.0
"""Processes that share a model, under PyTorch's own wrappers."""
import re

import pytest

from page import PLAIN, numbers, page, shared_store  # first: it makes the client importable

STEPS = 20


def test_ddp(page):
    ddp = page('ddp')
    said = ddp.run('own', processes=2)
    own, theirs = numbers('loss', said), numbers('loss', ddp.run('plain', PLAIN, processes=2))
    assert len(own) == STEPS and own[-1] < own[0] and own == pytest.approx(theirs, rel=1e-4)
    assert re.search(f'^step {STEPS}$', said, re.M)


@pytest.mark.parametrize('processes', [1, 2])
def test_distributed_checkpoints(page, processes):
    checkpoints = page('checkpoints')
    said = checkpoints.run('own', processes=processes)
    own, theirs = numbers('loss', said), numbers('loss', checkpoints.run('plain', PLAIN, processes=processes))
    assert len(own) == 3 and own[1] == own[2] < own[0] and own == pytest.approx(theirs, rel=1e-4)
