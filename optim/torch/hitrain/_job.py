# SPDX-License-Identifier: Apache-2.0
"""Several stores of one job: each rank trains a model root of its own, and all continue from one step.

A crash may leave the stores at different steps. They can meet at a step that is in every store, as its present one, or kept
under its number. Two functions of the job are enough for that, a minimum over all ranks and a barrier. A rank without a model
gets its own from a vault (_vault.py), at a step that the others have with the bits of the vault.
"""
import logging
import os
from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Tuple, TypeVar

from hitrain import _making
from hitrain._root import Root
from hitrain._vault import Vault
from hitrain._words import HIDDEN
from hitrain.distributed import RankFailed

__all__ = ['Job']

NONE = 1 << 62    # no rank has such a step, and int64 holds it
LISTED_MOST = 16  # steps of each store in the text of an error
T = TypeVar('T')
_LOG = logging.getLogger('hitrain')


class Job(NamedTuple):
    """This process's place in a job that trains with a store on each rank, in equal steps.

    With resume=True all ranks continue from the newest step that every store still has, present or kept under its number
    (retain=K, or snapshot() without a name). Stores that are elsewhere go back to it. Then kept steps with higher numbers end: the
    job will take those steps again. Steps with names of their own stay, and do not count here.

    rank            of this process, from 0
    world           how many there are. With a shard on each store: rank 0 of each shard has a rank here
    all_reduce_min  takes a whole number, returns the least of all ranks', as torch.distributed.all_reduce with ReduceOp.MIN on int64
    barrier         returns when all ranks have called it
    vault           URL/JOB, where an archiver of each rank keeps steps (`hitrainctl archive --follow --rank=rofR`; it is not started here).
                    With resume=True a rank whose root is not there, or an empty directory, as after the loss of its store, gets its
                    model from there. All then continue from the newest step that the vault has, and that the other ranks have
                    with the same bits. The vault is read only if a rank has no model
    """
    rank: int
    world: int
    all_reduce_min: Callable[[int], int]
    barrier: Callable[[], Any]
    vault: Optional[str] = None

    def meet(self, what: str, work: Callable[[], T]) -> T:
        """This rank's work. If that fails on one rank all raise: its own error, or RankFailed."""
        failed: Optional[BaseException] = None
        try:
            done = work()
        except BaseException as e:
            failed = e
        first = self.all_reduce_min(NONE if failed is None else self.rank)
        if failed is not None:
            raise failed
        if first != NONE:
            raise RankFailed(first, f'failed: {what}')
        return done

    def newest_common(self, steps: Iterable[int]) -> int:
        """Of the steps of all ranks; -1: there is none."""
        known, bound = list(steps), NONE
        while True:
            # The least of what the ranks have up to the bound. If that is the bound itself, every rank has it.
            least = self.all_reduce_min(max((s for s in known if s <= bound), default=-1))
            if least < 0 or least == bound:
                return least
            bound = least

    def all_steps(self, steps: Iterable[int]) -> List[List[int]]:
        """The newest steps of each rank, for a message."""
        own = sorted(steps)[-LISTED_MOST:]
        said = []
        for rank in range(self.world):
            speaks = rank == self.rank
            count = self.all_reduce_min(len(own) if speaks else NONE)
            said.append([self.all_reduce_min(own[i] if speaks else NONE) for i in range(count)])
        return said


def kept_numbers(root: str) -> List[int]:
    """Steps that the store keeps under their numbers."""
    return [int(name) for name in os.listdir(os.path.join(root, HIDDEN, 'snap')) if name.isdigit()]


def lacks_model(path: str) -> bool:
    """Nothing is there, nor was a model begun."""
    held = _making.names_in(path)
    return held is None and not os.path.lexists(path) or held == [] and not _making.of(path)


