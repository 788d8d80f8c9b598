/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.h - pinned memory for tests that open thousands of stores, and how many processors they may use. The linker
 * puts it in front of the functions that ask the kernel (Makefile, memory_flags); the programs do not know that.
 */
#pragma once

#include "tiering/base/base.h"

/*
 * What is freed from now on is kept, as it is, for the next allocation of the same size that is not divided among NUMA
 * nodes. The heap keeps its pages. What control groups allow is read once. false: as usual again, and the kept memory
 * is freed.
 */
void memory_keep(bool on);
