# SPDX-License-Identifier: Apache-2.0
"""`.hitrain/delta/STEP`: a model and its deltas are the parameters, bit for bit, for readers that know safetensors and nothing of the store."""
import errno
import json
import mmap
import os
import struct
import subprocess
import threading

import numpy as np
import pytest

from calls import as_user, fails, sync
from conftest import BIN, MIB, run, wait_for
from models import new_model, word
from passthrough import gradient as put_gradient
from passthrough import make_model, mapped, passthrough_store
from test_steering import tell

SIZES = {'w': (96, 128), 'deep/v': (5 * MIB // 16,), 'bias': (77,)}
DTYPES = {'F32': np.uint32, 'BF16': np.uint16, 'F16': np.uint16, 'I32': np.int32, 'I64': np.int64}  # bits, and indices
STEPS = 100
RULES = {
    'adamw': 'adamw lr=1e-4 weight_decay=0.1',
    'sgd': 'sgd lr=1e-3 momentum=0.9 durable_every=7',
    'muon': 'muon lr=1e-4 momentum=0.9 ns=store',
}


def parse(data):
    """Metadata and tensors, by the text of the format."""
    length = struct.unpack('<Q', data[:8])[0]
    header = json.loads(data[8:8 + length])
    said = header.pop('__metadata__')
    ends, tensors = 0, {}
    for name, t in sorted(header.items(), key=lambda item: item[1]['data_offsets']):
        first, end = t['data_offsets']
        assert first == ends and first % (8 if t['dtype'] == 'I64' else 4 if t['dtype'] in ('I32', 'F32') else 2) == 0
        ends = end
        tensors[name] = np.frombuffer(data[8 + length + first:8 + length + end], DTYPES[t['dtype']])
        assert list(tensors[name].shape) == t['shape']
    assert len(data) == 8 + length + ends and length % 8 == 0
    return said, tensors


def delta(root, step):
    data = (root / f'.hitrain/delta/{step}').read_bytes()
    assert len(data) == (root / f'.hitrain/delta/{step}').stat().st_size
    return parse(data)


def steps(root):
    return sorted(int(name) for name in os.listdir(root / '.hitrain/delta'))


def bits(root, name, dtype):
    return np.fromfile(root / name, np.uint32 if dtype == 'f32' else np.uint16)


class Reader:
    """Inference: it has the model's bits, and goes on by deltas. `load` is how an engine takes one."""

    def __init__(self, root, dtype, load):
        self.root, self.dtype, self.load = root, dtype, load
        self.model, self.step, self.lineage, self.wholes = {}, -1, None, 0

    def follow(self):
        for step in [s for s in steps(self.root) if s > self.step]:
            said, tensors = delta(self.root, step)
            assert said['step'] == str(step) and said['format'] == 'hitrain-delta'
            if int(said['base_step']) != self.step or said['base_step'] == '0' or said['lineage'] != self.lineage:
                self.model = {name: bits(self.root, name, self.dtype) for name in SIZES}
                self.step, self.lineage = max(steps(self.root)), delta(self.root, max(steps(self.root)))[0]['lineage']
                self.wholes += 1
                break
            for name, shape in json.loads(said['shapes']).items():
                indices, values = tensors[f'{name}.indices'], tensors[f'{name}.values']
                assert tuple(shape) == SIZES[name] and len(indices) == len(values) > 0 and (np.diff(indices) > 0).all()
                self.model[name] = self.load(self.model[name], indices, values, tuple(shape))
            self.step = step

    def check(self):
        self.follow()
        for name in SIZES:
            assert (self.model[name] == bits(self.root, name, self.dtype)).all(), (name, self.step)


def as_vllm(model, indices, values, full_shape):
    """param.view(-1)[indices] = values, after the checks that vLLM makes of a patch."""
    assert indices.dtype == np.int32 and np.prod(full_shape) == model.size and indices[0] >= 0 and indices[-1] < model.size
    flat = model.reshape(full_shape).copy().reshape(-1)
    np.put(flat, indices, values)
    return flat


def as_prime_rl(model, indices, values, full_shape):
    """tensor.flatten().scatter_(0, indices, values).reshape(shape)"""
    flat = model.copy()
    flat[indices.astype(np.int64)] = values
    return flat.reshape(full_shape).reshape(-1)


def make(root, words, dtype='bf16'):
    rng = np.random.default_rng(1)
    content = {}
    for name, shape in SIZES.items():
        values = (rng.standard_normal(np.prod(shape)).astype('f4') * 0.05).view(np.uint32)
        content[name] = (values if dtype == 'f32' else (values >> 16).astype(np.uint16)).tobytes()
    new_model(root, words, dtype, **content)
    for name, shape in SIZES.items():
        word(root / name, 'shape', ','.join(map(str, shape)))
    if words.startswith('muon'):
        for name in 'bias', 'deep/v':
            word(root / name, 'optimizer', 'adamw lr=1e-4')
    sync(root)
    return root


def gradient(root, step, names=SIZES, dtype='bf16'):
    rng = np.random.default_rng(step)
    for name in names:
        g = rng.standard_normal(np.prod(SIZES[name])).astype('f4').view(np.uint32)
        (root / '.hitrain/grad' / name).write_bytes((g if dtype == 'f32' else (g >> 16).astype(np.uint16)).tobytes())


def step(root, number, names=SIZES, dtype='bf16', command='step'):
    gradient(root, number, names, dtype)
    assert tell(root, command) == 'ok'


@pytest.mark.parametrize('rule', RULES)
def test_a_model_and_its_deltas_are_the_parameters(mnt, rule):
    root = make(mnt / 'm', f'{RULES[rule]} delta=on delta_keep=3 delta_max=1')
    readers = [Reader(root, 'bf16', load) for load in (as_vllm, as_prime_rl)]
    for number in range(1, STEPS + 1):
        step(root, number, ['w', 'bias'] if number % 3 == 2 else SIZES, command='step async' if number % 2 else 'step')
        assert tell(root, 'wait') == 'ok'
        assert steps(root) == list(range(max(1, number - 2), number + 1))
        for reader in readers:
            (reader.check if number % 10 == 0 or number < 5 else reader.follow)()
    assert [r.wholes for r in readers] == [1, 1]
    assert int(word(root, 'delta_bytes')) > 0


@pytest.mark.parametrize('rule', ['adamw', 'muon'])
def test_a_copy_keeps_up_with_sums_aborts_and_rollbacks(mnt, rule):
    """A random history of steps of two gradients each, some of which are taken back: half of one, or several."""
    root = make(mnt / 'm', f'{RULES[rule]} delta=on delta_keep=4 delta_max=1 accumulate=2 retain=5')
    reader, rng, ends = Reader(root, 'bf16', as_vllm), np.random.default_rng(3), 0
    for number in range(STEPS):
        end = rng.choice(['commit', 'abort', 'rollback'], p=[0.8, 0.1, 0.1]) if number > 4 else 'commit'
        for i in range({'commit': 2, 'abort': 1, 'rollback': 0}[end]):
            gradient(root, 2 * number + i)
        assert tell(root, f'rollback {int(word(root, "step")) - 2}' if end == 'rollback' else end) == 'ok'
        if end != 'commit':
            ends += 1
            assert steps(root) == [] and word(root, 'delta_lineage') != reader.lineage
            reader.step = -1
        elif number % 3:
            reader.check()
    reader.check()
    assert ends > 10 and reader.wholes <= ends + 1


def test_deltas_of_f32_parameters_are_those_of_their_bf16(mnt):
    root = make(mnt / 'm', 'adamw lr=1e-5 delta=on delta_dtype=bf16 delta_max=1', 'f32')
    step(root, 1, dtype='f32')
    before = {name: (root / name).read_bytes() for name in SIZES}
    step(root, 2, dtype='f32')
    said, tensors = delta(root, 2)
    assert said['base_step'] == '1'
    for name in SIZES:
        old, new = (round_to_bf16(np.frombuffer(b, np.uint32)) for b in (before[name], (root / name).read_bytes()))
        where = np.flatnonzero(old != new)
        assert 0 < len(where) < old.size / 4
        assert (tensors[f'{name}.indices'] == where).all() and (tensors[f'{name}.values'] == new[where]).all()


def round_to_bf16(b):
    return ((b + 0x7fff + (b >> 16 & 1)) >> 16).astype(np.uint16)


def test_a_chain_is_cut_where_a_step_is_no_update(mnt):
    """Rollback, abort, other names, bytes of a program, new parameters: the next step says that the model is to be taken."""
    root = make(mnt / 'm', 'adamw lr=1e-3 delta=on delta_max=1 retain=2')
    reader = Reader(root, 'bf16', as_vllm)
    for number in range(1, 5):
        step(root, number, command='commit')
        reader.check()
    wholes = reader.wholes

    def cut(number, change, at_once=True):
        """at_once: no delta is left. Bytes of a program are found by the next step."""
        nonlocal wholes
        change()
        assert bool(steps(root)) != at_once
        reader.step = number - 1
        step(root, number)
        assert steps(root) == [number] and delta(root, number)[0]['base_step'] == '0'
        reader.check()
        wholes += 1
        assert reader.wholes == wholes
        step(root, number + 1)
        assert delta(root, number + 1)[0]['base_step'] == str(number)
        reader.check()

    def write():
        with open(root / 'w', 'r+b') as f:
            f.seek(100)
            f.write(b'\1\2\3\4')

    def mapped():
        with open(root / 'deep/v', 'r+b') as f, mmap.mmap(f.fileno(), 4096) as m:
            m[:4] = b'\7\7\7\7'

    cut(5, lambda: tell(root, 'rollback 4'))
    cut(7, lambda: tell(root, 'abort'))
    cut(9, write, at_once=False)
    cut(11, mapped, at_once=False)
    cut(13, lambda: (os.rename(root / 'bias', root / 'x'), os.rename(root / 'x', root / 'bias')))
    cut(15, lambda: tell(root, 'reset bias'))


def test_stores_into_memory_that_the_kernel_has_cut_the_chain(passthrough_store):
    """They make no call. So each step is one to take whole while a program may store, and readers of the memory cost nothing."""
    root = make_model(passthrough_store.point, w=MIB)
    word(root, 'optimizer', 'sgd lr=0.5 delta=on delta_max=1')

    def base():
        put_gradient(root, 'w', 1.0)
        assert tell(root, 'step') == 'ok'
        return int(delta(root, max(steps(root)))[0]['base_step'])

    assert [base() for _ in range(3)] == [0, 1, 2]
    with mapped(root / 'w', os.O_RDONLY):
        assert [base() for _ in range(2)] == [3, 4]
    with mapped(root / 'w') as m:
        assert [base() for _ in range(2)] == [0, 0]
        m[:4] = b'\1\2\3\4'
    assert base() == 0
    wait_for(lambda: base() > 0, 'the end of the search for stores')


def test_a_mount_begins_another_lineage(store):
    root = make(store.point / 'm', 'adamw lr=1e-3 delta=on delta_max=1 redo=on durable_every=9')
    for number in range(1, 5):
        step(root, number)
    lineage = delta(root, 4)[0]['lineage']
    store.crash()
    assert word(root, 'step') == '4' and steps(root) == []
    step(root, 5)
    assert delta(root, 5)[0]['base_step'] == '0' and delta(root, 5)[0]['lineage'] != lineage
    step(root, 6)
    assert delta(root, 6)[0]['base_step'] == '5'
    root = store.remount() / 'm'
    assert steps(root) == []


def test_bounds_and_bad_input(mnt):
    root = make(mnt / 'm', 'adamw lr=1e-4 delta=on delta_keep=2 delta_max=0.5')
    for words in 'delta_keep=-1', 'delta_keep=0', 'delta_max=2', 'delta=yes', 'delta_dtype=int8':
        with fails(errno.EINVAL):
            word(root, 'optimizer', f'adamw {words}')
    for number in 1, 2, 3:
        step(root, number)
    folder = root / '.hitrain/delta'
    assert steps(root) == [2, 3]
    for name in '1', '4', '0', '03', '-1', 'x':
        with fails(errno.ENOENT):
            os.stat(folder / name)
    for flags in os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC:
        with fails(errno.EACCES):
            os.open(folder / '3', flags)
    with pytest.raises(OSError):
        os.open(folder / '7', os.O_WRONLY | os.O_CREAT)
    with fails(errno.EPERM):
        os.chmod(folder / '3', 0o666)
    # Any offset, and a mapping.
    data = (folder / '3').read_bytes()
    with open(folder / '3', 'rb') as f:
        for at in range(0, len(data) + 5, len(data) // 37):
            assert os.pread(f.fileno(), 1001, at) == data[at:at + 1001]
        with mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as m:
            assert m[:] == data
    # An open one stays when its step is gone.
    with open(folder / '2', 'rb') as f:
        whole = f.read()
        step(root, 4)
        assert not (folder / '2').exists()
        assert os.pread(f.fileno(), len(whole) + 1, 0) == whole
    word(root, 'optimizer', 'adamw lr=1e-4')
    assert steps(root) == []
    step(root, 5)
    assert steps(root) == []


def test_a_step_that_changes_too_much_says_so(mnt):
    root = make(mnt / 'm', 'sgd lr=1 delta=on delta_max=0.01')
    step(root, 1)
    step(root, 2)
    said, tensors = delta(root, 2)
    assert (said['base_step'], tensors) == ('0', {})
    step(root, 3, ['bias'])
    said, tensors = delta(root, 3)
    assert said['base_step'] == '2' and list(tensors) == ['bias.indices', 'bias.values']
    assert said['lineage'] == delta(root, 2)[0]['lineage']


def test_who_may_read_all_that_has_changed_may_read_it(mnt):
    user = 4242
    root = make(mnt / 'm', 'adamw lr=1e-3 delta=on delta_max=1')
    os.chmod(mnt, 0o755)
    for number in 1, 2:
        step(root, number)
    step(root, 3, ['w'])
    path = str(root / '.hitrain/delta')
    data = {s: (root / f'.hitrain/delta/{s}').read_bytes() for s in (2, 3)}

    def reads(number):
        return as_user(lambda: open(f'{path}/{number}', 'rb').read(), user, user) == data[number]

    assert reads(2) and reads(3)
    os.chmod(root / 'bias', 0o600)
    with fails(errno.EACCES):
        reads(2)
    assert reads(3)
    os.chmod(root / 'bias', 0o644)
    os.chmod(root / 'deep', 0o700)
    with fails(errno.EACCES):
        reads(2)
    assert reads(3)
    os.chmod(root, 0o711)
    with fails(errno.EACCES):
        reads(3)


def test_two_readers_read_while_steps_run(mnt):
    root = make(mnt / 'm', 'adamw lr=1e-3 delta=on delta_max=1 delta_keep=128')
    readers = [Reader(root, 'bf16', load) for load in (as_vllm, as_prime_rl)]
    step(root, 1)
    stop, failures = threading.Event(), []

    def go_on(reader):
        try:
            while not stop.is_set():
                reader.follow()
        except BaseException as e:
            failures.append(e)
            raise

    threads = [threading.Thread(target=go_on, args=(r,)) for r in readers]
    for t in threads:
        t.start()
    for number in range(2, 40):
        step(root, number, command='step async')
    assert tell(root, 'wait') == 'ok'
    stop.set()
    for t in threads:
        t.join()
    assert not failures
    for reader in readers:
        reader.check()


def test_hitrainctl_prints_a_delta(mnt):
    root = make(mnt / 'm', 'adamw lr=1e-3 delta=on delta_max=1')

    def print_delta(number):
        return subprocess.run([str(BIN / 'hitrainctl'), 'delta', str(root), str(number)], capture_output=True, timeout=120)

    done = print_delta(1)
    assert done.returncode == 1 and b'no step has a delta' in done.stderr
    for number in 1, 2, 3:
        step(root, number)
    done = print_delta(3)
    assert done.returncode == 0 and done.stdout == (root / '.hitrain/delta/3').read_bytes()
    done = print_delta(9)
    assert done.returncode == 1 and b'step 9 has no delta; those of 1 to 3 are there' in done.stderr and not done.stdout
    for bad in '-1', '0', 'x', '3/..':
        done = print_delta(bad)
        assert done.returncode in (1, 2) and not done.stdout
    assert run('hitrainctl', 'delta', mnt / 'm', check=False).returncode == 2
    done = subprocess.run([str(BIN / 'hitrainctl'), 'delta', '/tmp', '3'], capture_output=True, timeout=120)
    assert done.returncode == 1 and b'/tmp' in done.stderr


def test_a_write_to_a_parameter_that_no_step_has_updated_cuts_the_chain(mnt):
    root = mnt / 'm'
    new_model(root, 'adamw lr=1e-3 delta=on delta_max=1', w=b'\0' * 4096, frozen=b'\0' * 4096)
    (root / 'log').touch()
    os.removexattr(root / 'log', 'user.hitrain.dtype')
    (root / 'log').write_bytes(b'no tensor')
    (root / 'saved').touch()
    word(root / 'saved', 'dtype', 'u8')
    word(root / 'saved', 'class', 'scratch')
    sync(root)

    def base(seed):
        put_gradient(root, 'w', seed)
        sync(root)
        return int(delta(root, seed)[0]['base_step'])
    assert [base(1), base(2)] == [0, 1]
    with open(root / 'frozen', 'r+b') as f:
        f.write(b'\1\2\3\4')
    assert [base(3), base(4)] == [0, 3]
    os.truncate(root / 'frozen', 4000)
    assert [base(5), base(6)] == [0, 5]
    (root / 'log').write_bytes(b'which a trainer writes in each step')
    (root / 'saved').write_bytes(b'and tensors that its backward needs')
    assert base(7) == 6
    # A copy of a parameter gets its dtype when its content is there, and is one from then on.
    (root / 'late').touch()
    os.removexattr(root / 'late', 'user.hitrain.dtype')
    (root / 'late').write_bytes(b'\0' * 4096)
    assert base(8) == 7
    word(root / 'late', 'dtype', 'f32')
    assert [base(9), base(10)] == [0, 9]
    (root / 'late').write_bytes(b'\1' * 4096)
    assert [base(11), base(12)] == [0, 11]
    with open(root / 'late', 'r+b') as f:  # an abort brings the dtype back, also where a program has the file open
        os.removexattr(root / 'late', 'user.hitrain.dtype')
        tell(root, 'abort')
        assert [base(13), base(14)] == [0, 13]
        f.write(b'\2' * 4096)
        f.flush()
        assert [base(15), base(16)] == [0, 15]
