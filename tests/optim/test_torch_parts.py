# SPDX-License-Identifier: Apache-2.0
"""Parameters of which each rank holds a part, as with FSDP: files have the whole, and ranks touch nothing but their own."""
import contextlib
import math
import os
import warnings

import pytest

from trainer import PROCESSES, SECONDS_MAX, on_processes, random_parameters, shared_store  # first: it makes the client importable
import torch
from hitrain import SGD, AdamW, RankFailed, Shard

WORLD = 3
SHAPES = {'w': (300, 1000), 'bias': (1000,), 'norm': (7,), 'one': (1, 9)}  # with two ranks that have nothing of one
WHOLE = {'whole': (50, 3)}  # all ranks hold the whole


def whole(seed, dtype=torch.float32):
    return random_parameters({**SHAPES, **WHOLE}, seed, dtype)


def rows_of(shape, rank, world):
    rows = -(-shape[0] // world)
    return slice(min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0]))


class Held:
    """What one of `world` ranks holds, beside the whole model, which the test computes on each rank."""

    def __init__(self, rank, world, seed=0, dtype=torch.float32):
        self.rank, self.world, self.all = rank, world, whole(seed, dtype)
        self.own = {n: torch.nn.Parameter(self.cut(n, p).clone()) for n, p in self.all.items()}
        self.parts = {n: (rows_of(s, rank, world).start * math.prod(s[1:]), s) for n, s in SHAPES.items()}

    def cut(self, name, values):
        return values.detach()[rows_of(values.shape, self.rank, self.world)] if name in SHAPES else values.detach()

    def open(self, root, rule=SGD, **options):
        return rule(self.own.items(), root, lr=0.01, **({'momentum': 0.9} if rule is SGD else {}), parts=self.parts, shard=Shard(self.rank, self.world, timeout=SECONDS_MAX), **options)

    def give(self, step, *without):
        for i, (n, p) in enumerate(self.all.items()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)).to(p.dtype)
            self.own[n].grad = None if n in without else self.cut(n, p.grad).clone()

    def agree(self):
        for n, p in self.own.items():
            assert torch.equal(p, self.cut(n, self.all[n])), (self.rank, n)


def moved(root):
    """Bytes of parameters and of gradients that programs have read and written."""
    stats = dict(line.split('=', 1) for line in os.getxattr(root.parent, 'user.hitrain.stats').decode().splitlines() if '=' in line)
    return int(stats['mount_param_read_bytes']), int(stats['mount_grad_written_bytes'])


def train(held, optimizer, other, steps):
    for step in steps:
        held.give(step)
        optimizer.step()
        other.step()
        held.agree()


def begin(held, root, meet):
    """Files have all elements. A byte of a step crosses the mount once, but those that all hold, and pages at the borders of parts."""
    other = torch.optim.SGD(held.all.values(), lr=0.01, momentum=0.9)
    with held.open(root) as optimizer:
        for n, p in held.all.items():
            assert (root / n).read_bytes() == p.detach().numpy().tobytes() and os.getxattr(root / n, 'user.hitrain.shape').decode() == ','.join(map(str, p.shape))
        meet()
        before = moved(root)
        meet()
        train(held, optimizer, other, range(3))
        meet()
        reads, writes = (now - b for now, b in zip(moved(root), before))
        parts, both = (sum(math.prod(s) * 4 for s in shapes.values()) for shapes in (SHAPES, WHOLE))
        assert writes == 3 * (parts + both)
        assert 3 * (parts + both) <= reads <= 3 * (parts + held.world * (both + len(held.all) * 8192)), (reads, parts)
        state = optimizer.read_state(held.own['w'], 'momentum_buffer')
        assert torch.equal(state, held.cut('w', other.state[held.all['w']]['momentum_buffer']))
        with pytest.raises(RuntimeError, match='gathers parameters before'):
            optimizer.read_ahead(torch.nn.Module())


def change(held, root, meet):
    """Each rank's own change counts for its part."""
    other = torch.optim.SGD(held.all.values(), lr=0.01, momentum=0.9)
    with held.open(root) as optimizer:
        for n, p in held.all.items():
            p.data.mul_(2)
            held.own[n].data.mul_(2)
        train(held, optimizer, other, [0])
        if held.rank == 1:  # one part alone
            held.own['w'].data.add_(1)
        held.all['w'].data[rows_of(SHAPES['w'], 1, held.world)] += 1
        train(held, optimizer, other, [1])


def fail(held, root, meet):
    """A rank that fails takes the step back on all; parts that were changed before are written again."""
    other = torch.optim.SGD(held.all.values(), lr=0.01, momentum=0.9)
    with held.open(root) as optimizer:
        for n, p in held.all.items():
            p.data.add_(1)
            held.own[n].data.add_(1)
        held.give(0)
        if held.rank == 2:
            def broken(*args):
                del optimizer._send_one
                raise OSError(5, 'of the test')
            optimizer._send_one = broken
        with pytest.raises((OSError, RankFailed), match='of the test'):
            optimizer.step()
        train(held, optimizer, other, [0, 1])
        held.give(2, *(['bias'] if held.rank == 1 else []))
        with pytest.raises(RuntimeError, match='bias has a gradient on rank 0 and none on rank 1'):
            optimizer.step()
        held.give(2, *(['one'] if held.rank else []))  # they have no element
        optimizer.step()
        other.step()
        held.agree()


