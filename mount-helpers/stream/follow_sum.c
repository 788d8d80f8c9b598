/* SPDX-License-Identifier: Apache-2.0 */
/* follow_sum.c - the sum of a logged step, and the paths in a stream: the same for writer and reader. */
#include "mount-helpers/stream/follow.h"

const char *ht_follow_path_refused(const char *path)
{
    size_t len = strlen(path);

    if (!len || strpbrk(path, "\r\n") || strchr(" \t", path[0]) || strchr(" \t", path[len - 1]))
        return "a path with line breaks, or with blanks at its ends, cannot stand in a command";
    return ht_stream_path_refused(path);
}

/* --------------------------------------------------------------------- sum */

static void add_number(struct ht_follow_sum *s, uint64_t v)
{
    uint8_t bytes[8];

    ht_le64_store(bytes, v);
    ht_hash128_sum_add(s->sum, bytes, sizeof(bytes));
}

int ht_follow_sum_begin(struct ht_follow_sum *s, uint64_t step)
{
    static const char text[] = "hitrain logged step 1";
    int rc = ht_hash128_sum_new(&s->sum);

    if (rc < 0) {
        s->sum = NULL;
        return rc;
    }
    ht_hash128_sum_add(s->sum, text, sizeof(text) - 1);
    add_number(s, step);
    return 0;
}

void ht_follow_sum_param(struct ht_follow_sum *s, const struct ht_follow_param *p)
{
    add_number(s, HT_FOLLOW_PARAM);
    add_number(s, strlen(p->path));
    ht_hash128_sum_add(s->sum, p->path, strlen(p->path));
    ht_hash128_sum_add(s->sum, p->numbers, HT_FOLLOW_NUMBERS_BYTES);
}

void ht_follow_sum_block(struct ht_follow_sum *s, enum ht_follow_type type, uint64_t at,
                         const struct ht_hash128 *payload)
{
    add_number(s, type);
    add_number(s, at);
    ht_hash128_sum_add(s->sum, payload->byte, sizeof(payload->byte));
}

struct ht_hash128 ht_follow_sum_end(struct ht_follow_sum *s)
{
    struct ht_hash128 sum = ht_hash128_sum_get(s->sum);

    ht_hash128_sum_free(s->sum);
    s->sum = NULL;
    return sum;
}
