#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Adds up which lines of the project ran in a build with SAN=coverage: `coverage.py build/coverage`.

gcov's JSON of all objects is merged by file and line: a line ran when it ran in any program. Tests themselves are left
out. The report has a line per folder and per file, then each function that no test ran.
"""
import collections
import gzip
import json
import os
import pathlib
import subprocess
import sys
import tempfile

PARTS = ('tiering/', 'optim/', 'fs/', 'mount-helpers/')


def measured(build):
    """The JSON document of every object that ran."""
    counts = sorted(build.resolve().rglob('*.gcda'))
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(counts), 100):
            subprocess.run(['gcov', '--json-format', '--preserve-paths', *map(str, counts[first:first + 100])],
                           cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        for path in pathlib.Path(folder).glob('*.gcov.json.gz'):
            with gzip.open(path) as f:
                yield json.load(f)


def merge(build):
    """{file: {line: runs}}, {(file, function): [first line, lines, runs]}"""
    lines, functions = collections.defaultdict(lambda: collections.defaultdict(int)), {}
    for document in measured(build):
        for file in document['files']:
            name = os.path.normpath(file['file'])
            if not name.startswith(PARTS):
                continue
            for line in file['lines']:
                lines[name][line['line_number']] += line['count']
            for f in file['functions']:
                known = functions.setdefault((name, f['name']), [f['start_line'], f['end_line'] - f['start_line'] + 1, 0])
                known[2] += f['execution_count']
    return lines, functions


def table(sums, title):
    rows = [f'{title:44} {"lines":>7} {"ran":>7}']
    rows += [f'{name:44} {total:7} {100 * ran / total:6.1f} %' for name, (total, ran) in sorted(sums.items()) if total]
    return '\n'.join(rows)


def report(build):
    """Writes BUILD/report.txt; returns its summary."""
    lines, functions = merge(build)
    if not lines:
        return f'nothing below {build} ran'
    files = {name: (len(counts), sum(1 for c in counts.values() if c)) for name, counts in lines.items()}
    folders = collections.defaultdict(lambda: (0, 0))
    for name, (total, ran) in files.items():
        for key in (os.path.dirname(name) + '/', 'all'):
            folders[key] = (folders[key][0] + total, folders[key][1] + ran)
    never = sorted((name, first, count, function) for (name, function), (first, count, runs) in functions.items() if not runs)
    never_text = '\n'.join(f'{name}:{first}: {function} ({count} lines)' for name, first, count, function in never)
    path = build / 'report.txt'
    gaps = []
    for name, counts in sorted(lines.items()):
        missing = [n for n, c in sorted(counts.items()) if not c]
        if missing:
            gaps.append(f'{name}: {" ".join(map(str, missing))}')
    path.write_text('\n\n'.join([table(folders, 'folder'), table(files, 'file'), 'Functions that no test ran\n' + never_text,
                                 'Lines that no test ran\n' + '\n'.join(gaps)]) + '\n')
    return f'{table(folders, "folder")}\n{len(never)} of {len(functions)} functions ran in no test: see {path}'


if __name__ == '__main__':
    print(report(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else 'build/coverage')))
