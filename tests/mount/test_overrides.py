# SPDX-License-Identifier: Apache-2.0
"""The word optimizer of files and of directories below a model root: it amends the word above, from the next step on.
"""
import errno
import os

import numpy as np
import pytest

from calls import fails, sync
from test_steering import N, put_gradient, step_open, tell, word

ALL = ('w', 'v')
CHANGES = 10000


def values(root, name='w'):
    found = np.fromfile(root / name, 'f4')
    assert np.all(found == found[0])
    return found[0]


def resident(store):
    """Bytes of the daemon's own memory."""
    with open(f'/proc/{store.daemon.pid}/status') as f:
        return 1024 * int(next(x for x in f if x.startswith('RssAnon:')).split()[1])


def step(root, *names):
    for name in names or ALL:
        put_gradient(root, name)
    assert tell(root, 'commit') == 'ok'


def effective(path):
    lines = [x for x in word(path, 'stats').splitlines() if x.startswith('optimizer=')]
    return dict(x.split('=') for x in lines[0][len('optimizer='):].split()[1:])


def make_root(mnt):
    r = mnt / 'm'
    (r / 'norms').mkdir(parents=True)
    word(r, 'dtype', 'f32')
    word(r / 'norms', 'dtype', 'f32')
    for name in ALL + ('norms/n', 'norms/o'):
        (r / name).write_bytes(bytes(4 * N))
    word(r, 'optimizer', 'sgd lr=1')
    sync(r)
    return r


@pytest.fixture
def root(mnt):
    return make_root(mnt)


def put_below(root, *names):
    for name in names:
        put_gradient(root / 'norms', name)


def test_words_that_a_file_leaves_out_are_those_of_the_root(root):
    word(root, 'optimizer', 'sgd lr=0.5 weight_decay=0')
    word(root / 'w', 'optimizer', 'sgd maximize=1')  # with the rule, as stores have it
    word(root / 'v', 'optimizer', 'weight_decay=0.5')
    assert word(root / 'w', 'optimizer') == 'sgd maximize=1'
    assert effective(root / 'w')['lr'] == '0.5' and effective(root / 'w')['maximize'] == '1'
    assert effective(root / 'v') == {**effective(root), 'weight_decay': '0.5'}
    step(root)
    assert values(root, 'w') == 0.5 and values(root, 'v') == -0.5
    word(root, 'optimizer', 'sgd lr=0.25')
    step(root)
    assert values(root, 'w') == 0.75 and values(root, 'v') == -0.5 - 0.25 * (1 - 0.25)


def test_the_nearest_directory_wins(root):
    (root / 'norms' / 'deep').mkdir()
    os.rename(root / 'norms' / 'o', root / 'norms' / 'deep' / 'o')
    word(root / 'norms', 'optimizer', 'lr=2 maximize=1')
    word(root / 'norms' / 'deep' / 'o', 'optimizer', 'lr=4')
    put_gradient(root / 'norms', 'n')
    put_gradient(root / 'norms' / 'deep', 'o')
    step(root)
    assert [values(root, x) for x in ('w', 'norms/n', 'norms/deep/o')] == [-1, 2, 4]
    word(root / 'norms' / 'deep', 'optimizer', 'lr=8 maximize=0')
    assert effective(root / 'norms' / 'deep')['lr'] == '8' and effective(root / 'norms' / 'deep' / 'o')['lr'] == '4'
    put_gradient(root / 'norms' / 'deep', 'o')
    step(root)
    assert values(root, 'norms/deep/o') == 0
    os.removexattr(root / 'norms' / 'deep', 'user.hitrain.optimizer')
    os.removexattr(root / 'norms' / 'deep' / 'o', 'user.hitrain.optimizer')
    put_gradient(root / 'norms' / 'deep', 'o')
    step(root)
    assert values(root, 'norms/deep/o') == 2


