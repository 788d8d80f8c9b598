# SPDX-License-Identifier: Apache-2.0
"""Models whose content lies in a vault: places, reads, training, kept steps, recalls, and what the store refuses."""
import ctypes
import fcntl
import hashlib
import os
import shutil
import struct
import sys

import pytest

from conftest import MIB, ROOT, run, wait_for
from test_archive import archive, restore, vault  # noqa: F401
from test_roots import command, word
from test_step_streams import content, make_model, step
from trees import blob

sys.path += [str(ROOT / 'mount-helpers' / 'vault'), str(ROOT / 'mount-helpers' / 'tools')]
import archived  # noqa: E402
import engine  # noqa: E402
import jobs  # noqa: E402
from manifest import Entry, State  # noqa: E402

PLACES, TELL = 0x5f486805, 0xdf486806   # filled below from the size of the request
PLACE = struct.Struct('<IIHHIQ16s')
MOST = 200
SIZE = 8 + MOST * PLACE.size
PLACES = 1 << 30 | SIZE << 16 | ord('h') << 8 | 5
TELL = 3 << 30 | SIZE << 16 | ord('h') << 8 | 6


def set_places(path, places):
    fd = os.open(path, os.O_RDONLY)
    try:
        for at in range(0, len(places), MOST):
            some = places[at:at + MOST]
            fcntl.ioctl(fd, PLACES, struct.pack('<II', len(some), 0) + b''.join(some).ljust(MOST * PLACE.size, b'\0'))
    finally:
        os.close(fd)


def tell_places(path, start=0):
    io = bytearray(SIZE)
    struct.pack_into('<I', io, 8, start)
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, TELL, io)
    finally:
        os.close(fd)
    count, _ = struct.unpack_from('<II', io)
    return [bytes(io[8 + i * PLACE.size:8 + (i + 1) * PLACE.size]) for i in range(count)]
