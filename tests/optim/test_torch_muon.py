# SPDX-License-Identifier: Apache-2.0
"""hitrain.Muon: matrices by Muon and all else by another rule in one step, as the formulas say, however gradients go and values come.

tests/ecosystem/test_muon.py compares it with torch.optim.Muon, which PyTorch 1.13 lacks.
"""
import copy
import math
import os
import re
import warnings
from collections import OrderedDict

import pytest

from trainer import SECONDS_MAX, TOP, equal, on_threads, random_parameters, shared_root as root, shared_store, store  # first: it makes the client importable
import torch
from torch import nn
import hitrain
from hitrain import Muon, RankFailed, Shard
from hitrain._newton_schulz import Iteration, orthogonalized, rows_of_blocks
from killed import digest, same_after_kills

torch.set_num_threads(1)  # children are forks, and ranks are threads

LR, OTHERS_LR = 0.02, 3e-3
SHAPES = {'wide': (12, 20), 'tall': (20, 12), 'square': (16, 16), 'experts': (3, 12, 8), 'fused': (24, 8), 'heads': (16, 8), 'bias': (20,), 'rows': (13, 8)}
SPLIT = {'fused': (8, 12, 4), 'heads': 4}
OTHERS = ('bias', 'rows')


def groups_of(params, **others):
    whole = [(n, p) for n, p in params.items() if n not in SPLIT and n not in OTHERS]
    return [{'params': whole, 'use_muon': True}, *({'params': [(n, params[n])], 'use_muon': True, 'split': s} for n, s in SPLIT.items()),
            {'params': [(n, params[n]) for n in OTHERS], 'use_muon': False, **{'lr': OTHERS_LR, **others}}]


def give(params, step, without=(), scale=1.0):
    random = torch.Generator().manual_seed(100 + step)
    for n, p in params.items():
        grad = torch.randn(p.shape, generator=random).to(p.dtype) * scale
        p.grad = None if n in without else grad


class Formula:
    """torch.optim.Muon's operations for each block, and AdamW for the others."""

    def __init__(self, params, lr=LR, momentum=0.95, nesterov=True, weight_decay=0.1, adjust_lr_fn='original', maximize=False, ns_form='plain', **iteration):
        self.params, self.lr, self.momentum, self.nesterov, self.decay, self.adjust = params, lr, momentum, nesterov, weight_decay, adjust_lr_fn
        self.sign = -1 if maximize else 1
        self.iteration = Iteration(form=ns_form, **{k[3:] if k.startswith('ns_') else k: v for k, v in iteration.items()})
        self.buffers = {n: torch.zeros_like(p) for n, p in params.items()}
        self.adamw = torch.optim.AdamW([params[n] for n in OTHERS], lr=OTHERS_LR)

    def ratio(self, m, n):
        return {'original': math.sqrt(max(1, m / n)), 'match_rms_adamw': 0.2 * math.sqrt(max(m, n)), 'spectral_unclamped': math.sqrt(m / n)}[self.adjust or 'original']

    @torch.no_grad()
    def step(self):
        for n, p in self.params.items():
            if n in OTHERS or p.grad is None:
                continue
            buffer, grad = self.buffers[n].lerp_(self.sign * p.grad, 1 - self.momentum), self.sign * p.grad
            update = grad.lerp(buffer, self.momentum) if self.nesterov else buffer
            p.mul_(1 - self.lr * self.decay)
            blocks, first = rows_of_blocks(n, p.shape, SPLIT.get(n)), 0
            ortho = orthogonalized(update, blocks, self.iteration)
            for rows in blocks:
                p[..., first:first + rows, :].add_(ortho[..., first:first + rows, :], alpha=-self.lr * self.ratio(rows, p.shape[-1]))
                first += rows
        self.adamw.step()


def close(left, right, within=2e-3):
    """A rounding to bf16 that goes the other way changes a row of an orthogonal matrix by some thousandths."""
    return all((left[n] - right[n]).abs().max() <= within * LR * (1 if n in OTHERS else 20) for n in left)


