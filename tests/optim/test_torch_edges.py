# SPDX-License-Identifier: Apache-2.0
"""Parameters at the edge of the format: no dimensions, no elements, each dtype, odd names. One model has them all and takes every way out
of a store and back."""
import json
import os
import pickle
import shutil

import pytest

from trainer import LR, equal, mounted, on_threads, root, store  # first: it makes the client importable
import torch
from hitrain import AdamW, Shard, _safetensors, checkpoint, init_empty, offload
from hitrain.checkpoint import export_safetensors, import_safetensors

SHAPES = {'scalar': (), 'one': (1,), 'none': (0, 7), 'nothing': (0,), 'w': (3, 0x51), 'cube': (2, 1, 5)}
NAMES = ('plain.weight', 'a b', ' lead', 'trail ', 'tab\there', 'back\\slash', '"quote\'', '-n', '%s%n', '$HOME`x`', '*?[a]', '#', 'ä\u65e5\u672c',
         '\x01\x7f', 'x' * 255, '.hidden', '__metadata')
NO_TEXT = 'no text \udcff'
WORDS = {'scalar': b'scalar', 'one': b'1', 'none': b'0,7', 'nothing': b'0', 'w': b'3,81', 'cube': b'2,1,5'}
DTYPES = torch.float32, torch.bfloat16, torch.float16
STATE = 'exp_avg', 'exp_avg_sq', 'step'
WAYS = {'files': {}, 'packs': {'pack': 64}, 'offload': {}}


class Model(torch.nn.Module):
    def __init__(self, dtype, seed=0):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        shapes = {**SHAPES, **{name: (3, 4) for name in (*NAMES, NO_TEXT)}}
        for name, shape in shapes.items():
            self._parameters[name] = torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype))

    def forward(self, x):
        return sum((p.float() * x).square().sum() for p in self._parameters.values())


def make(way, model, root, **more):
    if way == 'offload':
        return offload(model, root, 'adamw', lr=LR, keep=1 << 20, **more)
    return AdamW(model._parameters.items(), root, lr=LR, **WAYS[way], **more)


def steps(model, optimizer, first, last):
    for i in range(first, last):
        optimizer.zero_grad()
        model(1.0 + i).backward()
        optimizer.step()


def values(model):
    return {name: p.detach().clone() for name, p in model._parameters.items()}


def state(model, optimizer):
    return {f'{name}/{word}': optimizer.read_state(p, word) for name, p in model._parameters.items() if p.numel() for word in STATE}


def ends_alike(way, dtype, root, wanted):
    """The model of step 2 in this root, trained to step 4."""
    model = Model(dtype, seed=1)
    with make(way, model, root, resume=True) as optimizer:
        assert optimizer.committed_step == 2
        steps(model, optimizer, 2, 4)
        assert equal(values(model), wanted[0]) and equal(state(model, optimizer), wanted[1])


def copies(store, root):
    """A clone, and a model that was sent."""
    store.control('snapshot', root, 'kept')
    store.control('clone', root, 'kept', root.parent / 'clone')
    store.send(root, 'kept', root.parent / 'received')
    return root.parent / 'clone', root.parent / 'received'


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('dtype', DTYPES, ids=lambda d: str(d)[6:])
def test_every_way_keeps_values_at_the_edge(store, root, tmp_path, dtype, way):
    model = Model(dtype)
    with make(way, model, root) as optimizer:
        assert {g for group in optimizer.param_groups for g in group['names']} == set(model._parameters)
        with pytest.raises(RuntimeError, match='has no exp_avg yet'):
            optimizer.read_state(model._parameters['scalar'], 'exp_avg')
        steps(model, optimizer, 0, 2)
        at_2 = values(model)
        of_torch = torch.optim.AdamW(Model(torch.float32).parameters(), lr=LR)
        of_torch.load_state_dict(optimizer.export_state())
    made = copies(store, root)
    export_safetensors(root, tmp_path / 'a.safetensors', rename=lambda name: name.replace(NO_TEXT, 'renamed'))
    import_safetensors(tmp_path / 'a.safetensors', root.parent / 'imported', rename=lambda name: name.replace('renamed', NO_TEXT))
    again = Model(dtype)
    with make(way, again, root, resume=True) as optimizer:
        assert equal(values(again), at_2)
        steps(again, optimizer, 2, 4)
        wanted = values(again), state(again, optimizer)
    for copy in made:
        ends_alike(way, dtype, copy, wanted)
    imported = Model(dtype, seed=1)
    with AdamW(imported._parameters.items(), root.parent / 'imported', lr=LR, resume=True):
        assert equal(values(imported), at_2)
    for name, word in WORDS.items():
        assert os.getxattr(root.parent / 'imported' / name, 'user.hitrain.shape') == word


