# SPDX-License-Identifier: Apache-2.0
"""The former name of hitrain._root, which this is."""
import sys

import hitrain._root

sys.modules[__name__] = hitrain._root
