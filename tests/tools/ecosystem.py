# SPDX-License-Identifier: Apache-2.0
"""The virtual environment of `make check-ecosystem`: packages from the Python package index, with the pins of one file.

It lies in $XDG_CACHE_HOME/hitrain (or ~/.cache/hitrain), in a folder named by the hash of the pins and the version of
Python. So a change of the pins makes another one, and all else uses it again, also without a network.
"""
import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

PYTHON = '/usr/bin/python3'
PINS = pathlib.Path(__file__).resolve().parents[1] / 'ecosystem/requirements.txt'
# These are built from source, and look at the packages that are there already.
LAST = ('deepspeed',)
SECONDS_MAX = 3600


class EnvironmentMissing(Exception):
    """The text says what failed, and what to do."""


def place():
    version = subprocess.run([PYTHON, '--version'], capture_output=True, text=True, check=True).stdout
    name = hashlib.sha256(PINS.read_bytes() + version.encode()).hexdigest()[:16]
    return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache') / 'hitrain' / f'ecosystem-{name}'


def python():
    """The environment's interpreter; makes the environment if it is not there."""
    folder = place()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f'{folder}.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / 'complete').exists():
            make(folder)
    return str(folder / 'bin/python')


def make(folder):
    print(f'  making {folder}: PyTorch and others, some 3 GB to download and 8 GB on disk', flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run(folder, [PYTHON, '-m', 'venv', folder], 'python3-venv is missing: run `make deps`')
    lines = [l for l in PINS.read_text().splitlines() if l and not l.startswith('#')]
    for first, wanted in ((True, [l for l in lines if not l.startswith(LAST)]), (False, [l for l in lines if l.startswith(LAST)])):
        run(folder, [folder / 'bin/pip', 'install', '--disable-pip-version-check', '--progress-bar', 'off', '--no-cache-dir',
                     *([] if first else ['--no-build-isolation']), *wanted],
            'the packages of tests/ecosystem/requirements.txt could not be installed. The first run needs the Python package index; '
            'later ones need no network')
    (folder / 'complete').touch()


def run(folder, command, why):
    """Shows the names of what is downloaded, as a sign of life."""
    said = []
    try:
        with subprocess.Popen([str(c) for c in command], env={**os.environ, 'DS_BUILD_OPS': '0'}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            for line in process.stdout:
                said.append(line)
                if line.lstrip().startswith(('Downloading', 'Installing', 'Building', 'Successfully')):
                    print(f'    {line.strip()[:110]}', flush=True)
        status = process.returncode
    except OSError as e:
        said, status = [str(e)], 1
    if status != 0:
        shutil.rmtree(folder, ignore_errors=True)
        raise EnvironmentMissing(f'{"".join(said[-15:])}\ncheck-ecosystem: {why}')


if __name__ == '__main__':
    try:
        print(python())
    except EnvironmentMissing as e:
        sys.exit(str(e))
