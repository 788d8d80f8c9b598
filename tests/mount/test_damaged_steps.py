# SPDX-License-Identifier: Apache-2.0
"""A logged gradient is damaged: nobody reads an earlier step in silence, until fsck, or the mount, is told to go back."""
import errno
import json
import os
import subprocess
import sys

import pytest

from calls import fails, sync
from conftest import MIB, run, wait_for
from slow import loop_device, slow_group
from test_gather import gather
from test_redo import ABORT, is_waiting, stat
from test_roots import command, put_gradient, word
from test_scrub import flip
from test_shards import SIZES as NAMES, files, make_model, shard, values

LOGGED = 'adamw lr=0.01 redo=on durable_every=100'
STEPS, BAD = 5, 4
CAUSE = f'step {BAD} cannot be computed again'


def gradient(name, step):
    return values(name, 10 * step)


def train(root, step):
    for name in NAMES:
        put_gradient(root, name, gradient(name, step))
    sync(root)


def events(point, code):
    lines = run('hitrainctl', 'events', '--json', point).stdout.splitlines()
    return [e for e in map(json.loads, lines) if e['code'] == code]


def damage(image, data):
    """Wherever the image holds it: the daemon may have written a part of a chunk before all of it."""
    at, whole = -1, image.read_bytes()
    while (at := whole.find(data, at + 1)) >= 0:
        flip(image, at + 7)


@pytest.fixture
def damaged(make_store):
    """A store with a model whose fourth step cannot be computed again, and its content after each step."""
    store = make_store()
    root = make_model(store.mount() / 'model', words=LOGGED)
    content = {}
    for step in range(1, STEPS + 1):
        (root / 'notes.txt').write_text(f'step {step}')
        train(root, step)
        content[step] = files(root)
        if step == 1:
            assert command(root, 'snapshot base') == ['ok']
    store.kill()
    store.detach()
    damage(store.image, gradient('w', BAD)[MIB // 8:MIB // 8 + 64].tobytes())
    return store, content


def no_input(call, *args):
    with fails(errno.EIO):
        call(*args)


def read_gathered(root, flags):
    with gather(root, flags=flags) as fd:
        os.pread(fd, 100, 0)


def refusal(root, line):
    answer, = command(root, line)
    assert answer.startswith('error') and CAUSE in answer and 'hitrain-fsck -y' in answer, answer


@pytest.mark.parametrize('options', [(), ('dram=80M', 'passthrough=40M')])
def test_nobody_reads_an_earlier_step_in_silence(damaged, options):
    store, content = damaged
    root = store.mount(*options) / 'model'
    no_input((root / 'w').read_bytes)  # it may have waited for the replay
    wait_for(lambda: events(store.point, 'replay-failed'), 'event')
    told, = events(store.point, 'replay-failed')
    assert CAUSE in told['text'] and 'hitrain-fsck -y' in told['text']
    state = root / '.hitrain/state/w'
    for flags in os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_TRUNC:
        no_input(os.open, root / 'deep/v', flags)
    for file in state / 'exp_avg', state / 'step', shard(root, 0, 2) / 'param/w', shard(root, 1, 2) / 'state/w/exp_avg':
        no_input(file.read_bytes)
    no_input(read_gathered, root, os.O_RDONLY)
    no_input(read_gathered, root, os.O_RDWR)
    no_input(os.truncate, root / 'w', 0)
    no_input(put_gradient, root, 'w', gradient('w', 9))
    no_input((shard(root, 0, 2) / 'param/w').write_bytes, b'0123')
    no_input(sync, root)
    for line in 'claim trainer', 'abort', 'commit', 'step', 'wait', 'wait w', 'snapshot now', 'reset w':
        refusal(root, line)
        assert CAUSE in word(root, 'error')
    assert run('hitrainctl', 'clone', root, 'base', store.point / 'twin', check=False).returncode == 0
    assert files(store.point / 'twin') == content[1]
    assert (root / 'notes.txt').read_text() == f'step {STEPS}'
    store.unmount()
    assert store.fsck().returncode == 4
    run('hitrain-fsck', '-y', store.image, check=False)
    root = store.mount(*options) / 'model'
    assert files(root) == content[BAD - 1] and word(root, 'step') == str(BAD - 1) and not word(root, 'error')


@pytest.mark.parametrize('options', [(), ('dram=80M', 'passthrough=40M')])
def test_a_rollback_gives_the_damaged_step_up(damaged, options):
    store, content = damaged
    root = store.mount(*options) / 'model'
    wait_for(lambda: events(store.point, 'replay-failed'), 'event')
    (root / 'notes.txt').write_text('later')
    assert command(root, 'rollback none') == ["error: ENOENT: there is no kept step 'none'"]
    refusal(root, 'commit')
    run('hitrainctl', 'rollback', root, 'base')
    for _ in range(2):
        assert files(root) == content[1] and word(root, 'step') == '1' and not word(root, 'error')
        assert (root / 'notes.txt').read_text() == 'step 1'
        store.kill()
        store.detach()
        root = store.mount(*options) / 'model'
    for step in range(2, STEPS + 1):
        train(root, step)
    assert files(root) == content[STEPS]


def test_who_waits_for_a_damaged_step_gets_no_earlier_one(make_store):
    """In an abort: one reads already, and another has the file open."""
    store = make_store()
    image = store.image
    with loop_device(image) as store.image, slow_group(store.image, ('read',)) as (group, limit):
        root = make_model(store.mount('device_timeout=600') / 'model', words=LOGGED)
        with open(f'{group}/cgroup.procs', 'w') as f:
            f.write(str(store.daemon.pid))
        for step in range(1, STEPS + 1):
            train(root, step)
        damage(image, gradient('w', BAD)[MIB // 8:MIB // 8 + 64].tobytes())
        with open(root / 'w', 'r+b', buffering=0) as f:
            assert len(f.read(4096)) == 4096
            f.write(b'x')  # else nothing needs to be computed again
            limit(20000)
            abort = subprocess.Popen([sys.executable, '-c', ABORT, root / '.hitrain/ctl'], stderr=subprocess.PIPE, text=True)
            wait_for(lambda: stat(root, 'replay_steps_left') > 0, 'the replay')
            reader = subprocess.Popen(['cat', root / 'w'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            wait_for(lambda: is_waiting(reader), 'reader waits')
            limit(0)
            assert 'Errno 5' in abort.communicate(timeout=60)[1]
            assert reader.communicate(timeout=60) == (b'', f'cat: {root}/w: Input/output error\n'.encode())
            for at in 0, 2 * MIB:
                no_input(os.pread, f.fileno(), 4096, at)
        refusal(root, 'commit')
        store.unmount()
        store.ends_clean = False
    store.image = image


def test_a_read_only_mount_is_told_to_show_the_full_step(damaged):
    store, content = damaged
    store.mount('ro', 'noreplay')
    assert files(store.point / 'model') == content[1]
    store.unmount()
    store.ends_clean = False
