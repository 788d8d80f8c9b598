# SPDX-License-Identifier: Apache-2.0
"""Hooks of an offloaded model: each module has its parameters when it needs them, in the memory that computes."""
import functools
import itertools
import os
import threading
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

import torch
from torch import nn

from hitrain._activations import Activations
from hitrain._compile import CompiledForward, not_compiled
from hitrain._early import Early
from hitrain._gate import when_backward_ends
from hitrain._mapped import MappedFile
from hitrain._microbatches import Turns, run_in_turns
from hitrain._residency import Residency, Unit
from hitrain._segments import Segments

# The optimizer of each offloaded model.
OPTIMIZERS: 'weakref.WeakKeyDictionary[nn.Module, weakref.ref[Hooked]]' = weakref.WeakKeyDictionary()


class Hooked(Early):
    _residency: Any  # Residency, once the model is attached
    _model: Callable[[], Optional[nn.Module]]  # as a weak reference, from then on
    _activations: Optional[Activations]
    _handles: List[Any]
    _own_apply: List[nn.Module]
    _on_device: bool  # the tensors
    _has_copies: bool  # parameters on the device
    _in_backward_of_device: bool

    def _attach_model(self, model: nn.Module, units: List[Tuple[str, nn.Module, List[nn.Parameter]]], keep: int) -> None:
        made = []
        for name, module, params in units:
            files = [f for f in (self._files.get(p) for p in params) if isinstance(f, MappedFile)]
            if files:
                made.append(Unit(name, module, files))
                made[-1].stays = self._copies is not None and not name
                for f in files:
                    self._units_of.setdefault(f, []).append(made[-1])
        mine, root = weakref.ref(self), self._root  # so that the last reference of the user ends it, on the user's thread

        def load(f: MappedFile) -> None:
            with root.explained(f'parameter {f.name}'):
                f.load()

        def is_final(f: MappedFile) -> bool:
            optimizer = mine()
            return optimizer is None or optimizer._is_final(f)
        self._residency, self._model = Residency(keep, made, load, is_final), weakref.ref(model)
        for unit in made:
            self._hook(mine, unit)
        for module in model.modules():
            module.__dict__['_apply'] = functools.partial(_apply_nothing, module, type(model).__name__)
            self._own_apply.append(module)
        if self._copies:
            self._attach_device(model)
        OPTIMIZERS[model] = mine

    def _hook(self, mine: 'weakref.ref[Hooked]', unit: Unit) -> None:
        def before(module: nn.Module, inputs: Any) -> None:
            optimizer = mine()
            if optimizer is not None and module is unit.module:
                optimizer._before_forward(unit)

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            optimizer = mine()
            if optimizer is None or module is not unit.module:
                return
            optimizer._residency.leave(unit)
            for t in _tensors(outputs):
                if t.requires_grad and t.grad_fn is not None:
                    t.register_hook(need)

        def need(grad: torch.Tensor) -> None:
            optimizer = mine()
            if optimizer is not None:
                optimizer._before_backward(unit)
        first = unit.module.register_forward_pre_hook(self._as_hook(before))
        _in_order(unit.module._forward_pre_hooks).move_to_end(first.id, last=False)  # hooks of others may use the parameters
        self._handles += [first, unit.module.register_forward_hook(self._as_hook(after))]

    def _compile(self, blocks: Iterable[nn.Module], options: Dict[str, Any]) -> None:
        self._handles += [CompiledForward(block, options) for block in blocks]

    def _as_hook(self, call: Callable[..., Any]) -> '_Hook':
        return _Hook(call, self.root)

    def _before_forward(self, unit: Unit) -> None:
        recomputed = _in_backward()
        if self._turns:
            self._stop(self._turns, f'the {"recomputed " if recomputed else ""}forward of {unit.name or "the model"}')
        for f in unit.files:
            if self._is_final(f):
                raise RuntimeError(f'{unit.name or "the model"} runs again after the gradient of {f.name} was sent, and the store may have '
                                   'updated it: call step() before, or pass accumulate=')
        owned = {id(p) for p in unit.module.parameters()}
        for f in unit.files:
            if id(f.tensor) not in owned:
                raise RuntimeError(f'{f.name} of the offloaded model was replaced by another tensor: change its values in place')
            if os.getpid() == self._pid:
                f.attach()
        self._use_device()
        self._in_backward_of_device &= recomputed
        self._residency.enter(unit, recomputed=recomputed, counts=not self._turns or self._turns.is_first)
        self._wait_for_copies(unit)

    def _before_backward(self, unit: Unit) -> None:
        if self._residency.is_closed:
            if self._copies:
                raise RuntimeError(f'backward of {unit.name or "the model"} runs after close(), and the weights of its graph are on the device no more')
            return  # the graph has its weights in memory
        if self._turns:
            self._stop(self._turns, f'the backward of {unit.name or "the model"}')
        self._use_device()
        if self._copies and not self._turns and not self._in_backward_of_device:  # and not in one within it, as of torch.utils.checkpoint
            self._in_backward_of_device = True
            when_backward_ends(self._device_backward_ended)
        self._residency.need(unit)
        self._wait_for_copies(unit)

    # -- a device --

    def _attach_device(self, model: nn.Module) -> None:
        """Tensors are on the device in the forward and the backward of the model only: elsewhere they may have no memory there. After a
        forward, backward needs the copies that are there."""
        mine, device = weakref.ref(self), self._copies.device  # type: ignore[union-attr]

        def rest(*unused: Any) -> None:
            optimizer = mine()
            if optimizer is not None:
                optimizer._rest()

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            optimizer = mine()
            if optimizer is not None and module is model_of():
                optimizer._rest(keep_copies=torch.is_grad_enabled())
        model_of = weakref.ref(model)
        for f in self._mapped():
            f.register()  # type: ignore[attr-defined]
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
            self._handles.append(module._register_load_state_dict_pre_hook(self._as_hook(rest)))
            self._handles.append(module.register_state_dict_pre_hook(self._as_hook(rest)))
        self._handles.append(model.register_forward_hook(self._as_hook(after), always_call=True))

    def _use_device(self) -> None:
        if not self._copies:
            return
        self._copies.refuse_capture()
        if not self._on_device:
            self._on_device = self._has_copies = True
            for f in self._mapped():
                f.use()  # type: ignore[attr-defined]
            for unit in self._residency.load_staying():
                self._wait_for_copies(unit)
            self._residency.load_again()

    def _wait_for_copies(self, unit: Unit) -> None:
        if self._copies:
            for f in unit.files:
                with self._root.explained(f'parameter {f.name}'):
                    f.ready()  # type: ignore[attr-defined]

    def _device_backward_ended(self) -> None:
        self._in_backward_of_device = False
        self._rest()

    def _rest(self, discard: bool = False, keep_copies: bool = False) -> None:
        """All tensors are in the memory of the CPU. One whose values cannot be taken from the device stays, and keeps no other there."""
        if not (self._on_device if keep_copies else self._has_copies):
            return
        errors = []
        for f in self._mapped():
            try:
                f.rest(discard, keep_copies)  # type: ignore[attr-defined]
            except RuntimeError as e:
                errors.append(e)
        if errors:
            raise errors[0]
        self._on_device, self._has_copies = False, keep_copies

    # -- activations and micro-batches --

    def _save_activations(self, model: nn.Module, keep: Union[int, str]) -> None:
        outside = os.path.dirname(self.root)
        folder = outside if os.stat(outside).st_dev == os.stat(self.root).st_dev else self.root
        stay = itertools.chain(model.parameters(), model.buffers())
        with self._root.explained('activations'):
            saved = self._activations = Activations(folder, keep, stay, self._copies)
        own = _Entered()

        def before(module: nn.Module, inputs: Any) -> None:
            if module is model:
                own.entered.append(torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack))
                own.entered[-1].__enter__()

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if module is model and own.entered:
                own.entered.pop().__exit__(None, None, None)
        first = model.register_forward_pre_hook(self._as_hook(before))
        _in_order(model._forward_pre_hooks).move_to_end(first.id, last=False)
        self._handles += [first, model.register_forward_hook(self._as_hook(after), always_call=True)]

    def _run_microbatches(self, model: nn.Module, batches: List[Any], loss_fn: Callable[[nn.Module, Any], torch.Tensor]) -> List[torch.Tensor]:
        if self._turns:
            raise RuntimeError('microbatches() runs already')
        self._check_usable()
        turns = self._turns = self._segments_of(len(batches)) if self._copies else Turns(len(batches))
        cuts = [u.module.register_forward_pre_hook(functools.partial(_cut, turns, u), with_kwargs=True)
                for u in self._residency.units if not u.stays] if isinstance(turns, Segments) else []

        def loss_of(batch: Any) -> torch.Tensor:
            self._note_turn(turns)
            return loss_fn(model, batch)

        def backward(loss: torch.Tensor) -> None:
            turns.stop('the end of the forward')
            loss.backward()
        try:
            if isinstance(turns, Segments):
                losses = run_in_turns(turns, batches, loss_of, turns.ends, self._copies.as_here())  # type: ignore[union-attr]
                self._backward_ended()
                self._device_backward_ended()
                return losses
            return run_in_turns(turns, batches, loss_of, backward)
        finally:
            self._turns = None
            for hook in cuts:
                hook.remove()
            if self._activations:
                self._activations.turn = (0, 0)

    def _segments_of(self, count: int) -> Segments:
        device = self._copies.device  # type: ignore[union-attr]
        blocks = {id(f.tensor): units[0].name for f, units in self._units_of.items() if len(units) == 1 and not units[0].stays}
        return Segments(count, device, list(self._files), blocks, lambda p: self._gradient_arises(self._files[p]))

    def _stop(self, turns: Turns, place: str) -> None:
        turns.stop(place)
        self._note_turn(turns)

    def _note_turn(self, turns: Turns) -> None:
        if self._activations:
            self._activations.turn = (turns.round, turns.turn or 0)


