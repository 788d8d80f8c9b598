# SPDX-License-Identifier: Apache-2.0
"""Trainers in children of the test, which end at the n-th request to the store: theirs, or that of the daemon.

A request is a call of the client that could reach the mount. A child is a fork, so that it need not import torch.
"""
import fcntl
import gc
import hashlib
import os
import shutil
import signal
import sys
import threading
import traceback

from trainer import wait_unclaimed  # first: it makes the client importable
import torch

OK, KILLED, FAILED = 0, -signal.SIGKILL, 3
CALLS = [(os, name) for name in ('mkdir', 'rename', 'listdir', 'stat', 'getxattr', 'setxattr', 'removexattr', 'open', 'close', 'read', 'write', 'pwrite',
                                 'pwritev', 'preadv', 'fsync', 'rmdir', 'ftruncate', 'truncate', 'mknod', 'unlink', 'fstat', 'dup')] + [(fcntl, 'ioctl')]


class Requests:
    """Counts the requests of this process from start() on; kill() runs instead of the n-th. 0: of none."""

    def __init__(self, n, kill):
        self._left, self._kill, self._counts = n, kill, False
        self._lock = threading.Lock()
        for module, name in CALLS if n else ():
            self._watch(module, name)

    def start(self):
        self._counts = True

    def stop(self):
        self._counts = False

    def _watch(self, module, name):
        call = getattr(module, name)

        def watched(*args, **kwargs):
            with self._lock:
                self._left -= self._counts
                last = self._counts and self._left == 0
            if last:
                self._kill()
            return call(*args, **kwargs)
        setattr(module, name, watched)


def in_child(what, n=0, daemon=None):
    """what(requests) in a child. Its n-th request kills it, or the daemon with this number. Returns OK, KILLED or FAILED; a child that raises
    while no daemon was to be killed fails the test."""
    def kill():
        os.kill(daemon or os.getpid(), signal.SIGKILL)
    pid = os.fork()
    if pid == 0:
        try:
            what(Requests(n, kill))
            os._exit(OK)
        except OSError:
            if not daemon:
                traceback.print_exc(file=sys.__stderr__)
            os._exit(FAILED)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (OK, KILLED) or (daemon and status == FAILED), f'the child ended with {status}; see stderr'
    return status


def same_after_kills(store, root_of, script, note, daemon=False):
    """script(root, requests, again) trains; its bits are those of a run that nobody kills, whichever request kills it, after it was started
    again. Returns how many requests there are. note: a file. Runs without a kill are in this process, so that a child has its imports."""
    wanted = script(root_of(0), Requests(0, None), False)
    assert wanted
    gc.freeze()  # a collection in a child would copy the pages of all objects
    for n in range(1, 1000):
        root = root_of(n)
        note.write_text('')
        status = in_child(lambda requests: note.write_text(script(root, requests, False)), n, store.daemon.pid if daemon else None)
        if daemon and (store.daemon.poll() is not None or status == FAILED):
            store.kill()
            store.mount()
        elif status == OK:
            assert note.read_text() == wanted
            _remove(store, root)
            gc.unfreeze()
            return n - 1
        elif os.path.isdir(root) and b'optimizer' in _attributes(root):
            wait_unclaimed(root)
        assert script(root, Requests(0, None), True) == wanted, f'killed at request {n}'
        _remove(store, root)
    raise AssertionError('the requests have no end')


def _remove(store, root):
    if os.listdir(os.path.join(root, '.hitrain/snap')):
        store.control('forget', root, '--all')
    shutil.rmtree(root)


def _attributes(root):
    try:
        return b'optimizer' + os.getxattr(root, 'user.hitrain.optimizer')
    except OSError:
        return b''


def digest(root, optimizer, params):
    """Of parameters, state and all words."""
    sums = hashlib.sha256()
    for group in optimizer.param_groups:
        for p in group['params']:
            sums.update(p.detach().numpy().tobytes())
            for word in optimizer.state_words(group):
                sums.update(optimizer.read_state(p, word).numpy().tobytes())
    words = [os.getxattr(root, 'user.hitrain.optimizer').decode()]
    for name in sorted(os.listdir(root)):
        for word in ('optimizer', 'grad_dtype'):
            try:
                words.append(f'{name} {word} ' + os.getxattr(os.path.join(root, name), f'user.hitrain.{word}').decode())
            except OSError:
                pass
    return '\n'.join([sums.hexdigest(), *words])


def parameters():
    random = torch.Generator().manual_seed(3)
    return {n: torch.nn.Parameter(torch.randn(size, generator=random)) for n, size in (('a', 5), ('b', 3), ('c', 70000))}
