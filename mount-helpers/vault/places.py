# SPDX-License-Identifier: Apache-2.0
"""Where blocks of a vault lie, and segments, which hold them (docs/vault-format.md). Pure functions and values."""
import collections
import struct

from objects import (HEADER_BYTES, LEASES, OBJECT_BYTES_MAX, SEGMENT, SEGMENTS_OF_LEASE, Damage, pack_header,
                     parse_header)
from sums import Sum128

BLOCK_BYTES = 1 << 20
UNIT_BYTES = 4096
RAW, PLANES = 0, 2              # codecs, as in include/hitrain/format.h
CODECS = RAW, PLANES           # that this program reads
PLACE_BYTES = 40

_PLACE = struct.Struct('<IIHHIQ16s')
_OWNER = struct.Struct('<64sQQI')
_ROW = struct.Struct('<HHBBHIIQIIQ16sQ')
_TRAILER = struct.Struct('<II16s32s8s')
TRAILER_MAGIC = b'HTsegend'

FILE_BLOCK, STATE_BLOCK, GRADIENT, GRADIENT_ENTRIES, UPDATE, UPDATE_ENTRIES = range(6)

# index: of the block. sum: XXH3-64 of the stored bytes; raw_sum: XXH3-128 of the block.
Place = collections.namedtuple('Place', 'index lease n unit stored codec sum raw_sum')
# kind, index, entry and state: whose block it is. unit and units: where it lies.
Row = collections.namedtuple('Row', 'unit units codec kind stored raw index entry state sum raw_sum')
Owner = collections.namedtuple('Owner', 'job step epoch rank')


def units_of(count):
    return -(-count // UNIT_BYTES)


# ---- places ----

def pack_place(p):
    return _PLACE.pack(p.index, p.lease, p.n, p.unit, p.stored | p.codec << 24, p.sum, p.raw_sum)


def check_place(p):
    """p lies in a segment, and can be read."""
    if p.lease >= LEASES or p.n >= SEGMENTS_OF_LEASE:
        raise Damage(f'block {p.index} lies in an impossible segment')
    if not p.unit or not 0 < p.stored <= BLOCK_BYTES or (p.unit + units_of(p.stored)) * UNIT_BYTES > OBJECT_BYTES_MAX:
        raise Damage(f'block {p.index} lies beyond its segment')
    if p.codec not in CODECS:
        raise Damage(f'block {p.index} has a codec that this program does not know: {p.codec}')


def parse_places(data):
    if not len(data) or len(data) % PLACE_BYTES:
        raise Damage('a record of places has an impossible size')
    for index, lease, n, unit, stored, total, raw_sum in _PLACE.iter_unpack(data):
        p = Place(index, lease, n, unit, stored & 0xffffff, stored >> 24, total, raw_sum)
        check_place(p)
        yield p


def pick_places(data, is_needed):
    """The packed places of blocks for which the table of bytes is_needed has a 1, as bytes. Those of one record."""
    if len(data) % PLACE_BYTES:
        raise Damage('a record of places has an impossible size')
    try:
        indices = memoryview(data).cast('I')[::PLACE_BYTES // 4].tolist()
        return b''.join([data[at * PLACE_BYTES:(at + 1) * PLACE_BYTES] for at, i in enumerate(indices) if is_needed[i]])
    except IndexError:
        raise Damage('a block lies beyond the end') from None


# ---- segments ----

class Segment:
    """A segment that is being filled with buffers, which stay the caller's and must not change. One thread."""

    def __init__(self):
        self.rows, self.blocks = [], []
        self.unit = 1           # the next one that is free

    def has_room(self, stored):
        table = (len(self.rows) + 1) * _ROW.size + _TRAILER.size
        return (self.unit + units_of(stored)) * UNIT_BYTES + table <= OBJECT_BYTES_MAX

    def add(self, data, raw, codec, owner, sums):
        """The unit where it lies. owner: kind, index, entry and state; sums: of the stored bytes, and of the block."""
        row = Row(self.unit, units_of(len(data)), codec, owner[0], len(data), raw, *owner[1:], *sums)
        self.rows.append(row)
        self.blocks.append(data)
        self.unit += row.units
        return row.unit

    def bytes(self):
        return self.unit * UNIT_BYTES + len(self.rows) * _ROW.size + _TRAILER.size

    def parts(self, uuid, lease, n, owner):
        """The buffers of the object, one after the other."""
        head = pack_header(SEGMENT, uuid, lease, n)
        head += _OWNER.pack(owner.job.encode(), owner.step, owner.epoch, owner.rank)
        head = head.ljust(UNIT_BYTES, b'\0')
        table = b''.join(_ROW.pack(r.unit, r.units, r.codec, r.kind, 0, r.stored, r.raw, r.index, r.entry, r.state, r.sum,
                                   r.raw_sum, 0) for r in self.rows)
        yield head
        for row, data in zip(self.rows, self.blocks):
            yield data
            if row.stored % UNIT_BYTES:
                yield bytes(UNIT_BYTES - row.stored % UNIT_BYTES)
        yield table + _TRAILER.pack(len(self.rows), self.unit * UNIT_BYTES, table_sum(head, table), bytes(32),
                                    TRAILER_MAGIC)


def table_sum(head, table):
    total = Sum128()
    total.add(head)
    total.add(table)
    return total.get()


def parse_table(head, end, size, uuid, lease, n):
    """(Owner, [Row]) of a segment of so many bytes. head: its first 4096 bytes; end(offset): its bytes from there on."""
    found = parse_header(head, SEGMENT, uuid)
    if len(head) < UNIT_BYTES or not UNIT_BYTES + _TRAILER.size <= size <= OBJECT_BYTES_MAX:
        raise Damage('it is cut')
    if (found.first, found.second) != (lease, n):
        raise Damage(f'it is segment {found.second:04x} of lease {found.first:08x} in the place of another one')
    job, step, epoch, rank = _OWNER.unpack_from(head, HEADER_BYTES)
    trailer = end(size - _TRAILER.size)
    count, at, total, zeros, magic = _TRAILER.unpack(trailer)
    if magic != TRAILER_MAGIC or any(zeros) or at + count * _ROW.size + _TRAILER.size != size or at % UNIT_BYTES:
        raise Damage('it is cut: its last bytes are no end of a segment')
    table = end(at)[:count * _ROW.size]
    if table_sum(head, table) != total:
        raise Damage('its table is damaged')
    rows = [parse_row(row, at) for row in _ROW.iter_unpack(table)]
    return Owner(job.rstrip(b'\0').decode(errors='replace'), step, epoch, rank), rows


def parse_row(row, end):
    unit, units, codec, kind, _, stored, raw, index, entry, state, total, raw_sum, _ = row
    if not unit or units != units_of(stored) or not stored or (unit + units) * UNIT_BYTES > end:
        raise Damage('its table names a block that lies beyond it')
    return Row(unit, units, codec, kind, stored, raw, index, entry, state, total, raw_sum)
