# SPDX-License-Identifier: Apache-2.0
"""The collector: it removes what no step and no pin names (docs/vault-format.md, "Collection"). Any user may run it, two at
once do no harm, and it takes no lock. The order of a run is the proof:

1. list segments and manifests with their ages; then read the highest head of each job; then list pins;
2. mark the segments that any listed manifest names. A manifest that is gone by now ends the run: another collector works;
3. remove old segments without a mark; then old manifests and steps that neither a head nor a pin names. Their segments go in a
   later run. Old heads go when many are above them, which a second look cannot miss.

Memory: one byte for each segment, some 200 bytes for each manifest.
"""
import bisect
import collections

import jobs
import objects
from errors import Missing
from heads import FULL
from objects import Damage, Failure

HEAD_SECONDS, HEADS_ABOVE = 3600, 64
YOUNG, OLD = 1, 2           # of a segment in the table; 0: there is none, or it is marked

Report = collections.namedtuple('Report', 'garbage young segments manifests steps heads')


class Job:
    """What lies in a vault below one job."""

    def __init__(self):
        self.manifests = {}     # (step, epoch, rank) -> {piece: is old}
        self.steps = {}         # (step, epoch) -> is old
        self.heads = {}         # number -> is old
        self.named = set()      # (step, epoch) of pins, and of full steps of the highest head
        self.runs = {}          # epoch -> [(first step, last)] of its logged steps, which ascend

    def add_entries(self, entries):
        for e in entries:
            if e.kind == FULL:
                self.named.add((e.step, e.epoch))
            else:
                self.runs.setdefault(e.epoch, []).append((e.step, e.last))
        for runs in self.runs.values():
            runs.sort()

    def is_named(self, step, epoch):
        if (step, epoch) in self.named:
            return True
        runs = self.runs.get(epoch, ())
        i = bisect.bisect_right(runs, (step, objects.NUMBER_MAX)) - 1
        return i >= 0 and step <= runs[i][1]


class Collector:
    """One run over a vault. said: called with a line for the user."""

    def __init__(self, engine, vault, said=lambda line: None):
        self.engine, self.vault, self.said = engine, vault, said
        self.table = {}         # lease -> a byte for each segment from 0 on
        self.jobs, self.old_probes = {}, []
        self.unread = 0         # manifests whose segments are not known: then no segment is removed

    def run(self):
        self.list_segments()
        self.list_jobs()
        self.read_heads()
        self.list_pins()
        self.mark()
        return self.remove()

    # -- 1 --

    def list_segments(self):
        self.old_probes = [key for key, _, age in self.engine.list('probe/') if age > self.vault.grace]
        for key, _, age in self.engine.list('seg/'):
            lease, n = objects.parse_number(key[4:12], 8), objects.parse_number(key[13:], 4)
            if lease is None or n is None or n >= objects.SEGMENTS_OF_LEASE:
                continue
            row = self.table.setdefault(lease, bytearray())
            row.extend(bytes(max(n + 1 - len(row), 0)))
            row[n] = OLD if age > self.vault.grace else YOUNG

    def list_jobs(self):
        """Manifests, steps and heads of all jobs."""
        for key, _, age in self.engine.list('job/'):
            _, name, kind, rest = (*key.split('/', 3), '', '')[:4]
            if not objects.is_job(name):
                continue
            job, old = self.jobs.setdefault(name, Job()), age > self.vault.grace
            if kind == 'man':
                numbers = jobs.parse_manifest_key(rest)
                if numbers:
                    job.manifests.setdefault(numbers[:3], {})[numbers[3]] = old
            elif kind == 'step':
                numbers = tuple(map(objects.parse_number, rest.split('.')))
                if len(numbers) == 2 and None not in numbers:
                    job.steps[numbers] = old
            elif kind == 'head':
                number = objects.parse_number(rest)
                if number is not None:
                    job.heads[number] = age > HEAD_SECONDS

    def read_heads(self):
        for name, job in self.jobs.items():
            job.add_entries(jobs.highest(self.engine, self.vault, name).entries)

    def list_pins(self):
        for name, job in self.jobs.items():
            prefix = f'job/{name}/pin/'
            for key, _, _ in self.engine.list(prefix):
                numbers = tuple(map(objects.parse_number, key[len(prefix):].split('.')[:2]))
                if len(numbers) < 2 or None in numbers:
                    raise Damage(f'{key}: no such pin is known; nothing is removed')
                job.named.add(numbers)

    # -- 2 --

    def mark(self):
        for name, job in self.jobs.items():
            for step, epoch, rank in self.to_mark(job):
                try:
                    runs = jobs.read_segments(self.engine, self.vault, name, step, epoch, rank)
                except Missing:
                    raise Failure('another collector is at work') from None
                except Damage as e:
                    self.unread += 1
                    self.said(f'{e}; no segment is removed')
                    continue
                for lease, n, count in runs:
                    row = self.table.get(lease)
                    if row:
                        end = min(n + count, len(row))
                        row[n:end] = bytes(max(end - n, 0))

    def to_mark(self, job):
        """All listed manifests, also those that are to go: their segments outlive them by a run."""
        return [numbers for numbers, pieces in job.manifests.items() if 0 in pieces]

    # -- 3 --

    def remove(self):
        young = sum(row.count(YOUNG) for row in self.table.values())
        garbage = young + sum(row.count(OLD) for row in self.table.values())
        segments = 0 if self.unread else self.remove_segments()
        for key in self.old_probes:
            self.engine.remove(key)
        return Report(garbage, young, segments, self.remove_manifests(), self.remove_steps(), self.remove_heads())

    def remove_segments(self):
        gone = 0
        for lease, row in self.table.items():
            n = row.find(OLD)
            while n >= 0:
                self.engine.remove(objects.key_segment(lease, n))
                gone += 1
                n = row.find(OLD, n + 1)
        return gone

    def remove_manifests(self):
        gone = 0
        for name, job in self.jobs.items():
            for (step, epoch, rank), pieces in job.manifests.items():
                if job.is_named(step, epoch) or not all(pieces.values()):
                    continue
                # Without the first two the others are no manifest.
                for piece in sorted(pieces, key=lambda p: (p != jobs.READY, p)):
                    self.engine.remove(objects.key_manifest(name, step, epoch, rank, piece))
                    gone += 1
        return gone

    def remove_steps(self):
        gone = 0
        for name, job in self.jobs.items():
            for (step, epoch), old in job.steps.items():
                if old and not job.is_named(step, epoch):
                    self.engine.remove(objects.key_step(name, step, epoch))
                    gone += 1
        return gone

    def remove_heads(self):
        gone = 0
        for name, job in self.jobs.items():
            for number in sorted(job.heads)[:-HEADS_ABOVE]:
                if job.heads[number]:
                    self.engine.remove(objects.key_head(name, number))
                    gone += 1
        return gone
