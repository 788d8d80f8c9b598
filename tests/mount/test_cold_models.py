# SPDX-License-Identifier: Apache-2.0
"""Cold models: content in a vault that a store reads from there. restore --cold, recall, demote, pins, and vaults that fail."""
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from calls import fails, sync
from conftest import BIN, MIB, SECONDS_MAX, Store, run, wait_for
from test_archive import archive, restore, vault  # noqa: F401
from test_roots import command, put_gradient, random, word
from test_step_streams import content, digest, make_model, step

ELEMENTS = 1_500_000            # of each of two tensors: 6 blocks, the last one short. A segment has 31: there are two
TRAINED = 2 * ELEMENTS * 4 * 3
CHUNKS = 2 * 6 * 3
NAMES = 'w', 'deep/v'
PROGRAM = 'hitrain-vault-file'


@pytest.fixture
def stores(make_store):
    """Two with room for two models and their next steps."""
    pair = make_store('1G'), make_store('1G')
    return pair, [s.mount() for s in pair]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """(the image of a store with the model that trained, its vault): step 2 is in the vault. Made once, for copies."""
    folder = tmp_path_factory.mktemp('trained')
    store, vault = Store(folder, '1G'), folder / 'vault'
    run('hitrainctl', 'vault', 'init', vault)
    try:
        root = make_model(store.mount() / 'model', elements=ELEMENTS)
        for seed in (10, 20):
            step(root, seed, elements=ELEMENTS)
        command(root, 'snapshot')
        archive(root, '2', f'{vault}/job')
    finally:
        store.close(failed=False)
    yield store.image, vault
    shutil.rmtree(folder)


@pytest.fixture
def last_week(trained, make_store, tmp_path):
    """(the model that trained, its vault, another store, its mount point)"""
    image, vault = trained
    ours, other = make_store('1G'), make_store('1G')
    subprocess.run(['cp', '--sparse=always', image, ours.image], check=True)
    return ours.mount() / 'model', shutil.copytree(vault, tmp_path / 'vault'), other, other.mount()


def cold_copy(last_week):
    root, vault, _, b = last_week
    return restore(f'{vault}/job', b / 'model', '--cold')


def number(path, name):
    return int(word(path, name))


def pins(vault):
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(vault) for name in names if folder.endswith('/pin'))


def programs_of(store):
    """Processes of the scheme that the daemon of this store has started."""
    with open(f'/proc/{store.daemon.pid}/task/{store.daemon.pid}/children') as f:
        children = [int(pid) for pid in f.read().split()]
    found = []
    for task in os.listdir(f'/proc/{store.daemon.pid}/task'):
        with open(f'/proc/{store.daemon.pid}/task/{task}/children') as f:
            found += [int(pid) for pid in f.read().split()]
    return [pid for pid in sorted({*children, *found}) if PROGRAM.encode() in open(f'/proc/{pid}/cmdline', 'rb').read()]


def age(vault, seconds=90000):
    """All objects become older than the grace."""
    for folder, _, names in os.walk(vault):
        for name in names:
            path = os.path.join(folder, name)
            os.utime(path, (os.stat(path).st_mtime - seconds,) * 2)


# ---- restore --cold ----

