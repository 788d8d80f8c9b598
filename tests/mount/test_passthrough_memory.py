# SPDX-License-Identifier: Apache-2.0
"""Memory of passthrough files (passthrough=): its amount, and when files get and lose it."""
import os
import pathlib
import subprocess
import time

import pytest

from calls import settle
from conftest import MIB, needs, wait_for
from passthrough import HALF, ONE, PARAM, command, floats, gradient, passthrough_store, make_model, mapped, root, stat


def memory_of(daemon):
    """Bytes of pages that all tensors' memory has."""
    fds, total = f'/proc/{daemon.pid}/fd', 0
    for fd in os.listdir(fds):
        if 'hitrain-tensor' in os.readlink(f'{fds}/{fd}'):
            total += os.stat(f'{fds}/{fd}').st_blocks * 512
    return total


def test_memory_is_what_stats_say(passthrough_store):
    """To the page, also where the system has huge ones."""
    sizes = [4, 4096, 65536, MIB, 2 * MIB, 3 * MIB + 4]
    model = make_model(passthrough_store.point, **{f'p{i}': size for i, size in enumerate(sizes)})
    maps = [mapped(model / f'p{i}', os.O_RDONLY if i == 5 else os.O_RDWR) for i in range(len(sizes))]
    want = sum(-(-size // 4096) * 4096 for size in sizes)
    assert memory_of(passthrough_store.daemon) == stat(passthrough_store.point, 'passthrough_used_bytes') == want
    os.truncate(model / 'p5', 2 * MIB + 4)
    assert memory_of(passthrough_store.daemon) == stat(passthrough_store.point, 'passthrough_used_bytes') == want - MIB
    os.truncate(model / 'p5', 6 * MIB)
    (model / 'p5').write_bytes(ONE * (5 * MIB // 4))
    assert memory_of(passthrough_store.daemon) == stat(passthrough_store.point, 'passthrough_used_bytes')
    for m in maps:
        m.close()


def press(mnt, size):
    """So many bytes go through the DRAM tier, twice."""
    path, data = mnt / 'others', os.urandom(MIB)
    with open(path, 'wb') as f:
        for _ in range(size // MIB):
            f.write(data)
        os.fsync(f.fileno())
    for _ in range(2):
        with open(path, 'rb') as f:
            while piece := f.read(MIB):
                assert piece == data


def test_mapping_lives_while_the_budget_is_pressed(passthrough_store, root):
    """Its descriptor is closed. Other files want the tier, other parameters the share, and returned memory is reused.
    """
    with mapped(root / 'w') as m:
        m[MIB:MIB + 4] = HALF
        for i in range(6):
            (root / f'o{i}').write_bytes(ONE * MIB)
        command(root, 'commit')
        press(passthrough_store.point, 128 * MIB)
        for i in range(6):
            assert (root / f'o{i}').read_bytes() == ONE * MIB
        command(root, 'evict w')
        assert floats(m[MIB:MIB + 8]).tolist() == [0.5, 1.0]
        m[:4] = HALF
        gradient(root, 'w', 1.0)
        command(root, 'wait')
        assert floats(m[:8]).tolist() == [0.0, 0.5] and floats(m[MIB:MIB + 8]).tolist() == [0.0, 0.5]
        m[8:12] = ONE
        command(root, 'commit')
    passthrough_store.crash('passthrough=off')
    assert floats((root / 'w').read_bytes()[:16]).tolist() == [0.0, 0.5, 1.0, 0.5]


def test_memory_goes_with_the_mapping_and_not_before(passthrough_store):
    """Four times the share, one after the other: each finds room when no program maps the others, none while one does.
    """
    model = make_model(passthrough_store.point, **{f'p{i}': 8 * MIB for i in range(8)})

    def is_passed_through(name):
        settle(model)
        before = stat(passthrough_store.point, 'passthrough_opens')
        with mapped(model / name, os.O_RDONLY) as m:
            assert m[5 * MIB:5 * MIB + 4] == ONE
            return stat(passthrough_store.point, 'passthrough_opens') > before

    with mapped(model / 'p0'), mapped(model / 'p1', os.O_RDONLY):
        for i in range(2, 8):
            assert not is_passed_through(f'p{i}')
        assert stat(passthrough_store.point, 'passthrough_used_bytes') == 16 * MIB
    for i in range(2, 8):
        wait_for(lambda i=i: is_passed_through(f'p{i}'), f'p{i} passed through')
        used = stat(passthrough_store.point, 'passthrough_used_bytes')
        assert memory_of(passthrough_store.daemon) == used <= 16 * MIB


def faults(daemon):
    """Pages that its threads got, or had to map."""
    return int((pathlib.Path('/proc') / str(daemon.pid) / 'stat').read_text().rsplit(')', 1)[1].split()[7])


@pytest.mark.parametrize('flags', [os.O_RDONLY, os.O_RDWR])
def test_opening_again_reads_and_copies_nothing(passthrough_store, root, flags):
    """A trainer opens and closes parameters block by block. What it had open a moment ago is as it was."""
    passthrough_store.remount('dram=48M', 'passthrough=16M', 'background=off')  # engines read, too
    point, times, closed, late = passthrough_store.point, 40, 0, 0

    def use():
        nonlocal closed, late
        with mapped(root / 'w', flags) as m:
            assert m[MIB:MIB + 4] == ONE
            late += time.monotonic() - closed >= 1      # the kernel may have given the memory back
            closed = time.monotonic()
    use()
    late = 0
    before = {word: stat(point, word) for word in ('device_read_bytes', 'device_written_bytes', 'passthrough_opens', 'passthrough_fallbacks')}
    pages = faults(passthrough_store.daemon)
    for _ in range(times):
        use()
    assert faults(passthrough_store.daemon) - pages < (times // 20 + late) * (PARAM // 4096)  # a copy of the file would be one for each page
    assert {word: stat(point, word) - was for word, was in before.items()} == {
        'device_read_bytes': 0, 'device_written_bytes': 0, 'passthrough_opens': times, 'passthrough_fallbacks': 0}


# ------------------------------------------------------------------------ prefetch


def test_prefetch_opens_passthrough_memory(passthrough_store, root):
    passthrough_store.remount('dram=48M', 'passthrough=16M', 'background=off')  # engines read, too
    command(root, 'prefetch w')
    used = stat(passthrough_store.point, 'passthrough_used_bytes')
    assert used == memory_of(passthrough_store.daemon) == -(-PARAM // 4096) * 4096
    before = stat(passthrough_store.point, 'device_read_bytes')
    with mapped(root / 'w') as m:
        assert m[:] == ONE * (PARAM // 4)
        command(root, 'prefetch w')     # it is there
        assert stat(passthrough_store.point, 'device_read_bytes') == before
        m[:4] = HALF
    command(root, 'prefetch w')
    command(root, 'commit')
    command(root, 'evict w')
    command(root, 'prefetch w')
    assert floats((root / 'w').read_bytes()[:8]).tolist() == [0.5, 1.0]


def test_prefetch_of_ordinary_files(passthrough_store):
    """Too large for the share, or open in the ordinary way: into the tier, as far as there is room."""
    model = make_model(passthrough_store.point, large=20 * MIB, open=2 * MIB)
    passthrough_store.remount('dram=48M', 'passthrough=16M')
    fd = os.open(model / 'open', os.O_RDONLY | os.O_DIRECT)
    for name, size in ('large', 20 * MIB), ('open', 2 * MIB):
        command(model, f'prefetch {name}')
        assert int(os.getxattr(model / name, 'user.hitrain.resident_bytes')) == size
    assert stat(passthrough_store.point, 'passthrough_files') == 0
    assert stat(passthrough_store.point, 'passthrough_fallbacks') == 0
    os.close(fd)


# ----------------------------------------------------------------------- fallbacks


def test_kernel_that_refuses(passthrough_store, root):
    """As one without passthrough does, or that has had enough: files are ordinary, counted, and clients see no error."""
    needs('strace')
    calls = passthrough_store.folder / 'calls'
    with subprocess.Popen(['strace', '-f', '-o', calls, '-e', 'trace=ioctl', '-e', 'inject=ioctl:error=EOPNOTSUPP', '-p',
                           str(passthrough_store.daemon.pid)], stderr=subprocess.PIPE) as tracer:
        assert b' attached' in tracer.stderr.readline()  # to all threads
        with mapped(root / 'w') as m:
            m[:4] = HALF
            m.flush()
            assert (root / 'w').read_bytes()[:8] == HALF + ONE
        with mapped(root / '.hitrain/grad/w') as g:
            g[:] = ONE * (PARAM // 4)
            g.flush()
            command(root, 'apply w')
        tracer.terminate()
    assert 'EOPNOTSUPP' in calls.read_text() and 'INJECTED' in calls.read_text()
    command(root, 'commit')
    assert floats((root / 'w').read_bytes()[:8]).tolist() == [0.0, 0.5]
    assert stat(passthrough_store.point, 'passthrough_opens') == 0
    assert stat(passthrough_store.point, 'passthrough_fallbacks') >= 2
    assert passthrough_store.messages().count('error') == 1       # libfuse says so once; the daemon does not try again
