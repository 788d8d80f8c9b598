# SPDX-License-Identifier: Apache-2.0
"""Engines that a vault may lie in, started for tests: folders, S3, ssh, JuiceFS, Ceph.

HITRAIN_ENGINES names those that tests run on: by default the engines that start at once. `make check-vault` takes juicefs, and
`make check-ceph` takes rados. Missing ones come from the Python package index or from Debian's archive into
~/.cache/hitrain, and are not installed. Each server is ended by its process id.
"""
import contextlib
import fcntl
import hashlib
import os
import pathlib
import pwd
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from conftest import BIN, ROOT, SECONDS_MAX, wait_for

sys.path[:0] = [str(BIN.parent / 'share/hitrain' / folder) for folder in ('vault', 'tools')]
CACHE = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache') / 'hitrain'
NAMES = os.environ.get('HITRAIN_ENGINES', 'file,tmpfs,hitrain,test,s3,ssh').split(',')
INSTALL_SECONDS_MAX = 400
PINS = ROOT / 'tests/vault/requirements.txt'


class Engine:
    """A place for vaults. `env` holds what programs need to reach it, and is set in os.environ while it runs."""

    env, server = {}, None

    def url(self, name):
        raise NotImplementedError

    def stop(self):
        self.server.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.server.send_signal(signal.SIGCONT)


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def answers(port):
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex(('127.0.0.1', port)) == 0


def end(process):
    if process and process.poll() is None:
        process.kill()
        process.wait(SECONDS_MAX)