def test_a_mount_with_passthrough_keeps_them(tmp_path):
    with mounted('torch-edges', dram='128M,passthrough=64M') as store:
        for way in WAYS:
            for folder in store.mountpoint / way, tmp_path / way:
                folder.mkdir()
            test_every_way_keeps_values_at_the_edge(store, store.mountpoint / way / 'model', tmp_path / way, torch.float32, way)


def test_ranks_of_a_shard_have_them(root):
    found = {}

    def rank(r):
        model = Model(torch.float32)
        with make('files', model, root, shard=Shard(r, 2)) as optimizer:
            steps(model, optimizer, 0, 3)
            found[r] = values(model)
    on_threads(2, rank)
    alone = Model(torch.float32)
    with make('files', alone, root.parent / 'alone') as optimizer:
        steps(alone, optimizer, 0, 3)
        assert equal(found[0], values(alone)) and equal(found[1], values(alone))


def test_a_scalar_of_an_older_version_keeps_its_one(root):
    model = Model(torch.float32)
    make('files', model, root).close()
    assert os.getxattr(root / 'scalar', 'user.hitrain.shape') == b'scalar'
    os.setxattr(root / 'scalar', 'user.hitrain.shape', b'1')
    with make('files', model, root, resume=True) as optimizer:
        steps(model, optimizer, 0, 1)
    assert os.getxattr(root / 'scalar', 'user.hitrain.shape') == b'1'
    os.setxattr(root / 'one', 'user.hitrain.shape', b'scalar')
    with pytest.raises(ValueError, match='one: shape is scalar in the store and 1 in the model'):
        make('files', model, root, resume=True)


def test_a_parameter_without_elements_is_as_in_torch(root):
    """In groups, with a gradient, alone in a step, beside an abort, with a state_dict; and against a file with elements."""
    own, none = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.empty(2, 0))
    with AdamW([('own', own)], root, lr=LR, full_state_dict=True) as optimizer:
        optimizer.add_param_group({'params': [('none', none)], 'lr': 0.5})
        optimizer.abort()
        none.grad = torch.empty(2, 0)
        optimizer.step()
        assert optimizer.committed_step == 0
        own.grad = torch.ones(3)
        optimizer.step()
        optimizer.receive_parameter(none)
        saved = optimizer.state_dict()
        assert [g['params'] for g in saved['param_groups']] == [[0], [1]] and list(saved['state']) == [0]
        saved['state'][1] = {'step': torch.tensor([1.0]), 'exp_avg': torch.empty(2, 0), 'exp_avg_sq': torch.empty(2, 0)}
        saved['state'][0]['step'] = saved['state'][0]['step'].reshape(1)  # as some versions of torch write it
        optimizer.load_state_dict(saved)
        assert optimizer.read_state(own, 'step') == 1
    assert (root / 'none').stat().st_size == 0
    with pytest.raises(ValueError, match='own: shape is 3 in the store and 0 in the model'):
        AdamW([('own', torch.nn.Parameter(torch.empty(0)))], root, lr=LR, resume=True)


@pytest.mark.parametrize('name', ['', '.', '..', '.hitrain', 'a/b', 'a\0', 'a\nb', 'x' * 256])
def test_a_name_that_no_file_can_have_is_refused(root, name):
    with pytest.raises(ValueError, match='cannot be the name of a file'):
        AdamW([(name, torch.nn.Parameter(torch.ones(2)))], root, lr=LR)


