/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crash_scenario.h - a short script on a store; it notes when an operation is acknowledged and checks crash states.
 *
 * A scenario has groups of names. One number stands for everything in a group: content, attributes, links, or a whole
 * model with its step. The scenario keeps the list of past numbers. In a right state each group is at its last
 * acknowledged number (fsync or commit had returned) or at a later one. Names that share a group change together or not
 * at all. Scripts therefore sync their content before they rename them.
 */
#pragma once

#include "tests/support/harness.h"
#include "tests/support/states.h"

enum { SCENARIO_GROUPS_MAX = 4, SCENARIO_DEVICE_BYTES = 8 << 20, SCENARIO_PARAMS = 2 };

extern const struct harness_param scenario_params[SCENARIO_PARAMS]; /* of every model */

struct crash_scenario;

struct scenario_script {
    const char *name;
    const char *groups[SCENARIO_GROUPS_MAX]; /* names, separated by spaces; "model", "received": model roots */
    unsigned lba, devices;
    void (*prepare)(struct crash_scenario *s); /* before the recording begins; may be NULL */
    void (*run)(struct crash_scenario *s);
    bool accumulates; /* two gradients of each parameter make a step of its model, and the second is sparse */
    bool keeps;       /* each commit of its model keeps its step; two stay */
    bool logs;        /* steps of its model are logged; each fourth is full */
    bool clips;       /* so are they, and updates wait for the boundary */
    bool maps;        /* it may call scenario_map */
    bool seldom;      /* only by its name, or with HITRAIN_LONG=1 */
};
extern const struct scenario_script scenario_scripts[];
extern const unsigned scenario_script_count;

struct scenario_ack {
    size_t floor[SCENARIO_GROUPS_MAX];
};

struct crash_scenario {
    const struct scenario_script *script;
    struct harness k;
    uint64_t *history[SCENARIO_GROUPS_MAX];
    size_t count[SCENARIO_GROUPS_MAX];
    struct scenario_ack now, *acks; /* acknowledged now; acknowledged at each mark */
    size_t ack_count;
    struct ht_obj *mapped; /* the parameter whose memory programs have, and that */
    int mapped_fd;
    bool recording;
};

/*
 * Play the script; base gets the content of the devices when the recording began, one after the other. The caller
 * frees *out_base, the recording and the scenario.
 */
void scenario_play(struct crash_scenario *s, const struct scenario_script *script, struct recording *out_rec,
                   uint8_t **out_base);
void scenario_free(struct crash_scenario *s);
/* Index into acks of the acknowledgements that held when the recording had `point` entries. */
size_t scenario_ack_at(const struct recording *rec, size_t point);

/*
 * The store is mounted. Checks that every group holds an allowed state. Returns NULL, or a text that names the
 * mismatch. *out_hash covers all groups.
 */
const char *scenario_compare(const struct crash_scenario *s, size_t ack, const struct harness *k, uint64_t *out_hash);
/*
 * The store is mounted. Writes, syncs, trains and commits, unmounts, and finds all that again. fsck reports no problem.
 */
const char *scenario_go_on(const struct crash_scenario *s, struct harness *k);

