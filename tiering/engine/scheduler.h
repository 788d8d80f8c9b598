/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scheduler.h - work in the background: an engine is a row, and a lane is a thread that serves rows.
 *
 * The step of a row does a part of the work, and says how it went:
 *
 *   asleep --wake, or the time that it asked for--> due --lane is free--> stepping --idle--> asleep
 *                                                    ^                       |
 *                                                    +---as its pace allows--+--worked
 *                                                    '---after its pause-----'--blocked
 *
 * A lane serves the row that is due longest. So a row that always has work keeps no other row of its lane from its
 * turn. A row whose work is urgent has a lane that no other engine's I/O can hold up. All others share one.
 *
 * A lane of short steps ends each after 1 MiB or 10 ms: then a pause, a stop, or another row comes soon.
 *
 * A row with a rate yields to the foreground: it moves so many bytes a second at most, and a quarter of that while
 * others move bytes (tier/pace.h). Its budget is what it may move in one step.
 *
 * No wake is lost: a row that is woken while it steps is due again. A wake ends the wait for a time or for the pace,
 * and not the pause after a step that was blocked: nothing is gained by trying at once.
 *
 * A lane may have a budget for all of its rows together: bytes a second, and processor time. A row that is paused is
 * not due until it resumes; a wake is kept for then. When its pause begins, it gives back what it holds (`rest`).
 *
 * A lane on demand has a thread from a wake until its rows have slept for a second.
 *
 * A lane that is lent is served by threads of others, one at a time, and has no thread of its own: it makes steps only
 * while such a thread has nothing better to do. A thread that is recalled leaves after the step that runs. Only a wake
 * that ends a row's work starts the lane's own thread, for that step: its caller waits.
 *
 *   own thread <--take back-- lent, nobody serves --serve--> a lender's thread waits or steps
 *       '---------lend---------^       ^-----------recalled-----------'
 *
 * A row whose next piece of work cannot be divided, and takes longer than such a step, says so and does not begin it.
 * Then the lane's own thread makes that step, and a thread that is recalled need not wait for it.
 *
 * A lane that is stopped begins no step, and its thread ends after the one that runs. Other threads make a long step
 * end by what that engine looks at, before they stop its lane.
 *
 * Lock: lane.lock, of HT_LOCK_ENGINE. It is a leaf, so rows are woken with the locks of the store and of the journal
 * held. Steps run without it.
 */
#pragma once

#include <pthread.h>

#include "tiering/base/lock.h"
#include "tiering/io/gate.h"
#include "tiering/tier/pace.h"
#include "tiering/api/background.h"

/* What an engine is. Constant. */
struct ht_engine_type {
    const char *name;
    unsigned pause_ms; /* after a step that was blocked */
    /* No lock held. One at a time. */
    enum ht_step (*step)(void *ctx, struct ht_budget *b);
    void (*rest)(void *ctx); /* as a step, once the row is paused: gives back what it holds between steps; or NULL */
    /* Figures of its own; NULL: none. The row has their values. */
    const struct ht_engine_figure *figure;
    unsigned figures;
    void (*values)(void *ctx, uint64_t out[]); /* sets values that the row has not; or NULL. Any thread */
};

struct ht_row {
    const struct ht_engine_type *type;
    void *ctx;
    struct ht_pace pace; /* with the rate; 0: not paced */
    struct ht_lane *lane;
    _Atomic uint64_t figure[HT_ENGINE_FIGURES_MAX]; /* as of type->figure; any thread counts */
    HT_GUARDED_BY(HT_LOCK_ENGINE) struct {
        uint64_t at_ns; /* when it is due */
        bool stepping, woken, blocked;
        bool paused, passes;               /* passes: one step comes in spite of pause and budget */
        bool rests;                        /* its rest is due */
        bool is_long;                      /* so is its next step: not for a thread that serves */
        bool long_anyway;                  /* but the lane's own thread could not be started */
        bool off;                          /* it never steps, or not any more */
        uint64_t run_began_ns;             /* 0: it is idle; pauses move it on */
        uint64_t paused_ns;                /* while paused: since when */
        struct ht_background_stat figures; /* without those of its type */
    };
};

