# SPDX-License-Identifier: Apache-2.0
"""Small parameters that share files: the same numbers as in files of their own, and what is refused."""
import errno
import os
import subprocess

import pytest

from trainer import LR, SECONDS_MAX, equal, number, on_threads, random_parameters, shared_root, shared_store  # first: it makes the client importable
import torch
import hitrain
from hitrain import SGD, AdamW, Shard, _packs
from hitrain.checkpoint import export_safetensors, import_safetensors

PACK = 4096
SHAPES = {'a.weight': (30, 20), 'large': (100, 100), 'a.bias': (20,), 'scale': (), 'line': (1, 7, 1)}
SMALL = ['a.weight', 'a.bias', 'scale', 'line']
RULES = {'AdamW': {'weight_decay': 0.1}, 'Adam': {'weight_decay': 0.1, 'maximize': True}, 'SGD': {'momentum': 0.9, 'dampening': 0.1},
         'Lion': {'weight_decay': 0.1}, 'Adagrad': {'lr_decay': 0.1}}


def give(params, step, dtype=None):
    for i, p in enumerate(params.values()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + i)).to(dtype or p.dtype)


def run(optimizer, params, first, last):
    for step in range(first, last):
        give(params, step)
        optimizer.step()


def files(root):
    return sorted(n for n in os.listdir(root) if n != '.hitrain')


def same_state(left, right):
    left, right = left.export_state(masters=True)['state'], right.export_state(masters=True)['state']
    return left.keys() == right.keys() and all(torch.equal(v, right[i][n]) for i, s in left.items() for n, v in s.items())


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('options', [{}, {'param_dtype': torch.bfloat16}, {'param_dtype': torch.bfloat16, 'grad_dtype': torch.float32}],
                         ids=['f32', 'bf16', 'f32 gradients'])
def test_a_pack_has_the_bits_of_single_files(shared_root, rule, options):
    kind, alone = getattr(hitrain, rule), shared_root.with_name('alone')
    own, other = random_parameters(SHAPES), random_parameters(SHAPES)
    with kind(own.items(), shared_root, lr=LR, pack=PACK, **RULES[rule], **options) as optimizer, \
            kind(other.items(), alone, lr=LR, **RULES[rule], **options) as single:
        assert files(shared_root) == ['large', 'packed.0'] and files(alone) == sorted(SHAPES)
        assert equal(own, other)  # bf16 files round
        for step in range(3):
            for o in (optimizer, single):
                o.param_groups[0]['lr'] = LR / (1 + step)
            run(optimizer, own, step, step + 1)
            run(single, other, step, step + 1)
            assert equal(own, other)
        assert same_state(optimizer, single)
    again = random_parameters(SHAPES, seed=1)
    with kind(again.items(), shared_root, lr=LR, resume=True, **RULES[rule], **options) as optimizer, \
            kind(other.items(), alone, lr=LR, resume=True, **RULES[rule], **options) as single:
        assert equal(again, other)
        run(optimizer, again, 3, 5)
        run(single, other, 3, 5)
        assert equal(again, other) and same_state(optimizer, single)


@pytest.mark.parametrize('options', [{'overlap': True}, {'overlap': True, 'async_step': True}, {'durable_every': 3, 'redo': True},
                                     {'accumulate': 2}, {'accumulate': 2, 'accumulate_mode': 'mean'}, {'skip_nonfinite': True}, {'grad_scale': 8.0}])
def test_options_of_a_step_with_packs(shared_root, options):
    def train(root, **more):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 30), torch.nn.Linear(30, 40))
        with AdamW(model.named_parameters(), root, lr=LR, **more, **options) as optimizer:
            if options.get('async_step'):
                optimizer.read_ahead(model)
            for step in range(4):
                for part in range(options.get('accumulate', 1)):
                    if part:
                        optimizer.send_gradients()
                    model(torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + part))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.wait()
            return {n: p.detach().clone() for n, p in model.named_parameters()}
    assert equal(train(shared_root, pack=256), train(shared_root.with_name('alone')))
    assert files(shared_root) == ['1.weight', '2.weight', 'packed.0']


