# SPDX-License-Identifier: Apache-2.0
"""The store of the demo and of these tests: a mount that is in use says by whom, and nobody waits for these."""
import os
import re
import signal
import subprocess

import pytest

from trainer import store  # first: it makes the client importable
import demo_store
from hitrain import _daemon


def test_who_keeps_a_mount_busy_is_named_at_once(store, monkeypatch):
    monkeypatch.setattr(_daemon, 'HELD_SECONDS_MAX', 0.2)
    file = store.mountpoint / 'a file'
    file.write_bytes(b'x')
    with subprocess.Popen(['sleep', '1000'], cwd=store.mountpoint) as other, open(file):
        try:
            with pytest.raises(demo_store.StoreError) as e:
                store.unmount()
        finally:
            other.kill()
    assert re.search(f'process {os.getpid()}, this one. has {re.escape(str(file))}(;|$)', str(e.value))
    assert f'sleep (process {other.pid}) has {store.mountpoint}' in str(e.value)
    store.unmount()


def test_a_daemon_whose_mount_is_in_use_is_not_waited_for(store, monkeypatch):
    file, daemon, seconds = store.mountpoint / 'a', store.daemon, []
    file.write_bytes(b'x')
    wait = daemon.wait
    monkeypatch.setattr(daemon, 'wait', lambda timeout=None: (seconds.append(timeout), wait(timeout and 1))[1])
    with open(file):
        store.close()
    assert seconds[0] == 0 and daemon.returncode == -signal.SIGKILL and not demo_store.is_mounted(store.mountpoint)
