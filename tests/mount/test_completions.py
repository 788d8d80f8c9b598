# SPDX-License-Identifier: Apache-2.0
"""The completions of bash and zsh have every option that a program's table has."""
import re
import shutil
import subprocess
import sys

import pytest

from conftest import BIN, ROOT, SECONDS_MAX, run

TABLES = {'hitrainctl': 'hitrainctl/main.c', 'mkfs.hitrain': 'mkfs/main.c', 'hitrain-fsck': 'fsck/main.c'}


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp('completions')
    subprocess.run([sys.executable, ROOT / 'mount-helpers/package/completions.py', BIN, folder], check=True, timeout=SECONDS_MAX)
    return folder


def complete(made, *words):
    """What bash offers for the last word."""
    program = words[0]
    text = f'''source "{made}/bash/{program}"; compopt() {{ :; }}
COMP_WORDS=({' '.join(f"'{w}'" for w in words)}); COMP_CWORD={len(words) - 1}
_{re.sub(r'[^a-z0-9]', '_', program)}; printf '%s\\n' "${{COMPREPLY[@]}}"'''
    done = subprocess.run(['bash', '-eu', '-c', text], capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def table(source):
    text = (ROOT / 'mount-helpers' / source).read_text()
    words = re.findall(r'(?:\{|\(\w+, )"([a-z-]+)", (?:no_argument|required_argument|take_\w+),', text)
    assert len(words) > 4
    return set(words)


@pytest.mark.parametrize('program', TABLES)
def test_every_long_option_is_offered(made, program):
    options = table(TABLES[program])
    if program == 'hitrainctl':
        commands = [c for c in complete(made, program, '') if c[0] != '-']
        offered = set(complete(made, program, '--')).union(*(complete(made, program, c, '--') for c in commands))
    else:
        offered = set(complete(made, program, '--'))
    assert options <= {word.strip('-=') for word in offered}


def test_commands_verbs_and_mount_options(made):
    commands = complete(made, 'hitrainctl', '')
    assert set(re.findall(r'^  ([a-z-]+) ', run('hitrainctl', '--help').stdout, re.M)) <= set(commands) and 'doctor' in commands
    assert complete(made, 'hitrainctl', 'scrub', 'st') == ['start', 'status', 'stop']
    assert complete(made, 'hitrainctl', 'stats', '--w') == ['--watch=']
    rows = set(re.findall(r'^    \{"([a-z_]+)", ', (ROOT / 'fs/daemon/options.c').read_text(), re.M))
    offered = {w.strip('=') for w in complete(made, 'mount.hitrain', '-o', '')}
    assert {'dram', 'degraded', 'noatime', 'compress_after'} <= offered and len(rows & offered) >= 15
    assert complete(made, 'hitrain', '-o', 'noatime,dr') == ['noatime,dram=']


@pytest.mark.skipif(not shutil.which('zsh'), reason='zsh is not installed')
def test_zsh(made):
    file = made / 'zsh/_hitrain'
    subprocess.run(['zsh', '-n', file], check=True, timeout=SECONDS_MAX)

    def complete_zsh(*words):
        """What it hands to zsh, with the two functions of zsh's own that it calls."""
        text = f'''compadd() {{ [[ $1 == -- ]] && shift; print -l -- $@ }}; _files() {{ print FILES }}
try() {{ local service=$1; local -a words=($@); local CURRENT=$# PREFIX=$@[-1]; source {file} }}
try "$@"'''
        return subprocess.run(['zsh', '-f', '-e', '-c', text, 'zsh', *words], check=True, timeout=SECONDS_MAX, capture_output=True,
                              text=True).stdout.split()

    assert {'stats', 'doctor', 'report', '--version'} <= set(complete_zsh('hitrainctl', ''))
    assert complete_zsh('hitrainctl', 'scrub', '') == ['start', 'status', 'stop']
    assert {'--watch=', '--json', '--help'} <= set(complete_zsh('hitrainctl', 'stats', '/mnt', '--'))
    assert complete_zsh('hitrainctl', 'stats', '/m') == ['FILES'] == complete_zsh('mkfs.hitrain', '/d')
    assert '--size=' in complete_zsh('mkfs.hitrain', '--')
