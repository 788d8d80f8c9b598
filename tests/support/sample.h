/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample.h - a small store with something of everything in it, and all that can be read of a store, as numbers to
 * compare: for damaged ones, so nothing that is read is trusted.
 */
#ifndef HITRAIN_TESTS_SUPPORT_SAMPLE_H
#define HITRAIN_TESTS_SUPPORT_SAMPLE_H

#include "tests/support/stack.h"

enum { SAMPLE_DEVICE_BYTES = 8 << 20, SAMPLE_SALT = 0x68697472 };

/* One device with an empty store, its salt the same from run to run: so that a log means the same. */
void sample_format(struct stack *k);
/*
 * Files, directories, links, holes, clones, attributes, a model of two parameters with two steps. after (may be NULL) is
 * called whenever all of it is durable.
 */
void sample_populate(const struct stack *k, void (*after)(void *ctx), void *ctx);

/* A copy of the device's bytes as they are, to go back to; free it. */
uint8_t *sample_keep(const struct stack *k);
/* Back to it: what was touched since, so that it costs little. */
void sample_restore(const struct stack *k, const uint8_t *kept);

/* Numbers of things that could be read, each for path, kind and content; what gave an error is counted. */
struct sample_items {
    uint64_t *item;
    size_t count, cap, errors;
};
/* Reads everything that names lead to. Adds to out. */
void sample_read(const struct stack *k, struct sample_items *out);
void sample_sort(struct sample_items *items);
/* items is sorted. */
bool sample_has(const struct sample_items *items, uint64_t item);
void sample_free(struct sample_items *items);

#endif
