# SPDX-License-Identifier: Apache-2.0
"""The client for a GPU on one that is late (tests/support/late_device.py): orders of its copies, faults of order that must be noticed, errors."""
import contextlib
import gc
import os
import pathlib
import shutil
import sys
import threading
import warnings

import pytest

from trainer import LR, SECONDS_MAX, shared_root, shared_store, store, used_of  # first: it makes the client importable
import torch
if not hasattr(torch, 'compiler'):
    pytest.skip('PyTorch 2.1 or newer', allow_module_level=True)
import hitrain
from hitrain import _activations, _slots
from hitrain._device import Copies
from late_device import ILLEGAL, Stream, late
import test_torch_activations as activations
from test_torch_offload import KEEP, assert_equal, loss_of, made, train, values

SEEDS = 12
STEPS = 2


@pytest.fixture(autouse=True)
def room(request):
    """For the next test."""
    yield
    gc.collect()
    if 'shared_root' in request.fixturenames:
        shutil.rmtree(request.node.funcargs['shared_root'].parent)


def offload(model, root, **options):
    return hitrain.offload(model, root, lr=LR, device='cpu', keep=KEEP, **options)


def run(root):
    """A model with saved tensors in the store, and one whose parameters come and go."""
    saved, _ = activations.train(root / 'saved', STEPS, activations=0, device='cpu')
    model = made()
    with offload(model, root / 'parameters', activations=0) as optimizer:
        return saved, train(model, optimizer, 0, STEPS), values(model)


@pytest.fixture(scope='module')
def wanted(shared_store):
    root = shared_store.mountpoint / 'plain'
    root.mkdir()
    saved, _ = activations.train(root / 'saved', STEPS)
    model = made()
    with hitrain.AdamW(model.named_parameters(), root / 'parameters', lr=LR) as optimizer:
        return saved, train(model, optimizer, 0, STEPS), values(model)


def is_equal(found, wanted):
    return found[1] == wanted[1] and all(torch.equal(f[n], w[n]) for f, w in zip(found[::2], wanted[::2]) for n in w)


@pytest.mark.parametrize('late', range(SEEDS), indirect=True)
def test_the_bits_depend_on_no_order_that_is_not_waited_for(shared_root, late, wanted):
    shared_root.mkdir()
    assert is_equal(run(shared_root), wanted)
    assert late.late_copies > 5  # which ended after a later operation


# -- faults of order --

def no_wait_event(patch):
    patch.setattr(Stream, 'wait_event', lambda *unused: None)


def read_before_it_is_computed(patch):
    patch.setattr(Copies, 'after', lambda *unused: None)


def no_record_stream(patch):
    patch.setattr(torch.Tensor, 'record_stream', lambda *unused: None)


def waits_for_slots(patch, before_use):
    """Before a slot is used again, or before its content is read, and not both."""
    real = _slots.Slot.wait
    patch.setattr(_slots.Slot, 'wait', lambda slot: real(slot) if (sys._getframe(1).f_code is _slots.Slots.take.__code__) == before_use else None)


def read_before_its_event(patch):
    waits_for_slots(patch, before_use=True)


def freed_early(patch):
    real = Copies.wait

    def wait(copies, loaded, there):
        stream = real(copies, loaded, there)
        there.untyped_storage().resize_(0)
        return stream
    patch.setattr(Copies, 'wait', wait)


def slot_reused_early(patch):
    waits_for_slots(patch, before_use=False)


class ByAddress(dict):
    """Entries of Activations by addresses, and not by storages."""

    def get(self, key, other=None):
        return super().get(key[1:], other)

    def __setitem__(self, key, entry):
        super().__setitem__(key[1:], entry)

    def __delitem__(self, key):
        super().__delitem__(key[1:])


def found_by_address(patch):
    real = _activations.Activations.__init__

    def init(saved, *args):
        real(saved, *args)
        saved._entries = ByAddress()
    patch.setattr(_activations.Activations, '__init__', init)


@pytest.mark.parametrize('late', range(2), indirect=True)
@pytest.mark.parametrize('twin', [no_wait_event, read_before_it_is_computed, no_record_stream, read_before_its_event, slot_reused_early, found_by_address])
def test_a_fault_of_order_is_noticed(shared_root, late, wanted, twin):
    shared_root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        twin(patch)
        same = is_equal(run(shared_root), wanted)
    gc.collect()
    noticed, late.faults = late.faults, []
    assert not same if twin is found_by_address else 'not ordered' in noticed[0]


@pytest.mark.parametrize('late', range(3), indirect=True)
def test_memory_that_is_freed_early_is_noticed(shared_root, late):
    model = made()
    with offload(model, shared_root), pytest.MonkeyPatch.context() as patch:
        freed_early(patch)
        with pytest.raises(RuntimeError, match=ILLEGAL), torch.no_grad():
            loss_of(model, 0)
    gc.collect()
    noticed, late.faults = late.faults, []
    assert 'use after the end of memory' in noticed[0]


# -- errors of the device --

@pytest.mark.parametrize('at', range(1, 300, 29))
def test_after_memory_ran_out_training_goes_on(shared_root, late, wanted, at):
    late.no_memory_at = at
    model, losses, errors = made(), [], 0
    with offload(model, shared_root, activations=0) as optimizer:
        while len(losses) < STEPS:
            try:
                losses += train(model, optimizer, len(losses), len(losses) + 1)
            except torch.OutOfMemoryError:
                errors += 1
                optimizer.zero_grad()
        assert_equal(wanted[2], values(model))
    assert losses == wanted[1] and errors <= 1
    assert late.allocations > at


