# SPDX-License-Identifier: Apache-2.0
"""hitrainctl restore --shard: a job of one number of ranks, each with a store, goes on with another number."""
import io
import json
import os
import random
import subprocess
import sys

import pytest

from calls import sync
from conftest import BIN, MIB, ROOT, SECONDS_MAX, run
from test_archive import vault      # noqa: F401
from test_roots import command, word
from test_shards import ADAMW, SIZES, make_model, owned, reshard, shard, step, values
from test_step_streams import digest, left
from test_vault_follow import entries, programs, steps     # noqa: F401

sys.path += [str(ROOT / 'mount-helpers' / 'vault'), str(ROOT / 'mount-helpers' / 'tools')]


def in_store(path, dtype):
    """All of the model of the tests. Equal in every store."""
    root = make_model(path, dtype)
    reshard(root, 4)
    step(root, 2, dtype)
    command(root, 'snapshot')
    return root


def paths_of(root, name):
    state = root / '.hitrain/state' / name
    return [root / name] + [state / s for s in sorted(os.listdir(state)) if s != 'step']


def keep_own(root, whole, rank, owners):
    """What other ranks have is anything."""
    for name in SIZES:
        for path in paths_of(root, name):
            data = bytearray(path.read_bytes())
            width = len(data) // (root / name).stat().st_size
            for b, r in enumerate(owners[name]):
                if r != rank:
                    at = slice(b * width * MIB, (b + 1) * width * MIB)
                    data[at] = bytes([0x30 + rank]) * len(data[at])
            with open(path, 'r+b') as f:
                f.write(data)