def test_clipping_takes_the_norm_of_all(shared_root):
    own, other = random_parameters(SHAPES), random_parameters(SHAPES)
    theirs = torch.optim.AdamW(other.values(), lr=LR)
    with AdamW(own.items(), shared_root, lr=LR, pack=PACK, max_grad_norm=1.0) as optimizer:
        for step in range(3):
            run(optimizer, own, step, step + 1)
            give(other, step)
            norm = torch.nn.utils.clip_grad_norm_(other.values(), 1.0)
            theirs.step()
            assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert all(torch.allclose(own[n], other[n], atol=1e-5) for n in own)


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('options', [{}, {'param_dtype': torch.bfloat16}, {'durable_every': 4, 'redo': True}], ids=['f32', 'bf16', 'logged'])
def test_groups_share_a_pack_with_the_bits_of_single_files(shared_root, rule, options):
    """A schedule changes one group, another one comes to be like a third, and the model goes on with other groups."""
    kind, alone = getattr(hitrain, rule), shared_root.with_name('alone')
    own, other = random_parameters(SHAPES), random_parameters(SHAPES)

    def groups(params, order):
        return [{'params': [(n, params[n]) for n in names], **words} for names, words in order]
    order = [(('a.weight', 'line', 'large'), {}), (('a.bias',), {'weight_decay': 0.0, 'lr': 2 * LR}), (('scale',), {'maximize': True})]
    with kind(groups(own, order), shared_root, lr=LR, pack=PACK, **RULES[rule], **options) as optimizer, \
            kind(groups(other, order), alone, lr=LR, **RULES[rule], **options) as single:
        assert files(shared_root) == ['large', 'packed.0']
        for step in range(6):
            for o, params in ((optimizer, own), (single, other)):
                o.param_groups[0]['lr'] = LR / (1 + step)
                o.param_groups[1]['lr'] = LR * step
                o.param_groups[1]['weight_decay'] = o.param_groups[0]['weight_decay'] if step == 4 else 0.0
                run(o, params, step, step + 1)
        assert equal(own, other) and same_state(optimizer, single)
    order = [((name,), {'lr': LR * (i % 3)}) for i, name in enumerate(reversed(SHAPES))]
    with kind(groups(own, order), shared_root, lr=LR, resume=True, **RULES[rule], **options) as optimizer, \
            kind(groups(other, order), alone, lr=LR, resume=True, **RULES[rule], **options) as single:
        run(optimizer, own, 6, 9)
        run(single, other, 6, 9)
        assert equal(own, other) and same_state(optimizer, single)


def test_a_group_for_each_parameter_packs(shared_root):
    """Many scripts make groups so. Their words are those that differ; equal neighbours have one range."""
    params = {f'p{i}': torch.nn.Parameter(torch.ones(3)) for i in range(600)}
    groups = [{'params': [(n, p)], 'lr': 0.5 if i % 4 < 2 else 0.25} for i, (n, p) in enumerate(params.items())]
    with SGD(groups, shared_root, lr=0.5, pack=PACK) as optimizer:
        assert files(shared_root) == ['packed.0', 'packed.1', 'packed.2']
        assert os.getxattr(shared_root / 'packed.0', 'user.hitrain.optimizer').startswith(b'6:12 lr=0.25\n18:24 lr=0.25\n')
        for p in params.values():
            p.grad = torch.ones(3)
        optimizer.step()
        assert all(torch.equal(p, torch.full((3,), 0.5 if i % 4 < 2 else 0.75)) for i, p in enumerate(params.values()))
        for group in optimizer.param_groups:
            group['lr'] = 0.125
        optimizer.step()
        assert all(torch.equal(p, torch.full((3,), 0.375 if i % 4 < 2 else 0.625)) for i, p in enumerate(params.values()))
        with pytest.raises(OSError):
            os.getxattr(shared_root / 'packed.0', 'user.hitrain.optimizer')


def test_groups_of_different_state_share_no_pack(shared_root):
    params = {n: torch.nn.Parameter(torch.ones(3)) for n in 'abcd'}

    def groups(momentum):
        return [{'params': [(n, params[n]) for n in 'ab'], 'momentum': 0.9}, {'params': [(n, params[n]) for n in 'cd'], 'momentum': momentum}]
    SGD(groups(0.0), shared_root, lr=LR, pack=PACK).close()
    assert files(shared_root) == ['packed.0', 'packed.1']
    SGD(groups(0.5), shared_root.with_name('alike'), lr=LR, pack=PACK).close()
    with pytest.raises(ValueError, match='packed.0 holds a and c, and their parameter groups keep different state'):
        SGD(groups(0.0), shared_root.with_name('alike'), lr=LR, resume=True)


