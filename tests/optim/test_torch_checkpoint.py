# SPDX-License-Identifier: Apache-2.0
"""Models of a store as safetensors files, and back. The reader here is written from the description of the format."""
import json
import os
import struct
import subprocess
import sys

import pytest

from trainer import LR, TOP, equal, random_parameters, shared_root as root, shared_store  # first: it makes the client importable
import torch
import hitrain
from hitrain import checkpoint
from hitrain.checkpoint import export_safetensors, import_safetensors

SHAPES = {'embed.weight': (301, 64), 'norm': (64,), 'out.weight': (3, 64, 5), 'scale': (1,)}
TORCH = {'F32': torch.float32, 'BF16': torch.bfloat16, 'F16': torch.float16}


def read(path):
    """{name: tensor} of one file."""
    data = path.read_bytes()
    length, = struct.unpack('<Q', data[:8])
    header = json.loads(data[8:8 + length])
    assert (8 + length) % 8 == 0 and header.pop('__metadata__') == {'format': 'pt'}
    found, at = {}, 0
    for name, said in header.items():
        first, end = said['data_offsets']
        assert first == at
        at = end
        found[name] = torch.frombuffer(bytearray(data[8 + length + first:8 + length + end]), dtype=TORCH[said['dtype']]).view(said['shape'])
    assert 8 + length + at == len(data)
    return found


