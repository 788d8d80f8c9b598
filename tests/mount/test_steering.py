# SPDX-License-Identifier: Apache-2.0
"""Which step a command is for, and which program may steer a model root."""
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from calls import as_user, fails, sync
from conftest import BIN, wait_for
from models import new_model, word

SGD = 'sgd lr=1'
N = 1000


class Ctl:
    """An open .hitrain/ctl: a claim belongs to it."""

    def __init__(self, directory):
        self.fd = os.open(directory / '.hitrain' / 'ctl', os.O_RDWR)

    def __call__(self, line):
        try:
            os.write(self.fd, line.encode() + b'\n')
        except OSError:
            pass
        return os.read(self.fd, 65536).decode().rstrip('\n')

    def close(self):
        os.close(self.fd)


def tell(directory, line):
    ctl = Ctl(directory)
    try:
        return ctl(line)
    finally:
        ctl.close()


def put_gradient(root, name='w', value=1.0, n=N):
    with open(root / '.hitrain' / 'grad' / name, 'wb', buffering=0) as f:
        f.write(np.full(n, value, 'f4').tobytes())


def step_open(root):
    return int(word(root, 'step_open'))


@pytest.fixture
def root(mnt):
    r = new_model(mnt / 'm', SGD, w=bytes(4 * N))
    sync(r)
    return r


# ------------------------------------------------------------------ identity

def test_every_step_has_another_number(store, root):
    seen = set()
    for end in ('commit', 'step', 'abort', 'umount', 'kill', 'commit'):
        assert step_open(root) == 0
        put_gradient(root)
        number = step_open(root)
        assert 0 < number < 1 << 63 and number not in seen
        seen.add(number)
        assert step_open(root) == number
        stats = (root / '.hitrain' / 'stats').read_text()
        assert re.search(r'^hitrain_step_open\{root="/m"\} 1$', stats, re.M)
        if end == 'umount':
            store.remount()
        elif end == 'kill':
            store.crash()
        else:
            assert tell(root, end) == 'ok'
    assert step_open(root) == 0
    assert re.search(r'^hitrain_step_open\{root="/m"\} 0$', (root / '.hitrain' / 'stats').read_text(), re.M)


@pytest.mark.parametrize('verb', ['commit', 'step', 'abort', 'snapshot'])
def test_a_command_for_another_step_changes_nothing(root, verb):
    assert tell(root, f'{verb} if=5') == 'error: ESTALE: if=5: the open step is 0: none is open'
    assert tell(root, f'{verb} if=0') == 'ok'
    put_gradient(root)
    number, before = step_open(root), word(root, 'step')
    for wrong in (0, number - 1, number + 1):
        assert tell(root, f'{verb} if={wrong}') == f'error: ESTALE: if={wrong}: the open step is {number}'
        assert f'if={wrong}: the open step is {number}' in word(root, 'error')
    assert (step_open(root), word(root, 'step')) == (number, before)
    tell(root, 'wait')
    assert np.all(np.fromfile(root / 'w', 'f4') == -1)
    assert tell(root, f'{verb} if={number}') == 'ok'
    assert step_open(root) == 0
    assert np.all(np.fromfile(root / 'w', 'f4') == (0 if verb == 'abort' else -1))


def test_an_abort_between_the_gradients_of_a_step_is_noticed(root):
    """A trainer reads the number after the first gradient, and ends that step and no other."""
    (root / 'v').write_bytes(bytes(4 * N))
    sync(root)
    put_gradient(root, 'w')
    number = step_open(root)
    assert tell(root, 'abort') == 'ok'  # an operator
    put_gradient(root, 'v')
    answer = tell(root, f'commit if={number}')
    assert answer.startswith('error: ESTALE: ') and str(number) in answer and str(step_open(root)) in answer
    assert word(root, 'step') == '0'


# -------------------------------------------------------------------- claims

