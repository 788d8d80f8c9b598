# SPDX-License-Identifier: Apache-2.0
"""A trainer or a daemon that is killed at any request: the trainer is started again, and ends with the bits of a run without the kill."""
import contextlib
import json
import os
import re

import pytest

from trainer import TOP, equal, give_gradients, shared_root, shared_store, store  # first: it makes the client importable
import torch
import hitrain
from hitrain import SGD, Adagrad, AdamW, Lion, _making, _settings
from hitrain._words import attribute
from hitrain.checkpoint import import_safetensors
from killed import digest, parameters, same_after_kills

torch.set_num_threads(1)  # the children are forks

STEPS, KILLED_IN = 3, 1


def of_groups(word):
    def put(optimizer, value):
        for group in optimizer.param_groups:
            group[word] = value
    return put


def of_last_group(word):
    def put(optimizer, value):
        optimizer.param_groups[-1][word] = value
    return put


def of_optimizer(word):
    def put(optimizer, value):
        setattr(optimizer, word, value)
    return put


# What the optimizer is made with, how a step sets the word, its value in the first step, and in the second one: as it is made.
WORDS = {
    'lr': (AdamW, {}, of_groups('lr'), 1e-2, 1e-3),
    'betas': (AdamW, {}, of_groups('betas'), (0.8, 0.9), (0.9, 0.999)),
    'eps': (AdamW, {}, of_groups('eps'), 1e-2, 1e-8),
    'weight_decay': (AdamW, {}, of_groups('weight_decay'), 0.3, 1e-2),
    'maximize': (Lion, {}, of_groups('maximize'), True, False),
    'momentum': (SGD, {'lr': 0.1, 'momentum': 0.5}, of_groups('momentum'), 0.9, 0.5),
    'dampening': (SGD, {'lr': 0.1, 'momentum': 0.5}, of_groups('dampening'), 0.4, 0.0),
    'nesterov': (SGD, {'lr': 0.1, 'momentum': 0.5}, of_groups('nesterov'), True, False),
    'lr_decay': (Adagrad, {}, of_groups('lr_decay'), 0.5, 0.0),
    'lr of a file': (AdamW, {}, of_last_group('lr'), 1e-2, 1e-3),
    'lr in a pack': (AdamW, {'pack': 4096}, of_last_group('lr'), 1e-2, 1e-3),
    'max_grad_norm': (AdamW, {}, of_optimizer('max_grad_norm'), 0.5, 0.0),
    'grad_scale': (SGD, {'lr': 0.1}, of_optimizer('grad_scale'), 4.0, 1.0),
    'skip_nonfinite': (AdamW, {}, of_optimizer('skip_nonfinite'), True, False),
    'accumulate': (SGD, {'lr': 0.1}, of_optimizer('accumulate'), 3, 1),
    'accumulate_mode': (SGD, {'lr': 0.1, 'accumulate': 4}, of_optimizer('accumulate_mode'), 'mean', 'sum'),
    'durable_every': (AdamW, {'durable_every': 2}, of_optimizer('durable_every'), 3, 2),
    'redo': (AdamW, {'durable_every': 2}, of_optimizer('redo'), True, False),
    'redo_keep': (AdamW, {'durable_every': 2, 'redo': True}, of_optimizer('redo_keep'), 3, 0),
    'retain': (AdamW, {}, of_optimizer('retain'), 2, 0),
    'retain_every': (AdamW, {'retain': 2}, of_optimizer('retain_every'), 3, 1),
}


def optimizer_of(make, root, resume, options):
    params = parameters()
    groups = [{'params': [(n, params[n]) for n in names]} for names in (('a', 'c'), ('b',))]
    return params, make(groups, root, resume=resume, **options)


