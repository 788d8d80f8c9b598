# SPDX-License-Identifier: Apache-2.0
"""Scheme rados: `rados://POOL/NAME[?data=POOL2][&conf=PATH][&user=NAME]`, by python3-rados. NAME is a namespace of the pools.

put_new is one operation: create exclusively and write. Segments go to the pool `data`, which may be erasure-coded; all
else goes to POOL, a small replicated one, because a list costs the whole pool. Operations have a timeout, without which
librados waits for ever. One that timed out may land later, which changes nothing: no object is written twice.

Times of objects come from the clock of a storage daemon (class otp), not from that of the writer.
"""
import contextlib
import os
import struct
import threading
import time
import urllib.parse

from errors import Again, Failed, Full, Missing, NoProgram, NoVault, Refused, TooLarge
import wire

try:
    import rados
except ImportError:
    rados = None

TIMEOUT_S = 20
FULL_TRY = 64               # LIBRADOS_OPERATION_FULL_TRY: an error in place of a wait; what frees space goes on
CLOCK = '~clock'            # no key of a vault
CLOCK_LOOK_S = 60
PAGE = 1000
SNAPSHOT_S = 600
TIMES_OUT = {110, 108, 104, 107, 11}        # ETIMEDOUT, ESHUTDOWN (fenced), ECONNRESET, ENOTCONN, EAGAIN


@contextlib.contextmanager
def trusted(path):
    """A name of the file while it is open. A configuration names files that librados writes: root takes that of nobody else."""
    try:
        f = open(path, 'rb')
    except OSError as e:
        raise Refused(f'{path}: {e.strerror}') from None
    with f:
        s = os.fstat(f.fileno())
        if os.geteuid() == 0 and (s.st_uid or s.st_mode & 0o022):
            raise Refused(f'{path}: root reads no configuration that others may write: chown and chmod it')
        yield f'/proc/self/fd/{f.fileno()}'


