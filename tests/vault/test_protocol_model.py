# SPDX-License-Identifier: Apache-2.0
"""Heads, fencing and collection of a vault, explored: the product's code in many actors whose verbs interleave at random.

Five archivers in three jobs, one of two ranks; a fork that takes segments of another job; operators that forget steps; a
pinner; two collectors. In another story two archivers with logged steps. Some sleep for days, answers are lost, deeds land late. After each deed: a reported step is listed or was
forgotten, and all that is listed or pinned is whole. Twins of the code that lack one rule must be caught.
"""
import random

import pytest

from archiver import GRACE, HOUR, Lost, Reader, manifest, new_lease, put_segments, segments_of
from world import World

import collect as gc
import heads
import jobs
import objects
import writer
from errors import Missing
from heads import FULL, LOGGED
from objects import Damage, Failure

ACTIONS, RUNS = 700, 25


class Story:
    def __init__(self, seed, swap=None):
        self.random, self.swap = random.Random(seed), swap or {}
        self.world = World()
        self.reader = Reader(self.world)
        self.reported, self.forgotten, self.pinned = {}, set(), {}
        self.counts = dict.fromkeys(('reported', 'logged', 'pinned', 'removed', 'restarts', 'fenced'), 0)
        self.vault = jobs.make_vault(self.world.seat(), GRACE)
        self.next_step = 0
        self.world.changed = self.check
        self.world.fault = self.choose_fault

    def choose_fault(self, actor, verb, key):
        if actor and verb == 'put_new' and self.random.random() < .03:
            return self.random.choice(['lost-before', 'lost-after', 'late'])
        return None

    def check(self, key):
        for (job, step, epoch), (ranks, full) in self.reported.items():
            head = self.reader.head(job)
            if not jobs.find(head, step, epoch):
                if (job, full) not in self.forgotten:
                    raise Lost(f'a reported step is not listed: {job} {step}.{epoch}')
            else:
                self.reader.need_whole(job, step, epoch, ranks)
        for job, step, epoch in self.pinned.values():
            self.reader.need_content(job, step, epoch, 1)

    # -- actors --

    def log(self, seat, w, lease, job, store):
        """A logged step after the newest one. False: there is none."""
        entries = w._look().entries
        full = next((e.step for e in reversed(entries) if e.kind == FULL), None)
        if full is None:
            return False
        after, own = (entries[-1].last, entries[-1].epoch), put_segments(seat, lease, 1)
        step = after[0] + 1
        try:
            if w.commit(step, lambda epoch: [manifest(self.vault, job, step, epoch, 0, 1, own, after, LOGGED, store)], own, after=after):
                self.reported[job, step, w.epoch] = 1, full
                self.counts['logged'] += 1
        except writer.Restart:
            self.counts['restarts'] += 1
        return True

    def archive(self, seat, w, lease, job, step, rank, ranks, store, fork):
        base = w.base()
        pin, names, named = None, [], (0, 0)
        patient = jobs.Patient(seat, seat.pause)
        if fork:
            pin = self.swap.get('pin', jobs).highest(patient, self.vault, fork).entries
            pin = self.random.choice(pin) if pin else None
            if pin:
                try:
                    (self.swap.get('pin') or jobs).pin(patient, self.vault, fork, pin, store, store, 'h')
                    names = segments_of(seat, self.vault, fork, pin)
                except (Failure, Missing):
                    jobs.unpin(patient, fork, pin, store)
                    return
        elif base and self.random.random() < .7:
            try:
                own = segments_of(seat, self.vault, job, base, rank)
            except Missing:
                return
            names, named = self.random.sample(own, self.random.randint(1, len(own))), (base.step, base.epoch)
        own = put_segments(seat, lease, self.random.randint(1, 2))
        try:
            if w.commit(step, lambda epoch: [manifest(self.vault, job, step, epoch, rank, ranks, names + own, named, store=store)], own):
                self.reported[job, step, w.epoch] = ranks, step
                self.counts['reported'] += 1
        except writer.Restart:
            self.counts['restarts'] += 1
        if pin:
            jobs.unpin(patient, fork, pin, store)

    def archiver(self, job, rank, ranks, store, fork=None):
        store = bytes([store]) * 16

        def steps():
            if ranks == 1:
                self.next_step += 10
                return self.next_step
            return 10 * self.rounds

        def work(seat):
            lease = new_lease(seat, self.vault, store)
            while True:
                try:
                    w = self.swap.get('Writer', writer.Writer)(seat, self.vault, job, rank, ranks, 'h', store, seat.pause)
                    for _ in range(self.random.randint(1, 8)):
                        if job == 'd' and self.random.random() < .7 and self.log(seat, w, lease, job, store):
                            continue
                        step = steps()
                        try:
                            self.archive(seat, w, lease, job, step, rank, ranks, store, fork if self.random.random() < .6 else None)
                        except writer.Wanted as e:
                            self.archive(seat, w, lease, job, e.step, rank, ranks, store, None)
                        self.rounds = max(self.rounds, step // 10 + 1) if ranks > 1 else self.rounds
                except (writer.Fenced, writer.Wanted):
                    self.counts['fenced'] += 1
        return work

    def operator(self, job):
        def work(seat):
            patient = jobs.Patient(seat, seat.pause)
            while True:
                entries = jobs.highest(patient, self.vault, job).entries
                if len(entries) > 1:
                    step = self.random.choice([e for e in entries if e.kind == FULL]).step
                    self.forgotten.add((job, step))
                    try:
                        jobs.forget(patient, self.vault, job, step)
                    except Failure:
                        pass
                seat.pause('')
        return work

    def pinner(self, job):
        store = bytes([99]) * 16

        def work(seat):
            patient = jobs.Patient(seat, seat.pause)
            while True:
                entries = jobs.highest(patient, self.vault, job).entries
                if not entries:
                    seat.pause('')
                    continue
                entry = self.random.choice(entries)
                try:
                    jobs.pin(patient, self.vault, job, entry, store, store, 'h')
                except Failure:
                    continue
                if (job, entry.step, entry.epoch) in self.reported:
                    self.pinned[store] = job, entry.step, entry.epoch
                    self.counts['pinned'] += 1
                for _ in range(self.random.randint(0, 20)):
                    seat.pause('')
                self.pinned.clear()
                jobs.unpin(patient, job, entry, store)
        return work

    def collector(self):
        def work(seat):
            while True:
                try:
                    done = self.swap.get('Collector', gc.Collector)(jobs.Patient(seat, seat.pause), self.vault).run()
                    self.counts['removed'] += done.segments + done.manifests
                except Failure:
                    pass
        return work

    def actors(self):
        return (('a1', self.archiver('a', 0, 1, 1)), ('a2', self.archiver('a', 0, 1, 2)),
                ('b1', self.archiver('b', 0, 1, 3, 'a')), ('b2', self.archiver('b', 0, 1, 4)),
                ('c0', self.archiver('c', 0, 2, 5)), ('c1', self.archiver('c', 1, 2, 6)),
                ('oa', self.operator('a')), ('ob', self.operator('b')), ('oc', self.operator('c')),
                ('p', self.pinner('a')), ('g1', self.collector()), ('g2', self.collector()))

    def run(self, actions):
        self.rounds = 1
        world, choose = self.world, self.random
        for name, work in self.actors():
            world.actor(name, work)
        usual = [3 if a.name[0] == 'g' else 1 for a in world.actors]
        weights = usual
        try:
            for _ in range(actions):
                if choose.random() < .012:
                    weights = [w * choose.choice([.002, .002, .3, 1, 4]) for w in usual]      # some sleep, some run
                world.now += GRACE / choose.choice([3, 10, 30] if choose.random() < .02 else [300])
                if world.late and choose.random() < .02:
                    world.land()
                world.go(choose.choices(world.actors, weights)[0])
        finally:
            world.end_all()
        return self.counts


class LoggedStory(Story):
    """Two archivers with --log in one job, one of which takes over from the other."""

    def actors(self):
        return (('d1', self.archiver('d', 0, 1, 7)), ('d2', self.archiver('d', 0, 1, 8)), ('od', self.operator('d')),
                ('g1', self.collector()), ('g2', self.collector()))


@pytest.fixture(autouse=True)
def few_heads(monkeypatch):
    """So that heads are removed while somebody sleeps."""
    monkeypatch.setattr(gc, 'HEADS_ABOVE', 3)


@pytest.mark.parametrize('story, counted', [(Story, ('reported', 'pinned', 'removed', 'restarts', 'fenced')),
                                            (LoggedStory, ('reported', 'logged', 'removed', 'restarts', 'fenced'))])
def test_all_rules_together_lose_nothing(story, counted):
    total = {}
    for seed in range(RUNS):
        for name, count in story(seed).run(ACTIONS).items():
            total[name] = total.get(name, 0) + count
    print(total)
    assert all(total[name] for name in counted), total
