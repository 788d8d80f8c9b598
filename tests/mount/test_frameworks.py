# SPDX-License-Identifier: Apache-2.0
"""Files of training frameworks: NumPy, PyTorch, and readers of safetensors, on files without a dtype."""
import json
import mmap
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from conftest import MIB, SECONDS_MAX

ODD = 777_777  # elements; no multiple of a page, a block or a chunk
TORCH_MMAP = (2, 1)  # the first version whose torch.load takes mmap=


def in_other_process(code, *args):
    """The output of another process: it has its own descriptors and mappings, and shares only the files."""
    done = subprocess.run([sys.executable, '-c', 'import sys\n' + code, *map(str, args)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def numbers(count, dtype='f4', seed=1):
    return np.random.default_rng(seed).standard_normal(count).astype(dtype)


def sync_folder(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


# ------------------------------------------------------------------------- NumPy

@pytest.mark.parametrize('count', [1, 1023, 1024, 262_144, ODD])
def test_memmap_keeps_what_is_written_through_it(store, count):
    path, data = store.point / 'array', numbers(count)
    made = np.memmap(path, 'f4', 'w+', shape=(count,))
    assert not made.any()
    made[:] = data
    made.flush()
    assert os.stat(path).st_size == 4 * count
    assert np.array_equal(np.fromfile(path, 'f4'), data)
    del made
    changed = np.memmap(path, 'f4', 'r+')
    assert np.array_equal(changed, data)
    changed[::3] *= 2
    data[::3] *= 2
    changed.flush()
    del changed
    store.remount()
    assert np.array_equal(np.memmap(path, 'f4', 'r'), data)


def test_memmap_grows_a_file_and_starts_anywhere(mnt):
    path = mnt / 'array'
    path.write_bytes(b'header')
    offset = 4096 * 3 + 12
    part = np.memmap(path, '<i8', 'r+', offset=offset, shape=(1000, 7))  # beyond the end: NumPy makes the file longer
    part[...] = np.arange(7000).reshape(1000, 7)
    part.flush()
    assert os.stat(path).st_size == offset + 8 * 7000
    data = path.read_bytes()
    assert data[:6] == b'header' and not any(data[6:offset])
    assert np.array_equal(np.frombuffer(data, '<i8', offset=offset), np.arange(7000))


def test_tofile_save_and_savez(store):
    mnt, arrays = store.point, {'w': numbers((300, 1001)), 'b': numbers(7, 'f8'), 'steps': np.arange(10)}
    with open(mnt / 'raw', 'wb') as f:
        for part in np.array_split(arrays['w'].ravel(), 13):
            part.tofile(f)
    assert np.array_equal(np.fromfile(mnt / 'raw', 'f4').reshape(300, 1001), arrays['w'])
    assert np.array_equal(np.fromfile(mnt / 'raw', 'f4', count=5, offset=4000), arrays['w'].ravel()[1000:1005])
    np.save(mnt / 'w.npy', arrays['w'])
    np.savez(mnt / 'all.npz', **arrays)
    np.savez_compressed(mnt / 'small.npz', **arrays)
    np.savetxt(mnt / 'b.txt', arrays['b'], fmt='%.17g')
    store.remount()
    assert np.array_equal(np.load(mnt / 'w.npy'), arrays['w'])
    for mode in ('r', 'c'):
        assert np.array_equal(np.load(mnt / 'w.npy', mmap_mode=mode), arrays['w'])
    np.load(mnt / 'w.npy', mmap_mode='r+')[7, 7] = 1234
    assert np.load(mnt / 'w.npy')[7, 7] == 1234
    for name in ('all.npz', 'small.npz'):
        with np.load(mnt / name) as loaded:
            assert sorted(loaded) == sorted(arrays)
            assert all(np.array_equal(loaded[k], v) for k, v in arrays.items())
    assert np.array_equal(np.loadtxt(mnt / 'b.txt'), arrays['b'])


# ----------------------------------------------------------------------- PyTorch

def checkpoint(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(300, 777), torch.nn.ReLU(), torch.nn.Linear(777, 13))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 300)).sum().backward()
    optimizer.step()
    return {'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': seed, 'rng': torch.get_rng_state()}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def save_durably(state, path, **kw):
    """As trainers write checkpoints: a reader finds the old one or the new one, after a crash, too."""
    new = path.with_suffix('.new')
    with open(new, 'wb') as f:
        torch.save(state, f, **kw)
        f.flush()
        os.fsync(f.fileno())
    os.rename(new, path)
    sync_folder(path.parent)


@pytest.mark.parametrize('zipped', [True, False])
def test_checkpoints_survive_a_crash(store, zipped):
    path, states = store.point / 'checkpoint.pt', [checkpoint(i) for i in range(3)]
    for state in states:
        save_durably(state, path, _use_new_zipfile_serialization=zipped)
        assert same(torch.load(path), state)
    # The next one is in progress.
    with open(path.with_suffix('.new'), 'wb') as f:
        torch.save(checkpoint(3), f)
    store.crash()
    assert same(torch.load(path), states[-1])


def test_save_by_name_and_load_with_a_map(store):
    path, state = store.point / 'checkpoint.pt', checkpoint(1)
    torch.save(state, path)
    os.mkdir(store.point / 'shards')
    for name, tensor in state['model'].items():
        torch.save(tensor.to(torch.bfloat16), store.point / 'shards' / f'{name}.pt')
    store.remount()
    assert same(torch.load(path, map_location=lambda storage, place: storage), state)
    for name, tensor in state['model'].items():
        assert torch.equal(torch.load(store.point / 'shards' / f'{name}.pt'), tensor.to(torch.bfloat16))


def test_load_through_a_mapping(store):
    version = tuple(int(n) for n in torch.__version__.split('+')[0].split('.')[:2])
    if version < TORCH_MMAP:
        pytest.skip(f'PyTorch {torch.__version__} has no torch.load(mmap=), which came with {TORCH_MMAP[0]}.{TORCH_MMAP[1]}')
    path, state = store.point / 'checkpoint.pt', checkpoint(1)
    torch.save(state, path)
    store.remount()
    loaded = torch.load(path, mmap=True)
    assert same(loaded, state)
    loaded['model']['0.weight'].zero_()  # the mapping is private
    assert same(torch.load(path), state)


def test_tensor_from_file_is_shared(store):
    path, data = store.point / 'tensor', torch.from_numpy(numbers(ODD))
    shared = torch.from_file(str(path), shared=True, size=ODD)  # makes the file as long as that
    assert os.stat(path).st_size == 4 * ODD and not shared.any()
    shared.copy_(data)
    reader = "import torch; print(torch.from_file(sys.argv[1], shared=True, size=int(sys.argv[2])).double().sum().item())"
    assert float(in_other_process(reader, path, ODD)) == data.double().sum().item()
    in_other_process("import torch; torch.from_file(sys.argv[1], shared=True, size=int(sys.argv[2]))[3] = 333", path, ODD)
    assert shared[3] == 333
    data[3] = 333
    private = torch.from_file(str(path), shared=False, size=ODD)
    private += 1
    assert torch.equal(private, data + 1) and torch.equal(shared, data)
    with open(path, 'rb') as f:
        os.fsync(f.fileno())
    store.kill()
    del shared, private
    store.mount()
    assert np.array_equal(np.fromfile(path, 'f4'), data.numpy())


def test_tensors_shared_between_workers_that_fork(mnt):
    path = mnt / 'tensor'
    shared = torch.from_file(str(path), shared=True, size=64 * 1024)
    children = []
    for i in range(4):
        pid = os.fork()
        if pid == 0:
            # No PyTorch call that uses threads in a forked child.
            shared.numpy()[i::4] = i + 1
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    assert np.array_equal(np.fromfile(path, 'f4').reshape(-1, 4), np.tile(np.arange(1, 5, dtype='f4'), (16 * 1024, 1)))


# ------------------------------------------------------------------- safetensors

def write_safetensors(path, tensors):
    """The format is a length, that many bytes of JSON, and the tensors one after the other."""
    header, at = {'__metadata__': {'format': 'pt'}}, 0
    for name, t in tensors.items():
        header[name] = {'dtype': 'F32', 'shape': list(t.shape), 'data_offsets': [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as f:
        f.write(struct.pack('<Q', len(text)) + text)
        for t in tensors.values():
            f.write(t.tobytes())


class Safetensors:
    """One private mapping of the whole file; tensors are views, as in safe_open()."""

    def __init__(self, path):
        with open(path, 'rb') as f:
            self.map = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        length, = struct.unpack_from('<Q', self.map)
        self.header = json.loads(self.map[8:8 + length])
        self.begin = 8 + length

    def keys(self):
        return [k for k in self.header if k != '__metadata__']

    def tensor(self, name):
        row = self.header[name]
        begin, end = row['data_offsets']
        return torch.frombuffer(self.map, dtype=torch.float32, offset=self.begin + begin,
                                count=(end - begin) // 4).reshape(row['shape'])


def test_safetensors_are_read_from_a_private_mapping(store):
    path = store.point / 'model.safetensors'
    tensors = {f'layer.{i}.weight': numbers((257, 1000 + i), seed=i) for i in range(6)}
    write_safetensors(path, tensors)
    store.remount()
    file = Safetensors(path)
    assert file.keys() == list(tensors)
    for name in reversed(file.keys()):
        assert np.array_equal(file.tensor(name).numpy(), tensors[name])
    # Replaced while mapped: readers of the old file keep it, as with any checkpoint that is downloaded again.
    write_safetensors(path.with_suffix('.new'), {name: -t for name, t in tensors.items()})
    os.rename(path.with_suffix('.new'), path)
    for name, t in tensors.items():
        assert np.array_equal(file.tensor(name).numpy(), t)
        assert np.array_equal(Safetensors(path).tensor(name).numpy(), -t)
    file.tensor('layer.0.weight').zero_()
    assert np.array_equal(Safetensors(path).tensor('layer.0.weight').numpy(), -tensors['layer.0.weight'])


def test_more_is_mapped_than_the_tier_holds(make_store):
    store = make_store('512M')
    store.mount()  # 32 MiB of DRAM
    made = np.memmap(store.point / 'big', 'f4', 'w+', shape=(20, MIB))
    for i in range(20):
        made[i] = i + 1
    made.flush()
    del made
    store.remount()
    kept = np.memmap(store.point / 'big', 'f4', 'r')
    assert np.array_equal(kept.reshape(20, MIB).sum(axis=1, dtype='f8'), MIB * np.arange(1.0, 21))
