# SPDX-License-Identifier: Apache-2.0
"""Optimizers for PyTorch that run inside a hitrain store: gradients go in, new parameters come out.

    model = Model()
    optimizer = HitrainAdamW(model.named_parameters(), '/mnt/hitrain/model', lr=3e-4)
    for batch in batches:
        model(batch).backward()
        optimizer.step()          # when it returns, the step is on the device
        optimizer.zero_grad()

A directory of the mount becomes the model; each parameter is one file in it. step() writes each gradient to
`.hitrain/grad/NAME`, asks for the boundary, and reads the parameters that the store computed. Moments and (for bf16
files) master weights stay in the store. After a crash, mount again and pass resume=True: the model continues from
the last committed step, which `optimizer.committed_step` names.

HitrainAdam, HitrainSGD, HitrainLion and HitrainAdagrad are used alike.

Only files and extended attributes are used: any other program may look on, and may write some of the gradients.
Works with torch 1.13 and 2.x; needs nothing but hitrain_topk.py and hitrain_ahead.py beside it.
"""
import contextlib
import ctypes
import errno
import math
import os
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch

import hitrain_ahead
import hitrain_topk

__all__ = ['HitrainAdagrad', 'HitrainAdam', 'HitrainAdamW', 'HitrainLion', 'HitrainOptimizer', 'HitrainSGD',
           'Shard']

XATTR = 'user.hitrain.'
HIDDEN = '.hitrain'

# What files can hold, in the words of the store.
FILE_DTYPES = {torch.float32: 'f32', torch.bfloat16: 'bf16', torch.float16: 'f16'}


