# SPDX-License-Identifier: Apache-2.0
"""However a mount ends, promised content is there: synced bytes and committed steps always, and after an orderly end
all written bytes."""
import contextlib
import mmap
import os
import signal
import struct
import subprocess
import time

import pytest

from calls import sync
from conftest import MIB, SECONDS_MAX, SMALL, run, wait_for
from models import new_model
from passthrough import command
from test_life import daemons_of

COUNT = 1000
TERM, INT, HUP, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL


class Content:
    """Everything that can be promised, made in a mount, and checked in a later one."""

    def __init__(self, point):
        self.point = point
        self.parameter = None

    def make(self):
        (self.point / 'synced').write_bytes(b's' * 300_000)
        sync(self.point / 'synced')
        self.step()
        (self.point / 'written').write_bytes(b'w' * MIB)
        (self.point / 'folder').mkdir()
        self.held = open(self.point / 'held', 'w+b', buffering=0)
        self.held.write(bytes(8192))
        self.map = mmap.mmap(self.held.fileno(), 8192)
        self.map[4096:4100] = b'page'

    def step(self):
        """A committed step; then gradients of a step that is not committed."""
        root = new_model(self.point / 'model', 'adamw lr=0.5 weight_decay=0', p=struct.pack('f', 1.0) * COUNT)
        (root / '.hitrain/grad/p').write_bytes(struct.pack('f', 1.0) * COUNT)
        sync(root)
        self.parameter = (root / 'p').read_bytes()
        assert self.parameter != struct.pack('f', 1.0) * COUNT
        (root / '.hitrain/grad/p').write_bytes(struct.pack('f', -1.0) * COUNT)

    def let_go(self):
        self.map.close()
        try:
            self.held.close()
        except OSError:
            pass

    def check(self, orderly, pages):
        assert (self.point / 'synced').read_bytes() == b's' * 300_000
        assert (self.point / 'model/p').read_bytes() == self.parameter, 'the committed step and no other'
        assert os.getxattr(self.point / 'model', 'user.hitrain.step') == b'1'
        if orderly:
            assert (self.point / 'written').read_bytes() == b'w' * MIB and (self.point / 'folder').is_dir()
            assert (self.point / 'held').stat().st_size == 8192
        if pages:
            assert (self.point / 'held').read_bytes()[4096:4100] == b'page'


def umount(store, *flags):
    return subprocess.run(['umount', *flags, store.point], stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX)


@pytest.mark.parametrize('how', ['signal TERM', 'signal INT', 'signal HUP', 'signals', 'lazy', 'forced', 'killed', 'unused'])
@pytest.mark.parametrize('background', [False, True])
def test_an_end(make_store, how, background):
    store = make_store('64M')
    content = Content(store.point)
    if background:
        run('hitrain', '-o', ','.join((*SMALL, 'commit=3600')), store.image, store.point)
        (pid,) = daemons_of(store.image)
    else:
        store.mount('commit=3600')
        pid = store.daemon.pid
    content.make()
    done = umount(store)
    assert done.returncode and 'busy' in done.stderr, 'files are open'
    assert (store.point / 'written').exists(), 'and nothing has happened'

    if how.startswith('signal '):
        os.kill(pid, getattr(signal, 'SIG' + how.split()[1]))
    elif how == 'signals':
        for sig in (TERM, TERM, INT, HUP, TERM):
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.kill(pid, sig)
            time.sleep(0.002)
    elif how == 'lazy':
        assert umount(store, '-l').returncode == 0
        assert content.held.write(b'') == 0 and content.map[4096:4100] == b'page'
        os.pwrite(content.held.fileno(), b'late', 0)
        assert os.path.exists(f'/proc/{pid}') and not store.is_mounted()
        content.let_go()
    elif how == 'forced':
        umount(store, '-f')
    elif how == 'killed':
        os.kill(pid, KILL)
    else:
        content.let_go()
        assert umount(store).returncode == 0

    if store.daemon:
        assert store.daemon.wait(SECONDS_MAX) == (-KILL if how == 'killed' else 0), store.messages()
        store.daemon = None
    else:
        wait_for(lambda: not daemons_of(store.image), 'end of the daemon')
    content.let_go()
    while store.is_mounted():  # remains of a mount that was killed or forced
        store.detach()
    store.assert_clean()
    store.mount()
    content.check(orderly=how != 'killed', pages=how not in ('killed', 'forced'))
    if how == 'lazy':
        assert (store.point / 'held').read_bytes()[:4] == b'late'


def test_writers_at_work_when_the_end_comes(make_store):
    """Bytes that a writer synced before its first error are there."""
    store = make_store('256M')
    for sig in (TERM, INT, KILL):
        store.mount()
        folder = store.point / sig.name  # so that nothing is written into the folder below after the end
        folder.mkdir()
        script = 'i=0; while dd if=/dev/zero of=$0-$i bs=64k count=4 conv=fsync; do echo $i; i=$((i + 1)); done'
        writers = [subprocess.Popen(['sh', '-c', script, folder / str(w)], stdout=subprocess.PIPE,
                                    stderr=subprocess.DEVNULL, text=True) for w in range(3)]
        wait_for(lambda: any((folder / f'{w}-1').exists() for w in range(3)), 'a synced file')
        time.sleep(0.3)
        store.daemon.send_signal(sig)
        assert store.daemon.wait(SECONDS_MAX) == (-KILL if sig == KILL else 0), store.messages()
        store.daemon = None
        kept = [writer.communicate(timeout=SECONDS_MAX)[0].split() for writer in writers]
        while store.is_mounted():
            store.detach()
        store.assert_clean()
        store.mount()
        for w, numbers in enumerate(kept):
            for i in numbers:
                assert (folder / f'{w}-{i}').stat().st_size == 4 * 65536, (w, i)
        assert any(kept)
        store.unmount()


