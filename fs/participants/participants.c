/* SPDX-License-Identifier: Apache-2.0 */
/* participants.c - walks the table of participants. */
#include "fs/participants/participants.h"

#include "tiering/api/store.h"

#define ADDRESS(ID, name, first, last) &ht_participant_##name,
static const struct ht_participant_type *const types[HT_PARTICIPANT_COUNT] = {HT_PARTICIPANTS(ADDRESS)};
#undef ADDRESS

int ht_participants_new(struct ht_store *s, const struct ht_participants_setup *setup, struct ht_participants *out)
{
    int rc = 0;

    *out = (struct ht_participants){.store = s};
    for (unsigned i = 0; rc == 0 && i < HT_PARTICIPANT_COUNT; i++)
        rc = types[i]->make(s, setup->of[i], &out->of[i]);
    if (rc)
        ht_participants_free(out);
    return rc;
}

int ht_participants_start(struct ht_participants *p)
{
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < HT_PARTICIPANT_COUNT; i++)
        rc = types[i]->start ? types[i]->start(p->of[i]) : 0;
    return rc;
}

void ht_participants_free(struct ht_participants *p)
{
    if (p->store)
        ht_store_stop(p->store);
    p->store = NULL;
    for (unsigned i = HT_PARTICIPANT_COUNT; i > 0; i--) {
        if (p->of[i - 1])
            types[i - 1]->free(p->of[i - 1]);
        p->of[i - 1] = NULL;
    }
}
