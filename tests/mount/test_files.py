# SPDX-License-Identifier: Apache-2.0
"""Plain files on a mount, as programs that know nothing of hitrain use them."""
import errno
import hashlib
import os
import threading

import pytest

from calls import fails, run_threads, sync
from conftest import MIB
from trees import blob, content


# ------------------------------------------------------------------------- trees

def test_names_that_cannot_be(mnt):
    (mnt / 'sub').mkdir()
    for make in (lambda p: p.mkdir(), lambda p: p.touch(), lambda p: os.symlink('x', p)):
        with pytest.raises(OSError) as e:
            make(mnt / '.hitrain' / 'x')
        assert e.value.errno in (errno.EPERM, errno.ENOENT)
        with fails(errno.EPERM):
            make(mnt / 'sub' / '.hitrain')
    assert os.listdir(mnt) == ['sub']


# ------------------------------------------------------------------------- bytes

def test_larger_than_memory(store):
    """Four times the DRAM tier, written and read back by several programs at once."""
    data = {i: blob(32 * MIB, i) for i in range(4)}
    errors = []

    def work(i):
        try:
            (store.point / str(i)).write_bytes(data[i])
            assert (store.point / str(i)).read_bytes() == data[i]
        except Exception as e:  # noqa: B902 - shown by the test
            errors.append(e)
    threads = [threading.Thread(target=work, args=(i,)) for i in data]
    run_threads(threads)
    assert not errors
    store.remount('dram=8M')
    for i in data:
        assert content(store.point / str(i)) == hashlib.sha256(data[i]).hexdigest()


# -------------------------------------------------------------------- attributes

def test_statfs_says_4096(mnt):
    before = os.statvfs(mnt)
    assert before.f_bsize == before.f_frsize == 4096 and before.f_namemax == 255
    assert 128 * MIB < before.f_blocks * 4096 <= 256 * MIB
    (mnt / 'f').write_bytes(blob(20 * MIB))
    os.sync()
    sync(mnt / 'f')
    after = os.statvfs(mnt)
    assert before.f_bavail - after.f_bavail >= 20 * MIB // 4096
    assert os.stat(mnt / 'f').st_blocks * 512 >= 20 * MIB


# ------------------------------------------------------------- programs, crashes

def test_fsync_survives_kill(store):
    mnt, data = store.point, blob(3 * MIB + 17)
    with open(mnt / 'kept', 'wb') as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.mkdir(mnt / 'd')
    with open(mnt / 'd' / 'replaced.new', 'wb') as f:
        f.write(b'whole')
        f.flush()
        os.fsync(f.fileno())
    os.rename(mnt / 'd' / 'replaced.new', mnt / 'd' / 'replaced')
    sync(mnt / 'd')
    (mnt / 'maybe').write_bytes(data)
    store.kill()
    with fails(errno.ENOTCONN):
        os.listdir(mnt)
    store.mount()  # over the dead mount
    assert (mnt / 'kept').read_bytes() == data
    assert (mnt / 'd' / 'replaced').read_bytes() == b'whole'
    if (mnt / 'maybe').exists():  # never synced: any part may be there, but no foreign bytes
        held = (mnt / 'maybe').read_bytes()
        assert all(a in (b, 0) for a, b in zip(held, data))


def test_full_store_can_be_emptied(make_store):
    store = make_store('64M')
    mnt = store.mount('dram=16M')
    written = 0
    with pytest.raises(OSError) as e:
        for i in range(100):
            with open(mnt / f'f{i}', 'wb') as f:
                f.write(blob(MIB, i))
                f.flush()
                os.fsync(f.fileno())
            written += 1
    assert e.value.errno == errno.ENOSPC
    assert written > 20
    for i in range(written):
        assert (mnt / f'f{i}').read_bytes() == blob(MIB, i)
    os.truncate(mnt / 'f0', 10)
    assert (mnt / 'f0').read_bytes() == blob(MIB, 0)[:10]
    for name in os.listdir(mnt):
        os.unlink(mnt / name)
    sync(mnt)
    for i in range(written // 2):
        (mnt / f'g{i}').write_bytes(blob(MIB, i))
    for i in range(written // 2):
        assert (mnt / f'g{i}').read_bytes() == blob(MIB, i)


def test_one_worker_thread(make_store):
    store = make_store()
    mnt = store.mount('dram=16M', flags=('-s',))
    data = {i: blob(8 * MIB, i) for i in range(4)}
    threads = [threading.Thread(target=lambda i=i: (mnt / str(i)).write_bytes(data[i])) for i in data]
    run_threads(threads)
    for i in data:
        assert (mnt / str(i)).read_bytes() == data[i]
