# SPDX-License-Identifier: Apache-2.0
"""Models of a store as safetensors files, and back. The reader here is written from the description of the format."""
import contextlib
import errno
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import threading

import pytest

from trainer import LR, SECONDS_MAX, TOP, equal, random_parameters, shared_root as root, shared_store  # first: it makes the client importable
import torch
import hitrain
from hitrain import _blocks, _safetensors, checkpoint
from hitrain._bytes import memory_of
from hitrain.checkpoint import export_safetensors, import_safetensors

SHAPES = {'embed.weight': (301, 64), 'norm': (64,), 'out.weight': (3, 64, 5), 'scale': (1,)}
TORCH = {'F32': torch.float32, 'F64': torch.float64, 'BF16': torch.bfloat16, 'F16': torch.float16}


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


@pytest.mark.parametrize('dtype, direct', [(None, True), (torch.bfloat16, False), (torch.float64, True)])
def test_blocks_are_copied_at_the_same_time(root, tmp_path, monkeypatch, dtype, direct):
    """The first writes of each copy wait until two are under way. Blocks are so small that tensors have many, and share some."""
    params, real, refused = trained(root), _blocks.write_at, []
    lock, under_way, together = threading.Lock(), [0], threading.Event()

    def write_together(fd, memory, at):
        if not direct and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and str(tmp_path) in os.readlink(f'/proc/self/fd/{fd}'):
            refused.append(at)
            raise OSError(errno.EINVAL, 'as a device with large blocks')
        with lock:
            under_way[0] += 1
            if under_way[0] == 2:
                together.set()
        assert at == 0 or together.wait(SECONDS_MAX)
        real(fd, memory, at)
        with lock:
            under_way[0] -= 1

    def copied(copy, *args, **kw):
        together.clear()
        copy(*args, **kw)
        assert together.is_set()
    monkeypatch.setattr(_blocks, 'BLOCK_BYTES', 8192)
    monkeypatch.setattr(_safetensors, 'PIECE_BYTES', 1000)
    monkeypatch.setattr(_blocks, 'write_at', write_together)
    copied(export_safetensors, root, tmp_path / 'model.safetensors', dtype=dtype)
    assert direct == (not refused)
    assert all(torch.equal(t, params[n].detach().to(t.dtype)) for n, t in read(tmp_path / 'model.safetensors').items())
    copied(import_safetensors, tmp_path / 'model.safetensors', root.parent / 'copy', dtype=torch.float32)
    copied(export_safetensors, root.parent / 'copy', tmp_path / 'copy.safetensors')
    assert all(torch.equal(t, params[n].detach().to(dtype or t.dtype).float()) for n, t in read(tmp_path / 'copy.safetensors').items())


def test_elements_may_lie_across_blocks(tmp_path, monkeypatch):
    """Other programs write tensors at any byte, and each block of a file that O_DIRECT writes begins at a page."""
    monkeypatch.setattr(_blocks, 'BLOCK_BYTES', 4096)
    monkeypatch.setattr(_safetensors, 'PIECE_BYTES', 64)
    values = torch.randn(3000)
    (tmp_path / 'a').write_bytes(b'123' + bytes(memory_of(values)))
    odd = _safetensors.Tensor('odd', str(tmp_path / 'a'), 'U8', [3], 0, 3)
    t = _safetensors.Tensor('t', str(tmp_path / 'a'), 'F32', [3000], 3, 12000)
    out = bytearray(3 + 6000)
    with _blocks.opened(os.O_RDONLY) as sources:
        for block in _safetensors.cut([odd, t], torch.bfloat16, 0):
            _safetensors.fill(memoryview(out)[block.at:block.at + block.size], block, sources)
    converted = values.bfloat16()
    assert out == b'123' + bytes(memory_of(converted))


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


