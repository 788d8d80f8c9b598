/* SPDX-License-Identifier: Apache-2.0 */
/*
 * twin.h - broken twins: the same program with one safeguard taken out, for the tests that have to notice.
 *
 * In builds with HT_TWINS (make TWINS=1) the variable HITRAIN_TWIN names the one that this process is. In every other
 * build HT_TWIN is false and leaves no code. tests/tools/twins.py says which test catches which, and runs them.
 */
#ifndef HITRAIN_TIERING_BASE_TWIN_H
#define HITRAIN_TIERING_BASE_TWIN_H

#ifdef HT_TWINS

#include <stdbool.h>

/* Is this process the twin of this name? */
bool ht_twin_is(const char *name);
#define HT_TWIN(name) ht_twin_is(name)

#else

#define HT_TWIN(name) 0

#endif

#endif
