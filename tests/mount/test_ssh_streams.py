# SPDX-License-Identifier: Apache-2.0
"""Steps go from one store to another through ssh: archive, restore and their --follow, with an sshd of the test alone."""
import os
import signal
import subprocess

import pytest

from conftest import BIN, SECONDS_MAX, wait_for
from engines import servers  # noqa: F401 (fixture)
from test_follow import REDO, same, sender
from test_logged_steps import train
from test_roots import command, word
from test_step_streams import STAGING, content, digest, kept_step, make_model, step


@pytest.fixture
def ssh(servers):  # noqa: F811
    """The words of a command that runs another one through ssh."""
    return servers('ssh').command()


@pytest.fixture
def roots(make_store):
    """A model in one store, and the place of its copy in another one."""
    a, b = make_store().mount(), make_store().mount()
    return make_model(a / 'model'), b / 'copy'


def there(ssh, *args):
    return [*ssh, f'{BIN}/hitrainctl', *map(str, args)]


def send_through(ssh, root, step, target, *options, receive=()):
    """What the receiver did, and what the sender did."""
    to = subprocess.Popen([BIN / 'hitrainctl', 'archive', root, step, '-', *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done = subprocess.run(there(ssh, 'restore', '-', target, *receive), stdin=to.stdout, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=SECONDS_MAX)
    to.stdout.close()
    to.communicate(timeout=SECONDS_MAX)
    return done, to


def test_steps_and_their_changes_arrive(ssh, roots):
    root, copy = roots
    kept_step(root, 10)
    done, to = send_through(ssh, root, '1', copy)
    assert done.returncode == to.returncode == 0, done.stderr
    command(copy, 'snapshot')
    assert digest(copy, '1') == digest(root, '1')
    kept_step(root, 20)
    new = copy.parent / 'new'
    done, to = send_through(ssh, root, '2', new, '--from=1', receive=[f'--base={copy}'])
    assert done.returncode == to.returncode == 0, done.stderr
    command(new, 'snapshot')
    assert digest(new, '2') == digest(root, '2')
    for model in (root, new):
        step(model, 30)
    assert content(root, 'w', 'deep/v') == content(new, 'w', 'deep/v')


def test_a_connection_that_is_lost_leaves_nothing(ssh, roots):
    root, copy = roots
    kept_step(root, 10)
    to = subprocess.Popen([BIN / 'hitrainctl', 'archive', root, '1', '-', '--rate=256K'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    at = subprocess.Popen(there(ssh, 'restore', '-', copy), stdin=to.stdout, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    to.stdout.close()
    wait_for(lambda: any(n.startswith(STAGING) for n in os.listdir(copy.parent)), 'the receiver has begun')
    at.kill()  # ssh itself
    at.communicate(timeout=SECONDS_MAX)
    assert to.wait(SECONDS_MAX) != 0
    to.stderr.close()
    wait_for(lambda: not [n for n in os.listdir(copy.parent) if n.startswith(STAGING)], 'the receiver has removed its part')
    assert not copy.exists()
    done, _ = send_through(ssh, root, '1', copy)
    assert done.returncode == 0, done.stderr


def test_a_copy_follows(ssh, roots):
    root, copy = roots
    word(root, 'optimizer', REDO)
    train(root, 1)
    command(root, 'snapshot base')
    done, _ = send_through(ssh, root, 'base', copy)
    assert done.returncode == 0, done.stderr
    to = sender(root, '--from=base')
    at = subprocess.Popen(there(ssh, 'restore', '-', copy, '--follow'), stdin=to.stdout, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    to.stdout.close()
    for n in range(2, 6):
        train(root, n)
        wait_for(lambda: word(copy, 'durable_step') == str(n), f'step {n} is there')
        assert same(root, copy)
    to.send_signal(signal.SIGINT)
    _, err = at.communicate(timeout=SECONDS_MAX)
    assert at.returncode == to.wait(SECONDS_MAX) == 0, err
    to.stderr.close()
