# SPDX-License-Identifier: Apache-2.0
"""A machine in QEMU: a stock Debian kernel, an initramfs with our programs, NVMe namespaces, NUMA nodes, and a plug to pull.

Software emulation, because hardware virtualisation is missing where tests usually run: right, and slow. To run something in it:

    with machine.started(folder, units=(512, 4096), nodes=2, programs=['tests/unit/...']) as m:
        status, text = m.try_do('test_ring')        # any line of shell; do() raises where try_do() returns a status

Each namespace has a controller with a volatile write cache, has the requested size, and keeps its content in
folder/diskN as long as that exists. In the machine namespace N is the block device /dev/blockN and the character device
/dev/genericN. With two nodes each has half of the memory and of the processors. Namespace N is on a bus of node N %
nodes. Programs lie in /bin. Files in /out appear in folder/out. cut() pulls the plug; the end of the body does so, too.
`tests/qemu/run.py` does the same from a shell.
"""
import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import time

TOP = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get('HITRAIN_BUILD') or TOP / 'build')
KERNEL = TOP / 'build/deps/vm/kernel'
NEEDED = 'qemu-system-x86_64', 'qemu-nbd', '/bin/busybox', 'cpio', 'depmod', 'unxz', 'zstd', KERNEL
SECONDS_MAX = 240
MEMORY_MB = 768
DISTANCE = 21   # of the nodes, where a node has 10 to itself
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


def lacking():
    """The first missing need of a machine, or None. `make deps-vm` installs it."""
    return next((what for what in NEEDED if not (shutil.which(what) or os.path.isdir(what))), None)


# --------------------------------------------------------------- the initramfs

def module_files(kernel, names):
    """Files of the wanted modules and of their dependencies, in the order of loading. Absent ones are built in."""
    base, version = kernel / 'lib/modules', next((kernel / 'lib/modules').iterdir()).name
    if not (base / version / 'modules.dep').exists():
        run('depmod', '-b', kernel, version)
    needs = {}
    for line in (base / version / 'modules.dep').read_text().splitlines():
        path, below = line.split(':')
        needs[path] = below.split()
    by_name = {pathlib.Path(p).name.split('.')[0].replace('-', '_'): p for p in needs}
    order = []
    for name in names:
        if name in by_name:
            order += [*reversed(needs[by_name[name]]), by_name[name]]
    return [base / version / path for path in dict.fromkeys(order)]


def libraries(programs):
    found = set()
    for program in programs:
        for line in run('ldd', program).splitlines():
            found |= {word for word in line.split() if word.startswith('/')}
    # The C library loads these when a thread is cancelled, as at unmount.
    found |= {line.split()[-1] for line in run('ldconfig', '-p').splitlines() if line.split()[0] == 'libgcc_s.so.1'}
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


def make_initramfs(kernel, build, folder, more_programs=(), more_modules=()):
    root, archive = folder / 'root', folder / 'initramfs'
    programs = [build / name for name in (*PROGRAMS, *more_programs)]
    for name in ('proc', 'sys', 'dev', 'tmp', 'run', 'etc'):
        (root / name).mkdir(parents=True)
    put('/bin/busybox', root, 'bin/busybox')
    put(pathlib.Path(__file__).with_name('init'), root, 'init')
    for program in programs:
        put(program, root, f'bin/{program.name}')
        run('strip', '-g', root / 'bin' / program.name)
    for library in libraries(programs):
        put(library, root, library)
    order = [put_module(path, root) for path in module_files(kernel, [*MODULES, *more_modules])]
    (root / 'modules/order').write_text(''.join(f'{name}\n' for name in order))
    with open(archive, 'wb') as out:
        find = subprocess.Popen(['find', '.'], cwd=root, stdout=subprocess.PIPE)
        subprocess.run(['cpio', '-oH', 'newc', '--quiet'], cwd=root, stdin=find.stdout, stdout=out, check=True)
        find.wait()
    return archive


# ----------------------------------------------------------------- the machine

