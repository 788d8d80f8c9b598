# SPDX-License-Identifier: Apache-2.0
"""Numbers of segments. A store takes a lease, a number of its own, and counts its segments below it.

The lease is remembered in a file, locked while it is in use, with the first number that no segment has had. So no number is used
twice, also when collectors have removed segments: a removal that comes late finds nothing. Where the file is lost or in use, the store
takes another lease. A copy of a disk image may go on under the same lease: it meets a key with other bytes, and takes a new one.
"""
import fcntl
import os
import threading

import heads
import jobs
import objects
from errors import Missing
from objects import Failure


RESERVED = 64       # numbers that the file gives at once


class Lease:
    """folder: where leases are remembered, or None. Any thread may call put()."""

    def __init__(self, engine, vault, store, boot, host, folder=None, pause=None):
        self.engine, self.vault = jobs.Patient(engine, pause), vault
        self.store, self.boot, self.host, self.nonce = store, boot, host, os.urandom(16)
        self.lock, self.file, self.lease, self.n, self.end = threading.Lock(), None, None, 0, 0
        self._remember(folder)
        if self.lease is None:
            self._take()

    def put(self, build):
        """Puts a segment under the next number: (lease, n). build(lease, n) gives its parts, a list of bytes-like."""
        while True:
            with self.lock:
                lease, n = self._next()
            parts = build(lease, n)
            key = objects.key_segment(lease, n)
            done = None
            while done is None:
                done = self.engine.put_new(key, parts)
            if done or self._same(key, parts):
                return lease, n
            with self.lock:
                if lease == self.lease:
                    self._take()

    def close(self):
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def _same(self, key, parts):
        try:
            return bytes(self.engine.get(key)) == b''.join(parts)
        except Missing:
            return False

    def _next(self):
        if self.n == objects.SEGMENTS_OF_LEASE:
            self._take()
        if self.n == self.end:
            self._reserve()
        n, self.n = self.n, self.n + 1
        return self.lease, n

    def _reserve(self):
        end = min(self.n + RESERVED, objects.SEGMENTS_OF_LEASE)
        if self.file is not None:
            os.pwrite(self.file, b'%08x %04x\n' % (self.lease, end), 0)
            os.fsync(self.file)
        self.end = end

    def _take(self):
        """The lowest free number."""
        while True:
            lease = 0
            for key, _, _ in self.engine.list('lease/'):
                number = objects.parse_number(key[len('lease/'):], 8)
                if number is not None and number > lease:
                    break
                lease = lease if number is None else number + 1
            if lease >= objects.LEASES:
                raise Failure('all leases of the vault are taken: make a new vault')
            data = heads.pack_lease(self.vault.uuid, heads.Lease(lease, self.store, self.boot, self.nonce, self.host))
            key = objects.key_lease(lease)
            if self.engine.put_new(key, data) or self._same(key, [data]):
                break
        self.lease, self.n, self.end = lease, 0, 0
        self._reserve()     # so that a program that puts nothing leaves it to the next one

    def _remember(self, folder):
        if not folder:
            return
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self.file = os.open(os.path.join(folder, f'{self.vault.uuid.hex()}.{self.store.hex()}'),
                                os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()        # another archiver of this store, or no place to remember it: a lease of its own
            return
        text = os.pread(self.file, 14, 0).decode('ascii', 'replace')
        self._resume(objects.parse_number(text[:8], 8), objects.parse_number(text[9:13], 4))

    def _resume(self, lease, n):
        if lease is None or n is None or lease >= objects.LEASES or n > objects.SEGMENTS_OF_LEASE:
            return
        key = objects.key_lease(lease)
        try:
            of = jobs.parse(key, heads.parse_lease, self.engine.get(key), self.vault.uuid, lease)
        except Missing:
            return
        if of.store == self.store:
            self.lease, self.n, self.end = lease, n, n
