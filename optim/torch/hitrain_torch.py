# SPDX-License-Identifier: Apache-2.0
"""The former name of hitrain.optim. `import *` gives the former names, and hides none of torch.optim."""
from hitrain.optim import *  # noqa: F401, F403
from hitrain.optim import (HitrainAdagrad, HitrainAdam, HitrainAdamW, HitrainLion, HitrainOptimizer, HitrainSGD, RankFailed,
                           Shard)

__all__ = ['HitrainAdagrad', 'HitrainAdam', 'HitrainAdamW', 'HitrainLion', 'HitrainOptimizer', 'HitrainSGD',
           'RankFailed', 'Shard']
