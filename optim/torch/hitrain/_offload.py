# SPDX-License-Identifier: Apache-2.0
"""Train what does not fit: parameters lie in the store, and are in memory while a block needs them.

docs/offload.md describes it for users; _mapped.py has the memory of a parameter and _residency.py the order."""
import contextlib
import errno
import functools
import itertools
import os
import sys
import threading
import warnings
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Type, Union

import torch
from torch import nn

from hitrain import optim
from hitrain._activations import Activations
from hitrain._available import available_bytes
from hitrain._device import Copies, DeviceFile, gpu_of
from hitrain._empty import Filler, Weights, init_empty
from hitrain._files import ParameterFile
from hitrain._gate import end_failed_backwards, use_by_another_thread, withdrawn_to
from hitrain._mapped import MappedFile, can_be_mapped
from hitrain._memory import check_apart
from hitrain._microbatches import Turns, run_in_turns
from hitrain._optimizer import Optimizer
from hitrain._packs import Place
from hitrain._parts import is_dtensor
from hitrain._reduce import BUCKET_BYTES, check_group, take_means
from hitrain._residency import Residency, Unit
from hitrain._root import GONE, Root
from hitrain.distributed import RankFailed, Shard

__all__ = ['init_empty', 'materialize', 'microbatches', 'offload']

RULES: Dict[str, Type[Optimizer]] = {c.rule: c for c in (optim.AdamW, optim.Adam, optim.SGD, optim.Lion, optim.Adagrad)}
REFUSED = {
    'overlap': 'gradients always leave in backward',
    'param_dtype': "files have the parameters' own dtype: convert the model first, as with model.bfloat16()",
    'parts': 'each file is the memory of a whole parameter',
    'pack': 'each file is the memory of one parameter',
    'names': 'files have the names of the model',
    'topk': 'a residual in memory is as large as the model',
}


def offload(model: nn.Module, root: 'os.PathLike[str] | str', optimizer: Union[str, Type[Optimizer]] = 'adamw', *, keep: int,
            blocks: Optional[Iterable[nn.Module]] = None, weights: Optional[Weights] = None,
            init: Optional[Callable[[nn.Module], Any]] = None, params: Union[None, Iterable[Any], Callable[[nn.Module], Iterable[Any]]] = None,
            resume: bool = False, activations: Union[None, int, str] = None, device: Union[None, str, torch.device] = None,
            shard: Optional[Shard] = None, group: Any = None, **options: Any) -> Optimizer:
    """Moves the parameters of a model into the store, in place, and returns their optimizer. The loop of training stays as it is.

    keep      bytes of parameters that are in memory at a time. Two blocks at least let one be read while the other computes
    optimizer adamw, adam, sgd, lion or adagrad, or a class of hitrain.optim
    blocks    modules that are loaded as a whole; default: the children of each outermost ModuleList. Other modules
              are loaded one by one
    weights   values of the parameters: a safetensors file or a folder of them, a checkpoint of torch.save, or a mapping of
              names to tensors. Default: those that the model has. A model of init_empty() has none: then each module's own
    init      gives one module of init_empty() its values; default: its reset_parameters()
    params    groups as for an optimizer of PyTorch, or a function that makes them of the model; default: all. Other
              parameters that do not train are offloaded, too; other ones stay in memory
    resume    the values are in the store already, and the model may be one of init_empty()
    activations  bytes of tensors saved for backward that stay in memory; older ones go to the store. 'auto': as many as the store cannot
              take in the time of the forward. Default: all stay. Needs PyTorch 2
    device    a GPU that computes: `keep` bytes of parameters are loaded there, with all that are outside blocks. Buffers go there. The model
              itself is given in the memory of the CPU, or as one of init_empty(). Default: the CPU computes
    shard     this process is one of several, each of which offloads the same model to the same root and runs batches of its own. A step
              has the mean of their gradients. All ranks call backward(), step() and zero_grad() alike
    group     with a shard: the process group of its ranks, which takes tensors of the CPU; default: that of all processes
    options   those of the optimizer, as lr, accumulate, max_grad_norm or async_step"""
    for name, why in REFUSED.items():
        if options.get(name):
            raise TypeError(f'offload() takes no {name}: {why}')
    kind: Any = RULES.get(optimizer) if isinstance(optimizer, str) else optimizer
    if kind is None or not issubclass(kind, Optimizer):
        raise ValueError(f'there is no optimizer {optimizer}: use {", ".join(RULES)}, or a class of hitrain.optim')
    if activations is not None and not (activations == 'auto' or isinstance(activations, int) and activations >= 0):
        raise ValueError(f"activations must be a number of bytes or 'auto', not {activations}")
    if activations is not None and not hasattr(torch, 'compiler'):
        raise ValueError(f'activations= needs PyTorch 2.1 or newer, and this is {torch.__version__}')
    if shard and shard.world > 1:
        check_group(shard, group)
    copies = _copies_of(device, keep, activations)
    _check_model(model)
    filler = Filler(model, weights, init, resume)
    try:
        if not resume:
            filler.check()
        units = _units(model, None if blocks is None else list(blocks), copies is not None)
        (_check_keep_of_device if copies else _check_keep)(model, units, keep)
        groups = list(params(model) if callable(params) else params or model.named_parameters())
        groups = _with_frozen(model, groups)
        made = _class_of(kind)(model, groups, root, units, keep, filler, group, copies, resume=resume, shard=shard if shard and shard.world > 1 else None, **options)
    except BaseException:
        filler.take_back()
        raise
    if activations is not None:
        try:
            made._save_activations(model, activations)
        except BaseException:
            made.close()
            raise
    return made


