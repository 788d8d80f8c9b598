/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/shards.h"

struct ht_shards ht_shards_even(unsigned ranks)
{
    return (struct ht_shards){.changes = 1, .change[0] = {(uint16_t)ranks, HT_SHARDS_NONE}};
}

/* ----------------------------------------------------------------- history */

static bool fits(const struct ht_shards *s, unsigned ranks, unsigned lost)
{
    if (ranks == 0 || ranks > HT_SHARDS_RANKS_MAX)
        return false;
    return lost == HT_SHARDS_NONE || (s->changes && lost < ht_shards_ranks(s));
}

int ht_shards_change(struct ht_shards *s, unsigned ranks, unsigned lost)
{
    if (!fits(s, ranks, lost))
        return -EINVAL;
    if (s->changes == HT_SHARDS_CHANGES_MAX)
        return -E2BIG;
    s->change[s->changes].ranks = (uint16_t)ranks;
    s->change[s->changes].lost = (uint16_t)lost;
    s->changes++;
    return 0;
}

/* At most 3 digits from *at on, without a zero before them. */
static bool take_number(const char *text, size_t len, size_t *at, unsigned *out)
{
    size_t begin = *at;
    unsigned v = 0;

    for (; *at < len && text[*at] >= '0' && text[*at] <= '9' && *at - begin < 4; ++*at)
        v = v * 10 + (unsigned)(text[*at] - '0');
    *out = v;
    return *at > begin && *at - begin < 4 && (text[begin] != '0' || *at - begin == 1);
}

int ht_shards_parse(const char *text, size_t len, struct ht_shards *out)
{
    struct ht_shards s = {0};
    size_t at = 0;
    int rc = len ? 0 : -EINVAL;

    while (rc == 0 && at < len) {
        unsigned ranks, lost = HT_SHARDS_NONE;
        if (s.changes && text[at++] != ' ')
            return -EINVAL;
        if (!take_number(text, len, &at, &ranks))
            return -EINVAL;
        if (at < len && text[at] == '-') {
            at++;
            if (!take_number(text, len, &at, &lost))
                return -EINVAL;
        }
        rc = ht_shards_change(&s, ranks, lost);
    }
    if (rc == 0)
        *out = s;
    return rc;
}

void ht_shards_format(const struct ht_shards *s, char out[HT_SHARDS_TEXT_MAX])
{
    int at = 0;

    for (unsigned i = 0; i < s->changes; i++) {
        at += snprintf(out + at, (size_t)(HT_SHARDS_TEXT_MAX - at), "%s%u", i ? " " : "", s->change[i].ranks);
        if (s->change[i].lost != HT_SHARDS_NONE)
            at += snprintf(out + at, (size_t)(HT_SHARDS_TEXT_MAX - at), "-%u", s->change[i].lost);
    }
}

bool ht_shard_parse_name(const char *name, unsigned *out_rank, unsigned *out_ranks)
{
    size_t len = strlen(name), at = 0;

    if (!take_number(name, len, &at, out_rank) || strncmp(name + at, "of", 2) != 0)
        return false;
    at += 2;
    return take_number(name, len, &at, out_ranks) && at == len && *out_ranks <= HT_SHARDS_RANKS_MAX &&
        *out_rank < *out_ranks;
}

/* ------------------------------------------------------------------ owners */

/* The number of a rank after change i. */
static unsigned number_after(const struct ht_shards *s, unsigned i, unsigned rank)
{
    unsigned lost = s->change[i].lost;

    if (rank == lost)
        return HT_SHARDS_NONE;
    if (s->change[i].ranks < s->change[i - 1].ranks && lost != HT_SHARDS_NONE && rank > lost)
        rank--;
    return rank < s->change[i].ranks ? rank : HT_SHARDS_NONE;
}

unsigned ht_shards_renumber(const struct ht_shards *s, unsigned rank)
{
    return s->changes > 1 ? number_after(s, s->changes - 1, rank) : rank;
}

/* How many blocks each rank has in the end; count: those that it has and need not give up. */
static void share(uint64_t blocks, unsigned ranks, const uint64_t *count, uint64_t *quota)
{
    bool one_more[HT_SHARDS_RANKS_MAX] = {false};

    for (uint64_t n = 0; n < blocks % ranks; n++) {
        unsigned best = HT_SHARDS_NONE;
        for (unsigned r = 0; r < ranks; r++)
            if (!one_more[r] && (best == HT_SHARDS_NONE || count[r] > count[best]))
                best = r;
        one_more[best] = true;
    }
    for (unsigned r = 0; r < ranks; r++)
        quota[r] = blocks / ranks + one_more[r];
}

static void apply_change(const struct ht_shards *s, unsigned i, uint64_t blocks, uint16_t *owner)
{
    uint64_t count[HT_SHARDS_RANKS_MAX] = {0}, quota[HT_SHARDS_RANKS_MAX];
    unsigned ranks = s->change[i].ranks, next = 0;
    uint16_t number[HT_SHARDS_RANKS_MAX];

    for (unsigned r = 0; r < s->change[i - 1].ranks; r++)
        number[r] = (uint16_t)number_after(s, i, r);
    for (uint64_t b = 0; b < blocks; b++) {
        owner[b] = number[owner[b]];
        if (owner[b] != HT_SHARDS_NONE)
            count[owner[b]]++;
    }
    share(blocks, ranks, count, quota);
    for (uint64_t b = 0; b < blocks; b++) {
        if (owner[b] != HT_SHARDS_NONE && quota[owner[b]])
            quota[owner[b]]--; /* it stays */
        else
            owner[b] = HT_SHARDS_NONE;
    }
    for (uint64_t b = 0; b < blocks; b++) {
        if (owner[b] != HT_SHARDS_NONE)
            continue;
        while (!quota[next])
            next = (next + 1) % ranks;
        owner[b] = (uint16_t)next;
        quota[next]--;
        next = (next + 1) % ranks;
    }
}

bool ht_shards_fit(const struct ht_shards *s, uint64_t blocks)
{
    return blocks <= HT_SHARDS_BLOCKS_MAX && blocks * s->changes <= HT_SHARDS_WORK_MAX;
}

void ht_shards_owners(const struct ht_shards *s, uint64_t blocks, uint16_t *owner)
{
    for (uint64_t b = 0; b < blocks; b++)
        owner[b] = (uint16_t)(b % s->change[0].ranks);
    for (unsigned i = 1; i < s->changes; i++)
        apply_change(s, i, blocks, owner);
}

/* A rank keeps at most an even share of what it had, and as many ranks as blocks are over keep one more. */
uint64_t ht_shards_least(const struct ht_shards *s, uint64_t blocks, const uint16_t *before)
{
    uint64_t had[HT_SHARDS_RANKS_MAX] = {0}, stay = 0, more = 0;
    unsigned ranks = ht_shards_ranks(s);

    for (uint64_t b = 0; b < blocks; b++) {
        unsigned r = ht_shards_renumber(s, before[b]);
        if (r != HT_SHARDS_NONE)
            had[r]++;
    }
    for (unsigned r = 0; r < ranks; r++) {
        stay += ht_min_u64(had[r], blocks / ranks);
        more += had[r] > blocks / ranks;
    }
    return blocks - stay - ht_min_u64(more, blocks % ranks);
}
