#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Patterns that make English hard to read, per 10,000 words of documents, comments and help texts.

Prints how often each pattern occurs in each group of files, and fails if one occurs more often than MOST.
`english.py PATTERN GROUP` lists the places instead.
"""
import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize

from ctext import comments, strings

TOP = pathlib.Path(__file__).resolve().parents[2]
MOST = 5  # per 10,000 words

PATTERNS = {
    'what-is': r'\bwhat (?:is|was|has|are|were|had)\b',  # a clause as subject: "What fails is EIO"
    'of-it': r'\bof (?:it|them|those)\b',
    'nobody': r'\b(?:no|some|any)body\b',
    'who': r'(?<!people )(?<!users )(?<!user )\b(?:who|whoever|whom)\b',  # for threads and callers
    'tell': r'\b(?:tell|tells|told)\b',
    'meanwhile': r'\bmeanwhile\b',
    'let-go': r'\b(?:let|lets|letting) go\b',
    'behind': r'\bbehind\b',
}


def manual(text):
    return re.sub(r'^\'?\.\\".*$|^\.[A-Za-z]{1,2}\b|\\f[BIPR]|\\\(..|\\', ' ', text, flags=re.M)


def markdown(text):
    return re.sub(r'^```.*?^```|^    .*?$|`[^`]*`', ' ', text, flags=re.M | re.S)


def c_comments(text):
    return ' '.join(text[begin + 2:end].removesuffix('*/') for begin, end in comments(text))


def python_comments(text):
    """Comments and docstrings; a script inside another string is code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    words = [t.string for t in tokens if t.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    words += [ast.get_docstring(node) or '' for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return ' '.join(words)


def line_comments(text):
    return ' '.join(re.findall(r'^\s*#+(.*)$', text, flags=re.M))


def messages(text):
    return ' '.join(string[1:-1] for string in strings(text) if not string.endswith('.h"'))  # without names of headers


# group: files by git's patterns, and how to read them
GROUPS = {
    'manuals': (['mount-helpers/man/*'], manual),
    'documents': (['README.md', 'CONTRIBUTING.md', 'docs/*.md', 'tests/*.md'], markdown),
    'readmes': (['tiering/README.md', 'optim/README.md', 'fs/README.md'], markdown),
    'messages': (['fs/*.c', 'optim/*.c', 'tiering/*.c', 'mount-helpers/*.c'], messages),
    'headers': (['include/*.h', 'tiering/*.h', 'optim/*.h', 'fs/*.h', 'mount-helpers/*.h'], c_comments),
    'comments': (['tiering/*.c', 'optim/*.c', 'fs/*.c', 'mount-helpers/*.c'], c_comments),
    'client': (['optim/torch/*.py', 'mount-helpers/*.py'], python_comments),
    'tests': (['tests/*.c', 'tests/*.h', 'bench/*.c'], c_comments),
    'test scripts': (['tests/*.py', 'bench/*.py'], python_comments),
    'shell and make': (['*.sh', 'Makefile'], line_comments),
}


def files_of(patterns):
    listed = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard', '--', *patterns], cwd=TOP, capture_output=True, text=True, check=True)
    return [TOP / name for name in listed.stdout.splitlines() if (TOP / name).exists()]


def places(group, pattern):
    patterns, read = GROUPS[group]
    for path in files_of(patterns):
        text = ' '.join(read(path.read_text(errors='replace')).split())
        for found in re.finditer(PATTERNS[pattern], text, re.I):
            print(f'{path.relative_to(TOP)}: ...{text[max(0, found.start() - 60):found.end() + 60]}...')


def main():
    if len(sys.argv) == 3:
        places(sys.argv[2], sys.argv[1])
        return 0
    failed = False
    print(f'{"per 10,000 words":16}' + ''.join(f'{name:>11}' for name in PATTERNS))
    for group, (patterns, read) in GROUPS.items():
        text = ' '.join(read(path.read_text(errors='replace')) for path in files_of(patterns))
        words = max(len(text.split()), 1)
        cells = []
        for pattern in PATTERNS.values():
            count = len(re.findall(pattern, text, re.I)) * 10000 / words
            bad = count > MOST and count * words > 10000  # one in a short text is no pattern
            failed |= bad
            cells.append(f'{count:.0f}{"!" if bad else " "}')
        print(f'{group:16}' + ''.join(f'{cell:>11}' for cell in cells))
    return failed


if __name__ == '__main__':
    sys.exit(main())
