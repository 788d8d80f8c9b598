# SPDX-License-Identifier: Apache-2.0
"""Parameters that lose their name while a program has them, or their gradient, open."""
import errno
import os

import numpy as np
import pytest

from calls import settle, sync
from models import new_model
from test_roots import command, put_gradient, refused, word

ELEMENTS = 1024


@pytest.fixture
def model(mnt):
    m = new_model(mnt / 'model', 'adamw lr=0.1', w=bytes(4 * ELEMENTS), v=bytes(4 * ELEMENTS))
    step(m)
    return m


def step(model, names=('w', 'v')):
    for name in names:
        put_gradient(model, name, np.ones(ELEMENTS, 'f4'))
    sync(model)


def objects(store):
    text = os.getxattr(store.point, 'user.hitrain.stats').decode()
    return int(dict(line.split('=') for line in text.splitlines())['objects'])


# --------------------------------------------------------- and then a mount

@pytest.mark.parametrize('crash', [False, True])
@pytest.mark.parametrize('end', ['before', 'after'])
def test_an_open_parameter_that_is_removed_takes_its_state_along(store, model, crash, end):
    """Closed after or before the commit's publication of its end: the mount finds it without a name."""
    with open(model / 'w', 'rb') as held:
        os.unlink(model / 'w')
        sync(model)
        if end == 'before':
            held.close()
        if crash:
            store.kill()
    if not crash:
        store.unmount(check=True)
    store.mount()
    assert os.listdir(model) == ['v']
    step(model, ('v',))
    store.remount(check=True)


@pytest.mark.parametrize('crash', [False, True])
def test_a_mount_alone_ends_the_state_of_what_it_ends(store, model, crash):
    with open(model / 'w', 'rb'):
        os.unlink(model / 'w')
        sync(model)
    if crash:
        store.kill()
    else:
        store.unmount()
    store.mount()
    store.remount(check=True)


# ------------------------------------------ a gradient open over everything

def test_a_gradient_that_is_open_over_unlink_commit_and_abort(store, model):
    before = objects(store)
    g = open(model / '.hitrain/grad/w', 'wb', buffering=0)
    os.unlink(model / 'w')
    sync(model)
    g.close()
    settle(model)
    assert command(model, 'abort') == ['ok']
    assert os.listdir(model) == ['v']
    step(model, ('v',))
    assert objects(store) < before  # content and moments have gone completely
    store.remount(check=True)


# ---------------------------------------------------------------- the step

def half(model, name):
    with open(model / '.hitrain/grad' / name, 'wb', buffering=0) as f:
        f.write(np.ones(ELEMENTS // 2, 'f4'))


@pytest.mark.parametrize('clip', [0, 1])
def test_a_removed_parameter_does_not_keep_a_step_from_ending(model, clip):
    if clip:
        word(model, 'optimizer', 'adamw lr=0.1 max_grad_norm=1')
    with open(model / 'w', 'rb') as held:
        half(model, 'w')
        put_gradient(model, 'v', np.full(ELEMENTS, 2, 'f4'))
        refused(errno.EBUSY, sync, model)
        assert word(model, 'error').startswith('model/w: only a part')
        os.unlink(model / 'w')
        sync(model)
        assert word(model, 'durable_step') == '2'
        if clip:
            assert float(word(model, 'grad_norm')) == np.sqrt(4 * ELEMENTS)
        assert len(held.read()) == 4 * ELEMENTS
        step(model, ('v',))
    assert word(model, 'durable_step') == '3'


def test_a_name_that_an_abort_brings_back_counts_again(model):
    word(model, 'optimizer', 'adamw lr=0.1 durable_every=10')
    with open(model / 'w', 'rb'):
        half(model, 'w')
        os.unlink(model / 'w')
        assert command(model, 'step') == ['ok']
        assert command(model, 'abort') == ['ok']
        half(model, 'w')
        refused(errno.EBUSY, sync, model)
        with open(model / '.hitrain/grad/w', 'wb', buffering=0) as f:
            f.seek(2 * ELEMENTS)
            f.write(np.ones(ELEMENTS // 2, 'f4'))
    sync(model)
    assert word(model, 'durable_step') == '2'


def test_what_is_wrong_with_a_removed_parameter_is_named(model):
    g = os.open(model / '.hitrain/grad/w', os.O_WRONLY)
    os.unlink(model / 'w')
    refused(errno.EINVAL, os.pwrite, g, bytes(8), 4 * ELEMENTS)
    assert word(model, 'error').startswith('model/w (deleted): gradient')
    sync(model)
    refused(errno.EINVAL, os.pwrite, g, bytes(8), 4 * ELEMENTS)
    assert word(model, 'error').startswith('a deleted file: gradient')
    refused(errno.EINVAL, os.close, g)
