# SPDX-License-Identifier: Apache-2.0
"""Developers' programs with everything they touch on a mount: git, make, compilers, linkers."""
import os
import pathlib
import shutil
import subprocess

import pytest

from conftest import BIN, ROOT, SECONDS_MAX
from trees import blob, content

LONG = bool(os.environ.get('HITRAIN_LONG'))
SOURCES = ('Makefile', 'include', 'tiering', 'optim', 'fs', 'mount-helpers', 'tests', 'bench')
NO_MAKE = ('V', 'MAKEFLAGS', 'MFLAGS', 'GNUMAKEFLAGS', 'MAKELEVEL', 'MAKEOVERRIDES')


def sh(*args, **kw):
    kw.setdefault('timeout', 5 * SECONDS_MAX)  # it may compile much
    env = {**{k: v for k, v in os.environ.items() if k not in NO_MAKE}, **kw.pop('env', {}), 'LC_ALL': 'C'}
    done = subprocess.run(list(map(os.fspath, args)), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors='replace', **kw)
    assert done.returncode == 0, (args, done.stdout[-4000:])
    return done.stdout


def copy_sources(to):
    to.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns('__pycache__'))
        else:
            shutil.copy2(ROOT / name, to / name)


# --------------------------------------------------------------------------- git

class Git:
    """git with a configuration of its own; the tests' own checkout may belong to another user."""

    def __init__(self, folder):
        config = folder / 'gitconfig'
        config.write_text('[user]\nname = A\nemail = a@example.org\n[safe]\ndirectory = *\n[init]\ndefaultBranch = main\n'
                          '[gc]\nauto = 0\n[core]\nfsync = all\n')
        self.env = {'GIT_CONFIG_GLOBAL': str(config), 'GIT_CONFIG_NOSYSTEM': '1'}

    def __call__(self, where, *args, **kw):
        return sh('git', '-C', where, *args, env=self.env, **kw)

    def assert_whole(self, where):
        """fsck reports only unreachable objects, and the files are those of the index and the commit."""
        told = [line for line in self(where, 'fsck', '--full', '--strict', '--no-progress').splitlines()
                if not line.startswith('dangling ')]
        assert told == []
        self(where, 'update-index', '-q', '--really-refresh')
        assert self(where, 'status', '--porcelain') == ''


@pytest.fixture
def git(tmp_path):
    return Git(tmp_path)


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """This project's sources as a repository with a few commits. HITRAIN_LONG=1 takes its whole history, where it came with
    one."""
    if LONG and (ROOT / '.git').exists():
        return ROOT
    folder = tmp_path_factory.mktemp('git')
    git, made = Git(folder), folder / 'project'
    copy_sources(made)
    git(made, 'init', '-q')
    for name in SOURCES:
        git(made, '-c', 'core.fsync=none', 'add', name)
        git(made, 'commit', '-q', '-m', name)
    return made


@pytest.mark.parametrize('transport', ['--no-hardlinks', '--no-local'])
def test_clone_commit_gc_and_fsck(store, git, project, tmp_path, transport):
    mnt, clone = store.point, store.point / 'clone'
    git(mnt, 'clone', '-q', transport, project, clone)
    git.assert_whole(clone)
    git(clone, 'checkout', '-q', '-b', 'mine')
    for i in range(8):
        (clone / 'fs' / f'new-{i}').write_bytes(blob(20_000 * i, i))
        (clone / 'Makefile').write_text((clone / 'Makefile').read_text() + f'# {i}\n')
        git(clone, 'add', 'fs')
        git(clone, 'commit', '-q', '-a', '-m', f'change {i}')
    git(clone, 'mv', 'fs', 'moved')
    git(clone, 'commit', '-q', '-m', 'moved')
    git.assert_whole(clone)
    git(clone, 'gc', '-q', '--prune=now')
    git.assert_whole(clone)
    log = git(clone, 'log', '--stat', '--format=%H %T')
    store.remount()
    git.assert_whole(clone)
    assert git(clone, 'log', '--stat', '--format=%H %T') == log
    # Out again, and every file of the commit is the same there.
    git(tmp_path, 'clone', '-q', transport, clone, tmp_path / 'out')
    assert git(tmp_path / 'out', 'rev-parse', 'HEAD^{tree}') == git(clone, 'rev-parse', 'HEAD^{tree}')
    assert content(tmp_path / 'out' / 'moved' / 'new-7') == content(clone / 'moved' / 'new-7')


