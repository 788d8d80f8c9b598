# SPDX-License-Identifier: Apache-2.0
"""SQLite on a mount: several processes on one database, killed writers, killed stores. Locks, shared mappings, fsync."""
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from conftest import SECONDS_MAX

LONG = bool(os.environ.get('HITRAIN_LONG'))
SECONDS = 20 if LONG else 1
JOURNALS = ['wal', 'delete', 'truncate', 'persist']
BUSY_SECONDS = 60

# Prints each acknowledged transaction to a pipe that survives everything: "writer number".
WRITER = '''
import os, sqlite3, sys, time
path, who, mode, seconds = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
db = sqlite3.connect(path, timeout=%d, isolation_level=None)
db.execute(f'PRAGMA journal_mode={mode}').fetchall()
# Deleting a journal is the commit: SQLite syncs the folder after it only when asked for more than FULL.
db.execute('PRAGMA synchronous=' + ('EXTRA' if mode == 'delete' else 'FULL'))
first = db.execute('SELECT coalesce(max(n), -1) + 1 FROM entry WHERE who = ?', (who,)).fetchone()[0]
end, n = time.monotonic() + seconds, first
while n == first or time.monotonic() < end:
    db.execute('BEGIN IMMEDIATE')
    db.execute('INSERT INTO entry VALUES (?, ?, ?)', (who, n, os.urandom(100 + n * 997 %% 5000)))
    db.execute('UPDATE total SET entries = entries + 1')
    if n %% 10 == 9:
        db.execute('UPDATE entry SET content = randomblob(3000) WHERE who = ? AND n %% 7 = 3', (who,))
    db.execute('COMMIT')
    os.statvfs(path)  # SQLite takes a folder that it cannot open, as that of a killed store, for synced
    os.write(1, f'{who} {n}\\n'.encode())
    n += 1
db.close()
''' % BUSY_SECONDS

READER = '''
import sqlite3, sys, time
path, seconds = sys.argv[1], float(sys.argv[2])
db = sqlite3.connect(path, timeout=%d, isolation_level=None)
end, before, rounds = time.monotonic() + seconds, 0, 0
while rounds == 0 or time.monotonic() < end:
    db.execute('BEGIN')
    rows, total = db.execute('SELECT (SELECT count(*) FROM entry), (SELECT entries FROM total)').fetchone()
    db.execute('COMMIT')
    assert rows == total and total >= before, (rows, total, before)
    before, rounds = total, rounds + 1
print(rounds)
''' % BUSY_SECONDS


