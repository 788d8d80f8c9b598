# SPDX-License-Identifier: Apache-2.0
"""Clients of random calls beside unmount and remount: after every end fsck finds nothing, and after an orderly one nothing is missing."""
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

import random_calls
from conftest import SECONDS_MAX, wait_for
from programs import LONG

ENDS = ('umount', 'SIGTERM', 'forced', 'lazy', 'killed')
ROUNDS = 40 if LONG else 2
CLIENTS = ('files', 'model', 'files below a model')


class Client:
    def __init__(self, store, what, name, seed):
        self.kind, self.seed, self.path = what.split()[0], seed, store.point / name
        if 'below' in what:
            self.path.mkdir()
            os.setxattr(self.path, 'user.hitrain.optimizer', b'sgd lr=0.5')
            self.path = self.path / 'sub'
        random_calls.KINDS[self.kind].prepare(self.path)
        self.said = store.folder / name
        program = pathlib.Path(random_calls.__file__)
        with open(self.said, 'wb') as out:
            self.process = subprocess.Popen([sys.executable, program, self.kind, self.path, str(seed)],
                                            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL)

    def answered(self):
        return self.said.stat().st_size

    def stop(self):
        self.process.kill()
        self.process.wait(SECONDS_MAX)

    def check(self, orderly):
        if self.kind == 'files' and not orderly:
            return
        found = random_calls.KINDS[self.kind].look(self.path)
        allowed, call, partly = random_calls.expected(self.kind, self.seed, self.answered(), orderly)
        if partly:      # of other files nothing may differ
            concerned = {call[1], *(word for word in call[2:3] if isinstance(word, str))}
            found, *allowed = [{name: value for name, value in state.items() if name not in concerned}
                               for state in (found, *allowed)]
        assert found in allowed, f'{self.kind} seed {self.seed}, {self.answered()} calls, then {call[:3]}'


def end(store, how, clients):
    if how in ('umount', 'lazy'):
        flags = ['-l'] if how == 'lazy' else []
        if how == 'umount':     # no process may be in it
            for client in clients:
                client.stop()
        # A client that was killed in a call may be in it for a moment more.
        wait_for(lambda: subprocess.run(['umount', *flags, store.point], stderr=subprocess.DEVNULL).returncode == 0, how)
    elif how == 'forced':
        subprocess.run(['umount', '-f', store.point], stderr=subprocess.DEVNULL, timeout=SECONDS_MAX)
    else:
        store.daemon.send_signal(signal.SIGKILL if how == 'killed' else signal.SIGTERM)
    for client in clients:
        if how != 'lazy':
            client.process.wait(SECONDS_MAX)
        client.stop()
    status = store.daemon.wait(SECONDS_MAX)
    assert status == (-signal.SIGKILL if how == 'killed' else 0), store.messages()
    store.daemon = None
    while store.is_mounted():
        store.detach()


@pytest.mark.parametrize('how', ENDS)
def test_random_calls_beside_an_end(make_store, how):
    seed = int(os.environ.get('HITRAIN_SEED', random.SystemRandom().randrange(1 << 30)))
    print(f'HITRAIN_SEED={seed}')
    moments = random.Random(seed)
    store = make_store('256M')
    store.mount()
    ended = []
    for i in range(ROUNDS):
        clients = [Client(store, what, f'{what.replace(" ", "-")}-{i}', moments.randrange(1 << 30)) for what in CLIENTS]
        enough = moments.randrange(20, 150)
        wait_for(lambda: min(client.answered() for client in clients) >= enough, 'calls')
        time.sleep(moments.uniform(0, 0.05))
        end(store, how, clients)
        store.assert_clean()
        store.mount()
        ended += clients
        for client in ended:
            client.check(orderly=how != 'killed')
        for client in ended[:-2 * len(CLIENTS)]:    # the store stays small
            subprocess.run(['rm', '-rf', client.path], check=True)
        ended = ended[-2 * len(CLIENTS):]
