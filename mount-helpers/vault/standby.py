# SPDX-License-Identifier: Apache-2.0
"""`hitrainctl restore URL/JOB DIR --follow`: keeps DIR at the newest step of the job. It computes logged steps again; where they
do not lead from DIR's step to the newest one, it restores that beside DIR and exchanges the two.
"""
import ctypes
import errno
import json
import os
import shutil
import sys
import time

from apply import Begin, Copy
from errors import EngineError, NoProgram
from objects import Damage, Failure
from restore import from_manifest, manifests
from say import note
import archived
import engine
import heads
import jobs
import logged_vault
import stop

BESIDE = '.hitrain-next-'       # before the name: the copy that is to take it, and then the one that had it
LEFT_S = 5                      # that this one stays there
POLL_S = 0.1
WAIT_S_MAX = 5
RENAME_EXCHANGE = 2
AT_FDCWD = -100


class Standby:
    def __init__(self, vault_engine, vault, job, path, rank=(0, 1), say=lambda step, newest: None):
        self.engine, self.vault, self.job, self.path = vault_engine, vault, job, path
        self.rank, self.ranks = rank
        self.say, self.copy = say, None
        above, name = os.path.split(path.rstrip('/'))
        self.beside, self.left_at = os.path.join(above, f'{BESIDE}{name}'), None

    # ---- what the job has ----

    def chain(self, head, step):
        """[Step] of logged steps from step on, or []. All but the last are proven by the one after them."""
        for entry in reversed(head.entries):
            if entry.kind != heads.LOGGED or not entry.step <= step <= entry.last or entry.ranks != self.ranks:
                continue
            steps = [jobs.read_step_object(self.engine, self.vault, self.job, entry.last, entry.epoch, entry.sum)]
            while steps[-1].step > step:
                steps.append(jobs.read_step_object(self.engine, self.vault, self.job, steps[-1].step - 1, entry.epoch, steps[-1].before))
            return steps[::-1]
        return []

    def follows(self, step):
        """Is this logged step the next one of the copy?"""
        place, summary = self.copy.place, step.summaries[self.rank]
        if not place.sum:
            return False
        if place.lineage and summary.lineage == place.lineage:
            return True
        try:
            before = jobs.read_step_object(self.engine, self.vault, self.job, *summary.base, step.before)
        except Damage:
            return False
        return before.summaries[self.rank].digest == place.sum

    def is_newest(self, entry):
        """The copy is at the newest step of the job."""
        if entry.last != self.copy.step:
            return False
        step = jobs.read_step_object(self.engine, self.vault, self.job, entry.last, entry.epoch, entry.sum)
        summary, place = step.summaries[self.rank], self.copy.place
        return bool(place.sum) and (summary.digest == place.sum or bool(summary.lineage) and summary.lineage == place.lineage)

    # ---- what is done ----

    def turn(self):
        """True: the copy has moved on."""
        head = jobs.highest(self.engine, self.vault, self.job)
        if not head.entries:
            return False
        if not os.path.lexists(self.path):
            self.make(head, self.path)
            self.copy = None
        if not self.copy:
            self.copy = Copy(self.path)
        newest = head.entries[-1]
        if self.is_newest(newest):
            return False
        steps = self.chain(head, self.copy.step + 1)
        if steps and self.follows(steps[0]):
            for step in steps:
                self.compute(step, newest.last)
            return True
        return self.renew(head)

    def compute(self, step, newest):
        items = logged_vault.FromVault(self.engine, self.vault.uuid, self.job, step.step, step.epoch, step.summaries[self.rank])
        self.copy.apply(step.step, items)
        self.say(step.step, newest)

    def make(self, head, path, base_root=None):
        """A new model at the newest full step."""
        entry = next((e for e in reversed(head.entries) if e.kind == heads.FULL and e.ranks == self.ranks), None)
        if not entry:
            raise Failure(f'{self.job} has no full step of {self.ranks} ranks')

        step = jobs.read_step_object(self.engine, self.vault, self.job, entry.step, entry.epoch, entry.sum)
        manifest = archived.OfManifest(self.engine, self.vault.uuid, self.job, entry.step, entry.epoch, step.summaries[self.rank])
        others = manifests(self.engine, self.vault, self.job, self.rank, self.ranks) if base_root else ()
        from_manifest(path, manifest, entry.step, base_root, others, Begin)
        self.say(entry.step, head.entries[-1].last)

    def renew(self, head):
        """The steps of the job do not lead on from the copy: a new one takes its name."""
        entry = next((e for e in reversed(head.entries) if e.kind == heads.FULL and e.ranks == self.ranks), None)
        if not self.copy.place.sum:
            raise Failure(f'{self.path}: it is no copy of {self.job}, or has taken steps of its own: name another directory')
        if not entry or entry.last == self.copy.step and self.is_newest(entry):
            return False
        remove(self.beside)
        self.make(head, self.beside, self.path)
        self.copy.close()
        self.copy = None
        exchange(self.beside, self.path)
        self.left_at = time.monotonic()
        note(f'{self.path}: restored step {entry.step} anew: no logged steps lead to it')
        return True

    def tidy(self, at_once=False):
        """Removes the former copy. A reader that is on its way to a file of it, by the name of the copy, arrives."""
        if at_once or self.left_at is not None and time.monotonic() - self.left_at >= LEFT_S:
            self.left_at = None
            remove(self.beside)


def exchange(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE):
        raise Failure(f'{a}, {b}: {os.strerror(ctypes.get_errno())}')


def remove(path):
    """A model root of an earlier copy, with its kept steps."""
    try:
        ctl = os.open(f'{path}/.hitrain/ctl', os.O_RDWR | os.O_CLOEXEC)
    except OSError as e:
        if e.errno == errno.ENOENT and not os.path.lexists(path):
            return
        raise Failure(f'{path}: it is no copy that was left here; remove it') from None
    try:
        os.getxattr(path, b'user.hitrain-follow')
        os.write(ctl, b'forget *\n')
    except OSError as e:
        if e.errno == errno.ENODATA:
            raise Failure(f'{path}: it is no copy that was left here; remove it') from None
    finally:
        os.close(ctl)
    shutil.rmtree(path)


def reporter(path, as_json):
    def say(step, newest):
        if as_json:
            print(json.dumps({'path': path, 'step': step, 'newest': newest}), flush=True)
        elif os.isatty(2):
            print(f'\r\033[Kstep {step}, {max(newest - step, 0)} behind', end='', file=sys.stderr, flush=True)
    return say


def run(url, path, o):
    stop.catch()
    place, job, at = engine.split_job(url)
    if at is not None:
        raise Failure('a standby has no last step: expected URL/JOB')
    wait = POLL_S
    with engine.open(place) as e:
        standby, said = None, ''
        while not stop.is_asked():
            try:
                if not standby:
                    standby = Standby(e, jobs.open_vault(e), job, path, o.get('rank') or (0, 1), reporter(path, o['json']))
                    standby.tidy(at_once=True)      # what a program that was killed left
                wait = POLL_S
                standby.tidy()
                if standby.turn():
                    continue
            except stop.Stopped:
                break
            except NoProgram:
                raise
            except EngineError as why:      # the vault answers again, or is mended
                if str(why) != said:
                    note(str(why))
                said, wait = str(why), min(2 * wait, WAIT_S_MAX)
            except jobs.Gone:               # a collector removed what a newer head does not list
                pass
            end = time.monotonic() + wait
            while time.monotonic() < end and not stop.is_asked():
                time.sleep(min(POLL_S, wait))
        if standby and standby.left_at is not None:
            standby.tidy(at_once=True)
    return 0
