# SPDX-License-Identifier: Apache-2.0
"""The former name of hitrain._files, which this is."""
import sys

import hitrain._files

sys.modules[__name__] = hitrain._files
