# SPDX-License-Identifier: Apache-2.0
"""Gradients of several ranks become one: each rank gets the mean of its own part of each, and sends that to the store.

    rank 0   | part 0 | part 1 |                       | mean of part 0 |
                          X       all_to_all_single
    rank 1   | part 0 | part 1 |                       | mean of part 1 |

Each gradient is divided by the number of ranks, and the parts are added in the order of the ranks. So the bits are those of one process
that divides its losses and runs the batches of rank 0, rank 1, ... one after the other, if the number of ranks is a power of two.
"""
from typing import Any, List, Sequence

import torch
import torch.distributed as dist

from hitrain.distributed import Shard, part_of

BUCKET_BYTES = 8 << 20  # gradients of so many bytes are reduced together


def check_group(shard: Shard, group: Any) -> None:
    """ValueError: these are other processes than those of the shard."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("offload(shard=) reduces gradients with torch.distributed: call torch.distributed.init_process_group('gloo') before")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if (rank, world) != (shard.rank, shard.world):
        raise ValueError(f'the process group has rank {rank} of {world} here, and the shard rank {shard.rank} of {shard.world}: pass the group '
                         'of these ranks as group=')


@torch.no_grad()
def take_means(grads: Sequence[torch.Tensor], rank: int, world: int, group: Any) -> List[slice]:
    """All ranks of the group call it with contiguous gradients of equal shapes, divided by the number of ranks, in memory that nothing
    else uses. Returns the part of each flat gradient that holds the mean of all ranks now. The rest is void."""
    flats = [g.view(-1) for g in grads]
    parts = [[part_of(f.numel(), r, world) for f in flats] for r in range(world)]
    pieces = [[f[p].view(torch.uint8) for f, p in zip(flats, of_rank)] for of_rank in parts]  # bytes: gloo lacks bf16
    sizes = [sum(p.numel() for p in of_rank) for of_rank in pieces]
    sent = flats[0].view(torch.uint8) if len(flats) == 1 else torch.cat([p for of_rank in pieces for p in of_rank])
    got = torch.empty(world * sizes[rank], dtype=torch.uint8)
    dist.all_to_all_single(got, sent, [sizes[rank]] * world, sizes, group=group)
    of_ranks = [list(g.split([p.numel() for p in pieces[rank]])) for g in got.split(sizes[rank])] if sizes[rank] else []
    for i, own in enumerate(f[p] for f, p in zip(flats, parts[rank])):
        for r, of_rank in enumerate(of_ranks):
            theirs = _as(of_rank[i], own.dtype)
            own.add_(theirs) if r else own.copy_(theirs)
    return parts[rank]


def _as(piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Elements of this dtype in a piece of bytes, which may begin at any address."""
    if piece.storage_offset() % torch.empty(0, dtype=dtype).element_size():
        piece = piece.clone()
    return piece.view(dtype)
