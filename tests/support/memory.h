/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.h - pinned memory for tests that open thousands of stores. The linker puts it in front of ht_pinned_alloc and
 * ht_pinned_free (Makefile, test_flags); the programs know nothing of it.
 */
#ifndef HITRAIN_TESTS_SUPPORT_MEMORY_H
#define HITRAIN_TESTS_SUPPORT_MEMORY_H

#include "tiering/base/base.h"

/*
 * What is freed from now on is kept, as it is, for the next allocation of the same size that is not divided among NUMA
 * nodes. The heap keeps its pages. false: pinned memory as usual again, and the kept one is freed.
 */
void memory_keep(bool on);

#endif
