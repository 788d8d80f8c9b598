# SPDX-License-Identifier: Apache-2.0
"""The rules of the store as optimizers of PyTorch: the arguments of torch.optim, and the directory of the model."""
import inspect
import os
from typing import Any, Dict, Iterable, Optional, Tuple, Type, Union

import torch

from hitrain._job import Job
from hitrain._muon_groups import muon_groups
from hitrain._optimizer import Optimizer
from hitrain._two_phases import TwoPhases, check_form
from hitrain.distributed import RankFailed, Shard

__all__ = ['Adagrad', 'Adam', 'AdamW', 'Job', 'Lion', 'Muon', 'Optimizer', 'RankFailed', 'SGD', 'Shard', 'muon_groups']

Number = Union[float, torch.Tensor]  # a learning rate may be a tensor of one element


class AdamW(Optimizer):
    """torch.optim.AdamW's rule. options: those of Optimizer."""
    rule = 'adamw'

    def __init__(self, params: Iterable[Any], root: 'os.PathLike[str] | str', lr: Number = 1e-3,
                 betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2, *,
                 maximize: bool = False, **options: Any) -> None:
        super().__init__(params, root, {'lr': lr, 'betas': tuple(betas), 'eps': eps, 'weight_decay': weight_decay,
                                        'maximize': maximize}, **options)

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return 'step', 'exp_avg', 'exp_avg_sq'


class Adam(Optimizer):
    """torch.optim.Adam's rule: weight_decay is part of the gradient."""
    rule = 'adam'

    def __init__(self, params: Iterable[Any], root: 'os.PathLike[str] | str', lr: Number = 1e-3,
                 betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, *,
                 maximize: bool = False, **options: Any) -> None:
        super().__init__(params, root, {'lr': lr, 'betas': tuple(betas), 'eps': eps, 'weight_decay': weight_decay,
                                        'maximize': maximize}, **options)

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return 'step', 'exp_avg', 'exp_avg_sq'


class SGD(Optimizer):
    """torch.optim.SGD's rule."""
    rule = 'sgd'

    def __init__(self, params: Iterable[Any], root: 'os.PathLike[str] | str', lr: Number = 1e-3, momentum: float = 0.0,
                 dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, *,
                 maximize: bool = False, **options: Any) -> None:
        super().__init__(params, root, {'lr': lr, 'momentum': momentum, 'dampening': dampening,
                                        'weight_decay': weight_decay, 'nesterov': nesterov, 'maximize': maximize},
                         **options)

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return ('momentum_buffer',) if group['momentum'] else ()


class Lion(Optimizer):
    """Lion (Chen et al., arXiv:2302.06675)."""
    rule = 'lion'

    def __init__(self, params: Iterable[Any], root: 'os.PathLike[str] | str', lr: Number = 1e-4,
                 betas: Tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, *,
                 maximize: bool = False, **options: Any) -> None:
        super().__init__(params, root, {'lr': lr, 'betas': tuple(betas), 'weight_decay': weight_decay,
                                        'maximize': maximize}, **options)

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return ('exp_avg',)


class Adagrad(Optimizer):
    """torch.optim.Adagrad's rule, its sums beginning with zero."""
    rule = 'adagrad'

    def __init__(self, params: Iterable[Any], root: 'os.PathLike[str] | str', lr: Number = 1e-2, lr_decay: float = 0.0,
                 weight_decay: float = 0.0, eps: float = 1e-10, *, maximize: bool = False, **options: Any) -> None:
        super().__init__(params, root, {'lr': lr, 'lr_decay': lr_decay, 'weight_decay': weight_decay, 'eps': eps,
                                        'maximize': maximize}, **options)

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return 'step', 'sum'


RULES: Dict[str, Type[Optimizer]] = {c.rule: c for c in (AdamW, Adam, SGD, Lion, Adagrad)}


class Muon(TwoPhases):
    """torch.optim.Muon's rule for matrices [m, n], and [E, m, n] as experts have them; another rule for all else in the same model and step.

    params         groups as muon_groups() makes them. Those with use_muon=False follow `others`, and have that rule's hyper-parameters and
                   defaults. Groups without use_muon are Muon's, and refuse all but matrices. 'split' of a group: see muon_groups()
    ns_steps, ns_coefficients, eps  of Newton-Schulz, computed where the parameter is, or on the device of offload()
    adjust_lr_fn   'original', 'match_rms_adamw' or 'spectral_unclamped', as in torch.optim, of each block; None: 'original'
    others         adamw, adam, sgd, lion or adagrad
    ns             'client': this process orthogonalises. 'store': the daemon does, with the same bits for any number of threads; slow for large
                   matrices, and refused for blocks that take more than 256 MiB meanwhile. It starts as soon as a gradient is whole
    ns_form        'gram': on the Gram matrix, in f32. It takes fewer operations for matrices that are more than twice as long as wide
    options        those of Optimizer, but topk. pack= takes parameters of `others` alone

    With a shard each matrix has one rank that orthogonalises it, whole. The order of the arguments after lr is not torch's: give their names."""
    rule = 'muon'

    def __init__(self, params: Iterable[Any], root: 'os.PathLike[str] | str', lr: Number = 1e-3, *, momentum: float = 0.95, nesterov: bool = True,
                 weight_decay: float = 0.1, ns_steps: int = 5, ns_coefficients: Tuple[float, float, float] = (3.4445, -4.775, 2.0315),
                 eps: float = 1e-7, adjust_lr_fn: Optional[str] = 'original', others: str = 'adamw', ns: str = 'client',
                 ns_form: str = 'plain', maximize: bool = False, **options: Any) -> None:
        if others not in RULES or others == self.rule:
            raise ValueError(f'others must be {", ".join(r for r in RULES if r != self.rule)}, not {others!r}')
        if options.get('topk'):
            raise ValueError('Muon takes no topk: a matrix of few elements has another orthogonal one')
        self._others, self._others_defaults = RULES[others], defaults_of(RULES[others])
        check_form(ns, ns_form)
        self._in_store, self._form, self._group_of = ns == 'store', ns_form, {}
        super().__init__(params, root, {'lr': lr, 'momentum': momentum, 'nesterov': nesterov, 'weight_decay': weight_decay, 'maximize': maximize,
                                        'ns_steps': ns_steps, 'ns_coefficients': ns_coefficients, 'eps': eps,
                                        'adjust_lr_fn': adjust_lr_fn, 'use_muon': True, 'split': None}, **options)


def defaults_of(kind: Type[Optimizer]) -> Dict[str, Any]:
    """The hyper-parameters of a rule."""
    known = inspect.signature(kind.__init__).parameters.values()
    return {p.name: p.default for p in known if p.default is not p.empty}


RULES[Muon.rule] = Muon
