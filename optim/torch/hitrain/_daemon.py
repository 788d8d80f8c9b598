# SPDX-License-Identifier: Apache-2.0
"""The daemon of a store, in the foreground as a process of its own session: make a store, mount it, unmount it, and say who keeps it busy.

Its messages are in a log, so that a refusal can show them. Ctrl-C reaches the trainer and not the daemon.
"""
import contextlib
import errno
import os
import pathlib
import select
import shutil
import subprocess
import sys
import time
from typing import Iterator, List, Optional

READY_SECONDS_MAX = 120
END_SECONDS_MAX = 120
BUSY_SECONDS_MAX = 60  # for a mount that nobody known keeps busy
HELD_SECONDS_MAX = 5  # for a process that is known, since files may be closed late
SYSTEM_FOLDERS = '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin'  # PATH of an ordinary user may lack the first ones


class StoreError(RuntimeError):
    """A program around the store failed; the text names the failure."""


def program(name: str, folder: Optional[pathlib.Path] = None) -> str:
    """The path of one of hitrain's programs: from this folder, or HITRAIN_BIN, or from this package if it brings programs, or installed ones."""
    given = folder or os.environ.get('HITRAIN_BIN')
    own = os.path.join(os.path.dirname(__file__), 'bin')
    found = shutil.which(name, path=str(given or ':'.join([own, os.environ.get('PATH', ''), SYSTEM_FOLDERS])))
    if not found:
        raise StoreError(f'{name} is not in {given}' if given else
                         f'{name} is not installed: take a wheel of hitrain that brings its programs, or the Debian package, or set HITRAIN_BIN')
    return found


def start() -> None:
    """hitrainctl and others, by the names that a wheel with programs gives them."""
    name = os.path.basename(sys.argv[0])
    os.execv(program(name), [name, *sys.argv[1:]])


