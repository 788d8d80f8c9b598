# SPDX-License-Identifier: Apache-2.0
"""Permissions: each row of PERMISSIONS in hitrain(7), by a user with the permission and by users without it.

The users share a group. It is the first group of none, so that supplementary groups decide.
"""
import errno
import mmap
import os
import re

import numpy as np
import pytest

from calls import as_user, fails, settle, sync
from conftest import MIB, ROOT, wait_for
from passthrough import SHARED, READ, passthrough_store, stat
from passthrough import steer as by_ioctl
from test_async_step import command as order
from test_gather import gather
from test_roots import command, put_gradient, refused, word

OWNER, MEMBER, STRANGER, GROUP = 2001, 2002, 2003, 3000
ELEMENTS = 1024
SGD = 'sgd lr=1'


def run_as(user, fn):
    return as_user(fn, user, user, () if user == STRANGER else (GROUP,))


def may(user, fn, *args):
    return run_as(user, lambda: fn(*args))


def may_not(error, user, fn, *args):
    with fails(error):
        run_as(user, lambda: fn(*args))


def owned(path, user, mode):
    os.chown(path, user, GROUP)
    os.chmod(path, mode)
    return path


def directory(path, user, mode=0o2775):
    path.mkdir()
    return owned(path, user, mode)


def tensor(path, user, mode=0o664):
    path.write_bytes(bytes(4 * ELEMENTS))
    return owned(path, user, mode)


def remove(path, name):
    os.removexattr(path, 'user.hitrain.' + name)


def answer(path, line):
    """The answer to one command; a refused open is an OSError."""
    return command(path, line)[0]


@pytest.fixture
def shared(mnt):
    """A project directory in which the members of the group write."""
    os.chmod(mnt, 0o755)
    return directory(mnt / 'shared', OWNER)


@pytest.fixture
def model(shared):
    """The owner's model: w is everybody's of the group, own and private/own are the owner's."""
    m = directory(shared / 'model', OWNER)
    word(m, 'dtype', 'f32')
    for name in 'w', 'own':
        tensor(m / name, OWNER)
    os.chmod(m / 'own', 0o600)
    directory(m / 'private', OWNER, 0o700)
    tensor(m / 'private' / 'own', OWNER, 0o666)
    may(OWNER, word, m, 'optimizer', SGD)
    return m


ROWS = {}


def row(*names):
    """The test of these rows of the manual."""
    def mark(test):
        ROWS.update(dict.fromkeys(names, test))
        return test
    return mark


def test_every_row_of_the_manual_has_a_test():
    text = (ROOT / 'mount-helpers/man/hitrain.7').read_text()
    section = re.search(r'^\.SH PERMISSIONS\n(.*?)^\.SH', text, re.M | re.S).group(1)
    heads = re.findall(r'^\.TP\n\.IR? (.*)$', section, re.M)
    names = [re.sub(r'^"|"$', '', n) for head in heads for n in re.split(r'"? ", " "?', head)]
    assert len(names) > 15 and sorted(names) == sorted(ROWS)


# -------------------------------------------------------------- model roots

@row('make a model root')
def test_a_model_is_made_by_the_owner_of_all_of_it(shared):
    d = directory(shared / 'd', OWNER)
    may_not(errno.EPERM, MEMBER, word, d, 'optimizer', SGD)
    assert 'only the owner' in word(d, 'error')
    theirs = directory(d / 'theirs', MEMBER, 0o700)
    tensor(theirs / 'private', MEMBER, 0o600)
    may_not(errno.EPERM, OWNER, word, d, 'optimizer', SGD)
    assert f'd/theirs belongs to user {MEMBER}' in word(d, 'error')
    with pytest.raises(OSError):
        remove(d, 'optimizer')
    word(d, 'optimizer', SGD)  # root may
    other = directory(shared / 'other', OWNER)
    tensor(other / 'f', OWNER)
    may(OWNER, word, other, 'optimizer', SGD)


