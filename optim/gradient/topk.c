/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk.c - sparse gradients: written bytes are kept aside and checked as a whole at close. Only then they become the
 * dense gradient that they stand for, a window at a time. From there on nothing is special: zeros decay moments, sums
 * and norms are those of the dense gradient, bit for bit.
 *
 *   EMPTY --write--> FILLING --flush, complete and right--> applied, EMPTY
 *                            --flush, wrong--> refused, EMPTY
 *                            --flush, shorter than it says--> refused, FILLING (a forked child's exec flushes early)
 *                            --abort, or drop of the parameter--> EMPTY, at the next call
 *
 * Memory per open file is fixed: two windows of entries and one of the gradient. The written bytes lie in a scratch
 * object of their own. Its lock serialises the calls of threads that share the descriptor; it is held over the flush.
 */
#include <hitrain/topk.h>
#include <stdarg.h>

#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient_priv.h"

enum { ENTRIES = 8192, WINDOW_BYTES = 1 << 16, HEADER_BYTES = sizeof(struct ht_topk_header), WHY_BYTES = 160 };

/* A window of the indices and of the values. */
struct entries {
    uint64_t first, count; /* entries that are here */
    uint8_t index[ENTRIES * 4], value[ENTRIES * 4];
};

struct ht_topk {
    struct ht_grad *grad;
    struct ht_param *param; /* the gradient's */
    struct ht_mutex lock;
    HT_GUARDED_BY(HT_LOCK_TOPK) struct {
        struct ht_obj *spool;
        uint64_t since;                 /* param.forgotten when the spool was begun */
        struct ht_interval_set written; /* bytes of the spool */
        uint64_t written_bytes;         /* end of the written bytes */
        uint64_t elements, count;
        uint8_t dtype, value_bytes;
        uint64_t next; /* entry to be placed next */
        struct entries entries;
        uint8_t window[WINDOW_BYTES]; /* of the gradient */
        char why[WHY_BYTES];          /* of a refusal */
    };
};

HT_MUTEX_OF(topk_lock, struct ht_topk, lock, HT_LOCK_TOPK)

/* -------------------------------------------------------------------- open */

int ht_topk_open(struct ht_optim *o, const struct ht_param_desc *desc, struct ht_topk **out)
{
    struct ht_topk *t = calloc(1, sizeof(*t));
    int rc = t ? ht_grad_open(o, desc, &t->grad) : -ENOMEM;

    if (!rc) {
        t->param = t->grad->param;
        rc = ht_opt_object_create(o->store, 0, HT_SMALL_CHUNK_BYTES, &t->spool);
        if (rc)
            ht_grad_release(t->grad);
    }
    if (rc) {
        free(t);
        return rc;
    }
    ht_mutex_init(&t->lock, HT_LOCK_TOPK);
    *out = t;
    return 0;
}

void ht_topk_release(struct ht_topk *t)
{
    HT_UNSHARED(HT_LOCK_TOPK);
    struct ht_obj *spool = t->spool;

    /* The log has failed then: the object goes with the mount. */
    if (ht_opt_scratch_delete(t->param, &t->spool) && t->spool)
        ht_obj_put(spool);
    ht_grad_release(t->grad);
    ht_interval_set_free(&t->written);
    ht_mutex_destroy(&t->lock);
    free(t);
}

/* ------------------------------------------------------------------- write */

static HT_PRINTF(2, 3) int refuse_topk(struct ht_topk *t, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(t->why, sizeof(t->why), fmt, ap);
    va_end(ap);
    return -EINVAL;
}

static void report_topk(struct ht_topk *t, int err) HT_REQUIRES(HT_LOCK_TOPK)
{
    ht_opt_refuse_gradient(t->param, "sparse gradient: %s; it is not applied", t->why[0] ? t->why : strerror(-err));
    t->why[0] = '\0';
}

static void forget_spool(struct ht_topk *t) HT_REQUIRES(HT_LOCK_TOPK)
{
    ht_interval_set_clear(&t->written);
    t->written_bytes = 0;
    ht_obj_scratch_drop(t->spool, 0, UINT64_MAX);
}

/* Bytes from before an abort or a drop are not handed over. */
static void forget_older(struct ht_topk *t) HT_REQUIRES(HT_LOCK_TOPK)
{
    lock(t->param->o);
    uint64_t now = t->param->forgotten;
    unlock(t->param->o);
    if (t->since != now && t->written.count)
        forget_spool(t);
    t->since = now;
}

/* The size with an entry for each element: so the parameter bounds the bytes kept aside. */
static uint64_t bytes_max(struct ht_topk *t)
{
    const struct ht_param_shape *s = &t->param->shape;

    lock(t->param->o);
    uint64_t bytes = HEADER_BYTES + s->elements * (4u + s->g_bytes); /* no value is wider than an element */
    unlock(t->param->o);
    return ht_min_u64(bytes, HT_TOPK_BYTES_MAX);
}

static ssize_t write_locked(struct ht_topk *t, uint64_t off, const void *buf, size_t len) HT_REQUIRES(HT_LOCK_TOPK)
{
    uint64_t max = bytes_max(t);

    if (off > max || len > max - off)
        return refuse_topk(t, "%zu bytes at %llu reach beyond the %llu bytes that one of this parameter can have", len,
                           (ull)off, (ull)max);
    ssize_t n = ht_obj_write(t->spool, off, buf, len);
    if (n <= 0)
        return n;
    int rc = ht_interval_set_add(&t->written, (uint32_t)off, (uint32_t)(off + (size_t)n));
    if (rc == -E2BIG)
        (void)refuse_topk(t, "written in more than %d pieces", HT_INTERVALS_MAX);
    t->written_bytes = ht_max_u64(t->written_bytes, off + (size_t)n);
    return rc ? rc : n;
}

ssize_t ht_topk_write(struct ht_topk *t, uint64_t off, const void *buf, size_t len)
{
    if (!len)
        return 0;
    ht_mutex_lock(topk_lock(t));
    forget_older(t);
    ssize_t n = write_locked(t, off, buf, len);
    if (n < 0)
        report_topk(t, (int)n);
    ht_mutex_unlock(topk_lock(t));
    return n;
}

/* ------------------------------------------------------------------- check */

static int validate_counts(struct ht_topk *t, uint64_t elements, uint64_t count) HT_REQUIRES(HT_LOCK_TOPK)
{
    if (elements != t->elements)
        return refuse_topk(t, "header: %llu elements, but the parameter has %llu", (ull)elements, (ull)t->elements);
    if (count > elements)
        return refuse_topk(t, "header: %llu entries for %llu elements", (ull)count, (ull)elements);
    if (elements > 1ull << 32)
        return refuse_topk(t, "header: indices have 32 bits, too few for %llu elements", (ull)elements);
    t->count = count;
    return 0;
}

static int validate_header(struct ht_topk *t, const struct ht_topk_header *h, uint8_t grad_dtype)
    HT_REQUIRES(HT_LOCK_TOPK)
{
    static const uint8_t zero[sizeof(h->zero)];

    if (memcmp(h->magic, HT_TOPK_MAGIC, sizeof(h->magic)) != 0)
        return refuse_topk(t, "header: does not begin with the magic word");
    if (ht_le32_load(&h->version) != HT_TOPK_VERSION)
        return refuse_topk(t, "header: version %u; %u is known", ht_le32_load(&h->version), HT_TOPK_VERSION);
    if (memcmp(h->zero, zero, sizeof(zero)) != 0)
        return refuse_topk(t, "header: bytes 13 to 15 are not zero");
    /* A value must be an element of the gradient without rounding. */
    if (!ht_dtype_trained_bytes(h->dtype) || (h->dtype != grad_dtype && grad_dtype != HT_DTYPE_F32))
        return refuse_topk(
            t, "header: values of dtype %u are no elements of this gradient: give those of its grad_dtype", h->dtype);
    t->dtype = h->dtype;
    t->value_bytes = ht_dtype_trained_bytes(h->dtype);
    return validate_counts(t, ht_le64_load(&h->elements), ht_le64_load(&h->count));
}

static uint64_t values_at(const struct ht_topk *t) HT_REQUIRES(HT_LOCK_TOPK)
{
    return HEADER_BYTES + t->count * 4;
}

/* -EAGAIN: shorter than it says. */
static int validate_length(struct ht_topk *t) HT_REQUIRES(HT_LOCK_TOPK)
{
    uint64_t end = values_at(t) + t->count * t->value_bytes;
    unsigned long long wanted = end, got = t->written_bytes;

    if (got > wanted)
        return refuse_topk(t, "%llu bytes where the header says %llu", got, wanted);
    if (end > HT_TOPK_BYTES_MAX)
        return refuse_topk(t, "the header says %llu bytes; at most %lu", wanted, HT_TOPK_BYTES_MAX);
    if (ht_interval_set_cover(&t->written, 0, (uint32_t)end))
        return 0;
    (void)refuse_topk(t,
                      got < wanted ? "ends after %llu of the %llu bytes that its header says"
                                   : "has holes in its %llu of %llu bytes",
                      got, wanted);
    return -EAGAIN;
}

/* Entries from first on, with their values or without. */
static int load_entries(struct ht_topk *t, uint64_t first, bool values) HT_REQUIRES(HT_LOCK_TOPK)
{
    struct entries *e = &t->entries;

    e->first = first;
    e->count = ht_min_u64(ENTRIES, t->count - first);
    int rc = ht_opt_read_all(t->spool, HEADER_BYTES + first * 4, e->index, e->count * 4);
    if (!rc && values)
        rc = ht_opt_read_all(t->spool, values_at(t) + first * t->value_bytes, e->value, e->count * t->value_bytes);
    return rc;
}

static int validate_indices(struct ht_topk *t) HT_REQUIRES(HT_LOCK_TOPK)
{
    uint64_t before = 0;
    int rc = 0;

    for (uint64_t i = 0; !rc && i < t->count; i += t->entries.count) {
        rc = load_entries(t, i, false);
        for (uint64_t k = 0; !rc && k < t->entries.count; k++) {
            uint64_t at = ht_le32_load(t->entries.index + 4 * k);
            if (at >= t->elements)
                rc = refuse_topk(t, "entry %llu: index %llu of %llu elements", (ull)(i + k), (ull)at, (ull)t->elements);
            else if (i + k && at <= before)
                rc = refuse_topk(t, "entry %llu: index %llu after %llu; indices must increase", (ull)(i + k), (ull)at,
                                 (ull)before);
            before = at;
        }
    }
    return rc;
}

static int validate_topk(struct ht_topk *t, uint8_t grad_dtype) HT_REQUIRES(HT_LOCK_TOPK)
{
    struct ht_topk_header h;

    if (!ht_interval_set_cover(&t->written, 0, HEADER_BYTES)) {
        (void)refuse_topk(t, "%llu bytes are no whole header of %d", (ull)t->written_bytes, HEADER_BYTES);
        return -EAGAIN;
    }
    int rc = ht_opt_read_all(t->spool, 0, &h, sizeof(h));
    if (!rc)
        rc = validate_header(t, &h, grad_dtype);
    if (!rc)
        rc = validate_length(t);
    return rc ? rc : validate_indices(t);
}

/* ------------------------------------------------------------------- apply */

/* buf: gradient bytes from off on, all zeros. Windows come in order. */
static int fill_window(void *ctx, uint64_t off, void *buf, size_t len) HT_REQUIRES(HT_LOCK_TOPK)
{
    struct ht_topk *t = ctx;
    struct entries *e = &t->entries;
    uint8_t grad_dtype = t->param->shape.grad_dtype, size = t->param->shape.g_bytes;

    for (uint64_t end = (off + len) / size; t->next < t->count; t->next++) {
        if (t->next >= e->first + e->count) {
            int rc = load_entries(t, t->next, true);
            if (rc)
                return rc;
        }
        uint64_t at = ht_le32_load(e->index + 4 * (t->next - e->first));
        const uint8_t *value = e->value + (t->next - e->first) * t->value_bytes;
        if (at >= end)
            return 0;
        float x = ht_kernel_element(value, t->dtype, 0);
        uint8_t *to = (uint8_t *)buf + (at * size - off);
        memcpy(to, t->dtype == grad_dtype ? (const void *)value : &x, size);
    }
    return 0;
}

static int flush_locked(struct ht_topk *t) HT_REQUIRES(HT_LOCK_TOPK)
{
    struct ht_optim *o = t->param->o;

    if (!t->written.count)
        return 0;
    lock(o);
    uint8_t grad_dtype = t->param->shape.grad_dtype;
    t->elements = t->param->shape.elements;
    unlock(o);
    int rc = validate_topk(t, grad_dtype);
    bool validated = !rc;
    if (validated) { /* from here on errors are reported as those of a dense gradient */
        t->next = t->entries.first = t->entries.count = 0;
        rc = ht_opt_grad_make(t->grad, t->window, sizeof(t->window), fill_window, t);
        rc = rc ? rc : ht_grad_flush(t->grad);
    } else {
        report_topk(t, rc);
    }
    if (validated || rc != -EAGAIN)
        forget_spool(t);
    return rc == -EAGAIN ? -EINVAL : rc;
}

int ht_topk_flush(struct ht_topk *t)
{
    ht_mutex_lock(topk_lock(t));
    forget_older(t);
    int rc = flush_locked(t);
    ht_mutex_unlock(topk_lock(t));
    return rc;
}
