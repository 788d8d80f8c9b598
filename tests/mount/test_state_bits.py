# SPDX-License-Identifier: Apache-2.0
"""state_bits=32|16|8: the words, conversions of a live model, and all that carries state from one place to another."""
import errno

import numpy as np
import pytest

from calls import fails, sync
from test_follow import follow, refused, same, start, stream
from test_logged_steps import REDO, train
from test_roots import command, put_gradient, random, word
from test_step_streams import ADAMW, content, make_model

N = 300_000
FILES = 'w', 'deep/v'


def bits(n, text=ADAMW):
    return f'{text} state_bits={n}'


def state(root, name='w', what='exp_avg'):
    return np.fromfile(root / f'.hitrain/state/{name}/{what}', 'f4')


@pytest.fixture
def root(mnt):
    return make_model(mnt / 'model')


def reads_as(root, n):
    return all(word(root / f, 'state_bits') == str(n) for f in FILES)


@pytest.mark.parametrize('text', ['state_bits=7', 'state_bits=0', 'state_bits=64', 'state_bits=8.5', 'state_bits=', 'state_bits_min=-1',
                                  'state_bits_min=1.5', 'state_bits=8 state_bits=8'])
def test_senseless_words_are_refused(root, text):
    before = word(root, 'optimizer')
    for path in (root, root / 'w'):
        with fails(errno.EINVAL):
            word(path, 'optimizer', f'adamw lr=0.1 {text}')
        assert 'state_bits' in word(path, 'error')
    assert word(root, 'optimizer') == before


@pytest.mark.parametrize('text', ['sgd lr=0.1', 'sgd lr=0.1 momentum=0.9', 'lion lr=1e-4', 'adagrad lr=0.1', 'adam lr=1e-3'])
def test_every_rule_takes_the_word(mnt, text):
    root = make_model(mnt / 'model')
    command(root, 'reset *')
    word(root, 'optimizer', bits(8, text))
    train(root, 1)
    assert reads_as(root, 0 if text == 'sgd lr=0.1' else 8)


def test_a_live_model_is_converted_by_a_commit_and_back(store, root):
    train(root, 1)
    was = content(root, *FILES)
    words = {}
    for n in (8, 16, 32):
        word(root, 'optimizer', bits(n))
        assert not reads_as(root, n)  # not before the commit
        sync(root)
        assert reads_as(root, n) and word(root, 'step') == '1'
        words[n] = content(root, *FILES)
        size = int(word(root, 'state_bytes'))
        assert {32: 8, 16: 4, 8: 2}[n] * 2 * N <= size < {32: 8.01, 16: 4.01, 8: 2.04}[n] * 2 * N
    assert words[8] != was and words[32] == words[16]  # f32 has what bf16 had
    assert all(words[8][f] == was[f] for f in FILES)   # parameters are as they were
    store.crash()
    assert content(root, *FILES) == words[32] and reads_as(root, 32)
    train(root, 2)
    store.remount(check=True)
    assert word(root, 'step') == '2'


def test_a_file_and_a_small_one_have_their_own(root):
    word(root / 'deep', 'optimizer', 'state_bits=8')
    train(root, 1)
    assert word(root / 'w', 'state_bits') == '32' and word(root / 'deep/v', 'state_bits') == '8'
    word(root / 'deep', 'optimizer', f'state_bits=8 state_bits_min={N + 1}')
    train(root, 2)
    assert reads_as(root, 32)
    word(root, 'optimizer', bits(16, ADAMW + f' state_bits_min={N}'))
    word(root / 'w', 'optimizer', 'state_bits=8')
    train(root, 3)
    assert word(root / 'w', 'state_bits') == '8' and word(root / 'deep/v', 'state_bits') == '32'  # its folder has another minimum


