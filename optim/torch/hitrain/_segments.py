# SPDX-License-Identifier: Apache-2.0
"""Micro-batches block by block on a device, where PyTorch runs every backward in one thread, so that none can wait for another.

Forward runs in turns (_microbatches.py). The graph of each micro-batch is cut where a tensor enters a block:

    embedding ... | block 0 ... | block 1 ... | block 2 ... loss       segments 0, 1, 2, 3
                  ^ the block gets the tensor anew, and a node that keeps its gradient

Then segments run backward, the last one first, each with all micro-batches. A gradient that a cut has kept begins the backward of the segment from
which its tensor came. So each node runs once, with the gradients and in the order of the usual backward.

A parameter of several segments, as a tied embedding, gets the gradients of one micro-batch together before those of the next one.
The graph of the first micro-batch shows in which segments a parameter is. It also shows a tensor that goes around a block, which no cut would see.
"""
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch
from torch.utils._pytree import tree_map

from hitrain._microbatches import Turns


class _Cut(torch.autograd.Function):
    """Only `anchor` is in the graph. Backward gives the gradients to keep()."""

    @staticmethod
    def forward(ctx: Any, keep: Callable[..., None], anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.keep = keep
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[torch.Tensor]) -> Any:
        ctx.keep(*grads)
        return (None, None, *(None for _ in grads))


