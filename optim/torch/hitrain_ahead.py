# SPDX-License-Identifier: Apache-2.0
"""The former name of hitrain._ahead, which this is."""
import sys

import hitrain._ahead

sys.modules[__name__] = hitrain._ahead
