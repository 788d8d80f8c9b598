# SPDX-License-Identifier: Apache-2.0
"""Models that are built without memory for their parameters, and the first values of these, module by module."""
import contextlib
import mmap
import os
import weakref
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Set, Tuple, Union

import torch
from torch import nn

from hitrain._bytes import memory_of
from hitrain._gate import withdrawn_to
from hitrain._safetensors import FLOATS, Tensor, files_of, read_bytes, read_header

_MAPPED_BYTES = 64 << 10
_MAP_NORESERVE = getattr(mmap, 'MAP_NORESERVE', 0x4000)

Weights = Union['os.PathLike[str]', str, Mapping[str, torch.Tensor]]


@contextlib.contextmanager
def init_empty() -> Iterator[None]:
    """Modules that are built in here have their parameters on the device meta, without memory. Buffers are ordinary ones.
    offload() gives the parameters their values. For one thread at a time."""
    register = nn.Module.register_parameter
    made: Dict[int, Tuple[Any, nn.Parameter]] = {}  # by the identity of a parameter that may end meanwhile, with a reference that shows it

    def registered(module: nn.Module, name: str, param: Optional[nn.Parameter]) -> None:
        register(module, name, param)
        if param is not None and param.device.type != 'meta':
            known, empty = made.get(id(param), (lambda: None, param))
            if known() is not param:
                empty = nn.Parameter(param.detach().to('meta'), requires_grad=param.requires_grad)
                made[id(param)] = weakref.ref(param), empty
            module._parameters[name] = empty
    nn.Module.register_parameter = registered  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Filler:
    """Parameters on meta become parameters in memory that nothing has touched yet, and so takes no pages. fill() gives one its first
    values, with the others of its module. Weights that have no values since the close() of an optimizer are like them, but are in a store.

    weights   where the values come from; None: from the modules
    init      gives one module its values, when weights has none; None: reset_parameters()
    resume    the store has the values, unless begin() says that it has none"""

    def __init__(self, model: nn.Module, weights: Optional[Weights], init: Optional[Callable[[nn.Module], Any]], resume: bool) -> None:
        self._init = init
        self._weights = weights
        self._source = _Source(weights) if weights is not None and not resume else None
        self._names: Dict[int, List[str]] = {}  # of a tied parameter all
        self._owner: Dict[int, nn.Module] = {}
        self._empty: Set[int] = set()  # identities of parameters without values
        self._stored: Set[int] = set()  # of these, those whose values are in a store
        self._was: List[Tuple[nn.Module, str, nn.Parameter]] = []
        self.made: Set[int] = set()  # identities of parameters that were on meta
        new: Dict[int, nn.Parameter] = {}
        for prefix, module in model.named_modules():
            for name, p in list(module._parameters.items()):
                if p is None:
                    continue
                if p.device.type == 'meta' or withdrawn_to(p):
                    if id(p) not in new:
                        new[id(p)] = nn.Parameter(_untouched(p.shape, p.dtype), requires_grad=p.requires_grad)
                        self._empty.add(id(new[id(p)]))
                        self.made.add(id(new[id(p)]))
                    if withdrawn_to(p):
                        self._stored.add(id(new[id(p)]))
                    self._was.append((module, name, p))
                    module._parameters[name] = p = new[id(p)]
                self._names.setdefault(id(p), []).append(f'{prefix}.{name}' if prefix else name)
                self._owner.setdefault(id(p), module)

    def begin(self) -> None:
        """The store has no values although resume was asked for: the making of its model did not end."""
        if self._weights is not None:
            self._source = _Source(self._weights)
        self.check()

    def check(self) -> None:
        """ValueError: a parameter would get no values."""
        for i, names in self._names.items():
            name, owner = names[0], self._owner[i]
            if self._source:
                if not any(n in self._source for n in names):
                    raise ValueError(f'weights has no values for {" or ".join(names)}')
            elif i in self._stored:
                raise ValueError(f'{name} has no values since its optimizer was closed: pass resume=True for the root that has them, or weights=')
            elif i in self._empty and not self._init and not _reset_of(owner):
                raise ValueError(f'{name} is on the device meta, and {type(owner).__name__} has no reset_parameters(): pass weights=, or init=')

    def fill(self, p: torch.Tensor) -> None:
        if self._source:
            with torch.no_grad():
                self._source.copy_into(p, next(n for n in self._names[id(p)] if n in self._source))
        elif id(p) in self._empty:
            self._fill_module(self._owner[id(p)])
        self._empty.discard(id(p))

    def take_back(self) -> None:
        """The model as it was before."""
        for module, name, p in self._was:
            module._parameters[name] = p

    def _fill_module(self, module: nn.Module) -> None:
        """Values that a tied parameter has already stay."""
        own = [p for p in module._parameters.values() if p is not None]
        kept = [(p, p.data) for p in own if id(p) not in self._empty]
        for p, data in kept:
            p.data = torch.empty_like(data)
        try:
            with torch.no_grad():
                self._init(module) if self._init else _reset_of(module)()
        finally:
            for p, data in kept:
                p.data = data
        self._empty.difference_update(id(p) for p in own)


def _untouched(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Memory that goes back to the system when the tensor ends. That of PyTorch may come from the heap, which keeps pages in its middle,
    and would keep the whole model."""
    size = shape.numel() * torch.empty(0, dtype=dtype).element_size()
    if size < _MAPPED_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _reset_of(module: nn.Module) -> Any:
    return getattr(module, 'reset_parameters', None) or getattr(module, '_reset_parameters', None)  # the latter: MultiheadAttention


class _Source:
    """Tensors by name: safetensors (a file, or a folder with an index), a checkpoint of torch.save, or a mapping."""

    def __init__(self, weights: Weights) -> None:
        self._places: Dict[str, Tensor] = {}
        self._tensors: Mapping[str, torch.Tensor] = {}
        if isinstance(weights, Mapping):
            self._tensors = weights
            return
        path = os.fspath(weights)
        if os.path.isdir(path) or path.endswith('.safetensors'):
            for file in files_of(path):
                self._places.update((t.name, t) for t in read_header(file))
        else:
            self._tensors = _load(path)

    def __contains__(self, name: str) -> bool:
        return name in self._places or name in self._tensors

    def copy_into(self, p: torch.Tensor, name: str) -> None:
        if name in self._tensors:
            value = self._tensors[name]
        else:
            t = self._places[name]
            if t.dtype not in FLOATS:
                raise ValueError(f'{name} has the dtype {t.dtype} in {t.path}, which is none of {", ".join(FLOATS)}')
            value = torch.empty(t.shape, dtype=FLOATS[t.dtype])
            fd = os.open(t.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                read_bytes(fd, memory_of(value), t.at, t)
            finally:
                os.close(fd)
        if value.shape != p.shape:
            raise ValueError(f'{name} has the shape {tuple(p.shape)}, and {tuple(value.shape)} in weights')
        p.copy_(value)


def _load(path: str) -> Mapping[str, torch.Tensor]:
    """Mapped, where torch can (2.1 and newer): then nothing holds the whole checkpoint."""
    try:
        said = torch.load(path, map_location='cpu', mmap=True, weights_only=True)
    except TypeError:
        said = torch.load(path, map_location='cpu', weights_only=True)
    if not isinstance(said, Mapping) or not all(isinstance(t, torch.Tensor) for t in said.values()):
        raise ValueError(f'{path} is no state_dict: a mapping of names to tensors')
    return said