def cached(name, key, make):
    """A folder below CACHE that make(folder) fills once. Skips the test where that fails."""
    folder = CACHE / f'{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}'
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(f'{folder}.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / 'complete').exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                make(folder)
            except (subprocess.SubprocessError, OSError) as e:
                said = getattr(e, 'stderr', b'') or b''
                shutil.rmtree(folder, ignore_errors=True)
                pytest.skip(f'{name} could not be installed: {said.decode(errors="replace").strip()[-200:] or e}')
            (folder / 'complete').touch()
    return folder


def quiet(*words, **kw):
    subprocess.run([str(w) for w in words], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   stderr=subprocess.PIPE, timeout=INSTALL_SECONDS_MAX, **kw)


def environment(name, pins):
    """A virtual environment with these packages of the index."""
    def make(folder):
        quiet('/usr/bin/python3', '-m', 'venv', folder)
        quiet(folder / 'bin/pip', 'install', '-q', '--retries', '1', '--timeout', '15', '--no-cache-dir', *pins)
    return cached(name, ' '.join(pins) + sys.version, make)


def unpacked(name, packages):
    """A folder with these Debian packages and their dependencies. Nothing is installed, so no service starts by itself."""
    def make(folder):
        listed = subprocess.run(['apt-get', 'install', '--simulate', '-qq', '--no-install-recommends', *packages],
                                capture_output=True, text=True, check=True, timeout=INSTALL_SECONDS_MAX).stdout
        names = [line.split()[1] for line in listed.splitlines() if line.startswith('Inst ')]
        debs = folder / 'debs'
        debs.mkdir()
        quiet('apt-get', '-o', 'APT::Sandbox::User=root', 'download', *names, cwd=debs)
        for deb in debs.glob('*.deb'):
            quiet('dpkg', '-x', deb, folder)
        shutil.rmtree(debs)
    return cached(name, ' '.join(packages), make)


def pins(*of):
    return [l for l in PINS.read_text().splitlines() if l.startswith(of)]


# ---- folders ----

class Folder(Engine):
    def __init__(self, folder, scheme='file://'):
        self.folder, self.scheme = folder, scheme

    def url(self, name):
        if self.scheme == 'test:':
            (self.folder / name).mkdir()
        return f'{self.scheme}{self.folder / name}'


@contextlib.contextmanager
def start_file(tmp, make_store):
    yield Folder(tmp)


@contextlib.contextmanager
def start_test(tmp, make_store):
    yield Folder(tmp, 'test:')


@contextlib.contextmanager
def start_tmpfs(tmp, make_store, size='256M'):
    quiet('mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', tmp)
    try:
        yield Folder(tmp)
    finally:
        quiet('umount', '--lazy', tmp)


@contextlib.contextmanager
def start_hitrain(tmp, make_store):
    yield Folder(make_store(size='512M').mount())


@contextlib.contextmanager
def start_juicefs(tmp, make_store):
    folder = environment('juicefs', pins('juicefs'))
    program = next(folder.glob('lib/python3*/site-packages/juicefs*/**/juicefs*'), folder / 'bin/juicefs')
    program = folder / 'bin/juicefs' if (folder / 'bin/juicefs').exists() else program
    meta, point = f'sqlite3://{tmp}/meta.db', tmp / 'mnt'
    quiet(program, 'format', '--storage', 'file', '--bucket', f'{tmp}/data/', meta, 'vaults')
    point.mkdir()
    engine = Folder(point)
    engine.server = subprocess.Popen([program, 'mount', '--no-usage-report', '--cache-dir', tmp / 'cache', meta, point],
                                     stdin=subprocess.DEVNULL, stdout=open(tmp / 'log', 'wb'), stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: os.path.ismount(point) or engine.server.poll() is not None, 'JuiceFS is mounted')
        yield engine
    finally:
        subprocess.run(['umount', '--lazy', point], stderr=subprocess.DEVNULL)
        end(engine.server)


# ---- S3 ----

class S3(Engine):
    def __init__(self, tmp, **more):
        folder = environment('s3', pins('moto', 'boto3'))
        self.port, self.log, self.more = free_port(), tmp / 'moto.log', more
        self.env = {'PATH': f'{folder}/bin:{os.environ["PATH"]}', 'AWS_ACCESS_KEY_ID': 'key', 'AWS_SECRET_ACCESS_KEY': 'secret',
                    'AWS_DEFAULT_REGION': 'us-east-1', 'AWS_EC2_METADATA_DISABLED': 'true'}
        self.python, self.folder = folder / 'bin/python', folder
        self.start()

    def start(self):
        with open(self.log, 'ab') as log:
            self.server = subprocess.Popen([self.python, self.folder / 'bin/moto_server', '-p', str(self.port)], stdout=log,
                                           stderr=log, env={**os.environ, **self.env, **self.more})
        wait_for(lambda: answers(self.port) or self.server.poll() is not None, 'moto answers')
        self.bucket('create')

    def bucket(self, verb):
        """Makes or deletes the bucket."""
        code = (f'import boto3; b = boto3.resource("s3", endpoint_url="http://127.0.0.1:{self.port}").Bucket("vaults")\n'
                + ('b.create()' if verb == 'create' else 'b.objects.delete(); b.delete()'))
        quiet(self.python, '-c', code, env={**os.environ, **self.env})

    def url(self, name):
        return f's3://vaults/{name}?endpoint=http://127.0.0.1:{self.port}'


@contextlib.contextmanager
def start_s3(tmp, make_store):
    engine = S3(tmp)
    try:
        yield engine
    finally:
        end(engine.server)


# ---- ssh ----

# sshd needs a user, and a folder for its part without rights. Both are there in a mount namespace of its own. The shell of all users
# there is one that reads nobody's settings at its start.
SSHD = """set -e
{ sed 's,[^:]*$,/bin/sh,' /etc/passwd; echo sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin; } >"$1/passwd"
mount --bind "$1/passwd" /etc/passwd
umount -i -l -a -t fuse.hitrain || :    # or a store that a test unmounts would stay here, with its daemon
mount -t tmpfs tmpfs /run
mkdir /run/sshd
[ ! -d "$2/usr/lib/openssh" ] || [ ! -d /usr/lib/openssh ] || mount --bind "$2/usr/lib/openssh" /usr/lib/openssh
exec "$3" -D -e -f "$1/config"
"""


class Ssh(Engine):
    """An sshd of the test alone, on the loopback address: the machine's, or the one of a package that is not installed."""

    def __init__(self, tmp):
        self.tmp, self.port, folder, root = tmp, free_port(), tmp / 'ssh', pathlib.Path('/')
        path = f'{os.environ["PATH"]}:/usr/sbin'
        if not all(shutil.which(p, path=path) for p in ('sshd', 'ssh', 'ssh-keygen')):
            root = unpacked('sshd', ['openssh-server'])
            path += f':{root}/usr/sbin:{root}/usr/bin'
            self.env = {'LD_LIBRARY_PATH': ':'.join(map(str, [*root.glob('usr/lib/*-linux-gnu'), *root.glob('lib/*-linux-gnu')]))}
        folder.mkdir(mode=0o700)
        self.env = {**self.env, 'PATH': path, 'HITRAIN_SSH': self.words('user')}
        for key in 'host', 'user', 'stranger':
            quiet('ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', folder / key, env={**os.environ, **self.env})
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        # A session sees the stores that tests mount later.
        enter = f'nsenter --mount=/proc/{os.getpid()}/ns/mnt' if os.geteuid() == 0 else 'exec'
        (folder / 'config').write_text(
            f'ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\n'
            f'StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n'
            f'PermitRootLogin prohibit-password\nAllowUsers {self.user}\nSetEnv PATH={BIN}:/usr/bin:/bin\n'
            f'ForceCommand {enter} sh -c "$SSH_ORIGINAL_COMMAND"\n')
        sshd = shutil.which('sshd', path=path)
        words = ['unshare', '--mount', '--propagation', 'private', 'sh', '-c', SSHD, 'sshd', folder, root, sshd]
        if os.geteuid():
            words = [sshd, '-D', '-e', '-f', folder / 'config']
        self.log = folder / 'log'
        self.server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=open(self.log, 'wb'), env={**os.environ, **self.env})

    def words(self, key):
        return (f'ssh -F none -i {self.tmp}/ssh/{key} -o IdentitiesOnly=yes -o StrictHostKeyChecking=no '
                '-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR')

    def command(self):
        """The words of a command that runs another one through ssh."""
        return [*self.words('user').split(), '-o', 'BatchMode=yes', '-p', str(self.port), f'{self.user}@127.0.0.1']

    def url(self, name):
        return f'ssh://{self.user}@127.0.0.1:{self.port}{self.tmp}/{name}'