def steps_of(optimizer, params, put, first, second, requests, grad=1.0):
    done = optimizer.state_dict()['hitrain']['step']
    for step in range(done, STEPS):
        put(optimizer, second if step == KILLED_IN else first)
        give_gradients(params, step)
        if step == KILLED_IN:
            params['a'].grad[1] = grad
            requests.start()
        optimizer.step()
        requests.stop()
        assert attribute(optimizer.root, 'optimizer').endswith(_settings.words_of_root(optimizer))


def roots_in(folder):
    return lambda n: os.path.join(folder, f'model{n}')


@pytest.mark.parametrize('word', WORDS)
def test_a_trainer_is_killed_at_each_request_of_a_step(shared_store, shared_root, tmp_path, word):
    make, options, put, first, second = WORDS[word]

    def script(root, requests, again):
        params, optimizer = optimizer_of(make, root, again, options)
        steps_of(optimizer, params, put, first, second, requests, float('inf') if word == 'skip_nonfinite' else 1.0)
        said = digest(root, optimizer, params)
        optimizer.close()
        return said
    assert same_after_kills(shared_store, roots_in(shared_root.parent), script, tmp_path / 'said') > 8


@pytest.mark.parametrize('word', ['lr', 'redo'])
def test_the_daemon_is_killed_at_each_request_of_a_step(store, tmp_path, word):
    make, options, put, first, second = WORDS[word]

    def script(root, requests, again):
        params, optimizer = optimizer_of(make, root, again, options)
        steps_of(optimizer, params, put, first, second, requests)
        said = digest(root, optimizer, params)
        optimizer.close()
        return said
    assert same_after_kills(store, roots_in(store.mountpoint), script, tmp_path / 'said', daemon=True) > 8


# ------------------------------------------------------------ half-made models

RESUMES = {'resumed': os.path.exists, 'anew': lambda root: False}


def make_and_train(options, resume):
    """Requests count while the model is made, and are those of the constructor."""
    def script(root, requests, again):
        requests.start()
        params, optimizer = optimizer_of(AdamW, root, again and resume(root), options)
        requests.stop()
        for step in range(optimizer.state_dict()['hitrain']['step'], 2):
            give_gradients(params, step)
            optimizer.step()
        said = digest(root, optimizer, params)
        optimizer.close()
        return said
    return script


@pytest.mark.parametrize('resume', RESUMES.values(), ids=RESUMES)
@pytest.mark.parametrize('options', [{}, {'pack': 4096, 'retain': 1, 'grad_dtype': torch.bfloat16}], ids=['plain', 'pack'])
def test_a_trainer_is_killed_at_each_request_of_a_constructor(shared_store, shared_root, tmp_path, options, resume):
    script = make_and_train(options, resume)
    assert same_after_kills(shared_store, roots_in(shared_root.parent), script, tmp_path / 'said') > 20


@pytest.mark.parametrize('resume', RESUMES.values(), ids=RESUMES)
def test_an_offloaded_model_whose_making_was_killed_has_its_first_values(shared_store, shared_root, tmp_path, resume):
    """It was empty, and so the store alone had values. These did not become durable."""
    values = {'weight': torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), 'bias': torch.randn(5, generator=torch.Generator().manual_seed(2))}

    def script(root, requests, again):
        with hitrain.init_empty():
            model = torch.nn.Linear(3, 5)
        requests.start()
        optimizer = hitrain.offload(model, root, keep=1 << 20, weights=values, resume=again and resume(root))
        requests.stop()
        assert equal(dict(model.named_parameters()), values)
        for step in range(optimizer.state_dict()['hitrain']['step'], 2):
            model(torch.full((2, 3), step + 1.0)).square().sum().backward()
            optimizer.step()
        said = digest(root, optimizer, dict(model.named_parameters()))
        optimizer.close()
        return said
    assert same_after_kills(shared_store, roots_in(shared_root.parent), script, tmp_path / 'said') > 20


