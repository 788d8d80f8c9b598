/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step_digest.c - see step_digest.h. Owners, modes, access lists and times are left out: another machine has other
 * users. So are the attributes that say where content lies, and how it is stored.
 */
#include "tiering/base/step_digest.h"

#include <hitrain/words.h>
#include "tiering/base/buf.h"

static const char domain[] = "hitrain step 1";

static void put_u64(struct ht_digest *d, uint64_t v)
{
    uint8_t bytes[8];

    ht_le64_store(bytes, v);
    ht_hash128_sum_add(d->sum, bytes, sizeof(bytes));
}

static void put_text(struct ht_digest *d, const void *p, size_t len)
{
    put_u64(d, len);
    if (len)
        ht_hash128_sum_add(d->sum, p, len);
}

int ht_digest_begin(struct ht_digest *d, uint64_t step)
{
    int rc = ht_hash128_sum_new(&d->sum);

    if (rc < 0)
        return rc;
    ht_hash128_sum_add(d->sum, domain, sizeof(domain) - 1);
    put_u64(d, step);
    return 0;
}

void ht_digest_put_entry(struct ht_digest *d, enum ht_digest_kind kind, uint64_t size, const char *path,
                         const char *target)
{
    put_u64(d, HT_DIGEST_ENTRY);
    put_u64(d, kind);
    put_u64(d, size);
    put_text(d, path, strlen(path));
    put_text(d, target, strlen(target));
}

static bool counts(const char *name, size_t len)
{
    static const char *const without[] = {HT_XATTR_PREFIX "tier", HT_XATTR_PREFIX "pin", HT_XATTR_PREFIX "compress",
                                          HT_XATTR_PREFIX "cold", HT_FOLLOW_ATTRIBUTE,   HT_STAGING_ATTRIBUTE};

    for (size_t i = 0; i < HT_ARRAY_SIZE(without); i++)
        if (strlen(without[i]) == len && memcmp(without[i], name, len) == 0)
            return false;
    return len > 5 && memcmp(name, "user.", 5) == 0;
}

void ht_digest_put_attribute(struct ht_digest *d, const char *name, size_t name_len, const void *value, size_t len)
{
    if (!counts(name, name_len))
        return;
    put_text(d, name, name_len);
    put_text(d, value, len);
}

void ht_digest_put_attributes_end(struct ht_digest *d)
{
    put_u64(d, 0); /* no name is empty */
}

void ht_digest_put_state(struct ht_digest *d, uint64_t size, const char *name)
{
    put_u64(d, HT_DIGEST_STATE);
    put_u64(d, size);
    put_text(d, name, strlen(name));
}

void ht_digest_put_block(struct ht_digest *d, uint64_t index, const struct ht_hash128 *sum)
{
    put_u64(d, HT_DIGEST_BLOCK);
    put_u64(d, index);
    ht_hash128_sum_add(d->sum, sum->byte, sizeof(sum->byte));
}

struct ht_hash128 ht_digest_get(const struct ht_digest *d)
{
    return ht_hash128_sum_get(d->sum);
}

void ht_digest_end(struct ht_digest *d)
{
    ht_hash128_sum_free(d->sum);
    d->sum = NULL;
}

const char *ht_digest_text(const struct ht_hash128 *h, char buf[HT_DIGEST_TEXT_MAX])
{
    for (size_t i = 0; i < sizeof(h->byte); i++)
        snprintf(buf + 2 * i, 3, "%02x", h->byte[i]);
    return buf;
}
