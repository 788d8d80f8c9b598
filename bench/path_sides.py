# SPDX-License-Identifier: Apache-2.0
"""The file systems that bench/path.py measures beside each other, and the devices below them."""
import atexit
import json
import mmap
import os
import signal
import subprocess
import time

from common import (BUILD, PROGRAMS, SECONDS_MAX, TOP, SpeedLimit, device_counters, give_up, is_mounted, make_loop_device,
                    run, wait_for)

CLIENT = BUILD / 'bench/path_client'
MINIMAL = TOP / 'build/deps/bench/passthrough_hp'
MIB = 1 << 20
GIB = 1 << 30
BLOCK = MIB
DEPTH = 8
SETUP_SECONDS_MAX = 300
TOUCHED = 4 * GIB


class Devices:
    """Loop devices of the same speed, each way; all processes that run() starts are limited while it is on."""

    def __init__(self, folder, sizes, limit):
        self.limit = limit
        self.paths = {}
        for name, size in sizes.items():
            image = folder / f'image-{name}'
            self.paths[name] = make_loop_device(image, size)
            atexit.register(run, 'losetup', '--detach', self.paths[name])
            # Space that was set aside and never written is slower at first.
            run('dd', 'if=/dev/zero', f'of={self.paths[name]}', 'bs=4M', f'count={size // (4 * MIB)}', 'oflag=direct',
                seconds_max=SETUP_SECONDS_MAX)
        self.group = SpeedLimit(*self.paths.values(), name='hitrain-path')
        atexit.register(self.group.remove)

    def slow(self, on):
        self.group.set(self.limit if on else 0)

    def run(self, *args, seconds_max=SETUP_SECONDS_MAX):
        return run(*args, seconds_max=seconds_max, preexec_fn=self.group.enter)

    def counters(self, name):
        return device_counters(self.paths[name])


def touch_memory(size):
    """The host of a virtual machine has to find long unused memory first, slower than a disk."""
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1


def words_of(options):
    return [f'{k}={v}' for k, v in options.items()]


