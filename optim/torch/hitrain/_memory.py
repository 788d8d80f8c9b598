# SPDX-License-Identifier: Apache-2.0
"""Parameters that cannot be told apart: in no order, or in one memory."""
import weakref
from typing import Any, Iterable, List, NamedTuple, Tuple

import torch

from hitrain._parts import local_of

UNORDERED: Tuple[type, ...] = (set, frozenset, weakref.WeakSet, type(iter(set())))


def check_ordered(what: str, listed: Any) -> None:
    """Another run may iterate a set in another order, and a parameter without a name is known by its place."""
    if isinstance(listed, UNORDERED):
        raise TypeError(f'{what} must have an order that is the same in each run, as a list has; a {type(listed).__name__} has none')


class _Span(NamedTuple):
    """The bytes from a tensor's first element to its last one."""
    device: str
    first: int
    end: int
    name: str
    tensor: torch.Tensor


def check_apart(parameters: Iterable[Tuple[str, torch.Tensor]]) -> None:
    """Each update would change the other parameter, too, and one update would be lost."""
    reaching: List[_Span] = []  # earlier spans that go on
    for span in sorted(_spans(parameters), key=lambda s: s[:3]):
        reaching = [other for other in reaching if other.device == span.device and other.end > span.first]
        for other in reaching:
            if _overlap(other, span):
                raise ValueError(f'{span.name} and {other.name} are two parameters in one memory: make them one parameter, or give each '
                                 'memory of its own')
        reaching.append(span)


def _spans(parameters: Iterable[Tuple[str, torch.Tensor]]) -> Iterable[_Span]:
    for name, p in parameters:
        t = local_of(p).detach()
        if t.device.type == 'meta' or t.layout != torch.strided or not t.numel() or not t.data_ptr():
            continue
        if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape)):
            raise ValueError(f'elements of {name} are in one memory, as after expand(): give it memory of its own')
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
        yield _Span(str(t.device), t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size(), name, t)


def _overlap(one: _Span, other: _Span) -> bool:
    """Spans that do may be of tensors that lie between each other, as columns of a matrix do."""
    if one.tensor.is_contiguous() and other.tensor.is_contiguous():
        return True
    taken = torch.zeros(max(one.end, other.end) - one.first, dtype=torch.bool)
    _bytes_of(taken, one, one.first).fill_(True)
    return bool(_bytes_of(taken, other, one.first).any())


def _bytes_of(taken: torch.Tensor, span: _Span, origin: int) -> torch.Tensor:
    t, size = span.tensor, span.tensor.element_size()
    return taken.as_strided((*t.shape, size), (*(stride * size for stride in t.stride()), 1), span.first - origin)
