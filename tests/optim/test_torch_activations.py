# SPDX-License-Identifier: Apache-2.0
"""offload(activations=): saved tensors in the store. The same bits, nothing left after a step, and errors by name."""
import gc
import os
import threading

import pytest

from trainer import LR, SECONDS_MAX, on_threads, shared_root, shared_store, store  # first: it makes the client importable
import torch
import torch.utils.checkpoint
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
import hitrain
from hitrain import _activations
from hitrain._activations import Activations

pytestmark = pytest.mark.skipif(not hasattr(torch, 'compiler'), reason='activations= needs PyTorch 2.1')

KEEP = 4 << 20
MIB = 1 << 20
N = 512  # a square f32 matrix of 1 MiB


class Block(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.mix, self.out, self.recompute = nn.Linear(64, 192), nn.Linear(64, 64), recompute

    def inner(self, x):
        q, k, v = self.mix(x).view(8, -1, 4, 48).transpose(1, 2).chunk(3, -1)  # views of one storage
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return nn.functional.relu(self.out(y), inplace=True)

    def forward(self, x):
        return x + (torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x))


class Model(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(3))
        self.conv = nn.Conv1d(64, 64, 3, padding=1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.conv(x.transpose(1, 2)).tanh()


def train(root, steps, model_options={}, **options):
    torch.manual_seed(0)
    model = Model(**model_options)
    with hitrain.offload(model, root, keep=KEEP, lr=LR, **options) as optimizer:
        for step in range(steps):
            x = torch.randn(8, 256, 64, generator=torch.Generator().manual_seed(step))
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer._activations:
                assert_nothing_is_left(optimizer._activations)
        figures = optimizer.figures().get('activations')
        return {name: p.detach().clone() for name, p in model.named_parameters()}, figures


def assert_nothing_is_left(saved):
    gc.collect()
    saved.settle()
    assert saved.figures()['held_bytes'] == 0 and not saved._stack and not saved._entries and not saved._held
    assert saved.file_blocks == 0


@pytest.mark.parametrize('model_options', [{}, {'recompute': True}])
def test_the_bits_are_those_without_it(shared_root, model_options):
    wanted, _ = train(shared_root.with_name('plain'), 3, model_options)
    for i, keep in enumerate([0, 3 * MIB, 1 << 30, 'auto']):
        found, figures = train(shared_root.with_name(f'own{i}'), 3, model_options, activations=keep)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert figures['saved_bytes'] > 4 * MIB
        if keep == 0:
            assert figures['written_bytes'] + figures['forwarded_bytes'] + figures['dropped_bytes'] >= figures['saved_bytes']
        elif keep == 1 << 30:
            assert figures['written_bytes'] == 0


class Slow:
    """Writes of an Activations wait until they are let through."""

    def __init__(self, monkeypatch):
        self.go, self.begun = threading.Event(), threading.Event()
        write = os.pwritev

        def slow(fd, data, at):
            self.begun.set()
            assert self.go.wait(SECONDS_MAX)
            return write(fd, data, at)
        monkeypatch.setattr(_activations.os, 'pwritev', slow)


@pytest.fixture
def saved(shared_store):
    made = Activations(str(shared_store.mountpoint), 0, set())
    yield made
    gc.collect()
    made.close()


def matrix(seed=0):
    return torch.randn(N, N, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize('error', [TypeError, MemoryError])
def test_an_error_of_any_kind_ends_the_wait_for_a_write(saved, monkeypatch, error):
    def fails(fd, data, at):
        raise error('of the test')
    monkeypatch.setattr(_activations.os, 'pwritev', fails)
    packed = saved.pack(matrix())
    settled = threading.Thread(target=saved.settle, daemon=True)
    settled.start()
    settled.join(20)
    assert not settled.is_alive(), 'the thread that writes has ended'
    with pytest.raises(error, match='of the test'):
        saved.pack(matrix(1))
    assert torch.equal(saved.unpack(packed), matrix())  # what could not be written is held


def test_each_state_of_a_tensor(saved, monkeypatch):
    slow = Slow(monkeypatch)
    values = [matrix(i) for i in range(3)]
    packed = [saved.pack(values[0])]
    assert slow.begun.wait(SECONDS_MAX)
    packed += [saved.pack(v) for v in values[1:]]
    assert [p.entry.state for p in packed] == [_activations.WRITING, _activations.QUEUED, _activations.QUEUED]
    for p, v in [(packed[1], values[1]), (packed[0], values[0])]:  # needed before it is written, and meanwhile
        assert saved.unpack(p).data_ptr() == v.data_ptr()
    del packed[2], p  # ends before it is written
    slow.go.set()
    saved.settle()
    figures = saved.figures()
    assert (figures['forwarded_bytes'], figures['dropped_bytes'], figures['written_bytes']) == (2 * MIB, MIB, MIB)
    assert packed[0].entry.state == _activations.STORED and packed[1].entry.state == _activations.HELD
    again = saved.unpack(packed[0])
    assert torch.equal(again, values[0]) and again.data_ptr() != values[0].data_ptr()
    assert saved.figures()['read_bytes'] == MIB
    del again, packed
    assert_nothing_is_left(saved)


def test_equal_saves_are_stored_once_and_views_keep_their_strides(saved):
    x = matrix()
    views = [x, x.t(), x[1:], x.view(2, -1)]
    packed = [saved.pack(x)]
    saved.settle()
    packed += [saved.pack(v) for v in views[1:]]  # the storage is stored already, and still the same
    saved.settle()
    assert saved.figures()['written_bytes'] == MIB
    for p, v in zip(packed, views):
        found = saved.unpack(p)
        assert found.stride() == v.stride() and torch.equal(found, v)
    assert saved.figures()['read_bytes'] == MIB
    del packed, p, found
    assert_nothing_is_left(saved)


def test_another_storage_at_the_same_address_is_another_tensor(saved):
    packed, places = [], []
    while len(places) == len(set(places)):
        if len(places) == 48:
            pytest.skip('the allocator gave no address twice')
        x = matrix(len(places))
        places.append(x.data_ptr())
        packed.append(saved.pack(x))
        del x
        saved.settle()  # its memory is free for the next one
    for i, p in enumerate(packed):
        assert torch.equal(saved.unpack(p), matrix(i))


def test_a_storage_that_lives_on_without_its_memory_is_not_the_next_one_there(saved):
    memory = bytearray(MIB)

    def storage(value):
        memory[:] = bytes([value]) * MIB
        return torch.frombuffer(memory, dtype=torch.uint8)
    first = storage(1)
    packed = [saved.pack(first)]
    saved.settle()
    second = storage(2)
    assert first.data_ptr() == second.data_ptr() and first._version == second._version
    packed.append(saved.pack(second))
    saved.settle()
    assert [saved.unpack(p).unique().tolist() for p in packed] == [[1], [2]]


@pytest.mark.parametrize('skip', [1, 7, 40])
def test_a_part_of_a_storage_comes_back_as_aligned_as_it_was(saved, skip):
    base = matrix()
    part = base.view(-1)[skip:skip + N * N // 4]
    at = part.data_ptr()
    packed, wanted = saved.pack(part), part.clone()
    del base, part
    saved.settle()
    found = saved.unpack(packed)
    assert packed.entry.state == _activations.LOADED and torch.equal(found, wanted)
    assert found.data_ptr() % 256 == at % 256


def test_a_storage_comes_back_as_aligned_as_it_was(saved):
    """As one of NumPy, which PyTorch has not aligned."""
    room = bytearray(4 * N * N + 512)
    address = torch.frombuffer(room, dtype=torch.uint8).data_ptr()
    whole = torch.frombuffer(room, dtype=torch.float32, offset=-address % 256 + 16, count=N * N)
    packed, at = saved.pack(whole), whole.data_ptr()
    del whole
    saved.settle()
    found = saved.unpack(packed)
    assert packed.entry.state == _activations.LOADED and not found.any()
    assert (found.data_ptr() % 256, at % 256) == (16, 16)


def test_a_thread_that_does_not_end_is_left(saved, monkeypatch):
    """close() says so, and the thread closes the file when it ends after all."""
    monkeypatch.setattr(_activations, '_CLOSE_SECONDS_MAX', 0.01)
    slow, said = Slow(monkeypatch), []
    packed = saved.pack(matrix())
    assert slow.begun.wait(SECONDS_MAX)

    def close():
        with pytest.warns(RuntimeWarning, match='has not ended within 0.01 seconds: the store cannot be unmounted'):
            saved.close()
        saved.close()
        said.append('closed')
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(20)
    slow.go.set()
    assert said == ['closed'], 'close() waits for the thread'
    saved._thread.join(SECONDS_MAX)
    assert saved._fd == -1 and packed.entry.state == _activations.STORED


def test_what_stays(saved):
    parameter = matrix()
    saved._stay.add(parameter)
    without_storage = matrix().to_mkldnn(), torch.empty(N, N, device='meta'), matrix().to_sparse()
    for t in (parameter, parameter.t(), torch.ones(10), *without_storage, torch.ones(1).expand(N, N), matrix()[:, :200]):
        assert saved.unpack(saved.pack(t)) is t
    changed = torch.ones(3)
    packed = saved.pack(changed)
    changed.add_(1)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        saved.unpack(packed)


def test_a_tensor_that_changes_before_it_is_written(saved, monkeypatch):
    slow = Slow(monkeypatch)
    x = matrix()
    packed = saved.pack(x)
    x.add_(1)
    slow.go.set()
    saved.settle()
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        saved.unpack(packed)


def test_backward_reads_ahead_and_twice(saved):
    layers = [matrix(i).div_(N).requires_grad_() for i in range(6)]
    for p in layers:
        saved._stay.add(p)

    def run(hooks):
        x = matrix(99)
        with hooks:
            for p in layers:
                x = (x @ p).tanh()
        loss = x.sum()
        loss.backward(retain_graph=True)
        loss.backward()
        grads = [p.grad for p in layers]
        for p in layers:
            p.grad = None
        return grads
    wanted = run(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
    found = run(torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    assert_nothing_is_left(saved)


def counted(monkeypatch, owner, name):
    """Calls of this function from now on, as a list that grows."""
    real, calls = getattr(owner, name), []

    def call(*args, **options):
        calls.append(args)
        return real(*args, **options)
    monkeypatch.setattr(owner, name, call)
    return calls


def test_small_tensors_share_calls_and_memory(saved, monkeypatch):
    monkeypatch.setattr(_activations, '_WINDOW_BYTES', 8 * MIB)
    saved.keep, values = 8 * MIB, [torch.full((MIB // 8,), float(i)) for i in range(64)]
    written, read = counted(monkeypatch, os, 'pwritev'), counted(monkeypatch, os, 'preadv')
    punched, made = counted(monkeypatch, _activations._libc, 'fallocate'), counted(monkeypatch, _activations.mmap, 'mmap')
    packed = [saved.pack(v) for v in values]
    saved.settle()
    stored = saved.figures()['written_bytes']
    assert stored >= 22 * MIB and len(written) <= stored // (2 * MIB)
    while packed:
        assert torch.equal(saved.unpack(packed.pop()), values.pop())
        saved.settle()
    assert saved.figures()['read_bytes'] == stored and len(read) == len(punched) == len(written)
    assert len(made) * MIB // 2 < stored
    assert_nothing_is_left(saved)


@pytest.mark.parametrize('fast', [True, False])
def test_reads_ahead_follow_the_rates_of_the_last_pass(saved, monkeypatch, fast):
    """Where reads are fast, few bytes are ahead, and their memory serves again in the next pass."""
    rates, segment = [], _activations.SEGMENT_BYTES
    monkeypatch.setattr(_activations, 'bytes_ahead', lambda *given: rates.append(given) or (2 * segment if fast else None))
    monkeypatch.setattr(_activations, '_WINDOW_BYTES', 16 * MIB)
    saved.keep = 8 * MIB
    made, most = counted(monkeypatch, _activations.mmap, 'mmap'), [0]
    for _ in range(3):
        packed = []
        for i in range(64):
            packed.append(saved.pack(torch.full((MIB // 8,), float(i))))
            saved.settle()  # so each pass has the same segments, however slow the thread is
        made.clear()
        most.append(0)
        while packed:
            assert saved.unpack(packed[-1])[3] == len(packed) - 1
            packed.pop()
            saved.settle()
            most[-1] = max(most[-1], saved._loaded_bytes)
    assert len(rates) == 2 and all(read > 0 and use > 0 and call == segment for read, use, call in rates)
    assert most[1] > 2 * segment and (most[-1] <= 2 * segment and not made if fast else most[-1] > 2 * segment)
    assert_nothing_is_left(saved)
    assert saved._loaded_bytes == 0


def looks(saved, monkeypatch, count):
    """How often the state of an entry is looked at while so many are read back."""
    found = [0]

    class Entry(_activations.Entry):
        @property
        def state(self):
            found[0] += 1
            return self._state

        @state.setter
        def state(self, state):
            self._state = state
    monkeypatch.setattr(_activations, 'Entry', Entry)
    packed = [saved.pack(torch.full((1024,), float(i))) for i in range(count)]
    saved.settle()
    found[0] = 0
    while packed:
        assert saved.unpack(packed.pop())[5] == len(packed)
        saved.settle()
    return found[0]


def test_more_tensors_make_none_of_them_slower(saved, monkeypatch):
    """A call that reads looks at what it reads, and not at all that is stored."""
    for name, value in (('SMALL_BYTES', 4 << 10), ('SEGMENT_BYTES', 32 << 10), ('_WINDOW_BYTES', 64 << 10)):
        monkeypatch.setattr(_activations, name, value)
    saved.keep = 64 << 10
    some, more = looks(saved, monkeypatch, 100), looks(saved, monkeypatch, 400)
    assert more < 6 * some
    assert_nothing_is_left(saved)


def test_memory_that_is_used_again_mixes_nothing(saved, monkeypatch):
    """Neither with a tensor that is in use still, nor with one that was saved again."""
    monkeypatch.setattr(_activations, '_WINDOW_BYTES', 5 * MIB)
    packed, kept, again = [saved.pack(matrix(i)) for i in range(24)], [], []
    saved.settle()
    for i in reversed(range(24)):
        t = saved.unpack(packed.pop())
        if i % 6 == 0:
            kept.append((i, t))
        elif i % 6 == 3:
            again.append((i, saved.pack(t)))  # as a backward of a backward does
        del t
        saved.settle()
    assert all(torch.equal(t, matrix(i)) for i, t in kept)
    assert all(torch.equal(saved.unpack(p), matrix(i)) for i, p in again)


def test_a_large_tensor_is_read_from_its_end(saved, monkeypatch):
    """As the tensors before it: for a reader that goes downwards the store reads ahead."""
    x = torch.arange(10 * MIB // 4, dtype=torch.float32)
    packed = saved.pack(x)
    saved.settle()
    read = counted(monkeypatch, os, 'preadv')
    assert torch.equal(saved.unpack(packed), x)
    assert [at // MIB for _, _, at in read] == [8, 4, 0]


def test_a_graph_without_a_backward_ends(saved):
    x = torch.ones(10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        y = x.tanh()  # whose node saves its own output
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert storage.expired()


def test_an_exception_in_forward_ends_the_hooks(shared_root):
    model = Model()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR, activations=0) as optimizer:
        with pytest.raises(RuntimeError):
            model(torch.ones(8, 256, 63))
        x = matrix().requires_grad_()
        before = optimizer.figures()['activations']['saved_bytes']
        x.exp().sum().backward()
        assert optimizer.figures()['activations']['saved_bytes'] == before


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer('table', matrix())
        self.register_buffer('sparse', matrix().to_sparse())  # which has no storage

    def forward(self, x):
        return x * self.table * self.scale.detach()


def test_buffers_are_not_saved(shared_root):
    model = Table()
    with hitrain.offload(model, shared_root, keep=KEEP, lr=LR, activations=0) as optimizer:
        model(torch.ones(N, requires_grad=True)).sum().backward()
        assert optimizer.figures()['activations']['saved_bytes'] == 0


@pytest.mark.parametrize('value', [-1, 'most', 1.5])
def test_values_that_are_refused(shared_root, value):
    with pytest.raises(ValueError, match="activations must be a number of bytes or 'auto'"):
        hitrain.offload(Model(), shared_root, keep=KEEP, lr=LR, activations=value)


def test_a_store_that_dies_is_named(store):
    saved = Activations(str(store.mountpoint), 0, set())
    packed = saved.pack(matrix())
    saved.settle()
    store.kill()
    with pytest.raises(OSError, match='reading a tensor for backward from the store'):
        saved.unpack(packed)
    other = saved.pack(matrix(1))
    saved.settle()
    with pytest.raises(OSError, match='saving a tensor for backward in the store'):
        saved.pack(matrix(2))
    del packed, other
    saved.close()
    store.mount()


# -- tensors of every kind, threads, a child, no space --

def odd_tensors():
    base = torch.randn(N, 2 * N, generator=torch.Generator().manual_seed(7))
    real = base[:, ::2]
    return {
        'complex': torch.complex(base, base.flip(0)), 'conjugate': torch.complex(base, base).conj(), 'sparse': base.to_sparse(),
        'no elements': torch.empty(0, N), 'every second column': real, 'transposed': base.t(), 'turned': base.t()[3:, 5:],
        'overlapping': base.as_strided((2 * N - 1, N), (N, 1)), 'expanded': torch.randn(N).expand(2 * N, N), 'bytes': base.view(torch.uint8),
        'bool': base > 0, 'half': base.half(), 'inference': inferred(base),
    }


def inferred(base):
    with torch.inference_mode():
        return base + 1


def test_any_tensor_comes_back_as_it_was(saved):
    for kind, t in odd_tensors().items():
        wanted, strides = t.to_dense() if t.is_sparse else t.clone(), None if t.is_sparse else t.stride()
        if kind == 'inference':  # PyTorch refuses to save it
            with pytest.raises(RuntimeError, match='version counter'):
                saved.pack(t)
            continue
        packed = saved.pack(t)
        del t
        saved.settle()
        back = saved.unpack(packed)
        assert back.dtype == wanted.dtype and (back.is_sparse or back.stride() == strides), kind
        assert torch.equal(back.to_dense() if back.is_sparse else back, wanted), kind


def test_gradients_of_gradients(saved):
    def run(pack, unpack):
        p, x = matrix(1).div_(N).requires_grad_(), matrix(2)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = (x @ p).tanh().pow(2).mean()
        first, = torch.autograd.grad(y, p, create_graph=True)
        second, = torch.autograd.grad(first.pow(2).sum(), p)
        return first.detach(), second
    wanted, found = run(lambda t: t, lambda t: t), run(saved.pack, saved.unpack)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def test_threads_save_and_restore_at_once(saved):
    wanted, errors = [matrix(i).mul(2).mul(3) for i in range(4)], []

    def run(i):
        try:
            for _ in range(5):
                x = matrix(i).requires_grad_()
                with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                    y = (x * x).sum() * 3
                y.backward()
                assert torch.equal(x.grad, wanted[i])
        except BaseException as e:
            errors.append(e)
    on_threads(4, run)
    assert not errors
    assert_nothing_is_left(saved)


def test_a_child_is_refused_what_its_parent_saved(saved):
    packed = saved.pack(matrix())
    saved.settle()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            saved.unpack(packed)
        except RuntimeError as e:
            status = 'forked child' not in str(e)
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(saved.unpack(packed), matrix())


def test_a_full_store_is_named(store):
    saved = Activations(str(store.mountpoint), 0, set())
    packed = []
    with pytest.raises(OSError, match=r'No space left on device \(saving a tensor for backward in the store\)'):
        for i in range(600):
            packed.append(saved.pack(torch.full((1024, 1024), float(i))))
            saved.settle()
    for i in range(0, len(packed), 7):  # earlier tensors are there
        assert float(saved.unpack(packed[i])[3, 5]) == float(i)
    del packed
    saved.close()


def test_a_read_only_mount_is_named(store):
    store.unmount()
    store.dram += ',ro'
    store.mount()
    with pytest.raises(OSError, match='Read-only file system'):
        Activations(str(store.mountpoint), 0, set())
    model = Model()
    wanted = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OSError, match='Read-only file system'):
        hitrain.offload(model, store.mountpoint / 'model', keep=KEEP, lr=LR)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), wanted))
