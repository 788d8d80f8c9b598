# SPDX-License-Identifier: Apache-2.0
"""Scheme test, for tests alone: an engine that lies, hangs, fills up and dies, as a script says.

Memory is such an engine in this process. `test:/FOLDER` is one whose objects are files in FOLDER, so that they survive the
end of its program. Faulty puts a script before any scheme. A script is a list of faults, one a line in FOLDER/~faults. The
first that fits a request is used up by it:

    [TIMES*]FAULT VERB [PREFIX]      TIMES: how many requests (1), or `*` for all. VERB: put_new, get, list, remove or `any`

    delay=S       does it, S seconds late
    again         does nothing and says so: the client tries again
    lost-before   does nothing; there is never an answer
    lost-after    does it; there is never an answer
    late=S        says `again`, and does it S seconds afterwards
    end-before, end-after   the program ends before, or after, it did it
    hang          the program stops as a whole (SIGSTOP)
    full, refused, missing, no-vault, failed   this error
    twice         a put_new replaces what is there, and says that it made it
    stale=N       a list without the N newest objects
    flip=AT       a get with one bit of byte AT changed;  cut=N  the first N bytes alone
"""
import os
import re
import signal
import threading
import time
import urllib.parse

from errors import Again, Failed, Full, Missing, NoVault, Refused
from scheme_file import File
import wire

LINE = re.compile(r'(?:(\d+|\*)\*)?([a-z-]+)(?:=([0-9.]+))? (put_new|get|list|remove|any)(?: (\S+))?')
ERRORS = {'full': Full, 'refused': Refused, 'no-vault': NoVault, 'missing': Missing, 'failed': Failed, 'again': Again}


class Memory:
    """Objects in a dictionary. clock() gives the engine's time in seconds."""

    def __init__(self, clock=time.time, page=1000):
        self.objects, self.lock, self.clock, self.page = {}, threading.Lock(), clock, page

    def hello(self, deadline):
        return wire.OBJECT_BYTES_MAX

    def put_new(self, key, data, deadline):
        with self.lock:
            if key in self.objects:
                return False
            self.objects[key] = bytes(data), self.clock()
            return True

    def get(self, key, offset, room, deadline):
        with self.lock:
            if key not in self.objects:
                raise Missing(f'no object {key}')
            part = self.objects[key][0][offset:offset + len(room)]
        room[:len(part)] = part
        return len(part)

    def list(self, prefix, after, deadline):
        now = self.clock()
        with self.lock:
            keys = sorted(k for k in self.objects if k.startswith(prefix) and k > after)
            page = [(k, len(self.objects[k][0]), now - self.objects[k][1]) for k in keys[:self.page]]
        return page, len(keys) > self.page

    def remove(self, key, deadline):
        with self.lock:
            self.objects.pop(key, None)


class Script:
    """The faults that are left. used: a file that remembers them when the program ends."""

    def __init__(self, text, used=None):
        self.lock, self.faults, self.used = threading.Lock(), [], used
        for line in text.splitlines():
            m = LINE.fullmatch(line.strip())
            if not m:
                raise Failed(f'no fault: {line}')
            times = float('inf') if m[1] == '*' else int(m[1] or 1)
            self.faults.append([times, m[2], float(m[3] or 0), m[4], m[5] or ''])
        if used and os.path.exists(used):
            with open(used) as f:
                for line in f:
                    if int(line) < len(self.faults):    # of this script, and not of one before it
                        self.faults[int(line)][0] -= 1

    def take(self, verb, key):
        """(fault, number), or ('', 0)."""
        with self.lock:
            for i, fault in enumerate(self.faults):
                if fault[0] > 0 and fault[3] in (verb, 'any') and key.startswith(fault[4]):
                    fault[0] -= 1
                    if self.used:
                        with open(self.used, 'a') as f:
                            f.write(f'{i}\n')
                    return fault[1], fault[2]
        return '', 0


class Faulty:
    """A scheme behind a script. end() ends the process; never() waits for ever. Tests within one process let both raise."""

    def __init__(self, scheme, script, end=lambda: os._exit(1), never=lambda: threading.Event().wait()):
        self.scheme, self.script, self.end, self.never = scheme, script, end, never

    def hello(self, deadline):
        return self.scheme.hello(deadline)

    def _do(self, verb, key, words, deed):
        fault, number = self.script.take(verb, key)
        if fault in ERRORS:
            raise ERRORS[fault](f'the script says {fault}')
        if fault == 'delay':
            time.sleep(number)
        elif fault == 'hang':
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)                       # the kernel stops this thread a moment later
        elif fault == 'late':
            threading.Timer(number, deed, words).start()
            raise Again('an answer was lost; the deed comes later')
        elif fault == 'end-before':
            self.end()
        elif fault == 'lost-before':
            self.never()
        elif fault == 'twice':
            self.scheme.remove(key, words[-1])
        result = deed(*words)
        if fault == 'end-after':
            self.end()
        elif fault == 'lost-after':
            self.never()
        return result, fault, int(number)

    def put_new(self, key, data, deadline):
        return self._do('put_new', key, (key, bytes(data), deadline), self.scheme.put_new)[0]

    def get(self, key, offset, room, deadline):
        count, fault, number = self._do('get', key, (key, offset, room, deadline), self.scheme.get)
        if fault == 'flip' and number < count:
            room[number] ^= 1
        return min(number, count) if fault == 'cut' else count

    def list(self, prefix, after, deadline):
        (entries, more), fault, number = self._do('list', prefix, (prefix, after, deadline), self.scheme.list)
        if fault == 'stale':
            young = {e[0] for e in sorted(entries, key=lambda e: e[2])[:number]}
            entries = [e for e in entries if e[0] not in young]
        return entries, more

    def remove(self, key, deadline):
        self._do('remove', key, (key, deadline), self.scheme.remove)


def open_scheme(url):
    root = urllib.parse.unquote(urllib.parse.urlsplit(url).path)
    try:
        with open(os.path.join(root, '~faults')) as f:
            text = f.read()
    except FileNotFoundError:
        text = ''
    return Faulty(File('file://' + urllib.parse.quote(root)), Script(text, os.path.join(root, '~used')))
