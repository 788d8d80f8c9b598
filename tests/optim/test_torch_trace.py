# SPDX-License-Identifier: Apache-2.0
"""Optimizer.trace(): a time line of a step, of this process, of a device and of the store, and nothing of it afterwards."""
import json
import os

import pytest

from trainer import LR, shared_root, shared_store  # first: it makes the client importable
import torch
import hitrain
from hitrain._device import Copies
if hasattr(torch, 'compiler'):
    from late_device import late
from test_torch_offload import KEEP, assert_equal, loss_of, made, train, values

PHASES = {'load', 'compute', 'gradient', 'update', 'publication'}
UPDATES = 'store: updates begin'
needs_device = pytest.mark.skipif(not hasattr(torch, 'compiler'), reason='device= needs PyTorch 2.1')


class Line:
    """A time line as a reader of Chrome's format has it."""

    def __init__(self, path):
        document = json.loads(path.read_text())
        self.said = document['otherData']['updates of the store']
        lanes = {e['tid']: e['args']['name'] for e in document['traceEvents'] if e['ph'] == 'M'}
        self.events = [dict(e, lane=lanes[e['tid']], end=e['ts'] + e.get('dur', 0)) for e in document['traceEvents'] if e['ph'] != 'M']
        assert all(e['ph'] in 'Xi' and e['pid'] and e['ts'] >= 0 and e.get('dur', 0) >= 0 for e in self.events)

    def of(self, category, lane=''):
        return [e for e in self.events if e['cat'] == category and e['lane'].startswith(lane)]


def watched(optimizer):
    """Objects that a trace may put methods of its own into."""
    things = [optimizer, optimizer._gather, getattr(optimizer, '_residency', None), getattr(optimizer, '_copies', None)]
    return [{name: call for name, call in vars(thing).items() if callable(call)} for thing in things if thing is not None]


def traced(model, optimizer, path, steps=1):
    """The steps after one that is not traced, and before one more."""
    train(model, optimizer, 0, 1)
    before = watched(optimizer)
    optimizer.trace(path, steps)
    assert watched(optimizer) != before
    train(model, optimizer, 1, 1 + steps)
    assert watched(optimizer) == before and optimizer._trace is None
    whole = path.read_bytes()
    train(model, optimizer, 1 + steps, 2 + steps)
    assert path.read_bytes() == whole
    return Line(path)


def test_a_step_of_an_optimizer(shared_root, tmp_path):
    model = made(tied=False)
    with hitrain.AdamW(model.named_parameters(), shared_root, lr=LR) as optimizer:
        line = traced(model, optimizer, tmp_path / 'step.json')
    assert {e['cat'] for e in line.events} == PHASES
    publication, = line.of('publication')
    assert all(e['ts'] >= publication['end'] for e in line.of('load'))
    computed, = line.of('compute')
    assert computed['name'] == 'the program' and computed['end'] <= min(e['ts'] for e in line.of('gradient'))
    size = sum(4 * p.numel() for p in model.parameters())
    assert all(sum(e['args']['bytes'] for e in line.of(phase)) == size for phase in ('gradient', 'load'))
    assert line.of('update', UPDATES) and line.said.startswith('each mark')


def test_a_step_of_which_nothing_is_updated_before_its_end(shared_root, tmp_path):
    model = made(tied=False)
    with hitrain.AdamW(model.named_parameters(), shared_root, lr=LR, max_grad_norm=0.1) as optimizer:
        line = traced(model, optimizer, tmp_path / 'step.json')
    assert sorted(e['name'] for e in line.of('update', UPDATES)) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize('how', ['cpu', pytest.param('device', marks=needs_device)])
