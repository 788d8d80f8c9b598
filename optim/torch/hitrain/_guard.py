# SPDX-License-Identifier: Apache-2.0
"""When the loss of a run jumps, go back to a step before that, and go on with other batches."""
import json
import logging
import math
import os
from typing import Any, Dict, List, Optional

_LOG = logging.getLogger('hitrain')
FINE, SPIKE, WENT_BACK = 'fine', 'spike', 'went back'


class _Trend:
    """Exponential mean and variance of values, over some `window` values."""

    def __init__(self, window: int) -> None:
        self.weight, self.mean, self.variance, self.count = 2 / (window + 1), 0.0, 0.0, 0

    def add(self, value: float) -> None:
        self.count += 1
        weight = max(self.weight, 1 / self.count)  # first a plain mean
        off = value - self.mean
        self.mean += weight * off
        self.variance = (1 - weight) * (self.variance + weight * off * off)

    def is_above(self, value: float, sigma: float, ratio: float) -> bool:
        return value > self.mean + sigma * math.sqrt(self.variance) and value > ratio * self.mean


class SpikeGuard:
    """
        guard = hitrain.integrations.SpikeGuard(optimizer)      # optimizer has retain=
        for batch in batches:
            ...
            optimizer.step()
            guard.see(loss.item())

    window     steps over which mean and deviation of loss and norm are taken. Before a quarter of the window nothing but NaN and infinity is a spike
    sigma, ratio  a spike is above mean + sigma * deviation, and above ratio * mean. Values of a spike do not change these
    patience   so many steps in a row are spikes before the model goes back
    back       it goes back to the newest kept step that is at least so many steps before the first spike
    lr_factor, lr_steps   the rates of all groups are multiplied by lr_factor for lr_steps steps (0: from then on). A scheduler that computes the
               rate anew for each step overwrites it
    at_most    RuntimeError at the next spike after so many returns within `window` steps
    path       a file to which each event is appended, as a line of JSON

    The batches are the program's: as it goes on with the next ones, those of the spike are skipped. With shard= all ranks call see(), and what
    rank 0 saw counts. A guard for each store of a Job would take them to different steps, so an optimizer with job= is refused.
    """

    def __init__(self, optimizer: Any, *, window: int = 200, sigma: float = 6.0, ratio: float = 1.5, patience: int = 1, back: int = 1,
                 lr_factor: float = 1.0, lr_steps: int = 0, at_most: int = 3, path: Optional[str] = None) -> None:
        if optimizer.retain < 1 and not optimizer.kept_steps():
            raise ValueError('a guard needs kept steps: give the optimizer retain= (and retain_every=)')
        if optimizer._job is not None:
            raise ValueError('a guard with job= is not supported: roll back all stores of the job to one step, and resume')
        for name, value, least in (('window', window, 4), ('patience', patience, 1), ('back', back, 1), ('at_most', at_most, 1), ('lr_steps', lr_steps, 0)):
            if value < least:
                raise ValueError(f'{name}={value}: at least {least}')
        if not (sigma > 0 and ratio > 0 and 0 < lr_factor <= 1):
            raise ValueError('sigma and ratio are above 0, and lr_factor is above 0 and at most 1')
        self.optimizer, self.window, self.sigma, self.ratio, self.patience, self.back = optimizer, window, sigma, ratio, patience, back
        self.lr_factor, self.lr_steps, self.at_most, self.path = lr_factor, lr_steps, at_most, path
        self.events: List[Dict[str, Any]] = []
        self._trends = {'loss': _Trend(window), 'grad_norm': _Trend(window)}
        self._spikes: List[Dict[str, Any]] = []  # in a row, up to now
        self._seen = 0
        self._went: List[int] = []
        self._lower_for = 0

    def see(self, loss: float, grad_norm: Optional[float] = None) -> str:
        """After step(): the loss of that step, and the norm of its gradient if the caller has it. 'fine', 'spike' (seen, and it waits for
        `patience`), or 'went back'. RuntimeError: there is no kept step to go back to, or it helped not for at_most times."""
        said = self.optimizer._ranks.together('the guard', lambda: {'loss': float(loss), 'grad_norm': grad_norm})[0]
        seen = {name: value for name, value in said.items() if value is not None}
        self._seen += 1
        self._raise_rates()
        if not any(self._is_spike(name, value) for name, value in seen.items()):
            self._spikes = []
            for name, value in seen.items():
                self._trends[name].add(value)
            return FINE
        self._spikes.append({'step': self.optimizer.committed_step, **seen})
        if len(self._spikes) < self.patience:
            return SPIKE
        self._go_back()
        return WENT_BACK

    def _is_spike(self, name: str, value: float) -> bool:
        trend = self._trends[name]
        return not math.isfinite(value) or (trend.count >= self.window // 4 and trend.is_above(value, self.sigma, self.ratio))

    def _go_back(self) -> None:
        spikes, self._spikes = self._spikes, []
        self._went = [seen for seen in self._went if seen > self._seen - self.window]
        first = spikes[0]
        what = f'step {first["step"]} has a loss of {first["loss"]:.6g} (mean {self._trends["loss"].mean:.6g})'
        if len(self._went) >= self.at_most:
            raise RuntimeError(f'{what}, and the model went back {self.at_most} times within {self.window} steps: look at the data and the rate')
        sound = [step for step in self.optimizer.kept_steps() if step <= first['step'] - self.back]
        if not sound:
            raise RuntimeError(f'{what}, and no kept step is {self.back} before it: retain more, or keep them less often')
        self.optimizer.rollback(sound[-1])
        self._went.append(self._seen)
        self._lower_rates()
        event = {'event': WENT_BACK, 'to': sound[-1], 'spikes': spikes, 'mean': self._trends['loss'].mean,
                 'lr': [group['lr'] for group in self.optimizer.param_groups]}
        self.events.append(event)
        _LOG.warning('%s: went back to step %d', what, sound[-1])
        if self.path and self.optimizer._ranks.leads:
            with open(os.fspath(self.path), 'a') as log:
                print(json.dumps(event), file=log)

    def _lower_rates(self) -> None:
        if self.lr_factor != 1.0 and not self._lower_for:
            self._scale_rates(self.lr_factor)
        self._lower_for = self.lr_steps

    def _raise_rates(self) -> None:
        if self._lower_for:
            self._lower_for -= 1
            if not self._lower_for:
                self._scale_rates(1 / self.lr_factor)

    def _scale_rates(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group['lr'] *= factor


def trainer_guard(**options: Any) -> Any:
    """A callback for Trainer of transformers, which makes its guard when training begins. It sees the losses that Trainer logs: give
    TrainingArguments logging_steps=1, so that each step is seen."""
    from transformers import TrainerCallback

    class Guard(TrainerCallback):
        guard: Optional[SpikeGuard] = None

        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
            self.guard = SpikeGuard(getattr(optimizer, 'optimizer', optimizer), **options)  # accelerate wraps it

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if self.guard and logs and 'loss' in logs:
                self.guard.see(logs['loss'], logs.get('grad_norm'))

    return Guard()


def lightning_guard(**options: Any) -> Any:
    """A callback for Trainer of Lightning, with its first optimizer."""
    from lightning import Callback

    class Guard(Callback):
        guard: Optional[SpikeGuard] = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.guard = SpikeGuard(trainer.optimizers[0], **options)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.guard and outputs is not None:
                self.guard.see(float(outputs['loss'] if isinstance(outputs, dict) else outputs))

    return Guard()
