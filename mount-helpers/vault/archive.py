# SPDX-License-Identifier: Apache-2.0
"""`hitrainctl archive` and `hitrainctl verify`: all of a kept step is read, which verifies every checksum of the store. It
goes to a vault as segments and a manifest, or through a pipe, or its digest alone is computed.
"""
import collections
import concurrent.futures
import math
import struct
import time

from archived import NOTHING, Archived, OfManifest
from cold_places import TOLD_BYTES, places_of
from control import Held
from entry import Entry, attribute
from kept import Kept, names_of
from manifest import PLACES, Base, Same, State, Writer, assemble
from pipe import Rate
from places import FILE_BLOCK, PLANES, RAW, STATE_BLOCK, BLOCK_BYTES, PLACE_BYTES, Owner, Place, Segment, pack_place
from reading import AHEAD, Buffers, Read, in_order
from say import Progress
from sums import sum64, sum64_of
from tree import Run, Tree, Want
import frames
import heads
import jobs

PUTS = 3                        # segments in flight
SEGMENT_BLOCKS = 31             # whole ones in a segment
PLACES_OF_RECORD = 16384
PIPE_BUFFERS = AHEAD + 4
WIDTHS = {b'f32': 4, b'bf16': 2, b'f16': 2}      # bytes of an element
STATE_WIDTH = 4                 # state is f32 outside the store
VAULT_BUFFERS = AHEAD + 2 + (PUTS + 1) * SEGMENT_BLOCKS

# In place of blocks that the base has, or that were found there.
Known = collections.namedtuple('Known', 'index length place')


# ---- a step as a sequence ----

def walk(kept, writer, items, block, same, added=lambda count: None):
    """Gives the parts of the step to the writer; block(Read) and same(Same or Known) for content."""
    for item in items:
        kind = type(item)
        if kind is Entry:
            writer.entry(item)
        elif kind is State:
            writer.state(*item)
        elif kind is Read:
            added(len(item.data))
            block(item)
        else:
            same(item)
    return writer.end(kept.lineage())


def digest_of(kept, done='read'):
    """End of the step, which is read for it."""
    tree = Tree(kept.folder)
    progress = Progress(done, tree.bytes)
    writer = Writer(lambda *record: None, kept.step)

    def block(r):
        writer.block(r.index, r.data, r.raw_sum)
        r.give()
    end = walk(kept, writer, in_order(tree.items(), Buffers(PIPE_BUFFERS)), block, None, progress.add)
    progress.clear()
    return end


def find_kept(root, step, digest, read=True):
    """The kept step with this number and digest, or None. read: a step without a digest of the store is read for it."""
    for name in names_of(root):
        kept = Kept(root, name)
        if kept.step == step and digest == (
                kept.digest() or (digest_of(kept, 'of the base read').digest if read else None)):
            return kept
    return None


def to_pipe(kept, output, base=None, base_digest=None):
    """End. base: a kept step whose blocks are named alone, with the digest that its receiver compares."""
    tree = Tree(kept.folder, base)
    total = tree.bytes()
    progress = Progress('sent', total)
    output.put(heads.SUMMARY, heads.pack_summary(heads.Summary(
        heads.FULL, 0, 1, 1, total, 0, heads.NOTHING, heads.NOTHING, 0, (base.step, 1) if base else (0, 0),
        0, heads.NOTHING, '', kept.name, '')), 0, None)
    writer = Writer(output.put, kept.step, Base(base.step, base_digest) if base else None)
    path = b''

    def items():
        nonlocal path
        for item in tree.items():
            if type(item) is Entry:
                path = item.path
            yield Same(item.index, item.count, item.path if item.path != path else b'') if type(item) is Run else item

    def block(r):
        writer.block(r.index, r.data, r.raw_sum)
        r.give()
    end = walk(kept, writer, in_order(items(), Buffers(PIPE_BUFFERS)), block, writer.same, progress.add)
    progress.end()
    return end


# ---- into a vault ----