@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_a_model_of_last_week_trains_on_from_the_vault(stores, vault, dtype):
    """Its first step reads each range from the vault and writes it here, to the same bits."""
    _, (a, b) = stores
    root = make_model(a / 'model', dtype, elements=ELEMENTS)
    word(root / 'w', 'shape', f'{ELEMENTS}')
    (root / 'note').write_bytes(b'of no dtype')
    for seed in (10, 20):
        step(root, seed, dtype, elements=ELEMENTS)
    command(root, 'snapshot')
    archive(root, '2', f'{vault}/job')
    got = restore(f'{vault}/job@2', b / 'model', '--cold')
    model = b / 'model'
    assert word(model, 'cold') == 'job@2' and word(model, 'step') == word(model, 'durable_step') == '2'
    assert 0 <= number(model, 'cold_bytes') - got['cold_bytes'] < 4096 * CHUNKS and got['cold_bytes'] + got['fetched_bytes'] == got['bytes']
    # Masters beside bf16 are shown in a form that the store does not keep: they come here.
    assert got['fetched_bytes'] < (MIB if dtype == 'f32' else 25 * MIB) and number(b, 'cold_bytes') == number(model, 'cold_bytes') and len(pins(vault)) == 1
    assert (model / 'note').read_bytes() == b'of no dtype'
    assert content(root, *NAMES) == content(model, *NAMES)
    command(model, 'snapshot')
    assert digest(model, '2') == got['digest']
    for each in (root, model):
        step(each, 30, dtype, elements=ELEMENTS)
    assert content(root, *NAMES) == content(model, *NAMES)
    assert number(model, 'cold_bytes') < got['cold_bytes'] / 10
    command(model, 'forget *')


def test_a_cold_restore_writes_places_and_no_content(last_week):
    """Its log has no more than that of a restored model, whose chunks take 63 bytes each; devices get nothing else."""
    _, vault, _, b = last_week
    restore(f'{vault}/job', b / 'first', '--cold')     # the log names the vault
    logged = [number(b, 'log_reserved_bytes')]
    for name, words in (('warm', ()), ('model', ('--cold',))):
        written = number(b, 'device_written_bytes')
        restore(f'{vault}/job', b / name, *words)
        logged.append(number(b, 'log_reserved_bytes'))
    assert logged[2] - logged[1] <= 1.1 * (logged[1] - logged[0]), logged
    assert number(b, 'device_written_bytes') - written < TRAINED / 10


def test_a_second_read_comes_from_memory(last_week):
    root, _, _, b = last_week
    cold_copy(last_week)
    assert number(b, 'cold_read_bytes') == 0
    assert (b / 'model/w').read_bytes() == (root / 'w').read_bytes()
    read = number(b, 'cold_read_bytes')
    assert 4 * ELEMENTS <= read < 5 * ELEMENTS and number(b, 'cold_waits') > 0
    with open(b / 'model/w', 'rb') as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert f.read() == (root / 'w').read_bytes()
    assert number(b, 'cold_read_bytes') == read


@pytest.mark.parametrize('name', ['w', '.hitrain/state/w/exp_avg'])
def test_a_reader_of_parameters_or_state_is_read_ahead(last_week, name):
    _, _, _, b = last_week
    cold_copy(last_week)
    before = number(b, 'cold_read_bytes')
    fd = os.open(b / 'model' / name, os.O_RDONLY | os.O_DIRECT)
    try:
        for at in range(4):
            assert len(os.pread(fd, MIB, at * MIB)) == MIB
        wait_for(lambda: number(b, 'cold_read_bytes') - before > 4 * MIB, 'more than was read comes')
    finally:
        os.close(fd)


def test_a_cold_model_survives_a_crash(last_week):
    root, vault, store, b = last_week
    cold_copy(last_week)
    store.crash()
    assert word(b / 'model', 'cold') == 'job@2'
    assert content(root, *NAMES) == content(b / 'model', *NAMES)


def test_what_cannot_be_cold_is_refused(last_week):
    root, vault, _, b = last_week
    for words, why in ((('-', b / 'x', '--cold'), '--cold is for a step in a vault'),
                       ((f'{vault}/job', b / 'x', '--cold', f'--base={root}'), '--cold is for a step in a vault'),
                       ((f'{vault}/job@9', b / 'x', '--cold'), 'has no step 9'),
                       ((f'{vault}/job', vault.parent / 'x', '--cold'), 'not on a hitrain mount')):
        done = run('hitrainctl', 'restore', *words, check=False)
        assert done.returncode in (1, 2) and why in done.stderr, done.stderr
    assert os.listdir(b) == [] and pins(vault) == []


