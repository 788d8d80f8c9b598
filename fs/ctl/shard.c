/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard.c - which blocks of a file a shard has. See hidden_priv.h.
 *
 * A table without changes needs no list of blocks. Otherwise maps share lists, which together have a limit. The last
 * few that nobody has stay: finding owners takes time, and each stat needs them.
 */
#include "fs/ctl/hidden_priv.h"

enum { IDLE_MAX = 16 }; /* lists that nobody has, kept for the next stat or open */
#define LISTS_BYTES_MAX (UINT64_C(64) << 20)

struct ht_shard_list {
    struct ht_list link; /* in ctl.shards.lists: recent ones last */
    struct ht_shards table;
    uint64_t blocks; /* of the parameter */
    unsigned rank, users;
    uint32_t count;
    uint32_t block[]; /* in ascending order */
};

int ht_shard_table(struct ht_ctl *c, uint64_t root, unsigned ranks, struct ht_shards *out)
{
    char text[HT_SHARDS_TEXT_MAX];
    ssize_t n = ht_ns_getxattr(c->ns, root, HT_XATTR_PREFIX "shards", text, sizeof(text));
    int rc = n < 0 ? (int)n : ht_shards_parse(text, (size_t)n, out);

    if (rc == -ENODATA && ranks) {
        *out = ht_shards_even(ranks);
        return 0;
    }
    if (rc)
        return rc;
    return !ranks || ht_shards_ranks(out) == ranks ? 0 : -ENOENT;
}

/* ------------------------------------------------------------------- lists */

static uint64_t bytes_of(const struct ht_shard_list *l)
{
    return sizeof(*l) + l->count * sizeof(l->block[0]);
}

static int make_list(const struct ht_shards *table, unsigned rank, uint64_t blocks, struct ht_shard_list **out)
{
    uint16_t *owner = malloc((blocks + 1) * sizeof(*owner));
    struct ht_shard_list *l;
    uint64_t count = 0;

    if (!owner)
        return -ENOMEM;
    ht_shards_owners(table, blocks, owner);
    for (uint64_t b = 0; b < blocks; b++)
        count += owner[b] == rank;
    l = malloc(sizeof(*l) + count * sizeof(l->block[0]));
    if (l) {
        *l = (struct ht_shard_list){.table = *table, .blocks = blocks, .rank = rank, .users = 1};
        for (uint64_t b = 0; b < blocks; b++)
            if (owner[b] == rank)
                l->block[l->count++] = (uint32_t)b;
    }
    free(owner);
    *out = l;
    return l ? 0 : -ENOMEM;
}

static bool same_table(const struct ht_shards *a, const struct ht_shards *b)
{
    return a->changes == b->changes && memcmp(a->change, b->change, a->changes * sizeof(a->change[0])) == 0;
}

static struct ht_shard_list *find_list(struct ht_ctl *c, const struct ht_shards *table, unsigned rank, uint64_t blocks)
    HT_REQUIRES(HT_LOCK_CTL)
{
    ht_list_for_each_entry(l, &c->shards.lists, struct ht_shard_list, link) {
        if (l->rank == rank && l->blocks == blocks && same_table(&l->table, table)) {
            c->shards.idle -= l->users++ == 0;
            ht_list_del(&l->link);
            ht_list_add_tail(&c->shards.lists, &l->link);
            return l;
        }
    }
    return NULL;
}

/* The ones that were not used for longest end, until so many are left, and there is room for so many bytes. */
static void end_idle(struct ht_ctl *c, unsigned left, uint64_t room) HT_REQUIRES(HT_LOCK_CTL)
{
    struct ht_list *pos = c->shards.lists.next;

    while (pos != &c->shards.lists && c->shards.idle &&
           (c->shards.idle > left || c->shards.bytes + room > LISTS_BYTES_MAX)) {
        struct ht_shard_list *l = ht_list_entry(pos, struct ht_shard_list, link);
        pos = pos->next;
        if (l->users)
            continue;
        c->shards.idle--;
        c->shards.bytes -= bytes_of(l);
        ht_list_del(&l->link);
        free(l);
    }
}

