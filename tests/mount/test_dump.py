# SPDX-License-Identifier: Apache-2.0
"""hitrainctl dump: what a mount is doing while a device does not answer."""
import contextlib
import os
import re
import subprocess
import sys

import pytest

from calls import call
from conftest import BIN, SECONDS_MAX, run, wait_for
from test_devices import make_pair  # noqa: F401 (a fixture)
from test_gradients import make_root, open_gradient
from test_tenants import ONES, Background, at_once, ioctl, overwrite, silent, store, sync_new, trained  # noqa: F401


class Shell:
    """Runs hitrainctl dump. It is started early: a program that is started later would close descriptors that wait."""

    def __init__(self, point):
        self.line = f'{BIN}/hitrainctl dump {point} 2>&1; echo "exit $?"\n'
        self.shell = subprocess.Popen(['sh'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def dump(self):
        self.shell.stdin.write(self.line)
        self.shell.stdin.flush()
        text = ''
        while not text.endswith('exit 0\n'):
            line = self.shell.stdout.readline()
            assert line and not line.startswith('exit 1'), text
            text += line
        return text

    def end(self):
        self.shell.stdin.close()
        self.shell.wait(SECONDS_MAX)


@contextlib.contextmanager
def shell(point):
    made = Shell(point)
    try:
        yield made.dump
    finally:
        made.end()


def dump(point):
    return run('hitrainctl', 'dump', point).stdout


def lines(text, section):
    """Of a section: from its heading to the next one."""
    found = re.search(rf'^{section}[^\n]*\n((?:  [^\n]*\n)*)', text, re.M)
    assert found, f'{section} is missing:\n{text}'
    return found.group(1).splitlines()


def some(found, *words):
    """A line that has all these words."""
    matching = [line for line in found if all(re.search(word, line) for word in words)]
    assert matching, f'{words} not in\n' + '\n'.join(found)
    return matching[0]


def dump_with(dump, *words):
    """The first one that has all. On a busy machine it leaves out what a lock guards that it did not get in time."""
    texts = []

    def look():
        texts.append(dump())
        return all(re.search(word, texts[-1]) for word in words)

    wait_for(look, f'a dump with {words}')
    return texts[-1]


def number(line):
    """Of the thread that a line names first."""
    return re.search(r'thread (\d+) ', line).group(1)


def test_it_names_the_request_the_chunk_and_the_device_that_does_not_answer(store):
    mnt = store.point
    file = mnt / 'a file'
    file.write_bytes(ONES)
    ino = os.stat(file).st_ino
    clients = Background()
    with shell(mnt) as dump, silent(store):
        clients.start(ioctl, mnt, 'commit')     # the kernel would keep the write from a file while fsync runs
        wait_for(lambda: b'not-answering' in at_once((mnt / '.hitrain/devices').read_bytes), 'it waits')
        clients.start(overwrite, file)
        text = dump_with(dump, 'wanted by', rf'  {ino} /a file', '(write|flush).* by thread')
    clients.end()
    threads = lines(text, 'threads')
    committing = some(threads, r'ht-job.*ioctl of inode \d+ for', 'waits for')
    writing = some(threads, rf'ht-fuse.*write of inode {ino} for', 'waits for a chunk')
    request = some(lines(text, 'devices'), r'(write|flush)', 'for [0-9.]+ s, by thread')
    assert number(request) == number(committing)
    chunk = some(lines(text, 'chunks'), f'object {ino}, chunk 0: shared by 1, being written')
    assert f'wanted by thread {number(writing)} ' in chunk and f'held by thread {number(committing)} ' in chunk
    assert f'  {ino} /a file' in lines(text, 'paths')


def test_it_names_the_gate_of_a_root_and_the_commands_in_its_queue(store):
    mnt = store.point
    busy = trained(mnt, 'busy', 'sgd lr=1', 2)
    root = os.stat(busy).st_ino
    clients = Background()
    with shell(mnt) as dump, silent(store):
        for _ in range(5):
            clients.start(ioctl, busy, 'commit')
        wait_for(lambda: b'not-answering' in at_once((mnt / '.hitrain/devices').read_bytes), 'a commit waits')
        text = dump_with(dump, 'turns.*1 running, 4 queued', f'  {root} /busy', 'gate: thread')
    clients.end()
    some(lines(text, 'requests'), rf'lane turns of {root}: 1 running, 4 queued')
    some(lines(text, 'requests'), r'ioctl of inode \d+ for')
    some(lines(text, 'model roots'), rf'root {root}: ', r'gate: thread \d+ \(ht-job\)')
    assert f'  {root} /busy' in lines(text, 'paths')


def test_it_works_while_all_workers_are_taken(make_pair):
    store = make_pair(hosts=True)
    mnt = store.mount_on(store.loops, 'device_timeout=1', 'commit=0', 'dram=64M', 'max_threads=1')
    clients = Background()
    with shell(mnt) as dump, silent(store):
        for i in range(4):
            clients.start(sync_new, mnt / f'file{i}')
        wait_for(lambda: len(re.findall(r'fsync of inode \d+ for .*; waits for', dump())) >= 2, 'they wait')
    clients.end()


def test_only_root_gets_one_and_only_of_a_mount(store):
    assert 'threads' in dump(store.point) and 'threads' in dump(f'{store.point}/')
    relative = subprocess.run([BIN / 'hitrainctl', 'dump', store.point.name], cwd=store.point.parent, capture_output=True)
    assert relative.returncode == 0 and b'threads' in relative.stdout
    refused = subprocess.run([BIN / 'hitrainctl', 'dump', store.point], user=65534, capture_output=True, text=True)
    assert refused.returncode == 1 and 'only root' in refused.stderr and not refused.stdout
    elsewhere = run('hitrainctl', 'dump', store.folder, check=False)
    assert elsewhere.returncode == 1 and 'not where a hitrain store is mounted' in elsewhere.stderr


# ------------------------------------------------------------- other programs

CLONE_NEWNET = 0x40000000

# Takes the names of sockets, and answers each client with a text. Its last argument is the text, the others are names.
OTHER = r"""
import resource, selectors, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
clients = selectors.DefaultSelector()
for name in sys.argv[1:-1]:
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind('\0' + name)
    except OSError:
        continue    # a daemon has it
    server.listen(4)
    clients.register(server, selectors.EVENT_READ)
print('ready', flush=True)
while True:
    for key, _ in clients.select():
        client = key.fileobj.accept()[0]
        try:
            client.sendall(sys.argv[-1].encode())
        except OSError:
            pass    # it wants nothing
        client.close()
"""


@contextlib.contextmanager
def other_program(names, text, uid, prefix=()):
    program = subprocess.Popen([*prefix, 'setpriv', f'--reuid={uid}', '--clear-groups', sys.executable, '-c', OTHER, *names, text],
                               stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout.readline() == 'ready\n'
        yield program
    finally:
        program.kill()
        program.communicate()


def socket_name(point):
    device = os.stat(point).st_dev
    return f'hitrain-dump-{os.major(device)}:{os.minor(device)}'


def dump_of_other(point, text, uid):
    """In a network namespace where that program has the name."""
    with other_program([socket_name(point)], text, uid, prefix=['unshare', '--net']) as program:
        return subprocess.run(['nsenter', f'--net=/proc/{program.pid}/ns/net', BIN / 'hitrainctl', 'dump', point],
                              capture_output=True, text=True, timeout=SECONDS_MAX)


def test_it_believes_no_program_of_another_user(make_store):
    mnt = make_store('64M').mount()
    done = dump_of_other(mnt, 'forged\nend of dump\n', 65534)
    assert done.returncode == 1 and 'taken the name of its socket' in done.stderr and not done.stdout


def test_a_dump_that_is_cut_fails(make_store):
    mnt = make_store('64M').mount()
    whole = dump_of_other(mnt, 'threads:\nend of dump\n', 0)
    assert whole.returncode == 0 and whole.stdout == 'threads:\nend of dump\n'
    for text in 'threads:\n', 'threads:\nend of dump', 'end of dump\nthreads:\n':
        done = dump_of_other(mnt, text, 0)
        assert done.returncode == 1 and 'the dump is cut' in done.stderr and done.stdout.startswith(text)


def test_a_terminal_obeys_no_dump(make_store):
    mnt = make_store('64M').mount()
    done = dump_of_other(mnt, 'a\x1b[2J\x7f\x9b2J\x9d\u00a0\u00fc\nend of dump\n', 0)
    assert done.stdout == 'a?[2J???2J??\u00a0\u00fc\nend of dump\n'


def test_names_forge_no_lines(make_store):
    mnt = make_store('64M').mount()
    root = make_root(mnt, 'a\nend of dump\n  1 \x1b[2J\x7f\u00fc', 'sgd lr=1', w=4096)
    os.close(gradient_of(root))
    text = dump(mnt)
    assert f'  {os.stat(root).st_ino} /a?end of dump?  1 ?[2J?\u00fc' in lines(text, 'paths')
    assert text.count('\nend of dump\n') == 1 and text.endswith('\nend of dump\n')


@contextlib.contextmanager
def own_network():
    """Names of sockets that no other test has: the programs that start here are in a network namespace of their own."""
    before = os.open('/proc/self/ns/net', os.O_RDONLY)
    try:
        call('unshare', CLONE_NEWNET)
    except OSError as e:
        os.close(before)
        pytest.skip(f'no network namespaces here: {e}')
    try:
        yield
    finally:
        call('setns', before, CLONE_NEWNET)
        os.close(before)


def test_it_waits_for_its_name(make_store):
    store = make_store('64M')
    last = os.minor(os.stat(store.mount()).st_dev)
    store.unmount()
    with own_network():
        see_the_daemon_wait_for_its_name(store, last)


def see_the_daemon_wait_for_its_name(store, last):
    with other_program([f'hitrain-dump-0:{i}' for i in range(last + 100)], 'forged\nend of dump\n', 65534):
        mnt = store.mount()
        done = run('hitrainctl', 'dump', mnt, check=False)
        assert done.returncode == 1 and 'taken the name of its socket' in done.stderr and not done.stdout
        wait_for(lambda: 'has taken the name of its socket' in store.messages(), 'the daemon says so')
    assert f'process {store.daemon.pid}:' in dump(mnt), 'the daemon tries again each second, and so does hitrainctl'


def has_name(pid):
    """Does a process listen to a socket for dumps?"""
    with open('/proc/net/unix') as f:
        ours = {f'socket:[{line.split()[6]}]' for line in f if '@hitrain-dump-' in line}
    links = [f'/proc/{pid}/fd/{fd}' for fd in os.listdir(f'/proc/{pid}/fd')]
    return any(os.readlink(link) in ours for link in links if os.path.lexists(link))


def test_a_mount_that_ends_leaves_its_name_to_the_next(store):
    (store.point / 'file').write_bytes(ONES)
    assert has_name(store.daemon.pid)
    shell = subprocess.Popen(['sh'], stdin=subprocess.PIPE, text=True)
    with silent(store):
        shell.stdin.write(f'umount -l {store.point}\n')
        shell.stdin.close()
        wait_for(lambda: 'unmounting for' in store.messages(), 'it waits for a device')
        assert not has_name(store.daemon.pid) and store.daemon.poll() is None
    assert shell.wait(SECONDS_MAX) == 0 and store.daemon.wait(SECONDS_MAX) == 0
    store.daemon = None


# ----------------------------------------------------------------- much to say

def gradient_of(root):
    """Opens a step."""
    fd = open_gradient(root, 'w')
    os.pwrite(fd, b'\0' * 16, 0)
    return fd


def test_it_leaves_idle_roots_out_and_shows_some_of_many(make_store):
    mnt = make_store('64M').mount()
    roots = [make_root(mnt, f'root{i}', 'sgd lr=1', w=4) for i in range(67)]
    assert not lines(dump(mnt), 'model roots')
    for root in roots[1:]:
        os.close(gradient_of(root))
    shown = lines(dump(mnt), 'model roots')
    assert not [line for line in shown if f'root {os.stat(roots[0]).st_ino}:' in line]
    assert len([line for line in shown if 'is open' in line]) == 64 and shown[-1] == '  and 2 more'
