# SPDX-License-Identifier: Apache-2.0
"""Gradients that are mapped (handout=): what is stored through the mapping, and what `apply` makes of it."""
import array
import mmap
import os
import shutil
import subprocess
import sys

import pytest

from conftest import MIB, wait_for
from handed import (HALF, ONE, PARAM, command, floats, grad_window, handing, make_model, mapped, root, stat,
                    steer)


def test_a_step_without_a_read_or_write(handing, root):
    """Gradient and parameter through mappings: no tensor byte crosses the mount, and the result is that of written gradients."""
    ctl, top = os.open(root / '.hitrain/ctl', os.O_RDONLY), os.open(root, os.O_RDONLY)
    want = 1.0
    with grad_window(root, 'w') as g, mapped(root / 'w', os.O_RDONLY) as w:
        before = {word: stat(handing.point, word) for word in WORDS}
        for value in (1.0, 0.25, -3.0):
            g[:] = array.array('f', [value]).tobytes() * (PARAM // 4)
            steer(ctl, 'apply w')
            g[:] = bytes(PARAM)         # what was applied is the step's own
            steer(ctl, 'wait w')
            want -= 0.5 * value
            assert set(floats(w[:])) == {want}
            os.fsync(top)
        assert {word: stat(handing.point, word) for word in WORDS} == before
        assert int(os.getxattr(root, 'user.hitrain.durable_step')) == 3
    os.close(ctl)
    os.close(top)
    handing.kill()
    handing.mount('handout=off')
    assert set(floats((root / 'w').read_bytes())) == {want}


WORDS = [f'mount_{kind}_{what}_bytes' for kind in ('param', 'grad') for what in ('read', 'written')]


def test_trainer_makes_no_read_or_write_call(handing, root):
    if not shutil.which('strace'):
        pytest.skip('no strace here')
    trainer = handing.folder / 'trainer.py'
    trainer.write_text(f'import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n' + """
import os, pathlib, handed as t
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
    calls = handing.folder / 'calls'
    subprocess.run(['strace', '-f', '-o', calls, sys.executable, trainer, root], check=True, stdout=subprocess.DEVNULL)
    lines = calls.read_text().splitlines()
    first, last = (next(i for i, line in enumerate(lines) if f'"/the-steps-{word}"' in line) for word in ('begin', 'end'))
    made = [line.split()[1].split('(')[0] for line in lines[first + 1:last]]
    assert made.count('ioctl') == 4 and made.count('fsync') == 2
    assert not [name for name in made if 'read' in name or 'write' in name]


def test_mapped_gradients_of_every_kind(handing):
    root = make_model(handing.point, a=PARAM, b=4096, c=8)
    for name in 'abc':
        with grad_window(root, name) as g:
            g[:] = HALF * (len(g) // 4)
            command(root, f'apply {name}')
            with pytest.raises(OSError, match='busy'):
                command(root, f'apply {name}')          # belongs to this step already
    command(root, 'commit')
    for name in 'abc':
        assert set(floats((root / name).read_bytes())) == {0.75}
    wait_for(lambda: stat(handing.point, 'handed_files') <= 3, 'windows given back')


def test_gradient_written_with_calls_has_no_window(handing, root):
    """Also by who could map it, and beside somebody who does."""
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


def test_gradient_that_finds_no_memory_is_written_by_the_kernel(handing):
    root = make_model(handing.point, a=14 * MIB, b=4 * MIB)
    with mapped(root / 'a', os.O_RDONLY):
        fd = os.open(root / '.hitrain/grad/b', os.O_RDWR)
        assert stat(handing.point, 'handout_fallbacks') == 1
        with mmap.mmap(fd, 4 * MIB) as g:
            g[:] = ONE * MIB
            g.flush()
            command(root, 'apply b')
            command(root, 'commit')
        os.close(fd)
    assert set(floats((root / 'b').read_bytes())) == {0.5}


def test_accumulated_mapped_gradients(handing, root):
    command(root, 'commit')
    os.setxattr(root, 'user.hitrain.optimizer', b'sgd lr=0.5 accumulate=2')
    with grad_window(root, 'w') as g:
        for value in (1.0, 3.0):
            g[:] = array.array('f', [value]).tobytes() * (PARAM // 4)
            command(root, 'apply w')
        command(root, 'commit')
    assert len(set(floats((root / 'w').read_bytes()))) == 1
    assert floats((root / 'w').read_bytes()[:4])[0] in (-1.0, 0.0)      # their sum, or mean


def test_parameter_removed_beside_its_window(handing, root):
    with grad_window(root, 'w') as g:
        g[:4] = ONE
        os.unlink(root / 'w')
        g[:4] = HALF
        with pytest.raises(OSError):
            command(root, 'apply w')
    wait_for(lambda: stat(handing.point, 'handed_files') == 0, 'window given back')


def test_stored_gradient_belongs_to_one_step(handing, root):
    """apply leaves zeros, as a gradient has that was written with calls and used: nothing is applied twice."""
    with grad_window(root, 'w') as g, mapped(root / 'w', os.O_RDONLY) as w:
        g[:] = ONE * (PARAM // 4)
        command(root, 'apply w')
        assert g[:] == bytes(PARAM)
        command(root, 'commit')
        command(root, 'apply w')
        command(root, 'commit')
        assert set(floats(w[:])) == {0.5}
        g[4:8] = ONE                # what is not stored is zero
        command(root, 'apply w')
        command(root, 'commit')
        assert floats(w[:12]).tolist() == [0.5, 0.0, 0.5]
        g[:4] = ONE
        with pytest.raises(OSError):
            command(root, 'apply nobody')
        assert g[:4] == ONE         # nothing has taken it
