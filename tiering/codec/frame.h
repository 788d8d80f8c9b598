/* SPDX-License-Identifier: Apache-2.0 */
/*
 * frame.h - HT_CODEC_PLANES: a chunk's bytes as a compressed frame (struct ht_disk_planes). Without I/O and locks.
 *
 *     header | plane 0 | ... | plane n-1 | bytes after the last whole element
 *
 * A plane is stored as it is, or through libzstd. The same bytes always give the same frame, on every machine with the
 * same version of libzstd. With another version they may give another frame: every version decodes both, and only
 * deduplication finds less.
 *
 * A frame comes from a device, so the decoder believes nothing. It writes no more than the caller asks for, reads
 * nothing outside the frame, and takes no memory, whatever a frame says.
 */
#pragma once

#include "tiering/base/base.h"

/* The memory of one thread that encodes: 2 MiB and what libzstd takes, however many frames it encodes. */
struct ht_encoder;
int ht_encoder_new(struct ht_encoder **out) HT_MUST_CHECK;
void ht_encoder_free(struct ht_encoder *e);
uint64_t ht_encoder_bytes(const struct ht_encoder *e);
/*
 * Encodes at most HT_CHUNK_BYTES. The frame is at least 1/16 and a block smaller than they; out has room for as much as
 * raw. Returns the frame's bytes, 0 if there is no such frame, or -ENOMEM.
 */
int ht_codec_encode(struct ht_encoder *e, const void *raw, uint32_t bytes, void *out) HT_MUST_CHECK;

/* The memory of one thread that decodes: 1 MiB and what libzstd takes. */
struct ht_decoder;
int ht_decoder_new(struct ht_decoder **out) HT_MUST_CHECK;
void ht_decoder_free(struct ht_decoder *d);
uint64_t ht_decoder_bytes(const struct ht_decoder *d);
/*
 * Writes the first `bytes` bytes of the content to out, which may be the memory of the frame itself: the decoder reads
 * all of the frame first. -EUCLEAN: the frame is damaged, or has less content; then out has any bytes.
 */
int ht_codec_decode(struct ht_decoder *d, const void *frame, uint32_t frame_bytes, void *out,
                    uint32_t bytes) HT_MUST_CHECK;

/*
 * Planes are the bytes of equal rank of all elements. Pure.
 *
 *     raw      a0 a1 b0 b1 c0 c1 ...        elements of two bytes
 *     planes   a0 b0 c0 ...   a1 b1 c1 ...
 *
 * In floating-point numbers one plane holds signs and exponents, of which few values are frequent. The others hold bits
 * of mantissas, which are near to random. A sample of the bytes shows which element size gives the smallest planes, so
 * no caller has to know what the bytes are.
 */
enum { HT_PLANES_MAX = 4 };

/* What the sample shows. The same bytes give the same answer on every machine. */
struct ht_planes {
    unsigned count;            /* of planes: the bytes of an element, 1, 2 or 4 */
    bool coded[HT_PLANES_MAX]; /* the plane gets at least 1/16 smaller */
    bool worth;                /* the whole frame does */
};
void ht_planes_sample(const uint8_t *raw, size_t bytes, struct ht_planes *out);

/* Gathers n elements of count bytes into planes of n bytes each. */
void ht_planes_split(uint8_t *const *plane, unsigned count, const uint8_t *raw, size_t n);
/* The reverse. Nothing overlaps. */
void ht_planes_join(uint8_t *raw, unsigned count, const uint8_t *const *plane, size_t n);
