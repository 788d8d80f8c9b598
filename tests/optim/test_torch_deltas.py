# SPDX-License-Identifier: Apache-2.0
"""Deltas for inference: a reader follows an optimizer of the client by hitrain.deltas, with packs, skipped steps and steps that are taken back."""
import os
import threading

import pytest

from trainer import LR, equal, random_parameters, shared_root, shared_store  # first: it makes the client importable
import torch
import hitrain
from hitrain import SGD, AdamW

SHAPES = {'a.weight': (30, 20), 'large': (100, 100), 'a.bias': (20,), 'scale': (), 'line': (1, 7, 1)}
OPTIONS = {'plain': {}, 'bf16 files': {'param_dtype': torch.bfloat16}, 'packs': {'pack': 4096}, 'bf16 of f32': {'delta_dtype': torch.bfloat16}}


class Reader:
    """An engine with tensors of its own, which knows the files by their names."""

    def __init__(self, root, model, dtype=None):
        self.root, self.model, self.at, self.wholes = root, model, None, 0
        self.params = {name: torch.zeros(p.shape, dtype=dtype or p.dtype) for name, p in model.items()}

    def follow(self):
        for self.at in hitrain.deltas(self.root, since=self.at):
            if self.at.whole:
                self.wholes += 1
                for name, p in self.model.items():
                    self.params[name].copy_(p)
            else:
                self.at.apply(self.params)

    def check(self):
        self.follow()
        for name, p in self.model.items():
            assert torch.equal(self.params[name], p.to(self.params[name].dtype)), name


def give(params, step):
    for i, p in enumerate(params.values()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + i)).to(p.dtype)


@pytest.mark.parametrize('kind', OPTIONS)
def test_a_reader_follows_a_trainer(shared_root, kind):
    params = random_parameters(SHAPES)
    dtype = None if kind == 'plain' or kind == 'packs' else torch.bfloat16
    with AdamW(params.items(), shared_root, lr=1e-4, deltas=4, delta_max=1, **OPTIONS[kind]) as optimizer:
        reader = Reader(shared_root, params, dtype)
        for step in range(12):
            give(params, step)
            optimizer.step()
            if step % 3:
                reader.check()
        assert reader.wholes == 1 and reader.at.step == 12 and set(reader.at.changes) <= set(SHAPES)
        assert list(hitrain.deltas(shared_root, since=reader.at)) == []
        assert [d.step for d in hitrain.deltas(shared_root, since=9, lineage=reader.at.lineage)] == [10, 11, 12]
        for step in range(12, 20):  # more than are kept
            give(params, step)
            optimizer.step()
        reader.check()
        assert reader.wholes == 2


def test_what_a_trainer_does_outside_its_steps_is_not_missed(shared_root):
    params = random_parameters(SHAPES)
    with SGD(params.items(), shared_root, lr=LR, deltas=128, delta_max=1, skip_nonfinite=True, retain=3) as optimizer:
        reader = Reader(shared_root, params)
        for step in range(3):
            give(params, step)
            optimizer.step()
            reader.check()
        assert reader.wholes == 1
        give(params, 3)
        params['large'].grad[3, 4] = float('inf')
        optimizer.step()
        before = reader.at
        reader.check()
        assert reader.at.base_step == before.step and not reader.at.changes and not reader.at.whole
        with torch.no_grad():
            params['large'].clamp_(-0.01, 0.01)
        give(params, 4)
        optimizer.step()
        reader.check()
        assert reader.wholes == 2
        give(params, 5)
        optimizer.send_gradients()
        optimizer.abort()
        give(params, 6)
        optimizer.step()
        reader.check()
        assert reader.wholes == 3
        give(params, 7)
        optimizer.step()
        reader.check()
        assert reader.wholes == 3


def test_a_model_that_is_read_while_steps_run_is_right_after_its_deltas(shared_root):
    """The reader takes files of several steps, and the deltas since it began."""
    params = random_parameters(SHAPES)
    stop = threading.Event()
    with AdamW(params.items(), shared_root, lr=LR, deltas=128, delta_max=1) as optimizer:
        give(params, 0)
        optimizer.step()

        def train():
            for step in range(1, 60):
                give(params, step)
                optimizer.step()

        thread = threading.Thread(target=train)
        mine = {}
        thread.start()
        at, = hitrain.deltas(shared_root)
        assert at.whole and at.step >= 1
        for name, shape in SHAPES.items():
            mine[name] = torch.frombuffer(bytearray((shared_root / name).read_bytes()), dtype=torch.float32).reshape(shape)
        thread.join()
        while True:
            more = list(hitrain.deltas(shared_root, since=at))
            if not more:
                break
            for at in more:
                assert not at.whole
                at.apply(mine)
        assert at.step == 60 and equal(mine, params)


