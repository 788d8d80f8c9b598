/* SPDX-License-Identifier: Apache-2.0 */
/*
 * staging.h - a model that is made out of sight and gets its name at the end.
 *
 * It is the only entry of a private directory .hitrain-receive-XXXXXXXX, beside its future name, on a store. That
 * directory has the attribute HT_STAGING_ATTRIBUTE, whose value is its name, durable before the model begins. It has a
 * lock (flock) as long as its program runs. So the next program of that user that stages something there knows it, and
 * removes it with the model in it, whatever a killed program or a crash left: at any moment until the model moved to
 * its name. Without the attribute it has nothing in it yet, and goes only then. Others may write in the directory
 * above: so everything goes by descriptors, and no symlink is followed.
 */
#ifndef HITRAIN_MOUNT_HELPERS_COPY_STAGING_H
#define HITRAIN_MOUNT_HELPERS_COPY_STAGING_H

#include <limits.h>
#include "mount-helpers/stream/stream.h"

#define HT_STAGING_MODEL "model"

struct ht_staging {
    int parent, dir, model; /* descriptors; model: -1 before there is one */
    bool published;
    char temporary[32];
    char name[NAME_MAX + 1];
};

/* 0 or -errno, with a message printed. -EEXIST: there is something at path. */
int ht_staging_begin(struct ht_staging *s, const char *path) HT_MUST_CHECK;
/* A new directory that is to become the model, for the caller alone. 0 or -errno, with a message printed. */
int ht_staging_make_model(struct ht_staging *s, const char *path) HT_MUST_CHECK;
/* The model that was made otherwise as the entry HT_STAGING_MODEL of dir. 0 or -errno, with a message printed. */
int ht_staging_open_model(struct ht_staging *s, const char *path) HT_MUST_CHECK;
/* Gives the model its name, durably. 0 or -errno, with a message printed; the caller then drops it. */
int ht_staging_publish(struct ht_staging *s, const char *path) HT_MUST_CHECK;
/* Removes it with everything in it. Prints a message if that fails. */
void ht_staging_drop(struct ht_staging *s);
/* Releases the descriptors. */
void ht_staging_end(struct ht_staging *s);

#endif
