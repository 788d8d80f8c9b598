# SPDX-License-Identifier: Apache-2.0
"""Parameters get files: names, packs and parts, in groups."""
import errno
import hashlib
import math
import os
from typing import Any, Dict, Iterable, List, Set, Tuple

import torch

from hitrain import _packs
from hitrain._base import Base
from hitrain._files import ParameterFile, check_plain
from hitrain._memory import check_apart, check_ordered
from hitrain._packs import PackFile, Place
from hitrain._parts import is_dtensor, local_of, part_of_dtensor, shares
from hitrain._windows import WindowFile, can_have_windows
from hitrain._words import FILE_DTYPES, bytes_of, check_name


class Attached(Base):
    # -- names --

    def _named(self, params: Any) -> Tuple[List[torch.Tensor], List[str]]:
        tensors: List[torch.Tensor] = []
        names: List[str] = []
        seen: Set[int] = set()
        check_ordered("a group's 'params'", params)
        for entry in [params] if isinstance(params, torch.Tensor) else params:
            name, tensor = entry if isinstance(entry, tuple) else (None, entry)
            if name is None and self._given_names is not None:
                name = next(self._given_names, None)
                if name is None:
                    raise ValueError('names has fewer names than there are parameters')
            if tensor in self._given or id(tensor) in seen:
                raise ValueError(f'the parameter {name or len(tensors)} is given twice')
            seen.add(id(tensor))
            names.append(name if name is not None else f'parameter{len(self._given) + len(names)}')
            tensors.append(tensor)
        if self._given_names is None:
            names = self._unwrapped(names)
        fresh: Dict[str, None] = {}
        for name in names:
            check_name(name)
            if name in self._taken_names and any(f.name == name for f in self._held if isinstance(f, PackFile)):
                raise ValueError(f'a parameter is called {name}, as a file of pack= is by now: name the parameter otherwise, or give its group first')
            if name in self._taken_names or name in fresh:
                raise ValueError(f'two parameters are called {name}')
            fresh[name] = None
        return tensors, names

    def _unwrapped(self, names: List[str]) -> List[str]:
        """As the model calls its parameters, whatever it is wrapped in now. Files of a model that is there keep their names."""
        plain = _without_wrappers(names)
        if not self._resume:
            return plain
        held = self._names_in_store() if plain != names else set()
        return [n if n in held else p for n, p in zip(names, plain)]

    def _names_in_store(self) -> Set[str]:
        """Of files, and of the parameters in packs."""
        with self._root.explained('model root'):
            return {*os.listdir(self.root), *(place.name for places in _packs.packs_in(self.root).values() for place in places)}

    def _alike(self, name: str) -> str:
        """The store's name of a parameter whose name ends alike."""
        held = sorted(n for n in self._names_in_store() if n.endswith('.' + name) or name.endswith('.' + n))
        if held:
            return f'The model in the store has {held[0]}: pass names= as they are there'
        return 'The model in the store was made without it'

    # -- files --

    def _attach_groups(self, groups: List[Dict[str, Any]]) -> None:
        """The last ones of param_groups."""
        check_apart((name, p) for group in self.param_groups for name, p in zip(group['names'], group['params']))
        own = {name: p for group in groups for name, p in zip(group['names'], group['params'])}
        first = len(self.param_groups) - len(groups)
        group_of = {name: first + i for i, group in enumerate(groups) for name in group['names']}
        for pack, places in self._packs_of(own, group_of).items():
            self._attach_pack(pack, places, own, group_of)
        for name, p in own.items():
            if p not in self._files:
                self._attach(name, p)

    def _attach(self, name: str, p: torch.Tensor) -> None:
        if is_dtensor(p) and not self._shard:
            raise TypeError(f'{name} is a DTensor, of which each process holds a part: pass shard=hitrain.Shard(rank, world)')
        part = part_of_dtensor(name, p) if is_dtensor(p) else self._given_parts.get(name)
        self._check_kinds(name, p)
        dtype = self._param_dtype or p.dtype
        if math.prod(part.shape if part else p.shape) == 0:
            self._attach_empty(ParameterFile(self.root, name, p, dtype, self._grad_dtype or dtype, part))
            return
        f = self._file_of(name, p, dtype, self._grad_dtype or dtype, part)
        exists = os.path.exists(f.path) if self._built else self._resume
        self._files[p] = f
        self._taken_names[name] = self._held[f] = None
        if exists and not os.path.exists(f.path):
            raise FileNotFoundError(errno.ENOENT, f'no such file (parameter {name}). {self._alike(name)}', self.root)
        with self._root.explained(f'parameter {name}'):
            self._open_file(f, exists, fill=part is not None and name in self._fresh)

    def _attach_empty(self, f: ParameterFile) -> None:
        self._files[f.tensor] = f
        self._taken_names[f.name] = None
        if self._ranks.leads:
            with self._root.explained(f'parameter {f.name}'):
                f.make_empty()

    def _detach_group(self, group: Dict[str, Any]) -> None:
        gone = []
        for name, p in zip(group['names'], group['params']):
            self._taken_names.pop(name, None)
            self._given.pop(p, None)
            f = self._files.pop(p, None)
            gone += [f.whole] if f else []
        self._gather.end()
        for f in dict.fromkeys(gone):
            self._held.pop(f, None)
            self._taken_names.pop(f.name, None)
            try:
                f.unmake() if self._ranks.leads else f.close()
            except OSError:
                pass  # the caller must know the first error

    def _open_file(self, f: ParameterFile, exists: bool, fill: bool = False) -> None:
        self._root.known.forget(f.path)
        if exists:
            f.open_existing(fill)
        else:
            f.create()
            self._root.known.note(f.path, 'optimizer', '')
            self._root.known.note(f.path, 'grad_dtype', FILE_DTYPES[f.grad_dtype] if f.grad_dtype != f.dtype else '')

    def _file_of(self, name: str, p: torch.Tensor, dtype: torch.dtype, grad_dtype: torch.dtype, part: Any) -> ParameterFile:
        if self._root.passes_through and not part and not self._shard and can_have_windows(name, p):
            return WindowFile(self.root, name, p, dtype, grad_dtype)
        f = ParameterFile(self.root, name, p, dtype, grad_dtype, part, direct=not self._root.passes_through)
        f.trusts_versions = self._trusts_versions
        return f

    def _check_kinds(self, name: str, p: torch.Tensor) -> None:
        check_plain(f'the parameter {name}', local_of(p))
        dtype = self._param_dtype or p.dtype
        for d in (dtype, self._grad_dtype or dtype):
            if d not in FILE_DTYPES:
                raise TypeError(f'{name}: files can be {" or ".join(FILE_DTYPES.values())}, not {d}')

    # -- packs --

    def _packs_of(self, own: Dict[str, torch.Tensor], group_of: Dict[str, int]) -> Dict[str, List[Place]]:
        """Which parameters share files: as the store has it, and new ones."""
        names, tensors = list(own), list(own.values())
        there = self._resume or self._built
        with self._root.explained('model root'):
            packs = _packs.stored(self.root, names, tensors) if there else {}
            files = set(os.listdir(self.root)) if self._pack else set()
        if self._pack and (self._built or not self._resume):
            held = {place.name for places in packs.values() for place in places}
            state = [self._state_kind(group) for group in self.param_groups]
            may = [(n, t, group_of[n], state[group_of[n]]) for n, t in own.items()
                   if n not in held and n not in files and n not in self._given_parts and not is_dtensor(t) and self._may_pack(group_of[n])]
            for n, t, _, _ in may:
                self._check_kinds(n, t)
            packs.update(_packs.planned(may, lambda t: t.numel() * bytes_of(self._param_dtype or t.dtype), self._pack,
                                        {*self._taken_names, *names, *files}))
        order = {name: i for i, name in enumerate(names)}
        return dict(sorted(packs.items(), key=lambda item: order[item[1][0].name]))

    def _may_pack(self, group: int) -> bool:
        """May its parameters share files?"""
        return True

    def _attach_pack(self, pack: str, places: List[Place], own: Dict[str, torch.Tensor], group_of: Dict[str, int]) -> None:
        tensors = [own[place.name] for place in places]
        for place, t in zip(places, tensors):
            self._check_kinds(place.name, t)
            self._taken_names[place.name] = None
        dtype = self._param_dtype or tensors[0].dtype
        if self._feedback or any(is_dtensor(t) for t in tensors) or any(place.name in self._given_parts for place in places):
            raise ValueError(f'{self.root}/{pack} holds {len(places)} parameters, and {"topk" if self._feedback else "a parameter in parts"} '
                             'needs a file for each')
        runs = _packs.runs_of(places, group_of)
        state = {self._state_kind(self.param_groups[run.group]): place for run in runs for place in places if place.offset == run.first}
        if len(state) > 1:
            one, other = (place.name for place in list(state.values())[:2])
            raise ValueError(f'{self.root}/{pack} holds {one} and {other}, and their parameter groups keep different state: give both the same '
                             'kind, as momentum=0 or not, and the same state_bits')
        f = PackFile(self.root, pack, places, tensors, runs, dtype, self._grad_dtype or dtype, direct=not self._root.passes_through)
        self._check_pack(f)
        self._files.update(f.members())
        self._taken_names[pack] = self._held[f] = None
        with self._root.explained(f'parameter {pack}'):
            self._open_file(f, os.path.exists(f.path))

    def _check_pack(self, f: ParameterFile) -> None:
        if isinstance(f, PackFile) and self._overlap and self.accumulate > 1:
            raise ValueError(f'{f.path} is sent by step(), so overlap=True does not go with accumulate: pass overlap=False and call '
                             'send_gradients()')

    # -- parts of ranks --

    def _model_digest(self) -> str:
        text = '\n'.join(f'{f.name} {f.shape} {f.dtype} {f.grad_dtype} {f.part is not None}' for f in self._parameter_files())
        return hashlib.sha256(os.fsencode(text)).hexdigest()

    def _said_of_parts(self) -> Dict[str, Any]:
        """What this rank holds of parameters in parts, and, on rank 0, which of their files it has made."""
        parts = [f for f in self._parameter_files() if f.part]
        return {'parts': {f.name: [f.offset, f.local.numel()] for f in parts}, 'fresh': [f.name for f in parts if f.made]}

    def _share_parts(self, said: List[Dict[str, Any]]) -> None:
        """Each element of a parameter in parts gets the rank that writes its gradient."""
        for f in self._parameter_files():
            if f.part:
                held = [tuple(s['parts'].get(f.name, (0, 0))) for s in said]
                of_ranks = shares(f.name, math.prod(f.shape), held)
                f.share = of_ranks[self._ranks.rank]
                f.writers = [rank for rank, s in enumerate(of_ranks) if s.stop > s.start]


def as_groups(params: Iterable[Any]) -> List[Dict[str, Any]]:
    if isinstance(params, torch.Tensor):
        raise TypeError('params must be a list of parameters, not one tensor')
    check_ordered('params', params)
    listed = list(params)
    if not listed:
        raise ValueError('there are no parameters')
    groups = listed if isinstance(listed[0], dict) else [{'params': listed}]
    for group in groups:
        check_ordered("a group's 'params'", group['params'])
    return groups


_WRAPPERS = {'_checkpoint_wrapped_module', '_fsdp_wrapped_module', '_orig_mod'}


def _without_wrappers(names: List[str]) -> List[str]:
    """DistributedDataParallel and DataParallel call the wrapped model `module`, as a model may call a part of its own:
    so only if all do."""
    plain = ['.'.join(part for part in name.split('.') if part not in _WRAPPERS) for name in names]
    if all(name.startswith('module.') for name in plain):
        plain = [name[len('module.'):] for name in plain]
    return plain
