# SPDX-License-Identifier: Apache-2.0
"""Which parameters are in memory: loaded before modules need them, and released for others, within a number of bytes.

A unit is a module whose parameters are loaded and released together. The forward of its module and the backward through
its outputs use it. One step's uses are the order that is expected of the next one. So

- a thread loads what comes next, as far ahead as measured times ask for (_depth.py) and room allows;
- units that the order needs last are released first, and never one that it needs before the unit that gets the place;
- nothing is loaded ahead across the end of the step, which changes all values.

Without room for what runs now its units are loaded all the same, and the bound holds again when they end. Loading is
for speed and for errors at a good place only: parameters that are not loaded have their values, too.

One lock guards all fields. No thread loads or releases pages while it holds it: units in transit belong to one thread.
"""
import bisect
import collections
import math
import os
import queue
import threading
import time
import warnings
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence

from torch import nn

from hitrain._depth import places_ahead
from hitrain._mapped import MappedFile

ABSENT, TRANSIT, PRESENT = range(3)
_NEVER = 1 << 60
_CLOSE_SECONDS_MAX = 60


class Unit:
    def __init__(self, name: str, module: nn.Module, files: Sequence[MappedFile]) -> None:
        self.name, self.module, self.files = name, module, list(files)
        self.stays = False  # until its values change
        self.state = ABSENT
        self.calls = 0  # forwards of this pass
        self.loads: Deque[float] = collections.deque(maxlen=2)  # seconds of the last ones

    @property
    def bytes(self) -> int:
        return sum(f.bytes for f in self.files)

    @property
    def load_seconds(self) -> float:
        return max(self.loads, default=math.inf)


