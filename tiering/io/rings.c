/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A ring is freed when its thread ends or its set closes. Either may come first, so it is in two lists: its thread's,
 * which only that thread searches, and its set's. `lock` guards all lists; the thread that takes a ring out of them
 * frees it.
 *
 * The ring of no set outlives devices, so it is not in the deferred mode: there a finished request may keep its open
 * file, and with it the hold of a device, until the ring is used again, or freed.
 *
 * A forked child has copies of its parent's rings, but queues in shared memory are still the parent's: they are closed
 * unused. `lock` is held over a fork, so that the lists are whole in the child.
 */
#include "tiering/io/rings.h"
#include "tiering/base/list.h"
#include "tiering/io/io_priv.h"
#include "tiering/io/uring.h"

#define RING_DEPTH 64u

static struct ht_mutex lock = HT_MUTEX_INIT(HT_LOCK_RINGS);

/* A ring without a thread; the others take its memory over. */
struct shared {
    struct io_uring uring;
    struct ht_uring_memory memory;
    unsigned forks; /* whose: a child's memory is another one */
    struct shared *older;
};

struct ht_rings {
    struct ht_list members; /* lock */
    struct ht_rings_of of;  /* constant */
    /* The newest; none is freed before the set. */
    struct shared *shared HT_GUARDED_BY_STATIC(lock);
};

struct member {
    struct ht_list of_thread, of_set; /* lock, until it is taken out */
    struct ht_rings *set;             /* NULL: of none */
    struct ht_ring *ring;
    unsigned forks;              /* whose: see below */
    const struct shared *shared; /* taken over, or that was tried */
};

struct thread { /* not in thread-local memory: a forked child unlinks the rings of threads that it has not */
    struct ht_list members; /* lock */
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static bool key_made;
static unsigned forks; /* how often this process's line has forked: distinguishes a child from its parent */
static _Thread_local struct thread *self;

/* ------------------------------------------------------------------- ends */

static void take_out_locked(struct member *m, struct ht_list *taken) HT_REQUIRES_STATIC(lock)
{
    ht_list_del(&m->of_thread);
    if (m->set)
        ht_list_del(&m->of_set);
    ht_list_add_tail(taken, &m->of_thread);
}

static void free_taken(struct ht_list *taken)
{
    while (!ht_list_empty(taken)) {
        struct member *m = ht_list_entry(taken->next, struct member, of_thread);
        ht_list_del(&m->of_thread);
        if (m->forks == forks)
            ht_ring_free(m->ring);
        else
            ht_ring_discard(m->ring);
        free(m);
    }
}

static void end_of_thread(void *thread)
{
    struct thread *t = thread;
    struct ht_list taken;

    ht_list_init(&taken);
    ht_mutex_lock(&lock);
    while (!ht_list_empty(&t->members))
        take_out_locked(ht_list_entry(t->members.next, struct member, of_thread), &taken);
    ht_mutex_unlock(&lock);
    free_taken(&taken);
    free(t);
    self = NULL;
}

/* ------------------------------------------------------------------- fork */

static void before_fork(void) HT_ATTRIBUTE(acquire_capability(lock))
{
    ht_mutex_lock(&lock);
}

static void after_fork(void) HT_ATTRIBUTE(release_capability(lock))
{
    ht_mutex_unlock(&lock);
}

static void in_child(void) HT_ATTRIBUTE(release_capability(lock))
{
    forks++;
    ht_mutex_unlock(&lock);
}

static void set_up(void)
{
    key_made = pthread_key_create(&key, end_of_thread) == 0 && pthread_atfork(before_fork, after_fork, in_child) == 0;
}

static struct thread *this_thread(void)
{
    struct thread *t = self;

    if (t)
        return t;
    pthread_once(&once, set_up);
    t = key_made ? calloc(1, sizeof(*t)) : NULL;
    if (!t)
        return NULL;
    ht_list_init(&t->members);
    if (pthread_setspecific(key, t) != 0) {
        free(t);
        return NULL;
    }
    self = t;
    return t;
}

/* ------------------------------------------------------------------- mine */

/* A ring of this set; set NULL: any. Takes out rings of a parent process. */
static struct member *find_locked(struct thread *t, const struct ht_rings *set, struct ht_list *strangers)
    HT_REQUIRES_STATIC(lock)
{
    ht_list_for_each_entry_safe(m, &t->members, struct member, of_thread) {
        if (m->forks != forks)
            take_out_locked(m, strangers);
        else if (m->set == set || !set)
            return m;
    }
    return NULL;
}

/* Puts the ring of a set before a ring of no set: calls without a set then use the former. */
static void put_in(struct member *m, struct thread *t, struct ht_rings *set)
{
    ht_mutex_lock(&lock);
    m->forks = forks;
    m->set = set;
    ht_list_add_tail(t->members.next, &m->of_thread);
    if (set)
        ht_list_add_tail(&set->members, &m->of_set);
    ht_mutex_unlock(&lock);
}

/* False: no memory is registered now. */
static bool share(struct member *m, const struct shared *shared)
{
    if (!shared || shared->forks != forks)
        return false;
    m->shared = shared;
    return ht_ring_clone_memory(m->ring, &shared->uring, &shared->memory);
}

static struct member *make(struct thread *t, struct ht_rings *set, const struct shared *shared)
{
    struct member *m = calloc(1, sizeof(*m));

