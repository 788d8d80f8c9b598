# SPDX-License-Identifier: Apache-2.0
"""Places in a vault, as the store takes and tells them: ioctls of a file or a state (include/hitrain/words.h). One thread for each
handle.
"""
import fcntl
import struct

from places import PLACE_BYTES, pack_place

PLACES_MAX = 200
_HEAD = struct.Struct('<II')
_BYTES = _HEAD.size + PLACES_MAX * PLACE_BYTES
_SET = 1 << 30 | _BYTES << 16 | ord('h') << 8 | 5
_TELL = 3 << 30 | _BYTES << 16 | ord('h') << 8 | 6
TOLD_BYTES = 24                 # of a place: the store does not keep the sum of raw bytes


def set_places(handle, places):
    """These blocks, at most PLACES_MAX, which must be holes, lie in the vault from the next commit on. OSError."""
    data = _HEAD.pack(len(places), 0) + b''.join(map(pack_place, places))
    fcntl.ioctl(handle.fd, _SET, bytearray(data.ljust(_BYTES, b'\0')))


def places_of(handle):
    """{block: the first TOLD_BYTES of its packed place} of what lies in the vault."""
    found, begin = {}, 0
    while True:
        answer = bytearray(_BYTES)
        struct.pack_into('<I', answer, _HEAD.size, begin)
        try:
            fcntl.ioctl(handle.fd, _TELL, answer)
        except OSError:
            return {}
        count = min(_HEAD.unpack_from(answer)[0], PLACES_MAX)
        for at in range(_HEAD.size, _HEAD.size + count * PLACE_BYTES, PLACE_BYTES):
            place = bytes(answer[at:at + TOLD_BYTES])
            begin = struct.unpack_from('<I', place)[0] + 1
            found[begin - 1] = place
        if count < PLACES_MAX:
            return found
