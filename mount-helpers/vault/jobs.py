# SPDX-License-Identifier: Apache-2.0
"""Jobs in a vault: which steps exist, and who may add one (docs/vault-format.md, "Protocol").

The head with the highest number decides. Each change puts the next number and looks again: what the highest head says then
is true, whatever became of the put. So lost answers and rivals need no other rule.
"""
import os
import time

import heads
import objects
from errors import Missing, NoVault, Unknown
from heads import FULL, LOGGED, NOTHING, Entry, Head, Step
from objects import Damage, Failure
from sums import sum128

WINDOW_BYTES = 4096     # read at once of a manifest whose summary is wanted
READY = 0xffff          # in place of a piece's number: the rank has looked at its segments
CALLED = 0xfffe         # rank 0 archives this step, and the others shall


class Gone(Damage):
    """An object that a head named is not there."""


class Patient:
    """The four verbs of an engine, tried until they answer. pause(why) sleeps, or raises to give up; None: give up at once."""

    def __init__(self, engine, pause=None):
        self.engine, self.pause = engine, pause

    def _wait(self, error):
        if not self.pause:
            raise error
        self.pause(error)

    def get(self, key, offset=0, length=None):
        while True:
            try:
                return self.engine.get(key, offset, length)
            except Unknown as e:
                self._wait(e)

    def list(self, prefix, after=''):
        while True:
            try:
                for entry in self.engine.list(prefix, after):
                    after = entry[0]
                    yield entry
                return
            except Unknown as e:
                self._wait(e)

    def remove(self, key):
        while True:
            try:
                return self.engine.remove(key)
            except Unknown as e:
                self._wait(e)

    def put_new(self, key, data):
        """True, False, or None: nobody knows. The caller looks."""
        try:
            return self.engine.put_new(key, data)
        except Unknown as e:
            self._wait(e)
            return None


def parse(key, function, *words):
    """function(*words), whose Damage then names the object."""
    try:
        return function(*words)
    except Damage as e:
        raise Damage(f'{key}: {e}') from None


# ---- the vault ----

def open_vault(engine):
    """heads.Vault. Whatever else the caller reads must have its uuid."""
    found = [n for n in (objects.parse_number(key[len('vault/'):]) for key, _, _ in engine.list('vault/')) if n is not None]
    if not found:
        raise Failure('there is no vault: make one with hitrainctl vault init')
    key = objects.key_vault(max(found))
    return parse(key, heads.parse_vault, engine.get(key), max(found))


def all_of(engine):
    """All keys. A folder that is not there yet has none."""
    try:
        yield from engine.list('')
    except NoVault:
        pass


def make_vault(engine, grace, segment_bytes=objects.OBJECT_BYTES_MAX):
    """The place must hold nothing. Of two who make one, one succeeds."""
    for key, _, _ in all_of(engine):
        if key.startswith('vault/'):
            raise Failure(f'there is a vault already, of uuid {open_vault(engine).uuid.hex()}')
        raise Failure(f'it holds other objects, such as {key}: a vault needs a folder, pool or prefix of its own')
    made = heads.Vault(1, os.urandom(16), grace, segment_bytes)
    engine.put_new(objects.key_vault(1), heads.pack_vault(made))
    if open_vault(engine) != made:
        raise Failure('another vault was made at the same time')
    return made


# ---- heads ----

def highest(engine, vault, job, known=0):
    """The head that counts; of epoch 0 if there is none. known: a number that exists, or existed."""
    prefix = f'job/{job}/head/'
    after = objects.key_head(job, known - 1) if known else ''
    while True:
        n = known
        for key, _, _ in engine.list(prefix, after):
            n = max(n, objects.parse_number(key[len(prefix):]) or 0)
        if not n:
            return Head(0, 0, NOTHING, 1, 0, 0, '', ())
        key = objects.key_head(job, n)
        try:
            return parse(key, heads.parse_head, engine.get(key), vault.uuid, n)
        except Missing:     # a collector removed it: there are many above it
            known, after = 0, ''


def put_head(engine, vault, job, head):
    """Tries to put a head, then looks: the head that counts."""
    done = engine.put_new(objects.key_head(job, head.n), heads.pack_head(vault.uuid, head))
    return highest(engine, vault, job, known=0 if done is None else head.n)