@pytest.mark.parametrize('resume', RESUMES.values(), ids=RESUMES)
def test_the_daemon_is_killed_at_each_request_of_a_constructor(store, tmp_path, resume):
    script = make_and_train({}, resume)
    assert same_after_kills(store, roots_in(store.mountpoint), script, tmp_path / 'said', daemon=True) > 20

@pytest.mark.parametrize('daemon', [False, True], ids=['trainer', 'daemon'])
def test_an_import_is_killed_at_each_request(store, tmp_path, daemon):
    """A model that it did not import to its end is none: no trainer begins with zeros, or with values of its own."""
    values = parameters()
    lines = {n: {'dtype': 'F32', 'shape': [p.numel()], 'data_offsets': [0, 0]} for n, p in values.items()}
    end = 0
    for n, p in values.items():
        lines[n]['data_offsets'], end = [end, end + 4 * p.numel()], end + 4 * p.numel()
    head = json.dumps(lines).encode()
    file = tmp_path / 'model.safetensors'
    file.write_bytes(len(head).to_bytes(8, 'little') + head + b''.join(p.detach().numpy().tobytes() for p in values.values()))

    def script(root, requests, again):
        zeros = {n: torch.nn.Parameter(torch.zeros_like(p)) for n, p in values.items()}
        if again:
            with contextlib.suppress(FileNotFoundError), AdamW(zeros.items(), root, resume=True):
                assert equal(zeros, values)
                return 'whole'
        requests.start()
        import_safetensors(str(file), root)
        requests.stop()
        with AdamW(zeros.items(), root, resume=True):
            assert equal(zeros, values)
        return 'whole'
    assert same_after_kills(store, roots_in(store.mountpoint), script, tmp_path / 'said', daemon) > 20


def test_a_model_that_others_made_is_not_made_anew(shared_store, shared_root):
    """An empty directory, a copy, a model of another program whose files are not committed: the error names the way out."""
    params = parameters()
    with pytest.raises(FileNotFoundError, match='no model to resume: without resume=True one is made'):
        AdamW(params.items(), shared_root, resume=True)
    shared_root.mkdir()
    with pytest.raises(FileNotFoundError, match='no model to resume, the directory is empty: without resume=True'):
        AdamW(params.items(), shared_root, resume=True)
    (shared_root / 'a').write_bytes(b'1234')
    with pytest.raises(OSError, match='no model with a step.*hitrainctl clone'):
        AdamW(params.items(), shared_root, resume=True)
    with pytest.raises(FileExistsError, match='is not empty, and no model.*hitrainctl clone.*hitrainctl archive'):
        AdamW(params.items(), shared_root)
    (shared_root / 'a').unlink()
    os.setxattr(shared_root, 'user.hitrain.optimizer', b'adamw')
    for name, p in params.items():
        (shared_root / name).write_bytes(p.detach().numpy().tobytes())
        os.setxattr(shared_root / name, 'user.hitrain.dtype', b'f32')
        os.setxattr(shared_root / name, 'user.hitrain.shape', str(p.numel()).encode())
    with pytest.raises(FileExistsError, match='pass resume=True to continue the model that it holds, which is at step 0'):
        AdamW(params.items(), shared_root)
    taken = {name: torch.nn.Parameter(torch.zeros_like(p)) for name, p in params.items()}
    with AdamW(taken.items(), shared_root, resume=True):
        assert equal(taken, params)


# ----------------------------------------------------------------- known words

def read_again(words, root):
    """All that is known is what the store has."""
    for path in (str(root), *(str(root / name) for name in ('a', 'b', 'c'))):
        for word in ('optimizer', 'grad_dtype'):
            assert words.read(path, word) == attribute(path, word), (path, word)


def claim_after_others(optimizer):
    optimizer._root.close()
    os.setxattr(optimizer.root, 'user.hitrain.optimizer', b'adamw lr=0.75')
    os.setxattr(os.path.join(optimizer.root, 'a'), 'user.hitrain.optimizer', b'adamw lr=0.25')
    optimizer._root.claim()