def test_a_reader_of_an_open_step_takes_the_model_again_after_an_abort(shared_root):
    """Also where no step has a delta, before the first step and after an abort: what was read is a mixture of two steps, or of none."""
    params = random_parameters(SHAPES)
    with SGD(params.items(), shared_root, lr=LR, deltas=4, delta_max=1, durable_every=1) as optimizer:
        names = {name: shared_root / name for name in SHAPES}
        before = {name: path.read_bytes() for name, path in names.items()}
        for number in range(3):
            give(params, number)
            optimizer.send_gradients()
            at, = hitrain.deltas(shared_root)
            mixed = {name: path.read_bytes() for name, path in names.items()}
            assert at.whole and at.step == 0 and all(mixed[name] != before[name] for name in names)
            assert list(hitrain.deltas(shared_root, since=at)) == []
            optimizer.abort()
            again, = hitrain.deltas(shared_root, since=at)
            assert again.whole and again.step == 0 and {name: path.read_bytes() for name, path in names.items()} == before
            assert list(hitrain.deltas(shared_root, since=again)) == []


def test_wrong_uses_are_refused_with_a_reason(shared_root):
    params = random_parameters(SHAPES)
    for wrong in {'deltas': -1}, {'deltas': 129}, {'delta_max': 2.0}, {'delta_dtype': torch.float16}:
        with pytest.raises(ValueError, match='deltas'):
            SGD(params.items(), shared_root, lr=LR, **wrong)
    with SGD(params.items(), shared_root, lr=LR) as optimizer:
        with pytest.raises(ValueError, match='delta=on'):
            hitrain.deltas(shared_root)
        del optimizer
    with SGD(params.items(), shared_root, lr=LR, deltas=2, delta_max=1, resume=True) as optimizer:
        first, = hitrain.deltas(shared_root)
        assert first.whole and not first.changes
        assert list(hitrain.deltas(shared_root, since=first)) == []
        with pytest.raises(ValueError, match='lineage='):
            hitrain.deltas(shared_root, since=1)
        for step in range(3):
            give(params, step)
            optimizer.step()
        assert 'delta=on delta_keep=2' in os.getxattr(shared_root, 'user.hitrain.optimizer').decode()
        at, = hitrain.deltas(shared_root)
        with pytest.raises(ValueError, match='load the whole model'):
            at.apply(params)
        give(params, 4)
        optimizer.step()
        after, = hitrain.deltas(shared_root, since=at)
        mine = {name: p.detach().clone() for name, p in params.items()}
        missing = {name: p for name, p in mine.items() if name != 'line'}
        kept = {name: p.clone() for name, p in mine.items()}
        with pytest.raises(KeyError):
            after.apply(missing)
        mine['large'] = mine['large'][:50]
        with pytest.raises(ValueError, match='shape'):
            after.apply(mine)
        assert equal(missing, {n: p for n, p in kept.items() if n != 'line'})
        turned = {**kept, 'large': torch.zeros(100, 100).t().copy_(kept['large'])}
        turned['a.weight'] = torch.zeros(20, 30).t()
        after.apply(turned)  # also not contiguous
        assert torch.equal(turned['a.weight'].reshape(-1)[after.changes['a.weight'].indices.long()], after.changes['a.weight'].values)


def test_the_safetensors_package_reads_a_delta(shared_root):
    numpy = pytest.importorskip('safetensors.numpy')
    params = random_parameters(SHAPES)
    with AdamW(params.items(), shared_root, lr=LR, deltas=3, delta_max=1) as optimizer:
        for step in range(3):
            give(params, step)
            optimizer.step()
        path = shared_root / '.hitrain/delta/3'
        found = numpy.load_file(path)
        at, = hitrain.deltas(shared_root, since=2, lineage=next(hitrain.deltas(shared_root)).lineage)
        assert set(found) == {f'{name}.{part}' for name in at.changes for part in ('indices', 'values')}
        for name, change in at.changes.items():
            assert (found[f'{name}.indices'] == change.indices.numpy()).all() and (found[f'{name}.values'] == change.values.numpy()).all()
        import safetensors
        with safetensors.safe_open(path, 'pt') as f:
            assert f.metadata()['step'] == '3' and f.metadata()['base_step'] == '2'
            assert torch.equal(f.get_tensor('large.values'), at.changes['large'].values)
