# SPDX-License-Identifier: Apache-2.0
"""Everything at once on one model root: no call waits for ever, and a read always returns some whole step."""
import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from conftest import MIB, SECONDS_MAX
from models import new_model

SECONDS = 20 if os.environ.get('HITRAIN_LONG') else 4
N = 300_000  # elements: two chunks
READER = '''
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever started the tests may ignore it
path, stop = sys.argv[1], sys.argv[2]
print('reading', flush=True)  # a signal that comes while Python starts can be lost
while not os.path.exists(stop):
    fd = os.open(path, os.O_RDONLY)
    while os.read(fd, 1 << 20):
        pass
    os.close(fd)
'''


class MixedLoad:
    """Threads that repeat an action until the end; keeps the first unexpected error."""

    def __init__(self):
        self.stop = threading.Event()
        self.threads, self.errors = [], []

    def add(self, work, *args):
        def loop():
            try:
                while not self.stop.is_set():
                    work(*args)
            except Exception as e:  # noqa: B902 - shown by the test
                self.errors.append(e)
                self.stop.set()
        self.threads.append(threading.Thread(target=loop))
        self.threads[-1].start()

    def finish(self, seconds, condition=lambda: True):
        """After so many seconds, or when the condition holds, whichever is later."""
        self.stop.wait(seconds)
        end = time.monotonic() + SECONDS_MAX
        while not condition() and not self.stop.wait(0.1):
            if time.monotonic() > end:
                self.errors.append(TimeoutError('the condition'))
                break
        self.stop.set()
        for t in self.threads:
            t.join(SECONDS_MAX)
            assert not t.is_alive(), 'somebody waits for ever'
        assert not self.errors, self.errors


def command(root, line):
    with open(root / '.hitrain/ctl', 'wb', buffering=0) as f:
        f.write(line.encode() + b'\n')


@contextlib.contextmanager
def allowed(*errors):
    try:
        yield
    except OSError as e:
        if e.errno not in errors:
            raise


def make_root(mnt, parameters, **words):
    text = ' '.join(['adamw lr=1e-3', *(f'{k}={v}' for k, v in words.items())])
    return new_model(mnt / 'root', text, **{f'p{i}': bytes(4 * N) for i in range(parameters)})


@pytest.mark.parametrize('flags,partial', [((), 0), (('-s',), 0), (('-s',), 1), ((), 1)])
def test_all_at_once(make_store, flags, partial):
    store = make_store()
    root = make_root(store.mount(flags=flags), 4, partial=partial)
    load = MixedLoad()

    def gradient(i):
        g = np.full(N, 1 + i, 'f4').tobytes()
        # Twice in a step, or between the halves an abort: EBUSY. A gradient from before an abort is gone: EINVAL at
        # most.
        with allowed(errno.EBUSY, errno.ESTALE):
            with open(root / f'.hitrain/grad/p{i}', 'wb', buffering=0) as f:
                for part in range(0, len(g), MIB):
                    f.write(g[part:part + MIB])

    def read(i):
        # One gradient for the whole file: all elements take the same way, and a page is of one moment. With partial=1
        # the rest of a gradient after an abort may be a step of its own.
        pages = np.fromfile(root / f'p{i}', 'f4')[:N // 1024 * 1024].reshape(-1, 1024)
        assert np.all(np.isfinite(pages)) and len(pages) == N // 1024
        assert partial or np.array_equal(pages, np.broadcast_to(pages[:, :1], pages.shape))

    def steer(line, pause, *errors):
        time.sleep(pause)
        with allowed(*errors):
            command(root, line)

    for i in range(4):
        load.add(gradient, i)
        load.add(read, i)
    load.add(steer, 'commit', 0.01, errno.EBUSY)
    load.add(steer, 'step', 0.03, errno.EBUSY)
    load.add(steer, 'abort', 0.2)
    load.add(steer, 'wait', 0)
    load.add(steer, 'evict p1', 0.05)
    load.add(steer, 'prefetch p2', 0.05)
    load.add(lambda: (root / 'other').write_bytes(os.urandom(random.randrange(300_000))))
    load.finish(SECONDS)
    command(root, 'abort')
    assert int(os.getxattr(root, 'user.hitrain.step')) == int(os.getxattr(root, 'user.hitrain.durable_step'))


def test_interrupted_readers_leave_nothing_stuck(store, tmp_path):
    """Readers are killed and stopped while their read waits for an update."""
    root = make_root(store.point, 2)
    stop = tmp_path / 'stop'
    load = MixedLoad()

    def step():
        for i in range(2):
            (root / f'.hitrain/grad/p{i}').write_bytes(np.ones(N, 'f4').tobytes())
        command(root, 'commit')

    def disturb(i, sig):
        with subprocess.Popen([sys.executable, '-c', READER, str(root / f'p{i}'), str(stop)], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL) as p:
            p.stdout.readline()
            time.sleep(random.uniform(0, 0.2))
            p.send_signal(sig)
            p.wait(SECONDS_MAX)
    load.add(step)
    load.add(disturb, 0, signal.SIGINT)
    load.add(disturb, 1, signal.SIGKILL)
    load.finish(SECONDS, lambda: int(os.getxattr(store.point, 'user.hitrain.mount_parked_reads')) > 0)
    stop.touch()
    assert len(np.fromfile(root / 'p0', 'f4')) == N
