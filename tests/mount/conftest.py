# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the mount tests: a store in a file, mounted, unmounted and checked afterwards.

HITRAIN_BIN names the folder of the programs (default: build/bin).
"""
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get('HITRAIN_BIN', ROOT / 'build' / 'bin'))
SECONDS_MAX = int(os.environ.get('HITRAIN_TEST_SECONDS', 120))  # mutants.py has less patience
CRASHES = [-s for s in (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)]
MIB = 1 << 20
SMALL = ('dram=32M', 'staging=24M')


def run(program, *args, check=True, **kw):
    kw.setdefault('timeout', SECONDS_MAX)
    done = subprocess.run([str(BIN / program), *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, errors='replace', **kw)
    assert not check or done.returncode == 0, f'{program}: exit {done.returncode}\n{done.stdout}{done.stderr}'
    return done


def wait_for(condition, what, seconds=SECONDS_MAX):
    """The longer it takes, the less often does this look: a condition may be a program."""
    end, pause = time.monotonic() + seconds, 0.005
    while not condition():
        assert time.monotonic() < end, f'{what}: not within {seconds} s'
        time.sleep(pause)
        pause = min(1.2 * pause, 0.05)


def needs(*programs):
    """Skips the test where a program is missing."""
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f'no {program} here')


def remove_folder(folder):
    """Removes a folder, ends mounts below it, and returns their mount points."""
    with open('/proc/self/mountinfo') as mounts:
        left = [line.split(' ')[4] for line in mounts if line.split(' ')[4].startswith(f'{folder}/')]
    for point in left:
        subprocess.run(['umount', '--lazy', point], check=True)
    shutil.rmtree(folder)
    return left


class Store:
    """A store in a regular file and its mount. The daemon runs in the foreground, so that it can be signalled."""

    seconds = SECONDS_MAX  # of a mount, an unmount or a check
    ends_clean = True      # False: the test leaves a store with problems

    def __init__(self, folder, size, *format_options):
        self.folder = folder
        self.image = folder / 'image'
        self.point = folder / 'mnt'
        self.log = folder / 'log'
        self.point.mkdir()
        self.daemon = None
        run('mkfs.hitrain', f'--size={size}', *format_options, self.image)

    def start(self, *options, flags=()):
        args = [str(BIN / 'hitrain'), '-f', *flags, str(self.image), str(self.point)]
        if options:
            args += ['-o', ','.join(options)]
        with open(self.log, 'a') as log:
            self.daemon = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def mount(self, *options, flags=(), seconds=None):
        """With little memory, unless the options say otherwise. Also over a dead mount, which is why the daemon's word counts and not the kernel's table."""
        mounts = self.mounts_told()
        self.start(*SMALL, *options, flags=flags)
        wait_for(lambda: self.daemon.poll() is not None or self.mounts_told() > mounts, 'mount', seconds or self.seconds)
        assert self.daemon.poll() is None, self.messages()
        return self.point

    def mounts_told(self):
        return self.messages().count(' is mounted on ') if self.log.exists() else 0

    def is_mounted(self):
        """By the kernel's table: looking at a dead or not yet answering mount would fail or block."""
        with open('/proc/self/mountinfo') as f:
            return any(line.split()[4] == str(self.point) for line in f)

    def messages(self):
        return self.log.read_text()

    def unmount(self, check=False):
        subprocess.run(['umount', str(self.point)], check=True, timeout=self.seconds)
        assert self.daemon.wait(self.seconds) == 0, self.messages()
        self.daemon = None
        if check:
            self.assert_clean()

    def remount(self, *options, check=False):
        self.unmount(check)
        return self.mount(*options)

    def kill(self):
        """The machine is lost, as far as the store can see. The mount stays, dead."""
        self.daemon.kill()
        self.daemon.wait()
        self.daemon = None

    def crash(self, *options):
        self.kill()
        return self.mount(*options)

    def detach(self):
        subprocess.run(['umount', '-l', str(self.point)], timeout=SECONDS_MAX, stderr=subprocess.DEVNULL)

    def fsck(self):
        return run('hitrain-fsck', '-n', self.image, check=False, timeout=self.seconds)

    def assert_clean(self):
        done = self.fsck()
        assert done.returncode == 0, done.stdout + done.stderr

    def end(self):
        """Of its devices, when it is closed."""

    def close(self, failed):
        ended = self.daemon.poll() if self.daemon else None
        if self.daemon and ended is None and not failed:
            self.unmount()
        elif self.daemon:
            self.daemon.send_signal(signal.SIGTERM)
            try:
                self.daemon.wait(20)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait()
            if ended is not None:
                print(f'the daemon ended with status {ended}')
        while self.is_mounted():
            self.detach()
        assert ended not in CRASHES, self.messages()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if call.when == 'call':
        item.failed = outcome.get_result().failed


def end_stores(request, made):
    """After a test: its stores are unmounted and clean, or say what happened."""
    failed = getattr(request.node, 'failed', True)
    for store in made:
        try:
            store.close(failed)
            if failed:
                print(f'--- {store.log}\n{store.messages() if store.log.exists() else ""}')
            elif store.ends_clean:
                store.assert_clean()
        finally:
            store.end()
            if not store.is_mounted():
                shutil.rmtree(store.folder)


@pytest.fixture
def make_store(request):
    """make_store(size='256M', *options of mkfs): stores that are unmounted and must be clean when the test ends."""
    made = []

    def make(size='256M', *format_options):
        folder = pathlib.Path(tempfile.mkdtemp(prefix='hitrain-test-'))
        folder.chmod(0o755)  # other users reach the mount
        made.append(Store(folder, size, *format_options))
        return made[-1]

    yield make
    end_stores(request, made)


@pytest.fixture
def store(make_store):
    """A mounted store with a small DRAM tier."""
    made = make_store()
    made.mount()
    return made


@pytest.fixture
def mnt(store):
    return store.point


@pytest.fixture
def stores(make_store):
    """Two stores, and their mount points."""
    pair = make_store(), make_store()
    return pair, [s.mount() for s in pair]