    if (!m)
        return NULL;
    int rc = ht_ring_new(set ? HT_RING_DEFERRED : HT_RING_COOPERATIVE, RING_DEPTH, &m->ring);
    if (rc != 0) {
        free(m);
        errno = -rc;
        return NULL;
    }
    if (set) {
        ht_ring_register_devices(m->ring, set->of.dev, HT_DEVICES_MAX);
        if (!share(m, shared))
            ht_ring_register(m->ring, set->of.area, set->of.area_count);
    }
    put_in(m, t, set);
    return m;
}

struct ht_ring *ht_ring_mine(struct ht_rings *rings)
{
    struct thread *t = this_thread();
    const struct shared *shared;
    struct ht_list strangers;

    if (!t) {
        errno = ENOMEM;
        return NULL;
    }
    ht_list_init(&strangers);
    ht_mutex_lock(&lock);
    struct member *m = find_locked(t, rings, &strangers);
    shared = rings ? rings->shared : NULL;
    ht_mutex_unlock(&lock);
    free_taken(&strangers);
    if (!m)
        m = make(t, rings, shared);
    else if (shared != m->shared && rings && ht_ring_in_flight(m->ring) == 0 && !share(m, shared))
        ht_ring_register(m->ring, rings->of.area, rings->of.area_count);
    return m ? m->ring : NULL;
}

/* -------------------------------------------------------------------- set */

static bool any_of_kernel(const struct ht_rings_of *of)
{
    bool any = false;

    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        any |= of->dev[i] && of->dev[i]->fd >= 0;
    return any;
}

static struct shared *shared_new(const struct ht_pinned_area *areas, unsigned count)
{
    struct shared *sh = calloc(1, sizeof(*sh));

    if (!sh)
        return NULL;
    /* a plain ring: other threads than its maker will clone it */
    if (ht_uring_open(&sh->uring, 1, HT_RING_PLAIN) != 0) {
        free(sh);
        return NULL;
    }
    if (ht_uring_register(&sh->uring, areas, count, &sh->memory))
        return sh;
    ht_uring_close(&sh->uring, false);
    free(sh);
    return NULL;
}

static void share_areas(struct ht_rings *rings, const struct ht_pinned_area *areas, unsigned count)
{
    struct ht_io_features f;

    if (ht_io_features(&f) != 0 || !f.shared_memory)
        return;
    struct shared *sh = shared_new(areas, count);
    if (!sh)
        return;
    ht_mutex_lock(&lock);
    sh->forks = forks;
    sh->older = rings->shared;
    rings->shared = sh;
    ht_mutex_unlock(&lock);
}

void ht_rings_share(struct ht_rings *rings, const struct ht_pinned_area *area)
{
    struct ht_pinned_area areas[HT_RING_AREAS_MAX + 1];
    unsigned n = rings->of.area_count;

    if (n == 0)
        return;
    memcpy(areas, rings->of.area, sizeof(rings->of.area));
    areas[n] = *area;
    share_areas(rings, areas, n + 1);
}

int ht_rings_new(const struct ht_rings_of *of, struct ht_rings **out_rings)
{
    struct ht_rings *set = calloc(1, sizeof(*set));

    if (!set)
        return -ENOMEM;
    ht_list_init(&set->members);
    set->of = *of;
    if (!any_of_kernel(of))
        set->of.area_count = 0;
    else if (of->area_count > 0)
        share_areas(set, of->area, of->area_count);
    *out_rings = set;
    return 0;
}

static uint64_t registered_bytes(const struct ht_rings *rings) HT_REQUIRES_STATIC(lock)
{
    const struct shared *sh = rings->shared;
    uint64_t bytes = 0;

    for (unsigned i = 0; sh && i < sh->memory.count; i++)
        bytes += sh->memory.area[i].bytes;
    for (unsigned i = 0; !sh && i < rings->of.area_count; i++)
        bytes += rings->of.area[i].bytes;
    return bytes;
}

void ht_rings_stats(struct ht_rings *rings, struct ht_rings_stats *out)
{
    struct ht_io_features f = {.mode = HT_RING_PLAIN};
    bool known = ht_io_features(&f) == 0;

    *out = (struct ht_rings_stats){.mode = f.mode};
    for (unsigned i = 0; f.files && i < HT_DEVICES_MAX; i++)
        out->devices += rings->of.dev[i] && rings->of.dev[i]->fd >= 0;
    ht_mutex_lock(&lock);
    out->memory_bytes = known && f.memory ? registered_bytes(rings) : 0;
    ht_list_for_each(pos, &rings->members)
        out->rings++;
    ht_mutex_unlock(&lock);
}

void ht_rings_free(struct ht_rings *rings)
{
    struct ht_list taken;

    if (!rings)
        return;
    ht_list_init(&taken);
    ht_mutex_lock(&lock);
    while (!ht_list_empty(&rings->members))
        take_out_locked(ht_list_entry(rings->members.next, struct member, of_set), &taken);
    struct shared *shared = rings->shared;
    ht_mutex_unlock(&lock);
    free_taken(&taken);
    while (shared) {
        struct shared *older = shared->older;
        ht_uring_close(&shared->uring, false);
        free(shared);
        shared = older;
    }
    free(rings);
}
