# SPDX-License-Identifier: Apache-2.0
"""How long a test may take, and what is done with one that takes longer.

usual.txt beside this file has the seconds of tests that take long, as `HITRAIN_REGENERATE=1 make check` saw and wrote them. Tests
begin in the order of this table. Each may take ten times as long and some minutes more: a machine may be slow and busy. A test that
takes longer hangs. Then the stacks of all threads of its processes are added to its output, and it ends with all that it started.
"""
import os
import pathlib
import select
import shutil
import signal
import subprocess
import time

TABLE = pathlib.Path(__file__).parent / 'usual.txt'
USUAL_SECONDS_MIN = 10  # shorter times have no row
TIMES = 10
SPARE_SECONDS = 500
LONG_SECONDS = 7200  # in check-long, and of a build
STACK_SECONDS_MAX = 30
END_SECONDS_MAX = 5


def read_usual():
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    return {name: float(seconds) for seconds, name in (line.split(' ', 1) for line in lines)}


USUAL = read_usual()


def write_usual(seconds):
    rows = sorted(((s, n) for n, s in seconds.items() if s >= USUAL_SECONDS_MIN and n.startswith('tests/')), reverse=True)
    TABLE.write_text(''.join(f'{s:.0f} {n}\n' for s, n in rows))


def usual(name):
    """Of a test's name, or of its source."""
    return USUAL.get(name[:-2] if name.endswith('.c') else name, USUAL_SECONDS_MIN)


def seconds(name):
    """After these a command hangs."""
    if not name.startswith('tests/') or os.environ.get('HITRAIN_LONG'):
        return LONG_SECONDS
    return SPARE_SECONDS + TIMES * usual(name)


class Process(subprocess.Popen):
    def wait_for(self, seconds_max):
        """The exit status, or None if it runs longer, and (user, system) seconds of processors, with those of its ended children."""
        fd = os.pidfd_open(self.pid)
        try:
            if not select.select([fd], [], [], seconds_max)[0]:
                return None, (0, 0)
        finally:
            os.close(fd)
        _, status, used = os.wait4(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode, (used.ru_utime, used.ru_stime)


def start(argv, env, out):
    return Process(argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def fields_of(pid):
    """The state of a process, its parent, its group, its session and so on; those of a zombie if it has ended."""
    try:
        return pathlib.Path(f'/proc/{pid}/stat').read_text(errors='replace').rpartition(')')[2].split()
    except OSError:
        return ['Z', '0', '0', '0']


def is_alive(pid):
    return fields_of(pid)[0] != 'Z'


def session(leader):
    """The processes of a session, oldest first. Check puts each test into a process group of its own; these stay in the session."""
    pids = (int(path.name) for path in pathlib.Path('/proc').glob('[0-9]*'))
    return sorted(p for p in pids if fields_of(p)[3] == str(leader) and is_alive(p))


def signal_session(leader, number):
    for pid in session(leader):
        try:
            os.kill(pid, number)
        except OSError:
            pass


def stacks(pid):
    """Of all threads of a process: gdb's, or what the kernel knows."""
    name = pathlib.Path(f'/proc/{pid}/cmdline').read_bytes().replace(b'\0', b' ').decode(errors='replace')
    text = f'\n---- process {pid}: {name}\n'
    if shutil.which('gdb'):
        # Nothing of a library or a script is loaded from elsewhere; the program waits meanwhile.
        try:
            text += subprocess.run(['gdb', '--nx', '--batch', '-p', str(pid), '-ex', 'set pagination off', '-ex', 'thread apply all bt 30'],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=STACK_SECONDS_MAX,
                                   env={**os.environ, 'DEBUGINFOD_URLS': ''}).stdout.decode(errors='replace')
        except subprocess.TimeoutExpired:
            text += 'gdb did not end\n'
    for task in sorted(pathlib.Path(f'/proc/{pid}/task').iterdir()):
        try:
            text += f'thread {task.name} {(task / "comm").read_text().strip()}:\n{(task / "stack").read_text()}'
        except OSError:
            pass
    return text


def end_one(pid):
    """pytest, and Python with faulthandler, print their stacks at SIGABRT: one after the other."""
    os.kill(pid, signal.SIGABRT)
    for _ in range(10 * END_SECONDS_MAX):
        if not is_alive(pid):
            return
        time.sleep(0.1)


def end_with_stacks(process, out):
    """Writes stacks of all processes of its session to a file, and ends them, the youngest first."""
    for pid in reversed(session(process.pid)):
        try:
            os.write(out.fileno(), stacks(pid).encode())
            end_one(pid)
        except OSError:
            pass  # it has ended
    signal_session(process.pid, signal.SIGKILL)
    process.wait()
