# SPDX-License-Identifier: Apache-2.0
"""Passthrough files on a mount without an option (passthrough=auto): for openers that ask, with memory that the DRAM tier lends."""
import errno
import fcntl
import mmap
import os
import re

import pytest

from calls import NOBODY, as_user, fails, settle
from conftest import MIB, wait_for
from passthrough import HALF, ONE, PARAM, READ, SHARED, WRITE, command, floats, gradient, is_passed, make_model, stat

ASK = os.O_RDWR | os.O_ASYNC                                    # HT_OPEN_PASSED
ATTRIBUTE = 'user.hitrain.passthrough'
DRAM = 64


@pytest.fixture
def lending(make_store):
    store = make_store('512M')
    store.mount(f'dram={DRAM}M')
    root = make_model(store.point, w=PARAM)
    if not is_passed(root / 'w', ASK):
        pytest.skip('the kernel or the privileges are not there')
    at_rest(store.point, root / 'w')
    return store


@pytest.fixture
def root(lending):
    return lending.point / 'model'


def at_rest(mnt, path):
    """The file is ordinary again."""
    wait_for(lambda: is_passed(path, os.O_RDONLY) == 0, f'{path} is ordinary')
    settle(mnt)


def asked(path):
    fd = os.open(path, ASK)
    try:
        return mmap.mmap(fd, 0, SHARED, READ | WRITE)
    finally:
        os.close(fd)


def used(mnt):
    return stat(mnt, 'passthrough_used_bytes')


def memory(store):
    """MiB of the daemon's pages."""
    with open(f'/proc/{store.daemon.pid}/status') as f:
        return int(re.search(r'VmRSS:\s+(\d+)', f.read())[1]) >> 10


def through_the_tier(mnt, mib=2 * DRAM):
    path = mnt / 'others'
    with open(path, 'wb') as f:
        for _ in range(mib):
            f.write(os.urandom(MIB))
        os.fsync(f.fileno())
    with open(path, 'rb') as f:
        while f.read(MIB):
            pass


def test_only_an_opener_that_asks_gets_it(lending, root):
    mnt, path = lending.point, root / 'w'
    before = stat(mnt, 'passthrough_opens')
    assert is_passed(path) == 0 and is_passed(path, os.O_RDONLY) == 0
    assert is_passed(root / '.hitrain/grad/w') == 0
    assert stat(mnt, 'passthrough_opens') == before and stat(mnt, 'passthrough_fallbacks') == 0
    assert stat(mnt, 'passthrough_bytes') == 0 and stat(mnt, 'dram_bytes') == DRAM * MIB
    at_rest(mnt, path)
    with asked(path) as m:
        assert used(mnt) >= PARAM
        assert is_passed(path, os.O_RDONLY) == 1                # there is one mode for all
        gradient(root, 'w', 1.0)
        command(root, 'wait')
        assert set(floats(m[:])) == {0.5}
        command(root, 'commit')
    wait_for(lambda: is_passed(path, os.O_RDONLY) == 0, 'the mapping is gone')


def test_an_attribute_asks_for_all_openers(lending, root):
    mnt, folder = lending.point, lending.point / 'shared'
    folder.mkdir()
    os.setxattr(folder, 'user.hitrain.dtype', b'f32')
    os.setxattr(folder, ATTRIBUTE, b'on')
    (folder / 'a').write_bytes(ONE * MIB)
    assert os.getxattr(folder / 'a', ATTRIBUTE) == b'on'
    settle(mnt)
    assert is_passed(folder / 'a', os.O_RDONLY) == 1
    os.setxattr(root / 'w', ATTRIBUTE, b'on')
    assert is_passed(root / 'w') == 1 and is_passed(root / '.hitrain/grad/w') == 1
    os.removexattr(root / 'w', ATTRIBUTE)
    wait_for(lambda: is_passed(root / 'w', os.O_RDONLY) == 0, 'nobody asks any more')
    with fails(errno.EINVAL):
        os.setxattr(root / 'w', ATTRIBUTE, b'off')
    assert 'passthrough' in os.getxattr(root, 'user.hitrain.error').decode()
    os.chmod(folder / 'a', 0o666)
    with fails(errno.EPERM):
        as_user(lambda: os.setxattr(folder / 'a', ATTRIBUTE, b''))


