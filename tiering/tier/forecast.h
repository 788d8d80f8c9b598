/* SPDX-License-Identifier: Apache-2.0 */
/*
 * forecast.h - a plan in use: where in the step the accesses are, when a chunk is needed next, and whether the plan
 * still holds. Pure; not locked: the owner does.
 *
 * A forecast is made from the runs of one step (runs.h). Its time counts in steps of the same length: it stands
 * at what was accessed last, and goes on with the clock from there, by a part of a step at most. An access near that
 * place of its own in the plan moves the time; any other is a stranger. After a step in which many accesses were
 * strangers, or many that were planned did not come, the plan did not match; after two of these it is wrong.
 *
 * Content with the most uses in a step stays in memory, as far as there is room; of equals that with the latest use.
 * Other content comes and goes in the order of next uses.
 *
 * Content that programs overwrite in each step is in the plan, but the plan is not followed for it: its newest images
 * are dirty, and only images that are needed soon may go. Other policies keep a part.
 */
#pragma once

#include "tiering/tier/runs.h"

enum { HT_FORECAST_PLACES = 48 }; /* of a step, for the order of eviction */

struct ht_forecast;

struct ht_forecast_input {
    const struct ht_run *run; /* of one step */
    uint32_t runs;
    uint64_t begin_ns, step_ns, now_ns; /* when it began; now by the same clock */
    uint64_t room_bytes;                /* memory for what is not pinned */
};
/*
 * *out_forecast is NULL if all has room. -EINVAL: a step without length, a run without chunks, of no object or before
 * the step. -E2BIG: no units are large enough. -ENOMEM
 */
int ht_forecast_make(const struct ht_forecast_input *in, struct ht_forecast **out_forecast) HT_MUST_CHECK;
void ht_forecast_free(struct ht_forecast *f);
uint64_t ht_forecast_bytes(const struct ht_forecast *f); /* heap */

struct ht_forecast_use {
    bool known;       /* the plan has the chunk and such an access now, and follows it */
    uint64_t next_ns; /* in the forecast's time */
};
struct ht_forecast_use ht_forecast_note(struct ht_forecast *f, const struct ht_run_access *a);
/* The next time when the chunk is needed; known: the plan has it. */
struct ht_forecast_use ht_forecast_next(const struct ht_forecast *f, uint64_t object, uint32_t index);
/* The forecast's time. */
uint64_t ht_forecast_now(const struct ht_forecast *f, uint64_t now_ns);
/* A time as a place in the order of eviction: these count on for ever. */
uint64_t ht_forecast_place(const struct ht_forecast *f, uint64_t time_ns);
/* Its places go on where those of the one before are: images have these. */
void ht_forecast_continue(struct ht_forecast *f, const struct ht_forecast *before, uint64_t now_ns);
bool ht_forecast_is_wrong(const struct ht_forecast *f);
/* Steps take longer or shorter than when it was made. */
bool ht_forecast_has_drifted(const struct ht_forecast *f);

enum ht_forecast_stay { HT_FORECAST_UNKNOWN, HT_FORECAST_STAYS, HT_FORECAST_LEAVES };
/* Does the plan keep it in memory for the whole step? Unknown: the plan has no such content, or does not follow it. */
enum ht_forecast_stay ht_forecast_stays(const struct ht_forecast *f, uint64_t object, uint32_t index);

/* A read that the plan has: of which chunks, and when they are needed. */
struct ht_forecast_fetch {
    uint64_t object;
    uint32_t first, last;
    uint64_t need_ns; /* in the forecast's time */
};
/* The next one that may begin, because it is needed soon. False: there is none yet. */
bool ht_forecast_fetch(struct ht_forecast *f, uint64_t now_ns, struct ht_forecast_fetch *out);
/* It was made, or is not wanted any more: on to the one after it. */
void ht_forecast_fetch_done(struct ht_forecast *f);

struct ht_forecast_figures {
    uint64_t step_ns, units, uses, bytes, stay_bytes;
    uint64_t now_ns;               /* since the step began */
    uint64_t steps, matched_steps; /* since it was made, complete ones */
    uint64_t hits, strangers;      /* accesses that it had, and that it did not have, at their time */
};
void ht_forecast_figures(const struct ht_forecast *f, uint64_t now_ns, struct ht_forecast_figures *out);

/* A part of an object that comes and goes as a whole, and its uses. */
struct ht_forecast_part {
    uint64_t object, offset, bytes;
    unsigned uses;
};
struct ht_forecast_idle {
    uint64_t used_ns, next_ns; /* since the step began */
    uint64_t fetch_ns;         /* reads ahead may begin */
    enum ht_plan_use use;
    bool leaves; /* others may take its room in between */
};
/* Part number i, from 0. False: there is none. */
bool ht_forecast_part(const struct ht_forecast *f, uint32_t i, struct ht_forecast_part *out);
/* Its use number k. */
void ht_forecast_idle(const struct ht_forecast *f, uint32_t i, unsigned k, struct ht_forecast_idle *out);
