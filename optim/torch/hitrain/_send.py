# SPDX-License-Identifier: Apache-2.0
"""Gradients go to the store, and new values come back."""
import concurrent.futures
import os
import threading
from typing import Any, List, Set

import torch

from hitrain import _gather
from hitrain._files import ParameterFile
from hitrain._packs import Member, PackFile
from hitrain._undo import Undoing
from hitrain._words import Descriptors

# Gradients up to so many bytes are handed over together, so many in one call.
SMALL_BYTES, SMALL_MOST = 256 << 10, 256
TOGETHER_BYTES = 8 << 20  # then the store begins with them
READERS = min(4, os.cpu_count() or 1)  # threads that read new parameters


class Sending(Undoing):
    # -- values that were changed outside step() --

    def _begin(self, changed: List[ParameterFile]) -> None:
        """Before the first gradient of a step: parameters that were changed, then hyper-parameters. Later: parameters alone."""
        if not self._begun:
            self._closed()
            holds = self._root.number('step')
            if holds != self._step:
                raise RuntimeError(f'{self.root} went from step {self._step} to {holds}: somebody else steers it, too; abort() takes over '
                                   'what it holds')
            self._publish_changed()
            self._begun = True
            self._send_config()
        for f in changed:
            if f not in self._pushed_alone:
                self._push(f)

    def _publish_changed(self) -> None:
        """Before a step begins that may be taken back."""

    def _push_changed(self) -> None:
        for f in self._parameter_files():
            if f.changed(all_bytes=True):
                self._push(f)
                if self._shard and not f.part:
                    self._pushed_alone[f] = None

    def _push_parts(self) -> None:
        for f in self._parameter_files():
            if f.part and f.changed(all_bytes=True):
                self._push(f)

    def _push(self, f: ParameterFile) -> None:
        with self._root.explained(f'parameter {f.name}, changed outside step()'):
            f.push(self._step)

    def _take_changed(self, changed: List[List[ParameterFile]]) -> None:
        """Rank 0's values of changed parameters count; a rank that changed others must have got the store's values. Of a
        parameter in parts, each rank's values count."""
        if self._ranks.leads:
            return
        leaders = dict.fromkeys(f for f in changed[0] if not f.part)
        for f in leaders:
            self._receive_one(f)
        for f in changed[self._ranks.rank]:
            if f.part:
                self._push(f)
            elif f not in leaders and not f.equals_file():
                raise RuntimeError(f'the parameter {f.name} was changed outside step() on this rank and not on rank 0: change it on all')

    # -- gradients --

    def send_gradient(self, parameter: torch.Tensor) -> None:
        """Write the gradient of one parameter; the store may begin its update at once. step() calls it for each parameter, if a class of
        your own overrides it; otherwise small ones go together."""
        if self._shard:
            raise RuntimeError('with a shard, all processes send together: call send_gradients() or step()')
        f = self._files[parameter]
        if not f.has_elements:
            return
        if isinstance(f, Member):
            raise RuntimeError(f'{f.name} shares {f.whole.name} with others, whose gradients go together: call send_gradients() or step()')
        self._send_whole(f)

    def _send_whole(self, f: ParameterFile) -> None:
        with self._whole_step():
            self._check_usable()
            if not self._begun:
                self._settle()
                self._begin([f for f in self._parameter_files() if f.changed()])
            self._send_one(f)

    def _send_one(self, f: ParameterFile, part: slice = slice(None)) -> None:
        def drop() -> None:
            if self._ranks.leads:  # otherwise the whole step is taken back before it can end
                self._root.command(f'drop {f.name}')
        together = False
        with self._root.explained(f'gradient of {f.name}'):
            if self._feedback:
                f.write_sparse(drop, *self._feedback.choose(f.tensor, f.gradient(), f.grad_dtype, self.grad_scale))
            else:
                f.write_gradient(drop, part)
                together = self._is_small(f)
                if not together:
                    self._root.apply([f.name]) if f.is_stored else f.hand_over()
                    f.written = 0
        if together and self._small is not None:
            self._small.append(f)
            self._small_bytes += f.written
            if len(self._small) == SMALL_MOST or self._small_bytes >= TOGETHER_BYTES or not (self._open or self._shard):
                self._apply_small()
        f.gradient_sent(early=not self._sending_all)
        if not self._shard and not self._open:
            self._open = self._root.number('step_open')

    def _send_runs(self, files: List[ParameterFile]) -> Set[ParameterFile]:
        """Small gradients, in few requests. Returns those that are sent."""
        runs = self._runs_of(files, 'send_gradient') if not self._feedback else []

        def write(run: _gather.Run) -> None:
            with self._root.explained(f'gradients of {run}'):
                self._gather.write(run)

        def take(run: _gather.Run, written: None) -> None:
            self._root.apply(run.names)
            for f in run.files:
                f.gradient_sent(early=False)
            if not self._open:
                self._open = self._root.number('step_open')
        _gather.in_turn(runs, write, take, lambda run: self._drop(run.names))
        return {f for run in runs for f in run.files}

    def _runs_of(self, files: List[ParameterFile], method: str) -> List[_gather.Run]:
        """None with a shard: other ranks have parts of the gradients. None if a user's own class watches this method."""
        watched = getattr(getattr(self, method), '__func__', None) is not getattr(Sending, method)
        return [] if self._shard or watched else self._gather.runs(files)

    def _is_small(self, f: ParameterFile) -> bool:
        """Does its gradient go to the step together with others that follow?"""
        if self._small is None or not 0 < f.written or f.name != f.name.strip() or not self._ranks.leads:
            return False
        return f.is_stored or (f.written <= SMALL_BYTES and not Descriptors.crowded())

    def _apply_small(self) -> None:
        """One call for all."""
        files = self._small or []
        if files:
            self._root.apply([f.name for f in files])
            for f in files:
                f.written = 0
            self._small, self._small_bytes = [], 0

    # -- new values --

    def receive_parameter(self, parameter: torch.Tensor) -> None:
        """Read one parameter, with those that share its file; waits for its update. step() calls it as it calls send_gradient()."""
        if self._files[parameter].has_elements:
            self._receive_whole(self._files[parameter].whole)

    def _receive_whole(self, f: ParameterFile) -> None:
        with self._root.explained(f'parameter {f.name}'):
            if self._closing:
                self._root.wait_for(f.name)  # also orders reads of passthrough files, and reports a failed update
            f.read()

    def _receive_one(self, f: ParameterFile) -> None:
        self._receive_whole(f) if isinstance(f, PackFile) else self.receive_parameter(f.tensor)

    def _receive_run(self, run: _gather.Run) -> None:
        with self._root.explained(f'parameters {run}'):
            self._gather.read(run)

    def _receive_all(self, files: List[ParameterFile]) -> None:
        """With several threads: the store answers one while another takes its bytes. All have ended when this returns."""
        runs = self._runs_of(files, 'receive_parameter') if not self._closing else []
        together = {f for run in runs for f in run.files}
        tasks: List[Any] = [*runs, *(f for f in files if f not in together)]
        rest, lock = iter(tasks), threading.Lock()

        def read() -> None:
            while True:
                with lock:
                    task = next(rest, None)
                if task is None:
                    return
                self._receive_run(task) if isinstance(task, _gather.Run) else self._receive_one(task)
        if len(tasks) <= 1 or READERS == 1 or self._closing:  # only one thread may wait for updates
            read()
            return
        with concurrent.futures.ThreadPoolExecutor(READERS, thread_name_prefix='hitrain-read') as pool:
            try:
                for reading in concurrent.futures.as_completed([pool.submit(read) for _ in range(READERS)]):
                    reading.result()
            finally:
                rest = iter(())  # after an error the others read no more
