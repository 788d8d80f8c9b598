# SPDX-License-Identifier: Apache-2.0
"""Engines of vaults: what all keep, and what a silent, full or lying one does to those who use it."""
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid

import pytest

from conftest import BIN, MIB, wait_for
from engines import NAMES, S3, end, place, servers, start_tmpfs, started  # noqa: F401 (fixtures)

import engine as engines
import errors
import wire

SECONDS = 60


@pytest.fixture
def vault(place):
    with engines.open(place.url(f'v-{uuid.uuid4().hex[:8]}'), timeout=SECONDS) as v:
        assert v.put_new('vault/0', b'new')
        yield v


def in_threads(count, call):
    results, threads = [None] * count, []

    def run(i):
        results[i] = call(i)

    for i in range(count):
        threads.append(threading.Thread(target=run, args=(i,)))
        threads[-1].start()
    for t in threads:
        t.join()
    return results


# ---- what all engines keep ----

def test_an_object_is_made_once_and_read_in_ranges(vault):
    data = os.urandom(3 * MIB + 5)
    assert vault.put_new('seg/1/0', [data[:7], b'', data[7:]])
    assert not vault.put_new('seg/1/0', b'other') and not vault.put_new('seg/1/0', data)
    assert vault.get('seg/1/0') == data
    assert vault.get('seg/1/0', 5, MIB) == data[5:5 + MIB]
    assert vault.get('seg/1/0', len(data) - 3, 100) == data[-3:] and vault.get('seg/1/0', len(data), 1) == b''
    assert vault.put_new('empty', b'') and vault.get('empty') == b''


def test_the_largest_object_fits(vault):
    data = os.urandom(wire.OBJECT_BYTES_MAX)
    assert vault.put_new('seg/1/1', data) and vault.get('seg/1/1') == data
    with pytest.raises(errors.TooLarge):
        vault.put_new('seg/1/2', data + b'1')


def test_a_list_is_complete_in_order_and_has_ages(vault):
    keys = sorted([f'job/a/head/{i:04x}' for i in range(1203)] + ['job/a-b/head/0', 'job/a.b/head/0', 'job/b'])
    in_threads(8, lambda t: [vault.put_new(k, k.encode()) for k in keys[t::8]])
    found = list(vault.list('job/'))
    assert [k for k, _, _ in found] == keys
    assert all(size == len(k) and 0 <= age < 600 for k, size, age in found)
    assert [k for k, _, _ in vault.list('job/a/head/', after='job/a/head/0400')] == [k for k in keys if k > 'job/a/head/0400'][:-1]
    assert [k for k, _, _ in vault.list('job/a/head/04b')] == ['job/a/head/04b0', 'job/a/head/04b1', 'job/a/head/04b2']
    assert not list(vault.list('nobody/'))


def test_a_list_is_current_and_an_object_can_be_removed(vault):
    for i in range(20):
        assert vault.put_new(f'head/{i:02}', b'x')
        assert [k for k, _, _ in vault.list('head/')][-1] == f'head/{i:02}'
    vault.remove('head/19')
    vault.remove('head/19')
    assert [k for k, _, _ in vault.list('head/')][-1] == 'head/18'
    with pytest.raises(errors.Missing):
        vault.get('head/19')
    assert vault.put_new('head/19', b'again')


def test_of_racing_creators_one_wins(place):
    url = place.url(f'race-{uuid.uuid4().hex[:8]}')
    vaults = [engines.open(url, timeout=SECONDS) for _ in range(8)]
    try:
        vaults[0].put_new('vault/0', b'')
        for race in range(3):
            won = in_threads(8, lambda i: vaults[i].put_new(f'race/{race}', b'%d' % i))
            assert sum(won) == 1
            assert vaults[0].get(f'race/{race}') == b'%d' % won.index(True)
    finally:
        for v in vaults:
            v.close()


def test_ages_grow_by_the_engines_clock(vault):
    vault.put_new('old', b'')
    time.sleep(2.2)
    vault.put_new('young', b'')
    ages = {k: age for k, _, age in vault.list('')}
    assert 1 <= ages['old'] - ages['young'] <= SECONDS and ages['young'] >= 0