def test_branches_worktrees_and_merges(mnt, git, project):
    clone, second = mnt / 'clone', mnt / 'second'
    # A local clone also copies a commit graph, which may name commits that the repack below removes.
    git(mnt, 'clone', '-q', '--no-local', project, clone)
    git(clone, 'branch', 'a')
    git(clone, 'branch', 'b')
    git(clone, 'worktree', 'add', '-q', second, 'b')
    for where, branch in ((clone, 'a'), (second, 'b')):
        git(where, 'checkout', '-q', branch)
        (where / f'only-{branch}').write_text(branch)
        shutil.rmtree(where / ('tests' if branch == 'a' else 'optim'))
        git(where, 'add', '-A')
        git(where, 'commit', '-q', '-m', branch)
    for _ in range(5):
        git(clone, 'checkout', '-q', '--detach', 'b')
        assert not (clone / 'optim').exists() and (clone / 'tests').exists()
        git(clone, 'checkout', '-q', 'a')
        assert (clone / 'optim').exists() and not (clone / 'tests').exists()
    git.assert_whole(clone)
    git(clone, 'merge', '-q', '-m', 'both', 'b')
    assert not (clone / 'tests').exists() and not (clone / 'optim').exists()
    git(clone, 'reset', '-q', '--hard', 'HEAD~1')
    git(clone, 'clean', '-q', '-fdx')
    git(clone, 'stash', 'list')
    (clone / 'Makefile').write_text('changed\n')
    git(clone, 'stash')
    git.assert_whole(clone)
    git(clone, 'stash', 'pop')
    assert (clone / 'Makefile').read_text() == 'changed\n'
    git(clone, 'checkout', '-q', '--', '.')
    git(clone, 'rebase', '-q', 'b')
    git(clone, 'repack', '-q', '-a', '-d', '-f')
    git(clone, 'worktree', 'remove', second)
    git.assert_whole(clone)


def test_commits_survive_a_crash(store, git, project):
    """git syncs its files, but not the folder in which it renames a branch: the last commit may not count yet."""
    clone, told = store.point / 'clone', []
    git(store.point, 'clone', '-q', '--no-hardlinks', project, clone)
    sh('sync', store.point)  # a clone of a folder syncs nothing
    for wait in (False, True):
        for i in range(4):
            (clone / 'file').write_bytes(blob(50_000, 4 * wait + i))
            git(clone, 'add', 'file')
            git(clone, 'commit', '-q', '-m', f'{i}')
            told.append(git(clone, 'rev-parse', 'HEAD').strip())
        if wait:
            sh('sync', clone / '.git' / 'refs' / 'heads')
        store.crash()
        assert git(clone, 'rev-parse', 'HEAD').strip() in told[-1 if wait else -2:]
        for lock in (clone / '.git').rglob('*.lock'):
            lock.unlink()
        git(clone, 'reset', '-q', '--hard')
        git.assert_whole(clone)
        told = git(clone, 'rev-list', '--reverse', 'HEAD').split()
        assert (clone / 'file').read_bytes() in [blob(50_000, n) for n in range(8)]


# -------------------------------------------------------------- make and compilers

def test_this_project_builds_and_runs_inside(mnt):
    """Its lower layers: two processes of make, dependencies by time stamps, programs that run from where they were linked.
    Optimizations would take most of the time."""
    copy_sources(mnt / 'src')
    names = ['base/test_buf', 'space/test_alloc']
    programs = [f'out/tests/unit/tiering/{n}' for n in names]

    def make(*args):
        out = sh('make', '-j2', 'O=out', 'EXTRA_CFLAGS=-O0 -g0 -U_FORTIFY_SOURCE', *programs, *args, cwd=mnt / 'src')
        return {line.split()[1] for line in out.splitlines() if line.startswith(('  CC ', '  AR ', '  LD '))}
    done = make()
    assert {'tiering/base/buf.c', 'tiering/space/alloc.c', *programs} <= done
    for program in programs:
        assert '100%: Checks:' in sh(mnt / 'src' / program, env={'CK_VERBOSITY': 'normal', 'CK_DEFAULT_TIMEOUT': f'{SECONDS_MAX}'})
    assert make() == set()
    (mnt / 'src/tiering/space/alloc.h').touch()
    again = make()
    assert 'tiering/space/alloc.c' in again and 'out/tests/unit/tiering/space/test_alloc' in again
    assert not any(name.startswith('tiering/base') for name in again)
    shutil.rmtree(mnt / 'src' / 'out')


