# SPDX-License-Identifier: Apache-2.0
"""A training loop and file traffic, whose daemon is killed at random moments, again and again."""
import os
import random
import subprocess
import time

import pytest

from conftest import SECONDS_MAX, wait_for
from programs import LONG, command
from training import Judge

KILLS = 200 if LONG else 20
GONE = 3    # exit status of a program whose mount went away
CALM = 2    # steps after the last kill


def said(name, *args, seconds=SECONDS_MAX):
    done = subprocess.run(command(name, *args), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=seconds)
    assert done.returncode == 0, f'{name}: exit {done.returncode}\n{done.stderr}'
    return done.stdout


class Journal:
    """The output of a program, in a file: lines from before its loss are there."""

    def __init__(self, path):
        self.path, self.at = path, 0
        path.touch()

    def count(self):
        return self.path.read_bytes().count(b'\n')

    def lines(self):
        """Those since the last call."""
        new = self.path.read_bytes()[self.at:]
        self.at += len(new)
        return new.decode().splitlines()

    def start(self, *args):
        with open(self.path, 'ab') as out:
            return subprocess.Popen(command(*args), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE)


class Loop:
    """Both programs on a mount, with their output."""

    def __init__(self, store, seed, words):
        self.store, self.seed = store, seed
        self.model, self.files = store.point / 'model', store.point / 'traffic'
        self.steps, self.traffic = Journal(store.folder / 'steps'), Journal(store.folder / 'traffic')
        self.judge = Judge()
        said('trainer', 'make', f'--words={words}', self.model)

    def killed_after(self, lines, seconds):
        """Kills after so many lines of output, and a little later."""
        running = [self.steps.start('trainer', 'run', self.model),
                   self.traffic.start('traffic', 'run', f'--first={self.judge.last_op + 1}', f'--seed={self.seed}', self.files)]
        enough = self.steps.count() * 16 + self.traffic.count() + lines
        wait_for(lambda: self.steps.count() * 16 + self.traffic.count() >= enough, 'progress')
        time.sleep(seconds)
        self.store.kill()
        for process in running:
            _, error = process.communicate(timeout=SECONDS_MAX)
            assert process.returncode == GONE, error

    def judged(self):
        self.judge.after_crash((self.steps.lines(), self.traffic.lines()), said('trainer', 'look', self.model),
                               said('traffic', 'look', self.files))


@pytest.mark.parametrize('words', ['', 'redo=on durable_every=50'])
def test_killed_at_random_moments(make_store, words):
    """Each time: fsck is clean, exactly the committed step and every fsynced file are there, and both go on from that.

    In the end each examined step has the very bits of an undisturbed run, without logged steps.
    """
    seed = int(os.environ.get('HITRAIN_SEED', random.SystemRandom().randrange(1 << 30)))
    print(f'HITRAIN_SEED={seed}')
    moments = random.Random(seed)
    store = make_store('192M')
    store.mount()
    loop = Loop(store, seed, words)
    for _ in range(KILLS):
        loop.killed_after(moments.randrange(120), moments.uniform(0, 0.05))
        store.assert_clean()
        store.mount('dram=16M' if moments.random() < 0.3 else 'dram=64M')
        loop.judged()
    last = loop.judge.step + CALM
    assert loop.steps.start('trainer', 'run', f'--until={last}', loop.model).wait(SECONDS_MAX) == 0
    loop.judged()
    assert loop.judge.step == last
    store.unmount()
    assert undisturbed(make_store, last).items() >= loop.judge.digests.items()
    print(f'{KILLS} kills, {loop.judge.under_way} while a commit was under way that then held, {last} steps, '
          f'{loop.judge.last_op} operations on files')


def undisturbed(make_store, last):
    """The digest of each step, of a store of its own."""
    model = make_store('192M').mount() / 'model'
    lines = said('trainer', 'make', '--digest', model)
    lines += said('trainer', 'run', '--digest', f'--until={last}', model, seconds=10 * SECONDS_MAX)  # the later the kills, the more steps
    return {int(words[1]): words[3] for words in map(str.split, lines.splitlines())}


# ----------------------------------------------------------- tests of the judge

SAID = ['write 1 2 0 5', 'done 1', 'replace 2 2', 'write 3 8 0 5', 'done 2', 'write 4 2 1 2', 'unlink 5 8']
LOOKS = 'file 2 2 4 2 2 2\nfile 8 3 0 0 0 0\n'


def verdict(step='step 7 digest a', files=LOOKS, said=SAID):
    try:
        Judge().after_crash((['step 7'], said), step, files)
    except AssertionError as e:
        return str(e).splitlines()[0]
    return None


@pytest.mark.parametrize('looks', [LOOKS, 'file 2 2 2 2 2 2', 'file 2 2 4 4 2 2\nfile 8', 'file 2 2 2 2 2 2\nfile 8 3 3 3 3 3'])
def test_the_judge_lets_pass_what_a_crash_may_leave(looks):
    assert verdict(files=looks) is None and verdict('step 8 digest b', looks) is None


@pytest.mark.parametrize('step,looks,reason', [
    ('step 6 digest a', LOOKS, 'step 7 was committed'),
    ('step 9 digest a', LOOKS, 'step 7 was committed'),
    ('step 7 digest a', '', 'f2 is gone'),
    ('step 7 digest a', 'file 2 1 1 1 1 1', 'of operation 1, 2 was durable'),
    ('step 7 digest a', 'file 2 2 2 2 2', 'has 4 blocks of 5'),
    ('step 7 digest a', 'file 2 0 2 2 2 2', 'of operation 0, 2 was durable'),
    ('step 7 digest a', 'file 2 4 2 2 2 2', 'of operation 4, which did not write it'),
    ('step 7 digest a', 'file 2 2 2 2 2 2\nfile 3 9', 'f3 was unlinked, or never made')])
def test_the_judge_sees_what_no_crash_may_leave(step, looks, reason):
    assert reason in verdict(step, looks)


def test_the_judge_sees_half_of_a_replacement():
    assert 'which replaced all' in verdict(said=SAID[:3], files='file 2 1 2 2 2 2')
