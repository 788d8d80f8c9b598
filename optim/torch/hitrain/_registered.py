# SPDX-License-Identifier: Apache-2.0
"""Mappings of the store's memory that a GPU reads and writes itself, because its driver has locked their pages.

A registration is made once, and ends before its mapping does. It holds pages, not places of a file: the store keeps the pages of a file that it has
passed to the kernel, whatever happens to their content (tests/mount/test_passthrough_pinned.py). Pages of other files are not registered.

A driver refuses very large calls, so that a call has at most PIECE bytes, and no copy may cross the boundary between two. If one is refused, all end, and
bytes go through slots.
"""
import contextlib
import os
import resource
import warnings
from typing import Any, Callable, Dict, Iterator, Tuple

PIECE = 1 << 30


class Registrations:
    """runtime  gives CUDA's functions
    settle   returns when no copy runs"""

    def __init__(self, runtime: Callable[[], Any], settle: Callable[[], None]) -> None:
        self._runtime, self._settle = runtime, settle
        self._sizes: Dict[int, int] = {}  # of mappings, by their addresses
        self._pid, self._is_refused = os.getpid(), False

    def __contains__(self, address: Any) -> bool:
        return address in self._sizes

    def add(self, address: int, size: int) -> bool:
        if address in self._sizes or self._is_refused:
            return address in self._sizes
        done = 0
        for at, piece in pieces(size):
            error = int(self._runtime().cudaHostRegister(address + at, piece, 0))
            if error:
                self._end(address, done)
                self._refuse(size, error)
                return False
            done += piece
        self._sizes[address] = size
        return True

    def remove(self, address: Any) -> None:
        """Before the mapping ends."""
        size = self._sizes.pop(address, 0)
        if size and os.getpid() == self._pid:
            with contextlib.suppress(RuntimeError):  # of a device that is broken, and copies no more
                self._settle()
            self._end(address, size)

    def _end(self, address: int, size: int) -> None:
        for at, _ in pieces(size):
            self._runtime().cudaHostUnregister(address + at)

    def _refuse(self, size: int, error: int) -> None:
        """Each registration takes memory that can be locked, so one that is refused concerns all that come."""
        self._is_refused = True
        have = sum(self._sizes.values())
        for address in list(self._sizes):
            self.remove(address)
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit_word = 'unlimited' if limit == resource.RLIM_INFINITY else f'{limit} bytes'
        warnings.warn(f'the driver has refused to lock {size} bytes beside {have} of the parameters (CUDA error {error}; RLIMIT_MEMLOCK is {limit_word}): '
                      'values and gradients are copied through pinned memory', RuntimeWarning, stacklevel=2)


def pieces(size: int) -> Iterator[Tuple[int, int]]:
    """Their places and sizes."""
    return ((at, min(PIECE, size - at)) for at in range(0, size, PIECE))
