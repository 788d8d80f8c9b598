# SPDX-License-Identifier: Apache-2.0
"""Optimizers for PyTorch that run inside a hitrain store: gradients go in, new parameters come out.

    import hitrain

    model = Model()
    optimizer = hitrain.AdamW(model.named_parameters(), '/mnt/hitrain/model', lr=3e-4)
    for batch in batches:
        model(batch).backward()
        optimizer.step()          # when it returns, the step is on the device
        optimizer.zero_grad()

A directory of the mount becomes the model; each parameter is one file in it. step() writes each gradient to
`.hitrain/grad/NAME`, asks for the boundary, and reads the parameters that the store computed. Moments and (for bf16
files) master weights stay in the store. After a crash, mount again and pass resume=True: the model continues from
the last committed step, which `optimizer.committed_step` names.

hitrain.Adam, hitrain.SGD, hitrain.Lion and hitrain.Adagrad are used alike, and hitrain.Muon(hitrain.muon_groups(model), ...).

Parameters may be changed outside step(), by load_state_dict of the model, clamping, averaging or a new initialisation:
changed ones are written to their files before the next step's first gradient.

A step is whole or nothing. When something fails while a step is sent or ended (also by Ctrl-C), the step is taken back
before the exception leaves: the next gradients make a new step. If finished steps that are not durable yet had to go
with it (durable_every above 1), the tensors go back, too, and a RuntimeWarning reports that. Finished steps stay if no
update has applied a gradient of the step yet: with max_grad_norm, with skip_nonfinite, and until the last of
accumulate=N gradients. A failure after the end, as of reading new parameters, leaves the step done:
state_dict()['hitrain']['step'] counts it, and its batch must not be used again.

close() takes back a step with sent gradients in the same way. So an unmount finds no open step, and keeps the
finished ones. The end of the interpreter closes, too. A process that is killed within a step leaves it open. Then resume=True takes it back;
an unmount before that drops the step and all finished steps since `committed_step`, and logs the event step-dropped.

Only files and extended attributes are used: any other program may look on, and may write some of the gradients.
The package is pure Python and works with torch 1.13 and 2.x.

hitrain.store          a store that is made and mounted while a program needs it
hitrain.optim          the optimizers
hitrain.distributed    several processes that train one model
hitrain.checkpoint     parameters of a store as safetensors files, and back; no optimizer state
hitrain.integrations   for trainers of other packages
hitrain.megatron       the distributed optimizer of Megatron-LM, miles and verl
"""
from hitrain import checkpoint, distributed, integrations, optim  # noqa: F401
from hitrain.optim import *  # noqa: F401, F403
from hitrain._deltas import Delta, deltas
from hitrain._need import store_bytes
from hitrain._offload import init_empty, materialize, microbatches, offload
from hitrain.store import Store, StoreError
from hitrain.optim import __all__ as _optimizers

__all__ = [*_optimizers, 'Delta', 'Store', 'StoreError', 'deltas', 'init_empty', 'materialize', 'microbatches', 'offload', 'store_bytes']

__version__ = '0.1.0'