class Packer:
    """Content that is new becomes segments, which are put while more is read. known: an Archived whose places are used
    again; cold: an Archived where content lies that the store reads from there. put(build) -> (lease, n) makes a segment of the parts that build(lease, n) yields. One thread, and PUTS more.
    """

    def __init__(self, put, uuid, owner, known=None, rate=None, cold=None, compress=False):
        self.compress, self.width = compress, 0     # of the elements of the present file or state that is to be compressed
        self.put, self.uuid, self.owner, self.known, self.rate = put, uuid, owner, known, Rate(rate)
        self.cold = cold
        self.buffers = Buffers(VAULT_BUFFERS)
        self.pool = concurrent.futures.ThreadPoolExecutor(PUTS)
        self.segment, self.gives = Segment(), []
        self.puts, self.segments, self.used = [], [], set()
        self.records = []       # of the manifest: as Writer puts them, but for places
        self.runs, self.places = None, 0    # of the last record of places: [segment or None, packed places]
        self.path, self.state, self.of = b'', b'', NOTHING
        self.entry_number = self.state_number = -1

    # ---- items before they are read ----

    def expand(self, items):
        """Blocks that the base has, and those that are cold, become Known. The base's are read if they have another length, or
        are zero there.
        """
        path, state, cold = b'', b'', None
        for item in items:
            if type(item) is Entry:
                path, state, cold = item.path, b'', None
            elif type(item) is State:
                state, cold = item.name, None
            if type(item) is Want and self.cold:
                cold = places_of(item.handle) if cold is None else cold
                place = self.cold.of(path, state).find(item.index) if item.index in cold else None
                if place and place[:TOLD_BYTES] == cold[item.index]:
                    yield Known(item.index, item.length, place)
                    continue
            if type(item) is not Run:
                yield item
                continue
            of = self.known.of(item.path, state)
            for index in range(item.index, item.index + item.count):
                length = min(BLOCK_BYTES, item.size - index * BLOCK_BYTES)
                place = of.find(index)
                if of.length(index) != length:
                    yield Want(index, item.handle, index * BLOCK_BYTES, length, path)
                elif place:
                    yield Known(index, length, place)

    # ---- records ----

    def take(self, kind, payload, place, payload_sum):
        """put() of a Writer."""
        if kind == PLACES:
            segment, packed = payload
            if self.runs is None or self.places == PLACES_OF_RECORD:
                self.runs, self.places = [], 0
                self.records.append((PLACES, self.runs, 0, None))
            if not self.runs or self.runs[-1][0] is not segment:
                self.runs.append([segment, bytearray()])
            self.runs[-1][1].extend(packed)
            self.places += 1
            return
        self.runs = None
        self.records.append((kind, payload, place, payload_sum))

    def begin(self, e):
        self.path, self.state, self.state_number = e.path, b'', -1
        self.width = self.compress and WIDTHS.get(attribute(e, b'dtype'), 0)
        self.entry_number += 1
        self.of = self.known.of(self.path, b'') if self.known else NOTHING

    def begin_state(self, s):
        self.state, self.width = s.name, self.width and STATE_WIDTH
        self.state_number += 1
        self.of = self.known.of(self.path, self.state) if self.known else NOTHING

    def block(self, writer, r):
        place = self.of.find(r.index) if self.of.length(r.index) == len(r.data) else None
        if place and place[-16:] == r.raw_sum:
            r.give()
            self.same(writer, Known(r.index, len(r.data), place))
            return
        length, frame = len(r.data), frames.encode(r.data, self.width) if self.width else None
        data, codec, total = (frame, PLANES, sum64(frame)) if frame else (r.data, RAW, sum64_of(r.raw_sum, r.data))
        if not self.segment.has_room(len(data)):
            self.flush()
        owner = (STATE_BLOCK if self.state else FILE_BLOCK, r.index, self.entry_number, max(self.state_number, 0))
        if frame or length < BLOCK_BYTES:   # a segment may have thousands of these
            data = frame or bytes(data)
            r.give()
        else:
            self.gives.append(r.give)
        unit = self.segment.add(data, length, codec, owner, (total, r.raw_sum))
        packed = pack_place(Place(r.index, 0, 0, unit, len(data), codec, total, r.raw_sum))
        writer.place(r.index, length, r.raw_sum, (self.segment, packed))

    def same(self, writer, k):
        self.used.add(struct.unpack_from('<IH', k.place, 4))
        writer.place(k.index, k.length, k.place[-16:], (None, k.place))

    # ---- segments ----

    def flush(self):
        for put in [p for p in self.puts if p.done()]:
            put.result()
            self.puts.remove(put)
        if self.segment.rows:
            self.segments.append(self.segment)
            self.puts.append(self.pool.submit(self.put_one, self.segment, self.gives))
            self.segment, self.gives = Segment(), []

    def put_one(self, segment, gives):
        """A failure is told by the next flush, which comes only if there is memory to read on."""
        try:
            segment.where = self.put(lambda lease, n: list(segment.parts(self.uuid, lease, n, self.owner)))
        finally:
            segment.blocks = None
            for give in gives:
                give()
        self.rate.add(segment.bytes())

    def finish(self):
        """All segments are on stable storage, and the records have their places."""
        self.flush()
        for put in self.puts:
            put.result()
        self.pool.shutdown()
        return [(kind, b''.join(map(self.placed, payload)) if kind == PLACES else payload, place, payload_sum)
                for kind, payload, place, payload_sum in self.records]

    def placed(self, run):
        segment, packed = run
        if segment:
            for at in range(0, len(packed), PLACE_BYTES):
                struct.pack_into('<IH', packed, at + 4, *segment.where)
        return packed

    def close(self):
        self.pool.shutdown(cancel_futures=True)


