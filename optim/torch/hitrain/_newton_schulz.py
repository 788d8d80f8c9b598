# SPDX-License-Identifier: Apache-2.0
"""Orthogonal matrices near given ones, by Newton-Schulz iterations, as Muon needs them.

With X the given matrix, divided by its Frobenius norm, an iteration makes X := a X + (b A + c A A) X of A = X X^T. It moves each singular value s
to a s + b s^3 + c s^5, which tends to 1. The formula and the usual numbers a, b, c are Keller Jordan's (https://kellerjordan.github.io/posts/muon).
torch.optim.Muon computes it in bf16, and so does the plain form, with the same operations for one matrix.

The Gram form iterates on A alone, which is small for long matrices, and multiplies X at the end: X := Q X, where Q is the product of the factors
P = a + b A + c A A, and A := P A P. Errors of A grow by a^2 in each iteration. So this form computes in f32, and makes A anew from X after
RESTART iterations.
"""
import math
from typing import Any, List, NamedTuple, Sequence, Tuple

import torch

NS_FORMS = ('plain', 'gram')
RUNS_MAX = 4  # of equal blocks that follow each other; the store has room for so many
RESTART = 3
_TOGETHER = 1 << 24  # elements of small matrices that are iterated together


class Iteration(NamedTuple):
    """steps: how many; coefficients: a, b, c; eps: the least norm; form: see the text of the module."""
    steps: int = 5
    coefficients: Tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    eps: float = 1e-7
    form: str = 'plain'


def rows_of_blocks(name: str, shape: Sequence[int], split: Any) -> Tuple[int, ...]:
    """How many rows each block of a parameter's matrices has, from the first on. split: None for one block; a number for blocks of so many rows,
    as heads have; or the rows of each. ValueError: it is no matrix, or the blocks do not make the whole."""
    if len(shape) not in (2, 3):
        raise ValueError(f'{name} has the shape {tuple(shape)}, and Muon trains matrices: put it into a group with use_muon=False, as '
                         'hitrain.muon_groups(model) does')
    rows = shape[-2]
    if split is None:
        return (rows,)
    listed = [split] if isinstance(split, int) else list(split)
    if not listed or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in listed):
        raise ValueError(f'split of {name} must be a number of rows, or a list of such, not {split!r}')
    if isinstance(split, int):
        listed *= max(1, rows // split)
    if sum(listed) != rows:
        raise ValueError(f'split of {name} has blocks of {sum(listed)} rows, and its matrix has {rows}')
    if len(_runs(listed)) > RUNS_MAX:
        raise ValueError(f'split of {name} changes the rows of blocks {len(_runs(listed)) - 1} times, and it may {RUNS_MAX - 1} times: make the '
                         'parameter several ones')
    return tuple(listed)


def word_of_blocks(blocks: Sequence[int]) -> str:
    """Blocks in the words of the store: R rows, N times."""
    return ','.join(f'{rows}*{count}' if count > 1 else str(rows) for rows, count in _runs(blocks))


def cost_of(shape: Sequence[int], blocks: Sequence[int]) -> int:
    """Products in an iteration, to compare parameters."""
    return math.prod(shape[:-2]) * sum(min(m, shape[-1]) ** 2 * max(m, shape[-1]) for m in blocks)


def owners_of(costs: Sequence[int], world: int) -> List[int]:
    """The rank of each parameter, so that all ranks have about as much to do: the longest ones first, each to the rank that has least."""
    loads, owners = [0] * world, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


@torch.no_grad()
def orthogonalized(update: torch.Tensor, blocks: Sequence[int], iteration: Iteration) -> torch.Tensor:
    """Each block of the matrices [m, n] or [E, m, n] alone; bf16, where the update is."""
    out = torch.empty(update.shape, dtype=torch.bfloat16, device=update.device)
    first = 0
    for rows, count in _runs(blocks):
        end = first + rows * count
        own, to = (t[..., first:end, :].unflatten(-2, (count, rows)) for t in (update, out))
        _iterate_all(own, to, iteration)
        first = end
    return out


def _runs(blocks: Sequence[int]) -> List[Tuple[int, int]]:
    """Rows, and how many blocks of so many follow each other."""
    runs: List[Tuple[int, int]] = []
    for rows in blocks:
        again = bool(runs) and runs[-1][0] == rows
        runs[-1:] = [(rows, runs[-1][1] + 1)] if again else [*runs[-1:], (rows, 1)]
    return runs


def _iterate_all(own: torch.Tensor, to: torch.Tensor, iteration: Iteration) -> None:
    """Views of [.., count, m, n]."""
    if own.dim() == 4:
        for e in range(own.shape[0]):
            _iterate_all(own[e], to[e], iteration)
        return
    most = max(1, _TOGETHER // (own.shape[-1] * own.shape[-2]))
    for x, y in zip(own.split(most), to.split(most)):
        y.copy_(_iterated(x, iteration) if len(x) > 1 else _iterated(x[0], iteration).unsqueeze(0))


def _iterated(matrix: torch.Tensor, iteration: Iteration) -> torch.Tensor:
    """Of one matrix, or of many of a shape."""
    tall, gram = matrix.shape[-2] > matrix.shape[-1], iteration.form == 'gram'
    x = matrix.to(torch.float32 if gram else torch.bfloat16)
    x = x.mT if tall else x
    norm = x.norm() if x.dim() == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=iteration.eps)
    x = (_gram if gram else _plain)(x, iteration)
    return x.mT if tall else x


def _plain(x: torch.Tensor, iteration: Iteration) -> torch.Tensor:
    a, b, c = iteration.coefficients
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(iteration.steps):
        gram = x @ x.mT
        factor = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, factor, x, beta=a)
    return x


def _gram(x: torch.Tensor, iteration: Iteration) -> torch.Tensor:
    a, b, c = iteration.coefficients
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for first in range(0, iteration.steps, RESTART):
        gram, q = x @ x.mT, x
        last = min(RESTART, iteration.steps - first) - 1
        for i in range(last + 1):
            factor = add_product(gram, gram, gram, beta=b, alpha=c)
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            q = factor @ q if i else factor
            if i < last:
                gram = factor @ gram @ factor
        x = q @ x
    return x
