# SPDX-License-Identifier: Apache-2.0
"""The story of test_protocol_cuts.py with logged steps: two archivers with --log, each with the product's decisions over a store that
is played; a collector; and a standby. No logged step that was reported is lost, each one that the head names is whole and follows
the one before, and a standby computes none twice and leaves none out."""
import collections
import importlib.util
import itertools
import pathlib
import sys
import types

import pytest

from archiver import FULL, LOGGED, Lost, Reader, manifest, new_lease, put_segments, segments_of
from test_protocol_cuts import FAULTS, Story, cut_at_each_verb
from world import Seat

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / 'mount-helpers/tools'))
import apply            # noqa: E402
import changes          # noqa: E402
import jobs             # noqa: E402
import objects          # noqa: E402
import standby          # noqa: E402
import writer           # noqa: E402
from errors import Missing  # noqa: E402

spec = importlib.util.spec_from_file_location('product', pathlib.Path(writer.__file__).with_name('archiver.py'))
product = importlib.util.module_from_spec(spec)
spec.loader.exec_module(product)

FIRST, KEPT, LAST, LINEAGE = 10, (10, 12), 13, 7
KeptStep = collections.namedtuple('KeptStep', 'step name folder')
KeptStep.lineage, KeptStep.is_there = lambda kept: LINEAGE, lambda kept: True
Summary = collections.namedtuple('Summary', 'bytes new')


class Log:
    """A logged step of a store; root is the archiver."""

    def __init__(self, root, step):
        self.root, self.step, self.lineage = root, step, LINEAGE

    def items(self, path_of):
        pass

    def close(self):
        pass


class Files:
    path_of = changed = None

    def __init__(self, *_):
        pass


def put_kept(root, kept, *_):
    base = root.writer.base()
    names = segments_of(root.seat, root.vault, 'job', base, root.rank) if base else []
    return Summary(0, 0), root.put(kept.step, names, (base.step, base.epoch) if base else (0, 0))


def put_log(log, items, files, vault, its_writer, put, owner, base, shards, rate, still):
    return log.root.put(log.step, [], base, LOGGED, still, base)


# What the product takes from a store, of a store that is played. Each look at the clock takes a second.
vars(product).update(state_of=lambda root: root.state(), names_of=lambda root: [str(k.step) for k in root.all_kept()], Logged=Log,
                     Files=Files, to_vault=put_kept, note=lambda line: None, logged_vault=types.SimpleNamespace(to_vault=put_log),
                     time=types.SimpleNamespace(monotonic=itertools.count().__next__))


class Archiver(product.Archiver):
    """Its trainer has taken one step more than the job lists."""

    def __init__(self, story, seat, rank):
        self.story, self.seat, self.rank, self.ranks, self.job, self.every, self.log = story, seat, rank, 2, 'job', 1, True
        self.store, self.root, self.rate, self.compress = bytes([rank + 1]) * 16, self, None, False
        self.engine, self.vault = jobs.Patient(seat, seat.pause), story.vault
        self.lineage = self.done = self.known = self.files = self.quiet = None
        self.look_at, self.look_wait = 0, product.LOOK_S_MIN
        self.lease = new_lease(seat, story.vault, self.store)
        self.writer = writer.Writer(seat, story.vault, 'job', rank, 2, 'host', self.store, seat.pause)

    def listed(self):
        return max((e.last for e in self.writer.head.entries), default=0)

    def number(self, word=None):
        return min(max(FIRST, self.listed() + 1), LAST)

    def state(self):
        last = self.number() if self.number() > FIRST else 0
        return changes.State(last and FIRST + 1, last, LINEAGE, 0, False)

    def all_kept(self):
        return [KeptStep(n, str(n), None) for n in reversed(KEPT) if n <= self.number()]

    def shards(self):
        return b''

    def put(self, step, names, base, kind=FULL, still=lambda: True, after=None):
        own = put_segments(self.seat, self.lease, 1)
        done = self.writer.commit(step, lambda epoch: [manifest(self.vault, 'job', step, epoch, self.rank, 2, names + own, base, kind,
                                                                self.store)], own, still, after)
        if done:
            self.story.reported.add((step, self.writer.epoch))
        return done

    def work(self):
        """As run()."""
        while self.listed() < LAST:
            try:
                try:
                    did = self.turn()
                except writer.Wanted as e:
                    did = self.give(e)
                if not did:
                    self.seat.pause('')
                    self.writer._look()
            except (writer.Restart, writer.Wanted, Missing):
                pass