@row('end a model root')
def test_a_model_is_ended_by_its_owner(model):
    put_gradient(model, 'w', np.ones(ELEMENTS, 'f4'))
    sync(model)
    may_not(errno.EPERM, MEMBER, remove, model, 'optimizer')
    assert 'only the owner' in word(model, 'error') and word(model, 'step') == '1'
    may_not(errno.EACCES, STRANGER, remove, model, 'optimizer')
    may(OWNER, remove, model, 'optimizer')
    refused(errno.ENODATA, word, model, 'step')


@row('steer')
def test_steering_needs_write_permission_on_the_root(model):
    steps = ['step', 'commit', 'abort', 'wait', 'claim me']
    for line in steps:
        assert may(MEMBER, answer, model, line) == 'ok'
        may_not(errno.EACCES, STRANGER, answer, model, line)
    settle(model)  # the claim ends when the daemon has heard of the close
    os.chmod(model, 0o3775)
    for line in steps:
        assert may(OWNER, answer, model, line) == 'ok'
        may_not(errno.EACCES, MEMBER, answer, model, line)
    os.chmod(model, 0o2755)
    may_not(errno.EACCES, MEMBER, answer, model, 'abort')
    may_not(errno.EACCES, MEMBER, answer, model / 'private', 'abort')


def test_an_ioctl_is_a_command(model):
    def steer():
        fd = os.open(model / '.hitrain/ctl', os.O_RDWR)
        try:
            by_ioctl(fd, 'step')
        finally:
            os.close(fd)

    may(MEMBER, steer)
    may_not(errno.EACCES, STRANGER, steer)
    assert word(model, 'step') == '0'  # none was open


@row('fsync of a model root')
def test_fsync_of_a_root_is_steering(model):
    put_gradient(model, 'w', np.ones(ELEMENTS, 'f4'))
    may_not(errno.EACCES, STRANGER, sync, model)
    assert word(model, 'durable_step') == '0'
    os.chmod(model, 0o3775)
    may_not(errno.EACCES, MEMBER, sync, model)
    os.chmod(model, 0o2775)
    may(MEMBER, sync, model)
    assert word(model, 'durable_step') == '1'


@row('change words')
def test_words_are_changed_by_those_who_may_write(model):
    may(MEMBER, word, model, 'optimizer', 'sgd lr=2')
    may(MEMBER, word, model / 'w', 'optimizer', 'sgd lr=3')
    for path in model, model / 'w':
        may_not(errno.EACCES, STRANGER, word, path, 'optimizer', 'sgd lr=4')
    may_not(errno.EACCES, MEMBER, word, model / 'own', 'optimizer', 'sgd lr=4')
    sub = directory(model / 'sub', OWNER, 0o755)
    may_not(errno.EACCES, MEMBER, word, sub, 'optimizer', 'sgd lr=4')
    os.chmod(model, 0o3775)
    may_not(errno.EPERM, MEMBER, word, model, 'optimizer', 'sgd lr=4')
    may(OWNER, word, model, 'optimizer', 'sgd lr=5')


@row('shards')
def test_shards_are_divided_by_those_who_steer(model):
    may(MEMBER, word, model, 'shards', '2')
    may_not(errno.EACCES, STRANGER, word, model, 'shards', '3')
    os.chmod(model, 0o3775)
    may_not(errno.EPERM, MEMBER, remove, model, 'shards')
    may_not(errno.EPERM, MEMBER, word, model, 'shards', '3')
    may(OWNER, remove, model, 'shards')
    for kind, path in ('param', 'w'), ('grad', 'w'):
        part = model / '.hitrain/shard/0of1' / kind / path
        may(MEMBER, part.write_bytes, bytes(4 * ELEMENTS))
        may_not(errno.EACCES, STRANGER, part.write_bytes, bytes(4 * ELEMENTS))
    may_not(errno.EACCES, MEMBER, (model / '.hitrain/shard/0of1/param/own').read_bytes)
    may_not(errno.EACCES, MEMBER, (model / '.hitrain/shard/0of1/param/private/own').read_bytes)