struct ht_lane_config {
    const char *name; /* of the thread */
    bool on_demand;
    enum ht_io_class io_class; /* of its requests */
    void *ctx;
    void (*enter)(void *ctx);       /* the first that the thread does; or NULL */
    uint64_t (*traffic)(void *ctx); /* bytes that all threads have moved so far; or NULL */
    bool short_steps;               /* of at most 1 MiB and 10 ms; or of 16 MiB */
    /* The budget of all rows together; 0: none. */
    uint64_t rate_bytes;  /* a second */
    unsigned cpu_percent; /* of one processor */
};

enum { HT_LANE_ROWS_MAX = 8 };

struct ht_lane {
    struct ht_lane_config config; /* constant */
    struct ht_row *row[HT_LANE_ROWS_MAX];
    unsigned rows; /* both constant once a row was woken */
    struct ht_mutex lock;
    pthread_cond_t changed;
    _Atomic bool recalled; /* the thread that serves, or the next one, leaves */
    HT_GUARDED_BY(HT_LOCK_ENGINE) struct {
        pthread_t thread;
        bool running, joinable, stopping;
        bool busy; /* a thread is in a step or a rest */
        bool lent, served;
        struct ht_pace rate, cpu; /* of the budget; a unit of cpu is a nanosecond */
        uint64_t not_before_ns;   /* the budget allows no step */
    };
};
HT_MUTEX_OF(ht_lane_lock, struct ht_lane, lock, HT_LOCK_ENGINE)

void ht_lane_init(struct ht_lane *l, const struct ht_lane_config *config);
/* Stop comes first. */
void ht_lane_destroy(struct ht_lane *l);
/* rate_bytes: a second; 0: the row is not paced. Before any row of the lane is woken. */
void ht_lane_add(struct ht_lane *l, struct ht_row *r, const struct ht_engine_type *type, void *ctx,
                 uint64_t rate_bytes);
/* It never steps again; returns after the step that runs. No lock held. */
void ht_row_end(struct ht_row *r);
/* Starts the thread, and wakes all rows. -errno */
int ht_lane_start(struct ht_lane *l) HT_MUST_CHECK;
/* Waits for the step that runs. For good. */
void ht_lane_stop(struct ht_lane *l);
/* Of a lane on demand. Its thread ends after the step that runs. */
void ht_lane_lend(struct ht_lane *l);
/* No thread serves any more. The lane has its own thread again when there is work. */
void ht_lane_take_back(struct ht_lane *l);
/*
 * The calling thread serves a lane that is lent until it is recalled; once: it makes one step at most, waits for
 * none and at no gate, and a recall does not count. Returns at once if another thread serves.
 * False: the lane has stopped, or is not lent.
 */
bool ht_lane_serve(struct ht_lane *l, bool once);
/* The thread that serves leaves after the step that runs. If there is none, the next one leaves at once. */
void ht_lane_recall(struct ht_lane *l);
/*
 * The row is due now. Any thread. Of a lane on demand, -errno: its thread could not be started, and the row stays due;
 * -ECANCELED: it stops.
 */
int ht_row_wake(struct ht_row *r);
/* The same, and this step comes even if the row is paused or the budget is used up: it ends the row's work. */
int ht_row_wake_to_end(struct ht_row *r);
/* A step that runs goes on, and the row's rest follows. 0 */
int ht_row_pause(struct ht_row *r);
/* As ht_row_wake. */
int ht_row_resume(struct ht_row *r);
bool ht_row_is_paused(struct ht_row *r);
void ht_row_figures(struct ht_row *r, struct ht_background_stat *out);
