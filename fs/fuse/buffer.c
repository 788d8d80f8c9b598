/* SPDX-License-Identifier: Apache-2.0 */
/* buffer.c - one I/O buffer for each thread that answers reads, kept until the thread ends. */
#include "fs/fuse/fuse_priv.h"

#include <stdlib.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static bool have_key;

static void make_key(void)
{
    have_key = pthread_key_create(&key, free) == 0;
}

char *ht_fuse_buffer(void)
{
    static _Thread_local char *buffer;
    void *p;

    if (buffer)
        return buffer;
    pthread_once(&once, make_key);
    if (!have_key || posix_memalign(&p, HT_BLOCK_BYTES, HT_FUSE_IO_BYTES))
        return NULL;
    if (pthread_setspecific(key, p)) {
        free(p);
        return NULL;
    }
    buffer = p;
    return buffer;
}
