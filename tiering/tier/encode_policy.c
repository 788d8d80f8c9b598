/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/tier/encode_policy.h"

enum {
    WHOLE = 100, /* one processor */
    MARGIN = 5,  /* the codec is faster than the devices by 5 to 4 */
    MARGIN_OF = 4,
};

bool ht_encode_is_worth(const struct ht_encode_look *l)
{
    if (l->ns > 2 * HT_ENCODE_LOOK_NS || !l->device_known || l->idle_percent + l->encoding_percent < WHOLE)
        return false;
    return !l->codec_bytes_per_s || l->codec_bytes_per_s / MARGIN >= l->device_bytes_per_s / MARGIN_OF;
}

bool ht_encode_tries(struct ht_encode_vain *v)
{
    if (!v->skip)
        return true;
    v->skip--;
    return false;
}

void ht_encode_tried(struct ht_encode_vain *v, bool saved)
{
    if (saved) {
        *v = (struct ht_encode_vain){0};
        return;
    }
    v->in_a_row++;
    v->skip = v->in_a_row < 6 ? 1u << v->in_a_row : HT_ENCODE_SKIP_MAX;
}
