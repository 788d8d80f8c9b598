#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A store on two NVMe devices of a machine with two NUMA nodes, one on each: reads back where memory is and where
threads run.

Part of `make check-vm`. The expected state of the tier and of the staging pool is compared with the kernel's facts on
each page (/proc/PID/numa_maps) and each thread (Cpus_allowed_list), and with the store's own figures. The unit tests of
placement, which check images in shared memory, too, run in the machine as well: here its nodes are real.
"""
import collections
import pathlib
import re
import sys
import tempfile

import machine

MIB = 1 << 20
PAGE = 4096
DRAM, STAGING = 64 * MIB, 24 * MIB
OPTIONS = f'-o dram={DRAM},staging={STAGING},optim_threads=4'
BOTH = '/dev/block0 /dev/block1'    # of node 0, and of node 1
STEPS = 3
UNIT_TESTS = 'tests/unit/tiering/sys/test_mem', 'tests/unit/tiering/object/test_numa'
LOOK = ' '.join((   # one line of shell
    'for p in /proc/[0-9]*; do grep -qs "^hitrain$" $p/comm || continue; cat $p/numa_maps >/out/maps; for t in $p/task/*; do',
    'echo "$(cat $t/comm) $(sed -n "s/^Cpus_allowed_list:[[:space:]]*//p" $t/status)"; done >/out/threads; done;',
    'hitrainctl stats /mnt >/out/stats'))


def say(text):
    print(f'check-vm: {text}', flush=True)


class Look:
    """The daemon as it is now."""

    def __init__(self, m):
        m.do(LOOK)
        self.maps = [f'{line} '.split(' ', 2)[1:] for line in (m.out / 'maps').read_text().splitlines()]
        lines = [line.rsplit(' ', 1) for line in (m.out / 'threads').read_text().splitlines()]
        self.threads = collections.Counter((name, cpus) for name, cpus in lines if not name.startswith('iou-'))
        fields = [line.split() for line in (m.out / 'stats').read_text().splitlines()]
        self.stats = {f[0]: int(f[1]) for f in fields if len(f) > 1 and f[1].isdigit()}

    def placed(self):
        """Policy of memory that has one, and its pages on each node: that is tier and pool."""
        return [(policy, {int(node): int(count) for node, count in re.findall(r'\bN(\d+)=(\d+)', rest)})
                for policy, rest in self.maps if policy != 'default']

    def cpus(self, name):
        return {cpus: n for (thread, cpus), n in self.threads.items() if thread == name}


def expect(what, got, want):
    if got != want:
        raise AssertionError(f'{what}: {got!r} in place of {want!r}')


def expect_placed(look, want):
    """want: bytes for each node."""
    got = collections.Counter()
    for policy, pages in look.placed():
        node = int(policy.removeprefix('prefer:'))
        expect(f'nodes of pages of {policy}', set(pages), {node})
        got[node] += pages[node] * PAGE
    expect('memory on each node', dict(got), want)


def unmount(m):
    m.do('umount /mnt; while grep -qs "^hitrain$" /proc/[0-9]*/comm; do usleep 20000; done')


def two_nodes(m):
    m.do(f'mkfs.hitrain {BOTH}; hitrain {BOTH} /mnt {OPTIONS}')
    m.do(f'trainer make /mnt/model; trainer run --until={STEPS} /mnt/model >/dev/null')
    m.do('dd if=/dev/urandom of=/mnt/file bs=1M count=24 2>/dev/null; sync /mnt/file; '
         'hitrainctl evict /mnt/file; cmp /mnt/file /mnt/file')
    look = Look(m)
    half = (DRAM + STAGING) // 2
    expect_placed(look, {0: half, 1: half})
    s = look.stats
    for node in (0, 1):
        expect(f'node{node}_dram_bytes', s[f'node{node}_dram_bytes'], DRAM // 2)
        expect(f'node{node}_staging_bytes', s[f'node{node}_staging_bytes'], STAGING // 2)
        expect(f'node{node}_away_bytes', s[f'node{node}_away_bytes'], 0)
    used = [s[f'node{node}_resident_bytes'] for node in (0, 1)]
    expect('the sum of both', sum(used), s['resident_bytes'])
    if min(used) < sum(used) / 3:
        raise AssertionError(f'images lie on one node: {used}')
    expect('workers', look.cpus('ht-update'), {'0': 2, '1': 2})
    expect('writeback', look.cpus('ht-writeback'), {'0': 1, '1': 1})
    say(f'two devices on two nodes: {half >> 20} MiB on each, every page there; images {used[0] >> 20} and {used[1] >> 20} '
        'MiB; two workers and writeback on each')
    unmount(m)


def one_node(m, devices, options, node, what):
    m.do(f'hitrain {devices} /mnt {OPTIONS}{options}')
    look = Look(m)
    expect_placed(look, {node: DRAM + STAGING})
    expect('processors', {cpus for (name, cpus), _ in look.threads.items() if name == 'ht-update'}, {str(node)})
    say(f'{what}: all memory and all workers on node {node}')
    unmount(m)


def raw(m):
    """The same namespaces by commands of NVMe."""
    devices = BOTH.replace('block', 'generic')
    m.do(f'mkfs.hitrain --force {devices}; hitrain {devices} /mnt {OPTIONS}')
    half = (DRAM + STAGING) // 2
    expect_placed(Look(m), {0: half, 1: half})
    say('two raw namespaces on two nodes: the same')
    unmount(m)


def off(m):
    m.do(f'hitrain {BOTH} /mnt {OPTIONS},numa=off')
    look = Look(m)
    expect('memory with a policy', look.placed(), [])
    expect('workers', look.cpus('ht-update'), {'0-1': 4})
    say('numa=off: nothing is placed')
    unmount(m)


def kept_to_processors(m):
    """The daemon may run on node 0 only; its device is on node 1."""
    m.do(f'taskset 1 hitrain /dev/block1 /mnt {OPTIONS}')
    look = Look(m)
    expect_placed(look, {1: DRAM + STAGING})
    expect('processors', {cpus for _, cpus in look.threads}, {'0'})
    say('a daemon that was given processors stays there')
    unmount(m)


def unit_tests(m):
    for path in UNIT_TESTS:
        text = m.do(pathlib.Path(path).name)
        say(f'{pathlib.Path(path).name}: {text.strip().splitlines()[-1]}')


def main():
    if what := machine.lacking():
        print(f'skipped: {what} is not there; `make deps-vm` installs it')
        return 0
    with tempfile.TemporaryDirectory(prefix='hitrain-vm-') as folder:
        with machine.started(pathlib.Path(folder), (512, 4096), nodes=2, programs=UNIT_TESTS) as m:
            unit_tests(m)
            two_nodes(m)
            one_node(m, BOTH, ',numa=1', 1, 'numa=1')
            off(m)
            raw(m)
            m.do('mkfs.hitrain --force /dev/block1')
            one_node(m, '/dev/block1', '', 1, 'a device on node 1')
            kept_to_processors(m)
    return 0


if __name__ == '__main__':
    sys.exit(main())