def test_a_store_reads_from_one_vault(last_week, tmp_path):
    root, vault, _, b = last_week
    other = tmp_path / 'other'
    run('hitrainctl', 'vault', 'init', other)
    archive(root, '2', f'{other}/job')
    cold_copy(last_week)
    done = run('hitrainctl', 'restore', f'{other}/job', b / 'second', '--cold', check=False)
    assert done.returncode == 1 and not (b / 'second').exists() and pins(other) == [], done.stderr


# ---- archives of cold models ----

def test_archiving_a_cold_model_moves_no_bytes(last_week):
    root, vault, _, b = last_week
    cold_copy(last_week)
    model = b / 'model'
    os.setxattr(model / 'w', 'user.note', b'other')
    command(model, 'snapshot')
    read = number(b, 'cold_read_bytes')
    got = archive(model, '2', f'{vault}/second')
    assert got['new_bytes'] < MIB and number(b, 'cold_read_bytes') == read
    restore(f'{vault}/second', b / 'again')
    assert content(root, *NAMES) == content(b / 'again', *NAMES)
    command(model, 'forget *')


# ---- recall ----

def test_recall_brings_a_file_and_then_all(last_week):
    root, vault, store, b = last_week
    got = cold_copy(last_week)
    model = b / 'model'
    said = json.loads(run('hitrainctl', 'recall', model / 'w', '--json').stdout)
    assert said['cold'] == 'job@2' and number(model / 'w', 'cold_bytes') == 0
    assert 0 < number(model, 'cold_bytes') < got['cold_bytes'] and len(pins(vault)) == 1
    said = json.loads(run('hitrainctl', 'recall', model, '--json').stdout)
    assert said['cold'] is None and len(said['unpinned']) == 1 and pins(vault) == []
    with pytest.raises(OSError):
        word(model, 'cold')
    shutil.rmtree(vault)
    store.remount()
    assert content(root, *NAMES) == content(model, *NAMES)
    step(model, 30, elements=ELEMENTS)
    assert 'nothing in it is cold' in run('hitrainctl', 'recall', model, check=False).stderr


def test_a_recall_takes_every_name_and_no_command(last_week):
    root, vault, _, b = last_week
    names = ['a\nforget *', os.fsdecode(b'\xff')]
    for name in names:
        os.link(root / 'w', root / name)
    step(root, 30, elements=ELEMENTS)
    command(root, 'snapshot')
    archive(root, '3', f'{vault}/names')
    model = b / 'model'
    restore(f'{vault}/names', model, '--cold')
    command(model, 'snapshot kept')
    for name in names[1:]:
        run('hitrainctl', 'recall', model / name)
    done = run('hitrainctl', 'recall', model / names[0], check=False)
    assert done.returncode == 1 and 'newline' in done.stderr and (model / '.hitrain/snap/kept').exists()


def test_the_pin_of_a_model_at_a_long_path_stays(last_week):
    """Also if another one has the end of this path."""
    _, vault, _, b = last_week
    long, end = b / 'd' / ('e' * 200), 'f' * 200
    for folder in long / end, b / end:
        folder.mkdir(parents=True)
    restore(f'{vault}/job', long / end / 'model', '--cold')
    restore(f'{vault}/job', b / end / 'model')
    run('hitrainctl', 'vault', 'unpin', vault, b)
    assert len(pins(vault)) == 1


def test_a_recall_that_a_full_store_ends_says_so(last_week, make_store):
    _, vault, _, _ = last_week
    small = make_store('256M')
    b = small.mount()
    restore(f'{vault}/job', b / 'model', '--cold')
    with open(b / 'fill', 'wb') as f:
        with fails(errno.ENOSPC):
            for _ in range(300):
                f.write(os.urandom(MIB))
                f.flush()
                os.fsync(f.fileno())
    done = run('hitrainctl', 'recall', b / 'model', check=False)
    assert done.returncode == 1 and 'still cold' in done.stderr and len(pins(vault)) == 1, done.stderr
    os.unlink(b / 'fill')
    sync(b)
    run('hitrainctl', 'recall', b / 'model')
    assert pins(vault) == []


