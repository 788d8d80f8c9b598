/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/lack.h"

static _Thread_local uint64_t lack_bytes;

int ht_lack_space(uint64_t bytes)
{
    lack_bytes = bytes;
    return -ENOSPC;
}

uint64_t ht_lack(void)
{
    return lack_bytes;
}

uint64_t ht_lack_take(void)
{
    uint64_t bytes = lack_bytes;

    lack_bytes = 0;
    return bytes;
}
