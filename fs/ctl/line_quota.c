/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/ctl/line_quota.h"

bool ht_line_quota_take(struct ht_line_quota *q, uint64_t now_ns, uint64_t *out_hidden)
{
    q->paid_ns = ht_max_u64(q->paid_ns, now_ns);
    if (q->paid_ns - now_ns > (HT_LINES_AT_ONCE - 1) * HT_LINE_PERIOD_NS) {
        q->hidden++;
        return false;
    }
    q->paid_ns += HT_LINE_PERIOD_NS;
    *out_hidden = q->hidden;
    q->hidden = 0;
    return true;
}