static int add_list(struct ht_ctl *c, struct ht_shard_list *l) HT_REQUIRES(HT_LOCK_CTL)
{
    end_idle(c, IDLE_MAX, bytes_of(l));
    if (c->shards.bytes + bytes_of(l) > LISTS_BYTES_MAX)
        return -ENOMEM;
    c->shards.bytes += bytes_of(l);
    ht_list_add_tail(&c->shards.lists, &l->link);
    return 0;
}

static int get_list(struct ht_ctl *c, const struct ht_shards *table, unsigned rank, uint64_t blocks,
                    struct ht_shard_list **out)
{
    ht_mutex_lock(ht_ctl_lock(c));
    *out = find_list(c, table, rank, blocks);
    ht_mutex_unlock(ht_ctl_lock(c));
    if (*out)
        return 0;
    int rc = make_list(table, rank, blocks, out);
    if (rc)
        return rc;
    ht_mutex_lock(ht_ctl_lock(c));
    rc = add_list(c, *out);
    ht_mutex_unlock(ht_ctl_lock(c));
    if (rc)
        free(*out);
    return rc;
}

void ht_shard_forget_all(struct ht_ctl *c)
{
    ht_mutex_lock(ht_ctl_lock(c));
    end_idle(c, 0, 0);
    ht_mutex_unlock(ht_ctl_lock(c));
}

uint64_t ht_shard_block(const struct ht_shard_map *m, uint64_t i)
{
    return m->list ? m->list->block[i] : i * m->ranks + m->rank;
}

int ht_shard_map(struct ht_ctl *c, const struct ht_shards *table, unsigned rank, uint64_t whole_bytes,
                 uint64_t block_bytes, struct ht_shard_map **out)
{
    uint64_t blocks = ht_div_up(whole_bytes, block_bytes);
    unsigned ranks = ht_shards_ranks(table);
    struct ht_shard_map *m;
    int rc = 0;

    if (!ht_shards_fit(table, blocks))
        return -EFBIG;
    m = malloc(sizeof(*m));
    if (!m)
        return -ENOMEM;
    *m = (struct ht_shard_map){.block_bytes = block_bytes, .rank = rank, .ranks = ranks};
    if (table->changes > 1)
        rc = get_list(c, table, rank, blocks, &m->list);
    if (rc) {
        free(m);
        return rc;
    }
    m->count = m->list ? m->list->count : blocks > rank ? (uint32_t)ht_div_up(blocks - rank, ranks) : 0;
    m->bytes = m->count * block_bytes;
    if (m->count && ht_shard_block(m, m->count - 1) == blocks - 1)
        m->bytes -= blocks * block_bytes - whole_bytes;
    *out = m;
    return 0;
}

void ht_shard_map_free(struct ht_ctl *c, struct ht_shard_map *m)
{
    if (m && m->list) {
        ht_mutex_lock(ht_ctl_lock(c));
        c->shards.idle += --m->list->users == 0;
        end_idle(c, IDLE_MAX, 0);
        ht_mutex_unlock(ht_ctl_lock(c));
    }
    free(m);
}

ssize_t ht_shard_each(const struct ht_shard_map *m, uint64_t off, void *buf, size_t len, ht_shard_fn fn, void *ctx)
{
    size_t want = off < m->bytes ? ht_min_u64(len, m->bytes - off) : 0, done = 0;

    while (done < want) {
        uint64_t at = off + done, in_block = at % m->block_bytes;
        size_t piece = ht_min_u64(want - done, m->block_bytes - in_block);
        uint64_t place = ht_shard_block(m, at / m->block_bytes) * m->block_bytes + in_block;
        ssize_t n = fn(ctx, place, (uint8_t *)buf + done, piece);
        if (n < 0)
            return done ? (ssize_t)done : n;
        done += (size_t)n;
        if ((size_t)n < piece)
            break;
    }
    return (ssize_t)done;
}
