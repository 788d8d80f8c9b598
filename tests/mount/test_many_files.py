# SPDX-License-Identifier: Apache-2.0
"""A model of very many tiny files: kept, taken back, sent and received. HITRAIN_LONG=1: a million."""
import os
import subprocess

from conftest import BIN
from test_roots import command, word
from test_step_streams import ADAMW

LONG = bool(os.environ.get('HITRAIN_LONG'))
FILES, FOLDER, SIZE, SECONDS = (1_000_000, 1000, '128G', 3600) if LONG else (400, 100, '256M', 120)


def ctl(*args, **how):
    return subprocess.run([BIN / 'hitrainctl', *args], stderr=subprocess.PIPE, timeout=SECONDS, **how)


def path(root, n):
    return root / f'{n // FOLDER}' / f'file {n}'


def make(root):
    for n in range(FILES):
        if n % FOLDER == 0:
            os.mkdir(root / f'{n // FOLDER}')
        with open(path(root, n), 'wb', 0) as f:
            f.write(b'%d' % n)


def listed(root):
    found = {f'{name}/{f.name}' for name in os.listdir(root) for f in os.scandir(root / name)}
    assert len(found) == FILES
    return found


def test_very_many_tiny_files_are_kept_and_sent(make_store):
    a, b = make_store(SIZE), make_store(SIZE)
    root, other = a.mount() / 'model', b.mount() / 'other'
    root.mkdir()
    word(root, 'optimizer', ADAMW)
    make(root)
    command(root, 'snapshot all')
    names, some = listed(root), range(0, FILES, FILES // 50)
    for n in some:
        path(root, n).unlink()
    assert command(root, 'snapshot fewer') == ['ok'] and listed(root / '.hitrain/snap/all') == names
    with subprocess.Popen([BIN / 'hitrainctl', 'send', root, 'all'], stdout=subprocess.PIPE) as sender:
        done = ctl('receive', other, stdin=sender.stdout, stdout=subprocess.DEVNULL)
        sender.stdout.close()
        assert sender.wait(SECONDS) == 0 and done.returncode == 0, done.stderr
    assert command(root, 'rollback all') == ['ok'] and listed(root) == names == listed(other)
    assert all(path(r, n).read_bytes() == b'%d' % n for r in (root, other) for n in some)
    command(other, 'snapshot all')
    digests = [ctl('verify', r, 'all', stdout=subprocess.PIPE).stdout.split()[-1] for r in (root, other)]
    assert digests[0] == digests[1]
    command(root, 'forget *')
    b.kill()
    b.mount()
    assert listed(other) == names
