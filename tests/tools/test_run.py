# SPDX-License-Identifier: Apache-2.0
"""The second chance of a file that failed once. The results here are texts as pytest and Check write them."""
import argparse
import os
import signal
import sys
import textwrap

import pytest

import limits
import warm
from run import FLAKY_FILES_MAX, FLAKY_RUNS, Runner

GOOD = 0, '.. [100%]\n2 passed in 0.10s\n', 0.1
BAD = 1, 'F. [100%]\n1 failed, 1 passed in 0.10s\n', 0.1
CHECK_BAD = 1, '50%: Checks: 2, Failures: 1, Errors: 0\n', 0.1


@pytest.fixture
def runner(tmp_path, monkeypatch):
    monkeypatch.delenv('HITRAIN_FLAKY', raising=False)
    monkeypatch.delenv('HITRAIN_LONG', raising=False)
    return Runner(argparse.Namespace(out=str(tmp_path), test='', verbose=False))


def chance(runner, first, *later, name='test_a.py'):
    """Counts a file whose first run ends with first, and returns how many runs came later."""
    left = list(later)
    runner.with_second_chance(lambda: runner.count_pytest(name, lambda _: left.pop(0), *first))
    return len(later) - len(left)


def results(runner):
    return runner.passed, runner.failed, runner.flaky


def test_a_file_that_passes_each_time_alone_is_flaky(runner, capsys):
    assert chance(runner, BAD, GOOD, GOOD, GOOD) == FLAKY_RUNS and results(runner) == (2, 0, ['test_a.py'])
    assert '1 failed, 1 passed' in capsys.readouterr().out, 'the first output is not in the log'
    assert runner.finish(0, True) == 0 and 'flaky: test_a.py' in capsys.readouterr().out


@pytest.mark.parametrize('later', [[BAD], [GOOD, BAD], [GOOD, GOOD, BAD]])
def test_one_more_failure_is_a_failure(runner, later):
    assert chance(runner, BAD, *later) == len(later) and results(runner) == (1, 1, []) and runner.finish(0, True) == 1


def test_a_file_that_passes_runs_once(runner):
    assert chance(runner, GOOD) == 0 and results(runner) == (2, 0, [])


@pytest.mark.parametrize('report', ['ERROR: AddressSanitizer: heap-use-after-free', 'a.c:1:2: runtime error: shift',
                                    "hitrain: a.c:1: f: Assertion `x' failed.", '*** stack smashing detected ***',
                                    'test_a.c:3:E:a:f:0: (after this point) Received signal 11 (Segmentation fault)', 'E   assert -11 == 0', '/dev/loop0: 12 problems left', 'mkfs.hitrain: exit -11',
                                    'E   assert (1 == 2 or -11 == 0)', "died with <Signals.SIGSEGV: 11>", 'the daemon ended with status -6',
                                    'a.c:1:E:a:f:0: (after this point) Test timeout expired', 'stopped: still running after 1800 s'])
def test_reports_of_programs_have_no_second_chance(runner, report):
    assert chance(runner, (1, report + '\n' + BAD[1], 0.1)) == 0 and results(runner) == (1, 1, [])


def test_unit_tests_have_one_and_crash_tests_have_none(runner):
    again = [(0, '100%: Checks: 2, Failures: 0, Errors: 0\n', 0.1)] * FLAKY_RUNS
    runner.with_second_chance(lambda: (runner.count_program('tests/unit/a', *CHECK_BAD, again.pop),
                                       runner.count_program('tests/crash/a', *CHECK_BAD, again.pop)))
    assert not again and results(runner) == (3, 1, ['tests/unit/a']) and runner.failures == ['tests/crash/a']


def test_many_failures_are_no_matter_of_load(runner):
    runner.with_second_chance(lambda: [runner.count_pytest(f'test_{i}.py', lambda _: GOOD, *BAD) for i in range(FLAKY_FILES_MAX + 1)])
    assert len(runner.flaky) == FLAKY_FILES_MAX and runner.failures == [f'test_{FLAKY_FILES_MAX}.py']