def test_gradients_go_through_windows_of_those_that_ask(lending, root):
    window = root / '.hitrain/grad/w'
    with asked(root / 'w') as w, asked(window) as g:
        assert is_passed(window, ASK) == 1
        g[:] = ONE * (PARAM // 4)
        command(root, 'apply w')
        command(root, 'commit')
        assert set(floats(w[:])) == {0.5}
    at_rest(lending.point, root / 'w')
    assert set(floats((root / 'w').read_bytes())) == {0.5}


def test_the_daemon_has_no_more_memory(lending):
    """The tier is full before, and the files take three quarters."""
    mnt = lending.point
    through_the_tier(mnt)
    full = memory(lending)
    model = mnt / 'big'
    model.mkdir()
    os.setxattr(model, 'user.hitrain.dtype', b'f32')
    for i in range(4):
        (model / f'p{i}').write_bytes(bytes([i]) * (11 * MIB))
    maps = [asked(model / f'p{i}') for i in range(4)]
    assert used(mnt) >= 44 * MIB and stat(mnt, 'passthrough_fallbacks') == 0
    assert all(m[:] == bytes([i]) * (11 * MIB) for i, m in enumerate(maps))
    through_the_tier(mnt)
    assert memory(lending) <= full + 20
    (model / 'more').write_bytes(b'm' * (11 * MIB))
    settle(mnt)
    assert is_passed(model / 'more', ASK) == 0 and stat(mnt, 'passthrough_fallbacks') == 1
    for i, m in enumerate(maps):
        assert m[:] == bytes([i]) * (11 * MIB)
        m[:] = bytes([i + 100]) * (11 * MIB)
        m.close()
    del maps

    def shrinks():
        through_the_tier(mnt, DRAM)
        return used(mnt) == 0
    wait_for(shrinks, 'the tier has all of its memory')
    assert memory(lending) <= full + 20
    for i in range(4):
        assert (model / f'p{i}').read_bytes() == bytes([i + 100]) * (11 * MIB)


def test_a_killed_daemon_loses_what_was_not_committed(lending, root):
    through_the_tier(lending.point, DRAM)
    m = asked(root / 'w')
    m[:] = HALF * (PARAM // 4)
    command(root, 'commit')
    m[:] = bytes(PARAM)
    lending.kill()
    m.close()
    lending.detach()
    lending.assert_clean()
    lending.mount(f'dram={DRAM}M')
    assert set(floats((root / 'w').read_bytes())) == {0.5}


@pytest.mark.parametrize('option', ['passthrough=off', 'passthrough=0'])
def test_it_can_be_turned_off(make_store, option):
    store = make_store()
    store.mount('dram=48M', option)
    root = make_model(store.point, w=PARAM)
    assert is_passed(root / 'w', ASK) == 0
    assert stat(store.point, 'passthrough_opens') == stat(store.point, 'passthrough_fallbacks') == 0


def test_a_fixed_share_is_for_all_openers_and_more_may_ask(make_store):
    store = make_store()
    store.mount('dram=48M', 'passthrough=16M')
    if 'passthrough is off' in store.messages():
        pytest.skip('the kernel or the privileges are not there')
    assert stat(store.point, 'passthrough_bytes') == 16 * MIB
    root = make_model(store.point, w=PARAM)
    assert is_passed(root / 'w') == 1
    other = store.point / 'tensor'
    other.write_bytes(b'')
    os.setxattr(other, 'user.hitrain.dtype', b'f32')
    other.write_bytes(ONE * MIB)
    settle(store.point)
    assert is_passed(other, os.O_RDONLY) == 0
    wait_for(lambda: is_passed(other, ASK) == 1, 'its opener asks')


def test_another_user_gets_a_part_of_what_can_be_lent(lending):
    folder = lending.point / 'users'
    folder.mkdir()
    os.setxattr(folder, 'user.hitrain.dtype', b'f32')
    os.chmod(folder, 0o777)
    for i in range(2):
        (folder / f'f{i}').write_bytes(ONE * (5 * MIB))
        os.chown(folder / f'f{i}', NOBODY, NOBODY)
    settle(lending.point)

    def both():
        fds = [os.open(folder / f'f{i}', ASK) for i in range(2)]
        return [int.from_bytes(fcntl.ioctl(fd, 2 << 30 | 4 << 16 | ord('h') << 8 | 3, bytes(4)), 'little') for fd in fds]
    assert as_user(both) == [1, 0]                              # 36 of 48 MiB


def test_only_who_owns_the_file_or_the_mount_changes_its_mode(lending, root):
    path, flags = root / 'w', os.O_RDONLY | os.O_ASYNC
    os.chmod(path, 0o644)
    assert as_user(lambda: is_passed(path, flags)) == 0
    os.chown(path, NOBODY, NOBODY)
    assert as_user(lambda: is_passed(path, flags)) == 1
    at_rest(lending.point, path)
    os.chown(path, 0, 0)
    os.chown(lending.point, NOBODY, NOBODY)
    assert as_user(lambda: is_passed(path, flags)) == 1


def test_reads_of_those_that_did_not_ask_wait_for_updates(lending, root):
    path = root / 'w'
    with asked(path), open(path, 'rb', 0) as f:
        for step in range(1, 21):
            gradient(root, 'w', 1.0)
            assert set(floats(os.pread(f.fileno(), PARAM, 0))) == {1.0 - step / 2}
            command(root, 'commit')
