/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mutant.h - mutants: the same program with one safeguard taken out, for the tests that have to notice.
 *
 * In builds with HT_MUTANTS (make MUTANTS=1) the variable HITRAIN_MUTANT names the one that this process is. In every
 * other build HT_MUTANT is false and leaves no code. tests/tools/mutants.py says which test
 * catches which, and runs them.
 */
#pragma once

#ifdef HT_MUTANTS

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Is this process the mutant of this name? */
static inline bool ht_mutant_is(const char *name)
{
    const char *chosen = getenv("HITRAIN_MUTANT");

    return chosen && strcmp(chosen, name) == 0;
}
#define HT_MUTANT(name) ht_mutant_is(name)

#else

#define HT_MUTANT(name) 0

#endif
