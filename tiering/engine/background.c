/* SPDX-License-Identifier: Apache-2.0 */
/*
 * background.c - the rows of the lane `background` for operators: figures, pause and resume. A new row needs nothing.
 * And the lane for a pool of threads of an upper folder.
 */
#include "tiering/object/context.h"
#include "tiering/engine/engine_priv.h"

const char *ht_background_state_word(enum ht_background_state state)
{
    static const char *const words[] = {"idle", "working", "blocked", "paused", "off"};

    return words[state];
}

int ht_store_background_stat(struct ht_store *s, unsigned index, struct ht_background_stat *out)
{
    const struct ht_lane *l = &s->engine->lane[HT_LANE_BACKGROUND];

    if (index >= l->rows)
        return -ENOENT;
    struct ht_row *r = l->row[index];
    ht_row_figures(r, out);
    out->engine = r->type->name;
    out->figure = r->type->figure;
    out->figures = r->type->figures;
    for (unsigned i = 0; i < r->type->figures; i++)
        out->value[i] = r->figure[i];
    if (r->type->values)
        r->type->values(r->ctx, out->value);
    return 0;
}

static int pause_row(struct ht_row *r)
{
    ht_row_pause(r);
    return 0;
}

/* Returns the first error, after the last row. */
static int each(struct ht_store *s, const char *engine, int (*change)(struct ht_row *r))
{
    const struct ht_lane *l = &s->engine->lane[HT_LANE_BACKGROUND];
    int rc = engine ? -ENOENT : 0;

    for (unsigned i = 0; i < l->rows; i++) {
        if (engine && strcmp(engine, l->row[i]->type->name) != 0)
            continue;
        int one = change(l->row[i]);
        rc = rc && rc != -ENOENT ? rc : one;
    }
    return rc;
}

int ht_store_background_pause(struct ht_store *s, const char *engine)
{
    return each(s, engine, pause_row);
}

int ht_store_background_resume(struct ht_store *s, const char *engine)
{
    return each(s, engine, ht_row_resume);
}

/* ------------------------------------------------------------------ lending */

static struct ht_lane *lane_of(struct ht_store *s)
{
    return &s->engine->lane[HT_LANE_BACKGROUND];
}

void ht_background_reads(bool on)
{
    ht_io_share_set(on);
    (void)ht_io_class_set(on ? HT_IO_BACKGROUND : HT_IO_URGENT);
}

bool ht_store_background_lend(struct ht_store *s)
{
    if (!s->engine->started)
        return false;
    ht_lane_lend(lane_of(s));
    return true;
}

void ht_store_background_take_back(struct ht_store *s)
{
    ht_store_background_recall(s);
    ht_lane_take_back(lane_of(s));
}

bool ht_store_background_serve(struct ht_store *s, bool once)
{
    ht_gate_heed(&lane_of(s)->recalled);
    bool more = ht_lane_serve(lane_of(s), once);
    ht_gate_heed(NULL);
    return more;
}

void ht_store_background_recall(struct ht_store *s)
{
    ht_lane_recall(lane_of(s));
    ht_gate_recall(&s->gate);
}
