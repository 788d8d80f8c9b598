# SPDX-License-Identifier: Apache-2.0
"""Asynchronous steps on a mount: readers, the next gradients, and what ends the model, the step or the daemon meanwhile.

Plain descent by gradients of -1 with a learning rate of 1 counts: after step k each element is k.
"""
import errno
import os
import time

import numpy as np
import pytest

from conftest import MIB
from models import new_model
from test_roots import put_gradient, refused, sync, word

ELEMENTS = MIB + 1000
NAMES = ('first', 'second', 'third')
CONFIGS = ('sgd lr=1', 'sgd lr=1 max_grad_norm=1e9', 'sgd lr=1 durable_every=3', 'sgd lr=1 accumulate=2')


def command(root, line):
    """Raises the error of the command."""
    fd = os.open(root / '.hitrain' / 'ctl', os.O_RDWR)
    try:
        os.write(fd, f'{line}\n'.encode())
    finally:
        os.close(fd)


def make(store_point, config):
    root = new_model(store_point / 'model', config)
    for name in NAMES:
        (root / name).write_bytes(bytes(4 * ELEMENTS))
    sync(root)
    return root


def send(root, accumulate=False):
    for _ in range(1 + accumulate):
        for name in reversed(NAMES):
            put_gradient(root, name, np.full(ELEMENTS, -0.5 if accumulate else -1, 'f4'))


def values(root, name):
    """The values that a parameter has: one, if it is of one step."""
    return set(np.unique(np.fromfile(root / name, 'f4')))


@pytest.mark.parametrize('config, flags', [(c, ()) for c in CONFIGS] + [(CONFIGS[1], ('-s',))])
def test_reads_after_the_request_see_the_step(make_store, config, flags):
    root = make(make_store().mount(flags=flags), config)
    for step in range(1, 5):
        send(root, 'accumulate' in config)
        for name in NAMES:
            values(root, name)      # fills the kernel's cache with what may be the step before
        command(root, 'step async')
        for name in NAMES:
            assert values(root, name) == {step}
        command(root, 'wait')
        assert word(root, 'step') == str(step)
    sync(root)
    assert word(root, 'durable_step') == '4'


def test_the_next_gradients_belong_to_the_next_step(make_store):
    root = make(make_store().mount(), 'sgd lr=1')
    for step in range(1, 9):
        send(root)
        number = word(root, 'step_open')
        command(root, f'step async if={number}')
    sync(root)
    assert word(root, 'step') == '8' and word(root, 'durable_step') == '8'
    assert all(values(root, name) == {8} for name in NAMES)


def test_refusals_come_with_the_request(make_store):
    root = make(make_store().mount(), 'sgd lr=1')
    with open(root / '.hitrain/grad/first', 'wb', buffering=0) as f:
        f.write(bytes(8000))
    refused(errno.EBUSY, command, root, 'step async')
    assert 'first hole' in word(root, 'error')
    refused(errno.ESTALE, command, root, 'step async if=1')
    refused(errno.EINVAL, command, root, 'commit async')
    command(root, 'abort')
    command(root, 'step async')
    assert word(root, 'step') == '0'


@pytest.mark.parametrize('config', CONFIGS[:2])
def test_a_killed_daemon_leaves_one_step_or_the_other(make_store, config):
    store = make_store()
    root = make(store.mount(), config)
    done = 0
    for trial in range(4):
        send(root)
        command(root, 'step async')
        time.sleep(0.004 * trial)
        store.kill()
        store.detach()
        root = store.mount() / 'model'
        now = int(word(root, 'step'))
        assert now in (done, done + 1)
        assert all(values(root, name) == {now} for name in NAMES)
        done = now


def test_removal_and_directories_wait_for_the_step(make_store):
    root = make(make_store().mount(), 'sgd lr=1')
    send(root)
    command(root, 'step async')
    os.removexattr(root, 'user.hitrain.optimizer')
    assert all(values(root, name) == {1} for name in NAMES)
    assert not (root / '.hitrain' / 'grad').exists()
