/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/tier/runs.h"

static_assert(HT_RUN_NEAR == 8, "seen has a bit for each");

int ht_runs_init(struct ht_runs *r)
{
    *r = (struct ht_runs){.run = calloc(HT_RUNS_MIN, sizeof(*r->run)), .size = HT_RUNS_MIN};
    return r->run ? 0 : -ENOMEM;
}

void ht_runs_destroy(struct ht_runs *r)
{
    free(r->run);
    r->run = NULL;
}

uint64_t ht_runs_oldest(const struct ht_runs *r)
{
    return ht_max_u64(r->from, r->count - ht_min_u64(r->count, r->size));
}

static struct ht_run *run_of(const struct ht_runs *r, uint64_t n)
{
    return &r->run[n & (r->size - 1)];
}

static uint64_t *open_of(struct ht_runs *r, const struct ht_run_access *a)
{
    uint64_t h = (a->object * HT_PLAN_USES + a->use) * UINT64_C(0x9e3779b97f4a7c15);

    return &r->open[(h >> 32) % HT_RUNS_OPEN];
}

/* Does the access belong to the run? Then it does so from now on. */
static bool goes_on(struct ht_run *run, const struct ht_run_access *a)
{
    uint32_t back = run->last - a->index;

    if (a->index > run->last) {
        uint32_t ahead = a->index - run->last;
        if (ahead > HT_RUN_NEAR)
            return false;
        run->seen = (uint8_t)(ahead < HT_RUN_NEAR ? run->seen << ahead | 1 : 1);
        run->last = a->index;
        return true;
    }
    if (!a->begins)
        return a->index >= run->first;
    if (back >= HT_RUN_NEAR || run->seen >> back & 1)
        return false;
    run->seen |= (uint8_t)(1u << back);
    if (a->index < run->first)
        run->first = a->index;
    return true;
}

static uint8_t units_of(const struct ht_run_access *a)
{
    uint64_t chunk = UINT64_C(1) << a->chunk_shift, bytes = a->bytes ? ht_min_u64(a->bytes, chunk) : chunk;

    return (uint8_t)ht_min_u64(ht_div_up(bytes, HT_RUN_UNIT), UINT8_MAX);
}

void ht_runs_note(struct ht_runs *r, const struct ht_run_access *a)
{
    uint64_t *open = open_of(r, a);

    if (*open > ht_runs_oldest(r)) {
        struct ht_run *run = run_of(r, *open - 1);
        if (run->object == a->object && run->use == a->use && goes_on(run, a)) {
            run->end_ns = a->now_ns;
            run->last_units = a->index == run->last ? units_of(a) : run->last_units;
            return;
        }
    }
    *run_of(r, r->count) = (struct ht_run){
        .object = a->object,
        .begin_ns = a->now_ns,
        .end_ns = a->now_ns,
        .first = a->index,
        .last = a->index,
        .use = (uint8_t)a->use,
        .seen = 1,
        .chunk_shift = a->chunk_shift,
        .last_units = units_of(a),
        .pinned = a->pinned,
    };
    *open = ++r->count;
}

uint32_t ht_runs_copy(const struct ht_runs *r, uint64_t from, uint32_t most, struct ht_run *to)
{
    uint32_t n = (uint32_t)ht_min_u64(r->count - from, most);

    assert(from >= ht_runs_oldest(r) && from <= r->count);
    for (uint32_t i = 0; i < n; i++)
        to[i] = *run_of(r, from + i);
    return n;
}

struct ht_run *ht_runs_replace(struct ht_runs *r, struct ht_run *run, uint32_t size)
{
    struct ht_run *was = r->run;

    assert(size && (size & (size - 1)) == 0);
    r->run = run;
    r->size = size;
    r->from = r->count;
    return was;
}

/* ------------------------------------------------------------------ period */

/*
 * The distances between occurrences of the newest keys are candidates. Samples reject most candidates at once, also by
 * their order. For the others the windows of that length in the last half of the sequence are compared as sets with
 * counts, each with the one before it.
 */
enum {
    NEWEST = 16,       /* keys that give candidates */
    DISTANCES = 8,     /* of each of them */
    SAMPLES = 64,      /* of a window */
    COMPARED_MAX = 16, /* candidates that samples do not reject */
    SLACK = 16,        /* places that an access may be away from where it was a period before */
    NEAR_PART = 16,    /* of a period: others are about as long */
    OTHERS_PART = 50   /* of the accesses one may be another one */
};

struct sequence {
    uint32_t n, keys;
    uint32_t *id; /* of each access: a number from 0 for each key */
    int32_t *count;
};

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 31) * UINT64_C(0x9e3779b97f4a7c15);
    return x ^ x >> 29;
}

/* Numbers the keys. table: places, a power of two and at least twice the number of keys, of 1 + the key's number. */
static int number_keys(struct sequence *q, const uint64_t key[], uint32_t *table, uint32_t places, uint64_t *known)
{
    for (uint32_t i = 0; i < q->n; i++) {
        uint32_t at = (uint32_t)mix(key[i]) & (places - 1);
        while (table[at] && known[table[at] - 1] != key[i])
            at = (at + 1) & (places - 1);
        if (!table[at]) {
            if (q->keys == HT_PERIOD_KEYS_MAX)
                return -E2BIG;
            known[q->keys] = key[i];
            table[at] = ++q->keys;
        }
        q->id[i] = table[at] - 1;
    }
    return 0;
}

