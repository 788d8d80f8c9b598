# SPDX-License-Identifier: Apache-2.0
"""What an archived step has: the places of its blocks, by file, state and number. And reading them back."""
import array
import bisect
import collections
import concurrent.futures

from entry import Entry, os_text
from errors import Missing
from manifest import Block, Pieces, Same, State
from objects import Damage, key_manifest, key_segment
from places import BLOCK_BYTES, PLACE_BYTES, PLANES, UNIT_BYTES, Place, pack_place, units_of
from sums import sum64, sum64_of, sum128
import frames
import stop

FETCHERS = 8
GROUP_BYTES_MAX = 4 << 20       # neighbours in a segment are read at once
GROUPS_AHEAD = 12


class Blocks:
    """The places of one file or state, packed."""

    def __init__(self, size):
        self.size = size
        self.indices, self.places = array.array('I'), bytearray()

    def add(self, place):
        self.indices.append(place.index)
        self.places += pack_place(place)

    def find(self, index):
        """The packed place of a block, or None: it is zero, or beyond the end."""
        at = bisect.bisect_left(self.indices, index)
        if at == len(self.indices) or self.indices[at] != index:
            return None
        return bytes(self.places[at * PLACE_BYTES:(at + 1) * PLACE_BYTES])

    def length(self, index):
        return min(BLOCK_BYTES, self.size - index * BLOCK_BYTES)


NOTHING = Blocks(0)


class Archived:
    """All places of a step. items: of manifest.Pieces."""

    def __init__(self, items):
        self.blocks = {}
        path, state, now = b'', b'', NOTHING
        for item in items:
            if isinstance(item, Place):
                now.add(item)
                continue
            if isinstance(item, Entry):
                path, state, size = item.path, b'', item.size
            elif isinstance(item, State):
                state, size = item
            else:
                break
            now = self.blocks[path, state] = Blocks(size)

    def of(self, path, state):
        return self.blocks.get((path, state), NOTHING)


class OfManifest:
    """A rank's manifest in a vault: items() and messages that name it."""

    def __init__(self, engine, uuid, job, step, epoch, summary):
        self.engine = engine
        self.key = key_manifest(job, step, epoch, summary.rank)
        self.keys = [key_manifest(job, step, epoch, summary.rank, i) for i in range(summary.pieces)]
        self.summary = summary
        try:
            self.pieces = Pieces(self.get, uuid, step, epoch, summary)
        except Damage as e:
            raise self.damage(e) from None

    def damage(self, why):
        return Damage(f'{self.engine.url}: {self.key}: {why}')

    def get(self, i):
        try:
            return self.engine.get(self.keys[i])
        except Missing:
            raise Damage('it is gone' if i == 0 else f'its piece {i} is gone') from None

    def items(self, pick=None):
        """pick: of Pieces.items."""
        try:
            for item in self.pieces.items(pick):
                yield item
        except Damage as e:
            raise self.damage(e) from None


# ---- reading back ----

def shared(items, base):
    """The items; blocks that base, an Archived, has at the same place of the same file or state become runs of Same."""
    path, state, of, size, run = b'', b'', NOTHING, 0, None
    for item in items:
        if isinstance(item, Place):
            length = min(BLOCK_BYTES, size - item.index * BLOCK_BYTES)
            if of.find(item.index) == pack_place(item) and of.length(item.index) == length:
                if run and run.index + run.count == item.index:
                    run = run._replace(count=run.count + 1)
                else:
                    if run:
                        yield run
                    run = Same(item.index, 1, b'')
                continue
        elif isinstance(item, Entry):
            path, state, size = item.path, b'', item.size
        elif isinstance(item, State):
            state, size = item
        if run:
            yield run
            run = None
        if isinstance(item, (Entry, State)):
            of = base.of(path, state)
        yield item


class Fetch:
    """in_order(items): the items, with a Block in place of each Place. fetched counts bytes."""

    def __init__(self, engine):
        self.engine = engine
        self.fetched = 0
        self.group, self.waiting = [], collections.deque()
        self.path, self.state, self.size = b'', b'', 0

    def in_order(self, items):
        self.pool = concurrent.futures.ThreadPoolExecutor(FETCHERS)
        try:
            for item in items:
                self.take(item)
                while len(self.waiting) > GROUPS_AHEAD:
                    yield from self.finish()
            self.send()
            while self.waiting:
                yield from self.finish()
        finally:
            self.pool.shutdown(cancel_futures=True)

    def take(self, item):
        if isinstance(item, Place):
            if self.group and not self.follows(item):
                self.send()
            self.group.append(item)
            return
        self.send()
        if isinstance(item, Entry):
            self.path, self.state, self.size = item.path, b'', item.size
        elif isinstance(item, State):
            self.state, self.size = item.name, item.size
        # Names of entries without content do not end the look ahead.
        if self.waiting and self.waiting[-1][1] is None and len(self.waiting[-1][0]) < 64:
            self.waiting[-1][0].append(item)
        else:
            self.waiting.append(([item], None))

    def follows(self, p):
        first, last = self.group[0], self.group[-1]
        return (p.lease, p.n, p.unit) == (last.lease, last.n, last.unit + units_of(last.stored)) and \
            (p.unit - first.unit) * UNIT_BYTES + p.stored <= GROUP_BYTES_MAX

    def send(self):
        if self.group:
            name = os_text(self.path) + (f', state {self.state.decode()}' if self.state else '')
            self.waiting.append((sum(p.stored for p in self.group), self.pool.submit(self.read, self.group, name, self.size)))
            self.group = []

    def finish(self):
        items, future = self.waiting.popleft()
        if future is None:
            yield from items
            return
        while not future.done():
            stop.check()
            concurrent.futures.wait([future], stop.LOOK_S)
        yield from future.result()
        self.fetched += items

    def read(self, group, name, size):
        """Blocks of one file or state of so many bytes that are neighbours in a segment."""
        first, last = group[0], group[-1]
        at, key = first.unit * UNIT_BYTES, key_segment(first.lease, first.n)
        end = last.unit * UNIT_BYTES + last.stored

        def damage(p, why):
            return Damage(f'{self.engine.url}: {name}, block {p.index}: {key} at {p.unit * UNIT_BYTES}: {why}')
        try:
            data = self.engine.get(key, at, end - at, lend=True)
        except Missing:
            raise damage(first, 'it is gone') from None
        return [Block(p.index, self.check(p, data[p.unit * UNIT_BYTES - at:][:p.stored], size, damage)) for p in group]

    @staticmethod
    def check(p, part, size, damage):
        if len(part) < p.stored:
            raise damage(p, 'the segment is cut')
        if p.codec == PLANES:
            if sum64(part) != p.sum:
                raise damage(p, 'its checksum is wrong')
            try:
                block = frames.decode(part, BLOCK_BYTES)
            except Damage as e:
                raise damage(p, e) from None
            if len(block) != min(BLOCK_BYTES, size - p.index * BLOCK_BYTES) or sum128(block) != p.raw_sum:
                raise damage(p, 'its frame has other content')
            return block
        raw_sum = sum128(part)
        if raw_sum != p.raw_sum or sum64_of(raw_sum, part) != p.sum:
            raise damage(p, 'its checksum is wrong')
        return part
