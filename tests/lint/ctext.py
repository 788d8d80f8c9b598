# SPDX-License-Identifier: Apache-2.0
"""For the lint scripts: the C files of the project, and their text without comments and strings."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOP = ('include', 'tiering', 'optim', 'fs', 'mount-helpers', 'tests', 'bench')
TOKEN = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
COMMENT = ('/*', '//')


def c_files():
    """Each C file of the project, as a path below its root, with its text."""
    for top in TOP:
        for path in sorted((ROOT / top).rglob('*.[ch]')):
            yield path.relative_to(ROOT), path.read_text(encoding='utf-8')


def blank(text):
    """The text with spaces for comments and for the content of strings; every character keeps its place."""
    def spaces(match):
        return re.sub(r'[^\n]', ' ', match.group())
    return TOKEN.sub(spaces, text)


def comments(text):
    """(begin, end) of each comment."""
    return [m.span() for m in TOKEN.finditer(text) if m.group().startswith(COMMENT)]


def strings(text):
    """Each string literal, with its quotes."""
    return [m.group() for m in TOKEN.finditer(text) if m.group().startswith('"')]


def line_of(text, at):
    return text.count('\n', 0, at) + 1