def bring_together(job: Job, root: Root, open_root: Callable[[], bool]) -> int:
    """Part of resume. open_root: makes this rank steer its model, in which then no step is open; true: it makes the model anew. Returns the step."""
    makes = lacks = False

    def begin() -> List[int]:
        nonlocal makes, lacks
        lacks = job.vault is not None and lacks_model(root.path)
        if lacks:
            return []
        makes = open_root()
        with root.explained('kept steps'):
            present = root.number('step')
            # A rollback leaves later kept steps, which belong to a history that the user has left.
            return sorted({present, *(number for number in kept_numbers(root.path) if number <= present)})

    def go_to(step: int) -> None:
        if root.number('step') != step:
            root.command(f'rollback {step}')

    def end_later(step: int) -> None:
        with root.explained('kept steps'):
            later = [number for number in kept_numbers(root.path) if number > step]
        if later:
            root.command(*(f'forget {number}' for number in sorted(later, reverse=True)))

    steps = job.meet('it could not open its model', begin)
    first = job.all_reduce_min(job.rank if makes else NONE)
    ahead = -job.all_reduce_min(-max(steps, default=0))
    if first != NONE and ahead > 0:
        raise RuntimeError(f'the model of rank {first} was never made to its end, and another store of the job is at step {ahead}: copy '
                           'that step to it with hitrainctl archive and restore, or make all models anew')
    if job.all_reduce_min(0 if lacks else 1) == 0:
        vault, there = job.meet('it could not read the vault', lambda: read(job))
        step = common_with(job, vault, there if lacks else steps, lambda at: lacks or vault.has(root, at))
        if lacks:
            _LOG.warning('rank %d of %d has no model at %s: it restores step %d of %s', job.rank, job.world, root.path, step, vault.url)
        job.meet(f'it could not restore step {step}', lambda: restore(vault, root, step, open_root) if lacks else None)
    else:
        step = job.newest_common(steps)
        if step < 0:
            raise no_common_step(job, steps, '. Keep more with retain=, or copy a step from one store to another with hitrainctl archive and '
                                 'restore' + ('. A rank whose model you move away gets its own from the vault' if job.vault else ''))
    job.meet(f'it could not go back to step {step}', lambda: go_to(step))
    # Not before all are there: whoever fails in between finds the same steps next time.
    job.meet(f'it could not end the kept steps after {step}', lambda: end_later(step))
    job.barrier()
    return step


def read(job: Job) -> Tuple[Vault, List[int]]:
    if job.vault is None:
        raise ValueError('another rank restores its model, and this one was given no Job(vault=)')
    vault = Vault(job.vault, job.rank, job.world)
    return vault, vault.steps()


def common_with(job: Job, vault: Vault, steps: List[int], has: Callable[[int], bool]) -> int:
    """The newest step that all ranks have, of one history."""
    others = list(steps)
    while True:
        step = job.newest_common(others)
        if step < 0:
            raise no_common_step(job, steps, f' with the same bits. Ranks without a model have what {vault.url} has: keep such steps in the '
                                 'stores with retain= and retain_every=. A rank whose model you move away gets its own from the vault, too')
        epoch = job.meet(f'it could not read step {step} in the vault', lambda: vault.epoch(step))
        same = job.meet(f'it could not compare step {step} with the vault', lambda: epoch >= 0 and has(step))
        if job.all_reduce_min(epoch) == -job.all_reduce_min(-epoch) and job.all_reduce_min(int(same)):
            return step
        others = [number for number in others if number < step]


def restore(vault: Vault, root: Root, step: int, open_root: Callable[[], bool]) -> None:
    vault.restore(root, step)
    open_root()
    if root.number('step') != step:
        raise RuntimeError(f'{root.path}: step {root.number("step")} was restored, and not {step}')


def no_common_step(job: Job, steps: List[int], remedy: str) -> RuntimeError:
    texts = (f'rank {rank} has {", ".join(map(str, of_rank)) or "none"}' for rank, of_rank in enumerate(job.all_steps(steps)))
    return RuntimeError(f'no step is in every store of the job: {"; ".join(texts)}{remedy}')
