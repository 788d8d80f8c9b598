/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - see plan.h.
 *
 * The step is divided into segments at the times of accesses, of all of them if there are few. Content is in memory in
 * the whole segment of an access. A heap has the idle periods by their ratio. Each period that is taken lowers the
 * ratio of others, and never raises one. So the ratio of the first is computed again before it is taken, and it goes
 * back if another one is better now. Work is bounded: after so many computations for each
 * access the order of the heap stands.
 */
#include "tiering/tier/plan.h"

#include <stdlib.h>

enum {
    SEGMENTS_MAX = 512,
    SEGMENTS_LARGE = 256, /* for more than LARGE accesses */
    LARGE = 20000,
    AGAIN_MAX = 16, /* computations of a ratio for each access */
    AGAIN_LARGE = 2,
    BACK_MAX = 64 /* accesses of a tensor that are looked at for a change; beyond, it counts as changed */
};
#define AS_GOOD 0.98                    /* of the next ratio: not worth another look */
#define STEP_NS_MAX (UINT64_C(1) << 53) /* a double has each of them; 104 days */
#define LATER_BONUS 1e-3 /* of two equal periods the one that ends first is taken: what is used last in a step stays */

/* Of an idle period, while the plan is made. Segments count from the one after the access. */
struct period {
    float ratio;
    uint16_t segments; /* between the accesses */
    uint16_t from, to; /* away in these: [from, to) */
    bool changed;      /* some access changes the tensor */
};

struct work {
    const struct ht_plan_input *in;
    struct ht_plan *out;
    bool late; /* periods count whose reads cannot end in time */
    uint32_t segments;
    uint64_t at_ns[SEGMENTS_MAX + 1];
    double ns[SEGMENTS_MAX];
    double over[SEGMENTS_MAX];                      /* bytes above the room; below 0: free */
    double read[SEGMENTS_MAX], write[SEGMENTS_MAX]; /* bytes that the devices may still move */
    uint32_t *next, *before;                        /* of each access: the next of its tensor, and the one before */
    uint16_t *segment;
    struct period *period;
    uint32_t *heap, heaped;
    uint32_t *taken, takes;
    uint64_t looks_left; /* until the order of the heap stands */
};

/* A look at a period as it would be now. */
struct look {
    double ratio;
    uint32_t from, to;
    bool reads, writes, late;
    uint64_t fetch_ns;
};

/* ------------------------------------------------------------- the input */

static int check(const struct ht_plan_input *in)
{
    uint64_t before = 0;

    if (in->tensors > HT_PLAN_TENSORS_MAX || in->accesses > HT_PLAN_ACCESSES_MAX)
        return -E2BIG;
    for (uint32_t i = 0; i < in->tensors; i++)
        if (in->tensor[i].bytes == 0)
            return -EINVAL;
    for (uint32_t i = 0; i < in->accesses; i++) {
        const struct ht_plan_access *a = &in->access[i];
        if (a->tensor >= in->tensors || a->time_ns < before || a->time_ns >= in->step_ns || a->use >= HT_PLAN_USES)
            return -EINVAL;
        before = a->time_ns;
    }
    return in->step_ns > 0 && in->step_ns <= STEP_NS_MAX ? 0 : -EINVAL;
}

static int allocate(struct work *w)
{
    size_t n = ht_max_u64(w->in->accesses, 1);

    w->out->idle = calloc(n, sizeof(*w->out->idle));
    w->next = calloc(n, sizeof(*w->next));
    w->before = calloc(n, sizeof(*w->before));
    w->segment = calloc(n, sizeof(*w->segment));
    w->period = calloc(n, sizeof(*w->period));
    w->heap = calloc(n, sizeof(*w->heap));
    w->taken = calloc(n, sizeof(*w->taken));
    return w->out->idle && w->next && w->before && w->segment && w->period && w->heap && w->taken ? 0 : -ENOMEM;
}

static void release(struct work *w)
{
    free(w->next);
    free(w->before);
    free(w->segment);
    free(w->period);
    free(w->heap);
    free(w->taken);
    free(w);
}

/* ---------------------------------------------------------- the time line */

static const struct ht_plan_tensor *tensor_of(const struct work *w, uint32_t i)
{
    return &w->in->tensor[w->in->access[i].tensor];
}

static uint32_t count_times(const struct ht_plan_input *in)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < in->accesses; i++)
        n += i == 0 || in->access[i].time_ns != in->access[i - 1].time_ns;
    return n;
}

