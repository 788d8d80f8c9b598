/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "tests/support/wrap.h"

static _Atomic int left[WRAP_KINDS]; /* calls until it fails; 0: disarmed; below: failed */
static _Atomic bool repeats[WRAP_KINDS], reached[WRAP_KINDS];
static _Thread_local bool is_paused;

void wrap_fail(enum wrap_kind kind, unsigned nth, bool repeat)
{
    atomic_store(&reached[kind], false);
    atomic_store(&repeats[kind], repeat);
    atomic_store(&left[kind], (int)nth);
}

bool wrap_reached(enum wrap_kind kind)
{
    return atomic_load(&reached[kind]);
}

bool wrap_pause(bool paused)
{
    bool was = is_paused;

    is_paused = paused;
    return was;
}

static bool fails(enum wrap_kind kind)
{
    if (is_paused || atomic_load_explicit(&left[kind], memory_order_relaxed) == 0)
        return false;
    int was = atomic_fetch_sub(&left[kind], 1);
    if (was == 0) { /* another thread disarmed it */
        atomic_store(&left[kind], 0);
        return false;
    }
    if (was > 1)
        return false;
    atomic_store(&reached[kind], true);
    atomic_store(&left[kind], atomic_load(&repeats[kind]) ? -1 : 0);
    errno = kind == WRAP_MEMORY ? ENOMEM : EAGAIN;
    return true;
}

/* The names that the linker gives to the calls (--wrap), and the real ones. */
void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t size);
void *__real_aligned_alloc(size_t align, size_t size);
int __real_posix_memalign(void **p, size_t align, size_t size);
void *__real_ht_pages_new(size_t bytes);
int __real_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t size);
void *__wrap_aligned_alloc(size_t align, size_t size);
int __wrap_posix_memalign(void **p, size_t align, size_t size);
void *__wrap_ht_pages_new(size_t bytes);
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);

void *__wrap_malloc(size_t size)
{
    return fails(WRAP_MEMORY) ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return fails(WRAP_MEMORY) ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t size)
{
    return fails(WRAP_MEMORY) ? NULL : __real_realloc(p, size);
}

void *__wrap_aligned_alloc(size_t align, size_t size)
{
    return fails(WRAP_MEMORY) ? NULL : __real_aligned_alloc(align, size);
}

int __wrap_posix_memalign(void **p, size_t align, size_t size)
{
    return fails(WRAP_MEMORY) ? ENOMEM : __real_posix_memalign(p, align, size);
}

void *__wrap_ht_pages_new(size_t bytes)
{
    return fails(WRAP_MEMORY) ? NULL : __real_ht_pages_new(bytes);
}

int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    return fails(WRAP_THREAD) ? EAGAIN : __real_pthread_create(t, attr, fn, arg);
}
