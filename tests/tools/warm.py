#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs pytest in forks of a process that has imported pytest and the modules that its arguments name: an import of torch takes
longer than many a file of tests.

Its standard input is a socket. A message is the environment and the arguments of pytest as JSON, with two descriptors: the output,
and a pipe for the process id and, at the end, `status user system`. Each test is in a session and a mount namespace of its own.
"""
import contextlib
import ctypes
import importlib
import json
import os
import select
import socket
import subprocess
import sys

MESSAGE_BYTES_MAX = 1 << 20
CLONE_NEWNS = 0x20000
MS_SLAVE_REC = 0x84000
START_SECONDS_MAX = 600


class Job:
    """A pytest that runs, for those who use a limits.Process."""

    def __init__(self, reply):
        self.reply = os.fdopen(reply, 'rb', 0)
        if not select.select([self.reply], [], [], START_SECONDS_MAX)[0]:
            raise TimeoutError('what all tests import has not been imported yet')
        self.pid = int(self.reply.readline())

    def wait_for(self, seconds_max=None):
        if not select.select([self.reply], [], [], seconds_max)[0]:
            return None, (0, 0)
        status, *used = self.reply.readline().split() or [1, 0, 0]  # who watches it was killed
        self.reply.close()
        return int(status), tuple(map(float, used))

    wait = wait_for


class Pytest:
    def __init__(self, command, modules, env):
        """command: of Python."""
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen([*command, __file__, *modules], stdin=theirs, env=env, start_new_session=True)

    def start(self, args, env, out):
        reply, theirs = os.pipe()
        socket.send_fds(self.socket, [json.dumps([env, args]).encode()], [out.fileno(), theirs])
        os.close(theirs)
        return Job(reply)

    def end(self):
        self.socket.close()
        self.process.wait()


def own_mounts():
    """A mount that hangs on purpose must not hang mount(8) of another test. And a namespace that one test makes must not keep
    another test's mount. Who may make none does without."""
    libc = ctypes.CDLL(None)
    if libc.unshare(CLONE_NEWNS) == 0:
        libc.mount(b'none', b'/', None, ctypes.c_ulong(MS_SLAVE_REC), None)


def run(env, args, out, reply):
    os.setsid()
    os.write(reply, b'%d\n' % os.getpid())
    os.environ.clear()
    os.environ.update(env)
    for fd in 1, 2:
        os.dup2(out, fd)
    own_mounts()
    sys.argv = ['pytest', *args]
    return pytest.main(args)


def watch(env, args, out, reply):
    """A child that waits for the test: its parent has nothing to do but to take the next message."""
    pid = os.fork()
    if pid == 0:
        sys.exit(run(env, args, out, reply))
    _, status, used = os.wait4(pid, 0)
    os.write(reply, f'{os.waitstatus_to_exitcode(status)} {used.ru_utime} {used.ru_stime}\n'.encode())
    os._exit(0)


def main():
    jobs, null = socket.socket(fileno=os.dup(0)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    while True:
        message, fds, _, _ = socket.recv_fds(jobs, MESSAGE_BYTES_MAX, 2)
        if not message:
            break
        for fd in fds:
            os.set_inheritable(fd, False)
        with contextlib.suppress(OSError):  # who waits for the reply sees its end
            if os.fork() == 0:
                watch(*json.loads(message), *fds)
        for fd in fds:
            os.close(fd)
    try:
        while True:
            os.wait()  # the runner counts their time
    except ChildProcessError:
        pass


if __name__ == '__main__':
    sys.path[0] = os.getcwd()  # as python -m pytest does
    import pytest
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with open(os.devnull, 'w') as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        pytest.main(['--version'])  # imports its plugins
    main()
