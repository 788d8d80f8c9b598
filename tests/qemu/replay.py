# SPDX-License-Identifier: Apache-2.0
"""Checks on this machine the images at every flush of a recorded boot, one by one: as they were, and as a cut just
before could have left them."""
import copy
import subprocess
import time

import writelog
from lab import DEVICE_BYTES, OPTIONS, UNITS, Failure
from machine import BUILD

SECONDS_MAX = 120
TELL_SECONDS = 10


def program(name, *args):
    done = subprocess.run([str(BUILD / name), *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=SECONDS_MAX)
    if done.returncode:
        raise Failure(f'{name}: exit {done.returncode}\n{done.stdout}')
    return done.stdout


class Mounted:
    """A store on this machine, mounted while the body runs."""

    def __init__(self, point, *devices):
        self.point, self.devices = point, devices

    def __enter__(self):
        program('bin/hitrain', *self.devices, self.point, *OPTIONS.split())
        return self.point

    def __exit__(self, *_):
        subprocess.run(['umount', str(self.point)], check=True, timeout=SECONDS_MAX)


class Replay:
    """durable: the images up to the last flush; state: those that are looked at."""

    def __init__(self, lab, folder):
        self.lab, self.point = lab, folder / 'mnt'
        self.point.mkdir()
        self.durable, self.state = ([folder / f'{name}{i}' for i in range(len(UNITS))] for name in ('durable', 'state'))
        for image, durable in zip(lab.images, self.durable):
            writelog.copy(image, durable)
        self.log = writelog.WriteLog(lab.watch.logs[0])
        self.states = self.lost = 0
        self.steps = set()

    def take(self):
        for durable, state in zip(self.durable, self.state):
            state.unlink(missing_ok=True)   # the last daemon may still be writing its good-bye
            writelog.copy(durable, state)
        return writelog.Images(self.state, DEVICE_BYTES)

    def look(self, position):
        said, step_max = self.lab.said_at(self.lab.watch.at(position))
        program('bin/hitrain-fsck', '-n', *self.state)
        with Mounted(self.point, *self.state) as point:
            judge = copy.deepcopy(self.lab.judge)
            judge.after_crash(said, program('tests/programs/trainer', 'look', point / 'model'),
                              program('tests/programs/traffic', 'look', point / 'traffic'), step_max)
        self.states += 1
        self.steps.add(judge.step)
        self.lab.judge.digests.update(judge.digests)

    def with_losses(self, pending, flush):
        images = self.take()
        self.lost += writelog.apply_some(images, self.log, pending, min(UNITS), self.lab.random)
        images.close()
        self.look(flush.begin)

    def whole(self, pending, flush):
        durable = writelog.Images(self.durable, DEVICE_BYTES)
        for entry in pending:
            durable.apply(self.log, entry)
        durable.close()
        self.take().close()
        self.look(flush.end)

    def run(self, say):
        flushes, done, begin, told = self.log.flushes(), 0, time.monotonic(), 0.0
        for number, at in enumerate(flushes, 1):
            for kind in (self.with_losses, self.whole):
                try:
                    kind(self.log.entries[done:at], self.log.entries[at])
                except (AssertionError, Failure) as e:
                    raise Failure(f'flush {number} of {len(flushes)}, {kind.__name__}: {e}') from e
            done = at + 1
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                say(f'replay: flush {number} of {len(flushes)}, step {max(self.steps)}')
        self.log.close()
        say(f'replay: {self.states} states at {len(flushes)} flushes of {len(self.log.entries)} requests are right, '
            f'{self.lost} writes lost on the way, steps {min(self.steps)} to {max(self.steps)}, {time.monotonic() - begin:.0f} s')
        if len(self.steps) < 2:
            raise Failure('the recording has no whole step')


def undisturbed(folder, last):
    """The digest of each step of an undisturbed store on this machine."""
    image, point = folder / 'calm', folder / 'calm.mnt'
    point.mkdir()
    program('bin/mkfs.hitrain', '--size=192M', image)
    with Mounted(point, image):
        lines = program('tests/programs/trainer', 'make', '--digest', point / 'model') + \
            program('tests/programs/trainer', 'run', '--digest', f'--until={last}', point / 'model')
    return {int(words[1]): words[3] for words in map(str.split, lines.splitlines())}
