# SPDX-License-Identifier: Apache-2.0
"""What each step of a model changed, for inference that follows a trainer.

A trainer with deltas=N leaves `.hitrain/delta/STEP` for its last N steps (delta=on of user.hitrain.optimizer): the elements of parameters
that the step changed, with their new values. Readers need no optimizer, and any user who may read the parameters may read these.

    at = None
    while True:
        for at in hitrain.deltas('/mnt/hitrain/model', since=at):
            if at.whole:
                load(engine)                # all parameters, from their files; steps may run
            else:
                at.apply(engine.parameters)
        wait()

A model that is read while steps run is a mixture. It is right when the deltas up to the step at the end of the reading are applied,
as the loop does: a delta has new values, and no differences.
"""
import contextlib
import errno
import io
import json
import os
import re
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import torch

from hitrain import _packs
from hitrain._safetensors import FLOATS, Tensor, read_bytes, tensors_of
from hitrain._words import HIDDEN, attribute

FORMAT, VERSION = 'hitrain-delta', '1'
_INTEGERS = {'I32': torch.int32, 'I64': torch.int64}
_TRIES = 100  # of finding the newest step, while steps come and go


class Change(NamedTuple):
    """Of one parameter: the elements of its flat tensor that have changed, ascending, and their new values."""
    indices: torch.Tensor
    values: torch.Tensor
    shape: Tuple[int, ...]


class Delta:
    """What a step changed. `whole`: take the whole model instead, because no delta leads from what the reader has to this step.

    step, base_step  the numbers of the step, and of the one that `changes` begin with; base_step is 0 if the model is to be taken whole
    lineage          of the steps: those that are taken back and made again have another one
    changes          by name of parameter; empty if `whole`, or if the step changed nothing"""

    def __init__(self, step: int, base_step: int, lineage: int, changes: Optional[Dict[str, Change]] = None) -> None:
        self.step, self.base_step, self.lineage = step, base_step, lineage
        self.changes = changes or {}

    @property
    def whole(self) -> bool:
        return self.base_step == 0

    def apply(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Writes the new values into these tensors. KeyError: one has no tensor; ValueError: a shape differs, or `whole`. Then nothing is
        written."""
        if self.whole:
            raise ValueError(f'no delta leads to step {self.step}: load the whole model')
        for name, change in self.changes.items():
            if tuple(parameters[name].shape) != change.shape:
                raise ValueError(f'{name} has the shape {tuple(parameters[name].shape)}, and the delta is of {change.shape}')
        with torch.no_grad():
            for name, change in self.changes.items():
                tensor = parameters[name]
                flat = tensor.detach().reshape(-1)
                flat.index_copy_(0, change.indices.to(flat.device, torch.int64), change.values.to(flat.device, flat.dtype))
                if flat.data_ptr() != tensor.data_ptr():
                    tensor.copy_(flat.view(change.shape))  # it is not contiguous

    def __repr__(self) -> str:
        return f'Delta(step={self.step}, base_step={self.base_step}, lineage={self.lineage}, {len(self.changes)} changes)'


def deltas(root: 'os.PathLike[str] | str', since: 'Optional[Delta | int]' = None, lineage: Optional[int] = None) -> Iterator[Delta]:
    """The deltas of the model at `root` after the one that the caller has, one by one, up to the newest. It ends there: call it again for more.

    since    the last Delta of an earlier call; or the number of a step, with its lineage; None: the caller has nothing yet. Where the deltas
             after it are gone, or steps were taken back, there is one that is `whole`, with the newest number

    OSError as reading files; PermissionError: a changed parameter is not the caller's to read. ValueError: the model has no deltas, or since is
    a number alone: a step that was taken back and made again has the same one."""
    path = os.fspath(root)
    if isinstance(since, int):
        if lineage is None:
            raise ValueError('since=STEP needs lineage=: a step that was taken back and made again has the same number')
        since = Delta(since, 0, lineage)
    if ' delta=on' not in attribute(path, 'optimizer'):
        raise ValueError(f'{path}: its steps leave no deltas: set delta=on in user.hitrain.optimizer, or give the optimizer deltas=N')
    return _follow(path, since)


def _follow(root: str, at: Optional[Delta]) -> Iterator[Delta]:
    newest = _newest(root)
    while at is None or (newest.step, newest.lineage) != (at.step, at.lineage):
        found = None
        if at is not None and newest.lineage == at.lineage and newest.step > at.step:
            with contextlib.suppress(FileNotFoundError):
                found = _read(root, at.step + 1)
        if not (at and found and (found.base_step, found.lineage) == (at.step, at.lineage)):
            yield Delta(newest.step, 0, newest.lineage)
            return
        yield found
        at = found


def _newest(root: str) -> Delta:
    """Without its changes. A model that has no delta is at its step, of a lineage that another abort or mount replaces."""
    for _ in range(_TRIES):
        steps = [int(name) for name in os.listdir(_folder(root))]
        if not steps:
            return Delta(int(attribute(root, 'step') or 0), 0, int(attribute(root, 'delta_lineage') or 0))
        with contextlib.suppress(FileNotFoundError):  # the chain was cut
            return _read(root, max(steps), changes=False)
    raise OSError(f'{_folder(root)}: steps go faster than they can be read')


def _folder(root: str) -> str:
    return os.path.join(root, HIDDEN, 'delta')


def _read(root: str, step: int, changes: bool = True) -> Delta:
    path = os.path.join(_folder(root), str(step))
    with _opened(path) as f:
        tensors, said = tensors_of(f, path)
        if said.get('format') != FORMAT or said.get('version') != VERSION:
            raise ValueError(f'{path} is no {FORMAT} of version {VERSION}')
        found = Delta(int(said['step']), int(said['base_step']), int(said['lineage']))
        if not changes or found.whole:
            return found
        shapes = json.loads(said['shapes'])
        data = {t.name: _load(f, t) for t in tensors}
    for name, shape in shapes.items():
        found.changes.update(_members(root, name, Change(data[f'{name}.indices'], data[f'{name}.values'], tuple(shape))))
    return found


def _opened(path: str) -> io.BufferedReader:
    """A parameter that has lost its name cuts the chain, too."""
    try:
        return open(path, 'rb')
    except OSError as e:
        if e.errno == errno.ESTALE:
            raise FileNotFoundError(errno.ENOENT, e.strerror, path) from e
        raise


def _load(f: io.BufferedReader, t: Tensor) -> torch.Tensor:
    data = bytearray(t.size)
    read_bytes(f.fileno(), memoryview(data), t.at, t)
    return torch.frombuffer(data, dtype={**FLOATS, **_INTEGERS}[t.dtype])


def _members(root: str, name: str, change: Change) -> Dict[str, Change]:
    """A parameter, or those that share its file."""
    places = _packs.places_of(os.path.join(root, name)) if re.fullmatch(_packs.NAMES, name) else []
    if not places:
        return {name: change}
    ends = torch.tensor([p.offset + p.elements for p in places], dtype=change.indices.dtype)
    cuts: List[int] = [0, *torch.searchsorted(change.indices, ends).tolist()]
    return {p.name: Change(change.indices[a:b] - p.offset, change.values[a:b], p.shape) for p, a, b in zip(places, cuts, cuts[1:]) if a < b}
