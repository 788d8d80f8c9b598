# SPDX-License-Identifier: Apache-2.0
"""How large a store must be: the number is enough for all that was asked for, and C and Python have the same one."""
import json
import os
import pathlib
import re
import subprocess

import pytest

from trainer import LR, TOP  # first: it makes the client importable
from demo_store import mounted
import torch
import hitrain

BIN = pathlib.Path(os.environ.get('HITRAIN_BIN') or TOP / 'build/bin')
SHAPES = [(70, 7000), (128, 8192), (700,), (3,), (1,), (300, 5, 7)]  # narrow: a product of Muon takes the square of the smaller side
STEPS = 16  # all that a step needs recurs after five, and steps for redo are kept after twelve; a store that is a quarter too small fails in one of the first eight
DTYPES = {'f32': torch.float32, 'bf16': torch.bfloat16, 'f16': torch.float16}
OPTIONS = [{}, {'retain': 2}, {'redo': True, 'durable_every': 5}, {'redo': True, 'durable_every': 4, 'redo_keep': 3},
           {'retain': 1, 'redo': True, 'durable_every': 3}, {'state_bits': 16}, {'state_bits': 8, 'retain': 1}]


def size(*args):
    return int(subprocess.run([BIN / 'hitrainctl', 'size', *map(str, args)], check=True, stdout=subprocess.PIPE).stdout)


def parameters(dtype):
    random = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in SHAPES]


@pytest.mark.parametrize('options', OPTIONS, ids=json.dumps)
@pytest.mark.parametrize('rule', ['AdamW', 'SGD', 'Lion', 'Muon'])
@pytest.mark.parametrize('dtype', DTYPES)
def test_both_formulas_agree(dtype, rule, options):
    params = [torch.nn.Parameter(torch.empty(shape, dtype=DTYPES[dtype], device='meta')) for shape in SHAPES]
    words = ' '.join([rule, *(f'{k}={"on" if v is True else v}' for k, v in options.items())])
    expected = hitrain.store_bytes(params, optimizer=rule, **options)
    count = sum(p.numel() for p in params)
    assert size(f'--params={count}', f'--tensors={len(params)}', f'--dtype={dtype}', f'--optimizer={words}') == expected
    for alike, word in ({'retain': 2}, '--retain=2'), ({'redo': True, 'durable_every': 5}, '--redo=5'):
        if options == alike:
            assert size(f'--params={count}', f'--tensors={len(params)}', f'--dtype={dtype}', f'--optimizer={rule}', word) == expected


@pytest.mark.parametrize('options', OPTIONS, ids=json.dumps)
@pytest.mark.parametrize('rule, dtype', [('AdamW', 'f32'), ('AdamW', 'bf16'), ('Adam', 'f16'), ('SGD', 'f32'), ('Muon', 'f32'), ('Muon', 'bf16')])
def test_a_store_of_that_size_is_enough(rule, dtype, options):
    params = parameters(DTYPES[dtype])
    with mounted('need', size=str(hitrain.store_bytes(params, optimizer=rule, **options))) as store:
        groups = [{'params': [p for p in params if p.dim() > 1]}, {'params': [p for p in params if p.dim() < 2], 'use_muon': False}]
        with getattr(hitrain, rule)(groups if rule == 'Muon' else params, store.mountpoint / 'model', lr=LR, **options) as optimizer:
            for step in range(STEPS):
                for p in params:
                    p.grad = torch.full_like(p, 0.01 * (step % 7 - 3)) + p.detach() * 0.01
                optimizer.step()
                assert optimizer.committed_step == step + 1
        told = subprocess.run([BIN / 'hitrainctl', 'events', '--json', store.mountpoint], check=True, stdout=subprocess.PIPE, text=True).stdout
        bad = [e for e in map(json.loads, told.splitlines()) if e['code'] in ('no-space', 'not-reserved', 'step-not-kept', 'steps-given-up')]
        assert not bad
        steps = subprocess.run([BIN / 'hitrainctl', 'steps', store.mountpoint / 'model'], check=True, stdout=subprocess.PIPE, text=True).stdout
        assert sum(line.split()[:1] != ['step'] for line in steps.splitlines()) >= options.get('retain', 0)


def test_a_module_that_shares_a_parameter_counts_it_once():
    one, two = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    two.weight = one.weight
    module = torch.nn.ModuleList([one, two])
    assert hitrain.store_bytes(module) == hitrain.store_bytes(list(module.parameters()))
    with torch.no_grad():
        big = torch.nn.Linear(1 << 14, 1 << 14, device='meta')
    assert hitrain.store_bytes(big) > 28 << 28


def test_a_refusal_names_the_size_that_would_do():
    params = [torch.nn.Parameter(torch.zeros(1 << 21)) for _ in range(4)]
    needed = hitrain.store_bytes(params)
    with mounted('need', size='160M') as store:
        with pytest.raises(OSError, match=f'hitrainctl size.*{needed} bytes'):
            with hitrain.AdamW(params, store.mountpoint / 'model', lr=LR) as optimizer:
                for p in params:
                    p.grad = torch.ones_like(p)
                optimizer.step()


def test_what_has_no_number_is_refused():
    with pytest.raises(ValueError, match='rmsprop'):
        hitrain.store_bytes([torch.zeros(3)], optimizer='rmsprop')
    with pytest.raises(ValueError, match='int64'):
        hitrain.store_bytes([torch.zeros(3, dtype=torch.int64)])


def test_mkfs_says_in_digits_for_how_many_parameters_a_large_store_is(tmp_path):
    image = tmp_path / 'image'
    image.touch()
    os.truncate(image, 300 << 30)
    said = subprocess.run([BIN / 'mkfs.hitrain', image], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert ' million parameters in f32' in said and 'e+' not in said
    for count, dtype in re.findall(r'([0-9.]+) million (?:parameters )?in (f32|bf16)', said):
        assert size(f'--params={round(float(count) * 1e6)}', f'--dtype={dtype}') <= 300 << 30  # one assumption, rounded down


def test_a_size_of_something_else_shows_the_right_command():
    done = subprocess.run([BIN / 'hitrainctl', 'size', 'adamw', '7B'], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and 'hitrainctl size --params=N' in done.stderr
