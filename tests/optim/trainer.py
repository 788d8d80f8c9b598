# SPDX-License-Identifier: Apache-2.0
"""What the tests of the PyTorch client begin with: torch, the client's folder, and a mounted store. Import it before torch."""
import atexit
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time

import pytest

os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')  # the store's threads want the processors, too
import torch  # noqa: E402

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / 'optim/torch'), str(TOP / 'tests/support')]

from demo_store import mounted  # noqa: E402
from hitrain._daemon import paths_of  # noqa: E402

SECONDS_MAX = 300
LR = 1e-2
# New processes, which have nothing of the test. A server has imported torch, and forks: each would need a second for that.
PROCESSES = multiprocessing.get_context('forkserver')
PROCESSES.set_forkserver_preload(['torch', 'pytest'])
atexit.register(multiprocessing.forkserver._forkserver._stop)  # and waits for it: the runner counts its time


def on_threads(world, what):
    """what(rank) on a thread for each rank; all end in time."""
    threads = [threading.Thread(target=what, args=(r,)) for r in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(SECONDS_MAX)
        assert not t.is_alive()


def on_processes(world, what, *args, dies=()):
    """What what(rank, *args, results) puts for each rank that does not die, each in a process; dies: those that end by SIGKILL."""
    results = PROCESSES.Queue()
    workers = [PROCESSES.Process(target=what, args=(r, *args, results)) for r in range(world)]
    for w in workers:
        w.start()
    found = dict(results.get(timeout=SECONDS_MAX) for r in range(world) if r not in dies)
    for r, w in enumerate(workers):
        w.join(SECONDS_MAX)
        assert w.exitcode == (-signal.SIGKILL if r in dies else 0), found
    return found


def wait_for(condition, what):
    end = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < end, f'{what}: not within {SECONDS_MAX} s'
        time.sleep(0.01)


def wait_unclaimed(root):
    """The kernel closes the files of a process that ended a moment later, and so may the last thread that has an optimizer."""
    wait_for(lambda: b'claimed_by=' not in os.getxattr(root, 'user.hitrain.stats'), 'the end of the claim')


def used_of(place):
    """What this process has of a mount below this place: mappings and open files."""
    return sorted({path for path in paths_of(str(os.getpid())) if path.startswith(f'{place}/')})


def store_of(request, size='256M'):
    """A mounted store until a test ends, or all of a file. The traceback of a test that failed holds its model, whose mappings keep the
    mount busy: then the daemon is killed, so that the reason is told at once."""
    name = request.module.__name__.removeprefix('test_').replace('_', '-')  # test_torch_client: torch-client
    failed = request.session.testsfailed
    with mounted(name, size=size) as s:
        yield s
        if request.session.testsfailed > failed and s.daemon is not None:
            s.kill()


@pytest.fixture
def store(request):
    yield from store_of(request)


@pytest.fixture
def root(store):
    return store.mountpoint / 'model'


@pytest.fixture(scope='module')
def shared_store(request):
    """One mount for all tests of a file, which need none of their own."""
    yield from store_of(request)


@pytest.fixture
def shared_root(shared_store):
    """The place for a model, in a folder of this test."""
    return pathlib.Path(tempfile.mkdtemp(dir=shared_store.mountpoint)) / 'model'


def random_parameters(shapes, seed=0, dtype=torch.float32):
    """The same values for the same seed, in the order of shapes."""
    random = torch.Generator().manual_seed(seed)
    return {n: torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for n, shape in shapes.items()}


def copies(params):
    return {name: p.detach().clone() for name, p in params.items()}


def number(path, word):
    """An attribute of hitrain that is a number."""
    return int(os.getxattr(path, f'user.hitrain.{word}'))


def give_gradients(params, step):
    """The same ones for the same step."""
    random = torch.Generator().manual_seed(1000 + step)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=random).to(p.dtype)


def take_steps(optimizer, params, first, last):
    for step in range(first, last):
        give_gradients(params, step)
        optimizer.step()


def assert_equal(left, right):
    for name in left:
        assert torch.equal(left[name], right[name]), name


def equal(left, right):
    return all(torch.equal(left[n], right[n]) for n in left)


def close(left, right):
    return all((left[n] - right[n]).abs().max() <= 1e-3 * LR for n in left)
