# SPDX-License-Identifier: Apache-2.0
"""Logged steps: the file .hitrain/redo/STEP of a model root, and the records by which a vault or a pipe carries one
(docs/vault-format.md). Nothing that is read is believed before it was checked.

    numbers of a parameter, those of its sections, its pieces, and those of its orthogonalised update; ...; settings; file, its
    blocks; ...; end mark
"""
import collections
import errno
import os
import struct

from entry import check_path, FILE_BYTES_MAX
from objects import END, Damage, Failure
from places import BLOCK_BYTES, PLACE_BYTES, Place, check_place
from sums import Sum128

NUMBERS, PIECES, SETTINGS, FILE = 9, 10, 11, 14     # types of records
PLAIN, SPARSE = 0, 1                                # codings of a piece: its bytes, or entries (tiering/base/sparse.h)
ORTHO = 256                                         # beside these: of the orthogonalised update, in bf16, and not of the gradient
PIECE_BYTES_MAX = 2 << 20                           # of a gradient, in one piece of entries
SUMMARY_BYTES_MAX = 1 << 30
SETTINGS_BYTES_MAX = 4096
NUMBERS_BYTES = 72
ORTHO_BYTES = 2                                     # of an element
VERSION_MAX = OF_MATRICES = 4                       # of a summary; the one that has orthogonalised updates
ELEMENT_BYTES = {1: 4, 2: 2, 3: 2}                  # of dtypes that are trained: f32, bf16, f16

_FILE = struct.Struct('<8sIIQQQQ16x')
_HEAD = struct.Struct('<IIQQQ')
_PIECE = struct.Struct('<QIIII')
_CODED = struct.Struct('<QIIIIII')
_ROW = struct.Struct('<QII40s')
_PLACE = struct.Struct('<IIHHIQ16s')
_IN_PIPE = struct.Struct('<II')
_META = struct.Struct('<HHIqQ')
_END = struct.Struct('<QQ16sQQ')

Numbers = collections.namedtuple('Numbers', 'data path section')            # data: 72 bytes with inode number 0
# first, bytes: in the gradient of the parameter before. content: the stored bytes, or a Place.
Piece = collections.namedtuple('Piece', 'first bytes coding content')
Settings = collections.namedtuple('Settings', 'text')
File = collections.namedtuple('File', 'mode mtime_ns size path')
FileBlock = collections.namedtuple('FileBlock', 'index content')
# files: the files are those of this step. sum: what two records of one step have in common, without files and settings.
End = collections.namedtuple('End', 'params bytes sum lineage files')
Stored = collections.namedtuple('Stored', 'param at bytes first length coding')     # a piece in the file


# ---- the file of a logged step ----

class Gone(Failure):
    """This logged step is not readable any more."""


