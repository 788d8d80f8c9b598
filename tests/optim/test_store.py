# SPDX-License-Identifier: Apache-2.0
"""hitrain.Store and `python -m hitrain`: a store that a program makes, mounts, shares and unmounts, whatever ends the program."""
import ctypes
import os
import pathlib
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap

import pytest
import torch

from trainer import TOP, used_of  # first: it makes the client importable
import hitrain
from hitrain import StoreError, _daemon

BIN = pathlib.Path(os.environ.get('HITRAIN_BIN') or TOP / 'build/bin')
MODEL = '''
    import os, signal, sys, torch, hitrain
    torch.manual_seed(1)
    model, x = torch.nn.Linear(64, 1), torch.randn(256, 64)

    def train(root, steps, resume):
        optimizer = hitrain.AdamW(model.named_parameters(), root, lr=0.05, resume=resume)
        for step in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
        return optimizer.committed_step
'''


@pytest.fixture
def image(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path))
    monkeypatch.setenv('HITRAIN_BIN', str(BIN))
    monkeypatch.setenv('PYTHONPATH', str(TOP / 'optim/torch'))
    image = tmp_path / 'a store.img'
    yield image
    mounts = list(tmp_path.glob('hitrain/*/mnt'))
    for mount in mounts:
        _daemon.detach(mount)
    if image.exists():
        checked = subprocess.run([BIN / 'hitrain-fsck', image], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def store_at(image, **more):
    return hitrain.Store(image, **{'size': '256M', 'dram': '64M', **more})


def program(text, *words):
    return subprocess.Popen([sys.executable, '-c', textwrap.dedent(MODEL) + textwrap.dedent(text), *map(str, words)], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)


def steps_of(store):
    return int(os.getxattr(store / 'model', 'user.hitrain.durable_step'))


TRAINS = '''
    with hitrain.Store(sys.argv[1], size='256M', dram='64M') as store:
        print(train(store / 'model', 2, store.has('model')), flush=True)
        sys.stdin.readline()
'''


def test_a_store_is_made_mounted_and_unmounted_and_a_second_run_goes_on(image):
    for steps in (2, 4):
        assert program(TRAINS, image).communicate('\n')[0] == f'{steps}\n'
        assert not list(image.parent.glob('*.new')) and not any(map(_daemon.is_mounted, image.parent.glob('hitrain/*/mnt')))


def test_who_comes_later_joins_and_who_goes_last_unmounts(image):
    with store_at(image) as first:
        with program(TRAINS, image) as other:
            assert other.stdout.readline() == '2\n'
            assert first.has('model') and not first.has('other') and steps_of(first) == 2
            first.close()
            assert _daemon.is_mounted(first.mountpoint)
            assert other.communicate('\n')[0] == '' and other.returncode == 0
        assert not _daemon.is_mounted(first.mountpoint)
        first.open()  # again
        assert steps_of(first) == 2
        with pytest.raises(StoreError, match='is open already'):
            first.open()
    first.close()  # a second time does nothing


@pytest.mark.parametrize('killed', ['daemon', 'trainer', 'both'])
def test_a_kill_costs_nothing_that_was_committed(image, killed):
    store = store_at(image)
    with program(TRAINS, image) as trainer:
        assert trainer.stdout.readline() == '2\n'
        pid = store._daemon._pid()
        if killed != 'trainer':
            os.kill(pid, signal.SIGKILL)
        if killed != 'daemon':
            trainer.kill()
        trainer.communicate('\n')
    assert _daemon.is_mounted(store.mountpoint) == (killed != 'daemon')
    with store:
        assert steps_of(store) == 2
        assert (store._daemon._pid() == pid) == (killed == 'trainer')
    assert not _daemon.is_mounted(store.mountpoint)


def test_an_offloaded_model_lets_go_when_its_store_closes(image):
    model = torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(4)])
    with store_at(image, size='auto', model=model) as store:
        optimizer = hitrain.offload(model, store / 'model', lr=1e-3, keep=4 << 20)
        model(torch.randn(8, 600)).sum().backward()
        optimizer.step()
        shown = [p.detach().clone() for p in model.parameters()]
        assert os.stat(image).st_size == max(hitrain.store_bytes(model), 64 << 20)
    assert not _daemon.is_mounted(store.mountpoint) and not used_of(store.mountpoint)
    assert len(shown) == 8


