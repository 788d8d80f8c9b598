# SPDX-License-Identifier: Apache-2.0
"""Model roots as files: attributes, gradients by dd, ctl words, states, statistics, and every wrong way to use them."""
import errno
import mmap
import os
import re
import struct
import subprocess
import threading

import numpy as np
import pytest

from calls import refused, run_threads, settle, sync
from conftest import MIB, SECONDS_MAX, wait_for
from models import new_model, word

OPTIMIZER = 'adamw lr=0.01 beta1=0.9 beta2=0.999 eps=1e-8 weight_decay=0.1'


def command(root, *lines):
    """Runs commands on .hitrain/ctl; returns the answers, also of one that fails."""
    fd = os.open(root / '.hitrain' / 'ctl', os.O_RDWR)
    try:
        for line in lines:
            try:
                os.write(fd, line.encode() + b'\n')
            except OSError:
                pass
        return os.read(fd, 65536).decode().splitlines()
    finally:
        os.close(fd)


def random(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype('f4')


def adamw(p, grads, lr=0.01, b1=0.9, b2=0.999, eps=1e-8, decay=0.1):
    p, m, v = p.astype('f8'), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        g = g.astype('f8')
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p * (1 - lr * decay) - lr / (1 - b1 ** t) * m / (np.sqrt(v) / np.sqrt(1 - b2 ** t) + eps)
    return p


def put_gradient(root, name, g):
    with open(root / '.hitrain' / 'grad' / name, 'wb', buffering=0) as f:
        view = memoryview(g).cast('B')
        while view:
            view = view[f.write(view):]


def near(a, b):
    return np.max(np.abs(a.astype('f8') - b)) < 1e-5


@pytest.fixture
def root(mnt):
    r = new_model(mnt / 'model', OPTIMIZER, w=random(1000, 1).tobytes(), big=random(3 * MIB // 4 + 7, 2).tobytes())
    return r


# -------------------------------------------------------------------- the tour

def test_a_step_with_shell_tools(root, tmp_path):
    p, g = random(1000, 1), random(1000, 3)
    (tmp_path / 'g').write_bytes(g.tobytes())
    subprocess.run(['dd', f'if={tmp_path}/g', f'of={root}/.hitrain/grad/w', 'bs=1000'], check=True, timeout=SECONDS_MAX,
                   stderr=subprocess.DEVNULL)
    assert near(np.fromfile(root / 'w', 'f4'), adamw(p, [g]))  # the reader waits for the update
    assert word(root, 'step') == '0'
    subprocess.run(['sh', '-c', f'echo commit > {root}/.hitrain/ctl'], check=True, timeout=SECONDS_MAX)
    assert word(root, 'step') == word(root, 'durable_step') == '1'
    subprocess.run(['cp', tmp_path / 'g', root / '.hitrain' / 'grad' / 'w'], check=True, timeout=SECONDS_MAX)
    sync(root)
    assert word(root, 'step') == word(root, 'durable_step') == '2'
    assert near(np.fromfile(root / 'w', 'f4'), adamw(p, [g, g]))
    m = np.fromfile(root / '.hitrain/state/w/exp_avg', 'f4')
    assert np.allclose(m, 0.19 * g, atol=1e-6)


def test_committed_step_survives_kill_and_nothing_else(store, root):
    big, gs = random(3 * MIB // 4 + 7, 2), [random(3 * MIB // 4 + 7, i) for i in (5, 6)]
    put_gradient(root, 'big', gs[0])
    (root / 'rng').write_bytes(b'one')
    sync(root)
    put_gradient(root, 'big', gs[1])
    (root / 'rng').write_bytes(b'two')
    (root / 'extra').write_bytes(b'x')
    command(root, 'wait')
    store.crash()
    assert word(root, 'step') == '1'
    assert near(np.fromfile(root / 'big', 'f4'), adamw(big, gs[:1]))
    assert (root / 'rng').read_bytes() == b'one' and not (root / 'extra').exists()
    put_gradient(root, 'big', gs[1])
    sync(root)
    assert near(np.fromfile(root / 'big', 'f4'), adamw(big, gs))


def test_abort_restores_everything(root):
    p, g = random(1000, 1), random(1000, 4)
    put_gradient(root, 'w', g)
    sync(root)
    (root / 'sub').mkdir()
    (root / 'sub' / 'f').write_bytes(b'new')
    os.unlink(root / 'big')
    put_gradient(root, 'w', g)
    first = np.fromfile(root / 'w', 'f4')
    assert near(first, adamw(p, [g, g]))
    with open(root / 'sub' / 'f', 'rb+', buffering=0) as vanishing:
        assert command(root, 'abort') == ['ok']
        refused(errno.ESTALE, os.pread, vanishing.fileno(), 10, 10 * MIB)
        refused(errno.ESTALE, os.pread, vanishing.fileno(), 2, 0)
        refused(errno.ESTALE, os.pwrite, vanishing.fileno(), b'lost', 0)
    assert sorted(os.listdir(root)) == ['big', 'w']
    assert near(np.fromfile(root / 'w', 'f4'), adamw(p, [g]))
    assert np.array_equal(np.fromfile(root / 'big', 'f4'), random(3 * MIB // 4 + 7, 2))
    assert word(root, 'step') == '1'


def test_bf16_parameter_keeps_a_master(mnt):
    p = (random(4096, 1).view('u4') >> 16).astype('u2')
    r = new_model(mnt / 'half', OPTIMIZER, 'bf16', p=p.tobytes())
    assert os.stat(r / '.hitrain/grad/p').st_size == 8192
    g = (random(4096, 2).view('u4') >> 16).astype('u2')
    put_gradient(r, 'p', g)
    sync(r)
    master = np.fromfile(r / '.hitrain/state/p/master', 'f4')
    start = (p.astype('u4') << 16).view('f4')
    grad = (g.astype('u4') << 16).view('f4')
    assert near(master, adamw(start, [grad]))
    held = (np.fromfile(r / 'p', 'u2').astype('u4') << 16).view('f4')
    assert np.all(np.abs(held - master) <= np.abs(master) / 128)
    word(r, 'grad_dtype', 'f32')


def test_a_bf16_master_is_copied_after_its_parameter(mnt, tmp_path):
    r = new_model(mnt / 'half', OPTIMIZER, 'bf16', p=(random(300000, 1).view('u4') >> 16).astype('u2').tobytes())
    state = r / '.hitrain/state/p'

    def step(seed):
        put_gradient(r, 'p', (random(300000, seed).view('u4') >> 16).astype('u2'))
        sync(r)
        return (r / 'p').read_bytes(), (state / 'master').read_bytes()

    step(2)
    saved = tmp_path / 'saved'
    saved.mkdir()
    for file in (r / 'p', state / 'master', state / 'exp_avg', state / 'exp_avg_sq', state / 'step'):
        subprocess.run(['cp', file, saved], check=True)
    wanted = step(3)
    copied = subprocess.run(['cp', saved / 'master', state], capture_output=True, text=True)
    assert copied.returncode == 1 and 'Invalid argument' in copied.stderr
    assert 'write the parameter first' in word(r, 'error')
    assert ((r / 'p').read_bytes(), (state / 'master').read_bytes()) == wanted
    subprocess.run(['cp', saved / 'p', r], check=True)
    loaded = (np.frombuffer((saved / 'p').read_bytes(), 'u2').astype('u4') << 16).view('f4')
    assert (state / 'master').read_bytes() == loaded.tobytes()
    for name in ('master', 'exp_avg', 'exp_avg_sq', 'step'):
        subprocess.run(['cp', saved / name, state], check=True)
    assert step(3) == wanted


def test_state_is_what_the_rule_keeps(mnt):
    root = new_model(mnt / 'model', 'sgd lr=1 momentum=0.5', 'f16')
    p, g = random(1000).astype('f2'), random(1000, 1).astype('f2')
    (root / 'p').write_bytes(p.tobytes())
    assert sorted(os.listdir(root / '.hitrain/state/p')) == ['master', 'momentum_buffer', 'step']
    for _ in range(2):
        (root / '.hitrain/grad/p').write_bytes(g.tobytes())
        sync(root)
    master = p.astype('f4') - g.astype('f4') * 2.5  # 1 and 1 + 0.5 times
    got = np.frombuffer((root / '.hitrain/state/p/master').read_bytes(), 'f4')
    assert np.abs(got - master).max() < 1e-5
    assert (root / 'p').read_bytes() == got.astype('f2').tobytes()
    buffer = np.frombuffer((root / '.hitrain/state/p/momentum_buffer').read_bytes(), 'f4')
    assert np.array_equal(buffer, 1.5 * g.astype('f4'))
    # The error is always the last one, whichever call failed.
    refused(errno.EINVAL, (root / '.hitrain/state/p/step').write_bytes, b'abc')
    assert 'one f32' in word(root, 'error')
    refused(errno.EBUSY, word, root, 'optimizer', 'sgd lr=1')
    assert 'another rule' in word(root, 'error')


def test_exec_of_a_forked_child_flushes_early(root):
    """The child's exec closes its copy of the descriptor in the middle of the gradient."""
    big, g = random(3 * MIB // 4 + 7, 2), random(3 * MIB // 4 + 7, 9)
    data, half = memoryview(g).cast('B'), (len(g) // 2) * 4
    fd = os.open(root / '.hitrain/grad/big', os.O_WRONLY)
    done = 0
    while done < half:
        done += os.pwrite(fd, data[done:half], done)
    if os.fork() == 0:
        os.execv('/bin/true', ['true'])
    os.wait()
    while done < len(data):
        done += os.pwrite(fd, data[done:], done)
    os.close(fd)
    sync(root)
    assert near(np.fromfile(root / 'big', 'f4'), adamw(big, [g]))


def test_readers_wait_for_the_update(root):
    """Cached pages, a descriptor opened before and new readers all give the new value once the gradient is closed."""
    p = random(3 * MIB // 4 + 7, 2)
    grads = []
    with open(root / 'big', 'rb', buffering=0) as early, open(root / 'big', 'rb') as mapped:
        m = mmap.mmap(mapped.fileno(), 0, prot=mmap.PROT_READ)
        for i in range(8):
            grads.append(random(len(p), 20 + i))
            got, errors = {}, []

            def read(k):
                try:
                    got[k] = np.fromfile(root / 'big', 'f4')
                except OSError as e:
                    errors.append(e)
            put_gradient(root, 'big', grads[-1])
            readers = [threading.Thread(target=read, args=(k,)) for k in range(4)]
            for t in readers:
                t.start()
            want = adamw(p, grads)
            for t in readers:
                t.join(SECONDS_MAX)
            assert not errors and len(got) == 4
            assert all(near(v, want) for v in got.values())
            assert near(np.frombuffer(os.pread(early.fileno(), len(p) * 4, 0), 'f4'), want)
            assert command(root, 'wait big') == ['ok']
            assert near(np.frombuffer(m[:], 'f4'), want)
            sync(root)
        m.close()


def test_direct_readers_and_writers_of_a_parameter(root):
    p, g = random(1000, 1), random(1000, 3)
    put_gradient(root, 'w', g)
    fd = os.open(root / 'w', os.O_RDWR | os.O_DIRECT)
    area = mmap.mmap(-1, 4096)
    assert os.preadv(fd, [area], 0) == 4000
    assert near(np.frombuffer(area[:4000], 'f4'), adamw(p, [g]))
    os.close(fd)
    put = np.ones(1000, 'f4')
    sync(root)
    put_gradient(root, 'w', g)
    with open(root / 'w', 'r+b', buffering=0) as f:  # a write after closing the gradient wins over the update
        f.write(put.tobytes())
    sync(root)
    assert np.array_equal(np.fromfile(root / 'w', 'f4'), put)


def test_one_worker_thread_does_not_block_itself(make_store):
    store = make_store()
    mnt = store.mount(flags=('-s',))
    n = MIB
    r = new_model(mnt / 'm', OPTIMIZER, **{f'p{i}': random(n, i).tobytes() for i in range(3)})
    stop, errors = threading.Event(), []

    def keep_reading(i):
        try:
            while not stop.is_set():
                assert len(np.fromfile(r / f'p{i}', 'f4')) == n
        except Exception as e:  # noqa: B902 - shown by the test
            errors.append(e)
    readers = [threading.Thread(target=keep_reading, args=(i,)) for i in range(3)]
    for t in readers:
        t.start()
    for step in range(5):
        writers = [threading.Thread(target=put_gradient, args=(r, f'p{i}', random(n, 100 * step + i))) for i in range(3)]
        run_threads(writers)
        sync(r)
    stop.set()
    for t in readers:
        t.join(SECONDS_MAX)
        assert not t.is_alive()
    assert not errors and word(r, 'step') == '5'
    for i in range(3):
        assert near(np.fromfile(r / f'p{i}', 'f4'), adamw(random(n, i), [random(n, 100 * s + i) for s in range(5)]))


# ------------------------------------------------------------- the hidden tree

def test_hidden_tree_is_resolved_and_not_listed(root):
    assert sorted(os.listdir(root)) == ['big', 'w']
    assert sorted(os.listdir(root / '.hitrain')) == ['ctl', 'delta', 'gather', 'grad', 'grad-topk', 'kept', 'ortho', 'redo', 'shard', 'snap',
                                                       'state', 'stats', 'update']
    (root / 'note.txt').write_text('no tensor')
    os.setxattr(root / 'note.txt', 'user.hitrain.dtype', b'u8')
    assert sorted(os.listdir(root / '.hitrain/grad')) == sorted(os.listdir(root / '.hitrain/grad-topk')) == ['big', 'w']
    assert sorted(os.listdir(root / '.hitrain/state')) == ['big', 'w']
    assert sorted(os.listdir(root / '.hitrain/state/w')) == ['exp_avg', 'exp_avg_sq', 'step']
    assert os.stat(root / '.hitrain/grad/w').st_size == 4000
    for name in ('x', 'grad/none', 'state/none', 'state/w/none', 'state/note.txt'):
        refused(errno.ENOENT, os.stat, root / '.hitrain' / name)
    for change in (lambda: os.unlink(root / '.hitrain/grad/w'), lambda: os.mkdir(root / '.hitrain/d'),
                   lambda: os.rename(root / 'w', root / '.hitrain/w'), lambda: os.rmdir(root / '.hitrain'),
                   lambda: os.rename(root / 'w', root / '.hitrain'), lambda: os.chmod(root / '.hitrain/ctl', 0o777),
                   lambda: os.link(root / '.hitrain/grad/w', root / 'x')):
        with pytest.raises(OSError):
            change()
    refused(errno.ENOENT, open, root / '.hitrain/grad/new', 'wb')
    (root / 'sub').mkdir()
    (root / 'sub' / 'v').write_bytes(random(10).tobytes())
    assert os.listdir(root / 'sub/.hitrain/grad') == ['v']
    assert sorted(os.listdir(root / '.hitrain/grad')) == ['big', 'sub', 'w']
    mnt = root.parent
    (mnt / 'plain').mkdir()
    refused(errno.ENOENT, os.stat, mnt / 'plain/.hitrain')
    assert sorted(os.listdir(mnt / '.hitrain')) == ['background', 'ctl', 'devices', 'events', 'plan', 'roots', 'stats', 'trace']


def test_a_parameter_is_named_by_its_path_from_any_directory_above(root):
    deep = root / 'a' / 'b'
    deep.mkdir(parents=True)
    word(deep, 'dtype', 'f32')
    (deep / 'w').write_bytes(random(1000, 1).tobytes())
    from_above = (root / '.hitrain', 'a/b/w'), (root / 'a/.hitrain', 'b/w'), (deep / '.hitrain', 'w')
    p, gs = random(1000, 1), [random(1000, 3 + i) for i in range(len(from_above))]
    for (hidden, path), g in zip(from_above, gs):
        (hidden / 'grad' / path).write_bytes(g.tobytes())
        assert command(root, 'wait a/b/w', 'commit') == ['ok', 'ok']
    assert near(np.fromfile(deep / 'w', 'f4'), adamw(p, gs))
    states = {(hidden / 'state' / path / 'exp_avg').read_bytes() for hidden, path in from_above}
    assert len(states) == 1 and any(states.pop())
    assert {os.stat(hidden / 'grad' / path).st_ino for hidden, path in from_above} == \
        {os.stat(deep / '.hitrain/grad/w').st_ino}
    sparse = [(hidden / 'grad-topk' / path) for hidden, path in from_above]
    assert all(os.stat(x).st_mode == os.stat(sparse[0]).st_mode for x in sparse)
    found = subprocess.run(['find', root / '.hitrain', '-path', '*a/b*'], check=True, stdout=subprocess.PIPE, text=True)
    assert {x.split('/.hitrain/')[1] for x in found.stdout.split()} == {
        f'{kind}/a/b{rest}' for kind in ('grad', 'grad-topk', 'ortho', 'update') for rest in ('', '/w')} | {
        'state/a/b' + rest for rest in ('', '/w', '/w/exp_avg', '/w/exp_avg_sq', '/w/step')}
    # The paths of one directory are directories of their own: an open one stays where it is.
    one = os.open(root / '.hitrain/grad/a', os.O_RDONLY)
    two = os.open(root / 'a/.hitrain/grad', os.O_RDONLY)
    assert os.readlink(f'/proc/self/fd/{one}').endswith('model/.hitrain/grad/a')
    assert os.readlink(f'/proc/self/fd/{two}').endswith('model/a/.hitrain/grad')
    assert os.fstat(one).st_ino != os.fstat(two).st_ino
    os.close(one)
    os.close(two)
    os.rename(root / 'a', root / 'c')
    refused(errno.ENOENT, os.stat, root / '.hitrain/grad/a/b/w')
    assert os.stat(root / '.hitrain/grad/c/b/w').st_size == 4000
    os.symlink('b', root / 'c' / 'link')
    refused(errno.ENOENT, os.stat, root / '.hitrain/grad/c/link')


def test_states_are_readable_and_writable(root):
    g = random(1000, 3)
    put_gradient(root, 'w', g)
    refused(errno.EBUSY, lambda: (root / '.hitrain/state/w/exp_avg').write_bytes(bytes(4000)))
    sync(root)
    assert np.fromfile(root / '.hitrain/state/w/step', 'f4') == 1.0
    m = random(1000, 8)
    with open(root / '.hitrain/state/w/exp_avg', 'r+b', buffering=0) as f:
        f.write(m.tobytes())
    sync(root)
    assert np.array_equal(np.fromfile(root / '.hitrain/state/w/exp_avg', 'f4'), m)
    assert command(root, 'reset w') == ['ok']
    sync(root)
    assert not np.any(np.fromfile(root / '.hitrain/state/w/exp_avg', 'f4'))


def test_ctl_answers_each_line(root):
    assert command(root, 'wait', 'wait w', 'prefetch big', 'evict big') == ['ok'] * 4
    answers = command(root, 'nonsense', 'wait none', 'apply', 'wait ../x', 'wait /w', 'commit')
    assert [a.split(':')[:2] for a in answers] == [['error', ' EINVAL'], ['error', ' ENOENT'], ['error', ' EINVAL'],
                                                   ['error', ' EINVAL'], ['error', ' EINVAL'], ['ok']]
    assert 'nonsense' in answers[0] and 'commit' in answers[0] and 'none' in answers[1]
    done = subprocess.run(['sh', '-c', f'/bin/echo nonsense > {root}/.hitrain/ctl'], stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0 and 'nvalid' in done.stderr
    fd = os.open(root / '.hitrain/ctl', os.O_WRONLY)
    os.write(fd, b'com')
    os.write(fd, b'mit')  # ended by close
    os.close(fd)


def test_step_without_durability(store, root):
    word(root, 'optimizer', OPTIMIZER + ' durable_every=3')
    for i in range(4):
        put_gradient(root, 'w', random(1000, i))
        assert command(root, 'step') == ['ok']
    assert (word(root, 'step'), word(root, 'durable_step')) == ('4', '3')
    store.crash()
    assert (word(root, 'step'), word(root, 'durable_step')) == ('3', '3')
    assert near(np.fromfile(root / 'w', 'f4'), adamw(random(1000, 1), [random(1000, i) for i in range(3)]))


# ------------------------------------------------------------------- statistics

def test_stats_of_store_root_and_file(root):
    mnt = root.parent
    before = dict(line.split('=', 1) for line in word(mnt, 'stats').splitlines())
    g = random(1000, 3)
    put_gradient(root, 'w', g)
    np.fromfile(root / 'w', 'f4')
    sync(root)
    after = dict(line.split('=', 1) for line in word(mnt, 'stats').splitlines())
    grown = {k: int(after[k]) - int(before[k]) for k in after}
    assert grown['mount_grad_written_bytes'] == 4000
    assert grown['mount_param_read_bytes'] == 4000 and grown['mount_param_written_bytes'] == 0
    assert grown['device_written_bytes'] > 4000 and grown['mount_requests'] >= 2
    assert int(word(mnt, 'mount_grad_written_bytes')) == int(after['mount_grad_written_bytes'])
    of_file = dict(line.split('=', 1) for line in word(root / 'w', 'stats').splitlines())
    assert of_file['logical_bytes'] == '4000' == word(root / 'w', 'logical_bytes')
    assert int(of_file['state_stored_bytes']) >= 8192
    of_root = dict(line.split('=', 1) for line in word(root, 'stats').splitlines())
    assert (of_root['step'], of_root['parameters'], of_root['updated_elements']) == ('1', '1', '1000')
    refused(errno.ENODATA, word, root, 'grad_norm')  # no option needs it
    refused(errno.ENODATA, word, root / 'w', 'total_bytes')


def test_openmetrics(root):
    put_gradient(root, 'w', random(1000))
    sync(root)
    for path, has in ((root.parent, 'hitrain_total_bytes '), (root, 'hitrain_step{root="/model"} 1')):
        text = (path / '.hitrain/stats').read_text()
        assert has in text and text.endswith('# EOF\n')
        families = [line.split()[2] for line in text.splitlines() if line.startswith('# TYPE')]
        assert len(families) == len(set(families))
        for line in text.splitlines():
            assert line.startswith('#') or re.sub('_(total|info)$', '', line.split()[0].split('{')[0]) in families, line


def test_words_that_are_not_copied(root, tmp_path):
    put_gradient(root, 'w', random(1000))
    sync(root)
    assert 'user.hitrain.optimizer' not in os.listxattr(root)
    assert not [n for n in os.listxattr(root / 'w') if n.split('.')[-1] in ('stats', 'step', 'pin', 'hits')]
    subprocess.run(['cp', '-a', root, root.parent / 'copy'], check=True, timeout=SECONDS_MAX)
    refused(errno.ENODATA, word, root.parent / 'copy', 'optimizer')
    assert word(root.parent / 'copy', 'dtype') == 'f32'


def test_gradients_of_several_passes_make_one_step(root):
    """Sums as NumPy makes them in f32; readers see the last step until the last gradient; too early an end is named."""
    word(root, 'optimizer', OPTIMIZER + ' accumulate=3 accumulate_mode=mean')
    big = root / 'big'
    p = np.fromfile(big, 'f4')
    grads = [random(len(p), 50 + i) for i in range(6)]
    for g in grads[:2]:
        put_gradient(root, 'big', g)
        assert np.array_equal(np.fromfile(big, 'f4'), p)
    refused(errno.EBUSY, sync, root)
    assert 'big' in word(root, 'error') and '3 gradients' in word(root, 'error')
    put_gradient(root, 'big', grads[2])
    refused(errno.EBUSY, put_gradient, root, 'big', grads[2])
    sync(root)
    first = ((grads[0] + grads[1]) + grads[2]).astype('f8') / 3
    assert near(np.fromfile(big, 'f4'), adamw(p, [first]))
    for g in grads[:2]:
        put_gradient(root, 'big', g)
    wait_for(lambda: word(root, 'added_elements') == str(5 * len(p)), 'the sum')  # an abort leaves out what waits
    assert int(word(root, 'sum_resident_bytes')) + int(word(root, 'sum_stored_bytes')) > 0
    assert command(root, 'abort') == ['ok']
    assert word(root, 'sum_resident_bytes') == word(root, 'sum_stored_bytes') == '0'
    for g in grads[3:]:
        put_gradient(root, 'big', g)
    sync(root)
    second = ((grads[3] + grads[4]) + grads[5]).astype('f8') / 3
    assert near(np.fromfile(big, 'f4'), adamw(p, [first, second]))
    assert word(root, 'step') == '2' and word(root, 'added_elements') == str(8 * len(p))


def test_sums_of_many_parameters_are_added(root):
    """So many that the store adds their bytes in several parts."""
    word(root, 'optimizer', OPTIMIZER + ' accumulate=2')
    for i in range(300):
        (root / ('p%d' % i)).write_bytes(random(16, i).tobytes())
        put_gradient(root, 'p%d' % i, random(16, i))
    assert command(root, 'wait') == ['ok']
    resident, stored = int(word(root, 'sum_resident_bytes')), int(word(root, 'sum_stored_bytes'))
    assert resident > 0 and resident // 65536 + stored // 4096 == 300
    assert word(root, 'parameters') == '300' and word(root, 'state_bytes') == str(300 * 2 * 64)


# ----------------------------------------------------------- sparse gradients

def sparse(n, at, values, magic=b'HTtopk\r\n', version=1, dtype=1):
    return (struct.pack('<8sIB3xQQ', magic, version, dtype, n, len(at)) + at.astype('<u4').tobytes() + values.tobytes())


def test_a_sparse_gradient_is_the_dense_one(root, tmp_path):
    p, g = random(3 * MIB // 4 + 7, 2), random(3 * MIB // 4 + 7, 5)
    at = np.flatnonzero(np.random.default_rng(6).random(len(p)) < 0.02)
    (tmp_path / 'g').write_bytes(sparse(len(p), at, g[at]))
    subprocess.run(['cp', tmp_path / 'g', root / '.hitrain/grad-topk/big'], check=True, timeout=SECONDS_MAX)
    sync(root)
    dense = np.zeros_like(g)
    dense[at] = g[at]
    assert near(np.fromfile(root / 'big', 'f4'), adamw(p, [dense]))
    fd = os.open(root / '.hitrain/grad-topk/big', os.O_WRONLY)  # small pieces, and a child's exec that flushes in between
    data = sparse(len(p), at[:5000], g[at[:5000]])
    for off in range(0, len(data), 4999):
        os.write(fd, data[off:off + 4999])
        if off == 9998:
            subprocess.run(['true'], check=True, timeout=SECONDS_MAX)
    os.close(fd)
    sync(root)
    few = np.zeros_like(g)
    few[at[:5000]] = g[at[:5000]]
    assert near(np.fromfile(root / 'big', 'f4'), adamw(p, [dense, few]))
    assert word(root, 'step') == '2'


@pytest.mark.parametrize('data, named', [
    (b'1234', 'no whole header'), (sparse(1000, np.arange(3), np.ones(3, 'f4'), magic=b'something'[:8]), 'magic'),
    (sparse(1000, np.arange(3), np.ones(3, 'f4'), version=7), 'version 7'),
    (sparse(1000, np.arange(3), np.ones(3, 'f4'), dtype=4), 'dtype 4'),
    (sparse(999, np.arange(3), np.ones(3, 'f4')), '999 elements'),
    (sparse(1000, np.array([1, 3, 3]), np.ones(3, 'f4')), 'must increase'),
    (sparse(1000, np.array([1, 3, 1000]), np.ones(3, 'f4')), 'index 1000 of 1000'),
    (sparse(1000, np.arange(3), np.ones(2, 'f4')), 'ends after'), (sparse(1000, np.arange(3), np.ones(4, 'f4')), 'says')])
def test_a_wrong_sparse_gradient_is_named(root, data, named):
    before = (root / 'w').read_bytes()
    fd = os.open(root / '.hitrain/grad-topk/w', os.O_WRONLY)
    os.write(fd, data)
    refused(errno.EINVAL, os.close, fd)
    assert word(root, 'error').startswith('model/w: sparse gradient: ') and named in word(root, 'error')
    assert word(root, 'step_open') == '0' and (root / 'w').read_bytes() == before


# --------------------------------------------------------------------- bad input

@pytest.mark.parametrize('text,named', [
    ('rmsprop lr=1', 'rmsprop'), ('adamw amsgrad=1', 'amsgrad is not implemented'), ('adamw learning=1', 'learning'), ('adamw lr=fast', 'lr'), ('adamw lr=-1', 'lr'),
    ('adamw beta1=1.5', 'beta1'), ('adamw lr=nan', 'lr'), ('adamw lr=1 lr=2', 'lr'), ('', ''), ('x' * 2000, '')])
def test_wrong_optimizer_is_refused(mnt, text, named):
    d = mnt / 'd'
    d.mkdir()
    refused(errno.EINVAL, word, d, 'optimizer', text)
    assert named in word(d, 'error') and word(d, 'error')
    refused(errno.ENODATA, word, d, 'optimizer')
    refused(errno.ENOENT, os.stat, d / '.hitrain')
    word(d, 'error', '')
    assert word(d, 'error') == ''


def test_wrong_change_of_the_optimizer_changes_nothing(root):
    refused(errno.EINVAL, word, root, 'optimizer', 'adamw lr=-1')
    assert word(root, 'optimizer') == OPTIMIZER and 'lr' in word(root, 'error')
    refused(errno.EINVAL, word, root / 'w', 'optimizer', 'adamw momentum=1')
    assert 'momentum' in word(root / 'w', 'error')
    word(root / 'w', 'optimizer', 'adamw lr=0 weight_decay=0')
    p, g = random(1000, 1), random(1000, 3)
    put_gradient(root, 'w', g)
    sync(root)
    assert np.array_equal(np.fromfile(root / 'w', 'f4'), p)  # its own learning rate is nought


@pytest.mark.parametrize('name,value', [
    ('dtype', 'floats'), ('dtype', ''), ('shape', '1,x'), ('grad_dtype', 'i8'), ('class', 'precious'), ('pin', 'nvme'),
    ('tier', 'tape'), ('tier', 'fast'), ('unheard', 'x'), ('error', 'text')])
def test_wrong_words_are_refused(mnt, name, value):
    (mnt / 'f').write_bytes(b'1234')
    refused(errno.EINVAL, word, mnt / 'f', name, value)
    assert os.listxattr(mnt / 'f') == []


@pytest.mark.parametrize('name', ['stats', 'hits', 'stored_bytes', 'durable_step', 'grad_norm', 'device_read_bytes'])
def test_figures_cannot_be_set(root, name):
    refused(errno.ENOTSUP, word, root, name, '1')
    refused(errno.ENOTSUP, os.removexattr, root, 'user.hitrain.' + name)


def test_step_can_be_set_between_steps(root):
    word(root, 'step', '41')
    put_gradient(root, 'w', random(1000))
    refused(errno.EBUSY, word, root, 'step', '7')
    sync(root)
    assert word(root, 'step') == '42' == word(root, 'durable_step')
    refused(errno.EINVAL, word, root, 'step', 'many')
    refused(errno.EINVAL, word, root.parent, 'step', '1')


def test_roots_do_not_nest_and_are_boundaries(root):
    (root / 'sub').mkdir()
    word(root / 'sub', 'optimizer', OPTIMIZER)  # amends, and makes no root
    refused(errno.EXDEV, os.rename, root / 'sub', root.parent / 'sub')
    refused(errno.EINVAL, word, root.parent, 'optimizer', OPTIMIZER)
    assert 'one below: model' in word(root.parent, 'error')
    (root.parent / 'f').touch()
    refused(errno.EXDEV, os.rename, root.parent / 'f', root / 'f')
    refused(errno.EXDEV, os.link, root / 'w', root.parent / 'w')
    d = root.parent / 'd'
    d.mkdir()
    (d / 'f').touch()
    os.link(d / 'f', root.parent / 'outside')
    refused(errno.EBUSY, word, d, 'optimizer', OPTIMIZER)


def test_misaligned_gradient_is_dropped(root):
    before = (root / 'w').read_bytes()
    fd = os.open(root / '.hitrain/grad/w', os.O_WRONLY)
    os.write(fd, bytes(4000 - 2))
    refused(errno.EINVAL, os.close, fd)
    assert 'w' in word(root, 'error') and 'element' in word(root, 'error')
    assert command(root, 'wait') == ['ok'] and (root / 'w').read_bytes() == before


def test_changed_element_count_needs_a_reset(root):
    put_gradient(root, 'w', random(1000))
    sync(root)
    (root / 'w').write_bytes(random(500).tobytes())
    refused(errno.EINVAL, open, root / '.hitrain/grad/w', 'wb')
    assert 'reset' in word(root, 'error')
    settle(root)  # the first gradient is closed
    assert command(root, 'reset w') == ['ok']
    put_gradient(root, 'w', random(500))
    sync(root)


def test_root_can_end(root):
    put_gradient(root, 'w', random(1000))
    os.removexattr(root, 'user.hitrain.optimizer')
    refused(errno.ENODATA, word, root, 'optimizer')
    refused(errno.ENOENT, os.stat, root / '.hitrain')
    os.rename(root / 'w', root.parent / 'w')
    word(root, 'optimizer', OPTIMIZER)
    put_gradient(root, 'big', random(3 * MIB // 4 + 7))
    sync(root)


def test_no_space_for_a_step_is_told_at_close(make_store):
    store = make_store('64M')
    mnt = store.mount('dram=16M')
    n = 3 * MIB
    r = new_model(mnt / 'm', OPTIMIZER, p=random(n).tobytes())
    sync(r)
    before = (r / 'p').read_bytes()

    def gradient():
        put_gradient(r, 'p', np.ones(n, 'f4'))
    refused(errno.ENOSPC, gradient)
    assert 'space' in word(r, 'error')
    assert command(r, 'wait') == ['ok'] and (r / 'p').read_bytes() == before


def test_closing_reports_what_the_reader_of_ctl_sees(root):
    fd = os.open(root / '.hitrain/ctl', os.O_WRONLY)
    os.write(fd, b'nonsense')
    refused(errno.EINVAL, os.close, fd)
    fd = os.open(root / '.hitrain/ctl', os.O_RDWR)
    refused(errno.E2BIG, os.write, fd, b'x' * 9000 + b'\n')
    assert os.read(fd, 1000).decode().startswith('error: E2BIG')
    os.close(fd)


@pytest.mark.parametrize('chunk', ['64K', '256K', '512K'])
def test_a_store_of_smaller_chunks_trains_and_is_mounted_again(make_store, chunk):
    store = make_store('256M', f'--chunk={chunk}')
    root = new_model(store.mount() / 'model', OPTIMIZER)
    (root / 'w').write_bytes(random(300_000).tobytes())
    for seed in 1, 2:
        (root / '.hitrain/grad/w').write_bytes(random(300_000, seed).tobytes())
        command(root, 'step')
    before = (root / 'w').read_bytes(), (root / '.hitrain/state/w/exp_avg').read_bytes()
    store.remount()
    assert before == ((root / 'w').read_bytes(), (root / '.hitrain/state/w/exp_avg').read_bytes()) and word(root, 'step') == '2'