class Tracked(Writer):
    """A Writer that tells the packer whose blocks come."""

    def __init__(self, packer, step):
        super().__init__(packer.take, step)
        self.packer = packer

    def entry(self, e):
        super().entry(e)
        self.packer.begin(e)

    def state(self, name, size):
        super().state(name, size)
        self.packer.begin_state(State(name, size))


BEHIND = 8                      # part of the grace in which reads wait for a trainer: a segment must not be old before its manifest


Packed = collections.namedtuple('Packed', 'end records segments own new shards')


def pack(kept, put, uuid, owner, known=None, base=None, rate=None, behind_s=math.inf, cold=None, compress=False):
    """Puts all new content of a kept step, perhaps compressed: Packed. known: the Archived of a step in the vault; base: that step, if the
    store keeps it, so that what both share is not even read. behind_s: as for Tree. cold: the Archived whose content the
    store reads from the vault.
    """
    tree = Tree(kept.folder, base if known else None, behind_s)
    progress = Progress('archived', tree.bytes)
    packer = Packer(put, uuid, owner, known, rate, cold, compress)
    writer = Tracked(packer, kept.step)
    try:
        end = walk(kept, writer, in_order(packer.expand(tree.items()), packer.buffers),
                   lambda r: packer.block(writer, r), lambda k: packer.same(writer, k), progress.add)
        records = packer.finish()
    finally:
        packer.close()
    progress.end()
    shards = kept.word(b'shards') or b''
    own = [s.where for s in packer.segments]
    return Packed(end, records, packer.used | set(own), own, sum(s.bytes() for s in packer.segments), shards.decode())


# ---- one rank's step ----

def known_of(writer, engine, uuid, root):
    """((step, epoch), Archived, kept step or None) of the newest full step of the job, whose segments are used again; all
    None if there is none.
    """
    entry = writer.base()
    if not entry:
        return None, None, None
    step = jobs.read_step_object(engine, writer.vault, writer.job, entry.step, entry.epoch, entry.sum)
    summary = step.summaries[writer.rank]
    known = Archived(OfManifest(engine, uuid, writer.job, entry.step, entry.epoch, summary).items())
    # To read a step for its digest would be more than to read the new one whole.
    return (entry.step, entry.epoch), known, find_kept(root, entry.step, summary.digest, read=False)


def cold_of(kept, engine, vault, writer):
    """The Archived of the step whose content a kept step reads from this vault, and whose pin of this store keeps it; or None."""
    text = kept.word(b'cold')
    if not text:
        return None
    job, _, step = text.decode(errors='replace').partition('@')
    key = next((key for key, _, of in jobs.pins_of(engine, job, writer.store) if str(of) == step), None)
    if not key:
        return None
    step, epoch = (int(part, 16) for part in key.rpartition('/')[2].split('.')[:2])
    found = jobs.read_step_object(engine, vault, job, step, epoch, None)
    summary = found.summaries[writer.rank if len(found.summaries) == writer.ranks else 0]
    return Archived(OfManifest(engine, vault.uuid, job, step, epoch, summary).items())


def to_vault(root, kept, engine, vault, writer, lease, rate=None, compress=False):
    """One kept step becomes a step of the job: (Summary, True if the job lists it). writer: writer.Writer of this rank;
    lease: lease.Lease. Restart: begin again. Fenced, Failure.
    """
    held = Held(kept)
    at, known, base = known_of(writer, engine, vault.uuid, root)
    owner = Owner(writer.job, kept.step, writer.epoch, writer.rank)
    packed = pack(kept, lease.put, vault.uuid, owner, known, base, rate, vault.grace / BEHIND, cold_of(kept, engine, vault, writer),
                  compress)
    used = packed.segments - set(packed.own)
    summary = heads.Summary(heads.FULL, writer.rank, writer.ranks, 1, packed.end.bytes, packed.new, packed.end.digest,
                            heads.NOTHING, packed.end.lineage, at if used and at else (0, 0), time.time_ns(), writer.store,
                            writer.host, kept.name, packed.shards)

    def build(epoch):
        return assemble(vault.uuid, kept.step, epoch, summary, packed.segments, packed.records)[0]
    listed = writer.commit(kept.step, build, packed.own, lambda: writer.ranks == 1 or kept.is_there())
    if listed:
        held.is_in(writer.job, summary.digest)
    return summary, listed