@contextlib.contextmanager
def start_ssh(tmp, make_store):
    engine = Ssh(tmp)
    try:
        wait_for(lambda: engine.server.poll() is not None or answers(engine.port), 'sshd answers')
        tried = subprocess.run([*engine.command(), 'true'], stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX,
                               env={**os.environ, **engine.env})
        if tried.returncode:
            pytest.skip(f'sshd does not let {engine.user} in: {tried.stderr.strip()} {engine.log.read_text()[-300:]}')
        yield engine
    finally:
        end(engine.server)


# ---- Ceph ----

CEPH_PACKAGES = 'ceph-mon', 'ceph-osd', 'ceph-common', 'python3-rados'
CEPH_CONF = """[global]
fsid = {uuid}
mon_host = [v2:127.0.0.1:{port},v1:127.0.0.1:{port_v1}]
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 3
osd_pool_default_min_size = 2
mon_allow_pool_delete = true
mon_data_avail_crit = 1
mon_data_avail_warn = 2
osd_heartbeat_grace = 6
mon_osd_down_out_interval = 3600
mon_osd_min_down_reporters = 1
bluestore_block_size = 3221225472
bluestore_block_db_create = false
bluestore_block_wal_create = false
osd_memory_target = 939524096
bluestore_cache_autotune = false
bluestore_cache_size = 33554432
osd_op_num_shards = 2
osd_op_num_threads_per_shard = 1
osd_class_dir = {lib}/rados-classes
erasure_code_dir = {lib}/ceph/erasure-code
plugin_dir = {lib}/ceph
run_dir = {tmp}
admin_socket = {tmp}/$name.asok
log_file = {tmp}/$name.log
pid_file = {tmp}/$name.pid
mon_data = {tmp}/mon.a
osd_data = {tmp}/osd.$id
crash_dir = {tmp}
"""