# ----------------------------------------------------------------- commands

@row('apply P', 'reset P', 'drop P', 'decide NUMBERS P')
def test_commands_on_a_parameter_need_write_permission_on_it(model):
    for d, name in (model, 'w'), (model / 'private', 'own'):
        put(d, name)
    sync(model)
    assert may(MEMBER, answer, model, f'decide {"0" * 144} w').startswith('error: EINVAL')
    assert may(MEMBER, answer, model, f'decide {"0" * 144} own').startswith('error: EACCES')
    may_not(errno.EACCES, STRANGER, answer, model, f'decide {"0" * 144} w')
    for line in 'apply', 'reset', 'drop':
        assert may(MEMBER, answer, model, f'{line} w') == 'ok'
        assert may(MEMBER, answer, model, f'{line} own').startswith('error: EACCES')
        assert may(MEMBER, answer, model, f'{line} private/own').startswith('error: EACCES')
        assert may(OWNER, answer, model, f'{line} private/own') == 'ok'
        may_not(errno.EACCES, STRANGER, answer, model, f'{line} w')


@row('wait P')
def test_waiting_for_a_parameter_needs_the_way_to_it(model):
    assert may(MEMBER, answer, model, 'wait own') == 'ok'
    assert may(MEMBER, answer, model, 'wait private/own').startswith('error: EACCES')
    may_not(errno.EACCES, STRANGER, answer, model, 'wait w')


@row('prefetch P', 'evict P')
def test_residence_is_for_those_who_may_read(mnt, model, shared):
    os.chmod(mnt, 0o777)
    for line in 'prefetch', 'evict':
        assert may(MEMBER, answer, model, f'{line} w') == 'ok'
        assert may(MEMBER, answer, model, f'{line} own').startswith('error: EACCES')
        assert may(STRANGER, answer, mnt, f'{line} shared/model/w') == 'ok'
        assert may(STRANGER, answer, mnt, f'{line} shared/model/own').startswith('error: EACCES')
        for name in 'own', 'nothing', 'own/more':  # the answers do not differ
            assert may(MEMBER, answer, model, f'{line} private/{name}') == \
                f"error: EACCES: 'private/{name}': Permission denied"
        assert may(MEMBER, answer, model, f'{line} nothing').startswith('error: ENOENT')
        assert may(MEMBER, answer, model, f'{line} w/more').startswith('error: ENOTDIR')
    os.chmod(mnt, 0o755)
    may_not(errno.EACCES, STRANGER, answer, mnt, 'prefetch shared/model/w')


def test_a_command_has_the_rights_of_who_opened_ctl(model):
    """A privileged program that writes to a descriptor it was given lends nothing."""
    def open_ctl():
        return os.open(model / '.hitrain/ctl', os.O_RDWR)

    os.setegid(GROUP)
    os.seteuid(MEMBER)
    try:
        fd = open_ctl()
    finally:
        os.seteuid(0)
        os.setegid(0)
    try:
        refused(errno.EACCES, os.write, fd, b'prefetch private/own\n')
        assert os.read(fd, 4096).startswith(b'error: EACCES')
    finally:
        os.close(fd)


