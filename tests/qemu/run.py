#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a line of shell in a machine in QEMU (machine.py), prints what it printed, and exits as it did.

    tests/qemu/run.py --nodes 2 --units 512,4096 'hitrain-fsck --version; cat /sys/block/nvme*/device/numa_node'
    tests/qemu/run.py --program tests/unit/tiering/io/test_ring test_ring
"""
import argparse
import pathlib
import sys
import tempfile

import machine


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--units', default='512,4096', help='block sizes, one for each namespace (%(default)s)')
    p.add_argument('--size', type=int, default=64, help='of a namespace, in MiB (%(default)s)')
    p.add_argument('--nodes', type=int, choices=(1, 2), default=1, help='of NUMA (%(default)s)')
    p.add_argument('--program', action='append', default=[], help='to have in the machine, a path below the build folder')
    p.add_argument('line')
    args = p.parse_args()
    if what := machine.lacking():
        print(f'{what} is not there; `make deps-vm` installs it', file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix='hitrain-vm-') as folder:
        units = [int(unit) for unit in args.units.split(',')]
        with machine.started(pathlib.Path(folder), units, args.nodes, args.size << 20, args.program) as m:
            print(f'booted in {m.boot_seconds:.0f} s', file=sys.stderr)
            status, text = m.try_do(args.line)
    print(text, end='')
    return status


if __name__ == '__main__':
    sys.exit(main())