def pair(root, options=None, of_formula=None, **more):
    own, theirs = random_parameters(SHAPES), random_parameters(SHAPES)
    return own, theirs, Muon(groups_of(own), root, lr=LR, **(options or {}), **more), Formula(theirs, **((options or {}) if of_formula is None else of_formula))


# ---------------------------------------------------------------- numbers

OPTIONS = [{}, {'nesterov': False}, {'momentum': 0.3}, {'momentum': 0.0}, {'weight_decay': 0.0}, {'adjust_lr_fn': 'match_rms_adamw'},
           {'adjust_lr_fn': 'spectral_unclamped'}, {'adjust_lr_fn': None}, {'maximize': True}, {'ns_steps': 2}, {'ns_coefficients': (2.0, -1.5, 0.5)},
           {'eps': 100.0}, {'ns_form': 'gram'}]


@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_steps_are_those_of_the_formula(root, options):
    own, theirs, optimizer, formula = pair(root, options)
    with optimizer:
        for step in range(4):
            for params, o in ((own, optimizer), (theirs, formula)):
                give(params, step)
                o.step()
            assert close(own, theirs), step
        assert optimizer.committed_step == 4
        moment = optimizer.read_state(own['fused'], 'momentum_buffer')
        assert (moment - formula.buffers['fused']).abs().max() < 1e-6


@pytest.mark.parametrize('options', [{}, {'ns_steps': 2, 'ns_coefficients': (2.0, -1.5, 0.5)}, {'eps': 100.0}, {'max_grad_norm': 1e9}], ids=str)
def test_the_store_orthogonalises_if_it_is_asked(root, options):
    """It rounds to bf16 between products, and adds in f32: PyTorch 1.13 also rounds sums, and is five times as far from the f32 of the Gram form."""
    of_formula = {'ns_form': 'gram', **{k: v for k, v in options.items() if k != 'max_grad_norm'}}
    own, theirs, optimizer, formula = pair(root, options, of_formula, ns='store')
    with optimizer:
        for step in range(4):
            for params, o in ((own, optimizer), (theirs, formula)):
                before = {n: p.detach().clone() for n, p in params.items()}
                give(params, step)
                o.step()
            for n, p in own.items():
                assert (p - theirs[n]).norm() <= 0.05 * (theirs[n] - before[n]).norm(), n
        assert 'ns=store' in os.getxattr(root, 'user.hitrain.optimizer').decode() and optimizer.committed_step == 4


def test_a_matrix_without_a_gradient_stays(root):
    own, theirs, optimizer, formula = pair(root)
    with optimizer:
        for step, without in enumerate([('wide', 'bias'), tuple(n for n in SHAPES if n != 'bias'), ('bias', 'rows'), ()]):
            for params, o in ((own, optimizer), (theirs, formula)):
                give(params, step, without)
                o.step()
            assert close(own, theirs), step


def test_settings_of_groups_count_from_step_to_step(root):
    own, theirs, optimizer, formula = pair(root)
    with optimizer:
        assert optimizer.param_groups[-1]['betas'] == (0.9, 0.999) and 'momentum' not in optimizer.param_groups[-1]
        for step in range(4):
            formula.lr = LR / (step + 1)
            for group in optimizer.param_groups[:-1]:
                group['lr'] = torch.tensor(formula.lr, dtype=torch.float64)
            for params, o in ((own, optimizer), (theirs, formula)):
                give(params, step)
                o.step()
            assert close(own, theirs), step
        optimizer.param_groups[0]['split'] = 5
        give(own, 4)
        with pytest.raises(ValueError, match='split of wide has blocks of 10 rows, and its matrix has 12'):
            optimizer.step()


