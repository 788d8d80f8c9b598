# SPDX-License-Identifier: Apache-2.0
"""A model of very many tiny files: kept, taken back, sent and received. HITRAIN_LONG=1: a million."""
import os
import subprocess

from conftest import BIN
from test_roots import command, word
from test_step_streams import ADAMW

LONG = bool(os.environ.get('HITRAIN_LONG'))
FILES, FOLDER, SECONDS = (1_000_000, 1000, 3600) if LONG else (400, 100, 120)
SIZE = ('14G', '--log-size=3G') if LONG else ('256M',)  # a default log holds the records of one such tree, and not of two


def ctl(*args, **how):
    return subprocess.run([BIN / 'hitrainctl', *args], stderr=subprocess.PIPE, timeout=SECONDS, **how)


def path(root, n):
    return root / f'{n // FOLDER}' / f'file {n}'


def make(root, files=FILES):
    for n in range(files):
        if n % FOLDER == 0:
            os.mkdir(root / f'{n // FOLDER}')
        with open(path(root, n), 'wb', 0) as f:
            f.write(b'%d' % n)


def listed(root):
    found = {f'{name}/{f.name}' for name in os.listdir(root) for f in os.scandir(root / name)}
    assert len(found) == FILES
    return found


def test_very_many_tiny_files_are_kept_and_sent(make_store):
    a, b = make_store(*SIZE), make_store(*SIZE)
    a.seconds = b.seconds = SECONDS
    root, other = a.mount() / 'model', b.mount() / 'other'
    root.mkdir()
    word(root, 'optimizer', ADAMW)
    make(root)
    command(root, 'snapshot all')
    names, some = listed(root), range(0, FILES, FILES // 50)
    for n in some:
        path(root, n).unlink()
    assert command(root, 'snapshot fewer') == ['ok'] and listed(root / '.hitrain/snap/all') == names
    with subprocess.Popen([BIN / 'hitrainctl', 'archive', root, 'all', '-'], stdout=subprocess.PIPE) as sender:
        done = ctl('restore', '-', other, stdin=sender.stdout, stdout=subprocess.DEVNULL)
        sender.stdout.close()
        assert sender.wait(SECONDS) == 0 and done.returncode == 0, done.stderr
    assert command(root, 'rollback all') == ['ok'] and listed(root) == names == listed(other)
    assert all(path(r, n).read_bytes() == b'%d' % n for r in (root, other) for n in some)
    command(other, 'snapshot all')
    digests = [ctl('verify', r, 'all', stdout=subprocess.PIPE).stdout.split()[-1] for r in (root, other)]
    assert digests[0] == digests[1]
    command(root, 'forget *')
    b.crash()
    assert listed(other) == names


def test_a_log_that_is_too_small_for_a_kept_step_is_named(make_store):
    """As a default log is for a million files and a kept step of them."""
    files = 500
    root = make_store('64M', '--log-size=512K').mount() / 'model'
    root.mkdir()
    word(root, 'optimizer', ADAMW)
    make(root, files)
    said, = command(root, 'snapshot all')
    assert 'ENOSPC' in said and 'the log has room for 137.8 KiB of records' in said and 'mkfs.hitrain --log-size=' in said
    assert os.listdir(root / '.hitrain/snap') == []
    for n in range(100, files):
        path(root, n).unlink()
    assert command(root, 'snapshot all') == ['ok'] and len(os.listdir(root / '.hitrain/snap/all/0')) == 100


def test_a_kept_step_of_small_files_has_its_bound_of_memory(make_store):
    """400 bytes for each file, with its name, and 64 for its chunk. The first one makes the table of owners, too."""
    files, steps = 1000, 8
    store = make_store('64M', '--log-size=16M')
    root = store.mount('background=off') / 'model'  # whose memory would count, too
    root.mkdir()
    word(root, 'optimizer', ADAMW)
    make(root, files)

    def memory():
        figures = dict(line.split('=', 1) for line in word(store.point, 'stats').splitlines())
        return int(figures['meta_bytes']) + int(figures['names_bytes'])
    command(root, 'snapshot first')
    before = memory()
    for n in range(steps):
        assert command(root, f'snapshot n{n}') == ['ok']
    assert (memory() - before) / (steps * files) <= 464
    store.remount('background=off')
    assert (memory() - before) / (steps * files) <= 464
