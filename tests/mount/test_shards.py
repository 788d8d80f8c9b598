# SPDX-License-Identifier: Apache-2.0
"""Shards: the blocks of one rank, of parameters, gradients and state, as files; and tables that change."""
import errno
import json
import mmap
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from calls import NOBODY, as_user, fails, sync
from conftest import BIN, MIB, SECONDS_MAX
from test_roots import command, put_gradient, random, word

ADAMW = 'adamw lr=0.01 weight_decay=0.1'
SIZES = {'w': 5 * MIB + 4096, 'deep/v': 2 * MIB, 'b': 4}  # bytes of f32


def bf16(values):
    return (values.view('u4') >> 16).astype('u2')


def values(name, seed, dtype='f32'):
    v = random(SIZES[name] // 4, seed + len(name))
    return v if dtype == 'f32' else bf16(v)


def make_model(root, dtype='f32', words=ADAMW):
    root.mkdir()
    (root / 'notes.txt').write_text('no parameter')
    word(root, 'dtype', dtype)
    (root / 'deep').mkdir()
    for name in SIZES:
        (root / name).write_bytes(values(name, 1, dtype).tobytes())
    word(root, 'optimizer', words)
    sync(root)
    return root


def put(path, data, piece=777_776):
    """Writes the bytes of a file that keeps its size, in pieces that cross blocks."""
    with open(os.open(path, os.O_WRONLY), 'wb', 0) as f:
        for at in range(0, len(data), piece):
            assert os.pwrite(f.fileno(), data[at:at + piece], at) == len(data[at:at + piece])


def shard(root, rank, ranks):
    return root / '.hitrain' / 'shard' / f'{rank}of{ranks}'


def owned(data, owners, rank, block=MIB):
    return b''.join(data[b * block:(b + 1) * block] for b, r in enumerate(owners) if r == rank)


def in_turn(name, ranks, size=None):
    return [b % ranks for b in range(-(-(size or SIZES[name]) // MIB))]


def step(root, seed, dtype='f32'):
    for name in SIZES:
        put_gradient(root, name, values(name, seed, dtype))
    sync(root)


def step_by_shards(root, seed, ranks, dtype='f32'):
    block = MIB
    for r in reversed(range(ranks)):
        for name in SIZES:
            data = values(name, seed, dtype).tobytes()
            owners = [b % ranks for b in range(-(-len(data) // block))]
            mine = owned(data, owners, r)
            path = shard(root, r, ranks) / 'grad' / name
            assert path.stat().st_size == len(mine)
            with open(path, 'wb') as f:
                f.write(mine)
    sync(root)


def files(root):
    out = {n: (root / n).read_bytes() for n in SIZES}
    for n in SIZES:
        for s in os.listdir(root / '.hitrain' / 'state' / n):
            out[n, s] = (root / '.hitrain' / 'state' / n / s).read_bytes()
    return out


def reshard(root, to, *options):
    done = subprocess.run([BIN / 'hitrainctl', 'reshard', root, f'--to={to}', '--json', *options], check=True,
                          stdout=subprocess.PIPE, timeout=SECONDS_MAX)
    return json.loads(done.stdout)


def refused(*args):
    done = subprocess.run([BIN / 'hitrainctl', 'reshard', *args], stderr=subprocess.PIPE, timeout=SECONDS_MAX)
    assert done.returncode in (1, 2)
    return done.stderr.decode()


@pytest.mark.parametrize('ranks', [1, 3])
def test_a_shard_is_a_file_of_the_blocks_of_its_rank(mnt, ranks):
    root = make_model(mnt / 'model')
    step(root, 2)
    assert os.listdir(root / '.hitrain' / 'shard') == []  # there is no table yet, so any number of ranks will do
    for r in range(ranks):
        part = shard(root, r, ranks)
        assert sorted(os.listdir(part)) == ['grad', 'param', 'state']
        assert sorted(os.listdir(part / 'param')) == ['b', 'deep', 'w']
        assert os.listdir(part / 'state' / 'deep') == ['v'] and sorted(os.listdir(part / 'state/w')) == [
            'exp_avg', 'exp_avg_sq', 'step']
        for name in SIZES:
            owners = in_turn(name, ranks)
            mine = owned((root / name).read_bytes(), owners, r)
            assert (part / 'param' / name).read_bytes() == mine
            assert (part / 'param' / name).stat().st_size == len(mine) == (part / 'grad' / name).stat().st_size
            for s in ('exp_avg', 'exp_avg_sq'):
                whole = (root / '.hitrain/state' / name / s).read_bytes()
                assert (part / 'state' / name / s).read_bytes() == owned(whole, owners, r)
            assert (part / 'state' / name / 'step').read_bytes() == np.float32(1).tobytes()
    with open(shard(root, 0, ranks) / 'param/w', 'rb') as f:
        assert os.pread(f.fileno(), 10, 1 << 40) == b''
        assert os.pread(f.fileno(), 2 * MIB, MIB // 2) == owned((root / 'w').read_bytes(), in_turn('w', ranks),
                                                                0)[MIB // 2:][:2 * MIB]


def test_a_mapping_of_a_shard_reads_and_writes_it(mnt):
    root = make_model(mnt / 'model')
    with open(shard(root, 1, 2) / 'param/w', 'r+b') as f, mmap.mmap(f.fileno(), 0) as m:
        assert m[:] == owned((root / 'w').read_bytes(), in_turn('w', 2), 1)
        m[MIB:MIB + 4] = b'abcd'
        m.flush()
        assert (root / 'w').read_bytes()[3 * MIB:3 * MIB + 4] == b'abcd'


def test_a_block_has_its_part_of_wider_gradients_and_state(mnt):
    """A block is 1 MiB of the parameter in bf16: 2 MiB of a gradient and of state in f32."""
    a, b = make_model(mnt / 'a', 'bf16'), make_model(mnt / 'b', 'bf16')
    for root in a, b:
        word(root / 'w', 'grad_dtype', 'f32')
    data, owners = values('w', 2).tobytes(), [0, 1, 2]
    put_gradient(a, 'w', values('w', 2))
    sync(a)
    for r in range(3):
        path = shard(b, r, 3) / 'grad/w'
        mine = owned(data, owners, r, 2 * MIB)
        assert path.stat().st_size == len(mine) > 0
        path.write_bytes(mine)
    sync(b)
    assert sorted(os.listdir(a / '.hitrain/state/w')) == ['exp_avg', 'exp_avg_sq', 'master', 'step']
    for s in 'exp_avg', 'exp_avg_sq', 'master':
        whole = (a / '.hitrain/state/w' / s).read_bytes()
        for r in range(3):
            assert (shard(b, r, 3) / 'state/w' / s).read_bytes() == owned(whole, owners, r, 2 * MIB)
    assert (a / 'w').read_bytes() == (b / 'w').read_bytes()


def test_stores_through_a_mapping_stay_beside_writes_of_a_shard(mnt):
    root = make_model(mnt / 'model')
    with open(root / 'w', 'r+b') as f, mmap.mmap(f.fileno(), 0) as m:
        m[0:4] = b'abcd'
        put(shard(root, 0, 2) / 'param/w', b'efgh')
        assert m[0:8] == b'efgh' + m[4:8]
        m[16:20] = b'ijkl'
        fd = os.open(shard(root, 0, 2) / 'param/w', os.O_WRONLY)
        os.pwrite(fd, b'mnop', 24)
        os.close(fd)
        assert m[16:20] == b'ijkl' and m[24:28] == b'mnop'
    whole = (root / 'w').read_bytes()
    assert (whole[:4], whole[16:20], whole[24:28]) == (b'efgh', b'ijkl', b'mnop')


def test_writes_of_a_shard_change_its_blocks_alone(mnt):
    root = make_model(mnt / 'model')
    step(root, 2)
    want = {n: bytearray(d) for n, d in files(root).items()}
    cached = os.open(root / 'w', os.O_RDONLY)
    os.pread(cached, SIZES['w'], 0)
    for name, kind, whole in (('w', 'param/w', 'w'), ('w', 'state/w/exp_avg', ('w', 'exp_avg'))):
        new = values(name, 9).tobytes()
        put(shard(root, 1, 3) / kind, owned(new, in_turn(name, 3), 1))
        for b, r in enumerate(in_turn(name, 3)):
            if r == 1:
                want[whole][b * MIB:(b + 1) * MIB] = new[b * MIB:(b + 1) * MIB]
    assert files(root) == {n: bytes(d) for n, d in want.items()}
    assert os.pread(cached, SIZES['w'], 0) == want['w']
    os.close(cached)
    command(root, 'commit')
    command(root, 'abort')
    assert files(root) == {n: bytes(d) for n, d in want.items()}
    put(shard(root, 0, 2) / 'param/w', bytes(3 * MIB))
    assert files(root)['w'] != want['w']
    command(root, 'abort')
    assert files(root) == {n: bytes(d) for n, d in want.items()}


@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_gradients_in_shards_make_the_same_step(mnt, dtype):
    a, b = make_model(mnt / 'a', dtype), make_model(mnt / 'b', dtype)
    for seed, ranks in ((2, 3), (3, 8)):
        step(a, seed, dtype)
        step_by_shards(b, seed, ranks, dtype)
    assert files(a) == files(b) and word(b, 'step') == '2'


def test_a_step_needs_the_gradients_of_all_ranks(mnt):
    root = make_model(mnt / 'model')
    before = files(root)
    for name in SIZES:
        put(shard(root, 0, 2) / 'grad' / name, owned(values(name, 2).tobytes(), in_turn(name, 2), 0))
    put(shard(root, 1, 2) / 'grad/deep/v', owned(values('deep/v', 2).tobytes(), in_turn('deep/v', 2), 1))
    with fails(errno.EBUSY):
        sync(root)
    assert 'w' in word(root, 'error')
    put(shard(root, 1, 2) / 'grad/w', owned(values('w', 2).tobytes(), in_turn('w', 2), 1))
    with fails(errno.EBUSY):  # a second gradient of one block in one step
        put(shard(root, 1, 2) / 'grad/w', bytes(4))
    sync(root)
    other = make_model(mnt / 'other')
    step(other, 2)
    assert files(root) == files(other) != before


def parts_of(name, seed, ranks):
    return [owned(values(name, seed).tobytes(), in_turn(name, ranks), r) for r in range(ranks)]


def open_two(root, name):
    """With gradients of all other parameters, the gradients of two ranks."""
    for n in SIZES:
        if n != name:
            put_gradient(root, n, values(n, 2))
    return [os.open(shard(root, r, 2) / 'grad' / name, os.O_WRONLY) for r in range(2)]


def made_step(root, other):
    step(make_model(other), 2)
    return files(root) == files(other)


def test_ranks_write_gradients_side_by_side(mnt):
    """A rank that closes first takes nothing of the others: they write again, and are inside elements."""
    root = make_model(mnt / 'model')
    first, second = open_two(root, 'w')
    right, wrong = parts_of('w', 2, 2), parts_of('w', 7, 2)
    os.pwrite(second, wrong[1], 0)
    os.pwrite(second, wrong[1][:1_000_001], MIB)
    os.pwrite(first, right[0], 0)
    os.close(first)
    os.pwrite(second, right[1][:1_000_001], 0)
    first = os.open(shard(root, 0, 2) / 'grad/w', os.O_WRONLY)
    os.close(first)
    os.pwrite(second, right[1][1_000_001:], 1_000_001)
    os.close(second)
    sync(root)
    assert made_step(root, mnt / 'other')


def test_threads_write_gradients_of_all_ranks(mnt):
    a, b = make_model(mnt / 'a'), make_model(mnt / 'b')
    for seed in (2, 3):
        step(a, seed)
        parts = [(shard(b, r, 3) / 'grad' / name, part) for name in SIZES
                 for r, part in enumerate(parts_of(name, seed, 3)) if part]
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(lambda part: put(*part, 77_777), parts))
        sync(b)
    assert files(a) == files(b)


def test_a_gradient_that_is_longer_than_its_shard_makes_no_step(mnt, tmp_path):
    root = make_model(mnt / 'model')
    before = (root / 'w').read_bytes()
    first, second = open_two(root, 'w')
    right = parts_of('w', 2, 2)
    os.pwrite(second, right[1], 0)
    whole = tmp_path / 'gradient'
    whole.write_bytes(values('w', 2).tobytes())
    copied = subprocess.run(['cp', whole, shard(root, 0, 2) / 'grad/w'], stderr=subprocess.PIPE, timeout=SECONDS_MAX)
    assert copied.returncode == 1 and 'longer than its shard' in word(root, 'error')
    os.close(second)
    with fails(errno.EBUSY):
        sync(root)
    assert (root / 'w').read_bytes()[:MIB] == before[:MIB]
    os.pwrite(first, right[0], 0)
    os.close(first)
    sync(root)
    assert made_step(root, mnt / 'other')


def test_the_table_is_part_of_the_step(make_store):
    store = make_store()
    root = make_model(store.mount() / 'model', words=ADAMW + ' retain=4')
    first = reshard(root, 4)
    assert (first['shards'], first['moved_bytes'], first['bytes']) == ('4', 0, sum(SIZES.values()))
    step(root, 2)
    command(root, 'snapshot four')
    assert sorted(os.listdir(root / '.hitrain/shard')) == ['0of4', '1of4', '2of4', '3of4']
    old = os.open(shard(root, 3, 4) / 'param/w', os.O_RDONLY)
    mine = os.pread(old, SIZES['w'], 0)
    assert reshard(root, 3, '--lost=1')['shards'] == '4 3-1' == word(root, 'shards')
    assert sorted(os.listdir(root / '.hitrain/shard')) == ['0of3', '1of3', '2of3']
    assert not shard(root, 0, 4).exists() and os.pread(old, SIZES['w'], 0) == mine
    os.close(old)
    command(root, 'abort')
    assert word(root, 'shards') == '4'
    reshard(root, 3, '--lost=1')
    step_of_three = files(root)
    whole = (root / 'w').read_bytes()
    parts = [(shard(root, r, 3) / 'param/w').read_bytes() for r in range(3)]
    # Blocks 0 to 5 were of 0 1 2 3 0 1: the ranks 0, 2 and 3 are 0, 1 and 2 now, and blocks 1 and 5 are free.
    assert parts == [owned(whole, [0, 1, 1, 2, 0, 2], r) for r in range(3)]
    command(root, 'commit')
    kept = root / '.hitrain' / 'snap' / 'four'
    assert (shard(kept, 3, 4) / 'param/w').read_bytes() == mine and not shard(kept, 0, 3).exists()
    for change in (lambda: put(shard(kept, 3, 4) / 'param/w', b'0000'),
                   lambda: put(shard(kept, 3, 4) / 'state/w/exp_avg', b'0000'),
                   lambda: put(shard(kept, 3, 4) / 'grad/w', b'0000'),
                   lambda: os.setxattr(kept, 'user.hitrain.shards', b'2')):
        with fails(errno.EROFS):
            change()
    store.crash()
    assert word(root, 'shards') == '4 3-1' and files(root) == step_of_three
    subprocess.run([BIN / 'hitrainctl', 'clone', root, 'four', store.point / 'copy'], check=True, timeout=SECONDS_MAX,
                   stdout=subprocess.DEVNULL)
    assert word(store.point / 'copy', 'shards') == '4'
    command(root, 'rollback four')
    assert word(root, 'shards') == '4' and (shard(root, 3, 4) / 'param/w').read_bytes() == mine


def test_a_shard_of_an_earlier_number_of_ranks_cannot_be_opened(mnt):
    root = make_model(mnt / 'model')
    word(root, 'shards', '2')
    held = {kind: os.open(shard(root, 0, 2) / kind, os.O_RDONLY) for kind in ('grad', 'param')}
    word(root, 'shards', '3')
    for kind, folder in held.items():
        for _ in range(4):
            with fails(errno.ESTALE):
                os.open('w', os.O_WRONLY, dir_fd=folder)
        os.close(folder)
    step_by_shards(root, 2, 3)
    assert word(root, 'step') == '1'


def test_a_stream_carries_the_table(make_store):
    a, b = make_store(), make_store()
    root = make_model(a.mount() / 'model')
    reshard(root, 4)
    reshard(root, 3)
    command(root, 'snapshot one')
    stream = subprocess.run([BIN / 'hitrainctl', 'archive', root, 'one', '-'], stdout=subprocess.PIPE, check=True, timeout=SECONDS_MAX)
    got = b.mount() / 'model'
    subprocess.run([BIN / 'hitrainctl', 'restore', '-', got], input=stream.stdout, check=True, timeout=SECONDS_MAX,
                   stdout=subprocess.DEVNULL)
    assert word(got, 'shards') == '4 3'
    for r in range(3):
        assert (shard(got, r, 3) / 'param/w').read_bytes() == (shard(root, r, 3) / 'param/w').read_bytes()


@pytest.mark.parametrize('ranks,to,share', [(4, 3, 1 / 4), (3, 8, 5 / 8)])
def test_a_change_moves_the_share_that_it_must(mnt, ranks, to, share):
    root = mnt / 'model'
    root.mkdir()
    word(root, 'dtype', 'bf16')
    blocks = (48, 24, 31)
    for i, n in enumerate(blocks):
        with open(root / f'p{i}', 'wb') as f:
            f.truncate(n * MIB)
    word(root, 'optimizer', ADAMW)
    reshard(root, ranks)
    done = reshard(root, to)
    slack = len(blocks) * max(ranks, to) * MIB  # one block for each parameter and rank
    assert abs(done['moved_bytes'] - share * sum(blocks) * MIB) <= slack
    assert sum(r['bytes'] for r in done['ranks']) == done['bytes'] == sum(blocks) * MIB
    assert sum(r['moved_bytes'] for r in done['ranks']) == done['moved_bytes']
    for i, n in enumerate(blocks):
        sizes = [(shard(root, r, to) / 'param' / f'p{i}').stat().st_size for r in range(to)]
        assert sum(sizes) == n * MIB and max(sizes) - min(sizes) <= MIB


def test_senseless_shards_are_refused_by_name(mnt):
    root = make_model(mnt / 'model')
    for name in ('', 'x', '4of4', '0of0', '0of257', '00of4', '0of4x'):
        assert not (root / '.hitrain' / 'shard' / (name or 'none')).exists()
    assert not (mnt / '.hitrain' / 'shard').exists() and not (root / 'deep' / '.hitrain' / 'shard').exists()
    for kind in ('param', 'grad', 'state'):
        assert not (shard(root, 0, 2) / kind / 'notes.txt').exists()
    for text in ('', '0', '257', '4 ', '4 3-4', 'four'):
        with fails(errno.EINVAL):
            os.setxattr(root, 'user.hitrain.shards', text.encode())
        assert 'ranks' in word(root, 'error')
    with fails(errno.EINVAL):
        os.setxattr(root / 'deep', 'user.hitrain.shards', b'4')
    with fails(errno.EINVAL):
        put(shard(root, 0, 2) / 'param' / 'deep/v', bytes(MIB + 1))
    with fails(errno.EINVAL):
        put(shard(root, 1, 2) / 'grad' / 'b', b'1')  # this rank has no byte
    with fails(errno.E2BIG):
        os.setxattr(root, 'user.hitrain.shards', b'4' + b' 4' * 64)
    assert '--to=R' in refused(root)
    assert 'no table' in refused(root, '--to=3', '--lost=0')
    reshard(root, 2)
    assert '1 to 256' in refused(root, '--to=257') and '1 to 256' in refused(root, '--to=3', '--lost=2')
    assert 'number of ranks' in refused(root, '--to=0') and refused(mnt, '--to=2')
    with fails(errno.ENOENT):
        os.listdir(shard(root, 0, 3))
    os.removexattr(root, 'user.hitrain.shards')
    assert (shard(root, 0, 3) / 'param/b').read_bytes() == (root / 'b').read_bytes()


def test_permissions_of_shards_are_those_of_the_parameter(mnt):
    root = make_model(mnt / 'model')
    step(root, 2)
    os.chmod(mnt, 0o755)
    os.chmod(root / 'w', 0o644)
    param, state = shard(root, 0, 2) / 'param/w', shard(root, 0, 2) / 'state/w/exp_avg'
    assert as_user(lambda: (len(param.read_bytes()), len(state.read_bytes()))) == (3 * MIB, 3 * MIB)
    for path in (param, state, shard(root, 0, 2) / 'grad/w'):
        with fails(errno.EACCES):
            as_user(lambda: put(path, b'0000'))
    with fails(errno.EACCES):
        as_user(lambda: os.setxattr(root, 'user.hitrain.shards', b'4'))
    os.chmod(root / 'w', 0o600)
    with fails(errno.EACCES):
        as_user(param.read_bytes)
    os.chown(root / 'w', NOBODY, NOBODY)
    os.chmod(root / 'w', 0o4755)
    as_user(lambda: put(param, b'0000'))
    assert (root / 'w').stat().st_mode & 0o7777 == 0o755 and (root / 'w').read_bytes()[:4] == b'0000'
    os.chmod(root / 'deep', 0o700)
    with fails(errno.EACCES):
        as_user((shard(root, 0, 2) / 'param/deep/v').read_bytes)