def test_an_open_ctl_does_not_steer_what_became_a_root_later(shared):
    def lines(fd, *texts):
        for line in texts:
            refused(errno.EACCES, os.write, fd, line)
            assert os.read(fd, 4096).startswith(b'error: EACCES: this directory has come under another model root')

    up = directory(shared / 'up', OWNER, 0o755)
    sub = directory(up / 'sub', OWNER)
    word(up, 'dtype', 'f32')
    for path in up / 'w', sub / 'v':
        tensor(path, OWNER)
    may(OWNER, word, sub, 'optimizer', SGD)
    os.setegid(GROUP)
    os.seteuid(MEMBER)
    try:
        fd = os.open(sub / '.hitrain/ctl', os.O_RDWR)
    finally:
        os.seteuid(0)
        os.setegid(0)
    try:
        os.write(fd, b'claim mine\nunclaim\n')
        assert os.read(fd, 4096) == b'ok\nok\n'
        may(OWNER, remove, sub, 'optimizer')
        may(OWNER, word, up, 'optimizer', SGD)
        sync(up)
        put_gradient(up, 'w', np.ones(ELEMENTS, 'f4'))
        lines(fd, b'abort\n', b'commit\n', b'claim it\n', b'wait\n', b'nonsense\n', b'prefetch v\n')
        assert word(up, 'step_open') != '0' and word(up, 'error') == '' and 'claimed_by' not in word(up, 'stats')
        os.chmod(up, 0o775)
        os.write(fd, b'abort\n')
        assert os.read(fd, 4096) == b'ok\n' and word(up, 'step_open') == '0'
    finally:
        os.close(fd)


def test_an_open_ctl_of_the_mount_does_not_steer_it_when_it_becomes_sticky_model(mnt):
    os.chmod(mnt, 0o1777)
    word(mnt, 'dtype', 'f32')
    tensor(mnt / 'w', 0)
    os.seteuid(STRANGER)
    try:
        fd = os.open(mnt / '.hitrain/ctl', os.O_RDWR)
    finally:
        os.seteuid(0)
    try:
        assert os.write(fd, b'commit\n') and os.read(fd, 4096) == b'ok\n'
        word(mnt, 'optimizer', SGD)
        refused(errno.EACCES, os.write, fd, b'commit\n')
        assert word(mnt, 'error') == ''
    finally:
        os.close(fd)


@row('rollback STEP')
def test_a_rollback_is_made_by_the_owner_of_all_of_it(model):
    order(model, 'snapshot first')
    os.chmod(model / 'own', 0o666)
    order(model, 'commit')
    may_not(errno.EACCES, STRANGER, order, model, 'rollback first')
    may_not(errno.EPERM, MEMBER, order, model, 'rollback first')
    tensor(model / 'theirs', MEMBER)
    may_not(errno.EPERM, OWNER, order, model, 'rollback first')
    assert (model / 'theirs').exists() and (model / 'own').stat().st_mode & 0o777 == 0o666
    order(model, 'snapshot second')
    (model / 'theirs').unlink()
    may_not(errno.EPERM, OWNER, order, model, 'rollback second')
    may(OWNER, order, model, 'rollback first')
    assert (model / 'own').stat().st_mode & 0o777 == 0o600


@row('archived STEP JOB DIGEST')
def test_a_kept_step_is_archived_by_the_owner_of_the_model(model):
    order(model, 'snapshot first')
    line = f'archived first job {"0" * 32}'
    may_not(errno.EACCES, STRANGER, order, model, line)
    may_not(errno.EPERM, MEMBER, order, model, line)
    may(OWNER, order, model, line)


@pytest.mark.parametrize('meant', [False, True])
@row('clone STEP DIR', 'clone_in INODE STEP DIR')
def test_a_clone_is_made_by_the_owner_of_all_of_it(model, shared, meant):
    def clone(step, name):
        order(model, f'{verb} {step} {shared.name}/{name}')
    verb = f'clone_in {shared.stat().st_ino}' if meant else 'clone'
    tensor(model / 'theirs', MEMBER)
    order(model, 'snapshot mixed')
    may_not(errno.EPERM, OWNER, clone, 'mixed', 'c')
    (model / 'theirs').unlink()
    order(model, 'snapshot own')
    may_not(errno.EACCES, STRANGER, clone, 'own', 'c')
    may_not(errno.EPERM, MEMBER, clone, 'own', 'c')
    may(OWNER, clone, 'own', 'c')
    os.chmod(shared, 0o555)
    may_not(errno.EACCES, OWNER, clone, 'own', 'd')
    assert (shared / 'c').stat().st_uid == OWNER and not (shared / 'd').exists()


