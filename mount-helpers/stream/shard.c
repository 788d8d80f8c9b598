/* SPDX-License-Identifier: Apache-2.0 */
/* shard.c - see shard.h. */
#include "mount-helpers/stream/shard.h"

#include <stdlib.h>

#include "mount-helpers/stream/stream.h"

unsigned ht_stream_shard_former(const struct ht_stream_shard *s)
{
    return s->table.change[s->table.changes - 2].ranks;
}

const char *ht_stream_shard_refused(const struct ht_stream_shard *s)
{
    if (s->table.changes < 2)
        return "the number of ranks has not changed, so nothing changes its owner";
    if (s->rank >= ht_shards_ranks(&s->table))
        return "there is no such rank";
    if (s->of != HT_SHARDS_NONE && s->of >= ht_stream_shard_former(s))
        return "there was no such rank before the change";
    return NULL;
}

bool ht_stream_shard_is_new(const struct ht_stream_shard *s)
{
    for (unsigned q = 0; q < ht_stream_shard_former(s); q++)
        if (ht_shards_renumber(&s->table, q) == s->rank)
            return false;
    return true;
}

unsigned ht_stream_shard_first(const struct ht_stream_shard *s)
{
    return s->table.change[s->table.changes - 1].lost == 0 ? 1 : 0;
}

bool ht_stream_shard_has_files(const struct ht_stream_shard *s)
{
    return ht_stream_shard_is_new(s) && (s->of == HT_SHARDS_NONE || s->of == ht_stream_shard_first(s));
}

/* ------------------------------------------------------------------- blocks */

/* Bytes of a state for each byte of its parameter. Those of the store are f32, and parameters have at least 2 bytes. */
enum { WIDTH_MAX = 4 };

void ht_moves_begin(struct ht_moves *m, const struct ht_stream_shard *s)
{
    *m = (struct ht_moves){.shard = s};
}

void ht_moves_end(struct ht_moves *m)
{
    free(m->before);
    free(m->now);
    m->before = m->now = NULL;
    m->room = 0;
}

static int make_room(struct ht_moves *m, uint64_t blocks)
{
    uint16_t *before, *now;

    if (blocks <= m->room)
        return 0;
    before = realloc(m->before, blocks * sizeof(*before));
    m->before = before ? before : m->before;
    now = realloc(m->now, blocks * sizeof(*now));
    m->now = now ? now : m->now;
    if (!before || !now)
        return -ENOMEM;
    m->room = blocks;
    return 0;
}

/* Does the rank get this block of the parameter, and from the former rank that the stream is of? */
static bool gets(const struct ht_moves *m, uint64_t b)
{
    return m->now[b] == m->shard->rank && ht_shards_renumber(&m->shard->table, m->before[b]) != m->shard->rank;
}

static bool is_sent(const struct ht_moves *m, uint64_t b)
{
    return gets(m, b) && (m->shard->of == HT_SHARDS_NONE || m->shard->of == m->before[b]);
}

/* Counts the file or state of so many bytes. */
static void count(struct ht_moves *m, uint64_t size)
{
    uint64_t block_bytes = m->width * HT_STREAM_BLOCK_BYTES, had = 0, all = 0, share;

    for (uint64_t b = 0; b < m->blocks; b++) {
        uint64_t bytes = ht_min_u64(block_bytes, size - b * block_bytes);
        had += ht_shards_renumber(&m->shard->table, m->before[b]) == m->shard->rank;
        if (!gets(m, b))
            continue;
        all += bytes;
        m->source[m->before[b]] = true;
        m->sum.sent += is_sent(m, b) ? bytes : 0;
    }
    share = m->blocks / ht_shards_ranks(&m->shard->table);
    m->sum.gets += all;
    m->sum.least += share > had ? ht_min_u64((share - had) * block_bytes, all) : 0; /* the last block may be shorter */
}

int ht_moves_file(struct ht_moves *m, bool is_parameter, uint64_t size)
{
    uint64_t blocks = ht_div_up(size, HT_SHARD_BLOCK_BYTES);
    int rc;

    m->file_bytes = 0;
    m->width = 0;
    m->all = ht_stream_shard_has_files(m->shard);
    if (!is_parameter)
        return 0;
    if (!ht_shards_fit(&m->shard->table, blocks))
        return -EFBIG;
    rc = make_room(m, blocks);
    if (rc < 0)
        return rc;
    if (blocks != m->blocks) {
        ht_shards_owners(&m->shard->table, blocks, m->now);
        (void)ht_shards_owners_before(&m->shard->table, blocks, m->before);
        m->blocks = blocks;
    }
    m->file_bytes = size;
    m->width = 1;
    count(m, size);
    return 0;
}

/* All ranks share the number "step". Each other state has one element for each of the parameter's. */
int ht_moves_state(struct ht_moves *m, const char *name, uint64_t size)
{
    m->width = 0;
    m->all = true;
    if (strcmp(name, "step") == 0)
        return 0;
    if (!m->file_bytes || size % m->file_bytes || size / m->file_bytes > WIDTH_MAX)
        return -EINVAL;
    m->width = size / m->file_bytes;
    count(m, size);
    return 0;
}

bool ht_moves_has(const struct ht_moves *m, uint64_t index)
{
    return m->width ? is_sent(m, index / m->width) : m->all;
}

uint64_t ht_moves_next(const struct ht_moves *m, uint64_t index, uint64_t end)
{
    if (!m->width)
        return m->all ? index : end;
    while (index < end && !ht_moves_has(m, index))
        index = (index / m->width + 1) * m->width; /* blocks for one of the parameter come together */
    return ht_min_u64(index, end);
}
