# SPDX-License-Identifier: Apache-2.0
"""`hitrainctl archive ROOT URL/JOB --follow`: goes on, with each M-th kept step, and with --log each logged step between.

It takes the newest step when it is free, and never queues: a slow vault costs steps there and nothing here. One that is
too far behind the logged steps archives a full step and goes on. With several ranks rank 0 says which full step comes,
and the other ones archive that, if they keep it. A vault that is silent, full or gone makes it wait; lines
on standard error say so (vault-behind), at most once an hour. Another archiver of this rank ends it (vault-fenced).
"""
import errno
import os
import time

from archive import to_vault
from changes import Files, Moved, is_half_made, need_logging, state_of
from control import open_ctl, tell
from errors import EngineError, NoProgram
from kept import Kept, names_of, open_folder
from lease import Lease
from logged import Gone, Logged
from objects import Damage, Failure
from places import Owner
from probe import need_create
from say import error, note
from writer import Fenced, Restart, Wanted, Writer
import engine
import heads
import identity
import jobs
import logged_vault
import stop
import words

POLL_S, POLL_LOGGED_S = 0.2, 0.005
PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 5
LOOK_S_MIN, LOOK_S_MAX = 0.2, 5     # of the other ranks, for what rank 0 calls
BEHIND_S, BEHIND_AGAIN_S = 60, 3600
SNAPSHOT = 'hitrain-archive'
FENCED = 3                  # exit status: a unit that restarts it must not fight for the job


class Busy(Failure):
    """A step is open, or a trainer has claimed the model: it has to end first."""


class Pause:
    """pause(why): waits for a vault or for other ranks, ever longer. A signal ends it."""

    def __init__(self, url, step_of):
        self.url, self.step_of, self.told_at = url, step_of, None
        self.reset()

    def reset(self):
        self.since, self.wait = None, PAUSE_S_MIN

    def __call__(self, why):
        now = time.monotonic()
        self.since = self.since or now
        if now - self.since >= BEHIND_S and (self.told_at is None or now - self.told_at >= BEHIND_AGAIN_S):
            self.told_at = now
            note(f'vault-behind: {self.step_of()} waits for {self.url} since {int((now - self.since) / 60)} min: {why}')
        end = now + self.wait
        self.wait = min(2 * self.wait, PAUSE_S_MAX)
        while time.monotonic() < end:
            stop.check()
            time.sleep(min(stop.LOOK_S, max(0, end - time.monotonic())))
        stop.check()


