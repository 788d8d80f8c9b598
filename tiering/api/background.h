/* SPDX-License-Identifier: Apache-2.0 */
/* background.h - engines that work in the background: how they do, and pausing them. */
#ifndef HITRAIN_TIERING_API_BACKGROUND_H
#define HITRAIN_TIERING_API_BACKGROUND_H

#include "tiering/base/base.h"

struct ht_store;

/* How the step of an engine went. */
enum ht_step {
    HT_STEP_WORKED,  /* there may be more to do */
    HT_STEP_IDLE,    /* there is nothing to do, or not before budget.at_ns */
    HT_STEP_BLOCKED, /* there is something to do that cannot be done now */
};

struct ht_budget {
    uint64_t most_bytes; /* in: the step ends when it has moved so many */
    uint64_t until_ns;   /* in: and when it is that late, after one piece of work at least */
    bool may_be_long;    /* in: nobody needs the thread before the step has ended */
    uint64_t bytes;      /* out: moved */
    bool next_is_long;   /* out: what comes next may take longer than such a step. It comes with may_be_long */
    uint64_t at_ns;      /* out, of an idle step: when the next one is due; 0: when the row is woken */
};

enum ht_background_state {
    HT_BACKGROUND_IDLE,
    HT_BACKGROUND_WORKING, /* in a step, or between two as its budget allows */
    HT_BACKGROUND_BLOCKED, /* it waits and tries again: what it needs is not there now */
    HT_BACKGROUND_PAUSED,
    HT_BACKGROUND_OFF, /* by an option of the mount */
};

/* A figure that only one engine has. */
struct ht_engine_figure {
    const char *key;
    const char *help;
    bool gauge; /* or it only grows */
};
enum { HT_ENGINE_FIGURES_MAX = 8 };

struct ht_background_stat {
    const char *engine;
    enum ht_background_state state;
    uint64_t steps, blocked; /* blocked: steps that could do nothing */
    uint64_t bytes;          /* read and written */
    uint64_t cpu_ns;         /* processor time */
    /* Since it was idle last, with its waits, without pauses: what a rate is computed from. */
    uint64_t run_bytes, run_ns;
    const struct ht_engine_figure *figure;
    unsigned figures;
    uint64_t value[HT_ENGINE_FIGURES_MAX];
};

/* The engines, from 0 on. -ENOENT: there are fewer. */
int ht_store_background_stat(struct ht_store *s, unsigned index, struct ht_background_stat *out) HT_MUST_CHECK;
/*
 * Paused engines begin no step; one that runs ends soon, after 1 MiB or 10 ms. A pause lasts until resume or the end of
 * the mount. engine NULL: all. -ENOENT: there is no such engine.
 */
int ht_store_background_pause(struct ht_store *s, const char *engine) HT_MUST_CHECK;
int ht_store_background_resume(struct ht_store *s, const char *engine) HT_MUST_CHECK;
/*
 * A pool of threads takes over the background work, so that it is done only by threads that have nothing better to do.
 * The pool has at least two, one of which is free at any time: commits and updates may need the other one. False: this
 * mount has no background work. Until it is taken back no thread of the store's own does any.
 */
bool ht_store_background_lend(struct ht_store *s);
/* No thread of the pool serves then. The store's own thread goes on. */
void ht_store_background_take_back(struct ht_store *s);
/*
 * The calling thread of the pool does background work until it is recalled; once: at most one unit, which takes some
 * 10 ms. Returns at once if another thread serves. It holds nothing. False: the work was taken back, or has ended.
 */
bool ht_store_background_serve(struct ht_store *s, bool once);
/*
 * The thread that serves, or the next one, is needed: it returns after its unit, and waits no longer for its permission
 * for a device. Any thread, with any lock above those of engines.
 */
void ht_store_background_recall(struct ht_store *s);
const char *ht_background_state_word(enum ht_background_state state);

#endif
