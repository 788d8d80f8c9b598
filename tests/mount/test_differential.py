# SPDX-License-Identifier: Apache-2.0
"""The same random system calls on the mount and on a file system of the kernel return and leave the same."""
import pytest

from programs import LONG, client, kernel_folder

CALLS = 200_000 if LONG else 4_000


def compare(mnt, *options):
    with kernel_folder() as kernel:
        for side in (mnt / 'side', kernel / 'side'):
            side.mkdir()
        client('differ', *options, mnt / 'side', kernel / 'side')


@pytest.mark.parametrize('seed', range(8 if LONG else 3))
def test_same_calls_same_results(mnt, seed):
    # Fixed seeds, so that a failure comes from the change under test; long runs search for new failures.
    compare(mnt, f'--ops={CALLS}', *([] if LONG else [f'--seed={seed}']))


def test_same_calls_change_the_same_times(mnt):
    compare(mnt, f'--ops={CALLS // 10}', '--times=2', *([] if LONG else ['--seed=1']))


def test_same_calls_with_one_thread(make_store):
    compare(make_store().mount(flags=('-s',)), f'--ops={CALLS // 4}', '--seed=7')
