/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/fault.h"

int (*_Atomic ht_fault_pass)(enum ht_fault_point point);
