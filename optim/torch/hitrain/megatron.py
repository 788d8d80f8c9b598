# SPDX-License-Identifier: Apache-2.0
"""Optimizer state of Megatron-LM's distributed optimizer in a store, which runs the optimizer.

    import hitrain.megatron
    hitrain.megatron.attach(optimizer, '/mnt/hitrain/job')        # after the optimizer is built, before load_checkpoint

Gradients leave the device in the parameters' dtype, and new parameters come back: two bytes each way with bf16. The device needs no
room for main parameters and moments. The ranks that share one optimizer's state (a data parallel group, or one of
--num-distributed-optimizer-instances) are on the machine that mounts the store, and share a model root. A file has a whole parameter as
its tensor parallel rank has it, so another number of data parallel ranks finds its elements.

The interface (step, refresh_main_from_model_params, save_to, load_from) and the fields that are read are those of the optimizer state
stores of radixark/miles (miles_plugins/optimizers/nvme_stream.py) and of megatron/core/optimizer/distrib_optimizer.py, 2026. Megatron is not
imported but for the names of ranks.
"""
import hashlib
import importlib
import json
import os
import re
import warnings
from types import MethodType
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import torch
import torch.distributed as dist

from hitrain._words import HIDDEN
from hitrain.checkpoint import appearing
from hitrain.distributed import Ranks, Shard
from hitrain.optim import Adam, AdamW

__all__ = ['OptimizerStateStore', 'attach', 'load_from', 'save_to']

KEYS = 'lr', 'betas', 'eps', 'weight_decay'  # of a group, as Megatron's scheduler sets them
MANIFEST = 'hitrain.json'


class Piece(NamedTuple):
    """What this rank has of a parameter."""
    name: str
    model: Any                      # the whole tensor, as the model has it, with its main_grad
    local: torch.Tensor             # this rank's elements, in the buffer of parameters
    offset: int
    main: Optional[torch.Tensor]    # the optimizer's own tensor for them, whose .grad is clipped; None: no element
    group: Optional[int]


