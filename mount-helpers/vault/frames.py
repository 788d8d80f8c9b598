# SPDX-License-Identifier: Apache-2.0
"""Blocks as compressed frames, which the store reads, too (include/hitrain/format.h, struct ht_disk_planes): plane i has byte i of each
element. A plane is stored as it is, or through libzstd. Bytes from a vault are not believed. Any thread.
"""
import ctypes
import struct
import threading

from objects import Damage, Failure
from sums import Address

HEADER = struct.Struct('<B4s3sII4I')
STORED, ZSTD = 1, 2
PLANES_MAX = 4
UNIT_BYTES = 4096
MAGIC = b'\x28\xb5\x2f\xfd'    # of a frame of libzstd, which also takes older formats
SAMPLE_BYTES = 16384            # of a plane: is it worth the time?
# Numbers of parameters of libzstd, and the values that tiering/codec/frame.c has for planes: Huffman's code, and no search for strings.
SETTINGS = {100: 1, 101: 17, 102: 6, 103: 6, 104: 1, 105: 7, 106: 0, 107: 1, 200: 1, 201: 0, 202: 0}

_local = threading.local()


def _library():
    try:
        lib = ctypes.CDLL('libzstd.so.1')
    except OSError as e:
        raise Failure(f'compressed content needs libzstd.so.1, which is not installed: {e}') from None
    for name, result, words in (('createCCtx', 'p', ''), ('createDCtx', 'p', ''), ('freeCCtx', 'n', 'p'), ('freeDCtx', 'n', 'p'),
                                ('CCtx_setParameter', 'n', 'pii'), ('compressBound', 'n', 'n'),
                                ('compress2', 'n', 'ppnpn'), ('decompressDCtx', 'n', 'ppnpn'), ('isError', 'i', 'n'),
                                ('getFrameContentSize', 'u', 'pn'), ('findFrameCompressedSize', 'n', 'pn'),
                                ('getDictID_fromFrame', 'i', 'pn')):
        types = {'p': ctypes.c_void_p, 'n': ctypes.c_size_t, 'i': ctypes.c_int, 'u': ctypes.c_uint64}
        function = getattr(lib, f'ZSTD_{name}')
        function.argtypes, function.restype = [types[w] for w in words], types[result]
    return lib


class _Mine:
    """What a thread keeps for libzstd until it ends."""

    def __init__(self):
        self.lib = _library()
        self.decoder, self.encoder = self.lib.ZSTD_createDCtx(), None

    def __del__(self):
        if hasattr(self, 'decoder'):
            self.lib.ZSTD_freeDCtx(self.decoder)
            self.lib.ZSTD_freeCCtx(self.encoder)

    def need_encoder(self):
        if not self.encoder:
            self.encoder = self.lib.ZSTD_createCCtx()
            for name, value in SETTINGS.items():
                self.lib.ZSTD_CCtx_setParameter(self.encoder, name, value)
        return self.encoder


def _mine():
    if not hasattr(_local, 'mine'):
        _local.mine = _Mine()
    return _local.mine


def need():
    """Failure where frames cannot be made."""
    _mine()


# ---- encode ----

def _code(data):
    """data through libzstd, or None: it would hardly be shorter."""
    lib, encoder = _mine().lib, _mine().need_encoder()
    room = ctypes.create_string_buffer(lib.ZSTD_compressBound(len(data)))
    count = lib.ZSTD_compress2(encoder, room, len(room), data, len(data))
    if lib.ZSTD_isError(count) or count > len(data) - len(data) // 16 - 1:
        return None
    return memoryview(room).cast('B')[:count]


def _plane(data):
    """(kind, bytes)."""
    middle = len(data) // 2
    if len(data) > 4 * SAMPLE_BYTES and _code(data[middle:middle + SAMPLE_BYTES]) is None:
        return STORED, data
    coded = _code(data)
    return (STORED, data) if coded is None else (ZSTD, coded)


def encode(block, width):
    """The frame of a block whose elements have so many bytes, or None: it saves less than a sixteenth, or no unit."""
    data = bytes(block)
    whole = len(data) // width * width
    planes = [_plane(data[i:whole:width]) for i in range(width)]
    lengths = [len(p) for _, p in planes] + [0] * (PLANES_MAX - width)
    frame = HEADER.pack(width, bytes(k for k, _ in planes), b'', len(data), 0, *lengths) + b''.join(p for _, p in planes) + data[whole:]
    units = -(-len(data) // UNIT_BYTES)
    return frame if len(frame) <= min(len(data) - -(-len(data) // 16), (units - 1) * UNIT_BYTES) else None


# ---- decode ----

def _decode(coded, length):
    lib, decoder = _mine().lib, _mine().decoder
    out = ctypes.create_string_buffer(length)
    with Address(coded) as (at, count):
        if (bytes(coded[:len(MAGIC)]) != MAGIC or lib.ZSTD_getFrameContentSize(at, count) != length or lib.ZSTD_getDictID_fromFrame(at, count)
                or lib.ZSTD_findFrameCompressedSize(at, count) != count or lib.ZSTD_decompressDCtx(decoder, out, length, at, count) != length):
            raise Damage('its frame is damaged')
    return out.raw


def decode(frame, length_max):
    """The block. Damage."""
    if len(frame) < HEADER.size:
        raise Damage('its frame is cut')
    width, kinds, zeros, length, zero, *lengths = HEADER.unpack_from(frame)
    if (width not in (1, 2, 4) or any(zeros) or zero or length > length_max or any(kinds[width:]) or any(lengths[width:])
            or HEADER.size + sum(lengths) + length % width != len(frame)):
        raise Damage('its frame is damaged')
    out, at, count = bytearray(length), HEADER.size, length // width
    for i in range(width):
        plane, at = frame[at:at + lengths[i]], at + lengths[i]
        if kinds[i] == ZSTD and len(plane) < count:
            plane = _decode(plane, count)
        elif kinds[i] != STORED or len(plane) != count:
            raise Damage('its frame is damaged')
        out[i:count * width:width] = plane
    out[count * width:] = frame[at:]
    return out
