# SPDX-License-Identifier: Apache-2.0
"""The small objects of a vault (docs/vault-format.md): what they hold, and how they are written and read.

Functions are pure. Damage names what is wrong; the caller adds which object it is.
"""
import collections
import struct

import objects
from objects import Damage

# Types of records.
SUMMARY, SEGMENTS, OF_VAULT, OF_LEASE, OF_HEAD, ENTRIES, OF_PIN = 12, 13, 20, 21, 22, 23, 24
NONE, FULL, LOGGED = range(3)           # kinds of steps; NONE: a rank that has no such step any more
ENTRIES_MAX = 4096
GRACE_SECONDS_MIN = 3600
NOTHING = bytes(16)
SINGLE_WRITER = 1                       # flag of a head: the engine does not keep create-if-absent

Vault = collections.namedtuple('Vault', 'n uuid grace segment_bytes')
Lease = collections.namedtuple('Lease', 'lease store boot nonce host')   # nonce: 16 random bytes of who took it
# opener: 16 random bytes of who opened the epoch. writer: for people. entries: in the order in which steps came.
Head = collections.namedtuple('Head', 'n epoch opener ranks flags time writer entries')
# step to last: equal but in a run of logged steps. sum: of the step object of the last one.
Entry = collections.namedtuple('Entry', 'step epoch last kind ranks time bytes new sum digest')
# What one rank says of its manifest. digest: of a logged step its sum. rest: XXH3-128 of all that follows in its pieces.
# base: (step, epoch) whose segments it uses, and of a logged step the one before; (0, 0) if there is none.
Summary = collections.namedtuple('Summary', 'kind rank ranks pieces bytes new digest rest lineage base time store host name shards')
Step = collections.namedtuple('Step', 'step epoch before summaries')     # before: sum of the step object before a logged one
Pin = collections.namedtuple('Pin', 'step epoch store boot host')

_VAULT = struct.Struct('<QQ')
_LEASE = struct.Struct('<16s16s16s')
_PIN = struct.Struct('<16s16s')
_HEAD = struct.Struct('<16sIIq')
_ENTRY = struct.Struct('<QQQIIqQQ16s16s40x')
_SUMMARY = struct.Struct('<HHHHQQ16s16sQQQq16s')
_RUN = struct.Struct('<IHH')
assert _ENTRY.size == 128


def _pack_texts(*texts):
    return b''.join(struct.pack('<I', len(data)) + data for data in (text.encode('utf-8', 'surrogateescape') for text in texts))


def _parse_texts(data, count):
    texts, at, data = [], 0, bytes(data)
    for _ in range(count):
        end = at + 4 + (struct.unpack_from('<I', data, at)[0] if at + 4 <= len(data) else 0)
        if at + 4 > len(data) or end > len(data):
            raise Damage('a text in it is cut')
        texts.append(data[at + 4:end].decode('utf-8', 'surrogateescape'))
        at = end
    if at != len(data):
        raise Damage('a record in it is too long')
    return texts


def _fixed(form, payload):
    """(fields, the bytes after them)"""
    if len(payload) < form.size:
        raise Damage('a record in it is too short')
    return form.unpack_from(payload), bytes(payload[form.size:])


def _one(records, kind, count=1):
    if len(records) != count or records[0].type != kind:
        raise Damage('its records are not those of its kind')
    return records[0].payload


# ---- vault, lease, pin ----

def pack_vault(v):
    return objects.pack_object(objects.VAULT, v.uuid, v.n, 0, [(OF_VAULT, 0, _VAULT.pack(v.grace, v.segment_bytes))])


def parse_vault(data, n):
    head, records = objects.parse_object(data, objects.VAULT)
    (grace, segment_bytes), rest = _fixed(_VAULT, _one(records, OF_VAULT))
    if rest or head.first != n or grace < GRACE_SECONDS_MIN or not 1 << 20 <= segment_bytes <= objects.OBJECT_BYTES_MAX:
        raise Damage('its numbers are impossible')
    return Vault(n, head.uuid, grace, segment_bytes)


def pack_lease(uuid, lease):
    return objects.pack_object(objects.LEASE, uuid, lease.lease, 0,
                               [(OF_LEASE, 0, _LEASE.pack(lease.store, lease.boot, lease.nonce) + _pack_texts(lease.host))])


def parse_lease(data, uuid, lease):
    head, records = objects.parse_object(data, objects.LEASE, uuid)
    (store, boot, nonce), rest = _fixed(_LEASE, _one(records, OF_LEASE))
    if head.first != lease:
        raise Damage('its numbers are those of another lease')
    return Lease(lease, store, boot, nonce, *_parse_texts(rest, 1))


