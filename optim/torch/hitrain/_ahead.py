# SPDX-License-Identifier: Apache-2.0
"""Read new parameters ahead of the forward pass that needs them, in its order, while the store still updates the rest."""
import concurrent.futures
import threading
from typing import Any, Callable, Dict, Iterable, List

import torch

from hitrain._compile import not_compiled


class ReadAhead:
    """A thread that reads parameters after a step, and hooks that let each module's forward wait for its own.

    read       reads one parameter
    model      the forward of each of its modules waits for the module's direct parameters
    wanted     the parameters to read, and their names

    The order is that of the last forward; at first, that of model.modules().

    Another module's forward, or a compiled one that runs no hooks, may have used a parameter before it was read. Its
    gradient shows that: backward() raises then.
    """

    def __init__(self, read: Callable[[torch.Tensor], None], model: torch.nn.Module, wanted: Dict[torch.Tensor, str]) -> None:
        self._read, self._names = read, dict(wanted)
        self._order: Dict[torch.Tensor, None] = {}  # dicts, because tensors in lists compare their elements
        self._asked: Dict[torch.Tensor, None] = {}
        self._unasked: Dict[torch.Tensor, None] = {}  # read in this step, and no caller has waited for them
        self._pending: Dict[torch.Tensor, 'concurrent.futures.Future[None]'] = {}
        self._hooks: List[Any] = []
        owners = [(m, [p for p in m.parameters(recurse=False) if p in wanted]) for m in model.modules()]
        for _, own in owners:
            self._order.update(dict.fromkeys(own))
        if len(self._order) < len(wanted):
            raise ValueError(f'{len(wanted) - len(self._order)} parameters of the optimizer belong to no module of the model')
        for module, own in owners:
            if own:
                self._hooks.append(module.register_forward_pre_hook(not_compiled(lambda m, inputs, own=own: self._use(own))))
        for p in self._order:
            if p.requires_grad:
                self._hooks.append(p.register_hook(lambda grad, p=p: self._check_used(p)))
        self._reader: List[int] = []  # identity of the thread, once it runs
        self._thread = concurrent.futures.ThreadPoolExecutor(
            max_workers=1, thread_name_prefix='hitrain-read', initializer=_append_identity, initargs=(self._reader,))

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin to read these. Nothing may be pending."""
        if len(self._asked) == len(self._order):
            self._order = self._asked
        self._asked = {}
        self._unasked = dict.fromkeys(parameters)
        self._pending = {p: self._thread.submit(self._read, p) for p in self._order if p in self._unasked}

    def wait(self, parameters: Iterable[torch.Tensor]) -> None:
        """Waits until these are read; raises the errors of reading them, again and again."""
        for p in parameters:
            self._unasked.pop(p, None)
            self._settle(p)

    def wait_all(self) -> None:
        self.wait(list({**self._pending, **self._unasked}))

    def settle(self) -> None:
        """Returns when all parameters are read; they do not count as waited for."""
        for p in list(self._pending):
            self._settle(p)

    def forget(self) -> bool:
        """Nothing is being read any more when this returns. True: not all was read, and the caller has to do it."""
        for reading in self._pending.values():
            reading.cancel()
        concurrent.futures.wait(self._pending.values())
        missing = any(r.cancelled() or r.exception() for r in self._pending.values())
        self._pending, self._unasked = {}, {}
        return missing

    def close(self) -> None:
        """Also by the reading thread, if the last reference to the optimizer is one of its tasks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._thread.shutdown(wait=threading.get_ident() not in self._reader)

    def _use(self, parameters: Iterable[torch.Tensor]) -> None:
        self._asked.update(dict.fromkeys(parameters))
        self.wait(parameters)

    def _settle(self, p: torch.Tensor) -> None:
        if p in self._pending:
            self._pending[p].result()
            del self._pending[p]

    def _check_used(self, p: torch.Tensor) -> None:
        if p in self._unasked:
            raise RuntimeError(f'{self._names[p]} was used before it was read: not by the forward of its own module, or by a compiled '
                               'one that runs no hooks. Call wait() before the forward, or do not use read_ahead()')


def _append_identity(to: List[int]) -> None:
    to.append(threading.get_ident())
