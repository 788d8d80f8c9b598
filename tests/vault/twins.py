# SPDX-License-Identifier: Apache-2.0
"""Twins of the protocol's code that each lack one rule. The tests must notice each."""
import collect
import heads
import jobs
import objects
import writer
from errors import Missing
from heads import Pin
from objects import Failure


class NoLook(writer.Writer):
    """Believes its put, and does not look at the highest head."""

    def _put_head(self, entry, summaries):
        mine = writer.next_of(self.head, entries=self._with(self.head, entry, summaries))
        if not self.engine.put_new(objects.key_head(self.job, mine.n), heads.pack_head(self.vault.uuid, mine)):
            return None
        return True


class OldSegments(writer.Writer):
    """Does not look at the ages of its own segments after its manifest."""

    def _need_young_segments(self, step, segments):
        pass


class OldManifests(writer.Writer):
    """Does not look at the ages of manifests after the head."""

    def _were_young(self, step, summaries, n):
        return True


class AnyBase(writer.Writer):
    """Uses segments of a step that need not be listed any more."""

    def _with(self, head, entry, summaries):
        return super()._with(head, entry, [s._replace(base=(0, 0)) for s in summaries])


class NotReady(writer.Writer):
    """Rank 0 does not wait until the other ranks have looked at their segments."""

    def _put_manifest(self, step, pieces):
        return super()._put_manifest(step, pieces) and (super()._put_ready(step), True)[1]


class AgesLast(collect.Collector):
    def run(self):
        self.list_jobs()
        self.read_heads()
        self.list_pins()
        for job in self.jobs.values():
            job.manifests.clear()
        self.list_segments()
        self.list_jobs()
        self.mark()
        return self.remove()


class PinsFirst(collect.Collector):
    def run(self):
        self.list_jobs()
        self.list_pins()
        self.jobs, named = {}, {name: job.named for name, job in self.jobs.items()}
        self.list_segments()
        self.list_jobs()
        self.read_heads()
        for name, pins in named.items():
            self.jobs.setdefault(name, collect.Job()).named |= pins
        self.mark()
        return self.remove()


class GoneIgnored(collect.Collector):
    """Goes on although a manifest is gone that it listed."""

    def to_mark(self, job):
        for numbers in super().to_mark(job):
            for name in [n for n, j in self.jobs.items() if j is job]:
                try:
                    self.engine.get(objects.key_manifest(name, *numbers))
                    yield numbers
                except Missing:
                    pass


class OneRun(collect.Collector):
    """Does not mark the segments of manifests that this run removes."""

    def to_mark(self, job):
        return [(step, epoch, rank) for step, epoch, rank in super().to_mark(job)
                if job.is_named(step, epoch) or not all(job.manifests[step, epoch, rank].values())]


class NamedOnly(collect.Collector):
    """Marks the segments of manifests that heads and pins name, and not those of young ones."""

    def to_mark(self, job):
        return [(step, epoch, rank) for step, epoch, rank in super().to_mark(job) if job.is_named(step, epoch)]


class SegmentsLater(collect.Collector):
    """Lists the segments after the manifests."""

    def run(self):
        self.list_jobs()
        self.list_segments()
        self.read_heads()
        self.list_pins()
        self.mark()
        return self.remove()


class OwnClock(collect.Collector):
    """Reckons ages by its own clock, which is two days ahead of the engine's."""

    def list_jobs(self):
        super().list_jobs()
        for job in self.jobs.values():
            job.manifests = {numbers: dict.fromkeys(pieces, True) for numbers, pieces in job.manifests.items()}


class LastOfRun(collect.Collector):
    """Takes a run of logged steps for its last one."""

    def read_heads(self):
        super().read_heads()
        for job in self.jobs.values():
            job.runs = {epoch: [(last, last) for _, last in runs] for epoch, runs in job.runs.items()}


class PinUnchecked:
    """Pins a step, and does not look whether it is still listed."""

    @staticmethod
    def pin(engine, vault, job, entry, store, boot, host):
        engine.put_new(objects.key_pin(job, entry.step, entry.epoch, store), heads.pack_pin(vault.uuid, Pin(entry.step, entry.epoch, store, boot, host)))

    highest, unpin = jobs.highest, jobs.unpin


class PinRemoved:
    """Takes the pin back that was refused, also where another model of the store had put it."""

    @staticmethod
    def pin(engine, vault, job, entry, store, boot, host):
        try:
            jobs.pin(engine, vault, job, entry, store, boot, host)
        except Failure:
            engine.remove(objects.key_pin(job, entry.step, entry.epoch, store))
            raise


WRITERS = NoLook, OldSegments, OldManifests, AnyBase, NotReady
COLLECTORS = AgesLast, PinsFirst, GoneIgnored, OneRun, NamedOnly, SegmentsLater, OwnClock, LastOfRun
