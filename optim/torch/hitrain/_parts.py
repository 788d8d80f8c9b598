# SPDX-License-Identifier: Apache-2.0
"""Parts of parameters: a rank holds a run of a parameter's elements, and its file in the store holds the whole.

FSDP2's fully_shard makes such parameters (DTensor), and code of one's own may name parts by offset and shape.
"""
import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch


class Part(NamedTuple):
    """The elements of a parameter that a tensor of this process holds: those from offset on, in row-major order.

    shape   of the whole parameter
    """
    offset: int
    shape: Tuple[int, ...]


PLAIN = (torch.nn.Parameter, torch.Tensor)


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, 'to_local') and hasattr(tensor, 'placements')


def local_of(tensor: Any) -> torch.Tensor:
    """The memory of this process's elements."""
    if type(tensor) in PLAIN or not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def part_of_dtensor(name: str, tensor: Any) -> Part:
    """TypeError if the elements of this process are not one run of the parameter's."""
    split = [i for i, placed in enumerate(tensor.placements) if not placed.is_replicate()]
    placed = [tensor.placements[i] for i in split]
    if len(split) > 1 or any(type(p).__name__ != 'Shard' or p.dim != 0 for p in placed):
        raise TypeError(f'{name} is split as {tensor.placements}: a file takes parts that are split along dimension 0, once, as fully_shard does')
    shape, offset = tuple(tensor.shape), 0
    if split:
        ranks, here = tensor.device_mesh.size(split[0]), tensor.device_mesh.get_coordinate()
        if here is None:
            raise ValueError(f'this process is not in the device mesh of {name}')
        rows = -(-shape[0] // ranks)  # of each rank but the last ones
        offset = min(rows * here[split[0]], shape[0]) * math.prod(shape[1:])
    return Part(offset, shape)


def as_placed(values: torch.Tensor, like: Any) -> torch.Tensor:
    """The values of this process's elements, placed as the tensor `like`."""
    if not is_dtensor(like):
        return values
    from torch.distributed.tensor import DTensor
    return DTensor.from_local(values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def shares(name: str, elements: int, held: Sequence[Tuple[int, int]]) -> List[slice]:
    """For each rank: which of its own elements it writes. held[rank] is the offset and the count of its elements. Ranks that
    hold the same elements share the writing. ValueError unless each element has its writer."""
    end = 0
    for offset, count in sorted(set(h for h in held if h[1])):
        if offset != end:
            what = f'no rank holds the elements {end} to {offset}' if offset > end else f'ranks hold parts that overlap at {offset}'
            raise ValueError(f'{what} of {name}: parts must be equal or apart, and make the whole. Do all ranks have shard=?')
        end += count
    if end != elements:
        raise ValueError(f'no rank holds the elements {end} to {elements} of {name}: pass shard= with all ranks')
    out = []
    for rank, h in enumerate(held):
        same, mine = held.count(h), held[:rank].count(h)
        out.append(slice(h[1] * mine // same, h[1] * (mine + 1) // same))
    return out


def value_of_part(what: str, value: Any, part: Optional[Part], like: Any) -> torch.Tensor:
    """This process's elements of a value that belongs to the parameter `like`: a DTensor, the whole, or its part."""
    local, whole = local_of(like), part.shape if part else tuple(like.shape)
    if is_dtensor(value):
        if not is_dtensor(like) or tuple(value.placements) != tuple(like.placements) or tuple(value.shape) != whole:
            raise ValueError(f'{what} is not placed as its parameter is')
        return local_of(value)
    if tuple(value.shape) == whole:
        return value.reshape(-1)[part.offset:part.offset + local.numel()].view(local.shape) if part else value
    if part and value.shape == local.shape:
        return value
    raise ValueError(f'{what} has the shape {whole}, not {tuple(value.shape)}')
