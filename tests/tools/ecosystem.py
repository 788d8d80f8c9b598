# SPDX-License-Identifier: Apache-2.0
"""The virtual environment of `make check-ecosystem`: packages from the Python package index, with the pins of one file.

It lies in $XDG_CACHE_HOME/hitrain (or ~/.cache/hitrain), in a folder named by the hash of the pins and the version of
Python. So a change of the pins makes another one, and all else uses it again, also without a network.
"""
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

PYTHON = '/usr/bin/python3'
PINS = pathlib.Path(__file__).resolve().parents[1] / 'ecosystem/requirements.txt'
# Installed last, with an option of pip: DeepSpeed is built from source, and looks at the packages that are there. What torchtitan asks for is mostly
# for its trainer and its data; its optimizers need none of that.
LAST = {'deepspeed': '--no-build-isolation', 'torchtitan': '--no-deps'}
# DeepSpeed compiles its code for NVMe when it first needs it. That takes minutes, so it is done with the environment.
EXTENSIONS = ('from deepspeed.accelerator import get_accelerator as a\n'
              'for name in ("ShareMemCommBuilder", "PinMemoryBuilder", "AsyncIOBuilder"):\n'
              '    a().create_op_builder(name).load(verbose=True)\n')
SECONDS_MAX = 3600
COMPILE_SECONDS_MAX = 360
MAKE_SECONDS_MAX = 600  # with downloads; compiling gets the rest


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
        begin = time.monotonic()
        if not (folder / 'complete').exists():
            make(folder)
        if not (folder / 'extensions/complete').exists():
            compile_extensions(folder, int(min(COMPILE_SECONDS_MAX, begin + MAKE_SECONDS_MAX - time.monotonic())))
    return str(folder / 'bin/python')


def make(folder):
    print(f'  making {folder}: PyTorch and others, some 3 GB to download and 8 GB on disk', flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run(folder, [PYTHON, '-m', 'venv', folder], 'python3-venv is missing: run `make deps`')
    lines = [l for l in PINS.read_text().splitlines() if l and not l.startswith('#')]
    pip = [folder / 'bin/pip', 'install', '--disable-pip-version-check', '--progress-bar', 'off', '--no-cache-dir']
    run(folder, [*pip, *[l for l in lines if not l.startswith(tuple(LAST))]],
        'the packages of tests/ecosystem/requirements.txt could not be installed. The first run needs the Python package index; '
        'later ones need no network')
    for name, option in LAST.items():
        run(folder, [*pip, option, *[l for l in lines if l.startswith(name)]], f'{name} could not be installed')
    (folder / 'complete').touch()


def compile_extensions(folder, seconds_max):
    """On a busy machine the rest is left to the next run, and tests that need it are skipped."""
    if seconds_max <= 0:
        return
    print('  compiling a part of DeepSpeed: 17 files', flush=True)
    (folder / 'extensions').mkdir(exist_ok=True)
    status = run(folder / 'extensions', ['timeout', seconds_max, folder / 'bin/python', '-c', EXTENSIONS],
                 'a part of DeepSpeed could not be compiled. It needs the packages that `tests/tools/deps.sh ecosystem` installs', variables(folder),
                 accepted=(0, 124))
    if status == 0:
        (folder / 'extensions/complete').touch()
    else:
        print(f'  it took more than {seconds_max} s: the next run goes on with it', flush=True)


def variables(folder):
    """Programs of the environment run with these."""
    return {'PATH': f'{os.environ["PATH"]}:{folder}/bin',  # ninja is there
            'TORCH_EXTENSIONS_DIR': f'{folder}/extensions', 'DS_ACCELERATOR': 'cpu'}


def run(folder, command, why, more=None, accepted=(0,)):
    """Shows the names of downloads and compilations, as a sign of life. Removes the folder if the command fails."""
    said = []
    try:
        with subprocess.Popen([str(c) for c in command], env={**os.environ, 'DS_BUILD_OPS': '0', **(more or {})}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            for line in process.stdout:
                said.append(line)
                if line.lstrip().startswith(('Downloading', 'Installing', 'Building', 'Successfully')):
                    print(f'    {line.strip()[:110]}', flush=True)
                elif re.match(r'\[\d+/', line):
                    print(f'    {line.split("]")[0]}]', flush=True)
        status = process.returncode
    except OSError as e:
        said, status = [str(e)], 1
    if status not in accepted:
        shutil.rmtree(folder, ignore_errors=True)
        raise EnvironmentMissing(f'{"".join(said[-15:])}\ncheck-ecosystem: {why}')
    return status


if __name__ == '__main__':
    try:
        print(python())
    except EnvironmentMissing as e:
        sys.exit(str(e))
