# SPDX-License-Identifier: Apache-2.0
"""Models whose content lies in a vault, as the store has them: places, training, kept steps, recalls, and what is refused.
The vault is a folder with a segment that these tests write.
"""
import errno
import fcntl
import os
import shutil
import struct
import sys
import threading
import time

import numpy as np
import pytest

from calls import sync
from conftest import MIB, ROOT, run, wait_for
from models import new_model, word
from test_roots import command, put_gradient, random

sys.path += [str(ROOT / 'mount-helpers' / 'vault'), str(ROOT / 'mount-helpers' / 'tools')]
from sums import sum64  # noqa: E402

PLACE = struct.Struct('<IIHHIQ16s')
MOST = 200
SIZE = 8 + MOST * PLACE.size
PLACES = 1 << 30 | SIZE << 16 | ord('h') << 8 | 5
TELL = 3 << 30 | SIZE << 16 | ord('h') << 8 | 6
UUID = 'ab' * 16
LEASE, SEGMENT = 0xabcd, 3
ADAMW = 'adamw lr=0.01 weight_decay=0.1'
ELEMENTS = 2 * MIB // 4 + 1000      # three blocks, the last one short
STRANGER = 4711


class Vault:
    """A segment; put() adds bytes and returns their places."""

    def __init__(self, folder):
        self.folder, self.path = folder, folder / 'seg' / f'{LEASE:08x}' / f'{SEGMENT:04x}'
        self.path.parent.mkdir(parents=True)
        self.path.write_bytes(bytes(4096))

    def put(self, data):
        places = []
        with open(self.path, 'ab') as f:
            for index, at in enumerate(range(0, len(data), MIB)):
                block = data[at:at + MIB]
                places.append(PLACE.pack(index, LEASE, SEGMENT, f.tell() // 4096, len(block), sum64(block), bytes(16)))
                f.write(block)
                f.write(bytes(-len(block) % 4096))
                f.flush()
        return places


def fails(error, call, *args, **named):
    """Does the call fail with this error? True, or what it did is in the message."""
    with pytest.raises(OSError) as e:
        call(*args, **named)
    assert e.value.errno == error, e.value
    return True


def has(path, name):
    try:
        return bool(os.getxattr(path, 'user.hitrain.' + name))
    except OSError:
        return False


def set_places(path, places, reserved=0, count=None, ready=lambda: None):
    fd = os.open(path, os.O_RDONLY)
    try:
        head = struct.pack('<II', len(places) if count is None else count, reserved)
        io = bytearray(head + b''.join(places).ljust(MOST * PLACE.size, b'\0'))
        ready()
        fcntl.ioctl(fd, PLACES, io)
    finally:
        os.close(fd)


def tell_places(path, start=0):
    io = bytearray(SIZE)
    struct.pack_into('<I', io, 8, start)
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, TELL, io)
    finally:
        os.close(fd)
    return [bytes(io[8 + i * PLACE.size:8 + (i + 1) * PLACE.size]) for i in range(struct.unpack_from('<I', io)[0])]


@pytest.fixture
def vault(store, tmp_path):
    made = Vault(tmp_path / 'vault')
    assert command(store.point, f'vault {UUID} {made.folder}') == ['ok']
    return made


def begin_cold(path, job='job@2'):
    path.mkdir()
    word(path, 'dtype', 'f32')
    word(path, 'optimizer', ADAMW)
    assert command(path, f'cold {job}') == ['ok']
    return path


def cold_file(path, vault, data):
    with open(path, 'wb') as f:
        f.truncate(len(data))
    set_places(path, vault.put(data))


def cold_model(path, vault, **content):
    begin_cold(path)
    for name, data in content.items():
        cold_file(path / name, vault, data)
    assert command(path, 'commit') == ['ok']
    return path


def w(seed=1):
    return random(ELEMENTS, seed).tobytes()


def cold_bytes(path):
    return int(word(path, 'cold_bytes'))


def states(root, name='w'):
    folder = root / '.hitrain' / 'state' / name
    return {s: (folder / s).read_bytes() for s in sorted(os.listdir(folder))}


def train(root, seed):
    put_gradient(root, 'w', random(ELEMENTS, seed))
    assert command(root, 'commit') == ['ok']


def everything(root):
    return (root / 'w').read_bytes(), states(root)


def settle(root):
    """A recall is over."""
    wait_for(lambda: not has(root, 'recall'), 'the end of a recall')


def test_a_cold_model_is_read_trained_and_stays_after_a_crash(store, vault):
    """Also with the optimizer's state in the vault. All bits are those of a model that was always here."""
    warm = new_model(store.point / 'warm', ADAMW, w=w())
    assert command(warm, 'commit') == ['ok']
    train(warm, 10)
    (data, state) = everything(warm)
    cold = begin_cold(store.point / 'cold')
    cold_file(cold / 'w', vault, data)
    for name, value in state.items():
        if len(value) > 4:
            set_places(cold / '.hitrain' / 'state' / 'w' / name, vault.put(value))
        else:
            (cold / '.hitrain' / 'state' / 'w' / name).write_bytes(value)
    word(cold, 'step', '1')
    assert command(cold, 'commit') == ['ok']
    assert word(cold, 'cold') == 'job@2' and 'user.hitrain.cold' not in os.listxattr(cold)
    assert cold_bytes(cold) >= 3 * len(data) and cold_bytes(cold) == cold_bytes(store.point)
    store.crash()
    assert word(cold, 'cold') == 'job@2' and cold_bytes(cold) >= 3 * len(data)
    assert everything(cold) == (data, state)
    assert int(word(store.point, 'cold_read_bytes')) >= 3 * len(data) and int(word(store.point, 'cold_waits')) > 0
    store.unmount()
    store.mount()
    for root in (warm, cold):
        train(root, 20)
    assert everything(cold) == everything(warm)
    assert cold_bytes(cold) == 0
    assert command(cold, 'commit') == ['ok']
    assert fails(errno.ENODATA, os.getxattr, cold, 'user.hitrain.cold')
    shutil.rmtree(vault.folder)     # nothing needs it any more
    store.unmount()
    store.mount()
    assert everything(cold) == everything(warm)


def test_kept_steps_clones_rollback_and_abort(store, vault):
    data = w()
    root = cold_model(store.point / 'model', vault, w=data)
    assert command(root, 'snapshot first') == ['ok']
    snap = root / '.hitrain' / 'snap' / 'first'
    assert word(snap, 'cold') == 'job@2' and (snap / 'w').read_bytes() == data
    assert command(root, 'clone first copy') == ['ok']
    copy = store.point / 'copy'
    assert word(copy, 'cold') == 'job@2' and cold_bytes(copy) == cold_bytes(root)
    train(root, 10)
    after = everything(root)
    assert cold_bytes(root) == 0
    with open(copy / 'w', 'r+b') as f:
        f.write(b'changed')
    assert command(copy, 'abort') == ['ok']
    assert (copy / 'w').read_bytes() == data
    assert command(root, 'snapshot second', 'rollback first') == ['ok', 'ok']
    assert (root / 'w').read_bytes() == data and cold_bytes(root) > 2 * MIB and word(root, 'cold') == 'job@2'
    store.crash()
    assert (root / 'w').read_bytes() == data
    assert command(root, 'rollback second') == ['ok']
    assert everything(root) == after
    assert command(root, 'forget *') == ['ok']
    shutil.rmtree(copy)
    assert cold_bytes(store.point) == 0


def test_content_does_not_leave_its_root_cold(store, vault):
    data = w()
    root = cold_model(store.point / 'model', vault, w=data)
    assert fails(errno.EXDEV, os.rename, root / 'w', store.point / 'w')
    with open(root / 'w', 'rb') as a, open(store.point / 'out', 'wb') as b:
        assert os.copy_file_range(a.fileno(), b.fileno(), len(data)) > 0
    shutil.copyfile(root / 'w', store.point / 'out')
    sync(store.point / 'out')
    assert cold_bytes(store.point) == cold_bytes(root)
    assert fails(errno.EBUSY, os.removexattr, root, 'user.hitrain.optimizer')
    assert 'recall it first' in word(root, 'error')
    assert fails(errno.EOPNOTSUPP, os.removexattr, root, 'user.hitrain.cold')
    assert fails(errno.EOPNOTSUPP, os.setxattr, root, 'user.hitrain.cold', b'x@1')
    vault.path.unlink()
    assert (store.point / 'out').read_bytes() == data


def test_a_recall_brings_all_or_a_file(store, vault):
    root = cold_model(store.point / 'model', vault, w=w(), v=w(2))
    read = int(word(store.point, 'cold_read_bytes'))
    assert command(root, 'recall w') == ['ok']
    settle(root)
    assert cold_bytes(root / 'w') == 0 and cold_bytes(root / 'v') > 2 * MIB and word(root, 'cold') == 'job@2'
    assert int(word(store.point, 'cold_read_bytes')) - read == cold_bytes(root / 'v')
    assert command(root, 'recall') == ['ok']
    settle(root)
    assert cold_bytes(root) == 0 and fails(errno.ENODATA, os.getxattr, root, 'user.hitrain.cold')
    shutil.rmtree(vault.folder)
    store.crash()
    assert (root / 'w').read_bytes() == w() and (root / 'v').read_bytes() == w(2)


def test_a_recall_that_fails_says_why_and_changes_nothing(store, vault):
    root = cold_model(store.point / 'model', vault, w=w())
    os.rename(vault.path, vault.folder / 'away')
    assert command(root, 'recall') == ['ok']
    settle(root)
    assert 'recall' in word(root, 'error') and cold_bytes(root) > 2 * MIB
    assert fails(errno.EIO, (root / 'w').read_bytes)
    os.rename(vault.folder / 'away', vault.path)
    assert (root / 'w').read_bytes() == w()


def test_hostile_places(store, vault):
    data = w()
    root = begin_cold(store.point / 'model')
    os.chmod(store.point, 0o777)
    path = root / 'w'
    path.write_bytes(b'')
    os.truncate(path, len(data))
    os.chmod(root, 0o777)
    os.chmod(path, 0o666)
    places = vault.put(data)
    good = PLACE.unpack(places[0])

    def refused(error, places=None, path=path, **how):
        places = places or [PLACE.pack(*good[:4], *how.pop('tail', good[4:]))]
        assert fails(error, set_places, path, places, **how)
    os.seteuid(STRANGER)
    try:
        refused(errno.EPERM)
        assert fails(errno.EPERM, tell_places, path)
        assert command(root, 'cold other@1')[0].startswith('error')
        assert command(store.point, f'vault {UUID} /elsewhere')[0].startswith('error')
    finally:
        os.seteuid(0)
    refused(errno.EINVAL, reserved=1)
    refused(errno.EINVAL, count=MOST + 1)
    refused(errno.EINVAL, count=0xffffffff)
    for at, wrong in ((0, 3), (0, 0xffffffff), (1, 1 << 20), (1, 0xffffffff), (2, 1 << 15), (3, 0), (3, 8192), (3, 8000),
                      (4, 0), (4, 0xffffff), (4, MIB - 1), (4, 1 << 24 | MIB), (4, 2 << 24 | MIB), (4, 77 << 24 | MIB)):
        refused(errno.EINVAL, [PLACE.pack(*good[:at], wrong, *good[at + 1:])])
    plain = store.point / 'plain'
    plain.write_bytes(bytes(MIB))
    refused(errno.EINVAL, path=plain)
    warm = new_model(store.point / 'warm', ADAMW, w=data)
    refused(errno.EINVAL, path=warm / 'w')
    assert fails(errno.ENOTTY, set_places, store.point / '.hitrain' / 'ctl', places)
    set_places(path, places)
    refused(errno.EEXIST)
    assert [PLACE.unpack(p)[:6] for p in tell_places(path)] == [PLACE.unpack(p)[:6] for p in places]
    assert [PLACE.unpack(p)[0] for p in tell_places(path, 2)] == [2]
    assert command(root, 'cold other@1')[0].startswith('error') and word(root, 'cold') == 'job@2'
    assert command(store.point, f'vault {"cd" * 16} {vault.folder}')[0].startswith('error')
    assert path.read_bytes() == data
    assert command(root, 'abort') == ['ok'] and cold_bytes(store.point) == 0


def test_wrong_bytes_and_fsck(store, vault):
    """A wrong block is an error, never other bytes; the check takes what lies in the vault for sound."""
    data = w()
    root = cold_model(store.point / 'model', vault, w=data)
    with open(vault.path, 'r+b') as f:
        f.seek(4096 + MIB + 77)
        f.write(b'other bytes')
    with open(root / 'w', 'rb', buffering=0) as f:
        assert f.read(MIB) == data[:MIB]
        f.seek(MIB)
        assert fails(errno.EIO, f.read, 4096)
    assert 'vault-damage' in (store.point / '.hitrain' / 'events').read_text()
    store.unmount()
    checked = run('hitrain-fsck', store.image)
    assert '3 chunks, 3 MiB, in the vault and not read' in checked.stdout
    store.mount(f'vault=file://{vault.folder}', 'vault_timeout=5', 'vault_slots=4')
    assert word(store.point, 'vault').split()[:2] == [UUID, f'file://{vault.folder}']
    with open(root / 'w', 'rb') as f:
        assert f.read(MIB) == data[:MIB]


def test_a_silent_vault_delays_its_model_alone(store, tmp_path):
    """The first read fails after the timeout, later ones at once, and other models commit all the time."""
    made = Vault(tmp_path / 'vault')
    store.unmount()
    store.mount('vault_timeout=2')
    assert command(store.point, f'vault {UUID} test:{made.folder}') == ['ok']
    root = cold_model(store.point / 'model', made, w=w())
    warm = new_model(store.point / 'warm', ADAMW, w=w())
    assert command(warm, 'commit') == ['ok']
    (made.folder / '~faults').write_text('**lost-before any\n')
    waits = threading.Thread(target=lambda: fails(errno.EIO, (root / 'w').read_bytes))
    waits.start()
    for seed in range(3):
        train(warm, seed)
    waits.join()
    wait_for(lambda: 'state=silent' in word(store.point, 'vault'), 'a vault that is silent')
    before = time.monotonic()
    fails(errno.EIO, (root / 'w').read_bytes)
    with open(root / '.hitrain' / 'grad' / 'w', 'wb') as f:
        f.write(random(ELEMENTS, 1).tobytes())
    assert command(root, 'commit')[0].startswith('error')
    assert command(root, 'abort') == ['ok']
    assert time.monotonic() - before < 10
    assert command(root, 'recall') == ['ok']
    settle(root)
    assert 'recall' in word(root, 'error')
    for name in ('~faults', '~used'):
        (made.folder / name).unlink(missing_ok=True)
    wait_for(lambda: 'state=answers' in word(store.point, 'vault'), 'a vault that answers again', 60)
    assert (root / 'w').read_bytes() == w()
    train(root, 9)
    events = (store.point / '.hitrain' / 'events').read_text()
    assert 'vault-silent' in events and 'vault-answers' in events


@pytest.fixture
def mute(store, tmp_path):
    """silence(): the store's vault answers no read from now on, for as long as a mount waits at most."""
    made = Vault(tmp_path / 'vault')
    store.unmount()
    store.mount('vault_timeout=40')
    assert command(store.point, f'vault {UUID} test:{made.folder}') == ['ok']
    made.silence = lambda: (made.folder / '~faults').write_text('**lost-before any\n')
    return made


def test_a_worker_that_others_share_never_waits_for_a_vault(store, mute):
    """Updates of a cold model wait, more of them than there are workers. Another model trains beside them at once."""
    count = 2 * len(os.sched_getaffinity(0)) + 6
    root = begin_cold(store.point / 'model')
    with open(root / 'w', 'wb') as f:
        f.truncate(count * MIB)
    block = PLACE.unpack(mute.put(bytes(MIB))[0])
    set_places(root / 'w', [PLACE.pack(i, *block[1:]) for i in range(count)])
    warm = new_model(store.point / 'warm', ADAMW, w=w())
    assert command(root, 'commit') == command(warm, 'commit') == ['ok']
    mute.silence()
    put_gradient(root, 'w', np.ones(count * MIB // 4, np.float32))
    began = time.monotonic()
    for seed in range(3):
        train(warm, seed)
    assert time.monotonic() - began < 20 and 'state=silent' not in word(store.point, 'vault')
    (mute.folder / '~faults').unlink()
    assert command(root, 'commit') == ['ok'] or command(root, 'abort') == ['ok']


def test_an_unmount_ends_a_recall_at_once(store, mute):
    root = cold_model(store.point / 'model', mute, w=w())
    mute.silence()
    assert command(root, 'recall') == ['ok'] and word(root, 'recall') == 'running'
    began = time.monotonic()
    store.unmount()
    assert time.monotonic() - began < 20
    (mute.folder / '~faults').unlink()
    store.mount()
    assert (root / 'w').read_bytes() == w()


def test_a_file_counts_what_waited_for_the_vault(store, vault):
    root = cold_model(store.point / 'model', vault, w=w(), v=w(2))
    assert word(root / 'w', 'cold_waits') == word(root / 'v', 'cold_waits') == '0'
    (root / 'w').read_bytes()
    read = int(word(root / 'w', 'cold_waits'))
    assert 0 < read == int(word(store.point, 'cold_waits')) and word(root / 'v', 'cold_waits') == '0'
    put_gradient(root, 'v', random(ELEMENTS, 1))
    assert command(root, 'commit') == ['ok']
    assert int(word(root / 'v', 'cold_waits')) == 3 and int(word(root / 'w', 'cold_waits')) == read


@pytest.mark.parametrize('how', ['commit', 'abort'])
def test_a_root_is_cold_while_places_are_set_below_it(store, vault, how):
    """A commit takes the attribute from a root without cold content, and an abort takes it back, at any moment of the call."""
    one, done = PLACE.unpack(vault.put(bytes(MIB))[0]), 0
    places = [PLACE.pack(i, *one[1:]) for i in range(4)]
    for n in range(300):
        root = begin_cold(store.point / f'model{n}')
        with open(root / 'w', 'wb') as f:
            f.truncate(4 * MIB)
        start, failed = threading.Barrier(2), []

        def give(root=root, start=start, failed=failed):
            try:
                set_places(root / 'w', places, ready=start.wait)
            except OSError as e:
                failed.append(e.errno)
        setter = threading.Thread(target=give)
        setter.start()
        fd = os.open(root / '.hitrain/ctl', os.O_RDWR)
        start.wait()
        end = time.perf_counter() + n % 50 * 1e-5
        while time.perf_counter() < end:
            pass
        os.write(fd, f'{how}\n'.encode())
        os.close(fd)
        setter.join()
        assert set(failed) <= {errno.EINVAL, errno.ESTALE, errno.ENOENT}
        assert has(root, 'cold') or cold_bytes(root) == 0
        done += not failed
        shutil.rmtree(root)
    assert done


def test_a_recall_into_a_full_store_ends_steps_that_a_vault_has(make_store, tmp_path):
    store = make_store(size='64M')
    mnt, vault = store.mount(), Vault(tmp_path / 'vault')
    assert command(mnt, f'vault {UUID} {vault.folder}') == ['ok']
    root = cold_model(mnt / 'model', vault, w=w())
    other = new_model(mnt / 'other', 'sgd lr=1 retain=8', v=b'')
    for step in range(1, 5):
        (other / 'v').write_bytes(os.urandom(4 * MIB))
        assert command(other, f'snapshot s{step}', *[f'archived s{step} job {"ab" * 16}'] * (step < 3)) == ['ok'] * (1 + (step < 3))
    kept = len(os.listdir(other / '.hitrain' / 'snap'))
    free = int(word(mnt, 'free_bytes'))
    (mnt / 'fill').write_bytes(os.urandom(free // MIB * MIB))
    sync(mnt / 'fill')
    assert int(word(mnt, 'free_bytes')) < 2 * MIB and len(os.listdir(other / '.hitrain' / 'snap')) == kept
    assert command(root, 'recall') == ['ok']
    settle(root)
    assert cold_bytes(root) == 0 and (root / 'w').read_bytes() == w()
    assert sorted(os.listdir(other / '.hitrain' / 'snap')) == ['s2', 's3', 's4']