def test_deep_directories(root):
    d = root
    for i in range(40):
        d /= f'd{i}'
        d.mkdir()
        word(d, 'optimizer', f'lr={i}')
    word(d, 'dtype', 'f32')
    (d / 'w').write_bytes(bytes(4 * N))
    put_gradient(d)
    assert tell(root, 'commit') == 'ok'
    assert values(d) == -39


@pytest.mark.parametrize('change', ['root', 'file', 'directory', 'removed', 'twice'])
def test_a_change_in_mid_step_is_for_the_next_step_of_all(root, change):
    """Before, some parameters of the step had the old words and some the new ones."""
    word(root / 'norms', 'optimizer', 'lr=2')
    word(root / 'norms' / 'o', 'optimizer', 'lr=4')
    put_below(root, 'n')
    put_gradient(root, 'w')
    assert step_open(root)
    if change == 'root':
        word(root, 'optimizer', 'sgd lr=100')
    elif change == 'file':
        word(root / 'norms' / 'o', 'optimizer', 'lr=100')
        word(root / 'v', 'optimizer', 'lr=100')
    elif change == 'directory':
        word(root / 'norms', 'optimizer', 'lr=100 maximize=1')
    elif change == 'removed':
        os.removexattr(root / 'norms' / 'o', 'user.hitrain.optimizer')
    else:
        for lr in (100, 200):
            word(root / 'norms' / 'o', 'optimizer', f'lr={lr}')
    put_below(root, 'o')
    put_gradient(root, 'v')
    assert tell(root, 'commit') == 'ok'
    assert [values(root, x) for x in ('w', 'v', 'norms/n', 'norms/o')] == [-1, -1, -2, -4]
    put_below(root, 'n', 'o')
    step(root)
    after = {'root': [-101, -101, -4, -8], 'file': [-2, -101, -4, -104], 'directory': [-2, -2, 98, 0],
             'removed': [-2, -2, -4, -6], 'twice': [-2, -2, -4, -204]}[change]
    assert [values(root, x) for x in ('w', 'v', 'norms/n', 'norms/o')] == after


def test_the_first_change_of_a_step_keeps_what_was_before_however_many_follow(store, root):
    """Each change used to keep the text before it until the step ended, and to call the optimizer once for each kept text."""
    put_gradient(root, 'w')
    assert tell(root, 'commit') == 'ok'
    put_gradient(root, 'w')
    texts = ['lr=4' + ' ' * 990, 'lr=2' + ' ' * 990]

    def change(times):
        for i in range(times):
            word(root / 'v', 'optimizer', texts[i % 2])

    change(1000)
    before = resident(store)
    change(CHANGES)
    assert resident(store) - before < CHANGES * 1024 // 4
    put_gradient(root, 'v')
    assert tell(root, 'commit') == 'ok'
    assert values(root, 'v') == -1
    put_gradient(root, 'v')
    word(root / 'v', 'optimizer', 'lr=16')
    word(root / 'w', 'optimizer', 'lr=32')
    word(root / 'v', 'optimizer', 'lr=64')
    put_gradient(root, 'w')
    assert tell(root, 'commit') == 'ok'
    assert values(root, 'v') == -3 and values(root, 'w') == -3
    step(root)
    assert values(root, 'v') == -67 and values(root, 'w') == -35


def test_words_survive_a_crash_and_an_abort_takes_them_back(store, root):
    word(root / 'w', 'optimizer', 'lr=4')
    word(root / 'norms', 'optimizer', 'lr=8')
    sync(root)
    word(root / 'w', 'optimizer', 'lr=16')
    put_gradient(root, 'w')
    word(root / 'norms', 'optimizer', 'lr=32')
    assert tell(root, 'abort') == 'ok'
    assert word(root / 'w', 'optimizer') == 'lr=4' and word(root / 'norms', 'optimizer') == 'lr=8'
    store.crash()
    put_below(root, 'n')
    step(root)
    assert [values(root, x) for x in ('w', 'v', 'norms/n')] == [-4, -1, -8]