def test_a_file_that_runs_long_has_none(runner):
    assert chance(runner, (*BAD[:2], 301)) == 0 and runner.failed == 1


def test_none_where_the_caller_wants_none(runner):
    runner.args.test = 'test_a*'
    assert chance(runner, BAD) == 0 and runner.failed == 1
    runner.args.test, runner.env['HITRAIN_FLAKY'] = '', 'fail'
    assert chance(runner, BAD) == 0 and runner.failed == 2


HANGING = textwrap.dedent("""
    import os, sys, threading, time
    def stands_still():
        time.sleep(3600)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # as Check does
    open(sys.argv[1] + ('child' if child == 0 else 'parent'), 'w').write(str(os.getpid()))
    threading.Thread(target=stands_still, name='waiting').start()
""")


def test_a_program_that_hangs_shows_its_stacks_and_ends_with_its_children(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, 'SPARE_SECONDS', -limits.TIMES * limits.USUAL_SECONDS_MIN + 3)
    status, output, seconds = runner.command([sys.executable, '-X', 'faulthandler', '-c', HANGING, f'{tmp_path}/'], dict(os.environ), 'tests/unit/hanging')
    assert status == 124 and 'stopped: still running after 3 s' in output
    assert output.count('---- process') == 2 and 'in stands_still' in output, output
    pids = [int((tmp_path / process).read_text()) for process in ('parent', 'child')]
    assert all(f'---- process {pid}:' in output for pid in pids)
    assert limits.session(pids[0]) == []


def test_output_of_a_program_that_left_a_child_is_there_at_its_end(runner):
    """A daemon that a test started holds its output."""
    status, output, seconds = runner.command(['sh', '-c', 'setsid sleep 60 & echo done'], dict(os.environ), 'tests/unit/leaving')
    assert (status, output) == (0, 'done\n') and seconds < 50


FORKED = textwrap.dedent("""
    import atexit, os, sys, time

    def test_it():
        assert os.getsid(0) == os.getpid() and 'fractions' in sys.modules
        assert not os.read(0, 1) and sys.path[0] != os.environ['TOOLS'] and 'once' not in vars(sys)
        sys.once = True
        atexit.register(print, 'the end')
        if os.environ['HOW'] == 'dies':
            os.abort()
        while os.environ['HOW'] == 'hangs':
            time.sleep(1)
""")


def test_pytest_runs_in_forks_that_know_nothing_of_each_other(runner, tmp_path, monkeypatch):
    (tmp_path / 'test_it.py').write_text(FORKED)
    pytests = warm.Pytest([sys.executable], ['fractions', 'no_such_module'], dict(os.environ))

    def run(how):
        return runner.command(['-q', '-s', '-p', 'no:cacheprovider', str(tmp_path / 'test_it.py')], {**os.environ, 'HOW': how, 'TOOLS': os.path.dirname(warm.__file__)}, 'tests/it', pytests.start)
    try:
        for _ in range(2):
            status, output, _ = run('passes')
            assert status == 0 and '1 passed' in output and output.endswith('the end\n')
        assert run('dies')[0] == -signal.SIGABRT
        monkeypatch.setattr(limits, 'SPARE_SECONDS', -limits.TIMES * limits.USUAL_SECONDS_MIN + 10)
        status, output, _ = run('hangs')
        assert status == 124 and '---- process' in output and 'stopped: still running' in output
    finally:
        pytests.end()
    assert pytests.process.returncode == 0
    status, output, _ = run('passes')
    assert status == 1 and 'did not start' in output


def test_the_limit_follows_the_usual_time(monkeypatch):
    monkeypatch.delenv('HITRAIN_LONG', raising=False)
    monkeypatch.setattr(limits, 'USUAL', {'tests/unit/a': 50.0})
    assert limits.seconds('tests/unit/a') - limits.seconds('tests/unit/b') == limits.TIMES * (50 - limits.USUAL_SECONDS_MIN)
    assert limits.usual('tests/unit/a.c') == 50 and limits.seconds('make') == limits.LONG_SECONDS
