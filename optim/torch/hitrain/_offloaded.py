# SPDX-License-Identifier: Apache-2.0
"""The optimizer of an offloaded model: it steers the parameters in memory, too."""
import contextlib
import errno
import os
import sys
import warnings
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import nn

from hitrain._available import available_bytes
from hitrain._device import Copies
from hitrain._device_file import DeviceFile
from hitrain._empty import Filler
from hitrain._files import ParameterFile
from hitrain._gate import end_failed_backwards, use_by_another_thread
from hitrain._hooks import OPTIMIZERS, Hooked
from hitrain._mapped import MappedFile, can_be_mapped
from hitrain._packs import Place
from hitrain._root import GONE


class Offloaded(Hooked):
    """An optimizer of this kind steers the parameters of one model in memory, too.

    close() releases files, hooks and mappings. Weights have their values in memory of the process then, if all fit into half of what is available;
    else their use raises. What views and graphs refer to stays at its address, with its values. If these do not fit, close() raises, and leaves
    them mapped. So it does if weights do not fit while another thread runs a forward of the model or a backward. An operator on such a weight that another
    thread runs outside of these ends the process with SIGSEGV. It never computes with other values.

    With a shard the mappings of all ranks are one memory. Gradients are collected in a bucket, in which ranks reduce them together."""

    _reduces = True
    _under = 'offload() does not work under {}: it reduces gradients after backward has sent them. Pass shard= to offload() instead'

    _fill: Optional[Callable[[torch.Tensor], None]]
    _originals: List[Tuple[torch.Tensor, torch.Tensor]]  # with a shard, until all ranks have the model

    def __init__(self, model: nn.Module, params: Iterable[Any], root: 'os.PathLike[str] | str', units: List[Tuple[str, nn.Module, List[nn.Parameter]]],
                 keep: int, filler: Filler, group: Any, copies: Optional[Copies], *args: Any, resume: bool = False, **options: Any) -> None:
        self._filler = filler
        self._fill = None if resume else filler.fill
        self._was_empty = filler.made
        self._residency = None
        self._model = lambda: None
        self._activations = None
        self._handles = []
        self._own_apply = []
        self._units_of = {}
        self._left = {}
        self._turns = None
        self._group = group
        self._copies = copies
        self._on_device = self._has_copies = False
        self._in_backward_of_device = False
        self._bucket = {}
        self._originals = []
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
        loads that were not ahead. copied_bytes of parameters and gradients by the CPU, with a device. ahead: how many uses are loaded ahead at most, where there is room. 'activations': see
        Activations.figures()."""
        said = self._residency.figures() if self._residency else {}
        if self._copies:
            said['copied_bytes'] = self._copies.copied_bytes
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
        for f in self._mapped():
            if not self._is_final(f):  # sealed, but no step has its gradient
                f.unseal()
        self._bucket = {}
        try:
            if self._copies:
                self._forget_backward()
        finally:  # a device that is broken keeps no step open
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

    # -- the end --

    def close(self, why: str = 'has closed its optimizer') -> None:
        for model in [m for m, known in OPTIMIZERS.items() if known() in (self, None)]:
            del OPTIMIZERS[model]
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
        finally:  # a device that is broken keeps no mount busy
            try:
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
        asks = not self._async and not self.redo  # memory that changes while forward reads it, and that makes each step a full one
        if self._shard:
            self._originals.append((p, p.data))
        f = DeviceFile(self._copies, self.root, name, p, grad_dtype, self._fill, asks) if self._copies else \
            MappedFile(self.root, name, p, grad_dtype, self._fill, asks)
        f.may_be_passed = not self._async
        return f

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

    def _begin(self, changed: List[ParameterFile]) -> None:
        if not self._begun:
            self._flush()
        super()._begin(changed)

    def _publish_changed(self) -> None:
        """An abort takes weights back to the last commit, and nothing but their files has what the program stored in them."""
        if self._root.number('durable_step') == self._step:
            self._root.command('commit')

    def _begin_at(self, step: int) -> None:
        super()._begin_at(step)
        left, self._left = self._left, {}
        self._bucket = {}
        self._rest()
        if self._residency:
            self._residency.step_ended(lambda f: f in left)

    def _restore(self, to: str, wholly: bool, unread: bool, begun: bool) -> Dict[str, Any]:
        with contextlib.suppress(OSError):  # of a dead mount
            for f in self._mapped():
                f.flush_pages()  # what the kernel has not written yet would come to the store after the abort
        return super()._restore(to, wholly, unread, begun)

    def _read_back(self, reread: bool, made: Iterable[str] = ()) -> List[str]:
        self._left.update(dict.fromkeys(self._parameter_files()))  # on all ranks
        self._rest(discard=True)
        return super()._read_back(reread, made)


def _raise_or_warn(text: str, cause: Optional[OSError] = None) -> None:
    """An error that is on its way already must reach the program, and that a store is dead is known."""
    if sys.exc_info()[0] is None and (cause is None or cause.errno not in GONE):
        raise RuntimeError(text) from cause
    warnings.warn(text, RuntimeWarning, stacklevel=2)
