# SPDX-License-Identifier: Apache-2.0
"""The former name of hitrain._topk, which this is."""
import sys

import hitrain._topk

sys.modules[__name__] = hitrain._topk