def next_of(head, **changes):
    if head.n >= objects.NUMBER_MAX or head.epoch >= objects.NUMBER_MAX:
        raise Failure('this job has used all numbers')
    return head._replace(n=head.n + 1, time=time.time_ns(), **changes)


def find(head, step, epoch=None):
    """The entry of a step, or None. Without an epoch: of the latest one that has it."""
    for entry in reversed(head.entries):
        if entry.step <= step <= entry.last and epoch in (None, entry.epoch):
            return entry
    return None


def list_jobs(engine):
    """Names of jobs. One small request for each."""
    after, jobs = '', []
    while True:
        key = next(iter(engine.list('job/', after)), None)
        if not key:
            return jobs
        job = key[0].split('/')[1]
        if objects.is_job(job):
            jobs.append(job)
        after = f'job/{job}/zz'     # behind all keys of the job


# ---- steps ----

def read_step_object(engine, vault, job, step, epoch, of_sum):
    key = objects.key_step(job, step, epoch)
    try:
        data = engine.get(key)
    except Missing:
        raise Gone(f'{key}: it is gone, and job {job} lists its step') from None
    if of_sum and sum128(data) != of_sum:
        raise Damage(f'{key}: it is not the one that job {job} lists')
    return parse(key, heads.parse_step, data, vault.uuid, step, epoch)


def read_step(engine, vault, job, step=None):
    """(Entry, Step) of a step that exists, by default the newest. Of a logged step the sums prove all between it and the
    last one of its run."""
    head = highest(engine, vault, job)
    if not head.entries:
        raise Failure(f'job {job} has no step' if head.n else f'there is no job {job}')
    entry = head.entries[-1] if step is None else find(head, step)
    if not entry:
        newest = head.entries[-1].last
        raise Failure(f'job {job} has no step {step}; the newest is {newest}')
    at = entry.last if step is None else step
    found = read_step_object(engine, vault, job, entry.last, entry.epoch, entry.sum)
    while found.step > at:
        found = read_step_object(engine, vault, job, found.step - 1, entry.epoch, found.before)
    return entry, found


def chain_of(engine, vault, job, step=None):
    """[Step], a full one first and then the logged ones up to the step, each proven by the head."""
    head = highest(engine, vault, job)
    entry, found = read_step(engine, vault, job, step)
    chain = [found]
    while chain[-1].summaries[0].kind == LOGGED:
        last = chain[-1]
        before = last.summaries[0].base
        if not find(head, *before):
            raise Failure(f'job {job}: step {last.step} was logged after step {before[0]}, which is not there any more')
        chain.append(read_step_object(engine, vault, job, *before, last.before))
    return chain[::-1]


def forget(engine, vault, job, step):
    """The step is not listed any more, and neither are the logged steps that follow it. Returns the entries that went."""
    gone = []
    while True:
        head = highest(engine, vault, job)
        entry = find(head, step)
        if not entry:
            if not gone:
                raise Failure(f'job {job} has no step {step}')
            return gone
        if entry.kind != FULL:
            raise Failure(f'step {step} is logged, and goes with the full step before it')
        gone = with_followers(head.entries, entry)
        put_head(engine, vault, job, next_of(head, entries=tuple(e for e in head.entries if e not in gone)))


def with_followers(entries, entry):
    """The entry and the runs of logged steps right after it."""
    i = entries.index(entry)
    end = i + 1
    while end < len(entries) and entries[end].kind == LOGGED:
        end += 1
    return list(entries[i:end])


# ---- manifests, as far as a job needs them ----

class Window:
    """get() of a RecordReader over the beginning of an object: a window first, then what is asked for."""

    def __init__(self, engine, key):
        self.engine, self.key, self.at = engine, key, 0
        self.data = bytes(engine.get(key, 0, WINDOW_BYTES))

    def __call__(self, count):
        end = self.at + count
        if end > len(self.data) >= WINDOW_BYTES:
            self.data += bytes(self.engine.get(self.key, len(self.data), end - len(self.data)))
        part = self.data[self.at:end]
        self.at += len(part)
        return part


