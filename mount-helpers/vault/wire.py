# SPDX-License-Identifier: Apache-2.0
"""The protocol between a client and the program of a scheme.

The client starts `hitrain-vault-SCHEME URL SOCKET MEMORY SLOTS SLOT_BYTES`. SOCKET is the number of an open SOCK_SEQPACKET
socket, MEMORY that of a memfd of SLOTS * SLOT_BYTES. Each request is one packet, and so is each answer. Answers come in
any order. The bytes of an object, and those of a list, lie in the slot that the request names, from its begin. A client
uses a slot again only after the answer. The program ends at the end of the socket.

request, little-endian: number 4, verb 2, length of key 2, slot 4, milliseconds until the deadline 4, offset 8, length 8,
        key. A list has prefix, a zero byte, and the key after which it begins.
answer: number 4, result 2, flags 2 (1: the list goes on), length 8, text of at most 512 bytes for the user

hello    length: the largest object in bytes
put_new  length bytes in the slot; result 0: made now, 1: the key was there
get      at most `length` bytes from `offset` on; length: bytes in the slot, fewer only at the end of the object
list     entries in ascending order of keys: length of key 2, bytes 8, age in milliseconds 8 by the engine's clock, key
remove   result 0 also where no such key is

Other results are the codes of errors.py.
"""
import re
import struct

HELLO, PUT_NEW, GET, LIST, REMOVE = range(1, 6)
OK, EXISTS = 0, 1
MORE = 1

REQUEST = struct.Struct('<IHHIIQQ')
ANSWER = struct.Struct('<IHHQ')
ENTRY = struct.Struct('<HQQ')

KEY_BYTES_MAX = 200
TEXT_BYTES_MAX = 512
PACKET_BYTES_MAX = 1024
OBJECT_BYTES_MAX = 32 << 20

PART = re.compile(r'[A-Za-z0-9._-]+')


def is_key(key):
    """Parts of [A-Za-z0-9._-] between slashes, none `.` or `..`."""
    return len(key) <= KEY_BYTES_MAX and all(PART.fullmatch(p) and p not in ('.', '..') for p in key.split('/'))


def is_prefix(prefix):
    """The begin of a key, perhaps empty."""
    return prefix == '' or is_key(prefix.rstrip('/')) and not prefix.endswith('//')


def pack_entries(entries, room):
    """(bytes, whether all fit) of [(key, bytes, age in seconds)]."""
    out = bytearray()
    for key, count, age in entries:
        name = key.encode()
        if len(out) + ENTRY.size + len(name) > room:
            return out, False
        out += ENTRY.pack(len(name), count, max(0, int(age * 1000))) + name
    return out, True


def unpack_entries(data):
    """The entries, or ValueError."""
    out, at = [], 0
    while at < len(data):
        if len(data) - at < ENTRY.size:
            raise ValueError
        length, count, age = ENTRY.unpack_from(data, at)
        name = bytes(data[at + ENTRY.size:at + ENTRY.size + length])
        if len(name) != length or not is_key(name.decode('ascii', 'replace')):
            raise ValueError
        out.append((name.decode('ascii'), count, age / 1000))
        at += ENTRY.size + length
    return out
