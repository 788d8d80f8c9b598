# SPDX-License-Identifier: Apache-2.0
"""Logged steps (redo=on) that a mount computes again in the background, after the daemon was killed."""
import errno
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from calls import fails
from conftest import MIB, run, wait_for
from models import new_model
from passthrough import IOCTL_COMMAND
from slow import loop_device, slow_group
from test_steering import tell, word

LARGE, SMALL = 5 * MIB // 4 + 1000, 777     # elements
STEPS = 6
LANE = 4  # requests of one kind of a model root that the daemon works on at a time (fs/fuse/job.c)
# Not by a write, during which the kernel makes all other writers of the file wait.
ABORT = f'import fcntl, os, sys; fcntl.ioctl(os.open(sys.argv[1], os.O_RDWR), {IOCTL_COMMAND}, b"abort".ljust(256, b"\\0"))'


def gradients(step):
    rng = np.random.default_rng(step)
    return {'large': rng.standard_normal(LARGE, np.float32), 'small': rng.standard_normal(SMALL, np.float32)}


def train(root, first, last):
    for step in range(first, last + 1):
        for name, gradient in gradients(step).items():
            (root / '.hitrain/grad' / name).write_bytes(gradient.tobytes())
        assert tell(root, 'step') == 'ok'


def content(root, *names):
    state = root / '.hitrain/state'
    files = [*(root / n for n in names or ('large', 'small')), *sorted(state.glob('*/*'))]
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


def stat(root, name):
    lines = dict(line.split('=', 1) for line in word(root, 'stats').splitlines())
    return int(lines[name])


def begin(store, *options):
    root = new_model(store.mount(*options) / 'model', 'adamw lr=0.01 max_grad_norm=3 redo=on durable_every=100')
    for name, n in ('large', LARGE), ('small', SMALL):
        (root / name).write_bytes(np.ones(n, np.float32).tobytes())
    (root / 'cursor').write_text('0')
    assert tell(root, 'commit') == 'ok'
    return root


def step_beside(root, step):
    """Of another model, which the first of these makes."""
    if step == 1:
        new_model(root, 'sgd lr=0.1 momentum=0.9 redo=on durable_every=4', 'bf16')
        (root / 'w').write_bytes(bytes(2 * SMALL))
    (root / '.hitrain/grad/w').write_bytes(np.full(SMALL, 0x3f00 + step, np.uint16).tobytes())
    assert tell(root, 'step') == 'ok'


def replayed(store):
    return store.messages().count('were computed again from their gradients')


@pytest.mark.parametrize('options', [(), ('dram=80M', 'passthrough=40M')])
def test_a_mount_computes_logged_steps_in_the_background(make_store, options):
    store = make_store()
    root = begin(store, *options)
    beside = root.parent / 'beside'
    for step in range(1, STEPS + 1):
        train(root, step, step)
        step_beside(beside, step)
    assert stat(root, 'logged_steps') == STEPS - 1 and stat(beside, 'logged_steps') == 1
    wanted, wanted_beside = content(root), content(beside, 'w')
    (root / 'cursor').write_text('unasked')
    store.kill()
    root = store.mount(*options) / 'model'
    assert word(root, 'step') == word(root, 'durable_step') == word(beside, 'durable_step') == str(STEPS)
    assert word(root, 'step_open') == '0'
    assert (root / 'cursor').read_text() == '0'
    assert content(root) == wanted and content(beside, 'w') == wanted_beside
    wait_for(lambda: replayed(store) == 2, 'the end of both replays')
    assert stat(root, 'replay_steps') == stat(root, 'replay_steps_left') == 0
    train(root, STEPS + 1, STEPS + 2)
    run('hitrainctl', 'commit', '--full', root)
    assert stat(root, 'logged_steps') == 0
    train(root, STEPS + 3, STEPS + 3)
    assert stat(root, 'logged_steps') == 1
    assert tell(root, 'commit full') == 'ok' and stat(root, 'logged_steps') == 0
    assert 'no model root' in run('hitrainctl', 'commit', '--full', store.point, check=False).stderr
    wanted = content(root)
    store.unmount()
    root = store.mount(*options) / 'model'
    assert content(root) == wanted
    assert stat(root, 'logged_steps') == 0


def test_kills_while_steps_are_computed_again(make_store):
    store = make_store()
    root = begin(store)
    train(root, 1, STEPS)
    wanted = content(root)
    store.kill()
    for _ in range(3):
        root = store.mount() / 'model'
        reader = threading.Thread(target=lambda: subprocess.run(['cat', root / 'small'], capture_output=True))
        reader.start()
        store.kill()
        store.detach()
        reader.join()
    root = store.mount() / 'model'
    assert content(root) == wanted


