# SPDX-License-Identifier: Apache-2.0
"""Packs: one file holds many small parameters, which then cost what a large one costs.

The file is a flat parameter. Its attribute `members` has a line for each member: offset in elements, shape, name.

    packed.0   | l0.norm1 | l0.norm2 | l0.router | ...        members: "0 32 l0.norm1\\n32 32 l0.norm2\\n..."

The rules of the optimizer work element by element, so a member has the bits that it would have in a file of its own. Its
tensor has memory of its own: values and gradients are copied to and from one flat tensor. Members may be of several parameter
groups: the attribute `optimizer` then has words for ranges of elements. A step has a gradient for all members or for none,
because they share the number of their steps.
"""
import math
import os
import re
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

import torch

from hitrain._bytes import checksum, memory_of, read_all, write_all
from hitrain._files import ParameterFile, check_elements, check_plain
from hitrain._words import XATTR, attribute, check_name, is_shape, read_shape, shape_word

WORD = 'members'
PREFIX = 'packed.'
NAMES = r'packed\.[0-9]+'
TEXT_BYTES_MAX = 60000      # of the attribute; the kernel allows 65536
PACK_BYTES_MAX = 16 << 20   # a pack is copied as a whole
RUNS_MAX = 256              # of members of one group: so many have room in the attribute, with all of a rule's words
WORDS_BYTES_MAX = 65536     # of that


class Place(NamedTuple):
    """Of a member in its pack. offset: in elements."""
    name: str
    offset: int
    shape: Tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def line(self) -> bytes:
        return b'%d %s %s\n' % (self.offset, shape_word(self.shape).encode(), os.fsencode(self.name))


class Run(NamedTuple):
    """Neighbours in a pack that are of one parameter group. first, end: elements."""
    group: int
    first: int
    end: int


def runs_of(places: List[Place], group_of: Mapping[str, int]) -> List[Run]:
    runs: List[Run] = []
    for place in places:
        end, group = place.offset + place.elements, group_of[place.name]
        if runs and runs[-1].group == group:
            runs[-1] = runs[-1]._replace(end=end)
        else:
            runs.append(Run(group, place.offset, end))
    return runs


def places_of(path: str) -> List[Place]:
    """[] if the file is no pack. ValueError: its attribute makes no sense."""
    text = attribute(path, WORD)
    return read_places(path, text) if text else []


def read_places(path: str, text: str) -> List[Place]:
    places: List[Place] = []
    end, names = 0, set()
    for line in text.rstrip('\n').split('\n'):
        try:
            offset, shape, name = line.split(' ', 2)
            place = Place(name, int(offset), read_shape(shape))
            check_name(name)
        except ValueError as e:
            raise ValueError(f'{path}: the attribute {WORD} has the line {line[:100]!r}, which names no member') from e
        if place.offset != end or place.elements <= 0 or name in names:
            raise ValueError(f'{path}: the attribute {WORD} does not say where {name} lies')
        end += place.elements
        names.add(name)
        places.append(place)
    return places


def packs_in(root: str) -> Dict[str, List[Place]]:
    """The packs of a model, by name. A copy of one under another kind of name is none, as a copy of a parameter is none."""
    found = {name: places_of(os.path.join(root, name)) for name in os.listdir(root) if re.fullmatch(NAMES, name)}
    return {name: places for name, places in found.items() if places}


