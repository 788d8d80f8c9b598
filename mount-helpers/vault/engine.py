# SPDX-License-Identifier: Apache-2.0
"""One vault, whatever engine holds it.

    vault = engine.open('s3://ckpt/vault', timeout=30)
    vault.put_new(key, parts)            True: made, and on stable storage. False: the key was there before this call
    vault.get(key, offset=0, length=None)  memoryview of bytes that belong to the caller; shorter only at the object's end.
                                         lend: these may be the memory of a slot, for as long as anything refers to them
    vault.list(prefix, after='')         iterator of (key, bytes, age in seconds by the engine's clock), ascending by key
    vault.remove(key)                    well also where no such key is
    vault.close()

Every call takes `timeout=` in seconds, else that of open(). It ends by then with errors.Unknown: a deed may have been done,
or may be done later. Other errors are the classes of errors.py. All methods may be called by several threads at once; each
call has a slot of its own, and waits for one where all are taken.

A call that got no clear answer is tried again until its deadline. A put_new that is tried again and finds the key compares:
it is True where the bytes are its own. So an answer that was lost changes nothing.
"""
import os
import re
import time
import urllib.parse

from errors import Again, EngineError, Failed, Full, Missing, NoProgram, NoVault, Refused, TooLarge, Unknown  # noqa: F401
import wire

TIMEOUT_S = 30
SLOTS = 20
RETRY_S_MIN, RETRY_S_MAX = 0.05, 2
WORDS_OF_CREDENTIALS = re.compile('key|secret|token|password|signature|credential', re.I)


