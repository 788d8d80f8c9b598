/* SPDX-License-Identifier: Apache-2.0 */
/* txn.c - the state of txn/, and the clients that have metadata of their own in the log. */

#include "tiering/txn/txn.h"
#include "tiering/object/context.h"
#include "tiering/txn/txn_priv.h"

enum { FIRST_ID = 2 };

int ht_txn_setup(struct ht_store *s)
{
    struct ht_txn *t = calloc(1, sizeof(*t));

    if (!t)
        return -ENOMEM;
    t->tx.s = s;
    ht_list_init(&t->tx.deleted);
    t->next_id = FIRST_ID;
    s->txn = t;
    return 0;
}

void ht_txn_teardown(struct ht_store *s)
{
    struct ht_txn *t = s->txn;

    if (!t)
        return;
    ht_buf_free(&t->tx.records);
    free(t->conflicts);
    free(t);
}

int ht_txn_add_client(struct ht_store *s, const struct ht_meta_client *client)
{
    if (s->txn->clients == HT_CLIENTS_MAX)
        return -EBUSY;
    s->txn->client[s->txn->clients++] = *client;
    return 0;
}

void ht_txn_stats(const struct ht_store *s, struct ht_store_stats *out)
{
    out->next_id = s->txn->next_id;
    out->working_bytes += s->txn->records_bytes;
}