class Archiver:
    """One rank. One thread, and those that put segments."""

    def __init__(self, root, url, o):
        self.root, self.every, self.log, self.rate = os.path.realpath(root), o['every'] or 1, bool(o['log']), o['rate']
        self.rank, self.ranks = o['rank'] or (0, 1)
        self.compress = bool(o['compress'])
        place, self.job, at = engine.split_job(url)
        if at is not None:
            raise words.Usage('expected URL/JOB without a step')
        if self.log:
            need_logging(self.root)
        self.engine, self.url = engine.open(place), engine.shown(url)
        self.single_writer, self.trying = bool(o['single_writer']), None
        self.pause = Pause(self.url, lambda: f'step {self.trying}' if self.trying is not None else self.root)
        self.files = self.lineage = self.done = self.known = self.half_made = None
        self.look_at, self.look_wait, self.quiet = 0, LOOK_S_MIN, None     # quiet: an epoch in which rank 0 calls no full step

    def connect(self):
        host, store = identity.host(), identity.store(self.root)
        self.vault = self.patient(lambda: jobs.open_vault(self.engine))
        if not self.single_writer:
            self.patient(lambda: need_create(self.engine))
        self.lease = self.patient(lambda: Lease(self.engine, self.vault, store, identity.boot(), host, identity.LEASES, self.pause))
        self.writer = self.patient(lambda: Writer(self.engine, self.vault, self.job, self.rank, self.ranks, host, store, self.pause,
                                                  self.single_writer))

    def patient(self, call):
        """call(), again while the engine refuses, is full or has no place, until that is mended."""
        while True:
            try:
                result = call()
                self.pause.reset()
                return result
            except NoProgram:
                raise
            except EngineError as e:
                self.pause(e)

    def run(self):
        self.connect()
        while True:
            stop.check()
            try:
                try:
                    did = self.turn()
                except Wanted as e:
                    did = self.give(e)
                self.pause.reset()
            except Restart as e:
                note(f'{self.job}: {e}; it is archived again')
                self.pause(e)
                continue
            except Wanted:
                continue            # rank 0 has gone on to another one
            except NoProgram:
                raise
            except (EngineError, Gone, Busy) as e:
                self.pause(e)
                continue
            if not did:
                time.sleep(POLL_LOGGED_S if self.log else POLL_S)

    # ---- what is next ----

    def turn(self):
        """True: something was archived."""
        if self.rank:
            return self.turn_called()
        return self.turn_logged() if self.log else self.turn_kept()

    def turn_called(self):
        """Of the other ranks: what rank 0 calls, or a logged step that follows, in an epoch in which nothing is called."""
        if self.log and self.writer.epoch == self.quiet:
            state, entry = state_of(self.root), self.newest()
            # In a new epoch rank 0 may call a full step first, and a logged one that is there already would be of another history.
            if entry and entry.epoch == self.writer.epoch and self.lineage == state.lineage and state.first <= entry.last + 1 <= state.last:
                if self.logged(entry.last + 1):
                    return True
                self.look_at = 0
        now, known = time.monotonic(), names_of(self.root)
        if known != self.known:
            self.look_at, self.look_wait = 0, LOOK_S_MIN
        if now < self.look_at:
            return False
        self.known, self.look_at = known, now + self.look_wait
        self.look_wait = min(2 * self.look_wait, LOOK_S_MAX)
        wanted = self.writer.called(min((kept.step for kept in self.all_kept()), default=self.number()))
        if wanted and (wanted.full or not self.log):
            self.quiet = None
            if self.give(wanted):
                self.look_at, self.look_wait = 0, LOOK_S_MIN
                return True
            return False
        self.quiet = self.writer.epoch
        return bool(wanted and self.give(wanted))

    def number(self, word=b'step'):
        return int(os.getxattr(self.root, b'user.hitrain.' + word))

    def turn_kept(self):
        kept = self.newest_kept(lambda step: step % self.every == 0)
        if not kept or (kept.step, kept.lineage()) == self.done:
            return False
        digest = kept.digest()
        if digest and self.writer.has(kept.step, digest):
            self.done = kept.step, kept.lineage()
            return False
        return self.full(kept)

    def turn_logged(self):
        state, entry = state_of(self.root), self.newest()
        if not entry or self.lineage != state.lineage:
            return self.full_now(state)
        if entry.kind == heads.LOGGED and entry.last % self.every == 0:
            kept = self.newest_kept(lambda step: step == entry.last)
            if kept and kept.lineage() == self.lineage and (kept.step, self.lineage) != self.done:
                return self.full(kept)
        if not state.last or entry.last >= state.last:
            return False
        if entry.last + 1 < state.first:
            return self.full_now(state)
        if self.logged(entry.last + 1):
            return True
        if self.ranks > 1:
            self.lineage = None     # a rank has no logged step that follows: a full one is next
        return False

    def newest(self):
        """The newest entry of the job, and its lineage in this rank."""
        head = self.writer.head
        entry = head.entries[-1] if head.entries else None
        if entry and self.of != (entry.last, entry.epoch):
            step = jobs.read_step_object(self.engine, self.vault, self.job, entry.last, entry.epoch, entry.sum)
            mine = step.summaries[self.rank] if self.rank < len(step.summaries) and len(step.summaries) == self.ranks else None
            self.lineage, self.of = mine and mine.lineage, (entry.last, entry.epoch)
        return entry

    of = None

    def all_kept(self):
        """Kept steps, the newest first."""
        for name in reversed(names_of(self.root)):
            if name == SNAPSHOT:
                continue
            try:
                yield Kept(self.root, name)
            except Failure:
                continue            # it expired meanwhile

    def newest_kept(self, fits):
        return next((kept for kept in self.all_kept() if fits(kept.step)), None)

    def full_now(self, state):
        """The newest kept step from which the logged ones go on, or the present one, which is kept for that."""
        kept = self.newest_kept(lambda step: True)
        if kept and kept.lineage() == state.lineage and (not state.first or kept.step + 1 >= state.first):
            return self.full(kept)
        return self.full_present()

    def full_present(self):
        state = state_of(self.root)
        if is_half_made(self.root, state):
            if state.lineage != self.half_made:
                note(f'{self.root} is half-made: nothing is archived until its maker commits it, or its attribute user.hitrain.making is removed')
            self.half_made = state.lineage
            return False
        self.command(f'forget {SNAPSHOT}', errno.ENOENT)
        self.command(f'snapshot {SNAPSHOT} if=0')   # without the condition it would end a step that is open
        try:
            return self.full(Kept(self.root, SNAPSHOT))
        finally:
            self.command(f'forget {SNAPSHOT}', errno.EBUSY, errno.ENOENT)

    def command(self, line, *fine):
        try:
            ctl = open_ctl(open_folder(os.path.realpath(self.root)))
        except OSError as e:
            raise Failure(f'{self.root}: {e.strerror}') from None
        try:
            tell(ctl, line.encode())
        except OSError as e:
            if e.errno not in fine:
                raise (Busy if e.errno in (errno.EBUSY, errno.ESTALE) else Failure)(f'{self.root}: {line}: {e.strerror}') from None

    # ---- one step ----

    def full(self, kept):
        self.trying = kept.step
        if not self.rank:
            self.writer.call(kept.step, anew=self.log)
        try:
            summary, listed = to_vault(self.root, kept, self.engine, self.vault, self.writer, self.lease, self.rate, self.compress)
        except (EngineError, Restart, Fenced):
            raise
        except Failure:
            if kept.is_there():
                raise
            return False            # it expired meanwhile: the newest one is next
        self.done = kept.step, kept.lineage()
        if listed:
            note(f'archived step {kept.step}: {summary.bytes} bytes, {summary.new} new')
            self.files = Files(self.root, kept.folder) if self.log else None
        elif not self.rank and self.ranks > 1 and kept.is_there():
            raise Restart(f'step {kept.step} is not in the stores of all ranks, which keep what they all have by retain=')
        return listed

    def logged(self, step):
        self.trying, entry = step, self.newest()
        log = Logged(self.root, step)
        try:
            if log.lineage != self.lineage:
                return False        # a rollback in between: the next look sees it
            if not self.files:
                self.files = Files(self.root)
            owner = Owner(self.job, step, self.writer.epoch, self.rank)
            shards, epoch = (self.shards() or b'').decode(), self.writer.epoch
            return logged_vault.to_vault(log, log.items(self.files.path_of), lambda: self.files.changed(step), self.vault, self.writer,
                                         self.lease.put, owner, (entry.last, entry.epoch), shards, self.rate,
                                         lambda: self.ranks == 1 or self.writer.epoch == epoch and state_of(self.root).lineage == log.lineage)
        except Moved as e:
            note(f'{e}; a full step is archived instead')
            self.files = None
            return self.full_now(state_of(self.root)._replace(first=step + 1))
        except Damage:
            raise
        except Restart:
            self.files = None       # what changed was read, and is in no step
            raise
        finally:
            log.close()

    def shards(self):
        try:
            return os.getxattr(self.root, b'user.hitrain.shards')
        except OSError:
            return None

    def give(self, wanted):
        """Rank 0 archives this step. One to which this rank has yet to come is waited for."""
        step, entry = wanted.step, self.newest()
        if not wanted.full:
            if self.log and entry and step == entry.last + 1 and state_of(self.root).lineage == self.lineage:
                try:
                    return self.logged(step)
                except Gone:
                    pass
            if self.number(b'durable_step') < step:
                return False
        else:
            kept = self.newest_kept(lambda number: number == step)
            if kept:
                return self.full(kept)
            present = self.number()
            if present == step and self.full_present():
                return True
            if present <= step:
                return False
        self.writer.decline(step)
        return False


def run(root, url, o):
    stop.catch()
    archiver = None
    try:
        archiver = Archiver(root, url, o)
        archiver.run()
    except stop.Stopped:
        return 0
    except Fenced as e:
        error(f'vault-fenced: {e}')
        return FENCED
    finally:
        if archiver:
            archiver.engine.close()
