# SPDX-License-Identifier: Apache-2.0
"""Loop devices, and a cgroup whose members use one slowly."""
import contextlib
import errno
import os
import pathlib
import subprocess

import pytest

from conftest import SECONDS_MAX, wait_for

BLKIO = '/sys/fs/cgroup/blkio'


@contextlib.contextmanager
def a_loop(*args):
    """A loop device, which is gone at the end: the kernel keeps it longer if a program that looks at all devices has it open."""
    made = subprocess.run(['losetup', '--find', '--show', *map(str, args)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX)
    if made.returncode:
        pytest.skip(f'no loop devices here: {made.stderr.strip()}')
    device = made.stdout.strip()
    file = pathlib.Path('/sys/block', os.path.basename(device), 'loop/backing_file')
    backing = file.read_text()

    def shows_it():
        try:
            return file.read_text() == backing
        except OSError:
            return False
    try:
        yield device
    finally:
        subprocess.run(['losetup', '-d', device], check=True, timeout=SECONDS_MAX)
        wait_for(lambda: not shows_it(), f'the end of {device}')


def loop_device(image):
    return a_loop('--direct-io=on', image)


def cgroup_root():
    """(folder, version 2?) of a cgroup hierarchy that can limit devices; None where there is none."""
    if os.path.isdir(BLKIO):
        return BLKIO, False
    try:
        with open('/sys/fs/cgroup/cgroup.controllers') as f:
            if 'io' in f.read().split():
                with open('/sys/fs/cgroup/cgroup.subtree_control', 'w') as control:
                    control.write('+io')
                return '/sys/fs/cgroup', True
    except OSError:
        pass
    return None


def remove_group(folder):
    """Processes that have ended stay in a cgroup for a moment."""
    def removed():
        try:
            os.rmdir(folder)
        except OSError as e:
            assert e.errno == errno.EBUSY, e
            return False
        return True
    wait_for(removed, f'{folder} is empty')


@contextlib.contextmanager
def slow_group(device, ways=('write',)):
    """A cgroup for processes that use device slowly; yields (folder, limit).

    limit(bytes) lets its members move so many bytes per second each way, limit(0) any number; limit(bytes, other) means
    another device.
    """
    root = cgroup_root()
    if not root:
        pytest.skip('no cgroup here limits devices')
    folder = f'{root[0]}/hitrain-test-{os.getpid()}'
    limited = {device}

    def limit(bytes_per_s, which=device):
        limited.add(which)
        number = os.stat(which).st_rdev
        name = f'{os.major(number)}:{os.minor(number)}'
        for way in ways:
            file, value = (('io.max', f'{way[0]}bps={bytes_per_s or "max"}') if root[1] else
                           (f'blkio.throttle.{way}_bps_device', str(bytes_per_s)))
            with open(f'{folder}/{file}', 'w') as f:
                f.write(f'{name} {value}')

    try:
        os.mkdir(folder)
        limit(0)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        pytest.skip(f'no cgroup can be made here: {e}')
    try:
        yield folder, limit
    finally:
        for which in limited:
            limit(0, which)
        with open(f'{folder}/cgroup.procs') as f:
            members = f.read().split()
        for member in members:  # a failed test leaves its daemon here
            with contextlib.suppress(OSError), open(f'{root[0]}/cgroup.procs', 'w') as f:
                f.write(member)
        remove_group(folder)
