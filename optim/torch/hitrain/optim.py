# SPDX-License-Identifier: Apache-2.0
"""The rules of the store as optimizers of PyTorch: the arguments of torch.optim, and the directory of the model."""
import os
from typing import Any, Dict, Iterable, Tuple, Union

import torch

from hitrain._job import Job
from hitrain._optimizer import Optimizer
from hitrain.distributed import RankFailed, Shard

__all__ = ['Adagrad', 'Adam', 'AdamW', 'Job', 'Lion', 'Optimizer', 'RankFailed', 'SGD', 'Shard']

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
