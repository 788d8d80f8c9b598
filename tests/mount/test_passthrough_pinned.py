# SPDX-License-Identifier: Apache-2.0
"""A program registers the mapping of a passthrough file as a buffer of io_uring, which pins its pages as a GPU does. What it transfers
reaches the file, whatever the store does meanwhile."""
import os
import random
import subprocess

import pytest

from conftest import MIB, SECONDS_MAX, wait_for
from passthrough import HALF, ONE, PARAM, command, floats, gradient, passthrough_store, mapped, root, stat
from programs import command as program
from test_passthrough_memory import press


class Pinner:
    """tests/programs/pinner.c with a file beside the store."""

    def __init__(self, store, path, size=PARAM):
        self.other, self.rng = store.folder / f'other-{path.name}', random.Random(3)
        self.other.write_bytes(bytes(size))
        self.process = subprocess.Popen(program('pinner', path, self.other), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        said = self.process.stdout.readline().strip()
        if said.startswith('io_uring_setup'):
            self.process.wait()
            pytest.skip(f'no io_uring here: {said}')
        self.registered = said

    def ask(self, word):
        self.process.stdin.write(word + '\n')
        assert self.process.stdout.readline() == ('begins\n' if word == 'loop' else 'ok\n')

    def put(self, data=None):
        """A device writes into the mapping: these bytes, or random ones."""
        data = data or array_of(self.rng, self.other.stat().st_size)
        self.other.write_bytes(data)
        self.ask('in')
        return data

    def get(self):
        """What a device reads from the mapping."""
        self.ask('out')
        return self.other.read_bytes()

    def stop(self):
        """Ends a loop."""
        self.process.stdin.write('out\n')
        assert [self.process.stdout.readline() for _ in range(2)] == ['ok\n', 'ok\n']
        return self.other.read_bytes()

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(SECONDS_MAX) == 0


def array_of(rng, size):
    """Finite numbers."""
    return b''.join(rng.choice((ONE, HALF, bytes(4))) for _ in range(1024)) * (size // 4096) + HALF * (size % 4096 // 4)


@pytest.fixture
def pinner(passthrough_store, root):
    pinner = Pinner(passthrough_store, root / 'w')
    assert pinner.registered == 'ok'
    yield pinner
    pinner.process.kill()
    pinner.process.wait()
    pinner.process.stdin.close()
    pinner.process.stdout.close()


def assert_reaches(pinner, root):
    """Both ways: the pages are those of the file."""
    data = pinner.put()
    assert (root / 'w').read_bytes()[:len(data)] == data
    with mapped(root / 'w') as m:
        m[MIB:MIB + 4] = m[:4] = HALF
    got = pinner.get()
    assert got[:4] == got[MIB:MIB + 4] == HALF and got[4:MIB] == data[4:MIB]


def end_mount(store, how):
    """SIGTERM, because umount refuses a mount whose files are mapped."""
    if how == 'kill':
        store.kill()
        return
    store.daemon.terminate()
    assert store.daemon.wait(SECONDS_MAX) == 0, store.messages()
    store.daemon = None


@pytest.mark.parametrize('end', ['unmount', 'kill'])
def test_transfers_are_durable_with_a_commit(passthrough_store, root, pinner, end):
    data = pinner.put()
    command(root, 'commit')
    last = pinner.put()
    assert last != data
    end_mount(passthrough_store, end)
    pinner.put(ONE * (PARAM // 4))      # into pages that nobody else has any more
    assert pinner.get() == ONE * (PARAM // 4)
    pinner.close()
    passthrough_store.mount('passthrough=off')
    assert (root / 'w').read_bytes() == (data if end == 'kill' else last)


def test_updates_and_pressure(passthrough_store, root, pinner):
    """Updates work on the pinned pages, and these stay when the tier is full and the file is to leave it."""
    for value in 1.0, 2.0:
        pinner.put(ONE * (PARAM // 4))
        gradient(root, 'w', value)
        command(root, 'commit')
        assert set(floats(pinner.get())) == {1.0 - 0.5 * value}
        press(passthrough_store.point, 40 * MIB)
        for text in 'evict w', 'prefetch w':
            command(root, text)
            assert_reaches(pinner, root)


def test_abort_and_rollback(root, pinner):
    command(root, 'snapshot first')
    data = pinner.put()
    command(root, 'abort')
    assert pinner.get() == ONE * (PARAM // 4) != data
    assert_reaches(pinner, root)
    command(root, 'commit')
    assert command(root, 'rollback first') == 'ok'
    assert pinner.get() == ONE * (PARAM // 4)
    assert_reaches(pinner, root)


def test_changes_of_the_file(root, pinner):
    """No page leaves the file: a cut is refused."""
    for cut in (lambda: os.truncate(root / 'w', 4000), lambda: (root / 'w').write_bytes(ONE)):
        with pytest.raises(OSError, match='busy'):
            cut()
        assert_reaches(pinner, root)
    subprocess.run(['fallocate', '-p', '-o', '0', '-l', str(2 * MIB), root / 'w'], check=True)
    assert pinner.get()[:2 * MIB] == bytes(2 * MIB)
    assert_reaches(pinner, root)
    os.truncate(root / 'w', 5 * MIB)
    assert_reaches(pinner, root)
    command(root, 'abort')              # to the former size: only pages behind the buffer go
    assert os.stat(root / 'w').st_size == PARAM
    assert_reaches(pinner, root)


@pytest.mark.parametrize('how', ['unlink', 'replace'])
def test_file_that_is_gone(passthrough_store, root, pinner, how):
    (root / 'new').write_bytes(HALF * (PARAM // 4))
    if how == 'unlink':
        os.unlink(root / 'w')
    else:
        os.rename(root / 'new', root / 'w')
    command(root, 'commit')
    data = pinner.put()
    press(passthrough_store.point, 40 * MIB)
    assert pinner.get() == data
    if how == 'replace':
        assert (root / 'w').read_bytes() == HALF * (PARAM // 4)
    pinner.close()

    def is_gone():
        command(root, 'commit')  # frees what no program has any more
        return stat(passthrough_store.point, 'passthrough_files') == (how == 'replace')

    wait_for(is_gone, 'its memory gone')


def test_daemon_killed_beside_transfers(passthrough_store, root, pinner):
    pinner.other.write_bytes(HALF * (PARAM // 4))
    pinner.ask('loop')
    wait_for(lambda: (root / 'w').read_bytes() == HALF * (PARAM // 4), 'the transfers of a round')
    for _ in range(3):
        command(root, 'commit')
    passthrough_store.kill()
    assert pinner.stop() == HALF * (PARAM // 4)
    pinner.close()
    passthrough_store.mount('dram=48M', 'passthrough=16M')
    assert (root / 'w').read_bytes() == HALF * (PARAM // 4)
    assert stat(passthrough_store.point, 'checksum_errors') == 0


def test_gradient_window(passthrough_store, root):
    """A device writes gradients of step after step into the same pages."""
    pinner = Pinner(passthrough_store, root / '.hitrain/grad/w')
    assert pinner.registered == 'ok'
    want = 1.0
    for value in ONE, HALF, ONE:
        pinner.put(value * (PARAM // 4))
        command(root, 'apply w')
        assert pinner.get() == bytes(PARAM)
        command(root, 'commit')
        want -= 0.5 * floats(value)[0]
        assert set(floats((root / 'w').read_bytes())) == {want}
    pinner.close()


def test_ordinary_file_cannot_be_pinned(passthrough_store):
    """The kernel refuses it, or pins pages of its cache; the daemon and the file's bytes do not mind."""
    path = passthrough_store.point / 'file'
    path.write_bytes(ONE * (PARAM // 4))
    pinner = Pinner(passthrough_store, path)
    assert pinner.registered in ('ok', 'register: Bad address', 'register: Operation not supported')
    pinner.process.stdin.close()
    pinner.process.wait()
    assert path.read_bytes() == ONE * (PARAM // 4)
