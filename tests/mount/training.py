# SPDX-License-Identifier: Apache-2.0
"""The output of the programs trainer and traffic before a crash, and whether the state after it agrees with that.

Knows nothing of mounts: it serves for a killed daemon and for a machine whose power is cut.
"""


BLOCKS = (1, 2, 5, 16, 17, 80)  # of each file of traffic, in turn


class Slot:
    """A file of traffic: its certain state (blocks, or None without a file), and operations that may have followed.

    blocks[i] is the number of the operation that wrote block i.
    """

    def __init__(self):
        self.sure = None
        self.maybe = []         # operations since the certain state, done or not: (number, kind, blocks)

    def begin(self, op, kind, blocks):
        self.maybe.append((op, kind, blocks))

    @staticmethod
    def apply(now, op, kind, blocks):
        if kind == 'unlink':
            return None
        if kind == 'replace':
            return dict.fromkeys(blocks, op)
        return {**(now or {}), **dict.fromkeys(blocks, op)}

    def done(self, op):
        """All up to this operation is durable: operations on one file follow each other."""
        now = self.sure
        while self.maybe and self.maybe[0][0] <= op:
            now = self.apply(now, *self.maybe.pop(0))
        self.sure = now

    def judge(self, found):
        """A reason why that cannot be, or None."""
        kinds = [kind for _, kind, _ in self.maybe]
        if found is None:
            return None if self.sure is None or 'unlink' in kinds else 'is gone'
        if self.sure is None and not self.maybe:
            return 'was unlinked, or never made'
        told = {op: (kind, blocks) for op, kind, blocks in self.maybe}
        sure = self.sure or {}
        may_be_new = self.sure is None or 'unlink' in kinds
        whole = max((op for op in found.values() if told.get(op, ('',))[0] == 'replace'), default=0)
        for index, op in found.items():
            if op in told:
                if index not in told[op][1]:
                    return f'block {index} is of operation {op}, which did not write it'
            elif op != sure.get(index, 0) and not (op == 0 and may_be_new):
                return f'block {index} is of operation {op}, {sure.get(index, 0)} was durable'
            if op < whole:
                return f'block {index} is of operation {op}, and others of {whole}, which replaced all'
        if not may_be_new and not set(sure) <= set(found):
            return f'has {len(found)} blocks of {len(sure)}'
        return None


class Judge:
    """Checks one store: compares the output of its programs with its content."""

    def __init__(self):
        self.slots = {}
        self.step = 0
        self.last_op = 0
        self.digests = {}
        self.under_way = 0      # steps that were there without a line about them

    def read_steps(self, lines):
        for line in lines:
            words = line.split()
            self.step = int(words[1])
            if len(words) > 2:
                self.digests.setdefault(self.step, words[3])

    def read_traffic(self, lines):
        where = {}
        for line in lines:
            kind, op, *rest = line.split()
            op = int(op)
            if kind == 'done':
                where[op].done(op)
                continue
            number, *part = map(int, rest)
            where[op] = slot = self.slots.setdefault(number, Slot())
            blocks = range(part[0], sum(part)) if part else range(BLOCKS[number % len(BLOCKS)])
            slot.begin(op, kind, blocks)
            self.last_op = max(self.last_op, op)

    def after_crash(self, said, trainer_looks, traffic_looks, step_max=None):
        """said: lines of trainer, lines of traffic, since the last crash. Raises AssertionError, else takes the present
        state as the state that must stay."""
        self.read_steps(said[0])
        self.read_traffic(said[1])
        _, step, _, digest = trainer_looks.split()
        step = int(step)
        assert self.step <= step <= (step_max or self.step + 1), f'step {self.step} was committed, step {step} is there'
        assert self.digests.setdefault(step, digest) == digest, f'step {step} is not what it was'
        self.under_way += step > self.step
        self.step = step
        found = {}
        for line in traffic_looks.splitlines():
            _, slot, *ops = line.split()
            found[int(slot)] = {i: int(op) for i, op in enumerate(ops)}
        for number in sorted(set(self.slots) | set(found)):
            slot = self.slots.setdefault(number, Slot())
            wrong = slot.judge(found.get(number))
            assert not wrong, f'f{number} {wrong}\nsure: {slot.sure}\nsince then: {slot.maybe}\nfound: {found.get(number)}'
            slot.sure, slot.maybe = found.get(number), []
