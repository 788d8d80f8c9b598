# SPDX-License-Identifier: Apache-2.0
"""A small archiver for stories over a World: segments of a few bytes, the product's leases, manifests, heads and collector."""
import world    # finds the product
import heads
import jobs
import objects
from heads import FULL, LOGGED, NOTHING, Summary
from lease import Lease
from sums import sum128

HOUR, DAY = 3600, 86400
GRACE = DAY


class Lost(AssertionError):
    """The world lacks what it must have."""


def manifest(vault, job, step, epoch, rank, ranks, segments, base=(0, 0), kind=FULL, store=NOTHING, shards=''):
    """One piece, as bytes. Its digest is that of the names of its segments."""
    digest = sum128(repr(sorted(segments)).encode())
    records = [(heads.SEGMENTS, 0, payload) for payload in heads.pack_segments(segments)]
    s = Summary(kind, rank, ranks, 1, 100, 10, digest, NOTHING, 7, base, step, store, f'host{store[0]}', '', shards)
    return objects.pack_object(objects.MANIFEST, vault.uuid, step, epoch, [(heads.SUMMARY, 0, heads.pack_summary(s)), *records])


def put_segments(seat, lease, count):
    return [lease.put(lambda of, n: [b'segment %d/%d' % (of, n)]) for _ in range(count)]


def new_lease(seat, vault, store):
    return Lease(seat, vault, store, store, 'host', pause=seat.pause)


def expand(runs):
    return [(lease, n + i) for lease, n, count in runs for i in range(count)]


def segments_of(seat, vault, job, entry, rank=0):
    return expand(jobs.read_segments(jobs.Patient(seat, seat.pause), vault, job, entry.step, entry.epoch, rank))


class Reader:
    """Looks at a world without a verb: what the highest heads name, and whether it is there."""

    def __init__(self, world):
        self.world, self.parsed = world, {}

    def head(self, job):
        keys = [k for k in self.world.objects if k.startswith(f'job/{job}/head/')]
        if not keys:
            return None
        key = max(keys)
        data = self.world.objects[key].data
        if key not in self.parsed:
            self.parsed[key] = heads.parse_head(data, None, int(key[-16:], 16))
        return self.parsed[key]

    def need_whole(self, job, step, epoch, ranks):
        """The manifests of all ranks and all of their segments are there."""
        if objects.key_step(job, step, epoch) not in self.world.objects:
            raise Lost(f'step object gone: {job} {step}.{epoch}')
        self.need_content(job, step, epoch, ranks)

    def need_content(self, job, step, epoch, ranks):
        for rank in range(ranks):
            key = objects.key_manifest(job, step, epoch, rank)
            if key not in self.world.objects:
                raise Lost(f'manifest gone: {key}')
            if key not in self.parsed:
                records = objects.parse_object(self.world.objects[key].data, objects.MANIFEST)[1]
                self.parsed[key] = [s for r in records[1:] for s in expand(heads.parse_segments(r.payload))]
            for lease, n in self.parsed[key]:
                if objects.key_segment(lease, n) not in self.world.objects:
                    raise Lost(f'segment gone: {lease}/{n} of {key}')