def read_summary(engine, vault, job, step, epoch, rank):
    """(Summary, reader of the records that follow)."""
    key = objects.key_manifest(job, step, epoch, rank)
    return parse(key, _read_summary, engine, vault, key, step, epoch, rank)


def _read_summary(engine, vault, key, step, epoch, rank):
    window = Window(engine, key)
    head = objects.parse_header(window(objects.HEADER_BYTES), objects.MANIFEST, vault.uuid)
    if (head.first, head.second) != (step, epoch):
        raise Damage('its numbers are those of another step')
    reader = objects.RecordReader(window)
    record = reader.next()
    if record.type != heads.SUMMARY:
        raise Damage('it has no summary')
    summary = heads.parse_summary(record.payload)
    if summary.rank != rank:
        raise Damage(f'it is of rank {summary.rank}')
    return summary, reader


def read_segments(engine, vault, job, step, epoch, rank):
    """Runs (lease, n, count) of all segments that a manifest names."""
    key = objects.key_manifest(job, step, epoch, rank)

    def runs():
        reader = _read_summary(engine, vault, key, step, epoch, rank)[1]
        record = reader.next()
        while record.type == heads.SEGMENTS:
            yield from heads.parse_segments(record.payload)
            record = reader.next()
    return parse(key, lambda: list(runs()))


def parse_manifest_key(text):
    """(step, epoch, rank, piece) of what follows man/ in a key, or None."""
    parts = text.split('.')
    numbers = [objects.parse_number(part, digits) for part, digits in zip(parts, (16, 16, 4, 4))]
    if len(parts) not in (3, 4) or None in numbers:
        return None
    return (*numbers, 0)[:4]


def list_manifests(engine, job, step=None, epoch=None, after=''):
    """Yields ((step, epoch, rank, piece), age): of one step, or of all after a key."""
    prefix = f'job/{job}/man/'
    narrow = '' if step is None else f'{objects.number_text(step)}.{objects.number_text(epoch)}.'
    for key, _, age in engine.list(prefix + narrow, after):
        numbers = parse_manifest_key(key[len(prefix):])
        if numbers:
            yield numbers, age


# ---- pins ----

def pin(engine, vault, job, entry, store, boot, host):
    """Keeps the segments of a listed step, until unpin. Failure if the step is not listed. The pin stays then: it may be one that
    another model of this store needs (stores.unpin)."""
    key = objects.key_pin(job, entry.step, entry.epoch, store)
    engine.put_new(key, heads.pack_pin(vault.uuid, heads.Pin(entry.step, entry.epoch, store, boot, host)))
    parse(key, heads.parse_pin, engine.get(key), vault.uuid)
    if not find(highest(engine, vault, job), entry.step, entry.epoch):
        raise Failure(f'job {job} lists step {entry.step} no more')


def unpin(engine, job, entry, store):
    engine.remove(objects.key_pin(job, entry.step, entry.epoch, store))


def pins_of(engine, job, store):
    """Yields (key, job, step) of the pins of a store, 16 bytes."""
    prefix = f'job/{job}/pin/'
    for key, _, _ in engine.list(prefix):
        step, _, of = (*key[len(prefix):].split('.'), '', '')[:3]
        if of == store.hex() and objects.parse_number(step) is not None:
            yield key, job, objects.parse_number(step)


def entry_of(step, data):
    """The entry of a step that a head shall list. data: its object."""
    s = step.summaries
    one = s[0]
    digest = one.digest if len(s) == 1 else sum128(b''.join(each.digest for each in s))
    return Entry(step.step, step.epoch, step.step, one.kind, len(s), max(each.time for each in s), sum(each.bytes for each in s),
                 sum(each.new for each in s), sum128(data), digest)


def step_of(step, epoch, before, summaries):
    """Step, of summaries of full steps, or of ones that were logged after the same step. Failure if the ranks do not fit together."""
    for s in summaries[1:]:
        if s.shards != summaries[0].shards:
            raise Failure(f'step {step}: ranks 0 and {s.rank} differ: another table of user.hitrain.shards')
    return Step(step, epoch, before, summaries)