def files(folder, count, size):
    """Arguments of QEMU: files as the nodes n0, n1, ... of its block layer. Those that are there keep their content."""
    drives = []
    for i in range(count):
        disk = folder / f'disk{i}'
        disk.touch()
        os.truncate(disk, size)
        drives += ['-blockdev', f'driver=raw,node-name=n{i},file.driver=file,file.filename={disk},discard=unmap']
    return drives


def controllers(units, nodes=1):
    """Arguments of QEMU: for each block size an NVMe controller with one namespace on the node nN, and a write cache."""
    args = []
    for i, unit in enumerate(units):
        bus = f',bus=port{i}' if nodes > 1 else ''
        if bus:
            args += ['-device', f'pcie-root-port,id=port{i},bus=host{i % nodes},chassis={i + 1},slot={i}']
        args += ['-device', f'nvme,id=c{i},serial=hitrain{i}{bus}', '-device',
                 f'nvme-ns,bus=c{i},drive=n{i},nsid=1,logical_block_size={unit},physical_block_size=4096']
    return args


def memory(nodes):
    """Arguments of QEMU: processors and memory, and with more than one node a PCI host bridge on each."""
    args = ['-smp', '2', '-m', str(MEMORY_MB)]
    if nodes == 1:
        return args
    for node in range(nodes):
        cpus = 2 // nodes
        args += ['-object', f'memory-backend-ram,id=m{node},size={MEMORY_MB // nodes}M', '-numa',
                 f'node,nodeid={node},cpus={node * cpus}-{(node + 1) * cpus - 1},memdev=m{node}',
                 '-device', f'pxb-pcie,id=host{node},bus_nr={64 * (node + 1)},numa_node={node},bus=pcie.0']
    return args + ['-numa', f'dist,src=0,dst=1,val={DISTANCE}']


class Machine:
    """Runs from the making of this object to cut()."""

    def __init__(self, kernel, initramfs, folder, drives, units, nodes=1):
        """drives: arguments of QEMU that make a node nN of its block layer for each of units. nodes: of NUMA, 1 or 2."""
        drives = [*memory(nodes), *drives, *controllers(units, nodes)]
        self.namespaces = len(units)
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
            'qemu-system-x86_64', '-machine', 'q35', '-accel', 'tcg,thread=multi,tb-size=256', '-cpu', 'max',
            '-nographic', '-nodefaults', '-no-reboot', '-monitor', 'none',
            '-serial', f'file:{self.console}', '-serial', f'unix:{control}',
            '-fsdev', f'local,id=out,path={self.out},security_model=none', '-device', 'virtio-9p-pci,fsdev=out,mount_tag=out',
            '-kernel', str(next((kernel / 'boot').glob('vmlinuz-*'))), '-initrd', str(initramfs),
            '-append', 'console=ttyS0 quiet panic=-1 rdinit=/init mitigations=off '
            f'namespaces={self.namespaces}', *drives],
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
        """Returns the exit status and the printed text."""
        self.begin(command)
        status = int(self.expect('status').split()[1])
        return status, (self.out / 'answer').read_text(errors='replace')

    def begin(self, command):
        assert '\n' not in command
        self.line.sendall(command.encode() + b'\n')

    def do(self, command):
        status, text = self.try_do(command)
        if status:
            raise RuntimeError(f'{command}: exit {status}\n{text}')
        return text

    def cut(self):
        """The machine stops here."""
        self.process.kill()
        self.process.wait()
        self.line.close()


@contextlib.contextmanager
def started(folder, units=(512, 4096), nodes=1, size=64 << 20, programs=(), modules=()):
    """A machine with a namespace for each of units; programs: more than PROGRAMS, names below the folder of the build;
    modules: more than MODULES."""
    m = Machine(KERNEL, make_initramfs(KERNEL, BUILD, folder, programs, modules), folder, files(folder, len(units), size), units, nodes)
    try:
        yield m
    finally:
        m.cut()
