# SPDX-License-Identifier: Apache-2.0
"""Compressed blocks: they come back, shorter where their elements are alike, and hostile frames are refused."""
import array
import pathlib
import random
import sys

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / 'mount-helpers' / 'vault'), str(TOP / 'mount-helpers' / 'tools')]

import frames                   # noqa: E402
from objects import Damage      # noqa: E402

BLOCK = 1 << 20


def weights(dice, count=BLOCK, width=4):
    """Numbers around 0 as f32, or their upper halves: bf16."""
    data = array.array('f', (dice.gauss(0, 0.02) for _ in range(count // width + 1))).tobytes()
    if width == 2:
        halves = bytearray(len(data) // 2)
        halves[0::2], halves[1::2] = data[2::4], data[3::4]
        data = bytes(halves)
    return data[:count]


@pytest.mark.parametrize('width, most', [(4, 0.87), (2, 0.72)])
@pytest.mark.parametrize('count', [BLOCK, BLOCK - 3, 70_001])
def test_a_block_comes_back_and_is_shorter(width, most, count):
    block = weights(random.Random(1), count, width)
    frame = frames.encode(memoryview(block), width)
    assert len(frame) < most * count and frames.decode(memoryview(frame), BLOCK) == block
    assert frames.encode(block, width) == frame
    with pytest.raises(Damage):
        frames.decode(frame, count - 1)


def test_a_block_that_is_hardly_shorter_stays_as_it_is():
    dice = random.Random(2)
    assert frames.encode(dice.randbytes(BLOCK), 4) is None
    assert frames.encode(weights(dice, 4096), 4) is None      # no unit of 4 KiB is saved
    assert len(frames.encode(bytes(BLOCK), 4)) < 1000


def test_frames_of_random_and_changed_bytes_are_refused_or_have_their_length():
    dice = random.Random(3)
    good = frames.encode(weights(dice, 40_000), 4)
    for _ in range(3000):
        bad = bytearray(good) if dice.random() < 0.9 else bytearray(dice.randbytes(dice.randrange(100)))
        for _ in range(dice.randrange(1, 4)):
            if bad:
                bad[dice.randrange(min(len(bad), 80)) if dice.random() < 0.7 else dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
        if dice.random() < 0.3:
            del bad[dice.randrange(len(bad) + 1):]
        try:
            assert len(frames.decode(memoryview(bad), 40_000)) <= 40_000
        except Damage:
            pass