def test_a_store_that_is_kept_busy_stays_mounted_and_says_by_whom(image, monkeypatch):
    monkeypatch.setattr(_daemon, 'HELD_SECONDS_MAX', 0.2)
    store = store_at(image).open()
    with subprocess.Popen(['sleep', '1000'], cwd=store.mountpoint) as other:
        with pytest.warns(RuntimeWarning, match=rf'stays mounted .*sleep \(process {other.pid}\)'):
            store.close()
        other.kill()
    with store:
        pass
    assert not _daemon.is_mounted(store.mountpoint)


def test_what_cannot_be_a_store_is_named_and_left_alone(image, tmp_path, monkeypatch):
    with pytest.raises(StoreError, match=r'does not fit into .* bytes left'):
        store_at(image, size='900T').open()
    (tmp_path / 'small').mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=20M', 'none', tmp_path / 'small'], check=True)
    try:
        with pytest.raises(StoreError, match='too little space for a store'):
            hitrain.Store(tmp_path / 'small/x.img').open()
        with pytest.raises(StoreError, match=r'does not fit into .* 20971520 bytes left'):
            hitrain.Store(tmp_path / 'small/x.img', model=torch.nn.Linear(2000, 2000, device='meta')).open()
    finally:
        subprocess.run(['umount', tmp_path / 'small'], check=True)
    with pytest.raises(ValueError, match="size='much'"):
        store_at(image, size='much').open()
    with pytest.raises(StoreError, match='unknown'):
        store_at(image, options='nonsense=1').open()
    image.unlink()
    image.write_bytes(b'some text' * 10000)
    with pytest.raises(StoreError, match='no hitrain|not a hitrain'):
        store_at(image).open()
    assert image.read_bytes() == b'some text' * 10000
    image.unlink()
    monkeypatch.setenv('HITRAIN_BIN', str(tmp_path))
    with pytest.raises(StoreError, match=r'mkfs\.hitrain is not in'):
        store_at(image).open()


def test_a_store_that_another_mount_has_is_refused_with_its_place(image, tmp_path):
    with store_at(image) as store:
        there = tmp_path / 'elsewhere'
        there.mkdir()
        again = hitrain.Store(image)
        again.mountpoint = again._daemon.mountpoint = there
        with pytest.raises(StoreError, match=str(store.mountpoint)):
            again._begin()
        again._daemon.daemon.wait()


def test_an_ordinary_user_needs_fusermount3_alone():
    """Without a folder of the session, too. Here /dev/fuse may be root's: the test has one of its own, in its own mounts."""
    with tempfile.TemporaryDirectory(dir='/tmp', prefix='hitrain-user-') as folder:  # where this user may read
        train_as_user(pathlib.Path(folder))


def train_as_user(place):
    shutil.copytree(BIN, place / 'bin')
    shutil.copytree(TOP / 'optim/torch/hitrain', place / 'python/hitrain')
    shutil.chown(place, 'nobody', 'nogroup')
    os.mknod(place / 'fuse', stat.S_IFCHR | 0o666, os.makedev(10, 229))
    (place / 'fuse').chmod(0o666)
    script = f"""
        mount --bind "{place}/fuse" /dev/fuse
        exec env -u XDG_RUNTIME_DIR TMPDIR="{place}" HITRAIN_BIN="{place}/bin" PYTHONPATH="{place}/python" HOME="{place}" \\
            setpriv --reuid nobody --regid nogroup --clear-groups {sys.executable} -c "$1" "{place}/s.img"
    """
    text = textwrap.dedent(MODEL) + textwrap.dedent(TRAINS)
    for steps in ('2', '4'):
        done = subprocess.run(['unshare', '-m', '--propagation', 'private', 'sh', '-ec', textwrap.dedent(script), 'sh', text], input='\n',
                              capture_output=True, text=True)
        assert done.stdout.split() == [steps] and done.returncode == 0, done.stderr
    assert oct(os.stat(place / 'hitrain-65534').st_mode & 0o777) == '0o700'
    assert subprocess.run([BIN / 'hitrain-fsck', '-n', place / 's.img'], capture_output=True).returncode == 0


def test_half_of_a_new_file_is_made_anew(image):
    pathlib.Path(f'{image}.new').write_bytes(b'what a killed mkfs has left' * 1000)
    with store_at(image) as store:
        assert os.listdir(store) == []
    assert os.stat(image).st_size == 256 << 20 and not os.path.exists(f'{image}.new')