def test_keys_that_lead_elsewhere_are_refused(vault):
    for key in '../x', 'a/../../x', '/x', 'a//b', 'a/.', 'a~b', 'a b', '', 'x' * 300:
        with pytest.raises(errors.Failed):
            vault.put_new(key, b'')


def test_a_place_that_is_gone_is_named(place):
    url = place.url('nothing')
    if url.startswith('rados'):
        url = 'rados://nothing/v'
    elif url.startswith('s3'):
        url = url.replace('vaults', 'nothing')
    elif url.startswith('test'):
        os.rmdir(url[5:])
    with engines.open(url, timeout=SECONDS) as v, pytest.raises(errors.NoVault, match='nothing'):
        v.hello()


def test_programs_killed_at_random_times_lose_nothing(place):
    rng, ended = random.Random(7), threading.Event()
    with engines.open(place.url(f'kills-{uuid.uuid4().hex[:8]}'), timeout=SECONDS) as v:
        v.put_new('vault/0', b'')

        def kill():
            while not ended.wait(rng.random() * 0.3):
                program = v.program
                if program and program.answers:
                    program.child.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            made = in_threads(4, lambda t: [v.put_new(f'seg/{t}/{i}', os.urandom(8) * 1000 + b'%d' % i) for i in range(25)])
        finally:
            ended.set()
            killer.join()
        assert all(all(m) for m in made)
        for t in range(4):
            for i in range(25):
                assert bytes(v.get(f'seg/{t}/{i}')).endswith(b'%d' % i)


# ---- programs ----

def test_a_program_that_hangs_is_killed_and_another_one_serves(tmp_path):
    with engines.open(str(tmp_path), timeout=SECONDS) as v:
        v.put_new('a', b'1')
        stopped = v.program.child
        stopped.send_signal(signal.SIGSTOP)
        wait_for(lambda: '\nState:\tT' in open(f'/proc/{stopped.pid}/status').read(), 'the program stands still')
        begin = time.monotonic()
        with pytest.raises(errors.Unknown, match='has not answered'):
            v.get('a', timeout=1)
        assert time.monotonic() - begin < 5
        assert v.get('a') == b'1' and v.program.child.pid != stopped.pid
        assert stopped.wait(SECONDS) == -signal.SIGKILL


def test_one_slow_request_stops_no_other(tmp_path):
    (tmp_path / '~faults').write_text('lost-before get slow\n')
    with engines.open(f'test:{tmp_path}', timeout=SECONDS) as v:
        v.put_new('slow', b'1')
        v.put_new('fast', b'2')
        caught = []

        def slow():
            try:
                v.get('slow', timeout=3)
            except errors.Unknown as e:
                caught.append(e)

        t = threading.Thread(target=slow)
        t.start()
        program = v.program
        wait_for(lambda: program.pending, 'the request is under way')
        while t.is_alive():
            assert v.get('fast') == b'2'
        t.join()
        assert caught and v.program is program


def test_a_program_ends_with_its_client(tmp_path):
    code = (f'import sys; sys.path.insert(0, {str(BIN.parent / "share/hitrain/vault")!r}); import engine, time\n'
            f'v = engine.open({str(tmp_path)!r}); v.put_new("a", b""); print(v.program.child.pid, flush=True); time.sleep(1000)')
    client = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
    try:
        served = int(client.stdout.readline())
    finally:
        end(client)
    wait_for(lambda: not os.path.exists(f'/proc/{served}/fd/0'), 'the program ends')


LIAR = """#!/usr/bin/env python3
import mmap, os, socket, sys
sys.path.insert(0, {library!r})
import wire
channel = socket.socket(fileno=int(sys.argv[2]))
memory = mmap.mmap(int(sys.argv[3]), int(sys.argv[4]) * int(sys.argv[5]))
while True:
    packet = channel.recv(2000)
    if not packet:
        break
    number, verb, key_bytes, slot, left, offset, length = wire.REQUEST.unpack_from(packet)
    at = slot * int(sys.argv[5])
    def answer(result, flags, count, text=b'', number=number):
        channel.send(wire.ANSWER.pack(number, result, flags, count) + text)
    def entries(data, flags=0):
        memory[at:at + len(data)] = data
        answer(0, flags, len(data))
    {lie}
"""


