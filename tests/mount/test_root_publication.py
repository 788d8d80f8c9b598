# SPDX-License-Identifier: Apache-2.0
"""Nothing of an open step is published by anything but its commit: not by the end of a model root, nor by fsync."""
import errno
import os
import random
import threading
import time

import numpy as np
import pytest

from calls import fails, run_threads, sync
from conftest import MIB
from models import new_model
from test_roots import command, put_gradient, word

ELEMENTS = 2 * MIB
SGD = 'sgd lr=1'


@pytest.fixture
def model(mnt):
    """A model of one parameter of 8 MiB of zeros, committed once."""
    m = new_model(mnt / 'model', SGD, w=bytes(4 * ELEMENTS))
    sync(m)
    return m


def content(model):
    """The one value that all elements have."""
    values = np.unique(np.fromfile(model / 'w', 'f4'))
    assert len(values) == 1, 'a part of a step'
    return float(values[0])


def end(model):
    """True: it is no model root any more."""
    try:
        os.removexattr(model, 'user.hitrain.optimizer')
        return True
    except OSError as e:
        assert e.errno == errno.EBUSY, os.strerror(e.errno)
        return False


def test_a_refused_end_changes_nothing(store, model):
    (model / 'w').write_bytes(bytes(4 * ELEMENTS))
    (model / 'v').write_bytes(bytes(4096))
    sync(model)
    put_gradient(model, 'w', np.ones(ELEMENTS, 'f4'))
    put_gradient(model, 'v', np.ones(16, 'f4'))  # the rest is missing
    assert command(model, 'wait') == ['ok'] and content(model) == -1
    assert not end(model)
    assert 'model/v: only a part' in word(model, 'error')
    (store.point / 'outside').write_bytes(b'x')
    sync(store.point / 'outside')
    store.crash()
    assert content(model) == 0 and word(model, 'durable_step') == '0'


def step_once(model, delay):
    time.sleep(delay)
    try:
        put_gradient(model, 'w', np.ones(ELEMENTS, 'f4'))
    except OSError as e:
        assert e.errno in (errno.ENOENT, errno.ESTALE, errno.EINVAL), os.strerror(e.errno)


def test_an_end_beside_a_gradient_is_whole(store, model):
    """Content and step agree after each end, refused or not, and after a crash that follows."""
    rng = random.Random(7)
    for turn in range(12):
        before = int(word(model, 'durable_step'))
        (model / 'more').write_bytes(bytes([turn]) * (24 * MIB))  # the commit of the end takes its time
        thread = threading.Thread(target=step_once, args=(model, rng.random() / 1000))
        thread.start()
        time.sleep(rng.random() / 250)
        ended = end(model)
        thread.join()
        if not ended:
            (store.point / 'outside').write_bytes(b'x')
            sync(store.point / 'outside')
        store.crash()
        if ended:
            assert content(model) in (0.0, -float(before + 1), -float(before))
            (model / 'w').write_bytes(bytes(4 * ELEMENTS))
            word(model, 'optimizer', SGD)
            sync(model)
        else:  # never, if no client can begin a step while a root ends
            assert content(model) == -float(word(model, 'durable_step'))


def test_ends_beside_steps_and_aborts_leave_a_clean_store(store, model):
    """The state of no parameter remains: fsck checks it after the test."""
    stop = time.monotonic() + 1.5
    allowed = (errno.EBUSY, errno.ENOENT, errno.ESTALE, errno.EINVAL, errno.ENODATA)

    def again(what):
        while time.monotonic() < stop:
            try:
                what()
            except OSError as e:
                if e.errno not in allowed:
                    raise

    def remake():
        os.unlink(model / 'u')
        (model / 'u').write_bytes(bytes(4096))

    (model / 'u').write_bytes(bytes(4096))
    work = [lambda: put_gradient(model, 'u', np.ones(1024, 'f4')), lambda: command(model, 'abort'), remake,
            lambda: os.removexattr(model, 'user.hitrain.optimizer'), lambda: word(model, 'optimizer', SGD)]
    failed = []

    def run(what):
        try:
            again(what)
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(w,)) for w in work]
    run_threads(threads)
    assert not failed, failed


# --------------------------------------------------------------- published without the commit

def refused_as_busy(path):
    with fails(errno.EBUSY):
        sync(path)


def test_fsync_of_a_directory_publishes_nothing_of_an_open_step(store, model):
    sub = model / 'sub'
    sub.mkdir()
    (sub / 'new').write_bytes(bytes(4096))
    sync(sub)
    (sub / 'newer').write_bytes(bytes(4096))
    put_gradient(sub, 'newer', np.ones(1024, 'f4'))
    command(model, 'wait')
    refused_as_busy(sub)
    assert 'commit the model root' in word(sub, 'error')
    store.crash()
    assert os.listdir(sub) == ['new']


def test_a_file_that_is_no_parameter_any_more_is_published_with_its_step(store, model):
    put_gradient(model, 'w', np.ones(ELEMENTS, 'f4'))
    command(model, 'wait')
    assert content(model) == -1
    word(model / 'w', 'dtype', 'i32')
    refused_as_busy(model / 'w')
    store.crash()
    assert content(model) == 0