def abort(held, root, meet):
    other = torch.optim.SGD(held.all.values(), lr=0.01, momentum=0.9)
    with held.open(root, durable_every=5) as optimizer:
        kept = {n: p.detach().clone() for n, p in held.all.items()}
        train(held, optimizer, other, [0, 1])
        optimizer.abort()
        for n, p in held.all.items():
            p.data.copy_(kept[n])
        other.state.clear()
        held.agree()
        train(held, optimizer, other, [2])


def state(held, root, meet):
    """State of two-byte parameters goes out and back in, by parts and from the whole; masters with it."""
    with held.open(root, AdamW, durable_every=4) as optimizer:
        held.give(0)
        optimizer.step()
        saved = optimizer.export_state(masters=True)
        assert saved['state'][0]['master'].shape == held.own['w'].shape
        values = {n: p.detach().clone() for n, p in held.own.items()}
        for step in (1, 2):
            held.give(step)
            optimizer.step()
        wanted = {n: p.detach().clone() for n, p in held.own.items()}
        for n, p in held.own.items():
            p.data.copy_(values[n])
        optimizer.load_state_dict(saved)
        for step in (1, 2):
            held.give(step)
            optimizer.step()
        assert all(torch.equal(p, wanted[n]) for n, p in held.own.items())
        with pytest.raises((ValueError, RankFailed), match='has the shape'):
            wrong = {**saved, 'state': {0: {**saved['state'][0], 'exp_avg': torch.zeros(5)}}} if held.rank == 1 else saved
            optimizer.load_state_dict(wrong)
        optimizer.load_state_dict({'param_groups': saved['param_groups'], 'state': {
            i: {'step': torch.tensor(3.0), 'exp_avg': whole(5)[n].detach(), 'exp_avg_sq': whole(6)[n].detach().square()} for i, n in enumerate(held.own)}})
        assert all(torch.equal(optimizer.read_state(p, 'exp_avg'), held.cut(n, whole(5)[n])) for n, p in held.own.items())


def wrong(held, root, meet):
    """Parts with gaps or that overlap, of shapes that differ, or without a parameter."""
    right, held.parts = held.parts, dict(held.parts)
    for offset, rank, match in ((101000, 1, 'no rank holds the elements 100000 to 101000 of w'), (99000, 1, 'parts that overlap at 99000')):
        held.parts['w'] = (offset, SHAPES['w']) if held.rank == rank else right['w']
        with pytest.raises(ValueError, match=match):
            held.open(root)
        meet()
    held.parts['w'] = right['w'][0], (301 if held.rank == 2 else 300, 1000)
    with pytest.raises((RankFailed, ValueError), match='other names, shapes|shape is'):
        held.open(root)
    meet()
    held.parts = {**right, 'v': (0, (3,))}
    with pytest.raises(ValueError, match='parts has v, which is no parameter'):
        held.open(root)
    meet()


def twice(held, root, meet):
    """Ranks that hold the same elements, as with HSDP, write a part of them each."""
    pair = Held(0, 1)
    pair.rank, pair.world = held.rank, held.world
    with pair.open(root) as optimizer:
        pair.rank, pair.world = 0, 1
        train(pair, optimizer, torch.optim.SGD(pair.all.values(), lr=0.01, momentum=0.9), [0, 1])
        assert {n: f.share.stop - f.share.start for f in optimizer._parameter_files() for n in [f.name] if f.part}['w'] == 300000 // held.world


SCENES = {f.__name__: f for f in (begin, change, fail, abort, state, wrong, twice)}


def resume(held, root, meet, steps):
    """Any number of ranks goes on with the same bits."""
    other = torch.optim.SGD(held.all.values(), lr=0.01, momentum=0.9)
    for step in range(steps.start):
        held.give(step)
        other.step()
    with held.open(root, resume=True) as optimizer:
        assert optimizer.committed_step == steps.start
        held.agree()
        train(held, optimizer, other, steps)


def work(rank, world, base, jobs, meeting, results):
    """jobs: (scene, what follows its first arguments); '' at the end of one that no rank failed in."""
    done = ''
    try:
        torch.set_num_threads(1)
        warnings.simplefilter('ignore', RuntimeWarning)
        for done, args in jobs:
            held = Held(rank, world, dtype=torch.bfloat16 if done == 'state' else torch.float32)
            (SCENES.get(done) or resume)(held, base / ('begin' if done == 'resume' else done), lambda: meeting.wait(SECONDS_MAX), *args)
            meeting.wait(SECONDS_MAX)
        results.put((rank, ''))
    except BaseException as e:
        meeting.abort()
        results.put((rank, f'{done}: {type(e).__name__}: {e}'))
        raise


def run(world, base, *jobs):
    said = on_processes(world, work, world, base, jobs, PROCESSES.Barrier(world))
    assert not any(said.values()), said


def test_parts_of_three_ranks(shared_store):
    base = shared_store.mountpoint
    run(WORLD, base, *[(name, ()) for name in ('begin', 'change', 'fail', 'abort', 'state', 'wrong')])
    run(2, base, ('resume', (range(3, 5),)), ('twice', ()))


def test_parts_need_a_shard(shared_store):
    with pytest.raises(ValueError, match='parts need shard='):
        AdamW([('w', torch.nn.Parameter(torch.zeros(3)))], shared_store.mountpoint / 'alone', parts={'w': (0, (6,))})
    held = Held(0, 3)
    with contextlib.suppress(FileNotFoundError), pytest.raises(ValueError, match='no rank holds the elements 100000 to 300000 of w: pass shard='):
        held.world = 1
        held.open(shared_store.mountpoint / 'short')