@row('commit of the store')
def test_the_store_is_committed_by_those_who_may_write_its_root(mnt, shared):
    may_not(errno.EACCES, STRANGER, answer, mnt, 'commit')
    os.chmod(mnt, 0o777)
    assert may(STRANGER, answer, mnt, 'commit') == 'ok'


@row('scrub')
def test_a_scrub_is_the_owners(mnt, shared):
    os.chmod(mnt, 0o777)
    for line in 'scrub start', 'scrub stop':
        assert may(MEMBER, answer, mnt, line).startswith('error: EPERM: a scrub is for root')
    os.chown(mnt, OWNER, OWNER)
    assert may(OWNER, answer, mnt, 'scrub start') == 'ok'


@row('trim')
def test_a_trim_is_the_owners(mnt, shared):
    os.chmod(mnt, 0o777)
    assert may(MEMBER, answer, mnt, 'trim').startswith('error: EPERM: a trim is for root')
    os.chown(mnt, OWNER, OWNER)
    assert may(OWNER, answer, mnt, 'trim') == 'ok'


@row('background')
def test_pausing_the_background_is_the_owners(mnt, shared):
    os.chmod(mnt, 0o777)
    for line in 'background pause', 'background resume engine=scrub':
        assert may(MEMBER, answer, mnt, line).startswith('error: EPERM: work in the background is for root')
    os.chown(mnt, OWNER, OWNER)
    assert may(OWNER, answer, mnt, 'background pause') == 'ok'


@row('vault', 'cold')
def test_vaults_are_the_owners(mnt, shared, tmp_path):
    os.chmod(mnt, 0o777)
    line = f'vault {"ab" * 16} {tmp_path}'
    assert may(MEMBER, answer, mnt, line).startswith('error: EPERM: a vault is for root')
    root = directory(shared / 'cold', MEMBER)
    word(root, 'optimizer', SGD)
    assert may(MEMBER, answer, root, 'cold job@1').startswith('error: EPERM: cold: only root')
    os.chown(mnt, MEMBER, MEMBER)
    assert may(MEMBER, answer, mnt, line) == may(MEMBER, answer, root, 'cold job@1') == 'ok'


@row('recall')
def test_a_recall_is_made_by_the_owner_of_the_model(model):
    may_not(errno.EACCES, STRANGER, order, model, 'recall')
    may_not(errno.EPERM, MEMBER, order, model, 'recall')
    may(OWNER, order, model, 'recall')


# ------------------------------------------------------------- hidden files

def put(model, name):
    put_gradient(model, name, np.ones(ELEMENTS, 'f4'))


@row('write a gradient')
def test_a_gradient_needs_write_permission_on_its_parameter(model):
    may_not(errno.EACCES, STRANGER, put, model, 'w')
    may_not(errno.EACCES, MEMBER, put, model, 'own')
    may_not(errno.EACCES, MEMBER, put, model, 'private/own')
    may_not(errno.EACCES, MEMBER, put, model / 'private', 'own')
    may_not(errno.EACCES, STRANGER, open, model / '.hitrain/grad-topk/w', 'wb')
    may(MEMBER, put, model, 'w')
    assert np.all(np.fromfile(model / 'w', 'f4') == -1)


def gathers(model, name, flags):
    with gather(model, [name], flags) as fd:
        return len(os.pread(fd, 1 << 20, 0)) if flags == os.O_RDONLY else os.pwrite(fd, np.ones(ELEMENTS, 'f4'), 0)


@row('gather')
def test_members_of_a_gather_need_the_permissions_of_their_files(model):
    os.chmod(model / 'private' / 'own', 0o666)
    for flags in os.O_RDONLY, os.O_WRONLY:
        for name in 'own', 'private/own':
            may_not(errno.EACCES, MEMBER, gathers, model, name, flags)
            assert may(OWNER, gathers, model, name, flags) == 4 * ELEMENTS
        assert may(MEMBER, gathers, model, 'w', flags) == 4 * ELEMENTS
    os.chmod(model / 'w', 0o644)
    assert may(MEMBER, gathers, model, 'w', os.O_RDONLY) == 4 * ELEMENTS
    may_not(errno.EACCES, MEMBER, gathers, model, 'w', os.O_WRONLY)
    may_not(errno.EACCES, STRANGER, gathers, model, 'w', os.O_WRONLY)