@pytest.mark.parametrize('lie, says', [
    ('answer(0, 0, 1 << 50)', 'more than there was room'),
    ('answer(0, 0, 0, number=number + 1)', 'has not answered'),
    ('channel.send(b"x")', 'has not answered'),
    ('sys.exit(3)', 'ends before it answers'),
    ('answer(77, 0, 0, b"\\xff\\x1b[2J nonsense")', 'nonsense'),
    ('entries(wire.pack_entries([("b", 1, 1), ("a", 1, 1)], 1000)[0])', 'not in order'),
    ('entries(wire.pack_entries([("x/../b", 1, 1)], 1000)[0])', 'cannot be read'),
    ('entries(b"\\xff" * 100)', 'cannot be read'),
])
def test_a_program_that_lies_is_refused(tmp_path, monkeypatch, lie, says):
    program = tmp_path / 'hitrain-vault-liar'
    program.write_text(LIAR.format(library=str(BIN.parent / 'share/hitrain/vault'), lie=lie))
    program.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    with engines.open('liar://x', timeout=12) as v, pytest.raises(errors.EngineError) as caught:
        if 'entries' in lie:
            list(v.list(''))
        else:
            v.get('a')
    assert says in str(caught.value)


def test_a_scheme_without_a_program_is_named():
    with pytest.raises(errors.NoProgram, match='no program hitrain-vault-nobody in PATH'):
        engines.open('nobody://x')


@pytest.mark.parametrize('url', ['s3://KEY:SECRET@bucket/x', 'ssh://me:SECRET@host/x', 's3://b/x?secret_key=SECRET',
                                 'rados://p/n?keyring_password=SECRET'])
def test_a_url_with_a_secret_is_refused_and_not_shown(url):
    with pytest.raises(errors.Refused) as caught:
        engines.open(url)
    assert 'SECRET' not in str(caught.value) and 'SECRET' not in engines.shown(url)


def test_the_name_of_a_job_is_the_last_part_of_a_url():
    assert engines.split_job('s3://b/v/job7@12?endpoint=http://x') == ('s3://b/v?endpoint=http://x', 'job7', 12)
    assert engines.split_job('/mnt/v/a.b') == ('/mnt/v', 'a.b', None)
    for url in '/mnt/v/..', '/mnt/v/a b', 'x', f'/v/{"x" * 65}', '/v/a@', '/v/a@x':
        with pytest.raises(errors.Failed):
            engines.split_job(url)


# ---- the scheme test itself ----

def test_answers_that_are_lost_before_and_after_the_deed(tmp_path):
    (tmp_path / '~faults').write_text('end-after put_new a\nend-before put_new b\nagain put_new c\nlate=0.3 put_new d\n'
                                      'lost-after put_new e\n')
    with engines.open(f'test:{tmp_path}', timeout=SECONDS) as v:
        assert [v.put_new(k, k.encode()) for k in 'abcd'] == [True] * 4
        with pytest.raises(errors.Unknown):
            v.put_new('e', b'e', timeout=1)
        assert v.get('e') == b'e' and not v.put_new('e', b'other')


def test_a_retry_does_not_take_the_object_of_another_one_for_its_own(tmp_path):
    (tmp_path / '~faults').write_text('end-before put_new a\n')
    (tmp_path / 'a').write_bytes(b'of another')
    with engines.open(f'test:{tmp_path}', timeout=SECONDS) as v:
        assert not v.put_new('a', b'mine')
        assert v.get('a') == b'of another'


# ---- folders ----

@pytest.mark.skipif('tmpfs' not in NAMES, reason='needs a file system of its own')
def test_a_full_file_system_refuses_and_can_be_emptied(tmp_path):
    with start_tmpfs(tmp_path, None, size='4M') as folder, engines.open(folder.url('v'), timeout=SECONDS) as v:
        v.put_new('vault/0', b'')
        with pytest.raises(errors.Full, match='no space'):
            for i in range(9):
                v.put_new(f'seg/{i}', bytes(MIB))
        assert not [n for n in os.listdir(tmp_path / 'v/seg') if '~' in n]
        for key, _, _ in list(v.list('seg/')):
            v.remove(key)
        assert v.put_new('seg/9', bytes(MIB))


