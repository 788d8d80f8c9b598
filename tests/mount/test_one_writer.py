# SPDX-License-Identifier: Apache-2.0
"""A store has one writer, by whatever names its bytes are reached."""
import contextlib
import errno
import os
import signal
import stat
import struct
import subprocess
import time

import pytest

from conftest import BIN, SECONDS_MAX, run, wait_for
from slow import a_loop, loop_device
from test_errors import events

MIB = 1 << 20
SIZE = 64 * MIB


def file(names, image):
    return image


def hard_link(names, image):
    link = image.parent / f'link-{len(list(image.parent.iterdir()))}'
    os.link(image, link)
    names.callback(link.unlink)
    return link


def bind_mount(names, image):
    other = image.parent / f'bound-{len(list(image.parent.iterdir()))}'
    other.touch()
    subprocess.run(['mount', '--bind', image, other], check=True)
    names.callback(subprocess.run, ['umount', other], check=True)
    return other


def loop(names, image):
    return names.enter_context(loop_device(image))


def loop_on_loop(names, image):
    return names.enter_context(a_loop(names.enter_context(a_loop(image))))


def loop_on_link(names, image):
    return loop(names, hard_link(names, image))


def part_of_whole(names, image):
    """A loop device over a part of another one."""
    return names.enter_context(a_loop(f'--sizelimit={SIZE}', names.enter_context(a_loop(image))))


NAMES = file, hard_link, bind_mount, loop, loop_on_loop, loop_on_link, part_of_whole


def refused(program, *args, word, **kw):
    done = run(program, *args, check=False, **kw)
    assert done.returncode != 0 and word in done.stderr, f'{program} {args}: {done.returncode}\n{done.stdout}{done.stderr}'
    return done.stderr


def write(mnt, name):
    with open(mnt / name, 'wb') as f:
        f.write(name[:1].encode() * MIB)
        os.fsync(f.fileno())


@pytest.mark.parametrize('second', NAMES)
@pytest.mark.parametrize('first', NAMES)
def test_nobody_works_on_a_mounted_store_by_another_name(make_store, first, second):
    made = make_store(SIZE)
    image = made.image
    other = made.folder / 'other'
    other.mkdir()
    with contextlib.ExitStack() as names:
        made.image = first(names, image)
        mnt = made.mount()
        with contextlib.ExitStack() as more:
            two = second(more, image)
            write(mnt, 'before')
            refused('hitrain', '-f', two, other, word=str(two))
            refused('hitrain-fsck', '-n', two, word=str(two))
            refused('hitrain-fsck', '-y', two, word=str(two))
            refused('mkfs.hitrain', '--force', two, word=str(two))
            write(mnt, 'after')
            made.unmount()
        made.assert_clean()
    made.image = image
    mnt = made.mount()
    for name in 'before', 'after':
        assert (mnt / name).read_bytes() == name[:1].encode() * MIB


def partition(whole, folder):
    """The first partition, by a device file of its own: without udev /dev has none."""
    name = os.path.basename(whole)
    try:
        with open(f'/sys/block/{name}/{name}p1/dev') as f:
            major, minor = map(int, f.read().split(':'))
    except FileNotFoundError:
        pytest.skip('no partitions of loop devices here')
    os.mknod(folder / 'part', 0o600 | stat.S_IFBLK, os.makedev(major, minor))
    return folder / 'part'


