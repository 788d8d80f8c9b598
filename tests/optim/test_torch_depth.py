# SPDX-License-Identifier: Apache-2.0
"""How far ahead an offloaded model's parameters are loaded: the rule, and the loading thread that follows it."""
import math
import threading
import time
import types

import pytest

from trainer import SECONDS_MAX  # first: it makes the client importable
from torch import nn
from hitrain import _residency
from hitrain._depth import SLACK, bytes_ahead, places_ahead
from hitrain._residency import ABSENT, Residency, Unit

MUCH = 1e6


@pytest.mark.parametrize('computes, loads, wanted', [
    ([], [], [0]),
    ([1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1, 0]),  # it takes no time
    ([1, 1, 1, 1], [0.4, 0.4, 0.4, 0.4], [1, 1, 1, 1, 0]),  # twice as long would be in time
    ([1, 1, 1, 1], [math.inf] * 4, [4, 3, 2, 1, 0]),  # unknown
    ([1, 1, 1, 1], [MUCH] * 4, [4, 3, 2, 1, 0]),  # the device is never idle
    ([0, 0, 0], [0, 0, 0], [1, 1, 1, 0]),
    ([1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 2, 1, 0]),  # a large block at the end begins two blocks before it
    ([1, 1, 1, 1], [0, 0, 0, 1.4], [1, 3, 2, 1, 0]),  # or three
    ([10, 1, 1, 1], [0, 2, 2, 2], [1, 3, 2, 1, 0]),  # the long block has time for all
    ([3, 0.1, 0.1, 3, 3], [0, 0, 0, 1, 1], [1, 3, 2, 1, 1, 0]),  # short blocks before a load
])
def test_depth_follows_the_times(computes, loads, wanted):
    assert SLACK == 2
    assert places_ahead(computes, loads) == wanted


@pytest.mark.parametrize('read_rate, use_rate, wanted', [(100, 0, 8), (100, 50, 8), (100, 51, None), (1, 100, None)])
def test_saved_tensors_are_few_where_reads_are_fast(read_rate, use_rate, wanted):
    assert bytes_ahead(read_rate, use_rate, 4) == wanted


class File:
    """Loading it takes so many seconds of the clock."""
    bytes, name = 1, 'w'

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def load(self):
        self.clock[0] += self.seconds

    def release(self):
        pass


class Trainer:
    """Blocks that all compute for so long, and a clock that does nothing else."""

    def __init__(self, monkeypatch, seconds, loads, keep=100):
        self.clock, self.seconds = [0.0], seconds
        monkeypatch.setattr(_residency, 'time', types.SimpleNamespace(monotonic=lambda: self.clock[0]))
        self.units = [Unit(str(i), nn.Identity(), [File(self.clock, s)]) for i, s in enumerate(loads)]
        self.residency = Residency(keep, self.units, File.load, lambda f: False)

    def idle(self):
        """Returns when the loading thread has done what it was asked for."""
        end = time.monotonic() + SECONDS_MAX
        while self.residency._reading:
            assert time.monotonic() < end
            time.sleep(1e-4)

    def step(self):
        """How many of the later blocks are loaded while each computes."""
        self.residency.step_ended(lambda f: True)
        self.idle()
        found = []
        for i, unit in enumerate(self.units):
            self.residency.enter(unit, recomputed=False)
            self.idle()
            found.append(sum(u.state != ABSENT for u in self.units[i + 1:]))
            self.clock[0] += self.seconds
            self.residency.leave(unit)
        return found


@pytest.mark.parametrize('seconds, loads, keep, wanted, ahead', [
    (10, [1, 1, 1, 1, 1], 100, [1, 1, 1, 1, 0], 1),
    (10, [90, 90, 90, 90, 90], 100, [4, 3, 2, 1, 0], 5),
    (10, [90, 90, 90, 90, 90], 3, [2, 2, 2, 1, 0], 4),  # no more than there is room
    (10, [1, 1, 1, 1, 7], 100, [1, 1, 2, 1, 0], 2),
])
def test_blocks_are_loaded_as_far_ahead_as_they_need(monkeypatch, seconds, loads, keep, wanted, ahead):
    trainer = Trainer(monkeypatch, seconds, loads, keep)
    first = trainer.step()
    assert first == [min(n, keep - 1) for n in (4, 3, 2, 1, 0)]  # nothing was measured
    for _ in range(3):
        found = trainer.step()
    assert found == wanted and trainer.residency.figures()['ahead'] == ahead
    trainer.residency.close()


def test_depth_changes_with_the_times(monkeypatch):
    trainer = Trainer(monkeypatch, 10, [1] * 5)
    for _ in range(3):
        found = trainer.step()
    assert found == [1, 1, 1, 1, 0]
    for unit in trainer.units:
        unit.files[0].seconds = 50
    for _ in range(3):
        found = trainer.step()
    assert found == [4, 3, 2, 1, 0]
    trainer.residency.close()


def test_a_load_that_never_ends_does_not_hold_close(monkeypatch):
    monkeypatch.setattr(_residency, '_CLOSE_SECONDS_MAX', 0.01)
    begun, goes_on = threading.Event(), threading.Event()

    class Stuck(File):
        name = 'up.weight'

        def load(self):
            begun.set()
            assert goes_on.wait(SECONDS_MAX)
    units = [Unit('first', nn.Identity(), [File([0.0], 0)]), Unit('second', nn.Identity(), [Stuck([0.0], 0)])]
    residency = Residency(2, units, lambda f: f.load(), lambda f: False)
    residency.enter(units[0], recomputed=False)
    assert begun.wait(SECONDS_MAX)
    with pytest.warns(RuntimeWarning, match='has not ended within 0.01 seconds: it loads up.weight of second'):
        residency.close()
    goes_on.set()
    residency._thread.join(SECONDS_MAX)
    assert not residency._thread.is_alive()
