# SPDX-License-Identifier: Apache-2.0
"""The client on a mount with passthrough=: gradients and parameters are copied through mappings, and no byte crosses the mount."""
import errno
import gc
import os
import pathlib
import tempfile

import pytest

from trainer import LR, TOP, copies, equal, number, random_parameters, used_of, wait_for  # first: it makes the client importable
import torch
import hitrain
import test_torch_offload as offloaded
from demo_store import mounted
from hitrain import SGD, AdamW, _root
from hitrain._mapped import is_passed
from hitrain._words import Descriptors, attribute

SHAPES = {'embed': (301, 64), 'q': (64, 33), 'norm': (64,), 'scale': (1,)}
MAPPED = ('embed', 'q')  # the others are smaller than a page


@pytest.fixture(scope='module')
def store():
    with mounted('torch-windows', '64M,passthrough=32M') as s:
        if 'passthrough is off' in s.log_path.read_text():
            pytest.skip('the kernel or the privileges are not there')
        yield s


@pytest.fixture
def root(store):
    return pathlib.Path(tempfile.mkdtemp(dir=store.mountpoint)) / 'model'


def give(params, n, dtype=None):
    for p, other in zip(params.values(), random_parameters(SHAPES, seed=100 + n).values()):
        p.grad = other.detach().to(p.dtype)


def crossed(store):
    now = store.counters()
    return sum(now[f'mount_{kind}_bytes'] for kind in ('param_read', 'param_written', 'grad_written'))


