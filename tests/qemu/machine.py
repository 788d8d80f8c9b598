# SPDX-License-Identifier: Apache-2.0
"""A machine in QEMU: a stock Debian kernel, an initramfs of our programs, NVMe namespaces, and a plug to pull.

Software emulation, because hardware virtualisation is missing where tests usually run: right, and slow.
"""
import os
import pathlib
import shutil
import socket
import subprocess
import time

TOP = pathlib.Path(__file__).resolve().parents[2]
SECONDS_MAX = 240
MODULES = 'nvme fuse 9p 9pnet_virtio virtio_pci'.split()
PROGRAMS = ('bin/hitrain', 'bin/mkfs.hitrain', 'bin/hitrain-fsck', 'bin/hitrainctl', 'tests/programs/trainer',
            'tests/programs/traffic')


def run(*args, **kw):
    return subprocess.run([str(a) for a in args], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                          **kw).stdout


def wait_for(condition, what, seconds=SECONDS_MAX):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f'{what}: not within {seconds} s')
        time.sleep(0.01)


# --------------------------------------------------------------- the initramfs

def module_files(kernel):
    """Of what we want and what that needs, in the order of loading. The kernel has built in what is not there."""
    base, version = kernel / 'lib/modules', next((kernel / 'lib/modules').iterdir()).name
    if not (base / version / 'modules.dep').exists():
        run('depmod', '-b', kernel, version)
    needs = {}
    for line in (base / version / 'modules.dep').read_text().splitlines():
        path, below = line.split(':')
        needs[path] = below.split()
    by_name = {pathlib.Path(p).name.split('.')[0].replace('-', '_'): p for p in needs}
    order = []
    for name in MODULES:
        if name in by_name:
            order += [*reversed(needs[by_name[name]]), by_name[name]]
    return [base / version / path for path in dict.fromkeys(order)]


def libraries(programs):
    found = set()
    for program in programs:
        for line in run('ldd', program).splitlines():
            found |= {word for word in line.split() if word.startswith('/')}
    return sorted(found)


def put(source, root, name):
    path = root / name.lstrip('/')
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)
    path.chmod(0o755)


def put_module(source, root):
    put(source, root, f'modules/{source.name}')
    path = root / 'modules' / source.name
    if path.suffix in ('.xz', '.zst'):
        run(*(['unxz', '-f'] if path.suffix == '.xz' else ['zstd', '-qd', '--rm']), path)
        path = path.with_suffix('')
    return path.name


def make_initramfs(kernel, build, folder):
    root, archive = folder / 'root', folder / 'initramfs'
    programs = [build / name for name in PROGRAMS]
    for name in ('proc', 'sys', 'dev', 'tmp', 'run', 'etc'):
        (root / name).mkdir(parents=True)
    put('/bin/busybox', root, 'bin/busybox')
    put(pathlib.Path(__file__).with_name('init'), root, 'init')
    for program in programs:
        put(program, root, f'bin/{program.name}')
        run('strip', '-g', root / 'bin' / program.name)
    for library in libraries(programs):
        put(library, root, library)
    order = [put_module(path, root) for path in module_files(kernel)]
    (root / 'modules/order').write_text(''.join(f'{name}\n' for name in order))
    with open(archive, 'wb') as out:
        find = subprocess.Popen(['find', '.'], cwd=root, stdout=subprocess.PIPE)
        subprocess.run(['cpio', '-oH', 'newc', '--quiet'], cwd=root, stdin=find.stdout, stdout=out, check=True)
        find.wait()
    return archive


# ----------------------------------------------------------------- the machine

class Machine:
    """Runs from the making of this object to cut()."""

    def __init__(self, kernel, initramfs, folder, drives):
        """drives: arguments of QEMU."""
        self.folder, self.out = folder, folder / 'out'
        self.out.mkdir(exist_ok=True)
        self.console = folder / 'console'
        control = folder / 'control'
        control.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(control))
        listener.listen(1)
        self.begun = time.monotonic()
        self.errors = folder / 'out/qemu.errors'
        with open(self.errors, 'w') as errors:
            self.process = self.start_qemu(kernel, initramfs, control, drives, errors)
        listener.settimeout(20)
        self.line, _ = listener.accept()
        listener.close()
        self.answers = self.line.makefile('r')
        self.line.settimeout(SECONDS_MAX)
        self.expect('ready')
        self.boot_seconds = time.monotonic() - self.begun

    def start_qemu(self, kernel, initramfs, control, drives, errors):
        return subprocess.Popen([
            'qemu-system-x86_64', '-machine', 'q35', '-accel', 'tcg,thread=multi,tb-size=256', '-cpu', 'max', '-smp', '2',
            '-m', '768', '-nographic', '-nodefaults', '-no-reboot', '-monitor', 'none',
            '-serial', f'file:{self.console}', '-serial', f'unix:{control}',
            '-fsdev', f'local,id=out,path={self.out},security_model=none', '-device', 'virtio-9p-pci,fsdev=out,mount_tag=out',
            '-kernel', str(next((kernel / 'boot').glob('vmlinuz-*'))), '-initrd', str(initramfs),
            '-append', 'console=ttyS0 quiet panic=-1 rdinit=/init mitigations=off', *drives],
            stdin=subprocess.DEVNULL, stderr=errors)

    def expect(self, word):
        try:
            line = self.answers.readline()
        except OSError:
            line = ''
        if not line.startswith(word):
            self.cut()
            console = self.console.read_text(errors='replace')[-4000:] if self.console.exists() else ''
            raise RuntimeError(f'the machine said {line!r} in place of {word!r}; its console:\n{console}')
        return line

    def try_do(self, command):
        """Exit status and what was printed."""
        self.begin(command)
        status = int(self.expect('status').split()[1])
        return status, (self.out / 'answer').read_text(errors='replace')

    def begin(self, command):
        self.line.sendall(command.encode() + b'\n')

    def do(self, command):
        status, text = self.try_do(command)
        if status:
            raise RuntimeError(f'{command}: exit {status}\n{text}')
        return text

    def cut(self):
        """No more of the machine from here on."""
        self.process.kill()
        self.process.wait()
        self.line.close()