def test_later_groups_have_packs_of_their_own(shared_root):
    def groups(params):
        return [{'params': [(n, params[n]) for n in ('a.weight', 'line', 'large')]},
                {'params': [(n, params[n]) for n in ('a.bias', 'scale')], 'weight_decay': 0.0, 'lr': 2 * LR}]
    own, other = random_parameters(SHAPES), random_parameters(SHAPES)
    with AdamW(groups(own), shared_root, lr=LR, pack=PACK) as optimizer, AdamW(groups(other), shared_root.with_name('alone'), lr=LR) as single:
        assert files(shared_root) == ['large', 'packed.0']
        assert os.getxattr(shared_root / 'packed.0', 'user.hitrain.members') == b'0 30,20 a.weight\n600 1,7,1 line\n607 20 a.bias\n627 scalar scale\n'
        run(optimizer, own, 0, 2)
        run(single, other, 0, 2)
        assert equal(own, other)
        later = {f'later{i}': torch.nn.Parameter(torch.ones(3)) for i in range(3)}
        optimizer.add_param_group({'params': list(later.items()), 'lr': 0.5})
        assert files(shared_root) == ['large', 'packed.0', 'packed.1']
        run(optimizer, {**own, **later}, 2, 3)
        run(single, other, 2, 3)
        assert equal(own, other) and not torch.equal(later['later1'], torch.ones(3))
    AdamW([*own.items(), *later.items()], shared_root, lr=LR, resume=True).close()  # one group may have several packs
    with pytest.raises(ValueError, match='packed.0 holds a.weight and line, which is not given with it'):
        AdamW([(n, own[n]) for n in own if n != 'line'], shared_root, lr=LR, resume=True)
    with AdamW([(n, own[n]) for n in SHAPES], shared_root, lr=LR, resume=True) as optimizer:
        with pytest.raises(ValueError, match='packed.1 holds later0 and later1, which is not given with it'):
            optimizer.add_param_group({'params': [('later0', later['later0']), ('later2', later['later2'])]})


def test_a_file_has_so_many_members_as_its_attribute_has_room(shared_root):
    params = {f'{"n" * 200}{i}': torch.nn.Parameter(torch.full((3,), float(i))) for i in range(600)}
    with SGD(params.items(), shared_root, lr=1.0, pack=PACK) as optimizer:
        names = files(shared_root)
        assert names == ['packed.0', 'packed.1', 'packed.2']
        sizes = [len(os.getxattr(shared_root / n, 'user.hitrain.members')) for n in names]
        assert max(sizes) <= _packs.TEXT_BYTES_MAX < sizes[0] + 3000
        for p in params.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert all(torch.equal(p, torch.full((3,), float(i - 1))) for i, p in enumerate(params.values()))


def test_what_is_not_packed(shared_root):
    """Frozen parameters, large ones, one that would be alone, and those of another dtype than the rest."""
    params = {**random_parameters({'a': (3,), 'b': (3,), 'large': (2000,), 'frozen': (3,)}), 'half': torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}
    params['frozen'].requires_grad_(False)
    with SGD(params.items(), shared_root, lr=1.0, pack=PACK) as optimizer:
        assert files(shared_root) == ['frozen', 'half', 'large', 'packed.0']
        for n in ('a', 'b'):
            params[n].grad = torch.ones(3)
        optimizer.step()
    own = {'w': torch.nn.Parameter(torch.ones(3)), 'packed.0': torch.nn.Parameter(torch.ones(3)), 'x': torch.nn.Parameter(torch.ones(3))}
    with SGD(own.items(), shared_root.with_name('names'), lr=1.0, pack=PACK):
        assert files(shared_root.with_name('names')) == ['packed.1']


