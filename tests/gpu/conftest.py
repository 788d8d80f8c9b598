# SPDX-License-Identifier: Apache-2.0
"""A store for each test on a GPU. Device time is short, so a test that fails or stands still says why within a minute and leaves no mount."""
import faulthandler
import os
import pathlib
import sys
import threading
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'optim'))
from trainer import store_of  # noqa: E402  # first: it makes the client importable
from hitrain._daemon import detach  # noqa: E402

SECONDS_MAX = 45  # a test takes some seconds
END = time.monotonic() + 230  # of all


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    outcome = yield
    report = outcome.get_result()
    if report.failed and 'stderr' in item.funcargs:  # a later test may end the process before pytest prints its summary
        print(f'\n{item.nodeid}, {report.when}:\n{report.longreprtext}', file=item.funcargs['stderr'], flush=True)


@pytest.fixture(scope='session')
def stderr(request):
    """The real one, since what pytest captured is lost when the process ends at once."""
    with request.config.pluginmanager.getplugin('capturemanager').global_and_fixture_disabled():
        return os.fdopen(os.dup(2), 'w')


@pytest.fixture
def store(request, stderr):
    """Three models with their saved tensors take more than 256 MiB."""
    stores = []

    def late():
        faulthandler.dump_traceback(stderr)
        for s in stores:
            if s.daemon is not None:
                s.daemon.kill()
            detach(s.mountpoint)
        os._exit(1)
    seconds = min(SECONDS_MAX, max(1.0, END - time.monotonic()))
    limit = threading.Timer(seconds, late)
    limit.daemon = True
    limit.start()
    faulthandler.dump_traceback_later(seconds + 5, exit=True, file=stderr)  # when no thread of Python runs any more
    try:
        for s in store_of(request, '1G'):
            stores.append(s)
            yield s
    finally:
        limit.cancel()
        faulthandler.cancel_dump_traceback_later()
