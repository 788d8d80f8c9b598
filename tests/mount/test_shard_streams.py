# SPDX-License-Identifier: Apache-2.0
"""hitrainctl send --shard: after a change of ranks each rank gets the blocks that it lacks, and no others, or nothing."""
import json
import os
import subprocess

import numpy as np
import pytest

from conftest import BIN, MIB, SECONDS_MAX, wait_for
from test_roots import command, random, word
from test_shards import files, make_model, reshard, shard, step
from test_step_streams import NOBODY, left, receive

SIZES = {'w': 5 * MIB + 4096, 'deep/v': 2 * MIB, 'b': 4}
STATES = 'exp_avg', 'exp_avg_sq'


def ctl(*args, **how):
    return subprocess.run([BIN / 'hitrainctl', *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=SECONDS_MAX, **how)


def send(root, rank, of=None, name='moved'):
    done = ctl('send', root, name, f'--shard={rank}', *([] if of is None else [f'--of={of}']))
    assert done.returncode == 0, done.stderr
    return done.stdout


def take(stream, path, *options, **how):
    return ctl('receive', path, *options, input=stream, **how)


def owners_of(root, name, ranks):
    """Found by content: which rank has which block, by the files of the shards."""
    whole = (root / name).read_bytes()
    blocks = [whole[i:i + MIB] for i in range(0, len(whole), MIB)]
    out = {}
    for r in range(ranks):
        mine = (shard(root, r, ranks) / 'param' / name).read_bytes()
        for i in range(0, len(mine), MIB):
            out[blocks.index(mine[i:i + MIB])] = r
    return [out[b] for b in range(len(blocks))]


def paths_of(root, name):
    state = root / '.hitrain/state' / name
    return [root / name] + [state / s for s in os.listdir(state) if s != 'step']


def keep_own(root, whole, rank, owners):
    """The store of one rank: what others have is anything."""
    for name in SIZES:
        for path in paths_of(root, name):
            data = bytearray(path.read_bytes())
            width = len(data) // (root / name).stat().st_size
            for b, r in enumerate(owners[name]):
                if r != rank:
                    at = slice(b * width * MIB, (b + 1) * width * MIB)
                    data[at] = bytes([0x3e]) * len(data[at])
            with open(path, 'r+b') as f:
                f.write(data)


def shards_of(root, rank, ranks):
    part = shard(root, rank, ranks)
    files = [part / 'param' / n for n in SIZES] + [part / 'state' / n / s for n in SIZES for s in (*STATES, 'step')]
    return {str(f.relative_to(part)): f.read_bytes() for f in files}


@pytest.fixture
def mnt(make_store):
    return make_store('2G').mount()


@pytest.fixture
def job(mnt):
    """A model whose blocks are all right, and of each rank one that has its own blocks alone."""
    def make(ranks, to, *lost, zeros=False):
        whole = make_model(mnt / 'whole')
        reshard(whole, ranks)
        step(whole, 2)
        if zeros:
            (whole / 'w').write_bytes(bytes(SIZES['w']))
        command(whole, 'snapshot before')
        owners = {n: [b % ranks for b in range(-(-SIZES[n] // MIB))] for n in SIZES}
        for r in range(ranks):
            assert ctl('clone', whole, 'before', mnt / f'{r}').returncode == 0
            keep_own(mnt / f'{r}', whole, r, owners)
        done = None
        for root in (whole, *(mnt / f'{r}' for r in range(ranks))):
            done = reshard(root, to, *lost)
            command(root, 'snapshot moved')
        return whole, done
    return make


@pytest.mark.parametrize('zeros', [False, True])
def test_ranks_that_stay_get_what_a_lost_one_had(mnt, job, zeros):
    """Four ranks become three. The blocks of the lost one come of a copy of all."""
    whole, change = job(4, 3, '--lost=1', zeros=zeros)
    moved = 0
    for new, old in enumerate((0, 2, 3)):
        streams = [send(whole, new, 1)] + [send(mnt / f'{q}', new, q) for q in (0, 2, 3)]
        done = take(b''.join(streams), mnt / f'new{new}', f'--base={mnt / str(old)}', '--json')
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said['rank'] == new and said['least_bytes'] <= said['moved_bytes']
        moved += said['moved_bytes']
        assert shards_of(mnt / f'new{new}', new, 3) == shards_of(whole, new, 3)
        assert word(mnt / f'new{new}', 'durable_step') == word(whole, 'durable_step')
        alone = take(send(whole, new), mnt / f'alone{new}', f'--base={mnt / str(old)}')  # of all at once
        assert alone.returncode == 0 and shards_of(mnt / f'alone{new}', new, 3) == shards_of(whole, new, 3)
    assert moved == 3 * change['moved_bytes'] and change['moved_bytes'] == change['least_bytes']
    assert left(mnt) == []


def test_new_ranks_begin_with_their_blocks(mnt, job):
    """Three ranks become eight: a new one gets files and names of the first, and blocks of each."""
    whole, _ = job(3, 8)
    for new in (0, 3, 7):
        streams = [send(mnt / f'{q}', new, q) for q in range(3)]
        target = mnt / f'new{new}'
        if new < 3:
            assert b'--base=ROOT' in take(b''.join(streams), target).stderr
        else:
            assert b'without --base' in take(b''.join(streams), target, f'--base={mnt / "0"}').stderr
            assert b'first former rank' in take(b''.join(streams[::-1]), target).stderr
        assert not target.exists()
        done = take(b''.join(streams), target, *([f'--base={mnt / "0"}'] if new < 3 else []))
        assert done.returncode == 0, done.stderr
        assert shards_of(target, new, 8) == shards_of(whole, new, 8)
        assert (target / 'notes.txt').read_bytes() == b'no parameter'
        assert word(target, 'step') == '1' and word(target, 'shards') == '3 8'


def test_a_rank_goes_on_with_the_same_bits(make_store):
    """Two stores and a pipe. All blocks of the next step are those of one store."""
    a, b = make_store(), make_store()
    whole = make_model(a.mount() / 'model')
    reshard(whole, 2)
    step(whole, 2)
    command(whole, 'snapshot before')
    b.mount()
    assert take(ctl('send', whole, 'before').stdout, b.point / 'model').returncode == 0
    keep_own(b.point / 'model', whole, 1, {n: [i % 2 for i in range(-(-SIZES[n] // MIB))] for n in SIZES})
    for root in whole, b.point / 'model':
        reshard(root, 1, '--lost=0')
        command(root, 'snapshot moved')
    elsewhere = take(send(whole, 0, 0), b.point / 'next', f'--base={whole}')
    assert elsewhere.returncode == 1 and f'{whole} is in another store' in elsewhere.stderr.decode()
    sender = subprocess.Popen([BIN / 'hitrainctl', 'send', whole, 'moved', '--shard=0', '--of=0'], stdout=subprocess.PIPE)
    done = ctl('receive', b.point / 'next', f'--base={b.point / "model"}', stdin=sender.stdout)
    assert sender.wait(SECONDS_MAX) == 0 and done.returncode == 0, done.stderr
    for root in whole, b.point / 'next':
        step(root, 3)
    b.crash()
    assert shards_of(b.point / 'next', 0, 1) == shards_of(whole, 0, 1)


def test_masters_of_two_bytes_move_with_their_blocks(mnt):
    """The rank that stays trains on to the bits of one store."""
    whole, own, new = make_model(mnt / 'whole', 'bf16'), mnt / 'own', mnt / 'new'
    reshard(whole, 2)
    step(whole, 2, 'bf16')
    command(whole, 'snapshot before')
    assert ctl('clone', whole, 'before', own).returncode == 0
    keep_own(own, whole, 1, {n: [b % 2 for b in range(-(-SIZES[n] // 2 // MIB))] for n in SIZES})
    for root in whole, own:
        reshard(root, 1, '--lost=0')
        command(root, 'snapshot moved')
    assert files(own) != files(whole) and os.stat(own / '.hitrain/state/w/exp_avg').st_size == 2 * os.stat(own / 'w').st_size
    done = take(send(whole, 0, 0), new, f'--base={own}')
    assert done.returncode == 0, done.stderr
    assert files(new) == files(whole)
    for root in whole, new:
        step(root, 3, 'bf16')
    assert files(new) == files(whole)


@pytest.mark.parametrize('ranks, to', [(3, 1), (2, 3)])
def test_parameters_that_their_owner_may_not_write_get_their_blocks(mnt, ranks, to):
    """Of a rank that stays, and of a new one: an ordinary user's, and the root may not be written, either."""
    whole, new, rank = make_model(mnt / 'whole'), mnt / 'new', to - 1
    reshard(whole, ranks)
    step(whole, 2)
    reshard(whole, to)
    for path in (mnt, whole, *whole.iterdir(), *(whole / n for n in SIZES)):
        os.chown(path, NOBODY, NOBODY)
        os.chmod(path, 0o755 if path.is_dir() else 0o444)
    os.chmod(whole, 0o555)
    command(whole, 'snapshot moved')
    os.chmod(whole, 0o755)  # whose ctl makes the clone
    streams = b''.join(send(whole, rank, q) for q in range(ranks))
    done = take(streams, new, *([f'--base={whole}'] if to == 1 else []), user=NOBODY, group=NOBODY, extra_groups=[])
    assert done.returncode == 0, done.stderr
    assert shards_of(new, rank, to) == shards_of(whole, rank, to) and left(mnt) == []
    assert [os.stat(new / n).st_mode & 0o777 for n in ('', *SIZES)] == [0o555] + [0o444] * len(SIZES)


@pytest.mark.parametrize('ranks, to, share', [(4, 3, 1 / 4), (3, 8, 5 / 8)])
def test_the_share_that_must_moves_and_no_more(mnt, ranks, to, share):
    """Bytes of the streams and of both sides' figures, beside the least."""
    root = mnt / 'model'
    root.mkdir()
    word(root, 'dtype', 'bf16')
    blocks = 24
    (root / 'p').write_bytes(np.tile(random(MIB // 4, 1), blocks).tobytes())
    word(root, 'optimizer', 'sgd lr=1')
    reshard(root, ranks)
    change = reshard(root, to)
    command(root, 'snapshot moved')
    streams = [ctl('send', root, 'moved', f'--shard={r}') for r in range(to)]
    bytes_sent = sum(len(s.stdout) for s in streams)
    assert all(b'the least is' in s.stderr for s in streams)
    assert change['moved_bytes'] == change['least_bytes'] == share * blocks * MIB
    assert change['moved_bytes'] <= bytes_sent <= change['moved_bytes'] + to * 64 * 1024


def test_a_symlink_in_the_place_of_the_directory_leads_no_clone_away(mnt, job):
    """Another user owns the directory above, and leads root's receiver to a directory that this user may not even read."""
    whole, _ = job(2, 1, '--lost=1')
    stream = send(whole, 0, 1)
    os.chmod(mnt, 0o755)
    (mnt / 'home').mkdir()
    os.chown(mnt / 'home', NOBODY, NOBODY)
    (mnt / 'other').mkdir(0o700)
    p = subprocess.Popen([BIN / 'hitrainctl', 'receive', mnt / 'home' / 'model', f'--base={mnt / "0"}'], stdin=subprocess.PIPE,
                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for(lambda: left(mnt / 'home'), 'the hidden directory')
    name = left(mnt / 'home')[0]
    wait_for(lambda: 'user.hitrain-receive' in os.listxattr(mnt / 'home' / name), 'its attribute')
    subprocess.run(['sh', '-c', f'mv {name} away && ln -s {mnt / "other"} {name}'], cwd=mnt / 'home', user=NOBODY, group=NOBODY,
                   extra_groups=[], check=True)
    _, said = p.communicate(stream, timeout=SECONDS_MAX)
    assert os.listdir(mnt / 'other') == [] and p.returncode == 1 and b'moved' in said
    assert os.listdir(mnt / 'home' / 'away') == [] and not os.path.lexists(mnt / 'home' / 'model')


def test_streams_that_do_not_belong_together_leave_nothing(mnt, job):
    whole, _ = job(4, 3, '--lost=1')
    base = f'--base={mnt / "2"}'  # rank 1 gets blocks of the lost one alone
    first, second = send(whole, 1, 1), send(mnt / '0', 1, 0)
    reshard(mnt / '3', 4)
    command(mnt / '3', 'snapshot later')
    step(mnt / '0', 5)
    command(mnt / '0', 'snapshot stepped')
    command(whole, 'snapshot whole')
    os.removexattr(whole, 'user.hitrain.shards')
    command(whole, 'snapshot none')
    assert ctl('clone', mnt / '0', 'moved', mnt / 'odd').returncode == 0
    (mnt / 'odd' / 'more').write_bytes(bytes(8))
    command(mnt / 'odd', 'snapshot moved')
    refused = {
        'rank 1 are missing': second,
        'come twice': first + first,
        'run the same reshard and snapshot in that store': send(mnt / '3', 1, name='later'),
        'different tables': first + send(mnt / '3', 1, name='later'),
        'different steps': first + send(mnt / '0', 1, 0, name='stepped'),
        'different ranks': first + send(whole, 0, 2, name='whole'),
        'no stream of a step': first + b'and something that is no stream, but has the length of a header........',
        'for no rank': first + ctl('send', whole, 'whole').stdout,
        'is cut': (first + second)[:-1],
        'checksum': first[:-3000] + bytes([first[-3000] ^ 1]) + first[-2999:],
        'different parameters': send(mnt / 'odd', 1),
    }
    for why, stream in refused.items():
        done = take(stream, mnt / 'x', base)
        assert done.returncode == 1 and not (mnt / 'x').exists() and left(mnt) == [], why
        assert why in done.stderr.decode() or (why == 'checksum' and b'damaged' in done.stderr), (why, done.stderr)
    assert b'no model root' in take(first, mnt / 'x', '--base=/').stderr
    assert b'this is no' in take(first, mnt / 'x', f'--base={mnt / "2" / "deep"}').stderr and left(mnt) == []
    assert take(first + second, mnt / 'x', base).returncode == 0
    for args, why in ((('none', '--shard=0'), 'no table'), (('before', '--shard=0'), 'keep a step after `hitrainctl reshard`'),
                      (('moved', '--shard=3'), 'no such rank'), (('moved', '--shard=0', '--of=4'), 'was no such rank')):
        done = ctl('send', whole, *args)
        assert done.returncode == 1 and why in done.stderr.decode() and not done.stdout, done.stderr
    for args in (['--of=1'], ['--shard=0', '--from=before'], ['--shard=x'], ['--shard=0', '--of=-1']):
        assert ctl('send', whole, 'moved', *args).returncode == 2
