# SPDX-License-Identifier: Apache-2.0
"""The commands of the README work as they stand, and the files that documents name exist."""
import os
import pathlib
import re
import subprocess
import tempfile

import pytest

from conftest import remove_folder

TOP = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = pathlib.Path(os.environ.get('HITRAIN_BIN') or TOP / 'build/bin')
BUILD = pathlib.Path(os.environ.get('HITRAIN_BUILD') or TOP / 'build')
README = (TOP / 'README.md').read_text()
DOCUMENTS = [TOP / 'README.md', TOP / 'CONTRIBUTING.md', TOP / 'CHANGELOG.md', *sorted(TOP.glob('docs/**/*.md')), *sorted(TOP.glob('*/README.md')),
             TOP / 'tests/RESULTS.md']


def tour():
    return re.search(r'^## Train with a shell.*?^```sh\n(.*?)^```', README, re.M | re.S).group(1)


@pytest.fixture
def folder():
    """A folder with build/bin in it, as the checkout after make. Nothing stays mounted below it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    path = pathlib.Path(tempfile.mkdtemp(dir=BUILD, prefix='readme-'))
    (path / 'build').mkdir()
    (path / 'build/bin').symlink_to(PROGRAMS)
    yield path
    assert not remove_folder(path), 'the tour left a mount behind'


def test_every_command_of_the_tour_works(folder):
    done = subprocess.run(['bash', '-eu', '-o', 'pipefail', '-c', tour()], cwd=folder, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [line.strip() for line in done.stdout.splitlines()]
    promised = re.findall(r'# prints (.*)$', tour(), re.M)
    assert promised
    for text in promised:
        assert text in printed, f'{text!r} is not a line of:\n{done.stdout}'
    assert 'mount_grad_written_bytes' in done.stdout and 'exp_avg_sq' in done.stdout


@pytest.mark.parametrize('document', DOCUMENTS, ids=lambda path: str(path.relative_to(TOP)))
def test_every_link_leads_to_a_file(document):
    links = re.findall(r'\]\(([^)#:]+)(?:#[^)]*)?\)', document.read_text())
    assert not sorted({link for link in links if not (document.parent / link).exists()})


def test_every_file_it_names_exists():
    named = re.findall(r'`([a-z][\w-]*(?:/[\w.-]+)+/?)`', README)
    made = ('build/', 'dev/')
    missing = sorted({n for n in named if not n.startswith(made) and not (TOP / n).exists()})
    assert not missing


def test_it_stays_short():
    assert len(README.splitlines()) <= 140
