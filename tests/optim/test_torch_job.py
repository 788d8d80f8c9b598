# SPDX-License-Identifier: Apache-2.0
"""A job with a store on each rank: after any crash all ranks continue from one step, with the same bits, or none does."""
import contextlib
import hashlib
import multiprocessing.connection
import os
import random
import shutil
import subprocess
import threading

import pytest

from trainer import LR, PROCESSES, SECONDS_MAX, on_threads, random_parameters, shared_root, shared_store, wait_unclaimed  # first: it makes the client importable
import torch
from demo_store import mounted
from hitrain import AdamW, Job, RankFailed, _making
from hitrain._job import NONE

SHAPES = {'a.weight': (200, 100), 'a.bias': (100,)}
KILLS = 200 if os.environ.get('HITRAIN_LONG') else 3


# ------------------------------------------------------ decisions, with threads

def meet(steps_of, what, vaults=()):
    """what(job, steps) on a thread for each rank; returns what they return or raise. vaults: the Job's, of each rank."""
    world, results = len(steps_of), {}
    barrier = threading.Barrier(world, timeout=SECONDS_MAX)
    said = [0] * world

    def one(rank):
        def least(n):
            said[rank] = n
            barrier.wait()
            result = min(said)
            barrier.wait()
            return result
        try:
            results[rank] = what(Job(rank, world, least, barrier.wait, *vaults[rank:rank + 1]), steps_of[rank])
        except Exception as e:
            results[rank] = e
    on_threads(world, one)
    return [results[r] for r in range(world)]


@pytest.mark.parametrize('steps_of, common', [
    ([[5]], 5), ([[0], [0]], 0), ([[3, 4, 5], [4, 5, 6]], 5), ([[1, 2, 9], [1, 5, 9], [2, 9, 1]], 9), ([[1, 3, 5, 7], [2, 4, 6, 7, 8], [7]], 7),
    ([[1, 3, 5, 7], [1, 2, 4, 6]], 1), ([[1, 3, 5], [2, 4, 6]], -1), ([[], [1]], -1), ([[10, 2], [2], [3, 2, 10]], 2)])
def test_the_newest_step_that_all_have(steps_of, common):
    assert meet(steps_of, lambda job, steps: job.newest_common(steps)) == [common] * len(steps_of)


def test_all_learn_what_the_others_have():
    steps_of = [[], [4, 2], list(range(40))]
    wanted = [[], [2, 4], list(range(24, 40))]
    assert meet(steps_of, lambda job, steps: job.all_steps(steps)) == [wanted] * 3


