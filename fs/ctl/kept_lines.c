/* SPDX-License-Identifier: Apache-2.0 */
/* kept_lines.c - .hitrain/kept: the kept steps of a model root. */
#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/digest.h"
#include "fs/ctl/feed.h"
#include "tiering/base/json.h"

#include <stdlib.h>

struct kept_feed {
    struct ht_ctl *ctl;
    uint64_t root;
    struct ht_ns_kept *all;
    size_t count, next;
};

static void put_digest(struct ht_ctl *c, uint64_t ino, struct ht_json *j)
{
    char digits[HT_NS_DIGEST_MAX], why[HT_CTL_ERROR_MAX];

    if (ht_ns_kept_digest(c->ns, ino, digits) == 0)
        ht_json_str(j, "digest", digits);
    else if (ht_digest_error(c, ino, why))
        ht_json_str(j, "digest_error", why);
}

static int next_line(void *ctx, uint64_t *after, FILE *to)
{
    struct kept_feed *f = ctx;
    const struct ht_ns_kept *k;
    uint64_t stored_bytes, own_bytes;
    struct ht_ns_kept still;
    struct ht_json j;

    (void)after;
    do {
        if (f->next == f->count)
            return 0;
        k = &f->all[f->next++];
    } while (ht_ns_kept_find(f->ctl->ns, f->root, k->name, &still) || still.ino != k->ino);
    int rc = ht_store_scope_space(f->ctl->store, k->ino, &stored_bytes, &own_bytes);
    if (rc)
        return rc;
    ht_json_init_lines(&j, to);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "name", k->name);
    ht_json_u64(&j, "step", k->step);
    ht_json_u64(&j, "time_ns", (uint64_t)k->time_ns);
    ht_json_u64(&j, "shared_bytes", stored_bytes - own_bytes);
    ht_json_u64(&j, "own_bytes", own_bytes);
    put_digest(f->ctl, k->ino, &j);
    ht_json_end(&j);
    return 1;
}

static void free_feed(void *ctx)
{
    struct kept_feed *f = ctx;

    free(f->all);
    free(f);
}

int ht_kept_feed_open(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller, struct ht_feed **out)
{
    struct kept_feed *f = calloc(1, sizeof(*f));
    int rc = f ? ht_ns_kept_list(c->ns, root, &f->all, &f->count) : -ENOMEM;

    if (rc) {
        free(f);
        return rc;
    }
    f->ctl = c;
    f->root = root;
    return ht_feed_open(next_line, free_feed, f, out);
}