class Engine:
    """What all engines share. A subclass has exchange() and close(), and lends if its exchange() takes lend=True."""

    lends = False

    def __init__(self, url, timeout, object_bytes_max=wire.OBJECT_BYTES_MAX):
        self.url, self.timeout, self.object_bytes_max = url, timeout, object_bytes_max

    def exchange(self, verb, key, deadline, parts=(), offset=0, length=0):
        """One try: (result, flags, length, data). Again where the outcome is not known. deadline: time.monotonic()."""
        raise NotImplementedError

    def close(self):
        """Ends what serves it. Calls that are under way fail."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def put_new(self, key, parts, timeout=None):
        """parts: bytes-like, or a sequence. The caller may change them afterwards."""
        if isinstance(parts, (bytes, bytearray, memoryview)):
            parts = [parts]
        total = sum(memoryview(p).nbytes for p in parts)
        if total > self.object_bytes_max:
            raise TooLarge(f'{self.url}: {key} has {total} bytes, and at most {self.object_bytes_max} are possible')
        deadline = self._deadline(timeout)
        result, tries = self._repeat(wire.PUT_NEW, key, deadline, parts=parts, length=total)[0::4]
        if result == wire.OK:
            return True
        return tries > 1 and self._is_own(key, parts, total, deadline)

    def _is_own(self, key, parts, total, deadline):
        try:
            found = self._repeat(wire.GET, key, deadline, length=self.object_bytes_max)[3]
        except Missing:
            return False
        return len(found) == total and bytes(found) == b''.join(parts)

    def get(self, key, offset=0, length=None, timeout=None, lend=False):
        if length is None:
            length = self.object_bytes_max
        deadline, out, how = self._deadline(timeout), [], {'lend': True} if lend and self.lends else {}
        while True:
            part = self._repeat(wire.GET, key, deadline, offset=offset, length=min(length, self.object_bytes_max), **how)[3]
            out.append(part)
            offset, length = offset + len(part), length - len(part)
            if length == 0 or len(part) < min(length + len(part), self.object_bytes_max):
                return memoryview(out[0] if len(out) == 1 else b''.join(out))

    def list(self, prefix, after='', timeout=None):
        """Each page of the list has the whole timeout."""
        more = True
        while more:
            _, flags, _, data, _ = self._repeat(wire.LIST, f'{prefix}\0{after}', self._deadline(timeout),
                                                length=self.object_bytes_max)
            try:
                entries = wire.unpack_entries(data)
            except ValueError:
                raise Failed(f'{self.url}: its program sent a list that cannot be read') from None
            for entry in entries:
                if not entry[0].startswith(prefix) or entry[0] <= after:
                    raise Failed(f'{self.url}: its program sent a list that is not in order')
                after = entry[0]
                yield entry
            more = bool(flags & wire.MORE)
            if more and not entries:
                raise Failed(f'{self.url}: its program sent a page of a list without an entry')

    def remove(self, key, timeout=None):
        self._repeat(wire.REMOVE, key, self._deadline(timeout))

    def hello(self, timeout=None):
        """The largest object that the engine takes. An error where it cannot be reached."""
        largest = self._repeat(wire.HELLO, '', self._deadline(timeout))[2]
        self.object_bytes_max = min(self.object_bytes_max, largest)
        return self.object_bytes_max

    def _deadline(self, timeout):
        return time.monotonic() + (self.timeout if timeout is None else timeout)

    def _repeat(self, verb, key, deadline, **words):
        """(result, flags, length, data, number of tries)."""
        if verb not in (wire.HELLO, wire.LIST) and not wire.is_key(key):
            raise Failed(f'{self.url}: {key!r} is no key of an object')
        wait, tries, why = RETRY_S_MIN, 0, ''
        while True:
            tries += 1
            try:
                return *self.exchange(verb, key, deadline, **words), tries
            except Again as e:
                why = f' ({e})'
            left = deadline - time.monotonic()
            if left <= wait:
                raise Unknown(f'{self.url} has not answered{why}')
            time.sleep(wait)
            wait = min(2 * wait, RETRY_S_MAX)


def perform(scheme, verb, key, offset, length, slot, deadline):
    """One request to a scheme: (result, flags, length). Errors are raised. slot: writable memory."""
    if verb == wire.HELLO:
        return wire.OK, 0, scheme.hello(deadline)
    if verb == wire.LIST:
        prefix, _, after = key.partition('\0')
        if not wire.is_prefix(prefix) or after and not wire.is_key(after):
            raise Failed('no prefix of keys')
        entries, more = scheme.list(prefix, after, deadline)
        data, fit = wire.pack_entries(entries, min(length, len(slot)))
        slot[:len(data)] = data
        return wire.OK, wire.MORE if more or not fit else 0, len(data)
    if not wire.is_key(key) or length > len(slot) and verb == wire.PUT_NEW:
        raise Failed('no key of an object')
    if verb == wire.PUT_NEW:
        return wire.OK if scheme.put_new(key, slot[:length], deadline) else wire.EXISTS, 0, 0
    if verb == wire.GET:
        return wire.OK, 0, scheme.get(key, offset, slot[:min(length, len(slot))], deadline)
    if verb == wire.REMOVE:
        scheme.remove(key, deadline)
        return wire.OK, 0, 0
    raise Failed('unknown verb')


def split(url):
    """(scheme, URL) of a URL or a path. Refuses what would show a secret in lists of processes and in messages."""
    m = re.match('([a-z][a-z0-9]*):', url)
    if not m:
        return 'file', 'file://' + urllib.parse.quote(os.path.abspath(url))
    parts = urllib.parse.urlsplit(url)
    words = [k for k, _ in urllib.parse.parse_qsl(parts.query)]
    if ':' in parts.netloc.rpartition('@')[0] or any(WORDS_OF_CREDENTIALS.search(w) for w in words):
        raise Refused(f'{shown(url)}: a URL holds no credentials; the program of its scheme finds them in the environment'
                      ' or in the files of its engine, such as ~/.aws/credentials')
    return m[1], url


def shown(url):
    """The URL without anything that could be a secret."""
    parts = urllib.parse.urlsplit(url)
    user, at, host = parts.netloc.rpartition('@')
    query = [(k, '...' if WORDS_OF_CREDENTIALS.search(k) else v) for k, v in urllib.parse.parse_qsl(parts.query)]
    return urllib.parse.urlunsplit(parts._replace(netloc=user.partition(':')[0] + at + host,
                                                  query=urllib.parse.urlencode(query, safe=':/'), fragment=''))


def split_job(url):
    """(URL of the vault, job, step or None) of URL/JOB[@STEP]. A query belongs to the vault."""
    rest, mark, query = url.partition('?')
    vault, _, name = rest.rstrip('/').rpartition('/')
    job, at, step = name.partition('@')
    if not vault or not wire.PART.fullmatch(job) or job in ('.', '..') or len(job) > 64:
        raise Failed(f'{shown(url)}: expected URL/JOB, with a job of 1 to 64 of A-Z, a-z, 0-9, dot, line and dash')
    if at and not re.fullmatch('[0-9]{1,18}', step):
        raise Failed(f'{shown(url)}: expected the number of a step after @')
    return vault + mark + query, job, int(step) if at else None


def open(url, timeout=TIMEOUT_S, slots=SLOTS):
    """The engine of a URL or path. Nothing is asked before the first call. slots: requests at once."""
    import client
    scheme, url = split(url)
    return client.Client(scheme, url, timeout, slots)