class _End(torch.autograd.Function):
    """A number in the place of a tensor, of which no memory is held. Its backward begins with the gradient in `grads`."""

    @staticmethod
    def forward(ctx: Any, grads: List[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, unused: torch.Tensor) -> Any:
        return None, ctx.grads.pop()


class _Root:
    """The end of a segment: a loss, or a number for a tensor and its gradient, once there is one."""

    def __init__(self, tensor: torch.Tensor, segment: int, is_loss: bool = False) -> None:
        self.segment, self.is_loss = segment, is_loss
        self.grads: List[torch.Tensor] = []
        self.number = tensor if is_loss else _End.apply(self.grads, tensor)


class Segments(Turns):
    """blocks    names of blocks, by the ids of parameters that they alone use
    sends(p)  all micro-batches have added to the gradient of this parameter"""

    def __init__(self, count: int, device: torch.device, parameters: List[torch.Tensor], blocks: Dict[int, str],
                 sends: Callable[[torch.Tensor], None]) -> None:
        super().__init__(count, device)
        self._parameters, self._blocks, self._sends = [p for p in parameters if p.requires_grad], blocks, sends
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._roots: List[Dict[Any, _Root]] = [{} for _ in range(count)]  # of each micro-batch, by node and output
        self._names: List[List[str]] = [['the model'] for _ in range(count)]  # of the blocks at which segments begin
        self._runs: Optional[Tuple[int, int]] = None  # the segment and the micro-batch whose backward runs
        self._in: Dict[int, Set[int]] = {}  # segments, by the id of a parameter
        self._summed: Set[int] = set()  # ids of parameters of several segments whose sum is complete

    # -- forward --

    def cut(self, name: str, args: Any, kwargs: Any) -> Any:
        """The arguments of a block, behind a cut."""
        if self.turn is None or not torch.is_grad_enabled():
            return args, kwargs
        batch, roots, found = self.turn, self._roots[self.turn], []

        def find(t: Any) -> Any:
            if isinstance(t, torch.Tensor) and t.grad_fn is not None:
                found.append(t)
            return t
        tree_map(find, (args, kwargs))
        if not found:
            return args, kwargs
        begins = len(self._names[batch])
        self._names[batch].append(name)
        once = {id(t): t for t in found}
        for t in once.values():
            if (t.grad_fn, t.output_nr) not in roots:
                roots[t.grad_fn, t.output_nr] = _Root(t, begins - 1)
        kept = [roots[t.grad_fn, t.output_nr] for t in once.values()]

        def keep(*grads: Optional[torch.Tensor]) -> None:
            if self._runs != (begins, batch):
                raise _around(name)
            for root, grad in zip(kept, grads):
                if grad is not None:
                    root.grads[:] = [root.grads[0] + grad if root.grads else grad]
        new = dict(zip(once, _Cut.apply(keep, self._anchor, *(t.detach() for t in once.values()))))
        return tree_map(lambda t: new.get(id(t), t) if isinstance(t, torch.Tensor) else t, (args, kwargs))

    def ends(self, loss: torch.Tensor) -> None:
        """The forward of this micro-batch."""
        batch = self.turn or 0
        if not loss.requires_grad:
            raise RuntimeError(f'the loss of micro-batch {batch} does not depend on a parameter that needs a gradient')
        self._roots[batch][None] = _Root(loss, len(self._names[batch]) - 1, is_loss=True)

    # -- backward --

    def stop(self, place: str) -> None:
        if self._runs is None:
            super().stop(place)

    def is_final(self, parameter: torch.Tensor) -> bool:
        if self._runs is None or id(parameter) in self._summed:
            return True
        known = self._in.get(id(parameter))
        if known is not None and self._runs[0] not in known:
            raise RuntimeError(f'micro-batch {self._runs[1]} uses a parameter in the segment of {self._names[0][self._runs[0]]}, and micro-batch 0 '
                               'does not: microbatches() needs modules that run alike')
        return known is not None and len(known) == 1 and self._runs[1] == self.count - 1

    def _rounds(self) -> None:
        super()._rounds()
        self._find()
        shared = [p for p in self._parameters if len(self._in.get(id(p), ())) != 1]
        sums = {id(p): p.grad for p in shared}
        own: List[Dict[int, Optional[torch.Tensor]]] = [{} for _ in range(self.count)]
        for p in shared:
            p.grad = None
        for segment in reversed(range(len(self._names[0]))):
            here = [p for p in shared if segment in self._in.get(id(p), (segment,))]
            for batch in range(self.count):
                self._run_segment(segment, batch, here, own[batch])
            self.round += 1
            for p in here:
                if segment == min(self._in.get(id(p), (0,))):
                    self._sum(p, sums, [of_batch.pop(id(p), None) for of_batch in own])

    def _finish(self) -> None:
        super()._finish()
        self._runs = None
        for roots in self._roots:
            roots.clear()

    def _run_segment(self, segment: int, batch: int, shared: List[torch.Tensor], own: Dict[int, Optional[torch.Tensor]]) -> None:
        ready = [r.number for r in self._roots[batch].values() if r.segment == segment and (r.grads or r.is_loss)]
        self._roots[batch] = {key: r for key, r in self._roots[batch].items() if r.segment != segment}
        for p in shared:
            p.grad = own.pop(id(p), None)
        self._runs, self.turn = (segment, batch), batch
        try:
            with self._random_of(batch):
                if ready:
                    torch.autograd.backward(ready)
        finally:
            self.turn = None
        for p in shared:
            own[id(p)], p.grad = p.grad, None

    def _sum(self, p: torch.Tensor, sums: Dict[int, Optional[torch.Tensor]], grads: List[Optional[torch.Tensor]]) -> None:
        p.grad = sums.pop(id(p))
        for grad in grads:
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad + grad
        self._summed.add(id(p))
        if p.grad is not None:
            self._sends(p)

    # -- the graph --

    def _find(self) -> None:
        """In which segments the first micro-batch has parameters. It may not use all of a block."""
        known = {id(p) for p in self._parameters}
        seen: Dict[Any, int] = {}
        for segment, name in enumerate(self._names[0]):
            for node in _nodes([r.number for r in self._roots[0].values() if r.segment == segment]):
                variable = getattr(node, 'variable', None)
                if variable is not None:
                    if id(variable) in known:
                        self._in.setdefault(id(variable), set()).add(segment)
                elif seen.setdefault(node, segment) != segment:
                    raise _around(name)
        for p, block in self._blocks.items():
            if p not in self._in and self._names[0].count(block) == 1:
                self._in[p] = {self._names[0].index(block)}


def _nodes(tensors: List[torch.Tensor]) -> Iterator[Any]:
    left: List[Any] = [t.grad_fn for t in tensors]
    seen = set(left)
    while left:
        node = left.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)


def _around(name: str) -> RuntimeError:
    return RuntimeError(f'a tensor of the graph goes around {name}: with device= microbatches() takes blocks that follow each other, each of which gets '
                        'all that later ones need as its arguments. Add a residual within the block, and let autocast cache no weight of a block '
                        'that runs twice')