def test_links_below_a_vault_lead_nowhere(tmp_path):
    outside = tmp_path / 'outside'
    outside.mkdir()
    (outside / 'secret').write_text('s')
    root = tmp_path / 'v'
    root.mkdir()
    (root / 'seg').symlink_to(outside)
    (root / 'x').symlink_to(outside / 'secret')
    os.mkfifo(root / 'pipe')
    with engines.open(str(root), timeout=SECONDS) as v:
        for key in 'x', 'seg/secret', 'pipe':
            with pytest.raises(errors.EngineError):
                v.get(key)
        with pytest.raises(errors.EngineError):
            v.put_new('seg/new', b'')
        assert not list(v.list('')) and os.listdir(outside) == ['secret']


def test_a_writer_that_was_killed_leaves_no_object(tmp_path):
    with engines.open(str(tmp_path), timeout=SECONDS) as v:
        v.put_new('seg/0', b'')
        left = tmp_path / 'seg/~1234'
        left.write_bytes(b'half')
        assert [k for k, _, _ in v.list('')] == ['seg/0'] and left.exists()
        os.utime(left, (1, 1))
        list(v.list(''))
        assert not left.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason='needs two users')
def test_a_folder_of_another_user_is_refused_with_the_remedy(tmp_path):
    (tmp_path / 'v').mkdir(mode=0o700)
    words = [sys.executable, '-c', f'import sys, os; os.setuid(65534); sys.path.insert(0, {str(BIN.parent / "share/hitrain/vault")!r})\n'
             'import errors, scheme_file\n'
             'try: scheme_file.File(sys.argv[1]).put_new("a", b"", 0)\nexcept errors.Refused as e: print(e)', f'file://{tmp_path}/v']
    done = subprocess.run(words, capture_output=True, text=True)
    assert 'give this user access' in done.stdout, done.stderr
    assert stat.S_IMODE(os.stat(tmp_path / 'v').st_mode) == 0o700


# ---- servers ----

@pytest.mark.skipif('s3' not in NAMES, reason='not selected')
def test_a_server_that_stops_ends_or_loses_its_bucket(tmp_path):
    with started('s3', tmp_path) as s3, engines.open(s3.url('v'), timeout=SECONDS) as v:
        assert v.put_new('a', b'1')
        s3.stop()
        begin = time.monotonic()
        with pytest.raises(errors.Unknown):
            v.get('a', timeout=2)
        assert time.monotonic() - begin < 10
        s3.go_on()
        assert v.get('a') == b'1'
        s3.bucket('delete')
        with pytest.raises(errors.NoVault, match='no bucket vaults'):
            v.put_new('b', b'')
        end(s3.server)
        with pytest.raises(errors.Unknown):
            v.get('a', timeout=2)
        s3.start()
        assert v.put_new('a', b'2') and v.get('a') == b'2'


@pytest.mark.skipif('s3' not in NAMES, reason='not selected')
def test_wrong_or_missing_credentials_are_named(tmp_path, monkeypatch):
    with started('s3', tmp_path) as s3:
        monkeypatch.delenv('AWS_ACCESS_KEY_ID')
        monkeypatch.setenv('HOME', str(tmp_path))
        with engines.open(s3.url('v'), timeout=SECONDS) as v, pytest.raises(errors.Refused, match='credentials'):
            v.hello()
    strict = S3(tmp_path, INITIAL_NO_AUTH_ACTION_COUNT='1')     # it knows nobody after its bucket is made
    try:
        for key, value in strict.env.items():
            monkeypatch.setenv(key, value)
        with engines.open(strict.url('v'), timeout=SECONDS) as v, pytest.raises(errors.Refused, match='AWS_PROFILE'):
            v.put_new('a', b'')
    finally:
        end(strict.server)


@pytest.mark.skipif('ssh' not in NAMES, reason='not selected')
def test_a_key_that_the_other_machine_does_not_know(servers, monkeypatch):
    ssh = servers('ssh')
    monkeypatch.setenv('HITRAIN_SSH', ssh.words('stranger'))
    with engines.open(ssh.url('v'), timeout=SECONDS) as v, pytest.raises(errors.Refused, match='it refuses this key'):
        v.hello()
