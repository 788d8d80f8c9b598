/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lack.h - how much space a call lacked that was refused with -ENOSPC. Of each thread, like errno: whoever refuses says
 * it, and the caller that wants to make room asks before its next call.
 */
#pragma once

#include "tiering/base/base.h"

/* Returns -ENOSPC. 0: it is no space for data that is lacking. */
int ht_lack_space(uint64_t bytes);
/* Of the last refusal. */
uint64_t ht_lack(void);
/* The same, once: 0 afterwards. */
uint64_t ht_lack_take(void);