class Copy:
    def __init__(self, step, place):
        self.step, self.place = step, place


class Standby(standby.Standby):
    """Its copy remembers what it was computed from."""

    def __init__(self, story, seat, rank):
        super().__init__(jobs.Patient(seat, seat.pause), story.vault, 'job', '/', (rank, 2))
        self.story, self.seat, self.rank = story, seat, rank

    def take(self, step, epoch, summary):
        for lease, n in jobs_segments(self.engine, self.vault, step, epoch, self.rank):
            assert bytes(self.engine.get(objects.key_segment(lease, n))) == b'segment %d/%d' % (lease, n)
        self.copy = Copy(step, apply.Place(step, summary.lineage, summary.kind == LOGGED, summary.digest, 0))

    def compute(self, step, newest):
        assert step.step == self.copy.step + 1
        self.take(step.step, step.epoch, step.summaries[self.rank])
        self.story.restored.append(step.step)

    def renew(self, head):
        entry = next((e for e in reversed(head.entries) if e.kind != LOGGED), None)
        if entry:
            step = jobs.read_step_object(self.engine, self.vault, 'job', entry.step, entry.epoch, entry.sum)
            self.take(entry.step, entry.epoch, step.summaries[self.rank])
        return bool(entry)

    def work(self):
        self.copy = Copy(0, apply.NOWHERE)
        while True:
            try:
                if not self.turn():
                    self.seat.pause('')
            except jobs.Gone:
                pass


def jobs_segments(engine, vault, step, epoch, rank):
    return [(lease, n + i) for lease, n, count in jobs.read_segments(engine, vault, 'job', step, epoch, rank) for i in range(count)]


class LoggedStory(Story):
    def archiver(self, rank):
        return lambda seat: Archiver(self, seat, rank).work()

    def restorer(self, seat):
        Standby(self, seat, 1).work()

    def check(self):
        reader, seat = Reader(self.world), Seat(self.world)
        head = reader.head('job')
        for step, epoch in self.reported:
            if not jobs.find(head, step, epoch):
                raise Lost(f'step {step} of epoch {epoch} was reported')
        for entry in head.entries:
            step = jobs.read_step_object(seat, self.vault, 'job', entry.last, entry.epoch, entry.sum)
            while True:
                reader.need_whole('job', step.step, entry.epoch, 2)
                if entry.kind == LOGGED and not jobs.find(head, *step.summaries[0].base):
                    raise Lost(f'step {step.step} follows a step that is not listed')
                if step.step == entry.step:
                    break
                step = jobs.read_step_object(seat, self.vault, 'job', step.step - 1, entry.epoch, step.before)
        assert head.entries[-1].last == LAST and head.entries[-1].kind == LOGGED


VERBS = LoggedStory().run().verbs


def test_the_whole_story_logs_and_follows():
    story = LoggedStory().run()
    story.check()
    entries = Reader(story.world).head('job').entries
    assert [(e.step, e.last, e.kind) for e in entries] == [(10, 10, 1), (11, 12, 2), (12, 12, 1), (13, 13, 2)]
    assert story.restored == sorted(set(story.restored)) and {11, 12} <= set(story.restored) and len(VERBS) > 100


@pytest.mark.parametrize('fault', FAULTS)
def test_a_story_with_logged_steps_cut_at_each_verb_loses_nothing(fault):
    cut_at_each_verb(LoggedStory, VERBS, fault, {'end-before': 1, 'end-after': 4, 'lost-before': 4})
