# SPDX-License-Identifier: Apache-2.0
"""hitrainctl archive, restore and verify through a pipe: a step goes from one store to another whole, or not at all."""
import errno
import json
import os
import signal
import stat
import subprocess
import time

import pytest

from calls import fails, sync
from conftest import BIN, SECONDS_MAX, needs, run, wait_for
from models import new_model
from test_roots import command, put_gradient, random, word
from trees import ACL_FOLDER, describe, make_tree

ADAMW = 'adamw lr=0.01 weight_decay=0.1'
STAGING = '.hitrain-receive-'
NOBODY = 65534


def bf16(values):
    return (values.view('u4') >> 16).astype('u2')


def gradient(n, seed, dtype):
    return random(n, seed) if dtype == 'f32' else bf16(random(n, seed))


def make_model(root, dtype='f32', elements=300_000):
    first, second = gradient(elements, 0, dtype).tobytes(), gradient(elements, 1, dtype).tobytes()
    return new_model(root, ADAMW, dtype, **{'w': first, 'deep/v': second, 'rng': b'state of the generator'})


def step(root, seed, dtype='f32', elements=300_000):
    for i, name in enumerate(('w', 'deep/v')):
        put_gradient(root, name, gradient(elements, seed + i, dtype))
    (root / 'rng').write_bytes(b'after %d' % seed)
    sync(root)


def kept_step(root, *words, **more):
    """step(), and its snapshot."""
    step(root, *words, **more)
    command(root, 'snapshot')


def content(root, *names):
    state = [f'.hitrain/state/{n}/{s}' for n in names for s in os.listdir(root / '.hitrain' / 'state' / n)]
    return {n: (root / n).read_bytes() for n in (*names, *state)}


