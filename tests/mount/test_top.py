# SPDX-License-Identifier: Apache-2.0
"""hitrainctl top: on terminals of any size, on none, and on a mount that does not answer or ends."""
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios

import pytest

from calls import sync
from conftest import BIN, SECONDS_MAX, run, wait_for
from models import new_model

ONES = b'\0\0\x80\x3f' * 1024


class Terminal:
    """hitrainctl top on a terminal of the test. screen() is what it wrote since the last look."""

    def __init__(self, point, columns=80, lines=24, term='xterm', options=('--watch=0.1',)):
        self.master, slave = pty.openpty()
        self.resize(columns, lines)
        self.settings = termios.tcgetattr(slave)
        self.program = subprocess.Popen([BIN / 'hitrainctl', 'top', point, *options], stdin=slave, stdout=slave,
                                        stderr=slave, env={**os.environ, 'TERM': term}, start_new_session=True)
        self.slave = slave
        self.text = ''

    def resize(self, columns, lines):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack('HHHH', lines, columns, 0, 0))

    def read(self):
        while select.select([self.master], [], [], 0)[0]:
            self.text += os.read(self.master, 65536).decode(errors='replace')
        return self.text

    def wait(self, pattern):
        wait_for(lambda: re.search(pattern, self.read(), re.S), pattern)
        self.text = self.text[re.search(pattern, self.text, re.S).end():]

    def key(self, key):
        os.write(self.master, key.encode())

    def end(self):
        """The program's exit status. The screen and the terminal are as they were."""
        status = self.program.wait(SECONDS_MAX)
        text = self.read()
        assert termios.tcgetattr(self.slave) == self.settings and text.rstrip().endswith('\x1b[?1049l')
        os.close(self.slave)
        os.close(self.master)
        return status


@pytest.fixture
def model(mnt):
    path = new_model(mnt / 'model', 'adamw lr=0.5')
    (path / 'w').write_bytes(ONES)
    return path


def step(model):
    (model / '.hitrain/grad/w').write_bytes(ONES)
    sync(model)


def test_once_as_json_and_as_text(mnt, model):
    step(model)
    found = json.loads(run('hitrainctl', 'top', mnt, '--once', '--json', '--watch=0.1').stdout)
    assert found['path'] == str(mnt) and found['models'][0]['path'] == '/model' and found['models'][0]['step'] == 1
    assert {f'{c}_bytes_per_s' for c in ('urgent', 'planned', 'background')} <= found['devices'][0].keys()
    assert found['dram_bytes'] == 32 << 20 and found['devices'][0]['health'] == 'ok' and found['errors'] == 0
    for columns in 80, 40, 20:
        text = run('hitrainctl', 'top', model, '--once', '--watch=0.1', env={**os.environ, 'COLUMNS': str(columns)}).stdout
        assert max(map(len, text.splitlines())) <= columns and '/model' in text and '\x1b' not in text


def test_a_step_is_seen(mnt, model):
    step(model)
    program = subprocess.Popen([BIN / 'hitrainctl', 'top', mnt, '--json', '--watch=0.1'], stdout=subprocess.PIPE, text=True)
    try:
        first = json.loads(program.stdout.readline())['models'][0]
        # A step is counted before its commit ends. A slow commit's time may come after the second that a frame looks back.
        def found():
            step(model)
            frame = json.loads(program.stdout.readline())['models'][0]
            return frame['step'] > 1 and frame['steps_per_s'] > 0 and frame['commit_ns_per_step'] > 0
        wait_for(found, 'a frame with a step and the time of its commit')
        assert first['step'] == 1
    finally:
        program.terminate()
        assert program.wait(SECONDS_MAX) == 0
        program.stdout.close()


def test_keys_and_resizing(mnt, model):
    t = Terminal(mnt)
    t.wait(r'sort \(traffic\)')
    t.wait('/model')
    t.key('s')
    t.wait(r'sort \(steps\)')
    t.key('p')
    t.wait('PAUSED')
    t.key('p')
    t.wait(r'hitrain /[^\n]*mnt\x1b\[0m')
    t.key('-')
    t.wait(r'\(0.2 s\)')
    t.key('x\x1b[A')  # keys that mean nothing
    for columns, lines in ((40, 10), (20, 5), (1, 1), (200, 60)):
        t.resize(columns, lines)
        os.kill(t.program.pid, signal.SIGWINCH)
        t.wait(r'\x1b\[H')
        t.wait(r'\x1b\[J\x1b\[H' if lines > 1 else r'\x1b\[J')
    t.wait('/model')
    t.key('q')
    assert t.end() == 0


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(mnt, number):
    t = Terminal(mnt)
    t.wait('events')
    os.kill(t.program.pid, number)
    assert t.end() == 0


def test_a_terminal_that_can_do_nothing(mnt):
    t = Terminal(mnt, term='dumb')
    t.wait('events.*events')
    assert '\x1b' not in t.text
    os.kill(t.program.pid, signal.SIGINT)
    assert t.program.wait(SECONDS_MAX) == 0
    os.close(t.slave)
    os.close(t.master)


def test_a_reader_that_leaves(mnt):
    done = subprocess.run(f'{BIN}/hitrainctl top {mnt} --watch=0.1 | head -n 3', shell=True, capture_output=True, text=True,
                          timeout=SECONDS_MAX)
    assert done.stdout.startswith('hitrain ') and not done.stderr


def test_a_mount_that_does_not_answer_and_then_ends(store):
    t = Terminal(store.point)
    t.wait('events')
    store.daemon.send_signal(signal.SIGSTOP)
    t.wait('NO ANSWER for [1-9]')
    t.key('s')  # keys work all the same
    t.wait(r'sort \(steps\)')
    store.daemon.send_signal(signal.SIGCONT)
    t.wait('hitrain /[^\n]*mnt\x1b')
    store.kill()
    wait_for(lambda: t.program.poll() is not None, 'it ends with the mount')
    assert 'the daemon of this mount is gone' in t.read() and t.program.returncode == 1
    os.close(t.slave)
    os.close(t.master)


def test_it_leaves_while_the_mount_does_not_answer(store):
    t = Terminal(store.point)
    t.wait('events')
    store.daemon.send_signal(signal.SIGSTOP)
    t.wait('NO ANSWER')
    t.key('q')
    assert t.end() == 0
    store.daemon.send_signal(signal.SIGCONT)


def test_another_path(tmp_path):
    for path, words in ((tmp_path, 'not on a hitrain mount'), (tmp_path / 'none', 'No such file')):
        done = run('hitrainctl', 'top', path, '--once', check=False)
        assert done.returncode == 1 and words in done.stderr and not done.stdout
    for args in ([], [tmp_path, tmp_path], [tmp_path, '--watch=x'], [tmp_path, '--follow']):
        assert run('hitrainctl', 'top', *args, check=False).returncode == 2