def write(path, tensors):
    header, at = {}, 0
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        header[name] = {'dtype': next(k for k, v in TORCH.items() if v == t.dtype), 'shape': list(t.shape), 'data_offsets': [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack('<Q', len(text)) + text + b''.join(bytes(t.detach().contiguous().view(-1).view(torch.uint8).numpy()) for t in tensors.values()))


def trained(root, dtype=None, steps=2):
    params = random_parameters(SHAPES)
    with hitrain.AdamW(params.items(), root, lr=LR, param_dtype=dtype) as optimizer:
        for step in range(steps):
            for p in params.values():
                p.grad = torch.full_like(p, 0.5 + step)
            optimizer.step()
    return params


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_model_goes_out_and_comes_back(root, tmp_path, dtype):
    params = trained(root, dtype)
    path = tmp_path / 'new/model.safetensors'
    assert export_safetensors(root, path) == [str(path)]
    assert os.listdir(path.parent) == ['model.safetensors']
    found = read(path)
    assert set(found) == set(SHAPES) and all(t.dtype == dtype for t in found.values())
    assert all(torch.equal(found[n].float(), p.detach()) for n, p in params.items())
    other = root.parent / 'other'
    assert sorted(import_safetensors(path, other)) == sorted(SHAPES)
    again = {n: torch.nn.Parameter(torch.zeros(shape)) for n, shape in SHAPES.items()}
    with hitrain.AdamW(again.items(), other, lr=LR, param_dtype=dtype, resume=True) as optimizer:
        assert equal(again, params)
        again['norm'].grad = torch.ones(64)
        optimizer.step()
        assert optimizer.committed_step == 1 and not torch.equal(again['norm'], params['norm'])


def test_a_folder_has_shards_and_their_index(root, tmp_path):
    params = trained(root)
    names = export_safetensors(root, tmp_path / 'model', shard_bytes=80000)
    assert [os.path.basename(n) for n in names] == [f'model-{i:05d}-of-00002.safetensors' for i in (1, 2)] + ['model.safetensors.index.json']
    assert sorted(os.listdir(tmp_path / 'model')) == sorted(map(os.path.basename, names))
    index = json.loads((tmp_path / 'model/model.safetensors.index.json').read_text())
    assert index['metadata']['total_size'] == sum(4 * p.numel() for p in params.values())
    for name, p in params.items():
        assert torch.equal(read(tmp_path / 'model' / index['weight_map'][name])[name], p.detach())
    import_safetensors(tmp_path / 'model', root.parent / 'other')
    for name in SHAPES:
        assert (root.parent / 'other' / name).read_bytes() == (root / name).read_bytes()
    assert [os.path.basename(n) for n in export_safetensors(root, tmp_path / 'whole')] == ['model.safetensors']


def test_names_and_dtypes_change_on_the_way(root, tmp_path):
    params = trained(root)
    export_safetensors(root, tmp_path / 'a.safetensors', dtype=torch.bfloat16, rename=lambda name: f'model.{name}')
    found = read(tmp_path / 'a.safetensors')
    assert all(torch.equal(found[f'model.{n}'], p.detach().bfloat16()) for n, p in params.items())
    import_safetensors(tmp_path / 'a.safetensors', root.parent / 'b', dtype=torch.float32, rename=lambda name: name.removeprefix('model.'),
                       rule='lion lr=0.5')
    assert all((root.parent / 'b' / n).read_bytes() == bytes(p.detach().bfloat16().float().view(-1).numpy()) for n, p in params.items())
    assert os.getxattr(root.parent / 'b', 'user.hitrain.optimizer').startswith(b'lion lr=0.5')
    with pytest.raises(ValueError, match='same name'):
        export_safetensors(root, tmp_path / 'c.safetensors', rename=lambda name: 'x')
    with pytest.raises(TypeError, match='cannot become torch.int8'):
        export_safetensors(root, tmp_path / 'c.safetensors', dtype=torch.int8)
    assert sorted(os.listdir(tmp_path)) == ['a.safetensors']


def test_a_model_that_steps_is_not_exported(root, tmp_path, monkeypatch):
    params = random_parameters(SHAPES)
    with hitrain.AdamW(params.items(), root, lr=LR) as optimizer:
        params['norm'].grad = torch.ones(64)
        optimizer.send_gradient(params['norm'])
        with pytest.raises(RuntimeError, match='a step of .* is open'):
            export_safetensors(root, tmp_path / 'a.safetensors')
        optimizer.step()
        real = checkpoint._write_file

        def step_meanwhile(*args):
            real(*args)
            optimizer.step()
        monkeypatch.setattr(checkpoint, '_write_file', step_meanwhile)
        with pytest.raises(RuntimeError, match='made a step while it was exported'):
            export_safetensors(root, tmp_path / 'a.safetensors')
    assert os.listdir(tmp_path) == []


def broken(header=None, length=None, body=b'\0' * 16):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack('<Q', len(text) if length is None else length) + text + body


def tensor(first=0, end=16, shape=(4,), dtype='F32'):
    return {'dtype': dtype, 'shape': list(shape), 'data_offsets': [first, end]}


BROKEN = {
    'empty': (b'', 'no whole safetensors file'),
    'shorter than a length': (b'\1\0\0', 'no whole safetensors file'),
    'header beyond the end': (broken({'a': tensor()}, length=10000), 'no whole safetensors file'),
    'huge header': (broken({'a': tensor()}, length=1 << 60), 'no whole safetensors file'),
    'no JSON': (broken(b'{"a": '), 'not JSON'),
    'a list': (broken([1]), 'no object'),
    'cut off': (broken({'a': tensor()})[:-1], 'the file is cut off'),
    'too long': (broken({'a': tensor()}, body=b'\0' * 17), 'its tensors end at'),
    'a gap': (broken({'a': tensor(8, 16, (2,))}), 'does not begin where the tensor before it ends'),
    'overlap': (broken({'a': tensor(0, 12, (3,)), 'b': tensor(8, 16, (2,))}), 'does not begin where'),
    'another size': (broken({'a': tensor(shape=(5,))}), '5 elements of F32 do not take 16 bytes'),
    'negative': (broken({'a': tensor(shape=(-4,))}), 'the shape is'),
    'no place': (broken({'a': {'dtype': 'F32', 'shape': [4]}}), 'not described well'),
    'backwards': (broken({'a': tensor(16, 0)}), 'the place is'),
    'a path': (broken({'../a': tensor()}), 'cannot be the name of a file'),
    'integers': (broken({'a': tensor(dtype='I32')}), 'parameters are F32, BF16 or F16'),
    'unknown dtype': (broken({'a': tensor(dtype='F8_E4M3')}), 'parameters are F32, BF16 or F16'),
    'no tensor': (broken({}, body=b''), 'has no tensors'),
    'an empty tensor': (broken({'a': tensor(0, 0, (0,))}, body=b''), 'has no elements'),
}


@pytest.mark.parametrize('name', BROKEN)
def test_a_broken_file_changes_nothing(root, tmp_path, name):
    data, message = BROKEN[name]
    (tmp_path / 'a.safetensors').write_bytes(data)
    with pytest.raises((ValueError, TypeError), match=message):
        import_safetensors(tmp_path / 'a.safetensors', root)
    assert not root.exists()


def test_a_failing_import_leaves_the_store_as_it_was(root, tmp_path, monkeypatch):
    params = random_parameters(SHAPES)
    write(tmp_path / 'a.safetensors', params)
    real, count = checkpoint._make_parameter, [0]

    def fail_at_the_third(*args):
        count[0] += 1
        if count[0] == 3:
            raise OSError(5, 'the disk of the safetensors file')
        real(*args)
    with monkeypatch.context() as m:
        m.setattr(checkpoint, '_make_parameter', fail_at_the_third)
        with pytest.raises(OSError, match='the disk of'):
            import_safetensors(tmp_path / 'a.safetensors', root)
    assert not root.exists()
    import_safetensors(tmp_path / 'a.safetensors', root)
    assert int(os.getxattr(root, 'user.hitrain.durable_step')) == 0
    with pytest.raises(FileExistsError, match='not empty'):
        import_safetensors(tmp_path / 'a.safetensors', root)
    assert sorted(os.listdir(root)) == sorted(SHAPES)


GROWS = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from hitrain.checkpoint import export_safetensors, import_safetensors
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import_safetensors(sys.argv[2], sys.argv[3])
export_safetensors(sys.argv[3], sys.argv[4])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_model(root, tmp_path):
    """One tensor of 48 MiB in a process of its own, which counts how much its memory grew."""
    write(tmp_path / 'a.safetensors', {'w': torch.arange(12 << 20, dtype=torch.float32)})
    grown = subprocess.run([sys.executable, '-c', GROWS, TOP / 'optim/torch', tmp_path / 'a.safetensors', root, tmp_path / 'b.safetensors'],
                           capture_output=True, text=True, check=True, timeout=120).stdout
    assert int(grown) < 24 << 10
    assert torch.equal(read(tmp_path / 'b.safetensors')['w'], torch.arange(12 << 20, dtype=torch.float32))
