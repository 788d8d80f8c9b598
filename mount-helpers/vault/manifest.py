# SPDX-License-Identifier: Apache-2.0
"""A step outside a store: the records of its names, attributes, content and optimizer state (docs/vault-format.md).

    summary, [segments | base], entry of the root, { entry, its blocks, { state, its blocks } }, end mark

A block is its bytes (in a pipe), or the place in a segment (in a vault). In a pipe runs of blocks may be named that the
base, an earlier step of the receiver, has, too. A step has one order of records, so its digest needs no list of names.
"""
import collections
import struct

from entry import (FILE, check_entry, check_order, check_path, check_state, is_in_digest, os_text, pack_entry,
                   parse_entry)
import heads
from objects import (END, HEADER_BYTES, MANIFEST, NUMBER_MAX, OBJECT_BYTES_MAX, RECORD_BYTES, Bytes, Damage, Failure,
                     RecordReader, pack_header, pack_record_head, parse_header)
from places import BLOCK_BYTES, RAW, Place, parse_places
from sums import Sum128, sum128

ENTRY, STATE, BLOCK = 1, 2, 3
BASE, SAME, PLACES = 5, 6, 8
PIECES_MAX = 1 << 8         # a reader has all in memory: 8 GiB, for some 200 TB of content
PIECE_ROOM = OBJECT_BYTES_MAX - 65536    # for the header, the summary and an end mark
SEGMENT_BITS = 15

State = collections.namedtuple('State', 'name size')
Block = collections.namedtuple('Block', 'index data')
Same = collections.namedtuple('Same', 'index count path')   # path: of the file of the base; b'': the same
Base = collections.namedtuple('Base', 'step digest')
End = collections.namedtuple('End', 'entries bytes digest lineage')

_END = struct.Struct('<QQ16sQ')
_BASE = struct.Struct('<Q16s')
_U64 = struct.Struct('<Q')


# ---- digest ----

def _text(data):
    return _U64.pack(len(data)) + data


class Digest:
    """The digest of a step: tiering/base/step_digest.h. One thread."""

    def __init__(self, step):
        self.sum = Sum128()
        self.sum.add(b'hitrain step 1' + _U64.pack(step))

    def base(self, base):
        self.sum.add(struct.pack('<QQ', BASE, base.step) + base.digest)

    def entry(self, e):
        parts = [struct.pack('<QQQ', ENTRY, e.kind, e.size), _text(e.path), _text(e.target)]
        parts += [_text(name) + _text(value) for name, value in e.attributes if is_in_digest(name)]
        self.sum.add(b''.join(parts) + _U64.pack(0))

    def state(self, s):
        self.sum.add(struct.pack('<QQ', STATE, s.size) + _text(s.name))

    def block(self, index, raw_sum):
        self.sum.add(struct.pack('<QQ', BLOCK, index) + raw_sum)

    def same(self, s):
        self.sum.add(struct.pack('<QQQ', SAME, s.index, s.count) + _text(s.path))

    def get(self):
        return self.sum.get()


# ---- pieces ----

def _records(records, first):
    """Their bytes; the first one has this number."""
    for number, (kind, payload, place, payload_sum) in enumerate(records, first):
        yield pack_record_head(kind, number, place, payload_sum or sum128(payload), len(payload))
        yield payload


def _cut(records, room):
    """Lists of records that fit into pieces, the first of which has so much room. The last record is the end mark."""
    pieces = [[]]
    for record in records:
        count = RECORD_BYTES + len(record[1])
        if count > room:
            pieces.append([])
            room = PIECE_ROOM
        pieces[-1].append(record)
        room -= count
    return pieces


def assemble(uuid, step, epoch, summary, segments, records):
    """The pieces of a manifest in a vault, and its Summary. summary: all but pieces and rest. segments: (lease, n) of all
    that it uses. records: (type, payload, place, sum or None) from the root's entry to the end mark.
    """
    lists = [(heads.SEGMENTS, payload, 0, None) for payload in heads.pack_segments(segments)]
    size = sum(RECORD_BYTES + len(payload) for _, payload, _, _ in lists)
    if size > PIECE_ROOM:
        raise Failure('the step has too many segments for one manifest')
    cut = _cut(records, PIECE_ROOM - size)
    if len(cut) > PIECES_MAX:
        raise Failure('the step has too many blocks for one manifest')
    head = pack_header(MANIFEST, uuid, step, epoch)
    bodies = []
    for i, piece in enumerate(cut):
        if i + 1 < len(cut):
            piece.append((END, b'', 0, None))   # more follows
        bodies.append(b''.join(_records(lists + piece, 1) if i == 0 else _records(piece, 0)))
    total = Sum128()
    for i, body in enumerate(bodies):
        total.add(head + body if i else body)
    summary = summary._replace(pieces=len(cut), rest=total.get())
    first = b''.join(_records([(heads.SUMMARY, heads.pack_summary(summary), 0, None)], 0))
    return [head + first + bodies[0]] + [head + body for body in bodies[1:]], summary


