# SPDX-License-Identifier: Apache-2.0
"""Digests of kept steps, which the daemon computes in the background."""
import errno
import json
import os
import subprocess

import pytest

from calls import fails, sync
from conftest import BIN, MIB, SECONDS_MAX, run, wait_for
from models import new_model
from test_errors import events
from test_roots import command, put_gradient, random, word
from test_scrub import damage
from trees import make_tree

ADAMW = 'adamw lr=0.01 weight_decay=0.1'
QUICK = 'digest=on,background_rate=8G'


def steps(root):
    return {s['name']: s for s in json.loads(run('hitrainctl', 'steps', root, '--json').stdout)['steps']}


def engine(point):
    return json.loads(run('hitrainctl', 'background', 'status', point, '--engine=digest', '--json').stdout)['engines'][0]


def stored(root, name):
    """The digest that the store has computed."""
    wait_for(lambda: 'digest' in steps(root)[name], 'the digest')
    return word(root / '.hitrain' / 'snap' / name, 'digest')


def verify(root, name, *options, check=True):
    return run('hitrainctl', 'verify', root, name, '--json', *options, check=check)


def make_model(root, dtype='f32', elements=300_000):
    def values(seed):
        f32 = random(elements, seed)
        return f32 if dtype == 'f32' else (f32.view('u4') >> 16).astype('u2')

    new_model(root, ADAMW, dtype, **{'w': values(0).tobytes(), 'deep/v': values(1).tobytes(), 'rng': b'state of the generator'})
    for i, name in enumerate(('w', 'deep/v')):
        put_gradient(root, name, values(10 + i))
    sync(root)
    return root


@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_the_digest_is_that_of_everything_that_can_be_read(make_store, dtype):
    """A program that reads the whole step computes the same one, of parameters, state, links, attributes and holes."""
    point = make_store('512M').mount(QUICK)
    root = make_model(point / 'model', dtype)
    (root / 'tree').mkdir()
    make_tree(root / 'tree', sockets=False)
    for name in ('fifo', 'device', 'symbolic-too'):
        if os.path.lexists(root / 'tree' / name):
            os.unlink(root / 'tree' / name)
    for name in ('follow', 'receive'):
        os.setxattr(root / 'tree', f'user.hitrain-{name}', b'part of no step')
    run('hitrainctl', 'snapshot', root)
    run('hitrainctl', 'snapshot', root, 'named')
    digest = stored(root, '1')
    assert len(digest) == 32 and stored(root, 'named') == digest
    done = json.loads(verify(root, '1').stdout)
    assert (done['digest'], done['stored'], done['same']) == (digest, digest, True)
    assert ', as stored' in run('hitrainctl', 'verify', root, 'named').stdout
    assert digest in run('hitrainctl', 'steps', root).stdout
    wait_for(lambda: engine(point)['digests'] == 2 and engine(point)['left_bytes'] == 0, 'the figures')
    assert engine(point)['failed'] == 0 and engine(point)['bytes'] > 2 * MIB


def test_a_directory_of_many_names_is_read_in_their_order(make_store):
    """The store reads it in parts. Files have a name in it alone, or others that come before and after."""
    root = make_store('128M').mount(QUICK) / 'model'
    (root / 'many').mkdir(parents=True)
    word(root, 'optimizer', ADAMW)
    for i in range(700):
        with open(root / 'many' / f'{i * 397 % 700}', 'wb', 0) as f:
            f.write(b'%d' % i)
    for i in range(0, 700, 70):
        for name in ('a', 'many/a', 'many/z', 'z'):
            os.link(root / 'many' / f'{i}', root / f'{name}{i}')
    run('hitrainctl', 'snapshot', root, 'all')
    digest = stored(root, 'all')
    assert json.loads(verify(root, 'all').stdout)['digest'] == digest


def test_stores_of_other_chunks_places_and_codecs_have_the_same_digest(make_store):
    """One byte more, and it is another."""
    def fill(point, chunks_first):
        root = point / 'model'
        root.mkdir()
        data = random(700_000, 1).tobytes()
        if chunks_first:
            (root / 'w').write_bytes(data)  # in small chunks, which stay
        word(root, 'dtype', 'f32')
        if chunks_first:
            word(root / 'w', 'dtype', 'f32')
            os.setxattr(root / 'w', 'user.hitrain.tier', b'capacity')
            (point / 'other').write_bytes(os.urandom(3 * MIB))  # so that content lies elsewhere
        else:
            (root / 'w').write_bytes(data)
            os.setxattr(root / 'w', 'user.hitrain.compress', b'auto')
        (root / 'a').write_bytes(bytes(3 * MIB) + b'x')
        word(root, 'optimizer', ADAMW)
        put_gradient(root, 'w', random(700_000, 2))
        sync(root)
        command(root, 'snapshot')
        return root

    a, b = make_store(), make_store()
    one, two = fill(a.mount(QUICK), False), fill(b.mount(QUICK, 'compress=auto', 'compress_after=1'), True)
    assert stored(one, '1') == stored(two, '1')
    with open(two / 'a', 'r+b') as f:
        f.seek(3 * MIB)
        f.write(b'y')
    command(two, 'snapshot other')
    assert stored(two, 'other') != stored(two, '1')
    for store in (a, b):
        store.unmount(check=True)


