# SPDX-License-Identifier: Apache-2.0
"""`hitrainctl restore --shard=rofR`: a rank's model of a step that another number of ranks archived.

The rank gets the blocks of parameters and of their state that it owns by the next table, each from the manifest of the rank
that owned it. Everything else is that of its own former manifest; for a new rank, of the first one that is not lost. Blocks of
other ranks are holes.
"""
import collections
import functools
import importlib

from archive import digest_of
from archived import Archived, Blocks, Fetch, OfManifest, shared
from entry import FILE, PREFIX, Entry, os_text
from kept import Kept, names_of
from manifest import Digest, End, State
from objects import Failure
from places import BLOCK_BYTES, Place, parse_places, pick_places
from restore import make
from store import printable, size_text
import heads
import jobs
import shards
import stop

DTYPE, SHARDS = PREFIX + b'dtype', PREFIX + b'shards'
TRAINED = b'f32', b'bf16', b'f16'
WIDTH_MAX = 4                   # bytes of a state for each byte of its parameter
COUNTER = b'step'               # the state that all ranks have alike

# here: bytes that the base had; least: bytes that no even division could save; logged: steps that were computed.
Resharded = collections.namedtuple('Resharded', 'step rank ranks table end fetched here least logged')


def tables(found, ranks, lost):
    """(table of the step, the next one, which may be the same)."""
    text, had = found.summaries[0].shards, len(found.summaries)
    if any(s.shards != text for s in found.summaries):
        raise Failure(f'step {found.step}: its ranks have different tables of user.hitrain.shards')
    table = shards.parse(text) if text else shards.change((), had)
    if not table or table[-1].ranks != had:
        raise Failure(f'step {found.step} is of {had} ranks, and user.hitrain.shards says "{printable(text)}"')
    if lost is not None and lost >= had:
        raise Failure(f'--lost={lost}: step {found.step} has ranks 0 to {had - 1}')
    if lost is None and ranks == had:
        return table, table
    after = shards.change(table, ranks, lost)
    if not after:
        raise Failure(f'there are 1 to {shards.RANKS_MAX} ranks, and a table has at most {shards.CHANGES_MAX} changes; set '
                      'user.hitrain.shards to a new one')
    return table, after


def is_parameter(e):
    return e.kind == FILE and dict(e.attributes).get(DTYPE) in TRAINED


class Content:
    """A file or state whose blocks have owners. blocks: of the parameter, each with width bytes of this for each of its own;
    width 0: all ranks have the same."""

    def __init__(self, of, size, blocks, width):
        self.of, self.size, self.blocks, self.width = of, size, blocks, width


