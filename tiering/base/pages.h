/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pages.h - large tables of which a part may never be used.
 *
 * calloc zeroes such a table at once if its memory was in use before, and a sanitizer marks it whole. These pages are
 * zero, and come when they are touched.
 */
#pragma once

#include <stddef.h>

/* Or NULL: no memory. The caller gives them back with ht_pages_free and the same bytes. */
void *ht_pages_new(size_t bytes);
/* NULL: nothing. */
void ht_pages_free(void *pages, size_t bytes);
