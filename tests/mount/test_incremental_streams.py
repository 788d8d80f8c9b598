# SPDX-License-Identifier: Apache-2.0
"""hitrainctl archive --from and restore --base through a pipe: only what differs from a step that both stores keep."""
import errno
import fcntl
import json
import os
import struct
import subprocess

import pytest

from calls import fails
from conftest import BIN, MIB, SECONDS_MAX, run, wait_for
from test_roots import command, put_gradient, word
from test_step_streams import ADAMW, STAGING, content, digest, gradient, kept_step, make_model, receive, send, step
from trees import ACL_FILE, NOBODY, blob, describe, make_carried_tree


def receive_on(base, stream, path):
    return subprocess.run([BIN / 'hitrainctl', 'restore', '-', path, f'--base={base}', '--json'], input=stream, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=SECONDS_MAX)


def device_bytes(mnt, key):
    return int(word(mnt, f'device_{key}'))


@pytest.fixture
def stores(make_store):
    """Without commits by the clock: on a busy machine these would come while figures are compared."""
    pair = make_store(), make_store()
    return pair, [s.mount('commit=3600') for s in pair]


@pytest.fixture
def both(stores):
    """Two stores that keep step 1 of one model, under different names."""
    pair, (a, b) = stores
    root = make_model(a / 'model')
    (root / 'frozen').write_bytes(blob(5 * MIB + 5))
    kept_step(root, 10)
    done = receive(send(root, '1'), b / 'copy')
    assert done.returncode == 0, done.stderr
    command(b / 'copy', 'snapshot old')
    return pair, a / 'model', b / 'copy'


def test_a_step_arrives_as_its_changes(both):
    """The received model has the same digest, and trains on to the same bits."""
    _, root, copy = both
    kept_step(root, 20)
    stream = send(root, '2', '--from=1')
    assert len(stream) < len(send(root, '2')) - 5 * MIB
    done = receive_on(copy, stream, copy.parent / 'new')
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer['from'] == 1 and answer['step'] == 2 and 'digest' not in answer
    new = copy.parent / 'new'
    command(new, 'snapshot')
    assert digest(new, '2') == digest(root, '2')
    for model in (root, new):
        step(model, 30)
    assert content(root, 'w', 'deep/v') == content(new, 'w', 'deep/v')


def test_only_what_differs_is_read_and_written(both):
    pair, root, copy = both
    with open(root / 'frozen', 'r+b') as f:
        f.seek(3 * MIB + 100)
        f.write(b'changed')
    kept_step(root, 20)
    known = digest(root, '1')
    pair[0].unmount()
    pair[0].mount('commit=3600', 'background=off')
    read = device_bytes(root.parent, 'read_bytes')
    stream = send(root, '2', '--from=1', f'--digest={known}')
    read = device_bytes(root.parent, 'read_bytes') - read
    trained = 2 * 300_000 * 4 * 3  # w and deep/v with two moments each
    assert trained < read < trained + 2 * MIB + MIB // 2
    assert len(stream) < trained + MIB + MIB // 4
    written = device_bytes(copy.parent, 'written_bytes')
    assert receive_on(copy, stream, copy.parent / 'new').returncode == 0
    assert device_bytes(copy.parent, 'written_bytes') - written < trained + 3 * MIB
    assert (copy.parent / 'new' / 'frozen').read_bytes() == (root / 'frozen').read_bytes()


def test_nothing_is_read_ahead_of_a_change(both):
    """Of each large file one block differs: the store reads no other one."""
    pair, root, _ = both
    names = [f'large{i}' for i in range(4)]
    for seed, name in enumerate(names):
        (root / name).write_bytes(blob(8 * MIB) if seed == 0 else os.urandom(8 * MIB))
    command(root, 'snapshot before')
    for name in names:
        with open(root / name, 'r+b') as f:
            f.write(os.urandom(2 * MIB))
    command(root, 'snapshot after')
    known = digest(root, 'before')
    pair[0].unmount()
    pair[0].mount('background=off')
    read = device_bytes(root.parent, 'read_bytes')
    stream = send(root, 'after', '--from=before', f'--digest={known}')
    read = device_bytes(root.parent, 'read_bytes') - read
    assert 8 * MIB < len(stream) < 9 * MIB and 8 * MIB <= read <= 8 * MIB * 1.05


