# SPDX-License-Identifier: Apache-2.0
"""Mapped gradients (passthrough=): stores through the mapping, and how `apply` uses them."""
import array
import mmap
import os
import subprocess
import sys

import pytest

from calls import settle
from conftest import MIB, needs, wait_for
from passthrough import (HALF, ONE, PARAM, command, floats, grad_window, is_passed, make_model, mapped, passthrough_store, root,
                         stat, steer)


def test_a_step_without_a_read_or_write(passthrough_store, root):
    """Gradient and parameter through mappings: no tensor byte crosses the mount, and the result is that of written gradients."""
    ctl, top = os.open(root / '.hitrain/ctl', os.O_RDONLY), os.open(root, os.O_RDONLY)
    want = 1.0
    with grad_window(root, 'w') as g, mapped(root / 'w', os.O_RDONLY) as w:
        before = {word: stat(passthrough_store.point, word) for word in WORDS}
        for value in (1.0, 0.25, -3.0):
            g[:] = array.array('f', [value]).tobytes() * (PARAM // 4)
            steer(ctl, 'apply w')
            g[:] = bytes(PARAM)         # the step owns the applied gradient
            steer(ctl, 'wait w')
            want -= 0.5 * value
            assert set(floats(w[:])) == {want}
            os.fsync(top)
        assert {word: stat(passthrough_store.point, word) for word in WORDS} == before
        assert int(os.getxattr(root, 'user.hitrain.durable_step')) == 3
    os.close(ctl)
    os.close(top)
    passthrough_store.crash('passthrough=off')
    assert set(floats((root / 'w').read_bytes())) == {want}


WORDS = [f'mount_{kind}_{what}_bytes' for kind in ('param', 'grad') for what in ('read', 'written')]


def test_trainer_makes_no_read_or_write_call(passthrough_store, root):
    needs('strace')
    trainer = passthrough_store.folder / 'trainer.py'
    trainer.write_text(f'import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n' + """
import os, pathlib, passthrough as t
root = pathlib.Path(sys.argv[1])
ctl, top = os.open(root / '.hitrain/ctl', os.O_RDONLY), os.open(root, os.O_RDONLY)
with t.grad_window(root, 'w') as g, t.mapped(root / 'w', os.O_RDONLY) as w:
    os.path.exists('/the-steps-begin')
    for value in (1.0, 2.0):
        g[:] = t.array.array('f', [value]).tobytes() * (len(g) // 4)
        t.steer(ctl, 'apply w')
        t.steer(ctl, 'wait')
        assert w[:4]
        os.fsync(top)
    os.path.exists('/the-steps-end')
""")
    calls = passthrough_store.folder / 'calls'
    subprocess.run(['strace', '-f', '-o', calls, sys.executable, trainer, root], check=True, stdout=subprocess.DEVNULL)
    lines = calls.read_text().splitlines()
    first, last = (next(i for i, line in enumerate(lines) if f'"/the-steps-{word}"' in line) for word in ('begin', 'end'))
    made = [line.split()[1].split('(')[0] for line in lines[first + 1:last]]
    assert made.count('ioctl') == 4 and made.count('fsync') == 2
    assert not [name for name in made if 'read' in name or 'write' in name]


ASKER = """import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
print(flush=True)
while True:
    fcntl.ioctl(fd, 2 << 30 | 4 << 16 | ord('h') << 8 | 3, bytes(4))
"""


def test_other_users_of_a_gradient_hide_no_stores(passthrough_store):
    """They have the gradient for some nanoseconds each. A tracer makes the daemon's waits, and so these times, longer."""
    needs('strace')
    root = make_model(passthrough_store.point, w=4096)
    ctl = os.open(root / '.hitrain/ctl', os.O_RDONLY)
    with grad_window(root, 'w') as g, mapped(root / 'w', os.O_RDONLY) as w:
        others = [subprocess.Popen([sys.executable, '-c', ASKER, root / '.hitrain/grad/w'], stdout=subprocess.PIPE) for _ in range(3)]
        for other in others:
            other.stdout.readline()
        slow = subprocess.Popen(['strace', '-f', '-o', '/dev/null', '-e', 'trace=futex', '-e', 'inject=futex:delay_exit=3000',
                                 '-p', str(passthrough_store.daemon.pid)], stderr=subprocess.PIPE)
        assert b' attached' in slow.stderr.readline()
        for lap in range(10):
            g[:] = ONE * 1024
            steer(ctl, 'apply w')
            steer(ctl, 'step')
            steer(ctl, 'wait')
            assert floats(w[:4])[0] == 0.5 - 0.5 * lap
        for process in slow, *others:
            process.terminate()
            process.wait()
            (process.stderr or process.stdout).close()
    os.close(ctl)


def test_mapped_gradients_of_every_kind(passthrough_store):
    root = make_model(passthrough_store.point, a=PARAM, b=4096, c=8)
    for name in 'abc':
        with grad_window(root, name) as g:
            g[:] = HALF * (len(g) // 4)
            command(root, f'apply {name}')
            with pytest.raises(OSError, match='busy'):
                command(root, f'apply {name}')          # belongs to this step already
    command(root, 'commit')
    for name in 'abc':
        assert set(floats((root / name).read_bytes())) == {0.75}
    wait_for(lambda: stat(passthrough_store.point, 'passthrough_files') <= 3, 'windows given back')


def test_gradient_written_with_calls_has_no_window(passthrough_store, root):
    """Also if the writer could map it, and beside a program that does."""
    path = root / '.hitrain/grad/w'
    fd = os.open(path, os.O_RDWR)
    assert os.pwrite(fd, ONE * (PARAM // 4), 0) == PARAM
    command(root, 'apply w')
    command(root, 'wait')
    assert os.pread(fd, 4, 0) == bytes(4)       # it was used
    command(root, 'commit')
    assert set(floats((root / 'w').read_bytes())) == {0.5}
    with mmap.mmap(fd, PARAM) as g:
        assert os.pwrite(fd, ONE * (PARAM // 4), 0) == PARAM
        os.fsync(fd)
        command(root, 'abort')
        g[:] = HALF * (PARAM // 4)
        command(root, 'apply w')
        command(root, 'commit')
    os.close(fd)
    assert set(floats((root / 'w').read_bytes())) == {0.25}


def test_gradient_that_finds_no_memory_is_written_by_the_kernel(passthrough_store):
    root = make_model(passthrough_store.point, a=14 * MIB, b=4 * MIB)
    with mapped(root / 'a', os.O_RDONLY):
        fd = os.open(root / '.hitrain/grad/b', os.O_RDWR)
        assert stat(passthrough_store.point, 'passthrough_fallbacks') == 1
        with mmap.mmap(fd, 4 * MIB) as g:
            g[:] = ONE * MIB
            g.flush()
            command(root, 'apply b')
            command(root, 'commit')
        os.close(fd)
    assert set(floats((root / 'b').read_bytes())) == {0.5}


def test_apply_that_fails_leaves_nothing_of_the_window(passthrough_store, root):
    """The end of the gradient belongs to the step already. Another program's apply takes nothing from the refused
    window."""
    fd = os.open(root / '.hitrain/grad/w', os.O_WRONLY)
    assert os.pwrite(fd, ONE * (PARAM // 4 - MIB // 2), 2 * MIB) == PARAM - 2 * MIB
    os.close(fd)
    settle(root)
    with grad_window(root, 'w') as g:
        g[:] = HALF * (PARAM // 4)
        with pytest.raises(OSError, match='busy'):
            command(root, 'apply w')
        assert g[:4] == HALF
    wait_for(lambda: stat(passthrough_store.point, 'passthrough_files') == 0, 'the window is given back')
    command(root, 'apply w')
    with pytest.raises(OSError, match='busy'):
        command(root, 'commit')
    assert 'byte 0 is the first hole' in os.getxattr(root, 'user.hitrain.error').decode()
    command(root, 'abort')
    assert set(floats((root / 'w').read_bytes())) == {1.0}


def test_accumulated_mapped_gradients(passthrough_store, root):
    command(root, 'commit')
    os.setxattr(root, 'user.hitrain.optimizer', b'sgd lr=0.5 accumulate=2')
    with grad_window(root, 'w') as g:
        for value in (1.0, 3.0):
            g[:] = array.array('f', [value]).tobytes() * (PARAM // 4)
            command(root, 'apply w')
        command(root, 'commit')
    assert len(set(floats((root / 'w').read_bytes()))) == 1
    assert floats((root / 'w').read_bytes()[:4])[0] in (-1.0, 0.0)      # their sum, or mean


def test_parameter_removed_beside_its_window(passthrough_store, root):
    with grad_window(root, 'w') as g:
        g[:4] = ONE
        os.unlink(root / 'w')
        g[:4] = HALF
        with pytest.raises(OSError):
            command(root, 'apply w')
    wait_for(lambda: stat(passthrough_store.point, 'passthrough_files') == 0, 'window given back')


def test_stored_gradient_belongs_to_one_step(passthrough_store, root):
    """apply leaves zeros, as a gradient has that was written with calls and used: nothing is applied twice."""
    with grad_window(root, 'w') as g, mapped(root / 'w', os.O_RDONLY) as w:
        g[:] = ONE * (PARAM // 4)
        command(root, 'apply w')
        assert g[:] == bytes(PARAM)
        command(root, 'commit')
        command(root, 'apply w')
        command(root, 'commit')
        assert set(floats(w[:])) == {0.5}
        g[4:8] = ONE                # elements without a store are zero
        command(root, 'apply w')
        command(root, 'commit')
        assert floats(w[:12]).tolist() == [0.5, 0.0, 0.5]
        g[:4] = ONE
        with pytest.raises(OSError):
            command(root, 'apply nobody')
        assert g[:4] == ONE         # nothing has taken it


def test_asking_opens_nothing(passthrough_store):
    """So a window ends with the descriptors of its openers."""
    root = make_model(passthrough_store.point, a=4096)
    files = stat(passthrough_store.point, 'passthrough_files')
    assert is_passed(root / '.hitrain/grad/a') == 1
    wait_for(lambda: stat(passthrough_store.point, 'passthrough_files') == files, 'the window ends')


def test_a_program_can_ask_which_way_a_descriptor_has(passthrough_store):
    root = make_model(passthrough_store.point, a=PARAM, b=4096)
    for name in 'ab':
        for path in (root / name, root / '.hitrain/grad' / name):
            assert is_passed(path) == 1
    with open(root / '.hitrain/grad/b', 'r+b'):         # the window of another opener stays one
        assert is_passed(root / '.hitrain/grad/b', os.O_WRONLY) == 1
    (root.parent / 'more').mkdir()
    more = make_model(root.parent / 'more', c=4096)
    with open(more / 'c', 'rb', opener=lambda path, flags: os.open(path, flags | os.O_DIRECT)):
        assert is_passed(more / 'c') == 0
    with open(more / '.hitrain/grad/c', 'wb', buffering=0):
        assert is_passed(more / '.hitrain/grad/c') == 0
    with pytest.raises(OSError, match='Inappropriate ioctl'):
        is_passed(root / '.hitrain/ctl')
