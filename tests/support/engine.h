/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.h - random work on a store beside a simple model.
 *
 * The model keeps, for every object, the history of its contents (as hashes), and how far it was acknowledged as
 * durable. Objects of slots below ROOT_FIRST are outside scopes and synced one by one; the others belong to one scope
 * and only change together, by commits that also carry a step number through a metadata client.
 */
#pragma once

#include "tiering/api/object.h"
#include "tiering/api/store.h"

enum { ENGINE_SLOTS = 10, ROOT_FIRST = 6, ENGINE_BYTES_MAX = 400 << 10, ENGINE_SCOPE = 77 };

struct version {
    bool exists;
    uint64_t size, hash;
};

struct slot_model {
    uint8_t *content; /* ENGINE_BYTES_MAX */
    bool exists;
    uint64_t size;
    struct version *history;
    size_t count;       /* versions; the last is current */
    size_t acked;       /* index of the last version known durable */
    uint64_t oid;       /* of the present object */
    struct ht_obj *obj; /* reference, when it exists */
};

/* The whole scope at one commit. */
struct commit_model {
    uint64_t step;
    struct version version[ENGINE_SLOTS];
};

struct ack { /* the durable state at the time of a mark */
    size_t slot[ENGINE_SLOTS];
    size_t commit;
};

struct engine {
    struct ht_dev *dev;
    struct ht_store *s;
    uint64_t rnd;
    struct slot_model slot[ENGINE_SLOTS];
    struct commit_model *commit; /* [0]: the empty beginning */
    size_t commits, commit_acked;
    struct ack *ack;
    size_t acks;
    uint64_t step, pub_step; /* of the metadata client: current, published */
    bool recording;
    uint64_t operations;
};

/* oid of the object in a slot is kept by the metadata client too, so that a remount finds it. */

/* Makes a RAM device with a fresh store on it (not mounted). */
void engine_format(struct engine *e, uint64_t bytes, unsigned lba, uint64_t seed);
/* Mount dev's store into e->s. 0 or -errno. */
int engine_mount(struct engine *e);
/* One random operation, checked against the model. */
void engine_step(struct engine *e);
/* Leaves only so many bytes of space free, so that the allocator soon reuses freed space. The store is mounted. */
void engine_fill(struct engine *e, uint64_t leave);
/* Every object equals the model exactly. */
void engine_check_exact(struct engine *e);
/* Deletes everything, after which nothing may be missing of the space. */
void engine_check_space(struct engine *e);
void engine_unmount(struct engine *e); /* cleanly; the scope's pending state is gone, in the model too */
void engine_crash(
    struct engine *e); /* close without unmounting; the device loses nothing, and the model does not change */
void engine_free(struct engine *e);

/*
 * The store on dev has the content of a crash. Mounts it and compares it with the states that the model of src allows
 * after ack (index into src->ack). Verifies every checksum, works on, unmounts, and mounts again. Returns NULL if all
 * is well, else a static text that names the mismatch.
 */
const char *engine_verify_state(const struct engine *src, size_t ack, struct ht_dev *dev, uint64_t seed);
