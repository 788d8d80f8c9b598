#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Includes go down the layers, and each third-party library stays in its folder: layers.conf, fences.conf.

An include is one of: "name.h" of the same folder, "folder/name.h" from the root, <hitrain/name.h>, or a system header.
A header called *_priv.h is for its own folder, the unit tests of that folder, and private headers of tests/support.
"""
import fnmatch
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOP = ('include', 'tiering', 'optim', 'fs', 'mount-helpers', 'tests', 'bench')
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')


def read_table(path):
    """Rows 'key: word...' in their order."""
    rows = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.split('#')[0].strip()
        if not line:
            continue
        key, colon, words = line.partition(':')
        if not colon or key.strip() in rows:
            sys.exit(f'{path}:{number}: not "key: words", or the key for a second time')
        rows[key.strip()] = words.split()
    return rows


def check_table(layers):
    """A layer sees only layers above its own row; so there is no cycle."""
    known = set()
    for layer, sees in layers.items():
        for s in sees:
            if s != '*' and s not in known:
                yield f'layers.conf: {layer} sees {s}, which is not in a row before it'
        known.add(layer)


class Tree:
    def __init__(self, layers, fences):
        self.layers = layers
        self.fences = fences

    def is_open(self, layer):
        return self.layers.get(layer) == ['*']

    def layer_of(self, folder):
        """The layer a folder is; subfolders belong only to layers that see everything."""
        if folder in self.layers:
            return folder
        top = folder.split('/')[0]
        return top if self.is_open(top) else None

    def fence_breach(self, here, name):
        for pattern, folders in self.fences.items():
            if fnmatch.fnmatch(name, pattern) and not any(here == f or here.startswith(f + '/') for f in folders):
                return f'<{name}> is only for {", ".join(folders)}'
        return None

    def breach(self, path, here, quoted, angled):
        """Why this include is wrong, or None."""
        if angled is not None and not angled.startswith('hitrain/'):
            return None if self.is_open(here) else self.fence_breach(here, angled)
        if angled is not None:
            target = 'include/' + angled
        elif '/' in quoted:
            target = quoted
        else:
            target = f'{path.parent.as_posix()}/{quoted}'
        if not (ROOT / target).is_file():
            return f'there is no {target}'
        if target.startswith('include/') and angled is None:
            return f'write <{target[len("include/"):]}>'
        there = self.layer_of(str(pathlib.PurePosixPath(target).parent))
        if there is None:
            return f'{target} is in no layer'
        if there != here and not self.is_open(here) and there not in self.layers[here]:
            return f'{here} may not see {there}'
        friend = path.as_posix().startswith(f'tests/unit/{there}/') or path.match('tests/support/*_priv.h')
        if target.endswith('_priv.h') and there != here and not friend:
            return f'{target} is private to {there}'
        return None

    def check_file(self, path):
        here = self.layer_of(path.parent.as_posix())
        if here is None:
            yield f'{path}:1: this folder is in no row of layers.conf'
            return
        text = (ROOT / path).read_text(encoding='utf-8')
        for number, line in enumerate(text.splitlines(), 1):
            found = INCLUDE.match(line)
            why = found and self.breach(path, here, *found.groups())
            if why:
                yield f'{path}:{number}: {why}'


def main():
    layers = read_table(HERE / 'layers.conf')
    tree = Tree(layers, read_table(HERE / 'fences.conf'))
    wrong = list(check_table(layers))
    for top in TOP:
        for path in sorted((ROOT / top).rglob('*.[ch]')):
            wrong += tree.check_file(path.relative_to(ROOT))
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())