def content(root):
    """What the store has of a model: step numbers, values and state."""
    paths = [pathlib.Path(where) / name for top in (root, root / '.hitrain/state') for where, _, names in os.walk(top) for name in names]
    assert any(path.name == 'exp_avg' for path in paths)
    return {**{path: path.read_bytes() for path in paths}, **{word: os.getxattr(root, f'user.hitrain.{word}') for word in ('step', 'durable_step')}}


class Within:
    """A model that has made a step, and how many operations and allocations that took. The next step takes some more or less, as reads ahead go."""

    def __init__(self, root, late):
        self.model = made()
        self.optimizer = offload(self.model, root, activations=0)
        counts = late.operations, late.allocations
        self.losses = train(self.model, self.optimizer, 0, 1)
        self.optimizer.commit()
        self.operations, self.allocations = late.operations - counts[0], late.allocations - counts[1]
        self.values, self.content = values(self.model), content(root)


PARTS = [1 / 50, 1 / 4, 2 / 5, 1 / 2, 3 / 5, 3 / 4]  # of a step


@pytest.mark.parametrize('how', ['abort', 'zero_grad', 'close'])
@pytest.mark.parametrize('part', PARTS, ids='{:.0%}'.format)
def test_an_illegal_access_within_a_step_takes_it_back_whole(shared_root, late, wanted, part, how):
    """The device does nothing more then, and needs not. Another process continues."""
    began = Within(shared_root, late)
    late.illegal_at = late.operations + max(1, int(began.operations * part))
    with pytest.raises(RuntimeError, match=ILLEGAL):
        train(began.model, began.optimizer, 1, 2)
    if how != 'close':
        getattr(began.optimizer, how)()
        assert content(shared_root) == began.content
        assert_equal(began.values, values(began.model))
    began.optimizer.close()
    assert late.is_broken and content(shared_root) == began.content
    assert not used_of(shared_root)
    late.is_broken = False
    with offload(made(), shared_root, activations=0, resume=True) as optimizer:
        model = optimizer._model()
        assert began.losses + train(model, optimizer, 1, STEPS) == wanted[1]
        assert_equal(wanted[2], values(model))


@pytest.mark.parametrize('part', PARTS, ids='{:.0%}'.format)
def test_memory_that_runs_out_within_a_step_takes_it_back_whole(shared_root, late, wanted, part):
    """The device works on, so the same program continues. Reading ahead may find it out, and asks again when the block is needed."""
    began = Within(shared_root, late)
    late.no_memory_at, losses = late.allocations + max(1, int(began.allocations * part)), []
    with contextlib.suppress(torch.OutOfMemoryError):
        losses = train(began.model, began.optimizer, 1, STEPS)
    if not losses:
        began.optimizer.abort()
        assert content(shared_root) == began.content
        assert_equal(began.values, values(began.model))
        losses = train(began.model, began.optimizer, 1, STEPS)
    assert began.losses + losses == wanted[1] and late.allocations > late.no_memory_at
    assert_equal(wanted[2], values(began.model))
    began.optimizer.close()


@pytest.mark.parametrize('block', [2, 0])
def test_a_daemon_that_dies_in_backward_leaves_the_step_before(store, late, block):
    root = store.mountpoint / 'model'
    began = Within(root, late)
    began.model.blocks[block].up.weight.register_hook(lambda grad: store.kill() and None)
    with pytest.raises(OSError):
        train(began.model, began.optimizer, 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', RuntimeWarning)  # the store is gone
        began.optimizer.close()
    store.mount()
    assert content(root) == began.content
    with offload(made(), root, activations=0, resume=True) as optimizer:
        assert optimizer.committed_step == 1
        assert_equal(began.values, values(optimizer._model()))
        other = train(optimizer._model(), optimizer, 1, STEPS)
    plain = made()
    with hitrain.AdamW(plain.named_parameters(), root.with_name('plain'), lr=LR) as optimizer:
        assert train(plain, optimizer, 0, STEPS) == began.losses + other


def test_an_entry_that_cannot_leave_the_device_is_waited_for_by_nobody(shared_store, late, monkeypatch):
    monkeypatch.setattr(_activations, '_WINDOW_BYTES', 512 << 10)
    saved = _activations.Activations(str(shared_store.mountpoint), 2 << 20, set(), late.copies(torch.device('cpu'), 0))
    computed, packed, errors = saved._copies.computed, [], []

    def fail():
        saved._copies.computed = computed
        raise RuntimeError('no event')
    saved._copies.computed = fail

    def pack_all():
        for i in range(6):
            try:
                packed.append((saved.pack(activations.matrix(i)), i))
            except RuntimeError as e:
                errors.append(str(e))
    packing = threading.Thread(target=pack_all, daemon=True)
    packing.start()
    packing.join(20)
    assert not packing.is_alive(), 'it waits for an entry that nobody writes'
    assert errors == ['no event']
    assert [i for _, i in packed] == [0, 1, 3, 4, 5]  # the third one found that the first cannot leave
    assert all(torch.equal(saved.unpack(p), activations.matrix(i)) for p, i in packed)
    packed.clear()
    activations.assert_nothing_is_left(saved)
    saved.close()


def test_a_copy_that_never_ends_does_not_hold_close(shared_store, late, monkeypatch):
    monkeypatch.setattr(_activations, '_CLOSE_SECONDS_MAX', 0.01)
    saved = _activations.Activations(str(shared_store.mountpoint), 0, set(), late.copies(torch.device('cpu'), 0))
    saved._copies._back.is_stalled = True
    packed = saved.pack(activations.matrix())
    with pytest.warns(RuntimeWarning, match='has not ended within 0.01 seconds'):
        saved.close()
    late.released.set()
    saved._thread.join(SECONDS_MAX)
    assert saved._fd == -1 and packed.entry.state == _activations.STORED
