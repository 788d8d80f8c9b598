/* SPDX-License-Identifier: Apache-2.0 */
/*
 * digest.c - the records of a stream in the digest of their step (tiering/base/step_digest.h). The digest of an
 * incremental stream covers its base and its runs, too, and that of a stream for a rank its table.
 */
#include "mount-helpers/stream/stream.h"

#include <assert.h>

static_assert((int)HT_STREAM_ENTRY == (int)HT_DIGEST_ENTRY && (int)HT_STREAM_STATE == (int)HT_DIGEST_STATE &&
                  (int)HT_STREAM_BLOCK == (int)HT_DIGEST_BLOCK && (int)HT_STREAM_BASE == (int)HT_DIGEST_BASE &&
                  (int)HT_STREAM_SAME == (int)HT_DIGEST_SAME && (int)HT_STREAM_SHARD == (int)HT_DIGEST_SHARD,
              "records and parts of a digest have the same numbers");
static_assert((int)HT_STREAM_DIRECTORY == (int)HT_DIGEST_DIRECTORY && (int)HT_STREAM_FILE == (int)HT_DIGEST_FILE &&
                  (int)HT_STREAM_SYMLINK == (int)HT_DIGEST_SYMLINK && (int)HT_STREAM_LINK == (int)HT_DIGEST_LINK,
              "so have kinds of entries");
static_assert((int)HT_STREAM_BLOCK_BYTES == (int)HT_DIGEST_BLOCK_BYTES &&
                  (int)HT_STREAM_PATH_BYTES_MAX == (int)HT_DIGEST_PATH_BYTES_MAX &&
                  (int)HT_STREAM_DEPTH_MAX == (int)HT_DIGEST_DEPTH_MAX,
              "so have their bounds");

void ht_digest_entry(struct ht_digest *d, const struct ht_stream_entry *e)
{
    struct ht_stream_attributes rest = e->attributes;
    struct ht_stream_attribute a;

    ht_digest_put_entry(d, (enum ht_digest_kind)e->kind, e->size, e->path, e->target);
    while (ht_stream_attribute_next(&rest, &a))
        ht_digest_put_attribute(d, a.name, a.name_len, a.value, a.value_len);
    ht_digest_put_attributes_end(d);
}

void ht_digest_state(struct ht_digest *d, const struct ht_stream_state *s)
{
    ht_digest_put_state(d, s->size, s->name);
}

void ht_digest_base(struct ht_digest *d, const struct ht_stream_base *base)
{
    ht_digest_put_u64(d, HT_DIGEST_BASE);
    ht_digest_put_u64(d, base->step);
    ht_hash128_sum_add(d->sum, base->digest.byte, sizeof(base->digest.byte));
}

void ht_digest_same(struct ht_digest *d, const struct ht_stream_same *s)
{
    ht_digest_put_u64(d, HT_DIGEST_SAME);
    ht_digest_put_u64(d, s->index);
    ht_digest_put_u64(d, s->count);
    ht_digest_put_text(d, s->path, strlen(s->path));
}

void ht_digest_shard(struct ht_digest *d, const struct ht_stream_shard *s)
{
    char text[HT_SHARDS_TEXT_MAX];

    ht_shards_format(&s->table, text);
    ht_digest_put_u64(d, HT_DIGEST_SHARD);
    ht_digest_put_u64(d, s->rank);
    ht_digest_put_u64(d, s->of);
    ht_digest_put_text(d, text, strlen(text));
}
