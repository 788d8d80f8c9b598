/* SPDX-License-Identifier: Apache-2.0 */
/* features.h - the feature bits of a store and their names. Reads the superblock without holding the device. */
#pragma once

#include "tiering/space/super.h"
#include <hitrain/features.h>

struct ht_feature {
    enum ht_feature_effect effect;
    uint64_t bit;
    const char *name, *since, *text; /* since: the first version of hitrain that has it */
};
/* NULL: this program has no name for it. */
const struct ht_feature *ht_feature_of(enum ht_feature_effect effect, uint64_t bit);

/* Name and first version of a feature: by this program, or else by the store. False: neither has them. */
bool ht_features_name(const struct ht_super_words *w, enum ht_feature_effect effect, uint64_t bit,
                      char out_name[HT_FEATURE_NAME_MAX], char out_since[HT_FEATURE_SINCE_MAX]);
/*
 * From the newest copy of the superblock on a device or file, also if a daemon has it mounted, and of any version.
 * -EMEDIUMTYPE: there is no store; -EUCLEAN: no copy is valid.
 */
int ht_features_read(const char *path, struct ht_super_words *out) HT_MUST_CHECK;
uint64_t ht_features_bits(const struct ht_super_words *w, enum ht_feature_effect effect);
/* Bits that this program does not know. */
uint64_t ht_features_unknown(const struct ht_super_words *w, enum ht_feature_effect effect);