class Pieces:
    """The records of a manifest in a vault behind its summary and its list of segments. get(piece): the bytes of one.
    All of it is compared with the summary before a record is given out.
    """

    def __init__(self, get, uuid, step, epoch, summary):
        if not 0 < summary.pieces <= PIECES_MAX:
            raise Damage(f'it has {summary.pieces} pieces')
        self.numbers = uuid, step, epoch
        self.data = [get(i) for i in range(summary.pieces)]
        self.readers, total = [], Sum128()
        for i, data in enumerate(self.data):
            head = parse_header(data, MANIFEST, uuid)
            if (head.first, head.second) != (step, epoch):
                raise Damage('it is of another step')
            source = Bytes(data, HEADER_BYTES)
            reader = RecordReader(source)
            if i == 0 and bytes(reader.next().payload) != heads.pack_summary(summary):
                raise Damage('it is not the one that the step names')
            total.add(data[source.at:] if i == 0 else data)
            self.readers.append((reader, source))
        if total.get() != summary.rest:
            raise Damage('its checksum is not the one that the step names')
        self.segments = set()

    def records(self):
        for i, (reader, source) in enumerate(self.readers):
            more = True
            while more:
                record = reader.next()
                if record.type == heads.SEGMENTS and i == 0:
                    self.take_segments(record.payload)
                    continue
                more = record.type != END
                if more or i + 1 == len(self.readers):
                    yield record
                elif len(record.payload):
                    raise Damage('it ends before its last piece')
            if source.left():
                raise Damage('there are bytes after its end mark')

    def take_segments(self, payload):
        for lease, n, count in heads.parse_segments(payload):
            self.segments.update(lease << SEGMENT_BITS | i for i in range(n, n + count))

    def picked(self, pick):
        for record in self.records():
            if record.type == PLACES:
                record = record._replace(payload=pick(record.payload))
            if record.type != PLACES or len(record.payload):
                yield record

    def items(self, pick=None):
        """The parts of the step: of Reader. pick(payload): those of packed places that the caller needs, as bytes. Others are not
        looked at, so the digest is not compared; the checksum of all was.
        """
        records = self.picked(pick) if pick else self.records()
        for item in Reader(records, self.numbers[1], in_pipe=False, whole=not pick):
            if isinstance(item, Place) and item.lease << SEGMENT_BITS | item.n not in self.segments:
                raise Damage(f'block {item.index} lies in a segment that it does not name')
            yield item


# ---- writer ----

class Writer:
    """Makes the records of one step. put(type, payload, place, sum of the payload or None). Content that is no block of
    a step in the right order is a ValueError. One thread.
    """

    def __init__(self, put, step, base=None):
        self.put = put
        self.digest = Digest(step)
        self.last = None
        self.entries = self.bytes = 0
        if base:
            self.digest.base(base)
            put(BASE, _BASE.pack(*base), 0, None)

    def entry(self, e):
        try:
            check_entry(e)
            if self.last:
                check_order(self.last, e.path)
        except Damage as why:
            raise ValueError(str(why)) from None
        self.digest.entry(e)
        self.put(ENTRY, pack_entry(e), 0, None)
        self.last = e
        self.entries += 1

    def state(self, name, size):
        s = State(name, size)
        check_state(name, size)
        self.digest.state(s)
        self.put(STATE, _U64.pack(size) + name, 0, None)

    def _count(self, index, length, raw_sum):
        self.digest.block(index, raw_sum)
        self.bytes += length

    def block(self, index, data, raw_sum):
        self._count(index, len(data), raw_sum)
        self.put(BLOCK, data, index, raw_sum)

    def place(self, index, length, raw_sum, place):
        """place: the caller's, which put() gets."""
        self._count(index, length, raw_sum)
        self.put(PLACES, place, 0, None)

    def same(self, s):
        self.digest.same(s)
        self.put(SAME, _U64.pack(s.count) + s.path, s.index, None)

    def end(self, lineage=0):
        digest = self.digest.get()
        self.put(END, _END.pack(self.entries, self.bytes, digest, lineage), 0, None)
        return End(self.entries, self.bytes, digest, lineage)


# ---- reader ----

