# SPDX-License-Identifier: Apache-2.0
"""state_bits=32|16|8 from a trainer: for a model and for groups, changed, exported and imported."""
import os

import pytest

from trainer import LR, random_parameters, root, store  # first: it makes the client importable
import torch
from hitrain import Adagrad, AdamW, Lion, SGD
from test_torch_kept import run

SHAPES = {'embedding': (300, 100), 'weight': (200, 100), 'bias': (100,)}
ERROR = {16: 2 ** -8, 8: 0.02}  # of an element, as a part of the largest one of its block


def bits(root, name):
    return int(os.getxattr(root / name, 'user.hitrain.state_bits'))


def groups(params, **of_embedding):
    return [{'params': [(n, p) for n, p in params.items() if n != 'embedding']},
            {'params': [('embedding', params['embedding'])], **of_embedding}]


@pytest.mark.parametrize('n', [16, 8])
@pytest.mark.parametrize('rule, options', [(AdamW, {}), (SGD, {'momentum': 0.9}), (Lion, {}), (Adagrad, {})])
def test_state_in_fewer_bits_trains_nearly_alike(root, rule, options, n):
    params, plain = random_parameters(SHAPES), random_parameters(SHAPES)
    with rule(params.items(), root, lr=LR, state_bits=n, **options) as optimizer:
        run(optimizer, params, 0, 5)
        assert bits(root, 'weight') == n and bits(root, 'bias') == 32  # of 100 elements
        assert os.path.getsize(root / '.hitrain/state/weight' / optimizer.state_words(optimizer.param_groups[0])[-1]) == 80_000
    with rule(plain.items(), root.parent / 'plain', lr=LR, **options) as optimizer:
        run(optimizer, plain, 0, 5)
    assert torch.equal(params['bias'], plain['bias']) and not torch.equal(params['weight'], plain['weight'])
    for name in SHAPES:
        changed = (plain[name] - random_parameters(SHAPES)[name]).norm()
        assert (params[name] - plain[name]).norm() < 0.2 * changed


def test_a_group_has_its_own_and_may_change_it(root):
    params = random_parameters(SHAPES)
    with AdamW(groups(params, state_bits=32), root, lr=LR, state_bits=8, state_bits_min=0) as optimizer:
        run(optimizer, params, 0, 1)
        assert [bits(root, n) for n in SHAPES] == [32, 8, 8]
        optimizer.param_groups[1]['state_bits'] = 16
        run(optimizer, params, 1, 2)
        assert [bits(root, n) for n in SHAPES] == [16, 8, 8]
        for group in optimizer.param_groups:
            group['state_bits'] = 32
        run(optimizer, params, 2, 3)
        assert [bits(root, n) for n in SHAPES] == [32, 32, 32]
        optimizer.param_groups[1]['state_bits'] = 7
        with pytest.raises((ValueError, OSError), match='state_bits'):
            run(optimizer, params, 3, 4)


@pytest.mark.parametrize('n', [16, 8])
def test_state_goes_to_pytorch_and_comes_back(store, root, n):
    params, there = random_parameters(SHAPES), random_parameters(SHAPES)
    with AdamW(params.items(), root, lr=LR, state_bits=n, state_bits_min=0) as optimizer:
        run(optimizer, params, 0, 3)
        out = optimizer.export_state()
        assert not {'state_bits', 'state_bits_min'} & set(out['param_groups'][0])
        for i, p in enumerate(params.values()):
            for what in ('exp_avg', 'exp_avg_sq'):
                assert torch.equal(out['state'][i][what], optimizer.read_state(p, what))
    reference = torch.optim.AdamW(there.values(), lr=LR)
    with torch.no_grad():
        for name, p in there.items():
            p.copy_(params[name])
    reference.load_state_dict(out)
    run(reference, there, 3, 4)
    back = random_parameters(SHAPES)
    with AdamW(back.items(), store.mountpoint / 'back', lr=LR, state_bits=n, state_bits_min=0) as optimizer:
        optimizer.load_state_dict(out)
        for i, p in enumerate(back.values()):  # each decoded value is nearest to its own code
            assert torch.equal(optimizer.read_state(p, 'exp_avg'), out['state'][i]['exp_avg'])
            assert torch.equal(optimizer.read_state(p, 'exp_avg_sq'), out['state'][i]['exp_avg_sq'])
        optimizer.load_state_dict(reference.state_dict())
        for p, own in zip(back.values(), reference.state.values()):
            read, want = optimizer.read_state(p, 'exp_avg'), own['exp_avg']
            assert (read - want).abs().max() <= ERROR[n] * want.abs().max()
        assert [bits(store.mountpoint / 'back', name) for name in SHAPES] == [n, n, n]


def test_a_checkpoint_does_not_say_how_state_is_kept(root):
    params, again = random_parameters(SHAPES), random_parameters(SHAPES)
    with AdamW(params.items(), root, lr=LR, state_bits=8) as optimizer:
        run(optimizer, params, 0, 1)
        said = optimizer.state_dict()
        whole = optimizer.export_state(masters=True)
    with AdamW(again.items(), root, lr=LR, state_bits=16, resume=True) as optimizer:
        optimizer.load_state_dict(said)
        run(optimizer, again, 1, 2)
        assert bits(root, 'weight') == 16
        optimizer.load_state_dict(whole)
        assert bits(root, 'weight') == 16 and optimizer.param_groups[0]['state_bits'] == 16


def test_a_file_of_many_parameters_has_one_form(root):
    params = random_parameters({f'w{i}': (50, 10) for i in range(8)})
    of = [{'params': [(n, p) for n, p in params.items() if int(n[1]) < 4]},
          {'params': [(n, p) for n, p in params.items() if int(n[1]) >= 4], 'state_bits': 8}]
    with AdamW(of, root, lr=LR, pack=1 << 16, state_bits_min=0) as optimizer:
        run(optimizer, params, 0, 2)
        packs = sorted(n for n in os.listdir(root) if n.startswith('packed'))
        assert sorted(bits(root, n) for n in packs) == [8, 32]
        optimizer.param_groups[0]['state_bits'] = 16
        run(optimizer, params, 2, 3)
        assert sorted(bits(root, n) for n in packs) == [8, 16]


@pytest.mark.parametrize('options', [{'state_bits': 7}, {'state_bits': 64}, {'state_bits': 8, 'state_bits_min': -1}])
def test_senseless_numbers_are_refused(root, options):
    params = random_parameters(SHAPES)
    with pytest.raises(ValueError, match='state_bits'):
        AdamW(params.items(), root, lr=LR, **options)
    with pytest.raises(ValueError, match='state_bits'):
        AdamW(groups(params, **options), root, lr=LR)
