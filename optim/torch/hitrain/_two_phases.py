# SPDX-License-Identifier: Apache-2.0
"""A rule in two phases: between them this process orthogonalises what the store hands out.

    grad/P --store: momentum--> update/P --this process: Newton-Schulz--> ortho/P --store--> P      update/P and ortho/P are bf16

Both phases belong to one step, so an error in between takes the step back. A part of a matrix orthogonalised alone would be another update. So with
several ranks each matrix has one owner, which reads it whole from the store, whoever has written its gradient. The store waits for the last
gradient of a matrix by itself; `prepare` decides before on clipping, on skipping, and on sums of fewer gradients than accumulate=.
"""
import os
from typing import Any, Collection, Dict, List, NamedTuple, Optional, Tuple

import torch

from hitrain._bytes import read_all, write_all
from hitrain._files import ParameterFile
from hitrain._gather import in_turn
from hitrain._newton_schulz import NS_FORMS, Iteration, cost_of, orthogonalized, owners_of, rows_of_blocks
from hitrain._optimizer import Optimizer
from hitrain._packs import Place
from hitrain._send import SMALL_MOST
from hitrain._settings import FORMS
from hitrain._words import HIDDEN, opened

ADJUST = (None, 'original', 'match_rms_adamw', 'spectral_unclamped')


class _Matrix(NamedTuple):
    file: ParameterFile
    blocks: Tuple[int, ...]
    iteration: Iteration


class TwoPhases(Optimizer):
    """Groups with use_muon=True have this rule, and the others that of `_others`."""

    _others: Any  # a class of hitrain.optim
    _others_defaults: Dict[str, Any]
    _form: str
    _in_store: bool  # the store orthogonalises
    _group_of: Dict[torch.Tensor, Dict[str, Any]]

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return ('momentum_buffer',) if self._uses_muon(group) else self._others.state_words(self, group)

    def _uses_muon(self, group: Dict[str, Any]) -> bool:
        return bool(group.get('use_muon', True))

    def _rule_of(self, group: Dict[str, Any]) -> str:
        return self.rule if self._uses_muon(group) else self._others.rule

    def _defaults_of(self, group: Dict[str, Any]) -> Dict[str, Any]:
        return self.defaults if self._uses_muon(group) else {**self._others_defaults, **{k: self.defaults[k] for k in FORMS}}

    def _word_keys(self, group: Dict[str, Any]) -> Collection[str]:
        return ('lr', 'momentum', 'nesterov', 'weight_decay', 'maximize', *FORMS) if self._uses_muon(group) else super()._word_keys(group)

    def _config_words(self, group: Dict[str, Any]) -> Dict[str, str]:
        words = super()._config_words(group)
        if self._uses_muon(group):
            words['adjust_lr'] = group['adjust_lr_fn'] or 'original'
            if self._in_store:
                words.update(ns='store', ns_steps=str(group['ns_steps']), eps=repr(float(group['eps'])))
                words.update((f'ns_{k}', repr(float(n))) for k, n in zip('abc', group['ns_coefficients']))
        return words

    # -- state --

    def export_state(self, masters: bool = False, rule: Optional[str] = None) -> Dict[str, Any]:
        """See Optimizer.export_state(). rule: only groups of this one, as 'muon' for torch.optim.Muon, and 'adamw' for torch.optim.AdamW."""
        said = super().export_state(masters)
        return said if rule is None else self._of_rule(said, rule)

    def import_state(self, state_dict: Dict[str, Any]) -> None:
        """See Optimizer.import_state(). Or of each rule one: {'muon': ..., 'adamw': ...}."""
        super().import_state(state_dict if 'param_groups' in state_dict else self._together(state_dict))

    def _of_rule(self, said: Dict[str, Any], rule: str) -> Dict[str, Any]:
        groups = [g for own, g in zip(self.param_groups, said['param_groups']) if self._rule_of(own) == rule]
        if not groups:
            raise ValueError(f'no group has the rule {rule}')
        number = {i: n for n, i in enumerate(i for g in groups for i in g['params'])}
        return {'state': {number[i]: s for i, s in said['state'].items() if i in number},
                'param_groups': [{**g, 'params': [number[i] for i in g['params']]} for g in groups]}

    def _together(self, said: Dict[str, Any]) -> Dict[str, Any]:
        rest = {rule: list(s['param_groups']) for rule, s in said.items()}
        groups: List[Dict[str, Any]] = []
        state: Dict[Any, Any] = {}
        for own in self.param_groups:
            rule = self._rule_of(own)
            if not rest.get(rule):
                raise ValueError(f'the state_dict has no groups of the rule {rule}, or fewer than this optimizer')
            group = rest[rule].pop(0)
            state.update(((rule, i), said[rule]['state'][i]) for i in group['params'] if i in said[rule]['state'])
            groups.append({**group, 'params': [(rule, i) for i in group['params']]})
        for rule, left in rest.items():
            if left:
                raise ValueError(f'the state_dict has more groups of the rule {rule} than this optimizer')
        return {'state': state, 'param_groups': groups}

    # -- groups --

    def _check_group(self, group: Dict[str, Any]) -> None:
        super()._check_group(group)
        if not isinstance(group.get('use_muon', True), bool):
            raise ValueError(f'use_muon must be True or False, not {group["use_muon"]!r}')
        if not self._uses_muon(group):
            return
        check_muon(group)
        for name, p in zip(group.get('names', ()), group.get('params', ())):
            part = self._given_parts.get(name)
            rows_of_blocks(name, part.shape if part else tuple(p.shape), group['split'])

    def _attach_groups(self, groups: List[Dict[str, Any]]) -> None:
        self._group_of.update((p, group) for group in groups for p in group['params'])
        super()._attach_groups(groups)

    def _detach_group(self, group: Dict[str, Any]) -> None:
        super()._detach_group(group)
        for p in group['params']:
            self._group_of.pop(p, None)

    def _blocks_of(self, f: ParameterFile) -> Tuple[int, ...]:
        group = self._group_of.get(f.tensor)
        return rows_of_blocks(f.name, f.shape, group['split']) if group and self._uses_muon(group) else ()

    def _may_pack(self, group: int) -> bool:
        return not self._uses_muon(self.param_groups[group])

    def _attach_pack(self, pack: str, places: List[Place], own: Dict[str, torch.Tensor], group_of: Dict[str, int]) -> None:
        for place in places:
            if self._uses_muon(self.param_groups[group_of[place.name]]):
                raise ValueError(f'{self.root}/{pack} holds {place.name}, and Muon needs a file for each matrix: put it into a group with '
                                 'use_muon=False, or copy the model with export_safetensors() and import_safetensors()')
        super()._attach_pack(pack, places, own, group_of)

    # -- between the phases --

    def _between_phases(self, files: List[ParameterFile]) -> None:
        matrices = [] if self._in_store else [self._matrix(f) for f in files if self._blocks_of(f)]
        if not matrices:
            return
        said = self._ranks.together('the norm of the step', self._prepare)[0]
        if said['skipped']:
            return
        owners = owners_of([cost_of(m.file.shape, m.blocks) for m in matrices], self._ranks.world)
        own = [m for m, owner in zip(matrices, owners) if owner == self._ranks.rank]
        self._ranks.together('orthogonalised updates', lambda: in_turn(own, self._read_update, self._give_ortho))
        rest = [m.file.name for m, owner in zip(matrices, owners) if owner and self._ranks.leads]
        self._ranks.together("other ranks' orthogonalised updates", lambda: self._apply(rest))

    def _matrix(self, f: ParameterFile) -> _Matrix:
        group = self._group_of[f.tensor]
        a, b, c = (float(n) for n in group['ns_coefficients'])
        return _Matrix(f, self._blocks_of(f), Iteration(group['ns_steps'], (a, b, c), float(group['eps']), self._form))

    def _prepare(self) -> Dict[str, Any]:
        if not self._ranks.leads:
            return {}
        self._root.command(f'prepare if={self._open}')
        return {'skipped': self.step_was_skipped}

    def _read_update(self, m: _Matrix) -> torch.Tensor:
        """Waits until the momentum has the gradient of this step."""
        update = torch.empty(m.file.shape, dtype=torch.bfloat16)
        with self._root.explained(f'update of {m.file.name}'), opened(self._phase('update', m), os.O_RDONLY) as file:
            read_all(file.fileno(), update)
        return update

    def _give_ortho(self, m: _Matrix, update: torch.Tensor) -> None:
        ortho = orthogonalized(update.to(self._computes_on(m.file)), m.blocks, m.iteration).cpu()
        with self._root.explained(f'orthogonalised update of {m.file.name}'), opened(self._phase('ortho', m), os.O_WRONLY) as file:
            write_all(file.fileno(), ortho)
        if self._ranks.leads:
            self._apply([m.file.name])

    def _apply(self, names: List[str]) -> None:
        for first in range(0, len(names), SMALL_MOST):
            self._root.apply(names[first:first + SMALL_MOST], step=self._open)

    def _phase(self, word: str, m: _Matrix) -> str:
        return os.path.join(self.root, HIDDEN, word, m.file.name)


