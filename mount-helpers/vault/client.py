# SPDX-License-Identifier: Apache-2.0
"""The client of a scheme's program: it starts the program, has several requests in flight, and ends a program that hangs.

A program that answers nothing until a deadline passes is killed; the next request starts another one. A killed program may
still be in the kernel (a dead network mount): such a one is left alone with its memory, and at most two exist.
Threads: any number of callers, and one thread for each running program that takes its answers.
"""
import ctypes
import mmap
import os
import signal
import socket
import subprocess
import threading
import time
import weakref

from engine import Engine, shown
from errors import Again, BY_CODE, Failed, NoProgram, Unknown
import wire

RESTART_S_MAX = 10
LEFT_ALONE_MAX = 2
ENDS_AT_ONCE_MAX = 3
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1     # of mallopt(3)
KEPT_BYTES = 64 << 20
SLOTS_TO_CALL = 8               # of a program's slots: no caller waits for what others have borrowed
HERE = os.path.dirname(os.path.realpath(__file__))


def keep_memory():
    """Fetched memory goes back to the allocator and not to the kernel, which would clear its pages for each fetch anew."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, 'mallopt'):
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def program_of(scheme):
    """The path of the program: beside this folder, beside hitrainctl, or in PATH."""
    name = f'hitrain-vault-{scheme}'
    for folder in HERE, os.path.join(HERE, '../../../bin'):
        if os.access(os.path.join(folder, name), os.X_OK):
            return os.path.normpath(os.path.join(folder, name))
    import shutil               # takes long, and few need it
    found = shutil.which(name)
    if not found:
        raise NoProgram(f'no program {name} in PATH: nothing here serves URLs that begin with {scheme}:')
    return found


class Request:
    """One packet under way. result is None until its answer came, or its program ended."""

    def __init__(self, slot):
        self.slot, self.sent_at, self.result, self.abandoned = slot, time.monotonic(), None, False
        self.done = threading.Event()


class Program:
    """One process that serves, and the memory that both share."""

    def __init__(self, path, url, slots, slot_bytes):
        # A slot that was lent comes back wherever its last reference ends, also in a thread that has the lock.
        self.slot_bytes, self.lock, self.ended = slot_bytes, threading.RLock(), False
        self.lent, self.lent_max = 0, slots - SLOTS_TO_CALL
        self.pending, self.free, self.has_free = {}, list(range(slots)), threading.Condition(self.lock)
        self.number, self.answered_at, self.answers = 0, 0, 0
        memory = os.memfd_create('hitrain-vault')
        os.ftruncate(memory, slots * slot_bytes)
        self.memory = mmap.mmap(memory, slots * slot_bytes)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [path, url, theirs.fileno(), memory, slots, slot_bytes]
        try:
            self.child = subprocess.Popen([str(w) for w in words], pass_fds=(theirs.fileno(), memory),
                                          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
        except OSError as e:
            self.socket.close()
            raise NoProgram(f'{path}: {e.strerror}') from None
        finally:
            theirs.close()
            os.close(memory)
        threading.Thread(target=self._take_answers, daemon=True).start()

    def _take_answers(self):
        while True:
            try:
                packet = self.socket.recv(wire.PACKET_BYTES_MAX)
            except OSError:
                packet = b''
            if len(packet) < wire.ANSWER.size:
                break
            number, result, flags, length = wire.ANSWER.unpack_from(packet)
            text = packet[wire.ANSWER.size:].decode('utf-8', 'replace')
            with self.lock:
                self.answered_at, self.answers = time.monotonic(), self.answers + 1
                request = self.pending.pop(number, None)
                if request is None:
                    break               # a program that answers without a request is not trusted
                if request.abandoned:
                    self._put_slot(request.slot)
                request.result = result, flags, min(length, 1 << 62), text
            request.done.set()
        self.end(by_itself=not packet)

    def _put_slot(self, slot):
        self.free.append(slot)
        self.has_free.notify()

    def take_slot(self, deadline):
        """None where none came free in time, or the program ended."""
        with self.lock:
            while not self.free and not self.ended and time.monotonic() < deadline:
                self.has_free.wait(max(0, deadline - time.monotonic()))
            return self.free.pop() if self.free and not self.ended else None

    def put_slot(self, slot):
        with self.lock:
            self._put_slot(slot)

    def lend(self, slot, count):
        """Memory of a slot, which comes back with the last reference to it. None: calls need the slots that are left."""
        with self.lock:
            if self.lent >= self.lent_max or not count:
                return None
            self.lent += 1
        memory = (ctypes.c_char * count).from_buffer(self.memory, slot * self.slot_bytes)
        weakref.finalize(memory, self._take_back, slot).atexit = False
        return memoryview(memory).cast('B')

    def _take_back(self, slot):
        with self.lock:
            self.lent -= 1
            self._put_slot(slot)

    def send(self, verb, key, slot, deadline, offset, length):
        request = Request(slot)
        name = key.encode()
        with self.lock:
            self.number = (self.number + 1) & 0xffffffff
            number = self.number
            self.pending[number] = request
            if self.ended:
                request.done.set()
        left_ms = max(1, min(int((deadline - time.monotonic()) * 1000), 0xffffffff))
        try:
            self.socket.sendall(wire.REQUEST.pack(number, verb, len(name), slot, left_ms, offset, length) + name)
        except OSError:
            self.end()
        return request

    def abandon(self, request):
        """The caller waits no longer: the slot comes back with the answer. True where the program seems to hang."""
        with self.lock:
            if request.result is not None:      # it came just now: the caller has it, and the slot
                return False
            request.abandoned = True
            hanging = sum(r.abandoned for r in self.pending.values())
            return self.answered_at <= request.sent_at or not self.free and hanging == len(self.pending)

    def end(self, by_itself=False):
        """Kills the process, at once or where it does not end by itself. All requests under way get no answer."""
        with self.lock:
            if self.ended:
                return
            self.ended = True
            for request in self.pending.values():
                request.done.set()
            self.has_free.notify_all()
        if not by_itself or not self.reap(1):
            self.child.kill()
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def reap(self, seconds):
        """True: the process has ended."""
        try:
            self.child.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            return False


class Client(Engine):
    lends = True

    def __init__(self, scheme, url, timeout, slots, slot_bytes=wire.OBJECT_BYTES_MAX):
        super().__init__(shown(url), timeout, slot_bytes)
        keep_memory()
        self.path, self.whole_url, self.slots = program_of(scheme), url, slots
        self.lock, self.program, self.closed = threading.Lock(), None, False
        self.killed, self.ends_at_once, self.not_before = [], 0, 0

    def _program(self, deadline):
        """The one that runs, or a new one."""
        while True:
            with self.lock:
                if self.closed:
                    raise Failed(f'{self.url}: closed')
                if self.program and not self.program.ended:
                    return self.program
                self._note_end()
                self.killed = [p for p in self.killed if not p.reap(0)]
                wait = self.not_before - time.monotonic()
                if wait <= 0 and len(self.killed) < LEFT_ALONE_MAX:
                    self.program = Program(self.path, self.whole_url, self.slots, self.object_bytes_max)
                    return self.program
            if time.monotonic() + max(wait, 0.05) > deadline:
                raise Unknown(f'{self.url} has not answered; {os.path.basename(self.path)} was started again')
            time.sleep(max(wait, 0.05))

    def _note_end(self):
        """Programs that end without one answer start ever more slowly, and then no more."""
        if not self.program:
            return
        self.killed.append(self.program)
        self.ends_at_once = 0 if self.program.answers else self.ends_at_once + 1
        status = self.program.child.returncode if self.program.reap(0 if self.program.answers else 1) else None
        self.program = None
        if self.ends_at_once:
            self.not_before = time.monotonic() + min(RESTART_S_MAX, 0.1 * 4 ** self.ends_at_once)
        if self.ends_at_once >= ENDS_AT_ONCE_MAX and status not in (None, -signal.SIGKILL):
            self.ends_at_once = 0
            raise Failed(f'{self.url}: {self.path} ends before it answers (status {status}); run it by hand to see why')

    def start(self):
        """The program starts while the caller does something else before its first call."""
        self._program(time.monotonic() + self.timeout)

    def exchange(self, verb, key, deadline, parts=(), offset=0, length=0, lend=False):
        program = self._program(deadline)
        slot = program.take_slot(deadline)
        if slot is None:
            raise Again('all requests under way wait for it')
        begin = slot * program.slot_bytes
        at = begin
        for part in parts:
            view = memoryview(part).cast('B')
            program.memory[at:at + len(view)] = view
            at += len(view)
        request = program.send(verb, key, slot, deadline, offset, length)
        request.done.wait(max(0, deadline - time.monotonic()))
        if request.result is None:
            if program.abandon(request):
                program.end()
            if program.ended:
                raise Again(f'{os.path.basename(self.path)} ended or was killed')
        if request.result is None:
            raise Unknown(f'{self.url} has not answered')
        result, flags, count, text = request.result
        has_data = verb in (wire.GET, wire.LIST) and result == wire.OK
        fits = has_data and count <= min(length, program.slot_bytes)
        data = program.lend(slot, count) if fits and lend else None
        if data is None:
            data = memoryview(program.memory[begin:begin + count]) if fits else b''
            program.put_slot(slot)
        if has_data and count != len(data):
            raise Failed(f'{self.url}: its program sent more than there was room for')
        if result > wire.EXISTS:
            raise BY_CODE.get(result, Failed)(text if result == Again.code else f'{self.url}: {text}')
        return result, flags, count, data

    def close(self):
        with self.lock:
            self.closed = True
            program, self.program = self.program, None
        if program:
            program.end()
            program.reap(1)     # else it is in the kernel, and ends when that lets it
