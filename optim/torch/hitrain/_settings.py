# SPDX-License-Identifier: Apache-2.0
"""The words of a model: the attributes that steer its steps, and what the store is known to hold.

Known is the one owner of every attribute that the client keeps in mind. A command of `.hitrain/ctl` may take attributes back, or
come after another program's changes. Root.command() tells Known before each one, and Known forgets what the table below says.
While a model is claimed, the daemon lets no other process change these words.
"""
import os
from typing import Any, Collection, Dict, Mapping, Tuple

from hitrain._words import XATTR, attribute

# Commands after which any attribute of the model may be another one. No other command changes attributes.
FORGETTING = {
    'abort': 'takes back all changes since the last commit',
    'rollback': 'brings the attributes of the kept step',
    'claim': 'until now another client could set them',
}
FLAGS = ('nesterov', 'maximize')
FORMS = {'state_bits': 32, 'state_bits_min': 4096}  # how the store keeps state; no part of a state_dict


class Known:
    """Attributes of the model's directory and files. An entry of an older generation is read again. Used by one thread at a time."""

    def __init__(self) -> None:
        self._generation = 0
        self._held: Dict[str, Dict[str, Tuple[int, str]]] = {}  # by path and word: generation and text

    def before(self, command: str) -> None:
        if command.split(' ', 1)[0] in FORGETTING:
            self._generation += 1

    def read(self, path: str, word: str) -> str:
        """'' when it is not set."""
        generation, text = self._held.get(path, {}).get(word, (-1, ''))
        if generation != self._generation:
            text = attribute(path, word)
            self.note(path, word, text)
        return text

    def note(self, path: str, word: str, text: str) -> None:
        """Somebody has just read or set it."""
        self._held.setdefault(path, {})[word] = self._generation, text

    def put(self, path: str, word: str, text: str) -> None:
        """Sets it unless it is so; '' removes it."""
        if self.read(path, word) == text:
            return
        self._held[path].pop(word, None)  # not known until the store has answered
        if text:
            os.setxattr(path, XATTR + word, text.encode())
        else:
            os.removexattr(path, XATTR + word)
        self.note(path, word, text)

    def forget(self, path: str) -> None:
        """Its file is another one, or gone."""
        self._held.pop(path, None)


def words_of_group(group: Mapping[str, Any], keys: Collection[str]) -> Dict[str, str]:
    """Hyper-parameters in the words of the store. repr() of a float reads back as the same float."""
    words = {k: group[k] for k in keys if k != 'betas'}
    if 'betas' in keys:
        words['beta1'], words['beta2'] = group['betas']
    return {k: str(int(v)) if k in FLAGS or k in FORMS else repr(float(v)) for k, v in words.items()}


def text_of(rule: str, words: Mapping[str, str]) -> str:
    return ' '.join([rule, *(f'{k}={v}' for k, v in words.items())])


def words_of_root(o: Any) -> str:
    """The words that a model alone has, of an Optimizer."""
    words = [f'durable_every={o.durable_every}'] + (['redo=on'] if o.redo else [])
    if o.redo_keep:
        words.append(f'redo_keep={o.redo_keep}')
    if o.deltas:
        words.append(f'delta=on delta_keep={o.deltas} delta_max={float(o.delta_max)!r}' + (' delta_dtype=bf16' if o.delta_dtype else ''))
    if o.retain:
        words.append(f'retain={o.retain} retain_every={o.retain_every}')
    if o.max_grad_norm:
        words.append(f'max_grad_norm={float(o.max_grad_norm)!r}')
    if o.grad_scale != 1.0:
        words.append(f'grad_scale={float(o.grad_scale)!r}')
    if o.skip_nonfinite:
        words.append('skip_nonfinite=1')
    if o.accumulate > 1:  # and a group may be shorter
        words.append(f'accumulate={o.accumulate} accumulate_mode={o.accumulate_mode} partial=1')
    return ' '.join(words)
