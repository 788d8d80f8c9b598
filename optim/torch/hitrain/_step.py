# SPDX-License-Identifier: Apache-2.0
"""What all ranks do in a step, and hooks that send gradients in backward."""
import gc
import os
import re
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch

from hitrain._alone import Alone
from hitrain._files import ParameterFile
from hitrain._job import kept_numbers
from hitrain._memory import check_apart
from hitrain._packs import Member, PackFile
from hitrain._parts import PLAIN
from hitrain._send import Sending
from hitrain._words import HIDDEN
from hitrain.distributed import part_of


class Stepping(Sending):
    def _offer(self, ends: bool) -> Dict[str, Any]:
        """This rank's part of the step: for each parameter, has it a gradient, and was it changed outside step()?"""
        self._check_usable()
        self._check_apart()
        if self._overlap and self.accumulate > 1:  # which may have been changed
            for f in self._parameter_files():
                self._check_pack(f)
        self._settle()
        files = list(self._parameter_files())
        there = [f.has_gradient() for f in files]
        for f, has in zip(files, there):
            if has:
                f.check_gradient()  # refuses one that cannot be sent before any other is
        facts = {'gradients': ''.join('01'[has] for has in there), 'changed': ''}
        if ends or not self._begun:
            changed = dict.fromkeys(f for f in files if f.changed())
            if self._begun and not self._check_sent([f for f in files if f.sent], changed):
                changed = dict.fromkeys(f for f in files if f.changed())
            facts['changed'] = ''.join('01'[f in changed or f in self._pushed_alone] for f in files)
        return facts

    def _check_apart(self) -> None:
        """Tensors may have got other memory, as by `p.data = q.data`."""
        places = [(p.data_ptr(), f.name) for p, f in self._files.items() if type(p) in PLAIN and not f.keeps_memory]
        if places != self._places:
            check_apart((f.name, p) for p, f in self._files.items() if not f.keeps_memory)
            self._places = places

    def _check_sent(self, sent: List[ParameterFile], changed: Dict[ParameterFile, None]) -> bool:
        """Gradients sent before step() must equal those that step() would send now. False: they do not, and are taken
        back to be sent again."""
        if self._ranks.leads and self._latched != self._all_config():
            why = 'hyper-parameters were changed'
        else:
            why = next((f'the gradient of {f.name} was changed or cleared' for f in sent if f.gradient_changed()), '') or \
                next((f'the parameter {f.name} was changed' for f in changed if f.sent or f.push_writes_state()), '')
        if not why:
            return True
        why += " after the step's first gradient was sent"
        if self._shard or self.accumulate > 1:
            raise RuntimeError(f'{why}; with accumulate or a shard that must be done before')
        if self._step != self._root.number('durable_step') or not all(f.has_gradient() for f in sent):
            raise RuntimeError(f'{why}; do that before backward(), or run backward() in hold_gradients()')
        self._go_back(wholly=False)
        if self._early:
            warnings.warn(f'{why}: the step is sent again, and from now on backward() sends no gradients. Do that before backward() '
                          'to keep overlap', RuntimeWarning, stacklevel=2)
        self._early = False
        return False

    def _owned(self, said: List[Dict[str, Any]]) -> Iterator[Tuple[ParameterFile, List[int]]]:
        """Each parameter and the ranks that have a gradient for it."""
        bits = [s['gradients'] for s in said]
        if len(bits) == 1:
            yield from ((f, [0] if bit == '1' else []) for f, bit in zip(self._parameter_files(), bits[0]))
            return
        for i, f in enumerate(self._parameter_files()):
            yield f, [rank for rank, b in enumerate(bits) if b[i] == '1']

    def _send(self, said: List[Dict[str, Any]]) -> None:
        """Changed parameters and hyper-parameters come before any gradient, and all parts of a gradient before the next
        one, or the end."""
        if not any(owners for _, owners in self._owned(said)):
            return
        for f, owners in self._owned(said):
            missing = [rank for rank in f.writers if rank not in owners] if f.part and owners else []
            if missing:
                raise RuntimeError(f'{f.name} has a gradient on rank {owners[0]} and none on rank {missing[0]}, which holds a part of it: '
                                   'give one on all ranks or on none')
        self._begin_together(said)
        owned = [(f, owners) for f, owners in self._owned(said) if self._ranks.rank in owners]

        def write() -> None:
            self._small, self._small_bytes = [], 0
            rest = [(f, owners) for f, owners in owned if not f.is_sent()]
            for f, _ in rest:
                self._check_room(f)
            together = self._send_runs([f for f, _ in rest])
            for f, owners in rest:
                if f in together:
                    continue
                if f.part:
                    self._send_one(f, f.share)
                elif self._shard:
                    self._send_one(f, part_of(f.tensor.numel(), owners.index(self._ranks.rank), len(owners)))
                else:
                    self._send_whole(f) if isinstance(f, PackFile) else self.send_gradient(f.tensor)
            self._apply_small()
        self._sending_all = True
        try:
            self._ranks.together('gradients', write)
        finally:
            self._sending_all, self._small = False, None
        for f, owners in self._owned(said):
            if owners and self._ranks.rank not in owners:
                f.sent += 1
        if self._ranks.leads and not self._open:
            self._open = self._root.number('step_open')

    def _between_phases(self, files: List[ParameterFile]) -> None:
        """All gradients of a step are sent. Rules in two phases give the store what it needs for the second one."""

    def _begin_together(self, said: List[Dict[str, Any]]) -> None:
        changed = [[f for f, bit in zip(self._parameter_files(), s['changed']) if bit == '1'] for s in said]
        self._ranks.together('beginning the step', lambda: self._begin(changed[0]) if self._ranks.leads else None)
        if any(changed):
            self._ranks.together('taking changed parameters', lambda: self._take_changed(changed))
            self._pushed_alone = {}
        self._begun = True

    def _end_step(self) -> None:
        if self._ranks.leads:
            durable = self.durable_every == 1 or self._durable_due
            if not self._open:
                raise RuntimeError(f'{self.root} has no open step: somebody took it back')
            if self._async and not self._durable_due:
                self._root.command(f'step async if={self._open}')
                self._closing = True
            else:
                self._root.command(f'{"commit" if durable else "step"} if={self._open}')

    def _receive(self, files: List[ParameterFile]) -> None:
        if self._ahead:
            self._receive_all([f for f in files if isinstance(f, PackFile)])
            self._ahead.start(f.tensor for f in files if not isinstance(f, PackFile))
        else:
            self._receive_all(files)
        if self._overlap:
            self._hook_all()

    # -- commits --

    def commit(self) -> None:
        """Make everything below the root durable, as one; parameters that were changed outside step(), too. RuntimeError while gradients
        of a step are sent: step() or abort() ends that one. With a shard: rank 0 alone."""
        if not self._ranks.leads:
            raise RuntimeError(f'rank 0 steers the model, nobody else: call this there alone, not on rank {self._ranks.rank} '
                               f'of {self._ranks.world}')
        with Alone(self._users, 'commit()'):
            self._check_usable()
            if self._begun:
                raise RuntimeError('a part of a step is sent: step() ends it and makes it durable, abort() takes it back')
            self._closed()
            self._settle()
            self._push_changed()
            self._root.command('commit')
            for f in self._parameter_files():
                f.published()
            self._step = self._root.number('step')

    def commit_together(self, end: Optional[Callable[[], None]] = None) -> None:
        """commit(), with a shard on all ranks: each rank's own changes of parts count, too. end: what rank 0 does in place of commit(), as snapshot()
        and what follows it."""
        with Alone(self._users, 'commit_together()'):
            self._check_usable()
            self._ranks.together('commit_together()', dict if self._ranks.leads else self._push_parts)
            self._ranks.together('the commit', (end or self.commit) if self._ranks.leads else dict)
            for f in self._parameter_files():
                f.published()

    def snapshot(self, name: str = '') -> None:
        """commit(), and keep the step: `.hitrain/snap` below the root has its files, and `hitrainctl rollback` goes back to it. name:
        instead of its number. OSError: the store did not keep it, but the commit is done. With a shard: rank 0 alone."""
        if name and (not re.fullmatch(r'[A-Za-z0-9._:-]{1,64}', name) or re.fullmatch(r'[0-9]+|[.]{1,2}', name)):
            raise ValueError(f'{name!r} is no name of a kept step: 1 to 64 letters, digits and . _ : - , and no number')
        self.commit()
        self._root.command(f'snapshot {name}'.rstrip())

    def abort(self) -> None:
        """Undo all changes that are not durable: the store and the tensors go back to `committed_step`. With a shard:
        on all ranks, which get the same tensors. Ranks that are in another call leave it with RankFailed, and go back
        with those that called this."""
        with Alone(self._users, 'abort()'):
            self._go_back(wholly=True)

    def kept_steps(self) -> List[int]:
        """The kept steps that have their numbers as names, in order."""
        with self._root.explained('kept steps'):
            return sorted(kept_numbers(self.root))

    def rollback(self, step: Union[int, str]) -> None:
        """Go back to a kept step, by its number or name: the store, the tensors, and `committed_step`. What came later is gone, but for kept
        steps. Hyper-parameters stay as param_groups has them. ValueError: the store does not keep this step. With a shard: on all ranks."""
        kept = os.path.join(self.root, HIDDEN, 'snap', str(step))
        if '/' in str(step) or not os.path.isdir(kept):
            raise ValueError(f'{self.root} keeps no step {step}: retain= and snapshot() keep steps, and it has {self.kept_steps() or "none"}')
        with Alone(self._users, 'rollback()'):
            self._go_back(wholly=True, to=str(step))

    # -- in backward --

    def _gradient_arises(self, f: ParameterFile) -> None:
        """PyTorch runs backward of each device in a thread of its own: one waits for the other."""
        with self._one_gradient:
            self._gradient_ready(f)

    def _gradient_ready(self, f: ParameterFile) -> None:
        if self._holding or not self._early or f.tensor.grad is None:
            return
        with self._whole_step():
            self._refuse_reducers()
            self._check_room(f)
            self.send_gradient(f.tensor)
        if self.accumulate > 1:
            f.clear_gradient()  # the next one is another

    def _refuse_reducers(self) -> None:
        if not self._seen_reducers:
            _refuse_reducers(self._files, self._under)
            self._seen_reducers = True

    def _check_room(self, f: ParameterFile) -> None:
        if f.sent >= self.accumulate:
            raise RuntimeError(f'a second gradient of {f.name} before step(): wrap all backwards but the last in '
                               'hold_gradients()' if self.accumulate == 1 else
                               f'{f.name} has had the {self.accumulate} gradients of this step: call step()')

    def _hook_all(self) -> None:
        """Also parameters that were frozen when the optimizer was made."""
        for p, f in self._files.items():
            if f.hook is None and p.requires_grad and not isinstance(f, Member) and f.has_elements:
                f.hook = _when_accumulated(p, weakref.WeakMethod(self._gradient_arises), f)


