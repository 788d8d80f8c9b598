# SPDX-License-Identifier: Apache-2.0
"""A vault that is larger than any disk here: listings are made up, and manifests alone are there. bench/vault.py runs it.

    vault_sim.py make FOLDER SEGMENTS         writes the manifests of a job of RANKS ranks, whose blocks fill so many segments
    vault_sim.py list|gc|plan FOLDER SEGMENTS  prints seconds and the most memory of a list of all segments, of a collection, and of
                                              all but the fetches of a restore for one rank less, as JSON

The seconds are those of the processor in the product's code: those in which listings are made up are taken off. A tenth of the segments is garbage.
"""
import json
import os
import pathlib
import resource
import sys
import time

import numpy as np

from common import BUILD

sys.path[:0] = [str(BUILD / 'share/hitrain' / folder) for folder in ('vault', 'tools')]
from archived import Fetch, OfManifest  # noqa: E402
from collect import Collector  # noqa: E402
from elastic import Shard  # noqa: E402
from entry import DIRECTORY, FILE, PREFIX, Entry, pack_entry  # noqa: E402
from errors import Missing  # noqa: E402
from manifest import ENTRY, PLACES, STATE, Digest, State, assemble, _END, _U64  # noqa: E402
from objects import END  # noqa: E402
from places import BLOCK_BYTES  # noqa: E402
import engine  # noqa: E402
import heads  # noqa: E402
import jobs  # noqa: E402
import objects  # noqa: E402
import shards  # noqa: E402
import wire  # noqa: E402

RANKS, JOB, STEP, EPOCH = 64, 'job', 1, 1
BLOCKS = 65536                  # of a parameter, of which each rank has as many
OF_SEGMENT = 31                 # blocks
STATES = b'exp_avg', b'exp_avg_sq'
GARBAGE = 10                    # each tenth segment
PAGE = 10000
OLD_MS = 10 * 86400 * 1000
SEGMENT_BYTES = (OF_SEGMENT << 20) + 4096 + 64 * OF_SEGMENT + 64
VAULT = heads.Vault(1, b'a vault of none.', 86400, objects.OBJECT_BYTES_MAX)
PLACE = np.dtype([('index', '<u4'), ('lease', '<u4'), ('n', '<u2'), ('unit', '<u2'), ('stored', '<u4'), ('sum', '<u8'),
                  ('raw_sum', '<u8', 2)])
TOKEN = np.dtype([('kind', '<u8'), ('index', '<u8'), ('raw_sum', '<u8', 2)])


