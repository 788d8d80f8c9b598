# SPDX-License-Identifier: Apache-2.0
"""Logged steps through a pipe: `archive ROOT - --follow | restore - DIR --follow`. DIR is a copy of a kept step, made before.

    beginning: a summary of kind NONE with the step that the stream continues; logged steps, each an object of its own; end: a
    summary of kind NONE. Of a stream that was cut, all steps with an end mark are whole.
"""
import collections
import os
import signal
import threading
import time

from apply import Copy, Other
from archive import digest_of
from changes import Files, Moved, need_logging, state_of, word
from kept import Kept
from logged import FILE, NUMBERS, PIECES, SETTINGS, End, File, FileBlock, Gone, Logged, Numbers, Reader, Settings, \
    StepSum, pack_end, pack_file, pack_numbers, pack_piped
from manifest import BLOCK
from objects import END, HEADER_BYTES, MANIFEST, NO_VAULT, NUMBER_MAX, Damage, Failure, RecordReader, parse_header
from pipe import Output, widen
from say import note
from store import size_text
from sums import sum128
import heads
import standby
import stop

POLL_S = 0.005
STALLS_S_MAX = 5
NO_PROOF, BY_DIGEST, BY_SUM = range(3)  # of the step that a stream continues: `new` of its first summary
AHEAD_BYTES, PART_BYTES = 64 << 20, 1 << 20
ANOTHER = ('its history is another one now: a change that is no logged step, a rollback, or a new mount came in between. Archive a '
           'newer kept step (--from sends what differs), and follow from that one')


# ---- sender ----

def end_soon(number, frame):
    """A signal ends the sender after the step that it writes, or after some seconds without a reader."""
    stop.ask()
    signal.alarm(STALLS_S_MAX)


def give_up(number, frame):
    raise stop.Stopped('interrupted')


def still_writes():
    if stop.is_asked():
        signal.alarm(STALLS_S_MAX)


def summary_of(kind, digest, lineage, base):
    return heads.Summary(kind, 0, 1, 1, 0, 0, digest, heads.NOTHING, lineage, base, time.time_ns(), heads.NOTHING, '', '', '')


def put_mark(step, lineage, proof=NO_PROOF, digest=heads.NOTHING):
    """digest: proves the step, by all of its content or by the sum of a logged step."""
    out = Output(1, step)
    out.put(heads.SUMMARY, heads.pack_summary(summary_of(heads.NONE, digest, lineage, (step, 0))._replace(new=proof)), 0, None)


