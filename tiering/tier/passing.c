/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/tier/passing.h"

enum { PARTS = 16, LEFT_PART = 8 };
#define SMALL_TIER_BYTES (128 * HT_MIB)

/* Of small tiers all but an eighth: there the gradients of one layer may be more than a half. */
void ht_passing_init(struct ht_passing *p, uint64_t tier_bytes, uint64_t least_bytes)
{
    uint64_t most = ht_min_u64(tier_bytes - tier_bytes / LEFT_PART, ht_max_u64(tier_bytes / 2, SMALL_TIER_BYTES));

    *p = (struct ht_passing){
        .least_bytes = least_bytes,
        .most_bytes = ht_max_u64(most, least_bytes),
        .part_bytes = ht_max_u64(tier_bytes / PARTS, HT_MIB),
        .bytes = least_bytes,
        .patience = HT_PASSING_PATIENCE,
    };
}

static void try_room(struct ht_passing *p, uint64_t bytes, uint64_t read_back)
{
    p->trial_bytes = p->bytes;
    p->trial_read_back_bytes = read_back;
    p->bytes = bytes;
    p->trial = p->settling = true;
    p->calm = 0;
}

/* The room of the trial: did a step move fewer bytes with it? Each byte that was read back was written, too. */
static bool was_worth_it(const struct ht_passing *p, uint64_t read_back)
{
    if (p->bytes > p->trial_bytes)
        return p->bytes - p->trial_bytes + 2 * read_back < 2 * p->trial_read_back_bytes;
    return 2 * read_back <= p->trial_bytes - p->bytes;
}

static void end_trial(struct ht_passing *p, uint64_t read_back)
{
    p->trial = false;
    if (was_worth_it(p, read_back))
        return;
    p->bytes = p->trial_bytes;
    p->settling = true;
    p->wait = p->patience;
    p->patience = (unsigned)ht_min_u64(2 * p->patience, HT_PASSING_PATIENCE_MAX);
}

static void begin_trial(struct ht_passing *p, uint64_t read_back)
{
    uint64_t more = ht_max_u64(read_back, p->part_bytes);

    p->calm = read_back ? 0 : p->calm + 1;
    if (read_back && !p->wait && p->bytes < p->most_bytes)
        try_room(p, ht_min_u64(p->bytes + more, p->most_bytes), read_back);
    else if (p->calm >= p->patience && p->bytes > p->least_bytes)
        try_room(p, p->bytes - ht_min_u64(p->part_bytes, p->bytes - p->least_bytes), read_back);
}

bool ht_passing_end_step(struct ht_passing *p, bool waits)
{
    uint64_t read_back = p->read_back_bytes, before = p->bytes;

    p->read_back_bytes = 0;
    p->wait -= p->wait > 0;
    if (waits) {
        p->bytes = p->least_bytes;
        p->trial = p->settling = false;
        p->calm = 0;
    } else if (p->settling) {
        p->settling = false;
    } else if (p->trial) {
        end_trial(p, read_back);
    } else {
        begin_trial(p, read_back);
    }
    return p->bytes != before;
}
