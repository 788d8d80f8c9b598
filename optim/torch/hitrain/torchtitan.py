# SPDX-License-Identifier: Apache-2.0
"""torchtitan's container of optimizers, whose state is in a store, which runs them.

    from hitrain.torchtitan import OptimizersContainer
    config.optimizer = OptimizersContainer.Config(root='/mnt/hitrain/llama', param_groups=config.optimizer.param_groups)

The interface is that of torchtitan/components/optimizer of torchtitan 0.3. The ranks are on the machine that mounts the store. Each model part of
fully_shard has a model root; pipeline and tensor parallelism are refused by name.
"""
import importlib
import os
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Dict, List

import torch
import torch.distributed as dist

from hitrain._parts import is_dtensor
from hitrain.distributed import Shard
from hitrain.optim import Adam, AdamW, Muon

__all__ = ['OptimizersContainer']

KNOWN = '0.3'
titan: Any = importlib.import_module('torchtitan.components.optimizer.optimizer')
RULES = {'Adam': Adam, 'AdamW': AdamW}

if not version('torchtitan').startswith(KNOWN + '.') or not hasattr(titan.OptimizersContainer, '_build_param_groups'):
    raise ImportError(f'hitrain.torchtitan knows torchtitan {KNOWN}, and this is {version("torchtitan")}: hitrain.AdamW with shard= works with '
                      'any training loop (docs/frameworks/fsdp.md)')


class OptimizersContainer(titan.OptimizersContainer):  # type: ignore[misc]
    """All ranks construct it and call each method alike. Groups of `Muon` and `AdamW` share a step."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.OptimizersContainer.Config):  # type: ignore[misc]
        root: str = ''
        """The model root, in a folder that exists on the mount; with several model parts their folder. A model that is there goes on."""

        options: Dict[str, Any] = field(default_factory=dict)
        """Of hitrain.AdamW: state_bits, durable_every, redo, retain, job, ..."""

    def __init__(self, config: Any, *, model_parts: List[torch.nn.Module]) -> None:
        if not config.root:
            raise ValueError('OptimizersContainer.Config needs root=, a model root on a mount of hitrain')
        if config.implementation == 'fused_opt_states_bf16':
            raise ValueError("implementation='fused_opt_states_bf16' is torch's: options={'state_bits': 16} is the store's")
        self.model_parts, self.optimizers = model_parts, []
        for i, model in enumerate(model_parts):
            groups, _ = self._build_param_groups(model, config.param_groups, {})
            root = os.path.join(config.root, f'part{i}') if len(model_parts) > 1 else config.root
            self.optimizers.append(_make(groups, root, _shard_of(model), config.options))
        held = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group['params']]
        self._validate_params(held)
        self._post_init(held)

    def state_dict(self) -> Dict[str, Any]:
        """Flat, by names, as torchtitan's own. State that does not exist yet is zeros."""
        flat: Dict[str, Any] = {}
        for optimizer in self.optimizers:
            said, names = optimizer.state_dict(), _names(optimizer)
            flat.update((f'state.{names[i]}.{word}', value) for i, state in said['state'].items() for word, value in state.items())
            flat.update((f'param_groups.{names[i]}.{key}', value) for g in said['param_groups'] for i in g['params']
                        for key, value in g.items() if key != 'params')
        return flat

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        for optimizer in self.optimizers:
            number = {name: i for i, name in enumerate(_names(optimizer))}
            packed: Dict[str, Any] = {'state': {i: {} for i in number.values()}, 'param_groups': []}
            for key, value in state_dict.items():
                kind, _, rest = key.partition('.')
                name, _, word = rest.rpartition('.')
                if kind == 'state' and name in number:
                    packed['state'][number[name]][word] = value
            for g in optimizer.param_groups:
                prefix = f'param_groups.{g["names"][0]}.'
                words = {key[len(prefix):]: value for key, value in state_dict.items() if key.startswith(prefix)}
                packed['param_groups'].append({**words, 'params': [number[name] for name in g['names']]})
            optimizer.load_state_dict(packed)

    def close(self) -> None:
        """Commits, and lets go of the mount."""
        for optimizer in self.optimizers:
            optimizer.close()


def _names(optimizer: Any) -> List[str]:
    """In the order of the numbers in its state_dict()."""
    return [name for g in optimizer.param_groups for name in g['names']]


def _make(groups: Dict[str, List[Dict[str, Any]]], root: str, shard: Shard, options: Dict[str, Any]) -> Any:
    there = os.path.exists(root)
    dist.barrier()  # all have looked before one makes it
    named = [{**g, 'params': list(zip(g['param_names'], g['params'])), 'rule': name} for name, of in groups.items() for g in of]
    for g in named:
        del g['param_names']
    rules = set(groups)
    words = dict(shard=shard, resume=there, full_state_dict=True, **options)
    if rules <= {'Muon', 'AdamW'} and 'Muon' in rules:
        return Muon([{**g, 'use_muon': g.pop('rule') == 'Muon'} for g in named], root, **words)
    if len(rules) != 1 or not rules <= set(RULES):
        raise ValueError(f'optimizers {", ".join(sorted(rules))}: a store has {", ".join(RULES)}, one for all groups, or Muon beside AdamW')
    for g in named:
        del g['rule']
    return RULES[rules.pop()](named, root, **words)


def _shard_of(model: torch.nn.Module) -> Shard:
    """All ranks share the model: with others each would make another one at the same root."""
    params: List[Any] = [p for p in model.parameters() if p.requires_grad and is_dtensor(p)]
    world = dist.get_world_size()
    for mesh in {p.device_mesh for p in params}:
        if mesh.size() != world:
            raise ValueError(f'a mesh of {mesh.size()} of {world} ranks: pipeline, tensor and expert parallelism are not known here; '
                             'fully_shard over all ranks, also with replicas, is')
    return Shard(dist.get_rank(), world)