class Sender:
    def __init__(self, root, o):
        self.root, self.rate, self.once = os.path.realpath(root), o['rate'], o.get('once')
        need_logging(self.root)
        state = state_of(self.root)
        self.lineage, self.sent, self.bytes = state.lineage, 0, 0
        digest, proof, step = heads.NOTHING, NO_PROOF, state.first - 1 if state.first else int(word(self.root, b'durable_step'))
        base = None
        if o['since']:
            step = o['since']
        elif o['from']:
            base = Kept(self.root, o['from'])
            if base.lineage() != self.lineage:
                raise Failure(f'{self.root}: {ANOTHER}')
            proof, step, digest = BY_DIGEST, base.step, o['digest'] or base.digest() or digest_of(base, 'of the base read').digest
        self.files = Files(self.root, base and base.folder)
        self.next = step + 1
        if o['since']:
            digest = self.sum_of(step)
            proof = BY_SUM if digest != heads.NOTHING else NO_PROOF
        put_mark(step, self.lineage, proof, digest)

    def sum_of(self, step):
        """Of a logged step of this history; NOTHING: it is not readable any more, and the lineage may prove it."""
        try:
            log = Logged(self.root, step)
        except Gone:
            return heads.NOTHING
        total = StepSum(step)
        for item in log.items(self.files.path_of):
            stop.check()
            if type(item) is Numbers:
                total.numbers(pack_numbers(item))
            else:
                total.piece(item, sum128(item.content))
        log.close()
        return total.get() if log.lineage == self.lineage else heads.NOTHING

    def run(self):
        while not stop.is_asked():          # between steps a signal is an end in order
            state = state_of(self.root)
            if state.lineage != self.lineage:
                raise Failure(f'{self.root}: {ANOTHER}')
            if state.last and self.next < state.first:
                raise Failure(f'{self.root}: step {self.next} is not readable any more, the oldest one is {state.first}: archive a newer '
                              'kept step, and follow from that one; a larger redo_keep leaves more time')
            if state.last and self.next <= state.last:
                self.send(state.last)
            elif self.once:
                break
            else:
                time.sleep(POLL_S)
        put_mark(self.next - 1, self.lineage)
        note(f'{self.root}: sent {self.sent} logged steps, up to step {self.next - 1}, {size_text(self.bytes)}')

    def send(self, newest):
        try:
            log = Logged(self.root, self.next)
        except Gone:
            return                          # the next look says why
        try:
            if log.lineage != self.lineage:
                raise Failure(f'{self.root}: {ANOTHER}')
            self.put(log, newest)
        except Moved as e:
            raise Failure(f'{e}; archive a newer kept step, and follow from that one') from None
        finally:
            log.close()
        self.next, self.sent = self.next + 1, self.sent + 1

    def put(self, log, newest):
        out, total = Output(1, log.step, self.rate), StepSum(log.step)
        about = summary_of(heads.LOGGED, heads.NOTHING, log.lineage, (log.step - 1, 0))
        out.put(heads.SUMMARY, heads.pack_summary(about._replace(bytes=newest)), 0, None)
        params = count = 0
        for item in log.items(self.files.path_of):
            still_writes()
            if type(item) is Numbers:
                params += 1
                total.numbers(pack_numbers(item))
                out.put(NUMBERS, pack_numbers(item), 0, None)
            else:
                count += len(item.content)
                total.piece(item, sum128(item.content))
                out.put(PIECES, pack_piped(item), item.first, None)
        spool = self.files.changed(log.step) if newest == log.step else None
        for item in spool or ():
            if type(item) is Settings:
                out.put(SETTINGS, item.text, 0, None)
            elif type(item) is File:
                out.put(FILE, pack_file(item), 0, None)
            else:
                out.put(BLOCK, item.content, item.index, None)
        out.put(END, pack_end(End(params, count, total.get(), log.lineage, int(spool is not None))), 0, None)
        self.bytes += count


# ---- receiver ----

class Ahead:
    """Reads a descriptor on while a step is committed. It holds AHEAD_BYTES and one part. get(bytes): fewer at the end. One thread gets."""

    def __init__(self, fd=0):
        self.parts, self.held, self.changed = collections.deque(), 0, threading.Condition()
        self.left, self.at, self.ended = b'', 0, False
        widen(fd)
        threading.Thread(target=self._feed, args=(fd,), daemon=True).start()

    def _feed(self, fd):
        part = b'-'
        while part:
            try:
                part = os.read(fd, PART_BYTES)
            except OSError as e:
                part = e
            with self.changed:
                self.parts.append(part)
                if isinstance(part, OSError):
                    return self.changed.notify()
                self.held += len(part)
                self.changed.notify()
                self.changed.wait_for(lambda: self.held <= AHEAD_BYTES)

    def get(self, count):
        out = bytearray()
        while len(out) < count and not self.ended:
            if not self.left:
                self._more()
            part = self.left[:count - len(out)]
            out += part
            self.left = self.left[len(part):]
        self.at += len(out)
        return memoryview(out)

    def _more(self):
        with self.changed:
            while not self.parts:
                stop.check()
                self.changed.wait(stop.LOOK_S)
            part = self.parts.popleft()
            if isinstance(part, OSError):
                raise Failure(f'cannot read: {part.strerror}')
            self.held -= len(part)
            self.changed.notify()
        self.left, self.ended = memoryview(part), not part

    def begin(self):
        """(step, Summary, records that follow) of the next object; None at the end."""
        head = self.get(HEADER_BYTES)
        if not len(head):
            return None
        found = parse_header(head, MANIFEST, NO_VAULT)
        if found.first > NUMBER_MAX or found.second:
            raise Damage('its number is impossible')
        reader = RecordReader(self.get)
        first = reader.next()
        if first.type != heads.SUMMARY or first.place:
            raise Damage('it does not say what it is about')

        def records():
            while True:
                yield reader.next()
        return found.first, heads.parse_summary(first.payload), records()


