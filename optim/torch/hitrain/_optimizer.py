# SPDX-License-Identifier: Apache-2.0
"""The optimizer of the files below a directory; hitrain.optim has its rules, and _base.py says where its parts are.

Messages name the parameter and the store's reason. hitrain/__init__.py describes what a trainer may rely on.
"""
import atexit
import contextlib
import math
import os
import threading
import weakref
from typing import Any, Callable, ContextManager, Dict, Iterable, Mapping, Optional, Sequence, Tuple

import torch

from hitrain import _ahead, _gather, _need, _topk, _trace
from hitrain._alone import Holding
from hitrain._attach import as_groups
from hitrain._base import FREE_FLAGS, REFUSED_FLAGS
from hitrain._job import Job
from hitrain._make import Making
from hitrain._memory import check_ordered
from hitrain._packs import PackFile
from hitrain._parts import Part
from hitrain._root import Root
from hitrain._words import XATTR
from hitrain.distributed import Ranks, Shard


class Optimizer(Making):
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
    redo_keep      with redo: the last so many steps, at most 128, stay readable, for a copy that `hitrainctl restore --follow` keeps
    deltas         the last so many steps, at most 128, leave the elements that they changed: hitrain.deltas() reads them
    delta_max      a step that changes more than this part of all elements leaves none, and readers take the model
    delta_dtype    torch.bfloat16: of f32 files the elements whose rounding to bf16 changed, and that; None: as the files are
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
    state_bits     32, 16 or 8: in how many bits the store keeps an element of a moment, also a key of a group. A change converts
                   the state at the next durable step. 16: bf16; 8: codes, with a scale for 256 elements. Sparse gradients of
                   embeddings and heads are better at 32
    state_bits_min parameters of fewer elements keep 32
    trust_versions  True: step() looks for changes outside step() only in tensors whose version or place moved, and does not read all
                   parameters for that; as with many experts. Then a change through `.data`, NumPy or another process needs commit()
    flags          fused, foreach and capturable are accepted and change nothing; amsgrad, differentiable and the like
                   only as False. No CUDA graph can hold a step of the store: step() refuses to be captured

    Hyper-parameters may be tensors of one element, as in torch.optim.

    One optimizer steers a model at a time. Tensors may live on any device. If that is not the CPU's memory, or their
    dtype is not the file's, bytes pass through a buffer here.
    """

    def __init__(self, params: Iterable[Any], root: 'os.PathLike[str] | str', defaults: Dict[str, Any], *,
                 names: Optional[Iterable[str]] = None, param_dtype: Optional[torch.dtype] = None,
                 grad_dtype: Optional[torch.dtype] = None, durable_every: int = 1, redo: bool = False, redo_keep: int = 0,
                 deltas: int = 0, delta_max: float = 0.0625, delta_dtype: Optional[torch.dtype] = None,
                 max_grad_norm: float = 0.0, grad_scale: float = 1.0, skip_nonfinite: bool = False, overlap: bool = False, async_step: bool = False,
                 accumulate: int = 1, accumulate_mode: str = 'sum', topk: float = 0.0, pack: int = 0, shard: Optional[Shard] = None,
                 parts: Optional[Mapping[str, Tuple[int, Sequence[int]]]] = None, full_state_dict: bool = False, retain: int = 0,
                 retain_every: int = 1, job: Optional[Job] = None, resume: bool = False, state_bits: int = 32,
                 state_bits_min: int = 4096, trust_versions: bool = False, **flags: Any) -> None:
        if durable_every < 1:
            raise ValueError(f'durable_every must be at least 1, not {durable_every}')
        if redo and durable_every == 1:
            raise ValueError('redo needs durable_every above 1: every step would be written in full')
        if not 0 <= redo_keep <= 128 or (redo_keep and not redo):
            raise ValueError(f'redo_keep must be from 0 to 128, and needs redo=True, not {redo_keep}')
        if not 0 <= deltas <= 128 or not 0 <= delta_max <= 1 or delta_dtype not in (None, torch.bfloat16):
            raise ValueError(f'deltas must be from 0 to 128, delta_max from 0 to 1, and delta_dtype None or torch.bfloat16, not {deltas}, '
                             f'{delta_max} and {delta_dtype}')
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
        defaults = {**defaults, 'state_bits': state_bits, 'state_bits_min': state_bits_min}
        self._check_group({**defaults, **flags})
        groups = as_groups(params)
        self.root = os.path.abspath(os.fspath(root))
        self.durable_every, self.redo, self.redo_keep = durable_every, redo, redo_keep
        self.deltas, self.delta_max, self.delta_dtype = deltas, delta_max, delta_dtype
        self.retain, self.retain_every = retain, retain_every
        self.max_grad_norm, self.grad_scale, self.skip_nonfinite = max_grad_norm, grad_scale, skip_nonfinite
        self.accumulate, self.accumulate_mode = accumulate, accumulate_mode
        self._feedback = _topk.ErrorFeedback(topk) if topk else None
        self._ahead = None
        self._gather = _gather.Gather(self.root)
        self._async, self._closing = async_step, False
        self._param_dtype, self._grad_dtype, self._trusts_versions = param_dtype, grad_dtype, trust_versions
        self.full_state_dict = full_state_dict
        self._overlap, self._holding, self._early = overlap, False, overlap
        self._given = {}
        self._files = {}
        self._held = {}
        self._places = None
        self._pack = pack
        check_ordered('names', names)
        self._given_names = iter(names) if names is not None else None
        self._taken_names = {}
        self._built, self._pid = False, os.getpid()
        self._self = id(self)
        self._begin_at(0)
        self._pushed_alone = {}
        self._unread = False
        self._durable_due = False
        self._sending_all = False
        self._latched = None
        self._small = None
        self._small_bytes = 0
        self._torn = ''
        self._users = []
        self._one_gradient = threading.RLock()
        self._seen_reducers = False
        self.defaults = defaults  # torch.optim sets the same; needed before that
        self._root = Root(self.root)
        self._root.room = weakref.WeakMethod(self._room)
        self._shard, self._ranks = shard, Ranks(shard, self.root)
        self._job = job
        self._given_parts = {name: Part(offset, tuple(shape)) for name, (offset, shape) in (parts or {}).items()}
        self._fresh = set()
        self._resume = resume or not self._ranks.leads
        self._makes = False
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
        return _need.bytes_of(sizes, self.rule, momentum, self.retain, self.durable_every if self.redo else 0, self.redo_keep, self.accumulate,
                              max((g['state_bits'] for g in self.param_groups), default=32))

    # -- methods of torch.optim --

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """As in torch.optim. Files of a group that is added later are part of the next commit. With a shard: on all ranks."""
        group = dict(param_group)
        group['params'], group['names'] = self._named(group['params'])
        for key, value in self._defaults_of(group).items():
            group.setdefault(key, value)
        self._check_group(group)
        foreign = self.defaults.keys() - group.keys()  # which torch.optim adds to groups of other rules
        super().add_param_group(group)
        for key in foreign:
            del group[key]
        self._given.update(dict.fromkeys(group['params']))
        self._taken_names.update(dict.fromkeys(group['names']))
        if not self._built:
            return
        try:
            def attach() -> Dict[str, Any]:
                self._attach_groups([group])
                if self._overlap:
                    self._hook_all()
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
            self._between_phases(files)
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

    def hold_gradients(self) -> 'ContextManager[None]':
        """With overlap=True: gradients of a backward() in here are not sent, because more will be added to them."""
        return Holding(self)

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

    def trace(self, path: 'os.PathLike[str] | str', steps: int = 1) -> None:
        """Record the next steps, and write their time line in Chrome's format (Perfetto, chrome://tracing): load, compute, gradient,
        update and publication. It is written at the end of the last of these steps, or by close(). With a shard: of this rank, in a file of its own."""
        self._trace = _trace.begin(self, path, steps)

    # -- the end --

    def close(self, why: str = 'has closed its optimizer') -> None:
        """Release the files (an open one keeps the store from being unmounted). Committed steps stay. A step whose
        gradients are sent is taken back; finished steps stay, as far as taking back a step keeps them (see the
        text of the package)."""
        if self._trace:
            self._trace.end()
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
        # At the end of Python its modules may be gone: then the kernel closes the files.
        if os and hasattr(self, '_ranks') and self._self == id(self):
            self._leaves_mappings = True  # nothing is read here, and the program may go on with the tensors
            self.close()


# Optimizers of this process. A forked child must not hold the descriptors that steer the model: it would do so after
# its parent's death.
_LIVE: 'weakref.WeakSet[Optimizer]' = weakref.WeakSet()


def _forsake_all() -> None:
    for optimizer in list(_LIVE):
        optimizer._forsake()


os.register_at_fork(after_in_child=_forsake_all)


def _close_all() -> None:
    """When the interpreter ends. A forked child leaves the optimizers of its parent alone."""
    for optimizer in list(_LIVE):
        optimizer._ends = True
    close_below('', 'has ended')


def close_below(folder: str, why: str = 'has closed its store') -> None:
    """Close the optimizers of this process whose models are below a folder: before it is unmounted."""
    with contextlib.ExitStack() as all_of_them:
        for optimizer in list(_LIVE):
            if optimizer._pid == os.getpid() and optimizer.root.startswith(os.path.join(folder, '')):
                all_of_them.callback(optimizer.close, why)


def _refuse_capture() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError('a CUDA graph cannot hold a step of the store: capture forward and backward, and call step() after them')
