# SPDX-License-Identifier: Apache-2.0
"""Files that have not changed for a while are compressed, and every program sees the same bytes as before."""
import errno
import json
import mmap
import os
import shutil
import subprocess

import numpy as np
import pytest

from calls import fails, sync, write_synced
from conftest import SECONDS_MAX, run, wait_for

MIB = 1 << 20
SOON = 'compress_after=1,compress_inline=off'


def figures(point):
    done = run('hitrainctl', 'background', 'status', point, '--json', '--engine=recompress')
    return json.loads(done.stdout)['engines'][0]


def weights(n, seed):
    """n bytes of bf16 weights."""
    values = np.random.default_rng(seed).standard_normal(n // 2, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def attribute(path, name):
    return os.getxattr(path, f'user.hitrain.{name}').decode()


def set_compress(path, value):
    os.setxattr(path, 'user.hitrain.compress', value.encode())


def stored(path):
    return int(attribute(path, 'stored_bytes'))


def wait_until_compressed(*paths):
    """All chunks, by the space that they take."""
    wait_for(lambda: all(stored(p) < p.stat().st_size * 0.75 for p in paths), 'compression')


def folder(point, name, compress='auto', dtype='bf16'):
    made = point / name
    made.mkdir()
    os.setxattr(made, 'user.hitrain.dtype', dtype.encode())
    set_compress(made, compress)
    return made


def evict(path):
    run('hitrainctl', 'evict', path)


@pytest.mark.parametrize('dtype', ['bf16', ''])
def test_programs_see_the_same_bytes(make_store, tmp_path, dtype):
    store = make_store()
    point = store.mount(SOON)
    if dtype:
        made = folder(point, 'made', dtype=dtype)
    else:
        made = point / 'made'
        made.mkdir()
        set_compress(made, 'auto')
    data = weights(5 * MIB + 4242, 1)
    path = made / 'w'
    write_synced(path, data)
    wait_until_compressed(path)
    evict(path)
    assert path.read_bytes() == data
    evict(path)
    with open(path, 'rb') as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == data
    shutil.copy(path, tmp_path / 'copy')
    assert (tmp_path / 'copy').read_bytes() == data
    subprocess.run(['cp', '--reflink=auto', path, made / 'clone'], check=True, timeout=SECONDS_MAX)
    assert (made / 'clone').read_bytes() == data
    evict(path)
    with open(path, 'r+b') as f:
        f.seek(MIB + 100)
        f.write(b'changed')
    data = data[:MIB + 100] + b'changed' + data[MIB + 107:]
    assert path.read_bytes() == data
    os.truncate(path, 3 * MIB + 5)
    os.truncate(path, 4 * MIB)
    data = data[:3 * MIB + 5] + bytes(MIB - 5)
    assert path.read_bytes() == data
    sync(path)
    point = store.remount(SOON)
    assert path.read_bytes() == data
    assert (made / 'clone').read_bytes() != data


def test_figures_and_a_crash(make_store):
    store = make_store()
    point = store.mount(SOON)
    made = folder(point, 'made')
    data = {f'w{i}': weights(2 * MIB, i) for i in range(4)}
    for name, content in data.items():
        write_synced(made / name, content)
    subprocess.run(['cp', '--reflink=auto', made / 'w0', made / 'clone'], check=True, timeout=SECONDS_MAX)
    sync(made / 'clone')
    random = np.random.default_rng(9).bytes(2 * MIB)
    write_synced(made / 'random', random)
    wait_until_compressed(*(made / name for name in data), made / 'clone')
    assert stored(made / 'clone') == stored(made / 'w0')
    wait_for(lambda: figures(point)['kept_raw'] == 2, 'the random file')
    # It counts a chunk after programs see that it is compressed, and saved bytes last.
    saved = 8 * MIB - sum(stored(made / name) for name in data)
    wait_for(lambda: figures(point)['saved_bytes'] == saved, 'the figures')
    now = figures(point)
    assert now['chunks'] == 8 and now['raw_bytes'] == 8 * MIB
    assert stored(made / 'random') == 2 * MIB
    os.sync()
    sync(made / 'random')
    point = store.crash(SOON)
    for name, content in data.items():
        assert (made / name).read_bytes() == content
        assert stored(made / name) < 1.5 * MIB
    assert (made / 'random').read_bytes() == random


def test_new_content_is_compressed_when_it_is_written(make_store):
    store = make_store()
    options = 'compress_inline=on', 'compress_after=3600'
    point = store.mount(*options)
    made, written = folder(point, 'made'), {'w0': weights(2 * MIB + 100, 0)}
    write_synced(made / 'w0', written['w0'])

    def write_another():
        """In place of the one before: the store has no room for very many."""
        (made / 'w1').unlink(missing_ok=True)
        written['w1'] = weights(2 * MIB + 100, 1)
        write_synced(made / 'w1', written['w1'])
        return stored(made / 'w1') < 1.6 * MIB

    wait_for(write_another, 'compression, once the superblock says so')
    now = figures(point)
    assert now['chunks'] == 0 and now['inline_chunks'] >= 2 and 0 < now['inline_saved_bytes'] < 2 * MIB
    with open(made / 'w0', 'r+b') as f:
        f.seek(100)
        f.write(b'changed')
    written['w0'] = written['w0'][:100] + b'changed' + written['w0'][107:]
    sync(made / 'w0')
    set_compress(made / 'w0', 'off')
    os.truncate(made / 'w0', 0)
    write_synced(made / 'w0', written['w0'])
    assert stored(made / 'w0') > 2 * MIB
    point = store.crash(*options)
    for name, data in written.items():
        assert (made / name).read_bytes() == data
    assert stored(made / 'w1') < 1.6 * MIB


def test_the_attribute_is_inherited_and_checked(make_store):
    store = make_store()
    point = store.mount(SOON, 'compress=auto')
    made = folder(point, 'made', compress='off')
    (made / 'below').mkdir()
    write_synced(made / 'below' / 'off', weights(MIB, 1))
    assert attribute(made / 'below' / 'off', 'compress') == 'off'
    write_synced(point / 'on', weights(MIB, 2))  # by the option of the mount
    wait_until_compressed(point / 'on')
    assert stored(made / 'below' / 'off') == MIB
    with fails(errno.EINVAL):
        set_compress(made, 'zstd')
    assert "'off' 'auto'" in attribute(made, 'error')
    os.removexattr(made / 'below' / 'off', 'user.hitrain.compress')
    wait_until_compressed(made / 'below' / 'off')


def test_nothing_is_compressed_unless_it_is_wanted(make_store):
    point = make_store().mount(SOON)
    write_synced(point / 'w', weights(2 * MIB, 1))
    assert figures(point)['steps'] == 0
    set_compress(point / 'w', 'off')
    wait_for(lambda: figures(point)['steps'] >= 1, 'a round')
    assert figures(point)['chunks'] == 0 and stored(point / 'w') == 2 * MIB


def train(root, steps, rest):
    """Steps of a model; rest() comes before each. Parameters and moments at the end."""
    names = ['a', 'b']
    n = 900_000
    for i, name in enumerate(names):
        write_synced(root / name, weights(2 * n, i))
    os.setxattr(root, 'user.hitrain.optimizer', b'adamw lr=0.01 weight_decay=0.1 max_grad_norm=1')
    for step in range(steps):
        rest(step)
        for i, name in enumerate(names):
            (root / '.hitrain' / 'grad' / name).write_bytes(weights(2 * n, 100 * step + i + 7))
        sync(root)
    state = [root / '.hitrain' / 'state' / name / kind for name in names for kind in ('exp_avg', 'exp_avg_sq')]
    return [p.read_bytes() for p in [root / name for name in names] + state]


def test_training_on_compressed_parameters_gives_the_same_bits(make_store):
    store = make_store()
    point = store.mount(SOON)
    raw, small = folder(point, 'raw', compress='off'), folder(point, 'small')

    def rest(step):
        if step % 3 == 0:
            wait_until_compressed(small / 'a', small / 'b')
            evict(small / 'a')

    def no_rest(step):
        pass

    assert train(small, 7, rest) == train(raw, 7, no_rest)
    wait_for(lambda: figures(point)['chunks'] >= 12, 'the figures')
    store.remount(SOON)
    assert (small / 'a').read_bytes() == (raw / 'a').read_bytes()
