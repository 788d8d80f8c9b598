# SPDX-License-Identifier: Apache-2.0
"""The time line of a step, in a form that Perfetto and chrome://tracing open.

    lanes   the threads of this process that load, compute and send; the computing and the copies of a GPU; updates, as the store saw them begin
    colours load, compute, gradient, update, publication

While nothing is traced there is nothing of this in an optimizer. A trace puts its own methods in front of some of the optimizer's, as attributes of
the object, and takes them away after the last step.

A GPU says when it passed an event, and the time between two events. The first event of a trace is waited for, so its time is known. The store's own
times begin elsewhere, too: a step ends there after this process asked for it, and a moment later.
"""
import contextlib
import json
import os
import threading
import time
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, List, Tuple

from hitrain._gate import when_backward_ends
from hitrain._words import HIDDEN

_UPDATES = 'store: updates begin'
_FORWARD, _BACKWARD = 'forward', 'backward'
_BOUNDARIES = ('step', 'commit')


class Trace:
    """optimizer: its own reference must not keep it alive."""

    def __init__(self, optimizer: Any, path: str, steps: int) -> None:
        self._file = open(path, 'w', encoding='utf-8')
        self._optimizer, self._left = weakref.ref(optimizer), steps
        self._root, self._pid = optimizer.root, os.getpid()
        self._spans: List[Tuple[str, str, str, Any, Any, Dict[str, Any]]] = []  # lane, category, name, begin, end, more
        self._ends: List[Tuple[float, float]] = []  # of steps: asked for, and answered
        self._running: Dict[Any, Any] = {}  # when the forward of a unit began; for each thread the unit whose backward runs, and since when
        self._tapped: List[Tuple[Any, str, Any]] = []
        self._copies: Any = getattr(optimizer, '_copies', None)
        self._device_begin: Any = self._copies.mark('compute') if self._copies else None
        if self._device_begin is not None:
            self._device_begin.synchronize()
        self._begin = self._free = time.monotonic()  # since when the program computes
        self._tap_all(optimizer)

    # -- recording --

    def _tap_all(self, optimizer: Any) -> None:
        self._tap(optimizer, '_send_one', self._around('gradient', lambda f, *rest: (f.name, f.tensor.numel() * f.tensor.element_size())))
        self._tap(optimizer, '_receive_whole', self._around('load', _sized))
        self._tap(optimizer, '_receive_run', self._around('load', _sized))
        self._tap(optimizer._gather, 'write', self._around('gradient', _sized))
        self._tap(optimizer, '_end_step', self._end_step)
        self._tap(optimizer, '_receive', self._receive)
        residency = getattr(optimizer, '_residency', None)
        if residency is None:
            self._tap(optimizer, '_offer', self._offer)
            return
        self._tap(residency, '_load', self._around('load', _sized))
        self._tap(residency, 'leave', self._leave)
        self._tap(optimizer, '_before_forward', self._forward)
        self._tap(optimizer, '_before_backward', self._backward)
        if self._device_begin is not None:
            self._tap(self._copies, 'load', self._around_copy('load', 'to'))
            self._tap(self._copies, 'write', self._around_copy('gradient', 'back'))
            self._tap(self._copies, '_begin', self._around_copy('gradient', 'back'))

    def _tap(self, thing: Any, name: str, call: Callable[..., Any]) -> None:
        """call(real, ...) in the place of a method, which has no reference to its object here: the object has this one."""
        before, mine, cls = thing.__dict__.get(name), weakref.ref(thing), type(thing)

        def tapped(*args: Any, **more: Any) -> Any:
            real = before if before is not None else getattr(cls, name).__get__(mine())
            return call(real, *args, **more) if self._tapped else real(*args, **more)  # a copy of the object may have it for longer
        thing.__dict__[name] = tapped
        self._tapped.append((weakref.ref(thing), name, before))

    @contextlib.contextmanager
    def _span(self, category: str, name: str, **more: Any) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self._spans.append((threading.current_thread().name, category, name, begin, time.monotonic(), more))

    def _around(self, category: str, about: Callable[..., Tuple[str, int]]) -> Callable[..., Any]:
        def call(real: Callable[..., Any], *args: Any, **more: Any) -> Any:
            name, size = about(*args)
            with self._span(category, name, bytes=size):
                return real(*args, **more)
        return call

    def _around_copy(self, category: str, where: str) -> Callable[..., Any]:
        """The work of a stream of the device."""
        def call(real: Callable[..., Any], tensor: Any, *args: Any) -> Any:
            begin = self._copies.mark(where)
            try:
                return real(tensor, *args)
            finally:
                self._spans.append((f'device: copies {where}', category, 'copy', begin, self._copies.mark(where),
                                    {'bytes': tensor.numel() * tensor.element_size()}))
        return call

    # -- computing: on a stream of the device, or by this thread --

    def _now(self) -> Any:
        return time.monotonic() if self._device_begin is None else self._copies.mark('compute')

    def _computed(self, unit: Any, begin: Any, direction: str) -> None:
        lane = threading.current_thread().name if self._device_begin is None else 'device: compute'
        self._spans.append((lane, 'compute', f'{direction} of {unit.name or "the model"}', begin, self._now(), {}))

    def _forward(self, real: Callable[..., Any], unit: Any) -> None:
        real(unit)
        self._running[threading.get_ident(), unit] = self._now()

    def _leave(self, real: Callable[..., Any], unit: Any) -> None:
        begin = self._running.pop((threading.get_ident(), unit), None)
        if begin is not None:
            self._computed(unit, begin, _FORWARD)
        real(unit)

    def _backward(self, real: Callable[..., Any], unit: Any) -> None:
        thread = threading.get_ident()
        running = self._running.get(thread)
        if running is None:
            when_backward_ends(lambda: self._backward_ended(thread))
        if running is None or running[0] is not unit:
            self._backward_ended(thread)
            real(unit)
            self._running[thread] = unit, self._now()
        else:
            real(unit)

    def _backward_ended(self, thread: int) -> None:
        running = self._running.pop(thread, None)
        if running is not None:
            self._computed(running[0], running[1], _BACKWARD)

    def _offer(self, real: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """The modules of a model that is not offloaded are not known."""
        self._spans.append((threading.current_thread().name, 'compute', 'the program', self._free, time.monotonic(), {}))
        try:
            return real(*args, **more)
        finally:
            self._free = time.monotonic()

    # -- the end of a step --

    def _end_step(self, real: Callable[[], None]) -> None:
        """Updates that still run are waited for before, so that publication is a time of its own. Updates that wait for the end of the step, as
        with max_grad_norm, belong to that."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._ranks.leads and optimizer._open and not optimizer._async:
            with self._span('update', 'waits for updates'):
                optimizer._root.command('wait')
        begin = time.monotonic()
        with self._span('publication', f'step {optimizer._step + 1 if optimizer else ""}'):
            real()
        self._ends.append((begin, time.monotonic()))

    def _receive(self, real: Callable[[Any], None], files: Any) -> None:
        real(files)
        self._free = time.monotonic()
        self._left -= 1
        if not self._left:
            self.end()

    # -- the file --

    def end(self) -> None:
        """Training goes on without a file that cannot be written. A forked child leaves it to its parent."""
        if not self._tapped or os.getpid() != self._pid:
            return
        for thing, name, before in self._tapped:
            of = thing()
            if of is not None and before is None:
                of.__dict__.pop(name, None)
            elif of is not None:
                of.__dict__[name] = before
        optimizer, self._tapped = self._optimizer(), []
        if optimizer is not None:
            optimizer._trace = None
        try:
            with self._file as file:
                json.dump(self._document(), file)
        except (OSError, RuntimeError) as e:  # of the file, or of a device that is broken
            warnings.warn(f'the trace in {self._file.name} is not whole: {e}', RuntimeWarning, stacklevel=4)

    def _document(self) -> Dict[str, Any]:
        events: List[Dict[str, Any]] = []
        lanes: Dict[str, int] = {}

        def lane(name: str) -> int:
            if name not in lanes:
                lanes[name] = len(lanes) + 1
                events.append({'ph': 'M', 'name': 'thread_name', 'pid': os.getpid(), 'tid': lanes[name], 'args': {'name': name}})
            return lanes[name]
        for where, category, name, begin, end, more in self._spans:
            at = self._at(begin)
            events.append({'ph': 'X', 'name': name, 'cat': category, 'ts': at, 'dur': max(0.0, self._at(end) - at), 'pid': os.getpid(),
                           'tid': lane(where), 'args': more})
        updates, said = self._updates()
        for at, name, more in updates:
            events.append({'ph': 'i', 's': 't', 'name': name, 'cat': 'update', 'ts': at, 'pid': os.getpid(), 'tid': lane(_UPDATES), 'args': more})
        return {'traceEvents': events, 'displayTimeUnit': 'ms', 'otherData': {'model': self._root, 'updates of the store': said}}

    def _at(self, when: Any) -> float:
        """In microseconds since the beginning of the trace."""
        if isinstance(when, float):
            return (when - self._begin) * 1e6
        when.synchronize()
        return float(self._device_begin.elapsed_time(when)) * 1e3

    # -- the store's own trace --

    def _updates(self) -> Tuple[List[Tuple[float, str, Dict[str, Any]]], str]:
        """Ranges of parameters whose updates began in the time of the trace; and why there are none."""
        top = _mountpoint(self._root)
        try:
            with open(os.path.join(top, HIDDEN, 'trace'), encoding='utf-8', errors='replace') as file:
                entries = [json.loads(line) for line in file]
            number = os.stat(self._root).st_ino
        except OSError as e:
            return [], f'not known: {e}'
        at = [i for i, e in enumerate(entries) if e['op'] in _BOUNDARIES and e['id'] == number]
        count = len(self._ends)
        ends = [entries[i]['time_ns'] / 1e9 for i in at[-count:]] if count else []
        shift = max((asked - there for (asked, _), there in zip(self._ends, ends)), default=None)
        if shift is None or len(ends) < len(self._ends) or any(there + shift > answered for (_, answered), there in zip(self._ends, ends)):
            return [], 'not known: the store has forgotten when these steps ended'
        inside = os.path.join(os.path.relpath(self._root, top), '')
        begin, found = self._begin, []
        if len(at) > count:
            # Entries are in the order of their ends, so those of an earlier step come before its boundary. The store may have been
            # slow to begin what it was asked for: then its clock is later than it seems.
            entries = entries[at[-count - 1] + 1:]
            begin -= min(answered - there - shift for (_, answered), there in zip(self._ends, ends))
        for entry in entries:
            when, path = entry['time_ns'] / 1e9 + shift, entry.get('path', '')
            if entry['op'] == 'update' and begin <= when <= self._ends[-1][1] and path.startswith(inside):
                more = {'bytes': entry.get('bytes', 0), 'offset': entry.get('offset', 0), 'waited_us': entry.get('waited_ns', 0) // 1000}
                found.append((max(0.0, self._at(when)), path[len(inside):], more))
        return found, 'each mark is the beginning of one; waited_us: for devices, memory and locks'


def _sized(what: Any) -> Tuple[str, int]:
    """A file, or a run of small ones."""
    files = getattr(what, 'files', None)
    if files is None:
        return what.name, _bytes_of(what)
    return str(what), sum(_bytes_of(f) for f in files)


def _bytes_of(f: Any) -> int:
    return int(f.tensor.numel() * f.tensor.element_size())


def _mountpoint(path: str) -> str:
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def begin(optimizer: Any, path: 'os.PathLike[str] | str', steps: int) -> Trace:
    if steps < 1:
        raise ValueError(f'steps must be at least 1, not {steps}')
    if optimizer._trace is not None:
        raise RuntimeError('a trace runs already: it ends with its last step')
    return Trace(optimizer, os.fspath(path), steps)