class PackFile(ParameterFile):
    """The file of a pack. `tensor` has its shape and no memory; the tensors of the members have the values."""

    def __init__(self, root: str, name: str, places: List[Place], tensors: List[torch.Tensor], runs: List[Run], dtype: torch.dtype,
                 grad_dtype: torch.dtype, direct: bool) -> None:
        self.places, self.tensors, self.runs = places, tensors, runs
        wide = tensors[0].dtype
        for t in tensors:
            wide = torch.promote_types(wide, t.dtype)
        super().__init__(root, name, torch.empty(sum(p.elements for p in places), dtype=wide, device='meta'), dtype, grad_dtype, None, direct)
        self._wide = wide
        self._plain = dtype == wide and all(t.dtype == wide for t in tensors)  # a read gives the tensors the bits of the file

    @property
    def names(self) -> List[str]:
        return [p.name for p in self.places]

    def members(self) -> Iterable[Tuple[torch.Tensor, 'Member']]:
        for place, tensor in zip(self.places, self.tensors):
            yield tensor, Member(self, place, tensor)

    def may_gather(self) -> bool:
        return False

    def config_of(self, rule: str, words: List[Dict[str, str]]) -> str:
        """The text of `optimizer`. words: those of each parameter group; the root has those of the first one."""
        own = words[self.runs[0].group]
        sections: List[Tuple[int, int, str]] = []
        for run in self.runs:
            text = ' '.join(f'{k}={v}' for k, v in words[run.group].items() if v != own[k])
            if text and sections and sections[-1][1:] == (run.first, text):
                sections[-1] = (sections[-1][0], run.end, text)
            elif text:
                sections.append((run.first, run.end, text))
        head = [] if own == words[0] else [' '.join([rule, *(f'{k}={v}' for k, v in own.items())])]
        whole = '\n'.join(head + [f'{first}:{end} {text}' for first, end, text in sections])
        if len(whole) > WORDS_BYTES_MAX:
            raise ValueError(f'{self.path} holds {len(self.runs)} runs of members of different parameter groups, and their words do not '
                             'fit into its attribute: train with the groups that the model was made with, or with fewer of them')
        return whole

    # -- gradients --

    def has_gradient(self) -> bool:
        there = [t.grad is not None for t in self.tensors]
        if any(there) and not all(there):
            missing, having = self.places[there.index(False)].name, self.places[there.index(True)].name
            raise RuntimeError(f'{missing} has no gradient and {having} has one, but both lie in {self.name} and can only step together: '
                               'make the model without pack=, or with an optimizer for each part that steps by itself')
        return there[0]

    def check_gradient(self) -> None:
        for place, t in zip(self.places, self.tensors):
            grad: Any = t.grad
            if type(grad) is not torch.Tensor:
                check_plain(f'the gradient of {place.name}', grad)
            if grad.layout != torch.strided:
                raise TypeError(f'the gradient of {place.name} is sparse; only dense ones can be sent')
            check_elements(place.name, grad, place.elements)

    @torch.no_grad()
    def outgoing(self) -> torch.Tensor:
        return _joined([t.grad for t in self.tensors if t.grad is not None]).to('cpu', self.grad_dtype)

    def gradient_sent(self, early: bool) -> None:
        self.sent += 1  # by step() or send_gradients(), which clears it

    def is_sent(self) -> bool:
        return False

    def gradient_changed(self) -> bool:
        return False

    def clear_gradient(self) -> None:
        for t in self.tensors:
            t.grad = None

    # -- values --

    def describe(self, fd: int) -> None:
        os.setxattr(fd, XATTR + WORD, b''.join(p.line() for p in self.places))

    def sum_of_values(self) -> int:
        return checksum(self._values())

    def equals_file(self) -> bool:
        found = torch.empty(self.shape, dtype=self.dtype)
        with self._opened() as fd:
            read_all(fd, found)
        values = self._values()
        equal = bytes(memory_of(found)) == bytes(memory_of(values.to('cpu', self.dtype)))
        if equal:
            self._known = checksum(values)
        return equal

    def push(self, step: int) -> None:
        """The store keeps the masters of a block of bf16 parameters together: if one parameter is written, all begin anew. So those of
        the others are written back."""
        masters = self._masters() if self.push_writes_state() else None
        super().push(step)
        if masters is not None:
            now = self._values().to('cpu', self.dtype)
            same = masters.to(self.dtype).view(torch.int16) == now.view(torch.int16)
            with self._state('master', os.O_WRONLY) as fd:
                write_all(fd, torch.where(same, masters, now.to(torch.float32)))

    def push_writes_state(self) -> bool:
        return self.dtype == torch.bfloat16

    def _masters(self) -> Optional[torch.Tensor]:
        """None: it has no state yet."""
        with self._state('step', os.O_RDONLY) as fd:
            if not os.fstat(fd).st_size:
                return None
        masters = torch.empty(self.shape, dtype=torch.float32)
        with self._state('master', os.O_RDONLY) as fd:
            read_all(fd, masters)
        return masters

    def _write(self, fd: int) -> None:
        self._known = None
        values = self._values()
        source = values.to('cpu', self.dtype)
        write_all(fd, source)
        if not self._plain:  # compute with the store's values
            self._give(source.to(values.device, self._wide))
            values = self._values()
        self._known = checksum(values)

    def _read(self, fd: int) -> None:
        self._half_read = True
        found = torch.empty(self.shape, dtype=self.dtype)
        read_all(fd, found)
        values = found.to(self.tensors[0].device, self._wide)
        self._give(values)
        self._known, self._half_read = checksum(values if self._plain else self._values()), False

    @torch.no_grad()
    def _values(self) -> torch.Tensor:
        return _joined(self.tensors).to(self._wide)

    @torch.no_grad()
    def _give(self, values: torch.Tensor) -> None:
        parts = [part.view(t.shape) for part, t in zip(values.split([p.elements for p in self.places]), self.tensors)]
        if hasattr(torch, '_foreach_copy_'):  # PyTorch 2
            torch._foreach_copy_(self.tensors, parts)
        else:
            for t, part in zip(self.tensors, parts):
                t.copy_(part)


