# SPDX-License-Identifier: Apache-2.0
"""Permissions in .hitrain/: reading state needs read permission on the parameter, steering write permission on the
root."""
import errno
import os
import subprocess

import pytest

from calls import NOBODY, as_user, fails, sync
from conftest import SECONDS_MAX
from models import new_model

OTHER = 1234
ONES = b'\0\0\x80?' * 1024


@pytest.fixture
def model(mnt):
    """A model of root's with a parameter p that has state."""
    os.chmod(mnt, 0o755)
    root = new_model(mnt / 'model', 'adamw lr=0.5 weight_decay=0')
    (root / 'p').write_bytes(ONES)
    (root / '.hitrain' / 'grad' / 'p').write_bytes(ONES)
    sync(root)
    return root


def steer(root):
    (root / '.hitrain' / 'ctl').write_text('commit\n')


def read_state(root):
    return len((root / '.hitrain' / 'state' / 'p' / 'exp_avg').read_bytes())


def write_state(root):
    fd = os.open(root / '.hitrain' / 'state' / 'p' / 'exp_avg', os.O_WRONLY)
    os.pwrite(fd, ONES[:4], 0)
    os.close(fd)


def give_gradient(root):
    (root / '.hitrain' / 'grad' / 'p').write_bytes(ONES)


def test_reading_state_needs_read_permission_on_the_parameter(model):
    os.chown(model / 'p', NOBODY, OTHER)
    for mode, who, may_read, may_write in ((0o600, (NOBODY, NOBODY), True, True), (0o600, (77, 77), False, False),
                                           (0o644, (77, 77), True, False), (0o640, (77, OTHER), True, False),
                                           (0o620, (77, OTHER), False, True), (0o464, (NOBODY, NOBODY), True, False),
                                           (0o666, (77, 77), True, True)):
        os.chmod(model / 'p', mode)
        if may_read:
            assert as_user(lambda: read_state(model), *who) == 4096
        else:
            with fails(errno.EACCES):
                as_user(lambda: read_state(model), *who)
        for write in (write_state, give_gradient):
            if may_write and mode & 0o444 and may_read:
                as_user(lambda: write(model), *who)
            elif not may_write:
                with fails(errno.EACCES):
                    as_user(lambda: write(model), *who)
            sync(model)


def test_a_gradient_needs_write_permission_on_the_parameter_only(model):
    os.chmod(model, 0o755)
    os.chmod(model / 'p', 0o222)
    as_user(lambda: give_gradient(model))
    with fails(errno.EACCES):
        as_user(lambda: (model / '.hitrain' / 'grad' / 'p').read_bytes())
    with fails(errno.EACCES):
        as_user(lambda: sync(model))
    sync(model)


def test_the_directories_permissions_hold_too(model):
    os.chmod(model / 'p', 0o666)
    os.chmod(model, 0o700)
    for attempt in (lambda: read_state(model), lambda: give_gradient(model), lambda: steer(model),
                    lambda: os.listdir(model / '.hitrain'), lambda: (model / '.hitrain' / 'stats').read_bytes()):
        with fails(errno.EACCES):
            as_user(attempt)
    os.chmod(model, 0o711)
    assert as_user(lambda: read_state(model)) == 4096
    for attempt in (lambda: os.listdir(model / '.hitrain'), lambda: os.listdir(model / '.hitrain' / 'grad'),
                    lambda: (model / '.hitrain' / 'stats').read_bytes()):
        with fails(errno.EACCES):
            as_user(attempt)
    os.chmod(model, 0o755)
    as_user(lambda: (model / '.hitrain' / 'stats').read_bytes())
    assert 'p' in as_user(lambda: os.listdir(model / '.hitrain' / 'grad'))


def test_a_path_below_needs_what_its_directories_need(model):
    os.chmod(model, 0o755)
    (model / 'sub').mkdir()
    os.rename(model / 'p', model / 'sub' / 'p')
    os.chmod(model / 'sub' / 'p', 0o666)
    paths = [(model / '.hitrain' / x) for x in ('grad/sub/p', 'grad-topk/sub/p', 'state/sub/p/exp_avg')]
    for mode, allowed in ((0o700, False), (0o744, False), (0o711, True), (0o755, True)):
        os.chmod(model / 'sub', mode)
        for path in paths:
            if allowed:
                as_user(lambda: os.stat(path))
                as_user(lambda: os.close(os.open(path, os.O_WRONLY)))
                continue
            with fails(errno.EACCES):
                as_user(lambda: os.stat(path))
            with fails(errno.EACCES):
                as_user(lambda: os.open(path, os.O_WRONLY))
    os.chmod(model / 'sub', 0o711)
    for kind in ('grad', 'grad-topk', 'state'):
        with fails(errno.EACCES):
            as_user(lambda: os.listdir(model / '.hitrain' / kind / 'sub'))
    os.chmod(model / 'sub', 0o700)
    subprocess.run(['setfacl', '-m', f'u:{NOBODY}:x', str(model / 'sub')], check=True, timeout=SECONDS_MAX)
    as_user(lambda: os.stat(paths[0]))
    with fails(errno.EACCES):
        as_user(lambda: os.stat(paths[0]), 77, 77)


def test_access_lists_hold_too(model):
    os.chmod(model / 'p', 0o600)
    subprocess.run(['setfacl', '-m', f'u:{NOBODY}:r', str(model / 'p')], check=True, timeout=SECONDS_MAX)
    assert as_user(lambda: read_state(model)) == 4096
    with fails(errno.EACCES):
        as_user(lambda: write_state(model))
    with fails(errno.EACCES):
        as_user(lambda: read_state(model), 77, 77)
    subprocess.run(['setfacl', '-m', f'u:{NOBODY}:rwx', str(model)], check=True, timeout=SECONDS_MAX)
    for how in (steer, sync):
        as_user(lambda: how(model))
        with fails(errno.EACCES):
            as_user(lambda: how(model), 77, 77)
    # The mode's group bits are not the permissions of the owning group.
    os.chown(model / 'p', 0, OTHER)
    with fails(errno.EACCES):
        as_user(lambda: read_state(model), 77, OTHER)


def test_nothing_of_the_hidden_tree_can_be_changed(model):
    ctl = model / '.hitrain' / 'ctl'
    for attempt in (lambda: os.chmod(ctl, 0o777), lambda: os.chown(ctl, 1, 1), lambda: os.unlink(ctl),
                    lambda: os.rename(ctl, model / 'x'), lambda: os.rename(model / 'p', model / '.hitrain' / 'x'),
                    lambda: os.link(ctl, model / 'x'), lambda: os.rmdir(model / '.hitrain'),
                    lambda: os.mkdir(model / '.hitrain' / 'x'), lambda: os.symlink('x', model / '.hitrain' / 'x'),
                    lambda: os.rename(model / '.hitrain', model / 'x')):
        with fails(errno.EPERM):
            attempt()
    assert os.access(ctl, os.W_OK) and not as_user(lambda: os.access(ctl, os.W_OK))
