# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which block of a parameter, as user.hitrain.shards says: the rules of tiering/base/shards.h. Pure functions."""
import collections
import re

BLOCK_BYTES = 1 << 20           # of the parameter
RANKS_MAX, CHANGES_MAX = 256, 64
BLOCKS_MAX, WORK_MAX = 1 << 20, 1 << 22

Change = collections.namedtuple('Change', 'ranks lost')     # lost: a rank of the line before, or None


def parse(text):
    """The table, a tuple of Change, or None where the text is none."""
    table = ()
    for word in text.split(' '):
        found = re.fullmatch('(0|[1-9][0-9]{0,2})(?:-(0|[1-9][0-9]{0,2}))?', word)
        table = found and change(table, int(found[1]), found[2] and int(found[2]))
        if not table:
            return None
    return table


def change(table, ranks, lost=None):
    """The table with one more change, or None where it cannot have this one."""
    if not 0 < ranks <= RANKS_MAX or len(table) == CHANGES_MAX:
        return None
    if lost is not None and not (table and lost < table[-1].ranks):
        return None
    return (*table, Change(ranks, lost))


def text_of(table):
    return ' '.join(f'{c.ranks}' if c.lost is None else f'{c.ranks}-{c.lost}' for c in table)


def renumber(table, i, rank):
    """The number of a rank after change i, or None: it left."""
    ranks, lost = table[i]
    if rank == lost:
        return None
    if lost is not None and ranks < table[i - 1].ranks and rank > lost:
        rank -= 1
    return rank if rank < ranks else None


def fit(table, blocks):
    return blocks <= BLOCKS_MAX and blocks * len(table) <= WORK_MAX


def _quotas(blocks, ranks, count):
    """How many blocks each rank has in the end: those that have most get one more."""
    more = sorted(range(ranks), key=lambda r: (-count[r], r))[:blocks % ranks]
    quota = [blocks // ranks] * ranks
    for r in more:
        quota[r] += 1
    return quota


def _apply(table, i, owner):
    ranks = table[i].ranks
    number = [renumber(table, i, r) for r in range(table[i - 1].ranks)]
    owner = [number[r] for r in owner]
    count = collections.Counter(owner)
    quota = _quotas(len(owner), ranks, count)
    for b, r in enumerate(owner):
        if r is not None and quota[r]:
            quota[r] -= 1       # it stays
        else:
            owner[b] = None
    turn = 0
    for b, r in enumerate(owner):
        if r is None:
            while not quota[turn]:
                turn = (turn + 1) % ranks
            owner[b] = turn
            quota[turn] -= 1
            turn = (turn + 1) % ranks
    return owner


def owners(table, blocks):
    """The rank of each block."""
    owner = [b % table[0].ranks for b in range(blocks)]
    for i in range(1, len(table)):
        owner = _apply(table, i, owner)
    return owner
