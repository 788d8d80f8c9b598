# SPDX-License-Identifier: Apache-2.0
"""A model goes to a vault and back beside one that trains, while programs and the daemon are killed again and again."""
import os
import random
import subprocess
import threading
import time

from conftest import BIN, SECONDS_MAX, run, wait_for
from programs import LONG
from test_archive import vault  # noqa: F401 (a fixture)
from test_cold_models import pins
from test_kills import CALM, GONE, Journal, said, undisturbed
from test_roots import word
from test_step_streams import content, make_model, step
from training import Judge

KILLS = 20 if LONG else 4
ELEMENTS = 1_200_000        # of each of two tensors: five blocks, the last one short
NAMES = 'w', 'deep/v'


class Week:
    """The model that is demoted and recalled, and one in another store that takes the same steps and is never cold."""

    def __init__(self, here, there, url):
        self.here, self.url = make_model(here, elements=ELEMENTS), url
        self.twin, self.steps = make_model(there, elements=ELEMENTS), 1
        for root in self.here, self.twin:
            step(root, 0, elements=ELEMENTS)
        self.follow(1)

    def follow(self, steps):
        """The twin goes on to this step."""
        for seed in range(self.steps, steps):
            step(self.twin, seed, elements=ELEMENTS)
        self.steps, self.want = steps, content(self.twin, *NAMES)

    def step(self):
        step(self.here, int(word(self.here, 'step')), elements=ELEMENTS)

    def step_or_fail(self):
        """The daemon may be killed meanwhile."""
        try:
            self.step()
        except OSError:
            pass

    def cold(self):
        try:
            return os.getxattr(self.here, 'user.hitrain.cold')
        except OSError:
            return b''

    def start(self):
        """A program that brings it back, or away."""
        words = ('recall', self.here) if self.cold() else ('demote', self.here, self.url)
        return subprocess.Popen([BIN / 'hitrainctl', *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def move(self):
        """To its end. How long that takes."""
        began, was = time.monotonic(), self.cold()
        with self.start() as program:
            _, told = program.communicate(timeout=SECONDS_MAX)
        assert program.returncode == 0 and bool(was) != bool(self.cold()), told
        return time.monotonic() - began

    def check(self, steps_more=0):
        """It has its name, and the bits of its step."""
        found = int(word(self.here, 'step'))
        assert self.steps <= found <= self.steps + steps_more and word(self.here, 'durable_step') == str(found)
        self.follow(found)
        assert content(self.here, *NAMES) == self.want


def test_kills_while_a_model_goes_to_the_vault_and_back(make_store, vault):  # noqa: F811
    """The program that demotes or recalls is killed, or the daemon, or both in turn; now and then the model takes a step at that time. Each
    time: fsck is clean, the model has its name and the bits of its step, and the model beside it has every committed step.
    """
    seed = int(os.environ.get('HITRAIN_SEED', random.SystemRandom().randrange(1 << 30)))
    print(f'HITRAIN_SEED={seed}')
    moments, cut = random.Random(seed), {'demote': 0, 'recall': 0}
    store = make_store('512M')
    week = Week(store.mount('dram=64M') / 'week', make_store('256M').mount() / 'week', f'{vault}/week')
    live, steps, judge = store.point / 'live', Journal(store.folder / 'steps'), Judge()
    said('trainer', 'make', live)
    takes = {'demote': week.move(), 'recall': week.move()}
    for number in range(KILLS):
        what = ('demote', 'recall')[number % 2]
        if bool(week.cold()) != (what == 'recall'):
            week.move()
        if what == 'demote':
            week.step()         # so there is something to archive
            week.check(1)
        trainer, at = steps.start('trainer', 'run', live), steps.count()
        wait_for(lambda: steps.count() > at, 'a step')
        program, training = week.start(), threading.Thread(target=week.step_or_fail)
        if number % 4 == 3:
            training.start()
        time.sleep(takes[what] * moments.uniform(0.2, 1))
        if moments.random() < 0.5:
            cut[what] += program.poll() is None
            program.kill()
            program.wait()
            if what == 'demote':
                week.check()
            time.sleep(moments.uniform(0, 0.3))
        if program.poll() is None:
            cut[what] += 1
        elif program.returncode == 0:
            takes[what] *= 0.7
        store.kill()
        _, told = program.communicate(timeout=SECONDS_MAX)
        assert program.returncode in (0, 1, -9) and 'Traceback' not in told, told
        _, told = trainer.communicate(timeout=SECONDS_MAX)
        assert trainer.returncode == GONE, told
        if training.ident:
            training.join(SECONDS_MAX)
        store.assert_clean()
        store.mount('dram=64M')
        week.check(1 if training.ident else 0)
        judge.after_crash((steps.lines(), []), said('trainer', 'look', live), '')
    week.move()
    if week.cold():
        week.move()
    week.check()
    assert sorted(os.listdir(store.point)) == ['live', 'week'] and os.listdir(week.here / '.hitrain/snap') == [] and pins(vault) == []
    run('hitrainctl', 'vault', 'verify', vault)
    last = judge.step + CALM
    assert steps.start('trainer', 'run', f'--until={last}', live).wait(SECONDS_MAX) == 0
    judge.after_crash((steps.lines(), []), said('trainer', 'look', live), '')
    store.unmount()
    assert undisturbed(make_store, last).items() >= judge.digests.items()
    print(f'{KILLS} kills of the daemon; {cut} ended in their middle; {last} steps beside them, {week.steps} of the model itself')
