# SPDX-License-Identifier: Apache-2.0
"""Manifests in pieces: all parts come back, and no piece can be exchanged, left out or cut."""
import pathlib
import random
import sys

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / 'mount-helpers' / 'vault'), str(TOP / 'mount-helpers' / 'tools')]

import heads        # noqa: E402
import manifest     # noqa: E402
import sums         # noqa: E402
from entry import DIRECTORY, FILE, Entry    # noqa: E402
from objects import Damage                  # noqa: E402
from places import BLOCK_BYTES, Place, pack_place, pick_places   # noqa: E402

UUID, STEP, EPOCH = b'v' * 16, 7, 3
BLOCKS = 5000


@pytest.fixture
def parts(monkeypatch):
    """(pieces, Summary, places) of a step whose pieces have some 40 KB each."""
    monkeypatch.setattr(manifest, 'PIECE_ROOM', 40_000)
    dice, records = random.Random(1), []
    w = manifest.Writer(lambda *record: records.append(record), STEP)
    w.entry(Entry(DIRECTORY, b''))
    w.entry(Entry(FILE, b'w', size=BLOCKS * BLOCK_BYTES))
    places = []
    for i in range(0, BLOCKS, 2):
        p = Place(i, 5, i // 31, 1 + i % 31 * 256, BLOCK_BYTES, 0, i, dice.randbytes(16))
        w.place(i, BLOCK_BYTES, p.raw_sum, pack_place(p))
        places.append(p)
    end = w.end(9)
    summary = heads.Summary(heads.FULL, 0, 1, 1, end.bytes, 0, end.digest, heads.NOTHING, 9, (0, 0), 1, b's' * 16, 'host', 'name', '')
    pieces, summary = manifest.assemble(UUID, STEP, EPOCH, summary, {(p.lease, p.n) for p in places}, records)
    return pieces, summary, places


def read(pieces, summary, pick=None):
    return list(manifest.Pieces(lambda i: memoryview(pieces[i]), UUID, STEP, EPOCH, summary).items(pick))


def test_all_pieces_come_back(parts):
    pieces, summary, places = parts
    items = read(pieces, summary)
    assert summary.pieces == len(pieces) > 5
    assert [i for i in items if isinstance(i, Place)] == places and items[-1].lineage == 9 and items[-1].digest == summary.digest


def test_picked_places_are_those_of_the_table_and_checked_as_all_are(parts):
    pieces, summary, places = parts
    needed = bytes(i % 7 == 0 for i in range(BLOCKS))
    items = read(pieces, summary, lambda payload: pick_places(payload, needed))
    assert [i for i in items if isinstance(i, Place)] == [p for p in places if p.index % 7 == 0]
    assert [i for i in items if not isinstance(i, Place)] == [i for i in read(pieces, summary) if not isinstance(i, Place)]
    with pytest.raises(Damage, match='beyond the end'):
        read(pieces, summary, lambda payload: pick_places(payload, needed[:-2]))
    with pytest.raises(Damage, match='beyond its segment'):
        read(pieces, summary, lambda payload: pack_place(places[0]._replace(unit=0)))


def test_no_change_of_a_piece_is_read(parts):
    pieces, summary, _ = parts
    dice = random.Random(2)
    changed = [pieces[:i] + [pieces[i + 1]] + pieces[i + 1:] for i in range(len(pieces) - 1)]
    for i, piece in enumerate(pieces):
        at = dice.randrange(len(piece))
        changed.append(pieces[:i] + [piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1:]] + pieces[i + 1:])
        changed.append(pieces[:i] + [piece[:at]] + pieces[i + 1:])
        changed.append(pieces[:i] + [piece + b'\0'] + pieces[i + 1:])
    for bad in changed:
        with pytest.raises(Damage):
            read(bad, summary)
    for other in summary._replace(rest=bytes(16)), summary._replace(pieces=len(pieces) - 1), summary._replace(name='x'):
        with pytest.raises(Damage):
            read(pieces, other)


def test_a_place_in_a_segment_that_is_not_named_is_refused(parts, monkeypatch):
    pieces, summary, places = parts
    monkeypatch.setattr(heads, 'parse_segments', lambda payload: [(5, 0, 1)])
    with pytest.raises(Damage, match='does not name'):
        read(pieces, summary)


@pytest.mark.parametrize('lengths', [range(1200), (4096, (1 << 20) - 1, 1 << 20)])
def test_both_sums_come_from_one_pass(lengths):
    for length in lengths:
        data = random.Random(length).randbytes(length)
        assert sums.sum64_of(sums.sum128(data), data) == sums.sum64(data), length
