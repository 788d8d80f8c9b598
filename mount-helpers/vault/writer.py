# SPDX-License-Identifier: Apache-2.0
"""The archiver of one rank and its job (docs/vault-format.md, "Protocol").

    manifest --own segments young--> ready, wait --rank 0: all are ready--> step object -> head -> look -> manifests young --> listed
        ^         old: Restart          |                                                    |            old: forgotten, Restart
        '--another epoch of this job----'--another job, another number of ranks: Fenced------'

Rank 0 calls a full step before it reads it, and the other ranks archive what it calls: so all archive one step, however their
stores differ. `still` says before a rank commits itself that its store has not left the history of which it tells.

Epochs: rank 0 opens one when it starts. The other ranks take the epoch of the head they see. Who finds a key of its own with
other bytes opens the next one in the name of rank 0, and all put their manifests again.
"""
import os

import heads
import jobs
import objects
from errors import Missing
from heads import FULL, LOGGED, NONE, NOTHING, Summary
from jobs import CALLED, READY, find, highest, next_of, put_head
from objects import Failure

EPOCHS_OF_STEP_MAX = 4      # more in one step: two archivers of one rank work against each other


class Fenced(Failure):
    """Another archiver has taken over. This one ends."""


class Restart(Failure):
    """The step must be archived again, with another base: what it names may be gone."""


class Wanted(Exception):
    """Rank 0 archives another step: give that one, or decline it. full: it called it, so it is not logged."""

    def __init__(self, step, full):
        super().__init__(step)
        self.step, self.full = step, full