def test_a_digest_survives_a_kill_or_is_computed_again(make_store):
    store = make_store()
    point = store.mount(QUICK)
    root = make_model(point / 'model')
    command(root, 'snapshot')
    first = stored(root, '1')
    (point / 'later').write_bytes(b'x')
    sync(point / 'later')  # the digest is before it in the log
    store.crash(QUICK)
    assert word(root / '.hitrain' / 'snap' / '1', 'digest') == first
    command(root, 'snapshot again')
    store.crash(QUICK)
    assert stored(root, 'again') == first
    store.remount('ro', check=True)
    assert {s['digest'] for s in steps(root).values()} == {first}


def test_copies_of_a_step_have_digests_of_their_own(make_store):
    """A clone, and a model that went back, do not bring one along."""
    store = make_store('512M')
    point = store.mount(QUICK)
    root = make_model(point / 'model')
    command(root, 'snapshot')
    first = stored(root, '1')
    run('hitrainctl', 'clone', root, '1', point / 'clone')
    put_gradient(root, 'w', random(300_000, 3))
    put_gradient(root, 'deep/v', random(300_000, 4))
    sync(root)
    command(root, 'snapshot')
    assert stored(root, '2') != first
    run('hitrainctl', 'rollback', root, '1')
    for model in (root, point / 'clone'):
        with fails(errno.ENODATA):
            os.getxattr(model, 'user.hitrain.digest')
        command(model, 'snapshot back')
        assert stored(model, 'back') == first
    store.unmount(check=True)


def test_nobody_writes_a_digest(make_store):
    root = make_model(make_store().mount(QUICK) / 'model')
    command(root, 'snapshot')
    stored(root, '1')
    kept = root / '.hitrain' / 'snap' / '1'
    for path, error in ((root, errno.EOPNOTSUPP), (kept, errno.EOPNOTSUPP)):
        with fails(error):
            os.setxattr(path, 'trusted.hitrain.digest', b'1 ' + b'0' * 32)
        with fails(error):
            os.getxattr(path, 'trusted.hitrain.digest')
        assert not any('digest' in name for name in os.listxattr(path))
        with fails(errno.EOPNOTSUPP):
            os.setxattr(path, 'user.hitrain.digest', b'0' * 32)
    with fails(errno.ENODATA):
        os.getxattr(root, 'user.hitrain.digest')
    with fails(errno.ENODATA):
        os.getxattr(kept / 'w', 'user.hitrain.digest')


def test_damage_is_named_and_gives_no_digest(make_store):
    store = make_store()
    point = store.mount(QUICK)
    root = make_model(point / 'model')
    lost = random(100_000, 77).tobytes()
    (root / 'lost').write_bytes(lost)
    run('hitrainctl', 'background', 'pause', point, '--engine=digest')
    command(root, 'snapshot')
    command(root, 'snapshot early')
    run('hitrainctl', 'evict', root / 'lost')
    damage(store.image, lost[:4096])
    run('hitrainctl', 'background', 'resume', point, '--engine=digest')
    wait_for(lambda: engine(point)['failed'] == 2, 'the failure')
    of = steps(root)['1']
    assert 'digest' not in of and of['digest_error'].startswith('lost: ')
    wait_for(lambda: any('lost' in e['text'] for e in events(point, code='digest-failed')), 'the event')
    with fails(errno.ENODATA):
        os.getxattr(root / '.hitrain' / 'snap' / '1', 'user.hitrain.digest')
    assert 'none: see --json' in run('hitrainctl', 'steps', root).stdout
    assert verify(root, '1', check=False).returncode == 1
    (root / 'lost').unlink()
    command(root, 'snapshot sound')
    stored(root, 'sound')
    command(root, 'forget 1', 'forget early')


