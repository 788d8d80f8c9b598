/* SPDX-License-Identifier: Apache-2.0 */
/*
 * features.h - the features of the store's format. Each superblock has this table as a text, so that a program that
 * does not know a bit can name the feature and the version that has it.
 *
 * effect: on programs that do not know the feature: REFUSES (they refuse the store), READS (they read it only),
 * IGNORES. since: the first version of hitrain that knows it.
 */
#pragma once

/*    X(effect,  bit, name,          since,   text) */
#define HT_FEATURES(X)                                                                                \
    X(REFUSES, 0, "lost", "0.1.0", "hitrain-fsck has marked content as lost")                         \
    X(REFUSES, 1, "compressed", "0.1.0", "chunks may be compressed")                                  \
    X(REFUSES, 2, "kept-steps", "0.1.0", "models may have kept steps")                                \
    X(REFUSES, 3, "logged-steps", "0.1.0", "models may have logged steps")                            \
    X(REFUSES, 4, "sparse-steps", "0.1.0", "logged gradients may be without their zeros")             \
    X(REFUSES, 5, "sectioned-steps", "0.1.0", "logged steps may have numbers for ranges of elements") \
    X(REFUSES, 6, "low-beta1-steps", "0.1.0", "logged steps may be of Adam with beta1 up to 0.5")     \
    X(REFUSES, 7, "short-state", "0.1.0", "optimizer state may be kept in 16 or 8 bits")              \
    X(REFUSES, 8, "two-phase-steps", "0.1.0", "models may have state and logged steps of Muon")       \
    X(REFUSES, 9, "cold", "0.1.0", "content may lie in a vault")                                      \
    X(IGNORES, 0, "device-classes", "0.1.0", "devices may be of the class capacity")

enum ht_feature_effect { HT_FEATURE_REFUSES, HT_FEATURE_READS, HT_FEATURE_IGNORES, HT_FEATURE_EFFECTS };
#define HT_FEATURE_WORD_REFUSES "refuses"
#define HT_FEATURE_WORD_READS "reads"
#define HT_FEATURE_WORD_IGNORES "ignores"
#define HT_FEATURE_WORDS                                                        \
    {                                                                           \
        HT_FEATURE_WORD_REFUSES, HT_FEATURE_WORD_READS, HT_FEATURE_WORD_IGNORES \
    }
enum { HT_FEATURE_NAME_MAX = 32, HT_FEATURE_SINCE_MAX = 16 };