class Writer:
    """pause(why) is called while others are waited for; it sleeps, or raises. gives: it gives other steps that rank 0 calls.
    One thread."""

    def __init__(self, engine, vault, job, rank, ranks, host, store, pause, single_writer=False, gives=True):
        if not objects.is_job(job):
            raise Failure(f'{job!r} is no name of a job: 1 to 64 of A-Z, a-z, 0-9, dot, line and dash, and not dots alone')
        if not 0 <= rank < ranks <= objects.RANKS_MAX:
            raise Failure(f'there is no rank {rank} of {ranks}')
        self.engine, self.vault, self.job = jobs.Patient(engine, pause), vault, job
        self.rank, self.ranks, self.host, self.store, self.pause = rank, ranks, host, store, pause
        self.gives = gives
        self.flags = heads.SINGLE_WRITER if single_writer else 0
        self.answered = set()       # steps of this epoch for which this rank has put a manifest
        self.opener, self.epoch, self.head = None, 0, None
        if rank == 0:
            self._open_epoch(os.urandom(16))
        else:
            self._wait_for_job()

    # -- epochs --

    def _look(self):
        self.head = highest(self.engine, self.vault, self.job, known=self.head.n if self.head else 0)
        return self.head

    def _open_epoch(self, opener):
        head, after = self._look(), self.epoch
        while True:
            if after and not self._is_in_epoch(head):
                return          # somebody has opened another one meanwhile: under that the key is free
            drop = self._broken(head) if self.rank == 0 and not self.epoch else ()
            self.head = put_head(self.engine, self.vault, self.job, next_of(
                head, epoch=head.epoch + 1, opener=opener, ranks=self.ranks, flags=self.flags, writer=self.host,
                entries=tuple(e for e in head.entries if e not in drop)))
            head = self.head
            if head.opener == opener and head.epoch > after:
                self._take_epoch(head)
                return

    def _broken(self, head):
        """Entries whose objects are gone: an archiver stood still for a day before its head, and then ended."""
        if not head.entries:
            return ()
        there = {numbers[:3] for numbers, _ in jobs.list_manifests(self.engine, self.job) if numbers[3] == 0}
        gone, follows = [], False
        for entry in head.entries:
            keys = [(s, entry.epoch, rank) for s in {entry.step, entry.last} for rank in range(entry.ranks)]
            # A list may be behind: what it lacks is asked for by name.
            broken = any(key not in there and self._is_gone(*key) for key in keys)
            follows = broken or follows and entry.kind == LOGGED
            if follows:
                gone.append(entry)
        return gone

    def _is_gone(self, step, epoch, rank):
        try:
            self.engine.get(objects.key_manifest(self.job, step, epoch, rank), 0, objects.HEADER_BYTES)
        except Missing:
            return True
        return False

    def _wait_for_job(self):
        while True:
            head = self._look()
            if head.epoch and head.ranks == self.ranks:
                return self._take_epoch(head)
            self.pause(f'rank 0 of {self.ranks} has not begun job {self.job}')

    def _take_epoch(self, head):
        self.opener, self.epoch = head.opener, head.epoch
        self.answered.clear()

    def _fenced(self, head):
        return Fenced(f'{self.job} is at epoch {head.epoch}, of {head.writer or "another archiver"} with {head.ranks} ranks; this '
                      f'archiver of rank {self.rank} of {self.ranks} is of epoch {self.epoch} and ends')

    def _is_in_epoch(self, head):
        """False: the job goes on under another epoch, which this rank takes."""
        if head.epoch == self.epoch and head.opener == self.opener:
            return True
        if head.ranks != self.ranks or self.rank == 0 and head.opener != self.opener:
            raise self._fenced(head)
        self._take_epoch(head)
        return False

    # -- steps --

    def base(self):
        """The newest full step, whose segments a manifest may name; None if there is none."""
        return next((e for e in reversed(self._look().entries) if e.kind == FULL and e.ranks == self.ranks), None)

    def has(self, step, digest):
        """The newest full step is this one, with these bits in this rank."""
        entry = self.base()
        if not entry or entry.step != step:
            return False
        found = jobs.read_step_object(self.engine, self.vault, self.job, step, entry.epoch, entry.sum)
        return found.summaries[self.rank].digest == digest

    def call(self, step, anew=False):
        """Of rank 0: the other ranks learn which full step comes. In one epoch a step is called once: what a rank has put for an
        earlier call may be of a history that the job has left. anew: so may be what ranks have put for logged steps."""
        anew = anew or step in self.answered        # as a logged one
        while self.ranks > 1:
            epoch = self.epoch + anew
            is_new = self.engine.put_new(objects.key_manifest(self.job, step, epoch, 0, CALLED),
                                         objects.pack_object(objects.MANIFEST, self.vault.uuid, step, epoch, []))
            if anew:            # the call comes before its epoch: who sees that finds it
                self._open_epoch(self.opener)
            if is_new and self.epoch == epoch:
                return
            anew = True

    def called(self, oldest):
        """Of the other ranks: Wanted, the step that rank 0 archives and for which this one has put nothing, or None. oldest: a
        step that this rank has, and none before it."""
        head = self._look()
        self._is_in_epoch(head)
        return self._begun(min(oldest, head.entries[-1].last) if head.entries else 0)

    def commit(self, step, build, segments=(), still=lambda: True, after=None):
        """True: the head lists the step. False: the job has gone on without it.

        build(epoch) gives the pieces of the manifest, bytes each; segments are the (lease, n) that this archiver has put for it.
        still(): the store has this step yet, and has not gone back to an earlier one; after: (step, epoch) before a logged one.
        Fenced, Restart, Wanted, or another Failure.
        """
        before = self._look().entries
        for _ in range(EPOCHS_OF_STEP_MAX):
            self._is_in_epoch(self._look())
            if not still():     # after the look: what others put in this epoch is of no later history
                return False
            if not self._put_manifest(step, build(self.epoch)):
                self._open_epoch(self.opener)
                continue
            self._need_young_segments(step, segments)
            self._put_ready(step)
            done = self._lead(step, still, after) if self.rank == 0 else self._follow(step, before, after)
            if done is not None:
                return done
        raise Fenced(f'{self.job}: step {step} began {EPOCHS_OF_STEP_MAX} epochs: do two archivers of one rank run?')

    def _need_newest(self, step, after):
        """A logged step follows the newest one. Another process of this rank may have put it before it ended, and then it is listed
        under the epoch of that time."""
        last = self.head.entries[-1] if self.head.entries else None
        if after and (not last or (last.last, last.epoch) != after):
            raise Restart(f'{self.job}: step {step} was logged after another step than the newest')

    def decline(self, step):
        """This rank has no such step: the job goes on without it."""
        nothing = Summary(NONE, self.rank, self.ranks, 1, 0, 0, NOTHING, NOTHING, 0, (0, 0), 0, self.store, self.host, '', '')
        self._is_in_epoch(self._look())
        data = objects.pack_object(objects.MANIFEST, self.vault.uuid, step, self.epoch, [(heads.SUMMARY, 0, heads.pack_summary(nothing))])
        if self._put_manifest(step, [data]):
            self._put_ready(step)

    def _put_manifest(self, step, pieces):
        """The last piece first. False: a key of this rank has other bytes, of a time before a rollback or a restart."""
        for piece in reversed(range(len(pieces))):
            key = objects.key_manifest(self.job, step, self.epoch, self.rank, piece)
            while True:
                done = self.engine.put_new(key, pieces[piece])
                if done is None:
                    continue
                if done or self._same(key, pieces[piece]) and self._ages(step).get(self.rank, {}).get(piece, self._limit()) < self._limit():
                    break
                self._need_own(step, piece)
                return False
        self.answered.add(step)
        return True

    def _put_ready(self, step):
        """Tells rank 0 that this rank has looked at its segments. Without it rank 0 could list what the look then refuses."""
        if self.rank == 0:
            return
        key = objects.key_manifest(self.job, step, self.epoch, self.rank, READY)
        data = objects.pack_object(objects.MANIFEST, self.vault.uuid, step, self.epoch, [])
        while self.engine.put_new(key, data) is None:
            pass

    def _same(self, key, data):
        try:
            return bytes(self.engine.get(key)) == bytes(data)
        except Missing:
            return False

    def _need_own(self, step, piece):
        """Fenced if the manifest that is there in place of this rank's is of another store."""
        if piece:
            return
        try:
            other = jobs.read_summary(self.engine, self.vault, self.job, step, self.epoch, self.rank)[0]
        except Missing:
            return
        if other.store != self.store:
            raise Fenced(f'{self.job}: host {other.host} archives rank {self.rank}, too; this archiver ends')

    def _need_young_segments(self, step, segments):
        """Rule of writers: a segment much older than its manifest may be gone. The manifest's age comes first, so that a
        pause between the two lists makes segments seem older and never younger."""
        age = self._ages(step).get(self.rank, {}).get(0)
        if age is None:
            raise Restart(f'{self.job}: the manifest of step {step} is gone')
        left = set(segments)
        for lease in {lease for lease, _ in left}:
            own = sorted(n for of, n in left if of == lease)
            after = objects.key_segment(lease, own[0] - 1) if own[0] else ''
            for key, _, segment_age in self.engine.list(f'seg/{objects.number_text(lease, 8)}/', after):
                n = objects.parse_number(key[-4:], 4)
                if n is None or n > own[-1]:
                    break
                if segment_age - age <= self.vault.grace / 2:
                    left.discard((lease, n))
        if left:
            raise Restart(f'{self.job}: step {step} took longer than half of the grace of the vault')

    def _ages(self, step):
        """{rank: {piece: age}} of this epoch's manifests."""
        ages = {}
        for (_, _, rank, piece), age in jobs.list_manifests(self.engine, self.job, step, self.epoch):
            ages.setdefault(rank, {})[piece] = age
        return ages

    def _young_ages(self, step):
        """Restart where this rank's manifest waited so long that a collector may remove it."""
        ages = self._ages(step)
        if ages.get(self.rank, {}).get(0, self._limit()) >= self._limit():
            raise Restart(f'{self.job}: step {step} waited for longer than the grace of the vault allows')
        return ages

    def _limit(self):
        """A manifest that is older is as good as gone, with room for lists that are not current."""
        return self.vault.grace * 3 / 4

    # -- rank 0 --

    def _lead(self, step, still, after):
        summaries = {}
        while True:
            if not self._is_in_epoch(self._look()):
                return None
            entry = find(self.head, step, self.epoch)
            if entry:
                return self._need_to_stay(step, self._will_stay(entry, step))
            self._need_newest(step, after)
            self._read_summaries(step, self._young_ages(step), summaries)
            kinds = {(s.kind, s.kind == LOGGED and s.base) for s in summaries.values()}
            if len(kinds) > 1 or any(s.kind == NONE for s in summaries.values()) or not still():
                return False
            if len(summaries) == self.ranks:
                return self._put_step(step, [summaries[rank] for rank in range(self.ranks)])
            missing = next(rank for rank in range(self.ranks) if rank not in summaries)
            self.pause(f'step {step} of {self.job} waits for rank {missing}')

    def _read_summaries(self, step, ages, summaries):
        for rank, pieces in ages.items():
            if (READY if rank else 0) in pieces and rank < self.ranks and rank not in summaries:
                try:
                    summaries[rank] = jobs.read_summary(self.engine, self.vault, self.job, step, self.epoch, rank)[0]
                except Missing:     # it was old, and a collector removed it
                    pass

    def _put_step(self, step, summaries):
        newest = self.head.entries[-1] if self.head.entries else None
        logged = summaries[0].kind == LOGGED
        made = jobs.step_of(step, self.epoch, newest.sum if logged and newest else NOTHING, summaries)
        data = heads.pack_step(self.vault.uuid, made)
        key = objects.key_step(self.job, step, self.epoch)
        while True:
            done = self.engine.put_new(key, data)
            if done is None:
                continue
            if done or self._same(key, data):
                break
            self._open_epoch(self.opener)
            return None
        return self._put_head(jobs.entry_of(made, data), summaries)

    def _put_head(self, entry, summaries):
        tried = []
        while True:
            head = self.head
            mine = next_of(head, writer=self.host, flags=self.flags, entries=self._with(head, entry, summaries))
            tried.append(mine.n)
            self.head = put_head(self.engine, self.vault, self.job, mine)
            if find(self.head, entry.last, entry.epoch):
                n = mine.n if len(tried) == 1 else self._first_head(entry.last)
                return self._need_to_stay(entry.last, self._were_young(entry.last, summaries, n))
            if not self._is_in_epoch(self.head):
                return None
            if self._was_put(mine):
                return False        # listed, and forgotten before this rank looked

    def _was_put(self, head):
        try:
            return bytes(self.engine.get(objects.key_head(self.job, head.n))) == heads.pack_head(self.vault.uuid, head)
        except Missing:
            return False

    def _with(self, head, entry, summaries):
        """The entries with a new one. What the step depends on must be listed."""
        entries = head.entries
        if entry.kind == LOGGED:
            self._need_newest(entry.last, summaries[0].base)
            last = entries[-1]
            if last.kind == LOGGED and last.epoch == entry.epoch:
                entry = entry._replace(step=last.step, bytes=last.bytes + entry.bytes, new=last.new + entry.new)
                entries = entries[:-1]
        for s in summaries:
            if s.kind == FULL and s.base != (0, 0) and not find(head, *s.base):
                raise Restart(f'{self.job}: step {s.base[0]}, whose content step {entry.last} uses, is gone')
        if len(entries) >= heads.ENTRIES_MAX:
            raise Failure(f'{self.job} has {len(entries)} steps and can have no more: hitrainctl vault forget')
        return (*entries, entry)

    def _were_young(self, step, summaries, n):
        """Were all manifests young when head n named them? Then no collector that read an older head has removed one, or will.
        None: the head is gone, so nobody can tell. Two looks at the head's age bound what a pause between the lists hides.
        """
        while True:
            before = self._age_of_head(n)
            ages = self._ages(step)
            oldest = max(ages.get(s.rank, {}).get(piece, float('inf')) for s in summaries for piece in range(s.pieces))
            if before is not None and oldest - before < self._limit():
                return True
            after = self._age_of_head(n)
            if before is None or after is None:
                return None
            if oldest - after >= self._limit():
                return False

    def _age_of_head(self, n):
        key = objects.key_head(self.job, n)
        found = next(self.engine.list(f'job/{self.job}/head/', objects.key_head(self.job, n - 1)), None)
        return found[2] if found and found[0] == key else None

    def _first_head(self, step):
        """The lowest number of a head that lists the step, as the highest one does."""
        prefix = f'job/{self.job}/head/'
        numbers = [n for n in (objects.parse_number(key[len(prefix):]) for key, _, _ in self.engine.list(prefix)) if n is not None]
        low, high = 0, len(numbers) - 1
        while low < high:
            middle = (low + high) // 2
            try:
                key = objects.key_head(self.job, numbers[middle])
                head = jobs.parse(key, heads.parse_head, self.engine.get(key), self.vault.uuid, numbers[middle])
            except Missing:
                head = None
            if head and find(head, step, self.epoch):
                high = middle
            else:
                low = middle + 1
        return numbers[low]

    def _need_to_stay(self, step, stays):
        """True, or rank 0 takes the step back. Where nobody can tell, others may have reported it, or logged steps after it under a later
        epoch: then it remains."""
        if stays:
            return True
        if stays is False or self.ranks == 1:
            self._take_back(step, stays is False)
        raise Restart(f'{self.job}: step {step} took longer than the grace of the vault')

    def _take_back(self, step, is_sure):
        while True:
            head = self._look()
            entry = find(head, step, self.epoch)
            if not entry or not is_sure and head.epoch != self.epoch:
                return
            gone, instead = jobs.with_followers(head.entries, entry), []
            if entry.step < step:       # the last one of a run of logged steps
                before = jobs.read_step_object(self.engine, self.vault, self.job, step, entry.epoch, None).before
                instead = [entry._replace(last=step - 1, sum=before)]
            i = head.entries.index(entry)
            entries = (*head.entries[:i], *instead, *head.entries[i + len(gone):])
            put_head(self.engine, self.vault, self.job, next_of(head, entries=entries))

    def _will_stay(self, entry, step):
        """A listed step of this epoch: as _were_young."""
        try:
            of = jobs.read_step_object(self.engine, self.vault, self.job, step, entry.epoch, entry.sum if entry.last == step else None)
        except jobs.Gone:
            return False
        return self._were_young(step, of.summaries, self.head.n) or self._were_young(step, of.summaries, self._first_head(step))

    # -- other ranks --

    def _follow(self, step, before, after):
        while True:
            head = self._look()
            entry = find(head, step, self.epoch)
            if entry:
                if self._will_stay(entry, step):
                    return True
                raise Restart(f'{self.job}: step {step} took longer than the grace of the vault')
            if not self._is_in_epoch(head):
                return None
            self._need_newest(step, after)
            newer = [e for e in head.entries if e not in before and e.last > step]
            if newer:
                self._need_own_steps(newer[-1])
                return False
            self._young_ages(step)
            if self.gives:
                self._need_step_of_rank_0()
            self.pause(f'step {step} of {self.job} waits for rank 0')

    def _need_own_steps(self, entry):
        try:
            found = jobs.read_step_object(self.engine, self.vault, self.job, entry.last, entry.epoch, entry.sum)
        except jobs.Gone:
            return
        of = found.summaries[self.rank] if self.rank < len(found.summaries) else None
        if not of or of.store != self.store:
            raise Fenced(f'{self.job}: host {of.host if of else "?"} archives rank {self.rank} now; this archiver ends')

    def _need_step_of_rank_0(self):
        """Wanted if rank 0 waits for this rank with another step. After a rollback that may be any step; they are few."""
        newest = self.head.entries[-1].last if self.head.entries else 0
        wanted = self._begun(newest if newest < max(self.answered) else 0)
        if wanted:
            raise wanted

    def _begun(self, first):
        """Wanted, the last step from `first` on that rank 0 called or put in this epoch; None if this rank has answered, or the job
        lists it. Of steps of one age it is one that is open: the clock of an engine may be coarse."""
        begun = {}
        for (step, epoch, rank, piece), age in jobs.list_manifests(self.engine, self.job, after=objects.key_manifest(self.job, first, 0, 0)):
            if (epoch, rank) == (self.epoch, 0) and piece in (0, CALLED):
                before = begun.get(step, (age, False))
                begun[step] = min(age, before[0]), piece == CALLED or before[1]

        def is_over(step):
            return step in self.answered or find(self.head, step, self.epoch) is not None
        step = min(begun, key=lambda at: (begun[at][0], is_over(at), -at), default=None)
        return None if step is None or is_over(step) else Wanted(step, begun[step][1])
