# SPDX-License-Identifier: Apache-2.0
"""The former name of hitrain.distributed, which this is."""
import sys

import hitrain.distributed

sys.modules[__name__] = hitrain.distributed
