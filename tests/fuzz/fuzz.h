/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz.h - the common part of the fuzz targets.
 *
 * A target is one file: fuzz_NAME.c defines LLVMFuzzerTestOneInput and is linked with libFuzzer (make fuzz) or with
 * replay.c, which runs the inputs of corpus/NAME once (make check). A target takes any bytes, keeps nothing from one
 * input to the next, and ends by itself only where it should never have come: MUST, a sanitizer, time or memory.
 */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include "tiering/base/base.h"
#include "tiering/base/buf.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(x)                                                                   \
    do {                                                                          \
        if (!(x)) {                                                               \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #x); \
            abort();                                                              \
        }                                                                         \
    } while (0)

/* A length of two bytes and as many bytes as there are, at most that many: every input is some sequence of these. */
static inline const uint8_t *fuzz_piece(struct ht_reader *in, size_t *out_len)
{
    size_t left = (size_t)(in->end - in->p);

    *out_len = 0;
    if (left < 2) {
        in->p = in->end;
        return in->p;
    }
    size_t len = ht_get_u16(in);
    *out_len = len < left - 2 ? len : left - 2;
    return ht_get_bytes(in, *out_len);
}

/* Returns a copy that ends in a NUL; free it. It has a block of its own, so that ASan sees a read beyond it. */
static inline char *fuzz_text(const uint8_t *data, size_t len)
{
    char *text = malloc(len + 1);

    MUST(text);
    if (len)
        memcpy(text, data, len);
    text[len] = '\0';
    return text;
}
