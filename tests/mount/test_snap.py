# SPDX-License-Identifier: Apache-2.0
"""Kept steps as users meet them: commands of hitrainctl, and files below .hitrain/snap that nothing changes."""
import errno
import json
import mmap
import os
import subprocess
import time

import pytest

from calls import as_user, fails, sync
from conftest import SECONDS_MAX, run, wait_for
from models import new_model
from test_roots import command, put_gradient, random, word

ELEMENTS = 300_000
NOBODY = 65534


def gradients(root, seed):
    for i, name in enumerate(('w', 'deep/v')):
        put_gradient(root, name, random(ELEMENTS, seed + i))


def step(root, seed):
    gradients(root, seed)
    (root / 'rng').write_bytes(b'after %d' % seed)
    sync(root)


@pytest.fixture
def root(mnt):
    tensors = {name: random(ELEMENTS, i).tobytes() for i, name in enumerate(('w', 'deep/v'))}
    r = new_model(mnt / 'model', 'adamw lr=0.01 weight_decay=0.1', **tensors, rng=b'at first')
    os.symlink('w', r / 'link')
    os.setxattr(r / 'w', 'user.note', b'mine')
    step(r, 10)
    return r


@pytest.fixture
def kept(root):
    """Step 1, kept, while the model is at step 2."""
    run('hitrainctl', 'snapshot', root)
    step(root, 20)
    return root / '.hitrain' / 'snap' / '1'


def listed(root):
    return json.loads(run('hitrainctl', 'steps', root, '--json').stdout)['steps']


def content(root):
    names = ['w', 'deep/v', 'rng', '.hitrain/state/w/exp_avg', '.hitrain/state/deep/v/exp_avg_sq', '.hitrain/state/w/step']
    return {n: (root / n).read_bytes() for n in names}


# ------------------------------------------------------------------- commands

def test_steps_are_kept_listed_and_forgotten(root):
    assert listed(root) == [] and run('hitrainctl', 'steps', root).stdout.split()[-1] == 'name'
    assert run('hitrainctl', 'snapshot', root).stdout == f'{root}: kept step 1\n'
    done = json.loads(run('hitrainctl', 'snapshot', root, 'best-so.far', '--json').stdout)
    assert done == {'path': str(root), 'step': 1, 'name': 'best-so.far'}
    gradients(root, 20)  # an open step ends, and is kept
    run('hitrainctl', 'snapshot', root)
    assert [(k['name'], k['step']) for k in listed(root)] == [('1', 1), ('best-so.far', 1), ('2', 2)]
    assert sorted(os.listdir(root / '.hitrain' / 'snap')) == ['1', '2', 'best-so.far']
    run('hitrainctl', 'forget', root, '1', 'best-so.far')
    assert [k['name'] for k in listed(root)] == ['2']
    run('hitrainctl', 'snapshot', root, 'one')
    run('hitrainctl', 'forget', root, '*')
    assert listed(root) == []


def test_steps_are_listed_with_the_space_that_they_alone_have(root):
    """It shares everything until the model changes; then it has the old content alone, until another one shares it."""
    stored = 2 * 3 * 4 * ELEMENTS  # parameters and moments
    run('hitrainctl', 'snapshot', root)
    one, = listed(root)
    assert one['own_bytes'] == 0 and stored <= one['shared_bytes'] < stored + 64 * 4096
    step(root, 20)
    one, = listed(root)
    assert one['shared_bytes'] == 0 and stored <= one['own_bytes'] < stored + 64 * 4096
    run('hitrainctl', 'snapshot', root)
    run('hitrainctl', 'snapshot', root, 'two')
    step(root, 30)
    own = {k['name']: k['own_bytes'] for k in listed(root)}
    assert own == {'1': one['own_bytes'], '2': 0, 'two': 0}
    run('hitrainctl', 'forget', root, '2')
    assert {k['name']: k['own_bytes'] for k in listed(root)} == {'1': one['own_bytes'], 'two': one['own_bytes']}
    kept = [json.loads(line) for line in (root / '.hitrain/kept').read_text().splitlines()]
    assert [(k['name'], k['step']) for k in kept] == [('1', 1), ('two', 2)] and abs(kept[1]['time_ns'] / 1e9 - time.time()) < 3600
    for path in root.parent, root / '.hitrain/snap/two':
        with fails(errno.ENOENT):
            os.stat(path / '.hitrain/kept')