def test_an_export_replaces_an_earlier_one(root, tmp_path):
    folder = tmp_path / 'model'

    def imported(number):
        import_safetensors(folder, root.parent / f'other{number}')
        return {n: (root.parent / f'other{number}' / n).read_bytes() for n in SHAPES}
    params = trained(root)
    with hitrain.AdamW(params.items(), root, lr=LR, resume=True) as optimizer:
        for number, (bytes_max, files) in enumerate([(80000, 3), (60000, 3), (1 << 30, 1), (100, 5), (80000, 3), (1 << 30, 1)]):
            params['norm'].grad = torch.ones(64)
            optimizer.step()
            if number == 0:
                folder.mkdir()
                (folder / 'config.json').write_text('{}')
                (folder / 'my-model-00001-of-00002.safetensors').write_text('')
            names = export_safetensors(root, folder, shard_bytes=bytes_max)
            assert len(names) == files
            assert sorted(os.listdir(folder)) == sorted([*map(os.path.basename, names), 'config.json', 'my-model-00001-of-00002.safetensors'])
            assert imported(number) == {n: (root / n).read_bytes() for n in SHAPES}


@pytest.mark.parametrize('first, second', [(80000, 1 << 30), (1 << 30, 80000), (80000, 80000), (80000, 100), (100, 80000)])
def test_an_export_that_is_cut_off_gives_no_mixture(root, tmp_path, monkeypatch, first, second):
    """At each name that is given or removed: an import takes one of the two models whole, or refuses the folder."""
    params = trained(root)
    sound, outcomes = [], set()

    def values(where):
        return {n: (where / n).read_bytes() for n in SHAPES}
    export_safetensors(root, tmp_path / 'first', shard_bytes=first)
    sound.append(values(root))
    with hitrain.AdamW(params.items(), root, lr=LR, resume=True) as optimizer:
        for p in params.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
    sound.append(values(root))

    class Cut(BaseException):
        pass
    for calls in range(20):
        folder, left = tmp_path / f'at{calls}', [calls]
        shutil.copytree(tmp_path / 'first', folder)

        def cut(real):
            def call(*args):
                if left[0] == 0:
                    raise Cut
                left[0] -= 1
                real(*args)
            return call
        try:
            with monkeypatch.context() as m:
                m.setattr(checkpoint.os, 'rename', cut(os.rename))
                m.setattr(checkpoint.os, 'unlink', cut(os.unlink))
                export_safetensors(root, folder, shard_bytes=second)
            done = True
        except Cut:
            done = False
        try:
            import_safetensors(folder, root.parent / f'at{calls}')
        except (ValueError, FileNotFoundError):
            outcomes.add('refused')
            assert not done
        else:
            assert values(root.parent / f'at{calls}') in sound
            outcomes.add(sound.index(values(root.parent / f'at{calls}')))
        if done:
            break
    assert done and values(root.parent / f'at{calls}') == sound[1] and len(outcomes) > 1


def test_a_folder_with_two_models_is_refused(root, tmp_path):
    trained(root)
    export_safetensors(root, tmp_path, shard_bytes=80000)
    export_safetensors(root, tmp_path / 'model.safetensors')
    with pytest.raises(ValueError, match='two models'):
        import_safetensors(tmp_path, root.parent / 'other')
    assert not (root.parent / 'other').exists()


@pytest.mark.parametrize('text', ['[]', '{}', '{"weight_map": 1}', '{"weight_map": {"a": [1]}}', '{"weight_map": {"a": 1}}',
                                  '{"weight_map": {"a": "../b"}}', '[' * 100000, 'x'], ids=lambda text: text[:30])
def test_a_broken_index_is_named(root, tmp_path, text):
    (tmp_path / 'model.safetensors.index.json').write_text(text)
    with pytest.raises(ValueError, match='index.json (is no index|names files)'):
        import_safetensors(tmp_path, root)
    assert not root.exists()


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

        def begin_meanwhile(*args):
            optimizer.send_gradient(params['norm'])
            real(*args)
            optimizer.abort()
        monkeypatch.setattr(checkpoint, '_write_file', begin_meanwhile)
        with pytest.raises(RuntimeError, match='began or made a step'):
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
    'a deep header': (broken(b'[' * 100000), 'not JSON'),
    'a deep shape': (broken(b'{"a": {"dtype": "F32", "data_offsets": [0, 16], "shape": [' + b'[' * 900 + b']' * 900 + b']}}'), 'the shape is'),
    'many dimensions': (broken({'a': tensor(shape=[1] * 63 + [2, 2])}), 'the shape is'),
    'large numbers': (broken({'a': tensor(shape=[10 ** 4000 - 1] * 2000)}), 'the shape is'),
    'a large number': (broken({'a': tensor(shape=[4, 1 << 40, 0])}), 'the shape is'),
    'no text': (broken({'a': {**tensor(), 'dtype': ['F32']}}), 'not described well'),
    'a path': (broken({'../a': tensor()}), 'cannot be the name of a file'),
    'integers': (broken({'a': tensor(dtype='I32')}), 'parameters are F32, BF16 or F16'),
    'unknown dtype': (broken({'a': tensor(dtype='F8_E4M3')}), 'parameters are F32, BF16 or F16'),
    'no tensor': (broken({}, body=b''), 'has no tensors'),
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
        return real(*args)
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


