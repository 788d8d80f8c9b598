# SPDX-License-Identifier: Apache-2.0
"""Every example of the pages for users runs and prints what the page says.

A fenced block of the kind "console" has commands after "$ " (and "> " for further lines), and below each its output, where
"..." stands for anything. All blocks of a page run in one shell, in an empty folder.
"""
import os
import pathlib
import re
import subprocess
import tempfile

import pytest

from conftest import BIN, ROOT, SECONDS_MAX, remove_folder

PAGES = 'guide.md', 'files.md', 'operations.md', 'tuning.md', 'faq.md'


def examples(page):
    """[(command, expected output)]"""
    found = []
    for block in re.findall(r'^```console\n(.*?)^```', (ROOT / 'docs' / page).read_text(), re.M | re.S):
        assert block.startswith('$ '), block
        for text in re.split(r'^\$ ', block, flags=re.M)[1:]:
            lines = text.splitlines()
            n = 1
            while n < len(lines) and lines[n].startswith('> '):
                n += 1
            command = '\n'.join([lines[0], *(line[2:] for line in lines[1:n])])
            found.append((command, lines[n:]))
    return found


def pattern(lines):
    """A line "..." is any number of lines, and "..." in a line any text. Blanks count as one."""
    parts = []
    for line in lines:
        if line == '...':
            parts.append(r'(?:[^\n]*\n)*?')
        else:
            words = [r'[^\n]*?'.join(map(re.escape, word.split('...'))) for word in line.split()]
            parts.append(r' *' + r' *(?: )'.join(words) + r' *\n')
    return re.compile(''.join(parts) + r'\Z')


@pytest.fixture
def folder():
    path = pathlib.Path(tempfile.mkdtemp(prefix='hitrain-page-'))
    yield path
    assert not remove_folder(path), 'the page leaves a mount behind'


@pytest.mark.parametrize('page', PAGES)
def test_examples_print_what_the_page_says(folder, page):
    commands = examples(page)
    assert commands
    # mount(8) looks for its helpers beside itself only, so `mount -t hitrain` is the helper here. PyTorch is Debian's.
    script = ['mount() { shift 2; mount.hitrain "$@"; }', 'python3() { /usr/bin/python3 "$@"; }']
    for i, (command, _) in enumerate(commands):
        script += [f'echo "@@{i}@@"', command]
    environment = {**os.environ, 'PATH': f'{BIN}:{os.environ["PATH"]}', 'PYTHONPATH': str(ROOT / 'optim/torch'), 'LC_ALL': 'C'}
    with open(folder / '.output', 'w') as output:  # a daemon that stays keeps no pipe of the test
        done = subprocess.run(['bash', '-eu', '-c', '\n'.join(script)], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                              stdout=output, stderr=subprocess.STDOUT, timeout=SECONDS_MAX)
    text = (folder / '.output').read_text(errors='replace')
    printed = re.split(r'@@\d+@@\n', text)[1:]
    assert done.returncode == 0, f'{commands[len(printed) - 1][0]}\n{text[-2000:]}'
    assert len(printed) == len(commands), text
    for (command, lines), got in zip(commands, printed):
        if got and not got.endswith('\n'):
            got += '\n'
        assert pattern(lines).match(got), f'$ {command}\n--- the page says\n' + '\n'.join(lines) + f'\n--- it prints\n{got}'


def test_every_event_has_a_row():
    rows = re.findall(r'^\| `([a-z-]+)` \| (info|warn|error) \|', (ROOT / 'docs/operations.md').read_text(), re.M)
    source = (ROOT / 'tiering/base/event.c').read_text()
    codes = re.findall(r'\{"([a-z-]+)", HT_LOG_(INFO|WARN|ERROR),', source)
    assert len(codes) > 30 and rows == [(code, level.lower()) for code, level in codes]


def test_a_wrong_page_is_noticed():
    assert pattern(['a ... c', '...', 'd']).match('a  b c\nx\ny\nd\n')
    for text in 'a b\nd\n', 'a b c\nx\n', 'a b c\nd\ne\n', '':
        assert not pattern(['a ... c', '...', 'd']).match(text)
    assert pattern([]).match('') and not pattern([]).match('x\n')
