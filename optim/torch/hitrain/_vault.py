# SPDX-License-Identifier: Apache-2.0
"""The steps of a job in a vault, which a rank whose store is lost restores. `hitrainctl` reads the vault; this process does not."""
import itertools
import json
import os
import subprocess
from typing import Any, Dict, List

from hitrain._daemon import program
from hitrain._root import Root
from hitrain._words import HIDDEN, attribute


def _call(*words: str) -> List[Dict[str, Any]]:
    """Its lines of JSON."""
    done = subprocess.run([program('hitrainctl'), *words, '--json'], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors='replace')
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f'hitrainctl {words[0]} ended with status {done.returncode}')
    return [json.loads(line) for line in done.stdout.splitlines()]


class Vault:
    """url: URL/JOB, of a job of so many ranks. What it says of a step is asked once."""

    def __init__(self, url: str, rank: int, world: int) -> None:
        self.url, self.rank, self.world = url, rank, world
        self._said: Dict[int, List[Dict[str, Any]]] = {}

    def at(self, step: int) -> str:
        """URL/JOB@STEP: options of the engine stay at the end."""
        place, mark, options = self.url.partition('?')
        return f'{place}@{step}{mark}{options}'

    def steps(self) -> List[int]:
        """Those that exist for all ranks, since the job has so many."""
        rows = _call('vault', 'list', self.url)
        if not rows:
            raise RuntimeError(f'{self.url} has no step yet: hitrainctl archive --follow --rank=rof{self.world} puts those of each rank there')
        if rows[-1]['ranks'] != self.world:
            raise RuntimeError(f'{self.url} has steps of {rows[-1]["ranks"]} ranks, and this job has {self.world}: make the model of each rank with '
                               f'`hitrainctl restore --shard=rof{self.world}`, and resume again')
        own = itertools.takewhile(lambda row: row['ranks'] == self.world, reversed(rows))
        return sorted({step for row in own for step in range(row['step'], row['last'] + 1)})

    def _ranks(self, step: int) -> List[Dict[str, Any]]:
        if step not in self._said:
            self._said[step] = _call('vault', 'list', self.at(step))
        return self._said[step]

    def epoch(self, step: int) -> int:
        """With its number it names one step, for ever. -1: the newest one of this number is of another number of ranks."""
        rows = self._ranks(step)
        return int(rows[0]['epoch']) if len(rows) == self.world else -1

    def has(self, root: Root, step: int) -> bool:
        """Is this model's step the one of the vault? It is the present one, or kept. Where the store has no digest of it, all of it is read."""
        row, kept = self._ranks(step)[self.rank], os.path.join(root.path, HIDDEN, 'snap', str(step))
        if row['kind'] == 'logged':     # its sum is that of gradients
            there = kept if os.path.isdir(kept) else root.path
            return f'lineage={row["lineage"]}' in attribute(there, 'redo').splitlines() and row['lineage'] != 0
        made = not os.path.isdir(kept)
        if made:
            root.command('snapshot')
        try:
            digest = attribute(kept, 'digest') or _call('verify', root.path, str(step))[-1]['digest']
        finally:
            if made:
                root.command(f'forget {step}')
        return bool(digest == row['digest'])

    def restore(self, root: Root, step: int) -> None:
        """All that this rank had, with the same bits. The directory is not there, or empty."""
        above, name = os.path.split(root.path.rstrip('/'))
        os.makedirs(above, exist_ok=True)
        if name in os.listdir(above):
            os.rmdir(root.path)
        _call('restore', self.at(step), root.path, f'--rank={self.rank}of{self.world}')
