# SPDX-License-Identifier: Apache-2.0
"""When may the gradient of an offloaded weight leave? The store may then update the weight, in the memory that graphs of the program use.

A gradient that starts the update leaves in backward if nothing but the parameter itself refers to the weight's memory. What can still need the
old values refers to it: a graph that is kept, a detached use earlier in the model, a view in a custom autograd function, a tensor that
torch.utils.checkpoint has recomputed. PyTorch counts these references, for the tensor and for its storage. A node of a graph gives its own back
before the gradient arises, so an ordinary backward sends each gradient at once. Another gradient waits for step().

Afterwards the parameter itself is the only way to the memory. So it is sealed until step() ends: its use raises an error that names the way out.
Functions of C that ask no override, as torch.tensor(weight), would go on without that error. So a sealed weight has other memory, of NaNs.
A weight that has no memory any more, because its optimizer was closed, is withdrawn in the same way.
"""
import ctypes
import functools
import sys
import threading
import weakref
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import nn

_COUNT_AT = 8  # of c10::intrusive_ptr_target: behind the pointer to its virtual functions
_OWN_REFERENCES = 2  # of a parameter's tensor: by Python, and by the node that accumulates its gradient
_METADATA = {'grad', '_version', '_cdata', 'shape', 'dtype', 'device', 'layout', 'requires_grad', 'is_leaf', 'grad_fn', 'is_sparse', 'ndim', 'is_cuda',
             'is_meta', 'is_cpu', 'is_mps', 'is_xpu', 'is_mkldnn', 'is_nested', 'is_quantized', 'is_sparse_csr', 'itemsize', 'name', 'names', 'nbytes',
             'output_nr', 'retains_grad', '_backward_hooks'}
_HARMLESS = {'__hash__', '__len__', 'numel', 'nelement', 'size', 'dim', 'ndimension', 'stride', 'element_size', 'storage_offset', 'is_contiguous',
             'get_device', 'is_floating_point', 'is_complex', 'is_shared', 'is_inference', 'register_hook', 'requires_grad_',
             'register_post_accumulate_grad_hook'}
_OF_SHAPE = {'stride', 'is_contiguous'}  # of the weight itself, which is contiguous, and not of the NaNs that it has meanwhile
_FORWARD = {'forward', '_call_impl'}
_ENGINE = {'torch.autograd', 'torch.autograd.graph'}  # the modules whose functions call backward's engine
_without_overrides = getattr(torch._C, 'DisableTorchFunctionSubclass', torch._C.DisableTorchFunction)


