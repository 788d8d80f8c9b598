# SPDX-License-Identifier: Apache-2.0
"""A hitrain store in a regular file, for the demo and tests of the client: format, mount, kill, count, unmount, check.

Whatever happens, close() leaves no mount and no daemon.
"""
import contextlib
import os
import pathlib
import signal
import subprocess
import tempfile
from typing import Dict, Iterator, List, Optional

from hitrain._daemon import END_SECONDS_MAX, Daemon, StoreError, detach, is_mounted, program, users_of


class Store(Daemon):
    def __init__(self, programs: pathlib.Path, folder: pathlib.Path, size: str, dram: str) -> None:
        super().__init__(folder / 'store.img', folder / 'mnt', folder / 'daemon.log', f'dram={dram}', programs)
        self.size = size

    @property
    def dram(self) -> str:
        """With further options of the mount, if there are any."""
        return self.options.partition('=')[2]

    @dram.setter
    def dram(self, text: str) -> None:
        self.options = f'dram={text}'

    def format(self) -> str:
        """Makes a new, empty store in the place of an older one. Returns the output of mkfs."""
        detach(self.mountpoint)
        self.mountpoint.mkdir(parents=True, exist_ok=True)
        self.image.unlink(missing_ok=True)
        self.log_path.unlink(missing_ok=True)
        return self.run('mkfs.hitrain', f'--size={self.size}', str(self.image))

    def kill(self) -> int:
        """SIGKILL to the daemon, as a crash. Returns its process id."""
        assert self.daemon is not None
        pid = self.daemon.pid
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait()
        self.daemon = None
        return pid

    def check(self) -> subprocess.CompletedProcess:
        """hitrain-fsck of the unmounted store."""
        return subprocess.run([program('hitrain-fsck', self.programs), str(self.image)], capture_output=True, text=True)

    def counters(self) -> Dict[str, int]:
        """The daemon's own figures, since it was started."""
        text = os.getxattr(self.mountpoint, 'user.hitrain.stats').decode()
        pairs = (line.split('=', 1) for line in text.splitlines() if '=' in line)
        return {key: int(value) for key, value in pairs if value.lstrip('-').isdigit()}

    def control(self, *args: 'str | os.PathLike[str]') -> None:
        """A command of hitrainctl."""
        self.run('hitrainctl', *(os.fspath(a) for a in args))

    def send(self, root: pathlib.Path, step: str, to: pathlib.Path) -> None:
        """A kept step into another store, through a pipe."""
        self._pipe(['archive', str(root), step, '-'], ['restore', '-', str(to)])

    def follow(self, root: pathlib.Path, to: pathlib.Path, base: Optional[str] = None) -> None:
        """The steps that a copy of the model lacks. base: the kept step that was copied, the first time."""
        begin = [f'--from={base}'] if base else []
        self._pipe(['archive', str(root), '-', '--follow', '--once', *begin], ['restore', '-', str(to), '--follow'])

    def _pipe(self, give: List[str], take: List[str]) -> None:
        ctl = program('hitrainctl', self.programs)
        with subprocess.Popen([ctl, *give], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sender:
            received = subprocess.run([ctl, *take], stdin=sender.stdout, capture_output=True, text=True)
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
