# SPDX-License-Identifier: Apache-2.0
"""Helpers for trainers of other packages."""
from typing import Any, Dict, List

import torch

from hitrain._guard import SpikeGuard, lightning_guard, trainer_guard

__all__ = ['SpikeGuard', 'decay_groups', 'lightning_guard', 'trainer_guard']


def decay_groups(model: torch.nn.Module, weight_decay: float) -> List[Dict[str, Any]]:
    """The parameters that train, with their names, in two groups: matrices decay; biases, norms and other parameters of
    fewer than two dimensions do not. Trainers usually make these groups for their own optimizers."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [{'params': [(n, p) for n, p in trained if p.dim() >= 2], 'weight_decay': weight_decay},
              {'params': [(n, p) for n, p in trained if p.dim() < 2], 'weight_decay': 0.0}]
    return [group for group in groups if group['params']]
