# SPDX-License-Identifier: Apache-2.0
"""Pinned memory of a fixed size, through which bytes go to a device and come back, piece by piece.

    take() --> the slot that was used longest ago, when its last copy has ended --copies--> event --give()--> the end of the queue

So no step allocates or locks memory.
"""
import collections
import threading
from typing import Any, Callable, Deque, Optional

import torch


class Slot:
    """event: the end of the copy that used it last."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self.event = memory, None  # type: torch.Tensor, Any

    def of(self, dtype: torch.dtype, elements: int) -> torch.Tensor:
        return self._memory.view(dtype)[:elements]

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()
            self.event = None


class Slots:
    """make: gives pinned memory of so many bytes. size: of a slot, in bytes."""

    def __init__(self, make: Callable[[int], torch.Tensor], size: int, count: int) -> None:
        self.size, self._make, self._left = size, make, count
        self._free: Deque[Slot] = collections.deque()
        self._changed = threading.Condition()

    def take(self, waits: bool = True) -> Optional[Slot]:
        """None: others have all, and it does not wait for them."""
        with self._changed:
            if self._left:
                memory = self._make(self.size)
                self._left -= 1
                return Slot(memory)
            while not self._free:
                if not waits:
                    return None
                self._changed.wait()
            slot = self._free.popleft()
        try:
            slot.wait()
        except BaseException:
            self.give(slot)
            raise
        return slot

    def give(self, slot: Slot) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify()
