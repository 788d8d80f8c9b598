/* SPDX-License-Identifier: Apache-2.0 */
/* The table of participants: record types that do not overlap, and the order of their lives. */
#include <hitrain/format.h>

#include "fs/ns/ns.h"
#include "fs/participants/participants.h"
#include "optim/optim.h"
#include "tests/support/dev.h"
#include "tests/support/suite.h"
#include "tiering/api/background.h"
#include "tiering/api/store.h"

enum { DEVICE_BYTES = 16 << 20 };

static struct ht_dev *dev;
static struct ht_store *store;
static struct ht_participants participants;

static bool threads; /* the next store has its own */

static void open_store(void)
{
    struct ht_store_opts opts = {
        .dram_bytes = 8 << 20, .staging_bytes = 16 << 20, .numa_node = HT_NUMA_OFF, .no_threads = !threads};

    ck_assert_int_eq(ht_store_new(&dev, 1, &opts, &store), 0);
}

static int make(const struct ht_optim_setup *optim)
{
    static const struct ht_ns_setup ns;
    const struct ht_participants_setup setup = {{[HT_PARTICIPANT_NS] = &ns, [HT_PARTICIPANT_OPT] = optim}};

    open_store();
    return ht_participants_new(store, &setup, &participants);
}

static void format(void)
{
    struct ht_format_opts opts = {0};
    struct ht_super sb;

    ck_assert_int_eq(dev_open_ram(DEVICE_BYTES, 512, &dev), 0);
    ck_assert_int_eq(ht_super_format(&dev, 1, &opts, &sb), 0);
}

TEST(record_types_are_given_to_one_participant_each)
{
#define RANGE(ID, name, first, last) {first, last},
    static const struct {
        unsigned first, last;
    } range[] = {HT_PARTICIPANTS(RANGE)};
#undef RANGE

    for (unsigned i = 0; i < HT_PARTICIPANT_COUNT; i++) {
        ck_assert_uint_le(range[i].first, range[i].last);
        ck_assert_uint_gt(range[i].first, HT_REC_CHUNK_DEL);
        ck_assert_uint_le(range[i].last, UINT16_MAX);
        for (unsigned k = 0; k < i; k++)
            ck_assert(range[i].first > range[k].last || range[i].last < range[k].first);
    }
}

TEST(all_participants_are_made_started_and_freed)
{
    const struct ht_optim_hooks hooks = {0};
    const struct ht_optim_setup optim = {.threads = 1, .hooks = &hooks};

    format();
    for (unsigned mounts = 0; mounts < 2; mounts++) {
        ck_assert_int_eq(make(&optim), 0);
        for (unsigned i = 0; i < HT_PARTICIPANT_COUNT; i++)
            ck_assert_ptr_nonnull(participants.of[i]);
        ck_assert_int_eq(ht_store_mount(store), 0);
        ck_assert_int_eq(ht_participants_start(&participants), 0);
        ht_optim_stop(participants.of[HT_PARTICIPANT_OPT]);
        ck_assert_int_eq(ht_store_unmount(store), 0);
        ht_participants_free(&participants);
        for (unsigned i = 0; i < HT_PARTICIPANT_COUNT; i++)
            ck_assert_ptr_null(participants.of[i]);
        ht_store_close(store);
    }
    ht_dev_close(dev);
}

/* Registers others, of record types that no participant has; returns how many the store took. */
static unsigned register_others(unsigned most)
{
    unsigned n = 0;

    for (; n < most; n++) {
        const struct ht_participant other = {.type_first = (uint16_t)(1000 + n), .type_last = (uint16_t)(1000 + n)};
        if (ht_store_register(store, &other))
            break;
    }
    return n;
}

/* The first one gets the store's last place. The address sanitizer sees it leak if it does not go. */
TEST(what_was_made_goes_when_one_fails)
{
    static const struct ht_ns_setup ns;
    const struct ht_optim_hooks hooks = {0};
    const struct ht_optim_setup optim = {.threads = 1, .hooks = &hooks};
    const struct ht_participants_setup setup = {{[HT_PARTICIPANT_NS] = &ns, [HT_PARTICIPANT_OPT] = &optim}};

    format();
    open_store();
    unsigned places = register_others(1000);
    ck_assert_uint_lt(places, 1000);
    ht_store_close(store);
    open_store();
    ck_assert_uint_eq(register_others(places - 1), places - 1);
    ck_assert_int_eq(ht_participants_new(store, &setup, &participants), -EBUSY);
    for (unsigned i = 0; i < HT_PARTICIPANT_COUNT; i++)
        ck_assert_ptr_null(participants.of[i]);
    ht_store_close(store);
    ht_dev_close(dev);
}

struct asked {
    _Atomic bool inside, gone;
    _Atomic bool late; /* a call that the participants did not outlive */
};

/* Stays inside until they are gone, or for a time in which they would be if nothing kept them. */
static bool ask(void *ctx, uint64_t oid)
{
    struct asked *a = ctx;

    (void)oid;
    a->inside = true;
    for (unsigned i = 0; i < 200 && !a->gone; i++)
        usleep(1000);
    a->late = a->late || a->gone;
    return false;
}

/* A store that ends as in a crash has its threads still: they call into participants, as for names that are asked. */
TEST(no_thread_calls_participants_that_are_gone)
{
    const struct ht_optim_hooks hooks = {0};
    const struct ht_optim_setup optim = {.threads = 1, .hooks = &hooks};
    struct asked a = {0};

    format();
    threads = true;
    ck_assert_int_eq(make(&optim), 0);
    ht_store_set_compress(store, ask, &a);
    ck_assert_int_eq(ht_store_mount(store), 0);
    ck_assert_int_eq(ht_participants_start(&participants), 0);
    ht_store_wake_compress(store);
    while (!a.inside)
        usleep(1000);
    ht_optim_stop(participants.of[HT_PARTICIPANT_OPT]);
    a.inside = false;
    while (!a.inside) {
        ht_store_wake_compress(store);
        usleep(1000);
    }
    ht_participants_free(&participants);
    a.gone = true;
    ht_store_wake_compress(store);
    ht_store_close(store);
    ck_assert(!a.late);
    ht_dev_close(dev);
    threads = false;
}

RUN_TESTS("participants")
