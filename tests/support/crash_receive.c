/* SPDX-License-Identifier: Apache-2.0 */
/* crash_receive.c - receiving a step (receive.h) as operations of scripts. The group "received" has its states. */
#include <check.h>

#include "tests/support/crash_scenario.h"
#include "tests/support/receive.h"

/* A cut may leave this state; durable: it must. */
static void note(struct crash_scenario *s, bool durable)
{
    scenario_note(s, "received", receive_hash(&s->k, scenario_params), durable);
}

static void changed(void *ctx)
{
    note(ctx, false);
}

static struct receive receive_of(struct crash_scenario *s)
{
    return (struct receive){.k = &s->k, .params = scenario_params, .changed = changed, .ctx = s};
}

void scenario_receive_begin(struct crash_scenario *s)
{
    struct receive r = receive_of(s);

    ck_assert_int_eq(receive_begin(&r), 0);
}

struct between {
    struct crash_scenario *s;
    void (*fn)(struct crash_scenario *s);
};

static void run_between(void *ctx)
{
    struct between *b = ctx;

    b->fn(b->s);
}

void scenario_receive_files(struct crash_scenario *s, const char *base, uint64_t seed,
                            void (*fn)(struct crash_scenario *s))
{
    struct receive r = receive_of(s);
    struct between b = {s, fn};
    struct ht_ns_kept about = {.ino = 0};

    if (base)
        ck_assert_int_eq(ht_ns_kept_find(s->k.ns, harness_find(&s->k, HT_NS_ROOT_INO, "model"), base, &about), 0);
    r.base = about.ino;
    r.seed = seed;
    r.between = run_between;
    r.ctx = &b;
    ck_assert_int_eq(receive_files(&r), 0);
}

void scenario_receive_commit(struct crash_scenario *s)
{
    struct receive r = receive_of(s);

    ck_assert_int_eq(receive_commit(&r), 0);
    note(s, true);
}

void scenario_receive_publish(struct crash_scenario *s)
{
    struct receive r = receive_of(s);

    ck_assert_int_eq(receive_publish(&r), 0);
    note(s, true);
    ck_assert_int_eq(receive_clean(&s->k), 0);
    note(s, false);
}

void scenario_receive_drop(struct crash_scenario *s)
{
    ck_assert_int_eq(receive_clean(&s->k), 0);
    note(s, false);
}
