# SPDX-License-Identifier: Apache-2.0
"""Bytes between the store and a device: through slots that are made once, or, on a mount with passthrough=, without a copy by the CPU."""
import contextlib
import errno
import pathlib
import tempfile

import pytest

from trainer import LR, shared_root  # first: it makes the client importable
import torch
if not hasattr(torch, 'compiler'):
    pytest.skip('PyTorch 2.1 or newer', allow_module_level=True)
import hitrain
from demo_store import mounted
from hitrain import _activations, _device, _registered
from hitrain._device import Copies
from late_device import late
import test_torch_activations as activations
from test_torch_offload import KEEP, assert_equal, made, train, values

OUT_OF_MEMORY = 2  # of CUDA


@pytest.fixture(scope='module')
def passing():
    with mounted('torch-registered', '128M,passthrough=64M') as s:
        if 'passthrough is off' in s.log_path.read_text():
            pytest.skip('the kernel or the privileges are not there')
        yield s


@pytest.fixture(scope='module')
def shared_store():
    with mounted('torch-slots', '64M,passthrough=off') as s:
        yield s


@pytest.fixture
def root(passing):
    return pathlib.Path(tempfile.mkdtemp(dir=passing.mountpoint)) / 'model'


def offload(model, root, **options):
    return hitrain.offload(model, root, lr=LR, keep=KEEP, device='cpu', **options)


def in_memory(root, steps, **options):
    model = made(tied=False)
    with hitrain.AdamW(model.named_parameters(), root.with_name('plain'), lr=LR, **options) as optimizer:
        return train(model, optimizer, 0, steps), values(model)


def bytes_of(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_the_cpu_copies_no_byte_of_registered_memory(root, late, monkeypatch):
    """Also where a registration takes several calls, and not after steps that were taken back."""
    monkeypatch.setattr(_registered, 'PIECE', 32 << 10)
    losses, wanted = in_memory(root, 4)
    model = made(tied=False)
    with offload(model, root) as optimizer:
        files = optimizer._mapped()
        assert all(f._is_direct for f in files)
        assert train(model, optimizer, 0, 1) == losses[:1]
        train(model, optimizer, 1, 2)
        before, calls, pinned = optimizer.figures(), list(late.calls), late.pinned
        assert train(model, optimizer, 2, 3) == losses[2:3]
        after = optimizer.figures()
        assert after['copied_bytes'] == before['copied_bytes'] and after['loaded_bytes'] > before['loaded_bytes']
        assert late.calls == calls and calls.count('register') > 2 * len(files)
        assert late.pinned == pinned
        with torch.no_grad():
            model.head.bias.fill_(7.0)
        optimizer.abort()
        assert train(model, optimizer, 3, 4) == losses[3:]
        assert_equal(wanted, values(model))
    assert not late.registered


def test_a_refused_registration_is_told_once_and_costs_copies(root, late):
    losses, wanted = in_memory(root, 2)
    model, late.refuses_registration = made(tied=False), OUT_OF_MEMORY
    with pytest.warns(RuntimeWarning, match=r'refused to lock .*CUDA error 2; RLIMIT_MEMLOCK is') as told:
        optimizer = offload(model, root)
    with optimizer:
        assert train(model, optimizer, 0, 2) == losses and len([w for w in told if w.category is RuntimeWarning]) == 1
        assert optimizer.figures()['copied_bytes'] > bytes_of(model)
        assert_equal(wanted, values(model))


def test_one_that_is_refused_later_ends_all(root, late):
    losses, wanted = in_memory(root, 2)
    model = made(tied=False)
    with offload(model, root) as optimizer:
        late.refuses_registration = OUT_OF_MEMORY  # when the first gradient's memory is asked for
        with pytest.warns(RuntimeWarning, match='refused to lock'):
            assert train(model, optimizer, 0, 2) == losses
        assert not late.registered
        assert_equal(wanted, values(model))


@pytest.mark.parametrize('grad_dtype', [torch.float32, torch.bfloat16])
def test_slots_are_made_once(shared_root, late, grad_dtype):
    """A gradient of another dtype is cast on the device, so its bytes are those of the file."""
    losses, wanted = in_memory(shared_root, 3, grad_dtype=grad_dtype)
    model = made(tied=False)
    with offload(model, shared_root, grad_dtype=grad_dtype) as optimizer:
        assert train(model, optimizer, 0, 2) == losses[:2]
        before, pinned = optimizer.figures(), late.pinned
        assert train(model, optimizer, 2, 3) == losses[2:]
        after = optimizer.figures()
        assert late.pinned == pinned and late.calls == []
        loaded = sum(f.content_bytes for f in optimizer._mapped())
        gradients = sum(p.numel() for p in model.parameters()) * grad_dtype.itemsize
        copied = after['copied_bytes'] - before['copied_bytes']
        assert (copied - gradients) % loaded == 0 or loaded + gradients <= copied <= 2 * loaded + gradients
        assert_equal(wanted, values(model))


def test_saved_tensors_pass_through_slots_that_are_made_once(shared_root, late):
    """Two slots of loads, two of gradients and four of saved tensors, however many steps and tensors there are."""
    steps, passes, fetch = 4, [], Copies.fetch
    wanted, _ = activations.train(shared_root.with_name('plain'), steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copies, 'fetch', lambda copies, there: passes.append(there) or fetch(copies, there))
        found, figures = activations.train(shared_root, steps, activations=0, device='cpu')
    assert figures['written_bytes'] + figures['read_bytes'] > 0 and figures['saved_bytes'] > 8 * len(wanted) * activations.MIB / 16
    assert late.pinned <= 2 + 2 + 4 and late.calls == [] and passes == []
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize('slot', [100_000, 1 << 20, 3 << 20])
def test_saved_tensors_larger_and_smaller_than_a_slot(shared_store, late, monkeypatch, slot):
    """Several are written and read with one call, and their parts come back to their places."""
    monkeypatch.setattr(_device, '_SAVED_BYTES', slot)
    values = [activations.matrix(i)[:rows] for i, rows in enumerate((512, 300, 200, 512, 201))] + [torch.arange(3 << 20, dtype=torch.float32)]
    wanted = [v.clone() for v in values]
    slow = activations.Slow(monkeypatch)
    saved = _activations.Activations(str(shared_store.mountpoint), 0, set(), late.copies(torch.device('cpu'), 0))
    packed = [saved.pack(late.new(v)) for v in values]
    del values
    slow.go.set()
    saved.settle()
    saved.settle()  # a segment asks for the next one
    found = [saved.unpack(p) for p in reversed(packed)]
    assert all(torch.equal(f, w) for f, w in zip(found, reversed(wanted)))
    assert saved.figures()['read_bytes'] > 0 and late.pinned <= 4
    del found, packed
    activations.assert_nothing_is_left(saved)
    saved.close()


def test_a_store_that_is_full_gives_slots_back(shared_store, late, monkeypatch):
    """The writing thread has several slots when a write fails."""
    monkeypatch.setattr(_device, '_SAVED_BYTES', 64 << 10)
    copies, left = late.copies(torch.device('cpu'), 0), [3]

    def write(host, at):
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, 'full')
    own = late.new(activations.matrix()).view(torch.uint8).view(-1)
    for _ in range(3):
        left[0] = 3
        with pytest.raises(OSError, match='full'), late.current(late.compute):
            copies.save([(own, copies.computed())], write)
        assert len(copies._saved._free) + copies._saved._left == 4
    with pytest.raises(OSError, match='gone'):
        copies.restore([(0, 1 << 20)], lambda host, at: (_ for _ in ()).throw(OSError('gone')))
    assert len(copies._saved._free) + copies._saved._left == 4


