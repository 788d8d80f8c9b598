# SPDX-License-Identifier: Apache-2.0
"""What all parts of an optimizer have: its fields, its files, and its hyper-parameters as the store's words.

    Base        _base.py     fields and hyper-parameters
    Attached    _attach.py   parameters get files
    Undoing     _undo.py     one step begins, or is taken back
    Sending     _send.py     gradients go to the store, and values come back
    Stepping    _step.py     what all ranks do in a step
    Stateful    _state.py    state of the optimizer, out and in
    Making      _make.py     the model root: made, or opened
    Optimizer   _optimizer.py
"""
import weakref
from typing import Any, Collection, Dict, Iterable, Iterator, List, Optional, Set, Tuple

import torch

from hitrain import _settings
from hitrain._ahead import ReadAhead
from hitrain._alone import Alone
from hitrain._files import ParameterFile
from hitrain._gather import Gather
from hitrain._job import Job
from hitrain._newton_schulz import word_of_blocks
from hitrain._packs import Member, PackFile
from hitrain._parts import Part
from hitrain._root import Root
from hitrain._topk import ErrorFeedback
from hitrain._trace import Trace
from hitrain._words import FILE_DTYPES
from hitrain.distributed import Ranks, Shard

# Flags of torch.optim: those that change no number, and those that the store does not do.
FREE_FLAGS = ('capturable', 'foreach', 'fused')
REFUSED_FLAGS = ('amsgrad', 'decoupled_weight_decay', 'differentiable', 'initial_accumulator_value')


