# SPDX-License-Identifier: Apache-2.0
"""Clients that do everything wrong: each time the daemon lives on, the mount can be left and the store is clean."""
import contextlib
import ctypes
import errno
import mmap
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time

import pytest

from calls import fails, sync
from conftest import MIB, SECONDS_MAX, run
from models import new_model

NOBODY = 65534
WORDS = ('dtype', 'shape', 'members', 'grad_dtype', 'class', 'pin', 'tier', 'optimizer', 'step', 'error', 'durable_step',
         'grad_norm', 'stats', 'hits', 'resident_bytes', '', 'x', 'dtype.', 'a' * 200)
VALUES = (b'', b'\0', b'f32\0', b'\xff\xfe', b'f' * 1024, b'9' * 65536, b'1,' * 500, b'-1', b'18446744073709551616',
          b'adamw lr=', b'adamw lr=nan', b'adamw lr=1e999', b'adamw lr=1 lr=2', b'adamw \0lr=1', b'adamw beta1=1',
          b'adamw lr=1e-3 ' + b' ' * 1100, b'%s%n%s%n')
ONES = b'\0\0\x80\x3f' * 1024


@contextlib.contextmanager
def may_fail():
    with contextlib.suppress(OSError):
        yield


def train(root, name):
    (root / '.hitrain/grad' / name).write_bytes(bytes((root / name).stat().st_size))
    sync(root)


@pytest.fixture
def root(mnt):
    r = new_model(mnt / 'model', 'adamw lr=0.5')
    for name in 'vw':
        (r / name).write_bytes(ONES)
        train(r, name)
    yield r
    # whatever was done to it, the mount goes on
    (mnt / 'alive').write_bytes(b'yes')
    assert (mnt / 'alive').read_bytes() == b'yes'
    os.sync()