@pytest.mark.parametrize('name', ['__metadata__', 'a\udcff', '\udcff\U0001f600'])
def test_a_name_that_no_file_of_safetensors_can_have_is_exported_under_another(root, tmp_path, name):
    AdamW([(name, torch.nn.Parameter(torch.ones(2)))], root, lr=LR).close()
    with pytest.raises(ValueError, match='no tensor of a safetensors file can be called .*: pass rename='):
        export_safetensors(root, tmp_path / 'a.safetensors')
    assert not list(tmp_path.iterdir())
    export_safetensors(root, tmp_path / 'a.safetensors', rename=lambda name: 'w')
    assert import_safetensors(tmp_path / 'a.safetensors', root.parent / 'back') == ['w']


def test_resume_where_no_model_is_names_the_ways_back(root, tmp_path):
    model = Model(torch.float32)
    make('files', model, root).close()
    copy = root.parent / 'copy'
    shutil.copytree(root, copy)
    for folder in copy, root.parent:
        with pytest.raises(OSError, match='no model with a step.*hitrainctl clone.*hitrainctl archive'):
            make('files', model, folder, resume=True)
    with pytest.raises(OSError, match='this is no hitrain mount'):
        make('files', model, tmp_path, resume=True)


@pytest.mark.parametrize('shape, elements', [('scalar', 1), ('0,3', 0), ('2,0x1', None), ('1', 1)])
def test_each_dtype_of_a_store_is_exported_with_its_shape(root, tmp_path, shape, elements):
    """Files beside the parameters may have any dtype."""
    AdamW([('w', torch.nn.Parameter(torch.ones(2)))], root, lr=LR).close()
    for word, kind in checkpoint.DTYPES.items():
        path = root / f'of {word}'
        path.write_bytes(bytes(range(8))[:_safetensors.BYTES[kind]] * (elements or 0))
        os.setxattr(path, 'user.hitrain.dtype', word.encode())
        if elements is None:
            with pytest.raises(OSError):
                os.setxattr(path, 'user.hitrain.shape', shape.encode())
        else:
            os.setxattr(path, 'user.hitrain.shape', shape.encode())
    if elements is None:
        return
    export_safetensors(root, tmp_path / 'a.safetensors')
    data = (tmp_path / 'a.safetensors').read_bytes()
    header = json.loads(data[8:8 + int.from_bytes(data[:8], 'little')])
    begin = 8 + int.from_bytes(data[:8], 'little')
    for word, kind in checkpoint.DTYPES.items():
        said = header[f'of {word}']
        first, end = said['data_offsets']
        assert (said['dtype'], said['shape']) == (kind, {'scalar': [], '0,3': [0, 3], '1': [1]}[shape])
        assert data[begin + first:begin + end] == (root / f'of {word}').read_bytes()


def test_an_empty_model_has_its_values_at_the_edge_from_weights(root, tmp_path):
    """init_empty(), with values of a file, and again from the store."""
    wanted = Model(torch.float32)
    del wanted._parameters[NO_TEXT]
    AdamW(wanted._parameters.items(), root, lr=LR).close()
    export_safetensors(root, tmp_path / 'a.safetensors')
    for more in {'weights': tmp_path / 'a.safetensors'}, {'resume': True}:
        with init_empty():
            model = Model(torch.float32)
            del model._parameters[NO_TEXT]
        with make('offload', model, root.parent / 'offloaded', **more) as optimizer:
            assert equal(values(model), values(wanted))
            model(torch.tensor(1.0)).backward()
            optimizer.abort()


def test_state_of_schedules_is_saved_without_the_optimizer(root):
    """That of OneCycleLR of PyTorch 1.13 has a method of the schedule, and with it the optimizer."""
    p = torch.nn.Parameter(torch.ones(3))
    with AdamW([('p', p)], root, lr=LR) as optimizer:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=9)
        for _ in range(3):
            p.grad = torch.ones(3)
            optimizer.step()
            schedule.step()
        saved = pickle.loads(pickle.dumps(schedule.state_dict()))
        rates = [schedule.get_last_lr() for _ in range(4) if schedule.step() is None]
        schedule.load_state_dict(saved)
        assert schedule.optimizer is optimizer
        assert [schedule.get_last_lr() for _ in range(4) if schedule.step() is None] == rates