class Reader:
    """Iterates over the parts of a step: Entry, State, Block, Place, Same, and End as the last one. What it yields has been
    checked: bounds, order, that paths stay below the root, and at the end the digest. records: an iterator of Record that
    ends with or before the end mark. in_pipe: blocks and runs, else places. whole: all places are there. One thread.
    """

    def __init__(self, records, step, in_pipe, whole=True):
        self.records = iter(records)
        self.in_pipe, self.whole = in_pipe, whole
        self.digest = Digest(step)
        self.last = None
        self.state = b''
        self.entries = self.bytes = 0
        self.size = self.next_block = 0
        self.has_base = False

    def __iter__(self):
        for record in self.records:
            yield from self.take(record)
            if record.type == END:
                return
        raise Damage('it is cut: its end mark is missing')

    def read_base(self):
        """The first record of a step that builds on another one: Base."""
        record = next(self.records)
        if record.type != BASE or len(record.payload) != _BASE.size or record.place:
            raise Damage('it does not say what it builds on')
        base = Base(*_BASE.unpack(record.payload))
        if base.step > NUMBER_MAX:
            raise Damage('it does not say what it builds on')
        self.digest.base(base)
        self.has_base = True
        return base

    def take(self, r):
        if r.place and r.type not in (BLOCK, SAME):
            raise Damage('a record has a place and is no block')
        if self.last is None and r.type != ENTRY:
            raise Damage('the root is missing')
        if r.type == ENTRY:
            yield self.take_entry(r.payload)
        elif r.type == STATE:
            yield self.take_state(bytes(r.payload))
        elif r.type == END:
            yield self.take_end(r.payload)
        elif r.type == BLOCK and self.in_pipe:
            self.take_block(r.place, len(r.payload), r.sum)
            yield Block(r.place, r.payload)
        elif r.type == SAME and self.has_base:
            yield self.take_same(r.place, bytes(r.payload))
        elif r.type == PLACES and not self.in_pipe:
            for place in parse_places(r.payload):
                self.take_place(place)
                yield place
        else:
            raise Damage(f'a record has a type that does not belong here: {r.type}')

    def take_entry(self, data):
        e = parse_entry(data)
        if (self.last is None) != (e.path == b''):
            raise Damage('the root is not the first entry, or comes twice')
        if self.last is not None:
            try:
                check_order(self.last, e.path)
            except Damage as why:
                raise Damage(f'the entry {os_text(e.path)} is refused: {why}') from None
        self.last, self.state = e, b''
        self.size, self.next_block = e.size, 0
        self.entries += 1
        self.digest.entry(e)
        return e

    def take_state(self, data):
        if self.last.kind != FILE or len(data) <= _U64.size:
            raise Damage('there is state of no file, or without a proper name')
        s = State(data[_U64.size:], _U64.unpack_from(data)[0])
        check_state(*s)
        if s.name <= self.state:
            raise Damage(f'the state {os_text(s.name)} is not in order, or comes twice')
        self.state, self.size, self.next_block = s.name, s.size, 0
        self.digest.state(s)
        return s

    def length_of(self, index):
        return min(BLOCK_BYTES, self.size - index * BLOCK_BYTES)

    def take_block(self, index, length, raw_sum):
        if index < self.next_block or index * BLOCK_BYTES >= self.size:
            raise Damage(f'block {index} lies beyond the end, or is not in order')
        if length != self.length_of(index):
            raise Damage(f'block {index} has another size')
        if raw_sum == zeros_sum(length):
            raise Damage(f'block {index} is zero, and such blocks are left out')
        self.next_block = index + 1
        self.bytes += length
        self.digest.block(index, raw_sum)

    def take_place(self, p):
        length = self.length_of(p.index)
        if p.stored > length or (p.codec == RAW and p.stored != length):
            raise Damage(f'block {p.index} has another size')
        self.take_block(p.index, length, p.raw_sum)

    def take_same(self, index, data):
        if self.last.kind != FILE or len(data) < _U64.size:
            raise Damage('there are blocks of a base, and no file')
        s = Same(index, _U64.unpack_from(data)[0], data[_U64.size:])
        blocks = -(-self.size // BLOCK_BYTES)
        if not s.count or index < self.next_block or index + s.count > blocks:
            raise Damage(f'{s.count} blocks of the base lie beyond the end, or are not in order')
        if s.path:
            check_path(s.path)
        self.next_block = index + s.count
        self.digest.same(s)
        return s

    def take_end(self, data):
        if len(data) != _END.size:
            raise Damage('the end mark is not as this program knows it')
        end = End(*_END.unpack(data))
        if end.entries != self.entries or self.whole and end.bytes != self.bytes:
            raise Damage('the end mark has other counts: something is missing')
        if self.whole and end.digest != self.digest.get():
            raise Damage('the end mark has another digest')
        return end


_zeros = {}


def zeros_sum(length):
    """Of so many zeros; few lengths occur."""
    if length not in _zeros:
        if len(_zeros) > 64:
            _zeros.clear()
        _zeros[length] = sum128(bytes(length))
    return _zeros[length]