def materialize(model: nn.Module, names: Iterable[str]) -> Dict[str, torch.Tensor]:
    """Copies of single parameters, in memory of their own, by name. Of a weight that has no values since close(), what its file has.
    KeyError: the model has none of that name."""
    known = _OPTIMIZERS.get(model)
    optimizer = known() if known else None
    if optimizer is not None:
        optimizer._rest()
    held = {f'{prefix}.{name}' if prefix else name: p for prefix, module in model.named_modules() for name, p in module._parameters.items()}
    return {name: _read_withdrawn(held[name]) if withdrawn_to(held[name]) else held[name].detach().clone() for name in names}


def microbatches(model: nn.Module, batches: Iterable[Any], loss_fn: Callable[[nn.Module, Any], torch.Tensor]) -> List[torch.Tensor]:
    """Forward and backward of several batches of one step, in vertical order: each block gets all batches before the next block is
    loaded. Returns the losses, without their graphs, when all gradients are there.

    loss_fn(model, batch) returns the loss of one batch. docs/offload.md says what is equal to the usual order."""
    known = _OPTIMIZERS.get(model)
    optimizer = known() if known else None
    if optimizer is None:
        raise ValueError(f'microbatches() takes a model of offload() whose optimizer is open, and this {type(model).__name__} is none')
    if not torch.is_grad_enabled():
        raise RuntimeError('microbatches() runs backward, and gradients are disabled here')
    listed = list(batches)
    if not listed:
        raise ValueError('microbatches() needs at least one batch')
    return optimizer._run_microbatches(model, listed, loss_fn)


