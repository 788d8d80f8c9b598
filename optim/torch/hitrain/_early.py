# SPDX-License-Identifier: Apache-2.0
"""Gradients of an offloaded model, which leave in backward: one by one, or reduced with those of other ranks."""
import itertools
from typing import Any, Dict, Iterable, List, Optional

import torch

from hitrain._device import Copies, DeviceFile
from hitrain._files import ParameterFile
from hitrain._gate import when_backward_ends
from hitrain._mapped import MappedFile
from hitrain._microbatches import Turns
from hitrain._optimizer import Optimizer
from hitrain._reduce import BUCKET_BYTES, take_means
from hitrain._residency import Unit
from hitrain.distributed import RankFailed


class Early(Optimizer):
    """Offloaded.__init__ gives the fields their values."""

    _bucket: Dict[ParameterFile, None]  # whose gradients are to be reduced, or on their way from the device
    _left: Dict[ParameterFile, None]  # whose gradients of this step were sent
    _turns: Optional[Turns]  # of micro-batches, while they run
    _units_of: Dict[ParameterFile, List[Unit]]
    _group: Any
    _copies: Optional[Copies]  # of a GPU

    def _computes_on(self, f: ParameterFile) -> torch.device:
        return self._copies.device if self._copies else super()._computes_on(f)

    def _mapped(self) -> List[MappedFile]:
        return [f for f in self._parameter_files() if isinstance(f, MappedFile)]

    def _gradient_ready(self, f: ParameterFile) -> None:
        if any(u.calls > 1 for u in self._units_of.get(f, ())):
            return  # backward may add to it: step() sends it
        if self._turns and not self._turns.is_final(f.tensor) and not self._holding:
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
        if not (self._turns and self._copies):  # whose end is that of all its backwards
            when_backward_ends(self._backward_ended)

    def _backward_ended(self) -> None:
        with self._whole_step():
            self._send_bucket()

    def _offer(self, ends: bool) -> Dict[str, Any]:
        if self._shard or self._copies:
            self._bucket.update((f, None) for f in self._parameter_files() if f.has_gradient())  # of blocks that run twice
            self._send_bucket()
        if not ends:
            self._refuse_needed(self._parameter_files())
        return super()._offer(ends)

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
        return f.sent + more >= self.accumulate and not self.max_grad_norm and not self.skip_nonfinite and not self._blocks_of(f)

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

    def _end_step(self) -> None:
        self._note_open()
        super()._end_step()

    def _note_open(self) -> None:
        if self._shard and self._ranks.leads and not self._open:
            self._open = self._root.number('step_open')
