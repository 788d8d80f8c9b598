# SPDX-License-Identifier: Apache-2.0
"""Train what does not fit: parameters lie in the store, and are in memory while a block needs them.

docs/offload.md describes it for users. _mapped.py has the memory of a parameter, _residency.py the order, _hooks.py the model's hooks, _early.py
gradients that leave in backward, and _offloaded.py the optimizer.
"""
import functools
import os
from typing import Any, Callable, Dict, Iterable, List, Optional, Type, Union

import torch
from torch import nn

from hitrain import optim
from hitrain._compile import options_of
from hitrain._device import Copies, gpu_of
from hitrain._empty import Filler, Weights, init_empty
from hitrain._files import ParameterFile
from hitrain._gate import withdrawn_to
from hitrain._hooks import OPTIMIZERS
from hitrain._offloaded import Offloaded
from hitrain._optimizer import Optimizer
from hitrain._reduce import check_group
from hitrain._root import Root
from hitrain._units import blocks_of, check_keep, check_keep_of_device, check_model, units_of, with_frozen
from hitrain.distributed import Shard

__all__ = ['init_empty', 'materialize', 'microbatches', 'offload']

REFUSED = {
    'overlap': 'gradients always leave in backward',
    'param_dtype': "files have the parameters' own dtype: convert the model first, as with model.bfloat16()",
    'parts': 'each file is the memory of a whole parameter',
    'pack': 'each file is the memory of one parameter',
    'names': 'files have the names of the model',
    'topk': 'a residual in memory is as large as the model',
}


def offload(model: nn.Module, root: 'os.PathLike[str] | str', optimizer: Union[str, Type[Optimizer]] = 'adamw', *, keep: int,
            blocks: Optional[Iterable[nn.Module]] = None, weights: Optional[Weights] = None,
            init: Optional[Callable[[nn.Module], Any]] = None, params: Union[None, Iterable[Any], Callable[[nn.Module], Iterable[Any]]] = None,
            resume: bool = False, activations: Union[None, int, str] = None, device: Union[None, str, torch.device] = None,
            compile: Union[bool, Dict[str, Any]] = False, shard: Optional[Shard] = None, group: Any = None, **options: Any) -> Optimizer:
    """Moves the parameters of a model into the store, in place, and returns their optimizer. The loop of training stays as it is.

    keep      bytes of parameters that are in memory at a time. Two blocks at least let one be read while the other computes
    optimizer adamw, adam, sgd, lion, adagrad or muon, or a class of hitrain.optim
    blocks    modules that are loaded as a whole; default: the children of each outermost ModuleList. Other modules
              are loaded one by one
    weights   values of the parameters: a safetensors file or a folder of them, a checkpoint of torch.save, or a mapping of
              names to tensors. Default: those that the model has. A model of init_empty() has none: then each module's own
    init      gives one module of init_empty() its values; default: its reset_parameters()
    params    groups as for an optimizer of PyTorch, or a function that makes them of the model; default: all, for Muon as muon_groups() has them. Other
              parameters that do not train are offloaded, too; other ones stay in memory
    resume    the values are in the store already, and the model may be one of init_empty()
    activations  bytes of tensors saved for backward that stay in memory; older ones go to the store. 'auto': as many as the store cannot
              take in the time of the forward. Default: all stay. Needs PyTorch 2
    device    a GPU that computes: `keep` bytes of parameters are loaded there, with all that are outside blocks. Buffers go there. The model
              itself is given in the memory of the CPU, or as one of init_empty(). Default: the CPU computes
    compile   True, or options of torch.compile: the forward of each block is compiled as one graph (fullgraph=True), with its hooks outside.
              Needs PyTorch 2.1
    shard     this process is one of several, each of which offloads the same model to the same root and runs batches of its own. A step
              has the mean of their gradients. All ranks call backward(), step() and zero_grad() alike
    group     with a shard: the process group of its ranks, which takes tensors of the CPU; default: that of all processes
    options   those of the optimizer, as lr, accumulate, max_grad_norm or async_step"""
    for name, why in REFUSED.items():
        if options.get(name):
            raise TypeError(f'offload() takes no {name}: {why}')
    kind: Any = optim.RULES.get(optimizer) if isinstance(optimizer, str) else optimizer
    if kind is None or not issubclass(kind, Optimizer):
        raise ValueError(f'there is no optimizer {optimizer}: use {", ".join(optim.RULES)}, or a class of hitrain.optim')
    if activations is not None and not (activations == 'auto' or isinstance(activations, int) and activations >= 0):
        raise ValueError(f"activations must be a number of bytes or 'auto', not {activations}")
    if activations is not None and not hasattr(torch, 'compiler'):
        raise ValueError(f'activations= needs PyTorch 2.1 or newer, and this is {torch.__version__}')
    compiled = options_of(compile) if compile else None
    if shard and shard.world > 1:
        check_group(shard, group)
    copies = _copies_of(device, keep, activations)
    check_model(model)
    filler = Filler(model, weights, init, resume)
    try:
        if not resume:
            filler.check()
        whole = list(blocks_of(model) if blocks is None else blocks)
        units = units_of(model, whole, copies is not None)
        if copies:
            check_keep_of_device(model, units, keep, copies.memory_bytes)
        else:
            check_keep(model, units, keep)
        two_phases = issubclass(kind, optim.Muon)
        groups = list(params(model) if callable(params) else params or (optim.muon_groups(model) if two_phases else model.named_parameters()))
        groups = with_frozen(model, groups, {'use_muon': False} if two_phases else {})
        made = _class_of(kind)(model, groups, root, units, keep, filler, group, copies, resume=resume, shard=shard if shard and shard.world > 1 else None, **options)
    except BaseException:
        filler.take_back()
        raise
    if compiled:
        made._compile(whole, compiled)
    if activations is not None:
        try:
            made._save_activations(model, activations)
        except BaseException:
            made.close()
            raise
    return made