@pytest.mark.parametrize('former', [None, 'sgd lr=0.5'])
def test_a_rule_that_the_store_refuses_changes_nothing(root, tmp_path, former):
    write(tmp_path / 'a.safetensors', random_parameters(SHAPES))
    if former:
        root.mkdir()
        os.setxattr(root, 'user.hitrain.optimizer', former.encode())
        held = os.getxattr(root, 'user.hitrain.optimizer')
    with pytest.raises(OSError, match='Invalid argument'):
        import_safetensors(tmp_path / 'a.safetensors', root, rule='adamw lr=-1')
    with monkeypatched(checkpoint, '_make_parameter'), pytest.raises(ZeroDivisionError):
        import_safetensors(tmp_path / 'a.safetensors', root)
    if former:
        assert os.listdir(root) == [] and os.getxattr(root, 'user.hitrain.optimizer') == held
    else:
        assert not root.exists()


@contextlib.contextmanager
def monkeypatched(module, name):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(module, name, lambda *args: 1 // 0)
        yield


# The largest memory is counted from its beginning: a process begins with that of its parent.
GROWS = """
import sys
sys.path.insert(0, sys.argv[1])
from hitrain.checkpoint import export_safetensors, import_safetensors
def largest():
    return int(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])
open('/proc/self/clear_refs', 'w').write('5')
before = largest()
import_safetensors(sys.argv[2], sys.argv[3])
export_safetensors(sys.argv[3], sys.argv[4])
print(largest() - before)
"""


def test_memory_does_not_grow_with_the_model(root, tmp_path):
    """One tensor of 48 MiB in a process of its own, which counts how much its memory grew."""
    write(tmp_path / 'a.safetensors', {'w': torch.arange(12 << 20, dtype=torch.float32)})
    grown = subprocess.run([sys.executable, '-c', GROWS, TOP / 'optim/torch', tmp_path / 'a.safetensors', root, tmp_path / 'b.safetensors'],
                           capture_output=True, text=True, check=True, timeout=SECONDS_MAX).stdout
    assert 0 < int(grown) < 24 << 10
    assert torch.equal(read(tmp_path / 'b.safetensors')['w'], torch.arange(12 << 20, dtype=torch.float32))


@pytest.mark.parametrize('dtype', [None, torch.bfloat16])
def test_an_import_asks_the_kernel_for_whole_blocks(root, tmp_path, monkeypatch, dtype):
    values = torch.arange(3 * _blocks.BLOCK_BYTES // 4 + 5, dtype=torch.float32)
    hitrain.SGD([('w', torch.nn.Parameter(values))], root, lr=1.0).close()
    path, asked, real = tmp_path / 'model.safetensors', [], os.posix_fadvise
    export_safetensors(root, path)

    def advise(fd, at, size, advice):
        if advice == os.POSIX_FADV_WILLNEED:
            asked.append((at, size))
        real(fd, at, size, advice)
    monkeypatch.setattr(os, 'posix_fadvise', advise)
    import_safetensors(path, root.parent / 'copy', dtype=dtype)
    assert sum(size for _, size in asked) == values.numel() * 4
    assert sorted(at for at, _ in asked) == [at for at in range(path.stat().st_size - values.numel() * 4, path.stat().st_size, max(size for _, size in asked))]