def processor_s(pid):
    with open(f'/proc/{pid}/stat') as f:
        words = f.read().rsplit(')', 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf('SC_CLK_TCK')


def strace_counts(path):
    """The counts of `strace -c -o path`: calls by name. Removes the file."""
    rows = [line.split() for line in path.read_text().splitlines()[2:]]
    path.unlink()
    return {r[-1]: int(r[3]) for r in rows if len(r) >= 5 and r[3].isdigit() and r[-1] != 'total'}


class Side:
    """A folder that tensors are in. daemon: serves it, if the kernel does not."""

    name = ''
    daemon = None

    def __init__(self, devices, point):
        self.devices, self.point = devices, point
        point.mkdir(exist_ok=True)

    def sync_path(self):
        return self.point

    def client(self, way, folder, **options):
        return json.loads(self.devices.run(CLIENT, way, self.point / folder, *words_of(options)))

    def begin(self, way, folder, **options):
        """A client that the caller ends."""
        return subprocess.Popen([CLIENT, way, self.point / folder, *words_of(options)], stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, preexec_fn=self.devices.group.enter)

    def measure(self, way, folder, sync=False, **options):
        if sync:
            options['sync'] = self.sync_path()
        before = processor_s(self.daemon.pid) if self.daemon else 0
        result = self.client(way, folder, **options)
        after = processor_s(self.daemon.pid) if self.daemon else 0
        return {**result, 'daemon_cpu_s': after - before}

    def system_calls(self, way, folder, **options):
        """Calls of the daemon, counted by strace, which slows it down: nothing is timed."""
        counts = BUILD / 'bench' / f'strace-{os.getpid()}'
        with subprocess.Popen(['strace', '-q', '-f', '-c', '-p', str(self.daemon.pid), '-o', str(counts)],
                              stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as tracer:
            wait_for(lambda: 'TracerPid:\t0' not in open(f'/proc/{self.daemon.pid}/status').read(), 'strace')
            moved = self.client(way, folder, **options)['bytes']
            tracer.send_signal(signal.SIGINT)
            tracer.wait(SECONDS_MAX)
        calls = strace_counts(counts)
        return sum(calls.values()) * GIB / moved, calls

    def messages(self):
        return self.point.with_suffix('.log').read_text()

    def start(self, *args):
        with open(self.point.with_suffix('.log'), 'w') as out:
            self.daemon = subprocess.Popen([str(a) for a in args], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                           start_new_session=True, preexec_fn=self.devices.group.enter)
        wait_for(lambda: self.daemon.poll() is not None or is_mounted(self.point), f'mounting {self.name}')
        if self.daemon.poll() is not None:
            give_up(f'{args[0]}: exit {self.daemon.returncode}\n{self.messages()}')
        os.stat(self.point)

    def stop(self):
        if is_mounted(self.point):
            run('umount', self.point, seconds_max=SETUP_SECONDS_MAX)
        if self.daemon:
            self.daemon.wait(SETUP_SECONDS_MAX)
            self.daemon = None

    def make_cold(self):
        pass


class Raw(Side):
    """The device itself, by fio."""

    name = 'device'

    def measure(self, way, folder, bytes=0, files=1, direct=1, sync=False, **options):
        block = min(bytes, BLOCK)
        depth = min(DEPTH, max(1, bytes // BLOCK)) if direct else DEPTH
        out = json.loads(self.devices.run(
            'fio', '--name=a', '--output-format=json', '--ioengine=libaio', '--direct=1', f'--rw={way}', f'--bs={block}',
            f'--iodepth={depth}', f'--size={bytes * files}', f'--filename={self.devices.paths["raw"]}'))['jobs'][0]
        cpu = (out['usr_cpu'] + out['sys_cpu']) / 100 * out['job_runtime'] / 1000
        return {'seconds': out[way]['runtime'] / 1000, 'bytes': out[way]['io_bytes'], 'client_cpu_s': cpu,
                'daemon_cpu_s': 0}


class Xfs(Side):
    name = 'xfs'

    def format(self):
        device = self.devices.paths['xfs']
        run('mkfs.xfs', '-q', '-f', '-K', device, seconds_max=SETUP_SECONDS_MAX)
        run('mount', device, self.point)
        atexit.register(self.stop)

    def make_cold(self):
        os.sync()
        for path in self.point.rglob('t*'):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Tmpfs(Side):
    name = 'tmpfs'

    def format(self, size):
        run('mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', self.point)
        atexit.register(self.stop)


class Minimal(Side):
    """libfuse's example passthrough_hp: requests come to it and it makes a system call for each, nothing more."""

    def __init__(self, devices, point, below):
        super().__init__(devices, point)
        self.below = below
        self.name = f'minimal daemon on {below.name}'
        atexit.register(self.stop)
        self.start(MINIMAL, '--foreground', '--nocache', '--nopassthrough', below.point, point)

    def sync_path(self):
        return self.below.point

    def make_cold(self):
        self.below.make_cold()


class Hitrain(Side):
    name = 'hitrain'
    options = ',background=off'  # of each mount, beside those that a call names; engines would make holes of the zeros that are written here

    def format(self):
        run(PROGRAMS / 'mkfs.hitrain', '--force', '--no-discard', self.devices.paths['hitrain'])
        atexit.register(self.unmount)

    def unmount(self):
        self.devices.slow(False)
        self.stop()

    def mount(self, dram, passthrough='off'):
        self.start(PROGRAMS / 'hitrain', '-f', self.devices.paths['hitrain'], self.point, '-o',
                   f'dram={dram},passthrough={passthrough}{self.options}')
        self.settle()

    def settle(self):
        """A daemon that has just begun populates its memory."""
        end, before = time.monotonic() + SECONDS_MAX, -1
        while processor_s(self.daemon.pid) != before and time.monotonic() < end:
            before = processor_s(self.daemon.pid)
            time.sleep(0.1)

    def remount(self, dram, passthrough='off', touched=False):
        """Memory is empty afterwards. touched: the machine's memory was all used a moment ago."""
        self.unmount()
        if touched:
            touch_memory(TOUCHED)
        self.mount(dram, passthrough)

    def commit(self, folder=''):
        fd = os.open(self.point / folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def make_tensors(side, sets):
    for s in sets:
        (side.point / s.folder).mkdir()
        side.client('make', s.folder, bytes=s.bytes, files=s.files, sync=side.sync_path())

