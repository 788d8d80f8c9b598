#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The picture of a terminal in the README: training, a crash, and the recovery. recording.py OUT.svg runs the commands as
root, with the programs in $HITRAIN_BIN or build/bin, and draws what they print.
"""
import html
import os
import pathlib
import re
import subprocess
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parents[1]
BIN = os.environ.get('HITRAIN_BIN', TOP / 'build/bin')
LINE, MARGIN, WIDTH = 20, 16, 880
SETUP = r'''printf '\0\0\200\77%.0s' {1..1024} >ones; mkdir mnt; mount() { shift 2; mount.hitrain "$@"; }'''
# A comment is drawn and does nothing.
COMMANDS = r'''
mkfs.hitrain --size=256M store.img >/dev/null
mount -t hitrain $PWD/store.img mnt -o dram=64M
mkdir mnt/model; setfattr -n user.hitrain.dtype -v f32 mnt/model
setfattr -n user.hitrain.optimizer -v 'adamw lr=0.125' mnt/model
cp ones mnt/model/w                               # a parameter
for i in 1 2 3; do cp ones mnt/model/.hitrain/grad/w; hitrainctl step mnt/model; done
od -A n -t f4 -N 4 mnt/model/w                    # trained by the store itself
cp ones mnt/model/.hitrain/grad/w                 # a fourth step begins,
kill -9 $(pgrep -f "^hitrain $PWD/store.img")     # and the power fails
umount mnt; mount -t hitrain $PWD/store.img mnt
getfattr --only-values -n user.hitrain.step mnt/model; echo
od -A n -t f4 -N 4 mnt/model/w                    # the third step, whole
umount.hitrain mnt; hitrain-fsck -n store.img
'''.strip().splitlines()


def record():
    """[(command, lines that it printed)]"""
    with tempfile.TemporaryDirectory(prefix='hitrain-recording-') as folder:
        script = '\n'.join([SETUP, *(f'echo "@@"\n{c}' for c in COMMANDS)])
        done = None
        try:
            with open(f'{folder}/.output', 'w') as output:  # a daemon keeps no pipe of this program
                done = subprocess.run(['bash', '-eu', '-c', script], cwd=folder, stdin=subprocess.DEVNULL, stdout=output,
                                      stderr=subprocess.STDOUT, timeout=100,
                                      env={**os.environ, 'PATH': f'{BIN}:{os.environ["PATH"]}', 'LC_ALL': 'C'})
        finally:
            if done is None or done.returncode:
                subprocess.run(['umount', '-l', f'{folder}/mnt'], stderr=subprocess.DEVNULL)
        text = pathlib.Path(folder, '.output').read_text()
        if done.returncode:
            sys.exit(f'exit status {done.returncode}\n{text}')
    text = re.sub(r'[^\n]*[Kk]illed[^\n]*\n', '', text.replace(f'{folder}/', ''))
    return [(c, part.rstrip().splitlines()) for c, part in zip(COMMANDS, text.split('@@\n')[1:])]


def draw(session):
    """It has its own background, so that it is readable on a light page and on a dark one."""
    rows = []
    for command, printed in session:
        words, _, comment = command.partition('  #')
        rows.append(f'<tspan class="p"># </tspan>{html.escape(words)}<tspan class="c">{html.escape("  #" * bool(comment) + comment)}</tspan>')
        rows += [f'<tspan class="o">{html.escape(line)}</tspan>' for line in printed]
    height = len(rows) * LINE + 2 * MARGIN
    text = '\n'.join(f'<text x="{MARGIN}" y="{MARGIN + LINE * i + 14}" xml:space="preserve">{row}</text>'
                     for i, row in enumerate(rows))
    return f'''<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">
<title>A terminal: three steps of training, a crash in the fourth, and the third step after the next mount</title>
<style>text{{font:14px monospace;fill:#f0f0f0}}.p{{fill:#7cc983}}.c{{fill:#a0a8b8}}.o{{fill:#9ecbff}}</style>
<rect width="{WIDTH}" height="{height}" rx="8" fill="#1d2026"/>
{text}
</svg>
'''


if __name__ == '__main__':
    pathlib.Path(sys.argv[1]).write_text(draw(record()))