def test_members_without_a_gradient(shared_root):
    """All of a file or none: one alone is refused by name before anything is sent."""
    own = random_parameters(SHAPES)
    with AdamW(own.items(), shared_root, lr=LR, pack=PACK) as optimizer:
        run(optimizer, own, 0, 1)
        before = {n: p.detach().clone() for n, p in own.items()}
        give(own, 1)
        own['scale'].grad = None
        with pytest.raises(RuntimeError, match='scale has no gradient and a.weight has one, but both lie in packed.0'):
            optimizer.step()
        assert equal(own, before) and number(shared_root, 'step_open') == 0 and number(shared_root, 'grad_bytes') == sum(4 * p.numel() for p in own.values())
        for n in SMALL:
            own[n].grad = None
        optimizer.step()  # the large one alone
        assert {n for n in own if not torch.equal(own[n], before[n])} == {'large'}
        assert optimizer.read_state(own['scale'], 'step').item() == 1 and optimizer.read_state(own['large'], 'step').item() == 2
        own['line'].grad = torch.ones(1, 7, 1).to_sparse()
        for n in ('a.weight', 'a.bias', 'scale'):
            own[n].grad = torch.ones_like(own[n])
        with pytest.raises(TypeError, match='gradient of line is sparse'):
            optimizer.step()
        with pytest.raises(RuntimeError, match='scale shares packed.0 with others'):
            optimizer.send_gradient(own['scale'])


def test_changes_outside_steps_and_gradients_of_other_strides(shared_root):
    own, other = random_parameters(SHAPES), random_parameters(SHAPES)
    own['a.weight'].data, other['a.weight'].data = (p['a.weight'].data.t().contiguous().t() for p in (own, other))
    with AdamW(own.items(), shared_root, lr=LR, pack=PACK) as optimizer, AdamW(other.items(), shared_root.with_name('alone'), lr=LR) as single:
        for step in range(3):
            for params in (own, other):
                params['scale'].data.mul_(2)
                params['a.weight'].data = params['a.weight'].data.clamp(-0.5, 0.5)
                give(params, step)
                params['a.weight'].grad = torch.ones(20, 30).t()
            optimizer.step()
            single.step()
            assert equal(own, other)
        own['scale'].data.fill_(7)
        optimizer.commit()
    assert b'\0\0\xe0\x40' in (shared_root / 'packed.0').read_bytes()


def test_a_change_of_one_parameter_keeps_the_masters_of_the_others(shared_root):
    own, other = random_parameters(SHAPES), random_parameters(SHAPES)
    bf16 = {'param_dtype': torch.bfloat16, 'overlap': True}
    with AdamW(own.items(), shared_root, lr=LR, pack=PACK, **bf16) as optimizer, \
            AdamW(other.items(), shared_root.with_name('alone'), lr=LR, **bf16) as single:
        def both(change, send=None):
            for o, params in ((optimizer, own), (single, other)):
                change(params['scale'])
                send(o, params) if send else o.commit()
            assert equal(own, other) and same_state(optimizer, single)

        both(lambda p: p.data.mul_(3))  # no state yet
        for step in range(3):
            both(lambda p: p.data.add_(0.25), lambda o, params: run(o, params, step, step + 1))
        both(lambda p: p.data.mul_(3))
        own['scale'].data.fill_(float('nan'))
        optimizer.commit()
        both(lambda p: p.data.fill_(2))

        def change_late(o, params):
            give(params, 4)
            o.send_gradient(params['large'])
            params['line'].data.mul_(2)
            if o is single:
                return o.step()
            with pytest.warns(RuntimeWarning, match='parameter packed.0 was changed after .* the step is sent again'):
                o.step()
        both(lambda p: None, change_late)


@pytest.mark.parametrize('resume', [False, True], ids=['new', 'resume'])
def test_overlap_takes_no_packs_while_it_accumulates(shared_root, resume):
    own = random_parameters(SHAPES)
    options = {'lr': LR, 'overlap': True, 'accumulate': 2, 'resume': resume, 'pack': PACK}
    if resume:
        AdamW(own.items(), shared_root, lr=LR, pack=PACK).close()
        del options['pack']
    with pytest.raises(ValueError, match='packed.0 is sent by step.*overlap=False'):
        AdamW(own.items(), shared_root, **options)
    with AdamW(own.items(), shared_root, **{**options, 'accumulate': 1}) as optimizer:
        run(optimizer, own, 0, 1)
        give(own, 1)
        optimizer.accumulate = 2
        for call in (optimizer.step, optimizer.send_gradients):
            with pytest.raises(ValueError, match='packed.0 is sent by step'):
                call()
    assert number(shared_root, 'step') == 1