class _NodeHook:
    """A hook on the node of the graph that adds to .grad; the node lives as long as it has a reference."""

    def __init__(self, node: Any, call: Callable[[], None]) -> None:
        self._node, self._handle = node, node.register_hook(lambda *unused: call())

    def remove(self) -> None:
        self._handle.remove()


def _when_accumulated(p: torch.Tensor, method: 'weakref.WeakMethod[Callable[[ParameterFile], None]]', f: ParameterFile) -> Any:
    """Call method(f) whenever backward has added to p.grad all that it will; the result's remove() ends that."""
    def call(*unused: Any) -> None:
        bound = method()
        if bound is not None:
            bound(f)

    if hasattr(p, 'register_post_accumulate_grad_hook'):  # torch >= 2.1
        return p.register_post_accumulate_grad_hook(call)
    with torch.enable_grad():
        node: Any = p.expand_as(p).grad_fn
        return _NodeHook(node.next_functions[0][0], call)


def _refuse_reducers(parameters: Dict[torch.Tensor, Any], text: str) -> None:
    """Wrappers that reduce gradients between processes do it after a parameter's hook was called, so the hook would
    send gradients that are not reduced yet. Nothing links a parameter to its wrapper: look at all objects."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
        return
    for o in gc.get_objects():
        kind = type(o).__name__
        if kind in ('DistributedDataParallel', 'FullyShardedDataParallel') and isinstance(o, torch.nn.Module) and \
                any(p in parameters for p in o.parameters()):
            raise RuntimeError(text.format(kind))
