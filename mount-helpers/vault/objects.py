# SPDX-License-Identifier: Apache-2.0
"""Objects of a vault: a header of 64 bytes, then records (docs/vault-format.md). Nothing that is read is believed before
it was checked. Functions are pure, and any thread may call them.
"""
import collections
import re
import struct

from sums import sum64, sum128

MAGIC = b'HTvault\n'
VERSION = 1
HEADER_BYTES = 64
RECORD_BYTES = 48               # before the payload
PAYLOAD_BYTES_MAX = 2 << 20
OBJECT_BYTES_MAX = 32 << 20
NUMBER_MAX = (1 << 63) - 1      # of steps, epochs and heads
LEASES = 1 << 20
SEGMENTS_OF_LEASE = 1 << 15
RANKS_MAX = 1024
END = 4                         # the last record of each object but of segments

# Kinds of objects.
VAULT, LEASE, SEGMENT, MANIFEST, STEP, HEAD, PIN = range(1, 8)
KIND_NAMES = {VAULT: 'vault', LEASE: 'lease', SEGMENT: 'segment', MANIFEST: 'manifest', STEP: 'step', HEAD: 'head',
              PIN: 'pin'}
NO_VAULT = bytes(16)            # the uuid in a pipe

_HEADER = struct.Struct('<8sIIII16sQQ')
_RECORD = struct.Struct('<HHIQQ16s')
_JOB = re.compile('[A-Za-z0-9._-]{1,64}')

Header = collections.namedtuple('Header', 'kind features uuid first second')
Record = collections.namedtuple('Record', 'type place payload sum')


class Failure(Exception):
    """A message for the caller, which names its subject."""


class Damage(Failure):
    """The bytes of an object break the rules of the format: it is cut, changed, of another vault, or of a newer version."""


# ---- names ----

def is_job(name):
    return bool(_JOB.fullmatch(name)) and name.strip('.') != ''


def number_text(number, digits=16):
    """Of fixed width, so that keys sort as their numbers."""
    if not 0 <= number < 1 << 4 * digits:
        raise ValueError(f'{number} does not fit a key')
    return f'{number:0{digits}x}'


def parse_number(text, digits=16):
    """None: it is no such text."""
    return int(text, 16) if re.fullmatch(f'[0-9a-f]{{{digits}}}', text) else None


def key_vault(n):
    return f'vault/{number_text(n)}'


def key_lease(lease):
    return f'lease/{number_text(lease, 8)}'


def key_segment(lease, n):
    return f'seg/{number_text(lease, 8)}/{number_text(n, 4)}'


def key_manifest(job, step, epoch, rank, piece=0):
    key = f'job/{job}/man/{number_text(step)}.{number_text(epoch)}.{number_text(rank, 4)}'
    return f'{key}.{number_text(piece, 4)}' if piece else key


def key_step(job, step, epoch):
    return f'job/{job}/step/{number_text(step)}.{number_text(epoch)}'


def key_head(job, n):
    return f'job/{job}/head/{number_text(n)}'


def key_pin(job, step, epoch, store):
    """store: the 16 bytes of its uuid. The key alone names the pinned step, so a collector lists pins and reads none."""
    return f'job/{job}/pin/{number_text(step)}.{number_text(epoch)}.{store.hex()}'


# ---- header ----

def pack_header(kind, uuid, first=0, second=0, features=0):
    head = _HEADER.pack(MAGIC, VERSION, kind, features, 0, uuid, first, second)
    return head + struct.pack('<Q', sum64(head))


