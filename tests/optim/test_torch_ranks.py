# SPDX-License-Identifier: Apache-2.0
"""Processes that train one model together: a rank that fails, leaves, dies or does other things than the rest, at every point."""
import os
import signal
import tempfile
import threading
import time
import warnings

import pytest

from trainer import PROCESSES, SECONDS_MAX, on_processes, on_threads, random_parameters, store, wait_unclaimed  # first: it makes the client importable
import torch
import torch.distributed as dist
from hitrain import distributed
from hitrain.distributed import RankFailed, Ranks, Shard
from hitrain import SGD

WORLD = 3


# --------------------------------------------------- meetings, with threads

def meet(world, what, timeout=SECONDS_MAX, exchange=None):
    """what(rank, ranks) on each rank; returns its result or exception."""
    results = {}
    root = tempfile.mkdtemp(prefix='ranks-')

    def one(rank):
        ranks = Ranks(Shard(rank, world, timeout=timeout, exchange=exchange(rank) if exchange else None), root)
        try:
            results[rank] = what(rank, ranks)
        except BaseException as e:
            results[rank] = e
        finally:
            ranks.close()
    on_threads(world, one)
    os.rmdir(root)
    return results


def test_each_hears_all_and_a_failure_is_everybodys():
    def calls(rank, ranks):
        heard = [f['n'] for f in ranks.together('a', lambda: {'n': rank})]
        with pytest.raises((RankFailed, ZeroDivisionError)) as e:
            ranks.together('b', lambda: {'n': 1 // (rank - 1)})
        after = ranks.together('c')  # the meeting goes on
        return heard, e.value, after
    results = meet(WORLD, calls)
    for rank, (heard, error, after) in results.items():
        assert heard == [0, 1, 2] and after == [{}] * WORLD
        if rank == 1:
            assert isinstance(error, ZeroDivisionError)
        else:
            assert (error.rank, error.cause) == (1, 'failed: ZeroDivisionError: integer division or modulo by zero')


def test_one_meeting_after_another(tmp_path):
    """A rank that is done early comes to the next meeting, and not to the remains of the last one."""
    def calls(rank, ranks):
        ranks.together('a')
        ranks.close()
        for k in range(20):
            time.sleep(0.01 * (rank == 0))
            following = Ranks(Shard(rank, WORLD, timeout=SECONDS_MAX), str(tmp_path))
            following.together(f'b{k}')
            following.close()
        return 'done'
    assert meet(WORLD, calls) == dict.fromkeys(range(WORLD), 'done')


def test_one_that_does_not_come_or_leaves_fails_all():
    heard = threading.Event()

    def late(rank, ranks):
        ranks.together('a')
        if rank == 2:
            assert heard.wait(SECONDS_MAX)
        if rank == 0:  # alone: the others wait for its line
            ranks._gather._shard = ranks._gather._shard._replace(timeout=1)
        try:
            ranks.together('b')
        finally:
            if rank == 0:
                heard.set()
    for rank, error in meet(WORLD, late).items():
        assert isinstance(error, RankFailed), (rank, error)
        # On a machine that stalls, rank 1 is late, too.
        assert rank == 2 or (error.rank in (1, 2) and 'did not come within 1 s' in error.cause), (rank, error)

    def leaves(gone):
        def calls(rank, ranks):
            ranks.together('a')
            if rank == gone:
                return None
            with pytest.raises(RankFailed, match=f'rank {gone} has closed its optimizer'):
                ranks.together('b')
            with pytest.raises(RankFailed):  # there is no other meeting
                ranks.together('c')
            return 'raised'
        return calls
    for gone in range(WORLD):
        assert list(meet(WORLD, leaves(gone)).values()).count('raised') == WORLD - 1

    def interrupted(rank, ranks):
        def work():
            raise KeyboardInterrupt
        ranks.together('a', work if rank == 1 else dict)
    results = meet(WORLD, interrupted)
    assert isinstance(results[1], KeyboardInterrupt) and 'rank 1 failed: KeyboardInterrupt' in str(results[0])


def test_rank_0_waits_for_those_that_still_work_when_one_is_gone():
    """What they write after it has taken the step back would begin another one."""
    written, gone = [], threading.Event()

    def calls(rank, ranks):
        ranks.together('a')
        if rank == 2:
            ranks.close()
            gone.set()
            return

        def write():
            if rank == 1:
                assert gone.wait(SECONDS_MAX)
                time.sleep(0.5)
                written.append(rank)
        with pytest.raises(RankFailed, match='rank 2 has closed its optimizer'):
            ranks.together('b', write)
        assert written == [1]
    assert meet(WORLD, calls) == dict.fromkeys(range(WORLD))


def test_ranks_at_different_points():
    """Those that go back wait until all do."""
    def calls(rank, ranks):
        if rank != 1:
            with pytest.raises(RankFailed, match=f'rank 1 is at back, this one .rank {rank}. at step'):
                ranks.together('step')
        return [f['who'] for f in ranks.gather_at('back', {'who': rank})]
    assert all(r == [0, 1, 2] for r in meet(WORLD, calls).values())


def test_other_ways_to_meet_and_other_numbers():
    texts, barrier = {}, threading.Barrier(WORLD)

    def exchange(rank):
        def all_gather(text):
            texts[rank] = text
            barrier.wait(SECONDS_MAX)
            all_of_them = [texts[r] for r in range(WORLD)]
            barrier.wait(SECONDS_MAX)
            return all_of_them
        return all_gather
    assert meet(WORLD, lambda rank, ranks: ranks.together('a', lambda: {'n': rank})[2], exchange=exchange) == dict.fromkeys(range(3), {'n': 2})

    root = tempfile.mkdtemp(prefix='ranks-')
    first = Ranks(Shard(0, 2, timeout=SECONDS_MAX), root)
    with pytest.raises(OSError, match='another process is rank 0 of this model already, or another user'):
        Ranks(Shard(0, 2), root)
    other = Ranks(Shard(2, 3, timeout=SECONDS_MAX), root)
    answers = []

    def come():
        try:
            other.together('a')
        except RankFailed as e:
            answers.append(e)
    thread = threading.Thread(target=come)
    thread.start()
    with pytest.raises(RankFailed, match='rank 2 came as one of 3 to a meeting of 2'):
        first.together('a')
    first.close()
    thread.join(SECONDS_MAX)
    assert answers and answers[0].rank == 2
    with pytest.raises(RankFailed, match='rank 0 did not come within 0.1 s.*exchange='):
        Ranks(Shard(1, 2, timeout=0.1), root).together('a')
    os.rmdir(root)


# ------------------------------------------------- training, with processes

SHAPES = {'w': (300, 100), 'bias': (100,), 'norm': (7,)}


def parameters(seed=0):
    return random_parameters(SHAPES, seed)


def give_gradients(params, step):
    for i, p in enumerate(params.values()):
        p.grad = torch.full(p.shape, float(step + i + 1))


class Job:
    """One rank in its process: an optimizer, and the checks that all ranks do alike."""

    def __init__(self, rank, root, meeting, **options):
        self.rank, self.root, self.own = rank, root, parameters(seed=rank)
        self.meeting = meeting
        self.optimizer = SGD(self.own.items(), root, lr=1.0, shard=Shard(rank, WORLD, timeout=SECONDS_MAX), **options)
        self.wanted = {n: p.detach().clone() for n, p in self.own.items()}
        self.agree()

    def barrier(self):
        """A barrier of the test, beside the optimizer."""
        self.meeting.wait(SECONDS_MAX)

    def agree(self):
        for n, p in self.own.items():
            assert torch.equal(p, self.wanted[n]), (self.rank, n, (p - self.wanted[n]).abs().max())

    def step(self, number):
        give_gradients(self.own, number)
        for n, p in self.own.items():
            self.wanted[n] -= p.grad
        self.optimizer.step()
        self.agree()

    def fails(self, failing, call, kind=OSError, match='of the test'):
        """call() raises its own error on the failing rank and RankFailed on the others; nothing changed."""
        with pytest.raises((RankFailed, kind), match=match) as e:
            call()
        assert isinstance(e.value, RankFailed) == (self.rank != failing), (self.rank, e.value)
        if self.rank != failing:
            assert e.value.rank == failing
        self.agree()


def broken(job, where):
    """The function that a rank calls at this point fails once."""
    name, target = {'write': ('_send_one', job.optimizer), 'end': ('_end_step', job.optimizer), 'begin': ('_begin', job.optimizer),
                    'offer': ('_offer', job.optimizer), 'read': ('_receive', job.optimizer)}[where]

    def fail(*args, **kw):
        delattr(target, name)
        raise OSError(5, 'of the test')
    setattr(target, name, fail)


def part_failures(job):
    """At each point, on each rank that does something there."""
    step = 0
    for where in ('offer', 'write', 'begin', 'end', 'read'):
        for failing in ((0,) if where in ('begin', 'end') else range(WORLD)):
            if job.rank == failing:
                broken(job, where)
            give_gradients(job.own, 50)
            if where == 'read':  # the step is finished, but reported as failed: all read its result
                for n, p in job.own.items():
                    job.wanted[n] -= p.grad
            job.fails(failing, job.optimizer.step)
            step += where == 'read'
            assert job.optimizer._step == step
            job.step(step)
            step += 1


def part_gradients(job):
    """A gradient that is not on all ranks, on one only, on none; and frozen parameters."""
    for step, missing in enumerate(({0: ['bias']}, {1: ['w', 'norm']}, {0: ['w'], 1: ['w']}, {r: list(SHAPES) for r in (1, 2)},
                                    {r: list(SHAPES) for r in range(WORLD)}, {r: ['norm'] for r in range(WORLD)})):
        give_gradients(job.own, step)
        for n, p in job.own.items():
            if all(n in missing.get(r, ()) for r in range(WORLD)):
                p.grad = None
            else:
                job.wanted[n] -= p.grad
            if n in missing.get(job.rank, ()):
                p.grad = None
        job.optimizer.step()
        job.agree()


def part_changes(job):
    """Changes outside step(): those of rank 0 count, and one that only another rank made is an error."""
    for n, p in job.own.items():
        p.data.copy_(parameters(seed=10 + job.rank)[n])
        job.wanted[n] = parameters(seed=10)[n].detach().clone()
    job.step(0)
    if job.rank == 0:
        job.own['w'].data.mul_(2)
        job.optimizer.commit()
    job.barrier()
    give_gradients(job.own, 1)
    if job.rank == 1:
        broken(job, 'offer')
    # the others get the error in the next step all the same
    with pytest.raises((OSError, RankFailed), match='of the test'):
        job.optimizer.step()
    job.wanted['w'] = job.wanted['w'] * 2
    job.step(1)
    if job.rank == 2:
        job.own['bias'].data.zero_()
    give_gradients(job.own, 2)
    with pytest.raises(RuntimeError, match='bias was changed outside step.. on this rank and not on rank 0|^rank 2 failed'):
        job.optimizer.step()
    job.own['bias'].data.copy_(job.wanted['bias'])
    job.step(3)


def part_abort(job):
    """With finished steps that are not durable; and where one rank aborts while the others step."""
    job.optimizer.durable_every = 5
    kept = {n: w.clone() for n, w in job.wanted.items()}
    job.step(0)
    job.optimizer.abort()
    job.wanted = kept
    job.agree()
    job.step(1)
    kept = {n: w.clone() for n, w in job.wanted.items()}
    job.optimizer.state_dict()  # makes it durable
    job.barrier()
    job.step(2)
    job.wanted = kept
    give_gradients(job.own, 3)
    if job.rank == 1:
        job.optimizer.abort()
    else:
        with warnings.catch_warnings(record=True), pytest.raises(RankFailed, match='rank 1 is at going back'):
            job.optimizer.step()
    job.agree()
    job.step(4)


def part_groups(job):
    """A group that is added later, and one that fails on one rank."""
    late = torch.nn.Parameter(torch.full((5,), float(job.rank)))
    job.optimizer.add_param_group({'params': [('late', late)], 'lr': 2.0})
    job.own['late'] = late
    give_gradients(job.own, 0)
    for n, p in job.own.items():
        job.wanted[n] = job.wanted.get(n, torch.zeros(5)) - p.grad * (1 + (n == 'late'))
    job.optimizer.step()
    job.agree()
    wrong = torch.nn.Parameter(torch.zeros(3 + (job.rank == 1)))
    job.fails(1, lambda: job.optimizer.add_param_group({'params': [('wrong', wrong)]}), ValueError, 'shape is 3 in the store and 4')
    assert len(job.optimizer.param_groups) == 2
    if job.rank == 0:
        assert 'wrong' not in os.listdir(job.root)


def part_state(job):
    job.optimizer.param_groups[0]['momentum'] = 0.5
    give_gradients(job.own, 0)
    job.optimizer.step()
    state = job.optimizer.export_state()
    kept = {n: p.detach().clone() for n, p in job.own.items()}
    give_gradients(job.own, 1)
    job.optimizer.step()
    wanted = {n: p.detach().clone() for n, p in job.own.items()}
    give_gradients(job.own, 7)
    job.optimizer.step()
    for n, p in job.own.items():
        p.data.copy_(kept[n])
    job.wanted = kept
    wrong = {**state, 'param_groups': [{**state['param_groups'][0], 'lr': 9.0}]}
    if job.rank == 1:
        wrong['state'] = {i: {k: torch.zeros(3, 3, 3) for k in s} for i, s in state['state'].items()}
    job.fails(1, lambda: job.optimizer.load_state_dict(wrong), ValueError, 'has the shape')
    assert job.optimizer.param_groups[0]['lr'] != 9.0
    job.optimizer.load_state_dict(state)
    give_gradients(job.own, 1)
    job.optimizer.step()
    job.wanted = wanted
    job.agree()


def dies_in(job, name):
    setattr(job.optimizer, name, lambda *args: os.kill(os.getpid(), signal.SIGKILL))


def part_death(job):
    """A process that is killed while it writes: the others raise at once, and rank 0 takes the step back."""
    give_gradients(job.own, 0)
    if job.rank == 2:
        dies_in(job, '_send_one')
    with pytest.raises(RankFailed, match='rank 2 is gone: its process has ended') as e:
        job.optimizer.step()
    assert e.value.rank == 2
    if job.rank == 0:
        job.agree()


def part_death_of_rank_0(job):
    """It dies before it ends the step. The others cannot go back: only rank 0 could take them there."""
    give_gradients(job.own, 0)
    if job.rank == 0:
        dies_in(job, '_end_step')
    with pytest.raises(RankFailed, match='rank 0 is gone: its process has ended'):
        job.optimizer.step()
    with pytest.raises(RankFailed, match='rank 0 is gone'):
        job.optimizer.abort()


def part_interrupt(job):
    """Ctrl-C while a rank waits for the others, of which one comes after that."""
    give_gradients(job.own, 0)
    if job.rank == 1:
        real = distributed._receive

        def interrupted(*args):
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            return real(*args)
        distributed._receive = interrupted
        try:
            with pytest.raises(KeyboardInterrupt):
                job.optimizer.step()
        finally:
            distributed._receive = real
        job.barrier()
        return
    barrier = threading.Thread(target=job.barrier)
    barrier.start()
    if job.rank == 2:  # rank 0 waits in step() at this time
        barrier.join()
    with pytest.raises(RankFailed, match='rank 1'):
        job.optimizer.step()
    barrier.join()


def part_wrong_models(rank, root, meeting):
    """Constructions that fail on one rank fail on all, and leave the directory usable."""
    for failing in range(WORLD):
        own = parameters()
        if rank == failing:
            own['w'] = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        with pytest.raises((TypeError, ValueError, RankFailed)):
            SGD(own.items(), root, lr=1.0, shard=Shard(rank, WORLD, timeout=SECONDS_MAX))
        meeting.wait(SECONDS_MAX)
        fewer = {n: p for n, p in parameters().items() if rank != failing or n != 'bias'}
        with pytest.raises((FileNotFoundError, RankFailed), match='other names, shapes|bias'):
            SGD(fewer.items(), root, lr=1.0, shard=Shard(rank, WORLD, timeout=SECONDS_MAX))
        meeting.wait(SECONDS_MAX)


def work(rank, base, parts, meeting, results):
    done = None
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        torch.set_num_threads(1)
        for part in parts:
            done = part.__name__
            root = base / done
            if part is part_wrong_models:
                part(rank, root, meeting)
                continue
            job = Job(rank, root, meeting)
            part(job)
            job.optimizer.close()
            if part not in (part_death, part_death_of_rank_0):
                meeting.wait(SECONDS_MAX)
        results.put((rank, None))
    except BaseException as e:
        meeting.abort()
        results.put((rank, f'{done}: {type(e).__name__}: {e}'))
        raise


@pytest.fixture
def base(store):
    return store.mountpoint


def run_parts(base, parts, dies=()):
    said = on_processes(WORLD, work, base, parts, PROCESSES.Barrier(WORLD), dies=dies)
    assert not any(said.values()), said


def test_ranks_fail_together(base):
    run_parts(base, [part_wrong_models, part_failures, part_gradients, part_changes, part_abort, part_groups, part_state])


def test_ranks_that_are_gone(base):
    run_parts(base, [part_interrupt, part_death], dies=(2,))
    assert os.getxattr(base / 'part_death', 'user.hitrain.step_open') == b'0'
    run_parts(base, [part_death_of_rank_0], dies=(0,))
    wait_unclaimed(base / 'part_death_of_rank_0')
    own = parameters(seed=1)
    with SGD(own.items(), base / 'part_death_of_rank_0', resume=True) as optimizer:
        assert optimizer.committed_step == 0 and os.getxattr(optimizer.root, 'user.hitrain.step_open') == b'0'
        assert all(torch.equal(p, q) for p, q in zip(own.values(), parameters(seed=0).values()))


# --------------------------------------------- wrappers that reduce gradients

def reduced(rank, meeting, root, results):
    """DistributedDataParallel: overlap is refused by name, and step() sends the reduced gradients."""
    try:
        torch.set_num_threads(1)
        dist.init_process_group('gloo', init_method=f'file://{meeting}', rank=rank, world_size=2)
        torch.manual_seed(1)
        model = torch.nn.Linear(5, 3)
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        x = torch.ones(2, 5) * (1 + rank)
        if rank == 0:
            with SGD(model.named_parameters(), root / 'overlap', lr=1.0, overlap=True) as optimizer:
                with pytest.raises(RuntimeError, match='overlap=True does not work under DistributedDataParallel'):
                    model(x).sum().backward()
                optimizer.zero_grad(set_to_none=True)
        with SGD(wrapped.named_parameters(), root / 'model', lr=1.0, shard=Shard(rank, 2, timeout=SECONDS_MAX)) as optimizer:
            assert optimizer.param_groups[0]['names'] == ['weight', 'bias']
            wrapped(x).sum().backward()
            optimizer.step()
        assert torch.equal(model.weight, start['weight'] - 3.0) and torch.equal(model.bias, start['bias'] - 2.0)
        results.put((rank, None))
        dist.barrier()
    except BaseException as e:
        results.put((rank, f'{type(e).__name__}: {e}'))
        raise


def test_distributed_data_parallel(base, tmp_path):
    said = on_processes(2, reduced, tmp_path / 'meeting', base)
    assert not any(said.values()), said