def start(code, *args):
    return subprocess.Popen([sys.executable, '-c', code, *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def create(path, mode):
    db = sqlite3.connect(path, isolation_level=None)
    assert db.execute(f'PRAGMA journal_mode={mode}').fetchone()[0] == mode
    db.execute('CREATE TABLE entry (who TEXT, n INTEGER, content BLOB, PRIMARY KEY (who, n))')
    db.execute('CREATE INDEX by_content ON entry (content)')
    db.execute('CREATE TABLE total (entries INTEGER)')
    db.execute('INSERT INTO total VALUES (0)')
    db.close()


def acknowledged(process, may_fail=False):
    out, err = process.communicate(timeout=SECONDS_MAX)
    assert may_fail or process.returncode == 0, err
    lines = out.splitlines(True)
    return [tuple(line.split()) for line in lines if line.endswith('\n')]


def assert_holds(path, told):
    """Whole, and with all that was acknowledged; besides it at most the one commit that each writer was in."""
    out = subprocess.run(['sqlite3', path, 'PRAGMA integrity_check; PRAGMA foreign_key_check;'], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, timeout=SECONDS_MAX, text=True).stdout
    assert out == 'ok\n'
    db = sqlite3.connect(path, timeout=BUSY_SECONDS)
    rows = {(who, str(n)) for who, n in db.execute('SELECT who, n FROM entry')}
    assert len(rows) == db.execute('SELECT entries FROM total').fetchone()[0]
    db.close()
    assert set(told) <= rows, sorted(set(told) - rows)
    assert len(rows - set(told)) <= len({who for who, _ in rows})
    return rows


def let_run(processes, seconds):
    time.sleep(seconds)
    for p in processes:
        assert p.poll() is None, p.communicate()


@pytest.mark.parametrize('mode', JOURNALS)
def test_two_writers_and_a_reader(store, mode):
    path = store.point / 'db'
    create(path, mode)
    writers = [start(WRITER, path, who, mode, SECONDS) for who in 'ab']
    reader = start(READER, path, SECONDS)
    told = sum((acknowledged(w) for w in writers), [])
    out, err = reader.communicate(timeout=SECONDS_MAX)
    assert reader.returncode == 0, err
    assert int(out) > 0 and {who for who, _ in told} == {'a', 'b'}
    assert len(assert_holds(path, told)) == len(told)
    store.remount()
    assert len(assert_holds(path, told)) == len(told)
    assert sorted(os.listdir(store.point)) == (['db', 'db-journal'] if mode in ('truncate', 'persist') else ['db'])


@pytest.mark.parametrize('mode', ['wal', 'delete'])
def test_a_killed_writer_leaves_the_others_going(store, mode):
    path = store.point / 'db'
    create(path, mode)
    stays, told = start(WRITER, path, 'stays', mode, SECONDS + 1), []
    for i in range(6 if LONG else 3):
        dies = start(WRITER, path, f'dies-{i}', mode, 60)
        assert select.select([dies.stdout], [], [], SECONDS_MAX)[0]  # a line that readline() takes may bring others, which are lost
        time.sleep(random.uniform(0, 0.2))
        dies.kill()
        first = acknowledged(dies, may_fail=True)
        assert first
        told += first
    mine = acknowledged(stays)
    assert mine
    assert_holds(path, told + mine)
    again = acknowledged(start(WRITER, path, 'dies-0', mode, 0.2))
    assert_holds(path, told + mine + again)


@pytest.mark.parametrize('mode', ['wal', 'delete', 'persist'])
def test_acknowledged_transactions_survive_the_daemon(store, mode):
    path, told = store.point / 'db', []
    create(path, mode)
    for round in range(5 if LONG else 2):
        writers = [start(WRITER, path, who, mode, 600) for who in 'ab']
        assert select.select([w.stdout for w in writers], [], [], SECONDS_MAX)[0], 'neither has told anything'
        let_run(writers, random.uniform(0, 0.3))
        store.kill()
        told += sum((acknowledged(w, may_fail=True) for w in writers), [])
        assert told
        store.mount()
        assert_holds(path, told)
        # A transaction that was not printed was in progress; from now on it counts.
        told = list(assert_holds(path, told))


def test_mapped_database_of_large_pages(store):
    """PRAGMA mmap_size: reads through a shared mapping, while another connection writes and vacuums."""
    path = store.point / 'db'
    db = sqlite3.connect(path, isolation_level=None)
    for pragma in ('page_size=65536', 'journal_mode=wal', 'mmap_size=268435456'):
        db.execute(f'PRAGMA {pragma}').fetchall()
    db.execute('CREATE TABLE t (n INTEGER PRIMARY KEY, content BLOB)')
    other = sqlite3.connect(path, isolation_level=None)
    other.execute('PRAGMA mmap_size=268435456')
    for round in range(5):
        db.execute('BEGIN')
        db.executemany('INSERT INTO t VALUES (?, randomblob(20000))', ((round * 100 + i,) for i in range(100)))
        db.execute('COMMIT')
        assert other.execute('SELECT count(*), sum(length(content)) FROM t').fetchone() == ((round + 1) * 100, (round + 1) * 2_000_000)
    db.execute('DELETE FROM t WHERE n % 2')
    db.execute('VACUUM')
    db.execute('PRAGMA wal_checkpoint(TRUNCATE)')
    assert other.execute('SELECT count(*) FROM t').fetchone() == (250,)
    assert other.execute('PRAGMA integrity_check').fetchall() == [('ok',)]
    digest = other.execute('SELECT sum(n * length(content)), hex(max(content)) FROM t').fetchone()
    db.close()
    other.close()
    store.remount()
    db = sqlite3.connect(path)
    assert db.execute('SELECT sum(n * length(content)), hex(max(content)) FROM t').fetchone() == digest
    db.execute('VACUUM INTO ?', (str(store.point / 'copy'),))
    other = sqlite3.connect(store.point / 'backup')
    db.backup(other)
    other.close()
    db.close()
    for name in ('copy', 'backup'):
        db = sqlite3.connect(store.point / name)
        assert db.execute('PRAGMA integrity_check').fetchall() == [('ok',)]
        assert db.execute('SELECT sum(n * length(content)), hex(max(content)) FROM t').fetchone() == digest
        db.close()


def test_shell_loads_and_dumps(mnt):
    def shell(name, text):
        return subprocess.run(['sqlite3', mnt / name], input=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=True,
                              timeout=SECONDS_MAX).stdout
    (mnt / 'rows.csv').write_text('n,text\n' + ''.join(f'{i},text {i}\n' for i in range(5000)))
    shell('a', f'.mode csv\n.import {mnt}/rows.csv rows\n')
    dump = shell('a', '.dump\n')
    shell('b', dump)
    assert shell('b', '.dump\n') == dump and shell('b', 'SELECT count(*) FROM rows;') == '5000\n'


def test_signals_while_committing(mnt):
    """Interrupted system calls, without a kill: a timer every few milliseconds."""
    path = mnt / 'db'
    create(path, 'wal')
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    try:
        db = sqlite3.connect(path, isolation_level=None)
        db.execute('PRAGMA synchronous=FULL')
        for i in range(100):
            db.execute('INSERT INTO entry VALUES (?, ?, randomblob(5000))', ('me', i))
            db.execute('UPDATE total SET entries = entries + 1')
        db.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert_holds(path, [('me', str(i)) for i in range(100)])
