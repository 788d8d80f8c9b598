# SPDX-License-Identifier: Apache-2.0
"""Each rule of the protocol has a story that loses a step without it: with the product's code nothing is lost, with the twin
that lacks the rule something is.
"""
import pytest

import test_protocol_model as model
import twins
from archiver import GRACE, Lost, Reader, manifest, new_lease, put_segments, segments_of
from world import World

import collect
import jobs
import writer
from objects import Failure

STORE, OTHER = bytes([1]) * 16, bytes([2]) * 16
SEEDS = 120


class Stage:
    """Job a has step 10, which is older than the grace. swap: the twin, by what it stands for."""

    def __init__(self, **swap):
        self.swap, self.world = swap, World()
        self.vault = jobs.make_vault(self.world.seat(), GRACE)
        self.reader, self.reported, self.pinned = Reader(self.world), [], []
        self.world.finish(self.archiver('first', 10, base=False))
        self.world.now += 2 * GRACE

    def archiver(self, name, step, base=True, job='a', fork=None, store=STORE):
        def work(seat):
            lease = new_lease(seat, self.vault, store)
            w = self.swap.get('Writer', writer.Writer)(seat, self.vault, job, 0, 1, name, store, seat.pause)
            names, named, pins = [], (0, 0), self.swap.get('pin', jobs)
            if fork:
                entry = jobs.highest(seat, self.vault, fork).entries[0]
                try:
                    pins.pin(seat, self.vault, fork, entry, store, store, 'host')
                except Failure:
                    return
                names = segments_of(seat, self.vault, fork, entry)
            elif base:
                entry = w.base()
                names, named = segments_of(seat, self.vault, job, entry), (entry.step, entry.epoch)
            own = put_segments(seat, lease, 1)
            try:
                if w.commit(step, lambda epoch: [manifest(self.vault, job, step, epoch, 0, 1, names + own, named, store=store)], own):
                    self.reported.append((job, step, w.epoch))
            except writer.Restart:
                pass
        return self.world.actor(name, work)

    def forget(self, step):
        jobs.forget(self.world.seat(), self.vault, 'a', step)

    def collector(self, name='collector'):
        def work(seat):
            try:
                self.swap.get('Collector', collect.Collector)(seat, self.vault).run()
            except Failure:
                pass
        return self.world.actor(name, work)

    def collect(self):
        self.world.finish(self.collector())

    def pin(self, step):
        entry = jobs.find(jobs.highest(self.world.seat(), self.vault, 'a'), step)
        jobs.pin(self.world.seat(), self.vault, 'a', entry, OTHER, OTHER, 'host')
        self.pinned.append(('a', step, entry.epoch))

    def check(self):
        for job, step, epoch in self.reported:
            if jobs.find(self.reader.head(job), step, epoch):
                self.reader.need_whole(job, step, epoch, 1)
        for job, step, epoch in self.pinned:
            self.reader.need_content(job, step, epoch, 1)


def base_is_forgotten_while_the_archiver_sleeps(stage):
    w = stage.archiver('w', 20)
    stage.world.go_to(w, 'put_new', 'seg/')
    stage.forget(10)
    stage.collect()
    stage.collect()
    stage.world.finish(w)


def base_is_forgotten_while_the_collector_sleeps(stage):
    c = stage.collector()
    stage.world.go_to(c, 'list', 'job/a/head/')
    stage.world.finish(stage.archiver('w', 20))
    stage.forget(10)
    stage.world.finish(c)


def another_collector_removes_the_manifest(stage):
    c = stage.collector('slow')
    stage.world.go_to(c, 'list', 'job/a/head/')
    stage.world.finish(stage.archiver('w', 20))
    stage.forget(10)
    stage.collect()
    stage.world.finish(c)


def a_pin_comes_before_the_heads_are_read(stage):
    c = stage.collector()
    stage.world.go_to(c, 'list', 'seg/')
    stage.pin(10)
    stage.forget(10)
    stage.world.finish(c)
    stage.collect()


def a_pin_comes_too_late(stage):
    w = stage.archiver('w', 20, job='b', fork='a', store=OTHER)
    stage.world.go_to(w, 'put_new', 'job/a/pin/')
    stage.forget(10)
    c = stage.collector()
    stage.world.go_to(c, 'remove', 'job/a/man/')
    stage.world.go_to(w, 'put_new', 'seg/') if 'pin' in stage.swap else stage.world.finish(w)
    stage.world.finish(c)
    stage.collect()
    stage.world.finish(w)


def a_forgotten_step_is_pinned_again(stage):
    stage.pin(10)
    entry = jobs.find(jobs.highest(stage.world.seat(), stage.vault, 'a'), 10)
    stage.forget(10)
    with pytest.raises(Failure):
        stage.swap.get('pin', jobs).pin(stage.world.seat(), stage.vault, 'a', entry, OTHER, OTHER, 'host')
    stage.collect()
    stage.collect()


def a_step_is_half_written(stage):
    w = stage.archiver('w', 20)
    stage.world.go_to(w, 'put_new', 'job/a/step/')
    c = stage.collector()
    stage.world.go_to(c, 'list', 'job/a/pin/')
    stage.world.finish(w)
    stage.world.finish(c)


STORIES = [(a_step_is_half_written, {'Collector': twins.OwnClock}),
           (base_is_forgotten_while_the_archiver_sleeps, {'Writer': twins.AnyBase}),
           (base_is_forgotten_while_the_collector_sleeps, {'Collector': twins.OneRun}),
           (another_collector_removes_the_manifest, {'Collector': twins.GoneIgnored}),
           (a_pin_comes_before_the_heads_are_read, {'Collector': twins.PinsFirst}),
           (a_pin_comes_too_late, {'pin': twins.PinUnchecked}),
           (a_forgotten_step_is_pinned_again, {'pin': twins.PinRemoved})]


@pytest.mark.parametrize('story, twin', STORIES, ids=[s.__name__ for s, _ in STORIES])
def test_a_story_that_needs_one_rule(story, twin):
    sound = Stage()
    story(sound)
    sound.check()
    broken = Stage(**twin)
    with pytest.raises(Lost):
        story(broken)
        broken.check()


@pytest.mark.parametrize('twin', [twins.NoLook, twins.OldSegments, twins.OldManifests, twins.NotReady, twins.AgesLast, twins.NamedOnly,
                                  twins.SegmentsLater, twins.LastOfRun], ids=lambda twin: twin.__name__)
def test_random_stories_find_what_a_twin_lacks(twin, monkeypatch):
    monkeypatch.setattr(collect, 'HEADS_ABOVE', 3)
    kind = 'Writer' if issubclass(twin, writer.Writer) else 'Collector'
    story = model.LoggedStory if twin is twins.LastOfRun else model.Story
    with pytest.raises(Lost):
        for seed in range(SEEDS):
            story(seed, {kind: twin}).run(2500)
