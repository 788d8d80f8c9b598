# SPDX-License-Identifier: Apache-2.0
"""The former name of hitrain.optim, which this is."""
import sys

import hitrain.optim

sys.modules[__name__] = hitrain.optim
