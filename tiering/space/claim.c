/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/space/claim.h"

#include "tiering/base/hash.h"
#include "tiering/base/log.h"

enum { COPY_Y = 1, COPY_X = 2, LOOK_AGAIN_MS = 200 };

struct ht_claim {
    unsigned count;
    uint64_t nonce;
    struct one {
        struct ht_dev *dev;     /* NULL: it takes no claim */
        struct ht_super before; /* as the device had it */
        struct stamp {
            uint8_t uuid[16];
            uint64_t generation;
        } stamp[COPY_X]; /* of the copies that are no X, as they were then; zeros: not valid */
        bool wrote_y;
    } one[HT_DEVICES_MAX];
};

static uint64_t place_of(const struct ht_dev *dev)
{
    struct {
        uint8_t host[16], boot[16];
        uint64_t place;
    } here;

    ht_host_ids(here.host, here.boot);
    here.place = ht_dev_facts(dev)->place;
    return ht_hash64(here.boot, sizeof(here) - sizeof(here.host), 0);
}

/* A copy as it should be on this device; false: it is damaged, or of another store or time. */
static bool read_copy(const struct ht_super *sb, struct ht_dev *dev, unsigned copy, struct ht_super *out)
{
    return ht_super_read_copy(dev, ht_super_offset(sb->device_bytes[sb->device_index], copy), out) == HT_SUPER_OK &&
        memcmp(out->uuid, sb->uuid, sizeof(out->uuid)) == 0 && out->generation == sb->generation;
}

/* May the mount that wrote this live? */
static bool may_live(const struct ht_super *have, const struct ht_dev *dev)
{
    return have->writer && have->writer_place != place_of(dev) &&
        !((have->writer_flags & HT_WRITER_LOCAL) && ht_dev_facts(dev)->local);
}

static bool owner_may_live(const struct one *o)
{
    struct ht_super y;

    return may_live(&o->before, o->dev) || (read_copy(&o->before, o->dev, COPY_Y, &y) && may_live(&y, o->dev));
}

static struct stamp stamp_of(const struct one *o, unsigned copy)
{
    const struct ht_super *b = &o->before;
    struct stamp stamp = {.generation = 0};
    struct ht_super have;

    if (ht_super_read_copy(o->dev, ht_super_offset(b->device_bytes[b->device_index], copy), &have) == HT_SUPER_OK) {
        memcpy(stamp.uuid, have.uuid, sizeof(stamp.uuid));
        stamp.generation = have.generation;
    }
    return stamp;
}

/*
 * Somebody wrote a superblock since we read ours, and perhaps has the store. A copy of another store that was there
 * before is what an interrupted mkfs has left.
 */
static bool moved_on(const struct one *o)
{
    const struct ht_super *b = &o->before;

    for (unsigned c = 0; c < COPY_X; c++) {
        struct stamp now = stamp_of(o, c);
        bool newer = memcmp(now.uuid, b->uuid, sizeof(now.uuid)) == 0 && now.generation > b->generation;
        if (newer || (now.generation && memcmp(&now, &o->stamp[c], sizeof(now)) != 0))
            return true;
    }
    return false;
}

static int write_copy(const struct one *o, uint64_t nonce, unsigned copy)
{
    struct ht_super with = o->before;

    with.writer = nonce;
    with.writer_place = place_of(o->dev);
    with.writer_flags = HT_WRITER_KNOWN | (ht_dev_facts(o->dev)->local ? HT_WRITER_LOCAL : 0);
    return ht_super_rewrite(&with, o->dev, copy);
}

static bool still_asks(const struct one *o, uint64_t nonce)
{
    struct ht_super x;

    return read_copy(&o->before, o->dev, COPY_X, &x) && x.writer == nonce;
}

static bool all_ask(const struct ht_claim *c)
{
    bool all = true;

    for (unsigned i = 0; i < c->count; i++)
        all &= !c->one[i].dev || still_asks(&c->one[i], c->nonce);
    return all;
}

static const char *first_name(const struct ht_claim *c)
{
    for (unsigned i = 0; i < c->count; i++)
        if (c->one[i].dev)
            return ht_dev_name(c->one[i].dev);
    return "the store";
}

static int refuse(const struct ht_claim *c)
{
    ht_error("%s: another machine, or a mount by another name of the device, has this store in use: unmount it there",
             first_name(c));
    return -EBUSY;
}

/* 0: nobody answered. */
static int wait_for_owner(const struct ht_claim *c)
{
    uint64_t until_ns = ht_now_ns() + HT_CLAIM_WAIT_MS * UINT64_C(1000000);

    ht_info("%s: it was not unmounted, and locks of this machine cannot tell whether another one uses it: waiting %u s "
            "for its answer",
            first_name(c), HT_CLAIM_WAIT_MS / 1000);
    while (ht_now_ns() < until_ns) {
        ht_sleep_ns(LOOK_AGAIN_MS * UINT64_C(1000000));
        if (!all_ask(c))
            return refuse(c);
    }
    return 0;
}

