# SPDX-License-Identifier: Apache-2.0
"""The log that QEMU's blklogwrites driver writes, and the images that a power cut could have left by it.

A device owes the content that a flush covered. It may keep any part of later writes: each write whole, not at all, or
torn between blocks, in any order. The driver logs an entry before it answers its request, so the log has every write
that the machine saw complete. The last entries may be torn themselves when QEMU was killed while it wrote them.
"""
import bisect
import os
import pathlib
import struct
import subprocess

MAGIC, SECTOR = 0x6a736677736872, 512
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
EMPTY_LOG_BYTES = 4096


class Entry:
    def __init__(self, log, at):
        header = os.pread(log, 32, at)
        first, sectors, self.flags, self.data_len = struct.unpack('<QQQQ', header) if len(header) == 32 else (0, 0, 0, 0)
        self.begin, self.data_at = at, at + SECTOR
        self.offset, self.bytes = first * SECTOR, sectors * SECTOR
        self.stored = 0 if self.flags & (DISCARD | MARK) else self.bytes
        self.end = self.data_at + self.stored

    def is_hole(self):
        return not (self.flags or self.bytes)


class WriteLog:
    """end: later entries were being written when QEMU was killed, some perhaps not in order."""

    def __init__(self, path):
        self.file = os.open(path, os.O_RDONLY)
        size = os.fstat(self.file).st_size
        self.entries = []
        magic, _, _, sector = struct.unpack('<QQQI', os.pread(self.file, 28, 0))
        if magic and (magic, sector) != (MAGIC, SECTOR):    # it is written with the first flush
            raise ValueError(f'{path} is no write log')
        at = SECTOR
        while at + 32 <= size:
            entry = Entry(self.file, at)
            if entry.is_hole() or entry.end > size:
                break
            self.entries.append(entry)
            at = entry.end
        self.end = max(at, EMPTY_LOG_BYTES)

    def unflushed_at(self, position):
        """Is there a write after the last flush?"""
        i = bisect.bisect_right([e.end for e in self.entries], position)
        return i > 0 and not self.entries[i - 1].flags & FLUSH

    def close(self):
        os.close(self.file)

    def data(self, entry):
        return os.pread(self.file, entry.stored, entry.data_at)

    def flushes(self):
        return [i for i, e in enumerate(self.entries) if e.flags & FLUSH]


class Images:
    """Files that hold parts of the logged device one after the other, all of one size."""

    def __init__(self, paths, part_bytes):
        self.part_bytes = part_bytes
        self.files = [os.open(p, os.O_RDWR) for p in paths]

    def close(self):
        for file in self.files:
            os.close(file)

    def write(self, data, offset):
        part, within = divmod(offset, self.part_bytes)
        os.pwrite(self.files[part], data, within)

    def apply(self, log, entry):
        if entry.flags & DISCARD:
            self.write(bytes(entry.bytes), entry.offset)
        elif entry.stored:
            self.write(log.data(entry), entry.offset)

    def apply_torn(self, log, entry, unit, random):
        data = log.data(entry)
        for at in range(0, len(data), unit):
            if random.random() < 0.5:
                self.write(data[at:at + unit], entry.offset + at)


def apply_some(images, log, pending, unit, random):
    """Applies some writes that no flush covered, in any order. Returns how many writes were lost or torn."""
    share = random.choice([0, 0.5, 0.9, random.random()])
    pending = [e for e in pending if not e.flags & FLUSH]
    random.shuffle(pending)
    lost = 0
    for entry in pending:
        if random.random() < share:
            images.apply(log, entry)
            continue
        lost += 1
        if random.random() < 0.3:
            images.apply_torn(log, entry, unit, random)
    return lost


def copy(source, target):
    subprocess.run(['cp', '--reflink=auto', '--sparse=always', str(source), str(target)], check=True)


def make_empty(path):
    """The driver writes its header when it opens the file; it wants one that is there."""
    pathlib.Path(path).write_bytes(b'')
    os.truncate(path, EMPTY_LOG_BYTES)


def after_power_cut(image, log, position, unit, random):
    """Changes the image from its state when logging began to one that a cut may leave when the log ends at position.
    Returns how many writes no flush covered, and how many of these were lost or torn."""
    entries = [e for e in log.entries if e.end <= position]
    covered = max((i for i, e in enumerate(entries) if e.flags & FLUSH), default=-1) + 1
    images = Images([image], os.stat(image).st_size)
    try:
        for entry in entries[:covered]:
            images.apply(log, entry)
        return len(entries) - covered, apply_some(images, log, entries[covered:], unit, random)
    finally:
        images.close()