def pack_pin(uuid, pin):
    return objects.pack_object(objects.PIN, uuid, pin.step, pin.epoch,
                               [(OF_PIN, 0, _PIN.pack(pin.store, pin.boot) + _pack_texts(pin.host))])


def parse_pin(data, uuid):
    head, records = objects.parse_object(data, objects.PIN, uuid)
    (store, boot), rest = _fixed(_PIN, _one(records, OF_PIN))
    return Pin(head.first, head.second, store, boot, *_parse_texts(rest, 1))


# ---- summary and segments of a manifest ----

def pack_summary(s):
    """The payload of record 0 of a manifest's first piece."""
    return _SUMMARY.pack(s.kind, s.rank, s.ranks, s.pieces, s.bytes, s.new, s.digest, s.rest, s.lineage, *s.base, s.time,
                         s.store) + _pack_texts(s.host, s.name, s.shards)


def parse_summary(payload):
    (kind, rank, ranks, pieces, size, new, digest, rest, lineage, step, epoch, time, store), texts = _fixed(_SUMMARY, payload)
    if kind > LOGGED or not rank < ranks <= objects.RANKS_MAX or not pieces:
        raise Damage('its summary has impossible numbers')
    return Summary(kind, rank, ranks, pieces, size, new, digest, rest, lineage, (step, epoch), time, store, *_parse_texts(texts, 3))


def pack_segments(segments):
    """Payloads of the records that name all segments, (lease, n), which a manifest uses: runs that ascend."""
    runs = []
    for lease, n in sorted(set(segments)):
        if runs and runs[-1][0] == lease and runs[-1][1] + runs[-1][2] == n:
            runs[-1][2] += 1
        else:
            runs.append([lease, n, 1])
    most = objects.PAYLOAD_BYTES_MAX // _RUN.size
    return [b''.join(_RUN.pack(*run) for run in runs[i:i + most]) for i in range(0, len(runs), most)]


def parse_segments(payload):
    """[(lease, first n, count)]"""
    if len(payload) % _RUN.size:
        raise Damage('its list of segments is cut')
    runs = list(_RUN.iter_unpack(payload))
    for lease, n, count in runs:
        if lease >= objects.LEASES or not count or n + count > objects.SEGMENTS_OF_LEASE:
            raise Damage('its list of segments has impossible numbers')
    return runs


# ---- steps and heads ----

def pack_step(uuid, s):
    """The same step has the same bytes, whoever writes it."""
    records = [(SUMMARY, 0, s.before)] + [(SUMMARY, rank + 1, pack_summary(one)) for rank, one in enumerate(s.summaries)]
    return objects.pack_object(objects.STEP, uuid, s.step, s.epoch, records)


def parse_step(data, uuid, step, epoch):
    head, records = objects.parse_object(data, objects.STEP, uuid)
    if (head.first, head.second) != (step, epoch):
        raise Damage('its numbers are those of another step')
    if not 2 <= len(records) <= objects.RANKS_MAX + 1 or len(records[0].payload) != 16 or \
            any((r.type, r.place) != (SUMMARY, i) for i, r in enumerate(records)):
        raise Damage('its records are not those of its kind')
    summaries = [parse_summary(r.payload) for r in records[1:]]
    if any((s.rank, s.ranks, s.kind) != (i, len(summaries), summaries[0].kind) for i, s in enumerate(summaries)):
        raise Damage('its summaries are not those of all ranks')
    return Step(step, epoch, bytes(records[0].payload), summaries)


def pack_head(uuid, h):
    entries = b''.join(_ENTRY.pack(*e) for e in h.entries)
    return objects.pack_object(objects.HEAD, uuid, h.n, h.epoch,
                               [(OF_HEAD, 0, _HEAD.pack(h.opener, h.ranks, h.flags, h.time) + _pack_texts(h.writer)),
                                (ENTRIES, 0, entries)])


def parse_head(data, uuid, n):
    head, records = objects.parse_object(data, objects.HEAD, uuid)
    (opener, ranks, flags, time), rest = _fixed(_HEAD, _one(records, OF_HEAD, 2))
    entries = records[1].payload
    if head.first != n or not head.second or records[1].type != ENTRIES or len(entries) % _ENTRY.size or \
            len(entries) > ENTRIES_MAX * _ENTRY.size or not 0 < ranks <= objects.RANKS_MAX or flags & ~SINGLE_WRITER:
        raise Damage('its numbers are impossible')
    entries = tuple(Entry(*e) for e in _ENTRY.iter_unpack(entries))
    if any(e.kind not in (FULL, LOGGED) or e.last < e.step or e.kind == FULL and e.last != e.step for e in entries):
        raise Damage('its list of steps is impossible')
    return Head(n, head.second, opener, ranks, flags, time, *_parse_texts(rest, 1), entries)