class Ceph(Engine):
    """One monitor, three storage daemons in files, without authentication, on the loopback address."""

    OSDS = 3

    def __init__(self, tmp):
        self.tmp, root = tmp, unpacked('ceph', CEPH_PACKAGES)
        lib = f'{root}/usr/lib/x86_64-linux-gnu'
        self.conf = tmp / 'ceph.conf'
        self.env = {'LD_LIBRARY_PATH': f'{lib}:{lib}/ceph:{root}/lib/x86_64-linux-gnu', 'CEPH_CONF': str(self.conf),
                    'PATH': f'{root}/usr/bin:{os.environ["PATH"]}', 'PYTHONPATH': f'{root}/usr/lib/python3/dist-packages'}
        self.uuid = pathlib.Path('/proc/sys/kernel/random/uuid').read_text
        self.daemons, self.lib = {}, lib

    def call(self, *words, check=True):
        return subprocess.run([str(w) for w in words], env={**os.environ, **self.env}, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=SECONDS_MAX, check=check).stdout

    def start(self):
        port, port_v1, uuid = free_port(), free_port(), self.uuid().strip()
        self.conf.write_text(CEPH_CONF.format(uuid=uuid, port=port, port_v1=port_v1, tmp=self.tmp, lib=self.lib))
        (self.tmp / 'mon.a').mkdir()
        self.call('monmaptool', '--create', '--fsid', uuid, '--addv', 'a', f'[v2:127.0.0.1:{port},v1:127.0.0.1:{port_v1}]',
                  self.tmp / 'monmap')
        self.call('ceph-mon', '--mkfs', '-i', 'a', '--monmap', self.tmp / 'monmap')
        self.start_daemon('ceph-mon', 'a')
        for number in range(self.OSDS):
            uuid = self.uuid().strip()
            (self.tmp / f'osd.{number}').mkdir()
            self.call('ceph', 'osd', 'new', uuid, number)
            self.call('ceph-osd', '-i', number, '--mkfs', '--osd-uuid', uuid)
            self.start_daemon('ceph-osd', number)
        self.wait_for_up(self.OSDS)
        for pool in 'vaults', 'segments':
            self.call('ceph', 'osd', 'pool', 'create', pool, 8, 8)

    def wait_for_up(self, count):
        wait_for(lambda: f'{count} up' in self.call('ceph', 'osd', 'stat', check=False), f'{count} storage daemons are up')

    def start_daemon(self, program, name):
        with open(self.tmp / f'{program}.{name}.out', 'ab') as out:
            self.daemons[f'{program}.{name}'] = subprocess.Popen(
                ['nice', '-n', '5', program, '-f', '-i', str(name)], env={**os.environ, **self.env}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out)

    def kill_daemon(self, name):
        end(self.daemons.pop(name))

    def url(self, name):
        return f'rados://vaults/{name}?data=segments'


@contextlib.contextmanager
def start_rados(tmp, make_store):
    engine = Ceph(tmp)
    try:
        engine.start()
        yield engine
    finally:
        for name in list(engine.daemons):
            engine.kill_daemon(name)


@contextlib.contextmanager
def started(name, tmp, make_store=None):
    """The engine of this name. Its variables are set in this process, too, until it ends."""
    with globals()[f'start_{name}'](tmp, make_store) as engine:
        before = {k: os.environ.get(k) for k in engine.env}
        os.environ.update(engine.env)
        try:
            yield engine
        finally:
            for key, value in before.items():
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value


@pytest.fixture(scope='session')
def servers(tmp_path_factory):
    """servers(name): a server of that kind, started once."""
    running, stack = {}, contextlib.ExitStack()

    def get(name):
        if name not in running:
            running[name] = stack.enter_context(started(name, tmp_path_factory.mktemp(name)))
        return running[name]

    with stack:
        yield get


@pytest.fixture(params=NAMES)
def place(request, servers, tmp_path, make_store):
    """Each engine by turns. url(NAME) is a place for a vault."""
    if request.param in ('s3', 'ssh', 'juicefs', 'rados'):
        yield servers(request.param)
    else:
        with started(request.param, tmp_path, make_store) as engine:
            yield engine