def test_a_step_that_failed_and_an_abort(shared_root, monkeypatch):
    own = random_parameters(SHAPES)
    with AdamW(own.items(), shared_root, lr=LR, pack=PACK, durable_every=10) as optimizer:
        optimizer.commit()
        before = {n: p.detach().clone() for n, p in own.items()}
        run(optimizer, own, 0, 1)
        done = {n: p.detach().clone() for n, p in own.items()}
        give(own, 1)
        real, left = os.pwrite, [2]

        def fails(*args):
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.EIO, 'of the test')
            return real(*args)
        with monkeypatch.context() as m:
            m.setattr(os, 'pwrite', fails)
            with pytest.raises(OSError, match='gradient of (large|packed.0)'):
                with pytest.warns(RuntimeWarning, match='went back from step 1'):
                    optimizer.step()
        assert equal(own, before) and not equal(own, done)
        run(optimizer, own, 0, 1)
        assert equal(own, done)
        later = [(f'l{i}', torch.nn.Parameter(torch.ones(3))) for i in range(2)]
        optimizer.add_param_group({'params': later})
        optimizer.abort()  # the new file was in no commit: it is made again
        assert equal(own, before) and os.getxattr(shared_root / 'packed.1', 'user.hitrain.members') == b'0 3 l0\n3 3 l1\n'
        run(optimizer, {**own, **dict(later)}, 0, 2)
    assert number(shared_root, 'step') == 2


def test_checkpoints_move_between_torch_packs_and_single_files(shared_root):
    own, other = random_parameters(SHAPES), random_parameters(SHAPES)
    theirs = torch.optim.AdamW(other.values(), lr=LR)
    for step in range(2):
        give(other, step)
        theirs.step()
    with AdamW(own.items(), shared_root, lr=LR, pack=PACK, full_state_dict=True) as optimizer:
        for n in own:
            own[n].data.copy_(other[n].detach())
        optimizer.load_state_dict(theirs.state_dict())
        run(optimizer, own, 2, 4)
        kept, values = optimizer.state_dict(), {n: p.detach().clone() for n, p in own.items()}
        run(optimizer, own, 4, 6)
        ended = {n: p.detach().clone() for n, p in own.items()}
        for n in own:
            own[n].data.copy_(values[n])
        optimizer.load_state_dict(kept)
        run(optimizer, own, 4, 6)
        assert equal(own, ended)
        torn = {**kept, 'state': {**kept['state'], 2: {**kept['state'][2], 'step': torch.tensor(9.0)}}}
        with pytest.raises(ValueError, match='a.bias and a.weight share packed.0.* 9.0 and 4.0'):
            optimizer.load_state_dict(torn)
        with pytest.raises(ValueError, match='has none and 4.0'):
            optimizer.load_state_dict({**kept, 'state': {i: s for i, s in kept['state'].items() if i != 2}})
        assert optimizer.read_state(own['scale'], 'step').item() == 6
        optimizer.load_state_dict({**kept, 'state': {}})  # a new run
        assert not optimizer.export_state()['state']
    alone = random_parameters(SHAPES, seed=3)
    with AdamW(alone.items(), shared_root.with_name('alone'), lr=LR, full_state_dict=True) as optimizer:
        for n in alone:
            alone[n].data.copy_(values[n])
        optimizer.load_state_dict(kept)
        run(optimizer, alone, 4, 6)
        assert equal(alone, ended)
    for step in range(2, 6):
        give(other, step)
        theirs.step()
    assert all(torch.allclose(other[n], ended[n], atol=1e-5) for n in ended)


def test_safetensors_have_the_members(shared_root, tmp_path):
    own = random_parameters(SHAPES)
    with AdamW(own.items(), shared_root, lr=LR, pack=PACK, param_dtype=torch.bfloat16) as optimizer:
        run(optimizer, own, 0, 1)
    copy = shared_root.with_name('copy')
    export_safetensors(shared_root, tmp_path / 'm.safetensors', dtype=torch.float32)
    assert set(import_safetensors(tmp_path / 'm.safetensors', copy, dtype=torch.bfloat16)) == set(SHAPES)
    again = random_parameters(SHAPES, seed=1)
    with AdamW(again.items(), copy, lr=LR, param_dtype=torch.bfloat16, resume=True, pack=PACK) as optimizer:
        assert equal(own, again) and files(copy) == sorted(SHAPES)  # the store decides
        run(optimizer, again, 1, 2)


