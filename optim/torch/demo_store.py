# SPDX-License-Identifier: Apache-2.0
"""A hitrain store in a regular file, for the demo and tests of the client: format, mount, kill, count, unmount, check.

The daemon runs in the foreground as a child of its own session, so that its process id is known, its messages are
in a log beside the store, and Ctrl-C ends the trainer first. Whatever happens, close() leaves no mount and no daemon.
"""
import contextlib
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from typing import Dict, Iterator, List, Optional

READY_SECONDS_MAX = 120
END_SECONDS_MAX = 120
BUSY_SECONDS_MAX = 60  # for a mount that nobody known keeps busy
HELD_SECONDS_MAX = 5  # for a process that is known, since files may be closed late


class StoreError(Exception):
    """A program around the store failed; the text names the failure."""


class Store:
    def __init__(self, programs: pathlib.Path, folder: pathlib.Path, size: str, dram: str) -> None:
        self.programs, self.size, self.dram = programs, size, dram
        self.image = folder / 'store.img'
        self.mountpoint = folder / 'mnt'
        self.log_path = folder / 'daemon.log'
        self.daemon: Optional[subprocess.Popen] = None

    def format(self) -> str:
        """Makes a new, empty store in the place of an older one. Returns the output of mkfs."""
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
        begin = time.monotonic()
        while True:
            done = subprocess.run(command + [str(self.mountpoint)], capture_output=True, text=True)
            if done.returncode == 0:
                break
            seconds = time.monotonic() - begin
            users = users_of(self.mountpoint) if seconds > HELD_SECONDS_MAX else []
            if 'busy' not in done.stderr or users or seconds > BUSY_SECONDS_MAX:  # a program that looks at all mounts keeps one busy for a moment
                raise StoreError('; '.join([f'{" ".join(command)}: {done.stderr.strip()}', *users]))
            time.sleep(0.1)
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

    def control(self, *args: 'str | os.PathLike[str]') -> None:
        """A command of hitrainctl."""
        self._run('hitrainctl', *(os.fspath(a) for a in args))

    def send(self, root: pathlib.Path, step: str, to: pathlib.Path) -> None:
        """A kept step into another store, through a pipe."""
        self._pipe(['archive', str(root), step, '-'], ['restore', '-', str(to)])

    def follow(self, root: pathlib.Path, to: pathlib.Path, base: Optional[str] = None) -> None:
        """The steps that a copy of the model lacks. base: the kept step that was copied, the first time."""
        begin = [f'--from={base}'] if base else []
        self._pipe(['archive', str(root), '-', '--follow', '--once', *begin], ['restore', '-', str(to), '--follow'])

    def _pipe(self, give: List[str], take: List[str]) -> None:
        program = str(self.programs / 'hitrainctl')
        with subprocess.Popen([program, *give], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sender:
            received = subprocess.run([program, *take], stdin=sender.stdout, capture_output=True, text=True)
            assert sender.stdout is not None and sender.stderr is not None
            sender.stdout.close()
            said = sender.stderr.read().decode(errors='replace')
        if sender.returncode != 0 or received.returncode != 0:
            raise StoreError(f'steps could not be sent:\n{said}{received.stderr}')

    def close(self) -> None:
        """Unmount if need be, by force if need be: the daemon of a mount that is in use would wait for its users."""
        is_used = is_mounted(self.mountpoint) and bool(users_of(self.mountpoint))
        detach(self.mountpoint)
        if self.daemon is not None:
            try:
                self.daemon.wait(0 if is_used else END_SECONDS_MAX)
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


@contextlib.contextmanager
def mounted(name: str, dram: str = '64M', size: str = '256M') -> Iterator[Store]:
    """A new, mounted store in a folder of its own, for a test. dram: with further options, if need be. The programs and the folder's place are
    those of the build that runs it. At the end the store must unmount, and hitrain-fsck must find nothing; a test that failed only leaves no mount."""
    top = pathlib.Path(__file__).resolve().parents[2]
    build = pathlib.Path(os.environ.get('HITRAIN_BUILD') or top / 'build')
    build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build, prefix=f'{name}-') as folder:
        store = Store(pathlib.Path(os.environ.get('HITRAIN_BIN') or top / 'build/bin'), pathlib.Path(folder), size, dram)
        try:
            store.format()
            store.mount()
            yield store
            if store.daemon is not None:
                store.unmount()
            checked = store.check()
            if checked.returncode != 0:
                raise StoreError(f'hitrain-fsck ended with status {checked.returncode}:\n{checked.stdout}{checked.stderr}')
        finally:
            store.close()


def detach(mountpoint: pathlib.Path) -> None:
    """Take away whatever an interrupted run left mounted here, dead or alive."""
    while is_mounted(mountpoint):
        command: List[str] = ['umount', '--lazy'] if os.geteuid() == 0 else ['fusermount3', '-u', '-z']
        done = subprocess.run(command + [str(mountpoint)], capture_output=True, text=True)
        if done.returncode != 0:
            raise StoreError(f'{" ".join(command)}: {done.stderr.strip()}')


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


def is_mounted(path: pathlib.Path) -> bool:
    """Also true for a dead mount, which stat() cannot detect."""
    shown = ''.join(f'\\{ord(c):03o}' if c in ' \t\n\\' else c for c in str(path))
    with open('/proc/self/mountinfo') as mounts:
        return any(line.split(' ')[4] == shown for line in mounts)