class Offloaded(Optimizer):
    """An optimizer of this kind steers the parameters of one model in memory, too.

    close() releases files, hooks and mappings. Weights have their values in memory of the process then, if all fit into half of what is available;
    else their use raises. What views and graphs refer to stays at its address, with its values. If these do not fit, close() raises, and leaves
    them mapped. So it does if weights do not fit while another thread runs a forward of the model or a backward. An operator on such a weight that another
    thread runs outside of these ends the process with SIGSEGV. It never computes with other values.

    With a shard the mappings of all ranks are one memory. Gradients are collected in a bucket, in which ranks reduce them together."""

    _reduces = True
    _under = 'offload() does not work under {}: it reduces gradients after backward has sent them. Pass shard= to offload() instead'

    def __init__(self, model: nn.Module, params: Iterable[Any], root: 'os.PathLike[str] | str', units: List[Tuple[str, nn.Module, List[nn.Parameter]]],
                 keep: int, filler: Filler, group: Any, copies: Optional[Copies], *args: Any, resume: bool = False, **options: Any) -> None:
        self._filler = filler
        self._fill: Optional[Callable[[torch.Tensor], None]] = None if resume else filler.fill
        self._was_empty = filler.made
        self._residency: Any = None  # Residency, once the model is attached
        self._model: Callable[[], Optional[nn.Module]] = lambda: None  # as a weak reference, from then on
        self._activations: Optional[Activations] = None
        self._handles: List[Any] = []
        self._own_apply: List[nn.Module] = []
        self._units_of: Dict[ParameterFile, List[Unit]] = {}
        self._left: Dict[ParameterFile, None] = {}  # whose gradients of this step were sent
        self._turns: Optional[Turns] = None  # of micro-batches, while they run
        self._group = group
        self._copies = copies  # of a GPU
        self._on_device = self._has_copies = False  # the tensors; and parameters on the device
        self._in_backward_of_device = False
        self._bucket: Dict[ParameterFile, None] = {}  # whose gradients are to be reduced, or on their way from the device
        self._originals: List[Tuple[torch.Tensor, torch.Tensor]] = []  # with a shard, until all ranks have the model
        super().__init__(params, root, *args, overlap=True, resume=resume, **options)
        self._originals = []
        self._fill = None  # `weights` need not stay in memory
        del self._filler
        for f in self._mapped():
            f._fill = None
        try:
            self._attach_model(model, units, keep)
        except BaseException:
            self.close()
            raise

    # -- the interface of the model --

    def figures(self) -> Dict[str, Any]:
        """held_bytes and held_bytes_max of parameters in memory, loaded_bytes since the beginning, and waited_seconds for
        loads that were not ahead. ahead: how many uses are loaded ahead at most, where there is room. 'activations': see
        Activations.figures()."""
        said = self._residency.figures() if self._residency else {}
        if self._activations:
            said['activations'] = self._activations.figures()
        return said

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        if self._built:
            raise RuntimeError('an offloaded model gets all of its parameters in offload(): no group can be added later')
        super().add_param_group(param_group)

    def read_ahead(self, model: nn.Module) -> None:
        raise RuntimeError('an offloaded model is read ahead already')

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients of an unfinished step are taken back from the store, too."""
        super().zero_grad(set_to_none=set_to_none)
        for f in self._bucket:  # which no step has got
            if isinstance(f, MappedFile) and not self._is_final(f):
                f.unseal()
        self._bucket = {}
        if self._copies:
            self._forget_backward()
        if self._begun:
            finished = self._step
            self._go_back(wholly=False)
            if self._step < finished:
                warnings.warn(f'zero_grad() within a step: {self.root} went back from step {finished} to its durable step {self._step}',
                              RuntimeWarning, stacklevel=2)

    def _forget_backward(self) -> None:
        """One that raised has left parameters on the device, and gradients that were fetched from it."""
        for f in self._mapped():
            f.forget_gradient()  # type: ignore[attr-defined]
        if self._on_device:
            self._rest()

    def receive_parameter(self, parameter: torch.Tensor) -> None:
        f = self._files[parameter]
        if isinstance(f, MappedFile):
            f.read()  # its use loads it
        else:
            super().receive_parameter(parameter)

    def close(self, why: str = 'has closed its optimizer') -> None:
        for model in [m for m, known in _OPTIMIZERS.items() if known() in (self, None)]:
            del _OPTIMIZERS[model]
        for handle in self._handles:
            handle.remove()
        for module in self._own_apply:
            module.__dict__.pop('_apply', None)
        self._handles, self._own_apply = [], []
        try:
            if self._residency:
                self._residency.close()
            if os.getpid() == self._pid:
                self._rest()
            if self._activations:
                self._activations.close()
        finally:
            super().close(why)

    def _forsake(self) -> None:
        super()._forsake()
        if self._activations:
            self._activations.close()

    def _detach_all(self) -> None:
        files = [] if self._leaves_mappings else [f for f in self._mapped() if f.is_mapped]
        if files and os.getpid() == self._pid:  # a forked child may have no backward
            end_failed_backwards()
        room = available_bytes() // (2 * self._ranks.world) if files else 0
        keeps_all = not self._ends and sum(f.bytes for f in files) <= room
        model = self._model()
        if files and model is not None and not keeps_all and not self._ends:
            user = use_by_another_thread(model, backward=self._residency.in_backward)
            if user:
                _raise_or_warn(f'the store stays mounted: {user}, and weights that it uses do not fit into memory. Let it end and call close() again')
                return
        refused: List[Tuple[str, OSError]] = []
        for f in files:
            try:
                room -= self._detach(f, keeps_all, room)
            except OSError as e:
                refused.append((f.name, e))
        if refused and not self._ends:
            name, error = refused[0]
            _raise_or_warn(f'the store stays mounted: something still refers to the memory of {name}{f" and {len(refused) - 1} others" if refused[1:] else ""}, '
                           f'as views, graphs and tracebacks do, and {error}. Delete these and call close() again', error)

    def _detach(self, f: MappedFile, keeps: bool, room: int) -> int:
        """Returns how many bytes of memory that took. OSError: it stays as it is."""
        unsettled = f.is_sealed and (self._open or not self._ranks.leads or os.getpid() != self._pid)  # its step is not over
        shared = f.is_shared()
        if shared and f.bytes > room:
            raise OSError(errno.ENOMEM, f'{f.bytes} bytes are too much for half of the memory that is available')
        try:
            f.detach(keeps_values=(shared or keeps) and not unsettled)
        except OSError:
            if shared:
                raise
            f.detach(keeps_values=False)
        return f.bytes if shared or keeps else 0

    # -- files --

    def _open_root(self) -> bool:
        if self._async and self._root.passes_through:
            raise ValueError('offload() takes no async_step on a mount with passthrough: parameters would change while forward reads them')
        anew = super()._open_root()
        if anew and not self._fill:
            self._filler.begin()
            self._fill = self._filler.fill
        return anew

    def _file_of(self, name: str, p: torch.Tensor, dtype: torch.dtype, grad_dtype: torch.dtype, part: Any) -> ParameterFile:
        if not can_be_mapped(p):
            if self._fill:
                self._fill(p)
            if self._copies and self._shard:
                raise ValueError(f'{name} is not contiguous, so it would stay on the device: offload() takes no shard= with device= then')
            if self._copies:
                p.data = p.data.to(self._copies.device)
            return super()._file_of(name, p, dtype, grad_dtype, part)
        if self._shard:
            self._originals.append((p, p.data))
        if self._copies:
            return DeviceFile(self._copies, self.root, name, p, grad_dtype, self._fill)
        return MappedFile(self.root, name, p, grad_dtype, self._fill)

    def _attach_empty(self, f: ParameterFile) -> None:
        if self._fill:
            self._fill(f.tensor)
        if self._copies:
            f.tensor.data = f.tensor.data.to(self._copies.device)
        super()._attach_empty(f)

    def _packs_of(self, own: Dict[str, torch.Tensor], group_of: Dict[str, int]) -> Dict[str, List[Place]]:
        packs = super()._packs_of(own, group_of)
        for pack, places in packs.items():
            raise ValueError(f'{self.root}/{pack} holds {len(places)} parameters, and an offloaded model needs a file for each: '
                             'copy the model with export_safetensors() and import_safetensors()')
        return packs

    def _mapped(self) -> List[MappedFile]:
        return [f for f in self._parameter_files() if isinstance(f, MappedFile)]

    def _undo(self) -> None:
        """The files go away, so the tensors take their values back. A model that was on meta has none, and need not fit."""
        for p, data in self._originals:  # not from the files, which rank 0 may take away at this moment
            p.data = data
        for f in self._mapped():
            try:
                f.detach(keeps_values=id(f.tensor) not in self._was_empty)
            except OSError:
                pass  # the values are as gone as the store
        super()._undo()

    def _push_changed(self) -> None:
        self._flush()
        super()._push_changed()

    def _flush(self) -> None:
        for f in self._mapped():
            with self._root.explained(f'parameter {f.name}, changed outside step()'):
                f.flush()

    # -- steps --

    def _offer(self, ends: bool) -> Dict[str, Any]:
        if self._shard or self._copies:
            self._bucket.update((f, None) for f in self._parameter_files() if f.has_gradient())  # of blocks that run twice
            self._send_bucket()
        if not ends:
            self._refuse_needed(self._parameter_files())
        return super()._offer(ends)

    def _end_step(self) -> None:
        self._note_open()
        super()._end_step()

    def _note_open(self) -> None:
        if self._shard and self._ranks.leads and not self._open:
            self._open = self._root.number('step_open')

    def _begin(self, changed: List[ParameterFile]) -> None:
        if not self._begun:
            self._flush()
        super()._begin(changed)

    def _begin_at(self, step: int) -> None:
        super()._begin_at(step)
        left, self._left = self._left, {}
        self._bucket = {}
        self._rest()
        if self._residency:
            self._residency.step_ended(lambda f: f in left)

    def _restore(self, wholly: bool, unread: bool, begun: bool) -> Dict[str, Any]:
        with contextlib.suppress(OSError):  # of a dead mount
            for f in self._mapped():
                f.flush_pages()  # what the kernel has not written yet would come to the store after the abort
        return super()._restore(wholly, unread, begun)

    def _read_back(self, reread: bool, made: Iterable[str] = ()) -> List[str]:
        self._left.update(dict.fromkeys(self._parameter_files()))  # on all ranks
        self._rest(discard=True)
        return super()._read_back(reread, made)

    def _gradient_ready(self, f: ParameterFile) -> None:
        if any(u.calls > 1 for u in self._units_of.get(f, ())):
            return  # backward may add to it: step() sends it
        if self._turns and not self._turns.is_last and not self._holding:
            self._check_room(f)
            return  # other micro-batches will add to it
        if self._holding or f.tensor.grad is None:
            return
        if f.tensor.grad.requires_grad:
            raise RuntimeError(f'backward(create_graph=True) keeps the gradient of {f.name} for another backward, but an offloaded model '
                               'sends gradients as they arise: wrap all backwards but the last in hold_gradients()')
        with self._whole_step():
            self._refuse_reducers()  # which refer to weights, too
            self._check_room(f)
        if self._is_needed(f):
            return  # step() sends it
        if self._shard or self._copies:
            self._collect(f)
            return
        sent = f.sent
        super()._gradient_ready(f)
        if f.sent > sent:
            f.clear_gradient()

    def _collect(self, f: ParameterFile) -> None:
        with self._whole_step():
            f.check_gradient()
            self._seal(f)
            if isinstance(f, DeviceFile):
                f.fetch_gradient()
            self._bucket[f] = None
            self._send_bucket(BUCKET_BYTES)
        _when_backward_ends(self._backward_ended)

    def _backward_ended(self) -> None:
        with self._whole_step():
            self._send_bucket()

    def _send_bucket(self, most: int = 0) -> None:
        """Sends the oldest gradients that exceed so many bytes; with a shard all, when they do."""
        held = sum(f.tensor.numel() * f.tensor.element_size() for f in self._bucket)
        if self._shard:
            if held >= most:
                self._send_together()
            return
        for f in list(self._bucket):
            if held < most:
                return
            held -= f.tensor.numel() * f.tensor.element_size()
            del self._bucket[f]
            if f.has_gradient():
                self._send_whole(f)
                f.clear_gradient()

    @torch.no_grad()
    def _send_together(self) -> None:
        """All ranks reduce the same gradients. All have left the meeting before any of their parts is sent, so the parts of a gradient
        are there before those of the next gradient of the parameter, and before the end of the step."""
        files, self._bucket = [f for f in self._bucket if f.has_gradient()], {}
        if not files:
            return

        def offer() -> Dict[str, Any]:
            self._check_usable()
            facts: Dict[str, Any] = {'gradients': [f.name for f in files], 'changed': ''}
            if not self._begun:
                for f in self._mapped():
                    f.attach()  # rank 0 flushes the memory of all
                facts['changed'] = ''.join('01'[f.changed()] for f in self._parameter_files())
            return facts
        said = self._ranks.together(f'the gradient of {files[0].name}', offer)
        for rank, s in enumerate(said):
            other = next((pair for pair in itertools.zip_longest(said[0]['gradients'], s['gradients']) if pair[0] != pair[1]), None)
            if other:
                raise RuntimeError(f'rank 0 comes to the gradient of {other[0]}, and rank {rank} to that of {other[1]}: all ranks must run the same '
                                   'modules in the same order')
        if not self._begun:
            self._begin_together(said)
        for f in files:
            if isinstance(f, DeviceFile) and f.tensor.grad is not None:
                f.fetch_gradient()
            # In memory of its own: several gradients may share theirs, as after `a + b`, and autograd may still need it.
            f.replace_gradient((f.gradient() / self._ranks.world).contiguous())
        try:
            for f, part in zip(files, self._take_means(files)):
                self._send_one(f, part)
        finally:
            for f in files:
                f.clear_gradient()  # its memory holds a part of the mean at most
        self._note_open()

    def _take_means(self, files: List[ParameterFile]) -> List[slice]:
        try:
            return take_means([f.gradient() for f in files], self._ranks.rank, self._ranks.world, self._group)
        except RuntimeError as e:
            try:
                self._ranks.together('the end of a reduction that failed')
            except RankFailed as failed:
                if self._ranks.over:
                    raise failed from e
            raise

    def _send_one(self, f: ParameterFile, part: slice = slice(None)) -> None:
        if not self._sending_all:
            self._refuse_needed([f])
        self._left[f] = None
        super()._send_one(f, part)
        if self._is_final(f):
            self._seal(f)

    def _is_final(self, f: ParameterFile, more: int = 0) -> bool:
        """Its update may have run already, although the step has not ended. more: if so many gradients were sent now."""
        return f.sent + more >= self.accumulate and not self.max_grad_norm and not self.skip_nonfinite

    def _is_needed(self, f: ParameterFile) -> bool:
        """Would its gradient start the update, while something may still need the values that it has?"""
        return isinstance(f, MappedFile) and self._is_final(f, more=1) and not f.is_sealed and f.is_used()

    def _refuse_needed(self, files: Iterable[ParameterFile]) -> None:
        for f in files:
            if f.has_gradient() and self._is_needed(f):
                raise RuntimeError(f'the gradient of {f.name} would update the parameter, and a graph or a view still refers to its values: '
                                   'end these before, or call step(), which sends all gradients')

    def _seal(self, f: ParameterFile) -> None:
        if isinstance(f, MappedFile) and self._is_final(f, more=1):
            f.seal()

    # -- the model --

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
        _OPTIMIZERS[model] = mine

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

    def _hook(self, mine: 'weakref.ref[Offloaded]', unit: Unit) -> None:
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
        if self._copies and not self._in_backward_of_device:  # and not in one within it, as of torch.utils.checkpoint
            self._in_backward_of_device = True
            _when_backward_ends(self._device_backward_ended)
        self._residency.need(unit)
        self._wait_for_copies(unit)

    def _device_backward_ended(self) -> None:
        self._in_backward_of_device = False
        self._rest()

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

    def _wait_for_copies(self, unit: Unit) -> None:
        if self._copies:
            for f in unit.files:
                with self._root.explained(f'parameter {f.name}'):
                    f.ready()  # type: ignore[attr-defined]

    def _rest(self, discard: bool = False, keep_copies: bool = False) -> None:
        """All tensors are in the memory of the CPU."""
        if not (self._on_device if keep_copies else self._has_copies):
            return
        for f in self._mapped():
            f.rest(discard, keep_copies)  # type: ignore[attr-defined]
        self._on_device, self._has_copies = False, keep_copies

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
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
            self._handles.append(module._register_load_state_dict_pre_hook(self._as_hook(rest)))
            self._handles.append(module.register_state_dict_pre_hook(self._as_hook(rest)))
        self._handles.append(model.register_forward_hook(self._as_hook(after), always_call=True))

    def _run_microbatches(self, model: nn.Module, batches: List[Any], loss_fn: Callable[[nn.Module, Any], torch.Tensor]) -> List[torch.Tensor]:
        if self._turns:
            raise RuntimeError('microbatches() runs already')
        if self._copies:
            raise ValueError('microbatches() takes no model with device=: backward of a GPU runs in one thread for all micro-batches')
        self._check_usable()
        turns = self._turns = Turns(len(batches))

        def loss_of(batch: Any) -> torch.Tensor:
            self._note_turn(turns)
            return loss_fn(model, batch)
        try:
            return run_in_turns(turns, batches, loss_of)
        finally:
            self._turns = None
            if self._activations:
                self._activations.turn = (0, 0)

    def _stop(self, turns: Turns, place: str) -> None:
        turns.stop(place)
        self._note_turn(turns)

    def _note_turn(self, turns: Turns) -> None:
        if self._activations:
            self._activations.turn = (turns.round, turns.turn or 0)


def _read_withdrawn(p: torch.Tensor) -> torch.Tensor:
    root, name = withdrawn_to(p)  # type: ignore[misc]
    f = ParameterFile(root, name, torch.empty(p.shape, dtype=p.dtype), p.dtype, p.dtype)
    try:
        with Root(root).explained(f'parameter {name}'):
            f.open_existing()
    finally:
        f.close()
    return f.tensor


def _raise_or_warn(text: str, cause: Optional[OSError] = None) -> None:
    """An error that is on its way already must reach the program, and that a store is dead is known."""
    if sys.exc_info()[0] is None and (cause is None or cause.errno not in GONE):
        raise RuntimeError(text) from cause
    warnings.warn(text, RuntimeWarning, stacklevel=2)


# The optimizer of each offloaded model.
_OPTIMIZERS: 'weakref.WeakKeyDictionary[nn.Module, weakref.ref[Offloaded]]' = weakref.WeakKeyDictionary()


class _Hook:
    """A hook of an offloaded model, which copy.deepcopy() leaves as it is, and no pickle can hold."""

    def __init__(self, call: Callable[..., Any], root: str) -> None:
        self._call, self._root = call, root

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


def _when_backward_ends(call: Callable[[], None]) -> None:
    """For hooks of a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _in_backward() -> bool:
    current = getattr(torch._C, '_current_graph_task_id', None)
    return current is not None and current() != -1