def test_a_kept_step_its_clone_and_its_stream_have_packs(shared_store, shared_root):
    own, again = random_parameters(SHAPES), random_parameters(SHAPES, seed=1)
    with AdamW(own.items(), shared_root, lr=LR, pack=PACK) as optimizer:
        run(optimizer, own, 0, 2)
        optimizer.snapshot('good')
        run(optimizer, own, 2, 4)
    clone, received = shared_root.with_name('clone'), shared_root.with_name('received')
    shared_store.control('clone', shared_root, 'good', clone)
    shared_store.send(shared_root, 'good', received)
    for root in (clone, received):
        with AdamW(again.items(), root, lr=LR, resume=True) as optimizer:
            run(optimizer, again, 2, 4)
        assert equal(own, again)


def test_other_models_are_refused(shared_root):
    own = random_parameters(SHAPES)
    AdamW(own.items(), shared_root, lr=LR, pack=PACK).close()
    other = {**own, 'line': torch.nn.Parameter(torch.ones(7, 1))}
    with pytest.raises(ValueError, match='shape of line is 1,7,1 in the store and 7,1 in the model'):
        AdamW(other.items(), shared_root, lr=LR, resume=True)
    with pytest.raises(ValueError, match='a.weight and line, which is not given with it'):
        AdamW([(n, p) for n, p in own.items() if n != 'line'], shared_root, lr=LR, resume=True)
    with pytest.raises(ValueError, match='dtype is f32 in the store and bf16'):
        AdamW(own.items(), shared_root, lr=LR, resume=True, param_dtype=torch.bfloat16)
    model = torch.nn.Linear(3, 2)
    with pytest.raises(TypeError, match='no pack'):
        hitrain.offload(model, shared_root.with_name('other'), keep=1 << 20, pack=PACK)
    AdamW(model.named_parameters(), shared_root.with_name('other'), lr=LR, pack=PACK).close()
    with pytest.raises(ValueError, match='packed.0 holds 2 parameters'):
        hitrain.offload(model, shared_root.with_name('other'), keep=1 << 20, resume=True)
    for options in ({'pack': -1}, {'pack': PACK, 'topk': 0.1}):
        with pytest.raises(ValueError, match='pack'):
            AdamW(own.items(), shared_root.with_name('bad'), lr=LR, **options)


def test_a_store_with_packs_decides_on_resume(shared_root):
    """Options that need a file for each parameter are refused before the model changes."""
    own = random_parameters(SHAPES)
    AdamW(own.items(), shared_root, lr=LR, pack=PACK).close()
    with pytest.raises(ValueError, match='packed.0 holds 4 parameters, and topk needs a file for each'):
        AdamW(own.items(), shared_root, lr=LR, topk=0.1, resume=True)
    with pytest.raises(ValueError, match='packed.0 holds 4 parameters, and a parameter in parts needs'):
        AdamW(own.items(), shared_root, lr=LR, shard=Shard(0, 1), parts={'a.bias': (0, (20,))}, resume=True)
    with AdamW(own.items(), shared_root, lr=LR, resume=True) as optimizer:
        run(optimizer, own, 0, 1)


def test_copies_of_packs(shared_root, tmp_path):
    """One under another kind of name is no pack. A second one, and a file with the name of a member, are refused."""
    def copy(name):
        subprocess.run(['cp', '-a', shared_root / 'packed.0', shared_root / name], check=True)
    own, again = random_parameters(SHAPES), random_parameters(SHAPES, seed=1)
    AdamW(own.items(), shared_root, lr=LR, pack=PACK).close()
    copy('packed.0.bak')
    for params in (own, again):
        with AdamW(params.items(), shared_root, lr=LR, resume=True) as optimizer:
            assert equal(params, own)
            run(optimizer, params, 0, 1)
            assert {f.name for f in optimizer._held} == {'packed.0', 'large'}
    with pytest.raises(ValueError, match='the same name a.weight: .* copy of a file with members'):
        export_safetensors(shared_root, tmp_path / 'm.safetensors')
    for name, place in (('packed.10', 'a place in packed.0'), ('scale', 'a file of its own')):
        copy(name)
        with pytest.raises(ValueError, match=f'holds (a.weight|scale), which has {place}, too'):
            AdamW(own.items(), shared_root, lr=LR, resume=True)
        os.unlink(shared_root / name)
    AdamW(own.items(), shared_root, lr=LR, resume=True).close()


