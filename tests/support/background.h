/* SPDX-License-Identifier: Apache-2.0 */
/* background.h - work in the background of a store, for tests. */
#pragma once

#include <check.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/background_priv.h"
#include "tiering/api/background.h"
#include "tiering/engine/engine.h"

static inline struct ht_background_stat background_stat(struct ht_store *s, const char *engine)
{
    struct ht_background_stat st;

    for (unsigned i = 0; ht_store_background_stat(s, i, &st) == 0; i++)
        if (strcmp(st.engine, engine) == 0)
            return st;
    ck_abort_msg("no engine %s", engine);
}

static inline uint64_t background_figure(struct ht_store *s, const char *engine, const char *key)
{
    struct ht_background_stat st = background_stat(s, engine);

    for (unsigned i = 0; i < st.figures; i++)
        if (strcmp(st.figure[i].key, key) == 0)
            return st.value[i];
    ck_abort_msg("no figure %s", key);
}

/* For ht_store_set_compress: each object may be compressed. */
static inline bool all_may(void *ctx, uint64_t oid)
{
    (void)ctx;
    (void)oid;
    return true;
}

/*
 * A whole run of scrub in this thread, whose I/O comes in the same order each time. The row is paused meanwhile, so no
 * other thread makes a step of it. Nothing here asserts: a script may run it where no memory is left.
 */
static inline int background_scrub(struct ht_store *s)
{
    struct ht_budget b = {.most_bytes = UINT64_MAX, .until_ns = UINT64_MAX, .may_be_long = true};
    struct ht_scrub_stats st;

    int rc = ht_store_background_pause(s, "scrub");
    if (!rc)
        rc = ht_store_scrub_start(s);
    while (!rc && (ht_store_scrub_stats(s, &st), st.state == HT_SCRUB_RUNNING))
        if (ht_scrub_engine.step(s, &b) == HT_STEP_BLOCKED)
            usleep(1000);
    /* Its thread makes a last step, which finds no run, unless there is no memory for a thread. */
    uint64_t steps = background_stat(s, "scrub").steps;
    bool steps_again = !ht_store_background_resume(s, "scrub") && !rc;
    while (steps_again && background_stat(s, "scrub").steps == steps)
        usleep(100);
    return rc ? rc : st.state == HT_SCRUB_COMPLETE ? 0 : -EIO;
}
