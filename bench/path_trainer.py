#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A trainer whose gradient and parameter are mappings: it stores the one, reads the other, and makes no read or write call.

    path_trainer.py ROOT FOLDER PARAMETER STEPS    prints seconds, bytes stored and read, and its own processor seconds, as JSON
"""
import fcntl
import json
import mmap
import os
import sys
import time

PIECE = 1 << 20
COMMAND = 1 << 30 | 256 << 16 | ord('h') << 8 | 1   # HT_IOCTL_COMMAND of include/hitrain/words.h


def mapped(path, protection):
    fd = os.open(path, os.O_RDWR if protection & mmap.PROT_WRITE else os.O_RDONLY)
    try:
        return mmap.mmap(fd, 0, mmap.MAP_SHARED, protection)
    finally:
        os.close(fd)


def main():
    root, folder, name, steps = *sys.argv[1:4], int(sys.argv[4])
    ctl, top = os.open(f'{folder}/.hitrain/ctl', os.O_RDONLY), os.open(root, os.O_RDONLY)
    gradient = mapped(f'{folder}/.hitrain/grad/{name}', mmap.PROT_READ | mmap.PROT_WRITE)
    parameter = memoryview(mapped(f'{folder}/{name}', mmap.PROT_READ))
    value, got = bytes(PIECE), bytearray(PIECE)
    lines = [f'{word} {name}'.encode().ljust(256, b'\0') for word in ('apply', 'wait')]
    began = time.monotonic()
    for _ in range(steps):
        for at in range(0, len(gradient), PIECE):
            gradient[at:at + PIECE] = value
        for line in lines:
            fcntl.ioctl(ctl, COMMAND, line)
        for at in range(0, len(parameter), PIECE):
            got[:] = parameter[at:at + PIECE]
        os.fsync(top)
    use = os.times()
    print(json.dumps({'seconds': time.monotonic() - began, 'bytes': steps * (len(gradient) + len(parameter)),
                      'client_cpu_s': use.user + use.system}))


if __name__ == '__main__':
    main()