/* A segment begins at each time of an access, or at every so many of these. */
static void divide(struct work *w)
{
    const struct ht_plan_input *in = w->in;
    uint32_t times = count_times(in), most = in->accesses > LARGE ? SEGMENTS_LARGE : SEGMENTS_MAX, seen = 0;
    uint32_t each = (uint32_t)ht_div_up(times, most);

    for (uint32_t i = 0; i < in->accesses; i++) {
        if (i == 0 || in->access[i].time_ns != in->access[i - 1].time_ns) {
            if (seen % each == 0)
                w->at_ns[w->segments++] = in->access[i].time_ns;
            seen++;
        }
        w->segment[i] = (uint16_t)(w->segments - 1);
    }
    /* The last one goes on until the first access of the next step. */
    w->at_ns[w->segments] = in->step_ns + w->at_ns[0];
    for (uint32_t s = 0; s < w->segments; s++)
        w->ns[s] = (double)(w->at_ns[s + 1] - w->at_ns[s]);
}

static int link_accesses(struct work *w)
{
    const struct ht_plan_input *in = w->in;
    uint32_t *first = malloc(ht_max_u64(in->tensors, 1) * 2 * sizeof(*first));

    if (!first)
        return -ENOMEM;
    uint32_t *last = first + in->tensors;
    for (uint32_t i = 0; i < in->tensors; i++)
        first[i] = UINT32_MAX;
    for (uint32_t i = 0; i < in->accesses; i++) {
        uint32_t t = in->access[i].tensor;
        if (first[t] == UINT32_MAX)
            first[t] = i;
        else
            w->next[last[t]] = i;
        last[t] = i;
    }
    double bytes = 0;
    for (uint32_t t = 0; t < in->tensors; t++)
        if (first[t] != UINT32_MAX) {
            w->next[last[t]] = first[t];
            bytes += in->tensor[t].pinned ? 0 : (double)in->tensor[t].bytes;
        }
    for (uint32_t s = 0; s < w->segments; s++) {
        w->over[s] = bytes - (double)in->room_bytes;
        w->read[s] = w->ns[s] * 1e-9 * (double)in->read_bytes_per_s;
        w->write[s] = w->ns[s] * 1e-9 * (double)in->write_bytes_per_s;
    }
    for (uint32_t i = 0; i < in->accesses; i++) {
        w->before[w->next[i]] = i;
        if (in->access[i].use != HT_PLAN_READ)
            first[in->access[i].tensor] = UINT32_MAX;
    }
    for (uint32_t i = 0; i < in->accesses; i++)
        w->period[i].changed = first[in->access[i].tensor] == UINT32_MAX;
    free(first);
    return 0;
}

static bool goes_round(const struct work *w, uint32_t i)
{
    return w->next[i] <= i;
}

static void measure_periods(struct work *w)
{
    for (uint32_t i = 0; i < w->in->accesses; i++) {
        uint32_t from = w->segment[i], to = w->segment[w->next[i]] + (goes_round(w, i) ? w->segments : 0);
        struct ht_plan_idle *idle = &w->out->idle[i];
        w->period[i].segments = (uint16_t)(to > from && !tensor_of(w, i)->pinned ? to - from - 1 : 0);
        idle->next_ns = w->in->access[w->next[i]].time_ns + (goes_round(w, i) ? w->in->step_ns : 0);
    }
}

/* The segment k segments after the one that follows an access. */
static uint32_t segment_of(const struct work *w, uint32_t i, uint32_t k)
{
    uint32_t s = w->segment[i] + 1u + k;

    return s >= w->segments ? s - w->segments : s;
}

/* ------------------------------------------------------ looking at a period */

/* Does the content have changes after this access that no device has? */
static bool is_dirty(const struct work *w, uint32_t i)
{
    const struct ht_plan_input *in = w->in;

    if (tensor_of(w, i)->stored || !w->period[i].changed || in->access[i].use == HT_PLAN_CONSUME)
        return false;
    if (in->access[i].use != HT_PLAN_READ)
        return true;
    uint32_t k = w->before[i];
    for (unsigned n = 0; k != i && n < BACK_MAX; n++, k = w->before[k]) {
        if (w->out->idle[k].leaves)
            return false;
        if (in->access[k].use != HT_PLAN_READ)
            return true;
    }
    return k != i;
}

/* Finds the segment where a read begins that ends with the period. False: there is too little bandwidth. */
static bool place_read(const struct work *w, uint32_t i, double bytes, struct look *l)
{
    uint32_t k = w->period[i].segments;

    while (k > 0) {
        uint32_t s = segment_of(w, i, --k);
        if (w->read[s] < bytes) {
            bytes -= w->read[s];
            continue;
        }
        /* Others have the end of the segment. */
        double part = (w->read[s] - bytes) / (double)w->in->read_bytes_per_s * 1e9;
        uint64_t at = w->at_ns[s] + (uint64_t)part;
        l->fetch_ns = s <= w->segment[i] ? at + w->in->step_ns : at;
        l->to = k;
        return true;
    }
    return false;
}

