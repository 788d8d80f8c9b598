/* SPDX-License-Identifier: Apache-2.0 */
/*
 * states.h - the device contents that a power cut could have left, from a recording.
 *
 * Model: an entry is logged when the device completed it. A flush makes every write before it durable, a
 * write with FUA is durable itself. Of the rest each may be there or not, in any order, and may be torn.
 */
#ifndef HITRAIN_TESTS_SUPPORT_STATES_H
#define HITRAIN_TESTS_SUPPORT_STATES_H

#include "tiering/base/base.h"

struct log_entry {
    uint64_t offset; /* bytes */
    uint64_t len;
    bool flush, fua, mark;
    const uint8_t *data; /* of a write, or the text of a mark */
};

struct recording {
    uint8_t *file;
    struct log_entry *entry;
    size_t count;
};

/* Read a recording in the dm-log-writes format; aborts the test when it is malformed. */
void recording_load(struct recording *r, const char *path);
void recording_free(struct recording *r);

enum state_kind {
    STATE_NOTHING, /* of what was volatile */
    STATE_ALL,
    STATE_ALL_BUT_ONE,
    STATE_ONLY_ONE,
    STATE_RANDOM, /* any subset, any order */
    STATE_TORN,   /* any subset, any order, some torn at 512 or 4096 bytes */
    STATE_KINDS
};
extern const char *const state_names[STATE_KINDS];

/*
 * Walks through crash points of one recording in ascending order. image: bytes long, the content when the recording
 * began; becomes the durable content at the point.
 */
struct state_walk {
    const struct recording *rec;
    uint8_t *durable;
    uint64_t bytes;
    size_t at;       /* entries completed */
    size_t *pending; /* indices of volatile writes, in order */
    size_t pending_count;
    unsigned lba;
};

void walk_begin(struct state_walk *w, const struct recording *rec, const uint8_t *base, uint64_t bytes, unsigned lba);
void walk_to(struct state_walk *w, size_t point);
/* Build one state into out. rnd: seed, advanced. */
void walk_state(const struct state_walk *w, enum state_kind kind, uint64_t *rnd, uint8_t *out);
void walk_end(struct state_walk *w);

/* A number from the environment, or the standard. */
uint64_t setting(const char *name, uint64_t standard);

/* splitmix64 (Steele, Lea, Flood, OOPSLA 2014): small, seedable. */
uint64_t rnd_next(uint64_t *state);
static inline uint64_t rnd_below(uint64_t *state, uint64_t n)
{
    return rnd_next(state) % n;
}

#endif
