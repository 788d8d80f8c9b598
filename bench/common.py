# SPDX-License-Identifier: Apache-2.0
"""The common part of the benches: programs that must succeed, loop devices, limits on their speed."""
import atexit
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TOP = pathlib.Path(__file__).resolve().parents[1]
BUILD = pathlib.Path(os.environ.get('HITRAIN_BUILD') or TOP / 'build')
PROGRAMS = pathlib.Path(os.environ.get('HITRAIN_BIN') or BUILD / 'bin')
SECONDS_MAX = 60


def machine():
    """The processor, its cores, memory, kernel: the machine of the figures."""
    with open('/proc/cpuinfo') as f:
        model = next((line.split(':', 1)[1].strip() for line in f if line.startswith('model name')), os.uname().machine)
    with open('/proc/meminfo') as f:
        gib = int(f.readline().split()[1]) / (1 << 20)
    return f'{model}, {os.cpu_count()} processors, {gib:.0f} GiB, Linux {os.uname().release}'


def give_up(why):
    sys.exit(f'{pathlib.Path(sys.argv[0]).name}: {why}')


def torch_with_muon():
    """PyTorch with torch.optim.Muon. Where this Python has none, the bench begins anew in the environment of `make check-ecosystem`."""
    try:
        import torch
        torch.optim.Muon
    except (ImportError, AttributeError):
        sys.path.append(str(TOP / 'tests/tools'))
        import ecosystem
        python = ecosystem.place() / 'bin/python'
        if not python.exists() or sys.executable == str(python):
            give_up('torch.optim.Muon is needed: `make check-ecosystem` makes an environment that has it')
        os.execv(python, [str(python), *sys.argv])
    return torch


def check_elements(args, files):
    """Each file has whole MiB of f32."""
    unit = files * (1 << 20) // 4
    if args.elements % unit:
        give_up(f'--elements must be a multiple of {unit}')


def parts_of(only, parts):
    """Names of parts, with commas between."""
    names = only.split(',')
    unknown = set(names) - set(parts)
    if unknown:
        give_up(f'there is no part {" ".join(unknown)}')
    return names


def run(*args, seconds_max=SECONDS_MAX, **kw):
    done = subprocess.run([str(a) for a in args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=seconds_max, check=False, **kw)
    if done.returncode:
        give_up(f'{" ".join(map(str, args))}: exit {done.returncode}\n{done.stdout}')
    return done.stdout.strip()


def wait_for(condition, what, seconds=0.02, seconds_max=SECONDS_MAX):
    """Looks each `seconds`."""
    end = time.monotonic() + seconds_max
    while not condition():
        if time.monotonic() > end:
            give_up(f'{what}: not within {seconds_max} s')
        time.sleep(seconds)


def programs_of(path):
    """The programs of another build: of its tree, its build folder, or their own folder."""
    for folder in path, path / 'build/bin', path / 'bin':
        if (folder / 'mkfs.hitrain').exists():
            return folder.resolve()
    give_up(f'{path} has no programs: run make there first')


def is_mounted(path):
    with open('/proc/self/mountinfo') as table:
        return any(line.split()[4] == str(path) for line in table)


def make_loop_device(image, size):
    """A loop device with direct I/O on a new file whose space is allocated."""
    with open(image, 'wb') as f:
        f.truncate(size)
        os.posix_fallocate(f.fileno(), 0, size)
    return run('losetup', '--find', '--show', '--direct-io=on', image)


def remove_folder(folder):
    with open('/proc/self/mountinfo') as table:
        if any(line.split()[4].startswith(f'{folder}/') for line in table):
            print(f'something is still mounted below {folder}: it stays', file=sys.stderr)
            return
    shutil.rmtree(folder)


def begin(name):
    """For a bench that mounts: a folder of its own, which goes with the program, also when that is ended."""
    if os.geteuid():
        give_up('mounting and loop devices need root')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # hitrainctl finds this Python, and no script that looks for one, which takes longer than many commands.
    os.environ['PATH'] = f'{os.path.dirname(sys.executable)}:{os.environ["PATH"]}'
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f'{name}-', dir=BUILD / 'bench'))
    atexit.register(remove_folder, folder)  # registered first, so that it is done last
    return folder