/* Finds the segment where a write ends that begins with the period. */
static bool place_write(const struct work *w, uint32_t i, double bytes, struct look *l)
{
    for (uint32_t k = 0; k < w->period[i].segments; k++) {
        double free = w->write[segment_of(w, i, k)];
        if (free >= bytes) {
            l->from = k + 1;
            return true;
        }
        bytes -= free;
    }
    return false;
}

static double saved(const struct work *w, uint32_t i, const struct look *l)
{
    double bytes = (double)tensor_of(w, i)->bytes, sum = 0;

    for (uint32_t k = l->from; k < l->to; k++) {
        uint32_t s = segment_of(w, i, k);
        double over = w->over[s] < bytes ? w->over[s] : bytes;
        sum += over > 0 ? over * w->ns[s] : 0;
    }
    return sum;
}

/* A read that cannot end in time has room from the segment of its access on. */
static void read_late(const struct work *w, uint32_t i, struct look *l)
{
    l->late = true;
    l->to = w->period[i].segments;
    l->fetch_ns = w->at_ns[w->segment[w->next[i]]] + (goes_round(w, i) ? w->in->step_ns : 0);
}

/* Can it leave in this period? */
static bool try_period(const struct work *w, uint32_t i, struct look *l)
{
    const struct ht_plan_input *in = w->in;
    uint64_t bytes = tensor_of(w, i)->bytes;

    *l = (struct look){.to = w->period[i].segments, .fetch_ns = w->out->idle[i].next_ns};
    l->reads = in->access[w->next[i]].use != HT_PLAN_OVERWRITE;
    l->writes = is_dirty(w, i);
    if ((l->reads && !in->read_bytes_per_s) || (l->writes && !in->write_bytes_per_s))
        return false;
    if (l->writes && bytes > in->write_bytes_max - ht_min_u64(w->out->write_bytes, in->write_bytes_max))
        return false;
    if (l->writes && !place_write(w, i, (double)bytes, l))
        return false;
    if (l->reads && !place_read(w, i, (double)bytes, l)) {
        if (!w->late)
            return false;
        read_late(w, i, l);
    }
    return l->from < l->to;
}

static bool look_at(struct work *w, uint32_t i, struct look *l)
{
    const struct ht_plan_input *in = w->in;

    w->looks_left -= w->looks_left > 0;
    if (!w->period[i].segments || !try_period(w, i, l))
        return false;
    double bytes = (double)tensor_of(w, i)->bytes, cost = 1;
    cost += l->reads ? bytes / (double)in->read_bytes_per_s * 1e9 : 0;
    cost += l->writes ? bytes / (double)in->write_bytes_per_s * 1e9 : 0;
    double later = (double)in->access[w->next[i]].time_ns / (double)in->step_ns;
    l->ratio = saved(w, i, l) / cost * (1 - LATER_BONUS * later);
    return l->ratio > 0;
}

/* --------------------------------------------------------------- the heap */

static bool is_better(const struct work *w, uint32_t a, uint32_t b)
{
    return w->period[a].ratio > w->period[b].ratio || (w->period[a].ratio == w->period[b].ratio && a < b);
}

static void sink(struct work *w, uint32_t at)
{
    for (;;) {
        uint32_t best = at;
        for (uint32_t k = 2 * at + 1; k <= 2 * at + 2 && k < w->heaped; k++)
            if (is_better(w, w->heap[k], w->heap[best]))
                best = k;
        if (best == at)
            return;
        uint32_t i = w->heap[at];
        w->heap[at] = w->heap[best];
        w->heap[best] = i;
        at = best;
    }
}

static void make_heap(struct work *w)
{
    uint32_t n = w->in->accesses;
    struct look l;

    w->heaped = 0;
    w->looks_left = (uint64_t)n * (n > LARGE ? AGAIN_LARGE : AGAIN_MAX);
    for (uint32_t i = 0; i < n; i++) {
        if (w->out->idle[i].leaves || !look_at(w, i, &l))
            continue;
        w->period[i].ratio = (float)l.ratio;
        w->heap[w->heaped++] = i;
    }
    for (uint32_t at = w->heaped / 2; at-- > 0;)
        sink(w, at);
}

static void drop_first(struct work *w)
{
    w->heap[0] = w->heap[--w->heaped];
    if (w->heaped)
        sink(w, 0);
}

static double second_ratio(const struct work *w)
{
    double best = 0;

    for (uint32_t k = 1; k <= 2 && k < w->heaped; k++)
        if (w->period[w->heap[k]].ratio > best)
            best = w->period[w->heap[k]].ratio;
    return best;
}

/* ---------------------------------------------------------------- choosing */

static void reserve(double *free, double *left)
{
    double part = *free < *left ? *free : *left;

    *free -= part;
    *left -= part;
}

