# SPDX-License-Identifier: Apache-2.0
"""What `python -m hitrain doctor` prints: programs, the machine as hitrainctl sees it, a folder and its speed, and what that means for a model.

Lines are as those of `hitrainctl doctor`: a level, a check, a finding, and `->` before a remedy. So is the exit status.
"""
import concurrent.futures
import mmap
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
from typing import Callable, List, Tuple

import torch

from hitrain._daemon import StoreError, program
from hitrain._need import parameters_bytes

_PIECE, _PIECES, _AT_ONCE = 8 << 20, 32, 4
_STATE_BYTES = 12  # that a step of AdamW reads, and writes, of each parameter whose state is not in DRAM (docs/performance.md)
_STATUS = {'error': 4, 'warn': 3}
_GB = 1e9


class _Report:
    def __init__(self) -> None:
        self.status = 0

    def say(self, level: str, check: str, text: str, remedy: str = '') -> None:
        print(f'{level:<6}{check:<18} {text}' + (f'\n{"":<24} -> {remedy}' if remedy else ''), flush=True)
        self.status = max(self.status, _STATUS.get(level, 0))


def look(folder: pathlib.Path, count: str) -> int:
    """count: parameters of a model, as '7B'. ValueError, OSError: of what the caller gave."""
    elements, report = _number(count), _Report()
    if not folder.is_dir():
        raise NotADirectoryError(f'{folder} is no directory')
    _machine(report)
    _client(report)
    read, written = _speed(folder, report)
    need, free = parameters_bytes(elements, torch.bfloat16), shutil.disk_usage(folder).free
    report.say('ok' if need <= free else 'warn', 'space', f'{_size(free)} are free; a model of {count} bf16 parameters with AdamW needs a store of '
               f'{_size(need)}', '' if need <= free else 'take another folder, or a device of its own')
    seconds = elements * _STATE_BYTES * (1 / read + 1 / written)
    report.say('note', 'step', f'with {count} parameters a step takes {seconds:.1f} s at most here, if no state fits into DRAM; '
               'what fits costs no bytes of the device')
    return report.status


def _machine(report: _Report) -> None:
    try:
        done = subprocess.run([program('hitrainctl'), 'doctor'], capture_output=True, text=True, errors='replace')
    except StoreError as e:
        return report.say('error', 'programs', str(e), 'install hitrain with its programs')
    print(done.stdout, end='', flush=True)
    report.status = max(report.status, done.returncode)
    if os.geteuid() != 0 and not shutil.which('fusermount3'):
        report.say('error', 'fusermount3', 'a user cannot mount without it', 'install fuse3')


def _client(report: _Report) -> None:
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report.say('ok', 'pytorch', f'PyTorch {torch.__version__}, {", ".join(devices) or "no GPU"}')


def _speed(folder: pathlib.Path, report: _Report) -> Tuple[float, float]:
    """Bytes a second that are read, and written, past the page cache where the file system can do that."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix='.hitrain-doctor-') as file:
        try:
            fd, how = os.open(file.name, os.O_RDWR | os.O_DIRECT), 'past the page cache'
        except OSError:
            fd, how = os.open(file.name, os.O_RDWR), 'through the page cache, since the file system knows no O_DIRECT: a store cannot lie here'
        piece = mmap.mmap(-1, _PIECE)
        piece.write(os.urandom(_PIECE))
        try:
            os.posix_fallocate(fd, 0, _PIECE * _PIECES)
            written = _rate(lambda at: os.pwritev(fd, [piece], at), lambda: os.fsync(fd))
            read = _rate(lambda at: os.preadv(fd, [mmap.mmap(-1, _PIECE)], at), lambda: None)
        finally:
            os.close(fd)
    report.say('ok' if 'past' in how else 'error', 'speed', f'{folder}: {read / _GB:.2f} GB/s read, {written / _GB:.2f} GB/s written, {how}')
    return read, written


def _rate(move: Callable[[int], int], end: Callable[[], None]) -> float:
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
        moved: List[int] = list(threads.map(move, range(0, _PIECE * _PIECES, _PIECE)))
    end()
    return sum(moved) / (time.monotonic() - begin)


def _number(text: str) -> int:
    found = re.fullmatch('([0-9]+(?:[.][0-9]+)?)([KMBT]?)', text.upper())
    if not found or not float(found[1]):
        raise ValueError(f'--parameters={text}: expected a number above 0, as 350M or 7B')
    return int(float(found[1]) * 1000 ** ' KMBT'.index(found[2] or ' '))


def _size(count: int) -> str:
    return f'{count / _GB:.1f} GB'