def end_mount(store, how):
    """By a plain unmount, or one of the other orderly ends while the mount is in use."""
    held = None if how == 'umount' else os.open(store.point, os.O_RDONLY)
    if how == 'umount':
        assert umount(store).returncode == 0
    elif how in ('-l', '-f'):
        umount(store, how)
    else:
        store.daemon.send_signal(getattr(signal, how))
    if held is not None:
        os.close(held)
    while store.is_mounted():
        store.detach()
    assert store.daemon.wait(SECONDS_MAX) == 0, store.messages()
    store.daemon = None
    store.assert_clean()


def make_model(store, name, options='', count=COUNT):
    root = new_model(store.point / name, f'sgd lr=0.5 {options}')
    (root / 'p').write_bytes(struct.pack('f', 1.0) * count)
    return root


def step(root, word='step'):
    (root / '.hitrain/grad/p').write_bytes(struct.pack('f', 1.0) * ((root / 'p').stat().st_size // 4))
    command(root, word)


def numbers(root):
    return [int(os.getxattr(root, f'user.hitrain.{word}')) for word in ('step', 'durable_step')]


ENDS = ('umount', 'SIGTERM', '-l', '-f')


@pytest.mark.parametrize('how', ENDS)
def test_an_orderly_end_keeps_models_without_an_open_step(make_store, how):
    store = make_store('64M')
    store.mount('commit=3600')
    never = make_model(store, 'never')      # no step, no commit
    (never / 'notes.txt').write_bytes(b'n' * 5000)
    (never / 'sub').mkdir()
    finished = make_model(store, 'finished', 'durable_every=10')
    command(finished, 'commit')
    for _ in range(3):
        step(finished)
    assert numbers(finished) == [3, 0]
    changed = make_model(store, 'changed')
    step(changed, 'commit')
    os.setxattr(changed, 'user.hitrain.optimizer', b'sgd lr=0.25')
    os.setxattr(changed / 'p', 'user.note', b'x')
    (changed / 'gone').write_bytes(b'g')
    command(changed, 'commit')
    (changed / 'gone').unlink()
    (changed / 'p').rename(changed / 'q')

    end_mount(store, how)
    assert 'step-dropped' not in store.messages()
    store.mount()
    assert (never / 'p').read_bytes() == struct.pack('f', 1.0) * COUNT
    assert (never / 'notes.txt').read_bytes() == b'n' * 5000 and (never / 'sub').is_dir()
    assert numbers(finished) == [3, 3] and (finished / 'p').read_bytes() == struct.pack('f', -0.5) * COUNT
    assert numbers(changed) == [1, 1] and sorted(os.listdir(changed)) == ['q']
    assert os.getxattr(changed, 'user.hitrain.optimizer') == b'sgd lr=0.25'
    assert os.getxattr(changed / 'q', 'user.note') == b'x'


@pytest.mark.parametrize('how', ENDS)
def test_an_end_within_a_step_names_it_and_keeps_nothing_of_it(make_store, how):
    store = make_store('64M')
    store.mount('commit=3600')
    others = [make_model(store, f'other{i}') for i in range(3)]
    root = make_model(store, 'deep', 'durable_every=10')
    command(root, 'commit')
    step(root, 'commit')
    step(root)
    (root / 'cursor').write_bytes(b'of the open step')
    (root / '.hitrain/grad/p').write_bytes(struct.pack('f', 1.0) * COUNT)
    command(root, 'wait')

    end_mount(store, how)
    (told,) = [line for line in store.messages().splitlines() if 'step-dropped' in line]
    assert '/deep: ' in told and 'step 3,' in told and 'finds step 1' in told
    store.mount()
    assert numbers(root) == [1, 1] and sorted(os.listdir(root)) == ['p']
    assert (root / 'p').read_bytes() == struct.pack('f', 0.5) * COUNT
    assert all((other / 'p').exists() for other in others)


def test_an_end_writes_nothing_of_models_that_are_durable(make_store):
    store = make_store('64M')
    store.mount()
    for i in range(4):
        step(make_model(store, f'm{i}'), 'commit')
    store.unmount()
    before = store.image.read_bytes()
    store.mount('noatime')
    assert sorted(os.listdir(store.point)) == ['m0', 'm1', 'm2', 'm3']
    store.unmount()
    after = store.image.read_bytes()
    changed = {at for at in range(0, len(before), 4096) if before[at:at + 4096] != after[at:at + 4096]}
    assert len(changed) < 20, 'the frames of a mount, and superblocks'