def test_a_failure_on_one_rank_is_everybodys():
    first, second, third = meet([[]] * 3, lambda job, _: job.meet('it could not', lambda: 1 // (job.rank - 1)))
    assert isinstance(second, ZeroDivisionError)
    for error in first, third:
        assert isinstance(error, RankFailed) and (error.rank, error.cause) == (1, 'failed: it could not')


# ------------------------------------------------------------- models of a rank

def train(optimizer, params, first, last, passed=lambda step: None):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 + step)
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        passed(step + 1)


def digest(optimizer, params):
    text = hashlib.sha256()
    for p in params.values():
        text.update(p.detach().numpy().tobytes())
    for number, state in sorted(optimizer.export_state()['state'].items()):
        for name, value in sorted(state.items()):
            text.update(f'{number} {name}'.encode() + value.numpy().tobytes())
    return text.hexdigest()


def alone(least=lambda n: n):
    return Job(0, 1, least, lambda: None)


def numbers(root):
    return sorted(int(name) for name in os.listdir(root / '.hitrain/snap') if name.isdigit())


def test_later_kept_steps_end_and_those_with_names_stay(shared_root):
    """Else a later meeting could take a step of one history in one store, and of another in the next."""
    params = random_parameters(SHAPES)
    with AdamW(params.items(), shared_root, lr=LR, retain=10, job=alone()) as optimizer:
        train(optimizer, params, 0, 5)
        optimizer.snapshot('best')
        wanted = digest(optimizer, params)
        train(optimizer, params, 5, 7)
    again = random_parameters(SHAPES, seed=1)
    with AdamW(again.items(), shared_root, lr=LR, retain=10, job=alone(lambda n: n if n == NONE else min(n, 3)), resume=True) as optimizer:
        assert optimizer.committed_step == 3 and numbers(shared_root)[-1] == 3
        train(optimizer, again, 3, 5)
        assert digest(optimizer, again) == wanted
    assert 'best' in os.listdir(shared_root / '.hitrain/snap')


def test_a_job_does_not_undo_a_rollback(shared_root):
    params = random_parameters(SHAPES)
    with AdamW(params.items(), shared_root, lr=LR, retain=4, job=alone()) as optimizer:
        train(optimizer, params, 0, 5)
    (shared_root / '.hitrain/ctl').write_text('rollback 3\n')
    again = random_parameters(SHAPES, seed=1)
    with AdamW(again.items(), shared_root, lr=LR, retain=4, job=alone(), resume=True) as optimizer:
        assert optimizer.committed_step == 3 and numbers(shared_root)[-1] == 3


def test_stores_that_stop_in_the_first_step_of_a_run_meet_before_it(shared_root):
    roots = [shared_root.with_name(name) for name in ('first', 'second')]
    for begin in 0, 1:
        def run(job, steps):
            params = random_parameters(SHAPES, seed=begin + job.rank)
            with AdamW(params.items(), roots[job.rank], lr=LR, retain=2, job=job, resume=begin > 0) as optimizer:
                assert optimizer.committed_step == 0
                train(optimizer, params, 0, steps)
            return steps
        assert meet([1, 0], run) == [1, 0]


def test_retain_stays_set_when_hyper_parameters_change(shared_root):
    params = random_parameters(SHAPES)
    with AdamW(params.items(), shared_root, lr=LR, retain=2, retain_every=2) as optimizer:
        for step in range(7):
            optimizer.param_groups[0]['lr'] = LR / (1 + step)
            train(optimizer, params, step, step + 1)
    assert numbers(shared_root) == [4, 6]


@pytest.mark.parametrize('options', [{'retain': -1}, {'retain_every': 0}, {'job': Job(2, 2, int, int)}])
def test_bad_options(shared_root, options):
    with pytest.raises(ValueError, match='retain must be|below its world'):
        AdamW(random_parameters(SHAPES).items(), shared_root, **options)


def test_no_common_step_names_what_each_store_has(shared_root):
    roots = [shared_root.with_name(name) for name in ('zero', 'one')]
    for rank, last in enumerate((3, 6)):
        params = random_parameters(SHAPES)
        with AdamW(params.items(), roots[rank], lr=LR, retain=2) as optimizer:
            train(optimizer, params, 0, last)

    def resume(job, _):
        AdamW(random_parameters(SHAPES).items(), roots[job.rank], lr=LR, resume=True, job=job).close()
    for error in meet([None] * 2, resume):
        assert isinstance(error, RuntimeError) and 'rank 0 has 2, 3; rank 1 has 5, 6' in str(error)
    assert numbers(roots[0]) == [2, 3] and numbers(roots[1]) == [5, 6]
    roots[1] = shared_root.with_name('nothing')
    failed = meet([None] * 2, resume)
    assert isinstance(failed[1], OSError) and isinstance(failed[0], RankFailed) and failed[0].rank == 1


def test_a_model_that_is_made_anew_takes_no_other_store_back_to_its_beginning(shared_root):
    """One store has a half-made model. If all are at the beginning the job begins; else the others keep their steps."""
    roots = [shared_root.with_name(name) for name in ('half', 'trained')]

    def run(job, steps):
        params = random_parameters(SHAPES)
        with AdamW(params.items(), roots[job.rank], lr=LR, retain=9, job=job, resume=True) as optimizer:
            train(optimizer, params, optimizer.committed_step, steps)
    _making.begin(str(roots[0]), _making.OPTIMIZER)
    AdamW(random_parameters(SHAPES).items(), roots[1], lr=LR, retain=9).close()
    assert meet([2, 2], run) == [None, None] and numbers(roots[0]) == numbers(roots[1]) == [0, 1, 2]
    roots[0] = shared_root.with_name('lost')
    _making.begin(str(roots[0]), _making.OPTIMIZER)
    for error in meet([3, 3], run):
        assert isinstance(error, RuntimeError) and 'the model of rank 0 was never made to its end, and another store of the job is at step 2' in str(error)
    assert numbers(roots[1]) == [0, 1, 2]


# ------------------------------------------------------------------- vaults

PROGRAM = os.path.join(os.environ.get('HITRAIN_BIN') or os.path.join(os.path.dirname(__file__), '../../build/bin'), 'hitrainctl')


def ctl(*words):
    return subprocess.run([PROGRAM, *map(str, words)], check=True, capture_output=True, text=True, timeout=SECONDS_MAX).stdout


@pytest.fixture
def url(tmp_path):
    ctl('vault', 'init', tmp_path / 'vault')
    return f'{tmp_path}/vault/job7'


def archive(roots, url, step):
    """Each rank's by a program of its own, at once."""
    ranks = [subprocess.Popen([PROGRAM, 'archive', root, str(step), url, f'--rank={r}of{len(roots)}'], stdout=subprocess.DEVNULL)
             for r, root in enumerate(roots)]
    assert [rank.wait(SECONDS_MAX) for rank in ranks] == [0] * len(roots)


def run_of(roots, resume=True):
    """what() of meet: trains up to a step, as the rank's own model. The digests at the beginning, and after each step."""
    def run(job, last):
        params, said = random_parameters(SHAPES, seed=9 if resume else job.rank), {}
        with AdamW(params.items(), roots[job.rank], lr=LR, retain=3, job=job, resume=resume) as optimizer:
            said[optimizer.committed_step] = digest(optimizer, params)
            train(optimizer, params, optimizer.committed_step, last, lambda step: said.__setitem__(step, digest(optimizer, params)))
        return said
    return run


def lose(root, empty=False):
    (root / '.hitrain/ctl').write_text('forget *\n')
    shutil.rmtree(root)
    if empty:
        root.mkdir()


def two_ranks(shared_root, url, last, *archived):
    """(roots, their digests): two ranks at a step, with some of these in the vault. Others keep the last three."""
    roots = [shared_root.with_name(name) for name in ('r0', 'r1')]
    digests = [{}, {}]
    for step in (*archived, last):
        for known, said in zip(digests, meet([step] * 2, run_of(roots, resume=bool(digests[0])))):
            known.update(said)
        if step in archived:
            archive(roots, url, step)
    return roots, digests


@pytest.mark.parametrize('lost', [[1], [0], [0, 1]])
def test_a_rank_that_lost_its_store_gets_its_model_from_the_vault(shared_root, url, lost):
    """At the newest step of the vault that the others keep. All go on as if nothing had happened, with the same bits."""
    roots, digests = two_ranks(shared_root, url, 6, 2, 4)
    for rank in lost:
        lose(roots[rank], empty=rank == 0)
    again = meet([6] * 2, run_of(roots), [url] * 2)
    assert again == [{step: known[step] for step in (4, 5, 6)} for known in digests] and again[0] != again[1]
    assert [numbers(root)[-1] for root in roots] == [6, 6]


def test_who_has_its_model_asks_no_vault(shared_root):
    """It may be silent: only a rank that needs it reads it."""
    roots = [shared_root.with_name(name) for name in ('a', 'b')]
    meet([2] * 2, run_of(roots, resume=False))
    assert all(isinstance(said, dict) for said in meet([3] * 2, run_of(roots), ['/nowhere/job7'] * 2))


def test_a_step_of_another_history_is_no_common_step(shared_root, url):
    """Rank 0 went back and took step 4 again with other gradients: step 2 is the newest that both can have."""
    roots, digests = two_ranks(shared_root, url, 4, 2, 4)
    (roots[0] / '.hitrain/ctl').write_text('rollback 2\n')
    params = random_parameters(SHAPES)
    with AdamW(params.items(), roots[0], lr=LR, retain=9, resume=True) as optimizer:
        train(optimizer, params, 12, 14)
        assert optimizer.committed_step == 4 and digest(optimizer, params) != digests[0][4]
    lose(roots[1])
    assert meet([4] * 2, run_of(roots), [url] * 2) == [{step: known[step] for step in (2, 3, 4)} for known in digests]


def test_what_a_vault_cannot_give_is_refused_by_name(shared_root, url):
    """And leaves every store as it was."""
    roots, _ = two_ranks(shared_root, url, 6, 2)

    def refused(own_roots, vaults, rank=1):
        said = meet([9] * len(own_roots), run_of(own_roots), vaults)
        assert all(isinstance(e, Exception) for e in said) and numbers(roots[0]) == [4, 5, 6]
        return str(said[rank])
    lose(roots[1])
    assert 'there is no job none' in refused(roots, [f'{os.path.dirname(url)}/none'] * 2)
    assert 'there is no model to resume' in refused(roots, [])
    assert 'was given no Job(vault=)' in refused(roots, [None, url], rank=0)
    text = refused(roots, [url] * 2)
    assert 'rank 0 has 4, 5, 6; rank 1 has 2 with the same bits' in text and 'retain_every=' in text
    text = refused([*roots, shared_root.with_name('r2')], [url] * 3)
    assert 'has steps of 2 ranks, and this job has 3' in text and 'restore --shard=rof3' in text
    roots[1].mkdir()
    (roots[1] / 'notes').write_text('of somebody')
    assert 'is no model with a step' in refused(roots, [url] * 2) and os.listdir(roots[1]) == ['notes']


# ------------------------------------------- processes, stores, and their deaths

def rank_main(rank, root, pipe, last, resume):
    torch.set_num_threads(1)

    def least(n):
        pipe.send(('least', n))
        return pipe.recv()
    params = random_parameters(SHAPES, seed=1 if resume else 0)
    try:
        with AdamW(params.items(), root, lr=LR, retain=4, resume=resume, job=Job(rank, 2, least, lambda: least(0))) as optimizer:
            pipe.send(('begun', (optimizer.committed_step, digest(optimizer, params))))
            train(optimizer, params, optimizer.committed_step, last, lambda step: pipe.send(('passed', step)) or least(0))
            pipe.send(('done', digest(optimizer, params)))
    except (EOFError, BrokenPipeError, OSError, RuntimeError):
        os._exit(1)  # the other rank is gone, or a daemon


class Round:
    """Two ranks from their start to their end, of which one, or its store, may be killed after so many meetings."""

    def __init__(self, stores, last, resume, strike):
        self.pipes, self.begun, self.done, self.passed = {}, {}, {}, [0, 0]
        self.asked, self.meetings, self.strike = {}, 0, strike
        self.ranks = []
        for rank, s in enumerate(stores):
            own, theirs = PROCESSES.Pipe()
            self.ranks.append(PROCESSES.Process(target=rank_main, args=(rank, s.mountpoint / 'model', theirs, last, resume)))
            self.ranks[-1].start()
            theirs.close()
            self.pipes[own] = rank

    def run(self):
        while self.pipes:
            ready = multiprocessing.connection.wait(list(self.pipes), SECONDS_MAX)
            assert ready, 'the ranks do nothing'
            for pipe in ready:
                self.hear(pipe)
            if len(self.asked) == 2:
                self.answer()
        for p in self.ranks:
            p.join(SECONDS_MAX)
            assert p.exitcode is not None

    def hear(self, pipe):
        if pipe not in self.pipes:
            return
        rank = self.pipes[pipe]
        try:
            what, value = pipe.recv()
        except (EOFError, OSError):
            self.part()
            return
        if what == 'least':
            self.asked[pipe] = value
        elif what == 'passed':
            self.passed[rank] = value
        else:
            getattr(self, what)[rank] = value
        if what == 'done':
            pipe.close()
            del self.pipes[pipe]

    def part(self):
        """One is gone: the other cannot meet it any more."""
        for pipe in self.pipes:
            pipe.close()
        self.pipes, self.asked = {}, {}

    def answer(self):
        least = min(self.asked.values())
        asked, self.asked = self.asked, {}
        self.meetings += 1
        if self.strike and self.meetings == self.strike[0]:
            self.strike[1](self.ranks)
        for pipe in asked:
            with contextlib.suppress(OSError):
                pipe.send(least)


def reference(root, last):
    """Digests after each step, of a run that nothing disturbs."""
    params = random_parameters(SHAPES)
    digests = {}
    with AdamW(params.items(), root, lr=LR) as optimizer:
        digests[0] = digest(optimizer, params)
        train(optimizer, params, 0, last, lambda step: digests.__setitem__(step, digest(optimizer, params)))
    return digests


def kill_of(rng, stores, victim):
    delay = rng.random() * 0.02

    def strike(ranks):
        """At any moment from now on: of a meeting, a rollback, or a step."""
        killed = ranks[victim % 2].kill if victim < 2 else stores[victim % 2].kill
        timer = threading.Timer(delay, killed)
        timer.start()
        strike.timer = timer
    return strike


def test_two_stores_of_one_job_continue_together_after_each_kill():
    rng, last = random.Random(5), 6 * KILLS + 6
    with mounted('torch-job-0') as zero, mounted('torch-job-1') as one:
        stores = [zero, one]
        digests = reference(zero.mountpoint / 'reference', last)
        finished = 0
        for n in range(KILLS + 1):
            strike = kill_of(rng, stores, n % 4) if n < KILLS else None
            current = Round(stores, last, n > 0, strike and (rng.randrange(1, 16), strike))
            current.run()
            if strike and hasattr(strike, 'timer'):
                strike.timer.join()
            for rank, (step, is_now) in current.begun.items():
                assert finished <= step and is_now == digests[step], (n, rank)
            if len(current.begun) == 2:
                assert current.begun[0] == current.begun[1], n
            finished = max(finished, min(current.passed))
            for s in stores:
                if s.daemon is None:
                    s.mount()
                wait_unclaimed(s.mountpoint / 'model')
        assert current.begun and current.done == {0: digests[last], 1: digests[last]}