class OptimizerStateStore:
    """The state of one DistributedOptimizer. All ranks of its data parallel group construct it and call each method alike.

    root     the model root, in a folder that exists on the mount
    resume   None: go on with a model that is there, but only after load_from() has said at which step. True: go on with its newest
             step. False: there must be none
    allow_fresh_state  load_from() of a checkpoint without a manifest is False, and moments begin at zero
    options  of hitrain.AdamW: state_bits, durable_every, redo, retain, grad_dtype, ...
    """

    def __init__(self, dist_opt: Any, root: 'os.PathLike[str] | str', *, resume: Optional[bool] = None, allow_fresh_state: bool = False,
                 timeout: float = 1800.0, **options: Any) -> None:
        self.dist_opt, self.root, self._fresh = dist_opt, os.path.abspath(os.fspath(root)), allow_fresh_state
        _refuse(dist_opt)
        group = dist_opt.data_parallel_group
        shard = Shard(dist.get_rank(group), dist.get_world_size(group), timeout=timeout)
        _check_machine(self.root, group, shard)
        self._pieces = list(_pieces(dist_opt))
        self._ranks = Ranks(shard, f'{self.root}.megatron')
        there = os.path.isdir(self.root)
        said = self._ranks.together('attaching', lambda: {'groups': {p.name: p.group for p in self._pieces if p.group is not None}, 'there': there})
        group_of = {name: g for s in said for name, g in s['groups'].items()}
        self._theirs = sorted(set(group_of.values()))
        self._grad_dtype = options.get('grad_dtype')
        for p in self._pieces:
            if self._grad_dtype not in (None, p.local.dtype):
                if not hasattr(p.local, 'grad_dtype'):
                    raise ValueError(f'grad_dtype={self._grad_dtype} beside parameters of {p.local.dtype} needs a PyTorch whose tensors have grad_dtype')
                p.local.grad_dtype = self._grad_dtype
        rule = AdamW if getattr(dist_opt.config, 'decoupled_weight_decay', True) else Adam
        there = resume is not False and said[0]['there']
        self.optimizer = rule([{'params': [(p.name, p.local) for p in self._pieces if group_of[p.name] == g], **self._words(g)} for g in self._theirs],
                              self.root, shard=shard, parts={p.name: (p.offset, tuple(p.model.shape)) for p in self._pieces}, resume=there, **options)
        self._waits = there and resume is None
        for p in self._pieces:
            if p.main is not None and p.main.data_ptr() != p.local.data_ptr():
                p.main.untyped_storage().resize_(0)

    def _words(self, group: int) -> Dict[str, Any]:
        theirs = self.dist_opt.optimizer.param_groups[group]
        return {k: theirs[k] for k in KEYS if k in theirs}

    @torch.no_grad()
    def step(self) -> bool:
        """One step with the gradients that Megatron has reduced and clipped. The buffer of parameters has this rank's new values."""
        if self._waits:
            raise RuntimeError(f'{self.root} has a model at step {self.optimizer.committed_step}: load a checkpoint (load_from), or attach '
                               'with resume=True to go on from that step, or remove it to begin anew')
        for p in self._pieces:
            if p.main is not None:
                g = p.main.grad if p.main.grad is not None else p.model.main_grad.view(-1)[p.offset:p.offset + p.local.numel()]
                p.local.grad = g.view(-1).to(self._grad_dtype or p.local.dtype)
        for ours, g in zip(self.optimizer.param_groups, self._theirs):
            ours.update(self._words(g))
        self.optimizer.step()
        for p in self._pieces:
            p.local.grad = None
        return True

    @torch.no_grad()
    def refresh_main_from_model_params(self, state_dict: 'Union[None, Dict[str, Any], Callable[[], Any]]' = None) -> int:
        """The store takes the model's values, or those of a state dict, or what a function copies into the model. Moments stay.
        Returns the bytes of this rank's elements."""
        if callable(state_dict):
            state_dict()
        elif state_dict is not None:
            source = self.dist_opt._build_model_param_to_state_dict_param_map(state_dict)
            for p in self._pieces:
                p.local.copy_(source[p.model].view(-1)[p.offset:p.offset + p.local.numel()])
        self.optimizer.commit_together()
        return sum(p.local.numel() * p.local.element_size() for p in self._pieces)

    initialize_main_from_model_params = refresh_main_from_model_params

    # -- checkpoints --

    def _kept(self) -> List[str]:
        return os.listdir(os.path.join(self.root, HIDDEN, 'snap'))

    def _manifest(self, base: 'os.PathLike[str] | str') -> str:
        return os.path.join(base, MANIFEST, f'{os.path.basename(self.root)}.json')

    def save_to(self, base: 'os.PathLike[str] | str') -> None:
        """Keeps this step under a name that a manifest below `base` has, and copies nothing. The kept step ends with a later save_to()
        into a sibling of `base`, once the folder of its checkpoint was removed."""
        base = os.path.realpath(base)
        prefix = f'megatron.{hashlib.sha256(os.fsencode(os.path.dirname(base))).hexdigest()[:12]}.'

        def save() -> None:
            kept = self._kept()
            name = next(n for n in (f'{prefix}{self.optimizer.committed_step}.{i}' for i in range(1 << 20)) if n not in kept)
            self.optimizer.snapshot(name)
            _write(self._manifest(base), {'version': 1, 'root': self.root, 'kept': name, 'step': self.optimizer.committed_step})
            try:
                used = {_kept_of(self._manifest(os.path.join(os.path.dirname(base), d))) for d in os.listdir(os.path.dirname(base))}
            except ValueError as e:
                warnings.warn(f'{e}: no kept step of {self.root} ends', RuntimeWarning, stacklevel=3)
                return
            for old in kept:
                if old.startswith(prefix) and old not in used:
                    self.optimizer._root.command(f'forget {old}')
        self.optimizer.commit_together(save)

    def load_from(self, base: 'os.PathLike[str] | str') -> bool:
        """Goes back to the step of a checkpoint: parameters, moments and counts. False: the checkpoint has no manifest, and that is allowed."""
        path = self._manifest(os.path.realpath(base))
        said = self._ranks.together('load_from()', lambda: {'kept': _kept_of(path)} if self._ranks.leads else {})[0]['kept']
        if not said:
            if not self._fresh:
                raise FileNotFoundError(f'{path} does not exist: this checkpoint has no optimizer state in a store. allow_fresh_state=True '
                                        '(--no-load-optim) goes on with moments of zero')
            self._ranks.together('new moments', lambda: self.optimizer._root.command('reset *') if self._ranks.leads else None)
            self.refresh_main_from_model_params()
        elif said not in self._kept():
            raise FileNotFoundError(f'{self.root} does not keep the step {said} that {path} names: it is the root of another job, or the step was '
                                    'forgotten. From a vault `hitrainctl restore` brings it, and `hitrainctl snapshot ROOT NAME` gives it the name')
        else:
            self.optimizer.rollback(said)
        self._waits = False
        return bool(said)

    def close(self) -> None:
        self.optimizer.close()
        self._ranks.close()


