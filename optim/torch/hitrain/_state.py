# SPDX-License-Identifier: Apache-2.0
"""State of the optimizer, out of the store and into it, and state_dict()."""
import collections
import copy
import os
import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from hitrain._base import FREE_FLAGS, REFUSED_FLAGS, check_hyper
from hitrain._files import ParameterFile
from hitrain._settings import FORMS
from hitrain._step import Stepping
from hitrain._words import HIDDEN


class Stateful(Stepping):
    def state_dict(self) -> Dict[str, Any]:
        """Hyper-parameters, and the number of the last finished step. That step is made durable first; while gradients
        of the next one are sent already, the end of that one is durable instead. Any rank may call it; with a shard
        rank 0 makes the step durable.

        The state itself stays in the store, so this is small and no copy. A checkpoint to go back to is export_state()
        beside the model's own state_dict().
        """
        for hook in self._hooks_of('state_dict_pre'):
            hook(self)
        if self.full_state_dict:
            if self._begun:
                raise RuntimeError('a part of a step is sent, so no state is whole: call step() or abort() first')
            if self._ranks.leads:
                self.commit()
            said = self.export_state(masters=True)
        else:
            if self._ranks.leads and not self._begun:
                self.commit()
            self._durable_due |= self._begun
            said = {'state': {}, 'param_groups': self._packed_groups(), 'hitrain': {'root': self.root, 'step': self._step}}
        for hook in self._hooks_of('state_dict_post'):
            said = hook(self, said) or said
        return said

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Take hyper-parameters back, from state_dict(); ValueError when the store holds another step or other parameters. From
        export_state(), or the state_dict() of the torch.optim class of this rule, take all state: import_state()."""
        state_dict = dict(state_dict)
        for hook in self._hooks_of('load_state_dict_pre'):
            state_dict = hook(self, state_dict) or state_dict
        self._load(state_dict)
        for hook in self._hooks_of('load_state_dict_post'):
            hook(self)

    def _load(self, state_dict: Dict[str, Any]) -> None:
        if 'hitrain' not in state_dict:
            groups = state_dict.get('param_groups')
            stateless = groups and not any(self.state_words({**self.defaults, **g}) for g in groups)
            if not state_dict.get('state') and not self.full_state_dict and not stateless:
                raise ValueError('this state_dict is not from an optimizer in a hitrain store, and has no state to import')
            self.import_state(state_dict)
            return
        self._closed()
        said, holds = state_dict['hitrain']['step'], self._root.number('step')
        if said != holds:
            raise ValueError(f'the state_dict is of step {said}, but {self.root} holds step {holds}, and a store keeps its last step only. '
                             'To go back, load the model\'s own state_dict() and what export_state() gave at that step')
        groups = state_dict['param_groups']
        if [list(g['names']) for g in groups] != [g['names'] for g in self.param_groups]:
            raise ValueError(f'the state_dict groups other parameters than this optimizer of {self.root} does')
        for new in groups:
            check_hyper(new)
        for own, new in zip(self.param_groups, groups):
            own.update({k: copy.deepcopy(v) for k, v in new.items() if k not in ('params', 'names', *FORMS)})
        self._step = holds

    def _hooks_of(self, what: str) -> List[Callable[..., Any]]:
        """Those that register_state_dict_pre_hook and the like of PyTorch 2 have registered."""
        return list(getattr(self, f'_optimizer_{what}_hooks', {}).values())

    def _packed_groups(self) -> List[Dict[str, Any]]:
        """Groups as in state_dict() of torch.optim: with numbers in place of parameters."""
        packed, first = [], 0
        for g in self.param_groups:
            last = first + len(g['params'])
            packed.append({**{k: v for k, v in g.items() if k not in ('params', *FORMS)}, 'params': list(range(first, last))})
            first = last
        return packed

    def __reduce_ex__(self, protocol: Any) -> Any:
        """State of a schedule may have the optimizer in it, as that of OneCycleLR of PyTorch 1.13."""
        return _LeftOut, (type(self).__name__, self.root)

    def __copy__(self) -> Any:
        raise TypeError(f'{type(self).__name__} of {self.root} cannot be copied: its state is in the store. Save '
                        'state_dict() or export_state(), and make another optimizer on a root of its own')

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()

    # -- state --

    def read_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """A copy of one piece of the optimizer's state, as f32: exp_avg or what else the rule keeps,
        step, or master (files of two bytes per element)."""
        f = self._files[parameter]
        with self._root.explained(f'state {name} of {f.name}'):
            return f.read_state(name)

    def write_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Replace one piece of the optimizer's state, between steps; part of the next commit. Parameters that share a
        file share `step`."""
        f = self._files[parameter]
        f.check_state(name, value)
        with self._root.explained(f'state {name} of {f.name}'):
            f.write_state(name, value)

    def export_state(self, masters: bool = False) -> Dict[str, Any]:
        """A state_dict for the torch.optim class of this rule, and for load_state_dict() here: copies of all state, as
        f32.

        Load it into an optimizer that was made with the same parameters in the same groups, and the run continues
        there. masters=True: with names, and the masters of files of two bytes, too, which only load_state_dict() here takes."""
        state: Dict[int, Dict[str, torch.Tensor]] = {}
        groups = self._packed_groups()
        for group, packed in zip(self.param_groups, groups):
            if not masters:
                del packed['names']
            for i, p in zip(packed['params'], group['params']):
                words = self.state_words(group) + (('master',) if masters and self._files[p].dtype != torch.float32 else ())
                if words and self._has_state(p):
                    state[i] = {name: self.read_state(p, name) for name in words}
        return {'state': state, 'param_groups': copy.deepcopy(groups)}

    def import_state(self, state_dict: Dict[str, Any]) -> None:
        """Take state and hyper-parameters from export_state(), or from a state_dict of the torch.optim class of this rule, with the same
        parameters in the same groups, and commit. State of parameters that have none there is forgotten. The tensors keep their
        values: load those of the model before or after, and before if there are masters. With a shard: on all ranks.

        A state_dict of other groups, names or shapes is a ValueError, and changes nothing."""
        taken: List[Dict[str, Any]] = []

        def check() -> None:
            self._check_usable()
            if self._begun:
                raise RuntimeError('a part of a step is sent: call step() or abort() first')
            taken.extend(self._checked_groups(state_dict['param_groups'], state_dict['state']))

        def take() -> None:
            for own, hyper in zip(self.param_groups, taken):
                own.update(hyper)
            if self._ranks.leads:
                self._closed()
                self._push_changed()  # masters belong to these values
                self._send_config()  # the rule's settings decide which state there is
            else:
                self._push_parts()

        def write() -> None:
            for own, new in zip(self.param_groups, state_dict['param_groups']):
                for p, i in zip(own['params'], new['params']):
                    if self._ranks.leads or self._files[p].part:
                        self._take_state(own, p, state_dict['state'].get(i, {}))
        leads = self._ranks.leads
        self._ranks.together('import_state()', check)
        self._ranks.together('taking state', take)
        self._ranks.together('rank 0 makes state', lambda: write() if leads else None)
        self._ranks.together('parts of state', lambda: None if leads else write())
        self._ranks.together('committing state', lambda: self.commit() if leads else None)

    def _has_state(self, p: torch.Tensor) -> bool:
        with self._root.explained(f'state of {self._files[p].name}'):
            return self._files[p].has_elements and os.stat(os.path.join(self.root, HIDDEN, 'state', self._files[p].whole.name, 'step')).st_size > 0

    def _checked_groups(self, groups: List[Dict[str, Any]], state: Dict[int, Any]) -> List[Dict[str, Any]]:
        """What is to be taken from each group of a state_dict, copied. Groups and state are checked."""
        if [len(g['params']) for g in groups] != [len(g['params']) for g in self.param_groups] or \
                any(list(new.get('names', own['names'])) != own['names'] for own, new in zip(self.param_groups, groups)):
            raise ValueError('the state_dict groups other parameters than this optimizer does')
        others = ('params', 'names', 'param_names', *FORMS, *FREE_FLAGS, *REFUSED_FLAGS)
        taken = [{k: copy.deepcopy(v) for k, v in new.items() if k not in others} for new in groups]
        steps: Dict[ParameterFile, Tuple[Optional[float], str]] = {}  # of each pack: those of its first member
        for own, new, hyper in zip(self.param_groups, groups, taken):
            both = {**own, **hyper}
            flags = {k: new[k] for k in REFUSED_FLAGS if k in new}
            if self.rule == 'adamw':
                flags.pop('decoupled_weight_decay', None)  # PyTorch 2.7 writes it for AdamW
            check_hyper({**both, **flags})
            for p, i in zip(own['params'], new['params']):
                kept, f = self._kept(both, p, state.get(i, {})), self._files[p]
                self._check_state(p, kept, self.state_words(both))
                step = float(kept.get('step', 1.0)) if kept else None
                first, name = steps.setdefault(f.whole, (step, f.name))
                if first != step:
                    raise ValueError(f'{f.name} and {name} share {f.whole.name}, so they have state of the same step or none: the state_dict has '
                                     f'{"none" if step is None else step} and {"none" if first is None else first}')
        return taken

    def _kept(self, group: Dict[str, Any], p: torch.Tensor, state: Dict[str, Any]) -> Dict[str, torch.Tensor]:
        """What the store keeps of a parameter's state in a state_dict."""
        words = self.state_words(group) + (('master',) if self._files[p].dtype != torch.float32 else ())
        found = {name: state[name] for name in words if state.get(name) is not None}
        return {name: value if isinstance(value, torch.Tensor) else torch.as_tensor(value) for name, value in found.items()}

    def _check_state(self, p: torch.Tensor, kept: Dict[str, torch.Tensor], words: Tuple[str, ...]) -> None:
        f = self._files[p]
        for name, value in kept.items():
            f.check_state(name, value)
        missing = [name for name in words if name not in kept]
        if missing and kept:
            raise ValueError(f'the state_dict has {", ".join(kept)} of {f.name} but not {", ".join(missing)}: it is of another rule')

    def _take_state(self, group: Dict[str, Any], p: torch.Tensor, state: Dict[str, Any]) -> None:
        """On rank 0; other ranks add their part."""
        kept = self._kept(group, p, state)
        if not self._files[p].has_elements:
            return
        if not self._ranks.leads:
            for name in self.state_words(group):
                if name in kept and name != 'step':
                    self.write_state(p, name, kept[name])
            if 'master' in kept:
                self._take_master(p, kept['master'])
            return
        if not kept and self._has_state(p):
            self._root.command(f'reset {self._files[p].whole.name}')
        for name in self.state_words(group):
            if name in kept:
                self.write_state(p, name, kept[name])
        if kept and 'step' not in self.state_words(group):
            self.write_state(p, 'step', torch.tensor(1.0))  # not the first one, which begins the buffer anew
        if 'master' in kept:
            self._take_master(p, kept['master'])

    def _take_master(self, p: torch.Tensor, master: torch.Tensor) -> None:
        f = self._files[p]
        own = f.own_value('master', master)
        if torch.equal(own.to(f.local.device, f.dtype), f.local.detach().to(f.dtype)):
            self.write_state(p, 'master', master)
        else:
            warnings.warn(f'the master of {f.name} is not that of its present values, which begin a new one: load the model before '
                          'the optimizer', RuntimeWarning, stacklevel=2)


class _LeftOut:
    """What a pickle has in place of an optimizer."""

    def __init__(self, kind: str, root: str) -> None:
        self._said = kind, root

    def __getattr__(self, name: str) -> Any:
        if name.startswith('_'):
            raise AttributeError(name)
        kind, root = self._said
        raise TypeError(f'a pickle does not hold the {kind} of {root}, whose state is in the store: make it with resume=True')

    def __reduce__(self) -> Any:
        return _LeftOut, self._said


class StateInStore(collections.defaultdict[Any, Any]):
    """Optimizer.state: empty, and true. Code that makes a first step when it finds no state must find some."""

    def __bool__(self) -> bool:
        return True
