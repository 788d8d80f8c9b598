# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: memory of the CPU stands for its memory, copies run late, and whatever is not ordered is a fault.

The client's own code for a GPU runs on it, with these in the place of PyTorch's:
    streams     queues of copies. They run when something waits for them, and a random number of them at other times. What computes is never
                behind the host: the operations that it waits for run first, and it runs at once
    order       each stream and the host have a vector clock. A block of memory knows its last write and the reads since. An access that does
                not come after a conflicting one, by events alone, is a fault with the stacks of both. It needs no bad luck
    allocator   memory is new, and has the bytes 0x7f. An end of memory is an access of the stream that allocated it, after those
                that record_stream() named. A storage has the address that was freed last, of its size
    pinned      as PyTorch has it: safe when it is freed. Its content is 0x7f when it is taken
    errors      out of memory, an illegal access, a stream whose copies do not end

All threads of the host are one actor: their locks order them, and nothing here checks that. Faults are kept until check(), because a thread may
swallow what it raises.
"""
import collections
import contextlib
import ctypes
import gc
import os
import random
import sys
import threading
import time
import types
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import pytest

from hitrain import _activations, _bytes, _device, _gate, _offload

POISON = 0x7f
HOST = 0
METADATA = {'aten::set_', 'aten::detach', 'aten::detach_', 'aten::resize_', 'aten::requires_grad_', 'aten::record_stream'}
ILLEGAL = 'CUDA error: an illegal memory access was encountered'

Access = collections.namedtuple('Access', 'actor tick stack')


class Block:
    """Memory from its allocation to its end. owner: the stream that allocated it, or None for pinned memory."""

    def __init__(self, owner, address, size):
        self.owner, self.address, self.size = owner, address, size
        self.write, self.reads = None, {}
        self.recorded, self.pending, self.is_freed = set(), {}, False

    @property
    def is_pinned(self):
        return self.owner is None


class Event:
    def __init__(self, stream):
        self.device, self.stream, self.position, self.clock = stream.device, stream, stream.issued, dict(stream.clock)

    def synchronize(self):
        self.device.wait(self)


class Timed:
    """An event with a time, which is when its stream comes to it."""

    def __init__(self, enable_timing):
        assert enable_timing
        self.event = self.time = None

    def synchronize(self):
        self.event.synchronize()

    def elapsed_time(self, later):
        return (later.time - self.time) * 1e3

    def pass_now(self):
        self.time = time.monotonic()


class Stream:
    def __init__(self, device, name):
        device.streams.append(self)
        self.device, self.name, self.actor = device, name, len(device.streams)
        self.clock, self.queue, self.issued, self.done, self.is_stalled = {}, collections.deque(), 0, 0, False

    def record_event(self, timed=None):
        with self.device.lock:
            self.device.refuse_broken()
            if timed:
                self.push(timed.pass_now)
            event = Event(self)
            if timed:
                timed.event = event
            return timed or event

    def wait_event(self, event):
        with self.device.lock:
            join(self.clock, event.clock)
            self.push(lambda: self.device.run(event.stream, event.position))

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def push(self, call):
        self.queue.append(call)
        self.issued += 1


class Mode(TorchDispatchMode):
    """Operations of a thread on tensors."""

    def __init__(self, device):
        super().__init__()
        self.late = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.late.operate(func, args, kwargs or {})


class LateDevice:
    def __init__(self, seed=0):
        self.lock, self.random, self.local = threading.RLock(), random.Random(seed), threading.local()
        self.streams, self.faults, self.host_clock = [], [], {}
        self.blocks, self.ended = {}, collections.deque()  # by storage; those whose storages are gone
        self.held = collections.Counter()  # references of pending copies, by storage
        self.addresses, self.next_address = collections.defaultdict(list), 1 << 40
        self.allocations = self.pinned = self.operations = self.late_copies = 0
        self.no_memory_at = self.illegal_at = None
        self.registered, self.refuses_registration, self.calls = {}, 0, []
        self.named = []  # devices that calls of PyTorch named
        self.memory_bytes = 1 << 40
        self.is_broken, self.released = False, threading.Event()
        self.compute = Stream(self, 'compute')

    # -- in the place of PyTorch --

    @contextlib.contextmanager
    def installed(self, monkeypatch):
        device, resize, address = self, torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr
        _gate.can_count()  # before other references are in its way

        class LateCopies(_device.Copies):
            def __init__(self, where, keep):
                super().__init__(where, keep)
                self._has_streams, self._to, self._back = True, Stream(device, 'to'), Stream(device, 'back')
        references, memory_of = _gate.references, _bytes.memory_of
        monkeypatch.setattr(_gate, 'references', lambda thing: references(thing) - device.held[thing._cdata])
        monkeypatch.setattr(_bytes, 'memory_of', lambda t: device.touch(t, memory_of, writes=False))
        monkeypatch.setattr(_activations, 'memory_of', lambda t: device.touch(t, memory_of, writes=True))  # or reads: it does not say
        monkeypatch.setattr(_offload, 'Copies', LateCopies)
        monkeypatch.setattr(_offload, 'gpu_of', torch.device)
        monkeypatch.setattr(_device, 'torch', LateTorch(self))
        monkeypatch.setattr(torch.UntypedStorage, 'resize_', lambda storage, size: device.resize(storage, size, resize))
        monkeypatch.setattr(torch.UntypedStorage, 'data_ptr', lambda storage: device.address_of(storage) or address(storage))
        monkeypatch.setattr(torch.Tensor, 'record_stream', lambda t, stream: device.record(t, stream))
        self.copies = LateCopies
        with self.current(self.compute):
            try:
                yield self
            finally:
                self.released.set()

    @contextlib.contextmanager
    def current(self, stream):
        before = getattr(self.local, 'stream', None)
        self.local.stream = stream
        try:
            with contextlib.nullcontext() if before else Mode(self):
                yield
        finally:
            self.local.stream = before

    def stream(self):
        return getattr(self.local, 'stream', None) or self.compute

    def check(self):
        """At the end of a test: runs what is left."""
        with self.lock:
            self.see_ends()
            for stream in self.streams:
                self.run(stream, stream.issued)
        assert not self.faults, self.faults[0]

    # -- memory --

    def new(self, tensor, pinned=False):
        """Makes the storage of a tensor a block."""
        storage = tensor.untyped_storage()
        weakref.finalize(storage, self.end_of, storage._cdata).atexit = False
        self.allocate(storage._cdata, storage.nbytes(), pinned)
        return tensor

    def allocate(self, cdata, size, pinned=False):
        self.pinned += pinned
        if not pinned:
            self.allocations += 1
            if self.allocations == self.no_memory_at:
                raise torch.OutOfMemoryError('CUDA out of memory, at the wish of the test')
        if not self.addresses[size]:
            self.addresses[size].append(self.next_address)
            self.next_address += -(-size // 512) * 512
        self.blocks[cdata] = Block(None if pinned else self.stream(), self.addresses[size].pop(), size)

    def end_of(self, cdata):
        """Of a storage, anywhere in a thread of Python."""
        block = self.blocks.pop(cdata, None)
        if block:
            self.ended.append(block)

    def see_ends(self):
        for cdata in [c for c in self.held if self.held[c] and c in self.blocks]:
            if ctypes.c_uint32.from_address(cdata + 8).value == self.held[cdata]:  # only pending copies refer to it
                self.ended.append(self.blocks.pop(cdata))
        while self.ended:
            self.free(self.ended.popleft())

    def free(self, block):
        if block.is_freed:
            return
        if not block.is_pinned:
            clock = {**block.owner.clock}
            for other in (self.host_clock, *(s.clock for s in block.recorded)):
                join(clock, other)
            self.access(Access(block.owner.actor, 0, 'the end of the memory, found in ' + here()), clock, block, writes=True)
        block.is_freed = True
        self.addresses[block.size].append(block.address)

    def resize(self, storage, size, real):
        cdata = storage._cdata
        with self.lock:
            self.enter()
            block = self.blocks.get(cdata)
            if block is None:
                return real(storage, size)
            self.free(block)
            for stream, position in block.pending.items():
                self.run(stream, position)
            real(storage, size)
            if size:
                self.allocate(cdata, size)
                poison(torch.empty(0, dtype=torch.uint8).set_(storage))
            return storage

    def address_of(self, storage):
        block = self.blocks.get(storage._cdata)
        return block.address if block and not block.is_freed else 0

    def record(self, tensor, stream):
        with self.lock:
            self.block(tensor).recorded.add(stream)

    def block(self, tensor):
        return self.blocks.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None

    # -- memory that a driver has locked --

    def register(self, address, size, flags):
        if self.refuses_registration:
            return self.refuses_registration
        self.calls.append('register')
        self.registered[address] = size
        return 0

    def unregister(self, address):
        if any(s.queue for s in self.streams if s.name != 'compute'):
            self.faults.append(f'a registration ends while copies may use it, at\n{here()}')
        self.calls.append('unregister')
        del self.registered[address]
        return 0

    def is_registered(self, tensor):
        at = torch.Tensor.data_ptr(tensor)
        return any(address <= at < address + size for address, size in self.registered.items())

    # -- order --

    def access(self, mine, clock, block, writes):
        if block.is_freed:
            self.fault('use after the end of memory', mine, block.write)
            raise RuntimeError(ILLEGAL)
        conflicting = [block.write, *(block.reads.values() if writes else ())]
        for other in conflicting:
            if other and clock.get(other.actor, 0) < other.tick:
                self.fault('not ordered', mine, other)
        if writes:
            block.write, block.reads = mine, {}
        else:
            block.reads[mine.actor] = mine

    def fault(self, what, mine, other):
        self.faults.append(f'{what}: {self.name(mine)}\nand {self.name(other) if other else "nothing"}')

    def name(self, access):
        who = 'the host' if access.actor == HOST else f'stream {self.streams[access.actor - 1].name}'
        return f'{who}, tick {access.tick}, at\n{access.stack}'

    def accesses(self, actor, clock, reads, writes):
        if actor == HOST and self.is_broken:    # no copy runs any more
            for stream in self.streams:
                join(clock, stream.clock)
        clock[actor] = clock.get(actor, 0) + 1
        mine = Access(actor, clock[actor], here())
        for block in reads:
            self.access(mine, clock, block, writes=False)
        for block in writes:
            self.access(mine, clock, block, writes=True)

    def touch(self, tensor, then, writes):
        """The host reads or writes memory without an operation of PyTorch. That of the device comes to it by a copy that it waits for."""
        with self.lock:
            self.enter()
            block, stream = self.block(tensor), self.stream()
            if block and not block.is_pinned:
                self.run(stream, stream.issued)
                self.launch(stream, [block], [])
                join(self.host_clock, stream.clock)
            elif block:
                self.accesses(HOST, self.host_clock, [] if writes else [block], [block] if writes else [])
        return then(tensor)

    # -- streams --

    def enter(self):
        """At each call: what ended is seen, and streams may go on a little."""
        self.see_ends()
        busy = [s for s in self.streams if s.queue and not s.is_stalled]
        if busy and self.random.random() < 0.3:
            stream = self.random.choice(busy)
            self.run(stream, stream.done + self.random.randint(1, len(stream.queue)))

    def run(self, stream, position):
        while stream.done < position:
            if stream.is_stalled and not self.released.is_set():
                raise Stalled
            stream.queue.popleft()()
            stream.done += 1

    def wait(self, event):
        while True:
            with self.lock:
                self.enter()
                self.refuse_broken()
                try:
                    self.run(event.stream, event.position)
                    join(self.host_clock, event.clock)
                    return
                except Stalled:
                    pass
            self.released.wait()

    def refuse_broken(self):
        if self.is_broken:
            raise RuntimeError(ILLEGAL)

    def launch(self, stream, reads, writes):
        self.refuse_broken()
        self.operations += 1
        self.is_broken = self.operations == self.illegal_at
        self.refuse_broken()
        join(stream.clock, self.host_clock)
        self.accesses(stream.actor, stream.clock, reads, writes)

    # -- operations --

    def operate(self, func, args, kwargs):
        name = func._schema.name
        if name in METADATA:
            return func(*args, **kwargs)
        with self.lock:
            self.enter()
            reads, writes = self.blocks_of(func, args, kwargs)
            if name == 'aten::copy_':
                return self.copy(func, args, kwargs)
            if any(not b.is_pinned for b in reads + writes):
                return self.compute_now(func, args, kwargs, reads, writes)
            if reads or writes:
                self.accesses(HOST, self.host_clock, reads, writes)
            return func(*args, **kwargs)

    def blocks_of(self, func, args, kwargs):
        found = [], []
        given = dict(zip((a.name for a in func._schema.arguments), args), **kwargs)
        only_metadata = func._schema.name.endswith('_like') or func._schema.name.startswith('aten::new_')
        for argument in func._schema.arguments:
            info = argument.alias_info
            if only_metadata or (info is not None and not info.is_write):
                continue  # a view, of which the memory is not touched
            for tensor in tensors(given.get(argument.name)):
                block = self.block(tensor)
                if block:
                    found[info is not None].append(block)
        return found

    def compute_now(self, func, args, kwargs, reads, writes, host_waits=False):
        stream = self.stream()
        self.run(stream, stream.issued)
        self.launch(stream, reads, writes)
        result = func(*args, **kwargs)
        made = tensors(result)
        for tensor in made:
            if self.block(tensor) is None and tensor.layout == torch.strided:
                self.new(tensor)
                self.accesses(stream.actor, stream.clock, [], [self.block(tensor)])
        if host_waits or not made:  # a number, or a copy to the host
            join(self.host_clock, stream.clock)
        return result

    def copy(self, func, args, kwargs):
        into, source = args[:2]
        if not (kwargs.get('non_blocking') or args[2:3] == (True,)):
            to, of = self.block(into), self.block(source)
            if not any(b and not b.is_pinned for b in (to, of)):
                self.accesses(HOST, self.host_clock, [of] if of else [], [to] if to else [])
                return func(*args, **kwargs)
            return self.compute_now(func, args, kwargs, [of] if of else [], [to] if to else [], host_waits=to is None or to.is_pinned)
        for tensor in (into, source):
            if self.block(tensor) is None:
                self.new(tensor, pinned=self.is_registered(tensor))  # else of a test, which gives memory of the device
        self.copy_later(into, source, self.stream())
        return into

    def copy_later(self, into, source, stream):
        blocks, pair = (self.block(into), self.block(source)), [into.data, source.data]  # with versions of their own
        self.launch(stream, blocks[1:], blocks[:1])
        keys = [t.untyped_storage()._cdata for t in pair]
        self.held.update(keys)
        operation = self.operations

        def run():
            with _disable_current_modes(), torch.no_grad():
                pair[0].copy_(pair[1])
            self.held.subtract(keys)
            pair.clear()
            self.late_copies += self.operations > operation
        stream.push(run)
        for block in blocks:
            block.pending[stream] = stream.issued


class Stalled(Exception):
    pass


class LateTorch:
    """torch, as _device.py sees it."""

    def __init__(self, device):
        self.device = device
        self.cuda = types.SimpleNamespace(Stream=None, Event=Timed, stream=device.current, current_stream=lambda where=None: self._named(where, device.stream()),
                                          mem_get_info=lambda where=None: self._named(where, (0, device.memory_bytes)),
                                          cudart=lambda: types.SimpleNamespace(cudaHostRegister=device.register, cudaHostUnregister=device.unregister),
                                          is_current_stream_capturing=lambda: False)

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *size, device=None, pin_memory=False, **options):
        return self._made(torch.empty(*size, **options), device, pin_memory)

    def empty_like(self, like, device=None):
        return self._made(torch.empty_like(like), device, False)

    def _named(self, where, result):
        self.device.named.append(where)
        return result

    def _made(self, tensor, where, pinned):
        if not pinned:
            self.device.named.append(where)
        if where is None and not pinned:
            return tensor
        with self.device.lock:
            self.device.enter()
            return poison(self.device.new(tensor, pinned))


@pytest.fixture
def late(monkeypatch, request):
    """seed: indirectly, by parametrize()."""
    device = LateDevice(getattr(request, 'param', 0))
    with device.installed(monkeypatch):
        yield device
        gc.collect()
        device.check()


def poison(tensor):
    with _disable_current_modes(), torch.no_grad():
        tensor.data.view(-1).view(torch.uint8).fill_(POISON)
    return tensor


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def join(clock, other):
    for actor, tick in other.items():
        clock[actor] = max(clock.get(actor, 0), tick)


def here():
    """The stack, as text of the lines outside this file and PyTorch."""
    found, frame = [], sys._getframe(1)
    while frame and len(found) < 8:
        name = frame.f_code.co_filename
        if name != __file__ and f'{os.sep}torch{os.sep}' not in name.replace('optim/torch', ''):
            found.append(f'    {name}:{frame.f_lineno} {frame.f_code.co_name}')
        frame = frame.f_back
    return '\n'.join(found)
