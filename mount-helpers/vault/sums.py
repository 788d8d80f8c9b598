# SPDX-License-Identifier: Apache-2.0
"""XXH3 without a seed, by the library that hitrain links, and a look for zeros. Calls let go of the interpreter's lock, so threads run beside
each other. Buffers of any kind are read where they are.
"""
import ctypes

try:
    _lib = ctypes.CDLL('libxxhash.so.0')
except OSError as e:
    raise SystemExit(f'hitrainctl: error: a vault needs libxxhash.so.0, which is not installed: {e}') from None

SHORT_BYTES_MAX = 240           # XXH3: longer input has one way for both sums


class _Hash128(ctypes.Structure):
    _fields_ = ('low', ctypes.c_uint64), ('high', ctypes.c_uint64)


class _Buffer(ctypes.Structure):
    """Py_buffer of Python's C interface: https://docs.python.org/3/c-api/buffer.html."""
    _fields_ = (('buf', ctypes.c_void_p), ('obj', ctypes.py_object), ('len', ctypes.c_ssize_t),
                ('itemsize', ctypes.c_ssize_t), ('readonly', ctypes.c_int), ('ndim', ctypes.c_int),
                ('format', ctypes.c_char_p), ('shape', ctypes.c_void_p), ('strides', ctypes.c_void_p),
                ('suboffsets', ctypes.c_void_p), ('internal', ctypes.c_void_p))


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = ctypes.py_object, ctypes.c_void_p, ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.c_void_p,)
_release.restype = None

for _name, _args, _result in (('XXH3_64bits', (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint64),
                              ('XXH3_128bits', (ctypes.c_void_p, ctypes.c_size_t), _Hash128),
                              ('XXH3_createState', (), ctypes.c_void_p),
                              ('XXH3_freeState', (ctypes.c_void_p,), ctypes.c_int),
                              ('XXH3_128bits_reset', (ctypes.c_void_p,), ctypes.c_int),
                              ('XXH3_128bits_update', (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int),
                              ('XXH3_128bits_digest', (ctypes.c_void_p,), _Hash128)):
    getattr(_lib, _name).argtypes = _args
    getattr(_lib, _name).restype = _result


class Address:
    """with Address(buffer) as (address, bytes): the memory of a buffer, which stays there meanwhile."""

    def __init__(self, data):
        self.data = data
        self.view = _Buffer()

    def __enter__(self):
        _get(self.data, ctypes.byref(self.view), 0)
        return self.view.buf, self.view.len

    def __exit__(self, *unused):
        _release(ctypes.byref(self.view))


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


def is_zero(view):
    """Are all bytes of a memoryview of bytes zero? Each byte is compared with the next one."""
    if not len(view) or view[0]:
        return not len(view)
    with Address(view) as (at, length):
        return _memcmp(at, at + 1, length - 1) == 0


def sum64_of(raw_sum, data):
    """The sum of 64 bits, a number, from that of 128: its low half, unless data are so few that XXH3 takes another way."""
    return int.from_bytes(raw_sum[8:], 'big') if len(data) > SHORT_BYTES_MAX else sum64(data)


def sum64(data):
    """A number."""
    with Address(data) as (at, length):
        return _lib.XXH3_64bits(at, length)


def _canonical(h):
    return h.high.to_bytes(8, 'big') + h.low.to_bytes(8, 'big')


def sum128(data):
    """16 bytes in the canonical form, which `xxhsum -H128` prints."""
    with Address(data) as (at, length):
        return _canonical(_lib.XXH3_128bits(at, length))


class Sum128:
    """The same of many parts. One thread."""

    def __init__(self):
        self.state = _lib.XXH3_createState()
        if not self.state:
            raise MemoryError
        _lib.XXH3_128bits_reset(self.state)

    def __del__(self):
        if getattr(self, 'state', None):
            _lib.XXH3_freeState(self.state)

    def add(self, data):
        with Address(data) as (at, length):
            _lib.XXH3_128bits_update(self.state, at, length)

    def get(self):
        return _canonical(_lib.XXH3_128bits_digest(self.state))
