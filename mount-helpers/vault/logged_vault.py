# SPDX-License-Identifier: Apache-2.0
"""Logged steps into a vault, and back: their pieces lie in segments, as blocks do."""
import collections
import concurrent.futures
import time

from archived import OfManifest
from errors import Missing
from logged import FILE, NUMBERS, ORTHO, PIECES, SETTINGS, SPARSE, End, File, FileBlock, Numbers, Piece, Reader, Settings, StepSum, \
    pack_end, pack_file, pack_numbers, pack_row
from manifest import PLACES, SEGMENT_BITS, assemble
from objects import END, Damage, key_segment
from pipe import Rate
from places import GRADIENT, GRADIENT_ENTRIES, FILE_BLOCK, RAW, UPDATE, UPDATE_ENTRIES, UNIT_BYTES, Place, Segment, pack_place
from sums import sum64_of, sum128
import heads
import stop

PUTS = 3                    # segments in flight
ROWS_OF_RECORD = 16384
FETCHERS, FETCHES_AHEAD = 8, 24
KINDS = {(0, 0): GRADIENT, (0, SPARSE): GRADIENT_ENTRIES, (ORTHO, 0): UPDATE, (ORTHO, SPARSE): UPDATE_ENTRIES}


class Packer:
    """Items of a logged step become segments and records of a manifest. put: of lease.Lease. One thread, and PUTS more."""

    def __init__(self, put, uuid, owner, rate=None):
        self.put, self.uuid, self.owner, self.rate = put, uuid, owner, Rate(rate)
        self.pool, self.puts = concurrent.futures.ThreadPoolExecutor(PUTS), collections.deque()
        self.segment, self.segments = Segment(), []
        self.records, self.sum = [], StepSum(owner.step)
        self.params = self.bytes = 0

    def take(self, item):
        kind = type(item)
        if kind is Numbers:
            self.params += 1
            self.sum.numbers(pack_numbers(item))
            self.records.append((NUMBERS, pack_numbers(item)))
        elif kind is Piece:
            raw_sum = sum128(item.content)
            self.bytes += len(item.content)
            self.sum.piece(item, raw_sum)
            self._row(PIECES, item, KINDS[item.coding & ORTHO, item.coding & SPARSE], item.first, 0, raw_sum)
        elif kind is FileBlock:
            self._row(PLACES, item, FILE_BLOCK, item.index, item.index, sum128(item.content))
        elif kind is File:
            self.records.append((FILE, pack_file(item)))
        elif kind is Settings:
            self.records.append((SETTINGS, item.text))

    def _row(self, record, item, kind, number, index, raw_sum):
        data = item.content
        if not self.segment.has_room(len(data)):
            self._flush()
        total = sum64_of(raw_sum, data)
        unit = self.segment.add(data, len(data), RAW, (kind, number, max(self.params - 1, 0), 0), (total, raw_sum))
        if not self.records or self.records[-1][0] != record or len(self.records[-1][1]) >= ROWS_OF_RECORD:
            self.records.append((record, []))
        self.records[-1][1].append((item._replace(content=None), self.segment, Place(index, 0, 0, unit, len(data), RAW, total, raw_sum)))

    def _flush(self):
        if not self.segment.rows:
            return
        while len(self.puts) >= PUTS:
            self.puts.popleft().result()
        self.puts.append(self.pool.submit(self._put, self.segment))
        self.segments.append(self.segment)
        self.segment = Segment()

    def _put(self, segment):
        segment.where = self.put(lambda lease, n: list(segment.parts(self.uuid, lease, n, self.owner)))
        self.rate.add(segment.bytes())
        segment.blocks = None

    def finish(self, lineage, files):
        """(End, records, own segments): all segments are on stable storage."""
        self._flush()
        while self.puts:
            self.puts.popleft().result()
        self.pool.shutdown()
        end = End(self.params, self.bytes, self.sum.get(), lineage, int(files))
        records = [(kind, self._packed(kind, body), 0, None) for kind, body in self.records]
        return end, [*records, (END, pack_end(end), 0, None)], [s.where for s in self.segments]

    @staticmethod
    def _packed(kind, body):
        if kind not in (PIECES, PLACES):
            return body
        rows = []
        for item, segment, place in body:
            packed = pack_place(place._replace(lease=segment.where[0], n=segment.where[1]))
            rows.append(packed if kind == PLACES else pack_row(item, packed))
        return b''.join(rows)

    def close(self):
        self.pool.shutdown(cancel_futures=True)


def to_vault(log, items, files, vault, writer, put, owner, base, shards, rate=None, still=lambda: True):
    """A logged step becomes one of the job: True if the job lists it. log: logged.Logged. items: its Numbers and Pieces.
    files: a function that gives a changes.Spool, or None. base: (step, epoch) of the newest step of the job. still: of Writer.commit.
    """
    packer = Packer(put, vault.uuid, owner, rate)
    try:
        for item in items:
            stop.check()
            packer.take(item)
        spool = files()
        for item in spool or ():
            packer.take(item)
        end, records, own = packer.finish(log.lineage, spool is not None)
    finally:
        packer.close()
    new = sum(s.bytes() for s in packer.segments)
    summary = heads.Summary(heads.LOGGED, writer.rank, writer.ranks, 1, end.bytes, new, end.sum, heads.NOTHING, log.lineage, base,
                            time.time_ns(), writer.store, writer.host, '', shards)
    return writer.commit(log.step, lambda epoch: assemble(vault.uuid, log.step, epoch, summary, set(own), records)[0], own, still, base)


class Fetch:
    """in_order(items): the items, with bytes in place of each Place. fetched counts them."""

    def __init__(self, engine):
        self.engine, self.fetched = engine, 0

    def in_order(self, items):
        waiting, pool = collections.deque(), concurrent.futures.ThreadPoolExecutor(FETCHERS)
        try:
            for item in items:
                content = getattr(item, 'content', None)
                waiting.append((item, content and pool.submit(self._fetch, content)))
                if len(waiting) > FETCHES_AHEAD:
                    yield self._finish(waiting.popleft())
            while waiting:
                yield self._finish(waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _finish(self, one):
        item, future = one
        if not future:
            return item
        while not future.done():
            stop.check()
            concurrent.futures.wait([future], stop.LOOK_S)
        data = future.result()
        self.fetched += len(data)
        return item._replace(content=data)

    def _fetch(self, place):
        key, at = key_segment(place.lease, place.n), place.unit * UNIT_BYTES
        try:
            data = self.engine.get(key, at, place.stored)
        except Missing:
            raise Damage(f'{key} is gone') from None
        raw_sum = sum128(data)
        if len(data) < place.stored or raw_sum != place.raw_sum or sum64_of(raw_sum, data) != place.sum:
            raise Damage(f'{key} at {at}: its checksum is wrong')
        return data


class FromVault(OfManifest):
    """The items of a rank's logged step. places(): with a Place as content. Iterates with bytes."""

    def __init__(self, engine, uuid, job, step, epoch, summary, fetch=None):
        self.step, self.fetch = step, fetch or Fetch(engine)
        super().__init__(engine, uuid, job, step, epoch, summary)

    def places(self):
        try:
            for item in Reader(self.pieces.records(), self.step, in_pipe=False):
                content = getattr(item, 'content', None)
                if content and content.lease << SEGMENT_BITS | content.n not in self.pieces.segments:
                    raise Damage('a piece lies in a segment that it does not name')
                yield item
        except Damage as e:
            raise self.damage(e) from None

    def __iter__(self):
        return self.fetch.in_order(self.places())
