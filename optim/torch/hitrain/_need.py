# SPDX-License-Identifier: Apache-2.0
"""How large a store a model needs: the formula of optim/rules/need.c, which has the reasons."""
from typing import Any, Iterable, Sequence, Tuple

import torch

_STATES = {'adamw': 2, 'adam': 2, 'lion': 1, 'adagrad': 1, 'sgd': 0, 'muon': 2}  # muon: that of others
_KINDS = {torch.float32: (4, 0), torch.bfloat16: (2, 2), torch.float16: (2, 4)}  # bytes of a parameter, of its master
_BLOCK, _MIB = 4096, 1 << 20


def _need(elements: int, tensors: int, parameter: int, masters: int, states: int, retain: int, redo: int, redo_keep: int, accumulate: int,
          in_phases: bool) -> int:
    """Bytes of an element of the parameter and of its master; of 16 elements of its state; redo: 0, or each so many-th step is full."""
    content = 16 * (parameter + masters) + states + (2 if masters == 2 else 0)
    gradient = 4 if parameter == 4 or accumulate > 1 else 2
    times, gradients = 2 + (retain + 2 if retain else 0), 1 + (redo + redo_keep if redo else 0)
    between = 2 + 2 * gradients if in_phases else 0
    total = (elements // 16 + 1) * (content * times + 16 * (gradient * gradients + between))
    total += tensors * _BLOCK * (5 * times + gradients)
    total += total // 24 + 12 * _MIB
    total = total * 16 // 15
    return (total + _MIB - 1) // _MIB * _MIB


def parameters(model: Any) -> Iterable[torch.Tensor]:
    if isinstance(model, torch.nn.Module):
        return model.parameters()
    return [p[1] if isinstance(p, tuple) else p for p in model]


def bytes_of(sizes: Sequence[Tuple[torch.dtype, int]], optimizer: str, momentum: float, retain: int, redo: int, redo_keep: int, accumulate: int,
             state_bits: int = 32) -> int:
    """sizes: dtype and number of elements of each tensor. The content of all counts as that of the largest kind."""
    name = optimizer.lower()
    if name not in _STATES:
        raise ValueError(f'optimizer {optimizer!r} is none of {", ".join(_STATES)}')
    for dtype, _ in sizes:
        if dtype not in _KINDS:
            raise ValueError(f'a parameter has dtype {dtype}: a store trains float32, bfloat16 and float16')
    states = {32: 64, 16: 32, 8: 17}[state_bits] * (1 if name == 'sgd' and momentum else _STATES[name])  # 8: with a scale for 256 elements
    elements = sum(n for _, n in sizes)
    return max(_need(elements, len(sizes), *_KINDS[kind], states, retain, redo, redo_keep, accumulate, name == 'muon')
               for kind in {dtype for dtype, _ in sizes} or {torch.float32})


def parameters_bytes(elements: int, dtype: torch.dtype) -> int:
    """Of a model of which only its size is known: AdamW, without kept or logged steps, in tensors of a million elements."""
    return _need(elements, elements // 1_000_000 + 1, *_KINDS[dtype], 64 * _STATES['adamw'], 0, 0, 0, 1, False)


def store_bytes(model: Any, *, optimizer: str = 'adamw', momentum: float = 0.0, retain: int = 0, redo: bool = False, durable_every: int = 1,
                redo_keep: int = 0, accumulate: int = 1, state_bits: int = 32) -> int:
    """How large a store must be that has only this model: a module (also on 'meta'), its parameters, or pairs with names.

    The options are those of the optimizer with which it will be trained. In a store of this size each step has its space,
    and so have the kept and logged steps. `hitrainctl size` prints the same for a number of parameters.
    """
    return bytes_of([(p.dtype, p.numel()) for p in dict.fromkeys(parameters(model))], optimizer, momentum, retain, durable_every if redo else 0,
                    redo_keep, accumulate, state_bits)
