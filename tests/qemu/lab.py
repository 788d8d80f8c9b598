# SPDX-License-Identifier: Apache-2.0
"""Two namespaces with a store, a machine that works on it, and the facts about a moment at which its power is cut."""
import bisect
import os
import pathlib
import random
import subprocess
import sys
import threading

import machine
import writelog

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / 'tests/mount'))

from training import Judge  # noqa: E402

DEVICE_BYTES = 96 << 20
UNITS = (512, 4096)     # blocks of the namespaces
DEVICES = '/dev/block0 /dev/block1'
OPTIONS = '-o dram=32M,staging=24M'
STEP_LINES = 8          # in a count of progress a step is worth so many operations on files
JOURNALS = ('steps', 'traffic')


class Failure(Exception):
    pass


class Moment:
    """The logs ended at positions. At least the lines up to surely were printed before that, and none beyond at_most."""

    def __init__(self, surely, positions, at_most):
        self.surely, self.positions, self.at_most = surely, positions, at_most


class Watch(threading.Thread):
    """Looks at the sizes of journals and logs all the time, while the machine runs."""

    def __init__(self, journals, logs):
        super().__init__(daemon=True)
        self.journals, self.logs = journals, logs
        self.moments, self.ended = [], threading.Event()
        self.start()

    @staticmethod
    def sizes(paths):
        return tuple(p.stat().st_size for p in paths)

    def run(self):
        while not self.ended.wait(0.0005):
            surely, logs = self.sizes(self.journals), self.sizes(self.logs)
            if self.sizes(self.logs) == logs:   # so at one time in between all logs had these sizes
                self.moments.append(Moment(surely, logs, self.sizes(self.journals)))

    def stop(self):
        self.ended.set()
        self.join()

    def at(self, position):
        """The moment when the only log ended there: between two recorded moments."""
        i = bisect.bisect_right([m.positions[0] for m in self.moments], position)
        before, after = self.moments[max(i - 1, 0)], self.moments[min(i, len(self.moments) - 1)]
        return Moment(before.surely, (position,), after.at_most)


