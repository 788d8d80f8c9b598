# SPDX-License-Identifier: Apache-2.0
"""Logged steps of all ranks, as one rank of another number of ranks takes them (elastic.py).

Each rank's log has a gradient for the blocks that it owned, or more. The present rank takes the pieces of blocks that it owns
now, each from the log of its former owner. The numbers of an update (count, scalars, clipping, forms) are in the logs, and have
to be alike in all of them. Then an update changes each element by its own gradient alone, so the bits are those of a model
that had all blocks. Other files are those of the manifest that elastic.Shard takes its names from.
"""
import collections
import struct

from apply import Counted, Steps
from entry import os_text
from logged import ELEMENT_BYTES, ORTHO, Numbers, Piece
from objects import Damage, Failure
import shards

# numbers, pieces: {path: list}, pieces with a Place each; rest: settings and files of one rank.
Merged = collections.namedtuple('Merged', 'numbers pieces rest end')


class ElasticSteps(Steps):
    """steps: of the chain after the full one. of: elastic.Shard of that."""

    def __init__(self, engine, vault, job, steps, of):
        super().__init__(engine, vault, job, steps, of.names)
        self.of = of

    def check(self):
        """Failure if the ranks do not agree on a step. No gradient is read."""
        before = self.of.found
        for step in self.steps:
            had = {(s.ranks, s.shards) for s in (*before.summaries, *step.summaries)}
            if len(had) > 1:
                raise Failure(f'{self.job}: user.hitrain.shards is another one from step {step.step} on: name {self.job}@{before.step}')
            self.merge(step)
            before = step

    def merge(self, step):
        """Merged: what all ranks have of a step."""
        numbers, pieces, rest = {}, {}, []
        for summary in step.summaries:
            q, mine = summary.rank, {}
            for item in self.manifest(step, summary).places():
                if isinstance(item, Numbers):
                    path = item.path
                    mine.setdefault(path, []).append(item)
                elif isinstance(item, Piece):
                    if item.coding & ORTHO:
                        raise Failure(f'{self.job}: step {step.step} has orthogonalised updates, as of muon, which need whole matrices: name '
                                      f'{self.job}@{self.of.found.step}, the full step before it')
                    if self.is_own(q, mine[path][0], item):
                        pieces.setdefault(path, []).append(item)
                elif q == self.of.names:
                    rest.append(item)
            for path, its in mine.items():
                if numbers.setdefault(path, its) != its:
                    raise Failure(f'{self.job}: step {step.step}: ranks up to {q} have different numbers for {os_text(path)}, as if each '
                                  f'had clipped by a norm of its own: name {self.job}@{step.step - 1}, the step before it')
        return Merged(numbers, pieces, rest[:-1], rest[-1])

    def is_own(self, q, numbers, piece):
        """Does the present rank take this piece of rank q's log?"""
        elements, = struct.unpack_from('<Q', numbers.data, 16)
        size, of_gradient = ELEMENT_BYTES[numbers.data[28]], ELEMENT_BYTES[numbers.data[29]]
        before, now = self.of.owners(-(-elements * size // shards.BLOCK_BYTES))
        first, last = (at // of_gradient * size // shards.BLOCK_BYTES for at in (piece.first, piece.first + piece.bytes - 1))
        if last >= len(now):
            raise Damage(f'a piece of the gradient of {os_text(numbers.path)} lies beyond it')
        own = {before[b] == q and now[b] == self.of.rank for b in range(first, last + 1)}
        if len(own) > 1:
            raise Failure(f'a piece of the gradient of {os_text(numbers.path)} has blocks of two ranks, and cannot be cut')
        return own.pop()

    def places(self, step):
        merged = self.merge(step)
        for path, numbers in merged.numbers.items():
            if path not in merged.pieces:
                yield Counted(path, struct.unpack_from('<Q', numbers[0].data, 8)[0])
        for path, pieces in merged.pieces.items():
            yield from merged.numbers[path]
            yield from sorted(pieces, key=lambda piece: piece.first)
        yield from merged.rest
        yield merged.end

    def items(self, step):
        return self.fetch.in_order(self.places(step))