def test_a_partition_and_its_device_have_one_writer(make_store):
    made = make_store(SIZE)
    disk = made.folder / 'disk'
    first = MIB // 512
    entry = struct.pack('<B3xB3xII', 0, 0x83, first, SIZE // 512 - first)  # a table of one partition
    disk.write_bytes(bytes(446) + entry + bytes(48) + b'\x55\xaa')
    os.truncate(disk, SIZE)
    with a_loop('--partscan', disk) as whole:
        part = partition(whole, made.folder)
        run('mkfs.hitrain', part)
        image, made.image = made.image, part
        mnt = made.mount()
        write(mnt, 'before')
        for two in whole, disk:
            refused('hitrain', '-f', two, made.point, word=str(two))
            refused('mkfs.hitrain', '--force', two, word=str(two))
        with a_loop(f'--offset={MIB}', disk) as same:
            refused('hitrain', '-f', same, made.point, word=same)
        made.unmount(check=True)
    made.image = image


def test_parts_of_one_file_are_different_stores(make_store):
    made = make_store(2 * SIZE)
    with a_loop(f'--sizelimit={SIZE}', made.image) as left, a_loop(f'--offset={SIZE}', made.image) as right:
        run('mkfs.hitrain', '--force', left, right)
        image, made.image = made.image, left
        made.image = left
        with open(made.log, 'a') as log:
            daemon = subprocess.Popen([BIN / 'hitrain', '-f', left, right, made.point], stdout=log, stderr=log)
        wait_for(made.mounts_told, 'mount')
        write(made.point, 'before')
        subprocess.run(['umount', made.point], check=True)
        assert daemon.wait(SECONDS_MAX) == 0
        assert run('hitrain-fsck', '-n', left, right).returncode == 0
    made.ends_clean, made.image = False, image


def test_a_loop_device_that_only_reads_does_not_disturb_readers(make_store):
    made = make_store(SIZE)
    with a_loop('--read-only', made.image) as reader:
        assert run('hitrain-fsck', '-n', made.image).returncode == 0
        refused('hitrain-fsck', '-y', made.image, word=reader)
        made.mount('ro')
        assert run('hitrain-fsck', '-n', reader).returncode == 0
        made.unmount()


# ------------------------------------------------ names that locks do not relate

@contextlib.contextmanager
def overlay(image):
    """Another name of the image, on another file system: each has locks of its own. So is a device of two machines."""
    folder = image.parent
    for name in 'lower', 'work', 'merged':
        (folder / name).mkdir()
    upper = folder / 'upper'
    upper.mkdir()
    image.rename(upper / image.name)
    done = subprocess.run(['mount', '-t', 'overlay', 'overlay', '-o', f'lowerdir={folder}/lower,upperdir={upper},workdir={folder}/work',
                           folder / 'merged'])
    if done.returncode:
        (upper / image.name).rename(image)
        pytest.skip('no overlay here')
    try:
        yield upper / image.name, folder / 'merged' / image.name
    finally:
        subprocess.run(['umount', '--lazy', folder / 'merged'], check=True)
        (upper / image.name).rename(image)


@pytest.fixture
def two(make_store):
    """Two mounts to be, of one store by two names."""
    one, other = make_store(SIZE), make_store(SIZE)
    image, spare = one.image, other.image
    with overlay(image) as (one.image, other.image):
        yield one, other
        one.image, other.image = image, spare


def assert_not_mounted(store):
    store.start()
    assert store.daemon.wait(SECONDS_MAX) != 0
    store.daemon = None
    assert 'has this store in use' in store.messages(), store.messages()


@pytest.mark.parametrize('turn', [1, -1])
def test_a_writer_that_locks_do_not_show_answers(two, turn):
    one, other = two[::turn]
    mnt = one.mount()
    write(mnt, 'before')
    assert_not_mounted(other)
    for program in ['hitrain-fsck', '-y'], ['mkfs.hitrain', '--force']:
        refused(*program, other.image, word='has this store in use')
    write(mnt, 'after')
    assert not [e for e in events(mnt, code='taken-over')]
    one.unmount()
    mnt = other.mount()
    assert (mnt / 'before').read_bytes() == b'b' * MIB and (mnt / 'after').read_bytes() == b'a' * MIB
    other.unmount(check=True)


def test_a_dead_writer_does_not_answer(two):
    one, other = two
    write(one.mount(), 'before')
    one.kill()
    one.detach()
    began = time.monotonic()
    mnt = one.mount()
    assert time.monotonic() - began < 8  # the same bytes of the same kernel: nobody can live
    one.kill()
    one.detach()
    mnt = other.mount()
    assert 'waiting' in other.messages()
    assert (mnt / 'before').read_bytes() == b'b' * MIB
    other.unmount(check=True)


def test_a_writer_that_stood_still_stops_when_another_took_over(two):
    one, other = two
    mnt = one.mount()
    write(mnt, 'before')
    one.daemon.send_signal(signal.SIGSTOP)
    theirs = other.mount()
    write(theirs, 'after')
    one.daemon.send_signal(signal.SIGCONT)
    wait_for(lambda: events(mnt, code='taken-over'), 'the event')
    with pytest.raises(OSError) as refusal:
        write(mnt, 'lost')
    assert refusal.value.errno in (errno.EIO, errno.EROFS)
    one.daemon.terminate()
    assert one.daemon.wait(SECONDS_MAX) != 0
    one.daemon = None
    write(theirs, 'end')
    mnt = other.remount(check=True)
    assert sorted(p.name for p in mnt.iterdir()) == ['after', 'before', 'end']