def leases_of(segments):
    """A lease has a number of segments, and each rank has leases of its own."""
    return -(-segments // RANKS // objects.SEGMENTS_OF_LEASE)


# ---- manifests ----

class Manifest:
    """That of one rank. Sums of blocks are random: no block is ever read."""

    def __init__(self, segments, rank):
        self.rank, self.leases, self.records = rank, leases_of(segments), []
        self.digest, self.rng = Digest(STEP), np.random.default_rng(rank)
        self.blocks = self.number = 0
        parameters = segments * OF_SEGMENT // (1 + len(STATES)) // BLOCKS
        owned = np.arange(rank, BLOCKS, RANKS, dtype='<u4')     # as shards.owners says of a first table
        self.entry(Entry(DIRECTORY, b'', 0o755, 0, 0, 0, 0, attributes=((PREFIX + b'optimizer', b'adamw'),)))
        for p in range(parameters):
            self.entry(Entry(FILE, b'p%05d' % p, 0o644, 0, 0, 0, BLOCKS * BLOCK_BYTES, attributes=((PREFIX + b'dtype', b'f32'),)))
            self.content(owned)
            for name in STATES:
                self.digest.state(State(name, BLOCKS * BLOCK_BYTES))
                self.records.append((STATE, _U64.pack(BLOCKS * BLOCK_BYTES) + name, 0, None))
                self.content(owned)
        self.segments = -(-self.blocks // OF_SEGMENT)

    def entry(self, e):
        self.digest.entry(e)
        self.records.append((ENTRY, pack_entry(e), 0, None))
        self.number += 1

    def content(self, owned):
        at = np.arange(self.blocks, self.blocks + len(owned))
        found = np.zeros(len(owned), PLACE)
        segment = at // OF_SEGMENT + at // OF_SEGMENT // (GARBAGE - 1)    # what lies between is garbage
        found['index'], found['stored'] = owned, BLOCK_BYTES
        found['lease'] = self.rank * self.leases + segment // objects.SEGMENTS_OF_LEASE
        found['n'], found['unit'] = segment % objects.SEGMENTS_OF_LEASE, 1 + at % OF_SEGMENT * 256
        found['raw_sum'] = self.rng.integers(1, 1 << 63, (len(owned), 2))
        tokens = np.zeros(len(owned), TOKEN)
        tokens['kind'], tokens['index'], tokens['raw_sum'] = 3, owned, found['raw_sum']
        self.digest.sum.add(tokens.tobytes())
        self.records.append((PLACES, found.tobytes(), 0, None))
        self.blocks += len(owned)

    def pieces(self):
        digest, count = self.digest.get(), self.blocks * BLOCK_BYTES
        self.records.append((END, _END.pack(self.number, count, digest, 0), 0, None))
        summary = heads.Summary(heads.FULL, self.rank, RANKS, 1, count, count, digest, heads.NOTHING, 0, (0, 0), 1, heads.NOTHING, 'host',
                                'kept', '')
        numbers = np.arange(self.segments)
        numbers += numbers // (GARBAGE - 1)
        named = [(self.rank * self.leases + s // objects.SEGMENTS_OF_LEASE, s % objects.SEGMENTS_OF_LEASE) for s in numbers.tolist()]
        return assemble(VAULT.uuid, STEP, EPOCH, summary, named, self.records)


def make(folder, segments):
    """Writes all small objects and manifests, each a file whose name is its key."""
    def put(key, data):
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    summaries = []
    for rank in range(RANKS):
        pieces, summary = Manifest(segments * (GARBAGE - 1) // GARBAGE, rank).pieces()
        summaries.append(summary)
        for i, piece in enumerate(pieces):
            put(objects.key_manifest(JOB, STEP, EPOCH, rank, i), piece)
    step = jobs.step_of(STEP, EPOCH, heads.NOTHING, summaries)
    data = heads.pack_step(VAULT.uuid, step)
    put(objects.key_step(JOB, STEP, EPOCH), data)
    head = heads.Head(1, EPOCH, bytes(16), RANKS, 0, 1, 'host', (jobs.entry_of(step, data),))
    put(objects.key_head(JOB, 1), heads.pack_head(VAULT.uuid, head))


# ---- the engine ----

class Sim(engine.Engine):
    """Objects are files, but for segments, which are names alone."""

    def __init__(self, folder, segments):
        super().__init__('sim:', 600)
        self.folder, self.segments = folder, segments
        self.keys = sorted(str(p.relative_to(folder)) for p in folder.rglob('*') if p.is_file())
        self.seconds, self.removed = 0, 0

    def exchange(self, verb, key, deadline, parts=(), offset=0, length=0):
        began = time.process_time()
        try:
            if verb == wire.LIST:
                return self.page(*key.split('\0'))
            if verb == wire.REMOVE:
                self.removed += 1
                return wire.OK, 0, 0, b''
            data = self.read(key, offset, length)
            return wire.OK, 0, len(data), memoryview(data)
        finally:
            self.seconds += time.process_time() - began

    def read(self, key, offset, length):
        try:
            file = os.open(self.folder / key, os.O_RDONLY)
        except FileNotFoundError:
            raise Missing(key) from None
        try:
            return os.pread(file, min(length, max(os.fstat(file).st_size - offset, 0)), offset)
        finally:
            os.close(file)

    def page(self, prefix, after):
        entries = []
        if prefix == 'seg/':
            each, leases = self.segments // RANKS, leases_of(self.segments)
            rows = [min(each - i * objects.SEGMENTS_OF_LEASE, objects.SEGMENTS_OF_LEASE) for i in range(leases)] * RANKS
            lease, n = (int(after[4:12], 16), int(after[13:], 16) + 1) if after else (0, 0)
            while lease < len(rows) and len(entries) < PAGE:
                name = objects.key_segment(lease, 0)[:-4]
                last = min(rows[lease], n + PAGE - len(entries))
                entries += [(f'{name}{i:04x}', SEGMENT_BYTES, OLD_MS / 1000) for i in range(n, last)]
                lease, n = (lease, last) if last < rows[lease] else (lease + 1, 0)
        else:
            entries = [(k, (self.folder / k).stat().st_size, OLD_MS / 1000) for k in self.keys if k.startswith(prefix) and k > after]
        data = wire.pack_entries(entries, wire.OBJECT_BYTES_MAX)[0]
        return wire.OK, wire.MORE if prefix == 'seg/' and len(entries) == PAGE else 0, len(data), data


# ---- what is measured ----

def do_list(sim):
    return {'segments': sum(1 for _ in sim.list('seg/')), 'jobs': len(jobs.list_jobs(sim))}


def do_gc(sim):
    report = Collector(sim, VAULT).run()
    assert report.segments == report.garbage == sim.removed, (report, sim.removed)
    return {'garbage': report.garbage}


class Plan(Fetch):
    def read(self, group, name, size):
        return []


def do_plan(sim):
    _, found = jobs.read_step(sim, VAULT, JOB)
    of = Shard(found, 0, RANKS - 1, RANKS // 2)
    parts = {s.rank: of.part(s.rank, OfManifest(sim, VAULT.uuid, JOB, STEP, EPOCH, s)) for s in found.summaries if s.rank != of.names}
    own = OfManifest(sim, VAULT.uuid, JOB, STEP, EPOCH, found.summaries[of.names])
    items = sum(1 for _ in Plan(sim).in_order(of.items(own.items(), parts)))
    owned = shards.owners(of.after, BLOCKS).count(0)
    assert of.bytes == owned * BLOCK_BYTES * (items - 2), (of.bytes, owned, items)
    return {'blocks': of.bytes // BLOCK_BYTES}


def main(verb, folder, segments):
    folder, segments = pathlib.Path(folder), int(segments)
    if verb == 'make':
        return make(folder, segments)
    sim = Sim(folder, segments)
    sim.seconds, began = 0, time.process_time()
    about = {'list': do_list, 'gc': do_gc, 'plan': do_plan}[verb](sim)
    seconds = time.process_time() - began - sim.seconds
    print(json.dumps({'seconds': seconds, 'rss': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, **about}))


if __name__ == '__main__':
    main(*sys.argv[1:])