/* X of each device; then perhaps the wait. */
static int ask(struct ht_claim *c)
{
    bool wait = false;

    for (unsigned i = 0; i < c->count; i++) {
        struct one *o = &c->one[i];
        if (!o->dev)
            continue;
        int rc = write_copy(o, c->nonce, COPY_X);
        if (moved_on(o))
            return refuse(c);
        wait |= owner_may_live(o);
        if (rc && owner_may_live(o))
            return rc;
        if (rc)
            o->dev = NULL;
    }
    if (wait)
        return wait_for_owner(c);
    return all_ask(c) ? 0 : refuse(c);
}

static struct ht_claim *new_claim(struct ht_dev *const devs[], unsigned count)
{
    struct ht_claim *c = calloc(1, sizeof(*c));

    if (!c || ht_random(&c->nonce, sizeof(c->nonce))) {
        free(c);
        return NULL;
    }
    c->nonce |= 1; /* not 0 */
    for (unsigned i = 0; i < count; i++) {
        struct one *o = &c->one[c->count];
        struct ht_super_report report;
        if (!devs[i] || ht_dev_facts(devs[i])->rdonly || ht_super_read(devs[i], &o->before, &report) != 0)
            continue;
        c->one[c->count++].dev = devs[i];
        for (unsigned copy = 0; copy < COPY_X; copy++)
            o->stamp[copy] = stamp_of(o, copy);
    }
    return c;
}

/* Y first: who reads only X still finds a claim. */
static void restore(struct ht_claim *c)
{
    for (unsigned i = 0; i < c->count; i++) {
        const struct one *o = &c->one[i];
        int ignored = o->dev && o->wrote_y ? ht_super_rewrite(&o->before, o->dev, COPY_Y) : 0;
        if (o->dev && still_asks(o, c->nonce))
            ignored = ht_super_rewrite(&o->before, o->dev, COPY_X);
        (void)ignored; /* was reported; the nonce alone harms nothing */
    }
}

static void own(struct ht_claim *c, struct ht_super *sb)
{
    sb->writer = sb->mine = c->nonce;
    for (unsigned i = 0; i < c->count; i++) {
        const struct one *o = &c->one[i];
        unsigned index = o->before.device_index;
        if (!o->dev)
            continue;
        sb->claimed |= 1u << index;
        sb->local |= (uint32_t)ht_dev_facts(o->dev)->local << index;
        sb->places[index] = place_of(o->dev);
    }
}

/* Did nobody else have the store since sb was read? */
static bool unchanged(const struct ht_claim *c, const struct ht_super *sb)
{
    uint64_t newest = 0;

    for (unsigned i = 0; i < c->count; i++)
        newest = ht_max_u64(newest, c->one[i].before.generation);
    return newest <= sb->generation;
}

int ht_claim_take(struct ht_super *sb, struct ht_dev *const devs[], unsigned count, struct ht_claim **out)
{
    struct ht_claim *c = new_claim(devs, count);

    if (!c)
        return -ENOMEM;
    int rc = unchanged(c, sb) ? ask(c) : refuse(c);
    for (unsigned i = 0; rc == 0 && i < c->count; i++)
        if (c->one[i].dev)
            c->one[i].wrote_y = write_copy(&c->one[i], c->nonce, COPY_Y) == 0;
    if (rc == 0 && !all_ask(c))
        rc = refuse(c);
    if (rc) {
        free(c);
        return rc;
    }
    own(c, sb);
    *out = c;
    return 0;
}

void ht_claim_undo(struct ht_claim *c, struct ht_super *sb)
{
    restore(c);
    sb->writer = sb->mine = 0;
    sb->claimed = 0;
    free(c);
}

void ht_claim_free(struct ht_claim *c)
{
    free(c);
}

int ht_claim_ask(struct ht_dev *const devs[], unsigned count)
{
    struct ht_claim *c = new_claim(devs, count);
    bool needed = false;
    int rc = c ? 0 : -ENOMEM;

    for (unsigned i = 0; c && i < c->count; i++)
        needed |= owner_may_live(&c->one[i]);
    if (needed)
        rc = ask(c);
    if (needed && rc == 0)
        restore(c);
    free(c);
    return rc;
}

/* ------------------------------------------------------------- the owner */

enum ht_claim_state ht_claim_look(const struct ht_super *sb, struct ht_dev *dev, unsigned index)
{
    bool foreign[HT_SUPER_COPIES] = {false};
    struct ht_super have;

    for (unsigned c = COPY_Y; c <= COPY_X; c++)
        foreign[c] = ht_super_read_copy(dev, ht_super_offset(sb->device_bytes[index], c), &have) == HT_SUPER_OK &&
            ht_super_is_foreign(sb, &have);
    if (foreign[COPY_X] && foreign[COPY_Y])
        return HT_CLAIM_LOST;
    return foreign[COPY_X] ? HT_CLAIM_ASKED : foreign[COPY_Y] ? HT_CLAIM_LATE : HT_CLAIM_OWN;
}

void ht_claim_answer(const struct ht_super *sb, struct ht_dev *dev, unsigned index, enum ht_claim_state state)
{
    struct ht_super mine = *sb;

    mine.device_index = index;
    int ignored = ht_super_rewrite(&mine, dev, state == HT_CLAIM_ASKED ? COPY_X : COPY_Y);
    (void)ignored; /* was reported; the next look tries again */
}