@pytest.mark.parametrize('bits, within', [(16, 0.01), (8, 0.15)])
def test_momentum_of_fewer_bits(root, bits, within):
    """A group may have its own, and another run has the same bits."""
    runs = []
    for name in ('one', 'two'):
        own, theirs, optimizer, formula = pair(root.with_name(name), of_formula={}, state_bits=bits, state_bits_min=0)
        with optimizer:
            optimizer.param_groups[0]['state_bits'] = 32
            for step in range(4):
                for params, o in ((own, optimizer), (theirs, formula)):
                    give(params, step)
                    o.step()
            kept = {n: os.getxattr(root.with_name(name) / n, 'user.hitrain.state_bits') for n in SHAPES}
            assert kept == {n: b'%d' % (32 if n in ('wide', 'tall', 'square', 'experts') else bits) for n in SHAPES}
            for n, p in own.items():
                if n not in OTHERS:
                    wanted = formula.buffers[n]
                    off = (optimizer.read_state(p, 'momentum_buffer') - wanted).norm() / wanted.norm()
                    assert (off < 1e-6) == (kept[n] == b'32') and off < within, n
        runs.append(own)
    assert equal(*runs)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_files_of_two_bytes(root, dtype):
    """Masters are kept: small steps add up."""
    own, theirs, optimizer, formula = pair(root, {'weight_decay': 0.0}, param_dtype=dtype)
    for n, p in theirs.items():
        p.data.copy_(p.data.to(dtype))
    formula.lr = 1e-4
    for group in optimizer.param_groups:
        group['lr'] = formula.lr
    formula.adamw.param_groups[0]['lr'] = formula.lr
    with optimizer:
        for step in range(20):
            give(own, step)
            for n, p in theirs.items():
                p.grad = own[n].grad.to(dtype).float()
            optimizer.step()
            formula.step()
        for n, p in own.items():
            if n not in OTHERS:
                assert (optimizer.read_state(p, 'master') - theirs[n]).abs().max() < 1e-4, n
                assert torch.equal(p, optimizer.read_state(p, 'master').to(dtype).float()), n


def test_clipping_acts_on_all_gradients(root):
    own, theirs, optimizer, formula = pair(root, of_formula={}, max_grad_norm=1.0)
    with optimizer:
        for step in range(3):
            give(own, step)
            give(theirs, step)
            optimizer.step()
            norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
            formula.step()
            assert abs(optimizer.grad_norm - norm) < 1e-4 * norm and close(own, theirs)


def test_a_step_with_a_nan_is_skipped_or_refused(root):
    own, theirs, optimizer, formula = pair(root, of_formula={}, skip_nonfinite=True)
    with optimizer:
        for step in range(4):
            for params, o in ((own, optimizer), (theirs, formula)):
                give(params, step)
                if step % 2 and o is optimizer:
                    own['tall'].grad[1, 1] = math.nan
                if not step % 2 or o is optimizer:
                    o.step()
            assert close(own, theirs) and optimizer.step_was_skipped == bool(step % 2)
        optimizer.skip_nonfinite = False
        before = copy.deepcopy(own)
        give(own, 9)
        own['tall'].grad[1, 1] = math.nan
        with pytest.raises(OSError, match='orthogonalised update of tall'):
            optimizer.step()
        assert equal(own, before) and optimizer.committed_step == 4
        give(own, 4)
        optimizer.step()
        assert optimizer.committed_step == 5 and not torch.equal(own['tall'], before['tall'])


@pytest.mark.parametrize('mode', ['sum', 'mean'])
@pytest.mark.parametrize('overlap', [False, True])
def test_sums_of_gradients(root, mode, overlap):
    """The last group is shorter, and a matrix has no part in some passes."""
    own, theirs, optimizer, formula = pair(root, of_formula={}, accumulate=3, accumulate_mode=mode, overlap=overlap)
    with optimizer:
        for step, passes in enumerate((3, 3, 2)):
            for p in theirs.values():
                p.grad = None
            for i in range(passes):
                without = () if step == 0 else ('square', 'rows')[:i]
                for params in (own, theirs):
                    random = torch.Generator().manual_seed(10 * step + i)
                    loss = sum((p * torch.randn(p.shape, generator=random)).sum() * (n not in without) for n, p in params.items() if n not in without)
                    loss.backward()
                if i + 1 < passes and not overlap:
                    optimizer.send_gradients()
            for p in theirs.values():
                p.grad = p.grad / 3 if mode == 'mean' else p.grad
            optimizer.step()
            optimizer.zero_grad()
            formula.step()
            assert close(own, theirs), step


