# SPDX-License-Identifier: Apache-2.0
"""stress-ng's stressors of file systems: none fails, the kernel has nothing to complain of, and the store is clean."""
import re
import subprocess

import pytest

from programs import LONG

# These exist from the stress-ng of Debian 12 on, and verify their results.
SOME = ('access', 'chmod', 'dentry', 'dir', 'fallocate', 'filename', 'fpunch', 'getdent', 'handle', 'link',
        'lockofd', 'mknod', 'rename', 'symlink', 'utime', 'xattr')
# Tests of the class that do not concern this file system: they mount others, or read /proc.
NOT_OURS = ('binderfs', 'bind-mount', 'procfs', 'eventfd', 'ioprio')
# Other tests let devices fall silent at the same time, and a busy host stops processors: neither is a complaint about these.
COMPLAINT = re.compile(r'BUG:(?! soft lockup| workqueue lockup)|WARNING:|Oops|task stress-ng\S* blocked for more than|general protection|'
                       r'fuse:.*(bad|error)|lockdep')


def kernel_log():
    """The kernel's messages so far; none where we may not read them."""
    return subprocess.run(['dmesg'], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          errors='replace').stdout.splitlines()


@pytest.fixture
def quiet_kernel():
    before = kernel_log()
    yield
    now = kernel_log()
    new = now[now.index(before[-1]) + 1:] if before and before[-1] in now else now
    assert not [line for line in new if COMPLAINT.search(line)]


def stress(folder, *options, seconds):
    done = subprocess.run(['stress-ng', '--temp-path', folder, '--verify', '--metrics-brief', *options],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=seconds, cwd=folder)
    # Not offered by the kernel, or stopped for want of its memory or descriptors, is no failure.
    assert done.returncode in (0, 3, 4), done.stdout
    failures = [line for line in done.stdout.splitlines() if re.search(r'stress-ng: (fail|error)', line)]
    assert not failures, done.stdout


def test_some_stressors(make_store, quiet_kernel):
    store = make_store('1G')
    store.mount()
    jobs = [option for name in SOME for option in (f'--{name}', '1', f'--{name}-ops', '20')]
    stress(store.point, *jobs, '--fallocate-bytes', '8M', '--timeout', '5', seconds=600)
    assert not list(store.point.iterdir())


@pytest.mark.skipif(not LONG, reason='takes minutes: HITRAIN_LONG=1')
@pytest.mark.parametrize('threads', ['several', 'one'])
def test_the_whole_class(make_store, quiet_kernel, threads):
    store = make_store('6G')
    store.mount(flags=('-s',) if threads == 'one' else ())
    stress(store.point, '--class', 'filesystem', '--sequential', '2', '--exclude', ','.join(NOT_OURS), '--timeout', '2',
           '--iomix-bytes', '256M', '--hdd-bytes', '64M', seconds=900)
