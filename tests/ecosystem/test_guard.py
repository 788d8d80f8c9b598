# SPDX-License-Identifier: Apache-2.0
"""Trainer and Lightning go back by the guard's callback when a batch makes their loss jump."""
import os

from page import shared_store  # first: it makes the client importable
import lightning
import pytest
import torch
import transformers

import hitrain
from hitrain.integrations import lightning_guard, trainer_guard

STEPS, BAD = 40, 30


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def forward(self, x, labels):
        return {'loss': torch.nn.functional.mse_loss(self.layers(x), labels)}


def batches():
    x = torch.randn(STEPS, 16, generator=torch.Generator().manual_seed(2))
    labels = x.sum(1, keepdim=True)
    labels[BAD] = 1e6
    return x, labels


@pytest.fixture
def model(shared_store):
    model = Regression()
    optimizer = hitrain.AdamW(model.named_parameters(), shared_store.mountpoint / f'guarded-{os.urandom(4).hex()}', lr=1e-2, retain=4)
    yield model, optimizer
    optimizer.close()


def check(guard, optimizer):
    (event,) = guard.events
    assert event['to'] == BAD and event['spikes'][0]['step'] == BAD + 1 and event['spikes'][0]['loss'] > 1e6
    assert optimizer.committed_step == STEPS - 1


def test_trainer_goes_back(model, tmp_path):
    model, optimizer = model
    x, labels = batches()
    data = [{'x': a, 'labels': b} for a, b in zip(x, labels)]
    args = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=1, num_train_epochs=1, logging_steps=1, report_to=[],
                                          save_strategy='no', disable_tqdm=True, use_cpu=True, max_grad_norm=0, lr_scheduler_type='constant')
    guard = trainer_guard(window=20)

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *unused):
            return torch.utils.data.SequentialSampler(data)
    InOrder(model, args, train_dataset=data, optimizers=(optimizer, None), callbacks=[guard]).train()
    check(guard.guard, optimizer)


def test_lightning_goes_back(model, tmp_path):
    net, optimizer = model

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            return self.net(*batch)['loss']

        def configure_optimizers(self):
            return optimizer
    guard = lightning_guard(window=20)
    trainer = lightning.Trainer(max_epochs=1, accelerator='cpu', logger=False, enable_progress_bar=False, enable_checkpointing=False,
                                default_root_dir=tmp_path, callbacks=[guard])
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batches()), batch_size=1))
    check(guard.guard, optimizer)
