# SPDX-License-Identifier: Apache-2.0
"""A model that its trainer cannot have any more: the error names the cause, and the way on."""
import os
import pathlib
import shutil
import subprocess

import pytest

from trainer import LR, TOP, give_gradients, random_parameters, shared_root, shared_store, store  # first: it makes the client importable
import hitrain
from hitrain._daemon import detach
from hitrain._root import DEAD, ELSEWHERE, MOVED

BIN = pathlib.Path(os.environ.get('HITRAIN_BIN', TOP / 'build/bin'))
SHAPES = {'w': (3000,), 'b': (50,)}
GONE = {
    'deleted': lambda root: shutil.rmtree(root),
    'renamed': lambda root: root.rename(root.parent / 'other'),
    'another': lambda root: (shutil.rmtree(root), root.mkdir()),
}


@pytest.mark.parametrize('options', [{}, {'redo': True, 'durable_every': 4}, {'async_step': True}, {'pack': 65536}], ids=str)
@pytest.mark.parametrize('how', GONE)
def test_a_directory_that_goes_is_named(shared_root, how, options):
    params = random_parameters(SHAPES)
    optimizer = hitrain.AdamW(params.items(), shared_root, lr=LR, **options)

    def step(number):
        give_gradients(params, number)
        optimizer.step()
    step(0)
    GONE[how](shared_root)
    for call in lambda: step(1), optimizer.abort, lambda: optimizer.read_state(params['w'], 'exp_avg'):
        with pytest.raises(OSError, match=MOVED):
            call()
    optimizer.close()


def test_a_store_that_was_unmounted_is_named(store):
    params = random_parameters(SHAPES)
    optimizer = hitrain.AdamW(params.items(), store.mountpoint / 'model', lr=LR)
    give_gradients(params, 0)
    optimizer.step()
    detach(store.mountpoint)
    with pytest.raises(OSError, match=ELSEWHERE):
        optimizer.step()
    optimizer.close()
    store.close()


@pytest.mark.parametrize('resume', [False, True])
def test_a_daemon_that_is_gone_is_named_to_the_next_trainer(store, resume):
    store.kill()
    with pytest.raises(OSError, match=DEAD):
        hitrain.AdamW(random_parameters(SHAPES).items(), store.mountpoint / 'model', lr=LR, resume=resume)


def test_a_damaged_gradient_is_named(store):
    params = random_parameters({'w': (200_000,)})
    root = store.mountpoint / 'model'
    optimizer = hitrain.AdamW(params.items(), root, lr=LR, redo=True, durable_every=100)
    for step in range(5):
        give_gradients(params, step)
        if step == 3:
            sent = params['w'].grad.numpy()[1000:1016].tobytes()
        optimizer.step()
        if not step:
            optimizer.snapshot('base')
    store.kill()
    optimizer.close()
    at, whole = -1, store.image.read_bytes()
    with open(store.image, 'r+b') as image:
        while (at := whole.find(sent, at + 1)) >= 0:
            image.seek(at)
            image.write(bytes(16))
    store.mount()
    resume = lambda: hitrain.AdamW(params.items(), root, lr=LR, redo=True, durable_every=100, resume=True)  # noqa: E731
    with pytest.raises(OSError, match='step 4 cannot be computed again .* hitrain-fsck -y .*'):
        resume()
    subprocess.run([BIN / 'hitrainctl', 'rollback', root, 'base'], check=True)
    with resume() as optimizer:
        assert optimizer.committed_step == 1