def materialize(model: nn.Module, names: Iterable[str]) -> Dict[str, torch.Tensor]:
    """Copies of single parameters, in memory of their own, by name. Of a weight that has no values since close(), what its file has.
    KeyError: the model has none of that name."""
    known = OPTIMIZERS.get(model)
    optimizer = known() if known else None
    if optimizer is not None:
        optimizer._rest()
    held = {f'{prefix}.{name}' if prefix else name: p for prefix, module in model.named_modules() for name, p in module._parameters.items()}
    return {name: _read_withdrawn(held[name]) if withdrawn_to(held[name]) else held[name].detach().clone() for name in names}


def microbatches(model: nn.Module, batches: Iterable[Any], loss_fn: Callable[[nn.Module, Any], torch.Tensor]) -> List[torch.Tensor]:
    """Forward and backward of several batches of one step, in vertical order: each block gets all batches before the next block is
    loaded. Returns the losses, without their graphs, when all gradients are there.

    loss_fn(model, batch) returns the loss of one batch. docs/offload.md says what is equal to the usual order."""
    known = OPTIMIZERS.get(model)
    optimizer = known() if known else None
    if optimizer is None:
        raise ValueError(f'microbatches() takes a model of offload() whose optimizer is open, and this {type(model).__name__} is none')
    if not torch.is_grad_enabled():
        raise RuntimeError('microbatches() runs backward, and gradients are disabled here')
    listed = list(batches)
    if not listed:
        raise ValueError('microbatches() needs at least one batch')
    return optimizer._run_microbatches(model, listed, loss_fn)


def _read_withdrawn(p: torch.Tensor) -> torch.Tensor:
    root, name = withdrawn_to(p)  # type: ignore[misc]
    f = ParameterFile(root, name, torch.empty(p.shape, dtype=p.dtype), p.dtype, p.dtype)
    try:
        with Root(root).explained(f'parameter {name}'):
            f.open_existing()
    finally:
        f.close()
    return f.tensor


@functools.lru_cache(maxsize=None)
def _class_of(kind: Any) -> Any:
    return type(f'Offloaded{kind.__name__}', (Offloaded, kind), {'__doc__': Offloaded.__doc__})


def _copies_of(device: Union[None, str, torch.device], keep: int, activations: Union[None, int, str]) -> Optional[Copies]:
    if device is None:
        return None
    if activations == 'auto':
        raise ValueError("activations='auto' measures the time of the forward, which ends on a GPU after it has returned: pass bytes with device=")
    return Copies(gpu_of(device), keep)