def test_a_claimed_root_is_steered_by_one_descriptor(root):
    holder = Ctl(root)
    assert holder('claim trainer') == 'ok'
    told = f'claimed by trainer (pid {os.getpid()})'
    assert f'claimed_by=trainer pid={os.getpid()}' in word(root, 'stats').splitlines()
    put_gradient(root)
    number = step_open(root)
    for line in ('step', 'commit', f'commit if={number}', 'abort', 'reset w', 'claim other', 'claim other takeover=no'):
        assert tell(root, line) == 'error: EBUSY: ' + told, line
    with fails(errno.EBUSY):
        sync(root)
    assert told in word(root, 'error')
    with fails(errno.EBUSY):
        os.removexattr(root, 'user.hitrain.optimizer')
    assert step_open(root) == number and word(root, 'step') == '0'
    for line in ('wait', 'wait w', 'prefetch w', 'apply w'):
        assert tell(root, line) == 'ok', line
    (root / 'notes').write_bytes(b'others may write')
    assert holder(f'commit if={number}') == 'ok'
    assert word(root, 'step') == '1'
    assert holder('unclaim') == 'ok' and 'claimed_by' not in word(root, 'stats')
    assert holder('unclaim').startswith('error: EINVAL')
    assert tell(root, 'commit') == 'ok'
    holder.close()


# Words that decide the numbers of a step: of the root, of a file, and of a directory whose files amend them.
WORDS = [('', 'optimizer', 'adamw lr=0.5'), ('', 'step', '7'), ('w', 'optimizer', 'adamw lr=0.5'), ('sub', 'optimizer', 'adamw lr=0.5'),
         ('w', 'grad_dtype', 'bf16'), ('w', 'dtype', 'bf16')]


def test_a_claim_protects_the_words_of_the_model(root):
    """Other processes cannot change a bit of the claimant's steps by attributes; it can itself, from any thread."""
    (root / 'sub').mkdir()
    holder = Ctl(root)
    assert holder('claim trainer') == 'ok'
    told = f'claimed by trainer (pid {os.getpid()}), which alone changes it until the claim ends'

    def set_or_refuse(place, name, value):
        return as_user(lambda: word(root / place, name, value), uid=0, gid=0)
    for place, name, value in WORDS:
        with fails(errno.EBUSY):
            set_or_refuse(place, name, value)
        assert f'{name}: {told}' in word(root / place, 'error') and f'{name}: {told}' in word(root, 'error')
    for place, name, value in WORDS:
        thread = threading.Thread(target=word, args=(root / place, name, value))
        thread.start()
        thread.join()
        assert word(root / place, name) == value
    with fails(errno.EBUSY):
        as_user(lambda: os.removexattr(root / 'w', 'user.hitrain.optimizer'), uid=0, gid=0)
    (root / 'new').touch()
    as_user(lambda: word(root / 'new', 'dtype', 'u8'), uid=0, gid=0)
    assert holder('unclaim') == 'ok'
    for place, name, value in WORDS:
        set_or_refuse(place, name, value)
    holder.close()


def test_a_claim_leaves_state_open_to_other_ranks(root):
    """They write their parts, as of parameters, while one process steers. Only an open step prevents that."""
    holder = Ctl(root)
    assert holder('claim trainer') == 'ok'
    word(root, 'optimizer', SGD + ' momentum=0.5')
    state = root / '.hitrain' / 'state' / 'w' / 'momentum_buffer'

    def write():
        with open(state, 'r+b', buffering=0) as f:
            f.write(np.full(N, 3, 'f4').tobytes())
    put_gradient(root)
    with fails(errno.EBUSY):
        as_user(write, uid=0, gid=0)
    assert holder('commit') == 'ok'
    as_user(write, uid=0, gid=0)
    assert np.fromfile(state, 'f4').tolist() == [3] * N
    assert as_user(lambda: tell(root, 'reset w'), uid=0, gid=0).startswith('error: EBUSY: claimed by trainer')
    holder.close()


def test_a_claim_of_a_directory_below_is_one_of_the_root(root):
    (root / 'sub').mkdir()
    holder = Ctl(root / 'sub')
    assert holder('claim trainer') == 'ok'
    assert tell(root, 'commit').startswith('error: EBUSY: claimed by trainer')
    assert holder('commit') == 'ok'
    holder.close()