def passes(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return is_passed(fd)
    finally:
        os.close(fd)


def ordinary(rule, steps, **options):
    """The same on a mount without passthrough."""
    with mounted('torch-no-windows') as s:
        params = random_parameters(SHAPES)
        with rule(params.items(), s.mountpoint / 'model', lr=LR, **options) as optimizer:
            for n in range(steps):
                give(params, n)
                optimizer.step()
        return params


@pytest.mark.parametrize('rule, options', [(AdamW, {}), (AdamW, {'param_dtype': torch.bfloat16, 'max_grad_norm': 1.0}),
                                           (SGD, {'param_dtype': torch.bfloat16, 'grad_dtype': torch.float32, 'overlap': True})])
def test_no_byte_of_a_mapped_parameter_crosses_the_mount(store, root, monkeypatch, rule, options):
    params, calls = random_parameters(SHAPES), []
    with rule(params.items(), root, lr=LR, **options) as optimizer:
        wait_for(lambda: all(passes(root / n) for n in MAPPED), 'the daemon has heard that the new files are closed')
        for n in range(4):
            give(params, n)
            optimizer.step()
            if n == 1:
                before = crossed(store)
                for name in ('open', 'pwrite', 'preadv', 'getxattr'):
                    real = getattr(os, name)
                    monkeypatch.setattr(os, name, lambda *a, name=name, real=real, **kw: (calls.append(name), real(*a, **kw))[1])
        monkeypatch.undo()
        small = sum(params[n].numel() for n in SHAPES if n not in MAPPED)
        assert crossed(store) - before <= 2 * 8 * small + 1000
        assert [calls.count(name) for name in ('open', 'pwrite', 'preadv')] == [0, 2, 2]  # the small ones go together
        assert optimizer.committed_step == 4
    assert equal(params, ordinary(rule, 4, **options))
    again = random_parameters(SHAPES, seed=1)
    with rule(again.items(), root, lr=LR, resume=True, **options):
        assert equal(again, params)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_values_that_the_user_changes_count(root, dtype):
    """Through .data, which moves no version. Between steps they go to the file; after a gradient was sent it is too late."""
    params = random_parameters(SHAPES)
    with AdamW(params.items(), root, lr=LR, accumulate=2, param_dtype=dtype) as optimizer:
        for n in range(2):
            for _ in range(2):
                give(params, n)
                optimizer.send_gradients()
            optimizer.step()
        params['embed'].data[300, 63] = 7.0
        give(params, 2)
        optimizer.send_gradients()
        file = torch.frombuffer(bytearray((root / 'embed').read_bytes()), dtype=dtype)
        assert file[-1] == 7.0 and torch.equal(file.float(), params['embed'].detach().view(-1))
        params['q'].data[0, 0] = -7.0
        with pytest.raises(RuntimeError, match='the parameter q was changed after'):
            optimizer.step()
        assert number(root, 'step') == number(root, 'durable_step') == 2 and number(root, 'step_open') == 0


def test_a_traceback_keeps_no_mapping(store, root):
    params = random_parameters(SHAPES)
    with AdamW(params.items(), root, lr=LR) as optimizer:
        for n in range(2):
            give(params, n)
            optimizer.step()
        give(params, 2)
        f = optimizer._files[params['embed']]
        f.gradient = [params['embed'].grad].pop  # raises when it is called for the second time, while the window is in use
        with pytest.raises(IndexError) as kept:
            optimizer.step()
        assert f._window.content is not None
        before = copies(params)
    assert not used_of(root)
    assert any('window' in frame.frame.f_locals for frame in kept.traceback) and equal(before, params)


def test_views_of_an_offloaded_model_have_its_values_after_close(store, root):
    """The memory was that of the store."""
    model = offloaded.made()
    optimizer = hitrain.offload(model, root, keep=offloaded.KEEP, lr=LR)
    offloaded.train(model, optimizer, 0, 2)
    view = model.embedding.weight.detach()[5:]
    with torch.no_grad():
        view[0] = 3.0
    wanted = offloaded.values(model)
    optimizer.close()
    assert not used_of(root)
    with torch.no_grad():
        view[1] = 4.0  # which is the process's own
    file = torch.frombuffer(bytearray((root / 'embedding.weight').read_bytes()), dtype=torch.float32).view(-1, offloaded.WIDTH)
    assert torch.equal(file, wanted['embedding.weight'])
    assert (model.embedding.weight[6] == 4.0).all() and torch.equal(model.embedding.weight[7:], file[7:])


@pytest.mark.parametrize('error', [OSError(errno.EIO, 'of the test'), KeyboardInterrupt()])
def test_nothing_of_a_failed_step_is_in_the_next(root, monkeypatch, error):
    params, other = random_parameters(SHAPES), random_parameters(SHAPES)
    with SGD(params.items(), root, lr=1.0) as optimizer:
        for n in range(2):
            give(params, n)
            optimizer.step()
        before, real, left = copies(params), _root.Root.apply, [2]

        def fails(self, names):
            left[0] -= 1
            if left[0] == 0:
                raise error
            real(self, names)
        monkeypatch.setattr(_root.Root, 'apply', fails)
        give(params, 9)
        with pytest.raises(type(error)):
            optimizer.step()
        monkeypatch.undo()
        assert equal(before, params) and number(root, 'step_open') == 0
        give(params, 2)
        params['q'].grad = None
        optimizer.step()
        for n, p in random_parameters(SHAPES, seed=102).items():
            assert torch.equal(params[n], before[n] - p if n != 'q' else before[n])
        optimizer.commit()
    again = {n: torch.nn.Parameter(torch.zeros_like(p)) for n, p in other.items()}
    with SGD(again.items(), root, lr=1.0, resume=True):
        assert equal(again, params)


def test_an_abort_brings_back_the_durable_values(root):
    """Also where it takes away a file that was never committed, whose mapping goes on to show what it was."""
    params, late = random_parameters(SHAPES), torch.nn.Parameter(torch.full((50, 50), 3.0))
    with SGD(params.items(), root, lr=1.0, durable_every=100) as optimizer:
        before = copies(params)
        optimizer.add_param_group({'params': [('late', late)]})
        for n in range(3):
            give(params, n)
            late.grad = torch.ones(50, 50)
            optimizer.step()
        assert (late == 0).all()
        optimizer.abort()
        assert equal(before, params) and (late == 0).all()  # made anew, with its values
        for n in range(2):
            give(params, n)
            late.grad = torch.ones(50, 50)
            optimizer.step()
        optimizer.commit()
        assert (late == -2).all() and bytes(late.detach().numpy()) == (root / 'late').read_bytes()
        assert all(bytes(p.detach().numpy()) == (root / n).read_bytes() for n, p in params.items())


def test_a_used_up_share_leaves_calls(store):
    params = {f'p{i}': torch.nn.Parameter(torch.full((1 << 20,), float(i))) for i in range(5)}
    root = pathlib.Path(tempfile.mkdtemp(dir=store.mountpoint)) / 'model'
    with SGD(params.items(), root, lr=1.0, durable_every=100) as optimizer:
        for _ in range(5):
            for p in params.values():
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert all((p == i - 5).all() for i, p in enumerate(params.values()))
        mapped = [f._values.content is not None for f in optimizer._parameter_files()]
        assert any(mapped) and not all(mapped)


def logged(root):
    """Steps that are logged, of two trainers one after the other."""
    params, seen = random_parameters(SHAPES), []
    for resume in (False, True):
        with AdamW(params.items(), root, lr=LR, durable_every=8, redo=True, resume=resume) as optimizer:
            for n in range(6):
                give(params, n)
                optimizer.step()
                seen.append(int(attribute(root, 'stats').split('\nlogged_steps=')[1].split()[0]))
    return seen


def test_logged_steps_stay_logged(root):
    """A descriptor that might store through a mapping would make each of them a full step."""
    with mounted('torch-no-windows') as s:
        want = logged(s.mountpoint / 'model')
    assert logged(root) == want and max(want) > 3


def test_what_another_program_writes_between_steps_counts(root):
    """As on other mounts: the tensor was not changed, so the file's values stay, and the tensor takes them with the step."""
    params = random_parameters(SHAPES)
    with SGD(params.items(), root, lr=1.0) as optimizer:
        for n in range(3):
            give(params, n)
            optimizer.step()
        for name in SHAPES:
            values = torch.full_like(params[name], 5.0).detach()
            with open(os.open(root / name, os.O_WRONLY), 'wb', 0) as f:
                f.write(bytes(values.numpy()))
        give(params, 3)
        optimizer.step()
        assert all(torch.equal(p, 5.0 - p.grad) for p in params.values())
        params['q'].data.fill_(9.0)  # and a change of the tensor counts all the same
        give(params, 4)
        optimizer.step()
        assert torch.equal(params['q'], 9.0 - params['q'].grad)


def test_the_file_of_bench_gpu_is_handed_out(store, monkeypatch):
    monkeypatch.syspath_prepend(str(TOP / 'bench'))
    import gpu
    mapped, passed = gpu.file_of_store(store.mountpoint, 3 << 20)
    assert passed and mapped.numel() == 3 << 20 and not mapped.any()


@pytest.mark.parametrize('rule', ['adamw', 'sgd'])
def test_parameters_of_an_offloaded_model_are_the_memory_of_the_store(store, root, rule):
    """New ones, too. What a program stores in them counts, and an abort takes it back."""
    model, alone = offloaded.made(), offloaded.made()
    with mounted('torch-no-windows') as s:
        with {'adamw': AdamW, 'sgd': SGD}[rule](alone.named_parameters(), s.mountpoint / 'model', lr=LR) as optimizer:
            losses = offloaded.train(alone, optimizer, 0, 4)
    before = store.counters()
    with hitrain.offload(model, root, rule, keep=offloaded.KEEP, lr=LR) as optimizer:
        assert offloaded.train(model, optimizer, 0, 2) == losses[:2]
        was = offloaded.values(model)
        with torch.no_grad():
            model.norm.weight.add_(1.0)
        optimizer.commit()
        assert torch.equal(torch.frombuffer(bytearray((root / 'norm.weight').read_bytes()), dtype=torch.float32), was['norm.weight'] + 1.0)
        with torch.no_grad():
            model.norm.weight.copy_(was['norm.weight'])
        optimizer.commit()
        with torch.no_grad():
            model.head.bias.fill_(7.0)
        optimizer.abort()
        offloaded.assert_equal(offloaded.values(model), was)
        assert offloaded.train(model, optimizer, 2, 4) == losses[2:]
        offloaded.assert_equal(offloaded.values(model), offloaded.values(alone))
        after = store.counters()
        assert after['passthrough_opens'] - before['passthrough_opens'] >= len(list(model.parameters()))
        assert after['mount_param_read_bytes'] == before['mount_param_read_bytes']
    del model, optimizer
    gc.collect()


def test_an_offloaded_model_opens_its_files_once(store, root, monkeypatch):
    """Blocks are loaded and let go without opens, also where a process may have few descriptors."""
    monkeypatch.setattr(Descriptors, 'most', lambda: 1)
    model, opened, real = offloaded.made(), [], os.open

    def count(path, *args, **options):
        opened.append(os.fspath(path))
        return real(path, *args, **options)
    with hitrain.offload(model, root, keep=offloaded.KEEP, lr=LR) as optimizer:
        offloaded.train(model, optimizer, 0, 2)
        before, loaded = store.counters(), optimizer.figures()['loaded_bytes']
        monkeypatch.setattr(os, 'open', count)
        offloaded.train(model, optimizer, 2, 4)
        monkeypatch.undo()
        after = store.counters()
        assert optimizer.figures()['loaded_bytes'] - loaded > 2 * offloaded.KEEP
        files = {str(root / name) for name, _ in model.named_parameters()}
        assert opened and not files & set(opened)
        assert after['passthrough_opens'] == before['passthrough_opens']
    del model, optimizer
    gc.collect()
