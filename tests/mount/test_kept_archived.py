# SPDX-License-Identifier: Apache-2.0
"""What a store does for an archiver: a kept step that it reads does not expire, and a full store gives up steps that a vault has."""
import errno
import json
import os

import pytest

from conftest import MIB, run, wait_for
from models import new_model
from test_async_step import command
from test_kept_steps import kept, make, refused, train
from test_roots import sync

OTHER = '0' * 32


def lines(root):
    with open(root / '.hitrain/kept') as f:
        return {line['name']: line for line in map(json.loads, f)}


def hold(root, *steps):
    fd = os.open(root / '.hitrain/ctl', os.O_RDWR)
    try:
        for step in steps:
            os.write(fd, f'hold {step}\n'.encode())
    except OSError:
        os.close(fd)
        raise
    return fd


def test_a_held_step_does_not_expire_until_ctl_is_closed(mnt):
    root = make(mnt)
    for step in (1, 2):
        train(root, step)
    fd = hold(root, 1)
    for step in (3, 4):
        train(root, step)
    assert kept(root) == ['1', '3', '4']
    os.write(fd, b'hold 3\n')
    train(root, 5)
    assert kept(root) == ['3', '4', '5']
    os.close(fd)
    train(root, 6)
    assert kept(root) == ['5', '6']


def test_a_hold_is_of_a_step_that_is_there_and_forget_ends_it_all_the_same(mnt):
    root = make(mnt)
    train(root, 1)
    assert refused(lambda: hold(root, 7)) == errno.ENOENT
    fd = hold(root, 1)
    command(root, 'forget 1')
    os.close(fd)
    train(root, 2)
    assert kept(root) == ['2']


def test_an_archived_step_names_its_job_also_after_a_mount(make_store):
    store = make_store()
    root = make(store.mount('digest=on,background_rate=8G'))
    train(root, 1)
    wait_for(lambda: 'digest' in lines(root)['1'], 'its digest')
    digest = lines(root)['1']['digest']
    assert refused(lambda: command(root, f'archived 1 job {OTHER}')) == errno.EINVAL
    assert 'archived' not in lines(root)['1']
    command(root, f'archived 1 job {digest}')
    command(root, f'archived 1 other.job {digest}')
    assert lines(root)['1']['archived'] == 'other.job'
    snap = root / '.hitrain/snap/1'
    assert not any('archived' in name for name in os.listxattr(snap))
    command(root, 'clone 1 copy')
    store.unmount()
    root = store.mount() / 'model'
    assert lines(root)['1']['archived'] == 'other.job' and 'other.job' in run('hitrainctl', 'steps', root).stdout
    command(root, 'rollback 1')
    sync(root)
    assert not any('archived' in name for name in os.listxattr(root))


def test_a_full_store_gives_up_archived_steps_oldest_first_and_no_other(make_store):
    store = make_store(size='64M')
    mnt = store.mount()
    root = new_model(mnt / 'model', 'sgd lr=1 retain=8')
    for step in range(1, 5):
        (root / 'w').write_bytes(os.urandom(4 * MIB))
        command(root, f'snapshot s{step}')
    for name in ('s1', 's2', 's3'):
        command(root, f'archived {name} job {OTHER}')
    fd = hold(root, 's1')

    def fill():
        with open(mnt / 'fill', 'wb', buffering=0) as f:
            while True:
                f.write(os.urandom(MIB))
    with pytest.raises(OSError) as e:
        fill()
    assert e.value.errno == errno.ENOSPC
    os.close(fd)
    assert kept(root) == ['s1', 's4']
    events = run('hitrainctl', 'events', mnt).stdout
    assert 'kept-given-up' in events and 'kept step s2' in events
    (root / 'w').read_bytes()


def test_steps_that_only_a_vault_has_are_listed_and_come_back(mnt, tmp_path):
    """A step of the same number with other bits is another one."""
    root, url = make(mnt), f'{tmp_path}/v/job'
    run('hitrainctl', 'vault', 'init', tmp_path / 'v')
    for step in (1, 2):
        train(root, step)
        run('hitrainctl', 'archive', root, str(step), url)
    want = (root / 'w').read_bytes()
    said = run('hitrainctl', 'steps', root, f'--vault={url}').stdout
    assert said.startswith(run('hitrainctl', 'steps', root).stdout) and said.endswith(f'hitrainctl restore {url}@STEP DIR brings one back:\n')
    for step in (3, 4):
        train(root, step)
    assert kept(root) == ['3', '4']
    run('hitrainctl', 'archive', root, '4', url)

    def in_vault():
        found = json.loads(run('hitrainctl', 'steps', root, f'--vault={url}', '--json').stdout)
        assert [s['name'] for s in found['steps']] == kept(root)
        return [s['step'] for s in found['in_vault']]
    assert in_vault() == [1, 2]
    table = run('hitrainctl', 'steps', root, f'--vault={url}').stdout.splitlines()
    assert [line.split()[0] for line in table[-2:]] == ['1', '2'] and 'full' in table[-1]
    refused = run('hitrainctl', 'rollback', root, '2', check=False)
    assert lines(root)['4']['archived'] == 'job' and refused.returncode == 1 and '`hitrainctl restore URL/job@2 DIR` brings one back' in refused.stderr
    run('hitrainctl', 'restore', f'{url}@2', mnt / 'back')
    assert (mnt / 'back/w').read_bytes() == want
    command(root, 'forget *')
    assert in_vault() == [1, 2, 4]
    assert 'there is no job other' in run('hitrainctl', 'steps', root, f'--vault={tmp_path}/v/other', check=False).stderr
    assert 'no kept step none; `hitrainctl steps` lists them\n' in run('hitrainctl', 'rollback', root, 'none', check=False).stderr