def test_changes_wait_for_steps_that_are_computed_again(make_store):
    """A write, a truncation and a removal come after the logged steps, and an abort takes them back to these."""
    store = make_store()
    root = begin(store)
    train(root, 1, STEPS)
    wanted = content(root)
    for change in range(3):
        store.kill()
        root = store.mount() / 'model'
        if change == 0:
            with open(root / 'large', 'r+b') as f:
                f.write(bytes(4))
            assert (root / 'large').read_bytes() == bytes(4) + wanted['large'][4:]
        elif change == 1:
            os.truncate(root / 'small', 400)
            assert (root / 'small').read_bytes() == wanted['small'][:400]
        else:
            os.unlink(root / 'small')
            os.rename(root / 'large', root / 'other')
            assert (root / 'other').read_bytes() == wanted['large']
        assert tell(root, 'abort') == 'ok'
        assert content(root) == wanted


def test_a_read_only_mount_shows_an_older_step_only_if_asked(make_store):
    store = make_store()
    root = begin(store)
    train(root, 1, 1)
    full = content(root)
    train(root, 2, 3)
    wanted = content(root)
    store.kill()
    store.detach()
    store.start('ro')
    assert store.daemon.wait(60) != 0
    assert 'model has 2 logged steps' in store.messages() and 'ro,noreplay' in store.messages()
    store.start('noreplay')
    assert store.daemon.wait(60) != 0
    assert 'noreplay is for a mount with ro' in store.messages()
    root = store.mount('ro', 'noreplay') / 'model'
    assert word(root, 'step') == word(root, 'durable_step') == '1'
    assert content(root) == full
    with fails(errno.EROFS):
        os.unlink(root / 'small')
    store.unmount()
    root = store.mount() / 'model'
    assert word(root, 'step') == '3'
    assert content(root) == wanted


def available(root):
    st = os.statvfs(root)
    return st.f_bavail * st.f_frsize


def test_df_shows_the_space_that_is_set_aside(make_store):
    store = make_store()
    root = begin(store)
    train(root, 1, 2)
    reserved, logged = stat(root, 'redo_reserved_bytes'), stat(root, 'logged_bytes')
    assert reserved > 20 * MIB and logged > 5 * MIB
    assert tell(root, 'commit full') == 'ok'
    assert stat(root, 'logged_bytes') == 0 and stat(root, 'redo_reserved_bytes') > 0
    before, reserved = available(root), stat(root, 'redo_reserved_bytes')
    word(root, 'optimizer', 'adamw lr=0.01 max_grad_norm=3')
    assert stat(root, 'redo_reserved_bytes') == 0
    assert abs(available(root) - before - reserved) < MIB


def test_a_full_store_gives_up_kept_steps(make_store):
    store = make_store()
    root = begin(store)
    word(root, 'optimizer', 'adamw lr=0.01 redo=on durable_every=2 redo_keep=100')
    train(root, 1, 8)
    kept = stat(root, 'logged_bytes')
    assert kept > 30 * MIB
    written = 0
    with open(store.point / 'filler', 'wb', buffering=0) as f, pytest.raises(OSError) as full:
        while True:
            written += f.write(os.urandom(MIB))
    assert full.value.errno == errno.ENOSPC and stat(root, 'logged_bytes') < kept / 3
    assert 'is not kept for readers any more' in store.messages()
    train(root, 9, 9)
    assert word(root, 'durable_step') == '9'


def is_waiting(process):
    """It has come to its last call, which takes an answer of the daemon."""
    with open(f'/proc/{process.pid}/stat') as f:
        state = f.read().rsplit(')', 1)[1].split()[0]
    with open(f'/proc/{process.pid}/wchan') as f:
        return state in 'SD' and 'wait' in f.read()


def test_processes_that_wait_for_logged_steps_can_be_killed(make_store):
    """An abort computes steps again, from a device that hardly gives their gradients."""
    store = make_store()
    image = store.image
    with loop_device(image) as store.image, slow_group(store.image, ('read',)) as (group, limit):
        root = begin(store, 'device_timeout=600')
        with open(f'{group}/cgroup.procs', 'w') as f:
            f.write(str(store.daemon.pid))
        train(root, 1, STEPS)
        wanted = content(root)
        with open(root / 'small', 'r+b') as f:
            f.write(b'x')  # else nothing needs to be computed again
        limit(20000)
        abort = subprocess.Popen([sys.executable, '-c', ABORT, root / '.hitrain/ctl'])
        wait_for(lambda: stat(root, 'replay_steps_left') > 0, 'the replay')
        calls = (f'printf x 1<>{root}/small', f'printf "commit\\n" 1<>{root}/.hitrain/ctl', f'exec truncate -s 4 {root}/large',
                 f'exec cat {root}/.hitrain/state/small/exp_avg', f'printf x > {root}/.hitrain/grad/small')
        calls += calls[-1:] * LANE  # the daemon has not begun with the last one
        processes = []
        for call in calls:
            process = subprocess.Popen(['sh', '-c', call], stdout=subprocess.DEVNULL)
            processes.append(process)
            wait_for(lambda p=process: is_waiting(p), f'{call} waits')
        for process in reversed(processes):
            assert process.poll() is None
            process.kill()
            assert process.wait(60) == -signal.SIGKILL
        assert stat(root, 'replay_steps_left') > 0 and abort.poll() is None
        limit(0)
        assert abort.wait(60) == 0
        assert content(root) == wanted
        assert tell(root, 'commit') == 'ok'
        assert word(root, 'step') == str(STEPS)
        store.unmount()
    store.image = image