class Lab:
    def __init__(self, folder, initramfs, seed):
        self.folder, self.initramfs, self.seed = folder, initramfs, seed
        self.random, self.judge = random.Random(seed), Judge()
        self.machine = self.server = self.watch = None
        self.images = [folder / f'image{i}' for i in range(len(UNITS))]
        for image in self.images:
            image.touch()
            os.truncate(image, DEVICE_BYTES)
        (folder / 'out').mkdir()
        self.journals = [folder / 'out' / name for name in JOURNALS]
        for journal in self.journals:
            journal.touch()
        self.told = [0] * len(JOURNALS)     # bytes that are no longer of interest
        self.owed = ([], []), 0             # the next boot must show this: lines of both, and the last step at most

    # -- the machine --

    def boot(self, one_log=False):
        disks = [self.folder / f'disk{i}' for i in range(len(UNITS))]
        for image, disk in zip(self.images, disks):
            writelog.copy(image, disk)
        logs = [self.folder / 'log'] if one_log else [self.folder / f'log{i}' for i in range(len(UNITS))]
        for log in logs:
            writelog.make_empty(log)
        self.watch = Watch(self.journals, logs)
        drives = self.parts(disks, logs[0]) if one_log else self.wholes(disks, logs)
        self.machine = machine.Machine(machine.KERNEL, self.initramfs, self.folder, drives, UNITS)

    @staticmethod
    def wholes(disks, logs):
        """A log for each namespace: the test knows which namespace was flushed."""
        drives = []
        for i, (disk, log) in enumerate(zip(disks, logs)):
            drives += ['-blockdev', f'driver=raw,node-name=d{i},file.driver=file,file.filename={disk}',
                       '-blockdev', f'driver=raw,node-name=l{i},file.driver=file,file.filename={log}',
                       '-blockdev', f'driver=blklogwrites,node-name=n{i},file=d{i},log=l{i},log-sector-size={writelog.SECTOR}']
        return drives

    def parts(self, disks, log):
        """One log, and so one order, of both; a flush counts for both. QEMU lets one writer at a node, NBD lets in many."""
        whole, path = self.folder / 'disk', self.folder / 'nbd'
        with open(whole, 'wb') as out:
            for disk in disks:
                out.write(disk.read_bytes())
        self.server = subprocess.Popen(['qemu-nbd', '--socket', str(path), '--shared=2', '--persistent', '--image-opts', ','.join([
            'driver=blklogwrites', f'log-sector-size={writelog.SECTOR}', 'file.driver=raw', 'file.file.driver=file',
            f'file.file.filename={whole}', 'log.driver=raw', 'log.file.driver=file', f'log.file.filename={log}'])],
            stdin=subprocess.DEVNULL)
        machine.wait_for(lambda: path.exists() or self.server.poll() is not None, 'qemu-nbd')
        drives = []
        for i in range(len(UNITS)):
            drives += ['-blockdev', f'driver=nbd,node-name=all{i},server.type=unix,server.path={path}', '-blockdev',
                       f'driver=raw,node-name=n{i},file=all{i},offset={i * DEVICE_BYTES},size={DEVICE_BYTES}']
        return drives

    def mount(self):
        self.machine.do(f'hitrain {DEVICES} /mnt {OPTIONS}')

    def start(self):
        self.machine.do('(trainer run /mnt/model >>/out/steps 2>/out/trainer.errors &); '
                        f'traffic run --first={self.judge.last_op + 1} --seed={self.seed} /mnt/traffic '
                        '>>/out/traffic 2>/out/traffic.errors &')

    def work(self, lines):
        """Runs until so many lines are printed."""
        self.start()
        machine.wait_for(lambda: self.progress() >= lines, 'progress of the training loop')

    def stop(self):
        for process in filter(None, (self.server, self.machine and self.machine.process)):
            process.kill()
            process.wait()
        if self.watch:
            self.watch.stop()
        self.machine = self.server = None

    # -- printed lines --

    def lines(self, i, begin, end):
        with open(self.journals[i], 'rb') as f:
            f.seek(begin)
            return f.read(max(end - begin, 0)).decode().splitlines()

    def progress(self):
        ends = self.watch.sizes(self.journals)
        steps, traffic = (len(self.lines(i, begin, ends[i])) for i, begin in enumerate(self.told))
        return steps * STEP_LINES + traffic

    def said_at(self, moment):
        """Lines since the last cut, with the word done only where it was surely printed; and the last step that was
        printed at most."""
        surely = [self.lines(i, begin, moment.surely[i]) for i, begin in enumerate(self.told)]
        perhaps = [self.lines(i, max(begin, moment.surely[i]), moment.at_most[i]) for i, begin in enumerate(self.told)]
        begun = [line for line in perhaps[1] if not line.startswith('done')]
        return (surely[0], surely[1] + begun), self.judge.step + len(surely[0]) + len(perhaps[0]) + 1

    def forget_told(self):
        self.told = [journal.stat().st_size for journal in self.journals]

    # -- a cut --

    def cut(self, last=False):
        """The power goes at a recent moment, if possible one with unflushed writes; last: now. Later lines are dropped.
        Returns the losses as text."""
        self.stop()
        logs = [writelog.WriteLog(path) for path in self.watch.logs]
        possible = [m for m in self.watch.moments if all(p <= log.end for p, log in zip(m.positions, logs))]
        risky = [m for m in possible if any(log.unflushed_at(p) for p, log in zip(m.positions, logs))]
        moment = possible[-1] if last or not risky else self.random.choice(risky[len(risky) * 3 // 4:])
        costs = [writelog.after_power_cut(image, log, position, unit, self.random)
                 for image, log, position, unit in zip(self.images, logs, moment.positions, UNITS)]
        for log in logs:
            log.close()
        said, step_max = self.said_at(moment)
        if any(said):
            self.owed = said, step_max
        self.forget_told()
        return ' and '.join(f'{lost} of {unflushed}' for unflushed, lost in costs) + ' unflushed writes lost'

    def check(self):
        """After a boot: fsck, mount, and whether all is there."""
        status, text = self.machine.try_do(f'hitrain-fsck -n {DEVICES}')
        if status:
            raise Failure(f'hitrain-fsck: exit {status}\n{text}')
        self.mount()
        said, step_max = self.owed
        self.judge.after_crash(said, self.machine.do('trainer look /mnt/model'), self.machine.do('traffic look /mnt/traffic'),
                               step_max)
        self.owed = ([], []), self.judge.step + 1
