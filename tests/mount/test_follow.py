# SPDX-License-Identifier: Apache-2.0
"""archive --follow and restore --follow through a pipe: a copy of a model in another store gets each step, with the same bits, or refuses it."""
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios

import pytest

from calls import rename, sync
from conftest import BIN, MIB, ROOT, SECONDS_MAX, run, wait_for
from test_logged_steps import REDO, figures, put_topk, thin, train
from test_roots import command, put_gradient, random, word
from test_step_streams import content, gradient, make_model, receive, send

sys.path.append(str(ROOT / 'mount-helpers' / 'vault'))
import heads  # noqa: E402
import logged  # noqa: E402
import objects  # noqa: E402

FILES = 'w', 'deep/v'
WHERE = 'user.hitrain-follow'
RENAME_EXCHANGE = 2
MARK_BYTES, PART_BYTES = 64 + 48 + 116, 4096      # at both ends of a stream


def sender(root, *options, **how):
    return subprocess.Popen([BIN / 'hitrainctl', 'archive', root, '-', '--follow', *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            **how)


def receiver(root, stdin, *options):
    return subprocess.Popen([BIN / 'hitrainctl', 'restore', '-', root, '--follow', *options], stdin=stdin,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stream(root, *options):
    """All present steps."""
    done = subprocess.run([BIN / 'hitrainctl', 'archive', root, '-', '--follow', '--once', *options], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    return done.stdout


def follow(root, data):
    return subprocess.run([BIN / 'hitrainctl', 'restore', '-', root, '--follow'], input=data, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=SECONDS_MAX)


def refused(root, data, *why):
    before = word(root, 'step'), content(root, *FILES)
    done = follow(root, data)
    assert done.returncode == 1 and all(w in done.stderr.decode() for w in why), done.stderr.decode()
    assert (word(root, 'step'), content(root, *FILES)) == before and word(root, 'step_open') == '0'


def place(root):
    return dict(w.split('=') for w in os.getxattr(root, WHERE).decode().split())


def same(a, b):
    return word(a, 'step') == word(b, 'durable_step') and content(a, *FILES) == content(b, *FILES)


def start(a, b, dtype='f32', words=REDO):
    """A model that took two steps, and a copy of the second one, its kept step `base`."""
    root = make_model(a / 'model', dtype)
    word(root, 'optimizer', words)
    for n in (1, 2):
        train(root, n, dtype)
    command(root, 'snapshot base')
    done = receive(send(root, 'base'), b / 'model')
    assert done.returncode == 0, done.stderr
    return root, b / 'model'


@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_a_copy_follows_to_the_same_bits(stores, dtype):
    """While the model trains, with clipping and with settings that change; then the copy trains on alone."""
    root, other = start(*stores[1], dtype, REDO + ' max_grad_norm=0.5')
    to = sender(root, '--from=base')
    at = receiver(other, to.stdout, '--json')
    to.stdout.close()
    for n in range(3, 12):
        (root / 'rng').write_bytes(b'before step %d' % n)
        (root / 'deep' / f'cursor-{n}').write_bytes(bytes(n) + b'x' * n)
        word(root, 'optimizer', REDO.replace('0.01', str(n / 1000)) + f' max_grad_norm=0.5 grad_scale={n}')
        train(root, 10 * n, dtype)
        wait_for(lambda: word(other, 'durable_step') == str(n) and place(other)['files'] == str(n), f'step {n} is there')
        assert same(root, other) and (other / 'rng').read_bytes() == b'before step %d' % n
        assert (other / 'deep' / f'cursor-{n}').read_bytes() == bytes(n) + b'x' * n
    assert os.stat(root / 'rng').st_mtime_ns == os.stat(other / 'rng').st_mtime_ns
    to.send_signal(signal.SIGINT)
    out, err = at.communicate(timeout=SECONDS_MAX)
    assert at.returncode == to.wait(SECONDS_MAX) == 0, err
    assert [json.loads(line)['step'] for line in out.splitlines()] == list(range(3, 12))
    assert word(root, 'optimizer').split() == word(other, 'optimizer').split()
    for r in (root, other):
        train(r, 999, dtype)
    assert same(root, other)


def test_a_copy_follows_numbers_for_ranges_of_elements(stores):
    """Which change in each step, or are not there; a copy has no such words, and after it takes steps alone none in force."""
    root, other = start(*stores[1])
    for n in range(3, 9):
        word(root / 'w', 'optimizer', f'lr=0.03 {n}:9 lr=0.5 70000:{70000 + n} frozen=1 299999:300000 weight_decay=0')
        if n % 3:
            word(root / 'deep' / 'v', 'optimizer', f'{65536 - n}:{65536 + n} lr=0.25')
        else:
            word(root / 'deep' / 'v', 'optimizer', 'lr=0.01')
        train(root, 10 * n)
    done = follow(other, stream(root, '--from=base'))
    assert done.returncode == 0 and same(root, other), done.stderr
    for r in (root, other):
        for name in FILES:
            word(r / name, 'optimizer', 'lr=0.01')
        train(r, 999)
    assert same(root, other)


def test_a_stream_comes_on_while_the_copy_is_busy(stores):
    """Its store answers nothing for a while, and the sender gets rid of all that it has."""
    pair, (a, b) = stores
    root, other = start(a, b)
    for n in range(3, 7):
        train(root, n)
    data = stream(root, '--from=base')
    assert len(data) > 8 * MIB
    come, go = os.pipe()
    with os.fdopen(go, 'wb', buffering=0) as pipe:
        at = receiver(other, come)
        os.close(come)
        pipe.write(data[:MARK_BYTES])
        wait_for(lambda: WHERE in os.listxattr(other), 'the receiver has begun')
        pair[1].daemon.send_signal(signal.SIGSTOP)
        try:
            os.set_blocking(go, False)
            left = memoryview(data)[MARK_BYTES:]
            while left and select.select([], [pipe], [], SECONDS_MAX)[1]:
                left = left[pipe.write(left[:PART_BYTES]) or 0:]
        finally:
            pair[1].daemon.send_signal(signal.SIGCONT)
        assert not left
    assert at.wait(SECONDS_MAX) == 0 and same(root, other), at.stderr.read()


@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_a_copy_follows_sums_of_gradients(stores, dtype):
    """Steps with accumulate are logged as sums in f32, also those of bf16 gradients."""
    root, other = start(*stores[1], dtype, REDO)
    word(root, 'optimizer', REDO + ' accumulate=3 accumulate_mode=mean max_grad_norm=0.5')
    for n in range(3, 8):
        for i in (1, 2):
            train(root, 100 * n + i, dtype, how=lambda root: None)
        train(root, n, dtype)
        assert figures(root)['last'] == n and word(root, 'durable_step') == str(n)
    done = follow(other, stream(root, '--from=base'))
    assert done.returncode == 0 and same(root, other), done.stderr
    assert word(other, 'step') == '7'
    word(root, 'optimizer', REDO)
    word(other, 'optimizer', REDO)
    for r in (root, other):
        train(r, 999, dtype)
    assert same(root, other)


@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_sparse_gradients_take_little_of_the_stream(stores, dtype):
    """Beside dense ones; a cut stream goes on after each step."""
    root, other = start(*stores[1], dtype)
    sizes = [len(stream(root, '--from=base'))]
    for n in range(3, 8):
        for i, name in enumerate(FILES):
            g = gradient(300_000, 10 * n + i, dtype)
            if n % 2:
                put_topk(root, name, thin(g))
            else:
                put_gradient(root, name, g)
        sync(root)
        data = stream(root, *(['--from=base'] if n == 3 else [f'--since={n - 1}']))
        sizes.append(len(data))
        done = follow(other, data)
        assert done.returncode == 0 and same(root, other), done.stderr.decode()
    assert max(sizes[1::2]) < 0.1 * min(sizes[2::2]), sizes
    refused(other, data[:300] + bytes([data[300] ^ 1]) + data[301:], 'at byte')


def test_a_receiver_ends_while_it_waits_for_bytes(stores):
    """As when another process has taken those that came: its read goes on until there are many."""
    root, other = start(*stores[1])
    train(root, 3)
    data = stream(root, '--from=base')
    ours, theirs = socket.socketpair()
    with ours, theirs:
        at = receiver(other, theirs)
        ours.sendall(data[:-MARK_BYTES])
        wait_for(lambda: word(other, 'step') == '3', 'the step is there')
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, MIB)
        ours.sendall(data[-MARK_BYTES:1 - MARK_BYTES])
        wait_for(lambda: not select.select([theirs], [], [], 0)[0], 'the byte is taken')
        at.send_signal(signal.SIGINT)
        assert at.wait(SECONDS_MAX) == 1 and same(root, other)


def test_a_stopped_copy_goes_on_where_it_was(stores):
    """Also after the model was killed: its logged steps show that the history is the same."""
    pair, (a, b) = stores
    root, other = start(a, b)
    for n in (3, 4, 5):
        train(root, n)
    first = stream(root, '--from=base')
    assert follow(other, first).returncode == 0 and same(root, other)
    assert follow(other, first).returncode == 0 and same(root, other), 'it leaves out what it has'
    for n in (6, 7):
        train(root, n)
    for options in ((), ('--since=5',)):
        assert follow(other, stream(root, *options)).returncode == 0 and same(root, other)
    pair[0].crash()
    wait_for(lambda: 'last=7' in word(root, 'redo'), 'the steps are computed again')
    train(root, 8)
    done = follow(other, stream(root))
    assert done.returncode == 0 and same(root, other), done.stderr
    train(root, 9)
    assert follow(other, stream(root, '--since=8')).returncode == 0 and same(root, other)


def test_a_cut_stream_leaves_whole_steps(stores):
    """The daemon of the copy, too, is killed at such a moment."""
    pair, (a, b) = stores
    root, other = start(a, b)
    for n in range(3, 8):
        train(root, n)
    whole = stream(root, '--from=base')
    seen = set()
    for i in range(1, 12):
        done = follow(other, whole[:len(whole) * i // 12 + 7 * i])
        assert done.returncode == 1 and 'it is cut' in done.stderr.decode()
        assert word(other, 'step_open') == '0' and place(other)['step'] == word(other, 'step')
        seen.add(word(other, 'step'))
        if i in (4, 8):
            pair[1].crash()
    assert seen >= {'3', '4', '5', '6'} and follow(other, whole).returncode == 0 and same(root, other)


def test_a_receiver_that_is_killed_leaves_nothing_behind(stores):
    root, other = start(*stores[1])
    train(root, 3)
    half = stream(root, '--from=base')
    at = receiver(other, subprocess.PIPE)
    os.write(at.stdin.fileno(), half[:len(half) * 7 // 8])
    wait_for(lambda: word(other, 'step_open') != '0', 'a step is open')
    at.kill()
    at.wait()
    assert follow(other, half).returncode == 0 and same(root, other)


def test_a_sender_that_is_killed_is_a_cut(stores):
    root, other = start(*stores[1])
    to = sender(root, '--from=base')
    at = receiver(other, to.stdout)
    to.stdout.close()
    train(root, 3)
    wait_for(lambda: word(other, 'durable_step') == '3', 'a step is there')
    to.kill()
    _, err = at.communicate(timeout=SECONDS_MAX)
    assert at.returncode == 1 and 'it is cut' in err
    train(root, 4)
    assert follow(other, stream(root)).returncode == 0 and same(root, other)


def test_a_copy_refuses_what_does_not_continue_it(stores):
    """Another step, another digest, steps that are missing, and a history that is another one."""
    root, other = start(*stores[1])
    for n in range(3, 6):
        train(root, n)
    refused(other, stream(root), 'name the kept step')
    refused(other, stream(root, '--from=base', '--digest=' + '0' * 32), 'another digest')
    assert follow(other, stream(root, '--from=base')).returncode == 0
    train(root, 6)
    late = stream(root, '--since=6')
    refused(other, late, 'steps are missing')
    command(root, 'rollback base')
    for n in range(3, 8):
        train(root, 2 * n)
    refused(other, stream(root), 'its step of this number is another one')
    train(other, 99)
    refused(other, stream(root), 'name the kept step')


def test_a_history_that_ends_stops_the_sender(stores):
    """With the remedy: a direct write of a parameter is no logged step, and steps may be too old."""
    root, other = start(*stores[1])
    train(root, 3)
    to = sender(root, '--from=base', text=False)
    at = receiver(other, to.stdout)
    to.stdout.close()
    wait_for(lambda: word(other, 'durable_step') == '3', 'a step is there')
    with open(root / 'w', 'r+b') as f:
        f.write(b'\0' * 64)
    sync(root)
    assert to.wait(SECONDS_MAX) == 1 and b'Archive a newer kept step' in to.stderr.read()
    at.communicate(timeout=SECONDS_MAX)
    command(root, 'snapshot new')
    word(root, 'optimizer', REDO.replace('redo_keep=12', 'redo_keep=2'))
    for n in range(10):
        train(root, n)
    done = run('hitrainctl', 'archive', root, '-', '--follow', '--once', '--from=new', check=False)
    assert done.returncode == 1 and 'not readable any more' in done.stderr
    word(root, 'optimizer', 'adamw lr=0.01')
    done = run('hitrainctl', 'archive', root, '-', '--follow', '--once', check=False)
    assert done.returncode == 1 and 'set redo=on and redo_keep=N' in done.stderr


def test_files_of_a_step_that_came_without_them_come_later(stores):
    """The model did not rest when its step was sent. The next stream of that step has its files and settings."""
    root, other = start(*stores[1])
    train(root, 3)
    assert follow(other, stream(root, '--from=base')).returncode == 0 and place(other)['files'] == '3'
    words = REDO.replace('0.01', '0.005')
    (root / 'rng').write_bytes(b'x' * 50)
    word(root, 'optimizer', words)
    train(root, 4)
    (root / 'late').write_bytes(b'not published')
    assert follow(other, stream(root)).returncode == 0 and same(root, other)
    assert place(other)['files'] == '3' and (other / 'rng').read_bytes() != b'x' * 50
    command(root, 'abort')
    assert follow(other, stream(root)).returncode == 0 and place(other) | {'step': '4', 'files': '4'} == place(other)
    assert (other / 'rng').read_bytes() == b'x' * 50 and word(root, 'optimizer').split() == word(other, 'optimizer').split()
    assert word(other, 'step_open') == '0' and same(root, other)
    train(root, 5)
    assert follow(other, stream(root)).returncode == 0 and same(root, other) and place(other)['files'] == '5'


def swap(root, how):
    if how == 'directory':
        os.mkdir(root / 'new')
        os.rename(root / 'deep', root / 'new' / 'deeper')
        os.rename(root / 'w', root / 'v')
        os.mkdir(root / 'deep')
        os.rename(root / 'v', root / 'deep' / 'v')
        os.rename(root / 'new' / 'deeper' / 'v', root / 'w')
    elif how == 'link':
        os.link(root / 'w', root / 't')
        os.unlink(root / 'w')
        os.link(root / 'deep/v', root / 'w')
        os.unlink(root / 'deep/v')
        os.link(root / 't', root / 'deep/v')
        os.unlink(root / 't')
    else:
        rename(root / 'w', root / 'deep/v', RENAME_EXCHANGE)
    sync(root)


@pytest.mark.parametrize('how', ['exchange', 'directory', 'link'])
def test_parameters_that_change_names_are_another_history(stores, how):
    """Also if nothing followed yet, and before the change is published. Files may change theirs."""
    root, other = start(*stores[1])
    train(root, 3)
    whole = stream(root, '--from=base')
    lineage = figures(root)['lineage']
    os.rename(root / 'rng', root / 'file')
    os.rename(root / 'file', root / 'rng')
    assert figures(root)['lineage'] == lineage
    swap(root, how)
    for n in (4, 5):
        done = run('hitrainctl', 'archive', root, '-', '--follow', '--once', '--from=base', check=False)
        assert done.returncode == 1 and 'its history is another one now' in done.stderr
        train(root, n)
    assert follow(other, whole).returncode == 0
    assert figures(root)['lineage'] != lineage
    refused(other, stream(root), 'does not continue')


def test_another_step_of_one_history_is_refused(stores):
    root, other = start(*stores[1])
    train(root, 3)
    assert follow(other, stream(root, '--from=base')).returncode == 0
    was = place(other)
    os.setxattr(other, WHERE, ' '.join(f'{k}={v}' for k, v in (was | {'sum': '0' * 32}).items()).encode())
    command(other, 'commit')
    train(root, 4)
    for options in ((), ('--since=3',)):
        refused(other, stream(root, *options), 'does not continue')


def test_a_file_that_may_not_be_written_follows(stores):
    """Its mode comes, too, also if nothing else of it changed. A user who is not root may not write it."""
    root, other = start(*stores[1])
    os.chmod(root / 'rng', 0o444)
    train(root, 3)
    for r in root, other:
        for at, dirs, files in os.walk(r):
            dirs[:] = [d for d in dirs if d != '.hitrain']
            for path in [at] + [os.path.join(at, f) for f in files]:
                os.chown(path, 65534, 65534)
        sync(r)
    how = {'user': 65534, 'group': 65534, 'extra_groups': []} if os.getuid() == 0 else {}
    options = '--from=base',
    for i in range(2):
        done = subprocess.run([BIN / 'hitrainctl', 'restore', '-', other, '--follow'], input=stream(root, *options), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, timeout=SECONDS_MAX, **how)
        assert done.returncode == 0 and same(root, other), done.stderr.decode()
        assert os.stat(other / 'rng').st_mode & 0o777 == 0o444 and place(other)['files'] == str(3 + i)
        train(root, 4)
        options = ()


def test_a_signal_ends_a_sender_whose_reader_stalls(stores):
    root, _ = start(*stores[1])
    train(root, 3)
    train(root, 4)
    to = sender(root, '--from=base')
    wait_for(lambda: struct.unpack('i', fcntl.ioctl(to.stdout, termios.FIONREAD, bytes(4)))[0] >= 50_000, 'the pipe has bytes')
    to.send_signal(signal.SIGTERM)
    assert to.wait(SECONDS_MAX) == 1
    assert b'cannot write' in to.communicate()[1]


def test_a_parameter_with_two_names_follows(stores):
    a, b = stores[1]
    root, other = make_model(a / 'model'), b / 'model'
    os.link(root / 'w', root / 'tied')
    word(root, 'optimizer', REDO)
    for n in (1, 2):
        train(root, n)
    command(root, 'snapshot base')
    assert receive(send(root, 'base'), other).returncode == 0
    for n, options in (3, ['--from=base']), (4, []):
        train(root, n)
        assert follow(other, stream(root, *options)).returncode == 0 and same(root, other)
        assert place(other)['files'] == str(n)


def in_depth(root, path, flags, data=None):
    """A file whose path from the mount no call takes: directory by directory."""
    *folders, name = path.split('/')
    fd = os.open(root, os.O_RDONLY)
    for folder in folders:
        if flags & os.O_CREAT and not os.path.lexists(f'/proc/self/fd/{fd}/{folder}'):
            os.mkdir(folder, dir_fd=fd)
        below = os.open(folder, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    with open(os.open(name, flags, 0o644, dir_fd=fd), 'rb' if data is None else 'wb', 0) as f:
        os.close(fd)
        return f.read() if data is None else f.write(data)


def test_files_of_any_name_and_depth_follow(stores):
    """Names that no line of a command can have, and paths as long as a stream takes: of a file and of a parameter."""
    root, other = start(*stores[1])
    deep = '/'.join(['d' * 254] * 16)
    files = {n: n.encode() for n in ('ends ', ' begins', 'two\nlines', '\t', deep + '/' + 'f' * 15)}
    parameter = deep + '/' + 'p' * 15
    assert len(parameter) == 4095
    for name, data in files.items():
        in_depth(root, name, os.O_WRONLY | os.O_CREAT, data)
    in_depth(root, parameter, os.O_WRONLY | os.O_CREAT, bytes(4000))
    in_depth(root / '.hitrain/grad', parameter, os.O_WRONLY, random(1000, 3).tobytes())
    train(root, 3)
    command(root, 'snapshot with')
    assert receive(send(root, 'with'), other.parent / 'whole').returncode == 0
    in_depth(root / '.hitrain/grad', parameter, os.O_WRONLY, random(1000, 4).tobytes())
    for name in files:
        in_depth(root, name, os.O_WRONLY | os.O_TRUNC, b'later')
    train(root, 4)
    done = follow(other.parent / 'whole', stream(root, '--from=with'))
    assert done.returncode == 0 and same(root, other.parent / 'whole'), done.stderr
    for name in (*files, parameter):
        assert in_depth(root, name, os.O_RDONLY) == in_depth(other.parent / 'whole', name, os.O_RDONLY), name
    assert in_depth(root, 'ends ', os.O_RDONLY) == b'later' and any(in_depth(root, parameter, os.O_RDONLY))


def test_a_place_ahead_of_the_copy_is_taken_back(stores):
    """A receiver was killed between the two."""
    root, other = start(*stores[1])
    train(root, 3)
    assert follow(other, stream(root, '--from=base')).returncode == 0
    ahead = os.getxattr(other, WHERE).replace(b'step=3', b'step=4')
    os.setxattr(other, WHERE, ahead)
    train(root, 4)
    done = follow(other, stream(root))
    assert done.returncode == 0 and same(root, other), done.stderr.decode()


def is_last(record):
    """Of an object in a stream: marks have a summary alone."""
    return record and (record.type == objects.END or
                       record.type == heads.SUMMARY and heads.parse_summary(record.payload).kind == heads.NONE)


def sealed_again(data, kind, at):
    """The stream with another byte at `at` of each record of this kind, and with checksums that fit."""
    source, out = objects.Bytes(data), bytearray()
    while source.left():
        out += source(objects.HEADER_BYTES)
        reader, found = objects.RecordReader(source), None
        while not is_last(found):
            number, found = reader.number, reader.next()
            payload = bytearray(found.payload)
            if found.type == kind and payload:
                payload[at] ^= 0x41
            out += objects.pack_record(found.type, number, bytes(payload), found.place)
    return bytes(out)


def test_a_hostile_stream_changes_nothing(stores):
    """Each byte of its records is believed only after a check, also if checksums are right."""
    root, other = start(*stores[1])
    train(root, 3)
    good = bytearray(stream(root, '--from=base'))
    for at in (0, 8, 12, 16, 33, 45, 63, *(MARK_BYTES + i for i in (4, 20, 30, 50, 70, 132, 230, 300)), len(good) // 2, len(good) - MARK_BYTES - 60):
        bad = good.copy()
        bad[at] ^= 0x41
        refused(other, bytes(bad), 'at byte')
    for kind, at, why in ((logged.NUMBERS, -1, "'6': No such file"), (logged.PIECES, -1, 'at byte'), (objects.END, 0, 'at byte'), (objects.END, 8, 'at byte')):
        refused(other, sealed_again(good, kind, at), why)
    refused(other, b'', 'cut')
    refused(other, struct.pack('<64x'), 'no object of a vault')


def test_a_skipped_step_and_a_parameter_without_a_gradient_follow(stores):
    """A skipped step has no parameters, and a partial one has some; the count of each is the model's."""
    root, other = start(*stores[1], words=REDO + ' skip_nonfinite=1 partial=1')
    train(root, 3)
    put_gradient(root, 'w', random(300_000, 4) * float('nan'))
    sync(root)
    put_gradient(root, 'deep/v', random(300_000, 5))
    sync(root)
    assert word(root, 'step') == '5' and 'last=5' in word(root, 'redo')
    done = follow(other, stream(root, '--from=base'))
    assert done.returncode == 0 and same(root, other), done.stderr
    for r in (root, other):
        train(r, 6)
    assert same(root, other)


def test_a_copy_goes_on_with_another_copy(make_store, stores):
    """The model is lost. One copy is promoted and trains on, and the other one follows it: its log has the same last step."""
    root, first = start(*stores[1])
    second = make_store().mount() / 'model'
    assert receive(send(root, 'base'), second).returncode == 0
    for sparse, options in (False, ['--from=base']), (True, []):
        for i, name in enumerate(FILES):
            g = random(300_000, i)
            (put_topk if sparse else put_gradient)(root, name, thin(g) if sparse else g)
        sync(root)
        data = stream(root, *options)
        for copy in first, second:
            done = follow(copy, data)
            assert done.returncode == 0 and same(root, copy), done.stderr.decode()
    command(first, 'abort')
    os.removexattr(first, WHERE)
    train(first, 5)
    done = follow(second, stream(first))
    assert done.returncode == 0 and same(first, second) and word(second, 'step') == '5', done.stderr.decode()
    train(root, 6)
    refused(second, stream(root, '--since=4'), 'does not continue')