def test_a_step_of_an_offloaded_model(shared_root, tmp_path, how, request):
    if how == 'device':
        request.getfixturevalue('late')
    model, plain = made(tied=False), made(tied=False)
    with hitrain.AdamW(plain.named_parameters(), shared_root.with_name('plain'), lr=LR) as optimizer:
        train(plain, optimizer, 0, 3)
    with hitrain.offload(model, shared_root, lr=LR, keep=KEEP, **({'device': 'cpu'} if how == 'device' else {})) as optimizer:
        line = traced(model, optimizer, tmp_path / 'step.json')
        assert_equal(values(plain), values(model))
    assert {e['cat'] for e in line.events} == PHASES
    names = {name for name, _ in model.named_parameters()}
    publication, = line.of('publication')
    assert publication['name'] == 'step 2'
    sent = [e for e in line.of('gradient') if not e['lane'].startswith('device')]
    assert {e['name'] for e in sent} == names == {e['name'] for e in line.of('update', UPDATES)}
    assert all(e['end'] <= publication['ts'] for e in sent)
    unsure = publication['dur']  # the store's clock is known from the end of the step
    assert all(min(s['ts'] for s in sent) - unsure <= e['ts'] <= publication['end'] for e in line.of('update', UPDATES))
    lane = 'device: compute' if how == 'device' else 'MainThread'
    order = [e['name'] for e in line.of('compute') if e['name'].startswith('forward of blocks')]
    assert order == [f'forward of blocks.{i}' for i in range(3)] and {e['lane'] for e in line.of('compute')} == {lane}
    assert {f'backward of blocks.{i}' for i in range(3)} <= {e['name'] for e in line.of('compute')}
    assert {e['name'] for e in line.of('load') if not e['lane'].startswith('device')} <= names
    if how == 'device':
        assert sum(e['args']['bytes'] for e in line.of('gradient', 'device: copies back')) == sum(4 * p.numel() for p in model.parameters())
        assert line.of('load', 'device: copies to')
        assert max(e['ts'] for e in line.of('gradient', 'device')) <= publication['ts']  # a stream may pass the end later


def test_several_steps_and_what_close_leaves(shared_root, tmp_path):
    model = made()
    with hitrain.AdamW(model.named_parameters(), shared_root, lr=LR) as optimizer:
        line = traced(model, optimizer, tmp_path / 'two.json', steps=2)
        assert [e['name'] for e in line.of('publication')] == ['step 2', 'step 3']
        optimizer.trace(tmp_path / 'left.json', 5)
        train(model, optimizer, 4, 5)
        if not os.fork():
            optimizer.close()
            os._exit(0)
        os.wait()
        assert not (tmp_path / 'left.json').read_bytes()
    assert [e['name'] for e in Line(tmp_path / 'left.json').of('publication')] == ['step 5']


def test_a_step_that_is_taken_back_is_none(shared_root, tmp_path):
    model = made()
    with hitrain.AdamW(model.named_parameters(), shared_root, lr=LR) as optimizer:
        optimizer.trace(tmp_path / 'step.json')
        loss_of(model, 0).backward()
        optimizer.send_gradients()
        optimizer.abort()
        train(model, optimizer, 0, 1)
        assert [e['name'] for e in Line(tmp_path / 'step.json').of('publication')] == ['step 1']


def test_what_is_refused(shared_root, tmp_path):
    model = made()
    with hitrain.AdamW(model.named_parameters(), shared_root, lr=LR) as optimizer:
        with pytest.raises(ValueError, match='steps must be at least 1, not 0'):
            optimizer.trace(tmp_path / 'step.json', 0)
        with pytest.raises(FileNotFoundError):
            optimizer.trace(tmp_path / 'no folder/step.json')
        before = watched(optimizer)
        optimizer.trace('/dev/full')
        with pytest.raises(RuntimeError, match='a trace runs already'):
            optimizer.trace(tmp_path / 'step.json')
        with pytest.warns(RuntimeWarning, match='trace in /dev/full is not whole: .*No space left'):
            train(model, optimizer, 0, 1)
        assert optimizer.committed_step == 1 and watched(optimizer) == before


@needs_device
def test_a_device_that_is_broken_costs_the_trace_alone(shared_root, tmp_path, late, monkeypatch):
    model = made()
    with hitrain.offload(model, shared_root, lr=LR, keep=KEEP, device='cpu') as optimizer:
        optimizer.trace(tmp_path / 'step.json')
        loss_of(model, 0).backward()
        assert optimizer._trace._spans and isinstance(optimizer._copies, Copies)
        late.is_broken = True
        with pytest.warns(RuntimeWarning, match='is not whole: CUDA error'):
            optimizer._trace.end()
        late.is_broken = False
        optimizer.step()
