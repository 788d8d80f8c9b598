# SPDX-License-Identifier: Apache-2.0
"""Archivers of several ranks, each with a store: they agree on one step, whatever each store keeps, and of one history."""
import json
import signal

import pytest

from conftest import run
from engines import servers  # noqa: F401 (a fixture)
from test_archive import restore, vault  # noqa: F401 (a fixture)
from test_follow import FILES
from test_kept_archived import lines
from test_logged_steps import train
from test_roots import command, word
from test_step_streams import content
from test_vault_follow import REDO, entries, job_of, model, programs, steps  # noqa: F401 (a fixture)

KEEPS = 'adamw lr=0.01 retain=2 retain_every=1'


@pytest.fixture
def job(make_store, vault, programs):     # noqa: F811
    """make(settings): (two roots at step 2, URL of the vault, start(rank, ...): the archiver of a rank)."""
    def make(words=KEEPS):
        roots, url = [model(make_store, words) for _ in range(2)], str(vault)

        def start(rank, *options):
            return programs(f'archiver{rank}', 'archive', roots[rank], job_of(url), '--follow', f'--rank={rank}of2', *options)
        return roots, url, start
    return make


def at(root, number, seed=0):
    """Trains up to a step."""
    for n in range(int(word(root, 'step')) + 1, number + 1):
        train(root, seed + n)


def called(vault, step):     # noqa: F811
    return any(name.startswith(f'{step:016x}.') and name.endswith('.0000') for name in (p.name for p in vault.glob('job/llama/man/*')))


def test_all_archive_the_step_that_rank_0_calls_also_when_others_are_behind(job, vault):     # noqa: F811
    """It is held, so it stays beyond `retain` until all have it. Then the stores know that the vault has it."""
    roots, url, start = job()
    at(roots[0], 5)
    first, second = start(0), start(1)
    first.wait_for(lambda: called(vault, 5), 'rank 0 has step 5')
    at(roots[0], 9)
    at(roots[1], 4)
    assert not entries(url)
    for n in 5, 9:
        at(roots[1], n)
        for program in first, second:
            program.wait_for(lambda: steps(url) == n, f'step {n} is there')
    assert [e[0] for e in entries(url)] == [5, 9]
    for program, root in (first, roots[0]), (second, roots[1]):
        program.wait_for(lambda: lines(root)['9'].get('archived') == 'llama', 'the store knows it')
        program.end()


def test_a_step_that_a_rank_has_no_more_is_left_out(job, vault):     # noqa: F811
    roots, url, start = job()
    at(roots[0], 5)
    first = start(0)
    first.wait_for(lambda: called(vault, 5), 'rank 0 has step 5')
    at(roots[1], 8)
    second = start(1)
    at(roots[0], 8)
    for program in first, second:
        program.wait_for(lambda: steps(url) == 8, 'a step that both keep is there')
    assert [e[0] for e in entries(url)] == [8]
    assert {s['rank']: s['step'] for s in listed(f'{job_of(url)}@8')} == {0: 8, 1: 8}


def listed(url):
    return [json.loads(line) for line in run('hitrainctl', 'vault', 'list', url, '--json').stdout.splitlines()]


def test_no_step_has_ranks_of_two_histories(job, vault, make_store):     # noqa: F811
    """Rank 0 has put step 5 when the job goes back to step 4 and takes another step 5."""
    roots, url, start = job()
    for root in roots:
        at(root, 5)
    first = start(0)
    first.wait_for(lambda: called(vault, 5), 'rank 0 has step 5')
    first.process.send_signal(signal.SIGSTOP)       # or it may see step 4 alone, and archive that first
    for root in roots:
        command(root, 'rollback 4', 'forget 5')
        at(root, 5, seed=50)
    first.process.send_signal(signal.SIGCONT)
    second = start(1)
    for program in first, second:
        program.wait_for(lambda: steps(url) == 5, 'step 5 is there')
        program.end()
    assert [e[0] for e in entries(url)] == [5]      # and not one of both histories before it
    there = make_store().mount()
    for rank, root in enumerate(roots):
        restore(job_of(url), there / f'{rank}', f'--rank={rank}of2')
        assert content(there / f'{rank}', *FILES) == content(root, *FILES)


@pytest.mark.parametrize('changed', [0, 1])
def test_logged_steps_of_all_ranks_and_a_full_one_where_one_cannot_follow(job, vault, make_store, changed):     # noqa: F811
    """A rank whose model was changed by hand has no logged step that follows; the present one of all is archived whole. So is each 4th."""
    roots, url, start = job(REDO + ' retain=2')
    programs = [start(rank, '--log', '--every=4') for rank in range(2)]     # noqa: F811

    def reach(n, kinds):
        for root in roots:
            at(root, n)
        for program in programs:
            program.wait_for(lambda: (steps(url), [kind for _, _, kind in entries(url)]) == (n, kinds), f'step {n} is there')
    reach(2, [1])
    reach(3, [1, 2])
    reach(4, [1, 2, 1])
    reach(5, [1, 2, 1, 2])
    there = make_store().mount()
    for rank, root in enumerate(roots):
        said = restore(job_of(url), there / f'{rank}', f'--rank={rank}of2')
        assert said['step'] == 5 and content(there / f'{rank}', *FILES) == content(root, *FILES)
    with open(roots[changed] / 'w', 'r+b') as f:
        f.write(bytes(64))
    reach(6, [1, 2, 1, 2, 1])
    reach(7, [1, 2, 1, 2, 1, 2])
    for program in programs:
        program.end()
