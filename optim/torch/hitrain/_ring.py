# SPDX-License-Identifier: Apache-2.0
"""Page-aligned buffers for tensors that a file cannot take as they are: of another dtype, or on another device.

Each of a few threads copies a piece at a time through a buffer, so all parameters together need a few megabytes, and copies overlap
requests. For a GPU the buffers are pinned, and copies run on a stream of their own, after what the current stream was given before. No run on
a GPU has been made yet.
"""
import contextlib
import mmap
import threading
from typing import Any, Dict, Iterator, List

import torch

BUFFER_BYTES = 4 << 20
KEPT = 8  # buffers of each kind, for the next transfers

_lock = threading.Lock()
_spare: Dict[bool, List[torch.Tensor]] = {False: [], True: []}  # pinned ones: True
_streams: Dict[torch.device, Any] = {}


@contextlib.contextmanager
def buffer(pinned: bool, elements: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Room for so many elements, at most BUFFER_BYTES."""
    with _lock:
        memory = _spare[pinned].pop() if _spare[pinned] else None
    if memory is None:
        memory = _made(pinned)
    try:
        yield memory.view(dtype)[:elements]
    finally:
        with _lock:
            if len(_spare[pinned]) < KEPT:
                _spare[pinned].append(memory)


def _made(pinned: bool) -> torch.Tensor:
    if pinned:
        return torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


class Copies:
    """Between a tensor and buffers, from several threads. Each copy has ended when copy() returns."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.pinned = tensor.is_cuda
        self._stream, self._begin = None, None
        if self.pinned:
            with _lock:
                if tensor.device not in _streams:
                    _streams[tensor.device] = torch.cuda.Stream(tensor.device)
            self._stream = _streams[tensor.device]
            self._begin = torch.cuda.current_stream(tensor.device).record_event()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._begin)
            target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()
