/* SPDX-License-Identifier: Apache-2.0 */
/*
 * space_map.h - inside space/: which blocks of one device are free, and where a request finds its blocks; and the space
 * of all devices, for alloc.c and for tests that verify it.
 *
 *   taken    one bit per block, in groups of 256 (1 MiB); bits beyond the end of the device are set
 *   index    the groups by the longest free run that begins in them (free_index.c)
 *
 * A run of a group may end in the next group, if that one is broken: not wholly free. So blocks at the end of a group
 * serve requests together with those at the begin of the next one, and no whole group is broken for a request that fits
 * beside others.
 *
 * A request of 256 blocks takes the next whole group. A smaller one takes, in this order,
 *
 *   1. the blocks behind the last small request, so that content that is written in order lies in order;
 *   2. a run that is little longer, in a broken group;
 *   3. the shortest class of longer runs in broken groups;
 *   4. a whole group behind the small requests, or the last stretch of whole groups of the device: small requests have
 *      their own groups, which grow towards each other, and whole groups stay.
 *
 * A closed group serves no request, and its free blocks stay free. Compaction closes groups that it empties. If there
 * is no other run for a request the caller opens all closed groups before it takes pieces.
 *
 * A sparse group has few taken blocks, but some. Compaction finds these in a bitmap of their own.
 *
 * Nothing contiguous is left: pieces, the longest first. Each takes a bounded number of steps whatever the size of the
 * device and however full it is; a request in pieces takes so many for each group that it uses.
 *
 * Everything is zero where all blocks are free. So a region that was never in use takes no memory.
 *
 * Not locked: the allocator's caller guards it. Nothing here allocates memory after the map was made.
 */
#pragma once

#include "tiering/space/alloc.h"

/* ------------------------------------------------------------------ index */

/*
 * The groups of a device by the longest run of free blocks that begins in them.
 *
 * A class is a range of lengths: exact up to 7 blocks, then four classes for each power of two, 256, and
 * HT_FREE_WHOLE for a group of which every block is free. A group is in the class of its longest run, or in none. Each
 * class is a bitmap of groups with a summary bit for each word, summaries of these, and so on. So finding a group of a
 * class costs one word for each level, however large and however full the device is.
 *
 * The words of all classes for the same 64 groups are neighbours, so a change of class touches one or two lines of
 * memory. HT_FREE_WHOLE is stored inverted: everything is zero while everything is free, so memory follows what was
 * ever in use.
 */