class Shard(NamedTuple):
    """Which part of a model's gradients this process writes, where several train it together.

    rank      of this process; that of rank 0 makes the root, sets hyper-parameters and ends steps
    world     how many there are; each writes the rank-th of so many equal parts of every gradient
    barrier   returns when all of them have called it: torch.distributed.barrier, multiprocessing.Barrier(n).wait, ...
    """
    rank: int
    world: int
    barrier: Callable[[], Any]

    def part(self, elements: int) -> slice:
        return slice(elements * self.rank // self.world, elements * (self.rank + 1) // self.world)


class HitrainOptimizer(torch.optim.Optimizer):
    """The optimizer of the files below the directory `root`; see the text at the top of this module. Use one of the
    classes below, which are its rules.

    params         tensors, (name, tensor) pairs such as model.named_parameters(), or a list of groups as in
                   torch.optim, whose 'params' may be either
    defaults       hyper-parameters of the rule, also per group; change them in param_groups at any time
    names          names of the files, one per parameter in order, where params has none
    param_dtype    dtype of the files: torch.float32, torch.bfloat16 or torch.float16; default: each tensor's own
    grad_dtype     dtype in which gradients are sent; default: the file's
    durable_every  1: each step is durable when step() returns. N: a crash may lose up to N - 1 finished steps,
                   and never leaves one in parts
    max_grad_norm  clip the norm of all gradients together to it, as torch.nn.utils.clip_grad_norm_ does before a step;
                   0: do not. `grad_norm` tells the norm of the last step
    grad_scale     the number that the loss was multiplied by: gradients are divided by it
    skip_nonfinite True: a step with a NaN or infinity in its gradients changes nothing (and `step_was_skipped`)
    overlap        True: backward() sends each gradient as soon as it has produced it, so that the store computes while
                   the rest of backward still runs; step() sends what is left. Where several backwards make one
                   step, wrap all but the last in `with optimizer.hold_gradients():`, and do not change .grad between
                   backward() and step()
    accumulate     N gradients of each parameter make a step, added in the store: the trainer keeps none. Send each with
                   send_gradients(), or with overlap=True; both clear .grad. step() sends the last and ends the step
    accumulate_mode  'sum', or 'mean': the sum divided by N
    topk           send this fraction of each gradient's elements, the largest, and keep the rest for the next one (error
                   feedback; see hitrain_topk.py). A residual of four bytes per parameter stays with the tensors; it
                   is not saved, and abort() forgets it. 0: send all
    shard          see Shard: several processes, each with its part of every gradient. All construct the optimizer, call step()
                   (and send_gradients()) alike and read all parameters; gradients must be reduced before, at least each process's own part
    resume         False: root is new (or empty) and the tensors' values are written to it.
                   True: root holds this model already, and the tensors take their values from it; what an
                   interrupted step left is aborted

    One optimizer steers a model at a time. Tensors may live on any device; where theirs is not the CPU's memory, or
    their dtype not the file's, bytes pass through a buffer here.
    """

    rule = ''  # the store's word for it

    def __init__(self, params: Iterable, root: 'os.PathLike[str] | str', defaults: Dict[str, Any], *,
                 names: Optional[Iterable[str]] = None, param_dtype: Optional[torch.dtype] = None,
                 grad_dtype: Optional[torch.dtype] = None, durable_every: int = 1, max_grad_norm: float = 0.0,
                 grad_scale: float = 1.0, skip_nonfinite: bool = False, overlap: bool = False,
                 accumulate: int = 1, accumulate_mode: str = 'sum', topk: float = 0.0, shard: Optional[Shard] = None,
                 resume: bool = False) -> None:
        if durable_every < 1:
            raise ValueError(f'durable_every must be at least 1, not {durable_every}')
        if accumulate < 1 or accumulate_mode not in ('sum', 'mean'):
            raise ValueError(f'accumulate must be at least 1 and its mode sum or mean, not {accumulate} {accumulate_mode}')
        if shard and (not 0 <= shard.rank < shard.world or overlap or topk):
            raise ValueError('a shard has a rank below its world, and neither overlap nor topk')
        self.root = os.path.abspath(os.fspath(root))
        self.durable_every = durable_every
        # Of the whole step; like hyper-parameters they may be changed before its first gradient is sent.
        self.max_grad_norm, self.grad_scale, self.skip_nonfinite = max_grad_norm, grad_scale, skip_nonfinite
        self.accumulate, self.accumulate_mode = accumulate, accumulate_mode
        self._feedback = hitrain_topk.ErrorFeedback(topk) if topk else None
        self._shard, self._ahead = shard, None  # type: Optional[Shard], Optional[hitrain_ahead.ReadAhead]
        self._leads = shard is None or shard.rank == 0
        if not self._leads:
            shard.barrier()  # what rank 0 made is there now
            resume = True
        self._param_dtype, self._grad_dtype = param_dtype, grad_dtype
        self._resume, self._built = resume, False
        self._overlap, self._holding = overlap, False
        self._files: Dict[torch.Tensor, '_ParameterFile'] = {}
        self._names = iter(names) if names is not None else None
        self._root_fd = self._ctl_fd = -1
        self._config = ''  # what the root's attribute says
        self.defaults = defaults  # torch.optim sets the same; needed before that
        _check_hyper(defaults)
        groups = _as_groups(params)
        try:
            self._open_root(defaults)
            super().__init__(groups, defaults)
            if self._names is not None and next(self._names, None) is not None:
                raise ValueError('names has more names than there are parameters')
            self._built = True
            if self._leads:
                self._send_config()
                if not resume:
                    self.commit()
            self._step = self._read_number('step')
            if shard and self._leads:
                shard.barrier()
        except BaseException:
            self._undo()
            self.close()
            raise

    # -- what torch.optim offers --

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """As in torch.optim. Files of a group that is added later are part of the next commit."""
        group = dict(param_group)
        group['params'], group['names'] = self._named(group['params'])
        _check_hyper({**self.defaults, **group})
        super().add_param_group(group)
        for name, p in zip(group['names'], group['params']):
            self._attach(name, p)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:
        """One step: send gradients, end the step, take the new parameters. Parameters without a gradient stay."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.wait()
        files = [f for f in self._parameter_files() if f.sent or f.tensor.grad is not None]
        if not files:
            return loss
        if self._shard:
            self._send_shards([f for f in files if f.tensor.grad is not None])
        else:
            for f in files:
                if f.sent < self.accumulate and f.tensor.grad is not None:
                    self.send_gradient(f.tensor)
        self._end_step()
        if self._ahead:
            self._ahead.start(f.tensor for f in files)
        else:
            for f in files:
                self.receive_parameter(f.tensor)
        return loss

    @torch.no_grad()
    def send_gradients(self) -> None:
        """With accumulate=N: send the gradients of the backward passes since the last call as one of the N, and clear them."""
        files = [f for f in self._parameter_files() if f.tensor.grad is not None]
        if self._shard:
            self.wait()
            self._send_shards(files)
        for f in files:
            if not self._shard:
                self.send_gradient(f.tensor)
            f.tensor.grad = None

    def read_ahead(self, model: torch.nn.Module) -> None:
        """From now on step() returns before the new parameters are read: a thread reads them in the order in which the last forward
        of `model` used them, and each module's forward waits for its own. Who looks at a parameter in another way calls
        wait() first."""
        if self._ahead:
            self._ahead.close()
        self._ahead = hitrain_ahead.ReadAhead(self.receive_parameter, model, [f.tensor for f in self._parameter_files()])

    def wait(self) -> None:
        """Until all parameters of the last step are read."""
        if self._ahead:
            self._ahead.wait_all()

    @contextlib.contextmanager
    def hold_gradients(self) -> Iterator[None]:
        """With overlap=True: gradients of a backward() in here are not sent, because more will be added to them."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before

    def state_dict(self) -> Dict[str, Any]:
        """Hyper-parameters, and the step that the store holds durably (it is made durable first). With a shard: of rank 0.

        The state itself stays in the store, so this is small; it belongs to the store and is no copy of it.
        """
        self.commit()
        groups = [{k: v for k, v in g.items() if k != 'params'} for g in self.param_groups]
        return {'state': {}, 'param_groups': groups, 'hitrain': {'root': self.root, 'step': self._step}}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Take hyper-parameters back. ValueError when the store holds another step or other parameters."""
        if 'hitrain' not in state_dict:
            raise ValueError('this state_dict is not from an optimizer in a hitrain store')
        said, holds = state_dict['hitrain']['step'], self._read_number('step')
        if said != holds:
            raise ValueError(f'the state_dict is of step {said}, but {self.root} holds step {holds}')
        groups = state_dict['param_groups']
        if [list(g['names']) for g in groups] != [g['names'] for g in self.param_groups]:
            raise ValueError(f'the state_dict groups other parameters than this optimizer of {self.root} does')
        for new in groups:
            _check_hyper(new)
        for own, new in zip(self.param_groups, groups):
            own.update({k: v for k, v in new.items() if k not in ('params', 'names')})
        self._step = holds

    # -- what the store adds --

    @property
    def committed_step(self) -> int:
        """The last step that a crash cannot take away, as the store counts."""
        return self._read_number('durable_step')

    @property
    def grad_norm(self) -> float:
        """Of the last step, before clipping; known with max_grad_norm or skip_nonfinite."""
        with self._explained('grad_norm'):
            return float(os.getxattr(self.root, XATTR + 'grad_norm'))

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, because a gradient of it was not finite."""
        return self.skip_nonfinite and not math.isfinite(self.grad_norm)

    def commit(self) -> None:
        """Make everything below the root durable, as one. Ends a step if one is open."""
        self._must_lead()
        with self._explained('commit'):
            os.fsync(self._root_fd)
        self._step = self._read_number('step')

    def abort(self) -> None:
        """Undo what was not made durable: the store and the tensors go back to `committed_step`."""
        self.wait()
        self._command('abort')
        self._step = self._read_number('step')
        if self._feedback:
            self._feedback.forget()
        for f in self._parameter_files():
            f.sent = 0
            self.receive_parameter(f.tensor)

    def send_gradient(self, parameter: torch.Tensor) -> None:
        """Write the gradient of one parameter; the store may begin its update at once. Part of step()."""
        if self._shard:
            raise RuntimeError('with a shard, all processes send together: call send_gradients() or step()')
        f = self._files[parameter]
        if self._ahead:
            self._ahead.wait([parameter])  # of the step before, where forward had no use for it
        if not any(g.sent for g in self._files.values()):
            self._send_config()  # the first gradient settles the hyper-parameters of the step
        with self._explained(f'gradient of {f.name}'):
            if self._feedback:
                f.write_sparse(os.path.join(self.root, HIDDEN, 'grad-topk', f.name),
                               *self._feedback.choose(parameter, f.dense_gradient(), f.grad_dtype, self.grad_scale))
            else:
                f.write_gradient(os.path.join(self.root, HIDDEN, 'grad', f.name))
        f.sent += 1

    def receive_parameter(self, parameter: torch.Tensor) -> None:
        """Read one parameter; waits for its update. Part of step()."""
        f = self._files[parameter]
        with self._explained(f'parameter {f.name}'):
            f.read_parameter()

    def read_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """A copy of one piece of the optimizer's state, as f32: exp_avg or what else the rule keeps,
        step, or master (files of two bytes per element)."""
        f = self._files[parameter]
        out = torch.empty(() if name == 'step' else tuple(f.tensor.shape), dtype=torch.float32)
        with self._explained(f'state {name} of {f.name}'):
            fd = os.open(os.path.join(self.root, HIDDEN, 'state', f.name, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                _read_all(fd, out)
            finally:
                os.close(fd)
        return out

    def write_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Replace one piece of the optimizer's state, between steps; part of the next commit."""
        f = self._files[parameter]
        wanted = () if name == 'step' else tuple(f.tensor.shape)
        if tuple(value.shape) != wanted:
            raise ValueError(f'{name} of {f.name} has the shape {wanted}, not {tuple(value.shape)}')
        with self._explained(f'state {name} of {f.name}'):
            fd = os.open(os.path.join(self.root, HIDDEN, 'state', f.name, name), os.O_WRONLY | os.O_CLOEXEC)
            try:
                _write_all(fd, value.detach().to('cpu', torch.float32).contiguous())
            finally:
                os.close(fd)

    def export_state(self) -> Dict[str, Any]:
        """A state_dict for the torch.optim class of this rule: copies of all state, as f32.

        Load it into an optimizer that was made with the same parameters in the same groups, and the run goes on
        there; masters of files of two bytes are not part of it (read_state('master'))."""
        state: Dict[int, Dict[str, torch.Tensor]] = {}
        groups: List[Dict[str, Any]] = []
        for group in self.param_groups:
            first = sum(len(g['params']) for g in groups)
            groups.append({**{k: v for k, v in group.items() if k not in ('params', 'names')},
                           'params': list(range(first, first + len(group['params'])))})
            for i, p in enumerate(group['params'], first):
                if self.state_words(group) and self._has_state(p):
                    state[i] = {name: self.read_state(p, name) for name in self.state_words(group)}
        return {'state': state, 'param_groups': groups}

    def import_state(self, state_dict: Dict[str, Any]) -> None:
        """Take state and hyper-parameters from a state_dict of the torch.optim class of this rule, with the same
        parameters in the same groups, and commit. The tensors keep their values: make this optimizer from a model that has them already."""
        groups = state_dict['param_groups']
        if [len(g['params']) for g in groups] != [len(g['params']) for g in self.param_groups]:
            raise ValueError('the state_dict groups other parameters than this optimizer does')
        for own, new in zip(self.param_groups, groups):
            if new.get('amsgrad'):
                raise ValueError('amsgrad is not implemented in the store')
            hyper = {k: new[k] for k in self.defaults if k in new}
            _check_hyper({**own, **hyper})
            own.update(hyper)
            for p, i in zip(own['params'], new['params']):
                kept = state_dict['state'].get(i, {})
                for name in self.state_words(own):
                    if kept.get(name) is not None:
                        self.write_state(p, name, torch.as_tensor(kept[name]))
                if 'step' not in self.state_words(own) and kept:
                    self.write_state(p, 'step', torch.tensor(1.0))  # not the first one, which begins the buffer anew
        self._send_config()
        self.commit()

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        """Names of the state that the rule keeps for a parameter of this group, as torch.optim has them."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the files (an open one keeps the store from being unmounted). What was committed stays."""
        if self._ahead:
            self._ahead.close()
            self._ahead = None
        for f in self._files.values():
            f.close()
        self._holding = True  # hooks that are left do nothing
        for fd in (self._root_fd, self._ctl_fd):
            if fd >= 0:
                _close_quietly(fd)  # of a dead mount, too
        self._root_fd = self._ctl_fd = -1

    def __enter__(self) -> 'HitrainOptimizer':
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, '_ahead') and hasattr(self, '_root_fd'):
            self.close()

    # -- the model root --

    def _open_root(self, defaults: Dict[str, Any]) -> None:
        if self._resume:
            with self._explained('model root'):
                self._config = os.getxattr(self.root, XATTR + 'optimizer').decode()
        else:
            self._make_root(defaults)
        with self._explained('model root'):
            self._root_fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if self._resume and self._leads and self._read_number('step_open'):
            self._command('abort')

    def _make_root(self, defaults: Dict[str, Any]) -> None:
        """A root first and its files afterwards, so that one commit publishes them: after a crash all or none."""
        with self._explained('model root'):
            os.makedirs(self.root, exist_ok=True)
            if os.listdir(self.root):
                raise FileExistsError(f'{self.root} is not empty; pass resume=True to continue the model that it holds')
            self._config = self._config_text(defaults, of_root=True)
            os.setxattr(self.root, XATTR + 'optimizer', self._config.encode())

    def _undo(self) -> None:
        """Of a construction that failed: files that were made and never committed go away."""
        if not self._resume and self._root_fd >= 0:
            try:
                self._command('abort')
            except OSError:
                pass  # what failed before is what the caller must know

    def _config_text(self, group: Dict[str, Any], of_root: bool = False) -> str:
        """The words of the attribute. repr() of a float reads back as the same float."""
        words = {k: group[k] for k in self.defaults if k != 'betas'}
        if 'betas' in self.defaults:
            words['beta1'], words['beta2'] = group['betas']
        flags = {'nesterov', 'maximize'}
        text = ' '.join([self.rule] + [f'{k}={int(v)}' if k in flags else f'{k}={float(v)!r}' for k, v in words.items()])
        return f'{text} {self._words_of_root()}' if of_root else text

    def _words_of_root(self) -> str:
        words = [f'durable_every={self.durable_every}']
        if self.max_grad_norm:
            words.append(f'max_grad_norm={float(self.max_grad_norm)!r}')
        if self.grad_scale != 1.0:
            words.append(f'grad_scale={float(self.grad_scale)!r}')
        if self.skip_nonfinite:
            words.append('skip_nonfinite=1')
        if self.accumulate > 1:
            words.append(f'accumulate={self.accumulate} accumulate_mode={self.accumulate_mode}')
        return ' '.join(words)

    def _send_config(self) -> None:
        """Tell the store what changed in param_groups: the root follows the first group, the files of groups that
        differ from it carry their own. A step uses what is set when its first gradient is closed."""
        common = self._config_text(self.param_groups[0])
        wanted = self._config_text(self.param_groups[0], of_root=True)
        with self._explained('hyper-parameters'):
            if wanted != self._config:
                os.setxattr(self.root, XATTR + 'optimizer', wanted.encode())
                self._config = wanted
            for group in self.param_groups:
                text = self._config_text(group)
                for p in group['params']:
                    self._files[p].set_config('' if text == common else text)

    def _send_shards(self, files: List['_ParameterFile']) -> None:
        """Hyper-parameters before anybody's gradient, and all parts of one before the next, or the end of the step."""
        if self._leads and not any(f.sent for f in self._files.values()):
            self._send_config()
        self._shard.barrier()
        for f in files:
            with self._explained(f'gradient of {f.name}'):
                f.write_gradient(os.path.join(self.root, HIDDEN, 'grad', f.name), self._shard.part(f.tensor.numel()))
            f.sent += 1
        self._shard.barrier()

    def _must_lead(self) -> None:
        if not self._leads:
            raise RuntimeError(f'rank 0 steers the model, nobody else: call this there alone, not on rank {self._shard.rank} '
                               f'of {self._shard.world}')

    def _end_step(self) -> None:
        if self._leads and self.durable_every == 1:
            with self._explained('commit'):
                os.fsync(self._root_fd)
        elif self._leads:
            self._command('step')
        if self._shard:
            self._shard.barrier()
        for f in self._files.values():
            f.sent = 0
        step = self._read_number('step')
        if step != self._step + 1:
            raise RuntimeError(f'{self.root} went from step {self._step} to {step}: somebody else steers it, too')
        self._step = step

    def _gradient_ready(self, f: '_ParameterFile') -> None:
        if self._holding or f.tensor.grad is None:
            return
        if f.sent == self.accumulate:
            raise RuntimeError(f'a second gradient of {f.name} before step(): wrap all backwards but the last in '
                               'hold_gradients()' if self.accumulate == 1 else
                               f'{f.name} has had the {self.accumulate} gradients of this step: call step()')
        self.send_gradient(f.tensor)
        if self.accumulate > 1:
            f.tensor.grad = None  # the next one is another

    def _has_state(self, p: torch.Tensor) -> bool:
        with self._explained(f'state of {self._files[p].name}'):
            return os.stat(os.path.join(self.root, HIDDEN, 'state', self._files[p].name, 'step')).st_size > 0

    def _command(self, line: str) -> None:
        self._must_lead()
        with self._explained(line):
            if self._ctl_fd < 0:
                self._ctl_fd = os.open(os.path.join(self.root, HIDDEN, 'ctl'), os.O_RDWR | os.O_CLOEXEC)
            os.write(self._ctl_fd, line.encode() + b'\n')  # a refusal is an error of the write
            os.read(self._ctl_fd, 4096)  # 'ok'

    def _read_number(self, word: str) -> int:
        with self._explained(word):
            return int(os.getxattr(self.root, XATTR + word))

    def _explained(self, what: str) -> '_Explained':
        return _Explained(self.root, what)

    # -- parameters --

    def _parameter_files(self) -> Iterator['_ParameterFile']:
        return (self._files[p] for g in self.param_groups for p in g['params'])

    def _named(self, params: Any) -> Tuple[List[torch.Tensor], List[str]]:
        tensors, names = [], []
        for entry in [params] if isinstance(params, torch.Tensor) else params:
            name, tensor = entry if isinstance(entry, tuple) else (None, entry)
            if name is None and self._names is not None:
                name = next(self._names, None)
                if name is None:
                    raise ValueError('names has fewer names than there are parameters')
            if tensor in self._files or any(tensor is t for t in tensors):
                raise ValueError(f'the parameter {name or len(tensors)} is given twice')
            names.append(name if name is not None else f'parameter{len(self._files) + len(names)}')
            tensors.append(tensor)
        taken = {f.name for f in self._files.values()}
        for name in names:
            _check_name(name)
            if name in taken:
                raise ValueError(f'two parameters are called {name}')
            taken.add(name)
        return tensors, names

    def _attach(self, name: str, p: torch.Tensor) -> None:
        dtype = self._param_dtype or p.dtype
        for d in (dtype, self._grad_dtype or dtype):
            if d not in FILE_DTYPES:
                raise TypeError(f'{name}: files can be {" or ".join(FILE_DTYPES.values())}, not {d}')
        if p.numel() == 0:
            raise ValueError(f'{name} has no elements')
        f = _ParameterFile(os.path.join(self.root, name), name, p, dtype, self._grad_dtype or dtype)
        existing = os.path.exists(f.path) if self._built else self._resume
        self._files[p] = f
        with self._explained(f'parameter {name}'):
            f.open_existing() if existing else f.create()
        if self._overlap:
            f.hook = _when_accumulated(p, weakref.WeakMethod(self._gradient_ready), f)


class HitrainAdamW(HitrainOptimizer):
    """torch.optim.AdamW's rule. options: those of HitrainOptimizer."""
    rule = 'adamw'

    def __init__(self, params: Iterable, root: 'os.PathLike[str] | str', lr: float = 1e-3,
                 betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2, *,
                 maximize: bool = False, **options: Any) -> None:
        super().__init__(params, root, {'lr': lr, 'betas': tuple(betas), 'eps': eps, 'weight_decay': weight_decay,
                                        'maximize': maximize}, **options)

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return 'step', 'exp_avg', 'exp_avg_sq'


class HitrainAdam(HitrainOptimizer):
    """torch.optim.Adam's rule: weight_decay is part of the gradient."""
    rule = 'adam'

    def __init__(self, params: Iterable, root: 'os.PathLike[str] | str', lr: float = 1e-3,
                 betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, *,
                 maximize: bool = False, **options: Any) -> None:
        super().__init__(params, root, {'lr': lr, 'betas': tuple(betas), 'eps': eps, 'weight_decay': weight_decay,
                                        'maximize': maximize}, **options)

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return 'step', 'exp_avg', 'exp_avg_sq'


class HitrainSGD(HitrainOptimizer):
    """torch.optim.SGD's rule."""
    rule = 'sgd'

    def __init__(self, params: Iterable, root: 'os.PathLike[str] | str', lr: float = 1e-3, momentum: float = 0.0,
                 dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, *,
                 maximize: bool = False, **options: Any) -> None:
        super().__init__(params, root, {'lr': lr, 'momentum': momentum, 'dampening': dampening,
                                        'weight_decay': weight_decay, 'nesterov': nesterov, 'maximize': maximize},
                         **options)

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return ('momentum_buffer',) if group['momentum'] else ()


class HitrainLion(HitrainOptimizer):
    """Lion (Chen et al., arXiv:2302.06675)."""
    rule = 'lion'

    def __init__(self, params: Iterable, root: 'os.PathLike[str] | str', lr: float = 1e-4,
                 betas: Tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, *,
                 maximize: bool = False, **options: Any) -> None:
        super().__init__(params, root, {'lr': lr, 'betas': tuple(betas), 'weight_decay': weight_decay,
                                        'maximize': maximize}, **options)

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return ('exp_avg',)


class HitrainAdagrad(HitrainOptimizer):
    """torch.optim.Adagrad's rule, its sums beginning with zero."""
    rule = 'adagrad'

    def __init__(self, params: Iterable, root: 'os.PathLike[str] | str', lr: float = 1e-2, lr_decay: float = 0.0,
                 weight_decay: float = 0.0, eps: float = 1e-10, *, maximize: bool = False, **options: Any) -> None:
        super().__init__(params, root, {'lr': lr, 'lr_decay': lr_decay, 'weight_decay': weight_decay, 'eps': eps,
                                        'maximize': maximize}, **options)

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return 'step', 'sum'


class _ParameterFile:
    """One tensor and its file."""

    def __init__(self, path: str, name: str, tensor: torch.Tensor, dtype: torch.dtype,
                 grad_dtype: torch.dtype) -> None:
        self.path, self.name, self.tensor = path, name, tensor
        self.dtype, self.grad_dtype = dtype, grad_dtype
        self.fd = -1
        self.sent = 0  # gradients, in this step
        self.hook: Any = None
        self.config = ''  # this file's own optimizer attribute
        self._buffers: Dict[torch.dtype, torch.Tensor] = {}

    def create(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.fd = os.open(self.path, flags, 0o666)
        os.setxattr(self.fd, XATTR + 'dtype', FILE_DTYPES[self.dtype].encode())
        os.setxattr(self.fd, XATTR + 'shape', self._shape().encode())
        if self.grad_dtype != self.dtype:
            os.setxattr(self.fd, XATTR + 'grad_dtype', FILE_DTYPES[self.grad_dtype].encode())
        source = self._ready(self.tensor, self.dtype)
        _write_all(self.fd, source)
        if self.dtype != self.tensor.dtype:  # compute with what the store holds
            self._store(source)

    def open_existing(self) -> None:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        for word, wanted in (('dtype', FILE_DTYPES[self.dtype]), ('shape', self._shape())):
            found = self._attribute(word)
            if found != wanted:
                raise ValueError(f'{self.path}: {word} is {found or "not set"} in the store and {wanted} in the model')
        grad = FILE_DTYPES[self.grad_dtype]
        if (self._attribute('grad_dtype') or FILE_DTYPES[self.dtype]) != grad:
            os.setxattr(self.fd, XATTR + 'grad_dtype', grad.encode())
        self.config = self._attribute('optimizer')
        self.read_parameter()

    def dense_gradient(self) -> torch.Tensor:
        if self.tensor.grad.layout != torch.strided:
            raise TypeError(f'the gradient of {self.name} is sparse; only dense ones can be sent')
        return self.tensor.grad

    def write_gradient(self, path: str, part: slice = slice(None)) -> None:
        whole = self._ready(self.dense_gradient(), self.grad_dtype).view(-1)
        if whole[part].numel():
            _hand_over(path, [whole[part]], (part.start or 0) * whole.element_size())

    def write_sparse(self, path: str, indices: torch.Tensor, values: torch.Tensor) -> None:
        head = hitrain_topk.header(values.dtype, self.tensor.numel(), indices.numel())
        _hand_over(path, [torch.frombuffer(bytearray(head), dtype=torch.uint8), indices, values])

    def read_parameter(self) -> None:
        if _direct(self.tensor, self.dtype):
            _read_all(self.fd, self.tensor)
            # What autograd saved of the old values is void: a view of nothing moves the version counter.
            self.tensor.detach().view(-1)[:0].zero_()
        else:
            buffer = self._buffer(self.dtype)
            _read_all(self.fd, buffer)
            self._store(buffer)

    def set_config(self, text: str) -> None:
        if text == self.config:
            return
        if text:
            os.setxattr(self.fd, XATTR + 'optimizer', text.encode())
        else:
            os.removexattr(self.fd, XATTR + 'optimizer')
        self.config = text

    def close(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        if self.fd >= 0:
            _close_quietly(self.fd)
        self.fd = -1

    def _shape(self) -> str:
        return ','.join(map(str, self.tensor.shape)) or '1'

    def _attribute(self, word: str) -> str:
        try:
            return os.getxattr(self.fd, XATTR + word).decode()
        except OSError as e:
            if e.errno != errno.ENODATA:
                raise
            return ''

    def _buffer(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._buffers:
            self._buffers[dtype] = torch.empty(self.tensor.shape, dtype=dtype, pin_memory=self.tensor.is_cuda)
        return self._buffers[dtype]

    def _ready(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor itself where its memory is what a file takes, else a copy that is (f32 to bf16: to nearest even)."""
        return tensor if _direct(tensor, dtype) else self._buffer(dtype).copy_(tensor.detach())

    @torch.no_grad()
    def _store(self, values: torch.Tensor) -> None:
        self.tensor.copy_(values)


class _Explained:
    """Adds to an OSError what was being done and what the store says about it."""

    def __init__(self, root: str, what: str) -> None:
        self.root, self.what = root, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, OSError) and error.errno is not None:
            text = f'{os.strerror(error.errno)} ({self.what})'
            said = self._store_says(error.errno)
            raise type(error)(error.errno, f'{text}: {said}' if said else text, self.root) from error

    def _store_says(self, number: int) -> str:
        if number in (errno.ENOTCONN, errno.ECONNABORTED):
            return "the file system's daemon is gone; mount again and continue with resume=True"
        try:
            return os.getxattr(self.root, XATTR + 'error').decode(errors='replace')
        except OSError as e:
            return 'this is no hitrain mount' if e.errno == errno.ENOTSUP else ''


class _NodeHook:
    """A hook on the node of the graph that adds to .grad; the node lives as long as somebody refers to it."""

    def __init__(self, node: Any, call: Callable[[], None]) -> None:
        self._node, self._handle = node, node.register_hook(lambda *unused: call())

    def remove(self) -> None:
        self._handle.remove()


def _when_accumulated(p: torch.Tensor, method: weakref.WeakMethod, f: _ParameterFile) -> Any:
    """Call method(f) whenever backward has added to p.grad all that it will; the result's remove() ends that."""
    def call(*unused: Any) -> None:
        bound = method()
        if bound is not None:
            bound(f)

    if not p.requires_grad:
        return None
    if hasattr(p, 'register_post_accumulate_grad_hook'):  # torch >= 2.1
        return p.register_post_accumulate_grad_hook(call)
    with torch.enable_grad():
        return _NodeHook(p.expand_as(p).grad_fn.next_functions[0][0], call)


def _as_groups(params: Iterable) -> List[Dict[str, Any]]:
    if isinstance(params, torch.Tensor):
        raise TypeError('params must be a list of parameters, not one tensor')
    listed = list(params)
    if not listed:
        raise ValueError('there are no parameters')
    return listed if isinstance(listed[0], dict) else [{'params': listed}]


def _check_hyper(group: Dict[str, Any]) -> None:
    for key in ('lr', 'eps', 'weight_decay', 'momentum', 'lr_decay'):
        if not 0.0 <= group.get(key, 0.0) < float('inf'):
            raise ValueError(f'{key} must be a number >= 0, not {group[key]}')
    for beta in group.get('betas', ()):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f'betas must be numbers >= 0 and < 1, not {group["betas"]}')


def _check_name(name: str) -> None:
    if not name or '/' in name or '\0' in name or name in ('.', '..', HIDDEN) or len(os.fsencode(name)) > 255:
        raise ValueError(f'{name!r} cannot be the name of a file')


def _direct(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Can this tensor's memory be read and written as the bytes of a file?"""
    return tensor.dtype == dtype and tensor.device.type == 'cpu' and tensor.is_contiguous()


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy; valid while the tensor is."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast('B')


def _write_all(fd: int, tensor: torch.Tensor, at: int = 0) -> None:
    memory, done = _memory(tensor), 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], at + done)


def _hand_over(path: str, tensors: List[torch.Tensor], at: int = 0) -> None:
    """A gradient: these, one after the other."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for t in tensors:
            _write_all(fd, t, at)
            at += t.numel() * t.element_size()
    except BaseException:
        _close_quietly(fd)
        raise
    os.close(fd)  # hands the gradient over: errors of it are raised here


def _read_all(fd: int, tensor: torch.Tensor) -> None:
    memory, done = _memory(tensor), 0
    while done < len(memory):
        n = os.preadv(fd, [memory[done:]], done)
        if n == 0:
            raise OSError(errno.EIO, f'the file ends after {done} of {len(memory)} bytes')
        done += n


def _close_quietly(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass  # told already, by what failed before
