# SPDX-License-Identifier: Apache-2.0
"""The daemon as a process: its inheritance from the program that starts it, missing resources, and the messages about
both."""
import contextlib
import os
import re
import shutil
import subprocess

import pytest

from conftest import BIN, MIB, SECONDS_MAX, SMALL, run, wait_for
from test_life import daemons_of
from test_life_holds import loop_device

OPTIONS = ','.join(SMALL)


def unmount(store):
    subprocess.run(['umount', store.point], check=True, timeout=SECONDS_MAX)
    wait_for(lambda: not daemons_of(store.image), 'end of the daemon')


def sh(script, store, **kw):
    env = dict(os.environ, PATH=f'{BIN}:{os.environ["PATH"]}', IMAGE=str(store.image), POINT=str(store.point), SMALL=OPTIONS)
    return subprocess.run(['bash', '-c', script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=SECONDS_MAX, env=env, **kw)


def nothing_is_left(store):
    assert not store.is_mounted() and not daemons_of(store.image)
    assert run('hitrain-fsck', '--no-wait', store.image).returncode == 0, 'no lock is left'


# --------------------------------------------------------------------- inheritance

@pytest.mark.parametrize('closed', ['<&-', '>&-', '2>&-', '<&- >&- 2>&-'])
def test_closed_standard_descriptors(make_store, closed):
    """Nothing that is opened in their place is taken for them: a message must not end in the store."""
    store = make_store('64M')
    assert sh(f'hitrain -o $SMALL,tune $IMAGE $POINT {closed}', store).returncode == 0
    (store.point / 'f').write_bytes(b'x' * MIB)
    unmount(store)
    assert sh(f'hitrain-fsck $IMAGE {closed}', store).returncode == 0
    assert sh(f'hitrain -o $SMALL $IMAGE.none $POINT {closed}', store).returncode == 1
    assert sh(f'mkfs.hitrain --size=8M $IMAGE {closed}', store).returncode == 1
    store.assert_clean()
    store.mount()
    assert (store.point / 'f').read_bytes() == b'x' * MIB
    assert sh(f'mkfs.hitrain --force --size=16M $IMAGE.2 {closed} && hitrain-fsck $IMAGE.2', store).returncode == 0


def test_a_daemon_keeps_nothing_of_its_starter(make_store, tmp_path):
    """No open file, lock, pipe, folder, terminal or session."""
    store = make_store('64M')
    lock = tmp_path / 'lock'
    done = sh(f'''exec 7>{lock} 11<{tmp_path}; flock 7; cd {tmp_path}
        hitrain -o $SMALL $IMAGE $POINT; exec 7>&- 11>&-; flock -n {lock} echo free''', store)
    assert done.returncode == 0 and done.stdout == 'free\n', done.stderr  # and the pipes of this test are closed
    (pid,) = daemons_of(store.image)
    links = [os.readlink(f'/proc/{pid}/fd/{fd}') for fd in os.listdir(f'/proc/{pid}/fd')]
    assert not [link for link in links if str(tmp_path) in link]
    assert links.count('/dev/null') == 3 and links.count(str(store.image)) == 1
    assert not [link for link in links if link.startswith(str(store.point))], 'it would keep its own mount busy'
    assert os.readlink(f'/proc/{pid}/cwd') == '/' and os.getsid(pid) != os.getsid(0) and os.getpgid(pid) != os.getpgid(0)
    with open(f'/proc/{pid}/status') as f:
        status = f.read()
    assert re.search(r'^Umask:\s+0077$', status, re.M)
    with open(f'/proc/{pid}/stat') as f:
        assert int(f.read().rsplit(')', 1)[1].split()[4]) == 0, 'no terminal'
    unmount(store)


def test_it_is_the_last_to_be_killed_for_memory_and_does_not_wait_for_itself(store):
    CAP_SYS_RESOURCE, PF_MEMALLOC_NOIO, PF_LOCAL_THROTTLE = 1 << 24, 0x00080000, 0x00100000
    with open(f'/proc/{store.daemon.pid}/status') as f:
        if not int(re.search(r'^CapEff:\s+(\w+)$', f.read(), re.M)[1], 16) & CAP_SYS_RESOURCE:
            pytest.skip('without CAP_SYS_RESOURCE neither is permitted')
    with open(f'/proc/{store.daemon.pid}/oom_score_adj') as f:
        assert int(f.read()) == -900
    with open(f'/proc/{store.daemon.pid}/stat') as f:
        flags = int(f.read().rsplit(')', 1)[1].split()[6])
    assert flags & PF_MEMALLOC_NOIO and flags & PF_LOCAL_THROTTLE, 'PR_SET_IO_FLUSHER'


def test_without_the_right_to_be_spared_it_works_and_complains_of_nothing(make_store):
    store = make_store('64M')
    done = sh('setpriv --bounding-set=-sys_resource hitrain -o $SMALL $IMAGE $POINT', store)
    assert done.returncode == 0 and not re.search('oom|flusher|not permitted|denied', done.stdout + done.stderr, re.I), done.stderr
    with open(store.point / 'f', 'wb') as f:
        f.write(b'x' * 100000)
        os.fsync(f.fileno())
    unmount(store)
    assert run('hitrain-fsck', store.image).returncode == 0


@pytest.mark.parametrize('language', ['de_DE.UTF-8', 'C', 'tr_TR.UTF-8', ''])
def test_messages_do_not_depend_on_the_language(make_store, language):
    store = make_store('64M')
    done = sh(f'LC_ALL={language} LANG={language} hitrain $IMAGE.none $POINT', store)
    assert done.returncode == 1 and done.stderr.endswith('image.none: No such file or directory\n')
    assert sh(f'LC_ALL={language} hitrain -o $SMALL $IMAGE $POINT && umount $POINT', store).returncode == 0


def test_an_empty_environment(make_store):
    store = make_store('64M')
    done = subprocess.run(['env', '-i', BIN / 'hitrain', '-o', OPTIONS, store.image, store.point], timeout=SECONDS_MAX)
    assert done.returncode == 0
    unmount(store)


def test_a_folder_that_is_gone(make_store, tmp_path):
    store = make_store('64M')
    gone = tmp_path / 'gone'
    gone.mkdir()
    done = sh(f'cd {gone}; rmdir {gone}; hitrain -o $SMALL $IMAGE $POINT', store)
    assert done.returncode == 0, done.stderr
    unmount(store)


def test_relative_paths_and_links(make_store):
    store = make_store('64M')
    (store.folder / 'link').symlink_to('image')
    (store.folder / 'place').symlink_to('mnt')
    for device, point in (('image', 'mnt'), ('./link', 'place'), (f'../{store.folder.name}/link', './/place/../mnt/')):
        done = sh(f'hitrain -o $SMALL {device} {point}', store, cwd=store.folder)
        assert done.returncode == 0, done.stderr
        with open('/proc/self/mountinfo') as f:
            assert [line.split(' - ')[1].split()[1] for line in f if f' {store.point} ' in line] == [str(store.image)]
        wait_for(lambda: store.is_mounted(), 'mount')
        subprocess.run(['umount', store.point], check=True, timeout=SECONDS_MAX)


# ---------------------------------------------------------------- missing resources

def test_few_descriptors(make_store):
    store = make_store('64M')
    done = sh('ulimit -n 6; hitrain -o $SMALL $IMAGE $POINT', store)
    assert done.returncode == 1 and 'ulimit -n' in done.stderr, done.stderr
    nothing_is_left(store)
    done = sh('ulimit -Sn 6; hitrain -o $SMALL $IMAGE $POINT', store)  # the hard limit is higher
    assert done.returncode == 0, done.stderr
    for i in range(300):
        (store.point / f'{i}').write_bytes(b'x')
    unmount(store)
    done = sh('ulimit -n 24; hitrain -o $SMALL $IMAGE $POINT', store)
    assert done.returncode == 0, done.stderr
    with contextlib.ExitStack() as held:
        files = [held.enter_context(open(store.point / f'{i}', 'rb')) for i in range(300)]
        assert all(f.read() == b'x' for f in files), 'open files of clients are no descriptors of the daemon'
    unmount(store)


def test_little_memory(make_store):
    store = make_store('64M')
    for options, words in (('dram=900T', ('dram=900 TiB', 'available')), ('staging=900T', ('staging=900 TiB', 'available'))):
        done = run('hitrain', '-o', options, store.image, store.point, check=False)
        assert done.returncode == 1 and all(word in done.stderr for word in words), done.stderr
    done = sh('ulimit -v 300000; hitrain -o dram=1G $IMAGE $POINT', store)
    assert done.returncode == 1 and 'ask for less memory' in done.stderr, done.stderr
    nothing_is_left(store)


def test_a_device_that_is_gone_is_an_error_and_no_hang(make_store):
    """A loop device that shrinks to nothing: its reads and writes fail, content in memory stays usable, the mount ends.
    """
    store = make_store('64M')
    image = store.image
    with loop_device(image) as store.image:
        store.mount()
        (store.point / 'big').write_bytes(os.urandom(48 * MIB))
        os.sync()
        saved = store.folder / 'saved'
        shutil.copyfile(image, saved)
        os.truncate(image, 0)
        subprocess.run(['losetup', '-c', store.image], check=True, timeout=SECONDS_MAX)
        done = subprocess.run(['dd', f'if={store.point}/big', 'iflag=direct', 'of=/dev/null', 'bs=1M'], text=True,
                              stderr=subprocess.PIPE, timeout=SECONDS_MAX)
        assert done.returncode == 1 and 'Input/output error' in done.stderr, done.stderr
        done = subprocess.run(['dd', 'if=/dev/zero', f'of={store.point}/new', 'bs=1M', 'count=2', 'conv=fsync'], text=True,
                              stderr=subprocess.PIPE, timeout=SECONDS_MAX)
        assert done.returncode == 1 and ('Input/output error' in done.stderr or 'Read-only' in done.stderr), done.stderr
        assert os.stat(store.point / 'big').st_size == 48 * MIB and os.listdir(store.point)
        subprocess.run(['umount', store.point], check=True, timeout=SECONDS_MAX)
        assert store.daemon.wait(SECONDS_MAX) == 1, 'what could not be written is told by the exit status, too'
        assert 'not everything could be written' in store.messages()
        store.daemon = None
    store.image = image
    shutil.copyfile(saved, image)


# ----------------------------------------------------------------------- messages

@pytest.mark.parametrize('flags', [(), ('-f',)])
@pytest.mark.parametrize('what', ['no device', 'no mount point', 'mount point is a file', 'no store', 'a folder as device',
                                  'damaged', 'twice the same device'])
def test_what_fails_at_the_start_is_told_and_leaves_nothing(make_store, tmp_path, what, flags):
    store = make_store('64M')
    file = tmp_path / 'file'
    file.write_bytes(bytes(20 * MIB))
    content = store.image.read_bytes() if what == 'damaged' else None
    args, words = {
        'no device': ([f'{store.image}.gone', store.point], 'image.gone'),
        'no mount point': ([store.image, tmp_path / 'gone'], f'{tmp_path}/gone: No such file'),
        'mount point is a file': ([store.image, file], 'is not a directory'),
        'no store': ([file, store.point], str(file)),
        'a folder as device': ([tmp_path, store.point], 'neither a block device nor a regular file'),
        'damaged': ([store.image, store.point], str(store.image)),
        'twice the same device': ([store.image, store.image, store.point], f'{store.image} is held by this program already'),
    }[what]
    if what == 'damaged':
        with open(store.image, 'r+b') as f:
            for offset in (0, 16 * 4096, 64 * MIB - 4096):
                f.seek(offset)
                f.write(bytes(4096))
    done = run('hitrain', *flags, '-o', OPTIONS, *args, check=False)
    assert done.returncode == 1 and words in done.stderr and 'hitrain: error: ' in done.stderr, done.stderr
    assert not done.stdout
    if content:
        store.image.write_bytes(content)
    nothing_is_left(store)


@pytest.mark.parametrize('flags', [(), ('-f',)])
def test_exit_statuses(make_store, flags):
    store = make_store('64M')
    daemon = subprocess.Popen([BIN / 'hitrain', *flags, '-o', OPTIONS, store.image, store.point], stderr=subprocess.DEVNULL)
    wait_for(lambda: store.is_mounted(), 'mount')
    assert os.listdir(store.point) == []
    if not flags:
        assert daemon.wait(SECONDS_MAX) == 0 and daemons_of(store.image), 'it is ready'
    else:
        assert daemon.poll() is None
    subprocess.run(['umount', store.point], check=True, timeout=SECONDS_MAX)
    assert daemon.wait(SECONDS_MAX) == 0
    wait_for(lambda: not daemons_of(store.image), 'end of the daemon')