class SpeedLimit:
    """A cgroup whose members read and write each of some devices at so many bytes per second each way, while it is on."""

    def __init__(self, *devices, name):
        numbers = [os.stat(d).st_rdev for d in devices]
        self.numbers = [f'{os.major(n)}:{os.minor(n)}' for n in numbers]
        self.v1 = os.path.isdir('/sys/fs/cgroup/blkio')
        self.folder = pathlib.Path('/sys/fs/cgroup', 'blkio' if self.v1 else '', f'{name}-{os.getpid()}')
        try:
            if not self.v1:
                pathlib.Path('/sys/fs/cgroup/cgroup.subtree_control').write_text('+io')
            self.folder.mkdir()
            self.set(0)
        except OSError as e:
            give_up(f'no cgroup here limits the speed of devices: {e}')

    def set(self, bytes_per_s, only=None):
        """0: no limit. only: the index of the one device that is meant."""
        for number in self.numbers if only is None else self.numbers[only:only + 1]:
            if self.v1:
                for way in 'read', 'write':
                    (self.folder / f'blkio.throttle.{way}_bps_device').write_text(f'{number} {bytes_per_s}')
            else:
                limit = bytes_per_s or 'max'
                (self.folder / 'io.max').write_text(f'{number} rbps={limit} wbps={limit}')

    def enter(self):
        """For preexec_fn: the new process is a member."""
        (self.folder / 'cgroup.procs').write_text(str(os.getpid()))

    def remove(self):
        self.set(0)
        end = time.monotonic() + SECONDS_MAX
        while True:
            try:
                self.folder.rmdir()
                return
            except OSError:  # a member that is still ending
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)


class SteadyDevice:
    """A loop device of memory with a speed and a latency of its own (steady_device.c), which all programs have while it is slow."""

    def __init__(self, folder, size, limit, latency_us=0):
        self.limit, self.latency_us, self.group = limit, latency_us, NoGroup()
        point = folder / 'steady'
        point.mkdir(parents=True)
        self.daemon = subprocess.Popen([BUILD / 'bench/steady_device', point, str(size)], stdin=subprocess.PIPE, text=True,
                                       start_new_session=True)
        wait_for(lambda: is_mounted(point) or self.daemon.poll() is not None, 'a mount of steady_device')
        atexit.register(self.stop, point)
        self.path = run('losetup', '--find', '--show', '--direct-io=on', point / 'device')
        atexit.register(run, 'losetup', '--detach', self.path)
        atexit.register(self.silence, False)

    def stop(self, point):
        """The loop device goes a moment after it is detached."""
        run('umount', '--lazy', point)
        self.daemon.wait(SECONDS_MAX)

    def slow(self, on):
        self.daemon.stdin.write(f'{int(self.limit)} {self.latency_us}\n' if on else '0\n')
        self.daemon.stdin.flush()

    def silence(self, on):
        """It answers nothing while it is silent."""
        self.daemon.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def counters(self):
        return device_counters(self.path)

    def run(self, *args, seconds_max=SECONDS_MAX):
        return run(*args, seconds_max=seconds_max)


class NoGroup:
    def enter(self):
        """For preexec_fn."""


def device_counters(path):
    """Bytes read and written."""
    with open(f'/sys/block/{os.path.basename(path)}/stat') as f:
        words = f.read().split()
    return int(words[2]) * 512, int(words[6]) * 512


class Table:
    """Figures, beside their targets as they come. missed counts those that are not met."""

    def __init__(self):
        self.rows, self.missed, self.began = [], 0, time.monotonic()

    def said(self, text):
        print(f'  {time.monotonic() - self.began:5.0f} s  {text}', flush=True)

    def figure(self, what, value, unit, target=None, most=True):
        """A row of the table."""
        row = {'what': what, 'value': value, 'unit': unit}
        text = f'  {what:44}{value:12.4g} {unit:10}'
        if target is not None:
            met = value <= target if most else value >= target
            self.missed += not met
            row.update(target=target, met=met)
            text += f'  target: at {"most" if most else "least"} {target:g}{"" if met else "   MISSED"}'
        self.rows.append(row)
        print(text, flush=True)

    def end(self, out):
        """All figures go to the file."""
        out.write_text(''.join(json.dumps(r) + '\n' for r in self.rows))
        print(f'  {self.missed} targets missed, {time.monotonic() - self.began:.0f} s; all figures: {out}')
