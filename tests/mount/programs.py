# SPDX-License-Identifier: Apache-2.0
"""Running the programs of tests/programs, and a file system to compare with: ext4 in a file."""
import contextlib
import os
import pathlib
import subprocess
import tempfile

from conftest import ROOT

LONG = bool(os.environ.get('HITRAIN_LONG'))
PROGRAMS = pathlib.Path(os.environ.get('HITRAIN_BUILD', ROOT / 'build')) / 'tests' / 'programs'
SECONDS_MAX = 3600 if LONG else 300


def command(name, *args):
    path = PROGRAMS / name
    assert path.exists(), f'{path} is not there: make clients'
    return [str(path), *map(str, args)]


def client(name, *args, **kw):
    """Runs one to its end; its output is part of the failure."""
    done = subprocess.run(command(name, *args), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors='replace', timeout=SECONDS_MAX, **kw)
    assert done.returncode == 0, f'{name}: exit {done.returncode}\n{done.stdout[-20000:]}'
    return done.stdout


@contextlib.contextmanager
def kernel_folder(size_mib=1024):
    """A folder on ext4 on a loop device; on tmpfs if there are no loop devices."""
    with tempfile.TemporaryDirectory(prefix='hitrain-test-') as tmp:
        image, point = pathlib.Path(tmp, 'image'), pathlib.Path(tmp, 'mnt')
        point.mkdir()
        with open(image, 'wb') as f:
            f.truncate(size_mib << 20)
        made = subprocess.run(['mkfs.ext4', '-q', '-F', image], stdin=subprocess.DEVNULL).returncode == 0
        mounted = made and subprocess.run(['mount', '-o', 'loop,acl', image, point]).returncode == 0
        if not mounted:
            subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size_mib}M', 'hitrain-test', point], check=True)
        try:
            yield point
        finally:
            subprocess.run(['umount', point], check=True, timeout=60)
