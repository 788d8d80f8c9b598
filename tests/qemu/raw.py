#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Stores on the character devices of NVMe namespaces, of 512 and of 4096 byte blocks, in a machine.

Part of `make check-vm`. The unit tests of devices, rings and holds run on each, and so does the script of the fault
points, which is a whole store. Then a daemon trains on it and is killed; at last the machine is, while a daemon works
on both namespaces. After that, the test reads all committed content through the character devices and through the block
devices.
"""
import pathlib
import sys
import tempfile

import machine

UNITS = 512, 4096
SIZE = 64 << 20     # the minimum of the unit tests
UNIT_TESTS = ('tests/unit/tiering/io/test_ring', 'tests/unit/tiering/io/test_rings', 'tests/unit/tiering/io/test_sync',
              'tests/unit/tiering/io/test_hold')
PLAY = 'tests/unit/faults/test_points'
POINT = 'io.short'  # every transfer in two parts, once in a while
OPTIONS = '-o dram=32M,staging=24M'
BOTH, BOTH_BLOCK = '/dev/generic0 /dev/generic1', '/dev/block0 /dev/block1'
STEPS = 3
GONE = 'while grep -qs "^hitrain$" /proc/[0-9]*/comm; do usleep 20000; done'


def say(text):
    print(f'check-vm: {text}', flush=True)


def expect(what, got, want):
    if got != want:
        raise AssertionError(f'{what}: {got!r} in place of {want!r}')


def unit_tests(m, i):
    for path in UNIT_TESTS:
        text = m.do(f'HITRAIN_TEST_DEVICE=/dev/generic{i} {pathlib.Path(path).name}')
        if 'skipped on given' in text:
            raise AssertionError(f'{path} has not used the device')
        say(f'/dev/ng, blocks of {UNITS[i]}: {pathlib.Path(path).name}: {text.strip().splitlines()[-1]}')
    text = m.do(f'HITRAIN_TEST_DEVICE=/dev/generic{i} HITRAIN_FAULT={POINT} {pathlib.Path(PLAY).name} 2>/dev/null')
    say(f'/dev/ng, blocks of {UNITS[i]}: {next(line for line in text.splitlines() if POINT in line)}')


def refused(m, i):
    """A program that names the namespace, either way, gets an error with its holder."""
    for name in (f'/dev/generic{i}', f'/dev/block{i}'):
        status, text = m.try_do(f'mkfs.hitrain --no-wait --force {name}')
        if status != 1 or 'held by process' not in text or '/mnt' not in text:
            raise AssertionError(f'mkfs.hitrain {name} while it is mounted: exit {status}\n{text}')


def killed(m, i):
    device = f'/dev/generic{i}'
    m.do(f'mkfs.hitrain --force {device}; hitrain {device} /mnt {OPTIONS}')
    refused(m, i)
    m.do(f'trainer make /mnt/model; trainer run --until={STEPS} /mnt/model; dd if=/dev/urandom of=/mnt/file bs=1M count=8 && '
         'sync /mnt/file && cp /mnt/file /tmp/file')
    before = m.do('trainer look /mnt/model')
    m.do(f'killall -9 hitrain; umount -l /mnt; hitrain {device} /mnt {OPTIONS}')
    expect('what is there after the daemon was killed', m.do('trainer look /mnt/model'), before)
    m.do(f'cmp /mnt/file /tmp/file && umount /mnt && {GONE}')
    m.do(f'hitrain-fsck -n {device}')
    m.do(f'hitrain /dev/block{i} /mnt {OPTIONS}')
    expect('what the block device shows', m.do('trainer look /mnt/model'), before)
    m.do(f'cmp /mnt/file /tmp/file && umount /mnt && {GONE}')
    say(f'/dev/ng, blocks of {UNITS[i]}: a store lived through a killed daemon, and through its block device: {before.strip()}')


def begin_to_train(m):
    m.do(f'mkfs.hitrain --force {BOTH}; hitrain {BOTH} /mnt {OPTIONS}; trainer make /mnt/model')
    steps = m.out / 'steps'
    steps.touch()
    m.do('trainer run /mnt/model >/out/steps 2>/out/errors &')
    machine.wait_for(lambda: len(steps.read_bytes().splitlines()) > STEPS, 'steps')
    m.cut()
    return int(steps.read_text().splitlines()[-1].split()[1])


def look_after_cut(m, told):
    m.do(f'hitrain-fsck -n {BOTH}')
    looks = []
    for devices in (BOTH, BOTH_BLOCK):
        m.do(f'hitrain {devices} /mnt {OPTIONS}')
        looks.append(m.do('trainer look /mnt/model'))
        m.do(f'umount /mnt && {GONE}')
    expect('what the block devices show', looks[1], looks[0])
    found = int(looks[0].split()[1])
    if not told <= found <= told + 1:
        raise AssertionError(f'step {told} was told before the machine was cut, step {found} is there')
    say(f'raw NVMe: step {told} was told when the machine was cut, step {found} is there')


def test(folder):
    initramfs = machine.make_initramfs(machine.KERNEL, machine.BUILD, folder, (*UNIT_TESTS, PLAY))

    def start():
        return machine.Machine(machine.KERNEL, initramfs, folder, machine.files(folder, len(UNITS), SIZE), UNITS)
    m = start()
    try:
        for i in range(len(UNITS)):
            unit_tests(m, i)
            killed(m, i)
        told = begin_to_train(m)
        m = start()
        look_after_cut(m, told)
    finally:
        m.cut()


def main():
    if what := machine.lacking():
        say(f'skipped: {what} is not there; `make deps-vm` installs it')
        return 0
    with tempfile.TemporaryDirectory(prefix='hitrain-vm-') as folder:
        try:
            test(pathlib.Path(folder))
        except (AssertionError, RuntimeError) as e:
            say(f'FAILED: {e}')
            return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