def as_nobody(code, *args):
    done = subprocess.run([sys.executable, '-c', code, *map(str, args)], user=NOBODY, group=NOBODY, extra_groups=[],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_attributes_of_nonsense(mnt, root):
    (mnt / 'file').write_bytes(b'x')
    os.symlink('file', mnt / 'link')
    before = os.getxattr(root, 'user.hitrain.optimizer')
    for path in (mnt / 'file', root / 'v', root / 'sub', mnt, mnt / 'link'):
        if path.name == 'sub':
            path.mkdir()
        for word in WORDS:
            name = 'user.hitrain.' + word
            for value in VALUES:
                with may_fail():
                    os.setxattr(path, name, value, follow_symlinks=path.name != 'link')
                with may_fail():
                    os.getxattr(path, name, follow_symlinks=path.name != 'link')
            with may_fail():
                os.removexattr(path, name, follow_symlinks=path.name != 'link')
        os.listxattr(path)
    for word in WORDS:
        for value in VALUES:
            if word != 'dtype':
                with may_fail():
                    os.setxattr(root, 'user.hitrain.' + word, value)
    assert os.getxattr(root, 'user.hitrain.optimizer') == before
    os.setxattr(root, 'user.hitrain.error', b'')
    train(root, 'w')


def test_commands_of_nonsense(root):
    lines = (b'', b'\n', b'\0\n', b'\xff\xfe\n', b'wait', b'wait ' + b'a/' * 2000 + b'\n', b'wait ../w\n', b'apply /\n',
             b'apply .hitrain/grad/w\n', b'wait ' + b'x' * 100000 + b'\n', b'reset .\n', b'reset  w\n', b'evict v\n' * 500,
             b'commit commit\n', b'abort\nabort\n\n\nabort\n', b'step\r\n', b'prefetch w\0v\n', b'%s%n\n', b'x' * MIB)
    for line in lines:
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
            fd = os.open(root / '.hitrain/ctl', flags)
            with may_fail():
                os.write(fd, line)
            with may_fail():
                os.pwrite(fd, line[:10], 1 << 40)
            with may_fail():
                os.pread(fd, MIB, 1 << 50)
            with may_fail():
                os.read(fd, MIB)
            with may_fail():
                os.ftruncate(fd, 5)
            with may_fail():
                os.close(fd)
    train(root, 'w')


def test_gradients_of_nonsense(root):
    grad = root / '.hitrain/grad/w'
    for offset, data in ((1, b'abc'), (4094, ONES), (4096, b'abcd'), (1 << 44, b'abcd'), ((1 << 63) - 4096, b'abcd'),
                         (0, ONES * 300), (2, b'ab'), (4092, b'abcd')):
        with may_fail():
            fd = os.open(grad, os.O_WRONLY)
            try:
                os.pwrite(fd, data, offset)
                with may_fail():
                    os.pread(fd, 10, 0)
            finally:
                os.close(fd)
        command = root / '.hitrain/ctl'
        with may_fail():
            command.write_bytes(b'abort\n')
    for action in (lambda fd: os.ftruncate(fd, 1 << 43), lambda fd: os.posix_fallocate(fd, 0, 1 << 43),
                   lambda fd: os.lseek(fd, 3, os.SEEK_HOLE), lambda fd: os.fsync(fd), lambda fd: os.fchmod(fd, 0),
                   lambda fd: os.fchown(fd, 1, 1), lambda fd: os.utime(fd), lambda fd: os.setxattr(fd, 'user.x', b'')):
        with may_fail():
            fd = os.open(grad, os.O_RDWR | os.O_TRUNC)
            with may_fail():
                action(fd)
            os.close(fd)
    for name in ('', '.', '..', 'w/x', 'x' * 255, 'x' * 256, '../grad/w', '.hitrain'):
        for hidden in ('grad', 'grad-topk', 'state', 'state/w', 'ctl', 'stats', 'none'):
            path = f'{root}/.hitrain/{hidden}/{name}'
            for f in (os.unlink, os.rmdir, os.mkdir, os.listdir, os.readlink, os.stat, os.lstat):
                with may_fail():
                    f(path)
            with may_fail():
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
            with may_fail():
                os.rename(path, root / 'w')
            with may_fail():
                os.rename(root / 'w', path)
            with may_fail():
                os.link(path, root / 'l')
            with may_fail():
                os.mkfifo(path)
    train(root, 'w')


def test_mappings_of_hidden_files(root):
    for path in ('grad/w', 'state/w/exp_avg', 'ctl', 'stats'):
        with may_fail():
            fd = os.open(root / '.hitrain' / path, os.O_RDWR)
            for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
                with may_fail(), contextlib.suppress(ValueError), mmap.mmap(fd, 4096, flags) as m:
                    m[:4] = b'abcd'
                    assert m[:4] == b'abcd'
            os.close(fd)
        with may_fail():
            (root / '.hitrain/ctl').write_bytes(b'abort\n')
    train(root, 'w')


def test_parameters_move_under_their_gradients(mnt, root):
    for turn, change in enumerate((lambda p: p.unlink(), lambda p: p.rename(root / 'renamed'),
                                   lambda p: os.truncate(p, 0), lambda p: os.truncate(p, 2 * MIB),
                                   lambda p: p.chmod(0), lambda p: (root / 'w').replace(p),
                                   lambda p: os.setxattr(p, 'user.hitrain.dtype', b'u8'),
                                   lambda p: p.write_bytes(b'x'))):
        p = root / f'p{turn}'
        p.write_bytes(ONES)
        train(root, p.name)
        fds = [os.open(root / '.hitrain' / path, os.O_RDWR) for path in
               (f'grad/{p.name}', f'state/{p.name}/exp_avg')] + [os.open(p, os.O_RDWR)]
        with may_fail():
            os.write(fds[0], ONES[:2048])
        with may_fail():
            change(p)
        for fd in fds:
            with may_fail():
                os.pwrite(fd, ONES[2048:], 2048)
            with may_fail():
                os.pread(fd, 4096, 0)
            with may_fail():
                os.fsync(fd)
            with may_fail():
                os.close(fd)
        with may_fail():
            (root / '.hitrain/ctl').write_bytes(b'commit\n')
        with may_fail():
            (root / '.hitrain/ctl').write_bytes(b'abort\n')


def test_a_root_removed_under_open_files(mnt, root):
    fds = [os.open(root / '.hitrain' / path, os.O_RDWR) for path in ('grad/w', 'state/w/exp_avg', 'ctl')]
    fds += [os.open(root, os.O_RDONLY), os.open(root / 'w', os.O_RDWR)]
    with may_fail():
        os.write(fds[0], ONES)
    for name in os.listdir(root):
        (root / name).unlink()
    with may_fail():
        root.rmdir()
    for fd in fds:
        for f in (lambda: os.write(fd, b'commit\n'), lambda: os.pread(fd, 4096, 0), lambda: os.fsync(fd),
                  lambda: os.setxattr(fd, 'user.hitrain.optimizer', b'adamw'), lambda: os.close(fd)):
            with may_fail():
                f()
    with may_fail():
        root.rmdir()


@pytest.mark.parametrize('held', ['', 'w', '.hitrain/grad/w'])
def test_a_model_removed_in_one_go_is_gone_after_a_crash(store, mnt, root, held):
    """Nothing was committed in between: the optimizer's records must go with the names and the content."""
    fd = os.open(root / held, os.O_WRONLY if held else os.O_RDONLY)
    for name in os.listdir(root):
        (root / name).unlink()
    root.rmdir()
    outside = os.open(mnt / 'outside', os.O_WRONLY | os.O_CREAT)
    os.fsync(outside)
    store.kill()
    store.detach()
    for f in fd, outside:
        with may_fail():
            os.close(f)
    store.assert_clean()
    store.mount()
    assert os.listdir(mnt) == ['outside']


def test_names_at_their_limits(mnt, root):
    for name in (b'n' * 255, b'\xff\xfe\n\x1b[31m', b' ', b'...', b'%n', b'-'):
        for where in (mnt, root):
            path = os.fsencode(where) + b'/' + name
            with open(path, 'wb') as f:
                f.write(ONES)
        with may_fail():
            with open(os.fsencode(root) + b'/.hitrain/grad/' + name, 'wb') as f:
                f.write(ONES)
    with pytest.raises(OSError):
        (mnt / ('n' * 256)).mkdir()
    here = os.open('.', os.O_RDONLY)
    try:
        os.chdir(root)
        for _ in range(300):
            os.mkdir('d' * 255)
            os.chdir('d' * 255)
        with open('deep', 'wb') as f:
            f.write(ONES)
        with may_fail(), open('.hitrain/grad/deep', 'wb') as f:
            f.write(ONES)
        with may_fail():
            os.getxattr('.', 'user.hitrain.stats')
        with may_fail():
            os.setxattr('.', 'user.hitrain.optimizer', b'adamw')
    finally:
        os.fchdir(here)
        os.close(here)
    with may_fail():
        (root / '.hitrain/ctl').write_bytes(b'commit\n')


STEER = '''
import os, sys
root = sys.argv[1]
def refused(f, *args):
    try:
        f(*args)
    except OSError:
        return
    sys.exit('%s %s was possible' % (f.__name__, args))
def put(path, data):
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
for line in (b'commit', b'abort', b'step', b'apply w', b'reset w', b'wait', b'evict w', b'prefetch w'):
    refused(put, root + '/.hitrain/ctl', line + b'\\n')
refused(put, root + '/.hitrain/grad/w', bytes(4096))
refused(put, root + '/.hitrain/state/w/exp_avg', bytes(4096))
for word, value in (('optimizer', b'adamw lr=9'), ('step', b'9'), ('error', b''), ('dtype', b'u8'), ('pin', b'dram')):
    for path in (root, root + '/w'):
        refused(os.setxattr, path, 'user.hitrain.' + word, value)
        refused(os.removexattr, path, 'user.hitrain.' + word)
for f, args in ((os.unlink, ('/w',)), (os.rename, ('/w', '/x')), (os.truncate, ('/w', 0)), (os.chmod, ('/w', 0o777)),
                (os.chown, ('/w', 65534, 65534)), (os.mkdir, ('/d',)), (os.truncate, ('/.hitrain/grad/w', 0))):
    refused(f, *(root + a if isinstance(a, str) else a for a in args))
'''


def test_a_stranger_steers_nothing(root):
    root.chmod(0o755)
    before = (root / 'w').read_bytes(), os.getxattr(root, 'user.hitrain.step')
    as_nobody(STEER, root)
    assert ((root / 'w').read_bytes(), os.getxattr(root, 'user.hitrain.step')) == before
    (root / 'w').chmod(0o600)
    as_nobody('''
import sys
for p in ('/w', '/.hitrain/state/w/exp_avg', '/.hitrain/state/w/master', '/.hitrain/grad/w'):
    try:
        open(sys.argv[1] + p, 'rb').read()
    except OSError:
        continue
    sys.exit(p + ' can be read')
''', root)


KILLED = '''
import os, random, sys
root, seed = sys.argv[1], int(sys.argv[2])
r = random.Random(seed)
print('on', flush=True)
while True:
    try:
        k = r.randrange(8)
        if k < 3:
            fd = os.open(root + '/.hitrain/grad/' + r.choice('vw'), os.O_WRONLY)
            os.write(fd, bytes(r.choice((4, 2048, 4096))))
            os.close(fd)
        elif k == 3:
            open(root + '/.hitrain/ctl', 'wb', buffering=0).write(r.choice((b'commit', b'abort', b'step', b'wait')) + b'\\n')
        elif k == 4:
            open(root + '/' + r.choice('vw'), 'rb').read()
        elif k == 5:
            open(root + '/.hitrain/state/w/exp_avg', 'rb').read()
        elif k == 6:
            open(root + '/x%d' % r.randrange(4), 'wb').write(bytes(100000))
        else:
            os.unlink(root + '/x%d' % r.randrange(4))
    except OSError:
        pass
'''


def test_clients_killed_in_the_middle(root):
    for turn in range(3):
        clients = [subprocess.Popen([sys.executable, '-c', KILLED, root, str(turn * 8 + i)], stdout=subprocess.PIPE)
                   for i in range(6)]
        for c in clients:
            c.stdout.readline()
        time.sleep(random.Random(turn).uniform(0.1, 0.4))
        for c in clients:
            c.send_signal(signal.SIGKILL)
        for c in clients:
            c.wait(SECONDS_MAX)
            c.stdout.close()
    (root / '.hitrain/ctl').write_bytes(b'abort\n')
    train(root, 'w')


# ------------------------------------------------------------------ images

BLOCK = 4096
MEMORY_MAX = 512 * MIB
try:
    xxh3 = ctypes.CDLL('libxxhash.so.0').XXH3_64bits
    xxh3.restype, xxh3.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
except OSError:
    xxh3 = None


def xxh(data):
    return xxh3(bytes(data), len(data))


class Image:
    """A store to whose log the test can append a frame, with every checksum right."""

    def __init__(self, path):
        self.path = path
        self.data = bytearray(path.read_bytes())
        copies = [self.data[at:at + BLOCK] for at in (0, 16 * BLOCK, len(self.data) - BLOCK)]
        self.super = max(copies, key=lambda b: struct.unpack_from('<Q', b, 104))
        self.salt, = struct.unpack_from('<Q', self.super, 96)
        self.log_bytes, _, first, _, second, self.pos, self.seq, self.chain = struct.unpack_from('<8Q', self.super, 128)
        self.logs = first, second
        while self.follow():
            pass

    def follow(self):
        at = self.logs[0] + self.pos % self.log_bytes
        magic, _, checksum, _, epoch, seq, pos, prev, _, length, _ = struct.unpack_from('<2I9Q', self.data, at)
        if (magic, seq, pos, prev) != (0x66746968, self.seq, self.pos, self.chain):
            return False
        self.epoch = epoch
        self.pos, self.seq, self.chain = pos + -(-(80 + length) // BLOCK) * BLOCK, seq + 1, checksum
        return True

    def with_records(self, records):
        body = struct.pack('<8Q', self.salt, self.epoch, self.seq, self.pos, self.chain, self.seq - 1, len(records),
                           0) + records
        frame = struct.pack('<2IQ', 0x66746968, 0, xxh(body)) + body
        out = bytearray(self.data)
        for log in self.logs:
            at = log + self.pos % self.log_bytes
            out[at:at + len(frame)] = frame
        return out

    def with_super(self, at, value):
        block = bytearray(self.super)
        block[at:at + len(value)] = value
        block[8:16] = struct.pack('<Q', xxh(block[16:]))
        out = bytearray(self.data)
        for place in (0, 16 * BLOCK, len(out) - BLOCK):
            out[place:place + BLOCK] = block
        return out


def record(kind, fmt, *values, tail=b''):
    payload = struct.pack('<' + fmt, *values) + tail
    return struct.pack('<HHI', kind, 0, len(payload)) + payload


def chunk(oid, index, block, stored=4096):
    return record(19, 'QQIBBHIIQBBHQ', oid, index, 1, 0, 0, 1, stored, stored, 1, 0, 0, 1, block)


EVER = (1 << 64) - 1
LAST_ID = 1 << 47
SPARSE = record(17, 'QIIQQ', 900, 1 << 16, 0, 1 << 44, 0) + chunk(900, (1 << 28) - 1, 256)


def named_file(ino, name):
    return (record(32, 'QIIIIqqqBBBB', ino, 0o100644, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) +
            record(34, 'QQqB', 1, ino, 0, 8, tail=name))


RECORDS = {
    'the last id': record(17, 'QIIQQ', EVER, 1 << 16, 0, 0, 0),
    'no id': record(17, 'QIIQQ', 0, 1 << 16, 0, 0, 0),
    'the last next id': record(16, 'Q', EVER),
    'an inode like a hidden one': record(32, 'QIIIIqqqBBBB', 5 << 56 | 3, 0o100644, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    'the last inode': record(32, 'QIIIIqqqBBBB', EVER, 0o100644, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    'state with the last id': record(50, 'QQBBHIQQQQQQ', 3, 2, 1, 0, 2, 1 << 16, 4, 1, 1, EVER - 1, 2, EVER),
    'a chunk in the log': record(17, 'QIIQQ', 900, 1 << 16, 0, 4096, 0) + chunk(900, 0, 256),
    'a chunk outside': record(17, 'QIIQQ', 900, 1 << 16, 0, 4096, 0) + chunk(900, 0, 1 << 40),
    'deletions of all but the last chunk of 16 TiB': SPARSE + record(20, 'QQQ', 900, 0, (1 << 28) - 1) * 50,
    'a name with a slash': record(34, 'QQqB', 1, 3, 0, 8, tail=b'a/b'),
    'a name of nothing': record(34, 'QQqB', 1, 700, 0, 8, tail=b'a'),
    'directories in each other': b''.join(
        record(32, 'QIIIIqqqBBBB', i, 0o40755, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) +
        record(34, 'QQqB', i, 1001 - i, 0, 4, tail=b'x') for i in (500, 501)),
    'a state of 16 TiB': record(50, 'QQBBHIQQQQQQ', 3, 2, 1, 0, 2, 1 << 16, 1 << 42, 1, 1, 10, 2, 11),
    'an unknown record': record(30, 'Q', 1),
    'a cut record': struct.pack('<HHI', 17, 0, 500),
}
SUPERS = {'log of 1 TiB': (128, struct.pack('<Q', 1 << 40)), 'start unaligned': (168, struct.pack('<Q', 5)),
          'sixteen devices': (116, struct.pack('<I', 16)), 'device of 2^59 bytes': (248, struct.pack('<Q', 1 << 59)),
          'the last epoch': (192, struct.pack('<Q', 1 << 62)), 'the last generation': (104, struct.pack('<Q', 1 << 62)),
          'the last position': (168, struct.pack('<Q', 1 << 62)), 'unknown feature': (24, struct.pack('<Q', 1 << 63)), 'logs that overlap': (160, struct.pack('<Q', 1 << 20))}


def little_memory():
    """All that is mapped: stacks, buffers, the DRAM tier. Sanitizers map terabytes."""
    if 'asan' not in os.environ.get('HITRAIN_BIN', ''):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))


@pytest.mark.skipif(xxh3 is None, reason='needs libxxhash')
def test_images_made_to_deceive(make_store):
    """fsck and mount refuse each with a reason, soon, with little memory, and neither crashes."""
    store = make_store('16M')
    (store.mount() / 'file').write_bytes(b'x')
    store.unmount()
    image = Image(store.image)
    bad = store.folder / 'bad'
    for what, data in [*((w, image.with_records(r)) for w, r in RECORDS.items()),
                       *((w, image.with_super(*s)) for w, s in SUPERS.items())]:
        bad.write_bytes(data)
        done = run('hitrain-fsck', '-n', bad, check=False, preexec_fn=little_memory)
        assert done.returncode in (4, 8, 12) and done.stdout + done.stderr, (what, done)
        done = run('hitrain', bad, store.point, '-o', 'dram=32M,staging=24M', check=False,
                   preexec_fn=little_memory)
        assert done.returncode > 0 and done.stderr, (what, done)
        done = run('hitrain-fsck', '-y', bad, check=False, preexec_fn=little_memory)
        assert done.returncode in (1, 4, 8, 12), (what, done)
        if done.returncode == 1:
            assert run('hitrain-fsck', '-n', bad, check=False).returncode == 0, what


@pytest.fixture
def forged(make_store):
    """A store in whose log stand these records, too."""
    store = make_store('16M')
    (store.mount() / 'file').write_bytes(b'x')
    store.unmount()

    def forge(records):
        store.image.write_bytes(Image(store.image).with_records(records))
        return store

    return forge


@pytest.mark.skipif(xxh3 is None, reason='needs libxxhash')
def test_a_store_whose_numbers_are_used_up(forged):
    """Nothing new can be made, and no refused object is written down: the next mount reads everything."""
    store = forged(named_file(LAST_ID, b'last'))
    store.assert_clean()
    for _ in range(2):
        mnt = store.mount()
        with fails(errno.ENOSPC):
            (mnt / 'new').write_bytes(b'x')
        (mnt / 'last').write_bytes(b'its content')
        store.unmount(check=True)
    store.mount()
    assert (store.point / 'last').read_bytes() == b'its content'


@pytest.mark.skipif(xxh3 is None, reason='needs libxxhash')
def test_a_log_that_cannot_be_checkpointed(forged):
    """More lives in it than any mount would have let in: fsck says so, it is refused, not waited for, and can be read."""
    store = forged(b''.join(named_file(1000 + i, b'name%05d' % i) for i in range(4500)))
    store.ends_clean = False
    done = store.fsck()
    assert done.returncode == 4 and 'LOG-FULL' in done.stdout, done
    done = run('hitrain', store.image, store.point, '-o', 'dram=32M,staging=24M', check=False)
    assert done.returncode > 0 and 'No space left' in done.stderr, done
    assert len(os.listdir(store.mount('ro'))) == 4501


@pytest.mark.skipif(xxh3 is None, reason='needs libxxhash')
def test_records_of_a_newer_version_are_kept(forged):
    """A writer would drop them: it is refused, as repair is. A reader shows all else."""
    store = forged(record(64, 'Q', 1))
    store.ends_clean = False
    before = store.image.read_bytes()
    done = run('hitrain', store.image, store.point, '-o', 'dram=32M,staging=24M', check=False)
    assert done.returncode > 0 and 'does not know (64)' in done.stderr and 'read-only' in done.stderr, done
    done = run('hitrain-fsck', '-y', store.image, check=False)
    assert done.returncode == 4 and 'LOG-TYPE' in done.stdout and 'use the version' in done.stdout, done
    assert (store.mount('ro') / 'file').read_bytes() == b'x'
    store.unmount()
    assert store.image.read_bytes() == before
