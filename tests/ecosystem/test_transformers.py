# SPDX-License-Identifier: Apache-2.0
"""Trainer, accelerate and peft train with the store as with torch.optim."""
import os
import re
import signal

import pytest

from page import KILLED, PLAIN, numbers, page, shared_store  # first: it makes the client importable
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hitrain.checkpoint import export_safetensors, import_safetensors

STEPS = 20


def weights(folder):
    return safetensors.torch.load_file(folder / f'run/checkpoint-{STEPS}/model.safetensors')


def test_trainer(page, tmp_path):
    trainer = page('trainer')
    said = trainer.run('once')
    assert re.search(rf'^step {STEPS} of the store {STEPS}$', said, re.M), said
    trainer.run('plain', before=PLAIN)
    own, theirs = weights(tmp_path / 'once'), weights(tmp_path / 'plain')
    assert set(own) == set(theirs)
    # Rounding to bf16 in the forward pass turns the last bits of f32 into larger ones.
    assert max((own[n] - theirs[n]).abs().max().item() for n in own) < 2e-4
    # Killed between two checkpoints: the second run begins at the last one, and ends with the same bits.
    trainer.run('killed', before=KILLED.format(after=13), ends=-signal.SIGKILL)
    assert int(os.getxattr(trainer.root('killed'), 'user.hitrain.durable_step')) == 13
    assert 'checkpoint-10' in os.listdir(tmp_path / 'killed/run')
    said = trainer.run('killed')
    assert f'step {STEPS} of the store {13 + STEPS - 10}' in said
    again = weights(tmp_path / 'killed')
    assert all(torch.equal(own[n], again[n]) for n in own)
    check_safetensors(trainer.root('once'), tmp_path)


def check_safetensors(root, tmp_path):
    """The model in the store goes to transformers and back without a change of its logits."""
    saved = tmp_path / f'once/run/checkpoint-{STEPS}'
    export_safetensors(root, tmp_path / 'exported', shard_bytes=100000)
    LlamaConfig.from_pretrained(saved).save_pretrained(tmp_path / 'exported')
    assert (tmp_path / 'exported/model.safetensors.index.json').exists()
    tokens = torch.arange(64).view(1, 64)
    one, other = (LlamaForCausalLM.from_pretrained(p)(tokens).logits for p in (saved, tmp_path / 'exported'))
    assert torch.equal(one, other)
    import_safetensors(saved, root.parent / 'imported')
    names = set(os.listdir(root))
    assert names <= set(os.listdir(root.parent / 'imported'))
    assert all((root / n).read_bytes() == (root.parent / 'imported' / n).read_bytes() for n in names)


def test_accelerate(page):
    accelerate = page('accelerate')
    own, theirs = (numbers('loss', accelerate.run(run, before)) for run, before in (('own', ''), ('plain', PLAIN)))
    assert len(own) == 3 and own[1] == own[2] < own[0]
    assert own == pytest.approx(theirs, rel=1e-4)


def test_peft(page, tmp_path):
    peft = page('peft')
    said = peft.run('own')
    own, theirs = numbers('loss', said), numbers('loss', peft.run('plain', PLAIN))
    assert len(own) == 10 and own[-1] < own[0] and own == pytest.approx(theirs, rel=1e-4)
    assert re.search('^step 10$', said, re.M)
    names = os.listdir(peft.root('own'))
    assert len(names) == 8 and all('lora_' in n for n in names)
    one, other = (safetensors.torch.load_file(tmp_path / run / 'adapters/adapter_model.safetensors') for run in ('own', 'plain'))
    assert set(one) == set(other) and max((one[n] - other[n]).abs().max().item() for n in one) < 1e-5