class Base(torch.optim.Optimizer):
    """Optimizer.__init__ gives the fields their values."""

    rule = ''  # the store's word for it
    _reduces = False  # gradients of a shard's ranks, in backward
    _leaves_mappings = False  # in close(), which the destructor calls
    _ends = False  # the interpreter does
    _trace: Optional[Trace] = None  # while one is recorded
    _under = 'overlap=True does not work under {}: it reduces gradients after backward has sent them. Pass overlap=False; step() then sends what was reduced'

    root: str
    durable_every: int
    redo: bool
    redo_keep: int
    deltas: int
    delta_max: float
    delta_dtype: Optional[torch.dtype]
    retain: int
    retain_every: int
    max_grad_norm: float  # these four: of the whole step; like hyper-parameters they may be changed at any time
    grad_scale: float
    skip_nonfinite: bool
    accumulate: int
    accumulate_mode: str
    full_state_dict: bool
    _feedback: Optional[ErrorFeedback]
    _ahead: Optional[ReadAhead]
    _gather: Gather
    _async: bool
    _closing: bool  # the store may still be closing the last step
    _param_dtype: Optional[torch.dtype]
    _grad_dtype: Optional[torch.dtype]
    _overlap: bool
    _holding: bool
    _early: bool
    _given: Dict[torch.Tensor, None]  # of all groups
    _files: Dict[torch.Tensor, ParameterFile]  # of members of packs: Member
    _held: Dict[ParameterFile, None]  # all that are open
    _places: Any  # where the memory of parameters is, when it was looked at last
    _pack: int
    _given_names: Optional[Iterator[str]]
    _taken_names: Dict[str, None]
    _built: bool
    _pid: int
    _self: int  # Lightning makes objects that share all of ours, and end earlier
    _step: int  # so many are finished
    _begun: bool
    _open: int  # the store's number of the open step, once it has a gradient
    _pushed_alone: Dict[ParameterFile, None]  # by rank 0, and not yet known to the others
    _unread: bool  # files have newer values than tensors
    _durable_due: bool  # the end of the step that has begun is to be durable
    _sending_all: bool  # in step() and send_gradients(): no code of the user runs until the gradients are done with
    _latched: Optional[List[str]]  # hyper-parameters of the step that has begun
    _small: Optional[List[ParameterFile]]  # written gradients that are handed over together
    _small_bytes: int  # of these
    _torn: str  # why a step could not be taken back
    _users: 'List[weakref.ref[Alone]]'  # calls that other threads must not disturb
    _one_gradient: Any  # the lock of hooks in backward
    _seen_reducers: bool
    _root: Root
    _shard: Optional[Shard]
    _ranks: Ranks
    _job: Optional[Job]
    _trusts_versions: bool
    _given_parts: Dict[str, Part]
    _fresh: Set[str]  # rank 0 has just made these files, and each rank fills in its part
    _resume: bool
    _makes: bool  # this process makes the model
    def _parameter_files(self) -> Iterable[ParameterFile]:
        return self._held

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        """Names of the state that the rule keeps for a parameter of this group, as torch.optim has them."""
        raise NotImplementedError

    def _rule_of(self, group: Dict[str, Any]) -> str:
        return self.rule

    def _defaults_of(self, group: Dict[str, Any]) -> Dict[str, Any]:
        """Hyper-parameters of the group's rule."""
        return self.defaults

    def _word_keys(self, group: Dict[str, Any]) -> Collection[str]:
        """Hyper-parameters that are words of the store, too."""
        return self._defaults_of(group)

    def _blocks_of(self, f: ParameterFile) -> Tuple[int, ...]:
        """Rows of the matrices that a rule in two phases orthogonalises; () for other rules."""
        return ()

    def _computes_on(self, f: ParameterFile) -> torch.device:
        return f.local.device

    def _state_kind(self, group: Dict[str, Any]) -> Tuple[Any, ...]:
        """Parameters that share a file have the same."""
        return self.state_words(group), *(group[k] for k in _settings.FORMS)

    def _check_usable(self) -> None:
        if self._torn:
            raise RuntimeError(f'{self._torn}: call abort() first')

    def _settle(self) -> None:
        """Returns when no reading is in flight. The check that forward waited for its parameters is unchanged."""
        if self._ahead:
            self._ahead.settle()

    # -- hyper-parameters --

    def _check_group(self, group: Dict[str, Any]) -> None:
        """ValueError: its rule does not take one of its values. The group has its parameters and their names."""
        check_hyper(group)

    def _config_words(self, group: Dict[str, Any]) -> Dict[str, str]:
        words = _settings.words_of_group(group, self._word_keys(group))
        if all(g.get('state_bits', 32) == 32 for g in (self.defaults, group, *getattr(self, 'param_groups', ()))):
            words = {k: v for k, v in words.items() if k not in _settings.FORMS}  # a store of an older version has no such words
        return words

    def _config_text(self, group: Dict[str, Any], of_root: bool = False) -> str:
        text = _settings.text_of(self._rule_of(group), self._config_words(group))
        return f'{text} {_settings.words_of_root(self)}' if of_root else text

    def _all_config(self) -> List[str]:
        return [self._config_text(self.param_groups[0], of_root=True)] + [self._config_text(g) for g in self.param_groups[1:]]

    def _send_config(self) -> None:
        """Send changes of param_groups to the store: the root follows the first group, the files of groups that differ
        from it carry their own. A step uses the values that are set when its first gradient is closed."""
        known = self._root.known
        words = [self._config_words(group) for group in self.param_groups]
        texts = [self._config_text(group) for group in self.param_groups]
        self._latched = self._all_config()
        with self._root.explained('hyper-parameters'):
            known.put(self.root, 'optimizer', self._latched[0])
            for group, text in zip(self.param_groups, texts):
                for f in (self._files[p] for p in group['params']):
                    if not isinstance(f, Member) and f.has_elements:
                        blocks = self._blocks_of(f)
                        own = f'{text} muon_split={word_of_blocks(blocks)}' if len(blocks) > 1 else text
                        known.put(f.path, 'optimizer', '' if own == texts[0] else own)
            for f in self._parameter_files():
                if isinstance(f, PackFile):
                    known.put(f.path, 'optimizer', f.config_of(self._rule_of(self.param_groups[f.runs[0].group]), words))
                if (known.read(f.path, 'grad_dtype') or FILE_DTYPES[f.dtype]) != FILE_DTYPES[f.grad_dtype]:  # not set: that of the file
                    known.put(f.path, 'grad_dtype', FILE_DTYPES[f.grad_dtype])


def check_hyper(group: Dict[str, Any]) -> None:
    for key, value in group.items():
        for number in value if key == 'betas' else [value]:
            if isinstance(number, torch.Tensor) and key != 'params' and number.numel() != 1:
                raise ValueError(f'{key} must be one number, not a tensor of {number.numel()}')
    if group.get('nesterov') and 'dampening' in group and (group['momentum'] <= 0 or group['dampening'] != 0):
        raise ValueError('nesterov needs a momentum above 0 and no dampening')
    for key in ('lr', 'eps', 'weight_decay', 'momentum', 'lr_decay'):
        if not 0.0 <= group.get(key, 0.0) < float('inf'):
            raise ValueError(f'{key} must be a number >= 0, not {group[key]}')
    for beta in group.get('betas', ()):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f'betas must be numbers >= 0 and < 1, not {group["betas"]}')
    if group.get('state_bits', 32) not in (32, 16, 8) or not 0 <= group.get('state_bits_min', 0) < 2**32:
        raise ValueError(f'state_bits must be 32, 16 or 8, and state_bits_min at least 0, not {group.get("state_bits")} and '
                         f'{group.get("state_bits_min")}')
    for flag in REFUSED_FLAGS:
        if group.get(flag):
            raise ValueError(f'{flag}={group[flag]} is not implemented in the store')
