/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/pages.h"

#include <sys/mman.h>

void *ht_pages_new(size_t bytes)
{
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return pages == MAP_FAILED ? NULL : pages;
}

void ht_pages_free(void *pages, size_t bytes)
{
    if (pages)
        (void)munmap(pages, bytes);
}
