# SPDX-License-Identifier: Apache-2.0
"""One step: it begins, and its gradients are taken back when something fails."""
import os
import warnings
from typing import Any, Dict, Iterable, Iterator, List

from hitrain._alone import WholeStep
from hitrain._attach import Attached
from hitrain._words import HIDDEN


class Undoing(Attached):
    def _begin_at(self, step: int) -> None:
        """So many steps are finished, and no gradient of the next one is sent."""
        self._step = step
        self._closing = False
        self._begun, self._open = False, 0
        self._latched = None
        self._sending_all, self._small = False, None
        for f in self._parameter_files():
            f.begin_step()

    def _closed(self) -> None:
        """Returns when the store has closed the last step. OSError: that failed; going back takes the step back then."""
        if self._closing:
            self._root.command('wait')
            self._closing = False

    def _close_failed(self) -> bool:
        try:
            self._closed()
        except OSError:
            return True
        return False

    def _whole_step(self, what: str = 'backward() or send_gradient()') -> WholeStep:
        """An error in here takes back the sent gradients of the step, on all ranks."""
        return WholeStep(self._users, what, self._take_back)

    def _take_back(self, error: BaseException) -> None:
        finished = self._step
        for f in self._parameter_files():
            f.finish_gradient()  # the step gets what is written, and with the step it is taken back
        try:
            self._go_back(wholly=False)
        except BaseException as second:
            self._torn = f'a step failed ({type(error).__name__}: {error}) and could not be taken back ({type(second).__name__}: {second})'
            if not isinstance(second, Exception):
                raise
        if self._step < finished:
            warnings.warn(f'a step failed, and {self.root} went back from step {finished} to its durable step {self._step}, as '
                          'its tensors did', RuntimeWarning, stacklevel=2)

    def _go_back(self, wholly: bool, to: str = '') -> None:
        """Take back the sent gradients of the open step, on all ranks; wholly: everything that is not durable, and then all after the kept step
        `to`. Tensors are read again where the store has other values than before that step."""
        wholly = wholly or self._close_failed()
        if not (wholly or self._shard or self._begun or self._unread):
            return
        if self._ahead and self._ahead.forget():
            self._unread = True
        alone = self._ranks.over
        if alone and not self._ranks.leads:
            self._ranks.together('going back')  # raises: rank 0 cannot be reached
        wants = {'wholly': wholly, 'unread': self._unread, 'begun': self._begun}
        wanted = [wants] if alone else self._ranks.gather_at('going back', wants)
        self._torn = 'going back was not finished'

        def lead() -> Dict[str, Any]:
            return self._restore(to, **{k: any(w[k] for w in wanted) for k in wants}) if self._ranks.leads else {}
        now = lead() if alone else self._ranks.together('going back', lead)[0]
        if not alone:
            def follow() -> None:
                if not self._ranks.leads:
                    self._pushed_again_after(now['durable'])
                    self._read_back(now['reread'], now['made'])
            self._ranks.together('going back', follow)
        self._begin_at(now['step'])
        if self._feedback:
            self._feedback.forget()
        self._unread, self._torn = False, ''

    def _restore(self, to: str, wholly: bool, unread: bool, begun: bool) -> Dict[str, Any]:
        """On rank 0. Without an open step there is nothing to take back."""
        if wholly or (begun and (self._ended_and_lost() or (self._root.number('step_open') and not self._drop_all()))):
            self._root.command('abort')
        if to:
            self._root.command(f'rollback {to}')
        durable, step = self._root.number('durable_step'), self._root.number('step')
        self._pushed_again_after(durable)
        reread = wholly or unread or step != self._step
        made = self._read_back(reread)
        return {'step': step, 'reread': reread, 'durable': durable, 'made': made}

    def _pushed_again_after(self, durable: int) -> None:
        for f in self._parameter_files():
            f.push_again_after(durable)

    def _ended_and_lost(self) -> bool:
        """The store has ended the step and then failed to make it durable: a crash would undo it, and the trainer got
        an error."""
        step = self._root.number('step')
        return step > self._step and self._root.number('durable_step') < step

    def _read_back(self, reread: bool, made: Iterable[str] = ()) -> List[str]:
        """made: files that rank 0 had to make anew. Returns those that this rank made."""
        mine, of_leader = [], set(made)
        if reread:
            self._gather.end()  # files may have been made anew
            self._pushed_alone = {}
        if reread and self._ranks.leads:
            for f in self._files.values():
                if not f.has_elements:
                    f.make_empty()  # an abort takes it away before its first commit
        for f in self._parameter_files():
            f.forget()
            if reread:
                with self._root.explained(f'parameter {f.name}'):
                    if f.restore(may_create=self._ranks.leads, fill=f.part is not None and f.name in of_leader):
                        mine.append(f.name)
        return mine

    def _hand_back(self) -> None:
        """Part of close(): an unmount drops an open step, and with it finished steps that are not durable. So this
        optimizer leaves none open."""
        try:
            if not self._close_failed() and (self._root.number('step_open') != self._open or self._drop_all()):
                self._open = 0
                return
            self._open = self._root.number('step_open')
            self._root.command(f'abort if={self._open}')
            self._open, now = 0, self._root.number('step')
        except OSError:
            return  # the mount is dead, or has reported its error before
        if now < self._step:
            warnings.warn(f'closed within a step: {self.root} went back from step {self._step} to its durable step {now}', RuntimeWarning,
                          stacklevel=3)

    def _take_over(self) -> None:
        """Part of resume: another client has ended within a step. Its gradients are dropped, and finished steps stay if
        possible."""
        if self._root.number('durable_step') == self._root.number('step') or not self._drop(self._gradient_names()):
            self._root.command('abort')

    def _gradient_names(self) -> Iterator[str]:
        """Paths of all parameters in the model, whichever client made them. No command can name a newline."""
        top = os.path.join(self.root, HIDDEN, 'grad')
        for folder, _, names in os.walk(top):
            paths = (os.path.relpath(os.path.join(folder, name), top) for name in names)
            yield from (path for path in paths if '\n' not in path)

    def _drop_all(self) -> bool:
        """Take back the gradients alone, if an abort would take finished steps with them. False: that cannot be done."""
        if self._root.number('durable_step') == self._root.number('step'):
            return False
        return self._drop([f.name for f in self._parameter_files()])

    def _drop(self, names: Iterable[str]) -> bool:
        """False: a step is open all the same."""
        try:
            self._root.command(*(f'drop {name}' for name in names))
        except OSError:
            return False  # an update has applied some gradients
        return not self._root.number('step_open')