class Receiver:
    def __init__(self, path, o):
        self.path, self.source, self.copy = path, Ahead(), Copy(path)
        self.say, self.from_step, self.received = standby.reporter(path, o['json']), self.copy.step, 0
        self.missed = False

    def refuse(self, why):
        return Other(f'{self.path}: the stream does not continue step {self.copy.step} of this copy: {why}. Nothing has changed; '
                     '`hitrainctl archive` and `restore` make a new copy')

    def begin(self):
        first = self.source.begin()
        if not first:
            raise Damage('it is cut: nothing came')
        if first[1].kind != heads.NONE or first[1].new > BY_SUM:
            raise Damage('nothing is received: this is no stream of logged steps')
        step, self.head, _ = first
        place = self.copy.place
        if step > self.copy.step:
            raise self.refuse('steps are missing in between')
        if not place.sum:
            self.begin_new(step)
        elif step == self.copy.step and not self.proves(place):
            raise self.refuse('it continues another step of this number, or does not prove that it is the same')

    def proves(self, place):
        """Of the same history, or the same gradients led to this step."""
        if self.head.new == (BY_SUM if place.is_sum else BY_DIGEST):
            return self.head.digest == place.sum
        return self.head.lineage == place.lineage

    def begin_new(self, step):
        if self.head.new != BY_DIGEST:
            raise self.refuse('the sender must name the kept step that was copied, with --from')
        if step != self.copy.step:
            raise self.refuse('it continues another step')
        self.copy.command(f'snapshot {self.NAME}'.encode())
        try:
            same = digest_of(Kept(os.path.realpath(self.path), self.NAME)).digest == self.head.digest
        finally:
            self.copy.command(f'forget {self.NAME}'.encode())
        if not same:
            raise self.refuse('it continues a step with another digest')
        self.copy.begin_at(self.head.lineage, self.head.digest)

    NAME = 'hitrain-follow'

    def run(self):
        self.begin()
        while True:
            found = self.source.begin()
            if not found:
                raise Damage(f'it is cut, after step {self.copy.step}, which the copy has')
            step, summary, records = found
            if summary.kind == heads.NONE:
                break
            self.take(step, summary, Reader(records, step, in_pipe=True))
        note(f'{self.path}: received {self.received} logged steps, from step {self.from_step} to step {self.copy.step}')

    def take(self, step, summary, items):
        copy = self.copy
        if step > copy.step:
            if self.missed:
                items = without_files(items)
            copy.apply(step, items)
            self.received += 1
            self.say(step, summary.bytes)
        elif step == copy.step and copy.place.files != step:
            copy.apply_files(step, items, self.check)
        else:
            for item in items:
                if type(item) is End:
                    self.missed |= step > copy.place.files and bool(item.files)
                    if step == copy.step:
                        self.check(item)

    def check(self, end):
        """The copy's own step once more."""
        place = self.copy.place
        if end.sum != place.sum if place.is_sum else end.lineage != place.lineage:
            raise self.refuse('its step of this number is another one')


def without_files(items):
    """Changes of files are not complete any more: earlier ones were left out."""
    for item in items:
        if isinstance(item, End):
            item = item._replace(files=0)
        if not isinstance(item, (File, FileBlock, Settings)):
            yield item


def send(root, o):
    if os.isatty(1):
        raise Failure('the stream goes through a pipe, and standard output is a terminal')
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, end_soon)
    signal.signal(signal.SIGALRM, give_up)
    try:
        Sender(root, o).run()
    except stop.Stopped:
        raise Failure('cannot write: interrupted in the middle of a step; the copy goes on from its last step') from None
    return 0


def receive(path, o):
    if os.isatty(0):
        raise Failure('the stream goes through a pipe, and standard input is a terminal')
    stop.catch()
    receiver = None
    try:
        receiver = Receiver(path, o)
        receiver.run()
    except stop.Stopped:
        raise Failure(f'{path}: interrupted; the copy is at a whole step') from None
    except Damage as e:
        at = receiver.source.at if receiver else 0
        raise Failure(f'{path}: at byte {at}: {e}') from None
    finally:
        if receiver:
            receiver.copy.close()
    return 0