class Logged:
    """.hitrain/redo/STEP, open. params: Numbers with the inode number in place of the path; pieces: [Stored], in order."""

    def __init__(self, root, step):
        self.name, self.step = f'{root}/.hitrain/redo/{step}', step
        try:
            self.fd = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Gone(f'{self.name}: it is not readable any more') from None
        except OSError as e:
            raise Failure(f'{self.name}: {e.strerror}') from None
        try:
            self._read()
        except Failure as e:
            self.close()
            raise type(e)(f'{self.name}: {e}') from None
        except OSError as e:
            self.close()
            raise (Gone if e.errno in (errno.ENOENT, errno.ESTALE) else Failure)(f'{self.name}: {e.strerror}') from None

    def close(self):
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def read(self, at, count):
        """Bytes of the file."""
        parts = []
        while count:
            part = os.pread(self.fd, count, at)
            if not part:
                raise Damage('it is shorter than its header says')
            parts.append(part)
            at, count = at + len(part), count - len(part)
        return b''.join(parts)

    def content(self, at, count):
        """Bytes of the gradients."""
        return self.read(self.gradients_at + at, count)

    def _read(self):
        magic, version, zero, step, self.lineage, length, self.bytes = _FILE.unpack(self.read(0, _FILE.size))
        if magic != b'HTredo\r\n' or zero or step != self.step or not _HEAD.size <= length <= SUMMARY_BYTES_MAX:
            raise Damage('its header makes no sense; unmount, and run hitrain-fsck -n')
        self._check_version('file', version, 1)
        self.gradients_at = _FILE.size + length
        self._take_summary(self.read(_FILE.size, length))

    @staticmethod
    def _check_version(part, version, most):
        if version > most:
            raise Damage(f'the {part} of this logged step is of version {version}, and this program reads up to version {most}: use a '
                         'hitrainctl that is as new as the program that has mounted the store')

    def _take_summary(self, data):
        version, _, step, params, pieces = _HEAD.unpack_from(data)
        self._check_version('summary', version, VERSION_MAX)
        form = _CODED if version >= 2 else _PIECE
        if not version or step != self.step or params * NUMBERS_BYTES + pieces * form.size != len(data) - _HEAD.size:
            raise Damage('its summary makes no sense; unmount, and run hitrain-fsck -n')
        self.params, at = [], _HEAD.size
        for i in range(params):
            one = data[at:at + NUMBERS_BYTES]
            section = version >= 3 and not one[28]
            if section and not i:
                raise Damage('its first parameter is a section')
            self.params.append(Numbers(bytes(8) + one[8:], int.from_bytes(one[:8], 'little'), section))
            at += NUMBERS_BYTES
        self.pieces = sorted((self._piece(row, version) for row in form.iter_unpack(data[at:])), key=lambda p: (p.param, p.coding & ORTHO, p.first))

    def _piece(self, row, version):
        at, param, chunk, begin, end = row[:5]
        stored, coding = row[5:] if version >= 2 else (end - begin, PLAIN)
        ortho = coding & ORTHO if version >= OF_MATRICES else 0
        if begin >= end or coding - ortho > SPARSE or param >= len(self.params) or self.params[param].section or \
                stored > self.bytes or at > self.bytes - stored:
            raise Damage('one of its pieces lies beyond it')
        numbers = self.params[param].data
        chunk_bytes, dtype, of_gradient = struct.unpack_from('<IBB', numbers, 24)
        if dtype not in ELEMENT_BYTES or of_gradient not in ELEMENT_BYTES:
            raise Damage('one of its parameters has an impossible dtype')
        first = chunk * (chunk_bytes // ELEMENT_BYTES[dtype] * (ORTHO_BYTES if ortho else ELEMENT_BYTES[of_gradient])) + begin
        piece, sparse = Stored(param, at, stored, first, end - begin, coding), coding - ortho == SPARSE
        if first + piece.length > FILE_BYTES_MAX or piece.length > (PIECE_BYTES_MAX if sparse else stored) or \
                stored > (BLOCK_BYTES if sparse else piece.length):
            raise Damage('one of its pieces has an impossible size')
        return piece

    def items(self, path_of):
        """Numbers and Piece of the whole step. path_of(inode number) gives a path."""
        at, paths = 0, [path_of(p.path) for p in self.params]
        for i, numbers in enumerate(self.params):
            yield numbers._replace(path=paths[i])
            if i + 1 < len(self.params) and self.params[i + 1].section:
                continue
            while at < len(self.pieces) and self.pieces[at].param <= i:
                yield from self._cut(self.pieces[at])
                at += 1

    def _cut(self, p):
        if p.coding & ~ORTHO == SPARSE:
            yield Piece(p.first, p.length, p.coding, self.content(p.at, p.bytes))
            return
        for done in range(0, p.length, BLOCK_BYTES):
            part = self.content(p.at + done, min(BLOCK_BYTES, p.length - done))
            yield Piece(p.first + done, len(part), p.coding, part)


def decode(entries, length, size):
    """The bytes of a gradient that entries stand for. size: of an element. Damage."""
    import array
    form = {2: ('<HH', 'H'), 4: ('<HI', 'I')}.get(size)
    if not form or length % size or len(entries) % (2 + size):
        raise Damage('a sparse gradient makes no sense')
    out, at = array.array(form[1], bytes(length)), -1
    try:
        for zeros, value in struct.iter_unpack(form[0], entries):
            at += zeros + 1
            out[at] = value
    except IndexError:
        raise Damage('a sparse gradient is longer than it says') from None
    return out.tobytes()


# ---- sum ----

class StepSum:
    """XXH3-128 of what a logged step did. Two records of one step have one sum. One thread."""

    def __init__(self, step):
        self.sum = Sum128()
        self.sum.add(b'hitrain logged step 2' + struct.pack('<Q', step))

    def numbers(self, payload):
        self.sum.add(struct.pack('<QQ', NUMBERS, len(payload)) + payload)

    def piece(self, p, raw_sum):
        self.sum.add(struct.pack('<QQII', PIECES, p.first, p.bytes, p.coding) + raw_sum)

    def get(self):
        return self.sum.get()


# ---- payloads of records ----

def pack_numbers(n):
    return n.data + n.path


def pack_row(p, place):
    """A piece in a vault. place: packed."""
    return _ROW.pack(p.first, p.bytes, p.coding, place)


def pack_piped(p):
    return _IN_PIPE.pack(p.bytes, p.coding) + p.content


def pack_file(f):
    return _META.pack(f.mode, 0, 0, f.mtime_ns, f.size) + f.path


def pack_end(e):
    return _END.pack(*e)


class Reader:
    """Iterates over the items of a logged step, and End as the last one: what it yields has been checked. records: of
    objects.Record up to the end mark. in_pipe: content is bytes, else a Place. One thread.
    """

    def __init__(self, records, step, in_pipe):
        self.records, self.in_pipe, self.sum = records, in_pipe, StepSum(step)
        self.params = self.bytes = self.next_byte = self.next_block = 0
        self.ortho = 0              # of the last piece: its coding's bit
        self.file = self.path = None

    def __iter__(self):
        takes = {NUMBERS: self._numbers, PIECES: self._piped if self.in_pipe else self._rows, SETTINGS: self._settings,
                 FILE: self._file, 3 if self.in_pipe else 8: self._block if self.in_pipe else self._places}
        for r in self.records:
            if r.type == END:
                yield self._end(r.payload)
                return
            if r.type not in takes:
                raise Damage(f'a record has a type that does not belong here: {r.type}')
            yield from takes[r.type](r)
        raise Damage('it is cut: its end mark is missing')

    def _numbers(self, r):
        payload = bytes(r.payload)
        path = payload[NUMBERS_BYTES:]
        if len(payload) <= NUMBERS_BYTES or self.file or payload[:8] != bytes(8) or b'\n' in path or path != path.strip():
            raise Damage('numbers of a parameter make no sense')
        check_path(path)
        section = not payload[28]
        if section and path != self.path or section and self.next_byte:
            raise Damage('a section follows no parameter')
        if not section and payload[28] not in ELEMENT_BYTES or not section and payload[29] not in ELEMENT_BYTES:
            raise Damage('a parameter has an impossible dtype')
        if not section:
            self.path, self.next_byte, self.ortho = path, 0, 0
        self.params += 1
        self.sum.numbers(payload)
        yield Numbers(payload[:NUMBERS_BYTES], path, section)

    def _piece(self, p, raw_sum, stored):
        ortho = p.coding & ORTHO
        if ortho and not self.ortho and self.next_byte:
            self.ortho, self.next_byte = ortho, 0
        if self.path is None or self.file or not p.bytes or p.first < self.next_byte or p.coding - ortho > SPARSE or ortho != self.ortho or \
                p.first + p.bytes > FILE_BYTES_MAX or p.bytes > PIECE_BYTES_MAX or p.coding == ortho and stored != p.bytes:
            raise Damage('a piece of a gradient is not in order, or has an impossible size')
        self.next_byte, self.bytes = p.first + p.bytes, self.bytes + stored
        self.sum.piece(p, raw_sum)
        return p

    def _piped(self, r):
        if len(r.payload) <= _IN_PIPE.size:
            raise Damage('a piece of a gradient is empty')
        data = r.payload[_IN_PIPE.size:]
        from sums import sum128
        yield self._piece(Piece(r.place, *_IN_PIPE.unpack_from(r.payload), data), sum128(data), len(data))

    def _rows(self, r):
        if not len(r.payload) or len(r.payload) % _ROW.size:
            raise Damage('a record of pieces has an impossible size')
        for first, count, coding, packed in _ROW.iter_unpack(r.payload):
            place = parse_place(packed)
            yield self._piece(Piece(first, count, coding, place), place.raw_sum, place.stored)

    def _settings(self, r):
        if not 0 < len(r.payload) <= SETTINGS_BYTES_MAX:
            raise Damage('settings have an impossible size')
        yield Settings(bytes(r.payload))

    def _file(self, r):
        payload = bytes(r.payload)
        if len(payload) <= _META.size:
            raise Damage('a file has no name')
        mode, _, _, mtime_ns, size = _META.unpack_from(payload)
        path = payload[_META.size:]
        check_path(path)
        if mode > 0o777 or size > FILE_BYTES_MAX:
            raise Damage('a file has an impossible mode or size')
        self.file, self.next_block = File(mode, mtime_ns, size, path), 0
        yield self.file

    def _place(self, index, length):
        if not self.file or index < self.next_block or index * BLOCK_BYTES >= self.file.size or \
                length != min(BLOCK_BYTES, self.file.size - index * BLOCK_BYTES):
            raise Damage('a block of a file is not in order, or lies beyond its end')
        self.next_block = index + 1

    def _block(self, r):
        self._place(r.place, len(r.payload))
        yield FileBlock(r.place, r.payload)

    def _places(self, r):
        if not len(r.payload) or len(r.payload) % PLACE_BYTES:
            raise Damage('a record of places has an impossible size')
        for at in range(0, len(r.payload), PLACE_BYTES):
            place = parse_place(r.payload[at:at + PLACE_BYTES])
            self._place(place.index, place.stored)
            yield FileBlock(place.index, place)

    def _end(self, payload):
        if len(payload) != _END.size:
            raise Damage('the end mark is not as this program knows it')
        end = End(*_END.unpack(payload))
        if (end.params, end.bytes) != (self.params, self.bytes) or end.sum != self.sum.get():
            raise Damage('the end mark has another sum: something is missing')
        if end.lineage > 1 << 64 or end.files > 1:
            raise Damage('the end mark is not as this program knows it')
        return end


def parse_place(packed):
    index, lease, n, unit, stored, total, raw_sum = _PLACE.unpack(packed)
    place = Place(index, lease, n, unit, stored & 0xffffff, stored >> 24, total, raw_sum)
    check_place(place)
    return place
