/* SPDX-License-Identifier: Apache-2.0 */
/* The owners of stored bytes, while their table grows, and idle entries leave it. */
#include "tiering/base/lock.h"
#include "tiering/object/owners.h"

#define FIXTURE_MIB 64
#include "tests/unit/tiering/store/fixture.h"

enum { KEYS = 30000, OPERATIONS = 400000, STEPS_MAX = 64 /* entries of two buckets */ };

static uint32_t owners[KEYS];

static struct ht_ref ref_of(unsigned key)
{
    struct ht_ref ref = {.stored = 4096, .visible = 4096, .shared = 1};
    struct ht_extent e = {.block = 1000 + (uint64_t)key * 3, .blocks = 1};

    if (ht_ref_set(&ref, &e, 1))
        ck_abort();
    return ref;
}

static void expect_owners(unsigned key) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_ref ref = ref_of(key);
    const struct ht_refcount *e = ht_refcount_find(s, &ref);
    uint32_t n = e ? e->owners : 0;

    /* One owner may be without an entry. */
    if (n != owners[key] && (n || owners[key] != 1))
        ck_abort_msg("%u: %u, not %u", key, n, owners[key]);
    if (e && e->by_place.id != ht_ref_place(&ref))
        ck_abort_msg("%u: it has the entry of another place", key);
}

static void expect_all(void) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_id_table *table = &s->frees.refcounts.table;
    size_t entries = 0, single = 0;

    for (unsigned key = 0; key < KEYS; key++)
        expect_owners(key);
    for (size_t b = 0; b < table->buckets.count; b++)
        for (const struct ht_id_link *l = *ht_bucket_at(&table->buckets, b); l; l = l->next, entries++)
            single += ht_container_of(l, const struct ht_refcount, by_place)->owners == 1;
    ck_assert_uint_eq(entries, table->count);
    ck_assert_uint_eq(single, s->frees.refcounts.single);
}

static void add(unsigned key) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_ref ref = ref_of(key);

    if (ht_refcount_add(s, &ref, true))
        ck_abort();
    owners[key] += owners[key] ? 1 : 2; /* the first one is there already */
}

static void drop(unsigned key) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_ref ref = ref_of(key);
    enum ht_refcount_left left = ht_refcount_drop(s, &ref, true);

    if ((left == HT_REFCOUNT_OWNED) != (owners[key] > 1))
        ck_abort_msg("%u: %d with %u owners", key, left, owners[key]);
    owners[key]--;
}

static void drop_all(void) HT_REQUIRES(HT_LOCK_STORE)
{
    for (unsigned key = 0; key < KEYS; key++)
        while (owners[key])
            drop(key);
    ck_assert_uint_eq(s->frees.refcounts.table.count, 0);
}

static void teardown(void)
{
    ht_store_lock(s);
    expect_all();
    drop_all();
    ht_store_unlock(s);
    done();
}

/* Locks as threads do, so that builds that check locks count the steps of each operation. */
static void each(unsigned key, void (*operation)(unsigned))
{
    ht_store_lock(s);
    operation(key);
    ht_store_unlock(s);
}

TEST(the_table_grows_a_little_with_each_entry)
{
    size_t buckets = 0;

    ht_lock_longest(HT_LOCK_STORE);
    for (unsigned key = 0; key < KEYS; key++) {
        each(key, add);
        size_t now = s->frees.refcounts.table.buckets.count;
        ck_assert_uint_le(now, ht_max_u64(buckets + 2, HT_BUCKETS_START + 1));
        buckets = now;
    }
    ck_assert_uint_le(ht_lock_longest(HT_LOCK_STORE).steps, STEPS_MAX);
    ck_assert_uint_ge(buckets, KEYS);
}

TEST(owners_are_counted_while_entries_come_and_go)
{
    uint64_t state = 88172645463325252;

    ht_store_lock(s);
    for (unsigned i = 0; i < OPERATIONS; i++) {
        random_next(&state);
        unsigned key = (unsigned)(state % KEYS), what = (unsigned)(state / KEYS % 16);
        bool growing = i / 40000 % 2 == 0; /* there is more of one or the other in turn */
        if (what == 0)
            s->frees.tx_count++; /* a transaction ends: entries become idle */
        else if (owners[key] && (what < 4 || (!growing && what < 12)))
            drop(key);
        else if (what < 14)
            add(key);
        expect_owners(key);
        if (i % 50000 == 0)
            expect_all();
    }
    ht_store_unlock(s);
}

/* As kept steps that come and go: idle entries make room, so the table stays small. */
TEST(idle_entries_make_room)
{
    enum { AT_ONCE = 1000, ROUNDS = 20 };

    for (unsigned k = 0; k < ROUNDS; k++) {
        for (unsigned i = 0; i < AT_ONCE; i++)
            each(k * AT_ONCE + i, add);
        for (unsigned i = 0; i < AT_ONCE; i++)
            each(k * AT_ONCE + i, drop);
        ht_store_lock(s);
        s->frees.tx_count++;
        ht_store_unlock(s);
    }
    ht_store_lock(s);
    ck_assert_uint_le(s->frees.refcounts.table.count, 2 * AT_ONCE);
    ht_store_unlock(s);
}

/* Entries of the open transaction are not idle. */
TEST(ends_of_the_open_transaction_stay)
{
    ht_store_lock(s);
    for (unsigned key = 0; key < KEYS; key++) {
        add(key);
        drop(key);
    }
    ck_assert_uint_eq(s->frees.refcounts.table.count, KEYS);
    ht_store_unlock(s);
}

/* Nor are those whose end is not durable. */
TEST(ends_that_are_not_durable_stay)
{
    ht_store_lock(s);
    uint64_t lsn = s->frees.last_lsn;
    s->frees.last_lsn = ht_journal_durable(s->journal) + 1;
    for (unsigned key = 0; key < KEYS; key++) {
        add(key);
        drop(key);
        s->frees.tx_count++;
    }
    ck_assert_uint_eq(s->frees.refcounts.table.count, KEYS);
    s->frees.last_lsn = lsn;
    ht_store_unlock(s);
}

TEST(the_memory_of_entries_is_counted)
{
    uint64_t entry = sizeof(struct ht_refcount);

    ht_store_lock(s);
    uint64_t before = s->objects.meta_bytes;
    for (unsigned key = 0; key < KEYS; key++)
        add(key);
    uint64_t table = ht_id_table_bytes(&s->frees.refcounts.table);
    ck_assert_uint_eq(s->objects.meta_bytes, before + KEYS * entry + table);
    drop_all();
    ck_assert_uint_eq(s->objects.meta_bytes, before + table);
    ht_store_unlock(s);
}

/* Even if no thread walks over many chunks. */
TEST(collected_memory_goes_with_the_next_transaction)
{
    struct ht_tx *tx;

    ht_store_lock(s);
    for (unsigned i = 0; i < 2 * HT_TRASH_PIECES_MAX; i++)
        ht_trash_put(s, malloc(sizeof(void *)));
    ck_assert_uint_le(s->trash.pieces, HT_TRASH_PIECES_MAX);
    ht_store_unlock(s);
    ck_assert_int_eq(ht_tx_begin(s, 0, &tx), 0);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    ht_store_lock(s);
    ck_assert_uint_eq(s->trash.pieces, 0);
    ht_store_unlock(s);
}

RUN_TESTS("refcount", .setup = fixture_begin, .teardown = teardown)