# ---- a vault that fails ----

def test_a_silent_vault_is_refused_at_once_and_others_go_on(last_week):
    root, vault, store, b = last_week
    store.remount('vault_timeout=2')
    cold_copy(last_week)
    warm = make_model(b / 'warm', elements=5000)
    with open(b / 'model/w', 'rb') as f:
        assert len(f.read(4096)) == 4096
    [pid] = programs_of(store)
    os.kill(pid, signal.SIGSTOP)
    took = []
    for i in range(8):
        began = time.monotonic()
        try:
            with open(b / 'model' / ('deep/v', '.hitrain/state/deep/v/exp_avg')[i % 2], 'rb') as f:
                os.pread(f.fileno(), 4096, (2 + i // 2) * MIB)
        except OSError as e:
            assert e.errno == errno.EIO
        else:       # a busy machine: another program answers already
            assert 'vault-answers' in run('hitrainctl', 'events', b).stdout and (took or time.monotonic() - began >= 1)
            break
        took.append(time.monotonic() - began)
        step(warm, 4 + i, elements=5000)
    assert not took or took[0] >= 1, took
    assert len(took) < 2 or min(took[1:]) < 0.01, took
    assert 'vault-silent' in run('hitrainctl', 'events', b).stdout
    wait_for(lambda: 'vault-answers' in run('hitrainctl', 'events', b).stdout, 'another program answers')
    assert content(root, *NAMES) == content(b / 'model', *NAMES)


def test_a_vault_that_is_gone_fails_reads_until_it_is_back(last_week):
    root, vault, store, b = last_week
    cold_copy(last_week)
    os.rename(vault, f'{vault}.away')
    with open(b / 'model/w', 'rb') as f, fails(errno.EIO):
        f.read()
    store.unmount(check=True)
    store.mount()
    with open(b / 'model/w', 'rb') as f, fails(errno.EIO):
        f.read()
    os.rename(f'{vault}.away', vault)
    assert content(root, *NAMES) == content(b / 'model', *NAMES)


def missing(b):
    """The texts of events vault-missing."""
    events = map(json.loads, run('hitrainctl', 'events', '--json', b).stdout.splitlines())
    return [e['text'] for e in events if e['code'] == 'vault-missing']


@pytest.mark.parametrize('how', ['gone', 'another', 'older'])
def test_a_vault_that_is_not_the_right_one_is_named(last_week, how):
    """At the mount, or when it is read; again only after it was right."""
    root, vault, store, b = last_week
    old = f'{vault}.old'
    if how == 'older':
        shutil.copytree(vault, old)
        shutil.rmtree(f'{old}/seg')
    elif how == 'another':
        run('hitrainctl', 'vault', 'init', old)
        archive(root, '2', f'{old}/job')
    cold_copy(last_week)
    assert missing(b) == []

    def exchange():
        os.rename(vault, f'{vault}.right')
        if how != 'gone':
            shutil.copytree(old, vault)
        store.remount()

    def back():
        shutil.rmtree(vault, ignore_errors=True)
        os.rename(f'{vault}.right', vault)
    exchange()
    words = {'gone': 'there is no vault', 'another': 'another vault is there', 'older': 'lacks segments'}[how]
    if how != 'older':
        wait_for(lambda: missing(b), 'the event at the mount')
    for _ in range(3):
        with open(b / 'model/w', 'rb', buffering=0) as f, fails(errno.EIO):
            f.read(4096)
    [text] = missing(b)
    assert str(vault) in text and words in text
    assert ('vault-damage' in run('hitrainctl', 'events', b).stdout) == (how == 'older')
    store.unmount()
    done = run('hitrain-fsck', '--vault', store.image, check=False)
    if how == 'older':
        assert done.returncode == 4 and done.stdout.count('DATA-VAULT') == CHUNKS and 'segment is missing' in done.stdout, done.stdout
    else:
        assert done.returncode == 8 and words in done.stderr and 'DATA-VAULT' not in done.stdout, done.stderr
    back()
    done = run('hitrain-fsck', '--vault', store.image)
    assert 'not read' not in done.stdout and ' MiB verified' in done.stdout
    store.mount()
    assert content(root, *NAMES) == content(b / 'model', *NAMES) and missing(b) == []


def test_fsck_reads_the_vault_and_gives_up_what_is_damaged(last_week):
    root, vault, store, b = last_week
    cold_copy(last_week)
    store.unmount()
    assert f'{CHUNKS} chunks, ' in run('hitrain-fsck', store.image).stdout
    first = min(os.path.join(folder, name) for folder, _, names in os.walk(vault / 'seg') for name in names)
    with open(first, 'r+b') as f:
        f.seek(5000)
        f.write(b'other bytes')
    copy = shutil.copytree(vault, f'{vault}.copy')
    shutil.rmtree(vault)
    done = run('hitrain-fsck', '--vault', store.image, check=False)
    assert done.returncode == 8 and 'there is no vault' in done.stderr
    done = run('hitrain-fsck', f'--vault=file://{copy}', store.image, check=False)
    assert done.returncode == 4 and done.stdout.count('DATA-VAULT: /model/') == 1 and 'checksum does not match' in done.stdout, done.stdout
    assert run('hitrain-fsck', '-y', f'--vault=file://{copy}', store.image, check=False).returncode == 1
    assert '1 chunk marked lost' in run('hitrain-fsck', f'--vault=file://{copy}', store.image).stdout
    assert run('hitrain-fsck', '--vault', '--no-data', store.image, check=False).returncode == 16
    store.mount(f'vault=file://{copy}')
    lost = 0
    for path in content_paths(root):
        try:
            assert (b / 'model' / path).read_bytes() == (root / path).read_bytes()
        except OSError as e:
            assert e.errno == errno.EIO
            lost += 1
    assert lost == 1


def test_damage_in_a_vault_is_never_read(last_week):
    """A flipped bit, a cut segment, one exchanged with another, and none."""
    root, vault, store, b = last_week
    cold_copy(last_week)
    segments = sorted(os.path.join(folder, name) for folder, _, names in os.walk(vault / 'seg') for name in names)
    right = {}
    for name in segments:
        with open(name, 'rb') as f:
            right[name] = f.read()
    first, other = segments[0], segments[1]
    data = right[first]
    for bad in (bytes(4096) + bytes(b ^ 1 for b in data[4096:5 * MIB]) + data[5 * MIB:], data[:8192], right[other], None):
        os.unlink(first)
        if bad is not None:
            with open(first, 'wb') as f:
                f.write(bad)
        store.remount()
        failed = 0
        for path in content_paths(root):
            with open(root / path, 'rb') as f:
                want = f.read()
            try:
                assert (b / 'model' / path).read_bytes() == want
            except OSError as e:
                assert e.errno == errno.EIO
                failed += 1
        assert failed
    assert 'vault-damage' in run('hitrainctl', 'events', b).stdout
    with open(first, 'wb') as f:
        f.write(data)
    assert content(root, *NAMES) == content(b / 'model', *NAMES)


@pytest.mark.parametrize('how', ['older', 'another'])
def test_an_older_vault_or_another_one_is_never_read_as_this_one(last_week, how):
    """Both have other bytes at some of the same places. Nothing can make them the store's vault, and no pin goes."""
    root, vault, store, b = last_week
    place, away = vault.with_name('place'), vault.with_name('away')
    if how == 'older':
        shutil.copytree(vault, place)
    else:
        run('hitrainctl', 'vault', 'init', place)
    for seed, url in (30, f'{vault}/job'), (40, f'{place}/second'):
        step(root, seed, elements=ELEMENTS)
        command(root, 'snapshot')
        archive(root, word(root, 'step'), url)
        if seed == 30:
            want = content(root, *NAMES)
    restore(f'{vault}/job', b / 'model', '--cold')
    os.rename(vault, away)
    os.rename(place, vault)
    store.remount()
    failed = 0
    for path, data in want.items():
        try:
            assert (b / 'model' / path).read_bytes() == data
        except OSError as e:
            assert e.errno == errno.EIO
            failed += 1
    assert failed and ('vault-missing' if how == 'another' else 'vault-damage') in run('hitrainctl', 'events', b).stdout
    for words, why in ((('recall', b / 'model'), 'still cold'), (('demote', b / 'model', f'{vault}/x'), 'error')):
        done = run('hitrainctl', *words, check=False)
        assert done.returncode == 1 and why in done.stderr, done.stderr
    if how == 'another':
        done = restore(f'{vault}/second', b / 'new', '--cold', check=False)
        assert done.returncode == 1 and 'lies in another vault' in done.stderr
    run('hitrainctl', 'vault', 'unpin', vault, b)
    os.rename(vault, place)
    os.rename(away, vault)
    assert content(b / 'model', *NAMES) == want and len(pins(vault)) == 1


def content_paths(root):
    return [*NAMES, *(f'.hitrain/state/{n}/{s}' for n in NAMES for s in os.listdir(root / '.hitrain/state' / n))]


# ---- pins ----

def test_a_collector_keeps_what_a_cold_model_needs_until_unpin(last_week):
    root, vault, store, b = last_week
    cold_copy(last_week)
    run('hitrainctl', 'vault', 'forget', f'{vault}/job', '2')
    for _ in range(3):
        age(vault)
        run('hitrainctl', 'vault', 'gc', vault)
    assert content(root, *NAMES) == content(b / 'model', *NAMES)
    run('hitrainctl', 'vault', 'unpin', vault, b)
    assert len(pins(vault)) == 1
    command(b / 'model', 'snapshot kept')
    run('hitrainctl', 'recall', b / 'model')
    assert len(pins(vault)) == 1        # the kept step is cold
    command(b / 'model', 'forget *')
    run('hitrainctl', 'vault', 'unpin', vault, b)
    assert pins(vault) == []
    for _ in range(3):
        age(vault)
        run('hitrainctl', 'vault', 'gc', vault)
    assert not any(names for _, _, names in os.walk(vault / 'seg'))


def test_a_deleted_model_needs_no_pin(last_week):
    _, vault, _, b = last_week
    cold_copy(last_week)
    restore(f'{vault}/job', b / 'second', '--cold')
    shutil.rmtree(b / 'model')
    said = json.loads(run('hitrainctl', 'vault', 'unpin', vault, b, '--json').stdout)
    assert said['unpinned'] == [] and len(pins(vault)) == 1
    shutil.rmtree(b / 'second')
    run('hitrainctl', 'vault', 'unpin', vault, b)
    assert pins(vault) == []


def test_pins_of_a_store_that_is_gone_are_dropped_by_its_number(last_week):
    _, vault, _, b = last_week
    cold_copy(last_week)
    uuid = pins(vault)[0].rpartition('.')[2]
    run('hitrainctl', 'vault', 'unpin', vault, f'--store={"0" * 32}')
    assert len(pins(vault)) == 1
    run('hitrainctl', 'vault', 'unpin', vault, f'--store={uuid}')
    assert pins(vault) == []


def test_a_step_that_was_forgotten_is_refused_and_the_pin_of_another_model_stays(last_week):
    root, vault, _, b = last_week
    cold_copy(last_week)
    run('hitrainctl', 'vault', 'forget', f'{vault}/job', '2')
    done = run('hitrainctl', 'restore', f'{vault}/job@2', b / 'second', '--cold', check=False)
    assert done.returncode == 1 and len(pins(vault)) == 1
    assert content(root, *NAMES) == content(b / 'model', *NAMES)


# ---- demote ----

def demote(root, url, *options, check=True):
    return run('hitrainctl', 'demote', root, url, '--json', *options, check=check)


def test_a_demoted_model_is_cold_at_its_name_and_trains_on(last_week):
    root, vault, _, b = last_week
    restore(f'{vault}/job', b / 'twin')
    used = number(b, 'free_bytes')
    said = json.loads(demote(b / 'twin', f'{vault}/twin').stdout)
    assert TRAINED <= said['cold_bytes'] <= number(b / 'twin', 'cold_bytes') and word(b / 'twin', 'cold') == 'twin@2'
    wait_for(lambda: number(b, 'free_bytes') > used + TRAINED / 2, 'space comes free')
    assert os.listdir(b) == ['twin']
    assert content(root, *NAMES) == content(b / 'twin', *NAMES)
    for each in (root, b / 'twin'):
        step(each, 30, elements=ELEMENTS)
    assert content(root, *NAMES) == content(b / 'twin', *NAMES)


def test_a_model_in_use_is_not_demoted(last_week):
    root, vault, _, _ = last_week
    was = content(root, *NAMES)

    def refused(why):
        done = demote(root, f'{vault}/job', check=False)
        assert done.returncode == 1 and why in done.stderr, done.stderr
        assert os.listdir(root.parent) == ['model']
    with open(root / 'w', 'rb'), subprocess.Popen(['sleep', '600'], stdin=open(root / 'w', 'rb')) as other:
        refused('has it open')
        other.kill()
    away = root.parent.with_name('away')
    away.mkdir()
    with subprocess.Popen(['unshare', '-m', 'sh', '-c', 'mount --move "$1" "$2" && exec sleep 600 <"$2/model/w"', 'sh', root.parent, away]) as other:
        wait_for(lambda: open(f'/proc/{other.pid}/comm').read() == 'sleep\n', 'it has the model open at another path')
        refused('has it open')
        other.kill()
    word(root / 'w', 'pin', 'dram')
    refused('is pinned')
    os.removexattr(root / 'w', 'user.hitrain.pin')
    command(root, 'snapshot local')
    refused('no vault has its kept step local')
    command(root, 'forget local')
    fd = os.open(root / '.hitrain/ctl', os.O_RDWR)
    os.write(fd, b'claim trainer\n')
    refused('trainer')
    os.close(fd)
    put_gradient(root, 'w', random(ELEMENTS, 50))
    refused('a step is open')
    command(root, 'abort')
    assert content(root, *NAMES) == was
    demote(root, f'{vault}/job')


MAPS = 'import mmap, sys; f = open(sys.argv[1], "r+b"); m = mmap.mmap(f.fileno(), 0); f.close(); print(m[0], flush=True); sys.stdin.read()'


def test_a_model_that_is_handed_out_is_demoted_when_nobody_maps_it(last_week):
    root, vault, store, b = last_week
    store.remount('passthrough=16M', 'dram=64M')
    if 'passthrough is off' in store.messages():
        pytest.skip('no passthrough files here')
    restore(f'{vault}/job', b / 'twin')
    with subprocess.Popen([sys.executable, '-c', MAPS, b / 'twin/w'], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        done = demote(b / 'twin', f'{vault}/twin', check=False)
        assert done.returncode == 1 and f'process {other.pid} has it open' in done.stderr, done.stderr
    assert 'passthrough_files                               1' in run('hitrainctl', 'stats', b).stdout, 'its pages are still handed out'
    demote(b / 'twin', f'{vault}/twin')
    for each in (root, b / 'twin'):
        step(each, 30, elements=ELEMENTS)
    assert content(root, *NAMES) == content(b / 'twin', *NAMES)


CUT = '''
import os, sys
sys.path[:0] = [{vault!r}, {tools!r}]
import demote_command, cold, staging
owner, name, when = {where}
was = getattr(owner, name)
def cut(*words, **more):
    if when == 'after':
        was(*words, **more)
    os._exit(9)
setattr(owner, name, cut)
demote_command.run([{root!r}, {url!r}])
'''


@pytest.mark.parametrize('where', ["demote_command, 'put', 'after'", "demote_command, 'read_back', 'after'", "cold, 'begin', 'after'",
                                   "staging.Replacing, 'publish', 'before'", "staging.Replacing, 'exchange', 'after'",
                                   "demote_command.Claimed, 'still', 'after'", "staging.Replacing, 'drop', 'before'"])
def test_a_demotion_that_is_cut_leaves_the_model_at_its_name(last_week, where):
    """The program ends there, and then the daemon. The next demotion finishes the work."""
    root, vault, store, b = last_week
    twin = b / 'twin'
    restore(f'{vault}/job', twin)
    tools = BIN.parent / 'share/hitrain'
    done = subprocess.run([sys.executable, '-c', CUT.format(vault=str(tools / 'vault'), tools=str(tools / 'tools'), where=where,
                                                           root=str(twin), url=f'{vault}/twin')],
                          capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 9, done.stderr
    store.crash()
    assert content(root, *NAMES) == content(twin, *NAMES) and word(twin, 'step') == '2'
    demote(twin, f'{vault}/twin')
    assert os.listdir(b) == ['twin'] and content(root, *NAMES) == content(twin, *NAMES)


def test_a_kept_step_that_the_vault_has_lost_is_not_demoted(last_week):
    _, vault, _, b = last_week
    twin = b / 'twin'
    restore(f'{vault}/job', twin)
    command(twin, 'snapshot only')
    archive(twin, 'only', f'{vault}/kept')
    run('hitrainctl', 'vault', 'forget', f'{vault}/kept', '2')
    done = demote(twin, f'{vault}/twin', check=False)
    assert done.returncode == 1 and 'has not its kept step only, which would go' in done.stderr
    assert (twin / '.hitrain/snap/only/w').exists()
    archive(twin, 'only', f'{vault}/kept')
    demote(twin, f'{vault}/twin')


def test_a_model_that_the_daemon_could_not_read_is_not_demoted(last_week):
    """Its URL of the vault is another one than that of the program."""
    _, vault, store, b = last_week
    twin = b / 'twin'
    restore(f'{vault}/job', twin)
    command(twin, 'commit')
    copy = store.image.with_name('copy')
    shutil.copytree(vault, copy)
    store.unmount(check=True)
    store.mount(f'vault=file://{copy}')
    before = content(twin, *NAMES)
    done = demote(twin, f'{vault}/twin', check=False)
    assert done.returncode == 1 and 'the daemon cannot read it from the vault' in done.stderr
    assert word(twin, 'cold_bytes') == '0' and content(twin, *NAMES) == before
    store.unmount(check=True)
    store.mount()
    demote(twin, f'{vault}/twin')


def test_models_that_rest_are_demoted(last_week):
    root, vault, _, b = last_week
    for name in ('old', 'young', 'foreign'):
        restore(f'{vault}/job', b / name)
    archive(root, '2', f'{vault}/foreign')      # of another store, at this path
    (b / 'group').mkdir()
    restore(f'{vault}/job', b / 'group/old')
    (b / 'young/note').write_bytes(b'now')
    week = time.time() - 8 * 86400
    for path in (b / 'old', b / 'group/old', b / 'foreign'):
        for folder, _, names in os.walk(path):
            for name in names:
                os.utime(os.path.join(folder, name), (week, week))
            os.utime(folder, (week, week))
        sync(path)
    done = run('hitrainctl', 'demote', '--older-than=7d', b, vault, check=False)
    assert done.returncode == 1 and 'the steps of foreign are of another store' in done.stderr
    assert word(b / 'old', 'cold') == 'old@2' and word(b / 'group/old', 'cold') == 'group.old@2'
    for name in ('young', 'foreign'):
        with pytest.raises(OSError):
            word(b / name, 'cold')
    assert content(root, *NAMES) == content(b / 'group/old', *NAMES)
