/* SPDX-License-Identifier: Apache-2.0 */
/* mountflags.h - the words of mount(8) that are flags of mount(2). Pure. */
#pragma once

#include "tiering/base/base.h"

/* How a list of words changes flags: those of clear first, then those of set. */
struct ht_mount_flags {
    unsigned long set, clear;
};

/*
 * Adds a word to a list; later words win. False: it is no flag. at_start: libfuse, and its helper for users other than
 * root, take it.
 */
bool ht_mount_flags_add(struct ht_mount_flags *f, const char *word, bool *out_at_start);
/* All words, for help: NULL after the last. */
const char *ht_mount_flag_word(unsigned i);
/* The flags of a mount whose options the kernel lists so ("rw,nosuid,relatime"); may be called for several lists. */
unsigned long ht_mount_flags_of(const char *options);
/* Flags that a new mount cannot have from the beginning: set them by mount(2) once it is there. */
unsigned long ht_mount_flags_later(const struct ht_mount_flags *f);
