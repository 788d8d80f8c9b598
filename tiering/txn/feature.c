/* SPDX-License-Identifier: Apache-2.0 */
/*
 * feature.c - bits of feat_refuse keep away programs that do not know what the log is about to name. So it is durable
 * before the first such record.
 */
#include "tiering/base/mutant.h"
#include "tiering/api/tx.h"
#include "tiering/object/context.h"
#include "tiering/data/data.h"
#include "tiering/data/members.h"

int ht_store_need_features(struct ht_store *s, uint64_t bits)
{
    bool frames = bits & HT_FEAT_REFUSE_PLANES;
    int rc = frames ? ht_data_need_decoder(s) : 0;

    if (rc)
        return rc;
    ht_mutex_lock(ht_super_mutex(s));
    uint64_t missing = bits & ~s->sb.feat_refuse;
    if (missing) {
        s->sb.feat_refuse |= missing;
        rc = HT_MUTANT("feature-late") ? 0 : ht_store_write_super(s);
        if (rc) /* the next call writes them again */
            s->sb.feat_refuse &= ~missing;
    }
    ht_mutex_unlock(ht_super_mutex(s));
    if (!rc && frames)
        ht_write_frames_durable(s);
    return rc;
}