def test_a_claim_ends_with_its_descriptor(root):
    holder = Ctl(root)
    assert holder('claim a') == 'ok'
    other = os.dup(holder.fd)
    holder.close()
    assert tell(root, 'commit').startswith('error: EBUSY')  # it is open still
    os.close(other)
    wait_for(lambda: tell(root, 'commit') == 'ok', 'the end of the claim')


@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGTERM])
def test_a_claim_ends_with_its_process(root, how):
    code = '''
import os, sys, threading
fd = os.open(sys.argv[1], os.O_RDWR)
def claim():  # the process counts, not the thread
    os.write(fd, b"claim rank-0\\n")
t = threading.Thread(target=claim)
t.start()
t.join()
print("claimed", flush=True)
sys.stdin.read()
'''
    child = subprocess.Popen([sys.executable, '-c', code, str(root / '.hitrain' / 'ctl')], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == 'claimed\n'
        assert tell(root, 'commit') == f'error: EBUSY: claimed by rank-0 (pid {child.pid})'
    finally:
        child.send_signal(how)
        child.wait()
    wait_for(lambda: tell(root, 'commit') == 'ok', 'the end of the claim')


def test_a_claim_is_taken_over_by_name(root):
    old, new = Ctl(root), Ctl(root)
    assert old('claim a') == 'ok' and old('claim a') == 'ok'
    assert new('claim b takeover=x').startswith('error: EBUSY: claimed by a (pid ')
    assert new('claim b takeover=a') == 'ok'
    for line in ('commit', 'step', 'abort', 'reset w'):
        answer = old(line)
        assert answer.startswith('error: ESTALE') and 'now claimed by b' in answer, line
    assert old('unclaim').startswith('error: ESTALE') and 'claimed_by=b' in word(root, 'stats')
    assert old('commit').startswith('error: EBUSY')  # it claims nothing any more
    assert old('claim a').startswith('error: EBUSY')
    assert new('commit') == 'ok'
    old.close()
    assert tell(root, 'commit').startswith('error: EBUSY')
    new.close()


@pytest.mark.parametrize('line', ['claim', 'claim a/b', 'claim ' + 65 * 'x', 'claim a b', 'claim a takeover=',
                                  'commit if=', 'commit if=x', 'step if=1 2', 'abort now'])
def test_wrong_conditions_and_names_say_what_is_right(root, line):
    answer = tell(root, line)
    assert answer.startswith(f"error: EINVAL: '{line.split()[0]}' takes ")
    assert ('if=N' if 'claim' not in line else 'takeover=OLDNAME') in answer


def test_the_mounts_root_has_nothing_to_claim(root):
    for line in ('claim a', 'commit if=0', 'step if=0'):
        assert 'no model root' in tell(root.parent, line)


def test_a_claim_is_not_in_the_way_of_an_unmount(store, root):
    holder = Ctl(root)
    assert holder('claim a') == 'ok'
    put_gradient(root)
    assert holder('commit') == 'ok'
    holder.close()
    store.remount()
    assert word(root, 'step') == '1' and 'claimed_by' not in word(root, 'stats')
    assert tell(root, 'commit') == 'ok'


def test_stats_of_a_claimed_root_are_json(root):
    holder = Ctl(root)
    assert holder('claim a') == 'ok'
    done = subprocess.run([BIN / 'hitrainctl', 'stats', '--json', root], stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout)['stats']['claimed_by'] == f'a pid={os.getpid()}'
    holder.close()


# ---------------------------------------------------------------- hitrainctl

def hitrainctl(*args):
    done = subprocess.run([BIN / 'hitrainctl', *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stdout, done.stderr


def test_hitrainctl_steers(root):
    (root / 'sub').mkdir()
    word(root / 'sub', 'dtype', 'f32')
    (root / 'sub' / 'v').write_bytes(bytes(4 * N))
    put_gradient(root)
    number = step_open(root)
    for verb in ('step', 'commit', 'abort'):
        status, _, told = hitrainctl(verb, f'--if={number + 1}', root)
        assert status == 1 and f'ESTALE: if={number + 1}: the open step is {number}' in told
    assert hitrainctl('wait', root, root / 'w', root / 'sub' / 'v') == (0, '', '')
    status, said, _ = hitrainctl('step', f'--if={number}', root)
    assert status == 0 and 'step 1, durable_step 1' in said
    put_gradient(root)
    status, _, told = hitrainctl('step', '--async', f'--if={number}', root)
    assert status == 1 and 'ESTALE' in told
    assert hitrainctl('step', '--async', root)[0] == 0 and hitrainctl('wait', root)[0] == 0
    assert word(root, 'step') == '2'
    put_gradient(root)
    status, said, _ = hitrainctl('abort', '--json', root)
    assert status == 0 and json.loads(said) == {'path': str(root), 'step': 2, 'durable_step': 2}
    put_gradient(root / 'sub', 'v', n=N // 2)
    status, _, told = hitrainctl('step', root)
    assert status == 1 and 'EBUSY: m/sub/v: only a part of it' in told
    assert hitrainctl('drop', root / 'sub' / 'v') == (0, '', '')
    put_gradient(root)
    status, said, _ = hitrainctl('commit', '--json', f'--if={step_open(root)}', root)
    assert status == 0 and json.loads(said)['durable_step'] == 3
    assert word(root, 'parameters') == '2'
    assert hitrainctl('reset', root / 'w', root / 'sub' / 'v') == (0, '', '') and word(root, 'parameters') == '0'
    put_gradient(root)
    assert hitrainctl('commit', root)[0] == 0 and hitrainctl('reset', root) == (0, '', '')
    assert word(root, 'parameters') == '0'


def test_hitrainctl_says_what_it_cannot_steer(root):
    status, _, told = hitrainctl('step', root.parent)
    assert status == 1 and 'no model root' in told
    (root.parent / 'plain').mkdir()
    (root.parent / 'plain' / 'f').touch()
    for verb, path in (('abort', 'plain'), ('wait', 'plain/f'), ('drop', 'plain/f'), ('reset', 'plain/f')):
        status, _, told = hitrainctl(verb, root.parent / path)
        assert status == 1 and 'is no model root' in told
    (root / '*').write_bytes(bytes(4 * N))
    status, _, told = hitrainctl('reset', root / '*')
    assert status == 1 and 'cannot stand in a command' in told
    status, _, told = hitrainctl('drop', root)
    assert status == 1 and "'drop' takes the path of a file" in told
    status, _, told = hitrainctl('commit', '--if=0', root.parent)
    assert status == 1 and 'no model root' in told
    holder = Ctl(root)
    assert holder('claim a') == 'ok'
    status, _, told = hitrainctl('abort', root)
    assert status == 1 and 'claimed by a (pid' in told
    holder.close()


def test_the_model_roots_of_a_mount(root):
    mnt = root.parent
    assert json.loads(hitrainctl('roots', '--json', mnt)[1])['roots'] == [
        {'path': '/m', 'step': 0, 'durable_step': 0, 'open': False, 'parameters': 0}]
    other = new_model(mnt / 'a "b"\\n\nc', 'adamw max_grad_norm=100', w=bytes(4 * N))
    put_gradient(other, value=2.0)
    assert tell(other, 'commit') == 'ok'
    put_gradient(other)
    holder = Ctl(other)
    assert holder('claim trainer') == 'ok'
    status, said, _ = hitrainctl('roots', '--json', root / 'w')
    found = json.loads(said)
    assert status == 0 and found['path'] == str(mnt)
    one = [r for r in found['roots'] if r['path'] != '/m']
    assert one == [{'path': '/' + other.name, 'step': 1, 'durable_step': 1, 'open': True, 'parameters': 1,
                    'grad_norm': pytest.approx(2 * N ** 0.5), 'claimed_by': 'trainer', 'pid': os.getpid()}]
    assert 'hitrain_grad_norm{root="/a' in (mnt / '.hitrain' / 'stats').read_text()
    status, said, _ = hitrainctl('roots', mnt)
    assert status == 0 and '/m\n' in said and f'trainer ({os.getpid()})' in said and len(said.splitlines()) == 3
    holder.close()
