# SPDX-License-Identifier: Apache-2.0
"""archive --follow and restore --follow through a vault: each step is there with the same bits, whatever is killed or silent."""
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import time
import uuid

import pytest

from calls import fails, sync
from conftest import BIN, SECONDS_MAX, run, wait_for
from engines import NAMES, place, servers  # noqa: F401 (fixtures)
from test_follow import FILES, same
from test_logged_steps import REDO, train
from test_roots import command, put_gradient, word
from test_step_streams import content, gradient, make_model

import archiver as archivers
import engine as engines
import errors
import jobs
import stop

KILLS = 20
# Where an archiver meets other calls. How folders of other kinds differ is seen in test_vault_engines.py.
each_way = pytest.mark.parametrize('place', [n for n in NAMES if n not in ('tmpfs', 'test')], indirect=True)


looking = {}    # engines by URL, open until the test ends: each is a program, and a test that waits looks often


def engine_of(url):
    if url not in looking:
        looking[url] = engines.open(url, timeout=60)
    return looking[url]


def make_vault(url):
    jobs.make_vault(engine_of(url), 86400)
    return url


def new_vault(place):
    return make_vault(place.url(f'f-{uuid.uuid4().hex[:8]}'))


def job_of(url, job='llama'):
    base, mark, query = url.partition('?')
    return f'{base}/{job}{mark}{query}'


def head(url, job='llama'):
    time.sleep(0.1)     # a test that waits looks again and again, and a server would do nothing else than answer it
    return jobs.highest(engine_of(url), jobs.open_vault(engine_of(url)), job)


def entries(url, job='llama'):
    """(step, last, kind) of what the job lists."""
    return [(x.step, x.last, x.kind) for x in head(url, job).entries]


def steps(url, job='llama'):
    found = entries(url, job)
    return max((last for _, last, _ in found), default=0)


