# SPDX-License-Identifier: Apache-2.0
"""The accesses of .hitrain/trace, by file and over time."""
import array

OPS = 'read', 'write', 'gradient', 'update'  # the others have no bytes
ACCESSES_MAX = 1 << 16
PATH_CHARACTERS = 255


class File:
    def __init__(self, number, path):
        self.id, self.path = number, path[-PATH_CHARACTERS:]     # '': it has none any more
        self.bytes, self.waited_ns = [0] * len(OPS), 0


class Trace:
    def __init__(self, lines=()):
        """Memory is bounded, so numbers stand in arrays."""
        self.files = {}
        self.time_ns, self.bytes, self.waited_ns, self.op = (array.array(kind) for kind in 'QQQB')
        self.steps = []     # (file, time) of each end of a step
        self.first_ns = self.last_ns = 0
        self.has_gradient = False   # since the last end of a step
        for one in lines:
            self.add(one)

    def __len__(self):
        return len(self.op)

    def add(self, one):
        word, time_ns = one.text('op'), one.number('time_ns')
        if not word:
            raise ValueError('no access')
        self.first_ns = self.first_ns or time_ns
        self.last_ns = max(self.last_ns, time_ns)
        # A commit without a gradient publishes what asynchronous steps have done: their own ends are there already.
        if word == 'step' or (word == 'commit' and self.has_gradient):
            self.steps.append((self.file_of(one), time_ns))
            self.has_gradient = False
        elif word in OPS:
            self.add_access(one, OPS.index(word), time_ns)

    def add_access(self, one, op, time_ns):
        f, size, waited = self.file_of(one), one.number('bytes'), one.number('waited_ns')
        self.has_gradient |= OPS[op] == 'gradient'
        f.bytes[op] += size
        f.waited_ns += waited
        for column, value in (self.op, op), (self.time_ns, time_ns), (self.bytes, size), (self.waited_ns, waited):
            column.append(value)

    def file_of(self, one):
        number = one.number('id')
        if number not in self.files:
            self.files[number] = File(number, one.text('path'))
        return self.files[number]

    def largest(self, most):
        """The files with the most bytes, most first."""
        return sorted((f for f in self.files.values() if sum(f.bytes)), key=lambda f: -sum(f.bytes))[:most]

    def ends(self, model, most):
        """The newest ends of the steps of one model, in order."""
        return [time_ns for f, time_ns in self.steps if f is model][-most:]

    def models(self):
        """Those with an end of a step, in the order of their first one."""
        return list({id(f): f for f, _ in self.steps}.values())