@pytest.mark.skipif(not LONG, reason='HITRAIN_LONG=1 builds all of this project on a mount')
def test_all_of_this_project_builds_inside(make_store, tmp_path):
    store = make_store('1G')
    mnt = store.mount()
    copy_sources(mnt / 'src')
    if (ROOT / 'build' / 'deps').exists():  # libfuse, where it is not the system's
        (mnt / 'src' / 'build').mkdir()
        shutil.copytree(ROOT / 'build' / 'deps', mnt / 'src' / 'build' / 'deps')
    sh('make', '-j2', 'all', 'tests', cwd=mnt / 'src', timeout=600)
    for program in sorted((mnt / 'src/build/tests/unit/tiering').rglob('test_*')):
        if os.access(program, os.X_OK) and program.is_file() and program.suffix == '':
            sh(program, env={'CK_VERBOSITY': 'normal', 'CK_DEFAULT_TIMEOUT': f'{SECONDS_MAX}'}, timeout=300)
    sh(mnt / 'src/build/bin/mkfs.hitrain', '--size=64M', mnt / 'image')  # a store on a store
    sh(mnt / 'src/build/bin/hitrain-fsck', '-n', mnt / 'image')
    sh(BIN / 'hitrain-fsck', '-n', mnt / 'image')


C = '''
#include <stdio.h>
#include "count.h"
int main(void) { printf("%d\\n", one() + two() + COUNT); return 0; }
'''


def test_compile_archive_and_link(mnt):
    env = {'TMPDIR': str(mnt / 'tmp')}
    (mnt / 'tmp').mkdir()
    (mnt / 'main.c').write_text(C)
    (mnt / 'count.h').write_text('#define COUNT 3\nint one(void);\nint two(void);\n')
    for i, name in enumerate(('one', 'two')):
        (mnt / f'{name}.c').write_text(f'int {name}(void);\nint {name}(void) {{ return {10 * (i + 1)}; }}\n')

    def cc(*args):
        return sh('gcc', *args, cwd=mnt, env=env)
    cc('-pipe', '-g', '-c', 'one.c', '-o', 'one.o')
    cc('-save-temps', '-g', '-fPIC', '-c', 'two.c', '-o', 'two.o')
    assert {'two.i', 'two.s'} <= set(os.listdir(mnt))
    for _ in range(3):  # an archive is rewritten in place of the old one
        sh('ar', 'rcs', 'lib.a', 'one.o', 'two.o', cwd=mnt)
        cc('-pipe', '-g', 'main.c', 'lib.a', '-o', 'program')
        assert sh(mnt / 'program') == '33\n'
    cc('-shared', '-o', 'libtwo.so', 'two.o')
    cc('main.c', 'one.o', '-L.', '-ltwo', '-Wl,-rpath,$ORIGIN', '-o', 'dynamic')
    assert sh(mnt / 'dynamic') == '33\n'
    cc('-flto', 'main.c', 'one.c', 'two.c', '-O2', '-o', 'optimised')
    assert sh(mnt / 'optimised') == '33\n'
    sh('strip', 'program', cwd=mnt)
    sh('objcopy', '--only-keep-debug', 'dynamic', 'dynamic.debug', cwd=mnt)
    assert sh(mnt / 'program') == '33\n' and 'one' in sh('nm', 'lib.a', cwd=mnt)
    assert os.listdir(mnt / 'tmp') == []


def test_profile_and_coverage_data_of_forked_programs(mnt):
    """gcov's run time locks, reads and rewrites one file from every process that ends."""
    (mnt / 'p.c').write_text('#include <unistd.h>\n#include <sys/wait.h>\nint main(void) {\n'
                             'for (int i = 0; i < 5; i++) if (!fork()) return 0;\nwhile (wait(0) > 0);\nreturn 0; }\n')
    sh('gcc', '--coverage', '-o', 'p', 'p.c', cwd=mnt)
    for _ in range(4):
        sh(mnt / 'p', cwd=mnt)
    sh('gcov', '-t', next(pathlib.Path(mnt).glob('*.gcda')), cwd=mnt)
    text = sh('gcov', '-t', next(pathlib.Path(mnt).glob('*.gcda')), cwd=mnt)
    line = next(l for l in text.splitlines() if 'int main' in l)
    assert line.split(':')[0].strip() == '4', text