def test_what_makes_no_sense_is_refused_when_it_is_set(root):
    with fails(errno.EINVAL):
        word(root / 'w', 'optimizer', 'beta1=0.5')
    assert 'beta1=0.5' in word(root / 'w', 'error') and 'sgd' in word(root, 'error')
    with fails(errno.EINVAL):
        word(root / 'norms', 'optimizer', 'nesterov=1')
    assert 'needs momentum' in word(root / 'norms', 'error')
    word(root / 'norms', 'optimizer', 'momentum=0.5')
    word(root / 'norms' / 'n', 'optimizer', 'nesterov=1')
    # the word that gave this one its meaning is removed: the gradient is refused by name
    os.removexattr(root / 'norms' / 'n', 'user.hitrain.optimizer')
    word(root / 'norms' / 'n', 'optimizer', 'sgd lr=2')
    with fails(errno.ENODATA):
        os.removexattr(root / 'w', 'user.hitrain.optimizer')


def test_words_that_no_longer_fit_refuse_the_gradient(root):
    word(root / 'w', 'optimizer', 'momentum=0.5')
    word(root, 'optimizer', 'adamw')
    assert 'refused' in word(root / 'w', 'stats')
    with fails(errno.EINVAL):
        put_gradient(root, 'w')
    assert word(root, 'error').startswith('m/w: optimizer: "momentum=0.5" is no word=value of adamw')
    os.removexattr(root / 'w', 'user.hitrain.optimizer')
    step(root)
    assert word(root, 'step') == '1'


def test_another_rule_beside_state_is_refused_when_it_is_set(root):
    word(root, 'optimizer', 'adamw lr=1')
    put_below(root, 'n')
    step(root)
    for path in ('w', 'norms/n', 'norms'):
        with fails(errno.EBUSY):
            word(root / path, 'optimizer', 'sgd momentum=0.9')
        named = 'm/norms/n' if 'norms' in path else 'm/w'
        assert f'{named} has state of another rule: reset it first' in word(root / path, 'error')
        with fails(errno.ENODATA):
            word(root / path, 'optimizer')
    word(root / 'norms' / 'o', 'optimizer', 'sgd momentum=0.5')  # it has no state
    put_below(root, 'o')
    step(root)
    assert os.path.exists(root / 'norms/.hitrain/state/o/momentum_buffer')
    with fails(errno.EBUSY):
        os.removexattr(root / 'norms' / 'o', 'user.hitrain.optimizer')
    assert tell(root, 'reset norms/o') == 'ok'
    os.removexattr(root / 'norms' / 'o', 'user.hitrain.optimizer')
    put_below(root, 'o')
    step(root)
    assert os.path.exists(root / 'norms/.hitrain/state/o/exp_avg')


def test_ranges_of_elements_have_words_of_their_own(store, root):
    """A range in the middle of a chunk, one frozen, and one that has missed a step; after a crash and from the next step on."""
    word(root, 'optimizer', 'sgd lr=1 momentum=0.5')
    words = f'lr=2  0:7 lr=4\n7:8 frozen=1 {N - 1}:{N} maximize=1'
    word(root / 'w', 'optimizer', words)
    assert word(root / 'w', 'optimizer') == words and effective(root / 'w')['lr'] == '2'
    step(root)
    assert list(np.fromfile(root / 'w', 'f4')) == 7 * [-4] + [0] + (N - 9) * [-2] + [2]
    put_gradient(root, 'w')
    word(root / 'w', 'optimizer', '0:1 lr=100')  # for the next step
    store.crash()
    assert word(root / 'w', 'optimizer') == words
    word(root / 'w', 'optimizer', '0:1 lr=0 7:8 missed=1')  # the others are as those of the root again
    step(root)
    assert list(np.fromfile(root / 'w', 'f4')) == [-4] + 6 * [-5.5] + [-1] + (N - 9) * [-3.5] + [1.5]
    assert values(root, 'v') == -2.5


