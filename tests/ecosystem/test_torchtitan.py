# SPDX-License-Identifier: Apache-2.0
"""torchtitan's container of optimizers on a mounted store, beside its own."""
import pytest

from page import Page, numbers, page, shared_store  # noqa: F401  first: it makes the client importable

OWN = """
import sys, types
import torchtitan.components.optimizer as titan

class Container(titan.OptimizersContainer):
    def close(self):
        pass

def config(root, **words):
    return types.SimpleNamespace(build=lambda model_parts: Container(titan.OptimizersContainer.Config(implementation='for-loop', **words),
                                                                     model_parts=model_parts))
Container.Config = config
sys.modules['hitrain.torchtitan'] = types.SimpleNamespace(OptimizersContainer=Container)
"""


def test_torchtitan(page):  # noqa: F811
    """With the numbers of torchtitan's own; back to a checkpoint with two and with four processes."""
    titan = page('torchtitan')
    own = numbers('loss', titan.run('own', processes=2))
    theirs = numbers('loss', titan.run('plain', OWN, processes=2))
    assert len(own) == 10 and own[-1] < own[0] and own == pytest.approx(theirs, rel=1e-4)
    assert numbers('loss', titan.run('own', processes=2)) == own[5:]
    assert numbers('loss', titan.run('own', processes=4)) == pytest.approx(own[5:], rel=1e-5)


REFUSED = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import ParamGroupConfig
from hitrain.torchtitan import OptimizersContainer

dist.init_process_group('gloo')
groups = lambda *names: [ParamGroupConfig(pattern=p, optimizer_name=n, optimizer_kwargs={'lr': 1e-3}) for p, n in zip(('weight', '.'), names)]

def tells(word, mesh, *, root='/mnt/hitrain/refused', names=('AdamW', 'AdamW'), **words):
    model = torch.nn.Linear(32, 32)
    fully_shard(model, mesh=mesh)
    try:
        OptimizersContainer.Config(root=root, param_groups=groups(*names), **words).build(model_parts=[model])
    except ValueError as e:
        print('well', word in str(e))

whole = dist.device_mesh.init_device_mesh('cpu', (2,))
tells('needs root=', whole, root='')
tells('state_bits', whole, implementation='fused_opt_states_bf16')
tells('Adam, SGD', whole, names=('SGD', 'Adam'))
tells('tensor', dist.device_mesh.init_device_mesh('cpu', (2, 1), mesh_dim_names=('a', 'b'))['b'])

model = torch.nn.Linear(32, 32)
fully_shard(model, mesh=whole)
optimizers = OptimizersContainer.Config(root='/mnt/hitrain/muon', param_groups=groups('Muon', 'AdamW')).build(model_parts=[model])
before = [p.full_tensor().clone() for p in model.parameters()]
model(torch.ones(4, 32)).square().sum().backward()
optimizers.step()
words = {k.rpartition('.')[2] for k in optimizers.state_dict() if k.startswith('state.weight')}
print('well', 'momentum_buffer' in words and all((p.full_tensor() != b).any() for p, b in zip(model.parameters(), before)))
optimizers.close()
"""


def test_what_is_refused_and_muon(shared_store, tmp_path):  # noqa: F811
    said = Page.of_script(REFUSED, shared_store.mountpoint, tmp_path).run('refused', processes=2)
    assert said.count('True') == 10 and 'False' not in said, said  # ranks write lines side by side
