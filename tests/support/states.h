/* SPDX-License-Identifier: Apache-2.0 */
/*
 * states.h - the device contents that a power cut could have left, from a recording.
 *
 * Model: an entry is logged when the device completed it. A flush makes every write before it durable, a write with FUA
 * is durable itself. Each other write may be there or not, in any order, and may be torn; or its place holds noise.
 */
#pragma once

#include "tiering/base/base.h"
#include "tiering/io/dev.h"

struct log_entry {
    uint64_t offset; /* bytes */
    uint64_t len;
    bool flush, fua, mark;
    const uint8_t *data; /* of a write, or the text of a mark */
};

struct recording {
    uint8_t *file;
    size_t bytes; /* of the file */
    struct log_entry *entry;
    size_t count;
};

/* Reads a recording in the dm-log-writes format; aborts the test when it is malformed. */
void recording_load(struct recording *r, const char *path);
void recording_free(struct recording *r);

enum state_kind {
    STATE_NOTHING, /* no volatile write arrived */
    STATE_ALL,
    STATE_ALL_BUT_ONE,
    STATE_ONLY_ONE,
    STATE_RANDOM, /* any subset, any order */
    STATE_TORN,   /* any subset, any order, some torn at 512 or 4096 bytes */
    STATE_DRAWN,  /* kinds up to here are drawn one at a time by walk_state */
    STATE_SUBSET = STATE_DRAWN,
    STATE_PREFIX,
    STATE_NOISE, /* some of the writes left bytes that no program wrote */
    STATE_KINDS
};
extern const char *const state_names[STATE_KINDS];

/* A state, remembered as its difference from the durable content. Zeroed at first. */
struct kept_state {
    uint64_t *block;
    uint8_t *data;
    size_t count, cap;
};

/*
 * Walks through crash points of one recording in ascending order. The walk builds each state in the RAM of the caller's
 * devices, which follow each other in the recording's addresses. It restores the durable content wherever the walk or a
 * user of the devices has written since.
 */
struct state_walk {
    const struct recording *rec;
    struct ht_dev *const *dev;
    unsigned dev_count;
    uint8_t *durable;     /* the content that is sure to be there at the point */
    uint64_t *block_hash; /* of the durable content */
    uint64_t bytes, sum;  /* of all devices; of the hashes */
    size_t at;            /* entries completed */
    size_t *pending;      /* indices of volatile writes, in order */
    size_t pending_count;
    unsigned lba;
    bool inside;             /* another walk, and shares its memory */
    struct kept_state under; /* the durable content of that one, where this one has changed it */
};

/* base: content of all devices when the recording began. */
void walk_begin(struct state_walk *w, const struct recording *rec, const uint8_t *base, struct ht_dev *const dev[],
                unsigned dev_count);
/* The recording began at a state of another walk, which stands still until this one ends. */
void walk_begin_inside(struct state_walk *w, struct state_walk *outer, const struct kept_state *from,
                       const struct recording *rec);
void walk_to(struct state_walk *w, size_t point);
/*
 * The next point after this one before something becomes durable, or the end. The states at these points are complete:
 * a state between two points is a state of the second.
 */
size_t walk_next_flush(const struct state_walk *w);
/* The devices hold the durable content and nothing else. */
void walk_reset(struct state_walk *w);
/* The devices hold one state of a kind that can be drawn. rnd: seed, advanced. */
void walk_state(struct state_walk *w, enum state_kind kind, uint64_t *rnd);
/* The present content of the devices, as one number. */
uint64_t walk_hash(const struct state_walk *w);
void walk_keep(const struct state_walk *w, struct kept_state *k);
void kept_free(struct kept_state *k);
/*
 * All states at the point: every subset of the writes in flight, up to 8 writes (10 with HITRAIN_LONG=1). For more
 * writes every prefix, every single loss, every single survivor, and random subsets. Then, with tears, each write is
 * torn at 512 and 4096 bytes, or replaced by noise, beside those before it and beside all; and all writes are torn
 * alike. The walk calls fn with each state, and fn may change the devices. If fn returns false, the walk ends.
 */
bool walk_each(struct state_walk *w, bool tears, uint64_t *rnd, bool (*fn)(void *ctx, enum state_kind kind), void *ctx);
void walk_end(struct state_walk *w);

/* Flushes and writes with FUA in a recording. */
size_t recording_flushes(const struct recording *r);
/* Prints one line for tests/tools/run.py, which adds up the numbers. */
void states_reported(unsigned scripts, uint64_t flushes, uint64_t made, uint64_t distinct);

/* A number from the environment, or the standard. */
uint64_t setting(const char *name, uint64_t standard);

/* splitmix64 (Steele, Lea, Flood, OOPSLA 2014): small, seedable. */
uint64_t rnd_next(uint64_t *state);
static inline uint64_t rnd_below(uint64_t *state, uint64_t n)
{
    return rnd_next(state) % n;
}
