/* SPDX-License-Identifier: Apache-2.0 */
/* background.h - work in the background of a store, for tests. */
#ifndef HITRAIN_TESTS_SUPPORT_BACKGROUND_H
#define HITRAIN_TESTS_SUPPORT_BACKGROUND_H

#include <check.h>
#include <string.h>

#include "tiering/api/background.h"

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

#endif
