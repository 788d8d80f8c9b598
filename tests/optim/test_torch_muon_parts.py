# SPDX-License-Identifier: Apache-2.0
"""Muon without a store: which parameters it trains, how matrices are split, who owns them, and Newton-Schulz in float64."""
import math

import pytest

import trainer  # noqa: F401  first: it makes the client importable
import torch
from torch import nn
import hitrain
from hitrain._newton_schulz import NS_FORMS, Iteration, cost_of, orthogonalized, owners_of, rows_of_blocks, word_of_blocks


# ---------------------------------------------------------------- groups

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8, bias=False)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.norm = nn.LayerNorm(8)
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.zeros(4, 16, 8))
        self.conv = nn.Conv1d(8, 8, 3)
        self.column = nn.Parameter(torch.zeros(8, 1))


class Model(nn.Module):
    def __init__(self, head='head', rows=11):
        super().__init__()
        self.tokens = nn.Embedding(13, 8)
        self.pos_embed = nn.Parameter(torch.zeros(5, 8))
        self.layers = nn.ModuleList([Layer(), Layer()])
        setattr(self, head, nn.Linear(8, rows, bias=False))


def names(groups, **wanted):
    """Of the parameters of the groups that have these settings."""
    return [n for g in groups if all(g.get(k) == v for k, v in wanted.items()) for n, _ in g['params']]


MATRICES = {'attn.qkv.weight', 'attn.proj.weight', 'router.weight', 'experts'}


def test_hidden_matrices_are_muons_and_all_else_is_not():
    model = Model()
    groups = hitrain.muon_groups(model, others={'lr': 3e-4, 'betas': (0.9, 0.95)})
    assert set(names(groups, use_muon=True)) == {f'layers.{i}.{n}' for i in (0, 1) for n in MATRICES}
    assert groups[-1]['use_muon'] is False and (groups[-1]['lr'], groups[-1]['betas']) == (3e-4, (0.9, 0.95))
    assert sorted(names(groups)) == sorted(n for n, _ in model.named_parameters())
    assert 'lr' not in groups[0] and groups[0]['split'] is None


@pytest.mark.parametrize('model, head', [(Model('lm_head'), 'lm_head.weight'), (Model('project', rows=13), 'project.weight')])
def test_a_head_has_a_usual_name_or_the_rows_of_an_embedding(model, head):
    assert head in names(hitrain.muon_groups(model), use_muon=False)


def test_a_width_of_the_model_is_no_number_of_words():
    """Positions may be as many as the model is wide; then matrices of that many rows are hidden ones, and no heads."""
    groups = hitrain.muon_groups(nn.ModuleDict({'words': nn.Embedding(50, 8), 'places': nn.Embedding(8, 8), 'query': nn.Linear(8, 8),
                                                'up': nn.Linear(8, 32), 'down': nn.Linear(32, 8), 'logits': nn.Linear(8, 50)}))
    assert names(groups, use_muon=True) == ['query.weight', 'up.weight', 'down.weight'] and 'logits.weight' in names(groups, use_muon=False)


def test_a_head_may_be_named_by_the_model_or_tied():
    model = Model('project')
    assert 'project.weight' in names(hitrain.muon_groups(model), use_muon=True)
    model.get_output_embeddings = lambda: model.project
    assert 'project.weight' in names(hitrain.muon_groups(model), use_muon=False)
    tied = Model('project', rows=13)
    tied.project.weight = tied.tokens.weight
    assert names(hitrain.muon_groups(tied), use_muon=False).count('tokens.weight') == 1


def test_names_of_the_user():
    groups = hitrain.muon_groups(Model(), not_muon=('router', '1.attn'), split={'qkv': (8, 16), 'proj.weight': 4})
    assert set(names(groups, use_muon=True)) == {f'layers.{n}' for n in ('0.attn.qkv.weight', '0.attn.proj.weight', '0.experts', '1.experts')}
    assert [(g['split'], len(g['params'])) for g in groups if g['use_muon']] == [(None, 2), ((8, 16), 1), (4, 1)]


BAD_NAMES = [(dict(not_muon=('rout',)), 'not_muon names rout, and no parameter'), (dict(split={'nothing': 4}), 'split names nothing, and no'),
             (dict(split={'router': (4,)}, not_muon=('router',)), 'split names layers.0.router.weight, which Muon does not train'),
             (dict(split={'tokens': (13,)}), 'split names tokens.weight, which Muon does not train'),
             (dict(split={'qkv': (8, 16), 'attn': 8}), 'split names layers.0.attn.qkv.weight twice, the second time by attn'),
             (dict(split={'qkv': (8, 8)}), r'split of layers.0.attn.qkv.weight has blocks of 16 rows, and its matrix has 24')]


@pytest.mark.parametrize('given, message', BAD_NAMES, ids=str)
def test_a_name_that_means_nothing_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        hitrain.muon_groups(Model(), **given)


# ---------------------------------------------------------------- splits and owners