class Shard:
    """Rank `rank` of the next table, of a full step (heads.Step)."""

    def __init__(self, found, rank, ranks, lost):
        self.found, self.rank = found, rank
        self.before, self.after = tables(found, ranks, lost)
        numbers = range(len(found.summaries))
        self.changes = self.after is not self.before
        self.former = next((q for q in numbers if self.renumber(q) == rank), None)
        self.names = next((q for q in numbers if q != lost), 0) if self.former is None else self.former
        self.bytes = self.least = self.entries = 0
        self.owners = functools.lru_cache(maxsize=4)(self.find_owners)
        self.needed = functools.lru_cache(maxsize=4)(self.find_needed)

    def renumber(self, q):
        return shards.renumber(self.after, len(self.after) - 1, q) if self.changes else q

    def find_owners(self, blocks):
        """(owner before, owner now) of each block of a parameter."""
        if not shards.fit(self.after, blocks):
            raise Failure('a parameter in shards has at most 1 TiB, and 4 TiB divided by the numbers of the table')
        before = shards.owners(self.before, blocks)
        return before, shards.owners(self.after, blocks) if self.changes else before

    # ---- what the manifests say ----

    def contents(self, items):
        """Yields (item, Content): of what the item begins or belongs to; None for what is not divided."""
        file = content = None
        for item in items:
            if isinstance(item, Entry):
                blocks = -(-item.size // shards.BLOCK_BYTES)
                file = content = Content((item.path, b''), item.size, blocks, 1) if is_parameter(item) else None
            elif isinstance(item, State):
                content = self.state(file, item) if file else None
            yield item, content

    @staticmethod
    def state(file, s):
        path = file.of[0]
        if s.name == COUNTER:
            return Content((path, s.name), s.size, 0, 0)
        if not file.size or s.size % file.size or s.size // file.size > WIDTH_MAX:
            raise Failure(f'{os_text(path)}: its state {os_text(s.name)} has no element for each of the parameter\'s')
        return Content((path, s.name), s.size, file.blocks, s.size // file.size)

    def part(self, rank, manifest):
        """The places of blocks that this former rank has for the present one: {(path, state): Blocks}. They are few of those in
        its manifest, an OfManifest, and the others are not even looked at."""
        found, needed = {}, b''

        def pick(payload):
            return pick_places(payload, needed) if needed else b''
        for item, content in self.contents(manifest.items(pick)):
            if isinstance(item, Place):
                found[content.of].add(item)
            elif isinstance(item, (Entry, State)):
                needed = b''
                if content:
                    found[content.of] = Blocks(content.size)
                    needed = self.needed(rank, content.blocks, content.width) if content.width else b'\1'
        return found

    def find_needed(self, rank, blocks, width):
        """A byte for each block of a file or state, or nothing where no block is needed."""
        bits = [owner == (rank, self.rank) for owner in zip(*self.owners(blocks))]
        return bytes(b for b in bits for _ in range(width)) if any(bits) else b''

    def items(self, names, parts):
        """The step of the rank. names: the items of the manifest that says what there is; parts: {former rank: part()} of
        the other ones."""
        digest, divided, own, last = Digest(self.found.step), 0, None, None
        for item, content in self.contents(names):
            stop.check()
            if isinstance(item, Place):
                own.add(item)
                continue
            for place in self.places(own, last, parts) if own else ():
                self.bytes += own.length(place.index)
                digest.block(place.index, place.raw_sum)
                yield place
            if isinstance(item, Entry):
                item = self.entry(item)
                digest.entry(item)
            elif isinstance(item, State):
                digest.state(item)
            elif isinstance(item, End):
                self.check_count(divided, parts)
                yield End(self.entries, self.bytes, digest.get(), 0)
                return
            own, last = Blocks(item.size), content
            divided += content is not None
            yield item

    def entry(self, e):
        self.entries += 1
        if e.path or not self.changes:
            return e
        others = [a for a in e.attributes if a[0] != SHARDS]
        table = shards.text_of(self.after).encode()
        return e._replace(attributes=tuple(sorted(others + [(SHARDS, table)])))

    def check_count(self, divided, parts):
        for q, part in parts.items():
            if len(part) != divided:
                raise Failure(f'step {self.found.step}: ranks {self.names} and {q} have different parameters or states')

    def places(self, own, content, parts):
        """Of one file or state, in order. own: what the manifest of names has of it."""
        for q, part in parts.items() if content else ():
            if content.of not in part or part[content.of].size != content.size:
                raise Failure(f'{os_text(content.of[0])}: ranks {self.names} and {q} have it in different sizes, or not at all')
            if not content.width and part[content.of].places[-16:] != own.places[-16:]:
                raise Failure(f'{os_text(content.of[0])}: ranks {self.names} and {q} have taken different numbers of steps')
        if not content or not content.width:
            yield from parse_places(own.places) if own.places else ()
            return
        before, now = self.owners(content.blocks)
        last, gets = -(-content.size // BLOCK_BYTES), 0
        for b in range(content.blocks):
            if now[b] != self.rank:
                continue
            source = own if before[b] == self.names else parts[before[b]][content.of]
            for i in range(b * content.width, min((b + 1) * content.width, last)):
                packed = source.find(i)
                if packed:
                    gets += own.length(i) if before[b] != self.former else 0
                    yield from parse_places(packed)
        lacks = max(content.blocks // self.after[-1].ranks - before.count(self.former), 0)
        self.least += min(lacks * content.width * shards.BLOCK_BYTES, gets)


# ---- the vault ----

def find_base(root, engine, vault, job):
    """(kept step, its manifest) of the newest full step, of whichever rank, that root keeps, too, or (None, None)."""
    there = {}
    for name in names_of(root):
        kept = Kept(root, name)
        there.setdefault(kept.step, []).append(kept)
    for e in reversed(jobs.highest(engine, vault, job).entries):
        if e.kind != heads.FULL or e.step not in there:
            continue
        step = jobs.read_step_object(engine, vault, job, e.step, e.epoch, e.sum)
        by_digest = {s.digest: s for s in step.summaries}
        for kept in there[e.step]:
            summary = by_digest.get(kept.digest() or digest_of(kept, 'of the base read').digest)
            if summary:
                return kept, OfManifest(engine, vault.uuid, job, e.step, e.epoch, summary)
    return None, None


def from_chain(path, engine, vault, job, chain, shard, lost=None, base_root=None):
    """Resharded. chain: that of jobs.chain_of; shard: (rank, ranks)."""
    found, *logged = chain
    rank, ranks = shard
    of = Shard(found, rank, ranks, lost)
    fetch = Fetch(engine)
    steps = logged and importlib.import_module('elastic_steps').ElasticSteps(engine, vault, job, logged, of)
    if steps:
        steps.check()

    def manifest(q):
        return OfManifest(engine, vault.uuid, job, found.step, found.epoch, found.summaries[q])

    def fill(making):
        parts = {s.rank: of.part(s.rank, manifest(s.rank)) for s in found.summaries if s.rank != of.names}
        kept, its = find_base(base_root, engine, vault, job) if base_root else (None, None)
        items = of.items(manifest(of.names).items(), parts)
        if kept:
            items = shared(items, Archived(its.items()))
        making.begin(found.summaries[of.names].bytes, kept, base_root)
        for item in fetch.in_order(items):
            making.take(item)
        least = of.least if base_root and of.former is not None else of.bytes
        return found.step, Resharded(found.step, rank, ranks, shards.text_of(of.after), item, fetch.fetched,
                                     of.bytes - fetch.fetched, min(least, fetch.fetched), 0)
    done = make(path, fill, steps)
    if not steps:
        return done
    came = steps.fetch.fetched
    return done._replace(step=logged[-1].step, fetched=done.fetched + came, least=done.least + came, logged=len(logged))


def report(path, r, as_json, out):
    from json import dumps
    if as_json:
        about = {'path': path, 'step': r.step, 'rank': r.rank, 'ranks': r.ranks, 'shards': r.table}
        about.update({'logged': r.logged} if r.logged else {'digest': r.end.digest.hex()})
        out.write(dumps({**about, 'entries': r.end.entries, 'bytes': r.end.bytes, 'here_bytes': r.here, 'fetched_bytes': r.fetched,
                         'least_bytes': r.least}) + '\n')
        return
    out.write(f'{path}: rank {r.rank} of {r.ranks} at step {r.step}: {size_text(r.end.bytes)}, of which {size_text(r.here)} '
              f'were here; {size_text(r.fetched)} fetched, and the least is {size_text(r.least)}\n')
    if r.logged:
        out.write(f'{r.logged} logged steps computed\n')
