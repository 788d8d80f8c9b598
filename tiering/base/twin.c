/* SPDX-License-Identifier: Apache-2.0 */
/* twin.c - which broken twin this process is; empty in builds without twins. */
#include "tiering/base/twin.h"

#ifdef HT_TWINS

#include <stdlib.h>
#include <string.h>

bool ht_twin_is(const char *name)
{
    const char *chosen = getenv("HITRAIN_TWIN");

    return chosen != NULL && strcmp(chosen, name) == 0;
}

#endif