COMMANDS = {
    'commit': None, 'step': lambda o, a: (o.send_gradient(a), o._root.command('step')), 'step async': lambda o, a: (o.send_gradient(a), o._root.command('step async')),
    'prepare': lambda o, a: (o.send_gradient(a), o._root.command('prepare')), 'abort': None, 'wait': None, 'reset a': None, 'drop a': lambda o, a: (o.send_gradient(a), o._root.command('drop a')), 'snapshot x': None,
    'rollback kept': None, 'forget kept': None, 'claim': lambda o, a: claim_after_others(o), 'unclaim': lambda o, a: o._root.command('unclaim'),
}


@pytest.mark.parametrize('command', COMMANDS)
def test_known_words_are_those_of_the_store_after_each_command(shared_root, command):
    params = parameters()
    with AdamW(params.items(), shared_root, max_grad_norm=9.0) as optimizer:  # a gradient can be dropped
        give_gradients(params, 0)
        optimizer.step()
        optimizer.snapshot('kept')
        known, path = optimizer._root.known, os.path.join(shared_root, 'a')
        known.put(path, 'optimizer', 'adamw lr=0.5')
        known.put(str(shared_root), 'optimizer', 'adamw lr=0.125')
        known.put(path, 'grad_dtype', 'bf16' if 'step' not in command and 'drop' not in command else 'f32')
        read_again(known, shared_root)
        (COMMANDS[command] or (lambda o, a: o._root.command(command)))(optimizer, params['a'])
        read_again(known, shared_root)
        if command == 'step async':
            optimizer._root.command('wait')


@pytest.mark.parametrize('command', ['abort', 'rollback kept', 'claim'])
def test_words_that_outlive_such_a_command_are_noticed(shared_root, monkeypatch, command):
    monkeypatch.setattr(_settings, 'FORGETTING', {})
    with pytest.raises(AssertionError, match='optimizer'):
        test_known_words_are_those_of_the_store_after_each_command(shared_root, command)


def test_every_command_of_the_client_is_above():
    sources = (TOP / 'optim/torch/hitrain').glob('*.py')
    used = {word for path in sources for word in re.findall(r"""command\([^)]*?f?['"]([a-z]+)""", path.read_text())}
    assert used <= {command.split()[0] for command in COMMANDS} and {'abort', 'claim', 'commit', 'drop', 'forget', 'rollback'} <= used
    assert set(_settings.FORGETTING) <= {command.split()[0] for command in COMMANDS}


@pytest.mark.parametrize('dtype', [torch.float16, torch.float32], ids=str)
def test_a_grad_dtype_that_an_abort_took_back_is_set_again(shared_root, dtype):
    own, other = parameters(), parameters()
    AdamW(own.items(), shared_root, grad_dtype=torch.bfloat16).close()
    with AdamW(own.items(), shared_root, grad_dtype=dtype, resume=True) as optimizer, \
            AdamW(other.items(), shared_root.parent / 'other', grad_dtype=dtype) as plain:
        give_gradients(own, 0)
        optimizer.send_gradient(own['a'])
        optimizer.abort()
        assert attribute(shared_root / 'a', 'grad_dtype') == 'bf16'
        for params, o in ((own, optimizer), (other, plain)):
            give_gradients(params, 1)
            o.step()
        assert equal(own, other)


@pytest.mark.parametrize('there', [False, True])
def test_a_client_that_is_newer_than_the_mount_says_so(shared_root, monkeypatch, there):
    """As a mount answers that does not know the attribute yet."""
    root = shared_root.with_name(f'newer-{there}')
    monkeypatch.setattr(_making, 'WORD', 'unheard_of')
    if there:
        root.mkdir()
    before = sorted(os.listdir(root.parent))
    with pytest.raises(RuntimeError, match='older than this client.*mount with the new program'):
        AdamW([('p', torch.nn.Parameter(torch.ones(3)))], root)
    assert sorted(os.listdir(root.parent)) == before