class Program:
    """An archiver or a standby, and what it says."""

    def __init__(self, *words, log):
        self.words, self.log = [str(BIN / 'hitrainctl'), *map(str, words)], log
        self.start()

    def start(self):
        with open(self.log, 'ab') as log:
            self.process = subprocess.Popen(self.words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def said(self):
        return self.log.read_text(errors='replace')

    def wait_for(self, condition, what, seconds=SECONDS_MAX):
        wait_for(lambda: condition() or self.process.poll() is not None, f'{what}\n{self.said()}', seconds)
        assert condition(), f'{what}: {self.said()}'

    def end(self, status=0):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(SECONDS_MAX) == status, self.said()

    def kill(self):
        self.process.kill()
        self.process.wait(SECONDS_MAX)


def end_looks():
    while looking:
        looking.popitem()[1].close()


@pytest.fixture(autouse=True)
def looks_end(make_store):
    """Before the stores, in which vaults may lie."""
    yield
    end_looks()


@pytest.fixture
def programs(tmp_path, make_store):
    """start(name, *words): programs that are ended with the test."""
    made = []

    def start(name, *words):
        made.append(Program(*words, log=tmp_path / f'{name}.log'))
        return made[-1]

    yield start
    end_looks()
    for p in made:
        if p.process.poll() is None:
            p.kill()


def model(make_store, words=REDO, taken=2):
    root = make_model(make_store().mount() / 'model')
    word(root, 'optimizer', words)
    for n in range(1, taken + 1):
        train(root, n)
    return root


@each_way
def test_a_standby_has_each_step(place, make_store, programs):
    url, root, other = new_vault(place), model(make_store), make_store().mount() / 'copy'
    to = programs('archiver', 'archive', root, job_of(url), '--follow', '--log')
    to.wait_for(lambda: entries(url), 'a full step is there')
    at = programs('standby', 'restore', job_of(url), other, '--follow')
    for n in range(3, 7):
        (root / 'rng').write_bytes(b'before step %d' % n)
        word(root, 'optimizer', REDO.replace('0.01', str(n / 1000)))
        train(root, n)
        at.wait_for(lambda: other.exists() and word(other, 'durable_step') == str(n), f'step {n} is there')
        assert same(root, other) and (other / 'rng').read_bytes() == b'before step %d' % n
    assert word(root, 'optimizer').split() == word(other, 'optimizer').split()
    to.end()
    at.end()
    assert [kind for _, _, kind in entries(url)][:2] == [1, 2]
    for r in root, other:
        train(r, 999)
    assert same(root, other)


def test_a_logged_step_is_restored_as_a_model_of_its_own(tmp_path, make_store, programs):
    """From the full step before it; the model trains on from there as the first one did."""
    url, root, there = make_vault(f'{tmp_path}/vault'), model(make_store), make_store().mount()
    to = programs('archiver', 'archive', root, job_of(url), '--follow', '--log')
    to.wait_for(lambda: entries(url), 'a full step is there')
    for n in range(3, 6):
        train(root, n)
        to.wait_for(lambda: steps(url) >= n, f'step {n} is there')
    to.end()
    said = run('hitrainctl', 'restore', f'{job_of(url)}@4', there / 'model').stdout
    assert 'restored step 4 as changes since step' in said and word(there / 'model', 'durable_step') == '4'
    assert 'user.hitrain-follow' not in os.listxattr(there / 'model')
    train(there / 'model', 5)
    assert content(there / 'model', 'w', 'deep/v') == content(root, 'w', 'deep/v')


@each_way
def test_each_nth_kept_step_is_archived(place, make_store, programs):
    url, root = new_vault(place), model(make_store, 'adamw lr=0.01 retain=20 retain_every=1', taken=1)
    to = programs('archiver', 'archive', root, job_of(url), '--follow', '--every=2')
    for n in range(2, 7):
        train(root, n)
        if n % 2 == 0:
            to.wait_for(lambda: steps(url) == n, f'step {n} is there')
    to.end()
    assert [step for step, _, _ in entries(url)] == [2, 4, 6]
    other = make_store().mount() / 'copy'
    run('hitrainctl', 'restore', job_of(url), other)
    assert same(root, other)


@each_way
def test_an_archiver_that_is_killed_loses_no_step_that_it_reported(place, make_store, programs):
    url, root, other = new_vault(place), model(make_store), make_store().mount() / 'copy'
    rng, to = random.Random(5), programs('archiver', 'archive', root, job_of(url), '--follow', '--log')
    to.wait_for(lambda: entries(url), 'a full step is there')
    at, known, newest = programs('standby', 'restore', job_of(url), other, '--follow'), 0, 3 + KILLS
    for n in range(3, newest):
        train(root, n)
        time.sleep(rng.random() * 0.6)
        to.kill()
        now = steps(url)
        assert now >= known
        known = now
        to.start()
    train(root, newest)                     # the last archiver archives it: only a program that follows ends in order
    to.wait_for(lambda: steps(url) == newest, 'the newest step is there')
    at.wait_for(lambda: word(other, 'durable_step') == str(newest), 'the copy has it')
    assert same(root, other)
    to.end()
    at.end()


def test_an_archiver_that_comes_too_late_archives_a_full_step_and_goes_on(tmp_path, make_store, programs):
    url, root = make_vault(str(tmp_path / 'v')), model(make_store, REDO.replace('redo_keep=12', 'redo_keep=2'))
    to = programs('archiver', 'archive', root, job_of(url), '--follow', '--log')
    to.wait_for(lambda: entries(url), 'a full step is there')
    to.kill()
    for n in range(3, 9):
        train(root, n)
    to.start()
    to.wait_for(lambda: steps(url) == 8, 'a full step is there')
    train(root, 9)
    to.wait_for(lambda: steps(url) == 9, 'a logged step is there')
    assert [kind for _, _, kind in entries(url)] == [1, 1, 2]
    other = make_store().mount() / 'copy'
    at = programs('standby', 'restore', job_of(url), other, '--follow')
    at.wait_for(lambda: other.exists() and word(other, 'durable_step') == '9', 'the copy has it')
    assert same(root, other)


def test_an_archiver_does_not_end_an_open_step(tmp_path, make_store, programs):
    """It keeps one itself, as there is none. Until a step has ended it waits."""
    url, root = make_vault(str(tmp_path / 'v')), model(make_store)
    for i, name in enumerate(('w', 'deep/v')):
        put_gradient(root, name, gradient(300_000, 3 + i, 'f32'))
    to = programs('archiver', 'archive', root, job_of(url), '--follow', '--log')
    to.wait_for(lambda: 'step is open' in word(root, 'error'), 'it was refused')
    assert word(root, 'step') == '2' and word(root, 'step_open') != '0' and not entries(url)
    sync(root)
    to.wait_for(lambda: steps(url) == 3, 'the step is there')
    to.end()


def has(other, step, root):
    """Also while a restore exchanges the copy: the name, and the files below it, are there at any moment."""
    return word(other, 'durable_step') == str(step) and same(root, other)


def test_a_standby_behind_a_gap_or_a_rollback_is_restored_anew(tmp_path, make_store, programs):
    url, root, other = make_vault(str(tmp_path / 'v')), model(make_store), make_store().mount() / 'copy'
    command(root, 'snapshot two')
    to = programs('archiver', 'archive', root, job_of(url), '--follow', '--log')
    at = programs('standby', 'restore', job_of(url), other, '--follow')
    train(root, 3)
    at.wait_for(lambda: other.exists() and has(other, 3, root), 'the copy has it')
    command(root, 'rollback two')
    train(root, 30)
    at.wait_for(lambda: has(other, 3, root), 'the copy has the other step 3')
    to.end()
    with open(root / 'w', 'r+b') as f:
        f.write(bytes(64))
    train(root, 4)
    train(root, 5)
    to.start()
    at.wait_for(lambda: has(other, 5, root), 'the copy has step 5')
    at.end()
    assert sorted(os.listdir(other.parent)) == ['copy']
    beside = other.with_name('.hitrain-next-copy')     # as a kill leaves it
    run('hitrainctl', 'restore', f'{job_of(url)}@5', beside)
    os.setxattr(beside, 'user.hitrain-follow', b'step=5')
    at.start()
    at.wait_for(lambda: not beside.exists(), 'what was left is gone')
    at.end()
    beside.mkdir()
    at.start()
    assert at.process.wait(SECONDS_MAX) == 1 and 'it is no copy that was left here' in at.said() and beside.exists()


def test_of_two_archivers_of_one_rank_the_first_one_ends(tmp_path, make_store, programs):
    url, root = make_vault(str(tmp_path / 'v')), model(make_store)
    first = programs('first', 'archive', root, job_of(url), '--follow', '--log')
    first.wait_for(lambda: entries(url), 'a full step is there')
    epoch = head(url).epoch
    second = programs('second', 'archive', root, job_of(url), '--follow', '--log')
    second.wait_for(lambda: head(url).epoch > epoch, 'it has opened the job')
    train(root, 3)                          # which both have to archive
    wait_for(lambda: first.process.poll() is not None, 'the first one ends')
    assert first.process.returncode == archivers.FENCED and re.search('vault-fenced: .* is at epoch', first.said())
    train(root, 4)
    second.wait_for(lambda: steps(url) == 4, 'the second one goes on')
    second.end()


@each_way
def test_training_does_not_wait_for_a_silent_vault(place, make_store, programs):
    if not place.server or place.url('x').startswith('ssh'):
        pytest.skip('no server that can be stopped')
    url, root = new_vault(place), model(make_store)
    to = programs('archiver', 'archive', root, job_of(url), '--follow', '--log')
    to.wait_for(lambda: entries(url), 'a full step is there')
    place.stop()
    try:
        for n in range(3, 30):
            begin = time.monotonic()
            train(root, n)
            assert time.monotonic() - begin < 20
        assert to.process.poll() is None
    finally:
        place.go_on()
    to.wait_for(lambda: steps(url) == 29, 'the newest step is there')
    to.end()


def test_a_full_vault_is_told_and_waited_for(tmp_path, make_store, programs):
    (tmp_path / 'v').mkdir()
    url, root = make_vault(f'test:{tmp_path}/v'), model(make_store)
    (tmp_path / 'v/~faults').write_text('6*full put_new seg/\n')
    to = programs('archiver', 'archive', root, job_of(url), '--follow', '--log')
    to.wait_for(lambda: steps(url) == 2, 'the step is there')
    assert (tmp_path / 'v/~used').read_text().count('0') >= 6
    to.end()


def test_an_engine_that_lets_a_second_put_win_is_refused(tmp_path, make_store, programs):
    """Each archiver says what can still be done, and one alone may do it. Options that nothing would look at are refused by name."""
    (tmp_path / 'v').mkdir()
    url, root = make_vault(f'test:{tmp_path}/v'), model(make_store)
    (tmp_path / 'v/~faults').write_text('**twice put_new\n')
    command(root, 'snapshot base')

    def refused(*words):
        done = run('hitrainctl', *words, check=False)
        assert done.returncode != 0
        return done.stderr
    for options in ['base', job_of(url), '--rank=0of2'], [job_of(url), '--follow', '--rank=1of2'], [job_of(url), '--follow']:
        why = refused('archive', root, *options)
        assert 'create-if-absent' in why and '--single-writer. Restore and verify work' in why
    assert 'for several' in refused('archive', root, 'base', job_of(url), '--rank=0of2', '--single-writer')
    assert not [key for prefix in ('job/', 'probe/', 'lease/') for key, _, _ in engine_of(url).list(prefix)]
    run('hitrainctl', 'archive', root, 'base', job_of(url), '--single-writer')
    for options in [job_of(url), tmp_path / 'x', '--shard=0of2'], ['-', tmp_path / 'x'], ['-', root, '--follow']:
        assert '--rank is for' in refused('restore', *options, '--rank=0of2')


def test_who_waits_long_says_so_once_an_hour(monkeypatch, capsys):
    monkeypatch.setattr(archivers, 'BEHIND_S', 0)
    monkeypatch.setattr(archivers, 'PAUSE_S_MAX', 0.01)
    pause = archivers.Pause('s3://b/v', lambda: 'step 1200')
    for _ in range(3):
        pause(errors.Full('no space there'))
    assert capsys.readouterr().err == 'hitrainctl: vault-behind: step 1200 waits for s3://b/v since 0 min: no space there\n'
    assert not stop.is_asked()


def test_content_that_was_changed_in_the_vault_is_refused_by_name(tmp_path, make_store, programs):
    """A logged step with one bit of a gradient flipped: the copy stays at the step before, and says which object."""
    url, root, other = make_vault(str(tmp_path / 'v')), model(make_store), make_store().mount() / 'copy'
    to = programs('archiver', 'archive', root, job_of(url), '--follow', '--log')
    to.wait_for(lambda: entries(url), 'a full step is there')
    before = set((tmp_path / 'v/seg').rglob('*'))
    train(root, 3)
    to.wait_for(lambda: steps(url) == 3, 'the step is there')
    to.end()
    segment = next(p for p in set((tmp_path / 'v/seg').rglob('*')) - before if p.is_file())
    data = bytearray(segment.read_bytes())
    data[5000] ^= 1
    segment.write_bytes(data)
    at = programs('standby', 'restore', job_of(url), other, '--follow')
    assert at.process.wait(SECONDS_MAX) == 1 and f'seg/{segment.parent.name}/{segment.name}' in at.said()
    assert word(other, 'step') == '2' and word(other, 'step_open') == '0'
    assert content(other, *FILES) != content(root, *FILES)


def half_made(root):
    """As optim/torch/hitrain/_making.py makes a model, up to its first commit. Returns the maker's claim."""
    root.mkdir()
    word(root, 'making', 'optimizer')
    word(root, 'optimizer', REDO)
    return half_make(root)


def half_make(root):
    ctl = claimed(root, 'maker')
    said = dict(line.split('=') for line in word(root, 'redo').splitlines())
    word(root, 'making', f'optimizer {said["lineage"]} {said["publications"]}')
    word(root, 'dtype', 'f32')
    (root / 'w').write_bytes(b'\0' * 4096)
    return ctl


def dies(ctl):
    os.write(ctl, b'unclaim\n')
    os.close(ctl)


def claimed(root, name):
    ctl = os.open(root / '.hitrain/ctl', os.O_RDWR)
    os.write(ctl, f'claim {name}\n'.encode())
    return ctl


def test_a_model_whose_maker_died_stays_half_made(tmp_path, make_store, programs):
    """Nothing makes it whole but the commit of its maker, or who takes it as it is."""
    url, root = make_vault(str(tmp_path / 'v')), make_store().mount() / 'model'
    dies(half_made(root))
    to = programs('archiver', 'archive', root, job_of(url), '--follow', '--log')
    to.wait_for(lambda: 'is half-made' in to.said(), 'it says why it archives nothing')
    for line in 'step', 'commit', 'snapshot', 'snapshot x if=0', 'prepare':
        assert re.search('this model is half-made: .* remove its attribute user.hitrain.making ', command(root, line)[0])
    with fails(errno.EBUSY):
        sync(root)
    assert word(root, 'error').startswith('fsync: this model is half-made')
    with fails(errno.EBUSY):
        os.open(root / '.hitrain/grad/w', os.O_WRONLY)
    assert word(root, 'error').startswith('model/w: gradient: this model is half-made')
    assert word(root, 'durable_step') == '0' and word(root, 'redo').split()[3] == 'publications=' + word(root, 'making').split()[2]
    # A trainer that claims it may end no step, with a gradient or without.
    ctl = claimed(root, 'trainer')
    for sends in False, True:
        if sends:
            put_gradient(root, 'w', b'\0' * 4096)
        for line in b'step\n', b'commit\n', b'snapshot\n':
            with fails(errno.EBUSY):
                os.write(ctl, line)
    os.write(ctl, b'abort\n')
    os.close(ctl)
    to.end()
    shutil.rmtree(root)
    sync(root.parent)
    # A maker that does not die.
    ctl = half_made(root)
    to.start()
    os.write(ctl, b'commit\n')
    os.close(ctl)
    to.wait_for(lambda: entries(url), 'the whole model is there')
    train_one(root)
    to.wait_for(lambda: steps(url) == 1, 'its step is there')
    # Nor is a copy of a whole model half-made.
    command(root, 'snapshot k')
    command(root, 'clone k copy')
    train_one(root.parent / 'copy')
    to.end()


def train_one(root):
    put_gradient(root, 'w', gradient(1024, 1, 'f32'))
    command(root, 'step')
    sync(root)


def test_an_unmount_publishes_nothing_of_a_half_made_model(make_store):
    """It would count as whole: the next mount has another lineage. What goes is made anew."""
    store = make_store()
    root = store.mount() / 'model'
    dies(half_made(root))
    store.remount()
    assert not (root / 'w').exists()
    assert 'its maker has not committed' in store.messages()


def test_a_half_made_model_is_taken_as_it_is(make_store):
    root = make_store().mount() / 'model'
    dies(half_made(root))
    assert 'half-made' in command(root, 'snapshot')[0]
    os.removexattr(root, 'user.hitrain.making')
    train_one(root)
    assert word(root, 'durable_step') == '1'


def test_a_rollback_publishes_nothing_of_a_half_made_model(make_store):
    root = make_store().mount() / 'model'
    os.close(half_made(root))
    os.removexattr(root, 'user.hitrain.making')
    train_one(root)
    command(root, 'snapshot k')
    dies(half_make(root))
    assert 'half-made' in command(root, 'rollback k')[0] and \
        'publications=' + word(root, 'making').split()[2] in word(root, 'redo').split()
    assert command(root, 'abort', 'rollback k')[-1] == 'ok'
