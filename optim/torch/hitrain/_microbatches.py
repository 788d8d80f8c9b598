# SPDX-License-Identifier: Apache-2.0
"""Several micro-batches of one step, block by block: each block gets all micro-batches before the next block gets one.

Each micro-batch runs in a thread of its own, and one runs at a time. Before a module whose parameters are loaded as a whole
it stops, in forward and in backward, and the next one runs up to the same place:

    caller     turn 0    turn 1    turn 2    turn 0    turn 1    turn 2
    thread 0   block 1 |                   | block 2 |
    thread 1           | block 1 |                   | block 2 |
    thread 2                     | block 1 |                   | block 2

So each graph is that of the usual order, and a parameter gets its gradients in the order of the micro-batches. All forwards
end before the first backward begins. On the CPU a backward runs in the thread that called it.
"""
import contextlib
import contextvars
import threading
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch

_END = 'the end of the backward'


class _Stopped(BaseException):
    """Unwinds the thread of a micro-batch because another one failed."""


class Turns:
    """stop() is for threads of micro-batches, the rest for the caller's.

    turn       the micro-batch that runs; None: the caller's thread
    round      of turns"""

    def __init__(self, count: int, device: torch.device = torch.device('cpu')) -> None:
        self.count, self.round = count, 0
        self._device = device
        self.turn: Optional[int] = None
        self._changed = threading.Condition()
        self._places: List[str] = [''] * count  # where each has stopped
        self._ended = False
        self._error: Optional[BaseException] = None
        self._random = _random_states(count, device)
        self._threads: List[threading.Thread] = []

    @property
    def is_first(self) -> bool:
        return self.turn == 0

    def is_final(self, parameter: torch.Tensor) -> bool:
        """In backward, when its gradient has got more: will no micro-batch add to it?"""
        return self.turn == self.count - 1

    def stop(self, place: str) -> None:
        """The turn of this micro-batch ends here; returns when it has the next one."""
        with self._changed:
            mine = self.turn
            if mine is not None and self._places[mine] == place:
                return  # the same parameters
            if self._ended:
                raise _Stopped
            if mine is None:
                raise RuntimeError('the offloaded model runs in another thread while microbatches() runs it')
            self._places[mine] = place
            self.turn = None
            self._changed.notify_all()
            self._await(mine)

    def run(self, run_one: Callable[[int], None]) -> None:
        """Returns when run_one(index) has ended for each micro-batch; raises the error of the first that fails."""
        before = _get_random(self._device)
        try:
            for i in range(self.count):
                thread = threading.Thread(target=contextvars.copy_context().run, args=(self._run_one, run_one, i), daemon=True,
                                          name=f'hitrain-batch-{i}')
                thread.start()
                self._threads.append(thread)
            self._rounds()
        except BaseException:
            _set_random(self._device, before)
            raise
        finally:
            self._finish()
        unused = all(torch.equal(n, f) for now, first in self._random for n, f in zip(now, first))
        _set_random(self._device, before if unused else self._random[0][0])

    def _rounds(self) -> None:
        while any(place != _END for place in self._places):
            for i in range(self.count):
                self._run_turn(i)
            self.round += 1
            other = next((i for i, place in enumerate(self._places) if place != self._places[0]), None)
            if other is not None:
                raise RuntimeError(f'microbatches() needs modules that run alike: after the same part of the model micro-batch 0 came to '
                                   f'{self._places[0]}, and micro-batch {other} to {self._places[other]}')

    def _run_turn(self, i: int) -> None:
        """One turn, with the random numbers of this micro-batch."""
        with self._random_of(i), self._changed:
            self.turn = i
            self._changed.notify_all()
            while self.turn is not None:
                self._changed.wait()
            if self._error is not None:
                raise self._error

    @contextlib.contextmanager
    def _random_of(self, i: int) -> Iterator[None]:
        state, first = self._random[i]
        _set_random(self._device, state)
        yield
        self._random[i] = _get_random(self._device), first

    def _finish(self) -> None:
        """Returns when no thread runs any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._error = None  # its traceback holds what the micro-batch had

    # -- within the thread of a micro-batch --

    def _run_one(self, run_one: Callable[[int], None], mine: int) -> None:
        try:
            with self._changed:
                self._await(mine)
            run_one(mine)
            self._places[mine] = _END
        except _Stopped:
            pass
        except BaseException as e:
            self._error = self._error or e
        with self._changed:
            if self.turn == mine:
                self.turn = None
            self._changed.notify_all()

    def _await(self, mine: int) -> None:
        while self.turn != mine:
            if self._ended:
                raise _Stopped
            self._changed.wait()


def run_in_turns(turns: Turns, batches: List[Any], loss_of: Callable[[Any], torch.Tensor], backward: Callable[[torch.Tensor], None],
                 around: Callable[[], Any] = contextlib.nullcontext) -> List[torch.Tensor]:
    """Forward of all batches, and what backward(loss) does. Returns their losses. around: makes a context for a thread."""
    losses: List[torch.Tensor] = [torch.empty(0)] * len(batches)
    autocasts = [_autocast(kind) for kind in ('cpu', 'cuda')]

    def run_one(i: int) -> None:
        with around(), autocasts[0](), autocasts[1]():
            loss = loss_of(batches[i])
            if not isinstance(loss, torch.Tensor):
                raise TypeError(f'loss_fn must return a tensor, the loss of one micro-batch, not {type(loss).__name__}')
            losses[i] = loss.detach()
            backward(loss)
    turns.run(run_one)
    return losses


def _get_random(device: torch.device) -> Tuple[torch.Tensor, ...]:
    own = (torch.get_rng_state(),)
    return own if device.type == 'cpu' else (*own, torch.cuda.get_rng_state(device))


def _set_random(device: torch.device, states: Tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state(states[1], device)


def _random_states(count: int, device: torch.device) -> List[Tuple[Tuple[torch.Tensor, ...], Tuple[torch.Tensor, ...]]]:
    """For each micro-batch the state of the default generators, now and at first. The first one has the caller's; the others begin with
    seeds that a copy of the caller's generator of the CPU draws."""
    states = [_get_random(device)]
    if count > 1:
        copy = torch.Generator()
        copy.set_state(states[0][0])
        own = [torch.Generator(), *(torch.Generator(device) for _ in states[0][1:])]
        for seed in torch.randint(1 << 62, (count - 1,), generator=copy).tolist():
            states.append(tuple(g.manual_seed(seed).get_state() for g in own))
    return [(state, state) for state in states]


def _autocast(kind: str) -> Callable[[], Any]:
    """Makes contexts that have in another thread the autocast of this kind of device that this one has now."""
    try:
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    except (TypeError, AttributeError):  # before PyTorch 2.4
        if kind == 'cpu':
            enabled, dtype = torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()
        else:
            enabled, dtype = torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()
    if not enabled:
        return contextlib.nullcontext
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, dtype=dtype, cache_enabled=cached)
