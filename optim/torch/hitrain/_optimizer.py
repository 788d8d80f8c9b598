# SPDX-License-Identifier: Apache-2.0
"""The optimizer of the files below a directory; hitrain.optim has its rules.

Messages name the parameter and the store's reason. hitrain/__init__.py describes what a trainer may rely on.
"""
import atexit
import collections
import concurrent.futures
import contextlib
import copy
import errno
import gc
import hashlib
import math
import os
import re
import threading
import warnings
import weakref
from typing import Any, Callable, ContextManager, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch

from hitrain import _ahead, _gather, _making, _need, _packs, _settings, _topk
from hitrain._alone import Alone, Holding, WholeStep
from hitrain._files import FILE_DTYPES, HIDDEN, XATTR, Descriptors, ParameterFile, attribute, bytes_of, check_name, check_plain
from hitrain._job import Job, bring_together, kept_numbers
from hitrain._memory import check_apart, check_ordered
from hitrain._packs import Member, PackFile, Place
from hitrain._parts import PLAIN, Part, is_dtensor, local_of, part_of_dtensor, shares
from hitrain._root import Root
from hitrain._windows import WindowFile, can_have_windows
from hitrain.distributed import RankFailed, Ranks, Shard, part_of

# Flags of torch.optim: those that change no number, and those that the store does not do.
FREE_FLAGS = ('capturable', 'foreach', 'fused')
# Gradients up to so many bytes are handed over together, so many in one call.
SMALL_BYTES, SMALL_MOST = 256 << 10, 256
TOGETHER_BYTES = 8 << 20  # then the store begins with them
READERS = min(4, os.cpu_count() or 1)  # threads that read new parameters
REFUSED_FLAGS = ('amsgrad', 'decoupled_weight_decay', 'differentiable', 'initial_accumulator_value')