@row('deltas')
def test_a_delta_needs_the_permission_to_read_all_that_changed(model):
    """test_deltas.py has the directories of a path."""
    may(OWNER, word, model, 'optimizer', f'{SGD} delta=on delta_max=1')

    def end_step(*names):
        for name in names:
            put_gradient(model, name, np.ones(ELEMENTS, 'f4'))
        assert command(model, 'step') == ['ok']
        return model / '.hitrain/delta' / word(model, 'step')

    end_step('w', 'own')
    both, one = end_step('w', 'own'), end_step('w')
    assert may(STRANGER, one.read_bytes) == one.read_bytes()
    assert may(OWNER, both.read_bytes) == both.read_bytes()
    may_not(errno.EACCES, MEMBER, both.read_bytes)
    may_not(errno.EACCES, OWNER, os.open, one, os.O_WRONLY)


@row('read state', 'write state')
def test_state_is_as_readable_and_writable_as_its_parameter(model):
    remove(model, 'optimizer')
    may(OWNER, word, model, 'optimizer', 'sgd lr=1 momentum=0.9')
    for name in 'w', 'own':
        put_gradient(model, name, np.ones(ELEMENTS, 'f4'))
    sync(model)
    state = model / '.hitrain/state'

    def read(name):
        with open(state / name / 'momentum_buffer', 'rb') as f:
            return len(f.read())

    def write(name):
        with open(state / name / 'momentum_buffer', 'r+b', buffering=0) as f:
            f.write(bytes(8))

    assert may(STRANGER, read, 'w') == 4 * ELEMENTS
    may_not(errno.EACCES, STRANGER, write, 'w')
    may(MEMBER, write, 'w')
    may_not(errno.EACCES, MEMBER, read, 'own')
    may_not(errno.EACCES, MEMBER, write, 'own')


@row('stats')
def test_figures_need_read_permission_and_name_no_hidden_model(mnt, model, shared):
    def read(d):
        return (d / '.hitrain/stats').read_text()

    secret = directory(shared / 'secret', OWNER, 0o700)
    hidden = directory(secret / 'model', OWNER)
    word(hidden, 'optimizer', SGD)
    assert 'shared/model' in may(STRANGER, read, mnt) and 'secret' not in may(STRANGER, read, mnt)
    assert 'secret/model' in may(OWNER, read, mnt) and 'secret/model' in read(mnt)
    os.chmod(model, 0o2770)
    may_not(errno.EACCES, STRANGER, read, model)
    assert 'hitrain' in may(MEMBER, read, model)


@row('events', 'trace', 'plan')
def test_events_trace_and_plan_are_the_owners(mnt, shared):
    def read():
        for name in 'events', 'trace', 'plan':
            with open(mnt / '.hitrain' / name, 'rb'):
                pass

    os.chmod(mnt, 0o777)
    may_not(errno.EACCES, MEMBER, read)
    os.chown(mnt, OWNER, OWNER)
    may(OWNER, read)


@row('logged steps')
def test_logged_steps_are_the_owners(model):
    def read():
        with open(model / '.hitrain/redo/2', 'rb') as f:
            return f.read(8)

    may(OWNER, word, model, 'optimizer', 'adamw lr=0.1 redo=on durable_every=8')
    for _ in range(2):
        put(model, 'w')
        sync(model)
    assert may(OWNER, read) == read() == b'HTredo\r\n'
    may_not(errno.EACCES, MEMBER, read)
    may_not(errno.EACCES, STRANGER, read)


# --------------------------------------------------------------- attributes