def test_verify_finds_content_that_is_not_that_of_the_digest(make_store):
    store = make_store()
    point = store.mount(QUICK)
    root = make_model(point / 'model')
    lost = random(100_000, 77).tobytes()
    (root / 'lost').write_bytes(lost)
    command(root, 'snapshot')
    digest = stored(root, '1')
    run('hitrainctl', 'evict', root / 'lost')
    assert verify(root, '1', f'--digest={digest}').returncode == 0
    store.unmount()
    damage(store.image, lost[:4096])
    store.mount(QUICK)
    assert stored(root, '1') == digest
    done = verify(root, '1', check=False)
    assert done.returncode == 1 and 'lost' in done.stderr
    (root / 'lost').unlink()
    command(root, 'commit', 'forget *')


def test_a_step_with_a_fifo_has_no_digest(make_store):
    point = make_store().mount(QUICK)
    root = make_model(point / 'model')
    os.mkfifo(root / 'deep' / 'line\nbreak')
    command(root, 'snapshot')
    wait_for(lambda: 'digest_error' in steps(root)['1'], 'the failure')
    assert steps(root)['1']['digest_error'] == 'deep/line?break: a device, a socket or a FIFO has no digest'


def test_steps_that_end_are_left_and_content_stays_free(make_store):
    """While it is read; and a rollback, another step and an unmount come meanwhile."""
    store = make_store()
    point = store.mount('digest=on,background_rate=256k')
    root = make_model(point / 'model')
    command(root, 'snapshot first', 'forget first')
    free = os.statvfs(point).f_bavail
    command(root, 'snapshot first')
    wait_for(lambda: engine(point)['left_bytes'], 'the engine')
    command(root, 'rollback first')
    run('hitrainctl', 'background', 'pause', point, '--engine=digest')
    run('hitrainctl', 'forget', root, 'first')
    sync(root)
    wait_for(lambda: os.statvfs(point).f_bavail >= free, 'the space')
    run('hitrainctl', 'background', 'resume', point, '--engine=digest')
    wait_for(lambda: engine(point)['state'] == 'idle' and not engine(point)['left_bytes'], 'the engine')
    command(root, 'snapshot second')
    wait_for(lambda: engine(point)['left_bytes'], 'the engine')
    assert (engine(point)['digests'], engine(point)['failed']) == (0, 0)
    store.remount(QUICK, check=True)
    assert stored(root, 'second')


def test_reading_evicts_nothing(make_store):
    """What programs use stays in memory: the engine reads past it."""
    point = make_store('512M').mount('dram=16M', QUICK)
    root = make_model(point / 'model', elements=2 * MIB)
    run('hitrainctl', 'background', 'pause', point, '--engine=digest')
    command(root, 'snapshot')
    (point / 'hot').write_bytes(os.urandom(4 * MIB))
    sync(point / 'hot')
    run('hitrainctl', 'evict', root / 'w')
    resident = int(word(point / 'hot', 'resident_bytes'))
    assert resident == 4 * MIB
    run('hitrainctl', 'background', 'resume', point, '--engine=digest')
    stored(root, '1')
    assert engine(point)['bytes'] > 40 * MIB
    assert int(word(point / 'hot', 'resident_bytes')) == resident


def test_a_stream_of_changes_needs_no_second_look_at_its_base(make_store):
    """The digest of the base is the store's: reading it again would show as reads of the device."""
    a, b = make_store(), make_store()
    one, two = a.mount(QUICK), b.mount(QUICK)
    root = make_model(one / 'model')
    command(root, 'snapshot')
    stream = run_bytes('archive', root, '1', '-')
    run_bytes('restore', '-', two / 'model', stdin=stream)
    command(two / 'model', 'snapshot')
    for model in (root, two / 'model'):
        stored(model, '1')
        for name in ('w', 'deep/v'):
            run('hitrainctl', 'evict', model / name)
    (root / 'rng').write_bytes(b'another state')
    run('hitrainctl', 'background', 'pause', one)  # a digest of the next step would read all
    command(root, 'snapshot next')
    before = int(word(one, 'device_read_bytes'))
    stream = run_bytes('archive', root, 'next', '-', '--from=1')
    assert int(word(one, 'device_read_bytes')) - before < MIB
    run_bytes('restore', '-', two / 'other', f'--base={two / "model"}', stdin=stream)
    assert (two / 'other' / 'w').read_bytes() == (root / 'w').read_bytes()


def run_bytes(verb, *args, stdin=b''):
    return subprocess.run([BIN / 'hitrainctl', verb, *args], input=stdin, stdout=subprocess.PIPE, check=True,
                          timeout=SECONDS_MAX).stdout
