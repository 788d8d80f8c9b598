# SPDX-License-Identifier: Apache-2.0
"""A hitrain store in a regular file, for the demo: format, mount, kill, count, unmount, check.

The daemon runs in the foreground as a child of its own session, so that its process id is known, its messages are
in a log beside the store, and Ctrl-C ends the trainer first. Whatever happens, close() leaves no mount and no daemon.
"""
import os
import pathlib
import signal
import subprocess
import time
from typing import Dict, List, Optional

READY_SECONDS_MAX = 60
END_SECONDS_MAX = 60


class StoreError(Exception):
    """Something around the store failed; the text says what."""


class Store:
    def __init__(self, programs: pathlib.Path, folder: pathlib.Path, size: str, dram: str) -> None:
        self.programs, self.size, self.dram = programs, size, dram
        self.image = folder / 'store.img'
        self.mountpoint = folder / 'mnt'
        self.log_path = folder / 'daemon.log'
        self.daemon: Optional[subprocess.Popen] = None

    def format(self) -> str:
        """A new, empty store in the place of an older one. Returns what mkfs said."""
        detach(self.mountpoint)
        self.mountpoint.mkdir(parents=True, exist_ok=True)
        self.image.unlink(missing_ok=True)
        self.log_path.unlink(missing_ok=True)
        return self._run('mkfs.hitrain', f'--size={self.size}', str(self.image))

    def mount(self) -> None:
        """Returns when the mount answers. Mounting over a mount whose daemon died replaces it."""
        with open(self.log_path, 'ab') as log:
            command = ['hitrain', str(self.image), str(self.mountpoint), '-f', '-o', f'dram={self.dram}']
            self.daemon = subprocess.Popen(command, executable=str(self.programs / 'hitrain'),
                                           stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + READY_SECONDS_MAX
        while not self._answers():
            if self.daemon.poll() is not None:
                raise StoreError(f'the daemon ended with status {self.daemon.returncode}:\n{self._log_tail()}')
            if time.monotonic() > deadline:
                raise StoreError(f'no mount after {READY_SECONDS_MAX} s:\n{self._log_tail()}')
            time.sleep(0.02)

    def kill(self) -> int:
        """SIGKILL to the daemon, as a crash. Returns its process id."""
        assert self.daemon is not None
        pid = self.daemon.pid
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait()
        self.daemon = None
        return pid

    def unmount(self) -> None:
        """Returns when the daemon has ended: everything is on the device."""
        command = ['umount'] if os.geteuid() == 0 else ['fusermount3', '-u']
        done = subprocess.run(command + [str(self.mountpoint)], capture_output=True, text=True)
        if done.returncode != 0:
            raise StoreError(f'{" ".join(command)}: {done.stderr.strip()}')
        assert self.daemon is not None
        try:
            status = self.daemon.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise StoreError(f'the daemon still runs {END_SECONDS_MAX} s after unmounting') from None
        self.daemon = None
        if status != 0:
            raise StoreError(f'the daemon ended with status {status}:\n{self._log_tail()}')

    def check(self) -> subprocess.CompletedProcess:
        """hitrain-fsck of the unmounted store."""
        return subprocess.run([str(self.programs / 'hitrain-fsck'), str(self.image)], capture_output=True, text=True)

    def counters(self) -> Dict[str, int]:
        """The daemon's own figures, since it was started."""
        text = os.getxattr(self.mountpoint, 'user.hitrain.stats').decode()
        pairs = (line.split('=', 1) for line in text.splitlines() if '=' in line)
        return {key: int(value) for key, value in pairs if value.lstrip('-').isdigit()}

    def close(self) -> None:
        """Unmount if need be, by force if need be."""
        detach(self.mountpoint)
        if self.daemon is not None:
            try:
                self.daemon.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait()
            self.daemon = None

    def _answers(self) -> bool:
        try:
            os.getxattr(self.mountpoint, 'user.hitrain.stats')
            return True
        except OSError:
            return False

    def _log_tail(self) -> str:
        return '\n'.join(self.log_path.read_text(errors='replace').splitlines()[-20:])

    def _run(self, program: str, *args: str) -> str:
        done = subprocess.run([str(self.programs / program), *args], capture_output=True, text=True)
        if done.returncode != 0:
            raise StoreError(f'{program} ended with status {done.returncode}:\n{done.stdout}{done.stderr}')
        return done.stdout


def detach(mountpoint: pathlib.Path) -> None:
    """Take away whatever an interrupted run left mounted here, dead or alive."""
    while is_mounted(mountpoint):
        command: List[str] = ['umount', '--lazy'] if os.geteuid() == 0 else ['fusermount3', '-u', '-z']
        done = subprocess.run(command + [str(mountpoint)], capture_output=True, text=True)
        if done.returncode != 0:
            raise StoreError(f'{" ".join(command)}: {done.stderr.strip()}')


def is_mounted(path: pathlib.Path) -> bool:
    """Also of a dead mount, which stat() cannot tell."""
    shown = ''.join(f'\\{ord(c):03o}' if c in ' \t\n\\' else c for c in str(path))
    with open('/proc/self/mountinfo') as mounts:
        return any(line.split(' ')[4] == shown for line in mounts)