@functools.lru_cache(maxsize=None)
def _class_of(kind: Any) -> Any:
    return type(f'Offloaded{kind.__name__}', (Offloaded, kind), {'__doc__': Offloaded.__doc__})


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


def _copies_of(device: Union[None, str, torch.device], keep: int, activations: Union[None, int, str]) -> Optional[Copies]:
    if device is None:
        return None
    if activations == 'auto':
        raise ValueError("activations='auto' measures the time of the forward, which ends on a GPU after it has returned: pass bytes with device=")
    return Copies(gpu_of(device), keep)


def _check_model(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.device.type == 'meta':
            raise ValueError(f'the buffer {name} is on the device meta, and offload() gives values to parameters alone: build the model in '
                             'hitrain.init_empty(), which makes ordinary buffers, or give the buffer its values before')
    for name, p in model.named_parameters():
        if is_dtensor(p):
            raise TypeError(f'{name} is a DTensor, of which each process holds a part: offload() takes models with whole parameters')
        if p.device.type not in ('cpu', 'meta'):
            raise ValueError(f'{name} is on {p.device}: offload() takes models in the memory of the CPU')
        if '_apply' in vars(model):
            raise ValueError('this model is offloaded already')
    check_apart((name, p) for name, p in model.named_parameters() if not withdrawn_to(p))


def _units(model: nn.Module, blocks: Optional[List[nn.Module]], others_together: bool) -> List[Tuple[str, nn.Module, List[nn.Parameter]]]:
    """Blocks with all their parameters, and every other module with its own, as the model has them in order. others_together: these
    are one unit, that of the model."""
    names = {m: name for name, m in model.named_modules()}
    if blocks is None:
        blocks = [child for m in names if isinstance(m, nn.ModuleList) for child in m]
    within: Set[nn.Module] = set()
    for block in blocks:
        if block not in names:
            raise ValueError(f'a {type(block).__name__} of blocks= is no part of the model')
        within.update(m for m in block.modules() if m is not block)
    whole = set(blocks) - within
    found = []
    if others_together and model not in whole:
        others = dict.fromkeys(p for m in names if m not in within and m not in whole for p in m.parameters(recurse=False))
        found += [('', model, list(others))] if others else []
    for module, name in names.items():
        if module not in within and (module in whole or not others_together):
            params = list(dict.fromkeys(module.parameters(recurse=module in whole)))
            if params:
                found.append((name, module, params))
    return found


def _size(params: Sequence[nn.Parameter]) -> int:
    return sum(-(-p.numel() * p.element_size() // 4096) * 4096 for p in params)


def _check_keep_of_device(model: nn.Module, units: List[Tuple[str, nn.Module, List[nn.Parameter]]], keep: int) -> None:
    """Parameters outside blocks stay on the device, and backward is in two blocks at a time."""
    others = sum(_size(params) for _, module, params in units if module is model)
    blocks = sorted((_size(params) for _, module, params in units if module is not model), reverse=True)[:2]
    if keep < others + sum(blocks):
        raise ValueError(f'keep={keep} is too little for this {type(model).__name__} with device=, which needs {others + sum(blocks)} bytes at a time: '
                         f'{others} outside its blocks, and {sum(blocks)} for the {len(blocks)} largest blocks. blocks= names others')


def _check_keep(model: nn.Module, units: List[Tuple[str, nn.Module, List[nn.Parameter]]], keep: int) -> None:
    """A unit is needed with those around it: their forward runs, too."""
    sizes = {module: _size(params) for _, module, params in units}
    need = {name: sum(n for outer, n in sizes.items() if module is outer or module in set(outer.modules())) for name, module, _ in units}
    largest = max(need, key=lambda name: need[name])
    if keep < need[largest]:
        raise ValueError(f'keep={keep} is too little for {largest or "the model"}, which needs {need[largest]} bytes at a time. Smaller blocks= need less')


def _with_frozen(model: nn.Module, groups: List[Any]) -> List[Any]:
    """Groups of (name, parameter) pairs, with the parameters that do not train and are in no group."""
    names = {id(p): name for name, p in model.named_parameters()}
    given: Set[int] = set()

    def named(entries: Any) -> List[Tuple[str, torch.Tensor]]:
        pairs = [e if isinstance(e, tuple) else (names.get(id(e), ''), e) for e in ([entries] if isinstance(entries, torch.Tensor) else entries)]
        for name, p in pairs:
            if id(p) not in names:
                raise ValueError(f'params has a tensor {name} of shape {tuple(p.shape)} that is no parameter of the model')
        given.update(id(p) for _, p in pairs)
        return pairs
    if groups and isinstance(groups[0], dict):
        made: List[Any] = [{**g, 'params': named(g['params'])} for g in groups]
    else:
        made = [{'params': named(groups)}]
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad and id(p) not in given]
    return made + ([{'params': frozen}] if frozen else [])