# ---------------------------------------------------------------- the same bits on every way

def trained(root, steps=range(4), resume=False, params=None, **options):
    params = params or random_parameters(SHAPES)
    with Muon(groups_of(params), root, lr=LR, resume=resume, **options) as optimizer:
        for step in steps:
            random = torch.Generator().manual_seed(step)
            sum((p * torch.randn(p.shape, generator=random)).sum() for p in params.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        return params, {n: optimizer.read_state(p, 'momentum_buffer') for n, p in params.items() if n not in OTHERS}


WAYS = [{'overlap': True}, {'async_step': True}, {'overlap': True, 'async_step': True, 'durable_every': 3}, {'pack': 4096}, {'max_grad_norm': 1e9},
        {'durable_every': 3, 'redo': True}]


@pytest.mark.parametrize('options', WAYS, ids=str)
def test_each_way_has_the_same_bits(root, options):
    (own, state), (other, other_state) = trained(root), trained(root.parent / 'other', **options)
    assert equal(own, other) and equal(state, other_state)
    packed = [n for n in os.listdir(root.parent / 'other') if n.startswith('packed')]
    assert len(packed) == ('pack' in options)


def test_a_resumed_run_has_the_bits_of_one_run(root):
    whole, state = trained(root)
    trained(root.parent / 'other', range(2))
    assert equal(whole, trained(root.parent / 'other', range(2, 4), resume=True)[0])


def test_a_model_with_packs_of_another_rule_is_refused(root):
    params = random_parameters(SHAPES)
    hitrain.AdamW(params.items(), root, pack=4096).close()
    with pytest.raises(ValueError, match='holds wide, and Muon needs a file for each matrix'):
        Muon(groups_of(params), root, resume=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 24, bias=False), nn.Linear(24, 12)])
        self.frozen = nn.Parameter(torch.ones(12), requires_grad=False)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x * self.frozen)


def net():
    torch.manual_seed(1)
    return Net()


def steps_of(model, optimizer, passes=1):
    for step in range(4):
        for i in range(passes):
            x = torch.randn(5, 12, generator=torch.Generator().manual_seed(10 * step + i))
            model(x).square().mean().backward()
            if i + 1 < passes and not optimizer._overlap:
                optimizer.send_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize('options', [{}, {'accumulate': 2}, {'max_grad_norm': 0.1}], ids=str)
def test_an_offloaded_model_has_the_bits_of_one_in_memory(root, options):
    model, other = net(), net()
    passes = options.get('accumulate', 1)
    with Muon(hitrain.muon_groups(model), root, lr=LR, **options) as optimizer:
        wanted = steps_of(model, optimizer, passes)
        momentum = optimizer.read_state(model.blocks[1].weight, 'momentum_buffer')
    with hitrain.offload(other, root.parent / 'other', 'muon', keep=1 << 20, lr=LR, **options) as optimizer:
        assert [g['use_muon'] for g in optimizer.param_groups] == [True, False]
        assert equal(wanted, steps_of(other, optimizer, passes))
        assert torch.equal(momentum, optimizer.read_state(other.blocks[1].weight, 'momentum_buffer'))


def test_the_example_of_the_documents_runs(root):
    text = re.search(r'^## Muon\n.*?^```python\n(.*?)^```', (TOP / 'docs/pytorch.md').read_text(), re.M | re.S).group(1)
    once, each = text.replace('/mnt/hitrain/model', str(root)).replace('(4096, 1024, 1024)', '(12, 6, 6)').split('\n...\n')
    model = nn.Sequential(OrderedDict(tokens=nn.Embedding(9, 8), qkv=nn.Linear(8, 24), head=nn.Linear(24, 9)))
    names = {'model': model, 'hitrain': hitrain}
    exec(once, names)
    for _ in range(2):
        names['loss'] = model(torch.arange(9)).square().mean()
        exec(each, names)
    optimizer = names['optimizer']
    assert [(g['use_muon'], g.get('split'), g['lr']) for g in optimizer.param_groups] == [(True, (12, 6, 6), 0.02), (False, None, 3e-4)]
    assert os.getxattr(root / 'qkv.weight', 'user.hitrain.optimizer').endswith(b'muon_split=12,6*2') and optimizer.committed_step == 2
    optimizer.close()


