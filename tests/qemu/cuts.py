#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Cuts the power of a machine with NVMe devices, again and again, and checks whether anything committed is lost.

Run it with `make check-vm`. A stock Debian kernel in QEMU mounts a store on two raw namespaces (blocks of 512 and of
4096 bytes). A training loop commits steps, and files are written, renamed and unlinked beside it. Then the machine is
killed. The test drops unflushed writes of its devices at random, write by write and torn: killing QEMU alone would lose
less. The next boot checks the store, mounts it, compares steps and files with the lines printed before the cut, and
works on. Every fifth cut comes during the mount that follows another cut.

The last cut gets a closer look. From one log of both devices the test makes the images at every flush, as they were and
with losses. It checks, mounts and compares each on this machine.
"""
import argparse
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time

import machine
from lab import DEVICES, OPTIONS, Failure, Lab
from replay import Replay, undisturbed

LINES_MAX = 80
REPLAY_LINES = 80
CALM = 2        # steps before the recorded boot


def say(text):
    print(f'check-vm: {text}', flush=True)


def make(lab):
    lab.boot()
    say(f'booted in {lab.machine.boot_seconds:.0f} s; a store on {DEVICES}')
    lab.machine.do(f'mkfs.hitrain {DEVICES}')
    lab.mount()
    lab.machine.do('trainer make /mnt/model')
    lab.machine.do('traffic run --ops=0 /mnt/traffic; sync /mnt')
    lab.watch.moments.clear()   # nothing was promised before


def is_in_recovery(number):
    return number % 5 == 0


def cut(lab, number, of):
    if is_in_recovery(number):
        lab.machine.begin(f'hitrain {DEVICES} /mnt {OPTIONS}')
        time.sleep(lab.random.uniform(0.2, 1.2))
    else:
        lab.work(lab.random.randrange(1, LINES_MAX))
    cost = lab.cut()
    lab.boot()
    if is_in_recovery(number + 1) and number + 1 < of:
        say(f'cut {number:2}/{of}: {cost}; the next one comes while that is being mounted')
        return
    begin = time.monotonic()
    lab.check()
    say(f'cut {number:2}/{of}: {cost}; step {lab.judge.step} and {len(lab.judge.slots)} files are right '
        f'(boot {lab.machine.boot_seconds:.0f} s, fsck, mount and look {time.monotonic() - begin:.1f} s)')


def record(lab):
    """From a store that was unmounted to a cut; the images stay as they were before."""
    lab.machine.do(f'trainer run --until={lab.judge.step + CALM} /mnt/model >>/out/steps')
    lab.machine.do('umount /mnt')
    lab.cut(last=True)
    lab.boot(one_log=True)
    lab.check()
    lab.work(REPLAY_LINES)
    lab.stop()


def test(folder, args):
    begin = time.monotonic()
    lab = Lab(folder, machine.make_initramfs(machine.KERNEL, machine.BUILD, folder), args.seed)
    try:
        make(lab)
        for number in range(1, args.cuts):
            cut(lab, number, args.cuts)
        record(lab)
        say(f'cut {args.cuts:2}/{args.cuts}: both devices in one log, {len(lab.watch.moments)} moments are known')
        Replay(lab, folder).run(say)
    finally:
        lab.stop()
    last = max(lab.judge.digests)
    wrong = [step for step, digest in undisturbed(folder, last).items() if lab.judge.digests.get(step, digest) != digest]
    if wrong:
        raise Failure(f'steps {wrong} are not what they are where nobody disturbs')
    say(f'{args.cuts} power cuts, {lab.judge.under_way} after a commit that was not told; {len(lab.judge.digests)} of {last} steps looked '
        f'at, each bit-identical to an undisturbed run here; {lab.judge.last_op} operations on files; {time.monotonic() - begin:.0f} s')


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--cuts', type=int, default=200 if os.environ.get('HITRAIN_LONG') else 20)
    p.add_argument('--seed', type=int, default=int(os.environ.get('HITRAIN_SEED', random.SystemRandom().randrange(1 << 30))))
    args = p.parse_args()
    if what := machine.lacking():
        say(f'skipped: {what} is not there; `make deps-vm` installs it')
        return 0
    say(f'HITRAIN_SEED={args.seed}')
    folder = pathlib.Path(tempfile.mkdtemp(prefix='hitrain-vm-'))
    try:
        test(folder, args)
    except (AssertionError, Failure, RuntimeError) as e:
        say(f'FAILED (HITRAIN_SEED={args.seed}): {e}')
        for errors in (folder / 'out').glob('*.errors'):
            print(errors.read_text(), end='')
        return 1
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == '__main__':
    sys.exit(main())