def send(root, name='2', *options):
    done = subprocess.run([BIN / 'hitrainctl', 'archive', root, name, '-', *options], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    return done.stdout


def receive(stream, path, **how):
    return subprocess.run([BIN / 'hitrainctl', 'restore', '-', path], input=stream, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=SECONDS_MAX, **how)


def digest(root, name):
    return json.loads(run('hitrainctl', 'verify', root, name, '--json').stdout)['digest']


@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_a_received_step_trains_on_to_the_same_bits(stores, dtype):
    """With masters of two bytes, too. The digest is that of the content, and does not depend on the store."""
    _, (a, b) = stores
    make_model(a / 'model', dtype)
    for seed in (10, 20):
        step(a / 'model', seed, dtype)
    run('hitrainctl', 'snapshot', a / 'model')
    step(a / 'model', 30, dtype)
    after = content(a / 'model', 'w', 'deep/v')
    done = receive(send(a / 'model'), b / 'model')
    assert done.returncode == 0, done.stderr
    assert word(b / 'model', 'step') == word(b / 'model', 'durable_step') == '2'
    assert (b / 'model' / 'rng').read_bytes() == b'after 20'
    run('hitrainctl', 'snapshot', b / 'model')
    assert digest(a / 'model', '2') == digest(b / 'model', '2') and digest(a / 'model', '2') in done.stdout.decode()
    step(b / 'model', 30, dtype)
    assert content(b / 'model', 'w', 'deep/v') == after
    for root in (a / 'model', b / 'model'):
        command(root, 'snapshot')
    assert digest(a / 'model', '3') == digest(b / 'model', '3') != digest(a / 'model', '2')


def test_a_received_step_survives_a_kill(stores):
    pair, (a, b) = stores
    make_model(a / 'model')
    step(a / 'model', 10)
    command(a / 'model', 'snapshot now')
    assert receive(send(a / 'model', 'now'), b / 'model').returncode == 0
    was = content(b / 'model', 'w', 'deep/v')
    pair[1].crash()
    assert content(b / 'model', 'w', 'deep/v') == was and word(b / 'model', 'step') == '1'


def test_everything_of_a_tree_arrives(stores):
    """Names, owners, modes, times, attributes, access lists, links and holes."""
    _, (a, b) = stores
    root = a / 'model'
    root.mkdir()
    make_tree(root, sockets=False)
    for name in ('fifo', 'device', 'deep/er/link-3'):
        if os.path.lexists(root / name):
            os.unlink(root / name)
    os.removexattr(root / 'link-1', 'trusted.binary')
    os.chmod(root / 'deep' / 'size-1', 0o751)
    os.unlink(root / 'symbolic-too')
    word(root, 'optimizer', ADAMW)
    command(root, 'snapshot tree')
    done = receive(send(root, 'tree'), b / 'model')
    assert done.returncode == 0, done.stderr
    sent, got = describe(root / '.hitrain' / 'snap' / 'tree'), describe(b / 'model')
    assert sent.keys() == got.keys()
    assert {k: (sent[k], got[k]) for k in sent if sent[k] != got[k]} == {}
    for store in stores[0]:
        store.unmount()


def test_a_tree_with_a_device_or_a_fifo_is_not_sent(stores):
    _, (a, b) = stores
    make_model(a / 'model')
    os.mkfifo(a / 'model' / 'deep' / 'fifo')
    command(a / 'model', 'snapshot x')
    done = run('hitrainctl', 'archive', a / 'model', 'x', '-', check=False)
    assert done.returncode == 1 and 'deep/fifo is a device, a socket or a FIFO' in done.stderr


def test_no_received_file_is_setuid(stores):
    _, (a, b) = stores
    make_model(a / 'model')
    os.chmod(a / 'model' / 'rng', 0o6755)
    command(a / 'model', 'snapshot x')
    assert receive(send(a / 'model', 'x'), b / 'model').returncode == 0
    assert stat.S_IMODE(os.stat(b / 'model' / 'rng').st_mode) == 0o755


@pytest.fixture
def stream(stores):
    _, (a, _) = stores
    make_model(a / 'model')
    step(a / 'model', 10)
    command(a / 'model', 'snapshot')
    return send(a / 'model', '1')


def test_a_cut_or_damaged_stream_leaves_nothing(stores, stream):
    _, (_, b) = stores
    damaged = bytearray(stream)
    damaged[len(stream) // 2 + 9999] ^= 4  # in a block
    for bytes_, why in ((stream[:-1], 'is cut'), (stream[:len(stream) // 3], 'is cut'), (stream[:70], 'is cut'), (b'', 'is cut'),
                        (stream + b'\0', 'after the end mark'), (bytes(damaged), 'do not match their checksum'),
                        (b'PK' + stream, 'no object of a vault')):
        done = receive(bytes_, b / 'model')
        assert done.returncode == 1 and why in done.stderr.decode() and 'at byte' in done.stderr.decode()
        assert os.listdir(b) == []
    run('hitrainctl', 'restore', '-', b / 'model', check=False)
    assert receive(stream, b / 'model').returncode == 0


def test_a_directory_that_is_there_is_left_alone(stores, stream):
    _, (_, b) = stores
    (b / 'model').mkdir()
    done = receive(stream, b / 'model')
    assert done.returncode == 1 and 'is there already' in done.stderr.decode() and os.listdir(b) == ['model']


@pytest.mark.parametrize('folder', ['', 'deep'])
def test_nothing_is_received_into_a_model(stores, stream, folder):
    """The command that ends kept steps would reach the model around: it keeps its own."""
    _, (a, _) = stores
    root = a / 'model'
    command(root, 'snapshot more')
    was = describe(root)
    for bytes_ in (b'garbage', stream[:len(stream) // 2], stream):
        done = receive(bytes_, root / folder / 'copy')
        assert sorted(os.listdir(root / '.hitrain' / 'snap')) == ['1', 'more']
        assert done.returncode == 1 and b'outside of model roots' in done.stderr and describe(root) == was


def test_a_directory_that_comes_into_a_model_ends_none_of_its_kept_steps(stores, stream):
    """The directory above becomes a model when the header alone has come, and nothing comes after it."""
    _, (_, b) = stores
    (b / 'home').mkdir()
    p = begin_receiving(stream[:128], b / 'home' / 'model')
    wait_for(lambda: left(b / 'home') and part(b / 'home').exists(), 'the hidden directory')
    word(b / 'home', 'optimizer', ADAMW)
    command(b / 'home', 'snapshot one', 'snapshot two')
    p.communicate(timeout=SECONDS_MAX)
    assert p.returncode == 1 and sorted(os.listdir(b / 'home' / '.hitrain' / 'snap')) == ['one', 'two']
    assert left(b / 'home') == []


def test_a_step_is_received_on_a_store_only(stream, tmp_path):
    done = receive(stream, tmp_path / 'model')
    assert done.returncode == 1 and 'not on a hitrain mount' in done.stderr.decode() and not os.listdir(tmp_path)


def test_a_full_store_receives_nothing(make_store, stream):
    small = make_store('16M').mount()
    done = receive(stream, small / 'model')
    assert done.returncode == 1 and 'No space left' in done.stderr.decode() and os.listdir(small) == []


def begin_receiving(stream, path):
    """A receiver that has half of the stream."""
    p = subprocess.Popen([BIN / 'hitrainctl', 'restore', '-', path], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                         stderr=subprocess.PIPE)
    p.stdin.write(stream[:len(stream) // 2])
    p.stdin.flush()
    return p


def left(folder):
    return [n for n in os.listdir(folder) if n.startswith(STAGING)]


def part(folder):
    """Of a model that is being received."""
    return folder / left(folder)[0] / 'model'


def test_a_killed_receiver_leaves_a_directory_that_the_next_one_removes(stores, stream):
    _, (_, b) = stores
    (b / 'other').mkdir()
    p = begin_receiving(stream, b / 'model')
    wait_for(lambda: left(b), 'the hidden directory')
    alive = begin_receiving(stream, b / 'more')
    wait_for(lambda: len(left(b)) == 2, 'another one')
    p.kill()
    p.wait(SECONDS_MAX)
    assert receive(stream, b / 'model').returncode == 0
    assert len(left(b)) == 1  # that of the living one
    _, said = alive.communicate(stream[len(stream) // 2:], timeout=SECONDS_MAX)
    assert alive.returncode == 0, said
    assert sorted(os.listdir(b)) == ['model', 'more', 'other']
    assert content(b / 'model', 'w', 'deep/v') == content(b / 'more', 'w', 'deep/v')


def test_many_receivers_do_not_disturb_each_other(stores, stream):
    """Each takes what the others make for what it is: the directory of a program that runs."""
    _, (_, b) = stores
    many = [subprocess.Popen([BIN / 'hitrainctl', 'restore', '-', b / f'{i}'], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            for i in range(6)]
    for p in many:
        p.communicate(stream, timeout=SECONDS_MAX)
    assert [p.returncode for p in many] == [0] * 6 and sorted(os.listdir(b)) == [f'{i}' for i in range(6)]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_receiver_leaves_nothing(stores, stream, number):
    _, (_, b) = stores
    p = begin_receiving(stream, b / 'model')
    wait_for(lambda: left(b) and os.path.exists(part(b) / 'deep'), 'a part of the step')
    p.send_signal(number)
    assert p.wait(SECONDS_MAX) == 1 and os.listdir(b) == []
    p.stdin.close()


def test_a_killed_daemon_leaves_no_part_of_a_step(stores, stream):
    pair, (_, b) = stores
    p = begin_receiving(stream, b / 'model')
    wait_for(lambda: left(b) and os.path.exists(part(b) / 'deep'), 'a part of the step')
    pair[1].kill()
    try:
        p.communicate(stream[len(stream) // 2:], timeout=SECONDS_MAX)
    except BrokenPipeError:
        pass
    assert p.wait(SECONDS_MAX) == 1
    pair[1].mount()
    assert not (b / 'model').exists() and all(not part(b).exists() or os.listdir(part(b)) == [] for n in left(b))
    assert receive(stream, b / 'model').returncode == 0 and os.listdir(b) == ['model']


@pytest.mark.parametrize('crash', ['receiver', 'daemon'])
def test_a_committed_step_without_its_name_is_removed(stores, stream, crash):
    """Killed between the commit and the rename, with a kept step, and of another owner than the caller."""
    needs('strace')
    pair, (a, b) = stores
    root = make_model(a / 'kept')
    os.chmod(root, 0o555)
    os.chown(root, NOBODY, NOBODY)
    command(root, 'snapshot x')
    killed = ['strace', '-f', '-o', '/dev/null', '-e', 'trace=renameat2', '-e', 'inject=renameat2:signal=KILL']
    subprocess.run([*killed, BIN / 'hitrainctl', 'restore', '-', b / 'model'], input=send(root, 'x'), stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, timeout=SECONDS_MAX)
    if crash == 'daemon':
        pair[1].crash()
    assert os.listdir(b) == left(b) and word(part(b), 'durable_step') == '0' and os.stat(part(b)).st_uid == NOBODY
    command(part(b), 'snapshot y')
    done = receive(stream, b / 'model')
    assert done.returncode == 0 and b'interrupted restore' in done.stderr and os.listdir(b) == ['model']


def test_a_killed_sender_is_a_cut_stream(stores, stream):
    _, (a, b) = stores
    sender = subprocess.Popen([BIN / 'hitrainctl', 'archive', a / 'model', '1', '-', '--rate=100K'], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL)
    receiver = subprocess.Popen([BIN / 'hitrainctl', 'restore', '-', b / 'model'], stdin=sender.stdout,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    sender.stdout.close()
    wait_for(lambda: left(b), 'the hidden directory')
    sender.kill()
    sender.wait(SECONDS_MAX)
    _, said = receiver.communicate(timeout=SECONDS_MAX)
    assert receiver.returncode == 1 and b'is cut' in said and os.listdir(b) == []


def test_a_receiver_that_ends_is_reported_by_the_sender(stores, stream):
    _, (a, _) = stores
    sender = subprocess.Popen([BIN / 'hitrainctl', 'archive', a / 'model', '1', '-'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    sender.stdout.read(1)
    sender.stdout.close()
    assert sender.wait(SECONDS_MAX) == 1 and b'the reader (hitrainctl restore) has ended' in sender.stderr.read()
    sender.stderr.close()


def test_a_rate_is_kept(stores, stream):
    _, (a, _) = stores
    began = time.monotonic()
    assert send(a / 'model', '1', f'--rate={len(stream)}') == stream
    assert time.monotonic() - began > 0.9


def test_an_ordinary_user_sends_and_receives(stores):
    """With the permissions of files: what the user may not read is not sent."""
    _, (a, b) = stores
    for mnt in (a, b):
        os.chmod(mnt, 0o755)
        (mnt / 'home').mkdir()
        os.chown(mnt / 'home', NOBODY, NOBODY)
    root = make_model(a / 'home' / 'model')
    for folder, folders, files in os.walk(root):
        for name in ('', *files):
            os.chown(os.path.join(folder, name), NOBODY, NOBODY)
    kept_step(root, 10)
    user = {'user': NOBODY, 'group': NOBODY, 'extra_groups': []}
    stream = subprocess.run([BIN / 'hitrainctl', 'archive', root, '1', '-'], stdout=subprocess.PIPE, check=True, timeout=SECONDS_MAX,
                            **user).stdout
    done = receive(stream, b / 'home' / 'model', **user)
    assert done.returncode == 0, done.stderr
    assert content(b / 'home' / 'model', 'w') == content(root / '.hitrain' / 'snap' / '1', 'w')
    done = receive(stream, b / 'model', **user)
    assert done.returncode == 1 and b'Permission denied' in done.stderr
    os.chown(root / 'rng', 0, 0)
    os.chmod(root / 'rng', 0o600)
    command(root, 'snapshot x')
    done = subprocess.run([BIN / 'hitrainctl', 'archive', root, 'x', '-'], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          timeout=SECONDS_MAX, **user)
    assert done.returncode == 1 and b'rng: Permission denied' in done.stderr


def test_a_model_that_its_owner_may_not_write_is_received(stores):
    """By an ordinary user, with an access list of the root that lets others in at the end only."""
    _, (a, b) = stores
    root = make_model(a / 'model')
    os.setxattr(root, 'system.posix_acl_access', ACL_FOLDER)
    os.chmod(root, 0o555)
    command(root, 'snapshot x')
    os.chmod(b, 0o777)
    user = {'user': NOBODY, 'group': NOBODY, 'extra_groups': []}
    done = receive(send(root, 'x'), b / 'model', **user)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(os.stat(b / 'model').st_mode) == 0o555
    assert 'user.hitrain-receive' not in os.listxattr(b / 'model')
    assert os.getxattr(b / 'model', 'system.posix_acl_access') == os.getxattr(root, 'system.posix_acl_access')


def test_only_directories_of_an_own_killed_receiver_are_removed(stores, stream, tmp_path):
    _, (_, b) = stores
    for i, (name, owner, mode) in enumerate(((STAGING + 'notes', 0, 0o700), (STAGING + '0000000g', 0, 0o700),
                                             (STAGING + '00000001', NOBODY, 0o700), (STAGING + '00000002', 0, 0o755))):
        (b / name).mkdir()
        (b / name / 'mine').write_bytes(b'%d' % i)
        os.chown(b / name, owner, owner)
        os.chmod(b / name, mode)
    os.symlink(b / (STAGING + 'notes'), b / (STAGING + '00000003'))
    (b / (STAGING + '00000004')).mkdir(0o700)  # as a killed one leaves it
    os.setxattr(b / (STAGING + '00000004'), 'user.hitrain-receive', STAGING.encode() + b'00000004')
    (b / (STAGING + '00000006')).mkdir(0o700)  # somebody renamed a private directory
    (b / (STAGING + '00000006') / 'mine').write_bytes(b'6')
    (b / (STAGING + '00000007')).mkdir(0o700)  # of one that was killed before it marked it
    (b / (STAGING + '00000008')).mkdir(0o700)
    os.chown(b / (STAGING + '00000008'), NOBODY, NOBODY)
    assert receive(stream, b / 'model').returncode == 0
    (b / (STAGING + '00000008')).rmdir()
    assert sorted(os.listdir(b)) == sorted([STAGING + n for n in ('notes', '0000000g', '00000001', '00000002', '00000003', '00000006')] + ['model'])
    assert all(os.listdir(b / n) == ['mine'] for n in left(b))
    (tmp_path / (STAGING + '00000005')).mkdir(0o700)
    assert receive(stream, tmp_path / 'model').returncode == 1 and os.listdir(tmp_path) == [STAGING + '00000005']


def test_a_stream_marks_no_directory_as_that_of_a_killed_receiver(stores, stream):
    """Its author could choose what the next receive removes."""
    _, (a, b) = stores
    folder = a / 'model' / (STAGING + '00000001')
    folder.mkdir(0o700)
    (folder / 'mine').write_bytes(b'x')
    os.setxattr(folder, 'user.hitrain-receive', folder.name.encode())
    command(a / 'model', 'snapshot marked')
    done = receive(send(a / 'model', 'marked'), b / 'model')
    assert done.returncode == 0 and 'user.hitrain-receive' not in os.listxattr(b / 'model' / folder.name), done.stderr
    command(b / 'model', 'snapshot')
    assert digest(b / 'model', '1') == digest(a / 'model', 'marked')


def test_what_cannot_be_removed_of_a_killed_receiver_is_named(stores, stream):
    _, (_, b) = stores
    old = b / (STAGING + '00000001')
    old.mkdir(0o700)
    os.setxattr(old, 'user.hitrain-receive', old.name.encode())
    (old / 'mounted').write_bytes(b'')
    subprocess.run(['mount', '--bind', old / 'mounted', old / 'mounted'], check=True, timeout=SECONDS_MAX)
    try:
        done = receive(stream, b / 'model')
        assert done.returncode == 0 and f'{old.name}, which an interrupted restore left, cannot be removed'.encode() in done.stderr
    finally:
        subprocess.run(['umount', old / 'mounted'], check=True, timeout=SECONDS_MAX)
    assert receive(stream, b / 'more').returncode == 0 and sorted(os.listdir(b)) == ['model', 'more']


@pytest.mark.parametrize('owner, mode', [(NOBODY, 0o755), (0, 0o1777), (0, 0o775)])
def test_nothing_is_removed_where_others_can_make_names(stores, stream, owner, mode):
    _, (_, b) = stores
    folder = b / 'folder'
    folder.mkdir()
    (folder / 'theirs').mkdir(0o700)
    (folder / 'theirs' / 'file').write_bytes(b'x')
    (folder / 'theirs').rename(folder / (STAGING + '00000000'))
    os.chown(folder, owner, owner)
    os.chmod(folder, mode)
    assert receive(stream, folder / 'model').returncode == 0
    assert (folder / (STAGING + '00000000') / 'file').read_bytes() == b'x'


@pytest.mark.parametrize('whole', [False, True])
def test_a_symlink_in_the_place_of_the_directory_leads_nowhere(stores, stream, whole):
    """Another user owns the directory above, and leads root's receiver to a model that this user may not even read."""
    _, (_, b) = stores
    os.chmod(b, 0o755)
    (b / 'home').mkdir()
    os.chown(b / 'home', NOBODY, NOBODY)
    other = make_model(b / 'other')
    step(other, 30)
    os.chmod(other, 0o700)
    for name in ('one', 'two'):
        command(other, f'snapshot {name}')
    put_gradient(other, 'w', gradient(300_000, 50, 'f32'))  # a step that is open
    was = describe(other)
    p = begin_receiving(stream, b / 'home' / 'model')
    wait_for(lambda: left(b / 'home') and os.path.exists(part(b / 'home') / 'deep'), 'a part of the step')
    subprocess.run(['sh', '-c', f'mv {left(b / "home")[0]} away && ln -s {other} {left(b / "home")[0]}'], cwd=b / 'home',
                   user=NOBODY, group=NOBODY, extra_groups=[], check=True)
    _, said = p.communicate(stream[len(stream) // 2:] if whole else b'', timeout=SECONDS_MAX)
    assert p.returncode == 1 and (b'moved' if whole else b'is cut') in said
    assert sorted(os.listdir(other / '.hitrain' / 'snap')) == ['one', 'two'] and word(other, 'step') == '1'
    assert describe(other) == was
    assert os.listdir(b / 'home' / 'away') == [] and not os.path.lexists(b / 'home' / 'model')


def test_a_received_part_is_removed_whatever_its_modes(stores, stream):
    """Directories that their owner may not write to, or not even read."""
    _, (a, b) = stores
    root = make_model(a / 'modes')
    for name, mode in (('a', 0o555), ('b', 0), ('c', 0o300)):
        (root / name).mkdir()
        (root / name / 'file').write_bytes(b'x')
        os.chmod(root / name, mode)
    (root / 'last').write_bytes(random(500_000, 1).tobytes())
    os.chmod(root, 0o555)
    command(root, 'snapshot x')
    os.chmod(b, 0o755)
    (b / 'home').mkdir()
    os.chown(b / 'home', NOBODY, NOBODY)
    user = {'user': NOBODY, 'group': NOBODY, 'extra_groups': []}
    whole = send(root, 'x')
    done = receive(whole[:-1], b / 'home' / 'model', **user)
    assert done.returncode == 1 and b'is cut' in done.stderr and os.listdir(b / 'home') == []
    assert receive(whole, b / 'home' / 'model', **user).returncode == 0


def test_verify_compares_digests(stores, stream):
    _, (a, _) = stores
    one = digest(a / 'model', '1')
    assert 'as expected' in run('hitrainctl', 'verify', a / 'model', '1', f'--digest={one}').stdout
    done = run('hitrainctl', 'verify', a / 'model', '1', f'--digest={one[::-1]}', check=False)
    assert done.returncode == 1 and 'another digest' in done.stderr
    assert run('hitrainctl', 'verify', a / 'model', '1', '--digest=x', check=False).returncode == 2


def test_a_step_that_is_not_kept_is_refused(stores, stream):
    _, (a, _) = stores
    for name in ('9', '..', '.', 'x/y', '', '1/../1'):
        for what in (('archive', a / 'model', name, '-'), ('verify', a / 'model', name)):
            done = run('hitrainctl', *what, check=False)
            assert done.returncode == 1 and ('no kept step' in done.stderr or 'no name of a kept step' in done.stderr)


def test_what_is_received_is_a_model_of_its_own(stores, stream):
    """It can be removed, and a model that changes does not change the other one."""
    _, (a, _) = stores
    assert receive(stream, a / 'two').returncode == 0
    step(a / 'two', 40)
    assert content(a / 'model', 'w') == content(a / 'model' / '.hitrain' / 'snap' / '1', 'w') != content(a / 'two', 'w')
    with fails(errno.ENOENT):
        os.stat(a / 'two' / '.hitrain' / 'snap' / '1')