def test_state_that_did_not_change_is_not_sent(both):
    """Nor is that of a parameter that has another name now."""
    _, root, copy = both
    word(root, 'optimizer', ADAMW + ' partial=1')
    os.rename(root / 'deep' / 'v', root / 'moved')
    put_gradient(root, 'w', gradient(300_000, 50, 'f32'))
    command(root, 'commit', 'snapshot two')
    stream = send(root, 'two', '--from=1')
    assert len(stream) < 300_000 * 4 * 3 + 65536
    assert receive_on(copy, stream, copy.parent / 'new').returncode == 0
    kept = root / '.hitrain' / 'snap' / 'two'
    assert content(copy.parent / 'new', 'w', 'moved') == content(kept, 'w', 'moved')


def test_masters_of_two_bytes_train_on_to_the_same_bits(stores):
    """Three objects make a master: one alone may not decide that it is the same."""
    _, (a, b) = stores
    root, copy, new = make_model(a / 'model', 'bf16'), b / 'copy', b / 'new'
    kept_step(root, 10, 'bf16')
    assert receive(send(root, '1'), copy).returncode == 0
    command(copy, 'snapshot')
    word(root, 'optimizer', ADAMW + ' partial=1')
    put_gradient(root, 'w', gradient(300_000, 50, 'bf16'))
    command(root, 'commit', 'snapshot two')
    stream = send(root, 'two', '--from=1')
    assert len(stream) < 300_000 * (2 + 3 * 4) + 65536  # w with its master and two moments
    done = receive_on(copy, stream, new)
    assert done.returncode == 0, done.stderr
    for model in (root, new):
        step(model, 70, 'bf16')
    assert content(root, 'w', 'deep/v') == content(new, 'w', 'deep/v')


def test_names_that_came_went_and_moved(stores):
    """Deleted, renamed, truncated, grown, linked, unlinked and replaced by other kinds, with attributes and lists."""
    pair, (a, b) = stores
    root = a / 'model'
    root.mkdir()
    make_carried_tree(root)
    (root / 'big').write_bytes(blob(4 * MIB + 3, 99))
    (root / 'cut').write_bytes(blob(3 * MIB, 98))
    (root / 'grown').write_bytes(blob(2 * MIB + 9, 97))
    word(root, 'optimizer', ADAMW)
    command(root, 'snapshot one')
    assert receive(send(root, 'one'), b / 'copy').returncode == 0
    command(b / 'copy', 'snapshot one')
    os.rename(root / 'big', root / 'deep' / 'moved')
    os.truncate(root / 'cut', MIB + 77)
    os.truncate(root / 'grown', 4 * MIB)
    os.unlink(root / 'link-1')
    (root / 'link-1').write_bytes(blob(65_537, 4))
    os.unlink(root / 'holes')
    (root / 'holes').mkdir()
    (root / 'holes' / 'inside').write_bytes(b'x')
    for i in range(200):
        os.unlink(root / 'deep' / 'er' / f'{i}')
    os.rmdir(root / 'deep' / 'er')
    os.symlink('/etc/passwd', root / 'deep' / 'er')
    os.link(root / 'deep' / 'moved', root / 'again')
    os.setxattr(root / 'grown', 'user.mine', b'value')
    os.setxattr(root / 'grown', 'system.posix_acl_access', ACL_FILE)
    os.chmod(root / 'cut', 0o400)
    command(root, 'snapshot two')
    stream = send(root, 'two', '--from=one')
    assert len(stream) < 2 * MIB  # the moved file is found again under its new name
    done = receive_on(b / 'copy', stream, b / 'new')
    assert done.returncode == 0, done.stderr
    sent, got = describe(root / '.hitrain' / 'snap' / 'two'), describe(b / 'new')
    assert sent.keys() == got.keys()
    assert {k: (sent[k], got[k]) for k in sent if sent[k] != got[k]} == {}
    command(b / 'new', 'snapshot two')
    assert digest(b / 'new', 'two') == digest(root, 'two')
    for store in pair:
        store.unmount()


