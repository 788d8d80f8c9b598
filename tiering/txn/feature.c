/* SPDX-License-Identifier: Apache-2.0 */
/*
 * feature.c - a bit of feat_refuse keeps away programs that do not know what the log is about to name. So it is durable
 * before the first such record.
 */
#include "tiering/base/lock.h"
#include "tiering/base/mutant.h"
#include "tiering/api/check.h"
#include "tiering/api/tx.h"
#include "tiering/object/context.h"
#include "tiering/data/data.h"
#include "tiering/data/members.h"
#include "tiering/data/write_frame.h"
#include "tiering/txn/txn.h"

int ht_store_need_feature(struct ht_store *s, uint64_t bit)
{
    int rc = bit == HT_FEAT_REFUSE_PLANES ? ht_data_need_decoder(s) : 0;

    if (rc)
        return rc;
    ht_mutex_lock(ht_super_mutex(s));
    if (!(s->sb.feat_refuse & bit)) {
        s->sb.feat_refuse |= bit;
        rc = HT_MUTANT("feature-late") ? 0 : ht_store_write_super(s);
        if (rc) /* the next call writes it again */
            s->sb.feat_refuse &= ~bit;
    }
    ht_mutex_unlock(ht_super_mutex(s));
    if (!rc && bit == HT_FEAT_REFUSE_PLANES)
        ht_write_frames_durable(s);
    return rc;
}

int ht_store_mark_redo(struct ht_store *s)
{
    return ht_store_need_feature(s, HT_FEAT_REFUSE_REDO);
}

int ht_store_mark_redo_sparse(struct ht_store *s)
{
    return ht_store_need_feature(s, HT_FEAT_REFUSE_SPARSE);
}

int ht_store_mark_redo_sections(struct ht_store *s)
{
    return ht_store_need_feature(s, HT_FEAT_REFUSE_SECTIONS);
}

int ht_store_mark_redo_near_g(struct ht_store *s)
{
    return ht_store_need_feature(s, HT_FEAT_REFUSE_NEAR_G);
}

int ht_store_mark_feature(struct ht_store *s, uint64_t bit)
{
    return ht_store_need_feature(s, bit);
}
