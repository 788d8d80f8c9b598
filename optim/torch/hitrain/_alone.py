# SPDX-License-Identifier: Apache-2.0
"""Context managers of an optimizer's calls.

Generators would do, but for Ctrl-C: one that is interrupted while it begins ends whenever Python collects it, and would then act on a later
step.
"""
import contextlib
import threading
import weakref
from typing import Any, Callable, List, Optional


class Alone:
    """One thread at a time is in here: the first one in the optimizer's list. It may be in several of these, one within the other. No lock,
    because Ctrl-C could leave one locked; an interrupted call ends, and its reference in the list with it."""

    def __init__(self, users: 'List[weakref.ref[Alone]]', what: str) -> None:
        self._users, self._what, self._thread = users, what, threading.current_thread()
        self._own = weakref.ref(self)

    def __enter__(self) -> None:
        self._users.append(self._own)
        for entry in list(self._users):
            other = entry()
            if other is self:
                break
            if other is None:
                self._leave(entry)
            elif other._thread is not self._thread:
                self._leave(self._own)
                raise RuntimeError(f'{self._what} in the thread {self._thread.name} while {other._what} runs in {other._thread.name}: one thread at a '
                                   'time uses an optimizer, so let them wait for each other')

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        self._leave(self._own)

    def _leave(self, entry: 'weakref.ref[Alone]') -> None:
        with contextlib.suppress(ValueError):  # another thread may have seen that it is gone
            self._users.remove(entry)


class WholeStep(Alone):
    """An error in here goes to `take_back` first."""

    def __init__(self, users: 'List[weakref.ref[Alone]]', what: str, take_back: Callable[[BaseException], None]) -> None:
        super().__init__(users, what)
        self._take_back = take_back

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        try:
            if error is not None:
                self._take_back(error)
        finally:
            super().__exit__(kind, error, trace)


class Holding:
    """See Optimizer.hold_gradients()."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._before = optimizer, optimizer._holding

    def __enter__(self) -> None:
        self._before, self._optimizer._holding = self._optimizer._holding, True

    def __exit__(self, *exc: Any) -> None:
        self._optimizer._holding = self._before