def test_words_that_change_forms_wait_for_the_end_of_the_step(root):
    train(root, 1)
    put_gradient(root, 'w', random(N, 5))
    for path, text in ((root, bits(8)), (root / 'w', 'state_bits=16'), (root / 'deep', 'state_bits_min=1 state_bits=8')):
        with fails(errno.EBUSY):
            word(path, 'optimizer', text)
        assert 'while a step is open' in word(path, 'error')
    word(root, 'optimizer', ADAMW.replace('0.01', '0.02'))  # others are for the next step
    put_gradient(root, 'deep/v', random(N, 6))
    sync(root)
    word(root, 'optimizer', bits(8))
    train(root, 2)
    assert reads_as(root, 8)


def test_an_abort_takes_the_words_and_the_conversion_back(root):
    train(root, 1)
    was = content(root, *FILES)
    word(root, 'optimizer', bits(8))
    command(root, 'abort')
    assert 'state_bits' not in word(root, 'optimizer')
    sync(root)
    assert reads_as(root, 32) and content(root, *FILES) == was


@pytest.mark.parametrize('n', [16, 8])
def test_state_files_refuse_what_the_form_does_not_have(root, n):
    word(root, 'optimizer', bits(n))
    train(root, 1)
    was = content(root, *FILES)
    for what, value, why in (('exp_avg', np.nan, 'not finite'), ('exp_avg', -np.inf, 'not finite'), ('exp_avg_sq', -1, 'negative')):
        bad = state(root, 'w', what)
        bad[70_000] = value
        with fails(errno.EINVAL), open(root / f'.hitrain/state/w/{what}', 'r+b', buffering=0) as f:
            f.seek(4 * 65_536)
            f.write(bad[65_536:98_304].tobytes())
        assert f'{what}: element 70000 is' in word(root, 'error') and why in word(root, 'error')
    with fails(errno.EINVAL), open(root / '.hitrain/state/w/exp_avg', 'r+b', buffering=0) as f:
        f.write(bytes(6))
    assert content(root, *FILES) == was


@pytest.mark.parametrize('n', [16, 8])
def test_clones_and_kept_steps_keep_the_form(mnt, root, n):
    word(root, 'optimizer', bits(n))
    train(root, 1)
    command(root, 'snapshot base')
    command(root, 'clone base twin')
    twin = mnt / 'twin'
    for path in (root, twin):
        train(path, 2)
    assert reads_as(twin, n) and content(root, *FILES) == content(twin, *FILES)


def test_a_rollback_goes_back_over_a_conversion(root):
    train(root, 1)
    command(root, 'snapshot base')
    train(root, 2)
    there = content(root, *FILES)
    command(root, 'rollback base')
    word(root, 'optimizer', bits(16))
    train(root, 3)
    assert reads_as(root, 16)
    command(root, 'rollback base')
    assert 'state_bits' not in word(root, 'optimizer') and reads_as(root, 32)
    train(root, 2)
    assert content(root, *FILES) == there


@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
@pytest.mark.parametrize('n', [16, 8])
def test_a_copy_follows_and_trains_to_the_same_bits(stores, n, dtype):
    """The first step comes as files of f32, the others as logged gradients."""
    root, other = start(*stores[1], dtype, bits(n, REDO))
    assert reads_as(root, n) and reads_as(other, n)
    for seed in (3, 4):
        train(root, seed, dtype)
    data = stream(root, '--from=base')
    assert follow(other, data).returncode == 0 and same(root, other)
    for r in (root, other):
        train(r, 999, dtype)
    assert same(root, other)


def test_a_copy_with_another_form_is_refused(stores):
    root, other = start(*stores[1], words=bits(16, REDO))
    word(other, 'optimizer', bits(32, REDO))
    sync(other)
    assert reads_as(other, 32)
    train(root, 3)
    refused(other, stream(root, '--from=base'), 'does not continue')


def test_logged_steps_are_computed_again(store, root):
    word(root, 'optimizer', bits(8, REDO))
    for seed in range(1, 4):
        train(root, seed)
    was = content(root, *FILES)
    store.crash()
    assert content(root, *FILES) == was and word(root, 'step') == '3'