enum {
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
/* Memory for each 64 groups, without the summaries. */
#define HT_FREE_WORD_BYTES (64 * sizeof(uint16_t) + HT_FREE_BITMAPS * sizeof(uint64_t))

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

/* The class of runs of this length, 1 to HT_GROUP_BLOCKS; the shortest run of a class. */
unsigned ht_free_class_of(unsigned blocks);
unsigned ht_free_class_min(unsigned class);
/* The lowest class of which each run has at least so many blocks. */
unsigned ht_free_class_with(unsigned blocks);

/* Is the group in this class or bitmap? */
bool ht_free_index_has(const struct ht_free_index *x, unsigned class, uint64_t group);
/* The longest run that begins in the group; of a whole group HT_GROUP_BLOCKS. */
unsigned ht_free_index_longest(const struct ht_free_index *x, uint64_t group);
/* The group changed. whole: all its blocks are free; longest counts only if they are not. */
void ht_free_index_set(struct ht_free_index *x, uint64_t group, bool whole, unsigned longest);
/* The group is, or is not, in HT_FREE_FREED, HT_FREE_CLOSED, HT_FREE_SPARSE or HT_FREE_FIXED. */
void ht_free_index_note(struct ht_free_index *x, unsigned bitmap, uint64_t group, bool in);
/* The first group of the class at or after from, or HT_NO_GROUP. */
uint64_t ht_free_index_next(const struct ht_free_index *x, unsigned class, uint64_t from);
/* Prefetches what a change of this group of the class touches, and finding the next groups. */
void ht_free_index_prefetch(const struct ht_free_index *x, unsigned class, uint64_t group);
/* The last group of the class, or HT_NO_GROUP. */
uint64_t ht_free_index_last(const struct ht_free_index *x, unsigned class);
/* How many groups below this one, and in the same 64, are whole without a gap. */
unsigned ht_free_index_whole_below(const struct ht_free_index *x, uint64_t group);
/* tests: asserts that the group is in this class alone, and that the summaries of its words are right. */
void ht_free_index_verify(const struct ht_free_index *x, uint64_t group, bool whole, unsigned longest);

/* -------------------------------------------------------------------- map */

struct ht_space_map {
    uint64_t blocks, groups, free_blocks;
    uint64_t *taken;
    struct ht_free_index index;
    uint64_t *touched; /* a bit per page of taken: anything was ever in use there, so it has memory */
    uint64_t pages_touched;
    bool index_deferred; /* changes touch the bits alone, and nothing is taken */
    uint64_t whole_next; /* next fit: the group in which the search for a whole one continues */
    uint64_t small_next; /* the block behind the last small request */
};

struct ht_run {
    uint64_t block;
    uint32_t blocks;
};

/* All blocks are free. blocks may be 0: nothing is ever free. -ENOMEM */
int ht_space_map_init(struct ht_space_map *m, uint64_t blocks) HT_MUST_CHECK;
void ht_space_map_destroy(struct ht_space_map *m);
/* Heap of what was ever in use. */
uint64_t ht_space_map_bytes(const struct ht_space_map *m);

/* The first block with this state in [from, end), or end. Inside the device. */
uint64_t ht_space_map_find(const struct ht_space_map *m, uint64_t from, uint64_t end, bool taken);
/* How many blocks of a group are taken. */
unsigned ht_space_map_taken(const struct ht_space_map *m, uint64_t group);
/* All of these blocks change to taken, or to free. */
void ht_space_map_set(struct ht_space_map *m, uint64_t block, uint64_t count, bool taken);
/* From now on changes leave the index behind, or it catches up: cheaper for a mount that marks all that is in use. */
void ht_space_map_defer_index(struct ht_space_map *m, bool defer);
void ht_space_map_prefetch(const struct ht_space_map *m, uint64_t block);

/* Takes so many blocks, 1 to HT_GROUP_BLOCKS, in one run. False: finds no such run, and nothing changed. */
bool ht_space_map_take(struct ht_space_map *m, uint32_t blocks, struct ht_run *out);
/*
 * Takes some of the longest runs, at most so many blocks in all, and at least one block while one is free. It ends when
 * what is left may fit into one run. Returns the number of runs, at most HT_GROUP_BLOCKS.
 */
unsigned ht_space_map_take_pieces(struct ht_space_map *m, uint32_t blocks, struct ht_run out[HT_GROUP_BLOCKS]);

/* These blocks stay taken, and their groups are never sparse. */
void ht_space_map_fix(struct ht_space_map *m, uint64_t block, uint64_t count);

/* Closes a group, or opens a closed one. */
void ht_space_map_set_closed(struct ht_space_map *m, uint64_t group, bool closed);
/* False: none was closed. */
bool ht_space_map_open_all(struct ht_space_map *m);

/* These blocks, which are free now, are to be discarded. */
void ht_space_map_note_freed(struct ht_space_map *m, uint64_t block, uint64_t count);
/*
 * Takes free blocks for a discard: runs of at least HT_DISCARD_BLOCKS_MIN, at most so many blocks in all and n_max
 * runs, from the groups at or after *from that have noted blocks, or from all groups. Sets *from to the group where the
 * next call continues, or to HT_NO_GROUP: that was the last one. Returns the number of runs. It looks at a bounded
 * number of groups, so it may return 0 before the end. Whole groups longer than blocks_max stay.
 */
enum { HT_DISCARD_BLOCKS_MIN = 16 };
unsigned ht_space_map_take_freed(struct ht_space_map *m, bool all, uint64_t *from, uint32_t blocks_max,
                                 struct ht_run out[], unsigned n_max);

/* tests: asserts that bits, index and counts agree. Returns the free blocks. */
uint64_t ht_space_map_verify(const struct ht_space_map *m);

/* ------------------------------------------------------------ all devices */

struct ht_alloc_map {
    struct ht_space_map map;
    uint64_t bad_blocks;
    uint64_t discarding; /* blocks that are taken while the device forgets them */
    uint64_t deferred;   /* blocks that are pending_free otherwise */
    bool offline, failing, capacity;
    uint32_t share;    /* as in struct ht_place_device */
    int64_t credit[2]; /* of new content, of rewritten content: a lot of one would hide what the other owes */
};

struct ht_alloc {
    unsigned device_count;
    uint64_t total, free_blocks, pending_free, reserved;
    bool notes_freed;
    struct ht_alloc_map device[HT_DEVICES_MAX];
};
