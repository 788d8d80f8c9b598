# SPDX-License-Identifier: Apache-2.0
"""The worked examples of CONTRIBUTING.md apply to these sources, build, and pass the tests that they bring."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = sorted((TOP / 'docs/examples').glob('*.patch'))
SECONDS_MAX = 900
# The tests that an example changes or adds.
UNIT = 'test_kernel', 'test_config', 'test_parse', 'test_repair', 'test_backoff', 'test_trim', 'test_tally'
MOUNTED = 'tests/mount/test_next_object.py', 'tests/mount/test_writeback.py'

LONG = pytest.mark.skipif('HITRAIN_LONG' not in os.environ, reason='HITRAIN_LONG=1 builds the worked examples and runs their tests')


def run(copy, *command):
    environment = {k: v for k, v in os.environ.items() if k not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS', 'HITRAIN_BUILD')}
    environment['HITRAIN_BIN'] = str(copy / 'build/bin')
    done = subprocess.run(command, cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors='replace', timeout=SECONDS_MAX)
    assert done.returncode == 0, f'{" ".join(map(str, command))}\n{done.stdout[-6000:]}'
    return done.stdout


def make_copy(copy):
    """Sources and objects with their times, so that make builds what an example changes and no more."""
    listed = subprocess.run(['git', '-c', f'safe.directory={TOP}', 'ls-files', '-z', '--cached', '--others',
                             '--exclude-standard'], cwd=TOP, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split('\0')):
        if (TOP / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TOP / name, copy / name)
    (copy / 'build').mkdir()
    if (TOP / 'build/deps').exists():
        (copy / 'build/deps').symlink_to((TOP / 'build/deps').resolve())
    for name in 'obj', 'lib', 'bin', 'flags':
        if (TOP / 'build' / name).exists():
            run(copy, 'cp', '-a', TOP / 'build' / name, copy / 'build/')


@pytest.fixture(scope='module')
def copy():
    path = pathlib.Path(tempfile.mkdtemp(prefix='hitrain-examples-'))
    try:
        make_copy(path)
        for example in EXAMPLES:
            run(path, 'git', 'apply', '-C1', example)
        run(path, 'make', '-j2', 'all')
        yield path
    finally:
        shutil.rmtree(path)


def test_contributing_shows_each_example():
    shown = set(re.findall(r'\(docs/examples/([\w-]+\.patch)\)', (TOP / 'CONTRIBUTING.md').read_text()))
    assert shown == {path.name for path in EXAMPLES} and shown


def test_each_example_applies():
    for example in EXAMPLES:
        subprocess.run(['git', '-c', f'safe.directory={TOP}', 'apply', '-C1', '--check', example], cwd=TOP, check=True)


@LONG
@pytest.mark.parametrize('name', UNIT)
def test_unit_tests_of_the_examples_pass(copy, name):
    assert re.search(r'[1-9]\d* passed, 0 failed', run(copy, 'make', '-j2', 'unit', f'TEST={name}'))


@LONG
def test_mounted_tests_of_the_examples_pass(copy):
    assert '2 passed' in run(copy, '/usr/bin/python3', '-m', 'pytest', '-q', *MOUNTED)


@LONG
def test_the_house_style_holds(copy):
    for arguments in ('init', '-q'), ('add', '-A'):  # lints ask git for the files
        run(copy, 'git', *arguments)
    for lint in 'names.py', 'layout.py', 'english.py':
        run(copy, '/usr/bin/python3', f'tests/lint/{lint}')
