/* SPDX-License-Identifier: Apache-2.0 */
/*
 * story.h - a short script on a store, what of it was acknowledged when, and whether a crash state agrees.
 *
 * A story has groups of names. What a group holds (content, attributes, links, or a whole model with its step) is one number,
 * and the story keeps the list of those it has gone through. A state is right when each group is at the last number that was
 * acknowledged (fsync or commit had returned) or at a later one. Names that share a group change together or not at all: so
 * their content is synced before they are renamed.
 */
#ifndef HITRAIN_TESTS_SUPPORT_STORY_H
#define HITRAIN_TESTS_SUPPORT_STORY_H

#include "tests/support/stack.h"
#include "tests/support/states.h"

enum { STORY_GROUPS_MAX = 4, STORY_DEVICE_BYTES = 8 << 20 };

struct story;

struct story_script {
    const char *name;
    const char *groups[STORY_GROUPS_MAX]; /* names, separated by spaces; "model" is a model root */
    unsigned lba, devices;
    void (*prepare)(struct story *s); /* before the recording begins; may be NULL */
    void (*run)(struct story *s);
    bool accumulates; /* two gradients of each parameter make a step of its model, and the second is sparse */
    bool seldom;      /* only by its name, or with HITRAIN_LONG=1 */
};
extern const struct story_script story_scripts[];
extern const unsigned story_script_count;

struct story_ack {
    size_t floor[STORY_GROUPS_MAX];
};

struct story {
    const struct story_script *script;
    struct stack k;
    uint64_t *history[STORY_GROUPS_MAX];
    size_t count[STORY_GROUPS_MAX];
    struct story_ack now, *acks; /* what is acknowledged; what was when each mark was written */
    size_t ack_count;
    bool recording;
};

/*
 * Play the script; base gets the content of the devices when the recording began, one after the other. The caller
 * frees *out_base, the recording and the story.
 */
void story_play(struct story *s, const struct story_script *script, struct recording *out_rec, uint8_t **out_base);
void story_free(struct story *s);
/* Index into acks: what had been acknowledged when so many entries were there. */
size_t story_ack_at(const struct recording *rec, size_t point);

/* Mounted: does every group hold what is allowed? NULL, or what is wrong. *out_hash: of all groups. */
const char *story_compare(const struct story *s, size_t ack, const struct stack *k, uint64_t *out_hash);
/* Mounted: write, sync, train and commit, and find all that again after an unmount, without a problem for fsck. Unmounts. */
const char *story_go_on(const struct story *s, struct stack *k);

/* What scripts do. Those that return something return 0 or -ENOSPC; everything else ends the test. */
int story_write(struct story *s, const char *name, uint64_t seed, uint64_t off, size_t len);
void story_fsync(struct story *s, const char *name); /* "" is the root directory */
void story_commit(struct story *s);                  /* all that is outside models */
void story_truncate(struct story *s, const char *name, uint64_t size);
void story_punch(struct story *s, const char *name, uint64_t off, uint64_t len);
void story_clone(struct story *s, const char *from, const char *to, uint64_t len);
void story_rename(struct story *s, const char *from, const char *to, unsigned flags);
void story_link(struct story *s, const char *from, const char *to);
void story_unlink(struct story *s, const char *name);
void story_symlink(struct story *s, const char *name, const char *target);
void story_xattr(struct story *s, const char *name, uint64_t seed, size_t len);
void story_model(struct story *s);                              /* makes and commits one */
void story_work(struct story *s, unsigned step);                /* gradients and other changes of a step */
void story_pass(struct story *s, unsigned step, unsigned pass); /* one gradient of each parameter only */
void story_model_commit(struct story *s);
void story_model_abort(struct story *s);
void story_compact(struct story *s);
void story_writeback(struct story *s); /* as memory pressure does */
/* Damage on the first device, below the recorder: a superblock copy, a frame of a log copy, the first block of the name; and its repair. */
void story_scrub(struct story *s, const char *name);
void story_lose_log(struct story *s, unsigned copy); /* by one error; and it comes back */
void story_rejoin_log(struct story *s);
void story_lose_super(struct story *s, unsigned device); /* its log goes on */
void story_remount(struct story *s, bool clean);
/* Leave so many bytes of space only. */
void story_fill(struct story *s, uint64_t leave);

#endif