# ------------------------------------------------------------------ what Megatron has

def _refuse(dist_opt: Any) -> None:
    """What a store cannot do for it, by Megatron's names."""
    config = dist_opt.config
    if getattr(config, 'optimizer', 'adam') != 'adam':
        raise ValueError(f'--optimizer {config.optimizer}: this interface has AdamW and Adam; hitrain.Muon is for programs of your own')
    for option in 'use_precision_aware_optimizer', 'optimizer_cpu_offload', 'offload_optimizer_states', 'reuse_grad_buf_for_mxfp8_param_ag':
        if getattr(config, option, False):
            raise ValueError(f'{option} and a store for the optimizer state exclude each other')
    if getattr(dist_opt.ddp_config, 'use_megatron_fsdp', False):
        raise ValueError('use_megatron_fsdp: its optimizer state has another layout; use the distributed optimizer')
    for buffer in dist_opt.buffers:
        for p in buffer.params:
            if type(p.data) is not torch.Tensor or p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(f'a parameter is a {type(p.data).__name__} of {p.dtype}: a store has float32, bfloat16 and float16')


def _check_machine(root: str, group: Any, shard: Shard) -> None:
    """The ranks of a model root share its mount: others would wait for one another, or each make a root of its own."""
    folder = os.path.dirname(root)
    with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as f:
        here = f.read().strip(), os.stat(folder).st_dev, os.stat(folder).st_ino
    said: List[Any] = [None] * shard.world
    dist.all_gather_object(said, here, group=group)
    for rank, there in enumerate(said):
        if there != said[0]:
            raise ValueError(f'{folder} is on another mount for rank {rank} than for rank 0 of its {shard.world} data parallel ranks: the ranks that '
                             'share optimizer state share a mount. --num-distributed-optimizer-instances makes such groups within machines')


def _pieces(dist_opt: Any) -> Iterator[Piece]:
    """Every parameter of the optimizer's buffers, in the same order on all ranks."""
    named: Dict[torch.Tensor, str] = {}
    chunks = dist_opt.model_chunks
    for i, chunk in enumerate(chunks):
        for name, p in chunk.named_parameters():
            named[p] = (f'{i}.' if len(chunks) > 1 else '') + re.sub(r'^(module\.)+', '', name)
    mains: Dict[torch.Tensor, Tuple[torch.Tensor, int]] = {}
    for models, own in ((dist_opt.model_float16_groups, dist_opt.shard_fp32_from_float16_groups), (dist_opt.model_fp32_groups, dist_opt.shard_fp32_groups)):
        for g, (ps, ms) in enumerate(zip(models, own)):
            mains.update((p, (m, g)) for p, m in zip(ps, ms))
    for buffer in dist_opt.buffers:
        for p in buffer.params:
            if p not in mains:
                yield Piece(named[p], p, torch.empty(0, dtype=p.dtype, device=p.device), 0, None, None)
                continue
            ranges = dist_opt._get_model_param_range_map(p)
            of_buffer, _, bucket = dist_opt.model_param_gbuf_map[p]
            world = ranges['gbuf_world_in_bucket']
            local = dist_opt.buffers[of_buffer].buckets[bucket].param_data.view(-1)[world.start:world.end]
            assert local.numel() == ranges['param'].end - ranges['param'].start
            yield Piece(named[p], p, local.detach(), ranges['param'].start, *mains[p])


# ------------------------------------------------------------------ manifests