def refused(done, folder, names, *why):
    assert done.returncode == 1 and all(w in done.stderr.decode() for w in why), done.stderr
    assert sorted(os.listdir(folder)) == sorted(names)


def test_a_stream_without_its_base_is_refused(both, make_store):
    _, root, copy = both
    folder, new = copy.parent, copy.parent / 'new'
    kept_step(root, 20)
    stream = send(root, '2', '--from=1')
    refused(receive(stream, new), folder, ['copy'], 'changes since step 1 alone', '--base=ROOT')
    refused(receive_on(folder, stream, new), folder, ['copy'], 'no model root')
    command(copy, 'forget old')
    refused(receive_on(copy, stream, new), folder, ['copy'], 'keeps no step 1 with digest')
    (copy / 'rng').write_bytes(b'other')
    command(copy, 'snapshot old')  # a step of the same number
    refused(receive_on(copy, stream, new), folder, ['copy'], 'keeps no step 1 with digest')
    refused(receive_on(root, stream, new), folder, ['copy'], 'is in another store')
    other = send(root, '2', '--from=1', '--digest=' + '0' * 32)
    refused(receive_on(root, other, root.parent / 'new'), root.parent, ['model'], 'keeps no step 1 with digest 0000')


def test_a_cut_or_damaged_stream_leaves_nothing(both):
    _, root, copy = both
    kept_step(root, 20)
    stream = send(root, '2', '--from=1')
    for cut in (70, 150, len(stream) // 2, len(stream) - 1):
        refused(receive_on(copy, stream[:cut], copy.parent / 'new'), copy.parent, ['copy'], 'is cut')
    damaged = bytearray(stream)
    damaged[64 + 48 + 3] ^= 1  # in the base's record
    refused(receive_on(copy, bytes(damaged), copy.parent / 'new'), copy.parent, ['copy'], 'do not match their checksum')
    assert receive_on(copy, stream, copy.parent / 'new').returncode == 0


def begin_receiving(base, stream, path):
    """A receiver that has half of the changes."""
    p = subprocess.Popen([BIN / 'hitrainctl', 'restore', '-', path, f'--base={base}'], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL)
    p.stdin.write(stream[:len(stream) // 2])
    p.stdin.flush()
    wait_for(lambda: [n for n in os.listdir(path.parent) if n.startswith(STAGING) and (path.parent / n / 'model' / 'deep').exists()],
             'a part of the step')
    return p


@pytest.mark.parametrize('what', ['receiver', 'daemon'])
def test_a_kill_while_changes_are_received_leaves_the_base_alone(both, what):
    pair, root, copy = both
    kept_step(root, 20)
    stream, was, folder = send(root, '2', '--from=1'), digest(copy, 'old'), copy.parent
    p = begin_receiving(copy, stream, folder / 'new')
    if what == 'receiver':
        p.kill()
        p.wait(SECONDS_MAX)
    else:
        pair[1].kill()
        try:
            p.communicate(stream[len(stream) // 2:], timeout=SECONDS_MAX)
        except BrokenPipeError:
            pass
        assert p.wait(SECONDS_MAX) == 1
        pair[1].mount()
    assert not (folder / 'new').exists() and digest(copy, 'old') == was
    assert receive_on(copy, stream, folder / 'new').returncode == 0
    assert sorted(os.listdir(folder)) == ['copy', 'new']
    command(folder / 'new', 'snapshot')
    assert digest(folder / 'new', '2') == digest(root, '2')
    pair[1].unmount()
    pair[1].assert_clean()
    pair[1].mount()


def test_a_chain_of_steps(both):
    """Each received step is the base of the next one; a step that is not newer can be sent as well."""
    _, root, copy = both
    at = copy
    for n in (2, 3):
        kept_step(root, 10 * n)
        to = copy.parent / f'step-{n}'
        assert receive_on(at, send(root, str(n), f'--from={n - 1}'), to).returncode == 0
        command(to, 'snapshot')
        at = to
    assert digest(at, '3') == digest(root, '3')
    back = copy.parent / 'back'
    assert receive_on(at, send(root, '1', '--from=3'), back).returncode == 0
    command(back, 'snapshot')
    assert digest(back, '1') == digest(root, '1')


def test_wrong_usage(both):
    _, root, _ = both
    done = run('hitrainctl', 'archive', root, '1', '-', '--from=9', check=False)
    assert done.returncode == 1 and 'no kept step 9' in done.stderr
    done = run('hitrainctl', 'archive', root, '1', '-', '--digest=' + '0' * 32, check=False)
    assert done.returncode == 2 and '--from' in done.stderr
    assert run('hitrainctl', 'verify', root, '1', '--from=1', check=False).returncode == 2


SAME = 3 << 30 | 32 << 16 | ord('h') << 8 | 2  # HT_IOCTL_SAME


def same(path, other, offset=0):
    """Has the other inode the same bytes from there on? Their end, or None."""
    fd = os.open(path, os.O_RDONLY)
    try:
        _, _, end, is_same = struct.unpack('=4Q', fcntl.ioctl(fd, SAME, struct.pack('=4Q', other, offset, 0, 0)))
        return end if is_same else None
    finally:
        os.close(fd)


def test_the_store_compares_kept_steps_of_one_model_alone(both):
    """For a caller that may read both. A number may come from anywhere."""
    pair, root, _ = both
    kept_step(root, 20)
    command(root, 'snapshot again')
    snap = root / '.hitrain' / 'snap'
    ino = {n: os.stat(snap / n / 'frozen').st_ino for n in ('1', '2')}
    for at in (0, MIB + 3, 5 * MIB + 5, 1 << 40):
        assert same(snap / '2' / 'frozen', ino['1'], at) > at
    assert same(snap / '2' / 'w', os.stat(snap / '1' / 'w').st_ino) is None
    assert same(snap / 'again' / 'w', os.stat(snap / '2' / 'w').st_ino) > 0
    state = {n: snap / n / '.hitrain' / 'state' / 'w' / 'exp_avg' for n in ('1', '2', 'again')}
    assert same(state['again'], os.stat(state['2']).st_ino) > 0 and same(state['2'], os.stat(state['1']).st_ino) is None
    other = make_model(root.parent / 'other')
    command(other, 'snapshot x')
    for error, path, number in ((errno.EINVAL, root / 'frozen', ino['1']), (errno.EINVAL, snap / '1' / 'frozen', os.stat(root / 'frozen').st_ino),
                                (errno.EINVAL, snap / '1' / 'frozen', os.stat(other / '.hitrain/snap/x/w').st_ino),
                                (errno.EINVAL, snap / '1' / 'frozen', os.stat(snap / '1' / 'deep').st_ino),
                                (errno.EINVAL, snap / '1' / 'frozen', os.stat(state['1']).st_ino),
                                (errno.EINVAL, state['1'], os.stat(snap / '1' / '.hitrain' / 'state' / 'w' / 'step').st_ino),
                                (errno.EINVAL, state['1'], ino['1']), (errno.EINVAL, root / '.hitrain' / 'stats', ino['1']),
                                (errno.ESTALE, snap / '1' / 'frozen', 0), (errno.ESTALE, snap / '1' / 'frozen', 1 << 40)):
        with fails(error):
            same(path, number)
    with fails(errno.EINVAL):
        same(snap / '2' / 'frozen', ino['1'], (1 << 64) - 1)
    os.chmod(root, 0o755)
    os.chmod(root.parent, 0o755)
    for name, mode in (('frozen', 0o600), ('frozen', 0o644)):
        os.chmod(root / name, mode)
        command(root, f'snapshot {mode}x')
    read = f'import fcntl, os, struct; fcntl.ioctl(os.open("{snap}/{0o644}x/frozen", 0), {SAME}, struct.pack("=4Q", int(os.sys.argv[1]), 0, 0, 0))'
    user = {'user': NOBODY, 'group': NOBODY, 'extra_groups': [], 'stderr': subprocess.PIPE, 'timeout': SECONDS_MAX}
    closed, opened = (os.stat(snap / f'{m}x' / 'frozen').st_ino for m in (0o600, 0o644))
    assert b'Permission denied' in subprocess.run(['/usr/bin/python3', '-c', read, str(closed)], **user).stderr
    assert subprocess.run(['/usr/bin/python3', '-c', read, str(opened)], **user).returncode == 0