/* Operations of scripts. Those that return something return 0 or -ENOSPC; everything else ends the test. */
int scenario_write(struct crash_scenario *s, const char *name, uint64_t seed, uint64_t off, size_t len);
void scenario_zeros(struct crash_scenario *s, const char *name, uint64_t off, size_t len);
/* Content that gets smaller by compression. */
int scenario_write_weights(struct crash_scenario *s, const char *name, uint64_t seed, uint64_t off, size_t len);
void scenario_fsync(struct crash_scenario *s, const char *name); /* "" is the root directory */
void scenario_commit(struct crash_scenario *s);                  /* all that is outside models */
void scenario_truncate(struct crash_scenario *s, const char *name, uint64_t size);
void scenario_punch(struct crash_scenario *s, const char *name, uint64_t off, uint64_t len);
void scenario_clone(struct crash_scenario *s, const char *from, const char *to, uint64_t len);
void scenario_rename(struct crash_scenario *s, const char *from, const char *to, unsigned flags);
void scenario_link(struct crash_scenario *s, const char *from, const char *to);
void scenario_unlink(struct crash_scenario *s, const char *name);
void scenario_symlink(struct crash_scenario *s, const char *name, const char *target);
void scenario_xattr(struct crash_scenario *s, const char *name, uint64_t seed, size_t len);
void scenario_model(struct crash_scenario *s);                              /* makes and commits one */
void scenario_work(struct crash_scenario *s, unsigned step);                /* gradients and other changes of a step */
void scenario_pass(struct crash_scenario *s, unsigned step, unsigned pass); /* one gradient of each parameter only */
void scenario_model_commit(struct crash_scenario *s);
/* Work and an asynchronous step; during may come before or after the end of the step. */
void scenario_model_async(struct crash_scenario *s, unsigned step, void (*during)(struct crash_scenario *s));
void scenario_model_abort(struct crash_scenario *s);
void scenario_check_replays(const struct crash_scenario *s, uint64_t replays); /* so many since the mount */
void scenario_model_commit_full(struct crash_scenario *s);                     /* leaves no logged steps */
void scenario_write_param(struct crash_scenario *s, float value);              /* one element, as a client does it */
/* From now on programs have the memory of a parameter, as with passthrough=; then they see in it what a reader sees. */
void scenario_map(struct crash_scenario *s);
void scenario_unmap(struct crash_scenario *s);
void scenario_check_logged(const struct crash_scenario *s, unsigned steps); /* so many logged steps are durable */
void scenario_snapshot(struct crash_scenario *s, const char *name);         /* NULL: under its number */
void scenario_digest(struct crash_scenario *s, const char *step); /* notes one; durable with the next commit */
/* The kept step becomes a model of its own, which belongs to the group of the model; it takes a step. */
void scenario_clone_kept(struct crash_scenario *s, const char *step);
void scenario_clone_step(struct crash_scenario *s, unsigned step);
void scenario_rollback(struct crash_scenario *s, const char *step);
void scenario_forget(struct crash_scenario *s, const char *name);
/*
 * The calls of `hitrainctl receive` (crash_receive.c): a directory out of sight, its files, its commit, its name. base:
 * the kept step of the model that the stream builds on, or NULL. between runs after each parameter.
 */
void scenario_receive_begin(struct crash_scenario *s);
void scenario_receive_files(struct crash_scenario *s, const char *base, uint64_t seed,
                            void (*between)(struct crash_scenario *s));
void scenario_receive_commit(struct crash_scenario *s);
void scenario_receive_publish(struct crash_scenario *s);
void scenario_receive_drop(struct crash_scenario *s); /* after a failure */
/* The group has come to this state, which a cut may leave; durable: it must. */
void scenario_note(struct crash_scenario *s, const char *group, uint64_t hash, bool durable);
void scenario_checkpoint(struct crash_scenario *s);
void scenario_writeback(struct crash_scenario *s); /* as memory pressure does */
/* A pass of deduplication, which frees so many bytes. Nothing that a client sees changes, and no promise is made. */
void scenario_dedup(struct crash_scenario *s, uint64_t bytes);
uint64_t scenario_dedup_some(struct crash_scenario *s);          /* returns how many */
void scenario_compact(struct crash_scenario *s, uint64_t bytes); /* the same for compaction, which moves so many */
uint64_t scenario_compact_some(struct crash_scenario *s);
uint64_t scenario_discard(struct crash_scenario *s); /* what became free; its bytes */
/*
 * Damage on the first device, below the recorder: a superblock copy, a frame of a log copy,
 * the first block of the name; and its repair.
 */
void scenario_scrub(struct crash_scenario *s, const char *name);
/*
 * From now on new content of files is compressed when it is written, as soon as the superblocks say that it may be.
 */
void scenario_compress_inline(struct crash_scenario *s);
unsigned scenario_compressed(struct crash_scenario *s); /* chunks */
/*
 * Rounds of the engine until nothing is left to compress, each with a commit. Returns how many chunks are compressed.
 */
unsigned scenario_compress(struct crash_scenario *s);
void scenario_lose_log(struct crash_scenario *s, unsigned copy); /* by one error; and it comes back */
void scenario_resync_log(struct crash_scenario *s);
void scenario_lose_super(struct crash_scenario *s, unsigned device); /* its log goes on */
void scenario_remount(struct crash_scenario *s, bool clean);
/* Leaves so many bytes of space only. */
void scenario_fill(struct crash_scenario *s, uint64_t leave);