def test_pieces_of_a_large_gradient(late):
    """More than both slots together."""
    copies = late.copies(torch.device('cpu'), 0)
    there = torch.arange(100_000, dtype=torch.float32)
    with late.current(late.compute):
        outgoing = copies.leaves(late.new(there))
        found = torch.cat([piece.clone() for piece in outgoing.pieces(outgoing.there)])
        assert torch.equal(found, torch.arange(100_000, dtype=torch.float32)) and late.pinned == 2
        for piece in outgoing.pieces(outgoing.there):
            break  # an error ends it: its slots are free again
        assert len(list(outgoing.pieces(outgoing.there))) == -(-400_000 // (64 << 10)) and late.pinned == 2


def unregistered_while_it_copies(patch):
    patch.setattr(Copies, '_settle', lambda copies: None)


def sent_before_it_has_come(patch):
    """The window's gradient goes to the step while the device may still write there."""
    real = Copies.write

    def write(copies, there, host):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr('late_device.Event.synchronize', lambda event: None)
            real(copies, there, host)
    patch.setattr(Copies, 'write', write)


@pytest.mark.parametrize('twin', [unregistered_while_it_copies, sent_before_it_has_come])
def test_a_fault_of_order_is_noticed(root, late, twin):
    losses, _ = in_memory(root, 3)
    model, found, late.random.random = made(tied=False), None, lambda: 1.0  # nothing runs but for a wait
    with pytest.MonkeyPatch.context() as patch:
        twin(patch)
        with offload(model, root) as optimizer:
            with contextlib.suppress(RuntimeError):  # a window that nothing was written to is no gradient
                found = train(model, optimizer, 0, 3)
            f = optimizer._mapped()[0]
            optimizer._copies.load(f._content, late.new(torch.empty_like(f._content)))
    noticed, late.faults = late.faults, []
    assert 'a registration ends while copies may use it' in noticed[0] if twin is unregistered_while_it_copies else found != losses
