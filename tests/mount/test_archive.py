# SPDX-License-Identifier: Apache-2.0
"""hitrainctl archive and restore through a vault in a folder: whole kept steps, new content alone, and damage."""
import errno
import fcntl
import gc
import json
import mmap
import os
import random
import shutil
import subprocess
import sys

import pytest

from conftest import MIB, ROOT, run, wait_for
from test_roots import command, word
from test_step_streams import ADAMW, content, digest, kept_step, make_model, step
from trees import blob, describe, make_carried_tree

sys.path += [str(ROOT / 'mount-helpers' / 'vault'), str(ROOT / 'mount-helpers' / 'tools')]
import engine  # noqa: E402
import jobs  # noqa: E402
import restore as restoring  # noqa: E402
import scheme_file  # noqa: E402
import wire  # noqa: E402
from errors import Full  # noqa: E402
from objects import Failure  # noqa: E402


@pytest.fixture
def vault(tmp_path):
    folder = tmp_path / 'vault'
    folder.mkdir()
    run('hitrainctl', 'vault', 'init', folder)
    return folder


def archive(root, name, url, *options):
    return json.loads(run('hitrainctl', 'archive', root, name, url, '--json', *options).stdout)


def restore(url, path, *options, check=True):
    done = run('hitrainctl', 'restore', url, path, '--json', *options, check=check)
    return json.loads(done.stdout) if check else done


def has_digest(root, name):
    try:
        return os.getxattr(root / '.hitrain' / 'snap' / name, 'user.hitrain.digest')
    except OSError:
        return None


def stored(vault):
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, files in os.walk(vault / 'seg') for name in files)


@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_a_restored_step_trains_on_to_the_same_bits(stores, vault, dtype):
    _, (a, b) = stores
    root = make_model(a / 'model', dtype)
    (root / 'frozen').write_bytes(blob(70 * MIB + 5))   # more than two segments
    for seed in (10, 20):
        step(root, seed, dtype)
    command(root, 'snapshot')
    said = archive(root, '2', f'{vault}/job')
    got = restore(f'{vault}/job', b / 'model')
    assert got['digest'] == said['digest'] == digest(root, '2') and got['bytes'] == said['bytes'] == got['fetched_bytes']
    assert word(b / 'model', 'step') == word(b / 'model', 'durable_step') == '2'
    command(b / 'model', 'snapshot')
    assert digest(b / 'model', '2') == said['digest']
    for model in (root, b / 'model'):
        step(model, 30, dtype)
    assert content(root, 'w', 'deep/v') == content(b / 'model', 'w', 'deep/v')


@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_a_compressed_step_takes_less_and_has_the_same_bits(stores, vault, dtype):
    _, (a, b) = stores
    root = make_model(a / 'model', dtype, elements=600_000)
    kept_step(root, 10, dtype, elements=600_000)
    url = f'{vault}/job'
    said = archive(root, '1', url, '--compress')
    assert said['new_bytes'] < 0.88 * said['bytes'] and stored(vault) == said['new_bytes']
    run('hitrainctl', 'vault', 'verify', vault)
    got = restore(url, b / 'model')
    assert got['digest'] == said['digest'] == digest(root, '1') and got['fetched_bytes'] < 0.88 * said['bytes']
    assert content(root, 'w', 'deep/v') == content(b / 'model', 'w', 'deep/v')
    cold = restore(url, b / 'cold', '--cold')      # the store reads frames of its own form
    assert cold['digest'] == said['digest'] and cold['cold_bytes'] > MIB
    assert content(root, 'w', 'deep/v') == content(b / 'cold', 'w', 'deep/v')
    kept_step(root, 20, dtype, elements=600_000)
    archive(root, '2', url)                         # this one is not, and shares nothing
    run('hitrainctl', 'vault', 'forget', url, '2')
    run('hitrainctl', 'vault', 'gc', vault)
    assert restore(url, b / 'again')['digest'] == said['digest']