def test_a_rollback_takes_all_back_for_every_reader(root, kept, store):
    """Also for open files, mappings and what the kernel has cached. The same gradients then give the same bits."""
    one, two = content(kept), content(root)
    (root / 'new').write_bytes(b'not in step 1')
    os.unlink(root / 'link')
    os.rename(root / 'deep' / 'v', root / 'away')
    os.setxattr(root / 'w', 'user.note', b'changed')
    os.truncate(root / 'rng', 0)
    os.chmod(root / 'w', 0o600)
    sync(root)
    listing = sorted(os.listdir(kept))
    with open(root / 'w', 'rb') as f, mmap.mmap(f.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as m:
        assert m[:] == two['w'] and f.read(4) == two['w'][:4]
        assert run('hitrainctl', 'rollback', root, '1').stdout == f'{root}: back at step 1\n'
        assert m[:] == one['w'] and os.pread(f.fileno(), 8, 0) == one['w'][:8]
    wait_for(lambda: 'step-rolled-back' in run('hitrainctl', 'events', root.parent).stdout, 'the event')
    assert content(root) == one and word(root, 'step') == '1' and sorted(os.listdir(root)) == listing
    assert os.readlink(root / 'link') == 'w' and os.getxattr(root / 'w', 'user.note') == b'mine'
    for name in ('w', 'rng', 'deep', 'deep/v'):
        a, b = os.stat(root / name), os.stat(kept / name)
        assert (a.st_mode, a.st_mtime_ns, a.st_size) == (b.st_mode, b.st_mtime_ns, b.st_size), name
    step(root, 20)
    assert content(root) == two
    store.crash()
    assert content(root) == two and content(kept) == one
    assert json.loads(run('hitrainctl', 'rollback', root, '1', '--json').stdout) == {'path': str(root), 'step': 1, 'name': '1'}
    store.remount(check=True)
    assert content(root) == one
    step(root, 20)
    assert content(root) == two


def test_a_rollback_waits_for_no_open_step(root, kept):
    two = content(root)
    put_gradient(root, 'w', random(ELEMENTS, 30))
    done = run('hitrainctl', 'rollback', root, '1', check=False)
    assert done.returncode == 1 and 'a step is open' in done.stderr
    command(root, 'abort')
    assert content(root) == two and word(root, 'step') == '2'
    run('hitrainctl', 'rollback', root, '1')
    (root / 'rng').write_bytes(b'new')
    sync(root / 'rng')  # one file alone, as ever
    assert content(root)['w'] == content(kept)['w']


def test_a_clone_trains_on_its_own(root, kept, store):
    """With the same gradients it gets the same bits as the model that it comes from."""
    two = content(root)
    place = root.parent / 'forks' / 'of 1'
    assert not place.exists()  # the kernel knows that, too
    place.parent.mkdir()
    os.listdir(place.parent)
    assert run('hitrainctl', 'clone', root, '1', place).stdout == f'{place}: a model of its own, at step 1 of {root}\n'
    assert os.listdir(place.parent) == ['of 1'] and content(place) == content(kept) != two
    assert os.readlink(place / 'link') == 'w' and os.getxattr(place / 'w', 'user.note') == b'mine'
    step(place, 20)
    assert content(place) == content(root) == two and word(place, 'step') == '2'
    step(place, 30)
    assert content(root) == two and listed(place) == []
    three, one = content(place), content(kept)
    store.crash()
    assert content(place) == three and content(kept) == one and content(root) == two
    done = json.loads(run('hitrainctl', 'clone', root, '1', root.parent / 'second', '--json').stdout)
    assert done == {'path': str(root.parent / 'second'), 'of': str(root), 'step': 1}
    run('hitrainctl', 'forget', root, '1')
    assert content(root.parent / 'second') == one
    store.remount(check=True)
    step(root.parent / 'second', 20)
    assert content(root.parent / 'second') == content(root) == two


def test_a_clone_below_a_bind_mount_is_where_its_name_says(root, kept, tmp_path):
    """The name that a user gives, and the place in the store, differ there."""
    (root.parent / 'team').mkdir()
    other = tmp_path / 'a longer name than that of the mount'
    other.mkdir()
    subprocess.run(['mount', '--bind', root.parent / 'team', other], check=True, timeout=SECONDS_MAX)
    try:
        run('hitrainctl', 'clone', root, '1', other / 'one')
        run('hitrainctl', 'clone', root, '1', root.parent / 'two')
        assert os.listdir(root.parent / 'team') == ['one'] and content(root.parent / 'team' / 'one') == content(kept)
        assert content(root.parent / 'two') == content(kept)
    finally:
        subprocess.run(['umount', other], check=True, timeout=SECONDS_MAX)


def test_the_name_of_a_folder_is_no_command(root, kept, tmp_path):
    """Another user made it, and a symlink leads there."""
    (root.parent / 'a\nforget 1\nb').mkdir()
    os.symlink(root.parent / 'a\nforget 1\nb', tmp_path / 'link')
    done = run('hitrainctl', 'clone', root, '1', tmp_path / 'link' / 'new', check=False)
    assert [k['name'] for k in listed(root)] == ['1']
    assert done.returncode == 1 and 'line break' in done.stderr


def test_a_clone_goes_into_the_directory_that_is_meant(root, kept):
    """Somebody moves it away while the command is on its way, and has another one in its place."""
    folder = root.parent / 'folder'
    folder.mkdir()
    meant = os.stat(folder).st_ino
    folder.rename(root.parent / 'moved')
    folder.mkdir()
    answers = command(root, f'clone_in {meant} 1 folder/new')
    assert answers != ['ok'] and os.listdir(folder) == [] == os.listdir(root.parent / 'moved')
    assert command(root, f'clone_in {meant} 1 moved/new') == ['ok'] and os.listdir(root.parent / 'moved') == ['new']
    assert command(root, f'clone_in {os.stat(root.parent).st_ino} 1 top') == ['ok']


def test_a_clone_of_what_is_no_model_is_refused(root):
    said, = command(root.parent, 'clone a new')
    assert 'EINVAL' in said and 'no model root' in said


def test_commands_refuse_what_is_wrong(root):
    run('hitrainctl', 'snapshot', root, 'a')
    for args, why in ((['snapshot', root, 'a'], 'EEXIST'), (['snapshot', root, '12'], 'no name'),
                      (['snapshot', root, 'a/b'], 'no name'), (['snapshot', root, '..'], 'no name'),
                      (['snapshot', root, 'a b'], 'no name'), (['snapshot', root, 'a\nforget a'], 'no name'),
                      (['snapshot', root, ''], 'no name'), (['forget', root, '9'], "no kept step '9'"),
                      (['forget', root, '../a'], 'no name'), (['steps', root / 'deep'], 'no model root'),
                      (['rollback', root, '9'], "no kept step '9'"), (['rollback', root, '*'], ''),
                      (['clone', root, '9', root.parent / 'c'], "no kept step '9'"),
                      (['clone', root, 'a', root / 'c'], 'outside of model roots'),
                      (['clone', root, 'a', root], 'exists'), (['clone', root, 'a', '/tmp/c'], ''),
                      (['clone', root, 'a', root.parent / 'none' / 'c'], 'No such file'),
                      (['clone', root, 'a', root.parent / '.hitrain'], 'not a path'),
                      (['clone', root, '../a', root.parent / 'c'], 'no name'),
                      (['clone', root, 'a', str(root.parent) + '/c\nforget a'], 'cannot be the name'),
                      (['clone', root, 'a', str(root.parent) + '/c '], 'with a blank'), (['clone', root, 'a', str(root.parent) + '/ c'], 'with a blank'),
                      (['steps', root.parent], 'no model root'), (['snapshot', root.parent], '')):
        done = run('hitrainctl', *args, check=False)
        assert done.returncode == 1 and why in done.stderr and not done.stdout, (args, done)
    assert [k['name'] for k in listed(root)] == ['a']


def test_only_those_who_steer_keep_and_forget(root, kept):
    os.chmod(root.parent, 0o755)
    for what in ('snapshot', 'forget', 'rollback'):
        done = run('hitrainctl', what, root, 'x', check=False, user=NOBODY, group=NOBODY, extra_groups=[])
        assert done.returncode == 1 and 'ermission denied' in done.stderr
    assert [k['name'] for k in listed(root)] == ['1']


# ---------------------------------------------------------------------- files

def test_a_kept_step_stays_as_it_was(store, root):
    was = content(root)
    run('hitrainctl', 'snapshot', root)
    kept = root / '.hitrain' / 'snap' / '1'
    for seed in (20, 30):
        step(root, seed)
    (root / 'deep' / 'more').write_bytes(b'new')
    os.unlink(root / 'rng')
    os.rename(root / 'w', root / 'renamed')
    sync(root)
    assert content(kept) == was and sorted(os.listdir(kept)) == ['deep', 'link', 'rng', 'w']
    assert os.listdir(kept / 'deep') == ['v'] and os.readlink(kept / 'link') == 'w' and (kept / 'link').read_bytes() == was['w']
    assert word(kept, 'step') == '1' and word(kept / 'w', 'dtype') == 'f32' and os.getxattr(kept / 'w', 'user.note') == b'mine'
    store.crash()
    assert content(kept) == was and word(root, 'step') == '3'


def test_programs_copy_and_map_a_kept_step(root, kept, tmp_path):
    was = content(kept)
    subprocess.run(['cp', '-a', kept, tmp_path / 'copy'], check=True, timeout=SECONDS_MAX)
    assert {n: (tmp_path / 'copy' / n).read_bytes() for n in ('w', 'deep/v', 'rng')} == {n: was[n] for n in ('w', 'deep/v', 'rng')}
    with open(kept / 'w', 'rb') as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
        step(root, 30)
        assert m[:] == was['w']
    done = subprocess.run(['getfattr', '--only-values', '-n', 'user.hitrain.dtype', kept / 'deep' / 'v'], stdout=subprocess.PIPE,
                          check=True, timeout=SECONDS_MAX)
    assert done.stdout == b'f32'
    subprocess.run(['cp', '-r', kept, root.parent / 'other'], check=True, timeout=SECONDS_MAX)
    assert (root.parent / 'other' / 'w').read_bytes() == was['w']


def test_kept_steps_are_not_listed_in_the_root(root, kept):
    done = subprocess.run(['find', root], stdout=subprocess.PIPE, check=True, timeout=SECONDS_MAX).stdout
    assert b'snap' not in done and 'snap' in os.listdir(root / '.hitrain')
    assert not os.path.exists(root / 'deep' / '.hitrain' / 'snap') and not os.path.exists(kept / '.hitrain' / 'snap' / '1')
    assert not os.path.exists(root.parent / '.hitrain' / 'snap')


def test_nothing_moves_into_or_out_of_a_kept_step(root, kept):
    (root / 'f').write_bytes(b'f')
    for call in (lambda: os.rename(kept / 'w', root / 'w2'), lambda: os.rename(root / 'f', kept / 'f'),
                 lambda: os.link(kept / 'w', root / 'w2'), lambda: os.link(root / 'f', kept / 'f'),
                 lambda: os.rename(kept, root.parent / 'whole'), lambda: os.rmdir(kept)):
        with pytest.raises(OSError) as e:
            call()
        assert e.value.errno in (errno.EROFS, errno.EXDEV, errno.EPERM, errno.EBUSY, errno.ENOTSUP), e.value
    assert sorted(os.listdir(root)) == ['deep', 'f', 'link', 'rng', 'w'] and sorted(os.listdir(kept)) == ['deep', 'link', 'rng', 'w']


def test_permissions_are_those_of_that_moment(root):
    os.chmod(root.parent, 0o755)
    os.chmod(root / 'rng', 0o644)
    os.chmod(root / 'w', 0o600)
    run('hitrainctl', 'snapshot', root, 'a')
    os.chmod(root / 'rng', 0o600)
    os.chmod(root / 'w', 0o644)
    run('hitrainctl', 'snapshot', root, 'b')
    snap = root / '.hitrain' / 'snap'
    assert as_user((snap / 'a' / 'rng').read_bytes) == b'after 10' and len(as_user((snap / 'b' / 'w').read_bytes)) == 4 * ELEMENTS
    for path in (snap / 'a' / 'w', snap / 'b' / 'rng'):
        with fails(errno.EACCES):
            as_user(path.read_bytes)
    os.chmod(root, 0o700)
    with fails(errno.EACCES):
        as_user(lambda: os.listdir(snap))


def test_names_of_no_kept_step_do_not_exist(root, kept):
    snap = kept.parent
    for name in ('2', '01', 'x', '1 ', 'x' * 255):
        with fails(errno.ENOENT):
            os.stat(snap / name)
    for call in (lambda: os.mkdir(snap / 'x'), lambda: os.open(snap / 'x', os.O_CREAT | os.O_WRONLY), lambda: os.rmdir(snap)):
        with pytest.raises(OSError):
            call()


def test_a_program_goes_on_with_a_kept_step_that_is_forgotten(root, kept):
    was = (kept / 'w').read_bytes()
    with open(kept / 'w', 'rb') as f:
        run('hitrainctl', 'forget', root, '1')
        assert f.read() == was
    with fails(errno.ENOENT):
        os.stat(kept)
