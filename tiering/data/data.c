/* SPDX-License-Identifier: Apache-2.0 */
/* data.c - sets up and ends the state of data/. */

#include "tiering/data/data.h"
#include "tiering/object/context.h"
#include "tiering/data/cold.h"
#include "tiering/data/data_priv.h"

int ht_data_setup(struct ht_store *s)
{
    s->data = calloc(1, sizeof(*s->data));
    if (!s->data)
        return -ENOMEM;
    ht_list_init(&s->data->writing);
    ht_list_init(&s->data->fetching);
    ht_list_init(&s->data->ahead);
    ht_cond_init(&s->data->fetched);
    ht_cond_init(&s->data->probe_ended);
    ht_decoders_init(&s->data->decoders);
    ht_encoders_init(&s->data->encoders);
    return 0;
}

uint64_t ht_data_bytes(struct ht_store *s)
{
    struct ht_decoders *d = &s->data->decoders;
    struct ht_encoders *e = &s->data->encoders;

    return ht_locked(ht_decoders_lock(d), d->bytes) + ht_locked(ht_encoders_lock(e), e->bytes);
}

void ht_data_teardown(struct ht_store *s)
{
    if (!s->data)
        return;
    ht_probes_end(s);
    ht_cold_disconnect(s);
    pthread_cond_destroy(&s->data->fetched);
    pthread_cond_destroy(&s->data->probe_ended);
    ht_decoders_destroy(&s->data->decoders);
    ht_encoders_destroy(&s->data->encoders);
    free(s->data);
}