class Rados:
    def __init__(self, url):
        if not rados:
            raise NoProgram('Python lacks rados: install python3-rados')
        parts = urllib.parse.urlsplit(url)
        query = dict(urllib.parse.parse_qsl(parts.query))
        self.name = urllib.parse.unquote(parts.path).strip('/')
        if not parts.netloc or not self.name or set(query) - {'data', 'conf', 'user'}:
            raise Failed('expected rados://POOL/NAME, perhaps with ?data=POOL&conf=PATH&user=NAME')
        self.lock, self.clock_at, self.clock_ahead_s, self.snapshot = threading.Lock(), None, None, (None, 0, [])
        self.cluster = self._connect(query)
        self.meta = self._pool(parts.netloc)
        self.data = self._pool(query.get('data', parts.netloc))

    @staticmethod
    def _connect(query):
        conf = {f'rados_{of}_op_timeout': str(TIMEOUT_S) for of in ('osd', 'mon')}
        conf['client_mount_timeout'] = str(TIMEOUT_S)
        try:
            with trusted(query['conf']) if 'conf' in query else contextlib.nullcontext(rados.Rados.DEFAULT_CONF_FILES) as conffile:
                cluster = rados.Rados(conffile=conffile, rados_id=query.get('user'), conf=conf)
            cluster.connect()
            return cluster
        except rados.ObjectNotFound:
            raise Refused('no ceph.conf, or no keyring of this user: name them in CEPH_CONF, or in ?conf= and ?user=') \
                from None
        except rados.Error as e:
            raise error_of(e) from None

    def _pool(self, name):
        try:
            pool = self.cluster.open_ioctx(name)
        except rados.ObjectNotFound:
            raise NoVault(f'there is no pool {name}: make it, or name another one') from None
        except rados.Error as e:
            raise error_of(e) from None
        pool.set_namespace(self.name)
        return pool

    def _pool_of(self, key):
        return self.data if key.startswith('seg/') else self.meta

    def hello(self, deadline):
        self._now()
        return wire.OBJECT_BYTES_MAX

    def put_new(self, key, data, deadline):
        with rados.WriteOpCtx() as op:
            op.new(rados.LIBRADOS_CREATE_EXCLUSIVE)
            op.write_full(bytes(data))
            try:
                self._pool_of(key).operate_write_op(op, key, mtime=int(self._now() or time.time()), flags=FULL_TRY)
            except rados.ObjectExists:
                return False
            except rados.Error as e:
                raise error_of(e) from None
        return True

    def get(self, key, offset, room, deadline):
        done = 0
        try:
            while done < len(room):
                part = self._pool_of(key).read(key, min(4 << 20, len(room) - done), offset + done)
                if not part:
                    break
                room[done:done + len(part)] = part
                done += len(part)
            if not len(room):
                self._pool_of(key).stat(key)
        except rados.ObjectNotFound:
            raise Missing(f'no object {key}') from None
        except rados.Error as e:
            raise error_of(e) from None
        return done

    def list(self, prefix, after, deadline):
        seen = self._keys(prefix, after)
        keys = [k for k in seen if k > after]
        now = self._now()
        found = {}
        page = [(k, self._pool_of(k).aio_stat(k, lambda _, size, at, k=k: found.update({k: (size, at)})))
                for k in keys[:PAGE]]
        for _, completion in page:
            completion.wait_for_complete_and_cb()
        for key, completion in page:
            if completion.get_return_value() not in (0, -2):
                raise Again('storage daemons do not answer')
        there = [(k, found[k][0], now - time.mktime(found[k][1]) if now else 0) for k, c in page if c.get_return_value() == 0]
        more = len(keys) > PAGE
        if more and not there:      # which would be the end of the list
            raise Again('a whole page went while it was listed')
        if more:
            with self.lock:
                self.snapshot = (prefix, there[-1][0]), time.monotonic(), seen
        return there, more

    def _keys(self, prefix, after):
        """The next page of a list comes from what its first page saw. A new list may begin behind any key, and sees all."""
        with self.lock:
            (of, at, keys), self.snapshot = self.snapshot, (None, 0, [])
        if of == (prefix, after) and time.monotonic() - at < SNAPSHOT_S:
            return keys
        pools = {'seg/': [self.data], '': [self.meta, self.data]}.get(prefix[:4], [self.meta])
        try:
            found = {o.key for pool in pools for o in pool.list_objects()}
        except rados.Error as e:
            raise error_of(e) from None
        return sorted(k for k in found if k.startswith(prefix) and wire.is_key(k))

    def remove(self, key, deadline):
        with rados.WriteOpCtx() as op:
            op.remove()
            try:
                self._pool_of(key).operate_write_op(op, key, flags=FULL_TRY)
            except rados.ObjectNotFound:
                pass
            except rados.Error as e:
                raise error_of(e) from None

    def _now(self):
        """The clock of a storage daemon; 0 where no class tells it: all objects are young then, and stay."""
        with self.lock:
            if self.clock_at is None or time.monotonic() - self.clock_at > CLOCK_LOOK_S:
                self.clock_ahead_s = self._look_at_clock()
                self.clock_at = time.monotonic()
            return time.monotonic() + self.clock_ahead_s if self.clock_ahead_s is not None else 0

    def _look_at_clock(self):
        try:
            try:
                count, answer = self._ask_clock()
            except rados.ObjectNotFound:
                self.meta.write_full(CLOCK, b'')
                count, answer = self._ask_clock()
        except (rados.PermissionError, rados.OSError) as e:
            if abs(e.errno or 0) in (1, 13, 95):
                return None
            raise error_of(e) from None
        except rados.Error as e:
            raise error_of(e) from None
        seconds, ns = struct.unpack_from('<II', answer, 6)
        return seconds + ns / 1e9 - time.monotonic()

    def _ask_clock(self):
        # an operation without fields, and its answer: version 1, least version 1, length 4, seconds 4, nanoseconds 4
        return self.meta.execute(CLOCK, 'otp', 'get_current_time', struct.pack('<BBI', 1, 1, 0))


def error_of(e):
    number = abs(getattr(e, 'errno', 0) or 0)
    if number in (28, 122):
        return Full('the pool or the cluster is full, or a quota is used up')
    if number in (1, 13):
        return Refused('this user may not do that: see `ceph auth get`, and name a user in ?user= or CEPH_ARGS')
    if number == 27:
        return TooLarge('the cluster takes no object of this size')
    if number == 2:
        return NoVault('the pool is gone')
    if number in TIMES_OUT or isinstance(e, rados.TimedOut):
        return Again('storage daemons do not answer')
    return Again(f'error {number}') if number == 5 else Failed(f'error {number} of librados')


open_scheme = Rados