# -- python -m hitrain --

def command(*words, **more):
    return subprocess.run([sys.executable, '-m', 'hitrain', *map(str, words)], capture_output=True, text=True, **more)


def test_run_gives_a_script_its_store_its_arguments_and_its_status(image, tmp_path):
    script = tmp_path / 'train.py'
    script.write_text(textwrap.dedent(MODEL) + textwrap.dedent('''
        root = os.path.join(os.environ['HITRAIN_STORE'], 'model')
        print(train(root, 2, os.path.exists(root)), sys.argv[1:])
        if '--end' in sys.argv:
            os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(5)
    '''))
    begin = ['run', script, '--store', image, '--size', '256M', '--dram=64M']
    done = command(*begin, '--', '--lr', '3')
    assert (done.stdout, done.returncode) == ("2 ['--lr', '3']\n", 5), done.stderr
    done = command(*begin, '--', '--end')
    assert (done.stdout, done.returncode) == ("4 ['--end']\n", 128 + signal.SIGTERM), done.stderr
    assert not any(map(_daemon.is_mounted, tmp_path.glob('hitrain/*/mnt')))


def test_a_run_without_a_store_says_why(image, tmp_path):
    done = command('run', 'train.py', '--store', tmp_path / 'none' / 'x.img')
    assert done.returncode == 1 and done.stderr.startswith('hitrain: ') and 'none' in done.stderr and 'Traceback' not in done.stderr


def forbid_io_uring():
    """As a container does: seccomp answers io_uring_setup with EPERM."""
    code = b''.join(struct.pack('HBBI', *line) for line in ((0x20, 0, 0, 0), (0x15, 0, 1, 425), (6, 0, 0, 0x50001), (6, 0, 0, 0x7fff0000)))
    kept = ctypes.create_string_buffer(code)
    program = struct.pack('HxxxxxxQ', 4, ctypes.addressof(kept))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0


def hide_fuse():
    """In mounts of its own a process has a /dev with three devices."""
    libc, folder = ctypes.CDLL(None), os.path.join(os.environ['XDG_RUNTIME_DIR'], 'dev')
    os.makedirs(folder, exist_ok=True)
    assert libc.unshare(0x20000) == 0 and libc.mount(b'none', b'/', None, 0x44000, None) == 0
    for name in 'null', 'zero', 'urandom':
        place = os.path.join(folder, name)
        pathlib.Path(place).touch()
        assert libc.mount(b'/dev/' + name.encode(), place.encode(), None, 0x1000, None) == 0
    assert libc.mount(folder.encode(), b'/dev', None, 0x5000, None) == 0


@pytest.mark.parametrize('lacks, check, says, remedy', [
    (forbid_io_uring, 'io_uring', 'io_uring cannot be used: Operation not permitted', 'in a container allow the io_uring system calls'),
    (hide_fuse, 'fuse', '/dev/fuse is missing', 'in a container pass the device in')])
def test_a_kernel_that_lacks_something_is_named_with_a_way_out(image, tmp_path, lacks, check, says, remedy):
    done = command('run', 'train.py', '--store', image, '--size', '64M', preexec_fn=lacks)
    assert done.returncode == 1 and says in done.stderr and 'container' in done.stderr and 'Traceback' not in done.stderr
    done = command('doctor', tmp_path, preexec_fn=lacks)
    assert done.returncode == 4 and f'error {check} ' in done.stdout and remedy in done.stdout


def test_doctor_tells_what_a_folder_means_for_a_model(image, tmp_path):
    done = command('doctor', tmp_path, '--parameters', '900T')
    assert done.returncode in (3, 4), done.stderr
    for line in ('kernel', 'io_uring', 'memlock', 'pytorch', 'speed', 'space', 'step'):
        assert f' {line} ' in done.stdout
    assert 'GB/s read' in done.stdout and '-> take another folder' in done.stdout and os.listdir(tmp_path) == []
    for words in (['doctor', tmp_path / 'none'], ['doctor', '--parameters', 'many']):
        done = command(*words)
        assert done.returncode == 1 and done.stderr.startswith('hitrain: ') and done.stderr.count('\n') == 1
    done = command('doctor', tmp_path, env={**os.environ, 'HITRAIN_BIN': str(tmp_path)})
    assert done.returncode == 4 and 'hitrainctl is not in' in done.stdout