@row('set an attribute')
def test_attributes_need_write_permission(shared, model):
    f, d = tensor(shared / 'f', OWNER), directory(shared / 'd', OWNER)
    for name, value in {'dtype': 'f32', 'grad_dtype': 'f32', 'shape': '1024', 'compress': 'auto', 'error': ''}.items():
        for path in f, d:
            may(MEMBER, word, path, name, value)
            may_not(errno.EACCES, STRANGER, word, path, name, value)
            may_not(errno.EACCES, MEMBER, word, model / 'own', name, value)
    empty = owned(shared / 'empty', OWNER, 0o664) if (shared / 'empty').touch() is None else None
    settle(empty)  # nobody has it open
    may_not(errno.EACCES, STRANGER, word, empty, 'class', 'scratch')
    may(MEMBER, word, empty, 'class', 'scratch')
    may(MEMBER, word, model, 'step', '5')
    may_not(errno.EACCES, STRANGER, word, model, 'step', '6')
    os.chmod(d, 0o3775)
    may_not(errno.EPERM, MEMBER, word, d, 'dtype', 'f32')


@row('class of a directory', 'pin', 'tier', 'next_use')
def test_what_costs_others_is_the_owners(shared):
    f, d = tensor(shared / 'f', OWNER), directory(shared / 'd', OWNER)
    for path, name, value in (d, 'class', 'scratch'), (f, 'pin', 'dram'), (f, 'tier', 'dram'), (d, 'tier', 'capacity'), (f, 'next_use', '100'):
        may_not(errno.EPERM, MEMBER, word, path, name, value)
        assert 'only the owner' in word(path, 'error')
        may(OWNER, word, path, name, value)
        may_not(errno.EPERM, MEMBER, remove, path, name)
        may(OWNER, remove, path, name)


@row('endurance')
def test_the_endurance_is_that_of_the_owner_of_the_mount(mnt, shared):
    os.chmod(mnt, 0o777)
    may_not(errno.EPERM, MEMBER, word, mnt, 'endurance', '1G')
    os.chown(mnt, OWNER, -1)
    may(OWNER, word, mnt, 'endurance', '1G')
    assert may(MEMBER, word, mnt, 'endurance') == '1G'
    may_not(errno.EPERM, MEMBER, remove, mnt, 'endurance')
    may(OWNER, remove, mnt, 'endurance')


@row('read an attribute')
def test_attributes_are_read_with_read_permission(model):
    assert may(STRANGER, word, model, 'step') == '0'
    assert may(STRANGER, word, model / 'w', 'dtype') == 'f32'
    may_not(errno.EACCES, MEMBER, word, model / 'own', 'dtype')
    may_not(errno.EACCES, MEMBER, word, model / 'private' / 'own', 'dtype')


# ------------------------------------------------------------------- memory

def test_one_user_does_not_get_all_of_the_passthrough_memory(passthrough_store):
    """Three quarters of 16 MiB; other opens of this user are ordinary."""
    mnt = passthrough_store.point
    os.chmod(mnt, 0o777)

    def make(prefix):
        for i in range(8):
            path = mnt / f'{prefix}{i}'
            path.touch()
            word(path, 'dtype', 'f32')
            path.write_bytes(bytes([i]) * (2 * MIB))
            sync(path)
            word(path, 'pin', 'dram')

    def open_all(prefix):
        files = []
        for i in range(8):
            fd = os.open(mnt / f'{prefix}{i}', os.O_RDONLY)
            files.append(mmap.mmap(fd, 2 * MIB, SHARED, READ))
            os.close(fd)
            assert files[-1][:] == bytes([i]) * (2 * MIB)
        return stat(mnt, 'passthrough_opens') - before

    def take(user, prefix):
        nonlocal before
        may(user, make, prefix)
        settle(mnt)
        before = stat(mnt, 'passthrough_opens')
        return may(user, open_all, prefix)

    before = 0
    assert take(MEMBER, 'a') == 6
    assert take(STRANGER, 'b') >= 2  # six when the kernel has forgotten the first one's

    def root_gets_all():
        return take(0, 'root') == 8

    wait_for(root_gets_all, 'root gets all of the share')
