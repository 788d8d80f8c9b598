/* SPDX-License-Identifier: Apache-2.0 */
/* features.h - the feature bits of a store and their names. Reads the superblock without holding the device. */
#pragma once

#include "tiering/base/base.h"
#include <hitrain/features.h>
#include <hitrain/format.h>

/* What a program does that does not know the feature. */
extern const char *const ht_feature_effect_words[HT_FEATURE_EFFECTS];

struct ht_feature {
    enum ht_feature_effect effect;
    uint64_t bit;
    const char *name, *since, *text; /* since: the first version of hitrain that has it */
};
/* NULL: this program has no name for it. */
const struct ht_feature *ht_feature_of(enum ht_feature_effect effect, uint64_t bit);

struct ht_store_features {
    uint32_t version;
    uint64_t bits[HT_FEATURE_EFFECTS];
    uint8_t uuid[16];
    char label[64];
    char names[HT_FEATURE_NAMES_BYTES + 1]; /* of features, by the program that wrote the superblock: any bytes */
};
/*
 * Name and first version of a feature: by this program, or else by the store. False: neither has them.
 */
bool ht_features_name(const struct ht_store_features *f, enum ht_feature_effect effect, uint64_t bit,
                      char out_name[HT_FEATURE_NAME_MAX], char out_since[HT_FEATURE_SINCE_MAX]);
/*
 * From the newest copy of the superblock on a device or file, also if a daemon has it mounted, and of any version.
 * -EMEDIUMTYPE: there is no store; -EUCLEAN: no copy is valid.
 */
int ht_features_read(const char *path, struct ht_store_features *out) HT_MUST_CHECK;
/* Bits that this program does not know. */
uint64_t ht_features_unknown(const struct ht_store_features *f, enum ht_feature_effect effect);
