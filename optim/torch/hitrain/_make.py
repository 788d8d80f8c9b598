# SPDX-License-Identifier: Apache-2.0
"""The model root: rank 0 makes or opens it, and the others open it."""
import errno
from typing import Any, Dict, List

import torch

from hitrain import _making
from hitrain._job import bring_together, kept_numbers
from hitrain._state import StateInStore, Stateful
from hitrain._words import attribute
from hitrain.distributed import RankFailed


class Making(Stateful):
    def _construct(self, groups: List[Dict[str, Any]]) -> None:
        """Rank 0 makes or opens the model, then the others open it, then it is committed."""
        def build() -> Dict[str, Any]:
            self._open_model()
            torch.optim.Optimizer.__init__(self, groups, self.defaults)
            self.state = StateInStore(dict)
            self._attach_groups(self.param_groups)
            if self._overlap:
                self._hook_all()
            if self._given_names is not None and next(self._given_names, None) is not None:
                raise ValueError('names has more names than there are parameters')
            return {'model': self._model_digest(), **self._said_of_parts()}

        def complete() -> None:
            step = self._root.number('step')
            if self._ranks.leads:
                self._send_config()
                if self._makes or step != self._root.number('durable_step'):
                    self._root.command('commit', last=True)  # with it a making ends, and so does this constructor
                self._makes = False
                # Commits keep the steps after this one only. A crash may come when one store has ended the next step, and another not.
                if self._job and self.retain and step not in kept_numbers(self.root):
                    self._root.command('snapshot')
            self._begin_at(step)
        leads = self._ranks.leads
        made = self._ranks.together('making the model', build if leads else dict)
        self._fresh = set(made[0]['fresh'])
        opened = self._ranks.together('opening the model', build if not leads else lambda: made[0])
        for rank, said in enumerate(opened):
            if said['model'] != opened[0]['model']:
                raise RankFailed(rank, 'trains parameters of other names, shapes or dtypes than rank 0')
        missing = [name for name in self._given_parts if name not in self._taken_names]
        if missing:
            raise ValueError(f'parts has {missing[0]}, which is no parameter')
        self._share_parts(opened)
        self._built = True
        self._ranks.together('committing the model', complete)

    def _open_model(self) -> None:
        if self._job and self._resume and self._ranks.leads:
            bring_together(self._job, self._root, self._open_root)
        else:
            self._open_root()

    def _open_root(self) -> bool:
        """Returns whether the model is made anew."""
        if not self._ranks.leads:
            return False
        with self._root.explained('model root'):
            half = _making.take_back(self._root)
            held = _making.names_in(self.root)
            text = attribute(self.root, 'optimizer') if held is not None else ''
        if self._resume and half == _making.IMPORT:
            raise FileNotFoundError(errno.ENOENT, 'an import into this directory did not end: import again, or make a model without '
                                    'resume=True', self.root)
        if half or not self._resume:
            _making.check_empty(self._root, held, text)
            self._make_root()
            return True
        if not text or not held:
            raise _making.no_model(self._root, held)
        self._root.claim()
        if self._root.number('step_open'):
            self._take_over()
        return False

    def _make_root(self) -> None:
        """A root first and its files afterwards, so that one commit publishes them: after a crash all or none."""
        with self._root.explained('model root'):
            _making.begin(self.root, _making.OPTIMIZER)
            self._resume = False
            self._root.known.put(self.root, 'optimizer', self._config_text(self.defaults, of_root=True))
        self._root.claim()
        with self._root.explained('model root'):
            _making.goes_on(self._root, _making.OPTIMIZER)
        self._makes = True

    def _undo(self) -> None:
        """After a construction that failed: removes files that were made and never committed."""
        if self._makes and self._root.is_open:
            try:
                self._root.command('abort')
            except OSError:
                pass  # the caller must know the first error