def _cut(turns: Segments, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return turns.cut(unit.name, args, kwargs) if module is unit.module and not _in_backward() else None


class _Hook:
    """A hook of an offloaded model, which copy.deepcopy() leaves as it is, and no pickle can hold."""

    def __init__(self, call: Callable[..., Any], root: str) -> None:
        self._call, self._root = not_compiled(call), root

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> '_Hook':
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f'an offloaded model cannot be pickled, as its parameters are in {self._root}: save model.state_dict(), or call '
                        'hitrain.checkpoint.export_safetensors()')


class _Entered(threading.local):
    """Contexts of a thread's forward of the model."""

    def __init__(self) -> None:
        self.entered: List[Any] = []


def _in_backward() -> bool:
    current = getattr(torch._C, '_current_graph_task_id', None)
    return current is not None and current() != -1


def _in_order(hooks: Any) -> Any:
    """An OrderedDict, which PyTorch types as a dict."""
    return hooks


def _tensors(outputs: Any) -> Iterable[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from _tensors(value)
    elif hasattr(outputs, '__dataclass_fields__'):
        yield from _tensors(vars(outputs))


def _apply_nothing(module: nn.Module, model: str, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """to(), half(), cuda() and the like: whatever changes no parameter."""
    for name, p in module._parameters.items():
        if p is not None:
            probe = torch.empty(0, dtype=p.dtype)
            changed = change(probe)
            if changed.dtype != p.dtype or changed.device != p.device:
                raise RuntimeError(f'the parameters of this {model} lie in a store, as {p.dtype} for the {p.device}: convert the model before '
                                   f'offload(). {name} would become {changed.dtype} on {changed.device}')
    for child in module.children():
        child._apply(change)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module