def test_verify_names_each_step_that_has_a_damaged_block(stores, vault):
    _, (a, _) = stores
    root, note = make_model(a / 'model', elements=600_000), os.urandom(MIB)
    (root / 'note').write_bytes(note)
    for number in 1, 2:
        kept_step(root, number, elements=600_000)
        archive(root, f'{number}', f'{vault}/job')
    segment = next(p for p in vault.rglob('seg/*/*') if note[:64] in p.read_bytes())
    with open(segment, 'r+b') as f:
        f.seek(segment.read_bytes().index(note[:64]))
        f.write(bytes([note[0] ^ 4]))
    said = run('hitrainctl', 'vault', 'verify', vault, check=False).stderr
    assert said.count('its checksum is wrong') == 2 and 'step 1' in said and 'step 2' in said, said


def test_damage_of_a_compressed_block_is_named(stores, vault):
    _, (a, b) = stores
    root = make_model(a / 'model', elements=600_000)
    command(root, 'snapshot')
    archive(root, '0', f'{vault}/job', '--compress')
    segment = next(p for p in vault.rglob('seg/*/*') if p.stat().st_size > MIB)
    with open(segment, 'r+b') as f:
        f.seek(MIB // 2)
        byte = f.read(1)
        f.seek(MIB // 2)
        f.write(bytes([byte[0] ^ 4]))
    done = restore(f'{vault}/job', b / 'model', check=False)
    assert done.returncode == 1 and 'its checksum is wrong' in done.stderr and not (b / 'model').exists()
    assert 'its checksum is wrong' in run('hitrainctl', 'vault', 'verify', vault, check=False).stderr
    refused = run('hitrainctl', 'archive', root, '0', '-', '--compress', check=False)
    assert refused.returncode == 2 and '--compress is for a vault' in refused.stderr


def test_everything_of_a_tree_comes_back(stores, vault):
    _, (a, b) = stores
    root = a / 'model'
    root.mkdir()
    make_carried_tree(root)
    word(root, 'optimizer', ADAMW)
    command(root, 'snapshot tree')
    archive(root, 'tree', f'{vault}/job')
    restore(f'{vault}/job@0', b / 'model')
    sent, got = describe(root / '.hitrain' / 'snap' / 'tree'), describe(b / 'model')
    assert sent.keys() == got.keys() and {k: (sent[k], got[k]) for k in sent if sent[k] != got[k]} == {}


def test_only_what_is_new_is_put(stores, vault):
    """Also where the store does not keep the earlier step any more: then it reads all, and puts the same."""
    pair, (a, b) = stores
    root = make_model(a / 'model')
    (root / 'frozen').write_bytes(blob(40 * MIB + 5))
    kept_step(root, 10)
    archive(root, '1', f'{vault}/job')
    was = stored(vault)
    with open(root / 'frozen', 'r+b') as f:
        f.seek(7 * MIB + 100)
        f.write(b'changed')
    kept_step(root, 20)
    pair[0].unmount()
    pair[0].mount('commit=3600', 'digest=on')
    for n in '12':
        wait_for(lambda: has_digest(root, n), 'the digest of the store')
    pair[0].unmount()
    pair[0].mount('commit=3600')
    read = int(word(a, 'device_read_bytes'))
    said = archive(root, '2', f'{vault}/job')
    trained = 2 * 300_000 * 4 * 3
    assert int(word(a, 'device_read_bytes')) - read < trained + 8 * MIB
    assert trained < said['new_bytes'] == stored(vault) - was < trained + 2 * MIB
    step(root, 30)
    command(root, 'snapshot', 'forget 1', 'forget 2')
    was = stored(vault)
    said = archive(root, '3', f'{vault}/job')
    assert trained < said['new_bytes'] == stored(vault) - was < trained + MIB
    for n in '123':
        restore(f'{vault}/job@{n}', b / n)
    assert (b / '3' / 'frozen').read_bytes() == (root / 'frozen').read_bytes()
    assert (b / '1' / 'frozen').read_bytes() == blob(40 * MIB + 5)


def test_what_the_store_has_is_shared_and_not_fetched(stores, vault):
    _, (a, b) = stores
    root = make_model(a / 'model')
    (root / 'frozen').write_bytes(blob(40 * MIB + 5))
    kept_step(root, 10)
    archive(root, '1', f'{vault}/job')
    restore(f'{vault}/job', b / 'one')
    command(b / 'one', 'snapshot')
    kept_step(root, 20)
    archive(root, '2', f'{vault}/job')
    got = restore(f'{vault}/job', b / 'two', f'--base={b / "one"}')
    trained = 2 * 300_000 * 4 * 3
    assert trained < got['bytes'] - 38 * MIB and got['fetched_bytes'] < trained + MIB
    command(b / 'two', 'snapshot')
    assert digest(b / 'two', '2') == digest(root, '2') == got['digest']


def test_a_step_that_is_there_is_archived_again_without_harm(stores, vault):
    _, (a, b) = stores
    root = make_model(a / 'model')
    kept_step(root, 10)
    archive(root, '1', f'{vault}/job')
    was = stored(vault)
    archive(root, '1', f'{vault}/job')
    assert stored(vault) == was
    restore(f'{vault}/job@1', b / 'model')


def test_what_is_not_there_is_named(stores, vault):
    _, (a, b) = stores
    root = make_model(a / 'model')
    command(root, 'snapshot x')
    archive(root, 'x', f'{vault}/job')
    (vault.parent / 'empty').mkdir()
    for url, why in (('nothing', 'no vault'), ('empty/job', 'no vault'), ('vault/..', 'expected URL/JOB'), ('vault/none', 'there is no job none'),
                     ('vault/job@9', 'has no step 9'), ('vault/job@x', 'number of a step')):
        done = restore(vault.parent / url, b / 'new', check=False)
        assert done.returncode in (1, 2) and why in done.stderr and not os.listdir(b), done.stderr


# ---- hostile bytes ----

class Direct(engine.Engine):
    """A scheme in this process, without a deadline."""

    def __init__(self, scheme):
        super().__init__('direct', engine.TIMEOUT_S)
        self.scheme, self.room = scheme, bytearray(self.object_bytes_max)

    def exchange(self, verb, key, deadline, parts=(), offset=0, length=0):
        room = memoryview(bytearray(b''.join(parts)) if verb == wire.PUT_NEW else self.room)
        result, flags, count = engine.perform(self.scheme, verb, key, offset, length, room, deadline)
        return result, flags, count, memoryview(bytes(room[:count])) if verb != wire.HELLO else b''


@pytest.fixture
def small(stores, vault):
    """A vault of little content, and its objects."""
    _, (a, b) = stores
    root = make_model(a / 'model', elements=5000)
    kept_step(root, 10, elements=5000)
    archive(root, '1', f'{vault}/job')
    objects = [os.path.join(folder, name) for folder, _, files in os.walk(vault) for name in files]
    return root, b, vault, sorted(objects)


def damages(data, dice, others):
    """Bytes that are not those of the object, each with the change."""
    for _ in range(5):
        at = dice.randrange(len(data))
        yield f'byte {at}', data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1:]
    for at in {0, 64, len(data) // 2, len(data) - 1}:
        yield f'cut at {at}', data[:at]
    yield 'longer', data + b'\0'
    for name in others:
        with open(name, 'rb') as f:
            other = f.read()
        if other != data:
            yield f'exchanged with {name}', other


def is_needed(name, objects):
    """Whole, by a restore: older heads and leases are not, and of a segment the blocks alone."""
    heads = [n for n in objects if '/head/' in n]
    return '/lease/' not in name and '/seg/' not in name and name not in heads[:-1]


def test_no_damage_of_an_object_is_restored(small):
    """Whatever was done to an object: a refusal by name and nothing there, or the same step, where no restore needs it."""
    root, b, vault, objects = small
    dice, right = random.Random(int(os.environ.get('HITRAIN_SEED', 1))), digest(root, '1')
    refused = 0
    gc.freeze()     # each collection below looks at what came after this
    e = Direct(scheme_file.File(engine.split(str(vault))[1]))
    for name in objects:
        with open(name, 'rb') as f:
            data = f.read()
        for what, bad in damages(data, dice, objects):
            with open(name, 'wb') as f:
                f.write(bad)
            try:
                vault_there = jobs.open_vault(e)
                got = restoring.from_chain(str(b / 'new'), e, vault_there, 'job', jobs.chain_of(e, vault_there, 'job'))
            except Failure as why:
                assert str(why) and not os.listdir(b), (name, what)
                refused += 1
            else:
                assert not is_needed(name, objects) and got.end.digest.hex() == right, (name, what)
                shutil.rmtree(b / 'new')
            gc.collect()    # what a traceback has open
        with open(name, 'wb') as f:
            f.write(data)
    assert refused > 30
    restore(f'{vault}/job', b / 'new')


def test_a_missing_object_is_named(small):
    _, b, vault, objects = small
    for name in objects:
        if '/seg/' not in name and not is_needed(name, objects):
            continue
        os.rename(name, f'{vault.parent}/away')
        done = restore(f'{vault}/job', b / 'new', check=False)
        assert done.returncode == 1 and done.stderr and not os.listdir(b), name
        os.rename(f'{vault.parent}/away', name)


@pytest.mark.parametrize('why', [None, errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize('count', [0, 100, MIB - 1, MIB, 3 * MIB + 4096, 3 * MIB + 4097])
def test_content_moves_whole_where_calls_are_short_or_not_direct(tmp_path, count, why):
    """why: the file system refuses direct calls with this error, at the second one."""
    data, asked = memoryview(bytearray(os.urandom(count) if count else b'')), []
    page = mmap.mmap(-1, max(count, 1))
    page[:count] = bytes(data)
    file = os.open(tmp_path / 'object', os.O_RDWR | os.O_CREAT)

    def call(do):
        def one(fd, part, at):
            direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            asked.append(direct)
            if direct and why and len(asked) > 1:
                raise OSError(why, 'no direct call')
            return do(fd, part[:max(1, len(part) // 2 // 4096 * 4096)] if direct else part[:len(part) // 3 + 1], at)
        return one
    assert scheme_file.move(file, call(os.pwrite), memoryview(page)[:count], 0) == count
    assert any(asked) == (count >= MIB) and os.fstat(file).st_size == count
    into = mmap.mmap(-1, 4 * MIB)
    assert scheme_file.move(file, call(lambda fd, part, at: os.preadv(fd, [part], at)), memoryview(into)[:4 * MIB], 0) == count
    assert into[:count] == data
    os.close(file)


def test_a_full_file_system_is_told_as_that(tmp_path):
    """Also by a call past the kernel's copies; nothing is left."""
    place = tmp_path / 'small'
    place.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=5M', 'none', place], check=True)
    try:
        scheme, room = scheme_file.File(f'file://{place}'), mmap.mmap(-1, 8 * MIB)
        with pytest.raises(Full):
            scheme.put_new('seg/00000000/0000', memoryview(room), 0)
        assert [f for _, _, files in os.walk(place) for f in files] == []
    finally:
        subprocess.run(['umount', '--lazy', place], check=True)


def test_who_keeps_what_was_fetched_leaves_slots_for_calls(vault):
    """A slot comes back with the last reference to any part of its memory, and not before."""
    count = engine.SLOTS + 10
    data = {f'seg/00000000/{i:04x}': os.urandom(10000 + i) for i in range(count)}
    with engine.open(str(vault)) as e:
        for key, value in data.items():
            assert e.put_new(key, value)
        held = [e.get(key, 0, len(value), lend=True) for key, value in data.items()]
        program = e.program
        assert program.lent == program.lent_max == engine.SLOTS - len(program.free) > 0
        parts = [memory[5:] for memory in held]
        del held
        gc.collect()
        assert program.lent == program.lent_max and e.put_new('seg/00000000/7000', b'another')
        assert [bytes(part) for part in parts] == [value[5:] for value in data.values()]
        del parts
        gc.collect()
        assert program.lent == 0 and len(program.free) == engine.SLOTS
