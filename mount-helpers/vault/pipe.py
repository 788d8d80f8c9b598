# SPDX-License-Identifier: Apache-2.0
"""A step through a pipe: a manifest with blocks in place of places (docs/vault-format.md)."""
import fcntl
import os
import select
import threading
import time

from objects import HEADER_BYTES, MANIFEST, NO_VAULT, NUMBER_MAX, Damage, Failure, RecordReader, pack_header, \
    pack_record_head, parse_header
from sums import sum128
import stop

PIPE_BYTES = 1 << 20


def widen(fd):
    """So that one call moves a block. A file or a limit of the system may refuse."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ if hasattr(fcntl, 'F_SETPIPE_SZ') else 1031, PIPE_BYTES)
    except OSError:
        pass


class Rate:
    """Waits until so many bytes may have moved. None: at once. Any thread."""

    def __init__(self, bytes_per_second):
        self.per_second, self.lock = bytes_per_second, threading.Lock()
        self.began, self.bytes = time.monotonic(), 0

    def add(self, count):
        if self.per_second:
            with self.lock:
                self.bytes += count
                due = self.began + self.bytes / self.per_second
            time.sleep(max(due - time.monotonic(), 0))


class Output:
    """Records to a descriptor. Failure. One thread."""

    def __init__(self, fd, step, rate=None):
        self.fd, self.number, self.rate = fd, 0, Rate(rate)
        widen(fd)
        self.write(pack_header(MANIFEST, NO_VAULT, step))

    def put(self, kind, payload, place, payload_sum):
        payload_sum = payload_sum or sum128(payload)
        self.write(pack_record_head(kind, self.number, place, payload_sum, len(payload)), payload)
        self.number += 1

    def write(self, *parts):
        left = [memoryview(p) for p in parts if len(p)]
        try:
            while left:
                count = os.writev(self.fd, left)
                self.rate.add(count)
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = left[0][count:]
        except BrokenPipeError:
            raise Failure('cannot write: the reader (hitrainctl restore) has ended, or was killed; start both programs '
                          'again: nothing is left of a step that was cut') from None
        except OSError as e:
            raise Failure(f'cannot write: {e.strerror}') from None


class Input:
    """Records from a descriptor. Failure, and Damage. One thread."""

    def __init__(self, fd):
        self.fd, self.at = fd, 0
        self.reader = RecordReader(self.get)
        widen(fd)

    def get(self, count):
        """A buffer of so many bytes; fewer at the end."""
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            stop.check()
            try:
                if not select.select([self.fd], [], [], stop.LOOK_S)[0]:
                    continue
                got = os.readv(self.fd, [view[done:]])
            except OSError as e:
                raise Failure(f'cannot read: {e.strerror}') from None
            if not got:
                break
            done += got
        self.at += done
        return view[:done]

    def header(self):
        """The number of the step."""
        head = parse_header(self.get(HEADER_BYTES), MANIFEST, NO_VAULT)
        if head.first > NUMBER_MAX or head.second:
            raise Damage('its number is impossible')
        return head.first

    def records(self):
        while True:
            yield self.reader.next()

    def expect_end(self):
        if len(self.get(1)):
            raise Damage('there are bytes after the end mark')