SPLITS = [((6, 4), None, (6,), '6'), ((6, 4), 2, (2, 2, 2), '2*3'), ((6, 4), (4, 1, 1), (4, 1, 1), '4,1*2'), ((6, 4), [6], (6,), '6'),
          ((3, 6, 4), None, (6,), '6'), ((3, 6, 4), (2, 4), (2, 4), '2,4')]


@pytest.mark.parametrize('shape, split, blocks, word', SPLITS, ids=str)
def test_splits(shape, split, blocks, word):
    assert rows_of_blocks('w', shape, split) == blocks and word_of_blocks(blocks) == word


BAD_SPLITS = [((6,), None, r'w has the shape \(6,\), and Muon trains matrices'), ((), None, 'Muon trains matrices'), ((1, 2, 3, 4), None, 'Muon trains matrices'),
              ((6, 4), (2, 2), 'split of w has blocks of 4 rows, and its matrix has 6'), ((6, 4), 4, 'has blocks of 4 rows, and its matrix has 6'),
              ((6, 4), 7, 'has blocks of 7 rows'), ((6, 4), 0, 'must be a number of rows'), ((6, 4), (7, -1), 'must be a number of rows'),
              ((9, 4), (1, 2, 1, 2, 3), 'split of w changes the rows of blocks 4 times, and it may 3 times'), ((6, 4), (), 'must be a number of rows'), ((6, 4), (3.0, 3.0), 'must be a number of rows'), ((6, 4), True, 'must be a number of rows')]


@pytest.mark.parametrize('shape, split, message', BAD_SPLITS, ids=str)
def test_bad_splits(shape, split, message):
    with pytest.raises(ValueError, match=message):
        rows_of_blocks('w', shape, split)


def test_owners_have_about_as_much_to_do():
    costs = [cost_of(s, rows_of_blocks('w', s, split)) for s, split in [((64, 64), None), ((64, 64), 16), ((8, 16, 32), None), ((96, 32), (32, 64))]]
    assert costs == [64 ** 3, 4 * 16 * 16 * 64, 8 * 16 * 16 * 32, 32 ** 3 + 32 * 32 * 64]
    assert owners_of(costs, 1) == [0] * 4
    assert owners_of(costs, 2) == [0, 1, 1, 1]
    many = [7 * i % 13 + 1 for i in range(100)]
    loads = [sum(c for c, o in zip(many, owners_of(many, 3)) if o == rank) for rank in range(3)]
    assert max(loads) - min(loads) <= 13


# ---------------------------------------------------------------- Newton-Schulz

SHAPES = [((12, 20), None), ((20, 12), None), ((16, 16), None), ((24, 8), (4, 12, 8)), ((24, 8), 6), ((3, 12, 8), None), ((3, 12, 8), (4, 8)), ((1, 5), None)]


def exact(x, iteration):
    """In float64, by singular values."""
    u, s, v = torch.linalg.svd(x.to(torch.float64), full_matrices=False)
    a, b, c = iteration.coefficients
    s = s / max(s.norm().item(), iteration.eps)
    for _ in range(iteration.steps):
        s = a * s + b * s ** 3 + c * s ** 5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize('form', NS_FORMS)
@pytest.mark.parametrize('steps', [1, 5])
@pytest.mark.parametrize('shape, split', SHAPES, ids=str)
def test_each_block_alone_becomes_what_the_polynomial_says(shape, split, steps, form):
    update = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    blocks, iteration = rows_of_blocks('w', shape, split), Iteration(steps=steps, form=form)
    got = orthogonalized(update, blocks, iteration)
    assert got.dtype == torch.bfloat16 and got.shape == update.shape and got.is_contiguous()
    first, within = 0, 0.01 if form == 'gram' else 0.05 if steps == 1 else 0.3  # bf16, and a slope of 3.4 in each iteration
    for rows in blocks:
        own, whole = (t[..., first:first + rows, :].reshape(-1, rows, shape[-1]) for t in (got, update))
        for one, given in zip(own, whole):
            wanted = exact(given, iteration)
            assert (one.double() - wanted).norm() <= within * wanted.norm()
        first += rows


def test_gram_form_stays_exact_when_singular_values_are_far_apart():
    """Errors of A grow in each iteration; without making it anew ten iterations would end in infinity."""
    random = torch.Generator().manual_seed(5)
    u, _ = torch.linalg.qr(torch.randn(16, 16, generator=random))
    v, _ = torch.linalg.qr(torch.randn(40, 16, generator=random))
    update = (u @ torch.diag(torch.logspace(0, -4, 16)) @ v.T).bfloat16()
    for steps in (5, 10):
        iteration = Iteration(steps=steps, form='gram')
        got, wanted = orthogonalized(update, (16,), iteration).double(), exact(update, iteration)
        assert (got - wanted).norm() <= 0.05 * wanted.norm(), steps


@pytest.mark.parametrize('form', NS_FORMS)
def test_a_matrix_of_zeros_stays_so(form):
    assert not orthogonalized(torch.zeros(2, 4, 6), (4,), Iteration(form=form)).any()
    assert math.isnan(orthogonalized(torch.full((4, 6), math.nan), (4,), Iteration(form=form))[0, 0])
