# SPDX-License-Identifier: Apache-2.0
"""Read new parameters ahead of the forward pass that needs them, in its order, while the store still updates the rest."""
import concurrent.futures
from typing import Any, Callable, Dict, Iterable, List

import torch


class ReadAhead:
    """A thread that reads parameters after a step, and hooks that let each module's forward wait for its own.

    read       reads one parameter
    model      its modules' direct parameters are waited for by their forward
    wanted     which parameters there are to read

    The order is that in which the last forward asked; at first, that of model.modules().
    """

    def __init__(self, read: Callable[[torch.Tensor], None], model: torch.nn.Module, wanted: Iterable[torch.Tensor]) -> None:
        known = set(wanted)
        self._read = read
        self._order: Dict[torch.Tensor, None] = {}  # dicts, because tensors in lists compare their elements
        self._asked: Dict[torch.Tensor, None] = {}
        self._pending: Dict[torch.Tensor, concurrent.futures.Future] = {}
        self._hooks: List[Any] = []
        owners = [(m, [p for p in m.parameters(recurse=False) if p in known]) for m in model.modules()]
        for _, own in owners:
            self._order.update(dict.fromkeys(own))
        if len(self._order) < len(known):
            raise ValueError(f'{len(known) - len(self._order)} parameters of the optimizer belong to no module of the model')
        for module, own in owners:
            if own:
                self._hooks.append(module.register_forward_pre_hook(lambda m, inputs, own=own: self._use(own)))
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix='hitrain-read')

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin to read these. Nothing may be pending."""
        if len(self._asked) == len(self._order):
            self._order = self._asked
        self._asked = {}
        chosen = set(parameters)
        self._pending = {p: self._thread.submit(self._read, p) for p in self._order if p in chosen}

    def _use(self, parameters: Iterable[torch.Tensor]) -> None:
        self._asked.update(dict.fromkeys(parameters))
        self.wait(parameters)

    def wait(self, parameters: Iterable[torch.Tensor]) -> None:
        """Until these are read; raises what reading them raised."""
        for p in parameters:
            reading = self._pending.pop(p, None)
            if reading is not None:
                reading.result()

    def wait_all(self) -> None:
        self.wait(list(self._pending))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._thread.shutdown(wait=True)