class Daemon:
    """A store at `image` (a file or a device), mounted at `mountpoint`. options: of the mount, as for -o. programs: a folder that has them."""

    def __init__(self, image: pathlib.Path, mountpoint: pathlib.Path, log: pathlib.Path, options: str,
                 programs: Optional[pathlib.Path] = None) -> None:
        self.image, self.mountpoint, self.log_path, self.options, self.programs = image, mountpoint, log, options, programs
        self.daemon: Optional['subprocess.Popen[bytes]'] = None  # of this process; another one may have started it

    def mount(self) -> None:
        """Returns when the mount answers. Mounting over a mount whose daemon died replaces it."""
        with open(self.log_path, 'ab') as log:
            command = ['hitrain', str(self.image), str(self.mountpoint), '-f', *(['-o', self.options] if self.options else [])]
            self.daemon = subprocess.Popen(command, executable=program('hitrain', self.programs), stdin=subprocess.DEVNULL,
                                           stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + READY_SECONDS_MAX
        while not self.answers():
            if self.daemon.poll() is not None:
                raise StoreError(f'the daemon ended with status {self.daemon.returncode}:\n{self._log_tail()}')
            if time.monotonic() > deadline:
                raise StoreError(f'no mount after {READY_SECONDS_MAX} s:\n{self._log_tail()}')
            time.sleep(0.02)

    def unmount(self) -> None:
        """Returns when the daemon has ended: everything is on the device."""
        command = ['umount'] if os.geteuid() == 0 else ['fusermount3', '-u']
        pid, begin = self._pid(), time.monotonic()
        while True:
            done = subprocess.run([*command, str(self.mountpoint)], capture_output=True, text=True)
            if done.returncode == 0:
                break
            seconds = time.monotonic() - begin
            users = users_of(self.mountpoint) if seconds > HELD_SECONDS_MAX else []
            if 'busy' not in done.stderr or users or seconds > BUSY_SECONDS_MAX:  # a program that looks at all mounts keeps one busy for a moment
                raise StoreError('; '.join([f'{" ".join(command)}: {done.stderr.strip()}', *users]))
            time.sleep(0.1)
        if not self._has_ended(pid, END_SECONDS_MAX):
            raise StoreError(f'the daemon still runs {END_SECONDS_MAX} s after unmounting')
        ended, self.daemon = self.daemon, None
        if ended and ended.returncode != 0:
            raise StoreError(f'the daemon ended with status {ended.returncode}:\n{self._log_tail()}')

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            os.getxattr(self.mountpoint, 'user.hitrain.stats')
            return True
        return False

    def run(self, name: str, *args: str) -> str:
        """What a program printed. StoreError with all of its words if it fails."""
        done = subprocess.run([program(name, self.programs), *args], capture_output=True, text=True, errors='replace')
        if done.returncode != 0:
            raise StoreError(f'{name} ended with status {done.returncode}:\n{done.stdout}{done.stderr}'.rstrip())
        return done.stdout

    def _pid(self) -> int:
        """0: there is none."""
        if self.daemon:
            return self.daemon.pid
        wanted = [b'hitrain', os.fsencode(self.image), os.fsencode(self.mountpoint)]
        for pid in filter(str.isdigit, os.listdir('/proc')):
            with contextlib.suppress(OSError):
                if pathlib.Path('/proc', pid, 'cmdline').read_bytes().split(b'\0')[:3] == wanted:
                    return int(pid)
        return 0

    def _has_ended(self, pid: int, seconds: int) -> bool:
        if self.daemon:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.daemon.wait(seconds)
            return self.daemon.returncode is not None
        try:
            fd = os.pidfd_open(pid)
        except OSError as e:
            if e.errno in (errno.ESRCH, errno.EINVAL):  # it ended meanwhile; no process was found
                return True
            raise
        try:
            return bool(select.select([fd], [], [], seconds)[0])
        finally:
            os.close(fd)

    def _log_tail(self) -> str:
        return '\n'.join(self.log_path.read_text(errors='replace').splitlines()[-20:])


def detach(mountpoint: pathlib.Path) -> None:
    """Take away whatever an interrupted run left mounted here, dead or alive."""
    while is_mounted(mountpoint):
        command: List[str] = ['umount', '--lazy'] if os.geteuid() == 0 else ['fusermount3', '-u', '-z']
        done = subprocess.run([*command, str(mountpoint)], capture_output=True, text=True)
        if done.returncode != 0:
            raise StoreError(f'{" ".join(command)}: {done.stderr.strip()}')


def is_mounted(path: pathlib.Path) -> bool:
    """Also true for a dead mount, which stat() cannot detect."""
    shown = ''.join(f'\\{ord(c):03o}' if c in ' \t\n\\' else c for c in str(path))
    with open('/proc/self/mountinfo') as mounts:
        return any(line.split(' ')[4] == shown for line in mounts)


def users_of(mountpoint: pathlib.Path) -> List[str]:
    """A line for each process that keeps a mount busy, with what it has of that: mappings, open files, its current folder. Root sees all."""
    top = os.path.join(os.path.realpath(mountpoint.parent), mountpoint.name)
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        used = sorted({path for path in paths_of(pid) if path == top or path.startswith(f'{top}/')})
        if used:
            more = f' and {len(used) - 1} more' if used[1:] else ''
            found.append(f'{_name_of(pid)} (process {pid}{", this one" if int(pid) == os.getpid() else ""}) has {used[0]}{more}')
    return found


def _name_of(pid: str) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path('/proc', pid, 'comm').read_text().strip()
    return 'ended'


def paths_of(pid: str) -> Iterator[str]:
    folder = pathlib.Path('/proc', pid)
    with contextlib.suppress(OSError):  # of a process that ended, or of another user
        for link in [folder / 'cwd', folder / 'root', *(folder / 'fd').iterdir()]:
            with contextlib.suppress(FileNotFoundError):
                yield os.readlink(link)
        for line in (folder / 'maps').read_text(errors='surrogateescape').splitlines():
            yield ' '.join(line.split(' ')[5:]).strip()