def owners_of(root, table):
    from shards import owners, parse
    return {n: owners(parse(table), -(-(root / n).stat().st_size // MIB)) for n in SIZES}


def rank_of(whole, name, path, rank, table):
    """A rank's model of a kept step: only its own blocks are right."""
    run('hitrainctl', 'clone', whole, name, path)
    keep_own(path, whole, rank, owners_of(whole, table))
    (path / 'notes.txt').write_text(f'of rank {rank}')
    command(path, 'snapshot')
    return path


def archive(roots, url, name):
    """All ranks at once, each by a program of its own."""
    ranks = len(roots)
    jobs = [subprocess.Popen([BIN / 'hitrainctl', 'archive', root, name, url, f'--rank={r}of{ranks}'], stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE) for r, root in enumerate(roots)]
    for job in jobs:
        assert job.wait(SECONDS_MAX) == 0, job.stderr.read()
        job.stderr.close()


def restore(url, path, *options, rc=0):
    done = run('hitrainctl', 'restore', url, path, '--json', *options, check=False)
    assert done.returncode == rc, done.stderr
    return json.loads(done.stdout) if rc == 0 else done.stderr


def shards_of(root, rank, ranks):
    part = shard(root, rank, ranks)
    states = 'exp_avg', 'exp_avg_sq', 'step'
    files = [part / 'param' / n for n in SIZES] + [part / 'state' / n / s for n in SIZES for s in states]
    return {str(f.relative_to(part)): f.read_bytes() for f in files}


@pytest.fixture
def job(request, make_store, vault):     # noqa: F811
    """Two stores with two ranks each, whose step 1 is in the vault, and a model with the right blocks of all in each store."""
    points = [make_store('1G').mount() for _ in range(2)]
    wholes = [in_store(at / 'whole', getattr(request, 'param', 'f32')) for at in points]
    roots = [rank_of(wholes[r // 2], '1', points[r // 2] / f'{r}', r, '4') for r in range(4)]
    archive(roots, f'{vault}/job', '1')
    return points, wholes, roots, f'{vault}/job'


def test_four_ranks_lose_one_and_three_go_on_and_become_four(job):
    """Each shard has the bits of a store that had all blocks and changed its table. No more is fetched than must be."""
    points, wholes, roots, url = job
    change, _ = [reshard(whole, 3, '--lost=2') for whole in wholes]
    nexts, fetched = [], 0
    for new, old in enumerate((0, 1, 3)):
        at = points[old // 2]
        said = restore(url, at / f'next{new}', f'--shard={new}of3', '--lost=2', f'--base={roots[old]}')
        nexts.append(at / f'next{new}')
        fetched += said['fetched_bytes']
        assert (said['rank'], said['ranks'], said['step'], said['shards']) == (new, 3, 1, '4 3-2')
        assert said['fetched_bytes'] == said['least_bytes'] and said['here_bytes'] + said['fetched_bytes'] == said['bytes']
        assert shards_of(nexts[new], new, 3) == shards_of(wholes[old // 2], new, 3)
        assert word(nexts[new], 'step') == word(nexts[new], 'durable_step') == '1' and word(nexts[new], 'shards') == '4 3-2'
        assert (nexts[new] / 'notes.txt').read_text() == f'of rank {old}'
        command(nexts[new], 'snapshot')
        assert digest(nexts[new], '1') == said['digest']
    assert fetched == 3 * change['moved_bytes'] == 3 * change['least_bytes']    # a parameter and its two states
    for root in (*wholes, *nexts):
        step(root, 3)
        command(root, 'snapshot')
    archive(nexts, url, '2')
    for whole in wholes:
        reshard(whole, 4)
    for r in range(4):
        at = points[1]
        said = restore(url, at / f'four{r}', f'--shard={r}of4', *([f'--base={nexts[2]}'] if r == 2 else []))
        assert said['shards'] == '4 3-2 4' and said['step'] == 2
        assert shards_of(at / f'four{r}', r, 4) == shards_of(wholes[1], r, 4)
        assert (at / f'four{r}' / 'notes.txt').read_text() == f'of rank {(0, 1, 3, 0)[r]}'
        assert (said['fetched_bytes'] < said['bytes']) == (r == 2)
        assert r == 2 or said['fetched_bytes'] == said['least_bytes'] == said['bytes']
    for root in (wholes[1], at / 'four3'):
        step(root, 4)
    assert shards_of(at / 'four3', 3, 4) == shards_of(wholes[1], 3, 4)
    assert left(points[0]) == left(points[1]) == []


@pytest.mark.parametrize('job', ['f32', 'bf16'], indirect=True)
def test_a_rank_gets_its_own_part_on_a_new_host_and_one_gets_all(job):
    """The same number of ranks changes no table. A new host in place of the lost one takes its number."""
    points, wholes, _, url = job
    said = restore(url, points[0] / 'again', '--shard=2of4')
    assert said['shards'] == '4' == word(points[0] / 'again', 'shards')
    assert shards_of(points[0] / 'again', 2, 4) == shards_of(wholes[0], 2, 4)
    assert (points[0] / 'again' / 'notes.txt').read_text() == 'of rank 2'
    reshard(wholes[0], 4, '--lost=0')
    said = restore(url, points[0] / 'other', '--shard=0of4', '--lost=0')
    assert said['shards'] == '4 4-0' and shards_of(points[0] / 'other', 0, 4) == shards_of(wholes[0], 0, 4)
    assert (points[0] / 'other' / 'notes.txt').read_text() == 'of rank 1'
    restore(url, points[0] / 'one', '--shard=0of1')
    assert [p.read_bytes() for n in SIZES for p in paths_of(points[0] / 'one', n)] == [
        p.read_bytes() for n in SIZES for p in paths_of(wholes[0], n)]


def test_what_is_no_shard_of_the_step_is_refused_and_leaves_nothing(job, vault):     # noqa: F811
    points, wholes, roots, url = job
    new = points[0] / 'new'
    for options, rc, why in (
            ([], 1, '--shard=rofR'), (['--shard=3of3'], 2, 'as in 0of4'), (['--shard=1'], 2, 'as in 0of4'),
            (['--shard=0of3', '--lost=4'], 1, 'has ranks 0 to 3'), (['--lost=1'], 2, '--lost is for --shard'),
            (['--shard=0of300'], 1, '1 to 256 ranks'), (['--shard=0of3', '--follow'], 2, 'without --follow'),
            (['--shard=0of3', f'--base={roots[3]}'], 1, 'is in another store'),
            (['--shard=0of3', f'--base={points[0]}'], 1, 'no model root')):
        said = restore(url, new, *options, rc=rc)
        assert why in said and not new.exists() and left(points[0]) == [], said
    assert 'no step 7' in restore(f'{url}@7', new, '--shard=0of3', rc=1)
    assert 'is there already' in restore(url, roots[0], '--shard=0of3', rc=1)
    manifest, = (vault / 'job/job/man').glob('*.0001')
    data = manifest.read_bytes()
    manifest.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert manifest.name in restore(url, new, '--shard=0of3', rc=1)
    manifest.unlink()
    said = restore(url, new, '--shard=0of3', rc=1)
    assert manifest.name in said and 'gone' in said and not new.exists() and left(points[0]) == []


# ---- logged steps ----

LOGGED = f'{ADAMW} redo=on redo_keep=20 durable_every=2'


class Ranks:
    """Four ranks whose archivers put each step, and a model with the right blocks of all: each took two logged steps."""

    def __init__(self, make_store, programs, url, dtype='f32', words='', own=False, clip=''):
        self.at, self.url, self.dtype, self.own = make_store('1G').mount(), url, dtype, own
        self.whole = make_model(self.at / 'whole', dtype, f'{LOGGED} {words}')
        reshard(self.whole, 4)
        step(self.whole, 2, dtype)
        command(self.whole, 'snapshot')
        self.roots = [rank_of(self.whole, '1', self.at / f'{r}', r, '4') for r in range(4)]
        self.programs = [programs(f'{r}', 'archive', root, url, '--follow', '--log', f'--rank={r}of4')
                         for r, root in enumerate(self.roots)]
        self.wait(1)
        for n in (2, 3):
            (self.roots[1] / 'notes.txt').write_text(f'of rank 1 at {n}')
            for r, root in enumerate((*self.roots, self.whole)):
                word(root, 'optimizer', f'{LOGGED} {words} {clip.format(r + 1)}'.replace('lr=0.01', f'lr={n / 100}'))
                self.step(root, n + 5, r if own else 4)
            self.wait(n)

    def step(self, root, seed, r):
        """Rank r has a gradient for its own blocks alone; 4: for all."""
        if r == 4:
            return step(root, seed, self.dtype)
        for name in SIZES:
            part = shard(root, r, 4) / 'grad' / name
            data = owned(values(name, seed, self.dtype).tobytes(), owners_of(root, '4')[name], r)
            if data:
                part.write_bytes(data)
        sync(root)

    def wait(self, n):
        place, job = self.url.rsplit('/', 1)
        self.programs[0].wait_for(lambda: steps(place, job) >= n, f'step {n} is there')


@pytest.mark.parametrize('dtype, words, own', [('bf16', 'max_grad_norm=0.01 state_bits=8', False), ('f32', 'partial=1', True)])
def test_logged_steps_are_taken_by_another_number_of_ranks(make_store, vault, programs, dtype, words, own):     # noqa: F811
    """Each rank's log has all gradients, or its own; no more is fetched than must be."""
    url = f'{vault}/job'
    of = Ranks(make_store, programs, url, dtype, words, own)
    kinds = [kind for _, _, kind in entries(str(vault), 'job')]
    assert kinds == [1, 2]
    reshard(of.whole, 3, '--lost=2')
    width = 1 if dtype == 'f32' else 2
    for new, old in enumerate((0, 1, 3)):
        full = restore(f'{url}@1', of.at / f'full{new}', f'--shard={new}of3', '--lost=2', f'--base={of.roots[old]}')
        path = of.at / f'next{new}'
        said = restore(url, path, f'--shard={new}of3', '--lost=2', f'--base={of.roots[old]}')
        assert (said['step'], said['logged'], said['shards']) == (3, 2, '4 3-2') and 'digest' not in said
        assert word(path, 'step') == word(path, 'durable_step') == '3' and word(path, 'step_open') == '0'
        assert shards_of(path, new, 3) == shards_of(of.whole, new, 3)
        gradients = sum((of.at / 'whole' / '.hitrain/shard' / f'{new}of3/param' / n).stat().st_size for n in SIZES)
        assert said['fetched_bytes'] == said['least_bytes'] <= full['fetched_bytes'] + 2 * gradients + width * 4096
        assert (path / 'notes.txt').read_text() == (f'of rank {old}' if old != 1 else 'of rank 1 at 3')
        assert 'lr=0.03' in word(path, 'optimizer') and 'user.hitrain-follow' not in os.listxattr(path)
    for root in (of.whole, path):
        step(root, 9, dtype)
    assert shards_of(path, 2, 3) == shards_of(of.whole, 2, 3)
    assert left(of.at) == []


def test_ranks_whose_updates_had_different_numbers_are_refused_by_name(make_store, vault, programs):      # noqa: F811
    of = Ranks(make_store, programs, f'{vault}/job', clip='grad_scale={}')
    said = restore(of.url, of.at / 'new', '--shard=0of3', rc=1)
    assert 'step 2: ranks up to 1 have different numbers for w' in said and 'name job@1' in said
    assert not (of.at / 'new').exists() and left(of.at) == []


def test_the_line_says_what_was_here_what_came_and_the_least():
    from elastic import Resharded, report
    from manifest import End
    out = io.StringIO()
    report('next', Resharded(1233, 2, 3, '4 3-2', End(9, 28 << 30, bytes(16), 0), 7 << 30, 21 << 30, 7 << 30, 33), False, out)
    assert out.getvalue() == ('next: rank 2 of 3 at step 1233: 28 GiB, of which 21 GiB were here; 7 GiB fetched, and the '
                              'least is 7 GiB\n33 logged steps computed\n')


def test_ranks_with_other_parameters_are_refused(job):
    points, wholes, roots, url = job
    word(roots[1], 'dtype', 'f32')
    (roots[1] / 'more').write_bytes(b'\x01' * 8)
    for r, root in enumerate(roots):
        step(root, 3)
        command(root, 'snapshot')
    archive(roots, url, '2')
    said = restore(url, points[0] / 'new', '--shard=0of3', rc=1)
    assert 'ranks 0 and 1 have different parameters' in said and not (points[0] / 'new').exists()


def test_the_rules_are_those_of_the_store(make_store):
    """Random tables: the files of shards that a store shows have the blocks that the program reckons with."""
    from shards import change, owners, text_of
    root = make_store().mount() / 'model'
    root.mkdir()
    word(root, 'dtype', 'f32')
    blocks = 23
    (root / 'w').write_bytes(b''.join(bytes([b + 1]) * MIB for b in range(blocks)))
    word(root, 'optimizer', 'sgd lr=1')
    rng = random.Random(5)
    for _ in range(6):
        table = change((), rng.randint(1, 9))
        for _ in range(rng.randint(1, 6)):
            lost = rng.choice([None, rng.randrange(table[-1].ranks)])
            table = change(table, rng.randint(1, 9), lost)
        word(root, 'shards', text_of(table))
        found = {}
        for r in range(table[-1].ranks):
            mine = (shard(root, r, table[-1].ranks) / 'param/w').read_bytes()
            found.update({mine[i] - 1: r for i in range(0, len(mine), MIB)})
        assert owners(table, blocks) == [found[b] for b in range(blocks)]
