# SPDX-License-Identifier: Apache-2.0
"""Steps, kept steps, rollbacks and digests beside readers, mappings and passed-through files: ThreadSanitizer runs this, too."""
import os
import threading
import time

import pytest

from conftest import MIB
from passthrough import command, floats, gradient, make_model, mapped

SECONDS = 20 if os.environ.get('HITRAIN_LONG') else 0.5
SIZES = {'w': MIB + 4000, 'v': 64 << 10}


class Readers:
    """Threads that read a model in all ways, until the end. Each value that they see is that of some step."""

    def __init__(self, root, values):
        self.root, self.values, self.over, self.errors = root, values, threading.Event(), []
        self.threads = [threading.Thread(target=self.run, args=(look,)) for look in (self.read, self.map, self.state, self.kept)]
        for t in self.threads:
            t.start()

    def run(self, look):
        try:
            while not self.over.is_set():
                look()
        except Exception as e:  # for the test's thread
            self.errors.append(e)

    def check(self, data):
        assert set(floats(data)) <= self.values, set(floats(data))

    def read(self):
        for name in SIZES:
            self.check((self.root / name).read_bytes())

    def map(self):
        with mapped(self.root / 'w', os.O_RDONLY) as m:
            for _ in range(10):
                self.check(m[:4096] + m[-4096:])

    def state(self):
        (self.root / '.hitrain/state/w/step').read_bytes()
        os.getxattr(self.root, 'user.hitrain.stats')

    def kept(self):
        folder = self.root / '.hitrain' / 'snap'
        for name in os.listdir(folder):
            try:
                self.check((folder / name / 'v').read_bytes())
            except FileNotFoundError:  # it expired
                pass

    def end(self):
        self.over.set()
        for t in self.threads:
            t.join()
        assert not self.errors, self.errors


def step(root, number):
    for name in SIZES:
        gradient(root, name, 1)
    assert command(root, f'snapshot kept{number}') == 'ok'


@pytest.mark.parametrize('how', ['passed through', 'mapped'])
def test_rollbacks_beside_readers(make_store, how):
    """Steps, back to one of them, and on: the values count the steps, for every reader and every kept step."""
    store = make_store()
    store.mount('dram=48M', 'digest=on', 'background_rate=8G', *(['passthrough=16M'] if how == 'passed through' else []))
    if 'passthrough is off' in store.messages():
        pytest.skip('the kernel or the privileges are not there')
    root = make_model(store.point, **SIZES)
    assert command(root, 'snapshot kept0') == 'ok'
    gradient(root, 'w', 0)
    gradient(root, 'v', 0)
    assert command(root, 'commit') == 'ok'  # all have state
    readers, end, rounds = Readers(root, {1 - n / 2 for n in range(5)}), time.monotonic() + SECONDS, 0
    try:
        while time.monotonic() < end or not rounds:
            for n in range(1, 5):
                step(root, n)
            back = 1 + rounds % 3
            with mapped(root / 'w', os.O_RDONLY) as m:
                assert command(root, f'rollback kept{back}') == 'ok'
                for data in m[:], (root / 'w').read_bytes(), (root / 'v').read_bytes():
                    assert set(floats(data)) == {1 - back / 2}
            assert command(root, 'rollback kept0') == 'ok'
            for n in range(1, 5):
                assert command(root, f'forget kept{n}') == 'ok'
            rounds += 1
    finally:
        readers.end()
    assert set(floats((root / 'w').read_bytes())) == {1}
    store.unmount(check=True)
