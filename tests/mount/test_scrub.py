# SPDX-License-Identifier: Apache-2.0
"""Scrub of a mounted store, as an operator runs it, beside training and on a read-only mount."""
import json
import os
import time

import numpy as np

from calls import sync, write_synced
from conftest import SECONDS_MAX, run, wait_for
from models import new_model
from test_errors import wait_event

ELEMENTS = 700_000
STEPS = 12
MIB = 1 << 20


def scrub(verb, point, check=True):
    done = run('hitrainctl', 'scrub', verb, point, '--json', check=check)
    return json.loads(done.stdout) if done.returncode == 0 else done


def finished(point):
    """Waits for the end of the scrub that runs; its figures."""
    wait_for(lambda: scrub('status', point)['state'] != 'running', 'scrub')
    return scrub('status', point)


def flip(image, at):
    with open(image, 'r+b') as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
        f.flush()
        os.fsync(f.fileno())


def damage(image, data):
    """Changes one byte of the only place of the image that holds data; where."""
    whole = image.read_bytes()
    at = whole.find(data)
    assert at >= 0 and whole.find(data, at + 1) < 0
    flip(image, at + 7)
    return at + 7


def train(point, goes_on):
    """Steps of one model, as long as goes_on(number of steps); the parameters and moments at the end."""
    names = ['a', 'b', 'c']
    root = new_model(point / 'model', 'adamw lr=0.01 weight_decay=0.1 max_grad_norm=1',
                     **{name: np.random.default_rng(i).standard_normal(ELEMENTS, dtype=np.float32).tobytes() for i, name in enumerate(names)})
    step = 0
    while goes_on(step):
        for i, name in enumerate(names):
            gradient = np.random.default_rng(100 * step + i).standard_normal(ELEMENTS, dtype=np.float32)
            (root / '.hitrain' / 'grad' / name).write_bytes(gradient.tobytes())
        sync(root)
        step += 1
    states = [root / '.hitrain' / 'state' / n / s for n in names for s in ('exp_avg', 'exp_avg_sq')]
    return [p.read_bytes() for p in [root / n for n in names] + states]


def test_steps_beside_a_scrub_give_the_same_bits(make_store):
    quiet, busy = make_store('512M'), make_store('512M')
    point = busy.mount('scrub_rate=8G')
    write_synced(point / 'ballast', np.random.default_rng(9).bytes(24 * MIB))
    runs, steps, deadline = 0, 0, time.monotonic() + SECONDS_MAX

    def scrub_again(step):
        """Until a whole run was beside the steps, and another one has begun."""
        nonlocal runs, steps
        steps = step
        if not runs or scrub('status', point)['state'] != 'running':
            scrub('start', point)
            runs += 1
        assert time.monotonic() < deadline, (step, runs)
        return step < STEPS or runs < 2

    got = train(point, scrub_again)
    end = finished(point)
    assert (end['state'], end['found']) == ('complete', 0)
    assert got == train(quiet.mount(), lambda step: step < steps)
    busy.unmount(check=True)


def test_what_is_bad_is_repaired_from_memory_or_told(make_store):
    store = make_store()
    point = store.mount('scrub_rate=8G')
    kept, lost = (np.random.default_rng(i).bytes(200_000) for i in (1, 2))
    write_synced(point / 'kept', kept)
    write_synced(point / 'lost', lost)
    run('hitrainctl', 'evict', point / 'lost')
    damage(store.image, kept[:4096])
    damage(store.image, lost[:4096])
    scrub('start', point)
    end = finished(point)
    assert (end['state'], end['found'], end['repaired']) == ('complete', 2, 1), end
    assert wait_event(point, 'scrub-damage')['path'] == 'lost'
    assert wait_event(point, 'scrub-repaired')['path'] == 'kept'
    assert 'hitrain_scrub_repaired_total 1\n' in (point / '.hitrain' / 'stats').read_text()
    (point / 'lost').unlink()
    sync(point)
    scrub('start', point)
    assert finished(point)['found'] == 0
    store.unmount()
    assert (store.mount() / 'kept').read_bytes() == kept


def test_start_stop_and_what_is_refused(make_store):
    store = make_store()
    point = store.mount('scrub_rate=64k')
    write_synced(point / 'file', np.random.default_rng(1).bytes(8 * MIB))
    assert scrub('status', point)['state'] == 'never'
    assert 'no scrub is running' in scrub('stop', point, check=False).stderr
    now = scrub('start', point)
    assert now['state'] == 'running' and now['total_bytes'] > 8 * MIB
    assert 'running already' in scrub('start', point, check=False).stderr
    assert 'running' in run('hitrainctl', 'scrub', 'status', point).stdout
    assert scrub('stop', point)['state'] == 'stopped'
    scrub('start', point)
    assert run('hitrainctl', 'scrub', 'go', point, check=False).returncode == 2
    assert run('hitrainctl', 'scrub', check=False).returncode == 2
    store.unmount()  # while it runs
    store.assert_clean()


def test_a_read_only_mount_is_looked_at_and_left_alone(make_store):
    store = make_store()
    point = store.mount()
    data = np.random.default_rng(1).bytes(300_000)
    write_synced(point / 'file', data)
    store.unmount()
    at = damage(store.image, data[:4096])
    before = store.image.read_bytes()
    point = store.mount('ro', 'scrub_rate=8G')
    scrub('start', point)
    end = finished(point)
    assert (end['state'], end['found'], end['repaired']) == ('complete', 1, 0)
    store.unmount()
    assert store.image.read_bytes() == before
    flip(store.image, at)
