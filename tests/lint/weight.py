#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The product's C has no more lines than tests/lint/weight allows, folder by folder."""
import sys

from ctext import ROOT, c_files

TABLE = ROOT / 'tests/lint/weight'
ALL_MAX = 103000


def main():
    rows = [line.split() for line in TABLE.read_text().splitlines() if not line.startswith('#')]
    most = {folder: int(lines) for lines, folder in rows}
    have = dict.fromkeys(most, 0)
    for path, text in c_files():
        if path.parts[0] in have:
            have[path.parts[0]] += text.count('\n')
    print('figures: lines of C: ' + ', '.join(f'{f} {n:,} of {most[f]:,}' for f, n in have.items()) + f'; {sum(have.values()):,} in all')
    wrong = [f'{f}: {n} lines, and tests/lint/weight allows {most[f]}' for f, n in have.items() if n > most[f]]
    if sum(most.values()) > ALL_MAX:
        wrong.append(f'tests/lint/weight: {sum(most.values())} lines in all, more than {ALL_MAX}')
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())
