/* SPDX-License-Identifier: Apache-2.0 */
/* lock.c - locks that are taken for a dump. */
#include "tiering/base/lock.h"

#include <stdatomic.h>

#include "tiering/base/base.h"

enum { NAP_NS = 1000000 };

/* False: the time is over. A dump may come late, so it naps between two tries. */
static bool nap(uint64_t until_ns)
{
    ht_sleep_ns(NAP_NS);
    return ht_now_ns() < until_ns;
}

bool ht_mutex_lock_for(struct ht_mutex *m, uint64_t ns) HT_NO_THREAD_SAFETY_ANALYSIS
{
    uint64_t until_ns = ht_now_ns() + ns;
    int rc;

    while ((rc = pthread_mutex_trylock(&m->lock)) && nap(until_ns))
        ;
    if (!rc)
        HT_LOCK_TELL(ht_lock_taking, m);
    return !rc;
}

bool ht_rwlock_rdlock_for(struct ht_rwlock *l, uint64_t ns) HT_NO_THREAD_SAFETY_ANALYSIS
{
    uint64_t until_ns = ht_now_ns() + ns;
    int rc;

    while ((rc = pthread_rwlock_tryrdlock(&l->lock)) && nap(until_ns))
        ;
    if (!rc)
        HT_LOCK_TELL(ht_lock_taking, l);
    return !rc;
}

int ht_mutex_holder(const struct ht_mutex *m)
{
    return __atomic_load_n(&m->lock.__data.__owner, __ATOMIC_RELAXED);
}

/* glibc's mutex is 2 while a thread may wait for it. */
bool ht_mutex_is_wanted(const struct ht_mutex *m)
{
    return __atomic_load_n(&m->lock.__data.__lock, __ATOMIC_RELAXED) > 1;
}

int ht_rwlock_writer(const struct ht_rwlock *l)
{
    return __atomic_load_n(&l->lock.__data.__cur_writer, __ATOMIC_RELAXED);
}

bool ht_rwlock_is_wanted_by_writer(const struct ht_rwlock *l)
{
    return __atomic_load_n(&l->lock.__data.__writers, __ATOMIC_RELAXED) != 0;
}