static int open_sequence(struct sequence *q, const uint64_t key[])
{
    uint32_t most = (uint32_t)ht_min_u64(q->n, HT_PERIOD_KEYS_MAX), places = 2;

    while (places < 2 * most)
        places *= 2;
    uint32_t *table = calloc(places, sizeof(*table));
    uint64_t *known = malloc(most * sizeof(*known));
    q->id = malloc(q->n * sizeof(*q->id));
    int rc = table && known && q->id ? number_keys(q, key, table, places, known) : -ENOMEM;
    free(table);
    free(known);
    if (!rc) {
        q->count = calloc(q->keys, sizeof(*q->count));
        rc = q->count ? 0 : -ENOMEM;
    }
    return rc;
}

/* ------------------------------------------------------------- candidates */

static bool occurs_near(const struct sequence *q, uint32_t id, uint32_t at, uint32_t slack)
{
    uint32_t from = at - (uint32_t)ht_min_u64(at, slack), to = (uint32_t)ht_min_u64(at + slack + 1, q->n);

    for (uint32_t i = from; i < to; i++)
        if (q->id[i] == id)
            return true;
    return false;
}

/* The order counts, too: forward and then backward over the same tensors is one step. */
static bool looks_alike(const struct sequence *q, uint32_t period)
{
    uint32_t samples = (uint32_t)ht_min_u64(period, SAMPLES), slack = (uint32_t)ht_min_u64(period / 3, SLACK),
             alike = 0;

    for (uint32_t k = 0; k < samples; k++) {
        uint32_t i = q->n - 1 - (uint32_t)((uint64_t)period * k / samples);
        alike += occurs_near(q, q->id[i], i - period, slack);
    }
    return 2 * alike > samples;
}

/* Accesses of the window before end that the one before it does not have. */
static uint32_t count_others(const struct sequence *q, uint32_t period, uint32_t end)
{
    uint32_t others = 0;

    for (uint32_t i = end - 2 * period; i < end - period; i++)
        q->count[q->id[i]]++;
    for (uint32_t i = end - period; i < end; i++)
        q->count[q->id[i]]--;
    for (uint32_t i = end - 2 * period; i < end; i++) {
        int32_t left = q->count[q->id[i]];
        others += (uint32_t)(left < 0 ? -left : left);
        q->count[q->id[i]] = 0;
    }
    return others / 2;
}

/* The most accesses that a window has and the one before it does not, in the last half of the sequence. */
static uint32_t worst_others(const struct sequence *q, uint32_t period)
{
    uint32_t worst = 0, from = q->n - (uint32_t)ht_max_u64(q->n / 2, 2 * period);

    for (uint32_t end = q->n; end - from >= 2 * period && worst <= period / OTHERS_PART; end -= period)
        worst = (uint32_t)ht_max_u64(worst, count_others(q, period, end));
    return worst;
}

/* Distances from the newest accesses to earlier ones of the same key, ascending. */
static unsigned find_candidates(const struct sequence *q, uint64_t candidate[NEWEST * DISTANCES])
{
    unsigned found = 0, left = 0, distances[NEWEST] = {0};
    uint32_t newest = (uint32_t)ht_min_u64(q->n, NEWEST);

    for (uint32_t k = 0; k < newest; k++) /* the newest of a key stands for it */
        if (!q->count[q->id[q->n - 1 - k]]) {
            q->count[q->id[q->n - 1 - k]] = (int32_t)k + 1;
            left++;
        }
    for (uint32_t i = q->n - 1; i-- > 0 && left > 0;) {
        int32_t k = q->count[q->id[i]] - 1;
        if (k < 0 || i >= q->n - 1 - (uint32_t)k || distances[k] == DISTANCES)
            continue;
        if (distances[k] && q->id[i] == q->id[i + 1]) /* of accesses in a row only the last one */
            continue;
        candidate[found++] = q->n - 1 - (uint32_t)k - i;
        left -= ++distances[k] == DISTANCES;
    }
    for (uint32_t k = 0; k < newest; k++)
        q->count[q->id[q->n - 1 - k]] = 0;
    qsort(candidate, found, sizeof(*candidate), ht_compare_numbers);
    return found;
}

/* The shortest period; or one that is hardly longer and fits better. */
static uint32_t choose(const struct sequence *q, const uint64_t candidate[], unsigned found)
{
    uint32_t best = 0, others_best = 0, before = 0, most = q->n / 2;

    for (unsigned i = 0, compared = 0; i < found && candidate[i] <= most && compared < COMPARED_MAX; i++) {
        uint32_t period = (uint32_t)candidate[i];
        if (period == before || !looks_alike(q, period))
            continue;
        before = period;
        compared++;
        uint32_t others = worst_others(q, period);
        if (others > period / OTHERS_PART || (best && others >= others_best))
            continue;
        if (!best)
            most = (uint32_t)ht_min_u64(most, period + period / NEAR_PART);
        best = period;
        others_best = others;
    }
    return best;
}

int ht_period_find(const uint64_t key[], uint32_t accesses, uint32_t *out_accesses)
{
    struct sequence q = {.n = accesses};
    uint64_t candidate[NEWEST * DISTANCES];

    if (accesses > HT_PERIOD_ACCESSES_MAX)
        return -E2BIG;
    *out_accesses = 0;
    if (accesses < 2)
        return 0;
    int rc = open_sequence(&q, key);
    unsigned found = rc ? 0 : find_candidates(&q, candidate);
    if (found)
        *out_accesses = choose(&q, candidate, found);
    free(q.id);
    free(q.count);
    return rc;
}
