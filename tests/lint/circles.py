#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Files of one folder that call each other in a circle: at most as many as circles.conf says; and folders that do: only
those of its rows of several folders.

    tests/lint/circles.py BUILD [--all]

Reads the symbols of the objects in BUILD/obj, so it needs a build (`make check` has one). A call is a symbol that one
file of a folder defines and another one uses. A circle is a set of files each of which reaches all others by calls.
Calls between folders are the same of all files in them: a header may be low, and what it declares defined above.
Each folder has a limit for the size of its largest circle, which only ever falls. --all prints every circle, and the
calls in it.
"""
import collections
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOP = ('tiering', 'optim', 'fs', 'mount-helpers')


def read_limits():
    """{folder: files in its largest circle}; a folder without a row has none."""
    rows = (line.split('#')[0].split(':') for line in (HERE / 'circles.conf').read_text().splitlines())
    return {row[0].strip(): int(row[1]) for row in rows if len(row) == 2}


def read_symbols(objects):
    """{object: (symbols that it defines, symbols that it uses)}"""
    found = {path: (set(), set()) for path in objects}
    if not objects:
        return found
    text = subprocess.run(['nm', '-A', '-g', *map(str, objects)], check=True, capture_output=True, text=True).stdout
    for line in text.splitlines():
        path, _, rest = line.rpartition(':')
        kind, name = rest.split()[-2:]
        found[pathlib.Path(path)][kind == 'U'].add(name)
    return found


def calls_of(symbols):
    """{file: {file that it calls: symbols}}"""
    home = {name: path for path, (defined, _) in symbols.items() for name in defined}
    calls = collections.defaultdict(lambda: collections.defaultdict(set))
    for path, (_, used) in symbols.items():
        for name in used & home.keys():
            calls[path][home[name]].add(name)
    return calls


def reached(calls, path):
    """All files that calls lead to from here; path itself only if they lead back."""
    seen, todo = set(), [path]
    while todo:
        for to in calls[todo.pop()].keys() - seen:
            seen.add(to)
            todo.append(to)
    return seen


def circles_of(calls, paths):
    reach = {path: reached(calls, path) for path in paths}
    circles = {frozenset(to for to in reach[path] if path in reach[to]) for path in paths if path in reach[path]}
    return sorted(map(sorted, circles), key=len, reverse=True)


def show(calls, circle, name):
    for path in circle:
        for to in circle:
            if path != to and calls[path][to]:
                print(f'    {name(path)} calls {name(to)}: {" ".join(sorted(calls[path][to]))}')


def file_name(path):
    return f'{path.stem}.c'


def check_folders(of_folder, allowed):
    """of_folder: {folder: (symbols that it defines, symbols that it uses)}"""
    calls = calls_of(of_folder)
    circles = {' '.join(map(str, c)): c for c in circles_of(calls, list(of_folder)) if len(c) > 1}
    for names in circles.keys() - allowed:
        print(f'{len(circles[names])} folders call each other in a circle: {names}')
        show(calls, circles[names], str)
    for names in allowed - circles.keys():
        print(f'{names}: no circle; circles.conf allows one')
    return bool(circles.keys() - allowed)


def main():
    build = ROOT / sys.argv[1]
    limits = read_limits()
    wrong, of_folder = 0, {}
    for folder in sorted({p.parent.relative_to(ROOT) for top in TOP for p in (ROOT / top).rglob('*.c')}):
        # Objects of files that are gone may still lie there.
        objects = [build / 'obj' / f'{p.relative_to(ROOT).with_suffix(".o")}' for p in (ROOT / folder).glob('*.c')]
        missing = [o for o in objects if not o.exists()]
        if missing:
            sys.exit(f'{missing[0]} is missing: build first')
        symbols = read_symbols(objects)
        of_folder[folder] = tuple(set().union(*(s[i] for s in symbols.values())) for i in (0, 1))
        calls = calls_of(symbols)
        circles = circles_of(calls, objects)
        size, limit = len(circles[0]) if circles else 0, limits.get(str(folder), 0)
        for circle in circles if '--all' in sys.argv else circles[:size > limit]:
            print(f'{folder}: {len(circle)} files call each other in a circle: {" ".join(p.stem for p in circle)}')
            show(calls, circle, file_name)
        if size != limit:
            wrong |= size > limit
            print(f'{folder}: {size} files in the largest circle; circles.conf allows {limit}')
    return check_folders(of_folder, {names for names in limits if ' ' in names}) or wrong


if __name__ == '__main__':
    sys.exit(main())