class Optimizer(torch.optim.Optimizer):
    """The optimizer of the files below the directory `root`; see the text of the package. Use one of the classes of
    hitrain.optim, which are its rules.

    params         tensors, (name, tensor) pairs such as model.named_parameters(), or a list of groups as in
                   torch.optim, whose 'params' may be either. Prefixes of wrappers (`module.`, `_orig_mod.`, ...) are no
                   part of a file's name
    defaults       hyper-parameters of the rule, also per group; change them in param_groups at any time. A step takes
                   the values from when step() is called
    names          names of the files, one per parameter in order, if params has none
    param_dtype    dtype of the files: torch.float32, torch.bfloat16 or torch.float16; default: each tensor's own
    grad_dtype     dtype in which gradients are sent; default: the file's
    durable_every  1: each step is durable when step() returns. N: a crash may lose up to N - 1 finished steps, and
                   never leaves one in parts
    redo           True, with durable_every=N above 1: each step is durable when step() returns, because the store logs its
                   gradients, or their sums; parameters and state are written in every N-th step alone
    redo_keep      with redo: the last so many steps, at most 128, stay readable, for a copy that `hitrainctl follow` keeps
    max_grad_norm  clip the norm of all gradients together to it, as torch.nn.utils.clip_grad_norm_ does before a step;
                   0: do not. `grad_norm` is the norm of the last step
    grad_scale     the number that the loss was multiplied by: gradients are divided by it
    skip_nonfinite True: a step with a NaN or infinity in its gradients changes nothing (and `step_was_skipped`)
    overlap        True: backward() sends each gradient as soon as it has produced it, and step() sends the rest. So the
                   store computes while the rest of backward still runs. If several backwards make one step, wrap all
                   but the last in `with optimizer.hold_gradients():`. If gradients, parameters or hyper-parameters are
                   changed between backward() and step(), step() sends all again, and from then on backward() sends
                   nothing. DistributedDataParallel is refused: it reduces gradients after they were sent. Its
                   communication hook cannot send them either. A bucket has zeros for a parameter that no rank used, and
                   this shows only at the end of backward, when the store has applied them. A shard is refused, too: all
                   ranks must begin a step together
    async_step     True: step() returns when the end of the step is requested and its parameters are read. The store closes
                   it meanwhile, and the first gradient of the next step waits for that. With read_ahead() the forward
                   pass overlaps the updates: use both, and overlap=True. The numbers are the same. A failure of the
                   step is raised by the next call that sends gradients or reads parameters, and takes the step back.
                   commit() and state_dict() wait; committed_step may be one less until the step is closed. Not with a
                   shard
    accumulate     up to N gradients of each parameter make a step, added in the store: the trainer keeps none. Send
                   each with send_gradients(), or with overlap=True; both clear .grad. step() sends the last and ends
                   the step. The last group of an epoch may be shorter, and a parameter may have no part in some passes
    accumulate_mode  'sum', or 'mean': the sum divided by N, also if a group is shorter or a parameter has no part in
                   some passes. That is what `(loss / N).backward()` gives in torch: each pass has the same weight in
                   every step. For the mean of a shorter group multiply its losses by N / passes
    topk           send this fraction of each gradient's elements, the largest, and keep the rest for the next one
                   (error feedback; see hitrain/_topk.py). A residual of four bytes per parameter stays with the tensors.
                   It is not saved, and abort() and a step that is taken back forget it. 0: send all
    pack           parameters of at most so many bytes that train share files, many in one, as the attribute `members` of
                   packed.0, packed.1, ... says. Thousands of small parameters then cost what a few large ones cost. Numbers
                   are the same; only the norm that clips is added in another order. The parameters of a file need a
                   gradient in the same steps: if one has none while another has one, step() names both and sends nothing.
                   With overlap=True step() sends them. With resume=True the store decides. Not with topk, nor with overlap and
                   accumulate together. 0: none share
    shard          see Shard: several processes, each with its part of every gradient. All construct the optimizer, call
                   step(), send_gradients(), add_param_group(), import_state() and abort() alike and read all
                   parameters. Gradients must be reduced before, at least each process's own part. If only some have a
                   gradient of a parameter, these write the whole gradient between them. A failure on one rank raises on
                   all ranks (RankFailed). A parameter of FSDP2's fully_shard (DTensor) needs a shard: each rank reads and
                   writes the elements that it holds, and no others
    parts          with a shard: (offset, shape) for each name whose tensor holds only a part of the parameter on this
                   rank, the elements from offset on of a parameter of that shape. Parts of ranks are equal or apart, and
                   make the whole. All ranks name the same parameters
    full_state_dict  False: state_dict() names the step and the store keeps the state. True: state_dict() is
                   export_state(masters=True), a copy of all state as torch.optim has it, so that checkpoints of
                   trainers can go back to any step
    retain         keep the steps of the last so many commits, which `hitrainctl steps` lists; 0: none but those of snapshot()
    retain_every   of these only the first from each multiple of this number on
    job            see Job: other stores train other models in equal steps. With resume=True all go back to the newest step that
                   every store still has
    resume         False: root is new (or empty) and the tensors' values are written to it.
                   True: root holds this model already, and the tensors take their values from it. The rest of an
                   interrupted step is taken back. Finished steps of an earlier process become durable: `committed_step`
                   is the step of the tensors. A constructor that was killed has left a half-made model, and the next one makes it anew,
                   with either value: resume=os.path.exists(root) is right at any time
    flags          fused, foreach and capturable are accepted and change nothing; amsgrad, differentiable and the like
                   only as False. No CUDA graph can hold a step of the store: step() refuses to be captured

    Hyper-parameters may be tensors of one element, as in torch.optim.

    One optimizer steers a model at a time. Tensors may live on any device. If that is not the CPU's memory, or their
    dtype is not the file's, bytes pass through a buffer here.
    """

    rule = ''  # the store's word for it
    _reduces = False  # gradients of a shard's ranks, in backward
    _leaves_mappings = False  # in close(), which the destructor calls
    _ends = False  # the interpreter does
    _under = 'overlap=True does not work under {}: it reduces gradients after backward has sent them. Pass overlap=False; step() then sends what was reduced'

    def __init__(self, params: Iterable[Any], root: 'os.PathLike[str] | str', defaults: Dict[str, Any], *,
                 names: Optional[Iterable[str]] = None, param_dtype: Optional[torch.dtype] = None,
                 grad_dtype: Optional[torch.dtype] = None, durable_every: int = 1, redo: bool = False, redo_keep: int = 0,
                 max_grad_norm: float = 0.0, grad_scale: float = 1.0, skip_nonfinite: bool = False, overlap: bool = False, async_step: bool = False,
                 accumulate: int = 1, accumulate_mode: str = 'sum', topk: float = 0.0, pack: int = 0, shard: Optional[Shard] = None,
                 parts: Optional[Mapping[str, Tuple[int, Sequence[int]]]] = None, full_state_dict: bool = False, retain: int = 0,
                 retain_every: int = 1, job: Optional[Job] = None, resume: bool = False, **flags: Any) -> None:
        if durable_every < 1:
            raise ValueError(f'durable_every must be at least 1, not {durable_every}')
        if redo and durable_every == 1:
            raise ValueError('redo needs durable_every above 1: every step would be written in full')
        if not 0 <= redo_keep <= 128 or (redo_keep and not redo):
            raise ValueError(f'redo_keep must be from 0 to 128, and needs redo=True, not {redo_keep}')
        if accumulate < 1 or accumulate_mode not in ('sum', 'mean'):
            raise ValueError(f'accumulate must be at least 1 and its mode sum or mean, not {accumulate} {accumulate_mode}')
        if shard and (not 0 <= shard.rank < shard.world or (overlap and not self._reduces) or topk or async_step):
            raise ValueError('a shard has a rank below its world, and no overlap, topk or async_step')
        if pack < 0 or (pack and topk):
            raise ValueError('pack must be at least 0, and a pack takes no topk: its largest elements may all be of one member')
        if parts and not shard:
            raise ValueError('parts need shard=: each rank holds some elements of a parameter')
        if retain < 0 or retain_every < 1 or (job and not 0 <= job.rank < job.world):
            raise ValueError('retain must be at least 0, retain_every at least 1, and the rank of a job below its world')
        for name in flags:
            if name not in FREE_FLAGS + REFUSED_FLAGS:
                raise TypeError(f'{type(self).__name__} has no option {name}')
        _check_hyper({**defaults, **flags})
        groups = _as_groups(params)
        self.root = os.path.abspath(os.fspath(root))
        self.durable_every, self.redo, self.redo_keep = durable_every, redo, redo_keep
        self.retain, self.retain_every = retain, retain_every
        # Options of the whole step; like hyper-parameters they may be changed at any time.
        self.max_grad_norm, self.grad_scale, self.skip_nonfinite = max_grad_norm, grad_scale, skip_nonfinite
        self.accumulate, self.accumulate_mode = accumulate, accumulate_mode
        self._feedback = _topk.ErrorFeedback(topk) if topk else None
        self._ahead: Optional[_ahead.ReadAhead] = None
        self._gather = _gather.Gather(self.root)
        self._async, self._closing = async_step, False  # _closing: the store may still be closing the last step
        self._param_dtype, self._grad_dtype = param_dtype, grad_dtype
        self.full_state_dict = full_state_dict
        self._overlap, self._holding, self._early = overlap, False, overlap
        self._given: Dict[torch.Tensor, None] = {}           # of all groups
        self._files: Dict[torch.Tensor, ParameterFile] = {}  # of members of packs: Member
        self._held: Dict[ParameterFile, None] = {}           # all that are open
        self._places: Any = None  # where the memory of parameters is, when it was looked at last
        self._pack = pack
        check_ordered('names', names)
        self._given_names = iter(names) if names is not None else None
        self._taken_names: Dict[str, None] = {}
        self._built, self._pid = False, os.getpid()
        self._self = id(self)  # Lightning makes objects that share all of ours, and end earlier
        self._begin_at(0)
        self._pushed_alone: Dict[ParameterFile, None] = {}  # by rank 0, and not yet known to the others
        self._unread = False  # files have newer values than tensors
        self._durable_due = False  # the end of the step that has begun is to be durable
        # in step() and send_gradients(): no code of the user runs until the gradients are done with
        self._sending_all = False
        self._latched: Optional[List[str]] = None
        self._small: Optional[List[ParameterFile]] = None  # written gradients that are handed over together
        self._small_bytes = 0  # of these
        self._torn = ''  # why a step could not be taken back
        self._users: 'List[weakref.ref[Alone]]' = []  # calls that other threads must not disturb
        self._one_gradient = threading.RLock()  # of hooks in backward
        self._seen_reducers = False
        self.defaults = defaults  # torch.optim sets the same; needed before that
        self._root = Root(self.root)
        self._root.room = weakref.WeakMethod(self._room)
        self._shard, self._ranks = shard, Ranks(shard, self.root)
        self._job = job
        self._given_parts = {name: Part(offset, tuple(shape)) for name, (offset, shape) in (parts or {}).items()}
        self._fresh: Set[str] = set()  # rank 0 has just made these files, and each rank fills in its part
        self._resume = resume or not self._ranks.leads
        self._makes = False  # this process makes the model
        _LIVE.add(self)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # before what the program has registered until now, as an unmount
        try:
            self._construct(groups)
        except BaseException as e:
            self._undo()
            self.close(f'could not make its optimizer: {type(e).__name__}')
            raise

    def _room(self) -> int:
        """How large a store must be, for a refusal that has no room."""
        world = self._shard.world if self._shard else 1
        sizes = [(self._param_dtype or p.dtype, p.numel() // world) for p in self._given]
        momentum = max((g.get('momentum', 0.0) for g in self.param_groups), default=0.0)
        return _need.bytes_of(sizes, self.rule, momentum, self.retain, self.durable_every if self.redo else 0, self.redo_keep, self.accumulate)

    # -- methods of torch.optim --

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """As in torch.optim. Files of a group that is added later are part of the next commit. With a shard: on all ranks."""
        group = dict(param_group)
        group['params'], group['names'] = self._named(group['params'])
        _check_hyper({**self.defaults, **group})
        super().add_param_group(group)
        self._given.update(dict.fromkeys(group['params']))
        self._taken_names.update(dict.fromkeys(group['names']))
        if not self._built:
            return
        try:
            def attach() -> Dict[str, Any]:
                self._attach_groups([group])
                return self._said_of_parts()
            leads = self._ranks.leads
            made = self._ranks.together('a new group', attach if leads else dict)
            self._fresh = set(made[0]['fresh'])
            self._share_parts(self._ranks.together('a new group', attach if not leads else lambda: made[0]))
        except BaseException:
            self._detach_group(self.param_groups.pop())
            raise

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:  # type: ignore[override]
        """One step: send gradients, end the step, take the new parameters. Parameters without a gradient stay."""
        _refuse_capture()
        loss = None

        def prepare() -> Dict[str, Any]:
            nonlocal loss
            if closure is not None:
                users, self._users = self._users, []  # a thread of backward may send gradients
                try:
                    with torch.enable_grad():
                        loss = closure()
                finally:
                    self._users = users
            return self._offer(ends=True)

        with self._whole_step('step()'):
            said = self._ranks.together('step()', prepare)
            files = [f for f, owners in self._owned(said) if f.sent or owners]
            if not files:
                return loss
            self._send(said)
            self._ranks.together('the end of the step', self._end_step)
            self._unread = True
            closing = self._closing
            self._begin_at(self._step + 1)
            self._closing = closing
            self._durable_due = False
            self._ranks.together('reading', lambda: self._receive(files))
            self._unread = False
        return loss

    @torch.no_grad()
    def send_gradients(self) -> None:
        """With accumulate=N: send the gradients of the backward passes since the last call as one of the N, and clear them."""
        with self._whole_step('send_gradients()'):
            self._send(self._ranks.together('send_gradients()', lambda: self._offer(ends=False)))
            for f in self._parameter_files():
                if f.has_gradient():
                    f.clear_gradient()

    def read_ahead(self, model: torch.nn.Module) -> None:
        """From now on step() returns before the new parameters are read. A thread reads them in the order in which the
        last forward of `model` used them, and each module's forward waits for its own. Code that uses a parameter in
        another way calls wait() first. A gradient of a parameter that its module's forward did not wait for is an error
        of backward()."""
        if any(f.part for f in self._parameter_files()):
            raise RuntimeError('fully_shard gathers parameters before the forward of the module that holds them: they cannot be read later')
        if self._ahead:
            self._ahead.close()
        self._ahead = _ahead.ReadAhead(self.receive_parameter, model, {f.tensor: f.name for f in self._held if not isinstance(f, PackFile)})

    def wait(self) -> None:
        """Until all parameters of the last step are read."""
        if self._ahead:
            self._ahead.wait_all()

    def _settle(self) -> None:
        """Returns when no reading is in flight. The check that forward waited for its parameters is unchanged."""
        if self._ahead:
            self._ahead.settle()

    def hold_gradients(self) -> 'ContextManager[None]':
        """With overlap=True: gradients of a backward() in here are not sent, because more will be added to them."""
        return Holding(self)

    def state_dict(self) -> Dict[str, Any]:
        """Hyper-parameters, and the number of the last finished step. That step is made durable first; while gradients
        of the next one are sent already, the end of that one is durable instead. Any rank may call it; with a shard
        rank 0 makes the step durable.

        The state itself stays in the store, so this is small and no copy. A checkpoint to go back to is export_state()
        beside the model's own state_dict().
        """
        for hook in self._hooks_of('state_dict_pre'):
            hook(self)
        if self.full_state_dict:
            if self._begun:
                raise RuntimeError('a part of a step is sent, so no state is whole: call step() or abort() first')
            if self._ranks.leads:
                self.commit()
            said = self.export_state(masters=True)
        else:
            if self._ranks.leads and not self._begun:
                self.commit()
            self._durable_due |= self._begun
            said = {'state': {}, 'param_groups': self._packed_groups(), 'hitrain': {'root': self.root, 'step': self._step}}
        for hook in self._hooks_of('state_dict_post'):
            said = hook(self, said) or said
        return said

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Take hyper-parameters back, from state_dict(); ValueError when the store holds another step or other parameters. From
        export_state(), or the state_dict() of the torch.optim class of this rule, take all state: import_state()."""
        state_dict = dict(state_dict)
        for hook in self._hooks_of('load_state_dict_pre'):
            state_dict = hook(self, state_dict) or state_dict
        self._load(state_dict)
        for hook in self._hooks_of('load_state_dict_post'):
            hook(self)

    def _load(self, state_dict: Dict[str, Any]) -> None:
        if 'hitrain' not in state_dict:
            groups = state_dict.get('param_groups')
            stateless = groups and not any(self.state_words({**self.defaults, **g}) for g in groups)
            if not state_dict.get('state') and not self.full_state_dict and not stateless:
                raise ValueError('this state_dict is not from an optimizer in a hitrain store, and has no state to import')
            self.import_state(state_dict)
            return
        self._closed()
        said, holds = state_dict['hitrain']['step'], self._root.number('step')
        if said != holds:
            raise ValueError(f'the state_dict is of step {said}, but {self.root} holds step {holds}, and a store keeps its last step only. '
                             'To go back, load the model\'s own state_dict() and what export_state() gave at that step')
        groups = state_dict['param_groups']
        if [list(g['names']) for g in groups] != [g['names'] for g in self.param_groups]:
            raise ValueError(f'the state_dict groups other parameters than this optimizer of {self.root} does')
        for new in groups:
            _check_hyper(new)
        for own, new in zip(self.param_groups, groups):
            own.update({k: copy.deepcopy(v) for k, v in new.items() if k not in ('params', 'names')})
        self._step = holds

    def _hooks_of(self, what: str) -> List[Callable[..., Any]]:
        """Those that register_state_dict_pre_hook and the like of PyTorch 2 have registered."""
        return list(getattr(self, f'_optimizer_{what}_hooks', {}).values())

    def _packed_groups(self) -> List[Dict[str, Any]]:
        """Groups as in state_dict() of torch.optim: with numbers in place of parameters."""
        packed, first = [], 0
        for g in self.param_groups:
            last = first + len(g['params'])
            packed.append({**{k: v for k, v in g.items() if k != 'params'}, 'params': list(range(first, last))})
            first = last
        return packed

    def __reduce_ex__(self, protocol: Any) -> Any:
        """State of a schedule may have the optimizer in it, as that of OneCycleLR of PyTorch 1.13."""
        return _LeftOut, (type(self).__name__, self.root)

    def __copy__(self) -> Any:
        raise TypeError(f'{type(self).__name__} of {self.root} cannot be copied: its state is in the store. Save '
                        'state_dict() or export_state(), and make another optimizer on a root of its own')

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()

    # -- additions of the store --

    @property
    def committed_step(self) -> int:
        """The last step that a crash cannot take away, as the store counts."""
        return self._root.number('durable_step')

    @property
    def grad_norm(self) -> float:
        """The norm of the last step, before clipping; known with max_grad_norm or skip_nonfinite."""
        self._closed()
        with self._root.explained('grad_norm'):
            return float(os.getxattr(self.root, XATTR + 'grad_norm'))

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, because one of its gradients was not finite."""
        return self.skip_nonfinite and not math.isfinite(self.grad_norm)

    def commit(self) -> None:
        """Make everything below the root durable, as one; parameters that were changed outside step(), too. RuntimeError while gradients
        of a step are sent: step() or abort() ends that one. With a shard: rank 0 alone."""
        if not self._ranks.leads:
            raise RuntimeError(f'rank 0 steers the model, nobody else: call this there alone, not on rank {self._ranks.rank} '
                               f'of {self._ranks.world}')
        with Alone(self._users, 'commit()'):
            self._check_usable()
            if self._begun:
                raise RuntimeError('a part of a step is sent: step() ends it and makes it durable, abort() takes it back')
            self._closed()
            self._settle()
            self._push_changed()
            self._root.command('commit')
            for f in self._parameter_files():
                f.published()
            self._step = self._root.number('step')

    def snapshot(self, name: str = '') -> None:
        """commit(), and keep the step: `.hitrain/snap` below the root has its files, and `hitrainctl rollback` goes back to it. name:
        instead of its number. OSError: the store did not keep it, but the commit is done. With a shard: rank 0 alone."""
        if name and (not re.fullmatch(r'[A-Za-z0-9._:-]{1,64}', name) or re.fullmatch(r'[0-9]+|[.]{1,2}', name)):
            raise ValueError(f'{name!r} is no name of a kept step: 1 to 64 letters, digits and . _ : - , and no number')
        self.commit()
        self._root.command(f'snapshot {name}'.rstrip())

    def abort(self) -> None:
        """Undo all changes that are not durable: the store and the tensors go back to `committed_step`. With a shard:
        on all ranks, which get the same tensors. Ranks that are in another call leave it with RankFailed, and go back
        with those that called this."""
        with Alone(self._users, 'abort()'):
            self._go_back(wholly=True)

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

    def receive_parameter(self, parameter: torch.Tensor) -> None:
        """Read one parameter, with those that share its file; waits for its update. step() calls it as it calls send_gradient()."""
        if self._files[parameter].has_elements:
            self._receive_whole(self._files[parameter].whole)

    def _receive_whole(self, f: ParameterFile) -> None:
        with self._root.explained(f'parameter {f.name}'):
            if self._closing:
                self._root.wait_for(f.name)  # also orders reads of passthrough files, and reports a failed update
            f.read()

    def read_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """A copy of one piece of the optimizer's state, as f32: exp_avg or what else the rule keeps,
        step, or master (files of two bytes per element)."""
        f = self._files[parameter]
        with self._root.explained(f'state {name} of {f.name}'):
            return f.read_state(name)

    def write_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Replace one piece of the optimizer's state, between steps; part of the next commit. Parameters that share a
        file share `step`."""
        f = self._files[parameter]
        f.check_state(name, value)
        with self._root.explained(f'state {name} of {f.name}'):
            f.write_state(name, value)

    def export_state(self, masters: bool = False) -> Dict[str, Any]:
        """A state_dict for the torch.optim class of this rule, and for load_state_dict() here: copies of all state, as
        f32.

        Load it into an optimizer that was made with the same parameters in the same groups, and the run continues
        there. masters=True: with names, and the masters of files of two bytes, too, which only load_state_dict() here takes."""
        state: Dict[int, Dict[str, torch.Tensor]] = {}
        groups = self._packed_groups()
        for group, packed in zip(self.param_groups, groups):
            if not masters:
                del packed['names']
            for i, p in zip(packed['params'], group['params']):
                words = self.state_words(group) + (('master',) if masters and self._files[p].dtype != torch.float32 else ())
                if words and self._has_state(p):
                    state[i] = {name: self.read_state(p, name) for name in words}
        return {'state': state, 'param_groups': copy.deepcopy(groups)}

    def import_state(self, state_dict: Dict[str, Any]) -> None:
        """Take state and hyper-parameters from export_state(), or from a state_dict of the torch.optim class of this rule, with the same
        parameters in the same groups, and commit. State of parameters that have none there is forgotten. The tensors keep their
        values: load those of the model before or after, and before if there are masters. With a shard: on all ranks.

        A state_dict of other groups, names or shapes is a ValueError, and changes nothing."""
        taken: List[Dict[str, Any]] = []

        def check() -> None:
            self._check_usable()
            if self._begun:
                raise RuntimeError('a part of a step is sent: call step() or abort() first')
            taken.extend(self._checked_groups(state_dict['param_groups'], state_dict['state']))

        def take() -> None:
            for own, hyper in zip(self.param_groups, taken):
                own.update(hyper)
            if self._ranks.leads:
                self._closed()
                self._push_changed()  # masters belong to these values
                self._send_config()  # the rule's settings decide which state there is
            else:
                self._push_parts()

        def write() -> None:
            for own, new in zip(self.param_groups, state_dict['param_groups']):
                for p, i in zip(own['params'], new['params']):
                    if self._ranks.leads or self._files[p].part:
                        self._take_state(own, p, state_dict['state'].get(i, {}))
        leads = self._ranks.leads
        self._ranks.together('import_state()', check)
        self._ranks.together('taking state', take)
        self._ranks.together('rank 0 makes state', lambda: write() if leads else None)
        self._ranks.together('parts of state', lambda: None if leads else write())
        self._ranks.together('committing state', lambda: self.commit() if leads else None)

    def state_words(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        """Names of the state that the rule keeps for a parameter of this group, as torch.optim has them."""
        raise NotImplementedError

    def close(self, why: str = 'has closed its optimizer') -> None:
        """Release the files (an open one keeps the store from being unmounted). Committed steps stay. A step whose
        gradients are sent is taken back; finished steps stay, as far as taking back a step keeps them (see the
        text of the package)."""
        if self._ahead:
            self._ahead.close()
            self._ahead = None
        if os.getpid() == self._pid and self._root.is_open and (self._open or self._closing):
            self._hand_back()
        self._gather.end()
        try:
            self._detach_all()
        finally:
            for f in self._parameter_files():
                f.close()
            self._holding = True  # remaining hooks do nothing
            if os.getpid() == self._pid:
                self._ranks.close(why)
                self._root.close()
            else:
                self._root.forsake()  # in a forked child both are its parent's

    def _detach_all(self) -> None:
        """Part of close(): ends mappings that tensors of the program are."""

    def _forsake(self) -> None:
        """In a forked child: closes what is its parent's, here alone."""
        self._root.forsake()
        self._ranks.forsake()
        self._gather.end()
        for f in self._parameter_files():
            f.forsake()

    def __enter__(self) -> 'Optimizer':
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, '_ranks') and self._self == id(self):
            self._leaves_mappings = True  # nothing is read here, and the program may go on with the tensors
            self.close()

    # -- the model root --

    def _construct(self, groups: List[Dict[str, Any]]) -> None:
        """Rank 0 makes or opens the model, then the others open it, then it is committed."""
        def build() -> Dict[str, Any]:
            self._open_model()
            torch.optim.Optimizer.__init__(self, groups, self.defaults)
            self.state = _StateInStore(dict)
            self._attach_groups(self.param_groups)
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

    def _model_digest(self) -> str:
        text = '\n'.join(f'{f.name} {f.shape} {f.dtype} {f.grad_dtype} {f.part is not None}' for f in self._parameter_files())
        return hashlib.sha256(os.fsencode(text)).hexdigest()

    def _said_of_parts(self) -> Dict[str, Any]:
        """What this rank holds of parameters in parts, and, on rank 0, which of their files it has made."""
        parts = [f for f in self._parameter_files() if f.part]
        return {'parts': {f.name: [f.offset, f.local.numel()] for f in parts}, 'fresh': [f.name for f in parts if f.made]}

    def _share_parts(self, said: List[Dict[str, Any]]) -> None:
        """Each element of a parameter in parts gets the rank that writes its gradient."""
        for f in self._parameter_files():
            if f.part:
                held = [tuple(s['parts'].get(f.name, (0, 0))) for s in said]
                of_ranks = shares(f.name, math.prod(f.shape), held)
                f.share = of_ranks[self._ranks.rank]
                f.writers = [rank for rank, s in enumerate(of_ranks) if s.stop > s.start]

    def _config_words(self, group: Dict[str, Any]) -> Dict[str, str]:
        return _settings.words_of_group(group, self.defaults)

    def _config_text(self, group: Dict[str, Any], of_root: bool = False) -> str:
        text = _settings.text_of(self.rule, self._config_words(group))
        return f'{text} {_settings.words_of_root(self)}' if of_root else text

    def _all_config(self) -> List[str]:
        return [self._config_text(self.param_groups[0], of_root=True)] + [self._config_text(g) for g in self.param_groups[1:]]

    def _send_config(self) -> None:
        """Send changes of param_groups to the store: the root follows the first group, the files of groups that differ
        from it carry their own. A step uses the values that are set when its first gradient is closed."""
        known = self._root.known
        words = [self._config_words(group) for group in self.param_groups]
        of_groups = ['' if own == words[0] else _settings.text_of(self.rule, own) for own in words]
        self._latched = self._all_config()
        with self._root.explained('hyper-parameters'):
            known.put(self.root, 'optimizer', self._latched[0])
            for group, text in zip(self.param_groups, of_groups):
                for p in group['params']:
                    if not isinstance(self._files[p], Member) and self._files[p].has_elements:
                        known.put(self._files[p].path, 'optimizer', text)
            for f in self._parameter_files():
                if isinstance(f, PackFile):
                    known.put(f.path, 'optimizer', f.config_of(self.rule, words))
                if (known.read(f.path, 'grad_dtype') or FILE_DTYPES[f.dtype]) != FILE_DTYPES[f.grad_dtype]:  # not set: that of the file
                    known.put(f.path, 'grad_dtype', FILE_DTYPES[f.grad_dtype])

    # -- one step --

    def _begin_at(self, step: int) -> None:
        """So many steps are finished, and no gradient of the next one is sent."""
        self._step = step
        self._closing = False
        self._begun, self._open = False, 0  # the store's number of the open step, once it has a gradient
        self._latched = None  # hyper-parameters of the step that has begun
        self._sending_all, self._small = False, None
        for f in self._parameter_files():
            f.begin_step()

    def _offer(self, ends: bool) -> Dict[str, Any]:
        """This rank's part of the step: for each parameter, has it a gradient, and was it changed outside step()?"""
        self._check_usable()
        self._check_apart()
        if self._overlap and self.accumulate > 1:  # which may have been changed
            for f in self._parameter_files():
                self._check_pack(f)
        self._settle()
        files = list(self._parameter_files())
        there = [f.has_gradient() for f in files]
        for f, has in zip(files, there):
            if has:
                f.check_gradient()  # refuses one that cannot be sent before any other is
        facts = {'gradients': ''.join('01'[has] for has in there), 'changed': ''}
        if ends or not self._begun:
            changed = dict.fromkeys(f for f in files if f.changed())
            if self._begun and not self._check_sent([f for f in files if f.sent], changed):
                changed = dict.fromkeys(f for f in files if f.changed())
            facts['changed'] = ''.join('01'[f in changed or f in self._pushed_alone] for f in files)
        return facts

    def _check_apart(self) -> None:
        """Tensors may have got other memory, as by `p.data = q.data`."""
        places = [(p.data_ptr(), f.name) for p, f in self._files.items() if type(p) in PLAIN and not f.keeps_memory]
        if places != self._places:
            check_apart((f.name, p) for p, f in self._files.items() if not f.keeps_memory)
            self._places = places

    def _check_sent(self, sent: List[ParameterFile], changed: Dict[ParameterFile, None]) -> bool:
        """Gradients sent before step() must equal those that step() would send now. False: they do not, and are taken
        back to be sent again."""
        if self._ranks.leads and self._latched != self._all_config():
            why = 'hyper-parameters were changed'
        else:
            why = next((f'the gradient of {f.name} was changed or cleared' for f in sent if f.gradient_changed()), '') or \
                next((f'the parameter {f.name} was changed' for f in changed if f.sent or f.push_writes_state()), '')
        if not why:
            return True
        why += " after the step's first gradient was sent"
        if self._shard or self.accumulate > 1:
            raise RuntimeError(f'{why}; with accumulate or a shard that must be done before')
        if self._step != self._root.number('durable_step') or not all(f.has_gradient() for f in sent):
            raise RuntimeError(f'{why}; do that before backward(), or run backward() in hold_gradients()')
        self._go_back(wholly=False)
        if self._early:
            warnings.warn(f'{why}: the step is sent again, and from now on backward() sends no gradients. Do that before backward() '
                          'to keep overlap', RuntimeWarning, stacklevel=2)
        self._early = False
        return False

    def _owned(self, said: List[Dict[str, Any]]) -> Iterator[Tuple[ParameterFile, List[int]]]:
        """Each parameter and the ranks that have a gradient for it."""
        bits = [s['gradients'] for s in said]
        if len(bits) == 1:
            yield from ((f, [0] if bit == '1' else []) for f, bit in zip(self._parameter_files(), bits[0]))
            return
        for i, f in enumerate(self._parameter_files()):
            yield f, [rank for rank, b in enumerate(bits) if b[i] == '1']

    def _send(self, said: List[Dict[str, Any]]) -> None:
        """Changed parameters and hyper-parameters come before any gradient, and all parts of a gradient before the next
        one, or the end."""
        if not any(owners for _, owners in self._owned(said)):
            return
        for f, owners in self._owned(said):
            missing = [rank for rank in f.writers if rank not in owners] if f.part and owners else []
            if missing:
                raise RuntimeError(f'{f.name} has a gradient on rank {owners[0]} and none on rank {missing[0]}, which holds a part of it: '
                                   'give one on all ranks or on none')
        self._begin_together(said)
        owned = [(f, owners) for f, owners in self._owned(said) if self._ranks.rank in owners]

        def write() -> None:
            self._small, self._small_bytes = [], 0
            rest = [(f, owners) for f, owners in owned if not f.is_sent()]
            for f, _ in rest:
                self._check_room(f)
            together = self._send_runs([f for f, _ in rest])
            for f, owners in rest:
                if f in together:
                    continue
                if f.part:
                    self._send_one(f, f.share)
                elif self._shard:
                    self._send_one(f, part_of(f.tensor.numel(), owners.index(self._ranks.rank), len(owners)))
                else:
                    self._send_whole(f) if isinstance(f, PackFile) else self.send_gradient(f.tensor)
            self._apply_small()
        self._sending_all = True
        try:
            self._ranks.together('gradients', write)
        finally:
            self._sending_all, self._small = False, None
        for f, owners in self._owned(said):
            if owners and self._ranks.rank not in owners:
                f.sent += 1
        if self._ranks.leads and not self._open:
            self._open = self._root.number('step_open')

    def _begin_together(self, said: List[Dict[str, Any]]) -> None:
        changed = [[f for f, bit in zip(self._parameter_files(), s['changed']) if bit == '1'] for s in said]
        self._ranks.together('beginning the step', lambda: self._begin(changed[0]) if self._ranks.leads else None)
        if any(changed):
            self._ranks.together('taking changed parameters', lambda: self._take_changed(changed))
            self._pushed_alone = {}
        self._begun = True

    def _begin(self, changed: List[ParameterFile]) -> None:
        """Before the first gradient of a step: parameters that were changed, then hyper-parameters. Later: parameters alone."""
        if not self._begun:
            self._closed()
            holds = self._root.number('step')
            if holds != self._step:
                raise RuntimeError(f'{self.root} went from step {self._step} to {holds}: somebody else steers it, too; abort() takes over '
                                   'what it holds')
            self._begun = True
            self._send_config()
        for f in changed:
            if f not in self._pushed_alone:
                self._push(f)

    def _push_changed(self) -> None:
        for f in self._parameter_files():
            if f.changed():
                self._push(f)
                if self._shard and not f.part:
                    self._pushed_alone[f] = None

    def _push_parts(self) -> None:
        for f in self._parameter_files():
            if f.part and f.changed():
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

        def take(run: _gather.Run) -> None:
            self._root.apply(run.names)
            for f in run.files:
                f.gradient_sent(early=False)
            if not self._open:
                self._open = self._root.number('step_open')
        _gather.in_turn(runs, write, take, lambda run: self._drop(run.names))
        return {f for run in runs for f in run.files}

    def _runs_of(self, files: List[ParameterFile], method: str) -> List[_gather.Run]:
        """None with a shard: other ranks have parts of the gradients. None if a user's own class watches this method."""
        watched = getattr(getattr(self, method), '__func__', None) is not getattr(Optimizer, method)
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

    def _end_step(self) -> None:
        if self._ranks.leads:
            durable = self.durable_every == 1 or self._durable_due
            if not self._open:
                raise RuntimeError(f'{self.root} has no open step: somebody took it back')
            if self._async and not self._durable_due:
                self._root.command(f'step async if={self._open}')
                self._closing = True
            else:
                self._root.command(f'{"commit" if durable else "step"} if={self._open}')

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

    def _receive(self, files: List[ParameterFile]) -> None:
        if self._ahead:
            self._receive_all([f for f in files if isinstance(f, PackFile)])
            self._ahead.start(f.tensor for f in files if not isinstance(f, PackFile))
        else:
            self._receive_all(files)
        if self._overlap:
            self._hook_all()

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

    def _gradient_arises(self, f: ParameterFile) -> None:
        """PyTorch runs backward of each device in a thread of its own: one waits for the other."""
        with self._one_gradient:
            self._gradient_ready(f)

    def _gradient_ready(self, f: ParameterFile) -> None:
        if self._holding or not self._early or f.tensor.grad is None:
            return
        with self._whole_step():
            self._refuse_reducers()
            self._check_room(f)
            self.send_gradient(f.tensor)
        if self.accumulate > 1:
            f.clear_gradient()  # the next one is another

    def _refuse_reducers(self) -> None:
        if not self._seen_reducers:
            _refuse_reducers(self._files, self._under)
            self._seen_reducers = True

    def _check_room(self, f: ParameterFile) -> None:
        if f.sent >= self.accumulate:
            raise RuntimeError(f'a second gradient of {f.name} before step(): wrap all backwards but the last in '
                               'hold_gradients()' if self.accumulate == 1 else
                               f'{f.name} has had the {self.accumulate} gradients of this step: call step()')

    def _hook_all(self) -> None:
        """Also parameters that were frozen when the optimizer was made."""
        for p, f in self._files.items():
            if f.hook is None and p.requires_grad and not isinstance(f, Member) and f.has_elements:
                f.hook = _when_accumulated(p, weakref.WeakMethod(self._gradient_arises), f)

    # -- going back --

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

    def _go_back(self, wholly: bool) -> None:
        """Take back the sent gradients of the open step, on all ranks; wholly: everything that is not durable. Tensors
        are read again where the store has other values than before that step."""
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
            return self._restore(**{k: any(w[k] for w in wanted) for k in wants}) if self._ranks.leads else {}
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

    def _restore(self, wholly: bool, unread: bool, begun: bool) -> Dict[str, Any]:
        """On rank 0. Without an open step there is nothing to take back."""
        if wholly or (begun and (self._ended_and_lost() or (self._root.number('step_open') and not self._drop_all()))):
            self._root.command('abort')
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

    def _check_usable(self) -> None:
        if self._torn:
            raise RuntimeError(f'{self._torn}: call abort() first')

    # -- parameters --

    def _has_state(self, p: torch.Tensor) -> bool:
        with self._root.explained(f'state of {self._files[p].name}'):
            return self._files[p].has_elements and os.stat(os.path.join(self.root, HIDDEN, 'state', self._files[p].whole.name, 'step')).st_size > 0

    def _checked_groups(self, groups: List[Dict[str, Any]], state: Dict[int, Any]) -> List[Dict[str, Any]]:
        """What is to be taken from each group of a state_dict, copied. Groups and state are checked."""
        if [len(g['params']) for g in groups] != [len(g['params']) for g in self.param_groups] or \
                any(list(new.get('names', own['names'])) != own['names'] for own, new in zip(self.param_groups, groups)):
            raise ValueError('the state_dict groups other parameters than this optimizer does')
        others = ('params', 'names', 'param_names', *FREE_FLAGS, *REFUSED_FLAGS)
        taken = [{k: copy.deepcopy(v) for k, v in new.items() if k not in others} for new in groups]
        steps: Dict[ParameterFile, Tuple[Optional[float], str]] = {}  # of each pack: those of its first member
        for own, new, hyper in zip(self.param_groups, groups, taken):
            both = {**own, **hyper}
            flags = {k: new[k] for k in REFUSED_FLAGS if k in new}
            if self.rule == 'adamw':
                flags.pop('decoupled_weight_decay', None)  # PyTorch 2.7 writes it for AdamW
            _check_hyper({**both, **flags})
            for p, i in zip(own['params'], new['params']):
                kept, f = self._kept(both, p, state.get(i, {})), self._files[p]
                self._check_state(p, kept, self.state_words(both))
                step = float(kept.get('step', 1.0)) if kept else None
                first, name = steps.setdefault(f.whole, (step, f.name))
                if first != step:
                    raise ValueError(f'{f.name} and {name} share {f.whole.name}, so they have state of the same step or none: the state_dict has '
                                     f'{"none" if step is None else step} and {"none" if first is None else first}')
        return taken

    def _kept(self, group: Dict[str, Any], p: torch.Tensor, state: Dict[str, Any]) -> Dict[str, torch.Tensor]:
        """What the store keeps of a parameter's state in a state_dict."""
        words = self.state_words(group) + (('master',) if self._files[p].dtype != torch.float32 else ())
        found = {name: state[name] for name in words if state.get(name) is not None}
        return {name: value if isinstance(value, torch.Tensor) else torch.as_tensor(value) for name, value in found.items()}

    def _check_state(self, p: torch.Tensor, kept: Dict[str, torch.Tensor], words: Tuple[str, ...]) -> None:
        f = self._files[p]
        for name, value in kept.items():
            f.check_state(name, value)
        missing = [name for name in words if name not in kept]
        if missing and kept:
            raise ValueError(f'the state_dict has {", ".join(kept)} of {f.name} but not {", ".join(missing)}: it is of another rule')

    def _take_state(self, group: Dict[str, Any], p: torch.Tensor, state: Dict[str, Any]) -> None:
        """On rank 0; other ranks add their part."""
        kept = self._kept(group, p, state)
        if not self._files[p].has_elements:
            return
        if not self._ranks.leads:
            for name in self.state_words(group):
                if name in kept and name != 'step':
                    self.write_state(p, name, kept[name])
            if 'master' in kept:
                self._take_master(p, kept['master'])
            return
        if not kept and self._has_state(p):
            self._root.command(f'reset {self._files[p].whole.name}')
        for name in self.state_words(group):
            if name in kept:
                self.write_state(p, name, kept[name])
        if kept and 'step' not in self.state_words(group):
            self.write_state(p, 'step', torch.tensor(1.0))  # not the first one, which begins the buffer anew
        if 'master' in kept:
            self._take_master(p, kept['master'])

    def _take_master(self, p: torch.Tensor, master: torch.Tensor) -> None:
        f = self._files[p]
        own = f.own_value('master', master)
        if torch.equal(own.to(f.local.device, f.dtype), f.local.detach().to(f.dtype)):
            self.write_state(p, 'master', master)
        else:
            warnings.warn(f'the master of {f.name} is not that of its present values, which begin a new one: load the model before '
                          'the optimizer', RuntimeWarning, stacklevel=2)

    def _parameter_files(self) -> Iterable[ParameterFile]:
        return self._held

    def _named(self, params: Any) -> Tuple[List[torch.Tensor], List[str]]:
        tensors: List[torch.Tensor] = []
        names: List[str] = []
        seen: Set[int] = set()
        check_ordered("a group's 'params'", params)
        for entry in [params] if isinstance(params, torch.Tensor) else params:
            name, tensor = entry if isinstance(entry, tuple) else (None, entry)
            if name is None and self._given_names is not None:
                name = next(self._given_names, None)
                if name is None:
                    raise ValueError('names has fewer names than there are parameters')
            if tensor in self._given or id(tensor) in seen:
                raise ValueError(f'the parameter {name or len(tensors)} is given twice')
            seen.add(id(tensor))
            names.append(name if name is not None else f'parameter{len(self._given) + len(names)}')
            tensors.append(tensor)
        if self._given_names is None:
            names = self._unwrapped(names)
        fresh: Dict[str, None] = {}
        for name in names:
            check_name(name)
            if name in self._taken_names and any(f.name == name for f in self._held if isinstance(f, PackFile)):
                raise ValueError(f'a parameter is called {name}, as a file of pack= is by now: name the parameter otherwise, or give its group first')
            if name in self._taken_names or name in fresh:
                raise ValueError(f'two parameters are called {name}')
            fresh[name] = None
        return tensors, names

    def _unwrapped(self, names: List[str]) -> List[str]:
        """As the model calls its parameters, whatever it is wrapped in now. Files of a model that is there keep their names."""
        plain = _without_wrappers(names)
        if not self._resume:
            return plain
        held = self._names_in_store() if plain != names else set()
        return [n if n in held else p for n, p in zip(names, plain)]

    def _names_in_store(self) -> Set[str]:
        """Of files, and of the parameters in packs."""
        with self._root.explained('model root'):
            return {*os.listdir(self.root), *(place.name for places in _packs.packs_in(self.root).values() for place in places)}

    def _attach_groups(self, groups: List[Dict[str, Any]]) -> None:
        """The last ones of param_groups."""
        check_apart((name, p) for group in self.param_groups for name, p in zip(group['names'], group['params']))
        own = {name: p for group in groups for name, p in zip(group['names'], group['params'])}
        first = len(self.param_groups) - len(groups)
        group_of = {name: first + i for i, group in enumerate(groups) for name in group['names']}
        for pack, places in self._packs_of(own, group_of).items():
            self._attach_pack(pack, places, own, group_of)
        for name, p in own.items():
            if p not in self._files:
                self._attach(name, p)
        if self._overlap:
            self._hook_all()

    def _packs_of(self, own: Dict[str, torch.Tensor], group_of: Dict[str, int]) -> Dict[str, List[Place]]:
        """Which parameters share files: as the store has it, and new ones."""
        names, tensors = list(own), list(own.values())
        there = self._resume or self._built
        with self._root.explained('model root'):
            packs = _packs.stored(self.root, names, tensors) if there else {}
            files = set(os.listdir(self.root)) if self._pack else set()
        if self._pack and (self._built or not self._resume):
            held = {place.name for places in packs.values() for place in places}
            state = [self.state_words(group) for group in self.param_groups]
            may = [(n, t, group_of[n], state[group_of[n]]) for n, t in own.items()
                   if n not in held and n not in files and n not in self._given_parts and not is_dtensor(t)]
            for n, t, _, _ in may:
                self._check_kinds(n, t)
            packs.update(_packs.planned(may, lambda t: t.numel() * bytes_of(self._param_dtype or t.dtype), self._pack,
                                        {*self._taken_names, *names, *files}))
        order = {name: i for i, name in enumerate(names)}
        return dict(sorted(packs.items(), key=lambda item: order[item[1][0].name]))

    def _attach_pack(self, pack: str, places: List[Place], own: Dict[str, torch.Tensor], group_of: Dict[str, int]) -> None:
        tensors = [own[place.name] for place in places]
        for place, t in zip(places, tensors):
            self._check_kinds(place.name, t)
            self._taken_names[place.name] = None
        dtype = self._param_dtype or tensors[0].dtype
        if self._feedback or any(is_dtensor(t) for t in tensors) or any(place.name in self._given_parts for place in places):
            raise ValueError(f'{self.root}/{pack} holds {len(places)} parameters, and {"topk" if self._feedback else "a parameter in parts"} '
                             'needs a file for each')
        runs = _packs.runs_of(places, group_of)
        state = {self.state_words(self.param_groups[run.group]): place for run in runs for place in places if place.offset == run.first}
        if len(state) > 1:
            one, other = (place.name for place in list(state.values())[:2])
            raise ValueError(f'{self.root}/{pack} holds {one} and {other}, and their parameter groups keep different state: give both the same '
                             'kind, as momentum=0 or not')
        f = PackFile(self.root, pack, places, tensors, runs, dtype, self._grad_dtype or dtype, direct=not self._root.passes_through)
        self._check_pack(f)
        self._files.update(f.members())
        self._taken_names[pack] = self._held[f] = None
        with self._root.explained(f'parameter {pack}'):
            self._open_file(f, os.path.exists(f.path))

    def _open_file(self, f: ParameterFile, exists: bool, fill: bool = False) -> None:
        self._root.known.forget(f.path)
        if exists:
            f.open_existing(fill)
        else:
            f.create()
            self._root.known.note(f.path, 'optimizer', '')
            self._root.known.note(f.path, 'grad_dtype', FILE_DTYPES[f.grad_dtype] if f.grad_dtype != f.dtype else '')

    def _check_pack(self, f: ParameterFile) -> None:
        if isinstance(f, PackFile) and self._overlap and self.accumulate > 1:
            raise ValueError(f'{f.path} is sent by step(), so overlap=True does not go with accumulate: pass overlap=False and call '
                             'send_gradients()')

    def _detach_group(self, group: Dict[str, Any]) -> None:
        gone = []
        for name, p in zip(group['names'], group['params']):
            self._taken_names.pop(name, None)
            self._given.pop(p, None)
            f = self._files.pop(p, None)
            gone += [f.whole] if f else []
        self._gather.end()
        for f in dict.fromkeys(gone):
            self._held.pop(f, None)
            self._taken_names.pop(f.name, None)
            try:
                f.unmake() if self._ranks.leads else f.close()
            except OSError:
                pass  # the caller must know the first error

    def _attach(self, name: str, p: torch.Tensor) -> None:
        if is_dtensor(p) and not self._shard:
            raise TypeError(f'{name} is a DTensor, of which each process holds a part: pass shard=hitrain.Shard(rank, world)')
        part = part_of_dtensor(name, p) if is_dtensor(p) else self._given_parts.get(name)
        self._check_kinds(name, p)
        dtype = self._param_dtype or p.dtype
        if math.prod(part.shape if part else p.shape) == 0:
            self._attach_empty(ParameterFile(self.root, name, p, dtype, self._grad_dtype or dtype, part))
            return
        f = self._file_of(name, p, dtype, self._grad_dtype or dtype, part)
        exists = os.path.exists(f.path) if self._built else self._resume
        self._files[p] = f
        self._taken_names[name] = self._held[f] = None
        if exists and not os.path.exists(f.path):
            raise FileNotFoundError(errno.ENOENT, f'no such file (parameter {name}). {self._alike(name)}', self.root)
        with self._root.explained(f'parameter {name}'):
            self._open_file(f, exists, fill=part is not None and name in self._fresh)

    def _attach_empty(self, f: ParameterFile) -> None:
        self._files[f.tensor] = f
        self._taken_names[f.name] = None
        if self._ranks.leads:
            with self._root.explained(f'parameter {f.name}'):
                f.make_empty()

    def _check_kinds(self, name: str, p: torch.Tensor) -> None:
        check_plain(f'the parameter {name}', local_of(p))
        dtype = self._param_dtype or p.dtype
        for d in (dtype, self._grad_dtype or dtype):
            if d not in FILE_DTYPES:
                raise TypeError(f'{name}: files can be {" or ".join(FILE_DTYPES.values())}, not {d}')

    def _file_of(self, name: str, p: torch.Tensor, dtype: torch.dtype, grad_dtype: torch.dtype, part: Any) -> ParameterFile:
        if self._root.passes_through and not part and not self._shard and can_have_windows(name, p):
            return WindowFile(self.root, name, p, dtype, grad_dtype)
        return ParameterFile(self.root, name, p, dtype, grad_dtype, part, direct=not self._root.passes_through)

    def _alike(self, name: str) -> str:
        """The store's name of a parameter whose name ends alike."""
        held = sorted(n for n in self._names_in_store() if n.endswith('.' + name) or name.endswith('.' + n))
        if held:
            return f'The model in the store has {held[0]}: pass names= as they are there'
        return 'The model in the store was made without it'


# Optimizers of this process. A forked child must not hold the descriptors that steer the model: it would do so after
# its parent's death.
_LIVE: 'weakref.WeakSet[Optimizer]' = weakref.WeakSet()


def _forsake_all() -> None:
    for optimizer in list(_LIVE):
        optimizer._forsake()


os.register_at_fork(after_in_child=_forsake_all)


def _close_all() -> None:
    """When the interpreter ends. A forked child leaves the optimizers of its parent alone."""
    with contextlib.ExitStack() as all_of_them:
        for optimizer in list(_LIVE):
            if optimizer._pid == os.getpid():
                optimizer._ends = True
                all_of_them.callback(optimizer.close, 'has ended')


class _NodeHook:
    """A hook on the node of the graph that adds to .grad; the node lives as long as it has a reference."""

    def __init__(self, node: Any, call: Callable[[], None]) -> None:
        self._node, self._handle = node, node.register_hook(lambda *unused: call())

    def remove(self) -> None:
        self._handle.remove()


def _when_accumulated(p: torch.Tensor, method: 'weakref.WeakMethod[Callable[[ParameterFile], None]]', f: ParameterFile) -> Any:
    """Call method(f) whenever backward has added to p.grad all that it will; the result's remove() ends that."""
    def call(*unused: Any) -> None:
        bound = method()
        if bound is not None:
            bound(f)

    if hasattr(p, 'register_post_accumulate_grad_hook'):  # torch >= 2.1
        return p.register_post_accumulate_grad_hook(call)
    with torch.enable_grad():
        node: Any = p.expand_as(p).grad_fn
        return _NodeHook(node.next_functions[0][0], call)


def _refuse_reducers(parameters: Dict[torch.Tensor, Any], text: str) -> None:
    """Wrappers that reduce gradients between processes do it after a parameter's hook was called, so the hook would
    send gradients that are not reduced yet. Nothing links a parameter to its wrapper: look at all objects."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
        return
    for o in gc.get_objects():
        kind = type(o).__name__
        if kind in ('DistributedDataParallel', 'FullyShardedDataParallel') and isinstance(o, torch.nn.Module) and \
                any(p in parameters for p in o.parameters()):
            raise RuntimeError(text.format(kind))


_WRAPPERS = {'_checkpoint_wrapped_module', '_fsdp_wrapped_module', '_orig_mod'}


def _without_wrappers(names: List[str]) -> List[str]:
    """DistributedDataParallel and DataParallel call the wrapped model `module`, as a model may call a part of its own:
    so only if all do."""
    plain = ['.'.join(part for part in name.split('.') if part not in _WRAPPERS) for name in names]
    if all(name.startswith('module.') for name in plain):
        plain = [name[len('module.'):] for name in plain]
    return plain


def _as_groups(params: Iterable[Any]) -> List[Dict[str, Any]]:
    if isinstance(params, torch.Tensor):
        raise TypeError('params must be a list of parameters, not one tensor')
    check_ordered('params', params)
    listed = list(params)
    if not listed:
        raise ValueError('there are no parameters')
    groups = listed if isinstance(listed[0], dict) else [{'params': listed}]
    for group in groups:
        check_ordered("a group's 'params'", group['params'])
    return groups


def _refuse_capture() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError('a CUDA graph cannot hold a step of the store: capture forward and backward, and call step() after them')


class _LeftOut:
    """What a pickle has in place of an optimizer."""

    def __init__(self, kind: str, root: str) -> None:
        self._said = kind, root

    def __getattr__(self, name: str) -> Any:
        if name.startswith('_'):
            raise AttributeError(name)
        kind, root = self._said
        raise TypeError(f'a pickle does not hold the {kind} of {root}, whose state is in the store: make it with resume=True')

    def __reduce__(self) -> Any:
        return _LeftOut, self._said


class _StateInStore(collections.defaultdict[Any, Any]):
    """Optimizer.state: empty, and true. Code that makes a first step when it finds no state must find some."""

    def __bool__(self) -> bool:
        return True


def _check_hyper(group: Dict[str, Any]) -> None:
    for key, value in group.items():
        for number in value if key == 'betas' else [value]:
            if isinstance(number, torch.Tensor) and key != 'params' and number.numel() != 1:
                raise ValueError(f'{key} must be one number, not a tensor of {number.numel()}')
    if group.get('nesterov') and (group['momentum'] <= 0 or group['dampening'] != 0):
        raise ValueError('nesterov needs a momentum above 0 and no dampening')
    for key in ('lr', 'eps', 'weight_decay', 'momentum', 'lr_decay'):
        if not 0.0 <= group.get(key, 0.0) < float('inf'):
            raise ValueError(f'{key} must be a number >= 0, not {group[key]}')
    for beta in group.get('betas', ()):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f'betas must be numbers >= 0 and < 1, not {group["betas"]}')
    for flag in REFUSED_FLAGS:
        if group.get(flag):
            raise ValueError(f'{flag}={group[flag]} is not implemented in the store')
