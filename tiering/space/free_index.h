/* SPDX-License-Identifier: Apache-2.0 */
/*
 * free_index.h - the groups of a device by the longest run of free blocks that begins in them.
 *
 * A class is a range of lengths: exact up to 7 blocks, then four classes for each power of two, 256, and
 * HT_FREE_WHOLE for a group of which every block is free. A group is in the class of its longest run, or in none. Each
 * class is a bitmap of groups with a summary bit for each word, summaries of these, and so on. So finding a group of a
 * class costs one word for each level, however large and however full the device is.
 *
 * The words of all classes for the same 64 groups are neighbours, so a change of class touches one or two lines of
 * memory. HT_FREE_WHOLE is stored inverted: everything is zero while everything is free, so memory follows what was
 * ever in use.
 *
 * Not locked: the allocator's caller guards it.
 */
#pragma once

#include "tiering/base/base.h"

enum {
    HT_GROUP_BLOCKS = 256,
    HT_FREE_LARGEST = 27, /* class of runs of HT_GROUP_BLOCKS */
    HT_FREE_WHOLE,        /* class of groups that are free as a whole */
    HT_FREE_CLASSES,
    HT_FREE_NONE = HT_FREE_CLASSES,  /* no class: no block is free */
    HT_FREE_FREED = HT_FREE_CLASSES, /* bitmaps beside the classes: groups with blocks that became free */
    HT_FREE_CLOSED,                  /* groups that serve no request: they are in no class */
    HT_FREE_SPARSE,                  /* groups in which little is taken */
    HT_FREE_FIXED,                   /* groups with blocks that never move: they are not sparse */
    HT_FREE_BITMAPS,
    HT_FREE_LEVELS_MAX = 8,
};
#define HT_NO_GROUP UINT64_MAX

struct ht_free_index {
    uint64_t groups;
    uint64_t count[HT_FREE_BITMAPS];     /* groups of each class */
    uint16_t *longest;                   /* of each group: its longest run; of a whole one 0, as if it had no memory */
    uint64_t *level[HT_FREE_LEVELS_MAX]; /* HT_FREE_BITMAPS words for each 64 bits of one class */
    uint64_t words[HT_FREE_LEVELS_MAX];  /* of one class */
    unsigned levels;
};

/* All groups are whole. -ENOMEM */
int ht_free_index_init(struct ht_free_index *x, uint64_t groups) HT_MUST_CHECK;
void ht_free_index_destroy(struct ht_free_index *x);
/* Memory for each 64 groups, without the summaries. */
uint64_t ht_free_index_word_bytes(void);

/* The class of runs of this length, 1 to HT_GROUP_BLOCKS; the shortest run of a class. */
unsigned ht_free_class_of(unsigned blocks);
unsigned ht_free_class_min(unsigned class);
/* The lowest class of which each run has at least so many blocks. */
unsigned ht_free_class_with(unsigned blocks);

bool ht_free_index_is_whole(const struct ht_free_index *x, uint64_t group);
/* The longest run that begins in the group; of a whole group HT_GROUP_BLOCKS. */
unsigned ht_free_index_longest(const struct ht_free_index *x, uint64_t group);
/* The group changed. whole: all its blocks are free; longest counts only if they are not. */
void ht_free_index_set(struct ht_free_index *x, uint64_t group, bool whole, unsigned longest);
/* The group is, or is not, in HT_FREE_FREED, HT_FREE_CLOSED, HT_FREE_SPARSE or HT_FREE_FIXED. */
void ht_free_index_note(struct ht_free_index *x, unsigned bitmap, uint64_t group, bool in);
bool ht_free_index_is_fixed(const struct ht_free_index *x, uint64_t group);
bool ht_free_index_is_closed(const struct ht_free_index *x, uint64_t group);
/* The first group of the class at or after from, or HT_NO_GROUP; the same, and around the end. */
uint64_t ht_free_index_next(const struct ht_free_index *x, unsigned class, uint64_t from);
uint64_t ht_free_index_around(const struct ht_free_index *x, unsigned class, uint64_t from);
/* Prefetches what a change of this group of the class touches, and finding the next groups. */
void ht_free_index_prefetch(const struct ht_free_index *x, unsigned class, uint64_t group);
/* The last group of the class, or HT_NO_GROUP. */
uint64_t ht_free_index_last(const struct ht_free_index *x, unsigned class);
/* How many groups below this one, and in the same 64, are whole without a gap. */
unsigned ht_free_index_whole_below(const struct ht_free_index *x, uint64_t group);
/* tests: asserts that the group is in this class alone, and that the summaries of its words are right. */
void ht_free_index_verify(const struct ht_free_index *x, uint64_t group, bool whole, unsigned longest);