def check_muon(group: Dict[str, Any]) -> None:
    """Hyper-parameters of Muon. Those that other rules have, too, are checked with theirs."""
    if not group['momentum'] < 1.0:
        raise ValueError(f'momentum must be a number >= 0 and < 1, not {group["momentum"]}')
    if group['adjust_lr_fn'] not in ADJUST:
        raise ValueError(f'adjust_lr_fn must be {", ".join(str(a) for a in ADJUST[1:])} or None, not {group["adjust_lr_fn"]!r}')
    steps, numbers = group['ns_steps'], group['ns_coefficients']
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 < steps < 100:
        raise ValueError(f'ns_steps must be a whole number from 1 to 99, not {steps!r}')
    if not isinstance(numbers, (list, tuple)) or len(numbers) != 3 or not all(_is_finite(n) for n in numbers):
        raise ValueError(f'ns_coefficients must be three numbers, not {numbers!r}')


def check_form(ns: str, form: str) -> None:
    if ns not in ('client', 'store'):
        raise ValueError(f'ns must be client or store, not {ns!r}')
    if form not in NS_FORMS:
        raise ValueError(f'ns_form must be {" or ".join(NS_FORMS)}, not {form!r}')
    if ns == 'store' and form != 'plain':
        raise ValueError('ns_form is for ns=client: the store has the plain form')


def _is_finite(n: Any) -> bool:
    return isinstance(n, (int, float)) and not isinstance(n, bool) and abs(n) < float('inf')
