/* SPDX-License-Identifier: Apache-2.0 */
/* mutant.c - which mutant this process is; empty in builds without mutants. */
#include "tiering/base/mutant.h"

#ifdef HT_MUTANTS

#include <stdlib.h>
#include <string.h>

bool ht_mutant_is(const char *name)
{
    const char *chosen = getenv("HITRAIN_MUTANT");

    return chosen && strcmp(chosen, name) == 0;
}

#endif
