# SPDX-License-Identifier: Apache-2.0
"""Units of a model, which are loaded as a whole, and what they need. Refuses models that offload() cannot take."""
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from hitrain._gate import withdrawn_to
from hitrain._memory import check_apart
from hitrain._parts import is_dtensor


def check_model(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.device.type == 'meta':
            raise ValueError(f'the buffer {name} is on the device meta, and offload() gives values to parameters alone: build the model in '
                             'hitrain.init_empty(), which makes ordinary buffers, or give the buffer its values before')
    for name, p in model.named_parameters():
        if is_dtensor(p):
            raise TypeError(f'{name} is a DTensor, of which each process holds a part: offload() takes models with whole parameters')
        if p.device.type not in ('cpu', 'meta'):
            raise ValueError(f'{name} is on {p.device}: offload() takes models in the memory of the CPU, and loads blocks to device= by itself. '
                             'Call model.cpu() before, or build the model in hitrain.init_empty()')
        if '_apply' in vars(model):
            raise ValueError('this model is offloaded already')
    check_apart((name, p) for name, p in model.named_parameters() if not withdrawn_to(p))


def blocks_of(model: nn.Module) -> List[nn.Module]:
    """The children of each outermost ModuleList."""
    outermost: List[nn.Module] = []
    within: Set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in within:
            outermost += list(module)
            within.update(module.modules())
    return outermost


def units_of(model: nn.Module, blocks: List[nn.Module], others_together: bool) -> List[Tuple[str, nn.Module, List[nn.Parameter]]]:
    """Blocks with all their parameters, and every other module with its own, as the model has them in order. others_together: these
    are one unit, that of the model."""
    names = {m: name for name, m in model.named_modules()}
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


def check_keep_of_device(model: nn.Module, units: List[Tuple[str, nn.Module, List[nn.Parameter]]], keep: int, memory: Optional[int]) -> None:
    """Parameters outside blocks stay on the device, and backward is in two blocks at a time."""
    others = sum(_size(params) for _, module, params in units if module is model)
    blocks = sorted((_size(params) for _, module, params in units if module is not model), reverse=True)[:2]
    need, all_of_it = others + sum(blocks), sum(_size(params) for _, _, params in units)
    why = f'needs {need} bytes at a time: {others} outside its blocks, and {sum(blocks)} for the {len(blocks)} largest blocks. blocks= names others'
    if memory is not None and need > memory:
        raise ValueError(f'the device has {memory} bytes, and this {type(model).__name__} {why}')
    if memory is not None and min(keep, all_of_it) > memory:
        raise ValueError(f'the device has {memory} bytes, and keep={keep} parameters are more. At least {need} are needed')
    if keep < need:
        raise ValueError(f'keep={keep} is too little for this {type(model).__name__} with device=, which {why}')


def check_keep(model: nn.Module, units: List[Tuple[str, nn.Module, List[nn.Parameter]]], keep: int) -> None:
    """A unit is needed with those around it: their forward runs, too."""
    sizes = {module: _size(params) for _, module, params in units}
    need = {name: sum(n for outer, n in sizes.items() if module is outer or module in set(outer.modules())) for name, module, _ in units}
    largest = max(need, key=lambda name: need[name])
    if keep < need[largest]:
        raise ValueError(f'keep={keep} is too little for {largest or "the model"}, which needs {need[largest]} bytes at a time. Smaller blocks= need less')


def with_frozen(model: nn.Module, groups: List[Any], of_frozen: Dict[str, Any]) -> List[Any]:
    """Groups of (name, parameter) pairs, with one of the parameters that do not train and are in no group, which has these settings."""
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
    return made + ([{'params': frozen, **of_frozen}] if frozen else [])