class Residency:
    """load       loads one file; it may wait for the file's update
    is_final      has the file's gradient of this step been sent? Then the next value may be there already

    Counts: loaded_bytes and waited_seconds since the beginning, held_bytes now and held_bytes_max."""

    def __init__(self, keep: int, units: Sequence[Unit], load: Callable[[MappedFile], None],
                 is_final: Callable[[MappedFile], bool]) -> None:
        self.keep, self.units = keep, list(units)
        self._load, self._is_final = load, is_final
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._holders: Dict[MappedFile, int] = collections.defaultdict(int)  # units that are present or in transit
        self.held_bytes = self.held_bytes_max = self.loaded_bytes = 0
        self._promised_bytes = 0  # of held_bytes: nothing is loaded there before others have left
        self.waited_seconds = 0.0
        self._running: List[Unit] = []  # whose forward runs
        self._recomputed: List[Unit] = []  # of these: in backward, by a checkpoint that may not go on to the end
        self._recent: Deque[Unit] = collections.deque(maxlen=2)  # whose backward runs
        self._backward = False
        self._uses: List[Unit] = []  # of this step
        self._computes: List[float] = []  # seconds from each of these to the next one
        self._ready = 0.0  # when the parameters of the last use were there
        self.is_closed = self._reading = False
        self._again: Deque[Unit] = collections.deque()  # present, and to be loaded once more
        self._ahead_of = ''  # what the thread loads
        self._work: 'queue.SimpleQueue[Optional[Callable[[], None]]]' = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._work,), name='hitrain-load', daemon=True)
        self._expect([*self.units, *reversed(self.units)], [0.0] * 2 * len(self.units))

    # -- uses --

    def enter(self, unit: Unit, recomputed: bool, counts: bool = True) -> None:
        """The forward of a unit begins. recomputed: within backward. counts: it is a call of its own, and not that of another
        micro-batch."""
        if os.getpid() != self._pid:
            return  # in a forked child no thread loads, and the kernel reads pages when they are touched
        with self._changed:
            if not recomputed:
                if self._backward:
                    self._backward = False
                    for u in self.units:
                        u.calls = 0
                if unit.module.training and counts:
                    unit.calls += 1
            self._running.append(unit)
            if recomputed:
                self._recomputed.append(unit)
        self._use(unit)

    def leave(self, unit: Unit) -> None:
        if os.getpid() != self._pid:
            return
        with self._changed:
            if unit in self._running:
                del self._running[self._running.index(unit):]

    def need(self, unit: Unit) -> None:
        """Backward through a unit's outputs begins."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._backward = True
            self._running = [u for u in self._running if u not in self._recomputed]
            self._recomputed = []
            if unit in self._recent:
                self._recent.remove(unit)
            self._recent.append(unit)
        self._use(unit)

    def load_staying(self) -> List[Unit]:
        staying = [u for u in self.units if u.stays]
        for unit in staying:
            self._use(unit)
        return staying

    def load_again(self) -> None:
        """A device begins to compute. Units that were read ahead before are not there yet: the thread loads them, too, in their order."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._again = collections.deque(u for u in dict.fromkeys(self._order) if u.state == PRESENT and not u.stays)
        if self._again:
            self._read_ahead()

    def step_ended(self, changed: Callable[[MappedFile], bool]) -> None:
        """Files that have changed are loaded anew when they are used next. A new order is expected."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            uses, self._uses = self._uses, []
            computes, self._computes = self._computes, []
            self._running, self._recomputed, self._backward = [], [], False
            self._recent.clear()
            for u in self.units:
                u.calls = 0
            if uses:
                self._expect(uses, computes)
            self._at = -1
        for unit in self.units:
            if any(changed(f) for f in unit.files):
                self._drop(unit)
        self._read_ahead()

    def close(self) -> None:
        """The loading thread may be the caller: it can hold the last reference of the optimizer for a moment. It may be in a call of a device
        or a store that does not return."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self.is_closed = True
        self._work.put(None)
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        self._thread.join(_CLOSE_SECONDS_MAX)
        if self._thread.is_alive():
            warnings.warn(f'the thread that loads parameters ahead has not ended within {_CLOSE_SECONDS_MAX} seconds: it loads {self._ahead_of}, and '
                          'the store cannot be unmounted before that ends', RuntimeWarning, stacklevel=3)

    @property
    def in_backward(self) -> bool:
        """Has one begun since the last forward or step?"""
        return self._backward

    # -- the order --

    def _expect(self, order: List[Unit], computes: List[float]) -> None:
        self._order, self._at = order, -1
        self._ahead = places_ahead(computes, [u.load_seconds for u in order])
        self._places: Dict[Unit, List[int]] = collections.defaultdict(list)
        for i, unit in enumerate(order):
            self._places[unit].append(i)

    def _next_use(self, unit: Unit) -> int:
        places = self._places[unit]
        i = bisect.bisect_right(places, self._at)
        return places[i] if i < len(places) else _NEVER

    def _note(self, unit: Unit, now: float) -> None:
        """Where in the order is this use? The place that follows the last use, else one that has the same use before it."""
        last = self._uses[-1] if self._uses else None
        if last:
            self._computes[-1] += now - self._ready
        if unit is last:
            return
        self._uses.append(unit)
        self._computes.append(0.0)
        if len(self._uses) > 2 * len(self._order) + 1000:  # no step ends here, as in an evaluation
            half = len(self._uses) // 2
            del self._uses[:half], self._computes[:half]
        places = self._places[unit]
        if self._order[self._at + 1:self._at + 2] == [unit]:
            self._at += 1
        elif places:
            alike = [i for i in places if i and self._order[i - 1] is last]
            later = [i for i in places if i > self._at]
            self._at = (alike or later or places)[0]

    # -- loading --

    def _use(self, unit: Unit) -> None:
        begin = time.monotonic()
        with self._changed:
            self._note(unit, begin)
        self._bring(unit, _NEVER)
        self._ready = time.monotonic()
        self.waited_seconds += self._ready - begin
        self._read_ahead()

    def _bring(self, unit: Unit, before: int) -> bool:
        """False: there is no room without units that are needed before this place in the order."""
        with self._changed:
            while unit.state == TRANSIT:
                self._changed.wait()
            if unit.state == PRESENT:
                return True
            unit.state = TRANSIT
            fresh = [f for f in unit.files if not self._holders[f]]
            need = sum(f.bytes for f in fresh)
            leaving = self._make_room(need, before)
            if leaving is None:
                unit.state = ABSENT
                self._changed.notify_all()
                return False
            for f in unit.files:
                self._holders[f] += 1
            self.held_bytes += need
            self._promised_bytes += need
        try:
            try:
                while leaving:
                    self._let_go(leaving.pop())
            finally:
                with self._changed:
                    self._promised_bytes -= need
                    self.held_bytes_max = max(self.held_bytes_max, self.held_bytes - self._promised_bytes)
            begin = time.monotonic()
            for f in fresh:
                if before < _NEVER:
                    self._ahead_of = f'{f.name} of {unit.name or "the model"}'
                self._load(f)
            unit.loads.append(time.monotonic() - begin)
        except BaseException:  # KeyboardInterrupt, too: nobody may wait for these units
            with self._changed:
                for u in leaving:
                    u.state = PRESENT
                self._changed.notify_all()
            self._let_go(unit)
            raise
        with self._changed:
            self.loaded_bytes += need
            unit.state = PRESENT
            self._changed.notify_all()
        return True

    def _make_room(self, need: int, before: int) -> Optional[List[Unit]]:
        """Units that are to be released, in transit; None: that would not do. before = _NEVER: what can be released is, even if
        that does not do."""
        free = self.keep - self.held_bytes - need
        chosen: List[Unit] = []
        if free < 0:
            idle = [u for u in self.units if u.state == PRESENT and not u.stays and u not in self._running]
            for u in sorted(idle, key=lambda u: (u in self._recent, -self._next_use(u))):
                if free >= 0 or (before < _NEVER and (u in self._recent or self._next_use(u) <= before)):
                    break
                chosen.append(u)
                free += sum(f.bytes for f in u.files if self._holders[f] == 1)
        if free < 0 and before < _NEVER:
            return None
        for u in chosen:
            u.state = TRANSIT
        return chosen

    def _drop(self, unit: Unit) -> None:
        with self._changed:
            while unit.state == TRANSIT:
                self._changed.wait()
            if unit.state == ABSENT:
                return
            unit.state = TRANSIT
        self._let_go(unit)

    def _let_go(self, unit: Unit) -> None:
        """Releases a unit in transit."""
        with self._changed:
            for f in unit.files:
                self._holders[f] -= 1
            gone = [f for f in unit.files if not self._holders[f]]
        try:
            for f in gone:
                f.release()
        finally:
            with self._changed:
                self.held_bytes -= sum(f.bytes for f in gone)
                unit.state = ABSENT
                self._changed.notify_all()

    def _read_ahead(self) -> None:
        with self._changed:
            if self._reading or self.is_closed or os.getpid() != self._pid:
                return
            self._reading = True
            if self._thread.ident is None:
                self._thread.start()
            self._work.put(self._read_on)

    def _read_on(self) -> None:
        """In the thread. Loads what the order has next, until that is far enough ahead, or there is no room."""
        going = True
        while going:
            with self._changed:
                again = None if self.is_closed else self._next_again()
                unit = None if self.is_closed or again else self._next_absent()
                if unit is None and again is None:
                    self._reading = False
                    return
                place = self._next_use(unit) if unit else 0
            try:
                going = self._bring(unit, place) if unit else self._load_once_more(again)
            except Exception:  # its use loads it again, and raises
                going = False
        with self._changed:
            self._reading = False

    def _next_again(self) -> Optional[Unit]:
        """In transit then."""
        while self._again:
            unit = self._again.popleft()
            if unit.state == PRESENT and not any(self._is_final(f) for f in unit.files):
                unit.state = TRANSIT
                return unit
        return None

    def _load_once_more(self, unit: Any) -> bool:
        try:
            for f in unit.files:
                self._load(f)
        finally:
            with self._changed:
                unit.state = PRESENT
                self._changed.notify_all()
        return True

    def _next_absent(self) -> Optional[Unit]:
        first = self._at + 1
        for unit in self._order[first:first + self._ahead[first]]:
            if any(self._is_final(f) for f in unit.files):
                return None
            if unit.state == ABSENT:
                return unit
        return None

    def figures(self) -> Dict[str, Any]:
        return {'held_bytes': self.held_bytes, 'held_bytes_max': self.held_bytes_max, 'loaded_bytes': self.loaded_bytes,
                'waited_seconds': self.waited_seconds, 'ahead': max(self._ahead)}


def _run(work: 'queue.SimpleQueue[Optional[Callable[[], None]]]') -> None:
    """While it waits it has no reference to a model, so that one that nobody has any more ends."""
    while True:
        call = work.get()
        if call is None:
            return
        call()
        del call
