# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any moment of a step. Python runs the handler of a signal between two operations, so the tests raise there: after a chosen number of
operations of the client, which no load of the machine changes."""
import gc
import os
import random
import sys
import warnings

import pytest

from trainer import LR, equal, give_gradients, shared_root as root, shared_store  # first: it makes the client importable
import torch
from hitrain import AdamW

INTERRUPTS = int(os.environ.get('HITRAIN_INTERRUPTS', 1000))  # in all
GROWTH_MAX = 24 << 20
SHAPES = {'w': (300000,), 'v': (2000, 100), 'bias': (33,), 'scale': (), 'x': (7, 5)}
OPTIONS = {'plain': {}, 'topk': {'topk': 0.1}, 'accumulate': {'accumulate': 2}, 'pack': {'pack': 65536, 'max_grad_norm': 1.0},
           'logged': {'durable_every': 4, 'redo': True}}


class Interrupt(KeyboardInterrupt):
    pass


class Interrupting:
    """Raises before the n-th operation of the client in the body. `left`: how many are left then; above 0 it did not come to that."""

    def __init__(self, n):
        self.left = n

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc):
        sys.settrace(None)

    def _call(self, frame, event, arg):
        name = frame.f_code.co_filename
        if self.left <= 0 or ('torch/hitrain/' not in name and not name.endswith('contextlib.py')):
            return None
        frame.f_trace_opcodes = True
        return self._operation

    def _operation(self, frame, event, arg):
        if event == 'opcode':
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise Interrupt
        return self._operation


def parameters():
    numbers = torch.Generator().manual_seed(1)
    return {n: torch.nn.Parameter(torch.randn(shape, generator=numbers)) for n, shape in SHAPES.items()}


def one_step(optimizer, params, step):
    for part in range(optimizer.accumulate):
        give_gradients(params, 2 * step + part)
        optimizer.step() if part == optimizer.accumulate - 1 else optimizer.send_gradients()


def finished(optimizer):
    """After an interrupt: how many steps are. What is not whole is taken back."""
    if optimizer._torn or optimizer._begun:
        optimizer.abort()
    return optimizer.state_dict()['hitrain']['step'] if not optimizer.redo else optimizer._step


def held():
    with open('/proc/self/statm') as f:
        pages = int(f.read().split()[1])
    return len(os.listdir('/proc/self/fd')), pages * os.sysconf('SC_PAGE_SIZE')


def operations_of(optimizer, params, step):
    many = 1 << 30
    with Interrupting(many) as counting:
        one_step(optimizer, params, step)
    return many - counting.left


def note_forgets(optimizer):
    """Before which steps the rest of sparse gradients is forgotten."""
    noted, feedback = set(), optimizer._feedback
    if feedback:
        forget = feedback.forget

        def noting():
            forget()
            noted.add(optimizer._step)
        feedback.forget = noting
    return noted


@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
def test_interrupted_steps_leave_nothing_open(root, options):
    """Descriptors and memory are as before, and the bits are those of steps that nobody interrupts. The rest of sparse gradients is lost."""
    params, where = parameters(), random.Random(5)
    with AdamW(params.items(), root, lr=LR, **options) as optimizer, warnings.catch_warnings():
        warnings.simplefilter('ignore', RuntimeWarning)
        forgets = note_forgets(optimizer)
        for step in range(2):
            one_step(optimizer, params, step)
        most, before, hits = operations_of(optimizer, params, 2), None, 0
        while hits < INTERRUPTS // len(OPTIONS):
            step = finished(optimizer)
            try:
                with Interrupting(where.randrange(1, most)) as interrupting:
                    one_step(optimizer, params, step)
            except Interrupt:
                hits += 1
            if interrupting.left > 0 or hits % 20 == 0:  # a run goes on
                step = finished(optimizer)
                one_step(optimizer, params, step)
            if before is None and hits == 20:
                gc.collect()
                before = held()
        gc.collect()
        step, after = finished(optimizer), held()
        assert after[0] <= before[0] and after[1] - before[1] < GROWTH_MAX, f'{before} before and {after} after {hits} interrupts'
    plain = parameters()
    with AdamW(plain.items(), root.parent / 'plain', lr=LR, **options) as other:
        for n in range(step):
            if n in forgets:
                other._feedback.forget()
            one_step(other, plain, n)
    assert equal(params, plain)