def test_names_of_members(shared_root):
    """A model keeps the names that it was made with, in packs as in files."""
    own = random_parameters({'module.a': (3,), 'module.b': (3,)})
    AdamW(list(own.values()), shared_root, lr=LR, names=list(own), pack=PACK).close()
    with AdamW(own.items(), shared_root, lr=LR, resume=True) as optimizer:
        assert optimizer.param_groups[0]['names'] == ['module.a', 'module.b']
    with pytest.raises(FileNotFoundError, match='The model in the store has module.a: pass names='):
        AdamW([('a', own['module.a'])], shared_root, lr=LR, resume=True)
    large = torch.nn.Parameter(torch.ones(PACK))
    with AdamW([{'params': list(own.items())}, {'params': [('packed.0', large)]}], shared_root.with_name('other'), lr=LR, pack=PACK) as optimizer:
        assert files(shared_root.with_name('other')) == ['packed.0', 'packed.1']
        with pytest.raises(ValueError, match='parameter is called packed.1, as a file of pack= is'):
            optimizer.add_param_group({'params': [('packed.1', torch.nn.Parameter(torch.ones(3)))]})
    os.setxattr(shared_root / 'packed.0', 'user.hitrain.members', b'0 6 \xff\n')  # no UTF-8
    assert _packs.places_of(shared_root / 'packed.0')[0].line() == b'0 6 \xff\n'


def test_the_attribute_is_checked(shared_root):
    own = random_parameters({'a': (2, 3), 'b': (4,)})
    AdamW(own.items(), shared_root, lr=LR, pack=PACK).close()
    path = shared_root / 'packed.0'
    for text in (b'', b'0 2,3 a', b'0 2,3 a\n7 4 b\n', b'0 2,3 a\n6 4\n', b'0 2,3 a\n6 0 b\n', b'0 10 a/b', b'x'):
        with pytest.raises(OSError) as e:
            os.setxattr(path, 'user.hitrain.members', text)
        assert e.value.errno == errno.EINVAL, text
    os.setxattr(path, 'user.hitrain.members', b'0 2,3 a\n6 4 a\n')
    with pytest.raises(ValueError, match='does not say where a lies'):
        AdamW(own.items(), shared_root, lr=LR, resume=True)
    for text in ('0 2,3', '0 2,x a', '0 2 .', '1 2 a', '0 0 a'):
        with pytest.raises(ValueError, match='attribute members'):
            _packs.read_places('p', text)
    assert _packs.read_places('p', '0 2,3 a b\n6 1 c\n') == [('a b', 0, (2, 3)), ('c', 6, (1,))]


def test_ranks_share_packs(shared_root):
    """Each of two ranks writes a half of a file's gradient, also of a group that comes later."""
    results, world = {}, 2

    def one(rank):
        own = random_parameters(SHAPES)
        later = {f'later{i}': torch.nn.Parameter(torch.ones(5)) for i in range(3)}
        with AdamW(own.items(), shared_root, lr=LR, pack=PACK, shard=Shard(rank, world, timeout=SECONDS_MAX)) as optimizer:
            run(optimizer, own, 0, 2)
            optimizer.add_param_group({'params': list(later.items())})
            run(optimizer, {**own, **later}, 2, 3)
        results[rank] = {**own, **later}
    on_threads(world, one)
    assert files(shared_root) == ['large', 'packed.0', 'packed.1'] and equal(results[0], results[1])
    own = random_parameters(SHAPES)
    later = {f'later{i}': torch.nn.Parameter(torch.ones(5)) for i in range(3)}
    with AdamW(own.items(), shared_root.with_name('alone'), lr=LR) as optimizer:
        run(optimizer, own, 0, 2)
        optimizer.add_param_group({'params': list(later.items())})
        run(optimizer, {**own, **later}, 2, 3)
    assert equal(results[0], {**own, **later})


def test_thousands_of_parameters_cost_what_a_few_cost(shared_root, monkeypatch):
    params = {f'p{i}': torch.nn.Parameter(torch.full((5,), float(i))) for i in range(3000)}
    calls = []
    with SGD(params.items(), shared_root, lr=1.0, pack=PACK) as optimizer:
        for p in params.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
        for name in ('open', 'write', 'pwrite', 'preadv', 'dup', 'stat', 'getxattr', 'setxattr'):
            def counted(*args, real=getattr(os, name), **kw):
                calls.append(args)
                return real(*args, **kw)
            monkeypatch.setattr(os, name, counted)
        optimizer.step()
        monkeypatch.undo()
        assert len(calls) <= 20
    assert all(torch.equal(p, torch.full((5,), float(i - 2))) for i, p in enumerate(params.values()))
