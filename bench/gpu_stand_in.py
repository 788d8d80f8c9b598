# SPDX-License-Identifier: Apache-2.0
"""A GPU that takes time and computes nothing: bench/gpu.py runs the client's own code for a GPU on it where there is none.

Memory of the CPU stands for its memory, and results are there at once. But its three streams know when they would be done: a copy takes its bytes by
the rate of the link, and a block the seconds that it is given. Who waits for an event sleeps until that time. tests/support/late_device.py is another
stand-in, which takes no time and checks the order of all accesses.
"""
import contextlib
import threading
import time
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hitrain import _device, _offload


class Event:
    def __init__(self, at):
        self.at = at

    def synchronize(self):
        time.sleep(max(0.0, self.at - time.monotonic()))

    def elapsed_time(self, later):
        return (later.at - self.at) * 1e3


class Stream:
    """busy: seconds of its work so far. ready: when that will be done."""

    def __init__(self):
        self.busy, self.ready, self._lock = 0.0, 0.0, threading.Lock()

    def work(self, seconds):
        with self._lock:
            self.ready = max(self.ready, time.monotonic()) + seconds
            self.busy += seconds

    def record_event(self, timed=None):
        event = timed or Event(0.0)
        event.at = max(self.ready, time.monotonic())
        return event

    def wait_event(self, event):
        with self._lock:
            self.ready = max(self.ready, event.at)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        self.record_event().synchronize()


class Timed(TorchDispatchMode):
    """Copies that are given to a stream."""

    def __init__(self, device, stream):
        super().__init__()
        self.device, self.stream = device, stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and (args[2:3] == (True,) or (kwargs or {}).get('non_blocking')):
            self.stream.work(args[0].numel() * args[0].element_size() / self.device.bytes_per_second)
        return func(*args, **(kwargs or {}))


class StandIn:
    """bytes_per_second: of the link in each direction. compute_seconds: of the forward of a block; its backward takes twice as long."""

    def __init__(self):
        self.bytes_per_second, self.compute_seconds = float('inf'), 0.0
        self.compute, self.to, self.back = Stream(), Stream(), Stream()
        self._local = threading.local()

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._local.stream = self._current(), stream
        try:
            with Timed(self, stream) if stream in (self.to, self.back) else contextlib.nullcontext():
                yield
        finally:
            self._local.stream = before

    def _current(self):
        return getattr(self._local, 'stream', None) or self.compute

    def install(self):
        """For the rest of the process: in the place of PyTorch's functions, as the client sees them."""
        stand_in = self
        cuda = types.SimpleNamespace(Event=lambda enable_timing: Event(0.0), stream=self.stream, current_stream=lambda where: self._current(),
                                     mem_get_info=lambda where: (0, 1 << 40), is_current_stream_capturing=lambda: False,
                                     cudart=lambda: types.SimpleNamespace(cudaHostRegister=lambda *unused: 0, cudaHostUnregister=lambda *unused: 0))

        class Torch:
            def __getattr__(self, name):
                return cuda if name == 'cuda' else getattr(torch, name)

            def empty(self, *size, pin_memory=False, **options):
                return torch.empty(*size, **options)

        class Copies(_device.Copies):
            def __init__(self, device, keep):
                super().__init__(device, keep)
                self._has_streams, self._to, self._back = True, stand_in.to, stand_in.back
        _device.torch, _offload.Copies, _offload.gpu_of = Torch(), Copies, torch.device
        torch.Tensor.record_stream = lambda *unused: None

    def computing(self, x):
        """In the forward of a block: the device computes it, and later its backward."""
        return Computing.apply(x, self)

    def busy(self):
        return {'load': self.to.busy, 'compute': self.compute.busy, 'gradient': self.back.busy}


class Computing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, device):
        ctx.device = device
        device.compute.work(device.compute_seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.device.compute.work(2 * ctx.device.compute_seconds)
        return grad, None
