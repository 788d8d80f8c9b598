/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample.h - a small store with something of everything in it, and all that can be read of a store, as numbers to
 * compare: for damaged ones, so nothing that is read is trusted.
 */
#pragma once

#include "tests/support/harness.h"

enum { SAMPLE_DEVICE_BYTES = 8 << 20, SAMPLE_SALT = 0x68697472 };

/* One device with an empty store, its salt the same from run to run: so that a log means the same. */
void sample_format(struct harness *k);
/*
 * Files, directories, links, holes, clones, attributes, a model of two parameters with two steps. Calls after (may be
 * NULL) whenever everything so far is durable.
 */
void sample_populate(const struct harness *k, void (*after)(void *ctx), void *ctx);

/* A copy of the device's bytes as they are, to go back to; free it. */
uint8_t *sample_keep(const struct harness *k);
/* Restores the copy. Copies only blocks that changed since, so that a call costs little. */
void sample_restore(const struct harness *k, const uint8_t *kept);

/* Numbers of readable things, each for path, kind and content; errors are counted. */
struct sample_items {
    uint64_t *item;
    size_t count, cap, errors;
};
/* Reads everything that names lead to. Adds to out. */
void sample_read(const struct harness *k, struct sample_items *out);
void sample_sort(struct sample_items *items);
/* items is sorted. */
bool sample_has(const struct sample_items *items, uint64_t item);
void sample_free(struct sample_items *items);