static void take(struct work *w, uint32_t i, const struct look *l)
{
    struct ht_plan_idle *idle = &w->out->idle[i];
    uint64_t bytes = tensor_of(w, i)->bytes;
    double read = l->reads ? (double)bytes : 0, write = l->writes ? (double)bytes : 0;

    for (uint32_t k = w->period[i].segments; k-- > 0 && read > 0;)
        reserve(&w->read[segment_of(w, i, k)], &read);
    for (uint32_t k = 0; k < w->period[i].segments && write > 0; k++)
        reserve(&w->write[segment_of(w, i, k)], &write);
    for (uint32_t k = l->from; k < l->to; k++)
        w->over[segment_of(w, i, k)] -= (double)bytes;
    w->period[i].from = (uint16_t)l->from;
    w->period[i].to = (uint16_t)l->to;
    idle->leaves = true;
    idle->late = l->late;
    idle->fetch_ns = l->fetch_ns;
    w->out->write_bytes += l->writes ? bytes : 0;
    w->taken[w->takes++] = i;
}

static bool fits(const struct work *w)
{
    for (uint32_t s = 0; s < w->segments; s++)
        if (w->over[s] > 0)
            return false;
    return true;
}

static void choose(struct work *w)
{
    struct look l;

    if (fits(w))
        return;
    make_heap(w);
    while (w->heaped) {
        uint32_t i = w->heap[0];
        if (!look_at(w, i, &l)) {
            drop_first(w);
            continue;
        }
        w->period[i].ratio = (float)l.ratio;
        if (l.ratio < AS_GOOD * second_ratio(w) && w->looks_left) {
            sink(w, 0);
            continue;
        }
        drop_first(w);
        take(w, i, &l);
        if (fits(w))
            return;
    }
}

/* Does it write what a later period of the tensor drops as clean? */
static bool is_written_for_others(const struct work *w, uint32_t i)
{
    uint32_t k = w->next[i];

    if (!is_dirty(w, i))
        return false;
    for (unsigned n = 0; k != i && w->in->access[k].use == HT_PLAN_READ; n++, k = w->next[k])
        if (w->out->idle[k].leaves || n == BACK_MAX)
            return true;
    return false;
}

/* What was taken last was worth least. It stays if that is possible now. */
static void keep_what_fits(struct work *w)
{
    for (uint32_t n = w->takes; n-- > 0;) {
        uint32_t i = w->taken[n], k;
        const struct period *p = &w->period[i];
        double bytes = (double)tensor_of(w, i)->bytes;
        if (is_written_for_others(w, i))
            continue;
        for (k = p->from; k < p->to && w->over[segment_of(w, i, k)] + bytes <= 0;)
            k++;
        if (k < p->to)
            continue;
        for (k = p->from; k < p->to; k++)
            w->over[segment_of(w, i, k)] += bytes;
        w->out->idle[i].leaves = w->out->idle[i].late = false;
    }
}

static void sum_up(struct work *w)
{
    struct ht_plan *p = w->out;
    double peak = -(double)w->in->room_bytes;

    for (uint32_t s = 0; s < w->segments; s++)
        peak = w->over[s] > peak ? w->over[s] : peak;
    peak += (double)w->in->room_bytes;
    p->peak_bytes = peak < 0x1p64 ? (uint64_t)peak : UINT64_MAX;
    p->write_bytes = 0;
    for (uint32_t i = 0; i < w->in->accesses; i++) {
        struct ht_plan_idle *idle = &p->idle[i];
        uint64_t bytes = tensor_of(w, i)->bytes;
        if (!idle->leaves) {
            idle->fetch_ns = idle->next_ns;
            continue;
        }
        p->write_bytes += is_dirty(w, i) ? bytes : 0;
        if (w->in->access[w->next[i]].use != HT_PLAN_OVERWRITE)
            p->read_bytes += ht_min_u64(bytes, UINT64_MAX - p->read_bytes);
        p->late_bytes += idle->late ? ht_min_u64(bytes, UINT64_MAX - p->late_bytes) : 0;
    }
}

int ht_plan_make(const struct ht_plan_input *in, struct ht_plan *out)
{
    int rc = check(in);

    *out = (struct ht_plan){0};
    if (rc)
        return rc;
    struct work *w = calloc(1, sizeof(*w));
    if (!w)
        return -ENOMEM;
    w->in = in;
    w->out = out;
    rc = allocate(w);
    if (!rc && in->accesses) {
        divide(w);
        rc = link_accesses(w);
    }
    if (!rc && in->accesses) {
        measure_periods(w);
        choose(w);
        w->late = true;
        choose(w);
        keep_what_fits(w);
        sum_up(w);
    }
    release(w);
    if (rc)
        ht_plan_free(out);
    return rc;
}

void ht_plan_free(struct ht_plan *p)
{
    free(p->idle);
    *p = (struct ht_plan){0};
}