def parse_header(data, kind, uuid=None, known=0):
    """Header. uuid: of the vault, or None if any may be. known: features that the caller knows. The caller's message
    names the object.
    """
    if len(data) < HEADER_BYTES:
        raise Damage('it is cut: its header is missing')
    head = bytes(data[:HEADER_BYTES])
    magic, version, found, features, zero, of, first, second = _HEADER.unpack_from(head)
    if magic != MAGIC:
        raise Damage('it is no object of a vault')
    if struct.unpack_from('<Q', head, 56)[0] != sum64(head[:56]):
        raise Damage('its header is damaged')
    if version != VERSION:
        raise Damage(f'it has version {version}, and this program reads version {VERSION}')
    if features & ~known:
        raise Damage(f'it has features that this program does not know: 0x{features & ~known:x}')
    if found != kind:
        raise Damage(f'it is a {KIND_NAMES.get(found, f"thing of kind {found}")} in the place of a {KIND_NAMES[kind]}')
    if zero:
        raise Damage('its header has bytes that this program does not know')
    if uuid is not None and of != uuid:
        raise Damage('it is of another vault')
    return Header(found, features, of, first, second)


# ---- records ----

def pack_record_head(kind, number, place, payload_sum, payload_bytes):
    head = _RECORD.pack(kind, 0, payload_bytes, number, place, payload_sum)
    return head + struct.pack('<Q', sum64(head))


def pack_record(kind, number, payload, place=0):
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ValueError('a record is too large')
    return pack_record_head(kind, number, place, sum128(payload), len(payload)) + bytes(payload)


def parse_record_head(head, number):
    """(type, place, sum, bytes of the payload) of the record with this number. head: RECORD_BYTES."""
    kind, zero, length, found, place, payload_sum = _RECORD.unpack_from(head)
    if struct.unpack_from('<Q', head, 40)[0] != sum64(head[:40]):
        raise Damage('a record is damaged')
    if found != number:
        raise Damage(f'record {found} comes in the place of record {number}')
    if zero or length > PAYLOAD_BYTES_MAX:
        raise Damage('a record has an impossible size')
    return kind, place, payload_sum, length


class RecordReader:
    """Records from get(bytes) -> a buffer of so many bytes, or fewer at the end. One thread."""

    def __init__(self, get):
        self.get = get
        self.number = 0

    def next(self):
        head = self.get(RECORD_BYTES)
        if len(head) < RECORD_BYTES:
            raise Damage('it is cut: its end mark is missing')
        kind, place, payload_sum, length = parse_record_head(bytes(head), self.number)
        payload = self.get(length)
        if len(payload) < length:
            raise Damage('it is cut: its end mark is missing')
        if sum128(payload) != payload_sum:
            raise Damage(f'{length} bytes of record {self.number} do not match their checksum')
        self.number += 1
        return Record(kind, place, payload, payload_sum)


class Bytes:
    """get() of a RecordReader over an object in memory."""

    def __init__(self, data, at=0):
        self.data, self.at = memoryview(data), at

    def __call__(self, count):
        part = self.data[self.at:self.at + count]
        self.at += len(part)
        return part

    def left(self):
        return len(self.data) - self.at


# ---- whole small objects ----

def pack_object(kind, uuid, first, second, records, features=0):
    """An object of (type, place, payload), with an empty end mark of its own after them."""
    parts = [pack_header(kind, uuid, first, second, features)]
    number = -1
    for number, (record, place, payload) in enumerate(records):
        parts.append(pack_record(record, number, payload, place))
    parts.append(pack_record(END, number + 1, b''))
    data = b''.join(parts)
    if len(data) > OBJECT_BYTES_MAX:
        raise ValueError('an object is too large')
    return data


def parse_object(data, kind, uuid=None, known=0):
    """(Header, [Record]) without the end mark, which is there and the last."""
    head = parse_header(data, kind, uuid, known)
    source = Bytes(data, HEADER_BYTES)
    reader = RecordReader(source)
    records = []
    while True:
        record = reader.next()
        if record.type == END:
            break
        records.append(record)
    if len(record.payload) or record.place:
        raise Damage('its end mark is not as this program knows it')
    if source.left():
        raise Damage('there are bytes after its end mark')
    return head, records