def _write(path: str, manifest: Dict[str, Any]) -> None:
    """Whole, or as before."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with appearing() as appear, appear(path) as fd:
        os.write(fd, json.dumps(manifest).encode())


def _kept_of(path: str) -> str:
    """The kept step that a manifest names; '': there is no manifest. ValueError: it is none of this version."""
    try:
        with open(path, encoding='utf-8') as f:
            manifest = json.load(f)
    except (FileNotFoundError, NotADirectoryError):
        return ''
    except ValueError as e:
        raise ValueError(f'{path}: {e}') from e
    if not isinstance(manifest, dict) or manifest.get('version') != 1 or not isinstance(manifest.get('kept'), str) or not manifest['kept']:
        raise ValueError(f'{path} is no manifest of this version')
    return manifest['kept']


# ------------------------------------------------------------------ switching it on

def attach(optimizer: Any, root: 'os.PathLike[str] | str', *, place: str = '', **options: Any) -> List[OptimizerStateStore]:
    """Gives each DistributedOptimizer of `optimizer` (itself, or a chain) a store below the folder `root`, and routes what touches its state there.

    place    the name of this model parallel rank's folder; default: from Megatron's ranks, as in tp0-pp1
    options  of OptimizerStateStore
    """
    stores = []
    for i, dist_opt in enumerate(getattr(optimizer, 'chained_optimizers', [optimizer])):
        if getattr(dist_opt, 'is_stub_optimizer', False):
            continue
        if not hasattr(dist_opt, 'model_param_gbuf_map'):
            raise TypeError(f'{type(dist_opt).__name__} is no DistributedOptimizer: pass --use-distributed-optimizer')
        name = f'{place or _place(dist_opt)}-opt{i}'
        instance = getattr(dist_opt, 'distributed_optimizer_instance_id', 0)
        os.makedirs(root, exist_ok=True)
        store = OptimizerStateStore(dist_opt, os.path.join(root, f'{name}-{instance}' if instance else name), **options)
        _bind(dist_opt, store)
        stores.append(store)
    return stores


def save_to(optimizer: Any, base: 'os.PathLike[str] | str') -> None:
    """For a Megatron whose save_checkpoint() does not call the stores: call it on all ranks with the folder of the checkpoint."""
    for store in _stores(optimizer):
        store.save_to(base)


def load_from(optimizer: Any, base: 'os.PathLike[str] | str') -> bool:
    """The same after load_checkpoint(). False: a store had nothing there, and that was allowed."""
    return all([store.load_from(base) for store in _stores(optimizer)])


def _stores(optimizer: Any) -> List[OptimizerStateStore]:
    return [o._nvme_state_store for o in getattr(optimizer, 'chained_optimizers', [optimizer]) if hasattr(o, '_nvme_state_store')]


def _place(dist_opt: Any) -> str:
    ranks = importlib.import_module('megatron.core.parallel_state')
    place = f'tp{ranks.get_tensor_model_parallel_rank()}-pp{ranks.get_pipeline_model_parallel_rank()}'
    experts = any(not getattr(p, 'allreduce', True) for buffer in dist_opt.buffers for p in buffer.params)
    return f'{place}-ep{ranks.get_expert_model_parallel_rank()}' if experts else place


def _bind(dist_opt: Any, store: OptimizerStateStore) -> None:
    """Megatron's own methods for state, on this instance."""
    def step_with_ready_grads(self: Any) -> bool:
        done = store.step()
        if not self.ddp_config.overlap_param_gather:
            for chunk in self.model_chunks:
                chunk.start_param_sync()
        return done

    def reload_model_params(self: Any, state_dict: Any = None) -> None:
        store.refresh_main_from_model_params(state_dict)

    def state_dict(self: Any) -> Dict[str, Any]:
        return {'nvme_state_store': True}

    def load_state_dict(self: Any, state_dict: Any) -> None:
        """load_from() has the state."""

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Dict[str, Any]:
        return {}
    for method in step_with_ready_grads, reload_model_params, state_dict, load_state_dict, sharded_state_dict:
        setattr(dist_opt, method.__name__, MethodType(method, dist_opt))
    dist_opt._nvme_state_store = store  # where its save_checkpoint() and load_checkpoint() look