def test_one_two_and_three_ranks_have_the_same_bits(root):
    """Each matrix has one owner, and is whole there, also if ranks hold parts."""
    wanted = trained(root)[0]
    for world in (2, 3):
        for in_parts in (False, True):
            where, got, asked = root.parent / f'{world}{in_parts}', {}, {rank: [] for rank in range(world)}

            def rank_of(rank):
                whole = random_parameters(SHAPES)
                cut = {n: slice(rank * 12 // world * 20, (rank + 1) * 12 // world * 20) for n in ('wide',)} if in_parts else {}
                own = {n: nn.Parameter(p.detach().view(-1)[cut[n]].clone()) if n in cut else p for n, p in whole.items()}
                parts = {n: (c.start, SHAPES[n]) for n, c in cut.items()}
                with Muon(groups_of(own), where, lr=LR, shard=Shard(rank, world, timeout=SECONDS_MAX), parts=parts) as optimizer:
                    read = optimizer._read_update
                    optimizer._read_update = lambda m: (asked[rank].append(m.file.name), read(m))[1]
                    for step in range(4):
                        random = torch.Generator().manual_seed(step)
                        for n, p in own.items():
                            grad = torch.randn(SHAPES[n], generator=random)
                            p.grad = grad.view(-1)[cut[n]].clone() if n in cut else grad
                        optimizer.step()
                    got[rank] = {n: (p.detach(), cut.get(n)) for n, p in own.items()}
            on_threads(world, rank_of)
            assert len(got) == world
            for of_rank in got.values():
                for n, (p, cut) in of_rank.items():
                    assert torch.equal(p, wanted[n].view(-1)[cut] if cut else wanted[n]), (world, in_parts, n)
            assert sorted(n for names in asked.values() for n in set(names)) == sorted(n for n in SHAPES if n not in OTHERS)
            assert all(asked.values())


def test_a_rank_that_fails_between_the_phases_takes_the_step_back_on_all(root):
    wanted, got, failed = trained(root)[0], {}, {}

    def rank_of(rank):
        own = random_parameters(SHAPES)
        with Muon(groups_of(own), root.parent / 'other', lr=LR, shard=Shard(rank, 2, timeout=SECONDS_MAX)) as optimizer:
            give_ortho = optimizer._give_ortho

            def fail(m, update):
                raise ArithmeticError('of the test')
            for step in range(4):
                for broken in (step == 2, False) if step == 2 else (False,):
                    optimizer._give_ortho = fail if broken and rank == 1 else give_ortho
                    random = torch.Generator().manual_seed(step)
                    for n, p in own.items():
                        p.grad = torch.randn(SHAPES[n], generator=random)
                    if broken:
                        with pytest.raises((ArithmeticError, RankFailed), match='of the test') as e:
                            optimizer.step()
                        failed[rank] = e.type
                    else:
                        optimizer.step()
            got[rank] = own
    on_threads(2, rank_of)
    assert failed == {0: RankFailed, 1: ArithmeticError} and all(equal(wanted, own) for own in got.values()) and len(got) == 2


# ---------------------------------------------------------------- kills

@pytest.mark.parametrize('options', [{}, {'max_grad_norm': 1.0, 'durable_every': 2}], ids=str)
def test_a_trainer_is_killed_at_each_request_of_a_step(shared_store, root, tmp_path, options):
    def script(where, requests, again):
        params = {n: p for n, p in random_parameters(SHAPES).items() if n in ('wide', 'heads', 'bias')}
        groups = [{'params': [('wide', params['wide'])]}, {'params': [('heads', params['heads'])], 'split': 4},
                  {'params': [('bias', params['bias'])], 'use_muon': False}]
        optimizer = Muon(groups, where, lr=LR, resume=again, **options)
        for step in range(optimizer.state_dict()['hitrain']['step'], 3):
            give(params, step)
            if step == 1:
                requests.start()
            optimizer.step()
            requests.stop()
        said = digest(where, optimizer, params)
        optimizer.close()
        return said
    assert same_after_kills(shared_store, lambda n: os.path.join(root.parent, f'model{n}'), script, tmp_path / 'said') > 15


def test_the_daemon_is_killed_between_the_phases(store):
    """No step has a first phase alone. Logged steps are computed again, by the orthogonalised updates of the log."""
    wanted, wanted_state = trained(store.mountpoint / 'plain')
    for options in ({}, {'durable_every': 4, 'redo': True}):
        root, params = store.mountpoint / f'killed{len(options)}', random_parameters(SHAPES)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            with pytest.raises(OSError, match="daemon is gone"):
                optimizer = Muon(groups_of(params), root, lr=LR, **options)
                give_ortho, given = optimizer._give_ortho, []

                def kill(m, update):
                    if len(given) == 2 * 6 + 3:  # of the third step
                        store.kill()
                    given.append(m.file.name)
                    give_ortho(m, update)
                optimizer._give_ortho = kill
                for step in range(4):
                    random = torch.Generator().manual_seed(step)
                    for n, p in params.items():
                        p.grad = torch.randn(SHAPES[n], generator=random)
                    optimizer.step()
            optimizer.close()
        store.mount()
        assert int(os.getxattr(root, 'user.hitrain.durable_step')) == 2
        got, state = trained(root, range(2, 4), resume=True, **options)
        assert equal(wanted, got) and equal(wanted_state, state)


# ---------------------------------------------------------------- state

def test_state_goes_out_and_back_in(root):
    params, _ = trained(root)
    with Muon(groups_of(params), root, lr=LR, resume=True) as optimizer:
        kept, values = optimizer.export_state(masters=True), copy.deepcopy(params)
        assert list(kept['state'][0]) == ['momentum_buffer'] and list(kept['state'][7]) == ['step', 'exp_avg', 'exp_avg_sq']
        assert kept['param_groups'][1]['split'] == SPLIT['fused']
        small = optimizer.state_dict()
        wanted = []
        for again in range(2):
            for step in range(4, 6):
                give(params, step)
                optimizer.step()
            wanted.append(copy.deepcopy(params))
            for n, p in params.items():
                p.data.copy_(values[n])
            optimizer.load_state_dict(kept)
        assert equal(*wanted)
        with pytest.raises(ValueError, match='is of step 4, but'):
            optimizer.load_state_dict(small)
        wrong = copy.deepcopy(kept)
        wrong['param_groups'][0]['ns_steps'] = 0
        with pytest.raises(ValueError, match='ns_steps must be a whole number'):
            optimizer.load_state_dict(wrong)


def test_states_of_each_rule(root):
    """For two optimizers of torch.optim, and from them."""
    params, state = trained(root)
    with Muon(groups_of(params), root, lr=LR, resume=True) as optimizer:
        of_muon, of_others = optimizer.export_state(rule='muon'), optimizer.export_state(rule='adamw')
        assert len(of_muon['param_groups']) == 3 and [g['params'] for g in of_others['param_groups']] == [[0, 1]]
        adamw = torch.optim.AdamW([params[n] for n in OTHERS])
        adamw.load_state_dict(of_others)
        assert torch.equal(adamw.state[params['rows']]['exp_avg'], optimizer.read_state(params['rows'], 'exp_avg'))
        of_muon['state'][0]['momentum_buffer'] = torch.full(SHAPES['wide'], 2.0)
        optimizer.import_state({'muon': of_muon, 'adamw': adamw.state_dict()})
        assert optimizer.read_state(params['wide'], 'momentum_buffer').eq(2.0).all()
        with pytest.raises(ValueError, match="has no groups of the rule adamw"):
            optimizer.import_state({'muon': of_muon})
        with pytest.raises(ValueError, match='no group has the rule lion'):
            optimizer.export_state(rule='lion')


# ---------------------------------------------------------------- wrong use

BAD = [({'adjust_lr_fn': 'rms'}, 'adjust_lr_fn must be original, match_rms_adamw, spectral_unclamped or None, not'), ({'ns_steps': 0}, 'ns_steps must be'),
       ({'ns_steps': 100}, 'ns_steps must be'), ({'ns_steps': 2.5}, 'ns_steps must be'), ({'ns_coefficients': (1.0, 2.0)}, 'ns_coefficients must be three numbers'),
       ({'ns_coefficients': 3.4}, 'ns_coefficients must be three numbers'), ({'ns_coefficients': ('a', 1, 1)}, 'ns_coefficients must be three numbers'),
       ({'ns_coefficients': (math.nan, 1, 1)}, 'ns_coefficients must be three numbers'), ({'momentum': 1.0}, 'momentum must be'), ({'momentum': -0.1}, 'momentum must be'),
       ({'lr': -1.0}, 'lr must be'), ({'weight_decay': -0.1}, 'weight_decay must be'), ({'eps': -1e-7}, 'eps must be'), ({'others': 'muon'}, 'others must be adamw'),
       ({'others': 'rmsprop'}, 'others must be adamw'), ({'ns_form': 'cubic'}, 'ns_form must be plain or gram'), ({'ns': 'gpu'}, 'ns must be client or store'),
       ({'ns': 'store', 'ns_form': 'gram'}, 'ns_form is for ns=client'), ({'topk': 0.1}, 'Muon takes no topk')]


@pytest.mark.parametrize('options, message', BAD, ids=str)
def test_wrong_options_are_refused_by_name(root, options, message):
    with pytest.raises(ValueError, match=message):
        Muon(groups_of(random_parameters(SHAPES)), root, **{'lr': LR, **options})
    assert not root.exists()


BAD_GROUPS = [({'params': [('v', torch.zeros(3))]}, r'v has the shape \(3,\), and Muon trains matrices: put it into a group with use_muon=False'),
              ({'params': [('w', torch.zeros(4, 3))], 'split': (2, 1)}, 'split of w has blocks of 3 rows, and its matrix has 4'),
              ({'params': [('w', torch.zeros(4, 3))], 'use_muon': 'yes'}, "use_muon must be True or False, not 'yes'"),
              ({'params': [('v', torch.zeros(3))], 'use_muon': False, 'betas': (1.0, 0.9)}, 'betas must be')]


@pytest.mark.parametrize('group, message', BAD_GROUPS, ids=str)
def test_wrong_groups_are_refused_by_name(root, group, message):
    group = {**group, 'params': [(n, nn.Parameter(t.clone())) for n, t in group['params']]}
    with pytest.raises(ValueError, match=message):
        Muon([group], root, lr=LR)
    with Muon([('first', nn.Parameter(torch.ones(2, 2)))], root, lr=LR) as optimizer:  # of the model above there is nothing
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(group)
        assert sorted(n for n in os.listdir(root) if n != '.hitrain') == ['first'] and len(optimizer.param_groups) == 1


def test_a_vector_of_a_plain_list_is_refused(root):
    with pytest.raises(ValueError, match='bias has the shape'):
        Muon(random_parameters(SHAPES).items(), root, lr=LR)


@pytest.mark.parametrize('rule', ['sgd', 'lion', 'adagrad', 'adam'])
def test_others_may_have_any_rule(root, rule):
    params = random_parameters(SHAPES)
    other = copy.deepcopy(params)
    kind = hitrain.optim.RULES[rule]
    with Muon(groups_of(params), root, lr=LR, others=rule) as optimizer, \
            kind([(n, other[n]) for n in OTHERS], root.parent / 'other', lr=OTHERS_LR) as alone:
        for step in range(2):
            give(params, step)
            give(other, step)
            optimizer.step()
            alone.step()
        assert all(torch.equal(params[n], other[n]) for n in OTHERS)
