#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Builds and runs tests for the Makefile, and adds up their results.

Place and name make a file a test: tests/unit/**/test_*.c, tests/crash/crash_*.c, tests/model/model_*.c are programs of
their own (Check's summary line is counted where there is one, else the exit status), and tests/mount/test_*.py, tests/vault/test_*.py and
tests/optim/test_*.py are run by pytest, one process for each file.

A failure never ends the run: its whole output appears where it happened, its name again at the end, and the last line
is "N passed, N failed". Only tests count as passed; a failing build or lint counts as one failure each.

`check`, `check-long` and `check-ecosystem` run many tests side by side on few processors. A file of tests that fails there runs
three times more at the end, by itself. One more failure fails the run. A file that passes each time is flaky: the line above the
last names it, and its first output stays in the log. Whoever sees it mends it. Reports of sanitizers, crashes and hangs get no
second chance, nor do crash, model and fuzz tests: their results do not depend on time. HITRAIN_FLAKY=fail gives none at all.
"""
import argparse
import concurrent.futures
import fnmatch
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import coverage
import ecosystem
import limits
import mutants
import warm

PYTHON = '/usr/bin/python3'
LINTS = ['includes.py', 'headers.sh', 'names.py', 'format.sh', 'layout.py', 'size.py', 'weight.py', 'shell.sh', 'spdx.sh', 'locks.sh', 'threads.sh', 'english.py', 'hosts.sh', 'slices.py', 'deps.sh']
# Tests of a daemon that ThreadSanitizer watches.
RACES = ['test_mixed_load.py', 'test_stress.py', 'test_concurrency.py', 'test_scrub.py', 'test_passthrough.py',
         'test_steps_engines.py', 'test_kept_races.py']
HOLDS = ['tests/unit/tiering/txn/test_slices', 'tests/unit/tiering/txn/test_slices_sparse', 'tests/unit/fs/ns/test_many']
# Tests that read or change something that the whole machine has once: memory in /proc/meminfo, the page cache, sockets
# named by the number of a mount (those of mounts that end meanwhile become free), /dev/log. No other test on a mount runs
# beside them; programs that compute do.
ALONE = ['test_passthrough.py', 'test_memory.py', 'test_posix_names.py', 'test_dump.py', 'test_errors.py']
# Tests of the client that run with the newest PyTorch, too.
TORCH_2 = ['test_torch_client.py', 'test_torch_contract.py', 'test_torch_gradients.py', 'test_torch_async.py', 'test_torch_checkpoint.py',
           'test_torch_offload.py', 'test_torch_activations.py', 'test_torch_microbatches.py', 'test_torch_transfers.py', 'test_torch_device.py',
           'test_torch_late.py', 'test_torch_close.py', 'test_torch_muon.py', 'test_torch_muon_parts.py']
# `make check` runs unit tests with sanitizers, and these as users build them, too: their results must not depend on
# optimizations and instruction sets, or they measure memory that a sanitizer changes.
OPTIMIZED = ['tests/unit/optim/rules/*', 'tests/unit/tiering/codec/*', 'tests/unit/tiering/space/*']
PROGRAMS = ['all', 'clients']
FLAKY_RUNS = 3  # of a file that failed once
FLAKY_SECONDS_MAX = 300  # longer ones do not run again
FLAKY_FILES_MAX = 3  # if more fail, the reason is not the load
# Reports of sanitizers, assertions, signals that end a program, hangs; problems that hitrain-fsck finds.
NEVER_FLAKY = re.compile(r"Sanitizer|runtime error:|Assertion `|stack smashing|core dumped|Received signal"
                         r"|(exit|status) -(4|6|7|8|11)\b|(?<!\d)-(4|6|7|8|11) ==|SIG(ILL|ABRT|BUS|FPE|SEGV)|Fatal Python error"
                         r"|Test timeout expired|stopped: still running|\b[1-9]\d* problems? left")
FUZZ_SAN = 'asan,ubsan,fuzzer'
FUZZ_RSS_MIB = 1024
CHECK_LINE = re.compile(r'^\d+%: Checks: (\d+), Failures: (\d+), Errors: (\d+)', re.M)
STATES_LINE = re.compile(r'^states: (\d+) scripts, (\d+) flush points, (\d+) made, (\d+) distinct$', re.M)
PYTEST_NONE_RAN = 5  # also when all of a file is skipped
PYTEST_LINE = re.compile(r'^=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s.*$', re.M)
# Inner makes choose their own parallelism: the pipe of an outer one does not reach them.
NOT_INHERITED = ('MAKEFLAGS', 'MFLAGS', 'GNUMAKEFLAGS', 'MAKELEVEL', 'MAKEOVERRIDES')


def variant_dir(out, cc, san):
    """Where the Makefile builds for this compiler and these sanitizers."""
    compiler = os.path.basename(cc.split()[0])
    parts = [compiler] if compiler not in ('gcc', 'cc') else []
    parts += [s for s in san.split(',') if s]
    return os.path.join(out, '-'.join(parts)) if parts else out


def unit_sources():
    return pathlib.Path('tests/unit').rglob('test_*.c')


def state_sources():
    return [*pathlib.Path('tests/crash').glob('crash_*.c'), *pathlib.Path('tests/model').glob('model_*.c')]


def fuzz_sources():
    return pathlib.Path('tests/fuzz').glob('fuzz_*.c')


def terminated(text):
    return text if not text or text.endswith('\n') else text + '\n'


class Runner:
    def __init__(self, args):
        self.args = args
        self.counting = threading.RLock()  # sections may run side by side
        self.alone = None  # tests that wait for the end of all others on a mount, while sections run side by side
        self.built = {}  # by compiler, sanitizers and settings: which targets were built, and which could not be
        self.sessions = set()  # of commands that run
        self.pytest = []  # processes that fork tests
        self.begin = time.monotonic()
        self.ended = False  # by a signal
        self.passed = self.failed = self.skipped = 0
        self.failures = []
        self.doubtful = None  # files that failed once, while there is a section that runs them again: name, call, judge
        self.flaky = []
        self.ran = 0
        self.seconds = {}  # that each took
        self.processor = {}  # (user, system) seconds that each used
        self.env = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
        self.env.setdefault('PYTHONPYCACHEPREFIX', os.path.abspath(os.path.join(args.out, 'pycache')))
        # The python3 of a version manager is a shell script: 0.1 s of a processor, ten times as much as Python's own start.
        self.env['PATH'] = f'{os.path.dirname(PYTHON)}:{self.env.get("PATH", os.defpath)}'
        self.jobs = os.cpu_count() or 1
        # Programs wait a little. Tests on a mount wait most of the time, for a device, a timer or a daemon that ends.
        self.programs_at_once = self.jobs + (self.jobs + 1) // 2
        self.pytests_at_once = 3 * self.jobs
        self.works = {}  # by program in front of a command
        self.cut = [0] * 4  # scripts, flush points, states made, distinct

    # -- messages --

    def heading(self, text):
        after = time.monotonic() - self.begin
        with self.counting:
            print(f'== {text}' + (f', after {after:.0f} s' if after >= 1 else ''), flush=True)

    def fail(self, name, count, output):
        with self.counting:
            if self.ended:
                return
            self.failed += count
            self.failures.append(name)
            print(f'---- output of {name}\n{terminated(output)}----', flush=True)

    def line(self, ok, seconds, name, remark):
        if self.ended:
            return
        with self.counting:
            self.seconds[name] = seconds
            user, system = self.processor.pop(name, (0, 0))
            used = f'  ({user:.0f} s user, {system:.0f} s system)' if user + system >= limits.USUAL_SECONDS_MIN else ''
            print(f'  {"ok  " if ok else "FAIL"} {seconds:7.1f} s  {name}  {remark}'.rstrip() + used, flush=True)

    # -- doing --

    def command(self, argv, env, name='', start=limits.start):
        """Runs argv; whatever it started ends with it. Returns (status, output, seconds). A command that runs longer than a
        test of this name may leaves the stacks of all its threads."""
        begin = time.monotonic()
        if self.ended:
            return 130, '', 0.0
        with tempfile.TemporaryFile() as out:  # a pipe would be held by whatever leaves the session
            try:
                proc = start(argv, env, out)
            except (OSError, ValueError) as e:
                return 1, f'{name} did not start: {e}\n', time.monotonic() - begin
            self.sessions.add(proc.pid)
            if self.ended:  # while it started
                limits.signal_session(proc.pid, signal.SIGTERM)
            status, used = proc.wait_for(limits.seconds(name))
            late = ''
            if status is None:
                late = f'\nstopped: still running after {limits.seconds(name):.0f} s\n'
                limits.end_with_stacks(proc, out)
                status = 124
            self.processor[name] = used
            self.sessions.discard(proc.pid)
            out.seek(0)
            return status, out.read().decode('utf-8', 'replace') + late, time.monotonic() - begin

    def end(self, signum, _):
        """What still runs when this program ends would work in folders of the next run."""
        self.ended = True
        print(f'== ended by signal {signum} after {time.monotonic() - self.begin:.0f} s', flush=True)
        for session in list(self.sessions):
            limits.signal_session(session, signal.SIGTERM)
        sys.exit(128 + signum)

    def build(self, targets, cc, san, more):
        """(status, output, seconds) of a make."""
        a = self.args
        argv = [a.make, '-k', '--no-print-directory', f'O={a.out}', f'CC={cc}', f'SAN={san}', *more, *a.set, *targets]
        return self.command(argv + (['V=1'] if a.verbose else []), self.env, 'make')

    def make(self, targets, cc, san, more=()):
        """Builds targets once, as far as possible; returns those that could not be built."""
        built = self.built.setdefault((cc, san, tuple(more)), {})
        new = [t for t in targets if t not in built]
        if new:
            lost = self.make_new(new, cc, san, more)
            built.update({t: t not in lost for t in new})
        return [t for t in targets if not built[t]]

    def make_new(self, targets, cc, san, more):
        status, output, seconds = self.build(targets, cc, san, more)
        name = f'building in {variant_dir(self.args.out, cc, san)}'
        ok = status == 0
        lost = [] if ok else [t for t in targets if self.build([t], cc, san, more)[0] != 0]
        self.line(ok, seconds, name, '' if ok else f'not built: {" ".join(lost)}')
        if not ok:
            noise = re.compile(r"^(  (CC|LD|AR) |make(\[\d+\])?: Target .* not remade)")
            self.fail(name, 1, ''.join(l for l in output.splitlines(True) if not noise.match(l)))
        elif self.args.verbose:
            print(output, end='', flush=True)
        return lost

    def selected(self, paths):
        pattern = self.args.test
        def match(p):
            stem = os.path.splitext(p)[0]
            return any(fnmatch.fnmatch(n, pattern) for n in (p, stem, os.path.basename(p), os.path.basename(stem)))
        paths = sorted(map(str, paths), key=lambda p: (-limits.usual(p), p))
        return [p for p in paths if not pattern or match(p)]

    def where_it_works(self, prefix):
        """The words in front of a command, or none if this machine does not let us."""
        if prefix[0] not in self.works:
            try:
                self.works[prefix[0]] = subprocess.run([*prefix, 'true'], stderr=subprocess.DEVNULL).returncode == 0
            except OSError:
                self.works[prefix[0]] = False
        return prefix if self.works[prefix[0]] else []

    def fixed_addresses(self):
        """Sanitizers of older compilers cannot live with as much address randomisation as newer kernels apply."""
        return self.where_it_works(['setarch', '-R'])

    def program_env(self, san):
        env = dict(self.env)
        env.setdefault('CK_VERBOSITY', 'normal')
        env.setdefault('CK_DEFAULT_TIMEOUT', '120')
        if san and san != 'coverage':
            env.setdefault('CK_TIMEOUT_MULTIPLIER', '5')
            # Shadows of buffers up to 4 MiB keep their pages: new ones would be a third of the system's time in some tests.
            env.setdefault('ASAN_OPTIONS', 'strict_string_checks=1:detect_stack_use_after_return=1:clear_shadow_mmap_threshold=524288')
            env.setdefault('UBSAN_OPTIONS', 'print_stacktrace=1')
            env.setdefault('TSAN_OPTIONS', 'second_deadlock_stack=1')
        if 'asan' in san:
            env.setdefault('HITRAIN_KERNEL', 'avx2')  # AddressSanitizer does not see into those of AVX-512 (Makefile)
        if san == 'tsan':
            env.setdefault('HITRAIN_LOCK_DELAYS', '1')  # the windows between two locks are wider (tiering/base/lock.h)
        return env

    def targets(self, sources, cc, san):
        """{program: name} of the selected ones."""
        out = variant_dir(self.args.out, cc, san)
        mark = '' if out == self.args.out else f' ({os.path.relpath(out, self.args.out)})'
        return {os.path.join(out, s[:-2]): s[:-2] + mark for s in self.selected(sources)}

    def prepare(self, sources, cc, san):
        """Builds C test programs. Returns (name, command, environment) of each that can run."""
        targets = self.targets(sources, cc, san)
        if not targets:
            return []
        out = variant_dir(self.args.out, cc, san)
        lost = self.make(list(targets), cc, san)
        env = self.program_env(san)
        env['HITRAIN_BIN'] = os.path.abspath(os.path.join(out, 'bin'))
        env['HITRAIN_BUILD'] = os.path.abspath(out)
        prefix = self.fixed_addresses() if san else []
        return [(n, prefix + [os.path.abspath(t)], env) for t, n in targets.items() if t not in lost]

    def programs(self, *kinds):
        """Builds and runs C test programs of each kind (sources, compiler, sanitizers), some more at a time than there
        are processors."""
        ready = [program for kind in kinds for program in self.prepare(*kind)]
        ready.sort(key=lambda r: -limits.usual(r[0]))
        with concurrent.futures.ThreadPoolExecutor(self.programs_at_once) as pool:
            running = {pool.submit(self.command, argv, env, name): (name, argv, env) for name, argv, env in ready}
            for done in concurrent.futures.as_completed(running):
                name, argv, env = running[done]
                self.count_program(name, *done.result(), lambda argv=argv, env=env, name=name: self.command(argv, env, name))

    def judge_program(self, status, output):
        """(passed, failed, skipped, output) of a C test program."""
        good = bad = 0
        said = CHECK_LINE.findall(output)
        for checks, failures, errors in said:
            bad += int(failures) + int(errors)
            good += int(checks) - int(failures) - int(errors)
        if not said:
            good = 1 if status == 0 else 0
        if bad == 0 and (status != 0 or good == 0):
            bad = 1
            output = terminated(output) + f'exit status {status}, {good} checks passed\n'
        return good, bad, 0, output

    def count_program(self, name, status, output, seconds, again=None):
        depends_on_time = name.startswith('tests/unit/')
        with self.counting:
            for numbers in STATES_LINE.findall(output):
                self.cut = [a + int(b) for a, b in zip(self.cut, numbers)]
            if self.count(name, status, output, seconds, self.judge_program, again if depends_on_time else None):
                self.figures(output)

    def count(self, name, status, output, seconds, judge, again):
        """Counts and prints a result. The caller counts alone. again: runs the same once more, or None. False: it failed, or all
        was printed."""
        good, bad, skipped, output = judge(status, output)
        self.ran += 1
        self.line(bad == 0, seconds, name, f'{good} passed' + (f', {bad} failed' if bad else '') +
                  (f', {skipped} skipped' if skipped else ''))
        if bad and again and self.may_be_flaky(output, seconds):
            print(f'---- output of {name}, which runs again at the end\n{terminated(output)}----', flush=True)
            self.doubtful.append((name, again, judge))
            return False
        self.passed += good
        self.skipped += skipped
        if bad:
            self.fail(name, bad, output)
        elif self.args.verbose:
            print(output, end='', flush=True)
        return not bad and not self.args.verbose

    def may_be_flaky(self, output, seconds):
        return (self.doubtful is not None and len(self.doubtful) < FLAKY_FILES_MAX and not self.ended and
                seconds <= FLAKY_SECONDS_MAX and not NEVER_FLAKY.search(output))

    def with_second_chance(self, run):
        """Runs sections, then each file that failed once by itself. A person who chose tests wants the failure."""
        self.doubtful = None if self.args.test or self.env.get('HITRAIN_FLAKY') == 'fail' else []
        run()
        doubtful, self.doubtful = self.doubtful or [], None
        if doubtful:
            self.heading(f'tests that failed once, {FLAKY_RUNS} times by themselves')
        for name, again, judge in doubtful:
            for number in range(1, FLAKY_RUNS + 1):
                status, output, seconds = again()
                good, bad, skipped, output = judge(status, output)
                self.line(bad == 0, seconds, name, f'run {number}')
                if bad:
                    break
            self.passed += good
            self.skipped += skipped
            if bad:
                self.fail(name, bad, output)
            else:
                self.flaky.append(name)

    def figures(self, output):
        """Prints the measurements of a program, also when all is well."""
        for l in output.splitlines():
            if l.startswith('figures: '):
                print('       ' + l[len('figures: '):], flush=True)

    def pytests(self, sources, env=None, prefix=(), python=PYTHON, modules=()):
        """One pytest process for each file, a fork of one that has imported modules; more at a time than there are processors.
        Each has mounts and folders of its own; ALONE says which come last, by themselves."""
        env = env or self.env
        pytest = warm.Pytest([*prefix, python], ['numpy', *modules], env)
        self.pytest.append(pytest)
        def run(source):
            return self.command(['-q', '-rs', '--tb=short', '-p', 'no:cacheprovider', source], env, source, pytest.start)
        sources = self.selected(sources)
        alone = [s for s in sources if os.path.basename(s) in ALONE]
        with concurrent.futures.ThreadPoolExecutor(self.pytests_at_once) as pool:
            running = {pool.submit(run, s): s for s in sources if s not in alone}
            for done in concurrent.futures.as_completed(running):
                self.count_pytest(running[done], run, *done.result())
        if self.alone is not None:
            self.alone += [(source, run) for source in alone]
            return
        for source in alone:
            self.count_pytest(source, run, *run(source))

    def judge_pytest(self, status, output):
        """(passed, failed, skipped, output) of a file of Python tests."""
        counts = {}
        said = PYTEST_LINE.findall(output)
        for number, word in re.findall(r'(\d+) ([a-z]+)', said[-1] if said else ''):
            counts[word] = counts.get(word, 0) + int(number)
        good = counts.get('passed', 0) + counts.get('xfailed', 0)
        bad = sum(counts.get(w, 0) for w in ('failed', 'error', 'errors', 'xpassed'))
        skipped = counts.get('skipped', 0)
        if bad == 0 and status != 0 and not (status == PYTEST_NONE_RAN and skipped):
            bad = 1
            output = terminated(output) + f'exit status {status}\n'
        return good, bad, skipped, output

    def count_pytest(self, source, run, status, output, seconds):
        with self.counting:
            if self.count(source, status, output, seconds, self.judge_pytest, lambda: run(source)):
                for l in output.splitlines():
                    if l.startswith('SKIPPED'):
                        print('       ' + l, flush=True)

    # -- targets of the Makefile --

    def all_programs(self, tests=()):
        if self.make(PROGRAMS + list(tests), self.args.cc, self.args.san):
            print('  the programs are not all there: expect tests that use them to fail', flush=True)

    def lint(self):
        self.heading('lint')
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            said = list(pool.map(lambda script: self.command([os.path.join('tests/lint', script)], self.env), LINTS))
        for script, (status, output, seconds) in zip(LINTS, said):
            self.line(status == 0, seconds, script, '')
            if status != 0:
                self.fail(f'tests/lint/{script}', 1, output)
            elif self.args.verbose:
                print(output, end='', flush=True)
            else:
                self.figures(output)

    def lint_alone(self):
        self.lint()
        if os.path.isdir(os.path.join(self.args.out, 'lib')):
            self.all_programs()
            self.circles()

    def circles(self):
        """A lint that reads what the build made."""
        status, output, seconds = self.command(['tests/lint/circles.py', self.args.out], self.env)
        self.line(status == 0, seconds, 'circles.py', '')
        if status != 0:
            self.fail('tests/lint/circles.py', 1, output)

    def unit(self, san=None):
        cc, san = self.args.cc, self.args.san if san is None else san
        self.heading('unit tests' + (f', SAN={san}' if san else ''))
        self.programs((unit_sources(), cc, san))

    def states(self):
        self.heading('crash and model tests')
        self.programs((state_sources(), self.args.cc, self.args.san))
        self.power_cuts()

    def power_cuts(self):
        scripts, points, made, distinct = self.cut
        if scripts:
            print(f'  power cuts: {scripts} scripts with {points} flush points, {made} states, {distinct} of them distinct', flush=True)

    def mutants(self):
        """Each mutant must be noticed; their programs are built in a folder of their own."""
        self.heading('mutants')
        out = os.path.join(self.args.out, 'mutants')
        if self.make(['all'] + [f'{out}/{program}' for program in mutants.PROGRAMS], 'gcc', '', ['MUTANTS=1']):
            return
        status, output, seconds = self.command([PYTHON, 'tests/tools/mutants.py', '--build', out], self.env, 'tests/tools/mutants.py')
        counts = re.findall(r'^(\d+) mutants caught, (\d+) not$', output, re.M)
        good, bad = map(int, counts[-1]) if counts else (0, 1)
        with self.counting:
            self.ran += 1
            self.passed += good
            self.line(status == 0, seconds, 'tests/tools/mutants.py', f'{good} mutants caught' + (f', {bad} not' if bad else ''))
            if status != 0:
                self.fail('tests/tools/mutants.py', max(bad, 1), output)
            else:
                self.figures(output)

    def mounted(self):
        self.python_tests('mounted tests', 'tests/mount')
        self.python_tests('tests of vaults', 'tests/vault')

    def torch(self):
        self.python_tests('tests with PyTorch', 'tests/optim', ['torch'])

    def tools(self):
        self.python_tests('tests of the tools that run tests', 'tests/tools')

    def system(self):
        self.python_tests('tests of whole systems', 'tests/system')

    def python_tests(self, title, folder, modules=()):
        sources = self.selected(pathlib.Path(folder).glob('test_*.py'))
        if sources:
            self.heading(title)
            self.all_programs()
            self.pytests(sources, modules=modules)

    def ecosystem(self):
        self.heading('tests with packages of the Python package index')
        sources = self.selected([*pathlib.Path('tests/ecosystem').glob('test_*.py'), *(pathlib.Path('tests/optim') / t for t in TORCH_2)])
        if not sources:
            return
        try:
            python = ecosystem.python()
        except ecosystem.EnvironmentMissing as e:
            self.fail('the environment', 1, str(e))
            return
        self.all_programs()
        # Compiled modules lie beside the packages, and those of the sources nowhere.
        env = {k: v for k, v in self.env.items() if k != 'PYTHONPYCACHEPREFIX'}
        env.update(**ecosystem.variables(ecosystem.place()), PYTHONDONTWRITEBYTECODE='1')
        self.with_second_chance(lambda: self.pytests(sources, env, python=python, modules=['torch']))

    def races(self):
        """Mounted tests with programs that ThreadSanitizer watches; whatever it reports is a failure."""
        self.heading('mounted tests under ThreadSanitizer')
        out = variant_dir(self.args.out, self.args.cc, 'tsan')
        if self.make(['all', 'clients'], self.args.cc, 'tsan'):
            return
        folder = os.path.abspath(os.path.join(self.args.out, 'races'))
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        env = self.program_env('tsan')
        env.update(HITRAIN_BIN=os.path.abspath(os.path.join(out, 'bin')), HITRAIN_BUILD=os.path.abspath(out),
                   TSAN_OPTIONS=f'log_path={folder}/report second_deadlock_stack=1 history_size=4')
        self.pytests([os.path.join('tests/mount', t) for t in RACES], env, self.fixed_addresses())
        for report in sorted(os.listdir(folder)):
            self.fail(report, 1, pathlib.Path(folder, report).read_text(errors='replace')[:20000])

    def locks(self):
        """Holds of locks with many chunks and files, in a build that counts the basic blocks in each."""
        self.heading('holds of locks')
        out = variant_dir(self.args.out, self.args.cc, 'locks')
        targets = {os.path.join(out, s): f'{s} (locks)' for s in HOLDS}
        lost = self.make(list(targets), self.args.cc, '', ['LOCKS=1'])
        env = {**self.program_env(''), 'HITRAIN_TEST_CHUNKS': '30000', 'HITRAIN_TEST_FILES': '30000'}
        for target, name in targets.items():
            if target not in lost:
                self.count_program(name, *self.command([os.path.abspath(target)], env, name))

    def other_compiler(self):
        """It never runs, and clang says as much about code that it does not optimize."""
        build = (['all', 'tests'], 'clang', '', ['EXTRA_CFLAGS=-O0 -g0']) if self.args.cc != 'clang' else (['all', 'tests'], 'gcc', '')
        self.heading(f'build with {build[1]}')
        self.make(*build)

    # -- fuzzing --

    def fuzz_targets(self, san, cc):
        """{name: program} of the selected targets that could be built."""
        sources = self.selected(fuzz_sources())
        out = variant_dir(self.args.out, cc, san)
        targets = {pathlib.Path(s).stem[len('fuzz_'):]: os.path.join(out, s[:-2]) for s in sources}
        lost = self.make(list(targets.values()), cc, san)
        return {n: t for n, t in targets.items() if t not in lost}

    def fuzz(self):
        """As many targets at a time as there are processors; each gets its share of the time."""
        self.heading(f'fuzzing for {self.args.seconds} s')
        targets = self.fuzz_targets(FUZZ_SAN, 'clang')
        rounds = -(-len(targets) // self.jobs) or 1
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            running = {pool.submit(self.fuzz_one, n, t, max(1, self.args.seconds // rounds)): n
                       for n, t in targets.items()}
            for done in concurrent.futures.as_completed(running):
                self.count_fuzz(running[done], *done.result())

    def fuzz_one(self, name, target, seconds):
        found = os.path.join(self.args.out, 'fuzz', name)
        corpus = os.path.join('tests/fuzz/corpus', name)
        os.makedirs(found, exist_ok=True)
        argv = [os.path.abspath(target), f'-max_total_time={seconds}', '-timeout=20', f'-rss_limit_mb={FUZZ_RSS_MIB}',
                '-use_value_profile=1', '-print_final_stats=1', f'-artifact_prefix={found}-', found]
        return self.command(self.fixed_addresses() + argv + ([corpus] if os.path.isdir(corpus) else []),
                            self.program_env(FUZZ_SAN))

    def count_fuzz(self, name, status, output, seconds):
        self.ran += 1
        stats = dict(re.findall(r'^stat::(\w+):\s+(\d+)', output, re.M))
        cover = re.findall(r' cov: (\d+) ', output)
        ok = status == 0
        self.passed += ok
        self.line(ok, seconds, f'fuzz_{name}', f'{stats.get("number_of_executed_units", "?")} inputs, '
                  f'{stats.get("new_units_added", "?")} new, {cover[-1] if cover else "?"} places reached, '
                  f'{stats.get("peak_rss_mb", "?")} MiB')
        if not ok:
            self.fail(f'fuzz_{name}', 1, output[-20000:])

    def fuzz_merge(self):
        """Inputs of build/fuzz that reach more than the corpus does."""
        for name, target in self.fuzz_targets(FUZZ_SAN, 'clang').items():
            corpus, found = os.path.join('tests/fuzz/corpus', name), os.path.join(self.args.out, 'fuzz', name)
            os.makedirs(corpus, exist_ok=True)
            if not os.path.isdir(found):
                continue
            status, output, seconds = self.command(
                self.fixed_addresses() + [os.path.abspath(target), '-merge=1', corpus, found], self.program_env(FUZZ_SAN))
            self.line(status == 0, seconds, f'fuzz_{name}', f'{len(os.listdir(corpus))} inputs in its corpus')
            if status != 0:
                self.fail(f'fuzz_{name}', 1, output[-20000:])

    def bench(self):
        sources = self.selected(pathlib.Path('bench').glob('bench_*.c'))
        out = variant_dir(self.args.out, self.args.cc, self.args.san)
        targets = {os.path.join(out, s[:-2]): s for s in sources}
        lost = self.make(['all'] + list(targets), self.args.cc, self.args.san)
        for target, source in targets.items():
            if target not in lost:
                self.heading(source)
                if subprocess.run([target], env=self.env).returncode != 0:
                    self.fail(source, 1, 'see above')

    def coverage(self):
        """Runs all tests of the project's code, built so that it counts its lines, and lists the lines that no test ran."""
        self.args.san = 'coverage'
        out = variant_dir(self.args.out, self.args.cc, 'coverage')
        self.env.update(HITRAIN_BIN=os.path.abspath(os.path.join(out, 'bin')), HITRAIN_BUILD=os.path.abspath(out))
        for counts in pathlib.Path(out).rglob('*.gcda'):
            counts.unlink()
        self.unit()
        self.states()
        self.mounted()
        self.torch()
        self.heading('coverage')
        print(coverage.report(pathlib.Path(out)), flush=True)

    def check_busy(self):
        """check beside programs that leave it a small part of the processors and of the disk."""
        with tempfile.TemporaryDirectory(dir='/var/tmp') as folder, subprocess.Popen(
                ['stress-ng', '--quiet', '--cpu', '8', '--hdd', '2', '--hdd-bytes', '256m', '--temp-path', folder]) as load:
            try:
                self.check()
                if load.poll() is not None:
                    self.fail('stress-ng', 1, f'the load ended before the tests: exit status {load.returncode}')
            finally:
                load.terminate()

    def computing(self, plain):
        self.heading('unit tests and inputs of fuzz targets, SAN=asan,ubsan; unit tests, crash and model tests without')
        self.programs((plain, self.args.cc, self.args.san), ([*unit_sources(), *fuzz_sources()], self.args.cc, 'asan,ubsan'))
        self.power_cuts()

    def side_by_side(self, on_mounts, computing):
        """Runs two lists of sections at the same time. After those on mounts come the tests that no other on a mount may
        disturb."""
        def run_all(sections):
            for one in sections:
                one()
        self.alone = []
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for done in concurrent.futures.as_completed([pool.submit(run_all, [*on_mounts, self.run_alone]), pool.submit(run_all, computing)]):
                done.result()

    def run_alone(self):
        alone, self.alone = self.alone, None
        if alone:
            self.heading('tests that run alone among those on a mount')
        for source, run in alone:
            self.count_pytest(source, run, *run(source))

    def check(self, long=False):
        everything = not self.args.test
        if everything:
            self.lint()
        self.heading('build')
        # Some mounted tests copy this folder: nothing is built in it beside them.
        plain = [s for s in unit_sources() if long or any(fnmatch.fnmatch(s, pattern) for pattern in OPTIMIZED)]
        plain += state_sources()
        self.all_programs(self.targets(plain, self.args.cc, self.args.san))
        if everything:
            self.circles()
        # Tests on a mount wait half of their time. The others compute.
        self.with_second_chance(lambda: self.side_by_side([self.mounted, self.torch, self.tools], [lambda: self.computing(plain)] + [self.mutants] * everything))
        if long:
            self.unit(san='tsan')
        if long and everything:
            self.other_compiler()
            self.locks()
            self.races()
            self.system()

    def finish(self, begin, sums):
        if self.args.test and self.ran == 0 and not self.failures:
            self.failed += 1
            self.failures.append(f'no test is called {self.args.test}')
        for pytest in self.pytest:
            pytest.end()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f'== {time.monotonic() - begin:.0f} s, and {used.ru_utime:.0f} s of user and {used.ru_stime:.0f} s of system time of processors')
        if self.failures:
            print('failed: ' + ', '.join(self.failures))
        if self.skipped:
            print(f'skipped: {self.skipped}')
        if self.flaky:
            print(f'flaky: {", ".join(self.flaky)}: failed once, passed {FLAKY_RUNS} times alone; the first outputs are above')
        if sums:
            print(f'{self.passed} passed, {self.failed} failed', flush=True)
        return 1 if self.failed else 0


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('what', choices=['check', 'check-long', 'check-busy', 'fuzz', 'fuzz-merge', 'unit', 'states', 'mutants', 'mounted',
                                    'races', 'torch', 'system', 'ecosystem', 'lint', 'bench', 'coverage'])
    p.add_argument('--make', default='make')
    p.add_argument('--out', default='build')
    p.add_argument('--cc', default='gcc')
    p.add_argument('--san', default='')
    p.add_argument('--test', default='')
    p.add_argument('--set', action='append', default=[])
    p.add_argument('--seconds', type=int, default=300)
    p.add_argument('--verbose', action='store_true')
    args = p.parse_args()
    os.chdir(pathlib.Path(__file__).resolve().parents[2])
    runner = Runner(args)
    begin = time.monotonic()
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, runner.end)
    whats = {'check-long': lambda: runner.check(long=True), 'lint': runner.lint_alone}
    whats.get(args.what, getattr(runner, args.what.replace('-', '_'), None))()
    if os.environ.get('HITRAIN_REGENERATE') and args.what == 'check' and not args.test:
        limits.write_usual(runner.seconds)
    return runner.finish(begin, args.what not in ('lint', 'bench', 'fuzz-merge'))


if __name__ == '__main__':
    sys.exit(main())