class Member(ParameterFile):
    """A member as its optimizer reads and writes its state. Its pack has the descriptors."""

    def __init__(self, pack: PackFile, place: Place, tensor: torch.Tensor) -> None:
        super().__init__(pack.root, place.name, tensor, pack.dtype, pack.grad_dtype)
        self._pack, self._offset = pack, place.offset

    @property
    def whole(self) -> ParameterFile:
        return self._pack

    @property
    def offset(self) -> int:
        return self._offset


def _joined(tensors: List[torch.Tensor]) -> torch.Tensor:
    """One flat tensor with the elements of all, where the first is."""
    device = tensors[0].device
    return torch.cat([t.reshape(-1) if t.device == device else t.reshape(-1).to(device) for t in tensors])


# ------------------------------------------------------------- who lies where

def stored(root: str, names: List[str], tensors: List[torch.Tensor]) -> Dict[str, List[Place]]:
    """The packs in the store that hold some of these parameters. ValueError if they are not all members of one, and if a parameter has
    a second place."""
    own, found = dict(zip(names, tensors)), {}
    place_of = {name: 'a file of its own' for name in os.listdir(root)}
    for pack, places in sorted(packs_in(root).items()):
        missing = [p.name for p in places if p.name not in own]
        there = [p.name for p in places if p.name in own]
        if there and missing:
            raise ValueError(f'{os.path.join(root, pack)} holds {there[0]} and {missing[0]}, which is not given with it: make the optimizer '
                             'with all parameters that share a file')
        for p in places if there else []:
            if p.name in place_of:
                raise ValueError(f'{os.path.join(root, pack)} holds {p.name}, which has {place_of[p.name]}, too: remove the one that is a copy')
            place_of[p.name] = f'a place in {pack}'
            if not is_shape(shape_word(p.shape), own[p.name].shape):
                raise ValueError(f'{os.path.join(root, pack)}: the shape of {p.name} is {shape_word(p.shape)} in the store and '
                                 f'{shape_word(own[p.name].shape)} in the model')
        if there:
            found[pack] = [p._replace(shape=tuple(own[p.name].shape)) for p in places]
    return found


def planned(given: Iterable[Tuple[str, torch.Tensor, int, Tuple[str, ...]]], bytes_of: Callable[[torch.Tensor], int], most: int,
            taken: Set[str]) -> Dict[str, List[Place]]:
    """New packs for the parameters of at most so many bytes that train and are of one dtype, device and kind of state. given: name,
    tensor, group and state of each. taken: names of other files. A parameter that would be alone gets a file of its own."""
    packs: List[List[Place]] = []
    open_pack: Dict[Any, Tuple[List[Place], List[int]]] = {}  # with bytes of the file and of the attribute, runs, and the last group
    for name, t, group, state in given:
        size = bytes_of(t)
        if not t.requires_grad or not 0 < size <= min(most, PACK_BYTES_MAX):
            continue
        key = (t.dtype, t.device, state)
        line = len(Place(name, PACK_BYTES_MAX, tuple(t.shape)).line())
        places, used = open_pack.get(key, ([], [PACK_BYTES_MAX, TEXT_BYTES_MAX, 0, group]))
        if used[0] + size > PACK_BYTES_MAX or used[1] + line > TEXT_BYTES_MAX or used[2] + (used[3] != group) > RUNS_MAX:
            places, used = open_pack[key] = [], [0, 0, 1, group]
            packs.append(places)
        places.append(Place(name, places[-1].offset + places[-1].elements if places else 0, tuple(t.shape)))
        used[0] += size
        used[1] += line
        used[2] += used[3] != group
        used[3] = group
    out: Dict[str, List[Place]] = {}
    number = 0
    for places in packs:
        if len(places) > 1:
            while f'{PREFIX}{number}' in taken or f'{PREFIX}{number}' in out:
                number += 1
            out[f'{PREFIX}{number}'] = places
    return out
