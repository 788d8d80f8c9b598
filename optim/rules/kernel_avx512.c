/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_avx512.c - sixteen elements at a time between f32 and codes, for CPUs with AVX-512 F, BW, VL and DQ. Equal to
 * the reference bit for bit.
 */
#if defined(__x86_64__)
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" /* the headers of GCC 12 warn of themselves (GCC bug 105593) */
#endif
#define HT_LANES_AVX512
#include "tiering/base/mutant.h"
#include "optim/rules/forms_loop.h"

HT_CODECS(avx512)
#else
typedef int nothing_here;
#endif