def test_ranges_that_make_no_sense_are_refused_when_they_are_set(root):
    for text, why in (('0:7 lr=1 6:9 lr=2', '6:9: ranges of elements must ascend'), ('0:7', 'has no words'), ('7:0 lr=1', '"7:0" is no range'),
                      ('0:7 momentum=0.5', 'needs other state'), ('0:7 adamw', 'is no word=value of sgd'), ('0:7 durable_every=2', 'is no word')):
        with fails(errno.EINVAL):
            word(root / 'w', 'optimizer', text)
        assert why in word(root / 'w', 'error') and 'm/w' in word(root, 'error')
    for path in (root, root / 'norms'):
        with fails(errno.EINVAL):
            word(path, 'optimizer', 'sgd lr=1 0:7 lr=2')
        assert 'only a file has words for ranges of elements' in word(path, 'error')
    with fails(errno.EINVAL):
        word(root / 'w', 'optimizer', 'lr=' + '0' * 1100)
    word(root / 'w', 'optimizer', ' '.join(f'{i}:{i + 1} lr=2' for i in range(2000)))  # longer than other texts may be
    assert len(word(root / 'w', 'optimizer')) > 20000
    word(root / 'w', 'optimizer', f'0:{N + 1} lr=2')  # it may become longer
    with fails(errno.EINVAL):
        put_gradient(root, 'w')
    assert f'0:{N + 1}: the range ends after the last element of the parameter, which has {N}' in word(root, 'error')


def test_a_root_ends_and_begins_with_words_below(root):
    word(root / 'norms', 'optimizer', 'lr=2')
    os.removexattr(root, 'user.hitrain.optimizer')
    assert word(root / 'norms', 'optimizer') == 'lr=2'
    word(root, 'optimizer', 'sgd lr=1')
    put_below(root, 'n')
    step(root)
    assert values(root, 'norms/n') == -2


def test_so_many_words_may_change_in_open_steps_and_no_more(make_store):
    """An earlier text is kept for each; their number is bounded, and the error names the way out."""
    store, most = make_store('4G'), 1 << 16
    root = make_root(store.mount())
    for i in range(most + 1):
        os.close(os.open(root / 'norms' / str(i), os.O_CREAT | os.O_WRONLY))
    sync(root)
    put_gradient(root, 'w')
    for i in range(most):
        os.setxattr(root / 'norms' / str(i), 'user.hitrain.optimizer', b'lr=2')
    with fails(errno.EBUSY):
        word(root / 'norms' / str(most), 'optimizer', 'lr=2')
    assert f'{most} files were changed in open steps: commit or abort' in word(root / 'norms' / str(most), 'error')
    word(root / 'norms' / '0', 'optimizer', 'lr=3')     # its earlier text is kept already
    assert tell(root, 'commit') == 'ok'
    word(root / 'norms' / str(most), 'optimizer', 'lr=2')
    assert word(root / 'norms' / str(most), 'optimizer') == 'lr=2' and values(root) == -1


def test_so_many_bytes_of_words_may_change_in_open_steps_and_no_more(make_store):
    """With ranges a text has up to 64 KiB."""
    store, text = make_store('4G', '--log-size=512M'), ' '.join(f'{i}:{i + 1} lr=3' for i in range(4400)).encode()
    root, most = make_root(store.mount()), (64 << 20) // len(text)
    for i in range(most + 1):
        file = root / 'norms' / str(i)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY))
        os.setxattr(file, 'user.hitrain.optimizer', text)
    sync(root)
    put_gradient(root, 'w')
    for i in range(most):
        word(root / 'norms' / str(i), 'optimizer', 'lr=3')
    with fails(errno.EBUSY):
        word(root / 'norms' / str(most), 'optimizer', 'lr=3')
    assert f'{most} files were changed in open steps: commit or abort' in word(root / 'norms' / str(most), 'error')
    os.setxattr(root / 'norms/0', 'user.hitrain.optimizer', text)  # its earlier text is kept already
    assert tell(root, 'commit') == 'ok'
    word(root / 'norms' / str(most), 'optimizer', 'lr=3')
