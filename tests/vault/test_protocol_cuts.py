# SPDX-License-Identifier: Apache-2.0
"""A story over a vault, cut at each verb: two archivers of one job, a collector and a restorer. At the cut an archiver ends, or
an answer is lost, before or after the deed, or the deed lands late. Then the story goes on, with new processes for those that
ended. In the end each step that the head names is whole, and no step that was reported is gone."""
import pytest

from archiver import GRACE, Reader, manifest, new_lease, put_segments, segments_of
from world import World

import collect
import jobs
import objects
import writer
from errors import Missing
from lease import RESERVED, Lease
from objects import Failure

STEPS = 10, 20
TURNS_MAX = 4000
FAULTS = 'end-before', 'end-after', 'lost-before', 'lost-after', 'late'
# A verb that reads changes nothing, so the other two make the story of lost-before again. The value: of how many reads one is cut.
FAULTS_OF_READS = {'end-before': 1, 'end-after': 1, 'lost-before': 1}


class Story:
    def __init__(self, cut=None, fault=None):
        self.cut, self.kind, self.verbs, self.ended = cut, fault, [], None
        self.world, self.reported, self.restored = World(), set(), []
        self.vault = jobs.make_vault(self.world.seat(), GRACE)
        self.world.fault = self.choose

    def choose(self, actor, verb, key):
        if not actor:
            return None
        self.verbs.append(verb)
        if len(self.verbs) != self.cut:
            return None
        if self.kind in ('end-before', 'end-after'):
            self.ended = actor
            return None if self.kind == 'end-after' else 'lost-before'
        return self.kind

    def archiver(self, rank):
        store = bytes([rank + 1]) * 16

        def archive(seat, w, lease, step):
            if rank == 0:
                w.call(step)
            base = w.base()
            names = segments_of(seat, self.vault, 'job', base, rank) if base else []
            own = put_segments(seat, lease, 2)
            build = lambda epoch: [manifest(self.vault, 'job', step, epoch, rank, 2, names + own,       # noqa: E731
                                            (base.step, base.epoch) if base else (0, 0), store=store)]
            return w.commit(step, build, own)

        def work(seat):
            lease = new_lease(seat, self.vault, store)
            w = writer.Writer(seat, self.vault, 'job', rank, 2, 'host', store, seat.pause)
            for step in STEPS:
                if jobs.find(w._look(), step) and rank == 0:
                    continue
                while True:
                    try:
                        if archive(seat, w, lease, step):
                            self.reported.add((step, w.epoch))
                        break
                    except (writer.Restart, Missing):
                        pass
                    except writer.Wanted as e:
                        assert e.step in STEPS
                        if e.step > step:
                            break
                        archive(seat, w, lease, e.step)
        return work

    def collector(self, seat):
        for _ in range(3):
            try:
                collect.Collector(jobs.Patient(seat, seat.pause), self.vault).run()
            except Failure:
                pass

    def restorer(self, seat):
        """As often as it likes: the newest step of the head is there with the content that its step object promises."""
        patient = jobs.Patient(seat, seat.pause)
        while len(self.restored) < 3:
            try:
                entry, step = jobs.read_step(patient, self.vault, 'job')
            except Failure:
                seat.pause('')
                continue
            for s in step.summaries:
                of = jobs.read_summary(patient, self.vault, 'job', entry.step, entry.epoch, s.rank)[0]
                assert of == s
                for lease, n in segments_of(seat, self.vault, 'job', entry, s.rank):
                    assert bytes(patient.get(objects.key_segment(lease, n))) == b'segment %d/%d' % (lease, n)
            self.restored.append(entry.step)

    def run(self):
        world, start = self.world, {'rank 0': self.archiver(0), 'rank 1': self.archiver(1), 'collector': self.collector,
                                    'restorer': self.restorer}
        running = {name: world.actor(name, work) for name, work in start.items()}
        for turn in range(TURNS_MAX):
            live = [a for a in running.values() if not a.over]
            if not any(running[f'rank {r}'] in live for r in (0, 1)):
                break
            actor = live[turn % len(live)]
            world.go(actor)
            world.now += GRACE / 2000
            if self.ended:
                world.end(self.ended)
                name = self.ended.name
                running[name], self.ended = world.actor(name, start[name]), None
            if turn % 50 == 49:
                world.land()
            if running['collector'].over and turn % 20 == 0:
                running['collector'] = world.actor('collector', self.collector)
        else:
            # rank 1 alone may wait for a rank 0 that has nothing more to do
            assert running['rank 0'].over, 'the story hangs'
        world.land()
        world.end_all()
        return self

    def check(self):
        reader = Reader(self.world)
        head = reader.head('job')
        for entry in head.entries:
            reader.need_whole('job', entry.step, entry.epoch, 2)
        for step, epoch in self.reported:
            assert jobs.find(head, step), f'step {step} was reported'
        assert [e.step for e in head.entries][-1] == STEPS[-1]


def test_a_step_is_called_once_in_an_epoch():
    """What a rank put for an earlier call, maybe of a history that the job has left, does not count."""
    seat = World().seat()
    vault = jobs.make_vault(seat, GRACE)
    first, second = [writer.Writer(seat, vault, 'job', rank, 2, 'host', bytes([rank]) * 16, seat.pause) for rank in range(2)]
    assert second.called(0) is None
    first.call(10)
    assert (second.called(9).step, second.called(9).full) == (10, True)
    second.decline(10)
    assert second.called(9) is None
    epoch = first.epoch
    first.call(10)
    assert first.epoch == epoch + 1 and second.called(9).step == 10
    first.call(11)
    assert first.epoch == epoch + 1 and second.called(9).step == 11


def test_no_number_of_a_segment_is_used_twice(tmp_path):
    """Not when the program starts again, a collector has removed the segments, or the file is an older program's."""
    seat = World().seat()
    vault, seen = jobs.make_vault(seat, GRACE), set()
    def start_and_put(count):
        lease = Lease(seat, vault, b'S' * 16, b'B' * 16, 'host', tmp_path)
        numbers = put_segments(seat, lease, count)
        lease.close()
        assert len(seen | set(numbers)) == len(seen) + count, numbers
        seen.update(numbers)
        for key, _, _ in seat.list('seg/'):
            seat.remove(key)
        return numbers
    first = start_and_put(3)
    assert start_and_put(RESERVED + 1)[0][0] == first[0][0]
    file = next(tmp_path.iterdir())
    file.write_bytes(b'%08x\n' % first[0][0])
    start_and_put(1)
    file.write_bytes(b'%08x %04x\n' % (first[0][0], objects.SEGMENTS_OF_LEASE - 1))
    assert start_and_put(2)[1] == (first[0][0] + 2, 0)


def cut_at_each_verb(make, verbs, fault, of_reads=FAULTS_OF_READS):
    for cut, verb in enumerate(verbs, 1):
        if verb in ('get', 'list') and (fault not in of_reads or (cut - 1) % of_reads[fault]):
            continue
        try:
            make(cut, fault).run().check()
        except BaseException as e:
            raise AssertionError(f'verb {cut}, {fault}: {e!r}') from e


VERBS = Story().run().verbs


def test_the_whole_story_reports_and_restores():
    story = Story().run()
    story.check()
    assert {step for step, _ in story.reported} == set(STEPS) and story.restored and len(VERBS) > 100
    assert not any(o for o in story.world.late)


@pytest.mark.parametrize('fault', FAULTS)
def test_a_story_cut_at_each_verb_loses_nothing(fault):
    cut_at_each_verb(Story, VERBS, fault)