def storage_of(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage() if hasattr(tensor, 'untyped_storage') else tensor.storage().untyped()  # the latter: PyTorch 1.13


def references(thing: Any) -> int:
    """To a tensor or a storage, as PyTorch counts them. The first 32 bits are the count in all versions that have been seen."""
    return ctypes.c_uint32.from_address(thing._cdata + _COUNT_AT).value


_known: List[bool] = []


def can_count() -> bool:
    """Is the count where it is expected to be? A no may be due to the place of the call, as within hooks of saved tensors."""
    if not _known and _counts_as_expected():
        _known.append(True)
    return bool(_known)


def _counts_as_expected() -> bool:
    """It is tried with a backward whose graph ends, with one whose graph is kept, and with a view."""
    p = nn.Parameter(torch.ones(2))
    storage, seen = storage_of(p.detach()), []

    def note(*unused: Any) -> None:
        seen.append((references(p), references(storage)))
    with torch.inference_mode(False), torch.enable_grad():
        if hasattr(p, 'register_post_accumulate_grad_hook'):
            handle = p.register_post_accumulate_grad_hook(note)
        else:
            node: Any = p.expand_as(p).grad_fn
            handle = node.next_functions[0][0]
            handle.register_hook(note)
        first = references(storage)
        (p * p).sum().backward()
        kept = (p * p).sum()
        kept.backward(retain_graph=True)
        del kept
        view = p.detach()
        (p * p).sum().backward()
        del view
    return seen == [(2, first), (4, first), (2, first + 1)] and references(storage) == first


def end_failed_backwards() -> None:
    """A backward that raised leaves its nodes in the queue of its thread, and these keep the graph. Any backward of this thread takes them out first."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device='cpu', requires_grad=True).clone().backward()


class Memory:
    """The memory of a weight, of which its owner has these tensors, beside the parameter itself. They are counted when they are made."""

    def __init__(self) -> None:
        self._storages: List[Any] = []
        self._own = 0
        can_count()  # outside of any backward

    def add(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        self._storages.append(storage)
        self._own += references(storage)

    def is_used(self, parameter: torch.Tensor, has_it: bool = True) -> bool:
        """By others than the owner? Where it cannot be known: yes. has_it: it is the memory of the parameter, too."""
        if not can_count() or references(parameter) > _OWN_REFERENCES:
            return True
        return sum(references(s) for s in self._storages) != self._own - (not has_it)


class _Sealed:
    """A parameter of this kind has its metadata and its gradient, and no values."""

    _why = ('is used after its gradient was sent, and the store may have updated it. Use it before backward() or after step(), or run backward() in '
            '`with optimizer.hold_gradients():`')
    _shown = 'whose gradient was sent to the store'

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        word = func.__name__
        if word in ('__get__', '__set__', '__delete__'):
            place = func.__self__.__name__
            allowed = place in _METADATA or (place == 'data' and word == '__set__')  # new values are refused by step(), by name
        else:
            allowed = word in _HARMLESS
        if allowed:
            with _without_overrides():
                asked = (torch.empty(args[0].shape, device='meta'), *args[1:]) if word in _OF_SHAPE else args
                return func(*asked, **(kwargs or {}))
        name = _name_in([*args, *(kwargs or {}).values()])
        if word in ('__repr__', '__format__'):
            return f'<the weight {name}, {cls._shown}>'
        raise RuntimeError(f'{name} {cls._why}')


class _Withdrawn(_Sealed):
    """For good. Other memory ends that."""

    _why = ('is used after its optimizer was closed, and has values in the store alone: hitrain.materialize() returns a copy, and '
            'hitrain.offload(resume=True) continues')
    _shown = 'whose values are in the store'

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        said = super().__torch_function__(func, types, args, kwargs)
        if func.__name__ == '__set__' and func.__self__.__name__ == 'data':
            unseal(args[0])
        return said


def _name_in(args: Any) -> str:
    for a in args:
        if isinstance(a, _Sealed):
            return str(a.__dict__['_sealed_name'])
        found = _name_in(a) if isinstance(a, (list, tuple)) else ''
        if found:
            return found
    return ''


@functools.lru_cache(maxsize=None)
def _sealed_class(kind: type, seal_of: type) -> type:
    return type(f'{seal_of.__name__[1:]}{kind.__name__}', (seal_of, kind), {})


def is_sealed(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, _Sealed)


def seal(parameter: torch.Tensor, name: str, seal_of: type = _Sealed) -> None:
    if not isinstance(parameter, seal_of):
        kind = type(parameter).__bases__[1] if isinstance(parameter, _Sealed) else type(parameter)
        parameter.__dict__['_sealed_name'] = name
        parameter.__class__ = _sealed_class(kind, seal_of)


def unseal(parameter: torch.Tensor) -> None:
    if isinstance(parameter, _Sealed):
        parameter.__class__ = type(parameter).__bases__[1]
        del parameter.__dict__['_sealed_name']
        parameter.__dict__.pop('_sealed_root', None)


class Nothing:
    """What a weight has in the place of its memory: as many NaNs, which all lie in one place."""

    known: 'weakref.WeakValueDictionary[int, Nothing]' = weakref.WeakValueDictionary()  # by address

    def __init__(self, like: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._one = torch.full((), float('nan'), dtype=like.dtype, device=like.device)
            self._all = self._one.expand(like.shape)
        self.device, self._address = like.device, self._one.data_ptr()
        Nothing.known[self._address] = self

    def give(self, parameter: torch.Tensor) -> None:
        self._one.fill_(float('nan'))  # who got it from another weight may have written there
        give_memory(parameter, self._all)

    def is_of(self, parameter: torch.Tensor) -> bool:
        with _without_overrides():
            return parameter.data_ptr() == self._address


def give_memory(parameter: torch.Tensor, memory: torch.Tensor) -> None:
    """Also to one that is sealed."""
    with _without_overrides():
        parameter.data = memory


def withdraw(parameter: torch.Tensor, root: str, name: str) -> None:
    """The parameter has no values from now on, but in this file. Graphs that have saved it are void: the version counter shows it. It is
    sealed first, as another thread may use it."""
    parameter.__dict__['_sealed_root'] = root
    seal(parameter, name, _Withdrawn)
    nothing = Nothing(parameter)
    with torch.no_grad(), _without_overrides():
        parameter.view(-1)[:0].zero_()
    nothing.give(parameter)


def withdrawn_to(parameter: torch.Tensor) -> Optional[Tuple[str, str]]:
    """The root and the name of the file with the values of a parameter that has none here."""
    return (parameter.__dict__['_sealed_root'], parameter.__dict__['_sealed_name']) if isinstance(parameter, _Withdrawn) else None


def use_by_another_thread(model: nn.Module, backward: bool) -> str:
    """A forward of the model, or a backward of any, that another thread runs now; '' if none does. An operator may compute with the memory of a
    weight without a reference to it."""
    modules, running = {id(m) for m in model.modules()}, sys._current_frames()
    for thread in threading.enumerate():
        frame = running.get(thread.ident or 0) if thread is not threading.current_thread() else None
        while frame is not None:
            if backward and frame.f_globals.get('__name__') in _ENGINE:
                return f'a backward runs in the thread {thread.name}'
            if frame.f_code.co_name in _FORWARD and id(frame.f_locals.get('self')) in modules:
                return f'the forward of a {type(frame.f_locals["self"]).__name__} runs in the thread {thread.name}'
            frame = frame.f_back
    return ''


def when_backward_ends(call: Callable[[], None]) -> None:
    """For hooks of a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
